"""The native kernel: C++ on the CPU, over the caller's memory. The door to ``csrc``.

- Every form but one that a user wrote in Python, with any mask that is intervals, one boolean array and one
  ``Documents``; forward and backward, for any strides and broadcast axes, without copies of what lies ready.
- What it does not take it says; ``auto`` then goes on to the streaming kernel. A gradient of a gradient is the
  streaming form's.
- Results do not depend on the number of threads.
"""

from __future__ import annotations

import os
from typing import final

import numpy as np

from attnscore import engine, softmax
from attnscore.engine import Result, RowGradients
from attnscore.frameworks.contract import Array, sum_to
from attnscore.kernels import native_deferred as deferring
from attnscore.kernels import native_inputs as inputs
from attnscore.kernels.contract import Kernel
from attnscore.kernels.native_inputs import HostArray
from attnscore.kernels.streaming import Streaming
from attnscore.problem import Problem
from attnscore.scoring.forms import AdditiveForm
from attnscore.softmax import RowState
from attnscore.threads import get_num_threads
from attnscore.tiling import TilePlan

try:
    if os.environ.get("ATTNSCORE_NO_NATIVE") == "1":
        raise ImportError("turned off by ATTNSCORE_NO_NATIVE=1")
    # The arrow goes to the module, not to the package above.
    import attnscore._native as _native  # noqa: PLR0402
except ModuleNotFoundError:
    _MISSING: str | None = "the native module is not built here: reinstall attnscore where there is a C++ compiler"
except ImportError as error:
    _MISSING = str(error)
else:
    _MISSING = None

# Numbers of each row that the forward writes (csrc/attention.h), and the statistics that need more than the first two.
_STATISTICS = 7
_FULL = frozenset(("entropy", "sum_sq_weights", "mean_score", "var_score"))
# The gradients that the kernels write, in their order; the first of them whether wanted or not.
_GRADIENTS = ("query", "key", "value", "query_bias", "key_bias", "bias", "w_v", "sink")
_ALWAYS = frozenset(("query", "key", "value", "w_v"))


@final
class Native(Kernel):
    """C++ tiles for the CPU at hand."""

    name = "native"
    summary = "C++ on the CPU, O(n) memory"
    own_gradient = True

    @property
    def differentiable(self) -> Kernel:
        return Streaming()

    def missing(self) -> str | None:
        return _MISSING

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return tuple(inputs.reasons(problem)) if _MISSING is None else (_MISSING,)

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        ops, grid, sums, wanted = problem.ops, problem.grid, problem.accumulator, problem.statistics
        arrays = deferring.arrays_of(problem)
        if ops.deferred(*arrays):
            return deferring.forward(self, problem)
        if ops.name == "jax" and ops.on_tape(*arrays):
            return engine.forward(problem, plan)
        out = np.empty((*grid.rows, problem.layout.value_dim), inputs.STORED.get(problem.dtype, problem.dtype))
        top, log_total = np.empty((2, *grid.rows, 1), sums)
        numbers = np.empty((*grid.rows, _STATISTICS), sums)
        _native.forward(
            *inputs.words(problem, plan),
            (out, numbers, top, log_total),
            not _FULL.isdisjoint(wanted),
            ops.threads(get_num_threads()),
        )
        like = problem.value
        return Result(
            ops.from_memory(out, problem.dtype, like),
            ops.from_memory(top, sums, like),
            ops.from_memory(log_total, sums, like),
            # The log-sum-exp alone is top + log total, and needs nothing more.
            _statistics(problem, ops.from_memory(numbers, sums, like)) if wanted not in ((), ("log_sum_exp",)) else {},
        )

    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        ops, sums = problem.ops, problem.accumulator
        operands = engine.operands(problem)
        incoming = [x for x in (grads.out, grads.log_sum_exp, grads.entropy) if x is not None]
        if ops.deferred(*deferring.arrays_of(problem), *incoming):
            return deferring.backward(self, problem, result, grads, wanted)
        if ops.on_tape(*operands.values(), *incoming) or not all(map(ops.readable, (*operands.values(), *incoming))):
            return engine.backward(problem, plan, result, grads)
        grad_out, grad_dtype = _grad_out(problem, grads.out)
        rows = [result.top, result.log_total]
        rows += [None, grads.log_sum_exp, None]
        if grads.entropy is not None:
            rows[2], rows[4] = result.statistics["entropy"], grads.entropy
        top, log_total, entropy, grad_log_sum_exp, grad_entropy = (_row(problem, x) for x in rows)
        buffers = _buffers(problem, wanted)
        _native.backward(
            *inputs.words(problem, plan),
            (ops.memory(result.out), top, log_total, entropy, grad_out, grad_log_sum_exp, grad_entropy),
            grad_dtype,
            [buffers.get(name) for name in _GRADIENTS],
            ops.threads(get_num_threads()),
        )
        return {
            name: _as_operand(problem, ops.from_memory(x, sums, problem.value), name, operands[name])
            for name, x in buffers.items()
            if name in wanted
        }


def _statistics(problem: Problem, rows: Array) -> dict[str, Array]:
    """What was asked for, from the numbers of the rows."""
    ops, wanted, sums = problem.ops, problem.statistics, problem.accumulator
    maximum, total, tilt, squares, count, mean, deviations = (rows[..., i : i + 1] for i in range(_STATISTICS))
    state = RowState(
        max=maximum,
        total=total,
        out=ops.zeros((*problem.grid.rows, 0), rows),
        tilt=tilt if "entropy" in wanted else None,
        squares=squares if "sum_sq_weights" in wanted else None,
        moments=(count, mean, 0 * mean, deviations) if {"mean_score", "var_score"} & set(wanted) else None,
    )
    sink = problem.sink
    if sink is not None:
        sink = ops.astype(ops.reshape(sink, (*sink.shape, 1, 1)), sums)
    return softmax.finish(ops, state, sink, wanted)[3]


def _grad_out(problem: Problem, grad: Array | None) -> tuple[HostArray, str]:
    ops, shape = problem.ops, (*problem.grid.rows, problem.layout.value_dim)
    if grad is None:
        return np.broadcast_to(np.zeros((), problem.accumulator), shape), problem.accumulator
    if ops.dtype(grad) not in inputs.DTYPES:
        grad = ops.astype(grad, problem.accumulator)
    return ops.memory(grad), ops.dtype(grad)


def _row(problem: Problem, x: Array | None) -> HostArray | None:
    """One number a row, as the native module reads them: (*rows, 1), in the dtype of sums, in C order."""
    if x is None:
        return None
    ops = problem.ops
    host = ops.memory(ops.astype(x, problem.accumulator))
    return host if host.flags.c_contiguous else np.ascontiguousarray(host)


def _buffers(problem: Problem, wanted: frozenset[str]) -> dict[str, HostArray]:
    """Zeros that the gradients are added to."""
    grid, form, sums = problem.grid, problem.form, problem.accumulator
    arrays = engine.operands(problem)
    shared = _shared(problem)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, x in arrays.items():
        if name == "sink":
            shapes[name] = grid.rows[:-1]
        elif name == "bias":
            shapes[name] = x.shape
        elif name == "w_v":
            shapes[name] = (*shared, x.shape[-1])
        elif name == "value" or form.role(name) == "key":
            shapes[name] = (*shared, grid.key_len, *x.shape[-1:])
        else:
            shapes[name] = (*grid.rows, *x.shape[-1:])
    for name in ("query_bias", "key_bias"):
        if name in shapes:
            shapes[name] = shapes[name][:-1]
    return {name: np.zeros(shape, sums) for name, shape in shapes.items() if name in wanted or name in _ALWAYS}


def _shared(problem: Problem) -> tuple[int, ...]:
    """Axes of heads, 1 where all heads along them have the same keys and values, whose gradients are then one."""
    form, whole = problem.form, problem.grid.rows[:-1]
    shapes = [x.shape[:-2] for name, x in form.arrays().items() if form.role(name) == "key"]
    shapes.append(problem.value.shape[:-2])
    if isinstance(form, AdditiveForm) and len(form.w_v.shape) > 1:
        shapes.append((*(1 for _ in problem.grid.lead), *form.w_v.shape[:2]))
    return tuple(1 if all(n == 1 for n in lengths) else length for length, *lengths in zip(whole, *shapes, strict=True))


def _as_operand(problem: Problem, grad: Array, name: str, operand: Array) -> Array:
    """A gradient in the shape of its operand: summed over the axes along which that was broadcast."""
    ops, shape = problem.ops, tuple(operand.shape)
    if name in ("query_bias", "key_bias"):
        grad = ops.expand_dims(grad, -1)
    return grad if tuple(grad.shape) == shape else sum_to(ops, grad, shape)
