"""One call of `attend` on a rank, as all ways of exchanging rows share it: parts, their problems and their gradients.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- What is moved of the keys is their lowered form, which their owner computes once, so every score is moved alike.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscore import kernels
from attnscore.backends.base import accumulator
from attnscore.base.layout import ScoreShape
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import Kernel, tiled, tiling
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, split
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.merging import COUNTED, SOFTMAX_ALONE
from attnscore.parallel.pairs import Range
from attnscore.parallel.plan import Exchange
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import Arrays, Ranks, add_rows, copy_rows, cut, positions_first
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.dropout import PairDropout
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients

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

    parts: tuple[Part, ...]
    fetched: dict[str, Tensor]


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
        """Names of the operands by role: "query", "key" (the value too), "shared"; bias and sink have none of these."""
        form = self.problem.form
        found = {role: tuple(name for name in form.arrays() if form.role(name) == role) for role in ("query", "shared")}
        return {**found, "key": (*(name for name in form.arrays() if form.role(name) == "key"), "value")}

    @abstractmethod
    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        """Return the result of the rank's queries, and what the backward needs."""

    @abstractmethod
    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of the operands in `wanted`, in the dtype of sums; shared ones are the rank's share."""

    # ---- parts

    def part(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Problem]:
        """Return a part, and its problem over `arrays`, operands of the rank's queries and of the keys `cols`."""
        mask = self.mask_of(rows, cols)
        problem = self._problem(rows, cols, mask, arrays)
        return Part(rows, cols, mask, tiling.plan(problem), self.chosen(problem)), problem

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        """Return the mask of a part."""
        return shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)

    def chosen(self, problem: Problem) -> Kernel:
        """Return the kernel that runs a problem."""
        kernel = kernels.choose(self.kernel, problem)
        if not kernel.has_vjp:
            raise KernelUnavailable(message("kernel", "one that takes lowered keys", self.kernel))
        return kernel

    def problem_of(self, part: Part, arrays: Arrays) -> Problem:
        """Return the problem of a part over `arrays`, as in `part`."""
        return self._problem(part.rows, part.cols, part.mask, arrays)

    def _problem(self, rows: Shard, cols: Shard, mask: Mask | None, arrays: Arrays) -> Problem:
        problem, at = self.problem, self.queries.locate(rows)
        shape = dataclasses.replace(self.whole, query_len=len(rows), key_len=len(cols))
        given = {name: cut(x, at) if name in self.names["query"] else x for name, x in arrays.items()}
        form = problem.form.with_arrays({name: given[name] for name in problem.form.arrays()})
        dropout = problem.dropout
        if dropout is not None and (len(rows), len(cols)) != (self.queries.length, self.keys.length):
            # Dropout is by the positions in the whole sequence.
            like = given["value"]
            row = dropouts.rows_of_matrices(problem.ops, self.whole, like) + rows.positions(like)[:, None]
            dropout = PairDropout(dropout.probability, dropout.seed, row, cols.positions(like)[None])
        return dataclasses.replace(
            problem,
            layout=dataclasses.replace(problem.layout, score_shape=shape), statistics=self.statistics,
            query=form.query, key=form.key, value=given["value"], form=form, mask=mask,
            bias=None if problem.bias is None else self._bias(given["bias"], rows, cols), sink=given.get("sink"),
            dropout=dropout,
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
        return part, part.kernel.forward(problem, part.tiles)

    def gradients_of(
        self, part: Part, arrays: Arrays, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of a part's operands, from the result and the gradients of all queries of the rank.

        They are in the dtype of sums on every rank, whichever kernel computes them.
        """
        at = self.queries.locate(part.rows)
        own = map_rows(lambda x: cut(x, at), result)
        given = (grads.out, grads.log_sum_exp, grads.entropy)
        incoming = RowGradients(*(None if x is None else cut(x, at) for x in given))
        problem = self.problem_of(part, arrays)
        names = wanted & frozenset(tiled.operands(problem))
        found = part.kernel.backward(problem, part.tiles, own, incoming, names)
        return {name: found[name].to(self.sums) for name in names}

    def add_gradients(self, found: dict[str, Tensor], part: Part, of_part: Arrays) -> None:
        """Add the gradients of a part's operands, but not of its keys, to those of the rank's operands."""
        for name in of_part.keys() - {*self.names["key"]}:
            if name == "bias":
                self._add_bias(found[name], part.rows, part.cols, of_part[name])
            elif name not in found:
                found[name] = of_part[name]
            elif name in self.names["query"]:
                add_rows(positions_first(found[name]), self.queries.locate(part.rows), positions_first(of_part[name]))
            else:
                found[name] = found[name] + of_part[name]

    def zeros_like(self, operands: Arrays, names: Iterable[str]) -> dict[str, Tensor]:
        """Return zeros with the shapes of these operands, in the dtype of sums."""
        return {name: torch.zeros_like(operands[name], dtype=self.sums) for name in names}


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
        # The variance of both parts takes the means of each.
        wanted = self.problem.statistics
        return (*wanted, *(x for x in COUNTED if x not in wanted)) if {*wanted} & {*COUNTED} else wanted

    def rows_of(self, part: Part, result: Result) -> RowState:
        """Return the state of the online softmax after the keys of a part, from its result.

        In place of the output it has the total, so that `finish` returns the share of the keys in the softmax.
        """
        ops, statistics = self.problem.ops, result.statistics
        total = torch.exp(result.log_denom)
        is_empty = result.log_denom == -math.inf
        sums: dict[str, tuple[Tensor, ...]] = {}
        if "entropy" in statistics:
            # Forward: entropy = log_denom - sum_exp_logit / total
            sums["sum_exp_logit"] = (torch.where(is_empty, 0.0, (result.log_denom - statistics["entropy"]) * total),)
        if "sum_sq_weights" in statistics:
            # Forward: sum_sq_weights = squares / total / total
            sums["squares"] = (statistics["sum_sq_weights"] * total * total,)
        if "mean_score" in statistics:
            count = self._counts(part, total)
            zero = torch.zeros_like(count)
            sums["moments"] = (count, statistics["mean_score"], zero, statistics["var_score"] * count)
        maximum = ops.where(is_empty, -math.inf, result.row_max)
        return RowState(maximum, total, total, sums)

    def _counts(self, part: Part, like: Tensor) -> Tensor:
        """Return the number of unmasked keys of each query, which are intervals."""
        ops, intervals = self.problem.ops, part.tiles.interval_set
        if intervals is None:
            return torch.full_like(like, len(part.cols))
        counts = np.maximum(intervals.stop - intervals.start, 0).sum(0)[..., None]
        found: Tensor = self.whole.batch_to_canonical(ops, ops.asarray(counts, like))
        return found.to(like.dtype).expand(like.shape).contiguous()

    def finish(self, state: RowState, operands: Arrays) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return what `online_softmax.finish` does, from the state after all keys but the sink."""
        sink = operands.get("sink")
        sink = None if sink is None else sink.reshape(*sink.shape, 1, 1).to(self.sums)
        return online_softmax.finish(self.problem.ops, state, sink, self.problem.statistics)


def map_rows(change: Callable[..., Tensor], *results: Result) -> Result:
    """Return the result of which each array is ``change(*arrays)`` of those of the results."""
    names = results[0].statistics
    return Result(
        out=change(*(result.out for result in results)),
        row_max=change(*(result.row_max for result in results)),
        log_denom=change(*(result.log_denom for result in results)),
        statistics={name: change(*(result.statistics[name] for result in results)) for name in names},
    )


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
