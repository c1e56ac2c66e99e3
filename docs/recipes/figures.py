"""Make the pictures of the recipes: ``python docs/recipes/figures.py [NAME ...]``; without names, all.

Each runs the Python blocks of its page and draws what they computed, so a picture shows what the page's code does.
``docs/images/make.py`` makes the other pictures of the documentation, and stores these in the same way.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import attnscore as ats
from attnscore.plotting.drawing import BLUE, RED, WEIGHT

HERE = Path(__file__).parent
MAKE = runpy.run_path(str(HERE.parent / "images" / "make.py"))
GREY = "#8c8c8c"


def main(names: list[str]) -> None:
    """Make the named pictures, or all."""
    if unknown := [name for name in names if name not in DRAWN]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(DRAWN)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or DRAWN:
            page, draw = DRAWN[name]
            source = Path(folder, f"{name}.png")
            draw(computed_by(page)).savefig(source, dpi=140)
            MAKE["store"](source, HERE.parent / "images" / "recipes" / f"{name}.png")


def computed_by(page: str) -> Any:
    """Run the Python blocks of a page and return their names as attributes."""
    names: dict[str, Any] = {"__name__": "document"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"^```python\n(.*?)^```", (HERE / page).read_text(encoding="utf-8"), re.S | re.M):
            exec(block, names)
    return SimpleNamespace(**names)


def panels(count: int, width: float = 9, height: float = 3.1, **options: Any) -> tuple[Figure, list[Any]]:
    """Return an empty figure and its panels, without the frame's upper and right lines."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False, **options)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def seq2seq(page: Any) -> Figure:
    """The alignment of a date in each of two forms."""
    figure, axes = panels(2, 9.5, 4.2)
    texts = ["".join(page.LETTERS[code] for code in row) for row in page.source]
    wrote = ["".join(page.LETTERS[code] for code in row) for row in page.logits.argmax(-1)]
    is_right = (page.logits.argmax(-1) == page.target).all(-1)
    day_first = next(i for i, text in enumerate(texts) if is_right[i] and text[0].isdigit() and page.lens[i] > 12)
    with_comma = next(i for i, text in enumerate(texts) if is_right[i] and "," in text and page.lens[i] > 12)
    for axis, row in zip(axes, (day_first, with_comma), strict=True):
        length = int(page.lens[row])
        weights = page.alignment[row, :, :length]
        image = axis.imshow(weights, cmap="Reds", vmin=0, vmax=1)
        axis.set_xticks(range(length), texts[row][:length])
        axis.set_yticks(range(10), wrote[row])
        axis.set(xlabel="letter read (key)", ylabel="letter written (query)")
        axis.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label=WEIGHT, shrink=0.7)
    return figure


def slots(page: Any) -> Figure:
    """The share of three slots in each point, as a mixture of three colours, and the slots' paths."""
    colours = np.array([[0.70, 0.09, 0.17], [0.13, 0.40, 0.67], [0.30, 0.60, 0.25]])
    figure, axes = panels(2, 9, 3.6)
    for axis, step in zip(axes, (0, -1), strict=True):
        share = ats.attention_weights(page.points, page.path[step], score=ats.Gaussian(0.5))[0].numpy()
        axis.scatter(*page.points[0].numpy().T, s=12, color=share @ colours)
        paths = np.stack([slots[0].numpy() for slots in page.path[: None if step else 1]])
        for slot, colour in enumerate(colours):
            axis.plot(*paths[:, slot].T, color=GREY, linewidth=1.5)
            axis.plot(*paths[-1, slot], "o", color=colour, markeredgecolor="black", markersize=11)
        axis.set(title=("before", "after 30 steps")[step], xlabel="$x_0$", aspect="equal")
    axes[0].set_ylabel("$x_1$")
    return figure


def kernel_regression(page: Any) -> Figure:
    """The fits before and after, and the path of the bandwidth on its error."""
    figure, (left, right) = panels(2, 9.5, 3.3)
    x, asked = page.x.numpy(), page.asked.numpy()
    left.plot(x, page.y.numpy(), "o", color="#bdbdbd", markersize=3.5, label="data")
    left.plot(asked, page.truth(page.asked).numpy(), "--", color=GREY, linewidth=1.2, label="truth")
    for (bandwidth, fit), colour in zip(page.fits.items(), (BLUE, RED), strict=True):
        left.plot(asked, fit.numpy(), color=colour, label=f"bandwidth {bandwidth:.2f}")
    left.set(xlabel="x", ylabel="y")
    left.legend(frameon=False, fontsize=8)
    right.semilogx([float(h) for h in page.grid], [float(e) for e in page.grid.values()], color=GREY, label="grid")
    path = np.array(page.history)
    right.plot(*path.T, ".", color=RED, markersize=4, label="steps of the descent")
    right.set(xlabel="bandwidth", ylabel="leave-one-out squared error")
    right.legend(frameon=False, fontsize=8)
    return figure


def pointer_network(page: Any) -> Figure:
    """The weights of a list of ten, places and queries as they came and sorted."""
    row = int((page.lens == 10).nonzero()[0])
    numbers, order = page.numbers[row, :, 0], page.order[row]
    asked = page.asked(page.numbers, page.order)[row, :, 0]
    figure, axes = panels(2, 9, 3.9)
    names = [f"{number:.2f}" for number in asked.tolist()]
    for axis, places, title in zip(axes, (np.arange(10), order), ("places as they came", "places sorted"), strict=True):
        image = axis.imshow(page.weights[row][:, places], cmap="Reds", vmin=0, vmax=1)
        axis.set_xticks(range(10), [f"{number:.2f}" for number in numbers[places].tolist()], rotation=90)
        axis.set_yticks(range(10), names)
        axis.set(title=title, xlabel="number at the place (key)")
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("next larger than (query)")
    figure.colorbar(image, ax=axes, label="probability of the place", shrink=0.8)
    return figure


def location_sensitive(page: Any) -> Figure:
    """The alignment of one list of symbols without and with the location, and where it should be."""
    figure, axes = panels(2, 9.5, 4.2)
    for axis, (located, (right, alignment, place)) in zip(axes, page.found.items(), strict=True):
        image = axis.imshow(alignment[0].T, cmap="Reds", vmin=0, vmax=1, aspect="auto")
        axis.plot(place[0], "o", color=BLUE, fillstyle="none", markersize=7)
        title = "with the location" if located else "content alone"
        axis.set(title=f"{title}: {right:.0%} of held-out frames right", xlabel="frame (query)")
        axis.set_yticks(range(page.LENGTH), [chr(ord("a") + int(symbol)) for symbol in page.symbols[0]])
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("symbol (key)")
    figure.colorbar(image, ax=axes, label=WEIGHT, shrink=0.8)
    return figure


def gatv2(page: Any) -> Figure:
    """The graph, nodes by predicted group, edges as thick as their weights."""
    import networkx

    places = networkx.spring_layout(page.graph, seed=3, iterations=200)
    predicted, group = page.logits.argmax(-1).tolist(), page.group.tolist()
    weights = page.weights[0].detach().numpy()
    figure, (axis,) = panels(1, 7, 4.6)
    for i, j in page.graph.edges:
        width = 6 * max(weights[i, j], weights[j, i])
        axis.plot(
            *np.array([places[i], places[j]]).T, color="#9e9e9e", linewidth=width, solid_capstyle="round", zorder=1
        )
    for node, (x, y) in places.items():
        marker = "s" if node in (0, 33) else "o"
        ring = (RED, BLUE)[group[node]]
        axis.scatter(x, y, 260, (RED, BLUE)[predicted[node]], marker=marker, edgecolors=ring, linewidths=2.5, zorder=2)
        axis.annotate(str(node), (x, y), ha="center", va="center", color="white", fontsize=8, zorder=3)
    axis.set_axis_off()
    return figure


def differential(page: Any) -> Figure:
    """Weights of 16 queries on 128 keys, plain and subtracted, on one diverging scale."""
    maps = [weights[:16, :128].numpy() for weights in page.maps.values()]
    limit = 0.1  # larger weights have the darkest colour too
    figure, axes = panels(2, 9.5, 2.9)
    for axis, (name, share), weights in zip(axes, page.shares.items(), maps, strict=True):
        image = axis.imshow(weights, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="none")
        axis.plot(8 * np.arange(16), np.arange(16), "o", color=GREY, markerfacecolor="none", markersize=9)
        axis.set(title=f"{name}: {share:.0%} on the needle (circles)", xlabel="key j", yticks=range(0, 16, 5))
    axes[0].set_ylabel("query i")
    figure.colorbar(image, ax=axes, label=WEIGHT, extend="both")
    return figure


def alibi(page: Any) -> Figure:
    """The weights of equal scores under each slope."""
    equal = np.zeros((1, page.heads, 64, 1), np.float32)
    weights = ats.attention_weights(equal, equal, bias=page.alibi(64).numpy(), mask=ats.Causal())[0]
    titles = [f"head {head}: slope 1/{round(1 / slope)}" for head, slope in enumerate(page.slopes.tolist())]
    figure, axes = Figure(figsize=(9.5, 5), layout="constrained"), []
    for axis, title, one in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, titles, weights, strict=True):
        # Each row against its own maximum: the shape of the decay, which one scale would hide in most heads.
        image = axis.imshow(one / one.max(-1, keepdims=True), cmap="Reds", vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axes.append(axis)
    figure.supxlabel("key j")
    figure.supylabel("query i")
    figure.colorbar(image, ax=axes, label="weight / largest of the query", shrink=0.8)
    return figure


def long_context(page: Any) -> Figure:
    """Norms of the outputs with the full context, the window, and the window with sinks."""
    figure, (left, right) = panels(2, 9.5, 3.3, width_ratios=(1.6, 1))
    lines = {"full context": (page.full, GREY)} | {
        name: (out, colour) for (name, out), colour in zip(page.outputs.items(), (BLUE, RED), strict=True)
    }
    for name, (out, colour) in lines.items():
        norm = np.linalg.norm(out, axis=1)
        smooth = np.convolve(norm, np.ones(64) / 64, "valid")
        left.plot(
            np.arange(len(smooth)) + 32,
            smooth,
            color=colour,
            label=name,
            linewidth=3 if name == "full context" else 1.2,
        )
    left.set(xlabel="query i", ylabel="norm of the output, mean of 64", ylim=(0, 3.4), xlim=(0, 4096))
    left.axvline(256, color=GREY, linestyle=":", linewidth=1)
    left.annotate("the window is full", (256, 2.75), (5, 0), textcoords="offset points", fontsize=8)
    left.legend(frameon=False, fontsize=8, loc="upper center", ncols=3)
    small = ats.KeyRange([0], [4]) & ats.Causal() | ats.Causal() & ats.SlidingWindow(left=7)
    right.imshow(small.materialize(32, 32, batch=1)[0], cmap="Reds", vmin=0, vmax=1.2)
    right.set(title="4 sinks and a window of 8", xlabel="key j", ylabel="query i")
    right.spines[:].set_visible(False)
    return figure


def entropy(page: Any) -> Figure:
    """Effective keys over the steps, for each coefficient."""
    figure, (axis,) = panels(1, 7, 3.2)
    for (beta, (effective, right)), colour in zip(page.runs.items(), (BLUE, GREY, RED), strict=True):
        axis.plot(effective, color=colour, label=f"beta {beta:g}: {right:.0%} right, held out")
    axis.set(xlabel="step of training", ylabel="effective keys, of 12", ylim=(0, 12.5))
    axis.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1, 0.4))
    return figure


def qk_clip(page: Any) -> Figure:
    """Losses and the largest logit of each head, of both runs."""
    figure, (left, right) = panels(2, 9, 3.1)
    for (name, (losses, logits)), colour in zip(page.runs.items(), (BLUE, RED), strict=True):
        left.plot(losses, color=colour, label=name)
        right.plot(logits, color=colour, linewidth=0.9)
    right.axhline(10, color=GREY, linestyle=":", linewidth=1)
    right.annotate("τ", (150, 10), (2, 2), textcoords="offset points", color=GREY)
    left.axhline(np.log(16), color=GREY, linestyle=":", linewidth=1)
    left.annotate("chance", (150, np.log(16)), (-34, -11), textcoords="offset points", color=GREY, fontsize=8)
    left.set(xlabel="step", ylabel="training loss, nats per word", ylim=(0, None))
    right.set(xlabel="step", ylabel="largest logit of each head", yscale="log")
    left.legend(frameon=False, fontsize=9)
    return figure


def failing_head(page: Any) -> Figure:
    """Three numbers of each head as layers by heads, the failing ones framed; dark is what fails, as in `watch`."""
    shown = {
        "max_logit": ("largest logit", "logit", "Reds", None),
        "effective_keys": ("effective keys, of 48", "keys", "Reds_r", 48),
        "nan_rows": ("queries with NaN weights", "queries", "Reds", None),
    }
    figure, axes = panels(3, 10, 2.9)
    for axis, (name, (title, unit, colours, top)) in zip(axes, shown.items(), strict=True):
        numbers = np.array([row[name] for row in page.seen.rows()]).reshape(3, 4)
        numbers = np.where(np.isfinite(numbers), numbers, np.nan)
        axis.set_facecolor("#d9d9d9")
        image = axis.imshow(numbers, cmap=colours, vmin=0, vmax=top)
        for (layer, head), number in np.ndenumerate(numbers):
            part = number / np.nanmax(numbers)
            bright = np.isnan(number) or (1 - part if colours == "Reds_r" else part) < 0.55
            text = "NaN" if np.isnan(number) else f"{number:.0f}"
            axis.annotate(text, (head, layer), ha="center", va="center", color="#262626" if bright else "white")
        for layer, head in ((0, 0), (1, 1), (2, 2)):
            axis.add_patch(_frame(head, layer))
        axis.set_xticks(range(4))
        axis.set_yticks(range(3))
        axis.set(title=title, xlabel="head")
        figure.colorbar(image, ax=axis, shrink=0.8, label=unit)
    axes[0].set_ylabel("layer")
    return figure


def chosen_heads(page: Any) -> Figure:
    """Weights of a synthetic alignment, and the path through their smoothed sum."""
    figure, axes = panels(2, 9.5, 3.9)
    gain = page.smooth(page.weights)
    maps = ("mean weight of three heads", page.weights.mean(0), "Reds"), ("smoothed, with the path", gain, "RdBu_r")
    for axis, (title, values, colours) in zip(axes, maps, strict=True):
        limit = np.abs(values).max()
        low = 0 if colours == "Reds" else -limit
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=limit, aspect="auto", interpolation="none")
        axis.plot(page.begins, np.arange(len(page.words)), "o", color=BLUE, fillstyle="none", markersize=7)
        axis.set_yticks(range(len(page.words)), page.words)
        axis.set(title=title, xlabel="frame (key)")
        figure.colorbar(image, ax=axis, shrink=0.8)
    frames = np.append(page.best_path(gain), gain.shape[1])
    axes[1].step(frames - 0.5, np.minimum(np.arange(len(frames)), 11), where="post", color="black", linewidth=1.2)
    axes[0].set_ylabel("word (query)")
    return figure


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=2)


DRAWN: dict[str, tuple[str, Callable[[Any], Figure]]] = {
    "seq2seq": ("seq2seq.md", seq2seq),
    "slots": ("perceiver-and-slots.md", slots),
    "kernel-regression": ("kernel-regression.md", kernel_regression),
    "pointer-network": ("pointer-network.md", pointer_network),
    "gatv2": ("gatv2.md", gatv2),
    "differential": ("differential.md", differential),
    "alibi": ("alibi.md", alibi),
    "long-context": ("long-context.md", long_context),
    "entropy": ("entropy.md", entropy),
    "qk-clip": ("qk-clip.md", qk_clip),
    "failing-head": ("failing-head.md", failing_head),
    "location-sensitive": ("location-sensitive.md", location_sensitive),
    "chosen-heads": ("chosen-heads.md", chosen_heads),
}

if __name__ == "__main__":
    main(sys.argv[1:])
