"""A mask of a whole sequence, for some of its queries and keys.

- Queries and keys have global positions. An interval of keys stays an interval where their positions rise, as traced
  positions do.
- The positions may be traced: each device of a program takes its own from a table. Then they are padded to one size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape, may_equal
from attnscore.errors import MaskError, message
from attnscore.masks.base import CompoundMask, IntervalSetMask, Mask
from attnscore.masks.intervals import IntervalSet, normalize
from attnscore.masks.shape_spec import PLACEHOLDER


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sharded(CompoundMask, IntervalSetMask):
    """Query i attends key j where the query `rows[i]` of `mask` attends its key `cols[j]`; None masks nothing.

    With `padded`, positions from `query_len` and `key_len` on are padding, masked on both sides.
    """

    mask: Mask | None
    rows: Any
    cols: Any
    query_len: int
    """Number of queries of the whole sequence; `key_len` counts its keys."""
    key_len: int
    padded: bool = False

    @property
    def keeps_intervals(self) -> bool:
        """Whether an interval of keys of the whole sequence is one here too."""
        cols = backends.host(self.cols)
        return cols is None or bool((cols[:-1] <= cols[1:]).all())

    def part_shape(self, score_shape: ScoreShape) -> ScoreShape:
        """Return the shape of the scores of the whole sequence."""
        return dataclasses.replace(score_shape, query_len=self.query_len, key_len=self.key_len)

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        rows = ops.reshape(ops.take(ops.asarray(self.rows, rows), ops.reshape(rows, (-1,)), 0), (-1, 1))
        cols = ops.reshape(ops.take(ops.asarray(self.cols, cols), ops.reshape(cols, (-1,)), 0), (1, -1))
        if self.mask is not None and not self.padded:
            return self.mask.visible(ops, self.part_shape(score_shape), rows, cols)
        inside = ops.logical_and(rows < self.query_len, cols < self.key_len)
        if self.mask is None:
            return inside
        # `mask` has no padding positions: there it is evaluated at the last position.
        limits = ((rows, self.query_len), (cols, self.key_len))
        rows, cols = (ops.minimum(x, ops.full((), length - 1, x)) for x, length in limits)
        return ops.logical_and(inside, self.mask.visible(ops, self.part_shape(score_shape), rows, cols))

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        rows, cols = backends.host(self.rows), backends.host(self.cols)
        if rows is None or cols is None or not self.keeps_intervals:
            return None
        if self.mask is None or not self.query_len:  # without queries all rows are padding
            zero = np.zeros((1, 1, len(rows)), np.int64)
            intervals: IntervalSet | None = IntervalSet(zero, zero + self.key_len)
        else:
            real_rows = np.minimum(rows, self.query_len - 1) if self.padded else rows
            intervals = self.mask.interval_set_at(real_rows, self.query_len, self.key_len, batch)
        if intervals is None:
            return None
        start, stop = (np.searchsorted(cols, end) for end in (intervals.start, intervals.stop))
        if self.padded:
            stop = np.where(rows < self.query_len, stop, start)
        # Several intervals may have lost their keys, or the keys between them.
        return IntervalSet(start, stop) if intervals.count == 1 else normalize(start, stop, len(cols))

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for name, positions, length in (
            ("rows", self.rows, score_shape.query_len), ("cols", self.cols, score_shape.key_len)
        ):  # fmt: skip
            if len(positions.shape) != 1 or not may_equal(positions.shape[0], length):
                raise MaskError(message(name, f"shape ({length},), one position each", tuple(positions.shape)))
        super().check(ops, score_shape)

    def map_leaves(self, change: Callable[[Array], Array]) -> Mask:
        # Known positions stay: the host could not read traced ones, for which a program has a `PLACEHOLDER`. The type
        # decides: whether the host can read a framework's array may differ between `leaves` and `with_leaves`.
        if not all(isinstance(x, np.ndarray) and x is not PLACEHOLDER for x in (self.rows, self.cols)):
            return super().map_leaves(change)
        return self if self.mask is None else self._with_fields({"mask": self.mask.map_leaves(change)})

    def __repr__(self) -> str:
        sizes = " x ".join(str(len(x)) for x in (self.rows, self.cols))
        return f"{sizes} of {self.query_len} x {self.key_len} in {self.mask!r}"
