"""What loops carry, as the list of tensors that TensorFlow's loops and conditions take, and back.

- Dataclasses, dictionaries and tuples of arrays and None, one in another.
- TensorFlow's own ``tf.nest`` takes a dataclass for a leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attnscore.backends.base import Array


def leaves_of(x: Any) -> list[Array]:
    """The arrays in what a loop carries: dataclasses, dictionaries and tuples of arrays and None."""
    if x is None:
        return []
    if dataclasses.is_dataclass(x):
        return [leaf for field in dataclasses.fields(x) for leaf in leaves_of(getattr(x, field.name))]
    if isinstance(x, dict):
        return [leaf for name in sorted(x) for leaf in leaves_of(x[name])]
    return [leaf for part in x for leaf in leaves_of(part)] if isinstance(x, tuple) else [x]


def rebuilt(like: Any, leaves: list[Array]) -> Any:
    """The same structure around the next of `leaves`, which it takes off their front."""
    if like is None:
        return None
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        return dataclasses.replace(
            like, **{field.name: rebuilt(getattr(like, field.name), leaves) for field in dataclasses.fields(like)}
        )
    if isinstance(like, dict):
        return {name: rebuilt(like[name], leaves) for name in sorted(like)}
    return tuple(rebuilt(part, leaves) for part in like) if isinstance(like, tuple) else leaves.pop(0)
