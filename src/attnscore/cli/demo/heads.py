"""Statistics and patterns of every head of a model, and the choice of heads that are drawn.

- All numbers are means over the real query tokens of all sentences; padding counts nowhere.
- Arrays are (layer, head).
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
    """Return means of the statistics of the same pass, each (layer, head); `real` is (batch, token)."""

    def mean(x: Any) -> Array:
        return np.asarray(x.double().transpose(1, 2)[real].mean(0))

    found = [
        {
            "logit_variance": mean(call.stats.var_score),
            "entropy": mean(call.stats.entropy),
            "largest_weight": mean(call.stats.max_weight),
            # The mean of exp(H), not exp of the mean: a head that is sharp on half the queries is no broad head.
            "effective_keys": mean(call.stats.effective_keys()),
        }
        for call in calls
    ]
    return {name: np.stack([numbers[name] for numbers in found]) for name in STATISTICS}


def head_patterns(calls: Sequence[AttentionCall], real: Any) -> dict[str, Array]:
    """Return the weight on the token itself, the one before, the one after, [CLS] and [SEP], each (layer, head)."""
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
    # [CLS] counts as [CLS] only: many heads put their weight there when no other key matches.
    return {
        "itself": np.where(token > 0, token, -1),
        "the token before": np.where(token > 1, token - 1, -1),
        "the token after": np.where(token < last, token + 1, -1),
        "[CLS]": np.zeros_like(token),
        "[SEP]": last,
    }


def choose_heads(entropy: Array, patterns: Mapping[str, Array]) -> dict[str, tuple[int, int]]:
    """Choose six different heads: the sharpest, the broadest, and those with most weight on a place.

    Where a head that was chosen before has more weight on a place, the title ends in "of the others".
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
