"""Drawn calls against the reference of this folder: fixed ones by default, new ones in the slow tier.

``ATTNSCORE_DRAWN=20000 pytest -m slow tests/drawn`` takes about an hour; ``python tests/drawn/drive.py`` is the same
without pytest.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Any

import drive
import frameworks
import numpy as np
import pytest
from checks import Tally, Wrong, check
from draw import draw
from frameworks import Named
from reference import Call, Tree, evaluate

import attnscore as ats

# Warnings of the compilers, which name no call; `drive.py` ignores them too.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
CASES = int(os.environ.get("ATTNSCORE_DRAWN", "400"))
SEED = int(os.environ.get("ATTNSCORE_DRAWN_SEED", secrets.randbelow(2**31)))
MOST_GROWTH = 32 * 2**20
"""Bytes by which memory may grow while the same cases run again, when every cache is full."""


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_fixed_cases(framework: str) -> None:
    tally = Tally()
    for index in range(20):
        check(1, index, tally, {"framework": framework, "mode": "eager"})
    assert tally.cases == 20 and tally.refused < 5


@pytest.mark.slow
def test_drawn_cases() -> None:
    wrong = []
    for index in range(CASES):
        try:
            check(SEED, index, Tally())
        except Exception as error:
            wrong.append(drive.described(SEED, index, error))
        if index % drive.CLEAR_EVERY == 0:
            drive.forget_programs()
    assert not wrong, "\n".join([f"{len(wrong)} of {CASES} cases of seed {SEED}:", *wrong])


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_cases_again_leave_nothing_behind(framework: str) -> None:
    """Equal calls find their plans: memory is flat from the third time on."""

    def once() -> int:
        for index in range(60):
            check(2, index, Tally(), {"framework": framework, "mode": "eager"})
        return drive.resident()

    before = [once() for _ in range(3)][-1]
    grown = [once() - before for _ in range(4)]
    assert grown[-1] < MOST_GROWTH, grown


# ---------------------------------------------------------------- the reference itself


def test_the_reference_by_hand() -> None:
    """Two queries, three keys with scores 0, log 2 and log 4, of which the first query attends to two."""
    score = Tree("dot")
    arrays = {"query": np.ones((2, 1)), "key": np.log([[1.0], [2.0], [4.0]]), "value": np.array([[1.0], [4.0], [8.0]])}
    mask = Tree("causal", {"align": "bottom_right"})
    results = evaluate(Call((), 0, 2, 3, arrays, score, mask, seeds={"log_sum_exp": np.ones(2)}))
    np.testing.assert_allclose(results["weights"], [[1 / 3, 2 / 3, 0], [1 / 7, 2 / 7, 4 / 7]])
    np.testing.assert_allclose(results["out"], [[3], [41 / 7]])
    np.testing.assert_allclose(results["log_sum_exp"], np.log([3, 7]))
    np.testing.assert_allclose(results["grad.key"], [[1 / 3 + 1 / 7], [2 / 3 + 2 / 7], [4 / 7]])


def altered(name: str, change: Any) -> Any:
    """Return a run of NumPy in which one result is changed."""
    original = frameworks.NumPy.run

    def run(self: Any, *arguments: Any) -> Named:
        results = original(self, *arguments)
        return results | ({name: change(results[name])} if name in results and np.size(results[name]) else {})

    return run


RESULTS = {
    "output-rounded": ("out", lambda x: x + 1e-3 * np.abs(x).max() + 1e-3),
    "heads-reversed": ("out", lambda x: x[:, ::-1]),
    "gradient-zero": ("grad.key", lambda x: 0 * x),
    "gradient-twice": ("grad.bias", lambda x: 2 * x),
    "gradient-of-another-sign": ("grad.query", lambda x: -x),
    "shape": ("out", lambda x: x[None]),
}


@pytest.mark.parametrize("fault", RESULTS)
def test_a_changed_result_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks.NumPy, "run", altered(*RESULTS[fault]))
    assert _is_wrong_within(60)


ARGUMENTS = {
    "causal-off-by-one": ("Causal", lambda cls: lambda **o: cls(offset=o["offset"] + 1) if "offset" in o else cls(**o)),
    "lengths-inverted": ("ValidLens", lambda cls: lambda **o: ~cls(**o)),
    "bandwidth-lost": ("Gaussian", lambda cls: lambda **o: cls()),
    "cap-lost": ("SoftCap", lambda cls: lambda score, **o: score),
}


@pytest.mark.parametrize("fault", ARGUMENTS)
def test_a_wrong_mask_or_score_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = ARGUMENTS[fault]
    monkeypatch.setattr(ats, name, change(getattr(ats, name)))
    assert _is_wrong_within(120)


def _is_wrong_within(cases: int) -> bool:
    for index in range(cases):
        try:
            check(3, index, Tally(), {"framework": "numpy", "what": "attend", "mode": "eager", "kernel": "auto"})
        except Wrong:
            return True
    return False


def test_a_version_changes_values_alone() -> None:
    for index in range(30):
        first, second = (draw(4, index, version) for version in (0, 1))
        assert str(dataclasses.replace(first, call=second.call)) != "" and first.mode == second.mode
        assert {n: x.shape for n, x in first.call.arrays.items()} == {n: x.shape for n, x in second.call.arrays.items()}
