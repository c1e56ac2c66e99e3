"""What the matrix of weights says, without the matrix: its largest entries, a map of bins, the weight of each key.

- Exact, normalised over all keys; masks, biases, sinks and grouped heads as in ``attend``.
- Memory is linear in the lengths.
- For looking, not for training: nothing here carries a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from attnscore import blocks, engine, frameworks, kernels, tiling
from attnscore.checks import is_whole, shown
from attnscore.engine import RowGradients
from attnscore.errors import ArgumentError, message
from attnscore.frameworks.contract import Array, is_unknown
from attnscore.pose import NO_VALUE, pose, without_value
from attnscore.problem import Problem
from attnscore.softmax import whole_rows

# Weights held at a time while their largest are sought: 4 MB in float32, and a few arrays of that size.
_HELD = 2**20


class TopWeights(NamedTuple):
    """The largest weights of each row, in falling order, and the keys that they belong to."""

    weights: Array
    index: Array
    """Whole numbers; -1 beside a weight of 0, which no key in particular has."""


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
) -> TopWeights:
    """The k largest weights of each row and their keys, a few rows at a time.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.
    k : whole number from 1 to the number of keys

    Returns
    -------
    weights : (..., query, k), in falling order; 0 where a row sees fewer keys
    index : (..., query, k) whole numbers; -1 beside a weight of 0

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
    ops = frameworks.of({"query": query})
    with ops.quiet():
        problem = _posed(query, key, score, mask, valid_lens, bias, sink, head_axis)
        grid = problem.grid
        if not is_whole(k) or not 1 <= k <= grid.key_len:
            expected = f"a whole number from 1 to the number of keys ({grid.key_len})"
            raise ArgumentError(message("k", expected, shown(k)))
        matrices = max(1, math.prod(1 if is_unknown(n) else n for n in grid.rows[:-1]))
        step = max(1, _HELD // (matrices * grid.key_len))
        starts = range(0, max(1, grid.query_len), step)
        parts = [_top_of_rows(problem, slice(first, first + step), int(k)) for first in starts]
        weights, index = (ops.concat(list(found), -2) for found in zip(*parts, strict=True))
        outward = problem.layout.outward_scores
        return TopWeights(outward(ops, ops.astype(weights, problem.dtype)), outward(ops, index))


def _top_of_rows(problem: Problem, rows: slice, k: int) -> tuple[Array, Array]:
    ops, sink = problem.ops, problem.sink
    block = blocks.chosen(problem, rows, None)
    scores, visible = engine.block_scores(block, tiling.plan(block))
    if sink is not None:
        sink = ops.astype(ops.reshape(sink, (*sink.shape, 1, 1)), problem.accumulator)
    weights, index = ops.largest(whole_rows(ops, scores, visible, sink), k)
    return weights, ops.where(weights > 0, index, -1)


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
) -> Array:
    """The map of weights summed into bins: queries down, keys across.

    Attention whose values say which bin a key is in gives each row's weight by bin; memory is that of
    (..., query, bins).

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.
    bins : (rows, columns)
        Position i falls into bin ``i * bins // length``; at most one bin a position.

    Returns
    -------
    map : (..., rows, columns)
        Its sum is the number of queries that see a key (less what a sink takes).

    Raises
    ------
    ArgumentError
        `bins` are no two positive whole numbers. Otherwise as `attend`.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.pooled_weights(np.zeros((4, 2)), np.zeros((8, 2)), bins=(2, 4))
    array([[0.5, 0.5, 0.5, 0.5],
           [0.5, 0.5, 0.5, 0.5]])
    """
    ops = frameworks.of({"query": query})
    with ops.quiet():
        problem = _posed(query, key, score, mask, valid_lens, bias, sink, head_axis)
        if not isinstance(bins, (tuple, list)) or len(bins) != 2 or not all(is_whole(n) and n >= 1 for n in bins):
            raise ArgumentError(message("bins", "two positive whole numbers (rows, columns)", shown(bins)))
        grid = problem.grid
        down, across = (_bins(length, int(n)) for length, n in zip((grid.query_len, grid.key_len), bins, strict=True))
        by_bin = _run(problem, ops.asarray(across, problem.value, problem.accumulator)).out
        found = ops.matmul(ops.asarray(down.T.copy(), by_bin, ops.dtype(by_bin)), by_bin)
        return problem.layout.outward_scores(ops, ops.astype(found, problem.dtype))


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
) -> Array:
    """The weight that each key receives from all queries: sum_i w_ij.

    It is the gradient of sum_i out_i for values of length 1, and computed as that. Its errors are those of `attend`.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.

    Returns
    -------
    mass : (..., key), with the heads of `query`

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.key_mass(np.zeros((6, 2)), np.zeros((4, 2)), valid_lens=3)
    array([2., 2., 2., 0.])
    """
    ops = frameworks.of({"query": query})
    with ops.quiet():
        problem = _posed(query, key, score, mask, valid_lens, bias, sink, head_axis)
        grid = problem.grid
        # One value for each head, so that each gets a gradient of its own.
        ones = ops.full((*grid.rows[:-1], grid.key_len, 1), 1.0, problem.value, problem.accumulator)
        problem = _with_value(problem, ones)
        kernel, plan = kernels.choose("auto", problem), tiling.plan(problem)
        result = kernel.forward(problem, plan)
        rows = RowGradients(ops.full((*grid.rows, 1), 1.0, ones))
        mass = kernel.backward(problem, plan, result, rows, frozenset({"value"}))["value"]
        return problem.layout.outward_scores(ops, ops.astype(ops.swap_axes(mass, -1, -2), ops.dtype(query)))[..., 0, :]


def _posed(
    query: Array, key: Array, score: Any, mask: Any, valid_lens: Any, bias: Any, sink: Any, head_axis: int
) -> Problem:
    """The problem without values, and off every tape."""
    ops = frameworks.of({"query": query})
    problem, _ = pose(
        query, key, NO_VALUE, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink, head_axis=head_axis
    )
    problem = without_value(problem)

    def detached(x: Array | None) -> Array | None:
        return None if x is None else ops.stop_gradient(x)

    form = problem.form.with_arrays({name: ops.stop_gradient(x) for name, x in problem.form.arrays().items()})
    return dataclasses.replace(
        problem,
        form=form,
        value=ops.stop_gradient(problem.value),
        bias=detached(problem.bias),
        sink=detached(problem.sink),
    )


def _with_value(problem: Problem, value: Array) -> Problem:
    layout = dataclasses.replace(problem.layout, value_dim=value.shape[-1])
    return dataclasses.replace(problem, layout=layout, value=value)


def _run(problem: Problem, value: Array) -> engine.Result:
    """The result for values (key, value_dim) that all heads share."""
    ops = problem.ops
    value = ops.reshape(value, (*(1 for _ in problem.grid.rows[:-1]), *value.shape))
    problem = _with_value(problem, value)
    return kernels.choose("auto", problem).forward(problem, tiling.plan(problem))


def _bins(length: int, count: int) -> np.ndarray[Any, Any]:
    """(length, bins): 1 where a position is in a bin."""
    count = max(1, min(count, length))
    found = np.zeros((length, count))
    found[np.arange(length), np.arange(length) * count // max(1, length)] = 1
    return found
