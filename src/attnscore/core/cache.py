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
    """Results of one computation by key; a full cache drops the oldest."""

    def __init__(self, maxsize: int = 512) -> None:
        self._maxsize = maxsize
        self._entries: dict[Hashable, Result] = {}

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
                # Another thread may insert or evict meanwhile; then this one leaves an entry too many.
                with contextlib.suppress(RuntimeError, StopIteration):
                    self._entries.pop(next(iter(self._entries)), None)
            self._entries[key] = result
        return result
