"""Growth of the logits of every score with the dimension d, and their bounds.

Requirements:
- queries and keys have independent coordinates of variance 1, parameters start with variance 1 / fan-in;
- each score is one row of a table, with the growth that its formula predicts;
- growth is the exponent b of variance ~ d^b, fitted over all dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import attnscore as ats
from attnscore.base.arguments import check_choice
from attnscore.diagnostics.lab.experiment import Array, Check, Estimate, Result, Row, check_sizes, exponent
from attnscore.diagnostics.lab.panels import DIMENSION, powers_of_two
from attnscore.errors import ArgumentError, message
from attnscore.plotting.drawing import legend, new_figure, style_lines, two_decimals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (4, 16, 64, 256, 1024)
HIDDEN = 32


class Kind(NamedTuple):
    """Score made for a dimension, the exponent that its variance must have, and the bound of its logits."""

    make: Callable[[int, np.random.Generator], Any]
    grows: float
    why: str
    bound: Callable[[Any], float] = lambda score: math.inf


def _additive(dim: int, rng: np.random.Generator) -> ats.Additive:
    w_q, w_k = rng.standard_normal((2, HIDDEN, dim)) / dim**0.5
    return ats.Additive(rng.standard_normal(HIDDEN) / HIDDEN**0.5, w_q, w_k)


_SCALE = attrgetter("scale")
KINDS: dict[str, Kind] = {
    "dot": Kind(lambda d, rng: ats.Dot(), 1, "a sum of d products"),
    "scaled dot": Kind(lambda d, rng: ats.ScaledDot(), 0, "the same over √d"),
    "bilinear": Kind(lambda d, rng: ats.Bilinear(rng.standard_normal((d, d)) / d**0.5), 1, "a dot product with Wᵀq"),
    "Gaussian, σ = 1": Kind(lambda d, rng: ats.Gaussian(), 1, "|q - k|² is a sum of d squares"),
    "Gaussian, σ² = √d": Kind(lambda d, rng: ats.Gaussian(d**0.25), 0, "the same over √d"),
    "cosine": Kind(lambda d, rng: ats.Cosine(), -1, "a cosine; in high dimensions nearly 0", _SCALE),
    "cosine, scale √d": Kind(lambda d, rng: ats.Cosine(d**0.5), 0, "nearly the scaled dot product", _SCALE),
    "additive": Kind(_additive, 0, "|tanh| is at most 1, so at most Σ|w_v|", lambda score: np.abs(score.w_v).sum()),
}


@dataclass(frozen=True)
class ScorePoint:
    """Logits of one score at one dimension: variance over a query's keys, largest |logit|, bound, largest weight."""

    score: str
    dim: int
    variance: float
    largest: float
    bound: float
    max_weight: float


@dataclass(frozen=True)
class ScoreGrowth(Result):
    """Result of `score_growth`."""

    points: tuple[ScorePoint, ...]
    keys: int

    def of(self, score: str) -> list[ScorePoint]:
        """Return the points of one score, by dimension; ArgumentError where there is none."""
        check_choice("score", score, tuple(KINDS))
        return [point for point in self.points if point.score == score]

    def exponent(self, score: str) -> Estimate:
        """Fit the b of variance ~ d^b; the errors of `of`."""
        line = self.of(score)
        return exponent([point.dim for point in line], [point.variance for point in line])

    def to_rows(self) -> list[Row]:
        return [
            {
                "score": point.score,
                "why": KINDS[point.score].why,
                "d": point.dim,
                "variance": point.variance,
                "largest |logit|": point.largest,
                "bound": point.bound,
                "largest weight": point.max_weight,
            }
            for point in self.points
        ]

    def summary(self) -> list[Row]:
        """Return a row for each score, with its numbers at the largest dimension."""
        return [
            {
                "score": name,
                "d^b, b =": two_decimals(self.exponent(name).value),
                f"largest |logit|, d = {last.dim}": last.largest,
                "bound": last.bound,
                "largest weight": last.max_weight,
            }
            for name in KINDS
            for last in self.of(name)[-1:]
        ]

    def sentence(self) -> str:
        return (
            f"The variance of the logits grows with d for {self._those(1)}; it does not for {self._those(0)}; it falls "
            f"for {self._those(-1)}. Additive and cosine logits are bounded whatever d is."
        )

    def _those(self, grows: float) -> str:
        """Return the scores of one growth, each with its fitted exponent, as text."""
        names = (name for name, kind in KINDS.items() if kind.grows == grows)
        return ", ".join(f"{name} (d^{two_decimals(self.exponent(name).value)})" for name in names)

    def checks(self) -> tuple[Check, ...]:
        grown = [
            Check(f"{name}: variance ~ d^{kind.grows:g}", abs(self.exponent(name).value - kind.grows), 0.15)
            for name, kind in KINDS.items()
        ]
        over = max(point.largest / point.bound for point in self.points)
        return (*grown, Check("no logit is beyond its bound", over, 1 + 1e-12))

    def plot(self) -> Figure:
        """Draw the variance of the logits, and the largest weight, against d: one line per score."""
        from matplotlib import colormaps

        figure = new_figure((10.5, 3.6))
        left, right = figure.subplots(1, 2)
        for place, name in enumerate(dict.fromkeys(point.score for point in self.points)):
            line = self.of(name)
            dims = [point.dim for point in line]
            # Markers tell apart lines that cover each other.
            style = {"color": colormaps["tab10"](place % 10), "marker": "osD^vPX*"[place % 8], "markersize": 5}
            growth = f"{name}: d^{two_decimals(self.exponent(name).value)}"
            left.plot(dims, [point.variance for point in line], linewidth=1.3, label=growth, **style)
            right.plot(dims, [point.max_weight for point in line], linewidth=1.3, **style)
        left.set_yscale("log")
        right.set_ylim(0, 1.02)
        titles = "variance of a query's scores", f"largest weight of a query, of {self.keys} keys (mean)"
        for axis, title in zip((left, right), titles, strict=True):
            powers_of_two(axis, dims)
            style_lines(axis, title, DIMENSION)
        legend(figure, loc="outside right center")
        return figure


def score_growth(dims: Sequence[int] = DIMS, *, keys: int = 128, repeats: int = 8, seed: int = 0) -> ScoreGrowth:
    """Measure how the logits of every score grow with the dimension d.

    Parameters
    ----------
    dims : whole numbers, two or more
    keys : keys, and queries, of each attention
    repeats : draws of queries, keys and parameters
    seed : of the draws

    Returns
    -------
    ScoreGrowth

    Raises
    ------
    ArgumentError
        Fewer than two dimensions, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = score_growth([16, 64], keys=32, repeats=2)
    >>> max(point.largest for point in found.of("cosine")) <= 1
    True
    """
    check_sizes("dims", dims, least=2)
    check_sizes("keys, repeats", (keys, repeats))
    if keys < 2:
        raise ArgumentError(message("keys", "2 or more: the score of one has no variance", keys))
    rng = np.random.default_rng(seed)
    points = []
    for dim in dims:
        query, key = rng.standard_normal((2, repeats, keys, dim))
        points += [_point(name, kind, query, key, rng) for name, kind in KINDS.items()]
    return ScoreGrowth(tuple(points), keys)


def _point(name: str, kind: Kind, query: Array, key: Array, rng: np.random.Generator) -> ScorePoint:
    """Measure one score on each draw of queries and keys, with parameters of its own for each."""
    variances, heaviest, largest, bound = [], [], 0.0, math.inf
    for one_query, one_key in zip(query, key, strict=True):
        score = kind.make(query.shape[-1], rng)
        _, stats = ats.attend(one_query, one_key, one_key, score=score, return_stats=("var_score", "max_weight"))
        logits = float(np.abs(ats.attention_scores(one_query, one_key, score=score)).max())
        limit = float(kind.bound(score))
        # For a bounded score, the logit nearest to its bound.
        if logits >= largest if math.isinf(limit) else logits / limit >= largest / bound:
            largest, bound = logits, limit
        variances.append(float(stats.var_score.mean()))
        heaviest.append(float(stats.max_weight.mean()))
    return ScorePoint(name, query.shape[-1], float(np.mean(variances)), largest, bound, float(np.mean(heaviest)))
