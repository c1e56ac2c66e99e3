"""Bounded cache of what depends on shapes, dtypes and numbers alone: most of the time of a tiny call.

- A key holds everything that the computation reads, types included (``True == 1 == 1.0``).
- A computation that raises is not cached, and raises again at the next call.
- No array of a caller is held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")
# What hash() raises: TypeError for arrays and symbolic sizes, NotImplementedError for MXNet's arrays.
_UNHASHABLE = (TypeError, NotImplementedError)


class BoundedCache(Generic[Result]):
    """Results of one computation by key; a full cache drops the oldest.

    It is full with `maxsize` entries, or where the weights that `weigh` was given add up to more than `most`.
    """

    def __init__(self, maxsize: int = 512, most: int | None = None) -> None:
        self._maxsize, self._most = maxsize, most
        self._entries: dict[Hashable, Result] = {}
        self._weights: dict[Hashable, int] = {}

    def get(self, key: Hashable) -> Result | None:
        """Return the result for `key`, or None."""
        try:
            return self._entries.get(key)
        except _UNHASHABLE:
            return None

    def get_or_compute(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the cached result for `key`, or ``compute()``, which is cached unless the key is None."""
        try:
            return self._entries[key]
        except KeyError:
            pass
        except _UNHASHABLE:
            return compute()
        result = compute()
        if key is not None:
            if len(self._entries) >= self._maxsize:
                self._drop_oldest()
            self._entries[key] = result
        return result

    def weigh(self, key: Hashable, weight: int) -> None:
        """Add to the weight of an entry; the oldest go until all that are left weigh at most `most`."""
        if self._most is None or self.get(key) is None:
            return
        self._weights[key] = self._weights.get(key, 0) + weight
        while sum(tuple(self._weights.values())) > self._most and self._entries:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        # Another thread may insert or evict meanwhile; then this one leaves an entry too many.
        with contextlib.suppress(RuntimeError, StopIteration):
            oldest = next(iter(self._entries))
            self._entries.pop(oldest, None)
            self._weights.pop(oldest, None)
