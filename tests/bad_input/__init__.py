"""Bad input: what a caller may get wrong, and what must be in the message.

One row is one mistake: the call, the class it gets and the words that its message must hold. Rows are written
over `Maker`, so each runs on every framework, where it must say the same. `CASES` holds them all;
``test_errors.py`` runs them.
"""

from __future__ import annotations

import importlib

from bad_input.table import Case, Maker, Traced

CASES: tuple[Case, ...] = tuple(
    case
    for room in ("arrays", "masks", "scores", "arguments", "around", "devices")
    for case in importlib.import_module(f"bad_input.{room}").CASES
)

__all__ = ["CASES", "Case", "Maker", "Traced"]
