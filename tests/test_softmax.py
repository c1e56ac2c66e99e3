"""The softmax by itself: masked, along any axis, its Jacobian and VJP, in both frameworks and every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from cases import DTYPES, FRAMEWORKS, MASKS, MaskCase, Sizes
from covering import each
from harness import EPS, NUMPY_DTYPE, array, dtype_of, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


def softmax(scores: np.ndarray, visible: np.ndarray | bool = True, temperature: float = 1.0) -> np.ndarray:
    s = np.where(visible, scores.astype(np.longdouble) / temperature, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return (e / np.where(total == 0, 1, total)).astype(np.float64)


def native(x: np.ndarray, framework: str, **options: Any) -> Any:
    return tensor(x, **options) if framework == "torch" else x


@each(case=MASKS, dtype=DTYPES, framework=FRAMEWORKS)
def test_under_every_mask(case: MaskCase, dtype: str, framework: str) -> None:
    sizes = Sizes(queries=case.lengths[0], keys=case.lengths[1])
    shape = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    scores = (3 * np.random.default_rng(0).standard_normal(shape)).astype(NUMPY_DTYPE[dtype])
    visible = case.visible(sizes)
    found = ats.masked_softmax(native(scores, framework), **case.arguments(sizes))
    assert dtype_of(found) == dtype
    weights = array(found).astype(np.float64)
    np.testing.assert_allclose(weights, softmax(array(scores), visible), atol=2 * EPS[dtype])
    assert (weights[~visible] == 0).all()


@frameworks
@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
def test_axis_and_temperature(axis: int, temperature: float, framework: str) -> None:
    scores = np.random.default_rng(0).standard_normal((3, 4, 5))
    found = array(ats.masked_softmax(native(scores, framework), axis=axis, temperature=temperature))
    wanted = softmax(scores.swapaxes(axis, -1), True, temperature).swapaxes(axis, -1)
    np.testing.assert_allclose(found, wanted, atol=1e-15)


@frameworks
@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (1, 5)], ids=str)
def test_a_mask_has_the_axes_of_the_scores(axis: int, shape: tuple[int, ...], framework: str) -> None:
    rng = np.random.default_rng(0)
    scores, mask = rng.standard_normal((3, 4, 5)), rng.random(shape) < 0.7
    found = array(ats.masked_softmax(native(scores, framework), mask=native(mask, framework), axis=axis))
    visible = np.broadcast_to(mask, scores.shape).swapaxes(axis, -1)
    np.testing.assert_allclose(found, softmax(scores.swapaxes(axis, -1), visible).swapaxes(axis, -1), atol=1e-15)


@frameworks
@pytest.mark.parametrize(
    "shape", [(5,), (3, 5), (2, 3, 5), (2, 4, 3, 5), (2, 3, 4, 3, 5), (2, 0, 5), (2, 3, 1)], ids=str
)
def test_any_number_of_axes(shape: tuple[int, ...], framework: str) -> None:
    scores = np.random.default_rng(0).standard_normal(shape)
    found = array(ats.masked_softmax(native(scores, framework)))
    np.testing.assert_allclose(found, softmax(scores) if scores.size else scores, atol=1e-15)
    empty = native(np.ones((2, 3, 0)), framework)
    found = ats.masked_softmax(empty)
    assert found is not empty and array(found).shape == (2, 3, 0)
    with pytest.raises(ats.MaskError, match="valid_lens"):
        ats.masked_softmax(empty, valid_lens=[5, 6, 7])


@frameworks
@pytest.mark.parametrize("queries", [0, 1, 3])
def test_a_length_for_each_query_without_a_batch(queries: int, framework: str) -> None:
    scores, lens = np.random.default_rng(0).standard_normal((queries, 4)), np.arange(queries) + 1
    found = array(ats.masked_softmax(native(scores, framework), valid_lens=native(lens, framework)))
    np.testing.assert_allclose(found, softmax(scores, np.arange(4) < lens[:, None]), atol=1e-15)
    x = native(scores, framework)
    for kernel in ("auto", "streaming", "dense"):
        assert ats.attend(x, x, x, valid_lens=native(lens, framework), kernel=kernel).shape == (queries, 4)


@frameworks
@pytest.mark.parametrize("level", [1e4, -1e4, 6e4])
def test_no_overflow(level: float, framework: str) -> None:
    scores = (np.array([[0.0, 8.0, -8.0]]) + level).astype(np.float16)
    found = ats.masked_softmax(native(scores, framework))
    np.testing.assert_allclose(array(found).astype(float), softmax(scores), atol=1e-3)


@frameworks
def test_what_is_hidden_may_be_anything(framework: str) -> None:
    scores = np.array([[1.0, 2.0, np.nan, np.inf], [np.nan, np.nan, np.nan, np.nan]])
    found = array(ats.masked_softmax(native(scores, framework), np.array([2, 0])))
    np.testing.assert_allclose(found, [[*softmax(np.array([1.0, 2.0])), 0, 0], [0, 0, 0, 0]])
    assert np.isnan(array(ats.masked_softmax(native(scores, framework)))).any()


@frameworks
def test_scores_of_minus_infinity(framework: str) -> None:
    scores = np.array([[-np.inf, 0.0], [-np.inf, -np.inf]])
    np.testing.assert_array_equal(array(ats.masked_softmax(native(scores, framework))), [[0, 1], [0, 0]])


def test_gradient() -> None:
    """Rows of zeros get gradient zero, NaN in hidden scores included; the other rows the Jacobian's."""
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5, dtype=torch.float64)
    scores[1] = torch.nan
    scores.requires_grad_()
    seed = torch.randn(2, 3, 5, dtype=torch.float64)
    weights = ats.masked_softmax(scores, torch.tensor([4, 0]), temperature=2.0)
    (grad,) = torch.autograd.grad(weights, scores, seed)
    np.testing.assert_array_equal(array(grad[1]), 0)
    np.testing.assert_allclose(array(grad), array(ats.softmax_pullback(weights, seed)) / 2, atol=1e-15)
    scores = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    for lens in (torch.tensor([4, 1]), torch.tensor([[0, 2, 5], [1, 1, 3]])):
        torch.autograd.gradcheck(lambda x, lens=lens: ats.masked_softmax(x, lens), (scores,))
        torch.autograd.gradgradcheck(lambda x, lens=lens: ats.masked_softmax(x, lens), (scores,))


@frameworks
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (2, 3, 7)], ids=str)
def test_jacobian_and_pullback(shape: tuple[int, ...], framework: str) -> None:
    rng = np.random.default_rng(0)
    p, grad = softmax(rng.standard_normal(shape)), rng.standard_normal(shape)
    jacobian = array(ats.softmax_jacobian(native(p, framework)))
    wanted = np.stack([np.diag(row) - np.outer(row, row) for row in p.reshape(-1, shape[-1])])
    np.testing.assert_allclose(jacobian, wanted.reshape(*shape, shape[-1]), atol=1e-16)
    found = array(ats.softmax_pullback(native(p, framework), native(grad, framework)))
    np.testing.assert_allclose(found, np.einsum("...ij,...j->...i", jacobian, grad), atol=1e-15)
    np.testing.assert_allclose(jacobian.sum(-1), 0, atol=1e-15)
