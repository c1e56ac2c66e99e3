"""Sums per head from which the statistics of an attention call follow: the same for NumPy's arrays and PyTorch's.

Requirements:
- the statistics are `attend`'s, from a pass of their own over queries and keys, in O(n) memory;
- no array of queries by keys is made: scores that the model itself made are read a few queries at a time;
- the weight on the first key, and on padding, is the output of the same pass, with values that mark these keys;
- queries at padding do not count; queries with one attended key have no choice and never count as saturated;
- queries, keys and values are read once more for their squares alone: which of them hold NaN or infinity, how much the
  queries can change the weights, whether the values of a head differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore import backends, scores
from attnscore.backends.base import Backend, accumulator
from attnscore.backends.numpy import detached
from attnscore.base.arguments import largest_of
from attnscore.errors import AttnscoreError
from attnscore.plans.prepared import PreparedKeys
from attnscore.problem.normalizers import ONLY_SOFTMAX, resolve
from attnscore.scores.base import scores_in

Array = NDArray[np.float64]

# Scores that a model made itself are copied in blocks of this size.
BLOCK = 2**20
# Up to here an entry of a float mask hides its key: models write -1e4, -1e9 or the least number of the dtype. Logits of
# a failing model may be as low as the first of these: scores have a lower bound.
MASKED_BIAS = -9e3
MASKED_SCORE = -1e8
# Statistics of `attend`, in the order in which `_add_up` takes them apart.
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
LARGEST = ("max_logit", "dtype_max", "scale_ratio", "other_score", "biased", "queries", "keys")
# Scores that are q.k times a number, up to a cap, where the scores in them are.
_PRODUCTS = (ats.Dot, ats.ScaledDot, ats.Bilinear, ats.Temperature, ats.SoftCap, ats.Combination)


@dataclass(frozen=True, eq=False)
class Call:
    """Queries and keys as `attend` takes them, of NumPy or PyTorch, with the options that decide their weights."""

    query: Any
    key: Any
    options: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    """Values, where the caller has them."""
    heads: int | None = None
    """Heads of the model, where the query has fewer: single queries of a GQA group are then stacked as queries."""
    counted: Any = None
    """Queries (batch, 1, query) that count, where the call itself says so; None: all that are no padding."""
    within: str = ""
    """Submodule that attends, where the calling module runs its code without calling it."""
    is_recorded: bool | None = None
    """Whether autograd records the output, where the pass of the statistics may compute it; None: it may not."""

    @property
    def head_axis(self) -> int:
        """Axis of the heads, counted from the end, of arrays that have one."""
        return int(self.options.get("head_axis", -3))

    @property
    def length_axis(self) -> int:
        """Axis of the positions, counted from the end."""
        return -3 if self.head_axis == -2 and self.key.ndim >= 4 else -2

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.query.shape[self.length_axis], self.key.shape[self.length_axis]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores (..., head, query, key) that the model made itself; masked ones are -inf, or a number for it."""

    scores: Any

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.scores.shape[-2], self.scores.shape[-1]


class NotRecorded(Exception):
    """The reason why a call cannot be recorded."""


def deciding_options(key: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return key and options of a call of `attend` that decide its weights; NotRecorded if they are of no softmax."""
    if resolve(options.get("normalizer", "softmax")) is not None:
        raise NotRecorded(ONLY_SOFTMAX)
    score = options.get("score", "scaled_dot")
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    names = ("mask", "valid_lens", "bias", "sink", "head_axis")
    return key, {"score": score} | {name: options[name] for name in names if name in options}


def sums_of(call: Call | Scores, real: Any, saturated_weight: float) -> dict[str, Array]:
    """Return sums over the queries of every head, and the largest logit: each (head,).

    `real` is (batch, token), True where there is a token, or None where padding is unknown; a query is saturated when
    its largest weight is at least `saturated_weight`.
    """
    parts: list[dict[str, Array]] = []
    for block, counted in _in_blocks(call, real):
        ops = backends.of({"query": block.query})
        query, key = ops.stop_gradient(block.query), ops.stop_gradient(block.key)
        # Attention over values that mark keys gives the weight on the marked keys.
        marks = marks_of(ops, key, block.head_axis, real)
        value = ops.broadcast_to(marks, (*key.shape[:-1], marks.shape[-1]))
        marked, stats = ats.attend(query, key, value, **block.options, return_stats=NEEDED)
        parts.append(query_sums(block, marked, stats, counted, saturated_weight))
        if any(part["rows"].any() for part in parts[:-1]):  # of which one has the first query
            parts[-1]["causal_sequences"] *= 0
    sums = merged(parts)
    return sums | input_sums(call, len(sums["rows"]))


def merged(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the sums of several parts of a call, or of several calls, together."""
    # Two parts, as in each sampled step, take one addition: a reduction of a new array takes several times as long.
    return {
        name: functools.reduce(np.maximum if name in LARGEST else np.add, [sums[name] for sums in parts])
        for name in parts[0]
    }


def _in_blocks(call: Call | Scores, real: Any) -> Iterator[tuple[Call, Any]]:
    """Yield a call as it is, and scores as biases of calls with scores of 0, a few queries at a time.

    With each come the queries (batch, 1, query) that count; None: all.
    """
    if isinstance(call, Call):
        yield call, counted_queries(call, real)
        return
    ops = backends.of({"scores": call.scores})
    scores = ops.stop_gradient(call.scores)
    *lead, queries, keys = scores.shape
    # Two queries or more: a single one does not show a causal mask.
    step = max(2, BLOCK // max(1, math.prod(scores.shape) // max(1, queries)))
    counted = _counted(real, (queries, keys), scores)
    for start in range(0, queries, step):
        bias = as_float32(with_infinity(scores[..., start : start + step, :], MASKED_SCORE))
        zero = ops.zeros((), bias)
        query, key = (ops.broadcast_to(zero, (*lead, n, 1)) for n in (bias.shape[-2], keys))
        block = Call(query, key, {"score": "dot", "bias": bias})
        yield block, None if counted is None else counted[..., start : start + step]


def counted_queries(call: Call, real: Any) -> Any:
    """Return the queries (batch, 1, query) of a call that count: in self-attention, those not at padding. None: all."""
    query = call.query
    if call.heads is not None and query.ndim >= 4 and query.shape[call.head_axis] != call.heads:
        return None  # heads are stacked on the axis of queries, whose length says nothing then
    if call.counted is not None:
        return call.counted
    return _counted(real, call.lengths, query)


def _counted(real: Any, lengths: tuple[int, int], like: Any) -> Any:
    """Return the queries (batch, 1, query) that are tokens, in self-attention, else None; `like` has the batch axis."""
    fits = real is not None and like.ndim >= 3 and (*real.shape,) == (like.shape[0], lengths[0])
    return real[:, None] if fits and lengths[0] == lengths[1] else None


def query_sums(call: Call, marked: Any, stats: Any, counted: Any, saturated_weight: float) -> dict[str, Array]:
    """Return the sums of a call over the queries that are `counted` (None: all), from its statistics.

    `marked` has the weights on the first key, and on padding where it is known.
    """
    marks = np.asarray(detached(as_float32(marked)))
    # In NumPy from here on: on a few thousand queries its calls cost a fraction of PyTorch's.
    statistics = [np.asarray(detached(getattr(stats, name))) for name in NEEDED]
    numbers = [_by_head(x, call.head_axis, call.heads) for x in (*statistics, *np.moveaxis(marks, -1, 0))]
    return _add_up(numbers, None if counted is None else np.asarray(detached(counted)), saturated_weight)


def _by_head(x: NDArray[Any], head_axis: int, heads: int | None) -> NDArray[Any]:
    """Reshape an array with the queries' numbers to (batch, head, query).

    Where the model has `heads` heads and the array as many stacked as queries, each is a head of one query.
    """
    if head_axis == -2 and x.ndim >= 3:
        x = x.swapaxes(-1, -2)
    *lead, array_heads, queries = x.shape if x.ndim >= 3 else (*x.shape[:-1], 1, x.shape[-1])
    if heads is not None and x.ndim >= 3 and heads == array_heads * queries:
        return x.reshape(-1, heads, 1)
    return x.reshape(math.prod(lead), array_heads, queries)


def _add_up(numbers: list[NDArray[Any]], counted: NDArray[Any] | None, saturated_weight: float) -> dict[str, Array]:
    """Return sums over (batch, head, query) of numbers in the order of `NEEDED`, then first key and padding."""
    mean, variance, log_sum_exp, entropy, max_weight, sum_weights, squares, max_score, first_key, *padding = numbers
    is_counted = True if counted is None else counted
    alive, empty, is_nan = (x & is_counted for x in (sum_weights > 0, sum_weights <= 0, np.isnan(sum_weights)))
    # A single attended key has the whole weight and no variance; saturated queries with a choice have a variance.
    choice = alive & ~((variance == 0) & (max_weight >= 1 - 1e-6))
    alone = alive & ~choice
    # Under a causal mask the first query has one key. Other masks, as of a graph, may leave one key to any query.
    is_first_alone = np.take_along_axis(alone, alive.argmax(-1)[..., None], -1) if alone.shape[-1] else alone
    counts = {
        "rows": alive,
        "empty_rows": empty,
        "nan_rows": is_nan,
        "choice_rows": choice,
        "causal_sequences": np.where(is_first_alone, choice.any(-1, keepdims=True), -1 * alone.any(-1, keepdims=True)),
        "saturated_rows": choice & (max_weight >= saturated_weight),
        "padding_rows": alive & bool(padding),
        # Weights are NaN where a score is infinite: the sum of exponentials was.
        "overflow_rows": is_nan & (max_score == np.inf),
    }
    of_rows = {
        "logit_mean": mean,
        "logit_variance": variance,
        "log_sum_exp": log_sum_exp,
        "entropy": entropy,
        "max_weight": max_weight,
        "effective_keys": np.exp(entropy),
        "jacobian_trace": sum_weights,
        "squares": squares,
        "first_key": first_key,
        "padding": padding[0] if padding else 0 * first_key,
    }
    # Selecting queries costs more than all the sums: where all count, as in most models, it is left out.
    if not alive.all():
        of_rows = {name: np.where(alive, x, 0) for name, x in of_rows.items()}
        max_score = np.where(alive, max_score, -np.inf)
    sums = {name: np.asarray(x.sum((0, 2), dtype=np.float64)) for name, x in (counts | of_rows).items()}
    sums["jacobian_trace"] -= sums.pop("squares")  # sum p - sum p^2
    return sums | {"max_logit": max_score.max((0, 2), initial=-np.inf).astype(np.float64)}


def input_sums(call: Call | Scores, heads: int) -> dict[str, Array]:
    """Return sums over the sequences of a call from its queries, keys and values, each (head,), without the weights.

    `query_variance` is trace Cov(q) trace Cov(k) scale^2, where the score is a multiple of q.k: in the mean over the
    keys, the variance over the queries of a key's logits minus their queries' mean logits is at most this;
    `scale_ratio` is the scale as a multiple of 1/sqrt(d); `value_spread` is the share of the values' squares that their
    mean does not explain: 0 where all are alike; `other_score` is 1 where the score is known to be no multiple of q.k,
    as a cosine; `biased` is 1 where a bias is no mask.
    """
    sums = {name: np.zeros(heads) for name in ("sequences", "query_variance", "value_sequences", "value_spread")}
    sums |= {f"nan_{name}": np.zeros(heads) for name in ("query", "key", "value")}
    first = call.scores if isinstance(call, Scores) else call.query
    sums["dtype_max"] = np.full(heads, -lowest_finite(first))
    sums["scale_ratio"] = np.full(heads, math.nan)
    sums["other_score"], sums["biased"] = np.zeros(heads), np.zeros(heads)
    for name, length in zip(("queries", "keys"), call.lengths, strict=True):
        sums[name] = np.full(heads, float(length))
    if isinstance(call, Scores):
        return sums
    score = scores.resolve(call.options.get("score", "scaled_dot"))
    sums["other_score"] += not all(type(part) in _PRODUCTS for part in scores_in(score))
    if (bias := call.options.get("bias")) is not None:
        sums["biased"] += bool(((bias != 0) & (bias != -math.inf)).any())
    arrays = {"query": call.query, "key": call.key, "value": call.value}
    moments = {name: _moments(x, call.head_axis, heads) for name, x in arrays.items() if x is not None}
    known = {name: x for name, x in moments.items() if x is not None}
    for name, (square, spread) in known.items():
        is_finite = np.isfinite(square)
        sums[f"nan_{name}"] = (~is_finite).sum(0, dtype=np.float64)
        if name == "value":
            share = np.divide(spread, square, out=np.zeros_like(square), where=is_finite & (square > 0))
            sums |= {"value_sequences": is_finite.sum(0, dtype=np.float64), "value_spread": share.sum(0)}
    dim = call.query.shape[-1]
    scale = _score_scale(score, dim)
    if scale is None or call.lengths[0] <= 1:
        return sums
    sums["scale_ratio"] = np.full(heads, scale * math.sqrt(dim))
    if "query" in known and "key" in known:
        with np.errstate(all="ignore"):  # of numbers that are not finite
            variance = scale**2 * known["query"][1] * known["key"][1]
        is_finite = np.isfinite(variance)
        sums["sequences"] = is_finite.sum(0, dtype=np.float64)
        sums["query_variance"] = np.where(is_finite, variance, 0).sum(0)
    return sums


def _moments(x: Any, head_axis: int, heads: int) -> list[Array] | None:
    """Return the mean square of the positions of each (sequence, head), and the part that their mean does not explain.

    With NaN or infinity in an array, its mean square is not finite. None where it has its heads in another axis, as
    single queries of a GQA group, or holds no numbers to sum.
    """
    ops = backends.of({"x": x})
    if not ops.is_floating(x) or ops.unsupported(x) is not None:
        return None
    x = ops.stop_gradient(x)
    x = x.swapaxes(-3, -2) if head_axis == -2 and x.ndim >= 4 else x
    array_heads = x.shape[-3] if x.ndim >= 4 else 1
    if array_heads == 0 or heads % array_heads or x.shape[-2] == 0:
        return None
    x, length = as_float32(x).reshape(-1, array_heads, *x.shape[-2:]), x.shape[-2]
    with np.errstate(all="ignore"):  # of numbers that are not finite
        # Neither way makes an array as large as this one, which takes longer than the sums.
        if isinstance(x, np.ndarray):
            squares, total = np.einsum("...ij,...ij->...", x, x, dtype=np.float64), x.sum(-2, dtype=np.float64)
        else:
            squares, total = ops.xp.linalg.vector_norm(x, dim=(-2, -1)) ** 2, x.sum(-2)
        square, of_mean = squares / length, ((total / length) ** 2).sum(-1)
        moments = [np.asarray(detached(x), np.float64) for x in (square, (square - of_mean).clip(0))]
    return [np.repeat(moment, heads // array_heads, axis=-1) for moment in moments]


def _score_scale(score: Any, dim: int) -> float | None:
    """Return the factor of q.k in a score; None where the score is no multiple of q.k by one number."""
    if type(score) is ats.Dot:
        return 1.0
    if type(score) is not ats.ScaledDot:
        return None
    return dim**-0.5 if score.scale is None else float(score.scale) if isinstance(score.scale, (int, float)) else None


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


def with_infinity(x: Any, bound: float) -> Any:
    """Return x with -inf for numbers that models write for it: up to `bound`, or to half of the dtype's lowest."""
    masked, ops = x <= max(lowest_finite(x) / 2, bound), backends.of({"x": x})
    return ops.where(masked, ops.full((), -math.inf, x), x) if bool((masked & (x != -math.inf)).any()) else x


def lowest_finite(x: Any) -> float:
    """Return the lowest finite number of an array's dtype."""
    dtype = backends.of({"x": x}).dtype(x)
    return -(2.0**128 - 2.0**120 if dtype == "bfloat16" else largest_of(dtype))


def as_float32(x: Any) -> Any:
    """Return float16 and bfloat16 as float32, in which their sums are exact enough."""
    ops = backends.of({"x": x})
    return ops.astype(x, accumulator(ops.dtype(x)))


def describe_error(error: Exception) -> str:
    """Describe an error of recording in one line."""
    if isinstance(error, NotRecorded):
        return str(error)
    kind = "refused" if isinstance(error, AttnscoreError) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())[:160]}"
