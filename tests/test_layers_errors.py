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
    MultiHeadAttention,
)
from constructor_cases import check_constructors, check_older_call, check_wrong_calls, every_older_call

X = torch.randn(2, 3, 6)
WRONG: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
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
        "valid_lens of a cache",
        lambda: MultiHeadAttention(8, 2)(X, X, X, valid_lens=[4, 0], cache=ats.KeyValueCache(head_axis=-2)),
        ats.ArgumentError,
        "^valid_lens: expected whole numbers from 0 to 3, got 4",
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
    (
        "features of a matrix",
        lambda: BilinearAttention(key_size=5)(X, X, X),
        ats.ShapeError,
        "keys: expected vectors of length 5, which W.weight takes, got 6",
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
    ("mask", lambda: DotProductAttention()(X, X, X, None, "causal"), ats.MaskError, "mask: .*got 'causal'"),
)


@pytest.mark.parametrize("call, error, text", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(layers, X)


@every_older_call
def test_calls_of_older_editions(name: str) -> None:
    check_older_call(name, layers)


def test_constructors() -> None:
    check_constructors(layers)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"^MultiHeadAttention\(\) misses the required argument 'num_heads'$"):
        MultiHeadAttention(8)  # type: ignore[call-arg]
