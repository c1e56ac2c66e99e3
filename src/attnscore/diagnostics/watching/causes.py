"""Causes of failures, and their numbers in words.

Requirements:
- a cause follows from which heads and layers fail, since when, and from the numbers at the first step;
- every cause is a key of `REMEDIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnscore.diagnostics.watching.health import NO_EFFECT, WITH_LOSS, Period, Thresholds, logit_size

# A model that fails in this number of first steps, or first sampled steps, had no warm-up.
EARLY_STEPS, EARLY_SAMPLED_STEPS = 20, 4
# Tokens are alike when their mean explains all but this share of the squares of a layer's values. Healthy layers went
# down to 0.014 in their first steps; layers whose tokens had become alike were at 0.004 or less.
_ALIKE = 0.01
# Causes whose remedies make q.k smaller, and the cause in their place where the score is no multiple of q.k.
_LARGE_PRODUCTS = (
    "weights of one head too large",
    "no scale, or weights that start too large",
    "logits that grow while the loss suffers",
)
SCORE_SCALE = "scale of the score too large"
# A softmax this close to one key has a Jacobian with a trace below this.
_ONE_KEY = 0.1
# QK-clip that ends a saturation leaves this share of the variance of a saturated head: a quarter of its logits.
_CLIPPED_VARIANCE = 1 / 16


@dataclass
class Failures:
    """Present failures of a model: the heads of each layer and sign, and the context of the run."""

    first_step: int
    """First sampled step."""
    early_until: float
    """Last step at which a failure is one of the beginning."""
    heads: Mapping[str, int]
    periods: dict[str, list[Period]] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)
    """Layers in which the logits of a head grew or saturated queries early, be it a failure or none."""

    def showing(self, layer: str, *signs: str) -> set[int]:
        """Return the heads of a layer that show one of these signs."""
        return {period.head for period in self.periods.get(layer, ()) if period.sign in signs}

    def count_layers(self, *signs: str) -> int:
        """Return the number of layers in which half of the heads or more show one of these signs."""
        return sum(2 * len(self.showing(layer, *signs)) >= count for layer, count in self.heads.items())

    def is_alone(self, layer: str) -> bool:
        """Return whether there are other layers, and nothing fails or grows in them."""
        return len(self.heads) > 1 and not (self.periods.keys() | self.growing) - {layer}

    def is_later(self, layer: str, period: Period) -> bool:
        """Return whether a head of another layer failed before."""
        others = [each for name, periods in self.periods.items() if name != layer for each in periods]
        return any(each.first < period.first for each in others)


def cause_of(layer: str, period: Period, failures: Failures, limit: Thresholds) -> str:
    """Return the most likely cause of a failure, a key of `REMEDIES`."""
    cause = _cause_of_product(layer, period, failures, limit)
    # QK-clip has no factor for scores that are no multiple of q.k.
    return SCORE_SCALE if cause in _LARGE_PRODUCTS and math.isnan(period.evidence["clip"]) else cause


def _cause_of_product(layer: str, period: Period, failures: Failures, limit: Thresholds) -> str:
    """Return the cause as of a score that is q.k times a number."""
    sign, numbers = period.sign, period.evidence
    if sign in ("not a number", "near overflow"):
        return _cause_of_nan(layer, period, failures)
    if sign == "padding":
        return "inverted mask" if numbers["padding"] >= limit.inverted_mass else "no padding mask"
    if sign == "causal leak":
        return "no causal mask"
    if sign == "sink in every head":
        return "a first key that takes all weight"
    if sign == "uniform" or (sign in ("another scale", "unusual scale") and numbers["scale_ratio"] < 1):
        return "scale applied twice, or weights that are too small"
    if sign in ("another scale", "unusual scale"):
        return "no scale, or weights that start too large"
    if sign in WITH_LOSS:
        return "logits that grow while the loss suffers"
    if sign in NO_EFFECT:
        return _cause_of_no_effect(layer, period, failures, limit)
    return _cause_of_saturation(layer, period, failures, limit)


def _cause_of_nan(layer: str, period: Period, failures: Failures) -> str:
    """Return the cause of NaN, or of logits near overflow."""
    numbers = period.evidence
    if period.sign == "near overflow" or numbers["overflow_rows"] > 0:
        return "scores above the range of the dtype"
    # NaN from before the layer reaches queries, keys and values of all its heads in the same step.
    at_first = [each for each in failures.periods[layer] if each.sign == period.sign and each.first == period.first]
    inputs = [numbers[f"nan_{name}"] > 0 for name in ("query", "key", "value")]
    if len(at_first) < failures.heads[layer] or (any(inputs) and not all(inputs)):
        return "NaN or infinity in the weights of one head"
    return "NaN or infinity in the layer's input or weights"


def _cause_of_no_effect(layer: str, period: Period, failures: Failures, limit: Thresholds) -> str:
    """Return the cause of alike queries, keys or values: one of the layer where all its heads show such signs."""
    numbers = period.evidence
    # Tokens that are alike have alike queries and keys too: values alone may have weights of 0.
    of_values = period.sign == "values alike" and not numbers["query_variance"] < limit.query_variance
    everywhere = (
        len(failures.showing(layer, *NO_EFFECT)) == failures.heads[layer]
        and not numbers["value_spread"] > _ALIKE
        and not of_values
    )
    if everywhere and failures.count_layers("saturated"):
        return _cause_in_rate(period, failures)
    # Scores without values: a model whose tokens are alike is known by its queries and keys, both without effect.
    if everywhere and numbers["value_spread"] <= _ALIKE:
        return "tokens that have become alike"
    if period.sign == "values alike":
        return "values that are all alike"
    if period.sign == "dead":
        return "keys that are all alike"
    one_key = numbers["jacobian_trace"] < _ONE_KEY
    return "one key that outweighs all others" if one_key else "queries that are all alike"


def _cause_of_saturation(layer: str, period: Period, failures: Failures, limit: Thresholds) -> str:
    """Return the cause of a saturated head, by how many heads and layers are saturated, and since when."""
    if failures.showing(layer, "sink in every head"):
        return "a first key that takes all weight"
    if period.head in failures.showing(layer, "no use of the query"):
        return _cause_of_no_effect(layer, period, failures, limit)
    heads = failures.showing(layer, "saturated")
    is_early = period.first <= failures.early_until
    several = 2 * len(heads) >= failures.heads[layer] and len(heads) > 1
    # The only head of a layer has no others that tell: its scale does.
    is_unscaled = failures.heads[layer] == 1 and period.evidence["scale_ratio"] >= limit.scale_factor
    if period.first == failures.first_step or (is_early and is_unscaled):
        if several or is_unscaled:
            return "no scale, or weights that start too large"
        return "weights of one head too large"
    if failures.count_layers("saturated", *NO_EFFECT) > 1 or failures.is_later(layer, period):
        return _cause_in_rate(period, failures)
    if several and is_early and not failures.is_alone(layer):
        return _cause_in_rate(period, failures)
    return "learning rate of one layer too large" if several else "weights of one head too large"


def _cause_in_rate(period: Period, failures: Failures) -> str:
    early = period.first <= failures.early_until
    return "no warm-up, or a learning rate that starts too large" if early else "learning rate too large"


def tau_of(heads: Sequence[Mapping[str, float]], limit: Thresholds) -> float:
    """Return the tau, with one significant digit, at which QK-clip leaves no softmax of some heads saturated.

    >>> tau_of([{"max_logit": 62.3, "logit_variance": 217.0}], Thresholds())
    10.0
    """
    target = _CLIPPED_VARIANCE * limit.saturated_variance
    taus = [
        logit_size(numbers) * math.sqrt(target / numbers["logit_variance"])
        for numbers in heads
        if numbers["logit_variance"] > target
    ]
    return min([limit.tau, *(float(f"{tau:.1g}") for tau in taus if 0 < tau < math.inf)])


def describe(period: Period, now: Mapping[str, float], limit: Thresholds) -> str:
    """Return the numbers of a verdict in words: of the last steps; of the first if the sign has gone, or is NaN."""
    is_recent = period.holds and period.sign != "not a number" and now["rows"] > 0
    numbers = now if is_recent else period.evidence
    sign, largest, variance = period.sign, numbers["max_logit"], numbers["logit_variance"]
    times_usual = f"{numbers['scale_ratio']:.3g} times 1/sqrt(d)"
    percent = 100 * numbers["saturated_rows"]
    sharp = f"{percent:.0f} % of the queries have a weight of {limit.saturated_weight:g} or more"
    sharp += f", variance of the logits {variance:.3g}"
    words = {
        "not a number": _nan_words(numbers),
        "near overflow": f"logits up to {largest:.3g} of {numbers['dtype_max']:.3g} that the dtype holds",
        "padding": f"{100 * numbers['padding']:.1f} % of the weight is on padding",
        "causal leak": "it attends to later keys, which layers of the same kind do not",
        "saturated": f"{sharp}, largest {largest:.3g}",
        "dead": f"variance of the logits {variance:.2g}: it averages",
        "no use of the query": f"queries give a logit a variance of {numbers['query_variance']:.2g} at most",
        "values alike": f"the variance of the values is {numbers['value_spread']:.2g} of their mean square",
        "sink in every head": f"{100 * numbers['first_key']:.1f} % of the weight is on the first key",
        "another scale": f"q.k times {times_usual}, where layers of the same kind have about 1/sqrt(d)",
        "sharp": sharp,
        "large logits": f"up to {largest:.3g}",
        "growing logits": f"the largest is {largest:.3g}",
        "collapsing entropy": f"{numbers['entropy']:.3g} nats",
        "uniform": f"variance of the logits {variance:.2g}",
        "unusual scale": f"q.k times {times_usual}, variance of the logits {variance:.2g}",
        "sink": f"{100 * numbers['first_key']:.0f} % of the weight is on the first key",
        "empty rows": f"{numbers['empty_rows']:.0f} queries are fully masked",
    }
    return words[sign]


def _nan_words(numbers: Mapping[str, float]) -> str:
    """Return how many queries have no numbers, and which inputs hold NaN or infinity."""
    if numbers["nan_rows"] == 0:  # of the values alone
        return "the weights are numbers; NaN or infinity in its values, and so in its outputs"
    inputs = [name for name in ("query", "key", "value") if numbers[f"nan_{name}"] > 0]
    # "query, key and value"
    listed = " and ".join(inputs).replace(" and ", ", ", len(inputs) - 2)
    where = f", NaN or infinity in its {listed}" if inputs else ""
    if numbers["overflow_rows"] > 0:
        where += f", scores above {numbers['dtype_max']:.3g}"
    return f"{numbers['nan_rows']:.0f} queries have weights that are not numbers{where}"
