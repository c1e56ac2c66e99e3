"""Scoring functions. One file is one score; a new one adds its file and one line in ``_TABLE``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from attnscore import frameworks
from attnscore.checks import check_choice, shown
from attnscore.errors import ArgumentError, message
from attnscore.scoring.additive import Additive
from attnscore.scoring.bilinear import Bilinear
from attnscore.scoring.contract import (
    Score,
    ScoreGradients,
    arrays_of,
    check,
    check_score_arrays,
    lower,
    lower_pullback,
)
from attnscore.scoring.cosine import Cosine
from attnscore.scoring.dot import Dot, ScaledDot
from attnscore.scoring.gaussian import Gaussian
from attnscore.scoring.sum import Sum
from attnscore.scoring.wrappers import SoftCap, Temperature

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


def register_score(name: str, cls: Callable[[], Any]) -> None:
    """Make ``score=name`` mean ``cls()`` in every call.

    Parameters
    ----------
    name : str
    cls : class or function of no arguments that gives a score

    Raises
    ------
    ArgumentError
        The name is taken by another class, or `cls` has no ``tile``.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.register_score("soft_dot", lambda: ats.SoftCap("dot", 30.0))
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(message("name", "a name", f"{name!r}"))
    if not callable(cls) or (isinstance(cls, type) and not hasattr(cls, "tile")):
        raise ArgumentError(message("cls", "a class with a method tile(ops, query, key)", f"{cls!r}"))
    if name in _TABLE and _TABLE[name] is not cls:
        raise ArgumentError(message("name", f"a new name: {name!r} is {_TABLE[name]!r}", repr(name)))
    _TABLE[name] = cls


def registered() -> tuple[str, ...]:
    """Names that ``score=`` takes."""
    return tuple(_TABLE)


def named(name: str) -> Callable[[], Any] | None:
    """What a name stands for now, if anything."""
    return _TABLE.get(name)


def resolve(score: Any) -> Any:
    """The score object that `score` (an object or a registered name) means."""
    if isinstance(score, str):
        score = _TABLE[check_choice("score", score, tuple(_TABLE))]()
    if isinstance(score, type) or frameworks.is_array(score) or not callable(getattr(score, "tile", None)):
        hint = f"{score.__name__}(...) makes one" if isinstance(score, type) else None
        raise ArgumentError(
            message("score", "a registered name or a score object with a method tile", shown(score), hint=hint)
        )
    if isinstance(score, (SoftCap, Temperature)):
        # SoftCap("scaled_dot", 30.0)
        inner = resolve(score.score)
        return score if inner is score.score else dataclasses.replace(score, score=inner)
    return score
