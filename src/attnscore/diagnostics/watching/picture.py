"""Picture of the records of a model: maps of now and of the worst step, and two numbers over the steps.

Requirements:
- darker cells are closer to collapse onto one key in every map; shares have a scale from 0 to 1, logits one around tau;
- heads with NaN have a colour of their own, heads that are not there are grey, heads with a failure are framed;
- legends stand outside of the curves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.errors import ArgumentError, message
from attnscore.plotting.drawing import (
    BLUE,
    RED,
    colour_bar,
    draw_map,
    label,
    legend,
    mark_cell,
    new_figure,
    short_number,
    style_lines,
    two_decimals,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnscore.diagnostics.watching.records import Layer, Records

# Title, unit, and the function that finds the worst of all steps.
_MAPS: dict[str, tuple[str, str, Any]] = {
    "max_logit": ("Largest logit", "logit", np.fmax),
    "entropy": ("Entropy", "nats", np.fmin),
    "saturated_rows": ("Saturated queries", "share of the queries", np.fmax),
    "first_key": ("Weight on the first key", "share of the weight", np.fmax),
}
_SERIES = ("max_logit", "entropy")
_NAN = "#7b4fb5"
_OTHERS = "#9aa5ab"
# Colours of failing heads; where there are more heads than colours, all are red and without a name.
_NAMED = (RED, "#e08214", "#8a63c9", "#2e9e5b", BLUE, "#0f9d94")
# More numbers than these in a map cannot be read; the colours still can.
_MOST_NUMBERS = 200


def draw(records: Records) -> Figure:
    """Return the picture of `Records.plot`."""
    layers = list(records.layers.values())
    if not layers:
        sampled = f"none in {records.sampled} sampled of {records.steps} steps"
        hint = "call the model inside `with watch(model)`"
        raise ArgumentError(message("plot", "a recorded attention call", sampled, hint=hint))
    names, heads = [layer.name for layer in layers], max(layer.heads for layer in layers)
    over_steps = max(len(layer.steps) for layer in layers) > 1
    pattern, short = short_names(names)
    tall = max(1.5, (0.26 if len(names) <= 12 else 0.2) * len(names) + 0.8)
    heights = [tall] * (len(_MAPS) if over_steps else len(_MAPS) // 2) + [2.5] * over_steps
    size = 2 * max(3.6, 0.3 * heads + 0.9) + 0.6, sum(heights) + 1.2
    figure = new_figure(size, title=_heading(records, pattern))
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    failing = [(names.index(layer), head) for layer, head in records.failing()]
    for place, (name, (title, unit, _)) in enumerate(_MAPS.items()):
        if over_steps:
            now, worst = axes[place]
            panels = [(now, "now", *_now(records, name)), (worst, "worst step", *_worst(records, name))]
        else:
            panels = [(axes.flat[place], "", *_now(records, name))]
        for axis, when, values, nan in panels:
            image = draw_map(axis, values.filled(math.nan), short, every=heads <= 24, **_scale(records, name))
            axis.set_aspect("auto")
            if values.size <= _MOST_NUMBERS:
                write_numbers(axis, image, values, short_number if name == "max_logit" else two_decimals)
            for row, column in np.argwhere(nan):
                _fill_nan_cell(axis, row, column)
            for layer, head in failing:
                mark_cell(axis, layer, head)
            is_left = axis in axes[:, 0]
            label(axis, f"{title}, {when}" if when else title, "head", "layer" if is_left else "", title_points=10)
        colour_bar(figure, image, [axis for axis, *_ in panels], unit)
    if over_steps:
        for axis, name in zip(axes[-1], _SERIES, strict=True):
            title, unit, _ = _MAPS[name]
            style_lines(axis, f"{title} of each head, by step", "step", unit)
            _draw_series(records, axis, name)
        # Not get_legend_handles_labels, which leaves out names that begin with "_".
        once = {str(line.get_label()): line for axis in axes[-1] for line in axis.lines}
        legend(figure, handles=list(once.values()), labels=list(once), loc="outside lower center", ncols=3)
    return figure


def _heading(records: Records, pattern: str) -> str:
    """Return the title of the picture: the heads that fail and, where they are few, why and since when."""
    words: dict[str, list[str]] = {}
    followers: set[tuple[str, int]] = set()
    for verdict in records.verdicts():
        if verdict.failure:
            text = f"{verdict.sign} since step {verdict.first_step}"
            words.setdefault(f"{verdict.layer}, head {verdict.head}", []).append(text)
            followers.update(verdict.followers)
    total = sum(layer.heads for layer in records.layers.values())
    lines = [f"Framed: {len(words)} of {total} heads fail" if words else f"None of {total} heads fails"]
    if len(words) <= len(_NAMED):
        lines += [f"{head}: {', '.join(what)}" for head, what in words.items()]
    lines += [f"{len(followers)} other heads have followed"] if followers else []
    layers = f"; layer * is {pattern}" if pattern else ""
    return "\n".join([*lines, f"Dark: close to collapse onto one key; violet: NaN{layers}"])


def _now(records: Records, name: str) -> tuple[Any, Any]:
    """Return a map of a number in the last steps, and the heads that hold NaN there."""
    recent = records.recent()
    values = _map(records, lambda layer: [row[name] for row in recent if row["layer"] == layer.name])
    has_nan = _heads_with_nan(records, int(records.thresholds.window))
    return np.ma.masked_where(has_nan, values), has_nan


def _worst(records: Records, name: str) -> tuple[Any, Any]:
    """Return a map of the worst of all kept steps, and the heads whose worst step is one with NaN."""

    def worst(layer: Layer) -> Any:
        numbers = records.history(layer.name, name)[1]
        return _MAPS[name][2].reduce(np.where(np.isfinite(numbers), numbers, math.nan), axis=0)

    values = _map(records, worst)
    # Heads that a layer does not have are masked, and not NaN.
    nan = _heads_with_nan(records) | np.isnan(values.filled(0.0))
    return np.ma.masked_where(nan, values), nan


def _heads_with_nan(records: Records, last: int = 0) -> Any:
    """Return which heads (layer, head) had NaN in weights or values in the last steps; 0: in any that is kept."""

    def has_nan(layer: Layer) -> Any:
        return np.sum([sums["nan_rows"] + sums["nan_value"] for _, sums in tuple(layer.steps)[-last:]], axis=0)

    return _map(records, has_nan).filled(0) > 0


def _map(records: Records, of_layer: Callable[[Layer], Any]) -> Any:
    """Return a number of each head as (layer, head), with heads that are not there masked."""
    layers = list(records.layers.values())
    values = np.ma.masked_all((len(layers), max(layer.heads for layer in layers)))  # type: ignore[no-untyped-call]
    for row, layer in enumerate(layers):
        values[row, : layer.heads] = of_layer(layer)
    return values


def _fill_nan_cell(axis: Axes, row: int, column: int) -> None:
    """Fill a cell of a map with the colour of NaN."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=_NAN, edgecolor="none", gid="nan"))
    axis.text(column, row, "NaN", ha="center", va="center", fontsize=7, color="white")


def _scale(records: Records, name: str) -> dict[str, Any]:
    """Return the options of `draw_map` for the colours of a map; darker cells: heads that attend to fewer keys."""
    if name not in _SERIES:
        return {"limits": (0.0, 1.0)}
    # Limits of all steps: entropies that have fallen are dark compared with earlier ones.
    recorded = np.concatenate([records.history(layer, name)[1].ravel() for layer in records.layers])
    largest = float(recorded[np.isfinite(recorded)].max(initial=1.0))
    if name == "entropy":
        return {"limits": (0.0, largest), "cmap": "Reds_r"}
    tau = records.thresholds.tau
    return {"limits": (tau / 100, max(tau, largest)), "logarithmic": True}


def _draw_series(records: Records, axis: Axes, name: str) -> None:
    """Draw a number of each head over the steps, failing heads in colour and, where they are few, by name."""
    from matplotlib.ticker import MaxNLocator

    failing, layers = records.failing(), list(records.layers.values())
    colours = dict(zip(failing, _NAMED, strict=False)) if len(failing) <= len(_NAMED) else {}
    for layer in layers:
        steps, values = records.history(layer.name, name)
        for head in range(layer.heads):
            if (place := (layer.name, head)) in failing:
                text = f"{layer.name}, head {head}" if colours else "failing heads"
                style: dict[str, Any] = {"linewidth": 1.6, "color": colours.get(place, RED), "zorder": 3}
            else:
                text, style = "other heads", {"linewidth": 0.7, "color": _OTHERS, "zorder": 1}
            axis.plot(steps, values[:, head], label=text, **style)
    if name == "max_logit":
        axis.set_yscale("log", nonpositive="mask")
        axis.axhline(records.thresholds.tau, linestyle="--", linewidth=1, color=_OTHERS, label="τ, allowed by QK-clip")
    else:
        axis.set_ylim(bottom=0)
    alarms = [verdict.first_step for verdict in records.verdicts() if verdict.failure]
    if alarms:
        axis.axvline(min(alarms), linestyle=":", linewidth=1.2, color=RED, label=f"first failure, step {min(alarms)}")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the common parts of dotted names, with a star for the rest (empty: none), and the rest of each.

    >>> short_names(["layers.0.attn", "layers.1.attn"])
    ('layers.*.attn', ['0', '1'])
    >>> short_names(["encoder", "decoder"]), short_names(["only.one"])
    (('', ['encoder', 'decoder']), ('', ['only.one']))
    """
    parts = [name.split(".") for name in names]
    before = _common(parts)
    after = _common([part[before:][::-1] for part in parts])
    short = [".".join(part[before : len(part) - after]) for part in parts]
    if before + after == 0 or not all(short):
        return "", list(names)
    return ".".join([*parts[0][:before], "*", *parts[0][len(parts[0]) - after :]]), short


def _common(lists: Sequence[Sequence[str]]) -> int:
    """Return the number of first items that all lists share."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
