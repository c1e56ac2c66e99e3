"""Panels that the pictures of several experiments share.

Requirements:
- colours mean the same in every picture: red is without the scale, blue with it, grey is the law;
- measurements are drawn with their spread, laws as dashed lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attnscore.diagnostics.lab.experiment import Array
from attnscore.plotting.drawing import INK, Limits, colour_bar, draw_map, new_figure, two_decimals, write_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHOUT, SCALED, LAW = "#b2182b", "#2166ac", "#8c8c8c"
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


def draw_numbered_maps(
    figure: Figure,
    axes: Sequence[Axes],
    matrices: Sequence[Array],
    titles: Sequence[str],
    labels: tuple[str, str, str],
    *,
    limits: Limits,
    cmap: str = "Reds",
    text: Callable[[float], str] = two_decimals,
) -> None:
    """Draw maps with their numbers and one colour scale; `labels` are those of keys, queries and the colour bar."""
    xlabel, ylabel, unit = labels
    for axis, matrix, title in zip(axes, matrices, titles, strict=True):
        image = draw_map(axis, matrix, cmap=cmap, limits=limits, every=True)
        write_numbers(axis, image, matrix, text)
        axis.set_title(title, fontsize=10, color=INK)
        axis.set(xlabel=xlabel, ylabel=ylabel if axis is axes[0] else "")
    colour_bar(figure, image, list(axes), unit)


def two_weight_maps(
    matrices: tuple[Array, Array], titles: tuple[str, str], keys: str, queries: str, height: float
) -> Figure:
    """Draw two maps of weights side by side with one colour scale."""
    figure = new_figure((8.2, height))
    limits = 0.0, float(max(matrix.max() for matrix in matrices))
    draw_numbered_maps(figure, figure.subplots(1, 2), matrices, titles, (keys, queries, "weight"), limits=limits)
    return figure
