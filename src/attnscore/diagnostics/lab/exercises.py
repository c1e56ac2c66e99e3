"""Exercises of D2L on scoring functions, solved with numbers.

Requirements:
- the sum of q + k as a score: the query cancels, in the weights and in the gradient;
- the toy example with other keys: dot product and additive attention no longer agree;
- a score for queries and keys of different dimensions from matrix products alone: q . W k;
- additive attention as a network with one hidden layer on [q; k]: equal, computed both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import attnscore as ats
from attnscore.diagnostics.lab.experiment import Array, Check, Result, Row
from attnscore.diagnostics.lab.panels import LAW, SCALED, SPREAD, WITHOUT
from attnscore.plotting import show_attention
from attnscore.plotting.drawing import legend, new_figure, style_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _rows_of(**matrices: Array) -> list[Row]:
    """Return a row for each query and key with the entries of these matrices."""
    shape = next(iter(matrices.values())).shape
    return [
        {"query": query, "key": key, **{name: float(matrix[query, key]) for name, matrix in matrices.items()}}
        for query, key in np.ndindex(shape)
    ]


@dataclass(frozen=True, eq=False)
class SumScore(Result):
    """Result of `sum_ignores_the_query`: weights (query, key) under the sum and under the dot product."""

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
            {"score": name, **row}
            for name, weights in (("sum", self.weights), ("dot", self.dot_weights))
            for row in _rows_of(weight=weights)
        ]

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
        """Draw the weights under the sum and under the dot product."""
        titles = "sum(q + k): every query the same", "q·k: each query its own"
        maps = np.stack([self.weights, self.dot_weights])
        return show_attention(maps, titles=titles, max_cols=2, numbers=True, figsize=(8.2, 3.2))


def sum_ignores_the_query(queries: int = 6, keys: int = 8, dim: int = 4, seed: int = 0) -> SumScore:
    """Compute weights and gradients under the score sum(q + k) and under the dot product.

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
        _, vjp = ats.attend_vjp(query, key, key, score=score)
        gradients.append(float(np.abs(vjp(incoming).query).max()))
    return SumScore(*weights, *gradients)


@dataclass(frozen=True)
class OtherKeys(Result):
    """Result of `other_keys`.

    Attributes
    ----------
    noise : standard deviations of the noise that is added to keys of ones
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

    def summary(self) -> list[Row]:
        return self.to_rows()

    def sentence(self) -> str:
        return (
            f"Dot product and additive attention agree in the toy example because its keys are all alike (difference "
            f"{self.differences[0]:.1g}); with noise of {self.noise[-1]:g} in the keys their outputs, between 0 and "
            f"23, differ by {self.differences[-1]:.2g} on average."
        )

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("keys all alike: dot and additive agree", self.differences[0], 1e-12),
            Check("other keys: they differ by 0.1 or more (shortfall)", max(0.0, 0.1 - self.differences[-1]), 0.0),
        )

    def plot(self) -> Figure:
        """Draw the difference between dot product and additive attention against the noise in the keys."""
        figure = new_figure((5.6, 3.2))
        axis = figure.subplots()
        axis.fill_between(self.noise, self.low, self.high, color=WITHOUT, alpha=SPREAD, linewidth=0)
        axis.plot(self.noise, self.differences, "o-", color=WITHOUT, markersize=4, label="mean; 5 % to 95 % shaded")
        axis.set_xscale("symlog", linthresh=0.01, linscale=0.5)
        axis.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        axis.set(xlim=(0, max(self.noise) * 1.1), ylim=(0, None))
        axis.set_xticks(self.noise, [f"{noise:g}" for noise in self.noise])
        axis.set_yticks([0, 0.01, 0.1, 1, 10], ["0", "0.01", "0.1", "1", "10"])
        title = "Dot product and additive attention, the toy example with other keys"
        style_lines(axis, title, "noise in the keys (0: all alike)", "largest difference of the outputs")
        legend(axis, loc="upper left")
        return figure


def other_keys(
    noise: Sequence[float] = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), draws: int = 64, seed: int = 0
) -> OtherKeys:
    """Compare dot product and additive attention in D2L's toy example with more and more noise in the keys.

    There are 10 keys, of which 2 and 6 are valid, and values arange(40). Queries are (2, 1, 2) for the dot product and
    (2, 1, 20) for additive attention with 8 hidden units; the first entry of `noise` should be 0, D2L's own case.

    Examples
    --------
    >>> found = other_keys([0.0, 1.0], draws=8)
    >>> found.differences[0] < 1e-12, found.differences[1] > 0.1
    (True, True)
    """
    rng = np.random.default_rng(seed)
    values = np.repeat(np.arange(40.0).reshape(1, 10, 4), 2, axis=0)
    differences = np.zeros((len(noise), draws))
    for draw in range(draws):
        other, query, long_query = (rng.standard_normal(shape) for shape in ((2, 10, 2), (2, 1, 2), (2, 1, 20)))
        w_v, w_q, w_k = (rng.standard_normal(shape) for shape in ((8,), (8, 20), (8, 2)))
        additive = ats.Additive(w_v, w_q / 20**0.5, w_k / 2**0.5)
        for place, size in enumerate(noise):
            keys = 1 + size * other
            by_dot = ats.attend(query, keys, values, valid_lens=[2, 6])
            by_additive = ats.attend(long_query, keys, values, score=additive, valid_lens=[2, 6])
            differences[place, draw] = np.abs(by_dot - by_additive).max()
    low, high = np.percentile(differences, (5, 95), axis=1)
    return OtherKeys(*(tuple(map(float, numbers)) for numbers in (noise, differences.mean(1), low, high)))


@dataclass(frozen=True, eq=False)
class DifferentDimensions(Result):
    """Result of `different_lengths`: the same weights (query, key) in three ways."""

    query_dim: int
    key_dim: int
    by_products: Array
    by_bilinear: Array
    by_projection: Array

    @property
    def difference(self) -> float:
        """Largest difference between the three ways."""
        return float(np.ptp([self.by_products, self.by_bilinear, self.by_projection], axis=0).max())

    def to_rows(self) -> list[Row]:
        return _rows_of(weight=self.by_products, Bilinear=self.by_bilinear)

    def sentence(self) -> str:
        return (
            f"Queries of dimension {self.query_dim} and keys of dimension {self.key_dim}: q·Wk is two matrix products, "
            "Q W and (Q W) Kᵀ. Bilinear(W) and the dot product of projected queries give the same weights (they differ "
            f"by {self.difference:.1g})."
        )

    def checks(self) -> tuple[Check, ...]:
        return (Check("different dimensions: matrix products are Bilinear", self.difference, 1e-12),)

    def plot(self) -> Figure:
        """Draw the weights by matrix products and by Bilinear."""
        maps, titles = np.stack([self.by_products, self.by_bilinear]), ["softmax of (Q W) Kᵀ", "Bilinear(W)"]
        xlabel, ylabel = f"Keys of dimension {self.key_dim}", f"Queries of dimension {self.query_dim}"
        size = 8.2, 2.9
        return show_attention(maps, titles=titles, xlabel=xlabel, ylabel=ylabel, max_cols=2, numbers=True, figsize=size)


def different_lengths(
    query_dim: int = 20, key_dim: int = 2, queries: int = 5, keys: int = 8, seed: int = 0
) -> DifferentDimensions:
    """Compute a score for queries and keys of different dimensions from matrix products alone: q . W k.

    Examples
    --------
    >>> different_lengths().difference < 1e-12
    True
    """
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((queries, query_dim)), rng.standard_normal((keys, key_dim))
    matrix = rng.standard_normal((query_dim, key_dim)) / (query_dim * key_dim) ** 0.5
    by_products = ats.masked_softmax(query @ matrix @ key.T)
    by_bilinear = ats.attention_weights(query, key, score=ats.Bilinear(matrix))
    by_projection = ats.attention_weights(query @ matrix, key, score="dot")
    return DifferentDimensions(query_dim, key_dim, by_products, by_bilinear, by_projection)


@dataclass(frozen=True, eq=False)
class AdditiveAsNetwork(Result):
    """Result of `additive_as_network`: the same scores (query, key), of the network and of the library."""

    by_network: Array
    by_additive: Array
    hidden: int

    @property
    def difference(self) -> float:
        """Largest absolute difference between the scores."""
        return float(np.abs(self.by_network - self.by_additive).max())

    def to_rows(self) -> list[Row]:
        return _rows_of(network=self.by_network, Additive=self.by_additive)

    def sentence(self) -> str:
        return (
            f"A network with one hidden layer of {self.hidden} units on [q; k], tanh and no biases, is additive "
            f"attention: the scores differ by {self.difference:.1g}. Its first matrix is [W_q W_k]."
        )

    def checks(self) -> tuple[Check, ...]:
        return (Check("additive attention is a network on [q; k]", self.difference, 1e-12),)

    def plot(self) -> Figure:
        """Draw the network's scores against the library's: points on the diagonal."""
        figure = new_figure((4.2, 3.6))
        axis = figure.subplots()
        ends = [float(self.by_additive.min()), float(self.by_additive.max())]
        axis.plot(ends, ends, color=LAW, linewidth=1)
        axis.plot(self.by_additive.ravel(), self.by_network.ravel(), "o", color=SCALED, markersize=3, alpha=0.6)
        title = f"One point per pair: they differ by {self.difference:.0e} at most"
        style_lines(axis, title, "Additive(w_v, W_q, W_k)", "w_v · tanh([W_q W_k] [q; k])")
        return figure


def additive_as_network(
    query_dim: int = 20, key_dim: int = 2, hidden: int = 8, queries: int = 24, keys: int = 16, seed: int = 0
) -> AdditiveAsNetwork:
    """Compute w_v . tanh([W_q W_k] [q; k]) for every pair, and the additive score.

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
