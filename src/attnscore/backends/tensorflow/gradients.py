"""TensorFlow's gradient hook: gradient tapes, eager and in graphs, and forward mode.

- An attention op has its own VJP (``tf.custom_gradient``; the tape itself for calls that have a plan). A second tape
  differentiates that in TensorFlow's own operations.
- A graph that TensorFlow rewrites (``tf.vectorized_map``, jacobians) loses it; the operations of the forward then have
  gradients of their own.
- Under ``tf.autodiff.ForwardAccumulator``, which ignores a custom gradient, the op runs in TensorFlow's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from attnscore.backends.base import Array, DifferentiableOp, VjpFunction, accumulator
from attnscore.backends.tensorflow import graphs, private


def needs_grad(*arrays: Array) -> bool:
    """Whether TensorFlow may differentiate operations on these."""
    # tf.gradients or a tape may differentiate a graph after it is traced.
    if not tf.executing_eagerly():
        return True
    if not private.could_possibly_record():
        return False
    # A tape does not tell whether it watches a variable that has not been read.
    if any(isinstance(x, tf.Variable) for x in arrays):
        return True
    tensors = [x for x in arrays if isinstance(x, tf.Tensor)]
    return bool(private.should_record(tensors)) or has_tangents(tensors)


def is_recorded(function: Callable[[], Array]) -> bool:
    """Whether a tape follows the result, or in a graph trainable variables decide it. False if it is unknown."""
    is_eager, may_record = tf.executing_eagerly(), not private.FALLBACKS and private.could_possibly_record()
    if is_eager and not may_record:
        return False
    if not isinstance(result := function(), tf.Tensor):
        return False  # an error of the caller, which is named where scores are computed
    if may_record and private.should_record([result]):
        return True
    return not is_eager and _reads_variables(result)


def _reads_variables(x: Array) -> bool:
    """Whether a tensor of a graph is computed from trainable variables, by operations that pass gradients on."""
    handles = {x.graph.capture(v.handle).name for v in private.watched_variables(x.graph) if v.trainable}
    seen, remaining = set(), [x.op]
    while remaining:
        operation = remaining.pop()
        if any(each.name in handles for each in operation.inputs):
            return True
        if operation.type != "StopGradient" and operation not in seen:
            seen.add(operation)
            remaining += [each.op for each in operation.inputs if each.dtype.is_floating]
    return False


def has_tangents(arrays: Sequence[Array]) -> bool:
    """Whether a ``tf.autodiff.ForwardAccumulator`` follows one of these."""
    if not private.could_possibly_record():
        return False
    tensors = [x for x in arrays if isinstance(x, tf.Tensor)]
    return private.pack_tangents is None or bool(private.pack_tangents(tensors).tangents)


_REWRITTEN = (
    "a function compiled with jit_compile=True was rewritten, which drops the gradient of attend. "
    "Hint: tf.vectorized_map inside of the compiled function, not around it"
)


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    operands = [tf.convert_to_tensor(x) for x in operands]
    if has_tangents(operands):
        return run.streaming().forward(operands)
    is_eager, requested = tf.executing_eagerly(), None
    if is_eager:
        requested = [needs_grad(x) for x in operands]
        if not any(requested):
            return run.forward(operands)
    results: list[Array] = []
    # For a second derivative XLA would differentiate the loops of the forward too, and cannot. They are cut off from
    # the arrays, and where TensorFlow drops `vjp` all the same, the gradient is an error, not zero.
    is_cut = not is_eager and run.has_loops and graphs.is_for_xla() and not graphs.is_rewritten()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def hook(*arrays: Array) -> Any:
        # `vjp` is the gradient, so an eager tape records no operation of the forward. In a graph the operations keep
        # their own gradients, because TensorFlow drops `vjp` where it rewrites the graph.
        outputs = run.forward([tf.stop_gradient(x) for x in arrays] if is_eager or is_cut else list(arrays))
        if is_cut:
            outputs = tuple(tf.raw_ops.PreventGradient(input=x, message=_REWRITTEN) for x in outputs)

        def vjp(*grads: Array, variables: Any = None) -> Any:
            # `results` and not `outputs`, so that a second tape differentiates through them.
            saved, incoming = results[: run.saved_count], grads[: run.differentiable_count]
            gradients = run.backward(operands, saved, incoming, requested)
            # `variables` are those that a mask reads; they get no gradient.
            return gradients if variables is None else (gradients, [None] * len(variables))

        return outputs, vjp

    results += hook(*operands)
    count = run.differentiable_count
    return (*results[:count], *map(tf.stop_gradient, results[count:]))


def record(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Return `differentiable` of plain operands, without `tf.custom_gradient`, whose wrappers take 100 us and more."""
    if private.record_operation is None:
        return differentiable(run, operands)
    requested = [bool(private.should_record([x])) for x in operands]
    outputs = run.forward(operands)
    count = run.differentiable_count

    def vjp(*grads: Array) -> Sequence[Array | None]:
        # Gradients of a gather are slices.
        incoming = [tf.convert_to_tensor(x) if isinstance(x, tf.IndexedSlices) else x for x in grads]
        return run.backward(operands, outputs[: run.saved_count], incoming, requested)

    private.record_operation("attnscore", list(outputs[:count]), list(operands), vjp)
    return outputs


def _times_transposed(rows: Array, matrix: Array) -> Array:
    """Return ``rows @ matrix.T``.

    The matrix by the rows takes a quarter of the time of 16 to 128 rows by a (1024, 1024) matrix, twice that of fewer
    rows or a (256, 256) matrix, and about as long with as many rows as the matrix has columns.
    """
    is_large = matrix.shape.num_elements() >= 2**18
    if is_large and rows.shape[0] is not None and 16 <= rows.shape[0] < matrix.shape[1]:
        return tf.raw_ops.Einsum(inputs=(matrix, rows), equation="yz,rz->ry")
    return tf.matmul(rows, matrix, transpose_b=True)


def product_of_rows(x: Array, matrix: Array, bias: Array | None) -> Array:
    """Return ``x @ matrix + bias`` in a graph; rows of `x` that are not finite pass no gradient on.

    The gradient of the matrix sums products with all rows, so one non-finite row makes it non-finite too. A branch that
    rarely runs then computes the gradients again, with zeros in place of these rows.
    """
    features, units = matrix.shape
    if 0 in (features, units):  # beside which -1 is undetermined in a reshape
        plain = tf.linalg.matmul(x, matrix)
        return plain if bias is None else plain + bias
    shape = x.shape if x.shape.is_fully_defined() else tf.shape(x)

    def gradients(rows: Array, grads: Array) -> list[Array]:
        """Return the gradients of the rows of `x`, of the matrix and of the bias."""
        products = [_times_transposed(grads, matrix), tf.matmul(rows, grads, transpose_a=True)]
        return products if bias is None else [*products, tf.reduce_sum(grads, 0)]

    def gradients_of_finite(rows: Array, grads: Array) -> list[Array]:
        finite = tf.reduce_all(tf.math.is_finite(rows), -1, keepdims=True)
        return gradients(*(tf.where(finite, array, tf.zeros((), array.dtype)) for array in (rows, grads)))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def product(*arrays: Array) -> Any:
        outputs = tf.matmul(tf.reshape(x, (-1, features)), matrix)
        outputs = outputs if bias is None else outputs + bias

        def vjp(grad: Array, variables: Any = None) -> Any:
            rows, grads = tf.reshape(x, (-1, features)), tf.reshape(grad, (-1, units))
            plain = gradients(rows, grads)
            of_matrix = plain[1]
            has_nonfinite = ~tf.math.is_finite(tf.reduce_sum(tf.cast(of_matrix, accumulator(of_matrix.dtype.name))))
            of_rows, *others = graphs.rarely(has_nonfinite, lambda: gradients_of_finite(rows, grads), plain)
            passed = (tf.reshape(of_rows, shape), *others)
            # `variables` has a matrix or bias that is a tf.Variable; its gradient is in `passed`.
            return passed if variables is None else (passed, [None] * len(variables))

        return tf.reshape(outputs, tf.concat([shape[:-1], [units]], 0)), vjp

    outputs: Array = product(*(x, matrix) if bias is None else (x, matrix, bias))
    outputs.set_shape((*x.shape[:-1], units))
    return outputs


def vjp(function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, VjpFunction]:
    """Return ``function(*inputs)`` and its VJP function, by a gradient tape."""
    inputs = [tf.identity(x) for x in inputs]
    with tf.GradientTape() as recorded:
        recorded.watch(inputs)
        value = function(*inputs)

    def vjp(grad: Array) -> tuple[Array, ...]:
        return tuple(recorded.gradient(value, inputs, grad, unconnected_gradients=tf.UnconnectedGradients.ZERO))

    return value, vjp
