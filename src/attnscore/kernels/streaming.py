"""The streaming kernel: any score, mask and framework, O(n) memory, explicit gradients."""

from __future__ import annotations

from typing import final

from attnscore import engine
from attnscore.engine import Result, RowGradients
from attnscore.frameworks.contract import Array
from attnscore.kernels.contract import Kernel
from attnscore.problem import Problem
from attnscore.tiling import TilePlan


@final
class Streaming(Kernel):
    """Loops over tiles in the framework's own operations."""

    name = "streaming"
    summary = "tiles in the framework's own operations, O(n) memory"
    own_gradient = True
    matrix_is_second_pass = True

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def forward(self, problem: Problem, plan: TilePlan) -> Result:
        return engine.forward(problem, plan)

    def backward(
        self, problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Array]:
        return engine.backward(problem, plan, result, grads)
