"""What is decided for accelerators, on a machine without one: tile sizes, and what JAX lowers for GPUs and TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnscore as ats
from attnscore import backends
from attnscore.backends import base
from attnscore.backends.jax.backend import JaxBackend
from attnscore.base import thresholds
from attnscore.kernels.native.kernel import Native
from attnscore.scores.forms import DistanceForm, InnerForm

LENGTH = 3000


def scores_of_tile(x: Any, **options: Any) -> int:
    plan = ats.explain(x, x, x, kernel="streaming", **options).plan
    return plan.query_tile * plan.key_tile


def test_tiles_are_larger_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose operations take as long to start; "meta" stands for one."""
    x = torch.empty(1, LENGTH, 8, device="meta")
    assert scores_of_tile(x) <= thresholds.TILE_SCORES
    monkeypatch.setattr(base, "ACCELERATORS", ("cuda", "meta"))
    assert thresholds.TILE_SCORES < scores_of_tile(x) <= thresholds.ACCELERATOR_TILE_SCORES
    w_v = torch.empty(8, device="meta")
    additive = scores_of_tile(x, score=ats.Additive(w_v))
    assert thresholds.TILE_SCORES < 8 * additive <= thresholds.ACCELERATOR_TILE_SCORES
    assert scores_of_tile(torch.empty(1, LENGTH, 8)) <= thresholds.TILE_SCORES


@pytest.mark.parametrize("name", ["cuda:0", "CUDA:3", "gpu(0)", "TPU_0(process=0,(0,0,0,0))", "mps:0"])
def test_names_of_accelerators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscore.backends.numpy import NumpyBackend

    monkeypatch.setattr(NumpyBackend, "device", lambda self, x: name)
    assert NumpyBackend().is_accelerated(None)


def test_a_gaussian_takes_products_where_reading_its_norms_is_worth_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is waited for, so short calls take the direct form."""
    x = torch.ones(300, 8)
    ops, score = backends.of({"query": x}), ats.Gaussian()
    monkeypatch.setattr(type(ops), "has_cpu_buffer", lambda self, x: False)
    assert isinstance(score.lower(ops, x, x), InnerForm)
    monkeypatch.setattr(base, "ACCELERATORS", ("cuda", "cpu"))
    assert isinstance(score.lower(ops, x, x), DistanceForm)
    monkeypatch.setattr(thresholds, "ACCELERATOR_INNER_TERMS", 300 * 300 * 8 - 1)
    assert isinstance(score.lower(ops, x, x), InnerForm)


class LargestArray(TorchDispatchMode):
    """Keeps the largest number of entries that an operation returns in memory of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and 0 not in x.stride():
                self.largest = max(self.largest, x.numel())
        return found


@pytest.mark.parametrize("query", ["top_weights", "pooled_weights", "key_mass", "attention_weights"])
def test_block_queries_make_no_matrix_of_all_pairs(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By operations of the framework, as they run on a device that the native kernel does not read."""
    monkeypatch.setattr(base, "ACCELERATORS", ("cuda", "cpu"))
    monkeypatch.setattr(thresholds, "ACCELERATOR_TILE_SCORES", 2**14)
    monkeypatch.setattr(thresholds, "POOLED_WEIGHTS", 2**14)
    monkeypatch.setattr(Native, "reasons_against", lambda self, problem: ("no array of the CPU",))
    length = 900
    x = torch.linspace(-1, 1, length * 2).reshape(length, 2)
    options: dict[str, Any] = {
        "top_weights": {"k": 3}, "pooled_weights": {"bins": (5, 4)}, "key_mass": {},
        "attention_weights": {"query_index": slice(7, 20)},
    }  # fmt: skip
    with LargestArray() as found:
        getattr(ats, query)(x, x, mask=ats.Causal(), **options[query])
    assert 0 < found.largest <= 2 * 2**14 < length * length / 20


def test_jax_goes_by_the_default_device_where_the_array_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((2, 3))
    assert not JaxBackend().is_accelerated(x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert JaxBackend().is_accelerated(x)
    assert not JaxBackend().is_accelerated(jax.device_put(x, jax.devices("cpu")[0]))


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": ats.Causal()},
    "statistics": {"score": "gaussian", "return_stats": True},
    "dropout": {"dropout": 0.1, "seed": 1, "sink": 0.5},
}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("call", CALLS)
def test_jax_lowers_for_other_platforms_without_the_cpu_kernel(platform: str, call: str) -> None:
    """Lowered, never run: no call of the native kernel, no callback into Python, forward and backward."""
    x = jnp.ones((1, 2, 70, 8), jnp.float32)

    def loss(query: Any, key: Any, value: Any) -> Any:
        found = ats.attend(query, key, value, kernel="streaming", **CALLS[call])
        return (found[0] if isinstance(found, tuple) else found).sum()

    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(x, x, x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "callback" not in text
    assert "attnscore" not in text.replace("attnscore/", "")
    assert "dot_general" in text
