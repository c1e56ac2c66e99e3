"""Heat maps of attention: keys across, queries down.

What this module meets:
- matplotlib is imported inside the functions, and a missing one is a clear error that names the extra;
- figures are built without pyplot, so nothing is registered globally, no window opens, no backend is chosen,
  and a machine without a screen needs no setting; a notebook shows the returned figure all the same;
- matrices may be NumPy arrays, tensors of any framework (also ones that require a gradient or live on
  another device) or nested lists; nothing is changed in place;
- one colour scale per figure, so that panels can be compared; places that hold no number (NaN, or -inf of a
  masked score) are grey;
- labels stay legible: the figure grows with the tokens, tokens are turned, and long axes are thinned.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.errors import ShapeError, message
from attnscore.plotting.drawing import (
    INK,
    Matrix,
    colour_bar,
    draw_map,
    limits_of,
    new_figure,
    panel_axes,
    short_number,
    size_for_tokens,
    spread_limits,
    to_matrix,
    two_decimals,
    whole_number_ticks,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | Sequence[Sequence[str]] | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
) -> Figure:
    """Draw a grid of matrices as heat maps with one shared colour bar.

    Parameters
    ----------
    matrices : array, tensor or nested lists (rows, cols, query, key)
        What to draw. Two axes are taken as a single map, three as one row of maps.
    xlabel, ylabel : str
        Labels of the key axis (below the last row) and of the query axis (left of the first column).
    titles : sequence of str, or one such sequence per row, optional
        Titles of the columns, or of every single map.
    figsize : (float, float), optional
        Width and height of the whole figure in inches; by default it grows with the number of maps.
    cmap : str
        Name of a matplotlib colour map.

    Returns
    -------
    matplotlib.figure.Figure
        Shown by a notebook when it is the last value of a cell; ``figure.savefig("maps.png")`` writes it.

    Raises
    ------
    ShapeError
        More than four axes, fewer than two, ragged lists, or a number of titles that does not fit.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> figure = show_heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries")
    >>> len(figure.axes)  # the map and the colour bar
    2
    """
    maps = _grid_of_maps(matrices)
    rows, cols = maps.shape[:2]
    captions = _captions(titles, rows, cols)
    tall = min(2.0, max(0.4, maps.shape[2] / max(1, maps.shape[3])))
    figure = new_figure(figsize or (2.2 * cols + 1.0, (2.2 * tall + 0.4) * rows + 0.4))
    axes = panel_axes(figure, rows, cols, share=True)
    limits = limits_of(maps)
    image = None
    for (row, col), axis in zip(np.ndindex(rows, cols), axes, strict=True):
        image = draw_map(axis, maps[row, col], cmap=cmap, limits=limits)
        axis.set_title(captions[row][col], fontsize=10, color=INK)
        axis.set_xlabel(xlabel if row == rows - 1 else "")
        axis.set_ylabel(ylabel if col == 0 else "")
        whole_number_ticks(axis, maps.shape[2:])
    if image is not None:
        colour_bar(figure, image, axes)
    return figure


def show_attention(
    weights: Any,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    suptitle: str | None = None,
    xlabel: str = "Keys",
    ylabel: str = "Queries",
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
    label: str = "weight",
    max_cols: int = 3,
    numbers: bool = False,
) -> Figure:
    """Draw attention weights with the tokens on both axes, one panel per head.

    Parameters
    ----------
    weights : array, tensor or nested lists (query, key) or (panel, query, key)
        The weights; several panels (heads, layers) share the tokens and the colour scale.
    query_tokens, key_tokens : sequence of str, optional
        Their tokens, as many as the axis is long. Keys without tokens take those of the queries when the
        matrix is square.
    titles : sequence of str, optional
        One per panel.
    suptitle : str, optional
        Title of the figure.
    xlabel, ylabel, label : str
        Labels of the key axis, the query axis and the colour bar.
    figsize : (float, float), optional
        Size in inches; by default large enough for every token to be read.
    cmap : str
        Name of a matplotlib colour map.
    max_cols : int
        Panels per row.
    numbers : bool
        Write each weight into its cell; for small maps.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Axes, titles or a number of tokens that do not fit the weights.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> figure = show_attention([[0.9, 0.1], [0.5, 0.5]], ["le", "chat"], ["the", "cat"])
    >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
    ['the', 'cat']
    """
    panels = _panels("weights", weights, "query, key")
    if key_tokens is None and panels.shape[1] == panels.shape[2]:
        key_tokens = query_tokens
    for argument, labels, axis_of in (
        ("query_tokens", query_tokens, 1),
        ("key_tokens", key_tokens, 2),
        ("titles", titles, 0),
    ):
        _check_labels(argument, labels, panels.shape[axis_of], panels.shape)
    cols = max(1, min(max_cols, len(panels)))
    rows = -(-len(panels) // cols)
    figure = new_figure(figsize or size_for_tokens(panels.shape, rows, cols, query_tokens, key_tokens, numbers=numbers))
    axes = panel_axes(figure, rows, cols)
    limits = limits_of(panels)
    image = None
    for place, axis in enumerate(axes):
        if place >= len(panels):
            axis.set_axis_off()
            continue
        image = draw_map(axis, panels[place], query_tokens, key_tokens, cmap=cmap, limits=limits)
        if numbers:
            write_numbers(axis, image, panels[place], two_decimals)
        axis.set_title(titles[place] if titles else "", fontsize=11, color=INK)
        axis.set_xlabel(xlabel if place + cols >= len(panels) else "")
        axis.set_ylabel(ylabel if place % cols == 0 else "")
    if image is not None:
        colour_bar(figure, image, axes, label)
    if suptitle:
        figure.suptitle(suptitle, fontsize=12, color=INK)
    return figure


def show_head_grid(
    values: Any,
    titles: Sequence[str] | None = None,
    *,
    suptitle: str | None = None,
    xlabel: str = "head",
    ylabel: str = "layer",
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
    digits: int = 2,
) -> Figure:
    """Draw one number per layer and head as coloured tables, each with its own colour scale.

    The scale is logarithmic where one head would hide the differences between all others.

    Parameters
    ----------
    values : array, tensor or nested lists (layer, head) or (panel, layer, head)
        The numbers; each statistic gets a panel.
    titles : sequence of str, optional
        One per statistic.
    suptitle : str, optional
        Title of the figure.
    xlabel, ylabel : str
        Labels of the head axis and of the layer axis.
    figsize : (float, float), optional
        Size in inches.
    cmap : str
        Name of a matplotlib colour map.
    digits : int
        Significant digits of the numbers in the cells.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Axes or a number of titles that do not fit.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> figure = show_head_grid([[1.5, 2.0], [0.25, 12.0]], ["entropy (nats)"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.5', '2.0', '0.25', '12']
    """
    panels = _panels("values", values, "layer, head")
    _check_labels("titles", titles, panels.shape[0], panels.shape)
    count, layers, heads = panels.shape
    cols = 1 if count == 1 else 2
    rows = max(1, -(-count // cols))
    figure = new_figure(figsize or (cols * max(3.2, 0.46 * heads + 1.2), rows * max(2.0, 0.42 * layers + 1.0)))
    axes = panel_axes(figure, rows, cols)
    for place, axis in enumerate(axes):
        if place >= count:
            axis.set_axis_off()
            continue
        wide = spread_limits(panels[place])
        limits = wide or limits_of(panels[place])
        image = draw_map(axis, panels[place], cmap=cmap, limits=limits, logarithmic=wide is not None)
        whole_number_ticks(axis, (layers, heads), every=True)
        write_numbers(axis, image, panels[place], functools.partial(short_number, digits=digits))
        axis.set_title(titles[place] if titles else "", fontsize=11, color=INK)
        axis.set_xlabel(xlabel if place + cols >= count else "")
        axis.set_ylabel(ylabel if place % cols == 0 else "")
        colour_bar(figure, image, [axis])
    if suptitle:
        figure.suptitle(suptitle, fontsize=12, color=INK)
    return figure


def _grid_of_maps(matrices: Any) -> Matrix:
    maps = to_matrix(matrices)
    if not 2 <= maps.ndim <= 4:
        hint = "reshape to (rows, cols, query, key)"
        raise ShapeError(message("matrices", "axes (rows, cols, query, key)", f"shape {maps.shape}", hint=hint))
    return maps.reshape((1,) * (4 - maps.ndim) + maps.shape)


def _panels(argument: str, array: Any, axes: str) -> Matrix:
    panels = to_matrix(array)
    panels = panels[None] if panels.ndim == 2 else panels
    if panels.ndim != 3:
        raise ShapeError(message(argument, f"axes ({axes}) or (panel, {axes})", f"shape {panels.shape}"))
    return panels


def _captions(titles: Sequence[str] | Sequence[Sequence[str]] | None, rows: int, cols: int) -> list[list[str]]:
    if not titles:
        return [[""] * cols for _ in range(rows)]
    table = [list(titles)] * rows if isinstance(titles[0], str) else [list(row) for row in titles]
    if len(table) != rows or any(len(row) != cols for row in table):
        got = f"{len(titles)} of them" if isinstance(titles[0], str) else f"rows of {[len(row) for row in table]}"
        raise ShapeError(message("titles", f"{cols} of them, or {rows} rows of {cols}", got))
    return [[str(caption) for caption in row] for row in table]


def _check_labels(argument: str, labels: Sequence[str] | None, length: int, shape: tuple[int, ...]) -> None:
    if argument == "titles" and isinstance(labels, str):  # tokens may well be the characters of a text
        raise ShapeError(message(argument, "a list of texts", repr(labels)))
    if labels is not None and len(labels) != length:
        raise ShapeError(message(argument, f"{length} of them", len(labels), shapes={"weights": shape}))
