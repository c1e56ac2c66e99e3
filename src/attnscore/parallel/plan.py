"""The exchange of one call of attention: the keys that each rank's queries attend, and the ranks that hold them.

The plan follows from the mask and the shards alone, so every rank computes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from attnscore.base.arguments import shown
from attnscore.base.cache import BoundedCache
from attnscore.errors import ArgumentError, message
from attnscore.masks import Mask
from attnscore.masks.cached import arguments_signature
from attnscore.masks.intervals import HostArray
from attnscore.parallel.pairs import Pairs, Range, check_batch
from attnscore.parallel.shard import Shard, check_shards

# Blocks in which the native kernel sums in one order, whatever the number of queries and keys of the call. Where
# queries are passed, the ranks exchange whole blocks of keys in the forward and of queries in the backward.
FORWARD_KEYS, BACKWARD_KEYS, BACKWARD_QUERIES = 1024, 128, 384


@dataclass(frozen=True)
class Movement:
    """The rows of an array that each rank holds, and the rows that it needs."""

    held: tuple[Shard, ...]
    needed: tuple[Shard, ...]
    by_heads: bool = False
    """Whether a rank needs the rows of its share of the heads alone."""

    def rows(self, source: int, target: int) -> Shard:
        """Return the rows that `source` holds and `target` needs, also where both are the same rank."""
        return self.held[source] & self.needed[target]

    @cached_property
    def counts(self) -> HostArray:
        """Number of rows that one rank holds and another needs, (source, target)."""
        ranks = range(len(self.held))
        return np.array([[len(self.rows(source, target)) for target in ranks] for source in ranks])


@dataclass(frozen=True)
class Exchange:
    """The queries and keys that each rank holds, and the keys that it needs.

    Attributes
    ----------
    queries, keys : tuple of Shard, one a rank
        Positions that the rank holds.
    needed : tuple of Shard, one a rank
        The keys that a rank's queries attend, in any batch row and head.
    pairs : tuple of int, one a rank
        Unmasked pairs of a rank's queries, summed over the batch, for one head.
    """

    queries: tuple[Shard, ...]
    keys: tuple[Shard, ...]
    needed: tuple[Shard, ...]
    pairs: tuple[int, ...]
    _mask_pairs: Pairs = field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.queries)

    def transfer(self, source: int, target: int) -> Shard:
        """Return the keys that `source` holds and `target` needs, also where both are the same rank."""
        return self.fetched.rows(source, target)

    def attending(self, target: int, source: int) -> Shard:
        """Return the queries of `target` that attend keys of `source`; the gradient "queries" sends them to `source`.

        They are found by the intervals of the mask: there may be a few too many, never too few.
        """
        return self.attending_keys(self.queries[target], self.transfer(source, target))

    def attending_keys(self, queries: Shard, keys: Shard) -> Shard:
        """Return the part of `queries` that attends any of `keys`, as `attending` does."""
        strips = self._mask_pairs.strips(queries.positions()) if len(keys) else ()
        return Shard.of((pair for strip in strips for pair in strip.attending(keys.ranges)), queries.length)

    def keys_of(self, queries: Shard) -> Shard:
        """Return the keys that any of these queries attends."""
        strips = self._mask_pairs.strips(queries.positions())
        return Shard.of((pair for strip in strips for pair in strip.keys), self.keys[0].length)

    @cached_property
    def fetched(self) -> Movement:
        """The keys that ranks fetch."""
        return Movement(self.keys, self.needed)

    @cached_property
    def fetched_blocks(self) -> Movement:
        """The keys that ranks fetch where queries are passed: `needed` in whole blocks."""
        return Movement(self.keys, tuple(in_blocks(shard, FORWARD_KEYS) for shard in self.needed))

    @cached_property
    def passed(self) -> Movement:
        """The queries that are passed to the owners of keys: all that attend the keys, in whole blocks."""
        ranks, length = range(self.ranks), self.queries[0].length
        ranges = [[pair for rank in ranks for pair in self.attending(rank, owner).ranges] for owner in ranks]
        needed = tuple(in_blocks(Shard.of(attending, length), BACKWARD_QUERIES) for attending in ranges)
        return Movement(self.queries, needed)

    def sent(self, rank: int) -> int:
        """Return how many keys a rank sends: a key that two other ranks need counts twice."""
        return int(self.fetched.counts[rank].sum() - self.fetched.counts[rank, rank])

    def received(self, rank: int) -> int:
        """Return how many keys of other ranks a rank needs."""
        return int(self.fetched.counts[:, rank].sum() - self.fetched.counts[rank, rank])

    @property
    def imbalance(self) -> float:
        """Largest number of pairs of a rank relative to the mean, minus 1; 0.0 without pairs."""
        total = sum(self.pairs)
        return max(self.pairs) * self.ranks / total - 1 if total else 0.0


def exchange(mask: Mask | None, queries: Sequence[Shard], keys: Sequence[Shard], *, batch: int = 1) -> Exchange:
    """Return the plan of a call under a mask of the whole sequence.

    Parameters
    ----------
    mask : Mask, optional
        In global positions. Arrays that the host cannot read, and custom masks without intervals, count as unmasked.
    queries, keys : Shard of each rank, in the order of ranks
        Each position belongs to one rank.
    batch : int

    Returns
    -------
    Exchange

    Raises
    ------
    ArgumentError
        Positions that no rank holds, or several ranks hold.

    Examples
    --------
    A causal window of 4 keys: each rank needs the last three keys of the one before.

    >>> import attnscore as ats
    >>> from attnscore.parallel import Shard, exchange
    >>> shards = [Shard.contiguous(32, rank, 4) for rank in range(4)]
    >>> plan = exchange(ats.SlidingWindow(left=3, right=0), shards, shards)
    >>> [shard.ranges for shard in plan.needed]
    [((0, 8),), ((5, 16),), ((13, 24),), ((21, 32),)]
    >>> plan.transfer(0, 1).ranges, plan.sent(0), plan.received(0)
    (((5, 8),), 3, 0)
    """
    queries = _complete("queries", queries)
    keys = _complete("keys", keys, len(queries))
    if mask is not None:
        check_batch(mask, queries[0].length, keys[0].length, batch)
    # The layers of a model share a mask. Masks with arrays, which may change, are counted anew.
    is_counted_anew = mask is not None and bool(mask.arrays())
    fields = None if is_counted_anew else arguments_signature(mask, None)
    cache_key = None if fields is None else (fields, queries, keys, batch)
    return _EXCHANGES.get_or_compute(cache_key, lambda: _exchange(mask, queries, keys, batch))


_EXCHANGES: BoundedCache[Exchange] = BoundedCache(64)


def _exchange(mask: Mask | None, queries: tuple[Shard, ...], keys: tuple[Shard, ...], batch: int) -> Exchange:
    """Return the plan of shards that hold each position once."""
    pairs = Pairs(mask, queries[0].length, keys[0].length, batch)
    needed, counts = [], []
    for shard in queries:
        ranges: list[Range] = []
        count = 0
        for strip in pairs.strips(shard.positions()):
            ranges += strip.keys
            count += int(strip.counts.sum())
        needed.append(Shard.of(ranges, pairs.key_len))
        counts.append(count)
    return Exchange(queries, keys, tuple(needed), tuple(counts), pairs)


def in_blocks(shard: Shard, size: int) -> Shard:
    """Return the blocks of `size` positions that overlap the shard."""
    ends = ((start // size * size, min(shard.length, -(-stop // size) * size)) for start, stop in shard.ranges)
    return Shard.of(ends, shard.length)


def _complete(name: str, shards: Sequence[Shard], ranks: int | None = None) -> tuple[Shard, ...]:
    """Return the shards of all ranks; raise ArgumentError unless each position of the sequence belongs to one."""
    shards = check_shards(name, shards, ranks)
    length = shards[0].length
    ranges = sorted(pair for shard in shards for pair in shard.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    if any(shard.length != length for shard in shards) or [*(start for start, _ in ranges), length] != ends:
        raise ArgumentError(message(name, "shards that hold each position once", shown([*shards])))
    return shards
