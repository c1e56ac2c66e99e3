"""The rooms and their arrows: imports go one way, frameworks stay behind their doors, the core needs NumPy alone.

The imports are read from the source, those inside functions too: a lazy import is an arrow like any other. What only a
type checker reads (``if TYPE_CHECKING``) is none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import attnscore

SOURCE = Path(attnscore.__file__).parent

# From the bottom to the top: a room imports what lies in its own row and in the rows below.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors", "_native"),
    ("checks", "frameworks", "recall", "threads"),
    ("grid",),
    ("masking", "scoring", "softmax", "dropout", "statistics"),
    ("problem",),
    ("tiling", "pose"),
    ("engine",),
    ("kernels",),
    ("blocks", "largest", "maps", "functional", "costs", "recipes", "plain_calls"),
    ("api",),
    ("attnscore",),  # the public names
    ("layers", "testing", "files", "plotting"),
    ("integrations", "diagnostics", "bench"),
    ("commands", "demo", "cli", "__main__"),
)
RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "mxnet", "transformers")
# Rooms above the core that may reach for a framework, inside a function, when they are used.
LAZY_FRAMEWORKS = ("bench", "commands", "demo", "diagnostics")
LAZY_KERNELS = ("kernels.fused", "kernels.triton")
# What the core may import: anything else would be a dependency of `import attnscore`.
CORE = {"numpy", "attnscore", *sys.stdlib_module_names}


class Arrow(NamedTuple):
    """`importer` imports `imported`."""

    importer: str
    imported: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) imports {self.imported}"


def name_of(path: Path) -> str:
    """A file's module below the package: "scoring.dot", "attnscore" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").rstrip(".") or "attnscore"


FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def arrows_of(module: str) -> Iterator[Arrow]:
    """Every import that runs, at import or in a call."""
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(FILES[module].read_text(encoding="utf-8")), False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend((child, lazy) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (Arrow(module, alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("attnscore.") in FILES and node.module == "attnscore"
                yield Arrow(module, whole if is_module else str(node.module), node.lineno, lazy)
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        stack.extend((child, lazy) for child in ast.iter_child_nodes(node))


ARROWS = [arrow for module in FILES for arrow in arrows_of(module)]
INSIDE = [
    arrow._replace(imported=arrow.imported.removeprefix("attnscore."))
    for arrow in ARROWS
    if arrow.imported.split(".")[0] == "attnscore"
]
OUTSIDE = [arrow for arrow in ARROWS if arrow.imported.split(".")[0] != "attnscore"]


def test_every_module_lies_in_a_room() -> None:
    assert {room_of(module) for module in FILES} <= set(RANK)
    assert len(FILES) > 30


def test_imports_go_one_way() -> None:
    """Rooms of one row are neighbours; that they do not go in circles, the next test shows."""
    back = [str(arrow) for arrow in INSIDE if RANK[room_of(arrow.imported)] > RANK[room_of(arrow.importer)]]
    assert not back, "\n".join(back)


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {module: {arrow.imported for arrow in INSIDE if arrow.importer == module} for module in FILES}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                # A package and its own modules: __init__ gathers what they define.
                if imported != module.rpartition(".")[0]:
                    walk(imported, (*path, module))
            done.add(module)

    for module in FILES:
        walk(module, ())


def _owner(module: str) -> str | None:
    """The framework that a file is for: frameworks/torch.py, layers/torch_multihead.py, diagnostics/torch_..., ..."""
    room, _, file = module.partition(".")
    if room in ("frameworks", "layers", "diagnostics"):
        return next((name for name in FRAMEWORKS if file == name or file.startswith(f"{name}_")), None)
    return None


def test_frameworks_stay_behind_their_doors() -> None:
    wrong = []
    for arrow in OUTSIDE:
        framework = arrow.imported.split(".")[0]
        if framework not in FRAMEWORKS:
            continue
        room = room_of(arrow.importer)
        at_home = _owner(arrow.importer) in (framework, {"flax": "jax", "jax": "flax"}.get(framework))
        lazily = arrow.lazy and (room in LAZY_FRAMEWORKS or arrow.importer in LAZY_KERNELS)
        if not (at_home or room == "integrations" or lazily):
            wrong.append(str(arrow))
    assert not wrong, "\n".join(wrong)
    assert any(arrow.importer == "frameworks.torch" for arrow in OUTSIDE if arrow.imported == "torch")


def test_the_core_imports_numpy_and_the_standard_library() -> None:
    top = RANK["attnscore"]
    wrong = [
        str(arrow)
        for arrow in OUTSIDE
        if arrow.imported.split(".")[0] not in CORE
        and RANK[room_of(arrow.importer)] <= top
        and _owner(arrow.importer) is None
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_but_numpy_is_imported_with_a_room_above_the_core() -> None:
    """matplotlib, safetensors and the like are imported where they are used; typer and rich by the commands alone."""
    wrong = [
        str(arrow)
        for arrow in OUTSIDE
        if arrow.imported.split(".")[0] not in CORE
        and not arrow.lazy
        and _owner(arrow.importer) is None
        and room_of(arrow.importer) not in ("commands", "integrations")
    ]
    assert not wrong, "\n".join(wrong)


def test_folders_are_one_level_deep() -> None:
    assert all(len(path.relative_to(SOURCE).parts) <= 2 for path in FILES.values())


def test_nobody_reads_a_private_name_of_another_room() -> None:
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


def test_sizes(record_property: Callable[[str, object], None]) -> None:
    """Reported, not asserted: about 300 lines a file and 40 a function is a feel for size, not a law (-s shows it)."""
    sizes = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in FILES.items()}
    functions = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    longest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    largest = sorted(functions.items(), key=lambda item: -item[1])[:8]
    record_property("lines", sum(sizes.values()))
    record_property("longest files", longest)
    record_property("longest functions", largest)
    print(f"{len(sizes)} files, {sum(sizes.values())} lines")
    for kind, rows in (("file", longest), ("function", largest)):
        print(*(f"{kind} {name}: {lines}" for name, lines in rows), sep="\n")
