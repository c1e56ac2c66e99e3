"""One measuring process: a case on a number of threads, checked before it is timed.

``python -m bench.measure`` reads a request as JSON from stdin and answers as JSON on stdout.
`bench.runner` starts one such process for each case and number of threads.

- A side is timed only after its result has been compared with the reference. A wrong result of ours ends the case with
  `WrongResult`; a baseline with a wrong result is left out.
- Memory is the peak of this process minus its memory before the arrays were made, when libraries are already loaded
  and have run once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnscore.cli.timing import Effort, alternate, summary
from attnscore.errors import FrameworkError
from bench import layers, machine
from bench.baselines import BASELINES, Unavailable, fastest, naive
from bench.cases import Case, named
from bench.inputs import Inputs, Side, draw, kernel_of, ours
from bench.models import MODELS
from bench.reference import Reference, WrongResult, reference

Row = dict[str, Any]

# Factor on the tolerance for baselines: checked is that they compute the same function, not how accurately.
_SLACK = 1000.0
_WARM = 64  # tokens of the call that triggers the lazy loading of libraries


def main() -> None:
    """Answer one request: {"rows": ...}, {"point": ...}, or {"wrong": ...} where a result was wrong."""
    request = json.load(sys.stdin)
    # Before PyTorch or a baseline is imported: they size their pools when they are loaded.
    machine.pin(request["threads"])
    # Compilers and baselines print; that must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    found = answer(request)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(found, file)
    sys.stderr.flush()
    # The answer has been given; threads of a baseline's pool may delay the end of the interpreter, or crash in it.
    os._exit(0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Measure a request."""
    case = dataclasses.replace(named(request["case"]), sizes=request["sizes"])
    threads, effort = request["threads"], Effort(**request["effort"])
    machine.set_threads(threads)
    try:
        if case.kind == "limits":
            return {"rows": [measure_limits(case, threads, effort)]}
        if case.kind == "shapes":
            return {"rows": time_shapes(case, threads, effort)}
        if case.kind == "model":
            return {"rows": [time_model(case, threads, effort)]}
        if request["side"] is None:
            return {"rows": time_case(case, threads, effort)}
        return {"point": measure_point(case, request["side"], request["length"], threads, effort)}
    except WrongResult as wrong:
        return {"wrong": str(wrong)}


def time_case(case: Case, threads: int, effort: Effort) -> list[Row]:
    """Time a case; one row for each baseline."""
    inputs = draw(case)
    about = {"kernel": kernel_of(inputs), "work": case.work()}
    return [row | about for row in _compared(inputs, case.name, threads, effort)]


def _compared(inputs: Inputs, name: str, threads: int, effort: Effort) -> Iterator[Row]:
    """Check our side, then time it against each baseline; yield a row for each."""
    case, exact = inputs.case, reference(inputs)
    mine = layers.ours(inputs) if case.layer else ours(inputs)
    accuracy = exact.check(f"{name}, attnscore", mine.outputs(mine.run()))
    for baseline in case.baselines:
        yield _row(case, threads, baseline, accuracy=accuracy, **_against(baseline, inputs, mine, exact, effort))


def _row(case: Case, threads: int, baseline: str, **measured: Any) -> Row:
    """Return the row of a comparison: what was measured, in place of what a row has before."""
    about = {"kind": "time", "case": case.name, "what": case.what, "threads": threads, "baseline": baseline}
    before = {"status": "not run", "reason": None, "rounds": 0, **dict.fromkeys(("ours", "theirs", "ratio"))}
    return {**about, "kernel": "", "work": {}, "accuracy": {}, **before, **measured}


def _against(baseline: str, inputs: Inputs, mine: Side, exact: Reference, effort: Effort) -> Row:
    """Time our side and a baseline by turns, and return their times; or why the baseline was not run."""
    try:
        theirs = BASELINES[baseline].build(inputs)
        found = theirs.outputs(theirs.run())
        if theirs.same:
            exact.check(f"{inputs.case.name}, {baseline}", found, slack=_SLACK)
    except Unavailable as reason:
        return {"reason": str(reason)}
    except WrongResult as wrong:
        return {"reason": f"its result is another one: {wrong}"}
    except Exception as error:  # a baseline fails in ways of its own: a compiler or an operator that is missing
        return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return _times(mine.run, theirs.run, effort)


def _times(ours: Callable[[], Any], theirs: Callable[[], Any], effort: Effort) -> Row:
    """Time both sides by turns."""
    times = alternate(ours, theirs, effort)
    ratio = summary([b / a for a, b in zip(*times, strict=True)])
    sides = {"ours": summary(times[0]), "theirs": summary(times[1])}
    return {"status": "measured", "rounds": len(times[0]), **sides, "ratio": ratio}


def time_model(case: Case, threads: int, effort: Effort) -> Row:
    """Time a whole model with our attention and with its baseline's; its row is like any other call's."""
    (baseline,) = case.baselines
    try:
        pair = MODELS[case.name](**case.sizes)
    except (ImportError, FrameworkError) as error:
        reason = f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)
        return _row(case, threads, baseline, reason=reason)
    return _row(case, threads, baseline, accuracy=pair.check(case.name), **_times(pair.ours, pair.theirs, effort))


def time_shapes(case: Case, threads: int, effort: Effort) -> list[Row]:
    """Time every shape of a case in every mode; one row for each baseline, with a point for each shape and mode."""
    points: dict[str, list[Row]] = {baseline: [] for baseline in case.baselines}
    left_out: dict[str, list[str]] = {baseline: [] for baseline in case.baselines}
    for each, mode in case.points():
        shape = each.shape()
        for row in _compared(draw(each), f"{case.name}, {shape}, {mode}", threads, effort):
            if row["status"] != "measured":
                left_out[row["baseline"]].append(f"{shape}, {mode}: {row['reason']}")
                continue
            times = {side: row[side]["median"] for side in ("ours", "theirs", "ratio")}
            quartiles = {name: row["ratio"][name] for name in ("q1", "q3")}
            points[row["baseline"]].append({"shape": shape, "mode": mode, **times, **quartiles})
    about = {"kind": "shapes", "case": case.name, "what": case.what, "threads": threads}
    return [
        {**about, "baseline": baseline, **summed_up(points[baseline], left_out[baseline])}
        for baseline in case.baselines
    ]


def summed_up(points: list[Row], left_out: list[str]) -> Row:
    """Return the fields of a row of many shapes: the geometric mean of the ratios and the worst of them."""
    if not points:
        return {"status": "not run", "reason": left_out[0], "points": [], "left_out": left_out}
    mean = float(np.exp(np.log([point["ratio"] for point in points]).mean()))
    worst = min(points, key=lambda point: point["ratio"])
    row = {"status": "measured", "reason": None, "points": points, "left_out": left_out}
    return {**row, "geometric_mean": mean, "worst": worst}


def measure_limits(case: Case, threads: int, effort: Effort) -> Row:
    """Measure operations per second of matrix products by dtype, and bytes read per second from memory.

    These "limits" are rates that libraries reach, not the machine's peaks: a kernel may exceed them, as where a
    library uses half of the registers' width.
    """
    import torch

    side, rng = case.sizes["side"], np.random.default_rng(0)
    a = rng.standard_normal((side, side), dtype=np.float32)
    single = torch.from_numpy(a)
    half, numbers = single.bfloat16(), torch.from_numpy(rng.standard_normal(case.sizes["numbers"], dtype=np.float32))

    def operations(x: Any) -> float:
        """Return the rate of a product of as few rows as take a while: some CPUs are slow in some dtypes."""
        rows, start = 8, time.perf_counter()
        while rows < side and time.perf_counter() - start < 0.1:
            x[:rows] @ x
            rows = min(4 * rows, side)
        return float(2 * rows * side**2 / fastest(lambda: x[:rows] @ x, effort.min_rounds))

    return {
        "kind": "limits", "case": case.name, "what": case.what, "status": "measured", "reason": None,
        "threads": threads,
        # NumPy's and PyTorch's BLAS are different libraries: which is faster depends on the CPU.
        "products": {"float32": max(operations(a), operations(single)), "bfloat16": operations(half)},
        "reading": numbers.nbytes / fastest(numbers.sum, effort.min_rounds),
    }  # fmt: skip


def measure_point(case: Case, side: str, length: int, threads: int, effort: Effort) -> Row:
    """Measure peak memory and time of one side at one length; one point a process, because peaks do not go down."""
    _run(case, side, _WARM)
    reset_peak()
    before = memory("VmRSS")
    inputs, found, first = _run(case, side, length)
    peak = memory("VmHWM") - before
    # The gradient with respect to the output exists before the call, like the inputs.
    found = tuple(map(_with_nbytes, found))
    arrays = sum(_with_nbytes(x).nbytes for x in (*inputs.leaves, inputs.grad, *found))
    if not all(bool((abs(x) < 1e6).all()) for x in found):
        raise WrongResult(f"{case.name}, {side}, {length} tokens: the result is not finite")
    seconds = [first]
    # The first call at this length also touches its memory for the first time.
    if first < effort.seconds:
        seconds = [_run(case, side, length)[2] for _ in range(effort.min_rounds)]
    return {
        "side": side, "length": length, "threads": threads, "seconds": summary(seconds), "rounds": len(seconds),
        "peak": peak, "arrays": arrays, "over": peak - arrays,
    }  # fmt: skip


def _with_nbytes(x: Any) -> Any:
    """Return an array, or NumPy's view of a TensorFlow tensor, which has neither `nbytes` nor `all`."""
    return x if hasattr(x, "nbytes") else x.numpy()


def _run(case: Case, side: str, length: int) -> tuple[Inputs, tuple[Any, ...], float]:
    """Run one side once at a length, and return its inputs, its outputs and the seconds."""
    inputs = draw(case, length)
    which = ours(inputs) if side == "attnscore" else naive(inputs)
    start = time.perf_counter()
    found = which.run()
    seconds = time.perf_counter() - start
    return inputs, which.outputs(found), seconds


def can_measure_memory() -> str | None:
    """Return None, or why the peak of a process cannot be read here."""
    return None if sys.platform == "linux" else "peak memory is read from /proc, which only Linux has"


def reset_peak() -> None:
    """Reset VmHWM, the peak of resident memory, so that the peak of the imports is not counted."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(field: str) -> int:
    """Return a field of the status of this process in bytes: VmRSS (resident memory), or VmHWM (its peak)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


if __name__ == "__main__":
    main()
