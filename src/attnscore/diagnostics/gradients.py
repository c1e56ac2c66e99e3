"""What comes back through the softmax, against the length d: the norm of its Jacobian, and of a real gradient.

What this module meets:
- the statistics are those of `attend`, the gradient is that of `attend_vjp`: of the scores, by the gradient of a bias;
- the same queries, keys, values and incoming gradients for both scores;
- norms are given as quartiles over the rows: a saturated softmax has most rows near 0 and a few that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.diagnostics.finding import NAMES, SCORES, Array, Check, Finding, Row
from attnscore.diagnostics.variance import check_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (1, 4, 16, 64, 256, 1024)
_QUARTILES = (25, 50, 75)


@dataclass(frozen=True)
class FlowPoint:
    """One score at one length; quartiles over the rows: 25, 50 and 75 %."""

    score: str
    dim: int
    jacobian_norm: tuple[float, float, float]
    gradient_norm: tuple[float, float, float]
    """Of the gradient that reaches the scores of a row; the incoming one has coordinates of variance 1."""
    jacobian_trace: float
    saturated: float
    """Share of the rows with a weight of at least 0.99."""


@dataclass(frozen=True)
class GradientFlow(Finding):
    """What `gradient_flow` found."""

    points: tuple[FlowPoint, ...]
    keys: int

    def of(self, score: str) -> list[FlowPoint]:
        """The points of one score, in the order of the lengths."""
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
        rows = [row | {"score": NAMES[row["score"]]} for row in self.to_rows()]
        return [{name: value for name, value in row.items() if "quartile" not in name} for row in rows]

    def sentence(self) -> str:
        dot, scaled = (self.of(score)[-1] for score in SCORES)
        return (
            f"At d = {dot.dim} the median row passes back a gradient of norm {dot.gradient_norm[1]:.2g} without the "
            f"scale, where {100 * dot.saturated:.0f} % of the rows look at one key, and of "
            f"{scaled.gradient_norm[1]:.2g} with it."
        )

    def checks(self) -> tuple[Check, ...]:
        dot, scaled = (self.of(score) for score in SCORES)
        kept = [point.gradient_norm[1] for point in scaled[1:]]
        return (
            Check(
                f"the median gradient at d = {dot[-1].dim}: unscaled over scaled",
                dot[-1].gradient_norm[1] / scaled[-1].gradient_norm[1],
                0.1,
            ),
            Check("scaled: the median gradient is the same for every d, largest over least - 1", _spread(kept), 0.25),
        )

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import flow_lines

        return flow_lines(self)


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1


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
        Fewer than two lengths, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = gradient_flow([4, 256], queries=64)
    >>> found.of("dot")[-1].saturated > found.of("scaled_dot")[-1].saturated
    True
    """
    check_sizes("dims", dims, least=2)
    check_sizes("keys, queries, value_dim", (keys, queries, value_dim))
    rng = np.random.default_rng(seed)
    points = []
    for dim in dims:
        query, key = rng.standard_normal((queries, dim)), rng.standard_normal((keys, dim))
        value, incoming = rng.standard_normal((keys, value_dim)), rng.standard_normal((queries, value_dim))
        points += [_point(score, query, key, value, incoming) for score in SCORES]
    return GradientFlow(tuple(points), keys)


def _point(score: str, query: Array, key: Array, value: Array, incoming: Array) -> FlowPoint:
    nothing = np.zeros((len(query), len(key)))  # its gradient is that of the scores
    (_, stats), pullback = ats.attend_vjp(query, key, value, score=score, bias=nothing, return_stats=True)
    gradient = np.linalg.norm(np.asarray(pullback(incoming).bias), axis=-1)
    weights = ats.attention_weights(query, key, score=score)
    squares, cubes = (weights**2).sum(-1), (weights**3).sum(-1)
    # Squared norm of diag(s) - s s^T; where all of a row is on one key, rounding makes it negative.
    norm = np.sqrt(np.maximum(squares - 2 * cubes + squares**2, 0.0))
    return FlowPoint(
        score,
        query.shape[1],
        _quartiles(norm),
        _quartiles(gradient),
        float(stats.jacobian_trace().mean()),
        float(stats.saturated().mean()),
    )


def _quartiles(rows: Array) -> tuple[float, float, float]:
    low, middle, high = np.percentile(rows, _QUARTILES)
    return float(low), float(middle), float(high)
