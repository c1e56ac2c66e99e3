"""JAX: array operations, under jit, grad and vmap as in eager calls.

- Nothing is unrolled under ``jit``: loops over tiles are ``lax`` loops of a fixed length, so that they have a reverse
  mode. Eager calls loop in Python: a ``lax`` loop would be compiled anew at each call.
- The gradient hook is in ``gradients.py``, the inspection of tracers in ``tracers.py``.
- The native kernels read CPU arrays without a copy. Under ``jit`` and ``vmap`` the program calls them over XLA's own
  buffers (``ffi.py``), or through a host callback where the library has no such calls; ``vmap`` is then tiled.
- Scores and masks are pytrees; a user's own classes are registered at their first use.
- Without ``jax_enable_x64`` positions are 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnscore.backends import native
from attnscore.backends.base import Array, Backend, DifferentiableOp, SeedHalves, Signature, VjpFunction, importable
from attnscore.backends.jax import ffi, gradients
from attnscore.backends.jax.pytrees import register
from attnscore.backends.jax.sharding import axes_of, differing
from attnscore.backends.jax.tracers import (
    MAPPED,
    RECORDED,
    REVERSE,
    concrete,
    is_tracing,
    kind_of,
    layers_of,
    layers_of_all,
)
from attnscore.backends.numpy import detached, is_finite, name_of
from attnscore.base import thresholds
from attnscore.base.layout import Unknown, at_most, is_unknown
from attnscore.errors import ArgumentError, message

# `jnp.asarray` in a third of its time (17 us with JAX 0.10, which compiles a program for each shape either way). Both
# copy; `device_put` shares memory, and takes 45 us.
_copied = jax.jit(lambda x: x)

# Sizes of `jax.export`, for programs of any length. They have the arithmetic of integers, so that tiles and axes are
# planned with them, but no order: whether a length exceeds a tile is known when the program runs.
_Symbolic: Any = type(jax.export.symbolic_shape("n")[0])
Unknown.register(_Symbolic)


@at_most.register(_Symbolic)
def _(length: Any, limit: int) -> Any:
    return jax.core.max_dim(1, jax.core.min_dim(length, limit))


class JaxBackend(Backend):
    """Array operations of JAX."""

    name = "jax"
    has_autodiff = True
    has_programs = True
    xp = jnp
    register_pytree = staticmethod(register)
    differentiable = staticmethod(gradients.differentiable)
    stop_gradient = staticmethod(lax.stop_gradient)
    eager_scope = staticmethod(jax.ensure_compile_time_eval)
    sigmoid = staticmethod(jax.nn.sigmoid)
    erf = staticmethod(lax.erf)
    top_k: Any = staticmethod(lax.top_k)
    # JAX reads a Python number as signed, where 32 bits overflow.
    uint32: Any = staticmethod(np.uint32)

    def dtype(self, x: Array) -> str:
        return name_of(x.dtype)

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if isinstance(x, jax.Array):
            return None
        return f"a {type(x).__name__}", "x.todense()" if hasattr(x, "todense") else "jax.numpy.asarray(x)"

    def array_signature(self, x: Array) -> Hashable | None:
        return None if _is_symbolic(x) else super().array_signature(x)

    def device(self, x: Array) -> str:
        # JAX moves uncommitted arrays between devices by itself.
        if isinstance(x, jax.core.Tracer) or not getattr(x, "committed", False):
            return ""
        return ", ".join(sorted(map(str, x.devices())))

    def is_accelerated(self, x: Array) -> bool:
        # A traced or uncommitted array will be on the default device, unless the caller says otherwise.
        return super().is_accelerated(x) if self.device(x) else jax.default_backend() != "cpu"

    def astype(self, x: Array, dtype: str) -> Array:
        return x if x.dtype.name == dtype else lax.convert_element_type(x, _canonical_dtype(dtype))

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        array = x if isinstance(x, jax.Array) else jnp.asarray(importable(np.asarray(detached(x))))
        return array if dtype is None else self.astype(array, dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        if not isinstance(x, jax.Array):
            return np.asarray(detached(x))
        x = concrete(x)
        # The primal of a tracer may be a number of Python or NumPy, which is on no device.
        if x is None or (isinstance(x, jax.Array) and _cpu_of(x) is None):
            return None
        values = np.asarray(x)
        return values.astype(np.float32) if values.dtype.name == "bfloat16" else values

    def has_cpu_buffer(self, x: Array) -> bool:
        *tracers, x = layers_of(x)
        # The gradient hook is called with the primals of reverse-mode tracers, a custom call with all examples of vmap.
        if not set(map(kind_of, tracers)) <= ({REVERSE, MAPPED} if ffi.registered() else {REVERSE}):
            return False
        if kind_of(x) == RECORDED:
            return jax.default_backend() == "cpu" and not _is_symbolic(x)
        return _cpu_of(x) is not None

    def is_plain(self, *arrays: Array) -> bool:
        return None not in map(_cpu_of, map(_differentiated, arrays))

    def signature(self, arrays: Sequence[Array]) -> Signature | None:
        # While a program is traced, arrays computed from concrete ones are traced too.
        if is_tracing():
            return None
        layouts, traces = [], set()
        for array in arrays:
            if kind_of(array) == REVERSE:
                traces.add(array._trace)
            x = _differentiated(array)
            if (device := _cpu_of(x)) is None:
                return None
            view = np.asarray(x)
            layouts.append((view.shape, view.dtype, view.strides, device))
        # Gradients of different arrays around one call are nested, and a plan is differentiated once.
        return tuple(layouts) if len(traces) < 2 else None

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        array = np.asarray(_differentiated(x))
        return array.view(np.uint16) if array.itemsize == 2 else array

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        x = x.view(_canonical_dtype(dtype)) if x.itemsize == 2 else x
        array: Array = _copied(x) if x.nbytes < thresholds.SHARED_BYTES else jax.device_put(x)
        return jax.device_put(array, like.sharding) if like is not None and like.committed else array

    def needs_grad(self, *arrays: Array) -> bool:
        # Without custom calls `vmap` counts too: it maps attention in JAX's operations.
        kinds = {kind_of(x) for x in layers_of_all(arrays) if isinstance(x, jax.core.Tracer)}
        return not kinds <= ({RECORDED, MAPPED} if ffi.registered() else {RECORDED})

    def needs_host_callback(self, *arrays: Array) -> bool:
        return any(isinstance(x, jax.core.Tracer) for x in arrays) and not self.needs_grad(*arrays)

    def fuses(self, *arrays: Array) -> bool:
        kinds = {kind_of(x) for x in layers_of_all(arrays) if isinstance(x, jax.core.Tracer)}
        return RECORDED in kinds and kinds <= {RECORDED, MAPPED, REVERSE}

    def custom_calls(self) -> bool:
        return ffi.registered()

    def custom_call(
        self,
        direction: str,
        results: Sequence[tuple[tuple[int, ...], str]],
        arrays: Sequence[Array],
        attributes: Mapping[str, Any],
    ) -> tuple[Array, ...]:
        """Trace the module's call "forward" or "backward" (csrc/api/ffi.cc), of results of these shapes and dtypes."""
        types = [(shape, _canonical_dtype(dtype)) for shape, dtype in results]
        outputs, axes = ffi.call(direction, types, arrays, attributes), axes_of(arrays)
        return tuple(differing(x, axes) for x in outputs)

    def host_callback(
        self,
        function: Callable[..., Sequence[np.ndarray[Any, Any]]],
        results: Sequence[tuple[tuple[int, ...], str]],
        arrays: Sequence[Array],
        otherwise: Callable[..., tuple[Array, ...]],
    ) -> tuple[Array, ...]:
        # `otherwise` is not used: `platforms.call` has the program for other platforms and for derivatives.
        from jax.experimental.buffer_callback import buffer_callback

        def call(_: Any, out: Any, *buffers: Any) -> None:
            for to, x in zip(out, function(*map(np.asarray, buffers)), strict=True):
                np.asarray(to)[...] = x

        types = tuple(jax.ShapeDtypeStruct(shape, _canonical_dtype(dtype)) for shape, dtype in results)  # type: ignore[no-untyped-call]  # JAX's own
        outputs, axes = buffer_callback(call, types, vmap_method="sequential")(*arrays), axes_of(arrays)
        return tuple(differing(x, axes) for x in outputs)

    def number(self, x: Array) -> float | None:
        value = concrete(x)
        return None if value is None else float(value)

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        return differing(jnp.full(shape, value, _canonical_dtype(dtype) if dtype else like.dtype), axes_of((like,)))

    def positions(self, start: int, count: int, like: Array) -> Array:
        return jnp.arange(count, dtype=_canonical_dtype("int64")) + start

    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        # x[..., start:...] would be compiled for every start. Starts are never negative: testing for that took a fifth
        # of a small program.
        return lax.dynamic_slice_in_dim(x, start, count, axis % x.ndim, allow_negative_indices=False)

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        axis %= x.ndim
        block = self.slice_axis(x, axis, start, block.shape[axis]) + block
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), start, axis, allow_negative_indices=False)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        # The indices are in range; the default mode would test each.
        return jnp.take(x, indices, axis=axis, mode="clip")

    def max(self, x: Array, axis: int, keepdims: bool = False) -> Array:
        # A symbolic axis may be empty.
        return jnp.max(x, axis=axis, keepdims=keepdims, initial=-jnp.inf if _is_symbolic(x) else None)

    def low_32_bits(self, x: Array) -> Array:
        return x.astype(jnp.uint32)

    def numeric_scope(self) -> AbstractContextManager[Any]:
        # Masks, for example, compare positions with ends of more axes. A user may have made rank promotion an error.
        scope: AbstractContextManager[Any] = jax.numpy_rank_promotion("allow")
        return scope

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        if not isinstance(condition, jax.Array):
            return function(carry) if condition else carry
        return lax.cond(condition, lambda c: _in_dtypes_of(carry, function(c)), lambda c: c, carry)

    def compiles_each_shape(self) -> bool:
        return True

    def loop(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        if is_unknown(count) or (count > 1 and is_tracing()):
            return lax.fori_loop(0, count, lambda i, c: _in_dtypes_of(carry, body(i, c)), carry)
        return super().loop(count, body, carry)

    def map_tiles(self, count: int, body: Callable[[Any], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        if count > 1 and is_tracing():
            stacked = lax.map(body, jnp.arange(count))
            return [tuple(x[i] for x in stacked) for i in range(count)]
        return super().map_tiles(count, body)

    def plain_product(self, x: Array, matrix: Array, threads: int) -> Array | None:
        if native.module is not None and not any(isinstance(array, jax.core.Tracer) for array in (x, matrix)):
            rows, out = self.memory(x), np.empty((*x.shape[:-1], matrix.shape[1]), x.dtype)
            if native.module.multiply_rows(rows, self.memory(matrix), out, threads):
                # Left in NumPy's array, whose memory the planned call reads: an array of JAX takes 15 to 40 us.
                return out
        return super().plain_product(x, matrix, threads)

    def known_finite(self, x: Array) -> bool:
        x = concrete(x)
        if x is None:
            return False
        return is_finite(np.asarray(x)) if _cpu_of(x) is not None else bool(jnp.isfinite(x).all())

    def record(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        # A projection without a gradient is a NumPy array (`plain_product`), which JAX would pass on as another type.
        arrays = [x if isinstance(x, jax.Array) else self.from_memory(x, str(x.dtype), None) for x in operands]
        # The op of a plan holds no traced arrays, and so has no constants.
        return gradients.with_own_vjp(run, arrays, (), lambda _: run)

    def vjp(self, function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, VjpFunction]:
        return jax.vjp(function, *inputs)

    def product_of_rows(self, x: Array, matrix: Array, bias: Array | None = None) -> Array | None:
        arrays = (x, matrix) if bias is None else (x, matrix, bias)
        if self.fuses(x):
            return gradients.product_of_rows(*arrays)
        return gradients.compiled_product_of_rows(*arrays) if _is_on_one_device(*arrays) else None

    def as_seed(self, seed: Any) -> Any:
        if not isinstance(seed, jax.Array):
            return seed
        if (jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0) or (
            seed.dtype == jnp.uint32 and seed.shape == (2,)
        ):
            low, high = jax.random.bits(seed, (2,), jnp.uint32)
        elif jnp.issubdtype(seed.dtype, jnp.integer) and seed.ndim == 0:
            value = concrete(seed)
            if value is not None:
                return int(value)
            # As Python's `seed % 2**63`: above the low 32 bits stand the high bits of 64, or copies of the sign.
            low = seed.astype(jnp.uint32)
            high = (seed >> 32 if seed.dtype.itemsize == 8 else -(seed < 0).astype(jnp.int32)).astype(jnp.uint32)
        else:
            hint = "jax.random.split gives several keys, one for each call" if seed.ndim else None
            got = f"{seed.dtype} of shape {seed.shape}"
            raise ArgumentError(message("seed", "a whole number or one jax.random key", got, hint=hint))
        high = high & 0x7FFFFFFF
        numbers = concrete(low), concrete(high)
        return SeedHalves(low, high) if None in numbers else int(low) | int(high) << 32

    def draw_seed(self, like: Array) -> int:
        hint = "JAX has no generator of its own: seed=jax.random.key(0), split for each call"
        expected = "a whole number or a jax.random key where dropout is above 0"
        raise ArgumentError(message("seed", expected, "None", hint=hint))


def _is_symbolic(x: Array) -> bool:
    """Whether the size of some axis is symbolic."""
    return any(map(is_unknown, x.shape))


def _differentiated(x: Any) -> Any:
    """Return the array that a reverse-mode tracer wraps, and any other array as it is."""
    return x.primal if kind_of(x) == REVERSE else x


def _cpu_of(x: Any) -> Any:
    """Return the device of a concrete array on one CPU, None for any other array."""
    # The dtype of a random key is none of NumPy's.
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not isinstance(x.dtype, np.dtype):
        return None
    devices = x.devices()
    if len(devices) != 1:
        return None
    (device,) = devices
    return device if device.platform == "cpu" else None


def _is_on_one_device(*arrays: Any) -> bool:
    """Whether no array is traced, and none is on several devices; tracers of autodiff and of vmap are no traces."""
    values = [layers_of(x)[-1] for x in arrays]
    return not any(
        isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and len(x.devices()) > 1) for x in values
    )


def _canonical_dtype(dtype: str) -> Any:
    """Return a dtype by name: without jax_enable_x64 int64 is int32."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def _in_dtypes_of(carry: Any, updated: Any) -> Any:
    """Cast to the dtypes of `carry`, which a traced loop must keep."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), updated, carry)
