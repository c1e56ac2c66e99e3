"""A wheel or an sdist, tried in an environment of its own with NumPy alone, and a PATH with nothing else.

A wheel has to bring the native kernels; an sdist has to install without them and say why. Both have to pass the
self-check, and drawn calls in several threads.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

MAX_SECONDS = 6.0
SELF_CHECK = ("-m", "attnscore.testing")
DRAWN_CALLS = (Path(__file__).resolve().parent.parent / "tests" / "soak.py", "--threads")
FIRST_CALL = """\
import numpy as np
import attnscore as ats
x = np.ones((1, 8, 4), np.float32)
assert np.allclose(ats.attend(x, x, x), 1)
print(ats.available()["kernels"]["native"])
"""


def try_one(file: Path, python: str) -> str:
    """Install a file into a new environment of a Python, check it there, and return what it took."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = {**os.environ, "PATH": str(folder / "bin"), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("CC", "CXX", "PYTHONPATH", "ATTNSCORE_NO_NATIVE", "ATTNSCORE_REQUIRE_NATIVE"):
            environment.pop(name, None)

        def run(*arguments: str | Path, program: str | Path = folder / "bin" / "python") -> str:
            done = subprocess.run(
                [program, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return done.stdout.strip()

        run("-m", "venv", folder, program=python)
        pip = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")
        run(*pip, "install", "numpy")
        start, used = time.perf_counter(), seconds_of_children()
        run(*pip, "install", file.resolve())
        native = run("-c", FIRST_CALL)
        took, used = time.perf_counter() - start, seconds_of_children() - used
        is_wheel = file.suffix == ".whl"
        if (native == "True") != is_wheel:
            raise RuntimeError(f"{file.name}: expected native kernels of a wheel and none of an sdist, got {native!r}")
        if is_wheel and used > MAX_SECONDS:
            raise RuntimeError(f"{file.name}: expected a first call in {MAX_SECONDS} s of a core, got {used:.1f} s")
        checked = "; ".join(
            run(*command).splitlines()[-1] for command in (SELF_CHECK, (*DRAWN_CALLS, "8", "--calls", "2000"))
        )
        version = run("-c", "import platform; print(platform.python_version())")
        return f"Python {version}: installed and called in {took:.1f} s ({used:.1f} s of a core); {checked}"


def seconds_of_children() -> float:
    """Return the processor time of ended child processes, which other programs on the machine do not change much."""
    times = os.times()
    return times.children_user + times.children_system
