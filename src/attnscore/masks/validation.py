"""Checks of the results of custom masks: ``visible``, ``ends``, ``intervals`` and ``interval_set``.

- Kernels trust these results; a wrong one would give wrong numbers silently, or never end. So the methods of a class
  from outside the package are wrapped when the class is created (`Mask.__init_subclass__`): no call avoids a check.
- The package's own masks are not wrapped: tests check them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import is_whole, shown
from attnscore.base.layout import ScoreShape, may_equal
from attnscore.errors import MaskError, message
from attnscore.masks.intervals import HostArray, Intervals, IntervalSet

if TYPE_CHECKING:
    from attnscore.masks.base import Mask

_CHECKED = "_attnscore_checked"


def add_checks(cls: type[Mask]) -> None:
    """Wrap the methods of a mask class from outside the package in checks of their results."""
    if _is_builtin(cls):
        return
    for name in cls.checked_methods:
        method = getattr(cls, name)
        if not _is_builtin(method) and not hasattr(method, _CHECKED):
            setattr(cls, name, _with_check(method, _CHECKS[name]))


def _is_builtin(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").partition(".")[0] == "attnscore"


def _with_check(method: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that returns ``check(name, result, *arguments)`` of its results."""

    @wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        return check(f"{method.__name__} of {type(self).__name__}", result, *arguments, **options)

    setattr(checked, _CHECKED, True)
    return checked


def check_booleans(
    ops: Backend, name: str, expected: str, result: Any, like: Array, full: tuple[Any, ...], *, axes: int
) -> Array:
    """Return `result` with `axes` axes or more; raise MaskError unless it is boolean and broadcasts to `full`."""
    if not (backends.is_array(result) or isinstance(result, (bool, np.bool_))):
        raise MaskError(message(name, expected, shown(result)))
    if not backends.is_array(result) and ops.compares_identities():
        raise MaskError(message(name, expected, f"{result}: == compares identities here", hint="tf.equal(x, y)"))
    array = ops.asarray(result, like)
    if ops.dtype(array) != "bool":
        raise MaskError(message(name, expected, f"dtype {ops.dtype(array)}", hint="compare it: x > 0"))
    shape = ops.shape(array)
    padded_shape = (*(1,) * (axes - len(shape)), *shape)
    pairs = zip(reversed(padded_shape), reversed(full), strict=False)
    if len(padded_shape) > len(full) or not all(may_equal(n, 1) or may_equal(n, m) for n, m in pairs):
        raise MaskError(message(name, f"{expected} = {full}", f"shape {tuple(shape)}"))
    return array if len(shape) == len(padded_shape) else ops.reshape(array, padded_shape)


def _check_visible(name: str, result: Any, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
    full = (*score_shape.rows[:-1], rows.shape[0], cols.shape[1])
    expected = "a boolean array that broadcasts to (*batch, kv head, group, query, key)"
    return check_booleans(ops, name, expected, result, rows, full, axes=2)


def _check_ends(name: str, result: Any, ops: Backend, score_shape: ScoreShape, rows: Array) -> tuple[Any, Any]:
    full = (score_shape.batch, ops.shape(rows)[1])

    def check_end(end: str, x: Any) -> Any:
        if x is None or is_whole(x):
            return x
        expected = f"{end} as None, a whole number, or an array of them that broadcasts to (batch, query) = {full}"
        if not backends.is_array(x):
            raise MaskError(message(name, expected, shown(x)))
        if not ops.dtype(x).startswith(("int", "uint")):
            raise MaskError(message(name, expected, f"dtype {ops.dtype(x)}"))
        shape = ops.shape(x)
        fits = (may_equal(n, 1) or may_equal(n, m) for n, m in zip(shape, full, strict=False))
        if len(shape) not in (0, 2) or not all(fits):  # a single axis may be that of the batch or of the queries
            hint = "one number per batch row is a column: ops.reshape(x, (-1, 1))" if len(shape) == 1 else None
            raise MaskError(message(name, expected, f"shape {tuple(shape)}", hint=hint))
        return ops.astype(x, "int64")

    start, stop = _unpack_pair(name, "start and stop", result)
    return check_end("start", start), check_end("stop", stop)


def _unpack_pair(name: str, expected: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise MaskError(message(name, expected, shown(result)))
    return result[0], result[1]


def _check_intervals(name: str, result: Any, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
    if result is None:
        return None
    ends = _unpack_pair(name, "start and stop, or None", result)
    return _check_intervals_and_cast(name, *ends, [(n, query_len) for n in (1, batch)], key_len)


def _check_interval_set(name: str, result: Any, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
    if result is None:
        return None
    if not isinstance(result, IntervalSet):
        raise MaskError(message(name, "attnscore.masks.IntervalSet or None", shown(result)))
    count = max(1, np.shape(result.start)[0]) if np.ndim(result.start) else 1
    shapes = [(count, n, query_len) for n in (1, batch)]
    start, stop = _check_intervals_and_cast(name, result.start, result.stop, shapes, key_len)
    is_misplaced = (stop[1:] > start[1:]) & ((stop[:-1] <= start[:-1]) | (start[1:] <= stop[:-1]))
    if is_misplaced.any():
        _, row, query = np.argwhere(is_misplaced)[0]
        expected = "the intervals of a query in order, none touching the next, the empty ones behind"
        got = f"start {start[:, row, query].tolist()}, stop {stop[:, row, query].tolist()} for query {query}"
        raise MaskError(message(name, expected, got))
    return IntervalSet(start, stop)


_CHECKS: dict[str, Callable[..., Any]] = {
    "visible": _check_visible,
    "ends": _check_ends,
    "intervals": _check_intervals,
    "interval_set": _check_interval_set,
}


def _check_intervals_and_cast(
    name: str, start: Any, stop: Any, shapes: Sequence[tuple[int, ...]], key_len: int
) -> Intervals:
    """Return int64 ends of one of these shapes with 0 <= start <= stop <= key_len; raise MaskError for others."""
    start, stop = np.broadcast_arrays(
        _check_integers(name, "start", start, shapes), _check_integers(name, "stop", stop, shapes)
    )
    out_of_range = (start < 0) | (start > stop) | (stop > key_len)
    if out_of_range.any():
        *_, row = index = tuple(int(i[0]) for i in np.nonzero(out_of_range))
        got = f"start {start[index]} and stop {stop[index]} for query {row}"
        hint = "start = numpy.clip(start, 0, key_len) and stop = numpy.clip(stop, start, key_len)"
        raise MaskError(message(name, f"0 <= start <= stop <= key_len = {key_len}", got, hint=hint))
    return start, stop


def _check_integers(name: str, end: str, x: Any, shapes: Sequence[tuple[int, ...]]) -> HostArray:
    """Return `x` as int64; raise MaskError unless it holds whole numbers and has one of these shapes."""
    values = backends.host(x)
    expected = f"{end} as a NumPy array of whole numbers, shape " + " or ".join(map(str, dict.fromkeys(shapes)))
    if values is None:
        raise MaskError(message(name, expected, "values that the host cannot read", hint="return None for these"))
    if values.dtype.kind not in "iu":
        raise MaskError(message(name, expected, f"dtype {values.dtype.name}"))
    if values.shape not in shapes:
        raise MaskError(message(name, expected, f"shape {values.shape}"))
    if values.dtype.kind == "u":
        # Numbers above the largest signed one would wrap to negative.
        values = np.minimum(values.astype(np.uint64), np.uint64(2**63 - 1))
    return values.astype(np.int64)
