"""``python benchmarks``: everything `attnscore bench` measures, into this folder, and the pages of the documentation.

``results.json`` is the last run's, ``results-NAME.json`` one that was kept from another machine; each has its page.
``python benchmarks --page`` makes the pages anew from the results that lie here. All other options are those of
`attnscore bench` but ``--out``; without any, the long cases are run too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnscore.bench import report, results
from attnscore.cli import main
from attnscore.files import replacing

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"


def pages() -> dict[Path, Path]:
    """The page of each file of results: results-NAME.json's is performance-NAME.md."""
    found = sorted(HERE.glob("results*.json"))
    return {path: DOCS / f"performance{path.stem.removeprefix('results')}.md" for path in found}


def write_pages() -> None:
    """Put the tables of the results into their pages."""
    for path, page in pages().items():
        text = report.page_with(page.read_text("utf-8"), results.read(path))
        with replacing(page) as file:
            file.write(text.encode())


def run(arguments: list[str]) -> int:
    """Measure, unless only the pages are asked for; they are made in any case."""
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
