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
_COUNTS = ("rows", "empty_rows")
_PICTURES = {
    "max_logit": "Largest logit",
    "entropy": "Entropy (nats)",
    "saturated_rows": "Share of saturated rows",
    "first_key": "Weight on the first key",
}


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

    def rows(self) -> list[Row]:
        """A row for each head, over all steps."""
        return [{"layer": self.name, "head": head, **_numbers(self.total, head)} for head in range(self.heads)]

    def rows_of_last(self) -> list[Row]:
        """A row for each head, of the last step."""
        _, sums = self.steps[-1]
        return [{"layer": self.name, "head": head, **_numbers(sums, head)} for head in range(self.heads)]


def _numbers(sums: dict[str, Array], head: int) -> Row:
    """Sums as the numbers of a row; NaN where there was nothing to take a mean of."""

    def over(name: str, count: str) -> float:
        return float(sums[name][head] / sums[count][head]) if sums[count][head] else math.nan

    row: Row = {name: int(sums[name][head]) for name in _COUNTS}
    row |= {name: over(name, "rows") for name in MEANS}
    largest = float(sums["max_logit"][head])
    return row | {
        "max_logit": largest,
        "choice_rows": int(sums["choice_rows"][head]),
        "saturated_rows": over("saturated_rows", "choice_rows"),
        "padding": over("padding", "padding_rows"),
    }


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

        ``pandas.DataFrame(watched.rows())`` is a table of them. Names: layer, head, rows, empty_rows, logit_mean,
        logit_variance, log_sum_exp, entropy, max_weight, effective_keys, jacobian_trace, first_key, max_logit,
        choice_rows (rows that see more than one key), saturated_rows (share of those), padding (share of the weight,
        NaN where nothing is known of padding), clip.
        """
        tau = self.thresholds.tau
        return [
            row | {"clip": clip_factor(row["max_logit"], tau)} for layer in self.layers.values() for row in layer.rows()
        ]

    def history(self, layer: str, name: str) -> tuple[list[int], Array]:
        """Sampled steps, and a number of each head in each: (step, head)."""
        if layer not in self.layers:
            raise ArgumentError(message("layer", f"one of {list(self.layers)}", repr(layer)))
        found = self.layers[layer]
        rows = [[_numbers(sums, head)[name] for head in range(found.heads)] for _, sums in found.steps]
        return [step for step, _ in found.steps], np.array(rows, dtype=np.float64)

    def verdicts(self) -> list[Verdict]:
        """What is the matter, head by head; failures first."""
        found: list[Verdict] = []
        for layer in self.layers.values():
            entropies, largest = (self.history(layer.name, name)[1] for name in ("entropy", "max_logit"))
            for head, row in enumerate(layer.rows()):
                series = [float(x) for x in entropies[:, head]], [float(x) for x in largest[:, head]]
                found += verdicts_of(layer.name, head, row, *series, self.thresholds)
        return sorted(found, key=lambda verdict: not verdict.failure)

    def failing(self) -> list[tuple[str, int]]:
        """Layer and head of every head with a failure, in the order of the layers."""
        failed = {(verdict.layer, verdict.head) for verdict in self.verdicts() if verdict.failure}
        return [
            (name, head) for name, layer in self.layers.items() for head in range(layer.heads) if (name, head) in failed
        ]

    def json_lines(self) -> Iterator[str]:
        """One line for each kept step, layer and head, as json.dumps writes it; NaN becomes null."""
        steps = sorted({step for layer in self.layers.values() for step, _ in layer.steps})
        for step in steps:
            for layer in self.layers.values():
                for sums in (sums for number, sums in layer.steps if number == step):
                    for head in range(layer.heads):
                        yield line_of(step, {"layer": layer.name, "head": head, **_numbers(sums, head)})

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
        columns = ("max_logit", "logit_variance", "entropy", "effective_keys", "saturated_rows", "first_key", "clip")
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


def line_of(step: int, row: Row) -> str:
    """A row as one line of JSON.

    >>> line_of(3, {"head": 0, "padding": float("nan")})
    '{"step": 3, "head": 0, "padding": null}'
    """
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps({"step": step, **plain}, allow_nan=False)
