"""The native kernel in a staged program: a host callback, which the framework calls when the program runs.

The callback rebuilds the problem over NumPy views of the framework's buffers: masks are read and tiles are planned at
run time, so traced lengths skip tiles too, and lengths that the graph does not know are known. The streaming kernel is
staged as the alternative, for programs on machines without host callbacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray, SeedHalves
from attnscore.base.cache import BoundedCache
from attnscore.base.layout import AxisLayout, CanonicalLayout, is_unknown
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel
from attnscore.kernels.native.marshalling import (
    Shapes,
    arrays_of,
    backward_inputs,
    output_shapes,
    result_of,
)
from attnscore.kernels.native.plan import NativePlan, reusable_plan
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import ValidLens
from attnscore.masks.base import check_shapes
from attnscore.masks.cached import intervals_of
from attnscore.masks.shape_spec import PLACEHOLDER
from attnscore.problem.problem import Problem, broadcast_lead
from attnscore.problem.results import Result, RowGradients


def _rebuilder(problem: Problem, ops: Backend) -> Callable[[Sequence[Array]], Problem]:
    """Return a function that builds the problem from arrays in the order of `arrays_of`, for the backend `ops`.

    On the host it checks the shapes of the mask against lengths that the graph did not know.
    """
    names, dropout = tuple(problem.operands()), problem.dropout
    has_traced_seed = dropout is not None and isinstance(dropout.seed, SeedHalves)
    unknown = any(map(is_unknown, (*problem.score_shape.rows, problem.score_shape.key_len)))
    specs = () if problem.mask is None else problem.mask.shapes(problem.score_shape)
    is_checked = ops is not problem.ops and not all(spec.is_known for spec in specs)
    # `rebuild` holds static arrays of the mask, but no operand: a framework may never release the function.
    form, mask = problem.form.with_arrays(dict.fromkeys(problem.form.arrays())), problem.mask
    # NumPy's are copied, as a caller may write to them between two runs. None stands for an array that each run passes.
    leaves = [] if mask is None else mask.leaves()
    static_leaves = [np.array(x) if isinstance(x, np.ndarray) else backends.host(x) for x in leaves]
    if mask is not None:
        mask = mask.with_leaves(iter([PLACEHOLDER] * len(static_leaves)))
    absent = dict.fromkeys(("score", "query", "key", "value", "bias", "sink", "dropout", "mask"))
    # Unknown sizes may be tensors, so that `rebuild` does not hold them either.
    layout = _with_lengths(problem.layout, (0,) * len(problem.score_shape.lead), 0, 0) if unknown else problem.layout
    empty = dataclasses.replace(problem, ops=ops, form=form, layout=layout, **absent)  # type: ignore[arg-type]
    dropout = dataclasses.replace(dropout, seed=0) if dropout is not None and has_traced_seed else dropout

    def rebuild(arrays: Sequence[Array]) -> Problem:
        by_name, remaining = dict(zip(names, arrays, strict=False)), iter(arrays[len(names) :])
        fields: dict[str, Any] = {name: by_name.pop(name) for name in ("value", "bias", "sink") if name in by_name}
        fields["form"] = new_form = form.with_arrays(by_name)
        if mask is not None:
            fields["mask"] = mask.with_leaves(iter([next(remaining) if x is None else x for x in static_leaves]))
        fields["dropout"] = dropout
        if dropout is not None and has_traced_seed:
            low, high = remaining
            seed = int(low) | int(high) << 32 if isinstance(low, (np.ndarray, np.generic)) else SeedHalves(low, high)
            fields["dropout"] = dataclasses.replace(dropout, seed=seed)
        if unknown:
            query, key, value = (
                ops.shape(x) for x in (*(new_form.arrays()[n] for n in ("query", "key")), fields["value"])
            )
            lead = broadcast_lead({"query": query[:-4], "key": key[:-4], "value": value[:-4]})
            fields["layout"] = _with_lengths(layout, lead, query[-2], key[-2])
        rebuilt = dataclasses.replace(empty, **fields)
        if is_checked and rebuilt.mask is not None:
            check_shapes(rebuilt.mask, rebuilt.score_shape)
        return rebuilt

    return rebuild


def _with_lengths(layout: AxisLayout, lead: tuple[Any, ...], query_len: Any, key_len: Any) -> AxisLayout:
    score_shape = dataclasses.replace(layout.score_shape, lead=lead, query_len=query_len, key_len=key_len)
    return dataclasses.replace(layout, score_shape=score_shape)


@dataclass(frozen=True, eq=False)
class _Plans:
    """Execution plans of a staged call, by the shapes of the arrays that its callback gets."""

    kernel: Kernel
    rebuild: Callable[[Sequence[HostArray]], Problem]
    names: tuple[str, ...]
    """Names of the operands, in the order in which the callback gets them; arrays of the mask follow, then a seed."""
    has_lens: bool
    """Whether valid lengths are the only array of the mask that the callback gets."""
    seed: int | None
    """The seed of the dropout; None where the callback gets it as two arrays."""
    _plans: BoundedCache[NativePlan | None] = field(default_factory=lambda: BoundedCache(16))

    @classmethod
    def of(cls, kernel: Kernel, problem: Problem, rebuild: Callable[[Sequence[HostArray]], Problem]) -> _Plans | None:
        """Return the plans of a staged call; None where it has none, so that each run is planned anew."""
        mask, seed = problem.mask, 0 if problem.dropout is None else problem.dropout.seed
        has_array = mask is not None and any(backends.host(x) is None for x in mask.leaves())
        has_lens = has_array and isinstance(mask, ValidLens) and mask.query_lens is None
        # The program expects gradients in the dtype of sums, and a plan returns them in the dtypes of the operands.
        operands = problem.operands()
        has_other_dtypes = {problem.ops.dtype(x) for x in operands.values()} != {problem.accumulator}
        if (has_array and not has_lens) or has_other_dtypes:
            return None
        return cls(kernel, rebuild, tuple(operands), has_lens, None if isinstance(seed, SeedHalves) else seed)

    def run(
        self, arrays: Sequence[HostArray], inputs: dict[str, HostArray], names: Collection[str]
    ) -> dict[str, HostArray] | None:
        """Run the forward, or the backward on `inputs`, which computes the gradients `names`; return results by name.

        Statistics get their last axis of 1 on the canonical axes. None where the module cannot read these layouts, or a
        plan cannot hold the mask.
        """
        key = tuple((x.shape, x.strides) for x in arrays)
        plan = self._plans.get_or_compute(key, lambda: self._build(arrays))
        if plan is None:
            return None
        computation = plan.computation
        by_name, remaining = dict(zip(self.names, arrays, strict=False)), iter(arrays[len(self.names) :])
        operand_names = [operand.name for operand in plan.operands]
        operands = [by_name[name] for name in operand_names]
        bounds = plan.bounds_of(next(remaining)) if self.has_lens else None
        seed = self.seed
        if seed is None:
            low, high = remaining
            seed = int(low) | int(high) << 32
        if not inputs:
            outputs, saved = plan.forward(operands, bounds, seed, saves=True)
            filled = dict(zip((*computation.returned, *computation.saved), (*outputs, *saved), strict=True))
            return {name: x if name in ("out", "attention_weights") else x[..., None] for name, x in filled.items()}
        # A plan reads saved arrays in C order, as its forward allocates them.
        read = {**inputs, **{name: np.ascontiguousarray(inputs[name]) for name in computation.saved}}
        is_requested = [name in names for name in operand_names]
        gradients = plan.backward(operands, bounds, [*map(read.get, computation.backward_inputs)], seed, is_requested)
        return {name: grad for name, grad in zip(operand_names, gradients, strict=True) if grad is not None}

    def _build(self, arrays: Sequence[HostArray]) -> NativePlan | None:
        """Build the plan for arrays of these layouts; None where it cannot read them as they are, or hold the mask."""
        problem = self.rebuild(arrays)
        mask, caller_arrays = problem.mask, dict(zip(self.names, arrays, strict=False))
        if self.has_lens:
            caller_arrays["valid_lens"] = arrays[len(self.names)]
        elif mask is not None:
            # The only form in which a plan keeps a mask.
            intervals = intervals_of(mask, problem.score_shape)
            mask = mask if intervals is None else intervals
        # Query and key as the program lowered them. The program adds up the log-sum-exp itself, and a kernel in it
        # saves no scores (`Native.forward`).
        planned = dataclasses.replace(
            problem,
            layout=CanonicalLayout.of(problem.layout),
            query=problem.form.query,
            key=problem.form.key,
            mask=mask,
            statistics=tuple(name for name in problem.statistics if name != "log_sum_exp"),
        )
        return reusable_plan(self.kernel, planned, tiling.plan(planned), caller_arrays, may_save_scores=False)


@dataclass(frozen=True)
class HostCallback:
    """A kernel of eager calls, staged as a host callback."""

    kernel: Kernel

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        """Stage the forward; `tiles` are not read: a run plans its own, or repeats the plan of an earlier run."""
        return result_of(problem, self._stage(problem, output_shapes(problem), {}))

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        """Stage the backward; `tiles` are not read, as in `forward`."""
        operands = problem.operands()
        shapes = {name: (tuple(x.shape), problem.accumulator) for name, x in operands.items() if name in requested}
        return self._stage(problem, shapes, backward_inputs(problem, result, grads))

    def _stage(self, problem: Problem, shapes: Shapes, inputs: dict[str, Array]) -> dict[str, Array]:
        """Stage a forward, or with `inputs` a backward, and return its results of these shapes by name."""
        rebuild_on_host = _rebuilder(problem, problem.ops.at_run_time(backends.load("numpy")))
        rebuild_in_program = _rebuilder(problem, problem.ops)
        plans = _Plans.of(self.kernel, problem, rebuild_on_host)
        # The functions hold no tensor, and sizes in shapes may be tensors.
        names, input_names, count = tuple(shapes), tuple(inputs), len(inputs)

        def run(*arrays: HostArray) -> tuple[HostArray, ...]:
            by_input, others = dict(zip(input_names, arrays, strict=False)), arrays[count:]
            by_name = None if plans is None else plans.run(others, by_input, names)
            if by_name is None:
                by_name = _run(self.kernel, rebuild_on_host(others), by_input, names)
            return tuple(by_name[name] for name in names)

        def alternative(*arrays: Array) -> tuple[Array, ...]:
            by_input, rebuilt = dict(zip(input_names, arrays, strict=False)), rebuild_in_program(arrays[count:])
            by_name = _run(self.kernel.differentiable, rebuilt, by_input, names)
            return tuple(by_name[name] for name in names)

        arrays = [*inputs.values(), *arrays_of(problem, without_known=True)]
        results = problem.ops.host_callback(run, list(shapes.values()), arrays, alternative)
        return dict(zip(shapes, results, strict=True))


def _run(kernel: Kernel, problem: Problem, inputs: dict[str, Array], names: Collection[str]) -> dict[str, Array]:
    """Run the forward, or with `inputs` the backward, which computes the gradients `names`."""
    tiles, matrix_name = tiling.plan(problem), f"attention_{problem.matrix}"
    if inputs:
        # The inverse of `backward_inputs`.
        incoming = ("grad_out", "grad_log_sum_exp", "grad_entropy", f"grad_{matrix_name}")
        grads = RowGradients(*map(inputs.get, incoming))
        return kernel.backward(problem, tiles, result_of(problem, inputs), grads, frozenset(names))
    result = kernel.forward(problem, tiles)
    matrix = {} if result.matrix is None else {matrix_name: result.matrix}
    return {"out": result.out, "row_max": result.row_max, "log_denom": result.log_denom, **matrix, **result.statistics}
