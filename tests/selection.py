"""Which tests run: those that concern some modules, those of two frameworks, a part of the slow ones.

- ``--for masks,scores`` or ``--for changed``: test files that name a public name or a module of those packages, and
  those that find a fault of ``tests/mutants`` in them. ``changed``: what differs from the branch main, tests included.
- ``--quick``: NumPy, PyTorch and the native module. What imports another framework is left out, and fails if it runs.
- ``--slow-part 2/4``: of the slow tests the third quarter (0/4 is the first), of the others all.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "attnscore"
OTHERS = ("jax", "jaxlib", "flax", "tensorflow", "keras", "mxnet", "transformers", "onnxruntime")
"""Frameworks that a quick run does not import."""
OF_ALL = ("test_public_api.py",)
"""Files that read the modules of all frameworks."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--for", default="", metavar="NAMES", help="packages or modules of attnscore, or: changed")
    group.addoption("--quick", action="store_true", help="NumPy, PyTorch and the native module alone")
    group.addoption("--slow-part", default="", metavar="K/N", help="of the slow tests one of N parts, counted from 0")


# ------------------------------------------------------------------ tests that concern a module


def module_of(path: Path) -> str:
    """A file's module below the package: "masks.function"; "" for the package itself."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


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


def modules_named(path: Path) -> set[str]:
    """The modules of attnscore that a file names: by imports, and by public names."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("attnscore.") for alias in node.names if "attnscore." in alias.name}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("attnscore."):
            module = str(node.module).removeprefix("attnscore.")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "attnscore":
            found |= {_origins().get(alias.name, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "attnscore":
            found.add(_origins().get(node.attr, node.attr))
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
    for path in changed_files() if "changed" in names else ():
        if path.is_relative_to(SOURCE) and path.suffix == ".py":
            modules.add(module_of(path))
        elif path.is_relative_to(ROOT / "csrc"):
            modules.add("kernels.native")
        elif path.parent == TESTS:
            # Of a helper those that import it.
            chosen |= {path} | {p for p in TESTS.glob("test_*.py") if re.search(rf"\b{path.stem}\b", p.read_text())}
    known = {module_of(path) for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.iterdir()}
    if unknown := modules - known:
        raise pytest.UsageError(f"--for: expected packages or modules of attnscore, got {', '.join(sorted(unknown))}")

    def concerns(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in modules)

    chosen |= {path for path in TESTS.glob("test_*.py") if any(map(concerns, modules_named(path)))}
    for fault in FAULTS.values():
        path = ROOT / fault.file
        if concerns(module_of(path) if path.is_relative_to(SOURCE) else "kernels.native"):
            chosen |= {TESTS / name for name in re.findall(r"\btest_\w+\.py", fault.tests)}
    return {path for path in chosen if path.name.startswith("test_") and path.exists()}


# ------------------------------------------------------------------ quick


def _imports_others(nodes: Iterable[ast.AST]) -> bool:
    """Whether some of the nodes import another framework, or a helper of the tests that does."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    helpers = (path for name in names if (path := TESTS / f"{name}.py").exists())
    return any(name.partition(".")[0] in OTHERS for name in names) or any(needs_others(x) is True for x in helpers)


@functools.cache
def needs_others(path: Path) -> bool | frozenset[str]:
    """Whether a file imports another framework; or else its functions that do."""
    tree = _tree(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return (
        path.name in OF_ALL
        or _imports_others(tree.body)
        or frozenset(x.name for x in functions if _imports_others(ast.walk(x)))
    )


def is_of_others(item: pytest.Item) -> bool:
    """Whether a test, its row of a table or one of its fixtures names or imports another framework."""
    words = re.split(r"[^a-z0-9]+", item.name.lower().replace("_", " "))
    functions = needs_others(item.path)
    names = {getattr(item, "originalname", item.name), *getattr(item, "fixturenames", ())}
    return bool(set(words) & set(OTHERS)) or functions is True or bool(names & set(functions or ()))


# ------------------------------------------------------------------ the choice


def configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        for name in OTHERS:
            sys.modules[name] = None  # type: ignore[assignment] # as where it is not installed
    names = [name for name in config.getoption("--for").split(",") if name]
    config.stash[_FILES] = files_for(names) if names else None


_FILES = pytest.StashKey[set[Path] | None]()


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether a test file is not collected."""
    if not path.name.startswith("test_"):
        return False
    files = config.stash.get(_FILES, None)
    return (files is not None and path not in files) or (config.getoption("--quick") and needs_others(path) is True)


def part_of(item: pytest.Item, parts: int) -> int:
    """The part of a slow test: one of each function's rows in every part, where it has many."""
    return zlib.crc32(item.nodeid.encode()) % parts


def left_out(items: Iterable[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The collected tests that do not run."""
    found = []
    if part := config.getoption("--slow-part"):
        number, parts = map(int, part.split("/"))
        found += [x for x in items if x.get_closest_marker("slow") and part_of(x, parts) != number % parts]
    if config.getoption("--quick"):
        found += [x for x in items if is_of_others(x)]
    return found
