"""Temperature: s / T of another score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend, accumulator
from attnscore.core.arguments import check_held, check_positive, largest_of
from attnscore.scores.base import Wrapper, check, operations_of
from attnscore.scores.forms import Form, checked_tile

_LEARNED = (
    "a learned temperature is the score's own: ScaledDot(scale=1 / (T * dim**0.5)), Cosine(scale=1 / T) or "
    "Gaussian(bandwidth=T**0.5); float(T) makes a number of it"
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Wrapper):
    """score / T: T above 1 flattens the weights, T below 1 sharpens them.

    Parameters
    ----------
    score : a score or a registered name
    T : number above 0
        It gets no gradient: an array raises. A learned temperature is a parameter of the score itself:
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

    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        dtype, factor = accumulator(ops.dtype(query)), 1 / float(self.T)
        smallest = 1 / largest_of(dtype)
        scaled = form.scaled(check_held("T", self.T, dtype, factor, smallest))
        # The product with the inner score's own factor has to be a number of the dtype too.
        scale = getattr(scaled, "scale", 1.0)
        if isinstance(scale, float):
            check_held("T", self.T, dtype, scale, smallest * abs(scale / factor))
        return scaled

    def check(self, dim: int, key_dim: int) -> None:
        check_positive("T", self.T, if_array=_LEARNED)
        check(self.score, dim, key_dim)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return operations_of(self.score, query_len, key_len, dim, key_dim) + query_len * key_len
