"""Commands of ``attnscore``: one file is one command, this one lists them.

typer and rich are imported here, so only `attnscore.cli.main` imports this module.
"""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated

import typer
from typer.core import TyperCommand

import attnscore
from attnscore.cli.attend import attend
from attnscore.cli.bench import bench
from attnscore.cli.demo.command import demo
from attnscore.cli.info import info
from attnscore.cli.inspect import inspect
from attnscore.cli.lab import lab
from attnscore.cli.look import look
from attnscore.cli.options import AttendCommand

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


for _command in (demo, attend, look, bench, lab, inspect, info):
    # typer keeps the line ends of a docstring, which fall in the wrong places of another width.
    _paragraphs = (" ".join(each.split()) for each in (getdoc(_command) or "").split("\n\n"))
    _class = AttendCommand if _command in (attend, look) else TyperCommand
    app.command(help="\n\n".join(_paragraphs), cls=_class)(_command)
