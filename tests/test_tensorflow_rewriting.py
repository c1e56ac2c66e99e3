"""TensorFlow rewrites graphs that were traced before: loops to batched operations, gradients, saved programs.

The function of one example is traced alone first, as in validation, then runs inside each construct over a batch. Its
derivatives are compared with eager calls of the reference implementation, one for each example, stacked. A derivative
that TensorFlow cannot compute raises: none is silently zero.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import attnscore as ats
from attnscore.backends.tensorflow import graphs

RNG = np.random.default_rng(0)
BATCH, LENGTH, DIM = 3, 5, 4
ARRAYS = tuple(tf.constant(RNG.standard_normal((BATCH, LENGTH, DIM))) for _ in range(3))
ALONG = tuple(tf.constant(RNG.standard_normal(x.shape)) for x in ARRAYS)
Function = Callable[..., Any]

# ------------------------------------------------------------------ calls of one example


def plain(*arrays: Any, **options: Any) -> Any:
    return ats.attend(*arrays, **options)


def masked(*arrays: Any, **options: Any) -> Any:
    return ats.attend(*arrays, mask=ats.Causal() & ats.KeyPadding(np.arange(LENGTH)[None] != 2), **options)


def tensor_lens(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return ats.attend(query, key, value, valid_lens=2 + tf.cast(query[0, 0] > 0, tf.int32), **options)


def dropped(*arrays: Any, **options: Any) -> Any:
    return ats.attend(*arrays, dropout=0.3, seed=5, **options)


def weights(query: Any, key: Any, value: Any, **options: Any) -> Any:
    out, matrix = ats.attend(query, key, value, return_weights=True, **options)
    return out + tf.matmul(matrix**2, value)


def statistics(*arrays: Any, **options: Any) -> Any:
    out, stats = ats.attend(*arrays, return_stats=("entropy", "log_sum_exp"), **options)
    return out * stats.entropy[..., None] + stats.log_sum_exp[..., None]


def additive(query: Any, key: Any, value: Any, **options: Any) -> Any:
    bias = tf.matmul(key, key, transpose_b=True)
    return ats.attend(query, key, value, score=ats.Additive(value[0]), bias=bias, **options)


def gaussian(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return ats.attend(query, key, value, score=ats.Gaussian(1.0 + value[0, 0] ** 2), sink=value[0, 1], **options)


CALLS: list[Function] = [plain, masked, tensor_lens, dropped, weights, statistics, additive, gaussian]
KERNELS = ("auto", "native", "streaming", "dense")

# ------------------------------------------------------------------ constructs around a traced function


def of_each(f: Function, *arrays: Any) -> Any:
    """Return the reference: a call for each example."""
    return tf.stack([f(*(x[i] for x in arrays)) for i in range(BATCH)])


def vectorized(f: Function, *arrays: Any) -> Any:
    return tf.vectorized_map(lambda x: f(*x), arrays)


def vectorized_in_a_graph(f: Function, *arrays: Any) -> Any:
    return tf.function(lambda *x: vectorized(f, *x))(*arrays)


def vectorized_loop(f: Function, *arrays: Any) -> Any:
    return tf.vectorized_map(lambda x: mapped(f, *(part[None] for part in x))[0], arrays)


def vectorized_twice(f: Function, *arrays: Any) -> Any:
    return tf.vectorized_map(lambda x: vectorized(f, *(part[None] for part in x))[0], arrays)


def vectorized_branch(f: Function, *arrays: Any) -> Any:
    def one(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x[0]) > 0, lambda: f(*x), lambda: f(*x) + 0.0)

    return tf.vectorized_map(one, arrays)


def mapped(f: Function, *arrays: Any) -> Any:
    return tf.map_fn(lambda x: f(*x), arrays, fn_output_signature=arrays[0].dtype)


def looped(f: Function, *arrays: Any) -> Any:
    @tf.function
    def loop(*arrays: Any) -> Any:
        outputs = tf.TensorArray(arrays[0].dtype, BATCH, element_shape=(LENGTH, DIM))
        _, outputs = tf.while_loop(
            lambda i, _: i < BATCH, lambda i, x: (i + 1, x.write(i, f(*(part[i] for part in arrays)))), (0, outputs)
        )
        return outputs.stack()

    return loop(*arrays)


def recomputed(f: Function, *arrays: Any) -> Any:
    return of_each(tf.recompute_grad(lambda *x: f(*x)), *arrays)  # noqa: PLW0108 - it takes no tf.function


def vectorized_recomputed(f: Function, *arrays: Any) -> Any:
    return vectorized(tf.function(tf.recompute_grad(lambda *x: f(*x))), *arrays)  # noqa: PLW0108


def with_custom_gradient(f: Function, *arrays: Any) -> Any:
    @tf.custom_gradient
    def one(*x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = f(*x)
        return out, lambda grad: tape.gradient(out, x, grad)

    return of_each(one, *arrays)


def saved(f: Function, *arrays: Any) -> Any:
    return of_each(_reloaded(f), *arrays)


def saved_and_vectorized(f: Function, *arrays: Any) -> Any:
    return vectorized(_reloaded(f), *arrays)


@functools.cache
def _reloaded(f: Function) -> Any:
    module = tf.Module()
    module.call = f
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
    return functools.partial(lambda owner, *x: owner.call(*x), loaded)  # the function alone does not keep its owner


def in_a_model(f: Function, *arrays: Any) -> Any:
    class Layer(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return f(*tf.unstack(x))

    inputs = keras.Input(batch_shape=(3, LENGTH, DIM), dtype="float64")
    model = keras.Model(inputs, Layer(dtype="float64")(inputs))
    return tf.vectorized_map(lambda x: model(tf.stack(x)), arrays)


def compiled(f: Function, *arrays: Any) -> Any:
    return tf.function(lambda *x: vectorized(f, *x), jit_compile=True)(*arrays)


CONSTRUCTS: list[Function] = [
    vectorized, vectorized_in_a_graph, vectorized_loop, vectorized_twice, vectorized_branch, mapped, looped, recomputed,
    vectorized_recomputed, with_custom_gradient, saved, saved_and_vectorized, in_a_model, compiled,
]  # fmt: skip

# ------------------------------------------------------------------ derivatives of a function of the arrays


def gradient(run: Function) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(ARRAYS)
        loss = tf.reduce_sum(run(*ARRAYS) ** 3)
    return tape.gradient(loss, ARRAYS)


def gradient_in_a_graph(run: Function) -> Any:
    def both(*arrays: Any) -> Any:
        return tf.gradients(tf.reduce_sum(run(*arrays) ** 3), arrays)

    return tf.function(both)(*ARRAYS)


def jacobian(run: Function) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(ARRAYS)
        out = run(*ARRAYS)[1:, :2]
    return tape.jacobian(out, ARRAYS)


def batch_jacobian(run: Function) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(ARRAYS)
        out = run(*ARRAYS)
    return tape.batch_jacobian(out, ARRAYS[1])


def second(run: Function) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(ARRAYS)
        slope = gradient(run)
        loss = sum(tf.reduce_sum(x * y) for x, y in zip(slope, ALONG, strict=True))
    return tape.gradient(loss, ARRAYS)


def hessian(run: Function) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(ARRAYS)
        slope = gradient(run)[0][0, :1]
    return tape.jacobian(slope, ARRAYS)


def forward(run: Function) -> Any:
    with tf.autodiff.ForwardAccumulator(ARRAYS, ALONG) as accumulator:
        out = run(*ARRAYS)
    return accumulator.jvp(out)


def forward_over_reverse(run: Function) -> Any:
    with tf.autodiff.ForwardAccumulator(ARRAYS, ALONG) as accumulator:
        slope = gradient(run)
    return [accumulator.jvp(x) for x in slope]


DERIVATIVES: list[Function] = [
    gradient, gradient_in_a_graph, jacobian, batch_jacobian, second, hessian, forward, forward_over_reverse
]  # fmt: skip


# ------------------------------------------------------------------ the comparison


@functools.cache
def _traced(call: Function, kernel: str) -> Any:
    f = tf.function(lambda *x: call(*x, kernel=kernel))
    f(*(x[0] for x in ARRAYS))
    return f


@functools.cache
def _expected(derivative: Function, call: Function) -> Any:
    return derivative(lambda *x: of_each(lambda *x: call(*x, kernel="dense"), *x))


def _compare(construct: Function, derivative: Function, call: Function, kernel: str) -> None:
    found = derivative(lambda *x: construct(_traced(call, kernel), *x))
    for x, expected in zip(tf.nest.flatten(found), tf.nest.flatten(_expected(derivative, call)), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "construct,derivative,call,kernel",
    [
        (vectorized, gradient, plain, "auto"),
        pytest.param(vectorized, gradient, plain, "native", marks=pytest.mark.slow),
        pytest.param(vectorized, batch_jacobian, plain, "native", marks=pytest.mark.slow),
        pytest.param(vectorized, gradient, statistics, "native", marks=pytest.mark.slow),
        pytest.param(vectorized, gradient, dropped, "native", marks=pytest.mark.slow),
        pytest.param(vectorized, gradient, masked, "auto", marks=pytest.mark.slow),
        pytest.param(vectorized_loop, gradient, plain, "native", marks=pytest.mark.slow),
        pytest.param(looped, gradient, masked, "native", marks=pytest.mark.slow),
        pytest.param(saved, gradient, plain, "native", marks=pytest.mark.slow),
        pytest.param(vectorized_recomputed, gradient, plain, "native", marks=pytest.mark.slow),
        pytest.param(in_a_model, gradient, plain, "native", marks=pytest.mark.slow),
    ],
)
def test_derivatives_of_graphs_that_are_rewritten(
    construct: Function, derivative: Function, call: Function, kernel: str
) -> None:
    if kernel == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))
    _compare(construct, derivative, call, kernel)


DRAWN = random.Random(0).sample([*itertools.product(CONSTRUCTS, DERIVATIVES, CALLS, KERNELS)], 24)


@pytest.mark.slow
@pytest.mark.parametrize("construct,derivative,call,kernel", DRAWN)
def test_drawn_constructs_are_right_or_raise(
    construct: Function, derivative: Function, call: Function, kernel: str
) -> None:
    """TensorFlow refuses some: it cannot vectorize the gradient of a branch, nor compile a vectorized branch."""
    if kernel == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))
    _expected(derivative, call)
    try:
        _compare(construct, derivative, call, kernel)
    except (ValueError, TypeError, LookupError, RuntimeError, tf.errors.OpError) as error:
        pytest.skip(f"refused: {error}"[:200])


def test_a_callback_of_a_traced_graph_has_a_gradient_when_it_is_vectorized() -> None:
    """In a graph that no tape sees: the loop runs the callback, and its gradient reads no tensor of the first graph."""
    calls: list[int] = []

    def on_host(x: Any, y: Any) -> Any:
        calls.append(1)
        return x * y, x**2

    @tf.function(autograph=False)
    def both(x: Any, y: Any) -> Any:
        product, square = graphs.host_callback(on_host, [((2,), "float64")] * 2, (x, y), lambda x, y: (x * y, x**2))
        return product + square

    x, y = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64), tf.constant([[5.0, 6.0], [7.0, 8.0]], tf.float64)
    both(x[0], y[0])
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        out = tf.vectorized_map(lambda x: both(*x), (x, y))
    np.testing.assert_array_equal(out, x * y + x**2)
    assert len(calls) == 3
    for found, expected in zip(tape.gradient(out, [x, y]), (y + 2 * x, x), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("how", [lambda f: f, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("recompute", [tf.recompute_grad, *([keras.remat] if hasattr(keras, "remat") else [])])
@pytest.mark.slow_rows("*-graph")
def test_a_recomputed_call_drops_the_same_weights(recompute: Any, how: Any) -> None:
    """The output is linear in the values, so the sum of the gradients of the values is the sum of the output."""
    query, value = ARRAYS[0], tf.ones_like(ARRAYS[0])

    def sums(seed: int | None) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            out = recompute(lambda x: ats.attend(query, query, x, dropout=0.5, seed=seed))(value)
        return tf.reduce_sum(out), tf.reduce_sum(tape.gradient(out, value))

    np.testing.assert_allclose(*how(lambda: sums(5))())
    with pytest.raises(ats.FrameworkError, match=r"seed: expected a seed under tf.recompute_grad and keras.remat"):
        how(lambda: sums(None))()


@pytest.mark.slow
def test_a_compiled_function_that_is_vectorized_has_its_gradient_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it loops over tiles XLA differentiates it once more, and TensorFlow drops the gradient."""

    def call(query: Any) -> Any:
        return ats.attend(query, query, query, mask=ats.Causal())

    def gradient_of(around: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tf.reduce_sum(around(x) ** 2)
        return tape.gradient(out, x)

    x = tf.constant(np.random.default_rng(0).standard_normal((3, 1, 40, 4)))
    compiled, expected = tf.function(call, jit_compile=True), gradient_of(call)
    compiled(x[0])
    found = gradient_of(lambda x: tf.vectorized_map(compiled, x))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", 8)
    monkeypatch.setattr("attnscore.base.thresholds.TILE_SCORES", 1)
    looped = tf.function(call, jit_compile=True)
    looped(x[1])
    with pytest.raises(LookupError, match=r"rewritten, which drops the gradient of attend\. Hint: tf.vectorized_map"):
        gradient_of(lambda x: tf.vectorized_map(looped, x))
