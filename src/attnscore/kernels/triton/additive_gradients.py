"""Gradients of additive scores in Triton.

- A chunk of queries at a time: ``store_gradients`` computes the gradients of its scores, and its weights, into memory
  that does not grow with the number of queries; the other kernels sum them over keys or queries.
- A program holds a tile (positions, channels) of sums and visits the positions of the other side in order, one or two
  at a time. No sum crosses threads, and no two programs add to the same place; chunks are added in their order.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from attnscore.base import thresholds
from attnscore.kernels.triton.additive import (
    ONE_TERM,
    TWO_TERMS,
    activation_and_slope,
    reciprocal,
    table_width,
)
from attnscore.kernels.triton.backward import row_values, store_bias_gradient, tile_gradients
from attnscore.kernels.triton.forward import with_nonfinite
from attnscore.kernels.triton.operands import Operand, RowGrads
from attnscore.kernels.triton.tile import (
    ADDITIVE,
    Matrix,
    base,
    finite_of,
    matrix_of,
    side_of,
    side_tile,
    unmasked_in_interval,
    vectors,
    with_types,
)
from attnscore.kernels.triton.tiles import SUMS, padded_dim

if TYPE_CHECKING:
    from attnscore.kernels.triton.launch import Operands

TILE = (SUMS, 64)
"""Positions and channels of the sums of a program: 8 numbers for each of 128 threads, so that many programs wait for
memory at a time (1.6 times as fast as four times as many numbers, on an H200)."""
INTERPRETED_TILE = (16, 16)
"""`TILE` in the interpreter."""


class Chunk(NamedTuple):
    """Some matrices and query tiles of a call, and memory for the gradients and weights of their pairs.

    Each query has `pitch` numbers: the key tiles of its query tile's first interval, then of the second, and so on.
    """

    ds: Any
    """Gradients of the scores, float32 (matrix, query, pitch); 0 where masked."""
    weights: Any
    """Weights after dropout."""
    pitch: Any
    first_matrix: Any
    """Index of the first KV head, counted over the batch; each KV head comes with all its query heads."""
    first_tile: Any
    tile_count: Any
    """Query tiles in the chunk."""
    tiles: Any
    """Query tiles of the call."""


@triton.jit
def key_tiles_of(masking, interval, b, tile, tiles, key_tiles):
    """Return the key tiles first <= t < last of an interval of a query tile, and the number in earlier intervals."""
    before = 0
    if masking.start is None:
        first, last = 0, key_tiles
    else:
        # A line of four ends for each batch row, or for all; the first and the last bound the tiles (`Masking.ends`).
        batch_line = tl.minimum(b, masking.ends_batch - 1)
        at = masking.ends + (batch_line.to(tl.int64) * tiles + tile) * 4
        for _ in tl.range(0, interval):
            before += tl.load(at + 3) - tl.load(at)
            at += masking.ends_batch * tiles * 4
        first, last = tl.load(at), tl.load(at + 3)
    return first, last, before


@triton.jit
def store_gradients(
    inputs, grad_out, rows, chunk, grad_bias, sizes, slope,
    ACTIVATION: tl.constexpr, CAPS: tl.constexpr, INTERVALS: tl.constexpr, RELATIVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the scores of a query tile of the chunk, its weights, and the gradient of its bias."""
    inputs = with_types(inputs)
    local, chunk_matrix = tl.program_id(0), tl.program_id(1)
    tile = chunk.first_tile + local
    m = matrix_of(chunk.first_matrix * sizes.groups + chunk_matrix, sizes.heads, sizes.groups)
    i, dv = (tile * BM + tl.arange(0, BM))[:, None], tl.arange(0, DV)
    query_side, key_side, value_side = side_of(inputs.query, m), side_of(inputs.key, m), side_of(inputs.value, m)
    queries = side_tile(query_side, i, None, sizes.n_q, sizes.dim, ADDITIVE)
    do = vectors(side_of(grad_out, m), i.to(tl.int64), dv[None, :], queries.live, sizes.value_dim)
    row_numbers = row_values(rows, m.z, i, sizes.n_q)
    stored = (chunk_matrix.to(tl.int64) * chunk.tile_count + local) * BM + tl.arange(0, BM)
    for interval in tl.range(0, INTERVALS):
        first, last, before = key_tiles_of(inputs.masking, interval, m.b, tile, chunk.tiles, tl.cdiv(sizes.n_k, BN))
        for key_tile in tl.range(first, last):
            j = (key_tile * BN + tl.arange(0, BN))[None, :]
            keys = side_tile(key_side, j, None, sizes.n_k, sizes.dim, ADDITIVE)
            v = vectors(value_side, j.to(tl.int64), dv[:, None], keys.live, sizes.value_dim)
            attends = unmasked_in_interval(inputs.masking, interval, m, i, j, sizes)
            # An additive score has the scale 1.0.
            _, weights, grad, ds = tile_gradients(
                inputs, queries, keys, do, v, rows, row_numbers, attends, m, sizes, 1.0, slope,
                ADDITIVE, ACTIVATION, CAPS, RELATIVE, PRECISION,
            )  # fmt: skip
            if grad_bias is not None:
                store_bias_gradient(grad_bias, grad, attends, m, i, j)
            at_chunk = stored[:, None] * chunk.pitch + ((before + key_tile - first) * BN + tl.arange(0, BN))[None, :]
            tl.store(chunk.ds + at_chunk, ds)
            tl.store(chunk.weights + at_chunk, weights)


@triton.jit
def _sums(
    acc, acc_act, acc_ds, a, other, c, channels, ds, step, start, stop, slope,
    ACTIVATION: tl.constexpr, TERMS: tl.constexpr, HAS_W_V: tl.constexpr,
):  # fmt: skip
    """Add ds act', ds act and ds of the positions start <= k < stop of the other side to the sums of a tile.

    The last two, for the gradient of w_v, only with `HAS_W_V`. `ds` points at the gradients of position `start`; the
    next position's are `step` numbers on. With 1 or 2 `TERMS` to a division, `a` and `other` are exponentials without
    NaN (`Table.powers`), and r = 1 / (a b + 1) and r (1 - r) stand for act and act', whose sums `side_gradient`
    computes from theirs; with 0 they are the sides themselves.
    """
    inside = (c < channels)[None, :]
    first = tl.zeros_like(c).to(tl.int64) + start
    b = other.data + (first * other.row + c.to(tl.int64) * other.column)[None, :]
    for _ in tl.range(start, stop, 2 if TERMS == 2 else 1):
        g = tl.load(ds)
        if TERMS == 0:
            y, f = activation_and_slope(a + tl.load(b, mask=inside, other=0.0).to(tl.float32), slope, ACTIVATION)
            column = g[:, None]
            # A masked pair has ds = 0, whose product with a NaN would be NaN.
            acc += tl.where(column == 0.0, 0.0, column * f)
            if HAS_W_V:
                acc_act += tl.where(column == 0.0, 0.0, column * y)
        elif TERMS == 1:
            r = reciprocal(a * tl.load(b, mask=inside, other=0.0) + 1.0)
            e = g[:, None] * r
            acc += e - e * r
            if HAS_W_V:
                acc_act += e
        else:
            # There is room for one position more than an odd length, with ds = 0.
            d = a * tl.load(b, mask=inside, other=0.0) + 1.0
            d_2 = a * tl.load(b + other.row, mask=inside, other=0.0) + 1.0
            inverse = reciprocal(d * d_2)
            r, r_2 = inverse * d_2, inverse * d
            g_2 = tl.load(ds + step)
            e, e_2 = g[:, None] * r, g_2[:, None] * r_2
            acc += e - e * r
            acc += e_2 - e_2 * r_2
            if HAS_W_V:
                acc_act += e + e_2
                acc_ds += g_2
        if HAS_W_V:
            acc_ds += g
        ds += step * (2 if TERMS == 2 else 1)
        b += other.row * (2 if TERMS == 2 else 1)
    return acc, acc_act, acc_ds


@triton.jit
def _side_sums(
    target, other, channels, position, c, chunk, ds, masking, b, target_tile, target_len, other_len, slope,
    ACTIVATION: tl.constexpr, TERMS: tl.constexpr, IS_QUERY: tl.constexpr, HAS_W_V: tl.constexpr,
    INTERVALS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return `_sums` of target positions over the other side's positions in tiles that `store_gradients` visited."""
    at_target = target.data + position.to(tl.int64)[:, None] * target.row + c.to(tl.int64)[None, :] * target.column
    a = tl.load(at_target, mask=(position < target_len)[:, None] & (c < channels)[None, :], other=0.0).to(tl.float32)
    acc, acc_act = tl.zeros((BLOCK, CHANNELS), tl.float32), tl.zeros((BLOCK, CHANNELS), tl.float32)
    acc_ds = tl.zeros((BLOCK,), tl.float32)
    key_tiles = tl.cdiv(other_len if IS_QUERY else target_len, BN)
    for part in tl.range(0, INTERVALS if IS_QUERY else INTERVALS * chunk.tile_count):
        # The query tile of the target queries, or one query tile of the chunk after the other.
        tile = chunk.first_tile + (target_tile if IS_QUERY else part // INTERVALS)
        first, last, before = key_tiles_of(masking, part % INTERVALS, b, tile, chunk.tiles, key_tiles)
        if IS_QUERY:
            start, stop, step = first * BN, tl.minimum(last * BN, other_len), 1
            ds_row, ds_column = position, before * BN
        else:
            start, step = tile * BM, chunk.pitch
            is_visited = (first <= target_tile) & (target_tile < last)
            stop = tl.where(is_visited, tl.minimum(start + BM, other_len), start)
            ds_row, ds_column = start, (before + target_tile - first) * BN + (position - target_tile * BN)
        at = ds + (ds_row - chunk.first_tile * BM).to(tl.int64) * chunk.pitch + ds_column
        acc, acc_act, acc_ds = _sums(
            acc, acc_act, acc_ds, a, other, c, channels, at, step, start, stop, slope, ACTIVATION, TERMS, HAS_W_V
        )
    return acc, acc_act, acc_ds


@triton.jit
def side_gradient(
    target, other, target_powers, other_powers, target_sizes, other_size, w_v, chunk, gradient, grad_w_v, masking,
    target_len, other_len, hidden, heads, groups, group, target_groups, slope,
    ACTIVATION: tl.constexpr, IS_QUERY: tl.constexpr, INTERVALS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile (positions, channels) of one side from a chunk of the scores' gradients.

    Queries: a program writes their gradient, and its part of the gradient of w_v to `grad_w_v`. Keys: it adds to the
    result of earlier launches, for query head `group` of each KV head, and `grad_w_v` is None; `target_groups` is 1
    where the query heads share keys.
    """
    masking = with_types(masking)
    block, z = tl.program_id(0), tl.program_id(2)
    HAS_W_V: tl.constexpr = grad_w_v is not None
    if IS_QUERY:
        kv, g, ds_matrix = chunk.first_matrix + z // groups, z % groups, z
        target_tile, matrix = block * BLOCK // BM, kv * groups + g
        block += chunk.first_tile * (BM // BLOCK)
    else:
        kv, g, ds_matrix = chunk.first_matrix + z, group, z * groups + group
        target_tile, matrix = block * BLOCK // BN, kv * target_groups + tl.minimum(group, target_groups - 1)
    m = Matrix(kv * groups + g, kv // heads, kv % heads, g)
    position = block * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = position < target_len
    ds = chunk.ds + ds_matrix.to(tl.int64) * chunk.tile_count * BM * chunk.pitch
    a, other_a = side_of(target, m), side_of(other, m)
    common = (position, c, chunk, ds, masking, m.b, target_tile, target_len, other_len, slope)
    if ACTIVATION == "tanh" or ACTIVATION == "sigmoid":
        # `TERMS` of `_sums`: 2 if products of two denominators are finite; 1 if the exponentials in the tables are, as
        # 1 / inf = 0 is right; else 0, from the sides. The limits are for exp(2 z); a sigmoid has exp(-z).
        reach: tl.constexpr = 1.0 if ACTIVATION == "tanh" else 2.0
        # The largest absolute values: of these positions, and of the whole other side.
        size = tl.max(tl.load(base(target_sizes, m) + position, mask=live, other=0.0), 0)
        size_of_other = tl.load(base(other_size, m))
        exp_a, exp_b, width = side_of(target_powers, m), side_of(other_powers, m), table_width(hidden)
        if size + size_of_other <= reach * TWO_TERMS:
            acc, acc_act, acc_ds = _side_sums(
                exp_a, exp_b, width, *common, ACTIVATION, 2, IS_QUERY, HAS_W_V, INTERVALS, BM, BN, BLOCK, CHANNELS
            )
        elif tl.maximum(size, size_of_other) <= reach * ONE_TERM:
            acc, acc_act, acc_ds = _side_sums(
                exp_a, exp_b, width, *common, ACTIVATION, 1, IS_QUERY, HAS_W_V, INTERVALS, BM, BN, BLOCK, CHANNELS
            )
        else:
            acc, acc_act, acc_ds = _side_sums(
                a, other_a, hidden, *common, ACTIVATION, 0, IS_QUERY, HAS_W_V, INTERVALS, BM, BN, BLOCK, CHANNELS
            )
    else:
        acc, acc_act, acc_ds = _side_sums(
            a, other_a, hidden, *common, ACTIVATION, 0, IS_QUERY, HAS_W_V, INTERVALS, BM, BN, BLOCK, CHANNELS
        )
    is_written = live[:, None] & (c < hidden)[None, :]
    w = tl.load(base(w_v, m) + c, mask=c < hidden, other=0.0)[None, :]
    # With r of `_sums`, tanh' = 4 r (1 - r), and tanh = 1 - 2 r.
    grad_tile = acc * (4.0 * w if ACTIVATION == "tanh" else w)
    grad_at = gradient + (matrix.to(tl.int64) * target_len + position[:, None]) * hidden + c[None, :]
    if not IS_QUERY:
        grad_tile += tl.load(grad_at, mask=is_written, other=0.0)
    tl.store(grad_at, grad_tile, mask=is_written)
    if HAS_W_V:
        total = tl.sum(acc_act, 0)
        if ACTIVATION == "tanh":
            total = tl.sum(acc_ds, 0) - 2.0 * total
        # The last query tile may have blocks without a query.
        blocks = tl.cdiv(target_len, BLOCK)
        at_w_v = grad_w_v + (matrix.to(tl.int64) * blocks + block) * hidden + c
        tl.store(at_w_v, total, mask=(c < hidden) & (block < blocks))


@triton.jit
def value_gradient(
    inputs, grad_out, chunk, gradient, sizes,
    RELATIVE: tl.constexpr, INTERVALS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the chunk's queries, over all heads of a group, to the gradient of a tile of values."""
    inputs = with_types(inputs)
    block, chunk_matrix = tl.program_id(0), tl.program_id(1)
    kv = chunk.first_matrix + chunk_matrix
    b, h = kv // sizes.heads, kv % sizes.heads
    j, dv, local = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DV), tl.arange(0, BM)
    key_tile = block * BLOCK // BN
    grad_at = gradient + (kv.to(tl.int64) * sizes.n_k + j[:, None]) * sizes.value_dim + dv[None, :]
    is_written = (j < sizes.n_k)[:, None] & (dv < sizes.value_dim)[None, :]
    acc = tl.load(grad_at, mask=is_written, other=0.0)
    is_bad = 0
    for part in tl.range(0, sizes.groups * chunk.tile_count * INTERVALS):
        group_tile, interval = part // INTERVALS, part % INTERVALS
        g, tile = group_tile // chunk.tile_count, chunk.first_tile + group_tile % chunk.tile_count
        m = Matrix(kv * sizes.groups + g, b, h, g)
        first, last, before = key_tiles_of(inputs.masking, interval, b, tile, chunk.tiles, tl.cdiv(sizes.n_k, BN))
        if (first <= key_tile) & (key_tile < last):
            matrix = (chunk_matrix * sizes.groups + g).to(tl.int64)
            stored = (matrix * chunk.tile_count + group_tile % chunk.tile_count) * BM + local
            column = (before + key_tile - first) * BN + (j - key_tile * BN)
            p = tl.load(chunk.weights + stored[None, :] * chunk.pitch + column[:, None])
            i = (tile * BM + local)[:, None]
            do = vectors(side_of(grad_out, m), i.to(tl.int64), dv[None, :], i < sizes.n_q, sizes.value_dim)
            do, is_bad = finite_of(do, is_bad)
            acc = tl.dot(p.to(do.dtype), do, acc, input_precision=PRECISION)
    if is_bad > 0:
        for g in tl.range(0, sizes.groups):
            m = Matrix(kv * sizes.groups + g, b, h, g)
            acc = with_nonfinite(
                acc, inputs.masking, inputs.bias, side_of(grad_out, m), m, j[:, None], sizes,
                INTERVALS, RELATIVE, OF_KEYS=False, BLOCK=BM, D=DV,
            )  # fmt: skip
    tl.store(grad_at, acc, mask=is_written)


def gradients(
    operands: Operands, grad_out: Operand, rows: RowGrads, grad_bias: Operand | None, requested: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Return the gradients of query', key', w_v and value that are requested, in float32, of every (batch, head).

    Shapes: query' (batch, head, group, query, h), key' (batch, head, group or 1, key, h), value (batch, head, 1, key,
    value_dim), w_v (head, group, h). `grad_bias`, of a bias with a number for each pair, is filled.
    """
    n_q, n_k, hidden, value_dim, heads, groups = operands.sizes
    sides: Any = operands.additive
    runner = operands.runner
    intervals, tile, device = operands.interval_count, operands.tile("store_gradients"), grad_out.data.device
    block, channels = TILE if runner.architecture(grad_out.data) else INTERPRETED_TILE
    inputs, kv_heads = operands.inputs(tile), operands.batch * heads
    # An interval of a query tile has the key tiles of all its queries, so two intervals may have the same key tile.
    tiles, pitch = triton.cdiv(n_q, tile.queries), intervals * triton.cdiv(n_k, tile.keys) * tile.keys

    # A key that is projected for each query head is not shared by the heads of a group.
    key_groups = 1 if sides.key.group == 0 else groups

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    totals = {
        "query": zeros(operands.batch, heads, groups, n_q, hidden),
        "key": zeros(operands.batch, heads, key_groups, n_k, hidden),
        "value": zeros(operands.batch, heads, 1, n_k, value_dim),
    }
    grad_w_v = zeros(operands.batch, heads, groups, triton.cdiv(n_q, block), hidden)
    pairs_of_tile = groups * tile.queries * pitch
    # A chunk has some KV heads with all their query tiles, or some query tiles of one KV head.
    max_kv_heads = max(1, min(kv_heads, thresholds.GRADIENT_PAIRS // (tiles * pairs_of_tile)))
    max_tiles = tiles if max_kv_heads > 1 else max(1, min(tiles, thresholds.GRADIENT_PAIRS // pairs_of_tile))
    ds, weights = torch.empty((2, max_kv_heads * max_tiles * pairs_of_tile), dtype=torch.float32, device=device)
    shape: dict[str, Any] = {"INTERVALS": intervals, "BM": tile.queries, "BN": tile.keys}
    scores = {"ACTIVATION": operands.function, "CAPS": operands.caps, "RELATIVE": operands.is_relative}
    values = {"DV": padded_dim(value_dim), "PRECISION": operands.precision}
    sums = {"BLOCK": block, **shape, "num_warps": 4}
    columns = triton.cdiv(hidden, channels)
    query, key = sides.query_table, sides.key_table
    for kv, first in itertools.product(range(0, kv_heads, max_kv_heads), range(0, tiles, max_tiles)):
        kvs, count = min(max_kv_heads, kv_heads - kv), min(max_tiles, tiles - first)
        chunk = Chunk(ds, weights, pitch, kv, first, count, tiles)
        runner.run(
            store_gradients, (count, kvs * groups),
            inputs, grad_out, rows, chunk, grad_bias, operands.sizes, operands.slope,
            **scores, **shape, **values, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if requested & {"query", "w_v"}:
            # `group` is 0: for queries the kernel does not read it.
            runner.run(
                side_gradient, (count * tile.queries // block, columns, kvs * groups),
                sides.query, sides.key, query.powers, key.powers, query.sizes, key.largest, sides.w_v, chunk,
                totals["query"], grad_w_v, inputs.masking, n_q, n_k, hidden, heads, groups, 0, groups, operands.slope,
                ACTIVATION=operands.function, IS_QUERY=True, CHANNELS=channels, **sums,
            )  # fmt: skip
        for group in range(groups if "key" in requested else 0):
            runner.run(
                side_gradient, (triton.cdiv(n_k, block), columns, kvs),
                sides.key, sides.query, key.powers, query.powers, key.sizes, query.largest, sides.w_v, chunk,
                totals["key"], None, inputs.masking, n_k, n_q, hidden, heads, groups, group, key_groups, operands.slope,
                ACTIVATION=operands.function, IS_QUERY=False, CHANNELS=channels, **sums,
            )  # fmt: skip
        if "value" in requested and value_dim:
            runner.run(
                value_gradient, (triton.cdiv(n_k, block), kvs),
                inputs, grad_out, chunk, totals["value"], operands.sizes,
                RELATIVE=operands.is_relative, **values, **sums,
            )  # fmt: skip
    totals["w_v"] = grad_w_v.sum((0, 3))
    return {name: x for name, x in totals.items() if name in requested}
