"""``attnscore lab``: experiments on why scores are scaled, into a folder: a page, pictures and a results.json.

- Progress is a line and a bar on a terminal, plain lines elsewhere.
- Each experiment prints its question, its answer and a short table, and puts its numbers into results.json.
- An interrupted lab continues where it stopped: finished training runs are read from the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from attnscore.cli.console import console
from attnscore.diagnostics.page import Section, cell, write_page

PAGE = "report.html"
QUICK = "About a minute: fewer draws, four training runs. In full about ten, with smaller margins."


def lab(
    quick: Annotated[bool, typer.Option("--quick/--full", help=QUICK)] = True,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the page, pictures and runs go.")] = Path(
        "attnscore-lab"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Train every model anew, also those that are done.")] = False,
) -> None:
    """Why divide by the square root of d: the variance of scores and its effect on the softmax and on training.

    About a minute on two cores, with --full about ten. An interrupted lab goes on where it stopped. Prints the
    results; writes them as a page (report.html), as PNG pictures and as results.json.
    """
    # Imported here: they bring matplotlib and PyTorch, which --help does not need.
    from attnscore.cli.report import Report
    from attnscore.diagnostics import scaling

    screen = console()
    sections: list[Section] = []
    report = Report(out, screen, len(scaling.EXPERIMENTS) + 1, document="results.json")
    report.summary["quick"] = quick
    for experiment in scaling.EXPERIMENTS:
        with report.step(experiment.question):
            result = experiment.run(quick)
        sections.append(_report_experiment(report, experiment.name, result))
    plan = scaling.plan_of(quick)
    with report.step(scaling.TRAINING, live=False), _training(screen, plan) as tell:
        runs = scaling.training_runs(plan, out / "runs", tell=tell, fresh=fresh)
    sections.append(_report_experiment(report, "training_runs", runs))
    names = ("step", "loss", "logit_variance", "entropy", "saturated", "jacobian_trace")
    report.summary["training_runs"]["curves"] = [
        {"score": run.settings.score, "d": run.settings.head_dim, "seed": run.settings.seed}
        | {name: [getattr(look, name) for look in run.looks] for name in names}
        for run in runs.runs
    ]
    report.summary["training_runs"]["gap"] = {str(dim): runs.gap(dim) for dim in runs.head_dims}
    facts = f"{len(sections)} experiments, {'quick' if quick else 'in full'}, by attnscore lab."
    sections.append(
        Section("What was checked", ["A difference that was measured, and the one allowed."], report.checks)
    )
    write_page(out / PAGE, scaling.TITLE, facts, sections)
    report.finish()
    summary = f"{len(report.checks)} checks hold; {PAGE}, {len(report.pictures)} pictures and results.json"
    report.console.print(Text(f"{summary} in {out}"))


def _report_experiment(report: Any, name: str, result: Any) -> Section:
    """Print the answer, draw the picture, keep the numbers; return the part of the page."""
    from attnscore.diagnostics import scaling

    part = scaling.section_of(name, result)
    (sentence,), rows = part.sentences, part.rows
    if rows:
        words = sum(isinstance(value, str) for value in list(rows[0].values())[:2])
        report.table("", tuple(rows[0]), [[cell(value) for value in row.values()] for row in rows], left=words)
    report.console.print(Text(sentence, style="bold"))
    report.console.print("")
    for check in result.checks():
        report.check(check.claim, check.difference, check.allowed)
    # The pictures are numbered in the order of the experiments.
    report.picture(f"{len(report.pictures) + 1:02d}-{name.replace('_', '-')}", part.figure)
    report.summary[name] = {"answer": sentence, "rows": result.to_rows()}
    if name == "logit_variance":
        report.summary[name]["exponents"] = {
            kind.name: {score: result.exponent(kind.name, score) for score in ("dot", "scaled_dot")}
            for kind in result.kinds
        }
    return part


@contextlib.contextmanager
def _training(screen: Console, plan: Any) -> Iterator[Callable[[Any, int], None]]:
    """A bar for all runs on a terminal, a line for each run elsewhere."""
    every = list(plan.settings())
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("training", total=sum(settings.steps for settings in every))

        def tell(settings: Any, step: int) -> None:
            place, name = every.index(settings), f"{settings.score}, d = {settings.head_dim}, seed {settings.seed}"
            before = sum(each.steps for each in every[:place])
            progress.update(task, completed=before + step, description=name)
            if step == settings.steps and not screen.is_terminal:
                screen.print(Text(f"  [{place + 1}/{len(every)}] {name}"))

        yield tell
