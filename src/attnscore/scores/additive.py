"""Additive (Bahdanau) score: a(q, k) = w_v . act(W_q q + W_k k + bias)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import check_number, check_overflow
from attnscore.errors import ShapeError, message
from attnscore.scores.activations import activation
from attnscore.scores.base import Score, per_head, projected, widen, with_nonfinite_rows_isolated
from attnscore.scores.forms import AdditiveForm, Form


@final
@dataclass(frozen=True, eq=False, repr=False)
class Additive(Score):
    """a(q, k) = w_v . activation(W_q q + W_k k + bias): a one-hidden-layer MLP on [q; k].

    Query and key may have different dimensions. With a leading axis (heads,) each head has its own parameters.

    Parameters
    ----------
    w_v : (h,)
    W_q : (h, dim), optional
        None: the query is already projected, dim = h.
    W_k : (h, dim_k), optional
    bias : (h,), optional
    activation : {"tanh", "sigmoid", "relu", "leaky_relu", "silu", "gelu"}
    negative_slope : float
        Slope of leaky_relu below 0 (GATv2 uses 0.2).

    References
    ----------
    Bahdanau, Cho, Bengio (2015), Neural Machine Translation by Jointly Learning to Align and Translate.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> score = ats.Additive(np.ones(3), np.zeros((3, 20)), np.zeros((3, 2)))
    >>> ats.attend(np.ones((2, 1, 20)), np.ones((2, 10, 2)), np.ones((2, 10, 4)), score=score).shape
    (2, 1, 4)
    """

    w_v: Any
    W_q: Any = None
    W_k: Any = None
    bias: Any = None
    activation: str = "tanh"
    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        # The defaults are right, and layers make a score at each call.
        if self.activation is not Additive.activation or self.negative_slope is not Additive.negative_slope:
            activation(self.activation, self.negative_slope)
            check_number("negative_slope", self.negative_slope)  # which `activation` checks for leaky_relu alone

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        a, b = self._sides(ops, query, key)
        a, b = ops.pair_axes(a, b)
        hidden = activation(self.activation, self.negative_slope).value(ops, a + b)
        w_v = per_head(ops, "w_v", self.w_v, query, key, 1)
        w_v = ops.expand_dims(ops.expand_dims(w_v, -2), -2) if len(w_v.shape) > 1 else w_v
        return ops.sum(hidden * ops.astype(w_v, ops.dtype(hidden)), axis=-1)

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        w_v = per_head(ops, "w_v", self.w_v, query, key, 1)
        a, b, w = widen(ops, *self._sides(ops, query, key), w_v)
        # Raises where the dtype of sums cannot hold the slope.
        check_overflow("negative_slope", self.negative_slope, ops.dtype(a), float(self.negative_slope))
        return AdditiveForm(a, b, w, activation(self.activation, self.negative_slope))

    def project_query(self, ops: Backend, query: Array) -> Array:
        """Return the query of `lower`, for parameters that all heads share."""
        return _project_query(ops, query, self.W_q, self.bias)

    def project_key(self, ops: Backend, key: Array) -> Array:
        """Return the key of `lower`, for parameters that all heads share."""
        return _project(ops, key, self.W_k)

    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Score]:
        # There is no query yet: W_q gives its dimension.
        shape = getattr(self.w_v if self.W_q is None else self.W_q, "shape", None) or (0,)
        self.check(shape[-1], key.shape[-1])
        if self.W_k is None:
            return key, self
        projected = _project(ops, key, per_head(ops, "W_k", self.W_k, None, key, 2))
        return projected, dataclasses.replace(self, W_k=None)

    def check(self, dim: int, key_dim: int) -> None:
        fields = {name: getattr(self, name) for name in ("w_v", "W_q", "W_k", "bias")}
        if not backends.is_array(self.w_v) or len(self.w_v.shape) == 0:
            got = tuple(self.w_v.shape) if hasattr(self.w_v, "shape") else type(self.w_v).__name__
            raise ShapeError(message("w_v", "an array (h,) or (heads, h)", got))
        hidden = int(self.w_v.shape[-1])
        expected = {
            "W_q": f"(h, dim) = {(hidden, dim)}",
            "W_k": f"(h, dim_k) = {(hidden, key_dim)}",
            "bias": f"({hidden},)",
        }
        for name, shape in expected.items():
            if fields[name] is not None and not backends.is_array(fields[name]):
                raise ShapeError(message(name, f"an array {shape}, or None", type(fields[name]).__name__))
        shapes = {name: tuple(x.shape) for name, x in fields.items() if x is not None}
        for name, size, side in (("W_q", dim, "query"), ("W_k", key_dim, "key")):
            if name in shapes and shapes[name][-2:] != (hidden, size):
                raise ShapeError(message(name, expected[name], shapes[name], shapes=shapes))
            if name not in shapes and size != hidden:
                either = f"an array, or {side} vectors of dimension h = {hidden}"
                raise ShapeError(message(name, either, f"None and {size}", shapes=shapes))
        if shapes.get("bias", (hidden,))[-1:] != (hidden,):
            raise ShapeError(message("bias", f"({hidden},)", shapes["bias"], shapes=shapes))

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        if type(self.activation) is not str or type(self.negative_slope) not in (int, float):
            return None
        projections = (self.W_q, self.W_k, self.bias)
        arrays = [x for x in (self.w_v, *projections) if x is not None]
        axes = [len(getattr(x, "shape", ())) for x in (self.w_v, *projections)]
        # Where a plan projects (`plans.lowered`), it works on the caller's axes, which parameters per head do not fit.
        if len(arrays) > 1 and (axes[0] != 1 or axes[1] > 2 or axes[2] > 2 or axes[3] > 1):
            return None
        numbers = (Additive, self.activation, type(self.negative_slope), self.negative_slope)
        return (*numbers, *(x is None for x in projections)), tuple(arrays)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        hidden = int(self.w_v.shape[-1])
        sides = ((self.W_q, query_len * dim), (self.W_k, key_len * key_dim))
        project = 2 * hidden * sum(entries for weight, entries in sides if weight is not None)
        # 4 for each hidden unit of a pair: the sum, its activation, a multiplication by w_v, an addition.
        return project + 4 * query_len * key_len * hidden

    def _sides(self, ops: Backend, query: Array, key: Array) -> tuple[Array, Array]:
        """Return query and key projected, the bias added to the query; non-finite rows give parameters no gradient."""
        W_q, W_k = (
            None if weight is None else per_head(ops, name, weight, query, key, 2)
            for name, weight in (("W_q", self.W_q), ("W_k", self.W_k))
        )
        bias = None if self.bias is None else ops.expand_dims(per_head(ops, "bias", self.bias, query, key, 1), -2)
        return _project_query(ops, query, W_q, bias), _project(ops, key, W_k)


def _project_query(ops: Backend, query: Array, weight: Array | None, bias: Array | None) -> Array:
    """Return W_q q + bias, without the one that is None; rows that are not finite give parameters no gradient."""
    if bias is None:
        return _project(ops, query, weight)

    def project(x: Array) -> Array:
        projected = x if weight is None else ops.matmul(x, ops.matrix_transpose(weight))
        # Not every framework adds arrays of two dtypes.
        projected, wide = widen(ops, projected, bias)
        return projected + wide

    if weight is not None:
        query, weight = widen(ops, query, weight)
    return with_nonfinite_rows_isolated(ops, query, project, keeps_infinity=True)


def _project(ops: Backend, x: Array, weight: Array | None) -> Array:
    """Return W x, `x` itself where the weight is None; rows that are not finite give it no gradient."""
    if weight is None:
        return x
    x, weight = widen(ops, x, weight)
    return projected(ops, x, ops.matrix_transpose(weight), keeps_infinity=True)
