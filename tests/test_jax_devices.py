"""JAX over several devices: ``shard_map``, meshes whose axes are part of the types, arrays that are spread already.

What types say is checked on one device; the last test runs all of this again on two, where sums over devices are sums.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import attnscore as ats

DEVICES = len(jax.devices())
ALL, BATCH = jax.P(), jax.P("batch")
_DEFAULT = ("auto", "lengths"), ("streaming", "causal")
MASKS: dict[str, Any] = {
    "none": lambda _: {},
    "causal": lambda _: {"mask": ats.Causal("bottom_right")},
    "lengths": lambda lens: {"valid_lens": lens},
}
# Every program is compiled, which takes seconds: by default each kernel meets the mask that it has most to do with.
pairs = pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        pytest.param(kernel, mask, marks=() if (kernel, mask) in _DEFAULT else pytest.mark.slow)
        for kernel in ("auto", "streaming")
        for mask in MASKS
    ],
)


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((DEVICES,), ("batch",), axis_types=(kind,))


def inputs(key_batch: int = 4) -> tuple[Any, ...]:
    """Four batches, or keys that all of them share; and their lengths."""
    rng = np.random.default_rng(0)
    shapes = (4, 2, 9, 5), (key_batch, 1, 11, 5), (key_batch, 1, 11, 3)
    return (*(jnp.asarray(rng.standard_normal(shape)) for shape in shapes), jnp.asarray([11, 3, 0, 7]))


def gradients(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    def loss(*arrays: Any) -> Any:
        return (function(*arrays) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)


def close(got: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11, rtol=1e-11)


@pairs
@pytest.mark.parametrize("key_batch", [4, 1], ids=["keys of each", "keys for all"])
@pytest.mark.slow_rows("keys for all-streaming-causal", "keys of each-auto-lengths")
def test_shard_map(key_batch: int, mask: str, kernel: str, small_tiles: None) -> None:
    """Gradients of what all devices share are sums over them."""
    arrays, spread = inputs(key_batch), BATCH if key_batch > 1 else ALL

    def call(query: Any, key: Any, value: Any, lens: Any, kernel: str = kernel) -> Any:
        return ats.attend(query, key, value, kernel=kernel, **MASKS[mask](lens))

    def parallel(*arrays: Any) -> Any:
        specs = BATCH, spread, spread, BATCH
        return jax.shard_map(call, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=BATCH)(*arrays)

    close(gradients(parallel, arrays), gradients(partial(call, kernel="dense"), arrays))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_projection_that_all_devices_share(kind: AxisType) -> None:
    """Its gradient is a sum over them, without the keys that the mask hides."""
    arrays = jnp.asarray(np.random.default_rng(1).standard_normal((5, 5))), *inputs()

    def call(weight: Any, query: Any, key: Any, value: Any, lens: Any) -> Any:
        return ats.attend(query, key, value, score=ats.Bilinear(weight), valid_lens=lens)

    wanted = gradients(call, arrays)
    weight, query, key, value, lens = arrays
    hidden = weight, query, key.at[1, :, 3:].set(jnp.nan), value, lens
    specs, mesh = (ALL, BATCH, BATCH, BATCH, BATCH), mesh_of(kind)
    if kind is AxisType.Auto:
        close(gradients(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=BATCH), hidden), wanted)
    else:
        with jax.set_mesh(mesh):
            close(gradients(call, tuple(map(jax.device_put, hidden, specs))), wanted)


@pairs
@pytest.mark.slow_rows("streaming-causal")
def test_a_mesh_whose_axes_are_part_of_the_types(mask: str, kernel: str, small_tiles: None) -> None:
    arrays = inputs()

    def call(query: Any, key: Any, value: Any, lens: Any, kernel: str = kernel) -> Any:
        return ats.attend(query, key, value, kernel=kernel, **MASKS[mask](lens))

    wanted = gradients(partial(call, kernel="dense"), arrays)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        spread = tuple(jax.device_put(x, BATCH) for x in arrays)
        close(gradients(call, spread), wanted)
        out = jax.jit(call)(*spread)
        assert out.sharding.spec[0] == "batch", "the results lie where the queries do"


def test_arrays_that_are_spread_already() -> None:
    """The compiler gathers them around a custom call; plain calls stream over them where they lie."""
    *arrays, _ = inputs()
    place = jax.NamedSharding(mesh_of(AxisType.Auto), BATCH)
    spread = [jax.device_put(x, place) for x in arrays]
    wanted = ats.attend(*arrays)
    close(jax.jit(ats.attend)(*spread), wanted)
    out = ats.attend(*spread)
    close(out, wanted)
    assert DEVICES == 1 or out.sharding == place


@pytest.mark.slow
@pytest.mark.skipif(DEVICES > 1, reason="this is the run on several")
def test_all_of_this_on_two_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "failed" not in done.stdout
