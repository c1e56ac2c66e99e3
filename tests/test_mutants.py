"""The small faults of ``tests/mutants`` apply to the package as it is, and each was killed by a test.

`make mutants` runs those that are new or that have changed; this only reads what it wrote.
"""

from __future__ import annotations

import ast
import json

import pytest

from mutants import FAULTS
from mutants.fault import ROOT, Fault

RESULTS = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())
DOUBLE = "def double(x):\n    é, total = 'é', x + x; return total\n"


def fault_of(old: str, new: str, function: str, file: str = "src/module.py") -> Fault:
    return Fault("fault", file, function, old, new, "tests/test_mutants.py", "a fault")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_applies_and_is_killed(fault: Fault) -> None:
    mutated = fault.mutated((ROOT / fault.file).read_text(encoding="utf-8"))
    assert fault.old != fault.new and fault.what
    if not fault.is_native:
        ast.parse(mutated)
    result = RESULTS.get(fault.name, {})
    assert result.get("digest") == fault.digest, f"{fault.name} is new or has changed: make mutants"
    assert result["killed_by"], f"no test fails with {fault.name}: {fault.what}"


def test_results_are_of_faults_that_exist() -> None:
    assert set(RESULTS) == set(FAULTS)


@pytest.mark.parametrize("name", ["total", "numbers"])
def test_a_renamed_variable_still_matches(name: str) -> None:
    mutated = fault_of("A + A", "A - 2 * A", "double").mutated(DOUBLE.replace("x", name))
    assert f"'é', ({name} - 2 * {name}); return total" in mutated


def test_a_statement_is_replaced_in_a_method_of_any_depth() -> None:
    text = "class C:\n    def f(self, a, b):\n        def g():\n            a.append(b)\n            a.append(a)\n"
    assert fault_of("A.append(A)", "pass", "C.f").mutated(text) == text.replace("a.append(a)", "pass")


def test_equal_letters_are_equal_expressions() -> None:
    with pytest.raises(LookupError, match="none"):
        fault_of("A + A", "A", "double").mutated(DOUBLE.replace("x + x", "x + y"))


def test_two_matches_name_both_lines() -> None:
    text = "def f(a, b):\n    if a + b:\n        return a + b\n"
    with pytest.raises(LookupError, match=r"'A \+ B' once in f of .*lines: 2, 3"):
        fault_of("A + B", "A", "f").mutated(text)


def test_no_match_names_the_function() -> None:
    with pytest.raises(LookupError, match=r"in Class\.method of src/module\.py, got it in lines: none"):
        fault_of("A + A", "A", "Class.method").mutated(DOUBLE)


CPP = """
int sum(int a);
template <class T>
struct Sums {
    int sum(int first, int (*f)(int)) const { return rows[first].count  *L + f(first); }
};
template <class T>
int Sums<T>::sum(int a) { return sum(a) * L + a; }
"""


@pytest.mark.parametrize("function", ["Sums::sum", "Sums"])
def test_a_method_of_cpp_and_a_letter_for_a_member(function: str) -> None:
    fault = fault_of("A.count * L + f(B)", "A.count * f(B)", function, "csrc/sums.h")
    for text in (CPP, CPP.replace("first", "row")):
        row = "row" if "row)" in text else "first"
        switched = (
            f"(attnscore::fault_in_use() == 3 ? (rows[{row}].count * f({row})) : (rows[{row}].count  *L + f({row})))"
        )
        assert fault.mutated(text, 3) == text.replace(f"rows[{row}].count  *L + f({row})", switched)


def test_a_method_outside_of_its_class() -> None:
    assert "return a;" in fault_of("A * L + B", "B", "Sums<T>::sum", "csrc/sums.h").mutated(CPP)
    with pytest.raises(LookupError, match="lines: 5, 8"):
        fault_of("A * L + B", "B", "", "csrc/sums.h").mutated(CPP)
