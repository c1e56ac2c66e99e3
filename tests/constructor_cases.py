"""Constructors called with positional arguments in the order of older editions of "Dive into Deep Learning".

The rows hold for the layers of every framework; `layers` is the framework's module, `more` what it always needs.
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
