"""PyTorch layers: what wrong input gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnscore as ats
from attnscore.layers import torch as layers
from attnscore.layers.torch import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import check_constructors, check_older_call, every_older_call

X = torch.randn(2, 3, 6)
WRONG: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
    (
        "score",
        lambda: MultiHeadAttention(8, 2, score="soft"),
        ats.ArgumentError,
        "score: expected one of dot, .*'soft'",
    ),
    ("heads", lambda: MultiHeadAttention(8, 3), ats.ShapeError, r"num_hiddens: .*multiple of num_heads \(3\), got 8"),
    (
        "KV heads",
        lambda: MultiHeadAttention(8, 4, num_key_value_heads=3),
        ats.ShapeError,
        r"num_key_value_heads: expected a number that divides num_heads \(4\), got 3",
    ),
    (
        "hiddens",
        lambda: MultiHeadAttention(8, 4, score_hiddens=3),
        ats.ArgumentError,
        "score_hiddens: expected None for score='scaled_dot', got 3",
    ),
    (
        "wrapped",
        lambda: MultiHeadAttention(8, 2, score=ats.SoftCap("sum", 2.0)),
        ats.ArgumentError,
        r"score: expected one of dot, .*, got 'sum'. Hint: these names have parameters in the layer; any other score "
        r"is an object, such as attnscore.Sum\(\)$",
    ),
    (
        "a class",
        lambda: MultiHeadAttention(8, 2, score=ats.Dot),
        ats.ArgumentError,
        "score: expected one of dot, .*, got ",
    ),
    (
        "twice",
        lambda: MultiHeadAttention(8, 2, score=ats.Combination(("gaussian", "gaussian"), (1.0, 1.0))),
        ats.ArgumentError,
        "score: expected each name once, got 'gaussian' 2 times",
    ),
    ("sink", lambda: MultiHeadAttention(8, 2, sink=1), ats.ArgumentError, "sink: expected True or False, got 1"),
    (
        "normalizer",
        lambda: BilinearAttention(normalizer="hardmax"),
        ats.ArgumentError,
        r"normalizer: expected one of softmax, sigmoid, .* or Entmax\(alpha\), got 'hardmax'",
    ),
    (
        "normalizer without a sink",
        lambda: MultiHeadAttention(8, 2, sink=True, normalizer="sigmoid"),
        ats.ArgumentError,
        "sink: expected False, as the normalizer is not the softmax, got True",
    ),
    ("norm", lambda: MultiHeadAttention(8, 2, qk_norm="rms"), ats.ArgumentError, "qk_norm: expected True or False"),
    ("rotary", lambda: MultiHeadAttention(8, 2, rotary=True), ats.ArgumentError, "rotary: expected a function of"),
    (
        "rotary gives other shapes",
        lambda: MultiHeadAttention(8, 2, rotary=lambda q, k, _: (q, k[:, 1:]))(X, X, X),
        ats.ShapeError,
        "rotary: expected queries .* and keys .* back, got",
    ),
    (
        "rotary of other positions",
        lambda: MultiHeadAttention(8, 2, rotary=lambda q, k, _: (q, k))(X[:, 1:], X, X),
        ats.ShapeError,
        r"keys: expected as many positions as queries \(\d\) for rotary=",
    ),
    (
        "cache with a score",
        lambda: MultiHeadAttention(8, 2)(X, X, X, cache=ats.KeyValueCache(head_axis=-2, score="dot")),
        ats.ArgumentError,
        r"cache: expected a KeyValueCache\(head_axis=-2\) without a score, got KeyValueCache\(score='dot', empty\)",
    ),
    (
        "cache of another layout",
        lambda: MultiHeadAttention(8, 2)(X, X, X, cache=ats.KeyValueCache()),
        ats.ArgumentError,
        "cache: expected a KeyValueCache",
    ),
    (
        "argument of another library",
        lambda: MultiHeadAttention(8, 2)(X, X, X, attn_mask=X),
        ats.errors.UnknownArgument,
        r"MultiHeadAttention.forward\(\) got .* 'attn_mask'. Hint: mask=attn_mask if it is boolean, bias=attn_mask if",
    ),
    (
        "option of another library",
        lambda: MultiHeadAttention(embed_dim=8, num_heads=2),
        ats.errors.UnknownArgument,
        r"MultiHeadAttention\(\) got an unexpected keyword argument .embed_dim.\. Hint: num_hiddens=8",
    ),
    ("no heads", lambda: MultiHeadAttention(8, 0), ats.ArgumentError, "num_heads: .*above 0, got 0"),
    ("hidden", lambda: AdditiveAttention(2.5), ats.ArgumentError, "num_hiddens: .*a whole number above 0, got 2.5"),
    ("size", lambda: AdditiveAttention(2, key_size=-1), ats.ArgumentError, "key_size: .*above 0 or None, got -1"),
    ("size, too", lambda: BilinearAttention(query_size=0), ats.ArgumentError, "query_size: .* got 0"),
    (
        "dropout",
        lambda: DotProductAttention(1.0),
        ats.ArgumentError,
        r"dropout: expected a number in \[0, 1\), got 1.0",
    ),
    (
        "bandwidth",
        lambda: GaussianAttention(0),
        ats.ArgumentError,
        "bandwidth: expected a finite number above 0, got 0",
    ),
    ("axes", lambda: DotProductAttention()(X[0], X, X), ats.ShapeError, r"queries: expected 3 axes .*got 2; shapes: "),
    (
        "positions",
        lambda: DotProductAttention()(X, X, X[:, :2]),
        ats.ShapeError,
        r"values: expected as many positions as keys \(3\), got 2; shapes: queries \(2, 3, 6\)",
    ),
    (
        "batch",
        lambda: DotProductAttention()(X, X[[0, 0, 0]], X),
        ats.ShapeError,
        r"one batch size, or 1, got \[2, 3, 2\]",
    ),
    ("lengths", lambda: DotProductAttention()(X, X[..., :4], X), ats.ShapeError, r"\(6\) for the scaled dot .*got 4"),
    (
        "features",
        lambda: AdditiveAttention(8, key_size=6, query_size=5)(X, X, X),
        ats.ShapeError,
        "queries: expected vectors of length 5, which W_q takes, got 6",
    ),
    (
        "features of a matrix",
        lambda: BilinearAttention(key_size=5)(X, X, X),
        ats.ShapeError,
        "keys: expected vectors of length 5, which W.weight takes, got 6",
    ),
    (
        "features of values",
        lambda: MultiHeadAttention(8, 2, value_size=5)(X, X, X),
        ats.ShapeError,
        "values: expected vectors of length 5, which W_v takes, got 6",
    ),
    (
        "dtype",
        lambda: MultiHeadAttention(8, 2, key_size=6)(X, X.double(), X),
        ats.DtypeError,
        "keys: expected torch.float32, the dtype of W_k, got torch.float64",
    ),
    (
        "dtype at a first call",
        lambda: MultiHeadAttention(8, 2)(X.double(), X.double(), X.double()),
        ats.DtypeError,
        "queries: expected torch.float32, the dtype of W_q, got torch.float64. Hint: layer.to",
    ),
    (
        "dtype of a matrix at a first call",
        lambda: BilinearAttention()(X, X.double(), X),
        ats.DtypeError,
        "keys: expected torch.float32, the dtype of W.weight, got torch.float64",
    ),
    (
        "integers",
        lambda: AdditiveAttention(8)(X.long(), X, X),
        ats.DtypeError,
        r"queries: expected a floating dtype .*, got int64",
    ),
    (
        "device",
        lambda: AdditiveAttention(8, query_size=6, device="meta")(X, X, X),
        ats.DeviceError,
        "queries: expected a tensor on meta, where W_q is, got cpu",
    ),
    (
        "device at a first call",
        lambda: AdditiveAttention(8, device="meta")(X, X, X),
        ats.DeviceError,
        "queries: expected a tensor on meta, where W_q is, got cpu",
    ),
    (
        "framework",
        lambda: AdditiveAttention(8)(X.numpy(), X, X),
        ats.FrameworkError,
        "queries: expected a torch.Tensor, got ndarray",
    ),
    (
        "sparse",
        lambda: AdditiveAttention(8)(X, X.to_sparse(), X),
        ats.FrameworkError,
        r"keys: expected a dense array, got a sparse tensor \(torch.sparse_coo\)",
    ),
    ("lens", lambda: DotProductAttention()(X, X, X, [1, 7]), ats.MaskError, "valid_lens: .*from 0 to 3, got 7"),
    ("mask", lambda: DotProductAttention()(X, X, X, None, "causal"), ats.MaskError, "mask: .*got 'causal'"),
)


@pytest.mark.parametrize("call, error, text", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@every_older_call
def test_calls_of_older_editions(name: str) -> None:
    check_older_call(name, layers)


def test_constructors() -> None:
    check_constructors(layers)
