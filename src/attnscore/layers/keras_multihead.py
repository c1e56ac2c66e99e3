"""Multi-head attention for Keras, with any score."""

from __future__ import annotations

from typing import Any, final

import keras

from attnscore.backends.base import Array
from attnscore.layers import shared
from attnscore.layers.keras_inputs import Shape, unpacked
from attnscore.layers.keras_parameters import (
    add_parameter,
    check_size,
    dense,
    project,
    serialized,
    settings_of,
    value_of,
)
from attnscore.layers.keras_parts import Attention


@final
@keras.saving.register_keras_serializable(package="attnscore")
class MultiHeadAttention(Attention):
    """Project queries, keys and values, attend in each head, join the heads, project: W_o concat_h(pool_h).

    The names, the shapes and the order of the heads are the textbook's. Positional inputs are (queries, keys, values);
    ``keras.layers.MultiHeadAttention`` has (query, value, key), which here is the list [query, value, key].

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
        None: those of the first call.
    seed : int, optional
        Of the dropout.
    keep_last : bool
        Whether to keep what `attention_weights` is computed from.
    kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer
        Of the projections.
    **kwargs
        Keras's own: name, dtype, trainable ...

    Examples
    --------
    >>> import numpy as np
    >>> layer = MultiHeadAttention(num_hiddens=8, num_heads=2, score="additive")
    >>> x = np.random.default_rng(0).normal(size=(3, 5, 6))
    >>> tuple(layer(x, x, x, valid_lens=[1, 3, 5], use_causal_mask=True).shape)
    (3, 5, 8)
    >>> tuple(layer.attention_weights.shape)
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
        seed: int | None = None,
        keep_last: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dropout, seed, keep_last, **kwargs)
        self._heads = heads = shared.Heads.checked(num_hiddens, num_heads, num_key_value_heads, score, score_hiddens)
        self._sizes = {"query_size": query_size, "key_size": key_size, "value_size": value_size}
        for name, size in self._sizes.items():
            shared.check_size(name, size, optional=True)
        self.num_hiddens, self.num_heads, self.bias = num_hiddens, num_heads, bias
        self._settings = settings_of(
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
        )
        kv = heads.key_value_count
        units = heads.count * heads.score_width, kv * heads.score_width, kv * heads.width, num_hiddens
        self.W_q, self.W_k, self.W_v, self.W_o = (
            dense(name, n, self, bias=bias, **self._settings)
            for name, n in zip(("W_q", "W_k", "W_v", "W_o"), units, strict=True)
        )

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Make the parameters, of the sizes of these inputs."""
        shapes = unpacked(queries_shape, keys_shape, values_shape)
        layers = {"queries": self.W_q, "keys": self.W_k, "values": self.W_v}
        for (name, layer), shape, size in zip(layers.items(), shapes, self._sizes.values(), strict=True):
            layer.build((None, None, check_size(name, shape, size, layer.name)))
        self.W_o.build((None, None, self.num_hiddens))
        for name, parameter in self._heads.parameters().items():
            setattr(self, name, add_parameter(self, name, parameter))

    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        heads, kv = self._heads, self._heads.key_value_count
        return (
            _split(project("queries", self.W_q, queries, "W_q"), heads.count, heads.score_width),
            _split(project("keys", self.W_k, keys, "W_k"), kv, heads.score_width),
            _split(project("values", self.W_v, values, "W_v"), kv, heads.width),
            heads.make_score({name: value_of(getattr(self, name)) for name in heads.parameters()}),
        )

    def _over_heads(self, mask: Any, shape: Shape) -> Any:
        return shared.over_heads(mask, shape)

    def _joined(self, out: Array) -> Array:
        return self.W_o(keras.ops.reshape(out, (*keras.ops.shape(out)[:2], self.num_hiddens)))

    def _out_features(self, values_shape: Shape) -> int | None:
        return self.num_hiddens

    def _heads_shape(self) -> tuple[int, ...]:
        return (self.num_heads,)

    def _own_config(self) -> dict[str, Any]:
        heads = self._heads
        return {
            "num_hiddens": self.num_hiddens,
            "num_heads": self.num_heads,
            "bias": self.bias,
            "score": heads.score,
            "score_hiddens": heads.score_width if heads.score == "additive" else None,
            "num_key_value_heads": heads.key_value_count,
            **self._sizes,
            **serialized(self._settings),
        }


def _split(x: Array, heads: int, width: int) -> Array:
    """(batch, length, heads * width) as (batch, length, head, width): no heads are moved."""
    return keras.ops.reshape(x, (*keras.ops.shape(x)[:2], heads, width))
