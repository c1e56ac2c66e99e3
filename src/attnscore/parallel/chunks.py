"""Attention over keys and values larger than memory: files read once, in order, some keys at a time.

- A chunk of keys and values is copied into memory while the one before is computed.
- Results of the chunks are merged exactly, in the dtype of sums.
- Chunks whose keys are all masked are not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Never, cast

import numpy as np

from attnscore import backends, kernels
from attnscore.backends.base import Array, Backend, accumulator
from attnscore.base import thresholds
from attnscore.base.arguments import check_count, hides_unknown, is_number, reject_unknown, shown
from attnscore.base.layout import AxisLayout, ScoreShape, check_bias_shape
from attnscore.errors import ArgumentError, FrameworkError, message
from attnscore.masks import Mask
from attnscore.parallel.mask import sequence_mask, shard_mask
from attnscore.parallel.pairs import Pairs, Range
from attnscore.parallel.parts import finish, state_of_part
from attnscore.parallel.shard import Shard
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import build_problem, check_arrays, check_extra, requested_statistics
from attnscore.problem.statistics import AttentionStats, in_returned_dtype, statistics_to_join


@hides_unknown
def attend_chunks(
    query: Array,
    key: Any,
    value: Any,
    *,
    chunk: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    head_axis: int = -3,
    kernel: str = "auto",
    return_stats: bool | tuple[str, ...] = False,
    **unknown: Never,
) -> Any:
    """`attend` with keys and values that are larger than memory: read once, in order, one chunk of keys at a time.

    Memory holds the query, the output and two chunks.

    Parameters
    ----------
    query : (..., query, dim)
        In memory.
    key, value : as in `attend`, or files
        ``numpy.memmap``, ``numpy.load(path, mmap_mode="r")``, or anything with `shape`, `dtype` and slices, such as a
        dataset of h5py or zarr. Chunks of half precision are converted to float32.
    chunk : int, optional
        Keys in a chunk; None takes 32 MB of keys and values.
    progress : function of (keys done, keys in all), optional
        Called after each chunk.
    score, mask, valid_lens, bias, sink, head_axis, kernel, return_stats
        As in `attend`. The last axis of a bias is sliced by chunks too, so it may be a file; no other array may.

    Returns
    -------
    out : (..., query, value_dim), of the dtype of the query
    stats : AttentionStats, with `return_stats`

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, MaskError, ArgumentError, KernelUnavailable
        As `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from attnscore.parallel import attend_chunks
    >>> value = np.arange(8.0).reshape(8, 1)
    >>> attend_chunks(np.ones((1, 2)), np.ones((8, 2)), value, chunk=3, progress=lambda done, n: print(done, "of", n))
    3 of 8
    6 of 8
    8 of 8
    array([[3.5]])
    """
    reject_unknown(attend_chunks, unknown)
    query, key, value = map(backends.variable_value, (query, key, value))
    ops = backends.of({"query": query})
    files = {"key": key, "value": value}
    sliced = files if bias is None or is_number(bias) else {**files, "bias": bias}
    for name, x in sliced.items():
        if not all(hasattr(x, attribute) for attribute in ("shape", "dtype", "__getitem__")):
            expected = "an array or a file of one, with a shape, a dtype and slices"
            raise FrameworkError(message(name, expected, shown(x)))
    # By shapes alone: nothing is read.
    shapes = {name: np.broadcast_to(np.float32(0), tuple(x.shape)) for name, x in {"query": query, **files}.items()}
    layout = check_arrays(backends.load("numpy"), shapes, head_axis)
    mask = sequence_mask(ops, mask, valid_lens, layout.score_shape)
    if is_number(bias):
        bias = ops.reshape(check_extra(ops, "bias", bias, query), (1, 1))
    if bias is not None:
        check_bias_shape(tuple(bias.shape), layout.score_shape)
    statistics, dtype, shape = requested_statistics(return_stats), ops.dtype(query), layout.score_shape
    query = ops.astype(query, accumulator(dtype))
    state, sink_of_heads = None, None

    def compute_chunk(key_range: Range, keys: Array, values: Array) -> tuple[RowState, Array | None]:
        """Return the online-softmax state over a chunk, and the canonical sink; neither keeps the chunk in memory."""
        rows, cols = Shard.whole(shape.query_len), Shard((key_range,), shape.key_len)
        problem, _ = build_problem(
            query, keys, values, score=score, sink=sink, head_axis=head_axis,
            mask=shard_mask(mask, rows, cols, shape.query_len, shape.key_len),
            bias=None if bias is None else _bias_of_chunk(ops, bias, shape, key_range, query),
            statistics=statistics_to_join(statistics),
        )  # fmt: skip
        plan = kernels.single_plan(dataclasses.replace(problem, sink=None), kernel)
        return state_of_part(plan, cols), problem.sink

    with ops.numeric_scope():
        ranges = _attended_chunks(mask, shape, chunk, files)
        for key_range, keys, values in _chunks(ops, query, key, value, layout, ranges):
            new, sink_of_heads = compute_chunk(key_range, keys, values)
            state = new if state is None else online_softmax.merge(ops, state, new)
            if progress is not None:
                progress(key_range[1], shape.key_len)
        # There is at least one chunk, perhaps an empty one.
        result = finish(ops, cast(RowState, state), sink_of_heads, statistics)
        out = layout.from_canonical(ops, ops.astype(result.out, dtype))
        if not statistics:
            return out
        rows = {name: in_returned_dtype(ops, name, result.statistics[name][..., 0]) for name in statistics}
        return out, AttentionStats(**{name: layout.rows_from_canonical(ops, x) for name, x in rows.items()})


def _attended_chunks(mask: Mask | None, shape: ScoreShape, chunk: int | None, files: dict[str, Any]) -> list[Range]:
    """Return the chunks with a key that any query attends, or one empty chunk; `chunk` None has a size in bytes."""
    if chunk is None:
        # Half precision is converted: a number takes at least 4 bytes in memory.
        sizes = (math.prod(x.shape) * max(4, int(getattr(x.dtype, "itemsize", 4))) for x in files.values())
        row_bytes = sum(sizes) // max(1, shape.key_len)
        chunk = max(1, thresholds.FILE_CHUNK_BYTES // max(1, row_bytes))
    elif check_count("chunk", chunk) < 1:
        raise ArgumentError(message("chunk", "a whole number of keys, 1 or more", chunk))
    strips = Pairs(mask, shape.query_len, shape.key_len, shape.batch).strips(Shard.whole(shape.query_len).positions())
    attended = Shard.of((pair for strip in strips for pair in strip.keys), shape.key_len)
    ranges = ((first, min(first + chunk, shape.key_len)) for first in range(0, shape.key_len, chunk))
    return [key_range for key_range in ranges if attended & Shard((key_range,), shape.key_len)] or [(0, 0)]


def _bias_of_chunk(ops: Backend, bias: Any, shape: ScoreShape, key_range: Range, like: Array) -> Array:
    """Return the bias of a chunk, in memory; one that is the same for all keys is read whole."""
    start, stop = (0, 1) if bias.shape[-1:] == (1,) else key_range
    if shape.is_relative(tuple(bias.shape)):
        stop += shape.query_len - 1  # one number for each relative offset, key minus query, in rising order
    return _read(ops, bias, -1, (start, stop), like)


def _chunks(
    ops: Backend, query: Array, key: Any, value: Any, layout: AxisLayout, ranges: list[Range]
) -> Iterator[tuple[Range, Array, Array]]:
    """Yield chunks of keys and values in memory, each read while the caller computes the one before."""
    axis = -3 if layout.is_length_before_heads else -2

    def read(key_range: Range) -> tuple[Array, Array]:
        return _read(ops, key, axis, key_range, query), _read(ops, value, axis, key_range, query)

    with ThreadPoolExecutor(1) as reader:
        prefetched = reader.submit(read, ranges[0])
        for key_range, next_range in zip(ranges, [*ranges[1:], None], strict=True):
            keys, values = prefetched.result()
            if next_range is not None:
                prefetched = reader.submit(read, next_range)
            yield key_range, keys, values


def _read(ops: Backend, x: Any, axis: int, key_range: Range, like: Array) -> Array:
    """Return a range of an axis, copied into memory, half precision as float32; all of an array without the axis."""
    index: list[Any] = [slice(None)] * len(x.shape)
    if len(index) >= -axis:
        index[axis] = slice(*key_range)
    block = x[tuple(index)]
    if backends.of_type(type(x)) in (None, backends.load("numpy")):
        dtype = np.float32 if block.dtype == np.float16 else block.dtype
        block = ops.asarray(np.array(block, dtype=dtype), like)
    return ops.astype(block, accumulator(ops.dtype(block)))
