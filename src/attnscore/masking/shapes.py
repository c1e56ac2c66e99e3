"""Shapes that the arrays of masks may have: checked when a call is made, and again where a graph learns them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnscore import frameworks
from attnscore.errors import MaskError, message
from attnscore.frameworks.contract import is_unknown, may_equal
from attnscore.grid import Grid


def shape_of(x: Any) -> tuple[int, ...]:
    """Shape of an array, a list or a number."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    values = frameworks.host(x)
    return () if values is None else values.shape


@dataclass(frozen=True, eq=False)
class Shaped:
    """An array (a list, a number) of a mask, and the shapes that fit."""

    name: str
    array: Any
    wanted: str
    """What messages say of the shapes that fit."""
    allowed: Sequence[Sequence[Any]]
    """Those shapes; an axis is one length, or several of which it has one."""

    def check(self) -> None:
        """Raise MaskError unless the shape may fit, as far as lengths are known."""
        shape = shape_of(self.array)
        for one in self.allowed:
            if len(one) == len(shape) and all(
                any(may_equal(n, m) for m in choices(axis)) for n, axis in zip(shape, one, strict=True)
            ):
                return
        raise MaskError(message(self.name, self.wanted, shape))

    @property
    def is_sure(self) -> bool:
        """Whether all that `check` asks is known."""
        lengths = [n for one in self.allowed for axis in one for n in choices(axis)]
        return not any(map(is_unknown, (*shape_of(self.array), *lengths)))


def choices(axis: Any) -> tuple[Any, ...]:
    """The lengths that an axis of `Shaped.allowed` may have."""
    return axis if isinstance(axis, tuple) else (axis,)


def shaped_numbers(name: str, x: Any, grid: Grid, *, per_query: bool = False) -> Shaped:
    """A number, or one per batch row (or query)."""
    allowed: list[tuple[Any, ...]] = [(), (1,), (grid.batch,)]
    wanted = f"({grid.batch},)" if grid.has_batch else "a number"
    if per_query:
        allowed += [(grid.batch, grid.query_len), (1, grid.query_len), (grid.batch, 1)]
        wanted += f" or ({grid.batch}, {grid.query_len})" if grid.has_batch else f" or ({grid.query_len},)"
        if not grid.has_batch:
            allowed.append((grid.query_len,))
    return Shaped(name, x, f"shape {wanted}", allowed)


def shaped_pairs(name: str, x: Any, grid: Grid) -> Shaped:
    """What broadcasts to (..., query, key)."""
    target = grid.user_shape
    axes = len(shape_of(x))
    allowed = [[(1, length) for length in target[len(target) - axes :]]] if axes <= len(target) else []
    return Shaped(name, x, f"a shape that broadcasts to (..., query, key) = {target}", allowed)
