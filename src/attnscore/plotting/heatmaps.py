"""Heat maps of attention: keys across, queries down.

- Matrices may be NumPy arrays, tensors of any framework (also ones that require a gradient or live on another device)
  or nested lists; nothing is changed in place.
- One colour scale per figure, so that panels can be compared.
- Labels stay legible: the figure grows with the tokens.
- Figures follow the requirements of `drawing`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.base.arguments import shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.plotting import drawing
from attnscore.plotting.drawing import WEIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Sequence[str] | Sequence[Sequence[str]] | None = None,
    figsize: tuple[float, float] | None = None,
    cmap: str | None = None,
    label: str = "",
) -> Figure:
    """Draw a grid of matrices as heat maps with one shared colour bar.

    Parameters
    ----------
    matrices : array, tensor or nested lists (rows, cols, query, key)
        The numbers to draw. Two axes are taken as a single map, three as one row of maps.
    xlabel, ylabel : str
        Labels of the key axis (below the last row) and of the query axis (left of the first column).
    titles : sequence of str, or one such sequence per row, optional
        Titles of the columns, or of every single map.
    figsize : (float, float), optional
        Width and height of the whole figure in inches; by default it grows with the number of maps.
    cmap : str, optional
        Name of a matplotlib colour map; by default "Reds", and "RdBu_r" with 0 in its middle for signed numbers.
    label : str
        Label of the colour bar.

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
    maps = drawing.to_matrix(matrices)
    if not 2 <= maps.ndim <= 4:
        hint = "reshape to (rows, cols, query, key)"
        raise ShapeError(message("matrices", "axes (rows, cols, query, key)", f"shape {maps.shape}", hint=hint))
    maps = maps.reshape((1,) * (4 - maps.ndim) + maps.shape)
    rows, cols = maps.shape[:2]
    captions = _captions(titles, rows, cols)
    aspect = min(2.0, max(0.4, maps.shape[2] / max(1, maps.shape[3])))  # height of a map over its width
    figure = drawing.new_figure(figsize or (2.2 * cols + 1.0, (2.2 * aspect + 0.4) * rows + 0.4))
    axes = drawing.labelled_panels(figure, rows * cols, cols, captions, xlabel, ylabel, title_points=10)
    limits = drawing.limits_of(maps)
    for place, (axis, matrix) in enumerate(zip(axes, maps.reshape(rows * cols, *maps.shape[2:]), strict=True)):
        image = drawing.draw_map(axis, matrix, cmap=cmap, limits=limits)
        axis.tick_params(labelleft=place % cols == 0, labelbottom=place + cols >= rows * cols)
    if axes:
        drawing.colour_bar(figure, image, axes, label)
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
    cmap: str | None = None,
    label: str = WEIGHT,
    max_cols: int = 3,
    numbers: bool = False,
) -> Figure:
    """Draw attention weights with the tokens on both axes, one panel per head.

    Parameters
    ----------
    weights : array, tensor or nested lists (query, key) or (panel, query, key)
        The weights; several panels (heads, layers) share the tokens and the colour scale.
    query_tokens, key_tokens : sequence of str, optional
        Tokens of the queries and of the keys. Keys without tokens take the queries' tokens when the
        matrix is square.
    titles : sequence of str, optional
        One per panel.
    suptitle : str, optional
        Title of the figure.
    xlabel, ylabel, label : str
        Labels of the key axis, the query axis and the colour bar.
    figsize : (float, float), optional
        Size in inches; by default large enough for every token to be read.
    cmap : str, optional
        Name of a matplotlib colour map; by default "Reds", and "RdBu_r" with 0 in its middle for signed numbers.
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
    ArgumentError
        `max_cols` is no whole number above 0.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> figure = show_attention([[0.9, 0.1], [0.5, 0.5]], ["le", "chat"], ["the", "cat"])
    >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
    ['the', 'cat']
    """
    panels = drawing.to_panels("weights", weights, "query, key")
    if key_tokens is None and panels.shape[1] == panels.shape[2]:
        key_tokens = query_tokens
    labels = {"titles": titles, "query_tokens": query_tokens, "key_tokens": key_tokens}
    titles, query_tokens, key_tokens = (
        drawing.to_texts(argument, names, length, panels.shape, "weights")
        for (argument, names), length in zip(labels.items(), panels.shape, strict=True)
    )
    cols = drawing.columns(max_cols, len(panels))
    rows = -(-len(panels) // cols)
    size = figsize or drawing.size_for_tokens(
        panels.shape, rows, cols, query_tokens, key_tokens, titles, label, numbers=numbers
    )
    figure = drawing.new_figure(size, title=suptitle)
    axes = drawing.labelled_panels(figure, len(panels), cols, titles, xlabel, ylabel)
    limits = drawing.limits_of(panels)
    for place, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        image = drawing.draw_map(axis, panel, query_tokens, key_tokens, cmap=cmap, limits=limits)
        axis.tick_params(labelleft=place % cols == 0, labelbottom=place + cols >= len(panels))
        if numbers:
            drawing.write_numbers(axis, image, panel, drawing.two_decimals)
    if axes:
        drawing.colour_bar(figure, image, axes, label)
    return figure


def show_head_grid(
    values: Any,
    titles: Sequence[str] | None = None,
    *,
    suptitle: str | None = None,
    xlabel: str = "head",
    ylabel: str = "layer",
    figsize: tuple[float, float] | None = None,
    cmap: str | Sequence[str] | None = None,
    digits: int = 2,
) -> Figure:
    """Draw one number per layer and head as coloured tables, each with a separate colour scale.

    The scale is logarithmic where one head would hide the differences between all others.

    Parameters
    ----------
    values : array, tensor or nested lists (layer, head) or (panel, layer, head)
        The numbers; each statistic gets a panel.
    titles, suptitle, xlabel, ylabel, figsize
        As in `show_attention`: a title for each statistic, heads across and layers down.
    cmap : str, or one for each statistic, optional
        As in `show_attention`. "Reds_r" for a statistic that falls where others rise makes the same heads dark.
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
    panels = drawing.to_panels("values", values, "layer, head")
    titles = drawing.to_texts("titles", titles, len(panels), panels.shape, "values")
    count, layers, heads = panels.shape
    names = [cmap] * count if isinstance(cmap, str) else cmap
    cmaps: Sequence[str | None] = drawing.to_texts("cmap", names, count, panels.shape, "values") or [None] * count
    cols = 1 if count == 1 else 2
    rows = max(1, -(-count // cols))
    size = figsize or (cols * max(3.2, 0.46 * heads + 1.2), rows * max(2.0, 0.42 * layers + 1.0))
    figure = drawing.new_figure(size, title=suptitle)
    axes = drawing.labelled_panels(figure, count, cols, titles, xlabel, ylabel)
    for axis, panel, colours in zip(axes, panels, cmaps, strict=True):
        finite = panel[np.isfinite(panel)]
        logarithmic = bool(finite.size and finite.min() > 0 and finite.max() >= 20 * np.median(finite))
        limits = (float(finite.min()), float(finite.max())) if logarithmic else drawing.limits_of(panel)
        image = drawing.draw_map(axis, panel, cmap=colours, limits=limits, logarithmic=logarithmic, every=True)
        drawing.write_numbers(axis, image, panel, functools.partial(drawing.short_number, digits=digits))
        drawing.colour_bar(figure, image, [axis])
    return figure


def _captions(titles: Sequence[str] | Sequence[Sequence[str]] | None, rows: int, cols: int) -> list[str]:
    """Return the title of every map, row by row, from one for each column or for each map; [] without titles."""
    if isinstance(titles, str):
        raise ArgumentError(message("titles", "a list of texts", shown(titles)))
    if titles is None or len(titles) == 0:
        return []
    of_columns = np.ndim(titles[0]) == 0
    table = [list(titles)] * rows if of_columns else [list(row) for row in titles]
    if len(table) != rows or any(len(row) != cols for row in table):
        got = f"{len(titles)} of them" if of_columns else f"rows of {[len(row) for row in table]}"
        raise ShapeError(message("titles", f"{cols} of them, or {rows} rows of {cols}", got))
    return [str(caption) for row in table for caption in row]
