"""The Triton kernel: attention on NVIDIA GPUs for PyTorch tensors. Imports Triton and PyTorch at its first call.

- Runs inner, distance and additive forms under any mask, forward and backward, with every extra of a call; lists why
  it cannot run a problem, and ``auto`` then takes the streaming kernel.
- No atomics: the same inputs give the same bits. Nothing waits for the host.
- ``TRITON_INTERPRET=1`` in the environment runs it on CPU tensors in Triton's interpreter, for tests.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, final

from attnscore.backends.base import Array, SeedHalves
from attnscore.kernels import tiled
from attnscore.kernels.base import Kernel, Plan
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.kernels.triton import is_interpreted
from attnscore.problem.dropout import PairDropout
from attnscore.problem.normalizers import ONLY_SOFTMAX
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import AdditiveForm, DistanceForm, InnerForm, TileForm
from attnscore.scores.triton_tile import triton_tile_of

OLDEST = 80
"""First architecture (compute capability times 10) with bfloat16 and asynchronous copies."""
MOST_DIM = 256
"""Largest dimension of keys or values: registers hold a tile of them."""
MOST_MATRICES = 2**16 - 1
"""CUDA's limit of the second axis of a grid, which has one program for each matrix of scores."""


@cache
def missing_package(*packages: str) -> str | None:
    """Return which package is not installed, or that there is no NVIDIA driver; None where nothing is missing."""
    for name in packages:
        if find_spec(name) is None:
            return f"{name} is not installed"
    if not is_interpreted():
        try:
            # Without importing PyTorch, which takes a second.
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "no NVIDIA driver on this machine"
    return None


@final
class Triton(Kernel):
    """Tiles on a GPU, written in Triton."""

    name = "triton"
    summary = "Triton on a GPU, O(n) memory"
    differentiable = Streaming()

    def prepare(self, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> Plan:
        from attnscore.kernels.triton.plan import reusable_plan

        return reusable_plan(self, problem, tiles, arrays) or super().prepare(problem, tiles, arrays)

    def missing(self) -> str | None:
        return missing_package("torch", "triton")

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        if problem.ops.name != "torch":
            return (f"arrays of {problem.ops.name}: it takes PyTorch's",)
        device = "cpu" if is_interpreted() else "cuda"
        if problem.value.device.type != device:
            return (f"arrays on {problem.value.device.type}, not on {device}",)
        if (why := self.missing()) is not None:
            return (why,)
        return tuple(_reasons(problem))

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        if problem.ops.needs_grad(*problem.operands().values()):
            # PyTorch records this call, and can differentiate only its own operations.
            return tiled.forward(problem, tiles)
        from attnscore.kernels.triton import launch

        return launch.forward(problem, tiles)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        incoming = [x for x in (grads.out, grads.log_sum_exp, grads.entropy, grads.matrix) if x is not None]
        ops, operands = problem.ops, problem.operands()
        if ops.needs_grad(*operands.values(), *incoming) or not ops.has_values(*operands.values(), *incoming):
            # A gradient of these gradients may follow, or a transform traces them: both take PyTorch's operations.
            return tiled.backward(problem, tiles, result, grads)
        from attnscore.kernels.triton import launch

        return launch.backward(problem, tiles, result, grads, requested)


def _reasons(problem: Problem) -> list[str]:
    """Return why the kernel cannot run a problem of PyTorch tensors on a GPU."""
    form: Any = problem.form
    reasons = [] if problem.normalizer is None else [ONLY_SOFTMAX]
    if isinstance(form, TileForm):
        if triton_tile_of(form.score) is None:
            reasons.append(f"{type(form.score).__name__} is computed in Python: it has no method triton_tile")
        elif form.query.shape[-1] != form.key.shape[-1]:
            reasons.append("queries and keys of different dimensions, by a custom score")
    elif not isinstance(form, (InnerForm, DistanceForm, AdditiveForm)):
        reasons.append(f"the score is computed in Python ({type(form).__name__})")
    if problem.dtype == "float64":
        reasons.append("float64, of which GPUs have few units")
    if problem.matrix is not None:
        reasons.append("the matrix of all pairs is requested")
    matrices = math.prod(problem.score_shape.rows[:-1])
    if matrices > MOST_MATRICES:
        reasons.append(f"{matrices} heads of the batch, above the {MOST_MATRICES} of a grid's second axis")
    # Channels of an additive score are summed one after the other, so that their number has no limit.
    dims = max(0 if isinstance(form, AdditiveForm) else int(form.query.shape[-1]), problem.layout.value_dim)
    if dims > MOST_DIM:
        reasons.append(f"a dimension of {dims}, above {MOST_DIM}")
    if not problem.ops.has_values(*problem.operands().values()):
        reasons.append("arrays without values yet (traced, with tangents)")
    elif problem.value.is_cuda:
        from attnscore.kernels.triton import launch

        if (architecture := launch.RUNNER.architecture(problem.value)) < OLDEST:
            reasons.append(f"a GPU of compute capability {architecture / 10}, below {OLDEST / 10}")
    dropout = problem.dropout
    if isinstance(dropout, PairDropout):
        reasons.append("dropout of a part of a sequence")
    elif dropout is not None and isinstance(dropout.seed, SeedHalves):
        reasons.append("dropout whose seed is an array")
    return reasons
