"""The model of many ranks: its counts equal `exchange`'s, its times the times of known cases."""

from __future__ import annotations

import numpy as np
import pytest

import attnscore as ats
from attnscore.errors import ArgumentError
from attnscore.parallel import Shard, balanced_shards, consecutive_shards, exchange, explain
from bench.simulation import Machine, simulate

N = 1024
FAST = Machine(flops=1e9, bandwidth=1e30)
MASKS = {
    "none": None,
    "causal": ats.Causal(),
    "window": ats.SlidingWindow(left=40, right=3),
    "packed": ats.Packed([0, 100, 101, 600, 1024]).causal(),
    "sinks": (ats.SlidingWindow(left=70, right=0) | ats.KeyRange(0, 4)) & ats.Causal(),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
@pytest.mark.parametrize("name", MASKS)
def test_bytes_and_pairs_are_exact_where_a_cell_is_one_position(name: str, mode: str, gradient: bool) -> None:
    ranks, sizes = 4, {"dim": 16, "value_dim": 8, "heads": 8, "kv_heads": 4}
    found = simulate(MASKS[name], N, ranks, FAST, mode=mode, gradient=gradient, operations_per_pair=3.0, **sizes)
    keys = [Shard.contiguous(N, rank, ranks) for rank in range(ranks)]
    queries = balanced_shards(MASKS[name], N, ranks, chunk=1) if mode == "gather" else keys
    if mode == "ring":
        queries = keys = [Shard.head_tail(N, rank, ranks) for rank in range(ranks)]
    expected = explain(MASKS[name], queries, keys, mode=mode, gradient="reduce" if gradient else "none", **sizes)
    sent = np.add(expected.forward_bytes, expected.backward_bytes)
    np.testing.assert_array_equal(found.bytes_sent, sent)
    np.testing.assert_array_equal(found.peak_memory, expected.peak_memory)
    seconds = np.array(exchange(MASKS[name], queries, keys).pairs) * 8 * 3.0 / 1e9 * (3.5 if gradient else 1)
    np.testing.assert_allclose(found.compute, np.full(ranks, seconds.mean()) if mode == "heads" else seconds)
    # With links that take no time, the last rank is done when it has computed.
    if mode != "ring":
        np.testing.assert_allclose(found.seconds, found.compute.max())
    assert found.seconds >= found.compute.max() * (1 - 1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_consecutive_parts(name: str) -> None:
    shards = consecutive_shards(MASKS[name], N, 4, chunk=1)
    for mode in ("gather", "ring"):
        found = simulate(MASKS[name], N, 4, FAST, dim=16, mode=mode, queries="consecutive", keys="consecutive")
        expected = explain(MASKS[name], shards, dim=16, mode=mode, gradient="none")
        np.testing.assert_array_equal(found.bytes_sent, expected.forward_bytes)
        np.testing.assert_array_equal(found.peak_memory, expected.peak_memory)


@pytest.mark.parametrize("name", MASKS)
def test_many_positions_in_a_cell_change_little(name: str) -> None:
    """The same mask at a hundred times the length, and each cell with hundreds of positions."""
    scale = 1000
    masks = MASKS | {
        "window": ats.SlidingWindow(left=40 * scale, right=3 * scale),
        "packed": ats.Packed([x * scale for x in (0, 100, 101, 600, 1024)]).causal(),
        "sinks": (ats.SlidingWindow(left=70 * scale, right=0) | ats.KeyRange(0, 4 * scale)) & ats.Causal(),
    }
    options = {"machine": Machine(1e12, 1e9), "dim": 8, "queries": "head_tail"}
    small = simulate(MASKS[name], N, 4, operations_per_pair=1000.0 * scale, **options)
    large = simulate(masks[name], N * scale, 4, operations_per_pair=1000.0, **options)
    np.testing.assert_allclose(large.bytes_sent, small.bytes_sent * scale, rtol=0.03)
    np.testing.assert_allclose(large.compute, small.compute * scale, rtol=0.03)


def test_one_rank_only_computes() -> None:
    for mode in ("gather", "ring", "heads"):
        found = simulate(None, N, 1, Machine(1e9, 1.0, 1.0), dim=4, mode=mode, gradient=True)
        np.testing.assert_allclose(found.seconds, 3.5 * N * N * (2 * 8 + 4) / 1e9)
        assert found.efficiency == pytest.approx(1) and not found.bytes_sent.any()


def test_overhead_is_added_to_every_call() -> None:
    for mode in ("gather", "ring", "heads"):
        options = {"dim": 4, "heads": 4, "mode": mode}
        plain, slow = (simulate(None, N, 4, Machine(1e9, 1e9, overhead=x), **options).seconds for x in (0.0, 2.0))
        assert slow == pytest.approx(plain + 2.0)


def test_links_take_latency_and_bytes() -> None:
    """Four ranks without a mask, each of which fetches three quarters of the keys."""
    sizes = {"dim": 32, "queries": "contiguous"}
    row = 2 * 32 * 4
    idle = Machine(flops=1e30, bandwidth=1e6, latency=0.5, overlap=False)
    assert simulate(None, N, 4, idle, **sizes).seconds == pytest.approx(3 * 0.5 + 768 * row / 1e6)
    ring = simulate(None, N, 4, idle, mode="ring", **sizes | {"queries": "head_tail"})
    assert ring.seconds == pytest.approx(3 * (0.5 + 256 * row / 1e6))
    heads = simulate(None, N, 4, idle, mode="heads", heads=4, **sizes)
    assert heads.seconds == pytest.approx(
        2 * 3 * 0.5 + (256 * 0.75 * 4 * (row + row / 2) + 256 * 0.75 * 4 * row / 2) / 1e6
    )


def test_messages_travel_while_a_rank_computes() -> None:
    row, pairs = 2 * 32 * 4, 256 * 256
    seconds = 256 * row / 1e6
    # A block takes as long to compute as to send.
    rates = {"flops": pairs / seconds, "bandwidth": 1e6}
    options = {"dim": 32, "operations_per_pair": 1.0, "queries": "contiguous"}
    for overlap, gather, ring in ((False, 3 + 4, 4 + 3), (True, 3 + 3, 4)):
        machine = Machine(**rates, overlap=overlap)
        assert simulate(None, N, 4, machine, **options).seconds == pytest.approx(gather * seconds)
        found = simulate(None, N, 4, machine, mode="ring", keys="contiguous", **options)
        assert found.seconds == pytest.approx(ring * seconds)


def test_head_tail_balances_every_step_of_a_causal_ring() -> None:
    options = {"dim": 8, "mode": "ring"}
    whole = simulate(ats.Causal(), N, 8, FAST, **options)
    parts = simulate(ats.Causal(), N, 8, FAST, queries="contiguous", keys="contiguous", **options)
    assert whole.efficiency > 0.99 and whole.compute.max() < 1.01 * whole.compute.mean()
    assert 0.5 < parts.efficiency < 0.6


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_many_ranks_and_100_million_tokens(mode: str) -> None:
    gpu = Machine(flops=4e14, bandwidth=5e10, latency=2e-5)
    found = simulate(ats.Causal(), 10**8, 64, gpu, dim=128, heads=32, kv_heads=8, dtype="bfloat16", mode=mode)
    assert found.efficiency > 0.99
    assert found.bytes_sent.max() == pytest.approx(10**8 * 63 / 64 * 8 * 256 * 2, rel=0.02)


BAD = {
    "mode": ({"mode": "tree"}, "mode: expected one of gather, ring, heads"),
    "heads": (
        {"mode": "heads", "heads": 4, "ranks": 3},
        "ranks: expected a number that divides 4 heads and 4 KV heads",
    ),
    "keys": ({"keys": "balanced"}, "keys: expected one of contiguous, head_tail, consecutive"),
    "mask": (
        {"mask": ats.Dense(np.random.default_rng(0).random((N, N)) < 0.5)},
        "mask: expected one with intervals for each query",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    options, text = BAD[name]
    with pytest.raises(ArgumentError, match=text):
        simulate(**({"mask": None, "length": N, "ranks": 2, "machine": FAST, "dim": 8} | options))
