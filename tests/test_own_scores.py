"""Scores of a user's own: gradients reach all arrays that they hold, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.scores import Score
from harness import pullback_of
from own_scores import OwnSquare


def _products(ops: Any, query: Any, key: Any) -> Any:
    return ops.matmul(query, ops.matrix_transpose(key))


@dataclass(frozen=True, eq=False)
class Around:
    """Twice another score, and a number for each of two more."""

    inner: Any
    rates: tuple[Any, ...]

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return 2 * self.inner.tile(ops, query, key) + self.rates[0] * self.rates[1] * ops.tanh(
            _products(ops, query, key)
        )


@dataclass(frozen=True, eq=False)
class Bounded:
    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.tanh(_products(ops, query, key))


class NoDataclass:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.factor * _products(ops, query, key)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return self.factor * _products(ops, query, key)


FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")


@pytest.mark.parametrize("wrap", [lambda x: x, ats.SoftCap, ats.Temperature], ids=["alone", "capped", "divided"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow_rows("jax-capped", "jax-divided", "tensorflow-alone", "tensorflow-divided", "jax-alone")
def test_gradients_reach_wrapped_scores_and_tuples(framework: str, wrap: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, n, 3)) for n in (5, 7, 7)] + [np.array(x) for x in (1.5, 0.5, -2.0)]

    def score(scale: Any, *rates: Any) -> Any:
        return _wrapped(wrap, Around(ats.ScaledDot(scale), rates))

    out, pull = pullback_of(framework, inputs, score)
    # Through the reference kernel PyTorch differentiates by itself.
    exact, pull_exact = pullback_of("torch", inputs, score, kernel="dense")
    found = pull(2 * out)
    for x, wanted in zip(found, pull_exact(2 * exact), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-12)
    assert all(np.abs(x).max() > 1e-3 for x in found)


def _wrapped(wrap: Callable[..., Any], score: Any) -> Any:
    return wrap(score, 3.0) if wrap in (ats.SoftCap, ats.Temperature) else score


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow_rows("jax")
def test_a_batch_that_only_the_values_have(framework: str) -> None:
    """The scores have 1 along it, and so has what `tile` returns."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape) for shape in ((1, 9, 2), (1, 9, 2), (3, 9, 2))]

    out, pull = pullback_of(framework, inputs, score=Bounded)
    query, key, value = leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    exact = (query @ key.mT).tanh().softmax(-1) @ value
    for x, wanted in zip(pull(2 * out), torch.autograd.grad(exact.square().sum(), leaves), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True, eq=False)
class ByModule:
    net: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(self.net(query), ops.swapaxes(key, -1, -2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: NoDataclass(torch.tensor(2.0, requires_grad=True)),
        Module,
        lambda: ByModule(torch.nn.Linear(2, 2)),
        lambda: ByModule(torch.ones((), requires_grad=True).mul),
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: ats.SoftCap(x, 3.0), lambda x: ats.Combination((ats.Dot(), x), (1.0, 2.0))]
)
def test_an_array_that_no_gradient_reaches_is_an_error(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    x = torch.ones(3, 2)
    with pytest.raises(ats.ArgumentError, match="score: expected a dataclass whose fields are its arrays"):
        ats.attend(x, x, x, score=wrap(make()))
    with torch.no_grad():
        ats.attend(x, x, x, score=wrap(NoDataclass(torch.tensor(2.0))))


def test_a_transform_of_torch_reaches_what_a_tile_reads() -> None:
    x, matrix = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)

    def loss(matrix: Any) -> Any:
        return ats.attend(x, x, x, score=ByModule(lambda query: query @ matrix)).square().sum()

    expected = torch.func.grad(lambda matrix: ((x @ matrix @ x.mT).softmax(-1) @ x).square().sum())(matrix)
    np.testing.assert_allclose(torch.func.grad(loss)(matrix), expected, rtol=1e-9, atol=1e-12)


def test_a_score_of_constants_is_not_rebuilt() -> None:
    class Pair(NamedTuple):
        weight: Any
        bias: Any

    @dataclass(frozen=True, eq=False)
    class Affine:
        pair: Pair

        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return ops.matmul(query @ self.pair.weight + self.pair.bias, ops.swapaxes(key, -1, -2))

    x, pair = torch.randn(5, 3), Pair(torch.randn(3, 3), torch.randn(3))
    expected = ((x @ pair.weight + pair.bias) @ x.mT).softmax(-1) @ x
    np.testing.assert_allclose(ats.attend(x, x, x, score=Affine(pair)), expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_tile_gradient_leaves_out_is_an_error() -> None:
    class Forgets(Around):
        def tile_gradient(self, ops: Any, query: Any, key: Any, grad: Any) -> Any:
            return query, key, {"rates.0": self.rates[0]}

    x = np.ones((3, 2))
    _, pullback = ats.attend_vjp(x, x, x, score=Forgets(ats.ScaledDot(np.array(1.0)), (np.array(1.0), np.array(2.0))))
    with pytest.raises(ats.ArgumentError, match=r"tile_gradient: .*'rates.0'.*got none of \['scale', 'rates.1'\]"):
        pullback(x)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: 2 * ats.SoftCap(x, 3.0) + ats.Dot()], ids=["alone", "in-a-sum"]
)
def test_a_number_in_a_field_has_no_gradient(wrap: Callable[..., Any]) -> None:
    """Though `tile_gradient` returns one, as where the field is an array."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, n, 3)) for n in (5, 7, 7)]
    found = ats.attend_vjp(*arrays, score=wrap(OwnSquare(0.5)))[1](arrays[0])
    wanted = ats.attend_vjp(*arrays, score=wrap(OwnSquare(np.array(0.5))))[1](arrays[0])
    assert not found.score
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    ats.attend(*leaves, score=wrap(OwnSquare(0.5))).backward(leaves[0].detach())
    for x, y, z in zip(found[:3], wanted[:3], leaves, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, z.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_two_arrays_of_one_name_are_an_error() -> None:
    @dataclass(frozen=True, eq=False)
    class Scaled:
        scale: Any
        inner: Any

        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return self.scale * self.inner.tile(ops, query, key)

    x, number = torch.ones(3, 2), torch.tensor(2.0)
    with pytest.raises(ats.ArgumentError, match=r"different names in Scaled and .*, got 2 arrays named \['scale'\]"):
        ats.attend(x, x, x, score=Scaled(number, ats.ScaledDot(number)))
    ats.attend(x, x, x, score=Scaled(2.0, ats.ScaledDot(number)))


def test_the_repr_of_a_score_without_fields() -> None:
    plain = type("Plain", (Score,), dict.fromkeys(("tile", "lower", "check")))
    assert "Plain object" in repr(plain())
