"""What every head of a model does: numbers per layer and head, and which heads are worth a picture.

What this module meets:
- all numbers are means over real query tokens of all sentences; padding counts nowhere;
- arrays are (layer, head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscore.integrations.transformers import AttentionCall

Array = NDArray[np.float64]

STATISTICS = ("logit_variance", "entropy", "largest_weight", "effective_keys")


def head_statistics(calls: Sequence[AttentionCall], real: Any) -> dict[str, Array]:
    """Means of the statistics that came with the result, each (layer, head); `real` is (batch, token)."""
    found: dict[str, list[Array]] = {
        "logit_variance": [],
        "entropy": [],
        "largest_weight": [],
        "effective_keys": [],
    }
    for call in calls:
        stats = call.stats
        found["logit_variance"].append(_mean_of_rows(stats.var_score, real))
        found["entropy"].append(_mean_of_rows(stats.entropy, real))
        found["largest_weight"].append(_mean_of_rows(stats.max_weight, real))
        # The mean of exp(H), not exp of the mean: a head that is sharp on half the rows is no broad head.
        found["effective_keys"].append(_mean_of_rows(stats.effective_keys(), real))
    return {name: np.stack(rows) for name, rows in found.items()}


def _mean_of_rows(rows: Any, real: Any) -> Array:
    chosen = rows.double().transpose(1, 2)[real]
    return np.asarray(chosen.mean(0))


def head_patterns(calls: Sequence[AttentionCall], real: Any) -> dict[str, Array]:
    """How much weight goes to a place that a head may stand for, each (layer, head).

    The places: the token itself, the one before, the one after, the first ([CLS]) and the last ([SEP]).
    """
    host = np.asarray(real)
    length = host.shape[1]
    places = _places(host)
    found: dict[str, list[Array]] = {name: [] for name in places}
    for call in calls:
        weights = np.asarray(call.weights().double())
        for name, keys in places.items():
            has = host & (keys >= 0) & (keys < length)
            rows = np.take_along_axis(weights, np.clip(keys, 0, length - 1)[:, None, :, None], axis=-1)[..., 0]
            found[name].append(rows.transpose(0, 2, 1)[has].mean(0))
    return {name: np.stack(rows) for name, rows in found.items()}


def _places(real: NDArray[np.bool_]) -> dict[str, NDArray[np.int64]]:
    token = np.broadcast_to(np.arange(real.shape[1]), real.shape)
    last = np.broadcast_to(real.sum(1, keepdims=True) - 1, real.shape)
    # A place that is [CLS] counts as [CLS] only: many heads rest there when they have nothing to say.
    return {
        "itself": np.where(token > 0, token, -1),
        "the token before": np.where(token > 1, token - 1, -1),
        "the token after": np.where(token < last, token + 1, -1),
        "[CLS]": np.zeros_like(token),
        "[SEP]": last,
    }


def choose_heads(entropy: Array, patterns: Mapping[str, Array]) -> dict[str, tuple[int, int]]:
    """Six different heads: the sharpest, the broadest, and those that stand most clearly for a place.

    Where a head that was chosen before stands more clearly for a place, the name of the wish ends in "of the others".
    """
    wishes: dict[str, Array] = {"lowest entropy": -entropy, "highest entropy": entropy}
    wishes |= {f"most weight on {name}": patterns[name] for name in patterns if name != "[SEP]"}
    chosen: dict[str, tuple[int, int]] = {}
    for wish, values in wishes.items():
        order = np.dstack(np.unravel_index(np.argsort(-values, axis=None), values.shape))[0].tolist()
        heads = [(layer, head) for layer, head in order if (layer, head) not in chosen.values()]
        if heads:
            chosen[wish if heads[0] == tuple(order[0]) else f"{wish}, of the others"] = heads[0]
    return chosen
