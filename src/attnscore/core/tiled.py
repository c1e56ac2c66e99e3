"""The streaming engine: attention forward and backward as loops over tiles, in a framework's own operations.

- Memory beyond inputs and outputs is a few tiles; no n x n array exists.
- What a pair's mask hides reaches nothing through that pair, NaN and infinity included, in both directions; through
  a visible pair it reaches the output.
- The forward keeps two numbers a row (three with the entropy); the backward recomputes weights.
- Nothing is mutated but buffers made here, so the same loops run on a tape for second derivatives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attnscore.backends.base import Array, Backend, is_unknown, sum_to
from attnscore.core import dropout as dropouts
from attnscore.core import online_softmax
from attnscore.core.layout import entries_of
from attnscore.core.online_softmax import NEG_INF
from attnscore.core.problem import Problem
from attnscore.core.tiling import DynamicSegment, Segment, TilePlan
from attnscore.masks.shape_spec import ShapeSpec
from attnscore.scores.base import nonfinite_rows
from attnscore.scores.forms import FormPullback, Role, times

# Numbers that a score holds for its pairs at a time where the whole matrix is wanted: 4 MB in float32.
MATRIX_VALUES = 2**20

Span = tuple[int, int]
"""(start, count) of rows or keys."""


@dataclass(frozen=True, eq=False)
class Result:
    """What a forward gives, on the uniform axes; row numbers end in an axis of length 1."""

    out: Array
    row_max: Array
    """What was subtracted from the scores of a row; carries no gradient."""
    log_denom: Array
    """log sum exp(s - top): -inf in a row that sees nothing."""
    statistics: dict[str, Array]
    matrix: Array | None = None
    """`Problem.matrix`, in the dtype of sums."""
    scores: Array | None = None
    """From a kernel that keeps them for its backward, of short calls: all scores as it has them."""

    @property
    def log_sum_exp(self) -> Array:
        """top + log total, which the weights are not computed from: the sum is rounded to the level of the scores."""
        return self.row_max + self.log_denom


@dataclass(frozen=True, eq=False)
class _Isolated:
    """Where the inputs are not finite, when something is hidden: found once, so that finite inputs pay nothing more."""

    problem: Problem
    """The problem, with zeros in query and key rows that hold a NaN, or an infinity that the form does not keep."""
    bad_query: Array | None
    bad_key: Array | None
    value_is_finite: bool
    keeps_infinity: bool = False
    """Whether infinities may stand in query and key, whose masked pairs are then computed from zeros."""


def _with_shapes_that_fit(problem: Problem) -> Problem:
    """The problem, of which nothing is computed where a graph learns that shapes of its mask and bias do not fit."""
    shapes = [] if problem.mask is None else [*problem.mask.shapes(problem.score_shape)]
    if problem.bias is not None:
        allowed = [tuple((1, n) for n in (*problem.score_shape.rows, problem.score_shape.key_len))]
        shapes.append(ShapeSpec("bias", problem.bias, "", allowed))
    unsure = [(part.name, part.array, part.allowed) for part in shapes if not part.is_known]
    if not unsure:
        return problem
    # No score is made without an array of the form.
    arrays = dict(problem.form.arrays())
    name = next(iter(arrays))
    arrays[name] = problem.ops.assert_shape(arrays[name], unsure)
    return dataclasses.replace(problem, form=problem.form.with_arrays(arrays))


def _in_dtype_of_sums(problem: Problem) -> Problem:
    """Return the problem with no array of the form wider than its sums; 16-bit arrays stay as they are."""
    # A float64 parameter of a score on float32 data makes lowered arrays float64. They are cast before non-finite
    # rows are looked for, because a cast may overflow; 16-bit arrays are cast tile by tile, to save memory.
    ops, kept = problem.ops, (problem.accumulator, "float16", "bfloat16")
    cast = {
        name: ops.astype(x, problem.accumulator)
        for name, x in problem.form.arrays().items()
        if ops.dtype(x) not in kept
    }
    return dataclasses.replace(problem, form=problem.form.with_arrays(cast)) if cast else problem


def _isolate_nonfinite(problem: Problem) -> _Isolated:
    ops, problem = problem.ops, _in_dtype_of_sums(problem)
    if problem.mask is None and problem.bias is None:
        return _Isolated(problem, None, None, True)
    value_is_finite = ops.known_finite(problem.value)
    arrays = {name: x for name, x in problem.form.arrays().items() if problem.form.role(name) != "shared"}
    if ops.known_finite(*arrays.values()):
        return _Isolated(problem, None, None, value_is_finite)
    bad: dict[Role, Array] = {}
    for name, x in arrays.items():
        role, rows = problem.form.role(name), nonfinite_rows(ops, x, problem.form.keeps_infinity)
        bad[role] = ops.logical_or(bad[role], rows) if role in bad else rows
    clean = problem.form.with_arrays(
        {name: ops.where(bad[problem.form.role(name)], 0.0, x) for name, x in arrays.items()}
    )
    problem = dataclasses.replace(problem, form=clean)
    bad_query, bad_key = bad["query"], ops.matrix_transpose(bad["key"])
    return _Isolated(problem, bad_query, bad_key, value_is_finite, clean.keeps_infinity)


def _cut(ops: Backend, x: Array, axis: int, span: Span) -> Array:
    """`span` of `x` along `axis`, or all of it where the axis is broadcast or the span is the whole."""
    return x if x.shape[axis] in (1, span[1]) else ops.slice_axis(x, axis, *span)


def _cut_bias(ops: Backend, x: Array, axis: int, span: Span) -> Array:
    """The same of a bias, of which a graph may not know whether the axis is broadcast."""
    return entries_of(ops, x, ops.positions(*span, x), axis) if is_unknown(x.shape[axis]) else _cut(ops, x, axis, span)


def _tile_scores(
    isolated: _Isolated, plan: TilePlan, rows: Span, cols: Span, partial: bool
) -> tuple[Array, Array | None, FormPullback]:
    """Scores of one tile (-inf where hidden), which pairs are visible (None: all), and the scores' pull-back."""
    problem, ops, dtype = isolated.problem, isolated.problem.ops, isolated.problem.accumulator
    spans: dict[str, Span] = {"query": rows, "key": cols}

    def cut(x: Array, role: Role) -> Array:
        x = x if role == "shared" else _cut(ops, x, -2, spans[role])
        return ops.astype(x, dtype) if ops.dtype(x) in ("float16", "bfloat16") else x

    visible = plan.visible(ops, problem.score_shape, problem.value, rows, cols) if partial else None
    bias: Any = 0.0
    if problem.bias is not None:
        bias = ops.astype(_cut_bias(ops, _cut_bias(ops, problem.bias, -1, cols), -2, rows), dtype)
        allowed = bias != NEG_INF
        visible = allowed if visible is None else ops.logical_and(visible, allowed)
    form = problem.form.part(cut)
    scores, pullback = form.scores_and_pullback(ops, visible if isolated.keeps_infinity else None)
    scores = ops.astype(scores, dtype)
    if isolated.bad_query is not None:
        bad = ops.logical_or(_cut(ops, isolated.bad_query, -2, rows), _cut(ops, isolated.bad_key, -1, cols))
        scores = ops.where(bad, float("nan"), scores)
    if problem.bias is not None:
        scores = scores + ops.where(visible, bias, 0.0)
    if visible is not None:
        scores = ops.where(visible, scores, NEG_INF)
    return scores, visible, pullback


def _row_scores(isolated: _Isolated, plan: TilePlan, rows: Span) -> tuple[Array, Array | None]:
    """Scores of some queries against every key (-inf where masked), and which pairs are unmasked (None: all).

    A score that holds h numbers for each pair takes some keys at a time: at 131072 keys and h = 64 one query would
    take 34 MB for each of several arrays.
    """
    problem, ops, key_len = isolated.problem, isolated.problem.ops, isolated.problem.score_shape.key_len
    shape = (*problem.score_shape.rows[:-1], rows[1], key_len)
    each = problem.form.values_per_pair()
    held = math.prod(1 if is_unknown(n) else n for n in shape[:-1]) * each
    step = key_len if each == 1 or is_unknown(key_len) else max(1, min(key_len, MATRIX_VALUES // max(1, held)))
    parts = []
    for first in (0,) if is_unknown(key_len) else range(0, max(1, key_len), max(1, step)):
        cols = (first, step if is_unknown(key_len) else min(step, key_len - first))
        scores, visible, _ = _tile_scores(isolated, plan, rows, cols, partial=problem.mask is not None)
        whole = (*shape[:-1], cols[1])
        if ops.shape(scores) != whole:
            # Heads that share query and key; a copy, because the caller may write into what is returned.
            scores = scores + ops.zeros(whole, scores)
        parts.append((scores, visible))
    if len(parts) == 1:
        return parts[0]
    scores = ops.concat([scores for scores, _ in parts], -1)
    seen = [ops.broadcast_to(visible, part.shape) for part, visible in parts if visible is not None]
    return scores, ops.concat(seen, -1) if seen else None


def _propagated_nonfinite(ops: Backend, visible: Array, x: Array) -> Array:
    """What NaN and infinity in `x` (..., key, dim) do to the rows that see them: (..., row, dim), 0 elsewhere."""
    seen = ops.astype(visible, ops.dtype(x))
    reached: Any = 0.0
    for poison, where in (
        (float("nan"), ops.isnan(x)),
        (float("inf"), x == float("inf")),
        (NEG_INF, x == NEG_INF),
    ):
        hit = ops.matmul(seen, ops.astype(where, ops.dtype(x))) > 0
        reached = reached + ops.astype(ops.where(hit, poison, 0.0), ops.dtype(x))
    return reached


def _weighted_sum(ops: Backend, weights: Array, visible: Array | None, x: Array, is_finite: bool) -> Array:
    """weights @ x, in which nothing in `x` passes through a hidden pair (0 * NaN is NaN)."""
    if is_finite or visible is None:
        return ops.matmul(weights, x)
    escaping = _propagated_nonfinite(ops, ops.broadcast_to(visible, ops.shape(weights)), x)
    return ops.matmul(weights, ops.where(ops.isfinite(x), x, 0.0)) + escaping


def _iter_key_tiles(
    ops: Backend,
    segments: tuple[Segment, ...] | DynamicSegment,
    plan: TilePlan,
    visit: Callable[[Any, Span, bool], Any],
    carry: Any,
) -> Any:
    """Visit the tiles of the segments in order: ``carry = visit(carry, (start, count), partial)``."""
    tile = plan.key_tile
    if isinstance(segments, DynamicSegment):
        return _iter_dynamic_key_tiles(ops, segments, plan, visit, carry)
    for segment in segments:
        count, tail = divmod(segment.stop - segment.start, tile)

        def body(j: Any, carry: Any, segment: Segment = segment) -> Any:
            return visit(carry, (segment.start + j * tile, tile), segment.partial)

        carry = ops.loop(count, body, carry)
        if tail:
            carry = visit(carry, (segment.stop - tail, tail), segment.partial)
    return carry


def _iter_dynamic_key_tiles(
    ops: Backend, segment: DynamicSegment, plan: TilePlan, visit: Callable[[Any, Span, bool], Any], carry: Any
) -> Any:
    """The same between ends that are traced: tiles on a fixed grid, as many as the longest segment touches."""
    tile = plan.key_tile
    whole, tail = divmod(plan.key_len, tile)
    first, last = segment.start // tile, (segment.stop + tile - 1) // tile

    def body(j: Any, carry: Any) -> Any:
        here = first + j
        return ops.cond((here < last) & (here < whole), lambda c: visit(c, (here * tile, tile), True), carry)

    carry = ops.loop(min(segment.most, whole), body, carry)
    if tail:
        carry = ops.cond(segment.stop > whole * tile, lambda c: visit(c, (whole * tile, tail), True), carry)
    return carry


def _map_query_tiles(
    ops: Backend, plan: TilePlan, query_tile_result: Callable[[Any, Span], tuple[Array, ...]], reads: Iterable[Array]
) -> tuple[Array, ...]:
    """Map `query_tile_result(tile, rows)` over all query tiles and concatenate; `reads`: the arrays that it uses."""
    length, tile, tail = plan.query_len, plan.query_tile, plan.tail
    full = len(plan.segments) - (tail > 0)
    if full + (tail > 0) < 2:
        return query_tile_result(0, (0, length))
    reads = tuple(reads)
    if ops.needs_grad(*reads) or not all(map(ops.has_cpu_buffer, reads)):
        tiles = ops.map_tiles(full, lambda i: query_tile_result(i, (i * tile, tile)))
        tiles += [query_tile_result(full, (full * tile, tail))] if tail else []
        return tuple(ops.concat(parts, -2) for parts in zip(*tiles, strict=True))
    first = query_tile_result(0, (0, tile))
    # Where nobody looks on, into arrays made beforehand. Parts would take as much again, and their memory, amid what
    # stays, would not go back to the system: at 16384 tokens 24 to 55 MB, on top of which the backward then came.
    whole = tuple(ops.zeros((*ops.shape(x)[:-2], length, ops.shape(x)[-1]), x) for x in first)

    def put(carry: tuple[Array, ...], parts: tuple[Array, ...], start: Any) -> tuple[Array, ...]:
        return tuple(ops.add_at(x, -2, start, part) for x, part in zip(carry, parts, strict=True))

    whole = put(whole, first, 0)
    whole = ops.loop(
        full - 1, lambda i, x: put(x, query_tile_result(i + 1, ((i + 1) * tile, tile)), (i + 1) * tile), whole
    )
    return put(whole, query_tile_result(full, (full * tile, tail)), full * tile) if tail else whole


def forward(problem: Problem, plan: TilePlan) -> Result:
    """Output, log-sum-exp and statistics of every row."""
    ops, score_shape, wanted, dtype = problem.ops, problem.score_shape, problem.statistics, problem.accumulator
    isolated = _isolate_nonfinite(_with_shapes_that_fit(problem))
    sink = None if problem.sink is None else ops.astype(ops.reshape(problem.sink, (*problem.sink.shape, 1, 1)), dtype)

    def query_tile_result(tile: Any, rows: Span) -> tuple[Array, ...]:
        def update(
            state: online_softmax.RowState, scores: Array, visible: Array | None, cols: Span
        ) -> online_softmax.RowState:
            value = ops.astype(_cut(ops, problem.value, -2, cols), dtype)

            def pool(weights: Array) -> Array:
                if problem.dropout is not None:
                    weights = weights * dropouts.kept(ops, problem.dropout, score_shape, value, rows, cols, dtype)
                return _weighted_sum(ops, weights, visible, value, isolated.value_is_finite)

            return online_softmax.update(ops, state, scores, visible, pool, wanted)

        def visit(state: online_softmax.RowState, cols: Span, partial: bool) -> online_softmax.RowState:
            scores, visible, _ = _tile_scores(isolated, plan, rows, cols, partial)
            return update(state, scores, visible, cols)

        state = online_softmax.start(
            ops, (*score_shape.rows[:-1], rows[1]), problem.layout.value_dim, problem.value, dtype, wanted
        )
        matrix: tuple[Array, ...] = ()
        if problem.matrix is not None:
            scores, visible = _row_scores(isolated, plan, rows)
            matrix = (online_softmax.whole_rows(ops, scores, visible, sink) if problem.matrix == "weights" else scores,)
        if problem.matrix is None or problem.layout.value_dim > 0:
            # The same tiles with and without the matrix, so that it changes no bit of the output.
            segments = plan.segments_of(ops, tile, problem.value) if plan.segments else ()
            state = _iter_key_tiles(ops, segments, plan, visit, state)
        elif problem.matrix == "weights" and scores.shape[-1] != 0:
            state = update(state, scores, visible, (0, score_shape.key_len))
        out, row_max, log_denom, statistics = online_softmax.finish(ops, state, sink, wanted)
        return ops.astype(out, problem.dtype), row_max, log_denom, *matrix, *statistics.values()

    out, row_max, log_denom, *rest = _map_query_tiles(ops, plan, query_tile_result, operands(problem).values())
    matrix = None if problem.matrix is None else rest.pop(0)
    names = [name for name in wanted if name != "log_sum_exp"]
    return Result(out, row_max, log_denom, dict(zip(names, rest, strict=True)), matrix)


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Gradients that come into the rows: of the output, and of log-sum-exp, entropy and matrix where there are any."""

    out: Array | None
    log_sum_exp: Array | None = None
    entropy: Array | None = None
    matrix: Array | None = None


@dataclass(frozen=True, eq=False)
class _Rows:
    """What the backward knows of each row before it sees a tile."""

    grad_out: Array
    grad_is_finite: bool
    row_max: Array
    log_denom: Array
    delta: Array
    """What a row adds to the gradient of all its log-weights: dlse - dout . out - dweights . weights."""
    grad_entropy: Array | None
    entropy: Array | None
    grad_matrix: Array | None

    def softmax_pullback(self, ops: Backend, p: Array, log_p: Array, grad_p: Array | float, rows: Span) -> Array:
        # p = exp(s - top - log total); H = -sum p log p
        grad = p * (grad_p + _cut(ops, self.delta, -2, rows))
        if self.grad_entropy is None:
            return grad
        sum_exp_logit = p * (ops.where(p == 0, 0.0, log_p) + _cut(ops, self.entropy, -2, rows))
        return grad - sum_exp_logit * _cut(ops, self.grad_entropy, -2, rows)


def _rows_of(problem: Problem, plan: TilePlan, result: Result, grads: RowGradients) -> _Rows:
    """What a backward knows of each row, from the forward's result and the gradients that come in."""
    ops, dtype = problem.ops, problem.accumulator
    grad_out = ops.zeros(ops.shape(result.out), result.out) if grads.out is None else grads.out
    pairs = [(result.out, grad_out)]
    if problem.matrix == "weights" and grads.matrix is not None:
        pairs.append((result.matrix, grads.matrix))

    def query_tile_result(_: Any, rows: Span) -> tuple[Array]:
        # out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out; a row that sees no key has out = 0 and ignores dout.
        # A gradient into the weights adds dw to dp, and so p . dw to the sum.
        delta: Any = 0.0
        for pair in pairs:
            x, grad = (ops.astype(_cut(ops, x, -2, rows), dtype) for x in pair)
            delta = delta - ops.sum(times(ops, x, grad), axis=-1, keepdims=True)
        return (delta,)

    # By tiles of rows: products of the whole would be the largest arrays of the backward.
    (delta,) = _map_query_tiles(ops, plan, query_tile_result, [x for pair in pairs for x in pair])
    return _Rows(
        grad_out=grad_out,
        grad_is_finite=(problem.mask is None and problem.bias is None) or ops.known_finite(grad_out),
        row_max=result.row_max,
        log_denom=result.log_denom,
        delta=delta if grads.log_sum_exp is None else delta + grads.log_sum_exp,
        grad_entropy=grads.entropy,
        entropy=result.statistics.get("entropy"),
        grad_matrix=grads.matrix,
    )


def _tile_gradients(
    isolated: _Isolated, plan: TilePlan, known: _Rows, rows: Span, cols: Span, partial: bool
) -> dict[str, Array]:
    """One tile's gradient of every operand but the sink, not yet summed over broadcast axes."""
    problem, ops, dtype = isolated.problem, isolated.problem.ops, isolated.problem.accumulator
    scores, visible, score_pullback = _tile_scores(isolated, plan, rows, cols, partial)
    grad_matrix = None
    if known.grad_matrix is not None:
        grad_matrix = ops.astype(_cut(ops, _cut(ops, known.grad_matrix, -2, rows), -1, cols), dtype)
    if problem.matrix == "scores":
        # The caller has the scores alone: no weight, and an output without numbers.
        grad_scores = 0.0 * scores if grad_matrix is None else grad_matrix
        grad_scores = grad_scores if visible is None else ops.where(visible, grad_scores, 0.0)
        found = {**score_pullback(grad_scores), "value": ops.astype(0.0 * _cut(ops, problem.value, -2, cols), dtype)}
        return found if problem.bias is None else {**found, "bias": grad_scores}
    log_p = online_softmax.log_weights(ops, scores, *(_cut(ops, x, -2, rows) for x in (known.row_max, known.log_denom)))
    p = ops.exp(log_p)
    if visible is not None:
        # A row that a visible NaN has poisoned has p = exp(-inf - NaN) where it sees nothing.
        p = ops.where(visible, p, 0.0)
    pooling = p
    value = ops.astype(_cut(ops, problem.value, -2, cols), dtype)
    grad_out = ops.astype(_cut(ops, known.grad_out, -2, rows), dtype)
    # out = (p * keep) @ value
    grad_p = ops.matmul(grad_out, ops.matrix_transpose(value))
    if problem.dropout is not None:
        keep = dropouts.kept(ops, problem.dropout, problem.score_shape, value, rows, cols, dtype)
        grad_p, pooling = grad_p * keep, p * keep
    if grad_matrix is not None:
        grad_p = grad_p + grad_matrix
    seen_by = None if visible is None else ops.matrix_transpose(visible)
    grad_value = _weighted_sum(ops, ops.matrix_transpose(pooling), seen_by, grad_out, known.grad_is_finite)
    grad_scores = known.softmax_pullback(ops, p, log_p, grad_p, rows)
    if visible is not None:
        # scores = where(visible, scores, -inf)
        grad_scores = ops.where(visible, grad_scores, 0.0)
    found = {**score_pullback(grad_scores), "value": grad_value}
    return found if problem.bias is None else {**found, "bias": grad_scores}


def backward(problem: Problem, plan: TilePlan, result: Result, grads: RowGradients) -> dict[str, Array]:
    """Gradients of the form's arrays, of ``value``, and of ``bias`` and ``sink`` where there are any."""
    ops, dtype = problem.ops, problem.accumulator
    isolated, known = _isolate_nonfinite(problem), _rows_of(problem, plan, result, grads)
    shapes = {name: ops.shape(x) for name, x in operands(problem).items() if name != "sink"}
    if problem.bias is not None:
        # What a graph does not know of the bias counts as not broadcast, until all is there.
        axes = zip(problem.bias.shape, (*problem.score_shape.rows, problem.score_shape.key_len), strict=True)
        shapes["bias"] = tuple(whole if is_unknown(n) else n for n, whole in axes)
    roles: dict[str, Role] = {name: problem.form.role(name) for name in problem.form.arrays()}
    of_rows = [name for name in shapes if name == "bias" or roles.get(name) == "query"]
    # The axis of the keys; the bias has it beside its axis of rows.
    key_axis = {name: -2 for name in shapes if name == "value" or roles.get(name) == "key"} | {"bias": -1}

    def visit_query_tile(
        rows: Span, segments: tuple[Segment, ...] | DynamicSegment, carry: dict[str, Array]
    ) -> dict[str, Array]:
        # Gradients that belong to rows are gathered over the keys of one tile of rows, then put in their place.
        local = {
            name: ops.zeros(
                (*shapes[name][:-2], 1 if shapes[name][-2] == 1 else rows[1], shapes[name][-1]), known.delta, dtype
            )
            for name in of_rows
        }

        def visit(carry: dict[str, Array], cols: Span, partial: bool) -> dict[str, Array]:
            found = _tile_gradients(isolated, plan, known, rows, cols, partial)
            return carry | {
                name: _add(ops, carry[name], grad, key_axis.get(name), cols) for name, grad in found.items()
            }

        done: dict[str, Array] = _iter_key_tiles(ops, segments, plan, visit, carry | local)
        return done | {name: _add(ops, carry[name], done[name], -2, rows) for name in of_rows}

    buffers = {name: ops.zeros(shape, known.delta, dtype) for name, shape in shapes.items()}
    full, tail = len(plan.segments) - (plan.tail > 0), plan.tail
    buffers = ops.loop(
        full,
        lambda i, c: visit_query_tile(
            (i * plan.query_tile, plan.query_tile), plan.segments_of(ops, i, problem.value), c
        ),
        buffers,
    )
    if tail:
        buffers = visit_query_tile((full * plan.query_tile, tail), plan.segments[full], buffers)
    if problem.bias is not None:
        for axis, length in enumerate(ops.shape(problem.bias)):
            if is_unknown(length):
                buffers["bias"] = ops.sum_to_length(buffers["bias"], axis, length)
    return buffers if problem.sink is None else buffers | {"sink": _sink_gradient(problem, problem.sink, known)}


def _sink_gradient(problem: Problem, sink: Array, known: _Rows) -> Array:
    """The sink is a logit without a value: dp = 0."""
    ops, shape = problem.ops, tuple(sink.shape)
    sink = ops.astype(ops.reshape(sink, (*shape, 1, 1)), problem.accumulator)
    log_p = online_softmax.log_weights(ops, sink, known.row_max, known.log_denom)
    grad = known.softmax_pullback(ops, ops.exp(log_p), log_p, 0.0, (0, problem.score_shape.query_len))
    return ops.reshape(sum_to(ops, grad, sink.shape), shape)


def _add(ops: Backend, buffer: Array, grad: Array, axis: int | None, span: Span) -> Array:
    """Add a tile's gradient to its buffer, at `span` of `axis`, summed over the axes that were broadcast."""
    shape = list(buffer.shape)
    if axis is None or shape[axis] == 1:
        return buffer + sum_to(ops, grad, shape)
    shape[axis] = span[1]
    return ops.add_at(buffer, axis, span[0], sum_to(ops, grad, shape))


def operands(problem: Problem) -> dict[str, Array]:
    """The arrays that get a gradient, by name: those of the form, then value, bias and sink."""
    found = dict(problem.form.arrays())
    for name in ("value", "bias", "sink"):
        if (x := getattr(problem, name)) is not None:
            found[name] = x
    return found
