"""Make the pictures of the recipes: ``python docs/recipes/figures.py [NAME ...]``; without names, all.

Each runs the Python blocks of its page and draws what they computed, so a picture shows what the page's code does.
``docs/images/make.py`` makes the other pictures of the documentation, and stores these in the same way.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import SymLogNorm, TwoSlopeNorm
from matplotlib.figure import Figure

import attnscore as ats
from attnscore.plotting import drawing
from attnscore.plotting.drawing import BLUE, RED, WEIGHT, style_lines

HERE = Path(__file__).parent
MAKE = runpy.run_path(str(HERE.parent / "images" / "make.py"))
GREY = "#8c8c8c"


def main(names: list[str]) -> None:
    """Make the named pictures, or all."""
    if unknown := [name for name in names if name not in DRAWN]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(DRAWN)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or DRAWN:
            page = SimpleNamespace(**MAKE["names_of"](f"recipes/{PAGES.get(name, name)}.md"))
            source = Path(folder, f"{name}.png")
            DRAWN[name](page).savefig(source)
            MAKE["store"](source, HERE.parent / "images" / "recipes" / f"{name}.png")


def panels(count: int, width: float = 8, height: float = 3.1, **options: Any) -> tuple[Figure, list[Any]]:
    """Return an empty figure and its panels beside one another."""
    figure = Figure(figsize=(width, height))
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def seq2seq(page: Any) -> Figure:
    """The alignment of a date in each of two forms."""
    figure, axes = panels(2, height=3.6)
    texts = ["".join(page.LETTERS[code] for code in row) for row in page.source]
    wrote = ["".join(page.LETTERS[code] for code in row) for row in page.logits.argmax(-1)]
    is_right = (page.logits.argmax(-1) == page.target).all(-1)
    day_first = next(i for i, text in enumerate(texts) if is_right[i] and text[0].isdigit() and page.lens[i] > 12)
    with_comma = next(i for i, text in enumerate(texts) if is_right[i] and "," in text and page.lens[i] > 12)
    for axis, row in zip(axes, (day_first, with_comma), strict=True):
        text = texts[row][: int(page.lens[row])]
        image = axis.imshow(page.alignment[row, :, : len(text)], vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(text)), text.replace(" ", "␣"))
        axis.set_yticks(range(10), wrote[row])
        axis.set(title=f"{text} → {wrote[row]}", xlabel="letter read (key)")
    axes[0].set_ylabel("letter written (query)")
    figure.colorbar(image, ax=axes, label=WEIGHT)
    return figure


def slots(page: Any) -> Figure:
    """The share of three slots in each point, as a mixture of three colours, and the slots' paths."""
    colours = np.array([[0.84, 0.25, 0.31], [0.13, 0.40, 0.67], [0.93, 0.72, 0.13]])
    figure, axes = panels(2, 8, 3.6)
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
    figure, (left, right) = panels(2, height=3.3)
    x, new_x = page.x.numpy(), page.new_x.numpy()
    left.plot(x, page.y.numpy(), "o", color="#bdbdbd", markersize=3.5, label="data")
    left.plot(new_x, page.truth(page.new_x).numpy(), "--", color=GREY, linewidth=1.2, label="truth")
    for (bandwidth, fit), colour in zip(page.fits.items(), (RED, BLUE), strict=True):
        left.plot(new_x, fit.numpy(), color=colour, label=f"bandwidth {bandwidth:.2f}")
    style_lines(left, "The learned bandwidth follows the data", "x", "y")
    left.legend()
    right.semilogx([float(h) for h in page.grid], [float(e) for e in page.grid.values()], color=GREY, label="grid")
    path = np.array(page.history)
    right.plot(*path.T, ".", color=BLUE, markersize=4, label="steps of the descent")
    style_lines(right, "Descent ends at the minimum", "bandwidth", "leave-one-out squared error")
    right.legend()
    return figure


def pointer_network(page: Any) -> Figure:
    """The weights of a list of ten, places and queries as they came and sorted."""
    row = int((page.lens == 10).nonzero()[0])
    numbers, order = page.numbers[row, :, 0], page.order[row]
    queries = page.queries_of(page.numbers, page.order)[row, :, 0]
    figure, axes = panels(2, 8, 3.8)
    names = [f"{number:.2f}" for number in queries.tolist()]
    for axis, places, title in zip(axes, (np.arange(10), order), ("places as they came", "places sorted"), strict=True):
        image = axis.imshow(page.weights[row][:, places], vmin=0, vmax=1)
        axis.set_xticks(range(10), [f"{number:.2f}" for number in numbers[places].tolist()], rotation=90)
        axis.set_yticks(range(10), names)
        axis.set(title=title, xlabel="number at the place (key)")
    axes[0].set_ylabel("next larger than (query)")
    figure.colorbar(image, ax=axes, label="probability of the place", shrink=0.8)
    return figure


def location_sensitive(page: Any) -> Figure:
    """The alignment of one list of symbols without and with the location, and where it should be."""
    figure, axes = panels(2, 8, 3.8)
    for axis, (located, (right, alignment, place)) in zip(axes, page.results.items(), strict=True):
        image = axis.imshow(alignment[0].T, vmin=0, vmax=1, aspect="auto")
        axis.plot(place[0], "o", color=BLUE, fillstyle="none", markersize=7)
        title = "with the location" if located else "content alone"
        axis.set(title=f"{title}: {right:.0%} of held-out frames right", xlabel="frame (query)")
        axis.set_yticks(range(page.LENGTH), [chr(ord("a") + int(symbol)) for symbol in page.symbols[0]])
    axes[0].set_ylabel("symbol (key)")
    figure.colorbar(image, ax=axes, label=WEIGHT, shrink=0.8)
    return figure


def gatv2(page: Any) -> Figure:
    """The graph, nodes by predicted group, edges as thick as their weights."""
    import networkx

    places = networkx.kamada_kawai_layout(page.graph, weight=None)
    predicted, group = page.logits.argmax(-1).tolist(), page.group.tolist()
    weights = page.weights[0].detach().numpy()
    figure, (axis,) = panels(1, 8, 5.6)
    for i, j in page.graph.edges:
        width = 6 * max(weights[i, j], weights[j, i])
        axis.plot(*zip(places[i], places[j], strict=True), color="#9e9e9e", linewidth=width, zorder=1)
    for node, place in places.items():
        marker, ring = "s" if node in (0, 33) else "o", (RED, BLUE)[group[node]]
        colour = (RED, BLUE)[predicted[node]]
        axis.scatter(*place, 190, colour, marker=marker, edgecolors=ring, linewidths=2.5, zorder=2)
        axis.annotate(str(node), place, ha="center", va="center", color="white", fontsize=8, zorder=3)
    for colour, name in ((RED, "group of node 0"), (BLUE, "group of node 33")):
        axis.scatter([], [], 60, colour, label=name)
    axis.scatter([], [], 60, GREY, marker="s", label="label given")
    axis.scatter([], [], 60, RED, edgecolors=BLUE, linewidths=2.5, label="predicted (inside) is not true (ring)")
    axis.plot([], [], color="#9e9e9e", linewidth=4, label="weight of a neighbour")
    wrong = sum(a != b for a, b in zip(predicted, group, strict=True))
    axis.set_title(f"Two labels are enough for {34 - wrong} of 34 nodes")
    axis.set_axis_off()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def differential(page: Any) -> Figure:
    """Weights of 8 queries on 64 keys, plain and subtracted, on one diverging scale, and the needle's shares."""
    figure, (*axes, bars) = panels(3, height=2.6, width_ratios=(3, 3, 1.3))
    drawn = {name: weights[:8, :64] for name, weights in page.maps.items()}
    largest = max(float(weights.abs().max()) for weights in drawn.values())
    # Linear up to 0.02, logarithmic beyond: a linear scale up to the largest weight would leave all others white.
    norm = SymLogNorm(0.02, vmin=-largest, vmax=largest)
    for axis, (name, weights) in zip(axes, drawn.items(), strict=True):
        image = axis.imshow(weights, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="none")
        axis.plot(8 * np.arange(8), np.arange(8), "o", color=BLUE, markerfacecolor="none", markersize=9)
        axis.set(title=name, xlabel="key j")
    axes[0].set_ylabel("query i")
    ticks = (-0.1, -0.02, 0, 0.02, 0.1)
    figure.colorbar(image, ax=axes, label="weight (log beyond ±0.02)", ticks=ticks, format="{x:g}")
    columns = bars.bar(list(page.shares), list(page.shares.values()), color=(RED, BLUE), width=0.6)
    bars.bar_label(columns, [f"{share:.0%}" for share in page.shares.values()])
    style_lines(bars, "On the needle", "")
    bars.set_yticks([])
    bars.margins(y=0.15)
    return figure


def alibi(page: Any) -> Figure:
    """The weights of equal scores under each slope."""
    equal = np.zeros((1, page.heads, 64, 1), np.float32)
    weights = ats.attention_weights(equal, equal, bias=page.alibi(64).numpy(), mask=ats.Causal())[0]
    titles = [f"head {head}: slope 1/{round(1 / slope)}" for head, slope in enumerate(page.slopes.tolist())]
    figure, axes = Figure(figsize=(8, 4.6)), []
    for axis, title, one in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, titles, weights, strict=True):
        # Each row against its own maximum: the shape of the decay, which one scale would hide in most heads.
        image = axis.imshow(one / one.max(-1, keepdims=True), vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axes.append(axis)
    figure.supxlabel("key j", fontsize=9)
    figure.supylabel("query i", fontsize=9)
    figure.colorbar(image, ax=axes, label="weight / largest of the query", shrink=0.8)
    return figure


def long_context(page: Any) -> Figure:
    """Errors of the outputs with the window, and with the window and sinks, beside the size of the output itself."""
    figure, (left, right) = panels(2, height=3.3, width_ratios=(1.8, 1))
    lines = {"the output itself": page.full} | {name: out - page.full for name, out in page.outputs.items()}
    for (name, values), colour in zip(lines.items(), (GREY, RED, BLUE), strict=True):
        smooth = np.convolve(np.linalg.norm(values, axis=1), np.ones(64) / 64, "valid")
        left.plot(np.arange(len(smooth)) + 32, smooth, color=colour, label=name, linewidth=1.2)
    style_lines(left, "Without sinks the error exceeds the output", "query i", "error of the output (norm, mean of 64)")
    left.set(ylim=(0, 3.9), xlim=(0, 4096))
    left.axvline(256, color=GREY, linestyle=":", linewidth=1)
    left.annotate("the window is full", (256, 3.05), (5, 0), textcoords="offset points", fontsize=8)
    left.legend(loc="upper center", ncols=3)
    small = ats.KeyRange([0], [4]) & ats.Causal() | ats.Causal() & ats.SlidingWindow(left=7)
    right.imshow(small.materialize(32, 32, batch=1)[0], cmap="Blues", vmin=0, vmax=1.35)
    right.set(title="Seen: 4 sinks and a window of 8", xlabel="key j", ylabel="query i")
    return figure


def entropy(page: Any) -> Figure:
    """Effective keys over the steps, for each coefficient."""
    figure, (axis,) = panels(1, 7, 3.2)
    for (beta, (effective, right)), colour in zip(page.runs.items(), (RED, GREY, BLUE), strict=True):
        axis.plot(effective, color=colour, label=f"beta {beta:g}: {right:.0%} right, held out")
    style_lines(axis, "A negative beta makes the head collapse to one key", "step of training", "effective keys, of 12")
    axis.set_ylim(0, 12.5)
    axis.legend(loc="center right", bbox_to_anchor=(1, 0.4))
    return figure


def qk_clip(page: Any) -> Figure:
    """Losses and the largest logit of each head, of both runs."""
    figure, (left, right) = panels(2)
    for (name, (losses, logits)), colour in zip(page.runs.items(), (RED, BLUE), strict=True):
        left.plot(losses, color=colour, label=name)
        right.plot(logits, color=colour, linewidth=0.9)
    style_lines(left, "Only the clipped run learns", "step", "training loss, nats per word")
    style_lines(right, "Its logits stay near τ", "step", "largest logit of each head")
    right.set_yscale("log")
    left.set_ylim(0, 3.2)
    for axis, height, name in ((left, np.log(16), "chance"), (right, 10, "τ")):
        axis.axhline(height, color=GREY, linestyle=":", linewidth=1)
        axis.annotate(name, (1, height), (-2, 3), axis.get_yaxis_transform(), "offset points", ha="right", fontsize=9)
    left.legend(loc="center right")
    return figure


def failing_head(page: Any) -> Figure:
    """Three numbers of each head as layers by heads, the failing heads framed as in `watch`."""
    logits, effective, not_numbers = (
        np.array([row[name] for row in page.seen.rows()]).reshape(3, 4)
        for name in ("max_logit", "effective_keys", "nan_rows")
    )
    # White is a usual head, red is too sharp, blue averages: both failures are dark.
    usual_logit, usual_keys = np.median(logits), np.nanmedian(effective)
    shown = {
        "largest logit": (logits, "RdBu_r", TwoSlopeNorm(usual_logit, 0, logits.max())),
        "effective keys, of 48": (effective, "RdBu", TwoSlopeNorm(usual_keys, 0, 48)),
        "queries with NaN weights": (not_numbers, "Reds", None),
    }
    figure, axes = panels(3, height=2.4, sharey=True)
    figure.suptitle("Red: one key takes all, or NaN. Blue: all keys alike. Grey: not a number.")
    for axis, (title, (numbers, colours, norm)) in zip(axes, shown.items(), strict=True):
        finite = np.ma.masked_invalid(numbers)
        image = axis.imshow(finite, cmap=colormaps[colours].with_extremes(bad=drawing.GREY), norm=norm)
        drawing.write_numbers(axis, image, finite, "{:.0f}".format)
        for layer, head in np.argwhere(finite.mask):
            text = str(numbers[layer, head]).replace("nan", "NaN").replace("-inf", "−∞")
            axis.annotate(text, (head, layer), ha="center", va="center", color="#262626", fontsize=8)
        for layer, head in ((0, 0), (1, 1), (2, 2)):
            drawing.mark_cell(axis, layer, head)
        axis.set(title=title, xlabel="head", xticks=range(4), yticks=range(3))
    axes[0].set_ylabel("layer")
    return figure


def chosen_heads(page: Any) -> Figure:
    """Weights of a synthetic alignment, and the path through their smoothed sum."""
    figure, axes = panels(2, 8, 3.6)
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


DRAWN: dict[str, Callable[[Any], Figure]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (
        seq2seq,
        slots,
        kernel_regression,
        pointer_network,
        gatv2,
        differential,
        alibi,
        long_context,
        entropy,
        qk_clip,
        failing_head,
        location_sensitive,
        chosen_heads,
    )
}
PAGES = {"slots": "perceiver-and-slots"}
"""Pages whose name is not that of their picture."""

if __name__ == "__main__":
    main(sys.argv[1:])
