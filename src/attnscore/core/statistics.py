"""AttentionStats: what one pass knows about the softmax of each row."""

from __future__ import annotations

from typing import NamedTuple

from attnscore import backends
from attnscore.backends.base import Array
from attnscore.core.arguments import is_number, shown
from attnscore.errors import ArgumentError, message


class AttentionStats(NamedTuple):
    """Statistics of each row of scores and weights; a field that was not asked for is None.

    They describe the scores after temperature, cap and bias, and the weights before dropout. Each field has the shape
    of the output without its last axis, in at least float32. A row that sees no key: `log_sum_exp` (without a sink) and
    `max_score` are -inf, all others 0.

    Attributes
    ----------
    log_sum_exp : log of the softmax's denominator, the sink in it; differentiable
    max_score : largest visible score
    mean_score, var_score : mean and variance of the visible scores (divided by their number)
    entropy : -sum p log p in nats, of keys and sink together; from 0 (one key has it all) to log(number of keys);
        differentiable
    max_weight : largest weight
    sum_sq_weights : sum of squared weights, 1 when one key has it all
    sum_weights : 1, below 1 with a sink, 0 when nothing is visible

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> _, stats = ats.attend(np.zeros((1, 2)), np.ones((4, 2)), np.ones((4, 3)), return_stats=True)
    >>> print(stats.effective_keys().round(6), stats.max_weight)
    [4.] [0.25]
    """

    log_sum_exp: Array = None
    max_score: Array = None
    mean_score: Array = None
    var_score: Array = None
    entropy: Array = None
    max_weight: Array = None
    sum_sq_weights: Array = None
    sum_weights: Array = None

    def _need(self, *names: str) -> list[Array]:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise ArgumentError(message("return_stats", f"the statistics {', '.join(names)}", f"none of {missing}"))
        return [getattr(self, name) for name in names]

    def jacobian_trace(self) -> Array:
        """Trace of the softmax Jacobian diag(p) - p p^T: sum p - sum p^2. Near 0 the softmax passes no gradient."""
        total, squares = self._need("sum_weights", "sum_sq_weights")
        return total - squares

    def effective_keys(self) -> Array:
        """exp(entropy): over how many keys the weights are spread, as if evenly."""
        (entropy,) = self._need("entropy")
        return backends.of({"entropy": entropy}).exp(entropy)

    def saturated(self, threshold: float = 0.99) -> Array:
        """Whether a row's largest weight is at least `threshold`."""
        if not is_number(threshold) or not 0 < threshold <= 1:
            raise ArgumentError(message("threshold", "a number in (0, 1]", shown(threshold)))
        (weight,) = self._need("max_weight")
        return weight >= threshold

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean, smallest and largest of every statistic over the rows that see a key."""
        (total,) = self._need("sum_weights")
        ops = backends.of({"sum_weights": total})
        alive = ops.host(total)
        found: dict[str, dict[str, float]] = {}
        for name in self._fields:
            values = getattr(self, name)
            if values is None or alive is None:
                continue
            rows = ops.host(values)
            rows = rows[alive != 0] if rows is not None else None
            if rows is not None and rows.size:
                found[name] = {"mean": float(rows.mean()), "min": float(rows.min()), "max": float(rows.max())}
        return found
