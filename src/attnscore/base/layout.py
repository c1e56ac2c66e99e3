"""Axes: their sizes, some of which a graph learns only when it runs; the caller's axes and the canonical axes.

Canonical axes are ``(*batch, head, group, query | key, dim)``: at least one batch axis, KV heads as ``head``, and the
query heads that share a KV head as ``group``. The conversion makes views: nothing is copied, broadcast axes stay 1.
Masks and biases broadcast to the shape of the score matrices (`ScoreShape`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.errors import ShapeError, message

if TYPE_CHECKING:
    from attnscore.backends.base import Array, Backend

Shape = tuple[int, ...]
Span = tuple[Any, int]
"""(start, count) of queries or keys; the start may be traced."""


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
    """Return the smaller of the two, at least 1, as no tile is empty; backends register their unknown sizes."""
    return max(1, min(length, limit))


def may_equal(first: Any, second: Any) -> bool:
    """Whether two sizes are equal, or one is unknown."""
    return is_unknown(first) or is_unknown(second) or bool(first == second)


def must_equal(first: Any, second: Any) -> bool:
    """Whether two sizes are equal whatever a graph learns when it runs."""
    return surely_equal(first, second) if is_unknown(first) else surely_equal(second, first)


@functools.singledispatch
def surely_equal(length: Any, other: Any) -> bool:
    """Return `must_equal` of two sizes, the first unknown where one is; frameworks register theirs for such sizes."""
    return bool(length == other)


@functools.singledispatch
def unknown_broadcast(length: Any, other: Any) -> Any:
    """Return the size to which two unknown ones broadcast: here they count as equal; backends register theirs."""
    return length


def broadcast(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shape that all broadcast to; ValueError if there is none. Unknown sizes fit any number."""
    if not any(is_unknown(n) for shape in shapes for n in shape):
        return tuple(np.broadcast_shapes(*map(tuple, shapes)))
    axes = max(map(len, shapes))
    result = []
    for lengths in zip(*((1,) * (axes - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        numbers = {n for n in lengths if not is_unknown(n)} - {1}
        if len(numbers) > 1:
            raise ValueError(f"lengths {sorted(numbers)} do not broadcast")
        # None has no arithmetic.
        unknown: list[Any] = [n for n in lengths if isinstance(n, Unknown)] or [n for n in lengths if n is None]
        result.append(numbers.pop() if numbers else functools.reduce(unknown_broadcast, unknown) if unknown else 1)
    return tuple(result)


@dataclass(frozen=True)
class ScoreShape:
    """Shape of the score matrices of one call, on the canonical axes."""

    lead: Shape
    """Batch axes of the result; the first is `batch`."""
    heads: int
    groups: int
    query_len: int
    key_len: int
    has_batch: bool = True
    has_heads: bool = True

    @property
    def batch(self) -> int:
        return self.lead[0]

    @property
    def rows(self) -> Shape:
        """Shape of one number per query."""
        return (*self.lead, self.heads, self.groups, self.query_len)

    @property
    def user_shape(self) -> Shape:
        """Shape (..., query, key) on the caller's axes, to which a mask or bias broadcasts."""
        lead = self.lead if self.has_batch else ()
        head = (self.heads * self.groups,) if self.has_heads else ()
        return (*lead, *head, self.query_len, self.key_len)

    def is_relative(self, shape: Shape) -> bool:
        """Whether a bias of this shape has a number for each key - query; with one query that is a row of pairs."""
        if len(shape) < 2 or any(n is None for n in (self.query_len, self.key_len, *shape[-2:])):
            return False
        if not must_equal(shape[-2], 1) or must_equal(self.query_len, 1):
            return False
        return must_equal(shape[-1], self.query_len + self.key_len - 1)

    def to_canonical(self, ops: Backend, x: Array) -> Array:
        """View a caller's array, broadcastable to (..., query, key), on the canonical axes."""
        shape, axes = ops.shape(x), 3 if self.has_heads else 2
        shape = (1,) * (axes - len(shape)) + shape
        lead = (1,) * (len(self.lead) - len(shape[:-axes])) + shape[:-axes]
        split = self._split(shape[-3]) if self.has_heads else (1, 1)
        return ops.reshape(x, (*lead, *split, *shape[-2:]))

    def _split(self, head: Any) -> tuple[Any, Any]:
        """Split the size of a caller's axis of heads into (head, group): (1, 1) where it is broadcast."""
        if is_unknown(head):
            # It is 1 or heads * groups when the graph runs.
            return at_most(head, self.heads), at_most(head, self.groups) if self.groups > 1 else 1
        return (1, 1) if head == 1 else (self.heads, self.groups)

    def batch_to_canonical(self, ops: Backend, x: Array) -> Array:
        """View an array (batch or 1, a, b) on the canonical axes."""
        return ops.reshape(x, (x.shape[0], *(1,) * (len(self.lead) + 1), *x.shape[1:]))


@dataclass(frozen=True)
class AxisLayout:
    """Conversion between the caller's axes, `axes` of them, and the canonical axes."""

    axes: int
    head_axis: int
    score_shape: ScoreShape
    dim: int
    key_dim: int
    value_dim: int

    @property
    def is_length_before_heads(self) -> bool:
        """Whether the caller's axes are (batch, length, head, dim)."""
        return self.axes >= 4 and self.head_axis == -2

    @property
    def rows(self) -> Shape:
        """Shape of one number per query on the caller's axes, heads in front of queries."""
        return self.score_shape.user_shape[:-1]

    def pairs_to_canonical(self, ops: Backend, x: Array) -> Array:
        """View a caller's bias or mask on the canonical axes."""
        return self.score_shape.to_canonical(ops, x)

    def to_canonical(self, ops: Backend, x: Array, *, is_query: bool) -> Array:
        """View the caller's query, key or value on the canonical axes."""
        missing = self.axes - len(x.shape)
        if self.axes < 4:
            lead = (1,) * missing + tuple(x.shape[:-2])
            return ops.reshape(x, (*(lead or (1,)), 1, 1, *x.shape[-2:]))
        if missing:
            x = ops.reshape(x, (1,) * missing + tuple(x.shape))
        if self.head_axis == -2:
            if not is_query or self.score_shape.groups == 1 or x.shape[-2] == 1:
                # One transpose and no reshape: a compiler cancels it with the one back (native/xla_call.py).
                return ops.swap_axes(ops.expand_dims(x, -3), -4, -2)
            x = ops.swap_axes(x, -3, -2)
        if not is_query or self.score_shape.groups == 1 or x.shape[-3] == 1:
            return ops.reshape(x, (*x.shape[:-2], 1, *x.shape[-2:]))
        return ops.reshape(x, (*x.shape[:-3], self.score_shape.heads, self.score_shape.groups, *x.shape[-2:]))

    def scores_from_canonical(self, ops: Backend, x: Array) -> Array:
        """View (*lead, head, group, query, key) as (..., heads, query, key), for either `head_axis`.

        Without the axes that the caller does not have.
        """
        *lead, head, group, rows, columns = x.shape
        heads = (head * group,) if self.score_shape.has_heads else ()
        return ops.reshape(x, (*(lead if self.score_shape.has_batch else ()), *heads, rows, columns))

    def from_canonical(self, ops: Backend, x: Array) -> Array:
        """View (*lead, head, group, query, value_dim) on the caller's axes."""
        if self.is_length_before_heads and self.score_shape.groups == 1:
            x = ops.swap_axes(x, -4, -2)
            return ops.reshape(x, (*x.shape[:-3], *x.shape[-2:]))
        x = self.scores_from_canonical(ops, x)
        return ops.swap_axes(x, -3, -2) if self.is_length_before_heads else x

    def output_to_canonical(self, ops: Backend, x: Array) -> Array:
        """View an output, or its gradient, on the canonical axes: the inverse of `from_canonical`."""
        x = ops.swap_axes(x, -3, -2) if self.is_length_before_heads else x
        return ops.reshape(x, (*self.score_shape.rows, x.shape[-1]))

    def rows_from_canonical(self, ops: Backend, x: Array) -> Array:
        """View one number per query on the axes of the output but the last."""
        return self.from_canonical(ops, ops.expand_dims(x, -1))[..., 0]

    def gradient_from_canonical(self, ops: Backend, x: Array, shape: Shape) -> Array:
        """Return the gradient of a caller's query, key or value from the gradient of its canonical view."""
        if self.is_length_before_heads:
            # (*lead, head * group, length, dim), with the leading axes of size 1 that `to_canonical` added.
            joined = ops.reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))
            x = ops.swap_axes(joined, -3, -2)
        return ops.reshape(x, shape)


@dataclass(frozen=True)
class CanonicalLayout(AxisLayout):
    """Layout of arrays that are on the canonical axes already, as in a staged program."""

    @classmethod
    def of(cls, layout: AxisLayout) -> CanonicalLayout:
        return cls(0, -3, layout.score_shape, layout.dim, layout.key_dim, layout.value_dim)

    @property
    def rows(self) -> Shape:
        return self.score_shape.rows

    def pairs_to_canonical(self, ops: Backend, x: Array) -> Array:
        return x

    def to_canonical(self, ops: Backend, x: Array, *, is_query: bool) -> Array:
        return x


def check_bias_shape(shape: Shape, score_shape: ScoreShape) -> None:
    """Raise ShapeError unless `shape` broadcasts to (..., query, key), or to the shape of a relative bias."""
    target, axes, hint = score_shape.user_shape, "(..., query, key)", None
    if score_shape.is_relative(shape):
        target, axes = (*target[:-2], *shape[-2:]), "(..., 1, query + key - 1)"
    elif shape[-2:-1] == (1,):
        hint = "(..., 1, query + key - 1) has one number for each key - query"
    try:
        fits = all(map(may_equal, broadcast(shape, target), target)) and len(shape) <= len(target)
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(message("bias", f"a shape that broadcasts to {axes} = {target}", shape, hint=hint))


def entries_of(ops: Backend, x: Array, index: Array, axis: int) -> Array:
    """Take the entries of `x` at `index` along an axis, or return `x` where that axis is broadcast."""
    if x.shape[axis] == 1:
        return x
    index = ops.reshape(index, (-1,))
    if is_unknown(x.shape[axis]) and not ops.settles_sizes:
        # If the axis proves to be broadcast when the graph runs, each index becomes 0.
        index = index % ops.shape(x)[axis]
    return ops.take(x, index, axis)
