"""Gaussian kernel: a(q, k) = -|q - k|^2 / (2 bandwidth^2), Nadaraya-Watson regression as attention pooling.

On paper this is an inner product, and as one it cancels: |q|^2 and |k|^2 may dwarf their difference. It is lowered to
an inner product, centred on the mean key, only where the norms left over are small; otherwise the squared differences
are summed directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from attnscore import frameworks
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.frameworks.contract import Array, Framework, is_unknown, sum_to
from attnscore.scoring.contract import (
    Pullback,
    Score,
    ScoreGradients,
    per_head,
    require_positive,
    require_same_dim,
    widen,
)
from attnscore.scoring.forms import DistanceForm, Form, InnerForm

# Largest |x|^2 / (2 bandwidth^2) at which the inner product keeps its digits: its terms are then at most 16 to 64,
# so float32 leaves an error of a few 1e-6 in a score. Without this bound 700 to 10^6 times the direct form's error was
# measured on x in 0..5 with bandwidth 0.1 and on years with bandwidth 1.
INNER_LIMIT = 16.0


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Score):
    """a(q, k) = -|q - k|^2 / (2 bandwidth^2).

    Parameters
    ----------
    bandwidth : number above 0, or array () or (heads,), which gets a gradient
        In the units of query and key.

    References
    ----------
    Nadaraya (1964), On Estimating Regression; Watson (1964), Smooth Regression Analysis.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.zeros((1, 1)), np.array([[1.0], [2.0], [3.0]]), score=ats.Gaussian())
    array([[-0.5, -2. , -4.5]])
    """

    bandwidth: Any = 1.0

    def tile(self, ops: Framework, query: Array, key: Array) -> Array:
        difference = ops.expand_dims(query, -2) - ops.expand_dims(key, -3)
        return -self._scale(ops, query, key) * ops.sum(difference * difference, axis=-1)

    def lower(self, ops: Framework, query: Array, key: Array) -> Form:
        query, key = widen(ops, query, key)
        scale = self._scale(ops, query, key)
        if hasattr(scale, "shape") or 0 in query.shape or 0 in key.shape:
            return DistanceForm(query, key, scale)
        centred = self._centred(ops, query, key, scale)
        if centred is None:
            return DistanceForm(query, key, scale)
        query, key = centred
        norms = [ops.sum(x * x, axis=-1, keepdims=True) * -scale for x in centred]
        return InnerForm(query, key, scale=2 * scale, query_bias=norms[0], key_bias=norms[1])

    def lower_pullback(self, ops: Framework, query: Array, key: Array) -> tuple[Form, Pullback]:
        form = self.lower(ops, query, key)

        def pullback(grads: Any) -> ScoreGradients:
            if isinstance(form, InnerForm):
                # -scale * sum(x * x)
                fold = form.scale
                query_grad, key_grad = (
                    grads[name] - fold * side * grads[f"{name}_bias"]
                    for name, side in (("query", form.query), ("key", form.key))
                )
                return ScoreGradients(query_grad, key_grad, {})
            arrays = {}
            if frameworks.is_array(self.bandwidth):
                # 1 / (2 bandwidth^2)
                placed = self._placed(ops, query, key)
                arrays["bandwidth"] = ops.reshape(
                    sum_to(ops, grads["scale"], placed.shape) * -(placed**-3), self.bandwidth.shape
                )
            return ScoreGradients(grads["query"], grads["key"], arrays)

        return form, pullback

    def check(self, dim: int, key_dim: int) -> None:
        require_same_dim("Gaussian", dim, key_dim)
        require_positive("bandwidth", self.bandwidth)
        if not frameworks.is_array(self.bandwidth) and self.bandwidth * self.bandwidth == 0:
            raise ArgumentError(message("bandwidth", "a number above 0 whose square is too", self.bandwidth))
        if len(getattr(self.bandwidth, "shape", ())) > 1:
            raise ShapeError(message("bandwidth", "a number, () or (heads,)", tuple(self.bandwidth.shape)))

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 3 * query_len * key_len * dim

    def _placed(self, ops: Framework, query: Array, key: Array) -> Array:
        bandwidth = ops.reshape(self.bandwidth, (*self.bandwidth.shape, 1, 1))
        return per_head(ops, "bandwidth", bandwidth, query, key, 2)

    def _scale(self, ops: Framework, query: Array, key: Array) -> Any:
        if not frameworks.is_array(self.bandwidth):
            return 0.5 / (float(self.bandwidth) * float(self.bandwidth))
        return 0.5 / (widen(ops, self._placed(ops, query, key), key)[0]) ** 2

    def _centred(self, ops: Framework, query: Array, key: Array, scale: float) -> tuple[Array, Array] | None:
        """Query and key about the mean key, where the inner product is then accurate; otherwise None."""
        # The score does not change with the centre, so no gradient flows through it.
        # One centre for all batches and heads: one for each would widen a query or key that broadcasts.
        flat = ops.reshape(ops.stop_gradient(key), (-1, key.shape[-1]))
        if is_unknown(flat.shape[0]):
            return None
        centre = ops.sum(flat, axis=0) / flat.shape[0]
        query, key = query - centre, key - centre
        for x in (query, key):
            squares = ops.stop_gradient(ops.sum(x * x, axis=-1))
            largest = ops.number(ops.max(ops.reshape(squares, (-1,)), axis=0))
            # A NaN or an infinity compares false and takes the direct form.
            if largest is None or not largest * scale < INNER_LIMIT:
                return None
        return query, key
