"""The native kernels as custom calls of XLA: programs call them over XLA's own buffers, without Python.

- The native library has these calls if jaxlib, whose headers they need, was installed when it was built. Where they are
  missing, or this jaxlib does not take them, callers use a host callback instead.
- ``vmap`` puts its axis in front of every array, of size 1 where an array is not mapped: one call computes all
  examples, and the threads are shared between them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from attnscore.backends.base import Array
from attnscore.core.threads import follow

_DIRECTIONS = ("forward", "backward")


@functools.cache
def registered() -> bool:
    """Whether the native library has calls that this jaxlib takes; register them."""
    spec = importlib.util.find_spec("attnscore._native")
    if spec is None or spec.origin is None:
        return False
    try:
        found = ctypes.CDLL(spec.origin)
        calls = [getattr(found, f"attnscore_xla_{direction}") for direction in _DIRECTIONS]
        set_threads = found.attnscore_xla_threads
    except (OSError, AttributeError):
        return False
    try:
        for direction, call in zip(_DIRECTIONS, calls, strict=True):
            capsule = jax.ffi.pycapsule(call)  # type: ignore[no-untyped-call]  # JAX's own
            jax.ffi.register_ffi_target(f"attnscore_{direction}", capsule, platform="cpu")
    except Exception:  # jaxlib documents no exception for a library that was built for another version
        return False
    follow(set_threads)
    return True


def call(
    direction: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    arrays: Sequence[Array],
    attributes: Mapping[str, Any],
) -> tuple[Array, ...]:
    """Trace the custom call of one direction, with results of these shapes and dtypes."""
    wanted = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)  # type: ignore[no-untyped-call]  # JAX's own
    found = jax.ffi.ffi_call(f"attnscore_{direction}", wanted, vmap_method="expand_dims")
    return tuple(found(*arrays, **{name: _attribute(value) for name, value in attributes.items()}))


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return np.asarray(value, np.float64)
    return value if isinstance(value, str) else np.float64(value) if isinstance(value, float) else np.int64(value)
