"""Training of the same small transformer on real text with and without 1/sqrt(d), for several d and seeds.

Requirements:
- runs that were finished before an interruption are read, not made again;
- a pair of runs differs in the score alone, so gaps are taken pair by pair;
- PyTorch is imported when a run is made, not when its numbers are read;
- the text is one that every machine with Python has: the sources of its standard library, as characters.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.base.arguments import check_choice, shown
from attnscore.diagnostics.lab import experiment, runs
from attnscore.diagnostics.lab.experiment import NAMES, SCORES, Array, Check, Estimate, Result, Row
from attnscore.diagnostics.lab.panels import COLOURS, SPREAD
from attnscore.diagnostics.lab.runs import Settings, TrainingRun
from attnscore.errors import ArgumentError, message
from attnscore.io import require
from attnscore.plotting.drawing import legend, new_figure, style_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Called with the settings of a run and the number of its finished steps.
Progress = Callable[[Settings, int], Any]

# Printable ASCII and the line end; every other character becomes one more symbol.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
SYMBOLS = len(ALPHABET) + 1
# Modules that have long been part of Python; one that is missing is left out.
_MODULES = ("argparse", "ast", "configparser", "difflib", "inspect", "optparse", "pathlib", "statistics", "textwrap")
# The least gap at the largest d that the checks accept, in nats per character.
_LEAST_GAP = 0.05
# Statistics of a `Look` with the name and the scale of their axis, a row of panels each.
_CURVES = (
    ("loss", "training loss\n(nats per character)", "log"),
    ("logit_variance", "variance of\nthe logits", "log"),
    ("entropy", "entropy over its largest,\nlog(attended keys)", "linear"),
    ("saturated", "share of\nsaturated queries", "linear"),
)


def standard_library(most: int = 400_000) -> str:
    """Return the first `most` characters of some modules of this Python's standard library.

    A Python without sources is an `ArgumentError`.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for name in _MODULES if (path := folder / f"{name}.py").is_file()]
    text = "\n".join(path.read_text("utf-8") for path in files)[:most]
    if len(text) < 10_000:
        raise ArgumentError(message("text", "the sources of Python's standard library", f"{len(text)} characters"))
    return text


def encode(text: str) -> NDArray[np.int64]:
    r"""Encode characters as numbers below SYMBOLS.

    >>> encode("\na~é").tolist()
    [0, 66, 95, 96]
    """
    number = {character: place for place, character in enumerate(ALPHABET)}
    return np.array([number.get(character, len(ALPHABET)) for character in text], dtype=np.int64)


def digest(text: str) -> str:
    """Return a digest of a text, which tells runs on different texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """Choice of training runs: each dimension with each seed, with and without the scale.

    >>> [(one.head_dim, one.score) for one in Plan((8, 32), seeds=1, steps=10).settings()]
    [(8, 'dot'), (8, 'scaled_dot'), (32, 'dot'), (32, 'scaled_dot')]
    """

    head_dims: tuple[int, ...]
    seeds: int
    steps: int
    width: int = 128
    batch: int = 16
    context: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that are not whole, and dimensions that do not divide the width."""
        sizes = (self.seeds, self.steps, self.width, self.batch, self.context)
        experiment.check_sizes("head_dims", self.head_dims)
        experiment.check_sizes("seeds, steps, width, batch, context", sizes)
        if any(self.width % dim for dim in self.head_dims):
            raise ArgumentError(message("head_dims", f"divisors of the width {self.width}", shown(self.head_dims)))

    def settings(self) -> Iterator[Settings]:
        """Yield the settings of the runs in the order in which they are made: whole pairs first."""
        sizes = {"width": self.width, "batch": self.batch, "context": self.context}
        for seed in range(self.seeds):
            for dim in self.head_dims:
                for score in SCORES:
                    yield Settings(score, dim, seed, self.steps, **sizes, look_every=max(1, self.steps // 40))


QUICK = Plan((8, 128), seeds=1, steps=150)
FULL = Plan((8, 32, 128), seeds=3, steps=700)


@dataclass(frozen=True)
class TrainingRuns(Result):
    """Result of `training_runs`."""

    runs: tuple[TrainingRun, ...]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Dimensions of the runs, in rising order."""
        return tuple(sorted({run.settings.head_dim for run in self.runs}))

    def of(self, score: str, head_dim: int) -> list[TrainingRun]:
        """Return the runs of one score at one dimension, by seed; ArgumentError where there is no such score."""
        check_choice("score", score, SCORES)
        matching = [run for run in self.runs if (run.settings.score, run.settings.head_dim) == (score, head_dim)]
        return sorted(matching, key=lambda run: run.settings.seed)

    def curves(self, score: str, head_dim: int, name: str) -> tuple[NDArray[np.int64], Array]:
        """Return the steps, and a number of each `Look` as (seed, step)."""
        by_seed = self.of(score, head_dim)
        values = np.array([[getattr(look, name) for look in run.looks] for run in by_seed], dtype=np.float64)
        return np.array([look.step for look in by_seed[0].looks]), values

    def gap(self, head_dim: int) -> Estimate:
        """Estimate the held-back loss without the scale minus the loss with it, over pairs of runs of one seed."""
        pairs = zip(*(self.of(score, head_dim) for score in SCORES), strict=True)
        return experiment.estimate([without.held_back_loss - scaled.held_back_loss for without, scaled in pairs])

    def to_rows(self) -> list[Row]:
        """Return a row per run: its settings, the last statistics, the loss on held-back text."""
        return [
            {
                "score": run.settings.score,
                "d": run.settings.head_dim,
                "seed": run.settings.seed,
                "steps": run.settings.steps,
                "loss": run.held_back_loss,
                "first logit variance": run.looks[0].logit_variance,
                "last logit variance": run.looks[-1].logit_variance,
                "last entropy": run.looks[-1].entropy,
                "last saturated": run.looks[-1].saturated,
                "last Jacobian trace": run.looks[-1].jacobian_trace,
                "seconds": run.seconds,
            }
            for run in self.runs
        ]

    def summary(self) -> list[Row]:
        """Return a row for each score and dimension: means over the seeds, and the gap."""
        short = {
            "loss": "loss",
            "first logit variance": "first variance",
            "last logit variance": "last variance",
            "last entropy": "entropy",
            "last saturated": "saturated",
        }
        summary = []
        for dim in self.head_dims:
            for score in SCORES:
                rows = TrainingRuns(tuple(self.of(score, dim))).to_rows()
                means = {new: float(np.mean([row[name] for row in rows])) for name, new in short.items()}
                gap = self._gap(dim) if score == "dot" else ""
                summary.append({"score": NAMES[score], "d": dim, "seeds": len(rows), **means, "gap": gap})
        return summary

    def sentence(self) -> str:
        gaps = "; ".join(f"d = {dim}: {self._gap(dim)}" for dim in self.head_dims)
        alone = all(len(self.of("dot", dim)) == 1 for dim in self.head_dims)
        spread = " One pair of runs for each d: no margin." if alone else ""
        return f"Without 1/√d the loss on held-back text is higher, in nats per character, by: {gaps}.{spread}"

    def _gap(self, dim: int) -> str:
        """Format the gap, with its margin if there are several pairs of runs."""
        gap = self.gap(dim)
        return str(gap) if math.isfinite(gap.margin) else f"{gap.value:.2g}"

    def checks(self) -> tuple[Check, ...]:
        dim = self.head_dims[-1]
        first = [run.looks[0].logit_variance for run in self.of("dot", dim)]
        shortfall = max(0.0, _LEAST_GAP - self.gap(dim).value)
        claim = f"d = {dim}: training without the scale ends at a higher loss (shortfall of the gap)"
        return (
            Check(claim, shortfall, 0.0),
            # Over the keys that a query attends to; few keys and one draw of the weights leave tens of percent.
            Check(f"d = {dim}: logits of the first step have variance d", abs(float(np.mean(first)) / dim - 1), 0.5),
        )

    def plot(self) -> Figure:
        """Draw a column per d: the loss with the spread of the seeds, and below it the statistics that explain it."""
        from matplotlib.ticker import NullFormatter, ScalarFormatter

        dims = self.head_dims
        seeds = len(self.of("dot", dims[0]))
        spread = f"; {seeds} seeds: thick their mean, thin each" if seeds > 1 else ""
        title = "The same transformer with and without 1/√d" + spread
        figure = new_figure((2.7 * len(dims) + 0.9, 7.4), title=title)
        grid = figure.subplots(len(_CURVES), len(dims), sharex=True, sharey="row", squeeze=False).tolist()
        for (name, unit, scale), line in zip(_CURVES, grid, strict=True):
            for axis, dim in zip(line, dims, strict=True):
                for score in COLOURS:
                    self._draw_curve(axis, score, dim, name)
                axis.set_yscale(scale)
                heading = f"d = {dim}: held-out loss\n{self.gap(dim).value:+.3f} without 1/√d" if name == "loss" else ""
                style_lines(axis, heading, "step" if line is grid[-1] else "", unit if axis is line[0] else "")
            if scale == "linear":
                line[0].set_ylim(0, 1)
        legend(grid[0][-1], loc="upper right")
        # Losses as numbers, not as powers of ten.
        losses = grid[0][0].yaxis
        losses.set_ticks([1.5, 2, 2.5, 3, 4, 5])
        losses.set_major_formatter(ScalarFormatter())
        losses.set_minor_formatter(NullFormatter())
        return figure

    def _draw_curve(self, axis: Axes, score: str, dim: int, name: str) -> None:
        steps, values = self.curves(score, dim, name)
        if name == "loss" and values.shape[1] >= 5:
            # One batch's loss says little: draw its mean with both neighbours.
            padded = np.pad(values, ((0, 0), (1, 1)), mode="edge")
            values = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1).mean(-1)
        colour = COLOURS[score]
        if len(values) > 1:
            axis.plot(steps, values.T, color=colour, linewidth=0.6, alpha=0.5)
            axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=SPREAD, linewidth=0)
        axis.plot(steps, values.mean(0), color=colour, linewidth=1.6, label=NAMES[score])


def training_runs(
    plan: Plan = QUICK, folder: Path | None = None, *, tell: Progress | None = None, fresh: bool = False
) -> TrainingRuns:
    """Train the same transformer with and without 1/sqrt(d) on the sources of Python's standard library.

    Parameters
    ----------
    plan : Plan
        QUICK: four runs, about half a minute. FULL: eighteen runs, about ten minutes on two cores.
    folder : Path, optional
        Folder of finished runs, which are read from it and written to it.
    tell : callable, optional
        Called with the settings of a run and the number of its finished steps.
    fresh : bool
        Whether to repeat runs that are in the folder.

    Returns
    -------
    TrainingRuns

    Raises
    ------
    FrameworkError
        PyTorch is not installed.

    Examples
    --------
    >>> found = training_runs(Plan((4,), seeds=1, steps=2, width=8, batch=2, context=8))
    >>> [run.settings.score for run in found.runs]
    ['dot', 'scaled_dot']
    """
    text = standard_library()
    numbers, name = encode(text), digest(text)
    made = []
    for settings in plan.settings():
        run = None if folder is None or fresh else runs.read(settings, name, folder)
        if run is None:
            require("torch", "training_runs", "pip install 'attnscore[torch]'")
            from attnscore.diagnostics.lab import torch_language_model

            start = time.perf_counter()
            report = (lambda step: None) if tell is None else functools.partial(tell, settings)
            looks, loss = torch_language_model.train(settings, numbers, SYMBOLS, report)
            run = TrainingRun(settings, name, tuple(looks), loss, round(time.perf_counter() - start, 2))
            if folder is not None:
                runs.write(run, folder)
        elif tell is not None:
            tell(settings, settings.steps)
        made.append(run)
    return TrainingRuns(tuple(made))
