"""Learned factors of a lowered form: a temperature or a cap that is an array, with its gradient.

A factor is (1, 1), or (head, group, 1, 1) where each head has its own. It goes into an array that the form has: the
queries of a product, the w_v of an additive score, the scale of a distance. Kernels then need not know of it. Behind a
cap, and on scores computed in Python, it stays a factor of the scores (`MultipliedForm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from attnscore import backends
from attnscore.backends.base import Array, Backend, sum_to
from attnscore.scores.base import per_head, widen, with_nonfinite_rows_isolated, zero_nonfinite_rows
from attnscore.scores.forms import AdditiveForm, DistanceForm, Form, InnerForm, MultipliedForm

Grads = Mapping[str, Array]
FactorPullback = Callable[[Grads], tuple[Grads, Array]]
"""VJP of `multiplied`: from gradients of its form's arrays to those of the first form's arrays, and of the factor."""


def learned(ops: Backend, name: str, x: Array, query: Array, key: Array, like: Array) -> Array:
    """Return a parameter () or (heads,) as (1, 1) or (head, group, 1, 1), in a dtype that holds sums of `like`."""
    number = per_head(ops, name, x, query, key, 0)
    return widen(ops, ops.reshape(number, (*number.shape, 1, 1)), like)[0]


def multiplied(ops: Backend, form: Form, factor: Array) -> tuple[Form, FactorPullback]:
    """Return the form of ``factor * scores``, and its VJP."""
    if not form.caps and isinstance(form, InnerForm):
        return _of_products(ops, form, factor)
    if not form.caps and isinstance(form, AdditiveForm):
        return _of_array(ops, form, "w_v", factor[..., 0], factor)
    if not form.caps and isinstance(form, DistanceForm):
        return _of_array(ops, form, "scale", factor, factor)
    name = f"factor{sum(x.startswith('factor') for x in form.arrays())}"

    def vjp(grads: Grads) -> tuple[Grads, Array]:
        return {x: grad for x, grad in grads.items() if x != name}, sum_to(ops, grads[name], factor.shape)

    return MultipliedForm(form.query, form.key, form=form, factor=factor, name=name), vjp


def _of_products(ops: Backend, form: InnerForm, factor: Array) -> tuple[Form, FactorPullback]:
    """Return the form with its queries and biases multiplied."""
    query, factor = widen(ops, form.query, factor)
    sides = {name: x for name, x in (("query_bias", form.query_bias), ("key_bias", form.key_bias)) if x is not None}
    sides["query"] = query
    found = {name: with_nonfinite_rows_isolated(ops, x, lambda x: x * factor) for name, x in sides.items()}

    def vjp(grads: Grads) -> tuple[Grads, Array]:
        # x * factor, for the queries and each bias
        products = [
            sum_to(ops, ops.sum(zero_nonfinite_rows(ops, x) * grads[name], axis=-1, keepdims=True), factor.shape)
            for name, x in sides.items()
        ]
        inner = {name: sum_to(ops, grads[name] * factor, x.shape) for name, x in sides.items()}
        return {**grads, **inner}, sum(products[1:], products[0])

    return form.with_arrays(found), vjp


def _of_array(
    ops: Backend, form: AdditiveForm | DistanceForm, name: str, columns: Array, factor: Array
) -> tuple[Form, FactorPullback]:
    """Return the form with its array `name`, or the number of that name, multiplied by `columns` of the factor."""
    x: Any = getattr(form, name)
    if is_array := backends.is_array(x):
        x, columns = widen(ops, x, columns)

    def vjp(grads: Grads) -> tuple[Grads, Array]:
        # x * columns
        inner = {name: sum_to(ops, grads[name] * columns, x.shape)} if is_array else {}
        others = {key: grad for key, grad in grads.items() if key != name}
        return {**others, **inner}, ops.reshape(sum_to(ops, grads[name] * x, columns.shape), factor.shape)

    return dataclasses.replace(form, **{name: x * columns}), vjp
