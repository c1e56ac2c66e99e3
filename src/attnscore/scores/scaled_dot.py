"""Scaled dot product: a(q, k) = scale q . k.

Why scale: for independent zero-mean coordinates of unit variance Var(q . k) = dim, so the softmax sharpens with dim and
its gradient vanishes; 1/sqrt(dim) keeps the variance at 1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from attnscore import backends
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base.arguments import check_number, check_overflow, is_number, shown
from attnscore.base.layout import broadcast, may_equal
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.scores.base import Score, check_same_dim, widen, with_nonfinite_rows_isolated
from attnscore.scores.forms import Form, InnerForm


@final
@dataclass(frozen=True, eq=False, repr=False)
class ScaledDot(Score):
    """a(q, k) = scale q . k; without a scale, 1/sqrt(dim).

    Parameters
    ----------
    scale : number, array (heads,), or array that broadcasts to (..., query, key) and is constant along one of the two
        An array gets a gradient: a learned temperature per head.

    References
    ----------
    Vaswani et al. (2017), Attention Is All You Need.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 4)), np.ones((2, 4)), score=ats.ScaledDot())
    array([[2., 2.]])
    """

    scale: Any = None

    def __post_init__(self) -> None:
        if is_number(self.scale):
            check_number("scale", self.scale)

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        scores = ops.matmul(query, ops.matrix_transpose(key))
        return scores * (self._canonical(ops, query, key) if backends.is_array(self.scale) else self._number(query))

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        if not backends.is_array(self.scale):
            scale = self._number(query)
            # Raises where the dtype of sums cannot hold the scale.
            return InnerForm(query, key, scale=check_overflow("scale", scale, accumulator(ops.dtype(query)), scale))
        # An array is multiplied into the operand along which it varies.
        query, key, scale = widen(ops, query, key, self._canonical(ops, query, key))
        if scale.shape[-1] == 1:
            return InnerForm(with_nonfinite_rows_isolated(ops, query, lambda x: x * scale), key)
        return InnerForm(query, with_nonfinite_rows_isolated(ops, key, lambda x: x * ops.matrix_transpose(scale)))

    def check(self, dim: int, key_dim: int) -> None:
        check_same_dim("scaled dot product", dim, key_dim)
        if self.scale is None or backends.is_array(self.scale):
            return
        if not is_number(self.scale):
            got = f"{type(self.scale).__name__} {shown(self.scale)}"
            raise ArgumentError(message("scale", "a number, an array or None", got))
        check_number("scale", self.scale)  # again, as JAX makes a score of a pytree without __post_init__

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        if self.scale is not None and type(self.scale) not in (int, float):
            return None
        return (ScaledDot, type(self.scale), self.scale), ()

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 2 * query_len * key_len * dim + query_len * key_len

    def _number(self, query: Array) -> float:
        return 1 / math.sqrt(max(1, query.shape[-1])) if self.scale is None else float(self.scale)

    def _canonical(self, ops: Backend, query: Array, key: Array) -> Array:
        """Return the scale on the canonical axes (..., head, group, query, key), 1 where it is broadcast."""
        shape = tuple(self.scale.shape)
        heads, groups = max(query.shape[-4], key.shape[-4]), query.shape[-3]
        if len(shape) == 1:
            shape = (*shape, 1, 1)
        elif len(shape) < 3:
            shape = (1,) * (3 - len(shape)) + shape
        if shape[-3] in (1, heads * groups):
            split: tuple[int, ...] = (1, 1) if shape[-3] == 1 else (heads, groups)
            shape = (*shape[:-3], *split, *shape[-2:])
        elif heads * groups == 1 and len(self.scale.shape) > 1:
            # (batch, 1, 1) for inputs without heads, or with one
            shape = (*shape[:-2], 1, 1, *shape[-2:])
        else:
            raise ShapeError(message("scale", f"({heads * groups},) or a shape with heads on axis -3", shape))
        lead = broadcast(tuple(query.shape[:-4]), tuple(key.shape[:-4]))
        target = (*lead, heads, groups, query.shape[-2], key.shape[-2])
        fits = len(shape) <= len(target) and all(
            n == 1 or may_equal(n, full) for n, full in zip(reversed(shape), reversed(target), strict=False)
        )
        if not fits or 1 not in shape[-2:]:
            expected = "an array that broadcasts to (..., query, key) and is constant along one of the two"
            raise ShapeError(message("scale", expected, tuple(self.scale.shape)))
        return ops.reshape(self.scale, shape)
