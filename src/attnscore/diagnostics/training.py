"""The same small transformer on real text with and without 1/sqrt(d), for several d and seeds.

What this module meets:
- runs that were finished before an interruption are read, not made again;
- a pair of runs differs in the score alone, so gaps are taken pair by pair;
- PyTorch is imported when a run is made, not when its numbers are read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.core.arguments import shown
from attnscore.diagnostics import runs, text
from attnscore.diagnostics.finding import NAMES, SCORES, Array, Check, Estimate, Finding, Row, estimate
from attnscore.diagnostics.runs import Settings, TrainingRun
from attnscore.diagnostics.variance import check_sizes
from attnscore.errors import ArgumentError, FrameworkError, message

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the gap at the largest d must be at least, in nats per character.
_LEAST_GAP = 0.05


@dataclass(frozen=True)
class Plan:
    """Which runs are made: each length with each seed, with and without the scale.

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
        """Refuse sizes that are not whole, and lengths that do not divide the width."""
        check_sizes("head_dims", self.head_dims)
        check_sizes(
            "seeds, steps, width, batch, context", (self.seeds, self.steps, self.width, self.batch, self.context)
        )
        if any(self.width % dim for dim in self.head_dims):
            raise ArgumentError(message("head_dims", f"divisors of the width {self.width}", shown(self.head_dims)))

    def settings(self) -> Iterator[Settings]:
        """Settings of the runs, in the order in which they are made: whole pairs first."""
        sizes = {"width": self.width, "batch": self.batch, "context": self.context}
        for seed in range(self.seeds):
            for dim in self.head_dims:
                for score in SCORES:
                    every = max(1, self.steps // 40)
                    yield Settings(score, dim, seed, self.steps, **sizes, look_every=every)


QUICK = Plan((8, 128), seeds=1, steps=150)
FULL = Plan((8, 32, 128), seeds=3, steps=700)


@dataclass(frozen=True)
class TrainingRuns(Finding):
    """What `training_runs` found."""

    runs: tuple[TrainingRun, ...]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The lengths, in rising order."""
        return tuple(sorted({run.settings.head_dim for run in self.runs}))

    def of(self, score: str, head_dim: int) -> list[TrainingRun]:
        """The runs of one score at one length, by seed."""
        found = [run for run in self.runs if (run.settings.score, run.settings.head_dim) == (score, head_dim)]
        return sorted(found, key=lambda run: run.settings.seed)

    def curves(self, score: str, head_dim: int, name: str) -> tuple[NDArray[np.int64], Array]:
        """Steps, and a number of each `Look` as (seed, step)."""
        found = self.of(score, head_dim)
        values = np.array([[getattr(look, name) for look in run.looks] for run in found], dtype=np.float64)
        return np.array([look.step for look in found[0].looks]), values

    def gap(self, head_dim: int) -> Estimate:
        """Loss on held-back text without the scale less that with it, over pairs of runs of one seed."""
        pairs = zip(*(self.of(score, head_dim) for score in SCORES), strict=True)
        return estimate([without.held_back_loss - scaled.held_back_loss for without, scaled in pairs])

    def to_rows(self) -> list[Row]:
        """One row per run: its settings, the last statistics, the loss on held-back text."""
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
        """A row for each score and length: means over the seeds, and the gap."""
        found = []
        for dim in self.head_dims:
            for score in SCORES:
                rows = [row for row in self.to_rows() if (row["score"], row["d"]) == (score, dim)]
                short = {
                    "loss": "loss",
                    "first logit variance": "var. first",
                    "last logit variance": "last",
                    "last entropy": "entropy",
                    "last saturated": "at one key",
                }
                means = {new: float(np.mean([row[name] for row in rows])) for name, new in short.items()}
                gap = self._gap(dim) if score == "dot" else ""
                found.append({"score": NAMES[score], "d": dim, "seeds": len(rows), **means, "gap": gap})
        return found

    def sentence(self) -> str:
        gaps = "; ".join(f"d = {dim}: {self._gap(dim)}" for dim in self.head_dims)
        alone = all(len(self.of("dot", dim)) == 1 for dim in self.head_dims)
        spread = " One pair of runs for each d: no margin." if alone else ""
        return f"Without 1/√d the loss on held-back text is higher, in nats per character, by: {gaps}.{spread}"

    def _gap(self, dim: int) -> str:
        found = self.gap(dim)
        return str(found) if math.isfinite(found.margin) else f"{found.value:.2g}"

    def checks(self) -> tuple[Check, ...]:
        dim = self.head_dims[-1]
        first = [run.looks[0].logit_variance for run in self.of("dot", dim)]
        return (
            Check(
                f"d = {dim}: training without the scale ends at a higher loss (what the gap lacks)",
                max(0.0, _LEAST_GAP - self.gap(dim).value),
                0.0,
            ),
            # Of a row's visible keys; few keys and layers of one draw leave a spread of some tens of percent.
            Check(f"d = {dim}: logits of the first step have variance d", abs(float(np.mean(first)) / dim - 1), 0.5),
        )

    def plot(self) -> Figure:
        from attnscore.diagnostics.pictures import training_curves

        return training_curves(self)


Teller = Callable[[Settings, int], Any]


def training_runs(
    plan: Plan = QUICK, folder: Path | None = None, *, tell: Teller | None = None, fresh: bool = False
) -> TrainingRuns:
    """Train the same transformer with and without 1/sqrt(d) on the sources of Python's standard library.

    Parameters
    ----------
    plan : Plan
        QUICK: four runs, about half a minute. FULL: eighteen runs, about ten minutes on two cores.
    folder : Path, optional
        Where finished runs are kept, and looked for.
    tell : callable, optional
        Called with the settings of a run and the number of its steps that are done.
    fresh : bool
        Whether to make every run anew.

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
    characters = text.standard_library()
    numbers, digest = text.encode(characters), text.digest(characters)
    made = []
    for settings in plan.settings():
        run = None if folder is None or fresh else runs.read(settings, digest, folder)
        if run is None:
            run = _make(settings, numbers, digest, tell)
            if folder is not None:
                runs.write(run, folder)
        elif tell is not None:
            tell(settings, settings.steps)
        made.append(run)
    return TrainingRuns(tuple(made))


def _make(settings: Settings, numbers: NDArray[np.int64], digest: str, tell: Teller | None) -> TrainingRun:
    try:
        from attnscore.diagnostics import torch_language_model
    except ImportError as error:
        hint = "pip install 'attnscore[torch]'"
        raise FrameworkError(message("training_runs", "PyTorch", f"no {error.name}", hint=hint)) from error
    start = time.perf_counter()

    def told(step: int) -> None:
        if tell is not None:
            tell(settings, step)

    looks, loss = torch_language_model.train(settings, numbers, text.SYMBOLS, told)
    return TrainingRun(settings, digest, tuple(looks), loss, round(time.perf_counter() - start, 2))
