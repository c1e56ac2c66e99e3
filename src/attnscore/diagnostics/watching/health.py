"""Verdicts on the health of a head: thresholds, signs at each sampled step, memory, causes and remedies.

Requirements:
- every threshold is a field that can be set, documented with its meaning and source;
- the last sampled steps decide whether a sign is there; the memory has its first step;
- a sign that healthy training shows too, as growing logits, is a failure only while the loss says that it hurts;
- a verdict states its numbers, its first and last step and, where it is a failure, its cause and remedy;
- consequences that an earlier failure must have, as NaN in every later layer, are counted under that failure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscore.base.arguments import warn_renamed
from attnscore.errors import ArgumentError, message

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the verdicts on a head; `docs/diagnosis.md` gives the source of each.

    Attributes
    ----------
    window : number of successive sampled steps that make a verdict, or end it; one is enough while no more were sampled
    saturated_weight : a query is saturated when its largest weight is at least this: the trace of the Jacobian of its
        softmax is then below 0.02
    saturated_rows : a head is sharp when at least this share of its queries is saturated
    saturated_variance : it is saturated, a failure, when the variance of its logits is this large as well: logits drawn
        at random, without any structure, saturate a query among 64 keys from there on. A head that has learnt where to
        look is sharp with less
    loss_allows : multiplies `saturated_variance` for a head that has come there gradually, while a loss is recorded
        that neither rises nor stays at its start
    jump : and with a quarter of that variance, where the variance has risen by this factor between two sampled steps,
        or in 20 steps of those further apart: an optimiser's steps do not do that to one head
    collapse : entropy collapses when it falls to this share of its largest or less
    growth : logits grow when the largest one is this multiple of the first one above 0
    growth_least : and is this large; smaller logits saturate no softmax
    dead_variance : a head is dead when the variance of a query's logits is below this: its weights are even to a tenth
        of a percent, and it averages all values
    query_variance : queries have no effect when the variance that they can give a logit is below this, so that none
        changes a weight by more than about a percent, where it was `jump`² times as large before or the logits differ
        all the same, without a bias; weights that are small from the start are "uniform" alone
    value_spread : values are alike when their mean explains all but this share of their squares: the weights have no
        effect on the output, and no gradient
    uniform_variance : weights are nearly uniform when the variance of the logits is below this, so that entropy is
        within 0.005 of the logarithm of the number of keys
    sink_mass : a head has a sink when this share of its weight is on the first key
    sink_layer : a layer is a sink, a failure, when every head has this share of its weight there
    padding_mass : weight on padding is a failure from this share on
    inverted_mass : the mask is inverted when this share of the weight is on padding
    scale_factor : the factor of q.k is unusual from so many times 1/sqrt(d) on, and down to this part of it. It is a
        sign only where the weights show it: a sharp head under a larger one, uniform weights under a smaller one
    tau : the largest logit that QK-clip allows
    dtype_share : logits are near overflow above this share of the largest number of the queries' dtype
    loss_rise : the loss rises when it has lost this share of its gain; a model has learnt when its loss has fallen by
        this share
    loss_start : it stays at its start when it has fallen by less than this share of it
    """

    window: int = 2
    saturated_weight: float = 0.99
    saturated_rows: float = 0.3
    saturated_variance: float = 150.0
    loss_allows: float = 4.0
    jump: float = 16.0
    collapse: float = 0.5
    growth: float = 2.0
    growth_least: float = 10.0
    dead_variance: float = 1e-6
    query_variance: float = 1e-4
    value_spread: float = 1e-6
    uniform_variance: float = 0.01
    sink_mass: float = 0.5
    sink_layer: float = 0.98
    padding_mass: float = 0.01
    inverted_mass: float = 0.9
    scale_factor: float = 4.0
    tau: float = 100.0
    dtype_share: float = 0.25
    loss_rise: float = 0.2
    loss_start: float = 0.02

    def __post_init__(self) -> None:
        """Refuse thresholds that are never or always met."""
        factors = ("jump", "growth", "loss_allows", "scale_factor")
        unbounded = ("saturated_variance", "growth_least", "tau", "window", *factors)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ArgumentError(message(each.name, "a finite number above 0", repr(value)))
            if each.name not in unbounded and value > 1:
                raise ArgumentError(message(each.name, "a share, at most 1", repr(value)))
            if each.name in factors and value <= 1:
                raise ArgumentError(message(each.name, "a factor above 1", repr(value)))
        if int(self.window) != self.window:
            raise ArgumentError(message("window", "a whole number of sampled steps", repr(self.window)))


@dataclass(frozen=True)
class Verdict:
    """Verdict on a head.

    Attributes
    ----------
    sign : str
        Failures: "not a number", "near overflow", "padding", "causal leak", "saturated", "dead", "no use of the query",
        "values alike", "sink in every head", "another scale". Failures only while the loss rises or stays at its start:
        "sharp", "large logits", "growing logits", "collapsing entropy", "uniform", "unusual scale". Never: "sink",
        "empty rows".
    words : str
        Its numbers.
    failure : bool
        Whether it is a failure now; others are worth knowing, and many healthy models have them.
    first_step, last_step : int
        The sampled steps between which the head showed the sign; `last_step` is the last sampled one where it does now.
    cause, remedy : str
        Most likely cause of a failure, and the change that ends it.
    followers : tuple of (layer, head)
        Heads that fail as a consequence.
    """

    layer: str
    head: int
    sign: str
    words: str
    failure: bool
    first_step: int = 0
    last_step: int = 0
    cause: str = ""
    remedy: str = ""
    followers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.layer}, head {self.head}: {self.sign} since step {self.first_step} ({self.words})"

    @property
    def what(self) -> str:
        """Old name of `sign`, until 0.2."""
        warn_renamed("Verdict.what", "Verdict.sign")
        return self.sign


# Signs that need no second step: they do not come and go with a batch.
_AT_ONCE = ("not a number", "near overflow", "causal leak")
# Steps that a jump may take.
_JUMP_STEPS = 20
_WITHOUT_NUMBERS = ("not a number", "near overflow", "empty rows")
FAILURES = (
    "not a number", "near overflow", "padding", "causal leak", "saturated", "dead", "no use of the query",
    "values alike", "sink in every head", "another scale",
)  # fmt: skip
# A head gets one verdict of these signs: alike tokens cause each of them.
NO_EFFECT = ("dead", "no use of the query", "values alike")
WITH_LOSS = ("sharp", "large logits", "growing logits", "collapsing entropy", "uniform", "unusual scale")
SIGNS = (*FAILURES, *WITH_LOSS, "sink", "empty rows")


def logit_size(numbers: Mapping[str, float]) -> float:
    """Return the largest logit of a head, or the standard deviation of its logits where none is above 0.

    >>> logit_size({"max_logit": -4.0, "logit_variance": 9.0})
    3.0
    """
    return numbers["max_logit"] if numbers["max_logit"] > 0 else math.sqrt(numbers["logit_variance"])


# ---------------------------------------------------------------- signs of one step


def signs_of(
    numbers: Mapping[str, Array],
    memory: Mapping[str, Array],
    limit: Thresholds,
    *,
    leaks: bool = False,
    usual_siblings: bool = False,
    uses_other_keys: bool = False,
) -> dict[str, Flags]:
    """Return for each sign the heads of a layer that show it in one step.

    `numbers` are means of the step's queries; `memory` has the variance of the step before (times what `jump` allows
    for the steps between), the largest entropy and variance by queries so far and the first largest logit above 0, NaN
    where there are none; `leaks` says that layers of the same kind are causal and this one is not, `usual_siblings`
    that they scale q.k by about 1/sqrt(d) and this one does not, `uses_other_keys` that another call of this layer in
    the step has less weight on the first key. A comparison with NaN is false.
    """
    share, variance, largest = numbers["saturated_rows"], numbers["logit_variance"], numbers["max_logit"]
    sharp = share >= limit.saturated_rows
    # A query that attends to one key gives it all the weight, whatever the model has learned.
    has_choice = numbers["choice_rows"] > 0
    # A variance that overflowed is NaN, and large.
    large = ~(variance < limit.saturated_variance)
    jumped = (variance >= limit.saturated_variance / 4) & (variance >= limit.jump * memory["logit_variance"])
    dead = variance < limit.dead_variance
    uniform = (variance < limit.uniform_variance) & ~dead & has_choice
    sinks = numbers["first_key"] >= limit.sink_layer
    scale = numbers["scale_ratio"]
    # A bias makes the logits of other queries differ, whatever the queries are.
    varies_alike = ~(variance < limit.uniform_variance) & ~(numbers["biased"] > 0)
    unusual = ((scale >= limit.scale_factor) & sharp) | ((scale <= 1 / limit.scale_factor) & uniform)
    return {
        "not a number": numbers["nan_rows"] + numbers["nan_value"] > 0,
        "near overflow": largest > limit.dtype_share * numbers["dtype_max"],
        "padding": numbers["padding"] >= limit.padding_mass,
        "causal leak": np.full(len(largest), leaks),
        "saturated": sharp & (large | jumped),
        "dead": dead & has_choice,
        "no use of the query": has_choice
        & (numbers["query_variance"] < limit.query_variance)
        & ((memory["query_variance"] >= limit.jump**2 * limit.query_variance) | varies_alike),
        "values alike": has_choice & (numbers["value_spread"] < limit.value_spread),
        "sink in every head": np.full(len(largest), bool((sinks & has_choice).all()) and not uses_other_keys),
        "another scale": unusual & usual_siblings,
        "sharp": sharp & ~large & ~jumped,
        "large logits": largest > limit.tau,
        "growing logits": (largest >= limit.growth * memory["max_logit"]) & (largest >= limit.growth_least),
        "collapsing entropy": has_choice & (numbers["entropy"] <= limit.collapse * memory["entropy"]),
        "uniform": uniform,
        "unusual scale": unusual & (not usual_siblings),
        "sink": has_choice & (numbers["first_key"] >= limit.sink_mass),
        "empty rows": numbers["empty_rows"] > 0,
    }


# ---------------------------------------------------------------- memory of a layer


class Period(NamedTuple):
    """Time during which a head shows a sign, and its numbers at the first step."""

    head: int
    sign: str
    first: int
    last: int
    holds: bool
    evidence: Mapping[str, float]
    earlier: tuple[int, int] | None
    """First and last step of the period before a present one."""


class Memory:
    """Periods of all signs of one layer, from one step after another. Arrays are (sign, head)."""

    def __init__(self, heads: int) -> None:
        shape = len(SIGNS), heads
        # Steps in succession with the sign (positive) or without it (negative).
        self._streak = np.zeros(shape, int)
        # Step at which the sign's present or last period began, and last step with the sign.
        self._first, self._last = np.full(shape, -1), np.full(shape, -1)
        self._holds = np.zeros(shape, bool)
        # By place in these arrays: numbers at the first step of the present or last period, and last ended period.
        self._evidence: dict[tuple[int, int], dict[str, float]] = {}
        self._ended: dict[tuple[int, int], Period] = {}
        self._so_far: dict[str, Array] = {
            name: np.full(heads, math.nan)
            for name in ("logit_variance", "entropy", "max_logit", "query_variance", "query_before")
        }
        self._steps, self._last_step = 0, 0

    def add(self, step: int, numbers: Mapping[str, Array], limit: Thresholds, **of_other_calls: bool) -> None:
        """Begin, lengthen or end periods by the signs of a sampled step (`signs_of`).

        `of_other_calls` are the flags of `signs_of` that compare this call with others of the step.
        """
        self._steps += 1
        old = self._so_far
        # Steps of which few are sampled may have raised the variance so far in small steps.
        rest = min(50.0, max(0.0, (step - self._last_step) / _JUMP_STEPS - 1))
        before = old["logit_variance"] * limit.jump**rest
        signs = signs_of(numbers, old | {"logit_variance": before}, limit, **of_other_calls)
        flags, saturated = np.stack([signs[sign] for sign in SIGNS]), SIGNS.index("saturated")
        # A head that has jumped keeps the sign.
        keeps = self._holds[saturated] | (self._streak[saturated] > 0)
        flags[saturated] |= keeps & (numbers["saturated_rows"] >= limit.saturated_rows)
        # A head without numbers, as with NaN, keeps the other signs that it had.
        has_numbers = (numbers["rows"] > 0) | np.isin(SIGNS, _WITHOUT_NUMBERS)[:, None]
        began = flags & (self._streak <= 0) & ~self._holds & has_numbers
        streak = np.where(flags, np.maximum(self._streak, 0) + 1, np.minimum(self._streak, 0) - 1)
        self._streak = np.where(has_numbers, streak, self._streak)
        self._first = np.where(began, step, self._first)
        for sign, head in np.argwhere(began).tolist():
            evidence = {name: float(values[head]) for name, values in numbers.items()}
            had_effect = old["query_variance"][head] >= limit.query_variance
            evidence["drifted"] = had_effect and old["query_before"][head] < limit.jump * evidence["query_variance"]
            evidence["rise"] = evidence["logit_variance"] / before[head] if before[head] > 0 else math.nan
            self._evidence[sign, head] = evidence
        self._last = np.where(flags & has_numbers, step, self._last)
        needed = np.where(np.isin(SIGNS, _AT_ONCE), 1, min(limit.window, self._steps))[:, None]
        holds = np.where(self._holds, self._streak > -limit.window, self._streak >= needed)
        for sign, head in np.argwhere(self._holds & ~holds).tolist():
            self._ended[sign, head] = self._period(sign, head, holds=False)
        self._holds, self._last_step = holds, step
        first, largest = old["max_logit"], numbers["max_logit"]
        is_first = np.isnan(first) & (largest > 0) & np.isfinite(largest)
        self._so_far = {
            "logit_variance": numbers["logit_variance"],
            "entropy": np.fmax(old["entropy"], numbers["entropy"]),
            "query_variance": np.fmax(old["query_variance"], numbers["query_variance"]),
            "max_logit": np.where(is_first, largest, first),
            "query_before": numbers["query_variance"],
        }

    def periods(self) -> Iterator[Period]:
        """Yield the period of each sign of each head that is present, and otherwise its last one."""
        for sign, head in np.ndindex(self._holds.shape):
            if self._holds[sign, head]:
                yield self._period(sign, head, holds=True)
            elif (sign, head) in self._ended:
                yield self._ended[sign, head]

    def _period(self, sign: int, head: int, *, holds: bool) -> Period:
        """Return the present period of a sign (`holds`), or the one that ends now."""
        before, place = self._ended.get((sign, head)) if holds else None, (sign, head)
        earlier = None if before is None else (before.first, before.last)
        first, last = int(self._first[place]), int(self._last[place])
        return Period(head, SIGNS[sign], first, last, holds, self._evidence[place], earlier)


# ---------------------------------------------------------------- the loss


def loss_trouble(losses: Sequence[float], limit: Thresholds) -> str:
    """Return the trouble with the losses of a run so far: "is not finite", "rises", "stays at its start", or "".

    Means over a tenth of the run, at least five steps, are compared. A loss rises when it gives back `loss_rise` of its
    gain and more than two standard errors of the last steps, or four where it never fell by `loss_rise`, by their mean
    and by their median: a few batches with a large loss raise the mean alone.

    >>> falling = [3.0 - 0.01 * i for i in range(100)]
    >>> loss_trouble(falling, Thresholds()), loss_trouble(falling + [3.0] * 40, Thresholds())
    ('', 'rises')
    """
    values = np.asarray(losses, dtype=np.float64)
    if not values.size:
        return ""
    if not math.isfinite(values[-1]):
        return "is not finite"
    values = values[np.isfinite(values)]
    part = max(5, len(values) // 10)
    if len(values) < 4 * part:
        return ""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = (sums[part:] - sums[:-part]) / part
    start, best, now = means[0], means.min(), means[-1]
    never_fell = start - best < limit.loss_rise * abs(start)
    # Of a loss that only varies, the best of the means is by chance about three standard errors below the others.
    noise = (4 if never_fell else 2) * float(np.std(values[-part:])) / math.sqrt(part)
    rise = min(now, float(np.median(values[-part:]))) - best
    if rise > max(limit.loss_rise * (start - best), noise) and rise > 1e-3 * abs(start):
        return "rises"
    # A loss that had fallen and is back at its start has risen, however unsteady it is now.
    return "stays at its start" if never_fell and start - now < limit.loss_start * abs(start) else ""
