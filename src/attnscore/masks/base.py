"""The contract of masks, and how they compose. True means "may attend".

- A mask is a small object, never an n x n array: it answers for any block of rows and columns (``visible``), and most
  say all they know as one interval of keys per query (``intervals``), or a few (``interval_set``), from which tiles are
  skipped.
- Masks compose with ``&``, ``|`` and ``~`` and print themselves.
- ``materialize`` is the truth that ``intervals`` and ``interval_set`` are held to; it is built from ``visible`` alone.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.core.layout import ScoreShape
from attnscore.errors import MaskError, message
from attnscore.masks.intervals import MOST, HostArray, Intervals, IntervalSet
from attnscore.masks.shape_spec import ShapeSpec
from attnscore.masks.validation import add_checks


class Mask(ABC):
    """Interface of all masks. A new one gives ``visible`` and, when it is an interval, ``intervals``."""

    display_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in messages, where the caller may know the argument by another."""
    is_array: ClassVar[bool] = False
    """Whether it is an array of booleans, which serves better as it is than as several pieces a row."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        add_checks(cls)

    def __new__(cls, *_: Any, **__: Any) -> Any:
        backends.register_pytree(cls)
        return object.__new__(cls)

    @property
    def heads(self) -> int:
        """Query heads that the mask tells apart: 0 when it knows no axis of heads."""
        return 0

    @abstractmethod
    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        """Whether query i may attend key j, for `rows` (r, 1) and `cols` (1, c); broadcasts over `score_shape`."""

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        """One interval of visible keys per row, or None when the mask is not of that form or cannot be read here."""
        return None

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        """A few intervals of visible keys per row, or None."""
        found = self.intervals(query_len, key_len, batch)
        return None if found is None else IntervalSet.of(found)

    @abstractmethod
    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        """Raise MaskError when the mask does not fit `score_shape`."""

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        """Its arrays with the shapes that fit `score_shape`: asked again when lengths are known that no graph knew."""
        return []

    @final
    def materialize(self, query_len: int, key_len: int, batch: int = 1) -> HostArray:
        """The boolean array (batch, query, key), or wider where a ``Dense`` array has more axes. O(n^2) memory.

        Examples
        --------
        >>> import attnscore as ats
        >>> ats.Causal().materialize(3, 3).astype(int)
        array([[[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]]])
        """
        ops = backends.load("numpy")
        heads = max(1, self.heads)
        score_shape = ScoreShape((batch,), heads, 1, query_len, key_len, has_heads=self.heads > 0)
        self.check(ops, score_shape)
        rows, cols = np.arange(query_len)[:, None], np.arange(key_len)[None, :]
        full = np.broadcast_to(self.visible(ops, score_shape, rows, cols), (batch, heads, 1, query_len, key_len))
        return np.array(full[:, :, 0] if heads > 1 else full[:, 0, 0])

    def __repr__(self) -> str:
        given = [
            f"{field.name}={_show(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # every concrete mask is a dataclass
            if getattr(self, field.name) is not field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def arrays(self) -> dict[str, Array]:
        """The fields that a caller gave as arrays, under the names that messages use; those of its parts included."""
        found: dict[str, Array] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every concrete mask is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                new = value.arrays()
            elif backends.is_array(value):
                new = {self.display_names.get(field.name, field.name): value}
            else:
                continue
            found.update({name if name not in found else f"{name} ({len(found) + 1})": x for name, x in new.items()})
        return found

    def leaves(self) -> list[Array]:
        """The arrays of `arrays`, in an order that `with_leaves` knows; the same one twice where it is."""
        found: list[Array] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every concrete mask is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                found += value.leaves()
            elif backends.is_array(value):
                found.append(value)
        return found

    def with_leaves(self, leaves: Iterator[Array]) -> Mask:
        """The same mask over other arrays, taken from `leaves` in that order."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every concrete mask is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                changes[field.name] = value.with_leaves(leaves)
            elif backends.is_array(value):
                changes[field.name] = next(leaves)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # every concrete mask is a dataclass

    # NumPy and PyTorch would otherwise try & and | element by element before they ask the mask.
    __array_ufunc__ = None

    def __rand__(self, other: object) -> Mask:
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


@final
@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Seen by both masks."""

    first: Mask
    second: Mask

    @property
    def heads(self) -> int:
        return max(self.first.heads, self.second.heads)

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ops.logical_and(*(mask.visible(ops, score_shape, rows, cols) for mask in (self.first, self.second)))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return _single(self.interval_set(query_len, key_len, batch))

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        first, second = (part.interval_set(query_len, key_len, batch) for part in (self.first, self.second))
        return None if first is None or second is None else first.intersection(second, key_len).within(MOST)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for part in (self.first, self.second):
            part.check(ops, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [*self.first.shapes(score_shape), *self.second.shapes(score_shape)]

    def __repr__(self) -> str:
        return f"{_wrap(self.first, Or)} & {_wrap(self.second, Or)}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Seen by either mask."""

    first: Mask
    second: Mask

    @property
    def heads(self) -> int:
        return max(self.first.heads, self.second.heads)

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ops.logical_or(*(mask.visible(ops, score_shape, rows, cols) for mask in (self.first, self.second)))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return _single(self.interval_set(query_len, key_len, batch))

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        first, second = (part.interval_set(query_len, key_len, batch) for part in (self.first, self.second))
        return None if first is None or second is None else first.union(second, key_len).within(MOST)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for part in (self.first, self.second):
            part.check(ops, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return [*self.first.shapes(score_shape), *self.second.shapes(score_shape)]

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Seen where the mask does not see."""

    mask: Mask

    @property
    def heads(self) -> int:
        return self.mask.heads

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        return ~self.mask.visible(ops, score_shape, rows, cols)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return _single(self.interval_set(query_len, key_len, batch))

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        found = self.mask.interval_set(query_len, key_len, batch)
        return None if found is None else found.complement(key_len).within(MOST)

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        self.mask.check(ops, score_shape)

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        return self.mask.shapes(score_shape)

    def __repr__(self) -> str:
        return f"~{_wrap(self.mask, (And, Or))}"


def split(mask: Mask, query_len: int, key_len: int, batch: int) -> tuple[IntervalSet | None, Mask | None]:
    """`mask` as pieces AND a rest that only blocks can tell; either may be None.

    The pieces of what can say them bound the tiles even when the rest cannot.
    """
    both: IntervalSet | None = None
    rest: Mask | None = None
    for part in parts_of(mask):
        found = part.interval_set(query_len, key_len, batch)
        if found is not None and found.count > 1 and part.is_array:
            found = None
        if found is not None and both is not None:
            found = both.intersection(found, key_len).within(MOST)
        if found is None:
            rest = part if rest is None else And(rest, part)
        else:
            both = found
    return both, rest


def parts_of(mask: Mask) -> list[Mask]:
    """The masks whose AND `mask` is; what is not seen by either of two is not seen by each."""
    if isinstance(mask, Not):
        inner = mask.mask
        if isinstance(inner, Not):
            return parts_of(inner.mask)
        return [*parts_of(Not(inner.first)), *parts_of(Not(inner.second))] if isinstance(inner, Or) else [mask]
    return [*parts_of(mask.first), *parts_of(mask.second)] if isinstance(mask, And) else [mask]


def check_shapes(mask: Mask, score_shape: ScoreShape) -> None:
    """Raise MaskError unless the arrays of `mask` may fit `score_shape`, as far as lengths are known."""
    for part in mask.shapes(score_shape):
        part.check()


def _single(found: IntervalSet | None) -> Intervals | None:
    return None if found is None else found.single


def check_is_mask(x: object) -> None:
    """Raise MaskError when something other than a mask is combined with one."""
    if not isinstance(x, Mask):
        hint = None
        if isinstance(x, type):
            hint = f"{x.__name__}() makes a mask"
        elif hasattr(x, "shape"):
            hint = "wrap a boolean array in Dense(array) to combine it"
        raise MaskError(message("mask", "a mask object on both sides of & or |", type(x).__name__, hint=hint))


def _wrap(mask: Mask, kinds: type[Mask] | tuple[type[Mask], ...]) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _show(x: object) -> str:
    """A field in a mask's repr: short values in full, arrays by shape."""
    shape = getattr(x, "shape", None)
    if shape is None:
        return repr(x)
    host = backends.host(x)
    if host is not None and host.size <= 8:
        return repr(host.tolist())
    return f"<{tuple(shape)} {getattr(x, 'dtype', '')}>"
