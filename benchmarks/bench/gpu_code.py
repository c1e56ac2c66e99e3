"""Facts of the compiled kernels for each architecture: registers, spills, shared memory, matrix instructions.

``python benchmarks gpu-code FILE`` compiles each entry of the tile table, without a GPU, and writes
the page of the documentation. The compiler and the disassembler come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnscore.io import replacing
from attnscore.kernels import tiling
from attnscore.kernels.triton import launch
from attnscore.kernels.triton.tiles import Tile, tile_of
from attnscore.masks import Causal
from attnscore.problem.problem import build_problem
from attnscore.problem.results import RowGradients

ARCHITECTURES = (80, 89, 90)
"""Architectures of the page."""
SHARED_MEMORY = {
    architecture: 1024 * kilobytes
    for architectures, kilobytes in (((80, 87), 163), ((86, 89, 120, 121), 99), ((90, 100, 103, 110), 227))
    for architecture in architectures
}
"""Bytes that a program may have, by architecture (CUDA's programming guide, compute capabilities)."""
LARGEST_SHARED_MEMORY = max(SHARED_MEMORY.values())
_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """Facts of a compiled kernel."""

    registers: int
    """Registers of a thread; at most 255."""
    spills: int
    """Instructions that store registers to memory or load them back."""
    shared: int
    """Bytes of shared memory."""
    matrix: str
    """Matrix instruction: HGMMA (sm_90), HMMA, or none."""
    atomics: int


class Recorder(launch.Runner):
    """Compiles each kernel for an architecture in place of a launch."""

    keeps_tables = False

    def __init__(
        self, architecture: int, wanted: Collection[str] | None = None, tiles: Mapping[str, Tile] | None = None
    ) -> None:
        self.target = architecture
        self.tiles = tiles or {}
        """Tiles by kernel, in place of the table's."""
        self.wanted = wanted
        """Names of the kernels to compile; None: all."""
        self.found: dict[str, Code] = {}

    def architecture(self, x: torch.Tensor) -> int:
        return self.target

    def tile(self, kernel: Any, architecture: int, form: str, dtype: str, dim: int) -> Tile:
        return self.tiles.get(kernel) or super().tile(kernel, architecture, form, dtype, dim)

    def run(self, kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
        """Compile a kernel as a launch with these operands would."""
        if self.wanted is not None and kernel.__name__ not in self.wanted:
            return
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        signature: dict[str, Any] = {}
        constexprs: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        names = kernel.arg_names
        values = dict(zip(names, operands, strict=False)) | constants
        for index, name in enumerate(names):
            if name in constants:
                signature[name], constexprs[(index,)] = "constexpr", values[name]
            else:
                signature[name] = _type_of(values[name], (index,), constexprs, attributes)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.target, 32), options=options)
        self.found[kernel.__name__] = _code(compiled)


def _type_of(x: Any, path: tuple[int, ...], constexprs: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """Return the type of an operand as Triton writes it, and note its specialisations."""
    if isinstance(x, tuple):
        types = [_type_of(part, (*path, k), constexprs, attributes) for k, part in enumerate(x)]
        return type(x)(*types) if hasattr(x, "_fields") else tuple(types)
    if x is None or (isinstance(x, int) and x == 1):
        constexprs[path] = x
        return "constexpr"
    if isinstance(x, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[x.dtype]
    if isinstance(x, int):
        if x % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    return "fp32"


def _code(compiled: Any) -> Code:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, assembly = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)[^;]*;", assembly)

    def count(*wanted: str) -> int:
        return sum(name in wanted for name in names)

    matrix = next((name for name in ("HGMMA", "HMMA") if count(name)), "none")
    atomics = sum(name.startswith(("ATOM", "RED")) and not name.startswith("REDUX") for name in names)
    spills = count("STL", "LDL")
    return Code(int(registers[1]) if registers else 0, spills, compiled.metadata.shared, matrix, atomics)


ENTRIES: tuple[tuple[int, str, int, str], ...] = tuple(
    (architecture, dtype, dim, score)
    for architecture in ARCHITECTURES
    for dtype, dim, score in (
        *((dtype, dim, "scaled_dot") for dtype in ("bfloat16", "float32") for dim in (32, 64, 128, 256)),
        ("float32", 64, "gaussian"),
    )
)
"""(architecture, dtype, dimension, score) of every entry of the tile table."""
KERNELS = ("forward", "d_query", "d_key")


def compile_call(
    architecture: int, dtype: str, dim: int, wanted: Collection[str] | None = KERNELS,
    shape: tuple[int, int, int, int] = (1, 2, 64, 64), tiles: Mapping[str, Tile] | None = None, **options: Any,
) -> dict[str, Code]:  # fmt: skip
    """Compile the kernels of a causal call of one KV head and all their gradients; return their facts by name.

    `shape` has batch, query heads, queries and keys; `tiles` replace the table's; `options` are
    arguments of `attend`.
    """
    batch, heads, queries, keys = shape
    query = torch.zeros(batch, heads, queries, dim, dtype=getattr(torch, dtype))
    key = query.new_zeros(batch, 1, keys, dim)
    options = {"mask": Causal("bottom_right"), **options}
    problem, _ = build_problem(query, key, key, **options)
    plan, runner = tiling.plan(problem), Recorder(architecture, wanted, tiles)
    result = launch.forward(problem, plan, runner)
    grads = RowGradients(result.out, entropy=result.statistics.get("entropy"))
    launch.backward(problem, plan, result, grads, frozenset(problem.operands()), runner)
    return runner.found


def page() -> str:
    """Return the page of the documentation: a table of every entry."""
    lines = [
        "# Compiled GPU kernels",
        "",
        f"What Triton {triton.__version__} and its assembler make of each entry of the tile table of the kernels:",
        "a causal call with grouped heads. Compiled without a GPU; none of these numbers is a time.",
        "",
        "- **tile**: queries x keys, warps of a program, stages of its pipeline",
        "- **registers** of a thread, at most 255; **spills**: instructions that move registers to memory and back",
        "- **shared**: KB of shared memory of a program, of 163 (sm_80), 99 (sm_89) and 227 (sm_90)",
        "- **matrix**: the instruction that multiplies tiles. No kernel has an atomic operation.",
        "",
        "Made by `python benchmarks gpu-code benchmarks/results/gpu-code.md`.",
    ]
    for architecture in ARCHITECTURES:
        lines += [
            "",
            f"## sm_{architecture}",
            "",
            "| score | dtype | dim | kernel | tile | registers | spills | shared | matrix |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for arch, dtype, dim, score in ENTRIES:
            if arch != architecture:
                continue
            for name, code in compile_call(arch, dtype, dim, score=score).items():
                tile = tile_of(cast(Any, name), arch, "distance" if score == "gaussian" else "inner", dtype, dim)
                facts = f"{code.registers} | {code.spills} | {code.shared / 1024:.0f} | {code.matrix}"
                sizes = f"{tile.queries} x {tile.keys}, {tile.warps}, {tile.stages}"
                lines.append(f"| {score} | {dtype} | {dim} | {name} | {sizes} | {facts} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Replace the page of the documentation; return the exit status."""
    if len(arguments) != 1:
        print("expected the page, as in: python benchmarks gpu-code benchmarks/results/gpu-code.md", file=sys.stderr)
        return 2
    with replacing(Path(arguments[0])) as file:
        file.write(page().encode())
    return 0
