"""Cache of masks by value: the layers of a model share a mask, and a loop builds an equal one for each call.

- A mask of few index values that the host can read is checked, and its intervals are computed, once for a `ScoreShape`:
  that takes 20 to 60 us, as long as a small attention call (25 us).
- Entries are copies keyed by value: no array of the caller is held, and lengths changed in place are a new key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.base.cache import BoundedCache
from attnscore.base.layout import ScoreShape, entries_of, is_unknown
from attnscore.masks.base import And, IntervalSetMask, Mask, inside, split_intervals
from attnscore.masks.builtin import BUILTIN, Dense
from attnscore.masks.index_values import by_row
from attnscore.masks.intervals import IntervalSet

# The intervals of these masks depend on their fields alone, which a custom mask does not promise. `Dense` has none.
_FIELDS: dict[type[Mask], tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]  # all are dataclasses
    for kind in BUILTIN
    if kind is not Dense
}


@final
@dataclass(frozen=True, eq=False, repr=False)
class CachedMask(IntervalSetMask):
    """A mask by its intervals."""

    unmasked: IntervalSet
    text: str
    """The repr of the caller's mask."""

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        index, blocks = ops.reshape(rows, (1, -1)), []
        for pair in zip(self.unmasked.start, self.unmasked.stop, strict=True):
            start, stop = (entries_of(ops, by_row(ops, score_shape, end, rows), index, -1) for end in pair)
            blocks.append(inside(ops, score_shape, (start, stop), cols))
        return reduce(ops.logical_or, blocks)

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        return self.unmasked

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        """Do nothing: the mask was checked before it was cached."""

    def arrays(self) -> dict[str, Array]:
        return {}

    def map_leaves(self, change: Callable[[Array], Array]) -> Mask:
        # Under a trace the intervals stay constants: as traced arrays the host could no longer read them.
        return self

    def __repr__(self) -> str:
        return self.text


_CACHE: BoundedCache[CachedMask | None] = BoundedCache(maxsize=256, max_weight=thresholds.ALL_CACHED_INTERVALS)


def cached_mask(mask: Mask, ops: Backend, score_shape: ScoreShape, check: Callable[[Mask], None]) -> Mask:
    """Return `mask`, checked, as a call uses it: where it is intervals, as the cached mask of the same values."""
    if any(map(is_unknown, (score_shape.batch, score_shape.query_len, score_shape.key_len))):
        check(mask)
        return mask.for_call(ops, score_shape)
    cached = _find_cached(mask, score_shape, check)
    if cached is None:  # otherwise the mask, or an equal one, was checked before it was cached
        check(mask)
    return cached if isinstance(cached, CachedMask) else _prepare_for_call(mask, ops, score_shape)


def _find_cached(mask: Mask, score_shape: ScoreShape, check: Callable[[Mask], None]) -> Mask | None:
    """Return the cached mask of the same values, `mask` if it is not few intervals, None if it cannot be cached."""
    has_many_rows = score_shape.batch * score_shape.query_len > thresholds.CACHED_MASK_ROWS
    if has_many_rows or (signature := _signature(mask)) is None:
        return None

    def compute() -> CachedMask | None:
        check(mask)
        return intervals_of(mask, score_shape)

    cached = _CACHE.get_or_compute((score_shape, signature), compute, weight=_max_intervals(score_shape))
    return mask if cached is None else cached


def intervals_of(mask: Mask, score_shape: ScoreShape) -> CachedMask | None:
    """Return a checked mask as its intervals; None where these do not express it, or are too many."""
    intervals, remaining_mask = split_intervals(mask, score_shape.query_len, score_shape.key_len, score_shape.batch)
    if intervals is None or remaining_mask is not None or intervals.start.size > _max_intervals(score_shape):
        return None
    return CachedMask(IntervalSet(np.array(intervals.start), np.array(intervals.stop)), repr(mask))


def _max_intervals(score_shape: ScoreShape) -> int:
    """Return how many intervals a cached mask may have, its weight in the cache: at least one for each query."""
    limit = thresholds.CACHED_MASK_INTERVALS
    return limit if score_shape.batch * score_shape.query_len <= limit else thresholds.CACHED_MASK_ROWS


def _prepare_for_call(mask: Mask, ops: Backend, score_shape: ScoreShape) -> Mask:
    """Return a checked mask as a call uses it: in an AND, the parts whose values the host knows are cached masks."""
    if not isinstance(mask, And):
        return mask.for_call(ops, score_shape)
    # The parts were checked together.
    parts = ((part, _find_cached(part, score_shape, lambda _: None)) for part in (mask.first, mask.second))
    first, second = (x if isinstance(x, CachedMask) else _prepare_for_call(part, ops, score_shape) for part, x in parts)
    return mask if first is mask.first and second is mask.second else And(first, second)


def _signature(mask: Mask) -> Hashable:
    """Return a mask's class and index values; None when these are many, or the host cannot read them."""
    kind = type(mask)
    parts: list[Hashable] = [kind]
    for name in _FIELDS.get(kind, ()):
        x = getattr(mask, name)
        part = _signature(x) if isinstance(x, Mask) else _value_signature(x)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts) if kind in _FIELDS else None


def _value_signature(x: Any) -> Hashable:
    """Return a field as a hashable value, or None (`_signature`); with its type: True == 1, but the checks differ."""
    if x is None or isinstance(x, (str, int)):
        return type(x), x
    try:
        values = backends.host(x)
    except (TypeError, RuntimeError):
        # Sparse or nested arrays, which the checks refuse with a message.
        return None
    if values is None or values.dtype.kind not in "biuf" or values.size > thresholds.CACHED_MASK_NUMBERS:
        return None
    return type(x), values.dtype.str, values.shape, values.tobytes()


def arguments_signature(mask: Any, valid_lens: Any) -> Hashable:
    """Return the signature of the arguments mask and valid_lens of a call; None where one of them has none."""
    mask_signature = None if mask is None else _signature(mask)
    lens_signature = None if valid_lens is None else _value_signature(valid_lens)
    is_complete = (mask_signature is None) == (mask is None) and (lens_signature is None) == (valid_lens is None)
    return (mask_signature, lens_signature) if is_complete else None
