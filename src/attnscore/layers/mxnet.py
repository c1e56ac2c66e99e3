"""Attention layers for MXNet: Gluon blocks, with parameters, training mode and serialisation as Gluon has them.

- All are called as ``layer(queries, keys, values, valid_lens=None, mask=None)`` on (batch, length, features), after
  ``mxnet.npx.set_np()`` and ``layer.initialize()``; `attnscore.layers` has the rules of all frameworks.
- Blocks, not hybrid ones: a symbol has no numbers that the kernels could read (``docs/decisions/mxnet.md``).
- Files of Dive into Deep Learning load: names are ``W_q.weight``, ``w_v.weight``.
- Dropout is active under ``autograd.record()`` (or ``train_mode``), as in Gluon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.parameter import DeferredInitializationError

from attnscore import backends
from attnscore.backends.base import Array
from attnscore.errors import DeviceError, DtypeError, FrameworkError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import description, shared
from attnscore.layers.base import BaseAttention, PreparesKeys
from attnscore.layers.description import Layer, Linear, Parameter
from attnscore.layers.documentation import RETURNS_CACHE, Documentation, documented_call
from attnscore.scores.base import with_nonfinite_rows_isolated

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention", "MultiHeadAttention"]

_OPS = backends.load("mxnet")
_documented = Documentation(
    "from mxnet.numpy import ones; from mxnet import npx; npx.set_np()",
    options="""
block
    Arguments of ``gluon.Block``: prefix, params.
""",
    ready="layer.initialize()",
)


# ------------------------------------------------------------------ parameters


class Matrix(gluon.Block):  # type: ignore[misc]  # MXNet has no types
    """A weight (query_size, key_size), the W of a bilinear score; unknown sizes come from the first call."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__()
        self._parameter = parameter
        with self.name_scope():
            start = _Start(parameter)
            self.weight = self.params.get("weight", shape=parameter.sizes, init=start, allow_deferred_init=True)

    def forward(self, queries: Array, keys: Array) -> Array:
        """Return the weight, once it is made and fits the features of queries and keys."""
        try:
            weight = _data(self.weight, queries)
        except DeferredInitializationError:
            self.weight.shape = self._parameter.sized((queries.shape[-1], keys.shape[-1])).shape
            self.weight._finish_deferred_init()
            weight = _data(self.weight, queries)
        _check_operand("queries", queries, weight, "W.weight", axis=0)
        _check_operand("keys", keys, weight, "W.weight", axis=1)
        return weight


class _Start(mx.init.Initializer):  # type: ignore[misc]
    """The starting values of a parameter."""

    def __init__(self, parameter: Parameter) -> None:
        super().__init__()
        self._parameter = parameter

    def _init_weight(self, _: Any, array: Any) -> None:
        bound, start = self._parameter.sized(array.shape).bound, self._parameter.start
        constant = np.asarray(start) if isinstance(start, tuple) else start
        array[:] = mx.np.random.uniform(-bound, bound, size=array.shape) if bound else constant


def _data(parameter: gluon.Parameter, like: Array | None) -> Array:
    """Return the array of a parameter in the context of `like`; one loaded from a file is a legacy array."""
    return parameter.data(None if like is None else like.ctx).as_np_ndarray()


def _check(inputs: dict[str, Any]) -> None:
    """Raise unless the inputs are arrays (batch, length, features) that belong together."""
    shared.check_inputs(_OPS, inputs, mx.np.ndarray, expected="an mx.np.ndarray", hint="mx.np.array(x) makes one")


def _check_operand(name: str, x: Array, weight: Array, owner: str, *, axis: int) -> None:
    """Raise unless the features of `x` fit axis `axis` of a weight, and dtype and context fit too."""
    shared.check_features(name, x.shape[-1], weight.shape[axis], owner)
    if x.ctx != weight.ctx:
        raise DeviceError(message(name, f"an array on {weight.ctx}, where {owner} is", x.ctx))
    _check_dtype(name, x, weight, owner)


def _check_dtype(name: str, x: Array, weight: Array | gluon.Parameter, owner: str) -> None:
    """Raise unless `x` has the dtype of a weight, which may be a parameter that has no array yet."""
    if _OPS.dtype(x) != _OPS.dtype(weight):
        hint = "layer.cast(dtype) and x.astype(dtype) both help"
        raise DtypeError(message(name, f"{_OPS.dtype(weight)}, the dtype of {owner}", _OPS.dtype(x), hint=hint))


# ------------------------------------------------------------------ the call


class Attention(BaseAttention[Array], gluon.Block):  # type: ignore[misc]
    """Base of the layers: their parameters, dropout in training, and the inputs of the last softmax."""

    _ops = _OPS

    def __init__(self, layer: Layer, dropout: float, keep_last: bool, **block: Any) -> None:
        super().__init__(**block)
        self._set_options(layer, dropout, keep_last)
        with self.name_scope():
            for linear in layer.linears:
                options = {"use_bias": linear.bias, "flatten": False, "in_units": linear.size or 0}
                setattr(self, linear.name, gluon.nn.Dense(linear.units, **options))
            for parameter in layer.parameters:
                if parameter.inputs:
                    setattr(self, parameter.name, Matrix(parameter))
                    continue
                # (1,), not (): Gluon saves a parameter without axes, but cannot load it.
                shape = parameter.sizes or (1,)
                setattr(self, parameter.name, self.params.get(parameter.name, shape=shape, init=_Start(parameter)))

    def __call__(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        valid_lens: Any = None,
        mask: Any = None,
        *,
        bias: Array | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Call `forward` with Gluon's hooks; ``gluon.Block`` takes no keywords."""
        return super().__call__(queries, keys, values, valid_lens, mask, bias, cache)

    @documented_call(RETURNS_CACHE)
    def forward(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        valid_lens: Any = None,
        mask: Any = None,
        bias: Array | None = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        if not mx.util.is_np_array():
            expected, hint = "NumPy semantics in Gluon", "mxnet.npx.set_np() once, at the start of a program"
            raise FrameworkError(message("mxnet", expected, "legacy ones", hint=hint))
        keys, linears = self._unprepared(keys)
        inputs = {"queries": queries, "keys": keys, "values": values}
        _check(inputs)
        operands, arguments = self._operands(inputs, linears, valid_lens, mask, bias, cache)
        dropout = self.dropout if autograd.is_training() else 0.0
        out, _, cache = self._attend(operands, arguments, dropout, is_concrete=True)
        return out if cache is None else (out, cache)

    def _project(self, linear: Linear, x: Array) -> Array:
        dense = getattr(self, linear.name)
        try:
            weight = _data(dense.weight, x)
        except DeferredInitializationError:
            _check_dtype(linear.input, x, dense.weight, linear.name)
        else:
            _check_operand(linear.input, x, weight, linear.name, axis=1)
        with _OPS.numeric_scope():
            return with_nonfinite_rows_isolated(_OPS, x, dense)

    def _read(self, part: Linear | Parameter, inputs: Mapping[str, Array]) -> Array:
        attribute, like = getattr(self, part.name), inputs.get("queries")
        if isinstance(part, Linear):
            return self._vector(part, like)
        if part.inputs:
            return attribute(*[inputs[name] for name in part.inputs])
        return _data(attribute, like) if part.shape else _data(attribute, like).reshape(())

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the last call: a copy carries no activations."""
        return {**self.__dict__, "_last": None}


# ------------------------------------------------------------------ the layers


@final
@_documented()
class DotProductAttention(description.DotProductLayer, Attention):
    """Pooling by the dot product of queries and keys, softmax(q . k / sqrt(dim)) v."""


@final
@_documented()
class AdditiveAttention(description.AdditiveLayer, Attention, PreparesKeys[Array]):
    """Pooling by the additive score w_v . tanh(W_q q + W_k k)."""

    def _checked_keys(self, keys: Array, linear: Linear) -> Array:
        _check({"keys": keys, "values": keys})
        return keys


@final
@_documented()
class BilinearAttention(description.BilinearLayer, Attention):
    """Pooling by the bilinear score q . W k."""


@final
@_documented()
class GaussianAttention(description.GaussianLayer, Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2)."""


@final
@_documented()
class MultiHeadAttention(description.MultiHeadLayer, Attention):
    """Pooling in several heads, W_o concat_h(pool_h)."""
