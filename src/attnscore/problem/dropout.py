"""Dropout on the weights: counter-based, so that the backward replays it for any tile sizes.

Whether a pair is kept depends on (seed, query of the whole call, key) alone: two rounds of a 32-bit mixer for the
query, one for the pair. It has no state and the same bits in every framework, tile size and thread count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnscore.backends.base import Array, Backend, SeedHalves
from attnscore.base.arguments import is_number, is_whole, shown
from attnscore.base.layout import ScoreShape, Span
from attnscore.errors import ArgumentError, message


@dataclass(frozen=True)
class Dropout:
    """Dropout on the weights: its probability and the seed that replays it."""

    probability: float
    seed: int | SeedHalves

    @property
    def words(self) -> tuple[Any, Any]:
        """The low and the high 32 bits of the seed."""
        return self.seed if isinstance(self.seed, SeedHalves) else (self.seed & 0xFFFFFFFF, self.seed >> 32)


@dataclass(frozen=True)
class PairDropout(Dropout):
    """Dropout of pairs that are no tile of the call: their row and key in the whole call, broadcast to the scores."""

    row: Array
    """Row of the query, counted over all batches and heads: (*lead, head, group, query or 1, 1)."""
    key: Array


def check_dropout(probability: Any, seed: Any, draw: Callable[[], Any]) -> Dropout | None:
    """Return the dropout of a call, None if there is none; ``draw()`` gives the seed where it is None."""
    if not is_number(probability) or not 0 <= probability < 1:
        raise ArgumentError(message("dropout", "a number in [0, 1)", shown(probability)))
    if seed is not None and not isinstance(seed, SeedHalves) and not is_whole(seed):
        raise ArgumentError(message("seed", "a whole number or None", shown(seed)))
    if probability == 0:
        return None
    seed = draw() if seed is None else seed
    return Dropout(float(probability), seed if isinstance(seed, SeedHalves) else int(seed) % 2**63)


def _mix(ops: Backend, x: Array) -> Array:
    """Mix 32-bit numbers: a bijection with full avalanche (constants: "lowbias32", found by C. Wellons' search)."""
    x = ops.low_32_bits((x ^ ops.shift_right(x, 16)) * 0x7FEB352D)
    x = ops.low_32_bits((x ^ ops.shift_right(x, 15)) * ops.uint32(0x846CA68B))
    return x ^ ops.shift_right(x, 16)


def rows_of_matrices(ops: Backend, score_shape: ScoreShape, like: Array) -> Array:
    """Return the first row of each matrix of scores, counted over all of them: (*lead, head, group, 1, 1)."""
    matrices = math.prod(score_shape.rows[:-1])
    first = ops.positions(0, matrices, like) * score_shape.query_len
    return ops.reshape(first, (*score_shape.rows[:-1], 1, 1))


def keep_factors(
    ops: Backend, dropout: Dropout, score_shape: ScoreShape, like: Array, rows: Span, cols: Span, dtype: str
) -> Array:
    """Return 1 / (1 - p) for pairs that are kept, 0 for dropped ones: (*lead, head, group, rows, cols)."""
    if isinstance(dropout, PairDropout):
        row, column = dropout.row, ops.slice_axis(dropout.key, -1, *cols)
        # No slice where `row` is broadcast, or where the tile has all of its entries.
        row = row if row.shape[-2] in (1, rows[1]) else ops.slice_axis(row, -2, *rows)
    else:
        row = rows_of_matrices(ops, score_shape, like) + ops.reshape(ops.positions(*rows, like), (rows[1], 1))
        column = ops.reshape(ops.positions(*cols, like), (1, cols[1]))
    low, high = (ops.uint32(half) if isinstance(half, int) else half for half in dropout.words)
    # JAX's 32-bit positions overflow, so each operand is reduced to 32 bits before it meets a 32-bit constant.
    stream = _mix(ops, ops.low_32_bits(ops.low_32_bits(row) + low))
    stream = _mix(ops, ops.low_32_bits(stream + ops.low_32_bits(ops.shift_right(row, 32)) + high))
    # The golden ratio spreads neighbouring keys over the 32 bits before mixing.
    key = ops.low_32_bits(ops.low_32_bits(column) * ops.uint32(0x9E3779B9))
    bits = _mix(ops, ops.low_32_bits(stream + key))
    keep = bits >= ops.uint32(min(round(dropout.probability * 2**32), 2**32 - 1))
    return ops.astype(keep, dtype) * (1 / (1 - dropout.probability))
