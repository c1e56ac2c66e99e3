"""The fused kernel: PyTorch's own ``scaled_dot_product_attention``, for calls that mean the same.

- Runs plain 16-bit products of CUDA tensors: no mask, bias, sink, dropout, weights or statistics. Another kernel runs
  any other call, causal ones too, because PyTorch's kernels multiply a masked value by a weight of 0, which keeps NaN.
- Never through an ``attn_mask``, and never where PyTorch would fall back on its quadratic implementation.
- Its gradient is PyTorch's: deterministic under ``torch.use_deterministic_algorithms`` alone. The streaming kernel
  computes gradients of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from attnscore.backends.base import HALF_PRECISION, Array
from attnscore.kernels import tiled
from attnscore.kernels.base import Kernel
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.kernels.triton.kernel import missing_package
from attnscore.problem.normalizers import ONLY_SOFTMAX
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import InnerForm

DEVICES = ("cuda",)
"""Types of devices on which PyTorch's function is taken."""

Record = tuple[dict[str, Array], Array]
"""The operands and the output of a forward, with the autograd graph between them."""


@final
@dataclass(eq=False)
class Fused(Kernel):
    """PyTorch's fused attention."""

    has_backward: bool = False
    """Whether a backward follows the forward."""
    record: Record | None = None
    """The forward, until its backward."""

    name = "fused"
    summary = "PyTorch's scaled_dot_product_attention, for plain 16-bit products on a GPU"
    differentiable = Streaming()

    def missing(self) -> str | None:
        return missing_package("torch")

    def with_backward(self, problem: Problem, tiles: TilePlan) -> Kernel:
        return Fused(has_backward=True)

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        if problem.ops.name != "torch":
            return (f"arrays of {problem.ops.name}: it takes PyTorch's",)
        if problem.value.device.type not in DEVICES:
            return (f"arrays on {problem.value.device.type}, not on {' or '.join(DEVICES)}",)
        differences = _differences(problem)
        if not differences and not _has_implementation(problem):
            differences.append("PyTorch has no fused implementation for these arrays on this device")
        return tuple(differences)

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        if self.has_backward:
            self.record = _recorded(problem)
            out = self.record[1].detach()
        else:
            out = _attention(problem, problem.operands())
        # PyTorch returns neither row_max nor log_denom: no statistic is requested, and the backward reads neither.
        zeros = out[..., :1].detach() * 0.0
        return Result(out, row_max=zeros, log_denom=zeros.clone(), statistics={})

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        import torch

        ops, operands = problem.ops, problem.operands()
        if ops.needs_grad(*operands.values(), *([] if grads.out is None else [grads.out])):
            # The gradients are to be differentiated, which PyTorch's function cannot be; `result` has no real row_max.
            return tiled.backward(problem, tiles, tiled.forward(problem, tiles), grads)
        if grads.out is None:
            return {name: torch.zeros_like(x) for name, x in operands.items()}
        # Without a record, this is a second backward of one forward.
        leaves, out = self.record or _recorded(problem)
        self.record = None
        names = [name for name in leaves if name in requested]
        return dict(zip(names, torch.autograd.grad(out, [leaves[name] for name in names], grads.out), strict=True))


def _recorded(problem: Problem) -> Record:
    """Run the forward while autograd records it."""
    import torch

    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in problem.operands().items()}
        return leaves, _attention(problem, leaves)


def _differences(problem: Problem) -> list[str]:
    """Return the properties of a call that PyTorch's function does not support."""
    form: Any = problem.form
    differences = []
    if not isinstance(form, InnerForm):
        differences.append(f"a score that is no scaled product ({type(form).__name__})")
    elif form.caps or form.key_bias is not None or form.query_bias is not None:
        differences.append("a score with a cap, or a bias of keys or queries")
    dtypes = {problem.dtype, problem.ops.dtype(form.query), problem.ops.dtype(form.key)}
    if len(dtypes) > 1 or problem.dtype not in HALF_PRECISION:
        differences.append(f"dtype {', '.join(sorted(dtypes))}, not float16 or bfloat16 of all arrays")
    optional = {"bias": problem.bias, "sink": problem.sink, "dropout": problem.dropout, "weights": problem.matrix}
    differences += [name for name, x in optional.items() if x is not None]
    if problem.normalizer is not None:
        differences.append(ONLY_SOFTMAX)
    if problem.statistics:
        differences.append(f"statistics: {', '.join(problem.statistics)}")
    if not _is_unmasked(problem):
        differences.append(f"the mask {problem.mask!r}: a NaN or infinity behind it would reach the output")
    if 0 in (*problem.score_shape.rows, problem.score_shape.key_len, problem.layout.value_dim, form.query.shape[-1]):
        differences.append("an axis of length 0")
    if not problem.ops.has_values(*problem.operands().values()):
        differences.append("arrays without values yet (traced, with tangents)")
    return differences


def _is_unmasked(problem: Problem) -> bool:
    """Return whether each query attends to all keys."""
    if problem.mask is None:
        return True
    interval_set, remaining_mask = problem.visibility
    if interval_set is None or remaining_mask is not None or interval_set.single is None:
        return False
    return not np.any(interval_set.start) and bool(np.all(interval_set.stop == problem.score_shape.key_len))


def _sdpa_inputs(problem: Problem, operands: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Return query, key and value for PyTorch, (batch, head, length, dim): views, unless axes are broadcast."""
    shape = problem.score_shape
    # PyTorch takes as many heads of keys as of values: both are expanded if one of them has an axis of groups.
    key_groups = 1 if all(operands[name].shape[-3] == 1 for name in ("key", "value")) else shape.groups

    def merged(name: str, groups: int) -> Array:
        x = operands[name].expand(*shape.lead, shape.heads, groups, *operands[name].shape[-2:])
        return x.reshape(-1, shape.heads * groups, *x.shape[-2:])

    return merged("query", shape.groups), merged("key", key_groups), merged("value", key_groups)


def _attention(problem: Problem, operands: dict[str, Array]) -> Array:
    """Return the output on the canonical axes."""
    import torch

    query, key, value = _sdpa_inputs(problem, operands)
    form: Any = problem.form
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=form.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.reshape(*problem.score_shape.rows, out.shape[-1])


def _has_implementation(problem: Problem) -> bool:
    """Return whether PyTorch has a fused implementation for the call, which does not store the matrix of scores."""
    from torch.backends import cuda

    query, key, value = _sdpa_inputs(problem, problem.operands())
    # No attn_mask, dropout_p 0, not is_causal, and enable_gqa as in `_attention`.
    params = cuda.SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    tests = (cuda.can_use_flash_attention, cuda.can_use_cudnn_attention, cuda.can_use_efficient_attention)
    return any(test(params, debug=False) for test in tests)
