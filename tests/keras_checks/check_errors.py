"""Errors for wrong input of the Keras layers, on this process's backend: with the words of the PyTorch layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from together import BACKEND

import attnscore as ats
from attnscore.layers import keras as layers
from attnscore.layers.keras import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    MultiHeadAttention,
)
from constructor_cases import check_constructors, check_older_calls, check_wrong_calls

X = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")


def test_inputs() -> None:
    with pytest.raises(ats.ArgumentError, match=r"keys: expected keys, or a list \[query, value, key\]"):
        DotProductAttention()(X)
    with pytest.raises(ats.ArgumentError, match=r"queries: expected a tensor, or a list .* list of 1"):
        DotProductAttention()([X])
    with pytest.raises(ats.ArgumentError, match=r"queries: .*got a list. Hint: keys and values"):
        DotProductAttention()([X, X], X)
    with pytest.raises(ats.ShapeError, match="values: expected vectors of length 5, which W_v takes, got 6"):
        MultiHeadAttention(8, 2, value_size=5)(keras.Input((3, 6)), keras.Input((3, 6)))
    with pytest.raises(ats.ShapeError, match="queries: expected vectors of a known length, got None"):
        AdditiveAttention(8)(keras.Input((3, None)), keras.Input((3, 6)))
    with pytest.raises(ats.DtypeError, match=r"queries: .*floating.*, got int"):
        AdditiveAttention(8)(X.astype(int), X, X)
    with pytest.raises(ats.FrameworkError, match=f"queries: .*{BACKEND} backend, got str"):
        AdditiveAttention(8)("text", X, X)


def test_masks() -> None:
    layer, heads = DotProductAttention(), MultiHeadAttention(8, 2)
    words = "attention_mask: expected a mask object or a boolean array, got 'causal'"
    with pytest.raises(ats.MaskError, match=words):
        layer(X, X, X, attention_mask="causal")
    with pytest.raises(ats.MaskError, match="attention_mask: expected booleans or whole numbers, got float"):
        layer(X, X, X, attention_mask=np.zeros((3, 3)))
    words = r"attention_mask: .*\(batch, query, key\) = \(2, 3, 4\), got \(2, 4\)\. Hint: keys_mask="
    with pytest.raises(ats.MaskError, match=words):
        heads(X, X[:, [0, 1, 2, 0]], attention_mask=np.ones((2, 4), bool))
    words = r"attention_mask: .*\(batch, query, key\) = \(2, 3, 3\), got \(3, 3, 3\)"
    with pytest.raises(ats.MaskError, match=words):
        heads(X, X, X, attention_mask=np.ones((3, 3, 3), bool))
    words = r"mask: expected a list \[query_mask, value_mask\].* Hint: attention_mask= takes"
    with pytest.raises(ats.MaskError, match=words):
        layer(X, X, X, mask=np.ones((3, 3), bool))
    with pytest.raises(ats.MaskError, match=r"keys_mask: expected shape \(batch, length\) = \(2, 3\), got \(2, 4\)"):
        layer(X, X, X, keys_mask=np.ones((2, 4), bool))


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(layers, X)


def test_features_that_change_after_building() -> None:
    layer = BilinearAttention()
    layer(X, X, X)
    with pytest.raises(ats.ShapeError, match="queries: expected vectors of length 6, which W takes, got 4"):
        layer(X[..., :4], X, X)


def test_calls_of_older_editions() -> None:
    check_older_calls(layers)


def test_constructors() -> None:
    check_constructors(layers)
