"""Keras's `MultiHeadAttention` with scores of several parts, a bias and a rotary embedding, in graphs and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from together import BACKEND, SHOWN, arrays, close, compare_gradients, counterparts, quick, slow_on_jax

import attnscore as ats
from attnscore.layers.keras import MultiHeadAttention
from layer_cases import BATCH, KEYS, LAYERS, QUERIES, Case

TEMPLATES = tuple(case for case in LAYERS if case.head_count and not isinstance(case.arguments.get("score", ""), str))
LENGTH = 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, LENGTH, 6)).astype("float32")
# On PyTorch Dynamo fails inside itself on this model with jit_compile=True; the scores and options compile one by one.
JIT = (False,) if BACKEND == "torch" else (False, pytest.param(True, marks=pytest.mark.slow))
SCORES = {case.name: case.arguments["score"] for case in TEMPLATES}


@keras.saving.register_keras_serializable(package="attnscore_tests")
def rotary(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    """Turn both halves of the features by angles that grow with the position."""
    return _turned(q, positions), _turned(k, positions)


def _turned(x: Any, positions: Any) -> Any:
    a, b = keras.ops.split(x, 2, axis=-1)
    angle = keras.ops.cast(positions, x.dtype)[..., None, None] / 10
    cos, sin = keras.ops.cos(angle), keras.ops.sin(angle)
    return keras.ops.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _torch_rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        angle = positions.to(x.dtype)[..., None, None] / 10
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    return turned(q), turned(k)


@pytest.mark.parametrize("shape", [(BATCH, 4, QUERIES, KEYS), (4, 1, QUERIES + KEYS - 1)], ids=["pairs", "relative"])
@pytest.mark.parametrize("case", quick(("heads, capped sum",), among=TEMPLATES, on_jax=("heads, capped sum",)))
def test_numbers_and_gradients_are_pytorchs(case: Case, shape: tuple[int, ...]) -> None:
    """Gradients of every parameter, with a bias."""
    theirs, ours = counterparts(case)
    bias = np.random.default_rng(1).normal(size=shape).astype("float32")
    leaves = [x.requires_grad_() for x in case.inputs()]
    compare_gradients(theirs, ours, leaves, {"bias": torch.tensor(bias)}, times=64)
    ours(*(x.astype("float32") for x in arrays(*leaves)), bias=bias)
    close(ours.attention_weights, theirs.attention_weights)


def test_a_bias_needs_no_heads() -> None:
    theirs, ours = counterparts(next(case for case in LAYERS if case.name == "additive"))
    q, k, v = next(case for case in LAYERS if case.name == "additive").inputs()
    bias = np.random.default_rng(1).normal(size=(BATCH, QUERIES, KEYS))
    close(ours(*arrays(q, k, v), bias=bias.astype("float32")), theirs(q, k, v, bias=torch.tensor(bias)).detach())


def test_a_rotary_embedding_is_pytorchs() -> None:
    case = next(case for case in LAYERS if case.name == "heads, scaled dot")
    theirs, ours = counterparts(case, rotary=rotary)
    theirs.rotary = _torch_rotary
    q, k, v = (x[:, :QUERIES] for x in case.inputs())
    close(ours(*arrays(q, k, v)), theirs(q, k, v).detach())


def _layer(score: Any = "scaled_dot", **more: Any) -> MultiHeadAttention:
    return MultiHeadAttention(8, 4, score=score, rotary=rotary, sink=True, qk_norm=True, **more)


@pytest.mark.slow
@slow_on_jax
@pytest.mark.parametrize("jit", JIT)
def test_in_compiled_models_of_unknown_lengths(jit: bool) -> None:
    """A functional model with the bias as an input, predicted in a graph, and fitted."""
    layer = _layer(SCORES["heads, capped sum"])
    x, bias = keras.Input((None, 6)), keras.Input((4, None, None))
    model = keras.Model([x, bias], layer(x, x, x, bias=bias))
    given = [X, RNG.normal(size=(2, 4, LENGTH, LENGTH)).astype("float32")]
    wanted = SHOWN(layer(X, X, X, bias=given[1]))
    model.compile("sgd", "mse", jit_compile=jit)
    close(model.predict(given, verbose=0), wanted)
    assert not np.allclose(wanted, SHOWN(layer(X, X, X)))
    before = [SHOWN(w).copy() for w in layer.trainable_weights]
    model.fit(given, np.zeros((2, LENGTH, 8)), verbose=0)
    for old, new in zip(before, layer.trainable_weights, strict=True):
        assert np.isfinite(SHOWN(new)).all() and (old != SHOWN(new)).any(), new.path


@pytest.mark.slow
def test_a_bias_that_is_learned() -> None:
    """A table of the caller, by key - query, moves in training."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.attention = _layer()
            self.table = self.add_weight(shape=(4, 1, 2 * LENGTH - 1), initializer="zeros", name="table")

        def call(self, x: Any) -> Any:
            return self.attention(x, x, x, bias=self.table)

    model = Model()
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((2, LENGTH, 8)), verbose=0)
    table = SHOWN(model.table)
    assert table.any() and np.isfinite(table).all()
    close(model(X), model.attention(X, X, X, bias=table))


@slow_on_jax
@pytest.mark.parametrize("name", SCORES)
def test_files_hold_the_score_and_the_embedding(name: str, tmp_path: Path) -> None:
    layer = _layer(SCORES[name])
    x = keras.Input((None, 6))
    model = keras.Model(x, layer(x, x, x))
    for weight in layer.trainable_weights:
        weight.assign(weight + 0.1)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    close(again(X), model(X), times=1)
    assert type(again.layers[-1]._layer.score) is type(SCORES[name])


def test_a_custom_score_has_no_configuration() -> None:
    class Custom:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return ops.matmul(query, ops.swap_axes(key, -1, -2))

    layer = MultiHeadAttention(8, 4, score=Custom())
    close(layer(X, X, X), SHOWN(layer(X, X, X)))
    with pytest.raises(ats.ArgumentError, match="score: expected a score of attnscore, which a configuration can name"):
        layer.get_config()


@pytest.mark.parametrize(
    ("window", "options"), [(None, {"sink": True}), (3, {"sink": True}), (3, {"normalizer": "entmax15"})]
)
def test_steps_with_a_cache_are_one_pass(window: int | None, options: dict[str, Any]) -> None:
    """Output, weights and the cache of each step, with a rotary embedding; in lengths of their own too."""
    layer = MultiHeadAttention(8, 2, score="additive", rotary=rotary, **options)
    mask = ats.Causal() if window is None else ats.Causal() & (ats.SlidingWindow(left=window - 1) | ats.KeyRange(0, 1))
    whole, all_weights = layer(X, X, X, attention_mask=mask, return_attention_scores=True)
    capacity = 8 if window is None else window + 3
    cache, outs = ats.KeyValueCache(head_axis=-2, window=window, sinks=int(window is not None), capacity=capacity), []
    for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
        step = X[:, part]
        out, weights, cache = layer(step, step, step, cache=cache, return_attention_scores=True, use_causal_mask=True)
        outs.append(keras.ops.convert_to_numpy(out))
        close(layer.attention_weights, weights)
        positions, found = np.asarray(cache.positions), keras.ops.convert_to_numpy(weights)
        for b, held in enumerate(positions):
            wanted = keras.ops.convert_to_numpy(all_weights)[b][:, part][..., held[held >= 0]]
            np.testing.assert_allclose(found[b][..., held >= 0], wanted, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(outs, 1), keras.ops.convert_to_numpy(whole), atol=1e-5)
    assert np.asarray(cache.lens).tolist() == [LENGTH] * 2
    out, cache = layer(X, X, X, valid_lens=[2, 5], cache=ats.KeyValueCache(head_axis=-2, capacity=8))
    close(out, layer(X, X, X, attention_mask=ats.Causal() & ats.ValidLens([2, 5], [2, 5])))
    assert np.asarray(cache.lens).tolist() == [2, 5]


def test_what_a_call_with_a_cache_refuses() -> None:
    layer, padding = MultiHeadAttention(8, 2), np.ones((2, LENGTH), bool)
    cache = ats.KeyValueCache(head_axis=-2, capacity=8)
    with pytest.raises(ats.ArgumentError, match=r"keys_mask: expected none with a cache, got a mask\. Hint: valid"):
        layer(X, X, X, keys_mask=padding, cache=cache)
    with pytest.raises(ats.ArgumentError, match="cache: expected a KeyValueCache"):
        layer(X, X, X, cache=ats.KeyValueCache(capacity=8))
    with pytest.raises(ats.ShapeError, match="bias: expected"):
        layer(X, X, X, bias=np.ones((3, 2, 9)), cache=cache)
    assert "empty" in repr(cache)
    symbolic = keras.Input((LENGTH, 6))
    with pytest.raises(ats.ArgumentError, match="cache: expected none in a functional model, got one"):
        layer(symbolic, symbolic, symbolic, cache=cache)
