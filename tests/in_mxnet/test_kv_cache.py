"""`KeyValueCache` of MXNet's arrays: appended in steps of any sizes it gives the numbers and gradients of one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as onp
import pytest
from mxnet import autograd, np

import attnscore as ats

BATCH, HEADS, DIM, LENGTH = 2, 2, 4, 11
STEPS = (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9), slice(9, 11))
windows = pytest.mark.parametrize(("window", "sinks"), [(None, 0), (3, 2), (1, 0)])


def drawn(*shape: int, seed: int) -> Any:
    return np.array(onp.random.default_rng(seed).standard_normal(shape), dtype="float64")


def three(length: int = LENGTH) -> list[Any]:
    return [drawn(BATCH, HEADS, length, DIM, seed=i) for i in range(3)]


def empty(window: int | None, sinks: int, **options: Any) -> ats.KeyValueCache:
    capacity = 16 if window is None else sinks + window + 3
    return ats.KeyValueCache(window=window, sinks=sinks, capacity=capacity, **options)


def reference_mask(window: int | None, sinks: int) -> ats.Mask:
    if window is None:
        return ats.Causal()
    return ats.Causal() & (ats.SlidingWindow(left=window - 1) | ats.KeyRange(0, sinks))


@windows
@pytest.mark.parametrize("name", ["scaled_dot", "additive"])
def test_steps_are_one_pass(window: int | None, sinks: int, name: str) -> None:
    score = ats.Additive(drawn(5, seed=7), drawn(5, DIM, seed=8), drawn(5, DIM, seed=9)) if name == "additive" else name
    inputs, weights = three(), drawn(BATCH, HEADS, LENGTH, DIM, seed=5)

    def steps(q: Any, k: Any, v: Any) -> Any:
        cache, outs = empty(window, sinks, score=score), []
        for s in STEPS:
            cache = cache.append(k[:, :, s], v[:, :, s])
            outs.append(cache.attend(q[:, :, s]))
        return np.concatenate(outs, 2)

    def one_pass(q: Any, k: Any, v: Any) -> Any:
        return ats.attend(q, k, v, mask=reference_mask(window, sinks), score=score)

    found = []
    for function in (steps, one_pass):
        for x in inputs:
            x.attach_grad()
        with autograd.record():
            out = function(*inputs)
            loss = (out * weights).sum()
        loss.backward()
        found.append([x.asnumpy() for x in (out, *(x.grad for x in inputs))])
    for a, b in zip(*found, strict=True):
        onp.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@windows
def test_lengths_of_their_own_beams_and_drafts(window: int | None, sinks: int) -> None:
    """A select, a crop and a padded append, against the sequences decoded alone."""
    q, k, v = three(6)
    first = empty(window, sinks).append(k[:, :, :3], v[:, :, :3], lens=[3, 1])
    step = slice(3, 4)
    second = first.append(k[:, :, step], v[:, :, step])
    assert first.lens.asnumpy().tolist() == [3, 1], "the cache before stays"
    moved = second.append(k[:, :, 4:6], v[:, :, 4:6]).crop([4, 2]).reorder([1, 0])
    assert moved.lens.asnumpy().tolist() == [2, 4]
    out = moved.append(k[:, :, step], v[:, :, step]).attend(q[:, :, step]).asnumpy()
    for b, (source, length) in enumerate(((1, 1), (0, 3))):
        alone, at = empty(window, sinks), slice(source, source + 1)
        for s in (slice(0, length), step):
            alone = alone.append(k[at, :, s], v[at, :, s])
        here = slice(b, b + 1)
        expected = alone.append(k[here, :, step], v[here, :, step]).attend(q[here, :, step])
        onp.testing.assert_allclose(out[here], expected.asnumpy(), rtol=1e-12)
    assert moved.select([1, 1, 0]).lens.asnumpy().tolist() == [4, 4, 2]


def test_a_file_and_what_it_shows(tmp_path: Path) -> None:
    q, k, v = three(3)
    cache = ats.KeyValueCache(capacity=4).append(k, v, lens=[3, 2])
    assert repr(cache) == "KeyValueCache(3 of 4 slots, batch 2, head 2)"
    assert cache.positions.asnumpy().tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]]
    assert cache.next_positions(1).asnumpy().tolist() == [[3], [2]]
    assert cache.nbytes == 2 * BATCH * HEADS * 4 * DIM * 8
    assert cache.append(k, v).lens.asnumpy().tolist() == [4, 4], "what does not fit is dropped"
    cache.save(tmp_path / "cache.npz")
    loaded = ats.KeyValueCache.load(tmp_path / "cache.npz", like=q)
    step = slice(2, 3)
    outs = [c.append(k[:, :, step], v[:, :, step]).attend(q[:, :, step]).asnumpy() for c in (cache, loaded)]
    onp.testing.assert_array_equal(*outs)
    with pytest.raises(ats.ArgumentError, match="capacity: expected a number of positions, got None"):
        ats.KeyValueCache().append(k, v)
