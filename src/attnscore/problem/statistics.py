"""Statistics of each query: one table of their definitions, how they accumulate, merge and finish, and AttentionStats.

To add one: a row in `TABLE`, a field of `AttentionStats`, and its accumulation in C++ (csrc) and Triton. Names, checks,
results, the dense kernel, the kernels in a framework's operations and the merges of `parallel` follow from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.backends.numpy import detached
from attnscore.base.arguments import is_number, shown
from attnscore.errors import ArgumentError, message

_NEG_INF, _INF = float("-inf"), float("inf")

Sums = tuple[Array, ...]
"""State of an accumulator: arrays with a number for each query, (..., query, 1)."""


class Tile(NamedTuple):
    """A tile of scores (..., query, key), from which an accumulator starts."""

    scores: Array
    unmasked: Array | None
    first: Any
    """Index of the first key."""
    max: Array
    """Largest score of each query, or 0 where all scores are -inf."""
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
    """Denominator of the keys alone, in units of exp(max_of_keys)."""
    factor_of_keys: Array
    """exp(max_of_keys - row_max)"""
    sums_of_keys: Mapping[str, Sums]


class Matrix(NamedTuple):
    """All pairs, (..., query, key): scores (-inf where masked), weights, and weights with the sink's weight at the end.

    `count`, the number of unmasked keys, is (..., query, 1).
    """

    scores: Array
    unmasked: Array
    weights: Array
    all_weights: Array
    count: Array


PartialResult = Mapping[str, Array]
"""A result over some of the keys: statistics by name, "log_denom" and "total", exp(log_denom); "count", the number of
unmasked keys, where they are `COUNTED`."""


class Accumulator(NamedTuple):
    """A sum over the keys that is carried from tile to tile."""

    initial: tuple[float, ...]
    """Value of each array before the first key, and of the sink."""
    of_tile: Callable[[Backend, Tile], Sums]
    merge: Callable[[Backend, Part, Part], Sums]
    of_result: Callable[[Backend, PartialResult], Sums]
    """Function that undoes `Statistic.finish`."""


class Statistic(NamedTuple):
    """One field of `AttentionStats`."""

    definition: str
    describes: Literal["softmax", "weights", "scores"]
    """Source of the statistic: every normalizer has weights and scores; "softmax" needs the softmax."""
    of_matrix: Callable[[Backend, Matrix], Array] | None
    """Definition, for the dense kernel; None, like the next field, for the log-sum-exp, which every forward returns."""
    finish: Callable[[Backend, Row], Array] | None
    accumulator: str | None = None
    differentiable: bool = False
    joined_with: str | None = None
    """Another statistic, which `Accumulator.of_result` reads."""
    dtype: str | None = None
    """Dtype that the caller gets; inside all statistics are in the accumulator dtype."""


def _sum(ops: Backend, x: Array) -> Array:
    return ops.sum(x, axis=-1, keepdims=True)


def _sum_exp_logit(ops: Backend, tile: Tile) -> Sums:
    # w log w is 0 where w is; selected before the product, whose derivative would be 0 * inf.
    logits = ops.where(ops.equal(tile.weights, 0), 0.0, tile.logits)
    return (_sum(ops, tile.weights * logits),)


def _merge_sum_exp_logit(ops: Backend, first: Part, second: Part) -> Sums:
    # sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
    rescaled = [part.factor * (part.sums[0] + part.step * part.total) for part in (first, second)]
    return (rescaled[0] + rescaled[1],)


def _sum_squares(ops: Backend, tile: Tile) -> Sums:
    return (_sum(ops, tile.weights * tile.weights),)


def _merge_squares(ops: Backend, first: Part, second: Part) -> Sums:
    return (first.factor * first.factor * first.sums[0] + second.factor * second.factor * second.sums[0],)


def _moments(ops: Backend, tile: Tile) -> Sums:
    """Return the number of unmasked scores, a base, their mean less the base, and the sum of squared deviations."""
    scores, base = tile.scores, tile.max
    if tile.unmasked is None:
        *rows, length = ops.shape(scores)
        count = ops.full((*rows, 1), length, scores)
        from_base = scores - base
        # A tile may turn out to have no keys where their number is unknown.
        mean = _sum(ops, from_base) / ops.maximum(count, 1.0)
        deviation = from_base - mean
    else:
        counted = ops.broadcast_to(ops.astype(tile.unmasked, ops.dtype(scores)), ops.shape(scores))
        count = _sum(ops, counted)
        from_base = ops.where(tile.unmasked, scores, base) - base
        mean = _sum(ops, from_base) / ops.maximum(count, 1.0)
        deviation = ops.where(tile.unmasked, from_base - mean, 0.0)
    return count, base, mean, _sum(ops, deviation * deviation)


def _merge_moments(ops: Backend, first: Part, second: Part) -> Sums:
    """Chan's update. Means are less their bases, large scores, whose difference is taken first: nothing cancels."""
    count_1, base_1, mean_1, deviations_1 = first.sums
    count_2, base_2, mean_2, deviations_2 = second.sums
    count = count_1 + count_2
    share = count_2 / ops.maximum(count, 1.0)
    # A part without keys has the mean 0, and any base.
    base = ops.where(ops.equal(count_1, 0), base_2, base_1)
    gap = (base_2 - base) + mean_2 - mean_1
    return count, base, mean_1 + share * gap, deviations_1 + deviations_2 + gap * gap * count_1 * share


def _minimum(ops: Backend, x: Array, y: Array) -> Array:
    return -ops.maximum(-x, -y)


def _min_score(ops: Backend, tile: Tile) -> Sums:
    scores = tile.scores if tile.unmasked is None else ops.where(tile.unmasked, tile.scores, _INF)
    return (-ops.stop_gradient(ops.max(-scores, axis=-1, keepdims=True)),)


def _first_key(ops: Backend, scores: Array, max_score: Array, first: Any = 0) -> Array:
    """Return the first key, counted from `first`, with this score; -1 where there is none, and for a score of -inf."""
    keys = ops.astype(ops.positions(first, ops.shape(scores)[-1], scores), ops.dtype(scores))
    key = -ops.max(ops.where(ops.equal(scores, max_score), -keys, _NEG_INF), axis=-1, keepdims=True)
    return ops.where(ops.logical_or(ops.equal(key, _INF), ops.equal(max_score, _NEG_INF)), -1.0, key)


def _max_score(ops: Backend, tile: Tile) -> Sums:
    # For a fully masked query `max` is 0, which is no score.
    key = _first_key(ops, tile.scores, tile.max, tile.first)
    return ops.where(ops.logical_and(key < 0, ops.equal(tile.max, 0)), _NEG_INF, tile.max), key


def _first_of_largest(ops: Backend, a: Array, key_a: Array, b: Array, key_b: Array) -> Array:
    """Return the key of the larger of two scores, the smaller key if they are equal; the key of a NaN, -1."""
    key = ops.where(ops.logical_or(b > a, ops.isnan(b)), key_b, key_a)
    return ops.where(ops.equal(a, b), _minimum(ops, key_a, key_b), key)


ACCUMULATORS = {
    "sum_exp_logit": Accumulator(
        (0.0,), _sum_exp_logit, _merge_sum_exp_logit,
        lambda ops, x: (
            ops.where(ops.equal(x["log_denom"], _NEG_INF), 0.0, (x["log_denom"] - x["entropy"]) * x["total"]),
        ),
    ),
    "squares": Accumulator(
        (0.0,), _sum_squares, _merge_squares, lambda ops, x: (x["sum_sq_weights"] * x["total"] * x["total"],)
    ),
    "moments": Accumulator(
        (0.0,) * 4, _moments, _merge_moments,
        lambda ops, x: (x["count"], x["mean_score"], 0 * x["count"], x["var_score"] * x["count"]),
    ),
    "min_score": Accumulator(
        (_INF,), _min_score,
        lambda ops, first, second: (_minimum(ops, first.sums[0], second.sums[0]),),
        lambda ops, x: (x["min_score"],),
    ),
    "max_score": Accumulator(
        (_NEG_INF, -1.0), _max_score,
        lambda ops, a, b: (ops.maximum(a.sums[0], b.sums[0]), _first_of_largest(ops, *a.sums, *b.sums)),
        lambda ops, x: (x["max_score"], x["argmax_key"]),
    ),
}  # fmt: skip


def _max(ops: Backend, x: Array, empty: Array) -> Array:
    """Return the largest number of each query, `empty` without keys."""
    return empty if 0 in x.shape else ops.max(x, axis=-1, keepdims=True)


def _mean(ops: Backend, x: Matrix) -> Array:
    return _sum(ops, ops.where(x.unmasked, x.scores, 0.0)) / ops.maximum(x.count, 1.0)


def _variance(ops: Backend, x: Matrix) -> Array:
    deviation = ops.where(x.unmasked, x.scores - _mean(ops, x), 0.0)
    return _sum(ops, deviation * deviation) / ops.maximum(x.count, 1.0)


def _entropy(ops: Backend, x: Matrix) -> Array:
    return -_sum(ops, x.all_weights * ops.log(ops.where(ops.equal(x.all_weights, 0), 1.0, x.all_weights)))


def _finish_mean(ops: Backend, row: Row) -> Array:
    _, base, mean, _ = row.sums_of_keys["moments"]
    return base + mean


def _finish_variance(ops: Backend, row: Row) -> Array:
    count, _, _, deviations = row.sums_of_keys["moments"]
    return deviations / ops.maximum(count, 1.0)


def _finish_entropy(ops: Backend, row: Row) -> Array:
    # H = log l - sum e (s - m) / l: lse - sum(e s) / l would lose digits at large scores.
    return ops.where(row.is_empty, 0.0, row.log_sum - row.sums["sum_exp_logit"][0] / row.total)


TABLE = {
    "log_sum_exp": Statistic(
        "log of the softmax's denominator, the sink in it", "softmax", None, None, differentiable=True
    ),
    "max_score": Statistic(
        "largest unmasked score", "scores",
        lambda ops, x: _max(ops, x.scores, 0.0 * x.count + _NEG_INF),
        lambda ops, row: row.max_of_keys,
    ),
    "mean_score": Statistic(
        "mean of the unmasked scores", "scores", _mean, _finish_mean, "moments", joined_with="var_score"
    ),
    "var_score": Statistic(
        "variance of the unmasked scores (divided by their number)", "scores",
        _variance, _finish_variance, "moments", joined_with="mean_score",
    ),
    "entropy": Statistic(
        "-sum p log p in nats, of keys and sink together; from 0 (one key has it all) to log(number of keys)",
        "softmax", _entropy, _finish_entropy, "sum_exp_logit", differentiable=True,
    ),
    "max_weight": Statistic(
        "largest weight", "weights",
        lambda ops, x: _max(ops, x.weights, 0.0 * x.count),
        lambda ops, row: row.factor_of_keys / row.total,
    ),
    "sum_sq_weights": Statistic(
        "sum of squared weights, 1 when one key has it all", "weights",
        lambda ops, x: _sum(ops, x.weights * x.weights),
        lambda ops, row: row.sums["squares"][0] / (row.total * row.total), "squares",
    ),
    "sum_weights": Statistic(
        "1, below 1 with a sink, 0 when all keys are masked", "weights",
        lambda ops, x: _sum(ops, x.weights),
        # 0 without keys, even with a sink of NaN.
        lambda ops, row: ops.where(
            ops.equal(row.total_of_keys, 0), 0.0, row.factor_of_keys * row.total_of_keys / row.total
        ),
    ),
    "min_score": Statistic(
        "smallest unmasked score", "scores",
        lambda ops, x: -_max(ops, ops.where(x.unmasked, -x.scores, _NEG_INF), 0.0 * x.count + _NEG_INF),
        lambda ops, row: row.sums_of_keys["min_score"][0],
        "min_score",
    ),
    "argmax_key": Statistic(
        "index of the key with the largest score, the smallest of equal ones; -1 without one, or with a NaN", "scores",
        lambda ops, x: 0.0 * x.count - 1.0 if 0 in x.scores.shape else _first_key(
            ops, x.scores, ops.max(x.scores, axis=-1, keepdims=True)
        ),
        lambda ops, row: row.sums_of_keys["max_score"][1],
        "max_score", joined_with="max_score", dtype="int32",
    ),
}  # fmt: skip
STATISTICS = tuple(TABLE)
DIFFERENTIABLE = tuple(name for name, row in TABLE.items() if row.differentiable)
"""Statistics through which a gradient flows; the others are detached."""
KEYS = tuple(name for name, row in TABLE.items() if row.dtype is not None)
"""Statistics that are indices of keys, -1 for none."""
MAX_INDEXED_KEYS = 2**24
"""Number of keys whose indices float32 holds."""
COUNTED = tuple(name for name, row in TABLE.items() if row.accumulator == "moments")
"""Statistics that are merged by the numbers of unmasked keys."""


def needs_counts(statistics: Iterable[str]) -> bool:
    """Return whether merging these statistics reads the number of unmasked keys of each query."""
    return not {*COUNTED}.isdisjoint(statistics)


def statistics_to_join(statistics: Iterable[str]) -> tuple[str, ...]:
    """Return these statistics, and the statistics that joining the results of parts of the keys reads."""
    names = {*statistics, *(TABLE[name].joined_with for name in statistics)}
    return tuple(name for name in TABLE if name in names)


def in_returned_dtype(ops: Backend, name: str, x: Array) -> Array:
    """Return a statistic in the dtype that the caller gets."""
    dtype = TABLE[name].dtype
    return x if dtype is None else ops.astype(x, dtype)


def with_global_keys(ops: Backend, statistics: dict[str, Array], key_indices: Callable[[], Array]) -> dict[str, Array]:
    """Return the statistics of the keys `key_indices()` of a sequence, with indices of keys counted in the sequence."""
    if not {*statistics} & {*KEYS}:
        return statistics
    table = key_indices()
    # One more entry, for the index of no key.
    count, table = ops.shape(table)[0], ops.concat([table, ops.full((1,), -1, table)], 0)

    def look_up(x: Array) -> Array:
        index = ops.astype(ops.where(x < 0, float(count), x), "int64")
        return ops.astype(ops.reshape(ops.take(table, ops.reshape(index, (-1,)), 0), ops.shape(x)), ops.dtype(x))

    return {name: look_up(x) if name in KEYS else x for name, x in statistics.items()}


class AttentionStats(NamedTuple):
    """Statistics of the scores and weights of each query; a field that was not requested is None.

    They describe the scores after temperature, cap and bias, and the weights before dropout. Each field has the shape
    of the output without its last axis, in at least float32, but int32 of `argmax_key`. For a fully masked query
    `log_sum_exp` (without a sink) and `max_score` are -inf, `min_score` is inf, `argmax_key` -1, all others are 0.

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
    min_score: Array = None
    argmax_key: Array = None

    def _require(self, *names: str) -> list[Array]:
        """Return these statistics; raise ArgumentError where one was not requested."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise ArgumentError(message("return_stats", f"the statistics {', '.join(names)}", f"none of {missing}"))
        return [getattr(self, name) for name in names]

    def jacobian_trace(self) -> Array:
        """Trace of the softmax Jacobian diag(p) - p p^T: sum p - sum p^2. Near 0 the softmax passes no gradient."""
        total, squares = self._require("sum_weights", "sum_sq_weights")
        return total - squares

    def effective_keys(self) -> Array:
        """exp(entropy): the number of keys that evenly spread weights of this entropy would have."""
        (entropy,) = self._require("entropy")
        return backends.of({"entropy": entropy}).exp(entropy)

    def saturated(self, threshold: float = 0.99) -> Array:
        """Whether the largest weight of a query is at least `threshold`."""
        if not is_number(threshold) or not 0 < threshold <= 1:
            raise ArgumentError(message("threshold", "a number in (0, 1]", shown(threshold)))
        (weight,) = self._require("max_weight")
        return weight >= threshold

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean, smallest and largest of every statistic over the queries that are not fully masked.

        Arrays on a device are copied to the host; traced ones, without values yet, are an ArgumentError.
        """
        (total,) = self._require("sum_weights")
        alive = _values("sum_weights", total) != 0
        summary: dict[str, dict[str, float]] = {}
        for name in self._fields:
            x = getattr(self, name)
            rows = np.empty(0) if x is None else _values(name, x)[alive]
            if rows.size:
                summary[name] = {"mean": float(rows.mean()), "min": float(rows.min()), "max": float(rows.max())}
        return summary


def _values(name: str, x: Array) -> HostArray:
    """Return the values of an array on the host, from a device too."""
    if (values := backends.host(x)) is not None:
        return values
    try:
        return np.asarray(detached(x))
    except Exception as error:  # each framework raises another error for a traced array
        raise ArgumentError(message(name, "an array with values", "a traced one")) from error


AttentionStats.__doc__ = (AttentionStats.__doc__ or "").replace(
    "{attributes}",
    "\n    ".join(
        f"{name} : {row.definition}" + ("; differentiable" if row.differentiable else "") for name, row in TABLE.items()
    ),
)
