"""A mask that is a function of indices: what FlexAttention calls a ``mask_mod``.

- The function is asked for the block that is wanted, on the caller's framework; there is never an n x n array.
- Where the keys of every row are a few intervals (windows, chunks, packed documents, blocks of an image, sinks), that
  is found by asking for all pairs once, a strip of rows at a time, on the host: tiles are then skipped, and the
  function is not asked again for these lengths.
- A function that tells heads apart has no intervals: it is asked by strips of rows, or by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakKeyDictionary

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, importable, may_equal
from attnscore.core.arguments import is_whole, shown
from attnscore.core.cache import BoundedCache
from attnscore.core.layout import ScoreShape
from attnscore.errors import MaskError, message
from attnscore.masks.base import Mask
from attnscore.masks.intervals import MOST, HostArray, Intervals, IntervalSet, runs_of

# Pairs that are looked at together: 1 MB of booleans, and 8 MB for each array of 64-bit numbers that a function makes.
STRIP = 2**20
# Pairs of lengths whose pieces a mask remembers.
_LENGTHS = 16
_EXPECTED = "a boolean array that broadcasts to (batch, head, query, key)"


@final
@dataclass(frozen=True, eq=False, repr=False)
class MaskFunction(Mask):
    """Row i of head h in batch row b sees key j where ``function(b, h, i, j)`` is True.

    The function gets whole numbers as arrays of the caller's framework, of shapes (batch, 1, 1, 1), (1, head, 1, 1),
    (1, 1, query, 1) and (1, 1, 1, key), for any block of rows and columns, and returns a boolean array that broadcasts
    to (batch, head, query, key): comparisons and ``&``, ``|``, ``~`` do. For one pair it must always say the same as
    long as the mask is used.

    Parameters
    ----------
    function : callable
        ``function(batch, head, query, key, *captured)``.
    captured : tuple of arrays, optional
        What the function reads besides the indices, and indexes by them, as in ``ids[batch, key]``; numbers per batch
        row may also broadcast, as (batch, 1, 1, 1). Arrays that are traced, in JAX and TensorFlow, have to come here
        and not in a closure; others may.
    heads : whole number, optional
        For `materialize`: how many heads the function tells apart; 0: none, or those of the call.

    Raises
    ------
    MaskError
        In a call: `function` cannot be called, or returns something else.

    References
    ----------
    ``mask_mod`` of ``torch.nn.attention.flex_attention``, which takes scalars where this takes arrays.

    Examples
    --------
    >>> def chunks(batch, head, query, key):
    ...     return (key <= query) & (query // 2 == key // 2)
    >>> MaskFunction(chunks).materialize(4, 4)[0].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """

    function: Callable[..., Any]
    captured: tuple[Any, ...] = ()
    heads: int = 0

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        heads = score_shape.heads * score_shape.groups
        index = (ops.positions(0, score_shape.batch, rows), ops.positions(0, heads, rows), rows, cols)
        captured = [ops.asarray(x, rows) for x in self.captured]
        seen = self._asked(ops, index, captured, (score_shape.batch, heads, rows.shape[0], cols.shape[1]), rows)
        batch, head, *block = ops.shape(seen)
        split = (1, 1) if may_equal(head, 1) else (score_shape.heads, score_shape.groups)
        return ops.reshape(seen, (batch, *(1,) * (len(score_shape.lead) - 1), *split, *block))

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        found = self.interval_set(query_len, key_len, batch)
        return None if found is None else found.single

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        found = _found(self)
        key = (found.heads, query_len, key_len, batch)
        return found.interval_set.get_or_compute(key, lambda: self._pieces(found, query_len, key_len, batch))

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        if not callable(self.function):
            expected = "a function of (batch, head, query, key)"
            raise MaskError(message("function", expected, shown(self.function)))
        if not isinstance(self.captured, (tuple, list)):
            hint = "captured=(array,) is a tuple of one"
            raise MaskError(message("captured", "a tuple of arrays", shown(self.captured), hint=hint))
        heads = score_shape.heads * score_shape.groups
        if not is_whole(self.heads) or self.heads not in (0, heads):
            raise MaskError(message("heads", f"0, or the number of heads ({heads})", shown(self.heads)))
        # Pieces are looked for in the words that the function is called in anyway.
        found = _found(self)
        found.ops, found.heads = ops, heads

    def _asked(
        self, ops: Backend, index: Sequence[Array], captured: Sequence[Array], most: tuple[Any, ...], like: Array
    ) -> Array:
        """The function's answer on four axes, each 1 or the number in `most`."""
        places = [tuple(-1 if axis == place else 1 for axis in range(4)) for place in range(4)]
        answer = self.function(*(ops.reshape(x, place) for x, place in zip(index, places, strict=True)), *captured)
        name = f"the result of {_name(self.function)}"
        if not (backends.is_array(answer) or isinstance(answer, (bool, np.bool_))):
            raise MaskError(message(name, _EXPECTED, shown(answer)))
        seen = ops.asarray(answer, like)
        if ops.dtype(seen) != "bool":
            raise MaskError(message(name, _EXPECTED, f"dtype {ops.dtype(seen)}", hint="compare it: x > 0"))
        shape = ops.shape(seen)
        wide = (*(1,) * (4 - len(shape)), *shape)
        if len(wide) > 4 or not all(may_equal(n, 1) or may_equal(n, m) for n, m in zip(wide, most, strict=True)):
            raise MaskError(message(name, f"{_EXPECTED} = {most}", f"shape {tuple(shape)}"))
        return seen if len(shape) == 4 else ops.reshape(seen, wide)

    def _pieces(self, found: _Found, query_len: int, key_len: int, batch: int) -> IntervalSet | None:
        """By asking for every pair once; None where a row's keys are scattered, or nobody can look."""
        ops = found.ops or backends.load("numpy")
        captured = [_own(ops, x) for x in self.captured]
        if any(x is None for x in captured):
            return None
        # Of unknown heads two, of the same index: whether it uses the index is seen in the shape.
        heads = np.arange(found.heads) if found.ops is not None else np.zeros(2, np.int64)

        def seen(first: int, last: int) -> HostArray | None:
            index = [np.arange(batch), heads, np.arange(first, last), np.arange(key_len)]
            most = tuple(len(x) for x in index)
            arrays = [ops.from_memory(x, "int64", None) for x in index]
            answer = backends.host(self._asked(ops, arrays, captured, most, arrays[2]))
            if answer is None or answer.shape[1] != 1:
                return None
            return np.broadcast_to(answer[:, 0], (len(answer), most[2], key_len))

        try:
            with ops.eager_scope():
                return _strips(seen, query_len, key_len, batch)
        except MaskError:
            raise
        except Exception:
            if ops.name == "numpy":
                raise
            # What the function captured lies on a device, or is traced: by block it can be asked.
            return None

    def arrays(self) -> dict[str, Array]:
        return {f"captured[{i}]": x for i, x in enumerate(self.captured) if backends.is_array(x)}

    def leaves(self) -> list[Array]:
        return list(self.arrays().values())

    def with_leaves(self, leaves: Iterator[Array]) -> Mask:
        if not self.arrays():
            return self
        return replace(self, captured=tuple(next(leaves) if backends.is_array(x) else x for x in self.captured))

    def __repr__(self) -> str:
        shapes = [f"<{tuple(x.shape)} {x.dtype}>" if backends.is_array(x) else repr(x) for x in self.captured]
        captured = f", captured=({', '.join(shapes)},)" if shapes else ""
        return f"MaskFunction({_name(self.function)}{captured}{f', heads={self.heads}' if self.heads else ''})"


class _Found:
    """What is remembered of a mask as long as it lives."""

    def __init__(self) -> None:
        self.ops: Backend | None = None
        """The words of the last call."""
        self.heads = 0
        self.interval_set: BoundedCache[IntervalSet | None] = BoundedCache(_LENGTHS)


_FOUND: WeakKeyDictionary[MaskFunction, _Found] = WeakKeyDictionary()


def _found(mask: MaskFunction) -> _Found:
    found = _FOUND.get(mask)
    if found is None:
        found = _FOUND[mask] = _Found()
    return found


def _own(ops: Backend, x: Any) -> Array | None:
    """What a function captured, as an array of the framework with numbers now."""
    host = backends.host(x)
    if host is None or backends.of_type(type(x)) is ops:
        return None if host is None else x
    host = importable(host)
    return ops.from_memory(host, host.dtype.name, None)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _strips(
    seen: Callable[[int, int], HostArray | None], query_len: int, key_len: int, batch: int
) -> IntervalSet | None:
    """The pieces of a mask that is asked for rows from one to another; None when it has none, or too many."""
    start, stop = np.full((2, MOST, batch, query_len), key_len, np.int64)
    if not start.size or key_len == 0:
        return IntervalSet(start[:1], stop[:1])
    # The first row alone, as heads that are told apart take memory too.
    first = seen(0, 1)
    shared, most = first is not None and len(first) == 1, 1
    count = max(1, STRIP // (key_len * (1 if shared else batch)))
    for i in range(0, query_len, count):
        rows = i, min(i + count, query_len)
        block = seen(*rows) if first is not None else None
        found = None if block is None else _runs(block)
        if block is None or found is None:
            return None
        start[: found.count, :, slice(*rows)] = found.start
        stop[: found.count, :, slice(*rows)] = found.stop
        shared, most = shared and len(block) == 1, max(most, found.count)
    kept = 1 if shared else batch
    return IntervalSet(start[:most, :kept].copy(), stop[:most, :kept].copy())


def _runs(seen: HostArray) -> IntervalSet | None:
    """The runs of True in the rows of (batch, query, key)."""
    start = seen.argmax(-1)
    stop = seen.shape[-1] - seen[..., ::-1].argmax(-1)
    some = np.take_along_axis(seen, start[..., None], -1)[..., 0]
    start, stop = np.where(some, start, 0), np.where(some, stop, 0)
    # No row has more True entries than its interval is long: one sum tells of all, much faster than their runs.
    if np.count_nonzero(seen) == (stop - start).sum():
        return IntervalSet.of((start, stop))
    found = runs_of(seen.reshape(-1, seen.shape[-1]), MOST)
    if found is None:
        return None
    shape = (found.count, *seen.shape[:2])
    return IntervalSet(found.start.reshape(shape), found.stop.reshape(shape))
