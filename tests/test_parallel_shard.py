"""Shards, the exchange of keys among ranks, and masks of shards, against all pairs one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore.parallel import Shard, exchange, shard_mask

N, BATCH = 37, 2
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 5, (BATCH, N)), -1)
EDGES = np.unique(RNG.integers(0, N * N, 90))


def heads(batch, head, query, key):
    return (key <= query) & (key % 3 != head)


MASKS = {
    "none": None,
    "causal": ats.Causal(),
    "window": ats.SlidingWindow(left=4, right=1),
    "sinks and a window": (ats.SlidingWindow(left=3, right=0) | ats.KeyRange(0, 2)) & ats.Causal(),
    "all but a range": ~ats.KeyRange([3, 9], [20, 11]),
    "lengths": ats.Causal() & ats.ValidLens(np.array([30, 9]), np.array([37, 5])),
    "lengths per query": ats.ValidLens(RNG.integers(0, N + 1, (BATCH, N))),
    "documents": ats.Documents(IDS) & ats.Causal(),
    "scattered documents": ats.Documents(RNG.integers(-1, 3, (BATCH, N))),
    "packed": ats.Packed([0, 5, 5, 20, 33]).causal(),
    "padding": ats.KeyPadding(RNG.random((BATCH, N)) < 0.5) & ats.SlidingWindow(9, 0),
    "array": ats.Dense(RNG.random((BATCH, N, N)) < 0.1) & ats.Causal(),
    "array of heads": ats.Dense(RNG.random((BATCH, 2, N, N)) < 0.1),
    "not an array": ~(ats.Dense(RNG.random((N, N)) < 0.9) | ats.KeyRange(0, 7)),
    "graph": ats.Neighbours(np.searchsorted(EDGES, np.arange(N + 1) * N), EDGES % N) & ats.Causal(),
    "function": ats.MaskFunction(lambda b, h, i, j: (j <= i) & (i // 5 == j // 5)),
    "function of heads": ats.MaskFunction(heads, heads=2),
}
DIVISIONS = {
    "contiguous": lambda mask, rank, ranks: Shard.contiguous(N, rank, ranks),
    "head_tail": lambda mask, rank, ranks: Shard.head_tail(N, rank, ranks),
    "balanced": lambda mask, rank, ranks: Shard.balanced(mask, N, rank, ranks, chunk=4, batch=BATCH),
}


def all_pairs(mask: ats.Mask | None) -> np.ndarray:
    """The boolean array (batch, head, query, key)."""
    found = np.ones((BATCH, N, N), bool) if mask is None else mask.materialize(N, N, BATCH)
    return found if found.ndim == 4 else found[:, None]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_exchange_and_masks_are_those_of_all_pairs(name: str, division: str, ranks: int) -> None:
    mask, pairs = MASKS[name], all_pairs(MASKS[name])
    queries = [DIVISIONS[division](mask, rank, ranks) for rank in range(ranks)]
    keys = [Shard.contiguous(N, rank, ranks) for rank in range(ranks)]
    plan = exchange(mask, queries, keys, batch=BATCH)
    is_exact = name != "function of heads"
    for rank, (rows, needed) in enumerate(zip(queries, plan.needed, strict=True)):
        own = pairs[:, :, rows.positions()]
        attended = own.any((0, 1, 2))
        has = np.isin(np.arange(N), needed.positions())
        assert (has >= attended).all()
        if is_exact and name != "graph":
            assert (has == attended).all()
            assert plan.pairs[rank] == np.ceil(own.sum((0, 3)).mean(0)).sum()
        local = shard_mask(mask, rows, needed, N, N)
        found = np.ones((1, 1, 1, 1), bool) if local is None else local.materialize(len(rows), len(needed), BATCH)
        found = found if found.ndim == 4 else found[:, None]
        assert (found == own[..., needed.positions()]).all()
        if local is not None and (whole := local.interval_set(len(rows), len(needed), BATCH)) is not None:
            cols = np.arange(len(needed))
            inside = ((whole.start[..., None] <= cols) & (cols < whole.stop[..., None])).any(0)
            assert (inside == found[:, 0]).all()
    assert sum(plan.pairs) >= pairs.sum((0, 2, 3)).mean()


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_attention_of_a_shard_is_that_of_its_queries(name: str, kernel: str) -> None:
    mask = MASKS[name]
    query, key, value = (RNG.standard_normal((BATCH, 2, N, dim)) for dim in (8, 8, 5))
    whole = ats.attend(query, key, value, mask=mask, kernel="dense")
    queries = [Shard.head_tail(N, rank, 3) for rank in range(3)]
    keys = [Shard.contiguous(N, rank, 3) for rank in range(3)]
    plan = exchange(mask, queries, keys, batch=BATCH)
    for rows, cols in zip(queries, plan.needed, strict=True):
        local = shard_mask(mask, rows, cols, N, N)
        out = ats.attend(rows.take(query), cols.take(key), cols.take(value), mask=local, kernel=kernel)
        np.testing.assert_allclose(out, rows.take(whole), rtol=1e-12, atol=1e-12)


TRACED = [name for name in MASKS if name not in ("none", "function of heads")]


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize("name", TRACED)
def test_positions_may_be_traced_and_padded(name: str, kernel: str) -> None:
    """As in a program that runs on every device: each takes its positions, padded to one size, from a table."""
    mask = MASKS[name]
    arrays = [RNG.standard_normal((BATCH, 2, N, dim)).astype(np.float32) for dim in (8, 8, 5)]
    whole = ats.attend(*arrays, mask=mask, kernel="dense")
    shards = [Shard(((0, 3), (20, N)), N), Shard(((3, 20),), N)]
    tables = [np.stack([np.append(s.positions(), [N] * (22 - len(s))) for s in shards]) for _ in range(2)]

    @jax.jit
    def run(rank: jax.Array, *padded: jax.Array) -> jax.Array:
        rows, cols = (jnp.asarray(table)[rank] for table in tables)
        cols = jnp.concatenate([jnp.arange(N), jnp.full(2, N)]) + 0 * cols[:1]
        return ats.attend(*padded, mask=shard_mask(mask, rows, cols, N, N, padded=True), kernel=kernel)

    query, key, value = (np.concatenate([x, np.full_like(x[..., :2, :], np.nan)], -2) for x in arrays)
    for rank, shard in enumerate(shards):
        rows = np.append(shard.positions(), [N] * (22 - len(shard)))
        out = np.asarray(run(rank, query[:, :, rows], key, value))
        np.testing.assert_allclose(out[:, :, : len(shard)], shard.take(whole), rtol=2e-5, atol=2e-5)
        assert not out[:, :, len(shard) :].any()
