"""Other scores beside the dot product: how their logits grow with d, and what bounds them.

What this module meets:
- queries and keys have independent coordinates of variance 1, parameters start with variance 1 / fan-in;
- each score is one row of a table, with the growth that its formula says;
- growth is the exponent b of variance ~ d^b, fitted over all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import attnscore as ats
from attnscore.diagnostics.finding import Array, Check, Estimate, Finding, Row, exponent, rounded
from attnscore.diagnostics.variance import check_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = (4, 16, 64, 256, 1024)
HIDDEN = 32


class Kind(NamedTuple):
    """A score made for a length, the exponent that its variance must have, and a bound of its logits."""

    make: Callable[[int, np.random.Generator], Any]
    grows: float
    bound: Callable[[Any], float]
    why: str


def _unbounded(score: Any) -> float:
    del score
    return math.inf


def _scale(score: ats.Cosine) -> float:
    return float(score.scale)


def _sum_of_weights(score: ats.Additive) -> float:
    return float(np.abs(score.w_v).sum())


def _additive(dim: int, rng: np.random.Generator) -> ats.Additive:
    w_q, w_k = rng.standard_normal((2, HIDDEN, dim)) / dim**0.5
    return ats.Additive(rng.standard_normal(HIDDEN) / HIDDEN**0.5, w_q, w_k)


def _bilinear(dim: int, rng: np.random.Generator) -> ats.Bilinear:
    return ats.Bilinear(rng.standard_normal((dim, dim)) / dim**0.5)


KINDS: dict[str, Kind] = {
    "dot": Kind(lambda d, rng: ats.Dot(), 1, _unbounded, "a sum of d products"),
    "scaled dot": Kind(lambda d, rng: ats.ScaledDot(), 0, _unbounded, "the same over √d"),
    "bilinear": Kind(_bilinear, 1, _unbounded, "a dot product with Wᵀq"),
    "Gaussian, σ = 1": Kind(lambda d, rng: ats.Gaussian(), 1, _unbounded, "|q - k|² is a sum of d squares"),
    "Gaussian, σ² = √d": Kind(lambda d, rng: ats.Gaussian(d**0.25), 0, _unbounded, "the same over √d"),
    "cosine": Kind(lambda d, rng: ats.Cosine(), -1, _scale, "a cosine; in high dimensions nearly 0"),
    "cosine, scale √d": Kind(lambda d, rng: ats.Cosine(d**0.5), 0, _scale, "nearly the scaled dot product"),
    "additive": Kind(_additive, 0, _sum_of_weights, "|tanh| is at most 1, so at most Σ|w_v|"),
}


@dataclass(frozen=True)
class ScorePoint:
    """The logits of one score at one length: variance within a row, the largest, the bound, largest weights."""

    score: str
    dim: int
    variance: float
    largest: float
    bound: float
    max_weight: float


@dataclass(frozen=True)
class ScoreGrowth(Finding):
    """What `score_growth` found."""

    points: tuple[ScorePoint, ...]
    keys: int

    def of(self, score: str) -> list[ScorePoint]:
        """The points of one score, in the order of the lengths."""
        return [point for point in self.points if point.score == score]

    def exponent(self, score: str) -> Estimate:
        """The fitted b of variance ~ d^b."""
        line = self.of(score)
        return exponent([point.dim for point in line], [point.variance for point in line])

    def to_rows(self) -> list[Row]:
        return [
            {
                "score": point.score,
                "why": KINDS[point.score].why,
                "d": point.dim,
                "variance": point.variance,
                "largest logit": point.largest,
                "bound": point.bound,
                "largest weight": point.max_weight,
            }
            for point in self.points
        ]

    def summary(self) -> list[Row]:
        """A row for each score, with its numbers at the largest length."""
        return [
            {
                "score": name,
                "d^b, b =": f"{rounded(self.exponent(name).value)}",
                f"largest, d = {last.dim}": last.largest,
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
        """The scores of one growth, each with its fitted exponent."""
        exponents = {name: rounded(self.exponent(name).value) for name, kind in KINDS.items() if kind.grows == grows}
        return ", ".join(f"{name} (d^{value})" for name, value in exponents.items())

    def checks(self) -> tuple[Check, ...]:
        grown = [
            Check(f"{name}: variance ~ d^{kind.grows:g}", abs(self.exponent(name).value - kind.grows), 0.15)
            for name, kind in KINDS.items()
        ]
        over = max(point.largest / point.bound for point in self.points)
        return (*grown, Check("no logit is beyond its bound", over, 1 + 1e-12))

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import growth_lines

        return growth_lines(self)


def score_growth(dims: Sequence[int] = DIMS, *, keys: int = 128, repeats: int = 8, seed: int = 0) -> ScoreGrowth:
    """Measure how the logits of every score grow with the length d.

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
        Fewer than two lengths, or numbers that are not positive and whole.

    Examples
    --------
    >>> found = score_growth([16, 64], keys=32, repeats=2)
    >>> max(point.largest for point in found.of("cosine")) <= 1
    True
    """
    check_sizes("dims", dims, least=2)
    check_sizes("keys, repeats", (keys, repeats))
    rng = np.random.default_rng(seed)
    points = []
    for dim in dims:
        query, key = rng.standard_normal((2, repeats, keys, dim))
        points += [_point(name, kind, query, key, rng) for name, kind in KINDS.items()]
    return ScoreGrowth(tuple(points), keys)


def _point(name: str, kind: Kind, query: Array, key: Array, rng: np.random.Generator) -> ScorePoint:
    variances, heaviest, largest, bound = [], [], 0.0, math.inf
    for one_query, one_key in zip(query, key, strict=True):
        score = kind.make(query.shape[-1], rng)
        _, stats = ats.attend(one_query, one_key, one_key, score=score, return_stats=("var_score", "max_weight"))
        logits = float(np.abs(ats.attention_scores(one_query, one_key, score=score)).max())
        if logits / kind.bound(score) >= largest / bound:
            largest, bound = logits, kind.bound(score)
        largest = max(largest, logits) if math.isinf(bound) else largest
        variances.append(float(stats.var_score.mean()))
        heaviest.append(float(stats.max_weight.mean()))
    return ScorePoint(name, query.shape[-1], float(np.mean(variances)), largest, bound, float(np.mean(heaviest)))
