"""What the tuning command checks before it times a tile: results of the kernel with that tile, against float64."""

from __future__ import annotations

from typing import Any

import pytest
from device_calls import DEVICE

from attnscore.kernels.triton import additive_gradients, launch
from attnscore.kernels.triton.tiles import FORMS, Entry, Tile, kernels_of
from bench import gpu, gpu_tune

ENTRIES = [(form, kernel) for form in FORMS for kernel in kernels_of(form) if (form, kernel) != ("additive", "d_query")]
SHAPE = (1, 2, 1, 20, 23)
TILE = Tile(32, 16, 4, 1)


@pytest.fixture(autouse=True)
def _sums_of_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_gradients, "INTERPRETED_TILE", (4, 4))


@pytest.mark.parametrize(
    ("form", "kernel"), [pytest.param(*row, marks=[pytest.mark.slow] if k else []) for k, row in enumerate(ENTRIES)]
)
def test_a_tile_is_checked_in_the_kernel_that_it_is_for(
    form: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gpu_tune.Call(Entry(90, kernel, form, "float32", 32), SHAPE, DEVICE)
    launched: list[tuple[str, Any]] = []

    def noted(self: Any, function: Any, grid: Any, *operands: Any, **constants: Any) -> None:
        launched.append((function.__name__, constants.get("BM")))
        function[grid](*operands, **constants)

    monkeypatch.setattr(launch.Runner, "run", noted)
    found = call.gradients(gpu_tune.runner_of(call.entry, TILE))
    assert (kernel, TILE.queries) in launched
    reference = call.reference()
    assert gpu_tune.largest_difference(found, reference) <= gpu.TOLERANCE["float32"]
    assert set(found) == ({"out"} if kernel == "forward" else set(reference))
