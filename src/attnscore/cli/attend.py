"""``attnscore attend``: one attention call on arrays in files.

- Every array comes from the one input file or from an option; one given twice, unknown or unused is refused,
  because a misspelt mask that is silently left out gives a wrong result that looks right.
- The destination is checked before anything is computed, and written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.text import Text

import attnscore as ats
from attnscore.cli.console import console, error_console, table
from attnscore.cli.options import CallOptions, option, takes_call
from attnscore.errors import ArgumentError
from attnscore.io import Array, check_destination, check_holds, write_arrays

Kernel = option("Result", "Kernel that computes; attnscore info lists them.", "NAME")
Out = option("Result", "Where to write: .npz, .safetensors, or .npy (out alone).", "FILE")
Weights = option("Result", "Write the weights too.", None, "--weights")
Stats = option("Result", "Write the statistics of every row too.", None, "--stats")
Explain = option("Result", "Print the plan; without --out compute nothing.", None, "--explain")


@takes_call()
def attend(
    options: CallOptions,
    kernel: Annotated[str, Kernel] = "auto",
    out: Annotated[Path | None, Out] = None,
    weights: Annotated[bool, Weights] = False,
    stats: Annotated[bool, Stats] = False,
    explain: Annotated[bool, Explain] = False,
) -> None:
    """Attention over arrays in files: out, and on request the weights and the statistics of every row.

    The input file names its arrays query, key, value, and optionally mask, valid_lens, bias, sink and the
    parameters of the score (w_v, W_q, W_k, score_bias; W; scale; bandwidth). Each may come from a file of its
    own instead.

    Example: attnscore attend in.npz --out out.npz --score gaussian --param bandwidth=0.5 --causal --stats
    """
    # Before anything is computed: a destination that can hold the result.
    if out is None:
        if not explain:
            raise ArgumentError("--out: expected a file for the result, or --explain for the plan alone")
    else:
        check_destination(out, several=weights or stats)
        options.keep_inputs(out)
    call = {"kernel": kernel, **options.read(("query", "key", "value"))}
    if explain:
        plan = ats.explain(**call, return_weights=weights, return_stats=stats)
        console().print(str(plan), markup=False, soft_wrap=True)
    if out is not None:
        check_holds(out, {"out": call["value"]})
        with error_console().status("attending"):
            result = ats.attend(**call, return_weights=weights, return_stats=stats)
        save(out, result, weights=weights, stats=stats)


def save(out: Path, result: Any, *, weights: bool, stats: bool) -> None:
    """Write the result by name, and print the names and shapes written."""
    parts: tuple[Any, ...] = result if weights or stats else (result,)
    arrays: dict[str, Array] = {"out": parts[0]}
    if weights:
        arrays["weights"] = parts[1]
    if stats:
        arrays |= {name: np.asarray(values) for name, values in parts[-1]._asdict().items()}
    write_arrays(out, arrays)
    written = [(name, "×".join(map(str, array.shape)), array.dtype.name) for name, array in arrays.items()]
    screen = console()
    screen.print(table("Written", ("array", "shape", "dtype"), written, left=3))
    if stats:
        columns = ("statistic", "mean", "least", "largest")
        rows = [
            (name, *(f"{numbers[which]:.4g}" for which in ("mean", "min", "max")))
            for name, numbers in parts[-1].summary().items()
        ]
        screen.print(table("Rows that see a key", columns, rows))
    screen.print(Text(f"in {out}"), soft_wrap=True)  # apart from the table, which would fold it
