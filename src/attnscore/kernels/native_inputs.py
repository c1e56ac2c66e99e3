"""A problem in the words of the native module: what it does not take, and what it does as memory.

Nothing is copied that lies ready: broadcast axes stay 1, strides are the caller's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnscore.frameworks.contract import Array
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

HostArray = np.ndarray[Any, Any]

DTYPES = frozenset(("float16", "bfloat16", "float32", "float64"))
# NumPy's dtype of a half-precision array's bits.
STORED = {"float16": "uint16", "bfloat16": "uint16"}

_FORMS: dict[type, str] = {InnerForm: "inner", AdditiveForm: "additive", DistanceForm: "distance"}
# Masks that are intervals once their numbers are known.
INTERVALS = (Causal, KeyRange, PrefixLM, SlidingWindow, ValidLens)
# What the kernels cannot do yet, of "bias", "query_bias", "key_bias", "mask", "ids", "dropout", "caps", "distance" and
# the names of activations.
NOT_YET: frozenset[str] = frozenset()


def reasons(problem: Problem) -> list[str]:
    """What the native kernels do not take."""
    ops, form = problem.ops, problem.form
    if type(form) not in _FORMS:
        return [f"the score is computed in Python ({type(form).__name__})"]
    found = []
    if isinstance(form, DistanceForm) and hasattr(form.scale, "shape"):
        found.append("a scale per head of distances")
    arrays = {**form.arrays(), "value": problem.value}
    dtypes = {ops.dtype(x) for x in arrays.values()}
    if not dtypes <= DTYPES or (len(dtypes) > 1 and "float64" in dtypes):
        found.append(f"dtypes {', '.join(sorted(dtypes))}")
    for name in ("bias", "sink"):
        if (x := getattr(problem, name)) is not None:
            arrays[name] = x
            if ops.dtype(x) not in DTYPES:
                found.append(f"{name} of dtype {ops.dtype(x)}")
    if NOT_YET:
        found += [f"no native {name} yet" for name in sorted(NOT_YET & _features(problem))]
    if not all(map(ops.readable, arrays.values())):
        # Nothing below can be looked at either.
        return [*found, "arrays whose memory the CPU cannot read (on a device, traced, with tangents, byte-swapped)"]
    rest = None if problem.mask is None else problem.visibility[1]
    return found if rest is None else [*found, *_reasons_of_rest(problem, rest)]


def _reasons_of_rest(problem: Problem, rest: Mask) -> list[str]:
    parts = _parts(rest)
    arrays = [part for part in parts if isinstance(part, (Dense, KeyPadding))]
    documents = [part for part in parts if isinstance(part, Documents)]
    others = [part for part in parts if part not in arrays and part not in documents]
    if problem.ops.deferred(*rest.leaves()):
        # Lengths that are traced now are intervals by the time that the kernel sees them.
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


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.first), *_parts(mask.second)] if isinstance(mask, And) else [mask]


def _features(problem: Problem) -> set[str]:
    """What of `NOT_YET` the problem needs."""
    form, found = problem.form, set(problem.form.arrays())
    found |= {_FORMS[type(form)]} | ({"caps"} if form.caps else set())
    if isinstance(form, AdditiveForm):
        found.add(form.activation.name)
    found |= {name for name in ("bias", "dropout") if getattr(problem, name) is not None}
    if problem.mask is not None and problem.visibility[1] is not None:
        found |= {"ids" if isinstance(part, Documents) else "mask" for part in _parts(problem.visibility[1])}
    return found


def words(problem: Problem, plan: TilePlan) -> tuple[tuple[Any, ...], tuple[HostArray | None, ...]]:
    """What the native module is told of the score, and the arrays that it reads, in the order that its stub says."""
    ops, bias, dropout, value_dtype = problem.ops, problem.bias, problem.dropout, problem.dtype
    memory, sums = ops.memory, problem.accumulator
    form: Any = problem.form
    kind, query, key, caps = _FORMS[type(form)], form.query, form.key, form.caps
    score_dtype = ops.dtype(query)
    if score_dtype != ops.dtype(key):
        # A score's own arrays have made one of them wider.
        query, key, score_dtype = ops.astype(query, sums), ops.astype(key, sums), sums

    def in_sums(x: Array | None) -> HostArray | None:
        return None if x is None else memory(ops.astype(x, sums))

    activation, slope, scale, weights, query_bias, key_bias = "tanh", 0.0, 1.0, None, None, None
    if kind == "additive":
        activation, slope, weights = form.activation.name, form.activation.negative_slope, in_sums(form.w_v)
        if weights is not None and weights.strides[-1] != weights.itemsize:
            weights = np.ascontiguousarray(weights)
    else:
        scale = form.scale
    if kind == "inner":
        query_bias, key_bias = in_sums(form.query_bias), in_sums(form.key_bias)
    score = (
        *(kind, activation, slope, scale, caps, score_dtype, value_dtype),
        "float32" if bias is None else ops.dtype(bias),
        *((0.0, 0) if dropout is None else (dropout.probability, dropout.seed)),
    )
    arrays = (
        *(memory(query), memory(key), memory(problem.value), query_bias, key_bias),
        None if bias is None else memory(bias),
        *((None, None, None) if plan.rest is None else _rest(problem, plan.rest)),
        *((None, None) if plan.intervals is None else (np.ascontiguousarray(x, np.int64) for x in plan.intervals)),
        weights,
        in_sums(problem.sink),
    )
    return score, arrays


def _rest(problem: Problem, rest: Mask) -> tuple[HostArray | None, HostArray | None, HostArray | None]:
    """The boolean array as bytes on the axes of the grid, and the ids of queries and keys."""
    ops, grid, like = problem.ops, problem.grid, problem.value
    seen = query_ids = key_ids = None
    for part in _parts(rest):
        if isinstance(part, Documents):
            keys = part.query_ids if part.key_ids is None else part.key_ids
            query_ids, key_ids = (
                ops.memory(per_batch(ops, grid, ids, like, flat=True)) for ids in (part.query_ids, keys)
            )
            continue
        array = ops.asarray(part.array, like)  # type: ignore[attr-defined]
        array = array if ops.dtype(array) == "bool" else array != 0
        placed = grid.place(ops, array) if isinstance(part, Dense) else grid.place_batch(ops, ops.expand_dims(array, 1))
        seen = ops.memory(placed).view(np.uint8)
    return seen, query_ids, key_ids
