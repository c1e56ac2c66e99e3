"""The native kernel: C++ on the CPU, over the caller's memory. The entry point to ``csrc``.

- Runs all scores except those computed in Python, with any mask: a few intervals per query, a boolean array or ids
  (``masks.lowering``), or evaluated in chunks of queries (``chunked_masks``). Forward and backward take any strides and
  broadcast axes, without copies.
- Lists why it cannot run a problem; ``auto`` then takes the streaming kernel, which also computes gradients of
  gradients.
- Results do not depend on the number of threads.
- Additive scores are the most expensive part of a backward after their gradient, so a short call saves them for it: a
  few megabytes at most. All other saved arrays are linear in the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import numpy as np

from attnscore.backends.base import Array, HostArray
from attnscore.backends.native import missing as _MISSING
from attnscore.backends.native import module as _native
from attnscore.kernels import tiled, tiling
from attnscore.kernels.base import Kernel, Plan
from attnscore.kernels.native import chunked_masks, marshalling, xla_call, xla_callback
from attnscore.kernels.native import plan as native_plan
from attnscore.kernels.native.marshalling import BACKWARD_INPUTS, GRADIENTS, STATISTICS, as_operand, gradient_shapes
from attnscore.kernels.streaming import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import And, lowering
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients

# Queries of a micro-tile (kMR) and keys of a key tile, as in csrc/kernels.
TILE = (6, 64)


@final
@dataclass(frozen=True, eq=False)
class Native(Kernel):
    """C++ tiles, with SIMD code for this CPU."""

    name = "native"
    summary = "C++ on the CPU, O(n) memory"
    has_vjp = True
    saves_scores: bool = False

    def prepare(self, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Plan:
        return native_plan.prepare(self, problem, tiles, arrays)

    @property
    def differentiable(self) -> Kernel:
        return Streaming()

    def missing(self) -> str | None:
        return _MISSING

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return tuple(marshalling.reasons(problem)) if _MISSING is None else (_MISSING,)

    def with_backward(self, problem: Problem, tiles: TilePlan) -> Kernel:
        return Native(saves_scores=True) if native_plan.saves_scores(problem, tiles) else self

    def explain_tiles(self, problem: Problem, tiles: TilePlan) -> TilePlan:
        """Return tiles of the sizes that ``csrc`` has; it may visit one more or less at the edges of a query tile."""
        return tiling.plan(problem, TILE).aligned_to_tiles()

    def notes(self, problem: Problem, tiles: TilePlan) -> tuple[str, ...]:
        if problem.ops.needs_host_callback(*marshalling.arrays_of(problem)):
            return ()
        _, parts = lowering.partition(tiles.rest)
        if not parts:
            return ()
        mask = reduce(And, parts)
        rows = chunked_masks.chunk_size(
            problem, lowering.evaluated_shape(problem.ops, problem.score_shape, problem.value, mask)
        )
        return (f"{mask!r} is evaluated, {rows} queries at a time",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        ops, sums, like = problem.ops, problem.accumulator, problem.value
        if ops.needs_host_callback(*marshalling.arrays_of(problem)):
            return xla_call.forward(problem) if ops.custom_calls() else xla_callback.forward(self, problem)
        if ops.needs_grad(*problem.operands().values()):
            return tiled.forward(problem, tiles)
        out, *others, _ = _run_forward(problem, tiles, self.saves_scores)
        row_max, log_denom, saved_scores, scores, weights, *statistics = (
            None if x is None else ops.from_memory(x, sums, like) for x in others
        )
        found = {name: x for name, x in zip(STATISTICS, statistics, strict=True) if x is not None}
        matrix = scores if problem.matrix == "scores" else weights
        return Result(ops.from_memory(out, problem.dtype, like), row_max, log_denom, found, matrix, saved_scores)

    def backward(
        self,
        problem: Problem,
        tiles: TilePlan,
        result: Result,
        grads: RowGradients,
        wanted: frozenset[str],
        zeros: Callable[[str, tuple[int, ...], str], HostArray] | None = None,
    ) -> dict[str, Array]:
        """Return the gradients; ``zeros(name, shape, dtype)`` gives the memory of each where the module computes it."""
        ops, sums = problem.ops, problem.accumulator
        operands = problem.operands()
        incoming = [x for x in (grads.out, grads.log_sum_exp, grads.entropy, grads.matrix) if x is not None]
        if ops.needs_host_callback(*marshalling.arrays_of(problem), *incoming):
            if ops.custom_calls():
                return xla_call.backward(problem, result, grads, wanted)
            return xla_callback.backward(self, problem, result, grads, wanted)
        if ops.needs_grad(*operands.values(), *incoming) or not all(
            map(ops.has_cpu_buffer, (*operands.values(), *incoming))
        ):
            return tiled.backward(problem, tiles, result, grads)
        grad_out, grad_dtype = _grad_out(problem, grads.out)
        rows = {"row_max": result.row_max, "log_denom": result.log_denom, "saved_scores": result.scores}
        rows["grad_log_sum_exp"] = grads.log_sum_exp
        if grads.entropy is not None:
            rows["entropy"], rows["grad_entropy"] = result.statistics["entropy"], grads.entropy
        if grads.matrix is not None and problem.matrix == "weights":
            rows["attention_weights"] = result.matrix
        known = {name: _row(problem, x) for name, x in rows.items()}
        known |= {"out": ops.memory(result.out), "grad_out": grad_out}
        if grads.matrix is not None:
            known[f"grad_attention_{problem.matrix}"] = ops.memory(ops.astype(grads.matrix, sums))
        read = [known.get(name) for name in BACKWARD_INPUTS]
        shapes = gradient_shapes(problem, wanted)
        zeros = zeros or (lambda _, shape, dtype: marshalling.aligned(np.zeros, shape, dtype))
        buffers = {name: zeros(name, shape, sums) for name, shape in shapes.items()}
        marshalled, threads = marshalling.marshal(problem, tiles), native_plan.thread_counter(_native, ops)()
        if lowering.partition(tiles.rest)[1]:
            chunked_masks.backward(_native.backward, problem, tiles, marshalled, read, grad_dtype, buffers, threads)
        else:
            _native.backward(*marshalled, read, grad_dtype, [buffers.get(name) for name in GRADIENTS], threads)
        return {
            name: as_operand(problem, ops.from_memory(x, sums, problem.value), name, operands[name])
            for name, x in buffers.items()
            if name in wanted
        }


def _run_forward(problem: Problem, tiles: TilePlan, saves_scores: bool) -> list[Any]:
    """Run the module's forward, and return the arrays that it filled in the order of `FILLED`; None: not wanted."""
    marshalled, threads = marshalling.marshal(problem, tiles), native_plan.thread_counter(_native, problem.ops)()
    rows, sums = (*problem.score_shape.rows, 1), problem.accumulator
    shape, stored = (*rows[:-1], problem.layout.value_dim), marshalling.STORED.get(problem.dtype, problem.dtype)
    whole = (*rows[:-1], problem.score_shape.key_len)
    found = [marshalling.aligned(np.empty, shape, stored), *np.empty((2, *rows), sums)]
    of_pairs = (saves_scores, problem.matrix == "scores", problem.matrix == "weights")
    found += [marshalling.aligned(np.empty, whole, sums) if is_wanted else None for is_wanted in of_pairs]
    found += [np.empty(rows, sums) if name in problem.statistics else None for name in STATISTICS]
    found.append(None)  # log_sum_exp, which only execution plans fill
    if lowering.partition(tiles.rest)[1]:
        chunked_masks.forward(_native.forward, problem, tiles, marshalled, found, threads)
    else:
        _native.forward(*marshalled, found, threads)
    return found


def _grad_out(problem: Problem, grad: Array | None) -> tuple[HostArray, str]:
    """Return the memory and dtype of the output's gradient: zeros where there is none."""
    ops, shape = problem.ops, (*problem.score_shape.rows, problem.layout.value_dim)
    if grad is None:
        return np.broadcast_to(np.zeros((), problem.accumulator), shape), problem.accumulator
    if ops.dtype(grad) not in marshalling.DTYPES:
        grad = ops.astype(grad, problem.accumulator)
    return ops.memory(grad), ops.dtype(grad)


def _row(problem: Problem, x: Array | None) -> HostArray | None:
    """Return an array (*rows, 1 or key_len) as the module reads it: in the accumulator dtype and C order."""
    if x is None:
        return None
    ops = problem.ops
    host = ops.memory(ops.astype(x, problem.accumulator))
    return host if host.flags.c_contiguous else np.ascontiguousarray(host)
