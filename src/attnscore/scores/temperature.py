"""Temperature: s / T of another score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from attnscore import backends
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base.arguments import check_held, largest_of
from attnscore.scores.base import Wrapper, learned, multiplied
from attnscore.scores.forms import Form, checked_tile


@final
@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Wrapper):
    """score / T: T above 1 flattens the weights, T below 1 sharpens them.

    Parameters
    ----------
    score : a score or a registered name
    T : number above 0, or array () or (heads,), which gets a gradient
        The inverse of a number has to be one of the dtype that scores are computed in: 2.94e-39 or more in float32.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 4)), np.ones((1, 4)), score=ats.Temperature(ats.Dot(), 2.0))
    array([[2.]])
    """

    score: Any
    T: Any
    parameter: ClassVar[str] = "T"
    operations_per_score: ClassVar[int] = 1

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        scores = checked_tile(ops, self.score, query, key)
        return scores / (learned(ops, "T", self.T, query, key, scores) if backends.is_array(self.T) else self.T)

    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        if backends.is_array(self.T):
            return multiplied(ops, form, 1 / learned(ops, "T", self.T, query, form.key, form.query))
        dtype, factor = accumulator(ops.dtype(query)), 1 / float(self.T)
        smallest = 1 / largest_of(dtype)
        scaled = form.scaled(check_held("T", self.T, dtype, factor, smallest))
        # The product with the inner score's own factor has to be a number of the dtype too.
        scale = getattr(scaled, "scale", 1.0)
        if isinstance(scale, float):
            check_held("T", self.T, dtype, scale, smallest * abs(scale / factor))
        return scaled
