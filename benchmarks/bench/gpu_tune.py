"""Tiles of the GPU kernels: timed on a GPU, or ranked by their compiled code.

``python benchmarks tune FILE --dtype bfloat16 --dim 64 128`` writes the fastest tiles found to a table that
``ATTNSCORE_GPU_TILES`` then names. With ``--compile-only`` it needs no GPU and times nothing.

- The search goes from the tile of the table to the best of its neighbours, as long as there is a better one.
- A tile is left out where its shared memory exceeds the limit of the architecture or the device, and where its results
  differ from the streaming kernel's in float64; only the other tiles are timed.
- Each tile that was tried is listed, with its registers and spills.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from attnscore.errors import ArgumentError, AttnscoreError, message
from attnscore.io import replacing
from attnscore.kernels.triton.tiles import (
    DIMS,
    DTYPES,
    FORMS,
    Entry,
    KernelName,
    Table,
    Tile,
    kernels_of,
    tile_from_numbers,
    tile_of,
)
from attnscore.masks import Causal
from attnscore.problem.problem import build_problem
from attnscore.scores import Additive, Gaussian, Score
from bench import gpu
from bench.reference import relative_difference

if TYPE_CHECKING:
    from bench.gpu_code import Code

ROUNDS, WARM_UP = 20, 3
MARGIN = 0.98
"""A tile takes the place of the table's where it needs at most this share of its time: below, times vary."""
WARPS, MOST_STAGES = (2, 4, 8, 16), 4
REGISTERS = 65536
"""Registers of a multiprocessor, in all architectures of the table."""
Shape = tuple[int, int, int, int, int]
"""Batch, query heads, KV heads, queries, keys."""
CHECKED: Shape = (1, 4, 2, 300, 333)
TIMED: dict[str, Shape] = {
    "inner": (2, 16, 16, 4096, 4096),
    "distance": (1, 8, 8, 2048, 2048),
    "additive": (1, 8, 8, 1024, 1024),
}


@dataclass(frozen=True)
class Trial:
    """A tile that was tried: its compiled code, its time where it was measured, or why it was left out."""

    tile: Tile
    code: Code | None = None
    milliseconds: float | None = None
    why: str | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: the time, or without one an estimate from the code.

        The estimate is spills, then the loads of a pair of positions (1 / queries + 1 / keys), then the number of warps
        that fit on a multiprocessor together.
        """
        if self.why is not None or self.code is None:
            # From a tile that does not fit the search goes to smaller ones.
            return float("inf"), float("inf") if self.code is None else self.code.shared
        if self.milliseconds is not None:
            return (self.milliseconds,)
        programs = REGISTERS // (32 * self.tile.warps * max(1, self.code.registers))
        return (self.code.spills, 1 / self.tile.queries + 1 / self.tile.keys, -programs * self.tile.warps)

    def __str__(self) -> str:
        queries, keys, warps, stages = self.tile
        text = f"{queries:>4} x {keys:<4} {warps:>2} warps {stages} stages"
        if self.code is not None:
            text += f" {self.code.registers:>4} registers {self.code.spills:>4} spills"
            text += f" {self.code.shared / 1024:>4.0f} KB"
        if self.milliseconds is not None:
            text += f" {self.milliseconds:>9.4f} ms"
        return text if self.why is None else f"{text}  left out: {self.why}"


def neighbours(entry: Entry, tile: Tile, *, with_stages: bool) -> Iterator[Tile]:
    """Yield the tiles that differ by a factor of 2 in one size, or move it to the other, by warps or by a stage."""
    queries, keys, warps, stages = tile
    steps: list[tuple[float, ...]] = [(2, 1), (0.5, 1), (1, 2), (1, 0.5), (2, 0.5), (0.5, 2)]
    found = [Tile(int(queries * i), int(keys * j), warps, stages) for i, j in steps]
    found += [tile._replace(warps=warps * 2), tile._replace(warps=warps // 2)]
    if with_stages:
        found += [tile._replace(stages=stages + 1), tile._replace(stages=stages - 1)]
    for other in found:
        if other.warps in WARPS and other.stages <= MOST_STAGES:
            try:
                yield tile_from_numbers(entry, [*other])
            except ValueError:
                continue


def search(start: Tile, around: Callable[[Tile], Iterable[Tile]], attempt: Callable[[Tile], Trial]) -> list[Trial]:
    """Return all trials, the best first: from `start` to the best tile around it, as long as that is a better one."""
    tried, best = {start: attempt(start)}, start
    while True:
        for tile in around(best):
            if tile not in tried:
                tried[tile] = attempt(tile)
        found = min(tried, key=lambda tile: (tried[tile].rank, tile != best))
        if found == best:
            return sorted(tried.values(), key=lambda trial: trial.rank)
        best = found


def winner(trials: list[Trial], start: Tile) -> Trial | None:
    """Return the trial to write: the best, or `start`'s trial where it is almost as fast; None where all failed."""
    best = trials[0]
    if best.why is not None:
        return None
    (first,) = (trial for trial in trials if trial.tile == start)
    if best.milliseconds is not None and first.milliseconds is not None:
        return first if best.milliseconds > MARGIN * first.milliseconds else best
    return best if best.rank < first.rank else first


def attempt(
    tile: Tile, limit: int, compiled: Callable[[Tile], Code],
    difference: Callable[[Tile], float] | None = None, tolerance: float = 0.0,
    time: Callable[[Tile], float] | None = None,
) -> Trial:  # fmt: skip
    """Compile a tile, then check it, then time it; stop where it does not fit or is wrong."""
    try:
        code = compiled(tile)
        if code.shared > limit:
            return Trial(tile, code, why=f"{code.shared / 1024:.0f} KB of shared memory, of {limit / 1024:.0f}")
        if difference is not None and not (found := difference(tile)) <= tolerance:
            return Trial(tile, code, why=f"results differ by {found:.2g} of the largest number")
        return Trial(tile, code, None if time is None else time(tile))
    except AttnscoreError:
        raise
    except Exception as error:  # compiler and driver raise errors of their own
        lines = [*filter(None, str(error).splitlines()), type(error).__name__]
        return Trial(tile, why=f"not run: {lines[0][:100]}")


# ---- a call that runs the kernel of an entry


def score_of(entry: Entry, heads: int, device: str) -> Score | str:
    """Return a score of the entry's form; the bandwidth is an array, so that no other form serves the Gaussian."""
    import torch

    if entry.form == "inner":
        return "scaled_dot"
    if entry.form == "distance":
        return Gaussian(torch.full((heads,), 2.0 * entry.dim**0.5, device=device))
    return Additive(torch.linspace(-1, 1, entry.dim, device=device, dtype=getattr(torch, entry.dtype)))


class Call:
    """A causal call of an entry's form, dtype and dimension, forward and backward, on its own random numbers."""

    def __init__(self, entry: Entry, shape: Shape, device: str) -> None:
        import torch

        self.entry = entry
        batch, heads, kv_heads, queries, keys = shape
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": device}
        sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
        self.arrays = [
            torch.randn(batch, *size, entry.dim, **options).to(getattr(torch, entry.dtype)) for size in sizes
        ]
        self.score = score_of(entry, heads, device)

    def gradients(self, runner: Any) -> dict[str, Any]:
        """Return output and gradients by the kernels; `runner` launches them."""
        from attnscore.kernels import tiling
        from attnscore.kernels.triton import launch
        from attnscore.problem.results import RowGradients

        query, key, value, grad = self.arrays
        problem, _ = build_problem(query, key, value, score=self.score, mask=Causal("bottom_right"))
        plan = tiling.plan(problem)
        result = launch.forward(problem, plan, runner)
        if self.entry.kernel == "forward":
            return {"out": result.out}
        grad = grad.reshape(result.out.shape)
        wanted = frozenset(problem.operands())
        return {"out": result.out} | launch.backward(problem, plan, result, RowGradients(grad), wanted, runner)

    def reference(self) -> dict[str, Any]:
        """Return the same as `gradients`, by the streaming kernel in float64."""
        from attnscore.kernels import tiled, tiling
        from attnscore.problem.results import RowGradients

        query, key, value, grad = (x.double() for x in self.arrays)
        score: Any = self.score
        if self.entry.form == "additive":
            score = Additive(score.w_v.double())
        problem, _ = build_problem(query, key, value, score=score, mask=Causal("bottom_right"))
        plan = tiling.plan(problem)
        result = tiled.forward(problem, plan)
        grads = tiled.backward(problem, plan, result, RowGradients(grad.reshape(result.out.shape)))
        return {"out": result.out} | grads


def largest_difference(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest difference of any array, relative to its largest number; NaN where there is one."""
    return float(np.max([relative_difference(x, reference[name]) for name, x in found.items()]))


def runner_of(entry: Entry, tile: Tile, *, timed: bool = False) -> Any:
    """Return a runner that launches the entry's kernel with a tile; `timed`: and notes a pair of events each time."""
    import torch

    from attnscore.kernels.triton import launch

    class WithTile(launch.Runner):
        def __init__(self) -> None:
            self.events: list[tuple[Any, Any]] = []

        def tile(self, kernel: Any, architecture: int, form: str, dtype: str, dim: int) -> Tile:
            return tile if kernel == entry.kernel else super().tile(kernel, architecture, form, dtype, dim)

        def run(self, kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
            if not timed or kernel.__name__ != entry.kernel:
                super().run(kernel, grid, *operands, **constants)
                return
            event: Any = torch.cuda.Event
            start, end = (event(enable_timing=True) for _ in range(2))
            start.record()
            super().run(kernel, grid, *operands, **constants)
            end.record()
            self.events.append((start, end))

    return WithTile()


def milliseconds(call: Call, tile: Tile) -> float:
    """Return the median time of all launches of the entry's kernel in a call, each with empty caches."""
    import torch

    flush = torch.empty(gpu.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(WARM_UP + ROUNDS):
        flush.zero_()
        runner = runner_of(call.entry, tile, timed=True)
        call.gradients(runner)
        torch.cuda.synchronize()
        times.append(sum(start.elapsed_time(end) for start, end in runner.events))
    return float(np.median(times[WARM_UP:]))


# ---- the command


def code_of(entry: Entry, tile: Tile) -> Code:
    """Compile the entry's kernel with a tile, for its architecture."""
    from bench import gpu_code

    found = gpu_code.compile_call(
        entry.architecture, entry.dtype, entry.dim, [entry.kernel], tiles={entry.kernel: tile},
        score=score_of(entry, 2, "cpu"),
    )  # fmt: skip
    return found[entry.kernel]


def tune(entry: Entry, *, compile_only: bool) -> tuple[list[Trial], Trial | None]:
    """Return all trials of an entry, and the one to write."""
    from bench import gpu_code

    kernel: Any = entry.kernel
    start = tile_of(kernel, entry.architecture, entry.form, entry.dtype, entry.dim)
    limit = gpu_code.SHARED_MEMORY.get(entry.architecture, gpu_code.LARGEST_SHARED_MEMORY)
    options: dict[str, Any] = {}
    if not compile_only:
        import torch

        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        limit = min(limit, properties.shared_memory_per_block_optin)
        checked, timed = (Call(entry, shape, "cuda") for shape in (CHECKED, TIMED[entry.form]))
        reference = checked.reference()
        options = {
            "difference": lambda tile: largest_difference(checked.gradients(runner_of(entry, tile)), reference),
            "tolerance": gpu.TOLERANCE[entry.dtype],
            "time": lambda tile: milliseconds(timed, tile),
        }
    trials = search(
        start,
        # Compiled code does not say how far ahead loads have to run.
        lambda tile: neighbours(entry, tile, with_stages=not compile_only),
        lambda tile: attempt(tile, limit, lambda tile: code_of(entry, tile), **options),
    )
    return trials, winner(trials, start)


def origin(architecture: int, *, compile_only: bool) -> str:
    """Return in words where the numbers of a table come from."""
    import triton

    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    if compile_only:
        return (
            f"Ranked by the code that Triton {triton.__version__} compiles for sm_{architecture}, {date}; never timed."
        )
    facts = ", ".join(f"{name} {value}" for name, value in gpu.facts().items())
    return f"Timed on sm_{architecture} ({facts}), Triton {triton.__version__}, {date}."


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    description = "Time tiles of the GPU kernels and write the fastest to a table, or rank them by their compiled code."
    parser = argparse.ArgumentParser(prog="python benchmarks tune", description=description)
    parser.add_argument("file", type=Path, help="the table to write; there is none yet")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["inner"])
    parser.add_argument("--kernel", nargs="+", choices=get_args(KernelName), help="default: all of the form")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--dim", nargs="+", type=int, choices=DIMS, default=[64, 128])
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU: rank by spills, loads and registers")
    parser.add_argument("--architecture", type=int, help="with --compile-only: compute capability times 10, such as 90")
    try:
        run(parser.parse_args(arguments))
    except AttnscoreError as error:
        parser.exit(2, f"{error}\n")
    return 0


def run(given: argparse.Namespace) -> None:
    """Tune the entries that the command's arguments name; print all trials and write the table."""
    architecture = checked_architecture(given)
    if given.file.exists():
        raise ArgumentError(message("file", "a path where there is no file", str(given.file)))
    table = {}
    for form, dtype, dim in itertools.product(given.form, given.dtype, given.dim):
        for kernel in kernels_of(form):
            # The tile of an additive score's d_query is for a shared bias, which the call lacks.
            is_missing = form == "additive" and kernel == "d_query"
            if is_missing or (given.kernel and kernel not in given.kernel):
                continue
            entry = Entry(architecture, kernel, form, dtype, dim)
            trials, best = tune(entry, compile_only=given.compile_only)
            print(f"{entry}: {'ranked by compiled code' if given.compile_only else 'timed'}", flush=True)
            for trial in trials:
                print(f"{'*' if trial is best else ' '} {trial}")
            if best is not None:
                table[entry] = best.tile
    if not table:
        raise ArgumentError("no tile to write: no kernel was named that the form has, or every tile was left out")
    with replacing(given.file) as file:
        file.write(text_of(table, origin(architecture, compile_only=given.compile_only)).encode())
    print(f"{given.file}: {len(table)} entries; to use them: ATTNSCORE_GPU_TILES={given.file}")


def text_of(table: Table, origin: str, aliases: Mapping[int, int] | None = None) -> str:
    """Return the JSON document of a table, a line for each row of dimensions."""
    aliases = aliases or {}
    document: dict[str, Any] = {"origin": origin}
    for entry, tile in table.items():
        if entry.architecture not in aliases:
            row = document
            for key in (f"sm_{entry.architecture}", entry.kernel, entry.form, entry.dtype):
                row = row.setdefault(key, {})
            row[str(entry.dim)] = [*tile]
    document |= {f"sm_{name}": f"sm_{of}" for name, of in aliases.items()}
    text = json.dumps(document, indent=2)
    return re.sub(r"(?<=: )\{[^{}]*\}", lambda row: json.dumps(json.loads(row[0])), text) + "\n"


def checked_architecture(given: argparse.Namespace) -> int:
    """Return the architecture to compile for: the device's, or the one that is named."""
    if given.compile_only:
        from bench.gpu_code import SHARED_MEMORY

        if given.architecture not in SHARED_MEMORY:
            known = ", ".join(map(str, sorted(SHARED_MEMORY)))
            raise ArgumentError(message("architecture", f"one of {known}", given.architecture))
        return int(given.architecture)
    gpu.check_device("cuda", "gpu_tune", hint="--compile-only ranks tiles by their compiled code, without a GPU")
    import torch

    from attnscore.kernels.triton import launch

    found = launch.RUNNER.architecture(torch.empty(0, device="cuda"))
    if given.architecture not in (None, found):
        raise ArgumentError(message("architecture", f"that of the GPU, {found}, or --compile-only", given.architecture))
    return found
