"""The commands of ``attnscore``: one file, one command; this one only lists them.

typer and rich are imported here, so nothing but `attnscore.cli` imports this package.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Annotated

import typer

import attnscore
from attnscore.commands.attend import AttendCommand, attend
from attnscore.commands.bench import bench
from attnscore.commands.demo import demo
from attnscore.commands.info import info
from attnscore.commands.inspect import inspect
from attnscore.commands.lab import lab
from attnscore.commands.look import look

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"attnscore {attnscore.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention scoring functions and attention pooling: exact, masked correctly, in O(n) memory."""


def _flowing(function: Callable[..., None]) -> str:
    # typer keeps the line ends of a docstring, which fall in the wrong places of another width.
    paragraphs = (getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app.command(help=_flowing(demo))(demo)
app.command(help=_flowing(attend), cls=AttendCommand)(attend)
app.command(help=_flowing(look), cls=AttendCommand)(look)
app.command(help=_flowing(bench))(bench)
app.command(help=_flowing(lab))(lab)
app.command(help=_flowing(inspect))(inspect)
app.command(help=_flowing(info))(info)
