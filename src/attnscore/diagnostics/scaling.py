"""Experiments on why scores are scaled: each by its name, and all of them in one call.

Requirements:
- each experiment is a function that returns a `Result`: rows, a sentence, a picture, and checks of its claims;
- `scaling_lab` runs them in the order in which they can be taught; quick takes about a minute, full about ten;
- finished training runs are kept in the folder, and found again after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from attnscore.diagnostics.lab.exercises import (
    additive_as_network,
    different_lengths,
    other_keys,
    sum_ignores_the_query,
)
from attnscore.diagnostics.lab.experiment import Result
from attnscore.diagnostics.lab.gradients import gradient_flow
from attnscore.diagnostics.lab.other_scores import score_growth
from attnscore.diagnostics.lab.sharpening import sharpening
from attnscore.diagnostics.lab.training import FULL, QUICK, Plan, Progress, training_runs
from attnscore.diagnostics.lab.variance import logit_variance
from attnscore.diagnostics.page import Section, write_page

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Plan",
    "additive_as_network",
    "different_lengths",
    "gradient_flow",
    "logit_variance",
    "other_keys",
    "plan_of",
    "scaling_lab",
    "report_page",
    "score_growth",
    "sharpening",
    "sum_ignores_the_query",
    "training_runs",
]


class Experiment(NamedTuple):
    """Experiment with its name, its question, and a function that runs it quickly or in full."""

    name: str
    question: str
    run: Callable[[bool], Result]


EXPERIMENTS = (
    Experiment(
        "logit_variance",
        "How does the variance of q·k grow with the dimension d?",
        lambda quick: logit_variance(repeats=24 if quick else 96),
    ),
    Experiment("sharpening", "What does the variance do to the softmax?", lambda quick: sharpening()),
    Experiment(
        "gradient_flow",
        "How much gradient passes through the softmax?",
        lambda quick: gradient_flow(queries=512 if quick else 4096),
    ),
    Experiment(
        "score_growth",
        "Do other scores grow with d?",
        lambda quick: score_growth(repeats=8 if quick else 32),
    ),
    Experiment("sum_score", "Is the sum of q + k a score?", lambda quick: sum_ignores_the_query()),
    Experiment(
        "other_keys",
        "In the toy example with other keys, do dot and additive agree?",
        lambda quick: other_keys(draws=64 if quick else 512),
    ),
    Experiment(
        "different_lengths",
        "Is there a score for different dimensions from matrix products alone?",
        lambda quick: different_lengths(),
    ),
    Experiment(
        "additive_as_network", "Is additive attention a network on [q; k]?", lambda quick: additive_as_network()
    ),
)


TITLE = "Why scores are scaled"
TRAINING = "Does a transformer train worse without the scale?"
_QUESTIONS = {experiment.name: experiment.question for experiment in EXPERIMENTS} | {"training_runs": TRAINING}


def plan_of(quick: bool) -> Plan:
    """Return the plan of the training runs of the quick or of the full lab."""
    return QUICK if quick else FULL


def scaling_lab(
    quick: bool = True, folder: Path | None = None, *, fresh: bool = False, tell: Progress | None = None
) -> Iterator[tuple[str, Result]]:
    """Run every experiment on why scores are scaled, one after another, the training runs last.

    Parameters
    ----------
    quick : bool
        About a minute on two cores; False: about ten, with smaller margins, more dimensions and seeds.
    folder : Path, optional
        Folder of finished training runs, which are read from it and written to it.
    fresh : bool
        Whether to repeat training runs that are in the folder.
    tell : callable, optional
        Called in training with the settings of a run and the number of its finished steps.

    Yields
    ------
    (name, Result)
        Each as soon as it is finished.

    Raises
    ------
    FrameworkError
        PyTorch, which the training runs need, is not installed.

    Examples
    --------
    >>> name, found = next(scaling_lab())
    >>> print(name, found.to_rows()[0]["d"])
    logit_variance 1
    """
    for experiment in EXPERIMENTS:
        yield experiment.name, experiment.run(quick)
    yield "training_runs", training_runs(plan_of(quick), folder, tell=tell, fresh=fresh)


def section_of(name: str, found: Result) -> Section:
    """Return an experiment as a section of a page: its question, the answer, the picture, a short table."""
    return Section(_QUESTIONS.get(name, name), [found.sentence()], found.summary(), found.plot())


def report_page(findings: Iterable[tuple[str, Result]], path: str | Path) -> Path:
    """Write the results of `scaling_lab` as one HTML file, which opens offline.

    Parameters
    ----------
    findings : iterable of (name, Result)
    path : str or Path
        Written whole or not at all.

    Examples
    --------
    >>> report_page(scaling_lab(), "why-scale.html")  # doctest: +SKIP
    """
    sections = [section_of(name, found) for name, found in findings]
    return write_page(path, TITLE, f"{len(sections)} experiments.", sections)
