"""Watching Keras models, on each of Keras's backends: a process of ``tests/keras_checks`` each."""

from __future__ import annotations

import pytest

from test_layers_keras import run_checks


@pytest.mark.parametrize(
    "backend",
    ["torch", pytest.param("tensorflow", marks=pytest.mark.slow), pytest.param("jax", marks=pytest.mark.slow)],
)
def test_every_backend(backend: str) -> None:
    run_checks(backend, ("check_watch.py",), "")  # none of its checks is marked slow
