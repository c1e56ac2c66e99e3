"""Sizes of axes, some of which a graph learns only when it runs."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np


class Unknown(ABC):
    """A size that a graph learns when it runs. It equals nothing but itself, and has the arithmetic of integers."""

    @abstractmethod
    def __sub__(self, other: Any) -> Any: ...

    def __repr__(self) -> str:
        return "?"


def is_unknown(length: Any) -> bool:
    """Whether the size of an axis is not known before a graph runs."""
    return length is None or isinstance(length, Unknown)


@functools.singledispatch
def at_most(length: Any, limit: int) -> Any:
    """Return the smaller of the two, and at least 1; backends register their unknown sizes."""
    return max(1, min(length, limit))


def may_equal(first: Any, second: Any) -> bool:
    """Whether two sizes are equal, or one is unknown."""
    return is_unknown(first) or is_unknown(second) or bool(first == second)


def must_equal(first: Any, second: Any) -> bool:
    """Whether two sizes are equal whatever a graph learns when it runs."""
    if is_unknown(first) or is_unknown(second):
        return surely_equal(*((first, second) if is_unknown(first) else (second, first)))
    return bool(first == second)


@functools.singledispatch
def surely_equal(length: Any, other: Any) -> bool:
    """Return `must_equal` of an unknown size and another one; frameworks that decide it otherwise register theirs."""
    return bool(length == other)


def broadcast(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape that all broadcast to; ValueError if there is none. Unknown sizes of one axis count as equal."""
    if not any(is_unknown(n) for shape in shapes for n in shape):
        return tuple(np.broadcast_shapes(*map(tuple, shapes)))
    axes = max(map(len, shapes))
    found = []
    for lengths in zip(*((*(1 for _ in range(axes - len(shape))), *shape) for shape in shapes), strict=True):
        numbers = {n for n in lengths if not is_unknown(n)} - {1}
        if len(numbers) > 1:
            raise ValueError(f"lengths {sorted(numbers)} do not broadcast")
        unknown = sorted((n for n in lengths if is_unknown(n)), key=lambda n: n is None)
        found.append(numbers.pop() if numbers else unknown[0] if unknown else 1)
    return tuple(found)
