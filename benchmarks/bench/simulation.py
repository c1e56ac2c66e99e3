"""A model of the time, the bytes and the memory of attention over many ranks, for lengths that no test can run.

- The mask is sampled: the sequence is cut into cells, and the intervals of one query stand for its cell. Keys to fetch
  are the keys of the first and the last query of a cell.
- Bytes and memory follow the formulas of `explain`. A message takes ``latency + bytes / bandwidth``; a rank sends and
  receives at once, and its sends take at least as long as its receives.
- Pairs take the operations of the score and of the pooling; a backward 2.5 times as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from attnscore.base.arguments import check_choice
from attnscore.errors import ArgumentError, message
from attnscore.masks import Mask
from attnscore.masks.intervals import HostArray, IntervalSet
from attnscore.parallel.explanation import RowBytes, bytes_sent, peak_memory
from attnscore.parallel.schedule import MODES, Counts, Phase, Step, schedule, sent
from attnscore.parallel.shard import Shard, assign_to_least_loaded, balanced_boundaries

DIVISIONS: Final = ("contiguous", "head_tail", "consecutive", "balanced")
# Products of a backward for each product of a forward: five for two.
_BACKWARD = 2.5
# Cells of the sequence: at least as many for each rank, and in all.
_CELLS_PER_RANK, _CELLS = 64, 2**14


@dataclass(frozen=True)
class Machine:
    """The rates of one rank."""

    flops: float
    """Operations a second in attention."""
    bandwidth: float
    """Bytes a second that a rank sends, and receives at the same time."""
    latency: float = 0.0
    """Seconds of a message, apart from its bytes."""
    overlap: bool = True
    """Whether messages travel while the rank computes."""
    overhead: float = 0.0
    """Seconds of a call apart from its pairs and messages: planning, checks, launches."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """The predicted cost of one call."""

    mode: str
    seconds: float
    """Time until the last rank is done."""
    compute: HostArray
    """Seconds that each rank computes."""
    bytes_sent: HostArray
    """Bytes that each rank sends."""
    peak_memory: HostArray
    """Bytes of each rank."""

    @property
    def efficiency(self) -> float:
        """Mean computing time of the ranks as a part of `seconds`; 0.0 where `seconds` is 0."""
        return float(self.compute.mean()) / self.seconds if self.seconds else 0.0


def simulate(
    mask: Mask | None,
    length: int,
    ranks: int,
    machine: Machine,
    *,
    dim: int,
    key_dim: int | None = None,
    value_dim: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    mode: str = "gather",
    gradient: bool = False,
    queries: str | None = None,
    keys: str | None = None,
    operations_per_pair: float | None = None,
) -> Simulation:
    """Predict time, bytes and memory of self-attention of one sequence over many ranks.

    Sizes and dtype are those of `explain`; the other arguments are:

    - mask: that of the whole sequence, with intervals for each query: causal, windows, `Packed` and combinations
    - mode: "gather", "ring" or "heads"
    - gradient: whether a backward follows the forward; in the mode "gather" by "reduce"
    - queries, keys: shards of the ranks, by `Shard.contiguous`, `Shard.head_tail`, `consecutive_shards` or, for
      queries, `balanced_shards`. None: balanced queries and contiguous keys for "gather", "head_tail" for "ring", and
      "contiguous" for "heads"
    - operations_per_pair: in one head; None: ``2 * (dim + value_dim) + 4``, for a dot product, the softmax and the
      pooling

    A mask without intervals and a number of ranks that does not divide the heads are ArgumentErrors.

    >>> import attnscore as ats
    >>> from bench.simulation import Machine, simulate
    >>> gpu = Machine(flops=4e14, bandwidth=5e10, latency=2e-5)
    >>> found = simulate(ats.Causal(), 2**24, 128, gpu, dim=128, heads=32, kv_heads=8, dtype="bfloat16")
    >>> print(f"{found.seconds:.4g} s, efficiency {found.efficiency:.0%}")
    46.75 s, efficiency 97%
    """
    check_choice("mode", mode, MODES)
    size = RowBytes.of(
        dim, key_dim=key_dim, value_dim=value_dim, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype
    )
    if mode == "heads" and (size.heads % ranks or size.kv_heads % ranks):
        expected = f"a number that divides {size.heads} heads and {size.kv_heads} KV heads with mode='heads'"
        raise ArgumentError(message("ranks", expected, ranks))
    by_default = {"gather": ("balanced", "contiguous"), "ring": ("head_tail",) * 2, "heads": ("contiguous",) * 2}[mode]
    queries, keys = (
        default if given is None else given for given, default in zip((queries, keys), by_default, strict=True)
    )
    check_choice("queries", queries, DIVISIONS)
    check_choice("keys", keys, DIVISIONS[:3])
    if operations_per_pair is None:
        operations_per_pair = 2 * (dim + (dim if value_dim is None else value_dim)) + 4
    grid = _Grid(mask, length, ranks, batch, queries, keys)
    per_pair = operations_per_pair * heads / machine.flops
    compute = grid.loads * per_pair
    if mode == "heads":
        compute = np.full(ranks, compute.mean())
    phases = schedule(grid.counts, mode, "reduce" if gradient else "none")
    times = _Times(machine, grid, size, compute, per_pair)
    return Simulation(
        mode=mode,
        seconds=float(machine.overhead + (times.ring(gradient) if mode == "ring" else times.of(phases, mode))),
        compute=compute * (1 + _BACKWARD if gradient else 1),
        bytes_sent=np.sum([bytes_sent(phase, size) for phase in phases], 0),
        peak_memory=peak_memory(phases, grid.counts, size),
    )


# ---- the mask, sampled


@dataclass(frozen=True, eq=False)
class _Grid:
    """A sequence cut into cells, which ranks own; positions and pairs are counted by cells."""

    mask: Mask | None
    length: int
    ranks: int
    batch: int
    queries: str
    keys: str

    @cached_property
    def edges(self) -> HostArray:
        """Where cells begin and end, (cells + 1,)."""
        cells = min(self.length, max(_CELLS_PER_RANK * self.ranks, _CELLS))
        return np.arange(cells + 1) * self.length // cells

    @property
    def sizes(self) -> HostArray:
        """Positions of each cell."""
        return np.diff(self.edges)

    def intervals(self, rows: HostArray) -> IntervalSet:
        """Return the intervals of some queries."""
        if self.mask is None:
            zero = np.zeros((1, 1, len(rows)), np.int64)
            return IntervalSet(zero, zero + self.length)
        found = self.mask.interval_set_at(rows, self.length, self.length, self.batch)
        if found is None:
            raise ArgumentError(message("mask", "one with intervals for each query", repr(self.mask)))
        return found

    @cached_property
    def middle(self) -> IntervalSet:
        """The intervals of the query in the middle of each cell."""
        return self.intervals((self.edges[:-1] + self.edges[1:]) // 2)

    @cached_property
    def pairs(self) -> HostArray:
        """Unmasked pairs of the queries of each cell, over the batch."""
        lens = (self.middle.stop - self.middle.start).sum(0)
        found: HostArray = lens.mean(0) * self.batch * self.sizes
        return found

    @cached_property
    def query_owner(self) -> HostArray:
        """The rank that holds the queries of each cell."""
        return (
            assign_to_least_loaded(self.pairs.astype(np.int64), self.ranks)
            if self.queries == "balanced"
            else self._owner(self.queries)
        )

    @cached_property
    def key_owner(self) -> HostArray:
        """The rank that holds the keys of each cell."""
        return self._owner(self.keys)

    def _owner(self, division: str) -> HostArray:
        owner = np.empty(len(self.sizes), np.int64)
        if division == "consecutive":
            return np.repeat(np.arange(self.ranks), np.diff(balanced_boundaries(self.pairs, self.ranks)))
        make = Shard.contiguous if division == "contiguous" else Shard.head_tail
        for rank in range(self.ranks):
            for start, stop in make(len(owner), rank, self.ranks).ranges:
                owner[start:stop] = rank
        return owner

    @cached_property
    def loads(self) -> HostArray:
        """Unmasked pairs of each rank."""
        return np.bincount(self.query_owner, self.pairs, self.ranks)

    @cached_property
    def transfers(self) -> HostArray:
        """Keys that a rank holds and another needs, (source, target)."""
        ends = [self.intervals(rows) for rows in (self.edges[:-1], self.edges[1:] - 1)]
        cells = len(self.sizes)
        found = np.zeros((self.ranks, self.ranks), np.int64)
        # The first cell with a key of the interval, and the cell after the last one; of all cells of a rank together.
        spans = [(np.searchsorted(self.edges, x.start, "right") - 1, np.searchsorted(self.edges, x.stop)) for x in ends]
        if all(x.count == 1 for x in ends):
            # From the first query of a cell to its last, the ends of one interval pass over all keys between.
            (start, stop), (other_start, other_stop) = spans
            nonempty = [x.stop > x.start for x in ends]
            start = np.minimum(np.where(nonempty[0], start, cells), np.where(nonempty[1], other_start, cells))
            stop = np.maximum(np.where(nonempty[0], stop, 0), np.where(nonempty[1], other_stop, 0))
            spans = [(start, stop)]
        for target in range(self.ranks):
            own = self.query_owner == target
            steps = np.zeros(cells + 1, np.int64)
            for start, stop in spans:
                first, last = start[..., own].reshape(-1), stop[..., own].reshape(-1)
                first, last = first[first < last], last[first < last]
                np.add.at(steps, first, 1)
                np.add.at(steps, last, -1)
            needed = np.cumsum(steps)[:-1] > 0
            found[:, target] = np.bincount(self.key_owner[needed], self.sizes[needed], self.ranks)
        return found

    @cached_property
    def counts(self) -> Counts:
        """Positions of every rank."""
        queries, keys = (
            np.bincount(owner, self.sizes, self.ranks).astype(np.int64) for owner in (self.query_owner, self.key_owner)
        )
        return Counts(queries, keys, self.transfers)

    @cached_property
    def _runs(self) -> tuple[HostArray, HostArray]:
        """Runs of cells with one owner of the keys: the owner, and where in the sequence they begin, and the end."""
        begins = np.flatnonzero(np.diff(self.key_owner, prepend=-1))
        return self.key_owner[begins], np.append(self.edges[begins], self.length)

    def pairs_of(self, target: int, source: int | None = None) -> HostArray:
        """Return the unmasked pairs of a rank's queries with the keys of each rank, or of one, (ranks,)."""
        own = self.query_owner == target
        owner, bounds = self._runs
        runs = np.arange(len(owner)) if source is None else np.flatnonzero(owner == source)
        found = np.zeros(len(runs))
        for start, stop in zip(self.middle.start[..., own], self.middle.stop[..., own], strict=True):
            overlap = np.minimum(stop[..., None], bounds[runs + 1]) - np.maximum(start[..., None], bounds[runs])
            found += (np.maximum(overlap, 0).mean(0) * self.sizes[own, None]).sum(0)
        return np.bincount(owner[runs], found * self.batch, self.ranks)


# ---- time


@dataclass(frozen=True, eq=False)
class _Times:
    """When the last rank is done."""

    machine: Machine
    grid: _Grid
    size: RowBytes
    compute: HostArray
    """Seconds of each rank in a forward."""
    per_pair: float

    def messages(self, count: HostArray | int, sent: HostArray, received: HostArray) -> HostArray:
        """Return the seconds of messages that are under way at the same time."""
        found: HostArray = count * self.machine.latency + np.maximum(sent, received) / self.machine.bandwidth
        return found

    def of(self, phases: Sequence[Phase], mode: str) -> float:
        """Return the seconds of messages before, kernels, and messages after, phase by phase.

        The keys that a forward gathers come while those at hand are computed with.
        """
        seconds: HostArray = 0 * self.compute
        for phase, compute in zip(phases, (self.compute, _BACKWARD * self.compute), strict=False):
            before, after = (self._exchange(steps, phase.share) for steps in (phase.before, phase.after))
            own: HostArray = 0 * compute
            if mode == "gather" and self.machine.overlap and phase.before:
                own = np.sum([self.grid.pairs_of(rank, rank) for rank in range(self.grid.ranks)], 0) * self.per_pair
            seconds = seconds + np.maximum(before, own) + compute - own + after
        return float(seconds.max())

    def _exchange(self, steps: Sequence[Step], share: int) -> HostArray:
        """Return the seconds of each rank's messages of steps at one time."""
        count = totals = 0 * self.compute
        received = totals
        for step in steps:
            bytes_of_row = self.size.total(step.arrays) / share
            totals = totals + sent(step.rows) * bytes_of_row
            received = received + sent(step.rows.T) * bytes_of_row
            others = (step.rows > 0) & ~np.eye(self.grid.ranks, dtype=bool)
            count = np.maximum(count, np.maximum(others.sum(0), others.sum(1)))
        return self.messages(count, totals, received)

    def ring(self, gradient: bool) -> float:
        """Compute with a block of keys while the next one comes; gradients travel with their block."""
        pairs = np.stack([self.grid.pairs_of(rank) for rank in range(self.grid.ranks)]) * self.per_pair
        seconds = self._round(pairs, 0)
        return seconds + self._round(_BACKWARD * pairs, self.size.key_gradient) if gradient else seconds

    def _round(self, pairs: HostArray, gradient: int) -> float:
        """Return the seconds of one way round the ring; `pairs`: seconds of each rank's queries with each rank's keys.

        Gradients, of `gradient` bytes a key, begin at the rank after the owner, and the last rank returns them to it.
        """
        ranks, keys = self.grid.ranks, self.grid.counts.keys
        order = np.arange(ranks)
        arrived, done, before = np.zeros(ranks), pairs[order, order], np.zeros(ranks)
        for step in range(1, ranks):
            block = (order - step) % ranks
            row = self.size.key + (gradient if step > 1 else 0)
            link = self.messages(1, keys[block] * row, np.zeros(1))
            # The rank before has the block, and the buffer of two steps ago is free.
            ready = np.maximum(np.roll(arrived, 1), before if self.machine.overlap else done)
            arrived = ready + link
            before, done = done, np.maximum(arrived, done) + pairs[order, block]
        last = self.messages(1, keys * gradient, np.zeros(1)) if gradient and ranks > 1 else np.zeros(1)
        return float((done + last).max())
