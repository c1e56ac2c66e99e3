"""The door of a measuring process: a request comes in as JSON on stdin, the answer goes out as JSON on stdout.

``python -m attnscore.bench.child``, started by `attnscore.bench.runner`, one for each case and number of threads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from attnscore.bench import machine
from attnscore.bench.cases import named
from attnscore.bench.timing import Effort


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what a request asks: {"rows": ...}, {"point": ...}, or {"wrong": ...} for a result that was refused."""
    # Imported after the process has been pinned: pools are sized when they are loaded.
    from attnscore.bench.limits import measure_limits
    from attnscore.bench.measure import measure_point, time_case
    from attnscore.bench.reference import WrongResult

    case = dataclasses.replace(named(request["case"]), sizes=request["sizes"])
    effort = Effort(**request["effort"])
    try:
        if case.kind == "limits":
            return {"rows": [measure_limits(case, request["threads"], effort)]}
        if request["side"] is None:
            return {"rows": time_case(case, request["threads"], effort)}
        return {"point": measure_point(case, request["side"], request["length"], request["threads"], effort)}
    except WrongResult as wrong:
        return {"wrong": str(wrong)}


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    machine.pin(request["threads"])
    # What compilers and peers print must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    found = answer(request)
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(found, file)
    sys.stderr.flush()
    # The answer has been given; threads of a peer's pool may hold up the end of the interpreter, or crash in it.
    os._exit(0)


if __name__ == "__main__":
    main()
