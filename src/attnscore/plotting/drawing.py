"""Drawing functions that the plots, the diagnostics and the demo share.

Requirements:
- any framework's array, or nested lists of them, becomes a float64 matrix without touching the original;
- figures never pass through pyplot: no global registry, no backend choice, no window; a notebook shows them;
- cells without a finite number are grey and do not stretch the colour scale; in pictures of long contexts, weights of
  exactly 0 are grey too;
- weights have a sequential scale from 0; signed numbers, as scores, a diverging one with 0 in its middle;
- text and background have the colours of matplotlib's settings, so that a style for dark pages works;
- tokens, titles and labels are drawn as they are (a "$" starts no formula, a "_" in front hides nothing);
- tokens are rotated and thinned until they do not touch;
- axes of long contexts count tokens, whatever the number of bins or points; size and cost of a picture are bounded.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.analysis.summaries import bin_sizes
from attnscore.backends.numpy import detached
from attnscore.base.arguments import is_whole, shown
from attnscore.errors import ArgumentError, FrameworkError, ShapeError, message
from attnscore.io import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Matrix = NDArray[np.float64]
Indices = NDArray[np.int64]
Limits = tuple[float, float]
Span = tuple[int, int]
Tokens = Sequence[str] | None

GREY = "#d9d9d9"
_DARK_TEXT = "#262626"
_EDGE = "#8c8c8c"
WEIGHT = "weight of key j for query i"
"""Label of the colour bar of a map of weights."""
# Seen as well on a white page as on a dark one: at least 4:1 against both.
RED, BLUE = "#d6404e", "#3a7fc1"
_BAND = "#f4a582"
# Lines of 8-point text every 0.16 inch do not touch.
INCHES_PER_LABEL = 0.16
LABEL_POINTS = 8
# Properties of a text that may come from a caller: no formulas, of matplotlib or of LaTeX.
LITERAL: dict[str, Any] = {"parse_math": False, "usetex": False}
# Maps that are longer than wide, or wider than long, by more than this fill their panel; square cells would be hairs.
_MOST_SQUARE = 8
# Larger figures are shrunk on a screen until their labels cannot be read; longer axes are thinned instead.
_LARGEST_INCHES = 24.0
_TALLEST_FOR_TITLE = 6.0
# More points cover each other on any screen.
_MOST_POINTS = 40_000
# Columns of the line along the keys: about one a pixel.
_COLUMNS = 1200
_LONGEST_NAME = 16
# Weights and masses are tied from this part of the larger one on: float32 rounds sums over many keys by less.
TIED = 1 - 1e-4


# ---------------------------------------------------------------- arrays and arguments


def to_matrix(array: Any) -> Matrix:
    """Copy an array of any framework, or nested lists of them, to float64 on the host.

    Ragged lists are a `ShapeError`, something that holds no numbers a `FrameworkError`.
    """
    if isinstance(array, (list, tuple)):
        parts = [to_matrix(part) for part in array]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(str(part.shape) for part in parts)
            raise ShapeError(message("matrices", "parts of one shape", f"parts of shapes {shapes}"))
        return np.stack(parts) if parts else np.zeros((0,))
    try:
        return np.asarray(detached(array)).astype(np.float64)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last one from a tensor of TensorFlow's graphs
        raise FrameworkError(message("matrices", "an array of numbers", type(array).__name__)) from error


def to_panels(argument: str, array: Any, axes: str) -> Matrix:
    """Return an array as (panel, *axes), from one with or without panels; `axes` are names, as "query, key"."""
    panels, ndim = to_matrix(array), len(axes.split(","))
    panels = panels[None] if panels.ndim == ndim else panels
    if panels.ndim != ndim + 1:
        raise ShapeError(message(argument, f"axes ({axes}) or (panel, {axes})", f"shape {panels.shape}"))
    return panels


def to_texts(argument: str, names: Any, count: int, shape: tuple[int, ...], of: str) -> list[str] | None:
    """Return tokens or titles as texts; ShapeError unless there are `count`, as the array named `of` needs."""
    if names is None:
        return None
    if argument == "titles" and isinstance(names, str):  # tokens may well be the characters of a text
        raise ShapeError(message(argument, "a list of texts", repr(names)))
    if len(names) != count:
        raise ShapeError(message(argument, f"{count} of them", len(names), shapes={of: shape}))
    return [str(name) for name in names]


def columns(max_cols: Any, count: int) -> int:
    """Return the number of columns of `count` panels, at most `max_cols` of them."""
    if not is_whole(max_cols) or max_cols < 1:
        raise ArgumentError(message("max_cols", "a whole number above 0", shown(max_cols)))
    return max(1, min(int(max_cols), count))


# ---------------------------------------------------------------- figures, panels, labels


def new_figure(figsize: tuple[float, float], *, title: str | None = None) -> Figure:
    """Return an empty figure that belongs to no window and that a notebook can show."""
    require("matplotlib.figure", "plotting", "pip install 'attnscore[plot]'")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # compress: without it square maps in a wide figure push titles and labels over the edge.
    figure = Figure(figsize=figsize, layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07, compress=True))
    # Notebooks find a PNG through this name; without it they need pyplot to have been imported first.
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # the protocol is by name
    if title:
        figure.suptitle(title, fontsize=12, **LITERAL)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def labelled_panels(
    figure: Figure,
    count: int,
    cols: int,
    titles: Sequence[str] | None,
    xlabel: str,
    ylabel: str,
    *,
    title_points: int = 11,
) -> list[Axes]:
    """Return `count` panels in rows of `cols`, axes labelled at the lower and the left edge of the grid alone."""
    cols = max(1, cols)
    rows = max(1, -(-count // cols))
    axes = list(figure.subplots(rows, cols, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    for place, axis in enumerate(axes[:count]):
        below, left = place + cols >= count, place % cols == 0
        title = titles[place] if titles else ""
        label(axis, title, xlabel if below else "", ylabel if left else "", title_points=title_points)
    return axes[:count]


def label(axis: Axes, title: str, xlabel: str = "", ylabel: str = "", *, title_points: int = 11) -> None:
    """Set the title of a panel and the names of its axes."""
    axis.set_title(title, fontsize=title_points, **LITERAL)
    axis.set_xlabel(xlabel, **LITERAL)
    axis.set_ylabel(ylabel, **LITERAL)


def frame(axis: Axes) -> None:
    """Draw thin ticks and spines, and small labels."""
    axis.tick_params(which="both", length=2, width=0.6, labelsize=LABEL_POINTS)
    for spine in axis.spines.values():
        spine.set(linewidth=0.6, color=_EDGE)
    for name in (axis.xaxis.label, axis.yaxis.label):
        name.set(fontsize=10)


def style_lines(axis: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """Set title, labels and a light grid of a panel of lines."""
    axis.set_title(title, fontsize=10, **LITERAL)
    axis.set_xlabel(xlabel, fontsize=9, **LITERAL)
    axis.set_ylabel(ylabel, fontsize=9, **LITERAL)
    axis.grid(which="major", color=_EDGE, alpha=0.25, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=LABEL_POINTS)


def legend(owner: Axes | Figure, **options: Any) -> None:
    """Add a legend without a frame."""
    for text in owner.legend(fontsize=LABEL_POINTS, frameon=False, **options).get_texts():
        text.set(**LITERAL)


def colour_bar(figure: Figure, image: ScalarMappable, axes: list[Axes], label: str = "") -> None:
    """Add one slim colour bar to the right of the given axes."""
    # A bar beside a low map is low too, and needs another shape to be as wide.
    place = axes[0].get_subplotspec()
    rows = 1 if place is None else place.get_gridspec().nrows
    ratio = 1.0 if axes[0].get_aspect() == "auto" else rows * axes[0].get_data_ratio()
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, aspect=24 * min(1.0, max(0.15, ratio)))
    bar.outline.set_linewidth(0.4)
    bar.ax.tick_params(which="both", length=2, width=0.6, labelsize=LABEL_POINTS)
    bar.set_label(label, fontsize=9, **LITERAL)


def _count_tokens(*axes: Any) -> None:
    """Put a few whole numbers along each axis, with commas between thousands."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def size_for_tokens(
    shape: tuple[int, ...],
    rows: int,
    cols: int,
    query_tokens: Tokens,
    key_tokens: Tokens,
    titles: Tokens,
    label: str,
    *,
    numbers: bool = False,
) -> tuple[float, float]:
    """Return a figure size at which tokens and titles of (panel, query, key) maps and the bar's label can be read."""
    per_cell = 0.36 if numbers else INCHES_PER_LABEL if query_tokens or key_tokens else 0.08
    left, below = (0.075 * max(map(len, names or [""])) for names in (query_tokens, key_tokens))
    title_width = 0.095 * max((len(line) for title in titles or () for line in title.splitlines()), default=0)
    # Square cells: only larger ones make a map as wide as its title.
    per_cell = max(per_cell, min(title_width / max(1, shape[2]), _TALLEST_FOR_TITLE / max(1, shape[1])))
    across, down = max(1.2, title_width, per_cell * shape[2]) + 0.3, max(0.9, per_cell * shape[1]) + 0.5
    height = max(rows * down + below + 0.3, 0.075 * len(label) + 0.5)
    return min(_LARGEST_INCHES, cols * across + left + 0.9), min(_LARGEST_INCHES, height)


# ---------------------------------------------------------------- numbers


def two_decimals(value: float) -> str:
    """Format a number with two decimals, without a sign where it rounds to zero.

    >>> [two_decimals(x) for x in (0.256, -0.001, 1.0)]
    ['0.26', '0.00', '1.00']
    """
    return f"{round(value, 2) + 0.0:.2f}"


def short_number(value: float, digits: int = 2) -> str:
    """Format a number with `digits` significant digits, without an exponent where it is of everyday size.

    >>> [short_number(x) for x in (0.0, 0.123, 9.96, 12.3, 1234.0, 1e-7)]
    ['0', '0.12', '10', '12', '1234', '1e-07']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -4 <= size < 6:
        return f"{value:.{digits - 1}g}"
    return f"{value:.{max(0, digits - 1 - size)}f}"


def write_numbers(axis: Axes, image: AxesImage, matrix: Matrix, text: Callable[[float], str]) -> None:
    """Write each number into its cell, white on dark cells; masked cells stay empty."""
    for (row, col), value in np.ma.ndenumerate(matrix):  # type: ignore[no-untyped-call]  # the stubs lack its types
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        brightness = 0.299 * red + 0.587 * green + 0.114 * blue  # as perceived
        colour = "white" if brightness < 0.55 else _DARK_TEXT
        axis.text(col, row, text(value), ha="center", va="center", fontsize=7, color=colour)


def mark_cell(axis: Axes, row: int, col: int) -> None:
    """Frame a cell of a map, in blue between white, visible on every red."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import Normal, withStroke

    halo = [withStroke(linewidth=4, foreground="white"), Normal()]
    cell = Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BLUE, linewidth=2, path_effects=halo)
    axis.add_patch(cell).set_clip_on(False)


# ---------------------------------------------------------------- colour scales


def limits_of(values: Matrix) -> Limits:
    """Return the limits of a linear scale: from 0, or for signed numbers as far below it, to the largest."""
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max(initial=0.0)) or 1.0
    # Weights that rounding made negative are no signed numbers.
    return (-largest if finite.min(initial=0.0) < -1e-3 * largest else 0.0), largest


def decade_limits(values: Matrix) -> Limits:
    """Return the limits of a logarithmic scale over at most four powers of ten below the largest number.

    Numbers within one power of ten are in the middle of one: a closer scale would colour the rounding of equal weights.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 0.1, 1.0
    high = float(positive.max())
    low = max(float(positive.min()), high / 1e4)
    middle = math.sqrt(low) * math.sqrt(high)
    # Just off the middle of the scale, where one of 256 colours ends and rounding would choose between two.
    return (low, high) if high >= 10 * low else (middle / 10**0.6, middle * 10**0.5)


def _norm(limits: Limits, *, logarithmic: bool = False) -> Normalize:
    from matplotlib.colors import LogNorm, Normalize

    return LogNorm(*limits, clip=True) if logarithmic else Normalize(*limits)


def _darker_part(cmap: str) -> Any:
    """Return a colour map without its first quarter, which cannot be seen on paper."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[cmap](np.linspace(0.25, 1, 192)))


# ---------------------------------------------------------------- maps


def _draw_image(axis: Axes, matrix: Any, cmap: str | None, norm: Normalize, **options: Any) -> AxesImage:
    """Draw a masked matrix, rows down and columns across, with masked cells in grey."""
    from matplotlib import colormaps

    is_signed = norm.vmin is not None and norm.vmin < 0
    colours = colormaps[cmap or ("RdBu_r" if is_signed else "Reds")].with_extremes(bad=GREY)
    image = axis.imshow(matrix, cmap=colours, norm=norm, interpolation="nearest", **options)
    frame(axis)
    return image


def draw_map(
    axis: Axes,
    matrix: Matrix,
    row_labels: Tokens = None,
    col_labels: Tokens = None,
    *,
    cmap: str | None = None,
    limits: Limits,
    logarithmic: bool = False,
    every: bool = False,
) -> AxesImage:
    """Draw one matrix with labels where given; `every` numbers each row and column that has none.

    Without a colour map it is red from 0, or blue to red where `limits` begin below 0.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator

    rows, cols = (max(1, length) for length in matrix.shape)  # an empty map still has a frame
    edges = (-0.5, cols - 0.5, rows - 0.5, -0.5)
    aspect = "auto" if max(rows, cols) > _MOST_SQUARE * min(rows, cols) else "equal"
    norm = _norm(limits, logarithmic=logarithmic)
    image = _draw_image(axis, np.ma.masked_invalid(matrix), cmap, norm, extent=edges, aspect=aspect)
    for ticks, length in ((axis.yaxis, matrix.shape[0]), (axis.xaxis, matrix.shape[1])):
        few = every or length <= 6
        ticks.set_major_locator(FixedLocator(range(length)) if few else MaxNLocator(nbins=6, integer=True))
    for which, labels in (("x", col_labels), ("y", row_labels)):
        if labels is not None:
            _label_axis(axis, which, labels)
    return image


def _label_axis(axis: Axes, which: str, labels: Sequence[str]) -> None:
    """Write labels along the "x" or "y" axis of a panel, or every n-th of them where all would touch."""
    box = axis.figure.bbox
    width, height = box.width / axis.figure.dpi, box.height / axis.figure.dpi
    grid = axis.get_subplotspec()
    rows, cols = grid.get_geometry()[:2] if grid is not None else (1, 1)
    available = 0.75 * (width / cols if which == "x" else height / rows)
    step = max(1, math.ceil(len(labels) * INCHES_PER_LABEL / available / 1.35))
    places = range(0, len(labels), step)
    text = [labels[place] for place in places]
    if which == "x":
        rotation = 0 if max(map(len, text), default=0) <= 2 else 90
        axis.set_xticks(places, text, rotation=rotation, **LITERAL)
    else:
        axis.set_yticks(places, text, **LITERAL)


# ---------------------------------------------------------------- long contexts


def mean_of_pairs(pooled: Matrix, lengths: tuple[int, int]) -> Matrix:
    """Turn the sum of the weights of each bin of `pooled_weights` into the mean of its pairs of query and key."""
    queries, keys = map(bin_sizes, lengths, np.maximum(1, pooled.shape[-2:]))
    return np.asarray(pooled / np.maximum(1, queries[:, None] * keys))


def heaviest_keys(mass: Matrix, count: int) -> list[Indices]:
    """Return the keys of the largest masses above 0, one by one in falling order, in at most `count` groups.

    Tied keys that do not all fit are one group, the last, because to name some of them would invent a difference.

    >>> [keys.tolist() for keys in heaviest_keys(np.array([1.0, 5.0, 1.0, 1.0]), 3)]
    [[1], [0, 2, 3]]
    """
    falling = np.argsort(-mass, kind="stable")
    falling = falling[mass[falling] > 0]  # neither masked keys nor NaN
    groups: list[Indices] = []
    while falling.size and len(groups) < count:
        ties = int(np.searchsorted(-mass[falling], -mass[falling[0]] * TIED, side="right"))
        keys, falling = np.sort(falling[:ties]), falling[ties:]
        if ties > count - len(groups):
            return [*groups, keys]
        groups += np.split(keys, ties)
    return groups


def box_aspect(lengths: tuple[int, int]) -> float:
    """Return the height of a map over its width: the matrix's ratio, within the limits of a page."""
    return min(1.6, max(0.4, lengths[0] / max(1, lengths[1]))) if all(lengths) else 1.0


def draw_bins(
    axis: Axes, means: Matrix, queries: Span, keys: Span, limits: Limits, cmap: str, *, logarithmic: bool = True
) -> AxesImage:
    """Draw mean weights in bins; `queries` and `keys` are the ranges that the bins divide, counted along the axes."""
    masked = np.ma.masked_array(means, ~np.isfinite(means) | (means == 0))
    norm = _norm(limits if logarithmic else (0.0, limits[1]), logarithmic=logarithmic)
    lengths = queries[1] - queries[0], keys[1] - keys[0]
    # Bins of one width may reach beyond the last position.
    height, width = (max(1, len(sizes) * sizes[0]) for sizes in map(bin_sizes, lengths, np.maximum(1, means.shape)))
    edges = (keys[0], keys[0] + width, queries[0] + height, queries[0])
    image = _draw_image(axis, masked, cmap, norm, extent=edges, aspect="auto")
    axis.set(xlim=(keys[0], max(keys[1], keys[0] + 1)), ylim=(max(queries[1], queries[0] + 1), queries[0]))
    axis.set_box_aspect(box_aspect(lengths))
    _count_tokens(axis.xaxis, axis.yaxis)
    return image


def draw_key_mass(
    axes: Sequence[Axes], mass: Matrix, heaviest: int, tokens: Tokens, *, logarithmic: bool = True
) -> None:
    """Draw the weight along the keys on the first panel and the heaviest keys by name on the second."""
    line, bars = axes
    groups = heaviest_keys(mass, heaviest)
    _draw_mass(line, mass, np.array([keys[0] for keys in groups if len(keys) == 1], np.int64), logarithmic=logarithmic)
    _draw_heaviest(bars, mass, groups, tokens, logarithmic=logarithmic)


def _decades(mass: Matrix) -> Limits:
    """Return the limits of a logarithmic axis of these masses; (0, 0) where none of them has a logarithm."""
    drawn = mass[(mass > 0) & np.isfinite(mass)]
    if not drawn.size:
        return 0.0, 0.0
    # Masked keys have no logarithm: the axis begins a little below the smallest mass above 0.
    return max(float(drawn.min()), float(drawn.max()) * 1e-6) / 1.5, 2 * float(drawn.max())


def _draw_mass(axis: Axes, mass: Matrix, marked: Indices, *, logarithmic: bool) -> None:
    """Draw the largest mass in each column of the picture as a line, a band down to its mean, dots on marked keys."""
    length = len(mass)
    columns = max(1, min(_COLUMNS, length))
    starts = -(-np.arange(columns) * length // columns)
    if length:
        edges = np.append(starts, length)
        largest = np.maximum.reduceat(mass, starts)
        mean = np.add.reduceat(mass, starts) / np.diff(edges)
        axis.stairs(largest, edges, baseline=None, color=RED, linewidth=0.8, label="largest of a column")
        if columns < length:
            axis.stairs(largest, edges, baseline=mean, fill=True, color=_BAND, linewidth=0, label="down to its mean")
            legend(axis, loc="upper right")
        axis.plot(marked + 0.5, mass[marked], "o", color=RED, markersize=3.5, clip_on=False)
    low, high = _decades(mass)
    if logarithmic and low:
        axis.set_yscale("log")
        axis.set_ylim(low, high)
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlim(0, max(1, length))
    frame(axis)
    _count_tokens(axis.xaxis)


def _draw_heaviest(axis: Axes, mass: Matrix, groups: list[Indices], tokens: Tokens, *, logarithmic: bool) -> None:
    """Draw the heaviest keys as bars, the heaviest on top, with their number, their token and their mass."""
    masses = np.array([mass[keys[0]] for keys in groups])
    high = float(masses.max(initial=0.0, where=np.isfinite(masses))) or 1.0
    # An infinite mass, from a sum that overflowed, has the longest bar.
    widths = np.minimum(masses, high)
    bars = axis.barh(range(len(groups)), widths, color=RED, height=0.7)
    axis.set_yticks(range(len(groups)), [_key_name(keys, tokens) for keys in groups], **LITERAL)
    axis.set_ylim(max(1, len(groups)) - 0.4, -0.6)
    low, _ = _decades(mass)
    if logarithmic and low:
        # One key often has a thousand times the mass of the next: on a linear axis its bar alone would be seen.
        axis.set_xscale("log")
        axis.set_xlim(low, high * (high / low) ** 0.45)
    else:
        axis.set_xlim(0, 1.45 * high)
    axis.bar_label(bars, [f" {short_number(float(of_key), 3)}" for of_key in masses], fontsize=7)
    axis.set_xticks([])
    axis.minorticks_off()
    frame(axis)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _key_name(keys: Indices, tokens: Tokens) -> str:
    """Return the number of a key and, where there are tokens, its token; the count of several that are tied."""
    key = int(keys[0])
    if len(keys) > 1:
        return f"{len(keys):,} keys, tied"
    if tokens is None:
        return f"{key:,}"
    token = tokens[key] if len(tokens[key]) <= _LONGEST_NAME else tokens[key][: _LONGEST_NAME - 1] + "…"
    return f"{key:,}  {token}"


def _edges(weights: Matrix, keys: Indices, queries: Indices) -> Matrix:
    """Return the edges of a weight above 0 as rows (weight, query, key), the largest weights last and so on top."""
    edges = np.stack([weights, np.broadcast_to(queries[:, None], keys.shape), keys], axis=-1)
    edges = edges[(keys >= 0) & (weights > 0)]
    return np.asarray(edges[np.argsort(edges[:, 0], kind="stable")])


def draw_points(
    axis: Axes, weights: Matrix, keys: Indices, queries: Indices, lengths: tuple[int, int], cmap: str
) -> ScalarMappable:
    """Draw attention edges as points, keys across and queries down, the largest weights on top, coloured from 0 to 1.

    Colours up to the largest weight would show even weights as dark as a sink.
    """
    edges = _edges(weights, keys, queries)
    if len(edges) > _MOST_POINTS:
        edges = edges[np.linspace(0, len(edges) - 1, _MOST_POINTS).astype(int)]
    edge_weights, rows, cols = edges.T
    points = axis.scatter(
        cols + 0.5,
        rows + 0.5,
        c=edge_weights,
        s=3.0 if len(edges) > 5000 else 7.0,
        cmap=_darker_part(cmap),
        norm=_norm((0, 1)),
        linewidths=0,
        rasterized=True,
    )
    axis.set(xlim=(0, max(1, lengths[1])), ylim=(max(1, lengths[0]), 0))
    axis.set_box_aspect(box_aspect(lengths))
    frame(axis)
    _count_tokens(axis.xaxis, axis.yaxis)
    return points


def draw_lines(
    axis: Axes,
    weights: Matrix,
    keys: Indices,
    queries: Indices,
    lengths: tuple[int, int],
    tokens: tuple[Tokens, Tokens],
    cmap: str,
) -> ScalarMappable:
    """Draw attention edges as lines from queries on the left to keys on the right, wider the larger their weight."""
    from matplotlib.cm import ScalarMappable

    colours = ScalarMappable(_norm((0, 1)), _darker_part(cmap))
    for weight, query, key in _edges(weights, keys, queries):
        colour = colours.to_rgba(np.array(weight))
        axis.plot((0, 1), (query, key), color=colour, linewidth=0.4 + 1.8 * weight, solid_capstyle="round")
    frame(axis)
    axis.set_xlim(-0.02, 1.02)
    axis.set_xticks([0, 1], ["queries", "keys"])
    axis.set_ylim(max(1, *lengths) - 0.4, -0.6)
    right = axis.secondary_yaxis("right")
    for side, names, count in zip((axis, right), tokens, lengths, strict=True):
        labels = [str(place) for place in range(count)] if names is None else names
        side.set_yticks(range(len(labels)), labels, **LITERAL)
        side.tick_params(length=2, width=0.6, labelsize=LABEL_POINTS)
        side.spines[:].set_visible(False)
    return colours
