"""Native code inside TensorFlow's graphs.

- A graph calls back into the process that traced it, over the runtime's own buffers, without copies.
- Where that process cannot be called, the graph runs in TensorFlow's own operations: exported and loaded elsewhere,
  compiled by XLA afterwards, on another device.
- The gradient of a callback is the gradient of TensorFlow's own operations. It goes with the operation into graphs that
  TensorFlow makes of a traced one (``tf.vectorized_map``, jacobians, derivatives).
"""

from __future__ import annotations

import functools
import math
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from attnscore.backends.base import Array
from attnscore.backends.tensorflow import private


def calls_back(*arrays: Array) -> bool:
    """Whether any of these is symbolic, in a graph that can call this process when it runs."""
    if not any(isinstance(x, tf.Tensor) and not hasattr(x, "numpy") for x in arrays):
        return False
    return private.indexed_case is not None and tf.inside_function() and not (is_for_xla() or is_rewritten())


def is_for_xla() -> bool:
    """Whether a function with ``jit_compile=True`` traces the graph."""
    return bool(private.is_for_xla(tf.compat.v1.get_default_graph()))


def is_rewritten() -> bool:
    """Whether a function that rewrites the graph traces it, such as ``tf.vectorized_map``, or may do so unnoticed."""
    packages = private.rewriting_packages()
    return packages is None or _is_traced_by(packages)


def is_for_lite() -> bool:
    """Whether TensorFlow Lite's converter traces the graph."""
    return _is_traced_by(private.LITE)


def is_recomputed() -> bool:
    """Whether this is called, or may be, by a function of ``tf.recompute_grad``, which Keras's ``remat`` takes too."""
    return not private.RECOMPUTING or any(frame.f_code in private.RECOMPUTING for frame in _stack())


def _is_traced_by(packages: str | tuple[str, ...]) -> bool:
    """Whether Python's stack shows a module of one of these packages."""
    return any(frame.f_globals.get("__name__", "").startswith(packages) for frame in _stack())


def _stack() -> Iterator[FrameType]:
    """Yield the frames of Python's stack from here on outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def host_callback(
    function: Callable[..., Sequence[np.ndarray[Any, Any]]],
    results: Sequence[tuple[tuple[Any, ...], str]],  # shape and dtype of each
    arrays: Sequence[Array],
    otherwise: Callable[..., tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Trace ``function(*arrays)`` for a graph that runs in this process, ``otherwise(*arrays)`` for any other."""
    arrays, dtypes = [tf.convert_to_tensor(x) for x in arrays], [dtype for _, dtype in results]
    shapes = [[n if isinstance(n, (int, np.integer)) else None for n in shape] for shape, _ in results]
    gradient = _register_gradient(otherwise, [x.shape for x in arrays])

    def here() -> list[Array]:
        with tf.compat.v1.get_default_graph().gradient_override_map({"PyFuncStateless": gradient}):
            # Stateless: independent calls may run at once, and an unused one is pruned.
            outputs = tf.numpy_function(function, arrays, dtypes, stateful=False)
        return [tf.ensure_shape(x, shape) for x, shape in zip(outputs, shapes, strict=True)]

    def elsewhere() -> list[Array]:
        return [tf.cast(x, dtype) for x, dtype in zip(otherwise(*arrays), dtypes, strict=True)]

    outputs = _case(_runs_here(arrays[0]), [elsewhere, here])  # `_runs_here` is 0 or 1
    for x, shape in zip(outputs, shapes, strict=True):  # a case keeps only the sizes that both branches know
        x.set_shape(shape)
    return tuple(outputs)


def _register_gradient(function: Callable[..., tuple[Array, ...]], shapes: Sequence[tf.TensorShape]) -> str:
    """Register the gradient of `function` for operations with the same inputs and outputs; return its name.

    It reads the operation alone, and no tensor of the graph that was traced. ``tf.vectorized_map`` and jacobians copy
    an operation that they cannot vectorize with the name of its gradient; ``tf.custom_gradient`` is dropped there.
    """
    name = f"attnscore_{uuid.uuid4().hex}"

    @tf.RegisterGradient(name)  # type: ignore[untyped-decorator]
    def gradient(op: Any, *grads: Array) -> list[Array | None]:
        if op is None:
            # As `tf.saved_model.save` calls it, with the inputs in place of the gradients. The callback does not run in
            # the process that loads the model, and neither does this.
            return [x * math.nan if x.dtype.is_floating else None for x in grads]
        inputs = [tf.ensure_shape(x, shape) for x, shape in zip(op.inputs, shapes, strict=True)]
        floats = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            outputs = [tf.cast(x, y.dtype) for x, y in zip(function(*inputs), op.outputs, strict=True)]
        zeros = tf.UnconnectedGradients.ZERO
        grads_of_floats = iter(tape.gradient(outputs, floats, list(grads), unconnected_gradients=zeros))
        return [next(grads_of_floats) if x.dtype.is_floating else None for x in inputs]

    return name


def _runs_here(x: Array) -> Array:
    """Return 1 where the graph runs on a CPU in the process that traced it, 0 elsewhere.

    The call is declared stateless, because TensorFlow drops derivatives at stateful calls.
    """
    index: Array = tf.raw_ops.PartitionedCall(args=[x], Tout=[tf.int32], f=_runs_here_function(x.dtype))[0]
    index.set_shape(())
    return index


@functools.cache
def _runs_here_function(dtype: tf.DType) -> Any:
    """Return a function of one tensor that gives 1 on a CPU of this process, and 0 elsewhere."""
    name = _process_mark()

    def runs_here(x: Array) -> Array:
        def on_a_cpu() -> list[Array]:
            # An operation without inputs is hoisted out of a loop, and TensorFlow then refuses to run the loop.
            with tf.control_dependencies([tf.identity(x)]):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
            return [tf.cast(tf.raw_ops.VarIsInitializedOp(resource=handle), tf.int32)]

        with tf.control_dependencies([x]):
            # XLA compiles the last branch of a case by DeviceIndex alone, and so skips branches that it cannot compile.
            device = tf.raw_ops.DeviceIndex(device_names=["CPU"])
        (index,) = _case(device, [on_a_cpu, lambda: [tf.constant(0)]])
        # As a size, because `tf.vectorized_map` turns other numbers into arrays, and refuses a case that has several
        # outputs and an array as its index.
        return tf.size(tf.zeros([index]))

    with tf.init_scope():
        return tf.function(runs_here, autograph=False).get_concrete_function(tf.TensorSpec(None, dtype))


@functools.cache
def _process_mark() -> str:
    """Return the name of a resource that exists in this process and no other."""
    name = f"attnscore_{uuid.uuid4().hex}"
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(True))
    return name


def rarely(condition: Array, function: Callable[[], list[Array]], otherwise: Sequence[Array]) -> list[Array]:
    """Return ``function()`` where the condition is true, else `otherwise`; the branches are no part of the graph."""

    def unchanged() -> list[Array]:
        return [tf.identity(x) for x in otherwise]

    if private.cond is None or private.set_lowering is None:
        return list(tf.cond(condition, function, unchanged))
    # An `If`, as TensorFlow Lite has no `Case`. It stays one operation: inlined, all branches would cost in each call.
    outputs = list(private.cond(condition, function, unchanged))
    # Each output is an identity of an output of the `If`.
    private.set_lowering(outputs[0].op.inputs[0].op, lower_using_switch_merge=False)
    return outputs


def _case(index: Array, branches: Sequence[Callable[[], list[Array]]]) -> list[Array]:
    # One operation that holds its branches. `tf.switch_case` would inline all branches into the graph, and a runtime
    # without Python has no kernel for a callback, whether it runs or not.
    outputs = private.indexed_case(index, list(branches), lower_using_switch_merge=False)  # type: ignore[misc]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
