"""The slot of each position in a buffer, and the slots that a query attends to.

Position p is in slot p where it is one of the sinks, otherwise in slot sinks + (p - sinks) mod ring, with a ring of all
slots after the sinks. Without a window there are no sinks, and the ring never wraps around.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.masks import IntervalSet
from attnscore.masks.base import IntervalSetMask
from attnscore.masks.index_values import column, host_ints, per_batch
from attnscore.masks.intervals import normalize
from attnscore.masks.shape_spec import ShapeSpec


def slots_of_positions(index: Backend, positions: Array, sinks: int, size: int) -> Array:
    """Return the slots of positions: the same number for the sinks, a place in the ring after them for others."""
    return index.where(positions < sinks, positions, sinks + (positions - sinks) % max(1, size - sinks))


def positions_of_slots(index: Backend, slots: Array, ends: Array, sinks: int, size: int) -> Array:
    """Return the last position below `ends` in each slot; -1 where there is none."""
    last = ends - 1
    in_ring = last - (last - slots) % max(1, size - sinks)
    positions = index.where(slots < sinks, slots, in_ring)
    is_held = index.logical_and(positions < ends, index.logical_or(slots < sinks, in_ring >= sinks))
    return index.where(is_held, positions, index.zeros((), positions, index.dtype(positions)) - 1)


@dataclass(frozen=True, eq=False)
class AppendedPositions:
    """The positions starts <= p < ends of each sequence, (batch,), which an append of `count` entries brings."""

    index: Backend
    """Computes with lengths and positions."""
    starts: Array
    ends: Array
    count: int
    sinks: int
    size: int
    """Number of slots."""

    def slots(self) -> Array:
        """Return the slot of each entry, (batch, count)."""
        positions = self.index.reshape(self.starts, (-1, 1)) + self._entries(self.count)
        return slots_of_positions(self.index, positions, self.sinks, self.size)

    def is_real(self) -> Array:
        """Return which entries are positions, (batch, count): the others are padding, or find no slot."""
        return self._entries(self.count) < self.index.reshape(self.ends - self.starts, (-1, 1))

    def entries(self) -> Array:
        """Return the entry that each slot takes, (batch, slot); below 0 for a slot that keeps its entry."""
        ends = self.index.reshape(self.ends, (-1, 1))
        positions = positions_of_slots(self.index, self._entries(self.size), ends, self.sinks, self.size)
        return positions - self.index.reshape(self.starts, (-1, 1))

    def _entries(self, count: int) -> Array:
        return self.index.reshape(self.index.positions(0, count, self.starts), (1, -1))


@final
@dataclass(frozen=True, eq=False, repr=False)
class RollingWindow(IntervalSetMask):
    """The slots of a `KeyValueCache` with a window that each query attends to.

    Query i of a sequence is at position first + i, and attends to nothing at `ends` or after. A slot past the sinks
    holds the last position below `ends` that is congruent to it modulo the ring's size.
    """

    first: Any
    ends: Any
    window: int
    sinks: int

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        ends = per_batch(ops, score_shape, self.ends, rows)
        query = per_batch(ops, score_shape, self.first, rows) + rows
        key = positions_of_slots(ops, cols, ends, self.sinks, score_shape.key_len)
        in_window = ops.logical_or(key > query - self.window, cols < self.sinks)
        in_order = ops.logical_and(ops.logical_and(key >= 0, key <= query), query < ends)
        return ops.logical_and(in_window, in_order)

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        first, ends = host_ints(self.first), host_ints(self.ends)
        if first is None or ends is None:
            return None
        query, ring = column(first) + np.arange(query_len), key_len - self.sinks
        is_real = query < column(ends)
        start = np.maximum(self.sinks, query - self.window + 1)
        count = np.where(is_real, np.maximum(0, query + 1 - start), 0)
        # In a ring without slots, `count` is 0.
        start = self.sinks + (start - self.sinks) % max(1, ring)
        stop = start + count
        zeros = np.zeros_like(start)
        # The sinks; the window up to the end of the ring; the rest of it from the start of the ring.
        starts = zeros, np.minimum(start, key_len), zeros + self.sinks
        stops = (
            np.where(is_real, np.minimum(self.sinks, query + 1), 0),
            np.minimum(stop, key_len),
            np.maximum(self.sinks, self.sinks + stop - key_len),
        )
        return normalize(np.stack(starts), np.stack(stops), key_len)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        batch = score_shape.batch
        pairs = (("first", self.first), ("ends", self.ends))
        return [ShapeSpec(name, x, f"shape ({batch},), one per sequence", [(batch,)]) for name, x in pairs]
