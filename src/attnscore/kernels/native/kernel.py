"""The native kernel: C++ on the CPU, over the caller's memory. The entry point to ``csrc``.

- Runs all scores except scores computed in Python, with any mask: a few intervals per query, a boolean array or ids
  (``masks.lowering``), or evaluated in chunks of queries (``chunked_masks``). Forward and backward take any strides and
  broadcast axes, without copies.
- Lists why it cannot run a problem; ``auto`` then takes the streaming kernel, which also computes gradients of
  gradients.
- Results do not depend on the number of threads.
- Additive scores are the most expensive part of a backward after their gradient, so a short call saves them for it: a
  few megabytes at most. All other saved arrays are linear in the lengths.
- One row of the table of kernels for three ways to call the module: memory, custom calls, host callbacks. The arrays
  of a forward or a backward decide: after a forward in memory, the arrays of the backward may be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from attnscore.backends.base import Array, HostArray
from attnscore.backends.native import missing as _MISSING
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel, Plan
from attnscore.kernels.native import chunked_masks, marshalling
from attnscore.kernels.native import plan as native_plan
from attnscore.kernels.native.chunked_masks import Program
from attnscore.kernels.native.in_memory import InMemory
from attnscore.kernels.native.xla_call import XlaCall
from attnscore.kernels.native.xla_callback import HostCallback
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import lowering
from attnscore.masks.base import all_of
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
    differentiable = Streaming()
    saves_scores: bool = False

    def prepare(self, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Plan:
        return native_plan.reusable_plan(self, problem, tiles, arrays) or super().prepare(problem, tiles, arrays)

    def missing(self) -> str | None:
        return _MISSING

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return tuple(marshalling.reasons(problem)) if _MISSING is None else (_MISSING,)

    def with_backward(self, problem: Problem, tiles: TilePlan) -> Kernel:
        return Native(saves_scores=True) if native_plan.saves_scores(problem, tiles) else self

    def explain_tiles(self, problem: Problem, tiles: TilePlan) -> TilePlan:
        """Return tiles of the sizes in ``csrc``; the module may visit one more or less at the edges of a query tile."""
        return tiling.plan(problem, TILE).aligned_to_tiles()

    def notes(self, problem: Problem, tiles: TilePlan) -> tuple[str, ...]:
        # A program splits its mask in another way (`partition_staged`), or when it runs.
        if problem.ops.needs_host_callback(*marshalling.arrays_of(problem)):
            return ()
        if (mask := all_of(lowering.partition(tiles.remaining_mask)[1])) is None:
            return ()
        return (f"{mask!r} is evaluated, {chunked_masks.chunk_size(problem, mask)} queries at a time",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        runner = self._runner(problem, ())
        if not isinstance(runner, Program):
            return runner.forward(problem, tiles)
        shapes_of = partial(marshalling.output_shapes, saves_scores=self.saves_scores)
        outputs = chunked_masks.run(runner, problem, tiles, shapes_of)
        dtypes = dict.fromkeys(outputs, problem.accumulator) | {"out": problem.dtype}
        in_framework = {name: runner.in_framework(problem, x, dtypes[name]) for name, x in outputs.items()}
        return marshalling.result_of(problem, in_framework)

    def backward(
        self,
        problem: Problem,
        tiles: TilePlan,
        result: Result,
        grads: RowGradients,
        requested: frozenset[str],
        zeros: Callable[[str, tuple[int, ...], str], HostArray] | None = None,
    ) -> dict[str, Array]:
        """Return the gradients; ``zeros(name, shape, dtype)`` gives the memory of each where the module computes it."""
        operands = problem.operands()
        incoming = [x for x in (grads.out, grads.log_sum_exp, grads.entropy, grads.matrix) if x is not None]
        runner = self._runner(problem, incoming)
        if not isinstance(runner, Program):
            return runner.backward(problem, tiles, result, grads, requested)
        if zeros is not None and isinstance(runner, InMemory):
            runner = InMemory(zeros)
        inputs = marshalling.backward_inputs(problem, result, grads)
        shapes_of = partial(marshalling.gradient_shapes, requested=requested)
        gradients = chunked_masks.run(runner, problem, tiles, shapes_of, inputs)

        def finish(name: str, x: Array) -> Array:
            in_framework = runner.in_framework(problem, x, problem.accumulator)
            return marshalling.in_shape_of_operand(problem, in_framework, name, operands[name])

        return {name: finish(name, x) for name, x in gradients.items() if name in requested}

    def _runner(self, problem: Problem, incoming: Sequence[Array]) -> Program | HostCallback | Streaming:
        """Return the way to run the module on these arrays, or the streaming kernel where none can."""
        ops, operands = problem.ops, problem.operands().values()
        if ops.needs_host_callback(*marshalling.arrays_of(problem), *incoming):
            return XlaCall() if ops.custom_calls() else HostCallback(self)
        is_recorded = ops.needs_grad(*operands, *incoming)
        return Streaming() if is_recorded or not all(map(ops.has_cpu_buffer, (*operands, *incoming))) else InMemory()
