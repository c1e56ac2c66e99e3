"""A part of a call: some queries against some keys of the whole sequence; and the exact merge of parts.

- Kernels run the problem of a part as any other. Dropout is by the positions in the whole sequence.
- Parts over disjoint keys are merged as tiles of keys are, statistics included: by the online softmax, whose state
  after the keys of a part follows from its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from attnscore import kernels
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import SinglePlan, tiling
from attnscore.masks import Mask
from attnscore.parallel.shard import Shard
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.dropout import Dropout, PairDropout
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result
from attnscore.problem.statistics import ACCUMULATORS, needs_counts, with_global_keys
from attnscore.scores.forms import InnerForm

SOFTMAX_ALONE = "a normalizer other than the softmax, by whose log-sum-exp parts are merged"
"""Why a call whose parts are merged cannot run."""


def problem_of_part(
    problem: Problem, shape: ScoreShape, arrays: Mapping[str, Array], *, mask: Mask | None, bias: Array | None,
    dropout: Dropout | PairDropout | None, sink: Array | None, statistics: tuple[str, ...] | None = None,
) -> Problem:  # fmt: skip
    """Return a part of a problem, over arrays by their names in the lowered form; `statistics` None: the same."""
    form = problem.form.with_arrays({name: arrays[name] for name in problem.form.arrays()})
    return dataclasses.replace(
        problem, layout=dataclasses.replace(problem.layout, score_shape=shape), query=form.query, key=form.key,
        value=arrays["value"], form=form, mask=mask, bias=bias, dropout=dropout, sink=sink,
        statistics=problem.statistics if statistics is None else statistics,
    )  # fmt: skip


def plan_of_part(kernel_name: str, problem: Problem) -> SinglePlan:
    """Return the plan of a part by the kernel of this name, or by the best one.

    Raises
    ------
    KernelUnavailable
        The kernel takes no lowered forms.
    """
    kernel = kernels.choose(kernel_name, problem)
    if not kernel.has_vjp:
        raise KernelUnavailable(message("kernel", "one that takes lowered keys", repr(kernel_name)))
    return SinglePlan(kernel, problem, tiling.plan(problem))


def run_part(plan: SinglePlan, cols: Shard | Array) -> Result:
    """Return the result of a part over the keys `cols`, with indices of keys counted in the whole sequence."""
    result, ops, like = plan(), plan.problem.ops, plan.problem.value

    def positions() -> Array:
        return cols.positions(like) if isinstance(cols, Shard) else ops.asarray(cols, like)

    return dataclasses.replace(result, statistics=with_global_keys(ops, result.statistics, positions))


def dropout_of(
    problem: Problem, sequence_shape: ScoreShape, rows: Array, cols: Array,
    heads: Callable[[Array], Array] | None = None,
) -> PairDropout | None:  # fmt: skip
    """Return the dropout of the pairs at these positions of the whole sequence, with the bits of one device.

    `heads` selects the part's heads from an array of all heads.
    """
    ops, dropout = problem.ops, problem.dropout
    if dropout is None:
        return None
    first = dropouts.rows_of_matrices(ops, sequence_shape, problem.value)
    first = first if heads is None else heads(first)
    return PairDropout(dropout.probability, dropout.seed, first + ops.reshape(rows, (-1, 1)), cols[None])


def arrays_of(result: Result) -> dict[str, Array]:
    """Return the arrays of a result by name."""
    return {"out": result.out, "log_denom": result.log_denom, "row_max": result.row_max, **result.statistics}


def result_of(arrays: Mapping[str, Array]) -> Result:
    """Return the result of these arrays: the inverse of `arrays_of`."""
    statistics = {**arrays}
    return Result(statistics.pop("out"), statistics.pop("row_max"), statistics.pop("log_denom"), statistics)


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
    """Return how many keys each query of a part attends: the sum of exp(0)."""
    ops, shape, dtype = part.ops, part.score_shape, part.accumulator
    # Some scores have no single array of queries or keys.
    query = ops.zeros((*shape.rows, 1), part.value, dtype)
    key = ops.zeros((*shape.lead, shape.heads, 1, shape.key_len, 1), part.value, dtype)
    bias = None if part.bias is None else ops.where(part.bias == -math.inf, part.bias, 0.0)
    layout, form = dataclasses.replace(part.layout, value_dim=1), InnerForm(query, key)
    zeros = dataclasses.replace(
        part, layout=layout, query=query, key=key, value=ops.astype(part.value[..., :1], dtype), form=form, bias=bias,
        dropout=None, statistics=(),
    )  # fmt: skip
    counts = ops.exp(kernels.single_plan(zeros)().log_sum_exp)
    return ops.astype(ops.astype(counts + 0.5, "int64"), dtype)


def finish(ops: Backend, state: RowState, sink: Array | None, statistics: tuple[str, ...]) -> Result:
    """Return the result of the queries from the state after all keys, with these statistics; `sink`: (head, group)."""
    if sink is not None:
        sink = ops.astype(ops.reshape(sink, (*ops.shape(sink), 1, 1)), ops.dtype(state.total))
    return Result(*online_softmax.finish(ops, state, sink, statistics))
