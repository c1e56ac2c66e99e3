"""``python benchmarks run``: time and memory against the calls that users would make instead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from attnscore.base.arguments import check_choice, shown
from attnscore.cli.console import console, error_console, table
from attnscore.cli.versions import version
from attnscore.errors import ArgumentError, AttnscoreError, FileError, FrameworkError, message
from bench import gpu, machine, reports, results
from bench.cases import CASES, chosen
from bench.runner import run, setting


class BenchmarkFailure(AttnscoreError, RuntimeError):
    """A case whose result was wrong, or whose process failed; it has no row."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("run")
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds and short lengths: a look, not a result.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The cases of 131072 tokens too, which take many minutes.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A case; repeatable. " + ", ".join(c.name for c in CASES))
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --only: leave the other cases of the results.json there as they are.")
    ] = False,
    threads: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of threads, each a run of its own (default: 1,2).")
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Limit both sides to these instructions: " + ", ".join(machine.ISAS) + "."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, or cuda: cases of their own, on a GPU, against PyTorch's.")
    ] = "cpu",
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where results.json goes, or the name of another .json file.")
    ] = Path("attnscore-bench"),
) -> None:
    """Time and memory against PyTorch, NumPy, JAX, TensorFlow, KeOps and onnxruntime on this machine.

    Every result is checked before it is timed; both sides alternate in one process. Prints tables, writes
    results.json. Leave the machine alone meanwhile.
    """
    check_choice("--device", device, ("cpu", "cuda"))
    path = out if out.suffix == ".json" else out / ("results.json" if device == "cpu" else "gpu.json")
    if device == "cuda":
        of_cpus = {"full": full, "only": only, "again": again, "threads": threads, "isa": isa}
        if given := [f"--{name}" for name, value in of_cpus.items() if value]:
            raise ArgumentError(message("--device", f"cpu, which has {', '.join(given)}", "cuda"))
        return _on_gpu(quick, path)
    cases, numbers = chosen(only or (), full), thread_numbers(threads)
    if again and not only:
        raise ArgumentError(message("--again", "--only, which says what is measured again", "no case"))
    if isa is not None:
        check_choice("--isa", isa, machine.ISAS)
        machine.limit_isa(isa)
    if version("torch") is None:
        raise FrameworkError("bench: the references need PyTorch: pip install 'attnscore[torch]'")
    _make_folder(path.parent)
    before = results.read(path) if again else None
    if before is not None:
        results.check_same_setting(before, setting(numbers, quick=quick))
    document = _run(cases, numbers, quick, error_console())
    if before is not None:
        document = results.joined(before, document)
    results.write(document, path)
    screen = console()
    for title, columns, rows in reports.screen_tables(document):
        if rows:
            caption = "ratio: their time over ours" if title == "Speed" else None
            screen.print(table(title, columns, rows, left=2, caption=caption))
    screen.print(Text(f"{path.name} in {path.parent}"), soft_wrap=True)
    if document["errors"]:
        first = document["errors"][0]
        raise BenchmarkFailure(f"{len(document['errors'])} failed, first {first['case']}: {first['error']}")


def _on_gpu(quick: bool, path: Path) -> None:
    gpu.check_device("cuda")
    _make_folder(path.parent)
    document = gpu.run(quick, lambda text: error_console().print(Text(text)))
    results.write(document, path)
    rows = []
    for row in document["rows"]:
        measured = row.get("error") or f"{row['ratio']:.2f}"
        rows.append((row["case"], row["baseline"], "both" if row["backward"] else "forward", measured))
    screen = console()
    screen.print(table("Their time over ours", ["case", "baseline", "pass", "ratio"], rows, left=3))
    screen.print(Text(f"{path.name} in {path.parent}"), soft_wrap=True)
    if wrong := [row for row in document["rows"] if row.get("is_wrong")]:
        raise BenchmarkFailure(f"{len(wrong)} failed, first {wrong[0]['case']}: {wrong[0]['error']}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be made a folder: {error.strerror}") from error


def thread_numbers(text: str | None) -> list[int]:
    """Read the numbers in "1,2"; without a text 1 and 2, as far as there are CPUs."""
    most = len(machine.cpus())
    if text is None:
        return [number for number in (1, 2) if number <= most]
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= most for part in parts):
        raise ArgumentError(message("--threads", f"numbers from 1 to the {most} CPUs here, as in 1,2", shown(text)))
    return sorted({int(part) for part in parts})


def _run(cases: Any, numbers: list[int], quick: bool, screen: Console) -> dict[str, Any]:
    """Run with progress on stderr: a live line on a terminal, one line for each measuring process elsewhere."""
    if not screen.is_terminal:
        return run(cases, numbers, quick=quick, tell=lambda text, at, of: screen.print(Text(f"[{at}/{of}] {text}")))
    with screen.status("") as status:
        return run(cases, numbers, quick=quick, tell=lambda text, at, of: status.update(Text(f"[{at}/{of}] {text}")))
