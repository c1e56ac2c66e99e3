"""A mask in the words of the native module: a few intervals of keys per row, one array of booleans, one id a position.

- What is neither is evaluated a strip of rows at a time: when the call runs (``native_strips``), or in the program
  that is being traced (``native_loops``).
- What is left to the streaming kernel is said (`reasons`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, broadcast, is_unknown
from attnscore.core.problem import Problem
from attnscore.core.tiled import operands
from attnscore.kernels.native.xla_callback import arrays_of
from attnscore.masks import And, Dense, Documents, KeyPadding, Mask, MaskFunction, Not, Or, parts_of
from attnscore.masks.dynamic_intervals import without_later_pieces
from attnscore.masks.index_values import host_ints, per_batch


def reasons(problem: Problem, rest: Mask) -> list[str]:
    """Why `rest`, what a mask is besides its pieces, cannot be told."""
    ops = problem.ops
    found = [] if isinstance(rest, (Dense, Documents, KeyPadding)) else _reasons_of_parts(problem, rest)
    if not all(ops.has_cpu_buffer(ops.asarray(x, problem.value)) for x in rest.arrays().values()):
        found.append("a mask whose memory the CPU cannot read")
    return found


def _reasons_of_parts(problem: Problem, rest: Mask) -> list[str]:
    ops, own = problem.ops, operands(problem).values()
    # A tape around what is traced is gone by the time that a kernel runs.
    if not ops.needs_host_callback(*map(ops.stop_gradient, own), *arrays_of(problem)[len(own) :]):
        return []
    left = without_later_pieces(problem, rest)
    if not ops.custom_calls():
        return [f"a function that NumPy cannot call while a graph runs: {x!r}" for x in _functions_in(left)]
    if problem.dropout is None or not left:
        return []
    _, parts = divided_in_program(problem, reduce(And, left))
    return [f"dropout in a program, under a mask that has to be evaluated: {part!r}" for part in parts]


Parts = list[Mask]


def divided(rest: Mask | None) -> tuple[Parts, Parts]:
    """The masks of which `rest` is an AND: those that are told as they are, and those that have to be evaluated."""
    if rest is None or isinstance(rest, (Dense, Documents, KeyPadding)):
        return [] if rest is None else [rest], []
    parts = _Parts.of(parts_of(rest))
    told: Parts = [*parts.keys, *parts.documents]
    alone = len(parts.arrays) == 1 and isinstance(parts.arrays[0], Dense)
    return ([*told, *parts.arrays], []) if alone else (told, parts.arrays)


def divided_in_program(problem: Problem, rest: Mask | None) -> tuple[Parts, Parts]:
    """The same in a program that is being traced: what is as small there as an array that was given is told whole."""
    told, left = divided(rest)
    documents = [part for part in told if isinstance(part, Documents)]
    if len(documents) > 1 and any(host_ints(x) is None for part in documents for x in ids_of(part)):
        # Ids that are equal where those of all documents are can be made of numbers that are known.
        told = [part for part in told if part not in documents[1:]]
        return told, [*left, *documents[1:]]
    return ([*told, *left], []) if _fits(problem, left) else (told, left)


def arrays(problem: Problem, told: Parts, *, beside: bool) -> dict[str, Array]:
    """What masks are to the module, `beside` an array for those that are not among them.

    ``mask`` on the axes of the grid, ``query_ids`` and ``key_ids`` over the batch.
    """
    ops, score_shape, like, parts = problem.ops, problem.score_shape, problem.value, _Parts.of(told)
    found: dict[str, Array] = {}
    if parts.documents:
        ids = _joined_ids(parts.documents)
        found = {name: per_batch(ops, score_shape, x, like, flat=True) for name, x in zip(_IDS, ids, strict=True)}
    for keys in parts.keys:
        padding = _booleans(problem, keys)
        if not parts.arrays and not beside:
            placed = score_shape.batch_to_canonical(ops, ops.expand_dims(padding, 1))
            found["mask"] = ops.logical_and(found["mask"], placed) if "mask" in found else placed
            continue
        # Beside an array of pairs, which it would make larger by the batch: an id that nobody has.
        if not found:
            shapes = ((1, score_shape.query_len), (1, score_shape.key_len))
            found = {name: ops.zeros(shape, like, "int64") for name, shape in zip(_IDS, shapes, strict=True)}
        found["key_ids"] = ops.where(padding, found["key_ids"], -1)
    for part in parts.arrays:
        pairs = seen(problem, part)
        found["mask"] = ops.logical_and(found["mask"], pairs) if "mask" in found else pairs
    return found


_IDS: Final = ("query_ids", "key_ids")

Span = tuple[int, int]


@dataclass(frozen=True)
class _Parts:
    """The masks whose AND a mask is, by what the module has for them."""

    keys: list[KeyPadding]
    documents: list[Documents]
    arrays: list[Mask]

    @staticmethod
    def of(parts: Sequence[Mask]) -> _Parts:
        keys = [part for part in parts if isinstance(part, KeyPadding)]
        documents = [part for part in parts if isinstance(part, Documents)]
        return _Parts(keys, documents, [part for part in parts if not isinstance(part, (KeyPadding, Documents))])


def _functions_in(masks: Sequence[Mask]) -> list[Mask]:
    """What is the caller's own code among masks."""
    found: list[Mask] = []
    for mask in masks:
        if isinstance(mask, (And, Or)):
            found += _functions_in((mask.first, mask.second))
        elif isinstance(mask, Not):
            found += _functions_in((mask.mask,))
        elif isinstance(mask, MaskFunction) or not type(mask).__module__.startswith("attnscore."):
            found.append(mask)
    return found


def ids_of(mask: Documents) -> tuple[Any, Any]:
    """The ids of queries and keys."""
    return mask.query_ids, mask.query_ids if mask.key_ids is None else mask.key_ids


def _joined_ids(documents: Sequence[Documents]) -> tuple[Any, Any]:
    """Ids that are equal where those of all documents are."""
    if len(documents) == 1:
        return ids_of(documents[0])
    pairs = [[np.atleast_2d(np.asarray(host_ints(x))) for x in ids_of(part)] for part in documents]
    batch = max(len(x) for pair in pairs for x in pair)
    joined, nobody = np.zeros((), np.int64), np.zeros((), bool)
    for pair in pairs:
        ids = np.concatenate([np.broadcast_to(x, (batch, x.shape[-1])) for x in pair], -1)
        nobody = nobody | (ids < 0)
        number = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
        joined = joined * (number.max(initial=0) + 1) + number
        # Numbered anew, so that no product leaves the 64 bits.
        joined = np.unique(joined, return_inverse=True)[1].reshape(ids.shape)
    joined = np.where(nobody, -1, joined)
    query_len = pairs[0][0].shape[-1]
    return joined[:, :query_len], joined[:, query_len:]


# ---- arrays of booleans


def _fits(problem: Problem, parts: Sequence[Mask]) -> bool:
    """Whether their AND has no more elements than the largest of the arrays in them."""
    shapes = [shape_of(problem, part) for part in parts]
    if any(is_unknown(n) for shape in shapes for n in shape):
        return False
    most = max((_held(x) for part in parts for x in _dense_of(part)), default=0)
    return not parts or math.prod(np.broadcast_shapes(*shapes)) <= most


def _dense_of(mask: Mask) -> list[Array]:
    if isinstance(mask, (And, Or)):
        return [*_dense_of(mask.first), *_dense_of(mask.second)]
    if isinstance(mask, Not):
        return _dense_of(mask.mask)
    return [mask.array] if isinstance(mask, Dense) else []


def _held(array: Any) -> int:
    """The elements of an array that lie in memory: axes that are broadcast have one."""
    host = backends.host(array)
    if host is None:
        return 0 if any(map(is_unknown, array.shape)) else math.prod(array.shape)
    return math.prod(n for n, stride in zip(host.shape, host.strides, strict=True) if stride)


def _booleans(problem: Problem, mask: KeyPadding | Dense) -> Array:
    array = problem.ops.asarray(mask.array, problem.value)
    return array if problem.ops.dtype(array) == "bool" else array != 0


def seen(problem: Problem, mask: Mask, rows: Span | None = None, cols: Span | None = None) -> Array:
    """A mask on the axes of the grid, or some of its rows and columns (first, count); arrays as they lie."""
    ops, score_shape, like = problem.ops, problem.score_shape, problem.value
    if isinstance(mask, (And, Or)):
        both = [seen(problem, part, rows, cols) for part in (mask.first, mask.second)]
        return ops.logical_and(*both) if isinstance(mask, And) else ops.logical_or(*both)
    if isinstance(mask, Not):
        return ~seen(problem, mask.mask, rows, cols)
    if isinstance(mask, Dense):
        array = score_shape.to_canonical(ops, _booleans(problem, mask))
        for axis, span in ((-2, rows), (-1, cols)):
            if span is not None and array.shape[axis] > 1:
                array = ops.slice_axis(array, axis, *span)
        return array
    (row, height), (col, width) = rows or (0, score_shape.query_len), cols or (0, score_shape.key_len)
    down, across = (
        ops.reshape(ops.positions(row, height, like), (-1, 1)),
        ops.reshape(ops.positions(col, width, like), (1, -1)),
    )
    return mask.visible(ops, score_shape, down, across)


def shape_of(problem: Problem, mask: Mask) -> tuple[Any, ...]:
    """The shape that `seen` gives."""
    ops, score_shape, like = problem.ops, problem.score_shape, problem.value
    if isinstance(mask, (And, Or)):
        return broadcast(shape_of(problem, mask.first), shape_of(problem, mask.second))
    if isinstance(mask, Not):
        return shape_of(problem, mask.mask)
    if isinstance(mask, Dense):
        return tuple(ops.shape(score_shape.to_canonical(ops, ops.asarray(mask.array, like))))
    if is_unknown(score_shape.query_len) or is_unknown(score_shape.key_len):
        return score_shape.query_len, score_shape.key_len
    # By asking for a corner.
    rows, cols = min(score_shape.query_len, 2), min(score_shape.key_len, 2)
    index = ops.reshape(ops.positions(0, rows, like), (-1, 1)), ops.reshape(ops.positions(0, cols, like), (1, -1))
    *lead, height, width = ops.shape(mask.visible(ops, score_shape, *index))
    return (*lead, score_shape.query_len if height == 2 else height, score_shape.key_len if width == 2 else width)
