"""The Keras layers on this process's backend compute what the PyTorch layers compute in float64."""

from __future__ import annotations

import copy
import doctest
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import torch
from together import (
    BACKEND,
    SHOWN,
    arrays,
    as_given,
    close,
    compare_gradients,
    counterparts,
    gradients,
    quick,
    slow_on_jax,
)

import attnscore as ats
from attnscore.base.thresholds import KEPT_WEIGHTS
from attnscore.layers import keras as layers
from attnscore.layers.keras import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import check_textbook_numbers
from layer_cases import KEYS, LAYERS, MASKS, QUERIES, Case

# One of each layer; on JAX, where each takes a second to compile, that with the most parameters.
QUICK = ("scaled dot", "additive", "bilinear", "gaussian, learned", "heads, additive, 3 hidden")
POLICIES = ("mixed_float16", "mixed_bfloat16", "float16")
EVERY = tuple(case.name for case in LAYERS)
most_layers = pytest.mark.parametrize("case", quick(QUICK, among=LAYERS, on_jax=QUICK[-1:]))
ADDITIVE = next(case for case in LAYERS if case.name == "heads, additive")


@pytest.mark.parametrize("case", quick(EVERY, among=LAYERS, on_jax=QUICK[-1:]))
def test_layer_is_its_torch_counterpart(case: Case) -> None:
    theirs, ours = counterparts(case)
    inputs, (given, _) = case.inputs(), MASKS["composed, and lens"]
    close(ours(*arrays(*inputs), **as_given(given)), theirs(*inputs, **given).detach())
    close(ours.attention_weights, theirs.attention_weights)


@pytest.mark.parametrize("mask", quick(tuple(MASKS), among=MASKS, on_jax=()))
def test_masks(mask: str) -> None:
    theirs, ours = counterparts(ADDITIVE)
    inputs, (given, _) = ADDITIVE.inputs(), MASKS[mask]
    close(ours(*arrays(*inputs), **as_given(given)), theirs(*inputs, **given).detach())
    close(ours.attention_weights, theirs.attention_weights)


@most_layers
def test_gradients(case: Case) -> None:
    theirs, ours = counterparts(case)
    leaves = [x.requires_grad_() for x in case.inputs()]
    compare_gradients(theirs, ours, leaves, MASKS["lens (batch, query), some 0"][0])


@pytest.mark.parametrize("case", quick(QUICK, among=LAYERS, on_jax=()))
def test_what_is_hidden_reaches_nothing(case: Case) -> None:
    """NaN and infinity in padding, and in a query that sees nothing: same output, same gradients; an empty row is 0."""
    _, ours = counterparts(case)
    lens = np.array([[2, 0, 3], [4, 4, 0]])
    q, k, v = (x.numpy().astype("float32") for x in case.inputs())
    bad_q, bad_k, bad_v = q.copy(), k.copy(), v.copy()
    bad_q[0, 1, 0], bad_q[1, 2] = np.nan, np.inf
    bad_k[0, 3:], bad_k[1, 4:, 0] = np.nan, np.inf
    bad_v[0, 3:, 0], bad_v[1, 4:] = np.inf, np.nan
    grad = np.ones(ours.compute_output_shape(q.shape, k.shape, v.shape), "float32")
    out, into_inputs, into_variables = gradients(ours, (q, k, v), grad, valid_lens=lens)
    bad_out, bad_inputs, bad_variables = gradients(ours, (bad_q, bad_k, bad_v), grad, valid_lens=lens)
    for got, want in zip((bad_out, *bad_inputs, *bad_variables), (out, *into_inputs, *into_variables), strict=True):
        close(got, want)
    bias = getattr(getattr(ours, "W_o", None), "bias", None)
    assert not (bad_out[0, 1] - (0 if bias is None else SHOWN(bias))).any()
    assert not bad_inputs[0][0, 1].any()


@pytest.mark.skipif(keras.backend.backend() != "numpy", reason="arrays of other backends are not written to")
def test_weights_are_those_of_the_call_whatever_is_written_afterwards() -> None:
    layer = DotProductAttention()
    q, k, v = (np.random.default_rng(i).standard_normal((2, 70, 4)) for i in range(3))
    mask = np.ones((2, 70, 70), bool)
    layer(q, k, v, attention_mask=mask)
    before = SHOWN(layer.attention_weights).copy()
    q[:], k[:], mask[:] = 0, 0, False
    np.testing.assert_array_equal(SHOWN(layer.attention_weights), before)


@slow_on_jax
def test_lengths_of_zero() -> None:
    for queries, keys, batch in ((0, 5, 2), (3, 0, 2), (3, 5, 0)):
        _, ours = counterparts(ADDITIVE)
        q, k, v = arrays(*ADDITIVE.inputs())
        out = ours(q[:batch, :queries], k[:batch, :keys], v[:batch, :keys])
        assert tuple(out.shape) == (batch, queries, 8)
        assert np.isfinite(SHOWN(out)).all()


@slow_on_jax
def test_one_memory_for_a_batch_of_queries() -> None:
    _, ours = counterparts(ADDITIVE)
    q, k, v = arrays(*ADDITIVE.inputs())
    close(ours(q, k[:1], v[:1], [3]), ours(q, k[:1].repeat(2, 0), v[:1].repeat(2, 0), [3, 3]))
    shown = np.array([[True, False, True, True, False]])
    close(ours(q, k[:1], v[:1], keys_mask=shown), ours(q, k[:1], v[:1], attention_mask=shown[:, None]))
    assert ours.compute_output_shape((1, 3, 6), (None, 5, 7), (None, 5, 4)) == (None, 3, 8)


@slow_on_jax
def test_prepared_keys() -> None:
    _, ours = counterparts(next(case for case in LAYERS if case.name == "additive"))
    q, k, v = arrays(*next(case for case in LAYERS if case.name == "additive").inputs())
    with pytest.raises(ats.ArgumentError, match="prepare_keys: expected a layer with parameters, got one without"):
        AdditiveAttention(4).prepare_keys(k)
    wanted = ours(q, k, v, [2, 3])
    prepared = ours.prepare_keys(keras.ops.convert_to_tensor(k))
    close(ours(q, prepared, v, [2, 3]), wanted)
    assert SHOWN(ours.attention_weights).shape == (*q.shape[:2], k.shape[1])
    features = keras.ops.convert_to_tensor(np.random.default_rng(0).standard_normal(prepared.key.shape), "float32")
    value = keras.ops.convert_to_tensor(v.astype("float32"))
    close(ours(q, prepared + features, v), SHOWN(ats.attend(ours.W_q(q), prepared + features, value)))
    with pytest.raises(ats.FrameworkError, match="AdditiveAttention takes prepared keys"):
        DotProductAttention()(q, prepared, v)


@slow_on_jax
def test_a_list_is_query_value_key() -> None:
    _, ours = counterparts(ADDITIVE)
    q, k, v = arrays(*ADDITIVE.inputs())
    close(ours([q, v, k]), ours(q, k, v))


@slow_on_jax
def test_numbers_of_the_textbook() -> None:
    check_textbook_numbers(layers, np.asarray)


@pytest.mark.parametrize("policy", quick(POLICIES[:2], among=POLICIES, on_jax=()))
def test_precision(policy: str) -> None:
    """Variables, outputs and weights have the dtypes of the policy; at 3000 keys lengths are still whole."""
    dtype = keras.DTypePolicy(policy).compute_dtype
    for case in (ADDITIVE, next(case for case in LAYERS if case.name == "heads, gaussian")):
        theirs, ours = counterparts(case, dtype=policy)
        inputs, (given, _) = case.inputs(), MASKS["lens (batch,)"]
        out, weights = ours(*arrays(*inputs), **as_given(given), return_attention_scores=True)
        assert {keras.backend.standardize_dtype(x.dtype) for x in (out, weights, ours.attention_weights)} == {dtype}
        assert all(x.dtype == keras.DTypePolicy(policy).variable_dtype for x in ours.trainable_variables)
        close(keras.ops.cast(out, "float32"), theirs(*inputs, **given).detach(), dtype, times=4)
    layer, x = DotProductAttention(dtype=policy), np.zeros((1, 3000, 1))
    layer(x[:, :1], x, x, np.array([2049.0]))
    assert (SHOWN(keras.ops.cast(layer.attention_weights, "float32")) > 0).sum() == 2049
    with pytest.raises(ats.MaskError, match="whole"):
        layer(x[:, :1], x, x, np.array([2.5]))


def test_dropout_acts_in_training_alone_and_follows_its_seed() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
    layer, twin = (MultiHeadAttention(8, 2, 0.5, seed=3) for _ in range(2))
    layer(x, x, x), twin(x, x, x)
    twin.set_weights(layer.get_weights())
    first, second = (SHOWN(layer(x, x, x, training=True)) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(SHOWN(twin(x, x, x, training=True)), first)
    assert np.array_equal(SHOWN(twin(x, x, x, training=True)), second)
    close(SHOWN(layer.attention_weights).sum(-1), np.ones((2, 2, 3)))
    assert np.array_equal(SHOWN(layer(x, x, x)), SHOWN(layer(x, x, x, training=False)))
    many = DotProductAttention(0.25, seed=1)(*(np.ones((1, n, 1), "float32") for n in (400, 400, 400)), training=True)
    assert abs(SHOWN(many).mean() - 1) < 0.02


class TestAttentionWeights:
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")

    @pytest.mark.parametrize("case", quick(QUICK, among=LAYERS, on_jax=QUICK[-1:]))
    def test_few_are_computed_in_the_pass(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        _, layer = counterparts(case, dropout=0.5, seed=1)
        inputs, lens, found = arrays(*case.inputs()), np.array([2, 4]), {}
        for few in (KEPT_WEIGHTS, 0):
            monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
            layer(*inputs, lens, training=True)
            assert (layer.__dict__["_last"].computed is not None) == bool(few)
            found[few] = layer.attention_weights
        close(found[KEPT_WEIGHTS], found[0])
        for most in (SHOWN(found[0]).size - 1, SHOWN(found[0]).size):
            monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", most)
            layer(*inputs, lens)
            assert (layer.__dict__["_last"].computed is not None) == (most == SHOWN(found[0]).size)

    @pytest.mark.parametrize("few", [0, KEPT_WEIGHTS])
    def test_are_read_without_a_gradient(self, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
        layer = DotProductAttention()
        if BACKEND == "torch":
            x = torch.tensor(self.x, requires_grad=True)
            layer(x, x, x)
            assert not layer.attention_weights.requires_grad
            wanted = SHOWN(layer.attention_weights).copy()
            layer.attention_weights.zero_()
            assert np.array_equal(SHOWN(layer.attention_weights), wanted)
        elif BACKEND == "tensorflow":
            import tensorflow as tf

            x = tf.constant(self.x)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                layer(x, x, x)
                weights = layer.attention_weights
                late = tf.reduce_sum(layer.attention_weights)
            for read in (weights, late, layer.attention_weights):
                assert tape.gradient(read, x) is None

    @slow_on_jax
    def test_are_the_scores_returned(self) -> None:
        for layer in (AdditiveAttention(4), MultiHeadAttention(8, 2)):
            _, weights = layer(self.x, self.x, self.x, [2, 3], use_causal_mask=True, return_attention_scores=True)
            close(layer.attention_weights, weights)
            close(weights[..., 0, :], np.broadcast_to([1.0, 0, 0], weights[..., 0, :].shape))

    @slow_on_jax
    def test_say_why_there_are_none(self) -> None:
        layer = AdditiveAttention(4)
        with pytest.raises(ats.AttnscoreError, match="none since it was made"):
            _ = layer.attention_weights
        layer(self.x, self.x, self.x)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            close(copied(self.x, self.x, self.x), layer(self.x, self.x, self.x))
        with pytest.raises(ats.AttnscoreError, match="none since it was made, copied"):
            _ = copy.deepcopy(layer).attention_weights
        layer = AdditiveAttention(4, keep_last=False)
        layer(self.x, self.x, self.x)
        with pytest.raises(ats.AttnscoreError, match="keep_last=False"):
            _ = layer.attention_weights

    def test_are_not_kept_in_a_compiled_call(self) -> None:
        x, layer = keras.Input((3, 6)), DotProductAttention()
        model = keras.Model(x, layer(x, x, x))
        model.predict(self.x, verbose=0)
        if BACKEND == "torch":  # runs a model eagerly
            assert tuple(layer.attention_weights.shape) == (2, 3, 3)
        else:
            with pytest.raises(ats.AttnscoreError, match=r"a call outside compiled functions \(fit, .*one inside"):
                _ = layer.attention_weights
        model(self.x)
        assert tuple(layer.attention_weights.shape) == (2, 3, 3)

    @pytest.mark.parametrize("few", [0, KEPT_WEIGHTS])
    def test_do_not_follow_an_optimiser_step(self, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
        layer = BilinearAttention()
        layer(self.x, self.x, self.x)
        before = SHOWN(layer.attention_weights)
        layer.W.assign(layer.W * 3)
        assert np.array_equal(SHOWN(layer.attention_weights), before)


class TestKerasAndTorchCheckpoints:
    def test_of_a_torch_layer_before_and_after_building(self) -> None:
        theirs, ours = counterparts(ADDITIVE)
        q, k, v = arrays(*ADDITIVE.inputs())
        wanted = SHOWN(ours(q, k, v))
        built = MultiHeadAttention(**ADDITIVE.arguments)
        built(q, k, v)
        built.load_torch({name: x.detach().float().numpy() for name, x in theirs.named_parameters()})
        assert np.array_equal(SHOWN(built(q, k, v)), wanted)

    @slow_on_jax
    def test_that_do_not_fit(self) -> None:
        layer = AdditiveAttention(4, key_size=2)
        good = {"W_q.weight": np.ones((4, 3)), "W_k.weight": np.ones((4, 2)), "w_v.weight": np.ones((1, 4))}
        with pytest.raises(
            ats.ArgumentError, match=r"state: expected the names W_k\.weight, W_q\.weight, w_v\.weight, got"
        ):
            layer.load_torch({"W_q.weight": good["W_q.weight"]})
        with pytest.raises(ats.ShapeError, match=r"w_v.weight: expected shape \(1, 4\), got \(1, 5\)"):
            layer.load_torch({**good, "w_v.weight": np.ones((1, 5))})
        layer.load_torch(good)
        with pytest.raises(ats.ShapeError, match=r"keys: expected vectors of length 3, which W_k takes, got 2"):
            AdditiveAttention(4, key_size=3).load_torch(good)


class TestKerasOwnLayers:
    """Where the definitions agree, one stands for the other."""

    rng = np.random.default_rng(0)
    q, v = rng.normal(size=(2, 3, 6)).astype("float32"), rng.normal(size=(2, 5, 6)).astype("float32")
    # A row that sees nothing is where they differ: there Keras attends to the padding.
    masks = (np.array([[True, True, False], [True, False, True]]), np.array([[True, True, True, False, False]] * 2))

    def both(self, theirs: Any, ours: Any, inputs: list[Any], **given: Any) -> None:
        wanted, scores = theirs(inputs, return_attention_scores=True, **given)
        got, weights = ours(inputs, return_attention_scores=True, **given)
        close(got, wanted)
        seen = np.ones((2, 3), bool) if "mask" not in given else given["mask"][0]
        close(SHOWN(weights)[seen], SHOWN(scores)[seen])

    @slow_on_jax
    def test_attention(self) -> None:
        for given in (
            {},
            {"mask": [*self.masks]},
            {"use_causal_mask": True},
            {"mask": [*self.masks], "use_causal_mask": True},
        ):
            for inputs in ([self.q, self.v], [self.q, self.v, self.v * 2]):
                self.both(keras.layers.Attention(), DotProductAttention(scaled=False), inputs, **given)

    @slow_on_jax
    def test_additive_attention(self) -> None:
        theirs, ours = keras.layers.AdditiveAttention(), AdditiveAttention(6)
        theirs([self.q, self.v]), ours([self.q, self.v])
        ours.W_q.kernel.assign(np.eye(6)), ours.W_k.kernel.assign(np.eye(6))
        ours.w_v.kernel.assign(SHOWN(theirs.scale)[:, None])
        self.both(theirs, ours, [self.q, self.v], mask=[*self.masks])

    @slow_on_jax
    def test_multi_head_attention(self) -> None:
        theirs = keras.layers.MultiHeadAttention(2, 4, output_shape=8, bias_initializer="uniform")
        ours = MultiHeadAttention(8, 2, bias=True)
        theirs(self.q, self.v, self.v), ours(self.q, self.v, self.v)
        for mine, other in zip(
            (ours.W_q, ours.W_k, ours.W_v, ours.W_o),
            (theirs.query_dense, theirs.key_dense, theirs.value_dense, theirs.output_dense),
            strict=True,
        ):
            mine.kernel.assign(SHOWN(other.kernel).reshape(mine.kernel.shape))
            mine.bias.assign(SHOWN(other.bias).reshape(-1))
        shown = np.tri(3, 5, 1)[None].repeat(2, 0)
        for given in ({}, {"use_causal_mask": True}, {"attention_mask": shown.astype(bool)}):
            wanted, scores = theirs(self.q, self.v, self.v * 2, return_attention_scores=True, **given)
            got, weights = ours(self.q, self.v * 2, self.v, return_attention_scores=True, **given)
            close(got, wanted)
            close(weights, scores)


@slow_on_jax
def test_whole_numbers_are_a_mask_as_in_keras() -> None:
    layer, x = MultiHeadAttention(8, 2), np.random.default_rng(0).normal(size=(2, 3, 6))
    shown = np.tri(3, dtype="int32")
    wanted = SHOWN(layer(x, x, x, use_causal_mask=True))
    close(layer(x, x, x, attention_mask=shown), wanted)
    close(layer(x, x, x, attention_mask=np.stack([shown, shown])), wanted)
    close(layer(x, x, x, attention_mask=shown.astype(bool).tolist()), wanted)
    per_head = np.stack([shown, shown * 0 + 1])[None].astype(bool)
    layer(x, x, x, attention_mask=per_head)
    assert np.array_equal(SHOWN(layer.attention_weights) > 0, per_head.repeat(2, 0))


@slow_on_jax
def test_examples_in_docstrings() -> None:
    found = doctest.testmod(layers)
    assert found.attempted > 15
    assert not found.failed


def test_the_bandwidth_as_it_is_now() -> None:
    assert GaussianAttention(0.5).bandwidth == 0.5
    layer = GaussianAttention(0.5, learn_bandwidth=True)
    layer(*(np.zeros((1, n, 1)) for n in (QUERIES, KEYS, KEYS)))
    close(layer.bandwidth, 0.5)
