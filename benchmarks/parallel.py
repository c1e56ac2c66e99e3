"""Measured times of `attnscore.parallel.torch`, and predictions of `simulate`: ``python benchmarks/parallel.py``.

Processes on this machine, over gloo, with one thread each; a forward and a backward, the least of several rounds. The
model's rates are measured too, with as many processes as run, which share cores and memory:

- the operations a second, without messages: each process computes the blocks of queries and keys that the mode gives it
  (in a ring, a rank's queries with the keys of one rank after another), as a pair takes longer in small blocks;
- the bytes a second of processes that send in a ring, all at once;
- the overhead of a call of few queries, the latency of its messages included.

Where ranks share cores, a core is idle while the last rank computes and the others wait for its message. The model
leaves that out.

Two processes are compared with one that computes the whole call in two threads, in turn with it: its peer waits.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import attnscore as ats
from attnscore.parallel import Shard, exchange, shard_mask
from attnscore.parallel.torch import attend
from bench.simulation import Machine, simulate

LENGTH, HEADS, DIM, ROUNDS = 4096, 4, 64, 15
MESSAGE = 2**22  # numbers whose bytes a second are measured
MASKS = {"causal": ats.Causal(), "window of 512": ats.SlidingWindow(left=511, right=0)}
MODES = ("gather", "ring", "heads")
OPERATIONS = 2 * (DIM + DIM) + 4


def main() -> None:
    """Print a row for each mask, mode and number of processes, then the largest error of the model."""
    bandwidths = {}
    for ranks in (2, 4):
        found = slowest(ranks, link)
        bandwidths[ranks] = 4 * MESSAGE / max(found["bytes"] - found["message"], 1e-9)
        print(f"link of {ranks} ranks: {bandwidths[ranks] / 1e9:.2f} GB/s")
    print(f"{os.cpu_count()} CPUs")
    print(f"{'mask':<16}{'mode':<8}{'ranks':>5}{'measured s':>12}{'predicted s':>13}{'error':>8}{'1 x 2 threads':>15}")
    errors = {}
    for name, mask in MASKS.items():
        pairs = simulate(mask, LENGTH, 1, Machine(1.0, 1.0), dim=DIM, operations_per_pair=1.0).seconds
        for ranks in (1, 2, 4):
            seconds = slowest(ranks, measure, name)
            # Over gloo the processes themselves copy the bytes, so messages do not overlap with the computation.
            for mode in MODES:
                flops = pairs / ranks * HEADS * OPERATIONS * 3.5 / seconds[f"compute {mode}"]
                overhead = seconds[f"tiny {mode}"]
                machine = Machine(flops, bandwidths[max(ranks, 2)], overlap=False, overhead=overhead)
                predicted = simulate(
                    mask, LENGTH, ranks, machine, dim=DIM, heads=HEADS, mode=mode, gradient=True,
                    queries="head_tail", keys="head_tail",
                ).seconds  # fmt: skip
                error = errors[name, mode, ranks] = predicted / seconds[mode] - 1
                row = f"{name:<16}{mode:<8}{ranks:>5}{seconds[mode]:>12.3f}{predicted:>13.3f}{error:>+8.0%}"
                threads = seconds.get("two threads")
                beside = "" if threads is None else f"{seconds[mode] / threads:>6.2f} of {threads:.3f}"
                print(f"{row}{beside:>15}".rstrip(), flush=True)
    worst = max(errors, key=lambda key: abs(errors[key]))
    print(f"the model is off by {errors[worst]:+.0%} at most: {worst[0]}, {worst[1]}, {worst[2]} ranks")


def slowest(ranks: int, function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Return the seconds of each call that a function times: the least round of the slowest rank.

    On few cores each rank has rounds in which others wait for it.
    """
    found = spawn(ranks, function, *arguments)
    return {what: min(map(max, zip(*(rank[what] for rank in found), strict=True))) for what in found[0]}


def spawn(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of a function in each process of a group."""
    with tempfile.NamedTemporaryFile() as file:
        answers = processes.get_context("spawn").SimpleQueue()
        processes.spawn(_run, (ranks, file.name, answers, function, arguments), nprocs=ranks)
        found = dict(answers.get() for _ in range(ranks))
    return [found[rank] for rank in range(ranks)]


def _run(
    rank: int, ranks: int, file: str, answers: Any, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}.group", rank=rank, world_size=ranks)
    answers.put((rank, function(rank, ranks, *arguments)))
    dist.destroy_process_group()


def timed(functions: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each round of each call, which all processes begin together, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS + 1):
        for name, function in functions.items():
            dist.barrier()
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: x[1:] for name, x in seconds.items()}


def link(rank: int, ranks: int) -> dict[str, list[float]]:
    """Return the seconds of small and large messages to the next rank, all at once."""
    arrays = {size: (torch.zeros(size), torch.zeros(size)) for size in (1, MESSAGE)}

    def send(size: int) -> None:
        mine, theirs = arrays[size]
        moves = [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    return timed({"message": partial(send, 1), "bytes": partial(send, MESSAGE)})


def measure(rank: int, ranks: int, name: str) -> dict[str, list[float]]:
    """Return the seconds of a rank's blocks in each mode alone, without messages, and of the call in each mode.

    A call of eight queries a rank takes the overhead of every call, its messages included. Of two ranks the first one
    also computes the call of both, in two threads.
    """
    mask, shards = MASKS[name], [Shard.head_tail(LENGTH, r, ranks) for r in range(ranks)]
    plan, whole = exchange(mask, shards, shards), Shard.whole(LENGTH)
    steps = [shards[(rank - step) % ranks] for step in range(ranks)]
    # Shards of queries and of keys, and the heads of each block.
    blocks = {
        "gather": [(shards[rank], plan.needed[rank], HEADS)],
        "ring": [(plan.attending_keys(shards[rank], keys), keys, HEADS) for keys in steps],
        "heads": [(whole, whole, HEADS // ranks)],
    }
    x = torch.randn(1, HEADS, len(shards[rank]), DIM, requires_grad=True)
    few = torch.randn(1, HEADS, 8, DIM, requires_grad=True)
    of_both = torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True)

    def two_threads() -> None:
        torch.set_num_threads(2)
        ats.attend(of_both, of_both, of_both, mask=mask).sum().backward()
        torch.set_num_threads(1)

    def sharded(mode: str) -> None:
        attend(x, x, x, group=None, queries=shards, mask=mask, mode=mode, gradient="reduce").sum().backward()

    def tiny(mode: str) -> None:
        attend(few, few, few, group=None, mask=mask, mode=mode, gradient="reduce").sum().backward()

    def block(queries: Shard, keys: Shard, heads: int) -> Callable[[], None]:
        query, key = (torch.randn(1, heads, len(rows), DIM, requires_grad=True) for rows in (queries, keys))
        local = shard_mask(mask, queries, keys, LENGTH, LENGTH)
        return lambda: ats.attend(query, key, key, mask=local).sum().backward()

    def computed(functions: Sequence[Callable[[], None]]) -> None:
        for function in functions:
            function()

    calls: dict[str, Callable[[], object]] = {}
    for mode in MODES:
        calls[f"compute {mode}"] = partial(computed, [block(*found) for found in blocks[mode] if len(found[0])])
        calls |= {mode: partial(sharded, mode), f"tiny {mode}": partial(tiny, mode)}
    if ranks == 2:
        calls["two threads"] = two_threads if rank == 0 else lambda: None
    return timed(calls)


if __name__ == "__main__":
    main()
