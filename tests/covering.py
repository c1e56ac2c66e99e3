"""Rows of tables in which every pair of values of any two factors meets: a covering array in place of a product.

Most faults show with one value of one factor, nearly all others with one value each of two factors; a product of six
tables runs each of those thousands of times. ``pytest --products`` runs the products (`make test-all`).

- `pairs`: each pair of values of two factors.
- `each`: each value of each factor, where other tests have their pairs or a row takes long; its pairs are slow tests.
- `some`: rows chosen by hand, and slow ones beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest

products = False
"""Whether `pairs` gives the whole product; set by the option ``--products``."""


@lru_cache(maxsize=64)
def covering_array(*sizes: int) -> tuple[tuple[int, ...], ...]:
    """Return rows of indices such that any two values of any two factors stand in one of them.

    In parameter order: the product of the two largest factors, then one factor after the other. Each row takes the
    value that has met the fewest of its other values; pairs that are left over get rows of their own. The same sizes
    give the same rows.
    """
    order = sorted(range(len(sizes)), key=lambda factor: -sizes[factor])
    rows: list[dict[int, int]] = [
        dict(zip(order, values, strict=False)) for values in itertools.product(*(range(sizes[f]) for f in order[:2]))
    ]
    for position, factor in enumerate(order[2:], 2):
        size, earlier = sizes[factor], order[:position]
        met = {(other, value): [0] * size for other in earlier for value in range(sizes[other])}
        used = [0] * size

        for number, row in enumerate(rows):
            counts = [met[other, row[other]] for other in earlier]
            value = _fewest_met(number, counts, used)
            row[factor] = value
            used[value] += 1
            for count in counts:
                count[value] += 1
        more: list[dict[int, int]] = []
        for (other, one), count in met.items():
            for value in (v for v in range(size) if not count[v]):
                free = next((row for row in more if row[factor] == value and other not in row), None)
                if free is None:
                    free = {factor: value}
                    more.append(free)
                free[other] = one
        for number, row in enumerate(more):
            for other in earlier:
                row.setdefault(other, number % sizes[other])
        rows += more
    return tuple(dict.fromkeys(tuple(row[factor] for factor in range(len(sizes))) for row in rows))


def _fewest_met(number: int, counts: list[list[int]], used: list[int]) -> int:
    """Return the value that has met the fewest of a row's others; row after row begins to look one value later."""

    def met(value: int) -> tuple[int, ...]:
        times = [count[value] for count in counts]
        return sum(n > 0 for n in times), sum(times), used[value], (value - number) % len(used)

    return min(range(len(used)), key=met)


def named(values: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return values by their names: a mapping's keys, their `name`, or themselves as text."""
    if isinstance(values, Mapping):
        return dict(values)
    return {str(getattr(value, "name", value)): value for value in values}


def pairs(indirect: Sequence[str] = (), **factors: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a covering array of the factors, or with ``--products`` by their product.

    Factors are named like the arguments of the test, or like fixtures (`indirect`); a row's name has the names of
    its values in that order.
    """
    tables = [named(values) for values in factors.values()]
    rows = sorted(covering_array(*map(len, tables)))
    return _parametrized(tables, factors, rows, set(), indirect)


def each(indirect: Sequence[str] = (), **factors: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by those rows of `pairs` that have each value of each factor; the others are slow."""
    tables = [named(values) for values in factors.values()]
    rows = sorted(covering_array(*map(len, tables)))
    return _parametrized(tables, factors, rows, set(rows).difference(_one_of_each(rows)), indirect)


def _one_of_each(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows that have every value of every factor: row after row the one with the most values that are missing."""
    missing = {(factor, value) for row in rows for factor, value in enumerate(row)}
    found = []
    while missing:
        found.append(max(rows, key=lambda row: len(missing.intersection(enumerate(row)))))
        missing -= set(enumerate(found[-1]))
    return found


def _parametrized(
    tables: list[dict[str, Any]],
    factors: Iterable[str],
    rows: Iterable[tuple[int, ...]],
    slow: Container[tuple[int, ...]],
    indirect: Sequence[str],
) -> pytest.MarkDecorator:
    """Parametrize by rows of indices, or with ``--products`` by all."""
    if products:
        rows = itertools.product(*(range(len(table)) for table in tables))
    params = []
    for row in rows:
        cells = [list(table.items())[i] for table, i in zip(tables, row, strict=True)]
        marks = [pytest.mark.slow] if row in slow else []
        label = "-".join(filter(None, (name for name, _ in cells)))
        params.append(pytest.param(*(value for _, value in cells), id=label, marks=marks))
    return pytest.mark.parametrize(",".join(factors), params, indirect=indirect)


def some(
    names: str,
    rows: Iterable[Any],
    product: Iterable[Any],
    indirect: Sequence[str] = (),
    *,
    slow: Iterable[Any] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test by rows chosen by hand and `slow` ones, or with ``--products`` by all of a table.

    For rows that take seconds each, where even a covering array is long.
    """
    chosen, beside, whole = list(rows), list(slow), list(product)
    assert all(row in whole for row in chosen + beside), "a row that is not one of the product"
    several = "," in names
    params = []
    for row in whole if products else chosen + beside:
        cells = row if several else [row]
        label = "-".join(filter(None, (getattr(x, "__name__", str(x)) for x in cells)))
        params.append(pytest.param(*cells, id=label, marks=[pytest.mark.slow] if row in beside else []))
    return pytest.mark.parametrize(names, params, indirect=indirect)
