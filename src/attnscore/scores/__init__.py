"""Scoring functions and their registry. One file is one score; a new one adds its file and one line in ``BUILTIN``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from attnscore import backends
from attnscore.base.arguments import closest, did_you_mean, shown
from attnscore.errors import ArgumentError, message
from attnscore.scores.additive import Additive
from attnscore.scores.base import (
    Score,
    ScoreGradients,
    Wrapper,
    arrays_of,
    check,
    check_score_arrays,
    lower,
    lower_pullback,
    lower_rowwise,
)
from attnscore.scores.bilinear import Bilinear
from attnscore.scores.combination import Combination
from attnscore.scores.cosine import Cosine
from attnscore.scores.dot import Dot
from attnscore.scores.gaussian import Gaussian
from attnscore.scores.scaled_dot import ScaledDot
from attnscore.scores.softcap import SoftCap
from attnscore.scores.sum import Sum
from attnscore.scores.temperature import Temperature
from attnscore.scores.triton_tile import TritonTile

__all__ = [
    "BUILTIN",
    "Additive",
    "Bilinear",
    "Combination",
    "Cosine",
    "Dot",
    "Gaussian",
    "ScaledDot",
    "Score",
    "ScoreGradients",
    "SoftCap",
    "Sum",
    "Temperature",
    "TritonTile",
    "Wrapper",
    "arrays_of",
    "check",
    "check_score_arrays",
    "lower",
    "lower_pullback",
    "lower_rowwise",
    "named",
    "register_score",
    "registered",
    "resolve",
]

BUILTIN: dict[str, type[Score]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "gaussian": Gaussian,
    "cosine": Cosine,
    "sum": Sum,
    "additive": Additive,
    "bilinear": Bilinear,
    "softcap": SoftCap,
    "temperature": Temperature,
    "combination": Combination,
}
"""All built-in scores; other tables, such as the operators for ``torch.compile``, derive from this one."""

# Scores whose parameters have no defaults: a name cannot give them, and an error message shows the call instead.
_CALLS = {
    "additive": "Additive(w_v, W_q, W_k)",
    "bilinear": "Bilinear(W)",
    "softcap": 'SoftCap("scaled_dot", cap)',
    "temperature": 'Temperature("scaled_dot", temperature)',
    "combination": 'Combination(("dot", "gaussian"), (1.0, 0.5))',
}
_TABLE: dict[str, Callable[[], Any]] = {name: kind for name, kind in BUILTIN.items() if name not in _CALLS}


def register_score(name: str, cls: Callable[[], Any]) -> None:
    """Make ``score=name`` mean ``cls()`` in every call.

    Parameters
    ----------
    name : str
    cls : class or function without arguments that returns a score

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
    if (missing := _missing_argument(cls)) is not None:
        label = getattr(cls, "__name__", type(cls).__name__)
        hint = f"register_score({name!r}, lambda: {label}(...)) gives them"
        expected = "a class or function that makes a score without arguments"
        raise ArgumentError(message("cls", expected, f"{label}: {missing}", hint=hint))
    if name in _TABLE and _TABLE[name] is not cls:
        raise ArgumentError(message("name", f"a new name: {name!r} is {_TABLE[name]!r}", repr(name)))
    _TABLE[name] = cls


def registered() -> tuple[str, ...]:
    """Return the names that ``score=`` takes."""
    return tuple(_TABLE)


named = _TABLE.get
"""Return the class or function registered under a name, or None."""


def _missing_argument(cls: Callable[[], Any]) -> str | None:
    """Return Python's message on the argument that ``cls()`` lacks; None where there is none, or no signature."""
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        return str(error)
    except ValueError:  # Some built-ins have no signature.
        pass
    return None


def _from_name(name: str) -> Any:
    """Return a new score of the class or function registered under `name`; raise ArgumentError when there is none."""
    if name not in _TABLE:
        call = _CALLS.get(closest(name, (*_TABLE, *_CALLS)) or "")
        made = f"outside of layers, a score with parameters is an object: score=ats.{call}"
        hint = made if call else did_you_mean(name, _TABLE)
        raise ArgumentError(message("score", "one of " + ", ".join(_TABLE), shown(name), hint=hint))
    try:
        return _TABLE[name]()
    except TypeError as error:
        expected = "a registered name whose class or function makes a score without arguments"
        raise ArgumentError(message("score", expected, f"{name!r}: {error}")) from error


def resolve(score: Any) -> Any:
    """Return `score`, an object or a registered name, as a score object; wrappers with their inner score resolved."""
    if isinstance(score, str):
        score = _from_name(score)
    # PyTorch's tensors have a method tile too.
    if isinstance(score, type) or backends.is_array(score) or not callable(getattr(score, "tile", None)):
        hint = f"{score.__name__}(...) makes one" if isinstance(score, type) else None
        expected = "a registered name or a score object with a method tile"
        raise ArgumentError(message("score", expected, shown(score), hint=hint))
    if isinstance(score, Wrapper):
        inner = resolve(score.score)
        if inner is not score.score:
            return dataclasses.replace(score, score=inner)  # type: ignore[type-var]  # wrappers are dataclasses
    if isinstance(score, Combination):
        terms = tuple(map(resolve, score.scores))
        if any(new is not old for new, old in zip(terms, score.scores, strict=True)):
            return dataclasses.replace(score, scores=terms)
    return score
