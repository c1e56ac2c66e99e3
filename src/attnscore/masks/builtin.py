"""The masks of the field: valid lengths, ranges, padding, causal, windows, prefixes, packed documents, arrays.

Lengths that the host can see are checked; those on a device or traced are clamped to [0, key_len].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.core.arguments import is_whole, shown
from attnscore.core.layout import ScoreShape, entries_of
from attnscore.errors import MaskError, message
from attnscore.masks.base import Mask, check_shapes
from attnscore.masks.index_values import (
    Align,
    check_alignment,
    check_boolean,
    check_numbers,
    check_whole,
    clip_intervals,
    column,
    columns_of,
    host_ints,
    host_offset,
    offset_of,
    per_batch,
    per_row,
    rows_of,
    runs,
)
from attnscore.masks.intervals import MOST, Intervals, IntervalSet, runs_of
from attnscore.masks.shape_spec import ShapeSpec, shape_of, shaped_numbers, shaped_pairs


@final
@dataclass(frozen=True, eq=False, repr=False)
class ValidLens(Mask):
    """Row i sees the keys j < lens; rows past `query_lens` see nothing.

    Parameters
    ----------
    lens : (batch,) or (batch, query) whole numbers
        With two-axis inputs a number or (query,).
    query_lens : (batch,) whole numbers, optional

    Examples
    --------
    >>> ValidLens([1, 3]).materialize(1, 4, batch=2)[:, 0].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 1, 0]])
    """

    lens: Any
    query_lens: Any = None
    display_names: ClassVar[Mapping[str, str]] = {"lens": "valid_lens"}

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        lens = per_row(ops, score_shape, self.lens, rows)
        seen = cols < lens
        if self.query_lens is None:
            return seen
        return ops.logical_and(seen, rows < per_batch(ops, score_shape, self.query_lens, rows))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        lens = host_ints(self.lens)
        queries = None if self.query_lens is None else host_ints(self.query_lens)
        if lens is None or (queries is None and self.query_lens is not None):
            return None
        stop = rows_of(lens, query_len, batch)
        if queries is not None:
            stop = np.where(np.arange(query_len) < column(queries), stop, 0)
        return clip_intervals(np.zeros_like(stop), stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_numbers(ops, "valid_lens", self.lens, score_shape, highest=score_shape.key_len, per_query=True)
        if self.query_lens is not None:
            check_numbers(ops, "query_lens", self.query_lens, score_shape, highest=score_shape.query_len)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        lens = shaped_numbers("valid_lens", self.lens, score_shape, per_query=True)
        return [lens] if self.query_lens is None else [lens, shaped_numbers("query_lens", self.query_lens, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class KeyRange(Mask):
    """Every row sees the keys start <= j < stop, with numbers per batch row (left padding).

    Examples
    --------
    >>> KeyRange([1, 0], [4, 2]).materialize(1, 4, batch=2)[:, 0].astype(int)
    array([[0, 1, 1, 1],
           [1, 1, 0, 0]])
    """

    start: Any
    stop: Any

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        start, stop = (per_batch(ops, score_shape, end, rows) for end in (self.start, self.stop))
        return ops.logical_and(cols >= start, cols < stop)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        start, stop = host_ints(self.start), host_ints(self.stop)
        if start is None or stop is None:
            return None
        start, stop = np.broadcast_arrays(column(start), column(stop))
        return clip_intervals(start, stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_numbers(ops, "start", self.start, score_shape, highest=score_shape.key_len)
        check_numbers(ops, "stop", self.stop, score_shape, highest=score_shape.key_len)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [shaped_numbers("start", self.start, score_shape), shaped_numbers("stop", self.stop, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(Mask):
    """Every row sees the keys where `array` (batch, key) is True: an attention mask as tokenizers give it.

    Zeros and ones in whole numbers count as False and True.

    Examples
    --------
    >>> KeyPadding([[1, 1, 0], [1, 0, 0]]).materialize(1, 3, batch=2)[:, 0].astype(int)
    array([[1, 1, 0],
           [1, 0, 0]])
    """

    array: Any
    display_names: ClassVar[Mapping[str, str]] = {"array": "key_padding"}
    is_array: ClassVar[bool] = True

    @classmethod
    def from_ignore(cls, array: Any) -> KeyPadding:
        """From the inverted polarity of ``nn.MultiheadAttention``, where True means "ignore"."""
        check_boolean("key_padding", array)
        host = backends.host(array)
        return cls(~(array if host is None else host.astype(bool)))

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        array = ops.asarray(self.array, rows)
        seen = columns_of(ops, array if ops.dtype(array) == "bool" else array != 0, cols)
        return score_shape.batch_to_canonical(ops, ops.expand_dims(seen, 1))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        found = self._runs(query_len, 1)
        return None if found is None else found.single

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        return self._runs(query_len, MOST)

    def _runs(self, query_len: int, most: int) -> IntervalSet | None:
        array = backends.host(self.array)
        found = None if array is None else runs_of(array.astype(bool), most)
        if found is None:
            return None
        shape = (*found.start.shape[:2], query_len)
        return IntervalSet(np.broadcast_to(found.start, shape), np.broadcast_to(found.stop, shape))

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_boolean("key_padding", self.array)
        check_shapes(self, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        wanted = f"shape (batch, key) = ({score_shape.batch}, {score_shape.key_len})"
        return [ShapeSpec("key_padding", self.array, wanted, [((1, score_shape.batch), score_shape.key_len)])]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Row i sees the keys j <= i + offset.

    ::

        3 queries, 5 keys    align="top_left"     align="bottom_right"
                             1 0 0 0 0            1 1 1 0 0
                             1 1 0 0 0            1 1 1 1 0
                             1 1 1 0 0            1 1 1 1 1

    Parameters
    ----------
    align : "top_left" (offset 0) or "bottom_right" (offset key_len - query_len), optional
        Needed when the lengths differ and no `offset` is given: which one is meant is the field's classic silent bug.
    offset : whole number, or one per batch row, optional

    Examples
    --------
    >>> Causal("bottom_right").materialize(2, 4)[0].astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    align: Align | None = None
    offset: Any = None

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return cols <= rows + offset_of(ops, score_shape, self, rows)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        offset = host_offset(self, query_len, key_len)
        if offset is None:
            return None
        stop = np.arange(query_len)[None] + column(offset) + 1
        return clip_intervals(np.zeros_like(stop), stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_alignment(ops, score_shape, self)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [] if self.offset is None else [shaped_numbers("offset", self.offset, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """Row i sees the keys i + offset - left <= j <= i + offset + right, both ends included; None is unbounded.

    A model's "window w" is ``left = w - 1``: a query sees itself and w - 1 keys before it.
    `align` and `offset` are those of `Causal`.

    Examples
    --------
    >>> SlidingWindow(left=1, right=0).materialize(3, 3)[0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    left: int | None = None
    right: int | None = None
    align: Align | None = None
    offset: Any = None

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        centre = rows + offset_of(ops, score_shape, self, rows)
        seen = cols >= 0
        if self.left is not None:
            seen = ops.logical_and(seen, cols >= centre - self.left)
        return seen if self.right is None else ops.logical_and(seen, cols <= centre + self.right)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        offset = host_offset(self, query_len, key_len)
        if offset is None:
            return None
        centre = np.arange(query_len)[None] + column(offset)
        start = np.zeros_like(centre) if self.left is None else centre - self.left
        stop = np.full_like(centre, key_len) if self.right is None else centre + self.right + 1
        return clip_intervals(start, stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for name in ("left", "right"):
            width = getattr(self, name)
            if width is not None and (not is_whole(width) or not 0 <= width < 2**62):
                raise MaskError(message(name, "a whole number of keys, 0 or more, or None", shown(width)))
        check_alignment(ops, score_shape, self)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [] if self.offset is None else [shaped_numbers("offset", self.offset, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Mask):
    """Row i sees the keys j < prefix_len or j <= i, with one prefix length per batch row.

    Examples
    --------
    >>> PrefixLM(2).materialize(3, 3)[0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    prefix_lens: Any

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ops.logical_or(cols < per_batch(ops, score_shape, self.prefix_lens, rows), cols <= rows)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        prefix = host_ints(self.prefix_lens)
        if prefix is None:
            return None
        stop = np.maximum(column(prefix), np.arange(query_len)[None] + 1)
        return clip_intervals(np.zeros_like(stop), stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_numbers(ops, "prefix_lens", self.prefix_lens, score_shape, highest=score_shape.key_len)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [shaped_numbers("prefix_lens", self.prefix_lens, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents: row i sees the keys with the same id; a negative id sees nothing and is seen by nothing.

    Parameters
    ----------
    query_ids, key_ids : (batch, length) or (length,) whole numbers
        `key_ids` None: those of the queries.

    Examples
    --------
    >>> Documents([0, 0, 1]).materialize(3, 3)[0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """

    query_ids: Any
    key_ids: Any = None

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        queries, keys = (per_batch(ops, score_shape, ids, rows, flat=True) for ids in self._ids())
        mine = ops.expand_dims(columns_of(ops, queries, ops.reshape(rows, (1, -1))), -1)
        theirs = ops.expand_dims(columns_of(ops, keys, cols), 1)
        return score_shape.batch_to_canonical(ops, ops.logical_and(ops.equal(mine, theirs), mine >= 0))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        found = [host_ints(ids) for ids in self._ids()]
        if any(ids is None for ids in found):
            return None
        queries, keys = (np.atleast_2d(ids) for ids in found if ids is not None)
        rows = max(len(queries), len(keys))
        if len(queries) == 0 or len(keys) == 0:
            nothing = np.zeros((0, query_len), np.int64)
            return nothing, nothing
        pairs = [runs(queries[b % len(queries)], keys[b % len(keys)]) for b in range(rows)]
        if any(pair is None for pair in pairs):
            return None
        start, stop = (np.stack(ends) for ends in zip(*(pair for pair in pairs if pair is not None), strict=True))
        return clip_intervals(start, stop, query_len, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for name, ids in zip(("query_ids", "key_ids"), self._ids(), strict=True):
            check_whole(name, ids)
        check_shapes(self, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        parts = zip(("query_ids", "key_ids"), self._ids(), (score_shape.query_len, score_shape.key_len), strict=True)
        return [
            ShapeSpec(
                name,
                ids,
                f"shape (batch, length) = ({score_shape.batch}, {length}) or ({length},)",
                [(length,), ((1, score_shape.batch), length)],
            )
            for name, ids, length in parts
        ]

    def _ids(self) -> tuple[Any, Any]:
        return self.query_ids, self.query_ids if self.key_ids is None else self.key_ids


@final
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Row i sees key j where `array[..., i, j]` is True; broadcastable to (..., query, key).

    Examples
    --------
    >>> Dense([[True, False], [True, True]]).materialize(2, 2)[0].astype(int)
    array([[1, 0],
           [1, 1]])
    """

    array: Any
    display_names: ClassVar[Mapping[str, str]] = {"array": "mask"}
    is_array: ClassVar[bool] = True

    @property
    def heads(self) -> int:
        """Length of the head axis, where the array has more than (batch, query, key)."""
        shape = shape_of(self.array)
        return int(shape[-3]) if len(shape) > 3 else 0

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        array = score_shape.to_canonical(ops, ops.asarray(self.array, rows))
        return columns_of(ops, entries_of(ops, array, rows, -2), cols)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_boolean("mask", self.array, numbers=False)
        check_shapes(self, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [shaped_pairs("mask", self.array, score_shape)]
