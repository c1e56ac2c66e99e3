"""The interface of scoring functions, their arrays, and helpers for parameters and gradients.

A score is a frozen dataclass whose array fields are its parameters. It defines

- ``tile(ops, query, key)``: its definition, for any block of queries and keys. A custom score needs this method alone.
- ``lower(ops, query, key)``: the lowered form that fast kernels read, computed in the caller's framework so that its
  autodiff carries the parameters. NumPy, which has none, differentiates it by a tape.

Arrays come on the canonical axes (*batch, head, group, query | key, dim): `head` counts KV heads, `group` the query
heads that share one. A parameter may have one set per query head: a leading axis (heads,).
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, Backend, accumulator
from attnscore.backends.tape import Tape, Variable, value_of
from attnscore.base.arguments import check_positive, is_number
from attnscore.errors import ArgumentError, DtypeError, ShapeError, message
from attnscore.scores.forms import AdditiveForm, DistanceForm, Form, InnerForm, SumForm, TileForm


class ScoreGradients(NamedTuple):
    """Gradients of query, key and the score's own arrays."""

    query: Array
    key: Array
    arrays: dict[str, Array]


Pullback = Callable[[Mapping[str, Array]], ScoreGradients]
"""VJP of a lowering: from gradients of the form's arrays, by name, to gradients of query, key and parameters."""


class Score(ABC):
    """Interface of the built-in scores. A custom score needs `tile` alone and need not derive from this class."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        backends.register_pytree(cls)
        return object.__new__(cls)

    _added: ClassVar[Any]
    _multiple: ClassVar[Any]
    """Functions that make a `Combination`, whose module imports this one and sets them."""

    def __repr__(self) -> str:
        return describe(self)

    def __add__(self, other: Any) -> Score:
        """Return the sum of this score and another one, as a `Combination`."""
        return self._added(self, other) if _is_score(other) else NotImplemented

    def __radd__(self, other: Any) -> Score:
        return self._added(other, self) if _is_score(other) else NotImplemented

    def __mul__(self, factor: Any) -> Score:
        """Return the score times a number or a learned array () or (heads,), as a `Combination`."""
        return NotImplemented if _is_score(factor) else self._multiple(self, factor)

    __rmul__ = __mul__
    # NumPy's arrays would multiply each element with the score.
    __array_ufunc__ = None

    @abstractmethod
    def tile(self, ops: Backend, query: Array, key: Array) -> Array:
        """Return the scores (..., query, key) by the definition."""

    @abstractmethod
    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        """Return the lowered form, which computes the same scores fast."""

    def lower_rowwise(self, ops: Backend, query: Array, key: Array) -> Form:
        """Return a lowered form in which each query and key is computed from itself alone.

        Ranks that share a sequence each lower their part of it. The default is `lower`, for a score whose lowered form
        depends neither on how many queries and keys there are nor on the values of the others.
        """
        return self.lower(ops, query, key)

    @abstractmethod
    def check(self, dim: int, key_dim: int) -> None:
        """Raise ShapeError or ArgumentError when the score cannot take queries and keys of these dimensions."""

    def signature(self) -> tuple[Hashable, tuple[Array, ...]] | None:
        """Return the score's part of the key of a plan, its class and numbers, and the score's arrays.

        A plan reads the numbers when it is made, and the arrays at each call. The default, None, plans each call anew.
        A score with parameters per head has no signature: a lowered call works on the caller's axes, where the axis of
        heads depends on `head_axis`.
        """
        return None

    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Any]:
        """Return the keys with all that the score computes from them alone, and the score of queries with these keys.

        The default, for a score that computes nothing from the keys: the keys and the score themselves.
        """
        return key, self

    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        """Count multiplications, additions and functions for one head's scores; by default of a matrix product."""
        return 2 * query_len * key_len * dim


def _is_score(x: object) -> bool:
    return callable(getattr(x, "tile", None)) and not backends.is_array(x)


class Wrapper(Score):
    """Interface of scores that transform another one: the field `score`, an object or a registered name."""

    score: Any
    parameter: ClassVar[str]
    """Name of the field that is a finite number above 0, or an array () or (heads,) of such."""
    operations_per_score: ClassVar[int]

    @final
    def __post_init__(self) -> None:
        if is_number(x := getattr(self, self.parameter)):
            check_positive(self.parameter, x)

    @abstractmethod
    def transform(self, ops: Backend, form: Form, query: Array) -> Form:
        """Return the lowered form of the inner score, transformed; `query` gives the dtype."""

    @final
    def lower(self, ops: Backend, query: Array, key: Array) -> Form:
        return self.transform(ops, lower(ops, self.score, query, key), query)

    @final
    def lower_rowwise(self, ops: Backend, query: Array, key: Array) -> Form:
        return self.transform(ops, lower_rowwise(ops, self.score, query, key), query)

    @final
    def prepare_keys(self, ops: Backend, key: Array) -> tuple[Array, Any]:
        key, inner = prepare_keys(ops, self.score, key)
        return key, dataclasses.replace(self, score=inner)  # type: ignore[type-var]  # wrappers are dataclasses

    @final
    def check(self, dim: int, key_dim: int) -> None:
        name, x = self.parameter, getattr(self, self.parameter)
        check_all_positive(name, x)
        if backends.is_array(x):
            if len(x.shape) > 1:
                raise ShapeError(message(name, "a number, () or (heads,)", tuple(x.shape)))
            # Gradients of arrays are returned by name.
            if name in arrays_of(self.score):
                hint = "one of the two can be a number"
                got = f"another in {self.score!r}"
                raise ArgumentError(message(name, "one learned array of this name", got, hint=hint))
        check(self.score, dim, key_dim)

    @final
    def operations(self, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
        inner = operations_of(self.score, query_len, key_len, dim, key_dim)
        return inner + self.operations_per_score * query_len * key_len


_FIELD_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """Return the field names of a dataclass; an empty tuple for any other class."""
    if kind not in _FIELD_NAMES:
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        _FIELD_NAMES[kind] = tuple(field.name for field in fields)
    return _FIELD_NAMES[kind]


# torch's compiler cannot trace `dataclasses.fields`, and a layer may be compiled before the first eager call.
_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined]


def arrays_of(score: object) -> dict[str, Array]:
    """Return the arrays of a score and of the scores in it by name; in a tuple by place: ``scores.0.bandwidth``."""
    arrays: dict[str, Array] = {}
    for name in _field_names(type(score)):
        value = getattr(score, name)
        if backends.is_array(value):
            arrays[name] = value
        elif hasattr(value, "tile"):
            arrays.update(arrays_of(value))
        elif isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                if backends.is_array(part):
                    arrays[f"{name}.{i}"] = part
                else:
                    arrays.update({f"{name}.{i}.{inner}": x for inner, x in arrays_of(part).items()})
    return arrays


def scores_in(score: Any) -> Iterator[Any]:
    """Yield a score, and the scores that it wraps or holds in a tuple."""
    yield score
    for name in _field_names(type(score)):
        value = getattr(score, name)
        for part in value if isinstance(value, (tuple, list)) else (value,):
            # Tensors have a method of this name.
            if hasattr(part, "tile") and not backends.is_array(part):
                yield from scores_in(part)


def with_arrays(score: Any, change: Callable[[Array], Array]) -> Any:
    """Return the score with all array fields changed, a wrapped score's too."""
    arrays: dict[str, Any] = {}
    for name in _field_names(type(score)):
        value = getattr(score, name)
        if backends.is_array(value):
            arrays[name] = change(value)
        elif hasattr(value, "tile"):
            arrays[name] = with_arrays(value, change)
        elif isinstance(value, (tuple, list)):
            items = tuple(change(x) if backends.is_array(x) else with_arrays(x, change) for x in value)
            if any(new is not old for new, old in zip(items, value, strict=True)):
                arrays[name] = items
    changed = {name: value for name, value in arrays.items() if value is not getattr(score, name)}
    return dataclasses.replace(score, **changed) if changed else score


def with_new_arrays(score: Any, arrays: Iterable[Array]) -> Any:
    """Return the score with other arrays, in the order of `arrays_of`."""
    left = iter(arrays)
    return with_arrays(score, lambda _: next(left))


def operations_of(score: Any, query_len: int, key_len: int, dim: int, key_dim: int) -> int:
    """Return ``score.operations``; a custom score without that method counts as a matrix product."""
    if not hasattr(score, "operations"):
        return Score.operations(score, query_len, key_len, dim, key_dim)
    return int(score.operations(query_len, key_len, dim, key_dim))


def describe(score: Any) -> str:
    """Return a one-line repr of a score: its fields, with arrays by shape; without fields Python's own repr."""
    if not dataclasses.is_dataclass(score):
        return object.__repr__(score)
    parts = []
    for field in dataclasses.fields(score):
        value = getattr(score, field.name)
        # Compared by value: an unpickled field equals its default without being the same object.
        if backends.is_array(value) or value != field.default:
            shown = f"<{tuple(value.shape)} {value.dtype}>" if backends.is_array(value) else repr(value)
            parts.append(f"{field.name}={shown}")
    return f"{type(score).__name__}({', '.join(parts)})"


def check_same_dim(name: str, dim: int, key_dim: int) -> None:
    """Raise ShapeError unless query and key have the same dimension."""
    if dim != key_dim:
        expected = f"vectors of the dimension of query ({dim}) for the {name} score"
        hint = "Bilinear and Additive take different dimensions"
        raise ShapeError(message("key", expected, key_dim, hint=hint))


def check_all_positive(name: str, x: Any) -> None:
    """Raise ArgumentError unless a number, or every entry of an array that the host can read, is finite and above 0."""
    if not backends.is_array(x):
        check_positive(name, x)
        return
    values = backends.host(backends.variable_value(x))
    if values is not None and (values.dtype.kind not in "iuf" or not ((values > 0) & np.isfinite(values)).all()):
        raise ArgumentError(message(name, "finite numbers above 0", f"{values.reshape(-1)[:8].tolist()}"))


_GRADIENTS_REACH_FIELDS = "a dataclass whose fields are its arrays, so that gradients reach them"


def check_score_arrays(ops: Backend, score: object, query: Array) -> None:
    """Raise unless the score's arrays are of the caller's framework, floating, and on the device of `query`.

    Raise also where a score that is no dataclass holds arrays that need a gradient: `arrays_of` does not find them.
    """
    for name, x in arrays_of(score).items():
        backends.of({"query": query, name: x})
        backends.check_compatible(ops, query, {name: x})
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x)))
    for part in scores_in(score):
        if dataclasses.is_dataclass(part):
            continue
        values = getattr(part, "__dict__", {}).values()
        values = [x for x in values if backends.is_array(x) and backends.of_type(type(x)) is ops]
        if values and ops.needs_grad(*values):
            raise ArgumentError(message("score", _GRADIENTS_REACH_FIELDS, type(part).__name__))


def _check_captured(ops: Backend, score: Any, query: Array, key: Array) -> None:
    """Raise where ``tile`` reads an array that needs a gradient and is no field, in a closure or a module for instance.

    Streaming kernels compute the gradients of query, key and the fields alone.
    """
    dtype = accumulator(ops.dtype(query))

    def constant(x: Array) -> Array:
        return ops.astype(ops.stop_gradient(x) if ops.needs_grad(x) else x, dtype)

    def scores() -> Array:
        one_of_each = (constant(ops.slice_axis(x, -2, 0, 1)) for x in (query, key))
        return with_arrays(score, constant).tile(ops, *one_of_each)

    if ops.is_recorded(scores):
        got = f"a tile of {type(score).__name__} that reads another array that needs a gradient"
        hint = "a field may be a tuple, as of a module's parameters"
        raise ArgumentError(message("score", _GRADIENTS_REACH_FIELDS, got, hint=hint))


def generic_form(ops: Backend, score: Any, query: Array, key: Array) -> TileForm:
    """Return the lowered form of a score that has only ``tile``; takes the arguments of `lower`."""
    arrays: list[Array] = []

    def keep(x: Array) -> Array:
        arrays.append(x)
        return x

    with_arrays(score, keep)
    if 0 not in (*query.shape, *key.shape):
        _check_captured(ops, score, query, key)
    parameters = arrays_of(score)
    if len(arrays) != len(parameters):
        expected = f"arrays of different names in {type(score).__name__} and the scores in it"
        raise ArgumentError(message("score", expected, f"{len(arrays)} arrays named {list(parameters)}"))
    return TileForm(query, key, score, parameters, functools.partial(with_new_arrays, score))


def lower(ops: Backend, score: Any, query: Array, key: Array) -> Form:
    """Return the lowered form of any score, also of a custom one that has only ``tile``."""
    return score.lower(ops, query, key) if hasattr(score, "lower") else generic_form(ops, score, query, key)


def lower_rowwise(ops: Backend, score: Any, query: Array, key: Array) -> Form:
    """Return ``score.lower_rowwise``; a custom score without that method is lowered as ever."""
    return score.lower_rowwise(ops, query, key) if hasattr(score, "lower_rowwise") else lower(ops, score, query, key)


def lower_pullback(ops: Backend, score: Any, query: Array, key: Array) -> tuple[Form, Pullback]:
    """Return the lowered form of any score and its VJP, by a tape in place of `ops`."""
    tape: Any = Tape(ops)
    score_arrays = arrays_of(score)
    query, key, *parameters = variables = [Variable(tape, x) for x in (query, key, *score_arrays.values())]
    form = lower(tape, with_new_arrays(score, parameters), query, key)
    arrays = form.arrays()

    def vjp(grads: Mapping[str, Array]) -> ScoreGradients:
        of_query, of_key, *gradients = tape.gradients([(x, grads[name]) for name, x in arrays.items()], variables)
        return ScoreGradients(of_query, of_key, dict(zip(score_arrays, gradients, strict=True)))

    return form.with_arrays({name: value_of(x) for name, x in arrays.items()}), vjp


def prepare_keys(ops: Backend, score: Any, key: Array) -> tuple[Array, Any]:
    """Return ``score.prepare_keys``; a custom score without that method prepares nothing."""
    if not hasattr(score, "prepare_keys"):
        return key, score
    prepared: tuple[Array, Any] = score.prepare_keys(ops, key)
    return prepared


def check(score: Any, dim: int, key_dim: int) -> None:
    """Call ``score.check`` on the dimensions of query and key; a custom score need not have it."""
    if hasattr(score, "check"):
        score.check(dim, key_dim)


def widen(ops: Backend, *arrays: Array) -> tuple[Array, ...]:
    """Return the arrays in one dtype that can hold sums: the widest of theirs, at least float32."""
    dtypes = {*map(ops.dtype, arrays)}
    # This exit halves the time of `widen`, which each planned call with a projection calls.
    if dtypes in _WIDE:
        return arrays
    target = max(map(accumulator, dtypes), key=_WIDTHS.__getitem__)
    return arrays if dtypes == {target} else tuple(ops.astype(x, target) for x in arrays)


_WIDTHS = {"float32": 0, "float64": 1, "longdouble": 2, "float128": 2}
_WIDE = ({"float32"}, {"float64"})


def per_head(ops: Backend, name: str, x: Array, query: Array | None, key: Array, axes: int) -> Array:
    """Return a parameter of each query head or KV head, (heads, ...), as (head, group or 1, ...).

    One with `axes` axes, which all heads share, stays as it is. Before there is a query, the parameter's first axis
    gives the number of query heads.
    """
    if len(x.shape) == axes:
        return x
    lead, sizes = tuple(x.shape[: len(x.shape) - axes]), tuple(x.shape[len(x.shape) - axes :])
    heads = max(1 if query is None else int(query.shape[-4]), int(key.shape[-4]))
    groups = max(1, int(x.shape[0]) // heads) if query is None else int(query.shape[-3])
    splits = {(1,): (1, 1), (heads,): (heads, 1), (heads * groups,): (heads, groups)}
    if len(sizes) < axes or lead not in splits:
        all_heads = f"({heads * groups},)"
        expected = f"{axes} axes, with {all_heads} heads in front or not" if axes else f"() or {all_heads}"
        raise ShapeError(message(name, expected, tuple(x.shape)))
    return ops.reshape(x, (*splits[lead], *sizes))


def learned(ops: Backend, name: str, x: Array, query: Array, key: Array, like: Array) -> Array:
    """Return a parameter () or (heads,) as (1, 1) or (head, group, 1, 1), in a dtype that holds sums of `like`."""
    number = per_head(ops, name, x, query, key, 0)
    return widen(ops, ops.reshape(number, (*number.shape, 1, 1)), like)[0]


def multiplied(ops: Backend, form: Form, factor: Array) -> Form:
    """Return the form of ``factor * scores``, for a factor that `learned` returned.

    It goes into an array that the form has: the queries of a product, the w_v of an additive score, the scale of a
    distance. Kernels then need not know of it. Behind a cap, and on scores computed in Python, it stays a factor of the
    scores.
    """
    if not form.caps and isinstance(form, InnerForm):
        query, factor = widen(ops, form.query, factor)
        # All arrays but the keys: s = scale q . k + biases.
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
    return SumForm(form.query, form.key, terms=(form,), factors=(factor,))


def with_nonfinite_rows_isolated(
    ops: Backend, x: Array, function: Callable[[Array], Array], *, keeps_infinity: bool = False
) -> Array:
    """Return ``function(x)`` where rows with a NaN or an infinity become NaN and add nothing to any gradient.

    A masked key may hold such numbers, and 0 * NaN in the VJP of a projection would propagate them to its weights. With
    `keeps_infinity` these rows keep the value of ``function``, for forms that map an infinity to a finite score.
    """
    if ops.known_finite(x):
        return function(x)
    nonfinite = nonfinite_rows(ops, x, keeps_infinity=False)
    isolated = ops.stop_gradient(function(x)) if keeps_infinity else float("nan")
    return ops.where(nonfinite, isolated, function(ops.where(nonfinite, 0.0, x)))


def projected(ops: Backend, x: Array, matrix: Array, *, keeps_infinity: bool = False) -> Array:
    """Return ``x @ matrix`` by `with_nonfinite_rows_isolated`, which reads `keeps_infinity`.

    Where a framework isolates the rows in the gradient alone, they keep the value of the product.
    """
    if ops.known_finite(x):
        return ops.matmul(x, matrix)
    if (product := ops.product_of_rows(x, matrix)) is not None:
        return product
    return with_nonfinite_rows_isolated(ops, x, lambda x: ops.matmul(x, matrix), keeps_infinity=keeps_infinity)


def nonfinite_rows(ops: Backend, x: Array, keeps_infinity: bool) -> Array:
    """Return whether a row holds a NaN, or an infinity unless `keeps_infinity`, (..., length, 1)."""
    return ops.any(ops.isnan(x) if keeps_infinity else ~ops.isfinite(x), axis=-1, keepdims=True)
