"""Masks as kernels read them: a few intervals a query, one boolean array, one document id a position.

- A mask is an AND of parts. Intervals come first (`attnscore.masks.split_intervals`). Of the rest, arrays, key padding
  and document ids are direct operands; all other parts are evaluated by blocks of queries (`evaluate`).
- Nothing here knows a kernel: the functions take the backend, the `ScoreShape`, and `like`, an array on the device.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Final

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape, Span, is_unknown
from attnscore.masks.base import And, Mask, Not, Or, atoms_of, parts_of
from attnscore.masks.builtin import Dense, Documents, KeyPadding
from attnscore.masks.index_values import as_booleans, id_arrays
from attnscore.masks.shape_spec import shape_of

Parts = list[Mask]

_IDS: Final = ("query_ids", "key_ids")


# ---- operands, and masks to evaluate


def partition(remaining: Mask | None) -> tuple[Parts, Parts]:
    """Split `remaining`, a mask without intervals, into parts that are direct operands and parts to evaluate."""
    parts = [] if remaining is None else parts_of(remaining)
    # A position has one id, so that a second mask of documents is evaluated.
    documents = [part for part in parts if isinstance(part, Documents)][:1]
    direct: Parts = [part for part in parts if isinstance(part, KeyPadding) or part in documents]
    others = [part for part in parts if part not in direct]
    # One array is an operand without a copy; the AND of several has to be computed.
    return ([*direct, *others], []) if len(others) == 1 and isinstance(others[0], Dense) else (direct, others)


def partition_staged(ops: Backend, score_shape: ScoreShape, like: Array, remaining: Mask | None) -> tuple[Parts, Parts]:
    """Return the two lists of `partition` for a staged program.

    Here parts to evaluate become operands where their AND takes no more memory than an array that the caller gave: the
    program then computes it once, not in chunks.
    """
    direct, others = partition(remaining)
    return ([*direct, *others], []) if _fits_in_caller_arrays(ops, score_shape, like, others) else (direct, others)


def _fits_in_caller_arrays(ops: Backend, score_shape: ScoreShape, like: Array, parts: Parts) -> bool:
    """Return whether the AND of `parts` has no more elements than the largest array in them."""
    shapes = [evaluated_shape(ops, score_shape, like, part) for part in parts]
    if any(is_unknown(n) for shape in shapes for n in shape):
        return False
    arrays = [shape_of(mask.array) for part in parts for mask in atoms_of(part) if isinstance(mask, Dense)]
    elements = [math.prod(shape) for shape in arrays if not any(map(is_unknown, shape))]
    return not parts or math.prod(np.broadcast_shapes(*shapes)) <= max(elements, default=0)


# ---- operands


def arrays(
    ops: Backend, score_shape: ScoreShape, like: Array, direct: Parts, *, with_evaluated: bool
) -> dict[str, Array]:
    """Return the operands of direct parts: ``mask`` on the canonical axes, ``query_ids`` and ``key_ids`` (batch, n).

    `with_evaluated`: the caller will fill ``mask`` with the evaluated parts, so padding must not use it.
    """
    operands: dict[str, Array] = {}
    documents = next((part for part in direct if isinstance(part, Documents)), None)
    if documents is not None:
        operands = dict(zip(_IDS, id_arrays(ops, documents.ids, like), strict=True))
    others = [part for part in direct if part is not documents and not isinstance(part, KeyPadding)]
    masks: list[Array] = []
    for padding in (part for part in direct if isinstance(part, KeyPadding)):
        keys = as_booleans(ops, padding.array, like)
        if not others and not with_evaluated:
            masks.append(score_shape.batch_to_canonical(ops, ops.expand_dims(keys, 1)))
            continue
        # ANDed to a mask of pairs, the padding would add its batch axis to all pairs. As a negative document id it
        # masks its keys in O(n) memory.
        if not operands:
            shapes = ((1, score_shape.query_len), (1, score_shape.key_len))
            operands = {name: ops.zeros(shape, like, "int64") for name, shape in zip(_IDS, shapes, strict=True)}
        operands["key_ids"] = ops.where(keys, operands["key_ids"], -1)
    masks += [evaluate(ops, score_shape, like, part) for part in others]
    return operands | {"mask": reduce(ops.logical_and, masks)} if masks else operands


# ---- evaluation by blocks


def evaluate(
    ops: Backend, score_shape: ScoreShape, like: Array, mask: Mask, rows: Span | None = None, cols: Span | None = None
) -> Array:
    """Return a mask, or a block of its queries and keys, as booleans on the canonical axes; broadcast axes stay 1."""
    if isinstance(mask, (And, Or)):
        evaluated = [evaluate(ops, score_shape, like, part, rows, cols) for part in (mask.first, mask.second)]
        return ops.logical_and(*evaluated) if isinstance(mask, And) else ops.logical_or(*evaluated)
    if isinstance(mask, Not):
        return ~evaluate(ops, score_shape, like, mask.mask, rows, cols)
    if isinstance(mask, Dense):
        array = score_shape.to_canonical(ops, ops.asarray(mask.array, like))
        for axis, span in ((-2, rows), (-1, cols)):
            if span is not None and array.shape[axis] > 1:
                array = ops.slice_axis(array, axis, *span)
        return array
    rows, cols = rows or (0, score_shape.query_len), cols or (0, score_shape.key_len)
    return mask.visible(ops, score_shape, *_positions(ops, like, rows, cols))


def evaluated_shape(ops: Backend, score_shape: ScoreShape, like: Array, mask: Mask) -> tuple[Any, ...]:
    """Return the shape that `evaluate` gives a mask, without evaluating it; all pairs where a length is unknown."""
    if is_unknown(score_shape.query_len) or is_unknown(score_shape.key_len):
        return score_shape.query_len, score_shape.key_len
    # Evaluating 2 x 2 pairs shows which axes are broadcast.
    rows, cols = (0, min(score_shape.query_len, 2)), (0, min(score_shape.key_len, 2))
    *lead, height, width = ops.shape(mask.visible(ops, score_shape, *_positions(ops, like, rows, cols)))
    return (*lead, score_shape.query_len if height == 2 else height, score_shape.key_len if width == 2 else width)


def _positions(ops: Backend, like: Array, rows: Span, cols: Span) -> tuple[Array, Array]:
    """Return the positions of queries (r, 1) and keys (1, c), as `Mask.visible` takes them."""
    return ops.reshape(ops.positions(*rows, like), (-1, 1)), ops.reshape(ops.positions(*cols, like), (1, -1))
