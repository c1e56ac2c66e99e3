"""top_weights, pooled_weights and key_mass against the whole matrix."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import backends
from attnscore.base import thresholds
from cases import FRAMEWORKS

frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ats.Causal("bottom_right")},
    "window": {"mask": ats.SlidingWindow(2, 1, "bottom_right")},
    "lengths": {"valid_lens": [0, 9]},
    "scattered": {"mask": ats.Dense(np.random.default_rng(1).random((6, 11, 13)) > 0.6)},
    "bias-sink": {"bias": np.random.default_rng(2).normal(size=(6, 1, 13)), "sink": 0.5},
    "gaussian": {"score": ats.Gaussian(0.7)},
    "own": {"score": ats.Temperature(ats.SoftCap("dot", 2.0), 0.5)},
}
options = pytest.mark.parametrize("name", OPTIONS)


def arrays(framework: str, dtype: str = "float64") -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    pair = rng.normal(size=(2, 6, 11, 4)).astype(dtype), rng.normal(size=(2, 3, 13, 4)).astype(dtype)
    return pair if framework == "numpy" else tuple(torch.from_numpy(x).requires_grad_() for x in pair)


def given(name: str, framework: str) -> dict[str, Any]:
    made = torch.from_numpy if framework == "torch" else np.asarray
    return {key: made(x) if key == "bias" else x for key, x in OPTIONS[name].items()}


def host(x: Any) -> np.ndarray[Any, Any]:
    return x.numpy() if isinstance(x, torch.Tensor) else x


def matrix(name: str) -> np.ndarray[Any, Any]:
    return ats.attention_weights(*arrays("numpy"), **OPTIONS[name])


@frameworks
@options
def test_key_mass_is_the_sum_over_the_queries(name: str, framework: str) -> None:
    found = ats.key_mass(*arrays(framework), **given(name, framework))
    assert np.allclose(host(found), matrix(name).sum(-2), rtol=1e-12, atol=1e-14)


@frameworks
@options
@pytest.mark.parametrize("bins", [(1, 1), (3, 4), (11, 13), (64, 64)])
def test_pooled_weights_are_sums_of_blocks(name: str, bins: tuple[int, int], framework: str) -> None:
    found = host(ats.pooled_weights(*arrays(framework), bins, **given(name, framework)))
    whole, (height, width) = matrix(name), (math.ceil(11 / bins[0]), math.ceil(13 / bins[1]))
    wanted = np.zeros((2, 6, math.ceil(11 / height), math.ceil(13 / width)))
    for i in range(11):
        for j in range(13):
            wanted[..., i // height, j // width] += whole[..., i, j]
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bins", [7, 16, 64])
@pytest.mark.parametrize("length", [1, 7, 100, 1000, 1001])
def test_uniform_weights_fill_all_bins_but_the_last_alike(length: int, bins: int) -> None:
    pooled = ats.pooled_weights(np.zeros((length, 2)), np.zeros((length, 2)), (bins, bins))
    width = math.ceil(length / bins)
    assert max(pooled.shape) <= bins and np.isclose(pooled.sum(), length)
    np.testing.assert_allclose(pooled[:-1, :-1], width * width / length, rtol=1e-12)
    np.testing.assert_allclose(pooled.sum(-1)[:-1], width, rtol=1e-12)


@frameworks
@options
@pytest.mark.parametrize("k", [1, 3, 13])
@pytest.mark.parametrize("held", [2**20, 1])
def test_top_weights_are_the_largest(name: str, k: int, held: int, framework: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(thresholds, "POOLED_WEIGHTS", held)
    monkeypatch.setattr(thresholds, "TOP_QUERIES", 1)
    found = ats.top_weights(*arrays(framework), k, **given(name, framework))
    whole, weights, index = matrix(name), host(found.weights), host(found.index)
    assert np.allclose(weights, -np.sort(-whole, -1)[..., :k], rtol=1e-12, atol=1e-14)
    assert np.array_equal(index == -1, weights == 0)
    assert np.allclose(np.take_along_axis(whole, np.maximum(index, 0), -1)[index >= 0], weights[index >= 0], rtol=1e-12)


@frameworks
def test_dtype_is_that_of_the_inputs_and_nothing_is_on_a_tape(framework: str) -> None:
    query, key = arrays(framework, "float32")
    found = [ats.key_mass(query, key), ats.pooled_weights(query, key), ats.top_weights(query, key, 2).weights]
    assert {str(x.dtype).removeprefix("torch.") for x in found} == {"float32"}
    assert not any(getattr(x, "requires_grad", False) for x in found)


@frameworks
def test_sums_over_more_queries_than_float16_counts(framework: str) -> None:
    query, key = np.ones((70_000, 1), np.float16), np.array([[20.0], [0.0], [0.0]], np.float16)
    if framework == "torch":
        query, key = torch.from_numpy(query), torch.from_numpy(key)
    weights, _ = ats.top_weights(query, key, 1)
    assert str(weights.dtype).removeprefix("torch.") == "float16"
    for sums in (ats.key_mass(query, key), ats.pooled_weights(query, key, (1, 3))[0]):
        assert str(sums.dtype).removeprefix("torch.") == "float32"
        np.testing.assert_allclose(host(sums), [7e4, 7e4 * np.exp(-20), 7e4 * np.exp(-20)], rtol=1e-3)


@frameworks
def test_own_scores_and_two_axes(framework: str) -> None:
    query, key = (x[0, 0] for x in arrays(framework))
    assert ats.key_mass(query, key, score="sum").shape == (13,)
    assert ats.pooled_weights(query, key, (2, 3)).shape == (2, 3)
    assert ats.top_weights(query, key, 2).index.shape == (11, 2)


def test_no_keys_to_choose_from() -> None:
    with pytest.raises(ats.ArgumentError, match="key: expected at least one key to choose from, got none"):
        ats.top_weights(np.ones((2, 3)), np.ones((0, 3)), 1)


def test_no_matrix_is_held() -> None:
    """One matrix of 4096 positions would take 64 MB."""
    import tracemalloc

    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((4096, 8), dtype=np.float32) for _ in range(2))
    tracemalloc.start()
    ats.key_mass(query, key)
    ats.pooled_weights(query, key)
    ats.top_weights(query, key, 4)
    assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    tracemalloc.stop()


MANY_KEYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ats.Causal("bottom_right")},
    "window": {"mask": ats.Causal("bottom_right") & ats.SlidingWindow(left=3, align="bottom_right")},
    "lengths-sink": {"valid_lens": [0, 900], "sink": 0.5},
    "lengths-of-rows": {"valid_lens": np.arange(2 * 7).reshape(2, 7) * 80},
    "documents": {"mask": ats.Documents(np.arange(7) // 3, np.arange(1100) // 400)},
    "gaussian": {"score": ats.Gaussian(0.7)},
    "capped": {"score": ats.Temperature(ats.SoftCap("dot", 2.0), 0.5)},
    "additive": {"score": ats.Additive(np.random.default_rng(3).normal(size=4))},
    "bilinear": {"score": ats.Bilinear(np.random.default_rng(4).normal(size=(4, 4)))},
    "scale-a-head": {"score": ats.ScaledDot(np.arange(1.0, 7.0))},
    "bandwidth-a-head": {"score": ats.Gaussian(np.arange(1.0, 7.0))},
    "cosine": {"score": ats.Cosine(5.0)},
}


def long_arrays(framework: str, dtype: str = "float64") -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    pair = rng.normal(size=(2, 6, 7, 4)), rng.normal(size=(2, 3, 1100, 4))
    if framework == "numpy":
        return pair[0].astype(dtype), pair[1].astype(dtype)
    return tuple(torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in pair)


@pytest.mark.parametrize("length", [10, 255, 256, 300, 1000])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_largest_entries_of_numpy(length: int, k: int) -> None:
    """Beside ties, infinities and NaN, which count as the smallest; long rows are searched in groups."""
    ops, x = backends.load("numpy"), np.random.default_rng(0).integers(0, 50, (2, 3, length)).astype(float)
    x[0, 0, ::7], x[1, 1] = math.nan, -math.inf
    values, index = ops.top_k(x, k)
    order = np.argsort(-x, axis=-1)[..., :k]
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))
    np.testing.assert_array_equal(values, np.take_along_axis(x, index, -1))
    assert all(len(set(row)) == k for row in index.reshape(-1, k).tolist())


@frameworks
@pytest.mark.parametrize("name", MANY_KEYS)
@pytest.mark.parametrize("held", [2**20, 2**13])
def test_top_weights_of_many_keys(name: str, held: int, framework: str, monkeypatch: Any) -> None:
    """A few queries at a time, each on the keys that these queries attend."""
    monkeypatch.setattr(thresholds, "POOLED_WEIGHTS", held)
    monkeypatch.setattr(thresholds, "TOP_QUERIES", 1)
    arguments = dict(MANY_KEYS[name])
    score = arguments.get("score")
    if framework == "torch" and score is not None:
        fields = {f: torch.from_numpy(x) for f, x in vars(score).items() if isinstance(x, np.ndarray)}
        arguments["score"] = dataclasses.replace(score, **fields)
    found = ats.top_weights(*long_arrays(framework), 2, **arguments)
    whole = ats.attention_weights(*long_arrays("numpy"), **MANY_KEYS[name])
    weights, index = host(found.weights), host(found.index)
    assert np.allclose(weights, -np.sort(-whole, -1)[..., :2], rtol=1e-10, atol=1e-14)
    assert np.array_equal(index == -1, weights == 0)
    assert np.allclose(np.take_along_axis(whole, np.maximum(index, 0), -1)[index >= 0], weights[index >= 0], rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_top_weights_of_many_keys_in_narrow_dtypes(dtype: str) -> None:
    found = ats.top_weights(*long_arrays("torch", dtype), 2, mask=ats.Causal("bottom_right"))
    assert found.weights.dtype == getattr(torch, dtype)
    whole = ats.attention_weights(
        *(x.detach().double() for x in long_arrays("torch", dtype)), mask=ats.Causal("bottom_right")
    )
    wanted = whole.sort(-1, descending=True)[0][..., :2]
    eps = torch.finfo(getattr(torch, dtype)).eps
    torch.testing.assert_close(found.weights.double(), wanted, rtol=4 * eps, atol=1e-6)


def test_scores_of_a_high_level_weigh_no_more_than_one() -> None:
    query, key = (300 * x.astype(np.float32) for x in long_arrays("numpy"))
    weights = ats.top_weights(query, key, 2).weights
    assert weights.max() <= 1 and np.allclose(
        weights, ats.top_weights(query.astype(float), key.astype(float), 2).weights, atol=0.05
    )


@pytest.mark.parametrize("what", ["nan", "bias", "scattered", "many"])
def test_top_weights_of_many_keys_that_are_not_plain(what: str) -> None:
    query, key = (x[0, :3] for x in long_arrays("numpy"))
    arguments: dict[str, Any] = {}
    if what == "nan":
        key[0, 5] = np.nan
        arguments["valid_lens"] = [5, 6, 7]
    elif what == "bias":
        arguments["bias"] = np.random.default_rng(6).normal(size=(7, 1100))
    elif what == "scattered":
        arguments["mask"] = ats.Dense(np.random.default_rng(7).random((7, 1100)) > 0.5)
    k = 40 if what == "many" else 2
    found = ats.top_weights(query, key, k, **arguments)
    whole = ats.attention_weights(query, key, **arguments)
    assert np.allclose(found.weights, -np.sort(-whole, -1)[..., :k], rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_pooled_weights_by_a_few_rows_at_a_time(rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(thresholds, "POOLED_QUERIES", rows)
    monkeypatch.setattr(thresholds, "POOLED_WEIGHTS", 1)
    arguments = {"mask": ats.Causal("bottom_right"), "valid_lens": [4, 9], "sink": 0.5}
    found = ats.pooled_weights(*arrays("numpy"), (4, 3), **arguments)
    monkeypatch.undo()
    assert np.allclose(found, ats.pooled_weights(*arrays("numpy"), (4, 3), **arguments), rtol=1e-12)


@frameworks
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0), (1, 1), (1, 5)])
def test_no_queries_no_keys_and_one(queries: int, keys: int, framework: str) -> None:
    made = np.zeros if framework == "numpy" else torch.zeros
    query, key = made((2, queries, 3)), made((2, keys, 3))
    assert ats.key_mass(query, key).shape == (2, keys)
    assert np.allclose(host(ats.key_mass(query, key)), queries / max(1, keys))
    pooled = ats.pooled_weights(query, key, (4, 7))
    assert pooled.shape == (2, {0: 1, 1: 1, 5: 3}[queries], max(1, keys)), "5 queries are in bins of 2, 2 and 1"
    assert np.isclose(host(pooled).sum(), 2 * queries * (keys > 0))
    if keys:
        assert ats.top_weights(query, key, 1).index.shape == (2, queries, 1)


@frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes(dtype: str, framework: str) -> None:
    if framework == "numpy":
        pair = tuple(x.astype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]) for x in arrays("numpy"))
        wide = tuple(x.astype(np.float64) for x in pair)
    else:
        pair = tuple(x.detach().to(getattr(torch, dtype)) for x in arrays("torch"))
        wide = tuple(x.double().numpy() for x in pair)
    whole = ats.attention_weights(*wide)
    eps = 2**-7 if dtype == "bfloat16" else 2**-10
    for found, wanted, of_result in (
        (ats.key_mass(*pair), whole.sum(-2), "float32"),
        (ats.pooled_weights(*pair, (1, 13)), whole.sum(-2, keepdims=True), "float32"),
        (ats.top_weights(*pair, 1).weights, whole.max(-1, keepdims=True), dtype),
    ):
        assert str(found.dtype).removeprefix("torch.") == of_result
        plain = found.astype(np.float64) if framework == "numpy" else found.double().numpy()
        assert np.abs(plain / wanted - 1).max() < 2 * eps


def test_heads_on_the_third_axis() -> None:
    query, key = arrays("numpy")
    swapped = query.swapaxes(1, 2), key.swapaxes(1, 2)
    assert np.array_equal(ats.key_mass(*swapped, head_axis=-2), ats.key_mass(query, key))
    assert np.allclose(ats.pooled_weights(*swapped, (3, 4), head_axis=-2), ats.pooled_weights(query, key, (3, 4)))
    assert np.array_equal(ats.top_weights(*swapped, 2, head_axis=-2).index, ats.top_weights(query, key, 2).index)


@pytest.mark.parametrize("function", [ats.key_mass, ats.pooled_weights, ats.attention_weights])
def test_there_is_no_dropout(function: Any) -> None:
    with pytest.raises(TypeError, match="dropout"):
        function(*arrays("numpy"), dropout=0.5)


def test_a_mask_of_numpy_beside_tensors_with_gradients() -> None:
    """A mask's own arrays, of whichever framework, are on no tape."""
    query, key = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    mask = ats.KeyPadding(np.arange(5) < np.array([[3], [5]]))
    query.requires_grad_()
    whole = ats.attention_weights(query, key, mask=mask)
    torch.testing.assert_close(ats.key_mass(query, key, mask=mask), whole.detach().sum(-2))
    torch.testing.assert_close(ats.attend(query, key, key, mask=mask), whole @ key)


@pytest.mark.parametrize("name", ["bias", "sink", "score"])
def test_nothing_is_on_the_tape_of_parameters_that_need_a_gradient(name: str) -> None:
    query, key = (x.detach() for x in arrays("torch"))
    shape = {"bias": (6, 1, 13), "sink": (), "score": ()}[name]
    parameter = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    options = {name: ats.ScaledDot(parameter) if name == "score" else parameter}
    found = [ats.key_mass(query, key, **options), ats.pooled_weights(query, key, **options)]
    assert not any(x.requires_grad for x in (*found, ats.top_weights(query, key, 2, **options).weights))


@frameworks
def test_pooled_weights_that_are_nan_stay_in_their_row_of_bins(framework: str) -> None:
    rng = np.random.default_rng(0)
    clean = rng.normal(size=(2, 12, 4))
    x = clean.copy()
    x[0, 5] = np.nan  # a query, and a key that the rows before it do not see
    made = torch.from_numpy if framework == "torch" else np.asarray
    found = host(ats.pooled_weights(made(x), made(x), (4, 3), mask=ats.Causal()))
    wanted = ats.pooled_weights(clean, clean, (4, 3), mask=ats.Causal())
    wanted[0, 1:] = np.nan
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
