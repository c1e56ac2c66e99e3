"""The arrays of a score: the fields of a dataclass, those of the scores that it wraps, and those in its tuples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attnscore import backends
from attnscore.backends.base import Array

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
    """Return the array fields of a score by name, with those of a wrapped score.

    Arrays of the scores in a tuple are named by their place: ``scores.0.bandwidth``.
    """
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
    """Yield a score, and those that it wraps or holds in a tuple."""
    yield score
    for name in _field_names(type(score)):
        value = getattr(score, name)
        for part in value if isinstance(value, (tuple, list)) else (value,):
            # Tensors have a method of this name.
            if hasattr(part, "tile") and not backends.is_array(part):
                yield from scores_in(part)


def with_arrays(score: Any, change: Callable[[Array], Array]) -> Any:
    """Return the score with its array fields, and those of a wrapped score, changed."""
    found: dict[str, Any] = {}
    for name in _field_names(type(score)):
        value = getattr(score, name)
        if backends.is_array(value):
            found[name] = change(value)
        elif hasattr(value, "tile"):
            found[name] = with_arrays(value, change)
        elif isinstance(value, (tuple, list)) and any(map(_holds_arrays, value)):
            parts = tuple(change(x) if backends.is_array(x) else with_arrays(x, change) for x in value)
            if any(new is not old for new, old in zip(parts, value, strict=True)):
                found[name] = parts
    changed = {name: value for name, value in found.items() if value is not getattr(score, name)}
    return dataclasses.replace(score, **changed) if changed else score


def with_new_arrays(score: Any, arrays: Iterable[Array]) -> Any:
    """Return the score with other arrays, in the order of `arrays_of`."""
    left = iter(arrays)
    return with_arrays(score, lambda _: next(left))


def _holds_arrays(x: Any) -> bool:
    return backends.is_array(x) or bool(arrays_of(x))
