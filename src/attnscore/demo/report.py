"""Where the demo's findings go: tables on the console, pictures and a summary.json in one folder.

What this module meets:
- progress is a live line on a terminal and one plain line per step elsewhere;
- every number that is printed or drawn is in one JSON document, with what it means;
- no path of the machine goes into the summary; files are written whole or not at all;
- a check that does not hold is reported at the end as `DemoFailure`, after everything has been written.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore.errors import AttnscoreError
from attnscore.files import FileError, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType


class DemoFailure(AttnscoreError, RuntimeError):
    """Something that the demo shows to be so was not so."""


@dataclass
class Report:
    """Collects the results of one run; `steps` is how many `step` calls there will be, `document` the JSON file."""

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
        """Announce one step and take its time; not `live`: the step shows its own progress."""
        count = f"[{len(self.seconds) + 1}/{self.steps}]"
        start = time.perf_counter()
        if self.console.is_terminal and live:
            with self.console.status(f"{count} {title}".replace("[", r"\["), spinner="dots"):
                yield
        else:
            self.console.print(f"{count} {title}", markup=False)
            yield
        self.seconds[title] = round(time.perf_counter() - start, 3)
        if self.console.is_terminal:
            done = title.replace("[", r"\[")
            self.console.print(f"[green]✓[/] {done} [dim]{self.seconds[title]:.1f} s[/]")

    def show(self, what: RenderableType) -> None:
        """Print a table or a line."""
        self.console.print(what)

    def picture(self, name: str, figure: Figure) -> None:
        """Write a figure as ``name.png``."""
        path = self.folder / f"{name}.png"
        with replacing(path) as file, warnings.catch_warnings():
            # Sentences may be in any script; what the font lacks is drawn as a box, which says it all.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(file, format="png", dpi=150, facecolor="white", bbox_inches="tight", pad_inches=0.12)
        self.pictures.append(path.name)

    def check(self, claim: str, difference: float, allowed: float) -> None:
        """Record that a difference is within what is allowed, or that it is not."""
        holds = bool(difference <= allowed)  # False for NaN too
        self.checks.append({"claim": claim, "difference": difference, "allowed": allowed, "holds": holds})

    def finish(self) -> None:
        """Write the document; raise `DemoFailure` when a check did not hold."""
        content = {
            **self.summary,
            "checks": self.checks,
            "pictures": self.pictures,
            "seconds": self.seconds,
        }
        with replacing(self.folder / self.document) as file:
            file.write((json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
        failed = [check for check in self.checks if not check["holds"]]
        if failed:
            first = failed[0]
            raise DemoFailure(
                f"{len(failed)} of {len(self.checks)} checks failed: {first['claim']}: "
                f"difference {first['difference']:.3g}, allowed {first['allowed']:.3g}"
            )


def plain(value: Any) -> Any:
    """Turn arrays and tuples into what JSON knows; a number that JSON does not know becomes its name."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return value
