"""The Keras layers in models, on this process's backend: masks, symbolic calls, training, files, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from together import BACKEND, SHOWN, close, gradients, quick, slow_on_jax

import attnscore as ats
from attnscore import backends
from attnscore.layers.keras import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)

IDS = np.array([[3, 4, 5, 0, 0], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [6, 7, 8, 9, 1]])
OTHERS = np.array([[1, 2, 0], [3, 4, 5], [6, 7, 8], [9, 0, 0]])
X = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
SQUARE = np.eye(6, dtype="float32")

MAKERS: dict[str, Callable[..., Any]] = {
    "dot": lambda **more: DotProductAttention(scaled=False, **more),
    "additive": lambda **more: AdditiveAttention(7, query_size=6, kernel_regularizer="l2", **more),
    "bilinear": lambda **more: BilinearAttention(key_size=6, **more),
    "gaussian": lambda **more: GaussianAttention(0.7, learn_bandwidth=True, **more),
    "heads": lambda **more: MultiHeadAttention(
        8,
        4,
        score="additive",
        score_hiddens=3,
        num_key_value_heads=2,
        bias=True,
        kernel_initializer="he_normal",
        **more,
    ),
    "sigmoid": lambda **more: DotProductAttention(normalizer="sigmoid", **more),
    "entmax": lambda **more: MultiHeadAttention(8, 4, normalizer=ats.Entmax(1.2), **more),
}
every_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Translator(keras.Model):
    """A subclassed model that calls the layer in one of the three ways."""

    def __init__(self, attention: Any, way: str) -> None:
        super().__init__()
        self.read = keras.layers.Embedding(10, 6, mask_zero=True)
        self.ask = keras.layers.Embedding(10, 6, mask_zero=True)
        self.attention, self.way = attention, way

    def call(self, inputs: Any) -> Any:
        return WAYS[self.way](self.attention, self.ask(inputs[0]), self.read(inputs[1]))


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "three": lambda layer, q, k: layer(q, k, k),
    "list of two": lambda layer, q, k: layer([q, k]),
    "list of three": lambda layer, q, k: layer([q, k, k]),
}


def functional(attention: Any, way: str, longest: int | None = None, *heads: Any) -> Any:
    i, j = (keras.Input((longest,), dtype="int32") for _ in range(2))
    q, k = (keras.layers.Embedding(10, 6, mask_zero=True, name=name)(x) for name, x in (("ask", i), ("read", j)))
    out = WAYS[way](attention, q, k)
    for head in heads:
        out = head(out)
    return keras.Model([i, j], out)


class TestMasksOfAnEmbedding:
    @pytest.mark.parametrize("way", quick(tuple(WAYS), among=WAYS, on_jax=("list of three",)))
    @pytest.mark.parametrize("build", [functional, Translator], ids=["functional", "subclassed"])
    def test_arrive(self, build: Callable[[Any, str], Any], way: str) -> None:
        layer = BilinearAttention()
        model = build(layer, way)
        out = model([IDS, OTHERS])
        weights = SHOWN(layer.attention_weights)
        assert np.array_equal(weights > 0, (IDS > 0)[:, :, None] & (OTHERS > 0)[:, None, :])
        assert not SHOWN(out)[IDS == 0].any()
        assert not np.isnan(SHOWN(out)).any()
        close(model.predict([IDS, OTHERS], verbose=0), out)

    def test_of_keys_and_values_that_differ(self) -> None:
        layer = MultiHeadAttention(8, 2)
        shown, also = OTHERS > 0, np.array([[True, False, True]])
        q, k = np.ones((4, 5, 6)), np.ones((4, 3, 6))
        layer(q, k, k, keys_mask=shown, values_mask=also, queries_mask=IDS > 0)
        wanted = (shown & also)[:, None, None, :] & (IDS > 0)[:, None, :, None]
        assert np.array_equal(SHOWN(layer.attention_weights) > 0, wanted.repeat(2, 1))

    def test_go_on_to_the_next_layer(self) -> None:
        """The output has the mask of the queries; one layer after another sees it."""
        first, second = BilinearAttention(), BilinearAttention()
        i = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(10, 6, mask_zero=True)(i)
        y = second([first([x, x]), x])
        keras.Model(i, y)(IDS)
        assert np.array_equal(SHOWN(second.attention_weights).any(-1), IDS > 0)
        assert first.supports_masking
        mask = IDS > 0
        assert first.compute_mask([X, X], [mask, None]) is mask
        assert first.compute_mask([X, X], None) is None and first.compute_mask(X, mask) is mask

    @slow_on_jax
    def test_beside_others(self) -> None:
        """An Embedding's mask, lengths, an array, causal: only what all of them show is seen."""
        layer, embed = DotProductAttention(), keras.layers.Embedding(10, 6, mask_zero=True)
        x = embed(np.array([[1, 2, 0, 4, 5]]))
        holes = np.ones((5, 5), bool)
        holes[3, 0] = False
        for mask in (holes, ats.Dense(holes), ats.Dense(holes) & ats.SlidingWindow(left=4)):
            layer(x, x, x, valid_lens=[4], attention_mask=mask, use_causal_mask=True)
            wanted = np.tri(5, dtype=bool) & holes
            wanted[2], wanted[:, 2], wanted[:, 4] = False, False, False
            assert np.array_equal(SHOWN(layer.attention_weights)[0] > 0, wanted)


class TestSymbolicCalls:
    @pytest.mark.parametrize("kind", quick(tuple(MAKERS), among=MAKERS, on_jax=("additive",)))
    def test_shapes_with_unknown_lengths(self, kind: str) -> None:
        q, k, v = (keras.Input((None, 6)) for _ in range(3))
        layer = MAKERS[kind]()
        out, weights = layer(q, k, v, return_attention_scores=True)
        features = 8 if isinstance(layer, MultiHeadAttention) else 6
        assert out.shape == (None, None, features) and out.dtype == "float32"
        assert weights.shape == ((None, 4, None, None) if features == 8 else (None, None, None))
        assert layer([q, k]).shape == layer(q, k).shape == (None, None, features)
        assert layer.compute_output_shape([(2, 3, 6), (2, 5, 6)]) == (2, 3, features)
        assert layer.compute_output_spec([keras.Input((3, 6), batch_size=2), q]).shape == (2, 3, features)
        model = keras.Model([q, k, v], [out, weights])
        got = model([X, X, X])
        assert [tuple(x.shape) for x in got] == [(2, 3, features), (2, 4, 3, 3) if features == 8 else (2, 3, 3)]

    def test_lengths_and_masks_as_inputs(self) -> None:
        x, lens, shown = keras.Input((None, 6)), keras.Input((), dtype="int32"), keras.Input((None, None), dtype="bool")
        layer = MultiHeadAttention(8, 2)
        model = keras.Model([x, lens, shown], layer(x, x, x, valid_lens=lens, attention_mask=shown))
        mask = np.stack([np.tri(3, dtype=bool), np.ones((3, 3), bool)])
        got = model.predict([X, np.array([2, 3]), mask], verbose=0)
        close(got, layer(X, X, X, [2, 3], attention_mask=mask))

    @pytest.mark.slow
    def test_a_mask_of_another_length(self) -> None:
        """For the second size TensorFlow makes a graph that knows no lengths, and learns them when it runs."""
        q, k, shown = keras.Input((None, 6)), keras.Input((None, 6)), keras.Input((None,), dtype="bool")
        layer = DotProductAttention()
        model = keras.Model([q, k, shown], layer(q, k, k, keys_mask=shown))
        for keys in (2, 3):
            mask = np.arange(keys)[None] < [[1], [keys]]
            got = model.predict([X[:, :2], X[:, :keys], mask], verbose=0)
            close(got, layer(X[:, :2], X[:, :keys], X[:, :keys], keys_mask=mask))
        for keys in (2, 1, 4):
            with pytest.raises(Exception, match=rf"expected shape .* = \(2, 3\), got \(2, {keys}\)"):
                model.predict([X[:, :2], X, np.ones((2, keys), bool)], verbose=0)

    def test_mixed_precision(self) -> None:
        x = keras.Input((None, 6))
        assert MultiHeadAttention(8, 2, dtype="mixed_bfloat16")(x, x, x).dtype == "bfloat16"


class TestTraining:
    @pytest.mark.parametrize("kind", quick(("additive",), among=MAKERS))
    def test_fit_reduces_the_loss(self, kind: str) -> None:
        """Find the symbol of the other sequence that stands where the query's does, padding on both sides."""
        keras.utils.set_random_seed(0)
        layer = MAKERS[kind](dropout=0.05, seed=1)
        model = functional(layer, "list of two", 5, keras.layers.Dense(10))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss)
        # Four epochs of ten steps: an epoch takes as long as ten steps. Of the last epoch the mean is compared.
        many, losses = np.tile(IDS, (10, 1)), []
        steps = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        model.fit([many, many], many, 4, epochs=4, shuffle=False, verbose=0, callbacks=[steps])
        assert len(losses) == 40
        assert np.isfinite(losses).all() and losses[-1] < losses[0] / 2
        assert all(np.isfinite(x).all() for x in model.get_weights())

    def test_dropout_of_compiled_and_eager_steps_is_the_same(self) -> None:
        losses = []
        for eager in (False, True):
            keras.utils.set_random_seed(0)
            model = functional(MultiHeadAttention(8, 2, 0.5, seed=1), "three", 5)
            model.compile("sgd", "mse", run_eagerly=eager)
            losses.append([float(model.train_on_batch([IDS, IDS], np.ones((4, 5, 8)))) for _ in range(3)])
        close(losses[0], losses[1], times=256)
        assert len(set(losses[0])) == 3

    @pytest.mark.slow
    def test_mixed_precision(self) -> None:
        keras.utils.set_random_seed(0)
        for policy in ("mixed_bfloat16", "mixed_float16"):
            layer = MultiHeadAttention(8, 2, 0.1, score="gaussian", dtype=policy)
            model = functional(layer, "three", 5, keras.layers.Dense(10, dtype="float32"))
            model.compile(keras.optimizers.Adam(0.03), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            losses = model.fit([IDS, IDS], IDS, epochs=30, verbose=0).history["loss"]
            assert losses[-1] < losses[0] / 2

    # torch's own, where a graph breaks: it asks tensors that are no leaves for a gradient.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.slow
    def test_jit_compile(self) -> None:
        """XLA on TensorFlow and JAX, torch.compile on torch."""
        losses = []
        for jit in (True, False):
            keras.utils.set_random_seed(0)
            model = functional(AdditiveAttention(7), "three", 5)
            model.compile("sgd", "mse", jit_compile=jit)
            losses.append(model.fit([IDS, IDS], np.ones((4, 5, 6)), epochs=3, verbose=0).history["loss"])
        close(losses[0], losses[1], times=256)

    @pytest.mark.slow
    def test_quantised_layers_predict(self) -> None:
        for layer in (AdditiveAttention(7), MultiHeadAttention(8, 2)):
            model = functional(layer, "three", 5)
            before = model.predict([IDS, IDS], verbose=0)
            layer.W_q.quantize("int8"), layer.W_k.quantize("int8")
            if isinstance(layer, AdditiveAttention):
                layer.w_v.quantize("int8")
            after = SHOWN(model([IDS, IDS]))
            assert np.abs(after - before).max() < 0.05


class TestFiles:
    @every_kind
    def test_configuration_there_and_back(self, make: Callable[..., Any]) -> None:
        layer = make(dropout=0.25, seed=3, keep_last=False, name="mine", dtype="mixed_bfloat16")
        config = layer.get_config()
        again = type(layer).from_config(config)
        assert again.get_config() == config
        assert (again.dropout, again.seed, again.keep_last, again.name) == (0.25, 3, False, "mine")
        outer = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert outer.get_config() == config
        assert outer.normalizer == again.normalizer == layer.normalizer
        assert ("normalizer" in config) == (layer.normalizer != "softmax")  # older versions load what they can run

    @pytest.mark.parametrize(
        "make",
        [
            lambda: MultiHeadAttention(
                np.int64(8), np.int32(2), np.float32(0.5), score=ats.SoftCap("dot", np.float32(3))
            ),
            lambda: MultiHeadAttention(8, 2, score=np.int64(2) * ats.Dot() + ats.Gaussian(np.float64(0.5))),
            lambda: AdditiveAttention(np.int16(7), query_size=np.int64(6), keep_last=np.bool_(True)),
            lambda: DotProductAttention(scaled=np.bool_(False), normalizer=ats.Entmax(np.float32(1.25))),
        ],
    )
    def test_a_configuration_of_numpy_scalars_is_plain(self, make: Callable[..., Any]) -> None:
        layer = make()
        again = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
        assert again.get_config() == layer.get_config()
        assert layer(X, X, X).shape == again(X, X, X).shape

    @staticmethod
    def saved(kinds: Iterable[str], path: Path) -> Any:
        """A model of these layers, one on another, and its file."""
        i = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(10, 6, mask_zero=True)(i)
        for kind in kinds:
            x = MAKERS[kind](dropout=0.1, name=kind)([x, x], use_causal_mask=True)
        model = keras.Model(i, x)
        model.save(path)
        return model

    @slow_on_jax
    def test_a_saved_model(self, tmp_path: Path) -> None:
        model = self.saved(("additive", "heads", "entmax"), tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
        close(again(IDS), model(IDS))
        assert again.get_layer("heads").get_config() == model.get_layer("heads").get_config()

    @pytest.mark.slow
    def test_a_saved_model_in_a_fresh_process(self, tmp_path: Path) -> None:
        model = self.saved(MAKERS, tmp_path / "model.keras")
        np.save(tmp_path / "wanted.npy", model.predict(IDS, verbose=0))
        np.save(tmp_path / "ids.npy", IDS)
        code = (
            "import numpy as np, keras, attnscore.layers.keras;"
            "model = keras.saving.load_model('model.keras');"
            "got = model.predict(np.load('ids.npy'), verbose=0);"
            "print(np.abs(got - np.load('wanted.npy')).max())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=dict(os.environ),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) < 1e-6

    def test_weights_by_name(self, tmp_path: Path) -> None:
        """D2L's layer has Dense layers under the same names: its weights load."""

        class Textbook(keras.layers.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.W_q, self.W_k, self.w_v = (keras.layers.Dense(n, use_bias=False) for n in (7, 7, 1))

            def build(self, shape: Any) -> None:
                for dense, size in ((self.W_q, 6), (self.W_k, 6), (self.w_v, 7)):
                    dense.build((None, size))

            def call(self, x: Any) -> Any:
                return x

        Textbook.__name__ = "AdditiveAttention"
        theirs, ours, x = Textbook(), AdditiveAttention(7), keras.Input((None, 6))
        keras.Model(x, theirs(x)).save_weights(tmp_path / "theirs.weights.h5")
        keras.Model(x, ours(x, x, x)).load_weights(tmp_path / "theirs.weights.h5")
        assert np.array_equal(SHOWN(ours.W_k.kernel), SHOWN(theirs.W_k.kernel))
        assert np.array_equal(SHOWN(ours.w_v.kernel), SHOWN(theirs.w_v.kernel))

    if BACKEND == "tensorflow":

        @pytest.mark.slow
        def test_an_exported_model(self, tmp_path: Path) -> None:
            import tensorflow as tf

            model = functional(MultiHeadAttention(8, 2), "three")
            model.export(tmp_path / "model", verbose=False)
            loaded = tf.saved_model.load(tmp_path / "model")
            served = loaded.serve([IDS.astype("int32"), OTHERS.astype("int32")])
            close(served, model([IDS, OTHERS]))


@pytest.mark.parametrize("dtype", ["float32", "float16"] + ["float64"] * (BACKEND != "jax"))
def test_a_call_has_the_dtype_of_the_layer(dtype: str) -> None:
    for layer in (MultiHeadAttention(8, 2, dtype=dtype), AdditiveAttention(7, dtype=dtype)):
        assert keras.backend.standardize_dtype(layer(X, X, X).dtype) == dtype
        assert layer(*(keras.Input((3, 6), dtype=dtype) for _ in range(3))).dtype == dtype


def test_calls_without_the_conversions_of_keras() -> None:
    """``stateless_call`` passes arrays on as they are."""
    arrays = [X.astype("float64") for _ in range(3)]
    for layer in (MultiHeadAttention(8, 2, score="bilinear"), AdditiveAttention(7), DotProductAttention()):
        wanted = layer(*arrays, [3, 2])
        found, _ = layer.stateless_call(layer.trainable_variables, layer.non_trainable_variables, *arrays, [3, 2])
        for out in (found, layer.call(*arrays, [3, 2])):
            assert out.dtype == wanted.dtype
            close(out, wanted)


def test_what_replaces_w_v_is_called() -> None:
    """A bias in it is in all scores of a query, and changes no weight."""
    layer = AdditiveAttention(7)
    layer.w_v = keras.Sequential([keras.layers.Dense(1, bias_initializer="ones")])
    out = layer(X, X, X)
    hidden = keras.ops.tanh(layer.W_q(X)[:, :, None] + layer.W_k(X)[:, None])
    scores = keras.ops.reshape(layer.w_v(keras.ops.reshape(hidden, (2, 9, 7))), (2, 3, 3))
    close(out, keras.ops.matmul(keras.ops.softmax(scores, -1), X))


@pytest.mark.parametrize("name", ["W_q", "W_v"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 8)),
        lambda: keras.Sequential([keras.layers.Dense(8, use_bias=False)]),
    ],
    ids=["EinsumDense", "Sequential"],
)
def test_what_replaces_a_projection_is_called(make: Callable[[], Any], name: str) -> None:
    layer, plain = (MultiHeadAttention(8, 2) for _ in range(2))
    setattr(layer, name, make())
    layer(X, X, X), plain(X, X, X)
    for each in ("W_q", "W_k", "W_v", "W_o"):
        getattr(plain, each).kernel.assign(getattr(layer, each).trainable_variables[0])
    close(layer(X, X, X, [2, 0]), plain(X, X, X, [2, 0]))


def test_projections_that_do_more_than_multiply_are_called() -> None:
    """LoRA, losses of activations and layers of another class; others are multiplied here on TensorFlow."""
    layer, merged = (AdditiveAttention(7) for _ in range(2))
    for each in (layer, merged):
        each(X, X, X)
    layer.W_q.enable_lora(2)
    layer.W_q.lora_kernel_b.assign(np.ones(layer.W_q.lora_kernel_b.shape))
    for name in ("W_q", "W_k", "w_v"):
        getattr(merged, name).kernel.assign(getattr(layer, name).kernel)
    close(layer(X, X, X), merged(X, X, X))
    assert not merged.losses
    merged.W_k.activity_regularizer = keras.regularizers.L2(1.0)
    merged(X, X, X)
    assert len(merged.losses) == 1
    merged.W_k.activity_regularizer = None
    merged.W_q.activation = keras.activations.tanh
    found = keras.ops.convert_to_numpy(merged(X, X, X))
    assert abs(found - keras.ops.convert_to_numpy(layer(X, X, X))).max() > 1e-4


class Learned(keras.layers.Layer):
    """A layer of the user's own, which gives its variables to `attend` as they are."""

    def build(self, shape: Any) -> None:
        self.query = self.add_weight(shape=(1, 2, shape[-1]), name="query")
        self.w_v = self.add_weight(shape=(shape[-1],), name="w_v")
        self.bias = self.add_weight(shape=(2, 1), name="bias", initializer="zeros")
        self.sink = self.add_weight(shape=(), name="sink", initializer="zeros")

    def call(self, x: Any) -> Any:
        return ats.attend(self.query, x, x, score=ats.Additive(self.w_v), bias=self.bias, sink=self.sink)


@pytest.mark.slow
def test_variables_of_a_layer_of_the_users_own_learn() -> None:
    """Eagerly, in a model that is trained, and with the values of the arrays that they hold."""
    layer = Learned()
    found = layer(X)
    read = [backends.variable_value(x) for x in (layer.query, layer.w_v, layer.bias, layer.sink)]
    x = keras.ops.convert_to_tensor(X)
    wanted = ats.attend(read[0], x, x, score=ats.Additive(read[1]), bias=read[2], sink=read[3])
    close(backends.host(found), backends.host(wanted))
    weights, expected = (ats.attention_weights(query, x) for query in (layer.query, read[0]))
    close(backends.host(weights), backends.host(expected))
    softmax, expected = (ats.masked_softmax(x) for x in (layer.query, read[0]))
    close(backends.host(softmax), backends.host(expected))
    cache = ats.KeyValueCache(capacity=2).append(layer.query, layer.query)
    close(backends.host(cache.attend(layer.query)), backends.host(ats.attend(*3 * [read[0]], mask=ats.Causal())))
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    before = [np.array(backends.host(backends.variable_value(x))) for x in layer.trainable_variables]
    model.fit(X, np.ones((2, 1)), epochs=1, verbose=0)
    after = [np.array(backends.host(backends.variable_value(x))) for x in layer.trainable_variables]
    changed = [not np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    # A bias of all keys alike changes no weight.
    assert changed[0] and changed[1] and changed[3]


class Pooled(keras.layers.Layer):
    """A few learned queries for a whole sequence, as a set transformer pools."""

    def build(self, shape: Any) -> None:
        self.query = self.add_weight(shape=(1, 2, shape[-1]), name="query")
        self.pool = MultiHeadAttention(4, 2)

    def call(self, x: Any) -> Any:
        return self.pool(self.query, x, x)


@pytest.mark.slow
def test_learned_queries_of_a_layer_learn() -> None:
    layer = Pooled()
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model(X)
    before = np.array(backends.host(backends.variable_value(layer.query)))
    model.fit(X, np.ones((2, 1)), epochs=1, verbose=0)
    assert not np.array_equal(before, backends.host(backends.variable_value(layer.query)))


@pytest.mark.parametrize(
    "function",
    [
        ats.softmax_jacobian,
        lambda x: ats.softmax_pullback(x, x),
        lambda x: ats.merge(x, X[..., 0] if x is X else keras.Variable(X[..., 0]))[0],
        lambda x: ats.merge([x, x], [x[..., 0], x[..., 1]])[0],
        lambda x: ats.pack(x)[0],
        lambda x: ats.pack([x, x])[0],
        lambda x: ats.unpack(x, [0, 1, 2])[1],
        lambda x: ats.pack_padded(x, [1, 2])[0],
        lambda x: ats.unpack_padded(x, [0, 1, 2]),
        lambda x: ats.prepare_keys(ats.Bilinear(SQUARE if x is X else keras.Variable(SQUARE)), x).key,
    ],
)
def test_variables_go_into_every_function(function: Callable[[Any], Any]) -> None:
    close(backends.host(function(keras.Variable(X))), function(X))


def test_lengths_and_masks_in_variables() -> None:
    lens, mask = np.array([2, 3], np.int32), np.tri(3, dtype=bool)
    variables = [keras.Variable(x, dtype=x.dtype.name, trainable=False) for x in (lens, mask)]
    expected = ats.attend(X, X, X, valid_lens=lens, mask=mask)
    result = ats.attend(*[keras.Variable(X)] * 3, valid_lens=variables[0], mask=variables[1])
    close(backends.host(result), expected)


@pytest.mark.skipif(not hasattr(keras, "RematScope"), reason="an older Keras")
@slow_on_jax
def test_a_layer_that_is_recomputed() -> None:
    plain = AdditiveAttention(7)
    with keras.RematScope():
        recomputed = AdditiveAttention(7)
    plain(X, X, X), recomputed(X, X, X)
    recomputed.set_weights(plain.get_weights())
    found, wanted = (keras.tree.flatten(gradients(layer, (X, X, X), X)) for layer in (recomputed, plain))
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


@pytest.mark.skipif(
    BACKEND != "torch" or not hasattr(keras, "remat"), reason="PyTorch's checkpoints restore its own generator"
)
def test_remat_replays_dropout() -> None:
    import torch

    layer, x = MultiHeadAttention(8, 2, dropout=0.5), torch.tensor(X, requires_grad=True)
    layer(x, x, x)
    leaves = [x, *(variable.value for variable in layer.trainable_variables)]

    def call(x: Any) -> Any:
        return layer(x, x, x, training=True)

    grads = []
    for function in (call, keras.remat(call)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(function(x).square().sum(), leaves))
    torch.testing.assert_close(*grads)
