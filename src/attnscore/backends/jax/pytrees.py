"""Dataclasses (scores, masks, the carry of a loop) as JAX pytrees.

- Arrays in the fields are leaves. Numbers, names, lists, functions and None are part of the structure, so that a mask
  given as a list of lengths is concrete under ``jit``, and its masked tiles are skipped.
- A class that its author has registered is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A static value, compared by its type and repr, as lists have no hash; functions are compared by themselves."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and _comparable(self.value) == _comparable(other.value)

    def __hash__(self) -> int:
        return hash(_comparable(self.value))


def _comparable(value: Any) -> Any:
    """Return a key that tells static values apart; a bound method itself, as its repr may omit its object's state."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_comparable, value))
    if not callable(value) or isinstance(value, type):
        # NumPy below 2 prints a number of its own as Python prints one.
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def register(kind: type) -> None:
    """Make a dataclass a pytree; any other class stays as it is."""
    if not dataclasses.is_dataclass(kind):
        return
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        fields = {name: getattr(x, name) for name in names}
        leaves = {name: value for name, value in fields.items() if not _is_static(value)}
        rest = tuple((name, Static(value)) for name, value in fields.items() if name not in leaves)
        return [(jax.tree_util.GetAttrKey(name), value) for name, value in leaves.items()], (tuple(leaves), rest)

    def unflatten(structure: Any, leaves: Iterable[Any]) -> Any:
        # Without __init__: JAX puts placeholders into leaves, which checks would refuse.
        instance: Any = object.__new__(kind)
        names, rest = structure
        for name, value in zip(names, leaves, strict=True):
            object.__setattr__(instance, name, value)
        for name, static in rest:
            object.__setattr__(instance, name, static.value)
        return instance

    # ValueError: the class is registered already, by its author or by an earlier call.
    with contextlib.suppress(ValueError):
        jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten)


def _is_static(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes, bool, int, float, np.generic, type)):
        return True
    if callable(value) and not isinstance(value, jax.Array):
        return True
    return isinstance(value, (list, tuple)) and all(map(_is_static, value))
