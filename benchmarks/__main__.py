"""The benchmarks: measure this machine, and make the page of performance.

- ``python benchmarks run [OPTIONS]``: time and memory of named cases; ``--help`` lists them.
- ``python benchmarks NAME [OPTIONS]``: the same into ``results/NAME.json``, where NAME names the kind of CPU, and into
  `docs/performance.md`, which compares all machines. Without options the long cases run too.
- ``python benchmarks --page``: the page alone, from the results that are there.
- ``python benchmarks diagnosis``: the test bed of `watch`, and its table in ``docs/diagnosis.md``; ``--help`` for more.
- ``python benchmarks tune FILE``: tiles of the GPU kernels. ``python benchmarks gpu-code PAGE``: facts of their code.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
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


def with_small_shapes(machines: dict[str, dict[str, Any]]) -> str | None:
    """Return the machine whose small shapes are drawn: the latest on which they were measured."""
    return next((name for name, document in machines.items() if charts.has_shapes(document)), None)


def rendered() -> str:
    """Return the page of performance with the tables of all results."""
    machines = documents()
    pictures = [("Times as fast as each baseline, one mark for each machine", f"images/{OVERVIEW}")]
    if (name := with_small_shapes(machines)) is not None:
        pictures.append((f"Ratios of all small shapes on {name}, one column for each case", f"images/{SMALL_SHAPES}"))
    return reports.page_with((DOCS / PAGE).read_text("utf-8"), reports.page(machines, pictures))


def write_page() -> None:
    """Put the tables of the results into the page, and draw its charts."""
    machines = documents()
    write(DOCS / PAGE, rendered())
    draw(DOCS / "images" / OVERVIEW, partial(charts.overview, machines))
    if (name := with_small_shapes(machines)) is not None:
        draw(DOCS / "images" / SMALL_SHAPES, partial(charts.small_shapes, machines[name]))


def write(page: Path, text: str) -> None:
    """Replace a page at once."""
    with replacing(page) as file:
        file.write(text.encode())


def draw(path: Path, chart: Callable[[], Figure]) -> None:
    """Replace a chart at once, in the colours of the documentation's pictures."""
    import matplotlib as mpl

    with mpl.rc_context(fname=COLOURS), replacing(path) as file:
        chart().savefig(file, format="png", dpi=100)


def measure(name: str, options: list[str]) -> int:
    """Measure and keep the results under the name; `--again` finds the earlier ones there."""
    stored = HERE / "results" / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "results.json")
        if stored.exists():
            shutil.copy(stored, new)
        status = main(["run", *(options or ["--full"]), "--out", folder])
        if status in (0, 1):  # after 1 the document may hold errors, and the page says so
            results.write(results.read(new), stored)
    return status


def _commands() -> Any:
    from bench.command import app

    return app


def main(arguments: list[str]) -> int:
    """Run a command of the benchmarks; return its exit status."""
    first, *rest = arguments or [""]
    if first == "run":
        return cli.run(_commands, rest, "python benchmarks run")
    if first == "diagnosis":
        from diagnosis import bed

        return bed.main(rest)
    if first == "tune":
        from bench import gpu_tune

        return gpu_tune.main(rest)
    if first == "gpu-code":
        from bench import gpu_code

        if len(rest) != 1:
            print(
                "expected the page, as in: python benchmarks gpu-code benchmarks/results/gpu-code.md", file=sys.stderr
            )
            return 2
        gpu_code.write_page(Path(rest[0]))
        return 0
    return of_machine(arguments)


def of_machine(arguments: list[str]) -> int:
    """Measure, except with --page alone, and make the page."""
    if any(each.startswith("--out") for each in arguments):
        print("--out: results go into this folder and the page; `python benchmarks run` has it", file=sys.stderr)
        return 2
    status = 0
    if arguments != ["--page"]:
        if not arguments or not arguments[0].replace("-", "").isalnum() or arguments[0].startswith("-"):
            print(
                "expected run, tune, diagnosis, gpu-code, --page or the name of the machine, as in: "
                "python benchmarks zen5",
                file=sys.stderr,
            )
            return 2
        status = measure(arguments[0], arguments[1:])
    if status in (0, 1):
        write_page()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
