"""StableHLO from JAX: programs of known and of symbolic lengths, loaded again, at lengths not seen when exporting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats

HEADS, DIM, VALUE_DIM = 4, 8, 6
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Shorter than a tile, longer than several, and a single key.
LENGTHS = ((2, 5, 7), (1, 200, 333), (3, 1, 1))
FLOAT = jnp.float32

CASES: dict[str, tuple[Any, Callable[[Any, Any, Any], dict[str, Any]]]] = {
    "dot": (lambda w: "dot", lambda lens, pairs, key: {}),
    "scaled dot, causal": (lambda w: "scaled_dot", lambda lens, pairs, key: {"mask": ats.Causal("bottom_right")}),
    "additive, valid lengths": (
        lambda w: ats.Additive(w[0, 0], W_q=w[0], W_k=w[0]), lambda lens, pairs, key: {"valid_lens": lens}),
    "bilinear, window": (
        lambda w: ats.Bilinear(w[0]), lambda lens, pairs, key: {"mask": ats.SlidingWindow(2, 3, align="top_left")}),
    "Gaussian, array": (
        lambda w: ats.Gaussian(bandwidth=w[0, 0, 0] ** 2 + 1), lambda lens, pairs, key: {"mask": ats.Dense(pairs > 0)}),
    "cosine, bias and sink": (lambda w: ats.Cosine(), lambda lens, pairs, key: {"bias": pairs, "sink": 0.5}),
    "sum, dropout": (lambda w: "sum", lambda lens, pairs, key: {"dropout": 0.3, "seed": key}),
}  # fmt: skip


def given(batch: Any, query: Any, key: Any) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Shapes and dtypes of all arrays of a program."""
    return {
        "query": ((batch, HEADS, query, DIM), FLOAT),
        "key": ((batch, 2, key, DIM), FLOAT),
        "value": ((batch, 2, key, VALUE_DIM), FLOAT),
        "weights": ((1, DIM, DIM), FLOAT),
        "lens": ((batch,), jnp.int32),
        "pairs": ((query, key), FLOAT),
        "seed": ((2,), jnp.uint32),
    }


def arrays(batch: int, query: int, key: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(shape) if dtype == FLOAT else rng.integers(0, key + 1, shape), dtype)
        for name, (shape, dtype) in given(batch, query, key).items()
    }


def program(name: str, kernel: str) -> Callable[[dict[str, Any]], Any]:
    score, options = CASES[name]

    def call(x: dict[str, Any]) -> Any:
        found = options(x["lens"], x["pairs"], x["seed"])
        out, stats = ats.attend(
            x["query"], x["key"], x["value"], score=score(x["weights"]), kernel=kernel,
            return_stats=("log_sum_exp", "entropy"), **found,
        )  # fmt: skip
        return out, stats.log_sum_exp, stats.entropy

    return call


def symbolic(sizes: str = "batch, query, key") -> dict[str, Any]:
    found = given(*jax.export.symbolic_shape(sizes))
    return {name: jax.ShapeDtypeStruct(*x) for name, x in found.items()}


def loaded(exported: Any) -> Any:
    return jax.export.deserialize(exported.serialize(vjp_order=1)).call


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_symbolic_lengths(name: str) -> None:
    """Output, statistics and gradients, by a program for all platforms that holds operations of JAX alone."""
    exported = jax.export.export(jax.jit(program(name, "auto")), platforms=PLATFORMS)(symbolic())
    assert "@attnscore_" not in exported.mlir_module()
    call = loaded(exported)
    for lengths in LENGTHS:
        found = [
            jax.vjp(
                lambda x, q, k, v, f=f: f(x | {"query": q, "key": k, "value": v}),
                x,
                *map(x.get, ("query", "key", "value")),
            )  # type: ignore[misc]
            for x in (arrays(*lengths),)
            for f in (call, program(name, "auto"))
        ]
        (ours, vjp), (wanted, wanted_vjp) = found
        close(ours, wanted)
        grads = jax.tree.map(jnp.ones_like, ours)
        close(vjp(grads)[1:], wanted_vjp(grads)[1:])


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_a_bias_by_relative_position() -> None:
    """Of a table with a gradient; its length is symbolic too."""

    def call(x: dict[str, Any]) -> Any:
        queries, keys = x["pairs"].shape
        buckets = ats.relative_buckets(ats.relative_positions(queries, keys, offset=keys - queries), buckets=8)
        bias = x["weights"][0, :, :HEADS][buckets].T[:, None]
        return ats.attend(x["query"], x["key"], x["value"], bias=bias, mask=ats.Causal("bottom_right"))

    exported = loaded(jax.export.export(jax.jit(call), platforms=PLATFORMS)(symbolic()))
    for lengths in LENGTHS:
        x = arrays(*lengths)
        ours, wanted = (
            jax.value_and_grad(lambda w, q, f=f, x=x: f(x | {"weights": w, "query": q}).sum(), (0, 1))(
                x["weights"], x["query"]
            )
            for f in (exported, call)
        )
        close(ours, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["sigmoid", "sparsemax", ats.Entmax(1.2)])
def test_normalizers(normalizer: Any) -> None:
    def call(x: dict[str, Any]) -> Any:
        return ats.attend(x["query"], x["key"], x["value"], valid_lens=x["lens"], normalizer=normalizer)

    exported = loaded(jax.export.export(jax.jit(call), platforms=PLATFORMS)(symbolic()))
    for lengths in LENGTHS:
        x = arrays(*lengths)
        close(exported(x), call(x))


@pytest.mark.slow
def test_some_lengths_are_symbolic() -> None:
    sizes = {"batch": "batch, 5, 7", "key": "2, 5, key", "query": "2, query, 7"}
    for text in sizes.values():
        exported = jax.export.export(jax.jit(program("scaled dot, causal", "auto")))(symbolic(text))
        x = arrays(2, 5, 7)
        close(loaded(exported)(x), program("scaled dot, causal", "auto")(x))


@pytest.mark.slow
def test_half_precision() -> None:
    def call(x: dict[str, Any]) -> Any:
        return ats.attend(x["query"], x["key"], x["value"])

    half = {name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for name, x in symbolic().items()}
    found = loaded(jax.export.export(jax.jit(call))(half))
    x = {name: array.astype(jnp.bfloat16) for name, array in arrays(2, 5, 7).items()}
    np.testing.assert_allclose(found(x).astype(FLOAT), call(x).astype(FLOAT), atol=2e-2)


def test_known_lengths() -> None:
    """With kernel="streaming" for any platform."""
    x = arrays(2, 5, 7)
    call = program("scaled dot, causal", "streaming")
    exported = jax.export.export(jax.jit(call), platforms=PLATFORMS)(x)
    assert "@attnscore_" not in exported.mlir_module()
    close(loaded(exported)(x), call(x))


def with_gradients(name: str) -> Callable[[dict[str, Any]], Any]:
    """The program, and the gradient of the sum of its outputs."""
    call = program(name, "auto")

    def total(parts: dict[str, Any], x: dict[str, Any]) -> Any:
        found = call(x | parts)
        return sum(jnp.where(jnp.isfinite(y), y, 0.0).sum() for y in jax.tree.leaves(found)), found

    floating = [name for name, (_, dtype) in given(1, 1, 1).items() if dtype == FLOAT]
    return lambda x: jax.grad(total, has_aux=True)({name: x[name] for name in floating}, x)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.slow_rows("cuda", "tpu")
def test_lowered_for_another_platform(platform: str) -> None:
    """What a CPU runs natively is lowered in operations of JAX alone, also under vmap, with its gradient."""
    x = arrays(2, 5, 7)
    stacked = {name: jnp.stack([y, y]) for name, y in x.items()}
    call = with_gradients("additive, valid lengths")
    for traced in (
        jax.jit(program("sum, dropout", "auto")).trace(x),
        jax.jit(call).trace(x),
        jax.jit(jax.vmap(call)).trace(stacked),
    ):
        assert "@attnscore_" not in traced.lower(lowering_platforms=(platform,)).as_text()
        if ats.available()["kernels"]["native"]:
            assert "@attnscore_" in traced.lower().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_known_lengths_for_several_platforms(name: str) -> None:
    """One exported program for all platforms, which gives on a CPU what the native kernel gives."""
    x, call = arrays(2, 5, 7), with_gradients(name)
    exported = jax.export.export(jax.jit(call), platforms=PLATFORMS)(x)
    assert "@attnscore_" not in exported.mlir_module()
    close(jax.export.deserialize(exported.serialize()).call(x), jax.jit(call)(x))


def test_what_is_refused_when_it_is_exported() -> None:
    x = arrays(2, 5, 7)
    if ats.available()["kernels"]["native"]:
        with pytest.raises(ValueError, match="attnscore_forward"):
            jax.export.export(jax.jit(program("dot", "native")))(x)
        with pytest.raises(ats.KernelUnavailable, match="whose memory the CPU cannot read"):
            jax.export.export(jax.jit(program("dot", "native")))(symbolic())
    with pytest.raises(ats.KernelUnavailable, match="a number of keys that is not known yet"):
        jax.export.export(jax.jit(program("dot", "dense")))(symbolic())
    query = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, dim"), FLOAT)
    known = "a last axis and an axis of heads whose lengths are known.*: only the batch and the lengths may be symbols"
    with pytest.raises(ats.ShapeError, match=known):
        jax.export.export(jax.jit(ats.attend))(query, query, query)
