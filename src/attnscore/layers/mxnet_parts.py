"""What the Gluon layers are made of: the last call, parameters that learn their sizes, projections, checks.

- A call is kept as detached inputs of its softmax: it holds no graph, and O(n) memory. MXNet counts no versions of an
  array, so what a caller could write to is copied.
- Rows that hold a NaN or infinity pass a projection without reaching the gradient of its weight, so that what a mask
  hides afterwards reaches nothing.
- A wrong shape, dtype or context is named before MXNet meets it.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.parameter import DeferredInitializationError

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.backends.base import Array
from attnscore.errors import DeviceError, DtypeError, FrameworkError, message
from attnscore.layers import shared
from attnscore.scores import arrays_of
from attnscore.scores.base import with_nonfinite_rows_isolated

_OPS = backends.load("mxnet")


class Attention(gluon.Block):  # type: ignore[misc]  # MXNet has no types
    """What every layer has: dropout in training, and the inputs of its last softmax."""

    def __init__(self, dropout: float, keep_last: bool, prefix: str | None = None, params: Any = None) -> None:
        super().__init__(prefix=prefix, params=params)
        self.dropout = shared.check_probability(dropout)
        self.keep_last = keep_last
        self._last: _Call | None = None

    def __call__(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        """`forward`, with Gluon's hooks; a block of its own takes no keywords."""
        return super().__call__(queries, keys, values, valid_lens, mask)

    @abstractmethod
    def forward(self, queries: Array, keys: Array, values: Array, valid_lens: Any = None, mask: Any = None) -> Array:
        """Attention pooling.

        Parameters
        ----------
        queries : (batch, query, features)
        keys : (batch, key, features)
        values : (batch, key, features)
        valid_lens : (batch,) or (batch, query) whole numbers, optional
        mask : a mask object, or a boolean array broadcastable to (batch, query, key), True = may attend; optional

        Returns
        -------
        out : (batch, query, features of the values, or num_hiddens)

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError, MaskError
        """

    @property
    def attention_weights(self) -> Array:
        """The weights of the last call, before dropout, detached, computed now: (batch, query, key).

        Multi-head: (batch, head, query, key). O(n^2) memory while they are held; the call itself kept its queries and
        keys alone.

        Raises
        ------
        AttnscoreError
            No call has been made, or ``keep_last`` is off.
        """
        return shared.last_call(self._last, self.keep_last).weights()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the last call: a copy carries no activations."""
        return {**self.__dict__, "_last": None}

    def _pool(self, query: Array, key: Array, value: Array, *, own: bool, **arguments: Any) -> Array:
        """`attend` in the mode of ``autograd``, remembered; `own`: nobody else can write to `query` and `key`."""
        out: Array = attend(query, key, value, dropout=self.dropout if autograd.is_training() else 0.0, **arguments)
        self._last = _Call.of(query, key, arguments, own) if self.keep_last else None
        return out


@dataclass(frozen=True, eq=False)
class _Call:
    """The detached inputs of one softmax."""

    query: Array
    key: Array
    arguments: dict[str, Any]

    @classmethod
    def of(cls, query: Array, key: Array, arguments: dict[str, Any], own: bool) -> _Call:
        arguments = dict(arguments)
        with autograd.pause():
            query, key = (x.detach() if own else x.copy() for x in (query, key))
            score = arguments["score"]
            arrays = {name: x.detach().copy() for name, x in arrays_of(score).items()}
            arguments["score"] = dataclasses.replace(score, **arrays)
        if arguments["valid_lens"] is not None:
            arguments["valid_lens"] = np.array(backends.host(arguments["valid_lens"]))
        return cls(query, key, arguments)

    def weights(self) -> Array:
        with autograd.pause():
            return attention_weights(self.query, self.key, **self.arguments)


class Matrix(gluon.Block):  # type: ignore[misc]
    """A weight (query_size, key_size) that is used as it is; sizes that are None are those of the first call."""

    def __init__(self, query_size: int | None, key_size: int | None) -> None:
        super().__init__()
        shared.check_size("query_size", query_size, optional=True)
        shared.check_size("key_size", key_size, optional=True)
        self._given = query_size, key_size
        with self.name_scope():
            shape = (query_size or 0, key_size or 0)
            self.weight = self.params.get("weight", shape=shape, init=_Started(), allow_deferred_init=True)

    def forward(self, queries: Array, keys: Array) -> Array:
        try:
            weight = data_of(self.weight, queries)
        except DeferredInitializationError:
            lengths = zip(self._given, (queries, keys), strict=True)
            self.weight.shape = tuple(given or x.shape[-1] for given, x in lengths)
            self.weight._finish_deferred_init()
            weight = data_of(self.weight, queries)
        check_operand("queries", queries, weight, "W.weight", axis=0)
        check_operand("keys", keys, weight, "W.weight", axis=1)
        return weight


class _Started(mx.init.Initializer):  # type: ignore[misc]
    """Starting values that a parameter's own shape says: those of a bilinear score, unless others are given."""

    def __init__(self, parameter: shared.Parameter | None = None) -> None:
        super().__init__()
        self._parameter = parameter

    def _init_weight(self, _: Any, array: Any) -> None:
        parameter = self._parameter or shared.bilinear_parameter(*array.shape)
        if parameter.bound:
            array[:] = mx.np.random.uniform(-parameter.bound, parameter.bound, size=array.shape)
        else:
            array[:] = parameter.start


def started(parameter: shared.Parameter) -> mx.init.Initializer:
    """What gives a parameter its starting values."""
    return _Started(parameter)


def data_of(parameter: gluon.Parameter, like: Array) -> Array:
    """The numbers of a parameter where `like` lies; those loaded from a file come as a legacy array."""
    return parameter.data(like.ctx).as_np_ndarray()


def number_of(parameter: gluon.Parameter) -> Array:
    """The one number of a parameter (1,)."""
    return parameter.data().as_np_ndarray().reshape(())


def linear(name: str, size: int | None, units: int, *, bias: bool = False) -> gluon.nn.Dense:
    """A projection of vectors of length `size`, or of whatever length comes first when that is None."""
    shared.check_size(name, size, optional=True)
    return gluon.nn.Dense(units, use_bias=bias, flatten=False, in_units=size or 0)


def project(name: str, layer: gluon.nn.Dense, x: Array, owner: str) -> Array:
    """``layer(x)``, with the rows of `x` that hold a NaN or infinity set apart."""
    try:
        weight = data_of(layer.weight, x)
    except DeferredInitializationError:
        pass
    else:
        check_operand(name, x, weight, owner, axis=1)
    with _OPS.numeric_scope():
        return with_nonfinite_rows_isolated(_OPS, x, layer)


def check_inputs(queries: Any, keys: Any, values: Any) -> None:
    """Raise unless the inputs are floating arrays (batch, length, features) that belong together."""
    if not mx.util.is_np_array():
        expected, hint = "NumPy semantics in Gluon", "mxnet.npx.set_np() once, at the start of a program"
        raise FrameworkError(message("mxnet", expected, "legacy ones", hint=hint))
    inputs = {"queries": queries, "keys": keys, "values": values}
    shared.check_inputs(_OPS, inputs, mx.np.ndarray, wanted="an mx.np.ndarray", hint="mx.np.array(x) makes one")


def check_operand(name: str, x: Array, weight: Array, owner: str, *, axis: int) -> None:
    """Raise unless the vectors of `x` fit axis `axis` of a weight, in dtype and context too."""
    shared.check_features(name, x.shape[-1], weight.shape[axis], owner)
    if x.ctx != weight.ctx:
        raise DeviceError(message(name, f"an array on {weight.ctx}, where {owner} is", x.ctx))
    if _OPS.dtype(x) != _OPS.dtype(weight):
        hint = "layer.cast(dtype) and x.astype(dtype) both help"
        raise DtypeError(message(name, f"{_OPS.dtype(weight)}, the dtype of {owner}", _OPS.dtype(x), hint=hint))
