"""Report of an `Inspection` as one HTML file, which opens offline in any browser.

Requirements:
- nothing is fetched: the file contains plotly's script, the style and the data;
- the file holds queries and keys, not weights: n x dim numbers a head in place of n x n, from which the page computes
  the exact weights of any block, under any temperature;
- queries and keys are 16-bit fractions of their head's largest: a score is off by less than 1e-4 of the largest;
- tables and sentences give the numbers of the plots too, and every control is a button, a list or a field.
"""

from __future__ import annotations

import base64
import html
import json
import math
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore.diagnostics.inspection.head_metrics import SETTINGS, STATISTICS
from attnscore.diagnostics.page import write_html
from attnscore.io import require

if TYPE_CHECKING:
    from attnscore.diagnostics.inspection.inspection import Inspection

# Strongest edges of each head in its table.
_EDGES = 10
_STEPS = 2**15 - 1
# Smaller weights than exp(-16) are stored as 0.
_DEEPEST, _LOG_STEPS = 16.0, 2**16 - 1


def write(inspection: Inspection, path: Path, megabytes: float) -> Path:
    """Write the report to `path`, whole or not at all."""
    offline = require("plotly.offline", "report", "pip install 'attnscore[inspect]'")
    folder = resources.files("attnscore.diagnostics.inspection")
    sections, style, script = (folder.joinpath(f"report.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    # In the script that contains the data "</script" would end it, and "<!--" with "<script" keep its end tag from it.
    data = json.dumps(_data(inspection, megabytes), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    text = html.escape(" ".join(inspection.tokens))
    tokens = f'<details><summary>The text, as tokens</summary><p class="text">{text}</p></details>'
    scripts = (
        f"<script>{offline.get_plotlyjs()}</script>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>{script}</script>",
    )
    title = f"Attention of {inspection.model}"
    return write_html(path, title, inspection.facts, tokens, "\n".join([sections, *scripts]), style)


def _data(inspection: Inspection, megabytes: float) -> dict[str, Any]:
    """Return everything that the page's script shows, for JSON; only heads within `megabytes` have maps."""
    drawn = _drawn(inspection, megabytes)
    layers = []
    for place, layer in enumerate(inspection.layers):
        heads = [head for head in range(layer.heads) if (place, head) in drawn]
        layers.append({"name": layer.name, "heads": layer.heads} | _maps(inspection, place, heads))
    head_counts = [layer.heads for layer in inspection.layers]
    numbers = {name: _rounded(values, head_counts) for name, values in inspection.statistics.items()}
    settings = {
        name: {"title": SETTINGS[name].title, "temperature": SETTINGS[name].temperature}
        | {statistic: _rounded(values, head_counts) for statistic, values in by_statistic.items()}
        for name, by_statistic in inspection.settings.items()
    }
    return {
        "tokens": list(inspection.tokens),
        "layers": layers,
        "statistics": {name: words._asdict() | {"values": numbers[name]} for name, words in STATISTICS.items()},
        "settings": settings,
        "links": [
            [inspection.top_links(place, head, _EDGES) for head in range(layer.heads)]
            for place, layer in enumerate(inspection.layers)
        ],
    }


def _rounded(values: NDArray[np.float64], head_counts: list[int]) -> list[list[float | None]]:
    """Return numbers (layer, head) as a list for each layer, without heads that it has not; NaN as None, for JSON."""
    # Five significant digits are enough to compare, in a third of the bytes.
    return [
        [float(f"{x:.5g}") if math.isfinite(x) else None for x in row[:count]]
        for row, count in zip(values.tolist(), head_counts, strict=True)
    ]


def _drawn(inspection: Inspection, megabytes: float) -> set[tuple[int, int]]:
    """Return the heads whose maps fit into `megabytes`, chosen by lowest entropy."""
    entropy, bytes_left, drawn = inspection.statistics["entropy"], megabytes * 10**6, set()
    length = len(inspection.tokens)
    # NaN, where a layer has fewer heads than another, comes last.
    order = np.argsort(entropy, axis=None, kind="stable")[: np.isfinite(entropy).sum()]
    for layer, head in zip(*np.unravel_index(order, entropy.shape), strict=True):
        inputs = inspection.layers[layer].inputs
        # Numbers of 16 bits for each token: a query and a key, or with a bias the weights. Keys that heads share are
        # counted for each of them: the sum is an upper bound.
        bytes_left -= 2 * length * (2 * int(inputs["query"].shape[-1]) if inputs["bias"] is None else length)
        if bytes_left < 0:
            break
        drawn.add((int(layer), int(head)))
    return drawn


def _maps(inspection: Inspection, place: int, heads: list[int]) -> dict[str, Any]:
    """Return the data from which the page draws the maps of a layer's heads."""
    layer = inspection.layers[place]
    if layer.inputs["bias"] is not None:
        # A bias for each pair takes as much as the weights.
        return {"weights": {str(head): _log_weights(inspection.weights(place, head)) for head in heads}}
    inputs = layer.inputs
    query, key = (np.asarray(inputs[name][0].double()) for name in ("query", "key"))
    group = query.shape[0] // key.shape[0]
    sink = inputs["sink"]
    return {
        "scale": layer.scale,
        "cap": float(inputs["score"].cap) if isinstance(inputs["score"], ats.SoftCap) else None,
        "sink": None if sink is None else [float(x) for x in np.broadcast_to(np.asarray(sink.double()), layer.heads)],
        "visible": _visible(inputs["mask"], len(inspection.tokens)),
        "group": group,
        "query": {str(head): _fractions(query[head]) for head in heads},
        "key": {str(head): _fractions(key[head]) for head in sorted({head // group for head in heads})},
    }


def _visible(mask: Any, length: int) -> list[list[int]] | str | None:
    """Return the unmasked pairs: None for all, [starts, stops] where each query's keys are one range, else bits."""
    if mask is None:
        return None
    if isinstance(mask, ats.Mask):
        mask = mask.materialize(length, length)
    unmasked = np.broadcast_to(np.asarray(mask), (1, 1, length, length))[0, 0]
    if unmasked.all():
        return None
    starts, counts = unmasked.argmax(1), unmasked.sum(1)
    columns = np.arange(length)
    if (((columns >= starts[:, None]) & (columns < (starts + counts)[:, None])) == unmasked).all():
        return [starts.tolist(), (starts + counts).tolist()]
    return _base64(np.packbits(unmasked))


def _fractions(x: NDArray[np.float64]) -> dict[str, Any]:
    """Return numbers as 16-bit multiples of a unit, with which the largest is `_STEPS`."""
    largest = float(np.abs(x).max(initial=0.0)) or 1.0
    return {"unit": largest / _STEPS, "numbers": _base64(np.round(x / largest * _STEPS).astype("<i2"))}


def _log_weights(weights: NDArray[np.float64]) -> str:
    """Return -log of weights in 16 bits: 0 is a weight of 1, `_LOG_STEPS` one of exp(-16) or less."""
    with np.errstate(divide="ignore"):
        depth = np.minimum(-np.log(weights), _DEEPEST)
    return _base64(np.round(depth / _DEEPEST * _LOG_STEPS).astype("<u2"))


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
