"""The benchmarks: measure this machine, and make the page of performance.

- ``python benchmarks run [OPTIONS]``: time and memory of named cases; ``--help`` lists them.
- ``python benchmarks NAME [OPTIONS]``: the same into ``results/NAME.json``, where NAME names the kind of CPU, and into
  `docs/performance.md`, which compares all machines. Without options the long cases run too.
- ``python benchmarks --page``: the page alone, from the results that are there.
- ``python benchmarks diagnosis``: the test bed of `watch`, and its table in ``docs/diagnosis.md``; ``--help`` for more.
- ``python benchmarks tune FILE``: tiles of the GPU kernels. ``python benchmarks gpu-code PAGE``: facts of their code.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscore import cli
from attnscore.io import replacing
from bench import charts, reports, results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
COLOURS = DOCS / "images" / "matplotlibrc"
PAGE = "performance.md"
OVERVIEW, SMALL_SHAPES = "performance.png", "performance-small-shapes.png"
COMMANDS = {"diagnosis": "diagnosis.bed", "tune": "bench.gpu_tune", "gpu-code": "bench.gpu_code"}


def documents() -> dict[str, dict[str, Any]]:
    """Return the results by the name of the machine, the latest first."""
    by_file = {path: results.read(path) for path in (HERE / "results").glob("*.json")}
    ordered = sorted(by_file, key=lambda path: (by_file[path]["date"], path), reverse=True)
    return {machine_name(path.stem): by_file[path] for path in ordered}


def machine_name(stem: str) -> str:
    """Return the name of a machine as its makers write it: "zen4-avx2" becomes "Zen 4, AVX2"."""
    family, _, instructions = stem.partition("-avx")
    name = re.sub(r"(?<=[a-z])(?=\d)", " ", family.replace("-", " ")).title()
    return f"{name}, AVX{instructions}" if instructions else name


def pictures(machines: dict[str, dict[str, Any]]) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """Return description and chart of each picture by its file.

    Small shapes are those of the latest machine on which they were measured.
    """
    description = "Times as fast as each baseline, one mark for each machine"
    found: dict[str, tuple[str, Callable[[], Figure]]] = {OVERVIEW: (description, partial(charts.overview, machines))}
    if (name := next((name for name, document in machines.items() if charts.has_shapes(document)), None)) is not None:
        description = f"Ratios of all small shapes on {name}, one column for each case"
        found[SMALL_SHAPES] = (description, partial(charts.small_shapes, machines[name]))
    return found


def rendered() -> str:
    """Return the page of performance with the tables of all results."""
    machines = documents()
    links = [(description, f"images/{file}") for file, (description, _) in pictures(machines).items()]
    return reports.page_with((DOCS / PAGE).read_text("utf-8"), reports.page(machines, links))


def write_page() -> None:
    """Put the tables of the results into the page, and draw its charts in the documentation's colours."""
    import matplotlib as mpl

    text = rendered()
    with replacing(DOCS / PAGE) as file:
        file.write(text.encode())
    for name, (_, chart) in pictures(documents()).items():
        with mpl.rc_context(fname=COLOURS), replacing(DOCS / "images" / name) as file:
            chart().savefig(file, format="png", dpi=100)


def _run() -> Any:
    from bench.command import app

    return app


def main(arguments: list[str]) -> int:
    """Run a command of the benchmarks; return its exit status."""
    first, *rest = arguments or [""]
    if first == "run":
        return cli.run(_run, rest, "python benchmarks run")
    if first in COMMANDS:
        return int(importlib.import_module(COMMANDS[first]).main(rest))
    return of_machine(first, rest)


def of_machine(name: str, options: list[str]) -> int:
    """Measure into the results under the name, except with --page alone, and make the page."""
    if any(each.startswith("--out") for each in options):
        return refuse("--out: results go into this folder and the page; `python benchmarks run` has it")
    status = 0
    if (name, options) != ("--page", []):
        if not name.replace("-", "").isalnum() or name.startswith("-"):
            return refuse(f"expected run, {', '.join(COMMANDS)}, --page or the name of the machine, as in zen5")
        path = HERE / "results" / f"{name}.json"
        status = main(["run", *(options or ["--full"]), "--out", str(path)])
    if status in (0, 1):  # after 1 the document may hold errors, and the page says so
        write_page()
    return status


def refuse(text: str) -> int:
    """Say what is wrong with the arguments, and return the exit status."""
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
