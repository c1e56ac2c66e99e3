"""Weighted sums of scores: what lowers to one form, and what does not. The tables of scores test the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnscore as ats
from cases import needs_native

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((1, 1, 160, 48)) for _ in range(3))
W = RNG.standard_normal((48, 48))
TANH, RELU = ats.Additive(np.ones(48)), ats.Additive(np.linspace(-1, 1, 48), activation="relu")
GAUSSIANS = 0.5 * ats.Gaussian(6.0) + 2.0 * ats.Gaussian(9.0)


@pytest.mark.parametrize(
    "terms",
    [
        ((ats.Gaussian(6.0), 0.5), (ats.Gaussian(9.0), 2.0)),
        ((ats.Dot(), -1.0), (ats.Bilinear(W), 0.1), (ats.Cosine(), 3)),
        ((TANH, 2.0), (RELU, 1.0)),
        ((TANH, 2.0), (TANH, 1.0)),
        ((ats.SoftCap("dot", 2.0), 0.5), (ats.Gaussian(6.0), 1.0)),
    ],
    ids=str,
)
def test_scores_are_those_of_the_terms(terms: tuple[tuple[ats.Dot, float], ...]) -> None:
    scores, weights = zip(*terms, strict=True)
    found = ats.attention_scores(QUERY, KEY, score=ats.Combination(scores, weights))
    wanted = sum(weight * ats.attention_scores(QUERY, KEY, score=score) for score, weight in terms)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@needs_native
@pytest.mark.parametrize("score", [GAUSSIANS, ats.ScaledDot() + ats.Sum(), TANH + TANH, ats.Dot() + GAUSSIANS], ids=str)
def test_what_becomes_one_form_runs_natively(score: ats.Combination) -> None:
    assert ats.explain(QUERY, KEY, VALUE, score=score).kernel == "native"


@pytest.mark.parametrize("score", [TANH + RELU, TANH + ats.Dot(), ats.SoftCap("dot", 1.0) + ats.Dot()], ids=str)
def test_what_does_not_is_added_up_tile_by_tile(score: ats.Combination) -> None:
    assert ats.explain(QUERY, KEY, VALUE, score=score).kernel == "streaming"


def test_the_gradient_through_the_norms_of_gaussians() -> None:
    """At these sizes a Gaussian is a product with the squared norms as biases, which take the weights too."""
    out, pullback = ats.attend_vjp(QUERY, KEY, VALUE, score=GAUSSIANS)
    cotangent = RNG.standard_normal(out.shape)
    grads = pullback(cotangent)
    query, key, value = (torch.tensor(x, requires_grad=True) for x in (QUERY, KEY, VALUE))
    squares = torch.cdist(query, key).square()
    weights = (-squares * (0.5 / 72 + 2.0 / 162)).softmax(-1)
    wanted = torch.autograd.grad(weights @ value, (query, key, value), torch.tensor(cotangent))
    for ours, theirs in zip((grads.query, grads.key, grads.value), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def test_terms_with_parameters_of_each_head_beside_others() -> None:
    """Their gradients of a key without heads are summed over the heads before they are added up."""
    rng = np.random.default_rng(0)
    shapes = {"query": (1, 2, 3, 4), "key": (1, 1, 5, 4), "value": (1, 1, 5, 4)}
    own = {"w_v": (2, 6), "W_q": (2, 6, 4), "W_k": (2, 6, 4)}
    arrays, parameters = ({name: rng.standard_normal(x) for name, x in each.items()} for each in (shapes, own))
    out, pullback = ats.attend_vjp(*arrays.values(), score=ats.Dot() + ats.Additive(**parameters))
    found = pullback(np.cos(np.arange(out.size)).reshape(out.shape))
    leaves = [torch.tensor(x, requires_grad=True) for x in (*arrays.values(), *parameters.values())]
    score = ats.Dot() + ats.Additive(**dict(zip(parameters, leaves[3:], strict=True)))
    total = ats.attend(*leaves[:3], score=score, kernel="dense")
    total.backward(torch.cos(torch.arange(out.size, dtype=torch.float64)).reshape(out.shape))
    for x, leaf in zip((*found[:3], *found.score.values()), leaves, strict=True):
        np.testing.assert_allclose(x, leaf.grad, rtol=1e-9, atol=1e-11)
