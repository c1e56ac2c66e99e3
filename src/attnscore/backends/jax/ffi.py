"""The native kernels as custom calls of XLA: programs call them over XLA's own buffers, without Python.

- The native library has these calls if jaxlib, whose headers they need, was installed when it was built. Where they are
  missing, or this jaxlib does not take them, callers use a host callback instead.
- Arrays are passed without their axes of length 1, and with their shapes as an attribute: XLA copies an array to insert
  such an axis.
- ``vmap`` puts its axis in front of every array, of size 1 where an array is not mapped: one call computes all
  examples, and the threads are shared between them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnscore.backends.base import Array
from attnscore.base.threads import follow

_DIRECTIONS = ("forward", "backward")


@functools.cache
def registered() -> bool:
    """Whether the native library has calls that this jaxlib takes; register them."""
    spec = importlib.util.find_spec("attnscore._native")
    if spec is None or spec.origin is None:
        return False
    try:
        library = ctypes.CDLL(spec.origin)
        calls = [getattr(library, f"attnscore_xla_{direction}") for direction in _DIRECTIONS]
        set_threads = library.attnscore_xla_threads
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
    shapes = [*(tuple(x.shape) for x in arrays), *(shape for shape, _ in results)]
    passed = {name: _attribute(value) for name, value in attributes.items()}
    # Each shape as its number of axes and its sizes.
    passed["shapes"] = np.asarray([*itertools.chain.from_iterable((len(shape), *shape) for shape in shapes)], np.int64)
    dtypes = [str(x.dtype) for x in arrays], [str(dtype) for _, dtype in results]
    passed["digest"] = _digest(direction, dtypes, {name: x for name, x in passed.items() if name != "seed"})
    types = [jax.ShapeDtypeStruct(_without_ones(shape), dtype) for shape, dtype in results]  # type: ignore[no-untyped-call]  # JAX's own
    run = jax.ffi.ffi_call(f"attnscore_{direction}", tuple(types), vmap_method="expand_dims")
    outputs = run(*(jnp.reshape(x, _without_ones(x.shape)) for x in arrays), **passed)
    return tuple(jnp.reshape(x, shape) for x, (shape, _) in zip(outputs, results, strict=True))


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _digest(direction: str, dtypes: Any, attributes: Mapping[str, Any]) -> np.int64:
    """Return 64 bits by which the library finds the plan of a call: calls with equal bits differ in seeds alone."""
    values = sorted((name, np.asarray(value).tolist()) for name, value in attributes.items())
    text = repr((direction, dtypes, values)).encode()
    return np.int64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True))


def _attribute(value: Any) -> Any:
    """Return a value as ``ffi.cc`` reads it: text, float64 or int64 (also for bool), tuples as float64."""
    if isinstance(value, tuple):
        return np.asarray(value, np.float64)
    return value if isinstance(value, str) else np.float64(value) if isinstance(value, float) else np.int64(value)
