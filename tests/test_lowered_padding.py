"""Calls of `attend` project no padded keys where parameters project keys and the framework gathers real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow
import torch

import attnscore as ats
from attnscore import backends
from attnscore.base import thresholds
from attnscore.base.cache import BoundedCache
from attnscore.plans import lowered, padding, plan

_PROJECTING: dict[str, Callable[[Any], Any]] = {
    "additive": lambda x: ats.Additive(x[0][0], x[0], x[1], x[1][0]),
    "additive, keys alone": lambda x: ats.Additive(x[0][0], None, x[1]),
    "bilinear": lambda x: ats.Bilinear(x[0]),
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave padded keys out however few they are; plans of before were made where that has to save time."""
    monkeypatch.setattr(thresholds, "UNPADDING", -1)
    monkeypatch.setattr(thresholds, "UNPADDING_A_NUMBER", 0)
    monkeypatch.setattr(plan, "PLANS", BoundedCache())


def _arrays(framework: str, arrays: list[np.ndarray]) -> list[Any]:
    if framework == "numpy":
        return arrays
    if framework == "torch":
        return [torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for x in arrays]
    if framework == "jax":
        return [jax.numpy.asarray(x) for x in arrays]
    return [tensorflow.constant(x) for x in arrays]


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax", "tensorflow"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", _PROJECTING)
def test_padded_keys_are_not_projected(framework: str, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned call whose keys are projected, which a bilinear score does where there are more queries."""
    packed: list[int] = []

    def project_rows(ops: Any, x: Any, rows: Any, project: Any) -> Any:
        packed.append(len(rows))
        return padding.project_rows(ops, x, rows, project)

    monkeypatch.setattr(lowered, "project_rows", project_rows)
    torch.manual_seed(0)
    inputs = [torch.randn(3, n, 5, dtype=torch.float64) for n in (9, 4, 4)]
    parameters = [torch.randn(5, 5, dtype=torch.float64) for _ in range(2)]
    for lens in ([3, 0, 4], [1, 1, 2]):
        for x in inputs[1:]:
            x[0, 3:] = float("nan")
        leaves = [x.clone().requires_grad_() for x in (*inputs, *parameters)]
        wanted = ats.attend(*leaves[:3], score=_PROJECTING[name](leaves[3:]), valid_lens=lens, kernel="dense")
        gradients = torch.autograd.grad(wanted.square().sum(), leaves, allow_unused=True)
        given = [x.detach().numpy().astype(dtype) for x in leaves]
        *own, of_framework = _arrays(framework, [*given, np.array(lens)])
        out = ats.attend(*own[:3], score=_PROJECTING[name](own[3:]), valid_lens=of_framework)
        tolerance = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(np.asarray(backends.host(out)), wanted.detach().numpy(), **tolerance)
        if framework == "torch":
            found = torch.autograd.grad(out.square().sum(), own, allow_unused=True)
            for x, y in zip(found, gradients, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x.double(), y, **tolerance)
    assert packed == ([7, 4] if backends.load(framework).can_unpad else [])


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("name", _PROJECTING)
def test_the_heads_of_a_shared_key_are_no_batch(framework: str, name: str) -> None:
    """A key (head, key, features) has as many heads here as there are lengths, beside a query with a batch."""
    rng = np.random.default_rng(0)
    shapes = ((2, 2, 9, 5), (2, 4, 5), (2, 4, 5), (5, 5), (5, 5))
    arrays = [rng.standard_normal(shape) for shape in shapes]
    *own, lens = _arrays(framework, [*arrays, np.array([4, 1])])
    for _ in range(2):
        out = ats.attend(*own[:3], score=_PROJECTING[name](own[3:]), valid_lens=lens)
        wanted = ats.attend(*arrays[:3], score=_PROJECTING[name](arrays[3:]), valid_lens=[4, 1], kernel="dense")
        np.testing.assert_allclose(backends.load("numpy").host(out), wanted, rtol=1e-9, atol=1e-11)
