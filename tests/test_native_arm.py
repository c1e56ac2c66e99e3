"""The native kernels for Arm: the C++ test driver, cross-compiled and run in an emulator, as ``make arm`` does.

Left out where the cross compiler or QEMU is missing: neither is a package of Python's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILER, reason="no cross compiler (on Debian: apt-get install g++-aarch64-linux-gnu)"),
    pytest.mark.skipif(not EMULATOR, reason="no emulator (on Debian: apt-get install qemu-user-static)"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, tools = tmp_path_factory.mktemp("arm"), Path(sys.executable).parent
    configure = [
        *(tools / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
        *("-DCMAKE_EXE_LINKER_FLAGS=-static", "-DATTNSCORE_MODULE=OFF", "-DATTNSCORE_DRIVER=ON"),
    ]
    for command in (configure, [tools / "cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "driver"


# The second CPU has no bfloat16 dot products: they are chosen when the program runs.
@pytest.mark.parametrize(("cpu", "targets"), [("max", "neon_bf16 neon"), ("neoverse-n1", "neon")])
def test_every_target_agrees_with_plain_loops(driver: Path, cpu: str, targets: str) -> None:
    done = subprocess.run(
        [str(EMULATOR), "-cpu", cpu, driver, "40"], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"40 cases on {targets}: 0 failed; pool holds\n", done.stdout)
