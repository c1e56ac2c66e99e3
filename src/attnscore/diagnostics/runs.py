"""Training runs as data, and as one small file each: what was asked for, what was seen.

What this module meets:
- a run is written when it is whole, in one step; an interrupted lab finds the runs that it has finished;
- a file counts only for the very same settings and text; one that cannot be read is a run that was not made.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from attnscore.files import FileError, read_json, replacing

# Another number makes all stored runs anew: the form of a file, or what a run does, has changed.
_FORM = 1


@dataclass(frozen=True)
class Settings:
    """One training run. `head_dim` divides `width`: the same model, cut into more or fewer heads.

    Attributes
    ----------
    score : "scaled_dot" or "dot"
    head_dim : length of queries and keys, the d of 1/sqrt(d)
    seed : of the initial weights and of the batches
    steps, width, layers, context, batch, learning_rate : of the model and of its training
    look_every : statistics are taken in every so many steps, and in the last
    """

    score: str
    head_dim: int
    seed: int
    steps: int
    width: int = 128
    layers: int = 2
    context: int = 64
    batch: int = 16
    learning_rate: float = 1e-3
    look_every: int = 10

    @property
    def name(self) -> str:
        """A name for the file of the run."""
        return f"{self.score}-d{self.head_dim}-seed{self.seed}-{self.steps}"


@dataclass(frozen=True)
class Look:
    """What was seen in one step, means over layers, heads and queries (but the first, which sees one key)."""

    step: int
    loss: float
    """Of the step's own batch, in nats per character."""
    logit_variance: float
    entropy: float
    """As a share of its largest value, that of even weights over the visible keys."""
    saturated: float
    """Share of the queries with a weight of at least 0.99 on one key."""
    jacobian_trace: float


@dataclass(frozen=True)
class TrainingRun:
    """One run: what was asked for, what was seen, and the loss on text that was held back."""

    settings: Settings
    text: str
    """The digest of the text."""
    looks: tuple[Look, ...]
    held_back_loss: float
    seconds: float


def write(run: TrainingRun, folder: Path) -> None:
    """Store a run as one file of `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"form": _FORM, **dataclasses.asdict(run)}, indent=1)
    with replacing(folder / f"{run.settings.name}.json") as file:
        file.write((content + "\n").encode())


def read(settings: Settings, text: str, folder: Path) -> TrainingRun | None:
    """The stored run of these settings on this text; None where there is none that can be used."""
    try:
        found = read_json(folder / f"{settings.name}.json")
        run = TrainingRun(
            Settings(**found["settings"]),
            found["text"],
            tuple(Look(**look) for look in found["looks"]),
            float(found["held_back_loss"]),
            float(found["seconds"]),
        )
    except (FileError, ValueError, TypeError, KeyError):
        return None
    return run if found.get("form") == _FORM and (run.settings, run.text) == (settings, text) else None
