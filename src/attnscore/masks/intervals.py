"""The unmasked keys of each query as a few intervals: sinks and a window, a window and global tokens, all but a range.

- Union, complement and intersection are exact, as long as no query needs more than `MAX_INTERVALS` intervals.
- Memory is linear in the number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

HostArray = np.ndarray[Any, Any]
Intervals = tuple[HostArray, HostArray]
"""(start, stop), each (batch or 1, query): query i attends the keys start[i] <= j < stop[i]."""

MAX_INTERVALS: Final = 8
"""Largest number of intervals of a query. The native kernel reads each of them in each tile that it does not skip."""


@dataclass(frozen=True, eq=False)
class IntervalSet:
    """Query i attends the keys start[k, b, i] <= j < stop[k, b, i] of each interval k; (interval, batch or 1, query).

    Intervals of a query are in order and do not touch. A query with fewer of them has empty ones at the end.
    """

    start: HostArray
    stop: HostArray

    @staticmethod
    def of(intervals: Intervals) -> IntervalSet:
        """Return the set with one interval a query."""
        return IntervalSet(intervals[0][None], intervals[1][None])

    @property
    def count(self) -> int:
        return len(self.start)

    @property
    def single(self) -> Intervals | None:
        """The intervals, (batch or 1, query), where no query has more than one; otherwise None."""
        return (self.start[0], self.stop[0]) if self.count == 1 else None

    @cached_property
    def with_holes(self) -> Intervals:
        """The interval around all, then the holes in it, for the native kernel; without holes (batch or 1, query)."""
        start, stop = np.ascontiguousarray(self.start, np.int64), np.ascontiguousarray(self.stop, np.int64)
        if self.count == 1:
            return start[0], stop[0]
        nonempty = stop > start
        last = np.where(nonempty, stop, 0).max(axis=0)
        first, last = start[0], np.maximum(start[0], last)  # empty for a fully masked query
        return (
            np.concatenate([first[None], stop[:-1]]),
            np.concatenate([last[None], np.where(nonempty[1:], start[1:], stop[:-1])]),
        )

    def union(self, other: IntervalSet, key_len: int) -> IntervalSet:
        """Return the keys in either set."""
        shape = np.broadcast_shapes(self.start.shape[1:], other.start.shape[1:])
        start, stop = (
            np.concatenate([np.broadcast_to(end, (len(end), *shape)) for end in ends])
            for ends in ((self.start, other.start), (self.stop, other.stop))
        )
        return normalize(start, stop, key_len)

    def complement(self, key_len: int) -> IntervalSet:
        """Return the keys that are not in the set."""
        zero, is_empty = np.zeros((1, *self.start.shape[1:]), np.int64), self.stop <= self.start
        # Empty intervals may start at any key. Moved behind the last key, they bound no hole.
        start, stop = (np.where(is_empty, key_len, x) for x in (self.start, self.stop))
        return normalize(np.concatenate([zero, stop]), np.concatenate([start, zero + key_len]), key_len)

    def intersection(self, other: IntervalSet, key_len: int) -> IntervalSet:
        """Return the keys in both sets."""
        first, second = self.single, other.single
        if first is not None and second is not None:
            start = np.maximum(first[0], second[0])
            return IntervalSet.of((start, np.maximum(np.minimum(first[1], second[1]), start)))
        return self.complement(key_len).union(other.complement(key_len), key_len).complement(key_len)

    def within(self, limit: int) -> IntervalSet | None:
        """Return the set itself, or None where a query has more than `limit` intervals."""
        return self if self.count <= limit else None


def runs_of(array: HostArray, limit: int) -> IntervalSet | None:
    """Return the runs of True in a boolean (batch, key), as intervals of one query; None if a row has above `limit`."""
    key_len = array.shape[1]
    padded = np.zeros((len(array), key_len + 2), np.int8)
    padded[:, 1:-1] = array
    steps = np.diff(padded, axis=1)
    (row, first), (_, last) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    counts = np.bincount(row, minlength=len(array))
    count = int(counts.max(initial=0))
    if count > limit:
        return None
    start = np.full((max(1, count), len(array), 1), key_len, np.int64)
    stop = start.copy()
    # The index of each run within its row.
    index = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    start[index, row, 0], stop[index, row, 0] = first, last
    return IntervalSet(start, stop)


def normalize(start: HostArray, stop: HostArray, key_len: int) -> IntervalSet:
    """Return any intervals in order, merged where they touch, without the ones that are empty for all queries."""
    empty = stop <= start
    start, stop = np.where(empty, key_len, start), np.where(empty, key_len, stop)
    order = np.argsort(start, axis=0, kind="stable")
    start, stop = (np.take_along_axis(end, order, 0) for end in (start, stop))
    reach = np.maximum.accumulate(stop, axis=0)
    begins = np.ones(start.shape, bool)
    begins[1:] = start[1:] > reach[:-1]
    run = np.cumsum(begins, axis=0) - 1
    first, last = np.full_like(start, key_len), np.full_like(stop, key_len)
    # Of several writes the last one stays. Stops are written in order, so a run gets its last stop; starts in reverse
    # order, so a run gets its first start.
    for k in range(len(start)):
        np.put_along_axis(last, run[k : k + 1], reach[k : k + 1], 0)
        back = len(start) - 1 - k
        np.put_along_axis(first, run[back : back + 1], start[back : back + 1], 0)
    count = max(1, int((last > first).any(axis=(1, 2)).sum()))
    return IntervalSet(first[:count], last[:count])
