"""One query over few keys in JAX's programs, which runs in JAX's operations: when, and that results are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore.kernels.formula import FewKeys
from cases import needs_native
from harness import assert_each_close, directions_traced

RNG = np.random.default_rng(5)
SCORES: dict[str, Callable[[Any], Any]] = {
    "dot": lambda w: "dot",
    "scaled": lambda w: ats.ScaledDot(0.7),
    "bilinear": lambda w: ats.Bilinear(jnp.outer(w, w)),
    "additive": ats.Additive,
    "gelu": lambda w: ats.Additive(w, activation="gelu"),
    "gaussian": lambda w: ats.Gaussian(1.5),
    "bandwidth": lambda w: ats.Gaussian(2 + w[0] ** 2),
}
ROWS, HEADS, KEYS, DIM = 8, 16, 5, 6
LENS = np.asarray([3, 0, 5, 1, 2, 5, 4, 0], np.int32)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "lengths": {"valid_lens": LENS},
    "pairs": {"mask": RNG.random((ROWS, HEADS, 1, KEYS)) < 0.5},
    "padding": {"mask": ats.KeyPadding(np.arange(KEYS) < LENS[:, None])},
}
Arrays = dict[str, Any]


def draw() -> Arrays:
    shapes = {"query": (1, DIM), "key": (KEYS, DIM), "value": (KEYS, 3), "grad": (1, 3), "of_weights": (1, KEYS)}
    arrays = {name: RNG.standard_normal((ROWS, HEADS, *shape)) for name, shape in shapes.items()}
    return arrays | {"w": RNG.standard_normal(DIM)}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return directions_traced(monkeypatch, FewKeys)


def with_gradients(score: str, arrays: Arrays, kernel: str = "auto", **options: Any) -> tuple[Any, ...]:
    """Return output, weights and all gradients, of a compiled program."""

    def call(query: Any, key: Any, value: Any, w: Any) -> Any:
        score_of = SCORES[score](w)
        return ats.attend(query, key, value, score=score_of, kernel=kernel, return_weights=True, **options)

    @jax.jit
    def run(*given: Any) -> Any:
        *operands, grad, of_weights = given
        found, vjp = jax.vjp(call, *operands)
        return (*found, *vjp((grad, of_weights)))

    names = ("query", "key", "value", "w", "grad", "of_weights")
    return tuple(map(np.asarray, run(*(jnp.asarray(arrays[name]) for name in names))))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.slow_rows(
    "gelu-*", "scaled-*", "bilinear-[np]*", "bandwidth-[np]*", "*-padding", "*-none", "additive-lengths"
)
def test_it_is_exact(score: str, mask: str, ran: list[str]) -> None:
    arrays = draw()
    found = with_gradients(score, arrays, **MASKS[mask])
    assert ran == ["forward", "backward"]
    assert_each_close(found, with_gradients(score, arrays, "dense", **MASKS[mask]), 1e-11)


@pytest.mark.parametrize("score", ["dot", "additive", "bandwidth"])
@pytest.mark.slow_rows("dot", "bandwidth")
def test_two_queries_over_the_same_keys(score: str, ran: list[str]) -> None:
    """Of a tiny call, where the second query attends to the first key alone."""
    shapes = {"query": (2, DIM), "key": (2, DIM), "value": (2, 3), "grad": (2, 3), "of_weights": (2, 2)}
    arrays = {name: RNG.standard_normal((1, *shape)) for name, shape in shapes.items()}
    arrays |= {"w": RNG.standard_normal(DIM)}
    mask = np.asarray([[True, True], [True, False]])
    found = with_gradients(score, arrays, mask=mask)
    assert ran == ["forward", "backward"]
    assert_each_close(found, with_gradients(score, arrays, "dense", mask=mask), 1e-11)


@pytest.mark.parametrize("nonfinite", [np.nan, np.inf])
@pytest.mark.parametrize("score", ["dot", "additive", "gelu", "bandwidth"])
@pytest.mark.slow_rows("gelu-*", "*-inf")
def test_masked_entries_reach_nothing(score: str, nonfinite: float, ran: list[str]) -> None:
    """NaN and infinities in masked keys and values, in queries without keys and in the gradients of their outputs."""
    arrays = draw()
    clean = with_gradients(score, arrays, valid_lens=LENS)
    for row, length in enumerate(LENS):
        arrays["key"][row, :, length:] = arrays["value"][row, :, length:] = nonfinite
        if length == 0:
            arrays["query"][row] = arrays["grad"][row] = nonfinite
    dirty = with_gradients(score, arrays, valid_lens=LENS)
    assert ran == 2 * ["forward", "backward"]
    assert_each_close(dirty, clean, 1e-12)


@pytest.mark.parametrize("score", ["dot", "additive", "gaussian"])
def test_an_unmasked_nan_reaches_its_query_alone(score: str) -> None:
    """Its masked keys neither: their gradients, and their values' gradients, stay 0."""
    arrays = draw()
    clean = with_gradients(score, arrays, valid_lens=LENS)
    arrays["key"][0, 1, 1] = np.nan
    out, weights, *grads, _ = with_gradients(score, arrays, valid_lens=LENS)
    assert np.isnan(out[0, 1]).all() and np.isnan(weights[0, 1, :, :3]).all()
    for x in (weights.swapaxes(-1, -2), *grads[1:]):
        assert not x[0, 1, LENS[0] :].any()
    for got, exact in zip((out, weights, *grads), clean, strict=False):
        others = np.ones((ROWS, HEADS), bool)
        others[0, 1] = False
        np.testing.assert_allclose(got[others], exact[others], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_transforms_of_jax(ran: list[str]) -> None:
    """A gradient of a gradient, and examples mapped one by one, inside a program."""
    arrays = {name: jnp.asarray(x) for name, x in draw().items()}
    operands = tuple(arrays[name] for name in ("query", "key", "value"))

    def loss(kernel: str, query: Any, key: Any, value: Any) -> Any:
        return (ats.attend(query, key, value, valid_lens=jnp.asarray(LENS), kernel=kernel) ** 3).sum()

    def twice(kernel: str) -> Any:
        inner = jax.grad(lambda *a: loss(kernel, *a), (0, 1, 2))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sin(x).sum() for x in inner(*a)), (0, 1, 2)))(*operands)

    def mapped(kernel: str) -> Any:
        stacked = [jnp.stack([x, x[::-1]]) for x in operands]
        return jax.jit(jax.vmap(jax.grad(lambda *a: loss(kernel, *a), (0, 1, 2))))(*stacked)

    for transformed in (twice, mapped):
        assert_each_close(transformed("auto"), transformed("dense"), 1e-10)
    assert ran.count("forward") == 2


def test_half_precision_is_summed_in_single() -> None:
    arrays = draw()
    half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    found = with_gradients("dot", half, valid_lens=LENS)
    exact = with_gradients("dot", {name: np.asarray(x, np.float64) for name, x in half.items()}, valid_lens=LENS)
    assert found[0].dtype == found[2].dtype == jnp.bfloat16
    for got, wanted in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8, atol=2**-10)


@needs_native
@pytest.mark.parametrize(
    ("shape", "options", "kernel"),
    [
        ((128, 1, 10, 256), {}, "few_keys"),
        ((127, 1, 10, 256), {}, "native"),
        ((1, 1, 1, 16), {}, "few_keys"),
        ((2, 1, 10, 8), {}, "native"),
        ((128, 1, 3, 256), {"score": "gaussian"}, "few_keys"),
        ((128, 1, 3, 16), {"score": ats.Additive(jnp.ones(16, jnp.float32))}, "few_keys"),
        ((127, 1, 3, 16), {"score": ats.Additive(jnp.ones(16, jnp.float32))}, "native"),
        ((128, 1, 16, 64), {}, "few_keys"),
        ((128, 1, 17, 64), {}, "native"),
        ((128, 1, 16, 257), {}, "native"),
        ((128, 2, 10, 64), {}, "native"),
        ((1, 2, 1, 16), {}, "few_keys"),
        ((1, 2, 2, 16), {}, "native"),
        ((128, 1, 10, 64), {"valid_lens": [3] * 128}, "few_keys"),
        ((128, 1, 10, 64), {"return_stats": True}, "native"),
        ((128, 1, 10, 64), {"bias": 0.5}, "native"),
        ((128, 1, 10, 64), {"dropout": 0.5, "seed": 1}, "native"),
        ((128, 1, 10, 64), {"score": ats.SoftCap("dot", 3.0)}, "native"),
    ],
)
def test_which_calls_have_few_keys(shape: Any, options: dict[str, Any], kernel: str) -> None:
    """Outside of programs the native kernel runs all of them."""
    batch, queries, keys, dim = shape
    found = []

    def explain(query: Any, key: Any) -> Any:
        found.append(ats.explain(query, key, key, **options))
        return query

    query, key = jnp.zeros((batch, queries, dim), jnp.float32), jnp.zeros((batch, keys, dim), jnp.float32)
    jax.jit(explain)(query, key)
    explain(query, key)
    assert [plan.kernel for plan in found] == [kernel, "native"]
    if kernel == "few_keys":
        assert found[0].reasons["native"] == ("few_keys comes first in the order of preference",)


def test_the_program_has_neither_branches_nor_loops() -> None:
    """With lengths of the program's own, forward and backward."""
    query, key = jnp.zeros((128, 1, 32)), jnp.zeros((128, 10, 32))

    def loss(query: Any, key: Any, lens: Any) -> Any:
        return ats.attend(query, key, key, valid_lens=lens).sum()

    lens = jnp.full(128, 3)
    text = jax.jit(jax.grad(loss, (0, 1))).lower(query, key, lens).compile().as_text()
    assert "exponential" in text
    assert not any(f" {word}(" in text for word in ("conditional", "while", "custom-call", "sort", "gather"))
