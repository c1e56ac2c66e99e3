"""Laws of the masks: De Morgan and its kin, intervals, what is printed, what a tile gets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import attnscore as ats
from attnscore import backends
from attnscore.base import thresholds
from attnscore.base.layout import ScoreShape
from attnscore.kernels import tiling
from attnscore.masks import IntervalSet, split_intervals
from attnscore.masks.intervals import MAX_INTERVALS
from strategies import HostArray, fits, law, leaves, masks

Sizes = tuple[int, int, int]


@st.composite
def some(draw: Any, count: int = 1, *, single: bool = False) -> tuple[Sizes, list[ats.Mask]]:
    """(queries, keys, batch), and so many masks of that size."""
    sizes = draw(st.integers(0, 6)), draw(st.integers(0, 8)), draw(st.integers(1, 3))
    kind = leaves if single else masks
    return sizes, [draw(kind(*sizes)) for _ in range(count)]


def full(mask: ats.Mask, sizes: Sizes) -> HostArray:
    array = mask.materialize(*sizes)
    assert array.dtype == bool and array.shape == (sizes[2], sizes[0], sizes[1])
    return array


@law
@given(some(2))
def test_and_or_not_are_those_of_the_arrays(drawn: Any) -> None:
    sizes, (a, b) = drawn
    assume(fits(a & b))
    assert np.array_equal(full(a & b, sizes), full(a, sizes) & full(b, sizes))
    assert np.array_equal(full(a | b, sizes), full(a, sizes) | full(b, sizes))
    assert np.array_equal(full(~a, sizes), ~full(a, sizes))


@law
@given(some(3))
def test_laws_of_boolean_algebra(drawn: Any) -> None:
    sizes, (a, b, c) = drawn
    assume(fits(a & b & c))
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & b, b & a),
        (a & (b & c), (a & b) & c),
        (a | (b | c), (a | b) | c),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & (a | b), a),
        (a | (a & b), a),
    ):
        assert np.array_equal(full(left, sizes), full(right, sizes))
    assert not full(a & ~a, sizes).any()
    assert full(a | ~a, sizes).all()


def from_intervals(intervals: Any, sizes: Sizes) -> HostArray:
    query_len, key_len, batch = sizes
    start, stop = intervals
    assert start.shape == stop.shape and start.shape in ((1, query_len), (batch, query_len))
    assert np.all((start >= 0) & (start <= stop) & (stop <= key_len))
    columns = np.arange(key_len)
    seen = (start[..., None] <= columns) & (columns < stop[..., None])
    return np.broadcast_to(seen, (batch, query_len, key_len))


def from_pieces(interval_set: IntervalSet, sizes: Sizes) -> HostArray:
    """Also as the native module reads them: an interval less its holes."""
    ends = list(zip(interval_set.start, interval_set.stop, strict=True))
    seen = np.logical_or.reduce([from_intervals(pair, sizes) for pair in ends])
    for (_, stop), (start, last) in pairwise(ends):
        # In order, apart, and the empty ones behind.
        assert ((start > stop) | (start == last)).all()
    around, *holes = zip(*interval_set.with_holes, strict=True) if len(ends) > 1 else [interval_set.with_holes]
    less = from_intervals(around, sizes)
    for hole in holes:
        less = less & ~from_intervals(hole, sizes)
    assert np.array_equal(less, seen)
    return seen


@law
@given(some())
def test_pieces_equal_the_array(drawn: Any) -> None:
    """And whatever can be few pieces is."""
    sizes, (mask,) = drawn
    interval_set, array = mask.interval_set(*sizes), full(mask, sizes)
    if interval_set is not None:
        assert np.array_equal(from_pieces(interval_set, sizes), array)
        most = int((np.diff(np.pad(array, ((0, 0), (0, 0), (1, 0))).astype(int), axis=-1) == 1).sum(-1).max(initial=0))
        assert not array.size or interval_set.count == max(1, most) <= MAX_INTERVALS
        assert not array.size or (mask.intervals(*sizes) is None) == (most > 1)
    else:
        assert any(name in repr(mask) for name in ("Dense", "Documents", "Neighbours"))


def test_more_pieces_than_the_most_are_none() -> None:
    keys = ats.KeyPadding(np.arange(4 * MAX_INTERVALS)[None] % 2 == 0)
    few = keys & ats.ValidLens(2 * MAX_INTERVALS)
    assert keys.interval_set(3, 4 * MAX_INTERVALS) is None and (~keys).interval_set(3, 4 * MAX_INTERVALS) is None
    assert few.interval_set(3, 4 * MAX_INTERVALS) is None  # its parts are not known
    few = ats.KeyPadding(np.arange(4 * MAX_INTERVALS)[None] < 2 * MAX_INTERVALS) & keys
    assert split_intervals(few, 3, 4 * MAX_INTERVALS, 1)[0] is not None
    alternate = ats.KeyPadding(np.arange(2 * MAX_INTERVALS)[None] % 2 == 0)
    found = alternate.interval_set(3, 2 * MAX_INTERVALS)
    assert found is not None and found.count == MAX_INTERVALS
    whole = (alternate | ats.KeyRange(2 * MAX_INTERVALS - 1, 2 * MAX_INTERVALS)).interval_set(3, 2 * MAX_INTERVALS)
    assert whole is not None and whole.count == MAX_INTERVALS
    # Kept for the tiles as far as it goes.
    both = ats.KeyRange(0, 20) & (ats.KeyRange(1, 5) | ats.KeyRange(8, 30)) & ~ats.KeyRange(10, 12)
    interval_set, rest = split_intervals(both, 2, 40, 1)
    assert rest is None and interval_set is not None and interval_set.count == 3


@law
@given(some())
def test_intervals_equal_the_array(drawn: Any) -> None:
    sizes, (mask,) = drawn
    intervals = mask.intervals(*sizes)
    if intervals is not None:
        assert np.array_equal(from_intervals(intervals, sizes), full(mask, sizes))


@law
@given(some(single=True))
def test_single_masks_are_intervals(drawn: Any) -> None:
    """All but arrays and graphs, and ids or padding that are scattered: those alone may leave the fast form."""
    sizes, (mask,) = drawn
    assume(sizes[0] > 0 and not isinstance(mask, (ats.Dense, ats.Neighbours)))
    array = full(mask, sizes)
    edges = np.diff(np.pad(array, ((0, 0), (0, 0), (1, 1))).astype(int), axis=-1)
    contiguous = bool(((edges == 1).sum(-1) <= 1).all())
    if contiguous or not isinstance(mask, (ats.KeyPadding, ats.Documents)):
        assert mask.intervals(*sizes) is not None


@law
@given(some())
def test_pieces_and_rest_equal_the_array(drawn: Any) -> None:
    sizes, (mask,) = drawn
    interval_set, rest = split_intervals(mask, *sizes)
    whole = np.ones((sizes[2], sizes[0], sizes[1]), bool)
    if interval_set is not None:
        whole &= from_pieces(interval_set, sizes)
    if rest is not None:
        whole &= full(rest, sizes)
    assert np.array_equal(whole, full(mask, sizes))


@law
@given(some(), st.data())
def test_any_block_is_cut_from_the_array(drawn: Any, data: st.DataObject) -> None:
    (query_len, key_len, batch), (mask,) = drawn
    rows = data.draw(st.lists(st.integers(0, max(0, query_len - 1)), max_size=4 if query_len else 0))
    cols = data.draw(st.lists(st.integers(0, max(0, key_len - 1)), max_size=4 if key_len else 0))
    ops, grid = backends.load("numpy"), ScoreShape((batch,), 1, 1, query_len, key_len, has_heads=False)
    block = mask.visible(ops, grid, np.array(rows, int).reshape(-1, 1), np.array(cols, int).reshape(1, -1))
    found = np.broadcast_to(block, (batch, 1, 1, len(rows), len(cols)))[:, 0, 0]
    assert np.array_equal(found, full(mask, (query_len, key_len, batch))[:, rows][:, :, cols])


@law
@given(some(), st.integers(1, 7), st.integers(1, 9), st.integers(1, 3))
def test_a_plan_skips_nothing_that_is_seen_and_tests_all_that_is_partial(
    drawn: Any, query_tile: int, key_tile: int, gap: int
) -> None:
    (query_len, key_len, batch), (mask,) = drawn
    x = np.zeros((batch, query_len, 1)), np.zeros((batch, key_len, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "SHORTEST_GAP", gap)
        plan = _plan(x[0], x[1], mask, (query_tile, key_tile))
    array = full(mask, (query_len, key_len, batch))
    left = array.copy()
    visited = 0
    for (first, count), segments in zip(plan.query_tiles(), plan.segments, strict=True):
        rows = slice(first, first + count)
        for segment in segments:
            cols = slice(segment.start, segment.stop)
            left[:, rows, cols] = False
            visited += count * (segment.stop - segment.start)
            if not segment.partial:
                assert array[:, rows, cols].all()
    assert not left.any()
    assert abs(sum(plan.fractions.values()) - (1 if query_len * key_len else 0)) < 1e-12
    assert round((1 - plan.fractions["skip"]) * query_len * key_len) == (visited if query_len * key_len else 0)
    str(plan)


def _plan(query: HostArray, key: HostArray, mask: ats.Mask, tile: tuple[int, int]) -> tiling.TilePlan:
    from attnscore.problem.problem import build_problem

    problem, _ = build_problem(query, key, key, mask=mask)
    return tiling.plan(problem, tile)


def _plain(mask: Any) -> bool:
    """Whether what a mask prints says all that it holds: long arrays are printed by their shape."""
    if isinstance(mask, ats.Mask):
        return all(_plain(field) for field in vars(mask).values())
    return np.size(mask) <= 8 and np.size(mask) > 0


@law
@given(some())
def test_what_a_mask_prints_makes_it_again(drawn: Any) -> None:
    sizes, (mask,) = drawn
    text = repr(mask)
    assert "\n" not in text and "object at" not in text
    if _plain(mask):
        again = eval(text, {name: getattr(ats, name) for name in ats.__all__})
        assert np.array_equal(full(again, sizes), full(mask, sizes))
        assert repr(again) == text


@law
@given(st.integers(1, 7), st.integers(0, 3))
def test_relatives(length: int, width: int) -> None:
    """Masks that say the same in different words."""
    sizes = (length, length, 1)
    left = min(width, length)
    for one, other in (
        (ats.Causal(), ats.SlidingWindow(right=0)),
        (ats.Causal(), ats.PrefixLM(0)),
        (ats.PrefixLM(left), ats.Causal() | ats.ValidLens(left)),
        (ats.SlidingWindow(left, 0), ats.Causal() & ~ats.Causal(offset=-left - 1)),
        (ats.SlidingWindow(left, left), ats.SlidingWindow(left) & ats.SlidingWindow(right=left)),
        (ats.ValidLens(left), ats.KeyRange(0, left)),
        (~ats.ValidLens(left), ats.KeyRange(left, length)),
        (ats.KeyPadding(np.arange(length)[None] < left), ats.ValidLens(left)),
        (ats.KeyPadding.from_ignore(np.arange(length)[None] >= left), ats.ValidLens(left)),
        (ats.Documents([0] * length), ats.ValidLens(length)),
        (ats.Documents([-1] * length), ats.ValidLens(0)),
        (ats.Causal("bottom_right"), ats.Causal("top_left")),
        (ats.ValidLens(length, query_lens=left), ~ats.Dense(np.arange(length)[:, None] >= np.full(length, left))),
    ):
        assert np.array_equal(full(one, sizes), full(other, sizes)), (one, other)


@law
@given(st.integers(1, 6), st.integers(1, 8))
def test_bottom_right_ends_in_the_last_key(query_len: int, key_len: int) -> None:
    seen = ats.Causal("bottom_right").materialize(query_len, key_len)[0]
    assert seen[-1].all()
    offset = ats.Causal(offset=key_len - query_len).materialize(query_len, key_len)[0]
    assert np.array_equal(seen, offset)
    assert np.array_equal(
        ats.Causal("top_left").materialize(query_len, key_len)[0], np.tri(query_len, key_len, dtype=bool)
    )
