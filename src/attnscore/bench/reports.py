"""Tables of a run, for a screen and as the section of a documentation page.

- Every table of a page is made here from the document alone, so page and file cannot disagree.
- They say where a baseline is faster, which rows miss their target, and what failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnscore.bench.baselines import BASELINES
from attnscore.bench.cases import CASES
from attnscore.io import FileError

Row = Mapping[str, Any]
Cells = Sequence[str]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

_CHARTED = "Many small shapes"
_SPEED = ("case", "against", "threads", "ours", "theirs", "ratio", "spread", "target", "stretch target", "reached")
_SHAPES = (
    *("case", "against", "threads", "shapes", "modes", "mean", "worst", "below", "target, mean", "target, worst"),
    "reached",
)
_GROWTH = ("case", "side", "parameters", "lengths", "time grows as", "peak memory grows as", "seconds", "peak, MB")
_LIMITS = ("threads", "float32 products, GFLOP/s", "bfloat16 products, GFLOP/s", "reading, GB/s")
_RATES = (
    *("case", "threads", "kernel", "GFLOP/s in products", "G activations/s", "GB/s of arrays"),
    *("of the products above", "of the reading above"),
)
_MEMORY = ("case", "tokens", "peak, MB", "inputs + outputs + gradients, MB", "over, MB", "target", "seconds")


def tables(document: Row, *, short: bool = False) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """Yield (title, columns, rows) of every table; `short`: names in place of sentences, for a screen."""
    yield "Speed", _SPEED, list(_speed(document, short))
    yield _CHARTED, _SHAPES, list(_shapes(document, short))
    yield "Limits of the machine", _LIMITS, list(_limits(document))
    if not short:
        yield "Rates reached", _RATES, list(_rates(document))
    yield "Growth", _GROWTH, list(_growth(document, short))
    yield "Memory of long sequences", _MEMORY, list(_memory(document, short))


def _speed(document: Row, short: bool) -> Iterator[Cells]:
    """Comparisons; a ratio whose targets are marked ≤ is our time over the baseline's, all others are the reverse."""
    for row in rows_of_kind(document, "time"):
        words = (row["case"], row["baseline"]) if short else (row["what"], _title(row["baseline"]))
        head = (*words, str(row["threads"]))
        targets = (_target(row, row["target"]), _target(row, row["stretch_target"]))
        if row["status"] != "measured":
            yield (*head, "", "", "not run", row["reason"], *targets, "")
            continue
        ratio = row["ratio"]
        spread = f"{ratio['q1']:.2f} to {ratio['q3']:.2f}"
        times = seconds(row["ours"]["median"]), seconds(row["theirs"]["median"])
        yield (*head, *times, f"{ratio['median']:.2f}", spread, *targets, _reached(row))


def _shapes(document: Row, short: bool) -> Iterator[Cells]:
    """Cases of many shapes: their geometric mean, the worst of them, and how many miss the target of the worst."""
    for row in rows_of_kind(document, "shapes"):
        head = (row["case"], row["baseline"]) if short else (row["what"], _title(row["baseline"]))
        targets = tuple("" if row[name] is None else f"{row[name]:g}" for name in ("target", "floor"))
        if row["status"] != "measured":
            yield (*head, str(row["threads"]), "", "", "not run", row["reason"], "", *targets, "")
            continue
        shapes, modes = ({point[name] for point in row["points"]} for name in ("shape", "mode"))
        worst = row["worst"]
        yield (
            *head, str(row["threads"]), str(len(shapes)), str(len(modes)), f"{row['geometric_mean']:.2f}",
            f"{worst['ratio']:.2f}: {worst['shape']}, {worst['mode']}", f"{row['below']} of {len(row['points'])}",
            *targets, _reached(row),
        )  # fmt: skip


def _reached(row: Row) -> str:
    return {True: "yes", False: "**no**", None: ""}[row["reached"]]


def _target(row: Row, target: float | None) -> str:
    return "" if target is None else f"≤ {target:g}" if row["at_most"] else f"{target:g}"


def _limits(document: Row) -> Iterator[Cells]:
    """Rates that libraries reach on this machine."""
    for row in rows_of_kind(document, "limits"):
        rates = (row["products"]["float32"], row["products"]["bfloat16"], row["reading"])
        yield (str(row["threads"]), *(f"{rate / 1e9:.3g}" for rate in rates))


def _rates(document: Row) -> Iterator[Cells]:
    """Rates of our side, and their share of those that libraries reach."""
    seen = set()
    limits = {row["threads"]: row for row in rows_of_kind(document, "limits")}
    dtypes = {case.name: case.dtype for case in CASES}
    for row in rows_of_kind(document, "time"):
        if row["status"] != "measured" or (row["case"], row["threads"]) in seen:
            continue
        seen.add((row["case"], row["threads"]))
        work, time = row["work"], row["ours"]["median"]
        rates = (
            f"{work[name] / time / 1e9:.3g}" if work[name] else "" for name in ("operations", "activations", "bytes")
        )
        limit = limits.get(row["threads"])
        shares: Cells = ("", "")
        if limit is not None:
            most = limit["products"][dtypes.get(row["case"], "float32")], limit["reading"]
            done = work["operations"], work["bytes"]
            shares = tuple(f"{each / time / peak:.0%}" for each, peak in zip(done, most, strict=True))
        yield (row["what"], str(row["threads"]), row["kernel"], *rates, *shares)


def _growth(document: Row, short: bool) -> Iterator[Cells]:
    """Growth of time and memory with the number of tokens."""
    for row in rows_of_kind(document, "growth"):
        points, head = (
            row["points"],
            (row["case"] if short else row["what"], _title(row["side"]), str(row["parameters"])),
        )
        if row["status"] != "measured":
            yield (*head, "", "not run", row["reason"], "", "")
            continue
        lengths = ", ".join(str(point["length"]) for point in points)
        times = ", ".join(seconds(point["seconds"]["median"]) for point in points)
        peaks = ", ".join(f"{point['peak'] / 1e6:.1f}" for point in points)
        missed = " (**too fast**)" if row["reached"] is False else ""
        grows = (_power(row["time_exponent"]), _power(row["memory_exponent"]) + missed)
        yield (*head, lengths, *grows, times, peaks)


def _memory(document: Row, short: bool) -> Iterator[Cells]:
    """Peak memory of the long cases."""
    for row in rows_of_kind(document, "memory"):
        head = row["case"] if short else row["what"]
        if row["status"] != "measured":
            yield (head, "", "not run", row["reason"], "", "", "")
            continue
        point = row["points"][-1]
        sizes = (f"{point[name] / 1e6:.0f}" for name in ("peak", "arrays", "over"))
        target = f"≤ {row['target'] / 1e6:.0f}: {'yes' if row['reached'] else '**no**'}"
        yield (head, str(point["length"]), *sizes, target, seconds(point["seconds"]["median"]))


def rows_of_kind(document: Row, kind: str) -> list[Row]:
    """Rows of a kind in the order of the cases, whatever the order in which they were measured."""
    order = {case.name: place for place, case in enumerate(CASES)}
    rows = [row for row in document["rows"] if row["kind"] == kind]
    return sorted(rows, key=lambda row: order.get(row["case"], len(order)))


def _title(side: str) -> str:
    return BASELINES[side].title if side in BASELINES else side


def _threads(row: Row) -> str:
    return f"{row['threads']} thread{'s' * (row['threads'] > 1)}"


def _power(p: float | None) -> str:
    return "" if p is None else f"n^{p:.2f}"


def seconds(s: float) -> str:
    """Format a time in the unit in which it has three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if s * factor >= 1:
            return f"{s * factor:.3g} {unit}"
    return f"{s * 1e6:.3g} µs"


def faster_baselines(document: Row) -> list[str]:
    """Say where a baseline takes less time than we do, one sentence each."""
    found = []
    for row in rows_of_kind(document, "time"):
        if row["status"] != "measured" or not BASELINES[row["baseline"]].is_alternative:
            continue
        times = row["ratio"]["median"] if row["at_most"] else 1 / row["ratio"]["median"]
        if times > 1:
            found.append(f"{row['what']}, {_threads(row)}: {_title(row['baseline'])}, {times:.2f} times faster")
    for row in rows_of_kind(document, "shapes"):
        slower = sum(point["ratio"] < 1 for point in row["points"])
        if slower:
            found.append(
                f"{row['what']}, {_threads(row)}: {_title(row['baseline'])}, in {slower} of {len(row['points'])} "
                f"measurements, up to {1 / row['worst']['ratio']:.2f} times faster"
            )
    return found


def missed(document: Row) -> list[str]:
    """Name the rows that do not reach their target, each with its baseline."""
    found = []
    for row in document["rows"]:
        if row.get("reached") is False:
            side = f" against {_title(row['baseline'])}" if "baseline" in row else f", {_title(row['side'])}"
            found.append(f"{row['case']}{side}, {_threads(row)}")
    return found


def section(document: Row, chart: str | None = None) -> str:
    """Return everything of a page that a run decides, in Markdown; `chart` is the picture of the small shapes."""
    machine = document["machine"]
    parts = [
        f"Measured {document['date']} on: {machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, "
        f"{machine.get('memory_gb')} GB, {machine['system']}, Python {machine['python']}. "
        f"Flags: {' '.join(machine['flags']) or 'none known'}. Kernels: {', '.join(machine['kernels'])}."
        + (f" All sides limited to {machine['isa']}." if "isa" in machine else ""),
        "Versions: " + ", ".join(f"{n} {v or 'not installed'}" for n, v in machine["packages"].items()) + ".",
    ]
    if document["quick"]:
        parts.append("A quick run: three rounds and more, so the spreads say more than the medians.")
    for title, columns, rows in tables(document):
        parts += [f"### {title}", _markdown(columns, rows) if rows else "Not measured in this run."]
        if title == _CHARTED and rows and chart:
            parts.append(f"![Ratios of all small shapes, one column for each case]({chart})")
    for title, found, none in (
        ("Where a baseline is faster", faster_baselines(document), "Nowhere in this run."),
        ("Rows that miss their target", missed(document), "None in this run."),
        ("Cases that failed", [f"{e['case']}: {e['error']}" for e in document["errors"]], "None in this run."),
    ):
        parts += [f"### {title}", "\n".join(f"- {each}" for each in found) if found else none]
    return "\n\n".join(parts)


def _markdown(columns: Cells, rows: Iterable[Cells]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page_with(text: str, document: Row, chart: str | None = None) -> str:
    """Return a page with its section of results made anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise FileError(f"the page has no section between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{section(document, chart)}\n\n{END}{tail}"
