"""Tile sizes, warps and pipeline stages of the kernels: a table by architecture, kernel, form, dtype and dimension.

- ``tiles.json`` is the table. A file of the same layout that ``ATTNSCORE_GPU_TILES`` names comes first, on exactly the
  architectures that it names; ``python benchmarks tune`` makes one.
- Triton's own tuning would run at the first call of each shape; a table gives every call the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from attnscore.errors import FileError, message
from attnscore.io import read_json

KernelName = Literal["forward", "d_query", "d_key", "store_gradients"]

SHIPPED = Path(__file__).with_name("tiles.json")
VARIABLE = "ATTNSCORE_GPU_TILES"
"""Environment variable with the path of a table of the user's own, read at the first call."""
FORMS = ("inner", "distance", "additive")
DTYPES = ("float16", "bfloat16", "float32")
DIMS = (32, 64, 128, 256)
"""Dimensions of the table: powers of 2; smaller dimensions use the tiles of 32."""
SUMS = 16
"""Positions of a program that sums the gradients of an additive score: they divide the tiles of ``store_gradients``."""
TABLE_SLACK = 128
"""Positions of a table of an additive score after the last, read without a mask: no tile of it is larger."""


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


class Entry(NamedTuple):
    """Key of the table. `dim` is the larger dimension of keys and values, or of an additive score the values'."""

    architecture: int
    """Compute capability times 10."""
    kernel: str
    form: str
    dtype: str
    """Dtype of the operands of products."""
    dim: int

    def __str__(self) -> str:
        return " / ".join((f"sm_{self.architecture}", *map(str, self[1:])))


Table = dict[Entry, Tile]


INTERPRETED: dict[KernelName, Tile] = {
    "forward": Tile(16, 32, 4, 1),
    "d_query": Tile(32, 16, 4, 1),
    "d_key": Tile(16, 16, 4, 1),
    "store_gradients": Tile(32, 16, 4, 1),
}
"""Tiles for the interpreter: small, so that short inputs have several."""


def padded_dim(dim: int) -> int:
    """Return the dimension of a tile in registers: a power of 2, at least 16 as matrix units want it."""
    return max(16, 1 << max(0, dim - 1).bit_length())


def kernels_of(form: str) -> tuple[KernelName, ...]:
    """Return the kernels that a form takes tiles for; ``d_query`` of an additive score is its gradient of a bias."""
    return ("forward", "d_query", "store_gradients" if form == "additive" else "d_key")


def tile_of(kernel: KernelName, architecture: int, form: str, dtype: str, dim: int) -> Tile:
    """Return the tile of a kernel; `dim` is the larger of the padded dimensions, architecture 0 the interpreter."""
    if architecture == 0:
        return INTERPRETED[kernel]
    return _tile_of(Entry(architecture, kernel, form, dtype, max(DIMS[0], dim)))


@cache
def _tile_of(entry: Entry) -> Tile:
    """Return the tile in the user's own table, or else the shipped one of the latest architecture up to this one."""
    path = os.environ.get(VARIABLE)
    if path and (user_tile := read(Path(path)).get(entry)):
        return user_tile
    shipped = read(SHIPPED)
    nearest = max(x.architecture for x in shipped if x.architecture <= entry.architecture)
    return shipped[entry._replace(architecture=nearest)]


@cache
def read(path: Path) -> Table:
    """Return the table in a file; a malformed entry is a `FileError` that names it."""
    content = read_json(path)
    try:
        return parse(content)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from error


def parse(content: Any) -> Table:
    """Return the table of a JSON document; ValueError names the first entry that is malformed.

    The document has an object for each architecture, in it one for each kernel, form and dtype, and there a list of
    queries, keys, warps and stages for each dimension. An architecture may be the name of another one: it has the same
    entries. ``origin`` says in words where the numbers come from.
    """
    if not isinstance(content, Mapping):
        raise ValueError(message("table", "an object", type(content).__name__))
    table: Table = {}
    aliases = {}
    for name, entries in content.items():
        if name == "origin":
            continue
        digits = name.removeprefix("sm_")
        if digits == name or not digits.isdigit():
            raise ValueError(message(name, "origin, or an architecture such as sm_90", "another name"))
        if isinstance(entries, str):
            aliases[name] = entries
            continue
        for (kernel, form, dtype, dim), numbers in _leaves(entries, name, depth=4):
            entry = Entry(int(digits), kernel, form, dtype, int(dim) if dim.isdigit() else 0)
            _check_entry(entry, f"{name} / {kernel} / {form} / {dtype} / {dim}")
            table[entry] = tile_from_numbers(entry, numbers)
    for name, target in aliases.items():
        same = {entry: tile for entry, tile in table.items() if f"sm_{entry.architecture}" == target}
        if not same:
            raise ValueError(message(name, "an object, or the name of an architecture that has one", repr(target)))
        table |= {entry._replace(architecture=int(name[3:])): tile for entry, tile in same.items()}
    return table


def _leaves(x: Any, name: str, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value at this depth of nested objects, with the keys that lead to it."""
    if depth == 0:
        yield (), x
        return
    if not isinstance(x, Mapping):
        raise ValueError(message(name, "an object", repr(x)))
    for key, part in x.items():
        for keys, value in _leaves(part, f"{name} / {key}", depth - 1):
            yield (key, *keys), value


def _check_entry(entry: Entry, name: str) -> None:
    """Raise ValueError for an unknown kernel, form, dtype or dimension."""
    choices = {"form": FORMS, "kernel": get_args(KernelName), "dtype": DTYPES, "dim": DIMS}
    for part, values in choices.items():
        if getattr(entry, part) not in values:
            raise ValueError(message(name, f"as {part} one of {', '.join(map(str, values))}", "another one"))
    if entry.kernel not in kernels_of(entry.form):
        raise ValueError(message(name, f"for this form one of {', '.join(kernels_of(entry.form))}", entry.kernel))


def tile_from_numbers(entry: Entry, numbers: Any) -> Tile:
    """Return four numbers as a tile that the kernels can have."""
    if not isinstance(numbers, list) or len(numbers) != 4 or not all(type(x) is int for x in numbers):
        raise ValueError(message(str(entry), "four whole numbers: queries, keys, warps, stages", repr(numbers)))
    tile = Tile(*numbers)
    # Matrix units take 16 or more; a table of an additive score has `TABLE_SLACK` positions after the last. 256 x 256
    # scores fill the 65,536 registers of a multiprocessor.
    low, high = 16, TABLE_SLACK if entry.form == "additive" else 256
    if not all(low <= n <= high and n & (n - 1) == 0 for n in tile[:2]):
        raise ValueError(message(str(entry), f"as queries and keys powers of 2 from {low} to {high}", repr(numbers)))
    # A GPU takes 1024 threads, 32 warps. More than 8 stages must be a slip: the fastest tiles measured have 1 to 3.
    if tile.warps not in (1, 2, 4, 8, 16, 32) or not 1 <= tile.stages <= 8:
        raise ValueError(message(str(entry), "1, 2, 4, 8, 16 or 32 warps and 1 to 8 stages", repr(numbers)))
    return tile
