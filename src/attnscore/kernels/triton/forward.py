"""The forward kernel: one program for each tile of queries of each matrix, the online softmax over its key tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from attnscore.kernels.triton.tile import (
    ADDITIVE,
    INNER,
    LOG2E,
    NEG_INF,
    attended,
    attended_by_any,
    base,
    bias_of,
    capped,
    function_scores,
    is_finite,
    is_nan,
    kept,
    key_segments,
    matrix_of,
    pair_scores,
    side_of,
    steps_of,
    tile_of_step,
    vectors,
)


@triton.jit
def propagated(acc, attends, x):
    """Return acc with the NaN and infinities of `x` (keys, dim) that each query attends (`core.tiled`)."""
    pairs = attends.to(tl.float16)
    # Counts of at most the tile's size, which float16 holds.
    nan = tl.dot(pairs, is_nan(x).to(tl.float16))
    above = tl.dot(pairs, (x == float("inf")).to(tl.float16))
    below = tl.dot(pairs, (x == NEG_INF).to(tl.float16))
    acc += tl.where(above > 0, float("inf"), 0.0)
    acc += tl.where(below > 0, NEG_INF, 0.0)
    return tl.where(nan > 0, float("nan"), acc)


@triton.jit
def with_nonfinite(
    acc, masking, bias, data, row, column, b, h, g, own, own_len, other_len, n_q, n_k, dim,
    INTERVALS: tl.constexpr, RELATIVE: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return acc (own, dim) with the NaN and infinities of the rows that each position attends, or is attended by.

    `own` are positions (M, 1); `data`, `row` and `column` are the other side's rows, of keys (`OF_KEYS`) or queries. A
    loop after all tiles, in place of a second product in each, which took twice the registers.
    """
    d = tl.arange(0, D)[None, :]
    for tile in tl.range(0, tl.cdiv(other_len, BLOCK)):
        rows = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        x = tl.load(data + rows.to(tl.int64) * row + d * column, mask=(rows < other_len) & (d < dim), other=0.0)
        count = tl.where(tl.min(is_finite(x).to(tl.int32)) == 0, tl.minimum(BLOCK, other_len - tile * BLOCK), 0)
        for step in tl.range(0, count):
            other = tl.zeros((1, 1), tl.int32) + (tile * BLOCK + step)
            if OF_KEYS:
                attends = attended_by_any(masking, b, h, g, own, other, n_q, n_k, INTERVALS)
                if bias is not None:
                    attends = attends & (bias_of(bias, b, h, g, own, other, n_q, n_k, RELATIVE) != NEG_INF)
            else:
                attends = attended_by_any(masking, b, h, g, other, own, n_q, n_k, INTERVALS)
                if bias is not None:
                    attends = attends & (bias_of(bias, b, h, g, other, own, n_q, n_k, RELATIVE) != NEG_INF)
            y = tl.load(data + other.to(tl.int64) * row + d * column, mask=d < dim, other=0.0).to(tl.float32)
            acc += tl.where(attends & (is_finite(y) == 0), y, 0.0)
    return acc


@triton.jit
def _merged_moments(count, origin, mean, deviations, s, attends, top):
    """Return Chan's update of the moments by a tile (`core.statistics`)."""
    here = tl.sum(attends.to(tl.float32), 1)
    from_top = tl.where(attends, s - top[:, None], 0.0)
    mean_here = tl.sum(from_top, 1) / tl.maximum(here, 1.0)
    deviation = tl.where(attends, from_top - mean_here[:, None], 0.0)
    whole = count + here
    share = here / tl.maximum(whole, 1.0)
    is_first = count == 0
    new_origin = tl.where(is_first, top, origin)
    old_mean = tl.where(is_first, 0.0, mean)
    gap = (top - new_origin) + mean_here - old_mean
    deviations += tl.sum(deviation * deviation, 1) + gap * gap * count * share
    return whole, new_origin, old_mean + share * gap, deviations


@triton.jit
def forward(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, sink, dropout, out, rows,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output, row_max, log_denom and statistics of a tile of queries."""
    tile, z = tl.program_id(0), tl.program_id(1)
    b, h, g = matrix_of(z, heads, groups)
    i = tile * BM + tl.arange(0, BM)
    row, d, dv = i[:, None], tl.arange(0, D), tl.arange(0, DV)
    live = row < n_q
    of_query, of_key, of_value = side_of(query, b, h, g), side_of(key, b, h, g), base(value, b, h, g)
    if FORM == INNER:
        q = vectors(of_query, row.to(tl.int64), d[None, :], live, dim)
    else:
        q = 0.0
    if query_bias is not None:
        at = base(query_bias, b, h, g)
        of_row = tl.load(at + row.to(tl.int64) * query_bias.row, mask=live, other=0.0).to(tl.float32)
    else:
        of_row = None
    if scales is not None:
        scale = tl.load(scales + h * groups + g)
    if FORM == ADDITIVE:
        shared = base(shared, b, h, g)
    top = tl.full((BM,), NEG_INF, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)
    sum_exp_logit, squares = total, total
    count, origin, mean, deviations = total, total, total, total
    is_bad = 0
    for interval in tl.range(0, INTERVALS):
        some_lo, all_lo, all_hi, some_hi = key_segments(masking, interval, b, tile, n_q, n_k, BM, BN, TESTED)
        for part in tl.static_range(2):
            for step in tl.range(0, steps_of(some_lo, all_lo, all_hi, some_hi, part == 0)):
                at_tile = tile_of_step(step, some_lo, all_lo, all_hi, part == 0)
                c = at_tile * BN + tl.arange(0, BN)
                j = c[None, :]
                live_j = j < n_k
                here = c.to(tl.int64)
                if FORM == INNER:
                    at = of_key.data + here[None, :] * of_key.row + d[:, None] * of_key.column
                    if part == 0:
                        k = tl.load(at, mask=d[:, None] < dim, other=0.0)
                    else:
                        k = tl.load(at, mask=live_j & (d[:, None] < dim), other=0.0)
                else:
                    k = 0.0
                if key_bias is not None:
                    at_bias = base(key_bias, b, h, g) + here[None, :] * key_bias.row
                    of_column = tl.load(at_bias, mask=live_j, other=0.0).to(tl.float32)
                else:
                    of_column = None
                s = pair_scores(
                    q, k, of_row, of_column, of_query, of_key, shared, h, g, row, j, live, live_j, dim, scale, slope,
                    FORM, FUNCTION, PRECISION,
                )  # fmt: skip
                s = capped(function_scores(s, shared, h, g, FORM, FUNCTION), CAPS)
                if part == 0 and bias is None:
                    attends = live & live_j
                else:
                    if part == 0:
                        attends = live & live_j
                    else:
                        attends = attended(masking, interval, b, h, g, row, j, n_q, n_k)
                        if FUNCTION is None:
                            # A product with an infinity counts as NaN, as on the CPU.
                            s = tl.where(s == NEG_INF, float("nan"), s)
                    if bias is not None:
                        of_pair = bias_of(bias, b, h, g, row, j, n_q, n_k, RELATIVE)
                        attends = attends & (of_pair != NEG_INF)
                        s += of_pair
                    s = tl.where(attends, s, NEG_INF)
                tile_top = tl.max(s, 1)
                new_top = tl.maximum(top, tile_top)
                safe = tl.where(new_top == NEG_INF, 0.0, new_top)
                p = tl.exp2(s * LOG2E - (safe * LOG2E)[:, None])
                step_down = tl.where(top == NEG_INF, 0.0, top) - safe
                alpha = tl.exp2(top * LOG2E - safe * LOG2E)
                if rows.entropy is not None:
                    logits = tl.where(p == 0, 0.0, s - safe[:, None])
                    sum_exp_logit = alpha * (sum_exp_logit + step_down * total) + tl.sum(p * logits, 1)
                if rows.sum_sq_weights is not None:
                    squares = alpha * alpha * squares + tl.sum(p * p, 1)
                if (rows.mean_score is not None) or (rows.var_score is not None):
                    tile_origin = tl.where(tile_top == NEG_INF, 0.0, tile_top)
                    count, origin, mean, deviations = _merged_moments(
                        count, origin, mean, deviations, s, attends, tile_origin
                    )
                total = alpha * total + tl.sum(p, 1)
                if dropout is not None:
                    p = tl.where(kept(dropout, z, row, j, n_q), p, 0.0)
                at_value = of_value + here[:, None] * value.row + dv[None, :] * value.column
                if part == 0:
                    v = tl.load(at_value, mask=dv[None, :] < value_dim, other=0.0)
                else:
                    v = tl.load(at_value, mask=(c[:, None] < n_k) & (dv[None, :] < value_dim), other=0.0)
                acc = acc * alpha[:, None]
                if part == 0 and bias is None:
                    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
                else:
                    finite = is_finite(v)
                    acc = tl.dot(p.to(v.dtype), tl.where(finite, v, 0.0), acc, input_precision=PRECISION)
                    is_bad = tl.maximum(is_bad, 1 - tl.min(finite.to(tl.int32)))
                top = new_top
    if is_bad > 0:
        acc = with_nonfinite(
            acc, masking, bias, of_value, value.row, value.column, b, h, g, row, n_q, n_k, n_q, n_k, value_dim,
            INTERVALS, RELATIVE, True, BN, DV,
        )  # fmt: skip
    # The rule for fully masked queries: total 0 gives output 0 and log-sum-exp -inf (`core.online_softmax.finish`).
    keys_max, keys_total = top, total
    safe_keys = tl.where(top == NEG_INF, 0.0, top)
    if sink is not None:
        of_sink = tl.load(sink + h * groups + g)
        new_top = tl.maximum(top, of_sink)
        safe = tl.where(new_top == NEG_INF, 0.0, new_top)
        factor = tl.exp2(top * LOG2E - safe * LOG2E)
        sink_factor = tl.exp2(of_sink * LOG2E - safe * LOG2E)
        # A sink of NaN.
        sink_factor = tl.where(is_nan(of_sink), float("nan"), sink_factor)
        safe_sink = of_sink if of_sink != NEG_INF else 0.0
        sum_exp_logit = factor * (sum_exp_logit + (safe_keys - safe) * total) + sink_factor * (safe_sink - safe)
        squares = factor * factor * squares
        total = factor * total + sink_factor
        acc = acc * factor[:, None]
    else:
        safe = safe_keys
    is_empty = total == 0
    divisor = tl.where(is_empty, 1.0, total)
    if dropout is not None:
        acc = acc * dropout.factor
    at_out = base(out, b, h, g) + row.to(tl.int64) * out.row + dv[None, :] * out.column
    tl.store(at_out, (acc / divisor[:, None]).to(out.data.dtype.element_ty), mask=live & (dv[None, :] < value_dim))
    at_row, in_range = z.to(tl.int64) * n_q + i, i < n_q
    log_denom = tl.log(divisor)
    tl.store(rows.row_max + at_row, safe, mask=in_range)
    tl.store(rows.log_denom + at_row, tl.where(is_empty, NEG_INF, log_denom), mask=in_range)
    if rows.max_score is not None:
        tl.store(rows.max_score + at_row, tl.where(is_nan(keys_total), float("nan"), keys_max), mask=in_range)
    if rows.mean_score is not None:
        tl.store(rows.mean_score + at_row, origin + mean, mask=in_range)
    if rows.var_score is not None:
        tl.store(rows.var_score + at_row, deviations / tl.maximum(count, 1.0), mask=in_range)
    if rows.entropy is not None:
        tl.store(rows.entropy + at_row, tl.where(is_empty, 0.0, log_denom - sum_exp_logit / divisor), mask=in_range)
    of_keys = tl.where(keys_total == 0, 0.0, tl.exp2(safe_keys * LOG2E - safe * LOG2E))
    if rows.max_weight is not None:
        tl.store(rows.max_weight + at_row, of_keys / divisor, mask=in_range)
    if rows.sum_sq_weights is not None:
        tl.store(rows.sum_sq_weights + at_row, squares / (divisor * divisor), mask=in_range)
    if rows.sum_weights is not None:
        tl.store(rows.sum_weights + at_row, of_keys * keys_total / divisor, mask=in_range)
