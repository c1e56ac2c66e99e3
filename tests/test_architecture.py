"""Imports go one way, a framework is imported by its own modules alone, and the core needs NumPy alone.

The imports are read from the source, those inside functions included; those under ``if TYPE_CHECKING`` do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from selection import SOURCE, module_of

# From the bottom to the top: a package or file imports from its own row and the rows below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "io", "_native"),
    ("base",),
    ("backends",),
    ("masks", "scores"),
    ("problem",),
    ("kernels",),
    ("analysis", "plans", "packing"),
    ("api",),
    ("kv_buffers", "kv_cache"),
    ("attnscore",),  # the public names
    ("parallel",),
    ("layers", "testing", "plotting"),
    ("integrations", "compat", "diagnostics"),
    ("cli", "__main__"),
)
RANK = {module: rank for rank, row in enumerate(LAYERS) for module in row}

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "mxnet", "transformers")
# Packages above the core that may import a framework inside a function.
LAZY_FRAMEWORKS = ("cli", "diagnostics")
LAZY_KERNELS = ("kernels.fused", "kernels.triton")
# What the core may import: anything else would be a dependency of `import attnscore`.
CORE = {"numpy", "attnscore", *sys.stdlib_module_names}


class Import(NamedTuple):
    """`importer` imports `imported`."""

    importer: str
    imported: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) imports {self.imported}"


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def layer_of(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    while module not in RANK and "." in module:
        module = module.rpartition(".")[0]
    return module


def package_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def imports_of(module: str) -> Iterator[Import]:
    """Every import that runs, at import or in a call."""
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(FILES[module].read_text(encoding="utf-8")), False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend((child, lazy) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("attnscore.") in FILES
                yield Import(module, whole if is_module else str(node.module), node.lineno, lazy)
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        stack.extend((child, lazy) for child in ast.iter_child_nodes(node))


IMPORTS = [found for module in FILES for found in imports_of(module)]
INSIDE = [
    found._replace(imported=found.imported.removeprefix("attnscore."))
    for found in IMPORTS
    if found.imported.split(".")[0] == "attnscore"
]
OUTSIDE = [found for found in IMPORTS if found.imported.split(".")[0] != "attnscore"]


def test_every_module_has_a_layer() -> None:
    assert {layer_of(module) for module in FILES} <= set(RANK)
    assert len(FILES) > 30


def test_imports_go_one_way() -> None:
    """Packages and files of one row may import each other; the next test shows that none does so in a circle."""
    back = [str(found) for found in INSIDE if RANK[layer_of(found.imported)] > RANK[layer_of(found.importer)]]
    assert not back, "\n".join(back)


@pytest.mark.parametrize("of", [str, package_of], ids=["files", "packages"])
def test_nothing_imports_itself_by_a_detour(of: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {}
    for found in INSIDE:
        if of is str or of(found.imported) != of(found.importer):
            graph.setdefault(of(found.importer), set()).add(of(found.imported))
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                # A package and its own modules: __init__ gathers what they define.
                if imported != module.rpartition(".")[0]:
                    walk(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


def _owner(module: str) -> str | None:
    """Return the framework that a module is for: backends.torch, layers.torch_multihead, backends.jax.ffi, ..."""
    package, _, file = module.partition(".")
    if module == "kernels.fused" or module.startswith("kernels.triton."):
        return "torch"
    file = file.partition(".")[0] if package == "backends" else file.rpartition(".")[2]
    if package in ("backends", "layers", "compat", "diagnostics", "parallel"):
        return next((name for name in FRAMEWORKS if file == name or file.startswith(f"{name}_")), None)
    return None


def test_frameworks_are_imported_by_their_own_modules_alone() -> None:
    wrong = []
    for found in OUTSIDE:
        framework = found.imported.split(".")[0]
        if framework not in FRAMEWORKS:
            continue
        package = package_of(found.importer)
        at_home = _owner(found.importer) in (framework, {"flax": "jax", "jax": "flax"}.get(framework))
        lazily = found.lazy and (package in LAZY_FRAMEWORKS or found.importer in LAZY_KERNELS)
        if not (at_home or package == "integrations" or lazily):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)
    assert any(found.importer == "backends.torch" for found in OUTSIDE if found.imported == "torch")


def test_what_crashes_after_tensorflow_is_imported_where_it_is_needed() -> None:
    """torch.nn.attention.bias imports torch._dynamo, and that Triton."""
    crashing = ("triton", "torch._dynamo", "torch._inductor", "torch.nn.attention.bias", "torch.export")
    importers = {found.importer for found in OUTSIDE if found.imported.startswith(crashing)}
    assert all(name.startswith("kernels.triton.") for name in importers)


OTHERS = [found for found in OUTSIDE if found.imported.split(".")[0] not in CORE and _owner(found.importer) is None]
"""Imports of packages that are neither the core's nor the framework that the module is for."""


def test_the_core_imports_numpy_and_the_standard_library() -> None:
    wrong = [str(found) for found in OTHERS if RANK[layer_of(found.importer)] <= RANK["attnscore"]]
    assert not wrong, "\n".join(wrong)


def test_other_packages_are_imported_where_they_are_used() -> None:
    """matplotlib, safetensors and the like are imported where they are used; typer and rich by the commands alone."""
    eager = [found for found in OTHERS if not found.lazy]
    wrong = [str(found) for found in eager if package_of(found.importer) not in ("cli", "integrations")]
    assert not wrong, "\n".join(wrong)


def test_private_names_are_not_imported() -> None:
    wrong = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("attnscore"):
                wrong += [
                    f"{module} takes {alias.name} from {node.module}"
                    for alias in node.names
                    if alias.name.startswith("_") and not alias.name.startswith("__")
                ]
    assert not wrong, "\n".join(wrong)
