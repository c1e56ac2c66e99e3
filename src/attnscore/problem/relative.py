"""Bias by relative position: one number for each relative offset (key minus query), in place of one for each pair.

An array (..., 1, query_len + key_len - 1) stands for ``bias[i, j] = array[j - i + query_len - 1]``: a Toeplitz matrix,
which only the kernel `dense` builds. With a single query the two are the same array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import check_count, is_whole, shown
from attnscore.base.layout import ScoreShape, Span, is_unknown
from attnscore.errors import ArgumentError, message


def relative_positions(query_len: int, key_len: int, *, offset: int | None = None) -> np.ndarray[Any, Any]:
    """Return key - query for every pair of a query and a key that may occur: ``query_len + key_len - 1`` whole numbers.

    An array with one number for each of them, and an axis of 1 in front, is a bias of `attend` in O(n) memory:
    ``bias[..., 0, j - i + query_len - 1]`` is added to the score of query i and key j. It gets a gradient.

    Parameters
    ----------
    query_len, key_len : whole numbers
        Or symbolic sizes of a program that is exported.
    offset : whole number, optional
        Query i stands at position i + offset. Required where the lengths differ, as in `Causal`: ``key_len -
        query_len`` for the last queries of a sequence.

    Returns
    -------
    positions : (query_len + key_len - 1,) int64
        From ``-(query_len - 1) - offset`` to ``key_len - 1 - offset``. NumPy's; an array of PyTorch or JAX of symbolic
        sizes.

    Raises
    ------
    ArgumentError

    References
    ----------
    Shaw, Uszkoreit, Vaswani (2018), Self-Attention with Relative Position Representations. Press, Smith, Lewis (2022),
    Train Short, Test Long (ALiBi).

    Examples
    --------
    ALiBi, with slope 0.5: the score falls with the distance.

    >>> import numpy as np, attnscore as ats
    >>> bias = -0.5 * np.abs(ats.relative_positions(3, 3))[None]
    >>> ats.attention_scores(np.zeros((3, 2)), np.zeros((3, 2)), bias=bias)
    array([[ 0. , -0.5, -1. ],
           [-0.5,  0. , -0.5],
           [-1. , -0.5,  0. ]])

    A learned table of distances up to 8, shared beyond, (heads, 17):

    >>> table = np.random.default_rng(0).normal(size=(4, 17))
    >>> bias = table[:, None, np.clip(ats.relative_positions(100, 100), -8, 8) + 8]
    >>> x = np.ones((1, 4, 100, 16))
    >>> ats.attend(x, x, x, bias=bias).shape
    (1, 4, 100, 16)
    """
    arrays = _arrays_of_sizes(query_len, key_len)
    if arrays is None:
        query_len, key_len = check_count("query_len", query_len), check_count("key_len", key_len)
    if offset is None:
        # Symbolic lengths are equal only as one object: comparing two would settle the answer for the program.
        if query_len is not key_len and (arrays is not None or query_len != key_len):
            hint = "offset=key_len - query_len for the last queries of a sequence, 0 for the first"
            got = f"{query_len} queries, {key_len} keys"
            raise ArgumentError(message("offset", "a whole number where the lengths differ", got, hint=hint))
        offset = 0
    if not is_whole(offset) and _arrays_of_sizes(offset) is None:
        raise ArgumentError(message("offset", "a whole number", shown(offset)))
    positions: np.ndarray[Any, Any] = (arrays or np).arange(1 - query_len, key_len) - offset
    return positions


def _arrays_of_sizes(*sizes: Any) -> Any:
    """Return the array module of the framework to whose exported program some of these sizes belong; None if none."""
    for size in sizes:
        framework = type(size).__module__.partition(".")[0]
        if framework in ("torch", "jax") and not backends.is_array(size):
            return backends.load(framework).xp
    return None


def relative_buckets(
    positions: Any, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> np.ndarray[Any, Any]:
    """Return the bucket of T5's relative position bias for each position key - query.

    Distances below half of the buckets have a bucket each; the other buckets widen with the logarithm of the distance,
    up to `max_distance`, beyond which all share the last. Bidirectional: keys after the query (positions above 0) have
    the second half of the buckets for themselves; otherwise they count as distance 0.

    Parameters
    ----------
    positions : whole numbers
        As `relative_positions` returns.
    buckets, max_distance : whole numbers
        Of the model's configuration (``relative_attention_num_buckets``, ``relative_attention_max_distance``).
    bidirectional : bool
        True in an encoder, False in a causal decoder.

    Returns
    -------
    bucket : int64, of the shape of `positions`
        NumPy's; an array of the framework where `positions` is one that is traced or on a device.

    Raises
    ------
    ArgumentError

    References
    ----------
    Raffel and others (2020), Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer.

    Examples
    --------
    >>> import attnscore as ats
    >>> ats.relative_buckets([-100, -2, 0, 2, 100])
    array([15,  2,  0, 18, 31])

    The bias of a table (buckets, heads), as checkpoints hold it, is
    ``table[relative_buckets(relative_positions(n, n))].T[:, None]``.
    """
    for name, x in (("buckets", buckets), ("max_distance", max_distance)):
        check_count(name, x)
    if (ops := backends.of_type(type(positions))) is not None:
        backends.check_not_recorded(ops, "positions")
    signed = backends.host(positions)
    if signed is None:
        traced: np.ndarray[Any, Any] = _look_up_buckets(positions, buckets, max_distance, bidirectional)
        return traced
    if signed.dtype.kind not in "iu":
        raise ArgumentError(message("positions", "whole numbers", shown(positions)))
    # All distances from `max_distance` on share a bucket, and each in this range has its negative, of any dtype.
    signed = np.clip(signed.astype(np.int64), -max_distance, max_distance)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    if exact < 1 or max_distance <= exact:
        expected = f"at least {4 if bidirectional else 2} buckets, fewer exact ones ({exact}) than max_distance"
        raise ArgumentError(message("buckets, max_distance", expected, f"{buckets}, {max_distance}"))
    distance = np.abs(signed) if bidirectional else np.maximum(-signed, 0)
    # In float32, as models are trained: at the edge of a bucket another precision may round to its neighbour.
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact))
    steps = (ratio / np.float32(math.log(max_distance / exact)) * np.float32(side - exact)).astype(np.int64)
    bucket: np.ndarray[Any, Any] = np.where(distance < exact, distance, np.minimum(exact + steps, side - 1))
    return (bucket + side * (signed > 0) if bidirectional else bucket).astype(np.int64, copy=False)


def _look_up_buckets(positions: Array, buckets: int, max_distance: int, bidirectional: bool) -> Any:
    """Return the buckets of positions that a program learns when it runs, from a table of all distances."""
    ops = backends.of({"positions": positions})
    if ops.is_floating(positions) or ops.dtype(positions) == "bool":
        raise ArgumentError(message("positions", "whole numbers", ops.dtype(positions)))
    distances = np.arange(-max_distance, max_distance + 1)
    table = relative_buckets(distances, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    index = ops.xp.clip(positions, -max_distance, max_distance) + max_distance
    return ops.reshape(ops.take(ops.asarray(table, positions), ops.reshape(index, (-1,)), 0), positions.shape)


def of_pairs(ops: Backend, bias: Array, query_len: int, key_len: int) -> Array:
    """Return the bias (..., query, key) of all pairs, from a relative bias."""
    query, key = (ops.positions(0, n, bias) for n in (query_len, key_len))
    index = ops.reshape(key, (1, -1)) - ops.reshape(query, (-1, 1)) + (query_len - 1)
    return ops.reshape(ops.take(bias, ops.reshape(index, (-1,)), -1), (*bias.shape[:-2], query_len, key_len))


def expand_if_relative(ops: Backend, bias: Array, score_shape: ScoreShape) -> Array:
    """Return a bias (..., 1, unknown), expanded to all pairs if it proves to be relative when the graph runs."""
    query_len, key_len = score_shape.query_len, score_shape.key_len
    # The sizes allowed for each axis: the last one is broadcast, or has a number for each key or relative position.
    allowed = [*((1, n) for n in score_shape.rows), (1, key_len, query_len + key_len - 1)]
    bias = ops.assert_shape(bias, [("bias", bias, [allowed])])
    # The sizes as numbers of the graph.
    size, keys = (ops.positions(n, 1, bias)[0] for n in (ops.shape(bias)[-1], key_len))
    is_relative = ops.logical_and(size != keys, size != 1)
    return ops.cond(is_relative, lambda x: of_pairs(ops, x, query_len, key_len), bias)


def tile(ops: Backend, bias: Array, query_len: int, rows: Span, cols: Span) -> Array:
    """Return the bias (..., rows, cols) of the pairs of a tile, from the relative bias of the whole call."""
    count, width = rows[1], rows[1] + cols[1] - 1
    if count == 0:
        return ops.zeros((*bias.shape[:-2], 0, cols[1]), bias)
    line = ops.slice_axis(bias, -1, query_len - rows[0] - count + cols[0], width)
    if count == 1:
        return line
    # Row i of the tile is line[count - 1 - i :][:cols]. In copies of the line, one after the other, row i begins at
    # count - 1 + i * (width - 1): a reshape with rows of width - 1 aligns them, without a gather.
    lead, extra = tuple(bias.shape[:-2]), _extra_zeros(count)
    if extra:
        line, width = ops.concat([line, ops.zeros((*lead, 1, extra), line)], -1), width + extra
    copies = ops.reshape(ops.broadcast_to(line, (*lead, count, width)), (*lead, 1, count * width))
    copies = ops.slice_axis(copies, -1, count - 1, count * (width - 1))
    return ops.reshape(copies, (*lead, count, width - 1))[..., : cols[1]]


def sum_diagonals(ops: Backend, grad: Array) -> Array:
    """Return the sum of each diagonal of (..., rows, cols), the pairs of one key - query: (..., 1, rows + cols - 1)."""
    *lead, rows, cols = ops.shape(grad)
    if rows == 1:
        return grad
    # The steps of `tile` in reverse: pad each row to width - 1, reshape to copies of the line, and add these up.
    extra = _extra_zeros(rows)
    width, missing = rows + cols - 1 + extra, rows - 2 + extra
    padded = ops.concat([grad, ops.zeros((*lead, rows, missing), grad)], -1) if extra or missing > 0 else grad
    line = ops.reshape(padded, (*lead, 1, rows * (width - 1)))
    line = ops.concat([ops.zeros((*lead, 1, rows - 1), grad), line, ops.zeros((*lead, 1, 1), grad)], -1)
    sums = ops.sum(ops.reshape(line, (*lead, rows, width)), axis=-2, keepdims=True)
    return ops.slice_axis(sums, -1, 0, width - extra) if extra else sums


def _extra_zeros(count: Any) -> int:
    """Return how many zeros `tile` appends to a line: with 2, JAX sees that no size of a symbolic line is negative."""
    return 2 if is_unknown(count) else 0
