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


def test_the_option_gives_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> tuple[Any, Any]:
        mark = covering.pairs(a="xyz", b={"one": 1, "two": 2}, c=(True, False)).mark
        return mark.args[1], mark.kwargs["ids"]

    values, names = rows()
    assert len(values) == 6 and names[0].startswith("x-one-")
    monkeypatch.setattr(covering, "products", True)
    values, names = rows()
    assert len(values) == 12 and names[-1] == "z-two-False" and values[-1] == ["z", 2, False]
