"""Soft cap: cap * tanh(s / cap) of another score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from attnscore import backends
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base.arguments import largest_of
from attnscore.scores.base import Wrapper, learned, multiplied
from attnscore.scores.forms import Form, checked_tile, soft_capped


@final
@dataclass(frozen=True, eq=False, repr=False)
class SoftCap(Wrapper):
    """cap * tanh(score / cap): bounded logits, the identity where |score| is far below the cap.

    A cap that the dtype of the scores cannot hold is the identity everywhere.

    Parameters
    ----------
    score : a score or a registered name
    cap : number above 0, or array () or (heads,), which gets a gradient
        The native kernel takes a number; with an array the streaming kernel runs.

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
    cap: Any
    parameter: ClassVar[str] = "cap"
    operations_per_score: ClassVar[int] = 3  # a division, a tanh, a multiplication

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        scores = checked_tile(ops, self.score, query, key)
        if backends.is_array(self.cap):
            cap = learned(ops, "cap", self.cap, query, key, scores)
            return soft_capped(ops, scores / cap, 1.0)[0] * cap
        return soft_capped(ops, scores, float(self.cap))[0] if self._can_bind(ops, query) else scores

    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        if not backends.is_array(self.cap):
            return form.capped(float(self.cap)) if self._can_bind(ops, query) else form
        cap = learned(ops, "cap", self.cap, query, form.key, form.query)
        return multiplied(ops, multiplied(ops, form, 1 / cap).capped(1.0), cap)

    def _can_bind(self, ops: Backend, query: Array) -> bool:
        """Return whether the dtype of the scores holds numbers above the cap."""
        return float(self.cap) <= largest_of(accumulator(ops.dtype(query)))
