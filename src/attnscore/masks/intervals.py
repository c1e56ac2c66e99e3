"""Keys of each row as a few intervals: sinks and a window, a window and global tokens, all but a range.

- Exact: union, complement and intersection of such sets are such sets again, as long as no row needs more than
  `MOST` of them.
- Memory is a number of arrays of one number a row, never one of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

HostArray = np.ndarray[Any, Any]
Intervals = tuple[HostArray, HostArray]
"""(start, stop), each (batch or 1, query): row i sees the keys start[i] <= j < stop[i]."""

MOST: Final = 8
"""Intervals of a row. A row of the native kernel looks at each of them in each tile that it does not skip."""


@dataclass(frozen=True, eq=False)
class IntervalSet:
    """Row i sees the keys from start[p, b, i] to stop[p, b, i] for each piece p; (piece, batch or 1, query) each.

    Several pieces are in order and do not touch, and those that a row has not are empty, behind the others.
    """

    start: HostArray
    stop: HostArray

    @staticmethod
    def of(intervals: Intervals) -> IntervalSet:
        """One piece a row."""
        return IntervalSet(intervals[0][None], intervals[1][None])

    @property
    def count(self) -> int:
        return len(self.start)

    @property
    def single(self) -> Intervals | None:
        """As one interval a row, where no row has more."""
        return (self.start[0], self.stop[0]) if self.count == 1 else None

    @property
    def ends(self) -> Intervals:
        """Start and stop, (batch or 1, query) each where no row has more than one piece."""
        return (self.start, self.stop) if self.single is None else self.single

    @cached_property
    def with_holes(self) -> Intervals:
        """The interval around all pieces and, on an axis in front of it, the holes in it: what native kernels read.

        Of the shape (batch or 1, query) where there are none.
        """
        start, stop = np.ascontiguousarray(self.start, np.int64), np.ascontiguousarray(self.stop, np.int64)
        if self.count == 1:
            return start[0], stop[0]
        alive = stop > start
        last = np.where(alive, stop, 0).max(axis=0)
        first, last = start[0], np.maximum(start[0], last)
        return (
            np.concatenate([first[None], stop[:-1]]),
            np.concatenate([last[None], np.where(alive[1:], start[1:], stop[:-1])]),
        )

    def union(self, other: IntervalSet, key_len: int) -> IntervalSet:
        """Keys in either."""
        shape = np.broadcast_shapes(self.start.shape[1:], other.start.shape[1:])
        start, stop = (
            np.concatenate([np.broadcast_to(end, (len(end), *shape)) for end in ends])
            for ends in ((self.start, other.start), (self.stop, other.stop))
        )
        return _tidied(start, stop, key_len)

    def complement(self, key_len: int) -> IntervalSet:
        """Keys in none."""
        one = np.zeros((1, *self.start.shape[1:]), np.int64)
        return _tidied(np.concatenate([one, self.stop]), np.concatenate([self.start, one + key_len]), key_len)

    def intersection(self, other: IntervalSet, key_len: int) -> IntervalSet:
        """Keys in both."""
        first, second = self.single, other.single
        if first is not None and second is not None:
            return IntervalSet.of(intersect(first, second))
        return self.complement(key_len).union(other.complement(key_len), key_len).complement(key_len)

    def within(self, most: int) -> IntervalSet | None:
        """Itself, where no row has more pieces than so many."""
        return self if self.count <= most else None


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """Intervals of the keys that lie in both."""
    start = np.maximum(first[0], second[0])
    return start, np.maximum(np.minimum(first[1], second[1]), start)


def runs_of(seen: HostArray, most: int) -> IntervalSet | None:
    """The runs of True in the rows of (batch, key), as the pieces of one query; None where a row has more of them."""
    key_len = seen.shape[1]
    padded = np.zeros((len(seen), key_len + 2), np.int8)
    padded[:, 1:-1] = seen
    steps = np.diff(padded, axis=1)
    (row, first), (_, last) = np.nonzero(steps == 1), np.nonzero(steps == -1)
    counts = np.bincount(row, minlength=len(seen))
    count = int(counts.max(initial=0))
    if count > most:
        return None
    start = np.full((max(1, count), len(seen), 1), key_len, np.int64)
    stop = start.copy()
    # Which run of its row each one is.
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    start[place, row, 0], stop[place, row, 0] = first, last
    return IntervalSet(start, stop)


def _tidied(start: HostArray, stop: HostArray, key_len: int) -> IntervalSet:
    """Any intervals of rows in order, joined where they touch, without pieces that no row has."""
    empty = stop <= start
    start, stop = np.where(empty, key_len, start), np.where(empty, key_len, stop)
    order = np.argsort(start, axis=0, kind="stable")
    start, stop = (np.take_along_axis(end, order, 0) for end in (start, stop))
    reach = np.maximum.accumulate(stop, axis=0)
    begins = np.ones(start.shape, bool)
    begins[1:] = start[1:] > reach[:-1]
    run = np.cumsum(begins, axis=0) - 1
    first, last = np.full_like(start, key_len), np.full_like(stop, key_len)
    # The last one that is put stays: of starts the first of a run, of ends the last.
    for k in range(len(start)):
        np.put_along_axis(last, run[k : k + 1], reach[k : k + 1], 0)
        back = len(start) - 1 - k
        np.put_along_axis(first, run[back : back + 1], start[back : back + 1], 0)
    count = max(1, int((last > first).any(axis=(1, 2)).sum()))
    return IntervalSet(first[:count], last[:count])
