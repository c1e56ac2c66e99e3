"""The streaming kernel: tiled attention for any score, mask and framework, O(n) memory, explicit gradients."""

from __future__ import annotations

from typing import final

from attnscore.backends.base import Array
from attnscore.kernels import tiled
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiling import TilePlan
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients


@final
class Streaming(Kernel):
    """Tiled attention in the framework's operations."""

    name = "streaming"
    summary = "tiles in the framework's own operations, O(n) memory"
    has_vjp = True
    matrix_is_second_pass = True

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def notes(self, problem: Problem, tiles: TilePlan) -> tuple[str, ...]:
        if problem.normalizer is None or problem.normalizer.threshold_slope == 0:
            return ()
        return ("the scores are computed about 10 times, to find the threshold of each query",)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        return tiled.forward(problem, tiles)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        return tiled.backward(problem, tiles, result, grads)
