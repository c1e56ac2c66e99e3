"""top_weights, pooled_weights and key_mass against the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore import maps
from cases import FRAMEWORKS

frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ats.Causal("bottom_right")},
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
    whole, (rows, columns) = matrix(name), (min(bins[0], 11), min(bins[1], 13))
    wanted = np.zeros((2, 6, rows, columns))
    for i in range(11):
        for j in range(13):
            wanted[..., i * rows // 11, j * columns // 13] += whole[..., i, j]
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, rtol=1e-12, atol=1e-14)


@frameworks
@options
@pytest.mark.parametrize("k", [1, 3, 13])
@pytest.mark.parametrize("held", [2**20, 1])
def test_top_weights_are_the_largest(name: str, k: int, held: int, framework: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(maps, "_HELD", held)
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
def test_own_scores_and_two_axes(framework: str) -> None:
    query, key = (x[0, 0] for x in arrays(framework))
    assert ats.key_mass(query, key, score="sum").shape == (13,)
    assert ats.pooled_weights(query, key, (2, 3)).shape == (2, 3)
    assert ats.top_weights(query, key, 2).index.shape == (11, 2)


@pytest.mark.parametrize("k", [0, 14, 1.5, "3", None, True])
def test_k_out_of_range(k: Any) -> None:
    with pytest.raises(ats.ArgumentError, match=r"k: expected a whole number from 1 to the number of keys \(13\)"):
        ats.top_weights(*arrays("numpy"), k)


@pytest.mark.parametrize("bins", [0, (0, 1), (1,), (1.5, 2), "ab", (1, 2, 3)])
def test_bins_that_are_none(bins: Any) -> None:
    with pytest.raises(ats.ArgumentError, match=r"bins: expected two positive whole numbers"):
        ats.pooled_weights(*arrays("numpy"), bins)


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


def test_a_mask_of_numpy_beside_tensors_with_gradients() -> None:
    """A mask's own arrays, of whichever framework, are on no tape."""
    query, key = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    mask = ats.KeyPadding(np.arange(5) < np.array([[3], [5]]))
    query.requires_grad_()
    whole = ats.attention_weights(query, key, mask=mask)
    torch.testing.assert_close(ats.key_mass(query, key, mask=mask), whole.detach().sum(-2))
    torch.testing.assert_close(ats.attend(query, key, key, mask=mask), whole @ key)
