"""Tour of attention scoring on inputs small enough to check by hand, in NumPy.

- D2L's inputs are computed with the library and compared with the numbers that follow from them; a difference is a
  failed check.
- Each section prints a short table, draws a picture and adds its numbers to the summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore.cli.report import Report
from attnscore.diagnostics.lab.sharpening import LOGITS, WEIGHTS
from attnscore.plotting import drawing, show_attention, show_heatmaps
from attnscore.plotting.drawing import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[Any]

STEPS = 6
_ROUNDED = 0.5e-3 * 1.0001


def run(report: Report) -> None:
    """Run every section; the numbers go to ``summary["tour"]``."""
    rng = np.random.default_rng(0)
    numbers = report.summary["tour"] = {}
    for title, section in (
        ("masked softmax", masked_softmax),
        ("dot and additive attention", textbook),
        ("seven scoring functions", scores),
        ("masks", masks),
        ("temperature and sharpening", temperature),
        ("what it costs", cost),
    ):
        with report.step(title):
            numbers[section.__name__] = section(report, rng)


def masked_softmax(report: Report, rng: np.random.Generator) -> dict[str, Any]:
    """Show lengths per sequence and per query; masked keys have weight exactly 0."""
    values = rng.random((2, 2, 4))
    per_row, per_query = [2, 3], [[1, 3], [2, 4]]
    weights = np.stack([ats.masked_softmax(values, lens) for lens in (per_row, per_query)])
    claim = "masked softmax, lengths [[1, 3], [2, 4]]: the first row is exactly 1, 0, 0, 0"
    report.check(claim, weights[1, 0, 0] - [1, 0, 0, 0], 0.0)
    report.check("masked softmax: rows sum to 1", weights.sum(-1) - 1, 1e-15)
    rows = [
        (f"sequence {batch}, query {query}", *map(_numbers, weights[:, batch, query]))
        for batch, query in np.ndindex(2, 2)
    ]
    columns = ("weights of 4 keys", f"valid_lens {per_row}", f"valid_lens {per_query}")
    report.table("Masked softmax", columns, rows)
    titles = [f"valid_lens {lens}\nsequence {batch}" for lens in (f"{per_row}", f"{per_query}") for batch in range(2)]
    maps = weights.reshape(1, 4, 2, 4)
    report.picture("01-masked-softmax", show_heatmaps(maps, "Keys", "Queries", titles=titles, label="weight"))
    return {"scores": values, "valid_lens": [per_row, per_query], "weights": weights}


def textbook(report: Report, rng: np.random.Generator) -> dict[str, Any]:
    """Show equal keys: every score gives uniform weights over the valid ones."""
    keys, lens = np.ones((2, 10, 2)), [2, 6]
    values = np.repeat(np.arange(40.0).reshape(1, 10, 4), 2, axis=0)
    expected = np.array([[[2.0, 3, 4, 5]], [[10.0, 11, 12, 13]]])
    additive = ats.Additive(w_v=rng.normal(size=8), W_q=rng.normal(size=(8, 20)), W_k=rng.normal(size=(8, 2)))
    calls = {
        "scaled dot product": (rng.normal(size=(2, 1, 2)), "scaled_dot"),
        "additive, 8 hidden units": (rng.normal(size=(2, 1, 20)), additive),
    }
    results, maps = {}, []
    for name, (queries, score) in calls.items():
        out, weights = ats.attend(queries, keys, values, score=score, valid_lens=lens, return_weights=True)
        results[name] = {"query_shape": queries.shape, "outputs": out, "weights": weights}
        maps.append(weights.reshape(2, 10))
        report.check(f"{name}: outputs are [2, 3, 4, 5] and [10, 11, 12, 13]", out - expected, 1e-12)
    columns = ("score", "queries", "keys", "output of sequence 0", "output of sequence 1")
    rows = [
        (name, result["query_shape"], keys.shape, *map(_numbers, result["outputs"][:, 0]))
        for name, result in results.items()
    ]
    caption = "keys all alike, so the weights are 1/2 over 2 and 1/6 over 6 valid keys"
    report.table("Attention with valid_lens (2, 6)", columns, rows, caption=caption)
    labels = ["2 valid", "6 valid"], [str(key) for key in range(10)]
    figure = show_attention(
        maps, *labels, titles=list(calls), ylabel="Sequences", label="weight", max_cols=2, numbers=True
    )
    report.picture("02-dot-and-additive", figure)
    return {"valid_lens": lens, "values": "arange(40) as (10, 4), twice", "results": results}


def scores(report: Report, rng: np.random.Generator) -> dict[str, Any]:
    """Show the same eight queries and keys under every scoring function."""
    keys = rng.normal(size=(8, 4))
    queries = keys + 0.25 * rng.normal(size=(8, 4))
    w_v, w_q, w_k = (rng.normal(size=shape) for shape in ((8,), (8, 4), (8, 4)))
    made = {
        "dot": "dot",
        "scaled dot": "scaled_dot",
        "cosine": ats.Cosine(scale=4.0),
        "Gaussian": ats.Gaussian(bandwidth=0.7),
        "bilinear": ats.Bilinear(rng.normal(size=(4, 4))),
        "additive": ats.Additive(w_v, w_q, w_k),
        "sum": "sum",
    }
    columns = ("variance of the scores", "entropy", "largest weight", "effective keys")
    maps, means = [], {}
    for name, score in made.items():
        _, weights, stats = ats.attend(queries, keys, keys, score=score, return_weights=True, return_stats=True)
        maps.append(weights)
        numbers = (stats.var_score, stats.entropy, stats.max_weight, np.exp(stats.entropy))
        means[name] = {column: float(np.mean(each)) for column, each in zip(columns, numbers, strict=True)}
    report.check("sum score: every query gets the same weights", maps[-1] - maps[-1][:1], 1e-12)
    title = "One set of queries and keys, seven scores (mean over 8 queries)"
    caption = "each query is its own key and some noise; in q + k the query cancels in the softmax"
    cells = [(name, *(f"{mean:.3f}" for mean in of_score.values())) for name, of_score in means.items()]
    report.table(title, ("score", *columns), cells, caption=caption)
    title = "Weights of the same random queries and keys, untrained, under seven scores"
    figure = show_attention(maps, titles=list(made), max_cols=4, figsize=(9.2, 4.8), suptitle=title)
    report.picture("03-scores", figure)
    return means


def masks(report: Report, rng: np.random.Generator) -> dict[str, Any]:
    """Show masks, and weights under padding, causality and both."""
    documents = np.array([[0, 0, 0, 1, 1, 2, 2, 2]])
    gallery: dict[str, tuple[Any, int, int]] = {
        "ValidLens([5])": (ats.ValidLens([5]), 8, 8),
        "Causal()": (ats.Causal(), 8, 8),
        "Causal() & ValidLens([5])": (ats.Causal() & ats.ValidLens([5]), 8, 8),
        "Causal() & SlidingWindow(left=2)": (ats.Causal() & ats.SlidingWindow(left=2), 8, 8),
        "PrefixLM([3])": (ats.PrefixLM([3]), 8, 8),
        "Documents([0,0,0,1,1,2,2,2])": (ats.Documents(documents), 8, 8),
        "Causal('top_left'), 4 queries": (ats.Causal(align="top_left"), 4, 8),
        "Causal('bottom_right'), 4 queries": (ats.Causal(align="bottom_right"), 4, 8),
    }
    unmasked = {title: mask.materialize(*lengths)[0] for title, (mask, *lengths) in gallery.items()}
    report.picture("04-masks", _mask_gallery(unmasked))
    tokens = rng.normal(size=(1, 8, 4))
    used = {
        "no mask": None,
        "padding (5 of 8 valid)": ats.ValidLens([5]),
        "causal": ats.Causal(),
        "causal and padding": ats.Causal() & ats.ValidLens([5]),
    }
    maps, rows = [], []
    for title, mask in used.items():
        weights = ats.attention_weights(tokens, tokens, mask=mask)[0]
        visible = np.ones((8, 8), bool) if mask is None else mask.materialize(8, 8)[0]
        maps.append(weights)
        rows.append((title, int(visible.sum()), float(weights[~visible].sum())))
    report.check("masked keys weigh exactly 0", [row[2] for row in rows], 0.0)
    columns = ("mask", "unmasked pairs of 64", "weight on masked pairs")
    report.table("Self-attention over 8 tokens", columns, rows)
    figure = show_heatmaps(np.array(maps)[None], "Keys", "Queries", titles=list(used), label="weight")
    report.picture("05-masked-attention", figure)
    return {"visible_pairs": {title: int(matrix.sum()) for title, matrix in unmasked.items()}}


def temperature(report: Report, _: np.random.Generator) -> dict[str, Any]:
    """Show the softmax of y and of 8y, their Jacobians, and the temperatures between."""
    logits = np.array(LOGITS)
    soft = {int(factor): ats.masked_softmax(factor * logits) for factor in WEIGHTS}
    jacobians = {factor: ats.softmax_jacobian(weights) for factor, weights in soft.items()}
    for factor, expected in zip(soft, WEIGHTS.values(), strict=True):
        report.check(f"softmax({factor}y) to three digits", soft[factor] - expected, _ROUNDED)
        by_temperature = ats.masked_softmax(logits, temperature=1 / factor)
        report.check(f"T = 1/{factor} is softmax({factor}y)", by_temperature - soft[factor], 1e-12)
    rows = [
        (f"softmax({'' if factor == 1 else factor}y)", _numbers(weights), *_spread(weights))
        for factor, weights in soft.items()
    ]
    columns = ("y = [0.2, 0.4, 0.1, 0.8]", "weights", "entropy", "effective keys", "trace of the Jacobian")
    caption = "eight times the logits is 64 times their variance; the gradient through the softmax shrinks"
    report.table("The softmax sharpens with the variance of its logits", columns, rows, left=2, caption=caption)
    steps = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
    weights = np.stack([ats.masked_softmax(logits, temperature=step) for step in steps])
    report.picture("06-temperature", _draw_temperatures([f"T = {step:g}" for step in steps], weights))
    return {
        "y": logits,
        "softmax": {f"{factor}y": weights for factor, weights in soft.items()},
        "jacobian": {f"{factor}y": jacobian for factor, jacobian in jacobians.items()},
        "by_temperature": dict(zip(map(str, steps), weights, strict=True)),
    }


def cost(report: Report, _: np.random.Generator) -> dict[str, Any]:
    """Show operations, bytes and parameters of one head, from shapes alone."""
    dim, hidden, lengths = 64, 64, (512, 1024, 2048, 4096, 8192, 16384)

    def cost_of(name: str, length: int) -> ats.Cost:
        own = {"num_hiddens": hidden} if name == "additive" else {}
        return ats.cost(name.lower().replace(" ", "_"), query_len=length, key_len=length, dim=dim, **own)

    names = ("dot", "scaled dot", "cosine", "Gaussian", "bilinear", "additive")
    costs_of = {name: {length: cost_of(name, length) for length in lengths} for name in names}
    rows = [
        (
            name,
            f"{costs[4096].parameters:,}",
            f"{costs[4096].operations / 1e9:.2f}",
            f"{costs[4096].bytes / 1e6:.1f}",
            f"{costs[4096].matrix_bytes / 1e6:,.0f}",
        )
        for name, costs in costs_of.items()
    ]
    columns = ("score", "parameters", "operations / 10⁹", "in and out / MB", "kept by the plain formula / MB")
    caption = f"one head, 4096 queries and keys, d = {dim}, h = {hidden}, float32; attend keeps no such matrix"
    report.table("What one call costs", columns, rows, caption=caption)
    report.picture("07-cost", _draw_growth(lengths, {name: costs_of[name] for name in ("scaled dot", "additive")}))
    return {
        "setting": {"heads": 1, "batch": 1, "dim": dim, "value_dim": dim, "hidden": hidden, "dtype": "float32"},
        "units": {"operations": "additions, multiplications and function values", "bytes": "of inputs and outputs"},
        "by_score_and_length": {
            name: {length: each._asdict() for length, each in costs.items()} for name, costs in costs_of.items()
        },
    }


def _mask_gallery(masks: Mapping[str, Array], cols: int = 4) -> Figure:
    """Draw boolean matrices (query, key) as squares: filled where the query may attend."""
    title = "Masks: a filled square means that the query may attend to the key"
    figure = drawing.new_figure((2.3 * cols, 2.4 * -(-len(masks) // cols) + 0.3), title=title)
    axes = drawing.labelled_panels(figure, len(masks), cols, list(masks), "Keys", "Queries", title_points=9)
    for axis, unmasked in zip(axes, masks.values(), strict=True):
        drawing.draw_map(axis, unmasked.astype(float), cmap="Blues", limits=(0.0, 1.35))
        axis.set_xticks(np.arange(unmasked.shape[1] + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(unmasked.shape[0] + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="white", linewidth=1.2)
        axis.tick_params(which="minor", length=0)
        axis.set_anchor("N")
    return figure


def _draw_temperatures(names: list[str], weights: Array) -> Figure:
    """Draw the weights at each temperature as a row, next to the share of the gradient that the softmax passes."""
    figure = drawing.new_figure((7.6, 3.3), title="A lower temperature sharpens the softmax, and less gradient passes")
    left, right = figure.subplots(1, 2)
    image = drawing.draw_map(left, weights, names, [f"{logit:g}" for logit in LOGITS], limits=(0.0, 1.0))
    drawing.write_numbers(left, image, weights, drawing.two_decimals)
    left.set_aspect("auto")
    left.tick_params("x", labelrotation=0)
    drawing.label(left, f"Weights of y = {list(LOGITS)}", "logit in y", title_points=10)
    bars = right.barh(names, 1 - (weights**2).sum(-1), color=BLUE)
    right.bar_label(bars, fmt=" {:.2f}", fontsize=drawing.LABEL_POINTS)
    right.invert_yaxis()
    right.set_xlim(0, 0.9)
    drawing.style_lines(right, "Gradient that passes", "trace of the softmax Jacobian")
    return figure


def _draw_growth(lengths: Sequence[int], costs: Mapping[str, Mapping[int, ats.Cost]]) -> Figure:
    """Draw operations and bytes against the length, both axes logarithmic."""
    figure = drawing.new_figure((9.6, 3.5))
    left, right = figure.subplots(1, 2)
    for (name, by_length), colour in zip(costs.items(), (BLUE, RED), strict=True):
        line = [by_length[length] for length in lengths]
        left.plot(lengths, [one.operations for one in line], "o-", color=colour, label=name)
        right.plot(lengths, [one.matrix_bytes for one in line], "o--", color=colour, label=f"{name}, plain formula")
    first = next(iter(costs.values()))
    right.plot(lengths, [first[length].bytes for length in lengths], "o-", color="#8c8c8c", label="inputs and outputs")
    for axis, title in ((left, "Operations of one head"), (right, "Bytes that have to be held")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        drawing.style_lines(axis, title, "queries and keys")
        drawing.legend(axis)
    return figure


def _spread(weights: Array) -> tuple[str, ...]:
    """Format entropy, effective keys and trace of the softmax Jacobian."""
    entropy = float(-(weights * np.log(weights)).sum())
    return f"{entropy:.3f}", f"{np.exp(entropy):.2f}", f"{1 - float((weights**2).sum()):.3f}"


def _numbers(row: Array) -> str:
    """Format numbers with three decimals, those above 1 without zeros at their end."""
    return "  ".join(f"{number:.3f}".rstrip("0").rstrip(".") if number > 1 else f"{number:.3f}" for number in row)
