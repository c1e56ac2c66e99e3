"""What an installation is made of, and what it says where the native kernels cannot be compiled.

Nothing is compiled here: wheels are made without CMake, and CMake configures at most.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "attnscore"
MAKE_WHEEL = "import sys; from scikit_build_core import build; build.build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", MAKE_WHEEL, folder], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_a_wheel_holds_the_package_its_licence_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    assert {"attnscore/py.typed", "attnscore/_native.pyi"} <= names
    assert [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]


def test_a_wheel_without_kernels_is_for_every_machine(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.endswith("-py3-none-any.whl")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder of programs that has a shell and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "uname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def configure(build: Path, path: str, *options: str) -> subprocess.CompletedProcess[str]:
    """CMake on the project, for the C++ driver, which needs neither Python's headers nor nanobind."""
    tools = Path(sys.executable).parent
    return subprocess.run(
        [
            *(tools / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
            *("-DATTNSCORE_MODULE=OFF", "-DATTNSCORE_DRIVER=ON", *options),
        ],
        capture_output=True,
        text=True,
        env={"PATH": path},
        check=False,
        timeout=120,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Its messages on one line: CMake breaks them where it likes."""
    return " ".join(done.stderr.split())


MISSING = "no working C++ compiler was found (on Debian: apt-get install g++ python3-dev)"


def test_without_a_compiler_the_kernels_are_left_out_and_their_need_is_named(tmp_path: Path, bare_path: Path) -> None:
    done = configure(tmp_path / "build", str(bare_path))
    assert done.returncode == 0, done.stderr
    assert f"installing without the native kernels: {MISSING}" in said(done)


def test_kernels_that_are_required_and_cannot_be_built_are_an_error(tmp_path: Path, bare_path: Path) -> None:
    done = configure(tmp_path / "build", str(bare_path), "-DATTNSCORE_REQUIRED=ON")
    assert done.returncode != 0
    assert f"the native kernels cannot be built: {MISSING}" in said(done)


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler here")
def test_a_compiler_that_is_installed_later_is_found(tmp_path: Path, bare_path: Path) -> None:
    """In the same build folder: CMake remembers what it looked for."""
    assert "no working C++ compiler" in said(configure(tmp_path / "build", str(bare_path)))
    folders = ":".join(dict.fromkeys(str(Path(str(shutil.which(name))).parent) for name in ("c++", "sh")))
    done = configure(tmp_path / "build", folders)
    assert done.returncode == 0, done.stderr
    assert "C++ compiler" not in said(done)
