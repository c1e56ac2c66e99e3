"""Index values in masks: lengths, offsets and ids, given as lists, numbers or arrays of any framework."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import did_you_mean, is_whole, shown
from attnscore.base.layout import ScoreShape, entries_of, is_unknown
from attnscore.errors import MaskError, message
from attnscore.masks.intervals import HostArray
from attnscore.masks.shape_spec import ShapeSpec

Align = Literal["top_left", "bottom_right"]

# Widths from here on count as unbounded: no sequence is as long. A position plus a smaller one stays within 32 bits.
_UNBOUNDED = 2**29
# Index values of 32 bits are clamped to this: the sum with any width that counts stays within 32 bits.
_FAR = 2**30
ALIGN_HINT = (
    "align='top_left' lets query 0 see key 0; align='bottom_right' lets the last query see the last key (decoding with "
    "a cache)"
)


def host_ints(x: Any) -> HostArray | None:
    """Return the values as int64, or None where the host cannot read them."""
    values = backends.host(x)
    return None if values is None else values.astype(np.int64)


def column(x: HostArray) -> HostArray:
    """Return one value, or one per batch row, as (batch or 1, 1)."""
    return x.reshape(-1, 1)


def lens_per_query(lens: HostArray, query_len: int, batch: int) -> HostArray:
    """Return a number, (batch,), (batch or 1, query), or without a batch (query,), as (batch or 1, query)."""
    if lens.ndim < 2:
        lens = lens.reshape(1, -1) if batch == 1 else column(lens)
    return np.broadcast_to(lens, (len(lens), query_len))


def document_intervals(query_ids: HostArray, key_ids: HostArray) -> tuple[HostArray, HostArray] | None:
    """Return the interval of keys with each query's id, None where one is not contiguous.

    It is empty for ids without keys, and for negative ids: padding.
    """
    ids, inverse = np.unique(query_ids, return_inverse=True)
    order = np.argsort(key_ids, kind="stable")
    sorted_key_ids = key_ids[order]
    first, end = (np.searchsorted(sorted_key_ids, ids, side) for side in ("left", "right"))
    is_empty = (first == end) | (ids < 0)
    # `first` of an id above all others is the place behind the last key.
    order = np.append(order, 0)
    start, stop = order[first], order[end - 1] + 1
    if (~is_empty & (stop - start != end - first)).any():
        return None
    return np.where(is_empty, 0, start)[inverse], np.where(is_empty, 0, stop)[inverse]


def as_booleans(ops: Backend, x: Any, like: Array) -> Array:
    """Return key padding as booleans: zeros and ones stand for False and True."""
    array = ops.asarray(x, like)
    return array if ops.dtype(array) == "bool" else ~ops.equal(array, 0)


def id_arrays(ops: Backend, ids: tuple[Any, ...], like: Array) -> list[Array]:
    """Return ids of queries and ids of keys, (batch or 1, length) each."""
    values = [x for x in map(host_ints, ids) if x is not None]
    if len(values) == 2 and any(np.abs(x).max(initial=0) >= 2**31 for x in values):
        # Large ids are replaced by small ones, as JAX has no integers above 32 bits by default.
        unique_ids = np.unique(np.append(*values))
        ids = tuple(np.where(x < 0, -1, np.searchsorted(unique_ids, x)) for x in values)
    arrays = (ops.astype(ops.asarray(x, like), "int64") for x in ids)
    return [x if len(x.shape) == 2 else ops.reshape(x, (1, -1)) for x in arrays]


def per_batch(ops: Backend, score_shape: ScoreShape, x: Any, like: Array) -> Array:
    """Return one value, or one per batch row, on the canonical axes."""
    x = ops.astype(ops.asarray(x, like), "int64")
    return score_shape.batch_to_canonical(ops, ops.reshape(x, (-1, 1, 1)))


def by_row(ops: Backend, score_shape: ScoreShape, x: Any, like: Array, *, per_query: bool = False) -> Array:
    """Return a number, or one per batch row (or query), as (batch or 1, query or 1)."""
    x = ops.astype(ops.asarray(x, like), "int64")
    if per_query and len(x.shape) == 1 and not score_shape.has_batch:
        return ops.reshape(x, (1, -1))
    return x if len(x.shape) == 2 else ops.reshape(x, (-1, 1))


def at_rows(ops: Backend, score_shape: ScoreShape, x: Any, rows: Array, *, per_query: bool = False) -> Array:
    """Return `by_row` at the queries `rows` (1, r), clamped so that 32-bit sums with positions do not overflow."""
    x = entries_of(ops, by_row(ops, score_shape, x, rows, per_query=per_query), rows, -1)
    if ops.dtype(x) == "int64":
        return x
    return ops.minimum(ops.maximum(x, ops.full((), -_FAR, x)), ops.full((), _FAR, x))


def window_ends(centre: Array, left: int | None, right: int | None) -> tuple[Array | None, Array | None]:
    """Return start and stop of the keys centre - left <= j <= centre + right; None where a width is unbounded."""
    left, right = (None if width is None or width >= _UNBOUNDED else width for width in (left, right))
    return None if left is None else centre - left, None if right is None else centre + right + 1


def check_align(align: Any) -> None:
    """Raise MaskError unless `align` is one of the alignments, or None."""
    names = ("top_left", "bottom_right")
    if align is not None and not (isinstance(align, str) and align in names):
        hint = did_you_mean(align, names)
        raise MaskError(message("align", "'top_left', 'bottom_right' or None", shown(align), hint=hint))


def check_widths(left: Any, right: Any) -> None:
    """Raise MaskError unless the widths of a window are whole numbers, or None."""
    for name, width in (("left", left), ("right", right)):
        if width is not None and (not is_whole(width) or not 0 <= width < 2**62):
            raise MaskError(message(name, "a whole number of keys, 0 or more, or None", shown(width)))


def check_cumulative(name: str, cu: Any, highest: Any) -> HostArray | None:
    """Return cumulative lengths that rise from 0 to `highest` at most (None: to any); None if not readable here."""
    values = check_whole(name, cu)
    if values is None:
        return None
    if values[0] != 0 or (values[1:] < values[:-1]).any():
        expected = "cumulative lengths: from 0, none below the one before"
        hint = "of lengths, numpy.cumsum([0, *lengths])"
        raise MaskError(message(name, expected, f"{values[:8].tolist()}", hint=hint))
    if not is_unknown(highest) and values[-1] > highest:
        raise MaskError(message(name, f"cumulative lengths up to {highest}", values[-1]))
    return values


def check_same_lengths(cu_query: HostArray | None, cu_key: HostArray | None) -> None:
    """Raise MaskError unless each sequence is known to have as many queries as keys."""
    if cu_query is None or cu_key is None:
        got = "lengths of queries and of keys that the host cannot compare"
    else:
        differ = np.flatnonzero(np.diff(cu_query) != np.diff(cu_key))
        if not differ.size:
            return
        queries, keys = (int(np.diff(cu)[differ[0]]) for cu in (cu_query, cu_key))
        got = f"{queries} queries and {keys} keys in sequence {differ[0]}"
    raise MaskError(message("align", "an alignment of the queries and keys of each sequence", got, hint=ALIGN_HINT))


def check_whole(name: str, x: Any) -> HostArray | None:
    """Return the values, or None where the host cannot read them; raise MaskError unless they are whole numbers."""
    values = backends.host(x)
    if values is None:
        # Traced, or on a device: the dtype alone can be checked.
        dtype = backends.of({name: x}).dtype(x)
        if dtype.startswith(("bool", "complex")):
            raise MaskError(message(name, "whole numbers", f"{dtype} values"))
        return None
    if values.dtype.kind == "O":
        raise MaskError(message(name, "whole numbers", "object values (a ragged list, or no numbers of 64 bits)"))
    if values.dtype.kind not in "iuf":
        raise MaskError(message(name, "whole numbers", f"{values.dtype.name} values"))
    if values.dtype.itemsize == 2 and values.dtype.kind == "f":
        # 2^62 is infinite in float16, and comparing with it warns.
        values = values.astype(np.float32)
    # So that the sum or difference of two is a 64-bit number. Not by the absolute value: of -2^63 it is none.
    is_small = np.all((values > -(2.0**62)) & (values < 2.0**62))
    if not (is_small and np.all(values == np.floor(values))):
        raise MaskError(message(name, "whole numbers (below 2^62 in size)", f"{values.reshape(-1)[:8].tolist()}"))
    return values


def check_range(name: str, x: Any, highest: Any = None) -> None:
    """Raise MaskError unless `x` holds whole numbers, within [0, highest] where that is known."""
    values = check_whole(name, x)
    if values is None or values.size == 0 or highest is None or is_unknown(highest):
        return
    if values.min() < 0 or values.max() > highest:
        got = values.min() if values.min() < 0 else values.max()
        raise MaskError(message(name, f"numbers from 0 to {highest}", got))


def index_values_spec(
    name: str, x: Any, score_shape: ScoreShape, *, highest: Any = None, per_query: bool = False
) -> ShapeSpec:
    """Return the shapes and values that fit: a number, or one per batch row (or query).

    They are within [0, highest]; any whole numbers without `highest`.
    """
    batch, query_len = score_shape.batch, score_shape.query_len
    allowed: list[tuple[Any, ...]] = [(), (1,), (batch,)]
    expected = f"({batch},)" if score_shape.has_batch else "a number"
    if per_query:
        allowed += [(batch, query_len), (1, query_len), (batch, 1)]
        expected += f" or ({batch}, {query_len})" if score_shape.has_batch else f" or ({query_len},)"
        if not score_shape.has_batch:
            allowed.append((query_len,))
    return ShapeSpec(name, x, f"shape {expected}", allowed, partial(check_range, highest=highest))


def check_boolean(name: str, x: Any, *, numbers: bool = True) -> None:
    """Raise MaskError unless `x` is boolean; with `numbers`, as for padding masks, zeros and ones pass too."""
    values = backends.host(x)
    dtype = str(getattr(x, "dtype", None) or getattr(values, "dtype", "?")).removeprefix("torch.")
    dtype = dtype.removeprefix("<dtype: '").removesuffix("'>")  # TensorFlow's text
    if "bool" in dtype:
        return
    if values is not None and values.dtype.kind == "O":
        dtype = "object (a ragged list?)"
    if numbers and values is not None and values.dtype.kind in "iu" and np.isin(values, (0, 1)).all():
        return
    hint = "compare it: array > 0"
    if "float" in dtype:
        # A padding mask (batch, key) is no bias, which would broadcast it as (query, key).
        hint += " for one of 0 and 1; an additive mask of 0 and -inf " + (
            "is compared with 0: array == 0" if numbers else "is a bias: pass it as bias="
        )
    raise MaskError(message(name, "a boolean array, True where a key may be attended", f"dtype {dtype}", hint=hint))
