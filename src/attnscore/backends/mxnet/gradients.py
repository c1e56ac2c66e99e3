"""MXNet's gradient hook: calls put on its tape.

- The gradient of a run is its own and holds two numbers a row. The hook is the one below ``mx.autograd.Function``: that
  class writes no gradient behind an input that wants none, and none for ``grad_req="add"`` (seen in 1.9.1).
- MXNet runs no graph of a gradient: there are no second derivatives, and asking for one is an error of MXNet's.
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

from attnscore.backends.base import Array, DifferentiableOp

# At its end a process stops what runs gradient hooks and then waits for all that is under way: for a hook that has not
# run yet, for ever (seen in 1.9.1). So what is under way ends first.
atexit.register(mx.nd.waitall)


def differentiable(run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
    """``run.forward(operands)``, with ``run.backward`` as its gradient."""
    if not autograd.is_recording():
        return run.forward(operands)
    # Off the tape: arrays on it, held by a node of it, would never be freed.
    arrays = [x.detach() for x in operands]
    with autograd.pause(train_mode=autograd.is_training()):
        outputs = run.forward(arrays)
    kept = [x.detach() for x in outputs[: run.saved_outputs]]
    count = run.differentiable_outputs
    _record(operands, outputs[:count], lambda grads, wanted: run.backward(arrays, kept, grads, wanted))
    return outputs


def vjp(function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Value of ``function(*inputs)``, and the pull-back that a tape gives."""
    if autograd.is_recording():
        # On a tape already, which carries it on.
        return function(*inputs), _no_pullback
    leaves = [x.detach() for x in inputs]
    for x in leaves:
        x.attach_grad()
    with autograd.record(train_mode=autograd.is_training()):
        value = function(*leaves)

    def pullback(grad: Array) -> tuple[Array, ...]:
        try:
            value.backward(grad)
        except mx.MXNetError as error:
            # A value that depends on none of them has gradient 0, which they began with.
            if "not in a computational graph" not in str(error):
                raise
        return tuple(x.grad for x in leaves)

    return value.detach(), pullback


def _no_pullback(_: Array) -> tuple[Array, ...]:
    raise NotImplementedError("attnscore: MXNet has no derivative of a derivative")


_Callback = ctypes.CFUNCTYPE(ctypes.c_int)
_Backward = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
    ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_Delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# What MXNet may still call, by number.
_RECORDED: dict[int, Any] = {}
_NUMBERS = itertools.count()
_NOT_WANTED, _ADDED = 0, 3


def _record(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    backward: Callable[[Sequence[Array], Sequence[bool]], Sequence[Array | None]],
) -> None:
    """Put `outputs` on the tape as a function of `inputs`, with ``backward(grads, wanted)`` as its gradient."""
    number = next(_NUMBERS)

    def run(outs: int, ins: int, arrays: Any, requests: Any, _training: int, _state: Any) -> bool:
        # Nothing can be raised through MXNet, which reports that this failed.
        try:
            held = [mx.np.ndarray(handle=ctypes.cast(arrays[i], NDArrayHandle), writable=i >= outs)
                    for i in range(outs + ins)]  # fmt: skip
            wanted = [requests[i] != _NOT_WANTED for i in range(ins)]
            with mx.util.np_shape(True), autograd.pause():
                found = backward(held[:outs], wanted)
                for place, grad, request in zip(held[outs:], found, requests[:ins], strict=True):
                    if grad is not None and request != _NOT_WANTED and grad.size:
                        place[()] = place + grad if request == _ADDED else grad
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
