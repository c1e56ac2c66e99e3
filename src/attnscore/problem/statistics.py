"""Statistics of the softmax of each query: one table of how they accumulate, merge and finish, and AttentionStats.

To add one: a row in `TABLE`, a field of `AttentionStats`, and its C++ (csrc).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.backends.numpy import detached
from attnscore.base.arguments import is_number, shown
from attnscore.errors import ArgumentError, message

Sums = tuple[Array, ...]
"""What an accumulator keeps of each query: arrays (..., query, 1)."""


class Tile(NamedTuple):
    """A tile of scores (..., query, key), from which an accumulator starts."""

    scores: Array
    unmasked: Array | None
    max: Array
    """Of each query, or 0 where all scores are -inf."""
    logits: Array
    """scores - max"""
    weights: Array
    """exp(logits)"""


class Part(NamedTuple):
    """One of two states over disjoint keys that are merged; `step` is max - merged max, `factor` is exp(step)."""

    sums: Sums
    total: Array
    step: Array
    factor: Array


class Row(NamedTuple):
    """A query after its last key, with the sink."""

    is_empty: Array
    total: Array
    """Denominator of the weights in units of exp(row_max), or 1 for an empty query."""
    log_sum: Array
    sums: Mapping[str, Sums]
    max_of_keys: Array
    total_of_keys: Array
    """That of the keys alone, in units of exp(max_of_keys)."""
    factor_of_keys: Array
    """exp(max_of_keys - row_max)"""
    sums_of_keys: Mapping[str, Sums]


class Accumulator(NamedTuple):
    """A sum over the keys that is carried from tile to tile."""

    arrays: int
    of_tile: Callable[[Backend, Tile], Sums]
    merge: Callable[[Backend, Part, Part], Sums]


class Statistic(NamedTuple):
    """One field of `AttentionStats`."""

    definition: str
    finish: Callable[[Backend, Row], Array] | None
    """None for the log-sum-exp, which every forward returns as row_max and log_denom."""
    accumulator: str | None = None
    differentiable: bool = False


def _sum_exp_logit(ops: Backend, tile: Tile) -> Sums:
    # w log w is 0 where w is; selected before the product, whose derivative would be 0 * inf.
    logits = ops.where(tile.weights == 0, 0.0, tile.logits)
    return (ops.sum(tile.weights * logits, axis=-1, keepdims=True),)


def _merge_sum_exp_logit(ops: Backend, first: Part, second: Part) -> Sums:
    # sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
    moved = [part.factor * (part.sums[0] + part.step * part.total) for part in (first, second)]
    return (moved[0] + moved[1],)


def _squares(ops: Backend, tile: Tile) -> Sums:
    return (ops.sum(tile.weights * tile.weights, axis=-1, keepdims=True),)


def _merge_squares(ops: Backend, first: Part, second: Part) -> Sums:
    return (first.factor * first.factor * first.sums[0] + second.factor * second.factor * second.sums[0],)


def _moments(ops: Backend, tile: Tile) -> Sums:
    """Return of the unmasked scores: their number, a base, their mean less the base, the sum of squared deviations."""
    scores, base = tile.scores, tile.max
    if tile.unmasked is None:
        *rows, length = ops.shape(scores)
        count = ops.full((*rows, 1), length, scores)
        from_base = scores - base
        # A tile may turn out to have no keys where their number is unknown.
        mean = ops.sum(from_base, axis=-1, keepdims=True) / ops.maximum(count, 1.0)
        deviation = from_base - mean
    else:
        counted = ops.broadcast_to(ops.astype(tile.unmasked, ops.dtype(scores)), ops.shape(scores))
        count = ops.sum(counted, axis=-1, keepdims=True)
        from_base = ops.where(tile.unmasked, scores, base) - base
        mean = ops.sum(from_base, axis=-1, keepdims=True) / ops.maximum(count, 1.0)
        deviation = ops.where(tile.unmasked, from_base - mean, 0.0)
    return count, base, mean, ops.sum(deviation * deviation, axis=-1, keepdims=True)


def _merge_moments(ops: Backend, first: Part, second: Part) -> Sums:
    """Chan's update, with the difference of the means from base to base: no cancellation at any scale of the scores."""
    count_1, base_1, mean_1, deviations_1 = first.sums
    count_2, base_2, mean_2, deviations_2 = second.sums
    count = count_1 + count_2
    share = count_2 / ops.maximum(count, 1.0)
    is_empty = count_1 == 0
    base = ops.where(is_empty, base_2, base_1)
    gap = (base_2 - base) + mean_2 - ops.where(is_empty, 0.0, mean_1)
    mean = ops.where(is_empty, 0.0, mean_1) + share * gap
    return count, base, mean, deviations_1 + deviations_2 + gap * gap * count_1 * share


def _mean_score(ops: Backend, row: Row) -> Array:
    _, base, mean, _ = row.sums_of_keys["moments"]
    return base + mean


def _var_score(ops: Backend, row: Row) -> Array:
    count, _, _, deviations = row.sums_of_keys["moments"]
    return deviations / ops.maximum(count, 1.0)


def _entropy(ops: Backend, row: Row) -> Array:
    # H = log l - sum e (s - m) / l: lse - sum(e s) / l would lose digits at large scores.
    return ops.where(row.is_empty, 0.0, row.log_sum - row.sums["sum_exp_logit"][0] / row.total)


ACCUMULATORS = {
    "sum_exp_logit": Accumulator(1, _sum_exp_logit, _merge_sum_exp_logit),
    "squares": Accumulator(1, _squares, _merge_squares),
    "moments": Accumulator(4, _moments, _merge_moments),
}
TABLE = {
    "log_sum_exp": Statistic("log of the softmax's denominator, the sink in it", None, differentiable=True),
    "max_score": Statistic("largest unmasked score", lambda ops, row: row.max_of_keys),
    "mean_score": Statistic("mean of the unmasked scores", _mean_score, "moments"),
    "var_score": Statistic("variance of the unmasked scores (divided by their number)", _var_score, "moments"),
    "entropy": Statistic(
        "-sum p log p in nats, of keys and sink together; from 0 (one key has it all) to log(number of keys)",
        _entropy,
        "sum_exp_logit",
        differentiable=True,
    ),
    "max_weight": Statistic("largest weight", lambda ops, row: row.factor_of_keys / row.total),
    "sum_sq_weights": Statistic(
        "sum of squared weights, 1 when one key has it all",
        lambda ops, row: row.sums["squares"][0] / (row.total * row.total),
        "squares",
    ),
    "sum_weights": Statistic(
        "1, below 1 with a sink, 0 when all keys are masked",
        # Without keys 0, also beside a sink that is NaN.
        lambda ops, row: ops.where(row.total_of_keys == 0, 0.0, row.factor_of_keys * row.total_of_keys / row.total),
    ),
}


class AttentionStats(NamedTuple):
    """Statistics of the scores and weights of each query; a field that was not requested is None.

    They describe the scores after temperature, cap and bias, and the weights before dropout. Each field has the shape
    of the output without its last axis, in at least float32. For a fully masked query `log_sum_exp` (without a sink)
    and `max_score` are -inf, all others 0.

    Attributes
    ----------
    {attributes}

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> _, stats = ats.attend(np.zeros((1, 2)), np.ones((4, 2)), np.ones((4, 3)), return_stats=True)
    >>> print(stats.effective_keys().round(6), stats.max_weight)
    [4.] [0.25]
    """

    log_sum_exp: Array = None
    max_score: Array = None
    mean_score: Array = None
    var_score: Array = None
    entropy: Array = None
    max_weight: Array = None
    sum_sq_weights: Array = None
    sum_weights: Array = None

    def _need(self, *names: str) -> list[Array]:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise ArgumentError(message("return_stats", f"the statistics {', '.join(names)}", f"none of {missing}"))
        return [getattr(self, name) for name in names]

    def jacobian_trace(self) -> Array:
        """Trace of the softmax Jacobian diag(p) - p p^T: sum p - sum p^2. Near 0 the softmax passes no gradient."""
        total, squares = self._need("sum_weights", "sum_sq_weights")
        return total - squares

    def effective_keys(self) -> Array:
        """exp(entropy): the number of keys that evenly spread weights of this entropy would have."""
        (entropy,) = self._need("entropy")
        return backends.of({"entropy": entropy}).exp(entropy)

    def saturated(self, threshold: float = 0.99) -> Array:
        """Whether the largest weight of a query is at least `threshold`."""
        if not is_number(threshold) or not 0 < threshold <= 1:
            raise ArgumentError(message("threshold", "a number in (0, 1]", shown(threshold)))
        (weight,) = self._need("max_weight")
        return weight >= threshold

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean, smallest and largest of every statistic over the queries that are not fully masked.

        Arrays on a device are copied to the host; traced ones, without values yet, are an ArgumentError.
        """
        (total,) = self._need("sum_weights")
        alive = _values("sum_weights", total) != 0
        found: dict[str, dict[str, float]] = {}
        for name in self._fields:
            x = getattr(self, name)
            rows = np.empty(0) if x is None else _values(name, x)[alive]
            if rows.size:
                found[name] = {"mean": float(rows.mean()), "min": float(rows.min()), "max": float(rows.max())}
        return found


def _values(name: str, x: Array) -> HostArray:
    """Return the values of an array on the host, from a device too."""
    found = backends.host(x)
    if found is None:
        try:
            found = np.asarray(detached(x))
        except Exception as error:  # each framework has its own for a traced array
            raise ArgumentError(message(name, "an array with values", "a traced one")) from error
    return found


AttentionStats.__doc__ = (AttentionStats.__doc__ or "").replace(
    "{attributes}",
    "\n    ".join(
        f"{name} : {row.definition}" + ("; differentiable" if row.differentiable else "") for name, row in TABLE.items()
    ),
)
