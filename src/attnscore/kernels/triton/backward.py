"""The backward kernels: the weights are recomputed tile by tile, and each gradient has one program that sums it.

- ``row_sums``: delta of each query. ``d_query``: the gradients with an axis of queries, and of a bias that is not
  broadcast. ``d_key``: those with an axis of keys, over the query heads that share them.
- ``d_bias`` and ``d_relative_bias``: biases that several pairs share, over those pairs in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnscore.kernels.triton.custom import channel_gradient, scaled_derivative
from attnscore.kernels.triton.forward import with_nonfinite
from attnscore.kernels.triton.operands import RowGrads
from attnscore.kernels.triton.tile import (
    ADDITIVE,
    CHANNELS,
    DISTANCE,
    INNER,
    LOG2E,
    NEG_INF,
    attended,
    attended_by_any,
    base,
    bias_of,
    capped,
    capped_slope,
    distance_gradient,
    function_gradient,
    function_scores,
    is_finite,
    kept,
    key_segments,
    matrix_of,
    pair_scores,
    segments,
    side_of,
    steps_of,
    tile_of_step,
    vectors,
)


@triton.jit
def row_sums(out, grad_out, grad_log_sum_exp, delta, n_q, value_dim, heads, groups, BM: tl.constexpr, DV: tl.constexpr):
    """Compute delta = dlse - dout . out of a tile of queries, so that ds = p (dp + delta)."""
    z = tl.program_id(1)
    b, h, g = matrix_of(z, heads, groups)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    row, dv = i.to(tl.int64)[:, None], tl.arange(0, DV)[None, :]
    live = i[:, None] < n_q
    x = vectors(side_of(out, b, h, g), row, dv, live, value_dim).to(tl.float32)
    grad = vectors(side_of(grad_out, b, h, g), row, dv, live, value_dim)
    # A query that attends nothing has the output 0, and ignores a gradient of NaN.
    total = -tl.sum(tl.where(x == 0, 0.0, x * grad.to(tl.float32)), 1)
    at = z.to(tl.int64) * n_q + i
    if grad_log_sum_exp is not None:
        total += tl.load(grad_log_sum_exp + at, mask=i < n_q, other=0.0)
    tl.store(delta + at, total, mask=i < n_q)


@triton.jit
def row_values(rows, z, i, n_q):
    """Return what the backward knows of the queries `i`, in their shape."""
    at, live = z.to(tl.int64) * n_q + i, i < n_q
    log_denom = tl.load(rows.log_denom + at, mask=live, other=NEG_INF)
    # Of a query that attends nothing: p = exp(-inf).
    log_denom = tl.where(log_denom == NEG_INF, float("inf"), log_denom)
    row_max = tl.load(rows.row_max + at, mask=live, other=0.0)
    delta = tl.load(rows.delta + at, mask=live, other=0.0)
    if rows.grad_entropy is not None:
        entropy = tl.load(rows.entropy + at, mask=live, other=0.0)
        grad_entropy = tl.load(rows.grad_entropy + at, mask=live, other=0.0)
    else:
        entropy, grad_entropy = None, None
    return RowGrads(row_max, log_denom, delta, entropy, grad_entropy)


@triton.jit
def pair_gradients(
    raw, dp, attends, rows, bias, dropout, shared, b, h, g, z, i, j, n_q, n_k,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, RELATIVE: tl.constexpr, FULL: tl.constexpr = False,
):  # fmt: skip
    """Return of each pair: its weight after dropout, and the gradients of its score after and before the caps.

    `raw` are the scores of `pair_scores`, `dp` the products of value and gradient of the output, `attends` the pairs
    that the mask leaves; `rows` are those of `row_values`. `FULL`: the mask leaves all pairs.
    """
    uncapped = function_scores(raw, shared, h, g, FORM, FUNCTION)
    s = capped(uncapped, CAPS)
    if FUNCTION is None and not FULL:
        s = tl.where(s == NEG_INF, float("nan"), s)
    if bias is not None:
        of_pair = bias_of(bias, b, h, g, i, j, n_q, n_k, RELATIVE)
        attends = attends & (of_pair != NEG_INF)
        s += of_pair
    # Forward: p = exp(s - row_max - log_denom)
    log_p = (s - rows.row_max) - rows.log_denom
    p = tl.exp2(log_p * LOG2E)
    # A custom function may be NaN for the zeros that stand past the last query.
    if not FULL or bias is not None or FUNCTION is not None:
        p = tl.where(attends, p, 0.0)
    dropped = p
    if dropout is not None:
        keep = kept(dropout, z, i, j, n_q)
        dropped = tl.where(keep, p * dropout.factor, 0.0)
        dp = tl.where(keep, dp * dropout.factor, 0.0)
    grad = p * (dp + rows.delta)
    if rows.grad_entropy is not None:
        # Forward: H = -sum p log p
        grad -= p * (tl.where(p == 0, 0.0, log_p) + rows.entropy) * rows.grad_entropy
    if not FULL or bias is not None or FUNCTION is not None:
        grad = tl.where(attends, grad, 0.0)
    if len(CAPS) > 0:
        # Where the gradient is 0, so is that before the caps, whatever the score is.
        raw_grad = tl.where(grad == 0, 0.0, grad * capped_slope(uncapped, CAPS))
    else:
        raw_grad = grad
    return dropped, grad, raw_grad


@triton.jit
def d_query(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
    grad_query, grad_query_bias, grad_scale, grad_bias,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of queries, and that of the bias of its pairs."""
    tile, z = tl.program_id(0), tl.program_id(1)
    b, h, g = matrix_of(z, heads, groups)
    i = tile * BM + tl.arange(0, BM)
    row, d, dv = i[:, None], tl.arange(0, D), tl.arange(0, DV)
    live = row < n_q
    of_query, of_key, of_value = side_of(query, b, h, g), side_of(key, b, h, g), side_of(value, b, h, g)
    at_row = row.to(tl.int64)
    if FORM == INNER:
        q = vectors(of_query, at_row, d[None, :], live, dim)
    else:
        q = 0.0
    if query_bias is not None:
        of_row = tl.load(base(query_bias, b, h, g) + at_row * query_bias.row, mask=live, other=0.0).to(tl.float32)
    else:
        of_row = None
    if scales is not None:
        scale = tl.load(scales + h * groups + g)
    do = vectors(side_of(grad_out, b, h, g), at_row, dv[None, :], live, value_dim)
    of_rows = row_values(rows, z, row, n_q)
    acc = tl.zeros((BM, D), tl.float32)
    of_query_bias = tl.zeros((BM,), tl.float32)
    of_scale = tl.zeros((BM,), tl.float32)
    for interval in tl.range(0, INTERVALS):
        some_lo, all_lo, all_hi, some_hi = key_segments(masking, interval, b, tile, n_q, n_k, BM, BN, TESTED)
        for part in tl.static_range(2):
            for step in tl.range(0, steps_of(some_lo, all_lo, all_hi, some_hi, part == 0)):
                at_tile = tile_of_step(step, some_lo, all_lo, all_hi, part == 0)
                c = at_tile * BN + tl.arange(0, BN)
                j, here = c[None, :], c.to(tl.int64)
                live_j = j < n_k
                if FORM == INNER:
                    k = vectors(of_key, here[None, :], d[:, None], live_j, dim)
                else:
                    k = 0.0
                if key_bias is not None:
                    at_bias = base(key_bias, b, h, g) + here[None, :] * key_bias.row
                    of_column = tl.load(at_bias, mask=live_j, other=0.0).to(tl.float32)
                else:
                    of_column = None
                raw = pair_scores(
                    q, k, of_row, of_column, of_query, of_key, shared, h, g, row, j, live, live_j, dim, scale, slope,
                    FORM, FUNCTION, PRECISION,
                )  # fmt: skip
                v = vectors(of_value, here[None, :], dv[:, None], live_j, value_dim)
                dp = tl.dot(do.to(v.dtype), v, input_precision=PRECISION)
                if part == 0:
                    attends = live & live_j
                else:
                    attends = attended(masking, interval, b, h, g, row, j, n_q, n_k)
                _, grad, ds = pair_gradients(
                    raw, dp, attends, of_rows, bias, dropout, shared, b, h, g, z, row, j, n_q, n_k,
                    FORM, FUNCTION, CAPS, RELATIVE, part == 0,
                )  # fmt: skip
                ds = function_gradient(ds, raw, shared, h, g, FORM, DERIVATIVE)
                if grad_bias is not None:
                    # A pair is in one interval at most, so it is written once.
                    at_pair = base(grad_bias, b, h, g) + at_row * grad_bias.row + j * grad_bias.column
                    tl.store(at_pair, grad.to(grad_bias.data.dtype.element_ty), mask=attends)
                if grad_query_bias is not None:
                    of_query_bias += tl.sum(ds, 1)
                if grad_scale is not None:
                    of_scale += tl.sum(tl.where(ds == 0, 0.0, ds * raw), 1)
                if FORM == INNER:
                    if part == 1 or bias is not None:
                        # The gradient of a pair that attends a NaN is NaN itself; others must not multiply it.
                        k = tl.where(is_finite(k), k, 0.0)
                    acc = tl.dot(ds.to(k.dtype), tl.trans(k), acc, input_precision=PRECISION)
                elif FORM == DISTANCE:
                    acc = distance_gradient(acc, ds, of_query, of_key, row, j, live, live_j, dim, D)
                elif FORM == CHANNELS:
                    acc = channel_gradient(
                        acc, ds, of_query, of_key, shared, h, g, row, j, live, live_j, dim, DERIVATIVE, 0, D
                    )
    if FORM == INNER:
        acc = acc * scale
    elif FORM == DISTANCE:
        acc = acc * (-2.0 * scale)
    at = base(grad_query, b, h, g) + at_row * grad_query.row + d[None, :] * grad_query.column
    tl.store(at, acc.to(grad_query.data.dtype.element_ty), mask=live & (d[None, :] < dim))
    at_row, in_range = z.to(tl.int64) * n_q + i, i < n_q
    if grad_query_bias is not None:
        tl.store(grad_query_bias + at_row, of_query_bias, mask=in_range)
    if grad_scale is not None:
        # Forward: s = -scale * distance
        tl.store(grad_scale + at_row, of_scale / scale, mask=in_range)


@triton.jit
def d_key(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows, tiles,
    grad_key, grad_value, grad_key_bias,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values; `SHARED`: over all query heads of their KV head."""
    tile, program = tl.program_id(0), tl.program_id(1)
    b, h, first_group = matrix_of(program * groups if SHARED else program, heads, groups)
    c = tile * BN + tl.arange(0, BN)
    j, d, dv = c[:, None], tl.arange(0, D), tl.arange(0, DV)
    live_j, here = j < n_k, c.to(tl.int64)[:, None]
    of_key = side_of(key, b, h, first_group)
    if FORM == INNER:
        k = vectors(of_key, here, d[None, :], live_j, dim)
    else:
        k = 0.0
    v = vectors(side_of(value, b, h, first_group), here, dv[None, :], live_j, value_dim)
    if key_bias is not None:
        at = base(key_bias, b, h, first_group) + here * key_bias.row
        of_column = tl.load(at, mask=live_j, other=0.0).to(tl.float32)
    else:
        of_column = None
    acc = tl.zeros((BN, D), tl.float32)
    of_value = tl.zeros((BN, DV), tl.float32)
    of_key_bias = tl.zeros((BN,), tl.float32)
    line = 0
    if tiles is not None:
        line = tl.minimum(b, masking.ends_batch - 1) * tl.num_programs(0) + tile
    some_lo, all_lo, all_hi, some_hi = segments(tiles, line, n_q, BM, TESTED)
    if SHARED:
        members = groups
    else:
        members = 1
    is_bad = 0
    for member in tl.range(0, members):
        g = first_group + member
        z = (b * heads + h) * groups + g
        of_query, of_grad_out = side_of(query, b, h, g), side_of(grad_out, b, h, g)
        if scales is not None:
            scale = tl.load(scales + h * groups + g)
        for part in tl.static_range(2):
            for step in tl.range(0, steps_of(some_lo, all_lo, all_hi, some_hi, part == 0)):
                at_tile = tile_of_step(step, some_lo, all_lo, all_hi, part == 0)
                r = at_tile * BM + tl.arange(0, BM)
                i, at_row = r[None, :], r.to(tl.int64)
                live = i < n_q
                if FORM == INNER:
                    q = vectors(of_query, at_row[None, :], d[:, None], live, dim)
                else:
                    q = 0.0
                if query_bias is not None:
                    at_bias = base(query_bias, b, h, g) + at_row[None, :] * query_bias.row
                    of_row = tl.load(at_bias, mask=live, other=0.0).to(tl.float32)
                else:
                    of_row = None
                raw = pair_scores(
                    k, q, of_row, of_column, of_query, of_key, shared, h, g, i, j, live, live_j, dim, scale, slope,
                    FORM, FUNCTION, PRECISION,
                )  # fmt: skip
                do = vectors(of_grad_out, at_row[:, None], dv[None, :], r[:, None] < n_q, value_dim)
                dp = tl.dot(v, tl.trans(do).to(v.dtype), input_precision=PRECISION)
                if part == 0:
                    attends = live & live_j
                else:
                    attends = attended_by_any(masking, b, h, g, i, j, n_q, n_k, INTERVALS)
                dropped, _, ds = pair_gradients(
                    raw, dp, attends, row_values(rows, z, i, n_q), bias, dropout, shared, b, h, g, z, i, j, n_q, n_k,
                    FORM, FUNCTION, CAPS, RELATIVE, part == 0,
                )  # fmt: skip
                ds = function_gradient(ds, raw, shared, h, g, FORM, DERIVATIVE)
                if part == 1 or bias is not None:
                    finite = is_finite(do)
                    is_bad = tl.maximum(is_bad, 1 - tl.min(finite.to(tl.int32)))
                    do = tl.where(finite, do, 0.0)
                of_value = tl.dot(dropped.to(do.dtype), do, of_value, input_precision=PRECISION)
                if grad_key_bias is not None:
                    of_key_bias += tl.sum(ds, 1)
                if FORM == INNER:
                    if part == 1 or bias is not None:
                        q = tl.where(is_finite(q), q, 0.0)
                    acc = tl.dot(ds.to(q.dtype), tl.trans(q), acc, input_precision=PRECISION)
                elif FORM == DISTANCE:
                    acc = distance_gradient(acc, ds * (-2.0 * scale), of_key, of_query, j, i, live_j, live, dim, D)
                elif FORM == CHANNELS:
                    acc = channel_gradient(
                        acc, ds, of_query, of_key, shared, h, g, i, j, live, live_j, dim, DERIVATIVE, 1, D
                    )
    if FORM == INNER:
        acc = acc * scale
    at = base(grad_key, b, h, first_group) + here * grad_key.row + d[None, :] * grad_key.column
    tl.store(at, acc.to(grad_key.data.dtype.element_ty), mask=live_j & (d[None, :] < dim))
    if is_bad > 0:
        for member in tl.range(0, members):
            g = first_group + member
            of_value = with_nonfinite(
                of_value, masking, bias, base(grad_out, b, h, g), grad_out.row, grad_out.column, b, h, g, j,
                n_k, n_q, n_q, n_k, value_dim, INTERVALS, RELATIVE, False, BM, DV,
            )  # fmt: skip
    at = base(grad_value, b, h, first_group) + here * grad_value.row + dv[None, :] * grad_value.column
    tl.store(at, of_value.to(grad_value.data.dtype.element_ty), mask=live_j & (dv[None, :] < value_dim))
    if grad_key_bias is not None:
        at = base(grad_key_bias, b, h, first_group) + c.to(tl.int64) * grad_key_bias.row
        tl.store(at, of_key_bias, mask=c < n_k)


@triton.jit
def tile_gradient(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
    b, h, g, tile, at_tile, n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `pair_scores` of one tile of one matrix, and the gradients of the scores after and before the caps."""
    z = (b * heads + h) * groups + g
    r, c = tile * BM + tl.arange(0, BM), at_tile * BN + tl.arange(0, BN)
    i, j, d, dv = r[:, None], c[None, :], tl.arange(0, D), tl.arange(0, DV)
    live, live_j, at_row, here = i < n_q, j < n_k, i.to(tl.int64), j.to(tl.int64)
    of_query, of_key = side_of(query, b, h, g), side_of(key, b, h, g)
    q, k, of_row, of_column = 0.0, 0.0, None, None
    if FORM == INNER:
        q = vectors(of_query, at_row, d[None, :], live, dim)
        k = vectors(of_key, here, d[:, None], live_j, dim)
    if query_bias is not None:
        of_row = tl.load(base(query_bias, b, h, g) + at_row * query_bias.row, mask=live, other=0.0).to(tl.float32)
    if key_bias is not None:
        of_column = tl.load(base(key_bias, b, h, g) + here * key_bias.row, mask=live_j, other=0.0).to(tl.float32)
    if scales is not None:
        scale = tl.load(scales + h * groups + g)
    if FORM == ADDITIVE:
        shared = base(shared, b, h, g)
    raw = pair_scores(
        q, k, of_row, of_column, of_query, of_key, shared, h, g, i, j, live, live_j, dim, scale, slope,
        FORM, FUNCTION, PRECISION,
    )  # fmt: skip
    do = vectors(side_of(grad_out, b, h, g), at_row, dv[None, :], live, value_dim)
    v = vectors(side_of(value, b, h, g), here, dv[:, None], live_j, value_dim)
    dp = tl.dot(do.to(v.dtype), v, input_precision=PRECISION)
    attends = attended_by_any(masking, b, h, g, i, j, n_q, n_k, INTERVALS)
    of_rows = row_values(rows, z, i, n_q)
    _, grad, ds = pair_gradients(
        raw, dp, attends, of_rows, bias, dropout, shared, b, h, g, z, i, j, n_q, n_k, FORM, FUNCTION, CAPS, RELATIVE
    )
    return raw, grad, ds


@triton.jit
def members_of(all_batches, batches, heads, kv_heads, groups, group_count):
    """Return how many matrices share one of a bias."""
    return (all_batches // batches) * (heads // kv_heads) * (groups // group_count)


@triton.jit
def member_of(member, b, h, g, batches, heads, kv_heads, groups, group_count):
    """Return batch row, head and group of a matrix that shares the bias (b, h, g)."""
    group_steps = groups // group_count
    head_steps = heads // kv_heads
    return (
        b + member // (group_steps * head_steps) * batches,
        h + member // group_steps % head_steps * kv_heads,
        g + member % group_steps * group_count,
    )


@triton.jit
def d_bias(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
    grad_bias, all_batches, batches, kv_heads, group_count,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a bias over the matrices that share it, for one tile of pairs.

    The bias has the sizes `batches`, `kv_heads` and `group_count`, each whole or 1. Where it has no axis of queries
    (not `OF_ROWS`) or keys, each tile of queries or keys has its own sum.
    """
    tile, at_tile, of_bias = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_b, own_h, own_g = matrix_of(of_bias, kv_heads, group_count)
    total = tl.zeros((BM, BN), tl.float32)
    for member in tl.range(0, members_of(all_batches, batches, heads, kv_heads, groups, group_count)):
        b, h, g = member_of(member, own_b, own_h, own_g, batches, heads, kv_heads, groups, group_count)
        _, grad, _ = tile_gradient(
            query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
            b, h, g, tile, at_tile, n_q, n_k, dim, value_dim, heads, groups, scale, slope,
            FORM, FUNCTION, CAPS, INTERVALS, False, BM, BN, D, DV, PRECISION,
        )  # fmt: skip
        total += grad
    r, c = tile * BM + tl.arange(0, BM), at_tile * BN + tl.arange(0, BN)
    rows_of_bias = n_q if OF_ROWS else tl.num_programs(0)
    columns = n_k if OF_COLUMNS else tl.num_programs(1)
    first = grad_bias + of_bias.to(tl.int64) * rows_of_bias * columns
    if OF_ROWS and OF_COLUMNS:
        at = first + r.to(tl.int64)[:, None] * columns + c[None, :]
        tl.store(at, total, mask=(r[:, None] < n_q) & (c[None, :] < n_k))
    elif OF_ROWS:
        tl.store(first + r.to(tl.int64) * columns + at_tile, tl.sum(total, 1), mask=r < n_q)
    elif OF_COLUMNS:
        tl.store(first + tile.to(tl.int64) * columns + c, tl.sum(total, 0), mask=c < n_k)
    else:
        tl.store(first + tile * columns + at_tile, tl.sum(total))


@triton.jit
def d_relative_bias(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
    grad_bias, all_batches, batches, kv_heads, group_count,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a relative bias over the pairs of each key - query, for every so many query tiles.

    Each program adds to a line of its own, (share, matrix of the bias, key - query), which holds zeros before.
    """
    share, of_bias = tl.program_id(0), tl.program_id(1)
    own_b, own_h, own_g = matrix_of(of_bias, kv_heads, group_count)
    line = grad_bias + (share * tl.num_programs(1) + of_bias).to(tl.int64) * (n_q + n_k - 1)
    WIDTH: tl.constexpr = BM + BN
    w = tl.arange(0, WIDTH)
    # Entry w of a tile's line has the pairs whose key - query is w - (BM - 1), within the tile.
    column = w[None, :] - (BM - 1) + tl.arange(0, BM)[:, None]
    for member in tl.range(0, members_of(all_batches, batches, heads, kv_heads, groups, group_count)):
        b, h, g = member_of(member, own_b, own_h, own_g, batches, heads, kv_heads, groups, group_count)
        for step in tl.range(0, tl.cdiv(tl.cdiv(n_q, BM) - share, tl.num_programs(0))):
            tile = share + step * tl.num_programs(0)
            for at_tile in tl.range(0, tl.cdiv(n_k, BN)):
                _, grad, _ = tile_gradient(
                    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
                    b, h, g, tile, at_tile, n_q, n_k, dim, value_dim, heads, groups, scale, slope,
                    FORM, FUNCTION, CAPS, INTERVALS, True, BM, BN, D, DV, PRECISION,
                )  # fmt: skip
                is_inside = (column >= 0) & (column < BN)
                skewed = tl.gather(grad, tl.where(is_inside, column, 0), 1)
                sums = tl.sum(tl.where(is_inside, skewed, 0.0), 0)
                at = at_tile * BN - tile * BM + (n_q - BM) + w
                is_pair = (at >= 0) & (at < n_q + n_k - 1)
                tl.store(line + at, tl.load(line + at, mask=is_pair, other=0.0) + sums, mask=is_pair)
                # The next tile's line overlaps this one's, in other threads.
                tl.debug_barrier()


@triton.jit
def d_parameter(
    query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows, sums,
    n_q, n_k, dim, value_dim, heads, groups, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, WHICH: tl.constexpr, CAPS: tl.constexpr,
    INTERVALS: tl.constexpr, TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a custom score's parameter number `WHICH` over the pairs of a tile of queries.

    `sums` are (matrix, query tile, dim) of a sum over channels, else (matrix, query tile).
    """
    tile, z = tl.program_id(0), tl.program_id(1)
    b, h, g = matrix_of(z, heads, groups)
    i, d = tile * BM + tl.arange(0, BM)[:, None], tl.arange(0, D)
    of_query, of_key = side_of(query, b, h, g), side_of(key, b, h, g)
    acc = tl.zeros((BM, D if FORM == CHANNELS else 1), tl.float32)
    first, last = tl.cdiv(n_k, BN), 0
    for interval in tl.range(0, INTERVALS):
        some_lo, _, _, some_hi = key_segments(masking, interval, b, tile, n_q, n_k, BM, BN, TESTED)
        first, last = tl.minimum(first, some_lo), tl.maximum(last, some_hi)
    for at_tile in tl.range(first, last):
        raw, _, ds = tile_gradient(
            query, key, value, query_bias, key_bias, shared, scales, bias, masking, dropout, grad_out, rows,
            b, h, g, tile, at_tile, n_q, n_k, dim, value_dim, heads, groups, scale, slope,
            FORM, FUNCTION, CAPS, INTERVALS, RELATIVE, BM, BN, D, DV, PRECISION,
        )  # fmt: skip
        if FORM == CHANNELS:
            j = at_tile * BN + tl.arange(0, BN)[None, :]
            acc = channel_gradient(
                acc, ds, of_query, of_key, shared, h, g, i, j, i < n_q, j < n_k, dim, DERIVATIVE, 2 + WHICH, D
            )
        else:
            acc += tl.sum(scaled_derivative(ds, raw, shared, h, g, DERIVATIVE, 1 + WHICH), 1, keep_dims=True)
    at = z.to(tl.int64) * tl.num_programs(0) + tile
    if FORM == CHANNELS:
        tl.store(sums + at * dim + d, tl.sum(acc, 0), mask=d < dim)
    else:
        tl.store(sums + at, tl.sum(tl.sum(acc, 1), 0))
