"""The unmasked pairs of a mask, counted on the host: how many keys each query attends, and which ones some queries do.

- A mask of intervals is counted from them, and a graph from its neighbours, in time linear in the queries or edges.
- Arrays that the host can read are counted by blocks of queries. Parts that it cannot read (traced, on a device, custom
  masks without intervals) count as unmasked: the keys to fetch are then too many, never too few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnscore import backends
from attnscore.core.layout import ScoreShape
from attnscore.masks import BUILTIN, Mask, Neighbours, parts_of, split
from attnscore.masks.base import all_of, atoms_of
from attnscore.masks.intervals import HostArray, IntervalSet
from attnscore.masks.neighbour_table import NeighbourTable

Range = tuple[int, int]

# Pairs of a mask evaluated together.
_BLOCK = 2**22
# Neighbours of a graph that are closer than this are fetched as one range, with the keys between them.
_GAP = 64


@dataclass(frozen=True, eq=False)
class Pairs:
    """The unmasked pairs of a mask: those in `known` that the graphs and `rest` have too."""

    known: IntervalSet
    graphs: tuple[NeighbourTable, ...]
    rest: Mask | None
    query_len: int
    key_len: int
    batch: int

    @classmethod
    def of(cls, mask: Mask | None, query_len: int, key_len: int, batch: int = 1) -> Pairs:
        """Return the pairs of a mask, or of None, which masks nothing."""
        known, rest = (None, None) if mask is None else split(mask, query_len, key_len, batch)
        if known is None:
            known = IntervalSet(np.zeros((1, 1, query_len), np.int64), np.full((1, 1, query_len), key_len))
        parts = [] if rest is None else parts_of(rest)
        tables = [part.table(key_len) for part in parts if isinstance(part, Neighbours)]
        evaluated = [part for part in parts if not isinstance(part, Neighbours) and _is_readable(part)]
        graphs = tuple(table for table in tables if table is not None)
        return cls(known, graphs, all_of(evaluated), query_len, key_len, batch)

    @cached_property
    def per_query(self) -> HostArray:
        """Number of unmasked keys of each query, (query,) int64, summed over the batch, for one head.

        Where heads have masks of their own, it is the mean of theirs, rounded up.
        """
        if self.graphs:
            graph = self.graphs[0]
            inside = self._inside(graph.rows, graph.indices)
            per_query = np.stack([np.bincount(graph.rows, x, self.query_len) for x in inside])
        elif self.rest is None:
            per_query = (self.known.stop - self.known.start).sum(0)
        else:
            counts = [block.sum(-1).mean(0, keepdims=True) for _, block in self._blocks()]
            per_query = np.concatenate([np.zeros((1, 0)), *counts], -1)
        found: HostArray = np.ceil(per_query.mean(0) * self.batch).astype(np.int64)
        return found

    def keys(self, rows: tuple[Range, ...]) -> tuple[Range, ...]:
        """Return the keys that any of the queries attends in any batch row and head, as ranges in rising order."""
        start, stop = (
            np.concatenate([end[..., :0].reshape(-1), *(end[..., first:last].reshape(-1) for first, last in rows)])
            for end in (self.known.start, self.known.stop)
        )
        found = union(start[start < stop], stop[start < stop])
        if not self.graphs and self.rest is None:
            return found
        # By a flag for each key: these masks take far more memory themselves.
        attended = _flags(found, self.key_len)
        own = _flags(rows, self.query_len)
        for graph in self.graphs:
            attended &= _flags(_ranges_near(graph.indices[own[graph.rows]]), self.key_len)
        if self.rest is not None:
            evaluated = np.zeros(self.key_len, bool)
            for at, block in self._blocks():
                evaluated |= block[:, own[at]].any((0, 1))
            attended &= evaluated
        steps = np.diff(attended.astype(np.int8), prepend=0, append=0)
        return _pairs(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1))

    def _inside(self, rows: HostArray, cols: HostArray) -> HostArray:
        """Return for each batch row whether pairs are in one of the known intervals: (batch or 1, pairs)."""
        start, stop = self.known.start[..., rows], self.known.stop[..., rows]
        inside: HostArray = np.any((start <= cols) & (cols < stop), 0)
        return inside

    def _blocks(self) -> Iterator[tuple[slice, HostArray]]:
        """Yield blocks of queries and their unmasked pairs by `known` and `rest`, (matrices, queries, key)."""
        ops = backends.load("numpy")
        cols = np.arange(self.key_len)[None]
        count = max(1, _BLOCK // max(1, self.key_len * self.batch))
        heads = 1 if self.rest is None else max(1, self.rest.heads)
        shape = ScoreShape((self.batch,), heads, 1, self.query_len, self.key_len, has_heads=heads > 1)
        for first in range(0, self.query_len, count):
            rows = np.arange(first, min(first + count, self.query_len))
            start, stop = self.known.start[..., rows, None], self.known.stop[..., rows, None]
            block: HostArray = np.any((start <= cols) & (cols < stop), 0)
            if self.rest is not None:
                # (batch, head, group, queries, key): the known intervals are those of the batch rows.
                visible = self.rest.visible(ops, shape, rows[:, None], cols)
                block = np.logical_and(block[:, None, None], visible)
            yield slice(first, first + len(rows)), block.reshape(-1, *block.shape[-2:])


def _is_readable(mask: Mask) -> bool:
    """Return whether NumPy can evaluate a mask: one of the package, whose arrays the host can read."""
    readable = all(backends.host(x) is not None for x in mask.arrays().values())
    return readable and all(isinstance(part, BUILTIN) for part in atoms_of(mask))


def union(start: HostArray, stop: HostArray) -> tuple[Range, ...]:
    """Return the union of intervals, in any order and none of them empty, as ranges in rising order."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    begins = np.flatnonzero(start[1:] > stop[:-1]) + 1
    return _pairs(start[np.append(0, begins)[: len(start)]], stop[np.append(begins - 1, -1)[: len(start)]])


def _ranges_near(keys: HostArray) -> tuple[Range, ...]:
    """Return ranges that hold all `keys`; those between keys that are close to each other too."""
    keys = np.unique(keys)
    ends = np.flatnonzero(np.diff(keys) > _GAP)
    return _pairs(keys[np.append(0, ends + 1)[: len(keys)]], keys[np.append(ends, -1)[: len(keys)]] + 1)


def _flags(ranges: tuple[Range, ...], length: int) -> HostArray:
    flags = np.zeros(length, bool)
    for start, stop in ranges:
        flags[start:stop] = True
    return flags


def _pairs(start: HostArray, stop: HostArray) -> tuple[Range, ...]:
    return tuple(zip(start.tolist(), stop.tolist(), strict=True))
