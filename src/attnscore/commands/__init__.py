"""The commands of ``attnscore``: one file, one command; this one only lists them.

typer and rich are imported here, so nothing but `attnscore.cli` imports this package.
"""

from __future__ import annotations

from typing import Annotated

import typer

import attnscore
from attnscore.commands.attend import AttendCommand, attend
from attnscore.commands.demo import demo
from attnscore.commands.info import info

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


app.command()(demo)
app.command(cls=AttendCommand)(attend)
app.command()(info)
