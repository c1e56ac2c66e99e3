"""The tutorials run as they are, print what they show, and can be read where they are not run."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from printed_output import WordsAndNumbers
from test_mxnet import VARIABLES as MXNET_VARIABLES
from test_readme import CAN_HAVE_MXNET, ROOT, check_extras

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 200_000  # bytes, pictures included


def label(path: Path) -> str:
    return path.stem


def run(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run a notebook as the documentation says, into the folder `out`."""
    environment = MXNET_VARIABLES if path.stem.endswith("mxnet") else None
    line = [sys.executable, str(FOLDER / "run.py"), "--out", str(out), str(path)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=600, env=environment)


def printed(notebook: Any) -> dict[str, str]:
    """What each cell printed, by the cell's name."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: "".join(out.text for out in cell.outputs if out.output_type == "stream") for cell in cells}


def pictures(notebook: Any) -> list[str]:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]


@pytest.fixture(params=TUTORIALS, ids=label)
def tutorial(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_the_chapter_is_there_for_every_framework() -> None:
    names = {path.stem for path in TUTORIALS}
    frameworks = ("pytorch", "tensorflow", "jax", "mxnet")
    assert names >= {f"attention-scoring-functions-{name}" for name in frameworks} | {"why-scale", "failing-model"}


def test_they_open_in_any_jupyter_and_are_small(tutorial: Path) -> None:
    notebook = nbformat.read(tutorial, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert tutorial.stat().st_size < LARGEST


def test_they_show_results_where_they_are_not_run(tutorial: Path) -> None:
    notebook = nbformat.read(tutorial, as_version=4)
    assert pictures(notebook) and any(printed(notebook).values())
    assert not [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.get("name") == "stderr"]


def test_they_name_what_exists(tutorial: Path) -> None:
    """Names of the package, pages of the documentation, other tutorials."""
    import attnscore

    text = "\n".join(cell.source for cell in nbformat.read(tutorial, as_version=4).cells)
    assert not [name for name in re.findall(r"\bats\.([A-Za-z_]\w*)", text) if not hasattr(attnscore, name)]
    named = re.findall(r"`(docs/[\w/.-]+)`", text)
    linked = [f"docs/tutorials/{name}" for name in re.findall(r"\]\(([\w.-]+)\)", text)]
    assert named and not [path for path in (*named, *linked) if not (ROOT / path).exists()]


def test_their_first_cell_installs_the_package_where_it_is_missing(tutorial: Path) -> None:
    first, second, *_ = nbformat.read(tutorial, as_version=4).cells
    assert "installs attnscore where it is missing" in first.source
    assert ("colab.research.google.com" in first.source) == (not tutorial.stem.endswith("mxnet"))
    condition, command = second.source.splitlines()[-2:]
    assert condition == 'if find_spec("attnscore") is None:'
    folder, extras = re.fullmatch(r'    %pip install -q "([./]+)\[([\w,-]+)\]"(?: optax)?', command).groups()  # type: ignore[union-attr]
    assert (tutorial.parent / folder).resolve() == ROOT
    check_extras([f"[{extras}]"])


def test_the_index_lists_each() -> None:
    text = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert not [path.name for path in TUTORIALS if f"({path.name})" not in text]


@pytest.mark.slow
def test_they_run_and_print_what_they_show(tutorial: Path, tmp_path: Path) -> None:
    if tutorial.stem.endswith("mxnet") and not CAN_HAVE_MXNET:
        pytest.skip("MXNet needs NumPy below 1.24, which is not built for this Python")
    done = run(tutorial, tmp_path)
    assert done.returncode == 0, done.stderr
    shown, ran = (nbformat.read(path, as_version=4) for path in (tutorial, tmp_path / tutorial.name))
    flags = doctest.NORMALIZE_WHITESPACE
    for cell, now in printed(ran).items():
        before = printed(shown)[cell]
        assert WordsAndNumbers().check_output(before, now, flags), f"{cell} shows\n{before}\nbut printed\n{now}"
    assert len(pictures(ran)) == len(pictures(shown))


@pytest.mark.slow
def test_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), broken)
    done = run(broken, tmp_path / "out")
    assert done.returncode != 0 and "ZeroDivisionError" in done.stderr
