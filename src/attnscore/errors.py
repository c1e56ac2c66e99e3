"""Exceptions for bad input and missing capabilities.

Each class derives from ``AttnscoreError`` and from the built-in that Python users expect for that kind of
mistake, so both ``except AttnscoreError`` and ``except ValueError`` work. A message names the argument, the
expected and the actual value, with the shapes involved and a hint where these help.
"""

from __future__ import annotations

from collections.abc import Mapping


class AttnscoreError(Exception):
    """Root of all errors raised for a caller's mistake or a missing capability."""

    # With this, TensorFlow's AutoGraph re-raises an error in its own class, with the location in the user's code.
    __init__ = Exception.__init__


class ShapeError(AttnscoreError, ValueError):
    """Axes that do not match or broadcast, heads that do not divide."""


class MaskError(AttnscoreError, ValueError):
    """A mask or lengths that do not fit the scores, or whose meaning is ambiguous."""


class DtypeError(AttnscoreError, TypeError):
    """Integers or complex numbers where floats belong, or dtypes that differ."""


class DeviceError(AttnscoreError, ValueError):
    """Arrays that live on different devices."""


class FrameworkError(AttnscoreError, TypeError):
    """Arrays of different frameworks, something that is no array, or a framework that is missing."""


class ArgumentError(AttnscoreError, ValueError):
    """A number, name or index outside what the argument allows."""


class UnknownArgument(ArgumentError, TypeError):
    """A name that is no argument of the function, for which Python itself would raise a TypeError."""


class FileError(AttnscoreError, ValueError):
    """A file that cannot be read, or a path that cannot be written."""


class KernelUnavailable(AttnscoreError, RuntimeError):
    """A kernel chosen by name that cannot run this problem."""


def with_shapes(text: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Insert the shapes of the caller's arrays into a message of a score's checks, before the parameters' shapes."""
    if "; shapes: " in text:
        return text.replace("; shapes: ", f"; shapes: {_listed(shapes)}, ")
    head, hint, tail = text.partition(". Hint: ")
    return f"{head}; shapes: {_listed(shapes)}{hint}{tail}"


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def message(
    argument: str,
    expected: str,
    got: object,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    hint: str | None = None,
) -> str:
    """Compose the message of an error.

    >>> print(message("dropout", "a number in [0, 1)", 1.5))
    dropout: expected a number in [0, 1), got 1.5
    """
    text = f"{argument}: expected {expected}, got {got}"
    if shapes:
        text += f"; shapes: {_listed(shapes)}"
    if hint:
        text += f". Hint: {hint}"
    return text
