"""The test bed of `watch`: healthy runs have no failure; planted faults are named by module, head, step and cause."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis import bed, faults
from diagnosis.models import Setup, begin, train

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_best_learning_rate_is_no_failure(kind: str) -> None:
    failures: list[str] = []
    setup = Setup(kind=kind, rate=1e-2, norm_first=kind == "decoder")
    _, losses = train(begin(setup), at_step=lambda _, seen: failures.extend(map(str, seen.failing())))
    assert not failures and losses[-1] < 0.1 * losses[0]


NAMES = ("queries x 30", "nan in W_q", "causal leak", "inverted mask", "float16 overflow")


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_named(name: str) -> None:
    fault = next(x for x in faults.faults(short=True) if x.name.startswith(name))
    moved = replace(fault, step=20, setup=replace(fault.setup, steps=35))
    outcome = bed.diagnose(moved)
    assert outcome.named and not outcome.early and outcome.cause in moved.causes, outcome
    assert outcome.first_step == 20 and outcome.is_soon


def test_runs_are_the_same_again_and_the_lists_have_what_they_promise() -> None:
    setup = Setup(steps=4, every=2)
    assert train(begin(setup))[1] == train(begin(setup))[1]
    planted = faults.faults()
    assert len(bed.healthy()) >= 40 <= len(planted)
    assert {x.kind for x in bed.healthy()} == {"decoder", "encoder", "encoder-decoder", "vision"}
    modules = {name for fault in planted for name in begin(fault.setup).model.attentions()}
    assert {fault.module for fault in planted} - {""} <= modules
    other = {fault.setup for fault in faults.faults(held_back=True)}
    assert not other & {fault.setup for fault in planted}


@pytest.mark.slow
def test_the_short_form_says_how_often_it_is_right() -> None:
    command = [sys.executable, "benchmarks", "diagnosis", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    counts = dict(re.findall(r"^\| (.*) \| (\d+ of \d+) \|$", done.stdout, re.MULTILINE))
    assert len(counts) >= 6
    right = {name: [int(x) for x in count.split(" of ")] for name, count in counts.items()}
    assert all(part == whole for name, (part, whole) in right.items() if "healthy" in name or "before" in name), (
        done.stdout
    )
    assert all(part >= 0.9 * whole for part, whole in right.values()), done.stdout
