"""Variance of q.k against the dimension d of q and k: Var = d Var(q) Var(k), before and after dividing by sqrt(d).

Requirements:
- the scores are the library's; each pair (q, k) is drawn anew, so that the samples are independent;
- the law is stated for each kind of coordinates before it is measured, with the cross terms that means bring;
- one kind has coordinates that depend on each other, for which dividing by sqrt(d) is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.base.arguments import check_choice
from attnscore.diagnostics.lab import experiment
from attnscore.diagnostics.lab.experiment import NAMES, SCORES, Array, Check, Estimate, Result, Row
from attnscore.diagnostics.lab.panels import COLOURS, DIMENSION, LAW, powers_of_two
from attnscore.errors import ArgumentError, message
from attnscore.plotting.drawing import legend, new_figure, style_lines, two_decimals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Allowed difference between a fitted exponent and the law's.
_ALLOWED_EXPONENT = 0.03
_MEAN_ONE_AT_64 = 192.0  # the law for mean 1 and variance 1 at d = 64


@dataclass(frozen=True)
class Coordinates:
    """Distribution of the coordinates of queries and keys: normal, independent unless `alike`.

    Attributes
    ----------
    name : in tables and pictures
    mean : of every coordinate of both
    query_variance, key_variance : of every coordinate
    alike : whether every vector repeats one number d times
    """

    name: str
    mean: float = 0.0
    query_variance: float = 1.0
    key_variance: float = 1.0
    alike: bool = False

    def law(self, dim: int) -> float:
        """Return Var(q.k): d (Vq Vk + mean^2 (Vq + Vk)) for independent coordinates; d times that when they are alike.

        >>> Coordinates("mean 1", mean=1.0).law(64)
        192.0
        """
        of_product = self.query_variance * self.key_variance + self.mean**2 * (self.query_variance + self.key_variance)
        return (dim**2 if self.alike else dim) * of_product

    def draw(self, rng: np.random.Generator, pairs: int, dim: int) -> tuple[Array, Array]:
        """Draw queries and keys, each (pair, 1, dim)."""
        shape = (pairs, 1, 1 if self.alike else dim)
        query, key = (
            self.mean + variance**0.5 * rng.standard_normal(shape)
            for variance in (self.query_variance, self.key_variance)
        )
        whole = (pairs, 1, dim)
        return np.broadcast_to(query, whole), np.broadcast_to(key, whole)


KINDS = (
    Coordinates("mean 0, variance 1"),
    Coordinates("mean 0, variances 4 and 1/2", query_variance=4.0, key_variance=0.5),
    Coordinates("mean 1, variance 1", mean=1.0),
    Coordinates("mean 0, all coordinates alike", alike=True),
)


@dataclass(frozen=True)
class VariancePoint:
    """Variance of the scores of one kind of vectors of one dimension."""

    kind: str
    score: str
    dim: int
    measured: Estimate
    law: float


@dataclass(frozen=True)
class LogitVariance(Result):
    """Result of `logit_variance`."""

    points: tuple[VariancePoint, ...]
    kinds: tuple[Coordinates, ...]

    def of(self, kind: str, score: str) -> list[VariancePoint]:
        """Return the points of one kind and score, by dimension; ArgumentError where there is none."""
        check_choice("kind", kind, [coordinates.name for coordinates in self.kinds])
        check_choice("score", score, SCORES)
        return [point for point in self.points if (point.kind, point.score) == (kind, score)]

    def exponent(self, kind: str, score: str) -> Estimate:
        """Fit the b of variance ~ d^b; the errors of `of`."""
        line = self.of(kind, score)
        return experiment.exponent([point.dim for point in line], [point.measured.value for point in line])

    def to_rows(self) -> list[Row]:
        return [
            {
                "coordinates": point.kind,
                "score": point.score,
                "d": point.dim,
                "variance": point.measured.value,
                "margin": point.measured.margin,
                "law": point.law,
            }
            for point in self.points
        ]

    def summary(self) -> list[Row]:
        """Return a row for each kind and score: its exponent, and the variance at the dimension nearest to 64."""
        return [
            {
                "coordinates": kind.name,
                "score": NAMES[score],
                "d^b, b =": str(self.exponent(kind.name, score)),
                f"at d = {point.dim}": str(point.measured),
                "law": point.law,
            }
            for kind in self.kinds
            for score in SCORES
            for point in [min(self.of(kind.name, score), key=lambda point: abs(point.dim - 64))]
        ]

    def sentence(self) -> str:
        plain = self.kinds[0].name
        unscaled, scaled = (self.exponent(plain, score) for score in SCORES)
        return (
            f"For independent coordinates of {plain} the variance of q·k grows as d^b, b = {unscaled.value:.3f} ± "
            f"{unscaled.margin:.3f} (law: 1); after dividing by √d b = {scaled.value:.3f} ± {scaled.margin:.3f} (0)."
        )

    def checks(self) -> tuple[Check, ...]:
        checks = []
        for kind in self.kinds:
            for score, fall in zip(SCORES, (0, 1), strict=True):
                expected = (2 if kind.alike else 1) - fall
                difference = abs(self.exponent(kind.name, score).value - expected)
                checks.append(Check(f"{score}, {kind.name}: variance ~ d^{expected}", difference, _ALLOWED_EXPONENT))
        for point in self.points:
            if point.law == _MEAN_ONE_AT_64 and point.score == "dot" and point.dim == 64:
                difference = abs(point.measured.value / _MEAN_ONE_AT_64 - 1)
                checks.append(Check("dot, mean 1, d = 64: variance 192 (relative difference)", difference, 0.05))
        # The mean over all dimensions, because one dimension alone has the noise of its sample.
        ratios = [point.measured.value / point.law for point in self.points]
        return (*checks, Check("measured variance over the law's, mean", abs(float(np.mean(ratios)) - 1), 0.02))

    def plot(self) -> Figure:
        """Draw the variance against d for each kind of coordinates, with and without the scale, and each law."""
        rows = -(-len(self.kinds) // 2)
        title = "Variance of q·k, measured (95 % confidence) and by law (dashed)"
        figure = new_figure((9.0, 2.7 * rows + 0.3), title=title)
        panels = figure.subplots(rows, 2, sharey=True, squeeze=False)
        for axis in panels.flat[len(self.kinds) :]:
            axis.set_axis_off()
        for axis, kind in zip(panels.flat, self.kinds, strict=False):
            for score, colour in COLOURS.items():
                line = self.of(kind.name, score)
                dims = [point.dim for point in line]
                values, margins = zip(*(point.measured for point in line), strict=True)
                name = f"{NAMES[score]}: d^{two_decimals(self.exponent(kind.name, score).value)}"
                style = {"markersize": 3.5, "elinewidth": 1, "capsize": 2}
                axis.errorbar(dims, values, yerr=margins, fmt="o", color=colour, label=name, **style)
                axis.plot(dims, [point.law for point in line], "--", color=LAW, linewidth=1, zorder=1)
            axis.set_yscale("log", base=10)
            powers_of_two(axis, dims)
            style_lines(axis, kind.name, DIMENSION, "variance of the scores" if axis in panels[:, 0] else "")
            legend(axis, loc="upper left")
        return figure


def logit_variance(
    dims: Sequence[int] = DIMS,
    *,
    kinds: Sequence[Coordinates] = KINDS,
    pairs: int = 1024,
    repeats: int = 24,
    seed: int = 0,
) -> LogitVariance:
    """Measure the variance of q.k, and of q.k / sqrt(d), against the dimension d.

    Parameters
    ----------
    dims : whole numbers, two or more
    kinds : distributions of the coordinates
    pairs : pairs of a query and a key in each sample
    repeats : samples; results have the confidence interval of their mean
    seed : of the draws

    Returns
    -------
    LogitVariance

    Raises
    ------
    ArgumentError
        Fewer than two dimensions, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = logit_variance([4, 16, 64], pairs=512, repeats=8)
    >>> round(found.exponent("mean 0, variance 1", "dot").value, 1)
    1.0
    """
    experiment.check_sizes("dims", dims, least=2)
    experiment.check_sizes("pairs, repeats", (pairs, repeats))
    if pairs < 2:
        raise ArgumentError(message("pairs", "2 or more: the score of one has no variance", pairs))
    rng = np.random.default_rng(seed)
    points = []
    for kind in kinds:
        for dim in dims:
            samples: dict[str, list[float]] = {score: [] for score in SCORES}
            for _ in range(repeats):
                query, key = kind.draw(rng, pairs, dim)
                for score, variances in samples.items():
                    variances.append(float(ats.attention_scores(query, key, score=score).var(ddof=1)))
            for score, variances in samples.items():
                law = kind.law(dim) / (dim if score != "dot" else 1)
                points.append(VariancePoint(kind.name, score, dim, experiment.estimate(variances), law))
    return LogitVariance(tuple(points), tuple(kinds))
