"""``python tests/soak.py [--calls 1000000] [--minutes 15]``: mixed calls in one process, whose memory stays flat.

Each call draws its kind (forward, gradients, statistics and weights, a block, dropout, prepared keys, a plan, one that
raises) and its arguments: one of 60 that were drawn before, whose plans are cached. 1 call in 40 replaces one of them,
and 1 in 100 is compared with the reference kernel. What the process holds of memory, files and threads is counted after
a tenth of the calls, when all caches are full, and at the end.

``--threads 8``: so many threads share the calls, of up to 600 that were drawn before. Each result has to have the bits
of the same call of one thread, made when all have ended, which is compared with the reference kernel.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    causal = ats.Causal("bottom_right")
    kinds = (
        None,
        causal,
        ats.SlidingWindow(3, 1, align="bottom_right"),
        ats.ValidLens([keys, keys // 2]),
        ats.Dense(np.arange(queries * keys).reshape(queries, keys) % 3 > 0),
        ats.MaskFunction(lambda batch, head, query, key: (query + key) % 2 == 0),
        causal & ats.ValidLens([keys // 2, keys]),
        ats.Neighbours(np.arange(queries + 1), np.arange(queries) % keys),
    )
    return kinds[choose.randrange(8)]


class Call(NamedTuple):
    """Arguments of a call."""

    dtype: str
    arrays: tuple[np.ndarray, ...]
    options: dict[str, Any]


def draw(choose: random.Random) -> Iterator[Call]:
    """Yield calls without end: drawn sizes, dtype, score and mask."""
    rng = np.random.default_rng(0)
    numbers = {dtype: rng.standard_normal((2, 2, 70, 8)).astype(dtype) for dtype in TOLERANCES}
    every_score = {(dtype, dim): scores(rng, dim, dtype) for dtype in TOLERANCES for dim in (4, 8)}
    while True:
        dtype, dim = choose.choice(list(TOLERANCES)), choose.choice((4, 8))
        queries, keys = choose.randrange(1, 20), choose.randrange(1, 70)
        arrays = tuple(numbers[dtype][:, :, :length, :dim] for length in (queries, keys, keys))
        score = choose.choice(every_score[dtype, dim])
        yield Call(dtype, arrays, {"score": score, "mask": mask(choose, queries, keys)})


def results(call: Call, kind: int, kernel: str = "auto") -> list[np.ndarray]:
    """Return all arrays that a call of one kind gives."""
    (query, key, value), options = call.arrays, call.options | {"kernel": kernel}
    if kind % 8 == 0:
        out, pullback = ats.attend_vjp(query, key, value, **options)
        gradients = pullback(out)
        return [out, *gradients[:3], *gradients.score.values()]
    if kind == 1:
        out, weights, stats = ats.attend(query, key, value, return_weights=True, return_stats=True, **options)
        return [out, weights, *stats]
    if kind == 2:
        return [ats.attention_weights(query, key, query_index=[0], **call.options)]
    if kind == 5:
        return [ats.attend(query, key, value, dropout=0.3, seed=9, **options)]
    if kind == 6:
        return [ats.attend(query, ats.prepare_keys(options.pop("score"), key), value, **options)]
    return [ats.attend(query, key, value, **options)]


def difference(call: Call, kind: int, outputs: list[np.ndarray]) -> str | None:
    """Return how the arrays of a call differ from the reference kernel's, or None."""
    has_gradients = kind % 8 == 0
    # The dense kernel has no gradients in NumPy.
    expected = results(call, kind, "streaming" if has_gradients else "dense")
    largest = [max(1.0, float(np.abs(y[np.isfinite(y)]).max(initial=0))) for y in expected]
    if has_gradients:  # terms of a gradient may cancel, so that all its numbers are small
        largest[1:] = [max(largest[1:])] * len(largest[1:])
    for x, y, scale in zip(outputs, expected, largest, strict=True):
        if y.dtype.kind != "f":  # the key of the largest score, of which two may be as large
            continue
        with np.errstate(invalid="ignore"):
            error = float(np.where(x == y, 0, np.abs(x.astype(float) - y)).max())
        if not error <= TOLERANCES[call.dtype] * scale:
            sizes = f"{call.arrays[0].shape[-2]} queries, {call.arrays[1].shape[-2]} keys"
            return f"off by {error:.2g}: kind {kind}, {call.dtype}, {sizes}, {call.options}"
    return None


def one_call(choose: random.Random, call: Call) -> str | None:
    """Make one call; return what was wrong with it."""
    query, key, value = call.arrays
    kind = choose.randrange(40)
    if kind == 3:
        str(ats.explain(query, key, value, **call.options))
        return None
    if kind == 4:
        try:
            ats.attend(query, key, value[:, :, :-1], **call.options)
        except ats.ShapeError:
            return None
        return "a wrong shape was not refused"
    outputs = results(call, kind)
    return difference(call, kind, outputs) if choose.randrange(100) == 0 else None


def wrong_in_threads(count: int, threads: int) -> int:
    """Make calls in several threads at once; return how many of the drawn calls gave a wrong result."""
    choose = random.Random(0)
    drawn = [(call, choose.randrange(8)) for call in itertools.islice(draw(choose), min(count, 600))]
    bits: list[set[bytes]] = [set() for _ in drawn]

    def bits_of(outputs: list[np.ndarray]) -> bytes:
        return b"".join(x.tobytes() for x in outputs)

    def work(thread: int) -> None:
        # Two threads each make the same calls at about the same time.
        order = random.Random(thread // 2).sample(range(len(drawn)), len(drawn))
        for place in itertools.islice(itertools.cycle(order), count // threads):
            bits[place].add(bits_of(results(*drawn[place])))

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, range(threads)))
    wrong = 0
    for (call, kind), of_threads in zip(drawn, bits, strict=True):
        outputs = results(call, kind)
        has_same_bits = of_threads <= {bits_of(outputs)}
        problem = difference(call, kind, outputs) if has_same_bits else f"other bits: kind {kind}, {call.options}"
        if problem is not None:
            wrong += 1
            print(problem, flush=True)
    return wrong


def main() -> int:
    """Run the calls; return 1 where one was wrong or something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=15.0, help="stop here, with however many calls there were")
    parser.add_argument("--threads", type=int, default=0, help="compare calls of so many threads with those of one")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.threads:
        wrong = wrong_in_threads(options.calls, options.threads)
        lock = "with" if getattr(sys, "_is_gil_enabled", lambda: True)() else "without"
        text = f"{options.calls} calls, {options.threads} at a time, {lock} Python's lock: {wrong} wrong"
        print(f"{text}, {time.perf_counter() - start:.0f} s")
        return int(wrong > 0)
    choose = random.Random(0)
    source = draw(choose)
    pool = list(itertools.islice(source, 60))
    warm, calls, wrong = held(), 0, 0
    while calls < options.calls and time.perf_counter() - start < 60 * options.minutes:
        place = choose.randrange(len(pool))
        if choose.randrange(40) == 0:
            pool[place] = next(source)
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
