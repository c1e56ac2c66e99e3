"""Wrong input of layers, and the calls and numbers of "Dive into Deep Learning", of older editions too.

All hold for the layers of every framework; `layers` is the framework's module, `more` what it always needs, `x`
an array (2, 3, 6) of its own, and `array` makes one of NumPy's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import attnscore as ats
from attnscore import backends


@contextmanager
def _refused(words: str) -> Iterator[None]:
    """Check that an argument is refused with these words, in a short text."""
    with pytest.raises(ats.ArgumentError, match=re.escape(words)) as found:
        yield
    assert len(str(found.value)) < 500


def check_older_calls(layers: Any, **more: Any) -> None:
    """Check that the errors of calls of older editions name the keywords to use."""
    additive, heads = (partial(kind, **more) for kind in (layers.AdditiveAttention, layers.MultiHeadAttention))
    expected = "AdditiveAttention: expected at most 2 positional arguments (num_hiddens, dropout), "
    hint = "Hint: AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)"
    with _refused(f"{expected}got 4. {hint}"):
        additive(2, 20, 8, 0.1)
    with _refused(f"{expected}got 3, and dropout by name. {hint}"):
        additive(2, 20, 8, dropout=0.1)
    with _refused(f"got 2, and num_hiddens by name, and dropout by name. {hint}"):
        additive(2, 20, num_hiddens=8, dropout=0.1)
    with _refused("got 3. Hint: num_hiddens, dropout, key_size, query_size, "):
        additive(8, 0.1, 2)
    expected = "MultiHeadAttention: expected at most 3 positional arguments (num_hiddens, num_heads, dropout), got 6. "
    hint = "Hint: MultiHeadAttention(key_size=100, query_size=90, value_size=80, num_hiddens=100, num_heads=5, "
    with _refused(f"{expected}{hint}dropout=0.5)"):
        heads(100, 90, 80, 100, 5, 0.5)
    with _refused("num_heads=5, dropout=0.5, bias=True)"):
        heads(100, 90, 80, 100, 5, 0.5, True)
    with _refused("got 4. Hint: num_hiddens, num_heads, dropout, bias, score, "):
        heads(100, 5, 0.5, True)


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


def _ready(layer: Any) -> Any:
    """Initialise a layer of MXNet, and turn dropout off."""
    for name in ("initialize", "eval"):
        if hasattr(layer, name):
            getattr(layer, name)()
    return layer


def check_textbook_numbers(layers: Any, array: Callable[[Any], Any], **more: Any) -> None:
    """Check that valid keys that are all alike get equal weights, whatever the score."""
    values = array(np.arange(40, dtype="float32").reshape(1, 10, 4).repeat(2, 0))
    keys, lens = array(np.ones((2, 10, 2), "float32")), array(np.array([2.0, 6.0], "float32"))
    valid = np.arange(10) < np.array([[2], [6]])
    for layer, size in (
        (layers.AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1, **more), 20),
        (layers.BilinearAttention(key_size=2, query_size=20, **more), 20),
        (layers.DotProductAttention(dropout=0.5), 2),
    ):
        queries = array(np.random.default_rng(0).standard_normal((2, 1, size)).astype("float32"))
        out = _ready(layer)(queries, keys, values, lens)
        assert tuple(out.shape) == (2, 1, 4)
        np.testing.assert_allclose(backends.host(out)[:, 0], [[2, 3, 4, 5], [10, 11, 12, 13]], rtol=4e-6)
        weights = backends.host(layer.attention_weights)[:, 0]
        np.testing.assert_allclose(weights, valid / valid.sum(-1, keepdims=True), rtol=4e-6)


def check_weights_not_kept(layers: Any, x: Any, where: str = "") -> None:
    """Check the errors of weights before a call, and of a layer that keeps none; `where` are the calls that count."""
    layer = layers.DotProductAttention(keep_last=False)
    layer(x, x, x)
    with pytest.raises(ats.AttnscoreError, match=r"attention_weights: .*got keep_last=False"):
        _ = layer.attention_weights
    layer.keep_last = True
    with pytest.raises(ats.AttnscoreError, match=f"a call of the layer first, got none {where}since"):
        _ = layer.attention_weights
    layer(x, x, x)
    assert tuple(layer.attention_weights.shape) == (2, 3, 3)


def check_masks_of_heads(layers: Any, x: Any, array: Callable[[Any], Any], **more: Any) -> None:
    """Check that an array (batch, query, key) is not read as (head, query, key), with two of both."""
    layer = _ready(layers.MultiHeadAttention(8, 2, **more))
    mask = np.stack([np.eye(3, dtype=bool), np.tri(3, dtype=bool)])
    for given in (array(mask), ats.Dense(array(mask)), mask, mask.tolist()):
        layer(x, x, x, mask=given)
        shown = backends.host(layer.attention_weights) > 0
        np.testing.assert_array_equal(shown, mask[:, None].repeat(2, 1))
    layer(x, x, x, mask=ats.Dense(array(mask[None])) & ats.Causal())
    np.testing.assert_array_equal(backends.host(layer.attention_weights) > 0, mask[None].repeat(2, 0))


def check_wrong_calls(layers: Any, x: Any, **more: Any) -> None:
    """Check the errors of wrong arguments of constructors and calls."""

    def heads(num_heads: int = 2, **options: Any) -> Any:
        return layers.MultiHeadAttention(8, num_heads, **options, **more)

    dot = layers.DotProductAttention()
    with pytest.raises(ats.ArgumentError, match=r"score: expected one of dot, .*'soft'"):
        heads(score="soft")
    hint = r"these names have parameters in the layer; any other score is an object, such as attnscore.Sum\(\)$"
    with pytest.raises(ats.ArgumentError, match=r"score: expected one of dot, .*, got 'sum'. Hint: " + hint):
        heads(score=ats.SoftCap("sum", 2.0))
    with pytest.raises(ats.ArgumentError, match=r"score: expected one of dot, .*, got "):
        heads(score=ats.Dot)
    with pytest.raises(ats.ArgumentError, match="score: expected each name once, got 'gaussian' 2 times"):
        heads(score=ats.Combination(("gaussian", "gaussian"), (1.0, 1.0)))
    with pytest.raises(ats.ArgumentError, match="score_hiddens: expected None for score='scaled_dot', got 3"):
        heads(4, score_hiddens=3)
    with pytest.raises(ats.ShapeError, match=r"num_hiddens: .*multiple of num_heads \(3\), got 8"):
        heads(3)
    words = r"num_key_value_heads: expected a number that divides num_heads \(4\), got 3"
    with pytest.raises(ats.ShapeError, match=words):
        heads(4, num_key_value_heads=3)
    with pytest.raises(ats.ArgumentError, match=r"num_heads: .*above 0, got 0"):
        heads(0)
    with pytest.raises(ats.ArgumentError, match="sink: expected True or False, got 1"):
        heads(sink=1)
    with pytest.raises(ats.ArgumentError, match="qk_norm: expected True or False"):
        heads(qk_norm="rms")
    with pytest.raises(ats.ArgumentError, match="rotary: expected a function of"):
        heads(rotary=True)
    with pytest.raises(ats.ArgumentError, match="sink: expected False, as the normalizer is not the softmax, got True"):
        heads(sink=True, normalizer="sigmoid")
    words = r"normalizer: expected one of softmax, sigmoid, .* or Entmax\(alpha\), got 'hardmax'"
    with pytest.raises(ats.ArgumentError, match=words):
        layers.BilinearAttention(normalizer="hardmax", **more)
    with pytest.raises(ats.ArgumentError, match=r"num_hiddens: .*a whole number above 0, got 2.5"):
        layers.AdditiveAttention(2.5, **more)
    with pytest.raises(ats.ArgumentError, match=r"key_size: .*above 0 or None, got -1"):
        layers.AdditiveAttention(2, key_size=-1, **more)
    with pytest.raises(ats.ArgumentError, match=r"query_size: .* got 0"):
        layers.BilinearAttention(query_size=0, **more)
    with pytest.raises(ats.ArgumentError, match=r"dropout: expected a number in \[0, 1\), got 1.0"):
        layers.DotProductAttention(1.0)
    with pytest.raises(ats.ArgumentError, match="bandwidth: expected a finite number above 0, got 0"):
        layers.GaussianAttention(0)
    with pytest.raises(ats.ShapeError, match=r"queries: expected 3 axes .*got 2; shapes: "):
        dot(x[0], x, x)
    words = r"values: expected as many positions as keys \(3\), got 2; shapes: queries \(2, 3, 6\)"
    with pytest.raises(ats.ShapeError, match=words):
        dot(x, x, x[:, :2])
    with pytest.raises(ats.ShapeError, match=r"one batch size, or 1, got \[2, 3, 3\]"):
        dot(x, x.swapaxes(0, 1), x.swapaxes(0, 1))
    with pytest.raises(ats.ShapeError, match=r"\(6\) for the scaled dot .*got 4"):
        dot(x, x[..., :4], x)
    with pytest.raises(ats.ShapeError, match="queries: expected vectors of length 5, which W_q takes, got 6"):
        _ready(layers.AdditiveAttention(8, key_size=6, query_size=5, **more))(x, x, x)
    with pytest.raises(ats.ShapeError, match="values: expected vectors of length 5, which W_v takes, got 6"):
        _ready(heads(value_size=5))(x, x, x)
    with pytest.raises(ats.MaskError, match=r"valid_lens: .*from 0 to 3, got 7"):
        dot(x, x, x, [1, 7])
