"""Runner: every case in a process of its own for each number of threads, and their answers as one document.

- Both sides of a comparison share a process, no two cases do: a baseline's pool, caches or crash stay with its case.
- A wrong result, or a process that died, is an error of the run and no row; the other cases are still measured.
- The document is plain data of a known form (`bench.results`).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnscore.cli.timing import Effort
from bench import machine
from bench.cases import Case
from bench.measure import Row, can_measure_memory
from bench.results import SCHEMA

# Bytes of the matrices of the plain formula; beyond, their growth is known well enough.
_MOST_FORMULA_BYTES = 6 * 10**9
_QUICK = Effort(min_rounds=3, max_rounds=21, seconds=0.5)
# For each shape of a case of many shapes, some hundred pairs of sides.
_SHAPE = Effort(min_rounds=7, max_rounds=21, seconds=0.15)
_QUICK_SHAPE = Effort(min_rounds=3, max_rounds=3, seconds=0.0)
_QUICK_LENGTHS = 2
_QUICK_SHAPES = 4  # every fourth


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """Fit the p of value ~ length^p, by least squares over logarithms; None from fewer than two points."""
    if len(lengths) < 2 or min(values) <= 0:
        return None
    return float(np.polyfit(np.log(np.asarray(lengths, np.float64)), np.log(np.asarray(values, np.float64)), 1)[0])


@dataclass(frozen=True)
class Request:
    """One measuring process; `side` and `length` for a point of a growth or memory case."""

    case: Case
    threads: int
    side: str | None = None
    length: int | None = None

    def __str__(self) -> str:
        side = "" if self.side in (None, "attnscore") else f", {self.side}"
        length = "" if self.length is None else f", {self.length} tokens"
        return f"{self.case.name}{side}{length}, {self.threads} thread{'s' * (self.threads > 1)}"


class Failed(Exception):
    """A measuring process that gave no answer, or whose result was refused."""


FOLDER = Path(__file__).parents[1]
"""`bench` is imported from here by ``python -m``."""
Tell = Callable[[str, int, int], None]


def run(
    cases: Sequence[Case], threads: Sequence[int], *, quick: bool = False, tell: Tell = lambda text, at, of: None
) -> dict[str, Any]:
    """Measure the cases; `tell` is called with the current request, its number, and the number of requests."""
    effort, shape_effort = (_QUICK, _QUICK_SHAPE) if quick else (Effort(), _SHAPE)
    requests = [request for case in cases for request in _requests(case, threads, quick)]
    rows: list[Row] = []
    points: dict[str, list[Row]] = {}
    errors: list[dict[str, str]] = []
    for place, request in enumerate(requests, 1):
        tell(str(request), place, len(requests))
        try:
            answer = ask(request, shape_effort if request.case.kind == "shapes" else effort)
        except Failed as error:
            errors.append({"case": str(request), "error": str(error)})
            continue
        rows += answer.get("rows", [])
        if "point" in answer:
            points.setdefault(request.case.name, []).append(answer["point"])
    for case in cases:
        if case.kind in ("growth", "memory"):
            rows += _grown(case, points.get(case.name, []))
    return {
        **setting(threads, quick=quick),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": machine.commit(),
        "rows": rows,
        "errors": errors,
    }


def setting(threads: Sequence[int], *, quick: bool) -> dict[str, Any]:
    """Return the facts besides the code on which a run's results depend: the fields that joined runs must share."""
    return {"schema": SCHEMA, "quick": quick, "threads": list(threads), "machine": machine.facts()}


def _requests(case: Case, threads: Sequence[int], quick: bool) -> Iterator[Request]:
    if case.kind == "shapes" and quick:
        case = dataclasses.replace(case, sizes={"shapes": case.sizes["shapes"][::_QUICK_SHAPES]})
    if case.kind in ("limits", "time", "shapes", "model"):
        yield from (Request(case, number) for number in threads)
        return
    lengths = case.sizes.get("lengths", [case.sizes["queries"]])
    for side in ("attnscore", *case.baselines) if can_measure_memory() is None else ():
        for length in lengths[:_QUICK_LENGTHS] if quick else lengths:
            if side == "attnscore" or _formula_bytes(case, length) < _MOST_FORMULA_BYTES:
                yield Request(case, max(threads), side, length)


def _formula_bytes(case: Case, length: int) -> int:
    # Four arrays of that size are alive at once in the plain forward and backward.
    return 4 * 4 * length**2 * (case.sizes["dim"] if case.score == "additive" else 1)


def ask(request: Request, effort: Effort) -> dict[str, Any]:
    """Run one measuring process and return its answer; `Failed` where there is none."""
    case = request.case
    content = {
        "case": case.name, "sizes": dict(case.sizes), "threads": request.threads, "side": request.side,
        "length": request.length, "effort": dataclasses.asdict(effort),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "bench.measure"],
        input=json.dumps(content), capture_output=True, text=True, check=False,
        env=machine.environment(request.threads), cwd=FOLDER,
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Failed(f"its process ended with status {done.returncode}: {last[0]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "wrong" in answer:
        raise Failed(answer["wrong"])
    return answer


def _grown(case: Case, points: list[Row]) -> Iterator[Row]:
    """Join the points of each side of a case to one row."""
    for side in ("attnscore", *case.baselines):
        mine = [point for point in points if point["side"] == side]
        row: Row = {"kind": case.kind, "case": case.name, "what": case.what, "side": side, "points": mine}
        if not mine:
            reason = can_measure_memory() or "its process failed"
            yield {**row, "status": "not run", "reason": reason, "threads": None}
            continue
        row |= {"status": "measured", "reason": None, "threads": mine[0]["threads"]}
        if case.kind == "growth":
            lengths = [point["length"] for point in mine]
            row["time_exponent"] = exponent(lengths, [point["seconds"]["median"] for point in mine])
            row["memory_exponent"] = exponent(lengths, [point["peak"] for point in mine])
        yield row
