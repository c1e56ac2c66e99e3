"""What the numbers of a head mean, in words: thresholds, verdicts, the factor of QK-clip.

What this module meets:
- every threshold is a field that can be set, with the reason for its default beside it;
- a verdict names its numbers; those that are failures are told from those that are only worth knowing;
- trends need four sampled steps or more, and compare the first quarter of them with the last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnscore.errors import ArgumentError, message

# The fewest sampled steps in which a trend is looked for.
TREND_STEPS = 4


@dataclass(frozen=True)
class Thresholds:
    """When a head is called what.

    Attributes
    ----------
    saturated_weight : a row is saturated when its largest weight is at least this
    saturated_rows : a head is sharp when at least this share of its rows is saturated
    saturated_variance : and saturated, which is a failure, when the variance of its logits is this large as well. A row
        among 64 keys needs a lead of about 9, a variance of about 20, to be sharp. A head that has learnt to look at
        the token before is sharp at 118 in a healthy model (all-MiniLM-L6-v2); with its queries times 30 any head of
        that model has 290 or more
    collapse : entropy collapses when it falls, from the first quarter of the steps to the last, to this share or less
    growth : logits grow when the largest one rises by this factor or more, first quarter to last
    growth_least : and is this large at the end; below it nothing is at stake
    dead_variance : a head is dead when the variance of its logits within a row is below this: its weights are even to a
        tenth of a percent, it averages what comes. Of a small model that has just been initialised, that may be so
    sink_mass : a head rests on the first key when this share of the weights is there
    padding_mass : weight on padding that is worth a word
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
        """Refuse thresholds that can never, or always, be met."""
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
    """What is the matter with a head."""

    layer: str
    head: int
    what: str
    """"not a number", "saturated", "collapsing entropy", "growing logits", "large logits" or "dead"; of the other kind
    "sharp", "sink", "padding" or "empty rows"."""
    words: str
    failure: bool
    """False: worth knowing, as a sink is; many healthy models have them."""

    def __str__(self) -> str:
        return f"{self.layer}, head {self.head}: {self.what} ({self.words})"


def clip_factor(largest: float, tau: float) -> float:
    """min(1, tau / largest logit): what QK-clip multiplies q.k by.

    >>> clip_factor(400.0, 100.0), clip_factor(7.0, 100.0)
    (0.25, 1.0)
    """
    return min(1.0, tau / largest) if largest > 0 else 1.0


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of the first and of the last quarter; None when there are too few finite ones.

    >>> trend([1, 1, 2, 8])
    (1.0, 8.0)
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < TREND_STEPS:
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
    """Every verdict on one head.

    Parameters
    ----------
    numbers : a row of the table, by name
    entropies, largest : mean entropy and largest logit of each sampled step
    """
    found: list[tuple[str, str, bool]] = []
    limit, share = thresholds, numbers["saturated_rows"]
    if numbers["nan_rows"] > 0:
        words = f"{numbers['nan_rows']:.0f} rows have weights that are no numbers, and are in no mean"
        found.append(("not a number", words, True))
    if share >= limit.saturated_rows:
        variance = numbers["logit_variance"]
        words = f"{100 * share:.0f} % of the rows have a weight of {limit.saturated_weight:g} or more"
        failed = not variance < limit.saturated_variance  # what has overflowed is NaN
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
    # Rows with one visible key have no variance; a head that only had those has shown nothing.
    if numbers["choice_rows"] > 0 and numbers["logit_variance"] < limit.dead_variance:
        found.append(("dead", f"variance of the logits {numbers['logit_variance']:.2g}: it averages", True))
    if numbers["first_key"] >= limit.sink_mass:
        found.append(("sink", f"{100 * numbers['first_key']:.0f} % of the weight is on the first key", False))
    if numbers["padding"] >= limit.padding_mass:  # NaN where nothing is known of padding
        found.append(("padding", f"{100 * numbers['padding']:.1f} % of the weight is on padding", False))
    if numbers["empty_rows"] > 0:
        found.append(("empty rows", f"{numbers['empty_rows']:.0f} rows see no key", False))
    return [Verdict(layer, head, what, words, failure) for what, words, failure in found]
