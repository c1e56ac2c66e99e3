"""Report of a demo or a lab: tables on the console, pictures and a JSON document in one folder.

- Progress is a live line on a terminal and one plain line per step elsewhere.
- Every number that is printed or drawn is in the document, with its definition.
- No path of the machine goes into the document; files are written whole or not at all.
- A check that does not hold is reported at the end as `DemoFailure`, after everything has been written.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from attnscore.cli.console import table
from attnscore.errors import AttnscoreError, FileError
from attnscore.io import plain, replacing, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


class DemoFailure(AttnscoreError, RuntimeError):
    """A check of the demo or the lab that did not hold."""


@dataclass
class Report:
    """Collects the results of one run; `steps` is the number of `step` calls to come, `document` the JSON file."""

    folder: Path
    console: Console
    steps: int
    document: str = "summary.json"
    summary: dict[str, Any] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{self.folder}: cannot be made a folder: {error.strerror}") from error

    @contextlib.contextmanager
    def step(self, title: str, *, live: bool = True) -> Iterator[None]:
        """Announce one step and time it; not `live`: the step shows its own progress."""
        count = f"[{len(self.seconds) + 1}/{self.steps}]"
        start = time.perf_counter()
        if self.console.is_terminal and live:
            with self.console.status(Text(f"{count} {title}"), spinner="dots"):
                yield
        else:
            self.console.print(f"{count} {title}", markup=False)
            yield
        self.seconds[title] = round(time.perf_counter() - start, 3)
        if self.console.is_terminal:
            done = ("✓", "green"), f" {title} ", (f"{self.seconds[title]:.1f} s", "dim")
            self.console.print(Text.assemble(*done))

    def picture(self, name: str, figure: Figure) -> None:
        """Write a figure as ``name.png``."""
        path = self.folder / f"{name}.png"
        with replacing(path) as file, warnings.catch_warnings():
            # Sentences may be in any script; characters that the font lacks are drawn as boxes.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(file, format="png", dpi=150, bbox_inches="tight", pad_inches=0.12)
        self.pictures.append(path.name)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], **options: Any) -> None:
        """Print a table, with the options of `console.table`."""
        self.console.print(table(title, columns, rows, **options))

    def check(self, claim: str, differences: Any, allowed: float) -> None:
        """Record whether a difference, or the largest of several, is within the allowed one."""
        difference = float(np.abs(differences).max())
        holds = difference <= allowed  # False for NaN too
        self.checks.append({"claim": claim, "difference": difference, "allowed": allowed, "holds": holds})

    def finish(self) -> None:
        """Write the document; raise `DemoFailure` when a check did not hold."""
        content = self.summary | {"checks": self.checks, "pictures": self.pictures, "seconds": self.seconds}
        write_json(self.folder / self.document, plain(content, 7, names=True), digits=7, indent=2)
        if failed := [check for check in self.checks if not check["holds"]]:
            first = "{claim}: difference {difference:.3g}, allowed {allowed:.3g}".format(**failed[0])
            raise DemoFailure(f"{len(failed)} of {len(self.checks)} checks failed: {first}")
