"""Make every picture of the documentation: ``python docs/images/make.py [NAME ...]``; without names, all.

Needs ``pip install '.[demo]'``. The pictures named in TAKEN are taken from ``attnscore demo`` and from
``attnscore lab --full`` (about ten minutes), the others are drawn with the library's scores, here, in ``diagrams.py``
and in ``parallel.py``.
``report`` is a page of ``attnscore inspect`` in headless Chromium: it needs ``pip install playwright`` and the system's
Chromium, and is left as it is where there is none.

All but ``report`` have the style of ``matplotlibrc``. All are stored with 256 colours, which keeps each below 120 kB.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

import attnscore as ats
from attnscore import plotting
from attnscore.io import replacing
from attnscore.plotting.drawing import BLUE, RED, WEIGHT, style_lines

HERE = Path(__file__).parent
DIAGRAMS = runpy.run_path(str(HERE / "diagrams.py"))["DRAWN"]
sys.path.append(str(HERE.parents[1] / "benchmarks"))  # what predicts large clusters
PARALLEL = runpy.run_path(str(HERE / "parallel.py"))["DRAWN"]
# Picture by picture: which file of which command.
TAKEN = {
    "heads": ("demo", "09-chosen-heads.png"),
    "masks": ("demo", "04-masks.png"),
    "all-scores": ("demo", "03-scores.png"),
    "temperature": ("demo", "06-temperature.png"),
    "lab-variance": ("lab", "01-logit-variance.png"),
    "lab-sharpening": ("lab", "02-sharpening.png"),
    "lab-gradients": ("lab", "03-gradient-flow.png"),
    "lab-training": ("lab", "09-training-runs.png"),
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGEST = 1400  # pixels across
COLOURS = 256
STYLE = HERE / "matplotlibrc"
QUERIES = {"A": (1.5, 1.0), "B": (-1.0, 1.5)}
mpl.rc_file(STYLE)


def main(names: list[str]) -> None:
    """Make the named pictures, or all."""
    known = [*TAKEN, *DRAWN, "report"]
    wanted = names or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        for command in sorted({TAKEN[name][0] for name in wanted if name in TAKEN}):
            line = [sys.executable, "-m", "attnscore", command, "--out", f"{folder}/{command}"]
            settings = os.environ | {"MATPLOTLIBRC": str(STYLE)}
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=settings)
        for name in wanted:
            source = Path(folder, *TAKEN.get(name, (f"{name}.png",)))
            if name == "report" and not names and CHROMIUM is None:
                print("report.png is left as it is: no Chromium here", file=sys.stderr)
                continue
            if name == "report":
                report(source)
            elif name in DRAWN:
                DRAWN[name]().savefig(source)
            store(source, HERE / f"{name}.png")


def store(source: Path, target: Path) -> None:
    """Write a PNG again, at most LARGEST pixels across, with COLOURS colours."""
    picture = Image.open(source).convert("RGBA")
    if picture.width > LARGEST:
        height = round(picture.height * LARGEST / picture.width)
        picture = picture.resize((LARGEST, height), Image.Resampling.LANCZOS)
    with replacing(target) as file:
        with_few_colours(picture).save(file, format="PNG", optimize=True)
    print(f"{target.name:<20} {target.stat().st_size / 1000:.0f} kB")


def with_few_colours(picture: Image.Image) -> Image.Image:
    """Reduce an RGBA picture to COLOURS colours: half are its most frequent, exact, the others stand for the rest."""
    pixels = np.asarray(picture).reshape(-1, 4)
    colours, which, counts = np.unique(pixels.view(np.uint32)[:, 0], return_inverse=True, return_counts=True)
    colours = colours.view(np.uint8).reshape(-1, 4)
    frequent = colours[np.argsort(-counts)[: COLOURS // 2]]
    coarse = picture.quantize(COLOURS // 2, method=Image.Quantize.FASTOCTREE).palette  # the one method for RGBA
    palette = np.concatenate([frequent, np.frombuffer(coarse.tobytes(), np.uint8).reshape(-1, 4)])
    distance = ((colours[:, None].astype(np.int32) - palette) ** 2).sum(-1)
    nearest = distance.argmin(-1).astype(np.uint8)[which]
    found = Image.frombytes("P", picture.size, nearest.tobytes())
    found.putpalette(palette.tobytes(), "RGBA")
    return found


def plane(score: object, point: str, *, weights: bool = False) -> Figure:
    """How each key in a plane is scored by two queries; with `weights`, the weights of all these keys below."""
    side = np.linspace(-3, 3, 61)
    keys = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    scores = np.stack([ats.attention_scores(np.array([query]), keys, score=score) for query in QUERIES.values()])
    lines = [("Score for", "score of key k for query q", scores)]
    if weights:
        shares = ats.masked_softmax(scores)
        lines.append(("Weights of", "weight / largest weight", shares / shares.max(-1, keepdims=True)))
    figure = Figure(figsize=(7.6, 0.5 + 3.4 * len(lines)))
    figure.suptitle(point)
    for pair, (title, unit, maps) in zip(figure.subplots(len(lines), 2, squeeze=False), lines, strict=True):
        low, high = min(0, maps.min()), max(0, maps.max())
        # White is 0 between signed scores, and the worst of scores of one sign: the best key is always the darkest.
        limits, cmap = ((low, high), "Reds") if low * high == 0 else ((-max(-low, high), max(-low, high)), "RdBu_r")
        levels = MaxNLocator(12).tick_values(maps.min(), maps.max())
        for axis, (name, query), values in zip(pair, QUERIES.items(), maps, strict=True):
            drawn = axis.contourf(
                side, side, values.reshape(61, 61), levels=levels, cmap=cmap, norm=Normalize(*limits)
            )
            mark = {"boxstyle": "circle", "facecolor": "white", "edgecolor": "black"}
            axis.annotate(name, query, ha="center", va="center", color="black", bbox=mark)
            axis.set(title=f"{title} query {name} = ({query[0]:g}, {query[1]:g})", xlabel="$k_0$", aspect="equal")
            axis.axhline(0, color="#8c8c8c", linewidth=0.5)
            axis.axvline(0, color="#8c8c8c", linewidth=0.5)
        pair[0].set_ylabel("$k_1$")
        figure.colorbar(drawn, ax=pair, shrink=0.8, label=unit)
    return figure


def additive() -> Figure:
    """An additive score with three hidden units: soft steps that move with the query."""
    w_q = np.array([[1.0, 0.0], [0.0, 1.0], [0.7, -0.7]])
    score = ats.Additive(w_v=np.array([1.5, -1.0, 1.0]), W_q=w_q, W_k=1.5 * w_q[::-1])
    return plane(score, "Additive, three hidden units: soft steps that move with the query")


def bilinear() -> Figure:
    """A bilinear score whose W turns the key by a quarter."""
    score = ats.Bilinear(np.array([[0.0, 1.0], [-1.0, 0.0]]))
    return plane(score, "Bilinear: this W turns the best direction by a quarter")


def scaled_dot() -> Figure:
    """Variance of the scores, and the trace of the softmax Jacobian, against the dimension of the vectors."""
    rng, dims = np.random.default_rng(0), 2 ** np.arange(0, 11)
    found: dict[str, list[tuple[float, float]]] = {"dot": [], "scaled_dot": []}
    for dim in dims:
        query, key = rng.normal(size=(2, 256, dim))
        for name, rows in found.items():
            _, stats = ats.attend(query, key, key, score=name, return_stats=True)
            rows.append((stats.var_score.mean(), stats.jacobian_trace().mean()))
    figure = Figure(figsize=(8.4, 3.2))
    left, right = figure.subplots(1, 2)
    for (name, rows), colour in zip(found.items(), (RED, BLUE), strict=True):
        variance, trace = np.array(rows).T
        left.loglog(dims, variance, "o-", color=colour, label=name, base=2, markersize=4)
        right.semilogx(dims, trace, "o-", color=colour, label=name, base=2, markersize=4)
    dimension = "dimension d of random queries and keys"
    style_lines(left, "Variance of a query's scores over 256 keys", dimension, "variance")
    style_lines(right, "Gradient that the softmax lets through", dimension, "trace of its Jacobian, 1 − Σ p²")
    right.set_ylim(0, 1.05)
    left.legend()
    return figure


def gaussian() -> Figure:
    """The score in a plane is a bowl around the query."""
    return plane(ats.Gaussian(bandwidth=1.0), "Gaussian: the nearest key scores best")


def nadaraya_watson() -> Figure:
    """Regression as attention pooling, for three bandwidths, and the weights behind it."""
    rng = np.random.default_rng(0)
    x = np.sort(5 * rng.random((50, 1)), axis=0)
    y = 2 * np.sin(x) + x**0.8 + 0.5 * rng.normal(size=x.shape)
    asked = np.linspace(0, 5, 100)[:, None]
    figure = Figure(figsize=(8, 5.6))
    *axes, last = figure.subplots(2, 2).flat
    for axis, (bandwidth, fit) in zip(axes, ((0.05, "too wiggly"), (0.2, "close"), (1.0, "too flat")), strict=True):
        out = ats.attend(asked, x, y, score=ats.Gaussian(bandwidth))
        axis.plot(x, y, "o", color="#9aa5ab", markersize=3, label="training points")
        axis.plot(asked, 2 * np.sin(asked) + asked**0.8, "--", color="#8c8c8c", linewidth=1.2, label="true function")
        axis.plot(asked, out, color=BLUE, label="attention pooling")
        style_lines(axis, f"Bandwidth {bandwidth}: {fit}", "x", "y")
    axes[0].legend()
    weights = ats.attention_weights(asked, x, score=ats.Gaussian(0.2))
    image = last.imshow(weights, aspect="auto", interpolation="nearest")
    last.set_title("Weights, bandwidth 0.2")
    last.set(xlabel="key j: training point, by x", ylabel="query i: point asked for, by x")
    figure.colorbar(image, ax=last, label=WEIGHT)
    return figure


def softcap() -> Figure:
    """cap * tanh(s / cap) and its slope."""
    scores = np.linspace(-40, 40, 400)[:, None]
    figure = Figure(figsize=(8.4, 3.2))
    left, right = figure.subplots(1, 2)
    left.plot(scores, scores, "--", color="#8c8c8c", label="no cap")
    for cap, colour in ((5.0, RED), (20.0, BLUE)):
        capped = ats.attention_scores(scores, np.ones((1, 1)), score=ats.SoftCap("dot", cap))
        left.plot(scores, capped, color=colour, label=f"cap {cap:g}")
        right.plot(scores, 1 - (capped / cap) ** 2, color=colour)
    style_lines(left, "cap · tanh(score / cap)", "score before the cap", "score after the cap")
    style_lines(right, "Factor of the gradient", "score before the cap", "derivative of the capped score")
    left.set_ylim(-25, 25)
    right.set_ylim(0, 1.05)
    left.legend()
    return figure


def collapse() -> Figure:
    """Means of three statistics over the queries of a head whose queries grow."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 256, 64))
    growths = 2.0 ** np.arange(-3, 9)
    found = [ats.attend(g * query, key, key, return_stats=True)[1] for g in growths]
    panels = {
        ("Effective keys, of 256", "keys"): [stats.effective_keys().mean() for stats in found],
        ("Largest weight", "weight"): [stats.max_weight.mean() for stats in found],
        ("Trace of the softmax Jacobian", "trace"): [stats.jacobian_trace().mean() for stats in found],
    }
    figure = Figure(figsize=(9, 2.7))
    for axis, ((title, unit), values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axis.semilogx(growths, values, "o-", color=RED, base=2, markersize=4)
        style_lines(axis, title, "random queries, multiplied by", unit)
        axis.set_ylim(0, None)
    return figure


def watching() -> Figure:
    """What `watch` records of a real model, one of whose heads fails from step 3 on."""
    import torch

    from attnscore.cli.demo import minilm
    from attnscore.cli.demo.command import read_sentences
    from attnscore.diagnostics import watch
    from attnscore.diagnostics.inspection import pretrained

    tokenizer, model = pretrained.load(pretrained.MINILM)
    batch = minilm.tokenize(tokenizer, read_sentences(None)[0])
    with torch.no_grad(), watch(model) as seen:
        for step in range(6):
            if step == 3:
                model.encoder.layer[3].attention.self.query.weight[7 * 32 : 8 * 32] *= 30
            model(**batch.inputs)
    return seen.plot()


def names_of(page: str, until: str = "") -> dict[str, Any]:
    """Run the Python blocks of a page, up to the first that contains `until` if given, and return their names."""
    names: dict[str, Any] = {"__name__": "document"}
    for block in (HERE.parent / page).read_text(encoding="utf-8").split("```python\n")[1:]:
        with contextlib.redirect_stdout(None):
            exec(block.partition("```")[0], names)
        if until and until in block:
            return names
    if until:
        raise ValueError(f"no block of {page} contains {until!r}")
    return names


def repaired() -> Figure:
    """The training runs of the page on watching, by the code that the page shows."""
    page = names_of("watching.md", "qk_clip")
    figure = Figure(figsize=(9, 2.8))
    axes = figure.subplots(1, 3)
    for (is_repaired, (seen, losses)), colour in zip(page["runs"].items(), (RED, BLUE), strict=True):
        label = "with QK-clip" if is_repaired else "without"
        axes[0].plot(losses, color=colour, label=label, linewidth=1.4)
        for axis, name in zip(axes[1:], ("max_logit", "effective_keys"), strict=True):
            for layer in seen.layers.values():
                steps, values = seen.history(layer.name, name)
                axis.plot(steps, values, color=colour, linewidth=0.8)
    style_lines(axes[0], "Training loss", "step", "nats per word")
    style_lines(axes[1], "Largest logit of each head", "step", "logit")
    style_lines(axes[2], "Effective keys of each head", "step", "keys, of 24")
    axes[0].set_ylim(0, None)
    axes[0].legend()
    axes[1].set_yscale("log")
    axes[2].set_ylim(0, 24)
    return figure


def maximum() -> Figure:
    """Exponentials of the scores of the page on softmax, with and without the maximum subtracted, and the weights."""
    page = names_of("concepts/softmax.md", "masked_softmax")
    scores, wide = page["scores"], page["scores"].astype(np.float64)
    keys, largest = np.arange(len(scores)), float(np.finfo(np.float32).max)
    figure = Figure(figsize=(8, 2.9))
    as_written, subtracted, weights = figure.subplots(1, 3)
    as_written.plot(keys, np.exp(wide), "o", color=RED)
    as_written.axhline(largest, color="#8c8c8c", linestyle="--", linewidth=1)
    as_written.annotate("largest float32", (1, largest), (0, -3), textcoords="offset points", ha="center", va="top")
    as_written.set(yscale="log", ylim=(1e35, 1e46), xlim=(-0.5, 2.5))
    drawn = subtracted.bar(keys, page["shifted"], color=BLUE, width=0.6)
    subtracted.bar_label(drawn, fmt="{:.3f}")
    subtracted.set_ylim(0, 1.15)
    drawn = weights.bar(keys, ats.masked_softmax(scores), color=BLUE, width=0.6)
    weights.bar_label(drawn, fmt="{:.3f}")
    for key, weight in zip(keys, page["naive"], strict=True):
        weights.annotate(f"{weight}".replace("nan", "NaN"), (key, 0.9), color=RED, ha="center")
    weights.set_ylim(0, 1.15)
    for axis, title, unit in (
        (as_written, "As written: exp(s) overflows", "exp(s)"),
        (subtracted, "exp(s − max s) is at most 1", "exp(s − max s)"),
        (weights, "Weights: NaN as written", "weight"),
    ):
        style_lines(axis, title, "key", unit)
        axis.set_xticks(keys, [f"{key}\ns = {score:g}" for key, score in zip(keys, scores, strict=True)])
    return figure


def books_map() -> Figure:
    """The heat map of the book's example, by the code of the guide."""
    import torch

    torch.manual_seed(0)
    weights = names_of("guides/d2l.md", "show_heatmaps")["attention"].attention_weights
    return plotting.show_heatmaps(
        weights.reshape(1, 1, 2, 10), "Keys", "Queries", ["valid_lens 2 and 6"], (6.4, 1.9), label="weight"
    )


def exercise_maps() -> Figure:
    """Both scores of the fourth exercise, on keys that are alike and on keys that are drawn."""
    page = names_of("concepts/exercises.md", "additive = ats.Additive")
    scores = {"scaled dot product": "scaled_dot", "additive": page["additive"]}
    maps, titles = [], []
    for name, keys in (("alike", np.ones((2, 10, 2))), ("drawn", page["keys"])):
        weights = [ats.attention_weights(page["queries"], keys, score=x, valid_lens=[2, 6]) for x in scores.values()]
        maps.append([x.reshape(2, 10) for x in weights])
        titles.append([f"keys {name}, {score}" for score in scores])
    return plotting.show_heatmaps(maps, "key j", "sequence", titles, (8, 3), label="weight")


def long_context() -> Figure:
    """131072 tokens of the example on long contexts, as its picture shows them."""
    example = runpy.run_path(str(HERE.parents[1] / "examples" / "long_context_maps.py"))
    query, key, _ = example["made_up_head"](131_072)
    # At 140 dots an inch no wider than a picture may be: made smaller, its bins would blur and take twice the bytes.
    return plotting.show_long_attention(query, key, mask=ats.Causal(), figsize=(9.4, 7.2))


def report(target: Path) -> None:
    """A page of ``attnscore inspect`` with the pointer on one weight of layer 1, head 8."""
    from playwright.sync_api import sync_playwright

    from attnscore.cli.demo.command import read_sentences
    from attnscore.diagnostics import inspect_model

    if CHROMIUM is None:
        sys.exit("report: no Chromium here; on Debian: apt-get install chromium")
    page_file = inspect_model("minilm", read_sentences(None)[0][1]).to_html(target.with_suffix(".html"))
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1100, "height": 1480})
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector("body[data-ready]")
        page.click('#grid button[data-layer="1"][data-head="8"]')
        cell = page.evaluate(
            """() => { const plot = document.getElementById("map"), { xaxis, yaxis } = plot._fullLayout,
               box = plot.getBoundingClientRect();
               return [box.x + xaxis._offset + xaxis.c2p(8), box.y + yaxis._offset + yaxis.c2p(7)]; }"""
        )
        page.mouse.move(cell[0] + 1, cell[1] + 1)
        page.mouse.move(*cell)
        page.wait_for_selector("#map .hoverlayer .hovertext")
        page.screenshot(path=target)
        browser.close()


DRAWN: dict[str, Callable[[], Figure]] = (
    {
        "dot": lambda: plane("dot", "Dot: the score grows along the query, without end"),
        "scaled-dot": scaled_dot,
        "additive": additive,
        "bilinear": bilinear,
        "gaussian": gaussian,
        "nadaraya-watson": nadaraya_watson,
        "cosine": lambda: plane("cosine", "Cosine: only the direction of the key counts"),
        "sum": lambda: plane("sum", "Sum: the query adds a constant, and all weights are the same", weights=True),
        "softcap": softcap,
        "collapse": collapse,
        "watching": watching,
        "long-context": long_context,
        "repaired": repaired,
        "maximum": maximum,
        "books-map": books_map,
        "exercise-maps": exercise_maps,
    }
    | DIAGRAMS
    | PARALLEL
)

if __name__ == "__main__":
    main(sys.argv[1:])
