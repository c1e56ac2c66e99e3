"""Verdicts on the health of a head: thresholds, trends, the factor of QK-clip.

Requirements:
- every threshold is a field that can be set, documented with the reason for its default;
- a verdict states its numbers and whether it is a failure or only worth knowing;
- trends need four sampled steps or more, and compare the first quarter of them with the last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnscore.errors import ArgumentError, message

# The fewest sampled steps that make a trend.
_TREND_STEPS = 4


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the verdicts on a head.

    Attributes
    ----------
    saturated_weight : a query is saturated when its largest weight is at least this
    saturated_rows : a head is sharp when at least this share of its queries is saturated
    saturated_variance : it is saturated, a failure, when the variance of its logits is this large as well. A query
        among 64 keys needs a lead of about 9, a variance of about 20, to be sharp. A head that has learnt to attend to
        the previous token is sharp at 118 in a healthy model (all-MiniLM-L6-v2); with its queries times 30 any head of
        that model has 290 or more
    collapse : entropy collapses when it falls, from the first quarter of the steps to the last, to this share or less
    growth : logits grow when the largest one rises by this factor or more, first quarter to last
    growth_least : and is this large at the end; smaller logits saturate no softmax
    dead_variance : a head is dead when the variance of a query's logits is below this: its weights are even to a tenth
        of a percent, and it averages all values. A small model that has just been initialised may have such heads
    sink_mass : a head has a sink when this share of its weight is on the first key
    padding_mass : share of the weight on padding that is worth knowing
    tau : the largest logit that QK-clip allows
    """

    saturated_weight: float = 0.99
    saturated_rows: float = 0.3
    saturated_variance: float = 150.0
    collapse: float = 0.5
    growth: float = 2.0
    growth_least: float = 10.0
    dead_variance: float = 1e-6
    sink_mass: float = 0.5
    padding_mass: float = 0.01
    tau: float = 100.0

    def __post_init__(self) -> None:
        """Refuse thresholds that are never or always met."""
        shares = ("saturated_weight", "saturated_rows", "collapse", "sink_mass", "padding_mass")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ArgumentError(message(field.name, "a number above 0", repr(value)))
            if field.name in shares and value > 1:
                raise ArgumentError(message(field.name, "a share, at most 1", repr(value)))
        if self.growth <= 1:
            raise ArgumentError(message("growth", "a factor above 1", repr(self.growth)))


@dataclass(frozen=True)
class Verdict:
    """Verdict on a head."""

    layer: str
    head: int
    what: str
    """Failures: "not a number", "saturated", "collapsing entropy", "growing logits", "large logits", "dead"; others:
    "sharp", "sink", "padding", "empty rows"."""
    words: str
    failure: bool
    """Whether it is a failure; others, as sinks, are worth knowing, and many healthy models have them."""

    def __str__(self) -> str:
        return f"{self.layer}, head {self.head}: {self.what} ({self.words})"


def clip_factor(largest: float, tau: float) -> float:
    """Return the factor min(1, tau / largest logit) by which QK-clip multiplies q.k.

    >>> clip_factor(400.0, 100.0), clip_factor(7.0, 100.0)
    (0.25, 1.0)
    """
    return min(1.0, tau / largest) if largest > 0 else 1.0


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the means of the first and of the last quarter; None when too few values are finite.

    >>> trend([1, 1, 2, 8])
    (1.0, 8.0)
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < _TREND_STEPS:
        return None
    part = len(finite) // 4
    return float(np.mean(finite[:part])), float(np.mean(finite[-part:]))


def verdicts_of(
    layer: str,
    head: int,
    numbers: Mapping[str, float],
    entropies: Sequence[float],
    largest: Sequence[float],
    thresholds: Thresholds,
) -> list[Verdict]:
    """Return every verdict on one head.

    `numbers` is its row of the table; `entropies` and `largest` are its mean entropy and largest logit by sampled step.
    """
    found: list[tuple[str, str, bool]] = []
    limit, share = thresholds, numbers["saturated_rows"]
    if numbers["nan_rows"] > 0:
        words = f"{numbers['nan_rows']:.0f} queries have weights that are not numbers; they are left out of the means"
        found.append(("not a number", words, True))
    if share >= limit.saturated_rows:
        variance = numbers["logit_variance"]
        words = f"{100 * share:.0f} % of the queries have a weight of {limit.saturated_weight:g} or more"
        failed = not variance < limit.saturated_variance  # a variance that overflowed is NaN
        found.append(("saturated" if failed else "sharp", f"{words}, variance of the logits {variance:.3g}", failed))
    fall = trend(entropies)
    if fall is not None and fall[0] > 0 and fall[1] <= limit.collapse * fall[0]:
        found.append(("collapsing entropy", f"from {fall[0]:.3g} to {fall[1]:.3g} nats", True))
    rise = trend(largest)
    if rise is not None and rise[0] > 0 and rise[1] >= max(limit.growth * rise[0], limit.growth_least):
        found.append(("growing logits", f"the largest from {rise[0]:.3g} to {rise[1]:.3g}", True))
    if numbers["max_logit"] > limit.tau:
        factor = clip_factor(numbers["max_logit"], limit.tau)
        found.append(("large logits", f"up to {numbers['max_logit']:.3g}; QK-clip would scale by {factor:.2g}", True))
    # Queries with one attended key have no variance; a head that had only those cannot be judged.
    if numbers["choice_rows"] > 0 and numbers["logit_variance"] < limit.dead_variance:
        found.append(("dead", f"variance of the logits {numbers['logit_variance']:.2g}: it averages", True))
    if numbers["first_key"] >= limit.sink_mass:
        found.append(("sink", f"{100 * numbers['first_key']:.0f} % of the weight is on the first key", False))
    if numbers["padding"] >= limit.padding_mass:  # NaN where padding is unknown
        found.append(("padding", f"{100 * numbers['padding']:.1f} % of the weight is on padding", False))
    if numbers["empty_rows"] > 0:
        found.append(("empty rows", f"{numbers['empty_rows']:.0f} queries are fully masked", False))
    return [Verdict(layer, head, what, words, failure) for what, words, failure in found]
