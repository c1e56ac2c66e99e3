"""The benchmarks: measure this machine, and make the pages of the documentation.

- ``python benchmarks run [OPTIONS]``: time and memory of named cases; ``--help`` lists them.
- ``python benchmarks NAME [OPTIONS]``: the same into ``results/NAME.json``, where NAME names the kind of CPU, and into
  ``docs/performance/NAME.md``; `docs/performance.md` compares all machines. Without options the long cases run too.
- ``python benchmarks --page``: the pages, from the results that are there.
- ``python benchmarks tune FILE``: tiles of the GPU kernels. ``python benchmarks gpu-code PAGE``: what is compiled.
"""

from __future__ import annotations

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
NEW_PAGE = "# Results on {name}\n\nMeasured as [performance](../performance.md) says.\n\n{begin}\n{end}\n"


def pages() -> dict[Path, Path]:
    """Return the page of each file of results, the latest results first."""
    found = sorted((HERE / "results").glob("*.json"), key=lambda path: (results.read(path)["date"], path), reverse=True)
    return {path: DOCS / "performance" / f"{path.stem}.md" for path in found}


def rendered(path: Path, page: Path) -> str:
    """Return a page with the tables of its results, and the chart of the small shapes where they were measured."""
    content = reports.section(results.read(path), f"../images/{chart_of(page).name}")
    return reports.page_with(page.read_text("utf-8"), content)


def rendered_overview() -> str:
    """Return the page of all machines with its chart and rows."""
    names = {title_of(page): (path, page) for path, page in pages().items()}
    documents = {name: results.read(path) for name, (path, _) in names.items()}
    links = {name: f"performance/{page.name}" for name, (_, page) in names.items()}
    content = reports.overview(documents, links, f"images/{overview_chart().name}")
    return reports.page_with((DOCS / "performance.md").read_text("utf-8"), content)


def title_of(page: Path) -> str:
    """Return the name of a machine, from the heading of its page."""
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# Results on ")


def chart_of(page: Path) -> Path:
    """Return the file of the chart of a page's small shapes."""
    return DOCS / "images" / f"performance-{page.stem}-small-shapes.png"


def overview_chart() -> Path:
    """Return the file of the chart of all machines."""
    return DOCS / "images" / "performance.png"


def write_pages() -> None:
    """Put the tables of the results into their pages, and draw their charts."""
    for path, page in pages().items():
        if not page.exists():
            page.write_text(NEW_PAGE.format(name=path.stem, begin=reports.BEGIN, end=reports.END), "utf-8")
        write(page, rendered(path, page))
        if charts.has_shapes(document := results.read(path)):
            draw(chart_of(page), partial(charts.small_shapes, document))
    write(DOCS / "performance.md", rendered_overview())
    documents = {title_of(page): results.read(path) for path, page in pages().items()}
    draw(overview_chart(), partial(charts.overview, documents))


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
    kept = HERE / "results" / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "results.json")
        if kept.exists():
            shutil.copy(kept, new)
        status = main(["run", *(options or ["--full"]), "--out", folder])
        if status in (0, 1):  # after 1 the document may hold errors, and the page says so
            results.write(results.read(new), kept)
    return status


def _commands() -> Any:
    from bench.command import app

    return app


def main(arguments: list[str]) -> int:
    """Run a command of the benchmarks; return its exit status."""
    first, *rest = arguments or [""]
    if first == "run":
        return cli.run(_commands, rest, "python benchmarks run")
    if first == "tune":
        from bench import gpu_tune

        return gpu_tune.main(rest)
    if first == "gpu-code":
        from bench import gpu_code

        if len(rest) != 1:
            print("expected the page, as in: python benchmarks gpu-code docs/performance/gpu-code.md", file=sys.stderr)
            return 2
        gpu_code.write_page(Path(rest[0]))
        return 0
    return of_machine(arguments)


def of_machine(arguments: list[str]) -> int:
    """Measure, except with --page alone, and make the pages."""
    if any(each.startswith("--out") for each in arguments):
        print("--out: results go into this folder and the pages; `python benchmarks run` has it", file=sys.stderr)
        return 2
    status = 0
    if arguments != ["--page"]:
        if not arguments or not arguments[0].replace("-", "").isalnum() or arguments[0].startswith("-"):
            print(
                "expected run, tune, gpu-code, --page or the name of the machine, as in: python benchmarks zen5",
                file=sys.stderr,
            )
            return 2
        status = measure(arguments[0], arguments[1:])
    if status in (0, 1):
        write_pages()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
