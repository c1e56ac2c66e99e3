"""Dot product: a(q, k) = q . k."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

from attnscore.backends.base import Array, Backend
from attnscore.scores.base import Score, check_same_dim
from attnscore.scores.forms import Form, InnerForm


@final
@dataclass(frozen=True, eq=False, repr=False)
class Dot(Score):
    """a(q, k) = q . k, without parameters.

    References
    ----------
    Luong, Pham, Manning (2015), Effective Approaches to Attention-based Neural Machine Translation.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 4)), np.ones((2, 4)), score=ats.Dot())
    array([[4., 4.]])
    """

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        return ops.matmul(query, ops.matrix_transpose(key))

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        return InnerForm(query, key)

    def signature(self) -> tuple[Hashable, tuple[Array, ...]]:
        return Dot, ()

    def check(self, dim: int, key_dim: int) -> None:
        check_same_dim("dot", dim, key_dim)
