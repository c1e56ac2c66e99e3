"""`make test FOR=masks`, `make quick` and `SLOW=2/4` choose the tests that they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import selection


def names_for(*modules: str) -> set[str]:
    return {path.name for path in selection.files_for(modules)}


def test_files_of_a_package_import_it_or_find_a_fault_in_it() -> None:
    of_package = names_for("masks")
    assert {"test_every_mask.py", "test_mask_functions.py"} <= of_package  # imports
    assert "test_neighbours.py" in of_package  # finds faults
    assert not {"test_files.py", "test_layers_flax.py"} & of_package
    assert names_for("masks.function") < of_package


def test_a_changed_module_and_a_changed_helper_choose_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        selection.SOURCE / "masks" / "function.py",
        selection.TESTS / "strategies.py",
        selection.ROOT / "README.md",
    ]
    monkeypatch.setattr(selection, "changed_files", lambda: files)
    assert names_for("changed") >= names_for("masks") | {"test_properties.py"}


def test_a_name_that_is_no_module_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="expected packages or modules of attnscore, got mask"):
        selection.files_for(["mask"])


@pytest.mark.parametrize(
    ("file", "is_quick"),
    [("jax", False), ("hf_models", False), ("cli", False), ("softmax", True), ("every_kernel", True)],
)
def test_a_quick_run_leaves_out_other_frameworks_and_what_surrounds_attention(file: str, is_quick: bool) -> None:
    assert selection.is_quick_file(selection.TESTS / f"test_{file}.py") == is_quick


@pytest.mark.parametrize(
    ("file", "name", "frameworks"),
    [
        ("jax_export", "test_it", {"numpy", "jax"}),
        ("every_framework", "test_it[torch]", {"numpy", "torch"}),
        ("every_framework", "test_it[tensorflow-eager]", {"numpy", "tensorflow"}),
        ("layers_flax", "test_it", {"numpy", "jax", "flax"}),
        ("transformers", "test_it", {"numpy", "transformers"}),
    ],
)
def test_tests_of_a_framework_import_or_name_it(
    file: str, name: str, frameworks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    item: Any = SimpleNamespace(name=name, path=selection.TESTS / f"test_{file}.py")
    monkeypatch.setattr(selection, "absent", lambda: ("mxnet",))
    assert {x for x in selection.FRAMEWORKS if selection.is_of_framework(item, x)} == frameworks
    monkeypatch.setattr(selection, "absent", lambda: selection.OTHERS)
    can_run = frameworks == {"numpy", "torch"} and not selection.importing(item.path)
    assert any(selection.is_of_framework(item, x) for x in selection.FRAMEWORKS) == can_run


def test_each_slow_test_is_in_one_part() -> None:
    items: list[Any] = [SimpleNamespace(nodeid=f"{Path(__file__).name}::test[{i}]") for i in range(200)]
    parts = [selection.part_of(item, 4) for item in items]
    assert set(parts) == {1, 2, 3, 4}


def test_of_a_long_table_a_quarter_runs_and_what_has_found_a_fault() -> None:
    class Item(SimpleNamespace):
        def get_closest_marker(self, name: str) -> bool:
            return name in self.marks

        def add_marker(self, mark: Any) -> None:
            self.marks.append(mark.name)

    results = json.loads((selection.TESTS / "mutants" / "results.json").read_text())
    killer = next(x["killed_by"] for x in results.values() if "test_every_kernel.py::test_against" in x["killed_by"])
    name = killer.partition("[")[0]
    long = [Item(nodeid=f"{name}[{i}]", marks=[]) for i in range(400)] + [Item(nodeid=killer, marks=[])]
    short: list[Any] = [Item(nodeid=f"one[{i}]", marks=[]) for i in range(selection.LONG)]
    selection.mark_slow_rows([*long, *short])
    assert 70 < sum(not item.marks for item in long) < 130 and not long[-1].marks
    assert not any(item.marks for item in short)
