"""Summaries of the matrix of weights in linear memory: its largest entries, a map of bins, the mass of each key.

- Exact, normalised over all keys; masks, biases, sinks and grouped-query attention as in ``attend``.
- For inspection, not for training: results carry no gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Never

import numpy as np

from attnscore import backends, kernels
from attnscore.analysis.weights import matrix_of, problem_without_value, slice_problem
from attnscore.backends.base import Array, HostArray
from attnscore.base import thresholds
from attnscore.base.arguments import hides_unknown, is_whole, reject_unknown, shown
from attnscore.base.layout import is_unknown
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.kernels import tiling
from attnscore.problem.problem import Problem
from attnscore.problem.results import RowGradients


class TopWeights(NamedTuple):
    """The largest weights of each query, in falling order, and their keys."""

    weights: Array
    index: Array
    """Whole numbers; -1 for a weight of 0."""


@hides_unknown
@backends.outside_graphs()
def top_weights(
    query: Array,
    key: Array,
    k: int,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    **unknown: Never,
) -> TopWeights:
    """The k largest weights of each query and their keys, in linear memory.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.
    k : whole number from 1 to the number of keys

    Returns
    -------
    weights : (..., query, k), in falling order; 0 where a query has fewer unmasked keys
    index : (..., query, k) whole numbers; -1 for a weight of 0

    Raises
    ------
    ArgumentError
        `k` is out of range. Otherwise as `attend`.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> found = ats.top_weights(np.ones((1, 1)), np.array([[0.0], [9.0], [1.0]]), 2)
    >>> found.index
    array([[1, 2]])
    """
    reject_unknown(top_weights, unknown)
    ops = backends.of({"query": query})
    with ops.numeric_scope():
        problem = _detach(problem_without_value(query, key, score, mask, valid_lens, bias, sink, head_axis))
        score_shape = problem.score_shape
        if is_unknown(score_shape.key_len):
            raise ShapeError(message("key", "a number of keys that is known when the graph is made", "one that is not"))
        if not is_whole(k) or not 1 <= k <= score_shape.key_len:
            expected = f"a whole number from 1 to the number of keys ({score_shape.key_len})"
            if score_shape.key_len == 0:
                raise ArgumentError(message("key", "at least one key to choose from", "none"))
            raise ArgumentError(message("k", expected, shown(k)))
        intervals, widest = problem.visibility[0], score_shape.key_len
        if intervals is not None and intervals.single is not None:
            # `_unmasked_keys` rounds the number of keys of a block up to a power of 2.
            start, stop = intervals.single
            widest = min(widest, max(1, 2 * int((stop - start).max(initial=0))))
        step = max(thresholds.TOP_QUERIES, thresholds.POOLED_WEIGHTS // (_matrices(problem) * widest))
        parts = []
        for first in range(0, max(1, score_shape.query_len), step):
            rows = slice(first, first + step)
            cols = _unmasked_keys(problem, rows, int(k))
            block = matrix_of(slice_problem(problem, rows, cols), "weights")
            weights, index = ops.top_k(block, int(k))
            parts.append((weights, index if cols is None else index + cols.start))
        weights, index = (ops.concat(list(arrays), -2) for arrays in zip(*parts, strict=True))
        weights = ops.astype(weights, problem.dtype)
        from_canonical = problem.layout.scores_from_canonical
        return TopWeights(from_canonical(ops, weights), from_canonical(ops, ops.where(weights > 0, index, -1)))


def _unmasked_keys(problem: Problem, rows: slice, k: int) -> slice | None:
    """Return a slice of at least k keys, outside which these queries attend none; None: all keys."""
    interval_set = problem.visibility[0]
    if interval_set is None or 0 in problem.score_shape.rows:
        return None
    start, stop = (x[..., rows] for x in (interval_set.start, interval_set.stop))
    attends = stop > start
    first, last = (int(start[attends].min()), int(stop[attends].max())) if attends.any() else (0, 0)
    # Few different sizes, as eager JAX compiles and keeps its operations for each.
    size = min(2 ** (max(k, last - first) - 1).bit_length(), problem.score_shape.key_len)
    first = min(first, problem.score_shape.key_len - size)
    return slice(first, first + size)


def _matrices(problem: Problem) -> int:
    return max(1, math.prod(1 if is_unknown(n) else n for n in problem.score_shape.rows[:-1]))


@hides_unknown
@backends.outside_graphs()
def pooled_weights(
    query: Array,
    key: Array,
    bins: tuple[int, int] = (64, 64),
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    **unknown: Never,
) -> Array:
    """The map of weights summed into bins: queries down, keys across.

    Attention over values that are the one-hot bin of each key gives the weight of each query by bin, in memory for
    (..., query, bins).

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.
    bins : (rows, columns)
        Upper limits. All bins along an axis hold ``width = ceil(length / bins)`` positions, so that uniform weights
        fill them alike; the last bin may hold fewer. Position i is in bin ``i // width``.

    Returns
    -------
    map : (..., rows, columns), in float32 where `query` has 16 bits, which cannot hold sums over many queries
        Its sum is the number of queries that are not fully masked (less the weight of a sink). A query whose weights
        are NaN makes all bins of its row NaN, and no other.

    Raises
    ------
    ArgumentError
        `bins` is not two positive whole numbers. Otherwise as `attend`.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.pooled_weights(np.zeros((4, 2)), np.zeros((8, 2)), bins=(2, 4))
    array([[0.5, 0.5, 0.5, 0.5],
           [0.5, 0.5, 0.5, 0.5]])
    """
    reject_unknown(pooled_weights, unknown)
    ops = backends.of({"query": query})
    with ops.numeric_scope():
        problem = _detach(problem_without_value(query, key, score, mask, valid_lens, bias, sink, head_axis))
        if not isinstance(bins, (tuple, list)) or len(bins) != 2 or not all(is_whole(n) and n >= 1 for n in bins):
            raise ArgumentError(message("bins", "two positive whole numbers (rows, columns)", shown(bins)))
        score_shape, lead = problem.score_shape, problem.score_shape.rows[:-1]
        query_bins, key_bins = map(bin_sizes, (score_shape.query_len, score_shape.key_len), map(int, bins))
        width, across = max(1, int(query_bins[0])), len(key_bins)
        bin_of_key = np.repeat(np.arange(across), key_bins)[:, None]
        value = ops.asarray((bin_of_key == np.arange(across)).astype(np.float32), problem.value, problem.accumulator)
        value = ops.reshape(value, (*(1 for _ in lead), *value.shape))
        ones = ops.full((1, width), 1.0, problem.value, problem.accumulator)
        # Whole bins of queries at a time: each query has as many numbers as there are bins of keys.
        queries = max(thresholds.POOLED_QUERIES, thresholds.POOLED_WEIGHTS // (_matrices(problem) * across))
        step, parts = -(-queries // width) * width, []
        for first in range(0, max(1, score_shape.query_len), step):
            has_all = step >= score_shape.query_len
            rows = _with_value(problem if has_all else slice_problem(problem, slice(first, first + step), None), value)
            by_key_bin = kernels.choose("auto", rows).forward(rows, tiling.plan(rows)).out
            count = max(1, -(-by_key_bin.shape[-2] // width))
            padding = ops.zeros((*lead, count * width - by_key_bin.shape[-2], across), by_key_bin)
            by_query_bin = ops.reshape(ops.concat([by_key_bin, padding], -2), (*lead, count, width, across))
            # A product for each bin: NaN of one query reaches no other.
            parts.append(ops.matmul(ones, by_query_bin)[..., 0, :])
        return problem.layout.scores_from_canonical(ops, ops.concat(parts, -2))


@hides_unknown
@backends.outside_graphs()
def key_mass(
    query: Array,
    key: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    **unknown: Never,
) -> Array:
    """The weight that each key receives from all queries: sum_i w_ij.

    Computed as the gradient of sum_i out_i with respect to values of dimension 1. It raises the errors of `attend`.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.

    Returns
    -------
    mass : (..., key), with the heads of `query`, in float32 where the query has 16 bits

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.key_mass(np.zeros((6, 2)), np.zeros((4, 2)), valid_lens=3)
    array([2., 2., 2., 0.])
    """
    reject_unknown(key_mass, unknown)
    ops = backends.of({"query": query})
    with ops.numeric_scope():
        problem = _detach(problem_without_value(query, key, score, mask, valid_lens, bias, sink, head_axis))
        score_shape = problem.score_shape
        # Values for each query head, so that each head has a gradient of its own.
        ones = ops.full((*score_shape.rows[:-1], score_shape.key_len, 1), 1.0, problem.value, problem.accumulator)
        problem = _with_value(problem, ones)
        kernel, plan = kernels.choose("auto", problem), tiling.plan(problem)
        result = kernel.forward(problem, plan)
        rows = RowGradients(ops.full((*score_shape.rows, 1), 1.0, ones))
        mass = kernel.backward(problem, plan, result, rows, frozenset({"value"}))["value"]
        return problem.layout.scores_from_canonical(ops, ops.swap_axes(mass, -1, -2))[..., 0, :]


def _detach(problem: Problem) -> Problem:
    """Return the problem without gradients."""
    ops = problem.ops
    form = problem.form.with_arrays({name: ops.stop_gradient(x) for name, x in problem.form.arrays().items()})
    others = {name: getattr(problem, name) for name in ("value", "bias", "sink")}
    detached = {name: ops.stop_gradient(x) for name, x in others.items() if x is not None}
    return dataclasses.replace(problem, form=form, **detached)


def _with_value(problem: Problem, value: Array) -> Problem:
    layout = dataclasses.replace(problem.layout, value_dim=value.shape[-1])
    return dataclasses.replace(problem, layout=layout, value=value)


def bin_sizes(length: int, max_bins: int) -> HostArray:
    """Return the number of positions in each bin of `pooled_weights`, for at most `max_bins` bins.

    >>> bin_sizes(100, 7).tolist()
    [15, 15, 15, 15, 15, 15, 10]
    """
    width = max(1, -(-length // max_bins))
    return np.diff(np.append(np.arange(0, max(1, length), width), length))
