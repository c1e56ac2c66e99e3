"""``python benchmarks``: everything `attnscore bench` measures, into this folder, and the page of the documentation.

``python benchmarks --page`` makes the page anew from the results that lie here. All other options are those of
`attnscore bench` but ``--out``; without any, the long cases are run too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attnscore.bench import report, results
from attnscore.cli import main
from attnscore.files import replacing

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"


def write_page() -> None:
    """Put the tables of results.json into the page."""
    text = report.page_with(PAGE.read_text("utf-8"), results.read(HERE / "results.json"))
    with replacing(PAGE) as file:
        file.write(text.encode())


def run(arguments: list[str]) -> int:
    """Measure, unless only the page is asked for; the page is made in any case."""
    status = 0
    if any(each.startswith("--out") for each in arguments):
        print("--out: results go into this folder and the page here; elsewhere: attnscore bench --out", file=sys.stderr)
        return 2
    if arguments != ["--page"]:
        status = main(["bench", *(arguments or ["--full"]), "--out", str(HERE)])
    if status in (0, 1):  # after 1 the document may hold errors, and the page says so
        write_page()
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
