"""Intervals whose numbers are traced, for the native module: known when the call runs.

- In a program that calls the module itself (JAX) they are arrays of the program, one number a row each: what a row
  sees is an interval less holes, and so are ANDs of such sets, the complement of an interval and the union of two.
- Where the call comes back to Python they are pieces then. Which masks stay few pieces whatever the numbers are is
  told by their form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore.backends.base import Array
from attnscore.core.problem import Problem
from attnscore.masks import And, Causal, KeyRange, Mask, Not, Or, PrefixLM, SlidingWindow, ValidLens, parts_of
from attnscore.masks.intervals import MOST

# Masks that are one interval a row once their numbers are known.
_INTERVALS = (Causal, KeyRange, PrefixLM, SlidingWindow, ValidLens)

# Numbers stop at the first, widths from the second on are unbounded: the sum of both stays within 32 bits, and no
# sequence is as long as their difference.
_FAR, _WIDE = 2**30, 2**29

Ends = tuple[Array, Array]


@dataclass(frozen=True)
class _Traced:
    """Start and stop of each row, (batch or 1, query or 1) each, and those of holes in between."""

    ends: Ends
    holes: tuple[Ends, ...] = ()


def without_later_pieces(problem: Problem, rest: Mask) -> list[Mask]:
    """The parts of `rest` that are no pieces when the call runs either."""
    parts = parts_of(rest)
    if problem.ops.custom_calls():
        return [part for part in parts if _traced(problem, part) is None]
    known = problem.visibility[0]
    count, left = 1 if known is None else known.count, []
    for part in parts:
        most = _most_pieces(part)
        if most is None or count + most - 1 > MOST:
            left.append(part)
        else:
            count += most - 1
    return left


def _most_pieces(mask: Mask) -> int | None:
    """How many pieces a row may have whatever the numbers are; None where there is no limit."""
    if isinstance(mask, Not):
        inner = _most_pieces(mask.mask)
        return None if inner is None else inner + 1
    if isinstance(mask, (And, Or)):
        first, second = _most_pieces(mask.first), _most_pieces(mask.second)
        return None if first is None or second is None else first + second - isinstance(mask, And)
    return 1 if isinstance(mask, _INTERVALS) else None


def traced_visibility(problem: Problem) -> tuple[Ends | None, Mask | None]:
    """What ``problem.visibility`` is where numbers may be traced: ends, with their holes in front, and the rest."""
    found: _Traced | None = None
    rest: Mask | None = None
    for part in [] if problem.mask is None else parts_of(problem.mask):
        own = _traced(problem, part)
        if own is None:
            rest = part if rest is None else And(rest, part)
        elif found is None:
            found = own
        else:
            found = _Traced(_both(problem, found.ends, own.ends), found.holes + own.holes)
    if found is None:
        return None, rest
    ops, score_shape = problem.ops, problem.score_shape
    pairs = [_clamped(problem, pair) for pair in (found.ends, *found.holes)]
    lengths = {end.shape[0] for pair in pairs for end in pair}
    batch = 0 if 0 in lengths else max(lengths)
    start, stop = ([ops.broadcast_to(pair[i], (batch, score_shape.query_len)) for pair in pairs] for i in (0, 1))
    if not found.holes:
        return (start[0], stop[0]), rest
    start, stop = ([ops.expand_dims(x, 0) for x in ends] for ends in (start, stop))
    return (ops.concat(start, 0), ops.concat(stop, 0)), rest


def _traced(problem: Problem, mask: Mask) -> _Traced | None:
    """None where the mask is not so."""
    score_shape = problem.score_shape
    if (known := mask.interval_set(score_shape.query_len, score_shape.key_len, score_shape.batch)) is not None:
        if known.single is not None:
            return _Traced(_constant(problem, known.single))
        if mask.is_array:
            return None
        around, *holes = (_constant(problem, pair) for pair in zip(*known.with_holes, strict=True))
        return _Traced(around, tuple(holes))
    if isinstance(mask, Not):
        inner = _traced(problem, mask.mask)
        return None if inner is None or inner.holes else _Traced(_everything(problem), (inner.ends,))
    if isinstance(mask, (And, Or)):
        first, second = _traced(problem, mask.first), _traced(problem, mask.second)
        if first is None or second is None:
            return None
        if isinstance(mask, And):
            return _Traced(_both(problem, first.ends, second.ends), first.holes + second.holes)
        return None if first.holes or second.holes else _either(problem, first.ends, second.ends)
    ends = _ends(problem, mask)
    return None if ends is None else _Traced(ends)


def _everything(problem: Problem) -> Ends:
    nothing = problem.ops.zeros((1, 1), problem.value, "int64")
    return nothing, nothing + problem.score_shape.key_len


def _both(problem: Problem, first: Ends, second: Ends) -> Ends:
    return problem.ops.maximum(first[0], second[0]), _least(problem, first[1], second[1])


def _either(problem: Problem, first: Ends, second: Ends) -> _Traced:
    """The interval around two, and the hole between them."""
    ops = problem.ops
    (start, stop), (other, end) = _clamped(problem, first), _clamped(problem, second)
    # An interval without keys stands where the other one does.
    start, stop, other, end = (
        ops.where(start < stop, start, other), ops.where(start < stop, stop, end),
        ops.where(other < end, other, start), ops.where(other < end, end, stop),
    )  # fmt: skip
    around = _least(problem, start, other), ops.maximum(stop, end)
    return _Traced(around, ((_least(problem, stop, end), ops.maximum(start, other)),))


def _least(problem: Problem, first: Array, second: Array) -> Array:
    return -problem.ops.maximum(-first, -second)


def _clamped(problem: Problem, ends: Ends) -> Ends:
    """Within [0, key_len], and no end before its start."""
    start, stop = (_between(problem, end) for end in ends)
    return start, problem.ops.maximum(stop, start)


def _between(problem: Problem, x: Array) -> Array:
    """`x` within [0, key_len]."""
    ops = problem.ops
    return _least(problem, ops.maximum(x, ops.zeros((), x)), ops.full((), problem.score_shape.key_len, x))


def _ends(problem: Problem, mask: Mask) -> Ends | None:
    """Start and stop of one interval whose numbers are traced."""
    score_shape = problem.score_shape
    rows = problem.ops.reshape(problem.ops.positions(0, score_shape.query_len, problem.value), (1, -1))
    nothing = problem.ops.zeros((1, 1), rows)
    if isinstance(mask, ValidLens):
        stop = _numbers(problem, mask.lens, per_query=True)
        if mask.query_lens is not None:
            stop = problem.ops.where(rows < _numbers(problem, mask.query_lens), stop, 0)
        return nothing, stop
    if isinstance(mask, KeyRange):
        return _numbers(problem, mask.start), _numbers(problem, mask.stop)
    if isinstance(mask, PrefixLM):
        return nothing, problem.ops.maximum(_numbers(problem, mask.prefix_lens), rows + 1)
    if isinstance(mask, Causal):
        return nothing, rows + _numbers(problem, mask.offset) + 1
    if isinstance(mask, SlidingWindow):
        middle = rows + _numbers(problem, mask.offset)
        left, right = (None if width is None or width >= _WIDE else width for width in (mask.left, mask.right))
        start = nothing if left is None else middle - left
        return start, nothing + score_shape.key_len if right is None else middle + right + 1
    return None


def _constant(problem: Problem, ends: tuple[Any, Any]) -> Ends:
    """Intervals that are known now; one number where all rows have the same, so that the program holds no more."""
    found = []
    for end in ends:
        same = isinstance(end, np.ndarray) and end.size and (end == end[:, :1]).all()
        x = problem.ops.asarray(end[:, :1] if same else end, problem.value)
        found.append(problem.ops.astype(x, "int64"))
    return found[0], found[1]


def _numbers(problem: Problem, x: Any, *, per_query: bool = False) -> Array:
    """Traced numbers, one or one per batch row (or query), as (batch or 1, query or 1)."""
    ops = problem.ops
    x = ops.astype(ops.asarray(x, problem.value), "int64")
    x = _least(problem, ops.maximum(x, ops.full((), -_FAR, x)), ops.full((), _FAR, x))
    if per_query and len(x.shape) == 1 and not problem.score_shape.has_batch and x.shape[0] > 1:
        return ops.reshape(x, (1, -1))
    return x if len(x.shape) == 2 else ops.reshape(x, (-1, 1))
