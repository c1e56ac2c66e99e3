"""The least time of each case of the GPU benchmark on an H200: computed from its data sheet, never measured.

``python -m attnscore.bench.gpu_limits`` prints the table of docs/gpu.md. A limit is that of the unit that takes
longest; loads, addresses and what units wait for each other come on top. `gpu_shares` predicts how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnscore.bench import gpu_shares
from attnscore.bench.gpu import CASES, Case

_CLOCKS = 132 * 1.98e9
"""Multiprocessors times clocks a second."""
SPECIAL, FLOAT32 = 16 * _CLOCKS, 128 * _CLOCKS
"""Special functions and float32 instructions a second."""
PRODUCTS = {"bfloat16": 989e12, "float16": 989e12, "float32": 494.5e12 / 3}
"""Operations of matrix units a second; a product of float32 is three of TF32."""
BANDWIDTH = 4.8e12
"""Bytes a second."""


@dataclass(frozen=True)
class Work:
    """What one pass does: products of matrices, special functions and float32 instructions for each unmasked pair.

    `channels` has special functions and float32 instructions for each pair and channel of an additive score.
    """

    products: int
    special: float
    float32: float
    arrays: int
    """Arrays of the size of the query that are read or written."""
    channels: tuple[float, float] = (0.0, 0.0)


# Scaled products: s and the output; then s, dp, dq for queries and s, dp, dk, dv for keys. A softmax takes an
# exponential, a multiply-add, a maximum and a sum; its gradient an exponential, a multiply-add, a sum and a product.
DOT = Work(2, 1, 3, 4), Work(7, 2, 6, 8)
# An additive score: the output; then dp and dv, the scores again, and a gradient for each side (docs/gpu.md).
ADDITIVE = Work(1, 1, 3, 4, (0.25, 3.5)), Work(2, 1, 3, 8, (1.25, 14.5))
STATISTICS = 4
"""Float32 instructions for each pair that sum the statistics."""


def unmasked_pairs(case: Case) -> int:
    """Return the unmasked pairs of all heads."""
    batch, heads, length, _ = case.shape
    if case.mask is None:
        return batch * heads * length**2
    found = case.mask.interval_set(length, length)
    return batch * heads * int((found.stop - found.start).clip(0).sum())


def times(case: Case, pass_: int) -> dict[str, float]:
    """Return the seconds that each unit takes at least, forward (0) or backward (1)."""
    work = (ADDITIVE if case.score == "additive" else DOT)[pass_]
    pairs, dim = unmasked_pairs(case), case.shape[-1]
    special, float32 = work.channels
    of_statistics = STATISTICS if case.options and pass_ == 0 else 0
    size = 4 if case.dtype == "float32" else 2
    return {
        "matrix units": pairs * work.products * 2 * dim / PRODUCTS[case.dtype],
        "special functions": pairs * (work.special + special * dim) / SPECIAL,
        "float32": pairs * (work.float32 + of_statistics + float32 * dim) / FLOAT32,
        "memory": work.arrays * math.prod(case.shape) * size / BANDWIDTH,
    }


def predicted(case: Case, pass_: int) -> tuple[float, float]:
    """Return the shares of the limit that are predicted where units take turns, and where they overlap entirely."""
    least = times(case, pass_)
    in_turn, overlapped = (
        max(least["memory"], time) for time in gpu_shares.seconds(case, pass_, _CLOCKS, PRODUCTS[case.dtype])
    )
    return max(least.values()) / in_turn, max(least.values()) / overlapped


def table() -> str:
    """Return the table of all cases in Markdown."""
    lines = ["| case | pass | least time, ms | by | next | predicted share |", "|---|---|---|---|---|---|"]
    for case in CASES:
        for pass_, name in enumerate(("forward", "backward")):
            (unit, time), (second, below) = sorted(times(case, pass_).items(), key=lambda x: -x[1])[:2]
            low, high = predicted(case, pass_)
            share = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
            of_next = f"{second}, {below / time:.0%}"
            lines.append(f"| {case.name} | {name} | {time * 1e3:.3f} | {unit} | {of_next} | {share} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
