"""Tile sizes, warps and pipeline stages of each kernel: a table by architecture, bytes of a number and dimension.

Triton's own tuning runs at the first call of each shape; a table keeps every call alike and the results the same bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

KernelName = Literal["forward", "d_query", "d_key", "store_gradients"]


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


HOPPER = 90
"""Architecture from which programs have 227 KB of shared memory, and warp groups multiply; before: 99 to 163 KB."""

INTERPRETED: dict[KernelName, Tile] = {
    "forward": Tile(16, 32, 4, 1),
    "d_query": Tile(32, 16, 4, 1),
    "d_key": Tile(16, 16, 4, 1),
    "store_gradients": Tile(32, 16, 4, 1),
}
"""For the interpreter: small, so that short inputs have several tiles."""


def padded(dim: int) -> int:
    """Return the dimension of a tile in registers: a power of 2, at least 16 as matrix units want it."""
    return max(16, 1 << max(0, dim - 1).bit_length())


def tile_of(kernel: KernelName, arch: int, itemsize: int, dim: int, by_channel: bool) -> Tile:
    """Return the tile of a kernel; `dim` is the larger of the padded dimensions, `arch` 0 the interpreter."""
    if arch == 0:
        return INTERPRETED[kernel]
    # Products of float32 take twice the registers; more warps have more of them.
    warps = 8 if itemsize == 4 and dim >= 64 else 4
    if kernel == "store_gradients":
        return Tile(32, 128, warps, 1)
    if by_channel:
        return Tile(32, 64, warps, 1) if kernel == "forward" else Tile(32, 32, warps, 1)
    table = _HALF if itemsize == 2 else _FLOAT32
    return table[kernel, arch >= HOPPER][min(3, max(0, dim.bit_length() - 6))]


# By kernel and whether it is for Hopper; in each row the dimensions to 32, 64, 128 and 256. Each is the largest of
# some half a dozen that were compiled without a spill, or the one with the fewest (docs/performance/gpu-code.md).
_HALF: dict[tuple[KernelName, bool], tuple[Tile, ...]] = {
    ("forward", True): (Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2)),
    ("forward", False): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(32, 32, 8, 2)),
    ("d_query", True): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
    ("d_query", False): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    ("d_key", True): (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), Tile(32, 32, 8, 2)),
    ("d_key", False): (Tile(32, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 1)),
}
_FLOAT32: dict[tuple[KernelName, bool], tuple[Tile, ...]] = {
    ("forward", True): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 8, 1)),
    ("forward", False): (Tile(64, 32, 8, 3), Tile(64, 32, 8, 3), Tile(32, 32, 4, 2), Tile(16, 32, 8, 1)),
    ("d_query", True): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1)),
    ("d_query", False): (Tile(32, 32, 4, 3), Tile(32, 32, 4, 3), Tile(16, 32, 4, 2), Tile(16, 16, 8, 1)),
    ("d_key", True): (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("d_key", False): (Tile(32, 32, 8, 3), Tile(32, 32, 8, 3), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
