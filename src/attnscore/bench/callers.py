"""How a caller of JAX or TensorFlow runs attention: inside ``jax.jit``, eagerly, or inside ``tf.function``.

What this module meets:
- our side and its peers are run by the same lines, so that they differ in the attention alone;
- with gradients where the case has them, by the framework's own autodiff, in the same program or graph;
- a call ends when its result is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnscore.bench.cases import Case

Forward = Callable[[Any, Any, Any], Any]


def array(framework: str, x: Any) -> Any:
    """A NumPy array as one of the framework."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    if framework == "tensorflow":
        import tensorflow as tf

        return tf.constant(x)
    return x


def called(case: Case, forward: Forward, arrays: Sequence[Any], grad: Any) -> Callable[[], Any]:
    """``forward`` of query, key and value as the case's caller runs it: out, or (out, *gradients)."""
    run = {"jax": _in_jax, "tensorflow": _in_tensorflow}[case.framework]
    return run(case, forward, arrays, grad)


def _in_jax(case: Case, forward: Forward, arrays: Sequence[Any], grad: Any) -> Callable[[], Any]:
    import jax

    def both(*arrays: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(forward, *arrays[:-1])
        return (out, *pullback(arrays[-1]))

    jitted = jax.jit(both if case.backward else forward)
    given = (*arrays, grad) if case.backward else arrays
    return lambda: jax.block_until_ready(jitted(*given))  # type: ignore[no-untyped-call]  # JAX's own


def _in_tensorflow(case: Case, forward: Forward, arrays: Sequence[Any], grad: Any) -> Callable[[], Any]:
    import tensorflow as tf

    def both(*arrays: Any) -> tuple[Any, ...]:
        leaves = list(arrays[:-1])
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            out = forward(*leaves)
        return (out, *tape.gradient(out, leaves, output_gradients=arrays[-1]))

    whole = both if case.backward else forward
    given = (*arrays, grad) if case.backward else arrays
    run = tf.function(whole) if case.graph else whole
    # Eager operations on the CPU have ended when they return.
    return lambda: run(*given)
