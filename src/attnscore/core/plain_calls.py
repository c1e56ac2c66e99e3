"""A plain call and its gradient, prepared: what a recipe runs (recipes.py), on places of memory.

- On a tape `differentiable` records it, where `has_plain_tape`.
- What only the checked path can differentiate, the gradient once more, under a transform, or of tensors that a hook has
  laid out otherwise, is posed again.
- Nothing of a caller's arrays is held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray, sum_to
from attnscore.core import tiling
from attnscore.core.layout import AxisLayout
from attnscore.core.problem import Problem, build_problem
from attnscore.core.threads import get_num_threads
from attnscore.core.tiled import operands
from attnscore.core.tiling import TilePlan
from attnscore.kernels import AttentionOp, Kernel
from attnscore.kernels.base import Place, Prepared
from attnscore.kernels.native.operands import STORED, aligned
from attnscore.masks.cached import CachedMask
from attnscore.scores import Additive

WEIGHTS = 3
"""Place of an additive score's w_v among the arrays of a call."""
_OPERANDS = ("query", "key", "value", "w_v")


class Gradient(NamedTuple):
    """How the gradient of an array comes about."""

    filled: tuple[int, ...]
    """The shape in which it is added up."""
    uniform: tuple[int, ...]
    """That of the array on the uniform axes."""
    turned: bool
    """Whether the array has its heads behind."""


@dataclass(frozen=True, eq=False)
class PlainCall:
    """How to run a plain call on other arrays of the same facts."""

    ops: Backend
    dtype: str
    sums: str
    layout: AxisLayout
    shape: tuple[int, ...]
    """Of the output as it is filled: the caller's axes, heads in front of queries."""
    stored: str
    gradients: tuple[Gradient, ...]
    """Of query, key, value and an additive score's w_v."""
    weights_shape: tuple[int, ...] | None
    """Of the matrix of weights, where it is returned too."""
    score: Any
    """None where it is the caller's, whose arrays are not held."""
    mask: CachedMask | None
    kernel: Kernel
    prepared: Prepared
    facts: tuple[Hashable, ...]
    """How query, key, value and w_v lie in memory."""

    def __call__(self, query: Array, key: Array, value: Array, score: Any) -> Any:
        ops, arrays = self.ops, (query, key, value, score.w_v) if type(score) is Additive else (query, key, value)
        if ops.has_plain_tape and ops.needs_grad(*arrays):
            found = ops.differentiable(_Recorded(self, score), arrays)
        else:
            found = self.forward(arrays, 0, 0)
        return found[0] if self.weights_shape is None else (found[0], ops.astype(found[1], self.dtype))

    def forward(self, arrays: Sequence[Array], rows: Place, scores: Place) -> tuple[Array, ...]:
        """The output, and the weights where they are returned; `rows` and `scores` are filled for a gradient, or 0."""
        ops = self.ops
        out = aligned(np.empty, self.shape, self.stored) if ops.wants_aligned else np.empty(self.shape, self.stored)
        matrix: Place = 0 if self.weights_shape is None else aligned(np.empty, self.weights_shape, self.sums)
        query, key, value, weights = self._places(arrays)
        self.prepared.forward(query, key, value, out, weights, rows, scores, matrix, ops.threads(get_num_threads()))
        found = ops.from_memory(out, self.dtype, arrays[2])
        found = ops.swap_axes(found, -3, -2) if self.layout.has_heads_behind else found
        return (found,) if isinstance(matrix, int) else (found, ops.from_memory(matrix, self.sums, arrays[2]))

    def fits(self, arrays: Sequence[Array], kept: Sequence[Array]) -> bool:
        """Whether arrays and what a forward has kept of them still are as `backward` takes them."""
        if tuple(_facts_of(self.ops, x) for x in arrays) != self.facts:
            return False
        return [self.ops.dtype(x) for x in kept] == [self.dtype, *[self.sums] * (len(kept) - 1)]

    def backward(
        self, arrays: Sequence[Array], kept: Sequence[Array], grad_out: Array, grad_weights: Array | None
    ) -> list[Array]:
        """The gradients of `arrays`; `kept`: the output, the weights if returned, the rows, the scores if kept."""
        ops = self.ops
        # A framework's own zeros wake its threads, which go on spinning beside ours.
        filled = [np.zeros(gradient.filled, self.sums) for gradient in self.gradients]
        query, key, value, weights = self._places(arrays)
        out, *others = kept
        of_weights = 0 if self.weights_shape is None else 1
        matrix = others[0] if of_weights and grad_weights is not None else None
        rows, scores = (*(np.ascontiguousarray(ops.memory(x)) for x in others[of_weights:]), 0)[:2]
        pairs = (0 if x is None else np.ascontiguousarray(ops.memory(x)) for x in (matrix, grad_weights))
        matrix, grad_matrix = pairs
        self.prepared.backward(
            query, key, value, self._in_order(out), weights, rows, scores, matrix, self._in_order(grad_out),
            grad_matrix, *filled, *(0 for _ in range(len(filled), WEIGHTS + 1)), ops.threads(get_num_threads()),
        )  # fmt: skip
        found = (
            self.from_canonical(ops.from_memory(x, self.sums, arrays[2]), i, arrays[i]) for i, x in enumerate(filled)
        )
        return [ops.astype(grad, ops.dtype(x)) for grad, x in zip(found, arrays, strict=True)]

    def from_canonical(self, grad: Array, which: int, x: Array) -> Array:
        """The gradient of `x` on its own axes."""
        shape, gradient = tuple(x.shape), self.gradients[which]
        if tuple(grad.shape) == shape:
            return grad
        grad = sum_to(self.ops, grad, gradient.uniform)
        return (
            self.layout.gradient_from_canonical(self.ops, grad, shape)
            if gradient.turned
            else self.ops.reshape(grad, shape)
        )

    def _places(self, arrays: Sequence[Array]) -> list[Place]:
        return [*map(self.ops.buffer, arrays), 0] if len(arrays) == WEIGHTS else [*map(self.ops.buffer, arrays)]

    def _in_order(self, x: Array) -> HostArray:
        """An output, or the gradient of one, as outputs are filled."""
        return np.ascontiguousarray(self.ops.memory(self.layout.output_to_canonical(self.ops, x)))


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A plain call on a tape, as a framework's gradient hook holds it (`backends.contract.AttentionOp`)."""

    call: PlainCall
    score: Any

    @property
    def differentiable_outputs(self) -> int:
        return 1 if self.call.weights_shape is None else 2

    @property
    def saved_outputs(self) -> int:
        return self.differentiable_outputs + (1 if self.call.prepared.scores is None else 2)

    def constants(self) -> tuple[Array, ...]:
        return ()

    def variables(self) -> tuple[tuple[Array, ...], Callable[[Sequence[Array]], _Recorded]]:
        return (), lambda arrays: self

    def with_backward(self) -> _Recorded:
        return self

    def without_scores(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        return outputs[: self.differentiable_outputs]

    def streaming(self) -> _Recorded:
        # For frameworks that differentiate a backward by tracing it: theirs is no plain tape.
        raise NotImplementedError("attnscore: the streaming form of a prepared call")

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        call = self.call
        shapes = [(2, math.prod(call.shape[:-1])), call.prepared.scores]
        kept = [np.empty(shape, call.sums) for shape in shapes if shape is not None]
        found = call.forward(arrays, kept[0], 0 if len(kept) == 1 else kept[1])
        return *found, *(call.ops.from_memory(x, call.sums, arrays[2]) for x in kept)

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        wanted: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        call, ops, (grad_out, grad_weights) = self.call, self.call.ops, (*grads, None)[:2]
        if grad_out is None:
            if grad_weights is None:
                return (None,) * len(arrays)
            grad_out = ops.zeros(outputs[0].shape, outputs[0])
        incoming = (grad_out,) if grad_weights is None else (grad_out, grad_weights)
        tensors = (*arrays, *outputs, *incoming)
        if (
            ops.needs_grad(*arrays, *incoming)
            or not all(map(ops.has_cpu_buffer, tensors))
            or not call.fits(arrays, outputs)
        ):
            found = self._rebuilt(arrays, outputs, grad_out, grad_weights)
        else:
            found = call.backward(arrays, outputs, grad_out, grad_weights)
        return tuple(grad if wanted is None or wanted[i] else None for i, grad in enumerate(found))

    def _rebuilt(
        self, arrays: Sequence[Array], outputs: Sequence[Array], grad_out: Array, grad_weights: Array | None
    ) -> list[Array]:
        """The gradients on the checked path."""
        call, ops = self.call, self.call.ops
        score = dataclasses.replace(self.score, w_v=arrays[WEIGHTS]) if len(arrays) > WEIGHTS else call.score
        has_weights = call.weights_shape is not None
        problem, _ = build_problem(
            *arrays[:WEIGHTS],
            score=score,
            mask=call.mask,
            head_axis=call.layout.head_axis,
            matrix="weights" if has_weights else None,
        )
        run = AttentionOp(call.kernel, problem, tiling.plan(problem))
        named = run.operands()
        given = tuple(named.values())
        grad_out, is_taped = problem.layout.output_to_canonical(ops, grad_out), ops.needs_grad(*arrays)
        pairs = (*problem.score_shape.rows, problem.score_shape.key_len)
        incoming = [grad_out, None]
        if has_weights:
            incoming.append(None if grad_weights is None else ops.reshape(grad_weights, pairs))
        if is_taped or not all(ops.has_cpu_buffer(x) for x in (*given, *incoming) if x is not None):
            run = run.streaming()
        with ops.numeric_scope():
            if is_taped:
                # What is kept carries no gradient here.
                kept = run.forward(given)[: run.saved_outputs]
            else:
                rows = outputs[self.differentiable_outputs]
                row_max, log_denom = (ops.reshape(rows[i], (*problem.score_shape.rows, 1)) for i in range(2))
                matrix = (ops.reshape(outputs[1], pairs),) if has_weights else ()
                kept = (problem.layout.output_to_canonical(ops, outputs[0]), log_denom, *matrix, row_max)
            found = dict(zip(named, run.backward(given, kept, incoming), strict=True))
        return [
            call.from_canonical(found[name], i, x) for i, (name, x) in enumerate(zip(_OPERANDS, arrays, strict=False))
        ]


def prepare(arrays: tuple[Array, Array, Array], kernel: Kernel, problem: Problem, plan: TilePlan) -> PlainCall | None:
    """How `kernel` runs a plain call on arrays like these, where it says how."""
    if not (problem.mask is None or isinstance(problem.mask, CachedMask)):
        return None
    if 0 in problem.score_shape.rows:
        return None  # the strides of an empty tensor would be NumPy's
    ops, score_shape, layout, host = problem.ops, problem.score_shape, problem.layout, backends.load("numpy")
    stored = STORED.get(problem.dtype, problem.dtype)
    to_canonical = zip(arrays, (True, False, False), strict=True)
    views = [layout.to_canonical(host, ops.memory(x), is_query=is_query) for x, is_query in to_canonical]
    prepared = kernel.plain(problem, plan, (*views, np.empty((*score_shape.rows, layout.value_dim), stored)))
    if prepared is None:
        return None
    additive = type(problem.score) is Additive
    given = (*arrays, problem.score.w_v) if additive else arrays
    return PlainCall(
        ops, problem.dtype, problem.accumulator, layout, (*score_shape.user_shape[:-1], layout.value_dim), stored,
        tuple(_gradients(problem, given, prepared)), score_shape.user_shape if problem.matrix else None,
        None if additive else problem.score, problem.mask, kernel,
        prepared, tuple(_facts_of(ops, x) for x in given),
    )  # fmt: skip


def _facts_of(ops: Backend, x: Array) -> Hashable:
    return tuple(x.shape), ops.dtype(x), ops.strides(x)


def _gradients(problem: Problem, arrays: Sequence[Array], prepared: Prepared) -> Iterator[Gradient]:
    named, layout = operands(problem), problem.layout
    for name, x, shape in zip(_OPERANDS, arrays, prepared.gradients, strict=False):
        uniform = tuple(named[name].shape)
        turned = name != "w_v" and layout.has_heads_behind
        yield Gradient(tuple(x.shape) if shape == uniform and not turned else shape, uniform, turned)
