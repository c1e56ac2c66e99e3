"""The small faults of ``tests/mutants`` apply to the package as it is, and each was killed by a test.

`make mutants` runs those that are new or whose text or tests have changed; this only reads what it wrote.
"""

from __future__ import annotations

import ast
import json

import pytest

from mutants import FAULTS
from mutants.fault import ROOT, Fault

RESULTS = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_applies_and_is_killed(fault: Fault) -> None:
    assert fault.occurrences() == 1, f"{fault.file} no longer has the text of {fault.name} once: rewrite the fault"
    assert fault.old != fault.new and fault.what
    if fault.file.endswith(".py"):
        ast.parse((ROOT / fault.file).read_text().replace(fault.old, fault.new))
    result = RESULTS.get(fault.name, {})
    assert result.get("digest") == fault.digest, f"{fault.name} is new or has changed: make mutants"
    assert result["killed_by"], f"no test fails with {fault.name}: {fault.what}"


def test_results_are_of_faults_that_exist() -> None:
    assert set(RESULTS) == set(FAULTS)
