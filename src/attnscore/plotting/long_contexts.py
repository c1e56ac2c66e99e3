"""Pictures of long contexts: the pooled map, the weight that each key receives, the strongest edges, and all in one.

Requirements:
- axes count tokens, also where the picture holds bins; nothing of the size of the matrix is made;
- the overview of a call costs about three forward passes for its map and mass, and little more for the rest; its block
  is exact, normalised over all keys, and marked on the map;
- weights of exactly 0, masked or too small for their dtype, and NaN are grey; colours are logarithmic by default,
  because most queries of a long context spread their weight evenly and a sink stands far above;
- labels never touch: the heaviest keys are named in a separate panel, not on the line;
- arrays of any framework and lists are accepted; figures follow the requirements of `drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.analysis.summaries import bin_sizes, key_mass, pooled_weights
from attnscore.analysis.weights import attention_scores, attention_weights
from attnscore.base.arguments import check_count, is_whole, renamed_argument, shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.plotting import drawing
from attnscore.plotting.drawing import TIED, WEIGHT, Indices, Matrix, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Up to this number of tokens on either side, edges are lines between words; beyond, points in the plane.
_LONGEST_OF_LINES = 64
_WEIGHT_OF_A_BIN = "mean weight of the pairs in a bin"
_RECEIVED = "weight received,\nsum over queries"
# Queries whose strongest edges are drawn. Their weights on all keys are computed, a few queries at a time.
_SAMPLED_QUERIES = 256
_WEIGHTS_AT_ONCE = 2**21
_NAMED_KEYS = 8
# Sinks are among the first keys; the exact block shows other keys where it can.
_FIRST_KEYS = 8


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
    """Draw the result of `pooled_weights`: the mean weight of the pairs of a query and a key in each bin.

    A mean does not depend on how many pairs the bin holds, so uniform attention is one flat colour. A bin without any
    weight is grey: it is masked, or its weights are NaN or too small for their dtype, as most of a saturated head's
    are.

    Parameters
    ----------
    pooled : array, tensor or nested lists (rows, columns) or (panel, rows, columns)
        Sums of weights, as `pooled_weights` gives them.
    query_len, key_len : whole numbers
        Numbers of queries and keys in the bins.
    logarithmic : bool
        A logarithmic scale of colours, over at most four powers of ten.
    titles, figsize, cmap, max_cols
        As in `show_attention`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Other axes, or a number of titles that does not fit.
    ArgumentError
        A length below the number of bins, or `max_cols` is no whole number above 0.
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
    panels = drawing.to_panels("pooled", pooled, "rows, columns")
    titles = drawing.to_texts("titles", titles, len(panels), panels.shape, "pooled")
    for name, length, bins in (("query_len", query_len, panels.shape[1]), ("key_len", key_len, panels.shape[2])):
        if not is_whole(length) or length < 0 or len(bin_sizes(length, max(1, bins))) != max(1, bins):
            expected = f"a whole number, at least the number of bins ({bins}), that fills them all to one width"
            raise ArgumentError(message(name, expected, shown(length)))
    means = drawing.mean_of_pairs(panels, (query_len, key_len))
    cols = drawing.columns(max_cols, len(panels))
    rows = max(1, -(-len(panels) // cols))
    lengths = int(query_len), int(key_len)
    figure = drawing.new_figure(figsize or (3.6 * cols + 1.1, (3.4 * drawing.box_aspect(lengths) + 0.7) * rows))
    axes = drawing.labelled_panels(figure, len(panels), cols, titles, "keys", "queries")
    limits = drawing.decade_limits(means)
    for axis, mean in zip(axes, means, strict=True):
        image = drawing.draw_bins(axis, mean, (0, query_len), (0, key_len), limits, cmap, logarithmic=logarithmic)
    if axes:
        drawing.colour_bar(figure, image, axes, _WEIGHT_OF_A_BIN)
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
    """Draw the result of `key_mass`: the weight of every key along the sequence, and the heaviest keys by name.

    The line is the largest of the keys that share a column of the picture, so that one heavy key stays visible among
    100,000; the band below it reaches to their mean.

    Parameters
    ----------
    mass : array, tensor or nested lists (key,) or (panel, key)
        Sums of weights, as `key_mass` gives them.
    tokens : sequence of str, optional
        The keys' tokens, written after the numbers of the heaviest.
    heaviest : int
        Number of keys that are named.
    logarithmic : bool
        A logarithmic axis of weights.
    titles, figsize
        As in `show_attention`.

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
    panels = drawing.to_panels("mass", mass, "key")
    tokens = drawing.to_texts("tokens", tokens, panels.shape[1], panels.shape, "mass")
    titles = drawing.to_texts("titles", titles, len(panels), panels.shape, "mass")
    check_count("heaviest", heaviest)
    count = max(1, len(panels))
    figure = drawing.new_figure(figsize or (9.0, 0.5 + count * max(1.9, 0.19 * heaviest + 0.5)))
    axes = figure.subplots(count, 2, squeeze=False, width_ratios=(3, 1))
    for place, (pair, masses) in enumerate(zip(axes, panels, strict=False)):
        drawing.draw_key_mass(pair, masses, heaviest, tokens, logarithmic=logarithmic)
        is_last = place + 1 == count
        drawing.label(pair[0], titles[place] if titles else "", "keys" if is_last else "", _RECEIVED)
        scale = "log scale" if logarithmic and is_last else ""
        drawing.label(pair[1], "heaviest keys" if place == 0 else "", scale)
    return figure


@renamed_argument("found", "top_weights")
def show_top_weights(
    top_weights: Any,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    query_index: Any = None,
    key_len: int | None = None,
    title: str = "",
    figsize: tuple[float, float] | None = None,
    cmap: str = "Reds",
) -> Figure:
    """Draw the result of `attnscore.top_weights`: the strongest attention edges of every query.

    Up to 64 tokens on either side each edge is a line from a query to a key, wider the larger its weight. In longer
    sequences it is a point, keys across and queries down: vertical lines are sinks, diagonals are windows. Colours go
    from 0 to 1. A query whose weights are all the same, with as much left for other keys, has no strongest keys: its
    edges are left out, and the picture has the number of these queries.

    Parameters
    ----------
    top_weights : TopWeights, or (weights, index), each (query, k)
        The edges of one head: ``TopWeights(top.weights[0, 3], top.index[0, 3])``. Edges with index -1 are left out.
        Until 0.2 the keyword ``found=`` works too, with a warning.
    query_tokens, key_tokens : sequence of str, optional
        Written at the ends of lines. Without `key_tokens` the queries' tokens serve for both, where there are enough.
    query_index : whole numbers (query,), optional
        Indices of these queries, when not the first ones.
    key_len : int, optional
        The number of keys; by default the number of tokens, or up to the last key of an edge.
    title : str
        Title of the picture.
    figsize, cmap
        As in `show_attention`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ShapeError
        Other axes, or a number of tokens or of queries that does not fit.
    ArgumentError
        `key_len` is no whole number.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> top = ats.top_weights(np.eye(3), np.eye(3), 2, mask=ats.Causal())
    >>> len(show_top_weights(top, ["le", "chat", "dort"]).axes[0].lines)  # the first query has one key
    5
    """
    weights, index, query_indices = _edges(top_weights, query_index)
    is_tied = _are_tied(weights)
    index[is_tied] = -1
    ties = f"not drawn: {is_tied.sum():,} queries whose largest weights are tied" if is_tied.any() else ""
    if key_len is not None and (not is_whole(key_len) or key_len < 0):
        raise ArgumentError(message("key_len", "a whole number, 0 or more, or None", shown(key_len)))
    query_tokens, key_tokens = (names if names is None else [*map(str, names)] for names in (query_tokens, key_tokens))
    reach = max(int(index.max(initial=-1)) + 1, key_len or 0)
    if key_tokens is None and query_tokens is not None and reach <= len(query_tokens):
        key_tokens = query_tokens
    for name, tokens, used in (("query_tokens", query_tokens, query_indices), ("key_tokens", key_tokens, index)):
        if tokens is not None and len(tokens) <= int(used.max(initial=-1)):
            expected = f"at least {int(used.max()) + 1} of them"
            raise ShapeError(message(name, expected, len(tokens), shapes={"index": index.shape}))
    queries = len(query_tokens) if query_tokens is not None else int(query_indices.max(initial=-1)) + 1
    lengths = queries, max(reach, len(key_tokens or ()))
    if max(lengths) <= _LONGEST_OF_LINES:
        names = query_tokens, key_tokens
        widest = sum(max(map(len, tokens or ()), default=2) for tokens in names)
        height = 0.9 + drawing.INCHES_PER_LABEL * max(6, *lengths)
        figure = drawing.new_figure(figsize or (3.6 + 0.075 * widest, height))
        axis = figure.subplots()
        image = drawing.draw_lines(axis, weights, index, query_indices, lengths, names, cmap)
        drawing.label(axis, title, ties)
    else:
        figure = drawing.new_figure(figsize or (5.6, 4.4 * drawing.box_aspect(lengths) + 0.7))
        axis = figure.subplots()
        image = drawing.draw_points(axis, weights, index, query_indices, lengths, cmap)
        drawing.label(axis, title, f"keys ({ties})" if ties else "keys", "queries")
    drawing.colour_bar(figure, image, [axis], WEIGHT)
    return figure


def _are_tied(weights: Matrix) -> NDArray[np.bool_]:
    """Return which queries have two or more weights (query, k), all tied, and as much weight left for other keys."""
    lowest, highest = weights.min(-1, initial=math.inf), weights.max(-1, initial=0)
    remaining = 1 - weights.sum(-1)
    return np.asarray((weights.shape[1] > 1) & (lowest > 0) & (highest * TIED <= lowest) & (lowest * TIED <= remaining))


def _edges(top_weights: Any, query_index: Any) -> tuple[Matrix, Indices, Indices]:
    """Return weights and keys (query, k) of the result of `top_weights`, and the indices (query,) of the queries."""
    if not isinstance(top_weights, (tuple, list)) or len(top_weights) != 2:
        expected = "the result of attnscore.top_weights, or a pair (weights, index)"
        raise ShapeError(message("top_weights", expected, shown(type(top_weights))))
    weights, index = (drawing.to_matrix(x) for x in top_weights)
    if weights.ndim != 2 or weights.shape != index.shape:
        got = f"shapes {weights.shape} and {index.shape}"
        hint = "choose one head: (top.weights[0, 3], top.index[0, 3])"
        raise ShapeError(message("top_weights", "weights and index of axes (query, k)", got, hint=hint))
    query_indices = np.arange(len(index)) if query_index is None else drawing.to_matrix(query_index).astype(np.int64)
    if query_indices.shape != (len(index),):
        raise ShapeError(message("query_index", f"{len(index)} of them", f"shape {query_indices.shape}"))
    return weights, index.astype(np.int64), query_indices


@renamed_argument("links", "k")
def show_long_attention(
    query: Any,
    key: Any,
    *,
    bins: tuple[int, int] = (128, 128),
    k: int = 4,
    zoom: tuple[int, int] | None = None,
    zoom_size: int = 48,
    place: tuple[int, ...] = (),
    tokens: Sequence[str] | None = None,
    title: str = "",
    figsize: tuple[float, float] = (10.5, 7.6),
    cmap: str = "Reds",
    **arguments: Any,
) -> Figure:
    """Compute and draw the weights of a long context: the pooled map, an exact block of it, key mass and edges.

    Memory is linear in the lengths. Edges belong to at most 256 queries, evenly spaced. Of tied weights, such as
    uniform ones, all are drawn or none: some of them would look like a sink.

    Parameters
    ----------
    query, key : arrays of any framework
        As in `attend`.
    bins : (rows, columns)
        The bins of the pooled map, queries by keys.
    k : int
        Strongest keys of each query that are drawn.
    zoom : (query, key), optional
        The middle of the exact block; by default the strongest edge of the later queries to keys after the first.
    zoom_size : int
        Rows and columns of the exact block.
    place : whole numbers
        Sequence and head, where there are several: an index into the axes before (query, key) of the weights.
    tokens : sequence of str, optional
        The keys' tokens, for the names of the heaviest.
    title : str
        Title of the figure.
    figsize, cmap
        As in `show_attention`.
    **arguments
        ``score``, ``mask``, ``valid_lens``, ``bias``, ``sink`` and ``head_axis``, as in `attention_weights`.

    Returns
    -------
    matplotlib.figure.Figure
        Its axes: map, block, key mass, heaviest keys, edges, then the colour bars.

    Raises
    ------
    ShapeError
        `place` does not choose one matrix, or a number of tokens that does not fit.
    ArgumentError
        `zoom`, `k` or `zoom_size` are out of range. Otherwise as `attention_weights`.
    FrameworkError
        matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> query, key = np.random.default_rng(0).normal(size=(2, 500, 8))
    >>> figure = show_long_attention(query, key, mask=ats.Causal(), bins=(25, 25), zoom=(400, 300))
    >>> [axis.get_title() for axis in figure.axes[:2]]
    ['500 × 500 weights in 25 × 25 bins', '48 × 48 exact weights in the ring']
    """
    # First: a missing matplotlib is reported before anything is computed.
    figure = drawing.new_figure(figsize, title=title)
    figure.set_layout_engine("constrained", h_pad=0.07, w_pad=0.07)  # compressed, labels would go over the edge
    for name, number in (("k", k), ("zoom_size", zoom_size)):
        if not is_whole(number) or number < 1:
            raise ArgumentError(message(name, "a whole number above 0", shown(number)))
    *lead, query_len, _ = attention_scores(query, key, key_index=slice(0, 0), **arguments).shape
    sequence_and_head = _place(place, tuple(lead))

    def chosen(arrays: Any) -> Matrix:
        return np.asarray(drawing.to_matrix(arrays)[sequence_and_head])

    def block(rows: Any, cols: Any = None) -> Matrix:
        return chosen(attention_weights(query, key, query_index=rows, key_index=cols, **arguments))

    mass = chosen(key_mass(query, key, **arguments))
    lengths = int(query_len), len(mass)
    tokens = drawing.to_texts("tokens", tokens, lengths[1], mass.shape, "mass")
    means = drawing.mean_of_pairs(chosen(pooled_weights(query, key, bins, **arguments)), lengths)
    rows = np.unique(np.linspace(0, max(0, lengths[0] - 1), min(_SAMPLED_QUERIES, lengths[0])).astype(np.int64))
    step = max(1, _WEIGHTS_AT_ONCE // (max(1, math.prod(lead)) * max(1, lengths[1])))
    weights, index, has_ties = _strongest(block, rows, min(int(k), lengths[1]), step)
    middle = _middle(zoom, weights, index, rows, lengths)
    queries, keys = (_span(at, int(zoom_size), length) for at, length in zip(middle, lengths, strict=True))
    exact = block(slice(*queries), slice(*keys)) if all(lengths) else np.zeros((0, 0))

    grid = figure.add_gridspec(2, 1, height_ratios=(1.6 * drawing.box_aspect(lengths), 1))
    whole, near = grid[0].subgridspec(1, 2).subplots(squeeze=False)[0]
    line, bars, points = grid[1].subgridspec(1, 3, width_ratios=(10, 3, 7)).subplots(squeeze=False)[0]
    image = drawing.draw_bins(whole, means, (0, lengths[0]), (0, lengths[1]), drawing.decade_limits(means), cmap)
    drawing.colour_bar(figure, image, [whole], _WEIGHT_OF_A_BIN)
    sizes, in_bins = (" × ".join(f"{n:,}" for n in numbers) for numbers in (lengths, means.shape))
    drawing.label(whole, f"{sizes} weights in {in_bins} bins", "keys", "queries", title_points=9)
    _draw_block(figure, near, exact, whole, queries, keys, cmap)
    drawing.draw_key_mass((line, bars), mass, _NAMED_KEYS, tokens)
    drawing.label(line, "", "keys", _RECEIVED)
    drawing.label(bars, "heaviest keys", "log scale")
    dots = drawing.draw_points(points, weights, index, rows, lengths, cmap)
    strongest = f"{index.shape[1]} strongest keys of {len(rows)} queries"
    drawing.label(points, f"{strongest},\nties left out" if has_ties else strongest, "keys", "queries", title_points=9)
    drawing.colour_bar(figure, dots, [points], WEIGHT)
    return figure


def _draw_block(figure: Figure, near: Axes, exact: Matrix, whole: Axes, queries: Span, keys: Span, cmap: str) -> None:
    """Draw the exact block of these queries and keys, and a ring around its place on the map of the whole."""
    # The block itself may be less than a pixel: a ring of fixed size shows where it is.
    middle = sum(keys) / 2, sum(queries) / 2
    whole.plot(*middle, "o", color=drawing.BLUE, markersize=11, markerfacecolor="none", markeredgewidth=1.6)
    image = drawing.draw_bins(near, exact, queries, keys, drawing.decade_limits(exact), cmap)
    drawing.colour_bar(figure, image, [near], WEIGHT)
    title = f"{queries[1] - queries[0]} × {keys[1] - keys[0]} exact weights in the ring"
    drawing.label(near, title if exact.size else "", "keys", "queries")
    near.title.set_color(drawing.BLUE)


def _place(place: Any, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of one matrix in the axes `lead` before (query, key); () serves where there is one matrix."""
    if place == () and math.prod(lead) == 1:
        return (0,) * len(lead)
    fits = isinstance(place, (tuple, list)) and len(place) == len(lead) and all(map(is_whole, place))
    if not fits or any(not -length <= at < length for at, length in zip(place, lead, strict=True)):
        expected = f"a place in the axes {lead} before (query, key)"
        raise ShapeError(message("place", expected, shown(place), hint="place=(0, 3) is head 3 of sequence 0"))
    return tuple(place)


def _strongest(block: Callable[[Any], Matrix], rows: Indices, k: int, step: int) -> tuple[Matrix, Indices, bool]:
    """Return the k largest weights of some queries, their keys, and whether ties were left out; `step` rows at a time.

    The key is -1 for a weight of 0, and for one that is tied with a weight beyond the k largest: which of the tied keys
    are among the k is chance.
    """
    weights, index = np.zeros((len(rows), k)), np.full((len(rows), k), -1, np.int64)
    has_ties = False
    for first in range(0, len(rows) if k else 0, step):
        on_all_keys = block(rows[first : first + step])
        keys = np.argsort(-on_all_keys, axis=-1, kind="stable")[:, : k + 1]
        largest = np.take_along_axis(on_all_keys, keys, -1)
        beyond = largest[:, k:].max(-1, initial=0, keepdims=True)
        is_tied = (largest[:, :k] > 0) & (largest[:, :k] * TIED <= beyond)
        has_ties |= bool(is_tied.any())
        weights[first : first + step] = largest[:, :k]
        index[first : first + step] = np.where((largest[:, :k] > 0) & ~is_tied, keys[:, :k], -1)
    return weights, index, has_ties


def _middle(zoom: Any, weights: Matrix, index: Indices, rows: Indices, lengths: tuple[int, int]) -> tuple[int, int]:
    """Return the query and key in the middle of the exact block: `zoom`, or the strongest edge.

    Left out are the first quarter of the queries, and the first keys, which often are sinks.
    """
    if zoom is not None:
        is_pair = isinstance(zoom, (tuple, list)) and len(zoom) == 2 and all(map(is_whole, zoom))
        if not is_pair or any(not 0 <= at < length for at, length in zip(zoom, lengths, strict=True)):
            raise ArgumentError(message("zoom", f"a query and a key within {lengths}", shown(zoom)))
        return int(zoom[0]), int(zoom[1])
    if not index.size:
        return 0, 0
    later = (rows >= lengths[0] // 4)[:, None] & (index >= min(_FIRST_KEYS, lengths[1] - 1))
    row, edge = np.unravel_index(np.argmax(np.where(later, weights, -1)), weights.shape)
    return int(rows[row]), max(0, int(index[row, edge]))


def _span(middle: int, size: int, length: int) -> tuple[int, int]:
    """Return start and stop of `size` positions around `middle`, or of all where there are fewer."""
    start = max(0, min(middle - size // 2, length - size))
    return start, min(length, start + size)
