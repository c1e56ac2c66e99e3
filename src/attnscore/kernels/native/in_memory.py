"""The native module over the memory of arrays: calls of eager code, on NumPy views of the framework's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.backends.native import module as _native
from attnscore.base import thresholds
from attnscore.kernels.native.chunked_masks import Program
from attnscore.kernels.native.marshalling import (
    BACKWARD_INPUTS,
    FILLED,
    GRADIENTS,
    ORDER,
    STORED,
    MaskArrays,
    Shapes,
    allocate_aligned,
    score_spec,
)
from attnscore.kernels.native.plan import thread_counter
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, lowering
from attnscore.masks.base import all_of
from attnscore.problem.problem import Problem

# Inputs of the backward that may have any strides. The module requires C order of the others.
_ANY_STRIDES = frozenset(("out", "grad_out", "grad_attention_scores", "grad_attention_weights"))


def _zeros(name: str, shape: tuple[int, ...], dtype: str) -> HostArray:
    return allocate_aligned(np.zeros, shape, dtype)


@dataclass(frozen=True)
class InMemory(Program):
    """The module, called over memory. It fills NumPy arrays, half-precision numbers as their bits."""

    zeros: Callable[[str, tuple[int, ...], str], HostArray] = _zeros
    """Function that allocates a gradient, from its name, shape and dtype."""

    def mask_arrays(self, problem: Problem, tiles: TilePlan) -> tuple[MaskArrays, Mask | None]:
        ops, score_shape, value = problem.ops, problem.score_shape, problem.value
        direct, evaluated = lowering.partition(tiles.remaining_mask)
        # With evaluated parts, `mask` is left to their booleans.
        arrays = lowering.arrays(ops, score_shape, value, direct, with_evaluated=bool(evaluated)) if direct else {}
        if tiles.interval_set is not None:
            arrays["start"], arrays["stop"] = tiles.interval_set.with_holes
        has_pairs = 0 not in (*score_shape.rows, score_shape.key_len)
        return arrays, all_of(evaluated) if has_pairs else None

    def evaluate(self, problem: Problem, tiles: TilePlan, mask: Mask, start: Any, size: int) -> Array:
        """Return the booleans of a chunk; pairs outside the intervals are neither written nor read."""
        ops, score_shape, value = problem.ops, problem.score_shape, problem.value
        shape = lowering.evaluated_shape(ops, score_shape, value, mask)
        *lead, height, width = (1,) * (len(score_shape.rows) + 1 - len(shape)) + tuple(shape)
        unmasked = np.empty((*lead, min(height, size), width), np.uint8)
        first_key, last_key = _key_range(problem, tiles, start, start + size)
        pairs_of_row = max(1, math.prod(lead) * (last_key - first_key))
        # Of equal rows, one is evaluated.
        step = (
            size if height == 1 else min(thresholds.EVALUATED_ROWS, max(1, thresholds.EVALUATED_PAIRS // pairs_of_row))
        )
        for row in range(start, start + size, step):
            end = min(row + step, start + size)
            first_key, last_key = _key_range(problem, tiles, row, end)
            if last_key <= first_key:
                continue
            rows, cols = (row, min(end - row, height)), (first_key, last_key - first_key)
            block = ops.memory(lowering.evaluate(ops, score_shape, value, mask, rows, cols))
            columns = unmasked[..., first_key:last_key] if width > 1 else unmasked
            columns[..., row - start : end - start, :] = block.view(np.uint8)
        return unmasked

    def buffers(self, problem: Problem, shapes: Shapes) -> tuple[Backend, dict[str, Array]]:
        return backends.load("numpy"), _allocate(np.zeros, shapes)

    def run(
        self, problem: Problem, mask_arrays: MaskArrays, shapes: Shapes, inputs: dict[str, Array] | None
    ) -> dict[str, Array]:
        ops, arguments = problem.ops, _marshal(problem, mask_arrays)
        threads = thread_counter(_native, ops)()
        if inputs is None:
            outputs = _allocate(np.empty, shapes)
            # The log-sum-exp is filled by execution plans alone.
            _native.forward(*arguments, [outputs.get(name) for name in FILLED], threads)
            return outputs
        memory = {name: ops.memory(x) for name, x in inputs.items()}
        memory |= {name: np.ascontiguousarray(x) for name, x in memory.items() if name not in _ANY_STRIDES}
        gradients = {name: self.zeros(name, *shape) for name, shape in shapes.items()}
        _native.backward(
            *arguments,
            [memory.get(name) for name in BACKWARD_INPUTS],
            ops.dtype(inputs["grad_out"]),  # its memory may be the bits of half-precision numbers
            [gradients.get(name) for name in GRADIENTS],
            threads,
        )
        return gradients

    def in_framework(self, problem: Problem, x: Array, dtype: str) -> Array:
        return problem.ops.from_memory(x, dtype, problem.value)


def _allocate(make: Callable[..., HostArray], shapes: Shapes) -> dict[str, HostArray]:
    return {name: allocate_aligned(make, shape, STORED.get(dtype, dtype)) for name, (shape, dtype) in shapes.items()}


def _marshal(problem: Problem, mask_arrays: MaskArrays) -> tuple[tuple[Any, ...], tuple[HostArray | None, ...]]:
    """Return the arguments of the native module: the score's parameters, and the memory of the arrays in `ORDER`."""
    score, arrays = score_spec(problem, mask_arrays)
    # Arrays of a mask may be NumPy's in every framework.
    numpy_names = {name for name, x in mask_arrays.items() if isinstance(x, np.ndarray)}
    memory = {name: x if name in numpy_names else problem.ops.memory(x) for name, x in arrays.items()}
    # The module requires bounds in C order. Each query reads another part of a relative bias, fastest in C order.
    in_c_order = ("start", "stop", *(("bias",) if problem.has_relative_bias else ()))
    memory |= {name: np.ascontiguousarray(memory[name]) for name in in_c_order if name in memory}
    if "mask" in memory:
        memory["mask"] = memory["mask"].view(np.uint8)
    for name in ("query_ids", "key_ids"):
        if name in memory:
            memory[name] = memory[name].astype(np.int64, copy=False)
    # The module requires a vector w_v without gaps.
    if (w_v := memory.get("w_v")) is not None and w_v.strides[-1] != w_v.itemsize:
        memory["w_v"] = np.ascontiguousarray(w_v)
    return score, tuple(map(memory.get, ORDER))


def _key_range(problem: Problem, tiles: TilePlan, first: int, last: int) -> tuple[int, int]:
    """Return the range of keys outside which the intervals mask the rows [first, last)."""
    if tiles.interval_set is None:
        return 0, problem.score_shape.key_len
    start, stop = (x[..., first:last] for x in (tiles.interval_set.start, tiles.interval_set.stop))
    has_keys = stop > start
    return (int(start[has_keys].min()), int(stop[has_keys].max())) if has_keys.any() else (0, 0)
