"""Shapes that the arrays of masks may have: checked when a call is made, and again where a graph learns them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnscore import backends
from attnscore.backends.base import is_unknown, may_equal
from attnscore.core.layout import ScoreShape
from attnscore.errors import MaskError, message


def shape_of(x: Any) -> tuple[int, ...]:
    """Shape of an array, a list or a number."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    values = backends.host(x)
    return () if values is None else values.shape


@dataclass(frozen=True, eq=False)
class ShapeSpec:
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
    def is_known(self) -> bool:
        """Whether all that `check` asks is known."""
        lengths = [n for one in self.allowed for axis in one for n in choices(axis)]
        return not any(map(is_unknown, (*shape_of(self.array), *lengths)))


def choices(axis: Any) -> tuple[Any, ...]:
    """The lengths that an axis of `ShapeSpec.allowed` may have."""
    return axis if isinstance(axis, tuple) else (axis,)


def shaped_numbers(name: str, x: Any, score_shape: ScoreShape, *, per_query: bool = False) -> ShapeSpec:
    """A number, or one per batch row (or query)."""
    allowed: list[tuple[Any, ...]] = [(), (1,), (score_shape.batch,)]
    wanted = f"({score_shape.batch},)" if score_shape.has_batch else "a number"
    if per_query:
        allowed += [(score_shape.batch, score_shape.query_len), (1, score_shape.query_len), (score_shape.batch, 1)]
        wanted += (
            f" or ({score_shape.batch}, {score_shape.query_len})"
            if score_shape.has_batch
            else f" or ({score_shape.query_len},)"
        )
        if not score_shape.has_batch:
            allowed.append((score_shape.query_len,))
    return ShapeSpec(name, x, f"shape {wanted}", allowed)


def shaped_pairs(name: str, x: Any, score_shape: ScoreShape) -> ShapeSpec:
    """What broadcasts to (..., query, key)."""
    target = score_shape.user_shape
    axes = len(shape_of(x))
    allowed = [[(1, length) for length in target[len(target) - axes :]]] if axes <= len(target) else []
    return ShapeSpec(name, x, f"a shape that broadcasts to (..., query, key) = {target}", allowed)
