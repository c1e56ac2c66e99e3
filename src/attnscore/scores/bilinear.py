"""Bilinear (Luong's "general") score: a(q, k) = q . W k."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend
from attnscore.base.layout import broadcast
from attnscore.errors import ShapeError, message
from attnscore.scores.base import Score, per_head, projected, widen
from attnscore.scores.dot import Dot
from attnscore.scores.forms import Form, InnerForm


@final
@dataclass(frozen=True, eq=False, repr=False)
class Bilinear(Score):
    """a(q, k) = q . W k: matrix products alone, for queries and keys of different dimensions.

    A W for all heads is applied to the queries or to the keys, whichever takes fewer operations.

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
        if not self._projects_key(query, key):
            return self.lower_rowwise(ops, query, key)
        query, key, weight = widen(ops, query, key, self.W)
        return InnerForm(query, projected(ops, key, ops.matrix_transpose(weight)))

    def lower_rowwise(self, ops: Backend, query: Array, key: Array) -> Form:
        query, key, weight = widen(ops, query, key, per_head(ops, "W", self.W, query, key, 2))
        return InnerForm(projected(ops, query, weight), key)

    def project_query(self, ops: Backend, query: Array) -> Array:
        """Return the query of `lower` where W is applied to queries, for a W that all heads share."""
        return projected(ops, *widen(ops, query, self.W))

    def project_key(self, ops: Backend, key: Array) -> Array:
        """Return the key of `lower` where W is applied to keys, for a W that all heads share."""
        key, weight = widen(ops, key, self.W)
        return projected(ops, key, ops.matrix_transpose(weight))

    def _projects_key(self, query: Array, key: Array) -> bool:
        """Return whether `lower` applies W to the keys: never a W for each head, nor where a size is unknown."""
        shapes = tuple(query.shape), tuple(key.shape)
        if len(self.W.shape) > 2 or not all(type(n) is int for shape in shapes for n in shape):
            return False
        lead = broadcast(shapes[0][:-2], shapes[1][:-2])
        pairs = math.prod((*lead, shapes[0][-2], shapes[1][-2]))
        queries, keys = (math.prod(shape[:-1]) for shape in shapes)
        of_query, of_key = _operations(queries, keys, pairs, shapes[0][-1], shapes[1][-1])
        return of_key < of_query

    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Score]:
        # q . (W k): the query is used as it is.
        shape = getattr(self.W, "shape", None) or (0,)
        self.check(shape[-2:][0], key.shape[-1])
        x, weight = widen(ops, key, per_head(ops, "W", self.W, None, key, 2))
        return projected(ops, x, ops.matrix_transpose(weight)), Dot()

    def check(self, dim: int, key_dim: int) -> None:
        shape = tuple(getattr(self.W, "shape", ()))
        if shape[-2:] != (dim, key_dim) or len(shape) > 3:
            raise ShapeError(message("W", f"(dim, dim_k) = ({dim}, {key_dim})", shape or type(self.W).__name__))

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        return (Bilinear, (self.W,)) if len(getattr(self.W, "shape", ())) == 2 else None

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 2 * min(_operations(query_len, key_len, query_len * key_len, dim, key_dim))


def _operations(queries: int, keys: int, pairs: int, dim: int, key_dim: int) -> tuple[int, int]:
    """Return the multiply-adds of all scores with W applied to the queries, and with W applied to the keys."""
    return queries * dim * key_dim + pairs * key_dim, keys * dim * key_dim + pairs * dim
