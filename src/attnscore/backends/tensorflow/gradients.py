"""TensorFlow's gradient hook: gradient tapes, eager and in graphs, and forward mode.

- An attention op has its own VJP (``tf.custom_gradient``; the tape itself for calls that have a plan). A second tape
  differentiates that in TensorFlow's own operations.
- Where TensorFlow ignores a custom gradient (``tf.autodiff.ForwardAccumulator``, a graph that is rewritten), the op
  itself runs in TensorFlow's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.eager import record as tape

from attnscore.backends.base import Array, DifferentiableOp
from attnscore.backends.tensorflow import graphs


def needs_grad(*arrays: Array) -> bool:
    """Whether TensorFlow may differentiate operations on these."""
    # tf.gradients or a tape may differentiate a graph after it is traced.
    if not tf.executing_eagerly():
        return True
    if not tape.could_possibly_record():
        return False
    # A tape does not tell whether it watches a variable that has not been read.
    if any(isinstance(x, tf.Variable) for x in arrays):
        return True
    own = [x for x in arrays if isinstance(x, tf.Tensor)]
    return bool(tape.should_record_backprop(own)) or has_tangents(own)


def has_tangents(arrays: Sequence[Array]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` follows one of these."""
    if not tape.could_possibly_record():
        return False
    own = [x for x in arrays if isinstance(x, tf.Tensor)]
    return bool(forwardprop_util.pack_tangents(own).tangents)


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    operands = [tf.convert_to_tensor(x) for x in operands]
    if has_tangents(operands) or (not tf.executing_eagerly() and graphs.rewritten()):
        # A custom gradient has no forward mode, and is lost when a graph is rewritten.
        return run.streaming().forward(operands)
    wanted: list[bool] | None = None
    if tf.executing_eagerly():
        wanted = [needs_grad(x) for x in operands]
        if not any(wanted):
            return run.forward(operands)
    results: list[Array] = []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def hook(*arrays: Array) -> Any:
        # No tape records these operations: `vjp` is the gradient.
        outputs = run.forward([tf.stop_gradient(x) for x in arrays])

        def vjp(*grads: Array, variables: Any = None) -> Any:
            # `results` and not `outputs`, so that a second tape differentiates through them.
            found = run.backward(operands, results[: run.saved_outputs], grads[: run.differentiable_outputs], wanted)
            return found if variables is None else (found, [None] * len(variables))

        return outputs, vjp

    results += hook(*operands)
    count = run.differentiable_outputs
    return (*results[:count], *map(tf.stop_gradient, results[count:]))


def record(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Return `differentiable` of plain operands, without `tf.custom_gradient`, whose wrappers take 100 us and more."""
    wanted = [bool(tape.should_record_backprop([x])) for x in operands]
    outputs = run.forward(operands)
    count = run.differentiable_outputs

    def vjp(*grads: Array) -> Sequence[Array | None]:
        # Those of a gather are slices.
        incoming = [tf.convert_to_tensor(x) if isinstance(x, tf.IndexedSlices) else x for x in grads]
        return run.backward(operands, outputs[: run.saved_outputs], incoming, wanted)

    tape.record_operation("attnscore", list(outputs[:count]), list(operands), vjp)
    return outputs


def vjp(function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Return ``function(*inputs)`` and its VJP function, by a gradient tape."""
    inputs = [tf.identity(x) for x in inputs]
    with tf.GradientTape() as recorded:
        recorded.watch(inputs)
        value = function(*inputs)

    def vjp(grad: Array) -> tuple[Array, ...]:
        return tuple(recorded.gradient(value, inputs, grad, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    return value, vjp
