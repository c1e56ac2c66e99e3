"""Arrays that a mask is made from, written to later: calls see them as they are, a backward as its forward did."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn.attention.flex_attention import and_masks

import attnscore as ats
import attnscore.parallel
import covering
from attnscore.masks import function as mask_functions
from attnscore.masks.closures import snapshot
from harness import pullback_of

BATCH, HEADS, LENGTH = 2, 2, 6
Arrays = tuple[Any, ...]
RNG = np.random.default_rng(0)
PAIRS = RNG.random((2, LENGTH, LENGTH)) < 0.6
SPARSE = (np.arange(0, 2 * LENGTH + 1, 2), np.tile([0, 1], LENGTH), np.tile([2, 4], LENGTH))


def _at(limit: Any, index: Any) -> Any:
    if isinstance(index, tf.Tensor):
        return tf.gather(limit, index)
    return (
        torch.as_tensor(limit)[index]
        if isinstance(index, torch.Tensor)
        else (limit if isinstance(index, np.ndarray) else jnp.asarray(limit))[index]
    )


def _few(b: Any, h: Any, q: Any, k: Any, limit: Any) -> Any:
    return k < _at(limit, q)


def _scattered(b: Any, h: Any, q: Any, k: Any, limit: Any) -> Any:
    return (k + _at(limit, q)) % 3 != 0


def _by_head(b: Any, h: Any, q: Any, k: Any, limit: Any) -> Any:
    return k < _at(limit, q) + h


def _closure(function: Callable[..., Any], limit: Any) -> ats.MaskFunction:
    return ats.MaskFunction(lambda b, h, q, k: function(b, h, q, k, limit))


# Each mask as a function of its arrays, with the arrays before and after the write.
Case = tuple[Callable[..., Any], Arrays, Arrays]
CASES: dict[str, Case] = {
    "lens": (ats.ValidLens, ([2, 5],), ([4, 1],)),
    "lens per query": (ats.ValidLens, ([[1, 2, 3, 4, 5, 6]] * 2,), ([[6, 1, 5, 2, 4, 3]] * 2,)),
    "query lens": (ats.ValidLens, ([2, 5], [3, 6]), ([4, 1], [6, 2])),
    "range": (ats.KeyRange, ([0, 1], [2, 5]), ([1, 0], [6, 3])),
    "padding": (ats.KeyPadding, (PAIRS[:, 0],), (~PAIRS[:, 0],)),
    "causal": (lambda x: ats.Causal(offset=x), ([0, 2],), ([1, 0],)),
    "window": (lambda x: ats.SlidingWindow(1, 1, offset=x), ([0, 2],), ([1, 0],)),
    "prefix": (ats.PrefixLM, ([1, 3],), ([4, 0],)),
    "documents": (ats.Documents, ([[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]],), ([[0, 1, 1, 1, 2, -1]] * 2,)),
    "packed": (ats.Packed, ([0, 2, 6],), ([0, 4, 5],)),
    "neighbours": (lambda *x: ats.Neighbours(SPARSE[0], *x), (SPARSE[1],), (SPARSE[2],)),
    "neighbours and causal": (lambda x: ats.Neighbours(SPARSE[0], x) & ats.Causal(), (SPARSE[1],), (SPARSE[2],)),
    "neighbours or causal": (lambda x: ats.Neighbours(SPARSE[0], x) | ats.Causal(), (SPARSE[1],), (SPARSE[2],)),
    "array": (np.asarray, (PAIRS[:, None],), (~PAIRS[:, None],)),
    "dense": (ats.Dense, (PAIRS[:, None],), (~PAIRS[:, None],)),
    "not dense": (lambda x: ~ats.Dense(x) & ats.ValidLens([6, 5]), (PAIRS[:, None],), (~PAIRS[:, None],)),
    "captured": (lambda x: ats.MaskFunction(_few, (x,)), ([1, 2, 3, 4, 5, 6],), ([6, 1, 5, 2, 4, 3],)),
    "captured, scattered": (lambda x: ats.MaskFunction(_scattered, (x,)), ([1, 2, 3, 4, 5, 6],), ([0, 1, 5, 2, 4, 3],)),
    "closure": (lambda x: _closure(_few, x), ([1, 2, 3, 4, 5, 6],), ([6, 1, 5, 2, 4, 3],)),
    "closure, scattered": (lambda x: _closure(_scattered, x), ([1, 2, 3, 4, 5, 6],), ([0, 1, 5, 2, 4, 3],)),
    "closure, by head": (lambda x: _closure(_by_head, x), ([1, 2, 3, 4, 5, 6],), ([0, 1, 5, 2, 4, 3],)),
    "closure or causal": (lambda x: _closure(_few, x) | ats.Causal(), ([1, 2, 3, 4, 5, 6],), ([6, 1, 5, 2, 4, 3],)),
}
KERNELS = ("auto", "streaming")


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(BATCH, HEADS, LENGTH, 4)) for _ in "qkv"]


FRAMEWORKS = ("numpy", "torch", "tensorflow", "jax", "jax.jit")


def gradients(framework: str, mask: Any, **options: Any) -> tuple[np.ndarray, Callable[[], list[np.ndarray]]]:
    """The output under a mask, and a function that runs the backward."""
    out, pull = pullback_of(framework, inputs(), mask=mask, **options)
    return out, lambda: pull(np.ones_like(out))


def writable(arrays: Arrays, make: Callable[[Any], Any] = np.array) -> list[Any]:
    return [make(x) for x in arrays]


def write(arrays: list[Any], values: Arrays) -> None:
    for x, new in zip(arrays, values, strict=True):
        x[...] = new if isinstance(x, np.ndarray) else torch.tensor(new)


@covering.each(case=CASES, framework=FRAMEWORKS, kernel=KERNELS)
def test_arrays_of_numpy(case: Case, framework: str, kernel: str) -> None:
    make, before, after = case
    arrays = writable(before)
    mask = make(*arrays)
    first = gradients(framework, mask, kernel=kernel)
    write(arrays, after)
    for (out, pull), values in ((first, before), (gradients(framework, mask, kernel=kernel), after)):
        expected, expected_pull = gradients(framework, make(*writable(values)), kernel=kernel)
        np.testing.assert_array_equal(out, expected)
        for x, y in zip(pull(), expected_pull(), strict=True):
            np.testing.assert_array_equal(x, y)


@covering.each(case=CASES, inference=(False, True), kernel=KERNELS)
def test_tensors(case: Case, inference: bool, kernel: str) -> None:
    """A backward that would read a tensor written since raises, as autograd does; inference tensors are copied."""
    make, before, after = case
    with torch.inference_mode(inference):
        arrays = writable(before, torch.tensor)
    mask = make(*arrays)
    _, pull = gradients("torch", mask, kernel=kernel)
    _, expected = gradients("torch", make(*writable(before)), kernel=kernel)
    with torch.inference_mode(inference):
        write(arrays, after)
    try:
        found = pull()
    except RuntimeError as error:
        assert not inference and "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(found, expected())
    out, pull = gradients("torch", mask, kernel=kernel)
    expected_out, expected = gradients("torch", make(*writable(after)), kernel=kernel)
    torch.testing.assert_close([out, *pull()], [expected_out, *expected()])


def _held(mask: Any) -> list[tuple[str, int]]:
    """The attributes of a mask and of its parts, by identity."""
    found = [(f"{type(mask).__name__}.{name}", id(x)) for name, x in vars(mask).items()]
    return found + [one for x in vars(mask).values() if isinstance(x, ats.masks.Mask) for one in _held(x)]


def test_a_mask_is_as_it_was_before_a_call() -> None:
    shard = ats.parallel.Shard.head_tail(LENGTH, 0, 1)
    for name, (make, arrays, _) in CASES.items():
        if not isinstance(mask := make(*writable(arrays)), ats.masks.Mask):
            continue
        held = _held(mask)
        for framework in ("numpy", "torch"):
            gradients(framework, mask)[1]()
        mask.materialize(LENGTH, LENGTH, BATCH)
        ats.parallel.shard_mask(mask, shard, shard, LENGTH, LENGTH).interval_set(LENGTH, LENGTH, BATCH)
        assert _held(mask) == held, name


def test_a_mask_holds_nothing_of_a_call() -> None:
    """One after the other, in threads and in a program calls with 8 heads and with 1 share a function of the head."""
    mask = ats.MaskFunction(lambda b, h, q, k: k == (q + h) % LENGTH)
    arrays = [np.random.default_rng(heads).normal(size=(1, heads, LENGTH, 2)) for heads in (8, 1)]
    expected = [np.stack([np.roll(x[0, h], -h, axis=0) for h in range(len(x[0]))])[None] for x in arrays]

    def wrong(i: int) -> int:
        outs = (ats.attend(0 * arrays[i], 0 * arrays[i], arrays[i], mask=mask) for _ in range(50))
        return sum(not np.allclose(out, expected[i], atol=1e-12) for out in outs)

    for order in ((0, 1), (1, 0)):
        mask_functions._INTERVALS.clear()
        assert [wrong(i) for i in order] == [0, 0]
    mask_functions._INTERVALS.clear()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(wrong, (1, 0, 1, 0))) == [0] * 4
    finally:
        sys.setswitchinterval(interval)

    weights = arrays[0]

    def loss(*values: Any) -> Any:
        outs = [ats.attend(x * 0, x * 0, x, mask=mask) for x in values]
        return (outs[0] * weights).sum() + outs[1].sum()

    gradient = jax.jit(jax.grad(loss))(*map(jnp.asarray, arrays))
    rolled = np.stack([np.roll(weights[0, h], h, axis=0) for h in range(8)])[None]
    np.testing.assert_allclose(gradient, rolled, atol=1e-12)


class TestSnapshots:
    """What a function reads, as a call keeps it."""

    def test_arrays_are_copied_wherever_the_function_reads_them(self) -> None:
        array = np.arange(3)

        def inner(i: int) -> Any:
            return array[i]

        def named(i: int, j: int = 0, *, table: Any = array) -> Any:
            return inner(i) + GLOBAL[j] + table[i] + nested["array"][0][i]

        nested = {"array": (array,)}
        for function in (named, partial(named, j=0), partial(lambda f, i: f(i), named)):
            array[:], GLOBAL[:] = np.arange(3), 0
            first, same = snapshot(function), snapshot(function)
            assert first.key is not None and first.key == same.key and hash(first.key) == hash(same.key)
            before = function(2)
            GLOBAL[:] = 7
            assert snapshot(function).key != first.key
            array[:] = 5
            assert first.value(2) == before != function(2)

    def test_lists_and_dictionaries_are_copied(self) -> None:
        limits, table = [3], {"limit": 3}
        kept = snapshot(lambda i: (i < limits[0], i < table["limit"]))
        limits[0] = table["limit"] = 9
        assert kept.value(5) == (False, False) and kept.key is not None

    def test_attributes_and_functions_that_a_library_returns_are_read(self) -> None:
        def below(b: Any, h: Any, q: Any, k: Any) -> Any:
            return k < below.limit  # type: ignore[attr-defined]

        below.limit = torch.tensor(3)  # type: ignore[attr-defined]
        kept = snapshot(and_masks(below, below))
        below.limit[...] = 9  # type: ignore[attr-defined]
        assert not kept.value(*torch.tensor([0, 0, 0, 5])) and snapshot(and_masks(below, below)).key != kept.key

    def test_a_vectorized_function_has_no_key(self) -> None:
        assert snapshot(np.frompyfunc(lambda i: i < len(GLOBAL), 1, 1)).key is None
        assert snapshot(np.less).key is not None

    def test_a_function_that_names_itself(self) -> None:
        array = np.arange(9)

        def sums(i: int) -> Any:
            return array[i] + (sums(i - 1) if i else 0)

        kept = snapshot(sums)
        array[:] = 0
        assert kept.value(8) == 36 and kept.key is not None

    @pytest.mark.parametrize("thing", [object(), [{1}], (np.array([None]),), np.zeros(1).sum])
    def test_what_cannot_be_compared_has_no_key(self, thing: Any) -> None:
        assert snapshot(lambda: thing).key is None
        assert snapshot(lambda: io.StringIO(str(np.add))).key is not None

    def test_numbers_of_two_types_are_two(self) -> None:
        keys = [snapshot(lambda x=x: x).key for x in (1, 1.0, True, np.float32(1), np.ones(1), np.ones((1, 1)))]
        assert len(set(keys)) == len(keys)


GLOBAL = np.zeros(3, int)
