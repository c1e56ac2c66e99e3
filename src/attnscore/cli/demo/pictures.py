"""Pictures of the demo: a gallery of masks, the effect of the temperature on a softmax, the growth of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.plotting.drawing import (
    INK,
    LABEL_POINTS,
    Matrix,
    colour_bar,
    draw_map,
    new_figure,
    panel_axes,
    whole_number_ticks,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#08306b")


def mask_gallery(masks: Mapping[str, Any], cols: int = 4) -> Figure:
    """Draw boolean matrices (query, key) as squares: filled where the query may attend."""
    rows = -(-len(masks) // cols)
    figure = new_figure((2.5 * cols, 2.55 * rows + 0.3))
    axes = panel_axes(figure, rows, cols)
    for axis in axes[len(masks) :]:
        axis.set_axis_off()
    for place, (axis, (title, matrix)) in enumerate(zip(axes, masks.items(), strict=False)):
        unmasked = np.asarray(matrix, dtype=float)
        draw_map(axis, unmasked, cmap="Blues", limits=(0.0, 1.35))
        _grid_lines(axis, unmasked.shape)
        whole_number_ticks(axis, unmasked.shape)
        axis.set_anchor("N")
        axis.set_title(title, fontsize=9, color=INK)
        axis.set_xlabel("Keys" if place + cols >= len(masks) else "")
        axis.set_ylabel("Queries" if place % cols == 0 else "")
    figure.suptitle("Masks: a filled square means that the query may attend to the key", fontsize=12, color=INK)
    return figure


def _grid_lines(axis: Axes, shape: tuple[int, ...]) -> None:
    axis.set_xticks(np.arange(shape[1] + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(shape[0] + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.2)
    axis.tick_params(which="minor", length=0)


def sharpening(
    logits: Sequence[float], temperatures: Sequence[float], weights: Matrix, jacobians: Mapping[str, Matrix]
) -> Figure:
    """Draw the weights at several temperatures as bars, and softmax Jacobians beside them."""
    figure = new_figure((10.5, 3.4))
    panels = figure.subplots(1, 1 + len(jacobians), width_ratios=[1.7] + [1.0] * len(jacobians))
    bars = panels[0]
    width = 0.8 / len(temperatures)
    for place, (temperature, row) in enumerate(zip(temperatures, weights, strict=True)):
        at = np.arange(len(logits)) + (place - (len(temperatures) - 1) / 2) * width
        bars.bar(at, row, width * 0.92, color=_BLUES[place % len(_BLUES)], label=f"T = {temperature:g}")
    bars.set_xticks(range(len(logits)), [f"{logit:g}" for logit in logits])
    bars.set_xlabel("logit", color=INK)
    bars.set_ylabel("weight", color=INK)
    bars.set_title("A lower temperature sharpens the softmax", fontsize=11, color=INK)
    bars.legend(fontsize=LABEL_POINTS, frameon=False, loc="upper left", ncols=2)
    bars.spines[["top", "right"]].set_visible(False)
    largest = max(float(np.abs(jacobian).max()) for jacobian in jacobians.values())
    image = None
    for axis, (title, jacobian) in zip(panels[1:], jacobians.items(), strict=True):
        image = draw_map(axis, jacobian, cmap="RdBu_r", limits=(-largest, largest))
        write_numbers(axis, image, jacobian, lambda value: f"{round(value, 3) + 0.0:.3f}")
        axis.set_xlabel("of logit")
        axis.set_ylabel("of weight" if axis is panels[1] else "")
        whole_number_ticks(axis, jacobian.shape)
        axis.set_title(title, fontsize=10, color=INK)
    if image is not None:
        colour_bar(figure, image, list(panels[1:]), "derivative")
    return figure


def growth(lengths: Sequence[int], costs: Mapping[str, Mapping[int, Any]]) -> Figure:
    """Draw operations and bytes against the length, both axes logarithmic."""
    figure = new_figure((9.6, 3.5))
    left, right = figure.subplots(1, 2)
    colours = dict(zip(costs, ("#2171b5", "#cb181d"), strict=False))
    for name, colour in colours.items():
        line = [costs[name][length] for length in lengths]
        left.plot(lengths, [one.operations for one in line], "o-", color=colour, label=name)
        right.plot(lengths, [one.matrix_bytes for one in line], "o--", color=colour, label=f"{name}, naive")
    first = next(iter(costs.values()))
    right.plot(
        lengths,
        [first[length].bytes for length in lengths],
        "o-",
        color="#238b45",
        label="inputs and outputs",
    )
    for axis, title in ((left, "Operations of one head"), (right, "Bytes that have to be held")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=LABEL_POINTS)
        axis.set_title(title, fontsize=11, color=INK)
        axis.set_xlabel("queries and keys", color=INK)
        axis.grid(which="major", color="#e5e5e5", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=LABEL_POINTS, frameon=False)
    return figure
