"""Linear combination of scores: ``ats.Dot() + 0.5 * ats.Gaussian()``.

Inner products are one product of concatenated queries and keys, additive scores of one activation one additive score of
concatenated channels; the native kernel runs both. Other combinations are added up tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import check_number, is_number, shown
from attnscore.base.layout import broadcast
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.scores.base import Score, check, learned, lower, lower_rowwise, multiplied, operations_of, widen
from attnscore.scores.forms import AdditiveForm, DistanceForm, Form, InnerForm, SumForm, checked_tile
from attnscore.scores.gaussian import as_product


@final
@dataclass(frozen=True, eq=False, repr=False)
class Combination(Score):
    """a(q, k) = sum_i weights[i] scores[i](q, k), which the operators + and * between scores make.

    Parameters
    ----------
    scores : sequence of scores or registered names, of the same queries and keys
    weights : sequence of numbers, or arrays () or (heads,), which get a gradient
        One for each score; of any sign. Gradients of arrays are named by their place: ``weights.0``,
        ``scores.1.bandwidth``.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> query, key = np.array([[1.0, 2.0]]), np.array([[1.0, 0.0]])
    >>> ats.attention_scores(query, key, score=ats.Dot() + 0.5 * ats.Gaussian())
    array([[0.]])
    """

    scores: Sequence[Any]
    weights: Sequence[Any]

    def __post_init__(self) -> None:
        for name in ("scores", "weights"):
            if not isinstance(entries := getattr(self, name), (tuple, list)):
                raise ArgumentError(message(name, "a tuple, one entry for each score", shown(entries)))
        if not self.scores or len(self.scores) != len(self.weights):
            got = f"{len(self.scores)} scores, {len(self.weights)} weights"
            raise ArgumentError(message("weights", "one for each of one score or more", got))
        for i, weight in enumerate(self.weights):
            if is_number(weight):
                check_number(f"weights[{i}]", weight)

    def __repr__(self) -> str:
        def factor(weight: Any) -> str:
            if backends.is_array(weight):
                return f"<{tuple(weight.shape)} {weight.dtype}> * "
            return "" if weight == 1 else f"{weight!r} * "

        terms = (f"{factor(weight)}{score!r}" for score, weight in zip(self.scores, self.weights, strict=True))
        return f"Combination({' + '.join(terms)})"

    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        total: Any = None
        for score, weight in zip(self.scores, self.weights, strict=True):
            term = checked_tile(ops, score, query, key)
            factor = learned(ops, "weights", weight, query, key, term) if backends.is_array(weight) else weight
            total = term * factor if total is None else total + term * factor
        return total

    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        return self._joined(ops, lower, query, key)

    def lower_rowwise(self, ops: Backend, query: Array, key: Array) -> Form:
        return self._joined(ops, lower_rowwise, query, key)

    def _joined(self, ops: Backend, lower_term: Callable[..., Form], query: Array, key: Array) -> Form:
        """Return the form of the weighted sum of the scores, each lowered by `lower_term`."""
        forms, numbers = [], []
        for i, (score, weight) in enumerate(zip(self.scores, self.weights, strict=True)):
            form = lower_term(ops, score, query, key)
            if backends.is_array(weight):
                form = multiplied(ops, form, learned(ops, f"weights[{i}]", weight, query, key, form.query))
            forms.append(form)
            numbers.append(1.0 if backends.is_array(weight) else float(weight))
        return joined(ops, forms, numbers, rowwise=lower_term is lower_rowwise)

    def check(self, dim: int, key_dim: int) -> None:
        for i, (score, weight) in enumerate(zip(self.scores, self.weights, strict=True)):
            if backends.is_array(weight):
                if len(weight.shape) > 1:
                    raise ShapeError(message(f"weights[{i}]", "a number, () or (heads,)", tuple(weight.shape)))
            else:
                check_number(f"weights[{i}]", weight)
            check(score, dim, key_dim)

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        terms = sum(operations_of(score, query_len, key_len, dim, key_dim) for score in self.scores)
        return terms + 2 * len(self.scores) * query_len * key_len


def added(*scores: Any) -> Combination:
    """Return the sum of scores; a score that is a combination adds its terms."""
    terms = [score if isinstance(score, Combination) else Combination((score,), (1.0,)) for score in scores]
    return Combination(
        tuple(score for each in terms for score in each.scores),
        tuple(weight for each in terms for weight in each.weights),
    )


def multiple(score: Any, factor: Any) -> Combination:
    """Return a score times a number or an array."""
    terms = added(score)
    # A weight of 1 gives way to the factor itself: NumPy's product of an array () and a number is no array.
    weights = (factor if type(weight) is float and weight == 1 else weight * factor for weight in terms.weights)
    return Combination(terms.scores, tuple(weights))


def joined(ops: Backend, forms: Sequence[Form], numbers: Sequence[float], *, rowwise: bool) -> Form:
    """Return the form of sum_i numbers[i] * scores of forms[i]; `rowwise` as in `lower_rowwise`."""
    first: Any = forms[0]
    if not any(form.caps for form in forms):
        # A rank that holds a part of a sequence cannot tell whether a product is accurate for the whole.
        products: list[Any] = [
            as_product(ops, form) if isinstance(form, DistanceForm) and not rowwise else form for form in forms
        ]
        if all(isinstance(product, InnerForm) for product in products):
            return _joined_products(ops, products, numbers)
        if all(isinstance(form, AdditiveForm) and form.activation == first.activation for form in forms):
            return _joined_additive(ops, forms, numbers)
    terms = tuple(form if number == 1 else form.scaled(number) for form, number in zip(forms, numbers, strict=True))
    return SumForm(first.query, first.key, terms=terms, factors=(None,) * len(terms))


def _concatenated(ops: Backend, arrays: Sequence[Array]) -> Array:
    """Return arrays side by side on their last axis, in one dtype and with the leading axes broadcast."""
    if len({ops.dtype(x) for x in arrays}) > 1:
        arrays = widen(ops, *arrays)
    lead = broadcast(*(tuple(x.shape[:-1]) for x in arrays))
    return ops.concat(
        tuple(x if tuple(x.shape[:-1]) == lead else ops.broadcast_to(x, (*lead, x.shape[-1])) for x in arrays), -1
    )


def _joined_products(ops: Backend, forms: Sequence[InnerForm], numbers: Sequence[float]) -> Form:
    """Return the product of concatenated queries and keys; factors that differ go into the queries."""
    factors = [number * form.scale for form, number in zip(forms, numbers, strict=True)]
    scale = factors[0] if len(set(factors)) == 1 else 1.0
    query_factors = [1.0 if scale == factor else factor for factor in factors]
    queries = _concatenated(
        ops, [x.query if n == 1 else widen(ops, x.query)[0] * n for x, n in zip(forms, query_factors, strict=True)]
    )
    biases: dict[str, Array] = {}
    for name in ("query_bias", "key_bias"):
        terms = [getattr(x, name) * n for x, n in zip(forms, numbers, strict=True) if getattr(x, name) is not None]
        if terms:
            biases[name] = sum(terms[1:], terms[0])
    keys = _concatenated(ops, [form.key for form in forms])
    return InnerForm(queries, keys, scale=scale, **biases)


def _joined_additive(ops: Backend, forms: Sequence[Any], numbers: Sequence[float]) -> Form:
    """Return the additive score of concatenated channels: the factors go into w_v."""
    weights = _concatenated(ops, [form.w_v * number for form, number in zip(forms, numbers, strict=True)])
    queries, keys = (_concatenated(ops, [getattr(form, name) for form in forms]) for name in ("query", "key"))
    return AdditiveForm(queries, keys, w_v=weights, activation=forms[0].activation)


Score._added, Score._multiple = staticmethod(added), staticmethod(multiple)
