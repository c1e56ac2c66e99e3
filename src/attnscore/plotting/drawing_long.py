"""The strokes of pictures of long contexts: bins, the weight along the keys, links.

What this module meets:
- axes count tokens, whatever the number of bins, columns or points that are drawn;
- what is exactly 0 is grey, as what is no number is elsewhere;
- work and size of a picture are bounded, at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.plotting.drawing import GREY, INCHES_PER_LABEL, INK, LABEL_POINTS, Limits, Matrix, frame, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.image import AxesImage

Whole = NDArray[np.int64]
Tokens = Sequence[str] | None

LINE = "#b2182b"
BAND = "#f4a582"
# Points beyond this cover each other on any screen.
_MOST_POINTS = 40_000
# Columns of the line along the keys: about one a pixel.
_COLUMNS = 1200
_LONGEST_NAME = 16


def a_query(pooled: Matrix, query_len: int) -> Matrix:
    """Sums over the queries of each bin as means: what one of them gives to each bin of keys."""
    bins = pooled.shape[-2]
    sizes = np.bincount(np.arange(query_len) * bins // max(1, query_len), minlength=bins)
    return pooled / np.maximum(1, sizes)[:, None]


def fade_limits(values: Matrix) -> Limits:
    """Return the ends of a logarithmic scale: at most four powers of ten below the largest number."""
    seen = values[np.isfinite(values) & (values > 0)]
    if not seen.size:
        return 0.1, 1.0
    high = float(seen.max())
    low = max(float(seen.min()), high / 1e4)
    return (low, high) if high > low else (high / 10, high)


def tallness(lengths: tuple[int, int]) -> float:
    """Height of a map to its width: that of the matrix, within what a page holds."""
    return min(1.6, max(0.4, lengths[0] / max(1, lengths[1]))) if all(lengths) else 1.0


def draw_bins(
    axis: Axes, matrix: Matrix, lengths: tuple[int, int], limits: Limits, cmap: str, *, logarithmic: bool = True
) -> AxesImage:
    """Draw a matrix of bins on axes that count the tokens in them."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(*limits, clip=True) if logarithmic else Normalize(0.0, limits[1])
    colours = colormaps[cmap].with_extremes(bad=GREY)
    hidden = ~np.isfinite(matrix) | (matrix == 0)
    edges = (0, max(1, lengths[1]), max(1, lengths[0]), 0)
    shown = np.ma.masked_array(matrix, hidden)
    image = axis.imshow(shown, cmap=colours, norm=norm, extent=edges, aspect="auto", interpolation="nearest")
    axis.set_box_aspect(tallness(lengths))
    frame(axis)
    count_tokens(axis.xaxis, axis.yaxis)
    return image


def count_tokens(*axes: Any) -> None:
    """Few whole numbers along an axis, in thousands apart."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def draw_mass(axis: Axes, mass: Matrix, marked: Whole, *, logarithmic: bool) -> None:
    """The weight along the keys: the largest of the keys of a column as a line, their mean below, some keys marked."""
    length = len(mass)
    columns = max(1, min(_COLUMNS, length))
    starts = -(-np.arange(columns) * length // columns)
    if length:
        largest = np.maximum.reduceat(mass, starts)
        mean = np.add.reduceat(mass, starts) / np.diff(np.append(starts, length))
        edges = np.append(starts, length)
        if columns < length:
            axis.stairs(largest, edges, baseline=mean, fill=True, color=BAND, linewidth=0)
        axis.stairs(largest, edges, baseline=None, color=LINE, linewidth=0.8)
        axis.plot(marked + 0.5, mass[marked], "o", color=LINE, markersize=3.5, clip_on=False)
    seen = mass[np.isfinite(mass) & (mass > 0)]
    if logarithmic and seen.size:
        # What is hidden has no logarithm: the axis ends a little below the least that is seen.
        axis.set_yscale("log")
        axis.set_ylim(max(float(seen.min()), float(seen.max()) * 1e-6) / 1.5, float(seen.max()) * 2)
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlim(0, max(1, length))
    frame(axis)
    count_tokens(axis.xaxis)


def draw_heaviest(axis: Axes, mass: Matrix, marked: Whole, tokens: Tokens) -> None:
    """The marked keys as bars, the heaviest on top, with their number and their token."""
    places = np.arange(len(marked))
    axis.barh(places, mass[marked], color=LINE, height=0.7)
    axis.set_yticks(places, [name_of(int(key), tokens) for key in marked], parse_math=False)
    axis.set_ylim(max(1, len(marked)) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * max((float(x) for x in mass[marked]), default=1.0) or 1.0)
    for place, key in enumerate(marked):
        axis.text(mass[key], place, f" {short_number(float(mass[key]), 3)}", va="center", fontsize=7, color=INK)
    axis.set_xticks([])
    frame(axis)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)


def name_of(place: int, tokens: Tokens) -> str:
    """The number of a key and, where there are tokens, its own."""
    if tokens is None:
        return f"{place:,}"
    token = tokens[place] if len(tokens[place]) <= _LONGEST_NAME else tokens[place][: _LONGEST_NAME - 1] + "…"
    return f"{place:,}  {token}"


def draw_points(
    axis: Axes, weights: Matrix, keys: Whole, queries: Whole, lengths: tuple[int, int], cmap: str
) -> ScalarMappable:
    """Links as points, keys across and queries down; the largest weights on top."""
    from matplotlib.colors import Normalize

    rows = np.broadcast_to(queries[:, None], keys.shape)
    real = keys >= 0
    weights, keys, rows = weights[real], keys[real], rows[real]
    if len(keys) > _MOST_POINTS:
        few = np.linspace(0, len(keys) - 1, _MOST_POINTS).astype(int)
        weights, keys, rows = weights[few], keys[few], rows[few]
    order = np.argsort(weights, kind="stable")
    size = 3.0 if len(keys) > 5000 else 7.0
    points = axis.scatter(
        keys[order] + 0.5,
        rows[order] + 0.5,
        c=weights[order],
        s=size,
        cmap=_visible(cmap),
        norm=Normalize(0, float(weights.max(initial=0)) or 1.0),
        linewidths=0,
        rasterized=True,
    )
    axis.set_xlim(0, max(1, lengths[1]))
    axis.set_ylim(max(1, lengths[0]), 0)
    axis.set_box_aspect(tallness(lengths))
    frame(axis)
    count_tokens(axis.xaxis, axis.yaxis)
    return points


def draw_lines(
    axis: Axes, weights: Matrix, keys: Whole, queries: Whole, tokens: tuple[Tokens, Tokens], cmap: str
) -> ScalarMappable:
    """Links as lines from the queries on the left to the keys on the right, wider the larger their weight."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(0, float(weights.max(initial=0)) or 1.0), _visible(cmap))
    rows = np.broadcast_to(queries[:, None], keys.shape)
    drawn = [(float(w), int(i), int(j)) for w, i, j in zip(weights.flat, rows.flat, keys.flat, strict=True)]
    for weight, query, key in sorted(link for link in drawn if link[2] >= 0 and link[0] > 0):
        width = 0.4 + 1.8 * weight
        axis.plot(
            (0, 1), (query, key), color=colours.to_rgba(np.array(weight)), linewidth=width, solid_capstyle="round"
        )
    frame(axis)
    axis.set_xlim(-0.02, 1.02)
    axis.set_xticks([0, 1], ["queries", "keys"])
    lengths = [max(1, len(names or ())) for names in tokens]
    longest = max(*lengths, int(queries.max(initial=0)) + 1, int(keys.max(initial=0)) + 1)
    axis.set_ylim(longest - 0.4, -0.6)
    right = axis.secondary_yaxis("right")
    for side, names, least in ((axis, tokens[0], queries), (right, tokens[1], keys)):
        count = len(names) if names is not None else int(least.max(initial=-1)) + 1
        labels = list(names) if names is not None else [str(i) for i in range(count)]
        side.set_yticks(range(count), labels, parse_math=False)
        side.tick_params(length=2, width=0.6, labelsize=LABEL_POINTS, colors=INK)
    for spine in (*axis.spines.values(), *right.spines.values()):
        spine.set_visible(False)
    return colours


def size_of_lines(tokens: tuple[Tokens, Tokens], longest: int) -> tuple[float, float]:
    """A figure in which the tokens at the ends of lines can be read."""
    widest = sum(max((len(name) for name in names or ()), default=2) for names in tokens)
    return 3.6 + 0.075 * widest, 0.9 + INCHES_PER_LABEL * max(6, longest)


def _visible(cmap: str) -> Any:
    """The upper part of a colour map: its first colours are paper."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[cmap](np.linspace(0.25, 1, 192)))


def label(axis: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Title and names of the axes, as everywhere."""
    axis.set_title(title, fontsize=11, color=INK)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
