"""What a fault is: a text of one file, what it becomes, and the tests that concern it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """One small fault.

    `old` stands exactly once in `file`, a path from the root of the repository. In C++ (csrc/) both are expressions:
    a build for the mutants holds all of them, and chooses when it runs.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Arguments of pytest: files, node ids, -k."""
    what: str
    """What goes wrong, in a line."""

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")

    @property
    def digest(self) -> str:
        """What a result is good for: the same fault, and the same tests."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new, self.tests)).encode()).hexdigest()[:16]

    def occurrences(self) -> int:
        """How often `old` stands in the file as it is."""
        return (ROOT / self.file).read_text().count(self.old)
