"""The dense kernel: the reference implementation, against which all other kernels are tested.

- Computes the scores by their definition (``score.tile``), the whole matrix at once: O(n^2) memory, so it runs only
  when chosen by name.
- Its gradient is the framework's autodiff through this file; NumPy has none.
- Shares no formula with tiled attention except the masks.
"""

from __future__ import annotations

import dataclasses
from typing import cast, final

from attnscore.backends.base import Array, Backend, sum_to
from attnscore.base.layout import is_unknown
from attnscore.errors import KernelUnavailable
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiling import Segment, TilePlan
from attnscore.problem import relative
from attnscore.problem.normalizers import Entmax, Sigmoid
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import TABLE, Matrix
from attnscore.scores.base import nonfinite_rows, with_arrays
from attnscore.scores.forms import checked_tile


@final
class Dense(Kernel):
    """Attention by the whole matrix of scores."""

    name = "dense"
    summary = "the whole n x n matrix, by the definition: the oracle"
    is_sometimes_slower = True
    has_vjp = False

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        # `_pool` loops over the keys of values that may not be finite.
        unknown = is_unknown(problem.value.shape[-2]) and not problem.ops.known_finite(problem.value)
        return ("a number of keys that is not known yet",) if unknown else ()

    def reasons_not_automatic(self, problem: Problem) -> tuple[str, ...]:
        return ("quadratic memory: taken only when asked for by name",)

    def explain_tiles(self, problem: Problem, tiles: TilePlan) -> TilePlan:
        """Return a single tile, in which nothing is skipped; `tiles` as they are where there are no pairs."""
        if 0 in (tiles.query_len, tiles.key_len):
            return tiles
        all_keys = (Segment(0, tiles.key_len, partial=problem.mask is not None),)
        return dataclasses.replace(tiles, query_tile=tiles.query_len, key_tile=tiles.key_len, segments=(all_keys,))

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        ops, score_shape, dtype = problem.ops, problem.score_shape, problem.accumulator
        value = ops.astype(problem.value, dtype)
        scores, visible = _scores(problem)
        masked_scores = ops.where(visible, scores, NEG_INF)
        weights_of = _softmax if problem.normalizer is None else _by_normalizer
        all_weights, row_max, log_denom = weights_of(problem, masked_scores)
        # exactly 0 where masked, also in a row with an unmasked NaN
        weights = ops.where(visible, all_weights[..., : score_shape.key_len], 0.0)
        dropout_factors = problem.keep_factors((0, score_shape.query_len), (0, score_shape.key_len))
        dropped_weights = weights if dropout_factors is None else weights * dropout_factors
        count = ops.sum(ops.astype(visible, dtype), axis=-1, keepdims=True)
        # In autodiff `where` drops the gradient of a fully masked query, which may be NaN: 0 times NaN is NaN.
        out = ops.where(count > 0, _pool(ops, dropped_weights, visible, value), 0.0)
        pairs = Matrix(masked_scores, visible, weights, all_weights, count)
        # The log-sum-exp has no definition in the table: it is row_max + log_denom.
        defined = {name: TABLE[name].of_matrix for name in problem.statistics}
        statistics = {name: definition(ops, pairs) for name, definition in defined.items() if definition is not None}
        matrix = {None: None, "scores": masked_scores, "weights": weights}[problem.matrix]
        return Result(ops.astype(out, problem.dtype), row_max, log_denom, statistics, matrix)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        raise KernelUnavailable(
            "kernel: the dense kernel has no gradient of its own, and NumPy has no autodiff. "
            "Hint: attend_vjp(..., kernel='streaming')"
        )


def _softmax(problem: Problem, scores: Array) -> tuple[Array, Array, Array]:
    """Return the weights (0 in a row of -inf; the sink's last), the largest logit and the log of the denominator."""
    ops, score_shape, logits = problem.ops, problem.score_shape, scores
    if problem.sink is not None:
        sink = ops.reshape(ops.astype(problem.sink, problem.accumulator), (*problem.sink.shape, 1, 1))
        logits = ops.concat((logits, ops.broadcast_to(sink, (*score_shape.rows, 1))), -1)
    if 0 in logits.shape:
        row_max = ops.full((*score_shape.rows, 1), NEG_INF, scores)
    else:
        row_max = ops.max(logits, axis=-1, keepdims=True)
    has_weight = ~ops.equal(row_max, NEG_INF)
    row_max = ops.where(has_weight, ops.stop_gradient(row_max), 0.0)
    exponentials = ops.exp(logits - row_max)
    total = ops.sum(exponentials, axis=-1, keepdims=True)
    log_denom = ops.where(has_weight, ops.log(ops.where(has_weight, total, 1.0)), NEG_INF)
    return exponentials / ops.where(has_weight, total, 1.0), row_max, log_denom


def _by_normalizer(problem: Problem, scores: Array) -> tuple[Array, Array, Array]:
    """Return the weights by another normalizer than the softmax, the largest score and the threshold (sigmoid: zeros).

    The threshold of an entmax is found by halving an interval, not by Newton's method as in tiled attention.
    """
    ops, normalizer = problem.ops, problem.normalizer
    zero = ops.zeros((*problem.score_shape.rows, 1), scores)
    if isinstance(normalizer, Sigmoid):
        return ops.sigmoid(scores), zero, zero
    if problem.score_shape.key_len == 0:
        return scores, zero, zero
    alpha = cast(Entmax, normalizer).alpha
    power = 1 / (alpha - 1)
    row_max = ops.max(scores, axis=-1, keepdims=True)
    has_keys = ~ops.equal(row_max, NEG_INF)
    row_max = ops.where(has_keys, ops.stop_gradient(row_max), 0.0)
    logits = (alpha - 1) * (scores - row_max)

    def clipped_power(logits: Array, threshold: Array, exponent: float) -> Array:
        """Return (logits - threshold) ** exponent where logits are above the threshold, else 0; NaN stays."""
        x = logits - threshold
        is_positive = x > 0
        return ops.where(is_positive, ops.where(is_positive, x, 1.0) ** exponent, ops.where(ops.isnan(x), x, 0.0))

    detached = ops.stop_gradient(logits)

    def halve(_: int, interval: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (interval[0] + interval[1]) / 2
        is_low = ops.sum(clipped_power(detached, middle, power), axis=-1, keepdims=True) >= 1
        return ops.where(is_low, middle, interval[0]), ops.where(is_low, interval[1], middle)

    # At a threshold of -1 the largest score alone has a weight of 1; at 0 all weights are 0. A step gains one bit, and
    # float64 has 53, float32 24.
    halvings = 60 if problem.accumulator == "float64" else 30
    threshold, _ = ops.loop(halvings, halve, (zero - 1.0, zero))
    # Autodiff does not see the halving. The first step of Newton's method has the derivative of the threshold, the
    # second also its second derivatives. A fully masked query keeps its threshold.
    for _ in range(2):
        total = ops.sum(clipped_power(logits, threshold, power), axis=-1, keepdims=True)
        slope = power * ops.sum(clipped_power(logits, threshold, power - 1), axis=-1, keepdims=True)
        threshold = threshold + ops.where(has_keys, (total - 1.0) / ops.where(ops.equal(slope, 0), 1.0, slope), 0.0)
    return clipped_power(logits, threshold, power), row_max, threshold


def _scores(problem: Problem) -> tuple[Array, Array]:
    """Return all scores, with the bias, and whether each pair is unmasked."""
    ops, score_shape, dtype = problem.ops, problem.score_shape, problem.accumulator
    query, key = (ops.astype(x, dtype) for x in (problem.query, problem.key))
    shape = (*score_shape.rows, score_shape.key_len)
    visible = ops.equal(ops.zeros(shape, query), 0)
    if problem.mask is not None:
        rows = ops.reshape(ops.positions(0, score_shape.query_len, query), (score_shape.query_len, 1))
        cols = ops.reshape(ops.positions(0, score_shape.key_len, query), (1, score_shape.key_len))
        visible = ops.logical_and(visible, problem.mask.visible(ops, score_shape, rows, cols))
    if problem.bias is not None:
        bias = ops.astype(problem.bias, dtype)
        if problem.has_relative_bias:
            bias = relative.of_pairs(ops, bias, score_shape.query_len, score_shape.key_len)
        visible = ops.logical_and(visible, ~ops.equal(bias, NEG_INF))
    is_nonfinite = None
    may_mask = problem.mask is not None or problem.bias is not None
    if may_mask and not (ops.known_finite(query) and ops.known_finite(key)):
        # 0 * NaN in the gradient would propagate masked values: such rows become zeros, and below, their scores NaN.
        # A row with an infinity for which the form has finite scores stays, unless it is masked in every pair.
        bad_query, bad_key = (nonfinite_rows(ops, x, problem.form.keeps_infinity) for x in (query, key))
        is_nonfinite = ops.logical_or(bad_query, ops.matrix_transpose(bad_key))
        query = ops.where(ops.logical_or(bad_query, _fully_masked(ops, visible, query)), 0.0, query)
        key = ops.where(ops.logical_or(bad_key, _fully_masked(ops, ops.matrix_transpose(visible), key)), 0.0, key)
    score = with_arrays(problem.score, lambda x: ops.astype(x, dtype))
    scores = ops.broadcast_to(ops.astype(checked_tile(ops, score, query, key), dtype), shape)
    if is_nonfinite is not None:
        scores = ops.where(is_nonfinite, float("nan"), scores)
    if problem.bias is not None:
        scores = scores + ops.where(visible, bias, 0.0)
    return scores, visible


def _fully_masked(ops: Backend, visible: Array, x: Array) -> Array:
    """Return which rows of `x` (axis -2 of `visible`) are masked in every pair, of all heads that share the row."""
    pairs = ops.sum(ops.astype(visible, ops.dtype(x)), axis=-1, keepdims=True)
    return ops.equal(sum_to(ops, pairs, (*x.shape[:-1], 1)), 0)


def _pool(ops: Backend, weights: Array, visible: Array, value: Array) -> Array:
    """Return sum_j weights_ij value_j over the unmasked j."""
    if ops.known_finite(value):
        return ops.matmul(weights, value)
    out = ops.matmul(weights, ops.where(ops.isfinite(value), value, 0.0))
    nonfinite = ops.where(ops.isfinite(value), 0.0, value)
    # one key at a time, so that a non-finite value reaches only the queries that attend to it
    for j in range(value.shape[-2]):
        out = out + ops.where(visible[..., j : j + 1], nonfinite[..., j : j + 1, :], 0.0)
    return out
