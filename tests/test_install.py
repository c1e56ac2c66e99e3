"""What an installation is made of, and what it says where the native kernels cannot be compiled.

Nothing is compiled here: wheels are made without CMake, and CMake configures at most.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from attnscore.backends import native

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "attnscore"
MAKE_WHEEL = "import sys; from scikit_build_core import build; build.build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-c", MAKE_WHEEL, folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.slow
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
    ninja = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
    driver = ("-DATTNSCORE_MODULE=OFF", "-DATTNSCORE_DRIVER=ON")
    return run(tools / "cmake", "-S", ROOT, "-B", build, *ninja, *driver, *options, env={"PATH": path})


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Its messages on one line: CMake breaks them where it likes."""
    return " ".join(done.stderr.split())


MISSING = "no working C++ compiler was found (on Debian: apt-get install g++ python3-dev)"


def test_without_a_compiler_the_kernels_are_left_out_and_their_need_is_named(tmp_path: Path, bare_path: Path) -> None:
    done = configure(tmp_path / "build", str(bare_path))
    assert done.returncode == 0, done.stderr
    assert f"installing without the native kernels: {MISSING}" in said(done)
    assert (tmp_path / "build" / "_native_missing.py").read_text() == f'REASON = r"""{MISSING}."""\n'


def test_kernels_that_are_required_and_cannot_be_built_are_an_error(tmp_path: Path, bare_path: Path) -> None:
    done = configure(tmp_path / "build", str(bare_path), "-DATTNSCORE_REQUIRED=ON")
    assert done.returncode != 0
    assert f"the native kernels cannot be built: {MISSING}" in said(done)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler here")
def test_a_compiler_that_is_installed_later_is_found(tmp_path: Path, bare_path: Path) -> None:
    """In the same build folder: CMake remembers what it looked for."""
    assert "no working C++ compiler" in said(configure(tmp_path / "build", str(bare_path)))
    folders = ":".join(dict.fromkeys(str(Path(str(shutil.which(name))).parent) for name in ("c++", "sh")))
    done = configure(tmp_path / "build", folders)
    assert done.returncode == 0, done.stderr
    assert "C++ compiler" not in said(done)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler here")
def test_targets_are_chosen_by_name_or_by_this_cpu(tmp_path: Path) -> None:
    def chosen(name: str) -> list[str]:
        done = configure(tmp_path / "build", os.environ["PATH"], f"-DATTNSCORE_TARGETS={name}")
        assert done.returncode == 0, done.stderr
        return re.findall(r"attnscore: CPU targets (\S+)", done.stdout)[0].split(";")

    every = chosen("all")
    local = chosen("local")
    assert local[0] == every[0] and len(local) <= 2 and set(local) <= set(every)
    if native.module is not None:
        assert local[-1] == native.module.targets()[0]
    assert chosen(every[-1]) == list(dict.fromkeys((every[0], every[-1])))
    wrong = configure(tmp_path / "build", os.environ["PATH"], "-DATTNSCORE_TARGETS=mmx")
    assert wrong.returncode != 0 and "expected local, all or names among" in said(wrong) and "got mmx" in said(wrong)


# ------------------------------------------------------------------ what an installation without kernels says

WHY = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "ScikitBuild" not in type(x).__name__]
sys.path.insert(0, sys.argv[1])
import numpy as np
import attnscore as ats
assert ats.__file__.startswith(sys.argv[1]), ats.__file__
reason = ats.available()["kernels"]["native"]
assert f"not native      {reason}" in str(ats.explain(*[np.ones((2, 2))] * 3)).splitlines()
print(reason)
"""


@pytest.fixture
def installed(wheel: zipfile.ZipFile, tmp_path: Path) -> Path:
    """A folder with the package as a wheel without kernels has it."""
    wheel.extractall(tmp_path / "site")
    return tmp_path / "site"


def reason_in(folder: Path) -> str:
    """What `available` and `explain` say of the native kernels in that folder's package."""
    done = run(sys.executable, "-c", WHY, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_installation_says_what_its_build_lacked(installed: Path) -> None:
    (installed / "attnscore" / "_native_missing.py").write_text(f'REASON = r"""{MISSING}."""\n')
    assert reason_in(installed) == f"no native module: built without it, because {MISSING}"


@pytest.mark.slow
def test_an_installation_whose_compilation_failed_says_so(installed: Path) -> None:
    expected = "no native module: built without it, because its compilation failed, or CMake did not run"
    assert reason_in(installed) == f"{expected}; `pip install -v` shows which"


@pytest.mark.slow
def test_a_module_that_does_not_load_is_not_called_missing(installed: Path) -> None:
    (installed / "attnscore" / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert reason_in(installed).startswith("no native module: it is there and does not load: ")
