"""Repeated calls of the Triton kernel: the plan of the first, with the bits and gradients of a call without one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from device_calls import DEVICE

import attnscore as ats
from attnscore.base.cache import BoundedCache
from attnscore.kernels import Kernel
from attnscore.kernels.triton.kernel import Triton
from attnscore.kernels.triton.plan import TritonPlan
from attnscore.plans import plan as plans

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "two-axes": ((9, 5), (13, 5)),
    "batch": ((2, 9, 5), (2, 13, 5)),
    "one-query-batch": ((1, 9, 5), (2, 13, 5)),
    "heads": ((2, 2, 9, 5), (2, 2, 13, 5)),
    "groups": ((2, 4, 9, 5), (2, 2, 13, 5)),
    "two-batches": ((2, 3, 2, 9, 5), (2, 3, 2, 13, 5)),
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": ats.Causal("bottom_right"),
    "window": ats.SlidingWindow(3, 2, offset=2),
    "two-intervals": ats.KeyRange(0, 2) | ats.SlidingWindow(3, 0, offset=4),
    "empty": ats.KeyRange(3, 3),
}


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PLANS", BoundedCache())


def arrays_of(shape: str, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value, whose rows have gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    query, key = SHAPES[shape]
    shapes = [query, key, (*key[:-1], 3)]
    found = [torch.randn(*x[:-1], x[-1] + 2, generator=generator).to(DEVICE, dtype)[..., : x[-1]] for x in shapes]
    return [x.requires_grad_() for x in found]


def with_gradients(arrays: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    out = ats.attend(*arrays, kernel="triton", **options)
    seed = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, arrays, seed)]


def only_plan() -> Any:
    """Return the plan that is kept; None where there is none."""
    found = plans.PLANS.values()
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mask", "score"),
    [
        ("groups", "causal", "scaled_dot"),
        *((shape, "window", "scaled_dot") for shape in SHAPES),
        *(("heads", mask, ats.ScaledDot(0.7)) for mask in MASKS),
        ("batch", "none", "dot"),
    ],
)
def test_the_bits_of_a_call_without_a_plan(shape: str, mask: str, score: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"mask": MASKS[mask], "score": score}
    first, second = arrays_of(shape, 1), arrays_of(shape, 2)
    found = [with_gradients(first, **options)]
    assert type(only_plan()) is TritonPlan
    with monkeypatch.context() as patch:
        # Neither checked nor laid out again.
        patch.setattr(plans, "build_problem", None)
        found.append(with_gradients(second, **options))
        with torch.no_grad():
            found[1].append(ats.attend(*second, kernel="triton", **options))
    monkeypatch.setattr(Triton, "prepare", Kernel.prepare)
    plans.PLANS.clear()
    for x, wanted in zip(found, (with_gradients(first, **options), with_gradients(second, **options)), strict=True):
        for part, want in zip(x, [*wanted, wanted[0]], strict=False):
            torch.testing.assert_close(part, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_gradient_of_a_gradient() -> None:
    arrays = arrays_of("heads", 3)
    ats.attend(*arrays, mask=MASKS["causal"], kernel="triton")
    found = []
    for kernel in ("triton", "streaming"):
        out = ats.attend(*arrays, mask=MASKS["causal"], kernel=kernel)
        (first,) = torch.autograd.grad(out.square().sum(), arrays[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), arrays))
    for x, want in zip(*found, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_other_calls_have_none() -> None:
    query, key, value = (x.detach() for x in arrays_of("heads", 4))
    lens, mask = torch.tensor([3, 9], device=DEVICE), torch.ones(9, 13, dtype=torch.bool, device=DEVICE)
    for options in (
        {"valid_lens": lens}, {"mask": mask}, {"bias": torch.zeros(9, 13, device=DEVICE)}, {"dropout": 0.5, "seed": 1},
        {"score": "gaussian"}, {"score": "cosine"}, {"return_stats": True}, {"sink": torch.zeros(2, device=DEVICE)},
    ):  # fmt: skip
        ats.attend(query, key, value, kernel="triton", **options)
        assert only_plan() is None, options
    swapped = (x.transpose(1, 2) for x in (query, key, value))
    ats.attend(*swapped, kernel="triton", head_axis=-2)
    assert only_plan() is None


def test_a_plan_holds_no_array_of_a_caller() -> None:
    arrays = [x.detach() for x in arrays_of("heads", 5)]
    kept = [weakref.ref(x) for x in arrays]
    ats.attend(*arrays, mask=MASKS["causal"], kernel="triton")
    assert only_plan() is not None
    del arrays
    gc.collect()
    assert [x() for x in kept] == [None, None, None]


@pytest.mark.skipif(DEVICE == "cpu", reason="the plans of tensors on a GPU")
def test_which_tensors_of_a_gpu_have_a_plan() -> None:
    arrays = [x.detach() for x in arrays_of("heads", 6)]
    with torch.autocast(DEVICE, torch.bfloat16):
        ats.attend(*arrays, kernel="triton")
    assert only_plan() is None
    torch.func.vmap(lambda *sides: ats.attend(*sides, mask=MASKS["causal"]))(*arrays)
    assert only_plan() is None
    ats.attend(*arrays, kernel="triton")
    assert only_plan() is not None
