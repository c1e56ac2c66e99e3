"""``attnscore attend``: one attention call on arrays that lie in files.

What this module meets:
- every array comes from the one input file or from an option; one given twice, unknown or unused is refused,
  because a misspelt mask that is silently left out gives a wrong result that looks right;
- the destination is checked before anything is computed, and written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.text import Text
from typer.core import TyperCommand

import attnscore as ats
from attnscore.commands.console import console, error_console, table
from attnscore.commands.inputs import CALL_ARRAYS, collect, converted, keep_inputs, make_mask, make_score
from attnscore.errors import ArgumentError
from attnscore.files import Array, check_destination, check_holds, write_arrays

_ALIGNMENTS = ("top_left", "bottom_right")

ScoreName = Literal["dot", "scaled_dot", "gaussian", "cosine", "sum", "additive", "bilinear"]
Alignment = Literal["top_left", "bottom_right"]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]


class AttendCommand(TyperCommand):
    """Lets ``--causal`` stand alone or before one of two words; typer has no such option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--causal`` its value."""
        whole = list(args)
        for place, word in enumerate(whole):
            if word == "--causal" and (whole[place + 1 : place + 2] or [""])[0] not in _ALIGNMENTS:
                whole[place] = "--causal=equal"
        return super().parse_args(ctx, whole)


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel)


def _flag(name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=_RESULT)


_INPUTS, _SCORE, _MASK, _RESULT = "Inputs", "Score", "Mask", "Result"

Inputs = typer.Argument(help="A .npz or .safetensors file with query, key, value and what else there is.")
Query = _option("query (..., query, dim), a .npy file", _INPUTS, "FILE")
Key = _option("key (..., key, dim)", _INPUTS, "FILE")
Value = _option("value (..., key, value_dim)", _INPUTS, "FILE")
HeadAxis = _option("-3: (batch, head, query, dim); -2: (batch, query, head, dim).", _INPUTS, "N")
Convert = _option("Convert query, key and value first.", _INPUTS)
ScoreOf = _option("The scoring function.", _SCORE)
Param = _option(
    "A parameter of the score: w_v, W_q, W_k, W, scale, bandwidth, score_bias. Repeatable.",
    _SCORE,
    "NAME=FILE|NUMBER",
)
Activation = _option(
    "Of the additive score: tanh (the default), sigmoid, relu, leaky_relu, silu, gelu.", _SCORE, "NAME"
)
Temperature = _option("Divides the scores (after the cap).", _SCORE, "T")
SoftCap = _option("Scores become CAP * tanh(score / CAP).", _SCORE, "CAP")
Bias = _option("Added to the scores; broadcast to (..., query, key).", _SCORE, "FILE")
Sink = _option("One more logit, without a value.", _SCORE, "FILE")
Lens = _option("How many keys are real: one number per batch row, or per query.", _MASK, "FILE|N,N,...")
MaskOf = _option("Boolean (..., query, key); True means 'may attend'.", _MASK, "FILE")
CausalOf = _option(
    "Query i sees the keys up to i. When their numbers differ, say how they are aligned.",
    _MASK,
    "[top_left|bottom_right]",
)
Window = _option("Query i sees the keys i-LEFT to i+RIGHT; no RIGHT: no bound.", _MASK, "LEFT[,RIGHT]")
Align = _option("Alignment of the window; that of --causal when left out.", _MASK)
Kernel = _option("What computes; attnscore info lists them.", _RESULT, "NAME")
Out = _option("Where to write: .npz, .safetensors, or .npy (out alone).", _RESULT, "FILE")


def attend(
    inputs: Annotated[Path | None, Inputs] = None,
    query: Annotated[Path | None, Query] = None,
    key: Annotated[Path | None, Key] = None,
    value: Annotated[Path | None, Value] = None,
    head_axis: Annotated[int, HeadAxis] = -3,
    dtype: Annotated[Dtype | None, Convert] = None,
    score: Annotated[ScoreName, ScoreOf] = "scaled_dot",
    param: Annotated[list[str] | None, Param] = None,
    activation: Annotated[str | None, Activation] = None,
    temperature: Annotated[float | None, Temperature] = None,
    softcap: Annotated[float | None, SoftCap] = None,
    bias: Annotated[Path | None, Bias] = None,
    sink: Annotated[Path | None, Sink] = None,
    valid_lens: Annotated[str | None, Lens] = None,
    mask: Annotated[Path | None, MaskOf] = None,
    causal: Annotated[str | None, CausalOf] = None,
    window: Annotated[str | None, Window] = None,
    align: Annotated[Alignment | None, Align] = None,
    kernel: Annotated[str, Kernel] = "auto",
    out: Annotated[Path | None, Out] = None,
    weights: Annotated[bool, _flag("--weights", "Write the weights too.")] = False,
    stats: Annotated[bool, _flag("--stats", "Write the statistics of every row too.")] = False,
    explain: Annotated[bool, _flag("--explain", "Print the plan; without --out compute nothing.")] = False,
) -> None:
    """Attention over arrays in files: out, and on request the weights and the statistics of every row.

    The input file names its arrays query, key, value, and optionally mask, valid_lens, bias, sink and the
    parameters of the score (w_v, W_q, W_k, score_bias; W; scale; bandwidth). Each may come from a file of its
    own instead.

    Example: attnscore attend in.npz --out out.npz --score gaussian --param bandwidth=0.5 --causal --stats
    """
    check_result(out, weights=weights, stats=stats, explain=explain)
    files = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias, "sink": sink}
    if out is not None:
        keep_inputs("--out", out, inputs, files, valid_lens, param or [])
    arrays = collect(inputs, files, valid_lens, param or [])
    call = {name: arrays[name] for name in CALL_ARRAYS if name in arrays}
    if dtype is not None:
        call |= {name: converted(call[name], name, dtype) for name in ("query", "key", "value")}
    call["score"] = make_score(score, arrays, activation=activation, softcap=softcap, temperature=temperature)
    call["mask"] = make_mask(arrays.get("mask"), causal, window, align)
    call |= {"head_axis": head_axis, "kernel": kernel}
    if explain:
        console().print(str(ats.explain(**call)), markup=False, soft_wrap=True)
    if out is not None:
        check_holds(out, {"out": call["value"]})
        with error_console().status("attending"):
            result = ats.attend(**call, return_weights=weights, return_stats=stats)
        save(out, result, weights=weights, stats=stats)


def check_result(out: Path | None, *, weights: bool, stats: bool, explain: bool) -> None:
    """Refuse, before anything is computed, a destination that does not fit what was asked for."""
    if out is None:
        if not explain:
            raise ArgumentError("--out: expected a file for the result, or --explain for the plan alone")
        return
    check_destination(out)
    if out.suffix.lower() == ".npy" and (weights or stats):
        raise ArgumentError("--out: a .npy file holds one array; with --weights or --stats use .npz")


def save(out: Path, result: Any, *, weights: bool, stats: bool) -> None:
    """Write the result by name and print what was written."""
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
