"""Lengths that a TensorFlow graph learns only when it runs.

- They count as whole numbers do in the core: tiles and axes are planned with them.
- They belong to one graph, and nothing remembers them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from attnscore.frameworks.contract import Array, Unknown


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Length(Unknown):
    """The length of an axis, known when the graph runs."""

    value: Array
    __hash__ = None  # type: ignore[assignment]  # what holds one belongs to one graph, and is not to be remembered

    def at_most(self, length: int) -> Length:
        return Length(tf.clip_by_value(self.value, 1, length))

    def __add__(self, other: Any) -> Length:
        return Length(self.value + sizes((other,))[0])

    def __sub__(self, other: Any) -> Length:
        return Length(self.value - sizes((other,))[0])

    def __rsub__(self, other: Any) -> Length:
        return Length(sizes((other,))[0] - self.value)

    def __mul__(self, other: Any) -> Any:
        return 0 if isinstance(other, int) and other == 0 else Length(self.value * sizes((other,))[0])

    def __divmod__(self, other: Any) -> tuple[Length, Length]:
        (other,) = sizes((other,))
        return Length(self.value // other), Length(self.value % other)

    __radd__, __rmul__ = __add__, __mul__


tf.register_tensor_conversion_function(
    Length, lambda x, dtype=None, name=None, as_ref=False: tf.cast(x.value, dtype or tf.int32)
)


def sizes(shape: Sequence[Any]) -> list[Any]:
    """Lengths and places as TensorFlow takes them in one list: numbers, and 32-bit tensors."""
    return [n if isinstance(n, (int, np.integer)) else tf.cast(getattr(n, "value", n), tf.int32) for n in shape]
