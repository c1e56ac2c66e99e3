"""The variance of q.k against the length d of q and k: Var = d Var(q) Var(k), and what dividing by sqrt(d) makes of it.

What this module meets:
- the scores are the library's; each pair (q, k) is drawn anew, so that the samples are independent;
- the law is stated for each kind of coordinates before it is measured: with means the cross terms are in it;
- coordinates that depend on each other show where the law ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.core.arguments import is_whole, shown
from attnscore.diagnostics.finding import NAMES, SCORES, Array, Check, Estimate, Finding, Row, estimate, exponent
from attnscore.errors import ArgumentError, message

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# What a fitted exponent may differ by from that of the law.
ALLOWED_EXPONENT = 0.03
MEAN_ONE_AT_64 = 192.0


@dataclass(frozen=True)
class Coordinates:
    """How the coordinates of queries and keys are drawn: normal, independent unless `alike`.

    Attributes
    ----------
    name : what tables and pictures call them
    mean : of every coordinate of both
    query_variance, key_variance : of every coordinate
    alike : every vector repeats one number d times
    """

    name: str
    mean: float = 0.0
    query_variance: float = 1.0
    key_variance: float = 1.0
    alike: bool = False

    def law(self, dim: int) -> float:
        """Var(q.k): d (Vq Vk + mean^2 (Vq + Vk)) for independent coordinates; d times that when they are alike.

        >>> Coordinates("mean 1", mean=1.0).law(64)
        192.0
        """
        one = self.query_variance * self.key_variance + self.mean**2 * (self.query_variance + self.key_variance)
        return dim**2 * one if self.alike else dim * one

    def draw(self, rng: np.random.Generator, pairs: int, dim: int) -> tuple[Array, Array]:
        """Queries and keys, each (pair, 1, dim)."""
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
    """The variance of the scores of one kind of vectors of one length."""

    kind: str
    score: str
    dim: int
    measured: Estimate
    law: float


@dataclass(frozen=True)
class LogitVariance(Finding):
    """What `logit_variance` found."""

    points: tuple[VariancePoint, ...]
    kinds: tuple[Coordinates, ...]
    pairs: int

    def of(self, kind: str, score: str) -> list[VariancePoint]:
        """The points of one line, in the order of the lengths."""
        return [point for point in self.points if (point.kind, point.score) == (kind, score)]

    def exponent(self, kind: str, score: str) -> Estimate:
        """The fitted b of variance ~ d^b."""
        line = self.of(kind, score)
        return exponent([point.dim for point in line], [point.measured.value for point in line])

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
        """A row for each line: its exponent, and the variance at the length that comes nearest to 64."""
        found = []
        for kind in self.kinds:
            for score in SCORES:
                point = min(self.of(kind.name, score), key=lambda one: abs(one.dim - 64))
                found.append(
                    {
                        "coordinates": kind.name,
                        "score": NAMES[score],
                        "d^b, b =": str(self.exponent(kind.name, score)),
                        f"at d = {point.dim}": str(point.measured),
                        "law": point.law,
                    }
                )
        return found

    def sentence(self) -> str:
        plain = self.kinds[0].name
        unscaled, scaled = (self.exponent(plain, score) for score in SCORES)
        return (
            f"For independent coordinates of {plain} the variance of q·k grows as d^b, b = {unscaled.value:.3f} ± "
            f"{unscaled.margin:.3f} (law: 1); after dividing by √d b = {scaled.value:.3f} ± {scaled.margin:.3f} (0)."
        )

    def checks(self) -> tuple[Check, ...]:
        found = []
        for kind in self.kinds:
            for score, fall in zip(SCORES, (0, 1), strict=True):
                expected = (2 if kind.alike else 1) - fall
                difference = abs(self.exponent(kind.name, score).value - expected)
                found.append(Check(f"{score}, {kind.name}: variance ~ d^{expected}", difference, ALLOWED_EXPONENT))
        for point in self.points:
            if point.law == MEAN_ONE_AT_64 and point.score == "dot" and point.dim == 64:
                off = abs(point.measured.value / MEAN_ONE_AT_64 - 1)
                found.append(Check("dot, mean 1, d = 64: variance 192 (relative difference)", off, 0.05))
        # Measured over law, mean of all lengths: one length alone has the noise of its sample.
        ratios = [point.measured.value / point.law for point in self.points]
        return (*found, Check("measured variance over the law's, mean", abs(float(np.mean(ratios)) - 1), 0.02))

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import variance_lines

        return variance_lines(self)


def logit_variance(
    dims: Sequence[int] = DIMS,
    *,
    kinds: Sequence[Coordinates] = KINDS,
    pairs: int = 1024,
    repeats: int = 24,
    seed: int = 0,
) -> LogitVariance:
    """Measure the variance of q.k, and of q.k / sqrt(d), against the length d.

    Parameters
    ----------
    dims : whole numbers, two or more
    kinds : how coordinates are drawn
    pairs : pairs of a query and a key in each sample
    repeats : samples; the confidence band is that of their mean
    seed : of the draws

    Returns
    -------
    LogitVariance

    Raises
    ------
    ArgumentError
        Fewer than two lengths, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = logit_variance([4, 16, 64], pairs=512, repeats=8)
    >>> round(found.exponent("mean 0, variance 1", "dot").value, 1)
    1.0
    """
    check_sizes("dims", dims, least=2)
    check_sizes("pairs, repeats", (pairs, repeats))
    rng = np.random.default_rng(seed)
    points = []
    for kind in kinds:
        for dim in dims:
            samples: dict[str, list[float]] = {score: [] for score in SCORES}
            for _ in range(repeats):
                query, key = kind.draw(rng, pairs, dim)
                for score, found in samples.items():
                    found.append(float(ats.attention_scores(query, key, score=score).var(ddof=1)))
            points += [
                VariancePoint(kind.name, score, dim, estimate(found), kind.law(dim) / (dim if score != "dot" else 1))
                for score, found in samples.items()
            ]
    return LogitVariance(tuple(points), tuple(kinds), pairs * repeats)


def check_sizes(name: str, sizes: Sequence[int], *, least: int = 1) -> None:
    """Raise unless these are positive whole numbers, `least` of them or more."""
    if len(sizes) < least or not all(is_whole(size) and size >= 1 for size in sizes):
        many = f"{least} or more of them" if least > 1 else "above 0"
        raise ArgumentError(message(name, f"positive whole numbers, {many}", shown(sizes)))
