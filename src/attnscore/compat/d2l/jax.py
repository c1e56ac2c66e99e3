"""``from attnscore.compat.d2l import jax as d2l``: the book's names for JAX, its layers as modules of flax.linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import attnscore as ats
from attnscore.analysis import functional
from attnscore.compat.d2l import shared
from attnscore.plotting import heatmaps

tensor, ones, zeros, normal = jnp.array, jnp.ones, jnp.zeros, jax.random.normal
arange, eye, reshape = jnp.arange, jnp.eye, jnp.reshape
masked_softmax, show_heatmaps = functional.masked_softmax, heatmaps.show_heatmaps
sequence_mask, check_shape = shared.sequence_mask, shared.check_shape
_keys = iter(range(2**31))


def get_key() -> jax.Array:
    """Return a key that no earlier call returned."""
    return jax.random.PRNGKey(next(_keys))


def _attend(
    module: Any, *arrays: jax.Array, valid_lens: Any, score: Any, training: bool, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Return output and weights, with the dropout of the module in training."""
    seed: Any = jax.random.bits(module.make_rng("dropout")) if training and module.dropout else None
    rate = module.dropout if training else 0.0
    out: tuple[jax.Array, jax.Array] = ats.attend(
        *arrays, score=score, valid_lens=valid_lens, dropout=rate, seed=seed, return_weights=True, **options
    )
    return out


def _of_sequences(window_mask: Any, count: int) -> Any:
    """Return the numbers (window, query, key) that each of `count` sequences adds to its scores; windows take turns."""
    if window_mask is None:
        return None
    return jnp.tile(jnp.asarray(window_mask, float), (count // window_mask.shape[0], 1, 1))


class DotProductAttention(nn.Module):
    """Scaled dot product attention; returns output and weights, as the book's module does."""

    dropout: float
    num_heads: int | None = None

    @nn.compact
    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        valid_lens: Any = None,
        window_mask: Any = None,
        training: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Return output and weights."""
        heads = self.num_heads or 1
        bias = _of_sequences(window_mask, queries.shape[0] // heads)
        bias = None if bias is None else jnp.repeat(bias, heads, axis=0)
        return _attend(
            self, queries, keys, values, valid_lens=valid_lens, score="scaled_dot", training=training, bias=bias
        )


class AdditiveAttention(nn.Module):
    """Additive attention: w_v . tanh(W_q q + W_k k); returns output and weights."""

    num_hiddens: int
    dropout: float

    @nn.compact
    def __call__(
        self, queries: Any, keys: Any, values: Any, valid_lens: Any = None, training: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Return output and weights."""
        queries = nn.Dense(self.num_hiddens, use_bias=False, name="W_q")(queries)
        keys = nn.Dense(self.num_hiddens, use_bias=False, name="W_k")(keys)
        # The book's w_v is a Dense of one unit, whose kernel times the identity is the vector of the score.
        w_v = nn.Dense(1, use_bias=False, name="w_v")(jnp.eye(self.num_hiddens, dtype=queries.dtype))[:, 0]
        score = ats.Additive(w_v)
        return _attend(self, queries, keys, values, valid_lens=valid_lens, score=score, training=training)


class MultiHeadAttention(nn.Module):
    """Multi-head attention with scaled dot products; returns output and weights of each head."""

    num_hiddens: int
    num_heads: int
    dropout: float
    bias: bool = False

    @nn.compact
    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        valid_lens: Any = None,
        window_mask: Any = None,
        training: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Return output and weights."""

        def heads(name: str, x: Any) -> jax.Array:
            projected = nn.Dense(self.num_hiddens, use_bias=self.bias, name=name)(x)
            return projected.reshape(*x.shape[:-1], self.num_heads, -1)

        arrays = heads("W_q", queries), heads("W_k", keys), heads("W_v", values)
        bias = _of_sequences(window_mask, queries.shape[0])
        bias = None if bias is None else bias[:, None]
        out, weights = _attend(
            self, *arrays, valid_lens=valid_lens, score="scaled_dot", training=training, bias=bias, head_axis=-2
        )
        return nn.Dense(self.num_hiddens, use_bias=self.bias, name="W_o")(out.reshape(*out.shape[:-2], -1)), weights
