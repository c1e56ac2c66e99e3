"""A mask in the words of the native module: a few intervals of keys per row, one array of booleans, one id a position.

- No array is made that is larger than the largest that the caller gave; what is made is made at the call, and held by
  nobody.
- What cannot be told so is said (`reasons`), and is left to the streaming kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from attnscore import frameworks
from attnscore.frameworks.contract import Array, broadcast, is_unknown
from attnscore.kernels.native_traced import without_later_pieces
from attnscore.masking import And, Dense, Documents, KeyPadding, Mask, Not, Or, parts_of
from attnscore.masking.numbers import host_ints, per_batch
from attnscore.problem import Problem

# Pairs that are evaluated together: what a mask computes on its way may take 8 bytes each, its answer takes 1.
_PAIRS = 2**20


def reasons(problem: Problem, rest: Mask) -> list[str]:
    """Why `rest`, what a mask is besides its pieces, cannot be told."""
    ops = problem.ops
    found = [] if isinstance(rest, (Dense, Documents, KeyPadding)) else _reasons_of_parts(problem, rest)
    if not all(ops.readable(ops.asarray(x, problem.value)) for x in rest.arrays().values()):
        found.append("a mask whose memory the CPU cannot read")
    return found


def _reasons_of_parts(problem: Problem, rest: Mask) -> list[str]:
    ops = problem.ops
    deferred = ops.deferred(problem.value, *rest.leaves())
    parts = _Parts.of(without_later_pieces(problem, rest) if deferred else parts_of(rest))
    found = _reasons_of_arrays(problem, parts.arrays)
    ids = [x for part in parts.documents for x in ids_of(part)]
    if len(parts.documents) > 1 and deferred and ops.custom_calls() and any(host_ints(x) is None for x in ids):
        found.append(f"{len(parts.documents)} Documents in one mask, whose ids are traced")
    return found


def arrays(problem: Problem, rest: Mask) -> dict[str, Array]:
    """What `rest` is to the module: ``mask`` on the axes of the grid, ``query_ids`` and ``key_ids`` over the batch."""
    if isinstance(rest, Dense):
        return {"mask": _seen(problem, rest)}
    ops, grid, like, parts = problem.ops, problem.grid, problem.value, _Parts.of(parts_of(rest))
    found: dict[str, Array] = {}
    if parts.documents:
        ids = _joined_ids(parts.documents)
        found = {name: per_batch(ops, grid, x, like, flat=True) for name, x in zip(_IDS, ids, strict=True)}
    for keys in parts.keys:
        seen = _booleans(problem, keys)
        if not parts.arrays:
            placed = grid.place_batch(ops, ops.expand_dims(seen, 1))
            found["mask"] = ops.logical_and(found["mask"], placed) if "mask" in found else placed
            continue
        # Beside an array of pairs, which it would make larger by the batch: an id that nobody has.
        if not found:
            shapes = ((1, grid.query_len), (1, grid.key_len))
            found = {name: ops.zeros(shape, like, "int64") for name, shape in zip(_IDS, shapes, strict=True)}
        found["key_ids"] = ops.where(seen, found["key_ids"], -1)
    for part in parts.arrays:
        seen = _seen(problem, part)
        found["mask"] = ops.logical_and(found["mask"], seen) if "mask" in found else seen
    return found


_IDS: Final = ("query_ids", "key_ids")


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


def ids_of(mask: Documents) -> tuple[Any, Any]:
    """The ids of queries and keys."""
    return mask.query_ids, mask.query_ids if mask.key_ids is None else mask.key_ids


def _joined_ids(documents: Sequence[Documents]) -> tuple[Any, Any]:
    """Ids that are equal where those of all documents are."""
    if len(documents) == 1:
        return ids_of(documents[0])
    pairs = [[np.atleast_2d(host_ints(x)) for x in ids_of(part)] for part in documents]  # type: ignore[arg-type]
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


def _reasons_of_arrays(problem: Problem, parts: Sequence[Mask]) -> list[str]:
    """Several, or what has to be evaluated, as one array that is no larger than the largest of them."""
    if not parts or (len(parts) == 1 and isinstance(parts[0], Dense)):
        return []
    largest = max((_held(x) for part in parts for x in _dense_of(part)), default=0)
    alone = [part for part in parts if not isinstance(part, Dense) and not _fits(problem, [part], largest)]
    if alone:
        return [f"the mask is neither a few intervals of keys per row nor one array: {part!r}" for part in alone]
    return [] if _fits(problem, parts, largest) else [f"{len(parts)} arrays in one mask, larger together than any"]


def _fits(problem: Problem, parts: Sequence[Mask], most: int) -> bool:
    shapes = [_shape(problem, part) for part in parts]
    if any(is_unknown(n) for shape in shapes for n in shape):
        return False
    return math.prod(np.broadcast_shapes(*shapes)) <= most


def _dense_of(mask: Mask) -> list[Array]:
    if isinstance(mask, (And, Or)):
        return [*_dense_of(mask.first), *_dense_of(mask.second)]
    if isinstance(mask, Not):
        return _dense_of(mask.mask)
    return [mask.array] if isinstance(mask, Dense) else []


def _held(array: Any) -> int:
    """The elements of an array that lie in memory: axes that are broadcast have one."""
    host = frameworks.host(array)
    if host is None:
        return 0 if any(map(is_unknown, array.shape)) else math.prod(array.shape)
    return math.prod(n for n, stride in zip(host.shape, host.strides, strict=True) if stride)


def _booleans(problem: Problem, mask: KeyPadding | Dense) -> Array:
    array = problem.ops.asarray(mask.array, problem.value)
    return array if problem.ops.dtype(array) == "bool" else array != 0


def _seen(problem: Problem, mask: Mask) -> Array:
    """A mask on the axes of the grid; arrays as they lie."""
    ops, grid, like = problem.ops, problem.grid, problem.value
    if isinstance(mask, (And, Or)):
        both = [_seen(problem, part) for part in (mask.first, mask.second)]
        return ops.logical_and(*both) if isinstance(mask, And) else ops.logical_or(*both)
    if isinstance(mask, Not):
        return ~_seen(problem, mask.mask)
    if isinstance(mask, Dense):
        return grid.place(ops, _booleans(problem, mask))
    cols = ops.reshape(ops.positions(0, grid.key_len, like), (1, -1))
    deferred = ops.deferred(like, *mask.leaves())
    count = grid.query_len if deferred else max(1, min(grid.query_len, _PAIRS // max(1, grid.key_len)))
    blocks = []
    for first in range(0, max(1, grid.query_len), max(1, count)):
        rows = ops.positions(first, min(count, grid.query_len - first), like)
        blocks.append(mask.visible(ops, grid, ops.reshape(rows, (-1, 1)), cols))
        if len(blocks) == 1 and ops.shape(blocks[0])[-2] != count:
            # All rows are alike.
            break
    return blocks[0] if len(blocks) == 1 else ops.concat(blocks, -2)


def _shape(problem: Problem, mask: Mask) -> tuple[Any, ...]:
    """The shape that `_seen` gives."""
    ops, grid, like = problem.ops, problem.grid, problem.value
    if isinstance(mask, (And, Or)):
        return broadcast(_shape(problem, mask.first), _shape(problem, mask.second))
    if isinstance(mask, Not):
        return _shape(problem, mask.mask)
    if isinstance(mask, Dense):
        return tuple(ops.shape(grid.place(ops, ops.asarray(mask.array, like))))
    if is_unknown(grid.query_len) or is_unknown(grid.key_len):
        return grid.query_len, grid.key_len
    # By asking for a corner.
    rows, cols = min(grid.query_len, 2), min(grid.key_len, 2)
    index = ops.reshape(ops.positions(0, rows, like), (-1, 1)), ops.reshape(ops.positions(0, cols, like), (1, -1))
    *lead, height, width = ops.shape(mask.visible(ops, grid, *index))
    return (*lead, grid.query_len if height == 2 else height, grid.key_len if width == 2 else width)
