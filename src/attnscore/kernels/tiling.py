"""TilePlan: which tiles of the score matrix are skipped, full (no mask is read) and partial (the mask is read).

- For each query tile, segments of keys: full where all of its queries attend, partial where some do. Keys outside the
  segments are skipped. Segments begin and end where the intervals of the mask do, not at multiples of the tile.
- Only intervals that the host can read make tiles skipped or full; with other masks (arrays, unsorted ids, lengths on
  a device) tiles are partial.
- A plan is frozen and prints itself as a small map.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.base.layout import ScoreShape, Span, at_most, is_unknown
from attnscore.masks import IntervalSet, Mask
from attnscore.masks.intervals import HostArray
from attnscore.problem.problem import Problem


class DynamicSegment(NamedTuple):
    """Keys start <= j < stop of a query tile whose index is traced: its only segment, all of partial tiles."""

    start: Array
    stop: Array
    max_key_tiles: int
    """Number of key tiles that the longest segment of any query tile touches."""


class Segment(NamedTuple):
    """Keys start <= j < stop, unmasked for every query of a tile or (partial) masked pair by pair."""

    start: int
    stop: int
    partial: bool


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Tile sizes of one call, and the segments of keys that each query tile visits."""

    query_len: int
    key_len: int
    query_tile: int
    key_tile: int
    segments: tuple[tuple[Segment, ...], ...]
    """The segments of keys to visit, one tuple for each query tile."""
    interval_set: IntervalSet | None
    remaining_mask: Mask | None
    """The part of the mask that the intervals do not express: it is read in partial tiles."""

    def segments_of(self, ops: Backend, tile: Any, like: Array) -> tuple[Segment, ...] | DynamicSegment:
        """Return the segments of query tile number `tile`; a traced number means a whole tile, never the tail."""
        if not self.segments:
            return ()
        if isinstance(tile, int):
            return self.segments[tile]
        whole_tiles = self.segments[: self.query_len // self.query_tile]
        if all(segments == whole_tiles[0] for segments in whole_tiles) and len(whole_tiles[0]) < 2:
            return whole_tiles[0]
        # One loop over all keys from the first segment to the last, also where all tiles have the same two or more.
        ends = np.array([(s[0].start, s[-1].stop) if s else (0, 0) for s in whole_tiles])
        max_key_tiles = max(-(-stop // self.key_tile) - start // self.key_tile for start, stop in ends.tolist())
        start, stop = (ops.take(ops.asarray(end, like), tile, 0) for end in ends.T.copy())
        return DynamicSegment(start, stop, max_key_tiles)

    def query_tiles(self) -> list[tuple[int, int]]:
        """Return (start, count) of each query tile."""
        return [(i, min(self.query_tile, self.query_len - i)) for i in range(0, self.query_len, self.query_tile)]

    def visible(self, ops: Backend, score_shape: ScoreShape, like: Array, rows: Span, cols: Span) -> Array:
        """Return the unmasked pairs of a partial tile, broadcastable on the canonical axes."""
        columns = ops.reshape(ops.positions(*cols, like), (1, cols[1]))
        unmasked, intervals = None, self.interval_set
        for interval in () if intervals is None else zip(intervals.start, intervals.stop, strict=True):
            if isinstance(rows[0], int):
                row_ends = [ops.asarray(end[:, rows[0] : rows[0] + rows[1], None], like) for end in interval]
            else:
                row_ends = [ops.slice_axis(ops.asarray(end[..., None], like), 1, *rows) for end in interval]
            start, stop = (score_shape.batch_to_canonical(ops, end) for end in row_ends)
            inside = ops.logical_and(columns >= start, columns < stop)
            unmasked = inside if unmasked is None else ops.logical_or(unmasked, inside)
        if self.remaining_mask is not None:
            positions = ops.reshape(ops.positions(*rows, like), (rows[1], 1))
            allowed = self.remaining_mask.visible(ops, score_shape, positions, columns)
            unmasked = allowed if unmasked is None else ops.logical_and(unmasked, allowed)
        return unmasked

    @property
    def tail(self) -> int:
        """Queries after the last whole tile."""
        return 0 if is_unknown(self.query_len) else self.query_len % self.query_tile

    @cached_property
    def fractions(self) -> dict[str, float]:
        """Share of all (query, key) pairs in skipped, full and partial tiles."""
        total = self.query_len * self.key_len
        sums = {"skip": float(total), "full": 0.0, "partial": 0.0}
        for (_, count), segments in zip(self.query_tiles(), self.segments, strict=True):
            for segment in segments:
                pairs = count * (segment.stop - segment.start)
                sums["partial" if segment.partial else "full"] += pairs
                sums["skip"] -= pairs
        return {name: pairs / total if total else 0.0 for name, pairs in sums.items()}

    def aligned_to_tiles(self) -> TilePlan:
        """Return the plan of a kernel whose key tiles begin at multiples of their size."""
        visited = [segment for segments in self.segments for segment in segments]
        if not visited:
            return self
        # The first and the last tile are cut at the first and last key that any query attends to.
        first, last = min(segment.start for segment in visited), max(segment.stop for segment in visited)
        size = self.key_tile

        # Query tiles of equal segments are rounded once.
        @cache
        def round_to_tiles(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
            """Round full segments inward to whole tiles; the other tiles that a segment touches become partial."""
            merged: list[Segment] = []

            def add(start: int, stop: int, partial: bool) -> None:
                """Append the part that is not in `merged`, joined to the last segment if that is of the same kind."""
                start, stop = max(merged[-1].stop if merged else first, start), min(last, stop)
                if stop <= start:
                    return
                if merged and merged[-1].stop == start and merged[-1].partial == partial:
                    start = merged.pop().start
                merged.append(Segment(start, stop, partial))

            for start, stop, partial in segments:
                outer_start, outer_stop = start // size * size, -(-stop // size) * size
                inner_start = start if start == first else -(-start // size) * size
                inner_stop = stop if stop == last else stop // size * size
                if not partial and inner_stop > inner_start:
                    add(outer_start, inner_start, partial=True)
                    add(inner_start, inner_stop, partial=False)
                add(outer_start, outer_stop, partial=True)
            return tuple(merged)

        return dataclasses.replace(self, segments=tuple(map(round_to_tiles, self.segments)))

    def __str__(self) -> str:
        # At most 16 lines of 48 characters: one line where all query tiles have equal segments.
        height, width = min(16, len(self.segments)) if len(set(self.segments)) > 1 else 1, 48
        lines = []
        for line in range(height):
            segments = self.segments[line * len(self.segments) // height] if self.segments else ()
            middles = (np.arange(width) + 0.5) * self.key_len / width
            text = ["·"] * width
            for segment in segments:
                mark = "▒" if segment.partial else "█"
                for x, middle in enumerate(middles):
                    if segment.start <= middle < segment.stop:
                        text[x] = mark
                # A segment of few keys, such as sinks, may have no middle: within one character it is shown as partial.
                first, last = (key * width // self.key_len for key in (segment.start, segment.stop - 1))
                if first == last and text[first] == "·":
                    text[first] = "▒"
            lines.append("".join(text))
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.fractions.items())
        head = f"tiles of {self.query_tile} queries x {self.key_tile} keys: {shares}"
        return "\n".join([head, *lines, "█ full  ▒ partial  · skipped (queries down, keys across)"])


def plan(problem: Problem, tile: tuple[int, int] | None = None) -> TilePlan:
    """Plan the tiles of a problem; `tile` (queries, keys) overrides their sizes."""
    score_shape = problem.score_shape
    interval_set, remaining = problem.visibility
    most_numbers = sys.maxsize
    if not problem.ops.needs_one_tile():
        is_accelerated = problem.ops.is_accelerated(problem.value)
        most_numbers = thresholds.ACCELERATOR_TILE_SCORES if is_accelerated else thresholds.TILE_SCORES
    query_tile, key_tile = tile or tile_sizes(score_shape, problem.form.values_per_pair(), most_numbers)
    lengths_known = not (is_unknown(score_shape.query_len) or is_unknown(score_shape.key_len))
    needs_few_shapes = tile is None and lengths_known and problem.ops.compiles_each_shape()
    if needs_few_shapes:
        query_tile, key_tile = _divisor(score_shape.query_len, query_tile), _divisor(score_shape.key_len, key_tile)
    # Queries of an unknown number are one tile (`tile_sizes`).
    starts = (0,) if is_unknown(score_shape.query_len) else range(0, score_shape.query_len, query_tile)
    if interval_set is None:
        all_keys = Segment(0, score_shape.key_len, partial=remaining is not None)
        has_no_keys = not is_unknown(score_shape.key_len) and score_shape.key_len == 0
        segments: tuple[tuple[Segment, ...], ...] = tuple(() if has_no_keys else (all_keys,) for _ in starts)
    else:
        find = _segments if interval_set.single is not None else _segments_of_intervals
        start, stop = interval_set.single or (interval_set.start, interval_set.stop)
        segments = tuple(
            find(start[..., i : i + query_tile], stop[..., i : i + query_tile], remaining is not None) for i in starts
        )
    tiles = TilePlan(
        score_shape.query_len, score_shape.key_len, query_tile, key_tile, segments, interval_set, remaining
    )
    # Unaligned segments end in tiles of many sizes.
    return tiles.aligned_to_tiles() if needs_few_shapes else tiles


def tile_sizes(score_shape: ScoreShape, values_per_pair: int, numbers: int) -> tuple[Any, Any]:
    """Return the queries and keys of a tile that takes about so many numbers, over all heads and the batch."""
    lead = [1 if is_unknown(length) else length for length in score_shape.lead]
    matrices = max(1, math.prod(lead) * score_shape.heads * score_shape.groups)
    pairs = max(thresholds.SMALLEST_TILE**2, numbers // (matrices * max(1, values_per_pair)))
    side = 2 ** int(math.log2(pairs) / 2)
    if is_unknown(score_shape.query_len) or is_unknown(score_shape.key_len):
        # All queries against a few keys at a time: memory is linear, and one loop serves any sizes.
        query_tile = score_shape.query_len if is_unknown(score_shape.query_len) else max(1, score_shape.query_len)
        return query_tile, at_most(score_shape.key_len, min(side, thresholds.LONGEST_KEY_TILE))
    query_tile = max(1, min(score_shape.query_len, max(side, pairs // max(1, score_shape.key_len))))
    key_tile = max(1, min(score_shape.key_len, max(side, pairs // query_tile)))
    return query_tile, key_tile


def _divisor(length: int, size: int) -> int:
    """Return the largest divisor of a length above half of `size` and up to `size`, or `size` if there is none.

    Otherwise the last tile is smaller than the others, and its operations are compiled in addition to theirs.
    """
    return next((divisor for divisor in range(size, size // 2, -1) if length % divisor == 0), size)


def _segments(start: HostArray, stop: HostArray, is_tested: bool) -> tuple[Segment, ...]:
    """Return the segments of a query tile from one interval per query; `is_tested`: a mask remains, so none is full."""
    has_keys = stop > start
    if not has_keys.any():
        return ()
    # From the first key to which any query attends to the last; and the keys to which all queries attend.
    any_keys = int(start[has_keys].min()), int(stop[has_keys].max())
    all_keys = (int(start.max()), int(stop.min())) if has_keys.all() and not is_tested else (any_keys[0], any_keys[0])
    if all_keys[1] <= all_keys[0]:
        return (Segment(*any_keys, partial=True),)
    pieces = (
        Segment(any_keys[0], all_keys[0], partial=True),
        Segment(all_keys[0], all_keys[1], partial=False),
        Segment(all_keys[1], any_keys[1], partial=True),
    )
    return tuple(piece for piece in pieces if piece.stop > piece.start)


_GAP, _SOME, _ALL = range(3)


def _segments_of_intervals(start: HostArray, stop: HostArray, is_tested: bool) -> tuple[Segment, ...]:
    """Return the segments from several intervals a query; the same queries attend to all keys between two ends.

    `start` and `stop` are (interval, batch or 1, query).
    """
    has_keys = stop > start
    if not has_keys.any():
        return ()
    starts, stops = np.sort(start[has_keys]), np.sort(stop[has_keys])
    # Half the time of np.unique (1.6 against 3.3 ms in all, for sinks and a window at 16384 tokens).
    ends = np.sort(np.concatenate([starts, stops]))
    ends = ends[np.append(True, ends[1:] != ends[:-1])]
    attending = np.searchsorted(starts, ends[:-1], "right") - np.searchsorted(stops, ends[:-1], "right")
    # Where a mask remains to be tested, more queries than there are: no segment is full.
    full_count = start[0].size + 1 if is_tested else start[0].size
    kinds = np.where(attending == 0, _GAP, np.where(attending < full_count, _SOME, _ALL))
    # Short runs of these kinds are tested together with their neighbours.
    for kind in (_ALL, _GAP):
        kinds, ends = _merge_equal_neighbours(kinds, ends)
        kinds = np.where((kinds == kind) & (np.diff(ends) < thresholds.SHORTEST_GAP), _SOME, kinds)
    kinds, ends = _merge_equal_neighbours(kinds, ends)
    intervals = zip(kinds.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return tuple(Segment(first, last, kind == _SOME) for kind, first, last in intervals if kind != _GAP)


def _merge_equal_neighbours(kinds: HostArray, ends: HostArray) -> tuple[HostArray, HostArray]:
    """Merge neighbouring segments of one kind; segment i has the keys from ``ends[i]`` to ``ends[i + 1]``."""
    begins = np.append(True, kinds[1:] != kinds[:-1])
    return kinds[begins], np.append(ends[:-1][begins], ends[-1])
