"""Masks that have to be evaluated, for the native module: a strip of rows after the other.

- A strip is a call of the module on some rows, with an array of booleans for them: memory is that of the booleans of
  one strip, linear in the lengths.
- All strips fill the same arrays: rows are put in their place, gradients of keys are added to where they are. What
  comes out is what one call would give; strips depend on shapes alone, and so no result on the number of threads.
- Dropout counts rows through all matrices of a call. With several strips each matrix is a call of its own, whose seed
  is moved on to where its rows begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from attnscore.backends.base import HostArray
from attnscore.core.problem import Problem
from attnscore.core.tiling import TilePlan
from attnscore.kernels.native import operands as inputs
from attnscore.kernels.native.results import GRADIENTS
from attnscore.masks import And, Mask
from attnscore.masks import lowering as masks

# Booleans of a strip: 8 MB, but no fewer rows than these, as the module reads all keys for each block of 48 to 192.
HELD = 2**23
FEWEST = 96
# Pairs that are evaluated together: what a mask computes on its way may take 8 bytes each, its answer takes 1.
PAIRS = 2**20
# Rows that are: the keys of a window move on with them.
MOST = 256

Arrays = Sequence[HostArray | None]


class _Kind(NamedTuple):
    """What the axes of an array are, and which of them is that of the rows."""

    axes: Literal["grid", "batch", "heads"]
    rows: int | None = None


_OF_ROWS, _OF_KEYS, _OF_HEADS = _Kind("grid", -2), _Kind("grid"), _Kind("heads")
_INPUTS: Final = {
    **dict.fromkeys(inputs.ORDER, _OF_KEYS),
    **dict.fromkeys(("query", "query_bias", "bias", "mask"), _OF_ROWS),
    **dict.fromkeys(("query_ids", "start", "stop"), _Kind("batch", -1)),
    "key_ids": _Kind("batch"),
    **dict.fromkeys(("weights", "sink", "scales"), _OF_HEADS),
}
_GRADIENTS: Final = {
    **dict.fromkeys(GRADIENTS, _OF_KEYS),
    **dict.fromkeys(("query", "bias"), _OF_ROWS),
    "query_bias": _Kind("grid", -1),
}
_MASK: Final = inputs.ORDER.index("mask")


@dataclass(frozen=True)
class _Part:
    """Some rows of all matrices, or of one, whose place in the grid this is."""

    first: int
    last: int
    place: tuple[int, ...] | None = None

    def of(self, x: HostArray | None, kind: _Kind) -> HostArray | None:
        """The part of an array, as a view."""
        if x is None:
            return None
        index = [slice(None)] * x.ndim
        if kind.rows is not None and x.shape[kind.rows] > 1:
            index[kind.rows] = slice(self.first, self.last)
        if self.place is not None:
            for axis, place in _axes(self.place, x.ndim, kind):
                if x.shape[axis] > 1:
                    index[axis] = slice(place, place + 1)
        return x[tuple(index)]


def _axes(place: tuple[int, ...], count: int, kind: _Kind) -> list[tuple[int, int]]:
    """The axes of an array with `count` of them along which a matrix has a place, each with that."""
    if kind.axes == "grid":
        return list(enumerate(place))
    if kind.axes == "batch":
        return [(-2, place[0])]
    # One vector of weights for all heads has no axis of them.
    return list(enumerate(place[-2:])) if count > 1 else []


def forward(
    call: Callable[..., None], problem: Problem, plan: TilePlan, words: tuple[Any, Any], filled: Arrays, threads: int
) -> None:
    """``call(*words, filled, threads)``: the module's forward."""
    for part, score, arrays in _parts(problem, plan, *words):
        own = [part.of(x, _OF_ROWS) for x in filled]
        given = [x if x is None or x.flags.c_contiguous else np.empty(x.shape, x.dtype) for x in own]
        call(score, arrays, given, threads)
        for x, found in zip(own, given, strict=True):
            if x is not None and found is not x:
                x[...] = found


def backward(
    call: Callable[..., None],
    problem: Problem,
    plan: TilePlan,
    words: tuple[Any, Any],
    known: Arrays,
    grad_dtype: str,
    buffers: dict[str, HostArray],
    threads: int,
) -> None:
    """``call(*words, known, grad_dtype, buffers, threads)``: the module's backward."""
    for part, score, arrays in _parts(problem, plan, *words):
        rows = [part.of(x, _OF_ROWS) for x in known]
        own = {name: part.of(x, _GRADIENTS[name]) for name, x in buffers.items()}
        # The sink's is set and not added to.
        given = {
            name: x if x is None or (x.flags.c_contiguous and name != "sink") else np.zeros(x.shape, x.dtype)
            for name, x in own.items()
        }
        call(score, arrays, _in_order(rows), grad_dtype, [given.get(name) for name in GRADIENTS], threads)
        for name, x in own.items():
            added = given[name]
            if x is not None and added is not None and added is not x:
                np.add(x, added, out=x)


# Of what the backward reads: out and the gradients of out, scores and weights may have any strides.
_ANY_STRIDES = (0, 6, 9, 10)


def _in_order(known: Arrays) -> list[HostArray | None]:
    """What the backward reads of some rows, in C order where the module wants it so."""
    return [x if x is None or i in _ANY_STRIDES else np.ascontiguousarray(x) for i, x in enumerate(known)]


def _parts(problem: Problem, plan: TilePlan, score: Any, arrays: Arrays) -> Iterator[tuple[_Part, Any, Arrays]]:
    """The calls that one call falls into, each with its words."""
    score_shape = problem.score_shape
    _, parts = masks.partition(plan.rest)
    if not parts or 0 in (*score_shape.rows, score_shape.key_len):
        yield _Part(0, score_shape.query_len), score, arrays
        return
    strips = _Strips.of(problem, plan, reduce(And, parts))
    places = [None] if strips.only or problem.dropout is None else list(np.ndindex(*score_shape.rows[:-1]))
    for first in range(0, score_shape.query_len, strips.count):
        last = min(first + strips.count, score_shape.query_len)
        whole = list(arrays)
        whole[_MASK] = strips.evaluated(first, last)
        for number, place in enumerate(places):
            part = _Part(first, last, place)
            own = [part.of(x, kind) for x, kind in zip(whole, _INPUTS.values(), strict=True)]
            # The mask's rows are those of the strip already.
            own[_MASK] = _Part(0, last - first, place).of(whole[_MASK], _OF_ROWS)
            for name in ("start", "stop"):
                at = inputs.ORDER.index(name)
                own[at] = None if own[at] is None else np.ascontiguousarray(own[at])
            yield part, score if place is None else _moved(score, number * score_shape.query_len + first), own


def _moved(score: Any, rows: int) -> Any:
    """The score with a seed that says of row i what the own one says of row i + `rows`.

    The hash adds the low words of row and seed, wrapped, and later the high ones (csrc/visibility-inl.h). No call has
    2^32 rows, so none of its rows carries.
    """
    *rest, seed = score
    low, high = (seed + rows) & 0xFFFFFFFF, ((seed >> 32) + (rows >> 32)) & 0xFFFFFFFF
    return (*rest, low | high << 32)


def rows_of_strip(problem: Problem, shape: tuple[int, ...]) -> int:
    """How many rows are evaluated together of a mask of this shape; all, where they are alike or few."""
    *lead, height, width = shape
    count = max(FEWEST, HELD // max(1, math.prod(lead) * width) // FEWEST * FEWEST)
    return problem.score_shape.query_len if height == 1 else min(count, problem.score_shape.query_len)


@dataclass(frozen=True, eq=False)
class _Strips:
    """How a mask is evaluated: so many rows at a time, into one array of bytes."""

    problem: Problem
    plan: TilePlan
    mask: Mask
    count: int
    held: HostArray

    @staticmethod
    def of(problem: Problem, plan: TilePlan, mask: Mask) -> _Strips:
        score_shape = problem.score_shape
        shape = masks.evaluated_shape(problem.ops, score_shape, problem.value, mask)
        *lead, height, width = (1,) * (len(score_shape.rows) + 1 - len(shape)) + tuple(shape)
        count = rows_of_strip(problem, shape)
        held = np.empty((*lead, min(height, count), width), np.uint8)
        return _Strips(problem, plan, mask, count, held)

    @property
    def only(self) -> bool:
        """Whether there is one."""
        return self.count == self.problem.score_shape.query_len

    def evaluated(self, first: int, last: int) -> HostArray:
        """Who sees whom of some rows; what their pieces hide is left as it is."""
        *lead, height, width = self.held.shape
        start, stop = self._seen_keys(first, last)
        step = min(MOST, max(1, PAIRS // max(1, math.prod(lead) * (stop - start))))
        if height == 1:
            # All rows are alike, and one tells of them.
            step = last - first
        for row in range(first, last, step):
            end = min(row + step, last)
            start, stop = self._seen_keys(row, end)
            if stop <= start:
                continue
            context = self.problem.ops, self.problem.score_shape, self.problem.value
            block = masks.evaluate(*context, self.mask, (row, min(end - row, height)), (start, stop - start))
            into = self.held[..., start:stop] if width > 1 else self.held
            into[..., row - first : end - first, :] = self.problem.ops.memory(block).view(np.uint8)
        return self.held[..., : last - first, :]

    def _seen_keys(self, first: int, last: int) -> tuple[int, int]:
        """Keys outside which none of some rows sees one."""
        interval_set = self.plan.interval_set
        if interval_set is None:
            return 0, self.problem.score_shape.key_len
        start, stop = (x[..., first:last] for x in (interval_set.start, interval_set.stop))
        alive = stop > start
        return (int(start[alive].min()), int(stop[alive].max())) if alive.any() else (0, 0)
