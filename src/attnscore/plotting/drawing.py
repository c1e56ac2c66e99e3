"""The strokes that `plotting` and the demo's pictures are made of.

What this module meets:
- any framework's array, or nested lists of them, becomes a float64 matrix without touching the original;
- figures never pass through pyplot: no global registry, no backend choice, no window; a notebook shows them;
- places without a finite number are grey, and do not stretch the colour scale;
- token labels are drawn as they are (a "$" starts no formula), turned and thinned until they do not touch.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.errors import FrameworkError, ShapeError, message

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Matrix = NDArray[np.float64]
Limits = tuple[float, float]

GREY = "#d9d9d9"
INK = "#262626"
# A label every 0.19 inch is the closest at which 8-point text neither touches nor needs a magnifier.
INCHES_PER_LABEL = 0.19
LABEL_POINTS = 8
# Maps that are longer than wide, or wider than long, by more than this are stretched to what there is room for.
_MOST_SQUARE = 8
# Beyond this a screen shrinks the labels until nobody reads them; longer axes are thinned instead.
_LARGEST_INCHES = 24.0


def to_matrix(array: Any) -> Matrix:
    """Copy an array of any framework, or nested lists of them, to float64 on the host.

    Raises
    ------
    ShapeError
        Ragged nested lists.
    FrameworkError
        Something that holds no numbers.
    """
    if isinstance(array, (list, tuple)):
        parts = [to_matrix(part) for part in array]
        if len({part.shape for part in parts}) > 1:
            shapes = ", ".join(str(part.shape) for part in parts)
            raise ShapeError(message("matrices", "parts of one shape", f"parts of shapes {shapes}"))
        return np.stack(parts) if parts else np.zeros((0,))
    if hasattr(array, "asnumpy"):  # MXNet
        array = array.asnumpy()
    elif hasattr(array, "detach"):  # PyTorch refuses NumPy a tensor with a gradient, on a device, or in bfloat16
        array = array.detach().cpu().double()
    try:
        return np.asarray(array).astype(np.float64)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last one from a tensor of TensorFlow's graphs
        raise FrameworkError(message("matrices", "an array of numbers", type(array).__name__)) from error


def new_figure(figsize: tuple[float, float]) -> Figure:
    """Return an empty figure that belongs to no window and that a notebook can show."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        hint = "pip install 'attnscore[plot]'"
        raise FrameworkError(message("plotting", "matplotlib", "no such package here", hint=hint)) from error
    # compress: without it square maps in a wide figure push titles and labels over the edge.
    figure = Figure(figsize=figsize, layout=ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.07, compress=True))
    # Notebooks find a PNG through this name; without it they need pyplot to have been imported first.
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # the protocol is by name
    return figure


def panel_axes(figure: Figure, rows: int, cols: int, *, share: bool = False) -> list[Axes]:
    """Return rows x cols panels of a figure, row by row."""
    axes = figure.subplots(rows, cols, sharex=share, sharey=share, squeeze=False)
    return [axis for line in axes for axis in line]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def limits_of(values: Matrix) -> Limits:
    """Return the colour scale: from 0 (or the least number below) to the largest finite number."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = min(0.0, float(finite.min())), float(finite.max())
    return (low, high) if high > low else (low, low + 1.0)


def spread_limits(values: Matrix) -> Limits | None:
    """Return limits of a logarithmic scale where one number would hide the others on a linear one."""
    finite = values[np.isfinite(values)]
    if not finite.size or finite.min() <= 0 or finite.max() < 20 * np.median(finite):
        return None
    return float(finite.min()), float(finite.max())


def draw_map(
    axis: Axes,
    matrix: Matrix,
    row_labels: Sequence[str] | None = None,
    col_labels: Sequence[str] | None = None,
    *,
    cmap: str = "Reds",
    limits: Limits,
    logarithmic: bool = False,
) -> AxesImage:
    """Draw one matrix, rows down and columns across, with labels where given."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    colours = colormaps[cmap].with_extremes(bad=GREY)
    shown = np.ma.masked_invalid(matrix)
    norm = LogNorm(*limits) if logarithmic else Normalize(*limits)
    rows, cols = (max(1, length) for length in matrix.shape)  # an empty map still has a frame
    edges = (-0.5, cols - 0.5, rows - 0.5, -0.5)
    # Of one query by many keys square cells leave a hair.
    long = max(rows, cols) > _MOST_SQUARE * min(rows, cols)
    image = axis.imshow(
        shown, cmap=colours, norm=norm, extent=edges, aspect="auto" if long else "equal", interpolation="nearest"
    )
    whole_number_ticks(axis, matrix.shape)
    frame(axis)
    if col_labels is not None:
        _label_axis(axis, "x", col_labels)
    if row_labels is not None:
        _label_axis(axis, "y", row_labels)
    return image


def frame(axis: Axes) -> None:
    """Thin ticks and spines, and labels in ink: the same on every picture."""
    axis.tick_params(which="both", length=2, width=0.6, labelsize=LABEL_POINTS, colors=INK)
    for spine in axis.spines.values():
        spine.set(linewidth=0.6, color="#8c8c8c")
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(fontsize=10, color=INK)


def _label_axis(axis: Axes, which: str, labels: Sequence[str]) -> None:
    box = axis.figure.bbox
    width, height = box.width / axis.figure.dpi, box.height / axis.figure.dpi
    grid = axis.get_subplotspec()
    rows, cols = grid.get_geometry()[:2] if grid is not None else (1, 1)
    room = 0.75 * (width / cols if which == "x" else height / rows)
    step = max(1, math.ceil(len(labels) * INCHES_PER_LABEL / room / 1.35))
    places = range(0, len(labels), step)
    text = [labels[place] for place in places]
    if which == "x":
        turn = 0 if max(map(len, text), default=0) <= 2 else 90
        axis.set_xticks(places, text, rotation=turn, parse_math=False)
    else:
        axis.set_yticks(places, text, parse_math=False)


def whole_number_ticks(axis: Axes, shape: tuple[int, ...], *, every: bool = False) -> None:
    """Number rows and columns with whole numbers only; `every` one of them, or as many as fit well."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    for ticks, length in ((axis.yaxis, shape[0]), (axis.xaxis, shape[1])):
        few = every or length <= 6
        ticks.set_major_locator(FixedLocator(range(length)) if few else MaxNLocator(nbins=6, integer=True))


def colour_bar(figure: Figure, image: ScalarMappable, axes: list[Axes], label: str = "") -> None:
    """Add one slim colour bar to the right of the given axes."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, aspect=24)
    bar.outline.set_linewidth(0.4)
    bar.ax.tick_params(which="both", length=2, width=0.6, labelsize=LABEL_POINTS, colors=INK)
    bar.set_label(label, fontsize=9, color=INK)


def write_numbers(axis: Axes, image: AxesImage, matrix: Matrix, text: Callable[[float], str]) -> None:
    """Write each number into its cell, white on dark cells; nothing where it is masked."""
    for (row, col), value in np.ma.ndenumerate(matrix):  # type: ignore[no-untyped-call]  # the stubs lack its types
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55  # perceived brightness
        axis.text(col, row, text(value), ha="center", va="center", fontsize=7, color="white" if dark else INK)


def two_decimals(value: float) -> str:
    """Format a number with two decimals, and what rounds to nothing without a sign.

    >>> [two_decimals(x) for x in (0.256, -0.001, 1.0)]
    ['0.26', '0.00', '1.00']
    """
    return f"{round(value, 2) + 0.0:.2f}"


def short_number(value: float, digits: int = 2) -> str:
    """Format a number with so many significant digits, without an exponent where it is of everyday size.

    >>> [short_number(x) for x in (0.0, 0.123, 9.96, 12.3, 1234.0, 1e-7)]
    ['0', '0.12', '10', '12', '1234', '1e-07']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -4 <= size < 6:
        return f"{value:.{digits - 1}g}"
    return f"{value:.{max(0, digits - 1 - size)}f}"


def size_for_tokens(
    shape: tuple[int, ...],
    rows: int,
    cols: int,
    row_labels: Sequence[str] | None,
    col_labels: Sequence[str] | None,
    *,
    numbers: bool = False,
) -> tuple[float, float]:
    """Return a figure size at which every token of (panel, query, key) maps can be read."""
    per_cell = 0.36 if numbers else INCHES_PER_LABEL if row_labels or col_labels else 0.08
    across = max(1.2, per_cell * shape[2]) + 0.075 * max(map(len, row_labels or [""])) + 0.3
    down = max(0.9, per_cell * shape[1]) + 0.075 * max(map(len, col_labels or [""])) + 0.5
    return min(_LARGEST_INCHES, cols * across + 0.9), min(_LARGEST_INCHES, rows * down + 0.3)
