"""Weights and scores on demand: exact blocks of the matrix, normalised over all keys, in O(block + n) memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore import backends, kernels
from attnscore.backends.base import FLOATING, Array, Backend
from attnscore.core import tiling
from attnscore.core.arguments import is_number, is_whole, shown
from attnscore.core.layout import ScoreShape
from attnscore.core.online_softmax import NEG_INF, log_weights
from attnscore.core.problem import NO_VALUE, PairMatrix, Problem, build_problem, without_value
from attnscore.errors import ArgumentError, DtypeError, ShapeError, message
from attnscore.kernels import AttentionOp
from attnscore.masks import Intervals, IntervalSet, Mask
from attnscore.scores.forms import Role

HostIndex = np.ndarray[Any, Any]


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
    query_index: Any = None,
    key_index: Any = None,
) -> Array:
    """Exact attention weights of chosen rows and columns: softmax over all visible keys, then the block.

    Parameters
    ----------
    query, key, score, mask, valid_lens, bias, sink, head_axis
        As in `attend`.
    query_index, key_index : slice, whole number or whole numbers, optional
        Which rows and columns; None: all. Both None: the whole matrix, O(n^2) memory.

    Returns
    -------
    weights : (..., rows, columns), differentiable

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
    ops = backends.of({"query": query})
    with ops.numeric_scope():
        problem, _ = build_problem(
            query,
            key,
            NO_VALUE,
            score=score,
            mask=mask,
            valid_lens=valid_lens,
            bias=bias,
            sink=sink,
            head_axis=head_axis,
        )
        rows = chosen(without_value(problem), query_index, None)
        if key_index is None:
            return _outward(rows, matrix_of(rows, "weights"))
        # Normalised over all keys, of which only some are shown.
        result = AttentionOp(kernels.choose("auto", rows), rows, tiling.plan(rows))()
        block = chosen(rows, None, key_index)
        scores = matrix_of(block, "scores")
        found = ops.exp(log_weights(ops, scores, result.row_max, result.log_denom))
        # Exactly 0 where masked, even if a visible NaN makes the rest of the row NaN.
        return _outward(block, ops.where(scores == NEG_INF, 0.0, found))


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
) -> Array:
    """Scores before the softmax of chosen rows and columns: cap and bias in them, -inf where masked.

    Parameters and errors are those of `attention_weights`; a sink is checked and changes no score.

    Returns
    -------
    scores : (..., rows, columns), differentiable

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.attention_scores(np.ones((2, 4)), np.ones((3, 4)), valid_lens=2)
    array([[  2.,   2., -inf],
           [  2.,   2., -inf]])
    """
    with backends.of({"query": query}).numeric_scope():
        problem, _ = build_problem(
            query,
            key,
            NO_VALUE,
            score=score,
            mask=mask,
            valid_lens=valid_lens,
            bias=bias,
            sink=sink,
            head_axis=head_axis,
        )
        problem = chosen(chosen(without_value(problem), query_index, None), None, key_index)
        return _outward(problem, matrix_of(problem, "scores"))


def matrix_of(problem: Problem, kind: PairMatrix) -> Array:
    """Return the scores or weights of all pairs of a problem without values, on the uniform axes."""
    if kind == "scores":
        # A sink changes no score.
        problem = dataclasses.replace(problem, sink=None)
    problem = dataclasses.replace(problem, matrix=kind)
    return AttentionOp(kernels.choose("auto", problem), problem, tiling.plan(problem))().matrix


def _outward(problem: Problem, block: Array) -> Array:
    return problem.layout.scores_from_canonical(problem.ops, problem.ops.astype(block, problem.dtype))


def chosen(problem: Problem, query_index: Any, key_index: Any) -> Problem:
    """The problem of some of its rows or columns; positions keep their numbers for the mask."""
    if query_index is None and key_index is None:
        return problem
    ops, score_shape = problem.ops, problem.score_shape
    rows = _index("query_index", query_index, score_shape.query_len)
    cols = _index("key_index", key_index, score_shape.key_len)
    like = problem.value
    at = {
        "query": None if rows is None else ops.asarray(rows, like),
        "key": None if cols is None else ops.asarray(cols, like),
    }

    def cut(x: Array, role: Role) -> Array:
        index = at.get(role)
        return x if index is None else ops.take(x, index, -2)

    bias = problem.bias
    for axis, name in ((-2, "query"), (-1, "key")):
        if bias is not None and at[name] is not None and bias.shape[axis] > 1:
            bias = ops.take(bias, at[name], axis)
    new_grid = dataclasses.replace(
        score_shape,
        query_len=score_shape.query_len if rows is None else len(rows),
        key_len=score_shape.key_len if cols is None else len(cols),
    )
    return dataclasses.replace(
        problem,
        layout=dataclasses.replace(problem.layout, score_shape=new_grid),
        query=cut(problem.query, "query"),
        key=cut(problem.key, "key"),
        value=cut(problem.value, "key"),
        form=problem.form.part(cut),
        mask=None if problem.mask is None else _Chosen(problem.mask, score_shape, rows, cols),
        bias=bias,
    )


@final
@dataclass(frozen=True, eq=False, repr=False)
class _Chosen(Mask):
    """Another mask at chosen rows and columns."""

    mask: Mask
    score_shape: ScoreShape
    rows: HostIndex | None
    cols: HostIndex | None

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        if self.rows is not None:
            rows = ops.reshape(ops.take(ops.asarray(self.rows, rows), ops.reshape(rows, (-1,)), 0), (-1, 1))
        if self.cols is not None:
            cols = ops.reshape(ops.take(ops.asarray(self.cols, cols), ops.reshape(cols, (-1,)), 0), (1, -1))
        return self.mask.visible(ops, self.score_shape, rows, cols)

    def intervals(self, query_len: int, key_len: int, batch: int = 1) -> Intervals | None:
        found = self.interval_set(query_len, key_len, batch)
        return None if found is None else found.single

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        found = self.mask.interval_set(self.score_shape.query_len, self.score_shape.key_len, batch)
        if found is None or self.cols is not None or (found.count > 1 and self.mask.is_array):
            return None
        return found if self.rows is None else IntervalSet(found.start[..., self.rows], found.stop[..., self.rows])

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        self.mask.check(ops, self.score_shape)

    def leaves(self) -> list[Array]:
        # Which rows and columns are meant is known while a program is traced.
        return self.mask.leaves()

    def with_leaves(self, leaves: Iterator[Array]) -> Mask:
        return dataclasses.replace(self, mask=self.mask.with_leaves(leaves))


def _index(name: str, index: Any, length: int) -> HostIndex | None:
    """Positions in [0, length) that a slice, a number or numbers mean."""
    if index is None:
        return None
    expected = "a slice, a whole number or a list of them"
    if isinstance(index, slice):
        if not all(x is None or is_whole(x) for x in (index.start, index.stop, index.step)) or index.step == 0:
            raise ArgumentError(message(name, expected, shown(index)))
        return np.arange(length)[index]
    found = backends.host(index)
    if found is not None and found.shape == (0,):
        return found.astype(np.int64)
    if found is None or found.dtype.kind not in "iu" or found.ndim > 1:
        ragged = "a ragged list or " if found is not None and found.dtype.kind == "O" else ""
        raise ArgumentError(message(name, expected, ragged + shown(index)))
    found = np.atleast_1d(found).astype(np.int64)
    if found.min() < -length or found.max() >= length:
        raise ArgumentError(message(name, f"positions within {length}", shown(found.tolist())))
    return np.where(found < 0, found + length, found)


def row_gradient(problem: Problem, name: str, grad: Array | None) -> Array | None:
    """Check an incoming gradient on the caller's axes and bring it to the uniform ones.

    It is `grad_out`, `grad_weights`, or one number a row.
    """
    if grad is None:
        return None
    ops, layout, score_shape = problem.ops, problem.layout, problem.score_shape
    if is_number(grad):
        grad = ops.asarray(float(grad), problem.value, problem.accumulator)
    backends.of({"query": problem.query, name: grad})
    if not ops.is_floating(grad):
        raise DtypeError(message(name, FLOATING, ops.dtype(grad)))
    if name == "grad_weights":
        wanted = score_shape.user_shape
    else:
        last = layout.value_dim if name == "grad_out" else 1
        wanted = layout.from_canonical(
            ops, ops.broadcast_to(ops.zeros((1,), problem.value), (*score_shape.rows, last))
        ).shape
        wanted = tuple(wanted if name == "grad_out" else wanted[:-1])
    if tuple(grad.shape) != wanted:
        raise ShapeError(message(name, f"the shape {wanted}", tuple(grad.shape)))
    if name == "grad_weights":
        return ops.reshape(grad, (*score_shape.rows, score_shape.key_len))
    if name != "grad_out":
        grad = ops.expand_dims(grad, -1)
    return layout.output_to_canonical(ops, grad)
