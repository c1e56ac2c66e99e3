"""The door to the native kernels: the caller's own memory goes through it, and only what is wanted is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.kernels import Kernel
from native_cases import GRADIENTS, INPUTS, note_calls


@pytest.fixture
def arrays_of_call(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray | None]:
    """The inputs of the forward and the gradients of the backward that the module was called with last."""
    found: dict[str, np.ndarray | None] = {}

    def note(which: str, arguments: Any, _: Any) -> None:
        names, arrays = (INPUTS, arguments[1]) if which == "forward" else (GRADIENTS, arguments[4])
        found.update(zip(names, arrays, strict=True))

    note_calls(monkeypatch, note)
    # What is prepared for all calls passes by it.
    monkeypatch.setattr("attnscore.kernels.native.kernel.Native.prepare", Kernel.prepare)
    return found


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("head_axis", [-3, -2])
def test_nothing_that_lies_ready_is_copied(framework: str, head_axis: int, arrays_of_call: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    shape = (2, 4, 7, 8) if head_axis == -3 else (2, 7, 4, 8)
    whole = {name: rng.standard_normal((*shape[:-1], 16)).astype("f4") for name in ("query", "key", "value")}
    whole |= {"bias": rng.standard_normal((4, 7, 7)).astype("f4"), "mask": rng.random((2, 1, 1, 7)) > 0.3}
    arrays = {name: x[..., ::2] if x.shape[-1] == 16 else x for name, x in whole.items()}
    given = {name: torch.from_numpy(x) if framework == "torch" else x for name, x in arrays.items()}
    mask = ats.Dense(given.pop("mask"))
    ats.attend(**given, mask=mask, head_axis=head_axis, kernel="native")
    for name, x in whole.items():
        seen = arrays_of_call[name]
        assert seen is not None
        assert np.shares_memory(seen, x), name
    assert arrays_of_call["bias"].shape == (1, 4, 1, 7, 7)
    assert arrays_of_call["mask"].shape == (2, 1, 1, 1, 7)
    assert {n for n, x in arrays_of_call.items() if x is not None} == {"query", "key", "value", "bias", "mask"}


@pytest.mark.parametrize("wanted", [(), ("bias",), ("sink",), ("bias", "sink")], ids=str)
def test_gradients_for_what_is_wanted_alone(wanted: tuple[str, ...], arrays_of_call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    arrays = {"query": torch.randn(1, 4, 5, 3), "key": torch.randn(1, 2, 6, 3), "value": torch.randn(1, 2, 6, 3)}
    arrays |= {"bias": torch.randn(5, 6), "sink": torch.randn(4)}
    for name in ("query", *wanted):
        arrays[name].requires_grad_()
    ats.attend(**arrays, kernel="native").sum().backward()
    filled = {name for name in ("bias", "sink") if arrays_of_call[f"grad_{name}"] is not None}
    assert filled == set(wanted)
    assert {name for name, x in arrays.items() if x.grad is not None} == {"query", *wanted}
    if "bias" in wanted:
        assert arrays_of_call["grad_bias"].shape == (1, 1, 1, 5, 6)


def test_heads_that_share_keys_share_their_gradient(arrays_of_call: dict[str, Any]) -> None:
    """Also over the batch: the sum over what was broadcast is the kernels' own."""
    query = torch.randn(3, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(2))
    ats.attend(query, key, value, kernel="native").sum().backward()
    assert arrays_of_call["grad_key"].shape == (1, 2, 1, 6, 8)
    assert arrays_of_call["grad_query"].shape == (3, 2, 2, 5, 8)


@pytest.mark.parametrize(
    "mask",
    [
        ats.Dense(np.tri(6, dtype=bool)) & ats.Documents([0, 1, 0, 1, -1, 0]) & ats.SlidingWindow(left=3),
        ats.KeyPadding([[1, 0, 1, 1, 0, 1]]) & ats.Causal(),
        ats.Documents([[0, 1, 0, 1, -1, 0]]),
        ats.Documents([0, 1, 0, 1, -1, 0]) & ats.Documents([[3, 2**61, 2**61, 2**61, 0, 3]]),
        ats.Dense(np.tri(6, dtype=bool)) & ats.KeyPadding([[1, 0, 1, 1, 0, 1]]) & ats.Documents([0, 1, 0, 1, -1, 0]),
        ats.Dense(np.tri(6, dtype=bool)) & ats.Dense(np.tri(6, dtype=bool)[::-1]) | ats.KeyRange(2, 3),
        ats.KeyPadding([[1, 0, 1, 1, 0, 1]]) & ats.KeyPadding([[1, 1, 0, 1, 0, 0]]),
    ],
    ids=repr,
)
def test_arrays_and_documents_beside_intervals(mask: ats.Mask) -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 3))
    found, wanted = (ats.attend(x, x, x, mask=mask, kernel=kernel) for kernel in ("native", "dense"))
    np.testing.assert_allclose(found, wanted, atol=1e-14)
