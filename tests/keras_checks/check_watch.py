"""Watching Keras models on this process's backend: calls, ``fit``, ``predict``, names, PyTorch's numbers."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from together import BACKEND

import attnscore as ats
from attnscore import api
from attnscore.diagnostics import qk_clip, reset_heads, watch
from attnscore.diagnostics.callbacks import HeadLog, KerasCallback
from attnscore.diagnostics.watching import rebinding, staged
from attnscore.diagnostics.watching.remedies import REMEDIES
from attnscore.errors import ArgumentError
from attnscore.layers.keras import MultiHeadAttention
from watch_models import BREAKS_AT, FAULTS, STEPS, assert_same_rows, failures, failures_of_pytorch, torch_rows

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6, 16)).astype("float32"), np.zeros((8, 6, 2), "float32")
NAMES = ["multi_head", "grouped", "attention", "additive", "ours"]


@pytest.fixture(autouse=True)
def restored():
    methods = keras.layers.Layer.__call__, keras.ops.dot_product_attention, api.attend
    yield
    assert methods == (keras.layers.Layer.__call__, keras.ops.dot_product_attention, api.attend)
    assert not staged._WATCHES and not staged._RUNS and not rebinding.ACTIVE


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 16))
    x = keras.layers.MultiHeadAttention(4, 4, name="multi_head")(x, x, use_causal_mask=True)
    x = keras.layers.GroupQueryAttention(4, 4, 2, name="grouped")(x, x)
    x = keras.layers.Attention(name="attention")([x, x])
    x = keras.layers.AdditiveAttention(name="additive")([x, x])
    x = MultiHeadAttention(16, 4, name="ours")(x, x, x)
    made = keras.Model(inputs, keras.layers.Dense(2)(x))
    made.compile("sgd", "mse")
    return made


def test_calls_and_compiled_functions_have_the_same_numbers() -> None:
    watched = model()
    before = watched.predict(X, verbose=0)
    with watch(watched) as eager:
        called = keras.ops.convert_to_numpy(watched(X))
    with watch(watched) as seen:
        during = watched.predict(X, verbose=0)
    assert np.array_equal(before, during) and np.array_equal(before, watched.predict(X, verbose=0))
    np.testing.assert_allclose(called, before, atol=1e-5)
    assert list(seen.layers) == list(eager.layers) == NAMES and not seen.unseen and not eager.unseen
    assert [layer.heads for layer in seen.layers.values()] == [4, 4, 1, 1, 4]
    assert (seen.steps, eager.steps) == (1, 1)
    assert_same_rows(seen.rows(), eager.rows())


def test_fit_is_the_same_and_its_steps_are_sampled() -> None:
    trained = []
    for is_watched in (False, True):
        watched, rows = model(), []
        seen = watch(watched, every=3, on_step=lambda step, new, rows=rows: rows.append((step, len(new))))
        if is_watched:
            seen.start()
        watched.fit(X, Y, epochs=2, batch_size=2, verbose=0, shuffle=False)
        if is_watched:
            seen.stop()
            watched.fit(X, Y, epochs=1, batch_size=2, verbose=0, shuffle=False, initial_epoch=1)
        trained.append(watched.get_weights())
    for x, y in zip(*trained, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert rows == [(0, 14), (3, 14), (6, 14)] and (seen.steps, seen.sampled) == (8, 3) and not seen.unseen


def attend_alike(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A layer of Keras that is called on X, and the rows of PyTorch with its queries and keys."""
    query = X.reshape(8, 6, 4, 4)
    if name == "dot":
        layer = keras.layers.Attention()
        return lambda: layer([X, X]), torch_rows(X[:, :, None], X[:, :, None], scale=1.0)
    if name == "function":
        return lambda: keras.ops.dot_product_attention(query, query, query, is_causal=True), torch_rows(
            query, query, is_causal=True
        )
    mask = RNG.random((8, 6, 6)) > 0.3
    mask[0, 1] = False
    if name == "masked function":
        return (
            lambda: keras.ops.dot_product_attention(query, query, query, mask=mask[:, None]),
            torch_rows(query, query, attn_mask=mask[:, None]),
        )
    layer = keras.layers.MultiHeadAttention(4, 4, dropout=0.5 if "dropout" in name else 0.0)
    layer(X, X)
    projections = (layer.query_dense, layer.key_dense, layer.value_dense)
    weights = ([np.array(x) for x in part.get_weights()] for part in projections)
    q, k, v = (np.einsum("bti,ihd->bthd", X, w) + b for w, b in weights)
    return lambda: layer(X, X, attention_mask=mask), torch_rows(q, k, value=v, attn_mask=mask[:, None])


@pytest.mark.parametrize("name", ["dot", "function", "masked function", "layer", "layer with dropout"])
def test_numbers_are_those_of_pytorch(name: str) -> None:
    call, expected = attend_alike(name)

    class Model(keras.Model):
        def call(self, x: Any) -> Any:
            return call()

    watched = Model()
    with watch(watched) as seen:
        watched(X)
    assert not seen.unseen
    assert_same_rows(seen.rows(), expected, 1e-4)


def test_padding_is_known_from_the_mask_of_the_model() -> None:
    tokens = np.array([[1, 1, 1, 0, 0, 0]] * 8)

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(1, 4)

        def call(self, inputs: Any) -> Any:
            return self.attention(inputs["x"], inputs["x"])

    watched = Model()
    watched({"x": X, "padding_mask": tokens})
    with watch(watched) as seen:
        watched({"x": X, "padding_mask": tokens})
    assert [row["rows"] for row in seen.rows()] == [24] and 0.3 < seen.rows()[0]["padding"] < 0.7
    # In masked modelling it marks the tokens that are hidden.
    with watch(watched) as seen:
        watched({"x": X, "mask": tokens})
    assert [row["rows"] for row in seen.rows()] == [48] and not seen.failing() and seen.unchecked_padding == "mask"


def test_what_cannot_be_recorded_is_counted(monkeypatch) -> None:
    layer = keras.layers.MultiHeadAttention(1, 4, attention_axes=(1, 2))

    class Model(keras.Model):
        def call(self, x: Any) -> Any:
            x = keras.ops.reshape(x, (8, 2, 3, 16))
            ats.attend(x, x, x, normalizer="sparsemax")
            return layer(x, x)

    watched = Model()
    expected = keras.ops.convert_to_numpy(watched(X))
    with watch(watched) as seen:
        assert np.array_equal(keras.ops.convert_to_numpy(watched(X)), expected)
    reasons = " ".join(why for _, why in seen.unseen)
    assert not seen.layers and "2 axes" in reasons and "softmax" in reasons


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA calls back on JAX; PyTorch has no XLA")
def test_a_function_that_xla_compiles_is_counted() -> None:
    import tensorflow as tf

    watched = model()
    function = tf.function(lambda x: watched(x, training=False), jit_compile=True)
    with watch(watched) as seen:
        function(X)
    assert not seen.layers and [why for _, why in seen.unseen] == [
        "a function compiled with jit_compile=True, which calls nothing outside"
    ]


def test_the_callback_watches_fit_and_leaves_the_validation_out() -> None:
    written: list[tuple[int, dict[str, float]]] = []
    losses: list[float] = []
    callback = KerasCallback(lambda numbers, step: written.append((step, numbers)), every=2)
    callback._take_loss = losses.append  # type: ignore[method-assign]
    watched = model()
    watched.fit(X, Y, epochs=2, batch_size=2, verbose=0, validation_data=(X, Y), callbacks=[callback])
    assert [step for step, _ in written] == [0, 2, 4, 6] and len(losses) == 8
    assert callback.seen.steps == 8 and not callback.seen._running
    assert set(written[0][1]) == {
        f"attention/{name}"
        for name in ("failing_heads", "worst/max_logit", "worst/entropy", "worst/saturated_rows", "worst/nan_rows")
    }


@pytest.mark.parametrize("hook", ["on_train_begin", "on_train_batch_end", "on_test_begin"])
def test_an_exception_in_fit_leaves_nothing_running(hook: str) -> None:
    class Stops(keras.callbacks.Callback):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    setattr(Stops, hook, stop)
    watched, callback = model(), KerasCallback(every=1)
    watched.compile("sgd", "mse", jit_compile=BACKEND != "torch")
    with pytest.raises(KeyboardInterrupt):
        watched.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y), callbacks=[callback, Stops()])
    steps, was_compiled = callback.seen.steps, BACKEND != "torch"
    assert steps == {"on_train_begin": 0, "on_train_batch_end": 1, "on_test_begin": 2}[hook]
    assert watched.jit_compile == was_compiled and watched.train_function is None and not rebinding.ACTIVE
    watched(X)
    assert callback.seen.steps == steps
    watched.fit(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    assert callback.seen.steps == steps + 2 and watched.jit_compile == was_compiled and not rebinding.ACTIVE


def test_a_fit_inside_of_a_fit_and_an_evaluation_end_their_own_watch() -> None:
    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model().fit(X, Y, verbose=0, callbacks=[inner])

    watched, callback, inner = model(), KerasCallback(every=1), KerasCallback(every=1)
    watched.fit(X, Y, epochs=2, batch_size=4, verbose=0, callbacks=[callback, Inner()])
    watched.evaluate(X, Y, verbose=0, callbacks=[callback])
    assert (callback.seen.steps, inner.seen.steps) == (4, 1) and not rebinding.ACTIVE


def test_the_callback_ends_a_training_that_fails() -> None:
    watched = model()
    watched.get_layer("multi_head").query_dense.kernel.assign(1e3 * np.ones((16, 4, 4)))
    callback = KerasCallback(every=1, stop=True)
    history = watched.fit(X, Y, epochs=5, batch_size=8, verbose=0, callbacks=[callback])
    assert len(history.history["loss"]) == 1 and callback.seen.failing()
    assert isinstance(callback._log, HeadLog)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_fault_gets_the_verdict_that_it_gets_in_pytorch(fault: str) -> None:
    layer, x = keras.layers.MultiHeadAttention(2, 4), RNG.normal(size=(4, 16, 8)).astype("float32")
    layer(x, x)
    parts = {"query": layer.query_dense, "key": layer.key_dense, "value": layer.value_dense}
    for part in parts.values():
        part.bias.assign(RNG.normal(size=(2, 4)) / 4)
    projections = {name: tuple(np.array(x) for x in part.get_weights()) for name, part in parts.items()}
    with watch(layer) as seen:
        for step in range(STEPS):
            if step == BREAKS_AT:
                layer.query_dense.kernel.assign(FAULTS[fault](projections["query"][0]))
            layer(x, x)
    expected = failures_of_pytorch(fault, x, projections)
    assert failures(seen) == expected and expected[0][0] == 1 and expected[0][2] == BREAKS_AT


class Block(keras.layers.Layer):
    """A layer that is no model, around an attention layer of one's own or of Keras."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        if kind == "own":
            self.q_proj, self.k_proj, self.v_proj = (keras.layers.Dense(16) for _ in "qkv")
        elif kind == "grouped":
            self.attention = keras.layers.GroupQueryAttention(4, 4, 2)
        else:
            self.parts = [keras.layers.MultiHeadAttention(4, 4, use_bias=kind == "biases")]

    def call(self, x: Any) -> Any:
        if hasattr(self, "attention"):
            return self.attention(x, x)
        if hasattr(self, "parts"):
            return self.parts[0](x, x)
        q, k, v = (keras.ops.reshape(layer(x), (-1, 32, 4, 4)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return keras.ops.reshape(keras.ops.dot_product_attention(q, k, v), (-1, 32, 16))


def _run_printed_line(seen: Any, model: Any) -> str:
    line = str(seen).split("    try: ")[1].splitlines()[1].strip()
    exec(line, {"model": model, "seen": seen, "qk_clip": qk_clip, "reset_heads": reset_heads})
    return line


@pytest.mark.parametrize("kind", ["biases", "no biases", "grouped", "own"])
def test_the_printed_line_changes_the_head(kind: str) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32, 16))
    x = np.random.default_rng(0).normal(size=(4, 32, 16)).astype("float32")
    model = keras.Model(inputs, keras.layers.Dense(2)(Block(kind, name="block")(inputs)))
    block = model.get_layer("block")
    first = block.q_proj if kind == "own" else block.attention._query_dense if kind == "grouped" else None
    query = block.parts[0].query_dense if first is None else first
    of_head = np.arange(16) // 4 == 1 if kind == "own" else (np.arange(4) == 1)[:, None] | np.zeros(4, bool)

    def multiply(factor: float) -> None:
        for each in query.weights:
            each.assign(np.where(of_head, factor, 1.0) * keras.ops.convert_to_numpy(each))

    with watch(model) as seen:
        for step in range(6):
            if step == 3:
                multiply(60.0)
            model.predict(x, verbose=0)
    assert seen.verdicts()[0].cause == "weights of one head too large" and seen.failing()[0][1] == 1
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    tau = float(_run_printed_line(seen, model).partition("tau=")[2].partition(",")[0])
    with watch(model) as seen:
        model.predict(x, verbose=0)
    after = {row["head"]: row["max_logit"] for row in seen.last()}
    assert after[1] == pytest.approx(tau, rel=1e-3) and tau < before[1] / 2
    for head in (0, 2, 3):
        assert after[head] == pytest.approx(before[head], rel=1e-4)
    multiply(0.0)
    with watch(model) as seen:
        for _ in range(3):
            model.predict(x, verbose=0)
    assert [head for _, head in seen.failing()] == [1]
    if kind == "grouped":  # a key belongs to other heads too
        with pytest.raises(ArgumentError, match=r"all heads that share a key with head 1: \[0\] too"):
            _run_printed_line(seen, model)
        return
    _run_printed_line(seen, model)
    with watch(model) as seen:
        model.predict(x, verbose=0)
    assert not seen.failing()


@pytest.mark.parametrize("cause", [cause for cause, remedy in REMEDIES.items() if "{heads}" not in remedy.torch])
def test_every_other_line_of_a_remedy_runs(cause: str) -> None:
    remedy, ids = REMEDIES[cause], keras.ops.convert_to_tensor([[1, 2, 0]])
    x, array = keras.ops.ones((1, 3, 8)), keras.ops.ones((1, 3, 2, 4))
    inputs = keras.Input((8,))
    layer, policy = keras.layers.MultiHeadAttention(2, 4), keras.config.dtype_policy()
    scaled = MultiHeadAttention(8, 2, score="cosine")
    scaled(x, x, x)

    def attention(x: Any, *more: Any, **options: Any) -> Any:
        return layer(x, *(more or (x,)), **options)

    names = {
        "keras": keras, "model": keras.Model(inputs, keras.layers.Dense(1)(inputs)), "loss": "mse", "rate": 0.1,
        "steps": 100, "attention": attention, "norm": lambda x: x, "x": x, "q": array, "k": array, "v": array,
        "ids": ids, "real": ids != 0, "mask": (ids != 0)[:, None], "attend": ats.attend, "SoftCap": ats.SoftCap,
        "sink": keras.ops.zeros((3,)), "math": math, "layer": scaled,
    }  # fmt: skip
    try:
        exec((remedy.keras or remedy.torch).format(tau=10.0), names)
    finally:
        keras.config.set_dtype_policy(policy)


def test_a_mask_by_another_name_is_said() -> None:
    class Model(keras.Model):
        def call(self, x: Any, pad: Any = None) -> Any:
            return ats.attend(x, x, x)

    watched, pad = Model(), np.zeros((8, 6), bool)
    with watch(watched) as seen:
        watched(X, pad)
    assert seen.unchecked_padding == "pad" and "'pad'" in str(seen) and "attention_mask" in str(seen)
    with watch(watched) as seen:
        watched(X)
    assert seen.unchecked_padding is None


def of_default_names(masked: list[bool], lengths: list[int]) -> list[str]:
    """Return the causes in layers with the names that Keras gives, some under a causal mask."""
    inputs = [keras.Input((length, 16)) for length in lengths]
    outs = []
    for number, (x, is_masked) in enumerate(zip(inputs, masked, strict=True)):
        layer = keras.layers.MultiHeadAttention(2, 8, name="multi_head_attention" + f"_{number}" * (number > 0))
        outs.append(layer(x, x, use_causal_mask=is_masked))
    made = keras.Model(inputs, [keras.layers.GlobalAveragePooling1D()(x) for x in outs])
    with watch(made) as seen:
        made([RNG.normal(size=(4, length, 16)).astype("float32") for length in lengths])
    return sorted({f"{verdict.layer}: {verdict.cause}" for verdict in seen.verdicts() if verdict.failure})


def test_the_first_layer_of_default_names_is_of_the_same_kind() -> None:
    assert of_default_names([False, True, True, True], [6] * 4) == ["multi_head_attention: no causal mask"]
    assert of_default_names([False, True, True, True], [9, 6, 6, 6]) == [], "an encoder beside a decoder"
    assert of_default_names([True, False], [6, 6]) == [], "as in a decoder whose second layer reads an encoder's output"


def test_a_lost_mask_of_padding_is_no_missing_causal_one() -> None:
    words = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(20, 16, mask_zero=True, embeddings_initializer="normal")(words)
    for number in range(2):
        # A plain sum loses Keras's mask.
        x = x + keras.layers.MultiHeadAttention(2, 8, name="multi_head_attention" + "_1" * number)(x, x)
    made = keras.Model(words, keras.layers.GlobalAveragePooling1D()(x))
    ids = RNG.integers(1, 20, (6, 5)) * (np.arange(5) < np.array([1, 1, 2, 3, 4, 5])[:, None])
    with watch(made) as seen:
        made(ids)
    assert len(seen.layers) == 2 and "no causal mask" not in {verdict.cause for verdict in seen.verdicts()}
