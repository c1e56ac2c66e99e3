"""Ranges of tiles that attend each other, computed on the device from the queries' intervals, without the host."""

from __future__ import annotations

import triton
import triton.language as tl

# A position after all others.
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def ends_of_tiles(masking, ends, n_q, tiles, TESTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Reduce an interval of each query to an interval of key tiles for each query tile.

    Stored are any_start, full_start, full_stop, any_stop: some query attends keys of the tiles any_start <= t <
    any_stop; every query attends every key of full_start <= t < full_stop. `TESTED`: the rest of the mask is read in
    each tile, so none is full.
    """
    tile, interval, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tile * BM + tl.arange(0, BM)
    live = i < n_q
    at = interval * masking.interval + batch.to(tl.int64) * masking.batch
    start = tl.load(masking.start + at + i, mask=live, other=0)
    stop = tl.load(masking.stop + at + i, mask=live, other=0)
    attends = live & (stop > start)
    count = tl.sum(attends.to(tl.int32), 0)
    any_start = tl.where(count > 0, tl.min(tl.where(attends, start, _FAR), 0) // BN, 0)
    any_stop = (tl.max(tl.where(attends, stop, 0), 0) + BN - 1) // BN
    full_start = (tl.max(tl.where(live, start, 0), 0) + BN - 1) // BN
    full_stop = tl.min(tl.where(live, stop, _FAR), 0) // BN
    if TESTED:
        is_full = False
    else:
        is_full = (count == tl.sum(live.to(tl.int32), 0)) & (full_stop > full_start)
    tile_ends = ends + ((interval * tl.num_programs(2) + batch).to(tl.int64) * tiles + tile) * 4
    tl.store(tile_ends, any_start)
    tl.store(tile_ends + 1, tl.where(is_full, full_start, any_start))
    tl.store(tile_ends + 2, tl.where(is_full, full_stop, any_start))
    tl.store(tile_ends + 3, any_stop)


@triton.jit
def tiles_of_queries(ends, query_tiles, intervals, tiles, BLOCK: tl.constexpr):
    """Invert `ends` to the query tiles of each key tile, (batch or 1, key tile, 4), in the order of `ends`.

    Where the query tiles that attend a whole key tile have others among them, none counts as full. A step of the loop
    reads `BLOCK` query tiles.
    """
    key_tile, batch = tl.program_id(0), tl.program_id(1)
    any_start, any_stop, full_start, full_stop, count = tiles, 0, tiles, 0, 0
    for interval in range(0, intervals):
        interval_ends = ends + (interval * tl.num_programs(1) + batch).to(tl.int64) * tiles * 4
        for begin in range(0, tiles, BLOCK):
            t = begin + tl.arange(0, BLOCK)
            live, at = t < tiles, interval_ends + t * 4
            attends = (tl.load(at, mask=live, other=0) <= key_tile) & (key_tile < tl.load(at + 3, mask=live, other=0))
            any_start = tl.minimum(any_start, tl.min(tl.where(attends, t, tiles), 0))
            any_stop = tl.maximum(any_stop, tl.max(tl.where(attends, t + 1, 0), 0))
            is_full = (tl.load(at + 1, mask=live, other=0) <= key_tile) & (
                key_tile < tl.load(at + 2, mask=live, other=0)
            )
            full_start = tl.minimum(full_start, tl.min(tl.where(is_full, t, tiles), 0))
            full_stop = tl.maximum(full_stop, tl.max(tl.where(is_full, t + 1, 0), 0))
            count += tl.sum(is_full.to(tl.int32), 0)
    any_start = tl.minimum(any_start, any_stop)
    is_contiguous = (count > 0) & (count == full_stop - full_start)
    out = query_tiles + (batch.to(tl.int64) * tl.num_programs(0) + key_tile) * 4
    tl.store(out, any_start)
    tl.store(out + 1, tl.where(is_contiguous, full_start, any_start))
    tl.store(out + 2, tl.where(is_contiguous, full_stop, any_start))
    tl.store(out + 3, any_stop)
