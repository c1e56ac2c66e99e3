"""Records of a model's attention: numbers per layer and head, verdicts, tables, JSON lines, a picture.

Requirements:
- means are over queries that attend to a key, of all sampled steps; the largest logit is the largest of all;
- rows are plain dictionaries of the same names: what pandas.DataFrame and json.dumps take;
- rich and matplotlib are imported only for a table or a picture.
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

from attnscore.diagnostics.watching.health import Thresholds, Verdict, clip_factor, verdicts_of
from attnscore.errors import ArgumentError, message
from attnscore.io import require
from attnscore.plotting.drawing import (
    colour_bar,
    draw_head_map,
    label,
    legend,
    new_figure,
    short_number,
    style_lines,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
Row = dict[str, Any]
# Means over queries; `NUMBERS` has them in this order.
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
# Numbers whose mean is over other queries than those of `rows`, and the count of these.
_OVER = {"saturated_rows": "choice_rows", "padding": "padding_rows"}
# The one list of numbers: `rows`, `last`, `on_step`, `json_lines` and `history` all give these, in this order.
NUMBERS = ("rows", "empty_rows", "nan_rows", *MEANS, "max_logit", "choice_rows", "saturated_rows", "padding", "clip")
_MAPS = {
    "max_logit": "Largest logit",
    "entropy": "Entropy (nats)",
    "saturated_rows": "Share of saturated queries",
    "first_key": "Weight on the first key",
}
_SERIES = ("max_logit", "entropy")
# Columns of tables.
_COLUMNS = ("max_logit", "logit_variance", "entropy", "effective_keys", "saturated_rows", "first_key", "clip")
_FAILED, _OTHERS = "#b2182b", "#cfd8dc"
# Colours of failing heads; where there are more heads than colours, all are red and without a name.
_NAMED = ("#b2182b", "#e08214", "#542788", "#1b7837", "#2166ac", "#01665e")
# More numbers than these in a map cannot be read; the colours still can.
_MOST_NUMBERS = 200


@dataclass
class Layer:
    """Sums per head of one attention call of a model: over all steps, and of each of the last steps."""

    name: str
    heads: int
    steps: deque[tuple[int, dict[str, Array]]]
    total: dict[str, Array] = field(default_factory=dict)

    def add(self, step: int, sums: dict[str, Array]) -> None:
        """Add the sums of a step."""
        self.steps.append((step, sums))
        if not self.total:
            self.total = dict(sums)
            return
        for name, values in sums.items():
            self.total[name] = (
                np.maximum(self.total[name], values) if name == "max_logit" else self.total[name] + values
            )

    def rows(self, sums: dict[str, Array], tau: float) -> list[Row]:
        """Return a row for each head from some sums; `tau` is the largest logit that QK-clip allows."""
        columns = {name: _column(sums, name, tau).tolist() for name in NUMBERS}
        columns |= {name: [int(x) for x in columns[name]] for name in _COUNTS}
        return [
            {"layer": self.name, "head": head, **{name: values[head] for name, values in columns.items()}}
            for head in range(self.heads)
        ]


def _column(sums: dict[str, Array], name: str, tau: float) -> Array:
    """Return a number of every head; NaN where a mean has no queries."""
    if name == "clip":
        return np.array([clip_factor(largest, tau) for largest in sums["max_logit"].tolist()], dtype=np.float64)
    if name in _COUNTS or name == "max_logit":
        return sums[name]
    count = sums[_OVER.get(name, "rows")]
    found: Array = np.divide(sums[name], count, out=np.full(len(count), math.nan), where=count > 0)
    return found


class Records:
    """Numbers that `watch` has collected so far.

    Attributes
    ----------
    layers : dict of name to Layer
    steps, sampled : int
        Number of calls of the model, and of those that were recorded.
    unseen : Counter of (module, reason)
        Attention calls that could not be recorded.
    thresholds : Thresholds
        Can be replaced at any time, except ``saturated_weight``, which applies while queries are counted.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        if not isinstance(thresholds, Thresholds):
            raise ArgumentError(message("thresholds", "Thresholds(...)", type(thresholds).__name__))
        self.thresholds = thresholds
        self.layers: dict[str, Layer] = {}
        self.steps = self.sampled = 0
        self.unseen: Counter[tuple[str, str]] = Counter()

    def rows(self) -> list[Row]:
        """Return a row for each layer and head: means over the queries of all sampled steps, and the largest logit.

        ``pandas.DataFrame(seen.rows())`` is a table of them. Names: layer, head, rows (queries that attend to a key),
        empty_rows (fully masked queries), nan_rows (queries whose weights are NaN), logit_mean, logit_variance,
        log_sum_exp, entropy, max_weight, effective_keys, jacobian_trace, first_key, max_logit, choice_rows (queries
        that attend to more than one key), saturated_rows (share of those), padding (share of the weight, NaN where
        padding is unknown), clip (the factor of QK-clip).
        """
        tau = self.thresholds.tau
        return [row for layer in self.layers.values() for row in layer.rows(layer.total, tau)]

    def last(self) -> list[Row]:
        """Return the rows of the last sampled step alone, as a repair needs: the largest logit of a run never falls."""
        number = max((layer.steps[-1][0] for layer in self.layers.values()), default=-1)
        found = [(layer, *layer.steps[-1]) for layer in self.layers.values()]
        tau = self.thresholds.tau
        return [row for layer, step, sums in found if step == number for row in layer.rows(sums, tau)]

    def clear(self) -> None:
        """Forget all numbers, as after a repair or an epoch; the count of steps goes on."""
        self.layers.clear()
        self.unseen.clear()
        self.sampled = 0

    def history(self, layer: str, name: str) -> tuple[list[int], Array]:
        """Return the sampled steps, and a number of each head in each of them: (step, head)."""
        if layer not in self.layers:
            raise ArgumentError(message("layer", f"one of {list(self.layers)}", repr(layer)))
        if name not in NUMBERS:
            raise ArgumentError(message("name", f"one of {list(NUMBERS)}", repr(name)))
        steps, tau = self.layers[layer].steps, self.thresholds.tau
        return [step for step, _ in steps], np.array([_column(sums, name, tau) for _, sums in steps], dtype=np.float64)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on every head, failures first."""
        found: list[Verdict] = []
        for layer in self.layers.values():
            entropies, largest = (self.history(layer.name, name)[1] for name in ("entropy", "max_logit"))
            for head, row in enumerate(layer.rows(layer.total, self.thresholds.tau)):
                series = [float(x) for x in entropies[:, head]], [float(x) for x in largest[:, head]]
                found += verdicts_of(layer.name, head, row, *series, self.thresholds)
        return sorted(found, key=lambda verdict: not verdict.failure)

    def failing(self) -> list[tuple[str, int]]:
        """Return layer and head of every head with a failure, in the order of the layers."""
        failed = {(verdict.layer, verdict.head) for verdict in self.verdicts() if verdict.failure}
        return [
            (name, head) for name, layer in self.layers.items() for head in range(layer.heads) if (name, head) in failed
        ]

    def json_lines(self, since: int = 0) -> Iterator[str]:
        """Yield one line for each kept step from `since` on, layer and head: `step` and the names of `rows`.

        Written as json.dumps does; NaN and infinity become null.
        """
        kept = [(step, layer, sums) for layer in self.layers.values() for step, sums in layer.steps if step >= since]
        for step, layer, sums in sorted(kept, key=lambda one: one[0]):
            yield from (line_of(step, row) for row in layer.rows(sums, self.thresholds.tau))

    def table(self) -> Table:
        """Return a rich table: a line for each head, with its verdicts."""
        require("rich", "table", "pip install 'attnscore[cli]'")
        from rich import box
        from rich.table import Table
        from rich.text import Text

        found = Table(title=Text(self._title(), "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("layer", "head", *_COLUMNS, "verdicts"):
            is_text = name in ("layer", "verdicts")
            found.add_column(name.replace("_", " "), justify="left" if is_text else "right", overflow="fold")
        for row, verdicts in self._judged_rows():
            style = "red" if any(verdict.failure for verdict in verdicts) else ""
            cells = (row["layer"], str(row["head"]), *(f"{row[column]:.3g}" for column in _COLUMNS))
            found.add_row(*map(Text, cells), Text(", ".join(verdict.what for verdict in verdicts), style))
        for (name, why), count in self.unseen.items():
            found.add_row(Text(name), "", *[""] * len(_COLUMNS), Text(f"{count} calls not seen: {why}", "yellow"))
        return found

    def _judged_rows(self) -> Iterator[tuple[Row, list[Verdict]]]:
        """Yield each row with the verdicts on its head."""
        verdicts: dict[tuple[str, int], list[Verdict]] = {}
        for verdict in self.verdicts():
            verdicts.setdefault((verdict.layer, verdict.head), []).append(verdict)
        for row in self.rows():
            yield row, verdicts.get((row["layer"], row["head"]), [])

    def _title(self) -> str:
        if self.sampled and not self.layers:
            return f"{self.sampled} of {self.steps} steps sampled, and no attention call in them could be recorded"
        return f"{len(self.layers)} attention calls a step; {self.sampled} of {self.steps} steps sampled"

    def _lines(self) -> list[str]:
        """Return the verdicts and the calls that were not seen, a line each."""
        unseen = [f"{name}: {count} calls not seen: {why}" for (name, why), count in self.unseen.items()]
        return [*map(str, self.verdicts()), *unseen]

    def __str__(self) -> str:
        """Return the verdicts, a line each, and the calls that were not seen."""
        return "\n".join([self._title(), *self._lines()])

    def to_html(self, path: str | Path, *, title: str = "What a model's attention did") -> Path:
        """Write verdicts, the picture and a table of the heads as one HTML file for offline use (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page

        rows = [
            {name: row[name] for name in ("layer", "head", *_COLUMNS)}
            | {"verdicts": ", ".join(verdict.what for verdict in verdicts)}
            for row, verdicts in self._judged_rows()
        ]
        sections = [Section("Verdicts", self._lines() or ["Nothing stands out."])]
        if rows:  # without a sampled step there is nothing to draw
            sections.append(Section("Heads", ["Means over all queries of the sampled steps."], rows, self.plot()))
        return write_page(path, title, self._title(), sections)

    def plot(self) -> Figure:
        """Draw maps of layers by heads; under them the largest logit and the entropy of each head over the steps."""
        if not self.layers:
            raise ArgumentError(message("plot", "a sampled step", f"{self.steps} steps, {self.sampled} sampled"))
        names, heads = list(self.layers), max(layer.heads for layer in self.layers.values())
        series = _SERIES if self.sampled > 1 else ()
        tall = max(1.6, 0.3 * len(names) + 0.9)
        width = 2.6 + max(3.0, 0.36 * heads + 0.8)
        figure = new_figure((2 * width, 2 * tall + (2.7 if series else 0.2)))
        heights = [tall, tall, *([2.7] if series else [])]
        axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights).ravel()
        for axis, (name, title) in zip(axes, _MAPS.items(), strict=False):
            values = np.ma.masked_array(np.zeros((len(names), heads)), True)  # layers may have fewer heads than others
            for row in self.rows():
                values[names.index(row["layer"]), row["head"]] = row[name]
            image = draw_head_map(axis, values.filled(np.nan), names, every=heads <= 24)
            axis.set_aspect("auto")
            if values.size <= _MOST_NUMBERS:
                write_numbers(axis, image, values, short_number)
            label(axis, title, "head", title_points=10)
            colour_bar(figure, image, [axis])
        for axis, name in zip(axes[len(_MAPS) :], series, strict=True):
            self._draw_series(axis, name)
            style_lines(axis, f"{_MAPS[name]} of each head, by step", "step")
        return figure

    def _draw_series(self, axis: Axes, name: str) -> None:
        """Draw a number of each head over the steps, failing heads in colour and, where they are few, by name."""
        from matplotlib.ticker import MaxNLocator

        failing = self.failing()
        colours = dict(zip(failing, _NAMED, strict=False)) if len(failing) <= len(_NAMED) else {}
        other_label = "other heads"
        for layer in self.layers.values():
            steps, values = self.history(layer.name, name)
            for head in range(layer.heads):
                if (place := (layer.name, head)) in failing:
                    colour, own_label = colours.get(place, _FAILED), f"{layer.name}, head {head}"
                    axis.plot(steps, values[:, head], linewidth=1.6, zorder=3, color=colour, label=own_label)
                else:
                    axis.plot(steps, values[:, head], linewidth=0.7, zorder=1, color=_OTHERS, label=other_label)
                    other_label = ""
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        if colours:
            legend(axis)


def line_of(step: int, row: Row) -> str:
    """Format a row as one line of JSON.

    >>> line_of(3, {"head": 0, "padding": float("nan")})
    '{"step": 3, "head": 0, "padding": null}'
    """
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps({"step": step, **plain}, allow_nan=False)
