"""What a scoring function is.

A score is a frozen dataclass whose array fields are its parameters. It gives

- ``tile(ops, query, key)``: its definition, for any block of queries and keys. This alone makes a score.
- ``lower(ops, query, key)``: the form that fast kernels know, computed in the caller's framework so that its autodiff
  carries the parameters; beside it ``lower_pullback``, the same by hand, for NumPy.

Arrays come on the axes (*batch, head, group, query | key, dim), where `group` counts the query heads that share a key
head. A parameter may have one set per head: a leading axis (heads,).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, accumulator, sum_to
from attnscore.core.arguments import check_positive
from attnscore.errors import ArgumentError, DtypeError, ShapeError, message
from attnscore.scores.forms import PARAMETER, Form, TileForm


class ScoreGradients(NamedTuple):
    """Gradients of query, key and the score's own arrays."""

    query: Array
    key: Array
    arrays: dict[str, Array]


Pullback = Callable[[Mapping[str, Array]], ScoreGradients]


class Score(ABC):
    """Interface of the built-in scores. A user's own class needs `tile` alone and need not derive from this."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        backends.register_pytree(cls)
        return object.__new__(cls)

    def __repr__(self) -> str:
        return describe(self)

    @abstractmethod
    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        """Scores (..., query, key) by the definition."""

    @abstractmethod
    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        """The form that computes the same scores fast."""

    @abstractmethod
    def lower_pullback(self, ops: Backend, query: Array, key: Array) -> tuple[Form, Pullback]:
        """``lower``, and how a gradient on the form's arrays becomes one on query, key and the parameters."""

    @abstractmethod
    def check(self, dim: int, key_dim: int) -> None:
        """Raise ShapeError or ArgumentError when the score cannot take queries and keys of these lengths."""

    @abstractmethod
    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        """Multiplications, additions and function values for all scores of one head."""


def operations_of(score: Any, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
    """``score.operations``; a user's own score need not say, and counts as a product."""
    if not hasattr(score, "operations"):
        return 2 * query_len * key_len * dim
    return int(score.operations(query_len, key_len, dim, key_dim))


def describe(score: Any) -> str:
    """A score in one line: its fields, arrays by shape."""
    if not dataclasses.is_dataclass(score):
        return repr(score)
    parts = []
    for field in dataclasses.fields(score):
        value = getattr(score, field.name)
        # By value: what comes out of a pickle equals its default and is another object.
        if backends.is_array(value) or value != field.default:
            shown = f"<{tuple(value.shape)} {value.dtype}>" if backends.is_array(value) else repr(value)
            parts.append(f"{field.name}={shown}")
    return f"{type(score).__name__}({', '.join(parts)})"


def require_same_dim(name: str, dim: int, key_dim: int) -> None:
    """Raise ShapeError unless query and key have vectors of one length."""
    if dim != key_dim:
        raise ShapeError(
            message(
                "key",
                f"vectors as long as those of query ({dim}) for the {name} score",
                key_dim,
                hint="Bilinear and Additive take different lengths",
            )
        )


def require_positive(name: str, x: Any) -> None:
    """Raise ArgumentError unless a number, or every one of an array that can be read, is finite and above 0."""
    expected = "a number above 0"
    if not backends.is_array(x):
        check_positive(name, x, expected)
        return
    values = backends.host(x)
    if values is not None and values.dtype.name == "bfloat16":
        values = values.astype(np.float32)  # ml_dtypes registers it with kind "V"
    if values is not None and (values.dtype.kind not in "iuf" or not ((values > 0) & np.isfinite(values)).all()):
        raise ArgumentError(message(name, expected, f"{values.reshape(-1)[:8].tolist()}"))


_FIELD_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass; of anything else, none."""
    if kind not in _FIELD_NAMES:
        known = dataclasses.is_dataclass(kind)
        _FIELD_NAMES[kind] = tuple(field.name for field in dataclasses.fields(kind)) if known else ()
    return _FIELD_NAMES[kind]


# torch's compiler cannot read fields of a class, and calls this: a layer may be compiled before anything was called.
_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


def arrays_of(score: object) -> dict[str, Array]:
    """The array fields of a score by name, those of a wrapped score included."""
    found: dict[str, Array] = {}
    for name in _field_names(type(score)):
        value = getattr(score, name)
        if backends.is_array(value):
            found[name] = value
        elif hasattr(value, "tile"):
            found.update(arrays_of(value))
    return found


def with_dtype(ops: Backend, score: Any, dtype: str) -> Any:
    """Return the score with its array fields, those of a wrapped score included, cast to `dtype`."""
    cast: dict[str, Any] = {}
    for name in _field_names(type(score)):
        value = getattr(score, name)
        if backends.is_array(value):
            cast[name] = ops.astype(value, dtype) if ops.dtype(value) != dtype else value
        elif hasattr(value, "tile"):
            cast[name] = with_dtype(ops, value, dtype)
    changed = {name: value for name, value in cast.items() if value is not getattr(score, name)}
    return dataclasses.replace(score, **changed) if changed else score


def check_score_arrays(ops: Backend, score: object, query: Array) -> None:
    """Raise unless the score's arrays are of the caller's framework, floating, and on the device of `query`."""
    for name, x in arrays_of(score).items():
        backends.of({"query": query, name: x})
        backends.check_dense(ops, {name: x})
        backends.check_devices(ops, query, {name: x})
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))


def generic_form(ops: Backend, score: Any, query: Array, key: Array) -> TileForm:
    """The form of a score that has only ``tile``."""
    own = {
        name: x
        for name, x in arrays_of(score).items()
        if dataclasses.is_dataclass(score) and backends.is_array(getattr(score, name, None))
    }
    return TileForm(score, query, key, own)


def lower(ops: Backend, score: Any, query: Array, key: Array) -> Form:
    """The form of any score, a user's own with only ``tile`` included."""
    return score.lower(ops, query, key) if hasattr(score, "lower") else generic_form(ops, score, query, key)


def lower_pullback(ops: Backend, score: Any, query: Array, key: Array) -> tuple[Form, Pullback]:
    """The form of any score and its pull-back."""
    if hasattr(score, "lower_pullback"):
        found: tuple[Form, Pullback] = score.lower_pullback(ops, query, key)
        return found
    form = generic_form(ops, score, query, key)

    def pullback(grads: Any) -> ScoreGradients:
        return ScoreGradients(grads["query"], grads["key"], {name: grads[PARAMETER + name] for name in form.parameters})

    return form, pullback


def check(score: Any, dim: int, key_dim: int) -> None:
    """Let a score check the lengths of the vectors, where it can."""
    if hasattr(score, "check"):
        score.check(dim, key_dim)


def widen(ops: Backend, *arrays: Array) -> tuple[Array, ...]:
    """The arrays in a dtype that sums may be kept in (16-bit floats become float32), all of one."""
    target = max((accumulator(ops.dtype(x)) for x in arrays), key=_WIDTHS.__getitem__)
    return tuple(ops.astype(x, target) for x in arrays)


_WIDTHS = {"float32": 0, "float64": 1, "longdouble": 2, "float128": 2}


def per_head(ops: Backend, name: str, x: Array, query: Array, key: Array, own_axes: int) -> Array:
    """A parameter with `own_axes` axes, or (heads, ...) with one set per head, beside the uniform axes."""
    lead, own = tuple(x.shape[: len(x.shape) - own_axes]), tuple(x.shape[len(x.shape) - own_axes :])
    if not lead:
        return x
    heads, groups = max(int(query.shape[-4]), int(key.shape[-4])), int(query.shape[-3])
    splits = {(1,): (1, 1), (heads,): (heads, 1), (heads * groups,): (heads, groups)}
    if len(own) < own_axes or lead not in splits:
        raise ShapeError(
            message(name, f"{own_axes} axes, with ({heads * groups},) heads in front or not", tuple(x.shape))
        )
    return ops.reshape(x, (*splits[lead], *own))


def with_nonfinite_rows_isolated(
    ops: Backend, x: Array, function: Callable[[Array], Array], *, keeps_infinity: bool = False
) -> Array:
    """``function(x)`` with rows that hold a NaN or infinity set apart: NaN in the result, nothing in any gradient.

    A hidden key may hold anything; 0 * NaN in the gradient of a projection would carry it into the weights. With
    `keeps_infinity` such rows have the value that they have, where a form makes numbers of infinity.
    """
    if ops.known_finite(x):
        return function(x)
    finite = finite_rows(ops, x)
    apart = ops.stop_gradient(function(x)) if keeps_infinity else float("nan")
    return ops.where(finite, function(ops.where(finite, x, 0.0)), apart)


def finite_rows(ops: Backend, x: Array) -> Array:
    """(..., length, 1): whether every entry of a row is finite."""
    return ~ops.any(~ops.isfinite(x), axis=-1, keepdims=True)


def nonfinite_rows(ops: Backend, x: Array, keeps_infinity: bool) -> Array:
    """(..., length, 1): whether a row holds a NaN, or an infinity where that is no number either."""
    return ops.any(ops.isnan(x), axis=-1, keepdims=True) if keeps_infinity else ~finite_rows(ops, x)


def without_bad_rows(ops: Backend, x: Array) -> Array:
    """`x` with rows that hold a NaN or infinity set to 0: what a gradient by hand multiplies with."""
    return x if ops.known_finite(x) else ops.where(finite_rows(ops, x), x, 0.0)


def weight_gradient(ops: Backend, x: Array, grad: Array, placed: Array, weight: Array) -> Array:
    """Gradient of `weight` where ``y = x @ placed`` and `grad` is on y; `placed` is its per-head view."""
    return ops.reshape(sum_to(ops, ops.matmul(ops.matrix_transpose(x), grad), placed.shape), weight.shape)
