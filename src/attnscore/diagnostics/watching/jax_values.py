"""Values that a program of JAX sends to the host while it runs, for a watch.

Requirements:
- a program sends queries and keys by ``jax.pure_callback``, which every transformation of JAX knows; under ``vmap`` it
  gets the whole batch at once;
- the model's results keep their bits: the order of the calls follows from data that a selection passes on unchanged;
- nothing is sent in a step that is not sampled: a condition in the program leaves the calls out;
- the watches that run are part of the key of JAX's caches: programs are traced anew for them, and those from before are
  back when the watch stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnscore.backends.jax.tracers import trace_state
from attnscore.diagnostics.watching.staged import HERE, NOT_SAMPLED, Values

# A number that no call returns, which a program cannot know.
_IMPOSSIBLE = np.iinfo(np.int32).min
_NUMBER: Any = jax.ShapeDtypeStruct((), np.int32)  # type: ignore[no-untyped-call]  # JAX's own
_CONTEXT: Any = jax.make_user_context(None)  # type: ignore[no-untyped-call]  # untyped in JAX

# The state of tracing where no transformation runs.
_OUTSIDE = trace_state()


class JaxValues(Values):
    """Arrays of JAX, and of programs of JAX."""

    def state(self, leaves: Iterable[Any]) -> Any:
        state = trace_state()
        return None if state == _OUTSIDE and not any(map(self.is_abstract, leaves)) else state

    def is_abstract(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def wait(self) -> None:
        """Wait until the programs that have been started are done, as far as JAX can tell."""
        with contextlib.suppress(Exception):  # an error of a program is raised where its result is used
            jax.effects_barrier()  # type: ignore[no-untyped-call]  # JAX's own
            # A device runs its programs one after the other.
            for device in jax.local_devices():
                _next(jax.device_put(0, device)).block_until_ready()

    def watched(self, keys: tuple[Hashable, ...]) -> None:
        # A thread that did not enter the context cannot leave it; it is left with its next watch.
        HERE.entered.close()
        if keys:
            HERE.entered.enter_context(_CONTEXT(keys))

    def reason_against(self, key: Hashable) -> str | None:
        """Return why a program of this thread must not report: others without the watch may use it."""
        if key in (_CONTEXT.value or ()):
            return None
        return "a program of another thread than the one that started the watch"

    def probe(self, tree: Any) -> Any:
        for x in jax.tree.leaves(tree):
            if _has_numbers(x):
                return x[(0,) * x.ndim]
        return jnp.int32(0)

    def following(self, tree: Any, number: Any) -> Any:
        """Return arrays unchanged, but computed after `number`; objects of NNX, which have a state, are passed on."""

        def has_state(x: Any) -> bool:
            return any(c.__module__.startswith("flax.nnx") for c in type(x).__mro__)

        def selected(x: Any) -> Any:
            # No compiler knows that `number` is never the impossible one.
            return jnp.where(number == _IMPOSSIBLE, jnp.zeros_like(x), x) if _has_numbers(x) else x

        return jax.tree.map(selected, tree, is_leaf=has_state)

    def send(self, function: Callable[..., Any], *arrays: Any) -> Any:
        return jax.pure_callback(function, _NUMBER, *map(lax.stop_gradient, arrays), vmap_method="expand_dims")

    def send_if_sampled(self, function: Callable[..., Any], number: Any, *arrays: Any) -> Any:
        operands = [lax.stop_gradient(x) for x in (jnp.asarray(number, jnp.int32), *map(jnp.asarray, arrays))]
        is_sampled = operands[0] != NOT_SAMPLED
        return lax.cond(is_sampled, lambda *x: self.send(function, *x), lambda *_: jnp.int32(0), *operands)


@jax.jit
def _next(x: Any) -> Any:
    return x + 1


def _has_numbers(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
