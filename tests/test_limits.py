"""Sizes that no address space holds, and memory that runs out: an error that says so, and a process that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import attnscore as ats
from cases import KERNELS, needs_native

ONE = np.ones((1, 1, 1, 4), np.float32)
LARGE = 2**31


def widened(*shape: int) -> np.ndarray:
    """A view of that shape in no memory."""
    return np.broadcast_to(ONE[..., : shape[-1]], shape)


OVERFLOWS: dict[str, tuple[np.ndarray, ...]] = {
    "queries": (widened(1, 1, 2**50, 4), ONE, ONE),
    "batch axes": (widened(LARGE, 1, 1, 4), *[widened(1, LARGE, 1, 4)] * 2),
    "queries and values": (widened(1, 1, 2**40, 4), ONE, np.broadcast_to(ONE[..., :1], (1, 1, 1, 2**40))),
    "batch and queries": (widened(1, 1, 2**40, 4), *[widened(2**40, 1, 1, 4)] * 2),
    "heads and keys": (widened(1, 2**40, 1, 4), *[widened(1, 1, 2**40, 4)] * 2),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", OVERFLOWS)
def test_sizes_whose_product_overflows(case: str, kernel: str) -> None:
    expected = r"query, key, value: expected axes whose product is at most 17592186044416, got \d{15,}; shapes: query"
    for options in ({}, {"return_weights": True}, {"score": "gaussian"}, {"mask": ats.Causal("bottom_right")}):
        with pytest.raises(ats.ShapeError, match=expected):
            ats.attend(*OVERFLOWS[case], kernel=kernel, **options)
    with pytest.raises(ats.ShapeError, match="axes whose product"):
        ats.attend_vjp(*OVERFLOWS[case])
    with pytest.raises(ats.ShapeError, match="query, key: expected axes whose product"):
        ats.attention_weights(*[x[..., :4] for x in OVERFLOWS["batch axes"][:2]])


# Each call runs in a thread of its own, whose scratch memory is new, with so many KiB left to the process.
EXHAUSTED = """
import collections, resource, sys, threading
import numpy as np
import attnscore as ats

kernel = sys.argv[1]
x = np.random.default_rng(0).standard_normal((1, 4, 700, 64)).astype(np.float32)

def forward(): return ats.attend(x, x, x, kernel=kernel)
def causal(): return ats.attend(x, x, x, kernel=kernel, mask=ats.Causal())
def weights(): return ats.attend(x, x, x, kernel=kernel, return_weights=True)[1]
def backward():
    out, pullback = ats.attend_vjp(x, x, x, kernel=kernel)
    return pullback(out).query

calls = (forward, causal, weights, backward)
ats.set_num_threads(2)
expected = [call() for call in calls]  # first, so that NumPy's own libraries have the memory that they keep
found = collections.Counter()

def try_one(call, wanted):
    try:
        same = np.array_equal(call(), wanted)
        found["done" if same else "WRONG"] += 1
    except MemoryError as error:
        found["native" if "bad_alloc" in str(error) else "array"] += 1

_, hard = resource.getrlimit(resource.RLIMIT_AS)
for room in (0, 100, 300, 700, 1000, 1500, 2000, 2500, 3000, 4000, 5000, 6000, 8000, 10000, 14000, 20000):
    for call, wanted in zip(calls, expected):
        ready = threading.Event()
        # The thread has its stack before memory is short.
        runner = threading.Thread(target=lambda: (ready.wait(), try_one(call, wanted)))
        runner.start()
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + room * 1024, hard))
        ready.set()
        runner.join()
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        try_one(call, wanted)  # and with memory again
print(*(found[name] for name in ("done", "array", "native", "WRONG")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process as Linux has them")
@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "streaming"])
def test_a_process_without_memory_gets_memory_errors_and_goes_on(kernel: str) -> None:
    # What is freed goes back to the system, so that it counts as memory that the process lacks.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    # Its threads end the process where they get no memory (docs/reliability.md).
    allocator["OPENBLAS_NUM_THREADS"] = "1"
    done: Any = subprocess.run(
        [sys.executable, "-c", EXHAUSTED, kernel],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **allocator},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    complete, array, native, wrong = map(int, done.stdout.split())
    assert wrong == 0 and complete + array + native == 128
    # One of each two calls had the memory that it needs; of the others, some met the limit.
    assert complete >= 64 and array > 0
    assert (native > 0) == (kernel == "native")
