"""Records of a model's attention: numbers per layer and head, verdicts, tables, JSON lines, a picture.

Requirements:
- means are over queries that attend to a key, of all sampled steps; the largest logit is the largest of all;
- rows are plain dictionaries of the same names: what pandas.DataFrame and json.dumps take;
- rich and matplotlib are imported only for a table or a picture.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.diagnostics.watching.health import Thresholds, Verdict, clip_factor, verdicts_of
from attnscore.errors import ArgumentError, message
from attnscore.io import require
from attnscore.plotting.drawing import (
    BLUE,
    RED,
    colour_bar,
    draw_map,
    label,
    legend,
    mark_cell,
    new_figure,
    short_number,
    style_lines,
    two_decimals,
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
# Title and unit of each map.
_MAPS = {
    "max_logit": ("Largest logit", "logit"),
    "entropy": ("Entropy", "nats"),
    "saturated_rows": ("Saturated queries", "share of the queries"),
    "first_key": ("Weight on the first key", "share of the weight"),
}
_SERIES = ("max_logit", "entropy")
# Columns of tables.
_COLUMNS = ("max_logit", "logit_variance", "entropy", "effective_keys", "saturated_rows", "first_key", "clip")
_OTHERS = "#9aa5ab"
# Colours of failing heads; where there are more heads than colours, all are red and without a name.
_NAMED = (RED, "#e08214", "#8a63c9", "#2e9e5b", BLUE, "#0f9d94")
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

    @property
    def _layers(self) -> tuple[Layer, ...]:
        """The layers of now: another thread may add to them."""
        return tuple(self.layers.values())

    def rows(self) -> list[Row]:
        """Return a row for each layer and head: means over the queries of all sampled steps, and the largest logit.

        ``pandas.DataFrame(seen.rows())`` is a table of them. Names: layer, head, rows (queries that attend to a key),
        empty_rows (fully masked queries), nan_rows (queries whose weights are NaN), logit_mean, logit_variance,
        log_sum_exp, entropy, max_weight, effective_keys, jacobian_trace, first_key, max_logit, choice_rows (queries
        that attend to more than one key), saturated_rows (share of those), padding (share of the weight, NaN where
        padding is unknown), clip (the factor of QK-clip).
        """
        tau = self.thresholds.tau
        return [row for layer in self._layers for row in layer.rows(layer.total, tau)]

    def last(self) -> list[Row]:
        """Return the rows of the last sampled step alone, as a repair needs: the largest logit of a run never falls."""
        number = max((layer.steps[-1][0] for layer in self._layers), default=-1)
        found = [(layer, *layer.steps[-1]) for layer in self._layers]
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
        # A copy, as in `_layers`.
        steps, tau = tuple(self.layers[layer].steps), self.thresholds.tau
        return [step for step, _ in steps], np.array([_column(sums, name, tau) for _, sums in steps], dtype=np.float64)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts grouped by head: heads with a failure first, and of each its failures first."""
        found: list[Verdict] = []
        for layer in self._layers:
            entropies, largest = (self.history(layer.name, name)[1] for name in ("entropy", "max_logit"))
            for head, row in enumerate(layer.rows(layer.total, self.thresholds.tau)):
                series = [float(x) for x in entropies[:, head]], [float(x) for x in largest[:, head]]
                found += verdicts_of(layer.name, head, row, *series, self.thresholds)
        failed = {(verdict.layer, verdict.head) for verdict in found if verdict.failure}
        place = {name: number for number, name in enumerate(self.layers)}
        return sorted(
            found,
            key=lambda one: ((one.layer, one.head) not in failed, place[one.layer], one.head, not one.failure),
        )

    def failing(self) -> list[tuple[str, int]]:
        """Return layer and head of every head with a failure, in the order of the layers."""
        return list(dict.fromkeys((verdict.layer, verdict.head) for verdict in self.verdicts() if verdict.failure))

    def json_lines(self, since: int = 0) -> Iterator[str]:
        """Yield one line for each kept step from `since` on, layer and head: `step` and the names of `rows`.

        Written as json.dumps does; NaN and infinity become null.
        """
        kept = [(step, layer, sums) for layer in self._layers for step, sums in tuple(layer.steps) if step >= since]
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
        """Return a line for each head with verdicts, and one for the calls that were not seen of each module."""
        heads: dict[str, list[str]] = {}
        for verdict in self.verdicts():
            heads.setdefault(f"{verdict.layer}, head {verdict.head}", []).append(f"{verdict.what} ({verdict.words})")
        unseen = [f"{name}: {count} calls not seen: {why}" for (name, why), count in self.unseen.items()]
        return [*(f"{head}: {'; '.join(words)}" for head, words in heads.items()), *unseen]

    def __str__(self) -> str:
        """Return the verdicts, a line for each head, and the calls that were not seen."""
        return "\n".join([self._title(), *self._lines()])

    def to_html(self, path: str | Path, *, title: str = "What a model's attention did") -> Path:
        """Write verdicts, the picture and a table of the heads as one HTML file for offline use (needs matplotlib)."""
        from attnscore.diagnostics.page import Section, write_page

        rows = [
            {name: row[name] for name in ("layer", "head", *_COLUMNS)}
            | {"verdicts": ", ".join(verdict.what for verdict in verdicts)}
            for row, verdicts in self._judged_rows()
        ]
        sections = [Section("Verdicts", self._lines() or ["Nothing stands out." if rows else "Nothing was recorded."])]
        if rows:  # without a sampled step there is nothing to draw
            sections.append(Section("Heads", ["Means over all queries of the sampled steps."], rows, self.plot()))
        return write_page(path, title, self._title(), sections)

    def plot(self) -> Figure:
        """Draw maps of layers by heads; under them the largest logit and the entropy of each head over the steps.

        A quantity has the same scale in every picture where it has one: shares from 0 to 1, logits over the powers of
        ten around `tau`. Darker cells are closer to collapse in every map; heads with a failure are framed and named.
        """
        if not self.layers:
            sampled = f"none in {self.sampled} sampled of {self.steps} steps"
            raise ArgumentError(message("plot", "a recorded attention call", sampled))
        names, heads = list(self.layers), max(layer.heads for layer in self._layers)
        series = _SERIES if self.sampled > 1 else ()
        tall = max(1.5, 0.26 * len(names) + 0.8)
        heights = [tall, tall, *([2.5] if series else [])]
        size = 2 * max(3.6, 0.3 * heads + 0.9) + 0.6, sum(heights) + 0.8
        pattern, short = _short_names(names)
        figure = new_figure(size, title=self._heading(pattern))
        axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights).ravel()
        for place, (axis, (name, (title, unit))) in enumerate(zip(axes, _MAPS.items(), strict=False)):
            values = np.ma.masked_array(np.zeros((len(names), heads)), True)  # layers may have fewer heads than others
            for row in self.rows():
                values[names.index(row["layer"]), row["head"]] = row[name]
            image = draw_map(axis, values.filled(math.nan), short, every=heads <= 24, **self._scale(name))
            axis.set_aspect("auto")
            if values.size <= _MOST_NUMBERS:
                write_numbers(axis, image, values, short_number if name == "max_logit" else two_decimals)
            for layer, head in self.failing():
                mark_cell(axis, names.index(layer), head)
            label(axis, title, "head", "layer" if place % 2 == 0 else "", title_points=10)
            colour_bar(figure, image, [axis], unit)
        for axis, name in zip(axes[len(_MAPS) :], series, strict=True):
            title, unit = _MAPS[name]
            style_lines(axis, f"{title} of each head, by step", "step", unit)
            self._draw_series(axis, name)
        return figure

    def _heading(self, pattern: str) -> str:
        """Return the title of the picture: the heads that fail and, where they are few, why."""
        words: dict[str, list[str]] = {}
        for verdict in self.verdicts():
            if verdict.failure:
                words.setdefault(f"{verdict.layer}, head {verdict.head}", []).append(verdict.what)
        total = sum(layer.heads for layer in self._layers)
        lines = [f"Framed: {len(words)} of {total} heads fail" if words else f"None of {total} heads fails"]
        if len(words) <= len(_NAMED):
            lines += [f"{head}: {', '.join(found)}" for head, found in words.items()]
        layers = f"; layer * is {pattern}" if pattern else ""
        return "\n".join([*lines, f"Darker cells: closer to collapse onto one key{layers}"])

    def _scale(self, name: str) -> dict[str, Any]:
        """Return limits and colours of a map; darker cells are those of a head that attends to fewer keys."""
        if name not in _SERIES:
            return {"limits": (0.0, 1.0)}
        # Of all steps: entropies that have fallen are dark by what they were.
        recorded = np.concatenate([self.history(layer, name)[1].ravel() for layer in self.layers])
        largest = float(recorded[np.isfinite(recorded)].max(initial=1.0))
        if name == "entropy":
            return {"limits": (0.0, largest), "cmap": "Reds_r"}
        tau = self.thresholds.tau
        return {"limits": (tau / 100, max(tau, largest)), "logarithmic": True}

    def _draw_series(self, axis: Axes, name: str) -> None:
        """Draw a number of each head over the steps, failing heads in colour and, where they are few, by name."""
        from matplotlib.ticker import MaxNLocator

        failing = self.failing()
        colours = dict(zip(failing, _NAMED, strict=False)) if len(failing) <= len(_NAMED) else {}
        for layer in self._layers:
            steps, values = self.history(layer.name, name)
            for head in range(layer.heads):
                if (place := (layer.name, head)) in failing:
                    own_label = f"{layer.name}, head {head}" if colours else "failing heads"
                    style: dict[str, Any] = {"linewidth": 1.6, "color": colours.get(place, RED), "zorder": 3}
                else:
                    own_label, style = "other heads", {"linewidth": 0.7, "color": _OTHERS, "zorder": 1}
                axis.plot(steps, values[:, head], label=own_label, **style)
        if name == "max_logit":
            axis.set_yscale("log", nonpositive="mask")
            axis.axhline(self.thresholds.tau, linestyle="--", linewidth=1, color=_OTHERS, label="τ, allowed by QK-clip")
        else:
            axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        # Not get_legend_handles_labels, which leaves out names that begin with "_".
        once = {str(line.get_label()): line for line in axis.lines}
        legend(axis, handles=list(once.values()), labels=list(once))


def _short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what dotted names have in common, with a star for the rest (empty: nothing), and the rest of each.

    >>> _short_names(["layers.0.attn", "layers.1.attn"])
    ('layers.*.attn', ['0', '1'])
    >>> _short_names(["encoder", "decoder"]), _short_names(["only.one"])
    (('', ['encoder', 'decoder']), ('', ['only.one']))
    """
    parts = [name.split(".") for name in names]
    before = _common(parts)
    after = _common([part[before:][::-1] for part in parts])
    short = [".".join(part[before : len(part) - after]) for part in parts]
    if before + after == 0 or not all(short):
        return "", list(names)
    return ".".join([*parts[0][:before], "*", *parts[0][len(parts[0]) - after :]]), short


def _common(lists: Sequence[Sequence[str]]) -> int:
    """Return how many first items all lists share."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def line_of(step: int, row: Row) -> str:
    """Format a row as one line of JSON.

    >>> line_of(3, {"head": 0, "padding": float("nan")})
    '{"step": 3, "head": 0, "padding": null}'
    """
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
    return json.dumps({"step": step, **plain}, allow_nan=False)
