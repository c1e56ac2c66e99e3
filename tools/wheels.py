"""``python tools/wheels.py FOLDER [PLATFORM ...]``: wheels of every platform, compiled on this machine, and an sdist.

Clang, the C++ library and the C headers of every system come with Zig. For each platform the kernels, which do not know
Python, are compiled once; then the bindings of each Python are compiled and linked with them. A wheel that cannot be
built is a row of the table that says why. Needs Debian's `apt-get`, for Python's headers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from try_wheel import DRAWN_CALLS, SELF_CHECK, try_one

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
ZIG = [sys.executable, "-m", "ziglang"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
MAX_BYTES = 4_000_000


@dataclasses.dataclass(frozen=True)
class Platform:
    """A system and CPU: the tag of its wheels, its name in Zig and in CMake."""

    tag: str
    zig: str
    system: str
    # The platform whose kernels are linked: they take from the C library what every C library has.
    kernels: str = ""


# In the order of their users.
PLATFORMS = (
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "Linux"),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "Linux"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin"),
    Platform("win_amd64", "x86_64-windows-gnu", "Windows"),
    Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "Linux", kernels="manylinux_2_28_x86_64"),
    Platform("musllinux_1_2_aarch64", "aarch64-linux-musl", "Linux", kernels="manylinux_2_28_aarch64"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "Darwin"),
)


@dataclasses.dataclass(frozen=True)
class Abi:
    """A binary interface of Python: the tags of its wheels, and how the bindings are compiled for it."""

    tag: str
    headers: str  # the version of Python's headers
    suite: str  # the release of Debian that has them
    dll: str  # the library of Windows
    flags: tuple[str, ...] = ()


ABIS = (
    Abi("cp312-abi3", "3.13", "trixie", "python3.dll", ("-DPy_LIMITED_API=0x030C0000",)),
    Abi("cp311-cp311", "3.11", "bookworm", "python311.dll"),
    # The second flag declares that the module works without Python's lock, which the import would turn on.
    Abi("cp314-cp314t", "3.14", "forky", "python314t.dll", ("-DPy_GIL_DISABLED=1", "-DNB_FREE_THREADED")),
)

# Of the configuration of 64-bit Windows, what Python's headers read.
WINDOWS_CONFIG = """\
#define MS_WIN32
#define MS_WIN64
#define MS_WINDOWS
#define NT_THREADS
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#define HAVE_LONG_LONG 1
#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_WCHAR_H 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
"""
EXPORTS = ("PyInit__native", "attnscore_xla_forward", "attnscore_xla_backward", "attnscore_xla_threads")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return what it printed; where it fails, raise an error with its last lines."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()[-15:]
        raise RuntimeError("\n".join([f"{shlex.join(map(str, command[:6]))} ...: status {done.returncode}", *lines]))
    return done.stdout


# ---- Debian's packages ----


class Debian:
    """Packages of one release of Debian for one architecture, whatever this machine has installed."""

    def __init__(self, suite: str, architecture: str = "amd64") -> None:
        self.folder = BUILD / "debian" / f"{suite}-{architecture}"
        sources = self.folder / "sources.list"
        self.options = [f"-oDir::Etc::sourcelist={sources}", "-oDir::Etc::sourceparts=-"]
        self.options += [f"-oDir::State::lists={self.folder / 'lists'}", f"-oDir::Cache={self.folder / 'cache'}"]
        self.options += [
            f"-oAPT::Architecture={architecture}",
            f"-oAPT::Architectures={architecture}",
            "-oAPT::Sandbox::User=root",
        ]
        if not sources.exists():
            for name in ("lists/partial", "cache/archives/partial"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
            # The mirror that this machine already reads its own packages from.
            mirrors = run("apt-get", "indextargets", "--format", "$(REPO_URI)").split()
            mirror = next((mirror for mirror in mirrors if "security" not in mirror), None)
            if mirror is None:
                raise RuntimeError("apt-get knows no mirror of Debian (expected one in /etc/apt/sources.list)")
            sources.write_text(f"deb [signed-by={keys}] {mirror} {suite} main\n")

    def unpack(self, *packages: str) -> Path:
        """Unpack packages into a folder and return it."""
        place = self.folder / "unpacked"
        missing = [name for name in packages if not (self.folder / "have" / name).exists()]
        if missing:
            run("apt-get", *self.options, "update")
            with tempfile.TemporaryDirectory() as debs:
                run("apt-get", *self.options, "download", *missing, cwd=Path(debs))
                for deb in Path(debs).glob("*.deb"):
                    run("dpkg-deb", "-x", deb, place)
            for name in missing:
                (self.folder / "have" / name).parent.mkdir(exist_ok=True)
                (self.folder / "have" / name).touch()
        return place


def headers_of(abi: Abi) -> Path:
    """Return a folder with Python's headers for every platform, which differ in their configuration alone."""
    usr = Debian(abi.suite).unpack(f"libpython{abi.headers}-dev") / "usr" / "include"
    folder = usr / f"python{abi.headers}"
    # The configuration of x86-64 Linux: on the other 64-bit POSIX systems headers read the same from it.
    shutil.copy(usr / "x86_64-linux-gnu" / f"python{abi.headers}" / "pyconfig.h", folder / "pyconfig_posix.h")
    (folder / "pyconfig_windows.h").write_text(WINDOWS_CONFIG)
    choice = '#ifdef _WIN32\n#include "pyconfig_windows.h"\n#else\n#include "pyconfig_posix.h"\n#endif\n'
    (folder / "pyconfig.h").write_text(choice)
    return folder


# ---- compiling ----


def compiler_of(platform: Platform) -> Path:
    """Return a program that compiles for a platform, as CMake wants one."""
    program = BUILD / platform.tag / "c++"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(ZIG)} c++ -target {platform.zig} "$@"\n')
    program.chmod(0o755)
    return program


def compile_objects(platform: Platform) -> list[Path]:
    """Compile what does not know Python, and return the object files in the order in which they are linked."""
    folder = BUILD / platform.tag / "objects"
    run(
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={compiler_of(platform)}"),
        *(f"-DCMAKE_SYSTEM_NAME={platform.system}", "-DCMAKE_INSTALL_NAME_TOOL=true", "-DATTNSCORE_REQUIRED=ON"),
        *("-DATTNSCORE_MODULE=OFF", "-DATTNSCORE_OBJECTS=ON", "-DATTNSCORE_TARGETS=all"),
    )
    run("cmake", "--build", folder, "--target", "core" if platform.kernels else "objects", "--parallel", jobs())
    objects = [folder / line for line in (folder / "core.txt").read_text().splitlines()]
    kernels = BUILD / (platform.kernels or platform.tag) / "objects"
    return objects + [kernels / line for line in (kernels / "kernels.txt").read_text().splitlines()]


def jobs() -> str:
    """Return how many compilers run side by side."""
    return os.environ.get("JOBS") or str(min(2, os.cpu_count() or 1))


def link_module(platform: Platform, abi: Abi, objects: Sequence[Path]) -> Path:
    """Compile the bindings of a Python, and link the module with objects that do not know Python."""
    import jaxlib
    import nanobind

    folder = BUILD / platform.tag / abi.tag
    folder.mkdir(parents=True, exist_ok=True)
    headers, binder, compiler = headers_of(abi), Path(nanobind.__path__[0]), compiler_of(platform)
    sources = [ROOT / "csrc/api" / name for name in ("bindings.cpp", "python_arrays.cc", "ffi.cc")]
    sources += [binder / "src" / "nb_combined.cpp"]
    includes = (binder / "include", binder / "ext/robin_map/include", headers, Path(jaxlib.__path__[0]) / "include")
    # The flags of nanobind's CMake package. Python's limited headers leave out <cstdio>, which nanobind uses.
    flags = ["-std=c++20", "-O2", "-DNDEBUG", "-DNB_COMPACT_ASSERTIONS", "-fvisibility=hidden", "-fno-strict-aliasing"]
    flags += ["-ffunction-sections", "-fdata-sections", "-include", "cstdio", f"-I{ROOT / 'csrc'}", *abi.flags]
    flags += [item for path in includes for item in ("-isystem", str(path))]
    if platform.system != "Windows":
        flags.append("-fPIC")
    compiled = [folder / f"{source.name}.o" for source in sources]
    for source, to in zip(sources, compiled, strict=True):
        run(compiler, *flags, "-c", source, "-o", to)

    is_abi3 = abi.tag.endswith("abi3")
    suffix = {"Windows": ".pyd", "Darwin": ".so", "Linux": ".so"}[platform.system]
    module = folder / f"_native{'.abi3' if is_abi3 and suffix == '.so' else ''}{suffix}"
    link = ["-shared", "-s", "-o", str(module), *map(str, [*compiled, *objects])]
    if platform.system == "Linux":
        # The module's own C++ library is neither seen by others nor replaced by theirs.
        script = folder / "exports.map"
        script.write_text(f"{{ global: {'; '.join(EXPORTS)}; local: *; }};\n")
        link += [f"-Wl,--version-script={script}", "-Wl,--gc-sections"]
        if "gnu" in platform.zig:
            link.append(str(unwinder_of_system(platform, folder)))
    elif platform.system == "Darwin":
        link += ["-Wl,-undefined,dynamic_lookup"]
    else:
        link += [str(import_library(abi, headers, folder))]
    run(compiler, *link)
    return module


def unwinder_of_system(platform: Platform, folder: Path) -> Path:
    """Make a stand-in for the system's libgcc_s, to link with it.

    Where a daemon thread wants Python's lock back when Python ends, CPython before 3.14 ends the thread by the unwinder
    of libgcc_s. It calls the module's handlers, which must not ask another unwinder, Zig's, about its state.
    """
    names = ("Resume", "RaiseException", "Resume_or_Rethrow", "DeleteException", "Backtrace", "FindEnclosingFunction")
    names += ("GetIP", "GetIPInfo", "SetIP", "GetGR", "SetGR", "GetCFA", "GetRegionStart", "GetLanguageSpecificData")
    names += ("GetTextRelBase", "GetDataRelBase", "ForcedUnwind")
    source, library = folder / "libgcc_s.c", folder / "libgcc_s.so.1"
    source.write_text("".join(f"void _Unwind_{name}(void) {{}}\n" for name in names))
    run(*ZIG, "cc", "-target", platform.zig, "-shared", "-fPIC", "-Wl,-soname,libgcc_s.so.1", "-o", library, source)
    return library


def import_library(abi: Abi, headers: Path, folder: Path) -> Path:
    """Make the library by which Windows finds Python's functions: all names of the headers, of which few are used."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(headers.rglob("*.h")))
    names = sorted(set(re.findall(r"\b_?Py_?[A-Za-z]\w+", text)))
    definition, library = folder / "python.def", folder / "libpython.a"
    definition.write_text(f"LIBRARY {abi.dll}\nEXPORTS\n" + "".join(f"    {name}\n" for name in names))
    run(*ZIG, "dlltool", "-m", "i386:x86-64", "-D", abi.dll, "-d", definition, "-l", library)
    return library


# ---- wheels ----


def build_sdist(folder: Path) -> Path:
    """Build the sdist, and from it, so that nothing of this clone comes in, a wheel without the module. Return that."""
    hook = "import sys; from scikit_build_core import build; "
    run(sys.executable, "-c", hook + f"build.build_sdist({str(folder)!r})")
    (sdist,) = folder.glob("*.tar.gz")
    place = BUILD / "pure"
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(sdist) as file:
        file.extractall(place, filter="data")
    (source,) = place.iterdir()
    run(sys.executable, "-c", hook + f"build.build_wheel({str(place)!r}, {{'wheel.cmake': 'false'}})", cwd=source)
    (wheel,) = place.glob("*.whl")
    return wheel


def pack_wheel(pure: Path, module: Path, tag: str, folder: Path) -> Path:
    """Add the module to a wheel that has none, and return the wheel with this tag."""
    from wheel.wheelfile import WheelFile

    name, version = pure.name.split("-")[:2]
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(pure) as file:
            file.extractall(place)
        shutil.copy(module, Path(place) / "attnscore" / module.name)
        description = Path(place) / f"{name}-{version}.dist-info" / "WHEEL"
        lines = [line for line in description.read_text().splitlines() if not line.startswith(("Tag:", "Root-Is"))]
        lines = [line for line in lines if line] + ["Root-Is-Purelib: false", f"Tag: {tag}"]
        description.write_text("\n".join(lines) + "\n")
        with WheelFile(wheel, "w") as file:
            file.write_files(place)
    return wheel


def symbols_of(wheel: Path, module: Path) -> str:
    """Return what a wheel of Linux needs of the system; raise an error where that is more than its tag says."""
    if "musllinux" in wheel.name:  # auditwheel reads these on a system with musl alone
        from elftools.elf.elffile import ELFFile

        with module.open("rb") as file:
            libraries = [tag.needed for tag in ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        if libraries != ["libc.so"]:
            raise RuntimeError(f"expected to need the C library alone, got {libraries}")
        return "needs libc.so alone"
    text = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    found = re.search(r'tag: "((many|musl)linux_(\d+)_(\d+)_\w+)"', text)
    claimed = re.search(r"(many|musl)linux_(\d+)_(\d+)", wheel.name)
    assert claimed is not None
    if found is None or found[2] != claimed[1] or int(found[4]) > int(claimed[3]):
        raise RuntimeError(f"auditwheel does not agree with the tag: {text}")
    versions = re.findall(r"GLIBC_([\d.]+)", text)
    newest = max(versions, key=lambda version: [int(number) for number in version.split(".")], default="")
    return found[1] + (f", symbols of GLIBC {newest}" if newest else "")


# ---- trying ----


def interpreters(abi: Abi) -> list[str]:
    """Return the Pythons of this machine that take wheels of an ABI of x86-64 Linux."""
    names = {"cp312-abi3": ["3.12", "3.13", "3.14"], "cp311-cp311": ["3.11"], "cp314-cp314t": ["3.14t"]}[abi.tag]
    programs = [shutil.which(f"python{name}") for name in names]
    return [python for program in programs if program and (python := python_of(program))]


def python_of(program: str) -> str:
    """Return the Python that a program is or starts; "" where it cannot make environments or is not installed."""
    code = "import ensurepip, sys, venv; print(sys.executable)"
    return subprocess.run([program, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


# What Python's standard library is linked with, as far as the self-check imports it.
ARM_LIBRARIES = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libffi8", "libbz2-1.0", "libexpat1", "liblzma5")


def try_on_arm(wheel: Path, abi: Abi) -> str:
    """Check a wheel with NumPy in Python in an emulator of a 64-bit Arm CPU, and return what the checks printed."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        raise RuntimeError("no emulator (on Debian: apt-get install qemu-user-static)")
    version = abi.headers
    packages = (f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib")
    system = Debian(abi.suite, "arm64").unpack(*packages, *ARM_LIBRARIES)
    # Newer releases of Debian have this link of the root folder in a package of its own.
    if not (system / "lib").exists():
        (system / "lib").symlink_to("usr/lib")
    packages_folder = BUILD / "arm" / abi.tag
    shutil.rmtree(packages_folder, ignore_errors=True)
    place = ("--platform", "manylinux_2_28_aarch64", "--platform", "manylinux_2_27_aarch64")
    place += ("--platform", "manylinux2014_aarch64", "--python-version", version, "--only-binary", ":all:")
    run(*PIP, "install", "--target", packages_folder, "--no-compile", *place, "numpy")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages_folder)
    emulated = (qemu, "-L", system, system / "usr/bin" / f"python{version}")
    # No thread of OpenBLAS beside the emulator's.
    environment = {"PYTHONPATH": str(packages_folder), "PYTHONHOME": str(system / "usr"), "OPENBLAS_NUM_THREADS": "1"}
    checks = [
        run(*emulated, *command, **environment).splitlines()[-1]
        for command in (SELF_CHECK, (*DRAWN_CALLS, "1", "--calls", "200"))
    ]
    return f"emulator, Python {version}: {'; '.join(checks)}"


# ---- all of them ----


@dataclasses.dataclass
class Row:
    """A wheel, and what is known of it; `error` says why it was not built, or is wrong."""

    wheel: str
    megabytes: float | None = None
    symbols: str = ""
    ran: list[str] = dataclasses.field(default_factory=list)
    error: str = ""


def check_wheel(platform: Platform, abi: Abi, wheel: Path, module: Path) -> Row:
    """Check a wheel and, where this machine can, try it."""
    row = Row(wheel.name, round(wheel.stat().st_size / 1e6, 2))
    try:
        if wheel.stat().st_size > MAX_BYTES:
            raise RuntimeError(f"expected at most {MAX_BYTES} bytes, got {wheel.stat().st_size}")
        if platform.system == "Linux":
            row.symbols = symbols_of(wheel, module)
        if platform.tag.startswith("manylinux") and platform.tag.endswith("x86_64"):
            row.ran = [try_one(wheel, python) for python in interpreters(abi)]
        if platform.tag.startswith("manylinux") and platform.tag.endswith("aarch64") and abi.tag != "cp314-cp314t":
            row.ran = [try_on_arm(wheel, abi)]
    except (RuntimeError, subprocess.CalledProcessError) as error:
        row.error = str(error)
    return row


def print_table(rows: Sequence[Row], folder: Path) -> None:
    """Print the rows, and write them into the folder."""
    lines = ["| wheel | MB | symbols | ran |", "|---|---|---|---|"]
    for row in rows:
        ran = "; ".join(row.ran) or "built only"
        cells = (row.wheel, f"{row.megabytes or 0:.2f}", row.symbols, row.error.replace("\n", "<br>") or ran)
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines)
    (folder / "wheels.md").write_text(text + "\n")
    (folder / "wheels.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    print("\n" + text)


def main(destination: str, *names: str) -> int:
    """Build the wheels of some platforms, or of all, and return the number of those that are missing or wrong."""
    start = time.monotonic()
    folder = Path(destination).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(BUILD / "zig"))
    os.environ.setdefault("ZIG_LOCAL_CACHE_DIR", str(BUILD / "zig"))

    def says(text: str) -> None:
        print(f"[{time.monotonic() - start:.0f} s] {text}", flush=True)

    pure = build_sdist(folder)
    (sdist,) = folder.glob("*.tar.gz")
    rows = [Row(sdist.name, round(sdist.stat().st_size / 1e6, 2), "", [try_one(sdist, sys.executable)])]
    says(rows[0].ran[0])
    needed = {platform.tag for platform in PLATFORMS if platform.tag in names or not names}
    needed |= {platform.kernels for platform in PLATFORMS if platform.tag in needed and platform.kernels}

    def build(platform: Platform, abi: Abi, objects: Sequence[Path]) -> tuple[Path, Path]:
        module = link_module(platform, abi, objects)
        return pack_wheel(pure, module, f"{abi.tag}-{platform.tag}", folder), module

    def check(platform: Platform, abi: Abi, built: Future[tuple[Path, Path]]) -> Row:
        try:
            row = check_wheel(platform, abi, *built.result())
        except (RuntimeError, OSError) as error:
            row = Row(f"{abi.tag}-{platform.tag}", error=f"not built: {error}")
        says(f"{row.wheel}: {row.error or 'done'}")
        return row

    # The checks of a wheel, four minutes in an emulator, keep one core busy: the next wheels are built on the other.
    checked: list[Future[Row]] = []
    with ThreadPoolExecutor(1) as builder, ThreadPoolExecutor(1) as checker:
        for platform in PLATFORMS:
            if platform.tag not in needed:
                continue
            try:
                objects = compile_objects(platform)
            except RuntimeError as error:
                rows += [Row(f"{abi.tag}-{platform.tag}", error=str(error)) for abi in ABIS]
                continue
            says(f"compiled the kernels for {platform.tag}")
            for abi in ABIS:
                checked.append(checker.submit(check, platform, abi, builder.submit(build, platform, abi, objects)))
    rows += [each.result() for each in checked]
    print_table(rows, folder)
    return sum(bool(row.error) for row in rows)


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
