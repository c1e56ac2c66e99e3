"""Temperature: s / T of another score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from attnscore import backends
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base.arguments import check_overflow, largest_of, renamed_argument, warn_renamed
from attnscore.scores.base import Wrapper, learned, multiplied
from attnscore.scores.forms import Form, checked_tile


@final
@dataclass(frozen=True, eq=False, repr=False)
class Temperature(Wrapper):
    """score / T: a temperature T above 1 flattens the weights, one below 1 sharpens them.

    Parameters
    ----------
    score : a score or a registered name
    temperature : number above 0, or array () or (heads,), which gets a gradient
        The inverse of a number has to be one of the dtype that scores are computed in: 2.94e-39 or more in float32.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((1, 4)), np.ones((1, 4)), score=ats.Temperature(ats.Dot(), 2.0))
    array([[2.]])
    """

    score: Any
    temperature: Any
    parameter: ClassVar[str] = "temperature"
    operations_per_score: ClassVar[int] = 1

    @property
    def T(self) -> Any:
        """Former name of `temperature`."""
        warn_renamed("Temperature.T", "Temperature.temperature")
        return self.temperature

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        scores = checked_tile(ops, self.score, query, key)
        divisor = self.temperature
        if backends.is_array(divisor):
            divisor = learned(ops, "temperature", divisor, query, key, scores)
        return scores / divisor

    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        if backends.is_array(self.temperature):
            return multiplied(ops, form, 1 / learned(ops, "temperature", self.temperature, query, form.key, form.query))
        dtype, factor = accumulator(ops.dtype(query)), 1 / float(self.temperature)
        smallest = 1 / largest_of(dtype)  # temperature of which the dtype holds the inverse
        scaled = form.scaled(check_overflow("temperature", self.temperature, dtype, factor, smallest))
        # The product with the inner score's own factor has to be a number of the dtype too.
        scale = getattr(scaled, "scale", 1.0)
        if isinstance(scale, float):
            check_overflow("temperature", self.temperature, dtype, scale, smallest * abs(scale / factor))
        return scaled


Temperature.__init__ = renamed_argument("T", "temperature")(Temperature.__init__)  # type: ignore[method-assign]
