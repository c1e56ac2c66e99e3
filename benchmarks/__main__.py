"""``python benchmarks``: run everything of `attnscore bench` into this folder and make the pages of the documentation.

``results.json`` is of the last run, ``results-NAME.json`` of another machine; each has its page. ``python benchmarks
--page`` makes the pages from the results in this folder. All other options are those of `attnscore bench` except
``--out``; without any, the long cases are run too. A page of small shapes has a chart in ``docs/images``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnscore.bench import charts, reports, results
from attnscore.cli import main
from attnscore.io import replacing

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"


def pages() -> dict[Path, Path]:
    """Return the page of each file of results: performance-NAME.md of results-NAME.json."""
    found = sorted(HERE.glob("results*.json"))
    return {path: DOCS / f"performance{path.stem.removeprefix('results')}.md" for path in found}


def rendered(path: Path, page: Path) -> str:
    """Return a page with the tables of its results, and the chart of the small shapes where they were measured."""
    return reports.page_with(page.read_text("utf-8"), results.read(path), f"images/{chart_of(page).name}")


def chart_of(page: Path) -> Path:
    """Return the file of a page's chart."""
    return page.parent / "images" / f"{page.stem}-small-shapes.png"


def write_pages() -> None:
    """Put the tables of the results into their pages, and draw their charts."""
    for path, page in pages().items():
        text = rendered(path, page)
        with replacing(page) as file:
            file.write(text.encode())
        if charts.has_shapes(document := results.read(path)):
            with replacing(chart_of(page)) as file:
                charts.small_shapes(document).savefig(file, format="png", dpi=100)


def run(arguments: list[str]) -> int:
    """Measure, except with --page alone, and make the pages."""
    status = 0
    if any(each.startswith("--out") for each in arguments):
        print("--out: results go into this folder and the pages; elsewhere: attnscore bench --out", file=sys.stderr)
        return 2
    if arguments != ["--page"]:
        status = main(["bench", *(arguments or ["--full"]), "--out", str(HERE)])
    if status in (0, 1):  # after 1 the document may hold errors, and the page says so
        write_pages()
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
