"""The numbers that an inspection gives of each head, and the scales under which it compares them."""

from __future__ import annotations

from typing import NamedTuple


class Statistic(NamedTuple):
    """A number of each head: its title, what it is, and the unit."""

    title: str
    meaning: str


STATISTICS = {
    "entropy": Statistic("Entropy (nats)", "−Σ p log p of a query's weights; mean over the queries"),
    "effective_keys": Statistic("Effective keys", "exp(entropy): over how many keys the weights spread; mean"),
    "largest_weight": Statistic("Largest weight", "of a query; mean over the queries"),
    "logit_variance": Statistic("Logit variance", "of a query's scores over the keys that it sees; mean"),
    "largest_logit": Statistic("Largest logit", "over all queries and keys"),
    "jacobian_trace": Statistic("Jacobian trace", "1 − Σ p²: near 0 the softmax passes no gradient; mean"),
    "first_key": Statistic("Weight on the first token", "of a query; mean: near 1 the head rests there (a sink)"),
}


class Setting(NamedTuple):
    """Another scale of the scores, beside the model's own."""

    title: str
    temperature: float | None
    """None: the scores without the model's scale."""


SETTINGS = {
    "model": Setting("as the model computes it", 1.0),
    "unscaled": Setting("without the scale", None),
    "cold": Setting("temperature 0.5", 0.5),
    "warm": Setting("temperature 2", 2.0),
}
