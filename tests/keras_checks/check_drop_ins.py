"""`attnscore.compat.keras` beside Keras's originals on this process's backend: arguments, masks, files, subclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from together import BACKEND, SHOWN

from attnscore.compat import keras as compat

BATCH, QUERIES, KEYS, DIM = 2, 5, 7, 8
# The original takes no other on JAX.
VALUE_DIM = 3 if BACKEND == "jax" else 4
RNG = np.random.default_rng(0)
X, V = (RNG.standard_normal((BATCH, n, DIM)).astype("float32") for n in (QUERIES, KEYS))
GRID, GRID_V = (RNG.standard_normal((BATCH, *n, DIM)).astype("float32") for n in ((3, 4), (3, 2)))
KEPT = np.arange(KEYS) < np.array([[3], [KEYS]])
NONE_KEPT = np.arange(KEYS) < np.array([[0], [4]])
PAIRS = RNG.random((BATCH, QUERIES, KEYS)) < 0.6
PAIRS[..., 0] = True
KINDS = {name: getattr(keras.layers, name) for name in compat.__all__}
# Name, arguments of the constructor, the call.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "dot": ("Attention", {}, lambda layer: layer([X, V])),
    "dot, scale, lists of masks": (
        "Attention",
        {"use_scale": True},
        lambda layer: layer([X, V], mask=[X[..., 0] > 0, KEPT], return_attention_scores=True),
    ),
    "concat, scale, causal": (
        "Attention",
        {"use_scale": True, "score_mode": "concat"},
        lambda layer: layer([X, V], mask=[None, KEPT], use_causal_mask=True),
    ),
    "concat": ("Attention", {"score_mode": "concat"}, lambda layer: layer([X, V, V * 2])),
    "dot, one column of a mask": (
        "Attention",
        {"dropout": -1.0},
        lambda layer: layer([X, V], mask=[None, np.ones((BATCH, 1), bool)], use_causal_mask=True, training=True),
    ),
    "four axes": ("Attention", {}, lambda layer: layer([GRID, GRID_V], return_attention_scores=True)),
    "additive": ("AdditiveAttention", {}, lambda layer: layer([X, V], mask=[None, KEPT], return_attention_scores=True)),
    "additive, no scale": ("AdditiveAttention", {"use_scale": False}, lambda layer: layer([X, V])),
    "additive, one hidden unit": (
        "AdditiveAttention",
        {"use_scale": False},
        lambda layer: layer([X[..., :1], V]),
    ),
    "heads": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3, "value_dim": VALUE_DIM},
        lambda layer: layer(X, V, V * 2),
    ),
    "heads, every mask": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3, "sliding_window": 6, "use_gate": True, "output_shape": (3, 2)},
        lambda layer: layer(
            X, V, value_mask=KEPT, attention_mask=PAIRS.astype("int32"), use_causal_mask=True,
            return_attention_scores=True,
        ),
    ),
    "heads, two axes of the mask": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3},
        lambda layer: layer(X, V, attention_mask=PAIRS[0]),
    ),
    "heads, one axis of the mask": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3},
        lambda layer: layer(X, V, attention_mask=KEPT[0], use_causal_mask=True),
    ),
    "heads, no keys": ("MultiHeadAttention", {"num_heads": 2, "key_dim": 3}, lambda layer: layer(X, V[:, :0])),
    "heads, one of two axes": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3, "attention_axes": 2},
        lambda layer: layer(GRID, GRID_V, return_attention_scores=True),
    ),
    "heads, both axes": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3, "attention_axes": (1, 2)},
        lambda layer: layer(
            GRID, GRID_V, attention_mask=RNG.random((3, 4, 3, 2)) < 2, return_attention_scores=True
        ),
    ),
    "grouped": (
        "GroupQueryAttention",
        {"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2, "use_gate": True},
        lambda layer: layer(X, V, use_causal_mask=True, attention_mask=PAIRS, return_attention_scores=True),
    ),
}  # fmt: skip
QUICK = tuple(CASES) if BACKEND != "jax" else ("heads, every mask",)


def pair(name: str, arguments: dict[str, Any], call: Callable[[Any], Any], **more: Any) -> tuple[Any, Any]:
    """The original and ours with its weights, both built."""
    theirs, ours = KINDS[name](**arguments), getattr(compat, name)(**arguments, **more)
    call(theirs), call(ours)
    for x in theirs.weights:
        x.assign(RNG.standard_normal(x.shape) * 0.5)
    ours.set_weights(theirs.get_weights())
    return theirs, ours


def close(ours: Any, theirs: Any, atol: float = 3e-6) -> None:
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(SHOWN(one), SHOWN(other), atol=atol)


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES])
def test_numbers_and_weights_are_those_of_the_original(case: str) -> None:
    name, arguments, call = CASES[case]
    theirs, ours = pair(name, arguments, call)
    close(call(ours), call(theirs))
    assert [(x.name, x.shape, x.dtype) for x in ours.weights] == [(x.name, x.shape, x.dtype) for x in theirs.weights]
    assert {**ours.get_config(), "name": None} == {**theirs.get_config(), "name": None}
    again = type(ours).from_config({**theirs.get_config(), "name": "again"})
    call(again)
    again.set_weights(theirs.get_weights())
    close(call(again), call(ours), 0)


@pytest.mark.parametrize("name", KINDS)
def test_arguments(name: str) -> None:
    found = inspect.signature(getattr(compat, name)).parameters
    wanted = inspect.signature(KINDS[name]).parameters
    assert [(x.name, x.default, x.kind) for x in found.values() if x.name != "strict"] == [
        (x.name, x.default, x.kind) for x in wanted.values()
    ]
    # strict is by name alone, and in a configuration only where it is on.
    given = {"head_dim": 2, "num_query_heads": 2, "num_key_value_heads": 1, "num_heads": 2, "key_dim": 2}
    arguments = {key: x for key, x in given.items() if key in wanted}
    kind = getattr(compat, name)
    assert "strict" not in kind(**arguments).get_config()
    assert kind.from_config(kind(**arguments, strict=True).get_config()).strict


@pytest.mark.parametrize("case", ["dot, scale, lists of masks", "heads", "grouped"])
def test_a_query_that_attends_to_no_key(case: str) -> None:
    name, arguments, _ = CASES[case]
    if name == "Attention":
        call = lambda layer: layer([X, V], mask=[None, NONE_KEPT])  # noqa: E731
    else:
        call = lambda layer: layer(X, V, value_mask=NONE_KEPT)  # noqa: E731
    theirs, ours = pair(name, {**arguments, **({} if name == "Attention" else {"use_bias": False})}, call)
    assert not SHOWN(call(ours))[0].any()
    assert abs(SHOWN(call(theirs))[0]).max() > 0.01
    close(call(ours)[1], call(theirs)[1])
    ours.strict = True
    close(call(ours), call(theirs))


def test_a_query_that_is_nan_stays_nan() -> None:
    """It attends to keys, so it is none that attends to none."""
    x, kept = np.array(X), np.ones((len(X), QUERIES, QUERIES), bool)
    x[0, 1] = np.nan
    kept[:, :, -1] = False
    call = lambda layer: layer(x, X, attention_mask=kept)  # noqa: E731
    theirs, ours = pair("MultiHeadAttention", {"num_heads": 2, "key_dim": 3}, call, strict=True)
    assert np.isnan(SHOWN(call(theirs))[0, 1]).all() and np.isnan(SHOWN(call(ours))[0, 1]).all()
    close(call(ours)[1:], call(theirs)[1:])


def test_no_key_at_all() -> None:
    call = lambda layer: layer(X, V[:, :0], attention_mask=np.ones((QUERIES, 0), bool))  # noqa: E731
    theirs, ours = pair("MultiHeadAttention", {"num_heads": 2, "key_dim": 3}, call, strict=True)
    close(call(ours), call(theirs))


@pytest.mark.parametrize("case", ["dot", "heads"])
def test_dropout(case: str) -> None:
    """With strict the original's weights are dropped; without, some of the same share."""
    name, arguments, _ = CASES[case]
    call = (lambda layer: layer([X, V], training=True)) if name == "Attention" else (
        lambda layer: layer(X, V, training=True)
    )  # fmt: skip
    dropped = []
    for strict in (True, False):
        theirs, ours = pair(name, {**arguments, "dropout": 0.5, "seed": 3}, call, strict=strict)
        dropped.append((SHOWN(call(ours)), SHOWN(call(theirs))))
    np.testing.assert_allclose(*dropped[0], atol=3e-6)
    assert abs(dropped[1][0] - dropped[1][1]).max() > 0.01


def test_a_subclass_that_replaces_the_scores_is_computed_with_them() -> None:
    class Negative(compat.Attention):
        def _calculate_scores(self, query: Any, key: Any) -> Any:
            return -super()._calculate_scores(query, key)

    close(Negative()([X, V]), compat.Attention()([-X, V]))


def test_files_go_both_ways(tmp_path: Path) -> None:
    """Weights of either load into the other; a model of originals loads with ours put in their place."""

    def model(layer: Any) -> Any:
        ids = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(9, DIM, mask_zero=True)(ids)
        return keras.Model(ids, layer(x, x))

    ids = np.array([[3, 4, 0, 0], [1, 2, 3, 4]], "int32")
    theirs = model(keras.layers.MultiHeadAttention(2, 3))
    ours = model(compat.MultiHeadAttention(2, 3))
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    ours.load_weights(tmp_path / "theirs.weights.h5")
    seen = (ids != 0)[..., None]
    close(SHOWN(ours(ids)) * seen, SHOWN(theirs(ids)) * seen)
    ours.save_weights(tmp_path / "ours.weights.h5")
    model(keras.layers.MultiHeadAttention(2, 3)).load_weights(tmp_path / "ours.weights.h5")
    ours.save(tmp_path / "ours.keras")
    close(keras.models.load_model(tmp_path / "ours.keras")(ids), ours(ids), 0)


TRAINED = ("dot, scale, lists of masks", "additive", "heads")


@pytest.mark.parametrize("case", [*(pytest.param(x, marks=pytest.mark.slow) for x in TRAINED), "grouped"])
def test_training_moves_the_weights_as_the_original_does(case: str) -> None:
    """In graphs and jit, with lengths that Keras does not know."""
    name, arguments, _ = CASES[case]
    lists = name in ("Attention", "AdditiveAttention")
    call = (lambda layer: layer([X, V])) if lists else (lambda layer: layer(X, V))
    moved = []
    for layer in pair(name, arguments, call):
        query, value = keras.Input((None, DIM)), keras.Input((None, DIM))
        options = {"use_causal_mask": True}
        out = layer([query, value], **options) if lists else layer(query, value, **options)
        model = keras.Model([query, value], out)
        model.compile(keras.optimizers.SGD(0.3), "mse")
        before = [SHOWN(x).copy() for x in layer.weights]
        for _ in range(2):
            model.train_on_batch([X, V], np.ones(X.shape, "float32"))
        moved.append([SHOWN(x) - y for x, y in zip(layer.weights, before, strict=True)])
    assert max(abs(x).max() for x in moved[0]) > 1e-3
    for one, other in zip(*moved, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_class_of_an_original_is_set() -> None:
    layer = keras.layers.MultiHeadAttention(2, 3)
    wanted = layer(X, V)
    layer.__class__ = compat.MultiHeadAttention
    close(layer(X, V), wanted)
