"""Attention layers for MXNet: Gluon blocks, with parameters, training mode and serialisation as Gluon has them.

- The mathematics is `attnscore.attend`: these blocks hold parameters, check the border and call it.
- Blocks, not hybrid ones: a symbol has no numbers that the kernels could read (``docs/decisions/mxnet.md``).
- Parameters are those of the textbook's layers (``W_q.weight``, ``W_k.weight``, ``w_v.weight``; multi-head also
  ``W_v.weight``, ``W_o.weight``), so its files load. Sizes not given are inferred at the first call.
- Dropout is active under ``autograd.record()`` (or ``train_mode``), as Gluon's own is.
- What a mask hides reaches nothing, the gradients of the projections included, NaN and infinity too.
- ``attention_weights`` are computed when read, from detached inputs.

All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features), after
``mxnet.npx.set_np()`` and ``layer.initialize()``.
"""

from __future__ import annotations

import math
from typing import Any, final

from mxnet import gluon

from attnscore.backends.base import Array
from attnscore.core.arguments import check_positive
from attnscore.layers import shared
from attnscore.layers.mxnet_parts import Attention, Matrix, check_inputs, data_of, linear, number_of, project, started
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
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.

    Examples
    --------
    >>> from mxnet import np, npx
    >>> npx.set_np()
    >>> layer = DotProductAttention(dropout=0.5)
    >>> values = np.arange(40).reshape(1, 10, 4).repeat(2, axis=0)
    >>> layer(np.random.normal(0, 1, (2, 1, 2)), np.ones((2, 10, 2)), values, np.array([2, 6]))[:, 0].round()
    array([[ 2.,  3.,  4.,  5.],
           [10., 11., 12., 13.]])
    >>> layer.attention_weights.shape
    (2, 1, 10)
    """

    def __init__(self, dropout: float = 0.0, *, scaled: bool = True, keep_last: bool = True, **block: Any) -> None:
        super().__init__(dropout, keep_last, **block)
        self.scaled = scaled

    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        check_inputs(queries, keys, values)
        score = ScaledDot() if self.scaled else Dot()
        return self._pool(queries, keys, values, own=False, score=score, valid_lens=valid_lens, mask=mask)


@final
class AdditiveAttention(Attention):
    """Pooling by the additive (Bahdanau) score w_v . tanh(W_q q + W_k k), for queries and keys of different lengths.

    Parameters
    ----------
    num_hiddens : int
        h, the length of w_v.
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call.
    keep_last : bool

    Examples
    --------
    >>> from mxnet import np, npx
    >>> npx.set_np()
    >>> layer = AdditiveAttention(num_hiddens=8, dropout=0.1)
    >>> layer.initialize()
    >>> layer(np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4)), np.array([2, 6])).shape
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
        keep_last: bool = True,
        **block: Any,
    ) -> None:
        super().__init__(dropout, keep_last, **block)
        shared.check_size("num_hiddens", num_hiddens)
        with self.name_scope():
            self.W_q = linear("query_size", query_size, num_hiddens)
            self.W_k = linear("key_size", key_size, num_hiddens)
            self.w_v = gluon.nn.Dense(1, use_bias=False, flatten=False, in_units=num_hiddens)

    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        check_inputs(queries, keys, values)
        query, key = project("queries", self.W_q, queries, "W_q"), project("keys", self.W_k, keys, "W_k")
        score = Additive(data_of(self.w_v.weight, query).reshape((-1,)))
        return self._pool(query, key, values, own=True, score=score, valid_lens=valid_lens, mask=mask)


@final
class BilinearAttention(Attention):
    """Pooling by the bilinear (Luong's "general") score q . W k, for queries and keys of different lengths.

    Parameters
    ----------
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: inferred at the first call. ``W.weight`` is (query_size, key_size).
    keep_last : bool

    Examples
    --------
    >>> from mxnet import np, npx
    >>> npx.set_np()
    >>> layer = BilinearAttention()
    >>> layer.initialize()
    >>> layer(np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4))).shape
    (2, 1, 4)
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        keep_last: bool = True,
        **block: Any,
    ) -> None:
        super().__init__(dropout, keep_last, **block)
        with self.name_scope():
            self.W = Matrix(query_size, key_size)

    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        check_inputs(queries, keys, values)
        score = Bilinear(self.W(queries, keys))
        return self._pool(queries, keys, values, own=False, score=score, valid_lens=valid_lens, mask=mask)


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
    keep_last : bool

    Examples
    --------
    >>> from mxnet import np, npx
    >>> npx.set_np()
    >>> layer = GaussianAttention(bandwidth=0.5, learn_bandwidth=True)
    >>> layer.initialize()
    >>> layer(np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.arange(3).reshape(1, 3, 1)).item()
    1.0
    """

    def __init__(
        self,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_bandwidth: bool = False,
        keep_last: bool = True,
        **block: Any,
    ) -> None:
        super().__init__(dropout, keep_last, **block)
        self.start = check_positive("bandwidth", bandwidth)
        self.log_bandwidth = None
        if learn_bandwidth:
            # (1,), not (): Gluon saves a parameter without axes, but cannot load it.
            start = started(shared.Parameter((1,), start=math.log(self.start)))
            self.log_bandwidth = self.params.get("log_bandwidth", shape=(1,), init=start)

    @property
    def bandwidth(self) -> float | Array:
        """The bandwidth as it is now."""
        return self.start if self.log_bandwidth is None else shared.exp(number_of(self.log_bandwidth))

    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        check_inputs(queries, keys, values)
        score = Gaussian(self.bandwidth)
        return self._pool(queries, keys, values, own=False, score=score, valid_lens=valid_lens, mask=mask)


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
        None: inferred at the first call.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.

    Examples
    --------
    >>> import attnscore as ats
    >>> from mxnet import np, npx
    >>> npx.set_np()
    >>> layer = MultiHeadAttention(num_hiddens=8, num_heads=2, score="additive")
    >>> layer.initialize()
    >>> x = np.random.normal(0, 1, (3, 5, 6))
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
        keep_last: bool = True,
        **block: Any,
    ) -> None:
        super().__init__(dropout, keep_last, **block)
        heads = shared.Heads.checked(num_hiddens, num_heads, num_key_value_heads, score, score_hiddens)
        self._heads, kv = heads, heads.key_value_count
        with self.name_scope():
            self.W_q = linear("query_size", query_size, heads.count * heads.score_width, bias=bias)
            self.W_k = linear("key_size", key_size, kv * heads.score_width, bias=bias)
            self.W_v = linear("value_size", value_size, kv * heads.width, bias=bias)
            self.W_o = linear("num_hiddens", num_hiddens, num_hiddens, bias=bias)
            for name, parameter in heads.parameters().items():
                setattr(self, name, self.params.get(name, shape=parameter.shape, init=started(parameter)))

    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        check_inputs(queries, keys, values)
        heads, kv = self._heads, self._heads.key_value_count
        out = self._pool(
            shared.split_heads(project("queries", self.W_q, queries, "W_q"), heads.count, heads.score_width),
            shared.split_heads(project("keys", self.W_k, keys, "W_k"), kv, heads.score_width),
            shared.split_heads(project("values", self.W_v, values, "W_v"), kv, heads.width),
            own=True,
            score=heads.make_score({name: data_of(getattr(self, name), queries) for name in heads.parameters()}),
            valid_lens=valid_lens,
            mask=shared.over_heads(mask, shared.scores_shape(queries, keys, values)),
            head_axis=-2,
        )
        return self.W_o(out.reshape((*out.shape[:2], -1)))
