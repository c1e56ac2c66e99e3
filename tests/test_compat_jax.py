"""`attnscore.compat.jax` beside JAX's original: every argument, gradients, dtypes, masks, lengths, errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnscore.compat import jax as compat

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = B, N, K, T, S, H = 2, 4, 2, 5, 7, 8
# Of float64 too, the original computes the softmax in float32.
TOLERANCE = {"float64": 2e-6, "float32": 2e-6, "bfloat16": 4e-2, "float16": 5e-3}
THEIRS = jax.nn.dot_product_attention
STRICT = functools.partial(compat.dot_product_attention, strict=True)


def arrays(kv_heads: int = HEADS, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = (BATCH, QUERIES, HEADS, DIM), *((BATCH, KEYS, kv_heads, DIM),) * 2
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def keep(*shape: int) -> jax.Array:
    """A boolean mask in which every query attends to the first key."""
    return (normal(*shape) > 0).at[..., 0].set(True)


def close(ours: Any, theirs: Any, atol: float | None = None) -> None:
    """Shapes, dtypes and numbers equal the original's, NaN and infinities included."""
    for found, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        limit = TOLERANCE[found.dtype.name] if atol is None else atol
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, wanted)), rtol=1e-6, atol=limit)


def lens(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (N, {}),
    "grouped heads": (K, {}),
    "one KV head, causal": (1, {"is_causal": True}),
    "bias": (K, {"bias": normal(1, N, T, S)}),
    "bias of integers": (N, {"bias": jnp.arange(S)}),
    "mask": (K, {"mask": keep(B, N, T, S)}),
    "mask of one axis": (N, {"mask": keep(S)}),
    "mask and bias, causal": (N, {"mask": keep(B, 1, 1, S), "bias": normal(N, 1, S), "is_causal": True}),
    "scale": (N, {"scale": -0.3}),
    "scale as an array": (N, {"scale": np.float32(0.3)}),
    "lengths of keys": (K, {"key_value_seq_lengths": lens(3, 7)}),
    "lengths beyond the ends": (N, {"key_value_seq_lengths": lens(1, 100), "query_seq_lengths": lens(100, -3)}),
    "lengths of queries": (N, {"query_seq_lengths": lens(2, 4), "is_causal": True}),
    "window": (N, {"local_window_size": (1, 2)}),
    "window, one number": (K, {"local_window_size": 1, "is_causal": True}),
    "window to one side": (N, {"local_window_size": (-1, 3)}),
    "window as an array": (N, {"local_window_size": jnp.asarray([2, 0])}),
    "implementation": (N, {"implementation": "xla"}),
}
# Each kind of option by default; the rest runs in the slow tier, as every function compiles anew.
FEW = ("grouped heads", "mask and bias, causal", "lengths beyond the ends")
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in OPTIONS]
)


@names
@pytest.mark.slow_rows("grouped heads", "mask and bias, causal", "lengths beyond the ends", "window to one side")
def test_output_residual_and_gradients_are_those_of_the_original(name: str) -> None:
    kv_heads, options = OPTIONS[name]
    given = list(arrays(kv_heads))
    bias = options.get("bias")
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.floating):
        given.append(bias)
    # The residual of a padded query is no log-sum-exp there; its output is 0 in both.
    with_residual = "query_seq_lengths" not in options

    def call(function: Any, arrays: Any) -> Any:
        named = dict(zip(("query", "key", "value", "bias"), arrays, strict=False))
        return function(**(options | named), return_residual=with_residual)

    outputs, grads = [], []
    for function in (compat.dot_product_attention, THEIRS):
        found, vjp = jax.vjp(functools.partial(call, function), given)
        outputs.append(found)
        grads.append(vjp(jax.tree.map(jnp.ones_like, found))[0])
    close(*outputs, atol=1e-5)
    close(*grads, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype: str) -> None:
    options: Any = {"bias": normal(N, T, S), "is_causal": True, "return_residual": True}
    with jax.enable_x64(dtype == "float64"):
        given = arrays(KV_HEADS, dtype)
        close(compat.dot_product_attention(*given, **options), THEIRS(*given, **options), TOLERANCE[dtype])


@pytest.mark.slow
def test_axes_that_are_left_out() -> None:
    query, key, value = arrays()
    for q, k, v in (
        (query[0], key[0], value[0]),
        (query[0], key[:1], value[:1]),
        (query[0, 0], key[0, 0], value[0, 0]),
        (query[0, 0, 0], key[0, 0, 0], value[0, 0, 0]),
    ):
        options: Any = {"return_residual": True}
        close(compat.dot_product_attention(q, k, v, **options), THEIRS(q, k, v, **options), 1e-5)


@pytest.mark.slow
def test_arrays_of_numpy_and_lists() -> None:
    query, key, value = (np.asarray(x, np.float64) for x in arrays())
    ours = compat.dot_product_attention(query.tolist(), key, value, mask=[True] * (KEYS - 1) + [False])
    close(ours, THEIRS(query.tolist(), key, value, mask=jnp.arange(KEYS) < KEYS - 1))


@pytest.mark.slow
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads", "dim"])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the original, for dim 0
def test_empty_axes(empty: str) -> None:
    query, key, value = arrays()
    cut = {
        "batch": (query[:0], key[:0], value[:0]),
        "queries": (query[:, :0], key, value),
        "keys": (query, key[:, :0], value[:, :0]),
        "heads": (query[:, :, :0], key, value),
        "dim": (query[..., :0], key[..., :0], value[..., :0]),
    }[empty]
    # With dim 0 the original's scale is infinite, and its residual NaN; here scores are 0.
    options: Any = {"return_residual": empty != "dim"}
    for function in (compat.dot_product_attention, STRICT):
        close(function(*cut, **options), THEIRS(*cut, **options))


UNSEEING: dict[str, dict[str, Any]] = {
    "mask": {"mask": keep(T, S) & (jnp.arange(T) != 2)[:, None]},
    "lengths": {"query_seq_lengths": lens(3, 0), "key_value_seq_lengths": lens(0, 5)},
    "window": {"local_window_size": (0, -3)},
    "bias": {"bias": jnp.where((jnp.arange(T) != 2)[:, None], 0.0, -jnp.inf)},
    "bias and mask": {"bias": jnp.full((S,), -jnp.inf), "mask": jnp.arange(S) < 3},
}


@pytest.mark.parametrize("name", UNSEEING)
@pytest.mark.slow_rows("mask", "lengths")
def test_a_query_that_attends_to_no_key(name: str) -> None:
    """Zeros and -inf; with strict=True the numbers of the original: the mean of its masked values, or NaN."""
    given, options = arrays(KV_HEADS), UNSEEING[name] | {"return_residual": True}
    out, residual = compat.dot_product_attention(*given, **options)
    empty = np.asarray(jnp.isneginf(residual))
    assert empty.any()
    assert not np.asarray(out)[empty].any()
    strict, theirs = STRICT(*given, **options), THEIRS(*given, **options)
    close(strict, theirs, 1e-5)
    seeing = ~empty
    for ours, wanted in zip((out, residual), theirs, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[seeing], np.asarray(wanted)[seeing], atol=1e-5, rtol=1e-6)


@pytest.mark.slow
def test_the_gradient_of_strict() -> None:
    given, options = arrays(KV_HEADS), UNSEEING["mask"]
    grads = [
        jax.grad(lambda x, f=function: (f(*x, **options) ** 2).sum())(given)  # type: ignore[misc]
        for function in (STRICT, THEIRS)
    ]
    close(*grads, atol=2e-5)


def test_the_residual_has_no_gradient() -> None:
    given = arrays()
    for function in (compat.dot_product_attention, THEIRS):
        grads = jax.grad(lambda x, f=function: f(*x, return_residual=True)[1].sum())(given)  # type: ignore[misc]
        assert not any(np.asarray(x).any() for x in grads)


@pytest.mark.slow
def test_a_scale_has_a_gradient() -> None:
    given = arrays()
    grads = [
        jax.grad(lambda scale, f=function: (f(*given, scale=scale) ** 2).sum())(0.3)  # type: ignore[misc]
        for function in (compat.dot_product_attention, THEIRS)
    ]
    close(*grads, atol=1e-4)


def test_jit_with_traced_lengths_and_window() -> None:
    def call(function: Any, *arrays: Any) -> Any:
        *qkv, keys, width = arrays
        return function(*qkv, key_value_seq_lengths=keys, local_window_size=(width, 1), is_causal=True)

    given = (*arrays(KV_HEADS), lens(4, 7), lens(3)[0])
    found = jax.jit(functools.partial(call, compat.dot_product_attention))(*given)
    close(found, call(THEIRS, *given), 1e-5)


@pytest.mark.slow
def test_vmap() -> None:
    given = (*arrays(KV_HEADS), normal(B, N, T, S))
    close(jax.vmap(compat.dot_product_attention)(*given), jax.vmap(THEIRS)(*given))


@pytest.mark.filterwarnings("error")
def test_configurations_that_forbid_promotion_and_infinities() -> None:
    given = arrays()
    with jax.numpy_rank_promotion("raise"), jax.debug_infs(True):
        options: Any = {"mask": jnp.arange(KEYS) < 4, "key_value_seq_lengths": lens(3, 5)}
        found = compat.dot_product_attention(*given, **options)
    close(found, THEIRS(*given, **options))


@pytest.mark.slow
def test_float64_is_computed_in_float64() -> None:
    """The original's softmax is in float32."""
    with jax.enable_x64():
        given = arrays(KV_HEADS, jnp.float64)
        ours, theirs = (function(*given, return_residual=True) for function in (compat.dot_product_attention, THEIRS))
        q, k, v = (np.asarray(x) for x in given)
        k, v = (np.repeat(x, HEADS // KV_HEADS, 2) for x in (k, v))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(DIM)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
        assert [x.dtype for x in ours] == [x.dtype for x in theirs]
        np.testing.assert_allclose(ours[0], wanted, atol=1e-13)


def float8(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float8_e4m3fn)


BAD: dict[str, Callable[..., dict[str, Any]]] = {
    "nothing": lambda q, k, v: {"query": None},
    "five axes of query": lambda q, k, v: {"query": q[None]},
    "five axes of key": lambda q, k, v: {"key": k[None]},
    "five axes of mask": lambda q, k, v: {"mask": keep(1, 1, 1, 1, S)},
    "values of another dim": lambda q, k, v: {"value": v[..., 1:]},
    "values of another length": lambda q, k, v: {"value": v[:, 1:]},
    "batch": lambda q, k, v: {"query": q[:1]},
    "heads that do not divide": lambda q, k, v: {"query": q[:, :, :3], "key": k[:, :, :2], "value": v[:, :, :2]},
    "no heads": lambda q, k, v: {"key": k[:, :, :0], "value": v[:, :, :0]},
    "dtypes": lambda q, k, v: {"value": v.astype(jnp.float16)},
    "float8": lambda q, k, v: {"query": float8(q), "key": float8(k), "value": float8(v)},
    "mask of integers": lambda q, k, v: {"mask": jnp.arange(S)},
    "mask of other heads": lambda q, k, v: {"mask": keep(1, 2, T, S)},
    "bias of other heads": lambda q, k, v: {"bias": normal(1, 2, T, S)},
    "mask of another length": lambda q, k, v: {"mask": keep(S - 1)},
    "mask of another batch": lambda q, k, v: {"mask": keep(3, 1, 1, S)},
    # To `attend`, this is a bias for each distance of key and query.
    "bias of distances": lambda q, k, v: {"bias": normal(1, 1, 1, T + S - 1)},
    "lengths of another batch": lambda q, k, v: {"query_seq_lengths": lens(1, 2, 3)},
    "lengths of floats": lambda q, k, v: {"key_value_seq_lengths": jnp.ones(B)},
    "one length": lambda q, k, v: {"query_seq_lengths": lens(3)[0]},
    "half a window": lambda q, k, v: {"local_window_size": (1,)},
    "an open window": lambda q, k, v: {"local_window_size": (1, None)},
    "scale": lambda q, k, v: {"scale": "small"},
    "cuDNN": lambda q, k, v: {"implementation": "cudnn"},
    "implementation": lambda q, k, v: {"implementation": "flash"},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_are_of_the_class_of_the_original(name: str) -> None:
    given = dict(zip(("query", "key", "value"), arrays(), strict=True))
    given |= BAD[name](*given.values())
    with pytest.raises((ValueError, TypeError, AssertionError, RuntimeError, ZeroDivisionError)) as theirs:
        THEIRS(**given)
    kinds = [kind for kind in type(theirs.value).__mro__ if kind.__module__ == "builtins"]
    with pytest.raises(kinds[0]):
        compat.dot_product_attention(**given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": np.ones(4)}, r"scale: expected one number, got shape \(4,\)"),
        ({"scale": np.inf}, r"scale: expected a number \(finite\), got inf"),
        ({"query": np.ones((2, 5, 4, 8), int), "key": np.ones((2, 7, 4, 8), int), "value": np.ones((2, 7, 4, 8), int)},
         "query, key, value: expected one of .*, got int"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compat.dot_product_attention(**(dict(zip(("query", "key", "value"), arrays(), strict=True)) | change))


def test_the_arguments_are_those_of_the_original() -> None:
    ours, theirs = (inspect.signature(x).parameters for x in (compat.dot_product_attention, THEIRS))
    assert [(x.name, x.default, x.kind) for x in ours.values() if x.name != "strict"] == [
        (x.name, x.default, x.kind) for x in theirs.values()
    ]
    assert list(ours)[-1] == "strict"
