"""Caches of keys and values: appended in steps of any sizes they give the numbers and gradients of one pass."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import attnscore as ats
from attnscore import backends
from attnscore import kv_cache as cache_module
from attnscore.errors import FileError
from attnscore.layers.torch import MultiHeadAttention
from attnscore.plans import plan
from cases import needs_native

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, HEADS, DIM = 3, 2, 4
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
# (window, sinks)
WINDOWS = ((None, 0), (1, 0), (1, 2), (3, 0), (3, 2), (6, 1), (40, 3))
windows = pytest.mark.parametrize(("window", "sinks"), WINDOWS)
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
# Those with functional caches with one window, the others with all: JAX compiles each shape of each operation.
everywhere = pytest.mark.parametrize(
    ("framework", "window", "sinks"),
    [
        *[(name, *each) for name in FRAMEWORKS[:2] for each in WINDOWS],
        ("jax", 3, 2),
        ("tensorflow", 3, 2),
        *(pytest.param(name, None, 0, marks=pytest.mark.slow) for name in FRAMEWORKS[2:]),
    ],
)
# Positions that each sequence appends in each step: single ones in a row, longer steps, none at all.
STEPS = ((3, 1, 2), (1, 1, 1), (0, 2, 1), (1, 1, 1), (4, 4, 4), (1, 0, 1), (0, 0, 0), (1, 1, 1), (2, 5, 3), (1, 1, 1))
EVEN = ((5, 5, 5), (1, 1, 1), (1, 1, 1), (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1))


def _array(framework: str, x: Any) -> Any:
    if framework == "torch":
        return torch.as_tensor(x)
    if framework == "tensorflow":
        return tf.constant(x)
    return jnp.asarray(x) if framework == "jax" else np.asarray(x)


def _drawn(framework: str, *shape: int, seed: int = 0) -> Any:
    return _array(framework, np.random.default_rng(seed).standard_normal(shape))


X = np.ones((2, HEADS, 3, DIM))


def _cache(key: Any = X, value: Any = None, **options: Any) -> ats.KeyValueCache:
    """A new cache after an append, of `key` as values too where they are not given."""
    return ats.KeyValueCache(**options).append(key, key if value is None else value)


SCORES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "none": lambda _: None,
    "dot": lambda _: "dot",
    "additive": lambda draw: ats.Additive(draw(5), draw(5, DIM), draw(5, DIM), draw(5)),
    "additive-heads": lambda draw: ats.Additive(draw(HEADS, 5), draw(HEADS, 5, DIM), draw(HEADS, 5, DIM)),
    "bilinear": lambda draw: ats.Bilinear(draw(DIM, DIM)),
    "cosine": lambda _: ats.Cosine(2.0),
    "gaussian": lambda _: ats.Gaussian(1.5),
    "capped": lambda draw: ats.SoftCap(ats.Bilinear(draw(DIM, DIM)), 2.0),
}


def _score(name: str, framework: str) -> Any:
    seeds = itertools.count(10)
    return SCORES[name](lambda *shape: _drawn(framework, *shape, seed=next(seeds)))


def _reference_mask(window: int | None, sinks: int, length: int) -> ats.Mask:
    if window is None:
        return ats.Causal()
    return ats.Causal() & (ats.SlidingWindow(left=window - 1) | ats.KeyRange(0, min(sinks, length)))


def _one_pass(q: Any, k: Any, v: Any, window: int | None, sinks: int, score: Any, lens: Any) -> Any:
    mask = _reference_mask(window, sinks, q.shape[2]) & ats.ValidLens(lens, lens)
    return ats.attend(q, k, v, mask=mask, score="scaled_dot" if score is None else score)


def _steps(steps: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each step the positions (batch, n) that it appends, clipped to real ones, and how many count."""
    at, last = np.zeros(BATCH, int), np.sum(steps, 0).max() - 1
    for counts in map(np.array, steps):
        yield np.minimum(at[:, None] + np.arange(counts.max()), last), counts
        at = at + counts


def _picked(x: Any, index: np.ndarray) -> Any:
    """Rows x[b, :, index[b]] of each sequence."""
    if isinstance(x, tf.Tensor):
        return tf.stack([tf.gather(x[b], index[b], axis=1) for b in range(BATCH)])
    stack = torch.stack if isinstance(x, torch.Tensor) else jnp.stack if isinstance(x, jax.Array) else np.stack
    return stack([x[b][:, index[b]] for b in range(BATCH)])


def _in_steps(cache: ats.KeyValueCache, q: Any, k: Any, v: Any, steps: Any) -> tuple[ats.KeyValueCache, list[Any]]:
    """The cache after the steps, and the real rows of the outputs, (head, n, dim) of each step and sequence."""
    rows = []
    for index, counts in _steps(steps):
        cache = cache.append(_picked(k, index), _picked(v, index), lens=counts)
        out = cache.attend(_picked(q, index))
        rows += [(b, index[b][:n], out[b][:, :n]) for b, n in enumerate(counts)]
        for b, n in enumerate(counts):
            padding = out[b][:, n:]
            padding = padding.detach() if isinstance(padding, torch.Tensor) else padding
            assert not np.asarray(padding).any(), "padding gives zero"
    return cache, rows


@pytest.fixture(autouse=True)
def _float64_in_jax() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ------------------------------------------------------------------ steps are one pass


@everywhere
@pytest.mark.parametrize("steps", [STEPS, EVEN], ids=["ragged", "even"])
@pytest.mark.slow_rows("ragged-jax-*", "ragged-tensorflow-*")
def test_steps_are_one_pass(framework: str, window: int | None, sinks: int, steps: Any) -> None:
    lens = np.sum(steps, 0)
    q, k, v = (_drawn(framework, BATCH, HEADS, lens.max(), DIM, seed=i) for i in range(3))
    whole = np.asarray(_one_pass(q, k, v, window, sinks, None, lens))
    capacity = None if framework in ("numpy", "torch") else 32 if window is None else sinks + window + np.max(steps) - 1
    cache = ats.KeyValueCache(window=window, sinks=sinks, capacity=None if capacity is None else int(capacity))
    cache, rows = _in_steps(cache, q, k, v, steps)
    for b, index, out in rows:
        np.testing.assert_allclose(np.asarray(out), whole[b][:, index], rtol=1e-12, atol=1e-12)
    assert np.asarray(cache.lens).tolist() == lens.tolist()


@pytest.mark.parametrize(
    ("name", "window", "sinks"),
    [(name, *each) for name in SCORES for each in (WINDOWS if name == "none" else ((None, 0), (3, 2)))],
)
def test_gradients_are_those_of_one_pass(name: str, window: int | None, sinks: int) -> None:
    """Of queries, keys, values and the parameters of the score, through every append."""
    lens, score = np.sum(STEPS, 0), _score(name, "torch")
    leaves = [_drawn("torch", BATCH, HEADS, lens.max(), DIM, seed=i).requires_grad_() for i in range(3)]
    inner = score.score if isinstance(score, ats.SoftCap) else score
    parameters = [x.requires_grad_() for x in getattr(inner, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
    whole = _one_pass(*leaves, window, sinks, score, lens)
    weights = _drawn("torch", *whole.shape, seed=5)
    _, rows = _in_steps(ats.KeyValueCache(window=window, sinks=sinks, score=score), *leaves, STEPS)
    loss = sum((out * weights[b][:, index]).sum() for b, index, out in rows)
    expected = sum((whole[b][:, :n] * weights[b][:, :n]).sum() for b, n in enumerate(lens))
    found = torch.autograd.grad(loss, [*leaves, *parameters])
    wanted = torch.autograd.grad(expected, [*leaves, *parameters])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "window", "sinks"),
    [("none", None, 0), ("additive", 3, 2), ("bilinear", None, 0), ("gaussian", 6, 1), ("cosine", 1, 2)],
)
@pytest.mark.slow_rows("cosine-*", "gaussian-*", "bilinear-*", "additive-3-2", "none-None-0")
def test_a_scan_in_jax_is_one_pass(name: str, window: int | None, sinks: int) -> None:
    """A prompt, then steps in a compiled loop whose lengths are traced; the loop's gradient equals the pass's."""
    length, prompt, score = 11, 4, _score(name, "jax")
    leaves = [_drawn("jax", BATCH, HEADS, length, DIM, seed=i) for i in range(3)]
    weights = _drawn("jax", BATCH, HEADS, length, DIM, seed=5)

    def decode(q: Any, k: Any, v: Any) -> Any:
        capacity = 16 if window is None else sinks + window + prompt - 1
        cache = ats.KeyValueCache(window=window, sinks=sinks, score=score, capacity=capacity)
        cache = cache.append(k[:, :, :prompt], v[:, :, :prompt])

        def step(cache: ats.KeyValueCache, inputs: Any) -> Any:
            q, k, v = (x[:, :, None] for x in inputs)
            cache = cache.append(k, v)
            return cache, cache.attend(q)[:, :, 0]

        _, outs = jax.lax.scan(step, cache, [jnp.moveaxis(x[:, :, prompt:], 2, 0) for x in (q, k, v)])
        return jnp.concatenate([cache.attend(q[:, :, :prompt]), jnp.moveaxis(outs, 0, 2)], 2)

    def one_pass(q: Any, k: Any, v: Any) -> Any:
        return _one_pass(q, k, v, window, sinks, score, np.full(BATCH, length))

    np.testing.assert_allclose(jax.jit(decode)(*leaves), one_pass(*leaves), rtol=1e-9, atol=1e-9)
    found, wanted = (
        jax.jit(jax.grad(lambda *x, f=f: (f(*x) * weights).sum(), (0, 1, 2)))(*leaves) for f in (decode, one_pass)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


@frameworks
@pytest.mark.parametrize("head_axis", [-3, -2, None], ids=["heads", "heads-behind", "no-heads"])
@pytest.mark.slow_rows("heads*-jax", "no-heads-jax")
def test_layouts(framework: str, head_axis: int | None) -> None:
    """Grouped heads in both layouts, and arrays without heads; the value's dimension is its own."""
    q, k, v = (_drawn(framework, 2, h, 7, d, seed=d) for h, d in ((4, DIM), (2, DIM), (2, 5)))
    if head_axis is None:
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    swapped = backends.load(framework).swap_axes
    turn = (lambda x: swapped(x, 1, 2)) if head_axis == -2 else (lambda x: x)
    axis = -3 if head_axis == -2 else -2
    cache = ats.KeyValueCache(head_axis=head_axis or -3, window=5, sinks=1, capacity=9)
    whole = ats.attend(q, k, v, mask=_reference_mask(5, 1, 7))
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        cache = cache.append(*(turn(x[..., part, :]) for x in (k, v)))
        out = cache.attend(turn(q[..., part, :]))
        np.testing.assert_allclose(np.asarray(turn(out)), np.asarray(whole[..., part, :]), rtol=1e-12)
        assert out.shape[axis] == part.stop - part.start
    assert cache.keys.shape[axis] == cache.slots == cache.values.shape[axis]


@windows
def test_plain_attend_over_the_buffers(window: int | None, sinks: int) -> None:
    """The mask and the buffers equal `attend`'s; other options pass."""
    q, k, v = (_drawn("torch", BATCH, HEADS, 9, DIM, seed=i) for i in range(3))
    cache = ats.KeyValueCache(window=window, sinks=sinks)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        cache.append(k[:, :, part], v[:, :, part])
        count = part.stop - part.start
        plain = ats.attend(q[:, :, part], cache.keys, cache.values, mask=cache.mask(count))
        torch.testing.assert_close(cache.attend(q[:, :, part]), plain)
        mask = cache.mask(count)
        visible = mask.materialize(count, cache.slots, BATCH)
        positions = cache.positions
        for b, i in itertools.product(range(BATCH), range(count)):
            at = part.start + i
            seen = {j for j in range(at + 1) if window is None or j > at - window or j < sinks}
            assert set(positions[b][visible[b, i]]) == seen
        starts = mask.interval_set(count, cache.slots, BATCH)
        inside = (np.arange(cache.slots) >= starts.start[..., None]) & (np.arange(cache.slots) < starts.stop[..., None])
        np.testing.assert_array_equal(np.broadcast_to(inside.any(0), visible.shape), visible)
    out, stats = cache.attend(q[:, :, 8:], return_stats=True, sink=0.0, kernel="streaming")
    assert stats.entropy.shape == (BATCH, HEADS, 1)
    assert out.shape == (BATCH, HEADS, 1, DIM)


@frameworks
@pytest.mark.slow_rows("jax")
def test_cross_attention_and_masks(framework: str) -> None:
    """Not causal: every query attends to all positions held. A mask of the caller is over the slots."""
    q, k, v = (_drawn(framework, BATCH, HEADS, 5, DIM, seed=i) for i in range(3))
    lens = np.array([5, 2, 0])
    cache = ats.KeyValueCache(capacity=8).append(k, v, lens=lens)
    expected = np.asarray(ats.attend(q[:, :, :3], k, v, valid_lens=lens))
    np.testing.assert_allclose(np.asarray(cache.attend(q[:, :, :3], causal=False)), expected, rtol=1e-12)
    slots = np.arange(8) % 2 == 0
    for mask in (_array(framework, slots[None]), ats.KeyPadding(slots[None])):
        found = cache.attend(q, mask=mask)
        visible = ats.Causal() & ats.ValidLens(lens, lens) & ats.KeyPadding(slots[None, :5])
        np.testing.assert_allclose(np.asarray(found), np.asarray(ats.attend(q, k, v, mask=visible)), rtol=1e-12)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_mask_is_aligned_with_the_last_position(framework: str) -> None:
    """Not with the last slot: two of the eight, and of a shorter sequence more, hold no position."""
    q, k, v = (_drawn(framework, 2, HEADS, 6, DIM, seed=i) for i in range(3))
    cache = ats.KeyValueCache(capacity=8).append(k[:, :, :4], v[:, :, :4], lens=np.array([4, 2]))
    cache = cache.append(k[:, :, 4:], v[:, :, 4:])
    last = ats.SlidingWindow(1, 0, align="bottom_right")
    for mask in (last, ats.SlidingWindow(1, 0) & ats.Causal("bottom_right"), last & ats.PrefixLM([1, 1])):
        outputs = np.asarray(cache.attend(q[:, :, 4:], mask=mask))
        for b, positions in enumerate((slice(None), np.array([0, 1, 4, 5]))):
            one_pass = ats.attend(q[b][:, 4:], k[b][:, positions], v[b][:, positions], mask=last)
            np.testing.assert_allclose(outputs[b], np.asarray(one_pass), rtol=1e-12)
    of_all = np.asarray(ats.attend(q[:1, :, 4:], k[:1], v[:1], mask=last))
    cache = ats.KeyValueCache(capacity=8).append(k[:1], v[:1])
    np.testing.assert_allclose(np.asarray(cache.attend(q[:1, :, 4:], causal=False, mask=last)), of_all, rtol=1e-12)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_slots_without_a_position_are_not_read(framework: str) -> None:
    """NaN in the rest of the buffers changes nothing."""
    q, k, v = (_drawn(framework, BATCH, HEADS, 3, DIM, seed=i) for i in range(3))
    cache = ats.KeyValueCache(capacity=64).append(k, v)
    cache._keys[:, :, 3:] = np.nan
    cache._values[:, :, 3:] = np.nan
    np.testing.assert_allclose(np.asarray(cache.attend(q)), np.asarray(ats.attend(q, k, v, mask=ats.Causal())))


# ------------------------------------------------------------------ torch.compile


@pytest.fixture
def compiled_graphs() -> Iterator[Callable[[], int]]:
    """Return how many graphs the compiler made in this test."""
    from torch._dynamo import reset, utils

    reset()
    utils.counters.clear()
    yield lambda: int(utils.counters["stats"]["unique_graphs"])
    reset()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("change", ["none", "crop", "reorder", "select"])
def test_a_cache_that_was_filled_in_inference_mode_changes_outside_of_it(change: str, window: int | None) -> None:
    q, k, v = (_drawn("torch", 2, HEADS, 9, DIM, seed=i) for i in range(3))
    changes: dict[str, Callable[[ats.KeyValueCache], ats.KeyValueCache]] = {
        "none": lambda cache: cache, "crop": lambda cache: cache.crop([6, 6]),
        "reorder": lambda cache: cache.reorder([1, 0]), "select": lambda cache: cache.select([1, 1]),
    }  # fmt: skip
    outs = []
    for mode in (torch.inference_mode(), torch.no_grad()):
        cache = ats.KeyValueCache(window=window, capacity=16)
        with mode:
            cache.append(k[:, :, :4], v[:, :, :4]).append(k[:, :, 4:7], v[:, :, 4:7])
        cache = changes[change](cache).append(k[:, :, 7:], v[:, :, 7:])
        outs.append(cache.attend(q[:, :, 7:]))
    assert torch.equal(*outs)


@pytest.mark.parametrize("capacity", [None, 16])
@pytest.mark.parametrize("window", [None, 3])
def test_an_append_without_gradients_cuts_off_earlier_positions(capacity: int | None, window: int | None) -> None:
    """As `torch.cat` does, whether the buffers have spare slots or not; an overwritten key never gets a gradient."""
    q, k, v = (_drawn("torch", 2, HEADS, 6, DIM, seed=i).requires_grad_() for i in range(3))
    cache = ats.KeyValueCache(capacity=capacity, window=window)
    cache.append(k[:, :, :4], v[:, :, :4])
    with torch.no_grad():
        cache.append(k[:, :, 4:5], v[:, :, 4:5])
    cache.append(k[:, :, 5:], v[:, :, 5:]).attend(q[:, :, 5:]).square().sum().backward()
    for x in (k, v):
        assert not x.grad[:, :, :5].any()
        assert x.grad[:, :, 5:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "additive"])
def test_steps_around_a_cache_are_one_graph(name: str, compiled_graphs: Callable[[], int]) -> None:
    score = _score(name, "torch")
    cache = ats.KeyValueCache(capacity=16, score=score)

    @torch.compile(fullgraph=True)
    def pool(query: Any, key: Any, value: Any, lens: Any, score: Any) -> Any:
        return ats.attend(query, key, value, valid_lens=lens, score=score)

    q, k, v = (_drawn("torch", BATCH, HEADS, 6, DIM, seed=i) for i in range(3))
    whole = ats.attend(q, k, v, mask=ats.Causal(), score="scaled_dot" if score is None else score)
    with torch.no_grad():
        for i in range(6):
            step = slice(i, i + 1)
            found = cache.append(k[:, :, step], v[:, :, step]).arguments(q[:, :, step])
            lens = torch.as_tensor(found["valid_lens"])
            out = pool(q[:, :, step], found["key"], found["value"], lens, found.get("score", "scaled_dot"))
            torch.testing.assert_close(out, whole[:, :, step])
    assert compiled_graphs() <= 2


@pytest.mark.slow
def test_a_compiled_call_breaks_its_graph_at_the_cache(compiled_graphs: Callable[[], int]) -> None:
    """The numbers stay; where no break is allowed the error says why there is one."""
    q, k, v = (_drawn("torch", BATCH, HEADS, 6, DIM, seed=i) for i in range(3))
    whole = ats.attend(q, k, v, mask=ats.Causal())

    def step(cache: ats.KeyValueCache, q: Any, k: Any, v: Any) -> Any:
        return cache.append(k, v).attend(2 * q / 2) + 0

    cache, compiled = ats.KeyValueCache(), torch.compile(step)
    with torch.no_grad():
        for i in range(6):
            at = slice(i, i + 1)
            torch.testing.assert_close(compiled(cache, *(x[:, :, at] for x in (q, k, v))), whole[:, :, at])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a KeyValueCache decides by lengths on the host"):
        # A function of its own, which has not been compiled yet.
        torch.compile(lambda *given: step(*given), fullgraph=True)(cache, q, k, v)  # noqa: PLW0108


@pytest.mark.slow
def test_a_compiled_layer_with_a_cache(compiled_graphs: Callable[[], int]) -> None:
    """It gives the numbers of the eager one, and is not compiled anew at each step."""
    layer = MultiHeadAttention(8, 2, rotary=lambda q, k, _: (q, k), query_size=8, key_size=8, value_size=8).double()
    compiled, x = torch.compile(layer), _drawn("torch", 2, 9, 8)
    caches = [ats.KeyValueCache(head_axis=-2, capacity=16) for _ in range(2)]
    graphs = []
    with torch.no_grad():
        for i in range(9):
            step = x[:, i : i + 1]
            found, wanted = (f(step, step, step, cache=c) for f, c in zip((compiled, layer), caches, strict=True))
            torch.testing.assert_close(found, wanted)
            graphs.append(compiled_graphs())
    assert graphs[-1] == graphs[2]


# ------------------------------------------------------------------ cost


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("window", "count"), [(None, 1), (None, 3), (32, 1), (32, 3)])
def test_a_thousand_steps(framework: str, window: int | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps find their plan, allocate the same, and write into the same buffers: all but when these double."""
    planned = []
    choose = plan.kernels.choose
    monkeypatch.setattr(plan.kernels, "choose", lambda *args: planned.append(args[0]) or choose(*args))
    x = _array(framework, np.ones((2, HEADS, count, DIM), np.float32))
    cache = ats.KeyValueCache(window=window, sinks=2 if window else 0)
    buffers, peaks = set(), []
    with torch.no_grad():
        tracemalloc.start()
        for _ in range(1000):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            cache.append(x, x).attend(x)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
            memory = cache.keys.data_ptr() if framework == "torch" else cache.keys.ctypes.data
            buffers.add((memory, cache.slots))
        tracemalloc.stop()
    doublings = int(np.log2(1000 * count if window is None else window + count)) + 3
    assert len(buffers) <= doublings
    assert len(planned) <= doublings
    assert cache.slots == (34 + count - 1 if window else cache.slots) <= 2000 * count
    # Python's and NumPy's memory; the buffers of PyTorch are counted above.
    assert np.median(peaks[-100:]) <= np.median(peaks[100:200]) + 1000


@pytest.mark.parametrize("name", ["additive", "cosine", "capped"])
def test_keys_are_prepared_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the new keys of a step are prepared."""
    rows = []
    prepare = cache_module.prepare_keys
    monkeypatch.setattr(
        cache_module,
        "prepare_keys",
        lambda score, key, **given: rows.append(key.shape[2]) or prepare(score, key, **given),
    )
    cache = ats.KeyValueCache(score=_score(name, "numpy"))
    for count in (4, 1, 1, 2):
        x = np.ones((1, HEADS, count, DIM))
        cache.append(x, x).attend(x)
    assert rows == [4, 1, 1, 2]


def test_memory_of_a_window_is_bounded() -> None:
    """A long prompt is given up at the next step."""
    x = np.ones((1, 1, 500, DIM))
    cache = ats.KeyValueCache(window=16, sinks=2).append(x, x)
    assert cache.slots == 500
    cache.append(x[:, :, :1], x[:, :, :1])
    assert cache.slots == 18
    assert cache.nbytes == 2 * 18 * DIM * 8
    cache.append(x[:, :, :7], x[:, :, :7])
    assert cache.slots == 24


# ------------------------------------------------------------------ beams, drafts, files


def test_a_reorder_copies_what_changes() -> None:
    x = _drawn("torch", 4, HEADS, 3, DIM)
    cache = ats.KeyValueCache().append(x, x)
    memory = cache.keys.data_ptr()
    cache.reorder([0, 1, 2, 3]).reorder([0, 1, 1, 3])
    assert cache.keys.data_ptr() == memory
    torch.testing.assert_close(cache.keys, x[[0, 1, 1, 3]])
    assert cache.select([]).append(x[:0], x[:0]).keys.shape[0] == 0


def test_what_a_ring_has_overwritten() -> None:
    x = np.ones((1, 1, 1, DIM))
    cache = ats.KeyValueCache(window=3, sinks=1)
    for _ in range(8):
        cache.append(x, x)
    assert cache.copy().crop(9).lens.tolist() == [8], "a longer length changes nothing"
    assert cache.copy().crop(1).append(x, x).attend(x).shape == x.shape, "the sinks are always held"
    with pytest.raises(ats.ArgumentError, match=r"lens: expected more for sequence 0, got 5\. Hint: the ring has over"):
        cache.copy().crop(5)
    cropped = cache.crop(7)
    with pytest.raises(ats.ShapeError, match=r"query: expected positions whose windows are held, got 1 positions"):
        cropped.attend(x)
    assert cropped.append(x, x).attend(x).shape == x.shape


def test_files_of_half_precision(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(1, 3, DIM, dtype=dtype)
        ats.KeyValueCache().append(x, x).save(tmp_path / "cache.safetensors")
        found = ats.KeyValueCache.load(tmp_path / "cache.safetensors", like=x)
        assert torch.equal(found.keys[:, :3], x)


def test_files_of_something_else(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", keys=np.ones(3))
    with pytest.raises(FileError, match=r"no cache of keys and values: lacks has_heads, head_axis, key_sizes, lens"):
        ats.KeyValueCache.load(tmp_path / "other.npz")


APART = "arrays that do not belong together"


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        *(("lens", lens, APART) for lens in ([3], [-1, 3], [0.5, 1], 3)),
        *(("slots", [1, 2], APART), ("key_sizes", 3, APART)),
        *((name, np.zeros((2, 3)), APART) for name in ("values", "oldest")),
        *(("window", 0, "window: expected a whole number above 0"), ("window", "4", "window has dtype <U1")),
        ("head_axis", 7, "head_axis: expected -3"),
    ],
)
def test_files_with_an_array_that_no_cache_has(name: str, wrong: Any, text: str, tmp_path: Path) -> None:
    _cache(window=4, sinks=1).save(tmp_path / "cache.npz")
    np.savez(tmp_path / "wrong.npz", **(dict(np.load(tmp_path / "cache.npz")) | {name: wrong}))
    with pytest.raises(FileError, match=rf"wrong\.npz: .*{text}"):
        ats.KeyValueCache.load(tmp_path / "wrong.npz")


# ------------------------------------------------------------------ anything in any order


class Decoded:
    """A cache, and beside it the keys and values (head, dim) of each position of its sequences."""

    def __init__(self, framework: str, cache: ats.KeyValueCache, batch: int) -> None:
        self.framework, self.cache = framework, cache
        self.pasts: list[list[Any]] = [[] for _ in range(batch)]
        self.droppable = np.zeros(batch, int)
        """Positions that may be forgotten whatever the window: those of the last append."""

    def copy(self) -> Decoded:
        found = Decoded(self.framework, self.cache.copy(), 0)
        found.pasts, found.droppable = [[*past] for past in self.pasts], self.droppable
        return found

    def append(self, rng: np.random.Generator, n: int, counts: np.ndarray) -> None:
        """Append, and compare what the new positions give, or the last of them, with one pass over each sequence."""
        k, v, q = rng.standard_normal((3, len(self.pasts), HEADS, n, DIM))
        arrays = [_array(self.framework, x) for x in (k, v, q)]
        self.cache = self.cache.append(*arrays[:2], lens=counts)
        out, self.droppable = np.asarray(self.cache.attend(arrays[2])), counts
        rows = int(rng.integers(0, n + 1))
        last = np.asarray(self.cache.attend(arrays[2][:, :, :rows])) if rows else out
        for b, count in enumerate(counts):
            self.pasts[b] += [(k[b, :, i], v[b, :, i]) for i in range(count)]
            assert not out[b, :, count:].any()
            np.testing.assert_allclose(out[b, :, :count], self.one_pass(q[b, :, :count], b), rtol=1e-9)
            if 0 < rows <= count:
                np.testing.assert_allclose(last[b], self.one_pass(q[b, :, :rows], b), rtol=1e-9)

    def one_pass(self, q: np.ndarray, b: int) -> np.ndarray:
        """What the last positions of a sequence give."""
        if not q.shape[1]:
            return np.zeros_like(q)
        k, v = (np.stack([each[i] for each in self.pasts[b]], 1) for i in range(2))
        # Whatever the queries of earlier positions were.
        query = np.concatenate([np.zeros_like(k[:, q.shape[1] :]), q], 1)[None]
        mask = _reference_mask(self.cache.window, self.cache.sinks, k.shape[1])
        score = "scaled_dot" if self.cache.score is None else _score("additive", "numpy")
        return ats.attend(query, k[None], v[None], mask=mask, score=score, kernel="dense")[0, :, -q.shape[1] :]


OPERATIONS = {"append": 0.3, "step": 0.25, "crop": 0.1, "select": 0.1, "reorder": 0.1, "save": 0.1, "copy": 0.05}


@pytest.mark.parametrize(
    ("framework", "seed"),
    [
        *(("numpy", seed) for seed in range(60)),
        *((framework, seed) for framework in ("torch", "tensorflow") for seed in range(24)),
        *(pytest.param("jax", seed, marks=pytest.mark.slow) for seed in range(12)),
    ],
)
def test_any_operations_in_any_order(framework: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    window = [None, 1, 2, 3, 5, 9][seed % 6]
    sinks = 0 if window is None else int(rng.integers(0, 4))
    score = _score("additive", framework) if seed % 4 == 3 else None
    grows = framework in ("numpy", "torch")
    capacity = [None, 1, 7][seed % 3] if grows else 128 if window is None else sinks + window + 6
    cache = ats.KeyValueCache(window=window, sinks=sinks, score=score, capacity=capacity)
    decoded, earlier = Decoded(framework, cache, int(rng.integers(1, 4))), []
    decoded.append(rng, 5, rng.integers(0, 6, len(decoded.pasts)))
    for operation in rng.choice([*OPERATIONS], 14, p=[*OPERATIONS.values()]):
        cache, batch = decoded.cache, len(decoded.pasts)
        if operation in ("append", "step"):
            n = 1 if operation == "step" else int(rng.integers(0, 8))
            decoded.append(rng, n, np.full(batch, n) if rng.random() < 0.5 else rng.integers(0, n + 1, batch))
        elif operation == "crop":
            lens = np.asarray(cache.lens)
            dropped = rng.integers(0, 5, batch)
            to = np.maximum(0, lens - (dropped if grows else np.minimum(dropped, decoded.droppable)))
            try:
                decoded.cache = cache.crop(to)
            except ats.ArgumentError:
                assert window is not None and (lens - to > decoded.droppable).any()
                continue
            decoded.pasts = [past[:n] for past, n in zip(decoded.pasts, to, strict=True)]
            decoded.droppable = np.zeros(batch, int)
        elif operation == "save":
            path = tmp_path / "cache.safetensors"
            cache.save(path)
            decoded.cache = ats.KeyValueCache.load(path, like=cache.keys, score=score)
            assert type(decoded.cache.keys) is type(cache.keys)
            np.testing.assert_array_equal(np.asarray(decoded.cache.positions), np.asarray(cache.positions))
        elif operation == "copy":
            earlier.append(decoded)
            decoded = decoded.copy()
        else:
            indices = rng.integers(0, batch, batch if operation == "reorder" else rng.integers(1, 5))
            decoded.cache = getattr(cache, operation)(indices)
            decoded.pasts = [[*decoded.pasts[i]] for i in indices]
            decoded.droppable = decoded.droppable[indices]
        assert np.asarray(decoded.cache.lens).tolist() == [len(past) for past in decoded.pasts]
    for each in (decoded, *earlier):
        each.append(rng, 1, np.ones(len(each.pasts), int))


# ------------------------------------------------------------------ autograd and JAX


def test_an_append_leaves_a_graph_whole() -> None:
    """A later append does not disturb the gradient of an attention that came before it."""
    k, v = (_drawn("torch", 1, HEADS, 8, DIM, seed=i) for i in range(2))
    q = _drawn("torch", 1, HEADS, 4, DIM, seed=2).requires_grad_()
    cache = ats.KeyValueCache(capacity=8).append(k[:, :, :4], v[:, :, :4])
    out = cache.attend(q)
    memory = cache.keys.data_ptr()
    cache.append(k[:, :, 4:], v[:, :, 4:])
    assert cache.keys.data_ptr() != memory
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(ats.attend(q, k[:, :, :4], v[:, :, :4], mask=ats.Causal()).sum(), q)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        memory = cache.keys.data_ptr()
        cache.attend(q)
        cache.append(k[:, :, :0], v[:, :, :0])
        assert cache.keys.data_ptr() == memory


def test_a_reorder_leaves_a_graph_whole() -> None:
    """Sequences that take each other's place do not disturb the gradient of an attention that came before."""
    k, v, q = (_drawn("torch", 2, HEADS, 4, DIM, seed=i) for i in range(3))
    q.requires_grad_()
    cache = ats.KeyValueCache().append(k, v)
    out = cache.attend(q)
    later = cache.reorder([1, 0]).attend(q)
    cache.select([0, 0])
    (found,) = torch.autograd.grad((out + 2 * later).sum(), q)
    plain = (ats.attend(q, *pair, mask=ats.Causal()) for pair in ((k, v), (k.flip(0), v.flip(0))))
    (expected,) = torch.autograd.grad((next(plain) + 2 * next(plain)).sum(), q)
    torch.testing.assert_close(found, expected)


def _decoded(cache: ats.KeyValueCache, q: Any, k: Any, v: Any, prompt: int) -> Any:
    """A prompt, then single steps in TensorFlow's own loop."""
    cache = cache.append(k[:, :, :prompt], v[:, :, :prompt])
    first, length = cache.attend(q[:, :, :prompt]), q.shape[2]
    outs = tf.TensorArray(q.dtype, length - prompt, element_shape=(BATCH, HEADS, 1, DIM))

    def step(i: Any, cache: ats.KeyValueCache, outs: Any) -> Any:
        q1, k1, v1 = (tf.gather(x, i[None], axis=2) for x in (q, k, v))
        cache = cache.append(k1, v1)
        return i + 1, cache, outs.write(i - prompt, cache.attend(q1))

    # XLA differentiates a loop only where it knows the most iterations.
    carry, most = (tf.constant(prompt), cache, outs), length - prompt
    _, cache, outs = tf.while_loop(lambda i, *_: i < length, step, carry, maximum_iterations=most)
    return tf.concat([first, tf.transpose(tf.squeeze(outs.stack(), 3), (1, 2, 0, 3))], 2), cache


@pytest.mark.parametrize(
    ("name", "window", "sinks", "xla"),
    [
        pytest.param("none", None, 0, False, marks=pytest.mark.slow),
        ("additive", 3, 2, False),
        pytest.param("bilinear", None, 0, True, marks=pytest.mark.slow),
        pytest.param("gaussian", 6, 1, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow_rows("additive-3-2-False")
def test_a_loop_in_tensorflow_is_one_pass(name: str, window: int | None, sinks: int, xla: bool) -> None:
    """In a ``tf.function``, whose argument and result a cache is; the loop's gradient equals the pass's."""
    length, prompt, score = 9, 4, _score(name, "tensorflow")
    leaves = [_drawn("tensorflow", BATCH, HEADS, length, DIM, seed=i) for i in range(3)]
    weights = _drawn("tensorflow", BATCH, HEADS, length, DIM, seed=5)
    capacity = 16 if window is None else sinks + window + prompt - 1
    empty = ats.KeyValueCache(window=window, sinks=sinks, score=score, capacity=capacity)
    empty = empty.append(*(x[:, :, :0] for x in leaves[1:]))

    def decode(cache: ats.KeyValueCache, *x: Any) -> Any:
        return _decoded(cache, *x, prompt)

    def with_gradients(function: Any, *x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out, cache = function(empty, *x)
            loss = tf.reduce_sum(out * weights)
        return out, cache, tape.gradient(loss, x)

    if xla:
        # What a loop saves for its gradient does not leave a program of XLA: the tape is inside.
        compiled = tf.function(lambda *x: with_gradients(decode, *x), jit_compile=True)
        out, cache, found = compiled(*leaves)
    else:
        out, cache, found = with_gradients(tf.function(decode), *leaves)
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        whole = _one_pass(*leaves, window, sinks, score, np.full(BATCH, length))
        loss = tf.reduce_sum(whole * weights)
    np.testing.assert_allclose(out, whole, rtol=1e-9, atol=1e-9)
    for a, b in zip(found, tape.gradient(loss, leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)
    assert cache.lens.numpy().tolist() == [length] * BATCH
    assert empty.lens.numpy().tolist() == [0] * BATCH


@pytest.mark.slow
def test_steps_in_tensorflow_share_a_trace() -> None:
    """One trace for all steps, and no warning of AutoGraph; sizes that a graph does not know are refused."""
    traces = []
    score = _score("additive", "tensorflow")

    @tf.function
    def step(cache: ats.KeyValueCache, q: Any, k: Any, v: Any) -> Any:
        traces.append(repr(cache))
        cache = cache.append(k, v)
        return cache, cache.attend(q)

    q, k, v = (_drawn("tensorflow", BATCH, HEADS, 5, DIM, seed=i) for i in range(3))
    cache = ats.KeyValueCache(capacity=8, score=score).append(k[:, :, :2], v[:, :, :2])
    for i in range(2, 5):
        cache, out = step(cache, *(x[:, :, i : i + 1] for x in (q, k, v)))
    np.testing.assert_allclose(out, ats.attend(q[:, :, 4:], k, v, score=score), rtol=1e-9)
    assert len(traces) == 1
    assert "? of 8 slots, batch 3, head 2" in traces[0]
    unknown = tf.function(lambda x: ats.KeyValueCache(capacity=8).append(x, x).lens, autograph=False)
    with pytest.raises(ats.ShapeError, match="key: expected known sizes, as the buffers have them, got"):
        unknown.get_concrete_function(tf.TensorSpec((BATCH, None, DIM)))


@frameworks
def test_a_crop_to_what_is_no_length(framework: str) -> None:
    x = _drawn(framework, 2, 3, DIM)
    cache = ats.KeyValueCache(capacity=4).append(x, x)
    for lens, error, text in (
        (-1, ats.ArgumentError, "lens: expected whole numbers, 0 or more, got -1"),
        (1.5, ats.ArgumentError, "lens: expected whole numbers"),
        ([[1], [2]], ats.ShapeError, "lens: expected shape"),
    ):
        with pytest.raises(error, match=text):
            cache.crop(lens)
    assert np.asarray(cache.lens).tolist() == [3, 3]


def test_a_layer_whose_sink_alone_is_trained_decodes_with_a_cache() -> None:
    """Buffers that the gradient reads are copied before the next step writes."""
    layer = MultiHeadAttention(8, 2, query_size=8, key_size=8, value_size=8, sink=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == "sink")
    cache, x = ats.KeyValueCache(head_axis=-2), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    outs = [layer(step, step, step, cache=cache) for step in x.split(1, 1)]
    torch.cat(outs, 1).square().sum().backward()
    found, layer.sink.grad = layer.sink.grad, None
    layer(x, x, x, mask=ats.Causal()).square().sum().backward()
    torch.testing.assert_close(found, layer.sink.grad, rtol=1e-5, atol=1e-6)


def test_an_append_in_jax_leaves_the_cache() -> None:
    x = jnp.ones((2, 3, DIM))
    first = ats.KeyValueCache(capacity=4).append(x, x)
    second = first.append(x, x)
    assert first.lens.tolist() == [3, 3]
    assert second.lens.tolist() == [4, 4], "what does not fit is dropped"
    assert first.crop(1).lens.tolist() == [1, 1]
    assert jax.tree.structure(first) == jax.tree.structure(second)
    none = ats.KeyValueCache(capacity=4).append(x[:, :0], x[:, :0])
    assert (none.slots, none.lens.tolist()) == (4, [0, 0])
    shown = []
    jax.jit(lambda cache: shown.append(repr(cache)) or cache.lens)(first)
    assert shown == ["KeyValueCache(? of 4 slots, batch 2)"]


# ------------------------------------------------------------------ errors


class _Appends(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _cache(x).attend(x)


# Examples for `torch.vmap`, and a cache that was made outside of it.
EXAMPLES, OUTSIDE = torch.as_tensor(X[None]), _cache(torch.as_tensor(X))


ERRORS: dict[type[Exception], dict[str, tuple[Callable[[], Any], str]]] = {
    ats.ArgumentError: {
        "window": (lambda: ats.KeyValueCache(window=0), "window: expected a whole number above 0"),
        "sinks": (
            lambda: ats.KeyValueCache(sinks=2),
            "sinks: expected 0 without a window, got 2. Hint: without a window every position is kept",
        ),
        "negative sinks": (lambda: ats.KeyValueCache(sinks=-1, window=2), "sinks: expected a whole"),
        "head_axis": (lambda: ats.KeyValueCache(head_axis=1), "head_axis: expected -3"),
        "capacity": (lambda: ats.KeyValueCache(capacity=0), "capacity: expected a whole number above"),
        "empty": (lambda: ats.KeyValueCache().attend(X), "attend: expected a cache with an append"),
        "empty lens": (lambda: ats.KeyValueCache().lens, "lens: expected a cache with an append"),
        "lens large": (lambda: _cache().append(X, X, lens=[4, 0]), "lens: expected whole numbers from 0 to 3, got 4"),
        "lens kind": (lambda: _cache().append(X, X, lens=[0.5, 1]), "lens: expected whole numbers, got"),
        "select": (lambda: _cache().select([2]), "indices: expected sequences from 0 to 1, got 2"),
        "select flags": (lambda: _cache().select([True, False]), "indices: expected whole numbers"),
        "select fractions": (lambda: _cache().select([0.9, 1.2]), "indices: expected whole numbers"),
        "valid_lens": (
            lambda: _cache().attend(X, valid_lens=[1, 1]),
            "valid_lens: expected an argument of the cache, not of its attend(), got [1, 1]",
        ),
        "score": (lambda: _cache(score="dot").attend(X, score="dot"), "score: expected an argument of"),
        "not causal": (
            lambda: _cache(window=2).attend(X, causal=False),
            "causal: expected True with a window, got False",
        ),
        "causal by word": (lambda: _cache().attend(X, causal="no"), "causal: expected True or False, got 'no'"),
        "causal mask by word": (lambda: _cache().mask(2, causal=0), "causal: expected True or False, got 0"),
        "jax capacity": (
            lambda: _cache(jnp.asarray(X)),
            "capacity: expected a number of positions, got None. Hint: only the buffers of NumPy and PyTorch grow",
        ),
        "jax ring": (
            lambda: _cache(jnp.asarray(X), window=4, sinks=1, capacity=6),
            "capacity: expected at least sinks + window + n - 1 = 7 for n = 3, got 6",
        ),
    },
    ats.FrameworkError: {
        "list": (lambda: _cache([1.0], X), "key: expected an array of"),
        "another framework": (
            lambda: _cache().append(torch.as_tensor(X), torch.as_tensor(X)),
            "arrays of one framework",
        ),
        "append in jit.trace": (
            lambda: torch.jit.trace(lambda x: _cache(x).keys, torch.as_tensor(X), check_trace=False),
            "key: expected known sizes, as a cache counts its positions on the host, got sizes that a program keeps",
        ),
        "query in jit.trace": (
            lambda: torch.jit.trace(_cache(torch.as_tensor(X)).attend, torch.as_tensor(X), check_trace=False),
            "query: expected known sizes, as a cache counts its positions on the host",
        ),
        "append in torch.export": (
            lambda: torch.export.export(
                _Appends(), (torch.as_tensor(X),), dynamic_shapes=({2: torch.export.Dim("n")},)
            ),
            "append outside of torch.jit.trace and torch.export, and pass them the arrays of cache.arguments(query)",
        ),
        "nested": (
            lambda: _cache(torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 1, 4)])),
            "key: expected a dense array",
        ),
        "vmap": (
            lambda: torch.vmap(lambda x: OUTSIDE.append(x, x).keys)(EXAMPLES),
            "cache: expected one made inside torch.vmap, got one made outside. Hint: make the cache inside, or append",
        ),
    },
    ats.ShapeError: {
        "frameworks": (
            lambda: _cache().append(torch.ones(2), torch.ones(2)),
            "key: expected 3 axes (batch, length, dim), or 4 with heads, got 1",
        ),
        "lengths": (lambda: _cache(X, X[:, :, 1:]), "value: expected the shape of key"),
        "batch": (
            lambda: _cache().append(X[:1], X[:1]),
            "key: expected shape (2, 2, n, 4), as before, got (1, 2, 3, 4)",
        ),
        "heads": (
            lambda: _cache(head_axis=-2).append(X[..., :1, :], X[..., :1, :]),
            "key: expected shape (2, n, 3, 4), as before, got (2, 2, 1, 4)",
        ),
        "no heads": (
            lambda: _cache().append(X[:, 0], X[:, 0]),
            "key: expected shape (2, 2, n, 4), as before, got (2, 3, 4)",
        ),
        "value_dim": (
            lambda: _cache().append(X, X[..., :2]),
            "value: expected shape (2, 2, n, 4), as before, got (2, 2, 3, 2)",
        ),
        "lens shape": (lambda: _cache().append(X, X, lens=[1]), "lens: expected shape (2,), got (1,)"),
        "select axes": (lambda: _cache().select([[0]]), "indices: expected 1 axis, got 2"),
        "reorder": (lambda: _cache().reorder([0]), "indices: expected shape (2,), got (1,). Hint: select()"),
        "many queries": (
            lambda: _cache().attend(np.ones((2, HEADS, 4, DIM))),
            "query: expected at most as many queries as the last append had positions (3), got 4",
        ),
        "query axes": (lambda: _cache().attend(X[0]), "query: expected 4 axes, as the keys of the cache"),
    },
    ats.MaskError: {
        "aligned over a ring": (
            lambda: _cache(window=4).attend(X, mask=ats.Causal("bottom_right")),
            "mask: expected none with a diagonal in a cache with a window, got Causal(align='bottom_right')",
        ),
    },
    ats.DtypeError: {
        "integers": (lambda: _cache(X.astype(int), X), "key: expected a floating"),
        "dtypes": (lambda: _cache(X, X.astype("f4")), "value: expected the dtype of key"),
        "dtype later": (
            lambda: _cache().append(X.astype("f4"), X.astype("f4")),
            "key: expected the dtype of the cache (float64), got float32",
        ),
    },
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ERRORS)
def test_errors(kind: type[Exception]) -> None:
    for name, (call, text) in ERRORS[kind].items():
        said = "nothing"
        try:
            call()
        except kind as error:
            said = str(error)
        assert text in said, name


def test_a_failed_append_changes_nothing() -> None:
    cache = _cache()
    with pytest.raises(ats.ArgumentError):
        cache.append(X, X, lens=[4, 0])
    assert cache.lens.tolist() == [3, 3]
    np.testing.assert_array_equal(cache.positions, np.tile(np.arange(3), (2, 1)))


def test_next_positions_and_repr() -> None:
    cache = ats.KeyValueCache(window=4, sinks=1)
    assert repr(cache) == "KeyValueCache(window=4, sinks=1, empty)"
    cache.append(X, X, lens=[3, 1])
    assert cache.next_positions(2).tolist() == [[3, 4], [1, 2]]
    assert repr(cache) == "KeyValueCache(window=4, sinks=1, 3 of 3 slots, batch 2, head 2)"
    assert cache.positions.tolist() == [[0, 1, 2], [0, -1, -1]]
