"""Measured times of `attnscore.parallel.torch` and those that `simulate` predicts: ``python benchmarks/parallel.py``.

Processes on this machine, over gloo, with one thread each; two masks and two modes, a forward and a backward. The
model's rates are measured first: operations a second of one process alone, of as many processes as will run (they share
cores and memory), and the bytes a second that two processes send each other at once.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import attnscore as ats
from attnscore.parallel import Machine, Shard, simulate
from attnscore.parallel.torch import attend

LENGTH, HEADS, DIM, ROUNDS = 8192, 4, 64, 5
MASKS = {"causal": ats.Causal(), "window of 1024": ats.SlidingWindow(left=1023, right=0)}
OPERATIONS = 2 * (DIM + DIM) + 4


def main() -> None:
    """Print a row for each mask, mode and number of processes."""
    latency, bandwidth = spawn(2, link)[0]
    print(f"link: {bandwidth / 1e9:.2f} GB/s, {1e6 * latency:.0f} us a message; {os.cpu_count()} CPUs")
    print(f"{'mask':<16}{'mode':<8}{'ranks':>5}{'measured s':>12}{'predicted s':>13}{'ratio':>7}")
    for name, mask in MASKS.items():
        for mode in ("gather", "ring"):
            for ranks in (1, 2, 4):
                alone = max(spawn(ranks, compute, name))
                pairs = simulate(mask, LENGTH, 1, Machine(1.0, 1.0), dim=DIM, operations_per_pair=1.0).seconds
                flops = pairs / ranks * HEADS * OPERATIONS * 3.5 / alone
                machine = Machine(flops, bandwidth, latency, overlap=ranks < (os.cpu_count() or 1))
                found = simulate(
                    mask, LENGTH, ranks, machine, dim=DIM, heads=HEADS, mode=mode, gradient=True,
                    queries="head_tail", keys="head_tail",
                )  # fmt: skip
                measured = max(spawn(ranks, sharded, name, mode))
                row = f"{name:<16}{mode:<8}{ranks:>5}{measured:>12.3f}{found.seconds:>13.3f}"
                print(f"{row}{found.seconds / measured:>7.2f}", flush=True)


def spawn(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what a function returns in each process of a group."""
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


def timed(function: Callable[[], object]) -> float:
    """Return the median seconds of a call that all processes begin together."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def link(rank: int, ranks: int) -> tuple[float, float]:
    """Return the latency and the bytes a second of two processes that send to each other at once."""
    found = {}
    for size in (1, 2**22):
        mine, theirs = torch.zeros(size), torch.zeros(size)

        def exchange(mine: torch.Tensor = mine, theirs: torch.Tensor = theirs) -> None:
            moves = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
            for work in dist.batch_isend_irecv(moves):
                work.wait()

        found[size] = timed(exchange)
    return found[1], 4 * 2**22 / max(found[2**22] - found[1], 1e-9)


def inputs(rank: int, ranks: int) -> tuple[list[Shard], torch.Tensor]:
    """Return who holds what, and the rows of this rank."""
    shards = [Shard.head_tail(LENGTH, r, ranks) for r in range(ranks)]
    generator = torch.Generator().manual_seed(rank)
    return shards, torch.randn(1, HEADS, len(shards[rank]), DIM, generator=generator, requires_grad=True)


def compute(rank: int, ranks: int, name: str) -> float:
    """Return the seconds of as many pairs as a rank has, without messages: every process runs a part of the heads."""
    shape = (1, 1, LENGTH, DIM)
    x = torch.randn(shape, requires_grad=True)

    def call() -> None:
        for _ in range(HEADS // ranks):
            ats.attend(x, x, x, mask=MASKS[name]).sum().backward()

    return timed(call)


def sharded(rank: int, ranks: int, name: str, mode: str) -> float:
    """Return the seconds of the sharded call."""
    shards, x = inputs(rank, ranks)

    def call() -> None:
        attend(x, x, x, group=None, queries=shards, mask=MASKS[name], mode=mode).sum().backward()

    return timed(call)


if __name__ == "__main__":
    main()
