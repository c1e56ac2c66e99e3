"""Figures of single pages that are no case of the benchmark: ``python benchmarks/page_figures.py [NAME ...]``.

Times are ratios, medians of rounds in which both sides alternate, on one thread: rough next to other work.
Memory is the peak of the process minus its memory before, in MB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

for _pool in ("OMP", "OPENBLAS", "MKL"):  # read when the libraries are loaded
    os.environ[f"{_pool}_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402 - after the settings of the pools
import torch  # noqa: E402

import attnscore as ats  # noqa: E402
from attnscore.cli.timing import Effort, alternate, summary  # noqa: E402
from bench.machine import set_threads  # noqa: E402
from bench.measure import memory, reset_peak  # noqa: E402

ROUNDS = Effort(min_rounds=7, max_rounds=7, seconds=0.0)


def ratios(base: Callable[[], object], sides: dict[str, Callable[[], object]]) -> None:
    """Print the time of each side divided by that of the base."""
    for name, call in sides.items():
        times = alternate(base, call, ROUNDS)
        ratio, own = summary([b / a for a, b in zip(*times, strict=True)]), summary(times[1])
        print(f"  {name:<34} {ratio['median']:.2f} times ({own['median'] * 1e3:.0f} ms)")


def sinks() -> None:
    """docs/masks.md: sinks and a window at 8192 tokens, 4 heads of 64."""
    x = np.random.default_rng(0).normal(size=(3, 1, 4, 8192, 64)).astype("float32")
    window = ats.Causal() & ats.SlidingWindow(left=255)
    both = window | ats.KeyRange(0, 4) & ats.Causal()
    ratios(
        lambda: ats.attend(*x, mask=window),
        {
            "window and sinks": lambda: ats.attend(*x, mask=both),
            "window and sinks, streaming": lambda: ats.attend(*x, mask=both, kernel="streaming"),
        },
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
    sides = {"2048 tokens with T5's table": lambda: with_table(inputs, biased=True)}
    ratios(lambda: with_table(inputs, biased=False), sides)
    inputs = heads(16_384)
    reset_peak()
    before = memory("VmRSS")
    with_table(inputs, biased=True)
    arrays = 4 * inputs[0].numel() * 4  # the output and three gradients
    over = memory("VmHWM") - before - arrays
    print(f"  16,384 tokens: {over / 1e6:.0f} MB beyond inputs, output and gradients")


def maps() -> None:
    """docs/looking.md: summaries of the matrix against a forward pass, 4096 tokens, 4 heads of 64."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 4, 4096, 64)).astype("float32")
    scattered = ats.KeyPadding(np.random.default_rng(1).random((1, 4096)) < 0.5)
    ratios(
        lambda: ats.attend(query, key, value),
        {
            "pooled_weights": lambda: ats.pooled_weights(query, key),
            "key_mass": lambda: ats.key_mass(query, key),
            "top_weights, k 8": lambda: ats.top_weights(query, key, 8),
            "top_weights, scattered mask": lambda: ats.top_weights(query, key, 8, mask=scattered),
        },
    )


FIGURES = {"sinks": sinks, "relative": relative, "maps": maps}


def main(names: list[str]) -> None:
    """Measure the named figures, or all."""
    if unknown := [name for name in names if name not in FIGURES]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(FIGURES)}")
    set_threads(1)
    for name in names or FIGURES:
        print(name)
        FIGURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
