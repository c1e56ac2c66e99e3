"""The forward kernel: one program for each tile of queries of each matrix, the online softmax over its key tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnscore.kernels.triton.tile import (
    LOG2E,
    NEG_INF,
    bias_of,
    capped,
    finite_of,
    function_scores,
    is_finite,
    keeps_by_dropout,
    key_segments,
    matrix_of,
    pair_scores,
    scale_of,
    side_of,
    side_tile,
    steps_of,
    store_vectors,
    tile_of_step,
    unmasked_in_any_interval,
    unmasked_in_interval,
    vectors,
    with_bias,
    with_types,
)

LN2 = tl.constexpr(0.6931471805599453)
MOST_INT = tl.constexpr(2**31 - 1)
"""An index after all keys."""
LEAST_LOG = tl.constexpr(-1000.0)
"""Number in place of the logarithm of 0: its product with a weight of 0 is 0, not NaN."""


class Moments(NamedTuple):
    """Moments of the unmasked scores of some queries: their number, the sums of score - base and of its square."""

    count: Any
    base: Any
    """Mean of the first tile, so that the sums do not cancel."""
    sum: Any
    squares: Any


class Softmax(NamedTuple):
    """The online softmax of some queries after some of their keys; sums that are not requested stay 0.

    Sums are (queries, columns) until the last key: each lane of a warp adds its own numbers, and lanes are added once.
    """

    shifted_max: Any
    """Largest score less the base of `moments`, which is 0 where these are not requested."""
    total: Any
    """Sum of the weights in units of exp(shifted_max)."""
    sum_exp_logit: Any
    """Sum of each weight times its logarithm to base 2."""
    squares: Any
    """Sum of the squared weights."""
    moments: Any
    min_score: Any
    """Smallest unmasked score."""
    max_score: Any
    """Largest score, not shifted; only where `key` is requested."""
    key: Any
    """First key of the largest score; -1 before the first one."""


@triton.jit
def with_nonfinite(
    acc, masking, bias, side, m, positions, sizes,
    INTERVALS: tl.constexpr, RELATIVE: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return acc (positions, value_dim) with the NaN and infinities that each position attends, or is attended by.

    `positions` are (M, 1); `side` has the rows of the other side: of keys (`OF_KEYS`) or queries. A loop after all
    tiles, in place of a second product in each, which took twice the registers.
    """
    d, length = tl.arange(0, D)[None, :], sizes.n_k if OF_KEYS else sizes.n_q
    for tile in tl.range(0, tl.cdiv(length, BLOCK)):
        rows = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        x = vectors(side, rows.to(tl.int64), d, rows < length, sizes.value_dim)
        count = tl.where(tl.min(is_finite(x).to(tl.int32)) == 0, tl.minimum(BLOCK, length - tile * BLOCK), 0)
        for step in tl.range(0, count):
            other = tl.zeros((1, 1), tl.int32) + (tile * BLOCK + step)
            i, j = (positions, other) if OF_KEYS else (other, positions)
            attends = unmasked_in_any_interval(masking, m, i, j, sizes, INTERVALS)
            if bias is not None:
                attends = attends & (bias_of(bias, m, i, j, sizes, RELATIVE) != NEG_INF)
            y = vectors(side, other.to(tl.int64), d, True, sizes.value_dim).to(tl.float32)
            acc += tl.where(attends & (is_finite(y) == 0), y, 0.0)
    return acc


@triton.jit
def _mask_scores(s, inputs, interval, m, queries, keys, sizes, RELATIVE: tl.constexpr, FULL: tl.constexpr):
    """Return the scores with the bias, -inf where masked, and the pairs that attend; `FULL`: the mask leaves all."""
    if FULL:
        attends = queries.live & keys.live
    else:
        attends = unmasked_in_interval(inputs.masking, interval, m, queries.at, keys.at, sizes)
    s, attends = with_bias(s, attends, inputs.bias, m, queries.at, keys.at, sizes, RELATIVE)
    if not FULL or inputs.bias is not None:
        s = tl.where(attends, s, NEG_INF)
    return s, attends


@triton.jit
def _finite_max(shifted_max):
    """Return the largest score, 0 where it is -inf: all scores less it are -inf then, not NaN."""
    return tl.where(shifted_max == NEG_INF, 0.0, shifted_max)


@triton.jit
def _product(weight, log_weight):
    """Return weight * log2(weight), 0 where the weight is 0: one operation in place of a comparison and a selection."""
    return weight * tl.maximum(log_weight, LEAST_LOG)


@triton.jit
def _halves(x):
    """Return the left and right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _with_products(acc, x, y):
    """Return acc (queries, lanes) plus the products x * y (queries, columns), over every `lanes`-th column.

    These are multiply-adds; `tl.sum` would add in a tree, which takes half an addition more for each number.
    """
    if acc.shape[1] == 1:
        return acc + tl.sum(x * y, 1, keep_dims=True)
    elif x.shape[1] == acc.shape[1]:
        return acc + x * y
    else:
        left, right = _halves(x)
        also_left, also_right = _halves(y)
        return _with_products(_with_products(acc, left, also_left), right, also_right)


@triton.jit
def _lane_sums(x, LANES: tl.constexpr):
    """Return the sums (queries, lanes) of a tile (queries, columns) over every `LANES`-th column."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // LANES, LANES)), 1)


@triton.jit
def _add_pairs(x, count, y, other):
    """Add two pairs of a sum and a count, for `tl.reduce`."""
    return x + y, count + other


@triton.jit
def _subtract_base(old, s, attends, step, ALL: tl.constexpr):
    """Return the scores less the base, and the moments after a tile of them."""
    base = old.base
    # The compiler joins this and the product by the scale in one instruction.
    s = s - base[:, None]
    if ALL:
        tile_count = tl.zeros_like(old.count) + s.shape[1]
        if step == 0:  # after the first full tile each query has a base
            move = _first_mean(old.count, tl.sum(s, 1) / s.shape[1])
            base, s = base + move, s - move[:, None]
        x = s
    else:
        # Both in one sum, or the compiler computes the mask twice.
        total, tile_count = tl.reduce((tl.where(attends, s, 0.0), tl.where(attends, 1.0, 0.0)), 1, _add_pairs)
        move = _first_mean(old.count, total / tl.maximum(tile_count, 1.0))
        base, s = base + move, s - move[:, None]
        x = tl.where(attends, s, 0.0)
    total, squares = old.sum + _lane_sums(x, old.sum.shape[1]), _with_products(old.squares, x, x)
    return s, Moments(old.count + tile_count, base, total, squares)


@triton.jit
def _first_mean(count, mean):
    """Return the mean of a tile for queries without an earlier key, 0 for others."""
    return tl.where((count == 0) & is_finite(mean), mean, 0.0)


@triton.jit
def _with_tile(old, s, attends, keys, rows, step, ALL: tl.constexpr):
    """Return the softmax after a tile of scores, the tile's weights, and the factor that rescales earlier sums.

    `keys` are the indices of its keys, `ALL`: all pairs attend, in a tile that is number `step` of its kind.
    """
    LANES: tl.constexpr = old.total.shape[1]
    moments, min_score = old.moments, old.min_score
    if rows.min_score is not None:
        min_score = tl.minimum(min_score, tl.min(tl.where(attends, s, float("inf")), 1))
    max_score, key = old.max_score, old.key
    if rows.argmax_key is not None:
        tile_max = tl.max(s, 1)
        first = tl.min(tl.where(s == tile_max[:, None], keys, MOST_INT), 1)
        # Tiles do not come in the order of the keys.
        key = tl.where((tile_max > max_score) | ((tile_max == max_score) & (first < key)), first, key)
        max_score = tl.maximum(max_score, tile_max)
    if (rows.mean_score is not None) or (rows.var_score is not None):
        s, moments = _subtract_base(moments, s, attends, step, ALL)
    shifted_max = tl.maximum(old.shifted_max, tl.max(s, 1))
    max_log2 = _finite_max(shifted_max) * LOG2E
    log_p, log_alpha = s * LOG2E - max_log2[:, None], old.shifted_max * LOG2E - max_log2
    p, alpha = tl.exp2(log_p), tl.exp2(log_alpha)
    lane_alpha = alpha[:, None]
    sum_exp_logit, squares = old.sum_exp_logit, old.squares
    if rows.entropy is not None:
        rescaled = lane_alpha * sum_exp_logit + _product(alpha, log_alpha)[:, None] * old.total
        sum_exp_logit = _with_products(rescaled, p, tl.maximum(log_p, LEAST_LOG))
    if rows.sum_sq_weights is not None:
        squares = _with_products(lane_alpha * lane_alpha * squares, p, p)
    total = lane_alpha * old.total + _lane_sums(p, LANES)
    return Softmax(shifted_max, total, sum_exp_logit, squares, moments, min_score, max_score, key), p, alpha


@triton.jit
def _sum_lanes(softmax):
    """Return the softmax with its sums added over the lanes: one number a query."""
    old = softmax.moments
    moments = Moments(old.count, old.base, tl.sum(old.sum, 1), tl.sum(old.squares, 1))
    total, sum_exp_logit = tl.sum(softmax.total, 1), tl.sum(softmax.sum_exp_logit, 1)
    squares = tl.sum(softmax.squares, 1)
    return Softmax(
        softmax.shifted_max, total, sum_exp_logit, squares, moments, softmax.min_score, softmax.max_score, softmax.key
    )


@triton.jit
def _with_sink(old, acc, sink):
    """Return softmax and output after one more score, whose value is 0."""
    sink = sink - old.moments.base
    shifted_max = tl.maximum(old.shifted_max, sink)
    max_log2 = _finite_max(shifted_max) * LOG2E
    log_factor, log_sink = old.shifted_max * LOG2E - max_log2, sink * LOG2E - max_log2
    factor, sink_factor = tl.exp2(log_factor), tl.exp2(log_sink)
    rescaled = factor * old.sum_exp_logit + _product(factor, log_factor) * old.total
    sum_exp_logit = rescaled + _product(sink_factor, log_sink)
    total = factor * old.total + sink_factor
    squares = factor * factor * old.squares  # of keys alone; the entropy has the sink's term too
    softmax = Softmax(shifted_max, total, sum_exp_logit, squares, old.moments, old.min_score, old.max_score, old.key)
    return softmax, acc * factor[:, None]


@triton.jit
def _store_rows(rows, at, live, softmax, of_keys):
    """Store row_max, log_denom and statistics from `softmax`, which has the sink, and `of_keys`, which does not."""
    moments, finite_max, is_empty = softmax.moments, _finite_max(softmax.shifted_max), softmax.total == 0
    divisor = tl.where(is_empty, 1.0, softmax.total)
    log_denom = tl.log(divisor)
    tl.store(rows.row_max + at, tl.where(softmax.shifted_max == NEG_INF, 0.0, moments.base + finite_max), mask=live)
    tl.store(rows.log_denom + at, tl.where(is_empty, NEG_INF, log_denom), mask=live)
    has_nan = of_keys.total != of_keys.total
    if rows.max_score is not None:
        max_score = tl.where(has_nan, float("nan"), moments.base + of_keys.shifted_max)
        tl.store(rows.max_score + at, max_score, mask=live)
    if rows.min_score is not None:
        tl.store(rows.min_score + at, tl.where(has_nan, float("nan"), of_keys.min_score), mask=live)
    if rows.argmax_key is not None:
        key = tl.where(has_nan, -1, of_keys.key).to(tl.float32)
        tl.store(rows.argmax_key + at, key, mask=live)
    count = tl.maximum(moments.count, 1.0)
    mean = moments.sum / count
    if rows.mean_score is not None:
        tl.store(rows.mean_score + at, moments.base + mean, mask=live)
    if rows.var_score is not None:
        variance = (moments.squares - moments.sum * mean) / count
        tl.store(rows.var_score + at, tl.where(variance < 0, 0.0, variance), mask=live)
    if rows.entropy is not None:
        entropy = log_denom - softmax.sum_exp_logit * LN2 / divisor
        tl.store(rows.entropy + at, tl.where(is_empty, 0.0, entropy), mask=live)
    # Largest weight of a key, before the division.
    max_of_keys = tl.exp2(_finite_max(of_keys.shifted_max) * LOG2E - finite_max * LOG2E)
    max_of_keys = tl.where(of_keys.total == 0, 0.0, max_of_keys)
    if rows.max_weight is not None:
        tl.store(rows.max_weight + at, max_of_keys / divisor, mask=live)
    if rows.sum_sq_weights is not None:
        tl.store(rows.sum_sq_weights + at, softmax.squares / (divisor * divisor), mask=live)
    if rows.sum_weights is not None:
        tl.store(rows.sum_weights + at, max_of_keys * of_keys.total / divisor, mask=live)


@triton.jit
def forward(
    inputs, sink, out, rows, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr, LANES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output, row_max, log_denom and statistics of a tile of queries.

    `TESTED`: each tile reads the rest of the mask, so none is full. `LANES`: columns of the sums of weights.
    """
    inputs = with_types(inputs)
    tile, m = tl.program_id(0), matrix_of(tl.program_id(1), sizes.heads, sizes.groups)
    i, d, dv = tile * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, DV)[None, :]
    query_side, key_side, value_side = side_of(inputs.query, m), side_of(inputs.key, m), side_of(inputs.value, m)
    queries = side_tile(query_side, i[:, None], d[None, :], sizes.n_q, sizes.dim, FORM)
    scale = scale_of(scale, inputs.scales, m, sizes)
    zero = tl.zeros((BM,), tl.float32)
    none = tl.zeros((BM, LANES), tl.float32)
    lowest, highest = tl.full((BM,), NEG_INF, tl.float32), tl.full((BM,), float("inf"), tl.float32)
    no_key = tl.full((BM,), -1, tl.int32)
    softmax = Softmax(lowest, none, none, none, Moments(zero, zero, none, none), highest, lowest, no_key)
    acc, is_bad = tl.zeros((BM, DV), tl.float32), 0
    for interval in tl.range(0, INTERVALS):
        visited = key_segments(inputs.masking, interval, m, tile, sizes, BM, BN, TESTED)
        # The full tiles, then the tiles that read the mask.
        for full in tl.static_range(1, -1, -1):
            for step in tl.range(0, steps_of(visited, full)):
                c = tile_of_step(step, visited, full) * BN + tl.arange(0, BN)
                keys = side_tile(key_side, c[None, :], d[:, None], sizes.n_k, sizes.dim, FORM, full)
                s = pair_scores(queries, keys, inputs, m, sizes, scale, slope, FORM, FUNCTION, PRECISION)
                s, _ = capped(function_scores(s, inputs.shared, m, FORM, FUNCTION), CAPS)
                s, attends = _mask_scores(s, inputs, interval, m, queries, keys, sizes, RELATIVE, full)
                softmax, p, alpha = _with_tile(softmax, s, attends, keys.at, rows, step, full and inputs.bias is None)
                if inputs.dropout is not None:
                    p = tl.where(keeps_by_dropout(inputs.dropout, m.z, queries.at, keys.at, sizes.n_q), p, 0.0)
                v = vectors(
                    value_side, c.to(tl.int64)[:, None], dv, True if full else c[:, None] < sizes.n_k, sizes.value_dim
                )
                if not full or inputs.bias is not None:
                    v, is_bad = finite_of(v, is_bad)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if is_bad > 0:
        acc = with_nonfinite(
            acc, inputs.masking, inputs.bias, value_side, m, queries.at, sizes,
            INTERVALS, RELATIVE, OF_KEYS=True, BLOCK=BN, D=DV,
        )  # fmt: skip
    softmax = _sum_lanes(softmax)
    of_keys = softmax
    if sink is not None:
        softmax, acc = _with_sink(softmax, acc, tl.load(sink + m.h * sizes.groups + m.g))
    if inputs.dropout is not None:
        acc = acc * inputs.dropout.factor
    # The rule for fully masked queries: total 0 gives output 0 and log-sum-exp -inf (`problem.online_softmax.finish`).
    acc = acc / tl.where(softmax.total == 0, 1.0, softmax.total)[:, None]
    store_vectors(out, m, queries.at, dv, queries.live, sizes.value_dim, acc)
    _store_rows(rows, m.z.to(tl.int64) * sizes.n_q + i, i < sizes.n_q, softmax, of_keys)
