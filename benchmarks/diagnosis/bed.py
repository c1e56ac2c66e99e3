"""Test bed of `watch`: how often healthy runs fail, and planted faults are named by module, head, step and cause.

``python benchmarks diagnosis``: all runs, the remedies, and the table in ``docs/diagnosis.md``. ``--short``: a few runs
of each kind, no page. ``--held-back``: runs of other sizes, rates and seeds, which thresholds were not chosen with.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnscore.diagnostics.watching.records import Records
from diagnosis.faults import HELD_BACK_SEED, Fault, faults, remedy_of
from diagnosis.models import Setup, Training, begin, train

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "diagnosis.md"
BEGIN, END = "<!-- begin: python benchmarks diagnosis -->", "<!-- end -->"


def healthy(*, short: bool = False, held_back: bool = False) -> list[Setup]:
    """Return runs without a fault: every kind, norm, depth, rate and option, in turn."""
    runs: list[Setup] = []
    seed = HELD_BACK_SEED if held_back else 0
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
        {"rate": 3e-3, "cosine": True},
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
    losses: list[float]
    alarm: int | None = None
    """First sampled step at which the planted module and head was the first failure."""
    noted: int | None = None
    """First sampled step at which an unusual scale of the planted module was seen, as a failure or not."""
    early: bool = False
    """Whether something failed before the fault was planted."""
    first_step: int | None = None
    named: bool = False
    cause: str = ""
    recovered: bool | None = None
    """Whether the loss recovers with the remedy of the cause; None where that was not tried."""

    @property
    def delay(self) -> int | None:
        """Sampled steps between the first one with the fault and the alarm; 0 is that step."""
        return None if self.alarm is None else sampled_steps_to(self.alarm, self.fault)

    @property
    def is_soon(self) -> bool:
        """Whether one of the first two sampled steps with the fault names it."""
        return self.delay is not None and self.delay <= 1

    @property
    def is_seen_early(self) -> bool:
        """Whether the first two sampled steps with the fault name it, or note the unusual scale that it is."""
        return self.is_soon or (self.noted is not None and sampled_steps_to(self.noted, self.fault) <= 1)

    @property
    def is_right(self) -> bool:
        """Whether the cause is a right one."""
        return self.cause in self.fault.causes


def is_named(fault: Fault, layer: str, head: int) -> bool:
    """Return whether a verdict on this head is right."""
    return fault.module in ("", layer) and (not fault.heads or head in fault.heads)


def diagnose(fault: Fault) -> Outcome:
    """Train with the fault and collect the verdicts of the watch, at each sampled step and at the end."""
    outcome = Outcome(fault, [])

    def look(step: int, seen: Records) -> None:
        verdicts = seen.verdicts()
        failing = [(each.layer, each.head) for each in verdicts if each.failure]
        outcome.early |= bool(failing) and step < fault.step
        if outcome.alarm is None and step >= fault.step and failing and is_named(fault, *failing[0]):
            outcome.alarm = step
        scales = [each for each in verdicts if each.sign in ("another scale", "unusual scale")]
        if outcome.noted is None and scales and all(is_named(fault, each.layer, each.head) for each in scales):
            outcome.noted = step

    seen, outcome.losses = train(begin(fault.setup), {fault.step: [fault.plant]}, look)
    first = next((verdict for verdict in seen.verdicts() if verdict.failure), None)
    if first is not None:
        outcome.first_step, outcome.cause = first.first_step, first.cause
        outcome.named = is_named(fault, first.layer, first.head) and outcome.alarm is not None
    return outcome


def sampled_from(fault: Fault) -> int:
    """Return the first sampled step with the fault; a learning rate shows in the step after its own."""
    first = fault.step if fault.immediate else fault.step + 1
    return -(-first // fault.setup.every) * fault.setup.every


def sampled_steps_to(step: int, fault: Fault) -> int:
    """Return how many sampled steps lie between the first one with the fault and another."""
    return (step - sampled_from(fault)) // fault.setup.every


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
    saved: list[Any] = []

    def save(each: Training) -> None:
        saved.extend(copy.deepcopy([each.model.state_dict(), each.optimiser.state_dict()]))

    def restore(each: Training) -> None:
        each.model.load_state_dict(saved[0])
        each.optimiser.load_state_dict(saved[1])

    if when == "start":
        events = {0: [change] if fault.step else [fault.plant, change]}  # with a later fault the remedy leaves it out
    elif when == "checkpoint":
        events = {fault.step: [save, fault.plant], start + 1: [change, restore]}
    else:
        events = {fault.step: [fault.plant], start + 1: [change]}
    _, losses = train(training, events)
    ends = [sum(each[-10:]) / 10 for each in (losses, good)]
    return ends[0] <= ends[1] + 0.1 * (good[0] - ends[1])


def counts(failures: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the counts of a bed by name; failures are those of the healthy runs, "" where there is none."""

    def share(found: Iterable[bool]) -> str:
        values = list(found)
        return f"{sum(values)} of {len(values)}"

    delays = sorted(each.delay for each in outcomes if each.delay is not None)
    instant = [each for each in outcomes if each.fault.immediate]
    rows = {
        "healthy runs without a failure": share(not failure for failure in failures),
        "faults named by module and head": share(each.named for each in outcomes),
        "named in the first two sampled steps with the fault": share(each.is_soon for each in outcomes),
        "named in these two steps, or noted as an unusual scale without being a failure": share(
            each.is_seen_early for each in outcomes
        ),
        "delay in sampled steps, median and largest": f"{delays[len(delays) // 2]}, {delays[-1]}" if delays else "",
        "`first_step` right, of faults that act fully from their first step": share(
            each.first_step == sampled_from(each.fault) for each in instant
        ),
        "right cause": share(each.is_right for each in outcomes),
        "no failure before the fault": share(not each.early for each in outcomes),
    }
    if tried := [each.recovered for each in outcomes if each.recovered is not None]:
        rows["the loss recovers with the remedy"] = share(tried)
    return rows


def _failure_of_healthy(number: int, *, short: bool, held_back: bool) -> str:
    """Return the first failure of a healthy run, with its loss; "" where there is none."""
    torch.set_num_threads(1)
    failures: list[str] = []

    def look(_: int, seen: Records) -> None:
        failures.extend(str(verdict) for verdict in seen.verdicts() if verdict.failure)

    setup = healthy(short=short, held_back=held_back)[number]
    _, losses = train(begin(setup), at_step=look)
    return f"{setup}: loss {losses[0]:.2f} to {losses[-1]:.2f}: {failures[0]}" if failures else ""


def _outcome_of_fault(number: int, *, short: bool, held_back: bool) -> dict[str, Any]:
    """Return an outcome without its fault, which no other process can read."""
    torch.set_num_threads(1)
    outcome = diagnose(faults(short=short, held_back=held_back)[number])
    if outcome.cause and not short:
        outcome.recovered = recovers(outcome)
    return {name: value for name, value in vars(outcome).items() if name != "fault"}


def measure(processes: int, **choice: bool) -> tuple[list[str], list[Outcome]]:
    """Run the bed, and print what is wrong; return the failures of the healthy runs and the outcomes of the others.

    `choice`: whether the runs are `short`, and those `held_back`.
    """
    runs, planted = healthy(**choice), faults(**choice)
    with ProcessPoolExecutor(processes) as pool:
        found = pool.map(partial(_outcome_of_fault, **choice), range(len(planted)))
        failures = list(pool.map(partial(_failure_of_healthy, **choice), range(len(runs))))
        outcomes = [Outcome(fault, **fields) for fault, fields in zip(planted, found, strict=True)]
    for failure in filter(None, failures):
        print(f"healthy run fails: {failure}")
    for each in outcomes:
        fault = each.fault
        if not (each.named and each.is_right and each.is_soon) or each.early or each.recovered is False:
            print(
                f"{fault.name} in {fault.module!r} {fault.heads} at {fault.step}: named {each.named}, alarm "
                f"{each.alarm}, first step {each.first_step}, cause {each.cause!r}, early {each.early}, "
                f"loss {each.losses[0]:.2f} to {each.losses[-1]:.2f}, recovers {each.recovered}"
            )
    return failures, outcomes


def by_fault(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of the kinds of faults; a row has all kinds with the same counts."""
    rows: dict[str, list[str]] = {}
    kinds = dict.fromkeys(each.fault.kind for each in outcomes)
    for kind in kinds:
        of_kind = [each for each in outcomes if each.fault.kind == kind]
        healed = [each.recovered for each in of_kind if each.recovered is not None]
        columns = [
            len(of_kind),
            sum(each.named for each in of_kind),
            sum(each.is_soon for each in of_kind),
            sum(each.is_right for each in of_kind),
            sum(healed) if healed else "",
        ]
        rows.setdefault(" | ".join(map(str, columns)), []).append(kind)
    return [
        "| faults | runs of each | named | in two sampled steps | right cause | recovers |",
        "|---|---|---|---|---|---|",
        *(f"| {', '.join(kinds)} | {columns} |" for columns, kinds in rows.items()),
    ]


def main(arguments: list[str]) -> int:
    """Run the bed and print its table; the whole one also goes into the page."""
    parser = argparse.ArgumentParser(prog="python benchmarks diagnosis", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few runs of each kind, without remedies and page")
    parser.add_argument("--held-back", action="store_true", help="runs that thresholds were not chosen with; no page")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args(arguments)
    failures, outcomes = measure(options.processes, short=options.short, held_back=options.held_back)
    lines = ["| | |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts(failures, outcomes).items())]
    text = "\n".join([*lines, "", *by_fault(outcomes)])
    print(text)
    if not (options.short or options.held_back):
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
