"""The rows that stand for products: every pair of values of any two factors meets in one, each time the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import covering


@pytest.mark.parametrize("sizes", [(1,), (3,), (4, 3), (2, 7, 1), (3, 3, 3, 3), (12, 5, 4, 10, 3, 2)], ids=str)
def test_every_pair_of_values_meets(sizes: tuple[int, ...]) -> None:
    rows = covering.covering_array(*sizes)
    assert len(set(rows)) == len(rows)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(itertools.product(range(sizes[first]), range(sizes[second])))
    assert {row[0] for row in rows} == set(range(sizes[0]))


def test_few_rows() -> None:
    """Hardly more than the product of the two largest factors, which no covering array goes below."""
    assert len(covering.covering_array(12, 5, 4, 10, 3, 2)) == 120
    assert len(covering.covering_array(3, 3, 3, 3)) <= 12


def made(mark: pytest.MarkDecorator) -> tuple[list[Any], list[Any], list[bool]]:
    """The values, names and slowness of the rows."""
    rows = mark.mark.args[1]
    return [row.values for row in rows], [row.id for row in rows], [bool(row.marks) for row in rows]


FACTORS = {"a": "xyz", "b": {"one": 1, "two": 2}, "c": (True, False)}


def test_the_option_gives_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    values, names, slow = made(covering.pairs(**FACTORS))
    assert len(values) == 6 and names[0].startswith("x-one-") and not any(slow)
    monkeypatch.setattr(covering, "products", True)
    values, names, slow = made(covering.pairs(**FACTORS))
    assert len(values) == 12 and names[-1] == "z-two-False" and values[-1] == ("z", 2, False) and not any(slow)


def test_each_value_stands_in_a_row_that_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    values, names, slow = made(covering.each(**FACTORS))
    assert names == made(covering.pairs(**FACTORS))[1] and sum(slow) == 3
    quick = [row for row, is_slow in zip(values, slow, strict=True) if not is_slow]
    assert [set(column) for column in zip(*quick, strict=True)] == [set("xyz"), {1, 2}, {True, False}]
    monkeypatch.setattr(covering, "products", True)
    assert len(made(covering.each(**FACTORS))[0]) == 12


def test_some_rows_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        return made(covering.some("a", [3, 1], range(4), slow=[2]))

    assert rows() == ([(3,), (1,), (2,)], ["3", "1", "2"], [False, False, True])
    monkeypatch.setattr(covering, "products", True)
    assert rows() == ([(0,), (1,), (2,), (3,)], ["0", "1", "2", "3"], [False, False, True, False])
