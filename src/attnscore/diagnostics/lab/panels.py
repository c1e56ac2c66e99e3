"""Panels that the pictures of several experiments share.

Requirements:
- colours mean the same in every picture: red is without the scale, blue with it, grey is the law;
- measurements are drawn with their spread, laws as dashed lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnscore.plotting.drawing import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
