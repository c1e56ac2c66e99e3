"""The carry of a loop as a list of tensors, which TensorFlow's loops and conditions take, and back.

- Nested dataclasses, dictionaries and tuples of arrays and None.
- ``tf.nest`` would treat a dataclass as a leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attnscore.backends.base import Array


def leaves_of(x: Any) -> list[Array]:
    """Return the arrays in nested dataclasses, dictionaries and tuples, in order."""
    if x is None:
        return []
    if dataclasses.is_dataclass(x):
        return [leaf for field in dataclasses.fields(x) for leaf in leaves_of(getattr(x, field.name))]
    if isinstance(x, dict):
        return [leaf for name in sorted(x) for leaf in leaves_of(x[name])]
    return [leaf for part in x for leaf in leaves_of(part)] if isinstance(x, tuple) else [x]


def rebuilt(like: Any, leaves: list[Array]) -> Any:
    """Return the structure of `like` around `leaves`, from which it pops those that it uses."""
    if like is None:
        return None
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        return dataclasses.replace(
            like, **{field.name: rebuilt(getattr(like, field.name), leaves) for field in dataclasses.fields(like)}
        )
    if isinstance(like, dict):
        return {name: rebuilt(like[name], leaves) for name in sorted(like)}
    return tuple(rebuilt(part, leaves) for part in like) if isinstance(like, tuple) else leaves.pop(0)
