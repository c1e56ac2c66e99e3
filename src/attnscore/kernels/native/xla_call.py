"""The native kernel as a custom call of a traced program, which runs without Python.

- Intervals with traced ends are computed in the program, as arrays: the call skips tiles by them, as by intervals that
  are known on the host. Other masks are evaluated in the program (``chunked_masks``).
- No operand is copied: the layout (batch, length, head, dim) is passed as it is.
- Valid lengths are passed as they are: the call makes intervals of them, which as operations of the program would take
  as long as a tiny call.
"""

from __future__ import annotations

from typing import Any

from attnscore.backends.base import Array, SeedHalves
from attnscore.kernels.native import chunked_masks, marshalling
from attnscore.kernels.native.chunked_masks import Loop, MaskArrays
from attnscore.kernels.native.marshalling import BACKWARD_INPUTS, GRADIENTS, STATISTICS, as_operand, gradient_shapes
from attnscore.masks import Mask, lowering
from attnscore.masks.base import all_of
from attnscore.masks.dynamic_intervals import traced_lens, traced_visibility
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients

# Orders of operands and results. For each name there is a bit in the attributes `given` (operands that are passed),
# `transposed` (operands that are passed so) and `wanted` (results), see csrc/api/ffi.cc.
_OPERANDS = (*marshalling.ORDER, "seed", *(name for name in BACKWARD_INPUTS if name != "saved_scores"))
_FORWARD = ("out", "row_max", "log_denom", "attention_scores", "attention_weights", *STATISTICS)
_SCORE = ("form", "activation", "negative_slope", "scale", "caps")


def forward(problem: Problem) -> Result:
    """Run the forward as a custom call, or as one for each chunk of queries."""
    mask_arrays, mask = _mask_arrays(problem)
    if mask is None:
        return _forward(problem, mask_arrays)
    return chunked_masks.staged_forward(Loop(problem, mask_arrays, mask), _forward)


def _forward(problem: Problem, mask_arrays: MaskArrays) -> Result:
    sums, rows = problem.accumulator, (*problem.score_shape.rows, 1)
    wanted = [name for name in STATISTICS if name in problem.statistics]
    shapes = {"out": ((*rows[:-1], problem.layout.value_dim), problem.dtype)}
    shapes |= dict.fromkeys(("row_max", "log_denom", *wanted), (rows, sums))
    if problem.matrix is not None:
        shapes[f"attention_{problem.matrix}"] = ((*rows[:-1], problem.score_shape.key_len), sums)
    found = _call("forward", problem, mask_arrays, shapes, _FORWARD)
    matrix = found.pop(f"attention_{problem.matrix}", None)
    return Result(found.pop("out"), found.pop("row_max"), found.pop("log_denom"), found, matrix)


def backward(problem: Problem, result: Result, grads: RowGradients, wanted: frozenset[str]) -> dict[str, Array]:
    """Run the backward as a custom call, or as one for each chunk of queries."""
    mask_arrays, mask = _mask_arrays(problem)
    if mask is None:
        return _backward(problem, mask_arrays, result, grads, wanted)

    def run_chunk(problem: Problem, mask_arrays: MaskArrays, result: Result, grads: RowGradients) -> dict[str, Array]:
        return _backward(problem, mask_arrays, result, grads, wanted)

    return chunked_masks.staged_backward(Loop(problem, mask_arrays, mask), result, grads, wanted, run_chunk)


def _mask_arrays(problem: Problem) -> tuple[MaskArrays, Mask | None]:
    """Return the arrays of the mask by the module's names, and the part of it that has to be evaluated."""
    ops, score_shape, value = problem.ops, problem.score_shape, problem.value
    if (lens := traced_lens(ops, score_shape, value, problem.mask)) is not None:
        return {"stop": lens}, None
    ends, rest = traced_visibility(ops, score_shape, value, problem.mask)
    direct, parts = lowering.partition_staged(ops, score_shape, value, rest)
    mask_arrays = lowering.arrays(ops, score_shape, value, direct, with_evaluated=bool(parts)) if direct else {}
    if ends is not None:
        mask_arrays["start"], mask_arrays["stop"] = ends
    return mask_arrays, all_of(parts)


def _backward(
    problem: Problem, mask_arrays: MaskArrays, result: Result, grads: RowGradients, wanted: frozenset[str]
) -> dict[str, Array]:
    ops, sums, value_dim = problem.ops, problem.accumulator, problem.layout.value_dim
    known = {"row_max": result.row_max, "log_denom": result.log_denom, "grad_log_sum_exp": grads.log_sum_exp}
    if grads.entropy is not None:
        known |= {"entropy": result.statistics["entropy"], "grad_entropy": grads.entropy}
    if grads.matrix is not None:
        known[f"grad_attention_{problem.matrix}"] = grads.matrix
        if problem.matrix == "weights":
            known["attention_weights"] = result.matrix
    known = {name: ops.astype(x, sums) for name, x in known.items() if x is not None}
    grad = grads.out
    if grad is None:
        nothing = (*(1 for _ in problem.score_shape.rows[:-1]), problem.score_shape.query_len, value_dim)
        grad = ops.zeros(nothing, result.out, sums)
    known |= {"out": result.out, "grad_out": grad if ops.dtype(grad) in marshalling.DTYPES else ops.astype(grad, sums)}
    shapes = {name: (shape, sums) for name, shape in gradient_shapes(problem, wanted).items()}
    found, arrays = _call("backward", problem, mask_arrays | known, shapes, GRADIENTS), problem.operands()
    return {name: as_operand(problem, x, name, arrays[name]) for name, x in found.items() if name in wanted}


def _call(
    direction: str,
    problem: Problem,
    known: dict[str, Array],
    results: dict[str, tuple[tuple[int, ...], str]],
    places: tuple[str, ...],
) -> dict[str, Array]:
    """Run the custom call "forward" or "backward", and return its results by name.

    `known` are arrays in addition to the operands of the problem; `results` gives shapes and dtypes, in any order, and
    `places` the order in which the module writes them.
    """
    ops, dropout = problem.ops, problem.dropout
    seed = None if dropout is None or not isinstance(dropout.seed, SeedHalves) else dropout.seed
    (*score, _, _, _, probability, known_seed), arrays = marshalling.score_spec(problem, known)
    if seed is not None:
        arrays["seed"] = ops.concat([ops.reshape(half, (1,)) for half in seed], 0)
    names = [name for name in _OPERANDS if name in arrays]
    transposed = _transposed(problem)
    for name in transposed.intersection(names):
        # Back to the caller's order of axes: the compiler cancels both transpositions.
        arrays[name] = ops.swap_axes(arrays[name], -4, -2)
    attributes: dict[str, Any] = dict(zip(_SCORE, score, strict=True))
    attributes |= {
        "caps": tuple(number for cap in attributes["caps"] for number in cap),
        "scale": float(attributes["scale"]),
        "negative_slope": float(attributes["negative_slope"]),
        "dropout": float(probability),
        "seed": known_seed if seed is None else 0,
        "given": _bits(_OPERANDS, names),
        "transposed": _bits(_OPERANDS, transposed.intersection(names)),
        "wanted": _bits(places, results),
    }
    ordered = [name for name in places if name in results]
    shapes = [results[name] for name in ordered]
    found = ops.custom_call(direction, shapes, [arrays[name] for name in names], attributes)
    return dict(zip(ordered, found, strict=True))


def _transposed(problem: Problem) -> frozenset[str]:
    """Return the names of arrays of the layout (*lead, length, head, dim), which `to_canonical` has transposed."""
    layout = problem.layout
    if layout.axes < 4 or layout.head_axis != -2:
        return frozenset()
    return frozenset(("key", "value", "query", "grad_out") if layout.score_shape.groups == 1 else ("key", "value"))


def _bits(places: tuple[str, ...], names: Any) -> int:
    """Return the set of `names` as bits, by their index in `places`."""
    return sum(1 << places.index(name) for name in names)
