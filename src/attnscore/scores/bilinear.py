"""Bilinear (Luong's "general") score: a(q, k) = q . W k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend
from attnscore.errors import ShapeError, message
from attnscore.scores.base import (
    Pullback,
    Score,
    ScoreGradients,
    per_head,
    per_key_head,
    weight_gradient,
    widen,
    with_nonfinite_rows_isolated,
    zero_isolated_rows,
)
from attnscore.scores.dot import Dot
from attnscore.scores.forms import Form, InnerForm


@final
@dataclass(frozen=True, eq=False, repr=False)
class Bilinear(Score):
    """a(q, k) = q . W k: matrix products alone, for queries and keys of different dimensions.

    Parameters
    ----------
    W : (dim, dim_k), or (heads, dim, dim_k)

    References
    ----------
    Luong, Pham, Manning (2015), Effective Approaches to Attention-based Neural Machine Translation.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 2)), np.ones((3, 5)), score=ats.Bilinear(np.ones((2, 5))))
    array([[10., 10., 10.]])
    """

    W: Any

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        query, weight = widen(ops, query, per_head(ops, "W", self.W, query, key, 2))
        return ops.matmul(ops.matmul(query, weight), ops.matrix_transpose(ops.astype(key, ops.dtype(query))))

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        query, key, weight = widen(ops, query, key, per_head(ops, "W", self.W, query, key, 2))
        return InnerForm(with_nonfinite_rows_isolated(ops, query, lambda x: ops.matmul(x, weight)), key)

    def project(self, ops: Backend, query: Array, key: Array) -> tuple[Array, Array]:
        """Return query and key of `lower` where all are finite and of one dtype, with W for all heads."""
        return ops.matmul(query, self.W), key

    def lower_pullback(self, ops: Backend, query: Array, key: Array) -> tuple[Form, Pullback]:
        def vjp(grads: Mapping[str, Array]) -> ScoreGradients:
            # lower: query @ W
            weight = per_head(ops, "W", self.W, query, key, 2)
            x, grad, weight = widen(ops, query, grads["query"], weight)
            x, grad = zero_isolated_rows(ops, x, grad)
            arrays = {"W": weight_gradient(ops, x, grad, weight.shape, self.W.shape)}
            return ScoreGradients(ops.matmul(grad, ops.matrix_transpose(weight)), grads["key"], arrays)

        return self.lower(ops, query, key), vjp

    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Score]:
        # q . (W k): the query is used as it is.
        shape = getattr(self.W, "shape", None) or (0,)
        self.check(shape[-2:][0], key.shape[-1])
        x, weight = widen(ops, key, per_key_head(ops, "W", self.W, key, 2))
        return with_nonfinite_rows_isolated(ops, x, lambda x: ops.matmul(x, ops.matrix_transpose(weight))), Dot()

    def check(self, dim: int, key_dim: int) -> None:
        shape = tuple(getattr(self.W, "shape", ()))
        if shape[-2:] != (dim, key_dim) or len(shape) > 3:
            raise ShapeError(message("W", f"(dim, dim_k) = ({dim}, {key_dim})", shape or type(self.W).__name__))

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 2 * query_len * dim * key_dim + 2 * query_len * key_len * key_dim
