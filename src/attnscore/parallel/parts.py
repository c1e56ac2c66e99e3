"""A call on one rank: its parts, some queries against some keys of the whole sequence, and their exact merge.

- Kernels run the problem of a part as any other. Dropout is by the positions in the whole sequence.
- PyTorch and JAX add the exchange of rows: one class for each mode.
- Parts over disjoint keys are merged as tiles of keys are, statistics included: by the online softmax, whose state
  after the keys of a part follows from its result.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnscore import kernels
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import SinglePlan
from attnscore.masks import EvaluatedFunction, Mask
from attnscore.masks.base import atoms_of
from attnscore.parallel.plan import Exchange
from attnscore.parallel.shard import Shard
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.dropout import PairDropout
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result
from attnscore.problem.statistics import ACCUMULATORS, needs_counts, with_global_keys
from attnscore.scores.forms import PARAMETER, InnerForm

SOFTMAX_ALONE = "a normalizer other than the softmax, by whose log-sum-exp parts are merged"
"""Why a call whose parts are merged cannot run."""


@dataclass(frozen=True, eq=False)
class Call(ABC):
    """One call of attention over all ranks; this rank returns the result of the queries that it holds."""

    plan: Exchange
    sequence_shape: ScoreShape
    """Shape of the scores of the whole sequence."""
    problem: Problem
    """Problem of the rank's own rows, with the mask of the whole sequence, and a bias over all keys."""
    kernel: str
    bias_has_queries: bool
    """Whether each rank has the bias of its own queries, not one bias for all."""

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        """Return why a call cannot run in this mode; the problem has the mask and the bias of the whole sequence."""
        return ()

    @abstractmethod
    def compute(self) -> Result:
        """Return the result of the rank's queries, with its gradient."""

    @property
    def part_statistics(self) -> tuple[str, ...]:
        """The statistics of each part."""
        return self.problem.statistics

    def operands(self, *roles: str) -> dict[str, Array]:
        """Return the operands of some roles: "query", "key" (the value too), "shared" (no rows), "bias", "sink"."""
        own_roles = {"value": "key", "bias": "bias", "sink": "sink"}
        operands, role = self.problem.operands(), self.problem.form.role
        return {name: x for name, x in operands.items() if (own_roles.get(name) or role(name)) in roles}

    def plan_of(
        self, arrays: Mapping[str, Array], rows: Shard | Array, cols: Shard | Array, *, mask: Mask | None,
        bias: Array | None, own_heads: Callable[[Array], Array] | None = None,
    ) -> SinglePlan:  # fmt: skip
        """Return the plan of a part over `arrays`, operands of the queries and keys at positions `rows` and `cols`.

        `own_heads` selects the part's heads from an array of all heads. Raises KernelUnavailable for the dense kernel,
        which evaluates a score itself, not its lowered form.
        """
        problem, ops, like = self.problem, self.problem.ops, self.problem.value
        heads = self.sequence_shape.heads // (1 if own_heads is None else self.plan.ranks)
        shape = dataclasses.replace(self.sequence_shape, heads=heads, query_len=len(rows), key_len=len(cols))
        dropout = problem.dropout
        if dropout is not None:
            # Which weights are dropped depends on the pair's row, counted over all heads, and column in the whole.
            first_rows = dropouts.rows_of_matrices(ops, self.sequence_shape, like)
            first_rows = first_rows if own_heads is None else own_heads(first_rows)
            row, col = ops.reshape(positions_of(ops, rows, like), (-1, 1)), positions_of(ops, cols, like)[None]
            dropout = PairDropout(dropout.probability, dropout.seed, first_rows + row, col)
        form = problem.form.with_arrays({name: arrays[name] for name in problem.form.arrays()})
        part = dataclasses.replace(
            problem, layout=dataclasses.replace(problem.layout, score_shape=shape), query=form.query, key=form.key,
            value=arrays["value"], form=form, mask=mask, bias=bias, dropout=dropout, sink=arrays.get("sink"),
            statistics=self.part_statistics,
        )  # fmt: skip
        plan = kernels.single_plan(part, self.kernel)
        if not plan.kernel.has_vjp:
            raise KernelUnavailable(message("kernel", "one that takes lowered keys", repr(self.kernel)))
        return plan


class HeadsCall(Call):
    """Exchange rows for heads (Ulysses): each rank computes all queries of some KV heads, and returns the rows."""

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        reasons, atoms = [], [] if problem.mask is None else atoms_of(problem.mask)
        # A function may read the index of the head.
        if sequence_shape.has_heads and any(x.heads > 1 or isinstance(x, EvaluatedFunction) for x in atoms):
            reasons.append("each head has a mask of its own")
        if any(PARAMETER in name and math.prod(x.shape) > 1 for name, x in problem.form.arrays().items()):
            reasons.append("each head may have parameters of its own")
        return tuple(reasons)

    @abstractmethod
    def to_heads(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return all rows of the rank's heads, from the rank's rows of all heads; arrays of one head go to all."""

    @abstractmethod
    def to_rows(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the rank's queries of all heads, from all queries of its heads."""

    @abstractmethod
    def own_heads(self, x: Array, axis: int = -4) -> Array:
        """Return the rank's heads of an array."""

    def compute(self) -> Result:
        problem, moved = self.problem, self.operands("query", "key", *["bias"] * self.bias_has_queries)
        arrays = {name: self._own_heads_of(name, x) for name, x in problem.operands().items() if name not in moved}
        arrays |= self.to_heads(moved)
        rows, cols = (Shard.whole(n) for n in (self.sequence_shape.query_len, self.sequence_shape.key_len))
        bias, own_heads = arrays.get("bias"), self.own_heads
        result = self.plan_of(arrays, rows, cols, mask=problem.mask, bias=bias, own_heads=own_heads)()
        outputs = self.to_rows({"out": result.out, **result.statistics})
        # Nothing reads row_max and log_denom after this: they still have the rank's heads.
        return Result(outputs.pop("out"), result.row_max, result.log_denom, outputs)

    def _own_heads_of(self, name: str, x: Array) -> Array:
        """Return the rank's heads of an array without rows: sink, bias, parameters of the form."""
        axis = x.ndim - 4 if name == "bias" else 0
        has_heads = x.ndim >= (2 if name == "sink" else 3) and x.shape[axis] == self.sequence_shape.heads > 1
        return self.own_heads(x, axis) if has_heads else x


def positions_of(ops: Backend, rows: Shard | Array, like: Array) -> Array:
    """Return global positions as an array of the framework."""
    return rows.positions(like) if isinstance(rows, Shard) else ops.asarray(rows, like)


def run_part(plan: SinglePlan, cols: Shard | Array) -> Result:
    """Return the result of a part over the keys `cols`, with indices of keys counted in the whole sequence."""
    result, ops, like = plan(), plan.problem.ops, plan.problem.value
    statistics = with_global_keys(ops, result.statistics, lambda: positions_of(ops, cols, like))
    return dataclasses.replace(result, statistics=statistics)


def arrays_of(result: Result) -> dict[str, Array]:
    """Return the arrays of a result by name, but the log-sum-exp, which follows from two of them."""
    statistics = {name: x for name, x in result.statistics.items() if name != "log_sum_exp"}
    return {"out": result.out, "log_denom": result.log_denom, "row_max": result.row_max, **statistics}


def result_of(arrays: Mapping[str, Array]) -> Result:
    """Return the result of these arrays, with the log-sum-exp: the inverse of `arrays_of`."""
    statistics = {**arrays}
    out, row_max, log_denom = (statistics.pop(name) for name in ("out", "row_max", "log_denom"))
    return Result(out, row_max, log_denom, {**statistics, "log_sum_exp": row_max + log_denom})


# ---- merging


def state_of_part(plan: SinglePlan, cols: Shard | Array) -> RowState:
    """Return the state of the online softmax after the keys `cols` of a part, which has no sink."""
    ops, result = plan.problem.ops, run_part(plan, cols)
    log_denom, total = result.log_denom, ops.exp(result.log_denom)
    count = key_counts(plan.problem) if needs_counts(result.statistics) else None
    rows = {**result.statistics, "log_denom": log_denom, "total": total, "count": count}
    names = online_softmax.needed_accumulators(tuple(result.statistics))
    sums = {name: ACCUMULATORS[name].of_result(ops, rows) for name in names}
    out = ops.astype(result.out, ops.dtype(total)) * total
    return RowState(ops.where(log_denom == -math.inf, -math.inf, result.row_max), total, out, sums)


def key_counts(part: Problem) -> Array:
    """Return how many keys each query of a part attends: the sum of exp(score) where all scores are 0, rounded."""
    ops, shape, dtype = part.ops, part.score_shape, part.accumulator
    # Some scores have no single array of queries or keys.
    query = ops.zeros((*shape.rows, 1), part.value, dtype)
    key = ops.zeros((*shape.lead, shape.heads, 1, shape.key_len, 1), part.value, dtype)
    bias = None if part.bias is None else ops.where(part.bias == -math.inf, part.bias, 0.0)
    layout, form = dataclasses.replace(part.layout, value_dim=1), InnerForm(query, key)
    zeros = dataclasses.replace(
        part, layout=layout, query=query, key=key, value=key, form=form, bias=bias,
        dropout=None, statistics=(),
    )  # fmt: skip
    counts = ops.exp(kernels.single_plan(zeros)().log_sum_exp)
    return ops.astype(ops.astype(counts + 0.5, "int64"), dtype)


def finish(ops: Backend, state: RowState, sink: Array | None, statistics: tuple[str, ...]) -> Result:
    """Return the result from the state after all keys, with the log-sum-exp and `statistics`; `sink`: (head, group)."""
    if sink is not None:
        sink = ops.astype(ops.reshape(sink, (*ops.shape(sink), 1, 1)), ops.dtype(state.total))
    out, row_max, log_denom, rows = online_softmax.finish(ops, state, sink, statistics)
    return Result(out, row_max, log_denom, {**rows, "log_sum_exp": row_max + log_denom})
