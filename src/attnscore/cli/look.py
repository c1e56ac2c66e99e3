"""``attnscore look``: the weights of queries and keys in files, at any length, without the matrix.

- Takes the arrays and options of ``attnscore attend``, with the same refusals; a value is not needed and not used.
- Destinations are checked before anything is computed, and written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

import attnscore as ats
from attnscore.cli.console import console, error_console, table
from attnscore.cli.options import CallOptions, option, renamed_option, takes_call
from attnscore.errors import ArgumentError, FileError, message
from attnscore.io import Array, check_destination, check_holds, check_writable, replacing, write_arrays
from attnscore.plotting.drawing import heaviest_keys, short_number

_PICTURES = (".png", ".svg", ".pdf")
_NAMED = 8
_MOST_ROWS = 16


Inputs = typer.Argument(help="A .npz or .safetensors file with query, key and what else there is.")
Plot = option("Result", "Draw map, exact block, key mass and links: .png, .svg or .pdf.", "FILE")
Out = option("Result", "Write pooled_weights, key_mass, top_weights and top_index: .npz or .safetensors.", "FILE")
Bins = option("Result", "Bins of the pooled map.", "ROWSxCOLUMNS")
K = option("Result", "How many of the largest weights of each query.", "K", min=1)
Place = option("Result", "Which batch and head --plot draws; needed where there are several.", "N,N,...")
Zoom = option("Result", "The middle of the exact block; without it the strongest link.", "QUERY,KEY")


@takes_call(inputs=Annotated[Path | None, Inputs], value=None)
def look(
    options: CallOptions,
    plot: Annotated[Path | None, Plot] = None,
    out: Annotated[Path | None, Out] = None,
    bins: Annotated[str, Bins] = "128x128",
    k: Annotated[int, K] = 4,
    top: Annotated[int | None, renamed_option("--top", "--k")] = None,
    place: Annotated[str | None, Place] = None,
    zoom: Annotated[str | None, Zoom] = None,
) -> None:
    """Where the weights go: the heaviest keys, and on request a picture and the numbers behind it.

    Exact, in memory that grows with the lengths and not with their product: 100,000 tokens are fine.

    Example: attnscore look in.npz --causal --plot map.png
    """
    if out is not None:
        check_destination(out, several=True)
        options.keep_inputs(out)
    if plot is not None:
        if plot.suffix.lower() not in _PICTURES:
            raise FileError(f"{plot}: expected a name that ends in {', '.join(_PICTURES)}")
        check_writable(plot)
    for name, drawn in (("--place", place), ("--zoom", zoom)):
        if drawn is not None and plot is None:
            raise ArgumentError(message(name, "--plot beside it, whose picture it is about", "no --plot"))
    rows, columns = numbers("--bins", bins, "x", 2)
    if min(rows, columns) < 1:
        raise ArgumentError(message("--bins", "two whole numbers above 0 with 'x' between them", repr(bins)))
    where = () if place is None else numbers("--place", place, ",")
    middle: Any = None if zoom is None else numbers("--zoom", zoom, ",", 2)
    call = options.read(("query", "key"))
    if out is not None:
        check_holds(out, {"top_weights": call["query"]})
    if plot is not None or out is not None:
        *lead, query_len, _ = ats.attention_scores(key_index=slice(0, 0), **call).shape
        lengths = query_len, ats.attention_scores(query_index=slice(0, 0), **call).shape[-1]
        if 0 in (*lead, *lengths):
            raise ArgumentError(f"nothing to look at: the weights have the shape {(*lead, *lengths)}")
        if plot is not None:
            check_place(where, tuple(lead))
            if middle and not all(0 <= at < length for at, length in zip(middle, lengths, strict=True)):
                raise ArgumentError(message("--zoom", f"a query and a key within {lengths}", zoom))
    with error_console().status("summing the weights of every key"):
        mass = ats.key_mass(**call)
    print_heaviest(mass)
    if out is not None:
        with error_console().status("looking for the largest weights"):
            largest = ats.top_weights(k=max(1, min(top or k, mass.shape[-1])), **call)
            pooled = ats.pooled_weights(bins=(rows, columns), **call)
        names = ("pooled_weights", "key_mass", "top_weights", "top_index")
        write_arrays(out, dict(zip(names, (pooled, mass, *largest), strict=True)))
        console().print(Text(f"Numbers: {out}"), soft_wrap=True)
    if plot is not None:
        # Imported here: it brings matplotlib, which --help does not need.
        from attnscore import plotting

        with error_console().status("drawing"):
            figure = plotting.show_long_attention(bins=(rows, columns), k=top or k, place=where, zoom=middle, **call)
            with replacing(plot) as file:
                figure.savefig(file, format=plot.suffix[1:].lower(), dpi=140)
        console().print(Text(f"Picture: {plot}"), soft_wrap=True)


def check_place(place: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Refuse, before much is computed, an index that chooses no matrix in the axes `lead`; () chooses a single one."""
    if (not place and all(length == 1 for length in lead)) or (
        len(place) == len(lead) and all(-length <= at < length for at, length in zip(place, lead, strict=True))
    ):
        return
    expected = "an index into the batch and heads, " + (f"of shape {lead}" if lead else "of which there are none here")
    hint = f"--place {','.join('0' * len(lead))} draws the first" if lead else "leave it out"
    got = ",".join(map(str, place)) or "none"
    raise ArgumentError(message("--place", expected, got, hint=hint))


def numbers(option: str, text: str, between: str, count: int | None = None) -> tuple[int, ...]:
    """Read the whole numbers of an option, `count` of them (two); None: one or more."""
    try:
        values = tuple(int(part) for part in text.lower().split(between))
    except ValueError:
        values = ()
    if not values or count not in (None, len(values)):
        expected = "whole numbers" if count is None else "two whole numbers"
        raise ArgumentError(message(option, f"{expected} with {between!r} between them", repr(text)))
    return values


def print_heaviest(mass: Array) -> None:
    """Print the heaviest keys by their mass (..., key): several of a single matrix, else the first of each."""
    mass = np.asarray(mass, np.float64)
    lead, keys = mass.shape[:-1], mass.shape[-1]
    matrices, screen = int(np.prod(lead)), console()
    if keys == 0:
        screen.print("No keys.")
    elif matrices == 0:
        screen.print(Text(f"No matrices: batch and heads are {lead}."))
    elif matrices == 1 and not np.nansum(mass) > 0:
        screen.print("Weights that are NaN." if np.isnan(mass).any() else "No query sees a key.")
    elif matrices == 1:
        rows = _heaviest(mass.reshape(-1), _NAMED)
        screen.print(table(f"Heaviest of {keys:,} keys", ("key", "weight received", "of all"), rows))
        if undefined := int(np.isnan(mass).sum()):
            screen.print(f"{undefined:,} keys receive weights that are NaN.")
    else:
        columns = ("batch, head", "heaviest key", "weight received", "of all", "first key")
        cells = [
            (",".join(map(str, place)), *_heaviest(mass[place], 1)[0], _mass_and_share(mass[place], 0)[1])
            for place in list(np.ndindex(*lead))[:_MOST_ROWS]
        ]
        screen.print(table(f"The heaviest of {keys:,} keys", columns, cells))
        if matrices > _MOST_ROWS:
            screen.print(f"and {matrices - _MOST_ROWS} more")
        if undefined := int(np.isnan(mass).any(-1).sum()):
            screen.print(f"{undefined:,} of {matrices:,} matrices have weights that are NaN.")


def _heaviest(mass: Array, count: int) -> list[tuple[str, str, str]]:
    """Format the heaviest keys, each with its mass and its share; keys that are tied and do not all fit in one row."""
    rows = [
        (f"{keys[0]:,}" if len(keys) == 1 else f"each of {len(keys):,} tied", *_mass_and_share(mass, int(keys[0])))
        for keys in heaviest_keys(mass, count)
    ]
    return rows or [("none", *_mass_and_share(mass, 0))]


def _mass_and_share(mass: Array, key: int) -> tuple[str, str]:
    """Format a key's mass, and its share of all that are numbers; nan where there is none."""
    received, total = float(mass[key]), float(np.nansum(mass))
    return short_number(received, 3), f"{received / total:.1%}" if total > 0 and not np.isnan(received) else "nan"
