"""Errors for wrong input of the Keras layers, on this process's backend: with the words of the PyTorch layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from constructor_cases import check_constructors, check_older_call, check_wrong_calls, every_older_call

X = np.random.default_rng(0).normal(size=(2, 3, 6)).astype("float32")
WRONG: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
    (
        "one",
        lambda: DotProductAttention()(X),
        ats.ArgumentError,
        r"keys: expected keys, or a list \[query, value, key\]",
    ),
    (
        "list",
        lambda: DotProductAttention()([X]),
        ats.ArgumentError,
        r"queries: expected a tensor, or a list .* list of 1",
    ),
    (
        "both",
        lambda: DotProductAttention()([X, X], X),
        ats.ArgumentError,
        "queries: .*got a list. Hint: keys and values",
    ),
    (
        "features of values, symbolic",
        lambda: MultiHeadAttention(8, 2, value_size=5)(keras.Input((3, 6)), keras.Input((3, 6))),
        ats.ShapeError,
        "values: expected vectors of length 5, which W_v takes, got 6",
    ),
    ("integers", lambda: AdditiveAttention(8)(X.astype(int), X, X), ats.DtypeError, "queries: .*floating.*, got int"),
    (
        "no tensor",
        lambda: AdditiveAttention(8)("text", X, X),
        ats.FrameworkError,
        f"queries: .*{BACKEND} backend, got str",
    ),
    (
        "mask",
        lambda: DotProductAttention()(X, X, X, attention_mask="causal"),
        ats.MaskError,
        "attention_mask: expected a mask object or a boolean array, got 'causal'",
    ),
    (
        "floating mask",
        lambda: DotProductAttention()(X, X, X, attention_mask=np.zeros((3, 3))),
        ats.MaskError,
        "attention_mask: expected booleans or whole numbers, got float",
    ),
    (
        "mask of keys",
        lambda: MultiHeadAttention(8, 2)(X, X[:, [0, 1, 2, 0]], attention_mask=np.ones((2, 4), bool)),
        ats.MaskError,
        r"attention_mask: .*\(batch, query, key\) = \(2, 3, 4\), got \(2, 4\)\. Hint: keys_mask=",
    ),
    (
        "name",
        lambda: DotProductAttention()(X, X, X, mask=np.ones((3, 3), bool)),
        ats.MaskError,
        r"mask: expected a list \[query_mask, value_mask\].* Hint: attention_mask= takes",
    ),
    (
        "padding",
        lambda: DotProductAttention()(X, X, X, keys_mask=np.ones((2, 4), bool)),
        ats.MaskError,
        r"keys_mask: expected shape \(batch, length\) = \(2, 3\), got \(2, 4\)",
    ),
    (
        "mask for heads",
        lambda: MultiHeadAttention(8, 2)(X, X, X, attention_mask=np.ones((3, 3, 3), bool)),
        ats.MaskError,
        r"attention_mask: .*\(batch, query, key\) = \(2, 3, 3\), got \(3, 3, 3\)",
    ),
    (
        "unknown features",
        lambda: AdditiveAttention(8)(keras.Input((3, None)), keras.Input((3, 6))),
        ats.ShapeError,
        "queries: expected vectors of a known length, got None",
    ),
)


@pytest.mark.parametrize("call, error, text", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(layers, X)


def test_features_that_change_after_building() -> None:
    layer = BilinearAttention()
    layer(X, X, X)
    with pytest.raises(ats.ShapeError, match="queries: expected vectors of length 6, which W takes, got 4"):
        layer(X[..., :4], X, X)


@every_older_call
def test_calls_of_older_editions(name: str) -> None:
    check_older_call(name, layers)


def test_constructors() -> None:
    check_constructors(layers)
