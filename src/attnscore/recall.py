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


class Memory(Generic[Answer]):
    """The answers to one question, by key; the oldest makes room."""

    def __init__(self, room: int = 512) -> None:
        self._room = room
        self._answers: dict[Hashable, Answer] = {}

    def known(self, key: Hashable) -> Answer | None:
        """The answer for `key`, if there is one."""
        try:
            return self._answers.get(key)
        except _NO_HASH:
            return None

    def recall(self, key: Hashable, work: Callable[[], Answer]) -> Answer:
        """``work()``, or what it gave for an equal key before. A key of None is never remembered."""
        try:
            return self._answers[key]
        except KeyError:
            pass
        except _NO_HASH:
            return work()
        answer = work()
        if key is not None:
            if len(self._answers) >= self._room:
                self._answers.pop(next(iter(self._answers)), None)
            self._answers[key] = answer
        return answer
