"""Bounded cache of results that depend on shapes, dtypes and numbers alone: most of the time of a tiny call.

- A key holds everything that the computation reads, types included (``True == 1 == 1.0``).
- A computation that raises is not cached, and raises again at the next call.
- No array of a caller is held.
- There is no lock, which a fork could copy while it is taken: each step is one operation of a dictionary, atomic with
  and without the interpreter's lock. Threads that miss at the same time may compute a result twice or drop two entries.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")
_WEIGHT = operator.attrgetter("weight")
# Errors of hash(): TypeError for arrays and symbolic sizes, NotImplementedError for MXNet's arrays.
_UNHASHABLE = (TypeError, NotImplementedError)


@dataclass(eq=False, slots=True)
class _Entry(Generic[Result]):
    value: Result
    weight: float
    used: int
    """Insertions into the cache up to the last use of this entry."""


class BoundedCache(Generic[Result]):
    """Results of one computation by key; a full cache drops the least recently used.

    It is full with `maxsize` entries, or where their weights add up to `max_weight`. An entry that weighs more than the
    whole cache is not cached. Age is counted in insertions, so that `get` writes nothing at a hit after a hit.
    """

    def __init__(self, maxsize: int = 512, max_weight: float = math.inf) -> None:
        self._maxsize, self._max_weight = maxsize, max_weight
        self._entries: dict[Hashable, _Entry[Result]] = {}
        self._inserted = 0
        # The sum over all entries, from which threads that insert at the same time may lose one, until the next count.
        self._weight: float = 0

    def get(self, key: Hashable) -> Result | None:
        """Return the result for `key`, or None."""
        try:
            entry = self._entries.get(key)
        except _UNHASHABLE:
            return None
        if entry is None:
            return None
        if entry.used != self._inserted:
            entry.used = self._inserted
        return entry.value

    def get_or_compute(self, key: Hashable, compute: Callable[[], Result], weight: float = 0) -> Result:
        """Return the cached result for `key`, or ``compute()``.

        The result is cached unless the key is None or cannot be hashed, or its weight exceeds the maximum.
        """
        try:
            entry = self._entries.get(key)
        except _UNHASHABLE:
            return compute()
        if entry is not None:
            entry.used = self._inserted
            return entry.value
        return self.put(key, compute(), weight)

    def put(self, key: Hashable, result: Result, weight: float = 0) -> Result:
        """Cache the result for `key`, as `get_or_compute` does; return it, or the result that another thread cached."""
        if key is None or weight > self._max_weight:
            return result
        try:
            entry = self._entries.setdefault(key, _Entry(result, weight, self._inserted))
        except _UNHASHABLE:
            return result
        # Now, so that a hit that follows is younger than the insertion.
        self._inserted += 1
        self._weight += weight
        if len(self._entries) > self._maxsize or self._weight > self._max_weight:
            self._make_room(key)
        return entry.value

    def values(self) -> list[Result]:
        """Return all cached results."""
        return [entry.value for entry in self._entries.copy().values()]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._weight = 0

    def _make_room(self, newest: Hashable) -> None:
        """Drop the least recently used entries until all weights fit, and, so that this is rare, an eighth is free."""
        entries = self._entries.copy()
        count, weight = len(entries), sum(map(_WEIGHT, entries.values()))
        entries.pop(newest, None)
        limit = self._maxsize - self._maxsize // 8
        for key, entry in sorted(entries.items(), key=lambda item: item[1].used):
            if count <= limit and weight <= self._max_weight:
                break
            self._entries.pop(key, None)
            count, weight = count - 1, weight - entry.weight
        self._weight = weight
