"""The online softmax: start, absorb, merge, finish; the empty-row rule; statistics from the same pass.

For each row the state keeps the running maximum m, total = sum exp(s - m) and the unnormalised output, all rescaled by
exp(m_old - m_new) when the maximum moves. Statistics ride along in the same units and cost nothing unless asked for.

The empty-row rule: a row that sees no key, or only keys of score -inf, has output 0 and log-sum-exp -inf. It is kept by
two lines: `safe_max` (subtract 0 instead of a maximum of -inf) and `finish` (divide by 1 instead of a total of 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnscore.backends.base import Array, Backend

STATISTICS = (
    "log_sum_exp",
    "max_score",
    "mean_score",
    "var_score",
    "entropy",
    "max_weight",
    "sum_sq_weights",
    "sum_weights",
)
NEG_INF = float("-inf")

Moments = tuple[Array, Array, Array, Array]
"""Of the visible scores: count, a base at their level, their mean less the base, sum of squared deviations."""


@dataclass(frozen=True, eq=False)
class RowState:
    """What is known of each row after some of its keys; every field (..., rows, 1) but `out` (..., rows, value_dim)."""

    max: Array
    total: Array
    out: Array
    sum_exp_logit: Array | None = None
    """sum exp(s - max) (s - max), for the entropy."""
    squares: Array | None = None
    """sum exp(s - max)^2."""
    moments: Moments | None = None


def safe_max(ops: Backend, maximum: Array) -> Array:
    """What is subtracted from the scores of a row: its maximum, or 0 where that is -inf."""
    return ops.where(maximum == NEG_INF, 0.0, maximum)


def start(
    ops: Backend, rows: tuple[int, ...], value_dim: int, like: Array, dtype: str, wanted: tuple[str, ...]
) -> RowState:
    """The state of rows that have seen nothing yet."""
    shape = (*rows, 1)

    def zeros() -> Array:
        return ops.zeros(shape, like, dtype)

    return RowState(
        max=ops.full(shape, NEG_INF, like, dtype),
        total=zeros(),
        out=ops.zeros((*rows, value_dim), like, dtype),
        sum_exp_logit=zeros() if "entropy" in wanted else None,
        squares=zeros() if "sum_sq_weights" in wanted else None,
        moments=(zeros(), zeros(), zeros(), zeros()) if {"mean_score", "var_score"} & set(wanted) else None,
    )


def update(
    ops: Backend,
    state: RowState,
    scores: Array,
    visible: Array | None,
    pool: Callable[[Array], Array],
    wanted: tuple[str, ...],
) -> RowState:
    """The state after one more block of scores; `pool` turns exp(s - max) into a block of output.

    Scores of pairs that are not visible are -inf.
    """
    # No result depends on what is subtracted, so no derivative flows through it.
    maximum = ops.stop_gradient(ops.max(scores, axis=-1, keepdims=True))
    shifted = scores - safe_max(ops, maximum)
    weights = ops.exp(shifted)
    sum_exp_logit = squares = moments = None
    if "entropy" in wanted:
        sum_exp_logit = ops.sum(_times(ops, weights, shifted), axis=-1, keepdims=True)
    if "sum_sq_weights" in wanted:
        squares = ops.sum(weights * weights, axis=-1, keepdims=True)
    if {"mean_score", "var_score"} & set(wanted):
        moments = _moments(ops, scores, maximum, visible)
    total = ops.sum(weights, axis=-1, keepdims=True)
    return merge(ops, state, RowState(maximum, total, pool(weights), sum_exp_logit, squares, moments))


def _moments(ops: Backend, scores: Array, maximum: Array, visible: Array | None) -> Moments:
    base = safe_max(ops, maximum)
    if visible is None:
        *rows, length = ops.shape(scores)
        count = ops.full((*rows, 1), length, scores)
        from_base = scores - base
        mean = ops.sum(from_base, axis=-1, keepdims=True) / length
        deviation = from_base - mean
    else:
        seen = ops.broadcast_to(ops.astype(visible, ops.dtype(scores)), ops.shape(scores))
        count = ops.sum(seen, axis=-1, keepdims=True)
        from_base = ops.where(visible, scores, base) - base
        mean = ops.sum(from_base, axis=-1, keepdims=True) / ops.maximum(count, 1.0)
        deviation = ops.where(visible, from_base - mean, 0.0)
    return count, base, mean, ops.sum(deviation * deviation, axis=-1, keepdims=True)


def merge(ops: Backend, first: RowState, second: RowState) -> RowState:
    """The state of rows after the (disjoint) keys of both."""
    maximum = ops.maximum(first.max, second.max)
    safe = safe_max(ops, maximum)
    factors = [ops.exp(state.max - safe) for state in (first, second)]
    sum_exp_logit = squares = moments = None
    if first.sum_exp_logit is not None and second.sum_exp_logit is not None:
        # sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
        moved = [
            factor * (logit_of + (safe_max(ops, state.max) - safe) * state.total)
            for factor, logit_of, state in zip(
                factors, (first.sum_exp_logit, second.sum_exp_logit), (first, second), strict=True
            )
        ]
        sum_exp_logit = moved[0] + moved[1]
    if first.squares is not None and second.squares is not None:
        squares = factors[0] * factors[0] * first.squares + factors[1] * factors[1] * second.squares
    if first.moments is not None and second.moments is not None:
        moments = _merge_moments(ops, first.moments, second.moments)
    return RowState(
        maximum,
        factors[0] * first.total + factors[1] * second.total,
        factors[0] * first.out + factors[1] * second.out,
        sum_exp_logit,
        squares,
        moments,
    )


def _merge_moments(ops: Backend, first: Moments, second: Moments) -> Moments:
    """Chan's update, with the gap of the means taken base from base: no cancellation at any level of the scores."""
    count = first[0] + second[0]
    share = second[0] / ops.maximum(count, 1.0)
    nothing_yet = first[0] == 0
    base = ops.where(nothing_yet, second[1], first[1])
    gap = (second[1] - base) + second[2] - ops.where(nothing_yet, 0.0, first[2])
    mean = ops.where(nothing_yet, 0.0, first[2]) + share * gap
    return count, base, mean, first[3] + second[3] + gap * gap * first[0] * share


def finish(
    ops: Backend, keys: RowState, sink: Array | None, wanted: tuple[str, ...]
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Output, top, log of the total, and the wanted statistics but log_sum_exp = top + log total.

    Top and log total stay apart: their sum would round the weights by the level of the scores. `sink` is
    (head, group, 1, 1) beside the rows: one more logit, without a value. Row numbers keep an axis of length 1.
    """
    state = keys if sink is None else merge(ops, keys, _sink_state(ops, keys, sink))
    row_max, empty = safe_max(ops, state.max), state.total == 0
    total = ops.where(empty, 1.0, state.total)
    log = ops.log(total)
    log_denom = ops.where(empty, NEG_INF, log)
    # What the keys' own exponentials are in units of the state that has the sink in it.
    factor = ops.where(keys.total == 0, 0.0, ops.exp(safe_max(ops, keys.max) - row_max))
    found = {"max_score": keys.max, "max_weight": factor / total, "sum_weights": factor * keys.total / total}
    if keys.moments is not None:
        count, base, mean, deviations = keys.moments
        found["mean_score"], found["var_score"] = base + mean, deviations / ops.maximum(count, 1.0)
    if state.sum_exp_logit is not None:
        # H = log l - sum e (s - m) / l: lse - sum(e s) / l loses digits with the level of the logits.
        found["entropy"] = ops.where(empty, 0.0, log - state.sum_exp_logit / total)
    if state.squares is not None:
        found["sum_sq_weights"] = state.squares / (total * total)
    return state.out / total, row_max, log_denom, {name: found[name] for name in wanted if name != "log_sum_exp"}


def _sink_state(ops: Backend, keys: RowState, sink: Array) -> RowState:
    """The state of rows that have seen the sink alone; the statistics of keys leave it out."""
    nothing = 0 * keys.total
    return RowState(
        max=sink + nothing,
        total=1 + nothing,
        out=0 * keys.out,
        sum_exp_logit=None if keys.sum_exp_logit is None else nothing,
        squares=None if keys.squares is None else nothing,
        moments=None if keys.moments is None else (nothing, nothing, nothing, nothing),
    )


def whole_rows(ops: Backend, scores: Array, visible: Array | None, sink: Array | None) -> Array:
    """Weights of rows whose scores are all here (-inf where hidden); `sink` is (head, group, 1, 1) beside them."""
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
    weights = weights / ops.where(total == 0, 1.0, total)
    # exactly 0 where hidden, also in a row that a visible NaN has poisoned
    return weights if visible is None else ops.where(visible, weights, 0.0)


def log_weights(ops: Backend, scores: Array, row_max: Array, log_denom: Array) -> Array:
    """log p = (s - top) - log total; -inf in a row that sees nothing."""
    return scores - row_max - ops.where(log_denom == NEG_INF, float("inf"), log_denom)


def _times(ops: Backend, weight: Array, log_weight: Array) -> Array:
    """w log w, which is 0 where w is; selected before multiplying, or its own derivative would be 0 * inf."""
    return weight * ops.where(weight == 0, 0.0, log_weight)


def logaddexp(ops: Backend, first: Array, second: Array) -> Array:
    """log(exp(first) + exp(second)), -inf when both are."""
    row_max = safe_max(ops, ops.maximum(first, second))
    return row_max + ops.log(ops.exp(first - row_max) + ops.exp(second - row_max))
