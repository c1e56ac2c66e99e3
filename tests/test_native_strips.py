"""Masks that the native kernels have evaluated, a strip of rows at a time: what comes out is what one call gives.

Strips are made of a few rows here; the whole in one strip and the streaming kernel are the references.
"""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.base import thresholds
from native_cases import native

RNG = np.random.default_rng(0)
BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 23, 67, 5


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


QUERY, KEY = draw(BATCH, HEADS, QUERIES, DIM), draw(BATCH, KEY_HEADS, KEYS, DIM)
VALUE = draw(BATCH, KEY_HEADS, KEYS, 3)
IDS, KEY_IDS = RNG.integers(-1, 3, (BATCH, QUERIES)), RNG.integers(-1, 3, (BATCH, KEYS))
DOCUMENTS = ats.Documents(IDS, KEY_IDS)
PADDING = ats.KeyPadding(RNG.random((BATCH, KEYS)) < 0.6)


@dataclass(frozen=True, eq=False, repr=False)
class OfRows(ats.Mask):
    """A user's own mask: all keys or none."""

    def visible(self, ops: Any, grid: Any, rows: Any, cols: Any) -> Any:
        return rows % 3 > 0

    def check(self, ops: Any, grid: Any) -> None:
        pass


MASKS = {
    "a function": ats.MaskFunction(lambda b, h, i, j: (3 * i + 5 * j) % 7 < 3),
    "a function of batch and heads": ats.MaskFunction(lambda b, h, i, j: (3 * i + 5 * j + b + 2 * h) % 7 < 3),
    "within intervals": ats.MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0) & ats.Causal(offset=[5, -3]),
    "with holes": ats.MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0) & ~ats.KeyRange(4, 41),
    "or documents": ats.Causal("bottom_right") | DOCUMENTS,
    "beside documents": ats.MaskFunction(lambda b, h, i, j: (i * j) % 5 < 3) & DOCUMENTS & PADDING,
    "neither documents nor keys": ~(DOCUMENTS | PADDING),
    "keys or keys": PADDING | ats.KeyPadding(np.arange(KEYS)[None] % 3 > 0),
    "arrays, larger together": ats.Dense(RNG.random((QUERIES, 1)) < 0.8) & ats.Dense(RNG.random((1, KEYS)) < 0.5),
    "an array of heads, or causal": ats.Dense(RNG.random((HEADS, QUERIES, KEYS)) < 0.3) | ats.Causal("top_left"),
    "one's own": OfRows(),
    "rows that see nothing": ats.MaskFunction(lambda b, h, i, j: (i + j) % 2 > 0) & ats.ValidLens([KEYS, 9], [7, 0]),
}
SCORES = {
    "scaled_dot": "scaled_dot",
    "additive": ats.Additive(draw(HEADS, DIM)),
    "distance": ats.Gaussian(np.array([0.5, 2.0, 3.0, 4.0])),
    "scaled keys": ats.SoftCap(ats.ScaledDot(draw(1, KEYS)), 3.0),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink and bias": {"sink": draw(HEADS), "bias": draw(HEADS, QUERIES, KEYS)},
    "bias of keys": {"bias": draw(BATCH, 1, 1, KEYS)},
    "dropout": {"dropout": 0.3, "seed": 2**45 + 5, "sink": 0.5, "bias": draw(QUERIES, KEYS)},
}


def results(mask: Any, score: str, extras: str, **more: Any) -> list[np.ndarray]:
    """Output, statistics and all gradients."""
    arguments = {"mask": mask, "score": SCORES[score], **EXTRAS[extras], **more}
    _, stats = ats.attend(QUERY, KEY, VALUE, **arguments, return_stats=True)
    found = ats.attend_vjp(QUERY, KEY, VALUE, **arguments)
    grads = found[1](np.cos(np.arange(found[0].size)).reshape(found[0].shape))
    names = [name for name in stats._fields if name != "sum_weights"]
    kept = [found[0], *(getattr(stats, name) for name in names), grads.query, grads.key, grads.value]
    return [*kept, *(x for x in (grads.bias, grads.sink) if x is not None), *grads.score.values()]


def in_turn() -> list[tuple[str, str, str]]:
    """Every mask under each score and each of the extras, these in turn."""
    return [
        (mask, score, extras)
        for (i, mask), (j, score), (k, extras) in itertools.product(*map(enumerate, (MASKS, SCORES, EXTRAS)))
        if (i + j + k) % 4 == 0
    ]


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Strips of so many rows, asked for so many pairs at a time."""

    def of(rows: int, pairs: int = 2**20) -> None:
        monkeypatch.setattr(thresholds, "CHUNK_BYTES", 1)
        monkeypatch.setattr(thresholds, "CHUNK_ROWS", rows)
        monkeypatch.setattr(thresholds, "EVALUATED_PAIRS", pairs)

    return of


@pytest.mark.parametrize(("mask", "score", "extras"), in_turn())
def test_strips_are_one_call(mask: str, score: str, extras: str, strips: Any) -> None:
    expected = results(MASKS[mask], score, extras, kernel="streaming")
    for rows, pairs in ((QUERIES, 2**20), (QUERIES - 1, 1), (7, 200), (1, 2**20)):
        strips(rows, pairs)
        found = results(MASKS[mask], score, extras, kernel="native")
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * max(1.0, np.abs(y[np.isfinite(y)]).max(initial=0)))


def test_as_many_threads_as_there_are() -> None:
    x = torch.randn(1, 2, 1100, 16)
    mask = ats.MaskFunction(lambda b, h, i, j: (i * 3 + j * 5) % 7 < 3)
    found = []
    before = ats.get_num_threads()
    for threads in (1, 2, 5):
        ats.set_num_threads(threads)
        torch.set_num_threads(threads)
        query, key, value = (x.clone().requires_grad_() for _ in range(3))
        out = ats.attend(query, key, value, mask=mask, kernel="native")
        found.append([out, *torch.autograd.grad(out, (query, key, value), torch.cos(out.detach()))])
    ats.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_what_is_hidden_stays_hidden(strips: Any) -> None:
    strips(7)
    mask = ats.MaskFunction(lambda b, h, i, j: (j % 5 > 0) & ((i + j) % 3 > 0))
    clean = ats.attend_vjp(QUERY, KEY, VALUE, mask=mask, kernel="native")
    key, value = KEY.copy(), VALUE.copy()
    key[..., ::5, :], value[..., ::5, :] = np.nan, np.inf
    out, pullback = ats.attend_vjp(QUERY, key, value, mask=mask, kernel="native")
    found = (out, *pullback(np.ones_like(out))[:3])
    # The same bits. In a tile with NaN products and sums are apart, which differs where nothing is fused.
    rounding = 1e-14 if native.current_target() == "portable" else 0
    for x, y in zip(found, (clean[0], *clean[1](np.ones_like(out))[:3]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rounding)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 1), (1, 65), (97, 3)])
def test_odd_sizes(queries: int, keys: int, strips: Any) -> None:
    strips(4)
    query, key = draw(1, 2, queries, 3), draw(1, 2, keys, 3)
    mask = ats.MaskFunction(lambda b, h, i, j: (i + j + h) % 3 > 0) | ats.Documents(range(queries), range(keys))
    for dropout in (0.0, 0.5):
        found, expected = (
            ats.attend(query, key, key, mask=mask, kernel=kernel, dropout=dropout, seed=1)
            for kernel in ("native", "streaming")
        )
        np.testing.assert_allclose(found, expected, atol=1e-14)


def test_what_pieces_hide_is_not_asked_for() -> None:
    """Keys outside the window of a strip are not evaluated."""
    asked = 0

    def counted(batch: Any, head: Any, query: Any, key: Any) -> Any:
        nonlocal asked
        asked += query.shape[2] * key.shape[3]
        return (query + key) % 2 == 0

    x = draw(1, 1, 4096, 2).astype("f4")
    mask = ats.MaskFunction(counted) & ats.SlidingWindow(100, 0)
    ats.explain(x, x, x, mask=mask)  # once for the pieces that it has not
    asked = 0
    ats.attend(x, x, x, mask=mask, kernel="native")
    assert asked <= 4096 * 4096 // 4


def test_memory_is_that_of_a_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 x 4096 booleans are 16 MB, the numbers on their way 8 times as many."""
    monkeypatch.setattr(thresholds, "CHUNK_BYTES", 2**19)
    monkeypatch.setattr(thresholds, "EVALUATED_PAIRS", 2**16)
    x, ids = draw(1, 1, 4096, 2).astype("f4"), RNG.integers(0, 9, 4096)
    tracemalloc.start()
    out, pullback = ats.attend_vjp(x, x, x, mask=ats.Documents(ids) | ats.SlidingWindow(9, 0), kernel="native")
    pullback(out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_weights_on_demand() -> None:
    """Maps of the weights come from the same calls."""
    mask = MASKS["beside documents"]
    weights = ats.attention_weights(QUERY, KEY, mask=mask)
    np.testing.assert_allclose(ats.key_mass(QUERY, KEY, mask=mask), weights.sum(-2), atol=1e-12)
    pooled = ats.pooled_weights(QUERY, KEY, (1, KEYS), mask=mask)
    np.testing.assert_allclose(pooled[..., 0, :], weights.sum(-2), atol=1e-12)
    top = ats.top_weights(QUERY, KEY, 3, mask=mask)
    np.testing.assert_allclose(top.weights, -np.sort(-weights, -1)[..., :3], atol=1e-12)
