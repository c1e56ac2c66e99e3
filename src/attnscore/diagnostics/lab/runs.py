"""Training runs as data, and as one small file each.

Requirements:
- a run is written when it is finished, in one step; an interrupted lab finds its finished runs again;
- a file counts only for the same settings and the same text; one that cannot be read counts as a run not made.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from attnscore.errors import FileError
from attnscore.io import read_json, replacing

# To be raised when the format of a file or the training changes: stored runs are then repeated.
_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """Settings of one training run; `head_dim` divides `width`, which is split into more or fewer heads.

    Attributes
    ----------
    score : "scaled_dot" or "dot"
    head_dim : dimension of queries and keys, the d of 1/sqrt(d)
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
        """Name of the file of the run."""
        return f"{self.score}-d{self.head_dim}-seed{self.seed}-{self.steps}"


@dataclass(frozen=True)
class Look:
    """Statistics of one step: means over layers, heads and queries, except the first, which attends to one key."""

    step: int
    loss: float
    """Loss of the step's own batch, in nats per character."""
    logit_variance: float
    entropy: float
    """Entropy as a share of its largest value, which uniform weights over the attended keys have."""
    saturated: float
    """Share of the queries with a weight of at least 0.99 on one key."""
    jacobian_trace: float


@dataclass(frozen=True)
class TrainingRun:
    """Settings of a run, its statistics, and its loss on held-back text."""

    settings: Settings
    text: str
    """Digest of the text."""
    looks: tuple[Look, ...]
    held_back_loss: float
    seconds: float


def write(run: TrainingRun, folder: Path) -> None:
    """Store a run as one file of `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"form": _FORMAT, **dataclasses.asdict(run)}, indent=1)
    with replacing(folder / f"{run.settings.name}.json") as file:
        file.write((content + "\n").encode())


def read(settings: Settings, text: str, folder: Path) -> TrainingRun | None:
    """Read the stored run of these settings on this text; return None where there is none that can be used."""
    try:
        content = read_json(folder / f"{settings.name}.json")
        run = TrainingRun(
            Settings(**content["settings"]),
            content["text"],
            tuple(Look(**look) for look in content["looks"]),
            float(content["held_back_loss"]),
            float(content["seconds"]),
        )
    except (FileError, ValueError, TypeError, KeyError):
        return None
    return run if content.get("form") == _FORMAT and (run.settings, run.text) == (settings, text) else None
