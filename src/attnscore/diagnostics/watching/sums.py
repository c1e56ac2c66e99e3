"""Sums per head from which the statistics of an attention call follow, in NumPy: the same for every framework.

Requirements:
- the statistics are `attend`'s, from a pass of their own over queries and keys, in O(n) memory;
- the weight on the first key, and on padding, is the output of the same pass, with values that mark these keys;
- queries at padding do not count; queries with one attended key have no choice and never count as saturated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore import backends
from attnscore.backends.base import Backend
from attnscore.errors import AttnscoreError

Array = NDArray[np.float64]

# Scores that a model made itself are copied in blocks of this size.
BLOCK = 2**20
# Up to here an entry of a float mask hides its key: models write -1e4, -1e9 or the least number of the dtype. Logits of
# a failing model may be as low as the first of these: scores have a lower bound.
MASKED_BIAS = -9e3
MASKED_SCORE = -1e8
# Statistics of `attend`, in the order in which `added` takes them apart.
NEEDED = (
    "mean_score",
    "var_score",
    "log_sum_exp",
    "entropy",
    "max_weight",
    "sum_weights",
    "sum_sq_weights",
    "max_score",
)


# Numbers that are the largest over several parts, not their sum.
LARGEST = ("max_logit", "dtype_max", "scale_ratio")


@dataclass(frozen=True, eq=False)
class HostCall:
    """Queries and keys as NumPy arrays, with the options of `attend` that decide their weights."""

    query: NDArray[Any]
    key: NDArray[Any]
    options: dict[str, Any] = field(default_factory=dict)
    value: NDArray[Any] | None = None


class Moments(NamedTuple):
    """Mean square of the positions of each (sequence, head), and the part that their mean does not explain.

    With NaN or infinity in an array, its mean square is not finite.
    """

    square: Array
    spread: Array


@dataclass(frozen=True, eq=False)
class HostScores:
    """Scores (..., head, query, key) that the model made itself, as a NumPy array; masked ones are -inf."""

    scores: NDArray[Any]


def sums_of(call: HostCall | HostScores, real: NDArray[np.bool_] | None, saturated_weight: float) -> dict[str, Array]:
    """Return sums over the queries of every head, and the largest logit: each (head,).

    `real` is (batch, token), True where there is a token, or None where padding is unknown; a query is saturated when
    its largest weight is at least `saturated_weight`.
    """
    counted = _counted(call, real)
    sums = merged(
        [
            _block_sums(block, real, None if counted is None else counted[..., rows], saturated_weight)
            for block, rows in _in_blocks(call)
        ]
    )
    heads = len(sums["rows"])
    if isinstance(call, HostScores):
        return sums | input_sums({}, heads, -lowest_finite(call.scores.dtype))
    head_axis, query = call.options.get("head_axis", -3), call.query
    arrays = {"query": query, "key": call.key, "value": call.value}
    moments = {name: moments_of(x, head_axis, heads) for name, x in arrays.items() if x is not None}
    queries = query.shape[-3 if head_axis == -2 and query.ndim >= 4 else -2]
    scale = score_scale(call.options.get("score", "scaled_dot"), query.shape[-1]) if queries > 1 else None
    return sums | input_sums(moments, heads, -lowest_finite(query.dtype), scale, query.shape[-1])


def merged(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the sums of several parts of a call, or of several calls, together."""
    if len(parts) == 1:
        return parts[0]
    return {name: (np.max if name in LARGEST else np.sum)([part[name] for part in parts], axis=0) for name in parts[0]}


def _in_blocks(call: HostCall | HostScores) -> Iterator[tuple[HostCall, slice]]:
    """Yield a call as it is, and scores as biases of calls with scores of 0, a few queries at a time."""
    if isinstance(call, HostCall):
        yield call, slice(None)
        return
    *lead, queries, keys = call.scores.shape
    step = max(1, BLOCK // max(1, call.scores.size // max(1, queries)))
    for start in range(0, queries, step):
        rows = slice(start, min(queries, start + step))
        bias = as_float32(with_infinity(call.scores[..., rows, :], MASKED_SCORE))
        zeros = np.zeros((), bias.dtype)
        query, key = (np.broadcast_to(zeros, (*lead, n, 1)) for n in (bias.shape[-2], keys))
        yield HostCall(query, key, {"score": "dot", "bias": bias}), rows


def _counted(call: HostCall | HostScores, real: NDArray[np.bool_] | None) -> Any:
    """Return the queries (batch, 1, query) that count: in self-attention, queries not at padding. None: all."""
    if isinstance(call, HostScores):
        return counted_queries(real, call.scores.shape[-2:], call.scores)
    axis = -3 if call.options.get("head_axis") == -2 and call.key.ndim >= 4 else -2
    return counted_queries(real, (call.query.shape[axis], call.key.shape[axis]), call.query)


def counted_queries(real: Any, lengths: Sequence[int], like: Any) -> Any:
    """Return the queries (batch, 1, query) that are tokens, of a call of so many queries and keys in self-attention.

    `like` is an array with the batch on its first axis. None: all queries count.
    """
    fits = real is not None and like.ndim >= 3 and [*real.shape] == [like.shape[0], lengths[0]]
    return real[:, None] if fits and lengths[0] == lengths[1] else None


def _block_sums(
    call: HostCall, real: NDArray[np.bool_] | None, counted: NDArray[np.bool_] | None, saturated_weight: float
) -> dict[str, Array]:
    """Return the sums of a call over the queries (batch, 1, query) that are `counted`; None: all."""
    head_axis, key = call.options.get("head_axis", -3), call.key
    marks = marks_of(backends.load("numpy"), key, head_axis, real)
    value = np.broadcast_to(marks, (*key.shape[:-1], marks.shape[-1]))
    marked, stats = ats.attend(call.query, key, value, **call.options, return_stats=NEEDED)
    columns = [marked[..., column] for column in range(marked.shape[-1])]
    numbers = [by_head(np.asarray(x), head_axis) for x in (*(getattr(stats, name) for name in NEEDED), *columns)]
    return add_up(numbers, counted, saturated_weight)


def by_head(x: Any, head_axis: int, heads: int | None = None) -> Any:
    """Reshape an array of any framework, with the queries' numbers, to (batch, head, query).

    Where the model has `heads` heads and the array as many stacked as queries, each is a head of one query.
    """
    if head_axis == -2 and x.ndim >= 3:
        x = x.swapaxes(-1, -2)
    *lead, array_heads, queries = x.shape if x.ndim >= 3 else (*x.shape[:-1], 1, x.shape[-1])
    if heads is not None and x.ndim >= 3 and heads == array_heads * queries:
        return x.reshape(-1, heads, 1)
    return x.reshape(math.prod(lead), array_heads, queries)


def add_up(numbers: list[NDArray[Any]], counted: NDArray[np.bool_] | None, saturated_weight: float) -> dict[str, Array]:
    """Return sums over (batch, head, query) of numbers in the order of `NEEDED`, then first key and padding."""
    mean, variance, total, entropy, weight, weights, squares, top, first, *padding = numbers
    attends = weights > 0
    alive = attends if counted is None else attends & counted
    # A single attended key has the whole weight and no variance; saturated queries with a choice have a variance.
    has_one_key = variance == 0
    if has_one_key.any():
        has_one_key &= weight >= 1 - 1e-6
    choice = alive & ~has_one_key
    # Selecting queries costs more than all the sums: where all count, as in most models, it is left out.
    all_alive = bool(alive.all())

    def sum_over_rows(x: NDArray[Any]) -> Array:
        return np.asarray((x if all_alive else np.where(alive, x, 0)).sum((0, 2), dtype=np.float64))

    count = sum_over_rows(alive)
    empty = broken = overflown = 0 * count
    if not all_alive:
        is_nan, is_counted = np.isnan(weights), True if counted is None else counted
        # Weights are NaN where a score is infinite: the sum of exponentials was.
        kinds = (~attends & ~is_nan, is_nan, is_nan & (top == np.inf))
        empty, broken, overflown = ((x & is_counted).sum((0, 2), dtype=np.float64) for x in kinds)
    return {
        "rows": count,
        "empty_rows": empty,
        "nan_rows": broken,
        "choice_rows": sum_over_rows(choice),
        "saturated_rows": sum_over_rows(choice & (weight >= saturated_weight)),
        "logit_mean": sum_over_rows(mean),
        "logit_variance": sum_over_rows(variance),
        "log_sum_exp": sum_over_rows(total),
        "entropy": sum_over_rows(entropy),
        "max_weight": sum_over_rows(weight),
        "effective_keys": sum_over_rows(np.exp(entropy)),
        "jacobian_trace": sum_over_rows(weights) - sum_over_rows(squares),
        "first_key": sum_over_rows(first),
        "padding": sum_over_rows(padding[0]) if padding else 0 * count,
        "padding_rows": count if padding else 0 * count,
        "max_logit": (top if all_alive else np.where(alive, top, -np.inf))
        .max((0, 2), initial=-np.inf)
        .astype(np.float64),
        "overflow_rows": overflown,
    }


def input_sums(
    moments: Mapping[str, Moments | None], heads: int, dtype_max: float, scale: float | None = None, dim: int = 1
) -> dict[str, Array]:
    """Return sums over the sequences of a call from its queries, keys and values, each (head,), without the weights.

    `query_variance` bounds the variance of a logit over the queries, Var(q.k) <= trace Cov(q) trace Cov(k), where the
    score is `scale` q.k; `scale_ratio` is this scale as a multiple of 1/sqrt(dim); `value_spread` is the share of the
    values' squares that their mean does not explain: 0 where all are alike. Moments of None have their heads in another
    axis, as single queries of a GQA group.
    """
    sums = {name: np.zeros(heads) for name in ("sequences", "query_variance", "value_sequences", "value_spread")}
    sums |= {f"nan_{name}": np.zeros(heads) for name in ("query", "key", "value")}
    sums["dtype_max"] = np.full(heads, dtype_max)
    sums["scale_ratio"] = np.full(heads, math.nan if scale is None else scale * math.sqrt(dim))
    known = {name: x for name, x in moments.items() if x is not None}
    for name, (square, spread) in known.items():
        is_finite = np.isfinite(square)
        sums[f"nan_{name}"] = (~is_finite).sum(0, dtype=np.float64)
        if name == "value":
            share = np.divide(spread, square, out=np.zeros_like(square), where=is_finite & (square > 0))
            sums |= {"value_sequences": is_finite.sum(0, dtype=np.float64), "value_spread": share.sum(0)}
    if scale is not None and "query" in known and "key" in known:
        with np.errstate(all="ignore"):  # of numbers that are not finite
            variance = scale**2 * known["query"].spread * known["key"].spread
        is_finite = np.isfinite(variance)
        sums["sequences"] = is_finite.sum(0, dtype=np.float64)
        sums["query_variance"] = np.where(is_finite, variance, 0).sum(0)
    return sums


def moments_of(x: NDArray[Any], head_axis: int, heads: int) -> Moments | None:
    """Return the moments of queries, keys or values; None where the array has its heads in another axis."""
    x = np.swapaxes(x, -3, -2) if head_axis == -2 and x.ndim >= 4 else x
    array_heads = x.shape[-3] if x.ndim >= 4 else 1
    if array_heads == 0 or heads % array_heads or x.shape[-2] == 0:
        return None
    x = as_float32(x).reshape(-1, array_heads, *x.shape[-2:])
    with np.errstate(all="ignore"):  # of numbers that are not finite
        square = np.einsum("...ij,...ij->...", x, x, dtype=np.float64) / x.shape[-2]
        spread = np.maximum(square - (x.mean(-2, dtype=np.float64) ** 2).sum(-1), 0)
    return Moments(*(np.repeat(moment, heads // array_heads, axis=-1) for moment in (square, spread)))


def score_scale(score: Any, dim: int) -> float | None:
    """Return the factor of q.k in a score; None where the score is no multiple of q.k by one number."""
    if score == "dot" or type(score) is ats.Dot:
        return 1.0
    if score != "scaled_dot" and type(score) is not ats.ScaledDot:
        return None
    scale = getattr(score, "scale", None)
    return dim**-0.5 if scale is None else float(scale) if isinstance(scale, (int, float)) else None


def marks_of(ops: Backend, key: Any, head_axis: int, real: Any) -> Any:
    """Return values whose first feature is 1 on the first token, and whose second, if any, is 1 on padding."""
    per_head = head_axis == -2 and key.ndim >= 4
    length = key.shape[-3] if per_head else key.shape[-2]
    if real is None or key.ndim < 3 or tuple(real.shape) != (key.shape[0], length):
        first = ops.zeros((length, 1), key)
        first[:1] = 1
        return first[:, None] if per_head else first
    real = ops.asarray(real, key)
    first = real & (real.cumsum(-1) == 1)  # after the padding where that is on the left
    marks = ops.astype(ops.concat([first[..., None], ~real[..., None]], -1), ops.dtype(key))  # (batch, key, 2)
    lead = (marks.shape[0], *([1] * (key.ndim - 3)))
    return marks.reshape(*lead[:-1], length, 1, 2) if per_head else marks.reshape(*lead, length, 2)


def with_infinity(x: NDArray[Any], bound: float) -> NDArray[Any]:
    """Replace numbers up to `bound`, or near the least of the dtype, which models write for -inf, by -inf."""
    masked = x <= max(lowest_finite(x.dtype) / 2, bound)
    return np.where(masked, x.dtype.type(-np.inf), x) if (masked & (x != -np.inf)).any() else x


def lowest_finite(dtype: np.dtype[Any]) -> float:
    """Return the lowest finite number of a dtype, also of bfloat16."""
    # NumPy knows no bfloat16; it has the range of float32.
    return float(np.finfo(dtype if dtype.kind == "f" else np.float32).min)


def as_float32(x: NDArray[Any]) -> NDArray[Any]:
    """Return float16 and bfloat16 as float32, in which their sums are exact enough."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def describe_error(error: Exception) -> str:
    """Describe an error of recording in one line."""
    kind = "refused" if isinstance(error, AttnscoreError) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())[:160]}"
