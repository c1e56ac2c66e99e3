"""The Keras layers, on each of Keras's backends.

The backend is chosen before Keras is imported, so each has a process of its own, which runs ``tests/keras_checks``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# What NumPy says when Keras reads its variables.
_KERAS_OWN = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
CHECKS = ("check_numbers.py", "check_models.py", "check_errors.py")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend: str, pytestconfig: pytest.Config) -> None:
    """With the slow checks where this run has the slow tests: one process, of which importing alone takes seconds."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # At these sizes threads only wait for each other.
        "OMP_NUM_THREADS": "1",
    }
    folder = ROOT / "tests" / "keras_checks"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(folder), "-W", _KERAS_OWN)
    marks = ("-m", pytestconfig.option.markexpr)
    done = subprocess.run(
        [sys.executable, *options, *marks, *(str(folder / name) for name in CHECKS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=900,
    )
    if done.returncode:
        pytest.fail(f"keras_checks on {backend}:\n{done.stdout}\n{done.stderr}", pytrace=False)
    assert " passed" in done.stdout
