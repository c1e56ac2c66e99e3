"""Forward and backward of a call over several ranks, one class for each way of exchanging rows.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- What is moved of the keys is their lowered form, which their owner computes once, so every score is moved alike.
- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from attnscore import kernels
from attnscore.backends.base import accumulator
from attnscore.core import dropout as dropouts
from attnscore.core import tiled, tiling
from attnscore.core.dropout import PairDropout
from attnscore.core.layout import ScoreShape
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients
from attnscore.core.tiling import TilePlan
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import Kernel
from attnscore.masks import Mask
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.pairs import Range
from attnscore.parallel.plan import Exchange
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import Arrays, Ranks, Transfers, copy_rows, cut

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
    gradient: str

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
        mask = shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)
        problem = self._problem(rows, cols, mask, arrays)
        kernel = kernels.choose(self.kernel, problem)
        if not kernel.has_vjp:
            raise KernelUnavailable(message("kernel", "one that takes lowered keys", self.kernel))
        tiles = tiling.plan(problem)
        return Part(rows, cols, mask, tiles, kernel), problem

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
            layout=dataclasses.replace(problem.layout, score_shape=shape),
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
        of_queries = [(-2, self.queries.locate(rows))] if bias.shape[-2] > 1 else []
        return of_queries + ([(-1, cols.ranges)] if bias.shape[-1] > 1 else [])

    def run(self, rows: Shard, cols: Shard, arrays: Arrays) -> tuple[Part, Result]:
        """Return a part, and the result of its forward."""
        part, problem = self.part(rows, cols, arrays)
        return part, part.kernel.forward(problem, part.tiles)

    def gradients_of(
        self, part: Part, arrays: Arrays, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of a part's operands, from the result and the gradients of all queries of the rank."""
        at = self.queries.locate(part.rows)
        own = map_rows(lambda x: cut(x, at), result)
        incoming = RowGradients(*(None if x is None else cut(x, at) for x in incoming_of(grads)))
        problem = self.problem_of(part, arrays)
        names = wanted & frozenset(tiled.operands(problem))
        found = part.kernel.backward(problem, part.tiles, own, incoming, names)
        return {name: found[name] for name in names}

    def sum_of_parts(
        self, parts: Sequence[tuple[Part, Mapping[str, Tensor]]], operands: Arrays, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of the operands but the keys, from those of parts whose queries are disjoint."""
        found: dict[str, Tensor] = {}
        for name in wanted - {*self.names["key"]}:
            x = operands[name]
            if name in self.names["query"]:
                found[name] = self.join([(part.rows, grads[name]) for part, grads in parts])
                continue
            found[name] = torch.zeros(x.shape, dtype=self.sums, device=x.device)
            for part, grads in parts:
                if name == "bias":
                    self._add_bias(found[name], part.rows, part.cols, grads[name])
                else:
                    found[name] += grads[name]
        return found

    def join(self, parts: Sequence[tuple[Shard, Tensor]]) -> Tensor:
        """Return an array of all queries of the rank, from those of parts whose queries are disjoint."""
        if len(parts) == 1:
            return parts[0][1]
        x = parts[0][1]
        found = x.new_empty((*x.shape[:-2], len(self.queries), x.shape[-1]))
        for rows, part in parts:
            copy_rows(found.movedim(-2, 0), self.queries.locate(rows), part.movedim(-2, 0), ((0, len(rows)),))
        return found


def map_rows(change: Callable[..., Tensor], *results: Result) -> Result:
    """Return the result of which each array is ``change(*arrays)`` of those of the results."""
    names = results[0].statistics
    return Result(
        out=change(*(result.out for result in results)),
        row_max=change(*(result.row_max for result in results)),
        log_denom=change(*(result.log_denom for result in results)),
        statistics={name: change(*(result.statistics[name] for result in results)) for name in names},
    )


def incoming_of(grads: RowGradients) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of output, log-sum-exp and entropy."""
    return grads.out, grads.log_sum_exp, grads.entropy


@final
class Gather(ShardedCall):
    """Fetch the keys that the rank's queries attend and that other ranks hold.

    Queries that attend keys of this rank alone are computed while the others are on their way. Backward, gradients of
    keys return to their owners while those queries are computed again.
    """

    @cached_property
    def outer(self) -> Shard:
        """The queries that may attend keys of other ranks."""
        found = Shard.empty(self.queries.length)
        for peer in self.ranks.others:
            found |= self.plan.attending(self.ranks.rank, peer)
        # A bias by relative position is cut to one range of queries and one of keys.
        return self.queries if len(found) and self.has_relative_bias else found

    @cached_property
    def inner(self) -> Shard:
        """The queries that attend keys of this rank alone."""
        return without(self.queries, self.outer)

    @cached_property
    def transfers(self) -> Transfers:
        """What this rank fetches, and what the others fetch from it."""
        plan, rank = self.plan, self.ranks.rank
        wanted = plan.keys_of(self.outer)
        if self.has_relative_bias and wanted.ranges:
            wanted = Shard(((wanted.ranges[0][0], wanted.ranges[-1][1]),), wanted.length)
        return Transfers(
            self.keys,
            wanted,
            tuple(plan.transfer(rank, peer) for peer in range(plan.ranks)),
            tuple(plan.transfer(peer, rank) for peer in range(plan.ranks)),
        )

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        wait = self.ranks.fetch({name: operands[name] for name in self.names["key"]}, self.transfers)
        found = []
        if len(self.inner) or not len(self.outer):
            found.append(self.run(self.inner, self.keys, operands))
        fetched = wait()
        if len(self.outer):
            found.append(self.run(self.outer, self.transfers.wanted, {**operands, **fetched}))

        results = [result for _, result in found]
        rows = [part.rows for part, _ in found]
        whole = map_rows(lambda *x: self.join([*zip(rows, x, strict=True)]), *results)
        return whole, Saved(tuple(part for part, _ in found), fetched if len(self.outer) else {})

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        of_keys = wanted & {*self.names["key"]}
        outer = saved.parts[-1] if saved.fetched else None
        parts = []
        if outer is not None:
            parts.append((outer, self.gradients_of(outer, {**operands, **saved.fetched}, result, grads, wanted)))
        returning = {}
        for name in of_keys:
            x, shape = (
                operands[name],
                (*operands[name].shape[:-2], len(self.transfers.wanted), operands[name].shape[-1]),
            )
            returning[name] = parts[0][1][name] if parts else x.new_zeros(shape, dtype=self.sums)
        wait = self.ranks.give_back(dict(sorted(returning.items())), self.transfers)
        for part in saved.parts:
            if part is not outer:
                parts.append((part, self.gradients_of(part, operands, result, grads, wanted)))
        found = self.sum_of_parts(parts, operands, wanted)
        found |= wait()
        for part, own in parts:
            if part is not outer:
                for name in of_keys:
                    found[name] += own[name]
        return found


def without(shard: Shard, part: Shard) -> Shard:
    """Return the positions of a shard that are not in `part`."""
    ends = [0, *(end for pair in part.ranges for end in pair), part.length]
    return shard & Shard(tuple(zip(ends[::2], ends[1::2], strict=True)), shard.length)
