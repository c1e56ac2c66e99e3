"""Evaluated masks for the native module: one call for each chunk of queries.

- Each call of the module takes a chunk of queries and an array of booleans for them. Only the booleans of one chunk are
  in memory at a time, linear in the lengths.
- All chunks fill the same arrays: each writes its rows and adds to the gradients of the keys. The result is that of a
  single call. Chunks depend on shapes alone, so results do not depend on the number of threads.
- In a traced program the chunks are a loop of custom calls, for which the program computes the booleans (`Loop`).
- Dropout numbers the rows through all matrices of a call (a matrix: one head of one batch entry). With several chunks
  there is one call for each chunk of each matrix, whose seed is offset by the number of its first row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from attnscore.backends.base import Array, HostArray
from attnscore.base import thresholds
from attnscore.kernels.native import marshalling
from attnscore.kernels.native.marshalling import BACKWARD_INPUTS, GRADIENTS, STATISTICS
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import And, Mask, lowering
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import Role

Arrays = Sequence[HostArray | None]
MaskArrays = dict[str, Array]
"""Arrays of the mask by the module's names: start, stop, mask, query_ids, key_ids."""


class _AxisRoles(NamedTuple):
    """Meaning of the axes of an array."""

    lead: Literal["matrix", "batch", "heads"]
    """Leading axes: (*lead, head, group), (batch,) or (head, group)."""
    row: int | None = None
    """Axis of the queries; None where there is none."""
    is_bias: bool = False
    """Whether the array may be a relative bias, or its gradient."""


_BY_QUERY, _BY_KEY, _BY_HEAD = _AxisRoles("matrix", -2), _AxisRoles("matrix"), _AxisRoles("heads")
_BIAS = _AxisRoles("matrix", -2, is_bias=True)
_INPUTS: Final = {
    **dict.fromkeys(marshalling.ORDER, _BY_KEY),
    **dict.fromkeys(("query", "query_bias", "mask"), _BY_QUERY),
    "bias": _BIAS,
    **dict.fromkeys(("query_ids", "start", "stop"), _AxisRoles("batch", -1)),
    "key_ids": _AxisRoles("batch"),
    **dict.fromkeys(("w_v", "sink", "scales"), _BY_HEAD),
}
_GRADIENTS: Final = {
    **dict.fromkeys(GRADIENTS, _BY_KEY),
    "query": _BY_QUERY,
    "bias": _BIAS,
    "query_bias": _AxisRoles("matrix", -1),
}
_MASK: Final = marshalling.ORDER.index("mask")


@dataclass(frozen=True)
class _Part:
    """Rows [first, last) of all matrices, or of the one with index `place` along the leading axes."""

    first: int
    last: int
    place: tuple[int, ...] | None = None
    relative_to: int | None = None
    """Number of queries of the whole call where the bias is relative; None otherwise."""

    def of(self, x: HostArray | None, roles: _AxisRoles) -> HostArray | None:
        """Return this part of an array, as a view."""
        if x is None:
            return None
        index = [slice(None)] * x.ndim
        if roles.row is not None and x.shape[roles.row] > 1:
            index[roles.row] = slice(self.first, self.last)
        if roles.is_bias and self.relative_to is not None:
            index[-1] = slice(self.relative_to - self.last, x.shape[-1] - self.first)
        if self.place is not None:
            for axis, number in _axes(self.place, x.ndim, roles):
                if x.shape[axis] > 1:
                    index[axis] = slice(number, number + 1)
        return x[tuple(index)]


def _axes(place: tuple[int, ...], count: int, roles: _AxisRoles) -> list[tuple[int, int]]:
    """Return (axis, index along it) for each leading axis of an array with `count` axes, for the matrix at `place`."""
    if roles.lead == "matrix":
        return list(enumerate(place))
    if roles.lead == "batch":
        return [(-2, place[0])]
    # One vector of weights for all heads has no axis of heads.
    return list(enumerate(place[-2:])) if count > 1 else []


def forward(
    call: Callable[..., None],
    problem: Problem,
    tiles: TilePlan,
    marshalled: tuple[Any, Any],
    filled: Arrays,
    threads: int,
) -> None:
    """Run ``call(*marshalled, filled, threads)``, the module's forward, by chunks."""
    for part, score, arrays in _parts(problem, tiles, *marshalled):
        views = [part.of(x, _BY_QUERY) for x in filled]
        given = [x if x is None or x.flags.c_contiguous else np.empty(x.shape, x.dtype) for x in views]
        call(score, arrays, given, threads)
        for x, found in zip(views, given, strict=True):
            if x is not None and found is not x:
                x[...] = found


def backward(
    call: Callable[..., None],
    problem: Problem,
    tiles: TilePlan,
    marshalled: tuple[Any, Any],
    known: Arrays,
    grad_dtype: str,
    buffers: dict[str, HostArray],
    threads: int,
) -> None:
    """Run ``call(*marshalled, known, grad_dtype, buffers, threads)``, the module's backward, by chunks."""
    for part, score, arrays in _parts(problem, tiles, *marshalled):
        rows = [part.of(x, _BY_QUERY) for x in known]
        views = {name: part.of(x, _GRADIENTS[name]) for name, x in buffers.items()}
        # The module overwrites the gradient of the sink and adds to the others.
        given = {
            name: x if x is None or (x.flags.c_contiguous and name != "sink") else np.zeros(x.shape, x.dtype)
            for name, x in views.items()
        }
        call(score, arrays, _in_order(rows), grad_dtype, [given.get(name) for name in GRADIENTS], threads)
        for name, x in views.items():
            added = given[name]
            if x is not None and added is not None and added is not x:
                np.add(x, added, out=x)


# Inputs of the backward that may have any strides.
_ANY_STRIDES = frozenset(("out", "grad_out", "grad_attention_scores", "grad_attention_weights"))


def _in_order(known: Arrays) -> list[HostArray | None]:
    """Return the inputs of the backward in C order, as the module requires it of those not in `_ANY_STRIDES`."""
    return [
        x if x is None or name in _ANY_STRIDES else np.ascontiguousarray(x)
        for name, x in zip(BACKWARD_INPUTS, known, strict=True)
    ]


def _parts(problem: Problem, tiles: TilePlan, score: Any, arrays: Arrays) -> Iterator[tuple[_Part, Any, Arrays]]:
    """Yield the parts of a call, each with the score and arrays of its call of the module."""
    score_shape = problem.score_shape
    _, parts = lowering.partition(tiles.rest)
    if not parts or 0 in (*score_shape.rows, score_shape.key_len):
        yield _Part(0, score_shape.query_len), score, arrays
        return
    chunks = _Chunks.of(problem, tiles, reduce(And, parts))
    places = [None] if chunks.is_single or problem.dropout is None else list(np.ndindex(*score_shape.rows[:-1]))
    for first in range(0, score_shape.query_len, chunks.count):
        last = min(first + chunks.count, score_shape.query_len)
        whole = list(arrays)
        whole[_MASK] = chunks.evaluated(first, last)
        for number, place in enumerate(places):
            part = _Part(first, last, place, score_shape.query_len if problem.has_relative_bias else None)
            views = [part.of(x, roles) for x, roles in zip(whole, _INPUTS.values(), strict=True)]
            # The rows of the mask are those of the chunk already.
            views[_MASK] = _Part(0, last - first, place).of(whole[_MASK], _BY_QUERY)
            for name in ("start", "stop"):
                at = marshalling.ORDER.index(name)
                views[at] = None if views[at] is None else np.ascontiguousarray(views[at])
            part_score = score
            if place is not None:
                part_score = _with_row_offset(score, number * score_shape.query_len + first)
            yield part, part_score, views


def _with_row_offset(score: Any, rows: int) -> Any:
    """Return the score with another seed, under which row i has the dropout of row i + `rows` under the given one.

    The hash adds the low 32 bits of row and seed, wrapped, and later the high ones (csrc/kernels/masking-inl.h). No
    call has 2^32 rows, so no addition of a row carries.
    """
    *rest, seed = score
    low, high = (seed + rows) & 0xFFFFFFFF, ((seed >> 32) + (rows >> 32)) & 0xFFFFFFFF
    return (*rest, low | high << 32)


def chunk_size(problem: Problem, shape: tuple[int, ...]) -> int:
    """Return how many queries of a mask of this shape make a chunk: all where one row serves all, or where they fit."""
    *lead, height, width = shape
    count = max(
        thresholds.CHUNK_ROWS,
        thresholds.CHUNK_BYTES // max(1, math.prod(lead) * width) // thresholds.CHUNK_ROWS * thresholds.CHUNK_ROWS,
    )
    return problem.score_shape.query_len if height == 1 else min(count, problem.score_shape.query_len)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Evaluation of a mask, `count` queries at a time, into the array of bytes `held`."""

    problem: Problem
    tiles: TilePlan
    mask: Mask
    count: int
    held: HostArray

    @staticmethod
    def of(problem: Problem, tiles: TilePlan, mask: Mask) -> _Chunks:
        score_shape = problem.score_shape
        shape = lowering.evaluated_shape(problem.ops, score_shape, problem.value, mask)
        *lead, height, width = (1,) * (len(score_shape.rows) + 1 - len(shape)) + tuple(shape)
        count = chunk_size(problem, shape)
        held = np.empty((*lead, min(height, count), width), np.uint8)
        return _Chunks(problem, tiles, mask, count, held)

    @property
    def is_single(self) -> bool:
        """Whether there is only one chunk."""
        return self.count == self.problem.score_shape.query_len

    def evaluated(self, first: int, last: int) -> HostArray:
        """Return the mask of the rows [first, last); pairs outside the intervals are neither written nor read."""
        *lead, height, width = self.held.shape
        start, stop = self._key_range(first, last)
        step = min(
            thresholds.EVALUATED_ROWS, max(1, thresholds.EVALUATED_PAIRS // max(1, math.prod(lead) * (stop - start)))
        )
        if height == 1:
            # All rows are equal, and one is evaluated.
            step = last - first
        for row in range(first, last, step):
            end = min(row + step, last)
            start, stop = self._key_range(row, end)
            if stop <= start:
                continue
            context = self.problem.ops, self.problem.score_shape, self.problem.value
            block = lowering.evaluate(*context, self.mask, (row, min(end - row, height)), (start, stop - start))
            into = self.held[..., start:stop] if width > 1 else self.held
            into[..., row - first : end - first, :] = self.problem.ops.memory(block).view(np.uint8)
        return self.held[..., : last - first, :]

    def _key_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of keys outside which the rows [first, last) are masked."""
        interval_set = self.tiles.interval_set
        if interval_set is None:
            return 0, self.problem.score_shape.key_len
        start, stop = (x[..., first:last] for x in (interval_set.start, interval_set.stop))
        alive = stop > start
        return (int(start[alive].min()), int(stop[alive].max())) if alive.any() else (0, 0)


@dataclass(frozen=True, eq=False)
class Loop:
    """A problem of a traced program in chunks of queries, whose starts may be traced: each chunk is a custom call."""

    problem: Problem
    mask_arrays: MaskArrays
    """Arrays of the parts of the mask that the module reads without evaluation."""
    mask: Mask
    """Part of the mask that has to be evaluated."""

    def over(self, visit: Callable[[dict[str, Array], Any, int], dict[str, Array]], carry: dict[str, Array]) -> Any:
        """Fold ``carry = visit(carry, start, size)`` over the chunks."""
        ops, length = self.problem.ops, self.problem.score_shape.query_len
        score_shape, value = self.problem.score_shape, self.problem.value
        count = chunk_size(self.problem, lowering.evaluated_shape(ops, score_shape, value, self.mask))
        full, tail = divmod(length, max(1, count))
        carry = ops.loop(full, lambda i, found: visit(found, i * count, count), carry)
        return visit(carry, full * count, tail) if tail else carry

    def part(self, start: Any, size: int) -> tuple[Problem, MaskArrays]:
        """Return the problem of a chunk, and the arrays of its mask."""
        problem, ops = self.problem, self.problem.ops

        def cut(x: Array, role: Role) -> Array:
            return self.rows(x, start, size) if role == "query" else x

        score_shape = dataclasses.replace(problem.score_shape, query_len=size)
        # `query` stays: the lowered form has it, and outside a gradient hook it may belong to another tape.
        part = dataclasses.replace(
            problem,
            layout=dataclasses.replace(problem.layout, score_shape=score_shape),
            form=problem.form.part(cut),
            bias=None if problem.bias is None else self.bias(problem.bias, start, size),
            mask=None,
        )
        mask_arrays = {
            name: x if name == "key_ids" else ops.slice_axis(x, -1, start, size) for name, x in self.mask_arrays.items()
        }
        evaluated = lowering.evaluate(ops, problem.score_shape, problem.value, self.mask, (start, size))
        missing = len(score_shape.rows) + 1 - len(evaluated.shape)
        return part, mask_arrays | {"mask": ops.reshape(evaluated, (*(1,) * missing, *evaluated.shape))}

    def rows(self, x: Array, start: Any, size: int) -> Array:
        """Return the rows of a chunk; an array that is broadcast over rows stays as it is."""
        return x if x.shape[-2] == 1 else self.problem.ops.slice_axis(x, -2, start, size)

    def bias(self, x: Array, start: Any, size: int) -> Array:
        """Return the bias of a chunk."""
        if not self.problem.has_relative_bias:
            return self.rows(x, start, size)
        first = self.problem.score_shape.query_len - start - size
        return self.problem.ops.slice_axis(x, -1, first, size + self.problem.score_shape.key_len - 1)


def staged_forward(loop: Loop, call: Callable[[Problem, MaskArrays], Result]) -> Result:
    """Run `call` on each chunk."""
    problem, ops = loop.problem, loop.problem.ops
    rows = (*problem.score_shape.rows, 1)
    wanted = ("row_max", "log_denom", *(name for name in STATISTICS if name in problem.statistics))
    whole = {name: ops.zeros(rows, problem.value, problem.accumulator) for name in wanted}
    whole["out"] = ops.zeros((*rows[:-1], problem.layout.value_dim), problem.value, problem.dtype)
    if problem.matrix is not None:
        whole["matrix"] = ops.zeros((*rows[:-1], problem.score_shape.key_len), problem.value, problem.accumulator)

    def visit(carry: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        found = call(*loop.part(start, size))
        parts = {"out": found.out, "row_max": found.row_max, "log_denom": found.log_denom, "matrix": found.matrix}
        parts |= found.statistics
        return {name: ops.add_at(x, -2, start, parts[name]) for name, x in carry.items()}

    found = loop.over(visit, whole)
    matrix = found.pop("matrix", None)
    return Result(found.pop("out"), found.pop("row_max"), found.pop("log_denom"), found, matrix)


def staged_backward(
    loop: Loop,
    result: Result,
    grads: RowGradients,
    wanted: frozenset[str],
    call: Callable[[Problem, MaskArrays, Result, RowGradients], dict[str, Array]],
) -> dict[str, Array]:
    """Run `call` on each chunk, and sum the gradients."""
    problem, ops = loop.problem, loop.problem.ops
    arrays = {name: x for name, x in problem.operands().items() if name in wanted}
    roles = {name: problem.form.role(name) for name in problem.form.arrays()}
    of_rows = {name for name, x in arrays.items() if (name == "bias" or roles.get(name) == "query") and x.shape[-2] > 1}
    is_relative = problem.has_relative_bias
    whole = {name: ops.zeros(tuple(x.shape), result.row_max, problem.accumulator) for name, x in arrays.items()}

    def visit(carry: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        def cut(x: Array | None) -> Any:
            return None if x is None else loop.rows(x, start, size)

        statistics = {name: cut(x) for name, x in result.statistics.items()}
        known = Result(cut(result.out), cut(result.row_max), cut(result.log_denom), statistics, cut(result.matrix))
        incoming = RowGradients(cut(grads.out), cut(grads.log_sum_exp), cut(grads.entropy), cut(grads.matrix))
        found = call(*loop.part(start, size), known, incoming)

        def added(name: str, x: Array) -> Array:
            if name == "bias" and is_relative:
                return ops.add_at(x, -1, problem.score_shape.query_len - start - size, found[name])
            return ops.add_at(x, -2, start, found[name]) if name in of_rows else x + found[name]

        return {name: added(name, x) for name, x in carry.items()}

    done: dict[str, Array] = loop.over(visit, whole)
    return done
