"""Shards, the exchange of keys among ranks, and masks of shards, against all pairs one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnscore as ats
from attnscore.backends.jax import ffi
from attnscore.errors import ArgumentError, MaskError, ShapeError
from attnscore.parallel import Shard, balanced_shards, consecutive_shards, exchange, shard_mask
from attnscore.parallel.jax import join_rows, split_rows
from attnscore.parallel.shard import balanced_boundaries
from attnscore.parallel.torch_modes import Gather, difference

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
    for target in range(ranks):
        for source in range(ranks):
            moved = plan.transfer(source, target)
            assert (moved == keys[source] & plan.needed[target]) and plan.queries[target] == queries[target]
            attend = pairs[..., moved.positions()].any((0, 1, 3)) & np.isin(np.arange(N), queries[target].positions())
            assert attend[plan.attending(target, source).positions()].sum() == attend.sum()
    assert sum(map(plan.sent, range(ranks))) == sum(map(plan.received, range(ranks)))


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_some_keys(name: str) -> None:
    """As of a step of a ring, where a rank has keys that its queries do not attend, and lacks some that they do."""
    rows, cols = Shard.head_tail(N, 1, 3), Shard(((2, 9), (20, 31)), N)
    local = shard_mask(MASKS[name], rows, cols, N, N)
    if local is not None:
        found = local.materialize(len(rows), len(cols), BATCH)
        expected = all_pairs(MASKS[name])[:, :, rows.positions()][..., cols.positions()]
        assert (found if found.ndim == 4 else found[:, None]).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "mask",
    [
        ats.Dense(np.ones((3, 0), bool)),
        ats.Dense(np.ones((2, 1, 3, 0), bool)),
        ats.KeyPadding(np.ones((2, 0), bool)),
        ats.Documents([0, 0, 1], np.zeros(0, int)),
    ],
    ids=repr,
)
def test_no_pairs_without_keys(mask: ats.Mask) -> None:
    plan = exchange(mask, [Shard.contiguous(3, rank, 2) for rank in range(2)], [Shard.empty(0)] * 2, batch=2)
    assert plan.pairs == (0, 0) and plan.needed == (Shard.empty(0),) * 2


OF_ONE = {
    "padding": (ats.KeyPadding([[True], [False]]), 5, 1),
    "documents of one key": (ats.Documents([0, 0, 1, -1, 0], [0]), 5, 1),
    "documents of one query": (ats.Documents([[0], [1]], [[0, 0, 1, -1, 0]] * 2), 1, 5),
    "array of one key": (ats.Dense(np.array([[1], [1], [0], [1], [0]], bool)), 5, 1),
    "array of one query": (ats.Dense([[True, True, False, True, False]]), 1, 5),
    "array of one query and key": (ats.Dense(np.ones((2, 1, 1), bool)), 1, 1),
    "array for all keys": (ats.Dense(np.array([[1], [1], [0], [1], [0]], bool)), 5, 5),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_masks_of_one_position_are_divided(name: str) -> None:
    """Ranks without the only query, or the only key, have none of the mask's."""
    mask, query_len, key_len = OF_ONE[name]
    pairs = np.broadcast_to(mask.materialize(query_len, key_len, 2), (2, query_len, key_len))
    for rows in (Shard.contiguous(query_len, rank, 2) for rank in range(2)):
        for cols in (Shard.contiguous(key_len, rank, 2) for rank in range(2)):
            local = shard_mask(mask, rows, cols, query_len, key_len)
            found = np.broadcast_to(local.materialize(len(rows), len(cols), 2), (2, len(rows), len(cols)))
            assert (found == pairs[:, rows.positions()][..., cols.positions()]).all()


def test_a_plan_is_computed_once_for_each_mask_by_value() -> None:
    shards = [Shard.head_tail(64, rank, 2) for rank in range(2)]
    found = exchange(ats.Causal(), shards, shards)
    assert exchange(ats.Causal(), [*shards], shards) is found
    assert exchange(ats.Causal(align="bottom_right"), shards, shards) is not found
    assert exchange(ats.Causal(), shards[::-1], shards) != found
    # A copy with other queries has none of the results of the first.
    assert found.attending(0, 1).ranges == ((48, 64),)
    first = dataclasses.replace(found, queries=(shards[1], shards[0]))
    assert first.attending(0, 1).ranges == ((16, 48),)
    # Arrays may be written to.
    lens = np.array([40])
    for count in (40, 20):
        lens[0] = count
        assert exchange(ats.ValidLens(lens), shards, shards).needed[0].ranges == ((0, count),)


def test_what_a_rank_receives_it_has_room_for() -> None:
    """Keys between the keys of inner queries are fetched too, where they are few."""
    mask = ats.Causal() & ats.Neighbours(np.arange(9), [0, 1, 2, 3, 4, 5, 5, 7])
    shards = [Shard.head_tail(8, rank, 2) for rank in range(2)]
    plan = exchange(mask, shards, shards)
    for rank, other in ((0, 1), (1, 0)):
        ranks, own = SimpleNamespace(rank=rank), {"queries": shards[rank], "keys": shards[rank]}
        call = SimpleNamespace(plan=plan, ranks=ranks, has_relative_bias=False, **own)
        call.outer = Gather.outer.func(call)
        found = Gather.movement.func(call)
        assert not len(difference(shards[other] & plan.needed[rank], found.needed[rank]))


def test_queries_that_attend_keys_of_another_rank() -> None:
    shards = [Shard.contiguous(40, rank, 4) for rank in range(4)]
    plan = exchange(ats.SlidingWindow(left=3, right=0), shards, shards)
    assert plan.attending(1, 0).ranges == ((10, 13),)
    assert plan.attending(0, 1) == Shard.empty(40) == plan.attending(3, 0)


@pytest.mark.parametrize("division", [Shard.contiguous, Shard.head_tail])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_divisions_hold_each_position_once(division, length: int, ranks: int) -> None:
    shards = [division(length, rank, ranks) for rank in range(ranks)]
    together = np.concatenate([shard.positions() for shard in shards])
    assert sorted(together) == [*range(length)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 2
    exchange(ats.Causal(), shards, shards)


@pytest.mark.parametrize("divide", [balanced_shards, consecutive_shards])
@pytest.mark.parametrize("mask", [ats.ValidLens([3, 37]), ats.KeyPadding(np.ones((2, 37), bool))], ids=repr)
def test_a_mask_of_another_batch_is_an_error(mask: ats.Mask, divide: Callable[..., tuple[Shard, ...]]) -> None:
    shards = divide(mask, 37, 4, batch=2)
    for call in (lambda: divide(mask, 37, 4), lambda: exchange(mask, shards, shards)):
        with pytest.raises(MaskError, match=r"expected shape .*\(1.*, got \(2"):
            call()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 5000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_balanced_shards_have_as_many_chunks(length: int, ranks: int) -> None:
    shards = balanced_shards(ats.KeyRange(0, 0), length, ranks)
    assert sorted(np.concatenate([shard.positions() for shard in shards])) == [*range(length)]
    assert max(map(len, shards)) <= 128 * -(-length // (128 * ranks))
    assert shards == tuple(Shard.balanced(ats.KeyRange(0, 0), length, rank, ranks) for rank in range(ranks))


def test_ranks_have_as_many_rows_where_few_have_pairs() -> None:
    mask = ats.ValidLens(1280, query_lens=100)
    assert [len(shard) for shard in balanced_shards(mask, 1280, 2)] == [640, 640]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_cuts_are_where_the_sums_are_nearest(ranks: int) -> None:
    loads = RNG.integers(0, 100, 40)
    sums = np.append(0, np.cumsum(loads))
    edges = balanced_boundaries(loads, ranks)
    assert edges[0] == 0 and edges[-1] == 40
    for part, edge in enumerate(edges[1:-1], 1):
        distance = abs(sums - sums[-1] * part / ranks)
        assert distance[edge] == distance.min()


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 5000])
@pytest.mark.parametrize("ranks", [1, 3, 50])
@pytest.mark.parametrize("name", ["none", "causal", "nothing"])
def test_consecutive_shards(name: str, ranks: int, length: int) -> None:
    mask = {"none": None, "causal": ats.Causal(), "nothing": ats.KeyRange(0, 0)}[name]
    shards = consecutive_shards(mask, length, ranks)
    assert np.concatenate([shard.positions() for shard in shards]).tolist() == [*range(length)]
    # No part is off by more than a chunk at either end.
    plan = exchange(mask, shards, shards)
    assert max(plan.pairs) <= sum(plan.pairs) / ranks + 128 * length


def test_consecutive_shards_of_packed_sequences_fetch_few_keys() -> None:
    length, ranks = 2**16, 8
    cu = np.append(np.arange(0, length, 3000), length)
    mask = ats.Packed(cu).causal()
    contiguous = [Shard.contiguous(length, rank, ranks) for rank in range(ranks)]
    shards = consecutive_shards(mask, length, ranks)
    plan, other = exchange(mask, shards, shards), exchange(mask, balanced_shards(mask, length, ranks), contiguous)
    assert plan.imbalance < 0.05
    assert max(map(plan.received, range(ranks))) <= 3000 < 10 * 3000 < max(map(other.received, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_pairs_of_balanced_ranks_differ_by_2_percent(ranks: int) -> None:
    length = 2**17 + 77
    rng = np.random.default_rng(ranks)
    lens = rng.lognormal(6, 1.2, 400).astype(int)
    cu = np.append(0, np.cumsum(lens)[np.cumsum(lens) < length])
    for mask in (ats.Causal(), ats.SlidingWindow(left=1000, right=0), ats.Packed(cu).causal()):
        queries = balanced_shards(mask, length, ranks)
        plan = exchange(mask, queries, [Shard.contiguous(length, rank, ranks) for rank in range(ranks)])
        assert max(plan.pairs) <= 1.02 * min(plan.pairs)
    # Parts of the sequence are not balanced under a causal mask; its ends taken together are.
    parts, ends = (
        [division(length, rank, ranks) for rank in range(ranks)] for division in (Shard.contiguous, Shard.head_tail)
    )
    assert exchange(ats.Causal(), parts, parts).imbalance > 0.4
    assert exchange(ats.Causal(), ends, ends).imbalance < 0.01


def test_keys_of_a_window_do_not_grow_with_the_sequence() -> None:
    def most(length: int) -> int:
        shards = [Shard.contiguous(length, rank, 4) for rank in range(4)]
        plan = exchange(ats.SlidingWindow(left=99, right=0), shards, shards)
        return max(map(plan.sent, range(4)))

    assert most(1000) == most(100_000) == 99


def test_rows_of_a_shard() -> None:
    shard = Shard(((1, 3), (3, 4), (6, 6), (7, 8)), 10)
    assert shard.ranges == ((1, 4), (7, 8)) and len(shard) == 4
    assert shard.positions().tolist() == [1, 2, 3, 7]
    x = np.arange(30).reshape(3, 10)
    assert shard.take(x, -1).tolist() == x[:, [1, 2, 3, 7]].tolist()
    assert shard.take(x.T, 0).tolist() == shard.take(x.T).tolist() == x.T[[1, 2, 3, 7]].tolist()
    assert np.shares_memory(Shard(((2, 5),), 10).take(x, 1), x)
    assert Shard.empty(10).take(x, 1).shape == (3, 0)
    many = Shard(tuple((i, i + 1) for i in range(0, 200, 2)), 200)
    assert many.take(np.arange(200), 0).tolist() == [*range(0, 200, 2)]
    assert shard.positions(jnp.zeros(1)).tolist() == [1, 2, 3, 7]
    assert shard.take(jnp.arange(10), 0).tolist() == [1, 2, 3, 7]


def test_sets_of_positions() -> None:
    shard, other = Shard(((1, 4), (7, 9)), 10), Shard(((0, 2), (3, 8)), 10)
    assert (shard & other).ranges == ((1, 2), (3, 4), (7, 8))
    assert (shard | other).ranges == ((0, 9),)
    assert shard.locate(shard & other) == ((0, 1), (2, 4))
    assert shard.locate(Shard.empty(10)) == Shard.empty(10).locate(Shard.empty(10)) == ()
    assert Shard.whole(10) & shard == shard == shard | Shard.empty(10)
    x = np.arange(10)
    found = np.concatenate([shard.take(x, 0)[start:stop] for start, stop in shard.locate(shard & other)])
    assert found.tolist() == (shard & other).positions().tolist()


BAD = {
    "order": (lambda: Shard(((3, 4), (1, 2)), 10), r"ranges: expected \(start, stop\) in rising order, from 0 to 10"),
    "overlap": (lambda: Shard(((1, 4), (3, 5)), 10), r"got \(3, 5\)"),
    "outside": (lambda: Shard(((1, 11),), 10), r"got \(1, 11\)"),
    "length": (lambda: Shard((), -1), "length: expected a whole number"),
    "rank": (lambda: Shard.contiguous(10, 4, 4), "rank: expected a number below ranks = 4, got 4"),
    "ranks": (lambda: Shard.head_tail(10, 0, 0), "ranks: expected 1 or more"),
    "chunk": (lambda: Shard.balanced(None, 10, 0, 1, chunk=0), "chunk: expected a whole number of queries"),
    "axis": (lambda: Shard.whole(10).take(np.zeros((10, 3)), 1), r"10 positions on axis 1, got shape \(10, 3\)"),
    "part": (lambda: Shard(((0, 3),), 9).locate(Shard(((2, 4),), 9)), "part: expected positions that the shard holds"),
    "lengths": (lambda: Shard.whole(3) & Shard.whole(4), "shards: expected parts of one sequence"),
    "missing": (lambda: exchange(None, [Shard(((0, 3),), 4)], [Shard.whole(4)]), "queries: expected shards that hold"),
    "twice": (lambda: exchange(None, [Shard.whole(4)] * 2, [Shard.whole(4)] * 2), "queries: expected shards that hold"),
    "a number": (lambda: exchange(None, 5, [Shard.whole(4)]), "queries: expected a Shard of each rank, got 5"),
    "none": (lambda: exchange(None, [Shard.whole(4)], []), r"keys: expected a Shard of each rank, got \[\]"),
    "ranges": (lambda: exchange(None, [(0, 4)], [(0, 4)]), r"queries: expected a Shard of each rank, got \[\(0, 4\)\]"),
    "one": (lambda: split_rows(jnp.ones(4), Shard.whole(4), 0), r"shards: expected a Shard of each rank, got Shard\("),
    "rows": (lambda: join_rows(jnp.ones(4), None, 0), "shards: expected a Shard of each rank, got None"),
    "ranks differ": (
        lambda: exchange(None, [Shard.whole(4)], [Shard.whole(4), Shard.empty(4)]),
        "keys: expected one shard for each of 1 ranks, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_shards_are_refused(name: str) -> None:
    call, text = BAD[name]
    with pytest.raises((ArgumentError, ShapeError), match=text):
        call()


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


QUICK = ("causal", "sinks and a window", "lengths per query", "array", "graph")
CALLS = [("auto", name) for name in TRACED] + [("streaming", name) for name in TRACED]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [pytest.param(*x, marks=() if x[0] == "auto" and x[1] in QUICK else pytest.mark.slow) for x in CALLS],
)
def test_positions_may_be_traced_and_padded(kernel: str, name: str) -> None:
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


@pytest.mark.parametrize("name", ["causal", "array"])
def test_a_callback_reads_traced_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XLA does not have the calls of the native module."""
    monkeypatch.setattr(ffi, "registered", lambda: False)
    test_positions_may_be_traced_and_padded("auto", name)
