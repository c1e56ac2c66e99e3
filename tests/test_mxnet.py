"""MXNet, which lives in an environment of its own (it needs NumPy below 1.24): set up by ``make test``, run from here.

- The rows of the tables run there through ``in_mxnet/worker.py``; their results are held to the oracle here. A dozen
  rows do so by default.
- The files ``in_mxnet/test_*.py`` are run there by its own pytest: words, errors, layers, what its users expect. Slow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import attnscore as ats
from attnscore.backends import native
from cases import SCORES, SCORES_WITH_ARRAYS, SOME_MASKS, SOME_SCORES, Sizes, in_turn
from covering import each, some
from harness import EXTRAS, Call, make_call
from in_mxnet.exchange import receive, send

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = Path(os.environ.get("ATTNSCORE_MXNET_PYTHON") or ROOT / ".venv-mxnet" / "bin" / "python")
# Of processes of this interpreter: they import the package from where this process does (in_mxnet/sitecustomize.py).
VARIABLES = os.environ | {
    "PYTHONPATH": str(HERE / "in_mxnet"),
    "ATTNSCORE_TESTED": os.pathsep.join([str(Path(ats.__file__).parents[1]), *ats.__path__]),
}
DTYPES = ("float32", "float64", "float16")
TURNS = in_turn(DTYPES, tuple(EXTRAS))
SOME = TURNS[:: len(TURNS) // 12]
Run = Callable[..., dict[str, np.ndarray]]


class Release(NamedTuple):
    """A release of Python, as ``sys.version_info`` has it."""

    major: int
    minor: int


def environment() -> Path:
    """The interpreter that has MXNet."""
    if sys.version_info >= (3, 12):
        pytest.skip("MXNet needs NumPy below 1.24, which is not built for this Python")
    if not PYTHON.exists():
        pytest.fail(f"no MXNet: {PYTHON} is missing; `make test` sets it up", pytrace=False)
    return PYTHON


@pytest.fixture(scope="module")
def mxnet() -> Iterator[Run]:
    """A call run in the other environment."""
    with subprocess.Popen(
        [environment(), HERE / "in_mxnet" / "worker.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=VARIABLES | {"OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def run(call: Call, mask: str, *, small_tiles: bool = False, **options: Any) -> dict[str, np.ndarray]:
            batch, heads, queries, keys = call.visible.shape
            sizes = Sizes(batch=batch, heads=heads, queries=queries, keys=keys)
            row = {"score": call.score.name, "mask": mask, "sizes": dataclasses.asdict(sizes)}
            row |= {"options": options, "small_tiles": small_tiles}
            seeds = {f"seed.{name}": seed for name, seed in call.seeds_outward().items()}
            send(stdin, {"row": np.array(json.dumps(row)), **call.leaves, **seeds})
            found = receive(stdout)
            assert found is not None, "MXNet's process ended"
            assert "error" not in found, str(found["error"])
            return found

        yield run
        stdin.close()


@some("score,mask,dtype,extras", SOME, TURNS, slow=[row for row in TURNS if row not in SOME])
def test_rows(mxnet: Run, score: str, mask: str, dtype: str, extras: str) -> None:
    call = make_call(score, mask, dtype, extras)
    call.check(mxnet(call, mask))


@pytest.mark.slow
@some("score,mask,dtype,extras", TURNS, TURNS)
def test_rows_streaming(mxnet: Run, score: str, mask: str, dtype: str, extras: str) -> None:
    call = make_call(score, mask, dtype, extras)
    call.check(mxnet(call, mask, small_tiles=True, kernel="streaming"))


@pytest.mark.slow
@each(
    # MXNet's own derivative of erf is in float32, and the dense kernel's gradient is MXNet's.
    score=[name for name in SCORES_WITH_ARRAYS if "gelu" not in name],
    dtypes={"-".join(x): x for x in (("float32", "float64"), ("float64", "float32"))},
    kernel=("auto", "streaming", "dense"),
)
def test_arrays_of_another_dtype(mxnet: Run, score: str, dtypes: tuple[str, str], kernel: str) -> None:
    call = make_call(score, "nested", dtypes[0], "bias-sink").with_extras_in(dtypes[1])
    call.check(mxnet(call, "nested", kernel=kernel))


@pytest.mark.parametrize("mask", [mask.name for mask in SOME_MASKS])
@pytest.mark.parametrize("score", [score.name for score in SOME_SCORES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_every_family_of_scores_and_masks(mxnet: Run, score: str, mask: str, dtype: str) -> None:
    call = make_call(score, mask, dtype, "hiding-bias", seed=1)
    call.check(mxnet(call, mask))


@pytest.mark.slow
@each(
    score=[score.name for score in SCORES][::4],
    sizes={str(x): x for x in ((1, 1), (1, 13), (13, 1), (67, 129))},
)
def test_odd_sizes(mxnet: Run, score: str, sizes: tuple[int, int]) -> None:
    call = make_call(score, "none", "float32", "", Sizes(queries=sizes[0], keys=sizes[1]))
    call.check(mxnet(call, "none"))


@pytest.mark.slow
def test_files_pass_in_its_environment() -> None:
    """In one process: importing takes it seconds."""
    # Its own conftest alone: the conftest of the folder above wants the frameworks of this environment.
    own = ("--confcutdir", HERE / "in_mxnet", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml")
    found = in_its_environment("-m", "pytest", HERE / "in_mxnet", "-m", "", "-q", "-p", "no:cacheprovider", *own)
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-5_000:]


def test_the_package_is_the_one_of_these_tests() -> None:
    """Also if another clone made the environment, which has its own sources installed."""
    code = "import attnscore; from attnscore.backends import native; print(attnscore.__file__, native.module)"
    found = in_its_environment("-c", code)
    assert found.stdout == f"{ats.__file__} {native.module}\n", found.stderr


def in_its_environment(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [environment(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
        env=VARIABLES | {"OMP_NUM_THREADS": "1"},
    )


def test_an_mxnet_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sys.version_info", Release(3, 11))
    assert "NumPy below 1.24" in str(ats.available()["frameworks"]["mxnet"])


def test_without_mxnet_its_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", Release(3, 11))
    reason = ats.available()["frameworks"]["mxnet"]
    assert reason == "the package mxnet is not installed (pip install mxnet==1.9.1 'numpy<1.24')" and not reason


def test_nothing_is_advised_where_no_release_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet's NumPy has no wheels for these releases of Python."""
    monkeypatch.setattr("sys.version_info", Release(3, 12))
    reason = ats.available()["frameworks"]["mxnet"]
    assert reason == "it needs NumPy below 1.24, which Python 3.12 and later do not have" and not reason
