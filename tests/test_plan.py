"""What is remembered between calls: the same answers, the same errors, nothing of the caller's."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnscore as ats
from attnscore import scores
from attnscore.base import thresholds
from attnscore.base.cache import BoundedCache
from attnscore.masks import Mask, cached
from attnscore.plans import plan
from attnscore.problem.problem import build_problem
from attnscore.scores.forms import InnerForm

# Plans of the native kernel alone are cached; without it every call is checked.
NATIVE = bool(ats.available()["kernels"]["native"])


def _build_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let every call fail from here on whose plan is not in the cache."""
    if NATIVE:
        patch.delattr(plan, "build_problem")


def _inputs(queries: int = 4, keys: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 5) for length in (queries, keys, keys)]


def test_the_least_recently_used_makes_room() -> None:
    memory: BoundedCache[int] = BoundedCache(maxsize=2)
    asked: list[int] = []

    def ask(key: int) -> int:
        def work() -> int:
            asked.append(key)
            return 10 * key

        return memory.get_or_compute(key, work)

    assert [ask(key) for key in (1, 2, 1, 3, 1, 2, 3)] == [10, 20, 10, 30, 10, 20, 30]
    assert asked == [1, 2, 3, 2, 3]


def test_the_least_recently_used_make_room_for_heavy_ones() -> None:
    memory: BoundedCache[int] = BoundedCache(maxsize=9, max_weight=10)
    for key, weight in enumerate((1, 4, 4, 3, 2)):
        memory.get_or_compute(key, lambda key=key: 10 * key, weight)
    assert [memory.get(key) for key in range(5)] == [None, None, 20, 30, 40]
    assert memory.get_or_compute(5, lambda: 50, 8) == 50
    assert [memory.get(key) for key in range(6)] == [None, None, None, None, 40, 50]
    # What is larger than the whole cache leaves the others where they are.
    assert memory.get_or_compute("large", lambda: 60, 11) == 60
    assert [memory.get(key) for key in (4, 5, "large")] == [40, 50, None]
    assert memory.values() == [40, 50]


def test_threads_share_a_cache() -> None:
    """Each gets the result for its key, and no more than the bound is cached."""
    memory: BoundedCache[int] = BoundedCache(maxsize=8, max_weight=20)
    wrong: list[int] = []

    def caller(seed: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 16, 2000).tolist()
        wrong.extend(key for key in keys if memory.get_or_compute(key, lambda key=key: -key, key % 4) != -key)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and 0 < len(memory.values()) <= 8


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_plans_print_how_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", found := BoundedCache())
    x, w, W = torch.randn(1, 2, 40, 8), torch.randn(8), torch.randn(8, 8)
    ats.attend(x, x, x, return_stats=("entropy",))
    ats.attend(x, x, x, score=ats.Additive(w, W, W))
    native = "NativePlan(native, float32, tiles chosen in C++, saves out, {}row_max, log_denom{})"
    assert [*map(repr, found.values())] == [
        native.format("entropy, ", ""), f"LoweredPlan(to Additive, {native.format('', ', saved_scores')})"
    ]  # fmt: skip
    problem, _ = build_problem(x.double(), x.double(), x.double())
    single = plan.kernels.single_plan(problem, "streaming")
    assert repr(single) == "SinglePlan(streaming, float64, tiles of 40 x 40, saves out, log_denom, row_max)"
    pytest.importorskip("triton")
    from attnscore.kernels.triton.plan import Tile, TritonPlan

    on_gpu = TritonPlan(single, None, Tile(64, 32, 4, 2), 90, None, (), {})  # type: ignore[arg-type]
    assert repr(on_gpu) == f"TritonPlan({single!r}, Tile(queries=64, keys=32, warps=4, stages=2))"


def _as_cut_from_a_buffer(x: Any) -> Any:
    """Return an equal tensor whose strides do not follow from its shape, as from a KV cache with room for more."""
    buffer = x.new_zeros(*x.shape[:-2], 50, x.shape[-1])
    buffer[..., : x.shape[-2], :] = x
    return buffer[..., : x.shape[-2], :]


def _shapes(axes: int, queries: int, keys: int) -> list[tuple[int, ...]]:
    """Return shapes of query, key and value with so many axes; query heads share KV heads, value has a batch of 1."""
    shapes = (2, 3, 6, queries, 4), (2, 3, 2, keys, 4), (1, 3, 2, keys, 7)
    return [shape[len(shape) - axes :] if axes != 3 else (shape[1], *shape[3:]) for shape in shapes]


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
@pytest.mark.parametrize(("axes", "head_axis"), [(2, -3), (3, -3), (4, -3), (4, -2), (5, -3), (5, -2)])
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("masked_by", ["nothing", "keys", "pairs", "rows", "one_column", "lengths"])
@pytest.mark.parametrize("framework", ["torch", "numpy", "torch_with_masks_of_numpy"])
def test_calls_without_gradient_have_one_plan_for_any_number_of_keys(
    monkeypatch: pytest.MonkeyPatch, axes: int, head_axis: int, is_cut: bool, masked_by: str, framework: str
) -> None:
    monkeypatch.setattr(plan, "PLANS", BoundedCache())

    def call(queries: int, keys: int) -> torch.Tensor:
        torch.manual_seed(queries + 10 * keys)
        arrays = [torch.randn(shape) for shape in _shapes(axes, queries, keys)]
        if is_cut:
            arrays = list(map(_as_cut_from_a_buffer, arrays))
        if head_axis == -2:
            arrays = [x.swapaxes(-3, -2).clone(memory_format=torch.contiguous_format) for x in arrays]
        lead, head = ((3,) if axes > 2 else ()), ((6,) if axes > 3 else ())
        options: dict[str, Any] = {
            "nothing": {},
            "keys": {"mask": torch.rand((*lead, *(1 for _ in head), 1, keys)) < 0.5},
            "pairs": {"mask": torch.rand((*head, queries, keys)) < 0.5},
            "rows": {"mask": torch.rand((queries, keys)) < 0.5},
            "one_column": {"mask": torch.rand((*lead, *head, queries, 1)) < 0.5},
            "lengths": {
                "valid_lens": torch.randint(keys + 1, (*arrays[0].shape[: axes > 2], queries)[: 1 + queries % 2])
            },
        }[masked_by]
        if axes == 3 and masked_by == "pairs":
            options = {"mask": torch.rand((3, queries, keys)) < 0.5}
        if framework != "torch":
            options = {name: x.numpy() for name, x in options.items()}
        if framework == "numpy":
            arrays = [x.numpy() for x in arrays]
        return torch.as_tensor(ats.attend(*arrays, head_axis=head_axis, **options))

    lengths = [(1, 2), (1, 9), (8, 9), (1, 30), (8, 3), (8, 9)]
    expected = []
    for case in lengths:
        plan.PLANS.clear()
        expected.append(call(*case))
    plan.PLANS.clear()
    call(1, 5)
    call(8, 5)
    # Lengths of the queries of two axes are part of a plan.
    if axes > 2 or masked_by != "lengths":
        _build_nothing(monkeypatch)
    for case, result in zip(lengths, expected, strict=True):
        torch.testing.assert_close(call(*case), result, rtol=0, atol=0)


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_a_plan_for_any_number_of_keys_is_for_calls_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", found := BoundedCache())
    for keys in (1, 6, 9):
        with torch.no_grad():
            expected = ats.attend(*_inputs(1, keys))
        query, key, value = (x.requires_grad_() for x in _inputs(1, keys))
        out = ats.attend(query, key, value)
        assert torch.equal(out, expected)
        weights = (query @ key.mT / 5**0.5).softmax(-1)
        for x, reference in zip(
            *(torch.autograd.grad(y.sum(), (key, value)) for y in (out, weights @ value)), strict=True
        ):
            torch.testing.assert_close(x, reference)
    assert sorted(x.reads_key_len for x in found.values()) == [False, False, False, True]


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_threads_share_a_plan_for_any_number_of_keys() -> None:
    arrays = {keys: _inputs(1, keys) for keys in range(2, 12)}
    expected = {keys: ats.attend(*x) for keys, x in arrays.items()}
    wrong: list[int] = []

    def caller(first: int) -> None:
        order = [first + 2 + i % (10 - first) for i in range(500)]
        wrong.extend(keys for keys in order if not torch.equal(ats.attend(*arrays[keys]), expected[keys]))

    threads = [threading.Thread(target=caller, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_other_lengths_are_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    for masked in ({}, {"mask": torch.ones(2, 1, 1, 6, dtype=torch.bool)}, {"valid_lens": torch.tensor([1, 6])}):
        ats.attend(*_inputs(1, 6), **masked)
    query, key, value = _inputs(1, 7)
    with pytest.raises(ats.ShapeError, match="value: expected as many positions as key"):
        ats.attend(query, key, value[..., 1:, :])
    with pytest.raises(ats.ShapeError, match="key: expected vectors of the dimension of query"):
        ats.attend(query[..., :4], key, value)
    # A mask, or a statistic, depends on the lengths in other ways.
    causal = ats.attend(query, key, value, mask=ats.Causal(align="top_left"))
    torch.testing.assert_close(causal, value[..., :1, :])
    with pytest.raises(ats.MaskError):
        ats.attend(query, key, value, mask=torch.ones(2, 1, 1, 6, dtype=torch.bool))
    for shape in ((6,), (1, 6)):
        with pytest.raises(ats.MaskError):
            ats.attend(query, key, value, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ats.MaskError):
        ats.attend(query, key, value, valid_lens=torch.tensor([1, 8]))
    assert ats.attend(*_inputs(0, 7)).shape == (2, 3, 0, 5) and not ats.attend(*_inputs(2, 0)).any()


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_plans_of_many_heads_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PLANS", found := BoundedCache(256, 100))
    for queries in range(1, 9):
        for _ in range(2):
            ats.attend(*(torch.randn(6, 5, n, 4) for n in (queries, 3, 3)))
    assert [x.cache_weight for x in found.values()] == [30, 30, 30]


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_plans_in_use_survive_large_calls_and_growing_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[tuple[int, ...]] = []
    monkeypatch.setattr(plan, "PLANS", BoundedCache(8, 100))
    choose = plan.kernels.choose
    monkeypatch.setattr(
        plan.kernels, "choose", lambda name, problem: builds.append(problem.score_shape.rows) or choose(name, problem)
    )
    arrays = [torch.randn(2, n, 5) for n in (1, 6, 6)]
    for length in range(1, 20):
        ats.attend(*arrays)
        ats.attend(*(torch.randn(1, n, 4) for n in (length, 3, 3)))
        ats.attend(*(torch.randn(101, n, 4) for n in (1, 3, 3)))
    assert builds.count((2, 1, 1, 1)) == 1 and builds.count((101, 1, 1, 1)) == 19


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_explain_says_that_no_plan_is_cached() -> None:
    small, large = (
        np.zeros((batch, 1, 2), np.float32) for batch in (thresholds.PLANNED_HEADS, thresholds.PLANNED_HEADS + 1)
    )
    assert not ats.explain(small, small, small).remarks
    assert "no plan is cached" in str(ats.explain(large, large, large))


def test_what_raises_has_no_hash_or_no_key_is_not_remembered() -> None:
    memory: BoundedCache[int] = BoundedCache()
    answers = iter(range(10))

    def fails() -> int:
        raise ValueError(next(answers))

    for expected in ("0", "1"):
        with pytest.raises(ValueError, match=expected):
            memory.get_or_compute("key", fails)
    keys = (None, None, [], [], "key", "key")
    assert [memory.get_or_compute(key, lambda: next(answers)) for key in keys] == [2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"head_axis": -3}, {"head_axis": -3.0}, ats.ArgumentError),
        ({"valid_lens": [2, 1]}, {"valid_lens": [2, 7]}, ats.MaskError),
        ({"valid_lens": [1, 1]}, {"valid_lens": [True, True]}, ats.MaskError),
        ({"valid_lens": torch.tensor([1, 1])}, {"valid_lens": torch.tensor([True, True])}, ats.MaskError),
        ({"valid_lens": torch.tensor([2, 1])}, {"valid_lens": torch.tensor([2, 1]).to_sparse()}, ats.FrameworkError),
        ({"valid_lens": np.array([2, 1])}, {"valid_lens": np.ma.array([2, 1])}, None),
        ({"mask": ats.SlidingWindow(1, 1, offset=0)}, {"mask": ats.SlidingWindow(1.0, 1, offset=0)}, ats.MaskError),
        ({"mask": ats.Causal(offset=1)}, {"mask": ats.Causal(offset=True)}, ats.MaskError),
        ({"mask": ats.Causal("top_left")}, {"mask": ats.Causal()}, ats.MaskError),
    ],
    ids=str,
)
def test_a_good_call_lets_no_bad_one_pass(
    good: dict[str, Any], bad: dict[str, Any], error: type[Exception] | None
) -> None:
    """Keys tell types apart: True, 1 and 1.0 are equal, and a check is not."""
    arrays = _inputs()
    wanted = ats.attend(*arrays, **good)
    torch.testing.assert_close(ats.attend(*arrays, **good), wanted)
    if error is None:
        torch.testing.assert_close(ats.attend(*arrays, **bad), wanted)
        return
    for _ in range(2):
        with pytest.raises(error):
            ats.attend(*arrays, **bad)


def test_arrays_of_one_shape_and_another_dtype_or_kind_are_checked_anew() -> None:
    query, key, value = _inputs()
    ats.attend(query, key, value)
    with pytest.raises(ats.DtypeError):
        ats.attend(query, key, value.double())
    with pytest.raises(ats.FrameworkError):
        ats.attend(query, key.to_sparse(), value)
    with pytest.raises(ats.DeviceError):
        ats.attend(query, key, value.to("meta"))


@pytest.mark.parametrize(
    "mask",
    [
        ats.ValidLens,
        lambda lens: ats.KeyRange(lens - 1, lens),
        lambda lens: ats.Causal("top_left") & ats.ValidLens(lens),
    ],
    ids=["lengths", "range", "composed"],
)
def test_lengths_changed_in_place_are_new_lengths(mask: Callable[[Any], Any]) -> None:
    arrays, lens = _inputs(), torch.tensor([1, 2])
    same = mask(lens)
    for _ in range(3):
        wanted = ats.attend(*arrays, mask=ats.Dense(torch.from_numpy(same.materialize(4, 6, 2))[:, None]))
        torch.testing.assert_close(ats.attend(*arrays, mask=same), wanted)
        lens += 1


def test_a_learned_query_beside_plain_keys_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = _inputs()
    entries: BoundedCache[Any] = BoundedCache()
    monkeypatch.setattr(plan, "PLANS", entries)
    out = ats.attend(torch.nn.Parameter(query), key, value)
    plans_of_parameters = entries.values()
    torch.testing.assert_close(out, ats.attend(query, key, value))
    assert bool(plans_of_parameters) is NATIVE and entries.values() == plans_of_parameters, "they are those of tensors"


def test_a_name_means_the_score_that_it_stands_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, scale = _inputs(), 1.0
    monkeypatch.setitem(scores._TABLE, "varied", lambda: ats.ScaledDot(scale))
    for cls in (ats.Dot, ats.ScaledDot, ats.Cosine):
        monkeypatch.setitem(scores._TABLE, "named", cls)
        torch.testing.assert_close(ats.attend(*arrays, score="named"), ats.attend(*arrays, score=cls()))
    for scale in (2.0, -2.0):
        torch.testing.assert_close(ats.attend(*arrays, score="varied"), ats.attend(*arrays, score=ats.ScaledDot(scale)))


@pytest.mark.parametrize(
    "score, has_plan",
    [
        (lambda: ats.SoftCap(ats.ScaledDot(0.3), 5), True),
        (lambda: ats.SoftCap(ats.Temperature("dot", 3.0), 2.0), True),
        (lambda: ats.SoftCap(ats.Dot(), torch.tensor(2.0)), False),
        (lambda: ats.Temperature("cosine", 2.0), False),
        (lambda: ats.SoftCap(ats.Gaussian(), 2.0), False),
    ],
)
def test_a_wrapped_dot_product_has_a_plan(
    monkeypatch: pytest.MonkeyPatch, score: Callable[[], Any], has_plan: bool
) -> None:
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    arrays = [x.requires_grad_() for x in _inputs()]
    for cap in (2.0, 0.5):
        ats.attend(*arrays, score=ats.SoftCap(score(), cap))
        assert bool(plan.PLANS.values()) is (has_plan and NATIVE)
        out, exact = (ats.attend(*arrays, score=ats.SoftCap(score(), cap), kernel=name) for name in ("auto", "dense"))
        torch.testing.assert_close(out, exact)
        gradients = (torch.autograd.grad(x.square().sum(), arrays) for x in (out, exact))
        torch.testing.assert_close(*gradients)


def test_nothing_of_the_caller_is_held() -> None:
    arrays, lens = _inputs(), torch.tensor([3, 5])
    mask = ats.ValidLens(lens)
    ats.attend(*arrays, mask=mask)
    held = [weakref.ref(x) for x in (*arrays, lens, mask)]
    del arrays, lens, mask
    gc.collect()
    assert [x() for x in held] == [None] * 5


MASKS_THAT_DIFFER: dict[str, tuple[Mask, Mask]] = {
    "Causal.align": (ats.Causal("top_left"), ats.Causal("bottom_right")),
    "Causal.offset": (ats.Causal(offset=0), ats.Causal(offset=1)),
    "SlidingWindow.left": (ats.SlidingWindow(1, 1, "top_left"), ats.SlidingWindow(2, 1, "top_left")),
    "SlidingWindow.right": (ats.SlidingWindow(1, 1, "top_left"), ats.SlidingWindow(1, 2, "top_left")),
    "SlidingWindow.align": (ats.SlidingWindow(1, 1, "top_left"), ats.SlidingWindow(1, 1, "bottom_right")),
    "SlidingWindow.offset": (ats.SlidingWindow(1, 1, offset=0), ats.SlidingWindow(1, 1, offset=1)),
    "ValidLens.lens": (ats.ValidLens([2, 3]), ats.ValidLens([3, 2])),
    "ValidLens.query_lens": (ats.ValidLens([2, 3], [1, 4]), ats.ValidLens([2, 3], [2, 3])),
    "KeyRange.start": (ats.KeyRange(0, 4), ats.KeyRange(1, 4)),
    "KeyRange.stop": (ats.KeyRange(1, 4), ats.KeyRange(1, 5)),
    "KeyPadding.array": (ats.KeyPadding(np.arange(6)[None] < 3), ats.KeyPadding(np.arange(6)[None] < 4)),
    "PrefixLM.prefix_lens": (ats.PrefixLM(2), ats.PrefixLM(3)),
    "Documents.query_ids": (ats.Documents([0, 0, 1, 1], [0, 0, 0, 1, 1, 1]), ats.Documents([1] * 4, [0] * 3 + [1] * 3)),
    "Documents.key_ids": (ats.Documents([0] * 4, [0] * 3 + [1] * 3), ats.Documents([0] * 4, [0] * 6)),
    "Packed.cu_query": (ats.Packed([0, 2, 4], [0, 3, 6]), ats.Packed([0, 1, 4], [0, 3, 6])),
    "Packed.cu_key": (ats.Packed([0, 2, 4], [0, 3, 6]), ats.Packed([0, 2, 4], [0, 2, 6])),
    "Packed.left": (ats.Packed([0, 4], [0, 6], 1, 1, "top_left"), ats.Packed([0, 4], [0, 6], 2, 1, "top_left")),
    "Packed.right": (ats.Packed([0, 4], [0, 6], 1, 1, "top_left"), ats.Packed([0, 4], [0, 6], 1, 2, "top_left")),
    "Packed.align": (ats.Packed([0, 4], [0, 6], 1, 1, "top_left"), ats.Packed([0, 4], [0, 6], 1, 1, "bottom_right")),
    "Neighbours.indptr": (ats.Neighbours([0, 1, 2, 2, 2], [3, 5]), ats.Neighbours([0, 0, 2, 2, 2], [3, 5])),
    "Neighbours.indices": (ats.Neighbours([0, 1, 2, 2, 2], [3, 5]), ats.Neighbours([0, 1, 2, 2, 2], [3, 4])),
    "And.first": (ats.KeyRange(1, 4) & ats.ValidLens(3), ats.KeyRange(2, 4) & ats.ValidLens(3)),
    "And.second": (ats.KeyRange(1, 4) & ats.ValidLens(3), ats.KeyRange(1, 4) & ats.ValidLens(2)),
    "Or.first": (ats.KeyRange(1, 4) | ats.ValidLens(2), ats.KeyRange(1, 5) | ats.ValidLens(2)),
    "Or.second": (ats.KeyRange(2, 4) | ats.ValidLens(1), ats.KeyRange(2, 4) | ats.ValidLens(3)),
    "Not.mask": (~ats.KeyRange(1, 4), ~ats.KeyRange(1, 5)),
    "the class": (ats.KeyRange(2, 4) & ats.ValidLens(3), ats.KeyRange(2, 4) | ats.ValidLens(3)),
}


@pytest.mark.parametrize("name", MASKS_THAT_DIFFER)
def test_masks_that_differ_in_one_field_share_no_cache_entry(name: str) -> None:
    arrays = _inputs()
    for mask in MASKS_THAT_DIFFER[name]:
        wanted = ats.attend(*arrays, mask=ats.Dense(torch.from_numpy(mask.materialize(4, 6, 2))[:, None]))
        torch.testing.assert_close(ats.attend(*arrays, mask=mask), wanted)


def test_every_field_of_a_cached_mask_has_such_a_pair() -> None:
    fields = {f"{kind.__name__}.{name}" for kind, names in cached._FIELDS.items() for name in names}
    assert fields | {"the class"} == set(MASKS_THAT_DIFFER)


def test_a_known_mask_is_the_mask() -> None:
    """It prints itself as its caller wrote it, and every kernel sees the same pairs."""
    arrays, mask = _inputs(), ats.Causal("bottom_right") & ats.ValidLens([6, 0])
    assert repr(mask) in str(ats.explain(*arrays, mask=mask))
    outs = [ats.attend(*arrays, mask=mask, kernel=kernel) for kernel in ("streaming", "dense")]
    torch.testing.assert_close(*outs)
    long = torch.zeros(1, thresholds.CACHED_MASK_ROWS + 1, 2)
    assert ats.attend(long, long, long, mask=ats.SlidingWindow(0, 0)).shape == long.shape


def test_sizes_of_tiles_are_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _inputs(64, 64)
    wanted = ats.attend(*arrays, kernel="streaming")
    monkeypatch.setattr(thresholds, "TILE_SCORES", 1)
    torch.testing.assert_close(ats.attend(*arrays, kernel="streaming"), wanted)


def _views() -> dict[str, list[torch.Tensor]]:
    """Query, key and value that lie in memory in different ways."""
    torch.manual_seed(0)
    apart = torch.randn(2, 6, 4, 3, 8)  # (batch, length, head, which, dim)
    packed = [apart[..., i, :].transpose(1, 2) for i in range(3)]
    wide = [torch.randn(2, 4, 6, 24)[..., ::3] for _ in range(3)]
    return {
        "contiguous": [torch.randn(2, 4, 6, 8) for _ in range(3)],
        "packed": packed,
        "strided": wide,
        "one": [packed[0]] * 3,
        "broadcast": [torch.randn(6, 8).expand(2, 4, 6, 8), *packed[1:]],
        "fewer KV heads": [packed[0], *(x[:, ::2] for x in wide[1:])],
        "bfloat16": [x.bfloat16() for x in wide],
        "float64": [x.double() for x in packed],
        "no keys": [x[:, :, :n] for x, n in zip(wide, (6, 0, 0), strict=True)],
        "no batch": [x[0, 0] for x in packed],
    }


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("arrays", _views().values(), ids=_views())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": ats.ScaledDot(0.5)},
        {"mask": ats.Causal(align="bottom_right")},
        {"mask": ats.SlidingWindow(1, 1, "top_left"), "score": "dot"},
        {"mask": ~ats.SlidingWindow(1, 1, "top_left")},
        {"return_weights": True},
        {"return_weights": True, "mask": ats.Causal(align="bottom_right")},
        {"score": "additive"},
        {"score": "additive by head"},
    ],
    ids=str,
)
def test_a_plain_call_is_prepared_once(
    framework: str, arrays: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers that lie in memory alike go to the kernel at once, and give what the checked path gives.

    Other weights too. Where a copy of the arrays is computed on, the checked path stays.
    """
    if framework == "numpy" and arrays[0].dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    given = torch.Tensor.numpy if framework == "numpy" else lambda x: x
    others = options
    if is_additive := "additive" in str(options.get("score")):
        w_v = _additive_weights(arrays, options)
        options, others = ({"score": ats.Additive(given(x), activation="leaky_relu")} for x in (w_v, -w_v))
    arrays = [given(x) for x in arrays]
    for _ in range(2):  # the first call of all loads the framework
        ats.attend(*arrays, **options)
    wanted = ats.attend(*[-x for x in arrays], **others, kernel="streaming")
    for x in {id(x): x for x in arrays}.values():
        own = x[0, 0] if framework == "torch" and 0 in x.stride() else x  # torch writes to no memory twice
        own *= -1
    with monkeypatch.context() as patch:
        if not (is_additive and arrays[0].dtype == torch.bfloat16):
            _build_nothing(patch)
        found = ats.attend(*arrays, **others)
    _close(_several(found), _several(wanted), atol=1e-5)


def _additive_weights(arrays: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """Weights of an additive score, of each head if the options say so."""
    heads = arrays[0].shape[1:2] if options["score"] == "additive by head" and arrays[0].ndim == 4 else ()
    return torch.randn(*heads, 8, dtype=arrays[0].dtype)


def _several(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _close(found: Iterable[Any], wanted: Iterable[Any], *, rtol: float | None = None, atol: float = 2e-5) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
        of_bfloat16 = {"rtol": 2e-2, "atol": 2e-2} if rtol is None and "bfloat16" in str(x.dtype) else {}
        tolerance = {"rtol": rtol or 1e-5, "atol": atol} | of_bfloat16
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), **tolerance)


def test_additive_scores_that_differ_have_plans_of_their_own() -> None:
    query, key, value = _inputs()
    w_v = torch.ones(5, requires_grad=True)
    for _ in range(2):
        assert ats.attend(query, key, value, score=ats.Additive(w_v)).requires_grad
    scores = {
        "plain": ats.Additive(w_v.detach()),
        "slope": ats.Additive(w_v.detach(), activation="leaky_relu", negative_slope=0.5),
        "projected": ats.Additive(w_v.detach(), torch.eye(5) * 2, torch.eye(5)),
        "shifted": ats.Additive(w_v.detach(), bias=torch.ones(5)),
        "strided": ats.Additive(torch.arange(10.0)[::2]),
        "double": ats.Additive(w_v.detach().double()),
    }
    for name in 2 * list(scores):
        wanted = ats.attend(query, key, value, score=scores[name], kernel="dense")
        torch.testing.assert_close(ats.attend(query, key, value, score=scores[name]), wanted, msg=name)
    with pytest.raises(ats.ShapeError, match="w_v"):
        ats.attend(query, key, value, score=ats.Additive([1.0] * 5))


@pytest.mark.parametrize("score", ["dot", "gaussian", "additive"])
def test_gradients_of_a_prepared_call_in_several_steps(score: str) -> None:
    """Long sequences are cut into ranges of keys and of queries, whose gradients add up."""
    torch.manual_seed(0)
    arrays = [torch.randn(1, 2, 300, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    own: Any = ats.Additive(torch.randn(4, dtype=torch.float64, requires_grad=True)) if score == "additive" else score
    leaves = [*arrays, *([own.w_v] if score == "additive" else [])]
    bias = torch.randn(2, 1, 300, dtype=torch.float64, requires_grad=True)

    def gradients(kernel: str) -> tuple[torch.Tensor, ...]:
        out = ats.attend(*arrays, score=own, bias=bias, mask=ats.Causal(), kernel=kernel)
        return torch.autograd.grad(out.square().sum(), [*leaves, bias])

    wanted = gradients("streaming")
    for _ in range(3):
        for x, y in zip(gradients("auto"), wanted, strict=True):
            torch.testing.assert_close(x, y)


_LOWERED: dict[str, Callable[..., Any]] = {
    "gaussian": lambda x: ats.Gaussian(1.5),
    "cosine": lambda x: ats.Cosine(2.0),
    "cosine by name": lambda x: "cosine",
    "bilinear": lambda x: ats.Bilinear(x[0]),
    "additive": lambda x: ats.Additive(x[0][0], x[0], x[1], x[1][0], activation="leaky_relu", negative_slope=0.3),
}


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("name", _LOWERED)
def test_a_score_that_is_lowered_is_prepared_once(framework: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arrays and parameters go to the kernel at once, also those with a NaN at a masked key."""
    inputs, parameters = _inputs(), [torch.randn(5, 5) for _ in range(2)]
    inputs[1][1, ..., 4, :], inputs[2][1, ..., 4, :] = float("nan"), float("nan")
    options: dict[str, Any] = {"valid_lens": [3, 2], "return_stats": ("entropy",)}
    wanted = [
        (x.numpy() for x in (out, stats.entropy))
        for out, stats in [
            ats.attend(*inputs, score=_LOWERED[name](x), **options, kernel="dense")
            for x in (parameters, [-x for x in parameters])
        ]
    ]
    if framework == "numpy":
        inputs, parameters = [x.numpy() for x in inputs], [x.numpy() for x in parameters]
    found = []
    for x in (parameters, [-x for x in parameters]):
        ats.attend(*inputs, score=_LOWERED[name](parameters), **options)
        ats.attend(*inputs, score=_LOWERED[name](parameters), **options)
        with monkeypatch.context() as patch:
            _build_nothing(patch)
            out, stats = ats.attend(*inputs, score=_LOWERED[name](x), **options)
        found.append((np.asarray(out), np.asarray(stats.entropy)))
    for one, other in zip(found, wanted, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# The bandwidth may be of another dtype than the queries.
_LEARNED: dict[str, Callable[..., Any]] = {
    **_LOWERED,
    "bandwidth": lambda x: ats.Gaussian(x[2]),
    "bandwidth of float32": lambda x: ats.Gaussian(x[3]),
}


@pytest.mark.parametrize("name", _LEARNED)
def test_gradients_of_a_score_that_is_lowered(name: str) -> None:
    """The second call, by plans, has the gradients of the first one, and they have gradients."""
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in _inputs()]
    parameters = [torch.randn(5, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    parameters += [torch.tensor(1.5, dtype=x, requires_grad=True) for x in (torch.float64, torch.float32)]
    leaves = [*inputs, *parameters]

    def gradients(kernel: str, twice: bool = True) -> list[Any]:
        out = ats.attend(*inputs, score=_LEARNED[name](parameters), valid_lens=[3, 2], kernel=kernel)
        grads = torch.autograd.grad((out**2).sum(), leaves, create_graph=twice, allow_unused=True)
        norm = sum((x**2).sum() for x in grads if x is not None)
        return [out, *grads, *(torch.autograd.grad(norm, leaves, allow_unused=True) if twice else ())]

    wanted = gradients("dense")
    for twice in (True, True, False):
        for x, y in zip(gradients("auto", twice), wanted[: None if twice else 1 + len(leaves)], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_learned_bandwidth_is_read_at_each_call(framework: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for all bandwidths; one that is no longer above 0 is an error, as it is in a first call."""
    inputs = [x.numpy().astype("f4") for x in _inputs()]
    bandwidths = [np.asarray(x, dtype) for x in (0.5, 2.0)]
    if framework == "torch":
        inputs, bandwidths = ([torch.from_numpy(x) for x in each] for each in (inputs, bandwidths))
    wanted = [ats.attend(*inputs, score=ats.Gaussian(float(x)), kernel="dense") for x in bandwidths]
    ats.attend(*inputs, score=ats.Gaussian(bandwidths[0]))
    with monkeypatch.context() as patch:
        if NATIVE:
            _build_nothing(patch)
        for x, expected in zip(bandwidths, wanted, strict=True):
            np.testing.assert_allclose(ats.attend(*inputs, score=ats.Gaussian(x)), expected, rtol=1e-5, atol=1e-5)
        for bad in (-1.0, 0.0, float("nan"), float("inf")):
            bandwidths[0][...] = bad
            with pytest.raises(ats.ArgumentError, match="bandwidth"):
                ats.attend(*inputs, score=ats.Gaussian(bandwidths[0]))


def test_memory_that_stands_for_its_negative_is_read_so() -> None:
    """`imag` of a conjugate shares its memory with the other sign, which no stride tells."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, n, 3, dtype=torch.complex64) for n in (4, 5, 5)]
    plain, negative = [x.imag for x in inputs], [x.conj().imag for x in inputs]
    assert all(x.is_neg() for x in negative)
    ats.attend(*plain)
    for x in (plain, negative):
        torch.testing.assert_close(ats.attend(*x), ats.attend(*[y.clone() for y in x], kernel="dense"))


def test_a_named_score_with_weights_of_its_own_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(scores.Additive):
        def __init__(self) -> None:
            super().__init__(torch.ones(5))

    monkeypatch.setitem(scores._TABLE, "own", Own)
    arrays = _inputs()
    wanted = ats.attend(*arrays, score=ats.Additive(torch.ones(5)), kernel="dense")
    for _ in range(3):
        torch.testing.assert_close(ats.attend(*arrays, score="own"), wanted)


def test_a_named_score_with_biases_of_its_own_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(ats.ScaledDot):
        def lower(self, ops: Any, query: Any, key: Any) -> Any:
            return InnerForm(query, key, key_bias=key[..., :1] * 2)

    monkeypatch.setitem(scores._TABLE, "own", Own)
    query, key, value = _inputs()
    wanted = ats.attend(query, key, value, score="dot", bias=2 * key[..., 0].unsqueeze(-2))
    for _ in range(3):
        torch.testing.assert_close(ats.attend(query, key, value, score="own"), wanted)


def test_a_gaussian_as_an_inner_product_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms are made of the numbers of each call."""
    monkeypatch.setattr("attnscore.base.thresholds.INNER_TERMS", 0)
    arrays = _inputs()
    wanted = ats.attend(*arrays, score="gaussian", kernel="dense")
    for _ in range(2):
        torch.testing.assert_close(ats.attend(*arrays, score="gaussian"), wanted)


@pytest.mark.parametrize("parts", ["bias", "W_q", "both"])
def test_a_lowered_query_keeps_no_strides_of_the_caller(parts: str) -> None:
    """A query plus a bias has the strides of the query; a plan reads rows in C order."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, length, 3, 5, dtype=torch.float64) for length in (4, 6, 6))
    arrays = {"bias": torch.randn(5).double(), "W_q": torch.randn(5, 5).double()}
    score = ats.Additive(torch.randn(5).double(), **{name: x for name, x in arrays.items() if parts in (name, "both")})
    wanted = ats.attend(query, key, value, score=score, head_axis=-2, kernel="dense")
    for _ in range(2):
        torch.testing.assert_close(ats.attend(query, key, value, score=score, head_axis=-2), wanted)


def test_valid_lens_as_a_mask_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, lens = _inputs(), [np.array(x) for x in ([3, 5], [3, 0])]
    wanted = [ats.attend(*arrays, mask=ats.ValidLens(x), kernel="streaming") for x in lens]
    ats.attend(*arrays, mask=ats.ValidLens(lens[0]))
    _build_nothing(monkeypatch)
    for x, expected in zip(lens, wanted, strict=True):
        torch.testing.assert_close(ats.attend(*arrays, mask=ats.ValidLens(x)), expected)


@pytest.mark.parametrize("lens", [[3, 5], np.array([3, 5]), torch.tensor([3, 5])], ids=["list", "numpy", "torch"])
def test_lengths_are_part_of_what_is_prepared(lens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _inputs()
    wanted = [ats.attend(*arrays, valid_lens=x, kernel="streaming") for x in ([3, 5], [3, 0])]
    for _ in range(2):
        torch.testing.assert_close(ats.attend(*arrays, valid_lens=lens), wanted[0])
    with monkeypatch.context() as patch:
        _build_nothing(patch)
        torch.testing.assert_close(ats.attend(*arrays, valid_lens=lens), wanted[0])
    lens[1] = 0
    torch.testing.assert_close(ats.attend(*arrays, valid_lens=lens), wanted[1])


def test_arrays_that_lie_otherwise_are_prepared_anew() -> None:
    square = [torch.randn(2, 3, 5, 5) for _ in range(3)]
    for arrays in (square, [x.mT for x in square], [x[..., ::2] for x in square], [x.transpose(0, -1) for x in square]):
        for _ in range(2):
            torch.testing.assert_close(ats.attend(*arrays), ats.attend(*[x.clone() for x in arrays], kernel="dense"))
    query, key, value = square
    with pytest.raises(ats.FrameworkError):
        ats.attend(query, key, value.to_sparse())
    tape = ats.attend(query.requires_grad_(), key, value)
    assert tape.requires_grad
    with torch.no_grad():
        assert not ats.attend(query, key, value).requires_grad


# ---------------------------------------------------------------- on PyTorch's tape


def _gradients(arrays: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """The outputs and the gradients of arrays, and of an additive score's weights where there are any."""
    leaves = [x for x in (*arrays, getattr(options.get("score"), "w_v", None)) if x is not None and x.requires_grad]
    outs = _several(ats.attend(*arrays, **options))
    torch.manual_seed(1)
    grads = torch.autograd.grad(outs, leaves, [torch.randn_like(out) for out in outs])
    return [*(out.detach() for out in outs), *grads]


@pytest.mark.parametrize("arrays", _views().values(), ids=_views())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": ats.Causal(align="bottom_right"), "score": "dot"},
        {"mask": ~ats.SlidingWindow(1, 1, "top_left")},
        {"score": "additive"},
        {"score": "additive by head", "mask": ats.SlidingWindow(1, 1, "top_left")},
        {"return_weights": True, "mask": ats.Causal(align="bottom_right")},
        {"return_weights": True, "score": "additive"},
    ],
    ids=str,
)
def test_a_plain_call_on_a_tape_is_prepared_once(
    arrays: list[torch.Tensor], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of other numbers that lie in memory alike does not pass the checked path either."""
    leaves = {id(x): x.detach() for x in arrays}
    arrays = [leaves[id(x)] for x in arrays]
    checked = False
    if "additive" in str(options.get("score")):
        options = {**options, "score": ats.Additive(_additive_weights(arrays, options).requires_grad_())}
        checked = arrays[0].dtype == torch.bfloat16
    for x in leaves.values():
        x.requires_grad_()
    for _ in range(2):
        _gradients(arrays, options)
    with torch.no_grad():
        for x in leaves.values():
            own = x[0, 0] if 0 in x.stride() else x
            own *= -1
    wanted = _gradients(arrays, {**options, "kernel": "streaming"})
    with monkeypatch.context() as patch:
        if not checked:
            _build_nothing(patch)
        found = _gradients(arrays, options)
    _close(found, wanted, atol=1e-5)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_heads_behind_on_a_tape(groups: int, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    arrays = [torch.randn(2, 5, heads, 8).requires_grad_() for heads in (4, 4 // groups, 4 // groups)]
    options = {"head_axis": -2, "return_weights": weights}
    wanted = _gradients(arrays, {**options, "kernel": "streaming"})
    _gradients(arrays, options)
    _build_nothing(monkeypatch)
    torch.testing.assert_close(_gradients(arrays, options), wanted)


@pytest.mark.parametrize("through", [0, 1], ids=["output", "weights"])
def test_a_gradient_through_one_of_two_results(through: int) -> None:
    for _ in range(2):
        leaves = [x.requires_grad_() for x in _inputs()]
        found, wanted = (ats.attend(*leaves, return_weights=True, kernel=k)[through] for k in ("auto", "dense"))
        found, wanted = (torch.autograd.grad((x**2).sum(), leaves[: 3 - through]) for x in (found, wanted))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("which", [(0,), (1, 2), (2,)], ids=str)
def test_gradients_of_those_that_ask(which: tuple[int, ...]) -> None:
    arrays = _inputs()
    for i in which:
        arrays[i].requires_grad_()
    for _ in range(2):
        found, wanted = (_gradients(arrays, {"kernel": kernel}) for kernel in ("auto", "dense"))
        torch.testing.assert_close(found, wanted)
    # A gradient that is broadcast, and one that lies otherwise.
    out = ats.attend(*arrays)
    leaf = arrays[which[0]]
    for grad in (torch.ones(1).expand(out.shape), torch.randn(out.mT.shape).mT):
        (found,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
        (same,) = torch.autograd.grad(out, leaf, grad.contiguous(), retain_graph=True)
        assert torch.equal(found, same)


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": ats.Causal("top_left"), "valid_lens": [6, 2]}, {"return_weights": True, "valid_lens": [6, 2]}],
    ids=str,
)
@pytest.mark.parametrize("additive", [False, True])
def test_a_prepared_gradient_has_a_gradient(options: dict[str, Any], additive: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, n, 3, dtype=torch.float64).requires_grad_() for n in (4, 6, 6)]
    leaves += [torch.randn(3, dtype=torch.float64).requires_grad_()] if additive else []

    def call(query: Any, key: Any, value: Any, *weights: Any) -> Any:
        return ats.attend(query, key, value, score=ats.Additive(*weights) if weights else "scaled_dot", **options)

    for _ in range(2):
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("additive", [False, True])
def test_a_graph_of_the_gradient_where_arrays_come_from_one_another(additive: bool) -> None:
    """Paths through the other arrays count once."""
    torch.manual_seed(0)
    x, scale = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 4), (4,)))

    def gradients(kernel: str) -> list[torch.Tensor]:
        query = x * 1
        score = ats.Additive(scale * query[0, 0]) if additive else ats.ScaledDot()
        out = ats.attend(query, query @ torch.ones(4, 4).double(), query, score=score, kernel=kernel)
        first = torch.autograd.grad((out * scale).square().sum(), (x, scale), create_graph=True)
        return [*first, *torch.autograd.grad(sum(grad.square().sum() for grad in first), (x, scale))]

    wanted = gradients("streaming")
    for _ in range(2):
        torch.testing.assert_close(gradients("auto"), wanted)


# torch's own, when forward mode meets it for the first time.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp", "vjp"])
def test_a_gradient_inside_a_transform(transform: str) -> None:
    arrays = [x.requires_grad_() for x in _inputs()]
    grads = torch.randn(3, 2, 3, 4, 5)
    for _ in range(2):
        out = ats.attend(*arrays)

        def pulled(grad: Any, out: Any = out, graph: bool = False) -> Any:
            return torch.autograd.grad(out, arrays[0], grad, retain_graph=True, create_graph=graph)[0]

        wanted = [pulled(grad) for grad in grads]
        if transform == "vmap":
            torch.testing.assert_close(torch.func.vmap(pulled)(grads), torch.stack(wanted))
        elif transform == "jvp":
            torch.testing.assert_close(torch.func.jvp(pulled, (grads[0],), (grads[1],)), (wanted[0], wanted[1]))
        else:
            found, back = torch.func.vjp(lambda grad: pulled(grad, graph=True), grads[0])  # called at once
            torch.testing.assert_close(found, wanted[0])
            torch.testing.assert_close((back(wanted[1])[0] * grads[2]).sum(), (wanted[1] * wanted[2]).sum())


@pytest.mark.parametrize(
    "pack",
    [torch.clone, lambda x: x.numpy(force=True).copy(), lambda x: x.double()],
    ids=["contiguous", "numpy", "wider"],
)
def test_hooks_lay_out_what_is_kept_as_they_like(pack: Callable[[torch.Tensor], Any]) -> None:
    arrays = [x.requires_grad_() for x in _views()["strided"]]
    for options in ({}, {"score": ats.Additive(torch.randn(8))}):
        wanted = _gradients(arrays, {**options, "kernel": "streaming"})
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: torch.as_tensor(x, dtype=torch.float32)):
                out = ats.attend(*arrays, **options)
            torch.manual_seed(1)
            torch.testing.assert_close([out, *torch.autograd.grad(out, arrays, torch.randn_like(out))], wanted)


def test_autocast_around_a_backward_casts_nothing() -> None:
    arrays = [x.requires_grad_() for x in _inputs()]
    wanted = _gradients(arrays, {"kernel": "streaming"})
    for graph in (False, False, True):
        out = ats.attend(*arrays)
        torch.manual_seed(1)
        grad = torch.randn_like(out)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(out, arrays, grad, create_graph=graph)
        torch.testing.assert_close([out, *found], wanted)


def test_calls_under_autocast_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, mask = [x.requires_grad_() for x in _inputs()], ats.Causal(align="top_left")
    cast = [x.bfloat16() for x in arrays]
    expected = ats.attend(*cast, mask=mask, score="dot"), ats.attend(*cast, mask=mask)
    _build_nothing(monkeypatch)
    for score, out in zip(("dot", "scaled_dot"), expected, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = ats.attend(*arrays, mask=mask, score=score)
        assert result.dtype == torch.bfloat16 and torch.equal(result, out)
        gradients = (torch.autograd.grad(x.float().square().sum(), arrays, retain_graph=True) for x in (result, out))
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("options", [{}, {"mask": torch.tensor([[[True, True, False]], [[True, False, True]]])}])
def test_tensors_that_a_transform_closes_over(options: dict[str, Any]) -> None:
    """After calls with a plan, for these lengths and others."""
    query, key, value = (torch.randn(2, 3, 4) for _ in range(3))
    for queries in (query, query[:, :2]):
        ats.attend(query, key, value, **options)

        def product(x: torch.Tensor, kernel: str, query: torch.Tensor = queries) -> torch.Tensor:
            return (x * ats.attend(query, key, value, kernel=kernel, **options)).sum()

        def nested(x: torch.Tensor, kernel: str, product: Any = product) -> torch.Tensor:
            return torch.func.grad(product)(x, kernel).sum() * x.sum()

        for function in (product, nested):
            gradients = (torch.func.grad(function)(torch.ones_like(queries), kernel) for kernel in ("auto", "dense"))
            torch.testing.assert_close(*gradients)


def test_many_gradients_at_once() -> None:
    """As `torch.autograd.functional.jacobian(vectorize=True)` asks for them: once, and for a call that is prepared."""
    arrays = [x.requires_grad_() for x in _inputs()]
    wanted = torch.autograd.functional.jacobian(lambda q: ats.attend(q, *arrays[1:], kernel="dense"), arrays[0])
    for kernel in ("auto", "auto", "streaming"):
        found = torch.autograd.functional.jacobian(
            lambda q, kernel=kernel: ats.attend(q, *arrays[1:], kernel=kernel), arrays[0], vectorize=True
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap"])
def test_a_call_on_a_tape_inside_a_transform_that_does_not_touch_it(
    transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the first of its kind, or one that would be prepared outside."""
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    arrays = [x.requires_grad_() for x in _inputs()]
    out, scale = ats.attend(*arrays, kernel="streaming"), torch.tensor(2.0)
    wanted = torch.autograd.grad(out.sum(), arrays)
    for _ in range(2):
        if transform == "grad":
            found = torch.func.grad(lambda s: (ats.attend(*arrays) * s).sum())(scale)
            torch.testing.assert_close(found, out.sum())
        elif transform == "vjp":
            torch.testing.assert_close(torch.func.vjp(lambda s: ats.attend(*arrays) * s, scale)[0], 2 * out)
        else:
            mapped = torch.func.vmap(lambda s: ats.attend(*arrays) * s)(torch.ones(3))
            torch.testing.assert_close(torch.autograd.grad(mapped[0].sum(), arrays), wanted)
        torch.testing.assert_close(torch.autograd.grad(ats.attend(*arrays).sum(), arrays), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_prepared_call_under_a_checkpoint(reentrant: bool, forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its kind keeps what the others keep, which is computed again and compared."""
    monkeypatch.setattr(plan, "PLANS", BoundedCache(1))
    arrays = [x.requires_grad_() for x in _inputs()]
    wanted = torch.autograd.grad(ats.attend(*arrays, kernel="streaming").square().sum(), arrays)
    for _ in range(2):
        for x in arrays:
            x.grad = None
        out: Any = checkpoint(ats.attend, *arrays, use_reentrant=reentrant)
        if forgets:
            ats.attend(*_inputs(3))
        out.square().sum().backward()
        torch.testing.assert_close([x.grad for x in arrays], list(wanted))


@pytest.mark.skipif(not NATIVE, reason="only the native kernel is prepared")
def test_what_a_prepared_call_keeps_for_its_gradient() -> None:
    """The operands, the output, and two numbers per query; a change in place before the gradient is an error."""
    arrays = [x.requires_grad_() for x in _inputs()]
    ats.attend(*arrays)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ats.attend(*arrays)
    assert sorted(x.numel() for x in kept) == sorted([*(x.numel() for x in arrays), out.numel()])
    assert [x.size for x in out.grad_fn.run.saved] == [2 * 3 * 4, 2 * 3 * 4]
    out = ats.attend(*arrays)  # hooks take over the check
    with torch.no_grad():
        arrays[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
def test_a_script_that_ends_with_a_graph_ends_quietly() -> None:
    script = """if True:
        import torch, attnscore
        x = torch.randn(2, 3, 4, requires_grad=True)
        outs = [attnscore.attend(x, x, x) for _ in range(3)]
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")


# ---------------------------------------------------------------- every option


CASES: dict[str, dict[str, Any]] = {
    "bias": {"bias": (2, 4, 5, 7)},
    "bias of heads, dropout, causal": {
        "bias": (4, 1, 7), "dropout": 0.3, "seed": 5, "mask": ats.Causal("bottom_right"), "value_dim": 3,
    },
    "bias over batch and heads, grouped": {"bias": (5, 7), "kv_heads": 2, "return_stats": ("entropy",)},
    "bias that is transposed": {"bias": (2, 4, 5, 7), "lay_out": "transposed", "score": "dot"},
    "bias in steps": {"bias": (2, 1, 5, 7), "lay_out": "steps", "return_weights": True},
    "bias of another dtype": {"bias": (1, 4, 5, 1), "bias_dtype": "float64", "return_stats": ("log_sum_exp",)},
    "sink, all statistics": {"sink": (4,), "return_stats": True, "valid_lens": [7, 0]},
    "one sink, weights": {"sink": (), "return_weights": True, "valid_lens": [3, 6], "kv_heads": 1},
    "one statistic": {"return_stats": ("max_weight",)},
    "heads behind": {
        "bias": (4, 5, 7), "sink": (4,), "head_axis": -2, "kv_heads": 2, "return_weights": True, "return_stats": True,
        "mask": ats.SlidingWindow(2, 1, "top_left"),
    },
    "all": {
        "bias": (2, 4, 5, 7), "sink": (1,), "dropout": 0.3, "seed": 2**65 + 7, "mask": ats.Causal("bottom_right"),
        "valid_lens": [7, 4], "return_weights": True, "return_stats": ("entropy", "sum_weights", "log_sum_exp"),
    },
    "float64": {"bias": (4, 5, 7), "sink": (4,), "return_stats": True, "dropout": 0.2, "seed": -3, "dtype": "float64"},
    "bfloat16": {"bias": (4, 5, 7), "sink": (4,), "return_stats": True, "kv_heads": 2, "dtype": "bfloat16"},
    "additive": {"bias": (1, 4, 5, 7), "sink": (4,), "w_v": (8,), "return_stats": True, "dropout": 0.3, "seed": 1},
    "additive by head": {"sink": (4,), "w_v": (4, 8), "return_weights": True, "head_axis": -2, "kv_heads": 2},
}  # fmt: skip


def _call(name: str, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the arrays of a case by name and its other options."""
    options = dict(CASES[name])
    heads, dtype = options.pop("kv_heads", 4), getattr(torch, options.pop("dtype", "float32"))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    width = options.pop("value_dim", 8)
    arrays = {"query": draw(2, 4, 5, 8), "key": draw(2, heads, 7, 8), "value": draw(2, heads, 7, width)}
    if options.get("head_axis") == -2:
        arrays = {name: x.transpose(1, 2).contiguous() for name, x in arrays.items()}
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    if "bias" in options:
        bias_dtype, lay_out = getattr(torch, options.pop("bias_dtype", str(dtype)[6:])), options.pop("lay_out", None)
        *lead, rows, cols = options.pop("bias")
        if lay_out == "transposed":
            arrays["bias"] = draw(*lead, cols, rows, dtype=bias_dtype).mT
        else:
            step = 3 if lay_out == "steps" else 1
            arrays["bias"] = draw(*lead, rows, cols * step, dtype=bias_dtype)[..., ::step]
    for extra in ("sink", "w_v"):
        if extra in options:
            arrays[extra] = draw(*options.pop(extra), dtype=sums)
    return arrays, options


def _attend(arrays: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """Return the output, the weights and each statistic that are wanted, in this order."""
    given = dict(arrays)
    score = {"score": ats.Additive(given.pop("w_v"))} if "w_v" in given else {}
    found: list[Any] = []
    for x in _several(ats.attend(**given, **score, **options)):
        found += [s for s in x if s is not None] if isinstance(x, ats.AttentionStats) else [x]
    return found


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("name", CASES)
def test_a_hit_gives_what_the_first_call_gave(framework: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [_call(name, seed) for seed in (0, 1)]
    if framework == "numpy":
        if name == "bfloat16":
            pytest.skip("NumPy has no bfloat16")
        calls = [({key: x.numpy() for key, x in arrays.items()}, options) for arrays, options in calls]
    ats.attend(*[calls[0][0]["query"]] * 3)  # loads the framework
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    first = _attend(*calls[0])
    dense = [_attend(arrays, {**options, "kernel": "dense"}) for arrays, options in calls]
    _build_nothing(monkeypatch)
    # Of other numbers, and then of the same again.
    others, again = _attend(*calls[1]), _attend(*calls[0])
    _close(first, dense[0])
    _close(others, dense[1])
    for x, y in zip(again, first, strict=True):
        np.testing.assert_array_equal(*(torch.as_tensor(z).float().numpy() for z in (x, y)))


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_a_hit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of every operand, and through the weights and the statistics that have one."""

    def gradients(seed: int, kernel: str = "auto") -> list[torch.Tensor]:
        arrays, options = _call(name, seed)
        leaves = {key: x.requires_grad_() if x.is_leaf else x.detach().requires_grad_() for key, x in arrays.items()}
        outs = [x for x in _attend(leaves, {**options, "kernel": kernel}) if x.requires_grad]
        torch.manual_seed(1)
        return list(torch.autograd.grad(outs, list(leaves.values()), [torch.randn_like(x) for x in outs]))

    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    gradients(1)
    wanted = gradients(0, "streaming")
    _build_nothing(monkeypatch)
    found = gradients(0)
    loose = {"rtol": 4e-2, "atol": 4e-2} if name == "bfloat16" else {"rtol": 1e-5, "atol": 5e-5}
    _close(found, wanted, **loose)


def test_gradients_far_from_zero() -> None:
    """The row's maximum is exact, and taken off first: scores near 2^17 have steps of 1 / 64."""
    torch.manual_seed(0)
    query, key, value = (torch.zeros(1, 2, 5, 4), *torch.randn(2, 1, 2, 7, 4).unbind())
    bias = 2.0**17 + torch.randint(0, 128, (5, 7)) / 64

    def gradients(dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (value, bias)]
        out = ats.attend(query.to(dtype), key.to(dtype), leaves[0], bias=leaves[1], **options)
        return torch.autograd.grad(out.square().sum(), leaves)

    wanted = [x.float() for x in gradients(torch.float64, kernel="dense")]
    for _ in range(2):
        torch.testing.assert_close(list(gradients(torch.float32)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alone", ["bias", "sink"])
@pytest.mark.parametrize("name", ["all", "heads behind"])
def test_a_gradient_of_the_bias_or_the_sink_alone(alone: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(kernel: str = "auto") -> tuple[torch.Tensor, ...]:
        arrays, options = _call(name)
        arrays[alone].requires_grad_()
        outs = _attend(arrays, {**options, "kernel": kernel})
        return torch.autograd.grad(sum(x.square().sum() for x in outs if x.requires_grad), arrays[alone])

    wanted = gradient("streaming")
    gradient()
    _build_nothing(monkeypatch)
    torch.testing.assert_close(gradient(), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"return_stats": True, "dropout": 0.4, "seed": 3},
        {"return_weights": True, "return_stats": ("entropy",), "valid_lens": [4, 2], "head_axis": -2},
    ],
    ids=["dropout", "heads behind"],
)
def test_second_derivatives_of_a_hit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = [(2, 2, n, 2) for n in (3, 4, 4)]
    shapes = [(2, n, 2, 2) for _, _, n, _ in shapes] if "head_axis" in options else shapes
    leaves = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in (*shapes, (2, 3, 4), (2,))]

    def second(kernel: str = "auto") -> list[torch.Tensor]:
        arrays = dict(zip(("query", "key", "value", "bias", "sink"), leaves, strict=True))
        outs = [x for x in _attend(arrays, {**options, "kernel": kernel}) if x.requires_grad]
        first = torch.autograd.grad(sum(x.square().sum() for x in outs), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    wanted = second("streaming")
    second()
    torch.testing.assert_close(second(), wanted)


def test_a_bias_of_each_head_is_added_by_head() -> None:
    """Also with as many queries as heads, and with one."""
    rng = np.random.default_rng(0)
    score = ats.Additive(*(rng.normal(size=shape) for shape in ((7,), (7, 5), (7, 5), (4, 7))))
    for queries in (6, 4, 1):
        q, k, v = rng.normal(size=(2, 4, queries, 5)), rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(2, 4, 6, 3))
        one_by_one = [
            ats.attend(q[:, h], k[:, h], v[:, h], score=dataclasses.replace(score, bias=score.bias[h]))
            for h in range(4)
        ]
        for _ in range(2):
            np.testing.assert_allclose(ats.attend(q, k, v, score=score), np.stack(one_by_one, 1), atol=1e-12)


def test_a_query_that_heads_share_gets_the_gradients_of_all() -> None:
    rng = np.random.default_rng(0)
    score = ats.Additive(*(rng.normal(size=shape) for shape in ((7,), (7, 5), (7, 5), (4, 7))))
    q, k, v = rng.normal(size=(2, 1, 3, 5)), rng.normal(size=(2, 4, 6, 5)), rng.normal(size=(2, 4, 6, 3))
    repeated = q.repeat(4, 1)
    found, wanted = (ats.attend_vjp(x, k, v, score=score)[1](np.ones((2, 4, 3, 3))) for x in (q, repeated))
    np.testing.assert_allclose(found.query, wanted.query.sum(1, keepdims=True), atol=1e-12)
    for name in wanted.score:
        np.testing.assert_allclose(found.score[name], wanted.score[name], atol=1e-12)


def test_examples_of_a_vmap_draw_dropout_where_they_share_all_arrays() -> None:
    q = torch.ones(2, 5, 4)
    ats.attend(q, q, q, dropout=0.5)
    for _ in range(2):
        drawn = {
            kind: torch.func.vmap(lambda _: ats.attend(q, q, q, dropout=0.5), randomness=kind)(torch.arange(3))
            for kind in ("different", "same")
        }
        assert not torch.equal(drawn["different"][0], drawn["different"][1])
        assert torch.equal(drawn["same"][0], drawn["same"][1])


@pytest.mark.parametrize("bandwidth", [1e-170, 1e-110])
def test_a_tiny_learned_bandwidth_is_no_error_of_python(bandwidth: float) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    learned = torch.tensor(bandwidth, dtype=torch.float64, requires_grad=True)
    ats.attend(x, x, x, score=ats.Gaussian(learned)).sum().backward()
    assert learned.grad is not None


def test_dropout_without_a_seed_draws_at_each_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _inputs()
    numpy = [x.numpy() for x in arrays]
    torch.manual_seed(3)
    first, second = (ats.attend(*arrays, dropout=0.5) for _ in range(2))
    for _ in range(2):
        ats.attend(*numpy, dropout=0.5)
    _build_nothing(monkeypatch)
    torch.manual_seed(3)
    again = [ats.attend(*arrays, dropout=0.5) for _ in range(3)]
    assert torch.equal(again[0], first)
    assert torch.equal(again[1], second)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(again, 2))
    found = [ats.attend(*numpy, dropout=0.5) for _ in range(2)]
    assert not np.array_equal(*found)
    seeded = [ats.attend(*numpy, dropout=0.5, seed=seed) for seed in (1, 2, 1, 1 + 2**63)]
    assert [np.array_equal(seeded[0], x) for x in seeded] == [True, False, True, True]


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": True},
        {"seed": 1.0},
        {"seed": "1"},
        {"dropout": 1.0},
        {"dropout": True},
        {"dropout": float("nan")},
        {"return_stats": 1},
        {"return_stats": ("entropy", "no such")},
        {"return_weights": 1},
        {"bias": torch.zeros(4, 6, dtype=torch.int64)},
        {"bias": torch.zeros(5, 6)},
        {"bias": torch.zeros(4, 6).to_sparse()},
        {"bias": np.zeros((4, 6), "f4")},
        {"bias": torch.zeros(4, 6, device="meta")},
        {"sink": torch.zeros(2)},
        {"sink": True},
    ],
    ids=str,
)
def test_a_hit_lets_no_bad_option_pass(bad: dict[str, Any]) -> None:
    arrays = _inputs()
    good = {"seed": 1, "dropout": 0.5, "bias": torch.zeros(4, 6), "sink": torch.zeros(3), "return_stats": ("entropy",)}
    for _ in range(2):
        ats.attend(*arrays, **good)
        with pytest.raises(ats.AttnscoreError):
            ats.attend(*arrays, **{**good, **bad})


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_numbers_as_bias_and_sink(framework: str) -> None:
    """They are arrays of the one call."""
    arrays: list[Any] = _inputs()
    arrays = [x.numpy() for x in arrays] if framework == "numpy" else arrays
    for options in ({"bias": 0.5}, {"sink": 1}, {"bias": np.float32(0.5), "sink": -1.0}, {"sink": 2.0}, {"bias": 1.5}):
        found = [_attend(dict(zip(("query", "key", "value"), arrays, strict=True)), {**options, "return_stats": True})]
        wanted = ats.attend(*arrays, **options, return_stats=True, kernel="dense")
        _close(found[0], [wanted[0], *wanted[1]])


def test_a_parameter_as_bias_and_sink_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, bias, sink = _inputs(), *(torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4, 6), (3,)))

    def gradients(**options: Any) -> tuple[torch.Tensor, ...]:
        out = ats.attend(*arrays, bias=bias, sink=sink, **options)
        return torch.autograd.grad(out.square().sum(), (bias, sink))

    wanted = gradients(kernel="streaming")
    gradients()
    _build_nothing(monkeypatch)
    torch.testing.assert_close(gradients(), wanted)


def _boolean_masks() -> dict[str, Callable[[int], Any]]:
    """Boolean arrays of one shape by their seed; broadcast, transposed, of PyTorch and of NumPy."""

    def drawn(seed: int, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6

    return {
        "(query, key)": lambda seed: drawn(seed, 4, 6),
        "(batch, query, key)": lambda seed: drawn(seed, 2, 4, 6)[:, None],
        "(head, query, key)": lambda seed: drawn(seed, 3, 4, 6),
        "(key,)": lambda seed: drawn(seed, 6),
        "transposed": lambda seed: drawn(seed, 2, 3, 6, 4).mT,
        "expanded": lambda seed: drawn(seed, 4, 1).expand(4, 6),
        "numpy": lambda seed: drawn(seed, 4, 6).numpy(),
    }


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
@pytest.mark.parametrize("kind", _boolean_masks())
def test_a_boolean_array_is_read_at_each_hit(kind: str, score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the forward and by the backward, beside all other operands."""
    torch.manual_seed(0)
    drawn = _boolean_masks()[kind]
    leaves = [*_inputs(), torch.randn(4, 6), torch.randn(3), torch.randn(5)]
    for x in leaves:
        x.requires_grad_()
    query, key, value, bias, sink, w_v = leaves

    def both(seed: int, **options: Any) -> list[torch.Tensor]:
        own = ats.Additive(w_v) if score == "additive" else score
        out, weights = ats.attend(
            query, key, value, score=own, mask=drawn(seed), bias=bias, sink=sink, return_weights=True, **options
        )
        used = leaves if score == "additive" else leaves[:5]
        return [out, weights, *torch.autograd.grad(out.square().sum() + weights.square().sum(), used)]

    wanted = both(1, kernel="streaming")
    both(0)
    _build_nothing(monkeypatch)
    _close(both(1), wanted)


def test_a_boolean_array_that_changes_before_the_gradient_is_an_error() -> None:
    arrays, mask = [x.requires_grad_() for x in _inputs()], torch.ones(4, 6, dtype=torch.bool)
    for _ in range(2):
        out = ats.attend(*arrays, mask=mask)
        mask[0, 0] = False
        with pytest.raises(RuntimeError, match="mask of attend"):
            out.sum().backward()


@pytest.mark.parametrize("per_query", [False, True])
def test_valid_lens_are_read_at_each_call(per_query: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [x.requires_grad_() for x in _inputs()]
    shape = (2, 4) if per_query else (2,)
    several = [torch.arange(start, start + 8)[: 8 if per_query else 2].reshape(shape) % 7 for start in (0, 1, 2)]
    references = [ats.attend(*arrays, valid_lens=lens.clone(), kernel="streaming") for lens in several]
    for lens, wanted in zip(several, references, strict=True):
        out = ats.attend(*arrays, valid_lens=lens)
        held = lens.clone()
        lens.zero_()  # what the caller does later changes no gradient
        torch.testing.assert_close(out, wanted)
        found, expected = (torch.autograd.grad(x.square().sum(), arrays, retain_graph=True) for x in (out, wanted))
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            weights = ats.attention_weights(*arrays[:2], valid_lens=held)
        assert bool(((weights.sum(-1) > 0) == (held > 0).reshape(2, 1, -1)).all())
        if wanted is references[0]:
            _build_nothing(monkeypatch)
    monkeypatch.undo()
    for wrong in (-1, 7):
        with pytest.raises(ats.MaskError, match=f"valid_lens: expected numbers from 0 to 6, got {wrong}"):
            ats.attend(*arrays, valid_lens=torch.full(shape, wrong))


SQUARE = torch.arange(32.0).reshape(2, 4, 4) / 8
OPTIONS_THAT_DIFFER: dict[str, tuple[dict[str, Any], ...]] = {
    "strides of the bias": ({"bias": SQUARE}, {"bias": SQUARE.mT}),
    "shape of the bias": ({"bias": SQUARE[:, :1]}, {"bias": SQUARE[:1, :1]}, {"bias": SQUARE}),
    "dtype of the bias": ({"bias": SQUARE}, {"bias": SQUARE.double()}),
    "bias": ({}, {"bias": SQUARE[1]}),
    "sink": ({}, {"sink": torch.ones(2)}, {"sink": torch.ones(())}),
    "bias or sink": ({"sink": torch.ones(1)}, {"bias": torch.ones(1)}),
    "dtype of the sink": ({"sink": torch.ones(2)}, {"sink": torch.ones(2).double()}),
    "mask": ({}, {"mask": ats.Causal("top_left")}, {"valid_lens": [2, 3]}, {"valid_lens": [3, 2]}),
    "strides of the mask": ({"mask": SQUARE[0] < 1}, {"mask": (SQUARE[0] < 1).mT}),
    "strides of a mask of NumPy": ({"mask": (SQUARE[0] < 1).numpy()}, {"mask": (SQUARE[0] < 1).numpy().T}),
    "shape of the mask": ({"mask": SQUARE < 3}, {"mask": (SQUARE < 3)[:1, :1]}, {"mask": (SQUARE < 3)[:, None]}),
    "mask or bias": ({"mask": SQUARE < 3}, {"bias": SQUARE}, {"mask": SQUARE < 3, "valid_lens": [3, 2]}),
    "dropout": ({"seed": 1}, {"dropout": 0.5, "seed": 1}, {"dropout": 0.25, "seed": 1}, {"dropout": 0.5, "seed": 2}),
    "head_axis": ({}, {"head_axis": -2}),
    "statistics": ({}, {"return_stats": True}, {"return_stats": ("entropy",)}, {"return_stats": ("max_weight",)}),
    "weights": ({}, {"return_weights": True}),
}


@pytest.mark.parametrize("name", OPTIONS_THAT_DIFFER)
def test_calls_that_differ_share_no_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes of positions and heads are one, so that a plan of another call would run."""
    torch.manual_seed(0)
    size = 2 if name == "head_axis" else 4
    arrays = {key: torch.randn(2, 2, size, 3) for key in ("query", "key", "value")}
    for options in 2 * OPTIONS_THAT_DIFFER[name]:
        with monkeypatch.context() as patch:
            patch.setattr(plan, "PLANS", BoundedCache())
            wanted = _attend(arrays, {**options, "kernel": "streaming"})
        _close(_attend(arrays, options), wanted)


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_a_hit_of_an_eager_framework(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(framework)
    arrays, options = _call("all")
    wanted = _attend(arrays, {**options, "kernel": "dense"})
    module = importlib.import_module("jax.numpy" if framework == "jax" else framework)
    make = module.asarray if framework == "jax" else module.constant
    own = {key: make(x.numpy()) for key, x in arrays.items()}
    ats.attend(*[own["query"]] * 3)  # loads the framework
    first = [np.asarray(x) for x in _attend(own, options)]
    _build_nothing(monkeypatch)
    again = [np.asarray(x) for x in _attend(own, options)]
    for x, y, z in zip(first, again, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, z.numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("score", ["cosine", "bilinear", "gaussian", "additive"])
def test_a_checkpoint_computes_the_call_that_was_planned_again(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a score computes while its plan is built is not recorded: the second call would record less."""
    arrays = [torch.randn(2, n, 6, requires_grad=True) for n in (3, 5, 5)]
    made: dict[str, Any] = {
        "bilinear": ats.Bilinear(torch.randn(6, 6, requires_grad=True)),
        "gaussian": ats.Gaussian(torch.tensor(1.5, requires_grad=True)),
        "additive": ats.Additive(*(torch.randn(*shape, requires_grad=True) for shape in ((4,), (4, 6), (4, 6)))),
    }

    def attend(*arrays: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ats.attend(*arrays, score=made.get(score, score))
        return found

    wanted = torch.autograd.grad(attend(*arrays).sum(), arrays)
    monkeypatch.setattr(plan, "PLANS", BoundedCache())
    for _ in range(2):
        out = checkpoint(attend, *arrays, use_reentrant=False)
        for grad, known in zip(torch.autograd.grad(out.sum(), arrays), wanted, strict=True):
            torch.testing.assert_close(grad, known, rtol=0, atol=0)


def test_the_gradient_of_no_units() -> None:
    query, key = torch.zeros(1, 2, 0), torch.zeros(1, 3, 0)
    w_v, value = torch.zeros(0, requires_grad=True), torch.ones(1, 3, 4)
    for _ in range(2):
        ats.attend(query, key, value, score=ats.Additive(w_v)).sum().backward()
    assert w_v.grad is not None and w_v.grad.shape == (0,)
