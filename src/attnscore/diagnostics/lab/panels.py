"""Panels that the pictures of several experiments share.

Requirements:
- colours mean the same in every picture: red is without the scale, blue with it, grey is the law;
- measurements are drawn with their spread, laws as dashed lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnscore.diagnostics.lab.experiment import Array
from attnscore.plotting import drawing
from attnscore.plotting.drawing import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHOUT, SCALED, LAW = RED, BLUE, "#8c8c8c"
COLOURS = {"dot": WITHOUT, "scaled_dot": SCALED}
SPREAD = 0.18
"""Opacity of the area between a measurement's lower and upper end."""
DIMENSION = "dimension d of query and key"


def powers_of_two(axis: Axes, dims: Sequence[int]) -> None:
    """Put the dimensions on a logarithmic axis, each by its number where there are few."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    shown = dims if len(dims) <= 6 else dims[::2]
    axis.set_xticks(shown, [str(dim) for dim in shown])
    axis.xaxis.set_minor_locator(NullLocator())


def weights_and_jacobians(
    logits: Sequence[float],
    weights: Mapping[str, Array],
    jacobians: Mapping[str, Array],
    title: str,
    *,
    digits: int,
) -> Figure:
    """Draw all rows of weights as bars, side by side for each key, and Jacobians of the softmax as maps."""
    from matplotlib import colormaps

    figure = drawing.new_figure((9.2, 3.1))
    bars, *maps = figure.subplots(1, 1 + len(jacobians), width_ratios=[1.5] + [1.0] * len(jacobians))
    each = 0.84 / len(weights)
    # Neither the palest nor the darkest blues: they vanish on a white or on a dark page.
    colours = colormaps["Blues"](np.linspace(0.3, 0.9, len(weights)))
    for place, ((name, row), colour) in enumerate(zip(weights.items(), colours, strict=True)):
        at = np.arange(len(logits)) + (place - (len(weights) - 1) / 2) * each
        bars.bar(at, row, each * 0.92, color=colour, label=name)
    bars.set_xticks(range(len(logits)), [f"{logit:g}" for logit in logits])
    bars.set_ylim(0, 1)
    drawing.style_lines(bars, title, "logit in y", "weight")
    bars.grid(axis="x", visible=False)
    drawing.legend(bars, loc="upper left", ncols=2)
    limits = drawing.limits_of(np.stack([*jacobians.values()]))
    for axis, (name, jacobian) in zip(maps, jacobians.items(), strict=True):
        image = drawing.draw_map(axis, jacobian, limits=limits, every=True)
        drawing.write_numbers(axis, image, jacobian, lambda value: f"{round(value, digits) + 0.0:.{digits}f}")
        drawing.label(axis, name, "logit j", "weight i" if axis is maps[0] else "", title_points=10)
    drawing.colour_bar(figure, image, maps, "derivative of weight i by logit j")
    return figure
