"""The forward kernel: one program for each tile of queries of each matrix, the online softmax over its key tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnscore.kernels.triton.tile import (
    LOG2E,
    NEG_INF,
    attended,
    attended_by_any,
    bias_of,
    capped,
    finite_of,
    function_scores,
    is_finite,
    is_nan,
    kept,
    key_segments,
    matrix_of,
    pair_scores,
    scale_of,
    side_of,
    side_tile,
    steps_of,
    store_vectors,
    tile_of_step,
    vectors,
    with_bias,
)

LN2 = tl.constexpr(0.6931471805599453)


class Moments(NamedTuple):
    """Of the unmasked scores: their number, a base, their mean less the base, the sum of squared deviations."""

    count: Any
    base: Any
    mean: Any
    deviations: Any


class Softmax(NamedTuple):
    """The online softmax of some queries after some of their keys; sums that are not wanted stay 0."""

    top: Any
    """Largest score."""
    total: Any
    """Sum of the weights in units of exp(top)."""
    sum_exp_logit: Any
    """Sum of each weight times its logarithm to base 2."""
    squares: Any
    moments: Any


@triton.jit
def with_nonfinite(
    acc, masking, bias, side, m, own, sizes,
    INTERVALS: tl.constexpr, RELATIVE: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return acc (own, value_dim) with the NaN and infinities that each position attends, or is attended by.

    `own` are positions (M, 1); `side` has the rows of the other side: of keys (`OF_KEYS`) or queries. A loop after all
    tiles, in place of a second product in each, which took twice the registers.
    """
    d, length = tl.arange(0, D)[None, :], sizes.n_k if OF_KEYS else sizes.n_q
    for tile in tl.range(0, tl.cdiv(length, BLOCK)):
        rows = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        x = vectors(side, rows.to(tl.int64), d, rows < length, sizes.value_dim)
        count = tl.where(tl.min(is_finite(x).to(tl.int32)) == 0, tl.minimum(BLOCK, length - tile * BLOCK), 0)
        for step in tl.range(0, count):
            other = tl.zeros((1, 1), tl.int32) + (tile * BLOCK + step)
            i, j = (own, other) if OF_KEYS else (other, own)
            attends = attended_by_any(masking, m, i, j, sizes, INTERVALS)
            if bias is not None:
                attends = attends & (bias_of(bias, m, i, j, sizes, RELATIVE) != NEG_INF)
            y = vectors(side, other.to(tl.int64), d, True, sizes.value_dim).to(tl.float32)
            acc += tl.where(attends & (is_finite(y) == 0), y, 0.0)
    return acc


@triton.jit
def _masked(
    s, inputs, interval, m, queries, keys, sizes, FUNCTION: tl.constexpr, RELATIVE: tl.constexpr, FULL: tl.constexpr
):
    """Return the scores with the bias, -inf where masked, and the pairs that attend; `FULL`: the mask leaves all."""
    if FULL:
        attends = queries.live & keys.live
    else:
        attends = attended(inputs.masking, interval, m, queries.at, keys.at, sizes)
        if FUNCTION is None:
            # A product with an infinity counts as NaN, as on the CPU.
            s = tl.where(s == NEG_INF, float("nan"), s)
    s, attends = with_bias(s, attends, inputs.bias, m, queries.at, keys.at, sizes, RELATIVE)
    if not FULL or inputs.bias is not None:
        s = tl.where(attends, s, NEG_INF)
    return s, attends


@triton.jit
def _finite_top(top):
    """Return the largest score, 0 where it is -inf: all scores less it are -inf then, not NaN."""
    return tl.where(top == NEG_INF, 0.0, top)


@triton.jit
def _product(weight, log_weight):
    """Return weight * log2(weight), 0 where the weight is 0: one operation in place of a comparison and a selection."""
    return weight * tl.maximum(log_weight, -1000.0)


@triton.jit
def _merged_moments(old, s, attends, top, ALL: tl.constexpr):
    """Return Chan's update of the moments by a tile (`core.statistics`); `ALL`: all its pairs attend."""
    from_top = s - top[:, None]
    if ALL:
        here = tl.zeros_like(old.count) + s.shape[1]
        mean_here = tl.sum(from_top, 1) / s.shape[1]
        deviation = from_top - mean_here[:, None]
    else:
        here = tl.sum(attends.to(tl.float32), 1)
        mean_here = tl.sum(tl.where(attends, from_top, 0.0), 1) / tl.maximum(here, 1.0)
        deviation = tl.where(attends, from_top - mean_here[:, None], 0.0)
    whole = old.count + here
    share = here / tl.maximum(whole, 1.0)
    is_first = old.count == 0
    new_base = tl.where(is_first, top, old.base)
    old_mean = tl.where(is_first, 0.0, old.mean)
    gap = (top - new_base) + mean_here - old_mean
    deviations = old.deviations + (tl.sum(deviation * deviation, 1) + gap * gap * old.count * share)
    return Moments(whole, new_base, old_mean + share * gap, deviations)


@triton.jit
def _with_tile(old, s, attends, rows, ALL: tl.constexpr):
    """Return the softmax after a tile of scores, the tile's weights, and the factor of what was summed before."""
    tile_top = tl.max(s, 1)
    top = tl.maximum(old.top, tile_top)
    in_units = _finite_top(top) * LOG2E
    log_p, log_alpha = s * LOG2E - in_units[:, None], old.top * LOG2E - in_units
    p, alpha = tl.exp2(log_p), tl.exp2(log_alpha)
    sum_exp_logit, squares, moments = old.sum_exp_logit, old.squares, old.moments
    if rows.entropy is not None:
        sum_exp_logit = alpha * sum_exp_logit + _product(alpha, log_alpha) * old.total + tl.sum(_product(p, log_p), 1)
    if rows.sum_sq_weights is not None:
        squares = alpha * alpha * squares + tl.sum(p * p, 1)
    if (rows.mean_score is not None) or (rows.var_score is not None):
        moments = _merged_moments(moments, s, attends, _finite_top(tile_top), ALL)
    return Softmax(top, alpha * old.total + tl.sum(p, 1), sum_exp_logit, squares, moments), p, alpha


@triton.jit
def _with_sink(old, acc, sink):
    """Return softmax and output after one more score, whose value is 0."""
    top = tl.maximum(old.top, sink)
    in_units = _finite_top(top) * LOG2E
    log_factor, log_sink = old.top * LOG2E - in_units, sink * LOG2E - in_units
    # A sink of NaN.
    factor, sink_factor = tl.exp2(log_factor), tl.where(is_nan(sink), float("nan"), tl.exp2(log_sink))
    moved = factor * old.sum_exp_logit + _product(factor, log_factor) * old.total
    sum_exp_logit = moved + _product(sink_factor, log_sink)
    total = factor * old.total + sink_factor
    return Softmax(top, total, sum_exp_logit, factor * factor * old.squares, old.moments), acc * factor[:, None]


@triton.jit
def _store_rows(rows, at, live, found, of_keys):
    """Store row_max, log_denom and statistics from the softmax with the sink, and that of the keys alone."""
    row_max, is_empty = _finite_top(found.top), found.total == 0
    divisor = tl.where(is_empty, 1.0, found.total)
    log_denom = tl.log(divisor)
    tl.store(rows.row_max + at, row_max, mask=live)
    tl.store(rows.log_denom + at, tl.where(is_empty, NEG_INF, log_denom), mask=live)
    if rows.max_score is not None:
        tl.store(rows.max_score + at, tl.where(is_nan(of_keys.total), float("nan"), of_keys.top), mask=live)
    moments = found.moments
    if rows.mean_score is not None:
        tl.store(rows.mean_score + at, moments.base + moments.mean, mask=live)
    if rows.var_score is not None:
        tl.store(rows.var_score + at, moments.deviations / tl.maximum(moments.count, 1.0), mask=live)
    if rows.entropy is not None:
        entropy = log_denom - found.sum_exp_logit * LN2 / divisor
        tl.store(rows.entropy + at, tl.where(is_empty, 0.0, entropy), mask=live)
    max_of_keys = tl.exp2(_finite_top(of_keys.top) * LOG2E - row_max * LOG2E)
    max_of_keys = tl.where(of_keys.total == 0, 0.0, max_of_keys)
    if rows.max_weight is not None:
        tl.store(rows.max_weight + at, max_of_keys / divisor, mask=live)
    if rows.sum_sq_weights is not None:
        tl.store(rows.sum_sq_weights + at, found.squares / (divisor * divisor), mask=live)
    if rows.sum_weights is not None:
        tl.store(rows.sum_weights + at, max_of_keys * of_keys.total / divisor, mask=live)


@triton.jit
def forward(
    inputs, sink, out, rows, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output, row_max, log_denom and statistics of a tile of queries."""
    tile, m = tl.program_id(0), matrix_of(tl.program_id(1), sizes.heads, sizes.groups)
    i, d, dv = tile * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, DV)[None, :]
    of_query, of_key, of_value = side_of(inputs.query, m), side_of(inputs.key, m), side_of(inputs.value, m)
    queries = side_tile(of_query, inputs.query_bias, m, i[:, None], d[None, :], sizes.n_q, sizes.dim, FORM)
    scale = scale_of(scale, inputs.scales, m, sizes)
    zero = tl.zeros((BM,), tl.float32)
    found = Softmax(tl.full((BM,), NEG_INF, tl.float32), zero, zero, zero, Moments(zero, zero, zero, zero))
    acc, is_bad = tl.zeros((BM, DV), tl.float32), 0
    for interval in tl.range(0, INTERVALS):
        visited = key_segments(inputs.masking, interval, m, tile, sizes, BM, BN, TESTED)
        # The full tiles, then those that are tested.
        for full in tl.static_range(1, -1, -1):
            for step in tl.range(0, steps_of(visited, full)):
                c = tile_of_step(step, visited, full) * BN + tl.arange(0, BN)
                keys = side_tile(
                    of_key, inputs.key_bias, m, c[None, :], d[:, None], sizes.n_k, sizes.dim, FORM, full
                )  # fmt: skip
                s = pair_scores(
                    queries, keys, inputs.shared, m, sizes.dim, scale, slope, FORM, FUNCTION, PRECISION
                )  # fmt: skip
                s = capped(function_scores(s, inputs.shared, m, FORM, FUNCTION), CAPS)
                s, attends = _masked(s, inputs, interval, m, queries, keys, sizes, FUNCTION, RELATIVE, full)
                found, p, alpha = _with_tile(found, s, attends, rows, full and inputs.bias is None)
                if inputs.dropout is not None:
                    p = tl.where(kept(inputs.dropout, m.z, queries.at, keys.at, sizes.n_q), p, 0.0)
                v = vectors(
                    of_value, c.to(tl.int64)[:, None], dv, True if full else c[:, None] < sizes.n_k, sizes.value_dim
                )
                if not full or inputs.bias is not None:
                    v, is_bad = finite_of(v, is_bad)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if is_bad > 0:
        acc = with_nonfinite(
            acc, inputs.masking, inputs.bias, of_value, m, queries.at, sizes, INTERVALS, RELATIVE, True, BN, DV
        )  # fmt: skip
    of_keys = found
    if sink is not None:
        found, acc = _with_sink(found, acc, tl.load(sink + m.h * sizes.groups + m.g))
    if inputs.dropout is not None:
        acc = acc * inputs.dropout.factor
    # The rule for fully masked queries: total 0 gives output 0 and log-sum-exp -inf (`core.online_softmax.finish`).
    acc = acc / tl.where(found.total == 0, 1.0, found.total)[:, None]
    store_vectors(out, m, queries.at, dv, queries.live, sizes.value_dim, acc)
    _store_rows(rows, m.z.to(tl.int64) * sizes.n_q + i, i < sizes.n_q, found, of_keys)
