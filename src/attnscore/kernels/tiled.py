"""Tiled attention (FlashAttention's algorithm), forward and backward, in the array operations of any backend.

- Memory beyond inputs and outputs is a few tiles; no array of all (query, key) pairs exists unless the caller gets it.
- A masked pair propagates nothing, NaN and infinity included, in either direction; an unmasked pair propagates them.
- The forward saves `row_max` and `log_denom` (and the entropy) of every query; the backward recomputes the weights.
- Only buffers that are made here are written to, so that a framework can differentiate the loops once more.

It reads from top to bottom: the kernel, one score tile, the forward, the backward, then the loops over tiles, the
isolation of non-finite inputs, and slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast, final

from attnscore.backends.base import HALF_PRECISION, Array, Backend, sum_to
from attnscore.base.layout import Shape, Span, entries_of, is_unknown
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiling import DynamicSegment, Segment, TilePlan
from attnscore.masks.shape_spec import ShapeSpec
from attnscore.problem import online_softmax, relative
from attnscore.problem.normalizers import Normalizer
from attnscore.problem.online_softmax import NEG_INF, RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import TABLE
from attnscore.scores.base import nonfinite_rows
from attnscore.scores.forms import FormPullback, Role, times


@final
class Streaming(Kernel):
    """Tiled attention in the framework's operations, for any score, mask and framework."""

    name = "streaming"
    summary = "tiles in the framework's own operations, O(n) memory"
    matrix_is_second_pass = True

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def notes(self, problem: Problem, tiles: TilePlan) -> tuple[str, ...]:
        if problem.normalizer is None or problem.normalizer.threshold_slope == 0:
            return ()
        return ("the scores are computed about 10 times, to find the threshold of each query",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        return forward(problem, tiles)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        return backward(problem, tiles, result, grads)


# One tile of scores


def _score_tile(
    inputs: _Inputs, tiles: TilePlan, rows: Span, cols: Span, partial: bool
) -> tuple[Array, Array | None, FormPullback]:
    """Return the scores of a tile (-inf where masked), unmasked pairs (None: all) and VJP; `partial`: read the mask."""
    problem, ops, dtype = inputs.problem, inputs.problem.ops, inputs.problem.accumulator
    spans: dict[str, Span] = {"query": rows, "key": cols}

    # 16-bit arrays are cast here, tile by tile; no other is wider than the accumulator (`_in_accumulator_dtype`).
    def slice_operand(x: Array, role: Role) -> Array:
        x = x if role == "shared" else _slice(ops, x, -2, spans[role])
        return ops.astype(x, dtype) if ops.dtype(x) in HALF_PRECISION else x

    unmasked = tiles.visible(ops, problem.score_shape, problem.value, rows, cols) if partial else None
    bias: Any = 0.0
    if problem.bias is not None:
        bias = ops.astype(_bias_tile(problem, problem.bias, rows, cols), dtype)
        allowed = ~ops.equal(bias, NEG_INF)
        unmasked = allowed if unmasked is None else ops.logical_and(unmasked, allowed)
    form = problem.form.part(slice_operand)
    scores, score_vjp = form.scores_and_pullback(ops, unmasked if inputs.keeps_infinity else None)
    scores = ops.astype(scores, dtype)
    if inputs.nonfinite_query is not None:
        nonfinite = ops.logical_or(
            _slice(ops, inputs.nonfinite_query, -2, rows), _slice(ops, inputs.nonfinite_key, -1, cols)
        )
        # So far these are scores of the zeros by which `_isolate_nonfinite` has replaced such queries and keys.
        scores = ops.where(nonfinite, float("nan"), scores)
    if problem.bias is not None:
        scores = ops.add(scores, ops.where(unmasked, bias, 0.0))
    if unmasked is not None:
        scores = ops.where(unmasked, scores, NEG_INF)
    return scores, unmasked, score_vjp


def _all_scores(inputs: _Inputs, tiles: TilePlan, rows: Span) -> tuple[Array, Array | None]:
    """Return the scores of some queries against every key (-inf where masked) and the unmasked pairs (None: all).

    A score that holds h numbers for each pair is computed for one key tile at a time: at 131072 keys and h = 64 one
    query would need 34 MB for each of several arrays.
    """
    problem, ops, key_len = inputs.problem, inputs.problem.ops, inputs.problem.score_shape.key_len
    key_spans: list[Span] = [(0, key_len)]
    if not is_unknown(key_len) and problem.form.values_per_pair() > 1:
        size = tiles.key_tile
        key_spans = [(first, min(size, key_len - first)) for first in range(0, max(1, key_len), size)]
    tiles_of_scores = []
    for cols in key_spans:
        scores, unmasked, _ = _score_tile(inputs, tiles, rows, cols, partial=problem.mask is not None)
        shape = (*problem.score_shape.rows[:-1], rows[1], cols[1])
        if ops.shape(scores) != shape:
            # Heads that share query and key are broadcast; a copy, because the caller may write to the result.
            scores = scores + ops.zeros(shape, scores)
        tiles_of_scores.append((scores, unmasked))
    if len(tiles_of_scores) == 1:
        return tiles_of_scores[0]
    scores = ops.concat([scores for scores, _ in tiles_of_scores], -1)
    masks = [ops.broadcast_to(unmasked, x.shape) for x, unmasked in tiles_of_scores if unmasked is not None]
    return scores, ops.concat(masks, -1) if masks else None


def _weighted_sum(ops: Backend, weights: Array, unmasked: Array | None, x: Array, skips_nan_isolation: bool) -> Array:
    """Return weights @ x, to which `x` contributes through unmasked pairs alone (0 * NaN would be NaN).

    `skips_nan_isolation`: no pair is masked, or `x` is known to be finite.
    """
    if skips_nan_isolation or unmasked is None:
        return ops.matmul(weights, x)
    propagated = _propagated_nonfinite(ops, ops.broadcast_to(unmasked, ops.shape(weights)), x)
    return ops.matmul(weights, ops.where(ops.isfinite(x), x, 0.0)) + propagated


def _propagated_nonfinite(ops: Backend, unmasked: Array, x: Array) -> Array:
    """Sum the NaN and infinities of `x` (..., key, dim) over the unmasked keys of each query: (..., query, dim)."""
    attended = ops.astype(unmasked, ops.dtype(x))
    total: Any = 0.0
    for value, is_value in (
        (float("nan"), ops.isnan(x)),
        (float("inf"), ops.equal(x, float("inf"))),
        (NEG_INF, ops.equal(x, NEG_INF)),
    ):
        occurs = ops.matmul(attended, ops.astype(is_value, ops.dtype(x))) > 0
        total = total + ops.astype(ops.where(occurs, value, 0.0), ops.dtype(x))
    return total


# Forward


def forward(problem: Problem, tiles: TilePlan) -> Result:
    """Compute output, log-sum-exp and statistics of every query: the online softmax over its key tiles."""
    ops, score_shape, requested, dtype = problem.ops, problem.score_shape, problem.statistics, problem.accumulator
    inputs = _isolate_nonfinite(_assert_shapes(problem))
    sink = None if problem.sink is None or _has_no_rows(problem) else problem.sink
    sink = None if sink is None else ops.astype(ops.reshape(sink, (*sink.shape, 1, 1)), dtype)

    def update(state: RowState, scores: Array, unmasked: Array | None, rows: Span, cols: Span) -> RowState:
        value = ops.astype(_slice(ops, problem.value, -2, cols), dtype)

        def pool(weights: Array) -> Array:
            dropout_factors = problem.keep_factors(rows, cols)
            dropped = weights if dropout_factors is None else weights * dropout_factors
            return _weighted_sum(ops, dropped, unmasked, value, inputs.skips_nan_isolation)

        return online_softmax.update(ops, state, scores, unmasked, cols[0], pool, requested)

    def query_tile_result(tile: Any, rows: Span) -> tuple[Array, ...]:
        # In order: out, row_max, log_denom, the matrix if requested, the statistics.
        if problem.normalizer is not None:
            return _normalized_query_tile(inputs, problem.normalizer, tiles, tile, rows)

        def visit(state: RowState, cols: Span, partial: bool) -> RowState:
            scores, unmasked, _ = _score_tile(inputs, tiles, rows, cols, partial)
            return update(state, scores, unmasked, rows, cols)

        state = online_softmax.start(
            ops, (*score_shape.rows[:-1], rows[1]), problem.layout.value_dim, problem.value, dtype, requested
        )
        matrix: tuple[Array, ...] = ()
        if problem.matrix is not None:
            scores, unmasked = _all_scores(inputs, tiles, rows)
            is_weights = problem.matrix == "weights"
            matrix = (online_softmax.weights_of_rows(ops, scores, unmasked, sink) if is_weights else scores,)
        if problem.matrix is None or problem.layout.value_dim > 0:
            # The same tiles with and without the matrix, so that it changes no bit of the output.
            state = _iter_key_tiles(problem, tiles, tile, visit, state)
        elif problem.matrix == "weights" and scores.shape[-1] != 0:
            # Without values there is no output: statistics come from the scores of the matrix, if it has a key.
            state = update(state, scores, unmasked, rows, (0, score_shape.key_len))
        out, row_max, log_denom, statistics = online_softmax.finish(ops, state, sink, requested)
        return ops.astype(out, problem.dtype), row_max, log_denom, *matrix, *statistics.values()

    names = [name for name in requested if name != "log_sum_exp"]
    widths = (1, 1, *(() if problem.matrix is None else (score_shape.key_len,)), *(1 for _ in names))
    columns = [(problem.layout.value_dim, problem.dtype), *((width, dtype) for width in widths)]
    out, row_max, log_denom, *remaining = _map_query_tiles(
        problem, tiles, query_tile_result, problem.operands().values(), columns
    )
    matrix = None if problem.matrix is None else remaining.pop(0)
    return Result(out, row_max, log_denom, dict(zip(names, remaining, strict=True)), matrix)


def _normalized_query_tile(
    inputs: _Inputs, normalizer: Normalizer, tiles: TilePlan, tile: Any, rows: Span
) -> tuple[Array, ...]:
    """Return the results of a query tile as `forward` does, with another normalizer than the softmax.

    It passes over the key tiles for the largest score and the statistics of the scores, then for the threshold (several
    times), then for the weighted sum. A matrix has weights: one of scores needs no normalizer.
    """
    problem, ops, dtype = inputs.problem, inputs.problem.ops, inputs.problem.accumulator
    shape, requested = (*problem.score_shape.rows[:-1], rows[1]), problem.statistics

    def fold(body: Callable[[Any, Array, Array | None, Span], Any], carry: Any) -> Any:
        """Visit the key tiles in order: ``carry = body(carry, scores, unmasked, cols)``."""

        def visit(carry: Any, cols: Span, partial: bool) -> Any:
            scores, unmasked, _ = _score_tile(inputs, tiles, rows, cols, partial)
            return body(carry, scores, unmasked, cols)

        return _iter_key_tiles(problem, tiles, tile, visit, carry)

    # The online softmax with an output of width 0 finds the statistics of the scores, and the largest score, which the
    # threshold needs. The sigmoid has none (slope 0).
    score_stats = tuple(name for name in requested if TABLE[name].describes == "scores")
    state = online_softmax.start(ops, shape, 0, problem.value, dtype, score_stats)
    if normalizer.threshold_slope != 0 or score_stats or "max_weight" in requested:
        state = fold(
            lambda state, scores, unmasked, cols: online_softmax.update(
                ops, state, scores, unmasked, cols[0], lambda weights: ops.slice_axis(weights, -1, 0, 0), score_stats
            ),
            state,
        )
    _, row_max, _, statistics = online_softmax.finish(ops, state, None, score_stats)
    threshold = normalizer.threshold(
        ops, row_max, lambda body, carry: fold(lambda carry, scores, *_: body(carry, scores), carry)
    )

    def weights_of(scores: Array, unmasked: Array | None) -> Array:
        weights = normalizer.weights(ops, scores, row_max, threshold)
        return weights if unmasked is None else ops.where(unmasked, weights, 0.0)

    def pool(
        sums: tuple[Array, Array, Array], scores: Array, unmasked: Array | None, cols: Span
    ) -> tuple[Array, Array, Array]:
        weights, value = weights_of(scores, unmasked), ops.astype(_slice(ops, problem.value, -2, cols), dtype)
        dropout_factors = problem.keep_factors(rows, cols)
        dropped = weights if dropout_factors is None else weights * dropout_factors
        return (
            sums[0] + _weighted_sum(ops, dropped, unmasked, value, inputs.skips_nan_isolation),
            sums[1] + ops.sum(weights, axis=-1, keepdims=True),
            sums[2] + ops.sum(weights * weights, axis=-1, keepdims=True),
        )

    zero = ops.zeros((*shape, 1), problem.value, dtype)
    out = ops.zeros((*shape, problem.layout.value_dim), problem.value, dtype)
    out, total, squares = fold(pool, (out, zero, zero))
    matrix = () if problem.matrix is None else (weights_of(*_all_scores(inputs, tiles, rows)),)
    statistics |= {"max_weight": weights_of(state.max, None), "sum_sq_weights": squares, "sum_weights": total}
    return ops.astype(out, problem.dtype), row_max, threshold, *matrix, *(statistics[name] for name in requested)


# Backward


@dataclass(frozen=True, eq=False)
class RowContext:
    """Saved numbers and gradients of every query, as all tiles of the backward read them."""

    result: Result
    grads: RowGradients
    """Gradients of the outputs; `out` is never None."""
    skips_nan_isolation: bool
    """True where no pair is masked or dout is known to be finite: P^T dO then needs no separate handling of NaN."""
    delta: Array
    """dout . out + dweights . weights - dlse, so that ds = p (dp - delta): FlashAttention's D, less dlse.

    With another normalizer than the softmax: `_delta_of_threshold`.
    """

    def normalizer_vjp(self, ops: Backend, slopes: Array, log_p: Array, grad_p: Array | float, rows: Span) -> Array:
        """Return the gradient of the scores of a tile, from `grad_p`, the gradient of its weights.

        `slopes` are the derivatives of the normalizer: p for the softmax, which alone has `log_p` and an entropy.
        """
        # Forward: p = exp(scores - row_max - log_denom), H = -sum p log p
        grad = slopes * (grad_p - _slice(ops, self.delta, -2, rows))
        if self.grads.entropy is None:
            return grad
        entropy = _slice(ops, self.result.statistics["entropy"], -2, rows)
        minus_grad_of_entropy = slopes * (ops.where(ops.equal(slopes, 0), 0.0, log_p) + entropy)
        return grad - minus_grad_of_entropy * _slice(ops, self.grads.entropy, -2, rows)


def _row_context(inputs: _Inputs, tiles: TilePlan, result: Result, grads: RowGradients) -> RowContext:
    """Return saved numbers, gradients and delta of every query, for the tiles of the backward."""
    problem, ops = inputs.problem, inputs.problem.ops
    if grads.out is None:
        grads = dataclasses.replace(grads, out=ops.zeros(ops.shape(result.out), result.out))
    delta_of = _delta_of_softmax if problem.normalizer is None else _delta_of_threshold
    skips_nan_isolation = (problem.mask is None and problem.bias is None) or ops.known_finite(grads.out)
    return RowContext(result, grads, skips_nan_isolation, delta_of(inputs, tiles, result, grads))


def _delta_of_softmax(inputs: _Inputs, tiles: TilePlan, result: Result, grads: RowGradients) -> Array:
    """Return `RowContext.delta` of every query."""
    problem, ops, dtype = inputs.problem, inputs.problem.ops, inputs.problem.accumulator
    pairs = [(result.out, grads.out)]
    if problem.matrix == "weights" and grads.matrix is not None:
        pairs.append((result.matrix, grads.matrix))

    def dot_products(_: Any, rows: Span) -> tuple[Array]:
        # Forward: out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out. A fully masked query has out = 0, and ignores
        # dout. A gradient of the weights adds dw to dp, and so p . dw to the sum.
        total: Any = 0.0
        for pair in pairs:
            x, grad = (ops.astype(_slice(ops, x, -2, rows), dtype) for x in pair)
            total = total + ops.sum(times(ops, x, grad), axis=-1, keepdims=True)
        return (total,)

    # By query tiles: the products of all queries at once would be the largest arrays of the backward.
    (delta,) = _map_query_tiles(problem, tiles, dot_products, [x for pair in pairs for x in pair], [(1, dtype)])
    return delta if grads.log_sum_exp is None else delta - grads.log_sum_exp


def _delta_of_threshold(inputs: _Inputs, tiles: TilePlan, result: Result, grads: RowGradients) -> Array:
    """Return delta of every query for another normalizer than the softmax: the gradient through the threshold.

    The threshold holds the sum of the weights at 1, so ds_j = w'_j (dp_j - sum w' dp / sum w'), where w' is the
    derivative of a weight by its score (for the softmax, the weight). The sums take a pass over the key tiles.
    """
    problem, ops = inputs.problem, inputs.problem.ops
    normalizer = cast(Normalizer, problem.normalizer)
    if normalizer.threshold_slope == 0:
        # The sigmoid has no threshold: ds = w' dp.
        return ops.zeros(ops.shape(result.row_max), result.row_max)

    def query_tile_delta(tile: Any, rows: Span) -> tuple[Array]:
        """Return delta of a query tile, from the sums of w' dp and of w' over its key tiles."""

        def visit(sums: tuple[Array, Array], cols: Span, partial: bool) -> tuple[Array, Array]:
            scores, unmasked, _ = _score_tile(inputs, tiles, rows, cols, partial)
            slopes = _normalizer_values(normalizer.slopes, ops, result, scores, unmasked, rows)
            products = slopes * _weight_gradients(problem, grads, rows, cols)[0]
            if unmasked is not None:
                products = ops.where(unmasked, products, 0.0)
            return (
                sums[0] + ops.sum(products, axis=-1, keepdims=True),
                sums[1] + ops.sum(slopes, axis=-1, keepdims=True),
            )

        zero = 0.0 * _slice(ops, result.row_max, -2, rows)
        products, slopes = _iter_key_tiles(problem, tiles, tile, visit, (zero, zero))
        if grads.log_sum_exp is not None:
            # The threshold is saved as log_denom, so grads.log_sum_exp is its gradient.
            products = products - normalizer.threshold_slope * _slice(ops, grads.log_sum_exp, -2, rows)
        return (products / ops.where(ops.equal(slopes, 0), 1.0, slopes),)

    arrays = [result.row_max, result.log_denom, grads.out, *problem.operands().values()]
    (delta,) = _map_query_tiles(problem, tiles, query_tile_delta, arrays, [(1, problem.accumulator)])
    return delta


def _normalizer_values(
    function: Callable[..., Array], ops: Backend, result: Result, scores: Array, unmasked: Array | None, rows: Span
) -> Array:
    """Return the weights or slopes of a tile, by a function of a normalizer; 0 where masked."""
    values = function(ops, scores, *(_slice(ops, x, -2, rows) for x in (result.row_max, result.log_denom)))
    return values if unmasked is None else ops.where(unmasked, values, 0.0)


def _weight_gradients(
    problem: Problem, grads: RowGradients, rows: Span, cols: Span
) -> tuple[Array, Array, Array | None]:
    """Return a tile's gradients of the weights before dropout and of the output, and its factors of dropout, if any."""
    ops, dtype = problem.ops, problem.accumulator
    # Forward: out = (p * dropout_factors) @ value
    value = ops.astype(_slice(ops, problem.value, -2, cols), dtype)
    grad_out = ops.astype(_slice(ops, grads.out, -2, rows), dtype)
    grad_p, dropout_factors = ops.matmul(grad_out, ops.matrix_transpose(value)), problem.keep_factors(rows, cols)
    if dropout_factors is not None:
        grad_p = grad_p * dropout_factors
    if grads.matrix is not None:
        grad_p = grad_p + _matrix_gradient(problem, grads.matrix, rows, cols)
    return grad_p, grad_out, dropout_factors


def _matrix_gradient(problem: Problem, grad: Array, rows: Span, cols: Span) -> Array:
    """Return a tile of the gradient of `Problem.matrix`."""
    ops = problem.ops
    return ops.astype(_slice(ops, _slice(ops, grad, -2, rows), -1, cols), problem.accumulator)


def _tile_gradients(
    inputs: _Inputs, tiles: TilePlan, context: RowContext, rows: Span, cols: Span, partial: bool
) -> dict[str, Array]:
    """Return one tile's gradient of every operand but the sink, not yet summed over broadcast axes."""
    problem, ops, dtype = inputs.problem, inputs.problem.ops, inputs.problem.accumulator
    scores, unmasked, score_vjp = _score_tile(inputs, tiles, rows, cols, partial)
    if problem.matrix == "scores":
        # The caller gets the scores alone: there are no weights, and the value has dimension 0.
        grad = context.grads.matrix
        grad_scores = 0.0 * scores if grad is None else _matrix_gradient(problem, grad, rows, cols)
        grad_value = ops.astype(0.0 * _slice(ops, problem.value, -2, cols), dtype)
    else:
        if problem.normalizer is None:
            # Forward: p = exp(scores - row_max - log_denom)
            row_values = (_slice(ops, x, -2, rows) for x in (context.result.row_max, context.result.log_denom))
            log_p = online_softmax.log_weights(ops, scores, *row_values)
            p = ops.exp(log_p)
            if unmasked is not None:
                # Where row_max is NaN, from an unmasked key, masked keys have exp(-inf - NaN).
                p = ops.where(unmasked, p, 0.0)
            slopes = p
        else:
            p, slopes = (
                _normalizer_values(function, ops, context.result, scores, unmasked, rows)
                for function in (problem.normalizer.weights, problem.normalizer.slopes)
            )
            log_p = None
        grad_p, grad_out, dropout_factors = _weight_gradients(problem, context.grads, rows, cols)
        dropped_p = p if dropout_factors is None else p * dropout_factors
        attended_by = None if unmasked is None else ops.matrix_transpose(unmasked)
        grad_value = _weighted_sum(
            ops, ops.matrix_transpose(dropped_p), attended_by, grad_out, context.skips_nan_isolation
        )
        grad_scores = context.normalizer_vjp(ops, slopes, log_p, grad_p, rows)
    if unmasked is not None:
        # Forward: scores = where(unmasked, scores, -inf)
        grad_scores = ops.where(unmasked, grad_scores, 0.0)
    # Forward: scores = form(query, key) + bias
    gradients = {**score_vjp(grad_scores), "value": grad_value}
    if problem.bias is None:
        return gradients
    return {**gradients, "bias": relative.sum_diagonals(ops, grad_scores) if problem.has_relative_bias else grad_scores}


def _has_no_rows(problem: Problem) -> bool:
    """Return whether there are no queries: their number, the batch or the number of heads is 0.

    TensorFlow's optimizer of graphs (2.21) divides by the length of an empty array, which ends the process: the forward
    leaves the sink of no queries out, and the backward computes nothing.
    """
    return any(not is_unknown(n) and n == 0 for n in problem.score_shape.rows)


def backward(problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients) -> dict[str, Array]:
    """Compute the gradients of the form's arrays, of ``value``, and of ``bias`` and ``sink`` where there are any."""
    ops, dtype = problem.ops, problem.accumulator
    if _has_no_rows(problem):
        return {name: ops.zeros(ops.shape(x), x, dtype) for name, x in problem.operands().items()}
    inputs = _isolate_nonfinite(problem)
    context = _row_context(inputs, tiles, result, grads)
    shapes = {name: ops.shape(x) for name, x in problem.operands().items() if name != "sink"}
    is_relative, query_len = problem.has_relative_bias, problem.score_shape.query_len
    roles: dict[str, Role] = {name: problem.form.role(name) for name in problem.form.arrays()}
    axes: dict[str, Shape] = {name: problem.score_shape.lead for name in shapes if roles.get(name) != "shared"}
    if problem.bias is not None and not is_relative:
        axes["bias"] = (*problem.score_shape.rows, problem.score_shape.key_len)
    # A graph may not know yet whether a batch axis, or an axis of the bias, is broadcast: a gradient is summed over it
    # only after all tiles (at the end of this function).
    unknown = [
        (name, i, shapes[name][i]) for name in axes for i in range(len(axes[name])) if is_unknown(shapes[name][i])
    ]
    for name, i, _ in unknown:
        shapes[name] = (*shapes[name][:i], axes[name][i], *shapes[name][i + 1 :])
    by_query = [name for name in shapes if (name == "bias" and not is_relative) or roles.get(name) == "query"]
    # The axis of the keys (of a relative bias: of the diagonals) in each gradient that has one.
    key_axis = {name: -2 for name in shapes if name == "value" or roles.get(name) == "key"} | {"bias": -1}

    def visit_query_tile(tile: Any, rows: Span, buffers: dict[str, Array]) -> dict[str, Array]:
        # Gradients with an axis of queries are summed over the key tiles in a buffer of this query tile, and then added
        # to the buffer of all queries. The others (key, value) are added to their buffers key tile by key tile.
        query_tile_buffers = {
            name: ops.zeros(
                (*shapes[name][:-2], 1 if shapes[name][-2] == 1 else rows[1], shapes[name][-1]), context.delta, dtype
            )
            for name in by_query
        }

        def visit(carry: dict[str, Array], cols: Span, partial: bool) -> dict[str, Array]:
            gradients = _tile_gradients(inputs, tiles, context, rows, cols, partial)
            # The entries of a relative bias that a tile reads, as in `relative.tile`.
            diagonals = (query_len - rows[0] - rows[1] + cols[0], rows[1] + cols[1] - 1)
            return carry | {
                name: _add(
                    ops, carry[name], grad, key_axis.get(name), diagonals if is_relative and name == "bias" else cols
                )
                for name, grad in gradients.items()
            }

        summed: dict[str, Array] = _iter_key_tiles(problem, tiles, tile, visit, buffers | query_tile_buffers)
        return summed | {name: _add(ops, buffers[name], summed[name], -2, rows) for name in by_query}

    buffers = {name: ops.zeros(shape, context.delta, dtype) for name, shape in shapes.items()}
    size, tail, whole = tiles.query_tile, tiles.tail, len(tiles.segments) - (tiles.tail > 0)
    buffers = ops.loop(whole, lambda i, x: visit_query_tile(i, (i * size, size), x), buffers)
    if tail:
        buffers = visit_query_tile(whole, (whole * size, tail), buffers)
    for name, i, length in unknown:
        buffers[name] = ops.sum_to_length(buffers[name], i, length)
    return buffers if problem.sink is None else buffers | {"sink": sink_gradient(problem, problem.sink, context)}


def sink_gradient(problem: Problem, sink: Array, context: RowContext) -> Array:
    """Return the gradient of the sink, a score whose value vector is 0: grad_p = dout . value = 0."""
    ops, shape = problem.ops, tuple(sink.shape)
    sink = ops.astype(ops.reshape(sink, (*shape, 1, 1)), problem.accumulator)
    log_p = online_softmax.log_weights(ops, sink, context.result.row_max, context.result.log_denom)
    grad = context.normalizer_vjp(ops, ops.exp(log_p), log_p, 0.0, (0, problem.score_shape.query_len))
    return ops.reshape(sum_to(ops, grad, sink.shape), shape)


def _add(ops: Backend, buffer: Array, grad: Array, axis: int | None, span: Span) -> Array:
    """Add a tile's gradient to its buffer, at `span` of `axis` (None: everywhere), summed over broadcast axes."""
    shape = list(buffer.shape)
    if axis is None or shape[axis] == 1:
        return buffer + sum_to(ops, grad, shape)
    shape[axis] = span[1]
    return ops.add_at(buffer, axis, span[0], sum_to(ops, grad, shape))


# Loops over tiles


def _iter_key_tiles(
    problem: Problem, tiles: TilePlan, query_tile: Any, visit: Callable[[Any, Span, bool], Any], carry: Any
) -> Any:
    """Visit the key tiles of a query tile in order: ``carry = visit(carry, (start, count), partial)``."""
    ops, tile = problem.ops, tiles.key_tile
    segments = tiles.segments_of(ops, query_tile, problem.value)
    if isinstance(segments, DynamicSegment):
        return _iter_dynamic_key_tiles(ops, segments, tiles, visit, carry)
    for segment in segments:
        count, tail = divmod(segment.stop - segment.start, tile)

        def body(j: Any, carry: Any, segment: Segment = segment) -> Any:
            return visit(carry, (segment.start + j * tile, tile), segment.partial)

        carry = ops.loop(count, body, carry)
        if tail:
            carry = visit(carry, (segment.stop - tail, tail), segment.partial)
    return carry


def _iter_dynamic_key_tiles(
    ops: Backend, segment: DynamicSegment, tiles: TilePlan, visit: Callable[[Any, Span, bool], Any], carry: Any
) -> Any:
    """Visit the key tiles of a segment whose ends are traced, each as partial.

    The loop has a static number of steps, the tiles that the longest segment can touch. Tiles begin at multiples of
    their size; when the program runs, steps past the end of the segment do nothing.
    """
    tile = tiles.key_tile
    # Whole tiles of all keys; the tail is visited after the loop, in its own shape.
    whole, tail = divmod(tiles.key_len, tile)
    first, last = segment.start // tile, (segment.stop + tile - 1) // tile

    def body(j: Any, carry: Any) -> Any:
        index = first + j
        return ops.cond((index < last) & (index < whole), lambda c: visit(c, (index * tile, tile), True), carry)

    carry = ops.loop(min(segment.max_key_tiles, whole), body, carry)
    if tail:
        carry = ops.cond(segment.stop > whole * tile, lambda c: visit(c, (whole * tile, tail), True), carry)
    return carry


def _map_query_tiles(
    problem: Problem,
    tiles: TilePlan,
    query_tile_result: Callable[[Any, Span], tuple[Array, ...]],
    arrays: Collection[Array],
    columns: Iterable[tuple[int, str]],
) -> tuple[Array, ...]:
    """Concatenate ``query_tile_result(tile, rows)`` of all query tiles, which computes from `arrays`.

    `columns` are the length of the last axis and the dtype of each array in the result.
    """
    ops, length, tile, tail = problem.ops, tiles.query_len, tiles.query_tile, tiles.tail
    whole = len(tiles.segments) - (tail > 0)
    if len(tiles.segments) < 2:
        return query_tile_result(0, (0, length))
    if ops.needs_grad(*arrays) or not all(map(ops.has_cpu_buffer, arrays)):
        results = ops.map_tiles(whole, lambda i: query_tile_result(i, (i * tile, tile)))
        results += [query_tile_result(whole, (whole * tile, tail))] if tail else []
        return tuple(ops.concat(tile_outputs, -2) for tile_outputs in zip(*results, strict=True))
    # Where no framework records the tiles, they are written to preallocated arrays. Concatenated parts would take as
    # much again, and the allocator would not return it: 24 to 55 MB at 16384 tokens, on top of the backward's memory.

    def write(outputs: tuple[Array, ...], tile_outputs: tuple[Array, ...], start: Any) -> tuple[Array, ...]:
        return tuple(ops.add_at(x, -2, start, y) for x, y in zip(outputs, tile_outputs, strict=True))

    lead = problem.score_shape.rows[:-1]
    outputs = tuple(ops.zeros((*lead, length, width), problem.value, dtype) for width, dtype in columns)
    outputs = ops.loop(whole, lambda i, x: write(x, query_tile_result(i, (i * tile, tile)), i * tile), outputs)
    return write(outputs, query_tile_result(whole, (whole * tile, tail)), whole * tile) if tail else outputs


# Inputs: their dtype, non-finite rows, shapes that a graph knows only when it runs


@dataclass(frozen=True, eq=False)
class _Inputs:
    """A problem with zeros for its non-finite queries and keys, and where these were.

    Otherwise the products of the backward, such as dq = ds k, would multiply the 0 of a masked pair by NaN.
    """

    problem: Problem
    """The problem, with zeros for queries and keys that hold a NaN, or an infinity that the form does not keep."""
    nonfinite_query: Array | None
    """Which queries were replaced, (..., query, 1); None where no query and no key had to be."""
    nonfinite_key: Array | None
    """Which keys were replaced, (..., 1, key), or None."""
    skips_nan_isolation: bool
    """True where no pair is masked or the values are known to be finite: P V then needs no separate handling of NaN."""
    keeps_infinity: bool = False
    """Whether `problem` may still hold infinities, because its form gives them finite scores (tanh(inf) = 1). The form
    is then passed the mask, and computes masked pairs from zeros."""


def _isolate_nonfinite(problem: Problem) -> _Inputs:
    """Replace non-finite queries and keys by zeros, and note where they were: `_score_tile` sets their scores to NaN.

    Without a mask or bias no pair is masked, and NaN may propagate by itself.
    """
    ops, problem = problem.ops, _in_accumulator_dtype(problem)
    if problem.mask is None and problem.bias is None:
        return _Inputs(problem, nonfinite_query=None, nonfinite_key=None, skips_nan_isolation=True)
    skips_nan_isolation = ops.known_finite(problem.value)
    arrays = {name: x for name, x in problem.form.arrays().items() if problem.form.role(name) != "shared"}
    if all(map(ops.known_finite, arrays.values())):
        return _Inputs(problem, nonfinite_query=None, nonfinite_key=None, skips_nan_isolation=skips_nan_isolation)
    nonfinite: dict[Role, Array] = {}
    for name, x in arrays.items():
        role, rows = problem.form.role(name), nonfinite_rows(ops, x, problem.form.keeps_infinity)
        nonfinite[role] = ops.logical_or(nonfinite[role], rows) if role in nonfinite else rows
    clean = problem.form.with_arrays(
        {name: ops.where(nonfinite[problem.form.role(name)], 0.0, x) for name, x in arrays.items()}
    )
    problem = dataclasses.replace(problem, form=clean)
    nonfinite_key = ops.matrix_transpose(nonfinite["key"])
    return _Inputs(problem, nonfinite["query"], nonfinite_key, skips_nan_isolation, clean.keeps_infinity)


def _in_accumulator_dtype(problem: Problem) -> Problem:
    """Return the problem with no array of the form wider than the accumulator; 16-bit arrays stay as they are."""
    # A float64 parameter of a score on float32 data makes lowered arrays float64. They are cast before non-finite
    # rows are looked for, because a cast may overflow; 16-bit arrays are cast tile by tile, to save memory.
    ops, unchanged = problem.ops, (problem.accumulator, *HALF_PRECISION)
    cast = {
        name: ops.astype(x, problem.accumulator)
        for name, x in problem.form.arrays().items()
        if ops.dtype(x) not in unchanged
    }
    return dataclasses.replace(problem, form=problem.form.with_arrays(cast)) if cast else problem


def _assert_shapes(problem: Problem) -> Problem:
    """Return the problem with run-time assertions on the shapes of mask and bias that a graph does not know yet."""
    specs = [] if problem.mask is None else [*problem.mask.shapes(problem.score_shape)]
    if problem.bias is not None and not problem.has_relative_bias:
        # Each axis has the length 1 or the scores' length. `expand_if_relative` asserts the lengths of a relative bias.
        allowed = [tuple((1, n) for n in (*problem.score_shape.rows, problem.score_shape.key_len))]
        specs.append(ShapeSpec("bias", problem.bias, expected="", allowed=allowed))
    unchecked = [(spec.name, spec.array, spec.allowed) for spec in specs if not spec.is_known]
    if not unchecked:
        return problem
    # Every score depends on the arrays of the form, so an assertion on one of them cannot be pruned.
    arrays = dict(problem.form.arrays())
    name = next(iter(arrays))
    arrays[name] = problem.ops.assert_shape(arrays[name], unchecked)
    return dataclasses.replace(problem, form=problem.form.with_arrays(arrays))


# Slices


def _slice(ops: Backend, x: Array, axis: int, span: Span) -> Array:
    """Return `span` of `x` along `axis`, or `x` where the axis is broadcast or the span is the whole."""
    return x if x.shape[axis] in (1, span[1]) else ops.slice_axis(x, axis, *span)


def _bias_tile(problem: Problem, bias: Array, rows: Span, cols: Span) -> Array:
    """Return the bias of the pairs of a tile; axes that are broadcast stay 1."""
    ops = problem.ops
    if problem.has_relative_bias:
        return relative.tile(ops, bias, problem.score_shape.query_len, rows, cols)
    return _slice_bias(ops, _slice_bias(ops, bias, -1, cols), -2, rows)


def _slice_bias(ops: Backend, x: Array, axis: int, span: Span) -> Array:
    """Slice an axis of a bias; where a graph does not know its size yet, by positions, which allow a size of 1."""
    return (
        entries_of(ops, x, ops.positions(*span, x), axis) if is_unknown(x.shape[axis]) else _slice(ops, x, axis, span)
    )
