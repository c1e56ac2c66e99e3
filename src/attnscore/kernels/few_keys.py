"""Attention of single queries over few keys, in operations that a compiler fuses: a kernel for compiled programs.

- A sum over keys is a term for each key, with 0 in place of a masked pair: that propagates nothing, NaN and infinity
  included, and the program needs neither a copy of the keys nor a branch.
- There is no axis of queries: XLA copies an array to insert an axis of size 1 into it.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, final

from attnscore.backends.base import Array, Backend
from attnscore.kernels import one_tile, tiled
from attnscore.kernels.base import Kernel
from attnscore.kernels.streaming import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import AdditiveForm, DistanceForm, FormPullback, InnerForm, Role

# Time by these operations over that of the native kernel in JAX's programs, forward, with gradients, on one thread |
# two of a Zen 4 with AVX-512 beside other work, 2026-11-27. With fewer queries the native kernel is faster, which XLA
# counts as no work to share: dot (64, 1, 10), d 64: 1.08, 0.84 | 1.40, 1.35; Gaussian (64, 1, 10), d 256: 1.61, 0.80
# | 4.1, 1.7; additive (32, 1, 4), h 32: 1.22, 0.90 | 1.72, 1.31. From here on: dot (128, 1, 12), d 32: 0.60, 0.69 |
# 0.54, 0.81; (256, 1, 8), d 64: 0.49, 0.64 | 1.10, 1.02; additive (256, 1, 10), h 64: 0.57, 0.49 | 1.15, 0.70.
# Memory limits both from MOST_NUMBERS on: dot (256, 1, 16), d 512: 1.8, 0.85 | 2.1, 1.0. Zen 5, 2026-11-28: dot (128,
# 1, 12), d 32: 0.59, 0.70 | 0.72, 0.75; additive (256, 1, 16), h 64: 0.69, 0.47 | 1.34, 0.75; (64, 1, 10), h 256: 1.14,
# 0.68 | 2.8, 1.11.
MOST_KEYS = 16
LEAST_ROWS = 128
MOST_NUMBERS = 2**19
"""Of all keys together."""
# Below: dot (1, 1, 1), d 16: 0.81, 0.98 | 0.78, 1.00; additive (1, 2, 1), h 16: 0.80, 0.99 | 0.79, 0.95; but dot
# (2, 1, 10), d 8: 0.85, 0.40 | 1.5, 0.98; (1, 2, 2), d 16: 1.08, 1.25 | 1.06, 0.57.
MOST_OF_TINY = {1: 128, 2: 32}
"""Pairs times dimension of a call that stays on its thread, by the number of queries."""


def is_faster(problem: Problem) -> bool:
    """Whether a call has single queries over few keys, in a program whose compiler fuses its operations."""
    score_shape, form = problem.score_shape, problem.form
    if not one_tile.is_plain(problem) or 0 in form.key.shape:
        return False
    if problem.dropout is not None or form.caps or not {"query_bias", "key_bias"}.isdisjoint(form.arrays()):
        return False
    *matrices, query_len = score_shape.rows
    if score_shape.key_len > MOST_KEYS:
        return False
    # Heads that share keys or have parameters of their own are left to the native kernel.
    shared = (x for name, x in form.arrays().items() if form.role(name) == "shared")
    if any(x.shape[:-2] != tuple(matrices) for x in (form.query, form.key, problem.value)) or any(
        math.prod(x.shape[:-1]) > 1 for x in shared
    ):
        return False
    numbers = math.prod(form.key.shape)
    is_tiny = numbers * query_len <= MOST_OF_TINY.get(query_len, 0)
    is_size = is_tiny or (query_len == 1 and math.prod(matrices) >= LEAST_ROWS and numbers <= MOST_NUMBERS)
    return is_size and problem.ops.fuses(*problem.operands().values())


def forward(problem: Problem, plan: TilePlan) -> Result:
    """Compute the output, and the weights where they are wanted."""
    ops, rows = problem.ops, problem.score_shape.rows
    scores, unmasked, weights, _ = _weights(problem, plan)
    out = _weighted_sum(ops, unmasked, weights, _by_rows(problem, problem.value, "key"))
    # A program without a use for these two leaves them out.
    row_max = online_softmax.safe_max(ops, ops.max(scores, axis=-1, keepdims=True))
    log_denom = ops.log(ops.sum(ops.exp(scores - row_max), axis=-1, keepdims=True))
    found = (ops.astype(out, problem.dtype), row_max, log_denom, weights)
    out, row_max, log_denom, matrix = (ops.reshape(x, (*rows, x.shape[-1])) for x in found)
    return Result(out, row_max, log_denom, {}, None if problem.matrix is None else matrix)


def backward(problem: Problem, plan: TilePlan, grads: RowGradients) -> dict[str, Array]:
    """Compute the gradients of the form's arrays and of ``value``."""
    ops, query_len = problem.ops, problem.score_shape.query_len
    # The compiler finds that the forward has computed these.
    _, unmasked, weights, scores_vjp = _weights(problem, plan)
    value, grad_out = _by_rows(problem, problem.value, "key"), _by_rows(problem, grads.out, "query")
    # Forward: out = p @ value
    grad_weights = _inner_products(ops, grad_out, value)
    if grads.matrix is not None:
        grad_weights = grad_weights + ops.reshape(ops.astype(grads.matrix, problem.accumulator), weights.shape)
    # Forward: p = softmax(where(unmasked, scores, -inf))
    total = ops.sum(_isolated(ops, unmasked, weights * grad_weights), axis=-1, keepdims=True)
    grad_scores = _isolated(ops, unmasked, weights * (grad_weights - total))
    found = {**scores_vjp(grad_scores), "value": _times(ops, unmasked, weights, grad_out)}
    if query_len > 1:
        for name in ("key", "value"):
            found[name] = ops.sum(ops.reshape(found[name], (-1, query_len, *found[name].shape[1:])), axis=1)
    return {name: ops.reshape(found[name], x.shape) for name, x in problem.operands().items()}


def _weights(problem: Problem, plan: TilePlan) -> tuple[Array, Array | None, Array, FormPullback]:
    """Return scores (-inf where masked), unmasked pairs (None: all) and weights (row, key), and the scores' VJP."""
    ops, score_shape, unmasked = problem.ops, problem.score_shape, None
    pairs = (-1, score_shape.key_len)
    if problem.mask is not None:
        unmasked = plan.visible(ops, score_shape, problem.value, (0, score_shape.query_len), (0, score_shape.key_len))
        unmasked = ops.reshape(ops.broadcast_to(unmasked, (*score_shape.rows, score_shape.key_len)), pairs)
    form: Any = problem.form.part(lambda x, role: _by_rows(problem, x, role))
    scores, vjp = _scores(ops, form, unmasked)
    if unmasked is not None:
        scores = ops.where(unmasked, scores, NEG_INF)
    return scores, unmasked, online_softmax.whole_rows(ops, scores, unmasked, None), vjp


def _scores(
    ops: Backend, form: InnerForm | AdditiveForm | DistanceForm, unmasked: Array | None
) -> tuple[Array, FormPullback]:
    """Return the scores (row, key) of a form, and their VJP, which maps the gradient 0 of a masked pair to 0."""
    query, key = form.query, form.key
    if isinstance(form, InnerForm):
        query = query * form.scale

        def inner_vjp(grad: Array) -> dict[str, Array]:
            of_query = _weighted_sum(ops, unmasked, grad, key) * form.scale
            return {"query": of_query, "key": _times(ops, unmasked, grad, query)}

        return _inner_products(ops, query, key), inner_vjp
    if isinstance(form, AdditiveForm):
        # Zeros for masked pairs keep NaN out of the product that is the gradient of w_v.
        hidden = _isolated(ops, _by_dims(unmasked), query + key)
        activated = form.activation.value(ops, hidden)

        def additive_vjp(grad: Array) -> dict[str, Array]:
            of_key = grad[..., None] * form.activation.slope(ops, hidden, activated) * form.w_v
            of_vector = ops.matmul(ops.reshape(grad, (-1,)), ops.reshape(activated, (-1, activated.shape[-1])))
            return {"query": _sum_over_keys(of_key), "key": of_key, "w_v": of_vector}

        return ops.matmul(activated, form.w_v), additive_vjp
    difference = query - key
    squares = ops.sum(difference * difference, axis=-1)

    def distance_vjp(grad: Array) -> dict[str, Array]:
        of_key = _times(ops, unmasked, 2 * form.scale * grad, difference)
        of_scale = -ops.sum(_isolated(ops, unmasked, grad * squares), axis=(0, 1))
        return {"query": -_sum_over_keys(of_key), "key": of_key, "scale": of_scale}

    return -form.scale * squares, distance_vjp


def _by_rows(problem: Problem, x: Array, role: Role) -> Array:
    """Return an array as (row, 1 or key, dim), where a row is a query, in the dtype of sums; a shared one as (dim,)."""
    ops, score_shape = problem.ops, problem.score_shape
    shape = x.shape[-1:] if role == "shared" else (-1, 1 if role == "query" else score_shape.key_len, x.shape[-1])
    if role == "key" and score_shape.query_len > 1:
        x = ops.broadcast_to(ops.expand_dims(x, -3), (*score_shape.rows, *x.shape[-2:]))
    return ops.astype(ops.reshape(x, shape), problem.accumulator)


def _inner_products(ops: Backend, query: Array, key: Array) -> Array:
    return ops.reshape(ops.matmul(query, ops.matrix_transpose(key)), key.shape[:-1])


def _sum_over_keys(x: Array) -> Array:
    """Sum (row, key, dim) over the keys: XLA's sum over an axis that is not the last is slower."""
    return functools.reduce(operator.add, (x[:, at] for at in range(x.shape[1])))


def _weighted_sum(ops: Backend, unmasked: Array | None, weights: Array, x: Array) -> Array:
    """Return weights @ x, (row, dim), from `x` (row, key, dim) of unmasked pairs alone."""

    # Products of slices: before slices of products XLA computes all products, from 16 keys on.
    def term(at: int) -> Array:
        return _times(ops, None if unmasked is None else unmasked[:, at], weights[:, at], x[:, at])

    return functools.reduce(operator.add, map(term, range(x.shape[1])))


def _times(ops: Backend, unmasked: Array | None, by_pairs: Array, x: Array) -> Array:
    """Return the products of each pair's number with a row of `x` (row, 1 or key, dim); 0 where masked."""
    return _isolated(ops, _by_dims(unmasked), by_pairs[..., None] * x)


def _by_dims(unmasked: Array | None) -> Array | None:
    return None if unmasked is None else unmasked[..., None]


def _isolated(ops: Backend, unmasked: Array | None, x: Array) -> Array:
    return x if unmasked is None else ops.where(unmasked, x, 0.0)


@final
class FewKeys(Kernel):
    """A term for each key, for single queries over few keys in programs whose compiler fuses them."""

    name = "few_keys"
    summary = "a term for each key, for single queries in compiled programs"
    has_vjp = True

    @property
    def differentiable(self) -> Kernel:
        return Streaming()

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return () if is_faster(problem) else ("no single queries over few keys in a compiled program",)

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        return forward(problem, plan)

    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        # A gradient into the log-sum-exp alone is rare.
        if grads.out is None:
            return tiled.backward(problem, plan, result, grads)
        return backward(problem, plan, grads)
