"""Files and options as the arguments of one `attend` call.

- Each array comes from one place; one that is unknown, given twice, or unused by the chosen score is refused.
- Messages name the file or the option, so that one line is enough to correct the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Literal

import numpy as np

import attnscore as ats
from attnscore.errors import ArgumentError, DtypeError, message
from attnscore.io import SUFFIXES, Array, FileError, bfloat16, read_arrays

Align = Literal["top_left", "bottom_right"]
_SIDES: dict[str, Align | None] = {"equal": None, "top_left": "top_left", "bottom_right": "bottom_right"}
CALL_ARRAYS = ("query", "key", "value", "valid_lens", "bias", "sink")
SCORES: dict[str, type] = {
    "dot": ats.Dot,
    "scaled_dot": ats.ScaledDot,
    "gaussian": ats.Gaussian,
    "cosine": ats.Cosine,
    "sum": ats.Sum,
    "additive": ats.Additive,
    "bilinear": ats.Bilinear,
}
# `bias` names the term that attend adds to the scores, so the additive score's own bias goes by another name.
_FILE_NAME = {"bias": "score_bias"}
_OPTIONS_OF_SCORES = ("activation",)


def parameters(score: str) -> dict[str, bool]:
    """Return a score's parameters by their names in files, and whether each is required."""
    return {
        _FILE_NAME.get(field.name, field.name): field.default is dataclasses.MISSING
        for field in dataclasses.fields(SCORES[score])
        if field.name not in _OPTIONS_OF_SCORES
    }


_ALL_PARAMETERS = {name for score in SCORES for name in parameters(score)}


def collect(
    inputs: Path | None,
    files: Mapping[str, Path | None],
    valid_lens: str | None,
    params: list[str],
    needed: tuple[str, ...],
) -> dict[str, Any]:
    """Read all arrays that were given, by name.

    Raises
    ------
    FileError
        A file that cannot be read.
    ArgumentError
        A name that is unknown, given twice, or missing.
    """
    arrays: dict[str, Any] = dict(read_arrays(inputs)) if inputs is not None else {}
    if inputs is not None and inputs.suffix.lower() == ".npy":
        raise ArgumentError(f"{inputs}: a .npy file holds one array; give it with --query, --key, --value, ...")
    known = {"mask", *CALL_ARRAYS, *_ALL_PARAMETERS}
    for name in arrays:
        if name not in known:
            raise ArgumentError(f"{inputs}: unknown array {name!r}; known are {', '.join(sorted(known))}")
    for name, path in files.items():
        if path is not None:
            _put(arrays, name, _single(path), f"--{name}")
    for text in params:
        _put(arrays, *_param(text), "--param")
    missing = [name for name in needed if name not in arrays]
    if missing:
        there = f"{inputs} holds {', '.join(arrays) or 'nothing'}" if inputs else "no input file given"
        raise ArgumentError(f"no {' and no '.join(missing)}: {there}")
    if valid_lens is not None:
        _put(arrays, "valid_lens", _lengths(valid_lens, arrays["query"]), "--valid-lens")
    return arrays


def _put(arrays: dict[str, Any], name: str, array: Any, option: str) -> None:
    if name in arrays:
        raise ArgumentError(f"{option}: {name} is given twice")
    arrays[name] = array


def _single(path: Path) -> Array:
    arrays = read_arrays(path)
    if len(arrays) != 1:
        raise FileError(f"{path}: expected a single array, got {', '.join(arrays) or 'none'}")
    return next(iter(arrays.values()))


def _param(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in _ALL_PARAMETERS:
        expected = f"NAME=FILE or NAME=NUMBER, NAME one of {sorted(_ALL_PARAMETERS)}"
        raise ArgumentError(message("--param", expected, repr(text)))
    try:
        return name, float(value)
    except ValueError:
        return name, _single(Path(value))


def _lengths(text: str, query: Array) -> Array:
    try:
        numbers = np.array([int(part) for part in text.split(",")])
    except ValueError:
        if Path(text).suffix.lower() not in SUFFIXES:
            expected = f"whole numbers with ',' between them, or a file ({', '.join(SUFFIXES)})"
            raise ArgumentError(message("--valid-lens", expected, repr(text))) from None
        return _single(Path(text))
    # Two axes are one sequence without a batch: a single length is then a number.
    return numbers[0] if query.ndim == 2 and len(numbers) == 1 else numbers


def converted(array: Array, name: str, dtype: str) -> Array:
    """Return an array in another dtype."""
    target = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    if array.dtype.kind == "b":
        raise DtypeError(message(name, "numbers", "boolean"))
    with np.errstate(over="ignore"):
        found = array.astype(target)
    if not np.isfinite(found[np.isfinite(array)]).all():
        largest = np.abs(array[np.isfinite(array)]).max()
        raise ArgumentError(message("--dtype", f"one that holds the numbers of {name} (up to {largest:.3g})", dtype))
    return found


def make_score(
    name: str, arrays: Mapping[str, Any], activation: str | None, softcap: float | None, temperature: float | None
) -> Any:
    """Build the score object from its parameters among `arrays`."""
    for option, number in (("--softcap", softcap), ("--temperature", temperature)):
        if number is not None and not number > 0:
            raise ArgumentError(message(option, "a number above 0", f"{number:g}"))
    takes = parameters(name)
    for other in _ALL_PARAMETERS - set(takes):
        if other in arrays:
            raise ArgumentError(
                f"{other}: the score {name!r} has no such parameter; it takes {', '.join(takes) or 'none'}"
            )
    missing = [each for each, required in takes.items() if required and each not in arrays]
    if missing:
        raise ArgumentError(f"the score {name!r} needs {', '.join(missing)}, in the input file or by --param")
    fields = {_FILE_NAME.get(field.name, field.name): field.name for field in dataclasses.fields(SCORES[name])}
    values = {fields[each]: _number(arrays[each]) for each in takes if each in arrays}
    if activation is not None:
        if name != "additive":
            raise ArgumentError(f"--activation: the score {name!r} has none; the additive one has")
        values["activation"] = activation
    score = SCORES[name](**values)
    if softcap is not None:
        score = ats.SoftCap(score, softcap)
    return score if temperature is None else ats.Temperature(score, temperature)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, np.ndarray) and value.ndim == 0 else value


def make_mask(array: Array | None, causal: str | None, window: str | None, align: Align | None) -> Any:
    """Combine a boolean array, a causal mask and a window by AND; None without any."""
    parts: list[Any] = []
    if array is not None:
        parts.append(array)
    if causal is not None:
        parts.append(ats.Causal(align=_side(causal)))
    if window is not None:
        left, right = _window(window)
        parts.append(ats.SlidingWindow(left=left, right=right, align=align or _side(causal)))
    elif align is not None:
        raise ArgumentError("--align: belongs to --window; the alignment of --causal is written behind it")
    if len(parts) < 2:
        return parts[0] if parts else None
    return reduce(and_, [ats.Dense(part) if isinstance(part, np.ndarray) else part for part in parts])


def _side(causal: str | None) -> Align | None:
    if causal is None:
        return None
    if causal not in _SIDES:
        raise ArgumentError(message("--causal", "nothing, top_left or bottom_right", repr(causal)))
    return _SIDES[causal]


def _window(text: str) -> tuple[int | None, int | None]:
    left, _, right = text.partition(",")
    expected = "LEFT or LEFT,RIGHT in whole numbers from 0 on"
    try:
        sides = (int(left) if left.strip() else None), (int(right) if right.strip() else None)
    except ValueError:
        raise ArgumentError(message("--window", expected, repr(text))) from None
    if any(side is not None and side < 0 for side in sides):
        raise ArgumentError(message("--window", expected, repr(text)))
    return sides
