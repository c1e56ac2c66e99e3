"""The plan of repeated calls on a GPU: the forward's launch of one call, repeated with the arrays of the next call.

- For scaled products under a mask that the host knows, or none; any other call is checked and laid out anew.
- Calls of one signature differ in pointers alone: the plan holds strides, tiles, their ends and the grid.
- The backward runs as in a call without a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnscore.backends.base import Array, DifferentiableOp
from attnscore.base.arguments import CallArguments
from attnscore.kernels.base import Kernel, Plan, SinglePlan
from attnscore.kernels.tiling import TilePlan
from attnscore.kernels.triton import launch
from attnscore.kernels.triton.operands import Operand, Rows, operand
from attnscore.kernels.triton.tiles import Tile
from attnscore.masks.cached import CachedMask
from attnscore.problem.problem import Problem
from attnscore.scores.forms import InnerForm

SIDES = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class TritonPlan(Plan, DifferentiableOp):
    """The plan. It holds the shapes and strides of the caller's tensors, but none of their memory."""

    op: SinglePlan
    """Plan of the first call, without memory, for the backward."""
    operands: launch.Operands
    tile: Tile
    architecture: int
    out: Operand
    out_shape: tuple[int, ...]
    """Shape of the output on the caller's axes."""
    compile_constants: dict[str, Any]
    """Compile-time constants of the forward."""

    differentiable_count = 2  # output and log-denominator
    saved_count = 3  # the maximum of each query too

    def __repr__(self) -> str:
        return f"TritonPlan({self.op!r}, {self.tile})"

    @property
    def cache_weight(self) -> int:
        # A unit is about 2 KB; the intervals of a mask count as 32 bytes for each query.
        intervals = self.operands.intervals
        return 1 if intervals is None else 1 + intervals.start.numel() // 64

    def run(self, arguments: CallArguments) -> Any:
        output, *_ = self.op.problem.ops.differentiable(self, arguments[:3])  # query, key, value
        return output

    def forward(self, arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return output, on the caller's axes, log-denominator and maximum of each query."""
        query, value, operands, rows = arrays[0], arrays[2], self.operands, self.op.problem.score_shape.rows
        out = value.new_empty(self.out_shape)
        row_max, log_denom = (value.new_empty((*rows, 1), dtype=torch.float32) for _ in range(2))
        with launch.device_scope(query):
            inputs = operands.inputs(self.tile)
            sides = {name: getattr(inputs, name)._replace(data=x) for name, x in zip(SIDES, arrays, strict=True)}
            # The user may have allowed TF32 meanwhile, or forbidden it.
            constants = self.compile_constants | {"PRECISION": launch.precision_of(query, self.architecture)}
            launch.run_forward(
                operands, self.tile, inputs._replace(**sides), self.out._replace(data=out), Rows(row_max, log_denom),
                constants,
            )  # fmt: skip
        return out, log_denom, row_max

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        requested: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        """Return the gradients of `arrays`, on the caller's axes."""
        problem = self.op.problem
        ops, layout = problem.ops, problem.layout
        views = [layout.to_canonical(ops, x, is_query=k == 0) for k, x in enumerate(arrays)]
        out, *rows = outputs
        grad_out = None if grads[0] is None else layout.output_to_canonical(ops, grads[0])
        saved = layout.output_to_canonical(ops, out), *rows
        gradients = self.op.backward(views, saved, (grad_out, *grads[1:]), requested)
        return tuple(
            None if grad is None else layout.gradient_from_canonical(ops, grad, x.shape)
            for grad, x in zip(gradients, arrays, strict=True)
        )


def reusable_plan(kernel: Kernel, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> TritonPlan | None:
    """Return the plan of all calls of this call's signature, or None where each of them is laid out anew."""
    form, layout, shape = problem.form, problem.layout, problem.score_shape
    if set(arrays) != set(SIDES) or type(form) is not InnerForm:
        return None
    if layout.is_length_before_heads:
        return None  # `TritonPlan.forward` writes its output with heads before the length
    if form.caps or not {"query_bias", "key_bias"}.isdisjoint(form.arrays()):
        return None
    other_options = (problem.dropout, problem.normalizer, problem.matrix, *problem.statistics)
    if any(x is not None for x in other_options) or not (problem.mask is None or type(problem.mask) is CachedMask):
        return None
    operands = launch.operands_of(problem, tiles, launch.RUNNER)
    sides = {name: getattr(operands.arrays, name) for name in SIDES}
    if any(x.data.data_ptr() != arrays[name].data_ptr() for name, x in sides.items()):
        return None  # copied, as no single stride describes its leading axes
    if not operands.matrices * operands.sizes.n_q * operands.sizes.n_k:
        return None
    tile, like = operands.tile("forward"), problem.value
    out = torch.empty((*shape.rows, layout.value_dim), dtype=like.dtype, device="meta")
    without_memory = {name: x._replace(data=_without_memory(x.data)) for name, x in sides.items()}
    form, value = form.part(lambda x, _: _without_memory(x)), _without_memory(like)
    op = SinglePlan(kernel, dataclasses.replace(problem, query=form.query, key=form.key, value=value, form=form), tiles)
    return TritonPlan(
        op=op,
        operands=dataclasses.replace(operands, arrays=operands.arrays._replace(**without_memory)),
        tile=tile,
        architecture=operands.runner.architecture(like),
        out=operand(out, shape.lead, shape.heads, shape.groups, shape.query_len),
        out_shape=tuple(layout.from_canonical(problem.ops, out).shape),
        compile_constants=launch.forward_constants(operands, tile),
    )


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
