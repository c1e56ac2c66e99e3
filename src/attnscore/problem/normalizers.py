"""Normalizers other than the softmax: functions that make the weights of a query from its scores s_j.

- sigmoid: p_j = 1 / (1 + exp(-s_j)), each weight by itself.
- entmax: p_j = max(0, (alpha - 1) s_j - tau)^(1 / (alpha - 1)), with the threshold tau at which the weights sum to 1.
  Most weights are exactly 0. alpha = 2 is the sparsemax; for alpha -> 1 the weights become softmax weights.

A weight is a function of its score and of one number of its query, the threshold. So the output is a plain sum over
the key tiles once the threshold is known. It is found by passes over the key tiles before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import did_you_mean, is_number, shown
from attnscore.errors import ArgumentError, message

Fold = Callable[[Callable[[Any, Array], Any], Any], Any]
"""``fold(body, carry)`` visits the key tiles of a query tile: ``carry = body(carry, scores)``, -inf where masked."""

ONLY_SOFTMAX = "a normalizer other than the softmax"
"""Reason against kernels that compute the softmax alone."""

# From the left Newton's method gains 2 bits a pass at worst; it took at most 12 passes in every case that was tried.
_MAX_PASSES = 64


class Normalizer(ABC):
    """Function from the scores of a query to its weights."""

    threshold_slope: float
    """c in dtau = c sum_j w_j ds_j / sum_j w_j with the slopes w, the derivatives of the weights; 0: no threshold."""

    @abstractmethod
    def threshold(self, ops: Backend, row_max: Array, fold: Fold) -> Array:
        """Return the threshold of each query of a tile; `row_max` is the largest score, 0 for a fully masked query."""

    @abstractmethod
    def weights(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        """Return the weights of scores, 0 where these are -inf."""

    @abstractmethod
    def slopes(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        """Return the derivatives of the weights by the scores, the threshold held fixed."""


@final
@dataclass(frozen=True)
class Sigmoid(Normalizer):
    """Weights that do not compete: p_j = 1 / (1 + exp(-s_j))."""

    threshold_slope = 0.0

    def threshold(self, ops: Backend, row_max: Array, fold: Fold) -> Array:
        return 0.0 * row_max

    def weights(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        return ops.sigmoid(scores)

    def slopes(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        return ops.sigmoid(scores) * ops.sigmoid(-scores)


@final
@dataclass(frozen=True)
class Entmax(Normalizer):
    """Sparse weights: p_j = max(0, (alpha - 1) s_j - tau)^(1 / (alpha - 1)), with tau such that they sum to 1.

    Keys whose score is far below the largest get a weight of exactly 0. Memory is linear in the lengths; the scores
    are computed about 10 times, to find tau.

    Parameters
    ----------
    alpha : number from 1.01 to 2
        The larger, the sparser. 1.5 is `normalizer="entmax15"`, 2 is `normalizer="sparsemax"`; the limit 1 is the
        softmax.

    Raises
    ------
    ArgumentError

    References
    ----------
    Martins and Astudillo (2016), From Softmax to Sparsemax. Peters, Niculae and Martins (2019), Sparse
    Sequence-to-Sequence Models.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> query, key = np.ones((1, 1)), np.array([[1.0], [0.5], [-1.0]])
    >>> out, weights = ats.attend(
    ...     query, key, key, score="dot", normalizer=ats.Entmax(2), return_weights=True
    ... )
    >>> weights
    array([[0.75, 0.25, 0.  ]])
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not is_number(self.alpha) or not 1.01 <= self.alpha <= 2:
            hint = "normalizer='softmax' is the limit of 1" if is_number(self.alpha) and self.alpha < 1.01 else None
            raise ArgumentError(message("alpha", "a number from 1.01 to 2", shown(self.alpha), hint=hint))
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def threshold_slope(self) -> float:  # type: ignore[override]
        """alpha - 1, by which scores are multiplied before the threshold is subtracted."""
        return self.alpha - 1

    def _base(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        """Return max(0, (alpha - 1) (s - row_max) - threshold), at most 1; NaN stays."""
        x = (self.alpha - 1) * (scores - row_max) - threshold
        return ops.where(x < 0, 0.0, x)

    def weights(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        return _power(ops, self._base(ops, scores, row_max, threshold), 1 / (self.alpha - 1))

    def slopes(self, ops: Backend, scores: Array, row_max: Array, threshold: Array) -> Array:
        # d x^r = r x^(r - 1) (alpha - 1) ds with r = 1 / (alpha - 1)
        return _power(ops, self._base(ops, scores, row_max, threshold), 1 / (self.alpha - 1) - 1)

    def threshold(self, ops: Backend, row_max: Array, fold: Fold) -> Array:
        """Find the threshold by Newton's method.

        A weight is x_j^r with the clipped numbers x_j = max(0, (alpha - 1) s_j - tau), r = 1 / (alpha - 1). Their norm
        |x|_r falls with tau and is convex. From the left, where it is 1 or more, Newton's steps never overshoot 1.
        """
        zero = 0.0 * ops.stop_gradient(row_max)

        def newton_step(threshold: Array) -> Array:
            def add(sums: tuple[Array, Array], scores: Array) -> tuple[Array, Array]:
                arguments = (scores, row_max, threshold)
                weights, slopes = self.weights(ops, *arguments), self.slopes(ops, *arguments)
                return (
                    sums[0] + ops.sum(weights, axis=-1, keepdims=True),
                    sums[1] + ops.sum(slopes, axis=-1, keepdims=True),
                )

            total, slope = fold(add, (zero, zero))
            # (|x| - 1) / -(d|x| / dtau); a fully masked query has total = slope = 0.
            return (total - _power(ops, total, 2 - self.alpha)) / ops.where(ops.equal(slope, 0), 1.0, slope)

        def take_step(state: tuple[Array, Array]) -> tuple[Array, Array]:
            step = ops.stop_gradient(newton_step(state[0]))
            return state[0] + step, step

        def has_not_converged(state: tuple[Array, Array]) -> Array:
            is_large = ops.astype(ops.abs(state[1]) > tolerance, ops.dtype(row_max))
            return ops.sum(is_large, axis=tuple(range(len(row_max.shape)))) > 0

        # Two steps follow, and each squares the distance.
        tolerance = 2.0 ** (-29 if ops.dtype(row_max) == "float64" else -15)
        # At a threshold of -1 the weight of the largest score is 1 by itself. A last step of 1 starts the loop.
        threshold = ops.stop_gradient(_repeat(ops, take_step, has_not_converged, (zero - 1.0, zero + 1.0))[0])
        # These are recorded where a framework differentiates the forward. Newton's method doubles the number of correct
        # derivatives too: the first step has the gradient of the threshold, the second also its second derivatives.
        for _ in range(2):
            threshold = threshold + newton_step(threshold)
        return threshold


_NAMED: dict[str, Normalizer | None] = {
    "softmax": None,
    "sigmoid": Sigmoid(),
    "sparsemax": Entmax(2),
    "entmax15": Entmax(1.5),
}


def resolve(x: Any) -> Normalizer | None:
    """Return the normalizer of a call, None for the softmax."""
    if isinstance(x, Normalizer):
        return x
    if not isinstance(x, str) or x not in _NAMED:
        expected = f"one of {', '.join(_NAMED)}, or Entmax(alpha)"
        raise ArgumentError(message("normalizer", expected, shown(x), hint=did_you_mean(x, _NAMED)))
    return _NAMED[x]


def _power(ops: Backend, x: Array, exponent: float) -> Array:
    """Return x^exponent of numbers from 0; 0 where x is 0, for every exponent and in every derivative."""
    if exponent == 1:
        return x
    is_zero = ops.equal(x, 0)
    base = ops.where(is_zero, 1.0, x)
    if exponent == 0:
        power = 0.0 * base + 1.0
    else:
        power = base * base if exponent == 2 else base**exponent
    return ops.where(is_zero, 0.0, power)


def _repeat(ops: Backend, body: Callable[[Any], Any], condition: Callable[[Any], Array], carry: Any) -> Any:
    """Return ``carry = body(carry)`` repeated while ``condition(carry)``, `_MAX_PASSES` times at most."""
    if ops.number(condition(carry)) is None:
        # Not read on the host: a loop of a fixed length, whose last steps do nothing.
        return ops.loop(_MAX_PASSES, lambda _, carry: ops.cond(condition(carry), body, carry), carry)
    for _ in range(_MAX_PASSES):
        if not ops.number(condition(carry)):
            break
        carry = body(carry)
    return carry
