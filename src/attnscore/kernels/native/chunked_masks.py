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
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds
from attnscore.kernels.native.marshalling import ChunkDropout, MaskArrays, Shapes, gradient_shapes, output_shapes
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, lowering
from attnscore.problem.problem import Problem
from attnscore.scores.forms import Role


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
    def forward(self, problem: Problem, mask_arrays: MaskArrays, shapes: Shapes) -> dict[str, Array]:
        """Run the forward; return the arrays of these shapes by name."""

    @abstractmethod
    def backward(
        self, problem: Problem, mask_arrays: MaskArrays, inputs: dict[str, Array], shapes: Shapes
    ) -> dict[str, Array]:
        """Run the backward on `marshalling.backward_inputs`; return the gradients of these shapes by name."""

    @abstractmethod
    def in_framework(self, problem: Problem, x: Array, dtype: str) -> Array:
        """Return an array that the module has filled as an array of the framework."""


def forward(program: Program, problem: Problem, tiles: TilePlan, shapes: Shapes) -> dict[str, Array]:
    """Return the arrays of these shapes, which a forward fills, by name; in chunks where a mask part is evaluated."""
    mask_arrays, evaluated = _mask_arrays(program, problem, tiles)
    if evaluated is None:
        return program.forward(problem, mask_arrays, shapes)
    chunks = _Chunks(program, problem, tiles, mask_arrays, evaluated)
    ops, buffers = program.buffers(problem, shapes)

    def add_chunk(buffers: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        chunk_problem, chunk_masks = chunks.chunk(start, size)
        outputs = program.forward(chunk_problem, chunk_masks, output_shapes(chunk_problem))
        return {name: ops.add_at(x, -2, start, outputs[name]) for name, x in buffers.items()}

    return chunks.fold(ops, add_chunk, buffers)


def backward(
    program: Program, problem: Problem, tiles: TilePlan, inputs: dict[str, Array], requested: frozenset[str]
) -> dict[str, Array]:
    """Return the gradients that a backward fills, by name; in chunks of queries where part of the mask is evaluated.

    The gradients of a chunk are added to its rows of the buffers; gradients with an axis of keys, to all keys.
    `inputs`: see `marshalling.backward_inputs`.
    """
    mask_arrays, evaluated = _mask_arrays(program, problem, tiles)
    shapes = gradient_shapes(problem, requested)
    if evaluated is None:
        return program.backward(problem, mask_arrays, inputs, shapes)
    chunks = _Chunks(program, problem, tiles, mask_arrays, evaluated)
    ops, buffers = program.buffers(problem, shapes)

    def add_chunk(buffers: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        chunk_problem, chunk_masks = chunks.chunk(start, size)
        rows = {name: chunks.rows(x, start, size) for name, x in inputs.items()}
        gradients = program.backward(chunk_problem, chunk_masks, rows, gradient_shapes(chunk_problem, requested))

        def add_to_buffer(name: str, x: Array) -> Array:
            axis, first = -1, 0
            if name == "bias" and problem.has_relative_bias:
                # Its axis is the key minus the query: the last queries have the first entries.
                first = problem.score_shape.query_len - start - size
            elif name == "query_bias":
                first = start
            elif name == "query" or (name == "bias" and x.shape[-2] > 1):
                axis, first = -2, start
            return ops.add_at(x, axis, first, gradients[name])

        return {name: add_to_buffer(name, x) for name, x in buffers.items()}

    return chunks.fold(ops, add_chunk, buffers)


def _mask_arrays(program: Program, problem: Problem, tiles: TilePlan) -> tuple[MaskArrays, Mask | None]:
    """Return the arrays of the mask, and the part of it that is evaluated in several chunks.

    A part that one chunk serves is evaluated here, and is among the arrays.
    """
    mask_arrays, evaluated = program.mask_arrays(problem, tiles)
    query_len = problem.score_shape.query_len
    if evaluated is not None and 0 < query_len == chunk_size(problem, evaluated):
        return mask_arrays | {"mask": program.evaluate(problem, tiles, evaluated, 0, query_len)}, None
    return mask_arrays, evaluated


def chunk_size(problem: Problem, mask: Mask) -> int:
    """Return how many queries make a chunk: all where one row of the mask serves all, or where they fit."""
    shape = lowering.evaluated_shape(problem.ops, problem.score_shape, problem.value, mask)
    *lead, height, width = shape
    count = max(
        thresholds.CHUNK_ROWS,
        thresholds.CHUNK_BYTES // max(1, math.prod(lead) * width) // thresholds.CHUNK_ROWS * thresholds.CHUNK_ROWS,
    )
    return problem.score_shape.query_len if height == 1 else min(count, problem.score_shape.query_len)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """A problem in chunks of queries."""

    program: Program
    problem: Problem
    tiles: TilePlan
    mask_arrays: MaskArrays
    """Arrays of the parts of the mask that the module reads without evaluation."""
    mask: Mask
    """Part of the mask that has to be evaluated."""

    def fold(
        self, ops: Backend, add_chunk: Callable[[dict[str, Array], Any, int], dict[str, Array]], carry: dict[str, Array]
    ) -> dict[str, Array]:
        """Fold ``carry = add_chunk(carry, start, size)`` over the chunks."""
        count = chunk_size(self.problem, self.mask)
        full, tail = divmod(self.problem.score_shape.query_len, max(1, count))
        carry = ops.loop(full, lambda i, carry: add_chunk(carry, i * count, count), carry)
        return add_chunk(carry, full * count, tail) if tail else carry

    def chunk(self, start: Any, size: int) -> tuple[Problem, MaskArrays]:
        """Return the problem of a chunk, and the arrays of its mask."""
        problem, ops, dropout = self.problem, self.problem.ops, self.problem.dropout

        def rows_of_operand(x: Array, role: Role) -> Array:
            return self.rows(x, start, size) if role == "query" else x

        def columns_of_mask(x: Array) -> Array:
            # Intervals that the host knows have 64 bits, which the framework's own arrays may not have.
            is_in_memory = isinstance(x, np.ndarray) and isinstance(start, int)
            return x[..., start : start + size] if is_in_memory else ops.slice_axis(x, -1, start, size)

        if dropout is not None:
            dropout = ChunkDropout(dropout.probability, dropout.seed, start, problem.score_shape.query_len)
        score_shape = dataclasses.replace(problem.score_shape, query_len=size)
        # `query` stays: the lowered form has it, and outside a gradient hook it may belong to another tape.
        chunk_problem = dataclasses.replace(
            problem,
            layout=dataclasses.replace(problem.layout, score_shape=score_shape),
            form=problem.form.part(rows_of_operand),
            bias=None if problem.bias is None else self._bias_of_chunk(problem.bias, start, size),
            mask=None,
            dropout=dropout,
        )
        mask_arrays = {name: x if name == "key_ids" else columns_of_mask(x) for name, x in self.mask_arrays.items()}
        mask_arrays["mask"] = self.program.evaluate(problem, self.tiles, self.mask, start, size)
        return chunk_problem, mask_arrays

    def rows(self, x: Array, start: Any, size: int) -> Array:
        """Return the rows of a chunk; an array that is broadcast over rows stays as it is."""
        return x if x.shape[-2] == 1 else self.problem.ops.slice_axis(x, -2, start, size)

    def _bias_of_chunk(self, x: Array, start: Any, size: int) -> Array:
        """Return the bias of a chunk."""
        if not self.problem.has_relative_bias:
            return self.rows(x, start, size)
        first = self.problem.score_shape.query_len - start - size
        return self.problem.ops.slice_axis(x, -1, first, size + self.problem.score_shape.key_len - 1)
