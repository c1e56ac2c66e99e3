"""MXNet (1.9.1): array operations on ``mx.np`` arrays, eager.

- Arrays on the CPU are read without a copy, and the result of native code becomes an array without a copy.
- The gradient hook is in ``gradients.py``.
- Shapes have NumPy's meaning (0 and () are shapes) inside a call, whatever ``npx.set_np`` says outside.
- MXNet's operators broadcast five axes; operations on more axes are split.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, npx
from mxnet.base import _LIB, check_call

from attnscore.backends.base import Array, Backend, Modules, importable
from attnscore.backends.mxnet import gradients
from attnscore.backends.numpy import detached

# MXNet's dtypes; other integers become int64.
_DTYPES = ("float16", "float32", "float64", "bool", "uint8", "int8", "int32", "int64")
_CPU = ("cpu", "cpu_pinned", "cpu_shared")
# The most axes that MXNet's operators broadcast, slice and sum.
_MAX_AXES = 5


class MxnetBackend(Backend):
    """Array operations of MXNet."""

    name = "mxnet"
    has_autodiff = True
    xp = Modules(mx.np, npx)
    differentiable = staticmethod(gradients.differentiable)
    vjp = staticmethod(gradients.vjp)
    stop_gradient = staticmethod(mx.np.ndarray.detach)
    copy = staticmethod(mx.np.ndarray.copy)

    def dtype(self, x: Array) -> str:
        return str(np.dtype(x.dtype).name)

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if isinstance(x, mx.np.ndarray):
            return None
        if isinstance(x, mx.gluon.Parameter):
            return "a gluon Parameter", "x.data()"
        if getattr(x, "stype", "default") != "default":
            return f"a sparse array ({x.stype})", "x.tostype('default').as_np_ndarray()"
        return f"a legacy {type(x).__module__.partition('.')[0]}.nd.{type(x).__name__}", "x.as_np_ndarray()"

    def device(self, x: Array) -> str:
        device = x.ctx
        return "cpu" if device.device_type in _CPU and device.device_id == 0 else str(device)

    def astype(self, x: Array, dtype: str) -> Array:
        return x if self.dtype(x) == dtype else x.astype(dtype)

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        if isinstance(x, mx.nd.NDArray):
            x = x.as_np_ndarray().as_in_ctx(like.ctx)
            return x if dtype is None else self.astype(x, dtype)
        host = importable(np.asarray(detached(x)))
        kind = dtype or host.dtype.name
        return mx.np.array(host, dtype=kind if kind in _DTYPES else "int64", ctx=like.ctx)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        if not isinstance(x, mx.nd.NDArray):
            return np.asarray(detached(x))
        return np.asarray(x.asnumpy()) if x.ctx.device_type in _CPU else None

    def has_cpu_buffer(self, x: Array) -> bool:
        return bool(x.ctx.device_type in _CPU)

    def is_plain(self, *arrays: Array) -> bool:
        return all(type(x) is mx.np.ndarray and self.has_cpu_buffer(x) for x in arrays)

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        dtype = np.dtype(x.dtype)
        dtype = np.dtype(np.uint16) if dtype == np.float16 else dtype
        if 0 in x.shape:  # MXNet has no address for it
            return np.zeros(x.shape, dtype)
        x.wait_to_read()
        address = ctypes.c_void_p()
        check_call(_LIB.MXNDArrayGetData(x.handle, ctypes.byref(address)))
        buffer: Any = (ctypes.c_char * (math.prod(x.shape) * dtype.itemsize)).from_address(address.value or 0)
        buffer.array = x  # which owns the memory
        return np.frombuffer(buffer, dtype).reshape(x.shape)

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        x = x.view(dtype) if dtype == "float16" else x
        if not x.flags.c_contiguous or not x.flags.writeable:
            # MXNet may write to the memory.
            x = np.array(x, order="C")
        return mx.nd.from_numpy(x).as_np_ndarray()

    def needs_grad(self, *arrays: Array) -> bool:
        # MXNet has no such query for one array.
        return bool(autograd.is_recording())

    def is_recorded(self, function: Callable[[], Array]) -> bool:
        if not autograd.is_recording():
            return False
        if not isinstance(result := function(), mx.np.ndarray):
            return False  # an error of the caller, which is named where scores are computed
        try:
            autograd.get_symbol(result)
        except mx.MXNetError:
            return False
        return True

    def number(self, x: Array) -> float | None:
        return float(x.asnumpy())

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        return mx.np.full(tuple(shape), value, dtype=dtype or like.dtype, ctx=like.ctx)

    def positions(self, start: int, count: int, like: Array) -> Array:
        return mx.np.arange(start, start + count, dtype="int64", ctx=like.ctx)

    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        if len(x.shape) <= _MAX_AXES:
            return super().slice_axis(x, axis, start, count)
        shape, (before, length, after) = list(x.shape), _around(x.shape, axis)
        shape[axis] = count
        return x.reshape((before, length, after))[:, start : start + count].reshape(tuple(shape))

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        if self.needs_grad():
            # autograd does not allow writes in place.
            return super().add_at(x, axis, start, block)
        if x.size and block.size:
            (before, length, rest), count = _around(x.shape, axis), block.shape[axis]
            # The reshape of a legacy array is a view, and of mx.np a copy.
            flat = x.as_nd_ndarray().reshape((before, length, rest)).as_np_ndarray()
            flat[:, start : start + count] += block.reshape((before, count, rest))
        return x

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        shape = tuple(shape)
        if len(shape) <= _MAX_AXES:
            return mx.np.broadcast_to(x, shape)
        # One axis at a time: MXNet counts the neighbouring axes that stay as one.
        x = x.reshape((1,) * (len(shape) - len(x.shape)) + x.shape)
        for axis, length in enumerate(shape):
            if x.shape[axis] != length:
                x = mx.np.broadcast_to(x, (*x.shape[:axis], length, *x.shape[axis + 1 :]))
        return x

    def swap_axes(self, x: Array, first: int, second: int) -> Array:
        if self.dtype(x) == "bool":  # which MXNet's swapaxes refuses
            return self.swap_axes(x.astype("uint8"), first, second).astype("bool")
        return mx.np.swapaxes(x, first, second)

    def matmul(self, a: Array, b: Array) -> Array:
        first, second = a.shape[:-2], b.shape[:-2]
        # Gradients of a product that broadcasts are wrong for all but its first axis (1.9.1); only up to five axes
        # broadcast.
        if first != second and (autograd.is_recording() or max(len(first), len(second)) > _MAX_AXES - 2):
            lead = np.broadcast_shapes(first, second)
            a, b = (self.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
        return mx.np.matmul(a, b)

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array:
        like = next((x for x in (a, b) if hasattr(x, "shape")), None)
        if like is None:
            return mx.np.where(condition, a, b)
        # With a number on one side, where() gives the array on the other side the gradient of the number (1.9.1).
        # () is unknown where `numeric_scope` is not entered.
        number_shape = (1,) if like.shape else ()
        arrays = [condition, *(x if hasattr(x, "shape") else self.full(number_shape, x, like) for x in (a, b))]
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        if 0 in shape:
            # where() of empty arrays that broadcast ends the process.
            return self.zeros(shape, like)
        if len(shape) > _MAX_AXES:
            return mx.np.where(*(self.broadcast_to(x, shape).reshape((-1,)) for x in arrays)).reshape(shape)
        return mx.np.where(*arrays)

    def logical_and(self, a: Array, b: Array) -> Array:
        # & and | of boolean arrays are for one shape.
        return a * b

    def logical_or(self, a: Array, b: Array) -> Array:
        return a + b

    def sum(self, x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
        if 0 in x.shape:
            # MXNet's sum of an empty array over several axes fails. NumPy's tells the shape.
            empty: Any = np.empty(x.shape)
            return self.zeros(empty.sum(axis=axis, keepdims=keepdims).shape, x)
        if isinstance(axis, tuple) and len(x.shape) > _MAX_AXES:
            # MXNet's sum counts neighbouring axes as one, but no more than five after that: sum one axis at a time.
            for i in sorted((i % len(x.shape) for i in axis), reverse=True):
                x = mx.np.sum(x, axis=i, keepdims=keepdims)
            return x
        return mx.np.sum(x, axis=axis, keepdims=keepdims)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        values, index = npx.topk(x, k=k, axis=-1, ret_typ="both", dtype="int64")
        return values, index

    def searchsorted(self, ordered: Array, values: Array) -> Array:
        # MXNet's is NumPy's, which it does not call while autograd records.
        counts = np.searchsorted(ordered.asnumpy(), values.asnumpy(), side="right")
        return self.asarray(counts, values, "int64")

    def shift_right(self, x: Array, bits: int) -> Array:
        # MXNet has neither >> nor //. A position has fewer than 53 bits, so this is exact.
        return mx.np.floor(x.astype("float64") / (1 << bits)).astype("int64")

    def numeric_scope(self) -> AbstractContextManager[Any]:
        # Otherwise a size of 0 would mean "unknown".
        scope: AbstractContextManager[Any] = mx.util.np_shape(True)
        return scope

    def known_finite(self, x: Array) -> bool:
        return bool(mx.np.isfinite(x).asnumpy().all())

    def draw_seed(self, like: Array) -> int:
        # Two numbers of 31 bits.
        low, high = (int(x) for x in mx.np.random.randint(0, 2**31 - 1, size=(2,), dtype="int64").asnumpy())
        return low | high << 31


def _around(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """Return the product of the sizes before an axis, its size, and the product of the sizes after it."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
