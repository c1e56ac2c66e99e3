"""The native kernel as a part of a program that is being traced: a custom call, which the compiled program makes alone.

- Intervals whose numbers are traced are computed in the program, as arrays: the call then skips tiles by them, as it
  does by those that the host knows. Other masks are evaluated in the program (``native_loops``).
- Nothing is copied for it: a layout (batch, length, head, dim) is handed over as it lies.
"""

from __future__ import annotations

from typing import Any

from attnscore.backends.base import Array, SeedHalves
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients, operands
from attnscore.kernels.native import chunked_masks_xla as loops
from attnscore.kernels.native import operands as inputs
from attnscore.kernels.native.chunked_masks_xla import Loop, Sight
from attnscore.kernels.native.results import GRADIENTS, STATISTICS, as_operand, gradient_shapes
from attnscore.masks import Mask
from attnscore.masks import lowering as masks
from attnscore.masks.dynamic_intervals import traced_visibility

# The places of operands and results are bits of the attributes `given`, `turned` and `wanted` (csrc/ffi.cc).
_OPERANDS = (
    *(*inputs.ORDER, "seed", "out", "row_max", "log_denom", "entropy", "attention_weights"),
    *("grad_out", "grad_log_sum_exp", "grad_entropy", "grad_attention_scores", "grad_attention_weights"),
)
_FORWARD = ("out", "row_max", "log_denom", *STATISTICS, "attention_scores", "attention_weights")
_SCORE = ("form", "activation", "negative_slope", "scale", "caps")


def forward(problem: Problem) -> Result:
    """The forward as a custom call, or one for each strip of rows."""
    sight, parts = _sight(problem)
    return loops.forward(Loop.of(problem, sight, parts), _forward) if parts else _forward(problem, sight)


def _forward(problem: Problem, sight: Sight) -> Result:
    sums, rows = problem.accumulator, (*problem.score_shape.rows, 1)
    wanted = [name for name in STATISTICS if name in problem.statistics]
    shapes = {"out": ((*rows[:-1], problem.layout.value_dim), problem.dtype)}
    shapes |= dict.fromkeys(("row_max", "log_denom", *wanted), (rows, sums))
    if problem.matrix is not None:
        shapes[f"attention_{problem.matrix}"] = ((*rows[:-1], problem.score_shape.key_len), sums)
    found = _call("forward", problem, sight, shapes, _FORWARD)
    matrix = found.pop(f"attention_{problem.matrix}", None)
    return Result(found.pop("out"), found.pop("row_max"), found.pop("log_denom"), found, matrix)


def backward(problem: Problem, result: Result, grads: RowGradients, wanted: frozenset[str]) -> dict[str, Array]:
    """The backward as a custom call, or one for each strip of rows."""
    sight, parts = _sight(problem)
    if not parts:
        return _backward(problem, sight, result, grads, wanted)

    def strip(problem: Problem, sight: Sight, result: Result, grads: RowGradients) -> dict[str, Array]:
        return _backward(problem, sight, result, grads, wanted)

    return loops.backward(Loop.of(problem, sight, parts), result, grads, wanted, strip)


def _sight(problem: Problem) -> tuple[Sight, list[Mask]]:
    """The mask by the module's names, and what of it has to be evaluated."""
    ops, score_shape, value = problem.ops, problem.score_shape, problem.value
    ends, rest = traced_visibility(ops, score_shape, value, problem.mask)
    told, parts = masks.partition_staged(ops, score_shape, value, rest)
    sight = masks.arrays(ops, score_shape, value, told, with_evaluated=bool(parts)) if told else {}
    if ends is not None:
        sight["start"], sight["stop"] = ends
    return sight, parts


def _backward(
    problem: Problem, sight: Sight, result: Result, grads: RowGradients, wanted: frozenset[str]
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
    known |= {"out": result.out, "grad_out": grad if ops.dtype(grad) in inputs.DTYPES else ops.astype(grad, sums)}
    shapes = {name: (shape, sums) for name, shape in gradient_shapes(problem, wanted).items()}
    found, arrays = _call("backward", problem, sight | known, shapes, GRADIENTS), operands(problem)
    return {name: as_operand(problem, x, name, arrays[name]) for name, x in found.items() if name in wanted}


def _call(
    direction: str,
    problem: Problem,
    known: dict[str, Array],
    results: dict[str, tuple[tuple[int, ...], str]],
    places: tuple[str, ...],
) -> dict[str, Array]:
    ops, dropout = problem.ops, problem.dropout
    seed = None if dropout is None or not isinstance(dropout.seed, SeedHalves) else dropout.seed
    (*score, _, _, _, probability, number), arrays = inputs.told(problem, known)
    if seed is not None:
        arrays["seed"] = ops.concat([ops.reshape(word, (1,)) for word in seed], 0)
    names = [name for name in _OPERANDS if name in arrays]
    turned = _turned(problem)
    for name in turned.intersection(names):
        # Back to the caller's order of axes: the compiler finds that nothing has to be moved.
        arrays[name] = ops.swap_axes(arrays[name], -4, -2)
    attributes: dict[str, Any] = dict(zip(_SCORE, score, strict=True))
    attributes |= {
        "caps": tuple(number for cap in attributes["caps"] for number in cap),
        "scale": float(attributes["scale"]),
        "negative_slope": float(attributes["negative_slope"]),
        "dropout": float(probability),
        "seed": number if seed is None else 0,
        "axes": len(problem.score_shape.rows) + 1,
        "given": _bits(_OPERANDS, names),
        "turned": _bits(_OPERANDS, turned.intersection(names)),
        "wanted": _bits(places, results),
    }
    ordered = [name for name in places if name in results]
    shapes = [results[name] for name in ordered]
    found = ops.custom_call(direction, shapes, [arrays[name] for name in names], attributes)
    return dict(zip(ordered, found, strict=True))


def _turned(problem: Problem) -> frozenset[str]:
    """Names of arrays that the caller has as (*lead, length, head, dim), and that `to_canonical` has transposed."""
    layout = problem.layout
    if layout.axes < 4 or layout.head_axis != -2:
        return frozenset()
    return frozenset(("key", "value", "query", "grad_out") if layout.score_shape.groups == 1 else ("key", "value"))


def _bits(places: tuple[str, ...], names: Any) -> int:
    return sum(1 << places.index(name) for name in names)
