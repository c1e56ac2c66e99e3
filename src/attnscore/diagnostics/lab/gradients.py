"""Gradient through the softmax against the dimension d: the norm of its Jacobian, and of a real gradient.

Requirements:
- the statistics come from `attend`; the gradient of the scores is `attend_vjp`'s gradient of a bias;
- queries, keys, values and incoming gradients are the same for both scores;
- norms are quartiles over the queries, because a saturated softmax has most norms near 0 and a few that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.base.arguments import check_choice
from attnscore.diagnostics.lab.experiment import NAMES, SCORES, Array, Check, Result, Row, check_sizes
from attnscore.diagnostics.lab.panels import COLOURS, DIMENSION, SPREAD, powers_of_two
from attnscore.errors import ArgumentError, message
from attnscore.plotting.drawing import legend, new_figure, style_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class FlowPoint:
    """Gradient of one score at one dimension; norms are quartiles over the queries: 25, 50 and 75 %."""

    score: str
    dim: int
    jacobian_norm: tuple[float, float, float]
    gradient_norm: tuple[float, float, float]
    """Norm of the gradient of a query's scores; the incoming one has coordinates of variance 1."""
    jacobian_trace: float
    saturated: float
    """Share of the queries with a weight of at least 0.99."""


@dataclass(frozen=True)
class GradientFlow(Result):
    """Result of `gradient_flow`."""

    points: tuple[FlowPoint, ...]
    keys: int

    def of(self, score: str) -> list[FlowPoint]:
        """Return the points of one score, by dimension; ArgumentError where there is none."""
        check_choice("score", score, SCORES)
        return [point for point in self.points if point.score == score]

    def to_rows(self) -> list[Row]:
        return [
            {
                "score": point.score,
                "d": point.dim,
                "Jacobian norm": point.jacobian_norm[1],
                "gradient norm": point.gradient_norm[1],
                "gradient norm, 1st quartile": point.gradient_norm[0],
                "gradient norm, 3rd quartile": point.gradient_norm[2],
                "Jacobian trace": point.jacobian_trace,
                "saturated rows": point.saturated,
            }
            for point in self.points
        ]

    def summary(self) -> list[Row]:
        names = ("d", "Jacobian norm", "gradient norm", "Jacobian trace")
        return [
            {"score": NAMES[row["score"]]}
            | {name: row[name] for name in names}
            | {"saturated queries": row["saturated rows"]}
            for row in self.to_rows()
        ]

    def sentence(self) -> str:
        dot, scaled = (self.of(score)[-1] for score in SCORES)
        return (
            f"At d = {dot.dim} the median query passes back a gradient of norm {dot.gradient_norm[1]:.2g} without the "
            f"scale, where {100 * dot.saturated:.0f} % of the queries attend to one key, and of "
            f"{scaled.gradient_norm[1]:.2g} with it."
        )

    def checks(self) -> tuple[Check, ...]:
        dot, scaled = ([point.gradient_norm[1] for point in self.of(score)] for score in SCORES)
        spread = max(scaled[1:]) / min(scaled[1:]) - 1
        dim = self.points[-1].dim
        return (
            Check(f"the median gradient at d = {dim}: unscaled over scaled", dot[-1] / scaled[-1], 0.1),
            Check("scaled: the median gradient is the same for every d, largest over least - 1", spread, 0.25),
        )

    def plot(self) -> Figure:
        """Draw Jacobian norm, gradient norm and saturated queries against d, with and without the scale."""
        title = f"Gradient through the softmax over {self.keys} keys: median and quartiles of the queries"
        figure = new_figure((9.2, 3.0), title=title)
        panels = figure.subplots(1, 3)
        for score, colour in COLOURS.items():
            line = self.of(score)
            dims = [point.dim for point in line]
            style = {"color": colour, "markersize": 4, "label": NAMES[score]}
            for axis, name in zip(panels, ("jacobian_norm", "gradient_norm"), strict=False):
                low, middle, high = np.array([getattr(point, name) for point in line]).T
                axis.plot(dims, middle, "o-", **style)
                axis.fill_between(dims, low, high, color=colour, alpha=SPREAD, linewidth=0)
                axis.set_yscale("log")
            panels[2].plot(dims, [100 * point.saturated for point in line], "o-", **style)
        titles = ("Softmax Jacobian", "Gradient of the scores", "Queries with a weight ≥ 0.99")
        units = ("Frobenius norm, of a query", "norm, of a query", "share of the queries, %")
        for axis, name, unit in zip(panels, titles, units, strict=True):
            powers_of_two(axis, dims)
            style_lines(axis, name, DIMENSION, unit)
        legend(panels[0], loc="lower left")
        return figure


def gradient_flow(
    dims: Sequence[int] = DIMS, *, keys: int = 64, queries: int = 512, value_dim: int = 16, seed: int = 0
) -> GradientFlow:
    """Measure the softmax Jacobian and the gradient of the scores, with and without 1/sqrt(d).

    Parameters
    ----------
    dims : whole numbers, two or more
    keys, queries, value_dim : sizes of the attention
    seed : of the draws

    Returns
    -------
    GradientFlow

    Raises
    ------
    ArgumentError
        Fewer than two dimensions, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = gradient_flow([4, 256], queries=64)
    >>> found.of("dot")[-1].saturated > found.of("scaled_dot")[-1].saturated
    True
    """
    check_sizes("dims", dims, least=2)
    check_sizes("keys, queries, value_dim", (keys, queries, value_dim))
    if keys < 2:
        raise ArgumentError(message("keys", "2 or more: the weight of one has no gradient", keys))
    rng = np.random.default_rng(seed)
    points = []
    for dim in dims:
        query, key = rng.standard_normal((queries, dim)), rng.standard_normal((keys, dim))
        value, incoming = rng.standard_normal((keys, value_dim)), rng.standard_normal((queries, value_dim))
        points += [_point(score, query, key, value, incoming) for score in SCORES]
    return GradientFlow(tuple(points), keys)


def _point(score: str, query: Array, key: Array, value: Array, incoming: Array) -> FlowPoint:
    """Measure one score; `incoming` is the gradient of the output."""
    zero_bias = np.zeros((len(query), len(key)))  # has the same gradient as the scores
    (_, stats), vjp = ats.attend_vjp(query, key, value, score=score, bias=zero_bias, return_stats=True)
    gradient = np.linalg.norm(np.asarray(vjp(incoming).bias), axis=-1)
    weights = ats.attention_weights(query, key, score=score)
    # Norm of the softmax Jacobian diag(p) - p p^T. Near 1, the largest weight p has 1 - p from the sum of the others,
    # which a difference would round away.
    *others, largest = np.moveaxis(np.sort(weights), -1, 0)
    rest = np.stack(others)
    squares = (rest**2).sum(0)
    of_others = (rest**2 * ((1 - rest) ** 2 + squares - rest**2 + largest**2)).sum(0)
    norm = np.sqrt(of_others + largest**2 * (rest.sum(0) ** 2 + squares))
    of_norm, of_gradient = map(tuple, np.percentile((norm, gradient), (25, 50, 75), axis=1).T.tolist())
    return FlowPoint(
        score,
        query.shape[1],
        of_norm,
        of_gradient,
        float(stats.jacobian_trace().mean()),
        float(stats.saturated().mean()),
    )
