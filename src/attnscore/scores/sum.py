"""Sum: a(q, k) = sum(q + k), the score that cannot attend.

sum(q + k) = sum(q) + sum(k): the query adds the same number to all of its scores, which the softmax cancels, so
every query gets the same weights. It answers "why not simply add query and key?".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from attnscore.backends.base import Array, Backend
from attnscore.scores.base import Score, check_same_dim, widen
from attnscore.scores.forms import Form, InnerForm


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sum(Score):
    """a(q, k) = sum(q + k): every query gets the same weights.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> weights = ats.attention_weights(np.array([[0.0], [5.0]]), np.array([[1.0], [2.0]]), score=ats.Sum())
    >>> bool(np.allclose(weights[0], weights[1]))
    True
    """

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        return ops.sum(query, axis=-1, keepdims=True) + ops.matrix_transpose(ops.sum(key, axis=-1, keepdims=True))

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        query, key = widen(ops, query, key)
        sums = ops.sum(query, axis=-1, keepdims=True), ops.sum(key, axis=-1, keepdims=True)
        # [sum(q), 1] . [1, sum(k)]. Where a sum is infinite, 0 * x would be NaN.
        ones = [0 * ops.where(ops.isfinite(x), x, 0.0) + 1 for x in sums]
        return InnerForm(ops.concat((sums[0], ones[0]), -1), ops.concat((ones[1], sums[1]), -1))

    def check(self, dim: int, key_dim: int) -> None:
        check_same_dim("sum", dim, key_dim)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return (query_len + key_len) * dim + query_len * key_len
