"""The k largest weights of each query by blocks of keys: exact, from the block maxima that the native kernel returns.

- The k largest weights of a query are in the k blocks with the largest maxima. One forward pass without values finds
  these blocks; the scores of their keys alone are then computed again.
- Memory is linear in the lengths: a few queries at a time, one number for each of their blocks.
- It takes 2 to 3 times as long as a forward pass; all weights of the queries would take 12 times as long, and 80 times
  with an additive score (measured at 4096 to 16384 tokens, causal).
- `is_profitable` excludes masks without intervals, biases, NaN, other kernels, and k near the number of keys.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import final

import numpy as np

from attnscore import kernels
from attnscore.backends.base import HALF_PRECISION, Array, Backend, HostArray
from attnscore.base import thresholds
from attnscore.base.layout import ScoreShape, is_unknown
from attnscore.kernels import tiling
from attnscore.masks import IntervalMask
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.scores.forms import Form, Role

# Keys in a block: a tile of the native kernel.
_BLOCK_BITS = 6
_BLOCK = 2**_BLOCK_BITS


def is_profitable(problem: Problem, k: int) -> bool:
    """Whether `topk_by_blocks` supports this problem and is faster than computing all weights."""
    score_shape, ops = problem.score_shape, problem.ops
    if any(map(is_unknown, score_shape.rows)) or is_unknown(score_shape.key_len) or 0 in score_shape.rows:
        return False
    if (
        score_shape.key_len < thresholds.BLOCKWISE_KEYS
        or k * _BLOCK * thresholds.BLOCKS_A_CANDIDATE > score_shape.key_len
        or problem.bias is not None
    ):
        return False
    interval_set, remaining_mask = problem.visibility
    if remaining_mask is not None or (interval_set is not None and interval_set.single is None):
        return False
    if kernels.choose("auto", problem).name != "native":
        return False
    return all(map(ops.known_finite, problem.form.arrays().values()))


def topk_by_blocks(problem: Problem, k: int) -> tuple[Array, Array]:
    """Return weights (*rows, k) in falling order, in the accumulator dtype, and their keys (undefined for weight 0)."""
    parts = [_topk_of_sequence(problem, entry, k) for entry in range(problem.score_shape.lead[0])]
    weights, index = (problem.ops.concat(list(arrays), 0) for arrays in zip(*parts, strict=True))
    return weights, index


@dataclass(frozen=True, eq=False)
class _Blocks:
    """One entry of the batch, with its keys in blocks: a new leading axis."""

    problem: Problem
    form: Form
    """Keys (block, *lead, head, group, key in block, dim), queries (1, *lead, head, group, query, dim)."""
    flat: dict[str, Array]
    """The same keys by name, (matrices * blocks, keys in block * dim)."""
    widths: dict[str, int]
    matrices: dict[str, HostArray]
    """Index of the matrix of `flat` that each (*lead, head, group) reads."""
    count: int
    start: HostArray
    stop: HostArray


def _topk_of_sequence(problem: Problem, entry: int, k: int) -> tuple[Array, Array]:
    """Return `topk_by_blocks` of one entry of the batch, some queries at a time."""
    ops, score_shape, blocks = problem.ops, problem.score_shape, _split_into_blocks(problem, entry)
    matrices = max(1, math.prod(score_shape.rows[1:-1]))
    rows = max(_BLOCK, thresholds.BLOCKWISE_NUMBERS // (matrices * blocks.count))
    step = max(1, thresholds.BLOCKWISE_NUMBERS // (matrices * k * _BLOCK * max(blocks.widths.values())))
    parts = []
    for first in range(0, score_shape.query_len, rows):
        count = min(rows, score_shape.query_len - first)
        index, log_denom = _best_blocks(blocks, first, count, k)
        for offset in range(0, count, step):
            size = min(step, count - offset)
            best, total = (ops.slice_axis(x, -2, offset, size) for x in (index, log_denom))
            parts.append(_best_keys(blocks, first + offset, size, best, total, k))
    weights, keys = (ops.expand_dims(ops.concat(list(arrays), -2), 0) for arrays in zip(*parts, strict=True))
    return weights, keys


def _split_into_blocks(problem: Problem, entry: int) -> _Blocks:
    """Return one entry of the batch with its keys in blocks, the last one padded."""
    ops, score_shape, form = problem.ops, problem.score_shape, problem.form
    count = -(-score_shape.key_len // _BLOCK)
    flat, widths, matrices, arrays = {}, {}, {}, {}
    lead = score_shape.rows[1:-1]
    for name, array in form.arrays().items():
        role = form.role(name)
        if role == "shared":
            arrays[name] = array
            continue
        entry_array = array[entry if array.shape[0] > 1 else 0]
        if role == "query":
            arrays[name] = ops.expand_dims(entry_array, 0)
            continue
        shape, width = tuple(entry_array.shape[:-2]), entry_array.shape[-1]
        padding = ops.zeros((*shape, count * _BLOCK - score_shape.key_len, width), entry_array, ops.dtype(entry_array))
        padded = ops.concat([entry_array, padding], -2) if count * _BLOCK > score_shape.key_len else entry_array
        blocked = ops.reshape(padded, (1, *shape, count, _BLOCK, width))
        arrays[name] = ops.swap_axes(blocked, 0, -3)[..., 0, :, :]
        flat[name], widths[name] = ops.reshape(padded, (-1, _BLOCK * width)), width
        matrices[name] = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), lead)
    interval_set = problem.visibility[0]
    if interval_set is None:
        start, stop = np.zeros((2, score_shape.query_len), np.int64)
        stop += score_shape.key_len
    else:
        start, stop = (x[entry if x.shape[0] > 1 else 0].astype(np.int64) for x in interval_set.ends)
    return _Blocks(problem, form.with_arrays(arrays), flat, widths, matrices, count, start, stop)


def _best_blocks(blocks: _Blocks, first: int, count: int, k: int) -> tuple[Array, Array]:
    """Return the k blocks with the largest maxima of each query, and log sum exp(scores - maximum), with the sink."""
    problem, ops = blocks.problem, blocks.problem.ops
    start, stop = (x[first : first + count] for x in (blocks.start, blocks.stop))
    # Blocks that are masked for all of these queries are skipped: half of all under a causal mask.
    attends = stop > start
    low = int(start[attends].min()) // _BLOCK if attends.any() else 0
    high = -(-int(stop[attends].max()) // _BLOCK) if attends.any() else 0
    low = min(low, blocks.count - k)
    high = max(high, low + k)

    def slice_operand(x: Array, role: Role) -> Array:
        if role == "shared":
            return x
        return ops.slice_axis(x, -2, first, count) if role == "query" else ops.slice_axis(x, 0, low, high - low)

    form = blocks.form.part(slice_operand)
    edges = np.arange(low, high)[:, None] * _BLOCK
    mask = _BlockMask(*(np.clip(x[None] - edges, 0, _BLOCK) for x in (start, stop)))
    lead = problem.score_shape.lead[1:]
    score_shape = dataclasses.replace(problem.score_shape, lead=(high - low, *lead), query_len=count, key_len=_BLOCK)
    arrays = form.arrays()
    blocks_problem = dataclasses.replace(
        problem,
        layout=dataclasses.replace(problem.layout, score_shape=score_shape, value_dim=0),
        query=arrays["query"],
        key=arrays["key"],
        value=ops.astype(arrays["key"][..., :0], problem.dtype),
        form=form,
        mask=mask,
        sink=None,
        statistics=("max_score",),
    )
    result = kernels.choose("auto", blocks_problem).forward(blocks_problem, tiling.plan(blocks_problem))

    def by_row(x: Array) -> Array:
        """Reshape (block, ..., query, 1) to (..., query, block)."""
        return ops.swap_axes(x, 0, -1)[0]

    maximum, row_max, log_denom = map(by_row, (result.statistics["max_score"], result.row_max, result.log_denom))
    _, best = ops.top_k(maximum, k)
    highest = ops.max(maximum, axis=-1, keepdims=True)
    highest = ops.where(highest == NEG_INF, 0.0, highest)
    total = ops.sum(
        ops.where(log_denom == NEG_INF, 0.0, ops.exp(row_max - highest + log_denom)), axis=-1, keepdims=True
    )
    if problem.sink is not None:
        sink = ops.astype(ops.reshape(problem.sink, (*problem.sink.shape, 1, 1)), problem.accumulator)
        total = total + ops.exp(sink - highest)
    return best + low, ops.log(ops.where(total == 0, 1.0, total))


def _best_keys(blocks: _Blocks, first: int, count: int, best: Array, log_denom: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest weights among the keys of the `best` blocks of each query, and these keys."""
    problem, ops, like = blocks.problem, blocks.problem.ops, blocks.problem.value
    dtype, lead = problem.accumulator, problem.score_shape.rows[1:-1]
    width, arrays = k * _BLOCK, {}
    for name, x in blocks.form.arrays().items():
        role = blocks.form.role(name)
        if role == "shared":
            # (head, group, ...): each query is a matrix of its own here, on an axis after them.
            arrays[name] = ops.expand_dims(x, 2) if len(x.shape) > 1 else x
        elif role == "query":
            arrays[name] = ops.expand_dims(ops.slice_axis(x[0], -2, first, count), -2)
        else:
            offset = ops.asarray(blocks.matrices[name][..., None, None] * blocks.count, like)
            rows = ops.take(blocks.flat[name], ops.reshape(best + offset, (-1,)), 0)
            arrays[name] = ops.reshape(rows, (*lead, count, width, blocks.widths[name]))
        if ops.dtype(arrays[name]) in HALF_PRECISION:
            arrays[name] = ops.astype(arrays[name], dtype)
    scores = ops.astype(blocks.form.with_arrays(arrays).scores(ops), dtype)[..., 0, :]
    inside = ops.reshape(ops.positions(0, _BLOCK, like), (1, _BLOCK))
    cols = ops.reshape(ops.expand_dims(best, -1) * _BLOCK + inside, (*lead, count, width))
    start, stop = (ops.asarray(x[first : first + count, None], like) for x in (blocks.start, blocks.stop))
    scores = ops.where(ops.logical_and(cols >= start, cols < stop), scores, NEG_INF)
    best_scores, position = ops.top_k(ops.broadcast_to(scores, (*lead, count, width)), k)
    # The maximum is among these. Subtracting it as recomputed here keeps weights at 1 or less at any scale of scores.
    row_max = best_scores[..., :1]
    weights = ops.exp(best_scores - ops.where(row_max == NEG_INF, 0.0, row_max) - log_denom)
    rank = ops.shift_right(position, _BLOCK_BITS)
    ranks = ops.reshape(ops.positions(0, k, like), (1, k))
    block_of = ops.sum(ops.where(ops.expand_dims(rank, -1) == ranks, ops.expand_dims(best, -2), 0), axis=-1)
    return weights, block_of * _BLOCK + position - rank * _BLOCK


@final
@dataclass(frozen=True, eq=False, repr=False)
class _BlockMask(IntervalMask):
    """Unmasked intervals of keys within blocks: (block, query)."""

    start: HostArray
    stop: HostArray

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> tuple[Array, Array]:
        indices = ops.reshape(rows, (-1,))
        start, stop = (ops.take(ops.asarray(x, rows), indices, 1) for x in (self.start, self.stop))
        return start, stop
