"""``attnscore inspect``: statistics and maps of every head of a pretrained model on a text, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from attnscore.cli.console import console, error_console, table
from attnscore.cli.options import keep_input, renamed_option
from attnscore.errors import FileError
from attnscore.io import check_writable, read_text
from attnscore.plotting.drawing import short_number

Model = typer.Argument(help="A local folder of a Hugging Face model, or 'minilm', the small model of the demo.")
TextFile = typer.Option("--text", metavar="FILE", help="The text (UTF-8).")
Out = typer.Option("--out", metavar="FILE", help="Where the report goes.")
MaxTokens = typer.Option("--max-tokens", metavar="N", min=1, help="How much of the text is read.")
Megabytes = typer.Option(
    "--megabytes", metavar="N", min=0, help="For the maps' data; beyond, the broader heads have numbers and no map."
)


def inspect(
    model: Annotated[str, Model],
    text: Annotated[Path, TextFile],
    out: Annotated[Path, Out] = Path("attnscore-inspect.html"),
    max_tokens: Annotated[int, MaxTokens] = 512,
    megabytes: Annotated[float, Megabytes] = 4.0,
    tokens: Annotated[int | None, renamed_option("--tokens", "--max-tokens")] = None,
) -> None:
    """Statistics and exact attention maps of every head, in one HTML file that opens offline.

    Runs the model once on the text. Prints the heads that stand out.
    """
    check_writable(out)
    content = read_text(text)
    keep_input(out, text)
    if not content.strip():
        raise FileError(f"{text}: no text in it")
    # Imported here: they bring PyTorch, which --help does not need.
    from attnscore.diagnostics.inspection import pretrained

    pretrained.require_transformers("inspect")
    from attnscore.diagnostics.inspection.head_metrics import STATISTICS
    from attnscore.diagnostics.inspection.inspection import inspect_model

    with error_console().status("running the model"):
        inspection = inspect_model(model, content, max_tokens=tokens or max_tokens)
    with error_console().status("writing the report"):
        inspection.to_html(out, megabytes=megabytes)
    names = ("entropy", "effective_keys", "largest_weight", "logit_variance", "first_key")
    rows = sorted(inspection.to_rows(), key=lambda row: row["entropy"])
    shown = [*rows[:4], *rows[-2:]] if len(rows) > 6 else rows
    columns = ("layer", "head", *(STATISTICS[name].title for name in names))
    cells = [(row["layer"], row["head"], *(short_number(row[name], 3) for name in names)) for row in shown]
    console().print(table("The sharpest heads, and the two that are broadest", columns, cells, left=2))
    size = out.stat().st_size / 10**6
    console().print(Text(f"{inspection.facts} Report ({size:.1f} MB): {out}"))
