"""Tests of the GPU kernels: on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).

The interpreter of Triton 3.8 multiplies the bits of bfloat16 in place of the numbers, and cuts bits off where a float32
becomes a bfloat16. Both are mended here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.kernels.triton import tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Without it, PyTorch's products refuse to run under `use_deterministic_algorithms`.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _mend_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot, convert_float = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def as_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert_float(x, source, target, rounding)
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        to_nearest_even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FC0), to_nearest_even)

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._convert_float = convert


if INTERPRETED:
    _mend_bfloat16()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--every N`, the first row of each test and every N-th after it: the rest of a table goes round with it."""
    rows: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left if rows[name] % config.getoption("--every") else kept).append(item)
        rows[name] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def _tiles_of_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, inputs of a dozen positions have several tiles, of different sizes in each kernel."""
    sizes = {"forward": (4, 8), "d_query": (8, 4), "d_key": (4, 8)}
    monkeypatch.setattr(tiles, "INTERPRETED", {name: tiles.Tile(*size, 4, 1) for name, size in sizes.items()})


@pytest.fixture(autouse=True)
def _memory_is_not_zero_by_chance() -> Iterator[None]:
    """New arrays hold NaN and the largest integers, so that what no kernel has written is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def reversed_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in the opposite order."""
    if not INTERPRETED:
        pytest.skip("a GPU orders the programs by itself")
    from triton.runtime.interpreter import InterpreterBuilder

    set_grid_idx = InterpreterBuilder.set_grid_idx

    def from_the_end(self: Any, *index: int) -> None:
        set_grid_idx(self, *(size - 1 - k for size, k in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", from_the_end)
