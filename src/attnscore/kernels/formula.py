"""Attention by the formula, in the operations of a compiled program: two kernels for small calls.

- `OneTile` for graphs of TensorFlow, where a native kernel is a callback into Python: all scores, softmax, product.
  Non-finite numbers are not isolated: where under a mask the scores before it, the output or the gradients of the
  weights are not all finite, the program takes another branch, tiled attention. If they are finite, so is every number
  that a masked pair multiplies by 0. A distance of many terms is computed as a matrix product and squared norms; where
  the norms are too large for an accurate result, another branch sums the differences.
- `FewKeys` for one query a head in programs of JAX, or two in tiny calls, which repeat their keys: a sum over keys is
  one term for each key, and XLA fuses the terms. 0 replaces the term of a masked pair, so that it propagates nothing,
  NaN and infinity included, without a branch. There is no axis of queries: XLA copies an array to insert an axis of
  size 1 into it.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend, VjpFunction, sum_to
from attnscore.base import thresholds
from attnscore.base.layout import is_unknown
from attnscore.kernels import tiled, tiling
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import AdditiveForm, DistanceForm, FormPullback, InnerForm, Role
from attnscore.scores.gaussian import INNER_LIMIT

# No forms of custom scores, which may have custom gradients.
_FORMS = (InnerForm, AdditiveForm, DistanceForm)


class _Formula(Kernel):
    """Base of both kernels. A gradient of the weights without one of the output is rare: it goes to tiled attention."""

    needs = frozenset(("staged",))
    differentiable = Streaming()


def _can_use_formula(problem: Problem) -> bool:
    """Return whether a call has a built-in score, static sizes above 0, and no option but mask, dropout and weights."""
    if type(problem.form) not in _FORMS:
        return False
    sizes = (*problem.score_shape.rows, problem.score_shape.key_len, problem.layout.value_dim)
    of_arrays = (n for x in (problem.query, problem.key, problem.value) for n in x.shape)
    if any(map(is_unknown, (*sizes, *of_arrays))) or 0 in sizes or problem.statistics or problem.matrix == "scores":
        return False
    if any(x is not None for x in (problem.bias, problem.sink, problem.normalizer)):
        return False
    # Shapes of a mask that a graph learns when it runs have to be checked there, which the formula does not do.
    return problem.mask is None or all(spec.is_known for spec in problem.mask.shapes(problem.score_shape))


# One tile


@final
@dataclass(frozen=True, eq=False)
class OneTile(_Formula):
    """The formula on one tile, for small calls of graphs, where a callback to the native kernel takes longer.

    Where sums are not finite under a mask, or an expanded square is not exact, a branch of the program that is rarely
    taken computes them again: without expanding the square, otherwise by tiles.
    """

    may_expand_squares: bool = True
    """Whether a distance may be computed by expanding its square; not in the branch that avoids this."""

    name = "one_tile"
    summary = "the formula on a single tile, for small calls of graphs"
    is_sometimes_slower = True

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        ops, shape = problem.ops, problem.score_shape
        if (
            ops.has_slow_callbacks
            and ops.needs_host_callback(*problem.operands().values())
            and _can_use_formula(problem)
        ):
            # Tiles are sized for a vector of differences for each pair, which an expanded square does not have.
            tiles = tiling.plan(problem)
            if (tiles.query_tile >= shape.query_len and tiles.key_tile >= shape.key_len) or _expands_square(problem):
                return ()
        return ("not a small call in a graph",)

    def reasons_not_automatic(self, problem: Problem) -> tuple[str, ...]:
        elements = sum(math.prod(x.shape) for x in (problem.query, problem.key, problem.value))
        pairs = math.prod(problem.score_shape.rows) * problem.score_shape.key_len
        per_pair = problem.form.values_per_pair()
        # One value a pair: the score is a matrix product.
        if per_pair == 1 or _expands_square(problem):
            is_small = pairs * problem.form.query.shape[-1] <= thresholds.ONE_TILE_PRODUCTS
        else:
            is_small = pairs * per_pair <= thresholds.ONE_TILE_VALUES
        if is_small and pairs <= thresholds.TILE_SCORES and elements <= thresholds.ONE_TILE_ELEMENTS:
            return ()
        return ("a call for which the callback to the native kernel takes less time",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        ops, expands_square = problem.ops, self.may_expand_squares and _expands_square(problem)
        tile = _tile(problem, tiles, expands_square, with_vjp=False)
        matrix = () if problem.matrix is None else (tile.weights,)
        out = ops.matmul(tile.dropped_weights, tile.value)
        outputs: tuple[Array, ...] = (ops.astype(out, problem.dtype), *matrix)

        def recompute(_: Any) -> tuple[Array, ...]:
            result = (OneTile(may_expand_squares=False) if expands_square else Streaming()).forward(problem, tiles)
            return (result.out,) if problem.matrix is None else (result.out, result.matrix)

        if (condition := _needs_recomputing(ops, tile, out)) is not None:
            outputs = ops.cond_rarely(condition, recompute, outputs)
        # In place of row_max and log_denom: no statistic is requested, and the backward reads neither.
        zeros = ops.zeros((*problem.score_shape.rows, 1), tile.scores)
        weights = outputs[1] if problem.matrix is not None else None
        return Result(outputs[0], zeros, zeros, statistics={}, matrix=weights)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        if grads.out is None:
            return tiled.backward(problem, tiles, tiled.forward(problem, tiles), grads)
        ops, dtype = problem.ops, problem.accumulator
        expands_square = self.may_expand_squares and _expands_square(problem)
        tile = _tile(problem, tiles, expands_square, with_vjp=True)
        grad_out, out = (ops.astype(x, dtype) for x in (grads.out, result.out))
        # Forward: out = (p * dropout_factors) @ value
        grad_weights = ops.matmul(grad_out, ops.matrix_transpose(tile.value))
        grad_value = ops.matmul(ops.matrix_transpose(tile.dropped_weights), grad_out)
        if tile.dropout_factors is not None:
            grad_weights = grad_weights * tile.dropout_factors
        # sum_j p_j dp_j = dout . out
        total = ops.sum(out * grad_out, axis=-1, keepdims=True)
        if grads.matrix is not None:
            grad_matrix = ops.astype(grads.matrix, dtype)
            grad_weights = grad_weights + grad_matrix
            total = total + ops.sum(tile.weights * grad_matrix, axis=-1, keepdims=True)
        # Forward: p = softmax(where(unmasked, scores, -inf))
        grad_scores = tile.weights * (grad_weights - total)
        if tile.unmasked is not None:
            grad_scores = ops.where(tile.unmasked, grad_scores, 0.0)
        form_gradients = tile.scores_vjp(sum_to(ops, grad_scores, tuple(tile.form_scores.shape)))
        gradients = {**dict(zip(problem.form.arrays(), form_gradients, strict=True)), "value": grad_value}
        # In the dtype of sums, like the gradients that `recompute` returns.
        gradients = {
            name: ops.astype(sum_to(ops, gradients[name], tuple(x.shape)), dtype)
            for name, x in problem.operands().items()
        }

        def recompute(_: Any) -> dict[str, Array]:
            if expands_square:
                return OneTile(may_expand_squares=False).backward(problem, tiles, result, grads, requested)
            # `result` has no row_max and log_denom, which tiles need.
            return tiled.backward(problem, tiles, tiled.forward(problem, tiles), grads)

        condition = _needs_recomputing(ops, tile, grad_weights)
        return gradients if condition is None else dict(ops.cond_rarely(condition, recompute, gradients))


@dataclass(frozen=True, eq=False)
class _Tile:
    """Scores and weights of all pairs, by the formula."""

    form_scores: Array
    """Scores before the mask; heads that share query and key have one matrix."""
    scores: Array
    """Scores of every head, -inf where masked."""
    is_exact: Array | None
    """Whether an expanded square is finite and accurate in all pairs; None where no square is expanded."""
    unmasked: Array | None
    """Unmasked pairs; None without a mask."""
    weights: Array
    """Weights before dropout; 0 where masked."""
    dropout_factors: Array | None
    value: Array
    scores_vjp: VjpFunction
    """VJP from a gradient of `form_scores` to gradients of the form's arrays, in their order; for a backward alone."""

    @property
    def dropped_weights(self) -> Array:
        """The weights after dropout."""
        return self.weights if self.dropout_factors is None else self.weights * self.dropout_factors


def _expands_square(problem: Problem) -> bool:
    """Whether a distance is computed as |q|^2 + |k|^2 - 2 q.k: a matrix product in place of a pass over all terms."""
    form = problem.form
    # The VJP of the product does not pass through caps.
    if not isinstance(form, DistanceForm) or form.caps:
        return False
    pairs = math.prod(problem.score_shape.rows) * problem.score_shape.key_len
    # Below the lower bound the product is not worth a branch; above the upper one the branch is slower than a callback.
    # The norms of the vectors are extra work: with fewer pairs than vectors they cost more than the product saves.
    vectors = sum(math.prod(x.shape[:-1]) for x in (form.query, form.key))
    lower, upper = thresholds.ONE_TILE_DISTANCE
    return pairs <= thresholds.TILE_SCORES and pairs > vectors and lower < pairs * form.query.shape[-1] <= upper


def _tile(problem: Problem, tiles: TilePlan, expands_square: bool, with_vjp: bool) -> _Tile:
    """Compute scores and weights of all pairs; `expands_square`: distances by a product; `with_vjp`: for a backward."""
    ops, dtype, score_shape = problem.ops, problem.accumulator, problem.score_shape
    spans = (0, score_shape.query_len), (0, score_shape.key_len)
    form, names = problem.form, tuple(problem.form.arrays())

    def scores_of(*arrays: Array) -> Array:
        in_accumulator = {name: ops.astype(x, dtype) for name, x in zip(names, arrays, strict=True)}
        return ops.astype(form.with_arrays(in_accumulator).scores_and_pullback(ops)[0], dtype)

    vjp: VjpFunction = lambda _: ()  # noqa: E731
    is_exact = None
    if expands_square or isinstance(form, InnerForm):
        # With the form's VJP: the framework's would compute the gradient of the keys transposed, and copy it.
        form_in_accumulator: Any = form.part(lambda x, _: ops.astype(x, dtype))
        if expands_square:
            form_scores, is_exact, form_vjp = _by_expanded_square(ops, form_in_accumulator)
        else:
            form_scores, form_vjp = form_in_accumulator.scores_and_pullback(ops)
        vjp = lambda grad: tuple(map(form_vjp(grad).__getitem__, names))  # noqa: E731
    elif with_vjp:
        form_scores, vjp = ops.vjp(scores_of, tuple(form.arrays().values()))
    else:
        form_scores = scores_of(*form.arrays().values())
    shape = (*score_shape.rows, score_shape.key_len)
    scores = form_scores if tuple(form_scores.shape) == shape else ops.broadcast_to(form_scores, shape)
    unmasked = None
    if problem.mask is not None:
        unmasked = tiles.visible(ops, score_shape, problem.value, *spans)
        scores = ops.where(unmasked, scores, NEG_INF)
    weights = ops.softmax(scores)
    if unmasked is not None:
        # The softmax of a fully masked query is NaN.
        weights = ops.where(unmasked, weights, 0.0)
    value = ops.astype(problem.value, dtype)
    return _Tile(form_scores, scores, is_exact, unmasked, weights, problem.keep_factors(*spans), value, vjp)


def _needs_recomputing(ops: Backend, tile: _Tile, result: Array) -> Array | None:
    """Return the condition on which a rarely taken branch recomputes `result`; None where no branch is needed.

    With a mask, a non-finite number may come from a masked pair, as 0 * NaN; without one it is the right result. An
    expanded square that is not accurate (`_Tile.is_exact`) is computed again too.
    """
    if tile.unmasked is None:
        return None if tile.is_exact is None else ~tile.is_exact
    # A sum is finite only if every entry is. The scores of an expanded square are finite where they are exact.
    total: Any = 0.0
    for x in (tile.form_scores, result) if tile.is_exact is None else (result,):
        total = total + ops.sum(x, axis=tuple(range(len(x.shape))))
    is_right = ops.isfinite(total)
    return ~(is_right if tile.is_exact is None else ops.logical_and(is_right, tile.is_exact))


def _by_expanded_square(ops: Backend, form: DistanceForm) -> tuple[Array, Array, FormPullback]:
    """Return the scores of a distance by |q|^2 + |k|^2 - 2 q.k, whether all are finite and accurate, and their VJP."""
    query, key, scale = form.query, form.key, form.scale
    norms = [ops.sum(x * x, axis=-1, keepdims=True) for x in (query, key)]
    squared = norms[0] + ops.matrix_transpose(norms[1]) - 2 * ops.matmul(query, ops.matrix_transpose(key))
    # Below the limit a product is accurate. NaN counts as too large, without ~(x < limit), which TensorFlow's optimizer
    # makes x >= limit. The scale may be negative.
    is_too_large = [ops.where(abs(scale) * x < INNER_LIMIT, 0.0, 1.0) for x in norms]
    too_large_count = sum(ops.sum(x, axis=tuple(range(len(x.shape)))) for x in is_too_large)

    def vjp(grad: Array) -> dict[str, Array]:
        # Forward: squared_ij = sum_c (q_ic - k_jc)^2
        twice = grad * (-2 * scale)
        transposed = ops.matrix_transpose(twice)
        gradients = {
            name: x * ops.sum(grads, axis=-1, keepdims=True) - ops.matmul(grads, other)
            for name, x, grads, other in (("query", query, twice, key), ("key", key, transposed, query))
        }
        return {**gradients, "scale": -grad * squared}

    return -scale * squared, ops.equal(too_large_count, 0.0), vjp


# Few keys. A row is one query of one head.


@final
class FewKeys(_Formula):
    """A term for each key, for one or two queries over few keys in programs whose compiler fuses them."""

    name = "few_keys"
    summary = "a term for each key, for one or two queries in compiled programs"

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return () if _has_few_keys(problem) else ("not a compiled program of one or two queries over few keys",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        ops, rows = problem.ops, problem.score_shape.rows
        scores, unmasked, weights, _ = _weights(problem, tiles)
        out = _weighted_sum(ops, unmasked, weights, _by_rows(problem, problem.value, "key"))
        # A program that reads neither of these two drops them.
        row_max = online_softmax.safe_max(ops, ops.max(scores, axis=-1, keepdims=True))
        log_denom = ops.log(ops.sum(ops.exp(scores - row_max), axis=-1, keepdims=True))
        outputs = (ops.astype(out, problem.dtype), row_max, log_denom, weights)
        out, row_max, log_denom, matrix = (ops.reshape(x, (*rows, x.shape[-1])) for x in outputs)
        return Result(out, row_max, log_denom, {}, None if problem.matrix is None else matrix)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        if grads.out is None:
            return tiled.backward(problem, tiles, result, grads)
        ops, query_len = problem.ops, problem.score_shape.query_len
        # The compiler finds that the forward has computed these.
        _, unmasked, weights, scores_vjp = _weights(problem, tiles)
        value, grad_out = _by_rows(problem, problem.value, "key"), _by_rows(problem, grads.out, "query")
        # Forward: out = p @ value
        grad_weights = _inner_products(ops, grad_out, value)
        if grads.matrix is not None:
            grad_weights = grad_weights + ops.reshape(ops.astype(grads.matrix, problem.accumulator), weights.shape)
        # Forward: p = softmax(where(unmasked, scores, -inf))
        total = ops.sum(_zero_where_masked(ops, unmasked, weights * grad_weights), axis=-1, keepdims=True)
        grad_scores = _zero_where_masked(ops, unmasked, weights * (grad_weights - total))
        gradients = {**scores_vjp(grad_scores), "value": _times(ops, unmasked, weights, grad_out)}
        if query_len > 1:
            # Each query had its own copy of the keys and values.
            for name in ("key", "value"):
                by_query = ops.reshape(gradients[name], (-1, query_len, *gradients[name].shape[1:]))
                gradients[name] = ops.sum(by_query, axis=1)
        return {name: ops.reshape(gradients[name], x.shape) for name, x in problem.operands().items()}


def _has_few_keys(problem: Problem) -> bool:
    """Whether a call has one or two queries over few keys, in a program whose compiler fuses its operations."""
    score_shape, form = problem.score_shape, problem.form
    # Without channels the rows of a reshape to (-1, ..., 0) are undetermined (`_by_rows`).
    if not _can_use_formula(problem) or 0 in form.key.shape:
        return False
    # The functions below have no dropout, caps or biases.
    if problem.dropout is not None or form.caps or not {"query_bias", "key_bias"}.isdisjoint(form.arrays()):
        return False
    *matrices, query_len = score_shape.rows
    if score_shape.key_len > thresholds.FEW_KEYS:
        return False
    # Heads that share keys or have parameters of their own are left to the native kernel.
    shared = (x for name, x in form.arrays().items() if form.role(name) == "shared")
    if any(x.shape[:-2] != tuple(matrices) for x in (form.query, form.key, problem.value)) or any(
        math.prod(x.shape[:-1]) > 1 for x in shared
    ):
        return False
    key_elements = math.prod(form.key.shape)
    is_tiny = key_elements * query_len <= thresholds.FEW_KEYS_TINY.get(query_len, 0)
    are_many = math.prod(matrices) >= thresholds.FEW_KEYS_ROWS and key_elements <= thresholds.FEW_KEYS_ELEMENTS
    return (is_tiny or (query_len == 1 and are_many)) and problem.ops.fuses(*problem.operands().values())


def _weights(problem: Problem, tiles: TilePlan) -> tuple[Array, Array | None, Array, FormPullback]:
    """Return scores (-inf where masked), unmasked pairs (None: all) and weights (row, key), and the scores' VJP."""
    ops, score_shape, unmasked = problem.ops, problem.score_shape, None
    pairs = (-1, score_shape.key_len)
    if problem.mask is not None:
        unmasked = tiles.visible(ops, score_shape, problem.value, (0, score_shape.query_len), (0, score_shape.key_len))
        unmasked = ops.reshape(ops.broadcast_to(unmasked, (*score_shape.rows, score_shape.key_len)), pairs)
    form: Any = problem.form.part(lambda x, role: _by_rows(problem, x, role))
    scores, vjp = _scores(ops, form, unmasked)
    if unmasked is not None:
        scores = ops.where(unmasked, scores, NEG_INF)
    return scores, unmasked, online_softmax.weights_of_rows(ops, scores, unmasked, sink=None), vjp


def _scores(
    ops: Backend, form: InnerForm | AdditiveForm | DistanceForm, unmasked: Array | None
) -> tuple[Array, FormPullback]:
    """Return the scores (row, key) of a form without biases and caps, and their VJP, which keeps masked pairs at 0.

    The gradient of an array that all pairs share is their sum, without the axes of pairs.
    """
    query, key = form.query, form.key
    if isinstance(form, InnerForm):
        query = query * form.scale

        def inner_vjp(grad: Array) -> dict[str, Array]:
            grad_query = _weighted_sum(ops, unmasked, grad, key) * form.scale
            return {"query": grad_query, "key": _times(ops, unmasked, grad, query)}

        return _inner_products(ops, query, key), inner_vjp
    if isinstance(form, AdditiveForm):
        # The gradient of w_v multiplies `activated` of a masked pair by 0: it has to be finite.
        hidden = _zero_where_masked(ops, unmasked, query + key)
        activated = form.activation.value(ops, hidden)

        def additive_vjp(grad: Array) -> dict[str, Array]:
            grad_key = grad[..., None] * form.activation.slope(ops, hidden, activated) * form.w_v
            grad_w_v = ops.matmul(ops.reshape(grad, (-1,)), ops.reshape(activated, (-1, activated.shape[-1])))
            return {"query": _sum_over_keys(grad_key), "key": grad_key, "w_v": grad_w_v}

        return ops.matmul(activated, form.w_v), additive_vjp
    difference = query - key
    squares = ops.sum(difference * difference, axis=-1)

    def distance_vjp(grad: Array) -> dict[str, Array]:
        grad_key = _times(ops, unmasked, 2 * form.scale * grad, difference)
        grad_scale = -ops.sum(_zero_where_masked(ops, unmasked, grad * squares), axis=(0, 1))
        return {"query": -_sum_over_keys(grad_key), "key": grad_key, "scale": grad_scale}

    return -form.scale * squares, distance_vjp


def _by_rows(problem: Problem, x: Array, role: Role) -> Array:
    """Return an array in the dtype of sums as (row, 1 or key, dim), keys repeated for each row; a shared one (dim,)."""
    ops, score_shape = problem.ops, problem.score_shape
    shape = x.shape[-1:] if role == "shared" else (-1, 1 if role == "query" else score_shape.key_len, x.shape[-1])
    if role == "key" and score_shape.query_len > 1:
        x = ops.broadcast_to(ops.expand_dims(x, -3), (*score_shape.rows, *x.shape[-2:]))
    return ops.astype(ops.reshape(x, shape), problem.accumulator)


def _inner_products(ops: Backend, query: Array, key: Array) -> Array:
    """Return the products (row, key) of `query` (row, 1, dim) with `key` (row, key, dim)."""
    return ops.reshape(ops.matmul(query, ops.matrix_transpose(key)), key.shape[:-1])


def _sum_over_keys(x: Array) -> Array:
    """Sum (row, key, dim) over the keys: XLA's sum over an axis that is not the last is slower."""
    return functools.reduce(operator.add, (x[:, j] for j in range(x.shape[1])))


def _weighted_sum(ops: Backend, unmasked: Array | None, weights: Array, x: Array) -> Array:
    """Return weights @ x, (row, dim), from `x` (row, key, dim) of unmasked pairs alone."""

    # Slices are multiplied: from 16 keys on, XLA would compute the whole product before it slices it.
    def term(j: int) -> Array:
        return _times(ops, None if unmasked is None else unmasked[:, j], weights[:, j], x[:, j])

    return functools.reduce(operator.add, map(term, range(x.shape[1])))


def _times(ops: Backend, unmasked: Array | None, by_pairs: Array, x: Array) -> Array:
    """Return the products of each pair's number with a row of `x` (row, 1 or key, dim); 0 where masked."""
    return _zero_where_masked(ops, unmasked, by_pairs[..., None] * x)


def _zero_where_masked(ops: Backend, unmasked: Array | None, x: Array) -> Array:
    """Return `x`, which has a number or a vector for each pair, with 0 for masked pairs; `unmasked` None: all pairs."""
    if unmasked is None:
        return x
    return ops.where(unmasked if len(x.shape) == len(unmasked.shape) else unmasked[..., None], x, 0.0)
