"""The cost of a call over several ranks: bytes sent, pairs and memory per rank, and the mode with the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from attnscore.backends.base import DTYPES, Array, accumulator, itemsize
from attnscore.base.arguments import check_choice, check_count
from attnscore.errors import ArgumentError, message
from attnscore.masks import Mask
from attnscore.masks.intervals import HostArray
from attnscore.parallel.plan import Exchange, exchange
from attnscore.parallel.schedule import GRADIENTS, MODES, Counts, Phase, schedule, sent
from attnscore.parallel.shard import Shard
from attnscore.problem.problem import Problem


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one position, over all batch rows and heads."""

    query: int
    out: int
    key: int
    """Key and value together."""
    key_gradient: int
    """Key and value in the dtype of sums."""
    row: int
    """What is passed with a query, in the dtype of sums: row_max, log_denom, delta, and two for the entropy."""
    heads: int
    kv_heads: int

    def total(self, arrays: Sequence[str]) -> int:
        """Return the bytes of a position of several arrays."""
        return sum(getattr(self, name) for name in arrays)

    @classmethod
    def of(
        cls, dim: int, *, key_dim: int | None = None, value_dim: int | None = None, heads: int = 1,
        kv_heads: int | None = None, batch: int = 1, dtype: str = "float32",
    ) -> RowBytes:  # fmt: skip
        """Return the bytes of arrays of such sizes; None: `key_dim` and `value_dim` as `dim`, `kv_heads` as `heads`."""
        key_dim = dim if key_dim is None else key_dim
        value_dim = dim if value_dim is None else value_dim
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"dim": dim, "key_dim": key_dim, "value_dim": value_dim, "heads": heads, "kv_heads": kv_heads}
        for name, size in (sizes | {"batch": batch}).items():
            check_count(name, size)
        if kv_heads and heads % kv_heads:
            raise ArgumentError(message("kv_heads", f"a number that divides heads = {heads}", kv_heads))
        number_bytes, sum_bytes = itemsize(dtype), itemsize(accumulator(dtype))
        query_count, key_numbers = batch * heads, batch * kv_heads * (key_dim + value_dim)
        return cls(
            query=query_count * dim * number_bytes,
            out=query_count * value_dim * number_bytes,
            key=key_numbers * number_bytes,
            key_gradient=key_numbers * sum_bytes,
            row=3 * query_count * sum_bytes,  # without the entropy
            heads=heads,
            kv_heads=kv_heads,
        )

    @classmethod
    def of_problem(cls, problem: Problem) -> RowBytes:
        """Return the bytes of a call's arrays that ranks exchange."""
        form, ops, shape = problem.form, problem.ops, problem.score_shape
        sum_bytes = itemsize(problem.accumulator)

        def size(x: Array, number_bytes: int | None = None) -> int:
            numbers: int = math.prod(x.shape[:-2]) * x.shape[-1]
            return numbers * (number_bytes or itemsize(ops.dtype(x)))

        by_role = {r: [x for name, x in form.arrays().items() if form.role(name) == r] for r in ("query", "key")}
        key = [*by_role["key"], problem.value]
        rows = math.prod(shape.rows[:-1])
        return cls(
            query=sum(map(size, by_role["query"])),
            out=rows * problem.layout.value_dim * itemsize(problem.dtype),
            key=sum(map(size, key)),
            key_gradient=sum(size(x, sum_bytes) for x in key),
            row=(5 if "entropy" in problem.statistics else 3) * rows * sum_bytes,
            heads=shape.heads * shape.groups,
            kv_heads=shape.heads,
        )


def bytes_sent(phase: Phase, size: RowBytes) -> HostArray:
    """Return the bytes that each rank sends in a forward or backward."""
    steps = (*phase.before, *phase.after)
    return sum((sent(step.rows) * size.total(step.arrays) // phase.share for step in steps), np.zeros(1, np.int64))


def peak_memory(phases: Sequence[Phase], counts: Counts, size: RowBytes) -> HostArray:
    """Return the bytes of each rank's arrays, exchange buffers and, with a backward, gradients."""
    # Also the bytes of the gradients of these arrays, which a backward adds.
    rank_bytes = counts.queries * size.total(("query", "out")) + counts.keys * size.key
    memory = np.zeros_like(counts.queries)
    for phase in phases:
        buffers = sum((rows * size.total(arrays) for arrays, rows in phase.held), np.zeros(1, np.int64))
        memory = memory + rank_bytes + buffers // phase.share
    return memory


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
        The keys that each rank holds and needs, and its unmasked pairs.
    forward_bytes, backward_bytes, peak_memory : tuple of int, one a rank
        Bytes that a rank sends; bytes of its arrays, buffers and gradients.
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
        """Largest number of pairs of a rank relative to the mean, minus 1."""
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
        Mask of the whole sequence.
    queries, keys : Shard of each rank
        Positions that the rank holds. `keys` None: as `queries`.
    dim, key_dim, value_dim, heads, kv_heads, batch : int
        None: `key_dim` and `value_dim` as `dim`, `kv_heads` as `heads`.
    dtype : str
    mode : "auto", "gather", "ring" or "heads"
        "gather" fetches the keys that the rank's queries attend, at once; in a "ring" the keys of one rank after the
        other pass by; "heads" gives each rank all rows of some heads. "auto" takes the mode in which the busiest rank
        sends the fewest bytes, of those that fit into `memory`.
    gradient : "auto", "reduce", "queries" or "none"
        "reduce" returns gradients of keys and values to their owners, summed in the dtype of sums. "queries" sends the
        queries to the owners of the keys: the gradients then have the same bits on any number of ranks, and the scores
        are computed a second time. "auto" passes the queries where that sends fewer than half of the bytes in the
        backward, or where only that fits into `memory`. "none": there is no backward.
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
    """Return the explanation of the caller's mode, or of the best one, for a plan under the mask with this text.

    `refused` has the reasons against modes that cannot run the call.
    """
    if memory is not None:
        check_count("memory", memory)
    queries, keys = (np.array([len(shard) for shard in shards]) for shards in (plan.queries, plan.keys))
    counts = Counts(queries, keys, plan.fetched.counts, plan)
    reasons = {**refused}
    if plan.ranks > 1 and (size.heads % plan.ranks or size.kv_heads % plan.ranks):
        reasons["heads"] = f"{plan.ranks} ranks do not divide {size.heads} heads and {size.kv_heads} KV heads"
    if mode in reasons:
        raise ArgumentError(message("mode", "one that can run this call", f"{mode!r}: {reasons[mode]}"))
    if gradient == "queries":
        if mode in ("ring", "heads"):
            raise ArgumentError(message("gradient", f"'auto' or 'reduce' with mode={mode!r}", "'queries'"))
        reasons = {"ring": "it passes no queries", "heads": "it passes no queries", **reasons}

    def explain_way(mode: str, gradient: str) -> ParallelExplanation:
        phases = schedule(counts, mode, gradient)
        sent = [tuple(bytes_sent(phase, size).tolist()) for phase in phases]
        peak = tuple(peak_memory(phases, counts, size).tolist())
        backward = sent[1] if sent[1:] else (0,) * plan.ranks
        return ParallelExplanation(mode, gradient, {}, mask, plan, sent[0], backward, peak)

    def cost(x: ParallelExplanation) -> tuple[bool, int]:
        """Return whether a way needs too much memory, and what to minimise: the bytes that it sends, or its memory."""
        peak = max(x.peak_memory)
        is_too_large = memory is not None and peak > memory
        return is_too_large, peak if is_too_large else _max_sent(x)

    # The gradients of "auto"; the other modes always return gradients to the owners of the keys.
    by_default = "reduce" if gradient != "none" else "none"
    explanations = {name: explain_way(name, by_default) for name in MODES if name not in reasons}
    if "gather" in explanations and gradient in ("auto", "queries"):
        reducing, passing = explanations["gather"], explain_way("gather", "queries")
        # Passing queries computes the scores a second time, and in small blocks: fewer bytes alone are no gain.
        is_less = 2 * max(passing.backward_bytes) < max(reducing.backward_bytes)
        is_better = (is_less and _max_sent(passing) < _max_sent(reducing)) or cost(reducing)[0]
        if gradient == "queries" or (is_better and not cost(passing)[0]):
            explanations["gather"] = passing
    best = min(explanations.values(), key=cost) if mode == "auto" else explanations[mode]
    for name, other in explanations.items():
        if name == best.mode:
            continue
        sent, least = _max_sent(other), _max_sent(best)
        reasons[name] = f"{sent / least:.1f} times as many bytes" if least else f"{sent:,} bytes, where this sends none"
        if cost(other)[0]:
            reasons[name] = f"{max(other.peak_memory):,} bytes of memory"
    return replace(best, reasons={name: reasons[name] for name in MODES if name in reasons})


def _max_sent(x: ParallelExplanation) -> int:
    return max(map(sum, zip(x.forward_bytes, x.backward_bytes, strict=True)))
