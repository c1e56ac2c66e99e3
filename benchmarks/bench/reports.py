"""Tables of a run, for a screen and as the section of a documentation page.

- Every table of a page is made here from the documents alone, so page and file cannot disagree.
- A page says when and at which commit its numbers were measured, and where a baseline is faster.
- Targets are the benchmark's own concern: its screen shows them, no page does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnscore.errors import FileError
from bench.baselines import BASELINES
from bench.cases import CASES

Row = Mapping[str, Any]
Cells = Sequence[str]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

_CHARTED = "Many small shapes"
_SPEED = ("case", "against", "threads", "ours", "theirs", "times as fast", "spread")
_COST = ("case", "threads", "with", "without", "times as long", "spread")
_SHAPES = ("case", "against", "threads", "shapes", "modes", "mean", "worst", "slower")
_GROWTH = ("case", "side", "parameters", "lengths", "time grows as", "peak memory grows as", "seconds", "peak, MB")
_LIMITS = ("threads", "float32 products, GFLOP/s", "bfloat16 products, GFLOP/s", "reading, GB/s")
_RATES = (
    *("case", "threads", "kernel", "GFLOP/s in products", "G activations/s", "GB/s of arrays"),
    *("of the products above", "of the reading above"),
)
_MEMORY = ("case", "tokens", "peak, MB", "inputs + outputs + gradients, MB", "over, MB", "seconds")

# The rows of the page of all machines, on two threads: case, baseline, what they say.
OVERVIEW = (
    ("dot", "sdpa", "scaled dot, forward"),
    ("dot", "onnxruntime", "scaled dot, forward"),
    ("dot-backward", "sdpa", "scaled dot, forward + backward"),
    ("dot-bfloat16", "sdpa", "scaled dot, bfloat16, forward"),
    ("causal", "sdpa", "causal, forward"),
    ("padded", "sdpa", "half the keys padded, forward"),
    ("window", "sdpa", "window of 256 in 8192 tokens, forward"),
    ("decoding", "sdpa", "1 query, 32768 keys"),
    ("additive", "naive", "additive, 512 tokens, h 256, forward"),
    ("additive", "compile", "additive, 512 tokens, h 256, forward"),
    ("additive-backward", "naive", "additive, 512 tokens, h 256, forward + backward"),
    ("additive-long", "sdpa", "additive against scaled dot, h 64, forward"),
    ("numpy", "numpy", "scaled dot from NumPy, forward"),
    ("jax", "jax", "scaled dot from JAX, jit, forward"),
    ("tensorflow-graph", "tensorflow", "scaled dot from tf.function, forward"),
    ("tiny", "sdpa", "a tiny call, forward"),
)


def screen_tables(document: Row) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """Yield (title, columns, rows) of every table for a screen: names in place of sentences, and the targets."""
    speed = ("case", "against", "threads", "ours", "theirs", "ratio", "spread", "target", "stretch target", "reached")
    yield "Speed", speed, list(_targeted(document))
    shapes = (*_SHAPES[:-1], "below", "target, mean", "target, worst", "reached")
    yield _CHARTED, shapes, list(_shapes(document, short=True))
    yield "Limits of the machine", _LIMITS, list(_limits(document))
    yield "Growth", (*_GROWTH, "reached"), list(_growth(document, short=True))
    yield "Memory of long sequences", (*_MEMORY, "target"), list(_memory(document, short=True))


def page_tables(document: Row) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """Yield (title, columns, rows) of every table of a page."""
    yield "Speed", _SPEED, list(_speed(document))
    yield "What options cost", _COST, list(_costs(document))
    yield _CHARTED, _SHAPES, list(_shapes(document, short=False))
    yield "Limits of the machine", _LIMITS, list(_limits(document))
    yield "Rates reached", _RATES, list(_rates(document))
    yield "Growth", _GROWTH, list(_growth(document, short=False))
    yield "Memory of long sequences", _MEMORY, list(_memory(document, short=False))


def _targeted(document: Row) -> Iterator[Cells]:
    """Comparisons; a ratio whose targets are marked ≤ is our time over the baseline's, all others are the reverse."""
    for row in rows_of_kind(document, "time"):
        head = (row["case"], row["baseline"], str(row["threads"]))
        targets = (_target(row, row["target"]), _target(row, row["stretch_target"]))
        if row["status"] != "measured":
            yield (*head, "", "", "not run", row["reason"], *targets, "")
            continue
        ratio = row["ratio"]
        yield (*head, *_times(row), *_spread(ratio["median"], ratio["q1"], ratio["q3"]), *targets, _reached(row))


def _speed(document: Row) -> Iterator[Cells]:
    """Comparisons with other implementations: the baseline's time over ours in every row."""
    for row in rows_of_kind(document, "time"):
        if row["baseline"] == "without":
            continue
        head = (row["what"], _title(row["baseline"]), str(row["threads"]))
        if row["status"] != "measured":
            yield (*head, "", "", "not run", row["reason"])
        else:
            yield (*head, *_times(row), *_spread(*times_as_fast(row)))


def _costs(document: Row) -> Iterator[Cells]:
    """Options and masks against the same call without them: our time with over our time without."""
    for row in rows_of_kind(document, "time"):
        if row["baseline"] != "without":
            continue
        head = (row["what"], str(row["threads"]))
        if row["status"] != "measured":
            yield (*head, "", "", "not run", row["reason"])
        else:
            fast, low, high = times_as_fast(row)
            yield (*head, *_times(row), *_spread(1 / fast, 1 / high, 1 / low))


def times_as_fast(row: Row) -> tuple[float, float, float]:
    """Return the baseline's time over ours: median and quartiles."""
    ratio = row["ratio"]
    if row["at_most"]:
        return 1 / ratio["median"], 1 / ratio["q3"], 1 / ratio["q1"]
    return ratio["median"], ratio["q1"], ratio["q3"]


def _times(row: Row) -> Cells:
    return seconds(row["ours"]["median"]), seconds(row["theirs"]["median"])


def _spread(median: float, low: float, high: float) -> Cells:
    return f"{median:.2f}", f"{low:.2f} to {high:.2f}"


def _shapes(document: Row, short: bool) -> Iterator[Cells]:
    """Cases of many shapes: their geometric mean, the worst of them, and how many are slower than the baseline.

    On a screen (`short`): how many are below their target, and the targets.
    """
    for row in rows_of_kind(document, "shapes"):
        head = (row["case"], row["baseline"]) if short else (row["what"], _title(row["baseline"]))
        targets: Cells = ()
        if short:
            targets = (*("" if row[name] is None else f"{row[name]:g}" for name in ("target", "floor")), _reached(row))
        if row["status"] != "measured":
            yield (*head, str(row["threads"]), "", "", "not run", row["reason"], "", *targets)
            continue
        points, worst = row["points"], row["worst"]
        shapes, modes = ({point[name] for point in points} for name in ("shape", "mode"))
        count = row["below"] if short else sum(point["ratio"] < 1 for point in points)
        yield (
            *head, str(row["threads"]), str(len(shapes)), str(len(modes)), f"{row['geometric_mean']:.2f}",
            f"{worst['ratio']:.2f}: {worst['shape']}, {worst['mode']}", f"{count} of {len(points)}", *targets,
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
        # Of a whole model no work is counted.
        if row["status"] != "measured" or not row["work"] or (row["case"], row["threads"]) in seen:
            continue
        seen.add((row["case"], row["threads"]))
        work, time = row["work"], row["ours"]["median"]
        rates = (
            f"{work[name] / time / 1e9:.3g}" if work[name] else "" for name in ("operations", "activations", "bytes")
        )
        limit = limits.get(row["threads"])
        shares: Cells = ("", "")
        if limit is not None:
            products = limit["products"]
            # Some libraries multiply 16-bit numbers more slowly than float32, which kernels may widen them to.
            most = max(products["float32"], products[dtypes.get(row["case"], "float32")]), limit["reading"]
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
            yield (*head, "", "not run", row["reason"], "", "", *(("",) if short else ()))
            continue
        lengths = ", ".join(str(point["length"]) for point in points)
        times = ", ".join(seconds(point["seconds"]["median"]) for point in points)
        peaks = ", ".join(f"{point['peak'] / 1e6:.1f}" for point in points)
        grows = (_power(row["time_exponent"]), _power(row["memory_exponent"]))
        yield (*head, lengths, *grows, times, peaks, *((_reached(row),) if short else ()))


def _memory(document: Row, short: bool) -> Iterator[Cells]:
    """Peak memory of the long cases."""
    for row in rows_of_kind(document, "memory"):
        head = row["case"] if short else row["what"]
        if row["status"] != "measured":
            yield (head, "", "not run", row["reason"], "", "", *(("",) if short else ()))
            continue
        point = row["points"][-1]
        sizes = (f"{point[name] / 1e6:.0f}" for name in ("peak", "arrays", "over"))
        target = (f"≤ {row['target'] / 1e6:.0f}: {_reached(row)}",) if short else ()
        yield (head, str(point["length"]), *sizes, seconds(point["seconds"]["median"]), *target)


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
        times = 1 / times_as_fast(row)[0]
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


def measured(document: Row) -> str:
    """Say when a document was measured, and at which commit where it is known."""
    commit = document.get("commit")
    return f"{document['date']}" + (f", at commit `{commit}`" if commit else "")


def section(document: Row, chart: str | None = None) -> str:
    """Return everything of a machine's page that a run decides, in Markdown; `chart` shows the small shapes."""
    machine = document["machine"]
    parts = [
        f"Measured {measured(document)}, on: {machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, "
        f"{machine.get('memory_gb')} GB, {machine['system']}, Python {machine['python']}. "
        f"Flags: {' '.join(machine['flags']) or 'none known'}. Kernels: {', '.join(machine['kernels'])}."
        + (f" All sides limited to {machine['isa']}." if "isa" in machine else ""),
        "Versions: " + ", ".join(f"{n} {v or 'not installed'}" for n, v in machine["packages"].items()) + ".",
    ]
    if document["quick"]:
        parts.append("A quick run: three rounds and more, so the spreads say more than the medians.")
    if earlier := sorted({f"{row['case']} ({measured(row)})" for row in document["rows"] if "date" in row}):
        parts.append("Measured earlier: " + ", ".join(earlier) + ".")
    for title, columns, rows in page_tables(document):
        parts += [f"### {title}", _markdown(columns, rows) if rows else "Not measured in this run."]
        if title == _CHARTED and rows and chart:
            parts.append(f"![Ratios of all small shapes, one column for each case]({chart})")
    for title, found, none in (
        ("Where a baseline is faster", faster_baselines(document), "Nowhere in this run."),
        ("Cases that failed", [f"{e['case']}: {e['error']}" for e in document["errors"]], "None in this run."),
    ):
        parts += [f"### {title}", "\n".join(f"- {each}" for each in found) if found else none]
    return "\n\n".join(parts)


def overview_rows(documents: Mapping[str, Row], threads: int = 2) -> list[tuple[str, str, list[float | None]]]:
    """Return (case, baseline, times as fast on each machine) of the rows of `OVERVIEW`; None: not measured there."""
    found = []
    for case, baseline, what in OVERVIEW:
        ratios = [_ratio_of(document, case, baseline, threads) for document in documents.values()]
        found.append((what, _title(baseline), ratios))
    return found


def _ratio_of(document: Row, case: str, baseline: str, threads: int) -> float | None:
    for row in rows_of_kind(document, "time"):
        if (row["case"], row["baseline"], row["threads"], row["status"]) == (case, baseline, threads, "measured"):
            return times_as_fast(row)[0]
    return None


def overview(documents: Mapping[str, Row], links: Mapping[str, str], chart: str) -> str:
    """Return the section of the page of all machines: a chart, some rows, and where a baseline is faster."""
    columns = ["times as fast, 2 threads", "against", *(f"[{name}]({links[name]})" for name in documents)]
    rows = [
        [what, against, *("" if ratio is None else f"{ratio:.2g}" for ratio in ratios)]
        for what, against, ratios in overview_rows(documents)
    ]
    slower = [f"- {name}: {sentence}" for name, found in documents.items() for sentence in faster_baselines(found)]
    dates = "; ".join(f"{name} {measured(document)}" for name, document in documents.items())
    return "\n\n".join([
        f"![Times as fast as each baseline, one mark for each machine]({chart})",
        _markdown(columns, rows),
        f"Measured: {dates}.",
        "### Where a baseline is faster",
        "\n".join(slower) or "Nowhere.",
    ])  # fmt: skip


def _markdown(columns: Cells, rows: Iterable[Cells]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page_with(text: str, content: str) -> str:
    """Return a page with its section of results made anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise FileError(f"the page has no section between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{content}\n\n{END}{tail}"
