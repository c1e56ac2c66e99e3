"""The Triton kernel in its interpreter, in a process of its own: the variable has to be set before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

import attnscore as ats

HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in (HERE / "gpu").glob("test_*.py"))


try:
    TRITON = tuple(map(int, version("triton").split(".")[:2]))
except PackageNotFoundError:
    TRITON = None
by_interpreter = pytest.mark.skipif(
    TRITON is not None and TRITON < (3, 6), reason="the interpreter of this Triton takes no NumPy from 2.4 on"
)


def interpreted(*arguments: str) -> None:
    """Run tests of tests/gpu in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE / "gpu", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


@by_interpreter
def test_a_few_in_the_interpreter() -> None:
    interpreted("test_triton_kernel.py", "--every", "8")


@by_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_sample_in_the_interpreter(file: str) -> None:
    """Of the slow rows of each test every fifth, of which each value of each table is one.

    All of them take ten minutes: `make test-gpu-interpreted`.
    """
    interpreted(file, "-m", "slow", "--every", "5")


CHECKS = """
import numpy as np
import triton_scores as own
from attnscore.testing import check_score

check_score(own.Student(np.array([0.5, 0.2])))
try:
    check_score(own.Wrong())
except AssertionError as error:
    print(error)
check_score(own.Given(own.Bounded().triton_tile()))
"""


@pytest.mark.slow
def test_check_score_runs_the_functions_of_a_score_in_a_process_of_the_interpreter() -> None:
    """In a process of its own, too: Triton must not be imported behind TensorFlow."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHECKS], cwd=HERE, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("triton_tile: gradient of query differs from that by tile: off by"), done.stdout
    assert "the score cannot be sent to another process" in done.stderr


def test_it_says_why_not() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ats.KernelUnavailable, match="arrays on cpu, not on cuda"):
        ats.attend(x, x, x, kernel="triton")
    with pytest.raises(ats.KernelUnavailable, match="arrays of numpy: it takes PyTorch's"):
        ats.attend(x.numpy(), x.numpy(), x.numpy(), kernel="triton")
