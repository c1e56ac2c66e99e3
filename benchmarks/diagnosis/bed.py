"""Test bed of `watch`: how often healthy runs fail, and planted faults are named by module, head, step and cause.

``python benchmarks diagnosis``: all runs, the remedies, and the table in ``docs/diagnosis.md``. ``--short``: a few runs
of each kind, no page. ``--held-back``: runs of other sizes, rates and seeds, which thresholds were not chosen with.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnscore.diagnostics.watching.records import Records
from diagnosis.faults import Fault, faults, remedy_of
from diagnosis.models import Setup, Training, begin, train

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "diagnosis.md"
BEGIN, END = "<!-- begin: python benchmarks diagnosis -->", "<!-- end -->"


def healthy(seed: int, *, short: bool = False, held_back: bool = False) -> list[Setup]:
    """Return runs without a fault: every kind, norm, depth, rate and option, in turn."""
    runs: list[Setup] = []
    options: list[dict[str, object]] = [
        {"rate": 1e-2},
        {"rate": 3e-5},
        {"rate": 1e-3, "bfloat16": True},
        {"rate": 3e-3, "dropout": 0.1},
        {"rate": 6e-3, "weight_decay": 0.1},
        {"rate": 1e-2, "warm_up": 30, "layers": 4},
        {"rate": 1.5e-2},
        {"rate": 1e-3, "fine_tuned": True},
        {"rate": 3e-3, "layers": 6, "steps": 60},
        {"rate": 3e-3, "layers": 3, "bfloat16": True},
        {"rate": 3e-3, "fine_tuned": True, "weight_decay": 0.01},
    ]
    kinds = ("decoder", "encoder", "encoder-decoder", "vision")
    for place, option in enumerate(options[: 3 if short else None]):
        for number, kind in enumerate(kinds[: 2 if short else None]):
            base = Setup(kind=kind, norm_first=(place + number) % 2 == 0, seed=seed + 100 * place + number)
            if held_back:
                base = replace(base, width=48, heads=3, length=20, every=4, steps=80)
            run = replace(base, **option)  # type: ignore[arg-type]
            runs.append(replace(run, rate=0.8 * run.rate) if held_back else run)
    return runs


@dataclass
class Outcome:
    """Verdict of the watch on a run with a fault."""

    fault: Fault
    alarm: int | None
    """First sampled step at which the planted module and head was the first failure."""
    first_step: int | None
    named: bool
    cause: str
    early: bool
    """Whether something failed before the fault was planted."""
    losses: list[float]
    noted: int | None = None
    """First sampled step at which an unusual scale of the planted module was seen, as a failure or not."""


def is_named(fault: Fault, layer: str, head: int) -> bool:
    """Return whether a verdict on this head is right."""
    return fault.module in ("", layer) and (not fault.heads or head in fault.heads)


def diagnose(fault: Fault) -> Outcome:
    """Train with the fault and collect the verdicts of the watch, at each sampled step and at the end."""
    early, alarm, noted = False, None, None

    def look(step: int, seen: Records) -> None:
        nonlocal early, alarm, noted
        verdicts = seen.verdicts()
        failing = [(each.layer, each.head) for each in verdicts if each.failure]
        early |= bool(failing) and step < fault.step
        if alarm is None and step >= fault.step and failing and is_named(fault, *failing[0]):
            alarm = step
        scales = [each for each in verdicts if each.sign in ("another scale", "unusual scale")]
        if noted is None and scales and all(is_named(fault, each.layer, each.head) for each in scales):
            noted = step

    seen, losses = train(begin(fault.setup), {fault.step: fault.plant}, look)
    first = next((verdict for verdict in seen.verdicts() if verdict.failure), None)
    if first is None:
        return Outcome(fault, alarm, None, False, "", early, losses, noted)
    named = is_named(fault, first.layer, first.head) and alarm is not None
    return Outcome(fault, alarm, first.first_step, named, first.cause, early, losses, noted)


def sampled_from(fault: Fault) -> int:
    """Return the first sampled step with the fault; a learning rate shows in the step after its own."""
    first = fault.step if fault.immediate else fault.step + 1
    return -(-first // fault.setup.every) * fault.setup.every


def delay(outcome: Outcome) -> int | None:
    """Return how many sampled steps after the first one with the fault it was named; 0 is that step."""
    return None if outcome.alarm is None else sampled_steps_to(outcome.alarm, outcome.fault)


def sampled_steps_to(step: int, fault: Fault) -> int:
    """Return how many sampled steps lie between the first one with the fault and another."""
    return (step - sampled_from(fault)) // fault.setup.every


def is_seen_early(outcome: Outcome) -> bool:
    """Return whether the first two sampled steps with the fault name it, or note the unusual scale that it is."""
    steps = (step for step in (outcome.alarm, outcome.noted) if step is not None)
    return any(sampled_steps_to(step, outcome.fault) <= 1 for step in steps)


def recovers(outcome: Outcome) -> bool:
    """Return whether the loss recovers with the remedy of the cause that was named.

    It recovers when it ends within a tenth of the whole gain of the same run without a fault, both with as many steps
    after the alarm.
    """
    fault, more = outcome.fault, 60
    start = outcome.alarm if outcome.alarm is not None else fault.setup.steps
    setup = replace(fault.setup, steps=start + 1 + more)
    when, change = remedy_of(outcome.cause, fault)
    # A rate that was too large from the start has no run without the fault but one with the remedy's rate.
    base = setup if setup.rate < 0.05 else replace(setup, rate=3e-3, warm_up=20)
    _, good = train(begin(base))
    training = begin(setup)
    events: dict[int, Callable[[Training], None]] = {fault.step: fault.plant}
    if when == "start":
        events = {} if fault.step else events  # the remedy leaves the fault out
        events[0] = _both(events.get(0), change)
    else:
        saved: list[object] = []

        def restore(each: Training) -> None:
            change(each)
            if when == "checkpoint":
                each.model.load_state_dict(saved[0])  # type: ignore[arg-type]
                each.optimiser.load_state_dict(saved[1])  # type: ignore[arg-type]

        def save_and_plant(each: Training) -> None:
            saved.extend(copy.deepcopy([each.model.state_dict(), each.optimiser.state_dict()]))
            fault.plant(each)

        events = {fault.step: save_and_plant, start + 1: restore}
    _, losses = train(training, events)
    ends = [sum(each[-10:]) / 10 for each in (losses, good)]
    return ends[0] <= ends[1] + 0.1 * (good[0] - ends[1])


def _both(first: Callable[[Training], None] | None, second: Callable[[Training], None]) -> Callable[[Training], None]:
    def change(training: Training) -> None:
        if first is not None:
            first(training)
        second(training)

    return change


@dataclass
class Report:
    """Counts of a test bed."""

    healthy: int
    without_failure: int
    outcomes: list[Outcome]
    recovered: dict[int, bool]

    def rows(self) -> list[tuple[str, str]]:
        """Return the counts by name."""
        outcomes, count = self.outcomes, len(self.outcomes)
        instant = [each for each in outcomes if each.fault.immediate]
        delays = sorted(places for each in outcomes if (places := delay(each)) is not None)
        right = [each for each in instant if each.first_step == sampled_from(each.fault)]
        rows = [
            ("healthy runs without a failure", f"{self.without_failure} of {self.healthy}"),
            ("faults named by module and head", f"{sum(each.named for each in outcomes)} of {count}"),
            (
                "named in the first two sampled steps with the fault",
                f"{sum(places is not None and places <= 1 for places in map(delay, outcomes))} of {count}",
            ),
            (
                "named in these two steps, or noted as an unusual scale without being a failure",
                f"{sum(map(is_seen_early, outcomes))} of {count}",
            ),
            (
                "delay in sampled steps, median and largest",
                f"{delays[len(delays) // 2]}, {delays[-1]}" if delays else "",
            ),
            ("`first_step` right, of faults that come at once", f"{len(right)} of {len(instant)}"),
            ("right cause", f"{sum(each.cause in each.fault.causes for each in outcomes)} of {count}"),
            ("no failure before the fault", f"{sum(not each.early for each in outcomes)} of {count}"),
        ]
        if self.recovered:
            rows.append(
                ("the loss recovers with the remedy", f"{sum(self.recovered.values())} of {len(self.recovered)}")
            )
        return rows


@dataclass(frozen=True)
class Options:
    """Choice of the runs of a bed."""

    short: bool = False
    held_back: bool = False
    remedies: bool = True

    def healthy(self) -> list[Setup]:
        """Return the runs without a fault."""
        return healthy(5000 if self.held_back else 0, short=self.short, held_back=self.held_back)

    def faults(self) -> list[Fault]:
        """Return the faults."""
        return faults(5000 if self.held_back else 0, short=self.short, held_back=self.held_back)


def _failure_of_healthy(options: Options, number: int) -> str:
    """Return the first failure of a healthy run, with its loss; "" where there is none."""
    torch.set_num_threads(1)
    failures: list[str] = []

    def look(_: int, seen: Records) -> None:
        failures.extend(str(verdict) for verdict in seen.verdicts() if verdict.failure)

    setup = options.healthy()[number]
    _, losses = train(begin(setup), at_step=look)
    return f"{setup}: loss {losses[0]:.2f} to {losses[-1]:.2f}: {failures[0]}" if failures else ""


def _outcome_of_fault(options: Options, number: int) -> tuple[dict[str, Any], bool | None]:
    """Return an outcome without its fault, which no other process can read, and whether the loss recovers."""
    torch.set_num_threads(1)
    outcome = diagnose(options.faults()[number])
    recovered = recovers(outcome) if options.remedies and outcome.cause else None
    return {name: value for name, value in vars(outcome).items() if name != "fault"}, recovered


def measure(options: Options, processes: int, say: Callable[[str], None]) -> Report:
    """Run the bed."""
    runs, planted = options.healthy(), options.faults()
    with ProcessPoolExecutor(processes) as pool:
        fault_results = pool.map(partial(_outcome_of_fault, options), range(len(planted)))
        failures = [x for x in pool.map(partial(_failure_of_healthy, options), range(len(runs))) if x]
        results = list(fault_results)
    for failure in failures:
        say(f"healthy run fails: {failure}")
    outcomes, recovered = [], {}
    for number, (fault, (fields, healed)) in enumerate(zip(planted, results, strict=True)):
        outcome = Outcome(fault, **fields)
        outcomes.append(outcome)
        places = delay(outcome)
        if not outcome.named or outcome.cause not in fault.causes or outcome.early or places is None or places > 1:
            say(
                f"{fault.name} in {fault.module!r} {fault.heads} at {fault.step}: named {outcome.named}, alarm "
                f"{outcome.alarm}, first step {outcome.first_step}, cause {outcome.cause!r}, early {outcome.early}, "
                f"loss {outcome.losses[0]:.2f} to {outcome.losses[-1]:.2f}"
            )
        if healed is not None:
            recovered[number] = healed
            if not healed:
                say(f"{fault.name} in {fault.module!r}: no recovery with the remedy of {outcome.cause!r}")
    return Report(len(runs), len(runs) - len(failures), outcomes, recovered)


def by_fault(report: Report) -> list[str]:
    """Return a table of the kinds of faults; a row has all kinds with the same counts."""
    rows: dict[str, list[str]] = {}
    kinds = dict.fromkeys(each.fault.name.rpartition(",")[0] for each in report.outcomes)
    for kind in kinds:
        of_kind = [each for each in report.outcomes if each.fault.name.rpartition(",")[0] == kind]
        healed = [x for number, x in report.recovered.items() if report.outcomes[number] in of_kind]
        counts = [
            len(of_kind),
            sum(each.named for each in of_kind),
            sum(places is not None and places <= 1 for places in map(delay, of_kind)),
            sum(each.cause in each.fault.causes for each in of_kind),
            sum(healed) if healed else "",
        ]
        rows.setdefault(" | ".join(map(str, counts)), []).append(kind)
    return [
        "| faults | runs of each | named | in two sampled steps | right cause | recovers |",
        "|---|---|---|---|---|---|",
        *(f"| {', '.join(kinds)} | {counts} |" for counts, kinds in rows.items()),
    ]


def main(arguments: list[str]) -> int:
    """Run the bed and print its table; the whole one also goes into the page."""
    parser = argparse.ArgumentParser(prog="python benchmarks diagnosis", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few runs of each kind, without remedies and page")
    parser.add_argument("--held-back", action="store_true", help="runs that thresholds were not chosen with; no page")
    parser.add_argument("--no-remedies", action="store_true", help="leave the remedies out; no page")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args(arguments)
    remedies = not (options.short or options.no_remedies)
    report = measure(Options(options.short, options.held_back, remedies), options.processes, print)
    lines = ["| | |", "|---|---|", *(f"| {name} | {count} |" for name, count in report.rows())]
    text = "\n".join([*lines, "", *by_fault(report)])
    print(text)
    if remedies and not options.held_back:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
