"""Dropout on the weights: replayed by its seed, the same in all tiles and frameworks, right on average."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnscore as ats
from cases import FRAMEWORKS, SOME_MASKS, SOME_SCORES
from harness import Call, array, make_call, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


def kept(
    shape: tuple[int, ...], dropout: float, seed: int | None, framework: str = "numpy", **options: Any
) -> np.ndarray:
    """What each weight of (batch, head, query, key) was multiplied with: uniform weights on one-hot values show it."""
    b, h, n, m = shape
    query, key = np.zeros((b, h, n, 2)), np.zeros((b, h, m, 2))
    arrays = [query, key, np.broadcast_to(np.eye(m), (b, h, m, m)).copy()]
    arrays = [tensor(x) for x in arrays] if framework == "torch" else arrays
    return array(ats.attend(*arrays, dropout=dropout, seed=seed, **options)) * m


@frameworks
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_kept_fraction_and_scale(p: float, framework: str) -> None:
    keep = kept((4, 4, 50, 60), p, 3, framework)
    values = np.unique(keep.round(9))
    np.testing.assert_allclose(values, [1.0] if p == 0 else [0.0, 1 / (1 - p)], rtol=1e-9)
    alive = keep > 0
    deviation = np.sqrt(p * (1 - p) / keep.size)
    assert abs(alive.mean() - (1 - p)) <= 5 * deviation
    # No row, column, head or batch is favoured.
    for axis in range(4):
        others = tuple(i for i in range(4) if i != axis)
        count = keep.size / keep.shape[axis]
        assert np.abs(alive.mean(others) - (1 - p)).max() <= 5 * np.sqrt(p * (1 - p) / count)


def test_neighbours_are_independent() -> None:
    """Correlation between pairs beside each other along every axis, and between consecutive seeds."""
    first, second = (kept((4, 4, 50, 60), 0.5, seed) > 0 for seed in (7, 8))
    limit = 5 / np.sqrt(first.size)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < limit
    for axis in range(4):
        here, there = np.delete(first, -1, axis).ravel(), np.delete(first, 0, axis).ravel()
        assert abs(np.corrcoef(here, there)[0, 1]) < limit * 1.2


@frameworks
def test_the_seed_replays(framework: str) -> None:
    shape = (2, 2, 9, 11)
    np.testing.assert_array_equal(kept(shape, 0.5, 3, framework), kept(shape, 0.5, 3, "numpy"))
    assert (kept(shape, 0.5, 3, framework) != kept(shape, 0.5, 4, framework)).any()
    for seed in (0, 2**31, 2**40 + 3, 2**62, -1):
        np.testing.assert_array_equal(kept(shape, 0.5, seed, framework), kept(shape, 0.5, seed, "numpy"))
    assert (kept(shape, 0.5, 2**40, framework) != kept(shape, 0.5, 2**41, framework)).any()


def test_without_a_seed_the_generator_of_torch_decides() -> None:
    torch.manual_seed(1)
    first = kept((1, 1, 9, 11), 0.5, None, "torch")
    second = kept((1, 1, 9, 11), 0.5, None, "torch")
    torch.manual_seed(1)
    np.testing.assert_array_equal(kept((1, 1, 9, 11), 0.5, None, "torch"), first)
    assert (first != second).any()


def test_without_a_seed_the_default_device_of_torch_changes_nothing() -> None:
    x = torch.randn(2, 3, 9, 4)
    torch.manual_seed(1)
    wanted = ats.attend(x, x, x, dropout=0.5)
    torch.manual_seed(1)
    with torch.device("meta"):
        assert torch.equal(ats.attend(x, x, x, dropout=0.5), wanted)
        assert ats.attend(*[torch.empty(2, 3, 9, 4)] * 3, dropout=0.5).shape == x.shape


def test_without_a_seed_numpy_is_fresh_each_time() -> None:
    assert (kept((1, 1, 9, 11), 0.5, None) != kept((1, 1, 9, 11), 0.5, None)).any()


@frameworks
@pytest.mark.parametrize("smallest", [1, 3, 4, 100])
def test_independent_of_the_tiles(smallest: int, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept((2, 2, 9, 11), 0.5, 3)
    monkeypatch.setattr("attnscore.base.thresholds.TILE_SCORES", 1)
    monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", smallest)
    found = kept((2, 2, 9, 11), 0.5, 3, framework, kernel="streaming")
    np.testing.assert_array_equal(found > 0, whole > 0)


@frameworks
@pytest.mark.parametrize("kernel", ["auto", "streaming", "dense"])
@pytest.mark.parametrize("seed", [5, 2**40 + 5])
def test_the_same_in_every_kernel(seed: int, kernel: str, framework: str) -> None:
    call = make_call("scaled_dot", "nested", "float64")
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    found = ats.attend(*arrays, **call.arguments, dropout=0.4, seed=seed, kernel=kernel)
    wanted = ats.attend(call.query, call.key, call.value, **call.arguments, dropout=0.4, seed=seed)
    np.testing.assert_allclose(array(found), wanted, atol=1e-12)


def dropped(call: Call, p: float, seed: int) -> Call:
    """The same call for the oracle, with the dropout mask that the library draws."""
    return dataclasses.replace(call, keep=kept(call.visible.shape, p, seed).round(9))


@frameworks
@pytest.mark.parametrize("mask", [mask.name for mask in SOME_MASKS])
@pytest.mark.parametrize("score", [score.name for score in SOME_SCORES])
def test_forward_and_gradient_replay_the_mask(score: str, mask: str, framework: str, small_tiles: None) -> None:
    """With the mask made visible, output and every gradient are the oracle's; statistics are those before dropout."""
    p, seed = 0.4, 11
    plain = make_call(score, mask, "float64", "bias-sink")
    call = dropped(plain, p, seed)
    call.keep[call.keep > 0] = 1 / (1 - p)
    call.check(call.run(framework, dropout=p, seed=seed))
    np.testing.assert_array_equal(call.reference["entropy"], plain.reference["entropy"])


@frameworks
def test_expectation(framework: str) -> None:
    """The mean over many seeds is the output without dropout."""
    call = make_call("scaled_dot", "valid_lens", "float64")
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    draws = np.stack([array(ats.attend(*arrays, **call.arguments, dropout=0.3, seed=seed)) for seed in range(400)])
    error = np.abs(draws.mean(0) - call.reference["out"])
    assert (error <= 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-9).all()


def test_double_backward_replays_too(small_tiles: None) -> None:
    x = torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    torch.autograd.gradgradcheck(lambda x: ats.attend(x, x, x, dropout=0.4, seed=2), (x,), fast_mode=True)


def _error_of_replay(function: Callable[..., Tensor]) -> float:
    """Return the largest error of the gradients of `function`, a call with dropout of 0.5.

    With one-hot values the output is the weights after dropout, which show the mask of the forward.
    """
    query, key = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 5))
    value = torch.eye(5, dtype=torch.float64).repeat(2, 1, 1).requires_grad_()
    leaves = query, key, value
    out = function(*leaves)
    grad = torch.randn_like(out)
    weights = (query @ key.mT / 2).softmax(-1) * (out.detach() != 0) * 2
    torch.testing.assert_close(out, weights)
    got = torch.autograd.grad(out, leaves, grad)
    wanted = (*torch.autograd.grad(weights, leaves[:2], grad), out.detach().mT @ grad)
    return max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kernel", ["native", "streaming"])
def test_a_checkpoint_has_the_gradients_of_its_forward(kernel: str) -> None:
    call = functools.partial(ats.attend, dropout=0.5, kernel=kernel)
    assert _error_of_replay(lambda *arrays: checkpoint(call, *arrays, use_reentrant=False)) < 1e-12


@pytest.mark.parametrize("kernel", ["native", "streaming", "dense"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_draws_another_seed_has_gradients_of_one_mask(reentrant: bool, kernel: str) -> None:
    """The mask of the forward computed again, which a product after the call shows: its gradient has the output."""
    query, key = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (1, 20))
    value = torch.eye(20, dtype=torch.float64, requires_grad=True)
    product = torch.ones(20, 1, dtype=torch.float64, requires_grad=True)

    def function(query: Tensor, key: Tensor, value: Tensor, product: Tensor) -> Tensor:
        return cast(Tensor, ats.attend(query, key, value, dropout=0.5, kernel=kernel)) @ product

    leaves = query, key, value, product
    checkpoint(function, *leaves, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    weights = (query @ key.mT / 2).softmax(-1) * (product.grad.mT != 0) * 2
    torch.testing.assert_close(product.grad, weights.detach().mT)
    wanted = torch.autograd.grad(weights.sum(), (query, key))
    torch.testing.assert_close((query.grad, key.grad), wanted)
    torch.testing.assert_close(value.grad, weights.detach().mT.expand(20, 20))


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("budget", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preserve", [None, *(pytest.param(x, marks=pytest.mark.slow) for x in (True, False))])
def test_a_compiled_backward_that_computes_again_replays_the_mask(
    preserve: bool | None, budget: float, backend: str
) -> None:
    """With and without a checkpoint; two calls of a graph drop other weights."""

    def twice(*arrays: Tensor) -> tuple[Tensor, Tensor]:
        return ats.attend(*arrays, dropout=0.5), ats.attend(*arrays, dropout=0.5)

    def again(*arrays: Tensor) -> Any:
        if preserve is None:
            return twice(*arrays)
        return checkpoint(twice, *arrays, use_reentrant=False, preserve_rng_state=preserve)

    def first(*arrays: Tensor) -> Tensor:
        outputs = compiled(*arrays)
        assert not torch.equal(*outputs)
        return cast(Tensor, outputs[0])

    torch.compiler.reset()
    with functorch_config.patch(activation_memory_budget=budget):
        compiled = torch.compile(again, fullgraph=True, backend=backend)
        assert _error_of_replay(first) < 1e-12
    torch.compiler.reset()


def test_a_compiled_call_of_arrays_without_gradients() -> None:
    torch.compiler.reset()
    x = torch.ones(1, 2, 5, 3)
    out = torch.compile(
        lambda x: ats.attend(x, x, x, dropout=0.5), fullgraph=True, backend="aot_eager_decomp_partition"
    )(x)
    assert out.shape == x.shape and len(out.unique()) > 1
    torch.compiler.reset()
