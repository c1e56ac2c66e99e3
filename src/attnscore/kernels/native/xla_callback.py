"""The native kernel in a staged program: a host callback, which the framework calls when the program runs.

The callback rebuilds the problem over NumPy views of the framework's buffers: masks are read and tiles are planned at
run time, so traced lengths skip tiles too, and lengths that the graph does not know are known. The streaming kernel is
staged as the alternative, for programs on machines without host callbacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray, SeedHalves
from attnscore.base.cache import BoundedCache
from attnscore.base.layout import AxisLayout, CanonicalLayout
from attnscore.base.sizes import broadcast, is_unknown
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel
from attnscore.kernels.native.plan import NativePlan, reusable_plan
from attnscore.masks import ValidLens
from attnscore.masks.base import check_shapes
from attnscore.masks.cached import intervals_of
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients


def _passed(problem: Problem) -> list[Array]:
    """Return the arrays passed to the callback: the operands, unknown arrays of the mask, a traced seed."""
    found = [*problem.operands().values()]
    if problem.mask is not None:
        found += [x for x in problem.mask.leaves() if backends.host(x) is None]
    if problem.dropout is not None and isinstance(problem.dropout.seed, SeedHalves):
        found += problem.dropout.seed
    return found


def _rebuilder(problem: Problem, ops: Backend) -> Callable[[Sequence[Array]], Problem]:
    """Return a function that builds the problem from arrays in the order of `_passed`, for the backend `ops`."""
    names, dropout = tuple(problem.operands()), problem.dropout
    seeded = dropout is not None and isinstance(dropout.seed, SeedHalves)
    unknown = any(map(is_unknown, (*problem.score_shape.rows, problem.score_shape.key_len)))
    # The function holds no operand, as a framework may never release it. It holds known arrays of the mask.
    form, mask = problem.form.with_arrays(dict.fromkeys(problem.form.arrays())), problem.mask
    # Copied, as a caller may write to an array of NumPy between two runs of the program.
    leaves = [] if mask is None else mask.leaves()
    known = [np.array(x) if isinstance(x, np.ndarray) else backends.host(x) for x in leaves]
    if mask is not None:
        mask = mask.with_leaves(iter([np.zeros(0)] * len(known)))
    absent = dict.fromkeys(("score", "query", "key", "value", "bias", "sink", "dropout", "mask"))
    layout = _measured(problem.layout, (0,) * len(problem.score_shape.lead), 0, 0) if unknown else problem.layout
    empty = dataclasses.replace(problem, ops=ops, form=form, layout=layout, **absent)  # type: ignore[arg-type]
    dropout = dataclasses.replace(dropout, seed=0) if dropout is not None and seeded else dropout

    def rebuild(arrays: Sequence[Array]) -> Problem:
        named, left = dict(zip(names, arrays, strict=False)), iter(arrays[len(names) :])
        fields: dict[str, Any] = {name: named.pop(name) for name in ("value", "bias", "sink") if name in named}
        fields["form"] = new_form = form.with_arrays(named)
        if mask is not None:
            fields["mask"] = mask.with_leaves(iter([next(left) if x is None else x for x in known]))
        fields["dropout"] = dropout
        if dropout is not None and seeded:
            low, high = left
            seed = int(low) | int(high) << 32 if isinstance(low, (np.ndarray, np.generic)) else SeedHalves(low, high)
            fields["dropout"] = dataclasses.replace(dropout, seed=seed)
        if unknown:
            query, key, value = (
                ops.shape(x) for x in (*(new_form.arrays()[n] for n in ("query", "key")), fields["value"])
            )
            lead = broadcast(query[:-4], key[:-4], value[:-4])
            fields["layout"] = _measured(layout, lead, query[-2], key[-2])
        return dataclasses.replace(empty, **fields)

    return rebuild


def _measured(layout: AxisLayout, lead: tuple[Any, ...], query_len: Any, key_len: Any) -> AxisLayout:
    score_shape = dataclasses.replace(layout.score_shape, lead=lead, query_len=query_len, key_len=key_len)
    return dataclasses.replace(layout, score_shape=score_shape)


def _on_host(problem: Problem) -> Callable[[Sequence[HostArray]], Problem]:
    return _rebuilder(problem, problem.ops.at_run_time(backends.load("numpy")))


def _checked_on_host(problem: Problem) -> Callable[[Sequence[HostArray]], Problem]:
    """Return `_on_host`, with a check of mask shapes against lengths where the graph did not know them."""
    on_host = _on_host(problem)
    if problem.mask is None or all(part.is_known for part in problem.mask.shapes(problem.score_shape)):
        return on_host

    def checked(arrays: Sequence[HostArray]) -> Problem:
        rebuilt = on_host(arrays)
        if rebuilt.mask is not None:
            check_shapes(rebuilt.mask, rebuilt.score_shape)
        return rebuilt

    return checked


@dataclass(frozen=True, eq=False)
class _Plans:
    """Execution plans of a staged call, by the shapes of the arrays that its callback gets."""

    kernel: Kernel
    rebuild: Callable[[Sequence[HostArray]], Problem]
    names: tuple[str, ...]
    """Names of the operands, in the order in which the callback gets them; arrays of the mask follow, then a seed."""
    has_lens: bool
    """Whether the only array of the mask is that of its valid lengths."""
    seed: int | None
    """The seed of the dropout; None where the callback gets it as two arrays."""
    _known: BoundedCache[NativePlan | None] = field(default_factory=lambda: BoundedCache(16))

    @classmethod
    def of(cls, kernel: Kernel, problem: Problem, rebuild: Callable[[Sequence[HostArray]], Problem]) -> _Plans | None:
        """Return the plans of a staged call; None where it has none, so that each run is planned anew."""
        mask, seed = problem.mask, 0 if problem.dropout is None else problem.dropout.seed
        has_array = mask is not None and any(backends.host(x) is None for x in mask.leaves())
        has_lens = has_array and isinstance(mask, ValidLens) and mask.query_lens is None
        # Gradients are returned in the dtype of sums.
        if (has_array and not has_lens) or problem.dtype != problem.accumulator:
            return None
        return cls(kernel, rebuild, tuple(problem.operands()), has_lens, None if isinstance(seed, SeedHalves) else seed)

    def bound(self, arrays: Sequence[HostArray]) -> BoundPlan | None:
        """Return the plan for these layouts, bound to these arrays; None where the module cannot read them so."""
        key = tuple((x.shape, x.strides) for x in arrays)
        plan = self._known.get_or_compute(key, lambda: self._build(arrays))
        if plan is None:
            return None
        named, left = dict(zip(self.names, arrays, strict=False)), iter(arrays[len(self.names) :])
        bounds = plan.bounds_of(next(left)) if self.has_lens else None
        seed = self.seed
        if seed is None:
            low, high = left
            seed = int(low) | int(high) << 32
        return BoundPlan(plan, [named[operand.name] for operand in plan.operands], bounds, seed % 2**63)

    def _build(self, arrays: Sequence[HostArray]) -> NativePlan | None:
        problem = self.rebuild(arrays)
        mask, given = problem.mask, dict(zip(self.names, arrays, strict=False))
        if self.has_lens:
            given["valid_lens"] = arrays[len(self.names)]
        elif mask is not None:
            intervals = intervals_of(mask, problem.score_shape)
            mask = mask if intervals is None else intervals
        planned = dataclasses.replace(
            problem,
            layout=CanonicalLayout.of(problem.layout),
            query=problem.form.query,
            key=problem.form.key,
            mask=mask,
            statistics=tuple(name for name in problem.statistics if name != "log_sum_exp"),
        )
        plan = reusable_plan(self.kernel, planned, tiling.plan(planned), given)
        return None if plan is None else dataclasses.replace(plan, saves_scores=False)


class BoundPlan(NamedTuple):
    """Execution plan of a staged call, and the arrays of one run."""

    plan: NativePlan
    operands: list[HostArray]
    bounds: tuple[HostArray, HostArray] | None
    seed: int

    def forward(self) -> Result:
        """Run the forward; statistics get the last axis of 1 that they have on the canonical axes."""
        plan = self.plan
        outputs, saved = plan.forward(self.operands, self.bounds, self.seed, saves=True)
        found = dict(zip((*plan.returned, *plan.saved), (*outputs, *saved), strict=True))
        out, matrix = found.pop("out"), found.pop("attention_weights", None)
        numbers = {name: x[..., None] for name, x in found.items()}
        return Result(out, numbers.pop("row_max"), numbers.pop("log_denom"), numbers, matrix)

    def backward(self, result: Result, grads: RowGradients, wanted: Collection[str]) -> dict[str, HostArray]:
        """Return the gradients by name."""
        known = {
            "out": result.out,
            **{"row_max": np.ascontiguousarray(result.row_max), "log_denom": np.ascontiguousarray(result.log_denom)},
            **{"entropy": result.statistics.get("entropy"), "attention_weights": result.matrix},
            **{"grad_out": grads.out, "grad_log_sum_exp": grads.log_sum_exp, "grad_entropy": grads.entropy},
            "grad_attention_weights": grads.matrix,
        }
        names = [operand.name for operand in self.plan.operands]
        chosen = [name in wanted for name in names]
        given = [known[name] for name in self.plan.known]
        found = self.plan.backward(self.operands, self.bounds, given, self.seed, chosen)
        return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def forward(kernel: Kernel, problem: Problem) -> Result:
    """Stage `kernel.forward` as a host callback."""
    sums, rows = problem.accumulator, (*problem.score_shape.rows, 1)
    names = tuple(name for name in problem.statistics if name != "log_sum_exp")
    on_host, in_program = _checked_on_host(problem), _rebuilder(problem, problem.ops)
    plans = _Plans.of(kernel, problem, on_host)

    def outputs(found: Result) -> tuple[Array, ...]:
        matrix = () if found.matrix is None else (found.matrix,)
        return found.out, found.row_max, found.log_denom, *(found.statistics[name] for name in names), *matrix

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        if plans is not None and (planned := plans.bound(arrays)) is not None:
            return outputs(planned.forward())
        rebuilt = on_host(arrays)
        return outputs(kernel.forward(rebuilt, tiling.plan(rebuilt)))

    results = [((*rows[:-1], problem.layout.value_dim), problem.dtype), *(((rows, sums),) * (2 + len(names)))]
    if problem.matrix is not None:
        results.append(((*rows[:-1], problem.score_shape.key_len), sums))

    def alternative(*arrays: Array) -> tuple[Array, ...]:
        rebuilt = in_program(arrays)
        return outputs(kernel.differentiable.forward(rebuilt, tiling.plan(rebuilt)))

    out, row_max, log_denom, *numbers = problem.ops.host_callback(run, results, _passed(problem), alternative)
    matrix = None if problem.matrix is None else numbers.pop()
    return Result(out, row_max, log_denom, dict(zip(names, numbers, strict=True)), matrix)


def backward(
    kernel: Kernel, problem: Problem, result: Result, grads: RowGradients, wanted: frozenset[str]
) -> dict[str, Array]:
    """Stage `kernel.backward` as a host callback."""
    on_host, in_program = _on_host(problem), _rebuilder(problem, problem.ops)
    entropy = result.statistics.get("entropy")
    weights = result.matrix if problem.matrix == "weights" and grads.matrix is not None else None
    optional = [grads.out, grads.log_sum_exp, grads.entropy, grads.matrix, entropy, weights]
    rows = [result.out, result.row_max, result.log_denom, *(x for x in optional if x is not None)]
    given, count = [x is not None for x in optional], len(rows)
    names = [name for name in problem.operands() if name in wanted]

    plans = _Plans.of(kernel, problem, on_host)

    def read(rows: Sequence[Array]) -> tuple[Result, RowGradients]:
        left = iter(rows)
        out, row_max, log_denom = next(left), next(left), next(left)
        *incoming, entropy, matrix = (next(left) if is_here else None for is_here in given)
        known = Result(out, row_max, log_denom, {} if entropy is None else {"entropy": entropy}, matrix)
        return known, RowGradients(*incoming)

    def gradients(kernel: Kernel, rebuilt: Problem, rows: Sequence[Array]) -> tuple[Array, ...]:
        found = kernel.backward(rebuilt, tiling.plan(rebuilt), *read(rows), frozenset(names))
        return tuple(found[name] for name in names)

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        rows, others = arrays[:count], arrays[count:]
        if plans is None or (planned := plans.bound(others)) is None:
            return gradients(kernel, on_host(others), rows)
        found = planned.backward(*read(rows), names)
        return tuple(found[name] for name in names)

    shapes = [(tuple(x.shape), problem.accumulator) for name, x in problem.operands().items() if name in wanted]

    def alternative(*arrays: Array) -> tuple[Array, ...]:
        return gradients(kernel.differentiable, in_program(arrays[count:]), arrays[:count])

    found = problem.ops.host_callback(run, shapes, [*rows, *_passed(problem)], alternative)
    return dict(zip(names, found, strict=True))
