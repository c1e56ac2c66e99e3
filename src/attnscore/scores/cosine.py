"""Cosine score: a(q, k) = scale q . k / (|q| |k|)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import check_flag, check_number, is_number
from attnscore.scores.base import Score, check_same_dim, widen, with_nonfinite_rows_isolated
from attnscore.scores.forms import Form
from attnscore.scores.scaled_dot import ScaledDot


@final
@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Score):
    """a(q, k) = scale q . k / (|q| |k|); a zero vector scores 0, with gradient 0.

    Parameters
    ----------
    scale : number, or an array as `ScaledDot` takes it: one learned temperature per head; None: 1 / sqrt(dim)
    unit_keys : bool
        The keys are of length 1 already, as `prepare_keys` makes them: the query alone is normalised.

    References
    ----------
    Graves, Wayne, Danihelka (2014), Neural Turing Machines; Henry et al. (2020), Query-Key
    Normalization for Transformers.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.array([[3.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), score=ats.Cosine())
    array([[1., 0., 0.]])
    """

    scale: Any = 1.0
    unit_keys: bool = False

    def __post_init__(self) -> None:
        if is_number(self.scale):
            check_number("scale", self.scale)

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        query, key = widen(ops, query, key)
        return ScaledDot(self.scale).tile(ops, _unit(ops, query), key if self.unit_keys else _unit(ops, key))

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        query, key = widen(ops, query, key)
        key = key if self.unit_keys else self.project_key(ops, key)
        return ScaledDot(self.scale).lower(ops, self.project_query(ops, query), key)

    def project_query(self, ops: Backend, query: Array) -> Array:
        """Return the query of `lower`."""
        return with_nonfinite_rows_isolated(ops, query, lambda x: _unit(ops, x))

    def project_key(self, ops: Backend, key: Array) -> Array:
        """Return the key of `lower`, for keys that are not of length 1 already."""
        return self.project_query(ops, key)

    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Score]:
        if check_flag("unit_keys", self.unit_keys):
            return key, self
        return self.project_key(ops, *widen(ops, key)), dataclasses.replace(self, unit_keys=True)

    def check(self, dim: int, key_dim: int) -> None:
        check_flag("unit_keys", self.unit_keys)
        check_same_dim("cosine", dim, key_dim)
        ScaledDot(self.scale).check(dim, key_dim)

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        if (of_product := ScaledDot(self.scale).signature()) is None:
            return None
        return (Cosine, *of_product, type(self.unit_keys), self.unit_keys), ()

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        # For each number of a vector: a square, an addition, a division.
        vectors = query_len if self.unit_keys else query_len + key_len
        return 2 * query_len * key_len * dim + query_len * key_len + 3 * vectors * dim


def _unit(ops: Backend, x: Array) -> Array:
    """Return x / |x|; zero vectors stay zero."""
    if x.shape[-1] == 0:
        return x
    # Squares of x over its largest entry neither overflow nor underflow. That entry cancels in the result, so no
    # gradient flows through it.
    largest = ops.stop_gradient(ops.max(ops.abs(x), axis=-1, keepdims=True))
    zero = ~ops.any(~ops.equal(x, 0), axis=-1, keepdims=True)
    x = x / ops.where(ops.equal(largest, 0), 1.0, largest)
    squared = ops.sum(x * x, axis=-1, keepdims=True)
    return ops.where(zero, 0.0, x / ops.sqrt(ops.where(ops.equal(squared, 0), 1.0, squared)))
