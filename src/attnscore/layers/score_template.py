"""The score of `MultiHeadAttention` as a caller writes it: a name, or a score object with names and arrays inside.

- A name stands for the score with parameters of the layer, one set per head: ``SoftCap("additive", 30.0)``,
  ``Combination(("scaled_dot", "gaussian"), (1.0, 0.5))``. Each name occurs once, so that its parameters have one name.
- An object is used as it is: ``ats.Dot() + 0.5 * ats.Gaussian()`` has no parameters.
- An array in an object becomes a parameter that starts at its numbers: ``Temperature("dot", np.ones(heads))``.
- `to_config` writes a template as plain data, for frameworks that save a layer's arguments.

Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from attnscore import backends, scores
from attnscore.backends.base import Array
from attnscore.base.arguments import check_choice, shown
from attnscore.errors import ArgumentError, message
from attnscore.scores import Combination, arrays_of
from attnscore.scores.base import Wrapper, with_new_arrays


def names_in(score: Any, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a template; raise ArgumentError for an unknown one, for one that repeats, for no score."""
    names: list[str] = []

    def note(name: Any) -> Any:
        hint = "these names have parameters in the layer; any other score is an object, such as attnscore.Sum()"
        names.append(check_choice("score", name, known, hint=hint))
        return name

    _with_names(score, note)
    for name in names:
        if names.count(name) > 1:
            hint = "an object, such as Gaussian(2.0), has no parameters and may repeat"
            raise ArgumentError(message("score", "each name once", f"{name!r} {names.count(name)} times", hint=hint))
    return tuple(names)


def arrays_in(score: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a template by the name of their parameter, ``score_temperature`` or ``score_weights_0``."""
    return {_parameter_name(name): _numbers(name, x) for name, x in arrays_of(score).items()}


def _parameter_name(name: str) -> str:
    return "score_" + name.replace(".", "_")


def _numbers(name: str, x: Array) -> np.ndarray[Any, Any]:
    values = backends.host(x)
    if values is None:
        raise ArgumentError(message(f"score ({name})", "an array whose numbers can be read", shown(x)))
    return np.asarray(values, float)


def filled(score: Any, arrays: Mapping[str, Array], named: Callable[[str], Any]) -> Any:
    """Return the score of a template: `arrays` in the place of its own, `named(name)` in the place of a name."""
    score = with_new_arrays(score, [arrays[_parameter_name(name)] for name in arrays_of(score)])
    return _with_names(score, named)


def _with_names(score: Any, named: Callable[[str], Any]) -> Any:
    """Return a template with ``named(name)`` in the place of each name, or of what is no score."""
    if isinstance(score, Wrapper):
        return replace(score, score=_with_names(score.score, named))  # type: ignore[type-var]  # each is a dataclass
    if isinstance(score, Combination):
        return Combination(tuple(_with_names(term, named) for term in score.scores), score.weights)
    return score if callable(getattr(score, "tile", None)) and not isinstance(score, type) else named(score)


# ------------------------------------------------------------------ plain data


def to_config(score: Any) -> Any:
    """Return a template as names, numbers, lists and dictionaries; raise ArgumentError for a custom score."""
    if isinstance(score, (tuple, list)):
        return {"tuple": [to_config(x) for x in score]}
    if backends.is_array(score):
        return {"array": _numbers("score", score).tolist()}
    if callable(getattr(score, "tile", None)):
        kind = type(score).__name__
        if getattr(scores, kind, None) is not type(score) or not is_dataclass(score):
            raise ArgumentError(message("score", "a score of attnscore, which a configuration can name", shown(score)))
        return {"kind": kind, "fields": {field.name: to_config(getattr(score, field.name)) for field in fields(score)}}
    return score.item() if isinstance(score, np.generic) else score


def from_config(config: Any) -> Any:
    """Return the template that `to_config` wrote."""
    if not isinstance(config, Mapping):
        return config
    if "tuple" in config:
        return tuple(map(from_config, config["tuple"]))
    if "array" in config:
        return np.asarray(config["array"], float)
    return getattr(scores, config["kind"])(**{name: from_config(x) for name, x in config["fields"].items()})
