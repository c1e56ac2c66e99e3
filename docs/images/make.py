"""Make every picture of the documentation: ``python docs/images/make.py [NAME ...]``; without names, all.

Needs ``pip install '.[demo]'``. The pictures named in FROM_DEMO are taken from ``attnscore demo``, those in FROM_LAB
from ``attnscore lab`` (about ten minutes), the others are drawn here with the library's scores. ``report`` is a
page of ``attnscore inspect`` in headless Chromium: it needs ``pip install playwright`` and the system's Chromium, and
is left as it is where there is none. All are stored with 256 colours, which keeps each below 150 kB.
"""

from __future__ import annotations

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
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

import attnscore as ats
from attnscore import plotting
from attnscore.io import replacing

HERE = Path(__file__).parent
FROM_DEMO = {
    "heads": "09-chosen-heads.png",
    "masks": "04-masks.png",
    "all-scores": "03-scores.png",
    "temperature": "06-temperature.png",
}
FROM_LAB = {
    "lab-variance": "01-logit-variance.png",
    "lab-sharpening": "02-sharpening.png",
    "lab-gradients": "03-gradient-flow.png",
    "lab-training": "09-training-runs.png",
}
# Picture by picture: which file of which command.
TAKEN = {name: ("demo", file) for name, file in FROM_DEMO.items()} | {
    name: ("lab", file) for name, file in FROM_LAB.items()
}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LARGEST = 1400  # pixels across
COLOURS = 256
INK = "#262626"
FIRST, SECOND = "#b2182b", "#2166ac"
QUERIES = {"one query": (1.5, 1.0), "another query": (-1.0, 1.5)}


def main(names: list[str]) -> None:
    """Make the named pictures, or all."""
    mpl.rcParams.update({"font.size": 10, "axes.edgecolor": "#8c8c8c", "text.color": INK})
    known = [*TAKEN, *DRAWN, "report"]
    wanted = names or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        for command in sorted({TAKEN[name][0] for name in wanted if name in TAKEN}):
            line = [sys.executable, "-m", "attnscore", command, "--out", f"{folder}/{command}"]
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        for name in wanted:
            source = Path(folder, *TAKEN.get(name, (f"{name}.png",)))
            if name == "report" and not names and CHROMIUM is None:
                print("report.png is left as it is: no Chromium here", file=sys.stderr)
                continue
            if name == "report":
                report(source)
            elif name in DRAWN:
                DRAWN[name]().savefig(source, dpi=140)
            store(source, HERE / f"{name}.png")


def store(source: Path, target: Path) -> None:
    """Write a PNG again, at most LARGEST pixels across, with COLOURS colours."""
    picture = Image.open(source).convert("RGB")
    if picture.width > LARGEST:
        height = round(picture.height * LARGEST / picture.width)
        picture = picture.resize((LARGEST, height), Image.Resampling.LANCZOS)
    with replacing(target) as file:
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    print(f"{target.name:<20} {target.stat().st_size / 1000:.0f} kB")


def plane(*scores: tuple[str, object], weights: bool = False) -> Figure:
    """How each key in a plane is scored by two queries; with `weights`, the weights below."""
    side = np.linspace(-3, 3, 61)
    keys = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    maps = []
    for title, score in scores:
        for (name, query), mark in zip(QUERIES.items(), "AB", strict=True):
            found = ats.attention_scores(np.array([query]), keys, score=score)
            maps.append((f"{title}{name} ({mark})", found, query, mark))
    if weights:
        maps += [(f"its weights ({mark})", ats.masked_softmax(found), q, mark) for _, found, q, mark in maps]
    figure = Figure(figsize=(3.3 * len(maps) + 0.6, 3.5), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for i, (axis, (title, found, query, mark)) in enumerate(zip(axes, maps, strict=True)):
        alike = [values for _, values, _, _ in maps[i // 2 * 2 : i // 2 * 2 + 2]]
        levels = MaxNLocator(12).tick_values(min(x.min() for x in alike), max(x.max() for x in alike))
        drawn = axis.contourf(side, side, found.reshape(61, 61), levels=levels, cmap="Reds")
        axis.annotate(mark, query, ha="center", va="center", bbox={"boxstyle": "circle", "facecolor": "white"})
        axis.set(title=title, xlabel="$k_0$", aspect="equal")
        axis.axhline(0, color="white", linewidth=0.5)
        axis.axvline(0, color="white", linewidth=0.5)
        if i % 2:
            figure.colorbar(drawn, ax=axes[i - 1 : i + 1], shrink=0.8)
    axes[0].set_ylabel("$k_1$")
    return figure


def additive() -> Figure:
    """An additive score with three hidden units: soft ridges that bend."""
    w_q = np.array([[1.0, 0.0], [0.0, 1.0], [0.7, -0.7]])
    return plane(("", ats.Additive(w_v=np.array([1.5, -1.0, 1.0]), W_q=w_q, W_k=1.5 * w_q[::-1])))


def bilinear() -> Figure:
    """A bilinear score whose W turns the key by a quarter."""
    return plane(("", ats.Bilinear(np.array([[0.0, 1.0], [-1.0, 0.0]]))))


def scaled_dot() -> Figure:
    """Variance of the scores, and what the softmax makes of it, against the length of the vectors."""
    rng, dims = np.random.default_rng(0), 2 ** np.arange(0, 11)
    found: dict[str, list[tuple[float, float]]] = {"dot": [], "scaled_dot": []}
    for dim in dims:
        query, key = rng.normal(size=(2, 256, dim))
        for name, rows in found.items():
            _, stats = ats.attend(query, key, key, score=name, return_stats=True)
            rows.append((stats.var_score.mean(), stats.jacobian_trace().mean()))
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, rows), colour in zip(found.items(), (FIRST, SECOND), strict=True):
        variance, trace = np.array(rows).T
        left.loglog(dims, variance, "o-", color=colour, label=name, base=2, markersize=4)
        right.semilogx(dims, trace, "o-", color=colour, label=name, base=2, markersize=4)
    left.set(title="variance of a row's scores", xlabel="d")
    right.set(title="trace of the softmax Jacobian", xlabel="d", ylim=(0, 1.05))
    left.legend(frameon=False)
    return figure


def gaussian() -> Figure:
    """The score in a plane is a bowl around the query."""
    return plane(("", ats.Gaussian(bandwidth=1.0)))


def nadaraya_watson() -> Figure:
    """Regression as attention pooling, for three bandwidths, and the weights behind it."""
    rng = np.random.default_rng(0)
    x = np.sort(5 * rng.random((50, 1)), axis=0)
    y = 2 * np.sin(x) + x**0.8 + 0.5 * rng.normal(size=x.shape)
    asked = np.linspace(0, 5, 100)[:, None]
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.1))
    for axis, bandwidth in zip(axes, (0.05, 0.2, 1.0), strict=False):
        out = ats.attend(asked, x, y, score=ats.Gaussian(bandwidth))
        axis.plot(x, y, "o", color="#bdbdbd", markersize=3)
        axis.plot(asked, 2 * np.sin(asked) + asked**0.8, "--", color=SECOND, linewidth=1, label="truth")
        axis.plot(asked, out, color=FIRST, label="pooled")
        axis.set_title(f"bandwidth {bandwidth}")
    axes[0].legend(frameon=False, fontsize=8)
    weights = ats.attention_weights(asked, x, score=ats.Gaussian(0.2))
    image = axes[3].imshow(weights, cmap="Reds", aspect="auto")
    axes[3].set(title="weights, bandwidth 0.2", xlabel="training points", ylabel="points asked")
    figure.colorbar(image, ax=axes[3])
    return figure


def softcap() -> Figure:
    """cap * tanh(s / cap) and its slope."""
    scores = np.linspace(-40, 40, 400)[:, None]
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(scores, scores, "--", color="#8c8c8c", label="no cap")
    for cap, colour in ((5.0, FIRST), (20.0, SECOND)):
        capped = ats.attention_scores(scores, np.ones((1, 1)), score=ats.SoftCap("dot", cap))
        left.plot(scores, capped, color=colour, label=f"cap {cap:g}")
        right.plot(scores, 1 - (capped / cap) ** 2, color=colour)
    left.set(title="score after the cap", xlabel="score before", ylim=(-25, 25))
    right.set(title="slope: what the gradient is multiplied by", xlabel="score before", ylim=(0, 1.05))
    left.legend(frameon=False)
    return figure


def collapse() -> Figure:
    """What the statistics say while the queries of a head grow."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 256, 64))
    growths = 2.0 ** np.arange(-3, 9)
    found = [ats.attend(g * query, key, key, return_stats=True)[1] for g in growths]
    panels = {
        "effective keys (of 256)": [stats.effective_keys().mean() for stats in found],
        "largest weight": [stats.max_weight.mean() for stats in found],
        "trace of the softmax Jacobian": [stats.jacobian_trace().mean() for stats in found],
    }
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    for axis, (title, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axis.semilogx(growths, values, "o-", color=FIRST, base=2, markersize=4)
        axis.set(title=title, xlabel="queries times", ylim=(0, None))
    return figure


def watching() -> Figure:
    """What `watch` records of a real model, one of whose heads has been changed to fail."""
    import torch

    from attnscore.cli.demo import minilm
    from attnscore.cli.demo.command import read_sentences
    from attnscore.diagnostics import watch
    from attnscore.diagnostics.inspection import pretrained

    tokenizer, model = pretrained.load(pretrained.MINILM)
    batch = minilm.tokenize(tokenizer, read_sentences(None)[0])
    with torch.no_grad(), watch(model) as seen:
        model.encoder.layer[3].attention.self.query.weight[7 * 32 : 8 * 32] *= 30
        model(**batch.inputs)
    return seen.plot()


def repaired() -> Figure:
    """The training runs of the page on watching, by the code that the page shows."""
    text = (HERE.parent / "watching.md").read_text(encoding="utf-8")
    code = next(block for block in text.split("```python\n")[1:] if "scale_logits" in block).partition("```")[0]
    page: dict[str, Any] = {}
    exec(code, page)
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots(1, 3)
    for (is_repaired, (seen, losses)), colour in zip(page["runs"].items(), (FIRST, SECOND), strict=True):
        label = "with QK-clip" if is_repaired else "without"
        axes[0].plot(losses, color=colour, label=label, linewidth=1.4)
        for axis, name in zip(axes[1:], ("max_logit", "effective_keys"), strict=True):
            for layer in seen.layers.values():
                steps, values = seen.history(layer.name, name)
                axis.plot(steps, values, color=colour, linewidth=0.8)
    axes[0].set(title="Loss", xlabel="step", ylim=(0, None))
    axes[0].legend(frameon=False)
    axes[1].set(title="Largest logit of each head", xlabel="step", yscale="log")
    axes[2].set(title="Effective keys of each head, of 24", xlabel="step", ylim=(0, 24))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def long_context() -> Figure:
    """131072 tokens of the example on long contexts, as its picture shows them."""
    example = runpy.run_path(str(HERE.parents[1] / "examples" / "long_context_maps.py"))
    query, key, _ = example["made_up_head"](131_072)
    # At 140 dots an inch as wide as a picture may be: made smaller, its bins would blur and take twice the bytes.
    return plotting.show_long_attention(query, key, mask=ats.Causal(), figsize=(10, 7.2))


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


DRAWN: dict[str, Callable[[], Figure]] = {
    "dot": lambda: plane(("", "dot")),
    "scaled-dot": scaled_dot,
    "additive": additive,
    "bilinear": bilinear,
    "gaussian": gaussian,
    "nadaraya-watson": nadaraya_watson,
    "cosine": lambda: plane(("", "cosine")),
    "sum": lambda: plane(("", "sum"), weights=True),
    "softcap": softcap,
    "collapse": collapse,
    "watching": watching,
    "long-context": long_context,
    "repaired": repaired,
}

if __name__ == "__main__":
    main(sys.argv[1:])
