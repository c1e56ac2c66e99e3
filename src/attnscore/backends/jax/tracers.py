"""What stands for a JAX array while a function is traced: its kind, and what is behind it.

- One array may be behind several: vmap of grad gives one behind two.
- What has numbers is found where there is one, through every tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Kinds of tracers, by their names: the classes are JAX's own, which it may move. What is behind one of them, if any,
# is under the name beside it.
RECORDED, REVERSE, FORWARD, MAPPED = "DynamicJaxprTracer", "LinearizeTracer", "JVPTracer", "BatchTracer"
_BEHIND = {REVERSE: "primal", FORWARD: "primal", MAPPED: "val"}


def kind_of(x: Any) -> str:
    """The name of its class, which is all that is known of the kind of a tracer."""
    return type(x).__name__


def layers_of(x: Any) -> list[Any]:
    """The tracers around an array from outside to inside, and in the end what is behind them all."""
    found = [x]
    while (name := _BEHIND.get(kind_of(found[-1]))) is not None:
        found.append(getattr(found[-1], name))
    return found


def layers_of_all(arrays: Sequence[Any]) -> list[Any]:
    """The layers of each, in one list."""
    return [layer for x in arrays for layer in layers_of(x)]


def concrete(x: Any) -> Any:
    """The array behind a tape, or None where it has no numbers yet."""
    if isinstance(x, jax.core.Tracer):
        x = lax.stop_gradient(x)
    return None if isinstance(x, jax.core.Tracer) else x


def is_tracing() -> bool:
    """Whether what is computed now is recorded for later: inside jit, and not merely inside grad or vmap."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)
