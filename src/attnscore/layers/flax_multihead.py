"""Multi-head attention for Flax, with any score."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from attnscore.layers import shared
from attnscore.layers.flax_parameters import linear, started
from attnscore.layers.flax_parts import Attention


@final
class MultiHeadAttention(Attention):
    """Project queries, keys and values, attend in each head, join the heads, project: W_o concat_h(pool_h).

    The names, the shapes and the order of the heads are the textbook's.

    Parameters
    ----------
    num_hiddens : int
        Features of the result; each head has num_hiddens / num_heads of them.
    num_heads : int
    dropout : number in [0, 1)
        Of the weights, in training.
    bias : bool
        Whether the four projections have one.
    score : {"scaled_dot", "dot", "gaussian", "cosine", "additive", "bilinear"}
        With one set of parameters per head: ``w_v`` (heads, h) of the additive score, whose W_q and W_k are the layer's
        own, ``W`` (heads, dim, dim), ``log_bandwidth`` (heads,), and ``log_scale`` (heads,) of the cosine.
    score_hiddens : int, optional
        h of the additive score; None: num_hiddens / num_heads.
    num_key_value_heads : int, optional
        Fewer heads for keys and values than for queries (grouped or multi-query attention).
    query_size, key_size, value_size : int, optional
        None: inferred at the first call, which is then one outside ``jit``, ``grad`` and ``vmap``.
    deterministic : bool
        Whether dropout is off; ``layer.train()`` and ``layer.eval()`` set it.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.
    dtype, param_dtype : dtype
        Of the computation (None: that of inputs and parameters), and of the parameters.
    rngs : nnx.Rngs
        Streams ``params`` and ``dropout``.

    Examples
    --------
    >>> import jax, attnscore as ats
    >>> from flax import nnx
    >>> layer = MultiHeadAttention(num_hiddens=8, num_heads=2, score="additive", rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (3, 5, 6))
    >>> layer(x, x, x, valid_lens=[1, 3, 5], mask=ats.Causal()).shape
    (3, 5, 8)
    >>> layer.attention_weights.shape
    (3, 2, 5, 5)
    """

    @shared.naming_arguments(shared.D2L_MULTI_HEAD)
    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        score: str = "scaled_dot",
        score_hiddens: int | None = None,
        num_key_value_heads: int | None = None,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        deterministic: bool = False,
        keep_last: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        heads = shared.Heads.checked(num_hiddens, num_heads, num_key_value_heads, score, score_hiddens)
        kv, make = heads.key_value_count, {"use_bias": bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.num_hiddens, self.num_heads, self.heads = num_hiddens, num_heads, heads
        self.W_q = linear("query_size", query_size, heads.count * heads.score_width, **make)
        self.W_k = linear("key_size", key_size, kv * heads.score_width, **make)
        self.W_v = linear("value_size", value_size, kv * heads.width, **make)
        self.W_o = nnx.Linear(num_hiddens, num_hiddens, **make)
        for name, parameter in heads.parameters().items():
            setattr(self, name, started(parameter, rngs, param_dtype))
        super().__init__(dropout, deterministic=deterministic, keep_last=keep_last, dtype=dtype, rngs=rngs)

    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        heads, kv = self.heads, self.heads.key_value_count
        return (
            shared.split_heads(self._project("queries", "W_q", queries), heads.count, heads.score_width),
            shared.split_heads(self._project("keys", "W_k", keys), kv, heads.score_width),
            shared.split_heads(self._project("values", "W_v", values), kv, heads.width),
            heads.make_score({name: getattr(self, name)[...] for name in heads.parameters()}),
        )

    def _over_heads(self, mask: Any, shape: tuple[int, int, int]) -> Any:
        return shared.over_heads(mask, shape)

    def _joined(self, out: jax.Array) -> jax.Array:
        joined: jax.Array = self.W_o(out.reshape(*out.shape[:-2], self.num_hiddens))
        return joined
