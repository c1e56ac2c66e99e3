"""Native code inside TensorFlow's graphs.

- A graph calls back into the process that made it, over the runtime's own buffers, without copies.
- The same graph runs where nobody can be called, in TensorFlow's own operations: exported and loaded elsewhere,
  compiled by XLA afterwards, on another device.
- What is called back has a derivative: that of the form in TensorFlow's own operations.
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
from tensorflow.python.ops import cond_v2
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from attnscore.backends.base import Array


def calls_back(*arrays: Array) -> bool:
    """Whether any of these belongs to a graph that can call this process when it runs."""
    if not any(isinstance(x, tf.Tensor) and not hasattr(x, "numpy") for x in arrays):
        return False
    graph = tf.compat.v1.get_default_graph()
    return isinstance(graph, FuncGraph) and not GraphOrParentsInXlaContext(graph) and not rewritten()


def rewritten() -> bool:
    """Whether TensorFlow makes something else of what is traced now, for which a callback has no form.

    That is the body of a loop that ``tf.vectorized_map`` or a jacobian turns into wider operations, and the gradient of
    a function that is called under two tapes or a ForwardAccumulator: TensorFlow goes through the operations in it, and
    finds 0 where a rule of our own stands for them. Nothing tells but the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_pfor_impl":
            return True
        if name == "_build_functions_for_outputs":
            owner = frame.f_locals.get("self")
            forward_mode = getattr(owner, "_forwardprop_input_indices", None)
            return bool(forward_mode) or type(owner).__name__ == "_HigherOrderTapeGradientFunctions"
        frame = frame.f_back
    return False


def host_callback(
    function: Callable[..., Sequence[np.ndarray[Any, Any]]],
    results: Sequence[tuple[tuple[Any, ...], str]],
    arrays: Sequence[Array],
    otherwise: Callable[..., tuple[Array, ...]],
) -> tuple[Array, ...]:
    """``function(*arrays)`` when the graph runs in this process, what `otherwise` traces when it runs anywhere else."""
    # Of this graph: the next derivative is made in another, which reaches no further.
    arrays = [tf.identity(x) for x in arrays]
    dtypes = [dtype for _, dtype in results]

    def here() -> list[Array]:
        # Without state: calls that do not depend on each other may run at once, and an unused one does not run.
        return list(tf.numpy_function(function, arrays, dtypes, stateful=False))

    def anywhere() -> list[Array]:
        return [tf.cast(x, dtype) for x, dtype in zip(otherwise(*arrays), dtypes, strict=True)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: Array) -> Any:
        found = _case(_place(arrays[0]), [anywhere, here])
        for x, (shape, _) in zip(found, results, strict=True):
            x.set_shape([n if isinstance(n, (int, np.integer)) else None for n in shape])

        def pullback(*grads: Array, variables: Any = None) -> Any:
            floats = [x for x in given if x.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                again = list(otherwise(*given))
            none = tf.UnconnectedGradients.ZERO
            slopes = iter(tape.gradient(again, floats, list(grads), unconnected_gradients=none))
            passed = [next(slopes) if x.dtype.is_floating else None for x in given]
            return passed if variables is None else (passed, [None] * len(variables))

        return found, pullback

    return tuple(call(*arrays))


def _place(x: Array) -> Array:
    """1 where the graph runs on a CPU in the process that made it, 0 anywhere else.

    As a call that is said to have no state: TensorFlow drops derivatives at calls that have.
    """
    found: Array = tf.raw_ops.PartitionedCall(args=[x], Tout=[tf.int32], f=_places(x.dtype))[0]
    found.set_shape(())
    return found


@functools.cache
def _places(dtype: tf.DType) -> Any:
    """`_place` as a function of one tensor."""
    name = _mark()

    def place(x: Array) -> Array:
        def on_a_cpu() -> list[Array]:
            # What hangs on nothing is taken out of the loop that it is used in, which TensorFlow then refuses to run.
            with tf.control_dependencies([tf.identity(x)]):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
            return [tf.cast(tf.raw_ops.VarIsInitializedOp(resource=handle), tf.int32)]

        with tf.control_dependencies([x]):
            # XLA takes the last branch of a case by devices. It leaves the others alone, and so what it cannot compile.
            device = tf.raw_ops.DeviceIndex(device_names=["CPU"])
        return _case(device, [on_a_cpu, lambda: [tf.constant(0)]])[0]

    with tf.init_scope():
        return tf.function(place, autograph=False).get_concrete_function(tf.TensorSpec(None, dtype))


@functools.cache
def _mark() -> str:
    """The name of a resource that this process has and no other."""
    name = f"attnscore_{uuid.uuid4().hex}"
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(True))
    return name


def _case(index: Array, branches: Sequence[Callable[[], list[Array]]]) -> list[Array]:
    # As one operation that runs the branch it takes. `tf.switch_case` would lay all branches into the graph around it,
    # and a runtime without Python has no kernel for a callback, taken or not.
    found = cond_v2.indexed_case(index, list(branches), lower_using_switch_merge=False)
    return list(found) if isinstance(found, (list, tuple)) else [found]
