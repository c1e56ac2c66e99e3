"""Wrappers: a bounded or a tempered version of any score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend, accumulator
from attnscore.core.arguments import check_held, check_positive, largest_of
from attnscore.scores.base import Pullback, Score, check, lower, lower_pullback, operations_of
from attnscore.scores.forms import Form, checked_tile, soft_capped

_LEARNED = (
    "a learned temperature is the score's own: ScaledDot(scale=1 / (T * dim**0.5)), Cosine(scale=1 / T) or "
    "Gaussian(bandwidth=T**0.5); float(T) makes a number of it"
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class SoftCap(Score):
    """cap * tanh(score / cap): bounded logits, the identity where |score| is far below the cap.

    A cap that the dtype of the scores cannot hold is the identity everywhere.

    Parameters
    ----------
    score : a score or a registered name
    cap : number above 0
        It gets no gradient: an array is refused.

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
        scores, cap = checked_tile(ops, self.score, query, key), float(self.cap)
        return soft_capped(ops, scores, cap)[0] if self._bounds(ops, query) else scores

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        form = lower(ops, self.score, query, key)
        return form.capped(float(self.cap)) if self._bounds(ops, query) else form

    def lower_pullback(self, ops: Backend, query: Array, key: Array) -> tuple[Form, Pullback]:
        form, pullback = lower_pullback(ops, self.score, query, key)
        return form.capped(float(self.cap)) if self._bounds(ops, query) else form, pullback

    def check(self, dim: int, key_dim: int) -> None:
        check_positive("cap", self.cap, if_array="a cap is not learned; float(cap) makes a number of it")
        check(self.score, dim, key_dim)

    def _bounds(self, ops: Backend, query: Array) -> bool:
        """Whether there are scores above the cap in the dtype that they are computed in."""
        return float(self.cap) <= largest_of(accumulator(ops.dtype(query)))

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return operations_of(self.score, query_len, key_len, dim, key_dim) + 3 * query_len * key_len


@final
@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Score):
    """score / T: T above 1 flattens the weights, T below 1 sharpens them.

    Parameters
    ----------
    score : a score or a registered name
    T : number above 0
        It gets no gradient: an array is refused. A temperature that is learned is a parameter of the score itself:
        ``ScaledDot(scale=1 / (T * dim**0.5))``, ``Cosine(scale=1 / T)``, ``Gaussian(bandwidth=T**0.5)``.
        Its inverse has to be a number of the dtype that scores are computed in: 2.94e-39 or more in float32.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 4)), np.ones((1, 4)), score=ats.Temperature(ats.Dot(), 2.0))
    array([[2.]])
    """

    score: Any
    T: float

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        return checked_tile(ops, self.score, query, key) / self.T

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        return self._scaled(ops, lower(ops, self.score, query, key), query)

    def lower_pullback(self, ops: Backend, query: Array, key: Array) -> tuple[Form, Pullback]:
        form, pullback = lower_pullback(ops, self.score, query, key)
        return self._scaled(ops, form, query), pullback

    def check(self, dim: int, key_dim: int) -> None:
        check_positive("T", self.T, if_array=_LEARNED)
        check(self.score, dim, key_dim)

    def _scaled(self, ops: Backend, form: Form, query: Array) -> Form:
        dtype, factor = accumulator(ops.dtype(query)), 1 / float(self.T)
        smallest = 1 / largest_of(dtype)
        found = form.scaled(check_held("T", self.T, dtype, factor, smallest))
        # Together with the factor of the score inside.
        scale = getattr(found, "scale", 1.0)
        if isinstance(scale, float):
            check_held("T", self.T, dtype, scale, smallest * abs(scale / factor))
        return found

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return operations_of(self.score, query_len, key_len, dim, key_dim) + query_len * key_len
