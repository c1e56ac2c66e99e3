"""The picture of a watched model: layers by heads, and the heads over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from attnscore.plotting.drawing import (
    INK,
    LABEL_POINTS,
    colour_bar,
    draw_map,
    limits_of,
    new_figure,
    short_number,
    spread_limits,
    whole_number_ticks,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnscore.diagnostics.watched import Watched

_FAILED, _OTHERS = "#b2182b", "#cfd8dc"
# Of failing heads that have a name in the legend.
_NAMED = ("#b2182b", "#e08214", "#542788", "#1b7837", "#2166ac", "#01665e")
# More numbers than these in a map cannot be read; the colours still can.
_MOST_NUMBERS = 200


def overview(seen: Watched, panels: Mapping[str, str]) -> Figure:
    """A map of each number, a row for each layer; below, each head over the steps, failing ones named and coloured."""
    names, heads = list(seen.layers), max(layer.heads for layer in seen.layers.values())
    series = seen.sampled > 1
    tall = max(1.6, 0.3 * len(names) + 0.9)
    width = 2.6 + max(3.0, 0.36 * heads + 0.8)
    figure = new_figure((2 * width, 2 * tall + (2.7 if series else 0.2)))
    grid = figure.subplots(2 + series, 2, squeeze=False, height_ratios=[tall, tall, *([2.7] if series else [])])
    for axis, (name, title) in zip([*grid[0], *grid[1]], panels.items(), strict=False):
        values = np.full((len(names), heads), np.nan)
        there = np.zeros(values.shape, bool)  # layers may have fewer heads than others
        for row in seen.rows():
            place = names.index(row["layer"]), row["head"]
            values[place], there[place] = row[name], True
        wide = spread_limits(values)
        image = draw_map(axis, values, names, limits=wide or limits_of(values), logarithmic=wide is not None)
        axis.set_aspect("auto")
        if values.size <= _MOST_NUMBERS:
            write_numbers(axis, image, np.ma.masked_array(values, ~there), short_number)
        _columns(axis, heads)
        axis.set_title(title, fontsize=10, color=INK)
        colour_bar(figure, image, [axis])
    if series:
        for axis, name, title in zip(
            grid[2], ("max_logit", "entropy"), ("Largest logit", "Entropy (nats)"), strict=True
        ):
            _lines(axis, seen, name)
            axis.set_title(f"{title} of each head, by step", fontsize=10, color=INK)
    return figure


def _columns(axis: Axes, heads: int) -> None:
    labels = axis.get_yticks(), axis.get_yticklabels()
    whole_number_ticks(axis, (1, heads), every=heads <= 24)
    axis.set_yticks(labels[0], [label.get_text() for label in labels[1]])
    axis.set_xlabel("head", fontsize=9)


def _lines(axis: Axes, seen: Watched, name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    failing = list(seen.failing())
    named_ones = 0 < len(failing) <= len(_NAMED)
    label = "other heads"
    for layer in seen.layers.values():
        steps, values = seen.history(layer.name, name)
        for head in range(layer.heads):
            failed = (layer.name, head) in failing
            named = f"{layer.name}, head {head}" if failed else label
            colour = _NAMED[failing.index((layer.name, head))] if failed and named_ones else _FAILED
            (line,) = axis.plot(steps, values[:, head], color=colour if failed else _OTHERS, label=named)
            line.set(linewidth=1.6 if failed else 0.7, zorder=3 if failed else 1)
            label = label if failed else ""
    axis.set_xlabel("step", fontsize=9, color=INK)
    axis.grid(which="major", color="#e5e5e5", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=LABEL_POINTS, colors=INK)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if named_ones:
        axis.legend(fontsize=LABEL_POINTS, frameon=False, labelcolor=INK)
