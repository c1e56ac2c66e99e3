"""Figures of single pages that are no case of the benchmark: ``python benchmarks/page_figures.py [NAME ...]``.

Times are medians of rounds in which all sides alternate, on one thread, as ratios: rough next to other work.
Memory is the peak of a separate process minus its memory before, in MB.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

for _pool in ("OMP", "OPENBLAS", "MKL"):  # read when the libraries are loaded
    os.environ[f"{_pool}_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402 - after the settings of the pools
import torch  # noqa: E402

import attnscore as ats  # noqa: E402

ROUNDS = 7


def ratios(sides: dict[str, Callable[[], object]]) -> None:
    """Print the time of every side divided by the first side's."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for done in range(ROUNDS + 1):  # the first warms up
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            times[name] += [time.perf_counter() - start] if done else []
    first = next(iter(times.values()))
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        print(f"  {name:<34} {ratio:.2f} times ({statistics.median(found) * 1e3:.0f} ms)")


def sinks() -> None:
    """docs/masks.md: sinks and a window at 8192 tokens, 4 heads of 64."""
    x = np.random.default_rng(0).normal(size=(3, 1, 4, 8192, 64)).astype("float32")
    window = ats.Causal() & ats.SlidingWindow(left=255)
    both = window | ats.KeyRange(0, 4) & ats.Causal()
    ratios(
        {
            "window": lambda: ats.attend(*x, mask=window),
            "window and sinks": lambda: ats.attend(*x, mask=both),
            "window and sinks, streaming": lambda: ats.attend(*x, mask=both, kernel="streaming"),
        }
    )


def with_table(inputs: list[torch.Tensor], *, biased: bool) -> None:
    """Run forward and backward, with a table of T5's as bias or without."""
    table, length = torch.nn.Embedding(32, 8), inputs[0].shape[2]
    bias = None
    if biased:
        buckets = torch.tensor(ats.relative_buckets(ats.relative_positions(length, length)))
        bias = table(buckets).T[:, None]
    for x in inputs:
        x.grad = None
    ats.attend(*inputs, bias=bias).sum().backward()


def heads(length: int) -> list[torch.Tensor]:
    """Return query, key and value of 8 heads of 64."""
    torch.manual_seed(0)
    return [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]


def relative() -> None:
    """docs/relative-bias.md: a bias by distance, T5's table and its gradient included."""
    inputs = heads(2048)
    ratios(
        {
            "2048 tokens, no bias": lambda: with_table(inputs, biased=False),
            "with T5's table": lambda: with_table(inputs, biased=True),
        }
    )
    out = subprocess.run([sys.executable, __file__, "relative-memory"], capture_output=True, text=True, check=True)
    print(out.stdout, end="")


def relative_memory() -> None:
    """Print the peak of 16,384 tokens minus the process's memory with its inputs, less output and gradients."""
    with_table(heads(64), biased=True)
    inputs = heads(16_384)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with_table(inputs, biased=True)
    over = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    arrays = 4 * inputs[0].numel() * 4  # the output and three gradients
    print(f"  16,384 tokens: {(over - arrays) / 1e6:.0f} MB beyond inputs, output and gradients")


def maps() -> None:
    """docs/looking.md: summaries of the matrix against a forward pass, 4096 tokens, 4 heads of 64."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 4, 4096, 64)).astype("float32")
    scattered = ats.KeyPadding(np.random.default_rng(1).random((1, 4096)) < 0.5)
    ratios(
        {
            "attend": lambda: ats.attend(query, key, value),
            "pooled_weights": lambda: ats.pooled_weights(query, key),
            "key_mass": lambda: ats.key_mass(query, key),
            "top_weights, k 8": lambda: ats.top_weights(query, key, 8),
            "top_weights, scattered mask": lambda: ats.top_weights(query, key, 8, mask=scattered),
        }
    )


FIGURES = {"sinks": sinks, "relative": relative, "maps": maps, "relative-memory": relative_memory}


def main(names: list[str]) -> None:
    """Measure the named figures, or all."""
    if unknown := [name for name in names if name not in FIGURES]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(FIGURES)}")
    ats.set_num_threads(1)
    torch.set_num_threads(1)
    for name in names or [name for name in FIGURES if name != "relative-memory"]:
        if name != "relative-memory":
            print(name)
        FIGURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
