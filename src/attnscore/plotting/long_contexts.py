"""Pictures of long contexts: the pooled map, the weight that each key receives, the strongest attention edges.

Requirements:
- axes count tokens, also where the picture holds bins; nothing of the size of the matrix is made;
- weights of exactly 0, masked or too small for their dtype, are grey; colours are logarithmic by default, because most
  queries of a long context spread their weight evenly and a sink stands far above;
- labels never touch: the heaviest keys are named in a panel of their own, not on the line;
- arrays of any framework and lists are accepted; figures follow the requirements of `drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.core.arguments import is_whole, shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.plotting import drawing
from attnscore.plotting.drawing import (
    Indices,
    Matrix,
    check_count,
    colour_bar,
    label,
    labelled_panels,
    new_figure,
    panel_axes,
    to_matrix,
    to_panels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Up to so many tokens on either side edges are lines between words; beyond, points in the plane.
_MOST_LINED = 64
WEIGHT_OF_A_BIN = "a query's weight on a bin of keys"


def show_pooled_weights(
    pooled: Any,
    *,
    query_len: int,
    key_len: int,
    titles: Sequence[str] | None = None,
    logarithmic: bool = True,
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
    max_cols: int = 3,
) -> Figure:
    """Draw what `pooled_weights` gives: the weight that a query of each bin gives to each bin of keys.

    Each row of the picture sums to 1, less the weight of a sink, and less where queries are fully masked. A bin without
    any weight is grey: it is masked, or its weights are too small for their dtype, as most of a saturated head's are.

    Parameters
    ----------
    pooled : array, tensor or nested lists (rows, columns) or (panel, rows, columns)
        Sums of weights, as `pooled_weights` gives them.
    query_len, key_len : whole numbers
        How many queries and keys the bins hold.
    titles : sequence of str, optional
        One per panel.
    logarithmic : bool
        A logarithmic scale of colours, over at most four powers of ten.
    figsize : (float, float), optional
        Size in inches.
    cmap : str
        Name of a matplotlib colour map.
    max_cols : int
        Panels per row.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Other axes, or a number of titles that does not fit.
    ArgumentError
        A length below the number of bins.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> pooled = ats.pooled_weights(np.zeros((400, 2)), np.zeros((400, 2)), (20, 20), mask=ats.Causal())
    >>> figure = show_pooled_weights(pooled, query_len=400, key_len=400)
    >>> figure.axes[0].get_xlim() == (0, 400)
    True
    """
    panels = to_panels("pooled", pooled, "rows, columns")
    check_count("titles", titles, len(panels), panels.shape, "pooled")
    for name, length, bins in (("query_len", query_len, panels.shape[1]), ("key_len", key_len, panels.shape[2])):
        if not is_whole(length) or length < (bins if bins > 1 else 0):
            raise ArgumentError(message(name, f"a whole number, at least the number of bins ({bins})", shown(length)))
    means = drawing.mean_over_queries(panels, query_len)
    cols = max(1, min(max_cols, len(panels)))
    rows = max(1, -(-len(panels) // cols))
    lengths = int(query_len), int(key_len)
    figure = new_figure(figsize or (3.6 * cols + 1.1, (3.4 * drawing.box_aspect(lengths) + 0.7) * rows))
    axes = labelled_panels(figure, len(panels), cols, titles, "keys", "queries")
    limits = drawing.decade_limits(means)
    for axis, mean in zip(axes, means, strict=True):
        image = drawing.draw_bins(axis, mean, lengths, limits, cmap, logarithmic=logarithmic)
    if axes:
        colour_bar(figure, image, axes, WEIGHT_OF_A_BIN)
    return figure


def show_key_mass(
    mass: Any,
    tokens: Sequence[str] | None = None,
    *,
    heaviest: int = 8,
    titles: Sequence[str] | None = None,
    logarithmic: bool = True,
    figsize: tuple[float, float] | None = None,
) -> Figure:
    """Draw what `key_mass` gives: the weight of every key along the sequence, and the heaviest keys by name.

    The line is the largest of the keys that share a column of the picture, so that one heavy key stays visible among
    100,000; the band below it reaches to their mean.

    Parameters
    ----------
    mass : array, tensor or nested lists (key,) or (panel, key)
        Sums of weights, as `key_mass` gives them.
    tokens : sequence of str, optional
        The keys' tokens, written after the numbers of the heaviest.
    heaviest : int
        How many keys are named.
    titles : sequence of str, optional
        One per panel.
    logarithmic : bool
        A logarithmic axis of weights.
    figsize : (float, float), optional
        Size in inches.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Other axes, or a number of tokens or titles that does not fit.
    ArgumentError
        `heaviest` is no whole number.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> figure = show_key_mass([6.0, 0.5, 1.5], ["[CLS]", "the", "cat"], heaviest=2)
    >>> [text.get_text() for text in figure.axes[1].get_yticklabels()]
    ['0  [CLS]', '2  cat']
    """
    panels = to_panels("mass", mass, "key")
    check_count("tokens", tokens, panels.shape[1], panels.shape, "mass")
    check_count("titles", titles, len(panels), panels.shape, "mass")
    if not is_whole(heaviest) or heaviest < 0:
        raise ArgumentError(message("heaviest", "a whole number, 0 or more", shown(heaviest)))
    count = max(1, len(panels))
    figure = new_figure(figsize or (9.0, 0.5 + count * max(1.9, 0.19 * heaviest + 0.5)))
    axes = figure.subplots(count, 2, squeeze=False, width_ratios=(3, 1))
    for place, (pair, masses) in enumerate(zip(axes, panels, strict=False)):
        drawing.draw_key_mass(pair, masses, heaviest, tokens, logarithmic=logarithmic)
        label(pair[0], titles[place] if titles else "", "keys" if place + 1 == count else "", "weight received")
        label(pair[1], "heaviest keys" if place == 0 else "")
    return figure


def show_top_weights(
    found: Any,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    query_index: Any = None,
    key_len: int | None = None,
    title: str = "",
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
) -> Figure:
    """Draw what `top_weights` gives: the strongest attention edges of every query.

    Up to 64 tokens on either side each edge is a line from a query to a key, wider the larger its weight. In longer
    sequences it is a point, keys across and queries down: vertical lines are sinks, diagonals are windows.

    Parameters
    ----------
    found : TopWeights, or (weights, index), each (query, k)
        Of one head: ``TopWeights(found.weights[0, 3], found.index[0, 3])``. Edges with index -1 are left out.
    query_tokens, key_tokens : sequence of str, optional
        Written at the ends of lines. Without `key_tokens` those of the queries serve for both, where there are enough.
    query_index : whole numbers (query,), optional
        Which queries these are, when not the first ones.
    key_len : int, optional
        The number of keys; by default that of the tokens, or up to the last key of an edge.
    title : str
        Title of the picture.
    figsize : (float, float), optional
        Size in inches.
    cmap : str
        Name of a matplotlib colour map.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Other axes, or a number of tokens or of queries that does not fit.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> found = ats.top_weights(np.eye(3), np.eye(3), 2, mask=ats.Causal())
    >>> len(show_top_weights(found, ["le", "chat", "dort"]).axes[0].lines)  # the first query has one key
    5
    """
    weights, index, places = _edges(found, query_index)
    reach = max(int(index.max(initial=-1)) + 1, key_len or 0)
    if key_tokens is None and query_tokens is not None and reach <= len(query_tokens):
        key_tokens = query_tokens
    for name, tokens, used in (("query_tokens", query_tokens, places), ("key_tokens", key_tokens, index)):
        if tokens is not None and len(tokens) <= int(used.max(initial=-1)):
            expected = f"at least {int(used.max()) + 1} of them"
            raise ShapeError(message(name, expected, len(tokens), shapes={"index": index.shape}))
    queries = len(query_tokens) if query_tokens is not None else int(places.max(initial=-1)) + 1
    lengths = queries, max(reach, len(key_tokens or ()))
    if max(lengths) <= _MOST_LINED:
        names = query_tokens, key_tokens
        figure = new_figure(figsize or drawing.size_of_lines(names, max(lengths)))
        (axis,) = panel_axes(figure, 1, 1)
        image = drawing.draw_lines(axis, weights, index, places, names, cmap)
        label(axis, title)
    else:
        figure = new_figure(figsize or (5.6, 4.4 * drawing.box_aspect(lengths) + 0.7))
        (axis,) = panel_axes(figure, 1, 1)
        image = drawing.draw_points(axis, weights, index, places, lengths, cmap)
        label(axis, title, "keys", "queries")
    colour_bar(figure, image, [axis], "weight of the edge")
    return figure


def _edges(found: Any, query_index: Any) -> tuple[Matrix, Indices, Indices]:
    """Return weights and keys (query, k), and the indices (query,) of the queries."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ShapeError(message("found", "weights and their index, as top_weights gives them", shown(type(found))))
    weights, index = (to_matrix(x) for x in found)
    if weights.ndim != 2 or weights.shape != index.shape:
        got = f"shapes {weights.shape} and {index.shape}"
        hint = "choose one head: (found.weights[0, 3], found.index[0, 3])"
        raise ShapeError(message("found", "weights and index of axes (query, k)", got, hint=hint))
    places = np.arange(len(index)) if query_index is None else to_matrix(query_index).astype(np.int64)
    if places.shape != (len(index),):
        raise ShapeError(message("query_index", f"{len(index)} of them", f"shape {places.shape}"))
    return weights, index.astype(np.int64), places
