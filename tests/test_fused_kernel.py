"""The fused kernel: PyTorch's own function on a CPU, where a switch lets it take tensors of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import KernelUnavailable
from attnscore.kernels import fused


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(fused, "_has_implementation", lambda problem: True)


def arrays(heads: int = 4, kv_heads: int = 4, queries: int = 33, keys: int = 33, dtype: Any = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


CALLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}),
    "wide": ({"keys": 40}, {}),
    "groups": ({"kv_heads": 2}, {}),
    "one-kv-head": ({"kv_heads": 1}, {}),
    "scale": ({}, {"score": ats.ScaledDot(0.2)}),
    "dot": ({}, {"score": "dot"}),
    "decoding": ({"queries": 1}, {"mask": ats.Causal("bottom_right")}),
    "all-keys": ({}, {"valid_lens": np.array([33, 33])}),
    "lengths-first": ({}, {"head_axis": -2}),
}


@pytest.mark.parametrize("call", CALLS)
def test_output_and_gradients(call: str) -> None:
    """As in float64, up to the rounding of bfloat16."""
    sizes, options = CALLS[call]
    given = arrays(**sizes)
    if options.get("head_axis") == -2:
        given = [x.transpose(1, 2) for x in given]
    assert ats.explain(*given, kernel="fused", **options).kernel == "fused"
    found, wanted = {}, {}
    for kernel, dtype, into in (("fused", torch.bfloat16, found), ("streaming", torch.float64, wanted)):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = ats.attend(*leaves, kernel=kernel, **options)
        seed = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype)
        names = ("out", "query", "key", "value")
        into |= dict(zip(names, (out, *torch.autograd.grad(out, leaves, seed)), strict=True))
    for name, x in found.items():
        assert x.dtype == torch.bfloat16
        size = float(wanted[name].detach().abs().max())
        torch.testing.assert_close(x.double(), wanted[name], rtol=0.03, atol=0.02 * size)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"mask": ats.Causal()}, r"the mask Causal\(.*\): a NaN or infinity behind it would reach the output"),
    "window": ({"mask": ats.SlidingWindow(4, 0)}, r"the mask SlidingWindow\(left=4, right=0\)"),
    "array": ({"mask": torch.ones(33, 33, dtype=torch.bool)}, "the mask Dense"),
    "bias": ({"bias": torch.zeros(33, 33)}, "bias"),
    "sink": ({"sink": 0.0}, "sink"),
    "dropout": ({"dropout": 0.5}, "dropout"),
    "statistics": ({"return_stats": "log_sum_exp"}, "statistics: log_sum_exp"),
    "weights": ({"return_weights": True}, "weights"),
    "cap": ({"score": ats.SoftCap(ats.ScaledDot(), 10.0)}, "a score with a cap"),
    "gaussian": ({"score": "gaussian"}, "a score"),
    # Lowering multiplies by W in float32.
    "bilinear": ({"score": ats.Bilinear(torch.eye(8, dtype=torch.bfloat16))}, "dtype bfloat16, float32"),
    "additive": ({"score": ats.Additive(torch.ones(8, dtype=torch.bfloat16))}, r"no scaled product \(AdditiveForm\)"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_means_something_else_runs_elsewhere(call: str) -> None:
    options, reason = REFUSED[call]
    with pytest.raises(KernelUnavailable, match=reason):
        ats.attend(*arrays(), kernel="fused", **options)
    assert ats.explain(*arrays(), **options).kernel != "fused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_run_elsewhere(dtype: torch.dtype) -> None:
    """PyTorch's float64 takes quadratic memory, and its float32 is the slowest of its kernels."""
    with pytest.raises(KernelUnavailable, match=f"dtype {str(dtype)[6:]}, not float16 or bfloat16"):
        ats.attend(*arrays(dtype=dtype), kernel="fused")


def test_other_devices_and_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(KernelUnavailable, match="arrays on cpu, not on cuda"):
        ats.attend(*arrays(), kernel="fused")
    with pytest.raises(KernelUnavailable, match="arrays of numpy: it takes PyTorch's"):
        ats.attend(*(np.ones((3, 2)) for _ in range(3)), kernel="fused")
    assert ats.explain(*arrays()).kernel != "fused"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_masked_number_never_reaches_the_output(number: float) -> None:
    """Nor a gradient: the kernel that `auto` takes for a causal call; PyTorch's function lets it through."""
    given = arrays(queries=8, keys=9)
    clean = [x.clone().requires_grad_() for x in given]
    for x in given[1:]:
        x[..., 8, :] = number
    assert torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).isnan().any()
    leaves, mask = [x.requires_grad_() for x in given], ats.Causal("top_left")
    assert "a NaN or infinity behind it" in str(ats.explain(*leaves, mask=mask))
    found, wanted = (ats.attend(*x, mask=mask) for x in (leaves, clean))
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(out.sum(), x) for out, x in ((found, leaves), (wanted, clean))]
    torch.testing.assert_close(*grads)


def test_backward_twice_and_gradients_of_gradients() -> None:
    leaves = [x.requires_grad_() for x in arrays(queries=5, keys=5)]
    out = ats.attend(*leaves, kernel="fused").float().square().sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(out, leaves, retain_graph=True))
    (grad,) = torch.autograd.grad(out, leaves[:1], create_graph=True)
    found = torch.autograd.grad(grad.float().square().sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = ats.attend(*exact, kernel="streaming").square().sum()
    (grad,) = torch.autograd.grad(out, exact[:1], create_graph=True)
    for x, want in zip(found, torch.autograd.grad(grad.square().sum(), exact), strict=True):
        torch.testing.assert_close(x.double(), want, rtol=0.05, atol=0.03 * float(want.abs().max()))


def test_a_part_of_the_gradients() -> None:
    query, key, value = arrays()
    value.requires_grad_()
    ats.attend(query, key, value, kernel="fused").sum().backward()
    torch.testing.assert_close(value.grad.float().sum(-2), torch.full((2, 4, 8), 33.0), rtol=0.02, atol=0.0)


def test_parts_of_a_call_with_statistics_run_on_another_kernel() -> None:
    """Also where they are the log-sum-exp alone, of which PyTorch's function has none."""
    import torch.distributed as dist

    from attnscore.parallel.torch import attend

    tensors = arrays()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        out, stats = attend(*tensors, group=None, mode="gather", return_stats=("log_sum_exp",))
        with pytest.raises(KernelUnavailable, match=r"got statistics: log_sum_exp, entropy\. Hint"):
            attend(*tensors, group=None, mode="gather", kernel="fused", return_stats=("log_sum_exp", "entropy"))
    finally:
        dist.destroy_process_group()
    reference, reference_stats = ats.attend(*tensors, kernel="streaming", return_stats=("log_sum_exp",))
    torch.testing.assert_close(out, reference, rtol=0.02, atol=0.01)
    torch.testing.assert_close(stats.log_sum_exp, reference_stats.log_sum_exp)
