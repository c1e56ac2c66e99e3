"""How buffers are written: in place by NumPy and PyTorch, to a new array by JAX, TensorFlow and MXNet.

- In place, lengths and positions are NumPy's: no device is waited for, and buffers grow.
- Otherwise they are arrays of the framework, which may be traced, and a buffer keeps its size. A new buffer is a
  gather from the appended entries and a selection by slot, in operations of the backend, whose autodiff goes through
  both. JAX scatters instead, which XLA does in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.kv_buffers.slots import AppendedPositions

A = TypeVar("A")


class Storage(ABC):
    """What differs between frameworks whose caches change in place and those whose caches are functional."""

    is_in_place: bool

    @abstractmethod
    def index_ops(self, ops: Backend) -> Backend:
        """Return the backend that computes with lengths and positions."""

    @abstractmethod
    def index_like(self, x: Array) -> Array:
        """Return an array of that backend, on the device of `x`."""

    @abstractmethod
    def scope(self, ops: Backend) -> AbstractContextManager[Any]:
        """Return the context in which buffers change."""

    @abstractmethod
    def written(
        self, ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, *, is_saved: bool
    ) -> Array:
        """Return the buffer with entries of `block` (batch, head, count, dim) in their slots."""

    @abstractmethod
    def taken(self, ops: Backend, buffer: Array, indices: Array, *, is_saved: bool) -> Array:
        """Return the sequences `indices` of a buffer."""


@final
class InPlace(Storage):
    """Buffers that are written to; lengths on the host."""

    is_in_place = True

    def index_ops(self, ops: Backend) -> Backend:
        return backends.load("numpy")

    def index_like(self, x: Array) -> Array:
        return np.empty(0)

    def scope(self, ops: Backend) -> AbstractContextManager[Any]:
        return nullcontext()

    def written(
        self, ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, *, is_saved: bool
    ) -> Array:
        """Write to the buffer, or to a copy where autograd holds it (`is_saved`) or records the append."""
        return moved(ops, buffer, block, appended.slots(), appended.is_real(), is_saved=is_saved)

    def taken(self, ops: Backend, buffer: Array, indices: HostArray, *, is_saved: bool) -> Array:
        """Return the sequences; as many as the buffer has are moved within its own memory, unless autograd holds it."""
        if len(indices) != len(buffer) or is_saved or ops.needs_grad(buffer):
            return ops.take(buffer, ops.asarray(indices, buffer), 0)
        changed = np.flatnonzero(indices != np.arange(len(buffer)))
        if len(changed):
            buffer[ops.asarray(changed, buffer)] = buffer[ops.asarray(indices[changed], buffer)]
        return buffer


class Functional(Storage):
    """Buffers that are never written to; lengths beside them, in the same framework."""

    is_in_place = False

    @final
    def index_ops(self, ops: Backend) -> Backend:
        return ops

    @final
    def index_like(self, x: Array) -> Array:
        return x

    @final
    def scope(self, ops: Backend) -> AbstractContextManager[Any]:
        return ops.numeric_scope()

    @final
    def taken(self, ops: Backend, buffer: Array, indices: Array, *, is_saved: bool) -> Array:
        return ops.take(buffer, ops.asarray(indices, buffer), 0)


@final
class Selecting(Functional):
    """Every slot takes an appended entry or keeps what it holds."""

    def written(
        self, ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, *, is_saved: bool
    ) -> Array:
        batch, heads, count, dim = block.shape
        entries = appended.entries()
        is_new = ops.reshape(entries >= 0, (batch, 1, -1, 1))
        if count > 1:
            # Of all sequences and heads at once, as the rows of one matrix.
            first = ops.reshape(ops.positions(0, batch * heads, entries) * count, (batch, heads, 1))
            rows = first + ops.reshape(ops.maximum(entries, 0), (batch, 1, -1))
            block = ops.take(ops.reshape(block, (-1, dim)), rows, 0)
        return ops.where(is_new, block, buffer)


@final
class Scattering(Functional):
    """Appended entries are written to their slots, by JAX's indexed updates."""

    def written(
        self, ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, *, is_saved: bool
    ) -> Array:
        rows = ops.reshape(ops.positions(0, buffer.shape[0], appended.starts), (-1, 1))
        # What is not new gets a slot past the end, to which nothing is written.
        nowhere = ops.zeros((), appended.starts, ops.dtype(appended.starts)) + appended.size
        slots = ops.where(appended.is_real(), appended.slots(), nowhere)
        return buffer.at[rows, :, slots].set(ops.swap_axes(block, 1, 2), mode="drop")


STORAGE: dict[str, Storage] = {
    "numpy": InPlace(),
    "torch": InPlace(),
    "jax": Scattering(),
    "tensorflow": Selecting(),
    "mxnet": Selecting(),
}


def moved(
    ops: Backend, buffer: Array, block: Array, slots: HostArray, is_real: HostArray, *, is_saved: bool = False
) -> Array:
    """Write entry i of each sequence to slots[b, i] where is_real[b, i], and return the buffer, or its copy."""
    if not is_real.any():
        return buffer
    target, source = _places(slots, is_real)
    if is_saved or ops.needs_grad(buffer, block):
        buffer = buffer.clone()
    buffer[target] = block[source]
    return buffer


def _places(slots: HostArray, is_real: HostArray) -> tuple[Any, Any]:
    """Return the index of slots in a buffer, and the index of the entries that go there."""
    every = slice(None)
    # All sequences append to the same slots, one after the other: slices, which copy faster than indices.
    first = slots[:1]
    if is_real.all() and (slots == first).all() and (first[:, 1:] == first[:, :-1] + 1).all():
        start = int(first[0, 0])
        return (every, every, slice(start, start + first.size)), ...
    sequence, i = np.nonzero(is_real)
    return (sequence, every, slots[sequence, i]), (sequence, every, i)
