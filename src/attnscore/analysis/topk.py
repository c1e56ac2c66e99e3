"""The largest weights of each row: sought in bins of keys, of which the native kernel tells the largest score.

- A key among the k largest of its row lies in one of the k bins with the largest scores. One forward pass without
  values finds these; the scores of their keys alone are then computed again. Nothing is approximate.
- Memory is linear in the lengths: a few rows at a time, one number for each of their bins.
- What this way does not take, it says (`pays`): scattered masks, biases, NaN, other kernels, k near the number of keys.
  There the rows are computed whole, which takes 12 times as long as a forward pass, and 80 times with an additive
  score; this way takes 2 to 3 times as long (measured at 4096 to 16384 tokens, causal).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import final

import numpy as np

from attnscore import kernels
from attnscore.backends.base import Array, Backend, HostArray, is_unknown
from attnscore.core import tiling
from attnscore.core.layout import ScoreShape
from attnscore.core.online_softmax import NEG_INF
from attnscore.core.problem import Problem
from attnscore.masks import Intervals, Mask
from attnscore.scores.forms import Form, Role

# Keys in a bin: a tile of the native kernel.
_BITS = 6
_BIN = 2**_BITS
# Below this the whole rows are as fast: a forward by bins has a cost of its own.
_FEWEST_KEYS = 4096
# Copying a row's candidates costs about 6 times the plain way's share of a pair.
_FEWEST_BINS_A_LINK = 8
# Numbers held at a time for rows x bins, and for the keys of the candidates: 4 MB each in float32.
_HELD = 2**20


def pays(problem: Problem, k: int) -> bool:
    """Whether the k largest weights of this problem are found through bins, and faster so."""
    score_shape, ops = problem.score_shape, problem.ops
    if any(map(is_unknown, score_shape.rows)) or is_unknown(score_shape.key_len) or 0 in score_shape.rows:
        return False
    if (
        score_shape.key_len < _FEWEST_KEYS
        or k * _BIN * _FEWEST_BINS_A_LINK > score_shape.key_len
        or problem.bias is not None
    ):
        return False
    interval_set, rest = problem.visibility
    if rest is not None or (interval_set is not None and interval_set.single is None):
        return False
    if kernels.choose("auto", problem).name != "native":
        return False
    return ops.known_finite(*problem.form.arrays().values())


def top_of_bins(problem: Problem, k: int) -> tuple[Array, Array]:
    """Weights (*rows, k) in falling order, in the dtype of sums, and their keys (those of weight 0 mean nothing)."""
    ops, lead = problem.ops, problem.score_shape.lead
    if lead[0] == 1:
        return _of_sequence(problem, 0, k)
    parts = [_of_sequence(problem, place, k) for place in range(lead[0])]
    weights, index = (ops.concat(list(found), 0) for found in zip(*parts, strict=True))
    return weights, index


@dataclass(frozen=True, eq=False)
class _Bins:
    """One sequence of the batch, its keys in bins, which stand on a batch axis of their own in front."""

    problem: Problem
    form: Form
    """Keys (bins, *lead, head, group, bin, dim), queries (1, *lead, head, group, query, dim)."""
    flat: dict[str, Array]
    """The same keys by name, (matrices * bins, bin * dim)."""
    widths: dict[str, int]
    matrices: dict[str, HostArray]
    """Which of the matrices of `flat` each (*lead, head, group) reads."""
    count: int
    start: HostArray
    stop: HostArray


def _of_sequence(problem: Problem, place: int, k: int) -> tuple[Array, Array]:
    ops, score_shape, bins = problem.ops, problem.score_shape, _binned(problem, place)
    matrices = max(1, math.prod(score_shape.rows[1:-1]))
    rows = max(_BIN, _HELD // (matrices * bins.count))
    few = max(1, _HELD // (matrices * k * _BIN * max(bins.widths.values())))
    parts = []
    for first in range(0, score_shape.query_len, rows):
        count = min(rows, score_shape.query_len - first)
        index, log_denom = _best_bins(bins, first, count, k)
        for at in range(0, count, few):
            part = min(few, count - at)
            best, total = (ops.slice_axis(x, -2, at, part) for x in (index, log_denom))
            parts.append(_best_keys(bins, first + at, part, best, total, k))
    weights, found = (ops.expand_dims(ops.concat(list(x), -2), 0) for x in zip(*parts, strict=True))
    return weights, found


def _binned(problem: Problem, place: int) -> _Bins:
    ops, score_shape, form = problem.ops, problem.score_shape, problem.form
    count = -(-score_shape.key_len // _BIN)
    flat, widths, matrices, cuts = {}, {}, {}, {}
    lead = score_shape.rows[1:-1]
    for name, array in form.arrays().items():
        role = form.role(name)
        if role == "shared":
            cuts[name] = array
            continue
        here = array[place if array.shape[0] > 1 else 0]
        if role == "query":
            cuts[name] = ops.expand_dims(here, 0)
            continue
        before, width = tuple(here.shape[:-2]), here.shape[-1]
        padding = ops.zeros((*before, count * _BIN - score_shape.key_len, width), here, ops.dtype(here))
        whole = ops.concat([here, padding], -2) if count * _BIN > score_shape.key_len else here
        in_bins = ops.reshape(whole, (1, *before, count, _BIN, width))
        cuts[name] = ops.swap_axes(in_bins, 0, -3)[..., 0, :, :]
        flat[name], widths[name] = ops.reshape(whole, (-1, _BIN * width)), width
        matrices[name] = np.broadcast_to(np.arange(math.prod(before)).reshape(before), lead)
    interval_set = problem.visibility[0]
    if interval_set is None:
        start, stop = np.zeros((2, score_shape.query_len), np.int64)
        stop += score_shape.key_len
    else:
        start, stop = (x[place if x.shape[0] > 1 else 0].astype(np.int64) for x in interval_set.ends)
    return _Bins(problem, form.with_arrays(cuts), flat, widths, matrices, count, start, stop)


def _best_bins(bins: _Bins, first: int, count: int, k: int) -> tuple[Array, Array]:
    """Of each of some rows the k bins with the largest scores, and log sum exp(s - the largest), the sink in it."""
    problem, ops = bins.problem, bins.problem.ops
    start, stop = (x[first : first + count] for x in (bins.start, bins.stop))
    # Bins that none of the rows sees are not even looked at: half of all under a causal mask.
    seen = stop > start
    low = int(start[seen].min()) // _BIN if seen.any() else 0
    high = -(-int(stop[seen].max()) // _BIN) if seen.any() else 0
    low = min(low, bins.count - k)
    high = max(high, low + k)

    def cut(x: Array, role: Role) -> Array:
        if role == "shared":
            return x
        return ops.slice_axis(x, -2, first, count) if role == "query" else ops.slice_axis(x, 0, low, high - low)

    form = bins.form.part(cut)
    edges = np.arange(low, high)[:, None] * _BIN
    mask = _InBins(*(np.clip(x[None] - edges, 0, _BIN) for x in (start, stop)))
    lead = problem.score_shape.lead[1:]
    score_shape = dataclasses.replace(problem.score_shape, lead=(high - low, *lead), query_len=count, key_len=_BIN)
    arrays = form.arrays()
    part = dataclasses.replace(
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
    result = kernels.choose("auto", part).forward(part, tiling.plan(part))

    def by_row(x: Array) -> Array:
        """(bins, ..., row, 1) as (..., row, bins)."""
        return ops.swap_axes(x, 0, -1)[0]

    top, shift, log_denom = map(by_row, (result.statistics["max_score"], result.row_max, result.log_denom))
    _, best = ops.top_k(top, k)
    highest = ops.max(top, axis=-1, keepdims=True)
    highest = ops.where(highest == NEG_INF, 0.0, highest)
    total = ops.sum(ops.where(log_denom == NEG_INF, 0.0, ops.exp(shift - highest + log_denom)), axis=-1, keepdims=True)
    if problem.sink is not None:
        sink = ops.astype(ops.reshape(problem.sink, (*problem.sink.shape, 1, 1)), problem.accumulator)
        total = total + ops.exp(sink - highest)
    return best + low, ops.log(ops.where(total == 0, 1.0, total))


def _best_keys(bins: _Bins, first: int, count: int, best: Array, log_denom: Array, k: int) -> tuple[Array, Array]:
    """The k largest weights among the keys of each row's best bins, and these keys."""
    problem, ops, like = bins.problem, bins.problem.ops, bins.problem.value
    dtype, lead = problem.accumulator, problem.score_shape.rows[1:-1]
    width, arrays = k * _BIN, {}
    for name, x in bins.form.arrays().items():
        role = bins.form.role(name)
        if role == "shared":
            # Heads and groups stand in front; each row is now a matrix of its own behind them.
            arrays[name] = ops.expand_dims(x, 2) if len(x.shape) > 1 else x
        elif role == "query":
            arrays[name] = ops.expand_dims(ops.slice_axis(x[0], -2, first, count), -2)
        else:
            offset = ops.asarray(bins.matrices[name][..., None, None] * bins.count, like)
            taken = ops.take(bins.flat[name], ops.reshape(best + offset, (-1,)), 0)
            arrays[name] = ops.reshape(taken, (*lead, count, width, bins.widths[name]))
        if ops.dtype(arrays[name]) in ("float16", "bfloat16"):
            arrays[name] = ops.astype(arrays[name], dtype)
    scores = ops.astype(bins.form.with_arrays(arrays).scores(ops), dtype)[..., 0, :]
    inside = ops.reshape(ops.positions(0, _BIN, like), (1, _BIN))
    cols = ops.reshape(ops.expand_dims(best, -1) * _BIN + inside, (*lead, count, width))
    start, stop = (ops.asarray(x[first : first + count, None], like) for x in (bins.start, bins.stop))
    scores = ops.where(ops.logical_and(cols >= start, cols < stop), scores, NEG_INF)
    found, where = ops.top_k(ops.broadcast_to(scores, (*lead, count, width)), k)
    # The largest score is among these: subtracted as computed here, it weighs no more than 1 at any level.
    top = found[..., :1]
    weights = ops.exp(found - ops.where(top == NEG_INF, 0.0, top) - log_denom)
    rank = ops.shift_right(where, _BITS)
    ranks = ops.reshape(ops.positions(0, k, like), (1, k))
    bin_of = ops.sum(ops.where(ops.expand_dims(rank, -1) == ranks, ops.expand_dims(best, -2), 0), axis=-1)
    return weights, bin_of * _BIN + where - rank * _BIN


@final
@dataclass(frozen=True, eq=False, repr=False)
class _InBins(Mask):
    """Intervals within bins: (bins, row)."""

    start: HostArray
    stop: HostArray

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        at = ops.reshape(rows, (-1,))
        start, stop = (ops.take(ops.asarray(x, rows), at, 1) for x in (self.start, self.stop))
        start, stop = (score_shape.batch_to_canonical(ops, ops.expand_dims(x, -1)) for x in (start, stop))
        return ops.logical_and(cols >= start, cols < stop)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return self.start, self.stop

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        """Made here, to fit."""
