"""The definitions and the numbers that the library promises, each checked as it is written, on NumPy and PyTorch.

The numbers are typed in here, not computed: what they follow from is in the names of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats

Make = Callable[[Any], Any]


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Turns numbers into an array of float64."""
    if request.param == "numpy":
        return lambda values: np.asarray(values, dtype=np.float64)
    return lambda values: torch.as_tensor(np.asarray(values, dtype=np.float64))


def host(x: Any) -> np.ndarray:
    return np.asarray(x)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# ------------------------------------------------------------------ the definitions


def softmax(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_pooling(make: Make) -> None:
    """With m keys: weights in R^m, output in R^v."""
    query, key, value = normal(3, 4), normal(5, 4, seed=1), normal(5, 2, seed=2)
    out, weights = ats.attend(make(query), make(key), make(value), return_weights=True)
    expected = softmax(query @ key.T / math.sqrt(4))
    assert host(weights).shape == (3, 5) and host(out).shape == (3, 2)
    np.testing.assert_allclose(host(weights), expected, rtol=1e-13)
    np.testing.assert_allclose(host(out), expected @ value, rtol=1e-13)


def test_scores_by_their_formulas(make: Make) -> None:
    query, key, matrix = normal(3, 4), normal(5, 4, seed=1), normal(4, 4, seed=2)
    difference = query[:, None] - key[None]
    for score, expected in (
        (ats.Dot(), query @ key.T),
        (ats.ScaledDot(), query @ key.T / 2),
        (ats.Bilinear(make(matrix)), query @ matrix @ key.T),
        (ats.Gaussian(0.7), -(difference**2).sum(-1) / (2 * 0.7**2)),
        (ats.Sum(), (query[:, None] + key[None]).sum(-1)),
        (ats.SoftCap(ats.Dot(), 2.0), 2 * np.tanh(query @ key.T / 2)),
        (ats.Temperature(ats.Dot(), 3.0), query @ key.T / 3),
    ):
        found = ats.attention_scores(make(query), make(key), score=score)
        np.testing.assert_allclose(host(found), expected, rtol=1e-12, atol=1e-13)


def test_the_default_is_the_scaled_dot_product(make: Make) -> None:
    query, key, value = make(normal(3, 4)), make(normal(5, 4, seed=1)), make(normal(5, 2, seed=2))
    plain = host(ats.attend(query, key, value))
    for score in ("scaled_dot", ats.ScaledDot(), ats.ScaledDot(1 / math.sqrt(4))):
        np.testing.assert_allclose(host(ats.attend(query, key, value, score=score)), plain, rtol=1e-13)


def test_additive_takes_queries_and_keys_of_different_lengths_and_has_no_bias(make: Make) -> None:
    query, key = normal(3, 20), normal(5, 2, seed=1)
    w_v, w_q, w_k = normal(8, seed=2), normal(8, 20, seed=3), normal(8, 2, seed=4)
    expected = np.array([[w_v @ np.tanh(w_q @ q + w_k @ k) for k in key] for q in query])
    score = ats.Additive(make(w_v), make(w_q), make(w_k))
    assert score.bias is None and score.activation == "tanh"
    np.testing.assert_allclose(host(ats.attention_scores(make(query), make(key), score=score)), expected, rtol=1e-12)


def test_bilinear_takes_queries_and_keys_of_different_lengths(make: Make) -> None:
    query, key, matrix = normal(3, 6), normal(5, 2, seed=1), normal(6, 2, seed=2)
    found = ats.attention_scores(make(query), make(key), score=ats.Bilinear(make(matrix)))
    np.testing.assert_allclose(host(found), query @ matrix @ key.T, rtol=1e-12)


def test_additive_is_a_perceptron_on_query_and_key_together(make: Make) -> None:
    """w_v . tanh(W [q; k]) with W = [W_q W_k], one hidden layer, no biases."""
    query, key = normal(3, 4), normal(5, 2, seed=1)
    w_v, w_q, w_k = normal(8, seed=2), normal(8, 4, seed=3), normal(8, 2, seed=4)
    both = np.concatenate((np.repeat(query[:, None], 5, 1), np.repeat(key[None], 3, 0)), axis=-1)
    hidden = np.tanh(both @ np.concatenate((w_q, w_k), axis=1).T)
    score = ats.Additive(make(w_v), make(w_q), make(w_k))
    found = ats.attention_scores(make(query), make(key), score=score)
    np.testing.assert_allclose(host(found), hidden @ w_v, rtol=1e-12)


def test_gaussian_pooling_is_nadaraya_watson_regression(make: Make) -> None:
    x, at = np.linspace(0, 5, 50), np.linspace(0, 5, 7)
    y = 2 * np.sin(x) + x**0.8
    kernel = np.exp(-((at[:, None] - x) ** 2) / (2 * 0.3**2))
    expected = (kernel * y).sum(-1) / kernel.sum(-1)
    found = ats.attend(make(at[:, None]), make(x[:, None]), make(y[:, None]), score=ats.Gaussian(0.3))
    np.testing.assert_allclose(host(found)[:, 0], expected, rtol=1e-11)


def test_the_query_cancels_in_the_sum(make: Make) -> None:
    """Every query gets the same weights: why plain addition is no good score."""
    weights = host(ats.attention_weights(make(normal(6, 4)), make(normal(5, 4, seed=1)), score="sum"))
    np.testing.assert_allclose(weights, np.repeat(weights[:1], 6, 0), rtol=1e-12)
    assert weights.std(-1).min() > 0.01


def test_causal_row_i_sees_j_up_to_i(make: Make) -> None:
    x = make(normal(4, 2))
    weights = host(ats.attention_weights(x, x, mask=ats.Causal()))
    assert np.array_equal(weights > 0, np.tri(4, dtype=bool))
    assert np.all(weights[~np.tri(4, dtype=bool)] == 0)
    assert weights[0, 0] == 1


def test_padding_and_boolean_masks_mean_may_attend(make: Make) -> None:
    x = make(normal(2, 3, 2))
    padding = np.array([[True, True, False], [False, True, True]])
    any_mask = np.array([[True, False, True], [True, True, False], [False, False, True]])
    weights = host(ats.attention_weights(x, x, mask=ats.KeyPadding(padding) & ats.Dense(any_mask)))
    assert np.array_equal(weights > 0, padding[:, None] & any_mask)
    assert np.array_equal(host(ats.attention_weights(x, x, mask=any_mask)) > 0, np.stack([any_mask] * 2))


def test_temperature_divides_before_the_softmax(make: Make) -> None:
    scores = normal(3, 5)
    for temperature in (0.1, 1.0, 7.0):
        found = ats.masked_softmax(make(scores), temperature=temperature)
        np.testing.assert_allclose(host(found), softmax(scores / temperature), rtol=1e-12)


def test_the_row_maximum_is_subtracted(make: Make) -> None:
    """exp(1000) overflows; the softmax of [1000, 1001] does not."""
    found = ats.masked_softmax(make([1000.0, 1001.0]))
    np.testing.assert_allclose(host(found), [1 / (1 + math.e), math.e / (1 + math.e)], rtol=1e-12)
    query, key = make([[1000.0]]), make([[1.0], [1.001]])
    np.testing.assert_allclose(host(ats.attention_weights(query, key, score="dot")), [host(found)], rtol=1e-9)


def test_dropout_acts_on_the_weights_after_the_softmax(make: Make) -> None:
    query, key = make(normal(50, 4)), make(normal(40, 4, seed=1))
    out, weights = ats.attend(query, key, make(np.eye(40)), dropout=0.25, seed=1, return_weights=True)
    dropped, weights = host(out), host(weights)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(dropped[dropped != 0], weights[dropped != 0] / 0.75, rtol=1e-12)
    assert abs((dropped == 0).mean() - 0.25) < 0.03


# ------------------------------------------------------------------ numbers to be exact about


@pytest.mark.parametrize("name", ["dot", "scaled_dot", "additive", "gaussian", "bilinear"])
def test_keys_all_alike(make: Make, name: str) -> None:
    """valid_lens (2, 6) of 10 keys: 1/2, 1/2 and six times 1/6; outputs [2,3,4,5] and [10,11,12,13]."""
    query, key = make(normal(2, 1, 2)), make(np.ones((2, 10, 2)))
    value = make(np.arange(40.0).reshape(1, 10, 4).repeat(2, axis=0))
    score: Any = {
        "additive": ats.Additive(make(normal(8)), make(normal(8, 2)), make(normal(8, 2))),
        "bilinear": ats.Bilinear(make(normal(2, 2))),
    }.get(name, name)
    out, weights = ats.attend(query, key, value, score=score, valid_lens=[2, 6], return_weights=True)
    expected = np.zeros((2, 1, 10))
    expected[0, 0, :2], expected[1, 0, :6] = 1 / 2, 1 / 6
    np.testing.assert_allclose(host(weights), expected, rtol=1e-14)
    assert np.all(host(weights)[expected == 0] == 0)
    np.testing.assert_allclose(host(out), [[[2, 3, 4, 5]], [[10, 11, 12, 13]]], rtol=1e-14)


def test_shapes(make: Make) -> None:
    """(2,3,4) x (2,4,6) -> (2,3,6); queries (2,1,20), keys (2,10,2), values (2,10,4), h = 8 -> (2,1,4)."""
    weights = ats.masked_softmax(make(normal(2, 3, 4)))
    assert host(weights @ make(np.ones((2, 4, 6)))).shape == (2, 3, 6)
    out = ats.attend(make(normal(2, 3, 5)), make(normal(2, 4, 5)), make(np.ones((2, 4, 6))))
    assert host(out).shape == (2, 3, 6)
    score = ats.Additive(make(normal(8)), make(normal(8, 20)), make(normal(8, 2)))
    out = ats.attend(make(normal(2, 1, 20)), make(np.ones((2, 10, 2))), make(normal(2, 10, 4)), score=score)
    assert host(out).shape == (2, 1, 4)


def test_valid_lengths_per_query(make: Make) -> None:
    """[[1, 3], [2, 4]] over 2 x 2 x 4 scores: the first row's first weight is exactly 1, the rest exactly 0."""
    scores = make(normal(2, 2, 4))
    found = host(ats.masked_softmax(scores, np.array([[1, 3], [2, 4]])))
    assert found[0, 0].tolist() == [1, 0, 0, 0]
    assert (found > 0).sum(-1).tolist() == [[1, 3], [2, 4]]
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-14)


def test_valid_lengths_per_sequence(make: Make) -> None:
    found = host(ats.masked_softmax(make(normal(2, 2, 4)), np.array([2, 3])))
    assert (found > 0).sum(-1).tolist() == [[2, 2], [3, 3]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_row_with_no_visible_key(dtype: str) -> None:
    """Output 0, weights 0, gradient 0, log-sum-exp -inf; in float16 too, where -1e6 would overflow."""
    query, key, value = (
        torch.ones(2, 3, 4, dtype=getattr(torch, dtype)).requires_grad_() for _ in ("query", "key", "value")
    )
    out, weights, stats = ats.attend(query, key, value, valid_lens=[0, 3], return_weights=True, return_stats=True)
    assert torch.all(out[0] == 0) and torch.all(weights[0] == 0)
    assert torch.all(stats.log_sum_exp[0] == -math.inf)
    out.sum().backward()
    for x in (query, key, value):
        assert x.grad is not None and torch.all(x.grad[0] == 0) and torch.all(torch.isfinite(x.grad))
    assert torch.all(value.grad[1] != 0)


def test_a_row_with_no_visible_key_on_numpy() -> None:
    query, key, value = np.ones((2, 3, 4)), np.ones((2, 3, 4)), np.ones((2, 3, 4))
    (out, stats), pullback = ats.attend_vjp(query, key, value, valid_lens=[0, 3], return_stats=True)
    assert np.all(out[0] == 0) and np.all(stats.log_sum_exp[0] == -math.inf)
    grads = pullback(np.ones_like(out), np.ones((2, 3)), np.ones((2, 3)))
    for grad in grads[:3]:
        assert np.all(grad[0] == 0) and np.all(np.isfinite(grad))


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_reaches_nothing_and_what_is_visible_does(make: Make, nonfinite: float) -> None:
    """A weight of 0 does not ensure it: 0 * NaN is NaN."""
    x, value = normal(6, 3), normal(6, 2, seed=1)
    plain = host(ats.attend(make(x), make(x), make(value), mask=ats.Causal()))
    value[5] = nonfinite
    found = host(ats.attend(make(x), make(x), make(value), mask=ats.Causal()))
    assert np.array_equal(found[:5], plain[:5])
    assert not np.any(np.isfinite(found[5]))
    key = x.copy()
    key[5] = nonfinite
    found = host(ats.attend(make(x), make(key), make(value), mask=ats.Causal()))
    np.testing.assert_allclose(found[:5], plain[:5], rtol=1e-13)
    assert np.all(np.isnan(found[5]))


# ------------------------------------------------------------------ why scale

Y = [0.2, 0.4, 0.1, 0.8]
JACOBIAN_OF_Y = [
    [0.16125, -0.04988, -0.03695, -0.07441],
    [-0.04988, 0.1859, -0.04513, -0.09089],
    [-0.03695, -0.04513, 0.14942, -0.06733],
    [-0.07441, -0.09089, -0.06733, 0.23264],
]
JACOBIAN_OF_8Y = [
    [0.00776, -0.0003, -0.00003, -0.00743],
    [-0.0003, 0.03722, -0.00014, -0.03678],
    [-0.00003, -0.00014, 0.0035, -0.00334],
    [-0.00743, -0.03678, -0.00334, 0.04755],
]


def test_the_softmax_sharpens_with_the_variance(make: Make) -> None:
    assert host(ats.masked_softmax(make(Y))).round(3).tolist() == [0.202, 0.247, 0.183, 0.368]
    assert host(ats.masked_softmax(make(Y) * 8)).round(3).tolist() == [0.008, 0.039, 0.004, 0.950]
    assert host(ats.masked_softmax(make(Y), temperature=1 / 8)).round(3).tolist() == [0.008, 0.039, 0.004, 0.950]


@pytest.mark.parametrize(("factor", "expected"), [(1, JACOBIAN_OF_Y), (8, JACOBIAN_OF_8Y)])
def test_the_jacobian_of_the_softmax(make: Make, factor: int, expected: list[list[float]]) -> None:
    weights = ats.masked_softmax(make(Y) * factor)
    jacobian = host(ats.softmax_jacobian(weights))
    np.testing.assert_allclose(jacobian, np.diag(host(weights)) - np.outer(host(weights), host(weights)), atol=1e-16)
    assert (jacobian.round(5) + 0).tolist() == expected
    basis = make(np.eye(4))
    rows = [host(ats.softmax_pullback(weights, basis[i])) for i in range(4)]
    assert (np.stack(rows).round(5) + 0).tolist() == expected


def test_saturation_shrinks_the_jacobian(make: Make) -> None:
    """The trace, which the statistics give without forming it: 0.72921 for y, 0.09603 for 8y."""
    key = make(np.array(Y)[:, None])
    traces = []
    for scale, jacobian in ((1.0, JACOBIAN_OF_Y), (8.0, JACOBIAN_OF_8Y)):
        query = make([[1.0]])
        _, stats = ats.attend(query, key, key, score=ats.ScaledDot(scale), return_stats=True)
        traces.append(float(host(stats.jacobian_trace())[0]))
        assert abs(traces[-1] - np.trace(jacobian)) < 4 * 0.5e-5
        assert not bool(host(stats.saturated())[0])
    assert traces[1] < traces[0] / 7


@pytest.mark.parametrize(
    ("score", "dim", "mean", "deviations", "expected"),
    [
        # Zero means and unit variances: d, and 1 after the scale, whatever d.
        *(("dot", dim, 0, (1, 1), dim) for dim in (4, 64, 256)),
        *(("scaled_dot", dim, 0, (1, 1), 1) for dim in (4, 64, 256)),
        # With means: 64 (1 * 1 + 1^2 (1 + 1)) = 192.
        ("dot", 64, 1, (1, 1), 192),
        # Other variances multiply: 16 * 9 * 0.25 = 36.
        ("dot", 16, 0, (3, 0.5), 36),
    ],
)
def test_the_variance_of_the_scores(
    make: Make, score: str, dim: int, mean: float, deviations: tuple[float, float], expected: float
) -> None:
    """Var(q . k) = d (Var q Var k + mean^2 (Var q + Var k)), by the statistics of each row."""
    query, key = (make(mean + x * normal(1500, dim, seed=i)) for i, x in enumerate(deviations))
    _, stats = ats.attend(query, key, key, score=score, return_stats=("mean_score", "var_score"))
    means, within = host(stats.mean_score), host(stats.var_score)
    assert abs((within.mean() + means.var()) / expected - 1) < 0.05
    assert abs(means.mean() - dim * mean**2) < 1.5
