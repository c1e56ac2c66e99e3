"""The unmasked pairs of a mask, counted on the host: the number of keys of each query, and the attended keys.

- A mask of intervals is counted from them, and a graph from its neighbours, in time linear in the queries or edges.
- Arrays that the host can read are counted by blocks of queries. Parts that it cannot read (traced, on a device, custom
  masks without intervals) count as unmasked: the keys to fetch are then too many, never too few.
- Queries are counted in strips, so that memory does not grow with the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnscore import backends
from attnscore.base import thresholds
from attnscore.base.layout import ScoreShape
from attnscore.masks import BUILTIN, Dense, Mask, Neighbours, parts_of, split_intervals
from attnscore.masks.base import all_of, atoms_of
from attnscore.masks.intervals import HostArray, IntervalSet
from attnscore.masks.neighbour_table import NeighbourTable

Range = tuple[int, int]


def check_batch(mask: Mask, query_len: int, key_len: int, batch: int) -> None:
    """Raise MaskError when a mask does not fit a batch; not for an array, which may have heads of unknown number."""
    for atom in atoms_of(mask):
        if not isinstance(atom, Dense):
            atom.checked_shape(query_len, key_len, batch)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The unmasked pairs of a mask; of None, all pairs."""

    mask: Mask | None
    query_len: int
    key_len: int
    batch: int = 1

    def strips(self, queries: HostArray) -> Iterator[Strip]:
        """Yield the pairs of `queries`, some queries at a time; parts that the host cannot read mask nothing."""
        for first in range(0, len(queries), thresholds.COUNTED_QUERIES):
            rows = queries[first : first + thresholds.COUNTED_QUERIES]
            intervals, remaining = None, None
            if self.mask is not None:
                intervals, remaining = split_intervals(self.mask, self.query_len, self.key_len, self.batch, rows)
            if intervals is None:
                zero = np.zeros((1, 1, len(rows)), np.int64)
                intervals = IntervalSet(zero, zero + self.key_len)
            parts = [] if remaining is None else parts_of(remaining)
            tables = [part.table(self.key_len) for part in parts if isinstance(part, Neighbours)]
            evaluated = [part for part in parts if not isinstance(part, Neighbours) and _is_readable(part)]
            yield Strip(self, rows, intervals, tuple(table for table in tables if table is not None), all_of(evaluated))


@dataclass(frozen=True, eq=False)
class Strip:
    """The unmasked pairs of some queries: pairs in the intervals, in all graphs and in `remaining_mask`."""

    pairs: Pairs
    rows: HostArray
    intervals: IntervalSet
    graphs: tuple[NeighbourTable, ...]
    remaining_mask: Mask | None

    @cached_property
    def counts(self) -> HostArray:
        """Number of unmasked keys of each query, (rows,) int64, summed over the batch, for one head.

        Of several graphs the first counts; of different masks of heads the mean, rounded up.
        """
        if self.graphs:
            row, keys = edges_of(self.graphs[0], self.rows)
            start, stop = self.intervals.start[..., row], self.intervals.stop[..., row]
            inside = np.any((start <= keys) & (keys < stop), 0)
            per_batch = np.stack([np.bincount(row, x, len(self.rows)) for x in inside])
        elif self.remaining_mask is None:
            per_batch = (self.intervals.stop - self.intervals.start).sum(0)
        else:
            blocks = [block.sum(-1).mean(0, keepdims=True) for block in self._blocks(self.remaining_mask)]
            per_batch = np.concatenate([np.zeros((1, 0)), *blocks], -1)
        return np.asarray(np.ceil(per_batch.mean(0) * self.pairs.batch).astype(np.int64))

    @cached_property
    def keys(self) -> tuple[Range, ...]:
        """The keys that any of the queries attends in any batch row and head, as ranges in rising order."""
        start, stop = self.intervals.start.reshape(-1), self.intervals.stop.reshape(-1)
        ranges = union(start[start < stop], stop[start < stop])
        if not self.graphs and self.remaining_mask is None:
            return ranges
        # One flag per key: the masks themselves take far more memory.
        attended = _flags(ranges, self.pairs.key_len)
        gap = thresholds.FETCHED_GAP
        for graph in self.graphs:
            neighbours = edges_of(graph, self.rows)[1]
            # Few ranges: they include the gaps between keys that are close to each other.
            ranges = tuple((start, stop - gap + 1) for start, stop in union(neighbours, neighbours + gap))
            attended &= _flags(ranges, self.pairs.key_len)
        if self.remaining_mask is not None:
            evaluated = np.zeros(self.pairs.key_len, bool)
            for block in self._blocks(self.remaining_mask):
                evaluated |= block.any((0, 1))
            attended &= evaluated
        steps = np.diff(attended.astype(np.int8), prepend=0, append=0)
        return union(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1))

    def attending(self, keys: Iterable[Range]) -> tuple[Range, ...]:
        """Return the queries that may attend any of `keys`, by their intervals, as ranges in rising order."""
        is_attending = np.zeros(len(self.rows), bool)
        for start, stop in keys:
            overlap = np.minimum(self.intervals.stop, stop) > np.maximum(self.intervals.start, start)
            is_attending |= overlap.any((0, 1))
        rows = self.rows[is_attending]
        return union(rows, rows + 1)

    def _blocks(self, mask: Mask) -> Iterator[HostArray]:
        """Yield pairs in the intervals and in `mask`, of some queries at a time, (matrices, queries, key)."""
        ops, pairs = backends.load("numpy"), self.pairs
        cols = np.arange(pairs.key_len)[None]
        count = max(1, thresholds.COUNTED_PAIRS // max(1, pairs.key_len * pairs.batch))
        heads = max(1, mask.heads)
        shape = ScoreShape((pairs.batch,), heads, 1, pairs.query_len, pairs.key_len, has_heads=heads > 1)
        for first in range(0, len(self.rows), count):
            rows = slice(first, first + count)
            start, stop = self.intervals.start[..., rows, None], self.intervals.stop[..., rows, None]
            # (batch, head, group, queries, key): the intervals have no axis of heads.
            inside = np.any((start <= cols) & (cols < stop), 0)[:, None, None]
            block: HostArray = np.logical_and(inside, mask.visible(ops, shape, self.rows[rows, None], cols))
            # Not -1: NumPy cannot infer a size for an array without keys.
            yield block.reshape(math.prod(block.shape[:-2]), *block.shape[-2:])


def edges_of(graph: NeighbourTable, rows: HostArray) -> tuple[HostArray, HostArray]:
    """Return the edges of some queries, as indices of `rows` and keys."""
    lens = graph.lens[rows]
    row = np.repeat(np.arange(len(rows)), lens)
    # The edges of a row are consecutive, from `start` on.
    first = graph.start[rows] - (np.cumsum(lens) - lens)
    return row, graph.indices[np.arange(len(row)) + first[row]]


def union(start: HostArray, stop: HostArray) -> tuple[Range, ...]:
    """Return the union of intervals, in any order and none of them empty, as ranges in rising order."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    begins = np.flatnonzero(start[1:] > stop[:-1]) + 1
    # Cut to the number of intervals, which may be 0.
    first, last = start[np.append(0, begins)[: len(start)]], stop[np.append(begins - 1, -1)[: len(start)]]
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def _is_readable(mask: Mask) -> bool:
    """Return whether NumPy can evaluate a mask: one of the package, whose arrays the host can read."""
    readable = all(backends.host(x) is not None for x in mask.arrays().values())
    return readable and all(isinstance(atom, BUILTIN) for atom in atoms_of(mask))


def _flags(ranges: tuple[Range, ...], length: int) -> HostArray:
    flags = np.zeros(length, bool)
    for start, stop in ranges:
        flags[start:stop] = True
    return flags
