"""Planned calls that JAX differentiates in reverse mode, outside of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore.base.cache import BoundedCache
from attnscore.kernels.native.plan import NativeOp, NativePlan
from attnscore.plans import plan
from harness import assert_each_close

RNG = np.random.default_rng(5)
LENS = np.asarray([3, 0, 5, 1], np.int32)
QUERY, KEY, VALUE, W = (RNG.standard_normal(shape) for shape in ((4, 2, 6), (4, 5, 6), (4, 5, 6), (6, 6)))
SCORES: dict[str, Callable[[Any], Any]] = {
    "dot": lambda _: "scaled_dot",
    "bilinear": ats.Bilinear,
    "additive": lambda w: ats.Additive(w[0]),
    "gaussian": lambda w: ats.Gaussian(1 + w[0, 0] ** 2),
}


def outputs(score: str, *arrays: Any, kernel: str = "auto") -> Any:
    *operands, w = arrays
    return ats.attend(*operands, score=SCORES[score](w), valid_lens=LENS, return_weights=True, kernel=kernel)


def loss(score: str, *arrays: Any, kernel: str = "auto") -> Any:
    out, weights = outputs(score, *arrays, kernel=kernel)
    return (out**3).sum() + jnp.sin(weights).sum()


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.slow_rows("bilinear", "dot", "gaussian", "additive")
def test_gradients(score: str) -> None:
    """Of all operands, then of some, the second time by the plan of the first."""
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE, W)]
    exact = jax.grad(lambda *a: loss(score, *a, kernel="dense"), (0, 1, 2, 3))(*arrays)
    for places in ((0, 1, 2, 3), (0, 1, 2, 3), (1,), (0, 1, 2)):
        found = jax.grad(lambda *a: loss(score, *a), places)(*arrays)
        assert_each_close(found, [exact[place] for place in places], 1e-11)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.slow_rows("additive", "gaussian", "bilinear")
def test_gradients_of_other_arrays_around_a_gradient(score: str) -> None:
    """JAX nests them: the arrays of a call are then differentiated at several levels."""
    query, key, value, w = (jnp.asarray(x) for x in (QUERY, KEY, VALUE, W))

    def found(kernel: str) -> Any:
        def of_key(query: Any, value: Any, w: Any) -> Any:
            return jnp.sin(jax.grad(lambda key: loss(score, query, key, value, w, kernel=kernel))(key)).sum()

        return jax.grad(of_key, (0, 1, 2))(query, value, w)

    exact = found("dense")
    for _ in range(2):
        assert_each_close(found("auto"), exact, 1e-10)


@pytest.mark.slow
def test_projected_queries_that_need_no_gradient_are_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, w = (jnp.asarray(x) for x in (QUERY, KEY, VALUE, W))
    bias = jnp.zeros((2, 5))

    def of_some(key: Any, bias: Any, kernel: str = "auto") -> Any:
        return (ats.attend(query, key, value, score=ats.Bilinear(w), bias=bias, kernel=kernel) ** 3).sum()

    exact = jax.grad(of_some, (0, 1))(key, bias, "dense")
    monkeypatch.delattr(NativeOp, "_recompute_gradients")  # the backward without the plan
    for _ in range(2):
        assert_each_close(jax.grad(of_some, (0, 1))(key, bias), exact, 1e-11)
        assert_each_close([jax.grad(of_some, 1)(key, bias)], exact[1:], 1e-11)


def test_one_plan_serves_calls_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: BoundedCache[Any] = BoundedCache()
    monkeypatch.setattr(plan, "PLANS", plans)
    key = jnp.asarray(KEY)
    jax.grad(lambda x: ats.attend(x, x, x).sum())(key)
    ats.attend(key, key, key)
    first, *others = plans.values()
    assert isinstance(first, NativePlan) and set(first._forwards) == {True, False}
    assert all(other is first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["second", "jacobian", "forward", "compiled", "cotangent", "mapped", "integers"])
def test_other_transforms_around_a_gradient(kind: str) -> None:
    own, key = jnp.asarray(QUERY), jnp.asarray(KEY)

    def found(kernel: str) -> Any:
        def pooled(query: Any) -> Any:
            return ats.attend(query, query, query, valid_lens=np.asarray([2, 1, 0, 2]), kernel=kernel)

        def of_gradient(query: Any) -> Any:
            return jax.grad(lambda query: (pooled(query) ** 3).sum())(query)

        out, vjp = jax.vjp(pooled, own)
        match kind:
            case "second":
                return jax.grad(lambda query: (of_gradient(query) ** 2).sum())(own)
            case "jacobian":
                return jax.jacrev(pooled)(own)
            case "forward":
                return jax.jvp(of_gradient, (own,), (own,))[1]
            case "compiled":
                return jax.jit(vjp)(out)[0]
            case "cotangent":
                return jax.grad(lambda grad: (vjp(grad)[0] ** 2).sum())(out)
            case "mapped":
                return jax.vmap(vjp)(jnp.stack([out, 2 * out]))[0]
        # Lengths get a gradient of no dtype.
        lens = jnp.asarray(LENS)
        call = jax.grad(
            lambda x, lens: (ats.attend(x, x, x, valid_lens=lens, kernel=kernel) ** 3).sum(), (0, 1), allow_int=True
        )
        return call(key, lens)[0]

    assert_each_close([found("auto")], [found("dense")], 1e-9)
