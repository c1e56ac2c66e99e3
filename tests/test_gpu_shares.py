"""Predicted shares of the limits of a GPU: the model by hand, and the counted instructions against the compiler."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnscore as ats
from attnscore.bench import gpu, gpu_limits, gpu_shares
from attnscore.bench.gpu_shares import TileLoop
from attnscore.kernels.triton import compiled
from attnscore.kernels.triton.compiled import Loop
from attnscore.kernels.triton.tiles import Tile, tile_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
PLAIN = gpu.Case("plain", (2, 3, 64, 16), "bfloat16")


def test_loops_are_what_branches_back_jump_over() -> None:
    lines = [
        (0x00, "MOV", " R1, R2"),
        (0x10, "MUFU", ".EX2 R1, R1"),
        (0x20, "FADD", " R1, R1, R2"),
        (0x30, "MUFU", ".RCP R1, R1"),
        (0x40, "BRA", " 0x20"),
        (0x50, "HGMMA", ".64x64x16 R1"),
        (0x60, "BRA", " 0x90"),
        (0x70, "BRA", " 0x10"),
        (0x80, "FADD", " R1, R1, R2"),
        (0x90, "BRA", " 0x80"),
        (0xA0, "BRA", " 0xa0"),
    ]
    skipping = [(0x00, "FADD", ""), (0x10, "BRA", " 0x30"), (0x20, "MUFU", ".RCP R1, R1"), (0x30, "BRA", " 0x0")]
    assert compiled.loops_of(skipping) == (Loop(4, 1, 0, 0, (), skipped=1),)
    inner = Loop(3, 1, 0, 0, ())
    assert compiled.loops_of(lines) == (Loop(7, 2, 1, 1, (inner,)), Loop(2, 0, 0, 0, ()))


def test_visited_tiles_by_hand() -> None:
    assert gpu_shares.visited(PLAIN, 16, 32) == (8, 0)
    causal = dataclasses.replace(PLAIN, mask=ats.Causal())
    assert gpu_shares.visited(causal, 16, 16) == (6, 4)
    assert gpu_shares.visited(causal, 16, 32) == (2, 4)
    window = dataclasses.replace(PLAIN, mask=ats.SlidingWindow(15, 0))
    assert gpu_shares.visited(window, 16, 16) == (0, 7)


@pytest.mark.parametrize(("matrix", "share"), [("HGMMA", 1.0), ("HMMA", 0.62)])
def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch, matrix: str, share: float) -> None:
    """Of 10 tiles in 6 matrices, 4 are partial; special functions take longer than all instructions there."""
    case = dataclasses.replace(PLAIN, mask=ats.Causal())
    loop = TileLoop("forward", 16, 16, 4, 2, matrix, full=(100, 10), tested=(100, 80))
    monkeypatch.setattr(gpu_shares, "counted", lambda: {"plain": [[loop], []]})
    issue = 6 * 6 * 4 * 100 / 4, 6 * 4 * 4 * 80 * 2
    products = [6 * steps * 2 * 2 * 16 * 16 * 16 / share / 50 for steps in (6, 4)]
    in_turn, overlapped = gpu_shares.seconds(case, 0, clocks_a_second=1.0, rate=50.0)
    assert in_turn == pytest.approx(sum(issue) + sum(products))
    assert overlapped == pytest.approx(sum(map(max, issue, products)))


def test_shares_are_below_the_limit_and_ordered() -> None:
    for case in gpu.CASES:
        for pass_ in (0, 1):
            low, high = gpu_limits.predicted(case, pass_)
            assert 0 < low <= high <= 1, (case.name, pass_)


def test_the_counts_are_of_the_tiles_of_the_table() -> None:
    """Otherwise: `python -m attnscore.bench.gpu_shares`."""
    found = gpu_shares.counted()
    assert set(found) == {case.name for case in gpu.CASES}
    for case in gpu.CASES:
        for loop in (loop for loops in found[case.name] for loop in loops):
            if loop.kernel not in ("side_gradient", "value_gradient"):
                kernel: object = loop.kernel
                form = "additive" if case.score == "additive" else "inner"
                tile = tile_of(kernel, gpu_shares.ARCHITECTURE, form, case.dtype, case.shape[-1])  # type: ignore[arg-type]
                assert Tile(loop.queries, loop.keys, loop.warps, tile.stages) == tile
            assert (loop.tested is None) == (case.mask is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in gpu.CASES])
def test_the_counts_are_those_of_the_compiler(name: str) -> None:
    (case,) = (case for case in gpu.CASES if case.name == name)
    assert gpu_shares.count(case) == gpu_shares.counted()[name]
