"""Masks that are functions of indices: what the function is given, what is found of it, and how often it is asked."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.base import thresholds
from attnscore.masks import function as mask_function
from attnscore.masks.cached import CachedMask
from attnscore.masks.intervals import IntervalSet
from attnscore.problem.problem import build_problem
from cases import AUTOMATIC, needs_native

RNG = np.random.default_rng(3)


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < 5)


def scattered(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 3 == 0


def sinks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key < 5) | (key < 2))


def per_head(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query + 2 * head


def same_document(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return ids[batch, query] == ids[batch, key]


def arrays(batch: int = 2, heads: int = 2, queries: int = 9, keys: int = 9) -> list[np.ndarray]:
    shapes = [(batch, heads, queries, 4), (batch, heads, keys, 4), (batch, heads, keys, 3)]
    return [RNG.normal(size=shape).astype(np.float32) for shape in shapes]


def dense(mask: ats.MaskFunction, queries: int, keys: int, batch: int = 1) -> ats.Dense:
    return ats.Dense(mask.materialize(queries, keys, batch)[:, None])


# ---------------------------------------------------------------- what the function is given


def test_indices_broadcast_against_each_other() -> None:
    shapes = set()

    def noted(*index: Any) -> Any:
        shapes.add(tuple(x.shape for x in index))
        return causal(*index)

    ats.attend(*arrays(), mask=ats.MaskFunction(noted))
    assert all([len(x) for x in found] == [4] * 4 for found in shapes)
    for batch, head, query, key in shapes:
        assert batch == (2, 1, 1, 1) and head == (1, 2, 1, 1) and query[:2] == (1, 1) and key[:3] == (1, 1, 1)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_the_function_is_asked_in_the_callers_words(make: Any) -> None:
    kinds = set()

    def noted(*index: Any) -> Any:
        kinds.update(map(type, index))
        return scattered(*index)

    given = [make(x) for x in arrays()]
    ats.attend(*given, mask=ats.MaskFunction(noted))
    assert all(issubclass(kind, type(given[0])) or kind.__module__ == type(given[0]).__module__ for kind in kinds)


def test_what_torch_alone_understands() -> None:
    """A mask_mod of FlexAttention, with the tensors that it captured."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k, ids[b, q] == ids[b, k], q.new_zeros((), dtype=torch.bool))

    given = list(map(torch.as_tensor, arrays()))
    out, wanted = (
        ats.attend(*given, mask=mask) for mask in (ats.MaskFunction(mask_mod), ats.Causal() & ats.Documents(ids))
    )
    torch.testing.assert_close(out, wanted)
    assert ats.explain(*given, mask=ats.MaskFunction(mask_mod)).plan.remaining_mask is None


def test_a_number_or_fewer_axes_will_do() -> None:
    given = arrays()
    for function in (lambda *_: True, lambda *_: np.array(True), lambda b, h, q, k: (k >= 0)[0, 0, 0]):
        np.testing.assert_array_equal(ats.attend(*given, mask=ats.MaskFunction(function)), ats.attend(*given))
    assert (ats.attend(*given, mask=ats.MaskFunction(lambda *_: False)) == 0).all()


@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_inputs_of_any_number_of_axes(axes: int) -> None:
    lead = (2, 3, 2)[: axes - 2] if axes < 5 else (2, 3, 2)
    query, key, value = (RNG.normal(size=(*lead, 7, 4)) for _ in "qkv")
    mask = ats.MaskFunction(lambda b, h, q, k: k <= q + 2 * b)
    batch = lead[0] if lead else 1
    offsets = [2 * b for b in range(batch)] if lead else 0
    wanted = ats.attend(query, key, value, mask=ats.Causal(offset=offsets))
    np.testing.assert_allclose(ats.attend(query, key, value, mask=mask), wanted)


def test_heads_are_query_heads_also_where_they_share_keys() -> None:
    query, key, value = RNG.normal(size=(2, 4, 7, 3)), *RNG.normal(size=(2, 2, 2, 7, 3))
    weights = ats.attend(query, key, value, mask=ats.MaskFunction(per_head), return_weights=True)[1]
    h, i, j = np.ogrid[:4, :7, :7]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(j <= i + 2 * h, (2, 4, 7, 7)))


# ---------------------------------------------------------------- what is found of it


@pytest.mark.parametrize("strip", [1, 20, 2**20])
@pytest.mark.parametrize("batch", [1, 3])
def test_intervals_do_not_depend_on_the_strips(strip: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MASK_PAIRS", strip)
    ids = np.sort(RNG.integers(0, 4, (batch, 17)), axis=1)
    mask = ats.MaskFunction(same_document, (ids,))
    found = mask.intervals(17, 17, batch)
    wanted = ats.Documents(ids).intervals(17, 17, batch)
    assert found is not None and wanted is not None
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    ids[-1] = ids[-1][RNG.permutation(17)]
    assert ats.MaskFunction(same_document, (ids,)).intervals(17, 17, batch) is None


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (13, 11)], ids=str)
def test_odd_lengths(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    given = arrays(queries=queries, keys=keys)
    for function in (causal, window, sinks, scattered, per_head):
        mask = ats.MaskFunction(function, heads=2 if function is per_head else 0)
        whole = mask.materialize(queries, keys, 2)
        hidden = ats.Dense(whole if whole.ndim == 4 else whole[:, None])
        np.testing.assert_allclose(ats.attend(*given, mask=mask), ats.attend(*given, mask=hidden), atol=1e-6)


@pytest.mark.parametrize("strip", [1, 60, 2**20])
def test_a_few_pieces_a_row(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MASK_PAIRS", strip)
    mask = ats.MaskFunction(sinks)
    found = mask.interval_set(23, 23, 2)
    assert found is not None and found.start.shape == (2, 1, 23) and mask.intervals(23, 23, 2) is None
    keys = np.arange(23)
    seen = ((keys >= found.start[..., None]) & (keys < found.stop[..., None])).any(0)
    np.testing.assert_array_equal(seen, mask.materialize(23, 23))
    # More pieces than a row of a kernel looks at.
    assert ats.MaskFunction(scattered).interval_set(40, 40) is None


def test_the_last_strip_may_have_fewer_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "MASK_PAIRS", 1)
    found = ats.MaskFunction(lambda b, h, i, j: (i >= 3) | (j != 2)).interval_set(5, 6)
    assert found is not None and found.start[:, 0, :].tolist() == [[0] * 5, [3, 3, 3, 6, 6]]
    assert found.stop[:, 0, :].tolist() == [[2, 2, 2, 6, 6], [6] * 5]


def test_rows_that_are_the_same_for_all_are_kept_once() -> None:
    found = ats.MaskFunction(window).intervals(9, 9, 5)
    assert found is not None and found[0].shape == (1, 9)
    assert ats.MaskFunction(per_head).intervals(9, 9, 5) is None


def test_intervals_are_found_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = mask_function._search
    monkeypatch.setattr(mask_function, "_search", lambda *args: searches.append(args) or search(*args))
    width = int(RNG.integers(2**30))  # of no other test

    def own_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query - key < 5 + width)

    given, mask = arrays(), ats.MaskFunction(own_window)
    first = ats.attend(*given, mask=mask)
    for _ in range(3):
        np.testing.assert_array_equal(ats.attend(*given, mask=mask), first)
        ats.attend_vjp(*given, mask=mask & ats.ValidLens([5, 9]))[1](np.ones((2, 2, 9, 3), np.float32))
    assert len(searches) == 1
    ats.attend(*arrays(keys=7), mask=mask)
    assert len(searches) == 2, "other lengths are another question"
    width += 1
    ats.attend(*given, mask=mask)
    assert len(searches) == 3, "another number"


def test_what_cannot_be_compared_is_evaluated_at_each_call() -> None:
    class Limit:
        width = 2

    limit = Limit()
    given, mask = arrays(), ats.MaskFunction(lambda b, h, q, k: (k <= q) & (q - k < limit.width))
    for width in (2, 5, 3):
        limit.width = width
        expected = ats.attend(*given, mask=ats.Causal() & ats.SlidingWindow(left=width - 1))
        np.testing.assert_array_equal(ats.attend(*given, mask=mask), expected)


@needs_native
def test_native_kernels_take_what_is_intervals() -> None:
    given = arrays(queries=40, keys=40)
    masks = [ats.MaskFunction(function) for function in (window, sinks, scattered, per_head)]
    for mask in (*masks, masks[0] & ats.KeyPadding(np.ones((2, 40)) > 0)):
        assert ats.explain(*given, mask=mask).kernel == AUTOMATIC
    assert isinstance(build_problem(*given, mask=ats.MaskFunction(window))[0].mask, CachedMask)


def test_tiles_are_skipped() -> None:
    x = np.ones((1, 2048, 4), np.float32)
    assert ats.explain(x, x, x, mask=ats.MaskFunction(window)).plan.fractions["skip"] > 0.5


def test_memory_is_a_strip() -> None:
    """4096 x 4096 booleans are 16 MB, and the numbers that are compared eight times as many."""
    tracemalloc.start()
    found = ats.MaskFunction(lambda b, h, q, k: key_of(k) <= q).intervals(4096, 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None and peak < 16 * thresholds.MASK_PAIRS


def key_of(x: Any) -> Any:
    return x + 0


# ---------------------------------------------------------------- gradients, programs, transforms


@pytest.mark.parametrize("function", [window, sinks, scattered, per_head])
def test_gradients(function: Any) -> None:
    # Of 40 scattered keys a row has more pieces than a kernel looks at: they are asked for by block.
    given = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in arrays(keys=40)]
    mask = ats.MaskFunction(function, heads=2 if function is per_head else 0)
    whole = mask.materialize(9, 40, 2)
    hidden = torch.as_tensor(whole if whole.ndim == 4 else whole[:, None])
    wanted = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=hidden)
    wanted = torch.where(hidden.any(-1, keepdim=True), wanted, 0.0)
    seed = torch.as_tensor(RNG.normal(size=wanted.shape))
    for kernel in ("auto", "streaming", "dense"):
        out = ats.attend(*given, mask=mask, kernel=kernel)
        torch.testing.assert_close(out, wanted)
        for one, other in zip(
            torch.autograd.grad(out, given, seed, retain_graph=True),
            torch.autograd.grad(wanted, given, seed, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("function", [window, scattered])
@pytest.mark.slow_rows("window", "scattered")
def test_jax_programs(function: Any) -> None:
    given = [jnp.asarray(x) for x in arrays()]
    mask = ats.MaskFunction(function)
    wanted = ats.attend(*given, mask=dense(mask, 9, 9))

    def loss(*given: Any, mask: Any = mask) -> Any:
        return (ats.attend(*given, mask=mask) ** 2).sum()

    np.testing.assert_allclose(jax.jit(lambda *a: ats.attend(*a, mask=mask))(*given), wanted, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda *a: ats.attend(*a, mask=mask))(*given), wanted, atol=1e-6)
    # As an argument: the function is a part of the program, and no array.
    np.testing.assert_allclose(jax.jit(lambda m, *a: ats.attend(*a, mask=m))(mask, *given), wanted, atol=1e-6)
    plain, traced = jax.grad(loss)(*given), jax.jit(jax.grad(loss))(*given)
    np.testing.assert_allclose(plain, traced, atol=1e-6)


def test_jax_arrays_that_are_traced_are_captured() -> None:
    given, ids = [jnp.asarray(x) for x in arrays()], jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1] * 4 + [0]])

    def loss(ids: Any, *given: Any) -> Any:
        return (ats.attend(*given, mask=ats.MaskFunction(same_document, (ids,))) ** 2).sum()

    def wanted(ids: Any, *given: Any) -> Any:
        return (ats.attend(*given, mask=ats.Documents(ids)) ** 2).sum()

    grads = jax.jit(jax.grad(loss, (1, 2, 3)))(ids, *given)
    for one, other in zip(grads, jax.grad(wanted, (1, 2, 3))(ids, *given), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_jax_programs_skip_tiles_by_arrays_that_are_known() -> None:
    """Also while a program is being traced, where every operation on known arrays would be recorded."""
    ids, kinds = jnp.sort(jnp.asarray(RNG.integers(0, 3, (2, 9))), axis=1), []

    def traced(*given: Any) -> Any:
        problem, _ = build_problem(*given, mask=ats.MaskFunction(same_document, (ids,)))
        kinds.append(type(problem.mask))
        return ats.attend(*given, mask=ats.MaskFunction(same_document, (ids,)))

    given = [jnp.asarray(x) for x in arrays()]
    wanted = ats.attend(*given, mask=ats.Documents(ids))
    np.testing.assert_allclose(jax.jit(traced)(*given), wanted, atol=1e-6)
    assert kinds == [CachedMask]


@pytest.mark.slow
def test_torch_transforms_and_compiler() -> None:
    given, mask = list(map(torch.as_tensor, arrays())), ats.MaskFunction(scattered)
    wanted = ats.attend(*given, mask=mask)
    torch.testing.assert_close(torch.vmap(lambda *a: ats.attend(*a, mask=mask))(*given), wanted)
    compiled = torch.compile(lambda *a: ats.attend(*a, mask=mask), backend="eager")
    torch.testing.assert_close(compiled(*given), wanted)


# ---------------------------------------------------------------- how it is written, and what is wrong


def test_it_prints_itself_and_composes() -> None:
    ids = np.zeros((2, 9), int)
    mask = ats.MaskFunction(same_document, (ids,)) & ~ats.MaskFunction(per_head, heads=2) | ats.Causal()
    text = "MaskFunction(same_document, captured=(<(2, 9) int64>,)) & ~MaskFunction(per_head, heads=2) | Causal()"
    assert str(mask) == text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (ats.MaskFunction("causal"), "function: expected a function of (batch, head, query, key), got 'causal'"),  # type: ignore[arg-type]
        (ats.MaskFunction(causal, np.ones(3)), "captured: expected a tuple of arrays, got"),  # type: ignore[arg-type]
        (ats.MaskFunction(causal, heads=3), "heads: expected 0, or the number of heads (2), got 3"),
        (ats.MaskFunction(lambda b, h, q, k: q - k), "the result of <lambda>: expected a boolean array"),
        (ats.MaskFunction(lambda b, h, q, k: q - k), "got dtype int64. Hint: compare it: x > 0"),
        (ats.MaskFunction(lambda b, h, q, k: None), "got None"),
        (ats.MaskFunction(lambda b, h, q, k: np.ones((3, 1, 1, 1), bool)), "got shape (3, 1, 1, 1)"),
        (ats.MaskFunction(lambda b, h, q, k: np.ones((1,) * 5, bool)), "got shape (1, 1, 1, 1, 1)"),
    ],
    ids=str,
)
def test_messages(mask: Any, text: str) -> None:
    with pytest.raises(ats.MaskError) as caught:
        ats.attend(*arrays(), mask=mask)
    assert text in str(caught.value)


def test_what_a_function_raises_reaches_the_caller() -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("mine")

    for make in (np.asarray, torch.as_tensor, jnp.asarray):
        with pytest.raises(KeyError, match="mine"):
            ats.attend(*map(make, arrays()), mask=ats.MaskFunction(broken))


def test_the_complement_of_intervals_with_an_empty_one_anywhere() -> None:
    found = IntervalSet(np.array([[[5]], [[0]]]), np.array([[[9]], [[0]]]))
    keys = np.arange(12)

    def keys_of(intervals: IntervalSet) -> list[int]:
        inside = (intervals.start[..., None] <= keys) & (keys < intervals.stop[..., None])
        return np.flatnonzero(inside.any(0)).tolist()

    assert keys_of(found.complement(12)) == [*range(5), *range(9, 12)]
    assert keys_of(found.intersection(IntervalSet.of((np.array([[7]]), np.array([[12]]))), 12)) == [7, 8]


def test_a_helper_that_two_functions_call_is_read_whole() -> None:
    """It has defaults and a closure of its own, and nothing in it is copied; an array beside it is."""
    distance = 2
    ids = np.zeros((1, 8), int)

    def near(query: Any, key: Any, width: int = 1) -> Any:
        return abs(query - key) <= width * distance

    def left(query: Any, key: Any) -> Any:
        return near(query, key) & (key <= query)

    def right(query: Any, key: Any) -> Any:
        return near(query, key) & (key > query)

    def both(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (left(query, key) | right(query, key)) & (ids[batch, query] == ids[batch, key])

    x = np.random.default_rng(0).normal(size=(1, 8, 4))
    expected = ats.attend(x, x, x, mask=ats.SlidingWindow(left=2, right=2))
    np.testing.assert_allclose(ats.attend(x, x, x, mask=ats.MaskFunction(both)), expected)
