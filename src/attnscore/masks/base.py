"""The interface of masks, and their composition. True means "may attend".

- A mask is a small object, never an n x n array. Most masks are one interval of keys a query (``IntervalMask.ends``):
  any block of queries and keys (``visible``) and the intervals by which kernels skip tiles (``interval_set``) derive
  from it. The others define ``visible``.
- Masks compose with ``&``, ``|`` and ``~``, and have a readable repr.
- ``materialize`` is the reference for ``interval_set``: it is built from ``visible`` alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, cast, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.errors import MaskError, message
from attnscore.masks.intervals import MAX_INTERVALS, HostArray, Intervals, IntervalSet
from attnscore.masks.shape_spec import ShapeSpec
from attnscore.masks.validation import add_checks

Ends = tuple[Any, Any]
"""Start and stop of intervals: arrays, whole numbers, or None where nothing bounds a side."""


class Mask(ABC):
    """Interface of all masks. A new one is an `IntervalMask`, or defines ``visible``."""

    display_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in messages, where they differ from the attribute's: callers may know them as arguments."""
    is_array: ClassVar[bool] = False
    """Whether the mask is a boolean array, which kernels read faster than several intervals a query."""
    checked_methods: ClassVar[Sequence[str]] = ("visible", "intervals", "interval_set")
    """Methods whose results are checked in classes from outside the package."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        add_checks(cls)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        backends.register_pytree(cls)
        return object.__new__(cls)

    @property
    def heads(self) -> int:
        """Number of query heads with masks of their own; 0 without an axis of heads."""
        return 0

    @abstractmethod
    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        """Return whether query i may attend key j for `rows` (r, 1) and `cols` (1, c), broadcast over `score_shape`."""

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        """Return one interval of unmasked keys a query, or None without that form or where the host cannot read it."""
        return None

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        """Return a few intervals of unmasked keys a query, or None."""
        intervals = self.intervals(query_len, key_len, batch)
        return None if intervals is None else IntervalSet.of(intervals)

    def interval_set_at(self, rows: HostArray, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        """Return the intervals of the queries `rows` alone, (interval, batch or 1, rows), or None."""
        interval_set = self.interval_set(query_len, key_len, batch)
        if interval_set is None:
            return None
        return IntervalSet(interval_set.start[..., rows], interval_set.stop[..., rows])

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        """Raise MaskError when the mask does not fit `score_shape`; by default, when one of its `shapes` does not."""
        for spec in self.shapes(score_shape):
            spec.check_values(spec.name, spec.array)
            spec.check()

    def check_with(self, other: Mask, score_shape: ScoreShape) -> None:  # noqa: B027  # most masks fit any other
        """Raise MaskError where ``self & other`` is misleading, though both masks are right alone."""

    def for_call(self, ops: Backend, score_shape: ScoreShape) -> Mask:
        """Return a checked mask as one call uses it, forward and backward; `ops` is the backend of the call.

        The returned mask holds all that derives from arrays or code, such as intervals; the caller's never changes.
        """
        part_shape = self.part_shape(score_shape)
        return self._with_fields({name: x.for_call(ops, part_shape) for name, x in self._parts().items()})

    def part_shape(self, score_shape: ScoreShape) -> ScoreShape:
        """Return the shape of the scores that the masks among the fields belong to."""
        return score_shape

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        """Return its arrays with the shapes that fit `score_shape`, checked again when a graph learns its lengths."""
        return []

    @final
    def materialize(self, query_len: int, key_len: int, batch: int = 1) -> HostArray:
        """Return the boolean array (batch, query, key), or (batch, head, query, key) for several heads. O(n^2) memory.

        Examples
        --------
        >>> import attnscore as ats
        >>> ats.Causal().materialize(3, 3).astype(int)
        array([[[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]]])
        """
        ops, score_shape = backends.load("numpy"), self.checked_shape(query_len, key_len, batch)
        rows, cols = np.arange(query_len)[:, None], np.arange(key_len)[None, :]
        heads = score_shape.heads
        # On the canonical axes; outside of a call each head is a KV head with a group of 1.
        full = np.broadcast_to(self.visible(ops, score_shape, rows, cols), (batch, heads, 1, query_len, key_len))
        return np.array(full[:, :, 0] if heads > 1 else full[:, 0, 0])

    @final
    def checked_shape(self, query_len: int, key_len: int, batch: int) -> ScoreShape:
        """Return the shape of scores outside of a call; raise MaskError when the mask does not fit it."""
        score_shape = ScoreShape((batch,), max(1, self.heads), 1, query_len, key_len, has_heads=self.heads > 0)
        self.check(backends.load("numpy"), score_shape)
        return score_shape

    def _fields(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every concrete mask is a dataclass
        return {field.name: getattr(self, field.name) for field in fields}

    def _parts(self) -> dict[str, Mask]:
        """Return the masks among the fields."""
        return {name: x for name, x in self._fields().items() if isinstance(x, Mask)}

    def _with_fields(self, fields: Mapping[str, Any]) -> Mask:
        """Return the mask with other fields: the mask itself where all fields stay."""
        if all(x is getattr(self, name) for name, x in fields.items()):
            return self
        return dataclasses.replace(self, **fields)  # type: ignore[type-var]  # every concrete mask is a dataclass

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every concrete mask is a dataclass
        defaults = {field.name: field.default for field in fields}
        changed = {name: x for name, x in self._fields().items() if x is not defaults[name]}
        return f"{type(self).__name__}({', '.join(f'{name}={_field_repr(x)}' for name, x in changed.items())})"

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of the mask and of its parts under the names in messages; a repeated name is numbered."""
        arrays: dict[str, Array] = {}
        for name, value in self._fields().items():
            if isinstance(value, Mask):
                new = value.arrays()
            elif backends.is_array(value):
                new = {self.display_names.get(name, name): value}
            else:
                continue
            for key, x in new.items():
                arrays[f"{key} ({len(arrays) + 1})" if key in arrays else key] = x
        return arrays

    def map_leaves(self, change: Callable[[Array], Array]) -> Mask:
        """Return the mask over ``change(array)`` of each array that a program may trace, in it and in its parts."""
        changes: dict[str, Any] = {}
        for name, value in self._fields().items():
            if isinstance(value, Mask):
                changes[name] = value.map_leaves(change)
            elif backends.is_array(value):
                changes[name] = change(value)
        return self._with_fields(changes)

    @final
    def leaves(self) -> list[Array]:
        """Return the arrays that `map_leaves` changes, in its order; a repeated array repeats."""
        arrays: list[Array] = []

        def collect(x: Array) -> Array:
            arrays.append(x)
            return x

        self.map_leaves(collect)
        return arrays

    @final
    def with_leaves(self, leaves: Iterator[Array]) -> Mask:
        """Return the same mask over other arrays, in the order of `leaves`."""
        return self.map_leaves(lambda _: next(leaves))

    # Without this, NumPy and PyTorch apply & and | element by element before Python tries the mask's methods.
    __array_ufunc__ = None

    def __rand__(self, other: object) -> Mask:
        # Python comes here only where the left operand is no mask: the check raises.
        check_is_mask(other)
        return NotImplemented

    __ror__ = __rand__

    def __and__(self, other: Mask) -> Mask:
        check_is_mask(other)
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        check_is_mask(other)
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError("mask: a mask has no truth value. Hint: combine masks with & | ~, not with and, or, not")


class CompoundMask(Mask):
    """Interface of masks that are made of others."""

    @property
    def heads(self) -> int:
        return max((part.heads for part in self._parts().values()), default=0)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for part in self._parts().values():
            part.check(ops, self.part_shape(score_shape))

    @final
    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [spec for part in self._parts().values() for spec in part.shapes(self.part_shape(score_shape))]


class IntervalSetMask(Mask):
    """Interface of masks with several intervals of keys a query: they define `interval_set`; `intervals` derives."""

    @abstractmethod
    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None: ...

    @final
    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        intervals = self.interval_set(query_len, key_len, batch)
        return None if intervals is None else intervals.single


class _RowwiseMask(IntervalSetMask):
    """Interface of masks that compute the intervals of some queries without the other queries."""

    @abstractmethod
    def interval_set_at(self, rows: HostArray, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None: ...

    @final
    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        return self.interval_set_at(np.arange(query_len), query_len, key_len, batch)


class IntervalMask(_RowwiseMask):
    """Interface of masks that are one interval of keys a query, whatever their numbers are: `ends` returns it.

    Kernels skip tiles by it, also in programs whose numbers are known only when they run.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import attnscore as ats
    >>> @dataclass(frozen=True, eq=False, repr=False)
    ... class BlockCausal(ats.IntervalMask):
    ...     size: int
    ...
    ...     def ends(self, ops, score_shape, rows):
    ...         return None, (rows // self.size + 1) * self.size
    >>> BlockCausal(2).materialize(3, 4)[0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 1]])
    """

    checked_methods: ClassVar[Sequence[str]] = ("ends",)

    @abstractmethod
    def ends(self, ops: Backend, score_shape: ScoreShape, rows: Array) -> Ends:
        """Return (start, stop): each of the queries `rows` (1, r) attends the keys start <= j < stop.

        An end is an array (batch or 1, r or 1) or a whole number, or None where nothing bounds that side. It may be
        below 0 or above the number of keys.
        """

    @final
    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return inside(ops, score_shape, self.ends(ops, score_shape, ops.reshape(rows, (1, -1))), cols)

    @final
    def interval_set_at(self, rows: HostArray, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        values = [backends.host(x) for x in self.leaves()]
        if any(x is None for x in values):
            return None
        mask = cast(IntervalMask, self.with_leaves(iter(values)))
        # A batch of 1 may stand for inputs without that axis, where ``lens`` may be (query,).
        score_shape = ScoreShape((batch,), 1, 1, query_len, key_len, has_batch=batch != 1, has_heads=False)
        start, stop = mask.ends(backends.load("numpy"), score_shape, rows[None])
        start, stop = (bound if end is None else end for end, bound in ((start, 0), (stop, key_len)))
        start, stop, _ = np.broadcast_arrays(start, stop, rows[None])  # (batch or 1, rows)
        start, stop = (np.clip(end, 0, key_len).astype(np.int64, copy=False) for end in (start, stop))
        return IntervalSet.of((start, np.maximum(start, stop)))


def inside(ops: Backend, score_shape: ScoreShape, ends: Ends, cols: Array) -> Array:
    """Return which of the keys `cols` (1, c) are in the intervals of `IntervalMask.ends`, on the canonical axes."""
    start, stop = (
        score_shape.batch_to_canonical(ops, ops.expand_dims(end, -1)) if getattr(end, "shape", ()) else end
        for end in ends
    )
    bounds = [*([] if start is None else [cols >= start]), *([] if stop is None else [cols < stop])]
    return reduce(ops.logical_and, bounds) if bounds else cols >= 0  # without bounds: all keys


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(CompoundMask, _RowwiseMask):
    """Base of `And` and `Or`."""

    first: Mask
    second: Mask

    @abstractmethod
    def _combine(self, first: IntervalSet, second: IntervalSet, key_len: int) -> IntervalSet:
        """Return the intervals of the pair from the intervals of its parts."""

    @final
    def interval_set_at(self, rows: HostArray, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        first, second = (part.interval_set_at(rows, query_len, key_len, batch) for part in (self.first, self.second))
        return None if first is None or second is None else self._combine(first, second, key_len).within(MAX_INTERVALS)


@final
@dataclass(frozen=True, eq=False, repr=False)
class And(_Pair):
    """Unmasked by both masks."""

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ops.logical_and(*(mask.visible(ops, score_shape, rows, cols) for mask in (self.first, self.second)))

    def _combine(self, first: IntervalSet, second: IntervalSet, key_len: int) -> IntervalSet:
        return first.intersection(second, key_len)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        super().check(ops, score_shape)
        for part, other in itertools.permutations(parts_of(self), 2):
            part.check_with(other, score_shape)

    def __repr__(self) -> str:
        return f"{_wrap(self.first, Or)} & {_wrap(self.second, Or)}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Or(_Pair):
    """Unmasked by either mask."""

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ops.logical_or(*(mask.visible(ops, score_shape, rows, cols) for mask in (self.first, self.second)))

    def _combine(self, first: IntervalSet, second: IntervalSet, key_len: int) -> IntervalSet:
        return first.union(second, key_len)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Not(CompoundMask, _RowwiseMask):
    """Unmasked where the mask is not."""

    mask: Mask

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ~self.mask.visible(ops, score_shape, rows, cols)

    def interval_set_at(self, rows: HostArray, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        intervals = self.mask.interval_set_at(rows, query_len, key_len, batch)
        return None if intervals is None else intervals.complement(key_len).within(MAX_INTERVALS)

    def __repr__(self) -> str:
        return f"~{_wrap(self.mask, (And, Or))}"


def split_intervals(
    mask: Mask, query_len: int, key_len: int, batch: int, rows: HostArray | None = None
) -> tuple[IntervalSet | None, Mask | None]:
    """Split a mask into intervals, by which tiles are skipped, and the remaining mask, which is evaluated by block.

    Their AND is `mask`; either may be None, which masks nothing. `rows` selects queries; None: all.
    """
    common: IntervalSet | None = None
    remaining: list[Mask] = []
    for part in parts_of(mask):
        if rows is None:
            intervals = part.interval_set(query_len, key_len, batch)
        else:
            intervals = part.interval_set_at(rows, query_len, key_len, batch)
        # Kernels read a boolean array in less time than several intervals a query.
        if intervals is not None and intervals.count > 1 and part.is_array:
            intervals = None
        if intervals is not None and common is not None:
            intervals = common.intersection(intervals, key_len).within(MAX_INTERVALS)
        if intervals is None:
            remaining.append(part)
        else:
            common = intervals
    return common, all_of(remaining)


def all_of(parts: Sequence[Mask]) -> Mask | None:
    """Return the AND of masks; None of an empty sequence."""
    return reduce(And, parts) if parts else None


def parts_of(mask: Mask) -> list[Mask]:
    """Return the masks whose AND `mask` is, with ``~(a | b)`` taken as ``~a & ~b``."""
    if isinstance(mask, Not):
        inner = mask.mask
        if isinstance(inner, Not):
            return parts_of(inner.mask)
        return [*parts_of(Not(inner.first)), *parts_of(Not(inner.second))] if isinstance(inner, Or) else [mask]
    return [*parts_of(mask.first), *parts_of(mask.second)] if isinstance(mask, And) else [mask]


def atoms_of(mask: Mask) -> list[Mask]:
    """Return the masks that `mask` combines by ``&``, ``|`` and ``~``."""
    if isinstance(mask, (And, Or)):
        return [*atoms_of(mask.first), *atoms_of(mask.second)]
    return atoms_of(mask.mask) if isinstance(mask, Not) else [mask]


def map_atoms(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """Return `mask` with each of its `atoms_of` changed."""
    if isinstance(mask, (And, Or)):
        return type(mask)(map_atoms(mask.first, change), map_atoms(mask.second, change))
    return Not(map_atoms(mask.mask, change)) if isinstance(mask, Not) else change(mask)


def check_shapes(mask: Mask, score_shape: ScoreShape) -> None:
    """Raise MaskError when an array of `mask` does not fit `score_shape`; unknown lengths fit."""
    for part in mask.shapes(score_shape):
        part.check()


def check_is_mask(x: object) -> None:
    """Raise MaskError unless `x`, an operand of ``&`` or ``|``, is a mask."""
    if not isinstance(x, Mask):
        hint = None
        if isinstance(x, type):
            hint = f"{x.__name__}() makes a mask"
        elif hasattr(x, "shape"):
            hint = "wrap a boolean array in Dense(array) to combine it"
        raise MaskError(message("mask", "a mask object on both sides of & or |", type(x).__name__, hint=hint))


def _wrap(mask: Mask, kinds: type[Mask] | tuple[type[Mask], ...]) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _field_repr(x: object) -> str:
    """Return a field as the mask's repr shows it: an array that is large, or not readable here, by shape and dtype."""
    shape = getattr(x, "shape", None)
    if shape is None:
        return repr(x)
    values = backends.host(x)
    if values is not None and values.size <= 8:
        return repr(values.tolist())
    return f"<{tuple(shape)} {getattr(x, 'dtype', '')}>"
