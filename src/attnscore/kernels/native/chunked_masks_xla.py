"""Evaluated masks in a traced program: a loop over chunks of queries.

The staged counterpart of ``chunked_masks``: each chunk is a custom call on some queries, with an array of booleans that
the program computes for them. Only the booleans of one chunk are in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce
from typing import Any

from attnscore.backends.base import Array
from attnscore.kernels.native.chunked_masks import chunk_size
from attnscore.kernels.native.results import STATISTICS
from attnscore.masks import And, Mask, lowering
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import Role

MaskArrays = dict[str, Array]
"""Arrays of the mask by the module's names: start, stop, mask, query_ids, key_ids."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A problem in chunks of queries; the start of a chunk may be traced."""

    problem: Problem
    mask_arrays: MaskArrays
    """Arrays of the parts of the mask that the module reads without evaluation."""
    mask: Mask
    """Part of the mask that has to be evaluated."""

    @staticmethod
    def of(problem: Problem, mask_arrays: MaskArrays, parts: list[Mask]) -> Loop:
        return Loop(problem, mask_arrays, reduce(And, parts))

    def over(self, visit: Callable[[dict[str, Array], Any, int], dict[str, Array]], carry: dict[str, Array]) -> Any:
        """Fold ``carry = visit(carry, start, size)`` over the chunks."""
        ops, length = self.problem.ops, self.problem.score_shape.query_len
        score_shape, value = self.problem.score_shape, self.problem.value
        count = chunk_size(self.problem, lowering.evaluated_shape(ops, score_shape, value, self.mask))
        full, tail = divmod(length, max(1, count))
        carry = ops.loop(full, lambda i, found: visit(found, i * count, count), carry)
        return visit(carry, full * count, tail) if tail else carry

    def part(self, start: Any, size: int) -> tuple[Problem, MaskArrays]:
        """Return the problem of a chunk, and the arrays of its mask."""
        problem, ops = self.problem, self.problem.ops

        def cut(x: Array, role: Role) -> Array:
            return self.rows(x, start, size) if role == "query" else x

        score_shape = dataclasses.replace(problem.score_shape, query_len=size)
        # `query` stays: the lowered form has it, and outside a gradient hook it may belong to another tape.
        part = dataclasses.replace(
            problem,
            layout=dataclasses.replace(problem.layout, score_shape=score_shape),
            form=problem.form.part(cut),
            bias=None if problem.bias is None else self.bias(problem.bias, start, size),
            mask=None,
        )
        mask_arrays = {
            name: x if name == "key_ids" else ops.slice_axis(x, -1, start, size) for name, x in self.mask_arrays.items()
        }
        evaluated = lowering.evaluate(ops, problem.score_shape, problem.value, self.mask, (start, size))
        missing = len(score_shape.rows) + 1 - len(evaluated.shape)
        return part, mask_arrays | {"mask": ops.reshape(evaluated, (*(1,) * missing, *evaluated.shape))}

    def rows(self, x: Array, start: Any, size: int) -> Array:
        """Return the rows of a chunk; an array that is broadcast over rows stays as it is."""
        return x if x.shape[-2] == 1 else self.problem.ops.slice_axis(x, -2, start, size)

    def bias(self, x: Array, start: Any, size: int) -> Array:
        """Return the bias of a chunk."""
        if not self.problem.has_relative_bias:
            return self.rows(x, start, size)
        at, length = self.diagonals(start, size)
        return self.problem.ops.slice_axis(x, -1, at, length)

    def diagonals(self, start: Any, size: int) -> tuple[Any, int]:
        """Return where a relative bias of a chunk begins, and its length."""
        score_shape = self.problem.score_shape
        return score_shape.query_len - start - size, size + score_shape.key_len - 1


def forward(loop: Loop, call: Callable[[Problem, MaskArrays], Result]) -> Result:
    """Run `call` on each chunk."""
    problem, ops = loop.problem, loop.problem.ops
    rows = (*problem.score_shape.rows, 1)
    wanted = ("row_max", "log_denom", *(name for name in STATISTICS if name in problem.statistics))
    whole = {name: ops.zeros(rows, problem.value, problem.accumulator) for name in wanted}
    whole["out"] = ops.zeros((*rows[:-1], problem.layout.value_dim), problem.value, problem.dtype)
    if problem.matrix is not None:
        whole["matrix"] = ops.zeros((*rows[:-1], problem.score_shape.key_len), problem.value, problem.accumulator)

    def visit(carry: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        found = call(*loop.part(start, size))
        parts = {"out": found.out, "row_max": found.row_max, "log_denom": found.log_denom, "matrix": found.matrix}
        parts |= found.statistics
        return {name: ops.add_at(x, -2, start, parts[name]) for name, x in carry.items()}

    found = loop.over(visit, whole)
    matrix = found.pop("matrix", None)
    return Result(found.pop("out"), found.pop("row_max"), found.pop("log_denom"), found, matrix)


def backward(
    loop: Loop,
    result: Result,
    grads: RowGradients,
    wanted: frozenset[str],
    call: Callable[[Problem, MaskArrays, Result, RowGradients], dict[str, Array]],
) -> dict[str, Array]:
    """Run `call` on each chunk, and sum the gradients."""
    problem, ops = loop.problem, loop.problem.ops
    arrays = {name: x for name, x in problem.operands().items() if name in wanted}
    roles = {name: problem.form.role(name) for name in problem.form.arrays()}
    of_rows = {name for name, x in arrays.items() if (name == "bias" or roles.get(name) == "query") and x.shape[-2] > 1}
    is_relative = problem.has_relative_bias
    whole = {name: ops.zeros(tuple(x.shape), result.row_max, problem.accumulator) for name, x in arrays.items()}

    def visit(carry: dict[str, Array], start: Any, size: int) -> dict[str, Array]:
        def cut(x: Array | None) -> Any:
            return None if x is None else loop.rows(x, start, size)

        statistics = {name: cut(x) for name, x in result.statistics.items()}
        known = Result(cut(result.out), cut(result.row_max), cut(result.log_denom), statistics, cut(result.matrix))
        incoming = RowGradients(cut(grads.out), cut(grads.log_sum_exp), cut(grads.entropy), cut(grads.matrix))
        found = call(*loop.part(start, size), known, incoming)

        def added(name: str, x: Array) -> Array:
            if name == "bias" and is_relative:
                return ops.add_at(x, -1, loop.diagonals(start, size)[0], found[name])
            return ops.add_at(x, -2, start, found[name]) if name in of_rows else x + found[name]

        return {name: added(name, x) for name, x in carry.items()}

    done: dict[str, Array] = loop.over(visit, whole)
    return done
