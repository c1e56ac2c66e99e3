"""A part of a call: some queries against some keys of the whole sequence; and the exact merge of parts.

- Kernels run the problem of a part as any other. Dropout is by the positions in the whole sequence.
- Parts over disjoint keys are merged as tiles of keys are, statistics included: by the online softmax, whose state
  after the keys of a part follows from its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from attnscore import kernels
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import Kernel
from attnscore.masks import IntervalSet, Mask
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.dropout import Dropout, PairDropout
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result
from attnscore.problem.statistics import ACCUMULATORS

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


def kernel_of(name: str, problem: Problem) -> Kernel:
    """Return the kernel of this name, or the best one, for a part; raise KernelUnavailable where it takes no forms."""
    kernel = kernels.choose(name, problem)
    if not kernel.has_vjp:
        raise KernelUnavailable(message("kernel", "one that takes lowered keys", repr(name)))
    return kernel


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


def state_of(ops: Backend, result: Result, count: Array | None = None) -> RowState:
    """Return the state of the online softmax after the keys of a part, from the result over them without a sink.

    `out` holds the total, which `finish` turns into the keys' share of the softmax (1 without a sink). A caller that
    merges outputs by `online_softmax.merge` sets `out` to the output of the part times the total instead. `count`, the
    number of unmasked keys of each query, is required with `mean_score` and `var_score`.
    """
    log_denom, total = result.log_denom, ops.exp(result.log_denom)
    rows = {**result.statistics, "log_denom": log_denom, "total": total, "count": count}
    names = online_softmax.needed_accumulators(tuple(result.statistics))
    sums = {name: ACCUMULATORS[name].of_result(ops, rows) for name in names}
    return RowState(ops.where(log_denom == -math.inf, -math.inf, result.row_max), total, total, sums)


def counts_of(ops: Backend, shape: ScoreShape, key_len: int, intervals: IntervalSet | None, like: Array) -> Array:
    """Return the number of unmasked keys of each query, in the shape of `like`, by their intervals; None: all keys."""
    if intervals is None:
        return ops.full(ops.shape(like), key_len, like)
    lens = np.maximum(intervals.stop - intervals.start, 0).sum(0)[..., None]
    counts = shape.batch_to_canonical(ops, ops.asarray(lens, like))
    return ops.broadcast_to(ops.astype(counts, ops.dtype(like)), ops.shape(like))


def finish(ops: Backend, state: RowState, sink: Array | None, statistics: tuple[str, ...]) -> Result:
    """Return the result of the queries from the state after all keys, with these statistics; `sink`: (head, group)."""
    if sink is not None:
        sink = ops.astype(ops.reshape(sink, (*ops.shape(sink), 1, 1)), ops.dtype(state.total))
    return Result(*online_softmax.finish(ops, state, sink, statistics))
