"""The cost of a call over several ranks: bytes sent, pairs and memory per rank, and the mode with the fewest bytes.

- ``gather``: a rank fetches the keys and values that its queries attend. Backward, the gradients of keys and values
  return to their owners (``reduce``), or the queries go to the owners of the keys, which sum (``queries``).
- ``ring``: all keys and values pass by every rank, one rank's share at a time; backward with their gradients.
- ``heads``: each rank gets all positions of some heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from attnscore.backends.base import DTYPES, Array, accumulator, itemsize
from attnscore.base.arguments import check_choice, check_count
from attnscore.errors import ArgumentError, message
from attnscore.masks import Mask
from attnscore.masks.intervals import HostArray
from attnscore.parallel.plan import Exchange, exchange
from attnscore.parallel.shard import Shard
from attnscore.problem.problem import Problem

MODES: Final = ("gather", "ring", "heads")
GRADIENTS: Final = ("none", "reduce", "queries")


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one position, over all batch rows and heads."""

    query: int
    out: int
    key: int
    """Of key and value together."""
    key_gradient: int
    """As `key`, in the dtype of sums."""
    row: int
    """Of the numbers that are passed with a query, in the dtype of sums: row_max, log_denom, delta; two of entropy."""
    heads: int
    kv_heads: int

    @classmethod
    def of(
        cls, dim: int, *, key_dim: int | None = None, value_dim: int | None = None, heads: int = 1,
        kv_heads: int | None = None, batch: int = 1, dtype: str = "float32",
    ) -> RowBytes:  # fmt: skip
        """Return the bytes of arrays of these sizes; None takes the size of the argument before."""
        key_dim = dim if key_dim is None else key_dim
        value_dim = dim if value_dim is None else value_dim
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"dim": dim, "key_dim": key_dim, "value_dim": value_dim, "heads": heads, "kv_heads": kv_heads}
        for name, size in (sizes | {"batch": batch}).items():
            check_count(name, size)
        if kv_heads and heads % kv_heads:
            raise ArgumentError(message("kv_heads", f"a number that divides heads = {heads}", kv_heads))
        own, sums = itemsize(dtype), itemsize(accumulator(dtype))
        kv = batch * kv_heads * (key_dim + value_dim)
        queries = batch * heads
        row = 3 * queries * sums
        return cls(queries * dim * own, queries * value_dim * own, kv * own, kv * sums, row, heads, kv_heads)

    @classmethod
    def of_problem(cls, problem: Problem) -> RowBytes:
        """Return the bytes of the arrays of a call that are moved."""
        form, ops, shape = problem.form, problem.ops, problem.score_shape
        sums = itemsize(problem.accumulator)

        def size(x: Array, width: int | None = None) -> int:
            numbers: int = math.prod(x.shape[:-2]) * x.shape[-1]
            return numbers * (width or itemsize(ops.dtype(x)))

        by_role = {r: [x for name, x in form.arrays().items() if form.role(name) == r] for r in ("query", "key")}
        key = [*by_role["key"], problem.value]
        rows = math.prod(shape.rows[:-1])
        return cls(
            query=sum(map(size, by_role["query"])),
            out=rows * problem.layout.value_dim * itemsize(problem.dtype),
            key=sum(map(size, key)),
            key_gradient=sum(size(x, sums) for x in key),
            row=(5 if "entropy" in problem.statistics else 3) * rows * sums,
            heads=shape.heads * shape.groups,
            kv_heads=shape.heads,
        )


@dataclass(frozen=True, eq=False)
class Counts:
    """Positions of every rank, (ranks,) int64 each."""

    queries: HostArray
    keys: HostArray
    needed: HostArray
    sent: HostArray
    """Keys, to each rank that needs them."""
    received: HostArray
    blocks: HostArray
    """As `needed`, where queries are passed: in whole blocks, as are all counts from here on."""
    sent_blocks: HostArray
    passed: HostArray
    """Queries, to each owner of keys that they attend."""
    gathered: HostArray
    """Queries that attend keys of the rank, its own too."""

    @classmethod
    def of(cls, plan: Exchange, *, passed: bool) -> Counts:
        """Return the counts of a plan; without `passed` those of passed queries, which take longest, are 0."""
        ranks = range(plan.ranks)
        queries, keys, needed = (
            np.array([len(shard) for shard in shards]) for shards in (plan.queries, plan.keys, plan.needed)
        )
        sent, received = (np.array([count(rank) for rank in ranks]) for count in (plan.sent, plan.received))
        none = np.zeros_like(keys)
        if not passed:
            return cls(queries, keys, needed, sent, received, none, none, none, none)
        return cls(
            queries, keys, needed, sent, received,
            blocks=np.array([len(shard) for shard in plan.needed_blocks]),
            sent_blocks=_sent(plan.keys, plan.needed_blocks),
            passed=_sent(plan.queries, plan.passed),
            gathered=np.array([len(shard) for shard in plan.passed]),
        )  # fmt: skip


def _sent(held: Sequence[Shard], wanted: Sequence[Shard]) -> HostArray:
    """Return how many positions each rank sends to others that want them."""
    return np.array([sum(len(own & other) for other in wanted) - len(own & wanted[i]) for i, own in enumerate(held)])


# ---- bytes that each rank sends


def forward_bytes(counts: Counts, size: RowBytes, mode: str, gradient: str = "reduce") -> HostArray:
    """Return the bytes that each rank sends in a forward."""
    ranks, queries, keys = len(counts.keys), counts.queries, counts.keys
    found: HostArray
    if mode == "gather":
        found = (counts.sent_blocks if gradient == "queries" else counts.sent) * size.key
    elif mode == "ring":
        # Everything passes by but the share of the next rank, which ends its way here.
        found = (keys.sum() - np.roll(keys, -1)) * size.key
    else:
        found = queries * size.query * (ranks - 1) // ranks + keys * size.key * (ranks - 1) // ranks
        found = found + (queries.sum() - queries) * size.out // ranks
    return found


def backward_bytes(counts: Counts, size: RowBytes, mode: str, gradient: str) -> HostArray:
    """Return the bytes that each rank sends in a backward."""
    ranks, queries, keys = len(counts.keys), counts.queries, counts.keys
    found: HostArray
    if gradient == "none" or ranks == 1:
        found = 0 * keys
    elif mode == "gather" and gradient == "queries":
        found = counts.passed * (size.query + size.out + size.row)
    elif mode == "gather":
        found = counts.received * size.key_gradient
    elif mode == "ring":
        # The gradients of the rank's own keys are summed by the others, and end here.
        found = forward_bytes(counts, size, mode) + (keys.sum() - keys) * size.key_gradient
    else:
        found = queries * size.out * (ranks - 1) // ranks + (queries.sum() - queries) * size.query // ranks
        found = found + (keys.sum() - keys) * size.key // ranks
    return found


def peak_memory(counts: Counts, size: RowBytes, mode: str, gradient: str) -> HostArray:
    """Return the bytes of each rank's arrays and of what its mode adds: buffers of the exchange and gradients."""
    queries, keys = counts.queries, counts.keys
    own = queries * (size.query + size.out) + keys * size.key
    found: HostArray = own if gradient == "none" else 2 * own
    row = size.key + (0 if gradient == "none" else size.key_gradient)
    if mode == "gather" and gradient == "queries":
        found = found + counts.blocks * size.key + counts.gathered * (size.query + size.out + size.row)
    elif mode == "gather":
        found = found + np.where(counts.received > 0, counts.needed, 0) * row
    elif mode == "ring":
        found = found + 2 * keys.max() * row
    else:
        by_heads = (queries.sum() * (size.query + size.out) + keys.sum() * size.key) // len(keys)
        found = found + by_heads * (1 if gradient == "none" else 2)
    return found


# ---- the choice


@dataclass(frozen=True)
class ParallelExplanation:
    """The plan of a call over several ranks. Prints as a table.

    Attributes
    ----------
    mode, gradient : str
    reasons : dict
        Why each other mode was not chosen.
    mask : str
    exchange : Exchange
        Who holds and needs what, and the unmasked pairs of each rank.
    forward_bytes, backward_bytes, peak_memory : tuple of int, one a rank
        Bytes sent, and those of the rank's arrays, buffers and gradients.
    """

    mode: str
    gradient: str
    reasons: dict[str, str]
    mask: str
    exchange: Exchange
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    peak_memory: tuple[int, ...]

    @property
    def pairs(self) -> tuple[int, ...]:
        """Unmasked pairs of each rank, summed over the batch, for one head."""
        pairs = self.exchange.pairs
        # By heads, every rank has all queries.
        return (-(-sum(pairs) // len(pairs)),) * len(pairs) if self.mode == "heads" else pairs

    @property
    def imbalance(self) -> float:
        """By how much the most pairs of a rank exceed the mean."""
        return 0.0 if self.mode == "heads" else self.exchange.imbalance

    def __str__(self) -> str:
        rows = [len(shard) for shard in self.exchange.queries]
        backward = "" if self.gradient == "none" else f" forward, {max(self.backward_bytes):,} backward"
        table = [
            ("mode", self.mode),
            *((f"not {name}", reason) for name, reason in self.reasons.items()),
            *((("gradient", self.gradient),) if self.gradient != "none" else ()),
            ("mask", self.mask),
            ("ranks", f"{len(rows)}, with {min(rows):,} to {max(rows):,} queries each"),
            ("pairs", f"{max(self.pairs):,} at most, {self.imbalance:.1%} above the mean"),
            ("bytes sent", f"{max(self.forward_bytes):,}{backward}, by the rank that sends most"),
            ("peak memory", f"{max(self.peak_memory):,} bytes, on the rank that needs most"),
        ]
        return "\n".join(f"{name:<15} {text}" for name, text in table)


def explain(
    mask: Mask | None,
    queries: Sequence[Shard],
    keys: Sequence[Shard] | None = None,
    *,
    dim: int,
    key_dim: int | None = None,
    value_dim: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    mode: str = "auto",
    gradient: str = "auto",
    memory: int | None = None,
) -> ParallelExplanation:
    """Plan a call over several ranks from shapes alone: bytes sent, pairs and memory of each rank.

    Parameters
    ----------
    mask : Mask, optional
        Of the whole sequence.
    queries, keys : Shard of each rank
        What the ranks hold. `keys` None: as `queries`.
    dim, key_dim, value_dim, heads, kv_heads, batch : int
        None: `key_dim` and `value_dim` as `dim`, `kv_heads` as `heads`.
    dtype : str
    mode : "auto", "gather", "ring" or "heads"
        "auto" takes the mode in which the busiest rank sends the fewest bytes, of those that fit into `memory`.
    gradient : "auto", "reduce", "queries" or "none"
        How gradients of keys and values are summed. "auto" passes the queries where that sends fewer than half of the
        bytes in the backward, as it computes the scores again; or where only that fits into `memory`. "none": there
        is no backward.
    memory : int, optional
        Bytes that a rank has for its arrays and the exchange; None is unbounded.

    Returns
    -------
    ParallelExplanation

    Raises
    ------
    ArgumentError
        Shards that do not hold each position once, sizes that do not fit, or a mode that cannot run.

    Examples
    --------
    >>> import attnscore as ats
    >>> from attnscore.parallel import Shard, explain
    >>> shards = [Shard.contiguous(2**20, rank, 4) for rank in range(4)]
    >>> print(explain(ats.SlidingWindow(left=4095, right=0), shards, dim=64, heads=8, gradient="none"))
    mode            gather
    not ring        192.0 times as many bytes
    not heads       96.0 times as many bytes
    mask            SlidingWindow(left=4095, right=0)
    ranks           4, with 262,144 to 262,144 queries each
    pairs           1,073,741,824 at most, 0.2% above the mean
    bytes sent      16,773,120, by the rank that sends most
    peak memory     3,237,998,592 bytes, on the rank that needs most
    """
    check_choice("mode", mode, ("auto", *MODES))
    check_choice("gradient", gradient, ("auto", *GRADIENTS))
    check_choice("dtype", dtype, [*DTYPES])
    size = RowBytes.of(
        dim, key_dim=key_dim, value_dim=value_dim, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype
    )
    plan = exchange(mask, queries, queries if keys is None else keys, batch=batch)
    return choose(plan, size, mode=mode, gradient=gradient, memory=memory, mask="none" if mask is None else repr(mask))


def choose(
    plan: Exchange, size: RowBytes, *, mode: str = "auto", gradient: str = "auto", memory: int | None = None, mask: str,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> ParallelExplanation:  # fmt: skip
    """Return the explanation of the mode that the caller named, or of the best one, for a plan.

    `refused` has the reasons against modes that cannot run the call.
    """
    if memory is not None:
        check_count("memory", memory)
    counts = Counts.of(plan, passed=gradient in ("auto", "queries"))
    reasons = {**refused}
    if plan.ranks > 1 and (size.heads % plan.ranks or size.kv_heads % plan.ranks):
        reasons["heads"] = f"{plan.ranks} ranks do not divide {size.heads} heads and {size.kv_heads} KV heads"
    if mode in reasons:
        raise ArgumentError(message("mode", "one that can run this call", f"{mode!r}: {reasons[mode]}"))
    if gradient == "queries":
        if mode in ("ring", "heads"):
            raise ArgumentError(message("gradient", f"'auto' or 'reduce' with mode={mode!r}", "'queries'"))
        reasons = {"ring": "it passes no queries", "heads": "it passes no queries", **reasons}
    modes = [name for name in MODES if name not in reasons]
    possible = {name: _explained(plan, counts, size, name, gradient, memory, mask) for name in modes}
    fitting = [name for name, x in possible.items() if memory is None or max(x.peak_memory) <= memory]
    if mode != "auto":
        best = possible[mode]
    elif fitting:
        best = min((possible[name] for name in fitting), key=_most_sent)
    else:
        best = min(possible.values(), key=lambda x: max(x.peak_memory))
    for name, other in possible.items():
        if name == best.mode:
            continue
        sent, least = _most_sent(other), _most_sent(best)
        reasons[name] = f"{sent / least:.1f} times as many bytes" if least else f"{sent:,} bytes, where this sends none"
        if memory is not None and name not in fitting:
            reasons[name] = f"{max(other.peak_memory):,} bytes of memory"
    return replace(best, reasons={name: reasons[name] for name in MODES if name in reasons})


def _explained(
    plan: Exchange, counts: Counts, size: RowBytes, mode: str, gradient: str, memory: int | None, mask: str
) -> ParallelExplanation:
    """Return the explanation of one mode, with the better gradient where that is "auto"."""

    def explained(way: str) -> ParallelExplanation:
        numbers = (f(counts, size, mode, way).tolist() for f in (forward_bytes, backward_bytes, peak_memory))
        return ParallelExplanation(mode, way, {}, mask, plan, *map(tuple, numbers))

    if mode != "gather" and gradient != "none":
        # The other modes have one way each, in which gradients go to the owners of the keys.
        return explained("reduce")
    if gradient != "auto":
        return explained(gradient)
    reduce, queries = explained("reduce"), explained("queries")
    # Passed queries compute the scores a second time, and in small blocks: fewer bytes alone are no gain.
    is_less = 2 * max(queries.backward_bytes) < max(reduce.backward_bytes) and _most_sent(queries) < _most_sent(reduce)
    fits = [memory is None or max(x.peak_memory) <= memory for x in (reduce, queries)]
    return queries if fits == [False, True] or (is_less and fits[1]) else reduce


def _most_sent(x: ParallelExplanation) -> int:
    return max(map(sum, zip(x.forward_bytes, x.backward_bytes, strict=True)))
