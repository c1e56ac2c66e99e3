"""Files and options of the commands that run one attention call: `CallOptions`, and `takes_call` to add them.

- Each array comes from one place; one that is unknown, given twice, or unused by the chosen score is refused.
- Messages name the file or the option, so that one line is enough to correct the command.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce, wraps
from operator import and_
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import numpy as np
import typer
from typer.core import TyperCommand

import attnscore as ats
from attnscore import scores
from attnscore.cli.console import error_console
from attnscore.errors import ArgumentError, DtypeError, FileError, message
from attnscore.io import SUFFIXES, Array, bfloat16, read_arrays

_Score = Literal["dot", "scaled_dot", "gaussian", "cosine", "sum", "additive", "bilinear"]
_Dtype = Literal["float16", "bfloat16", "float32", "float64"]
_Align = Literal["top_left", "bottom_right"]
_CALL_ARRAYS = ("query", "key", "value", "valid_lens", "bias", "sink")
# Parameters of each score: their names in files, and the fields of the class. `bias` names the term that attend adds to
# the scores, so the additive score's bias goes by another name.
_PARAMETERS = {
    score: {
        {"bias": "score_bias"}.get(field.name, field.name): field
        for field in fields(scores.BUILTIN[score])  # type: ignore[arg-type]  # every built-in score is a dataclass
        if field.name not in ("activation", "unit_keys")
    }
    for score in get_args(_Score)
}
_ALL_PARAMETERS = {name for parameters in _PARAMETERS.values() for name in parameters}


class AttendCommand(TyperCommand):
    """Command whose ``--causal`` takes an optional value; typer has no such option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--causal`` its value."""
        whole = list(args)
        for place, word in enumerate(whole):
            if word == "--causal" and (whole[place + 1 : place + 2] or [""])[0] not in get_args(_Align):
                whole[place] = "--causal=equal"
        return super().parse_args(ctx, whole)


def keep_input(out: Path, path: Path) -> None:
    """Refuse a destination that is an input file."""
    if out.exists() and path.exists() and out.samefile(path):
        raise ArgumentError(f"--out: {out} is an input file; it would be overwritten")


def option(panel: str, text: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """Describe an option, listed in a panel of the command's help."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel, **more)


def renamed_option(old: str, new: str) -> Any:
    """Describe the former name of an option for a number above 0, absent from the help; its use prints a warning."""

    def warned(x: int | None) -> int | None:
        if x is not None:
            error_console().print(f"{old} is now {new}; the old spelling works until 0.2")
        return x

    return typer.Option(old, hidden=True, min=1, callback=warned)


_INPUTS = "A .npz or .safetensors file with query, key, value and what else there is."
_HEAD_AXIS = "-3: (batch, head, query, dim); -2: (batch, query, head, dim)."
_PARAM = "A parameter of the score: w_v, W_q, W_k, W, scale, bandwidth, score_bias, negative_slope. Repeatable."
_ACTIVATION = "Of the additive score: tanh (the default), sigmoid, relu, leaky_relu, silu, gelu."
_BIAS = "Added to the scores; broadcast to (..., query, key)."
_SINK = "One more logit, without a value: one for all heads, or an array (head,)."
_LENS = "How many keys are real: one number per batch row, or per query."
_MASK = "Boolean (..., query, key); True means 'may attend'."
_CAUSAL = "Query i sees the keys up to i. When their numbers differ, say how they are aligned."
_WINDOW = "Query i sees the keys i-LEFT to i+RIGHT; no RIGHT: no bound."
_ALIGN = "Alignment of the window; default: the alignment of --causal."


@dataclass(frozen=True)
class CallOptions:
    """Files and options of a call, as the command line gives them; `read` turns them into arguments of `attend`."""

    inputs: Annotated[Path | None, typer.Argument(help=_INPUTS)] = None
    query: Annotated[Path | None, option("Inputs", "query (..., query, dim), a .npy file", "FILE")] = None
    key: Annotated[Path | None, option("Inputs", "key (..., key, dim)", "FILE")] = None
    value: Annotated[Path | None, option("Inputs", "value (..., key, value_dim)", "FILE")] = None
    head_axis: Annotated[int, option("Inputs", _HEAD_AXIS, "N")] = -3
    dtype: Annotated[_Dtype | None, option("Inputs", "Convert query, key and value first.")] = None
    score: Annotated[_Score, option("Score", "The scoring function.")] = "scaled_dot"
    param: Annotated[list[str] | None, option("Score", _PARAM, "NAME=FILE|NUMBER")] = None
    activation: Annotated[str | None, option("Score", _ACTIVATION, "NAME")] = None
    temperature: Annotated[float | None, option("Score", "Divides the scores (after the cap).", "T")] = None
    softcap: Annotated[float | None, option("Score", "Scores become CAP * tanh(score / CAP).", "CAP")] = None
    bias: Annotated[Path | None, option("Score", _BIAS, "FILE")] = None
    sink: Annotated[str | None, option("Score", _SINK, "FILE|NUMBER")] = None
    valid_lens: Annotated[str | None, option("Mask", _LENS, "FILE|N,N,...")] = None
    mask: Annotated[Path | None, option("Mask", _MASK, "FILE")] = None
    causal: Annotated[str | None, option("Mask", _CAUSAL, "[top_left|bottom_right]")] = None
    window: Annotated[str | None, option("Mask", _WINDOW, "LEFT[,RIGHT]")] = None
    align: Annotated[_Align | None, option("Mask", _ALIGN)] = None

    def read(self, needed: tuple[str, ...]) -> dict[str, Any]:
        """Read the arguments of a call; `needed` names the ones to read of query, key and value.

        A file that cannot be read is a `FileError`; a name that is unknown, given twice, or missing, and an option that
        does not fit, an `ArgumentError`.
        """
        arrays = self._arrays(needed)
        unused = {"query", "key", "value"} - set(needed)
        call = {name: arrays[name] for name in _CALL_ARRAYS if name in arrays and name not in unused}
        if self.dtype is not None:
            call |= {name: _converted(call[name], name, self.dtype) for name in needed}
        call["score"] = self._make_score(arrays)
        call["mask"] = self._make_mask(arrays.get("mask"))
        self._check_alignment(call["query"], call["key"])
        return call | {"head_axis": self.head_axis}

    def keep_inputs(self, out: Path) -> None:
        """Refuse, before anything is computed, a destination that is an input file."""
        texts = [self.valid_lens or "", self.sink or "", *(text.partition("=")[2] for text in self.param or [])]
        named = (Path(text) for text in texts if Path(text).suffix.lower() in SUFFIXES)
        for path in (self.inputs, *self._files().values(), *named):
            if path is not None:
                keep_input(out, path)

    def _files(self) -> dict[str, Path | None]:
        """Return the files that hold one array each, by the name of the array."""
        return {name: getattr(self, name) for name in ("query", "key", "value", "mask", "bias")}

    def _arrays(self, needed: tuple[str, ...]) -> dict[str, Any]:
        """Read all arrays that were given, by name."""
        arrays: dict[str, Any] = dict(read_arrays(self.inputs)) if self.inputs is not None else {}
        if self.inputs is not None and self.inputs.suffix.lower() == ".npy":
            hint = "give it with --query, --key, --value, ..."
            raise ArgumentError(f"{self.inputs}: a .npy file holds one array; {hint}")
        known = {"mask", *_CALL_ARRAYS, *_ALL_PARAMETERS}
        for name in arrays:
            if name not in known:
                raise ArgumentError(f"{self.inputs}: unknown array {name!r}; known are {', '.join(sorted(known))}")

        def put(name: str, array: Any, source: str) -> None:
            if name in arrays:
                raise ArgumentError(f"{source}: {name} is given twice")
            arrays[name] = array

        for name, path in self._files().items():
            if path is not None:
                put(name, _single(path), f"--{name}")
        if self.sink is not None:
            put("sink", _value_or_array("--sink", self.sink, float), "--sink")
        for text in self.param or []:
            name, equals, value = text.partition("=")
            if not equals or name not in _ALL_PARAMETERS:
                expected = f"NAME=FILE or NAME=NUMBER, NAME one of {sorted(_ALL_PARAMETERS)}"
                raise ArgumentError(message("--param", expected, repr(text)))
            put(name, _value_or_array(f"--param {name}", value, float), "--param")
        missing = [name for name in needed if name not in arrays]
        if missing:
            there = f"{self.inputs} holds {', '.join(arrays) or 'nothing'}" if self.inputs else "no input file given"
            raise ArgumentError(f"no {' and no '.join(missing)}: {there}")
        if self.valid_lens is not None:
            expected = "whole numbers with ',' between them"
            numbers = _value_or_array("--valid-lens", self.valid_lens, lambda x: [*map(int, x.split(","))], expected)
            lens = np.asarray(numbers)
            # Two axes are one sequence without a batch: a single length is then a number.
            put("valid_lens", lens[0] if arrays["query"].ndim == 2 and lens.shape == (1,) else lens, "--valid-lens")
        return arrays

    def _make_score(self, arrays: dict[str, Any]) -> Any:
        """Build the score object from its parameters among `arrays`."""
        for name, number in (("--softcap", self.softcap), ("--temperature", self.temperature)):
            if number is not None and not number > 0:
                raise ArgumentError(message(name, "a number above 0", f"{number:g}"))
        takes = _PARAMETERS[self.score]
        for other in _ALL_PARAMETERS - set(takes):
            if other in arrays:
                names = ", ".join(takes) or "none"
                raise ArgumentError(f"{other}: the score {self.score!r} has no such parameter; it takes {names}")
        required = [name for name, field in takes.items() if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in arrays]:
            raise ArgumentError(f"the score {self.score!r} needs {', '.join(missing)}, in the input file or by --param")
        values = {field.name: arrays[name] for name, field in takes.items() if name in arrays}
        values = {name: float(x) if isinstance(x, np.ndarray) and x.ndim == 0 else x for name, x in values.items()}
        if self.activation is not None:
            if self.score != "additive":
                raise ArgumentError(f"--activation: the score {self.score!r} has none; the additive one has")
            values["activation"] = self.activation
        score: Any = scores.BUILTIN[self.score](**values)
        if self.softcap is not None:
            score = ats.SoftCap(score, self.softcap)
        return score if self.temperature is None else ats.Temperature(score, self.temperature)

    def _check_alignment(self, query: Array, key: Array) -> None:
        """Refuse a causal mask or a window without alignment where the lengths differ, as the mask does."""
        axis = -3 if self.head_axis == -2 else -2
        if min(query.ndim, key.ndim) < -axis or query.shape[axis] == key.shape[axis]:
            return
        for name, option, is_open in (
            ("--causal", "--causal", self.causal == "equal"),
            ("--window", "--align", self.window is not None and not (self.align or self._side())),
        ):
            if is_open:
                got = f"{query.shape[axis]} queries and {key.shape[axis]} keys"
                hint = f"{option} top_left lets query 0 see key 0; {option} bottom_right the last query the last key"
                raise ArgumentError(message(name, "an alignment, as these numbers differ", got, hint=hint))

    def _make_mask(self, array: Array | None) -> Any:
        """Combine a boolean array, a causal mask and a window by AND; None without any."""
        masks: list[Any] = [] if array is None else [array]
        if self.causal is not None:
            masks.append(ats.Causal(align=self._side()))
        if self.window is not None:
            left, right = _window(self.window)
            masks.append(ats.SlidingWindow(left=left, right=right, align=self.align or self._side()))
        elif self.align is not None:
            raise ArgumentError("--align: belongs to --window; the alignment of --causal is written behind it")
        if len(masks) < 2:
            return masks[0] if masks else None
        return reduce(and_, [ats.Dense(mask) if isinstance(mask, np.ndarray) else mask for mask in masks])

    def _side(self) -> _Align | None:
        """Return the alignment that --causal gives; None without --causal, or where it has no value ("equal")."""
        if self.causal in (None, "equal"):
            return None
        if self.causal not in get_args(_Align):
            raise ArgumentError(message("--causal", "nothing, top_left or bottom_right", repr(self.causal)))
        return cast(_Align, self.causal)


def _single(path: Path) -> Array:
    """Read the one array of a file; FileError where there are more or none."""
    arrays = read_arrays(path)
    if len(arrays) != 1:
        raise FileError(f"{path}: expected a single array, got {', '.join(arrays) or 'none'}")
    return next(iter(arrays.values()))


def _value_or_array(name: str, text: str, parse: Callable[[str], Any], expected: str = "a number") -> Any:
    """Read the value of an option, or the one array of a file."""
    try:
        return parse(text)
    except ValueError:
        if Path(text).suffix.lower() not in SUFFIXES:
            raise ArgumentError(message(name, f"{expected}, or a file ({', '.join(SUFFIXES)})", repr(text))) from None
        return _single(Path(text))


def _converted(array: Array, name: str, dtype: str) -> Array:
    """Return an array in another dtype."""
    target = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    if array.dtype.kind == "b":
        raise DtypeError(message(name, "numbers", "boolean"))
    with np.errstate(over="ignore"):
        converted = array.astype(target)
    if not np.isfinite(converted[np.isfinite(array)]).all():
        largest = np.abs(array[np.isfinite(array)]).max()
        raise ArgumentError(message("--dtype", f"one that holds the numbers of {name} (up to {largest:.3g})", dtype))
    return converted


def _window(text: str) -> tuple[int | None, int | None]:
    """Read LEFT and RIGHT of --window; None where a side is empty, which bounds nothing there."""
    left, _, right = text.partition(",")
    try:
        sides = (int(left) if left.strip() else None), (int(right) if right.strip() else None)
    except ValueError:
        sides = -1, -1
    if any(side is not None and side < 0 for side in sides):
        raise ArgumentError(message("--window", "LEFT or LEFT,RIGHT in whole numbers from 0 on", repr(text)))
    return sides


def takes_call(**instead: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is a `CallOptions`, an option for each of its fields.

    `instead` holds other annotations of fields for this command; None leaves a field out.
    """
    hints = {**get_type_hints(CallOptions, include_extras=True), **instead}
    names = [field.name for field in fields(CallOptions) if hints[field.name] is not None]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**options: Any) -> None:
            command(CallOptions(**{name: options.pop(name) for name in names}), **options)

        shared = inspect.signature(CallOptions).parameters
        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*(shared[name].replace(annotation=hints[name]) for name in names), *others]
        # typer reads names, types and defaults from these two.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
