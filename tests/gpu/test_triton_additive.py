"""Additive scores of the Triton kernel: all activations and ranges against the oracle, with gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from device_calls import DEVICE, equal, run

import attnscore as ats
from attnscore.base import thresholds
from attnscore.kernels.triton import additive_gradients, tiles
from cases import ACTIVATIONS, MASK, Sizes
from covering import pairs
from harness import EXTRAS, make_call

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # NumPy's, in the interpreter: exp of a large number is infinite, and 1 / (1 + it) is 0.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DTYPES = ("float32", "float16", "bfloat16")
SCORES = ("additive-tanh-heads", "additive-sigmoid-bias", "additive-relu", "additive-leaky_relu-0.2",
          "additive-silu-some-heads", "additive-gelu", "soft_cap-of-temperature-additive")  # fmt: skip
MASKS = ("valid_lens-empty", "KeyPadding-scattered", "Causal-bottom_right-tall", "Packed-or", "array-4d", "nested")
SOME_EXTRAS = tuple(name for name in EXTRAS if "weights" not in name)


@pytest.fixture(autouse=True)
def _small_tiles(_tiles_of_few_positions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.INTERPRETED, "store_gradients", tiles.Tile(8, 4, 4, 1))
    monkeypatch.setattr(additive_gradients, "INTERPRETED_TILE", (4, 4))


def test_one_against_the_oracle() -> None:
    call = make_call("additive-tanh", "Causal-offset-batch", "float32", "hiding-bias", Sizes(heads=2, key_heads=1))
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pairs(score=SCORES, mask=MASKS, dtype=DTYPES, extras={name or "nothing-else": name for name in SOME_EXTRAS})
def test_against_the_oracle(score: str, mask: str, dtype: str, extras: str) -> None:
    queries, keys = MASK[mask].lengths
    call = make_call(score, mask, dtype, extras, Sizes(heads=2, key_heads=1, queries=queries, keys=keys), seed=2)
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 700])
def test_the_same_bits_in_any_order_and_chunk(
    chunk: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call("additive-tanh-heads", "nested", "float32", "hiding-bias")
    first = run(call, kernel="triton")
    monkeypatch.setattr(thresholds, "GRADIENT_PAIRS", chunk)
    equal(first, run(call, kernel="triton"))
    request.getfixturevalue("reversed_grid")
    equal(first, run(call, kernel="triton"))


def _arrays(size: float, channels: int, lengths: tuple[int, int] = (7, 9)) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    shapes = {"query": (1, lengths[0], channels), "key": (1, lengths[1], channels), "w_v": (channels,)}
    found = {name: torch.tensor(rng.standard_normal(shape).astype("float32")) for name, shape in shapes.items()}
    found["query"] *= size
    found["key"] *= size
    found["value"] = torch.tensor(rng.standard_normal((1, lengths[1], 2)).astype("float32"))
    return found


def _results(
    arrays: dict[str, torch.Tensor], activation: str, kernel: str, dtype: torch.dtype, **options: Any
) -> list[torch.Tensor]:
    """Return log-sum-exp, output and the gradients of all arrays, in float64."""
    device = DEVICE if kernel == "triton" else "cpu"
    leaves = {name: x.detach().clone().to(device, dtype).requires_grad_() for name, x in arrays.items()}
    score = ats.Additive(leaves["w_v"], activation=activation, negative_slope=0.2)
    sides = (leaves[name] for name in ("query", "key", "value"))
    out, stats = ats.attend(*sides, score=score, kernel=kernel, return_stats="log_sum_exp", **options)
    total = (out * torch.linspace(-1, 1, out.numel(), dtype=dtype, device=device).reshape(out.shape)).sum()
    grads = torch.autograd.grad(total + stats.log_sum_exp.sum(), list(leaves.values()))
    return [x.detach().double().cpu() for x in (stats.log_sum_exp, out, *grads)]


def agree(arrays: dict[str, torch.Tensor], **options: Any) -> None:
    """Assert that float32 in the Triton kernel is float64 in the dense kernel."""
    found = _results(arrays, "tanh", "triton", torch.float32, **options)
    for x, want in zip(found, _results(arrays, "tanh", "dense", torch.float64, **options), strict=True):
        torch.testing.assert_close(x, want, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1e-3, 3.0, 9.0, 1e4])
def test_every_range(activation: str, size: float) -> None:
    """Four, two and one term to a division, and term by term; as exact as PyTorch's own float32 (`numerics`).

    Weights have the rounding errors of their scores, which grow with these.
    """
    arrays = _arrays(size, 7)
    found = _results(arrays, activation, "triton", torch.float32)
    wanted = _results(arrays, activation, "dense", torch.float64)
    plain = _results(arrays, activation, "dense", torch.float32)
    of_scores = max(1.0, size if "tanh" not in activation else 1.0)
    scale = [float(arrays["w_v"].abs().sum()) * of_scores]
    scale += [max(1.0, float(x.abs().max())) * of_scores for x in wanted[1:]]
    for x, want, other, unit in zip(found, wanted, plain, scale, strict=True):
        bound = max(2 * float((other - want).abs().max()), 8 * 2**-23 * unit)
        assert float((x - want).abs().max()) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 300])
def test_any_number_of_channels(channels: int) -> None:
    agree(_arrays(1.0, channels, (1, 5) if channels == 300 else (7, 9)))


@pytest.mark.slow
@pytest.mark.parametrize("length", [24, 37])
def test_intervals_of_a_tile_that_overlap(length: int) -> None:
    """Queries before position 21 have one interval, later queries of the same tile two over the same keys."""
    agree(_arrays(1.0, 3, (length, length)), mask=ats.KeyRange(0, 1) | ats.SlidingWindow(left=19, right=0))


@pytest.mark.slow
def test_two_batch_axes() -> None:
    arrays = _arrays(1.0, 3)
    for name in ("query", "key", "value"):
        arrays[name] = torch.stack([arrays[name][0] * scale for scale in (1.0, -1.0, 0.5, 2.0, 0.1, 3.0)])
        arrays[name] = arrays[name].reshape(2, 3, 1, *arrays[name].shape[1:])
    agree(arrays)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_masked_pairs_propagate_nothing(name: str, value: float, activation: str) -> None:
    """Neither forward nor backward: a NaN changes no bit of the rest, an infinity the algorithm and so the rounding."""
    tolerance = 0.0 if math.isnan(value) else 3e-6
    arrays = _arrays(1.0, 5)
    mask = ats.ValidLens(torch.tensor([6]))
    clean = _results(arrays, activation, "triton", torch.float32, mask=mask)
    position = 2 if name == "query" else 7
    arrays[name][0, position, 1] = value
    found = _results(arrays, activation, "triton", torch.float32, mask=mask)
    if name != "query":
        for x, want in zip(found, clean, strict=True):
            torch.testing.assert_close(x, want, rtol=tolerance, atol=tolerance)
        return
    others = [i for i in range(7) if i != position]
    for k in (0, 1, 2):
        torch.testing.assert_close(found[k][:, others], clean[k][:, others], rtol=tolerance, atol=tolerance)
    if math.isinf(value) and activation != "relu":
        wanted = _results(arrays, activation, "streaming", torch.float64, mask=mask)
        for x, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, want, rtol=2e-5, atol=1e-5)
    else:
        assert not torch.isfinite(found[0][0, position]).any()
