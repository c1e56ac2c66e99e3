"""Masks given by a function of indices, the ``mask_mod`` of FlexAttention.

- The function is called for one block of queries and keys at a time, in the caller's framework; there is never an
  n x n array.
- Where the keys of every query are a few intervals (windows, chunks, packed documents, blocks of an image, sinks), one
  pass over all pairs on the host finds them, some queries at a time. Kernels then skip tiles.
- The intervals are cached by everything that the function reads (`closures`). Where a value has no key, each call
  searches for them anew.
- A call evaluates the function as it was when the call began, also in its backward: arrays that it reads are copied.
- A function of the head has no intervals: kernels evaluate it by blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, importable
from attnscore.base import thresholds
from attnscore.base.arguments import is_whole, shown
from attnscore.base.cache import BoundedCache
from attnscore.base.layout import ScoreShape, is_unknown, may_equal
from attnscore.errors import AttnscoreError, MaskError, message
from attnscore.masks.base import IntervalSetMask, Mask
from attnscore.masks.cached import CachedMask
from attnscore.masks.closures import snapshot
from attnscore.masks.intervals import MAX_INTERVALS, HostArray, IntervalSet, runs_of
from attnscore.masks.validation import check_booleans

_CAPTURED_HINT = "arrays that it reads are passed to it by MaskFunction(function, captured=(array,))"
_HINTS = dict.fromkeys(("numpy", "torch", "jax", "mxnet"), _CAPTURED_HINT)
_HINTS["tensorflow"] = f"tf.gather(array, index) in place of array[index]; {_CAPTURED_HINT}"
_EXPECTED = "a boolean array that broadcasts to (batch, head, query, key)"


@dataclass(frozen=True, eq=False, repr=False)
class EvaluatedFunction(Mask):
    """A `MaskFunction` in one call, evaluated by blocks: it reads copies, which do not change."""

    function: Callable[..., Any]
    captured: tuple[Any, ...] = ()
    heads: int = 0
    """Number of heads for `materialize`; 0 where it was not given. A call counts its own heads."""

    @final
    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        heads = score_shape.heads * score_shape.groups
        index = (ops.positions(0, score_shape.batch, rows), ops.positions(0, heads, rows), rows, cols)
        captured = [ops.asarray(x, rows) for x in self.captured]
        visible = self._call(ops, index, captured, (score_shape.batch, heads, rows.shape[0], cols.shape[1]), rows)
        batch, head, *block = ops.shape(visible)
        # The function's axis of query heads becomes two: KV heads, and the group that shares one.
        split = (1, 1) if may_equal(head, 1) else (score_shape.heads, score_shape.groups)
        return ops.reshape(visible, (batch, *(1,) * (len(score_shape.lead) - 1), *split, *block))

    @final
    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        if not callable(self.function):
            expected = "a function of (batch, head, query, key)"
            raise MaskError(message("function", expected, shown(self.function)))
        if not isinstance(self.captured, (tuple, list)):
            hint = "captured=(array,) is a tuple of one"
            raise MaskError(message("captured", "a tuple of arrays", shown(self.captured), hint=hint))
        heads = score_shape.heads * score_shape.groups
        if not is_whole(self.heads) or self.heads not in (0, heads):  # 0: not given
            raise MaskError(message("heads", f"0, or the number of heads ({heads})", shown(self.heads)))

    @final
    def _call(
        self, ops: Backend, index: Sequence[Array], captured: Sequence[Array], full: tuple[Any, ...], like: Array
    ) -> Array:
        """Return the checked result of the function on four axes, each of length 1 or of the length in `full`."""
        shapes = [tuple(-1 if i == axis else 1 for i in range(4)) for axis in range(4)]
        indices = (ops.reshape(x, shape) for x, shape in zip(index, shapes, strict=True))
        try:
            result = self.function(*indices, *captured)
        except Exception as error:
            if not isinstance(error, AttnscoreError):
                error.add_note(f"attnscore: {self!r} was called with arrays of {ops.name}. Hint: {_HINTS[ops.name]}")
            raise
        name = f"the result of {_name(self.function)}"
        return check_booleans(ops, name, _EXPECTED, result, like, full, axes=4)

    def arrays(self) -> dict[str, Array]:
        return {f"captured[{i}]": x for i, x in enumerate(self.captured) if backends.is_array(x)}

    def map_leaves(self, change: Callable[[Array], Array]) -> Mask:
        if not self.arrays():
            return self
        return replace(self, captured=tuple(change(x) if backends.is_array(x) else x for x in self.captured))

    def __repr__(self) -> str:
        shapes = [f"<{tuple(x.shape)} {x.dtype}>" if backends.is_array(x) else repr(x) for x in self.captured]
        captured = f", captured=({', '.join(shapes)},)" if shapes else ""
        return f"MaskFunction({_name(self.function)}{captured}{f', heads={self.heads}' if self.heads else ''})"


@final
@dataclass(frozen=True, eq=False, repr=False)
class MaskFunction(IntervalSetMask, EvaluatedFunction):
    """Query i of head h in batch row b attends key j where ``function(b, h, i, j)`` is True.

    The function takes indices as integer arrays of the caller's framework, of shapes (batch, 1, 1, 1), (1, head, 1, 1),
    (1, 1, query, 1) and (1, 1, 1, key), for any block of queries and keys. It returns a boolean array that broadcasts
    to (batch, head, query, key): comparisons and ``&``, ``|``, ``~`` do. In one call the same indices have to give the
    same result. Each call sees the arrays and numbers that the function reads as they are then.

    Parameters
    ----------
    function : callable
        ``function(batch, head, query, key, *captured)``.
    captured : tuple of arrays, optional
        Arrays that the function reads besides the indices, as in ``ids[batch, key]``; one number per batch row may
        also broadcast, as (batch, 1, 1, 1). Traced arrays of JAX and TensorFlow have to be passed here; others may
        stay in a closure.
    heads : whole number, optional
        For `materialize`, which knows no heads: their number, where the function distinguishes them.

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

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        # Two heads where their number is unknown: the result's shape shows whether the function reads their index.
        mask = self._snapshot_mask(backends.load("numpy"), max(2, self.heads), query_len, key_len, batch)
        return mask.interval_set(query_len, key_len, batch)

    def for_call(self, ops: Backend, score_shape: ScoreShape) -> Mask:
        heads, lengths = score_shape.heads * score_shape.groups, (score_shape.query_len, score_shape.key_len)
        return self._snapshot_mask(ops, heads, *lengths, score_shape.batch)

    def _snapshot_mask(self, ops: Backend, heads: int, *lengths: int) -> Mask:
        """Return the function as it is now: its intervals, or a copy without them; `lengths`: queries, keys, batch."""
        (function, captured), key = snapshot((self.function, tuple(self.captured)))
        evaluated = EvaluatedFunction(function, captured, self.heads)
        if any(map(is_unknown, lengths)):
            return evaluated

        text, (query_len, _, batch) = repr(self), lengths

        def search() -> CachedMask | None:
            interval_set = _search(evaluated, ops, heads, *lengths)
            return None if interval_set is None else CachedMask(interval_set, text)

        # The text is part of the key, because the cached mask shows it.
        key = None if key is None else (ops.name, heads, *lengths, text, key)
        intervals = _INTERVALS.get_or_compute(key, search, weight=query_len * batch)
        return evaluated if intervals is None else intervals


_INTERVALS: BoundedCache[CachedMask | None] = BoundedCache(maxsize=256, max_weight=thresholds.ALL_FUNCTION_ROWS)


def _search(
    mask: EvaluatedFunction, ops: Backend, heads: int, query_len: int, key_len: int, batch: int
) -> IntervalSet | None:
    """Evaluate all pairs, return the intervals; None if there are too many, heads differ, or the host cannot do it."""
    captured = [_on_host(ops, x) for x in mask.captured]
    if any(x is None for x in captured):
        return None

    def evaluate(first: int, last: int) -> HostArray | None:
        index = [np.arange(batch), np.arange(heads), np.arange(first, last), np.arange(key_len)]
        full = tuple(len(x) for x in index)
        arrays = [ops.from_memory(x, "int64", None) for x in index]
        array = backends.host(mask._call(ops, arrays, captured, full, arrays[2]))
        if array is None or array.shape[1] != 1:
            return None
        return np.broadcast_to(array[:, 0], (len(array), full[2], key_len))

    try:
        with ops.eager_scope():
            return _intervals_by_chunks(evaluate, query_len, key_len, batch)
    except MaskError:
        raise
    except Exception:
        if ops.name == "numpy":
            raise
        # The closure holds arrays that are traced or on a device: kernels can still evaluate the function by block.
        return None


def _on_host(ops: Backend, x: Any) -> Array | None:
    """Return a captured array as one of the framework that the host can read, or None."""
    values = backends.host(x)
    if values is None or backends.of_type(type(x)) is ops:
        return None if values is None else x
    values = importable(values)
    return ops.from_memory(values, values.dtype.name, None)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _intervals_by_chunks(
    evaluate: Callable[[int, int], HostArray | None], query_len: int, key_len: int, batch: int
) -> IntervalSet | None:
    """Return the intervals of a mask from ``evaluate(first, last)`` on a few queries at a time; None without them."""
    start, stop = np.full((2, MAX_INTERVALS, batch, query_len), key_len, np.int64)
    if not start.size or key_len == 0:
        return IntervalSet(start[:1], stop[:1])
    # The first query alone: should the function distinguish heads, the result has an axis of them.
    first = evaluate(0, 1)
    if first is None:
        return None
    # Whether all batch rows have the same mask, as far as it is evaluated.
    is_shared, most_runs = len(first) == 1, 1
    chunk = max(1, thresholds.MASK_PAIRS // (key_len * (1 if is_shared else batch)))
    for i in range(0, query_len, chunk):
        queries = i, min(i + chunk, query_len)
        block = evaluate(*queries)
        runs = None if block is None else _runs_of_block(block)
        if block is None or runs is None:
            return None
        start[: runs.count, :, slice(*queries)] = runs.start
        stop[: runs.count, :, slice(*queries)] = runs.stop
        is_shared, most_runs = is_shared and len(block) == 1, max(most_runs, runs.count)
    masks = 1 if is_shared else batch
    return IntervalSet(start[:most_runs, :masks].copy(), stop[:most_runs, :masks].copy())


def _runs_of_block(block: HostArray) -> IntervalSet | None:
    """Return the runs of True along the keys of (batch, query, key); None above `MAX_INTERVALS` runs of a query."""
    start = block.argmax(-1)
    stop = block.shape[-1] - block[..., ::-1].argmax(-1)
    nonempty = np.take_along_axis(block, start[..., None], -1)[..., 0]
    start, stop = np.where(nonempty, start, 0), np.where(nonempty, stop, 0)
    # A query has one run where its ends are as far apart as it has True. One sum for all is faster than finding runs.
    if np.count_nonzero(block) == (stop - start).sum():
        return IntervalSet.of((start, stop))
    runs = runs_of(block.reshape(-1, block.shape[-1]), MAX_INTERVALS)
    if runs is None:
        return None
    shape = (runs.count, *block.shape[:2])
    return IntervalSet(runs.start.reshape(shape), runs.stop.reshape(shape))
