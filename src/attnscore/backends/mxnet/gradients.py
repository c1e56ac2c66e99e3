"""MXNet's gradient hook: calls that its autograd records.

- An attention op has its own VJP, which saves the output, row_max and log_denom. The hook is the C function under
  ``mx.autograd.Function``: that class loses the gradients after an input that wants none, and gradients with
  ``grad_req="add"`` (seen in 1.9.1).
- MXNet has no second derivatives of custom functions: a request is an error of MXNet's.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, MXCallbackList, NDArrayHandle, c_handle_array, check_call

from attnscore.backends.base import Array, DifferentiableOp, VjpFunction

# At exit, MXNet stops the thread that runs gradient hooks and then waits for pending operations: for ever if one of
# them is a hook (seen in 1.9.1). Waiting first avoids it.
atexit.register(mx.nd.waitall)


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    if not autograd.is_recording():
        return run.forward(operands)
    # Detached: a recorded array that a node of the graph holds would never be freed.
    arrays = [x.detach() for x in operands]
    with autograd.pause(train_mode=autograd.is_training()):
        outputs = run.forward(arrays)
    saved = [x.detach() for x in outputs[: run.saved_count]]
    count = run.differentiable_count
    _record(operands, outputs[:count], lambda grads, requested: run.backward(arrays, saved, grads, requested))
    return outputs


def vjp(function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, VjpFunction]:
    """Return ``function(*inputs)`` and its VJP function, by MXNet's autograd."""
    if autograd.is_recording():
        # The outer scope records the value. A VJP that it records would be differentiated again, which MXNet cannot.
        return function(*inputs), _no_vjp
    leaves = [x.detach() for x in inputs]
    for x in leaves:
        x.attach_grad()
    with autograd.record(train_mode=autograd.is_training()):
        value = function(*leaves)

    def vjp(grad: Array) -> tuple[Array, ...]:
        try:
            value.backward(grad)
        except mx.MXNetError as error:
            # A value that depends on no input: its gradients stay the zeros of attach_grad.
            if "not in a computational graph" not in str(error):
                raise
        return tuple(x.grad for x in leaves)

    return value.detach(), vjp


def _no_vjp(_: Array) -> tuple[Array, ...]:
    raise NotImplementedError("attnscore: MXNet has no derivative of a derivative")


_Callback = ctypes.CFUNCTYPE(ctypes.c_int)
_Backward = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
    ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_Delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# Callbacks that MXNet may still call, by number.
_RECORDED: dict[int, Any] = {}
_NUMBERS = itertools.count()
# MXNet's values of grad_req "null" and "add".
_NULL, _ADD = 0, 3


def _record(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    backward: Callable[[Sequence[Array], Sequence[bool]], Sequence[Array | None]],
) -> None:
    """Record `outputs` as a function of `inputs`, with ``backward(grads, requested)`` as its VJP."""
    number = next(_NUMBERS)

    def run(output_count: int, input_count: int, handles: Any, requests: Any, _training: int, _state: Any) -> bool:
        # MXNet is C++: no exception may pass through it. It reports the failure.
        try:
            # The gradients of the outputs, then the arrays for the gradients of the inputs.
            arrays = [mx.np.ndarray(handle=ctypes.cast(handles[i], NDArrayHandle), writable=i >= output_count)
                    for i in range(output_count + input_count)]  # fmt: skip
            requested = [requests[i] != _NULL for i in range(input_count)]
            with mx.util.np_shape(True), autograd.pause():
                gradients = backward(arrays[:output_count], requested)
                targets = zip(arrays[output_count:], gradients, requests[:input_count], strict=True)
                for target, grad, request in targets:
                    if grad is not None and request != _NULL:
                        target[()] = target + grad if request == _ADD else grad
        except Exception:
            traceback.print_exc()
            return False
        return True

    def forget(_state: Any) -> bool:
        _RECORDED.pop(number, None)
        return True

    functions = [ctypes.cast(_Backward(run), _Callback), ctypes.cast(_Delete(forget), _Callback)]
    calls = MXCallbackList(2, (_Callback * 2)(*functions), (ctypes.c_void_p * 2)())
    _RECORDED[number] = calls, functions
    check_call(
        _LIB.MXCustomFunctionRecord(
            len(inputs), c_handle_array(inputs), len(outputs), c_handle_array(outputs), ctypes.byref(calls)
        )
    )
