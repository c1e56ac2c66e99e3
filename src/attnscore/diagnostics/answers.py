"""Questions that a textbook leaves to its readers, answered with numbers.

What this module meets:
- is the sum of q + k a score? The query cancels, in the weights and in the gradient;
- other keys in the toy example: do dot product and additive attention still agree?
- a score for queries and keys of different lengths from matrix products alone: q . W k;
- additive attention is a network with one hidden layer on [q; k]: equal, computed both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.diagnostics.finding import Array, Check, Finding, Row
from attnscore.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class SumScore(Finding):
    """What `sum_ignores_the_query` found: weights (query, key) under the sum and under the dot product."""

    weights: Array
    dot_weights: Array
    query_gradient: float
    """Largest absolute gradient of the queries under the sum."""
    dot_gradient: float

    @property
    def spread(self) -> float:
        """Largest difference between two queries' weights for the same key."""
        return float(np.ptp(self.weights, axis=0).max())

    def to_rows(self) -> list[Row]:
        return [
            {"score": name, "query": query, "key": key, "weight": float(weight)}
            for name, weights in (("sum", self.weights), ("dot", self.dot_weights))
            for (query, key), weight in np.ndenumerate(weights)
        ]

    def summary(self) -> list[Row]:
        return []

    def sentence(self) -> str:
        return (
            f"Under sum(q + k) every query gets the same weights (they differ by {self.spread:.1g}), and the gradient "
            f"of the queries is {self.query_gradient:.1g} (dot: {self.dot_gradient:.2g}): the query cancels in the "
            "softmax."
        )

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("sum: every query gets the same weights", self.spread, 1e-12),
            Check("sum: no gradient reaches the queries", self.query_gradient, 1e-12),
        )

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import sum_maps

        return sum_maps(self)


def sum_ignores_the_query(queries: int = 6, keys: int = 8, dim: int = 4, seed: int = 0) -> SumScore:
    """Weights and gradients under the score sum(q + k), beside the dot product's.

    Examples
    --------
    >>> sum_ignores_the_query().spread < 1e-12
    True
    """
    rng = np.random.default_rng(seed)
    query, key, incoming = (rng.standard_normal((length, dim)) for length in (queries, keys, queries))
    weights, gradients = [], []
    for score in ("sum", "dot"):
        weights.append(ats.attention_weights(query, key, score=score))
        _, pullback = ats.attend_vjp(query, key, key, score=score)
        gradients.append(float(np.abs(pullback(incoming).query).max()))
    return SumScore(*weights, *gradients)


@dataclass(frozen=True)
class OtherKeys(Finding):
    """What `other_keys` found.

    Attributes
    ----------
    noise : how far the keys are from all alike: the standard deviation of what is added to keys of ones
    differences : for each, the mean over draws of the largest difference between the two outputs
    low, high : its 5 % and 95 % quantiles
    """

    noise: tuple[float, ...]
    differences: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def to_rows(self) -> list[Row]:
        return [
            {"noise in the keys": noise, "difference": mean, "5 %": low, "95 %": high}
            for noise, mean, low, high in zip(self.noise, self.differences, self.low, self.high, strict=True)
        ]

    def sentence(self) -> str:
        return (
            f"Dot product and additive attention agree in the toy example because its keys are all alike (difference "
            f"{self.differences[0]:.1g}); with noise of {self.noise[-1]:g} in the keys their outputs, between 0 and "
            f"23, differ by {self.differences[-1]:.2g} on average."
        )

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("keys all alike: dot and additive agree", self.differences[0], 1e-12),
            Check("other keys: they differ by 0.1 or more (what lacks)", max(0.0, 0.1 - self.differences[-1]), 0.0),
        )

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import toy_lines

        return toy_lines(self)


def other_keys(
    noise: Sequence[float] = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), draws: int = 64, seed: int = 0
) -> OtherKeys:
    """The textbook's toy example with keys less and less alike: 10 keys of which 2 and 6 are valid, values arange(40).

    Queries are (2, 1, 2) for the dot product and (2, 1, 20) for additive attention with 8 hidden units; the first
    entry of `noise` should be 0, the textbook's own case.

    Examples
    --------
    >>> found = other_keys([0.0, 1.0], draws=8)
    >>> found.differences[0] < 1e-12, found.differences[1] > 0.1
    (True, True)
    """
    rng = np.random.default_rng(seed)
    values = np.repeat(np.arange(40.0).reshape(1, 10, 4), 2, axis=0)
    found = np.zeros((len(noise), draws))
    for draw in range(draws):
        other, query, long_query = (rng.standard_normal(shape) for shape in ((2, 10, 2), (2, 1, 2), (2, 1, 20)))
        w_v, w_q, w_k = (rng.standard_normal(shape) for shape in ((8,), (8, 20), (8, 2)))
        additive = ats.Additive(w_v, w_q / 20**0.5, w_k / 2**0.5)
        for place, size in enumerate(noise):
            keys = 1 + size * other
            one = ats.attend(query, keys, values, valid_lens=[2, 6])
            two = ats.attend(long_query, keys, values, score=additive, valid_lens=[2, 6])
            found[place, draw] = np.abs(one - two).max()
    low, high = np.percentile(found, (5, 95), axis=1)
    as_floats = (tuple(float(x) for x in row) for row in (noise, found.mean(1), low, high))
    return OtherKeys(*as_floats)


@dataclass(frozen=True, eq=False)
class DifferentLengths(Finding):
    """What `different_lengths` found: the same weights (query, key) in three ways, and what the dot product says."""

    query_dim: int
    key_dim: int
    by_products: Array
    by_bilinear: Array
    by_projection: Array
    refusal: str

    @property
    def difference(self) -> float:
        """Largest difference between the three."""
        others = (self.by_bilinear, self.by_projection)
        return max(float(np.abs(other - self.by_products).max()) for other in others)

    def to_rows(self) -> list[Row]:
        return [
            {"query": query, "key": key, "weight": float(weight), "Bilinear": float(self.by_bilinear[query, key])}
            for (query, key), weight in np.ndenumerate(self.by_products)
        ]

    def summary(self) -> list[Row]:
        return []

    def sentence(self) -> str:
        return (
            f"Queries of length {self.query_dim} and keys of length {self.key_dim}: q·Wk is two matrix products, Q W "
            f"and (Q W) Kᵀ. Bilinear(W) and the dot product of projected queries give the same weights (they differ by "
            f"{self.difference:.1g})."
        )

    def checks(self) -> tuple[Check, ...]:
        return (Check("different lengths: matrix products are Bilinear", self.difference, 1e-12),)

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import lengths_maps

        return lengths_maps(self)


def different_lengths(
    query_dim: int = 20, key_dim: int = 2, queries: int = 5, keys: int = 8, seed: int = 0
) -> DifferentLengths:
    """A score for queries and keys of different lengths from matrix products alone: q . W k.

    Examples
    --------
    >>> different_lengths().difference < 1e-12
    True
    """
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((queries, query_dim)), rng.standard_normal((keys, key_dim))
    matrix = rng.standard_normal((query_dim, key_dim)) / (query_dim * key_dim) ** 0.5
    refusal = ""
    try:
        ats.attention_weights(query, key, score="dot")
    except ShapeError as error:
        refusal = str(error)
    return DifferentLengths(
        query_dim,
        key_dim,
        ats.masked_softmax(query @ matrix @ key.T),
        ats.attention_weights(query, key, score=ats.Bilinear(matrix)),
        ats.attention_weights(query @ matrix, key, score="dot"),
        refusal,
    )


@dataclass(frozen=True, eq=False)
class AdditiveAsNetwork(Finding):
    """What `additive_as_network` found: the same scores (query, key), of the network and of the library."""

    by_network: Array
    by_additive: Array
    hidden: int

    @property
    def difference(self) -> float:
        """Largest absolute difference."""
        return float(np.abs(self.by_network - self.by_additive).max())

    def to_rows(self) -> list[Row]:
        return [
            {"query": query, "key": key, "network": float(score), "Additive": float(self.by_additive[query, key])}
            for (query, key), score in np.ndenumerate(self.by_network)
        ]

    def summary(self) -> list[Row]:
        return []

    def sentence(self) -> str:
        return (
            f"A network with one hidden layer of {self.hidden} units on [q; k], tanh and no biases, is additive "
            f"attention: the scores differ by {self.difference:.1g}. Its first matrix is [W_q W_k]."
        )

    def checks(self) -> tuple[Check, ...]:
        return (Check("additive attention is a network on [q; k]", self.difference, 1e-12),)

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import network_scatter

        return network_scatter(self)


def additive_as_network(
    query_dim: int = 20, key_dim: int = 2, hidden: int = 8, queries: int = 24, keys: int = 16, seed: int = 0
) -> AdditiveAsNetwork:
    """w_v . tanh([W_q W_k] [q; k]) for every pair, beside the additive score.

    Examples
    --------
    >>> additive_as_network().difference < 1e-12
    True
    """
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((queries, query_dim)), rng.standard_normal((keys, key_dim))
    w_v = rng.standard_normal(hidden)
    first_layer = rng.standard_normal((hidden, query_dim + key_dim)) / query_dim**0.5
    pairs = np.concatenate([np.repeat(query[:, None], keys, axis=1), np.repeat(key[None], queries, axis=0)], axis=-1)
    network = np.tanh(pairs @ first_layer.T) @ w_v
    score = ats.Additive(w_v, first_layer[:, :query_dim], first_layer[:, query_dim:])
    return AdditiveAsNetwork(network, ats.attention_scores(query, key, score=score), hidden)
