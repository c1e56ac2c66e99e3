"""JAX's tracers: their kinds, and the values that they wrap.

- Tracers nest: vmap of grad wraps one array in two.
- A concrete array is found through every reverse-mode tracer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state

# Kinds of tracers, by class name: the classes are private to JAX, which may move them.
RECORDED, REVERSE, FORWARD, MAPPED = "DynamicJaxprTracer", "LinearizeTracer", "JVPTracer", "BatchTracer"
SHARDED = "ShardMapTracer"  # eager `shard_map`
# The attribute that holds the wrapped value.
_WRAPPED = {REVERSE: "primal", FORWARD: "primal", MAPPED: "val"}


def kind_of(x: Any) -> str:
    """Return the class name, which is the kind of a tracer."""
    return type(x).__name__


def layers_of(x: Any) -> list[Any]:
    """Return the tracers around an array, the outermost first, and last the value that they wrap."""
    layers = [x]
    while (name := _WRAPPED.get(kind_of(layers[-1]))) is not None:
        layers.append(getattr(layers[-1], name))
    return layers


def layers_of_all(arrays: Sequence[Any]) -> list[Any]:
    """Return the layers of all arrays in one list."""
    return [layer for x in arrays for layer in layers_of(x)]


def concrete(x: Any) -> Any:
    """Return the concrete array that `x` is or wraps; None if it is traced."""
    if any(kind_of(layer) == RECORDED for layer in layers_of(x)):
        return None  # an operation on it, though without a use, would be part of the program
    if isinstance(x, jax.core.Tracer):
        x = lax.stop_gradient(x)
    return None if isinstance(x, jax.core.Tracer) else x


def is_tracing() -> bool:
    """Whether operations are staged into a program now: inside jit, not merely inside grad or vmap."""
    # Comparing states takes 1 us, an operation 20.
    return trace_state() != _OUTSIDE and isinstance(jnp.zeros(()), jax.core.Tracer)


def trace_state() -> Any:
    """Return a value that differs between programs, and between them and the outside."""
    return get_opaque_trace_state(convention="nnx")  # type: ignore[no-untyped-call]  # untyped in JAX


# The state where no transformation runs; None where this module is first imported inside of a program.
_OUTSIDE = None if isinstance(jnp.zeros(()), jax.core.Tracer) else trace_state()
