"""Native code inside TensorFlow's graphs.

- A graph calls back into the process that traced it, over the runtime's own buffers, without copies.
- Where that process cannot be called, the graph runs in TensorFlow's own operations: exported and loaded elsewhere,
  compiled by XLA afterwards, on another device.
- The derivative of a callback is that of TensorFlow's own operations.
"""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import cond_v2, control_flow_util_v2
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from attnscore.backends.base import Array

# Modules that trace a graph to take it out of this process, where no callback is of use.
_LITE = "tensorflow.lite."
_EXPORTERS = ("keras.src.export.", _LITE)


def calls_back(*arrays: Array) -> bool:
    """Whether any of these is symbolic, in a graph that can call this process when it runs."""
    if not any(isinstance(x, tf.Tensor) and not hasattr(x, "numpy") for x in arrays):
        return False
    graph = tf.compat.v1.get_default_graph()
    return isinstance(graph, FuncGraph) and not GraphOrParentsInXlaContext(graph) and not rewritten()


def rewritten() -> bool:
    """Whether the graph that is traced now is rewritten or exported, which cannot be done to a callback.

    ``model.export`` and TensorFlow Lite's converter take it out of this process. TensorFlow rewrites the loop body of
    ``tf.vectorized_map`` or of a jacobian to batched operations. It differentiates the operations of a function called
    under two tapes or a ForwardAccumulator, and a custom gradient then counts as 0. TensorFlow 2.21 marks none of these
    on the graph: only Python's stack shows it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__", "").startswith(_EXPORTERS):
            return True
        if name == "_pfor_impl":
            return True
        if name == "_build_functions_for_outputs":
            owner = frame.f_locals.get("self")
            forward_mode = getattr(owner, "_forwardprop_input_indices", None)
            return bool(forward_mode) or type(owner).__name__ == "_HigherOrderTapeGradientFunctions"
        frame = frame.f_back
    return False


def is_for_xla() -> bool:
    """Whether a function with ``jit_compile=True`` traces the graph."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_for_lite() -> bool:
    """Whether TensorFlow Lite's converter traces the graph."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_LITE):
            return True
        frame = frame.f_back
    return False


def host_callback(
    function: Callable[..., Sequence[np.ndarray[Any, Any]]],
    results: Sequence[tuple[tuple[Any, ...], str]],
    arrays: Sequence[Array],
    otherwise: Callable[..., tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Trace ``function(*arrays)`` for a graph that runs in this process, ``otherwise(*arrays)`` for any other."""
    # Copies in this graph: a second derivative is traced in another, which captures from this one alone.
    arrays = [tf.identity(x) for x in arrays]
    dtypes = [dtype for _, dtype in results]

    def here() -> list[Array]:
        # Stateless: independent calls may run at once, and an unused one is pruned.
        return list(tf.numpy_function(function, arrays, dtypes, stateful=False))

    def anywhere() -> list[Array]:
        return [tf.cast(x, dtype) for x, dtype in zip(otherwise(*arrays), dtypes, strict=True)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: Array) -> Any:
        found = _case(_runs_here(arrays[0]), [anywhere, here])
        for x, (shape, _) in zip(found, results, strict=True):
            x.set_shape([n if isinstance(n, (int, np.integer)) else None for n in shape])

        def vjp(*grads: Array, variables: Any = None) -> Any:
            floats = [x for x in given if x.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                again = list(otherwise(*given))
            none = tf.UnconnectedGradients.ZERO
            found_grads = iter(tape.gradient(again, floats, list(grads), unconnected_gradients=none))
            passed = [next(found_grads) if x.dtype.is_floating else None for x in given]
            return passed if variables is None else (passed, [None] * len(variables))

        return found, vjp

    return tuple(call(*arrays))


def _runs_here(x: Array) -> Array:
    """Return 1 where the graph runs on a CPU in the process that traced it, 0 anywhere else.

    The call is declared stateless, because TensorFlow drops derivatives at stateful calls.
    """
    found: Array = tf.raw_ops.PartitionedCall(args=[x], Tout=[tf.int32], f=_runs_here_function(x.dtype))[0]
    found.set_shape(())
    return found


@functools.cache
def _runs_here_function(dtype: tf.DType) -> Any:
    """Return the function of one tensor of `dtype` that `_runs_here` calls."""
    name = _process_mark()

    def runs_here(x: Array) -> Array:
        def on_a_cpu() -> list[Array]:
            # An operation without inputs is hoisted out of a loop, and TensorFlow then refuses to run the loop.
            with tf.control_dependencies([tf.identity(x)]):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
            return [tf.cast(tf.raw_ops.VarIsInitializedOp(resource=handle), tf.int32)]

        with tf.control_dependencies([x]):
            # XLA compiles the last branch of a case by DeviceIndex alone, and so skips what it cannot compile.
            device = tf.raw_ops.DeviceIndex(device_names=["CPU"])
        return _case(device, [on_a_cpu, lambda: [tf.constant(0)]])[0]

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
    # An `If`, as TensorFlow Lite has no `Case`. It stays one operation: inlined, all branches would cost in each call.
    found = list(cond_v2.cond_v2(condition, function, lambda: [tf.identity(x) for x in otherwise]))
    control_flow_util_v2.maybe_set_lowering_attr(found[0].op.inputs[0].op, lower_using_switch_merge=False)
    return found


def _case(index: Array, branches: Sequence[Callable[[], list[Array]]]) -> list[Array]:
    # One operation that holds its branches. `tf.switch_case` would inline all branches into the graph, and a runtime
    # without Python has no kernel for a callback, whether it runs or not.
    found = cond_v2.indexed_case(index, list(branches), lower_using_switch_merge=False)
    return list(found) if isinstance(found, (list, tuple)) else [found]
