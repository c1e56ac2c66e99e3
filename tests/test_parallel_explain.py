"""`explain` counts the bytes of messages sent one by one, and takes the mode with the fewest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnscore as ats
from attnscore.errors import ArgumentError
from attnscore.parallel import ParallelExplanation, Shard, exchange, explain
from attnscore.parallel.explanation import RowBytes, choose
from attnscore.parallel.schedule import MODES

N, RANKS, BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 48, 4, 2, 8, 4, 6, 5
SIZES = {"dim": DIM, "value_dim": VALUE_DIM, "heads": HEADS, "kv_heads": KV_HEADS, "batch": BATCH}
MASKS = {
    "none": None,
    "causal": ats.Causal(),
    "window": ats.SlidingWindow(left=5, right=0),
    "packed": ats.Packed([0, 7, 30, 48]).causal(),
}
CONTIGUOUS = [Shard.contiguous(N, rank, RANKS) for rank in range(RANKS)]
UNEVEN = [Shard(((0, 20),), N), Shard(((20, 21), (40, 48)), N), Shard.empty(N), Shard(((21, 40),), N)]


class Arrays:
    """Arrays of every rank, and messages among ranks with their bytes counted."""

    def __init__(self, queries: list[Shard], keys: list[Shard], dtype: str) -> None:
        self.sent = [0] * RANKS
        sums = np.result_type(dtype, np.float32)
        self.query, self.out, self.row = (
            [np.zeros((BATCH, HEADS, len(shard), dim), kind) for shard in queries]
            for dim, kind in ((DIM, dtype), (VALUE_DIM, dtype), (1, sums))
        )
        self.key, self.grad = (
            [np.zeros((BATCH, KV_HEADS, len(shard), DIM + VALUE_DIM), kind) for shard in keys] for kind in (dtype, sums)
        )

    def send(self, source: int, target: int, *arrays: np.ndarray) -> None:
        if source != target:
            self.sent[source] += sum(x.nbytes for x in arrays)


def pairs_of_ranks() -> list[tuple[int, int]]:
    return [(source, target) for source in range(RANKS) for target in range(RANKS)]


def contiguous(length: int) -> list[Shard]:
    return [Shard.contiguous(length, rank, RANKS) for rank in range(RANKS)]


def share(x: np.ndarray) -> np.ndarray:
    """The heads of one rank."""
    return x[:, : x.shape[1] // RANKS]


def pass_round(world: Arrays, held: list[np.ndarray]) -> None:
    """Each rank sends what it holds to the next one, until all have had everything."""
    for _ in range(RANKS - 1):
        for rank in range(RANKS):
            world.send(rank, (rank + 1) % RANKS, held[rank])
        held = [held[rank - 1] for rank in range(RANKS)]


def blocks(shard: Shard, size: int) -> Shard:
    """All positions of the blocks that a shard has any of."""
    at = np.unique(shard.positions() // size)
    return Shard.of([(i * size, min((i + 1) * size, shard.length)) for i in at.tolist()], shard.length)


def forward(
    world: Arrays, mask: ats.Mask | None, mode: str, queries: list[Shard], keys: list[Shard], gradient: str = "reduce"
) -> None:
    if mode == "gather":
        plan = exchange(mask, queries, keys)
        for source, target in pairs_of_ranks():
            wanted = blocks(plan.needed[target], 1024) if gradient == "queries" else plan.needed[target]
            needed = keys[source].locate(keys[source] & wanted)
            world.send(source, target, *(world.key[source][..., start:stop, :] for start, stop in needed))
    elif mode == "ring":
        pass_round(world, world.key)
    else:
        for source, target in pairs_of_ranks():
            sent = world.query[source], world.key[source], world.out[target]
            world.send(source, target, *map(share, sent))


def backward(
    world: Arrays, mask: ats.Mask | None, mode: str, gradient: str, queries: list[Shard], keys: list[Shard]
) -> None:
    plan = exchange(mask, queries, keys)
    if mode == "gather":
        for source, target in pairs_of_ranks():
            if gradient == "reduce":
                found = keys[source].locate(plan.transfer(source, target))
                world.send(target, source, *(world.grad[source][..., start:stop, :] for start, stop in found))
                continue
            attending = Shard.of([x for rank in range(RANKS) for x in plan.attending(rank, source).ranges], N)
            found = queries[target].locate(queries[target] & blocks(attending, 384))
            arrays = world.query[target], world.out[target], *[world.row[target]] * 3
            world.send(target, source, *(x[..., start:stop, :] for x in arrays for start, stop in found))
    elif mode == "ring":
        forward(world, mask, "ring", queries, keys)
        # The rank behind the owner begins, and the last one returns them to it.
        pass_round(world, [world.grad[rank - 1] for rank in range(RANKS)])
    else:
        for source, target in pairs_of_ranks():
            sent = world.out[source], world.query[target], world.key[target]
            world.send(source, target, *map(share, sent))


@pytest.mark.parametrize("keys", [CONTIGUOUS, UNEVEN], ids=["keys", "uneven keys"])
@pytest.mark.parametrize("shards", [CONTIGUOUS, UNEVEN], ids=["queries", "uneven queries"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gradient", ["reduce", "queries"])
def test_bytes_are_those_of_the_messages(
    mode: str, name: str, gradient: str, shards: list[Shard], keys: list[Shard]
) -> None:
    if gradient == "queries" and mode != "gather":
        with pytest.raises(ArgumentError, match=f"gradient: expected 'auto' or 'reduce' with mode='{mode}'"):
            explain(MASKS[name], shards, mode=mode, gradient=gradient, **SIZES)
        return
    for dtype in ("float32", "float16", "float64"):
        found = explain(MASKS[name], shards, keys, mode=mode, gradient=gradient, dtype=dtype, **SIZES)
        world = Arrays(shards, keys, dtype)
        forward(world, MASKS[name], mode, shards, keys, gradient)
        assert list(found.forward_bytes) == world.sent
        world.sent = [0] * RANKS
        backward(world, MASKS[name], mode, gradient, shards, keys)
        assert list(found.backward_bytes) == world.sent


def most_sent(found: ParallelExplanation) -> int:
    return max(map(sum, zip(found.forward_bytes, found.backward_bytes, strict=True)))


@pytest.mark.parametrize("gradient", ["none", "auto"])
@pytest.mark.parametrize("name", MASKS)
def test_auto_is_the_mode_with_the_fewest_bytes(name: str, gradient: str) -> None:
    best = explain(MASKS[name], CONTIGUOUS, gradient=gradient, **SIZES)
    others = {mode: explain(MASKS[name], CONTIGUOUS, mode=mode, gradient=gradient, **SIZES) for mode in MODES}
    assert most_sent(best) == min(map(most_sent, others.values()))
    assert set(best.reasons) == {*MODES} - {best.mode}
    assert others[best.mode] == best
    ways = [explain(MASKS[name], CONTIGUOUS, mode="gather", gradient=way, **SIZES) for way in ("reduce", "queries")]
    if gradient == "auto":
        reduce, queries = ways
        is_less = 2 * max(queries.backward_bytes) < max(reduce.backward_bytes) and most_sent(queries) < most_sent(
            reduce
        )
        assert others["gather"] == (queries if is_less else reduce)
    else:
        assert not any(best.backward_bytes)


def test_memory_bounds_the_choice() -> None:
    sizes = {"dim": 64, "heads": 3, "gradient": "none"}
    shards = contiguous(4096)
    whole = explain(None, shards, **sizes)
    assert whole.mode == "gather" and whole.reasons["heads"] == "4 ranks do not divide 3 heads and 3 KV heads"
    less = explain(None, shards, memory=max(whole.peak_memory) - 1, **sizes)
    assert less.mode == "ring" and less.reasons["gather"] == f"{max(whole.peak_memory):,} bytes of memory"
    # Where none fits, the one that needs least.
    assert explain(None, shards, memory=1, **sizes).mode == "ring"
    with pytest.raises(ArgumentError, match="mode: expected one that can run this call, got 'heads': 4 ranks do not"):
        explain(None, shards, mode="heads", **sizes)


def test_few_queries_are_passed_to_many_keys() -> None:
    keys = contiguous(2**14)
    queries = contiguous(512)
    found = explain(None, queries, keys, dim=64, mode="gather")
    assert found.gradient == "queries"
    assert found.backward_bytes == (128 * 3 * 4 * (64 + 64 + 3),) * 4
    assert explain(None, keys, dim=64, mode="gather").gradient == "reduce"  # as many bytes
    # As few bytes as 0.52 of the others are not worth the second computation.
    assert explain(None, keys, dim=64, mode="gather", dtype="bfloat16").gradient == "reduce"
    # The gradients of gathered keys take more memory than the queries.
    half = explain(None, queries, keys, dim=64, mode="gather", gradient="reduce")
    assert max(found.peak_memory) < max(half.peak_memory)


def test_a_window_sends_as_much_for_any_length() -> None:
    options = {"mask": ats.SlidingWindow(left=255, right=0), "dim": 64, "mode": "gather"}
    for gradient in ("reduce", "queries"):
        # Shards of whole blocks of 1024 keys and of 384 queries.
        short, long = (explain(queries=contiguous(n), gradient=gradient, **options) for n in (4 * 3072, 32 * 3072))
        assert most_sent(short) == most_sent(long) > 0


def test_passed_queries_are_those_of_gather() -> None:
    """Also where another mode sends fewer bytes."""
    shards = contiguous(4096)
    found = explain(None, shards, dim=64, heads=4, gradient="queries")
    assert (found.mode, found.gradient) == ("gather", "queries")
    assert {*found.reasons} == {"ring", "heads"}


def test_it_prints_as_a_table() -> None:
    found = explain(ats.Causal(), CONTIGUOUS, **SIZES)
    assert str(found).splitlines() == [
        "mode            gather",
        "not ring        3.0 times as many bytes",
        "not heads       1.5 times as many bytes",
        "gradient        reduce",
        "mask            Causal()",
        "ranks           4, with 12 to 12 queries each",
        "pairs           1,020 at most, 73.5% above the mean",
        "bytes sent      12,672 forward, 12,672 backward, by the rank that sends most",
        "peak memory     59,136 bytes, on the rank that needs most",
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "tree"}, "mode: expected one of auto, gather, ring, heads"),
        ({"gradient": "sum"}, "gradient: expected one of auto, none, reduce, queries"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads: expected a number that divides heads = 4, got 3"),
        *(({"memory": memory}, "memory: expected a whole number, 0 or more") for memory in ("1GB", -1, 2.5)),
        ({"dim": 4.5}, "dim: expected a whole number"),
        ({"dtype": "int8"}, "dtype: expected one of"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        explain(None, CONTIGUOUS, **({"dim": 4} | options))


def test_a_mode_that_cannot_run_the_call_is_not_chosen() -> None:
    shards = [Shard.contiguous(64, rank, 2) for rank in range(2)]
    plan, size = exchange(None, shards, shards), RowBytes.of(8, heads=4)
    best = choose(plan, size, gradient="reduce", mask="none").mode
    found = choose(plan, size, gradient="reduce", mask="none", refused={best: "no such score"})
    assert found.mode != best
    assert found.reasons[best] == "no such score"
    with pytest.raises(ArgumentError, match=f"mode: expected one that can run this call, got '{best}': no such score"):
        choose(plan, size, mode=best, mask="none", refused={best: "no such score"})
