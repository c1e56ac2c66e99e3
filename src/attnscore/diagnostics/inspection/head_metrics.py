"""Statistics of each head in an inspection, and the scales of the scores under which heads are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import attnscore as ats

if TYPE_CHECKING:
    from attnscore.diagnostics.inspection.inspection import Layer
    from attnscore.integrations.transformers import AttentionCall

Array = NDArray[np.float64]


class Statistic(NamedTuple):
    """Title (with the unit) and meaning of a number of each head."""

    title: str
    meaning: str


STATISTICS = {
    "entropy": Statistic("Entropy (nats)", "−Σ p log p of a query's weights; mean over the queries"),
    "effective_keys": Statistic("Effective keys", "exp(entropy): over how many keys the weights spread; mean"),
    "largest_weight": Statistic("Largest weight", "of a query; mean over the queries"),
    "logit_variance": Statistic("Logit variance", "of a query's scores over the keys that it attends to; mean"),
    "largest_logit": Statistic("Largest logit", "over all queries and keys"),
    "jacobian_trace": Statistic("Jacobian trace", "1 − Σ p²: near 0 the softmax passes no gradient; mean"),
    "first_key": Statistic("Weight on the first token", "of a query; mean: near 1 the first token is a sink"),
}


class Setting(NamedTuple):
    """Scale of the scores: the model's own divided by a temperature."""

    title: str
    temperature: float | None
    """Divisor of the scores; None: the scores without the model's scale."""


SETTINGS = {
    "model": Setting("as the model computes it", 1.0),
    "unscaled": Setting("without the scale", None),
    "cold": Setting("temperature 0.5", 0.5),
    "warm": Setting("temperature 2", 2.0),
}


def _stacked(rows: Sequence[Array]) -> Array:
    """Stack the heads of each layer as (layer, head), with NaN where a layer has fewer heads than another."""
    widest = max(row.size for row in rows)
    return np.stack([np.pad(row, (0, widest - row.size), constant_values=np.nan) for row in rows])


def _mean(x: Any) -> Array:
    """Return the mean over the queries of each head."""
    return np.asarray(x[0].double().mean(-1))


def statistics_of(calls: Sequence[AttentionCall], layers: Sequence[Layer]) -> dict[str, Array]:
    """Return each of `STATISTICS`, (layer, head), from the model's own pass."""
    by_layer = []
    for call, layer in zip(calls, layers, strict=True):
        stats, mass = call.stats, layer.apply(ats.key_mass)
        by_layer.append(
            {
                "entropy": _mean(stats.entropy),
                "effective_keys": _mean(stats.effective_keys()),
                "largest_weight": _mean(stats.max_weight),
                "logit_variance": _mean(stats.var_score),
                "largest_logit": np.asarray(stats.max_score[0].double().amax(-1)),
                "jacobian_trace": _mean(stats.jacobian_trace()),
                "first_key": np.asarray(mass[0, :, 0].double() / stats.entropy.shape[-1]),
            }
        )
    return {name: _stacked([numbers[name] for numbers in by_layer]) for name in STATISTICS}


def under(layers: Sequence[Layer], setting: str) -> dict[str, Array]:
    """Return mean entropy and largest weight, each (layer, head), under one of `SETTINGS`."""
    fields = {"entropy": "entropy", "largest_weight": "max_weight"}
    # The statistics do not depend on the values: one feature is the fastest.
    stats = [
        layer.apply(ats.attend, layer.inputs["key"][..., :1], setting=setting, return_stats=tuple(fields.values()))[1]
        for layer in layers
    ]
    return {name: _stacked([_mean(getattr(x, field)) for x in stats]) for name, field in fields.items()}
