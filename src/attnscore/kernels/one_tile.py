"""Attention of one tile in a few operations, by the formula: a kernel for small calls of graphs.

- Computes by the formula, without isolation of non-finite inputs. Where the scores before the mask, the output or the
  gradients of the weights are not all finite, the program takes another branch: tiled attention. If they are finite,
  so is everything that a masked pair multiplies by 0.
- A distance of many terms is computed as a matrix product and squared norms. Where these are too large for that to be
  accurate, the program takes another branch, which sums the differences.
- Other scores that are no matrix products are differentiated by the framework, as those of the formula would be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from attnscore.backends.base import Array, Backend, sum_to
from attnscore.base.sizes import is_unknown
from attnscore.kernels import tiled, tiling
from attnscore.kernels.base import Kernel
from attnscore.kernels.streaming import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import AdditiveForm, DistanceForm, FormPullback, InnerForm
from attnscore.scores.gaussian import INNER_LIMIT

# Not those of custom scores, which may have gradients of their own.
_FORMS = (InnerForm, AdditiveForm, DistanceForm)

# Up to these sizes TensorFlow's own operations are faster in a graph than a callback to the native kernel, forward and
# with gradients (csrc/TUNING.md).
MOST_NUMBERS = 5 * 2**17
"""Of query, key and value together."""
MOST_PRODUCTS = 2**21
"""Pairs times dimension, of a score that is a matrix product."""
MOST_VALUES = 2**18
"""Pairs times dimension, of a score that holds that many values."""
TERMS_OF_PRODUCT = 2**16, 2**20
"""Pairs times dimension, between which a distance is computed as a product. Where that is not accurate, its terms are
summed one by one, which above these takes longer than a callback."""


def is_faster(problem: Problem) -> bool:
    """Whether a call is small, in a program whose own operations are faster on small calls than a native kernel."""
    if not _would_call_back(problem) or not is_plain(problem):
        return False
    form, pairs, dim = problem.form, _pairs(problem), problem.form.query.shape[-1]
    numbers = sum(math.prod(x.shape) for x in (problem.query, problem.key, problem.value))
    is_product = form.values_per_pair() == 1 or _is_product(problem)
    work, most = (dim, MOST_PRODUCTS) if is_product else (form.values_per_pair(), MOST_VALUES)
    return pairs <= tiling.TILE_SCORES and numbers <= MOST_NUMBERS and pairs * work <= most


def fits(problem: Problem, plan: TilePlan) -> bool:
    """Whether `forward` and `backward` take a call: one tile, in a compiled program."""
    if not _would_call_back(problem) or not is_plain(problem):
        return False
    score_shape = problem.score_shape
    is_tile = plan.query_tile >= score_shape.query_len and plan.key_tile >= score_shape.key_len
    return is_tile or _is_product(problem)


def _pairs(problem: Problem) -> int:
    return math.prod(problem.score_shape.rows) * problem.score_shape.key_len


def _is_product(problem: Problem) -> bool:
    """Whether a distance is computed as a product, which takes a pass over query and key, not over all terms."""
    form = problem.form
    if not isinstance(form, DistanceForm) or form.caps:
        return False
    pairs, vectors = _pairs(problem), sum(math.prod(x.shape[:-1]) for x in (form.query, form.key))
    terms = pairs * form.query.shape[-1]
    return pairs <= tiling.TILE_SCORES and TERMS_OF_PRODUCT[0] < terms <= TERMS_OF_PRODUCT[1] and pairs > vectors


def _would_call_back(problem: Problem) -> bool:
    """Whether the native kernel would be a callback that takes longer than a small call."""
    ops = problem.ops
    return ops.has_slow_callbacks and ops.needs_host_callback(*problem.operands().values())


def is_plain(problem: Problem) -> bool:
    """Whether a call has known sizes, none of them 0, and nothing that needs tiled attention."""
    if type(problem.form) not in _FORMS:
        return False
    sizes = (*problem.score_shape.rows, problem.score_shape.key_len, problem.layout.value_dim)
    if any(map(is_unknown, sizes)) or 0 in sizes or problem.statistics or problem.matrix == "scores":
        return False
    if any(x is not None for x in (problem.bias, problem.sink, problem.normalizer)):
        return False
    return problem.mask is None or all(spec.is_known for spec in problem.mask.shapes(problem.score_shape))


@dataclass(frozen=True, eq=False)
class _Tile:
    """All pairs, by the formula."""

    raw: Array
    """Scores before the mask."""
    scores: Array
    is_exact: Array | None
    """Whether they are finite and as accurate as those of the form; None where they are those."""
    unmasked: Array | None
    weights: Array
    """Before dropout; 0 where masked."""
    keep: Array | None
    """Factors of dropout."""
    value: Array
    scores_vjp: Callable[[Array], tuple[Array, ...]]
    """From a gradient of `raw` to those of the form's arrays, in their order; to none for a forward."""

    @property
    def kept(self) -> Array:
        """The weights after dropout."""
        return self.weights if self.keep is None else self.weights * self.keep


def _no_gradients(_: Array) -> tuple[Array, ...]:
    return ()


def _tile(problem: Problem, plan: TilePlan, is_product: bool, with_vjp: bool) -> _Tile:
    ops, dtype, score_shape = problem.ops, problem.accumulator, problem.score_shape
    spans = (0, score_shape.query_len), (0, score_shape.key_len)
    form, arrays = problem.form, problem.form.arrays()

    def scores_of(*given: Array) -> Array:
        cast = {name: ops.astype(x, dtype) for name, x in zip(arrays, given, strict=True)}
        return ops.astype(form.with_arrays(cast).scores(ops), dtype)

    vjp: Callable[[Array], tuple[Array, ...]] = _no_gradients
    is_exact = None
    if is_product or (with_vjp and isinstance(form, InnerForm)):
        # The framework's own would transpose the gradient of the keys.
        cast: Any = form.part(lambda x, _: ops.astype(x, dtype))
        if is_product:
            raw, is_exact, of_form = _as_product(ops, cast)
        else:
            raw, of_form = cast.scores_and_pullback(ops)
        vjp = lambda grad: tuple(map(of_form(grad).__getitem__, arrays))  # noqa: E731
    elif with_vjp:
        raw, vjp = ops.vjp(scores_of, tuple(arrays.values()))
    else:
        raw = scores_of(*arrays.values())
    whole = (*score_shape.rows, score_shape.key_len)
    # Heads that share query and key.
    scores = raw if tuple(raw.shape) == whole else ops.broadcast_to(raw, whole)
    unmasked = None
    if problem.mask is not None:
        unmasked = plan.visible(ops, score_shape, problem.value, *spans)
        scores = ops.where(unmasked, scores, NEG_INF)
    weights = ops.softmax(scores)
    if unmasked is not None:
        # The softmax of a fully masked query is NaN.
        weights = ops.where(unmasked, weights, 0.0)
    value, keep = ops.astype(problem.value, dtype), None
    if problem.dropout is not None:
        keep = dropouts.kept(ops, problem.dropout, score_shape, value, *spans, dtype)
    return _Tile(raw, scores, is_exact, unmasked, weights, keep, value, vjp)


def forward(problem: Problem, plan: TilePlan) -> Result:
    """Compute the output, and the weights where they are wanted."""
    return _forward(problem, plan, _is_product(problem))


def _forward(problem: Problem, plan: TilePlan, is_product: bool) -> Result:
    ops, tile = problem.ops, _tile(problem, plan, is_product, with_vjp=False)
    matrix = () if problem.matrix is None else (tile.weights,)
    out = ops.matmul(tile.kept, tile.value)
    found: tuple[Array, ...] = (ops.astype(out, problem.dtype), *matrix)

    def otherwise(_: Any) -> tuple[Array, ...]:
        result = _forward(problem, plan, is_product=False) if is_product else tiled.forward(problem, plan)
        return (result.out,) if problem.matrix is None else (result.out, result.matrix)

    if (is_wrong := _is_wrong(ops, tile, out)) is not None:
        found = ops.cond_rarely(is_wrong, otherwise, found)
    # A graph without a use for these two leaves them out.
    row_max = online_softmax.safe_max(ops, ops.max(tile.scores, axis=-1, keepdims=True))
    log_denom = ops.log(ops.sum(ops.exp(tile.scores - row_max), axis=-1, keepdims=True))
    return Result(found[0], row_max, log_denom, {}, found[1] if problem.matrix is not None else None)


def backward(problem: Problem, plan: TilePlan, result: Result, grads: RowGradients) -> dict[str, Array]:
    """Compute the gradients of the form's arrays and of ``value``."""
    return _backward(problem, plan, result, grads, _is_product(problem))


def _backward(
    problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, is_product: bool
) -> dict[str, Array]:
    ops, dtype = problem.ops, problem.accumulator
    tile = _tile(problem, plan, is_product, with_vjp=True)
    grad_out, out = (ops.astype(x, dtype) for x in (grads.out, result.out))
    # Forward: out = (p * keep) @ value
    grad_weights = ops.matmul(grad_out, ops.matrix_transpose(tile.value))
    grad_value = ops.matmul(ops.matrix_transpose(tile.kept), grad_out)
    if tile.keep is not None:
        grad_weights = grad_weights * tile.keep
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
    of_form = tile.scores_vjp(sum_to(ops, grad_scores, tuple(tile.raw.shape)))
    found = {**dict(zip(problem.form.arrays(), of_form, strict=True)), "value": grad_value}
    # In the dtype of sums, as those of the other branch.
    found = {
        name: ops.astype(sum_to(ops, found[name], tuple(x.shape)), dtype) for name, x in problem.operands().items()
    }

    def otherwise(_: Any) -> dict[str, Array]:
        if is_product:
            return _backward(problem, plan, result, grads, is_product=False)
        # The statistics of queries that `forward` returned are those of the formula.
        return tiled.backward(problem, plan, tiled.forward(problem, plan), grads)

    is_wrong = _is_wrong(ops, tile, grad_weights)
    return found if is_wrong is None else dict(ops.cond_rarely(is_wrong, otherwise, found))


def _is_wrong(ops: Backend, tile: _Tile, result: Array) -> Array | None:
    """Return whether a call needs another branch; None where none does."""
    if tile.is_exact is not None and tile.unmasked is None:
        return ~tile.is_exact
    if tile.unmasked is None:
        return None
    # A sum is not finite where an entry is not.
    total: Any = 0.0
    for x in (result,) if tile.is_exact is not None else (tile.raw, result):
        total = total + ops.sum(x, axis=tuple(range(len(x.shape))))
    is_right = ops.isfinite(total)
    return ~(is_right if tile.is_exact is None else ops.logical_and(is_right, tile.is_exact))


def _as_product(ops: Backend, form: DistanceForm) -> tuple[Array, Array, FormPullback]:
    """Return the scores of a distance, whether they are finite and do not cancel, and their VJP."""
    query, key, scale = form.query, form.key, form.scale
    norms = [ops.sum(x * x, axis=-1, keepdims=True) for x in (query, key)]
    squared = norms[0] + ops.matrix_transpose(norms[1]) - 2 * ops.matmul(query, ops.matrix_transpose(key))
    # NaN counts. No ~(x < limit), which TensorFlow's optimizer makes x >= limit. A factor of scores may be negative.
    counts = [ops.where(abs(scale) * x < INNER_LIMIT, 0.0, 1.0) for x in norms]
    large = sum(ops.sum(x, axis=tuple(range(len(x.shape)))) for x in counts)

    def vjp(grad: Array) -> dict[str, Array]:
        # Forward: squared_ij = sum_c (q_ic - k_jc)^2
        twice = grad * (-2 * scale)
        transposed = ops.matrix_transpose(twice)
        found = {
            name: x * ops.sum(grads, axis=-1, keepdims=True) - ops.matmul(grads, other)
            for name, x, grads, other in (("query", query, twice, key), ("key", key, transposed, query))
        }
        return {**found, "scale": -grad * squared}

    return -scale * squared, ops.equal(large, 0.0), vjp


@final
class OneTile(Kernel):
    """The formula on one tile, for small calls of graphs, where a callback to the native kernel takes longer."""

    name = "one_tile"
    summary = "the formula on a single tile, for small calls of graphs"
    has_vjp = True

    @property
    def differentiable(self) -> Kernel:
        return Streaming()

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return () if fits(problem, tiling.plan(problem)) else ("no small call of a graph",)

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        return forward(problem, plan)

    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        # A gradient into the log-sum-exp alone is rare.
        if grads.out is None:
            return tiled.backward(problem, plan, result, grads)
        return backward(problem, plan, result, grads)
