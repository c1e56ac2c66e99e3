"""What a fault is: an expression or statement of one function, what it becomes, and the tests that concern it.

A single letter A to D or X to Z in `old` stands for any expression, the same letter for equal ones; in `new` it stands
for that expression. In C++ it stands for a name with its members, calls and indices.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LETTER = re.compile(r"\b[A-DX-Z]\b")
_TERM = r"[\w.]+(?:(?:->|::|\.)\w+|\([^()]*\)|\[[^][]*\])*"


@dataclass(frozen=True)
class Fault:
    """One small fault.

    `old` stands exactly once in `function` of `file`, a path from the root of the repository: in Python as part of its
    syntax tree, in C++ (csrc/) of its text, whitespace aside. There both are expressions: a build for the mutants holds
    all of them, and chooses when it runs.
    """

    name: str
    file: str
    function: str
    """A function or class by its qualified name: ``Class.method``, in C++ ``Class::method``; or "", all of the file."""
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
        parts = (self.file, self.function, self.old, self.new, self.tests)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def mutated(self, text: str, number: int | None = None) -> str:
        """The text of the file with the fault in it; where it has a number, if that is the fault in use."""
        places = list((_native_places if self.is_native else _places)(self, text))
        if len(places) != 1:
            lines = ", ".join(str(text.count("\n", 0, start) + 1) for start, _, _ in places)
            where = f"in {self.function or 'the whole'} of {self.file}"
            raise LookupError(f"{self.name}: expected {self.old!r} once {where}, got it in lines: {lines or 'none'}")
        start, stop, new = places[0]
        if number is not None:
            new = f"(attnscore::fault_in_use() == {number} ? ({new}) : ({text[start:stop]}))"
        return text[:start] + new + text[stop:]


# ------------------------------------------------------------------ Python


def _places(fault: Fault, text: str) -> Iterator[tuple[int, int, str]]:
    """Where the nodes of `old` begin and end, and what replaces them."""
    old, new = (ast.parse(x).body[0] for x in (fault.old, fault.new))
    is_expression = isinstance(old, ast.Expr) and isinstance(new, ast.Expr)
    pattern = old.value if isinstance(old, ast.Expr) and is_expression else old
    lines = text.split("\n")

    def index(line: int, column: int) -> int:  # columns count bytes
        return sum(len(x) + 1 for x in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())

    nodes = {
        x for scope in _scopes(ast.parse(text), fault.function) for x in ast.walk(scope) if type(x) is type(pattern)
    }
    for node in sorted(nodes, key=lambda x: (x.lineno, x.col_offset)):
        letters: dict[str, str] = {}
        if _matches(pattern, node, letters):
            changed = ast.unparse(_Substituted(letters).visit(ast.parse(fault.new)))
            start, stop = index(node.lineno, node.col_offset), index(node.end_lineno, node.end_col_offset)
            yield start, stop, f"({changed})" if is_expression else changed


def _scopes(tree: ast.AST, function: str) -> Iterator[ast.AST]:
    """The functions or classes of a qualified name."""
    first, _, rest = function.partition(".")
    if not first:
        yield tree
    for node in ast.walk(tree) if first else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == first:
            yield from _scopes(node, rest)


def _matches(pattern: Any, node: Any, letters: dict[str, str]) -> bool:
    """Whether a node is of the pattern; fills in what the letters stand for."""
    name = getattr(pattern, {ast.Name: "id", ast.arg: "arg"}.get(type(pattern), ""), "")
    if _LETTER.fullmatch(name):
        kind = ast.expr if isinstance(pattern, ast.Name) else ast.arg
        return isinstance(node, kind) and letters.setdefault(name, ast.unparse(node)) == ast.unparse(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(_matches(x, y, letters) for x, y in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST):
        fields = [x for x in pattern._fields if x != "ctx"]
        return all(_matches(getattr(pattern, x), getattr(node, x), letters) for x in fields)
    return bool(pattern == node)


class _Substituted(ast.NodeTransformer):
    """Puts what the letters stand for in their place."""

    def __init__(self, letters: dict[str, str]) -> None:
        self.letters = letters

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse(self.letters[node.id], mode="eval").body if node.id in self.letters else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.letters.get(node.arg, node.arg))


# ------------------------------------------------------------------ C++


def _native_places(fault: Fault, text: str) -> Iterator[tuple[int, int, str]]:
    """Where the texts of `old` begin and end, and what replaces them."""
    parts: list[str] = []
    for token in re.findall(r"\w+|\S", fault.old):
        first = f"(?P<{token}>{_TERM})"
        again = f"(?P={token})" if first in parts else first
        parts.append(again if _LETTER.fullmatch(token) else re.escape(token))
    before = r"(?<![\w.])(?<!->)(?<!::)" if re.match(r"\w", fault.old) else ""
    pattern = re.compile(before + r"\s*".join(parts) + (r"(?!\w)" if re.search(r"\w$", fault.old) else ""))
    matches = [x for start, stop in _bodies(text, fault.function) for x in pattern.finditer(text, start, stop)]
    for x in {x.start(): x for x in matches}.values():
        yield x.start(), x.end(), _LETTER.sub(lambda letter, x=x: x.groupdict().get(letter[0], letter[0]), fault.new)


def _bodies(text: str, function: str) -> Iterator[tuple[int, int]]:
    """Where the bodies of a function or class begin and end."""
    if not function:
        yield 0, len(text)
        return
    name = re.escape(function)
    for head in re.finditer(rf"(?<![\w.>:]){name}\s*(?=\()|\b(?:struct|class)\s+{name}\b[^;{{(]*(?={{)", text):
        stop = _closing(text, head.end()) if text[head.end()] == "(" else head.end()
        if brace := re.compile(r"\s*(?:const|noexcept)?\s*(?:(?:->|:)[^;{}]*)?(?=\{)").match(text, stop):
            yield brace.end(), _closing(text, brace.end())
    owner, _, method = function.partition("::")
    for start, stop in _bodies(text, owner) if method else ():
        yield from ((start + a, start + b) for a, b in _bodies(text[start:stop], method))


def _closing(text: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`."""
    depth = 0
    for bracket in re.compile(r"[][(){}]").finditer(text, start):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return bracket.end()
    raise ValueError(f"expected a bracket that closes {text[start : start + 20]!r}")
