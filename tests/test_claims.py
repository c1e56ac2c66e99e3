"""Measured figures in README and documentation stand beside the command that shows them.

A figure is a number with a unit of time or memory, or "times" with a comparison, in prose or in a table. Its section
(from one heading to the next) has to name a command, a test or source file, or link to a page made of results.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import pytest

from test_readme import DOCUMENTS, FENCE, ROOT, label

NUMBER = r"\d[\d,.]*(?: (?:to|and|/) \d[\d,.]*)?"
MEASURED = re.compile(
    rf"{NUMBER} ?(?:ms|µs|ns|MB|MiB|kB|GB|GFLOP/s|seconds?|minutes?)\b"
    rf"|{NUMBER} times (?:as (?:long|fast|much)|faster|slower|our|the time|longer)"
    rf"|takes? {NUMBER} times|{NUMBER} s\b"
)
COMMAND = re.compile(
    r"`[^`]*\b(?:make|python|attnscore|pytest|pip) [^`]+`|```(?:bash|console)|"
    r"`[\w/]+/\w+\.py`|\]\([^)]*(?:performance|zen4|zen5|cascade-lake)[^)]*\)"
)
OF_ALL = re.compile(r"(?m)^(?:Times|No figure|Figures) on this page ")
# Made from files of results; the pages name the command.
GENERATED_PAGES, GENERATED_PART = "docs/performance/", re.compile(r"(?s)<!-- results: begin -->.*<!-- results: end -->")


def sections(text: str) -> list[tuple[int, str]]:
    """The parts of a page from heading to heading, each with its line; a heading inside a block is none."""
    blank = FENCE.sub(lambda match: re.sub(r"(?m)^#", " ", match[0]), text)
    starts = [0, *(match.start() for match in re.finditer(r"(?m)^#+ ", blank) if match.start())]
    return [
        (text.count("\n", 0, start) + 1, text[start:end])
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True)
    ]


def without_command(text: str) -> list[str]:
    """The figures of sections that name no command, on a page that does not say of all its figures what they are."""
    text = GENERATED_PART.sub("", text)
    return [
        f"line {line}: {match[0]!r}"
        for line, section in sections(text)
        if not COMMAND.search(section) and not OF_ALL.search(text)
        for match in MEASURED.finditer(FENCE.sub("", section))
    ]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if not label(path).startswith(GENERATED_PAGES)], ids=label)
def test_figures_stand_beside_the_command_that_shows_them(path) -> None:
    assert not without_command(path.read_text(encoding="utf-8"))


def test_as_many_faults_were_found_as_the_page_of_reliability_says() -> None:
    found = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text(encoding="utf-8"))
    said = re.search(r"\| (\d+) or more, all found", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert said is not None and len(found) >= int(said[1]) and all(one["killed_by"] for one in found.values())


@pytest.mark.slow
def test_there_are_as_many_tests_as_the_page_of_reliability_says() -> None:
    rows = re.findall(
        r"\| (\d+) tests or more \| `make test (SLOW=1 )?ARGS=\"?(tests/[^`\"]+)\"?` \|",
        (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"),
    )
    assert len(rows) >= 5
    for least, slow, files in rows:
        options = ["-m", ""] if slow else []
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", *options, *files.split()],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        collected = len(re.findall(r"(?m)^tests/", done.stdout))
        assert int(least) <= collected <= 1.2 * int(least), files


@pytest.mark.slow
def test_the_table_of_error_bounds_can_be_made() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "errors.py"))
    assert made["KERNELS"] == ("native", "streaming", "dense")
    assert set(made["errors"]("streaming", "float32")) >= {"out", "log-sum-exp", "d query", "d key", "d value"}


def test_figures_of_pages_have_their_commands() -> None:
    source = (ROOT / "benchmarks" / "page_figures.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"([\w-]+)": \w+', re.search(r"FIGURES = \{.*\}", source)[0]))  # type: ignore[index]
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"`python benchmarks/page_figures\.py ([\w-]+)`", texts))
    assert named and named <= known


def test_a_figure_alone_would_be_seen() -> None:
    assert without_command("# A\n\nIt takes 3.5 ms.\n") == ["line 1: '3.5 ms'"]
    assert without_command("# A\n\nIt takes 3.5 ms (`attnscore bench`).\n\n## B\n\n2.5 times as fast\n") == [
        "line 5: '2.5 times as fast'"
    ]
    assert (ROOT / "README.md") in DOCUMENTS
