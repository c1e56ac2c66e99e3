"""TensorFlow's gradient hook: tapes, eager and in graphs, and forward mode.

- The gradient of a run is its own (``tf.custom_gradient``). What watches it too, a second tape, differentiates the
  streaming form of it.
- Where that rule would be passed over (a ``tf.autodiff.ForwardAccumulator``, a graph that is rewritten), the streaming
  form runs at once, in operations whose derivatives TensorFlow has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util, record

from attnscore.backends.base import Array, DifferentiableOp
from attnscore.backends.tensorflow import graphs


def needs_grad(*arrays: Array) -> bool:
    """Whether a derivative of what is computed from these now may be asked for."""
    # What a graph holds may be differentiated when it is done, by tf.gradients or a tape around it.
    if not tf.executing_eagerly():
        return True
    own = [x for x in arrays if isinstance(x, (tf.Tensor, tf.Variable))]
    return bool(record.should_record_backprop(own)) or _has_tangents(own)


def _has_tangents(arrays: Sequence[Array]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` follows one of these."""
    return bool(forwardprop_util.pack_tangents(list(arrays)).tangents)


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    operands = [tf.convert_to_tensor(x) for x in operands]
    if _has_tangents(operands) or (not tf.executing_eagerly() and graphs.rewritten()):
        # Our own gradient has no forward mode, and is lost in a rewriting. TensorFlow's operations keep theirs.
        return run.streaming().forward(operands)
    wanted: list[bool] | None = None
    if tf.executing_eagerly():
        wanted = [needs_grad(x) for x in operands]
        if not any(wanted):
            return run.forward(operands)
    results: list[Array] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def hook(*arrays: Array) -> Any:
        # What is computed in here is on no tape: `pullback` is its gradient.
        outputs = run.forward([tf.stop_gradient(x) for x in arrays])

        def pullback(*grads: Array, variables: Any = None) -> Any:
            # Not `outputs`: a second derivative goes through them.
            found = run.backward(operands, results[: run.saved_outputs], grads[: run.differentiable_outputs], wanted)
            return found if variables is None else (found, [None] * len(variables))

        return outputs, pullback

    results += hook(*operands)
    count = run.differentiable_outputs
    return (*results[:count], *map(tf.stop_gradient, results[count:]))


def vjp(function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Value of ``function(*inputs)``, and the pull-back that a tape gives."""
    inputs = [tf.identity(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = function(*inputs)

    def pullback(grad: Array) -> tuple[Array, ...]:
        return tuple(tape.gradient(value, inputs, grad, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    return value, pullback
