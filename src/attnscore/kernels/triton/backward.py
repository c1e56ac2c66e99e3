"""The backward kernels: the weights are recomputed tile by tile, and each gradient has one program that sums it.

- ``row_sums``: -delta of each query. ``d_query``: the gradients with an axis of queries, and of a bias that is not
  broadcast. ``d_key``: the gradients with an axis of keys, summed over the query heads that share them.
- ``d_bias``, ``d_relative_bias``, ``d_parameter``: gradients of a bias or parameter that pairs share, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnscore.kernels.triton.custom import channel_gradient, scaled_derivative
from attnscore.kernels.triton.forward import with_nonfinite
from attnscore.kernels.triton.operands import RowGrads
from attnscore.kernels.triton.tile import (
    CHANNELS,
    DISTANCE,
    INNER,
    LOG2E,
    NEG_INF,
    Matrix,
    base,
    capped,
    distance_gradient,
    finite_of,
    function_gradient,
    function_scores,
    keeps_by_dropout,
    key_segments,
    matrix_of,
    pair_scores,
    scale_of,
    segments,
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


@triton.jit
def row_sums(
    out, grad_out, grad_log_sum_exp, minus_delta, n_q, value_dim, heads, groups, BM: tl.constexpr, DV: tl.constexpr
):
    """Compute -delta = dlse - dout . out of a tile of queries, so that ds = p (dp - delta).

    With this sign the compiler spills fewer registers of custom scores (`tests/test_triton_compiled.py`).
    """
    m = matrix_of(tl.program_id(1), heads, groups)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    row, dv = i.to(tl.int64)[:, None], tl.arange(0, DV)[None, :]
    live = i[:, None] < n_q
    x = vectors(side_of(out, m), row, dv, live, value_dim).to(tl.float32)
    grad = vectors(side_of(grad_out, m), row, dv, live, value_dim)
    # A query that attends nothing has the output 0, and ignores a gradient of NaN.
    total = -tl.sum(tl.where(x == 0, 0.0, x * grad.to(tl.float32)), 1)
    at = m.z.to(tl.int64) * n_q + i
    if grad_log_sum_exp is not None:
        total += tl.load(grad_log_sum_exp + at, mask=i < n_q, other=0.0)
    tl.store(minus_delta + at, total, mask=i < n_q)


@triton.jit
def row_values(rows, z, i, n_q):
    """Return the `RowGrads` of the queries `i`, in their shape; the entropy only where it has a gradient."""
    at, live = z.to(tl.int64) * n_q + i, i < n_q
    log_denom = tl.load(rows.log_denom + at, mask=live, other=NEG_INF)
    # A query that attends nothing gets p = exp(-inf).
    log_denom = tl.where(log_denom == NEG_INF, float("inf"), log_denom)
    row_max = tl.load(rows.row_max + at, mask=live, other=0.0)
    minus_delta = tl.load(rows.minus_delta + at, mask=live, other=0.0)
    # Placeholders, as Triton 3.6 refuses None in a result.
    entropy, grad_entropy = minus_delta, minus_delta
    if rows.grad_entropy is not None:
        entropy = tl.load(rows.entropy + at, mask=live, other=0.0)
        grad_entropy = tl.load(rows.grad_entropy + at, mask=live, other=0.0)
    return RowGrads(row_max, log_denom, minus_delta, entropy, grad_entropy)


@triton.jit
def tile_gradients(
    inputs, queries, keys, grad_out, value, rows, row_numbers, attends, m, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, RELATIVE: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr = False, OF_KEYS: tl.constexpr = False,
):  # fmt: skip
    """Return a tile's `pair_scores`, weights after dropout, and gradients of the scores after and before the caps.

    `value` is (value_dim, N), or (N, value_dim) where the rows are keys (`OF_KEYS`); `grad_out` is (M, value_dim).
    `attends` are the pairs that the mask leaves, all where `FULL`; `row_numbers` are the `row_values` of `rows`. The
    scores before the caps are the `function_scores`.
    """
    i, j = queries.at, keys.at
    raw = pair_scores(queries, keys, inputs, m, sizes, scale, slope, FORM, FUNCTION, PRECISION, OF_KEYS)
    if OF_KEYS:
        dp = tl.dot(value, tl.trans(grad_out).to(value.dtype), input_precision=PRECISION)
    else:
        dp = tl.dot(grad_out.to(value.dtype), value, input_precision=PRECISION)
    uncapped = function_scores(raw, inputs.shared, m, FORM, FUNCTION)
    s, _ = capped(uncapped, CAPS)
    s, attends = with_bias(s, attends, inputs.bias, m, i, j, sizes, RELATIVE)
    # A custom function may be NaN for the zeros that stand past the last query.
    MASKED: tl.constexpr = not FULL or inputs.bias is not None or FUNCTION is not None
    # Forward: p = exp(s - row_max - log_denom)
    log_p = (s - row_numbers.row_max) - row_numbers.log_denom
    p = tl.exp2(log_p * LOG2E)
    if MASKED:
        p = tl.where(attends, p, 0.0)
    dropped = p
    if inputs.dropout is not None:
        keep = keeps_by_dropout(inputs.dropout, m.z, i, j, sizes.n_q)
        dropped = tl.where(keep, p * inputs.dropout.factor, 0.0)
        dp = tl.where(keep, dp * inputs.dropout.factor, 0.0)
    grad = p * (dp + row_numbers.minus_delta)
    if rows.grad_entropy is not None:
        # Forward: H = -sum p log p
        grad -= p * (tl.where(p == 0, 0.0, log_p) + row_numbers.entropy) * row_numbers.grad_entropy
    if MASKED:
        grad = tl.where(attends, grad, 0.0)
    uncapped_grad = grad
    if len(CAPS) > 0:
        # A gradient of 0 stays 0 before the caps, whatever the score is.
        _, slope_of_caps = capped(uncapped, CAPS)
        uncapped_grad = tl.where(grad == 0, 0.0, grad * slope_of_caps)
    return raw, dropped, grad, uncapped_grad


@triton.jit
def add_gradient(
    acc, ds, queries, keys, shared, m, dim, scale,
    FORM: tl.constexpr, DERIVATIVE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, OF_KEYS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Return acc plus the gradient of the queries (`OF_KEYS`: of the keys) from the gradients of the scores.

    The rows of `ds` are the queries (`OF_KEYS`: the keys). `MASKED`: not all pairs attend. INNER: the caller multiplies
    by `scale` after its last tile.
    """
    positions, other_positions = (keys, queries) if OF_KEYS else (queries, keys)
    if FORM == INNER:
        x = other_positions.vectors
        if MASKED:
            # The gradient of a pair that attends a NaN is NaN itself; others must not multiply it.
            x, _ = finite_of(x, 0)
        acc = tl.dot(ds.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    elif FORM == DISTANCE:
        acc = distance_gradient(acc, ds * (-2.0 * scale), positions, other_positions, dim, D)
    elif FORM == CHANNELS:
        INDEX: tl.constexpr = 1 if OF_KEYS else 0  # DERIVATIVE returns d/dq, then d/dk
        acc = channel_gradient(acc, ds, queries, keys, shared, m, dim, DERIVATIVE, INDEX, D)
    return acc


@triton.jit
def store_bias_gradient(grad_bias, grad, attends, m, i, j):
    """Store the gradient of a bias that has a number for each pair, once, as a pair is in one interval at most."""
    at = base(grad_bias, m) + i.to(tl.int64) * grad_bias.row + j * grad_bias.column
    tl.store(at, grad.to(grad_bias.data.dtype.element_ty), mask=attends)


@triton.jit
def d_query(
    inputs, grad_out, rows, grad_query, grad_query_bias, grad_scale, grad_bias, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, for a tile of queries, the gradients with an axis of queries, and of a bias of single pairs, if any."""
    inputs = with_types(inputs)
    tile, m = tl.program_id(0), matrix_of(tl.program_id(1), sizes.heads, sizes.groups)
    r, d, dv = tile * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, DV)
    i = r[:, None]
    query_side, key_side, value_side = side_of(inputs.query, m), side_of(inputs.key, m), side_of(inputs.value, m)
    queries = side_tile(query_side, i, d[None, :], sizes.n_q, sizes.dim, FORM)
    scale = scale_of(scale, inputs.scales, m, sizes)
    do = vectors(side_of(grad_out, m), i.to(tl.int64), dv[None, :], queries.live, sizes.value_dim)
    row_numbers = row_values(rows, m.z, i, sizes.n_q)
    acc = tl.zeros((BM, D), tl.float32)
    acc_query_bias = tl.zeros((BM,), tl.float32)
    acc_scale = tl.zeros((BM,), tl.float32)
    for interval in tl.range(0, INTERVALS):
        visited = key_segments(inputs.masking, interval, m, tile, sizes, BM, BN, TESTED)
        # The full tiles, then the tiles that read the mask.
        for full in tl.static_range(1, -1, -1):
            for step in tl.range(0, steps_of(visited, full)):
                j = (tile_of_step(step, visited, full) * BN + tl.arange(0, BN))[None, :]
                keys = side_tile(key_side, j, d[:, None], sizes.n_k, sizes.dim, FORM)
                v = vectors(value_side, j.to(tl.int64), dv[:, None], keys.live, sizes.value_dim)
                if full:
                    attends = queries.live & keys.live
                else:
                    attends = unmasked_in_interval(inputs.masking, interval, m, i, j, sizes)
                raw, _, grad, uncapped_grad = tile_gradients(
                    inputs, queries, keys, do, v, rows, row_numbers, attends, m, sizes, scale, slope,
                    FORM, FUNCTION, CAPS, RELATIVE, PRECISION, FULL=full,
                )  # fmt: skip
                ds = function_gradient(uncapped_grad, raw, inputs.shared, m, FORM, DERIVATIVE)
                if grad_bias is not None:
                    store_bias_gradient(grad_bias, grad, attends, m, i, j)
                if grad_query_bias is not None:
                    acc_query_bias += tl.sum(ds, 1)
                if grad_scale is not None:
                    acc_scale += tl.sum(tl.where(ds == 0, 0.0, ds * raw), 1)
                acc = add_gradient(
                    acc, ds, queries, keys, inputs.shared, m, sizes.dim, scale,
                    FORM, DERIVATIVE, PRECISION, MASKED=not full or inputs.bias is not None, OF_KEYS=False, D=D,
                )  # fmt: skip
    if FORM == INNER:
        acc = acc * scale
    store_vectors(grad_query, m, i, d[None, :], queries.live, sizes.dim, acc)
    at_row, live = m.z.to(tl.int64) * sizes.n_q + r, r < sizes.n_q
    if grad_query_bias is not None:
        tl.store(grad_query_bias + at_row, acc_query_bias, mask=live)
    if grad_scale is not None:
        # Forward: s = -scale * distance
        tl.store(grad_scale + at_row, acc_scale / scale, mask=live)


@triton.jit
def d_key(
    inputs, grad_out, rows, tiles, grad_key, grad_value, grad_key_bias, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    TESTED: tl.constexpr, RELATIVE: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values; `SHARED`: over all query heads of their KV head."""
    inputs = with_types(inputs)
    tile, members = tl.program_id(0), sizes.groups if SHARED else 1
    first = matrix_of(tl.program_id(1) * members, sizes.heads, sizes.groups)
    c, d, dv = tile * BN + tl.arange(0, BN), tl.arange(0, D), tl.arange(0, DV)
    j = c[:, None]
    key_side = side_of(inputs.key, first)
    keys = side_tile(key_side, j, d[None, :], sizes.n_k, sizes.dim, FORM)
    v = vectors(side_of(inputs.value, first), j.to(tl.int64), dv[None, :], keys.live, sizes.value_dim)
    acc = tl.zeros((BN, D), tl.float32)
    acc_value = tl.zeros((BN, DV), tl.float32)
    acc_key_bias = tl.zeros((BN,), tl.float32)
    line = 0
    if tiles is not None:
        # The line of this key tile in the result of `ranges.tiles_of_queries`.
        line = tl.minimum(first.b, inputs.masking.ends_batch - 1) * tl.num_programs(0) + tile
    visited, is_bad = segments(tiles, line, sizes.n_q, BM, TESTED), 0
    for member in tl.range(0, members):
        m = Matrix(first.z + member, first.b, first.h, first.g + member)
        query_side, grad_side = side_of(inputs.query, m), side_of(grad_out, m)
        scale = scale_of(scale, inputs.scales, m, sizes)
        # The full tiles, then the tiles that read the mask.
        for full in tl.static_range(1, -1, -1):
            for step in tl.range(0, steps_of(visited, full)):
                r = tile_of_step(step, visited, full) * BM + tl.arange(0, BM)
                i = r[None, :]
                queries = side_tile(query_side, i, d[:, None], sizes.n_q, sizes.dim, FORM)
                do = vectors(grad_side, r.to(tl.int64)[:, None], dv[None, :], r[:, None] < sizes.n_q, sizes.value_dim)
                if full:
                    attends = queries.live & keys.live
                else:
                    attends = unmasked_in_any_interval(inputs.masking, m, i, j, sizes, INTERVALS)
                row_numbers = row_values(rows, m.z, i, sizes.n_q)
                raw, dropped, _, uncapped_grad = tile_gradients(
                    inputs, queries, keys, do, v, rows, row_numbers, attends, m, sizes, scale, slope,
                    FORM, FUNCTION, CAPS, RELATIVE, PRECISION, FULL=full, OF_KEYS=True,
                )  # fmt: skip
                ds = function_gradient(uncapped_grad, raw, inputs.shared, m, FORM, DERIVATIVE)
                if not full or inputs.bias is not None:
                    do, is_bad = finite_of(do, is_bad)
                acc_value = tl.dot(dropped.to(do.dtype), do, acc_value, input_precision=PRECISION)
                if grad_key_bias is not None:
                    acc_key_bias += tl.sum(ds, 1)
                acc = add_gradient(
                    acc, ds, queries, keys, inputs.shared, m, sizes.dim, scale,
                    FORM, DERIVATIVE, PRECISION, MASKED=not full or inputs.bias is not None, OF_KEYS=True, D=D,
                )  # fmt: skip
    if FORM == INNER:
        acc = acc * scale
    store_vectors(grad_key, first, j, d[None, :], keys.live, sizes.dim, acc)
    if is_bad > 0:
        for member in tl.range(0, members):
            m = Matrix(first.z + member, first.b, first.h, first.g + member)
            acc_value = with_nonfinite(
                acc_value, inputs.masking, inputs.bias, side_of(grad_out, m), m, j, sizes,
                INTERVALS, RELATIVE, OF_KEYS=False, BLOCK=BM, D=DV,
            )  # fmt: skip
    store_vectors(grad_value, first, j, dv[None, :], keys.live, sizes.value_dim, acc_value)
    if grad_key_bias is not None:
        at = base(grad_key_bias, first) + c.to(tl.int64) * grad_key_bias.row
        tl.store(at, acc_key_bias, mask=c < sizes.n_k)


@triton.jit
def load_and_differentiate_tile(
    inputs, grad_out, rows, m, tile, key_tile, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile's queries, keys, `pair_scores`, and gradients of the scores after and before the caps."""
    i, j = (tile * BM + tl.arange(0, BM))[:, None], (key_tile * BN + tl.arange(0, BN))[None, :]
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    queries = side_tile(side_of(inputs.query, m), i, d[None, :], sizes.n_q, sizes.dim, FORM)
    keys = side_tile(side_of(inputs.key, m), j, d[:, None], sizes.n_k, sizes.dim, FORM)
    do = vectors(side_of(grad_out, m), i.to(tl.int64), dv[None, :], queries.live, sizes.value_dim)
    v = vectors(side_of(inputs.value, m), j.to(tl.int64), dv[:, None], keys.live, sizes.value_dim)
    attends = unmasked_in_any_interval(inputs.masking, m, i, j, sizes, INTERVALS)
    scale = scale_of(scale, inputs.scales, m, sizes)
    row_numbers = row_values(rows, m.z, i, sizes.n_q)
    raw, _, grad, uncapped_grad = tile_gradients(
        inputs, queries, keys, do, v, rows, row_numbers, attends, m, sizes, scale, slope,
        FORM, FUNCTION, CAPS, RELATIVE, PRECISION,
    )  # fmt: skip
    return queries, keys, raw, grad, uncapped_grad


@triton.jit
def members_of(all_batches, batches, kv_heads, group_count, sizes):
    """Return how many matrices of scores share one matrix of a bias."""
    return (all_batches // batches) * (sizes.heads // kv_heads) * (sizes.groups // group_count)


@triton.jit
def member_of(member, first_member, batches, kv_heads, group_count, sizes):
    """Return matrix number `member` of the matrices that share one bias, counted from `first_member`.

    Each size of the bias, `batches`, `kv_heads` or `group_count`, is 1, or the size of the scores with one step.
    """
    group_steps = sizes.groups // group_count
    head_steps = sizes.heads // kv_heads
    b = first_member.b + member // (group_steps * head_steps) * batches
    h = first_member.h + member // group_steps % head_steps * kv_heads
    g = first_member.g + member % group_steps * group_count
    return Matrix((b * sizes.heads + h) * sizes.groups + g, b, h, g)


@triton.jit
def d_bias(
    inputs, grad_out, rows, grad_bias, all_batches, batches, kv_heads, group_count, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a bias over the matrices that share it, for one tile of pairs.

    The bias has the sizes `batches`, `kv_heads` and `group_count`, see `member_of`. Where it has no axis of queries
    (not `HAS_ROWS`) or keys, each tile of queries or keys has its own sum.
    """
    RELATIVE: tl.constexpr = False
    inputs = with_types(inputs)
    tile, key_tile, bias_matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_member = matrix_of(bias_matrix, kv_heads, group_count)
    total = tl.zeros((BM, BN), tl.float32)
    for member in tl.range(0, members_of(all_batches, batches, kv_heads, group_count, sizes)):
        m = member_of(member, first_member, batches, kv_heads, group_count, sizes)
        _, _, _, grad, _ = load_and_differentiate_tile(
            inputs, grad_out, rows, m, tile, key_tile, sizes, scale, slope,
            FORM, FUNCTION, CAPS, INTERVALS, RELATIVE, BM, BN, D, DV, PRECISION,
        )  # fmt: skip
        total += grad
    r, c = tile * BM + tl.arange(0, BM), key_tile * BN + tl.arange(0, BN)
    bias_rows = sizes.n_q if HAS_ROWS else tl.num_programs(0)
    columns = sizes.n_k if HAS_COLUMNS else tl.num_programs(1)
    first = grad_bias + bias_matrix.to(tl.int64) * bias_rows * columns
    if HAS_ROWS and HAS_COLUMNS:
        at = first + r.to(tl.int64)[:, None] * columns + c[None, :]
        tl.store(at, total, mask=(r[:, None] < sizes.n_q) & (c[None, :] < sizes.n_k))
    elif HAS_ROWS:
        tl.store(first + r.to(tl.int64) * columns + key_tile, tl.sum(total, 1), mask=r < sizes.n_q)
    elif HAS_COLUMNS:
        tl.store(first + tile.to(tl.int64) * columns + c, tl.sum(total, 0), mask=c < sizes.n_k)
    else:
        tl.store(first + tile * columns + key_tile, tl.sum(total))


@triton.jit
def d_relative_bias(
    inputs, grad_out, rows, grad_bias, all_batches, batches, kv_heads, group_count, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a relative bias over the pairs of each key - query, for a share of the query tiles.

    With S shares, a program takes the tiles share, share + S, share + 2 S, ..., and adds to its own line of zeros,
    (share, matrix of the bias, key - query).
    """
    RELATIVE: tl.constexpr = True
    inputs = with_types(inputs)
    share, bias_matrix = tl.program_id(0), tl.program_id(1)
    first_member = matrix_of(bias_matrix, kv_heads, group_count)
    line = grad_bias + (share * tl.num_programs(1) + bias_matrix).to(tl.int64) * (sizes.n_q + sizes.n_k - 1)
    # A tile has BM + BN - 1 differences key - query; tl.arange takes powers of 2, so BM == BN.
    WIDTH: tl.constexpr = BM + BN
    w = tl.arange(0, WIDTH)
    # Entry w of a tile's line has the pairs whose key - query is w - (BM - 1), within the tile.
    column = w[None, :] - (BM - 1) + tl.arange(0, BM)[:, None]
    for member in tl.range(0, members_of(all_batches, batches, kv_heads, group_count, sizes)):
        m = member_of(member, first_member, batches, kv_heads, group_count, sizes)
        for step in tl.range(0, tl.cdiv(tl.cdiv(sizes.n_q, BM) - share, tl.num_programs(0))):
            tile = share + step * tl.num_programs(0)
            for key_tile in tl.range(0, tl.cdiv(sizes.n_k, BN)):
                _, _, _, grad, _ = load_and_differentiate_tile(
                    inputs, grad_out, rows, m, tile, key_tile, sizes, scale, slope,
                    FORM, FUNCTION, CAPS, INTERVALS, RELATIVE, BM, BN, D, DV, PRECISION,
                )  # fmt: skip
                is_inside = (column >= 0) & (column < BN)
                skewed = tl.gather(grad, tl.where(is_inside, column, 0), 1)
                sums = tl.sum(tl.where(is_inside, skewed, 0.0), 0)
                at = key_tile * BN - tile * BM + (sizes.n_q - BM) + w
                is_pair = (at >= 0) & (at < sizes.n_q + sizes.n_k - 1)
                tl.store(line + at, tl.load(line + at, mask=is_pair, other=0.0) + sums, mask=is_pair)
                # The next tile's line overlaps this one's, in other threads.
                tl.debug_barrier()


@triton.jit
def d_parameter(
    inputs, grad_out, rows, partial_sums, sizes, scale, slope,
    FORM: tl.constexpr, FUNCTION: tl.constexpr, DERIVATIVE: tl.constexpr, PARAMETER: tl.constexpr, CAPS: tl.constexpr,
    INTERVALS: tl.constexpr, TESTED: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a custom score's parameter number `PARAMETER` over the pairs of a tile of queries.

    `partial_sums` is (matrix, query tile, dim) where the score is a sum over channels, else (matrix, query tile).
    """
    inputs = with_types(inputs)
    tile, m = tl.program_id(0), matrix_of(tl.program_id(1), sizes.heads, sizes.groups)
    acc = tl.zeros((BM, D if FORM == CHANNELS else 1), tl.float32)
    first, last = tl.cdiv(sizes.n_k, BN), 0
    for interval in tl.range(0, INTERVALS):
        visited = key_segments(inputs.masking, interval, m, tile, sizes, BM, BN, TESTED)
        first, last = tl.minimum(first, visited.any_start), tl.maximum(last, visited.any_stop)
    for key_tile in tl.range(first, last):
        queries, keys, raw, _, ds = load_and_differentiate_tile(
            inputs, grad_out, rows, m, tile, key_tile, sizes, scale, slope,
            FORM, FUNCTION, CAPS, INTERVALS, RELATIVE, BM, BN, D, DV, PRECISION,
        )  # fmt: skip
        # DERIVATIVE returns d/dx (of channels: d/dq and d/dk), then one derivative for each parameter.
        if FORM == CHANNELS:
            acc = channel_gradient(acc, ds, queries, keys, inputs.shared, m, sizes.dim, DERIVATIVE, 2 + PARAMETER, D)
        else:
            acc += tl.sum(scaled_derivative(ds, raw, inputs.shared, m, DERIVATIVE, 1 + PARAMETER), 1, keep_dims=True)
    at = m.z.to(tl.int64) * tl.num_programs(0) + tile
    if FORM == CHANNELS:
        d = tl.arange(0, D)
        tl.store(partial_sums + at * sizes.dim + d, tl.sum(acc, 0), mask=d < sizes.dim)
    else:
        tl.store(partial_sums + at, tl.sum(tl.sum(acc, 1), 0))
