"""Learned factors of a lowered form: a temperature or a cap that is an array.

A factor is (1, 1), or (head, group, 1, 1) where each head has its own. It goes into an array that the form has: the
queries of a product, the w_v of an additive score, the scale of a distance. Kernels then need not know of it. Behind a
cap, and on scores computed in Python, it stays a factor of the scores (`MultipliedForm`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.scores.base import per_head, widen, with_nonfinite_rows_isolated
from attnscore.scores.forms import AdditiveForm, DistanceForm, Form, InnerForm, MultipliedForm


def learned(ops: Backend, name: str, x: Array, query: Array, key: Array, like: Array) -> Array:
    """Return a parameter () or (heads,) as (1, 1) or (head, group, 1, 1), in a dtype that holds sums of `like`."""
    number = per_head(ops, name, x, query, key, 0)
    return widen(ops, ops.reshape(number, (*number.shape, 1, 1)), like)[0]


def multiplied(ops: Backend, form: Form, factor: Array) -> Form:
    """Return the form of ``factor * scores``."""
    if not form.caps and isinstance(form, InnerForm):
        query, factor = widen(ops, form.query, factor)
        sides = {name: x for name, x in {**form.arrays(), "query": query}.items() if name != "key"}
        return form.with_arrays(
            {name: with_nonfinite_rows_isolated(ops, x, lambda x: x * factor) for name, x in sides.items()}
        )
    if not form.caps and isinstance(form, (AdditiveForm, DistanceForm)):
        name, columns = ("w_v", factor[..., 0]) if isinstance(form, AdditiveForm) else ("scale", factor)
        x: Any = getattr(form, name)
        if backends.is_array(x):
            x, columns = widen(ops, x, columns)
        return dataclasses.replace(form, **{name: x * columns})
    name = f"factor{sum(x.startswith('factor') for x in form.arrays())}"
    return MultipliedForm(form.query, form.key, form=form, factor=factor, name=name)
