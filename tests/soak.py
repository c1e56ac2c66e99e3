"""``python tests/soak.py [--calls 1000000] [--minutes 15]``: mixed calls in one process, whose memory stays flat.

Each call draws its kind (forward, gradients, statistics and weights, a block, dropout, a plan, one that raises) and its
arguments: one of 60 that were drawn before, whose plans are cached, of which 1 in 40 calls replaces one. 1 in 100 is
compared with the dense kernel. What the process holds of memory, files and threads is counted after a tenth of the
calls, when all caches are full, and at the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import attnscore as ats

MOST_GROWTH = 8 * 2**20
"""Bytes by which the resident memory may grow: 10 for each of 10^6 calls."""
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}


class Held(NamedTuple):
    """What a process holds of the system."""

    memory: int
    files: int
    threads: int


def held() -> Held:
    """Return what this process holds, of Linux's own count."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]) * 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"]))


def scores(rng: np.random.Generator, dim: int, dtype: str) -> list[Any]:
    """Return a score of each kind for vectors of `dim`."""
    w_v, w_q, w_k = (rng.standard_normal(shape).astype(dtype) for shape in ((3,), (3, dim), (3, dim)))
    additive = [ats.Additive(w_v, w_q, w_k, activation=name) for name in ("tanh", "relu", "gelu")]
    products = [ats.Bilinear(rng.standard_normal((dim, dim)).astype(dtype)), ats.SoftCap("scaled_dot", 2.0)]
    return ["dot", "scaled_dot", "gaussian", "cosine", "sum", *additive, *products]


def mask(choose: random.Random, queries: int, keys: int) -> Any:
    """Return a mask of one of several kinds, for 2 batches."""
    kind = choose.randrange(7)
    if kind == 1:
        return ats.Causal("bottom_right")
    if kind == 2:
        return ats.SlidingWindow(3, 1, align="bottom_right")
    if kind == 3:
        return ats.ValidLens([keys, keys // 2])
    if kind == 4:
        return ats.Dense(np.arange(queries * keys).reshape(queries, keys) % 3 > 0)
    if kind == 5:
        return ats.MaskFunction(lambda batch, head, query, key: (query + key) % 2 == 0)
    return ats.Causal("bottom_right") & ats.ValidLens([keys // 2, keys]) if kind == 6 else None


class Call(NamedTuple):
    """Arguments of a call."""

    dtype: str
    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any]


def draw(choose: random.Random, numbers: dict[str, np.ndarray], every_score: dict[Any, list[Any]]) -> Call:
    """Draw sizes, dtype, score and mask."""
    dtype, dim = choose.choice(list(TOLERANCES)), choose.choice((4, 8))
    queries, keys = choose.randrange(1, 20), choose.randrange(1, 70)
    arrays = tuple(numbers[dtype][:, :, :length, :dim] for length in (queries, keys, keys))
    return Call(dtype, arrays, {"score": choose.choice(every_score[dtype, dim]), "mask": mask(choose, queries, keys)})


def one_call(choose: random.Random, call: Call) -> str | None:
    """Make one call; return what was wrong with it."""
    (query, key, value), options = call.arrays, call.options
    kind = choose.randrange(40)
    if kind % 8 == 0:
        out, pullback = ats.attend_vjp(query, key, value, **options)
        pullback(out)
    elif kind == 1:
        out, *_ = ats.attend(query, key, value, return_weights=True, return_stats=True, **options)
    elif kind == 2:
        ats.attention_weights(query, key, query_index=[0], **options)
        return None
    elif kind == 3:
        str(ats.explain(query, key, value, **options))
        return None
    elif kind == 4:
        try:
            ats.attend(query, key, value[:, :, :-1], **options)
        except ats.ShapeError:
            return None
        return "a wrong shape was not refused"
    elif kind == 5:
        out = ats.attend(query, key, value, dropout=0.3, seed=choose.randrange(9), **options)
        return None if np.isfinite(out).all() else "dropout gave what is not finite"
    else:
        out = ats.attend(query, key, value, **options)
    if choose.randrange(100) == 0:
        wanted = ats.attend(query, key, value, kernel="dense", **options)
        error = float(np.abs(out.astype(float) - wanted.astype(float)).max())
        if not error <= TOLERANCES[call.dtype] * max(1.0, float(np.abs(wanted).max())):
            return f"off by {error:.2g}: {call.dtype}, {query.shape[-2]} queries, {key.shape[-2]} keys, {options}"
    return None


def main() -> int:
    """Run the calls; return 1 where one was wrong or something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=15.0, help="stop here, with however many calls there were")
    options = parser.parse_args()
    rng, choose = np.random.default_rng(0), random.Random(0)
    numbers = {dtype: rng.standard_normal((2, 2, 70, 8)).astype(dtype) for dtype in TOLERANCES}
    every_score = {(dtype, dim): scores(rng, dim, dtype) for dtype in TOLERANCES for dim in (4, 8)}
    pool = [draw(choose, numbers, every_score) for _ in range(60)]
    start, warm, calls, wrong = time.perf_counter(), held(), 0, 0
    while calls < options.calls and time.perf_counter() - start < 60 * options.minutes:
        place = choose.randrange(len(pool))
        if choose.randrange(40) == 0:
            pool[place] = draw(choose, numbers, every_score)
        if (problem := one_call(choose, pool[place])) is not None:
            wrong += 1
            print(f"call {calls}: {problem}", flush=True)
        calls += 1
        if calls == options.calls // 10:
            warm = held()
            print(f"after {calls} calls: {warm}", flush=True)
    end = held()
    grown = end.memory - warm.memory
    print(f"after {calls} calls: {end}, memory {grown / 2**20:+.1f} MiB, {time.perf_counter() - start:.0f} s")
    flat = grown <= MOST_GROWTH and end.files <= warm.files and end.threads <= warm.threads
    print(f"{wrong} wrong; memory, files and threads {'are flat' if flat else 'GREW'}")
    return int(wrong > 0 or not flat)


if __name__ == "__main__":
    sys.exit(main())
