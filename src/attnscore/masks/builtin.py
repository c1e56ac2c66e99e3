"""Built-in masks: valid lengths, ranges, padding, causal, windows, prefixes, documents, packed, graphs, arrays.

Lengths that the host can read are checked; lengths on a device or traced are clamped to [0, key_len].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import closest, shown
from attnscore.base.layout import ScoreShape, entries_of, is_unknown, may_equal
from attnscore.errors import MaskError, message
from attnscore.masks.base import And, Ends, IntervalMask, IntervalSetMask, Mask, Not, Or, all_of, check_shapes
from attnscore.masks.index_values import (
    ALIGN_HINT,
    Align,
    as_booleans,
    at_rows,
    check_align,
    check_boolean,
    check_cumulative,
    check_same_lengths,
    check_whole,
    check_widths,
    document_intervals,
    host_ints,
    id_arrays,
    index_values_spec,
    window_ends,
)
from attnscore.masks.intervals import MAX_INTERVALS, Intervals, IntervalSet, runs_of
from attnscore.masks.neighbour_table import NeighbourTable, check_graph
from attnscore.masks.shape_spec import PLACEHOLDER, ShapeSpec, shape_of, sizes_of


@final
@dataclass(frozen=True, eq=False, repr=False)
class ValidLens(IntervalMask):
    """Query i attends the keys j < lens; queries past `query_lens` attend nothing.

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

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        stop = at_rows(ops, score_shape, self.lens, rows, per_query=True)
        if self.query_lens is None:
            return None, stop
        return None, ops.where(rows < at_rows(ops, score_shape, self.query_lens, rows), stop, 0)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        queries, keys = score_shape.query_len, score_shape.key_len
        specs = [index_values_spec("valid_lens", self.lens, score_shape, highest=keys, per_query=True)]
        if self.query_lens is not None:
            specs.append(index_values_spec("query_lens", self.query_lens, score_shape, highest=queries))
        return specs


@final
@dataclass(frozen=True, eq=False, repr=False)
class KeyRange(IntervalMask):
    """Every query attends the keys start <= j < stop, with one range per batch row (left padding).

    Examples
    --------
    >>> KeyRange([1, 0], [4, 2]).materialize(1, 4, batch=2)[:, 0].astype(int)
    array([[0, 1, 1, 1],
           [1, 1, 0, 0]])
    """

    start: Any
    stop: Any

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        return at_rows(ops, score_shape, self.start, rows), at_rows(ops, score_shape, self.stop, rows)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        ends = (("start", self.start), ("stop", self.stop))
        return [index_values_spec(name, x, score_shape, highest=score_shape.key_len) for name, x in ends]


@final
@dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(IntervalSetMask):
    """Every query attends the keys where `array` (batch, key) is True: the attention mask of tokenizers.

    Zeros and ones in whole numbers count as False and True where the host can read them; on a device, or traced, the
    array is boolean.

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
        """Return the mask of an array where True means "ignore", as in ``nn.MultiheadAttention``."""
        check_boolean("key_padding", array)
        ops = backends.of_type(type(array))
        # Values that the host reads would be constants of a recorded program.
        values = None if ops is not None and ops.is_recording() else backends.host(array)
        return cls(~(array if values is None else values.astype(bool)))

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        visible = entries_of(ops, as_booleans(ops, self.array, rows), cols, -1)
        return score_shape.batch_to_canonical(ops, ops.expand_dims(visible, 1))

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        array = backends.host(self.array)
        runs = None if array is None else runs_of(array.astype(bool), MAX_INTERVALS)
        if runs is None:
            return None
        shape = (*runs.start.shape[:2], query_len)
        return IntervalSet(np.broadcast_to(runs.start, shape), np.broadcast_to(runs.stop, shape))

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        batch, keys = score_shape.batch, score_shape.key_len
        expected = f"shape (batch, key) = ({batch}, {keys})"
        return [ShapeSpec("key_padding", self.array, expected, [((1, batch), keys)], check_boolean)]


class _DiagonalMask(IntervalMask):
    """Interface of masks relative to a diagonal, which `align` or `offset` shifts."""

    align: Align | None
    offset: Any

    @final
    def diagonal(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Array:
        """Return the key of each of the queries `rows` on the diagonal, (batch or 1, r)."""
        if self.offset is not None:
            return rows + at_rows(ops, score_shape, self.offset, rows)
        return rows + (score_shape.key_len - score_shape.query_len if self.align == "bottom_right" else 0)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        name = type(self).__name__
        check_align(self.align)
        if self.offset is not None and self.align is not None:
            raise MaskError(message(name, "align or offset, not both", f"align={self.align!r} and an offset"))
        if self.offset is None and self.align is None and score_shape.query_len != score_shape.key_len:
            expected = "an alignment, as there are not as many queries as keys"
            got = f"{score_shape.query_len} queries and {score_shape.key_len} keys"
            raise MaskError(message(f"{name}()", expected, got, hint=ALIGN_HINT))
        super().check(ops, score_shape)

    @final
    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [] if self.offset is None else [index_values_spec("offset", self.offset, score_shape)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Causal(_DiagonalMask):
    """Query i attends the keys j <= i + offset.

    ::

        3 queries, 5 keys    align="top_left"     align="bottom_right"
                             1 0 0 0 0            1 1 1 0 0
                             1 1 0 0 0            1 1 1 1 0
                             1 1 1 0 0            1 1 1 1 1

    Parameters
    ----------
    align : "top_left" (offset 0) or "bottom_right" (offset key_len - query_len), optional
        Required when the lengths differ and no `offset` is given: taking the wrong one is a classic silent bug.
    offset : whole number, or one per batch row, optional

    Examples
    --------
    >>> Causal("bottom_right").materialize(2, 4)[0].astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """

    align: Align | None = None
    offset: Any = None

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        return None, self.diagonal(ops, score_shape, rows) + 1


@final
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(_DiagonalMask):
    """Query i attends the keys i + offset - left <= j <= i + offset + right, both included; None is unbounded.

    A model's "window w" is ``left = w - 1``: a query attends itself and w - 1 keys before it.
    `align` and `offset` are as in `Causal`.

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

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        return window_ends(self.diagonal(ops, score_shape, rows), self.left, self.right)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_widths(self.left, self.right)
        super().check(ops, score_shape)


@final
@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(IntervalMask):
    """Query i attends the keys j < prefix_len or j <= i, with one prefix length per batch row.

    Examples
    --------
    >>> PrefixLM(2).materialize(3, 3)[0].astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    prefix_lens: Any

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        return None, ops.maximum(at_rows(ops, score_shape, self.prefix_lens, rows), rows + 1)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [index_values_spec("prefix_lens", self.prefix_lens, score_shape, highest=score_shape.key_len)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents: query i attends the keys with its id; a negative id is padding, masked on both sides.

    Parameters
    ----------
    query_ids, key_ids : (batch, length) or (length,) whole numbers
        Without `key_ids`, keys have the ids of the queries.

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
        query_ids, key_ids = id_arrays(ops, self.ids, rows)
        query_ids = ops.expand_dims(entries_of(ops, query_ids, ops.reshape(rows, (1, -1)), -1), -1)
        key_ids = ops.expand_dims(entries_of(ops, key_ids, cols, -1), 1)
        return score_shape.batch_to_canonical(ops, ops.logical_and(ops.equal(query_ids, key_ids), query_ids >= 0))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        query_ids, key_ids = map(host_ints, self.ids)
        if query_ids is None or key_ids is None:
            return None
        ids = np.atleast_2d(query_ids), np.atleast_2d(key_ids)
        (rows,) = np.broadcast_shapes(*(x.shape[:1] for x in ids))
        start, stop = np.zeros((2, rows, ids[0].shape[1]), np.int64)
        for i, of_row in enumerate(zip(*(np.broadcast_to(x, (rows, x.shape[1])) for x in ids), strict=True)):
            if (row := document_intervals(*of_row)) is None:
                return None
            start[i], stop[i] = row
        return start, stop

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        def spec(name: str, ids: Any, n: Any) -> ShapeSpec:
            batch = score_shape.batch
            expected = f"shape (batch, length) = ({batch}, {n}) or ({n},)"
            return ShapeSpec(name, ids, expected, [(n,), ((1, batch), n)], check_whole)

        query_ids, key_ids = self.ids
        return [spec("query_ids", query_ids, score_shape.query_len), spec("key_ids", key_ids, score_shape.key_len)]

    @property
    def ids(self) -> tuple[Any, Any]:
        """The ids of queries and of keys."""
        return self.query_ids, self.query_ids if self.key_ids is None else self.key_ids


@final
@dataclass(frozen=True, eq=False, repr=False)
class Packed(IntervalMask):
    """Packed sequences: query i of sequence s attends the keys of sequence s, in its window where there is one.

    Cumulative lengths say where sequences begin and end, as in FlashAttention's calls of variable length: sequence s
    holds the queries ``cu_query[s] <= i < cu_query[s + 1]`` and the keys ``cu_key[s] <= j < cu_key[s + 1]``. Queries
    behind the last sequence attend nothing. `left`, `right` and `align` are as in `SlidingWindow`, but within each
    sequence; the methods `causal` and `window` set them.

    ::

        sequences of 1 and 2 queries, 3 and 3 keys

        Packed(...)    .causal("top_left")    .causal("bottom_right")    .window(0, 0, "bottom_right")
        1 1 1 0 0 0    1 0 0 0 0 0            1 1 1 0 0 0                0 0 1 0 0 0
        0 0 0 1 1 1    0 0 0 1 0 0            0 0 0 1 1 0                0 0 0 0 1 0
        0 0 0 1 1 1    0 0 0 1 1 0            0 0 0 1 1 1                0 0 0 0 0 1

    Parameters
    ----------
    cu_query : (sequences + 1,) whole numbers
        Cumulative lengths, from 0. Where they are traced or on a device, nothing waits for their values, and they are
        not checked.
    cu_key : (sequences + 1,) whole numbers, optional
        None: as `cu_query`.
    left, right : whole number, optional
        Keys before and after a query's own position; None is unbounded.
    align : "top_left" or "bottom_right", optional
        Required with a window where a sequence has more keys than queries or fewer, and where the host cannot tell.

    Examples
    --------
    >>> Packed([0, 1, 3]).materialize(4, 3)[0].astype(int)
    array([[1, 0, 0],
           [0, 1, 1],
           [0, 1, 1],
           [0, 0, 0]])
    >>> Packed([0, 1, 3], [0, 3, 6]).causal("bottom_right").materialize(3, 6)[0].astype(int)
    array([[1, 1, 1, 0, 0, 0],
           [0, 0, 0, 1, 1, 0],
           [0, 0, 0, 1, 1, 1]])
    """

    cu_query: Any
    cu_key: Any = None
    left: int | None = None
    right: int | None = None
    align: Align | None = None

    def causal(self, align: Align | None = None) -> Packed:
        """Return the mask of the same sequences, each of them causal."""
        return self.window(right=0, align=align)

    def window(self, left: int | None = None, right: int | None = None, align: Align | None = None) -> Packed:
        """Return the mask of the same sequences with this window, in place of any other."""
        return Packed(self.cu_query, self.cu_key, left, right, align)

    @property
    def cumulative(self) -> tuple[Any, Any]:
        """The cumulative lengths of queries and of keys."""
        return self.cu_query, self.cu_query if self.cu_key is None else self.cu_key

    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        cu_query, cu_key = (ops.astype(ops.asarray(cu, rows), "int64") for cu in self.cumulative)
        query = ops.reshape(rows, (-1,))
        # The number of sequences that end at or before a query is the index of its sequence. Queries behind the last
        # sequence get an empty one, which starts and stops at the last cumulative length.
        sequence = ops.searchsorted(cu_query[1:], query)
        stops = [ops.concat([cu[1:], cu[-1:]], 0) for cu in (cu_query, cu_key)]
        query_start, start = (ops.take(x, sequence, 0) for x in (cu_query, cu_key))
        query_stop, stop = (ops.take(x, sequence, 0) for x in stops)
        centre = query + (stop - query_stop if self.align == "bottom_right" else start - query_start)
        first, last = window_ends(centre, self.left, self.right)
        start = start if first is None else ops.maximum(start, first)
        stop = stop if last is None else ops.minimum(stop, last)
        return ops.expand_dims(start, 0), ops.expand_dims(stop, 0)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_widths(self.left, self.right)
        check_align(self.align)
        check_shapes(self, score_shape)
        cu_query = check_cumulative("cu_query", self.cu_query, score_shape.query_len)
        if self.cu_key is None:
            # `cu_query` counts keys too, so no window needs an alignment.
            check_cumulative("cu_query", self.cu_query, score_shape.key_len)
            if sizes_of(self.cu_query) == (1,) and 0 not in (score_shape.query_len, score_shape.key_len):
                hint = "of lengths, numpy.cumsum([0, *lengths])"
                raise MaskError(message("cu_query", "the ends of at least one sequence", "the start alone", hint=hint))
            return
        cu_key = check_cumulative("cu_key", self.cu_key, score_shape.key_len)
        if self.align is None and (self.left, self.right) != (None, None):
            check_same_lengths(cu_query, cu_key)

    def check_with(self, other: Mask, score_shape: ScoreShape) -> None:
        """Refuse `other` where its diagonal in the whole arrays is not the diagonal of each sequence.

        With `cu_query` alone it always is; with an offset, `other` says that it counts in the whole arrays.
        """
        if self.cu_key is None or not isinstance(other, _DiagonalMask) or other.offset is not None:
            return
        cu_query, cu_key = map(host_ints, self.cumulative)
        if cu_query is not None and cu_key is not None:
            offset = other.diagonal(backends.load("numpy"), score_shape, np.zeros((), np.int64))
            # key - query at the start and at the end of each sequence, for the two alignments. Without one, `other` has
            # as many queries as keys and means both.
            differences = {"top_left": (cu_key - cu_query)[:-1], "bottom_right": (cu_key - cu_query)[1:]}
            is_empty = (np.diff(cu_query) == 0) | (np.diff(cu_key) == 0)
            offsets = differences.values() if other.align is None else [differences[other.align]]
            if all(((difference == offset) | is_empty).all() for difference in offsets):
                return
        expected = "the window of each sequence: Packed(...).causal(align) or .window(left, right, align)"
        hint = f"{type(other).__name__}(offset=...) counts positions in the whole arrays"
        raise MaskError(message("mask", expected, f"{self!r} & {other!r}", hint=hint))

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        shape = sizes_of(self.cu_query)
        count = shape[0] if len(shape) == 1 else 1
        # Cumulative lengths begin with 0, so an empty array fits no shape.
        specs = [ShapeSpec("cu_query", self.cu_query, "shape (sequences + 1,)", [(count,)] if count != 0 else [])]
        if self.cu_key is not None:
            specs.append(ShapeSpec("cu_key", self.cu_key, f"shape (sequences + 1,) = ({count},)", [(count,)]))
        return specs


@final
@dataclass(frozen=True, eq=False, repr=False)
class Neighbours(Mask):
    """Query i attends the keys ``indices[indptr[i]:indptr[i + 1]]``: a graph in compressed sparse rows.

    All batch rows and heads share it. In O(edges) time and memory where the host can read it and it is combined with
    nothing but masks of intervals (``Neighbours(...) & Causal()``): see the kernel ``"gather"``. The arrays may then be
    NumPy's, or on the CPU, in any call.

    Parameters
    ----------
    indptr : (query + 1,) whole numbers
        Cumulative numbers of neighbours, from 0.
    indices : (edges,) whole numbers
        Keys, in any order; each at most once for a query.

    Examples
    --------
    >>> Neighbours([0, 2, 2, 3], [3, 0, 1]).materialize(3, 4)[0].astype(int)
    array([[1, 0, 0, 1],
           [0, 0, 0, 0],
           [0, 1, 0, 0]])
    """

    indptr: Any
    indices: Any

    def table(self, key_len: int) -> NeighbourTable | None:
        """Return the neighbours as the host reads them; None where it cannot."""
        table: NeighbourTable | None = self.__dict__.get("_table")
        return table if table is not None else NeighbourTable.of(self.indptr, self.indices, key_len)

    def for_call(self, ops: Backend, score_shape: ScoreShape) -> Mask:
        """Return the mask over the table's copies of the arrays, which do not change."""
        table = None if is_unknown(score_shape.key_len) else self.table(score_shape.key_len)
        if table is None:
            return self
        mask = Neighbours(*table.arrays)
        # The mask keeps its table, which may be too large for the cache.
        mask.__dict__["_table"] = table
        return mask

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        key_len, table = score_shape.key_len, None
        if not is_unknown(key_len):
            table = self.table(key_len)
        # Codes have to fit into the positions' dtype: JAX has 32 bits by default.
        if table is not None and (ops.dtype(rows) == "int64" or len(table.lens) * key_len < 2**31):
            codes = ops.asarray(table.codes, rows)
            pairs = rows * key_len + cols
            # The last code that is not above a pair; the first code is -1.
            index = ops.searchsorted(codes, ops.reshape(pairs, (-1,))) - 1
            return ops.equal(ops.reshape(ops.take(codes, index, 0), pairs.shape), pairs)
        # (query, edge) @ (edge, key): does the edge begin at the query and end at the key?
        indptr, indices = (ops.astype(ops.asarray(x, rows), "int64") for x in (self.indptr, self.indices))
        count = ops.shape(indices)[0]
        edges = ops.reshape(ops.positions(0, count, rows), (1, count))
        start, stop = (
            ops.reshape(ops.take(indptr, ops.reshape(rows, (-1,)) + shift, 0), rows.shape) for shift in (0, 1)
        )
        begins = ops.logical_and(edges >= start, edges < stop)
        ends = ops.equal(ops.reshape(indices, (count, 1)), cols)
        return ops.matmul(ops.astype(begins, "float32"), ops.astype(ends, "float32")) > 0

    def map_leaves(self, change: Callable[[Array], Array]) -> Mask:
        # Arrays that the host can read are no leaves: it could no longer read them as traced arrays. Those have a
        # `PLACEHOLDER` until a program runs.
        arrays = self.indptr, self.indices
        is_readable = all(x is not PLACEHOLDER and backends.host(x) is not None for x in arrays)
        return self if is_readable else super().map_leaves(change)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        check_shapes(self, score_shape)
        if is_unknown(score_shape.key_len):
            check_graph(self.indptr, self.indices, score_shape.key_len)
        else:
            self.table(score_shape.key_len)  # checks the arrays

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        queries = score_shape.query_len
        # To an unknown number, which may be None, nothing can be added: any length fits.
        ends = sizes_of(self.indptr)[0] if is_unknown(queries) and sizes_of(self.indptr) else queries + 1
        any_length = sizes_of(self.indices)[:1] or (0,)
        # As in `Packed.shapes`, an empty array fits no shape.
        return [
            ShapeSpec("indptr", self.indptr, f"shape (query + 1,) = ({ends},)", [(ends,)] if ends != 0 else []),
            ShapeSpec("indices", self.indices, "shape (edges,)", [any_length]),
        ]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Query i attends key j where `array[..., i, j]` is True; broadcastable to (..., query, key).

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
        """Number of heads, where the array has more axes than (batch, query, key)."""
        shape = shape_of(self.array)
        return int(shape[-3]) if len(shape) > 3 else 0

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        array = score_shape.to_canonical(ops, ops.asarray(self.array, rows))
        return entries_of(ops, entries_of(ops, array, rows, -2), cols, -1)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        target, axes = score_shape.user_shape, len(shape_of(self.array))
        allowed = [[(1, length) for length in target[len(target) - axes :]]] if axes <= len(target) else []
        expected = f"a shape that broadcasts to (..., query, key) = {target}"
        return [ShapeSpec("mask", self.array, expected, allowed, partial(check_boolean, numbers=False))]


BUILTIN: tuple[type[Mask], ...] = (
    *(And, Or, Not),
    *(ValidLens, KeyRange, KeyPadding, Causal, SlidingWindow, PrefixLM, Documents, Packed, Neighbours, Dense),
)
"""All masks whose fields define them fully (a `MaskFunction` holds code); other tables derive from this one."""


def as_mask(mask: Any, valid_lens: Any, score_shape: ScoreShape) -> Mask | None:
    """Return the AND of both arguments, not yet checked against `score_shape`; None without any."""
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else _dense(mask, score_shape))
    if valid_lens is not None:
        parts.append(ValidLens(valid_lens))
    return all_of(parts)


def _dense(mask: Any, score_shape: ScoreShape) -> Mask:
    """Return a bare boolean array as a mask."""
    if isinstance(mask, type) or not (backends.is_array(mask) or isinstance(mask, (list, tuple))):
        hint = f"{mask.__name__}() makes a mask" if isinstance(mask, type) else "for example attnscore.Causal()"
        # Operators make the first three: And, Or and Not.
        if isinstance(mask, str) and (name := closest(mask, [kind.__name__ for kind in BUILTIN[3:]])):
            hint = f"did you mean attnscore.{name}(...)?"
        raise MaskError(message("mask", "a mask object or a boolean array", shown(mask), hint=hint))
    shape = shape_of(mask)
    batch, query_len, key_len = score_shape.batch, score_shape.query_len, score_shape.key_len
    is_per_key = len(shape) == 2 and score_shape.has_batch and all(map(may_equal, shape, (batch, key_len)))
    # With one row, (batch, key) and (query, key) mask the same pairs.
    if is_per_key and 1 not in (batch, shape[0]):
        if may_equal(shape[0], query_len) or is_unknown(batch):
            expected = "an array whose meaning is clear"
            got = f"shape {shape}, which is both (batch, key) and (query, key)"
            hint = "KeyPadding(mask) says (batch, key), Dense(mask) says (query, key)"
            raise MaskError(message("mask", expected, got, hint=hint))
        expected = f"a shape that broadcasts to (..., query, key) = {score_shape.user_shape}"
        per_key = (shape[0], *(1,) * (len(score_shape.user_shape) - 2), shape[1])
        hint = f"this is (batch, key): KeyPadding(mask) says so, and so does the shape {per_key}"
        raise MaskError(message("mask", expected, shape, hint=hint))
    return Dense(mask)
