"""Attention layers for Flax: parameters, training mode and state as ``flax.nnx`` has them.

- The mathematics is `attnscore.attend`: these modules hold parameters, check the border and call it.
- Projections are ``nnx.Linear`` under the textbook's names (``W_q``, ``W_k``, ``w_v``; multi-head also ``W_v``,
  ``W_o``); `load_torch` takes its checkpoints. Sizes not given are inferred at the first call, outside ``jit``.
- What a mask hides reaches nothing, the gradients of the projections included, NaN and infinity too.
- Dropout draws from the ``dropout`` stream, in training only: ``model.train()``, ``model.eval()``, ``deterministic``.
- ``attention_weights`` are computed when read, of the last concrete call; ``jit``, ``grad``, ``vmap``, copies and
  pickle keep nothing.

All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features).
"""

from __future__ import annotations

import math
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from attnscore.core.arguments import check_positive
from attnscore.layers import shared
from attnscore.layers.flax_multihead import MultiHeadAttention
from attnscore.layers.flax_parameters import linear, matrix, sized
from attnscore.layers.flax_parts import Attention
from attnscore.scores import Additive, Bilinear, Dot, Gaussian, ScaledDot

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
]


@final
class DotProductAttention(Attention):
    """Pooling by the (scaled) dot product of queries and keys of one length: softmax(q . k / sqrt(dim)) v.

    Parameters
    ----------
    dropout : number in [0, 1)
        Of the weights, in training.
    scaled : bool
        False leaves the division by sqrt(dim) out.
    deterministic : bool
        Whether dropout is off; ``layer.train()`` and ``layer.eval()`` set it.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.
    dtype : dtype, optional
        Of the computation; None: that of the inputs.
    rngs : nnx.Rngs, optional
        Where dropout draws from, unless the call says.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = DotProductAttention(dropout=0.5, rngs=nnx.Rngs(0))
    >>> layer.eval()
    >>> values = jnp.tile(jnp.arange(40.0).reshape(1, 10, 4), (2, 1, 1))
    >>> layer(jnp.ones((2, 1, 2)), jnp.ones((2, 10, 2)), values, jnp.array([2, 6]))[:, 0].round(4).tolist()
    [[2.0, 3.0, 4.0, 5.0], [10.0, 11.0, 12.0, 13.0]]
    >>> layer.attention_weights.shape
    (2, 1, 10)
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        scaled: bool = True,
        deterministic: bool = False,
        keep_last: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        super().__init__(dropout, deterministic=deterministic, keep_last=keep_last, dtype=dtype, rngs=rngs)
        self.scaled = scaled

    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        return queries, keys, values, ScaledDot() if self.scaled else Dot()


@final
class AdditiveAttention(Attention):
    """Pooling by the additive (Bahdanau) score w_v . tanh(W_q q + W_k k), for queries and keys of different lengths.

    Parameters
    ----------
    num_hiddens : int
        h, the length of w_v.
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call, which is then one outside ``jit``, ``grad`` and ``vmap``.
    deterministic, keep_last : bool
    dtype, param_dtype : dtype
        Of the computation (None: that of inputs and parameters), and of the parameters.
    rngs : nnx.Rngs
        Streams ``params`` and ``dropout``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 1, 20)), jnp.ones((2, 10, 2)), jnp.ones((2, 10, 4)), jnp.array([2, 6])).shape
    (2, 1, 4)
    """

    @shared.naming_arguments(shared.D2L_ADDITIVE)
    def __init__(
        self,
        num_hiddens: int,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        deterministic: bool = False,
        keep_last: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        shared.check_size("num_hiddens", num_hiddens)
        make = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.num_hiddens = num_hiddens
        self.W_q = linear("query_size", query_size, num_hiddens, **make)
        self.W_k = linear("key_size", key_size, num_hiddens, **make)
        self.w_v = nnx.Linear(num_hiddens, 1, **make)
        super().__init__(dropout, deterministic=deterministic, keep_last=keep_last, dtype=dtype, rngs=rngs)

    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        query, key = self._project("queries", "W_q", queries), self._project("keys", "W_k", keys)
        return query, key, values, Additive(self.w_v.kernel[:, 0])


@final
class BilinearAttention(Attention):
    """Pooling by the bilinear (Luong's "general") score q . W k, for queries and keys of different lengths.

    Parameters
    ----------
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call, which is then one outside ``jit``, ``grad`` and ``vmap``. ``W`` is
        (query_size, key_size).
    deterministic, keep_last : bool
    dtype, param_dtype : dtype
        Of the computation (None: that of the inputs), and of W.
    rngs : nnx.Rngs
        Streams ``params`` and ``dropout``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = BilinearAttention(rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 1, 20)), jnp.ones((2, 10, 2)), jnp.ones((2, 10, 4))).shape
    (2, 1, 4)
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        deterministic: bool = False,
        keep_last: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        shared.check_size("query_size", query_size, optional=True)
        shared.check_size("key_size", key_size, optional=True)
        self.W = sized(matrix, query_size, key_size, rngs=rngs, param_dtype=param_dtype)
        super().__init__(dropout, deterministic=deterministic, keep_last=keep_last, dtype=dtype, rngs=rngs)

    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        weight = self._sized("W", {"queries": queries, "keys": keys})[...]
        shared.check_features("queries", queries.shape[-1], weight.shape[0], "W")
        shared.check_features("keys", keys.shape[-1], weight.shape[1], "W")
        return queries, keys, values, Bilinear(weight)


@final
class GaussianAttention(Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2): Nadaraya-Watson regression.

    Parameters
    ----------
    bandwidth : number above 0
        In the units of queries and keys.
    dropout : number in [0, 1)
    learn_bandwidth : bool
        Make it a parameter, that starts at `bandwidth`. It is learned as its logarithm, so that it stays above 0.
    deterministic, keep_last : bool
    dtype, param_dtype : dtype
        Of the computation (None: that of the inputs), and of the logarithm.
    rngs : nnx.Rngs, optional
        Where dropout draws from, unless the call says.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = GaussianAttention(bandwidth=0.5, learn_bandwidth=True)
    >>> layer(jnp.zeros((1, 1, 1)), jnp.zeros((1, 3, 1)), jnp.arange(3.0).reshape(1, 3, 1)).item()
    1.0
    >>> list(nnx.to_pure_dict(nnx.state(layer)))
    ['log_bandwidth']
    """

    def __init__(
        self,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_bandwidth: bool = False,
        deterministic: bool = False,
        keep_last: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        super().__init__(dropout, deterministic=deterministic, keep_last=keep_last, dtype=dtype, rngs=rngs)
        self.start = check_positive("bandwidth", bandwidth)
        starting = jnp.asarray(math.log(float(self.start)), param_dtype)
        self.log_bandwidth = nnx.data(nnx.Param(starting) if learn_bandwidth else None)

    @property
    def bandwidth(self) -> float | jax.Array:
        """The bandwidth as it is now."""
        return self.start if self.log_bandwidth is None else jnp.exp(self.log_bandwidth[...])

    def _scored(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        return queries, keys, values, Gaussian(self.bandwidth)
