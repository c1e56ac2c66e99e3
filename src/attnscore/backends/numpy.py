"""NumPy: array operations without autodiff (``attend_vjp`` gives the explicit VJP).

Takes every NumPy float dtype, ``ml_dtypes.bfloat16`` and long double included.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np

from attnscore.backends import native
from attnscore.backends.base import Array, Backend, DifferentiableOp, HostArray, Signature

_erf = np.vectorize(math.erf, otypes=[np.float64])


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, which NumPy composes anew each time: 1 to 4 us, and a call asks for a dozen."""
    return str(dtype.name)


def is_finite(x: HostArray) -> bool:
    """Return whether every entry is finite."""
    # None where the module does not read the dtype, or the array is not in C order.
    is_finite: bool | None = native.module.is_all_finite(x) if native.module is not None else None
    return bool(np.isfinite(x).all()) if is_finite is None else is_finite


class NumpyBackend(Backend):
    """Array operations of NumPy."""

    name = "numpy"
    has_autodiff = False
    xp = np
    wants_aligned = False
    can_unpad = True
    in_c_order: Any = staticmethod(np.ascontiguousarray)
    known_finite = staticmethod(is_finite)
    number: Any = staticmethod(float)

    def dtype(self, x: Array) -> str:
        return name_of(x.dtype)

    def is_floating(self, x: Array) -> bool:
        # ml_dtypes registers bfloat16 with kind "V", and an 8-bit dtype with kind "f".
        return bool((x.dtype.kind == "f" and x.dtype.itemsize > 1) or name_of(x.dtype) == "bfloat16")

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if isinstance(x, np.matrix):
            return "a matrix", "numpy.asarray(x)"
        return ("a masked array", "x.filled()") if isinstance(x, np.ma.MaskedArray) else None

    def device(self, x: Array) -> str:
        return "cpu"

    def astype(self, x: Array, dtype: str) -> Array:
        return x if name_of(x.dtype) == dtype else x.astype(dtype)

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        array = np.asarray(detached(x))
        return array if dtype is None else self.astype(array, dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        array = np.asarray(detached(x))
        return array.astype(np.float32) if name_of(array.dtype) == "bfloat16" else array

    def copy(self, x: Array) -> Array:
        # An axis that is broadcast (stride 0) stays so, without memory for its copies.
        once = x[tuple(slice(None) if stride else slice(0, 1) for stride in x.strides)]
        return np.broadcast_to(once.copy(), x.shape)

    def has_cpu_buffer(self, x: Array) -> bool:
        # Fields of structured arrays may be misaligned.
        return bool(x.dtype.isnative and x.flags.aligned)

    def is_plain(self, *arrays: Array) -> bool:
        return all(type(x) is np.ndarray and self.has_cpu_buffer(x) for x in arrays)

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        array = np.asarray(x)
        return array.view(np.uint16) if array.dtype.itemsize == 2 else array

    def signature(self, arrays: Sequence[Array]) -> Signature | None:
        layouts: Signature | None = native.module.signature(arrays) if native.module is not None else None
        # The module reads no bfloat16 of ml_dtypes.
        if layouts is None and self.is_plain(*arrays):
            layouts = tuple((x.shape, x.dtype, x.strides) for x in arrays)
        return layouts

    def decoding_signature(self, arrays: Sequence[Array], head_axis: int) -> bytes | None:
        module = native.module
        signature: bytes | None = None if module is None else module.decoding_signature(arrays, head_axis)
        return signature

    def buffers(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return arrays

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        return x.view(like.dtype) if x.itemsize == 2 else x

    def needs_grad(self, *arrays: Array) -> bool:
        return False

    def zeros(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Array:
        return np.zeros(shape, dtype or like.dtype)

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        return np.full(shape, value, dtype or like.dtype)

    def positions(self, start: int, count: int, like: Array) -> Array:
        return np.arange(start, start + count, dtype=np.int64)

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        view = self.slice_axis(x, axis, start, block.shape[axis])
        view += block
        return x

    def indices_before(self, lens: Array, length: int) -> Array:
        """Return the flat indices into (n, length) of the first ``lens[i]`` entries of each row i."""
        return np.flatnonzero(np.arange(length) < lens[:, None])

    def put_rows(self, rows: Array, indices: Array, count: int) -> Array:
        """Return (count, width) with `rows` at `indices`, each of which occurs once, and zeros elsewhere."""
        placed = np.zeros((count, rows.shape[1]), rows.dtype)
        placed[indices] = rows
        return placed

    def matmul(self, a: Array, b: Array) -> Array:
        if b.ndim != 2 or not a.size:
            return np.matmul(a, b)
        # One product, where np.matmul makes one for each element of the batch. With no entries, -1 may be undetermined.
        return np.dot(a.reshape(-1, a.shape[-1]), b).reshape(a.shape[:-1] + b.shape[1:])

    def sigmoid(self, x: Array) -> Array:
        # exp of negative numbers alone does not overflow.
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1 / (1 + e), e / (1 + e))

    def erf(self, x: Array) -> Array:
        return _erf(x).astype(x.dtype) if x.size else x

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array:
        # A bare Python number must not widen float32 (NumPy < 2 promotes np.where on two scalars to float64).
        other = a if hasattr(a, "dtype") else b
        if hasattr(other, "dtype"):
            a, b = (x if hasattr(x, "dtype") else other.dtype.type(x) for x in (a, b))
        return np.where(condition, a, b)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        # Of groups of 64 entries, the k groups with the largest maxima hold the k largest entries. A tenth of the time
        # for long rows; at least 4 k groups leave a quarter of the entries or less. fmax skips NaN.
        groups = x.shape[-1] // 64
        if groups >= 4 * k:
            by_group = x[..., : 64 * groups].reshape(*x.shape[:-1], 64, groups)
            best_groups = np.argpartition(-np.fmax.reduce(by_group, axis=-2), k - 1, axis=-1)[..., :k]
            candidates = (best_groups[..., None, :] + groups * np.arange(64)[:, None]).reshape(*x.shape[:-1], -1)
            ungrouped = np.broadcast_to(np.arange(64 * groups, x.shape[-1]), (*x.shape[:-1], x.shape[-1] % 64))
            candidates = np.concatenate([candidates, ungrouped], axis=-1)
            values, index = self.top_k(np.take_along_axis(x, candidates, -1), k)
            return values, np.take_along_axis(candidates, index, -1)
        index = np.argpartition(-x, k - 1, axis=-1)[..., :k] if k < x.shape[-1] else np.argsort(-x, axis=-1)
        values = np.take_along_axis(x, index, -1)
        order = np.argsort(-values, axis=-1, kind="stable")
        return np.take_along_axis(values, order, -1), np.take_along_axis(index, order, -1)

    def numeric_scope(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def plain_product(self, x: Array, matrix: Array, threads: int) -> Array | None:
        if native.module is not None:
            out = np.empty((*x.shape[:-1], matrix.shape[1]), x.dtype)
            if native.module.multiply_rows(x, matrix, out, threads):
                return out
        with self.numeric_scope():
            return super().plain_product(x, matrix, threads)

    def differentiable(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        return run.forward(operands)

    def stop_gradient(self, x: Array) -> Array:
        return x

    def draw_seed(self, like: Array) -> int:
        return secrets.randbits(62)


def detached(x: Any) -> Any:
    """Return an array that NumPy can read: it reads no tensor on a device, with a gradient, or of torch's bfloat16."""
    if hasattr(x, "asnumpy"):  # MXNet
        return x.asnumpy()
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return x.float() if str(x.dtype) == "torch.bfloat16" else x
    return x
