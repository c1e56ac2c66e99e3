"""Arguments and results of the native module, and the reasons why it cannot run a problem.

Arrays are passed without a copy where their dtype allows: broadcast axes stay 1, strides are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends import base
from attnscore.backends.base import HALF_PRECISION, Array, HostArray, SeedHalves, sum_to
from attnscore.base import thresholds
from attnscore.masks import EvaluatedFunction, Mask, lowering
from attnscore.masks.base import all_of, atoms_of
from attnscore.masks.dynamic_intervals import without_interval_parts
from attnscore.problem.dropout import Dropout, PairDropout
from attnscore.problem.normalizers import ONLY_SOFTMAX
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import TABLE
from attnscore.scores.forms import AdditiveForm, DistanceForm, InnerForm

DTYPES = frozenset(base.DTYPES)
# NumPy's dtype of the bits of a half-precision array.
STORED = {name: base.DTYPES[name].storage for name in HALF_PRECISION}

_FORMS: dict[type, str] = {InnerForm: "inner", AdditiveForm: "additive", DistanceForm: "distance"}

# TensorFlow and JAX share memory that begins at a multiple of this many bytes, and copy any other.
ALIGNMENT = 64


def allocate_aligned(make: Callable[..., HostArray], shape: Sequence[int], dtype: str) -> HostArray:
    """Return ``make(shape, dtype)``, a large array at an address that any framework can share without a copy.

    `make` is ``numpy.empty`` or ``numpy.zeros``, which align arrays to 16 bytes only.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < thresholds.ALIGNED_BYTES:
        return make(shape, dtype)
    buffer = make(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def arrays_of(problem: Problem, *, without_known: bool = False) -> list[Array]:
    """Return all arrays that a call reads: the operands, the arrays of the mask, a traced seed.

    `without_known`: without the arrays of the mask that the host can read.
    """
    arrays = [*problem.operands().values()]
    if problem.mask is not None:
        arrays += [x for x in problem.mask.leaves() if not without_known or backends.host(x) is None]
    if problem.dropout is not None and isinstance(problem.dropout.seed, SeedHalves):
        arrays += problem.dropout.seed
    return arrays


def reasons(problem: Problem) -> list[str]:
    """Return why the native module cannot run `problem`."""
    ops, form = problem.ops, problem.form
    if type(form) not in _FORMS:
        return [f"the score is computed in Python ({type(form).__name__})"]
    reasons = [] if problem.normalizer is None else [ONLY_SOFTMAX]
    arrays = {**form.arrays(), "value": problem.value}
    dtypes = {ops.dtype(x) for x in arrays.values()}
    # Sums are in the dtype of the value: arrays of the score may be wider, but none narrower than a float64 value.
    if not dtypes <= DTYPES or (len(dtypes) > 1 and problem.dtype == "float64"):
        reasons.append(f"dtypes {', '.join(sorted(dtypes))}")
    if isinstance(problem.dropout, PairDropout):
        reasons.append("dropout of pairs that are part of another call")
    seed = None if problem.dropout is None else problem.dropout.seed
    if isinstance(seed, SeedHalves) and not ops.needs_host_callback(*seed):
        reasons.append("dropout with a seed for each example of a vmap")
    for name in ("bias", "sink"):
        if (x := getattr(problem, name)) is not None:
            arrays[name] = x
            if ops.dtype(x) not in DTYPES:
                reasons.append(f"{name} of dtype {ops.dtype(x)}")
    # Without queries or keys the module takes no bias for a relative one (`is_relative` in csrc/api/validate.cc).
    if problem.has_relative_bias and 0 in problem.score_shape.user_shape[-2:]:
        reasons.append("a bias by relative position without queries or keys")
    if unreadable := [name for name, x in arrays.items() if not ops.has_cpu_buffer(x)]:
        # The checks below would read the arrays.
        causes = "on a device, traced, with tangents, byte-swapped, misaligned, lazily negated or conjugated"
        return [*reasons, f"{', '.join(unreadable)}: arrays whose memory the CPU cannot read ({causes})"]
    remaining_mask = None if problem.mask is None else problem.visibility[1]
    if remaining_mask is None:
        return reasons
    if _is_staged(problem):
        reasons += _staged_reasons(problem, remaining_mask)
    if not all(ops.has_cpu_buffer(ops.asarray(x, problem.value)) for x in remaining_mask.arrays().values()):
        reasons.append("a mask whose memory the CPU cannot read")
    return reasons


def _is_staged(problem: Problem) -> bool:
    """Return whether the values of the operands are known only when a staged program runs."""
    ops, operands = problem.ops, problem.operands().values()
    # Without gradients: a tape that records these arrays now has ended when the program runs the kernel.
    return ops.needs_host_callback(*map(ops.stop_gradient, operands), *arrays_of(problem)[len(operands) :])


def _staged_reasons(problem: Problem, remaining: Mask) -> list[str]:
    """Return why the module cannot run in a staged program under `remaining`, the mask without its known intervals."""
    ops, score_shape, like = problem.ops, problem.score_shape, problem.value
    evaluated = without_interval_parts(ops, score_shape, like, remaining, problem.visibility[0])
    if not ops.custom_calls():
        # The program calls back into Python, which evaluates the mask in NumPy.
        functions = [mask for part in evaluated for mask in atoms_of(part) if _is_custom_code(mask)]
        return [f"a function that NumPy cannot call while a graph runs: {mask!r}" for mask in functions]
    # The program evaluates the mask by chunks of queries. Dropout depends on the place of a chunk, which a custom call
    # does not pass.
    if problem.dropout is None:
        return []
    _, evaluated = lowering.partition_staged(ops, score_shape, like, all_of(evaluated))
    return [f"dropout in a program, under a mask that has to be evaluated: {part!r}" for part in evaluated]


def _is_custom_code(mask: Mask) -> bool:
    """Return whether a user wrote the mask, with array operations that may be of one framework."""
    return isinstance(mask, EvaluatedFunction) or not type(mask).__module__.startswith("attnscore.")


ORDER = (
    *("query", "key", "value", "query_bias", "key_bias", "bias", "mask", "query_ids", "key_ids", "start", "stop"),
    *("w_v", "sink", "scales"),
)
"""Arrays that the native module reads, in the order of its stub."""


MaskArrays = dict[str, Array]
"""Arrays of a mask by the module's names: start, stop, mask, query_ids, key_ids."""


@dataclass(frozen=True)
class ChunkDropout(Dropout):
    """Dropout of a chunk of queries, which counts the rows of the whole call."""

    first_row: int
    query_len: int
    """Queries of the whole call."""


def score_spec(problem: Problem, others: MaskArrays) -> tuple[tuple[Any, ...], dict[str, Array]]:
    """Return the score's parameters in the module's order, and by name all operands and `others`: the mask's arrays."""
    ops, bias, dropout, value_dtype = problem.ops, problem.bias, problem.dropout, problem.dtype
    accumulator = problem.accumulator
    form: Any = problem.form
    kind, query, key, caps = _FORMS[type(form)], form.query, form.key, form.caps
    score_dtype = ops.dtype(query)
    if score_dtype != ops.dtype(key):
        # A parameter wider than the data, such as W of a bilinear score, has widened one of the two.
        query, key, score_dtype = ops.astype(query, accumulator), ops.astype(key, accumulator), accumulator

    def to_accumulator(x: Array | None) -> Array | None:
        return None if x is None else ops.astype(x, accumulator)

    # Parameters that the form does not have keep these values.
    activation, slope, scale, w_v, query_bias, key_bias, scales = "tanh", 0.0, 1.0, None, None, None, None
    if kind == "additive":
        activation, slope, w_v = form.activation.name, form.activation.negative_slope, to_accumulator(form.w_v)
    elif hasattr(form.scale, "shape"):
        scales = to_accumulator(ops.reshape(form.scale, form.scale.shape[:2]))  # (1, 1) or (head, group)
    else:
        scale = form.scale
    if kind == "inner":
        query_bias, key_bias = to_accumulator(form.query_bias), to_accumulator(form.key_bias)
    score = (
        *(kind, activation, slope, scale, caps, score_dtype, value_dtype),
        "float32" if bias is None else ops.dtype(bias),
        0.0 if dropout is None else dropout.probability,
        *((dropout.first_row, dropout.query_len) if isinstance(dropout, ChunkDropout) else (0, 0)),
        0 if dropout is None else dropout.seed,
    )
    arrays = {
        **{"query": query, "key": key, "value": problem.value, "query_bias": query_bias, "key_bias": key_bias},
        **{"bias": bias, "w_v": w_v, "sink": to_accumulator(problem.sink), "scales": scales},
        **others,
    }
    return score, {name: x for name, x in arrays.items() if x is not None}


# Results

# Statistics that the forward fills where requested, in its order. The log-sum-exp is row_max + log_denom outside of
# plans: autodiff passes through that sum.
STATISTICS = tuple(name for name in TABLE if name != "log_sum_exp")
# Arrays that the forward fills, in its order. `saved_scores` are before bias and cap, for the backward alone;
# `attention_scores` or `attention_weights` is the matrix that a caller requests.
FILLED = (
    *("out", "row_max", "log_denom", "saved_scores", "attention_scores", "attention_weights"),
    *(*STATISTICS, "log_sum_exp"),
)
# Arrays that the backward reads in addition to the operands, in its order.
BACKWARD_INPUTS = (
    *("out", "row_max", "log_denom", "entropy", "saved_scores", "attention_weights"),
    *("grad_out", "grad_log_sum_exp", "grad_entropy", "grad_attention_scores", "grad_attention_weights"),
)
# Arrays with a number for each pair of query and key.
PAIRS = ("saved_scores", "attention_scores", "attention_weights")
# The gradients that the module writes, in its order; those in `ALWAYS_WRITTEN` also where they are not requested.
GRADIENTS = ("query", "key", "value", "query_bias", "key_bias", "bias", "w_v", "sink", "scale")
ALWAYS_WRITTEN = frozenset(("query", "key", "value", "w_v"))

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shapes and dtypes of arrays by their names."""


def output_shapes(problem: Problem, *, saves_scores: bool = False) -> Shapes:
    """Return the shapes of the arrays that a forward fills, in the order of `FILLED`."""
    # Without a matrix its name is "attention_None", which is not in `FILLED`.
    matrices = ("saved_scores" if saves_scores else None, f"attention_{problem.matrix}")
    filled = {"out", "row_max", "log_denom", *matrices, *problem.statistics} - {"log_sum_exp"}
    columns = {"out": problem.layout.value_dim, **dict.fromkeys(PAIRS, problem.score_shape.key_len)}
    dtypes = {"out": problem.dtype}
    return {
        name: ((*problem.score_shape.rows, columns.get(name, 1)), dtypes.get(name, problem.accumulator))
        for name in FILLED
        if name in filled
    }


def result_of(problem: Problem, outputs: dict[str, Array]) -> Result:
    """Return the arrays of a forward, in the framework, as the result of `problem`."""
    statistics = {name: x for name, x in outputs.items() if name in STATISTICS}
    matrix, saved_scores = outputs.get(f"attention_{problem.matrix}"), outputs.get("saved_scores")
    return Result(outputs["out"], outputs["row_max"], outputs["log_denom"], statistics, matrix, saved_scores)


def backward_inputs(problem: Problem, result: Result, grads: RowGradients) -> dict[str, Array]:
    """Return the arrays that a backward reads in addition to the operands, by the names in `BACKWARD_INPUTS`."""
    ops, accumulator = problem.ops, problem.accumulator
    arrays = {"row_max": result.row_max, "log_denom": result.log_denom, "saved_scores": result.scores}
    arrays["grad_log_sum_exp"] = grads.log_sum_exp
    if grads.entropy is not None:
        arrays |= {"entropy": result.statistics["entropy"], "grad_entropy": grads.entropy}
    if grads.matrix is not None:
        arrays[f"grad_attention_{problem.matrix}"] = grads.matrix
        if problem.matrix == "weights":
            arrays["attention_weights"] = result.matrix
    arrays = {name: ops.astype(x, accumulator) for name, x in arrays.items() if x is not None}
    # The module always reads the gradient of the output.
    grad_out = ops.zeros(ops.shape(result.out), result.out, accumulator) if grads.out is None else grads.out
    if ops.dtype(grad_out) not in DTYPES:
        grad_out = ops.astype(grad_out, accumulator)
    return arrays | {"out": result.out, "grad_out": grad_out}


def gradient_shapes(problem: Problem, requested: frozenset[str]) -> Shapes:
    """Return the shapes of the arrays in which gradients are accumulated, in the order of `GRADIENTS`."""
    score_shape, form = problem.score_shape, problem.form
    arrays = problem.operands()
    shared_lead = _lead_of_shared_gradients(problem)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, x in arrays.items():
        if name in ("sink", "scale"):
            shapes[name] = score_shape.rows[:-1]
        elif name == "bias":
            shapes[name] = tuple(x.shape)
        elif name == "w_v":
            shapes[name] = (*shared_lead, x.shape[-1])
        elif name == "value" or form.role(name) == "key":
            shapes[name] = (*shared_lead, score_shape.key_len, *x.shape[-1:])
        else:
            shapes[name] = (*score_shape.rows, *x.shape[-1:])
    # Biases are columns (..., length, 1); the module adds to one number for each position.
    for name in ("query_bias", "key_bias"):
        if name in shapes:
            shapes[name] = shapes[name][:-1]
    filled = [name for name in GRADIENTS if name in shapes and (name in requested or name in ALWAYS_WRITTEN)]
    return {name: (shapes[name], problem.accumulator) for name in filled}


def _lead_of_shared_gradients(problem: Problem) -> tuple[int, ...]:
    """Return the leading axes (*lead, head, group) of the gradients of key, value and w_v.

    An axis is 1 where all of these arrays have size 1: the module then sums their gradients over it.
    """
    form, lead = problem.form, problem.score_shape.rows[:-1]
    shapes = [x.shape[:-2] for name, x in form.arrays().items() if form.role(name) == "key"]
    shapes.append(problem.value.shape[:-2])
    if isinstance(form, AdditiveForm) and len(form.w_v.shape) > 1:
        shapes.append((*(1 for _ in problem.score_shape.lead), *form.w_v.shape[:2]))
    return tuple(1 if all(n == 1 for n in lengths) else length for length, *lengths in zip(lead, *shapes, strict=True))


def in_shape_of_operand(problem: Problem, grad: Array, name: str, operand: Array) -> Array:
    """Return a gradient in the shape of its operand: summed over the axes along which the operand was broadcast."""
    ops, shape = problem.ops, tuple(operand.shape)
    # Biases are columns (..., length, 1), and a scale (..., 1, 1).
    if name in ("query_bias", "key_bias"):
        grad = ops.expand_dims(grad, -1)
    if name == "scale":
        grad = ops.reshape(grad, (*grad.shape, 1, 1))
    return grad if tuple(grad.shape) == shape else sum_to(ops, grad, shape)
