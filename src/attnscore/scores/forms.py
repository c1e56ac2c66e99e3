"""The forms that scores are lowered to: what a kernel has to know about a score.

- ``InnerForm``: s = scale q' . k' + key_bias + query_bias
- ``AdditiveForm``: s = sum_h w_h act(a_h + b_h)
- ``DistanceForm``: s = -scale |q' - k'|^2, summed directly, for Gaussians that cancel as inner products
- ``TileForm``: any score that only knows how to compute a block of itself

``caps`` come last, in order: (cap, factor) turns s into factor * cap * tanh(s / cap); a cap of
infinity only multiplies.
Every form computes the scores of the rows and keys that it holds; a kernel slices it into tiles with ``part``.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, accumulator, broadcast, may_equal
from attnscore.errors import DtypeError, FrameworkError, ShapeError, message
from attnscore.scores.activations import Activation

Role = Literal["query", "key", "shared"]
PARAMETER = "score."
"""Put before the names of a user's own parameters, which may be called anything."""

FormPullback = Callable[[Array], dict[str, Array]]


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """Interface of all forms. Arrays whose role is query or key have the positions on axis -2."""

    caps: tuple[tuple[float, float], ...] = field(default=(), kw_only=True)
    roles: ClassVar[Mapping[str, Role]] = {}
    keeps_infinity: ClassVar[bool] = False
    """Whether the scores of a row with an infinity are what the definition makes of it: NaN, as for one with a NaN, if
    not. Then a gradient of 0 reaches nothing through `raw`'s pull-back, whatever stands there."""

    @abstractmethod
    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        """Scores before `caps`, and what a gradient on them is on each array (not yet summed over broadcast axes).

        With `visible` (..., query, key), a form that keeps infinity computes masked pairs from zeros.
        """

    @abstractmethod
    def values_per_pair(self) -> int:
        """Numbers held for each (query, key) pair while a tile is computed: what sizes the tiles."""

    def role(self, name: str) -> Role:
        """Whether array `name` belongs to the queries, the keys, or to all pairs."""
        return self.roles[name]

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, those that are None left out."""
        found = {name: getattr(self, name) for name in self.roles}
        return {name: x for name, x in found.items() if x is not None}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Form:
        """The same form over other arrays."""
        return dataclasses.replace(self, **arrays)

    @final
    def part(self, cut: Callable[[Array, Role], Array]) -> Form:
        """The same form over `cut(array, role)` of each array."""
        return self.with_arrays({name: cut(x, self.role(name)) for name, x in self.arrays().items()})

    @final
    def scores(self, ops: Backend) -> Array:
        """(..., query, key) scores of what the form holds."""
        return self.scores_and_pullback(ops)[0]

    @final
    def scores_and_pullback(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        """The scores, and the pull-back of a gradient on them; see `raw`."""
        scores, pullback = self.raw(ops, visible)
        slopes = []
        for cap, factor in self.caps:
            if math.isinf(cap):
                scores, slope = scores * factor, factor
            else:
                scores, bounded = soft_capped(ops, scores, cap, factor)
                slope = factor * (1 - bounded * bounded)
            slopes.append(slope)

        def through_caps(grad: Array) -> dict[str, Array]:
            for slope in reversed(slopes):
                grad = times(ops, grad, slope)
            return pullback(grad)

        return scores, through_caps if slopes else pullback

    def scaled(self, factor: float) -> Form:
        """The same scores times `factor`."""
        return dataclasses.replace(self, caps=(*self.caps, (math.inf, factor)))

    @final
    def capped(self, cap: float) -> Form:
        """cap * tanh(scores / cap)."""
        return dataclasses.replace(self, caps=(*self.caps, (cap, 1.0)))


@final
@dataclass(frozen=True, eq=False)
class InnerForm(Form):
    """s = scale q . k + key_bias + query_bias; biases as columns (..., length, 1)."""

    query: Array
    key: Array
    scale: float = 1.0
    key_bias: Array | None = None
    query_bias: Array | None = None
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key", "key_bias": "key", "query_bias": "query"}

    def values_per_pair(self) -> int:
        return 1

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        query = self.query if self.scale == 1 else self.query * self.scale
        scores = ops.matmul(query, ops.matrix_transpose(self.key))
        if self.key_bias is not None:
            scores = scores + ops.matrix_transpose(self.key_bias)
        if self.query_bias is not None:
            scores = scores + self.query_bias

        def pullback(grad: Array) -> dict[str, Array]:
            grads = {
                "query": ops.matmul(grad, self.key) * self.scale,
                "key": ops.matmul(ops.matrix_transpose(grad), self.query) * self.scale,
            }
            if self.key_bias is not None:
                grads["key_bias"] = ops.matrix_transpose(ops.sum(grad, axis=-2, keepdims=True))
            if self.query_bias is not None:
                grads["query_bias"] = ops.sum(grad, axis=-1, keepdims=True)
            return grads

        return scores, pullback

    def scaled(self, factor: float) -> Form:
        if self.caps or self.key_bias is not None or self.query_bias is not None:
            return super().scaled(factor)
        return dataclasses.replace(self, scale=self.scale * factor)


@final
@dataclass(frozen=True, eq=False)
class AdditiveForm(Form):
    """s = sum_h w_v[h] activation(query[h] + key[h]); w_v is (h,) or (head, group, h)."""

    query: Array
    key: Array
    w_v: Array
    activation: Activation
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key", "w_v": "shared"}
    keeps_infinity = True

    def values_per_pair(self) -> int:
        return max(1, int(self.query.shape[-1]))

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        hidden = ops.expand_dims(self.query, -2) + ops.expand_dims(self.key, -3)
        if visible is not None:
            # Zeros and not only a gradient of 0: an activation's slope at infinity, and the slope of that, may be NaN.
            hidden = ops.where(ops.expand_dims(visible, -1), hidden, 0.0)
        activated = self.activation.value(ops, hidden)
        # (h,) or (head, group, 1, h)
        weight = ops.expand_dims(self.w_v, -2) if len(self.w_v.shape) > 1 else self.w_v
        scores = ops.matmul(activated, ops.expand_dims(weight, -1))[..., 0]

        def pullback(grad: Array) -> dict[str, Array]:
            grad = ops.expand_dims(grad, -1)
            beside = ops.expand_dims(weight, -2) if len(weight.shape) > 1 else weight
            through = times(ops, grad, self.activation.slope(ops, hidden, activated)) * beside
            return {
                "query": ops.sum(through, axis=-2),
                "key": ops.sum(through, axis=-3),
                "w_v": ops.sum(times(ops, grad, activated), axis=(-3, -2)),
            }

        return scores, pullback


@final
@dataclass(frozen=True, eq=False)
class DistanceForm(Form):
    """s = -scale |query - key|^2; scale is a number or (head, group, 1, 1)."""

    query: Array
    key: Array
    scale: Array | float
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key", "scale": "shared"}

    def arrays(self) -> dict[str, Array]:
        found = super().arrays()
        return found if hasattr(self.scale, "shape") else {name: x for name, x in found.items() if name != "scale"}

    def values_per_pair(self) -> int:
        return max(1, int(self.query.shape[-1]))

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        difference = ops.expand_dims(self.query, -2) - ops.expand_dims(self.key, -3)
        squared = ops.sum(difference * difference, axis=-1)

        def pullback(grad: Array) -> dict[str, Array]:
            through = times(ops, ops.expand_dims(grad * (-2 * self.scale), -1), difference)
            grads = {"query": ops.sum(through, axis=-2), "key": -ops.sum(through, axis=-3)}
            if hasattr(self.scale, "shape"):
                grads["scale"] = -times(ops, grad, squared)
            return grads

        return -self.scale * squared, pullback

    def scaled(self, factor: float) -> Form:
        if self.caps or hasattr(self.scale, "shape"):
            # An array stays as it was lowered: its gradient is what the score pulls back.
            return super().scaled(factor)
        return dataclasses.replace(self, scale=self.scale * factor)


@final
@dataclass(frozen=True, eq=False)
class TileForm(Form):
    """A score that computes blocks of itself; its gradient is `tile_gradient`, or the framework's autodiff."""

    score: Any
    query: Array
    key: Array
    parameters: Mapping[str, Array]
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key"}

    def values_per_pair(self) -> int:
        # What the score holds for a pair is unknown; most that are no product hold one value a channel.
        return max(1, int(self.query.shape[-1]))

    def role(self, name: str) -> Role:
        return self.roles.get(name, "shared")

    def arrays(self) -> dict[str, Array]:
        return {"query": self.query, "key": self.key, **self._prefixed(self.parameters)}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Form:
        parameters = {name: arrays.get(PARAMETER + name, x) for name, x in self.parameters.items()}
        sides = {name: x for name, x in arrays.items() if name in self.roles}
        return dataclasses.replace(self, parameters=parameters, **sides)

    @staticmethod
    def _prefixed(parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {PARAMETER + name: x for name, x in parameters.items()}

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        names = list(self.parameters)

        def tile(query: Array, key: Array, *parameters: Array) -> Array:
            return checked_tile(ops, _with(self.score, dict(zip(names, parameters, strict=True))), query, key)

        inputs = (self.query, self.key, *self.parameters.values())
        if hasattr(self.score, "tile_gradient"):
            score = _with(self.score, self.parameters)

            def written(grad: Array) -> dict[str, Array]:
                query, key, parameters = score.tile_gradient(ops, self.query, self.key, grad)
                return {"query": query, "key": key, **self._prefixed(parameters)}

            return tile(*inputs), written

        scores = tile(*inputs)

        def derived(grad: Array) -> dict[str, Array]:
            _, pull = ops.vjp(tile, inputs)
            query, key, *parameters = pull(grad)
            return {"query": query, "key": key, **self._prefixed(dict(zip(names, parameters, strict=True)))}

        return scores, derived


def soft_capped(ops: Backend, scores: Array, cap: float, factor: float = 1.0) -> tuple[Array, Array]:
    """Return factor * cap * tanh(scores / cap), and the tanh."""
    bounded = ops.tanh(scores / cap)
    capped = (factor * cap) * bounded
    limits = np.finfo(accumulator(ops.dtype(scores)))
    if cap > limits.eps / limits.tiny:
        # Quotients of scores that count may be subnormal, and XLA and TensorFlow take those for 0. tanh(x) is x here.
        capped = ops.where(ops.abs(scores) < 1e-9 * cap, scores * factor, capped)
    return capped, bounded


def times(ops: Backend, grad: Array, x: Array | float) -> Array:
    """grad * x, and 0 where grad is 0 and `x` is not finite: a masked pair's may have overflowed, and 0 * inf is NaN.

    A finite `x` is multiplied also where grad is 0: a second derivative asks for it.
    """
    if isinstance(x, float):
        return grad * x
    return grad * ops.where(ops.logical_and(grad == 0, ~ops.isfinite(x)), 0.0, x)


def checked_tile(ops: Backend, score: Any, query: Array, key: Array) -> Array:
    """Return ``score.tile(ops, query, key)``; raise when that is not an array of scores for every query and key.

    Raises
    ------
    ShapeError, DtypeError, FrameworkError
    """
    scores = score.tile(ops, query, key)
    leads = tuple(query.shape[:-2]), tuple(key.shape[:-2])
    wanted = (*(leads[0] if leads[0] == leads[1] else broadcast(*leads)), query.shape[-2], key.shape[-2])
    # The common case, at the cost of three comparisons a tile.
    if type(scores) is type(query) and scores.dtype == query.dtype and _shape_of(scores) == wanted:
        return scores
    owner, shapes = f"tile of {type(score).__name__}", {"query": tuple(query.shape), "key": tuple(key.shape)}
    if not backends.is_array(scores):
        raise FrameworkError(message(owner, "an array of scores", type(scores).__name__, shapes=shapes))
    backends.of({"query": query, owner: scores})
    shape = _shape_of(scores)
    if shape is None or type(scores) is not type(query):
        backends.check_dense(ops, {owner: scores})
    if not ops.is_floating(scores):
        raise DtypeError(message(owner, FLOATING, ops.dtype(scores), shapes=shapes))
    if shape is None or not _fits(shape, wanted, leads):
        heads = max(int(query.shape[-4]), int(key.shape[-4])), int(query.shape[-3])
        raise ShapeError(
            message(
                owner,
                f"scores (*batch, kv head, group, query, key) = {wanted}",
                shape,
                shapes=shapes,
                hint=f"a parameter per head has to be reshaped to (kv heads, groups, 1, 1) = {(*heads, 1, 1)}",
            )
        )
    return scores


def _shape_of(x: Array) -> tuple[Any, ...] | None:
    """Return the shape; None where a TensorFlow graph does not know the number of axes."""
    try:
        return tuple(x.shape)
    except ValueError:
        return None


def _fits(shape: tuple[Any, ...], wanted: tuple[Any, ...], leads: tuple[tuple[Any, ...], tuple[Any, ...]]) -> bool:
    """Whether scores have the shape `wanted`; a leading axis may be 1 where that of query or key is broadcast too."""
    return (
        len(shape) == len(wanted)
        and all(map(may_equal, shape[-2:], wanted[-2:]))
        and all(
            may_equal(n, whole) or (n == 1 and 1 in sides)
            for n, whole, sides in zip(shape, wanted, zip(*leads, strict=True), strict=False)
        )
    )


def _with(score: Any, arrays: Mapping[str, Array]) -> Any:
    return dataclasses.replace(score, **arrays) if arrays else score
