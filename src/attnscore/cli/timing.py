"""Timing of two sides in one process, alternating, so that disturbances of the machine affect both.

- Both sides are warm before the first round; short calls are repeated within a sample, so that the clock resolves them.
- The order within a round changes from round to round, and no side starts before the other's threads are idle.
- A ratio is the median of the ratios of the rounds, not the ratio of two medians: drift cancels in each round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Summary = dict[str, float]

_SAMPLE = 0.005  # seconds; 200 times the cost of a disturbed reading of the clock
_WARMING = 10  # calls
# Threads of libgomp and others go on spinning after a call, in case another comes: for as many pauses as they count,
# 7 to 9 ms on Zen 4. They must not do so on the other side's time.
_PAUSE = 0.002
_LONGEST_WAIT = 0.2
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Effort:
    """How long a pair of sides is timed: `min_rounds` to `max_rounds` rounds, about `seconds`."""

    min_rounds: int = 7
    max_rounds: int = 101
    seconds: float = 4.0


def alternate(ours: Callable[[], Any], theirs: Callable[[], Any], effort: Effort) -> tuple[list[float], list[float]]:
    """Return the seconds per call of both sides, one of each for every round."""
    sides = (ours, theirs)
    repeats = [_repeats(side) for side in sides]
    for side, repeat in zip(sides, repeats, strict=True):
        if repeat > 1:  # a long call was warm after its first; a KeOps one takes ten seconds
            _sample(side, min(repeat, 100))
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + effort.seconds
    while len(times[0]) < effort.min_rounds or (time.perf_counter() < end and len(times[0]) < effort.max_rounds):
        for index in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            _wait_until_idle()
            times[index].append(_sample(sides[index], repeats[index]))
    return times


def _repeats(side: Callable[[], Any]) -> int:
    """Return how many calls fill a sample, by the fastest of several: the first may take a hundred times as long."""
    seconds = _sample(side, 1)
    if seconds < 20 * _SAMPLE:
        seconds = min(seconds, *(_sample(side, 1) for _ in range(_WARMING)))
    return max(1, round(_SAMPLE / max(seconds, 1e-7)))


def _sample(side: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        side()
    return (time.perf_counter() - start) / repeat


def _wait_until_idle() -> None:
    """Wait until no other thread of this process runs; where that cannot be seen, for some milliseconds."""
    end = time.perf_counter() + _LONGEST_WAIT
    time.sleep(_PAUSE if _TASKS.exists() else 10 * _PAUSE)
    while _others_run() and time.perf_counter() < end:
        time.sleep(_PAUSE)


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(_state(task) == "R" for task in _TASKS.glob("*") if task.name != own)


def _state(task: Path) -> str:
    """Return a thread's state, R where it runs. Its name, in parentheses before, may hold anything."""
    try:
        return (task / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return ""


def summary(numbers: Sequence[float]) -> Summary:
    """Return median and quartiles."""
    q1, median, q3 = np.quantile(np.asarray(numbers, np.float64), (0.25, 0.5, 0.75))
    return {"median": float(median), "q1": float(q1), "q3": float(q3)}
