"""Diagrams of how the pieces of attention fit together, each with numbers that the library computes, and its memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from numpy.typing import NDArray

import attnscore as ats
from attnscore import plotting
from attnscore.plotting.drawing import BLUE, RED, style_lines

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELL = 0.4  # inches
Matrix = NDArray[np.float64]
Point = tuple[float, float]


def board(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure whose one axis counts inches from the upper left corner."""
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    return figure, axis


def numbered(axis: Axes, at: Point, matrix: Matrix, title: str, below: str, *, signed: bool = True) -> None:
    """Draw a matrix as cells with their numbers, grey where there is none."""
    finite = matrix[np.isfinite(matrix)]
    norm = Normalize(-np.abs(finite).max(), np.abs(finite).max()) if signed else Normalize(0, 1)
    colours = colormaps["RdBu_r" if signed else "Reds"]
    left, top = at
    for (row, col), value in np.ndenumerate(matrix):
        red, green, blue, _ = colour = colours(norm(value)) if np.isfinite(value) else (0.85, 0.85, 0.85, 1)
        corner = left + CELL * col, top + CELL * row
        axis.add_patch(Rectangle(corner, CELL, CELL, facecolor=colour, edgecolor="#8c8c8c", linewidth=0.6))
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "#262626"
        text = f"{round(value, 2) + 0.0:.4g}" if np.isfinite(value) else "−∞"
        middle = corner[0] + CELL / 2, corner[1] + CELL / 2
        axis.text(*middle, text, ha="center", va="center", fontsize=8, color=ink)
    rows, cols = matrix.shape
    axis.text(left + CELL * cols / 2, top - 0.1, title, ha="center", va="bottom", fontsize=10)
    axis.text(left + CELL * cols / 2, top + CELL * rows + 0.09, below, ha="center", va="top", fontsize=8)


def arrow(axis: Axes, start: Point, end: Point, text: str = "", *, bend: float = 0.0) -> None:
    """Draw an arrow with a word above it."""
    style = {"arrowstyle": "-|>", "color": BLUE, "linewidth": 1.3, "connectionstyle": f"arc3,rad={bend}"}
    axis.annotate("", end, start, arrowprops=style)
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.08
    axis.text(*middle, text, ha="center", va="bottom", fontsize=9, color=BLUE)


def pooling() -> Figure:
    """Two queries on four keys, the last of which is padding: from scores to the pooled values."""
    query, key = np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [1.0, 1.0]])
    value = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [9.0, 9.0]])
    mask = ats.ValidLens([3])
    scores = ats.attention_scores(query, key)
    masked = ats.attention_scores(query[None], key[None], mask=mask)[0]
    out, weights = (x[0] for x in ats.attend(query[None], key[None], value[None], mask=mask, return_weights=True))
    figure, axis = board(9.3, 4.1)
    numbered(axis, (0.25, 0.75), query, "queries Q", "(2 queries, d = 2)")
    numbered(axis, (0.25, 2.2), key, "keys K", "(4 keys, d = 2)")
    numbered(axis, (2.0, 0.75), scores, "scores S", "(2 queries, 4 keys)")
    numbered(axis, (4.35, 0.75), masked, "masked", "key 3 is padding")
    numbered(axis, (6.7, 0.75), weights, "weights A", "each row sums to 1", signed=False)
    numbered(axis, (5.15, 2.1), value, "values V", "(4 keys, 2)")
    numbered(axis, (7.1, 2.5), out, "output A V", "(2 queries, 2)")
    arrow(axis, (1.08, 1.15), (1.97, 1.15), "$q·k/\\sqrt{d}$")
    arrow(axis, (1.08, 2.75), (2.4, 1.85), bend=0.25)
    arrow(axis, (3.63, 1.15), (4.32, 1.15), "mask")
    arrow(axis, (5.98, 1.15), (6.67, 1.15), "softmax")
    arrow(axis, (7.5, 1.85), (7.5, 2.22))
    arrow(axis, (5.98, 2.9), (7.07, 2.9), "weighted sum")
    notes = "attend(Q, K, V, valid_lens=[3])\ncomputes all of it at once,\nwithout keeping S or A."
    axis.text(2.0, 2.55, f"Blue is below 0, red above.\n{notes}", fontsize=9, va="top", linespacing=1.5)
    return figure


def toy_maps() -> Figure:
    """Weights that can be checked by hand."""
    size = 4
    equal, one_hot, places = np.ones((size, 2)), 3 * np.eye(size), np.arange(size)[:, None].astype(float)
    maps = {
        "equal keys: 1/4 each": ats.attention_weights(equal, equal),
        "equal keys, causal:\n1/(i + 1) each": ats.attention_weights(equal, equal, mask=ats.Causal()),
        "equal keys, the last\nis padding: 1/3 each": ats.attention_weights(
            equal[None], equal[None], valid_lens=[size - 1]
        )[0],
        "one-hot vectors times 3,\ndot: the equal key": ats.attention_weights(one_hot, one_hot, score="dot"),
        "Gaussian of positions:\nnear keys": ats.attention_weights(places, places, score=ats.Gaussian(0.7)),
        "sum of q and k: the query\ncancels, the last key wins": ats.attention_weights(places, places, score="sum"),
    }
    return plotting.show_attention(
        list(maps.values()), titles=list(maps), numbers=True, xlabel="key j", ylabel="query i", figsize=(7.6, 6)
    )


def masked_softmax() -> Figure:
    """Scores of two queries, and their weights under no lengths, one length, and a length for each query."""
    scores = np.array([[0.2, 0.4, 0.1, 0.8], [1.0, 0.0, 2.0, 0.5]])
    maps = {
        "no lengths:\nall four keys": ats.masked_softmax(scores),
        "one length, 3: the last\nkey is masked for both": ats.masked_softmax(scores[None], [3])[0],
        "a length per query, 3 and 0:\nthe second row is zero": ats.masked_softmax(scores[None], [[3, 0]])[0],
    }
    options = {"xlabel": "key j", "ylabel": "query i", "label": "weight", "figsize": (8, 2.4)}
    return plotting.show_attention(list(maps.values()), titles=list(maps), numbers=True, **options)


def multi_head() -> Figure:
    """Shapes on the way through multi-head attention, with the axis of heads as stacked sheets."""
    figure, axis = board(9.3, 3.7)
    lines = [("query", 5), ("key", 7), ("value", 7)]
    box = {"boxstyle": "round,pad=0.02,rounding_size=0.06", "edgecolor": "#8c8c8c", "linewidth": 1.0}

    def card(at: Point, size: Point, text: str, shape: str, colour: str = "#eef3f9", sheets: int = 1) -> None:
        for sheet in reversed(range(sheets)):
            corner = at[0] + 0.06 * sheet, at[1] - 0.06 * sheet
            axis.add_patch(FancyBboxPatch(corner, *size, facecolor=colour, **box))
        middle = at[0] + size[0] / 2
        axis.text(middle, at[1] + 0.17, text, ha="center", va="center", fontsize=9, color="#262626")
        axis.text(middle, at[1] + 0.38, shape, ha="center", va="center", fontsize=8, color="#555555")

    for place, (name, length) in enumerate(lines):
        top = 0.55 + 0.95 * place
        card((0.15, top), (1.25, 0.55), name, f"(2, {length}, 12)")
        card((2.15, top), (1.45, 0.55), f"{name} of a head", f"(2, 3, {length}, 4)", "#dbe8f5", sheets=3)
        arrow(axis, (1.42, top + 0.28), (2.12, top + 0.28), f"$W_{'qkv'[place]}$")
    card((4.5, 1.02), (1.45, 0.55), "weights", "(2, 3, 5, 7)", "#fde0d6", sheets=3)
    card((4.5, 2.2), (1.45, 0.55), "pooled values", "(2, 3, 5, 4)", "#fde0d6", sheets=3)
    card((6.75, 2.2), (1.0, 0.55), "joined", "(2, 5, 12)")
    card((8.15, 2.2), (1.0, 0.55), "output", "(2, 5, 12)")
    arrow(axis, (3.75, 0.85), (4.45, 1.2), bend=-0.1)
    arrow(axis, (3.75, 1.75), (4.45, 1.4), bend=0.1)
    arrow(axis, (3.75, 2.7), (4.45, 2.55), bend=0.1)
    arrow(axis, (5.25, 1.6), (5.25, 2.06))
    arrow(axis, (6.1, 2.48), (6.72, 2.48), "join")
    arrow(axis, (7.77, 2.48), (8.12, 2.48), "$W_o$")
    axis.text(6.2, 1.2, "scores, mask and softmax,\neach head on its own", fontsize=9, va="center")
    axis.text(2.95, 0.25, "split into 3 heads of dimension 12 / 3", ha="center", fontsize=9)
    note = "2 sequences, 5 queries, 7 keys, 3 heads; the model's width is 12"
    axis.text(4.65, 3.5, note, fontsize=9, ha="center")
    return figure


def memory() -> Figure:
    """Peak memory against the length, inputs, output and gradients included, as the latest benchmark measured it."""
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    latest = max(documents, key=lambda document: document["date"])
    titles = {"growth-dot": "Scaled dot product", "growth-additive": "Additive, 64 hidden units"}
    figure = Figure(figsize=(8, 3.4))
    figure.suptitle("Memory: n with attnscore, n² with the plain formula (one head, d = 64, forward and backward)")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (case, title) in zip(panels, titles.items(), strict=True):
        draw_growth(axis, [row for row in latest["rows"] if row["case"] == case and row["status"] == "measured"])
        style_lines(axis, title, "n queries and n keys", "peak memory, MB" if axis is panels[0] else "")
    return figure


def draw_growth(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the memory of each side on logarithmic axes, over dashed lines of linear and of quadratic growth."""
    for row in rows:
        of_attnscore, of_formula = (BLUE, 1, "attnscore, dashed ∝ n"), (RED, 2, "plain formula, dashed ∝ n²")
        colour, power, words = of_attnscore if row["side"] == "attnscore" else of_formula
        lengths, sizes = np.array([(point["length"], point["peak"] / 1e6) for point in row["points"]]).T
        axis.loglog(lengths, sizes[0] * (lengths / lengths[0]) ** power, "--", color="#8c8c8c", linewidth=1)
        axis.loglog(lengths, sizes, "o-", color=colour, markersize=4)
        at = lengths[len(lengths) // 2], sizes[len(sizes) // 2]
        near = {"xytext": (6, -14), "textcoords": "offset points", "va": "top", "fontsize": 9}
        axis.annotate(words, at, color=colour, **near)
    axis.set_xscale("log", base=2)


DRAWN = {
    "pooling": pooling,
    "toy-maps": toy_maps,
    "masked-softmax": masked_softmax,
    "multi-head": multi_head,
    "memory": memory,
}
