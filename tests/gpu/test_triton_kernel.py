"""The Triton kernel against the oracle: scores, masks, dtypes and what else is in a call, by pairs, with gradients."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from device_calls import DEVICE, equal, run

import attnscore as ats
from attnscore.kernels.triton import launch
from attnscore.problem.statistics import TABLE
from cases import MASK, Sizes
from covering import pairs
from harness import EXTRAS, Call, make_call

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ("float32", "float16", "bfloat16")
SCORES = ("scaled_dot", "scaled_dot-batch-heads", "bilinear-heads", "cosine-heads-zero-vectors", "gaussian-direct",
          "gaussian-heads", "temperature-of-soft_cap-bilinear", "gaussian-dims")  # fmt: skip
MASKS = ("none", "valid_lens-empty", "ValidLens-2d-query_lens", "KeyPadding-left", "KeyPadding-scattered",
         "Causal-bottom_right-tall", "Causal-offset-batch", "SlidingWindow-both", "PrefixLM", "Documents-two",
         "Documents-scattered", "Packed-window", "Packed-or", "array-2d", "array-4d", "array-key", "Dense-rows",
         "nested")  # fmt: skip
SOME_EXTRAS = tuple(name for name in EXTRAS if "weights" not in name)
FEW = [
    ("temperature-of-soft_cap-bilinear", "SlidingWindow-both", "bfloat16", "hiding-bias"),
    ("gaussian-heads", "array-4d", "float32", "bias-sink"),
]
"""Rows of the default tier."""


def call_of(score: str, mask: str, dtype: str, extras: str) -> Call:
    """A call of two heads that share a KV head: the interpreter takes a tenth of a second for a few programs."""
    queries, keys = MASK[mask].lengths
    return make_call(score, mask, dtype, extras, Sizes(heads=2, key_heads=1, queries=queries, keys=keys), seed=2)


@pytest.mark.parametrize(("score", "mask", "dtype", "extras"), FEW)
def test_a_few_against_the_oracle(score: str, mask: str, dtype: str, extras: str) -> None:
    call = call_of(score, mask, dtype, extras)
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pairs(score=SCORES, mask=MASKS, dtype=DTYPES, extras={name or "nothing-else": name for name in SOME_EXTRAS})
def test_against_the_oracle(score: str, mask: str, dtype: str, extras: str) -> None:
    call = call_of(score, mask, dtype, extras)
    call.check(run(call, kernel="triton", among_nan=True))


@pytest.mark.slow
@pairs(score=("scaled_dot", "gaussian-heads"), mask=("none", "nested"), extras=("hiding-bias", "row-bias", "key-bias"))
def test_the_same_bits_in_any_order(score: str, mask: str, extras: str, request: pytest.FixtureRequest) -> None:
    """No two programs write to the same place, or the later one of them would be another one here."""
    call = make_call(score, mask, "float32", extras)
    first = run(call, kernel="triton")
    equal(first, run(call, kernel="triton"))
    request.getfixturevalue("reversed_grid")
    equal(first, run(call, kernel="triton"))


def relative_call(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {"query": (2, 4, 9, 5), "key": (2, 2, 13, 5), "value": (2, 2, 13, 3), "bias": (4, 1, 21)}
    return {name: torch.tensor(rng.standard_normal(shape), dtype=dtype) for name, shape in shapes.items()}


def gradients(arrays: dict[str, torch.Tensor], kernel: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Return output and gradients in float64, of a call in another dtype."""
    device = "cpu" if kernel == "native" else DEVICE
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in arrays.items()}
    out = ats.attend(**leaves, kernel=kernel, **options)
    seed = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=device).reshape(out.shape)
    return [x.double().cpu() for x in (out, *torch.autograd.grad(out, list(leaves.values()), seed))]


def agree(arrays: dict[str, torch.Tensor], **options: Any) -> None:
    """Assert that float32 in the Triton kernel is float64 in the streaming kernel."""
    found = gradients(arrays, "triton", torch.float32, **options)
    for x, want in zip(found, gradients(arrays, "streaming", torch.float64, **options), strict=True):
        torch.testing.assert_close(x, want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1, 21), (1, 1, 21), (2, 1, 1, 21)])
def test_relative_bias(shape: tuple[int, ...]) -> None:
    arrays = relative_call()
    arrays["bias"] = torch.tensor(np.random.default_rng(4).standard_normal(shape))
    agree(arrays, mask=ats.Causal("bottom_right"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2**40 + 17, 2**63 - 1])
def test_dropout_drops_the_same_weights_as_on_the_cpu(seed: int) -> None:
    agree(relative_call(), dropout=0.4, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (1, 13), (17, 1), (5, 33), (16, 16), (31, 7)])
@pytest.mark.parametrize("dims", [(1, 1), (17, 33)])
def test_odd_sizes(sizes: tuple[int, int], dims: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    shapes = {"query": (3, sizes[0], dims[0]), "key": (3, sizes[1], dims[0]), "value": (3, sizes[1], dims[1])}
    agree({name: torch.tensor(rng.standard_normal(shape)) for name, shape in shapes.items()})


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(
    ("mask", "sink"), [(None, None), (ats.ValidLens([70, 0]), -1.5), (ats.Causal("bottom_right"), -float("inf"))]
)
def test_statistics_over_several_tiles(mask: Any, sink: float | None, scale: float) -> None:
    """Scores that float32 has exactly, up to the rounding of the largest; under a mask with a bias of -inf too."""
    rng = np.random.default_rng(8)
    arrays = {name: torch.tensor(rng.integers(-3, 4, (2, 2, n, 16))) for name, n in (("query", 37), ("key", 90))}
    arrays |= {"query": arrays["query"] * scale, "value": torch.ones(2, 2, 90, 1)}
    if mask is not None:
        arrays["bias"] = torch.tensor(np.where(rng.random((2, 37, 90)) < 0.3, -INF, 0.5))
    found = []
    for kernel, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        given = {name: x.to(DEVICE, dtype) for name, x in arrays.items()}
        sinks = None if sink is None else torch.tensor([sink, 2.0], dtype=dtype, device=DEVICE)
        found.append(ats.attend(**given, kernel=kernel, mask=mask, sink=sinks, return_stats=True)[-1])
    stats, wanted = found
    largest = wanted.max_score[wanted.max_score.isfinite()].abs().max().item()
    error = 4 * np.finfo("float32").eps * (1 + largest)
    for name in TABLE:
        x, want = (getattr(all_of, name).double() for all_of in (stats, wanted))
        torch.testing.assert_close(x, want, rtol=4e-6, atol=error, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("mask", [None, ats.ValidLens([61])])
def test_moments_of_scores_far_from_zero(mask: Any) -> None:
    """They do not cancel: scores near 1000 of a deviation of 1, and the first key's far from them."""
    rng = np.random.default_rng(9)
    key = torch.tensor(1000 + rng.standard_normal((1, 67, 1)), dtype=torch.float32, device=DEVICE)
    key[0, 0] += 50
    scores = key[:, : 67 if mask is None else 61].double()
    stats = ats.attend(torch.ones_like(key[:, :2]), key, key, kernel="triton", mask=mask, return_stats=True)[-1]
    for found, wanted in ((stats.mean_score, scores.mean()), (stats.var_score, scores.var(correction=0))):
        torch.testing.assert_close(found.double(), wanted.expand_as(found), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_score_that_overflows_downwards_adds_nothing_to_the_entropy() -> None:
    """Its weight is 0, and so is what the entropy takes of it; in a full tile, where no pair is masked, too."""
    key = torch.linspace(-1, 1, 256, device=DEVICE).reshape(1, 64, 4).contiguous()
    value = key.clone()
    key[0, 3] = -3e38
    query = torch.full_like(key, 4.0)
    found, wanted = (
        ats.attend(query, key, value, score="dot", kernel=kernel, return_stats=("entropy",))[-1].entropy
        for kernel in ("triton", "dense")
    )
    assert bool(wanted.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 3, 3)])
def test_empty_axes(shape: tuple[int, int, int]) -> None:
    """No keys give 0; no queries give nothing."""
    key = torch.ones(shape, device=DEVICE, requires_grad=True)
    query = torch.ones(shape[0], 4, 3, device=DEVICE, requires_grad=True)
    out = ats.attend(query, key, key, kernel="triton")
    assert out.shape == (shape[0], 4, 3)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), [query, key]):
        assert not grad.any()


def test_without_keys_a_sink_has_all_the_weight() -> None:
    query = torch.ones(2, 2, 4, 3, device=DEVICE)
    key = torch.ones(2, 2, 0, 3, device=DEVICE)
    sink = torch.tensor([0.5, -1.0], device=DEVICE, requires_grad=True)
    _, stats = ats.attend(query, key, key, sink=sink, kernel="triton", return_stats=("log_sum_exp",))
    torch.testing.assert_close(stats.log_sum_exp[0, :, 0], sink.detach())
    (grad,) = torch.autograd.grad(stats.log_sum_exp.sum(), sink)
    assert grad.tolist() == [8.0, 8.0]


def test_more_heads_than_a_grid_has_room_for_are_refused() -> None:
    x = torch.ones(2**13, 8, 1, 1, device=DEVICE)
    with pytest.raises(ats.KernelUnavailable, match="65536 heads of the batch"):
        ats.attend(x, x, x, kernel="triton")


def test_the_newer_switch_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the older one raises once it has been set."""
    settings = types.SimpleNamespace(fp32_precision="tf32")
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    assert launch.precision_of(torch.ones(1), 90) == "tf32"
    settings.fp32_precision = "ieee"
    assert launch.precision_of(torch.ones(1), 90) == "tf32x3"


NAN, INF = float("nan"), float("inf")
PLANTED = {
    "value": [("value", 3, NAN), ("value", 8, INF), ("value", 5, -INF)],
    "values-of-one-query": [("value", 3, INF), ("value", 4, -INF)],
    "key": [("key", 3, NAN), ("key", 12, INF)],
    "query": [("query", 2, NAN), ("query", 6, -INF)],
    "masked": [("key", 12, NAN), ("value", 12, NAN)],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's, of which the interpreter is made
@pairs(
    planted=tuple(PLANTED),
    mask={"lens": ats.ValidLens([11, 0]), "window": ats.SlidingWindow(3, 2, offset=2), "array": "array", "none": None},
    score=("scaled_dot", "gaussian"),
    bias=(False, True),
)
def test_nan_and_infinity_reach_what_attends_them_alone(planted: str, mask: Any, score: str, bias: bool) -> None:
    """As in the native kernel, forward and backward: infinite products and distances are scores."""
    arrays = relative_call()
    for name, position, x in PLANTED[planted]:
        arrays[name][..., position, 1] = x
    if mask == "array":
        mask = torch.tensor(np.random.default_rng(6).random((2, 1, 9, 13)) < 0.5)
    if bias:
        arrays["bias"] = torch.tensor(np.where(np.random.default_rng(7).random((4, 9, 13)) < 0.3, -INF, 0.5))
    else:
        del arrays["bias"]
    on_device = mask.to(DEVICE) if isinstance(mask, torch.Tensor) else mask
    found = gradients(arrays, "triton", torch.float32, mask=on_device, score=score)
    wanted = gradients(arrays, "native", torch.float64, mask=mask, score=score)
    for name, x, want in zip(("out", *arrays), found, wanted, strict=True):
        if mask is None and not bias and name != "out":
            continue  # without a masked pair NaN and infinity take any way
        # A weight of 0 times an infinite channel is NaN natively, 0 here.
        channels = [0, 2, 3, 4] if {planted, name} <= {"query", "key"} else slice(None)
        x_and_want = x[..., channels], want[..., channels]
        torch.testing.assert_close(
            *x_and_want, rtol=2e-5, atol=2e-6, equal_nan=True, msg=lambda text, name=name: name + text
        )


@pytest.mark.slow
def test_lengths_on_the_device_need_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals of the queries are computed there."""
    from attnscore.backends.torch import TorchBackend

    arrays, lens = relative_call(), torch.tensor([13, 4], device=DEVICE)
    del arrays["bias"]
    wanted = gradients(arrays, "streaming", torch.float64, mask=ats.ValidLens([13, 4]) & ats.Causal("bottom_right"))
    monkeypatch.setattr(TorchBackend, "host", lambda ops, x: None if isinstance(x, torch.Tensor) else np.asarray(x))
    mask = ats.ValidLens(lens) & ats.Causal("bottom_right")
    for x, want in zip(gradients(arrays, "triton", torch.float32, mask=mask), wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=2e-5, atol=2e-6)
