"""Projections in TensorFlow: the product of eager calls; graphs leave rows that are not finite out of gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tensorflow as tf

import attnscore as ats
from attnscore import backends
from harness import assert_each_close

RNG = np.random.default_rng(13)
LENS = np.asarray([3, 0, 5, 1], np.int32)
SCORES: dict[str, Callable[..., Any]] = {
    "bilinear": lambda w: ats.Bilinear(w["W"]),
    "additive": lambda w: ats.Additive(w["w_v"], w["W_q"], w["W_k"]),
}
PARAMETERS = {"bilinear": ("W",), "additive": ("w_v", "W_q", "W_k")}
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def rng(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same numbers whatever ran before."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(13))


def draw(score: str) -> Arrays:
    shapes = {"query": (4, 2, 6), "key": (4, 5, 7), "value": (4, 5, 3)}
    sizes = {"W": (6, 7), "w_v": (8,), "W_q": (8, 6), "W_k": (8, 7)}
    shapes |= {name: sizes[name] for name in PARAMETERS[score]}
    return {name: tf.constant(RNG.standard_normal(shape)) for name, shape in shapes.items()}


def with_nonfinite(arrays: Arrays) -> Arrays:
    """NaN and infinities in masked keys, and in the queries that attend to no key."""
    query, key = arrays["query"].numpy(), arrays["key"].numpy()
    key[0, 3:, 1], key[3, 1:], query[1] = np.inf, np.nan, -np.inf
    return arrays | {"query": tf.constant(query), "key": tf.constant(key)}


def gradients(score: str, arrays: Arrays) -> Arrays:
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        operands = (arrays[name] for name in ("query", "key", "value"))
        loss = tf.reduce_sum(ats.attend(*operands, score=SCORES[score](arrays), valid_lens=LENS) ** 3)
    found: Arrays = tape.gradient(loss, arrays)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str, is_known: bool) -> None:
    """They equal an eager call's without such rows, in a graph that knows all sizes and in one that does not."""
    arrays = draw(score)
    own = {"query", "key", "value"}
    specs = {
        name: tf.TensorSpec(x.shape if is_known or name not in own else (None, None, x.shape[-1]), x.dtype)
        for name, x in arrays.items()
    }
    found = tf.function(lambda arrays: gradients(score, arrays), input_signature=[specs])(with_nonfinite(arrays))
    exact = gradients(score, arrays)
    assert_each_close([found[name].numpy() for name in arrays], [exact[name].numpy() for name in arrays], 1e-11)


@pytest.mark.parametrize("dirty", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["matrix", "bias"])
@pytest.mark.slow_rows("matrix-*", "bias-finite", "bias-nonfinite")
def test_a_product_leaves_rows_out(has_bias: bool, dirty: bool) -> None:
    """Also those that pass on a gradient: each gives 0 to all arrays."""
    clean, matrix, bias, grad = (RNG.standard_normal(shape) for shape in ((3, 4, 5), (5, 6), (6,), (3, 4, 6)))
    kept = np.ones((3, 4, 1), bool)
    x = clean.copy()
    if dirty:
        x[0, 1, 2], x[2, 3, 0], kept[0, 1], kept[2, 3] = np.nan, np.inf, False, False
    arrays = [tf.constant(a) for a in ((x, matrix, bias) if has_bias else (x, matrix))]

    @tf.function
    def program(*arrays: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            found = backends.load("tensorflow").product_of_rows(*arrays)
        return found, tape.gradient(found, arrays, output_gradients=tf.constant(grad))

    found, (of_x, of_matrix, *of_bias) = program(*arrays)
    product = clean @ matrix + (bias if has_bias else 0)
    assert_each_close([np.where(kept, found, 0)], [np.where(kept, product, 0)], 1e-12)
    assert not dirty or not np.isfinite(found.numpy()[~kept[..., 0]]).all(-1).any()
    own = np.where(kept, grad, 0)
    exact = [own @ matrix.T, np.einsum("abx,aby->xy", np.where(kept, clean, 0), own)]
    assert_each_close([g.numpy() for g in (of_x, of_matrix)], exact, 1e-12)
    if has_bias:
        assert_each_close([of_bias[0].numpy()], [own.sum((0, 1))], 1e-12)


def test_second_derivatives_of_a_product() -> None:
    # The result is a product of nine factors: halves keep it far below the digits that are compared.
    x, matrix = (tf.constant(RNG.standard_normal(shape) / 2) for shape in ((2, 3, 4), (4, 5)))
    ops = backends.load("tensorflow")

    def second(product: Callable[[Any, Any], Any], x: Any, matrix: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch([x, matrix])
            with tf.GradientTape() as tape:
                tape.watch([x, matrix])
                loss = tf.reduce_sum(product(x, matrix) ** 3)
            squares = sum(tf.reduce_sum(g**2) for g in tape.gradient(loss, [x, matrix]))
        return outer.gradient(squares, [x, matrix])

    found = tf.function(lambda x, matrix: second(ops.product_of_rows, x, matrix))(x, matrix)
    exact = second(tf.matmul, x, matrix)
    assert_each_close([g.numpy() for g in found], [g.numpy() for g in exact], 1e-11)


def test_a_forward_graph_looks_for_no_nan() -> None:
    @tf.function
    def call(query: Any, key: Any, weight: Any) -> Any:
        return ats.attend(query, key, key, score=ats.Bilinear(weight))

    graph = call.get_concrete_function(*(tf.TensorSpec(shape) for shape in ((4, 2, 6), (4, 5, 6), (6, 6)))).graph
    assert not [operation for operation in graph.get_operations() if operation.type == "IsFinite"]


# The product of an eager call: few rows and many, with several axes in front.
ROWS = {"few": (2, 1), "many": (3, 5), "one": (1, 1), "none": (0, 4), "heads": (2, 3, 4), "six axes": (1, 2, 1, 2, 3)}


@pytest.mark.parametrize("watched", ["both", "rows", "matrix", "none"])
@pytest.mark.parametrize("rows", ROWS)
def test_an_eager_product_is_that_of_tensorflow(rows: str, watched: str) -> None:
    """With first and second derivatives, of what is watched alone, and tangents."""
    x, matrix = tf.constant(RNG.standard_normal((*ROWS[rows], 7))), tf.constant(RNG.standard_normal((7, 6)))
    ops = backends.load("tensorflow")

    def found(product: Callable[..., Any]) -> Any:
        of = {"both": [x, matrix], "rows": [x], "matrix": [matrix], "none": []}[watched]
        with tf.GradientTape() as outer:
            outer.watch(of)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(of)
                out = product(x, matrix)
            first = tape.gradient(out, [x, matrix], output_gradients=tf.sin(out))
            total = tf.add_n([tf.reduce_sum(grad**3) for grad in first if grad is not None] or [tf.reduce_sum(out)])
        second = outer.gradient(total, [x, matrix])
        again = tape.gradient(out, [x, matrix], output_gradients=tf.sin(out))
        with tf.autodiff.ForwardAccumulator([x, matrix], [tf.cos(x), tf.cos(matrix)]) as accumulator:
            tangent = accumulator.jvp(product(x, matrix))
        return out, *first, *second, *again, tangent

    for got, wanted in zip(found(ops.matmul), found(tf.matmul), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_eager_product_keeps_its_dtype(dtype: str) -> None:
    x, matrix = (tf.cast(RNG.standard_normal(shape), dtype) for shape in ((3, 5, 7), (7, 6)))
    found = backends.load("tensorflow").matmul(x, tf.Variable(matrix))
    assert found.dtype == dtype
    np.testing.assert_allclose(
        tf.cast(found, "float64"), tf.cast(tf.matmul(x, matrix), "float64"), rtol=2e-2, atol=2e-2
    )
