"""``python tests/try_wheel.py FOLDER``: what is in a folder of distributions, tried where there is no compiler.

Each file gets an environment of its own with NumPy alone, and a PATH with nothing else. A wheel has to stay small and
bring the native kernels; an sdist has to install without them and say why. Both have to pass the self-check.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

MOST_BYTES = 8_000_000
NATIVE = "import attnscore as ats; print(ats.available()['kernels']['native'])"


def try_one(file: Path, folder: Path) -> None:
    """Install a file into a new environment in `folder`, and check it there."""
    is_wheel = file.suffix == ".whl"
    print(f"\n{file.name}: {file.stat().st_size / 1e6:.2f} MB", flush=True)
    if is_wheel and file.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{file.name}: expected at most {MOST_BYTES} bytes, got {file.stat().st_size}")
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    environment = {**os.environ, "PATH": str(programs), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("CC", "CXX", "PYTHONPATH", "ATTNSCORE_NO_NATIVE", "ATTNSCORE_REQUIRE_NATIVE"):
        environment.pop(name, None)

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [programs / "python", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    # NumPy is in pip's cache when the time counts.
    run(*pip, "install", "numpy")
    run(*pip, "uninstall", "--yes", "numpy")
    start, used = time.perf_counter(), seconds_of_children()
    run(*pip, "install", file.resolve())
    native = run("-c", NATIVE)
    took, used = time.perf_counter() - start, seconds_of_children() - used
    print(f"installed and imported in {took:.1f} s, {used:.1f} s of a core; native kernels: {native}", flush=True)
    if (native == "True") != is_wheel:
        raise SystemExit(f"{file.name}: expected native kernels of a wheel and none of an sdist, got {native!r}")
    print(run("-m", "attnscore.testing"), flush=True)


def seconds_of_children() -> float:
    """What ended child processes took of the processor, which other programs on the machine do not change much."""
    times = os.times()
    return times.children_user + times.children_system


def main(folder: str) -> None:
    """Try every distribution in a folder."""
    files = sorted([*Path(folder).glob("*.whl"), *Path(folder).glob("*.tar.gz")])
    if {file.suffix for file in files} != {".whl", ".gz"}:
        raise SystemExit(f"{folder}: expected a wheel and an sdist, got {[file.name for file in files]}")
    for file in files:
        with tempfile.TemporaryDirectory() as place:
            try_one(file, Path(place) / "env")


if __name__ == "__main__":
    main(*sys.argv[1:])
