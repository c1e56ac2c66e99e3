"""One call of the native module, or one for each chunk of queries where a mask has to be evaluated.

- Each chunk has an array of booleans for its queries. Only the booleans of one chunk are in memory at a time, linear in
  the lengths.
- All chunks fill the same arrays: each writes its rows and adds to the gradients of the keys, so the result equals a
  single call's. Chunks depend on shapes alone, so results do not depend on the number of threads.
- In a traced program the chunks are a loop of custom calls, and their starts are traced.
- Dropout counts the rows of all matrices of a call (a matrix: one head of one batch entry), not only a chunk's rows.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.kernels.native.marshalling import ChunkDropout, MaskArrays, Shapes
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, lowering
from attnscore.problem.problem import Problem


class Program(ABC):
    """Interface to the module: over the memory of arrays (`in_memory`) or by custom calls (`xla_call`)."""

    @abstractmethod
    def mask_arrays(self, problem: Problem, tiles: TilePlan) -> tuple[MaskArrays, Mask | None]:
        """Return the arrays of the mask, and the part of it that has to be evaluated."""

    @abstractmethod
    def evaluate(self, problem: Problem, tiles: TilePlan, mask: Mask, start: Any, size: int) -> Array:
        """Return the booleans of a chunk of queries, on the canonical axes; a broadcast axis is 1."""

    @abstractmethod
    def buffers(self, problem: Problem, shapes: Shapes) -> tuple[Backend, dict[str, Array]]:
        """Return zeros to which chunks are added, and the array operations for them."""

    @abstractmethod
    def run(
        self, problem: Problem, mask_arrays: MaskArrays, shapes: Shapes, inputs: dict[str, Array] | None
    ) -> dict[str, Array]:
        """Run the forward, or the backward on `inputs`; return the arrays of these shapes by name."""

    @abstractmethod
    def in_framework(self, problem: Problem, x: Array, dtype: str) -> Array:
        """Return an array that the module has filled as an array of the framework."""


def run(
    program: Program,
    problem: Problem,
    tiles: TilePlan,
    shapes_of: Callable[[Problem], Shapes],
    inputs: dict[str, Array] | None = None,
) -> dict[str, Array]:
    """Run the forward, or the backward on `inputs`, in chunks of queries where part of the mask is evaluated.

    Returns the arrays of ``shapes_of(problem)`` by name. The results of a chunk are added to its rows of the buffers;
    gradients with an axis of keys, to all keys. `inputs`: see `marshalling.backward_inputs`.
    """
    mask_arrays, evaluated = program.mask_arrays(problem, tiles)
    ops, query_len = problem.ops, problem.score_shape.query_len
    chunk_len = query_len if evaluated is None else chunk_size(problem, evaluated)
    # A single chunk runs as one call. Without queries there is no chunk: the zeros of the buffers are the results.
    if evaluated is not None and 0 < query_len == chunk_len:
        mask_arrays, evaluated = mask_arrays | {"mask": program.evaluate(problem, tiles, evaluated, 0, query_len)}, None
    if evaluated is None:
        return program.run(problem, mask_arrays, shapes_of(problem), inputs)
    mask = evaluated
    array_ops, buffers = program.buffers(problem, shapes_of(problem))

    def add_chunk(buffers: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        """Return the buffers with the results of `size` queries from `start` added."""
        chunk = _chunk_of(problem, start, size)
        chunk_masks = {name: _columns(ops, x, start, size, name) for name, x in mask_arrays.items()}
        chunk_masks["mask"] = program.evaluate(problem, tiles, mask, start, size)
        rows = None if inputs is None else {name: _rows(ops, x, start, size) for name, x in inputs.items()}
        results = program.run(chunk, chunk_masks, shapes_of(chunk), rows)

        def add_to_buffer(name: str, x: Array) -> Array:
            """Return buffer `x` plus the chunk's result, at the chunk's queries if the buffer has an axis of them."""
            axis, first = -1, 0  # the whole buffer
            if name == "bias" and problem.has_relative_bias:
                # Its axis is the key minus the query: the last queries have the first entries.
                first = query_len - start - size
            elif name == "query_bias":
                first = start  # the last axis is the queries
            elif inputs is None or name == "query" or (name == "bias" and x.shape[-2] > 1):
                axis, first = -2, start
            return array_ops.add_at(x, axis, first, results[name])

        return {name: add_to_buffer(name, x) for name, x in buffers.items()}

    full, tail = divmod(query_len, max(1, chunk_len))
    buffers = array_ops.loop(full, lambda i, x: add_chunk(x, i * chunk_len, chunk_len), buffers)
    return add_chunk(buffers, full * chunk_len, tail) if tail else buffers


def chunk_size(problem: Problem, mask: Mask) -> int:
    """Return how many queries make a chunk: all if a row of the mask serves all or they fit, or whole micro-panels."""
    *lead, height, width = lowering.evaluated_shape(problem.ops, problem.score_shape, problem.value, mask)
    count = max(
        thresholds.CHUNK_ROWS,
        thresholds.CHUNK_BYTES // max(1, math.prod(lead) * width) // thresholds.CHUNK_ROWS * thresholds.CHUNK_ROWS,
    )
    return problem.score_shape.query_len if height == 1 else min(count, problem.score_shape.query_len)


def _chunk_of(problem: Problem, start: Any, size: int) -> Problem:
    """Return the problem of a chunk of queries, without a mask: `run` passes the booleans of the chunk."""
    ops, dropout, bias, shape = problem.ops, problem.dropout, problem.bias, problem.score_shape
    if bias is not None and problem.has_relative_bias:
        # Entry key - query + query_len - 1 is the bias of a pair.
        bias = ops.slice_axis(bias, -1, shape.query_len - start - size, size + shape.key_len - 1)
    elif bias is not None:
        bias = _rows(ops, bias, start, size)
    if dropout is not None:
        dropout = ChunkDropout(dropout.probability, dropout.seed, start, shape.query_len)
    layout = dataclasses.replace(problem.layout, score_shape=dataclasses.replace(shape, query_len=size))
    # `problem.query` keeps all rows: kernels read the form's, and outside a gradient hook it may be of another tape.
    form = problem.form.part(lambda x, role: _rows(ops, x, start, size) if role == "query" else x)
    return dataclasses.replace(problem, layout=layout, form=form, bias=bias, mask=None, dropout=dropout)


def _rows(ops: Backend, x: Array, start: Any, size: int) -> Array:
    """Return the rows of a chunk; an array that is broadcast over rows stays as it is."""
    return x if x.shape[-2] == 1 else ops.slice_axis(x, -2, start, size)


def _columns(ops: Backend, x: Array, start: Any, size: int, name: str) -> Array:
    """Return the entries of a chunk's queries, from the last axis of an array of the mask; ids of keys stay whole."""
    if name == "key_ids":
        return x
    # NumPy slices the host's intervals: a slice by the framework may lose their 64 bits.
    is_in_memory = isinstance(x, np.ndarray) and isinstance(start, int)
    return x[..., start : start + size] if is_in_memory else ops.slice_axis(x, -1, start, size)
