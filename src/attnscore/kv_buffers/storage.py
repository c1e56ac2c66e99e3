"""How buffers are written: in place by NumPy and PyTorch, to a new array by JAX, TensorFlow and MXNet.

- In place, lengths and positions are NumPy's: no device is waited for, and buffers grow.
- Otherwise they are arrays of the framework, which may be traced, and a buffer keeps its size. A new buffer is a
  gather from the appended entries and a selection by slot, in operations of the backend, whose autodiff goes through
  both. JAX scatters instead, which XLA does in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.errors import FrameworkError, message
from attnscore.kv_buffers.slots import AppendedPositions


@final
@dataclass(frozen=True)
class Storage:
    """Operations that differ between caches that change in place and functional caches."""

    is_in_place: bool
    written: Callable[[Backend, Array, Array, AppendedPositions, bool], Array]
    """Returns the buffer with entries of a block (batch, head, count, dim) in their slots.

    The last argument says whether autograd holds the buffer: then a copy is written to.
    """

    def index_ops(self, ops: Backend) -> Backend:
        """Return the backend that computes with lengths and positions."""
        return backends.load("numpy") if self.is_in_place else ops

    def scope(self, ops: Backend) -> AbstractContextManager[Any]:
        """Return the context in which buffers change."""
        return nullcontext() if self.is_in_place else ops.numeric_scope()

    def select_sequences(self, ops: Backend, buffer: Array, indices: Array, is_saved: bool) -> Array:
        """Return the sequences `indices` of a buffer.

        In place, as many as the buffer has are moved within its own memory, unless that needs a copy.
        """
        if not self.is_in_place or len(indices) != len(buffer) or _needs_copy(ops, buffer, is_saved=is_saved):
            return ops.take(buffer, ops.asarray(indices, buffer), 0)
        changed = np.flatnonzero(indices != np.arange(len(buffer)))
        if len(changed):
            buffer[ops.asarray(changed, buffer)] = buffer[ops.asarray(indices[changed], buffer)]
        return buffer


def _in_place(ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, is_saved: bool) -> Array:
    return moved(ops, buffer, block, appended.slots(), appended.is_real(), is_saved=is_saved)


def _selected(ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, is_saved: bool) -> Array:
    """Let every slot take an appended entry or keep its own."""
    batch, heads, count, dim = block.shape
    entries = appended.entries()
    is_new = ops.reshape(entries >= 0, (batch, 1, -1, 1))
    if count > 1:
        # All sequences and heads at once, as the rows of one matrix.
        first = ops.reshape(ops.positions(0, batch * heads, entries) * count, (batch, heads, 1))
        rows = first + ops.reshape(ops.maximum(entries, 0), (batch, 1, -1))
        block = ops.take(ops.reshape(block, (-1, dim)), rows, 0)
    return ops.where(is_new, block, buffer)


def _scattered(ops: Backend, buffer: Array, block: Array, appended: AppendedPositions, is_saved: bool) -> Array:
    """Write appended entries to their slots, by JAX's indexed updates."""
    rows = ops.reshape(ops.positions(0, buffer.shape[0], appended.starts), (-1, 1))
    # Entries without a slot get one past the end, to which nothing is written.
    nowhere = ops.zeros((), appended.starts, ops.dtype(appended.starts)) + appended.size
    slots = ops.where(appended.is_real(), appended.slots(), nowhere)
    return buffer.at[rows, :, slots].set(ops.swap_axes(block, 1, 2), mode="drop")


IN_PLACE, SELECTING = Storage(True, _in_place), Storage(False, _selected)
STORAGE: dict[str, Storage] = {
    "numpy": IN_PLACE,
    "torch": IN_PLACE,
    "jax": Storage(False, _scattered),
    "tensorflow": SELECTING,
    "mxnet": SELECTING,
}


def moved(
    ops: Backend, buffer: Array, block: Array, slots: HostArray, is_real: HostArray, *, is_saved: bool = False
) -> Array:
    """Write entry i of each sequence to slots[b, i] where is_real[b, i], and return the buffer, or its copy."""
    if not is_real.any():
        return buffer
    target, source = _places(slots, is_real)
    if _needs_copy(ops, buffer, block, is_saved=is_saved):
        buffer = buffer.clone()
    try:
        buffer[target] = block[source]
    except RuntimeError as error:
        if not str(error).startswith("vmap:"):
            raise
        hint = "make the cache inside, or append the examples as its batch, outside"
        raise FrameworkError(message("cache", "one made inside torch.vmap", "one made outside", hint=hint)) from error
    return buffer


def _needs_copy(ops: Backend, buffer: Array, *blocks: Array, is_saved: bool) -> bool:
    """Whether a buffer is not written to itself: autograd holds it or records the write, or it is read-only here.

    Under ``torch.no_grad()`` autograd does not record a copy, which so gives earlier entries no gradient either, as
    ``torch.cat`` does; a write in place would give it to the entries that it overwrites.
    """
    is_recorded = getattr(buffer, "requires_grad", False) or ops.needs_grad(*blocks)
    return is_saved or is_recorded or not ops.is_writable(buffer)


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
