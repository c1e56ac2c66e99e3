"""Overview of one call at any length: the pooled map, an exact block of it, key mass and attention edges.

Requirements:
- memory is linear in the lengths; the map and the mass cost about three forward passes, the rest little in comparison;
- the block is exact, normalised over all keys, and marked on the map;
- one sequence and head is drawn; where there are several, the caller chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.analysis.summaries import key_mass, pooled_weights
from attnscore.analysis.weights import attention_scores, attention_weights
from attnscore.core.arguments import is_whole, shown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.plotting import drawing
from attnscore.plotting.drawing import Indices, Matrix, check_count, colour_bar, label, new_figure, to_matrix
from attnscore.plotting.long_contexts import WEIGHT_OF_A_BIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Queries whose strongest edges are drawn. Their weights on all keys are computed, a few queries at a time.
_SAMPLED = 256
_MOST_HELD = 2**21
_RING = "#2166ac"
_NAMED = 8
# Sinks are among the first keys; the exact block shows other keys where it can.
_FIRST_KEYS = 8


def show_long_attention(
    query: Any,
    key: Any,
    *,
    bins: tuple[int, int] = (128, 128),
    links: int = 4,
    zoom: tuple[int, int] | None = None,
    zoom_size: int = 48,
    place: tuple[int, ...] = (),
    tokens: Sequence[str] | None = None,
    title: str = "",
    figsize: tuple[float, float] = (10.5, 7.6),
    cmap: str = "Reds",
    **arguments: Any,
) -> Figure:
    """Compute and draw what a long context looks at: the pooled map, an exact block of it, key mass and edges.

    Memory is linear in the lengths. The edges are those of at most 256 queries, evenly spaced.

    Parameters
    ----------
    query, key : arrays of any framework
        As in `attend`.
    bins : (rows, columns)
        Of the pooled map.
    links : int
        Strongest keys of each query that are drawn.
    zoom : (query, key), optional
        The middle of the exact block; by default the strongest edge of the later queries to keys after the first.
    zoom_size : int
        Rows and columns of the exact block.
    place : whole numbers
        Which sequence and head, where there are several: an index into the axes before (query, key) of the weights.
    tokens : sequence of str, optional
        The keys' tokens, for the names of the heaviest.
    title : str
        Title of the figure.
    figsize : (float, float)
        Size in inches.
    cmap : str
        Name of a matplotlib colour map.
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
        `zoom`, `links` or `zoom_size` are out of range. Otherwise as `attention_weights`.
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
    figure = new_figure(figsize, title=title)  # first: a missing matplotlib is reported before anything is computed
    figure.set_layout_engine("constrained", h_pad=0.07, w_pad=0.07)  # compressed, labels would go over the edge
    for name, number in (("links", links), ("zoom_size", zoom_size)):
        if not is_whole(number) or number < 1:
            raise ArgumentError(message(name, "a whole number above 0", shown(number)))
    *lead, query_len, _ = attention_scores(query, key, key_index=slice(0, 0), **arguments).shape
    at = _place(place, tuple(lead))

    def chosen(found: Any) -> Matrix:
        matrix: Matrix = to_matrix(found)[at]
        return matrix

    def block(rows: Any, cols: Any = None) -> Matrix:
        return chosen(attention_weights(query, key, query_index=rows, key_index=cols, **arguments))

    mass = chosen(key_mass(query, key, **arguments))
    lengths = int(query_len), len(mass)
    check_count("tokens", tokens, lengths[1], mass.shape, "mass")
    pooled = drawing.mean_over_queries(chosen(pooled_weights(query, key, bins, **arguments)), lengths[0])
    rows = np.unique(np.linspace(0, max(0, lengths[0] - 1), min(_SAMPLED, lengths[0])).astype(np.int64))
    step = max(1, _MOST_HELD // (max(1, math.prod(lead)) * max(1, lengths[1])))
    found = _strongest(block, rows, min(int(links), lengths[1]), step)
    middle = _middle(zoom, *found, rows, lengths)
    spans = tuple(_span(at, int(zoom_size), length) for at, length in zip(middle, lengths, strict=True))
    exact = block(*(slice(*span) for span in spans)) if all(lengths) else np.zeros((0, 0))

    grid = figure.add_gridspec(2, 1, height_ratios=(1.6 * drawing.box_aspect(lengths), 1))
    above = grid[0].subgridspec(1, 2)
    below = grid[1].subgridspec(1, 3, width_ratios=(10, 3, 7))
    places = (above[0], above[1], below[0], below[1], below[2])
    whole, near, line, bars, points = (figure.add_subplot(part) for part in places)
    _draw_maps(figure, (whole, near), (pooled, exact), (lengths, spans), cmap)
    drawing.draw_key_mass((line, bars), mass, _NAMED, tokens)
    label(line, "", "keys", "weight received")
    label(bars, "heaviest keys")
    image = drawing.draw_points(points, *found, rows, lengths, cmap)
    label(points, f"{found[0].shape[1]} strongest keys of {len(rows)} queries", "keys", "queries")
    colour_bar(figure, image, [points], "weight")
    return figure


def _draw_maps(
    figure: Figure,
    axes: tuple[Axes, Axes],
    matrices: tuple[Matrix, Matrix],
    where: tuple[tuple[int, int], tuple[tuple[int, int], ...]],
    cmap: str,
) -> None:
    """Draw the pooled map, the exact block, and a ring around the block's place on the map."""
    (whole, near), (pooled, exact), (lengths, spans) = axes, matrices, where
    image = drawing.draw_bins(whole, pooled, lengths, drawing.decade_limits(pooled), cmap)
    colour_bar(figure, image, [whole], WEIGHT_OF_A_BIN)
    sizes, bins = (" × ".join(f"{n:,}" for n in numbers) for numbers in (lengths, pooled.shape))
    label(whole, f"{sizes} weights in {bins} bins", "keys", "queries")
    rows, cols = spans
    # The block itself may be less than a pixel: a ring of fixed size shows where it is.
    middle = sum(cols) / 2, sum(rows) / 2
    whole.plot(*middle, "o", color=_RING, markersize=11, markerfacecolor="none", markeredgewidth=1.6)
    shape = rows[1] - rows[0], cols[1] - cols[0]
    image = drawing.draw_bins(near, exact, shape, drawing.decade_limits(exact), cmap)
    image.set_extent((cols[0], max(cols[1], cols[0] + 1), max(rows[1], rows[0] + 1), rows[0]))
    colour_bar(figure, image, [near], "weight")
    title = f"{shape[0]} × {shape[1]} exact weights in the ring"
    label(near, title if exact.size else "", "keys", "queries")
    near.title.set_color(_RING)


def _place(place: Any, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of one sequence and head; raise where it chooses none."""
    if place == () and math.prod(lead) == 1:
        return (0,) * len(lead)
    fits = isinstance(place, (tuple, list)) and len(place) == len(lead) and all(map(is_whole, place))
    if not fits or any(not -length <= at < length for at, length in zip(place, lead, strict=True)):
        expected = f"a place in the axes {lead} before (query, key)"
        raise ShapeError(message("place", expected, shown(place), hint="place=(0, 3) is head 3 of sequence 0"))
    return tuple(place)


def _strongest(block: Callable[[Any], Matrix], rows: Indices, k: int, step: int) -> tuple[Matrix, Indices]:
    """Return the k largest weights of some queries and their keys (-1 for a weight of 0), a few queries at a time."""
    weights, index = np.zeros((len(rows), k)), np.full((len(rows), k), -1, np.int64)
    for first in range(0, len(rows) if k else 0, step):
        here = block(rows[first : first + step])
        keys = np.argpartition(-here, k - 1, axis=-1)[:, :k]
        found = np.take_along_axis(here, keys, -1)
        weights[first : first + step] = found
        index[first : first + step] = np.where(found > 0, keys, -1)
    return weights, index


def _middle(zoom: Any, weights: Matrix, index: Indices, rows: Indices, lengths: tuple[int, int]) -> tuple[int, int]:
    """Return the query and the key at the middle of the exact block."""
    if zoom is not None:
        pair = isinstance(zoom, (tuple, list)) and len(zoom) == 2 and all(map(is_whole, zoom))
        if not pair or any(not 0 <= at < length for at, length in zip(zoom, lengths, strict=True)):
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
