"""Projections in JAX's programs: rows that are not finite are left out of gradients, at no cost to a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnscore as ats
from attnscore.backends.jax.gradients import product_of_rows
from attnscore.layers.flax import AdditiveAttention, MultiHeadAttention
from harness import assert_each_close

RNG = np.random.default_rng(11)
LENS = np.asarray([3, 0, 5, 1], np.int32)
SCORES: dict[str, Callable[..., Any]] = {
    "bilinear": lambda w: ats.Bilinear(w["W"]),
    "additive": lambda w: ats.Additive(w["w_v"], w["W_q"], w["W_k"], w["bias"]),
}
PARAMETERS = {"bilinear": ("W",), "additive": ("w_v", "W_q", "W_k", "bias")}
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def rng(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same numbers whatever ran before."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(11))


def draw(score: str, queries: int = 2) -> Arrays:
    shapes = {"query": (4, queries, 6), "key": (4, 5, 7), "value": (4, 5, 3)}
    sizes = {"W": (6, 7), "w_v": (8,), "W_q": (8, 6), "W_k": (8, 7), "bias": (8,)}
    shapes |= {name: sizes[name] for name in PARAMETERS[score]}
    return {name: jnp.asarray(RNG.standard_normal(shape)) for name, shape in shapes.items()}


def loss(score: str, arrays: Arrays, kernel: str = "auto") -> Any:
    operands = (arrays[name] for name in ("query", "key", "value"))
    return (ats.attend(*operands, score=SCORES[score](arrays), valid_lens=LENS, kernel=kernel) ** 3).sum()


def with_nonfinite(arrays: Arrays) -> Arrays:
    """NaN and infinities in masked keys, and in the queries that attend to no key."""
    key, query = arrays["key"].at[0, 3:, 1].set(jnp.inf), arrays["query"]
    return arrays | {"key": key.at[3, 1:].set(jnp.nan), "query": query.at[1].set(-jnp.inf)}


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str) -> None:
    """They equal the gradients of an eager call without such rows."""
    with jax.enable_x64(True):
        arrays = draw(score)
        exact = jax.grad(lambda a: loss(score, a))(arrays)
        found = jax.jit(jax.grad(lambda a: loss(score, a)))(with_nonfinite(arrays))
        assert_each_close([*found.values()], [*exact.values()], 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_mapped_examples(score: str) -> None:
    """The weights belong to all examples."""
    with jax.enable_x64(True):
        arrays = draw(score, queries=9)
        exact = jax.grad(lambda a: loss(score, a, "dense"))(arrays)
        axes = {name: 0 if x.ndim == 3 else None for name, x in arrays.items()}
        several = {name: x if axes[name] is None else jnp.stack([x, x]) for name, x in with_nonfinite(arrays).items()}
        mapped = jax.jit(jax.vmap(jax.grad(lambda a: loss(score, a)), (axes,)))(several)
        assert_each_close([x[1] for x in mapped.values()], [*exact.values()], 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_gradients(score: str) -> None:
    with jax.enable_x64(True):
        arrays = draw(score)

        def of_gradient(a: Arrays, kernel: str) -> Any:
            return sum(jnp.sin(x).sum() for x in jax.grad(lambda a: loss(score, a, kernel))(a).values())

        exact = jax.grad(lambda a: of_gradient(a, "dense"))(arrays)
        found = jax.jit(jax.grad(lambda a: of_gradient(a, "auto")))(with_nonfinite(arrays))
        assert_each_close([*found.values()], [*exact.values()], 1e-9)


@pytest.mark.parametrize("given", ["x", "matrix", "bias", "all"])
@pytest.mark.slow_rows("bias", "x")
def test_a_product_and_its_derivatives(given: str) -> None:
    """By each operand alone, forwards too; the row that is not finite has none."""
    with jax.enable_x64(True):
        x, matrix, bias = (jnp.asarray(RNG.standard_normal(shape)) for shape in ((3, 4, 5), (5, 6), (6,)))
        places = {"x": (0,), "matrix": (1,), "bias": (2,), "all": (0, 1, 2)}[given]
        dirty = x.at[1, 2, 3].set(jnp.nan).at[2, 0, 0].set(jnp.inf)
        kept = jnp.isfinite(dirty).all(-1, keepdims=True)

        def products(of: Any, x: Any) -> Any:
            def call(*own: Any) -> Any:
                operands = [x, matrix, bias]
                for place, array in zip(places, own, strict=True):
                    operands[place] = array
                return of(*operands)

            return call

        def plain(x: Any, matrix: Any, bias: Any) -> Any:
            return jnp.where(kept, x @ matrix + bias, 0.0)

        own, clean = ([(array, matrix, bias)[place] for place in places] for array in (dirty, x))
        own_product = products(product_of_rows, dirty)
        tangents = [jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in own]
        value, tangent = jax.jit(lambda *a: jax.jvp(products(product_of_rows, dirty), a, tuple(tangents)))(*own)
        np.testing.assert_array_equal(jnp.isfinite(value).all(-1, keepdims=True), kept)
        exact, exact_tangent = jax.jvp(products(plain, x), tuple(clean), tuple(tangents))
        assert_each_close((jnp.where(kept, value, 0.0), tangent), (exact, exact_tangent), 1e-12)
        cotangent = jnp.sin(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
        pulled = jax.jit(lambda *a: jax.vjp(own_product, *a)[1](cotangent))(*own)
        assert_each_close(pulled, jax.vjp(products(plain, x), *clean)[1](cotangent), 1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["matrix", "bias"])
@pytest.mark.slow_rows("matrix", "bias")
def test_gradients_of_eager_layers(bias: bool) -> None:
    """They equal a compiled call's without rows that are not finite, also for parameters in another dtype."""
    layer = MultiHeadAttention(
        6, 2, bias=bias, query_size=6, key_size=7, value_size=3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)

    def loss(state: Any, query: Any, key: Any, value: Any) -> Any:
        return (nnx.merge(graph, state)(query, key, value, jnp.asarray(LENS)) ** 2).sum()

    arrays = draw("bilinear")
    own, dirty = (
        [x[name].astype(jnp.float32) for name in ("query", "key", "value")] for x in (arrays, with_nonfinite(arrays))
    )
    exact = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(state, *own)
    found = jax.grad(loss, (0, 1, 2, 3))(state, *dirty)
    # Of the largest of each: parameters are in bfloat16, and so are their gradients.
    for x, y in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        scale = jnp.abs(y).max()
        assert_each_close([(x / scale).astype(jnp.float32)], [(y / scale).astype(jnp.float32)], 1e-2)


@pytest.mark.slow
def test_a_forward_program_looks_for_no_nan() -> None:
    query, key, weight = jnp.zeros((64, 4, 32)), jnp.zeros((64, 10, 32)), jnp.zeros((32, 32))

    def call(query: Any, key: Any, weight: Any) -> Any:
        return ats.attend(query, key, key, score=ats.Bilinear(weight))

    layer = AdditiveAttention(16, query_size=32, key_size=32, rngs=nnx.Rngs(0))
    for program in (jax.jit(call).lower(query, key, weight), jax.jit(layer).lower(query, key, key)):
        assert "is_finite" not in program.as_text() and "custom_call" in program.as_text()


def test_a_projection_of_the_caller_is_called() -> None:
    """With options of its own, or of a class of its own."""

    class Doubled(nnx.Linear):
        def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
            return 2 * super().__call__(inputs, out_sharding)

    def doubled_product(*arguments: Any, **options: Any) -> Any:
        return 2 * jax.lax.dot_general(*arguments, **options)

    x = jnp.asarray(RNG.standard_normal((2, 3, 6)), jnp.float32)
    layer = AdditiveAttention(8, query_size=6, key_size=6, rngs=nnx.Rngs(0))
    weight = layer.W_q.kernel[...]
    layer.W_q.kernel[...] = 2 * weight
    exact = jax.jit(layer)(x, x, x)
    for module in (
        Doubled(6, 8, use_bias=False, rngs=nnx.Rngs(0)),
        nnx.Linear(6, 8, use_bias=False, dot_general=doubled_product, rngs=nnx.Rngs(0)),
    ):
        module.kernel[...] = weight
        layer.W_q = module
        np.testing.assert_allclose(jax.jit(layer)(x, x, x), exact, rtol=0, atol=1e-6)
