"""The mask of a local call of attention: some queries and keys of a mask of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.layout import ScoreShape
from attnscore.masks import Dense, Documents, KeyPadding, Mask, Neighbours, Sharded, as_mask
from attnscore.masks.base import all_of, map_atoms
from attnscore.masks.shape_spec import shape_of
from attnscore.parallel.pairs import edges_of
from attnscore.parallel.shard import Shard


def sequence_mask(ops: Backend, mask: Any, valid_lens: Any, sequence_shape: ScoreShape) -> Mask | None:
    """Return `mask` and `valid_lens` as one mask, checked against the scores of the whole sequence.

    Its arrays (head, query, key) have an axis of batch elements in front: three axes would be read as (batch, query,
    key).
    """
    combined = as_mask(mask, valid_lens, sequence_shape)
    if combined is None:
        return None
    backends.check_dense(ops, combined.arrays())
    combined.check(ops, sequence_shape)

    def widen(atom: Mask) -> Mask:
        if not (isinstance(atom, Dense) and sequence_shape.has_heads and len(shape_of(atom.array)) == 3):
            return atom
        return Dense((atom.array if hasattr(atom.array, "shape") else np.asarray(atom.array))[None])

    return map_atoms(combined.for_call(ops, sequence_shape), widen)


def shard_mask(
    mask: Mask | None, rows: Shard | Array, cols: Shard | Array, query_len: int, key_len: int, *, padded: bool = False
) -> Mask | None:
    """Return the mask of a call with the queries `rows` and the keys `cols` of a whole sequence.

    Parameters
    ----------
    mask : Mask, optional
        Mask of the whole sequence, checked against its shape; None masks nothing.
    rows, cols : Shard, or (positions,) whole numbers in rising order
        Global positions, which may be traced.
    query_len, key_len : int
        Lengths of the whole sequence.
    padded : bool
        Whether `rows` and `cols` end with padding: positions of `query_len` and `key_len` or more, which attend
        nothing and are attended by no query.

    Returns
    -------
    Mask, or None where nothing is masked

    Raises
    ------
    MaskError
        An invalid graph, once its neighbours are read.

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.parallel import Shard, shard_mask
    >>> rows, cols = Shard.head_tail(8, 0, 2), Shard(((0, 1), (5, 8)), 8)
    >>> shard_mask(ats.Causal(), rows, cols, 8, 8).materialize(4, 4)[0].astype(int)
    array([[1, 0, 0, 0],
           [1, 0, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    rows, cols = (x.positions() if isinstance(x, Shard) else x for x in (rows, cols))
    positions = Sharded(None, rows, cols, query_len, key_len, padded)
    parts = [] if mask is None else [map_atoms(mask, lambda atom: _restrict(atom, positions))]
    return all_of([*parts, positions] if padded else parts)


def _restrict(mask: Mask, positions: Sharded) -> Mask:
    """Return the local mask of a global one that is no combination; arrays are cut, so that kernels still read them."""
    if isinstance(mask, Dense):
        array = _take_positions(mask.array, positions.cols, -1, positions.key_len)
        return Dense(_take_positions(array, positions.rows, -2, positions.query_len) if len(array.shape) > 1 else array)
    if isinstance(mask, KeyPadding):
        return KeyPadding(_take_positions(mask.array, positions.cols, -1, positions.key_len))
    if isinstance(mask, Documents):
        query_ids, key_ids = mask.ids
        return Documents(
            _take_positions(query_ids, positions.rows, -1, positions.query_len),
            _take_positions(key_ids, positions.cols, -1, positions.key_len),
        )
    return _restrict_graph(mask, positions) if isinstance(mask, Neighbours) else replace(positions, mask=mask)


def _restrict_graph(mask: Neighbours, positions: Sharded) -> Mask:
    """Return the graph of the local queries and keys; where the host cannot read it, a `Sharded` mask of the whole."""
    rows, cols, table = backends.host(positions.rows), backends.host(positions.cols), mask.table(positions.key_len)
    if rows is None or cols is None or table is None:
        return replace(positions, mask=mask)
    count, rows = len(rows), rows[rows < positions.query_len]
    row, keys = edges_of(table, rows)
    local = np.searchsorted(cols, keys)
    is_local = np.append(cols, -1)[local] == keys
    counts = np.bincount(row[is_local], minlength=count)
    return Neighbours(np.cumsum([0, *counts]), local[is_local])


def _take_positions(x: Any, positions: Any, axis: int, length: int) -> Array:
    """Return the entries of an array or list at the positions, clamped for padding; a broadcast axis stays."""
    if not backends.is_array(x):
        x = np.asarray(x)
    size = x.shape[axis]
    if size == 1 != length:
        return x
    index = backends.host(positions)
    ops = backends.of({"x": x})
    if index is not None and len(index) and index[-1] < size and index[-1] - index[0] == len(index) - 1:
        return ops.slice_axis(x, axis % len(x.shape), int(index[0]), len(index))
    if index is None:
        ops = backends.of({"positions": positions})
        x = ops.asarray(x, positions)
        positions = ops.minimum(positions, ops.full((), size - 1, positions))
    else:
        positions = ops.asarray(np.minimum(index, size - 1), x)
    return ops.take(x, positions, axis)
