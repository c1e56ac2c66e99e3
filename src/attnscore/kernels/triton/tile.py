"""Functions of one tile of scores, for all kernels: its queries and keys, their scores, caps, bias, mask, dropout.

`i` are positions of queries and `j` of keys, shaped to broadcast: (M, 1) and (1, N), or the tile is transposed and they
are (1, M) and (N, 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnscore.kernels.triton import is_interpreted
from attnscore.kernels.triton.additive import additive_scores
from attnscore.kernels.triton.custom import channel_of, channel_scores, load_parameters, scaled_derivative
from attnscore.kernels.triton.operands import Side

# Values of FORM: `tiles.FORMS` in their order, and a custom score that is a sum over channels.
INNER, DISTANCE, ADDITIVE, CHANNELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


class Matrix(NamedTuple):
    """One matrix of scores: its number, batch row, head and group."""

    z: Any
    b: Any
    h: Any
    g: Any


class Segments(NamedTuple):
    """The tiles that a tile visits (`ranges`): any_start to any_stop, of which full_start to full_stop are full."""

    any_start: Any
    full_start: Any
    full_stop: Any
    any_stop: Any


class SideTile(NamedTuple):
    """Some queries or keys of a matrix."""

    side: Any
    at: Any
    """Positions, shaped to broadcast."""
    live: Any
    """Whether each position is below the length."""
    vectors: Any
    """INNER: the queries or keys of the product. Other forms read `side` channel by channel; this is then `live`."""


def _with_types(x: Any) -> Any:
    if not isinstance(x, tl.tuple):
        return x
    parts = [_with_types(part) for part in x.values]
    return tl.tuple(parts, tl.tuple_type([part.type for part in parts], x.type.fields))


if is_interpreted():

    def with_types(x: Any) -> Any:
        """Return the argument."""
        return x

else:

    @tl.core.builtin
    def with_types(x: Any, _semantic: Any = None) -> Any:
        """Return an argument of a kernel whose tuple types agree with the types of their parts.

        Triton 3.6 specialises a stride of 1 to a constant but leaves the type of the enclosing tuple unchanged. A loop
        reads that type, and the stride became None.
        """
        return _with_types(x)


@triton.jit
def base(x, m):
    """Return the pointer of an `Operand` at the batch row, head and group of a `Matrix`."""
    return x.data + m.b.to(tl.int64) * x.batch + m.h.to(tl.int64) * x.head + m.g.to(tl.int64) * x.group


@triton.jit
def side_of(x, m):
    """Return the `Side` of an `Operand` of a `Matrix`."""
    return Side(base(x, m), x.row, x.column)


@triton.jit
def vectors(side, rows, columns, live, dim):
    """Return the numbers of a `Side` at int64 rows and columns below `dim`, which broadcast; 0 outside of `live`."""
    return tl.load(side.data + rows * side.row + columns * side.column, mask=live & (columns < dim), other=0.0)


@triton.jit
def store_vectors(target, m, at, d, live, dim, x):
    """Store numbers (positions, channels) in an `Operand`, at positions that are live and channels below `dim`."""
    pointers = base(target, m) + at.to(tl.int64) * target.row + d * target.column
    tl.store(pointers, x.to(target.data.dtype.element_ty), mask=live & (d < dim))


@triton.jit
def side_tile(side, at, d, n, dim, FORM: tl.constexpr, FULL: tl.constexpr = False):
    """Return the `SideTile` of positions `at`, whose vectors are loaded for a matrix product alone (`INNER`).

    `at` and channels `d` are a column and a row, in either order. `FULL`: all positions are below `n`.
    """
    live = at < n
    if FORM == INNER:
        return SideTile(side, at, live, vectors(side, at.to(tl.int64), d, True if FULL else live, dim))
    else:
        return SideTile(side, at, live, live)  # the last in place of vectors: no other form reads them


@triton.jit
def side_bias(bias, m, tile):
    """Return the query or key bias of each position of a `SideTile`."""
    return tl.load(base(bias, m) + tile.at.to(tl.int64) * bias.row, mask=tile.live, other=0.0).to(tl.float32)


@triton.jit
def matrix_of(z, heads, groups):
    """Return the `Matrix` with the number `z`."""
    return Matrix(z, z // (heads * groups), z // groups % heads, z % groups)


@triton.jit
def scale_of(scale, scales, m, sizes):
    """Return the scale of a matrix: `scale`, or the scale of its head where there are `scales`."""
    if scales is not None:
        scale = tl.load(scales + m.h * sizes.groups + m.g)
    return scale


@triton.jit
def is_finite(x):
    """Return whether each number is neither NaN nor infinite."""
    x = x.to(tl.float32)
    return x - x == 0


@triton.jit
def finite_of(x, is_bad):
    """Return `x` with 0 in place of NaN and infinities, and 1 where there were any, else `is_bad`."""
    finite = is_finite(x)
    return tl.where(finite, x, 0.0), tl.maximum(is_bad, 1 - tl.min(finite.to(tl.int32)))


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
    """Return the scores after the caps, factor * cap * tanh(s / cap) in order, and their derivative; cap 0: no tanh."""
    slope = s * 0.0 + 1.0
    for k in tl.static_range(len(CAPS)):
        if CAPS[k][0] == 0:
            s = s * CAPS[k][1]
            slope = slope * CAPS[k][1]
        else:
            bounded = tanh(s * (1.0 / CAPS[k][0]))
            s = (CAPS[k][0] * CAPS[k][1]) * bounded
            slope = slope * (CAPS[k][1] * (1.0 - bounded * bounded))
    return s, slope


@triton.jit
def segments(ends, line, length, BLOCK: tl.constexpr, TESTED: tl.constexpr):
    """Return the `Segments` of a line of ends; without ends, of all tiles. `TESTED`: none is full (`ranges`)."""
    if ends is None:
        any_start, any_stop = 0, tl.cdiv(length, BLOCK)
        if TESTED:
            full_start, full_stop = 0, 0
        else:
            full_start, full_stop = 0, length // BLOCK
    else:
        at = ends + line.to(tl.int64) * 4
        any_start, full_start, full_stop, any_stop = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return Segments(any_start, full_start, full_stop, any_stop)


@triton.jit
def key_segments(masking, interval, m, tile, sizes, BM: tl.constexpr, BN: tl.constexpr, TESTED: tl.constexpr):
    """Return the `segments` of key tiles that a query tile visits in one of its intervals."""
    line = 0
    if masking.ends is not None:
        # One line of ends for each batch row, or for all.
        batch_line = tl.minimum(m.b, masking.ends_batch - 1)
        line = (interval * masking.ends_batch + batch_line) * tl.cdiv(sizes.n_q, BM) + tile
    return segments(masking.ends, line, sizes.n_k, BN, TESTED)


@triton.jit
def steps_of(visited, FULL: tl.constexpr):
    """Return the number of full tiles of `Segments`; not `FULL`: of the others, which are on either side of them."""
    if FULL:
        return visited.full_stop - visited.full_start
    else:
        return visited.full_start - visited.any_start + visited.any_stop - visited.full_stop


@triton.jit
def tile_of_step(step, visited, FULL: tl.constexpr):
    """Return the tile of a step: the step counts the tiles as `steps_of` does."""
    if FULL:
        return visited.full_start + step
    else:
        left = visited.full_start - visited.any_start
        return tl.where(step < left, visited.any_start + step, visited.full_stop + step - left)


@triton.jit
def unmasked_in_interval(masking, interval, m, i, j, sizes):
    """Return which pairs of a tile are unmasked and in interval number `interval` of their query."""
    live = (i < sizes.n_q) & (j < sizes.n_k)
    unmasked = live
    if masking.start is not None:
        at = interval * masking.interval + m.b.to(tl.int64) * masking.batch
        start = tl.load(masking.start + at + i, mask=i < sizes.n_q, other=0)
        stop = tl.load(masking.stop + at + i, mask=i < sizes.n_q, other=0)
        unmasked = unmasked & (j >= start) & (j < stop)
    if masking.query_ids is not None:
        ids, batch = masking.query_ids, m.b.to(tl.int64)
        query_id = tl.load(ids + batch * masking.query_ids_batch + i, mask=i < sizes.n_q, other=-1)
        key_id = tl.load(masking.key_ids + batch * masking.key_ids_batch + j, mask=j < sizes.n_k, other=-1)
        unmasked = unmasked & (query_id == key_id) & (query_id >= 0)
    if masking.array is not None:
        pairs = base(masking.array, m) + i.to(tl.int64) * masking.array.row + j.to(tl.int64) * masking.array.column
        unmasked = unmasked & (tl.load(pairs, mask=live, other=0) != 0)
    return unmasked


@triton.jit
def unmasked_in_any_interval(masking, m, i, j, sizes, INTERVALS: tl.constexpr):
    """Return which pairs of a tile are unmasked, in any interval of each query."""
    unmasked = unmasked_in_interval(masking, 0, m, i, j, sizes)
    for interval in tl.static_range(1, INTERVALS):
        unmasked = unmasked | unmasked_in_interval(masking, interval, m, i, j, sizes)
    return unmasked


@triton.jit
def bias_of(bias, m, i, j, sizes, RELATIVE: tl.constexpr):
    """Return the bias of each pair, -inf beyond the last query or key."""
    live = (i < sizes.n_q) & (j < sizes.n_k)
    if RELATIVE:
        at = base(bias, m) + (j - i + (sizes.n_q - 1)) * bias.column
    else:
        at = base(bias, m) + i.to(tl.int64) * bias.row + j.to(tl.int64) * bias.column
    return tl.load(at, mask=live, other=NEG_INF).to(tl.float32)


@triton.jit
def with_bias(s, attends, bias, m, i, j, sizes, RELATIVE: tl.constexpr):
    """Return the scores plus the bias, and the pairs that attend: a bias of -inf masks one."""
    if bias is not None:
        pair_bias = bias_of(bias, m, i, j, sizes, RELATIVE)
        attends = attends & (pair_bias != NEG_INF)
        s += pair_bias
    return s, attends


@triton.jit
def _mix(x):
    """Mix 32 bits: `problem.dropout` has the source."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _bits(x):
    """Return the bits of an int32 as uint32. The addition makes a tensor of 1, which Triton passes as a constant."""
    return (tl.zeros((), tl.int32) + x).to(tl.uint32, bitcast=True)


@triton.jit
def keeps_by_dropout(dropout, z, i, j, n_q):
    """Return whether dropout keeps each pair of matrix z: the bits of `problem.dropout.keep_factors`."""
    row = z.to(tl.int64) * n_q + i
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    stream = _mix(low + _bits(dropout.low))
    stream = _mix(stream + high + _bits(dropout.high))
    bits = _mix(stream + j.to(tl.uint32) * 0x9E3779B9)
    return bits >= _bits(dropout.threshold)


@triton.jit
def squared_distance(queries, keys, dim):
    """Return |q_i - k_j|^2, summed channel by channel, as |q|^2 + |k|^2 - 2 q . k may cancel."""
    total = (queries.at + keys.at).to(tl.float32) * 0.0
    for c in tl.range(0, dim):
        difference = channel_of(queries, c) - channel_of(keys, c)
        total += difference * difference
    return total


@triton.jit
def distance_gradient(acc, ds, rows_side, cols_side, dim, D: tl.constexpr):
    """Return acc + sum_j ds_ij (row_i - col_j), (M, D): the gradient of the rows from half the squared distance."""
    channel = tl.arange(0, D)[None, :]
    for c in tl.range(0, dim):
        x, y = channel_of(rows_side, c), channel_of(cols_side, c)
        # A masked pair has ds = 0, whose product with a non-finite difference would be NaN.
        column = tl.sum(tl.where(ds == 0, 0.0, ds * (x - y)), 1)
        acc += tl.where(channel == c, column[:, None], 0.0)
    return acc


@triton.jit
def pair_scores(
    queries, keys, inputs, m, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, PRECISION: tl.constexpr, OF_KEYS: tl.constexpr = False,
):  # fmt: skip
    """Return the scores before a custom function of them, caps, bias and mask; `OF_KEYS`: the rows are keys."""
    if FORM == INNER:
        q, k = queries.vectors, keys.vectors
        s = tl.dot(k if OF_KEYS else q, q if OF_KEYS else k, input_precision=PRECISION) * scale
        if inputs.query_bias is not None:
            s += side_bias(inputs.query_bias, m, queries)
        if inputs.key_bias is not None:
            s += side_bias(inputs.key_bias, m, keys)
    elif FORM == DISTANCE:
        s = squared_distance(queries, keys, sizes.dim) * -scale
    elif FORM == CHANNELS:
        s = channel_scores(queries, keys, inputs.shared, m, sizes.dim, FUNCTION)
    else:
        q, k, w_v = queries.side, keys.side, base(inputs.shared, m)
        s = additive_scores(q, k, w_v, queries.at, keys.at, sizes.dim, slope, FUNCTION)
    return s


@triton.jit
def function_scores(s, shared, m, FORM: tl.constexpr, FUNCTION: tl.constexpr):
    """Return the custom function of `s`, the result of `pair_scores`; `s` itself where there is none."""
    if (FORM == INNER or FORM == DISTANCE) and FUNCTION is not None:
        x, s = s, FUNCTION(s, *load_parameters(shared, m, 0))
        tl.static_assert(
            s.shape == x.shape, "value of a custom score has to return one number for each of its argument"
        )
        # A product with an infinity counts as NaN, as under a mask on the CPU, even where the function makes it finite.
        s = tl.where(x - x == 0, s, float("nan")).to(tl.float32)
    return s


@triton.jit
def function_gradient(ds, x, shared, m, FORM: tl.constexpr, DERIVATIVE: tl.constexpr):
    """Return the gradient of `pair_scores` from `ds`, the gradient of its `function_scores`."""
    if (FORM == INNER or FORM == DISTANCE) and DERIVATIVE is not None:
        return scaled_derivative(ds, x, shared, m, DERIVATIVE, 0)
    else:
        return ds
