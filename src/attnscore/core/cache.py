"""What depends on shapes, dtypes and numbers alone is worked out once: for a tiny call that is most of the work.

- A key holds everything that the work reads, types included (``True == 1 == 1.0``), so a hit gives what the work would.
- What raises is not remembered: the checked path stays the only one, and it runs anew.
- Nothing of a caller's arrays is held, and a memory has room for so many answers and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
# What a thing without a hash raises: an array, a symbolic size; MXNet's arrays the other.
_NO_HASH = (TypeError, NotImplementedError)


class BoundedCache(Generic[Answer]):
    """The answers to one question, by key; the oldest makes room."""

    def __init__(self, maxsize: int = 512) -> None:
        self._maxsize = maxsize
        self._entries: dict[Hashable, Answer] = {}

    def get(self, key: Hashable) -> Answer | None:
        """The answer for `key`, if there is one."""
        try:
            return self._entries.get(key)
        except _NO_HASH:
            return None

    def get_or_compute(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        """``compute()``, or what it gave for an equal key before. A key of None is never remembered."""
        try:
            return self._entries[key]
        except KeyError:
            pass
        except _NO_HASH:
            return compute()
        answer = compute()
        if key is not None:
            if len(self._entries) >= self._maxsize:
                self._entries.pop(next(iter(self._entries)), None)
            self._entries[key] = answer
        return answer
