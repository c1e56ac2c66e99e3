"""What this machine can do, as far as libraries reach it: the rates that a case's own are held against.

What this module meets:
- products of large matrices, and reading an array that no cache holds, on the threads of the measuring process;
- the best of a few rounds: a limit is not exceeded by accident;
- these are lower bounds of the machine's peaks. A library may use half of the registers' width, and then a kernel that
  uses all of it is above the "limit".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from attnscore.bench import machine
from attnscore.bench.cases import Case
from attnscore.bench.timing import Effort


def measure_limits(case: Case, threads: int, effort: Effort) -> dict[str, Any]:
    """The row of a case of limits: operations per second of products by dtype, bytes read per second."""
    import torch

    machine.set_threads(threads)
    side, rng = case.sizes["side"], np.random.default_rng(0)
    a = rng.standard_normal((side, side), dtype=np.float32)
    single = torch.from_numpy(a)
    half, numbers = single.bfloat16(), torch.from_numpy(rng.standard_normal(case.sizes["numbers"], dtype=np.float32))
    product = {
        # NumPy's and PyTorch's BLAS are not the same library: which is faster depends on the CPU.
        "float32": max(_rate(side, effort, lambda: a @ a), _rate(side, effort, lambda: single @ single)),
        "bfloat16": _rate(side, effort, lambda: half @ half),
    }
    return {
        "kind": "limits", "case": case.name, "what": case.what, "status": "measured", "reason": None,
        "threads": threads, "products": product, "reading": numbers.nbytes / _least(effort, numbers.sum),
    }  # fmt: skip


def _rate(side: int, effort: Effort, product: Callable[[], Any]) -> float:
    return 2 * side**3 / _least(effort, product)


def _least(effort: Effort, work: Callable[[], Any]) -> float:
    """Seconds of the quickest round."""
    work()
    times = []
    for _ in range(effort.least):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
