"""One call of `attend` on a rank: the modes in which keys and queries of several ranks meet, forward and backward.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- Ranks send the lowered form of the keys, which their owner computes once, so all scores share the exchange.
- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from attnscore.backends.base import accumulator
from attnscore.base.layout import ScoreShape
from attnscore.kernels import Kernel, tiling
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Dense, Mask, ValidLens, split_intervals
from attnscore.masks.base import all_of
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.pairs import Range
from attnscore.parallel.parts import (
    SOFTMAX_ALONE,
    arrays_of,
    counts_of,
    dropout_of,
    finish,
    kernel_of,
    problem_of_part,
    result_of,
    state_of,
)
from attnscore.parallel.plan import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD_KEYS,
    Exchange,
    heads_attend_differently,
    in_blocks,
)
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import (
    Arrays,
    Ranks,
    Transfers,
    add_rows,
    copy_rows,
    pair_slices,
    positions_first,
    slice_ranges,
)
from attnscore.problem import online_softmax
from attnscore.problem.online_softmax import RowState
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import COUNTED, needs_counts, statistics_to_join, with_global_keys
from attnscore.scores.forms import PARAMETER

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Part(NamedTuple):
    """Some queries of a rank against some keys: all that a kernel needs but the arrays."""

    rows: Shard
    cols: Shard
    mask: Mask | None
    tiles: TilePlan
    kernel: Kernel


class Saved(NamedTuple):
    """Arrays and parts that a forward saves for its backward, in addition to the operands and the result."""

    parts: dict[Any, Part]
    fetched: dict[str, Tensor]
    result: Result | None = None
    """Result of the rank's heads over all queries; None where the rank computes its own queries."""


@dataclass(frozen=True, eq=False)
class ShardedCall(ABC):
    """One call of attention over all ranks; this rank computes the queries that it holds."""

    ranks: Ranks
    plan: Exchange
    problem: Problem
    """Problem of the rank's own rows, with the mask of the whole sequence, and a bias over all keys."""
    kernel: str
    bias_has_queries: bool = False
    """Whether each rank has the bias of its own queries, not one bias for all."""

    @cached_property
    def sequence_shape(self) -> ScoreShape:
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
        """Whether the bias has a number for each relative offset, key minus query."""
        return self.problem.bias is not None and self.sequence_shape.is_relative(tuple(self.problem.bias.shape))

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
        """Return the result of the rank's queries, and the arrays that the backward needs."""

    @abstractmethod
    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the rank's gradients of the operands in `requested`, in the dtype of sums."""

    # ---- parts

    def make_part(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Problem]:
        """Return a part, and its problem over `arrays`, operands of the rank's queries and of the keys `cols`."""
        mask = self.mask_of(rows, cols)
        problem = self.problem_of(rows, cols, mask, arrays)
        return Part(rows, cols, mask, tiling.plan(problem), kernel_of(self.kernel, problem)), problem

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        """Return the mask of a part."""
        return shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)

    def problem_of(self, rows: Shard, cols: Shard, mask: Mask | None, arrays: Arrays) -> Problem:
        """Return the problem of a part over `arrays`, as in `make_part`."""
        problem, ranges = self.problem, self.queries.locate(rows)
        shape = dataclasses.replace(self.sequence_shape, query_len=len(rows), key_len=len(cols))
        arrays = {name: slice_ranges(x, ranges) if name in self.names["query"] else x for name, x in arrays.items()}
        dropout: Any = problem.dropout
        if dropout is not None and (len(rows), len(cols)) != (self.queries.length, self.keys.length):
            dropout = dropout_of(problem, self.sequence_shape, *(x.positions(arrays["value"]) for x in (rows, cols)))
        return problem_of_part(
            problem, shape, arrays, mask=mask, dropout=dropout, sink=arrays.get("sink"), statistics=self.statistics,
            bias=None if problem.bias is None else self._bias_of_part(arrays["bias"], rows, cols),
        )  # fmt: skip

    def _bias_of_part(self, bias: Tensor, rows: Shard, cols: Shard) -> Tensor:
        """Return the bias of a part, sliced from the bias of the rank's queries and all keys."""
        for axis, ranges in self._bias_ranges(bias, rows, cols):
            bias = slice_ranges(bias, ranges, axis)
        return bias

    def _add_bias(self, total: Tensor, rows: Shard, cols: Shard, grad: Tensor) -> None:
        """Add the gradient of a part's bias to `total`, the gradient of the bias of all keys."""
        indices = [torch.arange(n, device=grad.device) for n in total.shape[-2:]]
        for axis, ranges in self._bias_ranges(total, rows, cols):
            indices[axis] = slice_ranges(indices[axis], ranges, 0)
        if all(len(index) == n for index, n in zip(indices, total.shape[-2:], strict=True)):
            total.add_(grad)
        else:
            total[..., indices[0][:, None], indices[1]] += grad

    def _bias_ranges(self, bias: Tensor, rows: Shard, cols: Shard) -> list[tuple[int, tuple[Range, ...]]]:
        """Return the axes on which a part slices a bias, each with the ranges of the slice."""
        if self.sequence_shape.is_relative(tuple(bias.shape)):
            # One number for each relative offset, key minus query, in rising order.
            ((start, stop),), ((first, last),) = rows.ranges or ((0, 1),), cols.ranges or ((0, 0),)
            begin = first - stop + self.sequence_shape.query_len
            return [(-1, ((begin, begin + last - first + stop - start - 1),))]
        query_ranges = [(-2, self.queries.locate(rows))] if self.bias_has_queries else []
        return query_ranges + ([(-1, cols.ranges)] if bias.shape[-1] > 1 else [])

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        """Return why a call cannot run in this mode; the problem has the mask and the bias of the whole sequence."""
        return ()

    def run(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Result]:
        """Return a part, and the result of its forward."""
        part, problem = self.make_part(rows, cols, arrays)
        result = part.kernel.forward(problem, part.tiles)
        numbers = with_global_keys(problem.ops, result.statistics, lambda: cols.positions(result.out))
        return part, dataclasses.replace(result, statistics=numbers)

    def add_gradients(
        self, totals: dict[str, Tensor], part: Part, problem: Problem, result: Result, grads: RowGradients,
        requested: frozenset[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Add the gradients of a part's operands to `totals`, and return the gradients of the part's keys.

        `result` and `grads` cover all queries of the rank. All gradients are in the dtype of sums, on every
        rank, whichever kernel computes them.
        """
        ranges = self.queries.locate(part.rows)
        part_result = result_of({name: slice_ranges(x, ranges) for name, x in arrays_of(result).items()})
        row_grads = (grads.out, grads.log_sum_exp, grads.entropy)
        part_grads = (None if x is None else slice_ranges(x, ranges) for x in row_grads)
        names = requested & frozenset(problem.operands())
        gradients = part.kernel.backward(problem, part.tiles, part_result, RowGradients(*part_grads), names)
        gradients = {name: gradients[name].to(self.sums) for name in names}
        for name in names - {*self.names["key"]}:
            if name == "bias":
                self._add_bias(totals[name], part.rows, part.cols, gradients[name])
            elif name not in totals:
                totals[name] = gradients[name]
            elif name in self.names["query"]:
                add_rows(positions_first(totals[name]), ranges, positions_first(gradients[name]))
            else:
                totals[name].add_(gradients[name])
        return {name: gradients[name] for name in self.names["key"] if name in names}

    def start_of_gradients(self, operands: Arrays, requested: frozenset[str]) -> dict[str, Tensor]:
        """Return zeros for gradients that all parts share; query gradients begin with the first part's instead."""
        return self.zeros_like(operands, requested - {*self.names["key"], *self.names["query"]})

    def zeros_like(self, operands: Arrays, names: Iterable[str]) -> dict[str, Tensor]:
        """Return zeros with the shapes of these operands, in the dtype of sums."""
        return {name: torch.zeros_like(operands[name], dtype=self.sums) for name in names}

    def keys_in(self, arrays: Arrays) -> dict[str, Tensor]:
        """Return the arrays of the keys and values."""
        return {name: arrays[name] for name in self.names["key"]}


class MergedCall(ShardedCall):
    """A call that computes results over disjoint keys and merges them by their log-sum-exp."""

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        reasons = []
        if problem.normalizer is not None:
            reasons.append(SOFTMAX_ALONE)
        if problem.bias is not None and sequence_shape.is_relative(tuple(problem.bias.shape)):
            reasons.append("a bias by relative position")
        if moments := [name for name in COUNTED if name in problem.statistics]:
            mask, no_queries, shape = problem.mask, np.zeros(0, np.int64), sequence_shape
            sizes = (shape.query_len, shape.key_len, shape.batch)
            remaining_mask = None if mask is None else split_intervals(mask, *sizes, no_queries)[1]
            if remaining_mask is not None or problem.bias is not None:
                reasons.append(f"{' and '.join(moments)} under a bias, or a mask that is no intervals of keys")
        return tuple(reasons)

    @property
    def statistics(self) -> tuple[str, ...]:
        return statistics_to_join(self.problem.statistics)

    def operands_with(self, operands: Arrays, keys: Arrays) -> dict[str, Tensor]:
        """Return operands over some keys, without the sink; the values, and so the output, are in the dtype of sums."""
        arrays = {name: x for name, x in operands.items() if name != "sink"} | {**keys}
        return {**arrays, "value": arrays["value"].to(self.sums)}

    def merge(self, operands: Arrays, parts: Iterable[tuple[Part, Result]]) -> Result:
        """Return the result of the rank's queries, merged from parts over disjoint keys that exclude the sink.

        The output is merged in place: ``out = w out + v out_part``, with w and v the shares of the two in the softmax.
        The state has the total in place of the output.
        """
        ops, rows, value = self.problem.ops, self.problem.score_shape.rows, operands["value"]
        state = online_softmax.start(ops, rows, 1, value, accumulator(self.problem.dtype), self.statistics)
        out = value.new_zeros((*rows, self.problem.layout.value_dim), dtype=self.sums)
        for part, result in parts:
            ranges, count = self.queries.locate(part.rows), None
            if needs_counts(self.statistics):
                count = counts_of(ops, self.sequence_shape, len(part.cols), part.tiles.interval_set, result.log_denom)
            before, new = rows_at(state, ranges), state_of(ops, result, count)
            merged = online_softmax.merge(ops, before, new)
            total, safe = torch.where(merged.total == 0, 1.0, merged.total), online_softmax.safe_max(ops, merged.max)
            w, v = (positions_first(torch.exp(x.max - safe) * x.total / total) for x in (before, new))
            target, part_array = positions_first(out), positions_first(result.out)
            for target_rows, source_rows in pair_slices(ranges, ((0, len(part.rows)),)):
                target[target_rows].mul_(w[source_rows]).addcmul_(part_array[source_rows], v[source_rows])
            for target, part_array in zip(_arrays_of(state), _arrays_of(merged), strict=True):
                copy_rows(positions_first(target), ranges, positions_first(part_array))
        sink = operands.get("sink")
        result = finish(ops, state, sink, self.problem.statistics)
        # Without a sink the keys have the whole softmax.
        out = out if sink is None else out.mul_(result.out)
        return dataclasses.replace(result, out=out.to(value.dtype))


def rows_at(state: RowState, ranges: Sequence[Range]) -> RowState:
    """Return the state of the queries in `ranges`: views where there is one range."""
    sums = {name: tuple(slice_ranges(x, ranges) for x in arrays) for name, arrays in state.sums.items()}
    row_max, total, out = (slice_ranges(x, ranges) for x in (state.max, state.total, state.out))
    return RowState(row_max, total, out, sums)


def _arrays_of(state: RowState) -> list[Tensor]:
    return [state.max, state.total, state.out, *(x for arrays in state.sums.values() for x in arrays)]


class Gather(ShardedCall):
    """Fetch the keys that the rank's queries attend and that other ranks hold.

    Inner queries, which attend keys of this rank alone, are computed while the keys of the outer queries are on their
    way. Backward, gradients of keys return to their owners while the inner queries are computed again.

    The inner part has all queries of the rank with the outer ones masked, so that its arrays have room for the results
    of both.
    """

    @cached_property
    def outer(self) -> Shard:
        """The queries that may attend keys of other ranks; all queries, where these attend all needed keys.

        Each part packs its keys anew: the first of 2 ranks, whose head of a causal sequence attends its own keys alone,
        took 3% longer for two parts than for one. The other rank, which has one part, gains nothing by two.
        """
        outer = Shard.empty(self.queries.length)
        for peer in self.ranks.peers:
            outer |= self.plan.attending(self.ranks.rank, peer)
        # A bias by relative position is cut to one range of queries and one of keys.
        inner_keys = difference(self.plan.needed[self.ranks.rank], self.plan.keys_of(outer))
        is_one = self.has_relative_bias or not len(inner_keys)
        return self.queries if len(outer) and is_one else outer

    @cached_property
    def inner(self) -> Shard:
        """The queries that attend keys of this rank alone."""
        return difference(self.queries, self.outer)

    @cached_property
    def transfers(self) -> Transfers:
        """Keys that this rank fetches, and keys that the other ranks fetch from it."""
        plan, rank = self.plan, self.ranks.rank
        # Also the keys of other ranks that the plan fetches in gaps for inner queries: their owners send them.
        needed = plan.keys_of(self.outer) | difference(plan.needed[rank], plan.keys[rank])
        if self.has_relative_bias and needed.ranges:
            needed = Shard(((needed.ranges[0][0], needed.ranges[-1][1]),), needed.length)
        return dataclasses.replace(Transfers.of(plan.keys, plan.needed, rank), needed=needed)

    @cached_property
    def has_inner_part(self) -> bool:
        """Whether there are inner queries, or no queries."""
        return len(self.inner) > 0 or not len(self.outer)

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask = super().mask_of(rows, cols)
        if not len(self.inner) or not len(self.outer) or rows == self.outer:
            return mask
        key_counts = np.full((self.sequence_shape.batch, len(rows)), len(cols))
        for start, stop in rows.locate(self.outer):
            key_counts[:, start:stop] = 0
        return all_of([*([] if mask is None else [mask]), ValidLens(key_counts)])

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        wait, parts = self.ranks.fetch(self.keys_in(operands), self.transfers), {}
        if self.has_inner_part:
            parts["inner"], result = self.run(self.queries, self.keys, operands)
        fetched = wait()
        if len(self.outer):
            parts["outer"], outer_result = self.run(self.outer, self.transfers.needed, {**operands, **fetched})
            if not self.has_inner_part:
                return outer_result, Saved(parts, fetched)
            outputs, ranges = arrays_of(outer_result), self.queries.locate(self.outer)
            for name, x in arrays_of(result).items():
                copy_rows(positions_first(x), ranges, positions_first(outputs[name]))
        return result, Saved(parts, fetched)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        totals = self.start_of_gradients(operands, requested)
        key_gradients = {x: operands[x][..., :0, :].to(self.sums) for x in self.names["key"] if x in requested}
        if outer := saved.parts.get("outer"):
            problem = self.problem_of(*outer[:3], {**operands, **saved.fetched})
            # The sink's gradient is a sum over all queries, which the inner part has.
            names = requested - {"sink"} if self.has_inner_part else requested
            key_gradients = self.add_gradients(totals, outer, problem, result, grads, names)
        add_returned = self.ranks.give_back(key_gradients, self.transfers)
        if inner := saved.parts.get("inner"):
            outer_query_gradients = {name: totals.pop(name) for name in self.names["query"] if name in totals}
            problem = self.problem_of(*inner[:3], operands)
            totals |= self.add_gradients(totals, inner, problem, result, grads, requested)
            for name, x in outer_query_gradients.items():
                add_rows(positions_first(totals[name]), self.queries.locate(self.outer), positions_first(x))
        add_returned(totals)
        return totals


def difference(shard: Shard, part: Shard) -> Shard:
    """Return the positions of a shard that are not in `part`."""
    ends = [0, *(end for pair in part.ranges for end in pair), part.length]
    return shard & Shard(tuple(zip(ends[::2], ends[1::2], strict=True)), shard.length)


@final
class Ring(MergedCall):
    """Pass the keys of all ranks around: a rank holds its own keys and another rank's, with the next in flight.

    Results over each rank's keys are merged by their log-sum-exp. Backward, gradients travel behind their keys, and end
    at the owner, which adds its own.
    """

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        parts: dict[int, Part] = {}

        def results() -> Iterator[tuple[Part, Result]]:
            for owner, block in self._blocks(operands):
                # Always over the rank's own keys, whose part has the sink in the backward.
                if len(rows := self._attending(owner)) or owner == self.ranks.rank:
                    parts[owner], result = self.run(rows, self.plan.keys[owner], self.operands_with(operands, block))
                    yield parts[owner], result

        return self.merge(operands, results()), Saved(parts, {})

    def _attending(self, owner: int) -> Shard:
        """Return the rank's queries from the first to the last one that attend keys of `owner`: a view of each array.

        Of a causal sequence in heads and tails, half of the queries attend to half of the ranks, and every query costs
        a kernel time. The rank's own keys get all queries.
        """
        if owner == self.ranks.rank:
            return self.queries
        ranges = self.plan.attending(self.ranks.rank, owner).ranges
        return self.queries & Shard(((ranges[0][0], ranges[-1][1]),) if ranges else (), self.queries.length)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        names = [name for name in self.names["key"] if name in requested]
        totals = self.start_of_gradients(operands, requested)
        arriving: list[Tensor] = []
        arrived = self.ranks.post([], [])
        for owner, block in self._blocks(operands):
            key_gradients: dict[str, Tensor] = {}
            if part := saved.parts.get(owner):
                arrays = self.operands_with(operands, block)
                if owner == self.ranks.rank and "sink" in operands:
                    # The sink is one more key, whose gradient is computed once.
                    arrays["sink"] = operands["sink"]
                problem = self.problem_of(*part[:3], arrays)
                key_gradients = self.add_gradients(totals, part, problem, result, grads, requested)
            if owner == self.ranks.rank:
                # The gradients from the other ranks, which the next rank begins to sum, arrive at the end.
                totals |= key_gradients
                continue
            arrived()
            sums = [
                torch.zeros_like(block[name], dtype=self.sums) if grad is None else grad.contiguous()
                for name, grad in [(name, key_gradients.get(name)) for name in names]
            ]
            for x, before in zip(sums, arriving, strict=False):
                x.add_(before)
            arriving, arrived = self._pass_on(sums, owner)
        arrived()
        for name, x in zip(names, arriving, strict=False):
            totals[name].add_(x)
        return totals

    def _blocks(self, operands: Arrays) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the keys of one rank after another, from this one's on, while the next ones are on their way."""
        block, owner = self.keys_in(operands), self.ranks.rank
        for _ in self.ranks.peers:
            next_arrays, wait = self._pass_on([x.contiguous() for x in block.values()], owner)
            yield owner, block
            wait()
            block, owner = dict(zip(block, next_arrays, strict=True)), (owner - 1) % self.ranks.count
        yield owner, block

    def _pass_on(self, arrays: Sequence[Tensor], owner: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Send arrays (..., position, dim) of an owner's keys to the next rank; return the previous owner's arrays."""
        before, after = self.ranks.peers[-1], self.ranks.peers[0]
        count = len(self.plan.keys[(owner - 1) % self.ranks.count])
        arriving = [x.new_empty((*x.shape[:-2], count, x.shape[-1])) for x in arrays]
        return arriving, self.ranks.post([(after, x) for x in arrays], [(before, x) for x in arriving])


@final
class PassQueries(MergedCall):
    """Fetch keys as `Gather` does; backward, send the queries to the owners of the keys, which sum the gradients.

    All sums are over blocks of keys and queries that begin at multiples of their size in the whole sequence, in rising
    order, whoever holds them: results and gradients have the same bits on any number of ranks.
    """

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask, shape = super().mask_of(rows, cols), self.sequence_shape
        if mask is None:
            return None
        intervals, remaining_mask = split_intervals(mask, len(rows), len(cols), shape.batch)
        if intervals is None or not intervals.start[intervals.start < intervals.stop].any():
            return mask
        # With intervals a kernel begins its tiles at the first attended key, which differs between ranks.
        key = np.arange(len(cols))
        pairs = np.logical_and(intervals.start[..., None] <= key, key < intervals.stop[..., None]).max(axis=0)
        # The intervals' batch is the first axis in front of the heads.
        axes = (1,) * (len(shape.lead) - 1 + int(shape.has_heads))
        dense = Dense(pairs.reshape(len(pairs), *axes, *pairs.shape[1:]))
        return dense if remaining_mask is None else dense & remaining_mask

    @cached_property
    def transfers(self) -> Transfers:
        """Whole blocks of keys that this rank fetches, and that the other ranks fetch from it."""
        return Transfers.of(self.plan.keys, self.plan.needed_blocks, self.ranks.rank)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        fetched = self.ranks.fetch(self.keys_in(operands), self.transfers)()
        blocks = self._blocks(self.transfers.needed, {**operands, **fetched}, FORWARD_KEYS)
        return self.merge(operands, (self.run(*block) for block in blocks)), Saved({}, fetched)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        grad_out = grads.out if grads.out is not None else torch.zeros_like(result.out)
        delta = (result.out.to(self.sums) * grad_out.to(self.sums)).sum(-1, keepdim=True)
        delta = delta if grads.log_sum_exp is None else delta - grads.log_sum_exp
        sent = {name: operands[name] for name in self.names["query"]}
        sent |= {"grad_out": grad_out, "row_max": result.row_max, "log_denom": result.log_denom, "delta": delta}
        if "entropy" in self.problem.statistics:
            grad_entropy = grads.entropy if grads.entropy is not None else torch.zeros_like(delta)
            sent |= {"entropy": result.statistics["entropy"], "grad_entropy": grad_entropy}
        passed = self.plan.passed
        wait = self.ranks.fetch(sent, Transfers.of(self.plan.queries, passed, self.ranks.rank))
        # The gradients of the rank's own queries, while the other queries are on their way.
        key_names = {*self.names["key"]}
        totals = self.zeros_like(operands, requested - key_names)
        names = requested - key_names - {"sink"}
        fetched = {**operands, **saved.fetched}
        for block in self._blocks(self.transfers.needed, fetched, BACKWARD_KEYS) if names else ():
            self.add_gradients(totals, *self.make_part(*block), result, grads, names)
        if "sink" in requested:
            no_keys = {name: x[..., :0, :] if name in key_names else x for name, x in operands.items()}
            part = self.make_part(self.queries, Shard.empty(self.keys.length), no_keys)
            self.add_gradients(totals, *part, result, grads, frozenset({"sink"}))
        return totals | self._key_gradients(operands, wait(), passed[self.ranks.rank], requested & key_names)

    def _key_gradients(
        self, operands: Arrays, arrived: Arrays, rows: Shard, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of the rank's keys, from all queries that attend them."""
        owner_call = dataclasses.replace(self, plan=dataclasses.replace(self.plan, queries=(rows,) * self.ranks.count))
        entropy = {"entropy": arrived["entropy"]} if "entropy" in arrived else {}
        # Only delta was sent of the output: with an output of 0, the kernel computes delta as dout . 0 - (-delta).
        zero_out = torch.zeros_like(arrived["grad_out"])
        result = Result(zero_out, arrived["row_max"], arrived["log_denom"], entropy)
        grads = RowGradients(arrived["grad_out"], -arrived["delta"], arrived.get("grad_entropy"))
        arrays = {**operands, **{name: arrived[name] for name in self.names["query"]}}
        totals = self.zeros_like(operands, requested)
        blocks = owner_call._blocks(self.keys, arrays, BACKWARD_KEYS, BACKWARD_QUERIES) if requested else ()
        for attending, block, block_arrays in blocks:
            part = owner_call.make_part(attending, block, block_arrays)
            for name, x in owner_call.add_gradients({}, *part, result, grads, requested).items():
                copy_rows(positions_first(totals[name]), self.keys.locate(block), positions_first(x))
        return totals

    def _blocks(
        self, keys: Shard, arrays: Arrays, size: int, queries: int = 1
    ) -> Iterator[tuple[Shard, Shard, dict[str, Tensor]]]:
        """Yield the queries that attend each block of `size` keys, in whole blocks of `queries`, the block, its arrays.

        `arrays` are the operands over `keys`.
        """
        for block in blocks_of(keys, size):
            attending = in_blocks(self.plan.attending_keys(self.queries, block), queries) & self.queries
            if len(attending):
                block_arrays = {name: slice_ranges(arrays[name], keys.locate(block)) for name in self.names["key"]}
                yield attending, block, self.operands_with(arrays, block_arrays)


def blocks_of(shard: Shard, size: int) -> Iterator[Shard]:
    """Yield the positions of a shard in each block of `size` positions."""
    firsts = {first for start, stop in shard.ranges for first in range(start // size, -(-stop // size))}
    for first in sorted(firsts):
        yield shard & Shard(((first * size, min(shard.length, (first + 1) * size)),), shard.length)


@final
class Heads(ShardedCall):
    """Exchange rows for heads (Ulysses): each rank computes all queries of some KV heads, and returns the rows."""

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        reasons = []
        if any(PARAMETER in name and x.numel() > 1 for name, x in problem.form.arrays().items()):
            reasons.append("a custom score with parameters, which may be those of each head")
        if heads_attend_differently(problem.mask, sequence_shape):
            reasons.append("a mask of its own for each head")
        return tuple(reasons)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        transfers = self._transfers(operands)
        arrays = self.ranks.fetch({name: operands[name] for name in transfers}, transfers)()
        problem = self._problem_of_heads({**operands, **arrays})
        kernel, tiles = kernel_of(self.kernel, problem), tiling.plan(problem)
        result = kernel.forward(problem, tiles)
        outputs = arrays_of(result) if self.problem.statistics else {"out": result.out}
        row_outputs: dict[str, Tensor] = {}
        self.ranks.give_back(outputs, self._by_heads(self.plan.queries))(row_outputs)
        # Without statistics only the output returns: row_max and log_denom stay on the rank whose backward reads them.
        for name in {"row_max", "log_denom"} - {*row_outputs}:
            row_outputs[name] = result.out.new_zeros((*self.problem.score_shape.rows, 1), dtype=self.sums)
        part = Part(Shard.whole(self.queries.length), Shard.whole(self.keys.length), self.problem.mask, tiles, kernel)
        return result_of(row_outputs), Saved({"heads": part}, arrays, result)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        part, value, rows = saved.parts["heads"], operands["value"], self.problem.score_shape.rows
        # All ranks send the same arrays, even a rank whose loss does not depend on them.
        output_grads = {"out": grads.out if grads.out is not None else value.new_zeros((*rows, value.shape[-1]))}
        for name, x in (("log_sum_exp", grads.log_sum_exp), ("entropy", grads.entropy)):
            if name in self.problem.statistics:
                output_grads[name] = x if x is not None else value.new_zeros((*rows, 1), dtype=self.sums)
        output_grads = self.ranks.fetch(output_grads, self._by_heads(self.plan.queries))()
        problem = self._problem_of_heads({**operands, **saved.fetched})
        gradients = part.kernel.backward(problem, part.tiles, result, RowGradients(**output_grads), requested)
        transfers = self._transfers(operands)
        exchanged = {name: gradients[name] for name in transfers if name in requested}
        for name, x in exchanged.items():
            exchanged[name] = x.to(operands[name].dtype) if transfers[name].by_heads else x
        # Adds the gradients of the operands that were exchanged to `totals`, where they have no entry yet.
        add_returned = self.ranks.give_back(exchanged, transfers)
        totals = self.zeros_like(operands, requested - {*transfers})
        for name, x in totals.items():
            self._heads_of(name, x).add_(gradients[name])
        add_returned(totals)
        return totals

    def _transfers(self, operands: Arrays) -> dict[str, Transfers]:
        """Return the transfers of the operands with an axis of keys or queries; arrays of one head go to all."""
        by_query = (*self.names["query"], *(("bias",) if self.bias_has_queries else ()))
        shards = dict.fromkeys(self.names["key"], self.plan.keys) | dict.fromkeys(by_query, self.plan.queries)
        return {name: self._by_heads(rows, operands[name].shape[-4] > 1) for name, rows in shards.items()}

    def _by_heads(self, shards: Sequence[Shard], by_heads: bool = True) -> Transfers:
        """Return the transfers of all rows of an array, for the rank's heads alone or for all heads."""
        all_rows = [Shard.whole(shards[0].length)] * self.ranks.count
        return Transfers.of(shards, all_rows, self.ranks.rank, by_heads=by_heads)

    def _problem_of_heads(self, arrays: Arrays) -> Problem:
        """Return the problem of all queries of the rank's heads."""
        problem, transfers = self.problem, self._transfers(arrays)
        shape = dataclasses.replace(self.sequence_shape, heads=self.sequence_shape.heads // self.ranks.count)
        arrays = {name: x if name in transfers else self._heads_of(name, x) for name, x in arrays.items()}
        dropout: Any = problem.dropout
        if self.ranks.count > 1:
            rows, cols = (Shard.whole(x.length).positions(arrays["value"]) for x in (self.queries, self.keys))
            dropout = dropout_of(
                problem, self.sequence_shape, rows, cols, lambda x: x.chunk(self.ranks.count, -4)[self.ranks.rank]
            )
        return problem_of_part(
            problem, shape, arrays, mask=problem.mask, bias=arrays.get("bias"), dropout=dropout, sink=arrays.get("sink")
        )

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return a view of the rank's heads of an array that was not moved: sink, bias, parameters of the form."""
        axis = x.dim() - 4 if name == "bias" else 0
        has_heads = x.dim() >= (2 if name == "sink" else 3) and x.shape[axis] == self.sequence_shape.heads > 1
        return x.chunk(self.ranks.count, axis)[self.ranks.rank] if has_heads else x


MODE_CLASSES: Final[dict[str, type[ShardedCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
