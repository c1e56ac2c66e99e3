"""Additive scores that the native forward hands to the backward of a short call: nothing but time tells of them.

Their gradients are held to the oracle with and without them in ``test_native_oracle``, their bits in
``test_native_threads``; here are when they are kept, how much that is, and who must not see them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnscore as ats
from attnscore.base import thresholds
from attnscore.kernels.native import in_memory, marshalling
from attnscore.kernels.native import plan as native_plan
from native_cases import note_calls

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 130, 197, 9
PAIRS = BATCH * HEADS * QUERIES * KEYS
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


IDS = np.sort(RNG.integers(0, 4, (BATCH, QUERIES))), np.sort(RNG.integers(0, 4, (BATCH, KEYS)))
# Among them masks under which the directions cut keys into other tiles, and the forward skips some.
MASKS = {
    "none": None,
    "causal": ats.Causal("bottom_right"),
    "lengths": ats.ValidLens([150, 3]),
    "window": ats.SlidingWindow(20, 3, "bottom_right"),
    "a hole": ~ats.KeyRange(40, 141),
    "documents": ats.Documents(*IDS),
    "array": ats.Dense(RNG.random((BATCH, 1, QUERIES, KEYS)) < 0.5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and sink": {"bias": draw(HEADS, QUERIES, KEYS), "sink": draw(HEADS)},
    "bias of keys": {"bias": draw(BATCH, 1, 1, KEYS)},
    "dropout": {"dropout": 0.3, "seed": 5},
}


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The scores of each call of the module, forwards and backwards, None where there are none."""
    seen: list[Any] = []
    place = {"forward": 3, "backward": 4}
    note_calls(monkeypatch, lambda which, arguments, run: seen.append(arguments[2][place[which]]))
    return seen


@pytest.fixture
def old_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not cleared holds NaN."""
    aligned = marshalling.allocate_aligned

    def dirty(make: Any, shape: Any, dtype: str) -> np.ndarray:
        x = aligned(make, shape, dtype)
        if make is np.empty and x.dtype.kind == "f":
            x.fill(np.nan)
        return x

    for module in (in_memory, native_plan):
        monkeypatch.setattr(module, "allocate_aligned", dirty)


def inputs(dtype: str = "f8") -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = (BATCH, HEADS, QUERIES, DIM), (BATCH, HEADS // 2, KEYS, DIM), (BATCH, HEADS // 2, KEYS, 5)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def pulled(arrays: list[np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """The output and every gradient, with incoming gradients of log-sum-exp and entropy."""
    (out, _), pullback = ats.attend_vjp(*arrays, kernel="native", return_stats=("log_sum_exp", "entropy"), **options)
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal(out.shape[:-1]).astype(out.dtype) for _ in range(2))
    found = pullback(rng.standard_normal(out.shape).astype(out.dtype), *rows)._asdict()
    return {"out": out, **found.pop("score"), **{name: x for name, x in found.items() if x is not None}}


def both(monkeypatch: pytest.MonkeyPatch, arrays: list[np.ndarray], **options: Any) -> tuple[dict[str, Any], ...]:
    kept = pulled(arrays, **options)
    monkeypatch.setattr(thresholds, "SAVED_SCORES", 0)
    return kept, pulled(arrays, **options)


def agree(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    for name, x in wanted.items():
        scale = np.abs(x[np.isfinite(x)]).max(initial=1)
        np.testing.assert_allclose(found[name], x, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_nothing_changes(
    mask: str, options: str, handed: list[Any], old_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = ats.SoftCap(ats.Additive(draw(HEADS, DIM)), 2.0) if options == "dropout" else ats.Additive(draw(DIM))
    kept, again = both(monkeypatch, inputs(), score=score, mask=MASKS[mask], **OPTIONS[options])
    agree(kept, again, 1e-13)
    assert [x is not None for x in handed] == [True, True, False, False]


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu", "silu", "gelu"])
@pytest.mark.parametrize("hidden", [True, False])
def test_what_is_not_finite(hidden: bool, activation: str, old_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind hidden pairs it reaches nothing, with the same bits; where it is seen it shows, in the same places."""
    query, key, value = inputs("f4")
    score = ats.Additive(draw(DIM).astype("f4"), activation=activation)
    mask, lengths = ats.SlidingWindow(9, 9, "top_left"), ats.ValidLens([150, 60])
    clean = pulled([query, key, value], score=score, mask=mask & lengths)
    key[0, 0, 160 if hidden else 70], query[1, 2, 120 if hidden else 5] = np.inf, np.nan
    kept, again = both(monkeypatch, [query, key, value], score=score, mask=mask & lengths)
    agree(kept, again, 1e-5)
    if hidden:
        for name, x in clean.items():
            np.testing.assert_array_equal(kept[name], x, err_msg=name)


@pytest.mark.parametrize(("most", "keeps"), [(PAIRS, True), (PAIRS - 1, False)])
def test_the_most_that_is_kept(most: int, keeps: bool, handed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound nothing that autograd holds is as large as a matrix, nor as anything but the inputs."""
    monkeypatch.setattr(thresholds, "SAVED_SCORES", most)
    held: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        held.append(tuple(x.shape[-2:]))
        return x

    leaves = [torch.tensor(x, requires_grad=True) for x in inputs()]
    for stats in (False, False, ("entropy",)):  # planned, found again, and another plan
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = ats.attend(*leaves, score=ats.Additive(torch.randn(DIM).double()), return_stats=stats)
        out = found[0] if stats else found
        held += [x.shape[-2:] for x in out.grad_fn.run.saved]
        out.sum().backward()
        assert held.count((QUERIES, KEYS)) == keeps
        held.clear()
    assert [x is not None for x in handed] == [keeps] * 6


def test_the_bound_is_a_few_megabytes() -> None:
    assert thresholds.SAVED_SCORES * 8 <= 2**23


@pytest.mark.parametrize(
    "options",
    [{"score": "scaled_dot"}, {"mask": ats.MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0)}],
    ids=["another form", "a mask in strips"],
)
def test_what_keeps_nothing(options: dict[str, Any], handed: list[Any]) -> None:
    pulled(inputs(), **({"score": ats.Additive(draw(DIM))} | options))
    assert len(handed) > 1
    assert handed == [None] * len(handed)


def test_without_a_gradient_nothing_is_kept(handed: list[Any]) -> None:
    arrays, score = [torch.tensor(x) for x in inputs()], ats.Additive(torch.randn(DIM).double())
    for stats in (False, True):
        options = {"score": score, "return_stats": stats}
        ats.attend(*arrays, **options)
        with torch.no_grad():
            ats.attend(*[x.clone().requires_grad_() for x in arrays], **options)
        ats.attend(*[x.numpy() for x in arrays], score=ats.Additive(score.w_v.numpy()), return_stats=stats)
    assert handed == [None] * 6


def test_in_torch(handed: list[Any]) -> None:
    """Statistics changed in place, gradients of single arrays, a backward twice, checkpoints and transforms."""
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs()]
    w_v = torch.randn(DIM, dtype=torch.float64, requires_grad=True)
    leaves.append(w_v)

    def total(*x: torch.Tensor) -> torch.Tensor:
        out, stats = ats.attend(*x[:3], score=ats.Additive(x[3]), mask=ats.Causal("top_left"), return_stats=True)
        stats.max_weight.mul_(2)
        return out.sum() + stats.entropy.square().sum() + stats.log_sum_exp.sum()

    value = total(*leaves)
    wanted = torch.autograd.grad(value, leaves, retain_graph=True)
    assert all(x is not None for x in handed)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(value, w_v, retain_graph=True)[0], wanted[3])
    for reentrant in (False, True):
        found = [x.detach().requires_grad_() for x in leaves]
        checkpoint(total, *found, use_reentrant=reentrant).backward()
        torch.testing.assert_close([x.grad for x in found], list(wanted))
    mapped = torch.func.vmap(lambda a: a * total(*leaves))(torch.ones(2))
    torch.testing.assert_close(torch.autograd.grad(mapped.sum(), leaves), tuple(2 * x for x in wanted))


def test_second_derivatives() -> None:
    rng = np.random.default_rng(3)
    leaves = [torch.tensor(rng.standard_normal(shape), requires_grad=True) for shape in ((3, 2), (4, 2), (4, 3), (2,))]
    torch.autograd.gradgradcheck(lambda q, k, v, w: ats.attend(q, k, v, score=ats.Additive(w)), leaves)
