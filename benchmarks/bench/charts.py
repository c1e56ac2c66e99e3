"""Charts of runs: the ratio of every small shape of one, and the speed of several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.reports import OVERVIEW, overview_rows, rows_of_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"forward": "#2166ac", "weights": "#e08214", "backward": "#b2182b"}
_LABELS = {"forward": "forward", "weights": "forward, weights returned or read", "backward": "forward + backward"}
# Greys that stand out as well from a white page as from a dark one.
_LINE = "#8c8c8c"
_GRID: dict[str, Any] = {"color": _LINE, "alpha": 0.25, "linewidth": 0.6}
_OFFSET = 0.22  # of a column, between modes
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def has_shapes(document: Mapping[str, Any]) -> bool:
    """Whether there is something to draw."""
    return bool(_measured(document))


def _measured(document: Mapping[str, Any]) -> list[Any]:
    return [row for row in rows_of_kind(document, "shapes") if row["status"] == "measured"]


def small_shapes(document: Mapping[str, Any]) -> Figure:
    """Draw the ratios on a logarithmic axis, one panel for each number of threads; bars are geometric means."""
    from matplotlib.figure import Figure

    rows = _measured(document)
    threads = sorted({row["threads"] for row in rows})
    columns = list(dict.fromkeys((row["case"], row["baseline"]) for row in rows))
    # At least as wide as the legend.
    figure = Figure(figsize=(max(6.5, 1.5 + 0.85 * len(columns)), 1.6 + 3.2 * len(threads)), layout="constrained")
    panels = figure.subplots(len(threads), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, number in zip(panels, threads, strict=True):
        for row in rows:
            if row["threads"] == number:
                _draw_column(axis, columns.index((row["case"], row["baseline"])), row)
        axis.axhline(1, color=_LINE, linewidth=1.2)
        _scale_ratios(axis, "y", f"baseline's time / ours, {number} thread{'s' * (number > 1)}")
    what = {row["case"]: row["what"].removeprefix("small shapes, ") for row in rows}
    # A case with one baseline is named without it.
    once = {case for case, _ in columns if sum(case == other for other, _ in columns) == 1}
    names = []
    for case, baseline in columns:
        against = "" if case in once else f"\nagainst {baseline.replace('-layer', '.layers')}"
        names.append(what[case] + against)
    panels[-1].set_xticks(range(len(columns)), names, rotation=35, ha="right")
    marks = [
        panels[0].plot([], [], "o", color=colour, markersize=4, label=_LABELS[mode])[0]
        for mode, colour in _COLOURS.items()
    ]
    marks.append(panels[0].plot([], [], color=_LINE, linewidth=1.6, label="geometric mean")[0])
    figure.legend(handles=marks, loc="outside upper left", ncols=len(marks), frameon=False)
    return figure


def _scale_ratios(axis: Any, which: str, label: str) -> None:
    """Make the x or the y axis one of ratios, logarithmic, with a grid behind the marks."""
    axis.set(**{f"{which}scale": "log", f"{which}label": label})
    scale = getattr(axis, f"{which}axis")
    low, high = scale.get_view_interval()
    scale.set_ticks([tick for tick in _TICKS if low <= tick <= high])
    scale.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(axis=which, **_GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_column(axis: Any, at: int, row: Mapping[str, Any]) -> None:
    modes = [mode for mode in _COLOURS if any(point["mode"] == mode for point in row["points"])]
    for place, mode in enumerate(modes):
        ratios = [point["ratio"] for point in row["points"] if point["mode"] == mode]
        x = at + _OFFSET * (place - (len(modes) - 1) / 2)
        axis.plot([x] * len(ratios), ratios, "o", color=_COLOURS[mode], markersize=3, alpha=0.6, markeredgewidth=0)
    axis.hlines(row["geometric_mean"], at - 0.38, at + 0.38, color=_LINE, linewidth=1.6)


_MARKS = ("o", "s", "D", "^", "v", "P")
_SHADES = ("#b2182b", "#2166ac", "#4d9221", "#762a83", "#e08214", _LINE)


def overview(documents: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the rows of the page of all machines by their groups, on a logarithmic axis, one mark for each machine."""
    from matplotlib.figure import Figure

    rows = overview_rows(documents)
    heights, names = _lines_of_groups()
    figure = Figure(figsize=(9, 0.6 + 0.33 * (heights[-1] + 1)), layout="constrained")
    axis = figure.subplots()
    for place, (name, mark, colour) in enumerate(zip(documents, _MARKS, _SHADES, strict=False)):
        # Machines one below the other: equal ratios do not hide one another.
        offset = 0.16 * (place - (len(documents) - 1) / 2)
        ratios = [row[2][place] for row in rows]
        points = [(ratio, y + offset) for y, ratio in zip(heights, ratios, strict=True) if ratio is not None]
        axis.plot(*zip(*points, strict=True), mark, color=colour, markersize=5, alpha=0.85, label=name)
    axis.axvline(1, color=_LINE, linewidth=1.2)
    _scale_ratios(axis, "x", "times as fast as the baseline, 2 threads")
    # The longest labels take two lines, which leaves the width to the ratios.
    labels = [(" |\n" if len(what + against) > 76 else "  |  ").join((what, against)) for what, against, _ in rows]
    axis.set_yticks(heights, labels, fontsize=9)
    style: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "ha": "right", "va": "center"}
    for name, y in names.items():
        axis.text(-0.02, y, name, transform=axis.get_yaxis_transform(), **style)
    axis.set_ylim(heights[-1] + 0.8, -0.8)
    axis.legend(loc="lower right", frameon=False, fontsize=8)
    return figure


def _lines_of_groups() -> tuple[list[int], dict[str, int]]:
    """Return the line of each row and of each group's name, which stands above the rows of the group."""
    heights: list[int] = []
    names: dict[str, int] = {}
    for group, members in OVERVIEW.items():
        names[group] = len(heights) + len(names)
        heights += range(names[group] + 1, names[group] + 1 + len(members))
    return heights, names
