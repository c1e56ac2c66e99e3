"""What is decided for accelerators, on a machine without one: tile sizes, and what JAX lowers for GPUs and TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import attnscore as ats
from attnscore.backends import base
from attnscore.backends.jax.backend import JaxBackend
from attnscore.core import tiling

LENGTH = 3000


def scores_of_tile(x: Any, **options: Any) -> int:
    plan = ats.explain(x, x, x, kernel="streaming", **options).plan
    return plan.query_tile * plan.key_tile


def test_tiles_are_larger_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose operations take as long to start; "meta" stands for one."""
    x = torch.empty(1, LENGTH, 8, device="meta")
    assert scores_of_tile(x) <= tiling.TILE_SCORES
    monkeypatch.setattr(base, "ACCELERATORS", ("cuda", "meta"))
    assert tiling.TILE_SCORES < scores_of_tile(x) <= tiling.ACCELERATOR_TILE_SCORES
    w_v = torch.empty(8, device="meta")
    additive = scores_of_tile(x, score=ats.Additive(w_v))
    assert tiling.TILE_SCORES < 8 * additive <= tiling.ACCELERATOR_TILE_SCORES
    assert scores_of_tile(torch.empty(1, LENGTH, 8)) <= tiling.TILE_SCORES


@pytest.mark.parametrize("name", ["cuda:0", "CUDA:3", "gpu(0)", "TPU_0(process=0,(0,0,0,0))", "mps:0"])
def test_names_of_accelerators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnscore.backends.numpy import NumpyBackend

    monkeypatch.setattr(NumpyBackend, "device", lambda self, x: name)
    assert NumpyBackend().is_accelerated(None)


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
