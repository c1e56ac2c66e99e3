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
# What NumPy says when Keras reads its variables.
_KERAS_OWN = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
CHECKS = ("check_numbers.py", "check_models.py", "check_errors.py", "check_drop_ins.py", "check_multi_head.py")

# Keras imports these where they are installed, some when a seed is set, for four seconds of each process; no check
# needs them. A module that is None cannot be imported.
NEEDLESS = {"tensorflow": ("sklearn", "matplotlib")}
NEEDLESS |= dict.fromkeys(("jax", "torch"), ("sklearn", "matplotlib", "tensorflow"))
# Collecting garbage among all that the frameworks import, and taking it apart at the end, takes seconds more.
_START = """
import gc, os, sys
gc.disable()
sys.modules.update(dict.fromkeys({needless}))
import pytest
code = int(pytest.main(sys.argv[1:]))
sys.stdout.flush(), sys.stderr.flush()
os._exit(code)
"""

ROWS = [
    pytest.param("torch", ("check_models.py",), id="torch"),
    pytest.param("torch", tuple(x for x in CHECKS if x != "check_models.py"), id="torch-rest", marks=pytest.mark.slow),
    *(pytest.param(backend, CHECKS, id=backend, marks=pytest.mark.slow) for backend in ("tensorflow", "jax")),
]


@pytest.mark.parametrize(("backend", "checks"), ROWS)
def test_every_backend(backend: str, checks: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    """With the slow checks where this run has the slow tests: one process, of which importing alone takes seconds."""
    run_checks(backend, checks, pytestconfig.option.markexpr)


def run_checks(backend: str, checks: tuple[str, ...], markexpr: str) -> None:
    """Run files of ``tests/keras_checks`` in a process of a backend."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # At these sizes threads only wait for each other.
        "OMP_NUM_THREADS": "1",
    }
    folder = ROOT / "tests" / "keras_checks"
    # Hypothesis, which no check uses, is imported by its plugin.
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    options = ("-c", _START.format(needless=NEEDLESS[backend]), "-q", *plugins, "--confcutdir", str(folder))
    marks = ("-W", _KERAS_OWN, "-m", markexpr)
    done = subprocess.run(
        [sys.executable, *options, *marks, *(str(folder / name) for name in checks)],
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
