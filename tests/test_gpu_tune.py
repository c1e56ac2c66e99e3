"""The command that tunes the tiles of the GPU kernels, without a GPU: what it searches, leaves out and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.kernels.triton import tiles
from attnscore.kernels.triton.tiles import Entry, Tile
from bench import gpu_tune
from bench.gpu_code import Code
from bench.gpu_tune import Trial

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
ENTRY = Entry(90, "forward", "inner", "bfloat16", 64)
START = Tile(128, 64, 8, 3)


def code(tile: Tile, *, spills: int = 0, registers: int = 128) -> Code:
    """Code whose shared memory grows with the tile."""
    return Code(registers, spills, tile.stages * (tile.queries + tile.keys) * 128, "HGMMA", 0)


def around(tile: Tile) -> list[Tile]:
    return list(gpu_tune.neighbours(ENTRY, tile, with_stages=True))


def test_neighbours_are_tiles_that_the_kernels_can_have() -> None:
    found = around(START)
    assert {Tile(256, 64, 8, 3), Tile(64, 128, 8, 3), START._replace(warps=4), START._replace(stages=4)} <= set(found)
    assert len(found) == len(set(found)) == 10
    assert START not in found
    # At a border fewer; stages stay where nothing is timed.
    assert all(tile.queries >= 16 and tile.stages >= 1 for tile in around(Tile(16, 16, 2, 1)))
    assert {tile.stages for tile in gpu_tune.neighbours(ENTRY, START, with_stages=False)} == {3}
    stored = gpu_tune.neighbours(
        Entry(90, "store_gradients", "additive", "float32", 64), Tile(32, 128, 4, 1), with_stages=True
    )
    assert all(16 <= size <= 128 for tile in stored for size in tile[:2])


def test_the_search_reaches_the_fastest_tile_step_by_step() -> None:
    """Where the time grows with each step away from one tile, with any start."""
    best, timed = Tile(64, 128, 4, 2), []

    def time(tile: Tile) -> float:
        timed.append(tile)
        return 1.0 + float(np.abs(np.log2(tile) - np.log2(best)).sum())

    for start in (START, Tile(16, 256, 16, 4)):
        timed.clear()
        trials = gpu_tune.search(start, around, lambda tile: Trial(tile, code(tile), time(tile)))
        assert trials[0].tile == best
        assert [trial.milliseconds for trial in trials] == sorted(time(trial.tile) for trial in trials)
        assert len(trials) == len({trial.tile for trial in trials})


def test_each_tile_is_timed_once_and_a_tie_ends_the_search() -> None:
    timed: list[Tile] = []
    trials = gpu_tune.search(START, around, lambda tile: timed.append(tile) or Trial(tile, code(tile), 1.0))
    assert sorted(timed) == sorted({START, *around(START)})
    assert gpu_tune.winner(trials, START).tile == START


def test_what_does_not_fit_or_is_wrong_is_not_timed() -> None:
    """Compiled first, checked then, timed last."""
    steps: list[str] = []

    def tried(limit: int, difference: float) -> Trial:
        steps.clear()
        return gpu_tune.attempt(
            START, limit,
            lambda tile: steps.append("compiled") or code(tile),
            lambda tile: steps.append("checked") or difference, 0.05,
            lambda tile: steps.append("timed") or 2.5,
        )  # fmt: skip

    too_large = tried(code(START).shared - 1, 0.0)
    assert (steps, too_large.why) == (["compiled"], "72 KB of shared memory, of 72")
    for difference in (0.06, float("nan")):
        wrong = tried(code(START).shared, difference)
        assert (steps, wrong.milliseconds) == (["compiled", "checked"], None)
        assert "results differ by" in wrong.why
    good = tried(code(START).shared, 0.05)
    assert (steps, good.milliseconds, good.why) == (["compiled", "checked", "timed"], 2.5, None)
    assert good.rank < too_large.rank == wrong.rank


def test_a_tile_that_the_compiler_refuses_is_left_out() -> None:
    def refuses(tile: Tile) -> Code:
        raise RuntimeError("PassManager::run failed\nmore")

    trial = gpu_tune.attempt(START, 10**6, refuses)
    assert trial.why == "not run: PassManager::run failed"
    assert gpu_tune.winner([trial], START) is None


def test_the_table_s_tile_stays_unless_another_is_clearly_faster() -> None:
    first, other = Trial(START, code(START), 1.0), Tile(64, 64, 4, 3)
    for time, expected in ((0.99, START), (0.97, other)):
        assert gpu_tune.winner([Trial(other, code(other), time), first], START).tile == expected
    failed = Trial(START, code(START), why="wrong")
    assert gpu_tune.winner([Trial(other, code(other), 5.0), failed], START).tile == other


def test_ranks_of_compiled_code() -> None:
    """Spills, then loads, then warps that fit; each is listed."""
    small, large = Tile(64, 64, 8, 3), Tile(128, 128, 8, 3)
    without, spilling = Trial(small, code(small)), Trial(large, code(large, spills=7))
    assert without.rank < spilling.rank
    assert Trial(large, code(large)).rank < without.rank
    assert Trial(small, code(small, registers=64)).rank < without.rank
    assert "7 spills" in str(spilling)
    assert " ms" not in str(spilling)


def test_a_difference_is_of_the_largest_number() -> None:
    wanted = {"out": torch.tensor([1.0, -4.0]), "query": torch.tensor([2.0])}
    found = {"out": torch.tensor([1.0, -3.0]), "query": torch.tensor([2.1])}
    assert gpu_tune.largest_difference(found, wanted) == pytest.approx(0.25)
    found["query"][0] = float("nan")
    assert np.isnan(gpu_tune.largest_difference(found, wanted))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        gpu_tune.main([*arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json"
    said = refused(capsys, str(path))
    assert "gpu_tune needs a GPU that PyTorch" in said
    assert "--compile-only" in said
    assert not path.exists()
    assert "architecture: expected one of 80, 86" in refused(capsys, str(path), "--compile-only")
    path.write_text("{}")
    said = refused(capsys, str(path), "--compile-only", "--architecture", "90")
    assert "file: expected a path where there is no file" in said


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Entry, Tile]]:
    """Code of any tile, which spills from 256 positions on."""
    compiled: list[tuple[Entry, Tile]] = []

    def code_of(entry: Entry, tile: Tile) -> Code:
        compiled.append((entry, tile))
        return code(tile, spills=max(0, tile.queries + tile.keys - 256))

    monkeypatch.setattr(gpu_tune, "code_of", code_of)
    return compiled


def test_compiled_tiles_are_written_and_never_called_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake_compiler: list[tuple[Entry, Tile]]
) -> None:
    path = tmp_path / "own.json"
    arguments = [str(path), "--compile-only", "--architecture", "80", "--form", "inner", "additive", "--dim", "64"]
    gpu_tune.main(arguments)
    found = tiles.read(path)
    kernels = {("forward", "inner"), ("d_query", "inner"), ("d_key", "inner")}
    kernels |= {("forward", "additive"), ("store_gradients", "additive")}
    assert {(entry.kernel, entry.form) for entry in found} == kernels
    assert found[ENTRY._replace(architecture=80)] == Tile(128, 128, 8, 2)
    said, origin = capsys.readouterr().out, json.loads(path.read_text())["origin"]
    assert "never timed" in origin
    assert " ms" not in said
    assert "ranked by compiled code" in said
    assert "spills" in said
    # Each in the search's own tiles, which fit the architecture.
    assert {entry.architecture for entry, _ in fake_compiler} == {80}
    assert "KB of shared memory, of 163" in said or all(code(tile).shared <= 163 * 1024 for _, tile in fake_compiler)


@pytest.mark.usefixtures("fake_compiler")
def test_on_a_device_the_smaller_limit_and_the_timer_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that gives a program less than its architecture has."""

    class Properties:
        shared_memory_per_block_optin = 50 * 1024

    class FakeCall:
        def __init__(self, entry: Entry, shape: Any, device: str) -> None:
            self.entry = entry

        def gradients(self, runner: Any) -> dict[str, Any]:
            # The kernel is wrong with 16 warps.
            return {"out": torch.ones(1) * (2 if runner.tile("forward", 90, *ENTRY[2:]).warps == 16 else 1)}

        def reference(self) -> dict[str, Any]:
            return {"out": torch.ones(1)}

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpu_tune, "Call", FakeCall)
    monkeypatch.setattr(gpu_tune, "milliseconds", lambda call, tile: 1000 / (tile.queries * tile.warps))
    trials, best = gpu_tune.tune(ENTRY, compile_only=False)
    assert best is not None
    timed = [trial for trial in trials if trial.milliseconds is not None]
    assert timed
    assert all(trial.code.shared <= 50 * 1024 and trial.tile.warps < 16 for trial in timed)
    reasons = {trial.why.split(" of ")[0] for trial in trials if trial.why}
    assert any("KB" in reason for reason in reasons)
    assert "results differ by 1" in reasons


def test_a_call_of_each_form_is_of_that_form() -> None:
    """So that the kernel of the entry runs: also where a Gaussian could be products."""
    from attnscore.problem.problem import build_problem

    names = {"inner": "InnerForm", "distance": "DistanceForm", "additive": "AdditiveForm"}
    for form, name in names.items():
        call = gpu_tune.Call(ENTRY._replace(form=form, dtype="float32"), (1, 2, 1, 5, 7), "cpu")
        query, key, value, _ = call.arrays
        problem, _ = build_problem(query, key, value, score=call.score)
        assert type(problem.form).__name__ == name
        reference = call.reference()
        assert reference["out"].dtype == torch.float64
        assert {"out", "query", "key", "value"} <= set(reference)
