"""Sizes that a TensorFlow graph learns when it runs.

- They have the arithmetic of integers, so that tiles and axes are planned with them.
- They belong to one graph, and are never cached.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from attnscore.backends.base import Array
from attnscore.base.layout import Unknown, at_most, broadcast, unknown_broadcast


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Length(Unknown):
    """The size of an axis, a scalar tensor of a graph."""

    value: Array
    __hash__ = None  # type: ignore[assignment]  # it belongs to one graph: no cache may have it in a key

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


@at_most.register
def _(length: Length, limit: int) -> Length:
    return Length(tf.clip_by_value(length.value, 1, limit))


@unknown_broadcast.register
def _(length: Length, other: Length) -> Length:
    # Sizes that do not fit raise here: XLA's products of matrices take them.
    with tf.name_scope("axes_of_query_key_and_value_do_not_fit"):
        return Length(tf.broadcast_dynamic_shape([length.value], [other.value])[0])


tf.register_tensor_conversion_function(
    Length, lambda x, dtype=None, name=None, as_ref=False: tf.cast(x.value, dtype or tf.int32)
)


def shape(x: Array) -> tuple[Any, ...]:
    """Return the sizes of the axes, `Length` where the graph learns one when it runs."""
    static = tuple(x.shape)
    if None not in static:
        return static
    return tuple(Length(tf.shape(x)[i]) if n is None else n for i, n in enumerate(static))


def sizes(shape: Sequence[Any]) -> list[Any]:
    """Convert sizes and offsets to numbers and 32-bit tensors, which TensorFlow takes in one list."""
    return [n if isinstance(n, (int, np.integer)) else tf.cast(getattr(n, "value", n), tf.int32) for n in shape]


def broadcast_together(arrays: Sequence[Array]) -> Sequence[Array]:
    """Return the arrays, broadcast to one shape if no operation takes them together."""
    rank = max(len(x.shape) for x in arrays)
    shapes = [(1,) * (rank - len(x.shape)) + shape(x) for x in arrays]
    if not _needs_more_axes(shapes):
        return arrays
    common = broadcast(*shapes)
    is_ready = (len(x.shape) == 0 or each == common for x, each in zip(arrays, shapes, strict=True))
    return [x if ready else broadcast_to(x, common) for x, ready in zip(arrays, is_ready, strict=True)]


def broadcast_to(x: Array, target: Sequence[Any]) -> Array:
    """Return `x` broadcast to a shape of at most 8 axes, in two steps if one does not take it."""
    half, source = len(target) - 4, (1,) * (len(target) - len(x.shape)) + shape(x)
    if _needs_more_axes([source, target]):
        x = tf.broadcast_to(x, sizes([*target[:half], *source[half:]]))
    return tf.broadcast_to(x, sizes(target))


def _needs_more_axes(shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether these shapes broadcast in more axes than the 5 of an operation, after neighbours alike are merged."""
    # An unknown size may turn out to be 1, unlike its neighbours.
    axes = [
        tuple(n if isinstance(n, Length) else type(n) is int and n == 1 for n in axis)
        for axis in zip(*shapes, strict=True)
    ]
    groups = itertools.groupby(axis for axis in axes if any(n is not True for n in axis))
    return len(axes) > 5 and len([*groups]) > 5


def assert_shape(x: Array, shapes: Sequence[tuple[str, Array, Sequence[Sequence[Any]]]]) -> Array:
    """Return `x`; the graph fails when it runs unless each named array has one of the shapes allowed for it.

    The error names the failing operation, and with it the scope.
    """
    named = [(shape(tf.convert_to_tensor(array)), allowed) for _, array, allowed in shapes]
    with tf.name_scope(f"the_shape_of_{'_or_'.join(dict.fromkeys(name for name, _, _ in shapes))}_does_not_fit"):
        fits = [
            tf.reduce_any([_is_one_of(lengths, choices) for choices in allowed if len(choices) == len(lengths)])
            for lengths, allowed in named
        ]
        # A slice of all of `x` (no copy), whose start -1 fails. XLA removes assertions, but fails at this; TensorFlow
        # would merge a reshape with other reshapes, an impossible one too.
        begin = tf.where(tf.reduce_all(fits), tf.zeros(len(x.shape), tf.int32), -1)
        checked = tf.slice(x, begin, [-1] * len(x.shape))
    checked.set_shape(x.shape)
    return checked


def _is_one_of(shape: Sequence[Any], allowed: Sequence[Any]) -> Array:
    """Return whether each size of `shape` is the one allowed for its axis, or one of a tuple of sizes."""
    choices = [axis if isinstance(axis, tuple) else (axis,) for axis in allowed]
    axes = [tf.reduce_any(tf.equal(*sizes((n,)), sizes(axis))) for n, axis in zip(shape, choices, strict=True)]
    return tf.reduce_all(axes) if axes else tf.constant(True)
