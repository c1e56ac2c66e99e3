"""A problem in the words of the native module: what it does not take, and what it does as memory.

Nothing is copied that lies ready: broadcast axes stay 1, strides are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnscore.backends.base import Array, HostArray
from attnscore.core import tiled
from attnscore.core.problem import Problem
from attnscore.core.tiling import TilePlan
from attnscore.kernels.native.xla_callback import arrays_of
from attnscore.masks import lowering as masks
from attnscore.scores.forms import AdditiveForm, DistanceForm, InnerForm

DTYPES = frozenset(("float16", "bfloat16", "float32", "float64"))
# NumPy's dtype of a half-precision array's bits.
STORED = {"float16": "uint16", "bfloat16": "uint16"}

_FORMS: dict[type, str] = {InnerForm: "inner", AdditiveForm: "additive", DistanceForm: "distance"}

# TensorFlow and JAX take over memory that begins at a multiple of this many bytes, and copy other.
ALIGNED = 64
# Below this a copy costs less than slicing.
_LARGE = 2**14


def aligned(make: Callable[..., HostArray], shape: Sequence[int], dtype: str) -> HostArray:
    """``make(shape, dtype)``, of ``numpy.empty`` or ``numpy.zeros``, at an address that any framework takes over.

    NumPy's own large arrays begin 16 bytes into a page.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LARGE:
        return make(shape, dtype)
    whole = make(size + ALIGNED, np.uint8)
    start = -whole.ctypes.data % ALIGNED
    return whole[start : start + size].view(dtype).reshape(shape)


def reasons(problem: Problem) -> list[str]:
    """What the native kernels do not take."""
    ops, form = problem.ops, problem.form
    if type(form) not in _FORMS:
        return [f"the score is computed in Python ({type(form).__name__})"]
    found = []
    arrays = {**form.arrays(), "value": problem.value}
    dtypes = {ops.dtype(x) for x in arrays.values()}
    # Sums are in the dtype of the value: a score's own arrays may be wider, but nothing narrower than a float64 value.
    if not dtypes <= DTYPES or (len(dtypes) > 1 and problem.dtype == "float64"):
        found.append(f"dtypes {', '.join(sorted(dtypes))}")
    for name in ("bias", "sink"):
        if (x := getattr(problem, name)) is not None:
            arrays[name] = x
            if ops.dtype(x) not in DTYPES:
                found.append(f"{name} of dtype {ops.dtype(x)}")
    if not all(map(ops.has_cpu_buffer, arrays.values())):
        # Nothing below can be looked at either.
        return [*found, "arrays whose memory the CPU cannot read (on a device, traced, with tangents, byte-swapped)"]
    rest = None if problem.mask is None else problem.visibility[1]
    if rest is None:
        return found
    if not isinstance(rest, masks.DIRECT) and _is_staged(problem):
        known, has_dropout = problem.visibility[0], problem.dropout is not None
        found += masks.staged_reasons(ops, problem.score_shape, problem.value, rest, known, has_dropout=has_dropout)
    return found + masks.unreadable_reasons(ops, problem.value, rest)


def _is_staged(problem: Problem) -> bool:
    """Return whether the numbers of the call are known only when a staged program runs."""
    ops, operands = problem.ops, tiled.operands(problem).values()
    # A tape around traced arrays has ended by the time that a kernel runs.
    return ops.needs_host_callback(*map(ops.stop_gradient, operands), *arrays_of(problem)[len(operands) :])


ORDER = (
    *("query", "key", "value", "query_bias", "key_bias", "bias", "mask", "query_ids", "key_ids", "start", "stop"),
    *("weights", "sink", "scales"),
)
"""The arrays that the native module reads, in the order that its stub says."""


def words(problem: Problem, plan: TilePlan) -> tuple[tuple[Any, ...], tuple[HostArray | None, ...]]:
    """What the native module is told of the score, and the memory of the arrays in `ORDER`."""
    ops, score_shape, value = problem.ops, problem.score_shape, problem.value
    parts, evaluated = masks.partition(plan.rest)
    of_mask = masks.arrays(ops, score_shape, value, parts, with_evaluated=bool(evaluated)) if parts else {}
    score, arrays = told(problem, of_mask)
    found = {name: problem.ops.memory(x) for name, x in arrays.items()}
    if "mask" in found:
        found["mask"] = found["mask"].view(np.uint8)
    for name in ("query_ids", "key_ids"):
        if name in found:
            found[name] = found[name].astype(np.int64, copy=False)
    if (weights := found.get("weights")) is not None and weights.strides[-1] != weights.itemsize:
        found["weights"] = np.ascontiguousarray(weights)
    if plan.interval_set is not None:
        found["start"], found["stop"] = plan.interval_set.with_holes
    return score, tuple(map(found.get, ORDER))


def told(problem: Problem, others: dict[str, Array]) -> tuple[tuple[Any, ...], dict[str, Array]]:
    """What the native module is told of the score, and the arrays by name, with `others`, as those of the mask."""
    ops, bias, dropout, value_dtype = problem.ops, problem.bias, problem.dropout, problem.dtype
    sums = problem.accumulator
    form: Any = problem.form
    kind, query, key, caps = _FORMS[type(form)], form.query, form.key, form.caps
    score_dtype = ops.dtype(query)
    if score_dtype != ops.dtype(key):
        # A score's own arrays have made one of them wider.
        query, key, score_dtype = ops.astype(query, sums), ops.astype(key, sums), sums

    def in_sums(x: Array | None) -> Array | None:
        return None if x is None else ops.astype(x, sums)

    activation, slope, scale, weights, query_bias, key_bias, scales = "tanh", 0.0, 1.0, None, None, None, None
    if kind == "additive":
        activation, slope, weights = form.activation.name, form.activation.negative_slope, in_sums(form.w_v)
    elif hasattr(form.scale, "shape"):
        scales = in_sums(ops.reshape(form.scale, form.scale.shape[:2]))
    else:
        scale = form.scale
    if kind == "inner":
        query_bias, key_bias = in_sums(form.query_bias), in_sums(form.key_bias)
    score = (
        *(kind, activation, slope, scale, caps, score_dtype, value_dtype),
        "float32" if bias is None else ops.dtype(bias),
        *((0.0, 0) if dropout is None else (dropout.probability, dropout.seed)),
    )
    arrays = {
        **{"query": query, "key": key, "value": problem.value, "query_bias": query_bias, "key_bias": key_bias},
        **{"bias": bias, "weights": weights, "sink": in_sums(problem.sink), "scales": scales},
        **others,
    }
    return score, {name: x for name, x in arrays.items() if x is not None}
