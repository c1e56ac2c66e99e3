"""Training text that every machine with Python has: the sources of its standard library, as characters."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnscore.errors import ArgumentError, message

# Printable ASCII and the line end; every other character becomes one more symbol.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
SYMBOLS = len(ALPHABET) + 1
# Modules that have long been part of Python; one that is missing is left out.
_MODULES = ("argparse", "ast", "configparser", "difflib", "inspect", "optparse", "pathlib", "statistics", "textwrap")


def standard_library(most: int = 400_000) -> str:
    """Return the first `most` characters of some modules of this Python's standard library.

    Raises
    ------
    ArgumentError
        A Python without sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in _MODULES if (path := folder / f"{name}.py").is_file()]
    text = "\n".join(path.read_text("utf-8") for path in files)[:most]
    if len(text) < 10_000:
        raise ArgumentError(message("text", "the sources of Python's standard library", f"{len(text)} characters"))
    return text


def encode(text: str) -> NDArray[np.int64]:
    r"""Encode characters as numbers below SYMBOLS.

    >>> encode("\na~é").tolist()
    [0, 66, 95, 96]
    """
    number = {character: place for place, character in enumerate(ALPHABET)}
    return np.array([number.get(character, len(ALPHABET)) for character in text], dtype=np.int64)


def digest(text: str) -> str:
    """Return a digest of a text, which tells runs on different texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
