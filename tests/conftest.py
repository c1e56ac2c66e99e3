"""Fixtures that the generic tests share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch

from attnscore import kernels, scoring, tiling

# In an environment of their own, which tests/test_mxnet.py starts.
collect_ignore = ["in_mxnet"]


@pytest.fixture(autouse=True)
def _tables_as_found() -> Iterator[None]:
    """What an example or a test registers is gone with it: other tests list the names in messages."""
    before = [(table, dict(table)) for table in (scoring._TABLE, kernels._TABLE)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


# The tables have float64 rows, which JAX would make float32; tests/test_jax.py has the narrow width too.
jax.config.update("jax_enable_x64", True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 x 4 scores: inputs of a dozen positions are then walked over in many tiles, some of them partial."""
    monkeypatch.setattr(tiling, "TILE_SCORES", 1)
    monkeypatch.setattr(tiling, "SMALLEST_TILE", 4)


@pytest.fixture
def torch_seed() -> None:
    """torch's own generator, set."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On tensors of a few hundred numbers a second thread only spins: it doubled the time of these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
