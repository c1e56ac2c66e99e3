"""The messages of each mode, as data: rows from each rank to each other, before and after the kernels run.

- ``gather``: a rank fetches the keys and values that its queries attend. Backward, the gradients of keys and values
  return to their owners (``reduce``), or the queries go to the owners of the keys, which sum (``queries``).
- ``ring``: all keys and values pass by every rank, one rank's share at a time; backward with their gradients.
- ``heads``: each rank gets all positions of some heads.

Bytes, memory and time are sums over the steps of a schedule.
"""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import numpy as np

from attnscore.masks.intervals import HostArray
from attnscore.parallel.plan import Exchange

MODES: Final = ("gather", "ring", "heads")
GRADIENTS: Final = ("none", "reduce", "queries")


class Counts(NamedTuple):
    """Positions of every rank, (ranks,), and keys that one rank holds and another needs, (source, target)."""

    queries: HostArray
    keys: HostArray
    fetched: HostArray
    plan: Exchange | None = None
    """Source of the blocks and queries to pass; the gradient "queries" requires it."""


class Step(NamedTuple):
    """Rows of some arrays, fields of `RowBytes`, that ranks send to others at one time: (source, target)."""

    arrays: tuple[str, ...]
    rows: HostArray


class Phase(NamedTuple):
    """A forward or a backward. A rank sends and holds 1 / `share` of the heads of each row."""

    held: tuple[tuple[tuple[str, ...], HostArray], ...]
    """Rows of arrays that a rank holds apart from its own, (ranks,)."""
    before: tuple[Step, ...] = ()
    """Messages before the kernels run, or while they run."""
    after: tuple[Step, ...] = ()
    share: int = 1


def schedule(counts: Counts, mode: str, gradient: str) -> tuple[Phase, ...]:
    """Return the forward and, unless the gradient is "none", the backward."""
    queries, keys, ranks = counts.queries, counts.keys, len(counts.keys)
    if mode == "gather" and gradient == "queries":
        query_arrays = ("query", "out", "row")
        plan = cast(Exchange, counts.plan)
        blocks, passed = plan.fetched_blocks.counts, plan.passed.counts
        forward = Phase(held=((("key",), blocks.sum(0)),), before=(Step(("key",), blocks),))
        backward = Phase(held=((query_arrays, passed.sum(0)),), before=(Step(query_arrays, passed),))
    elif mode == "gather":
        fetched = np.where(sent(counts.fetched.T) > 0, counts.fetched.sum(0), 0)
        forward = Phase(held=((("key",), fetched),), before=(Step(("key",), counts.fetched),))
        backward = Phase(held=((("key_gradient",), fetched),), after=(Step(("key_gradient",), counts.fetched.T),))
    elif mode == "ring":
        to_next, two_shares = np.roll(np.eye(ranks, dtype=np.int64), 1, 1), 2 * keys.max(keepdims=True)
        # A rank passes on all keys but the next rank's own; backward, the gradients of all keys but its own.
        around = Step(("key",), to_next * (keys.sum() - np.roll(keys, -1))[:, None])
        returned = Step(("key_gradient",), to_next * (keys.sum() - keys)[:, None])
        forward = Phase(held=((("key",), two_shares),), before=(around,))
        backward = Phase(held=((("key_gradient",), two_shares),), before=(around,), after=(returned,))
    else:
        ones = np.ones_like(counts.fetched)
        to_heads = Step(("query",), ones * queries[:, None]), Step(("key",), ones * keys[:, None])
        to_rows = (Step(("out",), ones * queries),)
        held = (("query", "out"), queries.sum(keepdims=True)), (("key",), keys.sum(keepdims=True))
        forward = Phase(before=to_heads, after=to_rows, held=held, share=ranks)
        mirrored = [tuple(Step(step.arrays, step.rows.T) for step in steps) for steps in (to_rows, to_heads)]
        backward = Phase(before=mirrored[0], after=mirrored[1], held=held, share=ranks)
    return (forward,) if gradient == "none" else (forward, backward)


def sent(rows: HostArray) -> HostArray:
    """Return how many rows each rank sends to others."""
    return np.asarray(rows.sum(1) - np.diagonal(rows))
