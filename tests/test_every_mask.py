"""Every mask against what the documentation says of it, pair by pair, and every way of giving its numbers.

`sees` in the table is a hand-written predicate; ``materialize``, ``intervals``, the plan of tiles and the weights of a
call are all held to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.backends import load
from attnscore.base.layout import ScoreShape
from attnscore.kernels import tiling
from attnscore.masks import Mask
from attnscore.masks.intervals import MAX_INTERVALS
from attnscore.problem.problem import build_problem
from bad_input import Maker
from cases import FRAMEWORKS, MASK, MASKS, MaskCase, Sizes
from covering import pairs
from harness import make_call, tensor

pytestmark = pytest.mark.usefixtures("one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
masks = pytest.mark.parametrize("case", MASKS, ids=[case.name for case in MASKS])
mask_objects = pytest.mark.parametrize("case", MASKS[1:], ids=[case.name for case in MASKS[1:]])


def sizes_of(case: MaskCase) -> Sizes:
    return Sizes(queries=case.lengths[0], keys=case.lengths[1])


def mask_object(case: MaskCase) -> Mask:
    """The arguments of the call as one mask. The first row of the table has none."""
    arguments = case.arguments(sizes_of(case))
    found = arguments.get("mask")
    if isinstance(found, np.ndarray):
        found = ats.Dense(found)
    if "valid_lens" in arguments:
        lens = ats.ValidLens(arguments["valid_lens"])
        found = lens if found is None else found & lens
    assert isinstance(found, Mask)
    return found


_PER_HEAD = ("array-3d", "Dense-rows", "and-array")


def test_arrays_of_one_name() -> None:
    arrays = [np.ones((2, 2), bool) for _ in range(3)]
    first, second, third = map(ats.Dense, arrays)
    for mask in ((first & second) & third, first & (second & third)):
        assert [id(x) for x in mask.arrays().values()] == [id(x) for x in arrays]


@mask_objects
def test_materialize(case: MaskCase) -> None:
    sizes, mask = sizes_of(case), mask_object(case)
    if case.name in _PER_HEAD:
        # Without heads in sight, three axes are (batch, query, key).
        found = mask.materialize(sizes.queries, sizes.keys, sizes.heads)
        np.testing.assert_array_equal(found, case.visible(sizes)[0])
        return
    found = mask.materialize(sizes.queries, sizes.keys, sizes.batch)
    assert found.dtype == bool
    wide = found if found.ndim == 4 else found[:, None]
    np.testing.assert_array_equal(np.broadcast_to(wide, case.visible(sizes).shape), case.visible(sizes))


@mask_objects
def test_intervals(case: MaskCase) -> None:
    sizes, mask = sizes_of(case), mask_object(case)
    intervals = mask.intervals(sizes.queries, sizes.keys, sizes.batch)
    assert (intervals is not None) == case.intervals
    if intervals is None:
        return
    start, stop = intervals
    keys = np.arange(sizes.keys)
    assert start.min() >= 0 and stop.max() <= sizes.keys and (start <= stop).all()
    found = (keys >= start[..., None]) & (keys < stop[..., None])
    np.testing.assert_array_equal(np.broadcast_to(found[:, None], case.visible(sizes).shape), case.visible(sizes))


@pytest.mark.parametrize("runs", [MAX_INTERVALS, MAX_INTERVALS + 1])
def test_pieces_of_scattered_padding(runs: int) -> None:
    """As many as a set may have are found; one more is read key by key."""
    keys = np.arange(2 * runs) % 2 == 0
    found = ats.KeyPadding(keys[None]).interval_set(1, len(keys), 1)
    assert (found is not None) == (runs == MAX_INTERVALS)
    if found is not None:
        np.testing.assert_array_equal(found.start.ravel(), np.flatnonzero(keys))
        np.testing.assert_array_equal(found.stop.ravel(), np.flatnonzero(keys) + 1)


@mask_objects
def test_pieces(case: MaskCase) -> None:
    """In order and apart; the same with the holes between them, as native kernels read them."""
    sizes, mask = sizes_of(case), mask_object(case)
    interval_set = mask.interval_set(sizes.queries, sizes.keys, sizes.batch)
    if interval_set is None:
        return
    keys = np.arange(sizes.keys)
    start, stop = interval_set.start[..., None], interval_set.stop[..., None]
    assert start.min() >= 0 and stop.max() <= sizes.keys and (start <= stop).all()
    assert ((start[1:] > stop[:-1]) | (start[1:] == stop[1:])).all()
    found = ((keys >= start) & (keys < stop)).any(0)
    np.testing.assert_array_equal(np.broadcast_to(found[:, None], case.visible(sizes).shape), case.visible(sizes))
    if interval_set.count > 1:
        first, last = (end[..., None] for end in interval_set.with_holes)
        inside = (keys >= first) & (keys < last)
        np.testing.assert_array_equal(inside[0] & ~inside[1:].any(0), found)


@mask_objects
def test_visible_of_a_block(case: MaskCase) -> None:
    sizes, mask = sizes_of(case), mask_object(case)
    rows, cols = np.arange(sizes.queries)[1::2][::-1], np.arange(sizes.keys)[::3]
    grid = ScoreShape((sizes.batch,), sizes.heads, 1, sizes.queries, sizes.keys)
    found = mask.visible(load("numpy"), grid, rows[:, None], cols[None])
    wanted = case.visible(sizes)[:, :, rows][..., cols]
    np.testing.assert_array_equal(np.broadcast_to(found, (*wanted.shape[:2], 1, *wanted.shape[2:]))[:, :, 0], wanted)


@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (4, 3), (100, 5), (5, 100)], ids=str)
@masks
def test_plan(case: MaskCase, tile: tuple[int, int]) -> None:
    """No visible pair is skipped, and a tile that is not tested has no hidden pair."""
    sizes = sizes_of(case)
    query, key = np.ones((sizes.batch, sizes.heads, sizes.queries, 2)), np.ones((sizes.batch, 2, sizes.keys, 2))
    problem, _ = build_problem(query, key, key, **case.arguments(sizes))
    plan = tiling.plan(problem, tile)
    visible = case.visible(sizes)
    visited = np.zeros_like(visible)
    for (first, count), segments in zip(plan.query_tiles(), plan.segments, strict=True):
        for segment in segments:
            block = (..., slice(first, first + count), slice(segment.start, segment.stop))
            assert not visited[block].any()
            visited[block] = True
            if not segment.partial:
                assert visible[block].all()
    assert not (visible & ~visited).any()
    if case.intervals:
        shares = plan.fractions
        assert shares["skip"] == pytest.approx(1 - visited[0, 0].mean())
        assert sum(shares.values()) == pytest.approx(1)


@pairs(case=MASKS, framework=FRAMEWORKS)
def test_hidden_weights_are_exactly_zero(case: MaskCase, framework: str, small_tiles: None) -> None:
    call = make_call("scaled_dot", case.name)
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    out, weights = ats.attend(*arrays, **call.arguments, return_weights=True)
    out, weights = np.asarray(out), np.asarray(weights)
    assert (weights[~call.visible] == 0).all()
    assert (weights[call.visible] > 0).all()
    sees_something = call.visible.any(-1)
    np.testing.assert_allclose(weights.sum(-1), sees_something, atol=1e-6)
    assert (out[~sees_something] == 0).all()


KINDS: dict[str, Any] = {
    "list": lambda x: x,
    "tuple": lambda x: tuple(map(tuple, x)) if isinstance(x[0], list) else tuple(x),
    "int32": lambda x: np.array(x, np.int32),
    "uint8": lambda x: np.array(x, np.uint8),
    "float": lambda x: np.array(x, np.float32),
    "read-only": lambda x: np.broadcast_to(np.array(x), np.shape(x)),
    "reversed": lambda x: np.array(x)[::-1].copy()[::-1],
    "torch": torch.tensor,
    "torch-float": lambda x: torch.tensor(x).float(),
    "torch-int32": lambda x: torch.tensor(x, dtype=torch.int32),
}


MASKS_OF_NUMBERS: dict[str, Callable[[Any], Mask]] = {
    "ValidLens": lambda kind: ats.ValidLens(kind([9, 4]), query_lens=kind([7, 3])),
    "ValidLens-2d": lambda kind: ats.ValidLens(kind([[9] * 7, [4] * 7]), kind([7, 3])),
    "KeyRange": lambda kind: ats.KeyRange(kind([2, 0]), kind([9, 4])),
    "Causal": lambda kind: ats.Causal(offset=kind([2, 4])),
    "SlidingWindow": lambda kind: ats.SlidingWindow(1, 1, offset=kind([3, 1])),
    "PrefixLM": lambda kind: ats.PrefixLM(kind([3, 6])),
    "Packed": lambda kind: ats.Packed(kind([0, 3, 3, 6]), kind([0, 5, 7, 11])).causal("bottom_right"),
    "Neighbours": lambda kind: ats.Neighbours(kind([0, 1, 2, 2, 4, 5, 6, 6]), kind([3, 5, 7, 1, 0, 0])),
    "Documents": lambda kind: ats.Documents(kind([0, 0, 1, 1, 2, 2, 3]), kind([0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 6, 6])),
}


@frameworks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS_OF_NUMBERS)
def test_kinds_of_numbers(name: str, kind: str, framework: str) -> None:
    """Lengths, offsets and ids as lists, NumPy or torch arrays of any whole or whole-valued kind mean the same."""
    call = make_call("scaled_dot")
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    wanted = ats.attend(*arrays, mask=MASKS_OF_NUMBERS[name](lambda x: np.array(x, np.int64)))
    found = ats.attend(*arrays, mask=MASKS_OF_NUMBERS[name](KINDS[kind]))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@frameworks
@pytest.mark.parametrize("kind", ["numpy", "torch", "read-only", "transposed"])
@pytest.mark.parametrize("name", ["array-2d", "array-4d", "array-batch", "array-key", "KeyPadding-scattered"])
def test_kinds_of_boolean_arrays(name: str, kind: str, framework: str, small_tiles: None) -> None:
    call = make_call("scaled_dot", name)
    given = call.arguments["mask"]
    values = given if isinstance(given, np.ndarray) else given.array
    array: Any = {
        "numpy": lambda: values,
        "torch": lambda: torch.from_numpy(values),
        "read-only": lambda: np.broadcast_to(values, values.shape),
        "transposed": lambda: np.ascontiguousarray(values.swapaxes(-1, -2)).swapaxes(-1, -2),
    }[kind]()
    mask = ats.KeyPadding(array) if name == "KeyPadding-scattered" else ats.Dense(array)
    arrays = [tensor(x) if framework == "torch" else x for x in (call.query, call.key, call.value)]
    np.testing.assert_allclose(np.asarray(ats.attend(*arrays, mask=mask)), call.reference["out"], atol=1e-6)


def _misaligned(x: np.ndarray) -> np.ndarray:
    found = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


# NumPy arrays that other frameworks cannot take over as they lie. Flipping an axis of length 1 keeps them contiguous.
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "negative stride": lambda x: np.flip(x, [axis for axis, n in enumerate(x.shape) if n == 1]),
    "misaligned": _misaligned,
    "long double": lambda x: x.astype(np.longdouble) if x.dtype.kind == "i" else x,
}
SCATTERED = ats.Dense(np.eye(5, dtype=bool))
MASKS_OF_NUMPY: dict[str, Callable[[Callable[[Any], Any]], Mask]] = {
    "ValidLens": lambda laid: ats.ValidLens(laid([3]), query_lens=laid([4])) | SCATTERED,
    "ValidLens-2d": lambda laid: ats.ValidLens(laid([[3, 1, 2, 5, 0]])) | SCATTERED,
    "KeyRange": lambda laid: ats.KeyRange(laid([1]), laid([4])) | SCATTERED,
    "Causal": lambda laid: ats.Causal(offset=laid([1])) | SCATTERED,
    "SlidingWindow": lambda laid: ats.SlidingWindow(1, 0, offset=laid([1])),
    "PrefixLM": lambda laid: ats.PrefixLM(laid([2])) | SCATTERED,
    "Packed": lambda laid: ats.Packed(laid([0, 5]), laid([0, 4])) | SCATTERED,
    "Documents": lambda laid: ats.Documents(laid([[0, 1, 0, 1, 0]])),
    "Documents-or": lambda laid: ats.Documents(laid([[0, 1, 0, 1, 0]])) | SCATTERED,
    "KeyPadding": lambda laid: ats.KeyPadding(laid([[True, False, True, True, False]])),
    "KeyPadding-or": lambda laid: ats.KeyPadding(laid([[True, False, True, True, False]])) | SCATTERED,
    "Dense": lambda laid: ats.Dense(laid(np.tri(5)[None] > 0)),
    "Dense-or": lambda laid: ats.Dense(laid(np.tri(5)[None] > 0)) | SCATTERED,
    "MaskFunction": lambda laid: ats.MaskFunction(lambda b, h, i, j, n: j <= i + n, (laid([1]),)),
}


@pairs(
    name=tuple(MASKS_OF_NUMPY),
    framework=("numpy", "torch", "tensorflow", "jax"),
    kernel=("auto", "streaming", "dense"),
)
@pytest.mark.slow_rows(
    "ValidLens*-jax-*", "MaskFunction-jax-*", "Packed-jax-*", "KeyRange-jax-dense", "SlidingWindow-jax-streaming"
)
def test_layouts_of_numpy_arrays(name: str, framework: str, kernel: str) -> None:
    """A mask of NumPy arrays means the same beside data of any framework, however they lie in memory."""
    x = Maker(framework).floats(1, 5, 4)
    wanted = np.asarray(ats.attend(x, x, x, mask=MASKS_OF_NUMPY[name](np.asarray), kernel=kernel))
    for layout, make in LAYOUTS.items():
        if (name, layout) == ("MaskFunction", "long double"):
            continue  # TensorFlow adds no floats to whole numbers
        mask = MASKS_OF_NUMPY[name](lambda values, make=make: make(np.asarray(values)))
        found = np.asarray(ats.attend(x, x, x, mask=mask, kernel=kernel))
        np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=layout)


@pytest.mark.parametrize("kind", ["list", "int32", "uint8", "torch", "torch-int32"])
def test_ignored_keys_as_whole_numbers(kind: str) -> None:
    mask = ats.KeyPadding.from_ignore(KINDS[kind]([[0, 1, 1], [0, 0, 1]]))
    assert mask.materialize(1, 3, 2)[:, 0].tolist() == [[True, False, False], [True, True, False]]


def test_two_axes_take_one_length_or_one_per_query() -> None:
    query, key, value = np.zeros((3, 2)), np.ones((4, 2)), np.eye(4)
    np.testing.assert_array_equal(ats.attend(query, key, value, valid_lens=2), [[0.5, 0.5, 0, 0]] * 3)
    expected = [[0, 0, 0, 0], [1, 0, 0, 0], [0.25] * 4]
    np.testing.assert_array_equal(ats.attend(query, key, value, valid_lens=[0, 1, 4]), expected)
    np.testing.assert_array_equal(ats.attend(query, key, value, mask=ats.ValidLens([0, 1, 4])), expected)


def test_lengths_per_batch_row_where_there_are_as_many_queries() -> None:
    mask, expected = ats.ValidLens([1, 3]), [[[1, 0, 0]] * 2, [[1, 1, 1]] * 2]
    assert mask.materialize(2, 3, 2).astype(int).tolist() == expected
    x = np.zeros((2, 2, 4)), np.zeros((2, 3, 4)), np.broadcast_to(np.eye(3), (2, 3, 3))
    np.testing.assert_array_equal(ats.attend(*x, mask=mask) > 0, expected)


def test_the_picture_of_the_alignments() -> None:
    """Three queries and five keys, as the documentation draws them."""
    top_left = ats.Causal("top_left").materialize(3, 5)[0].astype(int).tolist()
    bottom_right = ats.Causal("bottom_right").materialize(3, 5)[0].astype(int).tolist()
    assert top_left == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert bottom_right == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_a_range_that_stops_before_it_starts_is_empty() -> None:
    for mask in (ats.KeyRange(4, 2), ats.KeyRange(4, [2, 5]), ats.SlidingWindow(1, 0, offset=9)):
        intervals = mask.intervals(3, 5, 2)
        assert intervals is not None and (intervals[0] <= intervals[1]).all()
        assert ((intervals[1] > intervals[0]) == mask.materialize(3, 5, 2).any(-1)).all()


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 5), (5, 1)], ids=str)
def test_masks_of_no_or_one_position(lengths: tuple[int, int]) -> None:
    n, m = lengths
    for mask in (
        ats.Causal("top_left"), ats.Causal("bottom_right"), ats.SlidingWindow(1, 1, "top_left"), ats.ValidLens(m),
        ats.KeyRange(0, m), ats.KeyPadding(np.ones((1, m), bool)), ats.PrefixLM(0), ats.Dense(np.ones((n, m), bool)),
        ats.Documents(np.zeros((1, n), int), np.zeros((1, m), int)), ats.Packed([0, n], [0, m]),
        ats.Neighbours(m * np.arange(n + 1), np.tile(np.arange(m), n)), ~ats.ValidLens(m) | ats.Causal("top_left"),
    ):  # fmt: skip
        full = mask.materialize(n, m)
        assert full.shape == (1, n, m)
        out = ats.attend(np.ones((1, n, 2)), np.ones((1, m, 2)), np.ones((1, m, 3)), mask=mask)
        np.testing.assert_array_equal(out, np.broadcast_to(full.any(-1, keepdims=True), (1, n, 3)))


@pytest.mark.parametrize("kernel", ["auto", "streaming", "dense"])
def test_masks_of_no_sequence(kernel: str) -> None:
    def none(*shape: int) -> np.ndarray:
        return np.zeros((0, *shape))

    ids = none(3).astype(int), none(5).astype(int)
    for mask in (
        ats.ValidLens(none().astype(int)), ats.KeyRange(none().astype(int), none().astype(int)),
        ats.KeyPadding(none(5).astype(bool)), ats.Dense(none(3, 5).astype(bool)), ats.Documents(*ids),
        ats.Documents(ids[0], np.zeros((1, 5), int)), ats.Documents(*ids) | ats.Causal("top_left"),
    ):  # fmt: skip
        assert ats.attend(none(3, 2), none(5, 2), none(5, 4), mask=mask, kernel=kernel).shape == (0, 3, 4)


def test_every_mask_of_the_package_is_in_the_table() -> None:
    rows = {type(mask_object(case)).__name__ for case in MASKS[1:]}
    assert {"ValidLens", "KeyRange", "KeyPadding", "Causal", "SlidingWindow", "PrefixLM", "Documents", "Dense"} <= rows
    assert {"Packed", "Neighbours", "MaskFunction"} <= rows
    assert MASK["nested"].lengths == (7, 12)
