"""Checks of an append and a crop: arrays that do not fit each other or the cache, counts out of range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, HostArray
from attnscore.base.arguments import shown
from attnscore.base.layout import is_unknown, may_equal
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, ShapeError, message


def with_heads_first(ops: Backend, x: Array, head_axis: int) -> Array:
    """Return (batch, head, length, dim)."""
    if len(x.shape) == 3:
        return ops.expand_dims(x, 1)
    return ops.swap_axes(x, 1, 2) if head_axis == -2 else x


def check_host_sizes(name: str, sizes: Sequence[Any]) -> None:
    """Raise FrameworkError for sizes that a program of PyTorch keeps open: caches in place count on the host."""
    if not all(isinstance(n, (int, np.integer)) for n in sizes):
        hint = "append outside of torch.jit.trace and torch.export, and pass them the arrays of cache.arguments(query)"
        expected = "known sizes, as a cache counts its positions on the host"
        raise FrameworkError(message(name, expected, "sizes that a program keeps open", hint=hint))


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
    (key_name, key), (name, value) = arrays.items()
    if ops.dtype(key) != ops.dtype(value):
        raise DtypeError(message(name, f"the dtype of {key_name} ({ops.dtype(key)})", ops.dtype(value)))
    if len(key.shape) != len(value.shape) or shapes[key_name][:-1] != shapes[name][:-1]:
        expected = f"the shape of {key_name}, except for the last axis"
        raise ShapeError(message(name, expected, shapes[name], shapes=shapes))


def check_like_buffer(ops: Backend, values: Array, key_dim: int, axis: int, arrays: Mapping[str, Array]) -> None:
    """Raise unless key and value, a pair, fit the buffer of values except on `axis`, which counts the positions."""
    key_name, key = next(iter(arrays.items()))
    if backends.of({"the cache": values, **arrays}).dtype(values) != ops.dtype(key):
        raise DtypeError(message(key_name, f"the dtype of the cache ({ops.dtype(values)})", ops.dtype(key)))
    backends.check_devices(ops, values, arrays, owner="the cache")
    for name, x in arrays.items():
        shape, last = tuple(x.shape), key_dim if name == key_name else values.shape[-1]
        before = (*values.shape[:axis], "n", *values.shape[axis + 1 : -1], last)
        if (*shape[:axis], "n", *shape[axis + 1 :]) != before:
            raise ShapeError(message(name, f"shape ({', '.join(map(str, before))}), as before", shape))


def lengths(name: str, lens: Any, batch: int, highest: int | None = None) -> Any:
    """Return numbers of positions, (batch,); raise unless they are whole numbers in 0..highest.

    `highest` None has no limit, and then one number may stand for all sequences. Traced numbers are returned as they
    are; only their shape is checked.
    """
    values = None if backends.host(lens) is None else _check_integers(name, lens)
    shape = tuple(lens.shape) if values is None else values.shape
    is_for_all = highest is None and (shape == () or (len(shape) == 1 and may_equal(shape[0], batch)))
    if shape != (batch,) and not is_for_all:
        raise ShapeError(message(name, f"shape ({batch},)", shape))
    if values is None:
        return lens
    expected = "whole numbers, 0 or more" if highest is None else f"whole numbers from 0 to {highest}"
    _check_range(name, values, expected, highest)
    return np.broadcast_to(values, (batch,))


def sequences(indices: Any, batch: int) -> Any:
    """Return the indices of sequences; raise unless they are whole numbers in 0..batch - 1. Traced ones pass."""
    if backends.host(indices) is None:
        return indices
    values = _check_integers("indices", indices)
    if values.ndim != 1:
        raise ShapeError(message("indices", "1 axis", values.ndim))
    _check_range("indices", values, f"sequences from 0 to {batch - 1}", batch - 1)
    return values


def _check_integers(name: str, x: Any) -> HostArray:
    """Return an array or list as whole numbers; raise ArgumentError for anything else."""
    values = backends.host(x)
    # An empty list is an array of floats, and so is any list in MXNet.
    if values is None or values.dtype.kind not in "iuf" or (values % 1).any():
        raise ArgumentError(message(name, "whole numbers", shown(x)))
    return values.astype(np.int64)


def _check_range(name: str, values: HostArray, expected: str, highest: int | None) -> None:
    for got in (values.min(), values.max()) if values.size else ():
        if got < 0 or (highest is not None and got > highest):
            raise ArgumentError(message(name, expected, got))
