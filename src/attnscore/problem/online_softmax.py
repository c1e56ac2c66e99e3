"""The online softmax: start, update, merge, finish; the rule for fully masked queries.

For each query the state holds the running maximum m, total = sum exp(s - m) and the unnormalised output, all rescaled
by exp(m_old - m_new) when the maximum grows. Accumulators of statistics (statistics.py) are carried along.

The rule for fully masked queries: a query without an unmasked key, or with scores of -inf alone, has output 0 and
log-sum-exp -inf. Two lines implement it: `safe_max` (subtract 0 instead of a maximum of -inf) and `finish` (divide by 1
instead of a total of 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnscore.backends.base import Array, Backend
from attnscore.problem.statistics import ACCUMULATORS, TABLE, Part, Row, Sums, Tile

NEG_INF = float("-inf")


class RowState(NamedTuple):
    """Each query after some of its keys; every array is (..., query, 1) but `out` (..., query, value_dim)."""

    max: Array
    total: Array
    out: Array
    sums: dict[str, Sums]
    """Sums of the accumulators that the requested statistics need, by name."""


def safe_max(ops: Backend, maximum: Array) -> Array:
    """Return the number to subtract from the scores of a query: its maximum, or 0 where that is -inf."""
    return ops.where(ops.equal(maximum, NEG_INF), 0.0, maximum)


def needed_accumulators(statistics: tuple[str, ...]) -> list[str]:
    """Return the accumulators that these statistics need."""
    names = {TABLE[name].accumulator for name in statistics}
    return [name for name in ACCUMULATORS if name in names]


def start(
    ops: Backend, rows: tuple[int, ...], value_dim: int, like: Array, dtype: str, statistics: tuple[str, ...]
) -> RowState:
    """Return the state before the first key."""
    shape = (*rows, 1)
    return RowState(
        max=ops.full(shape, NEG_INF, like, dtype),
        total=ops.zeros(shape, like, dtype),
        out=ops.zeros((*rows, value_dim), like, dtype),
        sums={
            name: tuple(ops.full(shape, x, like, dtype) for x in ACCUMULATORS[name].initial)
            for name in needed_accumulators(statistics)
        },
    )


def update(
    ops: Backend,
    state: RowState,
    scores: Array,
    unmasked: Array | None,
    first: Any,
    pool: Callable[[Array], Array],
    statistics: tuple[str, ...],
) -> RowState:
    """Return the state after one more tile of scores, -inf where masked, whose keys begin at `first`.

    `pool` maps exp(s - max) to the output of the tile.
    """
    # No result depends on the maximum that is subtracted, so it gets no gradient.
    maximum = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    safe = safe_max(ops, maximum)
    logits = scores - safe
    weights = ops.exp(logits)
    tile = Tile(scores, unmasked, first, safe, logits, weights)
    sums = {name: ACCUMULATORS[name].of_tile(ops, tile) for name in needed_accumulators(statistics)}
    total = ops.sum(weights, axis=-1, keepdims=True)
    return merge(ops, state, RowState(maximum, total, pool(weights), sums))


def merge(ops: Backend, first: RowState, second: RowState) -> RowState:
    """Return the state after the (disjoint) keys of both."""
    maximum = ops.maximum(first.max, second.max)
    safe = safe_max(ops, maximum)
    factors = [ops.exp(state.max - safe) for state in (first, second)]
    sums = {}
    for name in first.sums:
        parts = (
            Part(state.sums[name], state.total, safe_max(ops, state.max) - safe, factor)
            for state, factor in zip((first, second), factors, strict=True)
        )
        sums[name] = ACCUMULATORS[name].merge(ops, *parts)
    return RowState(
        maximum,
        factors[0] * first.total + factors[1] * second.total,
        factors[0] * first.out + factors[1] * second.out,
        sums,
    )


def finish(
    ops: Backend, keys: RowState, sink: Array | None, statistics: tuple[str, ...]
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Return output, row_max, log_denom, and the requested statistics but log_sum_exp = row_max + log_denom.

    The two terms stay apart: weights from their sum would be rounded at the scale of the scores. `sink`, broadcast as
    (head, group, 1, 1), is one more score, without a value. One number per query has a last axis of 1.
    """
    state = keys if sink is None else merge(ops, keys, _sink_state(ops, keys, sink))
    row_max, is_empty = safe_max(ops, state.max), ops.equal(state.total, 0)
    total = ops.where(is_empty, 1.0, state.total)
    log_sum = ops.log(total)
    log_denom = ops.where(is_empty, NEG_INF, log_sum)
    factor = ops.where(ops.equal(keys.total, 0), 0.0, ops.exp(safe_max(ops, keys.max) - row_max))
    row = Row(is_empty, total, log_sum, state.sums, keys.max, keys.total, factor, keys.sums)
    values = {name: calculate(ops, row) for name in statistics if (calculate := TABLE[name].finish) is not None}
    out = state.out / total
    # The output is 0 without keys, even with a sink of NaN.
    return out if sink is None else ops.where(ops.equal(keys.total, 0), 0.0, out), row_max, log_denom, values


def _sink_state(ops: Backend, keys: RowState, sink: Array) -> RowState:
    """Return the state after the sink alone; it adds nothing to the accumulators."""
    zero = 0 * keys.total  # broadcasts numbers to all queries
    sums = {name: tuple(x + zero for x in ACCUMULATORS[name].initial) for name in keys.sums}
    # Not 0 * out, which infinity would make NaN: the sink has no value.
    return RowState(max=sink + zero, total=1 + zero, out=ops.zeros(ops.shape(keys.out), keys.out), sums=sums)


def weights_of_rows(ops: Backend, scores: Array, unmasked: Array | None, sink: Array | None) -> Array:
    """Return the weights of queries from the scores of all keys (-inf where masked); `sink` is as in `finish`."""
    if scores.shape[-1] == 0:
        return scores
    row_max = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    if sink is not None:
        row_max = ops.maximum(row_max, ops.stop_gradient(sink))
    row_max = safe_max(ops, row_max)
    weights = ops.exp(scores - row_max)
    total = ops.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + ops.exp(sink - row_max)
    weights = weights / ops.where(ops.equal(total, 0), 1.0, total)
    # Exactly 0 where masked, also in a query that an unmasked NaN makes NaN.
    return weights if unmasked is None else ops.where(unmasked, weights, 0.0)


def log_weights(ops: Backend, scores: Array, row_max: Array, log_denom: Array) -> Array:
    """Return log p = (scores - row_max) - log_denom; -inf for a fully masked query."""
    return scores - row_max - ops.where(ops.equal(log_denom, NEG_INF), float("inf"), log_denom)
