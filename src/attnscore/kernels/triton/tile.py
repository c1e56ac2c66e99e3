"""Functions of one tile of scores, for all kernels: masks, bias, caps, dropout.

`i` are positions of queries and `j` of keys, shaped to broadcast: (M, 1) and (1, N), or the tile is transposed and they
are (1, M) and (N, 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnscore.kernels.triton.additive import additive_scores
from attnscore.kernels.triton.custom import channel_scores, scaled_derivative, value_of
from attnscore.kernels.triton.operands import Side

# Values of FORM: those of `tiles.FORMS` in their order, and a custom score that is a sum over channels.
INNER, DISTANCE, ADDITIVE, CHANNELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def base(x, b, h, g):
    """Return the pointer of an `Operand` at (batch, head, group)."""
    return x.data + b.to(tl.int64) * x.batch + h.to(tl.int64) * x.head + g.to(tl.int64) * x.group


@triton.jit
def side_of(x, b, h, g):
    """Return the `Side` of an `Operand` at (batch, head, group)."""
    return Side(base(x, b, h, g), x.row, x.column)


@triton.jit
def vectors(side, rows, columns, live, dim):
    """Return the numbers of a `Side` at int64 rows and columns below `dim`, which broadcast; 0 outside of `live`."""
    return tl.load(side.data + rows * side.row + columns * side.column, mask=live & (columns < dim), other=0.0)


@triton.jit
def matrix_of(z, heads, groups):
    """Return batch row, head and group of matrix number z."""
    return z // (heads * groups), z // groups % heads, z % groups


@triton.jit
def is_finite(x):
    """Return whether each number is neither NaN nor infinite."""
    x = x.to(tl.float32)
    return x - x == 0


@triton.jit
def is_nan(x):
    """Return whether each number is NaN."""
    return x != x


@triton.jit
def tanh(x):
    """Return tanh with a relative error of a few float32 eps, without the device library, which has no interpreter."""
    magnitude = tl.abs(x)
    e = tl.exp2(magnitude * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0, -large, large)
    y = x * x
    # Taylor series to x^9: the quotient would cancel near 0.
    small = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(magnitude < 0.25, small, large)


@triton.jit
def capped(s, CAPS: tl.constexpr):
    """Return the scores after the caps, in order: factor * cap * tanh(s / cap); cap 0 stands for infinity."""
    for k in tl.static_range(len(CAPS)):
        if CAPS[k][0] == 0:
            s = s * CAPS[k][1]
        else:
            s = (CAPS[k][0] * CAPS[k][1]) * tanh(s * (1.0 / CAPS[k][0]))
    return s


@triton.jit
def capped_slope(s, CAPS: tl.constexpr):
    """Return the derivative of `capped`."""
    slope = s * 0.0 + 1.0
    for k in tl.static_range(len(CAPS)):
        if CAPS[k][0] == 0:
            s = s * CAPS[k][1]
            slope = slope * CAPS[k][1]
        else:
            bounded = tanh(s * (1.0 / CAPS[k][0]))
            s = (CAPS[k][0] * CAPS[k][1]) * bounded
            slope = slope * (CAPS[k][1] * (1.0 - bounded * bounded))
    return slope


@triton.jit
def segments(ends, line, length, BLOCK: tl.constexpr, TESTED: tl.constexpr):
    """Return the tiles that a tile visits: some_lo, all_lo, all_hi, some_hi (`ranges`), all where there are no ends."""
    if ends is None:
        some_lo, some_hi = 0, tl.cdiv(length, BLOCK)
        if TESTED:
            all_lo, all_hi = 0, 0
        else:
            all_lo, all_hi = 0, length // BLOCK
    else:
        at = ends + line.to(tl.int64) * 4
        some_lo, all_lo, all_hi, some_hi = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return some_lo, all_lo, all_hi, some_hi


@triton.jit
def key_segments(masking, interval, b, tile, n_q, n_k, BM: tl.constexpr, BN: tl.constexpr, TESTED: tl.constexpr):
    """Return the `segments` of key tiles that a query tile visits in one of its intervals."""
    line = 0
    if masking.ends is not None:
        # One line of ends for each batch row, or for all.
        of_batch = tl.minimum(b, masking.ends_batch - 1)
        line = (interval * masking.ends_batch + of_batch) * tl.cdiv(n_q, BM) + tile
    return segments(masking.ends, line, n_k, BN, TESTED)


@triton.jit
def steps_of(some_lo, all_lo, all_hi, some_hi, FULL: tl.constexpr):
    """Return how many tiles are full, or are not: those on either side of the full ones."""
    if FULL:
        return all_hi - all_lo
    else:
        return all_lo - some_lo + some_hi - all_hi


@triton.jit
def tile_of_step(step, some_lo, all_lo, all_hi, FULL: tl.constexpr):
    """Return the tile of a step."""
    if FULL:
        return all_lo + step
    else:
        left = all_lo - some_lo
        return tl.where(step < left, some_lo + step, all_hi + step - left)


@triton.jit
def attended(masking, interval, b, h, g, i, j, n_q, n_k):
    """Return the unmasked pairs of a tile, of one of the intervals of each query."""
    live = (i < n_q) & (j < n_k)
    found = live
    if masking.start is not None:
        at = interval * masking.interval + b.to(tl.int64) * masking.batch
        start = tl.load(masking.start + at + i, mask=i < n_q, other=0)
        stop = tl.load(masking.stop + at + i, mask=i < n_q, other=0)
        found = found & (j >= start) & (j < stop)
    if masking.query_ids is not None:
        of_query = tl.load(masking.query_ids + b.to(tl.int64) * masking.query_ids_batch + i, mask=i < n_q, other=-1)
        of_key = tl.load(masking.key_ids + b.to(tl.int64) * masking.key_ids_batch + j, mask=j < n_k, other=-1)
        found = found & (of_query == of_key) & (of_query >= 0)
    if masking.array is not None:
        pairs = base(masking.array, b, h, g) + i.to(tl.int64) * masking.array.row + j * masking.array.column
        found = found & (tl.load(pairs, mask=live, other=0) != 0)
    return found


@triton.jit
def attended_by_any(masking, b, h, g, i, j, n_q, n_k, INTERVALS: tl.constexpr):
    """Return the unmasked pairs of a tile, of all intervals of each query."""
    found = attended(masking, 0, b, h, g, i, j, n_q, n_k)
    for interval in tl.static_range(1, INTERVALS):
        found = found | attended(masking, interval, b, h, g, i, j, n_q, n_k)
    return found


@triton.jit
def bias_of(bias, b, h, g, i, j, n_q, n_k, RELATIVE: tl.constexpr):
    """Return the bias of each pair; of pairs beyond the ends -inf."""
    live = (i < n_q) & (j < n_k)
    if RELATIVE:
        at = base(bias, b, h, g) + (j - i + (n_q - 1)) * bias.column
    else:
        at = base(bias, b, h, g) + i.to(tl.int64) * bias.row + j * bias.column
    return tl.load(at, mask=live, other=NEG_INF).to(tl.float32)


@triton.jit
def _mixed(x):
    """Mix 32 bits: `core.dropout` has the source."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _bits(x):
    """Return an int32 as uint32, also where it is 1 and so a constant."""
    return (tl.zeros((), tl.int32) + x).to(tl.uint32, bitcast=True)


@triton.jit
def kept(dropout, z, i, j, n_q):
    """Return whether dropout keeps each pair of matrix z: the bits of `core.dropout.kept`."""
    row = z.to(tl.int64) * n_q + i
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    stream = _mixed(low + _bits(dropout.low))
    stream = _mixed(stream + high + _bits(dropout.high))
    bits = _mixed(stream + j.to(tl.uint32) * 0x9E3779B9)
    return bits >= _bits(dropout.threshold)


@triton.jit
def squared_distance(query, key, i, j, live_i, live_j, dim):
    """Return |q_i - k_j|^2, summed channel by channel; `query` and `key` are `Side`."""
    total = (i + j).to(tl.float32) * 0.0
    for c in tl.range(0, dim):
        q = tl.load(query.data + i.to(tl.int64) * query.row + c * query.column, mask=live_i, other=0.0).to(tl.float32)
        k = tl.load(key.data + j.to(tl.int64) * key.row + c * key.column, mask=live_j, other=0.0).to(tl.float32)
        difference = q - k
        total += difference * difference
    return total


@triton.jit
def distance_gradient(acc, ds, mine, other, i, j, live_i, live_j, dim, D: tl.constexpr):
    """Return acc + sum_j ds_ij (mine_i - other_j), (M, D): the gradient of half the squared distance."""
    channel = tl.arange(0, D)[None, :]
    for c in tl.range(0, dim):
        x = tl.load(mine.data + i.to(tl.int64) * mine.row + c * mine.column, mask=live_i, other=0.0).to(tl.float32)
        y = tl.load(other.data + j.to(tl.int64) * other.row + c * other.column, mask=live_j, other=0.0).to(tl.float32)
        # A masked pair has ds = 0, whose product with a non-finite difference would be NaN.
        column = tl.sum(tl.where(ds == 0, 0.0, ds * (x - y)), 1)
        acc += tl.where(channel == c, column[:, None], 0.0)
    return acc


@triton.jit
def pair_scores(
    q, k, query_bias, key_bias, query, key, shared, h, g, i, j, live_i, live_j, dim, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile before a custom function of them, caps, bias and mask.

    Inner form: `q` and `k` are the matrices whose product is the tile, and the biases are (M, 1) and (1, N) or
    transposed. Other forms read `query` and `key` by channels.
    """
    if FORM == INNER:
        s = tl.dot(q, k, input_precision=PRECISION) * scale
        if query_bias is not None:
            s += query_bias
        if key_bias is not None:
            s += key_bias
    elif FORM == DISTANCE:
        s = squared_distance(query, key, i, j, live_i, live_j, dim) * -scale
    elif FORM == CHANNELS:
        s = channel_scores(query, key, shared, h, g, i, j, live_i, live_j, dim, FUNCTION)
    else:
        s = additive_scores(query, key, shared, i, j, dim, slope, FUNCTION)
    return s


@triton.jit
def function_scores(s, shared, h, g, FORM: tl.constexpr, FUNCTION: tl.constexpr):
    """Return the custom function of the scores of `pair_scores`, where there is one."""
    if (FORM == INNER or FORM == DISTANCE) and FUNCTION is not None:
        return value_of(s, shared, h, g, FUNCTION)
    else:
        return s


@triton.jit
def function_gradient(ds, x, shared, h, g, FORM: tl.constexpr, DERIVATIVE: tl.constexpr):
    """Return the gradient of the scores of `pair_scores`, from that of their custom function where there is one."""
    if (FORM == INNER or FORM == DISTANCE) and DERIVATIVE is not None:
        return scaled_derivative(ds, x, shared, h, g, DERIVATIVE, 0)
    else:
        return ds
