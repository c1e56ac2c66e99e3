"""Attention layers for Keras 3, on its TensorFlow, JAX and torch backends (and, for inference, on NumPy's).

- The mathematics is `attnscore.attend`: these layers hold parameters, check the border and call it.
- They are called, masked, built, saved and trained as Keras's own: lists, masks that arrive with the inputs,
  ``attention_mask``, ``use_causal_mask``, ``return_attention_scores``, ``.keras`` files, mixed precision, symbolic
  calls with lengths that are not known.
- Projections are ``keras.layers.Dense`` under the textbook's names (``W_q``, ``W_k``, ``w_v``; multi-head also ``W_v``,
  ``W_o``), so its weights load.
- What a mask hides reaches nothing, the gradients of the projections included, NaN and infinity too.
- ``attention_weights`` are computed when read; nothing is kept in graphs and jit.
"""

from __future__ import annotations

import math
from typing import Any, final

import keras

from attnscore.backends.base import Array
from attnscore.core.arguments import check_positive
from attnscore.layers import shared
from attnscore.layers.keras_inputs import unpacked
from attnscore.layers.keras_multihead import MultiHeadAttention
from attnscore.layers.keras_parameters import (
    add_parameter,
    check_size,
    dense,
    kernel_of,
    project,
    serialized,
    settings_of,
    value_of,
)
from attnscore.layers.keras_parts import Attention
from attnscore.scores import Additive, Bilinear, Dot, Gaussian, ScaledDot

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
]


@final
@keras.saving.register_keras_serializable(package="attnscore")
class DotProductAttention(Attention):
    """Pooling by the (scaled) dot product of queries and keys of one length: softmax(q . k / sqrt(dim)) v.

    Parameters
    ----------
    dropout : number in [0, 1)
        Of the weights, in training.
    scaled : bool
        False leaves the division by sqrt(dim) out, as ``keras.layers.Attention`` does.
    seed : int, optional
        Of the dropout.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.
    **kwargs
        Keras's own: name, dtype, trainable ...

    Examples
    --------
    >>> import numpy as np
    >>> layer = DotProductAttention(dropout=0.5)
    >>> values = np.arange(40, dtype="float32").reshape(1, 10, 4).repeat(2, axis=0)
    >>> out = layer(np.ones((2, 1, 2)), np.ones((2, 10, 2)), values, valid_lens=[2, 6])
    >>> keras.ops.convert_to_numpy(out)[:, 0].round(3)
    array([[ 2.,  3.,  4.,  5.],
           [10., 11., 12., 13.]], dtype=float32)
    >>> tuple(layer.attention_weights.shape)
    (2, 1, 10)
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        scaled: bool = True,
        seed: int | None = None,
        keep_last: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dropout, seed, keep_last, **kwargs)
        self.scaled = scaled

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Nothing to make."""

    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        return queries, keys, values, ScaledDot() if self.scaled else Dot()

    def _own_config(self) -> dict[str, Any]:
        return {"scaled": self.scaled}


@final
@keras.saving.register_keras_serializable(package="attnscore")
class AdditiveAttention(Attention):
    """Pooling by the additive (Bahdanau) score w_v . tanh(W_q q + W_k k), for queries and keys of different lengths.

    Parameters
    ----------
    num_hiddens : int
        h, the length of w_v.
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: those of the first call.
    seed : int, optional
    keep_last : bool
    kernel_initializer, kernel_regularizer
        Of W_q, W_k and w_v.
    **kwargs
        Keras's own: name, dtype, trainable ...

    Examples
    --------
    >>> import numpy as np
    >>> layer = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)
    >>> tuple(layer(np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4)), valid_lens=[2, 6]).shape)
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
        seed: int | None = None,
        keep_last: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dropout, seed, keep_last, **kwargs)
        shared.check_size("num_hiddens", num_hiddens)
        shared.check_size("key_size", key_size, optional=True)
        shared.check_size("query_size", query_size, optional=True)
        self.num_hiddens, self.key_size, self.query_size = num_hiddens, key_size, query_size
        self._settings = settings_of(kernel_initializer=kernel_initializer, kernel_regularizer=kernel_regularizer)
        self.W_q, self.W_k, self.w_v = (
            dense(name, units, self, **self._settings)
            for name, units in (("W_q", num_hiddens), ("W_k", num_hiddens), ("w_v", 1))
        )

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Make the parameters, of the sizes of these inputs."""
        queries_shape, keys_shape, _ = unpacked(queries_shape, keys_shape, values_shape)
        self.W_q.build((None, None, check_size("queries", queries_shape, self.query_size, "W_q")))
        self.W_k.build((None, None, check_size("keys", keys_shape, self.key_size, "W_k")))
        self.w_v.build((None, None, self.num_hiddens))

    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        query, key = project("queries", self.W_q, queries, "W_q"), project("keys", self.W_k, keys, "W_k")
        return query, key, values, Additive(kernel_of(self.w_v)[:, 0])

    def _own_config(self) -> dict[str, Any]:
        sizes = {"num_hiddens": self.num_hiddens, "key_size": self.key_size, "query_size": self.query_size}
        return sizes | serialized(self._settings)


@final
@keras.saving.register_keras_serializable(package="attnscore")
class BilinearAttention(Attention):
    """Pooling by the bilinear (Luong's "general") score q . W k, for queries and keys of different lengths.

    Parameters
    ----------
    dropout : number in [0, 1)
    key_size, query_size : int, optional
        None: those of the first call. ``W`` is (query_size, key_size).
    seed : int, optional
    keep_last : bool
    **kwargs
        Keras's own: name, dtype, trainable ...

    Examples
    --------
    >>> import numpy as np
    >>> layer = BilinearAttention()
    >>> tuple(layer(np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4))).shape)
    (2, 1, 4)
    """

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        key_size: int | None = None,
        query_size: int | None = None,
        seed: int | None = None,
        keep_last: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dropout, seed, keep_last, **kwargs)
        shared.check_size("key_size", key_size, optional=True)
        shared.check_size("query_size", query_size, optional=True)
        self.key_size, self.query_size = key_size, query_size

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Make the matrix, of the sizes of these inputs."""
        queries_shape, keys_shape, _ = unpacked(queries_shape, keys_shape, values_shape)
        query_size = check_size("queries", queries_shape, self.query_size, "W")
        key_size = check_size("keys", keys_shape, self.key_size, "W")
        self.W = add_parameter(self, "W", shared.bilinear_parameter(query_size, key_size))

    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        for name, x, size in zip(("queries", "keys"), (queries, keys), self.W.shape, strict=True):
            shared.check_features(name, x.shape[-1], size, "W")
        return queries, keys, values, Bilinear(value_of(self.W))

    def _own_config(self) -> dict[str, Any]:
        return {"key_size": self.key_size, "query_size": self.query_size}


@final
@keras.saving.register_keras_serializable(package="attnscore")
class GaussianAttention(Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2): Nadaraya-Watson regression.

    Parameters
    ----------
    bandwidth : number above 0
        In the units of queries and keys.
    dropout : number in [0, 1)
    learn_bandwidth : bool
        Make it a parameter, that starts at `bandwidth`. It is learned as its logarithm, so that it stays above 0.
    seed : int, optional
    keep_last : bool
    **kwargs
        Keras's own: name, dtype, trainable ...

    Examples
    --------
    >>> import numpy as np
    >>> layer = GaussianAttention(bandwidth=0.5, learn_bandwidth=True)
    >>> out = layer(np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.arange(3.0).reshape(1, 3, 1))
    >>> keras.ops.convert_to_numpy(out)
    array([[[1.]]], dtype=float32)
    >>> [weight.name for weight in layer.weights]
    ['log_bandwidth']
    """

    def __init__(
        self,
        bandwidth: float = 1.0,
        dropout: float = 0.0,
        *,
        learn_bandwidth: bool = False,
        seed: int | None = None,
        keep_last: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dropout, seed, keep_last, **kwargs)
        self.start = float(check_positive("bandwidth", bandwidth))
        self.learn_bandwidth = learn_bandwidth
        self.log_bandwidth: Any = None

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Make the bandwidth, if it is learned."""
        if self.learn_bandwidth:
            start = shared.Parameter((), start=math.log(self.start))
            self.log_bandwidth = add_parameter(self, "log_bandwidth", start)

    @property
    def bandwidth(self) -> Any:
        """The bandwidth as it is now: a number, or a tensor where it is learned."""
        return self.start if self.log_bandwidth is None else shared.exp(value_of(self.log_bandwidth))

    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        return queries, keys, values, Gaussian(self.bandwidth)

    def _own_config(self) -> dict[str, Any]:
        return {"bandwidth": self.start, "learn_bandwidth": self.learn_bandwidth}
