"""Masks that come again: the layers of a model share one, and a loop makes the same one anew at each call.

- A mask of few numbers that the host can see is checked once for a grid, and its intervals are worked out once (20 to
  60 us, against 25 for a tiny attention).
- What is remembered is a copy: nothing of the caller's is held, and lengths changed in place are new lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, is_unknown
from attnscore.core.cache import BoundedCache
from attnscore.core.layout import ScoreShape
from attnscore.masks.base import And, Mask, Not, Or, split
from attnscore.masks.builtin import Causal, Documents, KeyPadding, KeyRange, PrefixLM, SlidingWindow, ValidLens
from attnscore.masks.function import MaskFunction
from attnscore.masks.index_values import per_row
from attnscore.masks.intervals import Intervals, IntervalSet

# Rows and numbers of a mask that is remembered: at most 16 MB in all.
MAX_ROWS = 4096
MAX_NUMBERS = 1024
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
    Or: ("first", "second"),
    Not: ("mask",),
}


@final
@dataclass(frozen=True, eq=False, repr=False)
class CachedMask(Mask):
    """A mask by its intervals, (batch or 1, query) each, or by its pieces, (piece, batch or 1, query)."""

    start: Any
    stop: Any
    text: str
    """What the mask was called by its caller."""

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        seen = None
        for ends in zip(self._pieces.start, self._pieces.stop, strict=True):
            start, stop = (per_row(ops, score_shape, end, rows) for end in ends)
            here = ops.logical_and(cols >= start, cols < stop)
            seen = here if seen is None else ops.logical_or(seen, here)
        return seen

    @cached_property
    def _pieces(self) -> IntervalSet:
        return IntervalSet(self.start, self.stop) if self.start.ndim == 3 else IntervalSet.of((self.start, self.stop))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        return self._pieces.single

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        return self._pieces

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        """It was, before it became known."""

    def arrays(self) -> dict[str, Array]:
        return {}

    def leaves(self) -> list[Array]:
        # A program that is being traced gets them as constants: traced they would be known no longer.
        return []

    def with_leaves(self, leaves: Iterator[Array]) -> Mask:
        return self

    def __repr__(self) -> str:
        return self.text


_KNOWN: BoundedCache[CachedMask | None] = BoundedCache(256)


def cached_mask(mask: Mask, score_shape: ScoreShape, check: Callable[[Mask], None]) -> Mask:
    """`mask`, checked: the known one that equals it where it is one interval a row, otherwise itself."""

    def learn() -> CachedMask | None:
        check(mask)
        found, rest = split(mask, score_shape.query_len, score_shape.key_len, score_shape.batch)
        if found is None or rest is not None or found.start.size > MAX_ROWS:
            return None
        start, stop = found.ends
        return CachedMask(np.array(start), np.array(stop), repr(mask))

    unknown = any(map(is_unknown, (score_shape.batch, score_shape.query_len, score_shape.key_len)))
    if unknown or score_shape.batch * score_shape.query_len > MAX_ROWS or (numbers := _numbers(mask)) is None:
        check(mask)
        return mask if unknown else _answered(mask, score_shape)
    found = _KNOWN.get_or_compute((score_shape, numbers), learn)
    return mask if found is None else found


def _answered(mask: Mask, score_shape: ScoreShape) -> Mask:
    """`mask` with what its functions of indices said in their place: a traced call does not ask them when it runs."""
    if isinstance(mask, MaskFunction):
        found = mask.interval_set(score_shape.query_len, score_shape.key_len, score_shape.batch)
        return mask if found is None else CachedMask(*found.ends, repr(mask))
    if isinstance(mask, (And, Or)):
        first, second = (_answered(part, score_shape) for part in (mask.first, mask.second))
        return mask if first is mask.first and second is mask.second else type(mask)(first, second)
    if isinstance(mask, Not):
        inner = _answered(mask.mask, score_shape)
        return mask if inner is mask.mask else Not(inner)
    return mask


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
        values = backends.host(x)
    except (TypeError, RuntimeError):
        # Sparse or nested: the check says so.
        return None
    if values is None or values.dtype.kind not in "biuf" or values.size > MAX_NUMBERS:
        return None
    return type(x), values.dtype.str, values.shape, values.tobytes()


def numbers_of(mask: Any, valid_lens: Any) -> Hashable:
    """The two arguments of a call by all their numbers; None where they are many, unseen, or of no mask of ours."""
    parts = tuple(None if x is None else by(x) for x, by in ((mask, _numbers), (valid_lens, _value)))
    return None if (parts[0] is None) != (mask is None) or (parts[1] is None) != (valid_lens is None) else parts
