"""Call attnscore in a process of its own, in which a framework does not have some private names when it is imported.

The names are back when attnscore is loaded: the framework itself would use them under names of another release.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

_CODE = """
import importlib, pkgutil, sys
framework, *names = sys.argv[1:]
importlib.import_module(framework)
owners = [(pkgutil.resolve_name(path), name) for path, _, name in (name.rpartition(".") for name in names)]
removed = [(owner, name, getattr(owner, name)) for owner, name in owners]
for owner, name, _ in removed:
    delattr(owner, name)
from attnscore import backends
backends.load(framework)
for owner, name, value in removed:
    setattr(owner, name, value)
{calls}
sys.argv = ["attnscore", "info"]
from attnscore.cli import main
main()
"""


def run_without(framework: str, names: Sequence[str], calls: str) -> None:
    """Run `calls` without names of the framework, and compare the names that ``attnscore info`` lists."""
    command = [sys.executable, "-W", "ignore", "-c", _CODE.replace("{calls}", calls), framework, *names]
    environment = {**os.environ, "COLUMNS": "300", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("Not in these releases")[2].partition("Optional packages")[0].splitlines()
    width = next(line.index("therefore") for line in lines if "therefore" in line)
    listed = "".join(line[:width].strip() for line in lines)  # a long name is broken
    for name in sorted(names, key=len, reverse=True):
        assert name in listed
        listed = listed.replace(name, "", 1)
    assert f"{framework}." not in listed


def replace_names(source: str, names: Sequence[str]) -> str:
    """The text of a module of private names with names that no release has."""
    for name in names:
        source = source.replace(f'"{name}"', f'"{name}_of_another_release"')
    return source


def take_away(private: types.ModuleType, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a module of private names what it has with a release of the framework without some of them."""
    path = Path(str(private.__file__))
    module = types.ModuleType(path.stem)
    exec(compile(replace_names(path.read_text(encoding="utf-8"), names), path, "exec"), vars(module))
    for name, value in vars(module).items():
        if not name.startswith("__"):
            monkeypatch.setattr(private, name, value)
    assert set(module.FALLBACKS) == {f"{name}_of_another_release" for name in names}
    assert all(module.FALLBACKS.values())
