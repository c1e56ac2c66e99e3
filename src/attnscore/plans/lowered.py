"""Calls whose score is lowered to another score of computed queries and keys: bilinear, cosine, projected additive.

- Lowering runs in the framework's operations, which its autograd records: PyTorch's own nodes of a projection cost a
  tiny backward 20 us less than a VJP in Python.
- Nothing reads the keys behind the valid lengths of a call: they are not projected where that saves time.
- The plan of the call holds the plan of the lowered call, whose computed arrays are in C order: one signature finds
  both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnscore import scores
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base.arguments import CallArguments
from attnscore.kernels import Kernel, Plan
from attnscore.kernels.native.plan import NativePlan
from attnscore.kernels.tiling import TilePlan
from attnscore.plans.padding import may_save_time, project_rows, real_rows
from attnscore.problem.problem import Problem
from attnscore.scores import Additive, Bilinear, Cosine, ScaledDot
from attnscore.scores.base import widen
from attnscore.scores.forms import InnerForm

SCORES = (Additive, Bilinear, Cosine)
"""Scores that may project or normalise queries and keys."""


def prepare(kernel: Kernel, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Plan:
    """Return a plan as `Kernel.prepare` does, of a call whose score may be lowered to another of computed arrays."""
    ops, score, form, layout = problem.ops, problem.score, problem.form, problem.layout
    computed = form.query is not problem.query, form.key is not problem.key
    # The lowered call is checked like any other (`build_problem`): query, key and value have one dtype.
    if not any(computed) or ops.dtype(form.query) != problem.dtype:
        return kernel.prepare(problem, tiles, arrays)
    query, key, *w_v = lower(ops, score, arrays["query"], arrays["key"], computed)
    lowered_arrays = {"query": query, "key": key} | ({"w_v": w_v[0]} if w_v else {})
    canonical = {
        name: layout.to_canonical(ops, lowered_arrays[name], is_query=name == "query") for name in ("query", "key")
    }
    form = form.with_arrays({**lowered_arrays, **canonical})
    if isinstance(form, InnerForm):
        score_of_plan: Any = ScaledDot(form.scale)
    else:
        score_of_plan = replace(score, w_v=None, W_q=None, W_k=None, bias=None)
    layout = replace(layout, dim=query.shape[-1], key_dim=key.shape[-1])
    # The same problem with the computed arrays: the kernel reads nothing else of a call.
    lowered_problem = replace(problem, layout=layout, score=score_of_plan, form=form, **canonical)
    plan = kernel.prepare(lowered_problem, tiles, {**arrays, **lowered_arrays})
    if type(plan) is not NativePlan:
        return kernel.prepare(problem, tiles, arrays)
    # `plain_product` enters no `numeric_scope`: calls with a signature are outside of PyTorch's autocast.
    is_matrix_product = type(score) is Bilinear and ops.dtype(score.W) == accumulator(problem.dtype)
    # Normalised keys (cosine) are no product.
    is_projected = computed[1] and type(score) is not Cosine
    # Keys (batch, key, features) alone: with heads there is one more axis.
    has_padded_keys = is_projected and plan.computation.lens_rows > 0 and layout.axes == 3
    leaves_out_padding = has_padded_keys and may_save_time(ops, arrays["key"], key.shape[-1])
    return LoweredPlan(ops, plan, score_of_plan, computed, is_matrix_product, leaves_out_padding)


def lower(
    ops: Backend, score: Any, query: Array, key: Array, computed: tuple[bool, bool], rows: Array | None = None
) -> list[Array]:
    """Return query and key of the lowered form on the caller's axes, and w_v of an additive score.

    `computed` says which of the two are computed: these are in C order, and a caller's array keeps its layout, which is
    in the signature. `rows` are the keys to project (`plans.padding.real_rows`); None: all.
    """
    with ops.numeric_scope():
        if computed[0]:
            query = ops.in_c_order(score.project_query(ops, query))
        if rows is not None:
            key = project_rows(ops, key, rows, lambda x: score.project_key(ops, x))
        elif computed[1]:
            key = ops.in_c_order(score.project_key(ops, key))
        if type(score) is not Additive:
            return [query, key]
        # In the dtype of the query; autocast is off for the cast as well.
        return [query, key, widen(ops, query, score.w_v)[1]]


@dataclass(frozen=True, eq=False)
class LoweredPlan(Plan):
    """Plan of calls whose score is lowered: the framework computes the lowered arrays, the native plan the rest."""

    ops: Backend
    plan: NativePlan
    """Plan of the lowered call."""
    lowered: Any
    """The lowered score; w_v is None, as a plan holds no array."""
    computed: tuple[bool, bool]
    """Whether the lowering computes query and key."""
    is_matrix_product: bool = False
    """Whether the lowering is one matrix product of query or key with `score.W`, without a cast."""
    leaves_out_padding: bool = False
    """Whether calls project their real keys alone, where their lengths leave so few that it saves time."""

    def __repr__(self) -> str:
        return f"LoweredPlan(to {type(self.lowered).__name__}, {self.plan!r})"

    @property
    def cache_weight(self) -> int:
        return self.plan.cache_weight

    def run(self, arguments: CallArguments) -> Any:
        ops, (query, key, value, score, mask, lens, bias, sink, seed) = self.ops, arguments
        if type(score) is str:
            score = scores.resolve(score)
        units = self.plan.operands[1].canonical[-1]  # features of a projected key
        key_rows = real_rows(ops, key, lens, units) if self.leaves_out_padding else None
        lowered_operands = self._project_by_product(score, query, key) if key_rows is None else None
        query, key, *w_v = lowered_operands or lower(ops, score, query, key, self.computed, key_rows)
        score = replace(self.lowered, w_v=w_v[0]) if w_v else self.lowered
        # As in `attend`, without the constructor.
        lowered_arguments = query, key, value, score, mask, lens, bias, sink, seed
        return self.plan.run(tuple.__new__(CallArguments, lowered_arguments))

    def _project_by_product(self, score: Any, query: Array, key: Array) -> list[Array] | None:
        """Return query and key of a bilinear score; None where `lower` has to cast, or to isolate non-finite rows."""
        if not self.is_matrix_product:
            return None
        ops, is_query = self.ops, self.computed[0]
        x, matrix = (query, score.W) if is_query else (key, ops.matrix_transpose(score.W))
        if (product := ops.plain_product(x, matrix, self.plan.computation.threads())) is None:
            return None
        return [product, key] if is_query else [query, product]
