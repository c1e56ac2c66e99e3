"""The part of a sequence that one rank holds, and how sequences are divided among ranks.

- A `Shard` is a few ranges of global positions in rising order. The rows of a local array are in the same order, so a
  mask's interval of keys is an interval of the keys of any shard too.
- Shards follow from the mask and the lengths alone: every rank computes the same ones, and nothing is sent.
- Sets of keys to fetch or to send are shards as well: `&` and `|` combine them, `locate` finds them in an array.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array
from attnscore.base import thresholds
from attnscore.base.arguments import check_count, is_whole, shown
from attnscore.base.layout import ScoreShape
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.masks import Mask
from attnscore.masks.intervals import HostArray
from attnscore.parallel.pairs import Pairs, Range, check_batch, union


@dataclass(frozen=True)
class Shard:
    """The rows of a whole sequence that one rank holds: a few ranges of global positions.

    Parameters
    ----------
    ranges : tuple of (start, stop)
        In rising order; ranges that touch are joined, and empty ones left out.
    length : int
        Length of the whole sequence.

    Raises
    ------
    ArgumentError
        Ranges that overlap, are out of order or leave the sequence.

    Examples
    --------
    >>> from attnscore.parallel import Shard
    >>> Shard.contiguous(10, rank=1, ranks=4)
    Shard(ranges=((3, 6),), length=10)
    >>> Shard.head_tail(10, rank=0, ranks=2).positions()
    array([0, 1, 2, 8, 9])
    """

    ranges: tuple[Range, ...]
    length: int

    def __post_init__(self) -> None:
        check_count("length", self.length)
        joined: list[Range] = []
        last = 0
        for pair in self.ranges:
            if len(pair) != 2 or not all(map(is_whole, pair)) or not last <= pair[0] <= pair[1] <= self.length:
                expected = f"(start, stop) in rising order, from 0 to {self.length}"
                raise ArgumentError(message("ranges", expected, shown(pair)))
            start, last = map(int, pair)
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            if start < last:
                joined.append((start, last))
        object.__setattr__(self, "ranges", tuple(joined))

    # ---- dividing a sequence

    @classmethod
    def contiguous(cls, length: int, rank: int, ranks: int) -> Shard:
        """Return the rank's part of `ranks` consecutive parts, whose sizes differ by 1 at most."""
        _check_rank(length, rank, ranks)
        return cls(((_edge(length, rank, ranks), _edge(length, rank + 1, ranks)),), length)

    @classmethod
    def head_tail(cls, length: int, rank: int, ranks: int) -> Shard:
        """Return the parts `rank` and, counted from the end, `rank` of ``2 * ranks``: balanced under a causal mask."""
        _check_rank(length, rank, ranks)
        parts = (rank, 2 * ranks - 1 - rank)
        return cls(tuple((_edge(length, i, 2 * ranks), _edge(length, i + 1, 2 * ranks)) for i in parts), length)

    @classmethod
    def balanced(
        cls,
        mask: Mask | None,
        length: int,
        rank: int,
        ranks: int,
        chunk: int = 128,
        *,
        key_len: int | None = None,
        batch: int = 1,
    ) -> Shard:
        """Return the rank's entry of `balanced_shards`, which computes the shards of all ranks."""
        _check_rank(length, rank, ranks)
        return balanced_shards(mask, length, ranks, chunk, key_len=key_len, batch=batch)[rank]

    @classmethod
    def whole(cls, length: int) -> Shard:
        """Return all positions."""
        return cls(((0, length),), length)

    @classmethod
    def empty(cls, length: int) -> Shard:
        """Return no position."""
        return cls((), length)

    @classmethod
    def of(cls, ranges: Iterable[Range], length: int) -> Shard:
        """Return the positions in any of the ranges, which may overlap and come in any order."""
        ends = np.array([*ranges], np.int64).reshape(-1, 2)
        ends = ends[ends[:, 0] < ends[:, 1]]
        return cls(union(ends[:, 0], ends[:, 1]), length)

    # ---- positions

    @cached_property
    def size(self) -> int:
        """Number of positions."""
        return sum(stop - start for start, stop in self.ranges)

    def __len__(self) -> int:
        return self.size

    @cached_property
    def _positions(self) -> HostArray:
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in self.ranges)])

    def positions(self, like: Array = None) -> Array:
        """Return the global positions, (positions,) int64, of NumPy or of the framework and device of `like`.

        Rotary embeddings and the like take them in place of 0, 1, 2, ...
        """
        return self._positions.copy() if like is None else backends.of({"like": like}).asarray(self._positions, like)

    def take(self, x: Array, axis: int = -2) -> Array:
        """Return the rows of a global array that this rank holds; a view where they are one range.

        Parameters
        ----------
        x : array of any framework, with `length` positions on `axis`
        axis : int

        Raises
        ------
        FrameworkError, ShapeError
        """
        ops = backends.of({"x": x})
        check_positions(x, self.length, axis)
        axis %= len(x.shape)
        if len(self.ranges) >= thresholds.MANY_RANGES:
            return ops.take(x, ops.asarray(self._positions, x), axis)
        parts = [ops.slice_axis(x, axis, start, stop - start) for start, stop in self.ranges or ((0, 0),)]
        return parts[0] if len(parts) == 1 else ops.concat(parts, axis)

    # ---- sets of positions

    def __and__(self, other: Shard) -> Shard:
        """Return the positions in both."""
        _check_same_length(self, other)
        ranges, i, j = [], 0, 0
        while i < len(self.ranges) and j < len(other.ranges):
            (start, stop), (other_start, other_stop) = self.ranges[i], other.ranges[j]
            if max(start, other_start) < min(stop, other_stop):
                ranges.append((max(start, other_start), min(stop, other_stop)))
            i, j = (i + 1, j) if stop <= other_stop else (i, j + 1)
        return Shard(tuple(ranges), self.length)

    def __or__(self, other: Shard) -> Shard:
        """Return the positions in either."""
        _check_same_length(self, other)
        return Shard.of((*self.ranges, *other.ranges), self.length)

    def locate(self, part: Shard) -> tuple[Range, ...]:
        """Return where the positions of `part` are in a local array of this shard, as ranges in rising order.

        Raises
        ------
        ArgumentError
            `part` has positions that this shard has not.
        """
        if (self & part) != part:
            raise ArgumentError(message("part", "positions that the shard holds", shown(part)))
        starts, lens = [start for start, _ in self.ranges], [stop - start for start, stop in self.ranges]
        firsts = [*accumulate(lens, initial=0)]
        ranges = []
        for start, stop in part.ranges:
            i = bisect_right(starts, start) - 1
            first = firsts[i] + start - starts[i]
            ranges.append((first, first + stop - start))
        return Shard(tuple(ranges), len(self)).ranges


def balanced_shards(
    mask: Mask | None, length: int, ranks: int, chunk: int = 128, *, key_len: int | None = None, batch: int = 1
) -> tuple[Shard, ...]:
    """Divide queries among ranks so that each has as many unmasked pairs and as many rows as the others.

    Chunks of queries are dealt out by their number of unmasked pairs, largest first, to the rank with the fewest so
    far; no rank gets more chunks than its share, so that arrays have about the same size everywhere.

    Parameters
    ----------
    mask : Mask, optional
        Mask of the whole sequence; None: every query attends every key.
    length, ranks : int
    chunk : int
        Queries that stay together; the last chunk may be shorter.
    key_len : int, optional
        Number of keys; None: as `length`.
    batch : int

    Returns
    -------
    tuple of Shard, one a rank

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.parallel import balanced_shards
    >>> [shard.ranges for shard in balanced_shards(ats.Causal(), 1024, 2)]
    [((0, 128), (384, 640), (896, 1024)), ((128, 384), (640, 896))]
    """
    starts, loads = _chunks(mask, length, ranks, chunk, key_len, batch)
    owner = assign_to_least_loaded(loads, ranks)
    ranges = [(start, min(start + chunk, length)) for start in starts.tolist()]
    return tuple(Shard(tuple(ranges[i] for i in np.flatnonzero(owner == rank)), length) for rank in range(ranks))


def consecutive_shards(
    mask: Mask | None, length: int, ranks: int, chunk: int = 128, *, key_len: int | None = None, batch: int = 1
) -> tuple[Shard, ...]:
    """Divide queries among ranks into consecutive parts, of any lengths, with about as many unmasked pairs each.

    For packed sequences and windows: with keys divided alike, a rank has almost all keys that its queries attend.

    Parameters
    ----------
    mask, length, ranks, chunk, key_len, batch
        As in `balanced_shards`.

    Returns
    -------
    tuple of Shard, one a rank

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.parallel import consecutive_shards
    >>> [shard.ranges for shard in consecutive_shards(ats.Packed([0, 512, 2048]).causal(), 2048, 2)]
    [((0, 1536),), ((1536, 2048),)]
    """
    starts, loads = _chunks(mask, length, ranks, chunk, key_len, batch)
    edges = [*np.append(starts, length)[balanced_boundaries(loads, ranks)].tolist()]
    return tuple(Shard((pair,), length) for pair in pairwise(edges))


def check_shards(name: str, shards: Any, ranks: int | None = None) -> tuple[Shard, ...]:
    """Return the shards of all ranks; raise ArgumentError unless there is one for each of `ranks` (None: any)."""
    all_shards = tuple(shards) if isinstance(shards, Iterable) else ()
    if not all_shards or not all(isinstance(shard, Shard) for shard in all_shards):
        raise ArgumentError(message(name, "a Shard of each rank", shown(shards)))
    if ranks not in (None, len(all_shards)):
        raise ArgumentError(message(name, f"one shard for each of {ranks} ranks", len(all_shards)))
    return all_shards


def check_positions(x: Array, count: int, axis: int) -> None:
    """Raise ShapeError unless an axis of `x` has `count` positions."""
    if not -len(x.shape) <= axis < len(x.shape) or x.shape[axis] != count:
        raise ShapeError(message("x", f"{count} positions on axis {axis}", f"shape {tuple(x.shape)}"))


def balanced_boundaries(loads: HostArray, ranks: int) -> HostArray:
    """Return the boundaries between consecutive parts of the loads, of about the same sum, (ranks + 1,)."""
    sums = np.append(0, np.cumsum(loads if loads.any() else np.ones_like(loads)))
    targets = sums[-1] * np.arange(1, ranks) / ranks
    after = np.clip(np.searchsorted(sums, targets), 1, None)
    # The edge before, where it is nearer.
    edges = np.minimum(after - (targets - sums[after - 1] < sums[np.minimum(after, len(loads))] - targets), len(loads))
    return np.concatenate([[0], edges, [len(loads)]]).astype(np.int64)


def assign_to_least_loaded(loads: HostArray, ranks: int) -> HostArray:
    """Return the rank that gets each of the loads: the largest first, to the rank with the least so far.

    No rank gets more loads than an equal share, rounded up.
    """
    share = -(-len(loads) // ranks)
    # Ranks by their load so far, then by the number of their loads, then by rank.
    heap = [(0, 0, rank) for rank in range(ranks)]
    owner = np.empty(len(loads), np.int64)
    for i in np.argsort(-loads, kind="stable").tolist():
        load, count, rank = heapq.heappop(heap)
        owner[i] = rank
        if count + 1 < share:
            heapq.heappush(heap, (load + int(loads[i]), count + 1, rank))
    return owner


def _chunks(
    mask: Mask | None, length: int, ranks: int, chunk: int, key_len: int | None, batch: int
) -> tuple[HostArray, HostArray]:
    """Return where chunks of queries begin, and their unmasked pairs."""
    _check_rank(length, 0, ranks)
    if check_count("chunk", chunk) < 1:
        raise ArgumentError(message("chunk", "a whole number of queries, 1 or more", chunk))
    keys = length if key_len is None else check_count("key_len", key_len)
    if mask is not None:
        check_batch(mask, length, keys, batch)
        mask = mask.for_call(backends.load("numpy"), ScoreShape((batch,), 1, 1, length, keys, has_heads=False))
    strips = Pairs(mask, length, keys, batch).strips(Shard.whole(length).positions())
    pairs = np.concatenate([np.zeros(0, np.int64), *(strip.counts for strip in strips)])
    starts = np.arange(0, length, chunk)
    return starts, np.add.reduceat(pairs, starts) if length else pairs


def _edge(length: int, part: int, parts: int) -> int:
    """Return where a part begins; the first parts are longer by 1 where they do not divide the length."""
    return length // parts * part + min(part, length % parts)


def _check_rank(length: Any, rank: Any, ranks: Any) -> None:
    check_count("length", length)
    if check_count("ranks", ranks) < 1:
        raise ArgumentError(message("ranks", "1 or more", ranks))
    if check_count("rank", rank) >= ranks:
        raise ArgumentError(message("rank", f"a number below ranks = {ranks}", rank))


def _check_same_length(first: Shard, second: Shard) -> None:
    if first.length != second.length:
        raise ArgumentError(message("shards", "parts of one sequence", f"lengths {first.length} and {second.length}"))
