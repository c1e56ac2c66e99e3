"""What happens inside a measuring process: one case on so many threads, correctness first.

What this module meets:
- a side is timed only after its result has been compared with the reference; our own wrong result ends the case with
  `WrongResult`, a peer's takes that peer out;
- memory is the peak of this process over what it had before the arrays were made, warm libraries included.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from attnscore.bench import machine
from attnscore.bench.cases import Case
from attnscore.bench.inputs import Inputs, Side, draw, kernel_of, ours
from attnscore.bench.peers import PEERS, Unavailable, textbook
from attnscore.bench.reference import Reference, WrongResult, reference
from attnscore.bench.timing import Effort, alternate, summary

Row = dict[str, Any]

# A peer's own accuracy is not our business; that it computes the same function is.
_SLACK = 1000.0
_WARM = 64  # tokens of the call that loads what libraries load lazily


def time_case(case: Case, threads: int, effort: Effort) -> list[Row]:
    """One row for each peer of a case."""
    machine.set_threads(threads)
    inputs = draw(case)
    exact = reference(inputs)
    mine = ours(inputs)
    error = exact.check(f"{case.name}, attnscore", mine.outputs(mine.run()))
    about: Row = {
        "kind": "time", "case": case.name, "what": case.what, "threads": threads, "kernel": kernel_of(inputs),
        "work": case.work(), "accuracy": error,
    }  # fmt: skip
    return [{**about, **_against(peer, inputs, mine, exact, threads, effort)} for peer in case.peers]


def _against(peer: str, inputs: Inputs, mine: Side, exact: Reference, threads: int, effort: Effort) -> Row:
    goal = inputs.case.peers[peer]
    must = None if goal is None else goal.on(threads)
    row: Row = {
        "peer": peer, "status": "measured", "reason": None, "must": must,
        "moonshot": goal and goal.moonshot, "at_most": bool(goal and goal.at_most), "reached": None,
        "rounds": 0, "ours": None, "theirs": None, "ratio": None,
    }  # fmt: skip
    try:
        theirs = PEERS[peer](inputs)
        found = theirs.outputs(theirs.run())
        if theirs.same:
            exact.check(f"{inputs.case.name}, {peer}", found, slack=_SLACK)
    except Unavailable as reason:
        return {**row, "status": "not run", "reason": str(reason)}
    except WrongResult as wrong:
        return {**row, "status": "not run", "reason": f"its result is another one: {wrong}"}
    except Exception as error:  # a peer may fail in ways of its own: a compiler that is missing, an operator
        return {**row, "status": "not run", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    times = alternate(mine.run, theirs.run, effort)
    pairs = zip(*times, strict=True)
    ratio = summary([a / b if row["at_most"] else b / a for a, b in pairs])
    if must is not None:
        row["reached"] = ratio["median"] <= must if row["at_most"] else ratio["median"] >= must
    return {**row, "rounds": len(times[0]), "ours": summary(times[0]), "theirs": summary(times[1]), "ratio": ratio}


def measure_point(case: Case, side: str, length: int, threads: int, effort: Effort) -> Row:
    """Peak memory and time of one side at one length; a process measures one point, because peaks do not go down."""
    machine.set_threads(threads)
    _run(case, side, _WARM)
    reset_peak()
    before = memory("VmRSS")
    inputs, found, first = _run(case, side, length)
    peak = memory("VmHWM") - before
    # The gradient that comes into the output is there before the call, like the inputs.
    found = tuple(map(_shown, found))
    arrays = sum(_shown(x).nbytes for x in (*inputs.leaves, inputs.grad, *found))
    if not all(bool((abs(x) < 1e6).all()) for x in found):
        raise WrongResult(f"{case.name}, {side}, {length} tokens: the result is not finite")
    seconds = [first]
    # The first call at this length also touches its memory for the first time.
    if first < effort.seconds:
        seconds = [_run(case, side, length)[2] for _ in range(effort.least)]
    return {
        "side": side, "length": length, "threads": threads, "seconds": summary(seconds), "rounds": len(seconds),
        "peak": peak, "arrays": arrays, "over": peak - arrays,
    }  # fmt: skip


def _shown(x: Any) -> Any:
    """A tensor of TensorFlow as NumPy's view of it: it has neither `nbytes` nor `all`."""
    return x if hasattr(x, "nbytes") else x.numpy()


def _run(case: Case, side: str, length: int) -> tuple[Inputs, tuple[Any, ...], float]:
    inputs = draw(case, length)
    which = ours(inputs) if side == "attnscore" else textbook(inputs)
    start = time.perf_counter()
    found = which.run()
    seconds = time.perf_counter() - start
    return inputs, which.outputs(found), seconds


def can_measure_memory() -> str | None:
    """None, or why the peak of a process cannot be read here."""
    return None if sys.platform == "linux" else "peak memory is read from /proc, which only Linux has"


def reset_peak() -> None:
    """Let VmHWM start anew, so that what importing took does not hide in it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(field: str) -> int:
    """A number of bytes from the status of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
