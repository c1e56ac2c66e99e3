"""``python -m attnscore.testing``: what it covers, what it says, and that it finds a wrong kernel.

Each faulty kernel below is right but for one thing; the self-check has to fail with each.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import attnscore as ats
from attnscore import kernels, masks, scores, testing
from attnscore.backends import native
from attnscore.kernels.tiled import Streaming
from attnscore.problem.results import Result


class Faulty(Streaming):
    """The streaming kernel, with one of its results or gradients times a factor where `where` says so of a problem."""

    name = "faulty"

    def __init__(self, result: str = "", factor: float = 1.01, where: Callable[[Any], bool] = lambda _: True) -> None:
        self.result, self.factor, self.where = result, factor, where

    def forward(self, problem: Any, plan: Any) -> Result:
        found = super().forward(problem, plan)
        if not self.where(problem):
            return found
        statistics = {n: x * self.factor if n == self.result else x for n, x in found.statistics.items()}
        out = found.out * self.factor if self.result == "out" else found.out
        return dataclasses.replace(found, out=out, statistics=statistics)

    def backward(self, problem: Any, plan: Any, *others: Any) -> dict[str, Any]:
        found = super().backward(problem, plan, *others)
        return {name: x * (self.factor if f"gradient of {name}" == self.result else 1) for name, x in found.items()}


FAULTS = {
    "output": Faulty("out", 1 + 1e-6),
    "entropy": Faulty("entropy"),
    "one mask": Faulty("out", where=lambda problem: isinstance(problem.mask, ats.KeyPadding)),
    "one dtype": Faulty("out", 1.0001, where=lambda problem: problem.dtype == "float32"),
    "one score": Faulty("out", -1, where=lambda problem: isinstance(problem.score, ats.Bilinear)),
    **{name: Faulty(name) for name in ("gradient of query", "gradient of value", "gradient of w_v")},
}


def run_with(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """The self-check of a machine that has `kernel` and the dense one, with a few of the scores."""
    monkeypatch.setattr(kernels, "_TABLE", {**kernels.table(), kernel.name: kernel})
    every = testing._every_score()
    chosen = {name: every[name] for name in ("scaled_dot", "additive tanh", "bilinear")}
    monkeypatch.setattr(testing, "_every_score", lambda: chosen)
    for name in ("native", "streaming"):
        monkeypatch.setattr(type(kernels.table()[name]), "missing", lambda self: None if self is kernel else "not now")
    return testing.main()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow_rows("one score", "gradient of w_v", "one mask")
def test_a_faulty_kernel_fails(fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(FAULTS[fault], monkeypatch) == 1
    said = capsys.readouterr().out
    failed = [line for line in said.splitlines() if " FAILED: " in line]
    assert failed and all("faulty" in line for line in failed)
    assert f"{len(failed)} failed" in said.splitlines()[-1]


@pytest.mark.slow
def test_the_same_kernel_without_a_fault_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(Faulty(), monkeypatch) == 0
    assert "kernel faulty" in capsys.readouterr().out


def test_a_kernel_that_raises_is_reported_and_the_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(problem: Any) -> bool:
        raise ZeroDivisionError("of the kernel")

    assert run_with(Faulty(where=raises), monkeypatch) == 1
    said = capsys.readouterr().out
    assert "FAILED: ZeroDivisionError: of the kernel" in said
    assert said.splitlines()[-1].startswith("12 checks, 4 failed")


def test_every_score_activation_and_mask_is_checked() -> None:
    assert {type(score) for score in testing._every_score().values()} == set(scores.BUILTIN.values())
    assert {type(mask) for mask in testing._every_mask().values()} >= {*masks.BUILTIN, masks.And, masks.Or, masks.Not}
    labels = testing._checks()
    for kernel in ("native", "streaming"):
        if kernels.table()[kernel].missing() is None:
            assert f"kernel {kernel}" in labels
            assert {f"score {name}, {kernel}, every mask" for name in testing._every_score()} <= labels.keys()


def test_a_missing_native_module_is_said_with_its_reason_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "no native module: built without it, because there was no compiler"
    monkeypatch.setattr("attnscore.kernels.native.kernel._MISSING", reason)
    monkeypatch.setattr(testing, "_checks", dict)
    assert testing.main() == 0
    said = capsys.readouterr().out
    assert f"kernel native{'':<35} {reason}\n" in said
    assert f"Not checked: the native kernels ({reason})." in said


def test_a_kernel_that_takes_no_numpy_arrays_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine with a GPU: its kernels are there, and these checks have NumPy's arrays."""
    monkeypatch.setattr(type(kernels.table()["fused"]), "missing", lambda self: None)
    assert not any("fused" in label for label in testing._checks())
    monkeypatch.setattr(testing, "_checks", dict)
    assert testing.main() == 0
    assert "Not checked: the kernel 'fused' (arrays of numpy" in capsys.readouterr().out


@pytest.mark.parametrize(("argument", "status", "words"), [("--help", 0, "usage: "), ("torch", 2, "unrecognized")])
def test_the_command_checks_nothing_where_it_has_arguments(argument: str, status: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnscore.testing", argument], capture_output=True, text=True, check=False
    )
    assert done.returncode == status and words in done.stdout + done.stderr
    assert "attnscore 0" not in done.stdout and " ok\n" not in done.stdout


@pytest.mark.slow
def test_this_installation_passes_and_imports_numpy_alone() -> None:
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('attnscore.testing', run_name='__main__')\n"
        "except SystemExit as stop: status = stop.code\n"
        "print(sorted({'torch', 'jax', 'tensorflow', 'rich', 'typer'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[] 0\n"), done.stdout
    assert " 0 failed, " in done.stdout.splitlines()[-2]
    assert ("Not checked: the native" in done.stdout) == (native.missing is not None)
