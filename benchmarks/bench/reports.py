"""Tables of a run for a screen, and the tables of all machines for the page of performance.

- The page is made here from the files of results alone, so page and files cannot disagree.
- Every ratio is the baseline's time over ours: above 1 we are faster.
- The page says when each machine was measured, and where a baseline is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnscore.errors import FileError
from bench.baselines import BASELINES
from bench.cases import CASES

Row = Mapping[str, Any]
Cells = Sequence[str]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

# Calls on the page of all machines, on two threads, by the groups of its picture: case, baseline, description.
OVERVIEW = {
    "Scaled dot product from PyTorch": (
        ("dot", "sdpa", "scaled dot, forward"),
        ("dot", "onnxruntime", "scaled dot, forward"),
        ("dot-backward", "sdpa", "scaled dot, forward + backward"),
        ("dot-bfloat16", "sdpa", "scaled dot, bfloat16, forward"),
        ("decoding", "sdpa", "1 query, 32768 keys"),
        ("tiny", "sdpa", "a tiny call, (2, 8, 16, 64), forward"),
        ("tiny-backward", "sdpa", "a tiny call, (2, 8, 16, 64), forward + backward"),
    ),
    "Masks": (
        ("causal", "sdpa", "causal, forward"),
        ("padded", "sdpa", "half the keys padded, forward"),
        ("window", "sdpa-blocks", "window of 256 in 8192 tokens, forward"),
        ("window", "sdpa", "window of 256 in 8192 tokens, dense mask in torch, forward"),
    ),
    "Additive scores": (
        ("additive", "naive", "additive, 512 tokens, h 256, forward"),
        ("additive", "compile", "additive, 512 tokens, h 256, forward"),
        ("additive-backward", "naive", "additive, 512 tokens, h 256, forward + backward"),
        ("additive-long", "sdpa", "additive against scaled dot, h 64, forward"),
    ),
    "Other frameworks": (
        ("numpy", "numpy", "scaled dot from NumPy, forward"),
        ("jax", "jax", "scaled dot from JAX, jit, forward"),
        ("jax", "xla", "scaled dot from JAX, jit, forward"),
        ("tensorflow-graph", "tensorflow", "scaled dot from tf.function, forward"),
    ),
}


def screen_tables(document: Row) -> Iterator[tuple[str, Cells, list[Cells]]]:
    """Yield (title, columns, rows) of every table for a screen."""
    speed = ("case", "against", "threads", "ours", "theirs", "ratio", "spread")
    yield "Speed", speed, list(_comparisons(document, "time", _speed))
    shapes = ("case", "against", "threads", "shapes", "modes", "mean", "worst")
    yield "Many small shapes", shapes, list(_comparisons(document, "shapes", _shapes))
    limits = ("threads", "float32 products, GFLOP/s", "bfloat16 products, GFLOP/s", "reading, GB/s")
    yield "Limits of the machine", limits, list(_limits(document))
    rates = ("case", "threads", "kernel", "GFLOP/s in products", "G activations/s", "GB/s of arrays")
    yield "Rates reached", (*rates, "of the products above", "of the reading above"), list(_rates(document))
    growth = ("case", "side", "tokens", "seconds", "peak, MB", "over, MB", "time grows as", "peak grows as")
    yield "Memory and growth", growth, list(_growth(document))


def _comparisons(document: Row, kind: str, cells: Callable[[Row], Cells]) -> Iterator[Cells]:
    """Yield the comparisons of a kind: what `cells` says of a measured one, or why another was not run."""
    for row in rows_of_kind(document, kind):
        result = cells(row) if row["status"] == "measured" else ("", "", "not run", row["reason"])
        yield (row["case"], row["baseline"], str(row["threads"]), *result)


def _speed(row: Row) -> Cells:
    """Return the times of both sides, and the ratio with its spread."""
    median, low, high = times_as_fast(row)
    times = (seconds(row[side]["median"]) for side in ("ours", "theirs"))
    return (*times, f"{median:.2f}", f"{low:.2f} to {high:.2f}")


def times_as_fast(row: Row) -> tuple[float, float, float]:
    """Return the baseline's time over ours: median and quartiles."""
    median, low, high = (row["ratio"][name] for name in ("median", "q1", "q3"))
    # Older rows have our time over theirs where a target was an upper bound.
    return (1 / median, 1 / high, 1 / low) if row.get("at_most") else (median, low, high)


def _shapes(row: Row) -> Cells:
    """Return the numbers of shapes and modes, the geometric mean, and the worst of the shapes."""
    worst = row["worst"]
    counts = (str(len({point[name] for point in row["points"]})) for name in ("shape", "mode"))
    return (*counts, f"{row['geometric_mean']:.2f}", f"{worst['ratio']:.2f}: {worst['shape']}, {worst['mode']}")


def _limits(document: Row) -> Iterator[Cells]:
    """Rates that libraries reach on this machine."""
    for row in rows_of_kind(document, "limits"):
        rates = (row["products"]["float32"], row["products"]["bfloat16"], row["reading"])
        yield (str(row["threads"]), *(f"{rate / 1e9:.3g}" for rate in rates))


def _rates(document: Row) -> Iterator[Cells]:
    """Rates of our side, and their share of the libraries' rates."""
    listed = set()
    limits = {row["threads"]: row for row in rows_of_kind(document, "limits")}
    dtypes = {case.name: case.dtype for case in CASES}
    for row in rows_of_kind(document, "time"):
        # The work of a whole model is not counted.
        if row["status"] != "measured" or not row["work"] or (row["case"], row["threads"]) in listed:
            continue
        listed.add((row["case"], row["threads"]))
        work, time = row["work"], row["ours"]["median"]
        rates = (
            f"{work[name] / time / 1e9:.3g}" if work[name] else "" for name in ("operations", "activations", "bytes")
        )
        limit = limits.get(row["threads"])
        shares: Cells = ("", "")
        if limit is not None:
            products = limit["products"]
            # Some libraries multiply 16-bit numbers more slowly than float32, which kernels may widen them to.
            peaks = max(products["float32"], products[dtypes.get(row["case"], "float32")]), limit["reading"]
            done = work["operations"], work["bytes"]
            shares = tuple(f"{amount / time / peak:.0%}" for amount, peak in zip(done, peaks, strict=True))
        yield (row["case"], str(row["threads"]), row["kernel"], *rates, *shares)


def _growth(document: Row) -> Iterator[Cells]:
    """Time and peak memory at each length, and their growth; "over": without inputs, outputs and gradients."""
    for row in (*rows_of_kind(document, "growth"), *rows_of_kind(document, "memory")):
        head, points = (row["case"], _title(row["side"])), row["points"]
        if row["status"] != "measured":
            yield (*head, "", "not run", row["reason"], "", "", "")
        for point in points:
            sizes = (f"{point[name] / 1e6:.1f}" for name in ("peak", "over"))
            powers = (row.get(name) if point is points[-1] else None for name in ("time_exponent", "memory_exponent"))
            time = seconds(point["seconds"]["median"])
            yield (*head, str(point["length"]), time, *sizes, *map(_power, powers))


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
    """Say where a baseline takes less time than we do in one call, a sentence each; small shapes have a table."""
    times_of_case: dict[tuple[str, str], list[str]] = {}
    for row in rows_of_kind(document, "time"):
        if row["status"] != "measured" or not BASELINES[row["baseline"]].is_alternative:
            continue
        times = 1 / times_as_fast(row)[0]
        if times > 1:
            by_threads = times_of_case.setdefault((row["what"], _title(row["baseline"])), [])
            by_threads.append(f"{times:.2f} ({_threads(row)})")
    return [
        f"{what}: {baseline} is {' and '.join(by_threads)} times as fast"
        for (what, baseline), by_threads in times_of_case.items()
    ]


# ------------------------------------------------------------ the page of all machines

_MODELS = frozenset(case.name for case in CASES if case.kind == "model")


def page(documents: Mapping[str, Row], charts: Sequence[tuple[str, str]]) -> str:
    """Return the section of results in Markdown from the document of each machine.

    `charts` are (description, file) of the pictures: one of all machines, then one of the small shapes.
    """
    parts = [f"![{description}]({file})" for description, file in charts[:1]]
    with_models = {name: x for name, x in documents.items() if any(row["case"] in _MODELS for row in x["rows"])}
    if with_models:
        columns = ["", "against", *_by_threads(with_models)]
        parts += ["### Whole models", _markdown(columns, _model_rows(with_models))]
    parts += [
        "### One call, two threads",
        _markdown(
            ["", "against", *documents],
            [[what, against, *map(_ratio, ratios)] for what, against, ratios in overview_rows(documents)],
        ),
    ]
    if shapes := _shape_rows(documents):
        parts += [
            "### Many small shapes",
            _markdown(["", "against", "machine", "mean, 1 thread", "worst", "mean, 2 threads", "worst"], shapes),
        ]
        parts += [f"![{description}]({file})" for description, file in charts[1:]]
    slower = [f"- {name}: {sentence}" for name, x in documents.items() for sentence in faster_baselines(x)]
    parts += ["### Where a baseline is faster", "\n".join(slower) or "Nowhere."]
    machines = [[name, measured(document), document["machine"]["cpu"]] for name, document in documents.items()]
    parts += ["### The machines", _markdown(["machine", "measured", "CPU"], machines)]
    return "\n\n".join(parts)


def _by_threads(documents: Mapping[str, Row]) -> list[str]:
    return [f"{name}, {'1 thread' if n == 1 else f'{n} threads'}" for name in documents for n in (1, 2)]


def _model_rows(documents: Mapping[str, Row]) -> list[list[str]]:
    """Return description, baseline and the ratios on one and two threads of each machine."""
    rows = []
    for case in CASES:
        if case.name in _MODELS:
            (baseline,) = case.baselines
            ratios = [_ratio_of(document, case.name, baseline, n) for document in documents.values() for n in (1, 2)]
            if any(ratio is not None for ratio in ratios):
                cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
                rows.append([case.what, _title(baseline), *cells])
    return rows


def _shape_rows(documents: Mapping[str, Row]) -> list[list[str]]:
    """Return the geometric mean and the worst ratio of each case of many shapes, on one and on two threads."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, document in documents.items():
        for row in rows_of_kind(document, "shapes"):
            if row["status"] == "measured":
                head = row["what"].removeprefix("small shapes, "), _title(row["baseline"]), name
                cells = rows.setdefault(head, [""] * 4)
                place = 0 if row["threads"] == 1 else 2
                cells[place : place + 2] = [f"{row['geometric_mean']:.2f}", f"{row['worst']['ratio']:.2f}"]
    return [[*head, *cells] for head, cells in rows.items()]


def overview_rows(documents: Mapping[str, Row], threads: int = 2) -> list[tuple[str, str, list[float | None]]]:
    """Return (case, baseline, times as fast on each machine) of the rows of `OVERVIEW`; None: not measured there."""
    return [
        (what, _title(baseline), [_ratio_of(x, case, baseline, threads) for x in documents.values()])
        for rows in OVERVIEW.values()
        for case, baseline, what in rows
    ]


def _ratio_of(document: Row, case: str, baseline: str, threads: int) -> float | None:
    for row in rows_of_kind(document, "time"):
        if (row["case"], row["baseline"], row["threads"], row["status"]) == (case, baseline, threads, "measured"):
            return times_as_fast(row)[0]
    return None


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2g}"


def measured(document: Row) -> str:
    """Say when and at which commits a document was measured."""
    dated = {(document["date"], document.get("commit"))}
    dated |= {(row["date"], row.get("commit")) for row in document["rows"] if "date" in row}
    days, commits = sorted({day for day, _ in dated}), sorted({commit for _, commit in dated if commit})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) + "".join(f", `{commit}`" for commit in commits)


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
