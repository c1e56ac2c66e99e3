"""Options of the commands that run one attention call on files: `CallOptions`, and `takes_call` to add them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from attnscore.cli.inputs import CALL_ARRAYS, collect, converted, make_mask, make_score
from attnscore.errors import ArgumentError
from attnscore.io import SUFFIXES

_ALIGNMENTS = ("top_left", "bottom_right")


class AttendCommand(TyperCommand):
    """Command whose ``--causal`` takes an optional value; typer has no such option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--causal`` its value."""
        whole = list(args)
        for place, word in enumerate(whole):
            if word == "--causal" and (whole[place + 1 : place + 2] or [""])[0] not in _ALIGNMENTS:
                whole[place] = "--causal=equal"
        return super().parse_args(ctx, whole)


def _option(panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel)


_Score = Literal["dot", "scaled_dot", "gaussian", "cosine", "sum", "additive", "bilinear"]
_Dtype = Literal["float16", "bfloat16", "float32", "float64"]
_Align = Literal["top_left", "bottom_right"]
_INPUTS = "A .npz or .safetensors file with query, key, value and what else there is."
_HEAD_AXIS = "-3: (batch, head, query, dim); -2: (batch, query, head, dim)."
_PARAM = "A parameter of the score: w_v, W_q, W_k, W, scale, bandwidth, score_bias. Repeatable."
_ACTIVATION = "Of the additive score: tanh (the default), sigmoid, relu, leaky_relu, silu, gelu."
_BIAS = "Added to the scores; broadcast to (..., query, key)."
_LENS = "How many keys are real: one number per batch row, or per query."
_MASK = "Boolean (..., query, key); True means 'may attend'."
_CAUSAL = "Query i sees the keys up to i. When their numbers differ, say how they are aligned."
_WINDOW = "Query i sees the keys i-LEFT to i+RIGHT; no RIGHT: no bound."
_ALIGN = "Alignment of the window; that of --causal when left out."


@dataclass(frozen=True)
class CallOptions:
    """Files and options of a call, as the command line gives them; `read` turns them into arguments of `attend`."""

    inputs: Annotated[Path | None, typer.Argument(help=_INPUTS)] = None
    query: Annotated[Path | None, _option("Inputs", "query (..., query, dim), a .npy file", "FILE")] = None
    key: Annotated[Path | None, _option("Inputs", "key (..., key, dim)", "FILE")] = None
    value: Annotated[Path | None, _option("Inputs", "value (..., key, value_dim)", "FILE")] = None
    head_axis: Annotated[int, _option("Inputs", _HEAD_AXIS, "N")] = -3
    dtype: Annotated[_Dtype | None, _option("Inputs", "Convert query, key and value first.")] = None
    score: Annotated[_Score, _option("Score", "The scoring function.")] = "scaled_dot"
    param: Annotated[list[str] | None, _option("Score", _PARAM, "NAME=FILE|NUMBER")] = None
    activation: Annotated[str | None, _option("Score", _ACTIVATION, "NAME")] = None
    temperature: Annotated[float | None, _option("Score", "Divides the scores (after the cap).", "T")] = None
    softcap: Annotated[float | None, _option("Score", "Scores become CAP * tanh(score / CAP).", "CAP")] = None
    bias: Annotated[Path | None, _option("Score", _BIAS, "FILE")] = None
    sink: Annotated[Path | None, _option("Score", "One more logit, without a value.", "FILE")] = None
    valid_lens: Annotated[str | None, _option("Mask", _LENS, "FILE|N,N,...")] = None
    mask: Annotated[Path | None, _option("Mask", _MASK, "FILE")] = None
    causal: Annotated[str | None, _option("Mask", _CAUSAL, "[top_left|bottom_right]")] = None
    window: Annotated[str | None, _option("Mask", _WINDOW, "LEFT[,RIGHT]")] = None
    align: Annotated[_Align | None, _option("Mask", _ALIGN)] = None

    def files(self) -> dict[str, Path | None]:
        """Return the files that hold one array each, by the name of the array."""
        return {name: getattr(self, name) for name in ("query", "key", "value", "mask", "bias", "sink")}

    def read(self, needed: tuple[str, ...]) -> dict[str, Any]:
        """Read the arguments of a call; of query, key and value those in `needed`.

        Raises
        ------
        FileError
            A file that cannot be read.
        ArgumentError
            A name that is unknown, given twice, or missing; an option that does not fit.
        """
        arrays = collect(self.inputs, self.files(), self.valid_lens, self.param or [], needed)
        unused = {"query", "key", "value"} - set(needed)
        call = {name: arrays[name] for name in CALL_ARRAYS if name in arrays and name not in unused}
        if self.dtype is not None:
            call |= {name: converted(call[name], name, self.dtype) for name in needed}
        call["score"] = make_score(self.score, arrays, self.activation, self.softcap, self.temperature)
        call["mask"] = make_mask(arrays.get("mask"), self.causal, self.window, self.align)
        return call | {"head_axis": self.head_axis}

    def keep_inputs(self, option: str, place: Path) -> None:
        """Refuse, before anything is computed, a destination that is one of the files that are read.

        Raises
        ------
        ArgumentError
            `place` is the input file, or that of an option.
        """
        texts = [self.valid_lens or "", *(text.partition("=")[2] for text in self.param or [])]
        named = (Path(text) for text in texts if Path(text).suffix.lower() in SUFFIXES)
        for path in (self.inputs, *self.files().values(), *named):
            if path is not None and place.exists() and path.exists() and place.samefile(path):
                raise ArgumentError(f"{option}: {place} is an input file; it would be overwritten")


def takes_call(**instead: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is a `CallOptions`, all its fields as options of its own.

    Parameters
    ----------
    **instead
        Another annotation of a field for this command; None leaves the field out.
    """
    hints = {**get_type_hints(CallOptions, include_extras=True), **instead}
    names = [field.name for field in fields(CallOptions) if hints[field.name] is not None]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**options: Any) -> None:
            command(CallOptions(**{name: options.pop(name) for name in names}), **options)

        shared = inspect.signature(CallOptions).parameters
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        options = [shared[name].replace(annotation=hints[name]) for name in names]
        # typer reads names, types and defaults from these two.
        run.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*options, *own)}
        return run

    return decorate
