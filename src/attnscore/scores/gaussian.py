"""Gaussian kernel: a(q, k) = -|q - k|^2 / (2 bandwidth^2), Nadaraya-Watson regression as attention pooling.

Expanded, this is an inner product, which cancels where |q|^2 and |k|^2 are much larger than |q - k|^2. So it is lowered
to an inner product only where the norms are small, about the origin or about the mean key, and where that saves more
than computing the norms costs; otherwise the squared differences are summed directly.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

from attnscore import backends
from attnscore.backends import native
from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.base.arguments import check_overflow, is_number, largest_of
from attnscore.base.layout import broadcast, is_unknown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.scores.base import (
    Score,
    check_all_positive,
    check_same_dim,
    learned,
    per_head,
    widen,
    with_nonfinite_rows_isolated,
)
from attnscore.scores.forms import DistanceForm, Form, InnerForm

# Largest |x|^2 / (2 bandwidth^2) at which the inner product is accurate: its terms are then at most 16 to 64, so a
# score in float32 has an error of a few 1e-6. Without this bound it was 700 to 10^6 times the direct sum's error,
# measured on x in 0..5 with bandwidth 0.1 and on years with bandwidth 1.
INNER_LIMIT = 16.0


@final
@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Score):
    """a(q, k) = -|q - k|^2 / (2 bandwidth^2), or -sum_c ((q_c - k_c) / bandwidth_c)^2 / 2.

    Parameters
    ----------
    bandwidth : number above 0, or array () or (heads,), or (1, dim) or (heads, dim), which gets a gradient
        In the units of query and key; the last two have one for each dimension. The inverse of a number's square has to
        be a number of the dtype that scores are computed in: 5.42e-20 or more in float32.

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

    def __post_init__(self) -> None:
        if is_number(self.bandwidth):
            check_all_positive("bandwidth", self.bandwidth)
            if self.bandwidth * self.bandwidth == 0:
                raise ArgumentError(message("bandwidth", "a finite number above 0 whose square is too", self.bandwidth))

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        query, key = self._in_bandwidths(ops, query, key)
        scale = self._scale(ops, query, key)
        query, key = ops.pair_axes(query, key)
        difference = query - key
        return -scale * ops.sum(difference * difference, axis=-1)

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        form = self.lower_rowwise(ops, query, key)
        if not backends.is_array(self.bandwidth):
            # The VJP multiplies by twice the scale, 1 / bandwidth^2, which the dtype has to hold.
            dtype = ops.dtype(form.query)
            check_overflow("bandwidth", self.bandwidth, dtype, 2 * form.scale, 1 / math.sqrt(largest_of(dtype)))
        inner = as_product(ops, form) if _is_inner_faster(ops, form.query, form.key) else None
        return form if inner is None else inner

    def lower_rowwise(self, ops: Backend, query: Array, key: Array) -> DistanceForm:
        # An inner product has the centre of all keys subtracted, and suits some norms only.
        query, key = self._in_bandwidths(ops, *widen(ops, query, key))
        return DistanceForm(query, key, self._scale(ops, query, key))

    def check(self, dim: int, key_dim: int) -> None:
        check_same_dim("Gaussian", dim, key_dim)
        check_all_positive("bandwidth", self.bandwidth)
        shape = tuple(getattr(self.bandwidth, "shape", ()))
        if len(shape) > 2 or (len(shape) == 2 and shape[1] != dim):
            expected = f"a number, () or (heads,), or (1, dim) or (heads, dim) with dim = {dim}"
            raise ShapeError(message("bandwidth", expected, shape))

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        if getattr(self.bandwidth, "shape", None) == ():
            return (Gaussian,), (self.bandwidth,)
        return ((Gaussian, type(self.bandwidth), self.bandwidth), ()) if type(self.bandwidth) in (int, float) else None

    def reads_values(self, ops: Backend, query: Array, key: Array) -> bool:
        """Return whether the values of query and key decide to which form `lower` lowers the score."""
        # `as_product` takes a number as scale, no array.
        scale_is_number = self._is_per_dim() or not backends.is_array(self.bandwidth)
        return scale_is_number and _is_inner_faster(ops, query, key)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        return 3 * query_len * key_len * dim  # a subtraction, a square, an addition

    def _is_per_dim(self) -> bool:
        """Return whether each dimension has a bandwidth: bandwidths then divide the vectors, and the scale is 1/2."""
        return len(getattr(self.bandwidth, "shape", ())) == 2

    def _in_bandwidths(self, ops: Backend, query: Array, key: Array) -> tuple[Array, Array]:
        """Return query and key over the bandwidth of each dimension; unchanged where one serves all dimensions."""
        if not self._is_per_dim():
            return query, key
        bandwidth = per_head(ops, "bandwidth", ops.expand_dims(self.bandwidth, -2), query, key, 2)
        query, key, bandwidth = widen(ops, query, key, bandwidth)
        # Not x / bandwidth: for a huge x of a masked key, that is infinite in the gradient of the bandwidth.
        factor = 1.0 / bandwidth
        query, key = (with_nonfinite_rows_isolated(ops, x, lambda x: x * factor) for x in (query, key))
        return query, key

    def _scale(self, ops: Backend, query: Array, key: Array) -> Any:
        """Return 1 / (2 bandwidth^2): a float, or an array where the bandwidth is one."""
        if self._is_per_dim() or not backends.is_array(self.bandwidth):
            return scale_of(1.0 if self._is_per_dim() else float(self.bandwidth))
        return scale_of(learned(ops, "bandwidth", self.bandwidth, query, key, key))


def scale_of(bandwidth: Any) -> Any:
    """Return the factor of the negative squared distance, 1 / (2 bandwidth^2)."""
    return 0.5 / (bandwidth * bandwidth)


def bandwidth_gradient(bandwidth: Any, grad_scale: Any) -> Any:
    """Return the gradient of the bandwidth from the gradient of its `scale_of`."""
    return grad_scale * -(bandwidth**-3)


def _is_inner_faster(ops: Backend, query: Array, key: Array) -> bool:
    """Return whether the inner product saves more time than computing and checking the norms takes."""
    shapes = tuple(query.shape), tuple(key.shape)
    if any(is_unknown(n) for shape in shapes for n in shape):
        return False
    lead = broadcast(shapes[0][:-2], shapes[1][:-2])
    terms = math.prod((*lead, shapes[0][-2], *shapes[1][-2:]))
    elements = sum(math.prod(shape) for shape in shapes)
    if native.module is not None and ops.has_cpu_buffer(query) and ops.has_cpu_buffer(key):
        return bool(terms > thresholds.INNER_TERMS * (elements + thresholds.INNER_OVERHEAD))
    if ops.is_accelerated(query):
        # Reading the largest norm waits for all work on the device.
        return bool(terms > thresholds.ACCELERATOR_INNER_TERMS)
    # In the framework's own operations the direct sum makes several passes over an array of its terms.
    return bool(terms > elements)


def as_product(ops: Backend, form: DistanceForm) -> InnerForm | None:
    """Return a distance as an inner product, the squared norms as biases; None where it would cancel.

    None also for a scale that is an array, as `InnerForm` takes a number, and for norms that the host cannot read.
    """
    query, key, scale = form.query, form.key, form.scale
    if backends.is_array(scale):
        return None
    norms, largest = _norms(ops, query, key)
    if not math.isfinite(largest):
        return None
    if not largest * scale < INNER_LIMIT:
        # The score does not depend on the centre, so no gradient flows through it. One centre serves all batch rows and
        # heads: one for each would enlarge a query or key that broadcasts.
        detached = ops.stop_gradient(key)
        centre = ops.sum(detached, axis=tuple(range(len(key.shape) - 1))) / math.prod(key.shape[:-1])
        # A vector whose norm exceeds the norm of the centre by more than the limit is too far from the centre as well.
        radius = math.sqrt(INNER_LIMIT / scale) + math.sqrt(ops.number(ops.sum(centre * centre, axis=-1)) or 0.0)
        if not math.sqrt(largest) < radius:
            return None
        query, key = query - centre, key - centre
        norms, largest = _norms(ops, query, key)
        if not largest * scale < INNER_LIMIT:
            return None
    query_bias, key_bias = (x * -scale for x in norms)
    return InnerForm(query, key, scale=2 * scale, query_bias=query_bias, key_bias=key_bias)


def _norms(ops: Backend, query: Array, key: Array) -> tuple[list[Array], float]:
    """Return the squared norms of all queries and keys, and the largest of them: NaN where the host cannot read it."""
    norms = [ops.sum(x * x, axis=-1, keepdims=True) for x in (query, key)]
    largest = [
        0.0 if 0 in ops.shape(x) else ops.number(ops.max(ops.reshape(ops.stop_gradient(x), (-1,)), axis=0))
        for x in norms
    ]
    values = [math.nan if x is None else x for x in largest]
    # NaN compares false with every limit, which selects the direct form.
    return norms, math.nan if any(map(math.isnan, values)) else max(values)
