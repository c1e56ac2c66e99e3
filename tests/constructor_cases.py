"""Wrong input of layers, and constructors called in the order of older editions of "Dive into Deep Learning".

The rows hold for the layers of every framework; `layers` is the framework's module, `more` what it always needs, `x`
an array (2, 3, 6) of its own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnscore as ats

OLDER: dict[str, tuple[Callable[..., Any], str]] = {
    "additive": (
        lambda layers, **more: layers.AdditiveAttention(2, 20, 8, 0.1, **more),
        "AdditiveAttention: expected at most 2 positional arguments (num_hiddens, dropout), got 4. "
        "Hint: AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)",
    ),
    "additive, the last by name": (
        lambda layers, **more: layers.AdditiveAttention(2, 20, 8, dropout=0.1, **more),
        "AdditiveAttention: expected at most 2 positional arguments (num_hiddens, dropout), got 3, "
        "and dropout by name. Hint: AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)",
    ),
    "additive, two by name": (
        lambda layers, **more: layers.AdditiveAttention(2, 20, num_hiddens=8, dropout=0.1, **more),
        "got 2, and num_hiddens by name, and dropout by name. "
        "Hint: AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)",
    ),
    "additive, in no known order": (
        lambda layers, **more: layers.AdditiveAttention(8, 0.1, 2, **more),
        "got 3. Hint: num_hiddens, dropout, key_size, query_size, ",
    ),
    "multi-head": (
        lambda layers, **more: layers.MultiHeadAttention(100, 90, 80, 100, 5, 0.5, **more),
        "MultiHeadAttention: expected at most 3 positional arguments (num_hiddens, num_heads, dropout), got 6. "
        "Hint: MultiHeadAttention(key_size=100, query_size=90, value_size=80, num_hiddens=100, num_heads=5, "
        "dropout=0.5)",
    ),
    "multi-head with bias": (
        lambda layers, **more: layers.MultiHeadAttention(100, 90, 80, 100, 5, 0.5, True, **more),
        "num_heads=5, dropout=0.5, bias=True)",
    ),
    "multi-head, bias of the newer edition": (
        lambda layers, **more: layers.MultiHeadAttention(100, 5, 0.5, True, **more),
        "got 4. Hint: num_hiddens, num_heads, dropout, bias, score, ",
    ),
}
every_older_call = pytest.mark.parametrize("name", OLDER)


def check_older_call(name: str, layers: Any, **more: Any) -> None:
    """Check that the error of a call of an older edition names the keywords to use."""
    call, words = OLDER[name]
    with pytest.raises(ats.ArgumentError, match=re.escape(words)) as found:
        call(layers, **more)
    assert len(str(found.value)) < 500


def check_constructors(layers: Any, **more: Any) -> None:
    """Check that the calls of today still work, and that signatures are shown as they are written."""
    layers.AdditiveAttention(8, 0.1, key_size=2, query_size=20, **more)
    layers.AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1, **more)
    layers.MultiHeadAttention(8, 2, 0.1, bias=True, **more)
    for cls in (layers.AdditiveAttention, layers.MultiHeadAttention):
        assert inspect.getfullargspec(cls.__init__).args[:2] == ["self", "num_hiddens"]
        assert "score" in inspect.signature(cls.__init__).parameters or cls is layers.AdditiveAttention
    layer = layers.MultiHeadAttention(np.int64(8), np.int32(2), query_size=np.int8(3), keep_last=np.bool_(True), **more)
    assert all(type(x) in (int, bool, str, type(None)) for _, x in layer._layer.options) and layer.keep_last is True
    with pytest.raises(ats.ArgumentError, match="keep_last: expected True or False, got 'no'"):
        layers.AdditiveAttention(8, keep_last="no", **more)
    # What is no question of order stays Python's own.
    with pytest.raises(TypeError, match="num_hiddens"):
        layers.AdditiveAttention(**more)


def _called(layer: Any, *arrays: Any) -> Any:
    """MXNet's layers are initialised first."""
    if hasattr(layer, "initialize"):
        layer.initialize()
    return layer(*arrays)


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "score": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, score="soft", **more),
        ats.ArgumentError,
        "score: expected one of dot, .*'soft'",
    ),
    "heads": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 3, **more),
        ats.ShapeError,
        r"num_hiddens: .*multiple of num_heads \(3\), got 8",
    ),
    "KV heads": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 4, num_key_value_heads=3, **more),
        ats.ShapeError,
        r"num_key_value_heads: expected a number that divides num_heads \(4\), got 3",
    ),
    "hiddens": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 4, score_hiddens=3, **more),
        ats.ArgumentError,
        "score_hiddens: expected None for score='scaled_dot', got 3",
    ),
    "wrapped": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, score=ats.SoftCap("sum", 2.0), **more),
        ats.ArgumentError,
        r"score: expected one of dot, .*, got 'sum'. Hint: these names have parameters in the layer; any other score "
        r"is an object, such as attnscore.Sum\(\)$",
    ),
    "a class": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, score=ats.Dot, **more),
        ats.ArgumentError,
        "score: expected one of dot, .*, got ",
    ),
    "twice": (
        lambda layers, x, **more: layers.MultiHeadAttention(
            8, 2, score=ats.Combination(("gaussian", "gaussian"), (1.0, 1.0)), **more
        ),
        ats.ArgumentError,
        "score: expected each name once, got 'gaussian' 2 times",
    ),
    "sink": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, sink=1, **more),
        ats.ArgumentError,
        "sink: expected True or False, got 1",
    ),
    "normalizer": (
        lambda layers, x, **more: layers.BilinearAttention(normalizer="hardmax", **more),
        ats.ArgumentError,
        r"normalizer: expected one of softmax, sigmoid, .* or Entmax\(alpha\), got 'hardmax'",
    ),
    "normalizer without a sink": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, sink=True, normalizer="sigmoid", **more),
        ats.ArgumentError,
        "sink: expected False, as the normalizer is not the softmax, got True",
    ),
    "norm": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, qk_norm="rms", **more),
        ats.ArgumentError,
        "qk_norm: expected True or False",
    ),
    "rotary": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 2, rotary=True, **more),
        ats.ArgumentError,
        "rotary: expected a function of",
    ),
    "no heads": (
        lambda layers, x, **more: layers.MultiHeadAttention(8, 0, **more),
        ats.ArgumentError,
        "num_heads: .*above 0, got 0",
    ),
    "hidden": (
        lambda layers, x, **more: layers.AdditiveAttention(2.5, **more),
        ats.ArgumentError,
        "num_hiddens: .*a whole number above 0, got 2.5",
    ),
    "size": (
        lambda layers, x, **more: layers.AdditiveAttention(2, key_size=-1, **more),
        ats.ArgumentError,
        "key_size: .*above 0 or None, got -1",
    ),
    "size, too": (
        lambda layers, x, **more: layers.BilinearAttention(query_size=0, **more),
        ats.ArgumentError,
        "query_size: .* got 0",
    ),
    "dropout": (
        lambda layers, x, **more: layers.DotProductAttention(1.0),
        ats.ArgumentError,
        r"dropout: expected a number in \[0, 1\), got 1.0",
    ),
    "bandwidth": (
        lambda layers, x, **more: layers.GaussianAttention(0),
        ats.ArgumentError,
        "bandwidth: expected a finite number above 0, got 0",
    ),
    "axes": (
        lambda layers, x, **more: layers.DotProductAttention()(x[0], x, x),
        ats.ShapeError,
        r"queries: expected 3 axes .*got 2; shapes: ",
    ),
    "positions": (
        lambda layers, x, **more: layers.DotProductAttention()(x, x, x[:, :2]),
        ats.ShapeError,
        r"values: expected as many positions as keys \(3\), got 2; shapes: queries \(2, 3, 6\)",
    ),
    "batch": (
        lambda layers, x, **more: layers.DotProductAttention()(x, x.swapaxes(0, 1), x.swapaxes(0, 1)),
        ats.ShapeError,
        r"one batch size, or 1, got \[2, 3, 3\]",
    ),
    "lengths": (
        lambda layers, x, **more: layers.DotProductAttention()(x, x[..., :4], x),
        ats.ShapeError,
        r"\(6\) for the scaled dot .*got 4",
    ),
    "features": (
        lambda layers, x, **more: _called(layers.AdditiveAttention(8, key_size=6, query_size=5, **more), x, x, x),
        ats.ShapeError,
        "queries: expected vectors of length 5, which W_q takes, got 6",
    ),
    "features of values": (
        lambda layers, x, **more: _called(layers.MultiHeadAttention(8, 2, value_size=5, **more), x, x, x),
        ats.ShapeError,
        "values: expected vectors of length 5, which W_v takes, got 6",
    ),
    "lens": (
        lambda layers, x, **more: layers.DotProductAttention()(x, x, x, [1, 7]),
        ats.MaskError,
        "valid_lens: .*from 0 to 3, got 7",
    ),
}


def check_wrong_call(name: str, layers: Any, x: Any, **more: Any) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call(layers, x, **more)


def check_wrong_calls(layers: Any, x: Any, **more: Any) -> None:
    """Check all rows, each of which takes a millisecond; pytest shows the name of one that fails."""
    for name in WRONG:
        check_wrong_call(name, layers, x, **more)
