"""Shapes that the arrays of masks may have, checked at the call and again where a graph learns its lengths later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.base.layout import is_unknown, may_equal
from attnscore.errors import MaskError, message

PLACEHOLDER = np.zeros(0)
"""Placeholder for the arrays that a mask gets when a program runs."""


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an array, a list or a number."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    values = backends.host(x)
    return () if values is None else values.shape


def sizes_of(x: Any) -> tuple[Any, ...]:
    """Return the shape as `shape_of` does, with `Unknown` where a graph learns a size when it runs."""
    return backends.of({"x": x}).shape(x) if backends.is_array(x) else shape_of(x)


@dataclass(frozen=True, eq=False)
class ShapeSpec:
    """An array, list or number of a mask, and the shapes that fit."""

    name: str
    array: Any
    expected: str
    """The shapes that fit, in words for messages."""
    allowed: Sequence[Sequence[Any]]
    """The shapes that fit, perhaps none; an axis is one length, or a tuple of lengths of which it may have any."""
    check_values: Callable[[str, Any], object] = lambda name, array: None
    """Raises MaskError, with the name, where the host can read values that do not fit."""

    def check(self) -> None:
        """Raise MaskError when the shape does not fit; unknown lengths fit."""
        shape = shape_of(self.array)
        for allowed in self.allowed:
            if len(allowed) == len(shape) and all(
                any(may_equal(n, m) for m in choices(axis)) for n, axis in zip(shape, allowed, strict=True)
            ):
                return
        raise MaskError(message(self.name, self.expected, shape))

    @property
    def is_known(self) -> bool:
        """Whether `check` knows all lengths."""
        lengths = [n for allowed in self.allowed for axis in allowed for n in choices(axis)]
        return not any(map(is_unknown, (*shape_of(self.array), *lengths)))


def choices(axis: Any) -> tuple[Any, ...]:
    """Return the lengths that an axis of `ShapeSpec.allowed` may have."""
    return axis if isinstance(axis, tuple) else (axis,)
