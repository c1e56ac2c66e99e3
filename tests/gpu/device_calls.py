"""Calls of the harness on the device that the GPU kernels run on."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from harness import Call, tensor

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def padded(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return `x` with strides of its own, inside a buffer of NaN: a read outside of it gives NaN."""
    if x.ndim < 2:
        return x
    # Query and value have gaps between their rows, the key between its numbers as well.
    step = 2 if name == "key" else 1
    whole = torch.full((*x.shape[:-1], step * x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    whole = torch.cat([torch.full_like(whole[:1], float("nan")), whole])
    inner = whole[1:, ..., 2 : 2 + step * x.shape[-1] : step]
    inner.copy_(x)
    return inner


def run(call: Call, *, among_nan: bool = False, **options: Any) -> dict[str, Any]:
    """Return outputs and gradients, on the CPU."""
    leaves = {}
    for name, x in call.leaves.items():
        leaf = tensor(x, device=DEVICE)
        leaves[name] = (padded(leaf, name) if among_nan else leaf).requires_grad_()
    keywords = call._keywords(lambda x: torch.from_numpy(x).to(DEVICE), leaves) | options
    outputs = call._attend(leaves, keywords)
    grads = torch.autograd.grad(
        [outputs[name] for name in call.seeds],
        list(leaves.values()),
        [tensor(seed, device=DEVICE) for seed in call.seeds_outward().values()],
        materialize_grads=True,
    )
    found = outputs | {f"grad.{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.cpu() for name, x in found.items()}


def equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Assert the same bits."""
    for name, x in first.items():
        np.testing.assert_array_equal(x.detach().float().numpy(), second[name].detach().float().numpy(), err_msg=name)
