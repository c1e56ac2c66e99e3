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
            return run_timed(*arguments, program=program)[0]

        def run_timed(*arguments: str | Path, program: str | Path = folder / "bin" / "python") -> tuple[str, float]:
            """Run a command; return what it printed and its processor time, which depends little on other programs."""
            process = subprocess.Popen(
                [program, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
            )
            with process.stdout as stdout:
                printed = stdout.read().strip()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                raise subprocess.CalledProcessError(process.returncode, process.args, printed)
            return printed, usage.ru_utime + usage.ru_stime

        run("-m", "venv", folder, program=python)
        pip = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")
        run(*pip, "install", "numpy")
        start = time.perf_counter()
        _, seconds_of_pip = run_timed(*pip, "install", file.resolve())
        native, seconds_of_call = run_timed("-c", FIRST_CALL)
        took, used = time.perf_counter() - start, seconds_of_pip + seconds_of_call
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
