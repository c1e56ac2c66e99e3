"""PyTorch layers: what wrong input gets."""

from __future__ import annotations

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
from constructor_cases import check_constructors, check_older_calls, check_wrong_calls

X = torch.randn(2, 3, 6)


def heads(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(8, 2, **options)


def test_rotary_embeddings() -> None:
    with pytest.raises(ats.ShapeError, match=r"rotary: expected queries .* and keys .* back, got"):
        heads(rotary=lambda q, k, _: (q, k[:, 1:]))(X, X, X)
    with pytest.raises(ats.ShapeError, match=r"keys: expected as many positions as queries \(\d\) for rotary="):
        heads(rotary=lambda q, k, _: (q, k))(X[:, 1:], X, X)


def test_caches() -> None:
    expected = r"cache: expected a KeyValueCache\(head_axis=-2\) without a score, got "
    with pytest.raises(ats.ArgumentError, match=expected + r"KeyValueCache\(score='dot', empty\)"):
        heads()(X, X, X, cache=ats.KeyValueCache(head_axis=-2, score="dot"))
    with pytest.raises(ats.ArgumentError, match=r"^valid_lens: expected whole numbers from 0 to 3, got 4"):
        heads()(X, X, X, valid_lens=[4, 0], cache=ats.KeyValueCache(head_axis=-2))
    with pytest.raises(ats.ArgumentError, match="cache: expected a KeyValueCache"):
        heads()(X, X, X, cache=ats.KeyValueCache())
    words = r"^values: expected the shape of keys, except for the last axis, got .*; shapes: keys \(1, 3, 2, 4\)"
    with pytest.raises(ats.ShapeError, match=words):
        heads()(X, X[:1], X, cache=ats.KeyValueCache(head_axis=-2))
    cache = ats.KeyValueCache(head_axis=-2).append(torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 2, 4))
    with pytest.raises(ats.DeviceError, match=r"^keys: expected an array on cpu, where the cache is, got one on meta"):
        heads(device="meta")(*3 * [X.to("meta")], cache=cache)
    words = r"^queries: expected at most as many positions as keys \(2\) with a cache, got 3"
    with pytest.raises(ats.ShapeError, match=words):
        heads()(X, X[:, 1:], X[:, 1:], cache=cache)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "wrong", [{"mask": torch.ones(5, 2, 9) > 0}, {"bias": torch.ones(3, 2, 9)}], ids=["mask", "bias"]
)
def test_a_call_that_raises_leaves_its_cache(wrong: dict[str, Any], window: int | None) -> None:
    layer = heads()
    wanted, found = (ats.KeyValueCache(head_axis=-2, window=window) for _ in range(2))
    for x in (X, X[:, :2], X[:, :1]):
        with pytest.raises(ats.AttnscoreError):
            layer(x, x, x, cache=found, **wrong)
        # An empty cache has taken on neither sizes nor a dtype.
        assert "empty" in repr(found) if x is X else found.lens.tolist() == wanted.lens.tolist()
        torch.testing.assert_close(layer(x, x, x, cache=found), layer(x, x, x, cache=wanted), rtol=0, atol=0)


def test_arguments_of_another_library() -> None:
    hint = "Hint: mask=attn_mask if it is boolean, bias=attn_mask if"
    with pytest.raises(ats.errors.UnknownArgument, match=rf"MultiHeadAttention.forward\(\) got .* 'attn_mask'. {hint}"):
        heads()(X, X, X, attn_mask=X)
    words = r"MultiHeadAttention\(\) got an unexpected keyword argument .embed_dim.\. Hint: num_hiddens=8"
    with pytest.raises(ats.errors.UnknownArgument, match=words):
        MultiHeadAttention(embed_dim=8, num_heads=2)


def test_features_of_a_matrix() -> None:
    with pytest.raises(ats.ShapeError, match=r"keys: expected vectors of length 5, which W.weight takes, got 6"):
        BilinearAttention(key_size=5)(X, X, X)


def test_dtypes() -> None:
    with pytest.raises(ats.DtypeError, match=r"keys: expected torch.float32, the dtype of W_k, got torch.float64"):
        heads(key_size=6)(X, X.double(), X)
    # At a first call.
    expected = "queries: expected torch.float32, the dtype of W_q, got torch.float64. Hint: layer.to"
    with pytest.raises(ats.DtypeError, match=expected):
        heads()(X.double(), X.double(), X.double())
    with pytest.raises(ats.DtypeError, match=r"keys: expected torch.float32, the dtype of W.weight, got torch.float64"):
        BilinearAttention()(X, X.double(), X)
    with pytest.raises(ats.DtypeError, match=r"queries: expected a floating dtype .*, got int64"):
        AdditiveAttention(8)(X.long(), X, X)


@pytest.mark.parametrize("query_size", [6, None], ids=["sized", "first call"])
def test_devices(query_size: int | None) -> None:
    with pytest.raises(ats.DeviceError, match="queries: expected a tensor on meta, where W_q is, got cpu"):
        AdditiveAttention(8, query_size=query_size, device="meta")(X, X, X)


def test_kinds_of_arrays_and_masks() -> None:
    with pytest.raises(ats.FrameworkError, match=r"queries: expected a torch.Tensor, got ndarray"):
        AdditiveAttention(8)(X.numpy(), X, X)
    words = r"keys: expected a dense array, got a sparse tensor \(torch.sparse_coo\)"
    with pytest.raises(ats.FrameworkError, match=words):
        AdditiveAttention(8)(X, X.to_sparse(), X)
    with pytest.raises(ats.MaskError, match=r"mask: .*got 'causal'"):
        DotProductAttention()(X, X, X, None, "causal")


def test_errors_that_all_frameworks_share() -> None:
    check_wrong_calls(layers, X)


def test_calls_of_older_editions() -> None:
    check_older_calls(layers)


def test_constructors() -> None:
    check_constructors(layers)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"^MultiHeadAttention\(\) misses the required argument 'num_heads'$"):
        MultiHeadAttention(8)  # type: ignore[call-arg]
