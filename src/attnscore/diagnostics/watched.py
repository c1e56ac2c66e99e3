"""What was seen of a model's attention: numbers per layer and head, verdicts, tables, lines, a picture.

What this module meets:
- means are over rows that see a key, of all sampled steps; the largest logit is the largest of all;
- rows are plain dictionaries of the same names: what pandas.DataFrame and json.dumps take;
- rich and matplotlib are imported when a table or a picture is asked for.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.diagnostics.health import Thresholds, Verdict, clip_factor, verdicts_of
from attnscore.errors import ArgumentError, FrameworkError, message

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
Row = dict[str, Any]
# Means over rows; the last three over rows of their own.
MEANS = (
    "logit_mean",
    "logit_variance",
    "log_sum_exp",
    "entropy",
    "max_weight",
    "effective_keys",
    "jacobian_trace",
    "first_key",
)
_COUNTS = ("rows", "empty_rows", "nan_rows", "choice_rows")
_PLAIN = (*_COUNTS, "max_logit")
# Rows that means are over, where not all.
_OVER = {"saturated_rows": "choice_rows", "padding": "padding_rows"}
# The one list of numbers: `rows`, `last`, `on_step`, `json_lines` and `history` all give these, in this order.
NUMBERS = ("rows", "empty_rows", "nan_rows", *MEANS, "max_logit", "choice_rows", "saturated_rows", "padding", "clip")
_PICTURES = {
    "max_logit": "Largest logit",
    "entropy": "Entropy (nats)",
    "saturated_rows": "Share of saturated rows",
    "first_key": "Weight on the first key",
}
_COLUMNS = (
    "layer",
    "head",
    "max_logit",
    "logit_variance",
    "entropy",
    "effective_keys",
    "saturated_rows",
    "first_key",
    "clip",
)


@dataclass
class Layer:
    """One attention call of a model: sums per head over all steps, and those of each of the last steps."""

    name: str
    heads: int
    steps: deque[tuple[int, dict[str, Array]]]
    total: dict[str, Array] = field(default_factory=dict)

    def add(self, step: int, sums: dict[str, Array]) -> None:
        """Add what was seen in a step."""
        self.steps.append((step, sums))
        if not self.total:
            self.total = dict(sums)
            return
        for name, values in sums.items():
            self.total[name] = (
                np.maximum(self.total[name], values) if name == "max_logit" else self.total[name] + values
            )

    def rows(self, tau: float) -> list[Row]:
        """Return a row for each head, over all steps; `tau` is the largest logit that QK-clip allows."""
        return self.rows_of(self.total, tau)

    def rows_of(self, sums: dict[str, Array], tau: float) -> list[Row]:
        """Return a row for each head, of some sums."""
        columns = {name: _column(sums, name, tau).tolist() for name in NUMBERS}
        columns |= {name: [int(x) for x in columns[name]] for name in _COUNTS}
        return [
            {"layer": self.name, "head": head, **{name: values[head] for name, values in columns.items()}}
            for head in range(self.heads)
        ]


def _column(sums: dict[str, Array], name: str, tau: float) -> Array:
    """Return a number of every head; NaN where there was nothing to take a mean of."""
    if name == "clip":
        return np.array([clip_factor(largest, tau) for largest in sums["max_logit"].tolist()], dtype=np.float64)
    if name in _PLAIN:
        return sums[name]
    count = sums[_OVER.get(name, "rows")]
    found: Array = np.divide(sums[name], count, out=np.full(len(count), math.nan), where=count > 0)
    return found


class Watched:
    """The numbers that `watch` has collected so far.

    Attributes
    ----------
    layers : dict of name to Layer
    steps, sampled : int
        Calls of the model, and those that were looked at.
    unseen : Counter of (module, reason)
        Attention calls that could not be looked at.
    thresholds : Thresholds
        May be set anew at any time, but for ``saturated_weight``, which rows are counted by.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        if not isinstance(thresholds, Thresholds):
            raise ArgumentError(message("thresholds", "Thresholds(...)", type(thresholds).__name__))
        self.thresholds = thresholds
        self.layers: dict[str, Layer] = {}
        self.steps = self.sampled = 0
        self.unseen: Counter[tuple[str, str]] = Counter()

    def rows(self) -> list[Row]:
        """A row for each layer and head: means over all rows of all sampled steps, the largest logit, QK-clip's factor.

        ``pandas.DataFrame(watched.rows())`` is a table of them. Names: layer, head, rows, empty_rows, nan_rows (rows
        whose weights are NaN), logit_mean, logit_variance, log_sum_exp, entropy, max_weight, effective_keys,
        jacobian_trace, first_key, max_logit, choice_rows (rows that see more than one key), saturated_rows (share of
        those), padding (share of the weight, NaN where nothing is known of padding), clip.
        """
        return [row for layer in self.layers.values() for row in layer.rows(self.thresholds.tau)]

    def last(self) -> list[Row]:
        """The same of the last sampled step alone: what a repair goes by, since a run's largest logit never falls."""
        number = max((layer.steps[-1][0] for layer in self.layers.values()), default=-1)
        found = [(layer, *layer.steps[-1]) for layer in self.layers.values()]
        tau = self.thresholds.tau
        return [row for layer, step, sums in found if step == number for row in layer.rows_of(sums, tau)]

    def clear(self) -> None:
        """Forget all numbers, as after a repair or an epoch; steps are counted on."""
        self.layers.clear()
        self.unseen.clear()
        self.sampled = 0

    def history(self, layer: str, name: str) -> tuple[list[int], Array]:
        """Sampled steps, and a number of each head in each: (step, head)."""
        if layer not in self.layers:
            raise ArgumentError(message("layer", f"one of {list(self.layers)}", repr(layer)))
        if name not in NUMBERS:
            raise ArgumentError(message("name", f"one of {list(NUMBERS)}", repr(name)))
        steps, tau = self.layers[layer].steps, self.thresholds.tau
        return [step for step, _ in steps], np.array([_column(sums, name, tau) for _, sums in steps], dtype=np.float64)

    def verdicts(self) -> list[Verdict]:
        """What is the matter, head by head; failures first."""
        found: list[Verdict] = []
        for layer in self.layers.values():
            entropies, largest = (self.history(layer.name, name)[1] for name in ("entropy", "max_logit"))
            for head, row in enumerate(layer.rows(self.thresholds.tau)):
                series = [float(x) for x in entropies[:, head]], [float(x) for x in largest[:, head]]
                found += verdicts_of(layer.name, head, row, *series, self.thresholds)
        return sorted(found, key=lambda verdict: not verdict.failure)

    def failing(self) -> list[tuple[str, int]]:
        """Layer and head of every head with a failure, in the order of the layers."""
        failed = {(verdict.layer, verdict.head) for verdict in self.verdicts() if verdict.failure}
        return [
            (name, head) for name, layer in self.layers.items() for head in range(layer.heads) if (name, head) in failed
        ]

    def json_lines(self, since: int = 0) -> Iterator[str]:
        """Yield one line for each kept step from `since` on, layer and head: `step` and the names of `rows`.

        Written as json.dumps does; NaN and infinity become null.
        """
        steps = sorted({step for layer in self.layers.values() for step, _ in layer.steps if step >= since})
        for step in steps:
            for layer in self.layers.values():
                for sums in (sums for number, sums in layer.steps if number == step):
                    yield from (line_of(step, row) for row in layer.rows_of(sums, self.thresholds.tau))

    def table(self) -> Table:
        """A rich table: a line for each head, with its verdicts."""
        try:
            from rich import box
            from rich.table import Table
            from rich.text import Text
        except ImportError as error:
            hint = "pip install 'attnscore[cli]'"
            raise FrameworkError(message("table", "rich", "no such package here", hint=hint)) from error
        found = Table(title=Text(self._title(), "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        columns = _COLUMNS[2:]
        for name in ("layer", "head", *(column.replace("_", " ") for column in columns), "verdicts"):
            found.add_column(name, justify="left" if name in ("layer", "verdicts") else "right", overflow="fold")
        words: dict[tuple[str, int], list[Verdict]] = {}
        for verdict in self.verdicts():
            words.setdefault((verdict.layer, verdict.head), []).append(verdict)
        for row in self.rows():
            said = words.get((row["layer"], row["head"]), [])
            style = "red" if any(verdict.failure for verdict in said) else ""
            cells = (row["layer"], row["head"], *(f"{row[column]:.3g}" for column in columns))
            found.add_row(*(Text(str(cell)) for cell in cells), Text(", ".join(v.what for v in said), style))
        for (name, why), count in self.unseen.items():
            found.add_row(Text(name), "", *[""] * len(columns), Text(f"{count} calls not seen: {why}", "yellow"))
        return found

    def _title(self) -> str:
        if self.sampled and not self.layers:
            return (
                f"{self.sampled} of {self.steps} steps looked at, and no attention seen that numbers could be taken of"
            )
        return f"{len(self.layers)} attention calls a step; {self.sampled} of {self.steps} steps looked at"

    def __str__(self) -> str:
        """The verdicts, a line each, and what was not seen."""
        lines = [self._title(), *map(str, self.verdicts())]
        return "\n".join(
            lines + [f"{name}: {count} calls not seen: {why}" for (name, why), count in self.unseen.items()]
        )

    def plot(self) -> Figure:
        """Maps of layers by heads; under them the largest logit and the entropy of each head over the steps."""
        from attnscore.diagnostics.watch_pictures import overview

        if not self.layers:
            raise ArgumentError(
                message("plot", "a step that was looked at", f"{self.steps} steps, {self.sampled} looked at")
            )
        return overview(self, _PICTURES)

    def to_html(self, path: str | Path, *, title: str = "What a model's attention did") -> Path:
        """Write verdicts, the picture and a table of the heads as one HTML file for offline use (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page

        said: dict[tuple[str, int], list[str]] = {}
        for verdict in self.verdicts():
            said.setdefault((verdict.layer, verdict.head), []).append(verdict.what)
        rows = [
            {
                **{name: row[name] for name in _COLUMNS},
                "verdicts": ", ".join(said.get((row["layer"], row["head"]), [])),
            }
            for row in self.rows()
        ]
        unseen = [f"{name}: {count} calls not seen: {why}" for (name, why), count in self.unseen.items()]
        words = [*map(str, self.verdicts()), *unseen] or ["Nothing stands out."]
        # Without a step that was looked at there is nothing to draw.
        heads = [Section("Heads", ["Means over all rows that were looked at."], rows, self.plot())] if rows else []
        return write_page(path, title, self._title(), [Section("Verdicts", words), *heads])


def line_of(step: int, row: Row) -> str:
    """A row as one line of JSON.

    >>> line_of(3, {"head": 0, "padding": float("nan")})
    '{"step": 3, "head": 0, "padding": null}'
    """
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps({"step": step, **plain}, allow_nan=False)
