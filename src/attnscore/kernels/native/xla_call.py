"""The native module as a custom call of a traced program, which runs without Python.

- Intervals with traced ends are computed in the program, as arrays: the call skips tiles by them, as by intervals that
  are known on the host. Other masks are evaluated in the program (``chunked_masks``).
- No operand is copied: the layout (batch, length, head, dim) is passed as it is.
- Valid lengths are passed as they are: the call makes intervals of them, which as operations of the program would take
  as long as a tiny call.
"""

from __future__ import annotations

from typing import Any

from attnscore.backends.base import Array, Backend, SeedHalves
from attnscore.kernels.native.chunked_masks import Program
from attnscore.kernels.native.marshalling import (
    BACKWARD_INPUTS,
    FILLED,
    GRADIENTS,
    ORDER,
    MaskArrays,
    Shapes,
    score_spec,
)
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, lowering
from attnscore.masks.base import all_of
from attnscore.masks.dynamic_intervals import traced_lens, traced_visibility
from attnscore.problem.problem import Problem

# Order of the operands that a call may have. For each name there is a bit in the attributes `present_operands` and
# `transposed` (operands that are passed transposed), for each result in `requested_results`, see csrc/api/ffi.cc.
_OPERANDS = (*ORDER, "seed", *BACKWARD_INPUTS)
_SCORE = ("form", "activation", "negative_slope", "scale", "caps")


class XlaCall(Program):
    """The module, called by operations of the program."""

    def mask_arrays(self, problem: Problem, tiles: TilePlan) -> tuple[MaskArrays, Mask | None]:
        ops, score_shape, value = problem.ops, problem.score_shape, problem.value
        if (lens := traced_lens(ops, score_shape, value, problem.mask)) is not None:
            return {"stop": lens}, None
        ends, remaining_mask = traced_visibility(ops, score_shape, value, problem.mask)
        direct, evaluated = lowering.partition_staged(ops, score_shape, value, remaining_mask)
        # With evaluated parts, `mask` stays free for their booleans, which `chunked_masks` writes.
        arrays = lowering.arrays(ops, score_shape, value, direct, with_evaluated=bool(evaluated)) if direct else {}
        if ends is not None:
            arrays["start"], arrays["stop"] = ends
        return arrays, all_of(evaluated)

    def evaluate(self, problem: Problem, tiles: TilePlan, mask: Mask, start: Any, size: int) -> Array:
        ops, score_shape = problem.ops, problem.score_shape
        unmasked = lowering.evaluate(ops, score_shape, problem.value, mask, (start, size))
        missing = len(score_shape.rows) + 1 - len(unmasked.shape)
        return ops.reshape(unmasked, (*(1,) * missing, *unmasked.shape))

    def buffers(self, problem: Problem, shapes: Shapes) -> tuple[Backend, dict[str, Array]]:
        ops = problem.ops
        return ops, {name: ops.zeros(shape, problem.value, dtype) for name, (shape, dtype) in shapes.items()}

    def run(
        self, problem: Problem, mask_arrays: MaskArrays, shapes: Shapes, inputs: dict[str, Array] | None
    ) -> dict[str, Array]:
        direction, results = ("forward", FILLED) if inputs is None else ("backward", GRADIENTS)
        ops, dropout = problem.ops, problem.dropout
        seed = None if dropout is None or not isinstance(dropout.seed, SeedHalves) else dropout.seed
        # Left out: the three dtypes, which the operands have, and a chunk's first row and the call's number of queries,
        # which only dropout reads: a chunk has none in a program (`marshalling._staged_reasons`).
        (*score, _, _, _, probability, _, _, known_seed), arrays = score_spec(problem, mask_arrays)
        arrays |= inputs or {}
        if seed is not None:
            arrays["seed"] = ops.concat([ops.reshape(half, (1,)) for half in seed], 0)
        names = [name for name in _OPERANDS if name in arrays]
        transposed = _transposed_names(problem)
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
            "present_operands": _bit_mask(_OPERANDS, names),
            "transposed": _bit_mask(_OPERANDS, transposed.intersection(names)),
            "requested_results": _bit_mask(results, shapes),
        }
        outputs = ops.custom_call(direction, list(shapes.values()), [arrays[name] for name in names], attributes)
        return dict(zip(shapes, outputs, strict=True))

    def in_framework(self, problem: Problem, x: Array, dtype: str) -> Array:
        return x


def _transposed_names(problem: Problem) -> frozenset[str]:
    """Return the names of arrays of the layout (*lead, length, head, dim), which `to_canonical` has transposed."""
    layout = problem.layout
    if layout.axes < 4 or layout.head_axis != -2:
        return frozenset()
    # `to_canonical` also splits the heads of a query with groups, which no transposition undoes.
    return frozenset(("key", "value", "query", "grad_out") if layout.score_shape.groups == 1 else ("key", "value"))


def _bit_mask(order: tuple[str, ...], names: Any) -> int:
    """Return the set of `names` as bits, by their index in `order`."""
    return sum(1 << order.index(name) for name in names)
