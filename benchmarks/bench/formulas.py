"""Formulas of the scores, as a user writes them in each framework.

- A score is written once, in operations that every framework has under a name of its own.
- Where a score has several formulas, all are listed: the fastest on the machine is the baseline.
- Valid lengths become booleans in every call, as a layer gets them with each batch; the positions of the keys are kept.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import Score

Scores = Callable[[Any, Any, Any], Any]
"""Scores of (query, key, parameter)."""


@dataclass(frozen=True)
class Ops:
    """Operations of a framework under one name."""

    tanh: Callable[[Any], Any]
    expand: Callable[[Any, int], Any]
    """Insert an axis of size 1."""
    products: Callable[[Any, Any], Any]
    """q k^T"""
    times_vector: Callable[[Any, Any], Any]
    total: Callable[[Any], Any]
    """Sum over the last axis."""
    softmax: Callable[[Any], Any]
    """Softmax over the last axis."""
    arange: Callable[[int], Any]
    masked: Callable[[Any, Any], Any]
    """Scores, -inf where a boolean is False."""
    distances: Callable[[Any, Any], Any] | None = None

    def weights(self, scores: Any, lens: Any, positions: Any) -> Any:
        """Return softmax weights over the first `lens` keys of each element of the batch."""
        return self.softmax(scores if lens is None else self.masked(scores, positions < lens[:, None, None]))


def ops(framework: str) -> Ops:
    """Return the operations of a framework, which is imported now."""
    return {"numpy": _numpy, "torch": _torch, "jax": _jax, "tensorflow": _tensorflow}[framework]()


def formulas(score: Score, dim: int, o: Ops) -> list[Scores]:
    """Return the formulas of a score, the plainest first."""
    scale = 1 / math.sqrt(dim)

    # No lambdas: TensorFlow reads the source of functions that it compiles.
    def scaled_scores(q: Any, k: Any, _: Any) -> Any:
        return o.products(q, k) * scale

    def scaled_query(q: Any, k: Any, _: Any) -> Any:
        return o.products(q * scale, k)

    def bilinear(q: Any, k: Any, w: Any) -> Any:
        return o.products(q @ w, k)

    def pairs(q: Any, k: Any) -> tuple[Any, Any]:
        return o.expand(q, -2), o.expand(k, -3)

    def total(q: Any, k: Any, w: Any) -> Any:
        a, b = pairs(q, k)
        return o.total(o.tanh(a + b) * w)

    def product(q: Any, k: Any, w: Any) -> Any:
        a, b = pairs(q, k)
        return o.times_vector(o.tanh(a + b), w)

    def expanded(q: Any, k: Any, bandwidth: Any) -> Any:
        norms = o.expand(o.total(q * q), -1) + o.expand(o.total(k * k), -2)
        return (2 * o.products(q, k) - norms) / (2 * bandwidth**2)

    def difference(q: Any, k: Any, bandwidth: Any) -> Any:
        a, b = pairs(q, k)
        c = a - b
        return o.total(c * c) / (-2 * bandwidth**2)

    gaussian: list[Scores] = [expanded, difference]
    if (distances := o.distances) is not None:
        gaussian.append(lambda q, k, bandwidth: distances(q, k) ** 2 / (-2 * bandwidth**2))
    found: dict[Score, list[Scores]] = {
        "scaled_dot": [scaled_scores, scaled_query],
        "additive": [product, total],
        "bilinear": [bilinear],
        "gaussian": gaussian,
    }
    return found[score]


def _numpy() -> Ops:
    def softmax(scores: Any) -> Any:
        scores = scores - scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores

    return Ops(
        np.tanh, np.expand_dims, lambda q, k: q @ k.swapaxes(-1, -2), lambda x, w: x @ w, lambda x: x.sum(-1),
        softmax, np.arange, lambda scores, kept: np.where(kept, scores, np.float32(-np.inf)),
    )  # fmt: skip


def _torch() -> Ops:
    import torch

    return Ops(
        torch.tanh, torch.unsqueeze, lambda q, k: q @ k.transpose(-1, -2), lambda x, w: x @ w, lambda x: x.sum(-1),
        lambda scores: scores.softmax(-1), torch.arange,
        lambda scores, kept: scores.masked_fill(~kept, -math.inf), torch.cdist,
    )  # fmt: skip


def _jax() -> Ops:
    jax = importlib.import_module("jax")
    jnp = jax.numpy
    return Ops(
        jnp.tanh, jnp.expand_dims, lambda q, k: q @ k.mT, lambda x, w: x @ w, lambda x: x.sum(-1),
        jax.nn.softmax, jnp.arange, lambda scores, kept: jnp.where(kept, scores, -jnp.inf),
    )  # fmt: skip


def _tensorflow() -> Ops:
    tf = importlib.import_module("tensorflow")
    return Ops(
        tf.tanh, tf.expand_dims, lambda q, k: tf.matmul(q, k, transpose_b=True), lambda x, w: tf.tensordot(x, w, 1),
        lambda x: tf.reduce_sum(x, -1), tf.nn.softmax, tf.range, lambda scores, kept: tf.where(kept, scores, -math.inf),
    )  # fmt: skip
