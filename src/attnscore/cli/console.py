"""Printing of the commands: tables on a terminal, plain text into a pipe, no colour with NO_COLOR.

rich chooses colours and box characters by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Without a terminal rich assumes 80 columns and folds the cells of a table with twelve heads.
_PIPE_WIDTH = 110


def console() -> Console:
    """Return the console of stdout."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def error_console() -> Console:
    """Return the console of stderr, for progress that must not mix with results."""
    return Console(stderr=True, highlight=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: int = 1,
    caption: str | None = None,
) -> Table:
    """Build a table whose first `left` columns are text and whose others are numbers."""
    # Text, because a title or a cell such as "[CLS]" or a path is no markup.
    lines = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    lines.caption = None if caption is None else Text(caption, "dim")
    lines.caption_justify = "left"
    for place, column in enumerate(columns):
        lines.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        lines.add_row(*(Text(str(cell)) for cell in row))
    return lines
