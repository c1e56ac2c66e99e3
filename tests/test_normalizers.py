"""Normalizers other than the softmax: every framework, mask, extra and derivative against the definitions.

The reference sorts the scores of a query, as the papers do; neither kernel does. Of other powers than 1 and 2 it
halves an interval, in long double.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnscore as ats
from attnscore import backends
from attnscore.kernels import tiling
from attnscore.problem import normalizers
from cases import AUTOMATIC

NORMALIZERS: dict[str, Any] = {
    "sigmoid": "sigmoid",
    "sparsemax": "sparsemax",
    "entmax15": "entmax15",
    "entmax 1.2": ats.Entmax(1.2),
}
SCORES: dict[str, Any] = {
    "scaled_dot": "scaled_dot",
    "additive": ats.Additive(np.linspace(-1, 2, 4)),
    "gaussian": ats.Gaussian(0.7),
    "capped": ats.SoftCap(ats.Temperature("dot", 0.5), 3.0),
}
# Of 7 queries and 9 keys in batches of 2. In the second batch of lengths nothing is unmasked.
MASKS: dict[str, Any] = {
    "none": None,
    "causal": ats.Causal(align="bottom_right"),
    "lengths": ats.ValidLens([5, 0]),
    "window": ats.SlidingWindow(2, 1, align="bottom_right"),
    "scattered": ats.MaskFunction(lambda b, h, i, j: (i * 5 + j * 3) % 4 != 0),
}
QUERIES, KEYS, DIM = 7, 9, 4


def sparse_weights(scores: np.ndarray, alpha: float) -> np.ndarray:
    """Return the entmax of one query: sorted for alpha 2 and 1.5."""
    if not scores.size or scores.max() == -np.inf:
        return np.zeros_like(scores)
    z = (alpha - 1) * (scores - scores.max())
    ordered = np.sort(z[z > -np.inf])[::-1]
    count = np.arange(1, len(ordered) + 1)
    if alpha == 2:
        # Martins and Astudillo (2016), algorithm 1
        thresholds = (np.cumsum(ordered) - 1) / count
        return np.maximum(z - thresholds[ordered > thresholds][-1], 0)
    if alpha == 1.5:
        # Peters, Niculae and Martins (2019), algorithm 2
        mean, of_squares = np.cumsum(ordered) / count, np.cumsum(ordered**2) / count
        thresholds = mean - np.sqrt(np.maximum(0, 1 / count - (of_squares - mean**2)))
        return np.maximum(z - thresholds[thresholds <= ordered][-1], 0) ** 2
    low, high = np.longdouble(-1), np.longdouble(0)
    for _ in range(70):
        middle = (low + high) / 2
        is_low = (np.maximum(z - middle, 0) ** (1 / np.longdouble(alpha - 1))).sum() >= 1
        low, high = (middle, high) if is_low else (low, middle)
    return np.maximum(z - low, 0) ** (1 / np.longdouble(alpha - 1))


def expected_weights(scores: np.ndarray, name: str) -> np.ndarray:
    """Return the weights of masked scores, in long double."""
    scores = scores.astype(np.longdouble)
    if name == "sigmoid":
        return np.exp(-np.logaddexp(np.longdouble(0), -scores))
    alpha = {"sparsemax": 2.0, "entmax15": 1.5, "entmax 1.2": 1.2}[name]
    return np.apply_along_axis(lambda row: sparse_weights(row, alpha), -1, scores)


def inputs(dtype: str = "float64", heads: int = 3, kv_heads: int = 3, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = (heads, QUERIES, DIM), (kv_heads, KEYS, DIM), (kv_heads, KEYS, 5)
    return [draw.normal(size=(2, *shape)).astype(dtype) for shape in shapes]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_output_weights_and_statistics_are_those_of_the_definition(name: str, score: str, mask: str) -> None:
    query, key, value = inputs()
    bias = np.linspace(-1, 1, KEYS)
    call: dict[str, Any] = {"score": SCORES[score], "mask": MASKS[mask], "bias": bias}
    scores = ats.attention_scores(query, key, **call)
    weights = expected_weights(scores, name)
    for kernel in ("streaming", "dense"):
        out, found, stats = ats.attend(
            query,
            key,
            value,
            normalizer=NORMALIZERS[name],
            return_weights=True,
            return_stats=True,
            kernel=kernel,
            **call,
        )
        np.testing.assert_allclose(found, weights.astype(float), rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(out, (weights @ value).astype(float), rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(stats.sum_weights, weights.sum(-1).astype(float), rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(stats.sum_sq_weights, (weights**2).sum(-1).astype(float), rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(stats.max_weight, weights.max(-1).astype(float), rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(stats.max_score, scores.max(-1), rtol=1e-14)
        assert (np.take_along_axis(scores, stats.argmax_key[..., None], -1)[..., 0] == scores.max(-1)).all()
        smallest = np.where(scores == -np.inf, np.inf, scores).min(-1)
        np.testing.assert_allclose(stats.min_score, smallest, rtol=1e-14, atol=1e-14)
        assert stats.log_sum_exp is None
        assert stats.entropy is None
        # Exactly: masked, and too far below the largest score.
        assert not found[scores == -np.inf].any()
        assert name in ("sigmoid", "entmax 1.2") or (found == 0).sum() > (scores == -np.inf).sum()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_kinds_of_scores_that_are_hard_for_the_search(name: str, dtype: str) -> None:
    """Equal scores, one far above, geometric steps, huge and tiny scales: one query each, 2000 keys."""
    keys, draw = 2000, np.random.default_rng(0)
    rows = np.stack(
        [
            np.zeros(keys),
            np.where(np.arange(keys) == 5, 1e4, 0.0),
            -(2.0 ** np.linspace(-40, 10, keys)),
            1 - 1 / np.arange(1, keys + 1),
            draw.normal(size=keys) * 1e4,
            draw.normal(size=keys) * 1e-4,
            draw.standard_cauchy(size=keys),
            np.where(np.arange(keys) < 2, 0.0, -np.inf),
        ]
    ).astype(dtype)
    out, weights = ats.attend(
        np.zeros((len(rows), 1), dtype), np.zeros((keys, 1), dtype), np.ones((keys, 1), dtype), bias=rows,
        normalizer=NORMALIZERS[name], return_weights=True,
    )  # fmt: skip
    wanted = expected_weights(rows, name)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(weights, wanted.astype(float), atol=40 * eps, rtol=40 * eps)
    if name != "sigmoid":
        np.testing.assert_allclose(out, 1, rtol=100 * eps)


@given(st.integers(1, 40), st.floats(1.01, 2), st.integers(0, 2**31), st.floats(0.01, 100))
@settings(max_examples=40)
def test_drawn_powers_and_scales(keys: int, alpha: float, seed: int, scale: float) -> None:
    bias = scale * np.random.default_rng(seed).normal(size=(1, keys))
    nothing = np.zeros((1, 1)), np.zeros((keys, 1)), np.zeros((keys, 1))
    _, weights = ats.attend(*nothing, bias=bias, normalizer=ats.Entmax(alpha), return_weights=True)
    np.testing.assert_allclose(
        weights, sparse_weights(bias[0].astype(np.longdouble), alpha)[None].astype(float), atol=1e-12
    )
    assert weights.sum() == pytest.approx(1, abs=1e-12)


def torch_formula(scores: torch.Tensor, name: str) -> torch.Tensor:
    """Return the weights in PyTorch's operations, from the set of keys that the reference finds."""
    if name == "sigmoid":
        return torch.sigmoid(scores)
    alpha = {"sparsemax": 2.0, "entmax15": 1.5, "entmax 1.2": 1.2}[name]
    weights = torch.from_numpy(expected_weights(scores.detach().numpy(), name).astype(float))
    # One step of Newton's method at the solution has the derivatives of the threshold.
    power, on = 1 / (alpha - 1), weights > 0
    z = torch.where(on, (alpha - 1) * scores, 0.0)
    with torch.no_grad():
        threshold = torch.where(on, z - weights ** (alpha - 1), 0.0).sum(-1, True) / on.sum(-1, True).clamp(1)

    def base(threshold: torch.Tensor) -> torch.Tensor:
        return torch.where(on, (z - threshold).clamp(1e-300), 1.0)

    for _ in range(2):
        total = torch.where(on, base(threshold) ** power, 0.0).sum(-1, True)
        slope = torch.where(on, power * base(threshold) ** (power - 1), 0.0).sum(-1, True)
        threshold = threshold + torch.where(slope > 0, (total - 1) / torch.where(slope > 0, slope, 1.0), 0.0)
    return torch.where(on, base(threshold) ** power, 0.0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_gradients(name: str, mask: str) -> None:
    """Of the output and of the weights; grouped heads, bias, dropout."""
    query, key, value = map(torch.from_numpy, inputs(heads=4, kv_heads=2))
    bias = torch.linspace(-1, 1, KEYS, dtype=torch.float64)
    keep = ats.attend(  # dropout of equal weights shows which pairs are kept
        torch.zeros_like(query), torch.zeros_like(key), torch.eye(KEYS, dtype=torch.float64).expand(2, 2, KEYS, KEYS),
        dropout=0.3, seed=5, normalizer="sigmoid",
    ) * 2  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (query, key, value, bias)]
    out, weights = ats.attend(
        *leaves[:3],
        bias=leaves[3],
        mask=MASKS[mask],
        dropout=0.3,
        seed=5,
        normalizer=NORMALIZERS[name],
        return_weights=True,
    )
    found = torch.autograd.grad(out.sin().sum() + (weights * weights).cos().sum(), leaves)
    others = [x.clone().requires_grad_() for x in (query, key, value, bias)]
    repeated = [x.repeat_interleave(2, 1) for x in others[1:3]]
    scores = others[0] @ repeated[0].mT / math.sqrt(DIM) + others[3]
    unmasked = torch.from_numpy(ats.attention_scores(query, key, mask=MASKS[mask]).numpy() > -np.inf)
    wanted_weights = torch_formula(scores.where(unmasked, -math.inf), name)
    wanted_weights = wanted_weights.where(unmasked, 0.0)
    wanted_out = (wanted_weights * keep) @ repeated[1]
    torch.testing.assert_close(out, wanted_out, rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad(wanted_out.sin().sum() + (wanted_weights * wanted_weights).cos().sum(), others)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.slow_rows("entmax*")
def test_derivatives_of_any_order_in_torch(name: str) -> None:
    draw = np.random.default_rng(1)
    leaves = [torch.from_numpy(draw.normal(size=(n, 3))).requires_grad_() for n in (3, 4, 4)]

    def attend(*arrays: torch.Tensor) -> torch.Tensor:
        return ats.attend(*arrays, normalizer=NORMALIZERS[name], mask=ats.Causal(align="bottom_right"))

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)
    plain = [x.detach() for x in leaves]
    batched = torch.func.vmap(attend)(*(torch.stack([x, 2 * x]) for x in plain))
    torch.testing.assert_close(batched[1], attend(*(2 * x for x in plain)))
    tangents = [torch.ones_like(x) for x in plain]
    _, found = torch.func.jvp(attend, tuple(plain), tuple(tangents))
    step = 1e-6
    ahead, behind = (attend(*(x + sign * step for x in plain)) for sign in (1, -1))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_vjp_of_numpy_is_the_gradient_of_torch() -> None:
    arrays = inputs()
    for normalizer in NORMALIZERS.values():
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
        out = ats.attend(*leaves, normalizer=normalizer)
        grads = torch.autograd.grad(out.sum(), leaves)
        found, pullback = ats.attend_vjp(*arrays, normalizer=normalizer)
        np.testing.assert_allclose(found, out.detach(), rtol=1e-12, atol=1e-14)
        for x, y in zip(pullback(np.ones_like(found))[:3], grads, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def in_jax(arrays: list[np.ndarray], wrap: Callable[[Any], Any], **call: Any) -> list[np.ndarray]:
    def loss(*x: Any) -> Any:
        out = ats.attend(*x, **call)
        return jnp.sin(out).sum(), out

    grads, out = wrap(jax.grad(loss, (0, 1, 2), has_aux=True))(*map(jnp.asarray, arrays))
    return [np.asarray(x) for x in (out, *grads)]


def in_tensorflow(arrays: list[np.ndarray], wrap: Callable[[Any], Any], **call: Any) -> list[np.ndarray]:
    def loss(*x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = ats.attend(*x, **call)
            total = tf.reduce_sum(tf.sin(out))
        return out, *tape.gradient(total, x)

    return [x.numpy() for x in wrap(loss)(*map(tf.constant, arrays))]


def same(function: Any) -> Any:
    return function


RUNS: dict[str, tuple[Any, Any]] = {
    "jax": (in_jax, same),
    "jax.jit": (in_jax, jax.jit),
    "tensorflow": (in_tensorflow, same),
    "tf.function": (in_tensorflow, tf.function),
    "tf.function, compiled": (in_tensorflow, lambda function: tf.function(function, jit_compile=True)),
}
# Compiling takes seconds.
BY_DEFAULT = {("jax.jit", "entmax15"), ("tf.function", "sparsemax"), *(("tensorflow", name) for name in NORMALIZERS)}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(run, name, marks=[] if (run, name) in BY_DEFAULT else pytest.mark.slow)
        for run in RUNS
        for name in NORMALIZERS
    ],
)
@pytest.mark.slow_rows("tf.function-*", "jax.jit-entmax15")
def test_frameworks_agree(run: str, name: str) -> None:
    arrays = inputs("float32")
    call = {"normalizer": NORMALIZERS[name], "mask": ats.ValidLens([5, 0]) & ats.Causal(align="bottom_right")}
    leaves = [torch.from_numpy(x).double().requires_grad_() for x in arrays]
    out = ats.attend(*leaves, **call)
    wanted = [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]
    framework, wrap = RUNS[run]
    for x, y in zip(framework(arrays, wrap, **call), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "entmax15"])
def test_lengths_that_a_graph_learns(name: str) -> None:
    kind = tf.TensorSpec((None, None, None, None), tf.float32)

    @tf.function(input_signature=[kind] * 3)
    def graph(query: Any, key: Any, value: Any) -> Any:
        query, key, value = (
            tf.ensure_shape(x, (*x.shape[:1], y.shape[1], None, y.shape[3]))
            for x, y in zip((query, key, value), arrays, strict=True)
        )
        return ats.attend(query, key, value, normalizer=NORMALIZERS[name], mask=ats.Causal("bottom_right"))

    arrays = inputs("float32")
    for queries in (arrays[0].shape[2], 1):
        x = [arrays[0][:, :, :queries], *arrays[1:]]
        wanted = ats.attend(*x, normalizer=NORMALIZERS[name], mask=ats.Causal("bottom_right"))
        np.testing.assert_allclose(graph(*x), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
def test_second_derivatives_of_the_dense_kernel(name: str) -> None:
    """Its threshold is differentiated twice, as in tiled attention."""
    draw = np.random.default_rng(1)
    leaves = [torch.from_numpy(draw.normal(size=(n, 3))).requires_grad_() for n in (3, 4, 4)]
    assert torch.autograd.gradgradcheck(
        lambda *arrays: ats.attend(*arrays, normalizer=NORMALIZERS[name], kernel="dense"), leaves
    )


@pytest.mark.parametrize("normalizer", [pytest.param("sigmoid", marks=pytest.mark.slow), "entmax15"])
@pytest.mark.slow_rows("entmax15")
def test_second_derivatives_in_jax(normalizer: str) -> None:
    draw = np.random.default_rng(1)
    query, key, value = (jnp.asarray(draw.normal(size=(n, 3)), "float32") for n in (2, 4, 4))

    def loss(query: Any) -> Any:
        return jnp.sin(ats.attend(query, key, value, normalizer=normalizer)).sum()

    leaf = torch.from_numpy(np.array(query)).requires_grad_()
    others = [torch.from_numpy(np.array(x)) for x in (key, value)]
    wanted = torch.autograd.functional.hessian(
        lambda x: ats.attend(x, *others, normalizer=normalizer).sin().sum(), leaf
    )
    np.testing.assert_allclose(jax.jit(jax.hessian(loss))(query), wanted, rtol=1e-4, atol=1e-5)
    one = jax.vmap(lambda x: ats.attend(x, key, value, normalizer=normalizer))(query[:, None])
    np.testing.assert_allclose(one[:, 0], ats.attend(query, key, value, normalizer=normalizer), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_masked_numbers_do_not_propagate_and_unmasked_do(name: str) -> None:
    query, key, value = (torch.from_numpy(x) for x in inputs())
    clean = [x.clone() for x in (query, key, value)]
    for x in (key, value):
        # In tiles that are computed, because the other sequence has all keys.
        x[0, :, 6:] = torch.tensor([math.nan, math.inf, -math.inf])[:, None]
    call = {"normalizer": NORMALIZERS[name], "valid_lens": torch.tensor([6, 9])}
    results = []
    for arrays in ((query, key, value), clean):
        leaves = [x.clone().requires_grad_() for x in arrays]
        out = ats.attend(*leaves, **call)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    assert ats.attend(query, key, value, normalizer=NORMALIZERS[name])[0].isnan().all()


@pytest.mark.parametrize("name", NORMALIZERS)
def test_empty_axes_and_16_bit(name: str) -> None:
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        x, y = np.ones((2, queries, 4)), np.ones((2, keys, 4))
        for kernel in ("streaming", "dense"):
            out, weights, stats = ats.attend(
                x, y, y, normalizer=NORMALIZERS[name], kernel=kernel, return_weights=True, return_stats=True
            )
            assert out.shape == (2, queries, 4)
            assert weights.shape == (2, queries, keys)
            assert not out.any()
            assert not stats.sum_weights.any()
    arrays = inputs("float32")
    halves = [torch.from_numpy(x).bfloat16() for x in arrays]
    out = ats.attend(*halves, normalizer=NORMALIZERS[name])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), ats.attend(*(x.float() for x in halves), normalizer=NORMALIZERS[name]), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.slow_rows("sigmoid", "entmax*")
def test_torch_compile(name: str) -> None:
    arrays = [torch.from_numpy(x).requires_grad_() for x in inputs("float32")]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return ats.attend(*x, normalizer=NORMALIZERS[name], mask=ats.Causal(align="bottom_right")).sin().sum()

    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*arrays), arrays)
    for x, y in zip(found, torch.autograd.grad(loss(*arrays), arrays), strict=True):
        torch.testing.assert_close(x, y)


def test_the_search_ends_without_a_host_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is captured: no number is read, and all steps are taken."""
    arrays = [torch.from_numpy(x) for x in inputs()]
    wanted = [ats.attend(*arrays, normalizer=x) for x in NORMALIZERS.values()]
    monkeypatch.setattr(backends.load("torch"), "number", lambda x: None)
    for normalizer, out in zip(NORMALIZERS.values(), wanted, strict=True):
        torch.testing.assert_close(ats.attend(*arrays, normalizer=normalizer), out)


def test_explain_says_that_scores_are_computed_often() -> None:
    arrays = inputs()
    notes = {name: str(ats.explain(*arrays, normalizer=x)) for name, x in NORMALIZERS.items()}
    assert [name for name, text in notes.items() if "about 10 times" in text] == [
        x for x in NORMALIZERS if x != "sigmoid"
    ]


@pytest.mark.parametrize("mask", ["none", "lengths", "scattered"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_blocks_of_weights(name: str, mask: str) -> None:
    """They equal the whole matrix's, with their gradients; masked and fully masked queries included."""
    query, key, value = (torch.from_numpy(x).requires_grad_() for x in inputs(heads=4, kv_heads=2))
    call = {"normalizer": NORMALIZERS[name], "mask": MASKS[mask]}
    _, whole = ats.attend(query, key, value, return_weights=True, **call)
    every = slice(None)
    for rows, cols in ((None, None), ([1, 3], None), (None, [0, 4, 2]), (slice(1, 4), slice(2, 5))):
        found = ats.attention_weights(query, key, query_index=rows, key_index=cols, **call)
        wanted = whole[:, :, every if rows is None else rows][..., every if cols is None else cols]
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(x.sin().sum(), (query, key), retain_graph=True) for x in (found, wanted)]
        torch.testing.assert_close(*grads)
    plain = [x.detach().numpy() for x in (query, key)]
    for cols in (None, [2, 0]):
        found = ats.attention_weights(*plain, key_index=cols, **call)
        np.testing.assert_allclose(found, whole.detach()[..., every if cols is None else cols], rtol=1e-12, atol=1e-14)


def test_graphs() -> None:
    """A graph of neighbours is gathered, and its queries are normalized one by one."""
    indptr, indices = np.array([0, 2, 2, 5]), np.array([0, 2, 1, 2, 3])
    query, key, value = (np.random.default_rng(0).normal(size=(n, 3)) for n in (3, 4, 4))
    mask = ats.Neighbours(indptr, indices)
    for normalizer in NORMALIZERS.values():
        assert ats.explain(query, key, value, mask=mask, normalizer=normalizer).kernel == "gather"
        found = ats.attend(query, key, value, mask=mask, normalizer=normalizer)
        wanted = ats.attend(query, key, value, mask=mask, normalizer=normalizer, kernel="dense")
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        weights = ats.attention_weights(query, key, mask=mask, normalizer=normalizer)
        np.testing.assert_allclose(weights @ value, wanted, rtol=1e-12)
        block = ats.attention_weights(query, key, mask=mask, normalizer=normalizer, key_index=[2, 0])
        np.testing.assert_allclose(block, weights[:, [2, 0]], rtol=1e-12)


def test_jagged_tensors() -> None:
    parts = [torch.randn(n, 2, 4) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out = ats.attend(jagged, jagged, jagged, head_axis=-2, normalizer="sparsemax")
    for found, x in zip(out.unbind(), parts, strict=True):
        heads = x[None]
        torch.testing.assert_close(found, ats.attend(heads, heads, heads, head_axis=-2, normalizer="sparsemax")[0])


def test_the_search_takes_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, count = [], ats.Entmax.slopes

    def slopes(self: Any, *arguments: Any) -> Any:
        passes.append(1)
        return count(self, *arguments)

    monkeypatch.setattr(ats.Entmax, "slopes", slopes)
    draw = np.random.default_rng(0)
    query, key = draw.normal(size=(50, 16)), draw.normal(size=(3000, 16))
    monkeypatch.setattr(tiling, "plan", partial(tiling.plan, tile=(50, 3000)))
    for alpha in (1.05, 1.5, 2):
        passes.clear()
        ats.attend(query, key, key, normalizer=ats.Entmax(alpha))
        assert len(passes) <= 14


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"normalizer": "hardmax"}, "normalizer: expected one of softmax, sigmoid, sparsemax, entmax15.*'hardmax'"),
        ({"normalizer": 1.5}, "normalizer.*1.5"),
        ({"normalizer": None}, "normalizer.*None"),
        ({"normalizer": ["sigmoid"]}, "normalizer"),
        ({"normalizer": "sparsemax", "sink": 0.0}, "sink.*softmax"),
        ({"normalizer": "sigmoid", "return_stats": ("entropy",)}, "return_stats.*entropy"),
        ({"normalizer": "sparsemax", "return_stats": "log_sum_exp"}, "Hint: normalizer='softmax' has log_sum_exp"),
    ],
)
def test_bad_input(call: dict[str, Any], words: str) -> None:
    for _ in range(2):
        with pytest.raises(ats.ArgumentError, match=words):
            ats.attend(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 3)), **call)
    words = "normalizer" if AUTOMATIC == "native" else "ATTNSCORE_NO_NATIVE"
    with pytest.raises(ats.KernelUnavailable, match=words):
        ats.attend(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 3)), normalizer="sigmoid", kernel="native")


@pytest.mark.parametrize("alpha", [1, 0.5, 2.5, math.nan, "2", True, None])
def test_bad_alpha(alpha: Any) -> None:
    with pytest.raises(ats.ArgumentError, match="alpha"):
        ats.Entmax(alpha)


def test_a_cached_plan_is_of_one_normalizer() -> None:
    query, key, value = inputs()
    first, second, third = (ats.attend(query, key, value, normalizer=x) for x in ("softmax", "sigmoid", "softmax"))
    np.testing.assert_array_equal(first, third)
    assert np.abs(first - second).max() > 0.1


def test_names_are_normalizers() -> None:
    assert normalizers.resolve("softmax") is None
    assert normalizers.resolve("sparsemax") == ats.Entmax(2)
    assert normalizers.resolve("entmax15") == ats.Entmax(1.5)
    query, key, value = inputs()
    soft = ats.attend(query, key, value, return_weights=True)[1]
    near = ats.attend(query, key, value, normalizer=ats.Entmax(1.01), return_weights=True)[1]
    np.testing.assert_allclose(near, soft, atol=0.01)


@pytest.mark.parametrize("name", ["sparsemax", "sigmoid"])
def test_no_gradient_of_a_log_sum_exp_that_there_is_not(name: str) -> None:
    x = np.ones((2, 3, 4))
    _, pullback = ats.attend_vjp(x, x, x, normalizer=name)
    with pytest.raises(
        ats.ArgumentError, match="grad_log_sum_exp: expected None, as the normalizer is not the softmax"
    ):
        pullback(None, np.ones((2, 3)))
