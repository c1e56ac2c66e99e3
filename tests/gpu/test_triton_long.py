"""Inputs of several of the tiles that a GPU has, of any length: the Triton kernel against float64, with gradients.

In the interpreter, where tiles are small, all other tests have several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_calls import DEVICE, equal

import attnscore as ats
import triton_scores as own
from attnscore.problem import statistics
from covering import pairs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cpu", reason="inputs of several tiles of a GPU take the interpreter minutes"),
]

QUERIES, KEYS = 333, 451
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference, of the largest number of a result."""


def _learned(*shape: int) -> torch.Tensor:
    return torch.tensor(0.5 + np.random.default_rng(1).random(shape))


def _random() -> np.random.Generator:
    return np.random.default_rng(2)


SCORES: dict[str, Any] = {
    "scaled_dot": lambda dim: ("scaled_dot", {}),
    "bilinear": lambda dim: (ats.Bilinear, {"W": _learned(dim, dim) / dim}),
    "cosine": lambda dim: (ats.Cosine, {}),
    "soft_cap": lambda dim: (ats.SoftCap("scaled_dot", 3.0), {}),
    "gaussian": lambda dim: (ats.Gaussian(dim**0.5), {}),
    "gaussian-heads": lambda dim: (ats.Gaussian, {"bandwidth": _learned(4) * dim**0.5}),
    "additive": lambda dim: (ats.Additive, {"w_v": _learned(dim) / dim**0.5}),
    "own-product": lambda dim: (own.Square, {"gain": _learned(4) / dim}),
    "own-distance": lambda dim: (own.Student, {"rate": _learned(4) / dim}),
    "own-channels": lambda dim: (own.SmoothDistance, {"rate": _learned(4, dim) / dim}),
}
"""From the dimension to a score, or what makes one of its arrays, and these."""
MASKS: dict[str, Any] = {
    "none": lambda: None,
    "lengths": lambda: ats.ValidLens([KEYS, 70]),
    "empty": lambda: ats.ValidLens([0, 129]),
    "causal-top_left": lambda: ats.Causal("top_left"),
    "causal-bottom_right": lambda: ats.Causal("bottom_right"),
    "window": lambda: ats.SlidingWindow(90, 20, offset=[100, -40]),
    "prefix": lambda: ats.PrefixLM([130, 7]),
    "documents": lambda: ats.Documents(np.arange(QUERIES) // 70, np.arange(KEYS) // 90),
    "scattered": lambda: ats.Documents(np.arange(QUERIES) % 3, np.arange(KEYS) * 5 % 3),
    "two-intervals": lambda: ats.KeyRange(0, 5) | ats.SlidingWindow(50, 0, offset=60),
    "array": lambda: ats.Dense(_random().random((2, 4, QUERIES, KEYS)) < 0.4),
}
EXTRAS: dict[str, Any] = {
    "nothing": lambda: {},
    "bias": lambda: {"bias": _random().standard_normal((2, 4, QUERIES, KEYS))},
    "hiding": lambda: {"bias": np.where(_random().random((4, QUERIES, KEYS)) < 0.3, -np.inf, 0.5)},
    "row-bias": lambda: {"bias": _random().standard_normal((QUERIES, 1)), "return_stats": ("log_sum_exp",)},
    "key-bias": lambda: {"bias": _random().standard_normal((4, 1, KEYS))},
    "relative-bias": lambda: {"bias": _random().standard_normal((4, 1, QUERIES + KEYS - 1))},
    "dropout": lambda: {"dropout": 0.3, "seed": 2**40 + 17},
    "sink": lambda: {"sink": _random().standard_normal(4)},
    "entropy": lambda: {"return_stats": ("entropy", "log_sum_exp")},
}
DIMS = {"64": (64, 64), "128": (128, 128), "odd": (40, 24), "256": (256, 32)}


def arrays_of(dims: tuple[int, int], key_heads: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(3)
    shapes = {"query": (2, 4, QUERIES, dims[0]), "key": (2, key_heads, KEYS, dims[0])}
    shapes["value"] = (2, key_heads, KEYS, dims[1])
    return {name: torch.tensor(rng.standard_normal(shape)) for name, shape in shapes.items()}


def results(
    arrays: dict[str, torch.Tensor], score: Any, dtype: str, wide: bool, mask: Any, extras: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return output, statistics and gradients in float64: of the kernel, or of `wide` numbers on the CPU."""

    def cast(x: Any) -> torch.Tensor:
        x = torch.as_tensor(x).to(getattr(torch, dtype))
        return (x.double() if wide else x.to(DEVICE)).requires_grad_()

    made, fields = score
    options = {name: cast(x) if isinstance(x, np.ndarray) else x for name, x in extras.items()}
    leaves = {name: cast(x) for name, x in arrays.items()}
    learned = {name: cast(x) for name, x in fields.items()}
    found = ats.attend(
        **leaves, score=made(**learned) if isinstance(made, type) else made, mask=mask,
        kernel="streaming" if wide else "triton", **options,
    )  # fmt: skip
    outputs = {"out": found[0], **found[1]._asdict()} if isinstance(found, tuple) else {"out": found}
    outputs = {name: x for name, x in outputs.items() if x is not None}

    def seed(x: torch.Tensor) -> torch.Tensor:
        # In float64 first: float16 cannot count that far.
        return torch.linspace(-1, 1, x.numel(), dtype=torch.float64, device=x.device).reshape(x.shape).to(x.dtype)

    total = sum((torch.where(x.isfinite(), x, 0.0) * seed(x)).double().sum() for x in outputs.values())
    wanted = leaves | learned | {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    grads = torch.autograd.grad(total, list(wanted.values()))
    found = outputs | {f"gradient of {name}": x for name, x in zip(wanted, grads, strict=True)}
    return {name: x.detach().double().cpu() for name, x in found.items()}


def agree(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, want in wanted.items():
        unit = max(1e-3, float(want[want.isfinite()].abs().max()))
        torch.testing.assert_close(
            found[name], want, rtol=0, atol=tolerance * unit, msg=lambda text, name=name: f"{name}: {text}"
        )


@pairs(
    score=tuple(SCORES), mask=tuple(MASKS), dtype=tuple(TOLERANCE), extras=tuple(EXTRAS), dims=tuple(DIMS),
    key_heads={"4": 4, "2": 2},
)  # fmt: skip
def test_several_tiles(score: str, mask: str, dtype: str, extras: str, dims: str, key_heads: int) -> None:
    arrays, made, given = arrays_of(DIMS[dims], key_heads), SCORES[score](DIMS[dims][0]), EXTRAS[extras]()
    visible = MASKS[mask]()
    found = results(arrays, made, dtype, False, visible, given)
    equal(found, results(arrays, made, dtype, False, visible, given))
    agree(found, results(arrays, made, dtype, True, visible, given), TOLERANCE[dtype])


@pytest.mark.parametrize("mask", MASKS)
def test_statistics(mask: str) -> None:
    arrays, visible = arrays_of((64, 64), 2), MASKS[mask]()
    found, wanted = (
        ats.attend(
            **{name: x.float().to(DEVICE) if kernel == "triton" else x.float().double() for name, x in arrays.items()},
            mask=visible, return_stats=True, kernel=kernel,
        )[1]
        for kernel in ("triton", "streaming")
    )  # fmt: skip
    for name in sorted({*statistics.TABLE} - {*statistics.KEYS}):
        torch.testing.assert_close(
            getattr(found, name).double().cpu(), getattr(wanted, name), rtol=1e-5, atol=1e-5,
            msg=lambda text, name=name: name + text,
        )  # fmt: skip


def test_a_graph_of_a_call() -> None:
    """Captured and replayed on other numbers: nothing waits for the device, nor is copied to it."""
    leaves = {name: x.float().to(DEVICE).requires_grad_() for name, x in arrays_of((64, 64), 2).items()}
    lens = torch.tensor([451, 70], device=DEVICE)

    def step() -> list[torch.Tensor]:
        out = ats.attend(**leaves, mask=ats.Causal("bottom_right"), valid_lens=lens)
        return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves.values():
            x.mul_(0.5)
        lens.copy_(torch.tensor([3, 400]))
    graph.replay()
    for x, want in zip(captured, step(), strict=True):
        torch.testing.assert_close(x, want, rtol=0, atol=0)
