"""A bias by relative position gives what the same bias as a matrix of pairs gives, in every kernel and framework."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import attnscore as ats
from attnscore.base import thresholds
from attnscore.plans import plan
from covering import pairs

pytestmark = pytest.mark.usefixtures("one_thread")
jax.config.update("jax_enable_x64", True)

# (queries, keys): single ones, whole tiles of each kernel, one more and one less, more queries than keys.
LENGTHS = [(1, 5), (2, 1), (2, 2), (3, 7), (65, 70), (130, 64), (300, 513)]
# Leading axes of the bias beside (batch, heads) = (2, 6): none, shared by heads, by the batch, by neither.
LEADS = [(), (2, 1), (6,), (2, 6)]
MASKS = {
    "none": lambda: None,
    "causal": lambda: ats.Causal("bottom_right"),
    "lengths": lambda: ats.ValidLens([1, 0]),
    "function": lambda: ats.MaskFunction(lambda batch, head, i, j: (i + j) % 3 != 0),
}


def inputs(n: int, m: int, lead: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bias = rng.normal(size=(*lead, 1, n + m - 1))
    if n * m > 4:
        bias[..., rng.integers(n + m - 1)] = -np.inf  # masks a diagonal
    return {
        "query": rng.normal(size=(2, 6, n, 5)), "key": rng.normal(size=(2, 3, m, 5)),
        "value": rng.normal(size=(2, 3, m, 4)), "bias": bias,
    }  # fmt: skip


def at_pairs(n: int, m: int) -> np.ndarray:
    """The place of each pair in a relative bias."""
    return np.arange(m) - np.arange(n)[:, None] + n - 1


def of_pairs(bias: np.ndarray, n: int, m: int) -> np.ndarray:
    return bias[..., 0, at_pairs(n, m)]


def sums_by_position(grad: np.ndarray, n: int, m: int) -> np.ndarray:
    found = np.zeros((*grad.shape[:-2], 1, n + m - 1))
    for i in range(n):
        found[..., 0, n - 1 - i : n - 1 - i + m] += grad[..., i, :]
    return found


def expected(x: dict[str, np.ndarray], grad: np.ndarray | None = None, **options: Any) -> tuple[Any, Any]:
    n, m = x["query"].shape[-2], x["key"].shape[-2]
    pairs = of_pairs(x["bias"], n, m)
    out, pullback = ats.attend_vjp(x["query"], x["key"], x["value"], bias=pairs, kernel="streaming", **options)
    grads = pullback(np.ones_like(out) if grad is None else grad)
    return out, grads._replace(bias=sums_by_position(grads.bias, n, m))


@pairs(lengths=LENGTHS, lead=LEADS, mask=tuple(MASKS), kernel=("dense", "streaming", "native"))
@pytest.mark.slow_rows("(300, 513)-()-lengths-dense")
def test_numpy(lengths: tuple[int, int], lead: tuple[int, ...], mask: str, kernel: str) -> None:
    n, m = lengths
    x = inputs(n, m, lead)
    if mask == "lengths":
        wanted = {"mask": ats.ValidLens([min(m, 3), 0])}
    else:
        wanted = {"mask": MASKS[mask]()}
    grad = np.random.default_rng(1).normal(size=(2, 6, n, 4))
    out, grads = expected(x, grad, **wanted)
    np.testing.assert_allclose(ats.attend(**x, **wanted, kernel=kernel), out, atol=1e-12)
    if kernel == "dense":
        return
    found, pullback = ats.attend_vjp(**x, **wanted, kernel=kernel)
    np.testing.assert_allclose(found, out, atol=1e-12)
    for name, a, b in zip(grads._fields, pullback(grad), grads, strict=True):
        if isinstance(b, np.ndarray):
            np.testing.assert_allclose(a, b, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("mask", [None, ats.Packed([0, 0], [0, 0])])
@pytest.mark.parametrize(("n", "m"), [(0, 7), (7, 0), (0, 1), (2, 0)])
@pytest.mark.slow_rows("7-0-*", "0-1-*", "2-0-None-auto")
def test_no_queries_or_no_keys(n: int, m: int, mask: Any, kernel: str) -> None:
    bias = np.ones((2, 1, len(ats.relative_positions(n, m, offset=0))))
    query, key, value = np.ones((1, 2, n, 3)), np.ones((1, 2, m, 3)), np.ones((1, 2, m, 4))
    out, pullback = ats.attend_vjp(query, key, value, mask=mask, bias=bias, kernel=kernel)
    grads = pullback(np.ones_like(out))
    np.testing.assert_array_equal(out, np.zeros((1, 2, n, 4)))
    np.testing.assert_array_equal(grads.bias, np.zeros_like(bias))
    tensors = [torch.tensor(x, requires_grad=True) for x in (query, key, value)]
    learned = torch.tensor(bias, requires_grad=True)
    ats.attend(*tensors, mask=mask, bias=learned, kernel=kernel).sum().backward()
    assert learned.grad is not None and learned.grad.shape == bias.shape and not learned.grad.any()
    found = jax.grad(lambda bias: ats.attend(*map(jnp.asarray, (query, key, value)), mask=mask, bias=bias).sum())(bias)
    assert found.shape == bias.shape and not found.any()


@pytest.mark.parametrize("kernel", ["streaming", "native"])
@pytest.mark.parametrize("score", ["additive", "gaussian", "capped"])
def test_scores(score: str, kernel: str) -> None:
    """The bias has the gradient of the scores after the cap."""
    scores = {
        "additive": ats.Additive(np.linspace(-1, 1, 5)),
        "gaussian": ats.Gaussian(1.5),
        "capped": ats.SoftCap("scaled_dot", 1.5),
    }
    x = inputs(70, 67, (6,))
    out, grads = expected(x, score=scores[score])
    found, pullback = ats.attend_vjp(**x, score=scores[score], kernel=kernel)
    np.testing.assert_allclose(found, out, atol=1e-12)
    np.testing.assert_allclose(pullback(np.ones_like(out)).bias, grads.bias, atol=1e-11)


def test_evaluated_mask_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "CHUNK_BYTES", 1)
    x = inputs(250, 130, (6,))
    out, grads = expected(x, mask=MASKS["function"]())
    found, pullback = ats.attend_vjp(**x, mask=MASKS["function"](), kernel="native")
    np.testing.assert_allclose(found, out, atol=1e-12)
    np.testing.assert_allclose(pullback(np.ones_like(out)).bias, grads.bias, atol=1e-11)


def test_statistics_weights_and_blocks() -> None:
    x = inputs(40, 50, (2, 6))
    pairs = x | {"bias": of_pairs(x["bias"], 40, 50)}
    for a, b in zip(
        ats.attend(**x, return_weights=True, return_stats=True)[2],
        ats.attend(**pairs, return_weights=True, return_stats=True)[2],
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)
    for matrix in (ats.attention_scores, ats.attention_weights):
        for index in ({}, {"query_index": [39, 0]}, {"key_index": [3]}, {"query_index": [7], "key_index": [0, 49]}):
            a, b = (matrix(y["query"], y["key"], bias=y["bias"], **index) for y in (x, pairs))
            np.testing.assert_allclose(a, b, atol=1e-12)
    for a, b in zip(
        ats.top_weights(x["query"], x["key"], 3, bias=x["bias"]),
        ats.top_weights(x["query"], x["key"], 3, bias=pairs["bias"]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("planned", [True, False])
def test_a_bias_in_other_order(planned: bool) -> None:
    """A table (positions, heads), transposed, as T5 has it; a function as the mask keeps the call without a plan."""
    x = inputs(66, 70, (6,))
    x["bias"] = np.ascontiguousarray(x["bias"][:, 0].T).T[:, None]
    out, grads = expected(x)
    leaves = {name: torch.from_numpy(a).requires_grad_() for name, a in x.items()}
    assert not leaves["bias"].is_contiguous()
    mask = None if planned else ats.MaskFunction(lambda batch, head, i, j: i >= 0)
    for _ in range(2):
        found = ats.attend(**leaves, mask=mask)
    np.testing.assert_allclose(found.detach(), out, atol=1e-12)
    found.sum().backward()
    for name, a in leaves.items():
        np.testing.assert_allclose(a.grad, getattr(grads, name), atol=1e-11, err_msg=name)


@pytest.mark.parametrize("head_axis", [-3, -2])
@pytest.mark.parametrize("lead", LEADS)
def test_torch(lead: tuple[int, ...], head_axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(66, 70, lead)
    out, grads = expected(x)
    leaves = {name: torch.tensor(a, requires_grad=True) for name, a in x.items()}
    given = {name: a.transpose(1, 2) if head_axis == -2 and name != "bias" else a for name, a in leaves.items()}
    ats.attend(**given, head_axis=head_axis)
    # The plan is cached: the call builds no problem again.
    monkeypatch.setattr(plan, "build_problem", None)
    found = ats.attend(**given, head_axis=head_axis)
    found = found.transpose(1, 2) if head_axis == -2 else found
    np.testing.assert_allclose(found.detach(), out, atol=1e-12)
    found.sum().backward()
    for name, a in leaves.items():
        np.testing.assert_allclose(a.grad, getattr(grads, name), atol=1e-11, err_msg=name)


def test_torch_second_derivatives() -> None:
    x = inputs(3, 2, (6,))
    x["bias"][np.isinf(x["bias"])] = 0.0
    # Two query heads over one KV head.
    parts = x["query"][:1, :2, :, :2], x["key"][:1, :1, :, :2], x["value"][:1, :1, :, :1], x["bias"][:2]
    leaves = [torch.tensor(a, requires_grad=True) for a in parts]

    def attend(*arrays: torch.Tensor) -> torch.Tensor:
        return ats.attend(*arrays[:3], bias=arrays[3])

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


@pytest.mark.slow
def test_torch_table_under_compile() -> None:
    """The gradient of a table of buckets, through the operator of compiled calls."""
    x = inputs(33, 33, ())
    query, key, value = (torch.tensor(x[name]) for name in ("query", "key", "value"))
    buckets = torch.tensor(ats.relative_buckets(ats.relative_positions(33, 33)))
    tables = [torch.linspace(-1, 1, 32 * 6, dtype=torch.float64).reshape(32, 6).requires_grad_() for _ in range(2)]

    places = torch.tensor(at_pairs(33, 33))

    def attend(table: torch.Tensor, pairs: bool) -> torch.Tensor:
        bias = table[buckets].T
        return ats.attend(query, key, value, bias=bias[:, places] if pairs else bias[:, None])

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    outs = [compiled(tables[0], False), attend(tables[1], True)]
    np.testing.assert_allclose(*(out.detach() for out in outs), atol=1e-12)
    for out in outs:
        (out * out).sum().backward()
    np.testing.assert_allclose(tables[0].grad, tables[1].grad, atol=1e-11)


@pytest.mark.parametrize("kernel", ["streaming", "native"])
@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.slow_rows("lead0-streaming", "lead0-native")
def test_jax(lead: tuple[int, ...], kernel: str) -> None:
    x = inputs(66, 70, lead)
    mask = None if lead else MASKS["function"]()
    out, grads = expected(x, mask=mask)

    @jax.jit
    def loss(arrays: dict[str, Any]) -> Any:
        found = ats.attend(**arrays, mask=mask, kernel=kernel)
        return found.sum(), found

    found = jax.grad(loss, has_aux=True)({name: jnp.asarray(a) for name, a in x.items()})
    np.testing.assert_allclose(found[1], out, atol=1e-12)
    for name, grad in found[0].items():
        np.testing.assert_allclose(grad, getattr(grads, name), atol=1e-11, err_msg=name)


@pytest.mark.slow
def test_jax_evaluated_mask_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "CHUNK_BYTES", 1)
    x = inputs(250, 130, (6,))
    mask = MASKS["function"]()
    out, grads = expected(x, mask=mask)
    of = jax.jit(lambda arrays: ats.attend(**arrays, mask=mask, kernel="native"))
    arrays = {name: jnp.asarray(a) for name, a in x.items()}
    np.testing.assert_allclose(of(arrays), out, atol=1e-12)
    found = jax.grad(lambda arrays: of(arrays).sum())(arrays)
    np.testing.assert_allclose(found["bias"], grads.bias, atol=1e-11)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kernel", ["streaming", "native"])
def test_tensorflow(kernel: str, graph: bool) -> None:
    x = inputs(66, 70, (2, 6))
    out, grads = expected(x)
    leaves = {name: tf.constant(a) for name, a in x.items()}

    def run(arrays: dict[str, Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            found = ats.attend(**arrays, kernel=kernel)
        return found, tape.gradient(found, arrays)

    found, of_leaves = (tf.function(run) if graph else run)(leaves)
    np.testing.assert_allclose(found, out, atol=1e-12)
    for name, grad in of_leaves.items():
        np.testing.assert_allclose(grad, getattr(grads, name), atol=1e-11, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_tensorflow_lengths_that_a_graph_learns(kernel: str) -> None:
    """The graph learns as well which bias it is: for each distance, for each key or for each head."""
    spec = tf.TensorSpec(None, tf.float64)

    @tf.function(
        input_signature=[tf.TensorSpec((2, 6, None, 5), tf.float64), spec, tf.TensorSpec((None, 1, None), tf.float64)]
    )
    def graph(query: Any, key: Any, bias: Any) -> Any:
        key = tf.ensure_shape(key, (2, 3, None, 5))
        with tf.GradientTape() as tape:
            tape.watch((query, key, bias))
            out = ats.attend(query, key, key, bias=bias, kernel=kernel)
        return (out, *tape.gradient(out, (query, key, bias)))

    rng = np.random.default_rng(0)
    for n, m in ((9, 4), (1, 6), (200, 150)):
        query, key = tf.constant(rng.normal(size=(2, 6, n, 5))), tf.constant(rng.normal(size=(2, 3, m, 5)))
        for shape in ((6, 1, n + m - 1), (6, 1, m), (1, 1, m), (6, 1, 1)):
            bias = tf.constant(rng.normal(size=shape))
            with tf.GradientTape() as tape:
                tape.watch((query, key, bias))
                out = ats.attend(query, key, key, bias=bias, kernel="streaming")
            wanted = (out, *tape.gradient(out, (query, key, bias)))
            for one, other in zip(graph(query, key, bias), wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-11)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the_shape_of_bias_does_not_fit"):
        graph(query, key, tf.zeros((6, 1, 200 + 150), tf.float64))


def test_sum_of_many_pairs() -> None:
    """A position has up to n pairs, whose gradients cancel: float32 keeps 5 digits of the largest sum."""
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(1, 1, 2000, 8)).astype(np.float32) for name in ("query", "key", "value")}
    x["bias"] = np.zeros((1, 3999), np.float32)
    grads = [
        ats.attend_vjp(**{name: a.astype(dtype) for name, a in x.items()})[1](np.ones((1, 1, 2000, 8), dtype)).bias
        for dtype in (np.float32, np.float64)
    ]
    assert np.abs(grads[0] - grads[1]).max() <= 2e-5 * np.abs(grads[1]).max() + 1e-7


def test_buckets_are_those_of_transformers() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    positions = ats.relative_positions(700, 900, offset=100)
    for bidirectional in (True, False):
        for buckets, farthest in ((32, 128), (64, 256), (16, 20)):
            found = ats.relative_buckets(positions, buckets=buckets, max_distance=farthest, bidirectional=bidirectional)
            theirs = t5.T5Attention._relative_position_bucket(
                torch.tensor(positions), bidirectional, num_buckets=buckets, max_distance=farthest
            )
            np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_buckets_of_the_limits_of_a_dtype(dtype: Any) -> None:
    limits = [np.iinfo(dtype).min, 5, np.iinfo(dtype).max]
    behind = 15 if limits[0] < 0 else 0
    np.testing.assert_array_equal(ats.relative_buckets(np.array(limits, dtype)), [behind, 21, 31])
    behind = 31 if limits[0] < 0 else 0
    np.testing.assert_array_equal(ats.relative_buckets(np.array(limits, dtype), bidirectional=False), [behind, 0, 0])


def test_errors() -> None:
    x = inputs(6, 8, ())
    with pytest.raises(ats.ShapeError, match=r"bias: expected a shape that broadcasts to \(..., query, key\)"):
        ats.attend(**x | {"bias": np.zeros((1, 14))})
    with pytest.raises(ats.ShapeError, match=r"got \(1, 14\). Hint: \(..., 1, query \+ key - 1\) has one number"):
        ats.attend(**x | {"bias": np.zeros((1, 14))})
    with pytest.raises(ats.ShapeError, match=r"\(..., 1, query \+ key - 1\) = \(2, 6, 1, 13\), got \(5, 1, 13\)"):
        ats.attend(**x | {"bias": np.zeros((5, 1, 13))})
    with pytest.raises(ats.ArgumentError, match="offset: expected a whole number where the lengths differ"):
        ats.relative_positions(3, 4)
    with pytest.raises(ats.ArgumentError, match="offset"):
        ats.relative_positions(3, 4, offset=0.5)  # type: ignore[arg-type]
    with pytest.raises(ats.ArgumentError, match="query_len"):
        ats.relative_positions(-1, 4, offset=0)
    with pytest.raises(ats.ArgumentError, match="positions"):
        ats.relative_buckets([0.5])
    with pytest.raises(ats.ArgumentError, match="buckets"):
        ats.relative_buckets([0], buckets=2)
    np.testing.assert_array_equal(ats.relative_positions(2, 4, offset=2), [-3, -2, -1, 0, 1])
