"""The native kernels as custom calls of XLA: programs call them over XLA's own buffers, without Python.

- The native library has the calls where it was built beside jaxlib, whose headers they need. Where they are missing, or
  another jaxlib does not take them, callers go through Python instead.
- ``vmap`` puts its axis in front of every array, of length 1 where an array is not mapped: one call does for all
  examples, which share the threads.
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
    """Whether the native library is here, with calls that XLA takes."""
    spec = importlib.util.find_spec("attnscore._native")
    if spec is None or spec.origin is None:
        return False
    try:
        found = ctypes.CDLL(spec.origin)
        calls = [getattr(found, f"attnscore_xla_{direction}") for direction in _DIRECTIONS]
        tell = found.attnscore_xla_threads
    except (OSError, AttributeError):
        return False
    try:
        for direction, call in zip(_DIRECTIONS, calls, strict=True):
            capsule = jax.ffi.pycapsule(call)  # type: ignore[no-untyped-call]  # JAX's own
            jax.ffi.register_ffi_target(f"attnscore_{direction}", capsule, platform="cpu")
    except Exception:  # whatever this jaxlib says of a library that was built for another one
        return False
    follow(tell)
    return True


def call(
    direction: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    arrays: Sequence[Array],
    attributes: Mapping[str, Any],
) -> tuple[Array, ...]:
    """One custom call."""
    wanted = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)  # type: ignore[no-untyped-call]  # JAX's own
    found = jax.ffi.ffi_call(f"attnscore_{direction}", wanted, vmap_method="expand_dims")
    return tuple(found(*arrays, **{name: _attribute(value) for name, value in attributes.items()}))


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return np.asarray(value, np.float64)
    return value if isinstance(value, str) else np.float64(value) if isinstance(value, float) else np.int64(value)
