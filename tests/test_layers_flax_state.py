"""Flax layers: ``attention_weights``, state and copies, PyTorch checkpoints, masks of heads, wrong input."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import attnscore as ats
from attnscore.base.thresholds import KEPT_WEIGHTS
from attnscore.layers import flax
from attnscore.layers.flax import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import check_masks_of_heads, check_weights_not_kept, check_wrong_calls
from flax_cases import ALIKE, called, inputs, make, to_jax, to_torch, two_layers
from layer_cases import LAYERS, Case, TextbookAdditive, TextbookMultiHead, close

pytestmark = pytest.mark.usefixtures("torch_seed", "one_thread")

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 6)), jnp.float32)
RNGS = nnx.Rngs(0)


@pytest.fixture(params=[0, KEPT_WEIGHTS], ids=["inputs", "weights"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of weights that a call keeps: none, but its inputs, or all weights of every call here."""
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", request.param)
    return int(request.param)


@two_layers
@pytest.mark.slow_rows("scaled dot", "heads, additive, 3 hidden")
def test_few_weights_are_computed_in_the_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lens, given = make(case, dropout=0.5, rngs=nnx.Rngs(0)), jnp.array([2, 5]), inputs(case)
    found = {}
    for few in (KEPT_WEIGHTS, 0):
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
        out = layer(*given, lens, rngs=jax.random.key(1))
        assert (flax._LAST[layer].computed is not None) == bool(few)
        found[few] = (out, layer.attention_weights)
    for got, wanted in zip(*found.values(), strict=True):
        close(to_torch(got), to_torch(wanted), torch.float32)
    for most in (found[0][1].size - 1, found[0][1].size):
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", most)
        layer(*given, lens, rngs=jax.random.key(1))
        assert (flax._LAST[layer].computed is not None) == (most == found[0][1].size)


@pytest.mark.slow
def test_weights_kept_of_a_call_with_traced_values_or_seed() -> None:
    layer = DotProductAttention(0.5, rngs=nnx.Rngs(0))
    layer(X, X, X)
    wanted = layer.attention_weights
    for call in (
        lambda: jax.grad(lambda values: layer(X, X, values, deterministic=True).sum())(X),
        lambda: jax.jit(lambda key: layer(X, X, X, rngs=key))(jax.random.key(0)),
    ):
        call()
        close(to_torch(layer.attention_weights), to_torch(wanted), torch.float32)


def test_weights_of_values_with_a_larger_batch() -> None:
    layer, values = DotProductAttention(), jnp.concatenate([X, X])[:3]
    layer(X[:1], X[:1], values)
    assert layer.attention_weights.shape == (1, 3, 3)


def test_donated_weights_are_noticed() -> None:
    layer = DotProductAttention()
    layer(X, X, X)
    jax.jit(lambda x: x + 1, donate_argnums=0)(layer.attention_weights)
    with pytest.raises(ats.ArgumentError, match="weights as they were read before, got donated ones"):
        _ = layer.attention_weights


class TestAttentionWeights:
    @pytest.mark.usefixtures("few")
    @two_layers
    @pytest.mark.slow_rows("inputs-heads, additive, 3 hidden")
    def test_are_those_of_the_call_after_an_optimiser_step(self, case: Case) -> None:
        layer, lens = make(case), np.array([2, 5])
        layer(*inputs(case), lens)
        wanted = layer.attention_weights
        lens += [1, -1]
        nnx.update(layer, jax.tree.map(lambda x: x + 1, nnx.state(layer, nnx.Param)))
        assert jnp.array_equal(layer.attention_weights, wanted)

    def test_before_a_call_and_when_nothing_is_kept(self) -> None:
        check_weights_not_kept(flax, X, "outside jit, grad and vmap ")

    @pytest.mark.usefixtures("few")
    @pytest.mark.slow_rows("inputs")
    def test_are_not_kept_inside_transformations(self) -> None:
        layer = GaussianAttention(learn_bandwidth=True)
        for call in (
            lambda: nnx.jit(lambda layer: layer(X, X, X))(layer),
            lambda: nnx.grad(lambda layer: layer(X, X, X).sum())(layer),
        ):
            call()
            with pytest.raises(ats.AttnscoreError, match="none outside jit, grad and vmap since it was made"):
                _ = layer.attention_weights
        shown = jnp.ones((4, 3, 3), bool)
        for call in (
            lambda: jax.jit(lambda x: layer(x, X, X))(X),
            lambda: jax.grad(lambda x: layer(x, X, X).sum())(X),
            lambda: jax.vmap(lambda x: layer(x, X, X))(X[None]),
            lambda: jax.vmap(lambda mask: layer(X, X, X, mask=ats.Dense(mask)))(shown),
            lambda: jax.jit(lambda lens: layer(X, X, X, lens))(jnp.array([1, 2])),
        ):
            layer(X, X, X)
            assert layer.attention_weights.shape == (2, 3, 3)
            call()
            with pytest.raises(ats.AttnscoreError, match=r"a call outside jit, grad and vmap, .*one inside"):
                _ = layer.attention_weights

    def test_donated_inputs_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", 0)
        layer, x = DotProductAttention(), X + 1
        layer(x, x, x)
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        with pytest.raises(ats.ArgumentError, match="inputs as they were in the call, got donated ones"):
            _ = layer.attention_weights

    def test_donated_lengths_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", 0)
        layer, lens = DotProductAttention(), jax.numpy.array([1] * len(X))
        layer(X, X, X, lens)
        jax.jit(lambda x: x + 1, donate_argnums=0)(lens)
        with pytest.raises(ats.ArgumentError, match="inputs as they were in the call, got donated ones"):
            _ = layer.attention_weights

    @pytest.mark.usefixtures("few")
    def test_keep_neither_the_layer_nor_values_alive(self) -> None:
        layer, values = DotProductAttention(), X + 1
        layer(X, X, values)
        kept, gone = weakref.ref(values), weakref.ref(layer)
        del values
        assert kept() is None
        del layer
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone, lambda x: pickle.loads(pickle.dumps(x))])
    @pytest.mark.slow_rows("deepcopy")
    def test_are_no_part_of_copies(self, copied: Callable[[Any], Any]) -> None:
        layer = MultiHeadAttention(8, 2, 0.5, score="additive", rngs=nnx.Rngs(0))
        layer(X, X, X)
        layer.eval()
        other = copied(layer)
        with pytest.raises(ats.AttnscoreError, match="since it was made, copied or loaded"):
            _ = other.attention_weights
        assert jnp.array_equal(other(2 * X, X, X), layer(2 * X, X, X))
        assert not jnp.array_equal(layer(X, X, X), other(2 * X, X, X))
        assert not jnp.array_equal(layer.attention_weights, other.attention_weights)
        layer.train()
        other.train()
        assert jnp.array_equal(other(X, X, X), layer(X, X, X)), "the stream of dropout is copied as well"


@pytest.mark.parametrize(
    "case", [pytest.param(x, id=x.name, marks=pytest.mark.slow if x.name in ALIKE else ()) for x in LAYERS]
)
@pytest.mark.slow_rows("additive", "heads*", "*max")
def test_state_is_saved_and_restored(case: Case, tmp_path: Path) -> None:
    """As plain arrays by name, in a file that needs no pickle."""
    layer, other, arrays = make(case), make(case, seed=1), inputs(case)
    flat = {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(nnx.state(layer))}
    np.savez(tmp_path / "layer.npz", **flat)
    state = nnx.state(other)
    with np.load(tmp_path / "layer.npz") as found:
        for path, x in nnx.to_flat_state(state):
            x.set_value(jnp.asarray(found["/".join(map(str, path))]))
    nnx.update(other, state)
    wanted = called(layer, *arrays)
    assert jnp.array_equal(called(other, *arrays), wanted)
    pure = nnx.to_pure_dict(nnx.state(layer))
    names = {"W_q", "W_k", "W_v", "W_o", "w_v", "W", "log_bandwidth", "log_scale", "sink", "q_norm", "k_norm"}
    assert {name for name in pure if not name.startswith("score_")} <= names
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    assert jnp.array_equal(called(nnx.merge(graph, params, rest), *arrays), wanted)


class TestLoadTorch:
    @pytest.mark.parametrize("sized", [True, False])
    @pytest.mark.slow_rows("True")
    def test_textbook_additive(self, sized: bool) -> None:
        theirs, lens = TextbookAdditive(8), torch.tensor([2, 6])
        tensors = torch.randn(2, 1, 20), torch.randn(2, 10, 2), torch.randn(2, 10, 4)
        wanted = theirs(*tensors, lens).detach()
        sizes = {"query_size": 20, "key_size": 2} if sized else {}
        layer = AdditiveAttention(8, 0.1, rngs=nnx.Rngs(0), deterministic=True, **sizes)
        layer.load_torch(theirs.state_dict())
        close(to_torch(layer(*map(to_jax, tensors), to_jax(lens))).float(), wanted, torch.float32)
        close(to_torch(layer.attention_weights).float(), theirs.attention_weights.detach(), torch.float32)

    @pytest.mark.parametrize("bias", [True, False])
    def test_textbook_heads(self, bias: bool) -> None:
        theirs, x = TextbookMultiHead(8, 2, bias=bias), torch.randn(2, 4, 6)
        wanted = theirs(x, x, x, torch.tensor([3, 2])).detach()
        layer = MultiHeadAttention(8, 2, bias=bias, rngs=nnx.Rngs(0))
        layer.load_torch(theirs.state_dict())
        close(to_torch(layer(*3 * (to_jax(x),), jnp.array([3, 2]))).float(), wanted, torch.float32)

    @pytest.mark.slow
    def test_what_does_not_fit_changes_nothing(self) -> None:
        layer = AdditiveAttention(4, key_size=2, rngs=nnx.Rngs(0))
        good = {"W_q.weight": np.ones((4, 3)), "W_k.weight": np.ones((4, 2)), "w_v.weight": np.ones((1, 4))}
        before = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
        for state, error, text in (
            ({**good, "W_k.weight": np.ones((4, 3))}, ats.ShapeError, r"W_k.weight: .*\(4, 2\), got \(4, 3\)"),
            ({**good, "W_q.weight": np.ones((5, 3))}, ats.ShapeError, r"W_q.weight: .*\(4, 3\), got \(5, 3\)"),
            ({**good, "W_q.weight": np.ones(3)}, ats.ShapeError, r"W_q.weight: .*got \(3,\)"),
            (
                {**good, "W_q.bias": np.ones(4)},
                ats.ArgumentError,
                "state: .*W_k.weight, W_q.weight, w_v.weight, got .*bias",
            ),
            ({}, ats.ArgumentError, "state: expected the names W_k.weight, W_q.weight, w_v.weight"),
            ({**good, "w_v.weight": [[1.0]]}, ats.FrameworkError, "w_v.weight: expected an array"),
        ):
            with pytest.raises(error, match=text):
                layer.load_torch(state)
            assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.to_pure_dict(nnx.state(layer, nnx.Param)), before))
        layer.load_torch(good)
        assert layer.W_q.kernel.shape == (3, 4) and (layer.W_q.kernel[...] == 1).all()


def test_masks_of_heads() -> None:
    check_masks_of_heads(flax, X, jnp.asarray, rngs=nnx.Rngs(0))


def test_errors() -> None:
    hint = r"Hint: layer.eval\(\) or deterministic=True"
    with pytest.raises(ats.ArgumentError, match=rf"rngs: expected an nnx.Rngs, .* got None. {hint}"):
        DotProductAttention(0.5)(X, X, X)
    with pytest.raises(ats.ShapeError, match="keys: expected vectors of length 5, which W takes, got 6"):
        BilinearAttention(key_size=5, rngs=RNGS)(X, X, X)
    with pytest.raises(ats.ShapeError, match=r"\(6\) for the scaled dot .*got 4"):
        nnx.jit(lambda layer: layer(X, X[..., :4], X))(DotProductAttention())
    with pytest.raises(ats.DtypeError, match=r"queries: expected a floating dtype .*, got int64"):
        AdditiveAttention(8, rngs=RNGS)(X.astype(int), X, X)
    with pytest.raises(ats.FrameworkError, match=r"queries: expected a jax.Array, got Tensor"):
        AdditiveAttention(8, rngs=RNGS)(torch.ones(2, 3, 6), X, X)
    with pytest.raises(ats.FrameworkError, match=r"keys: expected a jax.Array, got list. Hint: jnp.asarray\(x\)"):
        DotProductAttention()(X, [[[1.0]]], X)
    with pytest.raises(ats.MaskError, match=r"mask: .*got 'causal'"):
        DotProductAttention()(X, X, X, None, "causal")
    with pytest.raises(ats.MaskError, match=r"mask: .*\(batch, query, key\) = \(2, 3, 3\), got \(3, 3, 3\)"):
        MultiHeadAttention(8, 2, rngs=RNGS)(X, X, X, mask=jnp.ones((3, 3, 3), bool))


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(flax, X, rngs=RNGS)
