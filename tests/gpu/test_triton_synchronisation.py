"""What a call on a GPU never does: read a value on the host, which waits for the device and ends a graph's capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_calls import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

import attnscore as ats
from attnscore.backends import base
from attnscore.backends import torch as torch_backend
from attnscore.kernels.triton import tiles

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result, or its size, the host has to know."""


class NoReads(TorchDispatchMode):
    """Refuses operations that read a value, and indices that are boolean."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in READS or any(x is not None and x.dtype == torch.bool for x in indices):
            raise AssertionError(f"a value is read: {name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _the_cpu_stands_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native kernel reads the values either."""
    monkeypatch.setattr(torch_backend, "_READS_TENSORS", False)
    for module in (base, torch_backend):
        monkeypatch.setattr(module, "ACCELERATORS", (*base.ACCELERATORS, DEVICE))
    monkeypatch.setattr(tiles, "INTERPRETED", {"store_gradients": tiles.Tile(16, 16, 4, 1)} | tiles.INTERPRETED)


def learned(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, device=DEVICE).requires_grad_()


SCORES: dict[str, Any] = {
    "bilinear": lambda: ats.Bilinear(learned(4, 4)),
    "scaled_dot": lambda: "scaled_dot",
    "gaussian": lambda: ats.Gaussian(0.5),
    "gaussian-learned": lambda: ats.Gaussian(learned(2)),
    "gaussian-dims": lambda: ats.Gaussian(learned(2, 4)),
    "cosine": ats.Cosine,
    "cosine-learned": lambda: ats.Cosine(learned()),
    "additive": lambda: ats.Additive(learned(4)),
    "soft-cap": lambda: ats.SoftCap("scaled_dot", 5.0),
    "temperature-learned": lambda: ats.Temperature("scaled_dot", learned()),
}
MASKS: dict[str, Any] = {
    "lengths": lambda: {"valid_lens": torch.tensor([5, 7], device=DEVICE)},
    "none": dict,
    "causal": lambda: {"mask": ats.Causal("top_left"), "bias": torch.zeros(9, 7, device=DEVICE)},
    "array": lambda: {"mask": torch.ones(9, 7, dtype=torch.bool, device=DEVICE)},
}


def call(score: Any, **options: Any) -> None:
    """Run a call forward and backward."""
    shapes = (2, 2, 9, 4), (2, 2, 7, 4), (2, 2, 7, 3)
    leaves = [torch.ones(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    out = ats.attend(*leaves, score=score, kernel="triton", **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def rows() -> list[Any]:
    found = [*((score, "lengths") for score in SCORES), *(("bilinear", mask) for mask in MASKS if mask != "lengths")]
    return [pytest.param(*row, marks=[] if k == 0 else [pytest.mark.slow]) for k, row in enumerate(found)]


@pytest.mark.parametrize(("score", "mask"), rows())
def test_nothing_is_read(score: str, mask: str) -> None:
    given, options = SCORES[score](), MASKS[mask]()
    with NoReads():
        call(given, **options)


@pytest.mark.slow
def test_reads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where the host may know whether a number is finite."""
    monkeypatch.setattr(torch_backend, "ACCELERATORS", ())
    with pytest.raises(AssertionError, match="a value is read"), NoReads():
        call(SCORES["bilinear"]())
