"""What a run found, as tables for a screen and as the section of the page that shows them.

What this module meets:
- every table of the page is made here from the document alone, so page and file cannot disagree;
- it says where a peer is faster, which rows miss what they must reach, and what failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnscore.bench.cases import CASES
from attnscore.bench.peers import TITLES, YARDSTICKS
from attnscore.files import FileError

Row = Mapping[str, Any]
Cells = Sequence[str]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

SPEED_COLUMNS = ("case", "against", "threads", "ours", "theirs", "ratio", "spread", "must", "moonshot", "reached")
GROWTH_COLUMNS = (
    "case",
    "side",
    "parameters",
    "lengths",
    "time grows as",
    "peak memory grows as",
    "seconds",
    "peak, MB",
)
LIMIT_COLUMNS = ("threads", "float32 products, GFLOP/s", "bfloat16 products, GFLOP/s", "reading, GB/s")
RATE_COLUMNS = (
    *("case", "threads", "kernel", "GFLOP/s in products", "G activations/s", "GB/s of arrays"),
    *("of the products above", "of the reading above"),
)
MEMORY_COLUMNS = ("case", "tokens", "peak, MB", "inputs + outputs + gradients, MB", "over, MB", "must", "seconds")


def speed_cells(document: Row, *, short: bool = False) -> Iterator[Cells]:
    """The rows of the comparisons; `short`: names in place of sentences, for a screen.

    A ratio whose goals are marked ≤ is our time over the other's; all others are the reverse.
    """
    for row in _of_kind(document, "time"):
        words = (row["case"], row["peer"]) if short else (row["what"], TITLES[row["peer"]])
        head = (*words, str(row["threads"]))
        goals = (_goal(row, row["must"]), _goal(row, row["moonshot"]))
        if row["status"] != "measured":
            yield (*head, "", "", "not run", row["reason"], *goals, "")
            continue
        ratio = row["ratio"]
        reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
        spread = f"{ratio['q1']:.2f} to {ratio['q3']:.2f}"
        times = seconds(row["ours"]["median"]), seconds(row["theirs"]["median"])
        yield (*head, *times, f"{ratio['median']:.2f}", spread, *goals, reached)


def _goal(row: Row, goal: float | None) -> str:
    return "" if goal is None else f"≤ {goal:g}" if row["at_most"] else f"{goal:g}"


def limit_cells(document: Row) -> Iterator[Cells]:
    """What libraries reach on this machine."""
    for row in _of_kind(document, "limits"):
        rates = (row["products"]["float32"], row["products"]["bfloat16"], row["reading"])
        yield (str(row["threads"]), *(f"{rate / 1e9:.3g}" for rate in rates))


def rate_cells(document: Row) -> Iterator[Cells]:
    """What our side does in a second, and its share of what libraries reach."""
    seen = set()
    limits = {row["threads"]: row for row in _of_kind(document, "limits")}
    dtypes = {case.name: case.dtype for case in CASES}
    for row in _of_kind(document, "time"):
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


def growth_cells(document: Row, *, short: bool = False) -> Iterator[Cells]:
    """How time and memory grow with the number of tokens."""
    for row in _of_kind(document, "growth"):
        points, head = row["points"], (row["case"] if short else row["what"], _side(row), str(row["parameters"]))
        if row["status"] != "measured":
            yield (*head, "", "not run", row["reason"], "", "")
            continue
        lengths = ", ".join(str(point["length"]) for point in points)
        times = ", ".join(seconds(point["seconds"]["median"]) for point in points)
        peaks = ", ".join(f"{point['peak'] / 1e6:.1f}" for point in points)
        missed = " (**too fast**)" if row["reached"] is False else ""
        grows = (_power(row["time_exponent"]), _power(row["memory_exponent"]) + missed)
        yield (*head, lengths, *grows, times, peaks)


def memory_cells(document: Row, *, short: bool = False) -> Iterator[Cells]:
    """Peak memory of the long cases."""
    for row in _of_kind(document, "memory"):
        head = row["case"] if short else row["what"]
        if row["status"] != "measured":
            yield (head, "", "not run", row["reason"], "", "", "")
            continue
        point = row["points"][-1]
        sizes = (f"{point[name] / 1e6:.0f}" for name in ("peak", "arrays", "over"))
        must = f"≤ {row['must'] / 1e6:.0f}: {'yes' if row['reached'] else '**no**'}"
        yield (head, str(point["length"]), *sizes, must, seconds(point["seconds"]["median"]))


def _of_kind(document: Row, kind: str) -> list[Row]:
    """Rows in the order of the cases, whatever the order in which they were measured."""
    order = {case.name: place for place, case in enumerate(CASES)}
    rows = [row for row in document["rows"] if row["kind"] == kind]
    return sorted(rows, key=lambda row: order.get(row["case"], len(order)))


def _side(row: Row) -> str:
    return str(TITLES.get(row["side"], row["side"]))


def _power(p: float | None) -> str:
    return "" if p is None else f"n^{p:.2f}"


def seconds(s: float) -> str:
    """A time in the unit in which it has three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if s * factor >= 1:
            return f"{s * factor:.3g} {unit}"
    return f"{s * 1e6:.3g} µs"


def faster_peers(document: Row) -> list[str]:
    """Where a peer takes less time than we do, one sentence each."""
    found = []
    for row in _of_kind(document, "time"):
        if row["status"] != "measured" or row["peer"] in YARDSTICKS:
            continue
        times = row["ratio"]["median"] if row["at_most"] else 1 / row["ratio"]["median"]
        if times > 1:
            where = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
            found.append(f"{row['what']}, {where}: {TITLES[row['peer']]}, {times:.2f} times faster")
    return found


def missed(document: Row) -> list[str]:
    """The rows that do not reach what they must, each with whom it is against."""
    found = []
    for row in document["rows"]:
        if row.get("reached") is False:
            against = f" against {TITLES[row['peer']]}" if "peer" in row else f", {_side(row)}" if "side" in row else ""
            found.append(f"{row['case']}{against}, {row['threads']} thread{'s' * (row['threads'] > 1)}")
    return found


# --------------------------------------------------------------- the page


def section(document: Row) -> str:
    """Everything of the page that a run decides, in Markdown."""
    machine = document["machine"]
    parts = [
        f"Measured {document['date']} on: {machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, "
        f"{machine.get('memory_gb')} GB, {machine['system']}, Python {machine['python']}. "
        f"Flags: {' '.join(machine['flags']) or 'none known'}. Kernels: {', '.join(machine['kernels'])}.",
        "Versions: " + ", ".join(f"{n} {v or 'not installed'}" for n, v in machine["packages"].items()) + ".",
    ]
    if document["quick"]:
        parts.append("A quick run: three rounds and more, so the spreads say more than the medians.")
    for title, columns, cells in (
        ("Speed", SPEED_COLUMNS, speed_cells(document)),
        ("Limits of the machine", LIMIT_COLUMNS, limit_cells(document)),
        ("Rates reached", RATE_COLUMNS, rate_cells(document)),
        ("Growth", GROWTH_COLUMNS, growth_cells(document)),
        ("Memory of long sequences", MEMORY_COLUMNS, memory_cells(document)),
    ):
        rows = list(cells)
        parts += [f"### {title}", _markdown(columns, rows) if rows else "Not measured in this run."]
    for title, found, none in (
        ("Where a peer is faster", faster_peers(document), "Nowhere in this run."),
        ("Rows that miss what they must reach", missed(document), "None in this run."),
        ("Cases that failed", [f"{e['case']}: {e['error']}" for e in document["errors"]], "None in this run."),
    ):
        parts += [f"### {title}", "\n".join(f"- {each}" for each in found) if found else none]
    return "\n\n".join(parts)


def _markdown(columns: Cells, rows: Sequence[Cells]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page_with(text: str, document: Row) -> str:
    """A page with its section of results made anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise FileError(f"the page has no section between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{section(document)}\n\n{END}{tail}"
