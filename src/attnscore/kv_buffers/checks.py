"""What an append and a crop refuse: arrays that do not fit each other or the cache, counts out of range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, HostArray
from attnscore.base.arguments import shown
from attnscore.base.sizes import is_unknown, may_equal
from attnscore.errors import ArgumentError, DtypeError, ShapeError, message


def with_heads_first(ops: Backend, x: Array, head_axis: int) -> Array:
    """Return (batch, head, length, dim)."""
    if len(x.shape) == 3:
        return ops.expand_dims(x, 1)
    return ops.swap_axes(x, 1, 2) if head_axis == -2 else x


@dataclass(frozen=True)
class AppendShapes:
    """What the first append settles for those after it."""

    batch: int
    has_heads: bool
    head_axis: int
    key: tuple[int, int]
    """Heads and dimension of the keys before they were prepared."""
    value: tuple[int, int]

    def check(self, ops: Backend, arrays: Mapping[str, Array]) -> None:
        """Raise ShapeError unless key and value have these sizes."""
        for name, x in arrays.items():
            sizes = self.key if name == "key" else self.value
            batch, *others = _sizes(ops, x, self.head_axis)
            if (batch, *others) != (self.batch, *sizes) or (len(x.shape) == 4) != self.has_heads:
                expected = f"shape {self._shown(*sizes)}, as before"
                raise ShapeError(message(name, expected, tuple(x.shape)))

    def _shown(self, heads: int, dim: int) -> str:
        axes = [self.batch, "n", dim] if not self.has_heads else [self.batch, heads, "n", dim]
        if self.has_heads and self.head_axis == -2:
            axes[1:3] = ["n", heads]
        return f"({', '.join(map(str, axes))})"


def check_pair(ops: Backend, arrays: Mapping[str, Array]) -> None:
    """Raise unless key and value are dense floating arrays of known sizes that fit each other."""
    backends.check_dense(ops, arrays)
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    for name, x in arrays.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x), shapes=shapes))
        if len(x.shape) not in (3, 4):
            expected = "3 axes (batch, length, dim), or 4 with heads"
            raise ShapeError(message(name, expected, len(x.shape), shapes=shapes))
        if any(map(is_unknown, shapes[name])):
            hint = "tf.ensure_shape, or an input signature without None"
            raise ShapeError(message(name, "known sizes, as the buffers have them", shapes[name], hint=hint))
    key, value = arrays.values()
    if ops.dtype(key) != ops.dtype(value):
        raise DtypeError(message("value", f"the dtype of key ({ops.dtype(key)})", ops.dtype(value)))
    if len(shapes["key"]) != len(shapes["value"]) or shapes["key"][:-1] != shapes["value"][:-1]:
        raise ShapeError(message("value", "the shape of key, except for the last axis", shapes["value"], shapes=shapes))


def check_like_buffers(ops: Backend, buffer: Array, arrays: Mapping[str, Array]) -> None:
    """Raise unless key and value have the framework, dtype and device of a buffer."""
    key = arrays["key"]
    if backends.of({"the cache": buffer, **arrays}).dtype(buffer) != ops.dtype(key):
        raise DtypeError(message("key", f"the dtype of the cache ({ops.dtype(buffer)})", ops.dtype(key)))
    backends.check_devices(ops, buffer, arrays)


def heads_and_dim(ops: Backend, x: Array, head_axis: int) -> tuple[int, int]:
    """Return the number of heads of an array, 1 for one without heads, and the size of its last axis."""
    _, heads, dim = _sizes(ops, x, head_axis)
    return heads, dim


def _sizes(ops: Backend, x: Array, head_axis: int) -> tuple[int, int, int]:
    shape = with_heads_first(ops, x, head_axis).shape
    return int(shape[0]), int(shape[1]), int(shape[3])


def counts(lens: Any, batch: int, count: int) -> Any:
    """Return how many positions each sequence appends, (batch,); raise unless they lie in 0..count."""
    if lens is None:
        return np.full(batch, count)
    if backends.host(lens) is None:
        if tuple(lens.shape) != (batch,):
            raise ShapeError(message("lens", f"shape ({batch},)", tuple(lens.shape)))
        return lens
    return host_counts("lens", lens, batch, count)


def lengths(lens: Any, batch: int) -> Any:
    """Return a length, or (batch,) of them; raise unless they are whole numbers, which traced ones are taken to be."""
    if backends.host(lens) is not None:
        return host_counts("lens", lens, batch, None)
    shape = tuple(lens.shape)
    if len(shape) > 1 or not all(may_equal(size, batch) for size in shape):
        raise ShapeError(message("lens", f"shape () or ({batch},)", shape))
    return lens


def host_counts(name: str, x: Any, batch: int, highest: int | None) -> HostArray:
    """Return whole numbers as (batch,); raise unless they lie in 0..highest."""
    values = backends.host(x)
    # A list of numbers is an array of floats in MXNet.
    if values is None or values.dtype.kind not in "iuf" or (values % 1).any():
        raise ArgumentError(message(name, "whole numbers", shown(x)))
    if values.shape != (batch,) and not (highest is None and values.shape == ()):
        raise ShapeError(message(name, f"shape ({batch},)", values.shape))
    values = np.broadcast_to(values.astype(np.int64), (batch,))
    if values.size and (values.min() < 0 or (highest is not None and values.max() > highest)):
        got = values.min() if values.min() < 0 else values.max()
        expected = "whole numbers, 0 or more" if highest is None else f"whole numbers from 0 to {highest}"
        raise ArgumentError(message(name, expected, got))
    return values
