"""One call of `attend` on a rank, as all ways of exchanging rows share it: parts, their problems and their gradients.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- What is moved of the keys is their lowered form, which their owner computes once, so every score is moved alike.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscore.backends.base import accumulator
from attnscore.base.layout import ScoreShape
from attnscore.kernels import Kernel, tiling
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, split
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.pairs import Range
from attnscore.parallel.parts import (
    SOFTMAX_ALONE,
    counts_of,
    dropout_of,
    finished,
    kernel_of,
    problem_of_part,
    state_of,
)
from attnscore.parallel.plan import Exchange
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import Arrays, Ranks, add_rows, copy_rows, cut, paired, positions_first
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import COUNTED, in_whole, joinable

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Part(NamedTuple):
    """Some queries of a rank against some keys: all that a kernel needs but the arrays."""

    rows: Shard
    cols: Shard
    mask: Mask | None
    tiles: TilePlan
    kernel: Kernel


class Saved(NamedTuple):
    """What a forward keeps for its backward, in addition to the operands and the result."""

    parts: dict[Any, Part]
    fetched: dict[str, Tensor]
    result: Result | None = None
    """Result of the queries that the rank has computed, where these are not its own."""


@dataclass(frozen=True, eq=False)
class ShardedCall(ABC):
    """One call of attention, of which this rank computes the queries that it holds."""

    ranks: Ranks
    plan: Exchange
    problem: Problem
    """Of the rank's own arrays, but for the mask, which is that of the whole sequence, and the keys of the bias."""
    kernel: str
    bias_has_queries: bool = False
    """Whether each rank has the bias of its own queries, not one for all."""

    @cached_property
    def whole(self) -> ScoreShape:
        """Shape of the scores of the whole sequence."""
        return dataclasses.replace(self.problem.score_shape, query_len=self.queries.length, key_len=self.keys.length)

    @property
    def queries(self) -> Shard:
        """The queries that this rank holds."""
        return self.plan.queries[self.ranks.rank]

    @property
    def keys(self) -> Shard:
        """The keys that this rank holds."""
        return self.plan.keys[self.ranks.rank]

    @cached_property
    def has_relative_bias(self) -> bool:
        """Whether the bias has a number for each key - query."""
        return self.problem.bias is not None and self.whole.is_relative(tuple(self.problem.bias.shape))

    @property
    def statistics(self) -> tuple[str, ...]:
        """Statistics of the parts."""
        return self.problem.statistics

    @property
    def sums(self) -> torch.dtype:
        """Dtype of sums."""
        return _DTYPES[accumulator(self.problem.dtype)]

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the operands with rows, "query" and "key" (the value too)."""
        form = self.problem.form
        query, key = ([name for name in form.arrays() if form.role(name) == role] for role in ("query", "key"))
        return {"query": (*query,), "key": (*key, "value")}

    @abstractmethod
    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        """Return the result of the rank's queries, and what the backward needs."""

    @abstractmethod
    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the rank's gradients of the operands in `requested`, in the dtype of sums."""

    # ---- parts

    def part(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Problem]:
        """Return a part, and its problem over `arrays`, operands of the rank's queries and of the keys `cols`."""
        mask = self.mask_of(rows, cols)
        problem = self.problem_of(rows, cols, mask, arrays)
        return Part(rows, cols, mask, tiling.plan(problem), kernel_of(self.kernel, problem)), problem

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        """Return the mask of a part."""
        return shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)

    def problem_of(self, rows: Shard, cols: Shard, mask: Mask | None, arrays: Arrays) -> Problem:
        """Return the problem of a part over `arrays`, as in `part`."""
        problem, at = self.problem, self.queries.locate(rows)
        shape = dataclasses.replace(self.whole, query_len=len(rows), key_len=len(cols))
        given = {name: cut(x, at) if name in self.names["query"] else x for name, x in arrays.items()}
        dropout: Any = problem.dropout
        if dropout is not None and (len(rows), len(cols)) != (self.queries.length, self.keys.length):
            dropout = dropout_of(problem, self.whole, *(x.positions(given["value"]) for x in (rows, cols)))
        return problem_of_part(
            problem, shape, given, mask=mask, dropout=dropout, sink=given.get("sink"), statistics=self.statistics,
            bias=None if problem.bias is None else self._bias(given["bias"], rows, cols),
        )  # fmt: skip

    def _bias(self, bias: Tensor, rows: Shard, cols: Shard) -> Tensor:
        """Return the bias of a part, from one of the rank's queries and all keys."""
        for axis, ranges in self._bias_ranges(bias, rows, cols):
            bias = cut(bias, ranges, axis)
        return bias

    def _add_bias(self, whole: Tensor, rows: Shard, cols: Shard, grad: Tensor) -> None:
        """Add the gradient of a part's bias to that of the bias of all keys."""
        at = [torch.arange(n, device=grad.device) for n in whole.shape[-2:]]
        for axis, ranges in self._bias_ranges(whole, rows, cols):
            at[axis] = cut(at[axis], ranges, 0)
        if all(len(index) == n for index, n in zip(at, whole.shape[-2:], strict=True)):
            whole.add_(grad)
        else:
            whole[..., at[0][:, None], at[1]] += grad

    def _bias_ranges(self, bias: Tensor, rows: Shard, cols: Shard) -> list[tuple[int, tuple[Range, ...]]]:
        """Return the axes of a bias that a part has only some entries of, and which."""
        if self.whole.is_relative(tuple(bias.shape)):
            # One number for each key - query, which begins at that of the last query and the first key.
            ((start, stop),), ((first, last),) = rows.ranges or ((0, 1),), cols.ranges or ((0, 0),)
            begin = first - stop + self.whole.query_len
            return [(-1, ((begin, begin + last - first + stop - start - 1),))]
        of_queries = [(-2, self.queries.locate(rows))] if self.bias_has_queries else []
        return of_queries + ([(-1, cols.ranges)] if bias.shape[-1] > 1 else [])

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        """Return why a call cannot run in this way; the problem has the mask and the bias of the whole sequence."""
        return ()

    def run(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Result]:
        """Return a part, and the result of its forward."""
        part, problem = self.part(rows, cols, arrays)
        result = part.kernel.forward(problem, part.tiles)
        numbers = in_whole(problem.ops, result.statistics, lambda: cols.positions(result.out))
        return part, dataclasses.replace(result, statistics=numbers)

    def add_gradients(
        self, totals: dict[str, Tensor], part: Part, problem: Problem, result: Result, grads: RowGradients,
        requested: frozenset[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Add the gradients of a part's operands to those of the rank's, and return the gradients of the part's keys.

        `result` and `grads` are those of all queries of the rank. All gradients are in the dtype of sums, on every
        rank, whichever kernel computes them.
        """
        at = self.queries.locate(part.rows)
        of_part = result_of({name: cut(x, at) for name, x in arrays_of(result).items()})
        incoming = (None if x is None else cut(x, at) for x in (grads.out, grads.log_sum_exp, grads.entropy))
        names = requested & frozenset(problem.operands())
        gradients = part.kernel.backward(problem, part.tiles, of_part, RowGradients(*incoming), names)
        gradients = {name: gradients[name].to(self.sums) for name in names}
        for name in names - {*self.names["key"]}:
            if name == "bias":
                self._add_bias(totals[name], part.rows, part.cols, gradients[name])
            elif name in self.names["query"]:
                add_rows(positions_first(totals[name]), at, positions_first(gradients[name]))
            else:
                totals[name].add_(gradients[name])
        return {name: gradients[name] for name in self.names["key"] if name in names}

    def start_of_gradients(self, operands: Arrays, requested: frozenset[str]) -> dict[str, Tensor]:
        """Return zeros for the gradients that `add_gradients` sums: all but those of the keys."""
        return self.zeros_like(operands, requested - {*self.names["key"]})

    def zeros_like(self, operands: Arrays, names: Iterable[str]) -> dict[str, Tensor]:
        """Return zeros with the shapes of these operands, in the dtype of sums."""
        return {name: torch.zeros_like(operands[name], dtype=self.sums) for name in names}

    def keys_in(self, arrays: Arrays) -> dict[str, Tensor]:
        """Return the arrays of the keys and values."""
        return {name: arrays[name] for name in self.names["key"]}


class MergedCall(ShardedCall):
    """A call of which the results over some keys after others are merged, by their log-sum-exp."""

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        found = []
        if problem.normalizer is not None:
            found.append(SOFTMAX_ALONE)
        if problem.bias is not None and whole.is_relative(tuple(problem.bias.shape)):
            found.append("a bias by relative position")
        if moments := [name for name in COUNTED if name in problem.statistics]:
            first = np.zeros(0, np.int64)
            mask = problem.mask
            rest = None if mask is None else split(mask, whole.query_len, whole.key_len, whole.batch, first)[1]
            if rest is not None or problem.bias is not None:
                found.append(f"{' and '.join(moments)} under a bias, or a mask that is no intervals of keys")
        return tuple(found)

    @property
    def statistics(self) -> tuple[str, ...]:
        return joinable(self.problem.statistics)

    def operands_with(self, operands: Arrays, keys: Arrays) -> dict[str, Tensor]:
        """Return operands over some keys without the sink; the output has the dtype of the values, that of sums.

        A kernel that differentiates a forward of its own, over the keys of a part alone, takes no others.
        """
        found = {name: x for name, x in operands.items() if name != "sink"} | {**keys}
        return {**found, "value": found["value"].to(self.sums)}

    def merged(self, operands: Arrays, parts: Iterable[tuple[Part, Result]]) -> Result:
        """Return the result of the rank's queries, from those of parts over disjoint keys, without the sink.

        The output is merged in its memory: ``out = w out + v out_part``, with w and v the shares of the two in the
        softmax, of which the state has the total in place of the output.
        """
        ops, rows, value = self.problem.ops, self.problem.score_shape.rows, operands["value"]
        state = online_softmax.start(ops, rows, 1, value, accumulator(self.problem.dtype), self.statistics)
        out = value.new_zeros((*rows, self.problem.layout.value_dim), dtype=self.sums)
        for part, result in parts:
            at, count = self.queries.locate(part.rows), None
            if {*COUNTED} & {*self.statistics}:
                count = counts_of(ops, self.whole, len(part.cols), part.tiles.interval_set, result.log_denom)
            before, new = rows_at(state, at), state_of(ops, result, count)
            both = online_softmax.merge(ops, before, new)
            total, safe = torch.where(both.total == 0, 1.0, both.total), online_softmax.safe_max(ops, both.max)
            w, v = (positions_first(torch.exp(x.max - safe) * x.total / total) for x in (before, new))
            to, of_part = positions_first(out), positions_first(result.out)
            for place, source in paired(at, ((0, len(part.rows)),)):
                to[place].mul_(w[source]).addcmul_(of_part[source], v[source])
            write_rows(state, at, both)
        sink = operands.get("sink")
        result = finished(ops, state, sink, self.problem.statistics)
        # Without a sink the keys have the whole of the softmax.
        out = out if sink is None else out.mul_(result.out)
        return dataclasses.replace(result, out=out.to(value.dtype))


def arrays_of(result: Result) -> dict[str, Tensor]:
    """Return the arrays of a result by name."""
    return {"out": result.out, "log_denom": result.log_denom, "row_max": result.row_max, **result.statistics}


def result_of(arrays: Arrays) -> Result:
    """Return the result of these arrays: the inverse of `arrays_of`."""
    statistics = {**arrays}
    return Result(statistics.pop("out"), statistics.pop("row_max"), statistics.pop("log_denom"), statistics)


def rows_at(state: RowState, at: Sequence[Range]) -> RowState:
    """Return the state of the queries in ranges of the axis of queries: views, where that is one range."""
    sums = {name: tuple(cut(x, at) for x in arrays) for name, arrays in state.sums.items()}
    return RowState(cut(state.max, at), cut(state.total, at), cut(state.out, at), sums)


def write_rows(state: RowState, at: Sequence[Range], rows: RowState) -> None:
    """Write the state of the queries in these ranges."""
    for to, x in zip(_arrays_of(state), _arrays_of(rows), strict=True):
        copy_rows(positions_first(to), at, positions_first(x))


def _arrays_of(state: RowState) -> list[Tensor]:
    return [state.max, state.total, state.out, *(x for arrays in state.sums.values() for x in arrays)]
