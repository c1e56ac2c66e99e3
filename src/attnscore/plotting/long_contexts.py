"""Pictures of long contexts: the pooled map, the weight that each key receives, the strongest links.

What this module meets:
- axes count tokens, also where the picture holds bins; nothing of the size of the matrix is made;
- what is exactly 0, hidden by a mask or too small for its dtype, is grey; colours are logarithmic unless asked
  otherwise, because the rows of a long context are flat and a sink is not;
- labels never touch: the heaviest keys are named beside the line, not on it;
- arrays of any framework and lists, as in `plotting`, whose rules on figures hold here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.core.arguments import is_whole, shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.plotting import drawing_long as strokes
from attnscore.plotting.drawing import INK, Matrix, colour_bar, new_figure, panel_axes, to_matrix
from attnscore.plotting.drawing_long import Whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Up to so many tokens on either side links are lines between words; beyond, points in the plane.
_MOST_LINED = 64


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

    Each row of the picture sums to 1, less what a sink takes, and less where queries see no key. A bin without any
    weight is grey: a mask hides it, or its weights are too small for their dtype, as most of a saturated head's are.

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
    panels = _stack("pooled", pooled, 2, "rows, columns")
    check_count("titles", titles, len(panels), panels.shape, "pooled")
    for name, length, bins in (("query_len", query_len, panels.shape[1]), ("key_len", key_len, panels.shape[2])):
        if not is_whole(length) or length < (bins if bins > 1 else 0):
            raise ArgumentError(message(name, f"a whole number, at least the number of bins ({bins})", shown(length)))
    means = strokes.a_query(panels, query_len)
    cols = max(1, min(max_cols, len(panels)))
    rows = max(1, -(-len(panels) // cols))
    lengths = int(query_len), int(key_len)
    figure = new_figure(figsize or (3.6 * cols + 1.1, (3.4 * strokes.tallness(lengths) + 0.7) * rows))
    axes = panel_axes(figure, rows, cols)
    image, limits = None, strokes.fade_limits(means)
    for place, axis in enumerate(axes):
        if place >= len(panels):
            axis.set_axis_off()
            continue
        image = strokes.draw_bins(axis, means[place], lengths, limits, cmap, logarithmic=logarithmic)
        below, left = place + cols >= len(panels), place % cols == 0
        strokes.label(axis, titles[place] if titles else "", "keys" if below else "", "queries" if left else "")
    if image is not None:
        colour_bar(figure, image, axes, WEIGHT_OF_A_BIN)
    return figure


WEIGHT_OF_A_BIN = "a query's weight on a bin of keys"


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
        The keys' tokens, which then stand beside the numbers of the heaviest.
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
    panels = _stack("mass", mass, 1, "key")
    check_count("tokens", tokens, panels.shape[1], panels.shape, "mass")
    check_count("titles", titles, len(panels), panels.shape, "mass")
    if not is_whole(heaviest) or heaviest < 0:
        raise ArgumentError(message("heaviest", "a whole number, 0 or more", shown(heaviest)))
    count = max(1, len(panels))
    figure = new_figure(figsize or (9.0, 0.5 + count * max(1.9, 0.19 * heaviest + 0.5)))
    axes = figure.subplots(count, 2, squeeze=False, width_ratios=(3, 1))
    for place, ((line, bars), masses) in enumerate(zip(axes, panels, strict=False)):
        marked = heaviest_keys(masses, heaviest)
        strokes.draw_mass(line, masses, marked, logarithmic=logarithmic)
        strokes.draw_heaviest(bars, masses, marked, tokens)
        strokes.label(
            line, titles[place] if titles else "", "keys" if place + 1 == len(panels) else "", "weight received"
        )
        strokes.label(bars, "heaviest keys" if place == 0 else "", "", "")
    return figure


def heaviest_keys(mass: Matrix, count: int) -> Whole:
    """The keys with the largest mass above 0, in falling order; of equal ones the first."""
    order = np.argsort(-np.nan_to_num(mass, nan=0.0), kind="stable")[:count]
    return np.asarray(order[mass[order] > 0], np.int64)


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
    """Draw what `top_weights` gives: the strongest links of every query.

    Up to 64 tokens on either side each link is a line from a query to a key, wider the larger its weight. In longer
    sequences it is a point, keys across and queries down: vertical lines are sinks, diagonals are windows.

    Parameters
    ----------
    found : TopWeights, or (weights, index), each (query, k)
        Of one head: ``TopWeights(found.weights[0, 3], found.index[0, 3])``. Links with index -1 are left out.
    query_tokens, key_tokens : sequence of str, optional
        Written at the ends of lines; without those of the keys, the queries' serve for both where there are enough.
    query_index : whole numbers (query,), optional
        Which queries these are, when not the first ones.
    key_len : int, optional
        The number of keys; by default as many as the tokens, or as the links reach.
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
    >>> len(show_top_weights(found, ["le", "chat", "dort"]).axes[0].lines)  # the first query sees one key
    5
    """
    weights, index, places = _links(found, query_index)
    reach = int(index.max(initial=-1)) + 1
    if key_tokens is None and query_tokens is not None and max(reach, key_len or 0) <= len(query_tokens):
        key_tokens = query_tokens
    queries = len(query_tokens) if query_tokens is not None else int(places.max(initial=-1)) + 1
    keys = max(reach, key_len or 0)
    for name, tokens, least in (("query_tokens", query_tokens, places), ("key_tokens", key_tokens, index)):
        if tokens is not None and len(tokens) <= int(least.max(initial=-1)):
            expected = f"at least {int(least.max()) + 1} of them"
            raise ShapeError(message(name, expected, len(tokens), shapes={"index": index.shape}))
    keys = max(keys, len(key_tokens or ()))
    if max(queries, keys) <= _MOST_LINED:
        names = query_tokens, key_tokens
        figure = new_figure(figsize or strokes.size_of_lines(names, max(queries, keys)))
        (axis,) = panel_axes(figure, 1, 1)
        image = strokes.draw_lines(axis, weights, index, places, names, cmap)
    else:
        lengths = queries, keys
        figure = new_figure(figsize or (5.6, 4.4 * strokes.tallness(lengths) + 0.7))
        (axis,) = panel_axes(figure, 1, 1)
        image = strokes.draw_points(axis, weights, index, places, lengths, cmap)
        strokes.label(axis, "", "keys", "queries")
    axis.set_title(title, fontsize=11, color=INK)
    colour_bar(figure, image, [axis], "weight of the link")
    return figure


def _links(found: Any, query_index: Any) -> tuple[Matrix, Whole, Whole]:
    """Weights and keys (query, k), and which queries these are."""
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


def _stack(argument: str, array: Any, axes: int, names: str) -> Matrix:
    found = to_matrix(array)
    found = found[None] if found.ndim == axes else found
    if found.ndim != axes + 1:
        raise ShapeError(message(argument, f"axes ({names}) or (panel, {names})", f"shape {found.shape}"))
    return found


def check_count(argument: str, names: Sequence[str] | None, count: int, shape: tuple[int, ...], of: str) -> None:
    """Raise ShapeError unless there are as many names as things."""
    if names is not None and len(names) != count:
        raise ShapeError(message(argument, f"{count} of them", len(names), shapes={of: shape}))
