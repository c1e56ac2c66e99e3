"""`attnscore.parallel.jax` on 8 devices of one process.

JAX reads their number when it starts, so ``tests/jax_checks`` runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_eight_devices(pytestconfig: pytest.Config) -> None:
    """With the slow checks where this run has the slow tests, and products where it has those."""
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT / "tests")))
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    options = ["-q", "-p", "no:cacheprovider", "-m", pytestconfig.option.markexpr]
    options += ["--products"] if pytestconfig.getoption("--products") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "jax_checks" / "check_parallel.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=3600,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}", pytrace=False)
    assert " passed" in done.stdout
