"""Numbers of a watch in TensorBoard, Weights & Biases, MLflow, and CSV files.

Requirements:
- a writer is the user's own object, known by its method: nothing of these libraries is imported;
- by default few numbers: how many heads fail, and of each statistic the worst head's;
- a CSV file has a line for each sampled step, or for each step and head, and can be read while it grows.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attnscore.diagnostics.watching.records import NUMBERS, Records, Row
from attnscore.errors import ArgumentError, message

# Statistics that are written of the worst head, and whether the largest or the smallest is the worst.
_WORST: dict[str, Callable[[Iterable[float]], float]] = {
    "max_logit": max,
    "entropy": min,
    "saturated_rows": max,
    "nan_rows": max,
}
# MLflow takes letters, digits and these in names.
_NOT_IN_NAMES = re.compile(r"[^\w./ -]+")


class HeadLog:
    """Writes the numbers of each sampled step to logs: the `on_step` of a watch.

    Parameters
    ----------
    *writers : objects with ``add_scalar``, ``log_metrics`` or ``log``, or callables (numbers, step)
        A ``SummaryWriter`` of TensorBoard, the module ``mlflow`` or a logger of Lightning, the module ``wandb`` or one
        of its runs.
    csv : path, optional
        A file to write as well. An existing file of this name is replaced at the first step.
    per_head : bool
        Write one number for each head and statistic too, as "attention/layers.0.attn/3/entropy".
    prefix : str
        First part of every name.

    Examples
    --------
    >>> log = HeadLog(lambda numbers, step: print(step, sorted(numbers)[0]))
    >>> log(0, [{"layer": "a", "head": 0, "max_logit": 3.0, "entropy": 1.0, "saturated_rows": 0.0, "nan_rows": 0}])
    0 attention/worst/entropy
    """

    def __init__(
        self, *writers: Any, csv: str | Path | None = None, per_head: bool = False, prefix: str = "attention"
    ) -> None:
        for writer in writers:
            if not callable(writer) and not any(hasattr(writer, name) for name in ("add_scalar", "log_metrics", "log")):
                expected = "objects with add_scalar, log_metrics or log, or functions of (numbers, step)"
                raise ArgumentError(message("writers", expected, type(writer).__name__))
        self._writers = writers
        self._path = None if csv is None else Path(csv)
        self._has_header = False
        self._per_head, self._prefix = per_head, prefix
        self.seen: Records | None = None
        """The records with the failing heads; None: their number is left out."""

    def __call__(self, step: int, rows: Sequence[Row]) -> None:
        """Write the rows of a sampled step."""
        few = self._few(rows)
        numbers = {f"{self._prefix}/{name}": value for name, value in few.items()}
        if self._per_head:
            numbers |= {
                f"{self._prefix}/{row['layer']}/{row['head']}/{name}": float(row[name])
                for row in rows
                for name in NUMBERS
            }
        # No log shows a number that is not finite in a useful way; `nan_rows` counts them.
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for writer in self._writers:
            _write(writer, numbers, step)
        if self._path is not None:
            self._append(self._path, step, rows, few)

    def _few(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the number of failing heads, if known, and the worst head's statistics that are finite."""
        few: dict[str, float] = {}
        if self.seen is not None:
            few["failing_heads"] = float(len(self.seen.failing()))
        for name, worst in _WORST.items():
            values = [float(row[name]) for row in rows if math.isfinite(row[name])]
            if values:
                few[f"worst/{name}"] = worst(values)
        return few

    def _append(self, path: Path, step: int, rows: Sequence[Row], few: dict[str, float]) -> None:
        """Append lines to the CSV file: one for each row, or one with the `few` numbers; the first begins the file."""
        worst = ["failing_heads", *(f"worst/{name}" for name in _WORST)]
        names = ["step", *(["layer", "head", *NUMBERS] if self._per_head else worst)]
        with path.open("a" if self._has_header else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            if not self._has_header:
                writer.writeheader()
                self._has_header = True
            writer.writerows({"step": step, **row} for row in (rows if self._per_head else [few]))


def _write(writer: Any, numbers: dict[str, float], step: int) -> None:
    """Write numbers by the method that the log has, or call it."""
    if hasattr(writer, "add_scalar"):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics({_NOT_IN_NAMES.sub("_", name): value for name, value in numbers.items()}, step=step)
    elif hasattr(writer, "log"):
        # Without a step, which W&B refuses where the training loop has written a later one.
        writer.log({**numbers, "attention/step": step})
    else:
        writer(numbers, step)
