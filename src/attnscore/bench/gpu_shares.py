"""The share of its limit that each case of the GPU benchmark is predicted to reach on an H200; never measured.

- Counted: the instructions of each loop over tiles, in the code that Triton compiles for sm_90, with the tiles of the
  table. ``gpu_loops.json`` has them; ``python -m attnscore.bench.gpu_shares`` makes it, without a GPU.
- Computed: a multiprocessor issues four instructions of a warp a clock, and its matrix units have the rate of the data
  sheet, of which ``HMMA`` instructions reach about 62% on Hopper (arXiv 2402.13499).
- The lower share has matrix units and all else take turns, the higher one overlaps them entirely. Waits for memory and
  barriers, starts and ends of programs, idle multiprocessors at the end of a kernel are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.bench import gpu
from attnscore.bench.gpu import Case
from attnscore.io import read_json, replacing

if TYPE_CHECKING:
    from attnscore.kernels.triton.compiled import Code, Loop

LOOPS = Path(__file__).with_name("gpu_loops.json")
ARCHITECTURE = 90
ISSUED = 4
"""Instructions of warps that a multiprocessor issues a clock."""
SPECIAL_CLOCKS = 2
"""Clocks that a special function of a warp takes: 16 units for 32 threads."""
HMMA_SHARE = 0.62
PRODUCTS = {"forward": 2, "d_query": 3, "d_key": 4}
"""Products of matrices for each pair; those of an additive score have one, and the sums of its gradients none."""


@dataclass(frozen=True)
class TileLoop:
    """One step of a kernel's loop: the pairs that it computes, and the instructions of a warp for them."""

    kernel: str
    queries: int
    keys: int
    warps: int
    products: int
    matrix: str
    """HGMMA or HMMA."""
    full: tuple[int, int]
    """Instructions and special functions for a full tile."""
    tested: tuple[int, int] | None
    """For a partial one; None where the case has none."""


# ---- counted


def count(case: Case) -> list[list[TileLoop]]:
    """Compile the kernels of a case and return their loops, forward and backward."""
    from attnscore.core import tiled, tiling
    from attnscore.core.problem import build_problem
    from attnscore.core.tiled import RowGradients
    from attnscore.kernels.triton import compiled, launch
    from attnscore.scores import Additive

    class Listing(compiled.Recorder):
        """Keeps a kernel that is launched twice with other constants."""

        def __init__(self) -> None:
            super().__init__(ARCHITECTURE, {"forward", "d_query", "d_key", *_ADDITIVE})
            self.listed: list[tuple[str, Code, dict[str, Any]]] = []

        def run(self, kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
            super().run(kernel, grid, *operands, **constants)
            if kernel.__name__ in self.found:
                self.listed.append((kernel.__name__, self.found.pop(kernel.__name__), constants))

    batch, heads, _, dim = case.shape
    # Kernels specialise on multiples of 16 alone.
    x = gpu.arrays(dataclasses.replace(case, shape=(batch, heads, 256, dim)), "cpu")
    score: Any = Additive(x["w_v"]) if case.score == "additive" else case.score
    names = launch._STATISTICS if case.options else ()
    problem, _ = build_problem(x["query"], x["key"], x["value"], score=score, mask=case.mask, statistics=names)
    plan, runner = tiling.plan(problem), Listing()
    result = launch.forward(problem, plan, runner)
    grads, wanted = RowGradients(x["grad"].reshape(result.out.shape)), frozenset(tiled.operands(problem))
    launch.backward(problem, plan, result, grads, wanted, runner)
    found: list[list[TileLoop]] = [[], []]
    for name, code, constants in runner.listed:
        found[name != "forward"].append(_tile_loop(case, name, code, constants))
    return found


_ADDITIVE = ("store_gradients", "side_gradient", "value_gradient")


def _tile_loop(case: Case, name: str, code: Code, constants: dict[str, Any]) -> TileLoop:
    """Return what a kernel does for each tile of pairs."""
    from attnscore.kernels.triton.additive_gradients import TILE

    queries, keys, warps, dim = constants["BM"], constants["BN"], constants["num_warps"], case.shape[-1]
    products, tested = PRODUCTS[name] if case.score != "additive" and name in PRODUCTS else 1, None
    if name == "side_gradient":
        # Two positions of the other side at a time, for a tile of (positions, channels) of one side.
        loop, columns = _fastest(_innermost(code.loops)), -(-dim // TILE[1])
        queries, keys, products = TILE[0], 2, 0
        full = loop.instructions * columns, loop.special * columns
    elif name == "value_gradient":
        keys = constants["BLOCK"]
        full = _counts(next(loop for loop in _innermost(code.loops) if loop.matrix))
    elif case.score == "additive":
        # The loop over tiles has three over channels inside, of which the first, four to a division, runs.
        tiles = next(loop for loop in code.loops if loop.inner)
        channels = _fastest(tiles.inner)
        full = (
            tiles.instructions - sum(x.instructions for x in tiles.inner) + channels.instructions * (dim // 4),
            tiles.special - sum(x.special for x in tiles.inner) + channels.special * (dim // 4),
        )
    else:
        full, tested = (_counts(loop) for loop in _innermost(code.loops) if loop.matrix)
        if name == "forward":
            # The base of the scores' moments is computed in the first step, and jumped over in all others.
            first = next(loop for loop in _innermost(code.loops) if loop.matrix)
            full = full[0] - first.skipped, full[1]
    return TileLoop(name, queries, keys, warps, products, code.matrix, full, tested)


def _counts(loop: Loop) -> tuple[int, int]:
    return loop.instructions, loop.special


def _innermost(loops: tuple[Loop, ...]) -> list[Loop]:
    """Return the loops without one inside, in the order of the code."""
    return [x for loop in loops for x in (_innermost(loop.inner) if loop.inner else [loop])]


def _fastest(loops: Iterable[Loop]) -> Loop:
    """Return the loop for terms of moderate size: the longest without exponentials, which shares its divisions."""
    return max((x for x in loops if x.special and not x.exponentials), key=lambda x: x.instructions)


# ---- computed


@cache
def counted() -> dict[str, list[list[TileLoop]]]:
    """Return the loops of each case, forward and backward, from the file."""

    def loop(row: dict[str, Any]) -> TileLoop:
        return TileLoop(**row | {name: row[name] and tuple(row[name]) for name in ("full", "tested")})

    return {name: [[*map(loop, rows)] for rows in passes] for name, passes in read_json(LOOPS).items()}


def visited(case: Case, queries: int, keys: int) -> tuple[int, int]:
    """Return the full and the partial tiles of a matrix, of so many queries and keys."""
    length = case.shape[2]
    if case.mask is None:
        return -(-length // queries) * -(-length // keys), 0
    intervals = case.mask.interval_set(length, length)
    start, stop = (x[0, 0].reshape(-1, queries) for x in (intervals.start, intervals.stop))
    first = np.arange(0, length, keys)[:, None]
    full = (start.max(1) <= first) & (stop.min(1) >= first + keys)
    some = (start.min(1) < first + keys) & (stop.max(1) > first)
    return int(full.sum()), int((some & ~full).sum())


def seconds(case: Case, pass_: int, clocks_a_second: float, rate: float) -> tuple[float, float]:
    """Return the predicted time of a pass where the units take turns, and where they overlap.

    The clocks are those of all multiprocessors; `rate` is that of all matrix units, in operations a second.
    """
    matrices, dim = case.shape[0] * case.shape[1], case.shape[-1]
    in_turn = overlapped = 0.0
    for loop in counted()[case.name][pass_]:
        for steps, counts in zip(visited(case, loop.queries, loop.keys), (loop.full, loop.tested), strict=True):
            if counts is None:
                continue
            instructions, special = counts
            clocks = loop.warps * max(instructions / ISSUED, special * SPECIAL_CLOCKS)
            issue = steps * matrices * clocks / clocks_a_second
            share = HMMA_SHARE if loop.matrix == "HMMA" else 1.0
            products = steps * matrices * loop.products * 2 * loop.queries * loop.keys * dim / (rate * share)
            in_turn += issue + products
            overlapped += max(issue, products)
    return in_turn, overlapped


def main() -> None:
    """Count the loops of all cases and write the file."""
    found = {}
    for case in gpu.CASES:
        found[case.name] = [[dataclasses.asdict(loop) for loop in loops] for loops in count(case)]
        print(case.name, flush=True)
    rows = []
    for name, passes in found.items():
        lines = [",\n".join(f"      {json.dumps(row)}" for row in loops) for loops in passes]
        rows.append(f'  "{name}": [\n' + ",\n".join(f"    [\n{line}\n    ]" for line in lines) + "\n  ]")
    with replacing(LOOPS) as file:
        file.write(("{\n" + ",\n".join(rows) + "\n}\n").encode())


if __name__ == "__main__":
    main()
