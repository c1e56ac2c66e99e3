"""Lowered forms of scores: all that a kernel reads of a score.

- ``InnerForm``: s = scale q' . k' + key_bias + query_bias
- ``AdditiveForm``: s = sum_h w_h act(a_h + b_h)
- ``DistanceForm``: s = -scale |q' - k'|^2, summed directly, for Gaussians that cancel as inner products
- ``TileForm``: any score that has only its definition, ``tile``
- ``SumForm``: the sum of other forms' scores, with learned factors that none of their arrays can hold

``caps`` apply last, in order: (cap, factor) maps s to factor * cap * tanh(s / cap); an infinite cap only multiplies.
Every form computes the scores of the queries and keys that it holds; a kernel slices it into tiles with ``part``.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import numpy as np

from attnscore import backends
from attnscore.backends import tape
from attnscore.backends.base import FLOATING, Array, Backend, accumulator, sum_to
from attnscore.base.layout import broadcast, may_equal
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, ShapeError, message
from attnscore.scores.activations import Activation

Role = Literal["query", "key", "shared"]
PARAMETER = "score."
"""Prefix of the parameters of a custom score, whose names may be names of other arrays too."""

FormPullback = Callable[[Array], dict[str, Array]]
"""VJP of a form: from a gradient of the scores to gradients of its arrays, by name."""


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """Interface of all forms. Arrays whose role is query or key have the positions on axis -2."""

    query: Array
    key: Array
    caps: tuple[tuple[float, float], ...] = field(default=(), kw_only=True)
    roles: ClassVar[Mapping[str, Role]] = {}
    keeps_infinity: ClassVar[bool] = False
    """Whether a row with an infinity has the scores of the definition; otherwise they are NaN, as for a row with a NaN.
    If it has, the VJP of `raw` maps a gradient of 0 to 0 whatever the row holds."""

    @abstractmethod
    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        """Return the scores before `caps` and their VJP, whose gradients are not yet summed over broadcast axes.

        With `visible` (..., query, key), a form that keeps infinity computes masked pairs from zeros.
        """

    def values_per_pair(self) -> int:
        """Return how many values a pair takes while a tile is computed, which limits its size: one for each channel."""
        return max(1, int(self.query.shape[-1]))

    def role(self, name: str) -> Role:
        """Return whether array `name` has the query axis, the key axis or neither (shared)."""
        return self.roles[name]

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that are not None, by name."""
        return {name: x for name in self.roles if (x := getattr(self, name)) is not None}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Form:
        """Return the same form over other arrays."""
        return dataclasses.replace(self, **arrays)

    @final
    def part(self, cut: Callable[[Array, Role], Array]) -> Form:
        """Return the same form over ``cut(array, role)`` of each array."""
        return self.with_arrays({name: cut(x, self.role(name)) for name, x in self.arrays().items()})

    @final
    def scores_and_pullback(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        """Return the scores (..., query, key) after `caps`, and their VJP; see `raw`."""
        scores, raw_vjp = self.raw(ops, visible)
        slopes = []
        for cap, factor in self.caps:
            if math.isinf(cap):
                scores, slope = scores * factor, factor
            else:
                scores, bounded = soft_capped(ops, scores, cap, factor)
                slope = factor * (1 - bounded * bounded)
            slopes.append(slope)

        def vjp(grad: Array) -> dict[str, Array]:
            for slope in reversed(slopes):
                grad = times(ops, grad, slope)
            return raw_vjp(grad)

        return scores, vjp if slopes else raw_vjp

    def scaled(self, factor: float) -> Form:
        """Return the form of ``factor * scores``."""
        return dataclasses.replace(self, caps=(*self.caps, (math.inf, factor)))

    @final
    def capped(self, cap: float) -> Form:
        """Return the form of ``cap * tanh(scores / cap)``."""
        return dataclasses.replace(self, caps=(*self.caps, (cap, 1.0)))


@final
@dataclass(frozen=True, eq=False)
class InnerForm(Form):
    """s = scale q . k + key_bias + query_bias; biases as columns (..., length, 1)."""

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

        def vjp(grad: Array) -> dict[str, Array]:
            grads = {
                "query": ops.matmul(grad, self.key) * self.scale,
                "key": ops.matmul(ops.matrix_transpose(grad), query),
            }
            if self.key_bias is not None:
                grads["key_bias"] = ops.matrix_transpose(ops.sum(grad, axis=-2, keepdims=True))
            if self.query_bias is not None:
                grads["query_bias"] = ops.sum(grad, axis=-1, keepdims=True)
            return grads

        return scores, vjp

    def scaled(self, factor: float) -> Form:
        if self.caps or self.key_bias is not None or self.query_bias is not None:
            return super().scaled(factor)
        return dataclasses.replace(self, scale=self.scale * factor)


@final
@dataclass(frozen=True, eq=False)
class AdditiveForm(Form):
    """s = sum_h w_v[h] activation(query[h] + key[h]); w_v is (h,) or (head, group, h)."""

    w_v: Array
    activation: Activation
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key", "w_v": "shared"}
    keeps_infinity = True

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        query, key = ops.pair_axes(self.query, self.key)
        hidden = query + key
        if visible is not None:
            # A gradient of 0 is not enough: an activation's first and second derivatives at infinity may be NaN.
            hidden = ops.where(ops.expand_dims(visible, -1), hidden, 0.0)
        activated = self.activation.value(ops, hidden)
        # (h,) or (head, group, 1, h)
        weight = ops.expand_dims(self.w_v, -2) if len(self.w_v.shape) > 1 else self.w_v
        # Not [..., 0]: TensorFlow Lite takes no slice of six axes.
        scores = ops.reshape(ops.matmul(activated, ops.expand_dims(weight, -1)), ops.shape(activated)[:-1])

        def vjp(grad: Array) -> dict[str, Array]:
            grad = ops.expand_dims(grad, -1)
            per_pair = ops.expand_dims(weight, -2) if len(weight.shape) > 1 else weight
            hidden_grad = times(ops, grad, self.activation.slope(ops, hidden, activated)) * per_pair
            return {
                "query": ops.sum(hidden_grad, axis=-2),
                "key": ops.sum(hidden_grad, axis=-3),
                "w_v": ops.sum(times(ops, grad, activated), axis=(-3, -2)),
            }

        return scores, vjp


@final
@dataclass(frozen=True, eq=False)
class DistanceForm(Form):
    """s = -scale |query - key|^2; scale is a number or (head, group, 1, 1)."""

    scale: Array | float
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key", "scale": "shared"}

    def arrays(self) -> dict[str, Array]:
        return {name: x for name, x in super().arrays().items() if hasattr(x, "shape")}

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        # `visible` is for forms in which an infinite operand gives a finite score.
        query, key = ops.pair_axes(self.query, self.key)
        difference = query - key
        squared = ops.sum(difference * difference, axis=-1)

        def vjp(grad: Array) -> dict[str, Array]:
            difference_grad = times(ops, ops.expand_dims(grad * (-2 * self.scale), -1), difference)
            grads = {"query": ops.sum(difference_grad, axis=-2), "key": -ops.sum(difference_grad, axis=-3)}
            if hasattr(self.scale, "shape"):
                grads["scale"] = -times(ops, grad, squared)
            return grads

        return -self.scale * squared, vjp

    def scaled(self, factor: float) -> Form:
        return super().scaled(factor) if self.caps else dataclasses.replace(self, scale=self.scale * factor)


@final
@dataclass(frozen=True, eq=False)
class TileForm(Form):
    """A score given by ``tile`` alone; its VJP is its ``tile_gradient``, or the framework's autodiff or a tape."""

    score: Any
    parameters: Mapping[str, Array]
    with_parameters: Callable[[Iterable[Array]], Any]
    """Function that returns the score with other parameters, in their order."""
    roles: ClassVar[Mapping[str, Role]] = {"query": "query", "key": "key"}

    def role(self, name: str) -> Role:
        return self.roles.get(name, "shared")

    def arrays(self) -> dict[str, Array]:
        return {"query": self.query, "key": self.key, **self._prefixed(self.parameters)}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Form:
        parameters = {name: arrays.get(PARAMETER + name, x) for name, x in self.parameters.items()}
        sides = {name: x for name, x in arrays.items() if name in self.roles}
        return dataclasses.replace(
            self, score=self.with_parameters(parameters.values()), parameters=parameters, **sides
        )

    def _prefixed(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return {PARAMETER + name: parameters[name] for name in self.parameters}

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        def tile(ops: Backend, query: Array, key: Array, *parameters: Array) -> Array:
            return checked_tile(ops, self.with_parameters(parameters), query, key)

        scores = checked_tile(ops, self.score, self.query, self.key)
        # Where query and key have size 1 along a batch axis of the value, the scores do too, but not their gradient.
        shape = _shape_of(scores)

        def vjp(grad: Array) -> dict[str, Array]:
            if shape is not None:
                grad = sum_to(ops, grad, shape)
            if not hasattr(self.score, "tile_gradient"):
                arrays = self.arrays()
                return dict(zip(arrays, tape.vjp(ops, tile, tuple(arrays.values()))[1](grad), strict=True))
            query, key, parameters = self.score.tile_gradient(ops, self.query, self.key, grad)
            if missing := [name for name in self.parameters if name not in parameters]:
                expected = f"the gradients of {list(self.parameters)}"
                raise ArgumentError(message("tile_gradient", expected, f"none of {missing}"))
            # A number that stands in a field for an array has no gradient, though `tile_gradient` may return one.
            return {"query": query, "key": key, **self._prefixed(parameters)}

        return scores, vjp


@final
@dataclass(frozen=True, eq=False)
class SumForm(Form):
    """s = sum of the scores of other forms, each multiplied by its factor where it has one.

    The names of arrays begin with the place of their form: ``1.query``. A factor is (1, 1) or (head, group, 1, 1).
    """

    terms: tuple[Form, ...]
    factors: tuple[Array | None, ...]

    @property
    def keeps_infinity(self) -> bool:  # type: ignore[override]  # derived from the terms
        return all(form.keeps_infinity for form in self.terms)

    def values_per_pair(self) -> int:
        return max(form.values_per_pair() for form in self.terms)

    def role(self, name: str) -> Role:
        place, _, name_in_form = name.partition(".")
        return "shared" if name_in_form == "factor" else self.terms[int(place)].role(name_in_form)

    def arrays(self) -> dict[str, Array]:
        arrays = {f"{i}.{name}": x for i, form in enumerate(self.terms) for name, x in form.arrays().items()}
        return arrays | {f"{i}.factor": x for i, x in enumerate(self.factors) if x is not None}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Form:
        terms = tuple(
            form.with_arrays({name: arrays[f"{i}.{name}"] for name in form.arrays() if f"{i}.{name}" in arrays})
            for i, form in enumerate(self.terms)
        )
        factors = tuple(arrays.get(f"{i}.factor", x) for i, x in enumerate(self.factors))
        return dataclasses.replace(self, query=terms[0].query, key=terms[0].key, terms=terms, factors=factors)

    def raw(self, ops: Backend, visible: Array | None = None) -> tuple[Array, FormPullback]:
        results = [form.scores_and_pullback(ops, visible) for form in self.terms]
        terms = [x if factor is None else x * factor for (x, _), factor in zip(results, self.factors, strict=True)]

        def vjp(grad: Array) -> dict[str, Array]:
            grads: dict[str, Array] = {}
            for i, ((scores, term_vjp), factor) in enumerate(zip(results, self.factors, strict=True)):
                of_term = grad
                if factor is not None:
                    of_term = times(ops, grad, factor)
                    grads[f"{i}.factor"] = times(ops, grad, scores)
                grads |= {f"{i}.{name}": x for name, x in term_vjp(of_term).items()}
            return grads

        return sum(terms[1:], terms[0]), vjp


def soft_capped(ops: Backend, scores: Array, cap: float, factor: float = 1.0) -> tuple[Array, Array]:
    """Return factor * cap * tanh(scores / cap), and the tanh."""
    bounded = ops.tanh(scores / cap)
    capped = (factor * cap) * bounded
    limits = np.finfo(accumulator(ops.dtype(scores)))
    if cap > limits.eps / limits.tiny:
        # A score as small as eps is subnormal over such a cap, and XLA and TensorFlow flush it to 0. Below 1e-9 tanh(x)
        # is x.
        capped = ops.where(ops.abs(scores) < 1e-9 * cap, scores * factor, capped)
    return capped, bounded


def times(ops: Backend, grad: Array, x: Array | float) -> Array:
    """Return ``grad * x``, but 0 where grad is 0 and `x` is not finite, as 0 * inf is NaN and a masked x may overflow.

    A finite `x` is multiplied also where grad is 0, as second derivatives need that product.
    """
    if isinstance(x, float):
        return grad * x
    return grad * ops.where(ops.logical_and(ops.equal(grad, 0), ~ops.isfinite(x)), 0.0, x)


def checked_tile(ops: Backend, score: Any, query: Array, key: Array) -> Array:
    """Return ``score.tile(ops, query, key)``; raise unless that is an array of scores for every query and key."""
    scores = score.tile(ops, query, key)
    leads = tuple(query.shape[:-2]), tuple(key.shape[:-2])
    expected = (*(leads[0] if leads[0] == leads[1] else broadcast(*leads)), query.shape[-2], key.shape[-2])
    # The common case costs three comparisons a tile.
    if type(scores) is type(query) and scores.dtype == query.dtype and _shape_of(scores) == expected:
        return scores
    owner, shapes = f"tile of {type(score).__name__}", {"query": tuple(query.shape), "key": tuple(key.shape)}
    if not backends.is_array(scores):
        raise FrameworkError(message(owner, "an array of scores", type(scores).__name__, shapes=shapes))
    backends.of({"query": query, owner: scores})
    shape = _shape_of(scores)
    # Raises for kinds of arrays that attention does not take: masked, sparse, ragged, or of unknown rank.
    if shape is None or type(scores) is not type(query):
        backends.check_dense(ops, {owner: scores})
    if not ops.is_floating(scores):
        raise DtypeError(message(owner, FLOATING, ops.dtype(scores), shapes=shapes))
    if shape is None or not _fits(shape, expected, leads):
        per_head = max(int(query.shape[-4]), int(key.shape[-4])), int(query.shape[-3]), 1, 1
        hint = f"a parameter per head has to be reshaped to (kv heads, groups, 1, 1) = {per_head}"
        axes = f"scores (*batch, kv head, group, query, key) = {expected}"
        raise ShapeError(message(owner, axes, shape, shapes=shapes, hint=hint))
    return scores


def _shape_of(x: Array) -> tuple[Any, ...] | None:
    """Return the shape; None where a TensorFlow graph does not know the number of axes."""
    try:
        return tuple(x.shape)
    except ValueError:
        return None


def _fits(shape: tuple[Any, ...], expected: tuple[Any, ...], leads: tuple[tuple[Any, ...], tuple[Any, ...]]) -> bool:
    """Return whether the shape of scores is `expected`; a leading axis may be 1 where query or key is broadcast too."""
    return (
        len(shape) == len(expected)
        and all(map(may_equal, shape[-2:], expected[-2:]))
        and all(
            may_equal(n, whole) or (n == 1 and 1 in sides)
            for n, whole, sides in zip(shape, expected, zip(*leads, strict=True), strict=False)
        )
    )
