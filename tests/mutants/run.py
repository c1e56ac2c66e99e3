"""Run the mutants: ``python tests/mutants/run.py [NAME ...] [--again]``.

- A copy of the package gets one fault at a time; the working tree is not touched.
- Faults of C++ are compiled once, all of them into one module, and switched on one at a time by ATTNSCORE_FAULT.
- Results are written after each fault; what has one already is not run again (`--again`: all of those named,
  as after a change of the code around them).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants import FAULTS  # from the folder of tests, as pytest does
from mutants.fault import ROOT, Fault

RESULTS = Path(__file__).with_name("results.json")
BUILD = ROOT / "build" / "mutants"
# Every Python process that a test starts (ranks, devices of JAX, examples) runs this when it starts: without the finder
# of the editable installation, which would come before the copy of the package on PYTHONPATH.
SITE = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "ScikitBuild" not in type(x).__name__]
"""
PYTEST = """
import sys
import attnscore, pytest
assert attnscore.__file__.startswith(sys.argv.pop(1)), attnscore.__file__
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""
SWITCH = """#pragma once
#include <cstdlib>
namespace attnscore {
inline int fault_in_use() {
    static const int number = [] { const char* x = std::getenv("ATTNSCORE_FAULT"); return x ? std::atoi(x) : -1; }();
    return number;
}
}  // namespace attnscore
"""


def numbers() -> dict[str, int]:
    """The number of each fault of C++."""
    return {name: i for i, name in enumerate(name for name, fault in FAULTS.items() if fault.is_native)}


def native_module() -> Path:
    """The module with all faults of C++ in it, built anew where any of its files has changed."""
    source = BUILD / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", source / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", source / "CMakeLists.txt")
    (source / "csrc" / "fault.h").write_text(SWITCH)
    for fault in FAULTS.values():
        if fault.is_native:
            path = source / fault.file
            path.write_text(fault.mutated(path.read_text(), numbers()[fault.name]))
    for path in [p for p in source.glob("csrc/**/*") if p.suffix in {".h", ".cc", ".cpp"}]:
        if not path.name.endswith("-inl.h") and path.name != "fault.h":
            path.write_text(re.sub(r"^#include", '#include "fault.h"\n#include', path.read_text(), count=1, flags=re.M))
    texts = b"".join(p.read_bytes() for p in sorted(source.glob("csrc/**/*")) if p.is_file())
    stamp, found = BUILD / "stamp", list((BUILD / "cmake").glob("_native*.so"))
    if found and stamp.exists() and stamp.read_bytes() == texts:
        return found[0]
    tools = Path(sys.executable).parent
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        "-DATTNSCORE_REQUIRED=ON",
    ]
    subprocess.run(
        [tools / "cmake", "-S", source, "-B", BUILD / "cmake", "-G", "Ninja", "--log-level=WARNING", *options],
        check=True,
    )
    subprocess.run([tools / "cmake", "--build", BUILD / "cmake", "--", "--quiet"], check=True)
    stamp.write_bytes(texts)
    return next(iter((BUILD / "cmake").glob("_native*.so")))


def installed_module() -> Path | None:
    """The native module of the environment, where there is one."""
    code = "import attnscore._native as n; print(n.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def killed_by(fault: Fault, module: Path | None) -> str | None:
    """The first test that fails with the fault; None where all pass."""
    if fault.is_native:
        return first_failure(fault.tests, module, {}, {"ATTNSCORE_FAULT": str(numbers()[fault.name])})
    return first_failure(fault.tests, module, {fault.file: fault.mutated((ROOT / fault.file).read_text())}, {})


def first_failure(
    tests: str,
    module: Path | None,
    texts: Mapping[str, str],
    variables: Mapping[str, str],
    seconds: float | None = None,
) -> str | None:
    """The first test that fails where some files of the package have other texts, in so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        if module is not None:
            shutil.copy(module, src / "attnscore" / module.name)
        (src / "sitecustomize.py").write_text(SITE)
        for file, text in texts.items():
            (Path(folder) / file).write_text(text)
        paths = filter(None, (str(src), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", PYTEST, str(src), *shlex.split(tests)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.M)
    if failed:
        return failed.group(1)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    raise RuntimeError(f"{tests}: the tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def known() -> dict[str, Any]:
    """The results so far."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the results in the file; other runs may write at the same time, of faults that are newer than this one."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        RESULTS.write_text(json.dumps(change(known()), indent=1, sort_keys=True) + "\n")


def run(names: Iterable[str], again: bool) -> int:
    """Run those faults; how many no test has killed."""
    results = known()
    wanted = [FAULTS[name] for name in names]
    # What survived runs again: a test may have come since.
    done = {
        name for name, x in results.items() if x["killed_by"] and name in FAULTS and x["digest"] == FAULTS[name].digest
    }
    open_ones = [f for f in wanted if again or f.name not in done]
    module = installed_module()
    faulty = native_module() if any(f.is_native for f in open_ones) else None
    for fault in open_ones:
        start = time.monotonic()
        by = killed_by(fault, faulty if fault.is_native else module)
        print(f"{fault.name}: {by or 'SURVIVED'} ({time.monotonic() - start:.0f} s)", flush=True)
        results[fault.name] = {"digest": fault.digest, "killed_by": by}
        write(lambda found, name=fault.name: found | {name: results[name]})
    alive = [f.name for f in wanted if results[f.name]["killed_by"] is None]
    print(f"{len(wanted) - len(alive)} of {len(wanted)} killed" + (f"; alive: {', '.join(alive)}" if alive else ""))
    return len(alive)


if __name__ == "__main__":
    arguments = [x for x in sys.argv[1:] if x != "--again"]
    unknown = [x for x in arguments if x not in FAULTS]
    if unknown:
        raise SystemExit(f"expected names of faults, got {', '.join(unknown)}")
    alive = run(arguments or list(FAULTS), "--again" in sys.argv)
    if not arguments:
        write(lambda found: {name: found[name] for name in found if name in FAULTS})
    sys.exit(alive != 0)
