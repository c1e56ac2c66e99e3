"""Pictures of what `bench.simulation` predicts for many ranks: efficiency by mode, and the fastest mode."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import attnscore as ats
from attnscore.plotting.drawing import BLUE, style_lines
from bench.simulation import Machine, Simulation, simulate

GPU = Machine(flops=4e14, bandwidth=5e10, latency=2e-5)
SIZES = {"dim": 128, "heads": 32, "kv_heads": 8, "dtype": "bfloat16", "gradient": True}
MEMORY = 40e9
RANKS = 2 ** np.arange(3, 11)
MILLIONS = (1, 2, 5, 10, 20, 50, 100)
# Neither is good or bad: no red.
COLOURS = {"gather": BLUE, "ring": "#b5761d", "heads": "#7d5fb2"}
MASKS = {"causal": "One causal sequence", "packed": "Packed documents"}


def mask_of(name: str, length: int) -> ats.Mask:
    """Return a causal mask, or that of causal documents of 16 thousand tokens in the median, some far longer."""
    if name == "causal":
        return ats.Causal()
    rng = np.random.default_rng(0)
    lens = rng.lognormal(np.log(16_384), 1.2, length // 4096).astype(int)
    ends = np.cumsum(lens)
    return ats.Packed([0, *ends[ends < length], length]).causal()


@cache
def predicted(name: str, millions: int, ranks: int, mode: str) -> Simulation | None:
    """Return a simulation; None where the ranks do not divide the heads."""
    if mode == "heads" and SIZES["kv_heads"] % ranks:
        return None
    length = millions * 10**6
    mask = mask_of(name, length)
    if mode == "gather" and name == "packed":
        return simulate(mask, length, ranks, GPU, mode=mode, queries="consecutive", keys="consecutive", **SIZES)
    return simulate(mask, length, ranks, GPU, mode=mode, **SIZES)


def efficiency() -> Figure:
    """The part of the time that ranks compute, against their number."""
    figure = Figure(figsize=(8, 4.8))
    figure.suptitle("Part of the time that ranks compute: ring is ahead for one sequence, gather for documents")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    most, line = SIZES["kv_heads"], {"marker": "o", "markersize": 4}
    # Hollow, around the dots of the others, which would hide its one dot.
    diamond = {"marker": "D", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.8, "linestyle": "none"}
    styles: dict[str, dict[str, Any]] = {"gather": line, "ring": line, "heads": diamond}
    for row, (name, title) in zip(axes, MASKS.items(), strict=True):
        for axis, millions in zip(row, (1, 10, 100), strict=True):
            for mode, colour in COLOURS.items():
                simulations = [(int(ranks), predicted(name, millions, int(ranks), mode)) for ranks in RANKS]
                points = [(ranks, x.efficiency) for ranks, x in simulations if x is not None]
                label = f"heads: {most} KV heads, so {most} ranks at most" if mode == "heads" else mode
                axis.plot(*zip(*points, strict=True), label=label, **styles[mode], color=colour, clip_on=False)
            axis.set_xscale("log", base=2)
            style_lines(axis, f"{millions}M tokens", "ranks", f"{title}\nefficiency")
            axis.label_outer()
            axis.set_ylim(0, 1.02)
            axis.set_xticks(RANKS[::2], [str(ranks) for ranks in RANKS[::2]])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def fastest() -> Figure:
    """The fastest mode that fits into memory, for each length and number of ranks, with its efficiency."""
    figure = Figure(figsize=(8, 4))
    figure.suptitle("Fastest mode that fits into 40 GB, and its efficiency: ring for one sequence, gather for many")
    axes, modes = figure.subplots(1, 2, sharey=True), set[str | None]()
    for axis, (name, title) in zip(axes, MASKS.items(), strict=True):
        for row, millions in enumerate(MILLIONS):
            for column, ranks in enumerate(RANKS.tolist()):
                modes.add(draw_cell(axis, name, millions, ranks, (column, row)))
        axis.set(xlim=(0, len(RANKS)), ylim=(0, len(MILLIONS)))
        style_lines(axis, title, "ranks", "tokens")
        axis.grid(visible=False)
        axis.set_xticks(np.arange(len(RANKS)) + 0.5, [str(r) for r in RANKS])
        axis.set_yticks(np.arange(len(MILLIONS)) + 0.5, [f"{m}M" for m in MILLIONS])
    axes[1].set_ylabel("")
    marks = [Patch(color=COLOURS[mode], label=mode) for mode in COLOURS if mode in modes]
    marks.append(Patch(facecolor="none", edgecolor="#8c8c8c", label="none fits"))
    figure.legend(handles=marks, loc="outside lower center", ncols=4)
    return figure


def draw_cell(axis: Axes, name: str, millions: int, ranks: int, corner: tuple[int, int]) -> str | None:
    """Draw the fastest mode of one length and number of ranks, and return its name."""
    found = (predicted(name, millions, ranks, mode) for mode in COLOURS)
    fitting = [x for x in found if x is not None and x.peak_memory.max() <= MEMORY]
    best = min(fitting, key=lambda x: x.seconds, default=None)
    colour = "none" if best is None else COLOURS[best.mode]
    axis.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="#8c8c8c", linewidth=0.6))
    if best is None:
        return None
    middle = corner[0] + 0.5, corner[1] + 0.5
    axis.text(*middle, f"{best.efficiency:.0%}", ha="center", va="center", fontsize=8, color="white")
    return str(best.mode)


DRAWN = {"parallel-efficiency": efficiency, "parallel-modes": fastest}
