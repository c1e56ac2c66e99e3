"""A problem in the words of the native module: what it does not take, and what it does as memory.

Nothing is copied that lies ready: broadcast axes stay 1, strides are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnscore.frameworks.contract import Array, HostArray
from attnscore.masking import (
    And,
    Causal,
    Dense,
    Documents,
    KeyPadding,
    KeyRange,
    Mask,
    PrefixLM,
    SlidingWindow,
    ValidLens,
)
from attnscore.masking.numbers import per_batch
from attnscore.problem import Problem
from attnscore.scoring.forms import AdditiveForm, DistanceForm, InnerForm
from attnscore.tiling import TilePlan

DTYPES = frozenset(("float16", "bfloat16", "float32", "float64"))
# NumPy's dtype of a half-precision array's bits.
STORED = {"float16": "uint16", "bfloat16": "uint16"}

_FORMS: dict[type, str] = {InnerForm: "inner", AdditiveForm: "additive", DistanceForm: "distance"}
# Masks that are intervals once their numbers are known.
INTERVALS = (Causal, KeyRange, PrefixLM, SlidingWindow, ValidLens)


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
    if not all(map(ops.readable, arrays.values())):
        # Nothing below can be looked at either.
        return [*found, "arrays whose memory the CPU cannot read (on a device, traced, with tangents, byte-swapped)"]
    rest = None if problem.mask is None else problem.visibility[1]
    return found if rest is None else [*found, *_reasons_of_rest(problem, rest)]


def _reasons_of_rest(problem: Problem, rest: Mask) -> list[str]:
    parts = parts_of(rest)
    arrays = [part for part in parts if isinstance(part, (Dense, KeyPadding))]
    documents = [part for part in parts if isinstance(part, Documents)]
    others = [part for part in parts if part not in arrays and part not in documents]
    if problem.ops.deferred(problem.value, *rest.leaves()):
        # Lengths that are traced now, or not known, are intervals by the time that the kernel sees them.
        others = [part for part in others if not isinstance(part, INTERVALS)]
    found = [f"the mask is no interval of keys per row: {part!r}" for part in others]
    if len(arrays) > 1:
        found.append(f"{len(arrays)} arrays in one mask")
    if len(documents) > 1:
        found.append(f"{len(documents)} Documents in one mask")
    ops = problem.ops
    if not all(ops.readable(ops.asarray(x, problem.value)) for x in rest.arrays().values()):
        found.append("a mask whose memory the CPU cannot read")
    return found


def parts_of(mask: Mask) -> list[Mask]:
    """The masks whose AND `mask` is."""
    return [*parts_of(mask.first), *parts_of(mask.second)] if isinstance(mask, And) else [mask]


ORDER = (
    *("query", "key", "value", "query_bias", "key_bias", "bias", "mask", "query_ids", "key_ids", "start", "stop"),
    *("weights", "sink", "scales"),
)
"""The arrays that the native module reads, in the order that its stub says."""


def words(problem: Problem, plan: TilePlan) -> tuple[tuple[Any, ...], tuple[HostArray | None, ...]]:
    """What the native module is told of the score, and the memory of the arrays in `ORDER`."""
    score, arrays = told(problem, plan.rest)
    found = {name: problem.ops.memory(x) for name, x in arrays.items()}
    if "mask" in found:
        found["mask"] = found["mask"].view(np.uint8)
    for name in ("query_ids", "key_ids"):
        if name in found:
            found[name] = found[name].astype(np.int64, copy=False)
    if (weights := found.get("weights")) is not None and weights.strides[-1] != weights.itemsize:
        found["weights"] = np.ascontiguousarray(weights)
    if plan.intervals is not None:
        found["start"], found["stop"] = (np.ascontiguousarray(x, np.int64) for x in plan.intervals)
    return score, tuple(map(found.get, ORDER))


def told(problem: Problem, rest: Mask | None) -> tuple[tuple[Any, ...], dict[str, Array]]:
    """What the native module is told of the score, and the arrays by name but the intervals; `rest` of the mask."""
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
        **({} if rest is None else _rest(problem, rest)),
    }
    return score, {name: x for name, x in arrays.items() if x is not None}


def _rest(problem: Problem, rest: Mask) -> dict[str, Array]:
    """The boolean array on the axes of the grid, and the ids of queries and keys."""
    ops, grid, like = problem.ops, problem.grid, problem.value
    found = {}
    for part in parts_of(rest):
        if isinstance(part, Documents):
            keys = part.query_ids if part.key_ids is None else part.key_ids
            found["query_ids"] = per_batch(ops, grid, part.query_ids, like, flat=True)
            found["key_ids"] = per_batch(ops, grid, keys, like, flat=True)
            continue
        array = ops.asarray(part.array, like)  # type: ignore[attr-defined]
        array = array if ops.dtype(array) == "bool" else array != 0
        is_dense = isinstance(part, Dense)
        found["mask"] = grid.place(ops, array) if is_dense else grid.place_batch(ops, ops.expand_dims(array, 1))
    return found
