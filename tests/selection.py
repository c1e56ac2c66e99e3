"""Selection of tests: tests that concern some modules, tests of two frameworks, a part of the slow tests.

- By default a quarter of the rows of each long table. The others are slow, which four landings run by turns.
- ``--for masks,scores`` or ``--for changed``: test files that import those packages, their modules or names, and those
  that find a fault of ``tests/mutants`` in them. ``changed``: packages that differ from the branch main, and tests.
- ``--quick``: attention in NumPy, PyTorch and the native module, half of the default rows. What imports another
  framework is left out, and fails if it runs.
- ``--framework jax``: the tests that import or name it, without tests of frameworks that are not installed.
- ``--slow-part 2/4``: of the slow tests the second quarter, of the others all.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "attnscore"
OTHERS = ("jax", "jaxlib", "flax", "tensorflow", "keras", "mxnet", "transformers", "onnxruntime")
"""Frameworks that a quick run does not import."""
FRAMEWORKS = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax", "jaxlib", "flax"),
    "flax": ("flax",),
    "tensorflow": ("tensorflow", "keras"),
    "transformers": ("transformers", "hf"),
}
"""By framework the words by which its tests are known: packages that they import, and parts of their names."""
AROUND = ("bench", "benchmarks", "claims", "cli", "demo", "diagnostics", "doctests", "files", "glossary", "gpu",
          "imports", "inspect", "install", "map", "mission", "mutants", "parallel", "plotting", "public", "readme",
          "selection", "topics", "triton", "tutorials")  # fmt: skip
"""Words in the names of files that a quick run leaves out: what surrounds attention, other processes, GPUs, prose."""
ROWS = 2
"""A quick run takes one of so many rows that a default run has of each test."""
LONG = 16
"""Rows of a test beyond which three quarters are slow."""
WHOLE = ("tests/test_native_", "tests/test_mutants.py", "tests/test_doctests.py", "tests/test_claims.py")
"""Tests that keep all rows: each target belongs to some machine, each fault has to apply, each page to hold."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--for", default="", metavar="NAMES", help="packages or modules of attnscore, or: changed")
    group.addoption("--quick", action="store_true", help="half of the tests of NumPy, PyTorch, native kernels")
    group.addoption("--framework", default="", choices=["", *FRAMEWORKS], help="tests of this framework")
    group.addoption("--slow-part", default="", metavar="K/N", help="of the slow tests one of N parts")


# ------------------------------------------------------------------ tests that concern a module


def module_of(path: Path) -> str:
    """A file's module below the package: "masks.function", "attnscore" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").rstrip(".") or "attnscore"


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _origins() -> dict[str, str]:
    """The module that each public name comes from, as __init__.py imports it."""
    found = {}
    for node in ast.walk(_tree(SOURCE / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("attnscore."):
            found |= {alias.asname or alias.name: str(node.module).removeprefix("attnscore.") for alias in node.names}
    return found


@functools.cache
def modules_imported(path: Path) -> set[str]:
    """The modules of attnscore that a file imports, and those that public names which it imports come from."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found |= {name.removeprefix("attnscore.") for name in names if name.startswith("attnscore")}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("attnscore."):
            module = str(node.module).removeprefix("attnscore.")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "attnscore":
            found |= {_origins().get(alias.name, alias.name) for alias in node.names}
    return found


def changed_files() -> list[Path]:
    """What differs from main: committed, not yet committed, and new."""
    commands = (["git", "diff", "--name-only", "main"], ["git", "ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.run(c, cwd=ROOT, check=True, capture_output=True, text=True).stdout for c in commands]
    return [ROOT / line for line in "".join(lines).splitlines()]


def files_for(names: Sequence[str]) -> set[Path]:
    """The test files for packages or modules, such as "masks" or "masks.function"; or for what is "changed"."""
    from mutants import FAULTS

    modules, chosen = set(names) - {"changed"}, set()
    known = {module_of(path) for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.iterdir()}
    if unknown := modules - known:
        raise pytest.UsageError(f"--for: expected packages or modules of attnscore, got {', '.join(sorted(unknown))}")
    for path in changed_files() if "changed" in names else ():
        if path.is_relative_to(SOURCE) and path.suffix == ".py":
            modules.add(module_of(path).partition(".")[0])
        elif path.is_relative_to(ROOT / "csrc"):
            modules.add("kernels.native")
        elif path.parent == TESTS:
            # Of a helper those that import it.
            chosen |= {path} | {p for p in TESTS.glob("test_*.py") if re.search(rf"\b{path.stem}\b", p.read_text())}

    def concerns(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in modules)

    chosen |= {path for path in TESTS.glob("test_*.py") if any(map(concerns, modules_imported(path)))}
    for fault in FAULTS.values():
        path = ROOT / fault.file
        if concerns(module_of(path) if path.is_relative_to(SOURCE) else "kernels.native"):
            chosen |= {TESTS / name for name in re.findall(r"\btest_\w+\.py", fault.tests)}
    return {path for path in chosen if path.name.startswith("test_") and path.exists()}


# ------------------------------------------------------------------ quick


def _imports_any(nodes: Iterable[ast.AST], packages: Sequence[str]) -> bool:
    """Whether some of the nodes import one of the packages, or a helper of the tests that does."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    helpers = (path for name in names if (path := TESTS / f"{name}.py").exists())
    imported = {name.partition(".")[0] for name in names}
    return not imported.isdisjoint(packages) or any(importing(x, packages) is True for x in helpers)


@functools.cache
def importing(path: Path, packages: Sequence[str] = OTHERS) -> bool | frozenset[str]:
    """Whether a file imports one of the packages; or else its functions that do."""
    tree = _tree(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return _imports_any(tree.body, packages) or frozenset(
        x.name for x in functions if _imports_any(ast.walk(x), packages)
    )


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower().replace("_", " ")))


def is_quick_file(path: Path) -> bool:
    return not _words(path.stem) & {*OTHERS, *AROUND} and importing(path) is not True


def _imports(item: pytest.Item, packages: Sequence[str]) -> bool:
    """Whether a test's file, itself or a fixture of it imports one of the packages."""
    found = importing(item.path, packages)
    if isinstance(found, bool):
        return found
    return not found.isdisjoint({getattr(item, "originalname", item.name), *getattr(item, "fixturenames", ())})


def is_quick(item: pytest.Item) -> bool:
    """Whether a quick run has a test: neither it nor its fixtures name or import another framework, or all of them."""
    is_of_others = _words(item.name) & {*OTHERS, "framework"} or _imports(item, OTHERS)
    return not is_of_others and ("[" not in item.name or part_of(item, ROWS) == 1)


# ------------------------------------------------------------------ one framework


@functools.cache
def absent() -> tuple[str, ...]:
    """Frameworks that are not installed."""
    return tuple(name for name in OTHERS if importlib.util.find_spec(name) is None)


def is_of_framework(item: pytest.Item, framework: str) -> bool:
    """Whether a test imports or names a framework, of those that can run here. NumPy's are all that can."""
    words, names = _words(item.name) | _words(item.path.stem), FRAMEWORKS[framework]
    if words & set(absent()) or _imports(item, absent()) or (absent() and "framework" in _words(item.name)):
        return False  # of others, or of all
    if framework == "numpy" or words & set(names):
        return True
    return not words & {*OTHERS, "torch"} and _imports(item, names)


# ------------------------------------------------------------------ the choice


_FILES = pytest.StashKey[set[Path] | None]()


def configure(config: pytest.Config) -> None:
    """Read what is chosen, before anything is imported or collected."""
    if config.getoption("--quick"):
        for name in OTHERS:
            sys.modules[name] = None  # type: ignore[assignment] # as where it is not installed
    names = [name for name in config.getoption("--for").split(",") if name]
    config.stash[_FILES] = files_for(names) if names else None


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether a test file is not collected."""
    if not path.name.startswith("test_"):
        return False
    files = config.stash.get(_FILES, None)
    if files is not None and path not in files:
        return True
    if framework := config.getoption("--framework"):
        surrounds = _words(path.stem) & set(AROUND) and not importing(path, FRAMEWORKS[framework])
        return importing(path, absent()) is True or bool(surrounds)
    return bool(config.getoption("--quick")) and not is_quick_file(path)


def part_of(item: pytest.Item, parts: int) -> int:
    """The part of a test, from 1 on. The rows of one function are in all parts, where it has many."""
    return zlib.crc32(item.nodeid.encode()) % parts + 1


def mark_slow_rows(items: Iterable[pytest.Item]) -> None:
    """Mark three quarters of the rows of each long table as slow, but none that has found a fault."""
    items = [x for x in items if not x.get_closest_marker("slow") and not x.nodeid.startswith(WHOLE)]
    rows = Counter(item.nodeid.partition("[")[0] for item in items)
    results = json.loads((TESTS / "mutants" / "results.json").read_text())
    kept = {result["killed_by"] for result in results.values()}
    for item in items:
        # Of those all four parts of the slow tests have as many.
        if rows[item.nodeid.partition("[")[0]] > LONG and part_of(item, 16) > 4 and item.nodeid not in kept:
            item.add_marker(pytest.mark.slow)


def left_out(items: Iterable[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The collected tests that do not run."""
    found = []
    if part := config.getoption("--slow-part"):
        number, parts = map(int, part.split("/"))
        found += [x for x in items if x.get_closest_marker("slow") and part_of(x, parts) != number]
    if config.getoption("--quick"):
        found += [x for x in items if not is_quick(x)]
    if framework := config.getoption("--framework"):
        found += [x for x in items if not is_of_framework(x, framework)]
    return found
