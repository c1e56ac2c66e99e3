"""Soft cap: cap * tanh(s / cap) of another score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend, accumulator
from attnscore.core.arguments import check_positive, largest_of
from attnscore.scores.base import Wrapper, check, operations_of
from attnscore.scores.forms import Form, checked_tile, soft_capped


@final
@dataclass(frozen=True, eq=False, repr=False)
class SoftCap(Wrapper):
    """cap * tanh(score / cap): bounded logits, the identity where |score| is far below the cap.

    A cap that the dtype of the scores cannot hold is the identity everywhere.

    Parameters
    ----------
    score : a score or a registered name
    cap : number above 0
        It gets no gradient: an array raises.

    References
    ----------
    Gemma Team (2024), Gemma 2: Improving Open Language Models at a Practical Size.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.full((1, 1), 1e4), np.ones((1, 1)), score=ats.SoftCap(ats.Dot(), cap=50.0))
    array([[50.]])
    """

    score: Any
    cap: float

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        scores = checked_tile(ops, self.score, query, key)
        return soft_capped(ops, scores, float(self.cap))[0] if self._can_bind(ops, query) else scores

    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        return form.capped(float(self.cap)) if self._can_bind(ops, query) else form

    def check(self, dim: int, key_dim: int) -> None:
        check_positive("cap", self.cap, if_array="a cap is not learned; float(cap) makes a number of it")
        check(self.score, dim, key_dim)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return operations_of(self.score, query_len, key_len, dim, key_dim) + 3 * query_len * key_len

    def _can_bind(self, ops: Backend, query: Array) -> bool:
        """Return whether the dtype of the scores holds numbers above the cap."""
        return float(self.cap) <= largest_of(accumulator(ops.dtype(query)))
