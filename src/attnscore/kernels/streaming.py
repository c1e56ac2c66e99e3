"""The streaming kernel: tiled attention for any score, mask and framework, O(n) memory, explicit gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from attnscore.backends.base import Array
from attnscore.kernels import few_keys, one_tile, tiled
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiled import Result, RowGradients
from attnscore.kernels.tiling import TilePlan
from attnscore.problem.problem import Problem


@final
@dataclass(frozen=True, eq=False)
class Streaming(Kernel):
    """Tiled attention in the framework's operations."""

    only_tiles: bool = False
    """Whether a small call of a program is computed by the loops too, which any framework can differentiate again."""

    name = "streaming"
    summary = "tiles in the framework's own operations, O(n) memory"
    has_vjp = True
    matrix_is_second_pass = True

    @property
    def differentiable(self) -> Kernel:
        return Streaming(only_tiles=True)

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def notes(self, problem: Problem, plan: TilePlan) -> tuple[str, ...]:
        if problem.normalizer is None or problem.normalizer.threshold_slope == 0:
            return ()
        return ("the scores are computed about 10 times, to find the threshold of each query",)

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        if self._has_few_keys(problem):
            return few_keys.forward(problem, plan)
        if self._is_one_tile(problem, plan):
            return one_tile.forward(problem, plan)
        return tiled.forward(problem, plan)

    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        if grads.out is not None and self._has_few_keys(problem):
            return few_keys.backward(problem, plan, grads)
        if grads.out is not None and self._is_one_tile(problem, plan):
            return one_tile.backward(problem, plan, result, grads)
        return tiled.backward(problem, plan, result, grads)

    def _has_few_keys(self, problem: Problem) -> bool:
        return not self.only_tiles and few_keys.is_faster(problem)

    def _is_one_tile(self, problem: Problem, plan: TilePlan) -> bool:
        return not self.only_tiles and one_tile.fits(problem, plan)
