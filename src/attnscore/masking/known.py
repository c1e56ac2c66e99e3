"""Masks that come again: the layers of a model share one, and a loop makes the same one anew at each call.

- A mask of few numbers that the host can see is checked once for a grid, and its intervals are worked out once (20 to
  60 us, against 25 for a tiny attention).
- What is remembered is a copy: nothing of the caller's is held, and lengths changed in place are new lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore import frameworks
from attnscore.frameworks.contract import Array, Framework, is_unknown
from attnscore.grid import Grid
from attnscore.masking.contract import And, Intervals, Mask
from attnscore.masking.masks import (
    Causal,
    Documents,
    KeyPadding,
    KeyRange,
    PrefixLM,
    SlidingWindow,
    ValidLens,
)
from attnscore.masking.numbers import per_row
from attnscore.recall import Memory

# Rows and numbers of a mask that is remembered: at most 16 MB in all.
MOST_ROWS = 4096
MOST_NUMBERS = 1024
# Their intervals depend on their fields alone; a user's own mask may depend on anything.
_FIELDS: dict[type[Mask], tuple[str, ...]] = {
    Causal: ("align", "offset"),
    SlidingWindow: ("left", "right", "align", "offset"),
    ValidLens: ("lens", "query_lens"),
    KeyRange: ("start", "stop"),
    KeyPadding: ("array",),
    PrefixLM: ("prefix_lens",),
    Documents: ("query_ids", "key_ids"),
    And: ("first", "second"),
}


@final
@dataclass(frozen=True, eq=False, repr=False)
class Known(Mask):
    """A mask by its intervals, (batch or 1, query) each."""

    start: Any
    stop: Any
    text: str
    """What the mask was called by its caller."""

    def visible(self, ops: Framework, grid: Grid, rows: Array, cols: Array) -> Array:
        start, stop = (per_row(ops, grid, end, rows) for end in (self.start, self.stop))
        return ops.logical_and(cols >= start, cols < stop)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return self.start, self.stop

    def check(self, ops: Framework, grid: Grid) -> None:
        """It was, before it became known."""

    def arrays(self) -> dict[str, Array]:
        return {}

    def __repr__(self) -> str:
        return self.text


_KNOWN: Memory[Known | None] = Memory(256)


def recognised(mask: Mask, grid: Grid, check: Callable[[Mask], None]) -> Mask:
    """`mask`, checked: the known one that equals it where it is one interval a row, otherwise itself."""

    def learn() -> Known | None:
        check(mask)
        found = mask.intervals(grid.query_len, grid.key_len, grid.batch)
        return None if found is None else Known(np.array(found[0]), np.array(found[1]), repr(mask))

    unknown = any(map(is_unknown, (grid.batch, grid.query_len, grid.key_len)))
    if unknown or grid.batch * grid.query_len > MOST_ROWS or (numbers := _numbers(mask)) is None:
        check(mask)
        return mask
    found = _KNOWN.recall((grid, numbers), learn)
    return mask if found is None else found


def _numbers(mask: Mask) -> Hashable:
    """A mask's class and all its numbers; None when they are many, or the host cannot see them."""
    kind = type(mask)
    parts: list[Hashable] = [kind]
    for name in _FIELDS.get(kind, ()):
        x = getattr(mask, name)
        part = _numbers(x) if isinstance(x, Mask) else _value(x)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts) if kind in _FIELDS else None


def _value(x: Any) -> Hashable:
    """A field as something with equality; types are told apart, as the checks do."""
    if x is None or isinstance(x, (str, int)):
        return type(x), x
    try:
        values = frameworks.host(x)
    except (TypeError, RuntimeError):
        # Sparse or nested: the check says so.
        return None
    if values is None or values.dtype.kind not in "biuf" or values.size > MOST_NUMBERS:
        return None
    return type(x), values.dtype.str, values.shape, values.tobytes()
