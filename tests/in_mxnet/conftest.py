"""What all of these need: MXNet, quietly, and the tables and helpers of the other tests."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    # MXNet's own, on NumPy 1.23.
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    mx.random.seed(0)


@pytest.fixture
def numpy_semantics() -> Iterator[None]:
    """As after ``npx.set_np()``, which Gluon needs."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        yield
