"""The pictures of the experiments on why scores are scaled, one function for each finding.

What this module meets:
- colours mean the same in every picture: red is without the scale, blue with it, grey is the law;
- what was measured is drawn with its spread; a law is a dashed line;
- matplotlib is imported inside the functions, by `drawing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.diagnostics.finding import NAMES
from attnscore.plotting.drawing import (
    INK,
    LABEL_POINTS,
    colour_bar,
    draw_map,
    new_figure,
    two_decimals,
    whole_number_ticks,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnscore.diagnostics.answers import AdditiveAsNetwork, DifferentLengths, OtherKeys, SumScore
    from attnscore.diagnostics.finding import Array
    from attnscore.diagnostics.gradients import GradientFlow
    from attnscore.diagnostics.other_scores import ScoreGrowth
    from attnscore.diagnostics.sharpening import Sharpening
    from attnscore.diagnostics.training import TrainingRuns
    from attnscore.diagnostics.variance import LogitVariance

WITHOUT, SCALED, LAW = "#b2182b", "#2166ac", "#8c8c8c"
COLOURS = {"dot": WITHOUT, "scaled_dot": SCALED}
_BLUES = ("#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#08306b")
_SPREAD = 0.18


def _style(axis: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xlabel(xlabel, fontsize=9, color=INK)
    axis.set_ylabel(ylabel, fontsize=9, color=INK)
    axis.grid(which="major", color="#e5e5e5", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=LABEL_POINTS, colors=INK)


def _legend(axis: Axes, **options: Any) -> None:
    axis.legend(fontsize=LABEL_POINTS, frameon=False, labelcolor=INK, **options)


def _powers_of_two(axis: Axes, dims: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    shown = dims if len(dims) <= 6 else dims[::2]
    axis.set_xticks(shown, [str(dim) for dim in shown])
    axis.xaxis.set_minor_locator(NullLocator())


def variance_lines(found: LogitVariance) -> Figure:
    """One panel per kind of coordinates: variance against d, with and without the scale, and the law of each."""
    figure = new_figure((2.9 * len(found.kinds), 3.3))
    panels = figure.subplots(1, len(found.kinds), sharey=True, squeeze=False)[0]
    for place, (axis, kind) in enumerate(zip(panels, found.kinds, strict=True)):
        for score, colour in COLOURS.items():
            line = found.of(kind.name, score)
            dims = [point.dim for point in line]
            growth = found.exponent(kind.name, score).value
            bars = [point.measured.margin for point in line]
            values = [point.measured.value for point in line]
            label = f"{NAMES[score]}: d^{round(growth, 2) + 0:.2f}"
            axis.errorbar(
                dims, values, yerr=bars, fmt="o", color=colour, markersize=3.5, elinewidth=1, capsize=2, label=label
            )
            axis.plot(dims, [point.law for point in line], "--", color=LAW, linewidth=1, zorder=1)
        axis.set_yscale("log", base=10)
        _powers_of_two(axis, dims)
        _style(axis, kind.name, "length d of query and key", "" if place else "variance of the scores")
        _legend(axis, loc="upper left")
    figure.suptitle("Variance of q·k, measured (95 % confidence) and by law (dashed)", fontsize=11, color=INK)
    return figure


def sharpening_bars(found: Sharpening) -> Figure:
    """The weights of every multiple as bars; the Jacobians of y and 8 y as maps with their numbers."""
    figure = new_figure((11, 3.3))
    panels = figure.subplots(1, 3, width_ratios=[1.7, 1, 1])
    bars, count = panels[0], len(found.factors)
    width = 0.84 / count
    for place, (factor, row) in enumerate(zip(found.factors, found.weights, strict=True)):
        at = np.arange(len(found.logits)) + (place - (count - 1) / 2) * width
        name = "y" if factor == 1 else f"{factor:g} y"
        colour = _BLUES[round(place * (len(_BLUES) - 1) / max(1, count - 1))]
        bars.bar(at, row, width * 0.92, color=colour, label=name)
    bars.set_xticks(range(len(found.logits)), [f"{logit:g}" for logit in found.logits])
    _style(bars, "softmax of multiples of y", "logit in y", "weight")
    bars.grid(axis="x", visible=False)
    _legend(bars, loc="upper left", ncols=2)
    drawn = [found.factors.index(factor) for factor in (1.0, 8.0)]
    largest = float(np.abs(found.jacobians[drawn]).max())
    image = None
    for axis, place, name in zip(panels[1:], drawn, ("y", "8 y"), strict=True):
        matrix = found.jacobians[place]
        image = draw_map(axis, matrix, cmap="RdBu_r", limits=(-largest, largest))
        write_numbers(axis, image, matrix, lambda value: f"{round(value, 4) + 0.0:.4f}")
        whole_number_ticks(axis, matrix.shape)
        axis.set_title(f"Jacobian at {name}: norm {found.norms[place]:.3f}", fontsize=10, color=INK)
        axis.set_xlabel("of logit", fontsize=9)
        axis.set_ylabel("of weight" if axis is panels[1] else "", fontsize=9)
    if image is not None:
        colour_bar(figure, image, list(panels[1:]), "derivative")
    return figure


def flow_lines(found: GradientFlow) -> Figure:
    """Jacobian norm, gradient norm and saturated rows against d, with and without the scale."""
    figure = new_figure((10.5, 3.2))
    panels = figure.subplots(1, 3)
    for score, colour in COLOURS.items():
        line = found.of(score)
        dims = [point.dim for point in line]
        for axis, rows in zip(panels, ([p.jacobian_norm for p in line], [p.gradient_norm for p in line]), strict=False):
            low, middle, high = np.array(rows).T
            axis.plot(dims, middle, "o-", color=colour, markersize=4, label=NAMES[score])
            axis.fill_between(dims, low, high, color=colour, alpha=_SPREAD, linewidth=0)
            axis.set_yscale("log")
        panels[2].plot(dims, [100 * p.saturated for p in line], "o-", color=colour, markersize=4, label=NAMES[score])
    titles = ("norm of the softmax Jacobian", "gradient that reaches the scores", "rows with a weight of 0.99 or more")
    units = ("Frobenius norm, of a row", "norm, of a row", "%")
    for axis, title, unit in zip(panels, titles, units, strict=True):
        _powers_of_two(axis, dims)
        _style(axis, title, "length d of query and key", unit)
    _legend(panels[0], loc="lower left")
    figure.suptitle(f"What comes back through the softmax over {found.keys} keys: median and quartiles of the rows",
                    fontsize=11, color=INK)  # fmt: skip
    return figure


def growth_lines(found: ScoreGrowth) -> Figure:
    """Variance of the logits, and the largest weight, against d: one line per score."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(point.score for point in found.points))
    figure = new_figure((10.5, 3.6))
    left, right = figure.subplots(1, 2)
    for place, name in enumerate(names):
        line = found.of(name)
        dims = [point.dim for point in line]
        # One letter in the place of the marker tells lines apart that lie on each other.
        style = {"color": colormaps["tab10"](place % 10), "marker": "osD^vPX*"[place % 8], "markersize": 5}
        label = f"{name}: d^{round(found.exponent(name).value, 2) + 0:.2f}"
        left.plot(dims, [point.variance for point in line], linewidth=1.3, label=label, **style)
        right.plot(dims, [point.max_weight for point in line], linewidth=1.3, **style)
    left.set_yscale("log")
    right.set_ylim(0, 1.02)
    _powers_of_two(left, dims)
    _powers_of_two(right, dims)
    _style(left, "variance of a row's scores", "length d of query and key")
    _style(right, f"largest weight of a row, of {found.keys} keys (mean)", "length d of query and key")
    figure.legend(loc="outside right center", fontsize=LABEL_POINTS, frameon=False, labelcolor=INK)
    return figure


def sum_maps(found: SumScore) -> Figure:
    """The weights under the sum and under the dot product."""
    titles = ("sum(q + k): every query the same", "q·k: each query its own")
    return _two_maps((found.weights, found.dot_weights), titles, "Keys", "Queries", height=3.2)


def _two_maps(matrices: tuple[Array, Array], titles: tuple[str, str], keys: str, queries: str, height: float) -> Figure:
    """Two maps of weights beside each other, with one colour scale."""
    figure = new_figure((8.2, height))
    panels = figure.subplots(1, 2)
    largest = float(max(matrix.max() for matrix in matrices))
    image = None
    for axis, matrix, title in zip(panels, matrices, titles, strict=True):
        image = draw_map(axis, matrix, limits=(0.0, largest))
        write_numbers(axis, image, matrix, two_decimals)
        whole_number_ticks(axis, matrix.shape, every=True)
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_xlabel(keys)
        axis.set_ylabel(queries if axis is panels[0] else "")
    if image is not None:
        colour_bar(figure, image, list(panels), "weight")
    return figure


def toy_lines(found: OtherKeys) -> Figure:
    """How far dot product and additive attention are apart as the keys stop being alike."""
    figure = new_figure((5.6, 3.2))
    axis = figure.subplots()
    axis.fill_between(found.noise, found.low, found.high, color=WITHOUT, alpha=_SPREAD, linewidth=0)
    axis.plot(found.noise, found.differences, "o-", color=WITHOUT, markersize=4, label="mean; 5 % to 95 % shaded")
    axis.set_xscale("symlog", linthresh=0.01, linscale=0.5)
    axis.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axis.set_xlim(0, max(found.noise) * 1.1)
    axis.set_ylim(0, None)
    axis.set_xticks(found.noise, [f"{noise:g}" for noise in found.noise])
    axis.set_yticks([0, 0.01, 0.1, 1, 10], ["0", "0.01", "0.1", "1", "10"])
    _style(axis, "Dot product and additive attention, the toy example with other keys",
           "noise in the keys (0: all alike)", "largest difference of the outputs")  # fmt: skip
    _legend(axis, loc="upper left")
    return figure


def lengths_maps(found: DifferentLengths) -> Figure:
    """The weights by matrix products and by Bilinear."""
    labels = (f"Keys of length {found.key_dim}", f"Queries of length {found.query_dim}")
    return _two_maps(
        (found.by_products, found.by_bilinear), ("softmax of (Q W) Kᵀ", "Bilinear(W)"), *labels, height=2.9
    )


def network_scatter(found: AdditiveAsNetwork) -> Figure:
    """The network's scores against those of the library: points on the diagonal."""
    figure = new_figure((4.2, 3.6))
    axis = figure.subplots()
    ends = [float(found.by_additive.min()), float(found.by_additive.max())]
    axis.plot(ends, ends, color=LAW, linewidth=1)
    axis.plot(found.by_additive.ravel(), found.by_network.ravel(), "o", color=SCALED, markersize=3, alpha=0.6)
    _style(axis, f"One point per pair: they differ by {found.difference:.0e} at most",
           "Additive(w_v, W_q, W_k)", "w_v · tanh([W_q W_k] [q; k])")  # fmt: skip
    return figure


def training_curves(found: TrainingRuns) -> Figure:
    """A column per d: the loss with the spread of the seeds, and below it the statistics that explain it."""
    rows = (
        ("loss", "loss (nats per character)", "log"),
        ("logit_variance", "variance of the logits", "log"),
        ("entropy", "entropy / log(keys seen)", "linear"),
        ("saturated", "saturated queries", "linear"),
    )
    dims = found.head_dims
    seeds = len(found.of("dot", dims[0]))
    spread = f"; {seeds} seeds: thick their mean, thin each" if seeds > 1 else ""
    figure = new_figure((3.1 * len(dims) + 0.8, 7.6))
    grid = figure.subplots(len(rows), len(dims), sharex=True, sharey="row", squeeze=False)
    for (name, title, scale), line in zip(rows, grid, strict=True):
        for axis, dim in zip(line, dims, strict=True):
            for score in COLOURS:
                _draw_curve(axis, found, score, dim, name)
            axis.set_yscale(scale)
            first, last = axis is line[0], name == rows[-1][0]
            head = f"d = {dim}: {found.gap(dim).value:+.3f} without the scale" if name == "loss" else ""
            _style(axis, head, "step" if last else "", title if first else "")
        if scale == "linear":
            line[0].set_ylim(0, 1)
        if name == "loss":
            _plain_ticks(line[0])
    _legend(grid[0][-1], loc="upper right")
    figure.suptitle("The same transformer with and without 1/√d" + spread,
                    fontsize=11, color=INK)  # fmt: skip
    return figure


def _draw_curve(axis: Axes, found: TrainingRuns, score: str, dim: int, name: str) -> None:
    steps, values = found.curves(score, dim, name)
    if name == "loss":
        values = _smooth(values)
    if len(values) > 1:
        axis.plot(steps, values.T, color=COLOURS[score], linewidth=0.6, alpha=0.5)
        axis.fill_between(steps, values.min(0), values.max(0), color=COLOURS[score], alpha=_SPREAD, linewidth=0)
    axis.plot(steps, values.mean(0), color=COLOURS[score], linewidth=1.6, label=NAMES[score])


def _smooth(values: Any) -> Any:
    """The mean of each value and its neighbours: one batch's loss says little."""
    if values.shape[1] < 5:
        return values
    padded = np.pad(values, ((0, 0), (1, 1)), mode="edge")
    return (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3


def _plain_ticks(axis: Axes) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axis.set_yticks([1.5, 2, 2.5, 3, 4, 5])
    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(NullFormatter())
