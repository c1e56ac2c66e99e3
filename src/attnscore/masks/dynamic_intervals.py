"""Intervals whose numbers the host cannot read: traced in a staged program, or on a GPU.

- JAX calls the kernel inside its program (`Backend.custom_calls`), and Triton reads lengths on the GPU: start and stop
  are arrays of the framework, one number a query each. The keys of a query are an interval without some holes. The AND
  of two such sets is one again, and so are the complement of an interval and the union of two.
- Other programs call back into Python, where the index values are known. Whether a query then has few intervals must be
  known earlier, from the form of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.masks.base import And, Ends, IntervalMask, Mask, Not, Or, all_of, parts_of
from attnscore.masks.builtin import ValidLens
from attnscore.masks.index_values import by_row
from attnscore.masks.intervals import MAX_INTERVALS, IntervalSet
from attnscore.masks.sharded import Sharded

_IntervalWithHoles = list[Ends]
"""Start and stop of the interval of each query, (batch or 1, query or 1) each, then start and stop of each hole."""


def without_interval_parts(
    ops: Backend, score_shape: ScoreShape, like: Array, remaining: Mask, intervals: IntervalSet | None
) -> list[Mask]:
    """Return the parts of `remaining` that cannot be intervals even while a staged program runs.

    `intervals` are the other parts, known now; a query may have at most `MAX_INTERVALS` intervals, these included.
    """
    parts = parts_of(remaining)
    if ops.custom_calls():
        tracer = _Tracer(ops, score_shape, like)
        return [part for part in parts if tracer.trace(part) is None]
    count, others = 1 if intervals is None else intervals.count, []
    for part in parts:
        # The AND of m and n intervals has at most m + n - 1.
        limit = _max_intervals(part)
        if limit is None or count + limit - 1 > MAX_INTERVALS:
            others.append(part)
        else:
            count += limit - 1
    return others


def _max_intervals(mask: Mask) -> int | None:
    """Return how many intervals a query may have whatever the index values are; None without a limit."""
    if isinstance(mask, Not):
        inner = _max_intervals(mask.mask)
        return None if inner is None else inner + 1
    if isinstance(mask, (And, Or)):
        first, second = _max_intervals(mask.first), _max_intervals(mask.second)
        return None if first is None or second is None else first + second - isinstance(mask, And)
    if isinstance(mask, Sharded) and mask.keeps_intervals:
        return 1 if mask.mask is None else _max_intervals(mask.mask)
    return 1 if isinstance(mask, IntervalMask) else None


def traced_lens(ops: Backend, score_shape: ScoreShape, like: Array, mask: Mask | None) -> Array | None:
    """Return the lengths, (batch or 1, query or 1), not clamped, of a mask that is `ValidLens` alone; else None."""
    if type(mask) is not ValidLens or mask.lens is None or mask.query_lens is not None:
        return None
    return by_row(ops, score_shape, mask.lens, like, per_query=True)


def traced_visibility(
    ops: Backend, score_shape: ScoreShape, like: Array, mask: Mask | None
) -> tuple[Ends | None, Mask | None]:
    """Split `mask` into intervals, whose ends are arrays of the framework, and the mask that is ANDed to them.

    As ``Problem.visibility`` does with known ends. With holes, start and stop have a first axis: the interval around
    all keys of a query, then its holes.
    """
    tracer = _Tracer(ops, score_shape, like)
    intervals: _IntervalWithHoles | None = None
    remaining: list[Mask] = []
    for part in [] if mask is None else parts_of(mask):
        traced = tracer.trace(part)
        if traced is None:
            remaining.append(part)
        else:
            intervals = traced if intervals is None else tracer.intersection(intervals, traced)
    return None if intervals is None else tracer.stack(intervals), all_of(remaining)


@dataclass(frozen=True)
class _Tracer:
    """Computes the ends of masks in the caller's program, on the device of `like`."""

    ops: Backend
    score_shape: ScoreShape
    like: Array

    def trace(self, mask: Mask) -> _IntervalWithHoles | None:
        """Return a mask as intervals with holes; None where it is not of that form."""
        score_shape = self.score_shape
        intervals = mask.interval_set(score_shape.query_len, score_shape.key_len, score_shape.batch)
        if intervals is not None:
            if intervals.single is not None:
                return [self._constant(intervals.single)]
            if mask.is_array:  # kernels read the array in less time
                return None
            return [self._constant(pair) for pair in zip(*intervals.with_holes, strict=True)]
        if isinstance(mask, Not):
            inner = self.trace(mask.mask)
            return None if inner is None or len(inner) > 1 else [self._all_keys(), *inner]
        if isinstance(mask, (And, Or)):
            first, second = self.trace(mask.first), self.trace(mask.second)
            if first is None or second is None:
                return None
            if isinstance(mask, And):
                return self.intersection(first, second)
            return self._union(*first, *second) if len(first) == len(second) == 1 else None
        if isinstance(mask, Sharded) and mask.keeps_intervals:
            return self._trace_sharded(mask)
        return self._trace_ends(mask) if isinstance(mask, IntervalMask) else None

    def _trace_sharded(self, mask: Sharded) -> _IntervalWithHoles | None:
        """Return a mask of the whole sequence at the rows of the shard, as intervals of the keys of the shard."""
        ops = self.ops
        rows, cols = (ops.astype(ops.asarray(x, self.like), "int64") for x in (mask.rows, mask.cols))
        whole_tracer = _Tracer(ops, mask.part_shape(self.score_shape), self.like)
        intervals = [whole_tracer._all_keys()] if mask.mask is None else whole_tracer.trace(mask.mask)

        def to_shard(ends: Ends) -> Ends:
            start, stop = (end if end.shape[-1] == 1 else ops.take(end, rows, -1) for end in whole_tracer._clamp(ends))
            # The number of keys of the shard before each end: `searchsorted` counts those at most equal to its value.
            start, stop = (
                ops.reshape(ops.searchsorted(cols, ops.reshape(end, (-1,)) - 1), end.shape) for end in (start, stop)
            )
            return start, ops.where(ops.reshape(rows, (1, -1)) < mask.query_len, stop, 0) if mask.padded else stop

        return None if intervals is None else [to_shard(ends) for ends in intervals]

    def intersection(self, first: _IntervalWithHoles, second: _IntervalWithHoles) -> _IntervalWithHoles:
        """Return the interval that both have in common, with the holes of both."""
        (start, stop), (other_start, other_stop) = first[0], second[0]
        return [(self.ops.maximum(start, other_start), self.ops.minimum(stop, other_stop)), *first[1:], *second[1:]]

    def _union(self, first: Ends, second: Ends) -> _IntervalWithHoles:
        """Return the interval around two, with the hole between them."""
        ops = self.ops
        (start, stop), (other_start, other_stop) = self._clamp(first), self._clamp(second)
        # An empty interval is replaced by the other one, so that it does not widen the interval around both.
        start, stop, other_start, other_stop = (
            ops.where(start < stop, start, other_start), ops.where(start < stop, stop, other_stop),
            ops.where(other_start < other_stop, other_start, start),
            ops.where(other_start < other_stop, other_stop, stop),
        )  # fmt: skip
        around = ops.minimum(start, other_start), ops.maximum(stop, other_stop)
        return [around, (ops.minimum(stop, other_stop), ops.maximum(start, other_start))]

    def stack(self, intervals: _IntervalWithHoles) -> Ends:
        """Return start and stop, (batch or 1, query); with holes, stacked: the interval and then its holes."""
        ops = self.ops
        pairs = [self._clamp(pair) for pair in intervals]
        batches = {end.shape[0] for pair in pairs for end in pair}
        # An axis of length 1 broadcasts to an empty batch too.
        shape = (0 if 0 in batches else max(batches), self.score_shape.query_len)
        start, stop = ([ops.broadcast_to(pair[i], shape) for pair in pairs] for i in (0, 1))
        if len(pairs) == 1:
            return start[0], stop[0]
        start, stop = ([ops.expand_dims(x, 0) for x in ends] for ends in (start, stop))
        return ops.concat(start, 0), ops.concat(stop, 0)

    def _trace_ends(self, mask: IntervalMask) -> _IntervalWithHoles:
        """Return a mask that is one interval a query."""
        rows = self.ops.reshape(self.ops.positions(0, self.score_shape.query_len, self.like), (1, -1))
        ends = mask.ends(self.ops, self.score_shape, rows)
        # An end that is None or a number becomes an array.
        start, stop = (
            bound if end is None else end if getattr(end, "shape", ()) else bound * 0 + end
            for end, bound in zip(ends, self._all_keys(), strict=True)
        )
        return [(start, stop)]

    def _all_keys(self) -> Ends:
        """Return the interval of all keys."""
        zero = self.ops.zeros((1, 1), self.like, "int64")
        return zero, zero + self.score_shape.key_len

    def _constant(self, ends: tuple[Any, Any]) -> Ends:
        """Return known intervals as constants; with one number where all queries agree, so the program stays small."""
        constants = []
        for end in ends:
            is_shared = isinstance(end, np.ndarray) and end.size and (end == end[:, :1]).all()
            x = self.ops.asarray(end[:, :1] if is_shared else end, self.like)
            constants.append(self.ops.astype(x, "int64"))
        return constants[0], constants[1]

    def _clamp(self, ends: Ends) -> Ends:
        """Return the ends within [0, key_len], with stop >= start."""
        ops, key_len = self.ops, self.score_shape.key_len
        start, stop = (ops.minimum(ops.maximum(end, ops.zeros((), end)), ops.full((), key_len, end)) for end in ends)
        return start, ops.maximum(stop, start)
