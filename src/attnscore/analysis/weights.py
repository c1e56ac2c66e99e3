"""Blocks of the matrix of weights or scores, normalised over all keys, in O(block + n) memory.

A relative bias for some queries and some keys has an entry for each of these queries and every key.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Never

import numpy as np

from attnscore import backends, kernels
from attnscore.backends.base import FLOATING, Array, HostArray
from attnscore.base.arguments import CallArguments, hides_unknown, is_number, is_whole, reject_unknown, shown
from attnscore.base.layout import is_unknown
from attnscore.errors import ArgumentError, DtypeError, ShapeError, message
from attnscore.masks import Sharded
from attnscore.plans import plan as plans
from attnscore.plans.prepared import PreparedKeys
from attnscore.problem.online_softmax import NEG_INF, log_weights
from attnscore.problem.problem import NO_VALUE, PairMatrix, Problem, build_problem
from attnscore.scores.forms import Role


@hides_unknown
@backends.outside_graphs()
def attention_weights(
    query: Array,
    key: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    query_index: Any = None,
    key_index: Any = None,
    **unknown: Never,
) -> Array:
    """Attention weights of some queries and keys, exactly: normalised over all unmasked keys, then the block.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis, normalizer
        As in `attend`.
    query_index, key_index : slice, whole number or whole numbers, optional
        Queries and keys of the block; None: all. Both None: the whole matrix, O(n^2) memory.

    Returns
    -------
    weights : (..., queries, keys), differentiable

    Raises
    ------
    ArgumentError
        An index outside the positions. Otherwise as `attend`.

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_weights(np.zeros((3, 2)), np.ones((4, 2)), query_index=-1, key_index=slice(0, 2))
    array([[0.25, 0.25]])
    """
    reject_unknown(attention_weights, unknown)
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    ops = backends.of({"query": query})
    backends.check_not_recorded(ops, "attention_weights")
    is_whole_matrix = query_index is None and key_index is None
    if is_whole_matrix and type(key) is type(query) and len(key.shape) >= 2 and ops.is_plain(query, key):
        # The call of `attend` for values of value_dim 0, with return_weights=True.
        values, options = key[..., :0], (head_axis, normalizer, "auto", 0.0, True, False)
        arguments = CallArguments(query, key, values, score, mask, valid_lens, bias, sink, None)
        signature = plans.signature(arguments, options)
        plan, arguments = plans.plan_for(signature, arguments, options, has_value=False)
        return plan.run(arguments)[1]
    with ops.numeric_scope():
        problem = problem_without_value(query, key, score, mask, valid_lens, bias, sink, head_axis, normalizer)
        rows = slice_problem(problem, query_index, None)
        if key_index is None:
            return _from_canonical(rows, matrix_of(rows, "weights"))
        # Normalised over all keys, then sliced.
        result = kernels.single_plan(rows)()
        block = slice_problem(rows, None, key_index)
        scores = matrix_of(block, "scores")
        if problem.normalizer is None:
            weights = ops.exp(log_weights(ops, scores, result.row_max, result.log_denom))
        else:  # the threshold of a query is in the place of its log-denominator
            weights = problem.normalizer.weights(ops, scores, result.row_max, result.log_denom)
        # Exactly 0 where masked, even if an unmasked NaN makes the other weights of the query NaN.
        return _from_canonical(block, ops.where(ops.equal(scores, NEG_INF), 0.0, weights))


@hides_unknown
@backends.outside_graphs()
def attention_scores(
    query: Array,
    key: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    query_index: Any = None,
    key_index: Any = None,
    **unknown: Never,
) -> Array:
    """Scores of some queries and keys before the softmax: with cap and bias, -inf where masked.

    Parameters and errors are those of `attention_weights` without `normalizer`; a sink is checked and changes no score.

    Returns
    -------
    scores : (..., queries, keys), differentiable

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((2, 4)), np.ones((3, 4)), valid_lens=2)
    array([[  2.,   2., -inf],
           [  2.,   2., -inf]])
    """
    reject_unknown(attention_scores, unknown)
    with backends.of({"query": query}).numeric_scope():
        problem = problem_without_value(query, key, score, mask, valid_lens, bias, sink, head_axis)
        problem = slice_problem(problem, query_index, key_index)
        return _from_canonical(problem, matrix_of(problem, "scores"))


def problem_without_value(
    query: Array, key: Array, score: Any, mask: Any, valid_lens: Any, bias: Any, sink: Any, head_axis: int,
    normalizer: Any = "softmax",
) -> Problem:  # fmt: skip
    """Check a call about the weights alone: values have value_dim 0."""
    if type(key) is PreparedKeys:
        key, score = key.unpack(score)
    query, key = map(backends.variable_value, (query, key))
    problem, _ = build_problem(
        query, key, NO_VALUE, score=score, mask=mask, valid_lens=valid_lens, bias=bias, sink=sink, head_axis=head_axis,
        normalizer=normalizer,
    )  # fmt: skip
    return problem


def matrix_of(problem: Problem, kind: PairMatrix) -> Array:
    """Return the scores or weights of all pairs of a problem without values, on the canonical axes."""
    if kind == "scores":
        # Scores depend on neither sink nor normalizer, so that no kernel has to support them.
        problem = dataclasses.replace(problem, sink=None, normalizer=None)
    problem = dataclasses.replace(problem, matrix=kind)
    return kernels.single_plan(problem)().matrix


def _from_canonical(problem: Problem, block: Array) -> Array:
    return problem.layout.scores_from_canonical(problem.ops, problem.ops.astype(block, problem.dtype))


def slice_problem(problem: Problem, query_index: Any, key_index: Any) -> Problem:
    """Slice a problem to some of its queries or keys; its mask still reads positions in the whole sequence."""
    if query_index is None and key_index is None:
        return problem
    ops, score_shape = problem.ops, problem.score_shape
    rows = _positions_of_index("query_index", query_index, score_shape.query_len)
    cols = _positions_of_index("key_index", key_index, score_shape.key_len)
    like = problem.value
    index = {
        "query": None if rows is None else ops.asarray(rows, like),
        "key": None if cols is None else ops.asarray(cols, like),
    }

    def take(x: Array, role: Role) -> Array:
        indices = index.get(role)
        return x if indices is None else ops.take(x, indices, -2)

    lengths = score_shape.query_len, score_shape.key_len
    query, key = (
        ops.positions(0, n, like) if is_unknown(n) else np.arange(n) if x is None else x
        for x, n in zip((rows, cols), lengths, strict=True)
    )
    bias = problem.bias
    if bias is not None and problem.has_relative_bias:
        offsets = key - query[:, None] + (score_shape.query_len - 1)
        pairs = ops.take(bias, ops.asarray(offsets.reshape(-1), like), -1)
        bias = ops.reshape(pairs, (*bias.shape[:-2], *offsets.shape))
    elif bias is not None:
        for axis, name in ((-2, "query"), (-1, "key")):
            if index[name] is not None and bias.shape[axis] > 1:
                bias = ops.take(bias, index[name], axis)
    new_shape = dataclasses.replace(
        score_shape,
        query_len=score_shape.query_len if rows is None else len(rows),
        key_len=score_shape.key_len if cols is None else len(cols),
    )
    return dataclasses.replace(
        problem,
        layout=dataclasses.replace(problem.layout, score_shape=new_shape),
        query=take(problem.query, "query"),
        key=take(problem.key, "key"),
        value=take(problem.value, "key"),
        form=problem.form.part(take),
        mask=None if problem.mask is None else Sharded(problem.mask, query, key, *lengths),
        bias=bias,
    )


def _positions_of_index(name: str, index: Any, length: int) -> HostArray | None:
    """Return the positions in [0, length) of a slice, a number or numbers; None for None."""
    if index is None:
        return None
    expected = "a slice, a whole number or a list of them"
    if isinstance(index, slice):
        if not all(x is None or is_whole(x) for x in (index.start, index.stop, index.step)) or index.step == 0:
            raise ArgumentError(message(name, expected, shown(index)))
        return np.arange(length)[index]
    positions = backends.host(index)
    if positions is not None and positions.shape == (0,):
        return positions.astype(np.int64)
    if positions is None or positions.dtype.kind not in "iu" or positions.ndim > 1:
        ragged = "a ragged list or " if positions is not None and positions.dtype.kind == "O" else ""
        raise ArgumentError(message(name, expected, ragged + shown(index)))
    positions = np.atleast_1d(positions).astype(np.int64)
    if positions.min() < -length or positions.max() >= length:
        expected = f"positions from {-length} to {length - 1}, as there are {length}"
        raise ArgumentError(message(name, expected, shown(positions.tolist())))
    return np.where(positions < 0, positions + length, positions)


def row_gradient(problem: Problem, name: str, grad: Array | None) -> Array | None:
    """Check an output's gradient, or an output, on the caller's axes, and return it on the canonical axes.

    `name` is the argument: "grad_out", "grad_weights", or another with one number per query, as "grad_entropy".
    """
    if grad is None:
        return None
    ops, layout, score_shape = problem.ops, problem.layout, problem.score_shape
    if is_number(grad):
        grad = ops.asarray(float(grad), problem.value, problem.accumulator)
    backends.of({"query": problem.query, name: grad})
    if not ops.is_floating(grad):
        raise DtypeError(message(name, FLOATING, ops.dtype(grad)))
    zeros = ops.broadcast_to(ops.zeros((), problem.value), score_shape.rows)
    rows = tuple(layout.rows_from_canonical(ops, zeros).shape)
    shape = {"grad_out": (*rows, layout.value_dim), "grad_weights": score_shape.user_shape}.get(name, rows)
    if tuple(grad.shape) != shape:
        raise ShapeError(message(name, f"the shape {shape}", tuple(grad.shape)))
    if name == "grad_weights":
        return ops.reshape(grad, (*score_shape.rows, score_shape.key_len))
    return layout.output_to_canonical(ops, grad if name == "grad_out" else ops.expand_dims(grad, -1))
