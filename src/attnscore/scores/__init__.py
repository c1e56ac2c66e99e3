"""Scoring functions. One file is one score; a new one adds its file and one line in ``_TABLE``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from attnscore import backends
from attnscore.core.arguments import shown
from attnscore.errors import ArgumentError, message
from attnscore.scores.additive import Additive
from attnscore.scores.base import Score, ScoreGradients, arrays_of, check, check_score_arrays, lower, lower_pullback
from attnscore.scores.bilinear import Bilinear
from attnscore.scores.cosine import Cosine
from attnscore.scores.dot import Dot, ScaledDot
from attnscore.scores.gaussian import Gaussian
from attnscore.scores.sum import Sum
from attnscore.scores.wrappers import SoftCap, Temperature

__all__ = [
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "Gaussian",
    "ScaledDot",
    "Score",
    "ScoreGradients",
    "SoftCap",
    "Sum",
    "Temperature",
    "arrays_of",
    "check",
    "check_score_arrays",
    "lower",
    "lower_pullback",
    "named",
    "register_score",
    "registered",
    "resolve",
]

_TABLE: dict[str, Callable[[], Any]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "gaussian": Gaussian,
    "cosine": Cosine,
    "sum": Sum,
}

# What a caller may mean by a name that cannot be in the table.
_PARAMETERS = {
    "additive": "Additive(w_v, W_q, W_k)",
    "bilinear": "Bilinear(W)",
    "softcap": 'SoftCap("scaled_dot", cap)',
    "temperature": 'Temperature("scaled_dot", T)',
}


def register_score(name: str, cls: Callable[[], Any]) -> None:
    """Make ``score=name`` mean ``cls()`` in every call.

    Parameters
    ----------
    name : str
    cls : class or function of no arguments that gives a score

    Raises
    ------
    ArgumentError
        The name is taken by another class, or `cls` has no ``tile`` or cannot be called without arguments.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.register_score("soft_dot", lambda: ats.SoftCap("dot", 30.0))
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(message("name", "a name", f"{name!r}"))
    if not callable(cls) or (isinstance(cls, type) and not hasattr(cls, "tile")):
        raise ArgumentError(message("cls", "a class with a method tile(ops, query, key)", f"{cls!r}"))
    if (missing := _needed(cls)) is not None:
        called = getattr(cls, "__name__", type(cls).__name__)
        hint = f"register_score({name!r}, lambda: {called}(...)) gives them"
        expected = "a class or function that makes a score without arguments"
        raise ArgumentError(message("cls", expected, f"{called}: {missing}", hint=hint))
    if name in _TABLE and _TABLE[name] is not cls:
        raise ArgumentError(message("name", f"a new name: {name!r} is {_TABLE[name]!r}", repr(name)))
    _TABLE[name] = cls


def registered() -> tuple[str, ...]:
    """Names that ``score=`` takes."""
    return tuple(_TABLE)


def named(name: str) -> Callable[[], Any] | None:
    """What a name stands for now, if anything."""
    return _TABLE.get(name)


def _needed(cls: Callable[[], Any]) -> str | None:
    """Return which argument a call without any lacks, as Python words it; None where none, or unknown."""
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        return str(error)
    except ValueError:  # of a few built-ins
        pass
    return None


def _made(name: str) -> Any:
    """Return the score that a registered name means."""
    if name not in _TABLE:
        hint = _PARAMETERS.get(name.lower().replace("_", ""))
        hint = None if hint is None else f"a score with parameters is an object: score={hint}"
        raise ArgumentError(message("score", "one of " + ", ".join(_TABLE), shown(name), hint=hint))
    try:
        return _TABLE[name]()
    except TypeError as error:
        expected = "a registered name whose class or function makes a score without arguments"
        raise ArgumentError(message("score", expected, f"{name!r}: {error}")) from error


def resolve(score: Any) -> Any:
    """The score object that `score` (an object or a registered name) means."""
    if isinstance(score, str):
        score = _made(score)
    if isinstance(score, type) or backends.is_array(score) or not callable(getattr(score, "tile", None)):
        hint = f"{score.__name__}(...) makes one" if isinstance(score, type) else None
        raise ArgumentError(
            message("score", "a registered name or a score object with a method tile", shown(score), hint=hint)
        )
    if isinstance(score, (SoftCap, Temperature)):
        # SoftCap("scaled_dot", 30.0)
        inner = resolve(score.score)
        return score if inner is score.score else dataclasses.replace(score, score=inner)
    return score
