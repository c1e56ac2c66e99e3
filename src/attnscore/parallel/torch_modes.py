"""Forward and backward of a call over several ranks, one class for each way of exchanging rows.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- What is moved of the keys is their lowered form, which their owner computes once, so every score is moved alike.
- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from attnscore import kernels
from attnscore.backends.base import accumulator
from attnscore.core import dropout as dropouts
from attnscore.core import online_softmax, tiled, tiling
from attnscore.core.dropout import PairDropout
from attnscore.core.layout import ScoreShape
from attnscore.core.online_softmax import RowState
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients
from attnscore.core.tiling import TilePlan
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import Kernel
from attnscore.masks import Dense, IntervalSet, Mask, ValidLens, split
from attnscore.masks.base import all_of, atoms_of
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.pairs import Range
from attnscore.parallel.plan import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD_KEYS, Exchange, in_blocks
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import (
    Arrays,
    Ranks,
    Transfers,
    add_rows,
    copy_rows,
    cut,
    positions_first,
    positions_last,
)
from attnscore.scores.forms import PARAMETER

_MOMENTS = ("mean_score", "var_score")
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
        """Return the gradients of a part's operands, from the result and the gradients of all queries of the rank."""
        at = self.queries.locate(part.rows)
        own = map_rows(lambda x: cut(x, at), result)
        incoming = RowGradients(*(None if x is None else cut(x, at) for x in incoming_of(grads)))
        problem = self.problem_of(part, arrays)
        names = wanted & frozenset(tiled.operands(problem))
        found = part.kernel.backward(problem, part.tiles, own, incoming, names)
        return {name: found[name] for name in names}

    def state_of(self, part: Part, result: Result) -> RowState:
        """Return the state of the online softmax after the keys of a part, from its result."""
        ops, statistics = self.problem.ops, result.statistics
        total = torch.exp(result.log_denom)
        is_empty = result.log_denom == -math.inf
        sums: dict[str, tuple[Tensor, ...]] = {}
        for name, accumulated in (("entropy", "sum_exp_logit"), ("sum_sq_weights", "squares")):
            if name in statistics and name == "entropy":
                # Forward: entropy = log_denom - sum_exp_logit / total
                sums[accumulated] = (torch.where(is_empty, 0.0, (result.log_denom - statistics[name]) * total),)
            elif name in statistics:
                sums[accumulated] = (statistics[name] * total * total,)
        if "mean_score" in statistics:
            count = self._counts(part, total)
            zero = torch.zeros_like(count)
            sums["moments"] = (count, statistics["mean_score"], zero, statistics["var_score"] * count)
        maximum = ops.where(is_empty, -math.inf, result.row_max)
        return RowState(maximum, total, result.out * total, sums)

    def _counts(self, part: Part, like: Tensor) -> Tensor:
        """Return the number of unmasked keys of each query, which are intervals."""
        ops, intervals = self.problem.ops, part.tiles.interval_set
        if intervals is None:
            return torch.full_like(like, len(part.cols))
        counts = np.maximum(intervals.stop - intervals.start, 0).sum(0)[..., None]
        found: Tensor = self.whole.batch_to_canonical(ops, ops.asarray(counts, like))
        return found.to(like.dtype).expand(like.shape)

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


class Gather(ShardedCall):
    """Fetch the keys that the rank's queries attend and that other ranks hold.

    Queries that attend keys of this rank alone (inner ones) are computed while the keys of the others (outer ones) are
    on their way. Backward, gradients of keys return to their owners while the inner ones are computed again.

    The inner part has all queries of the rank, and its mask hides the outer ones, so that its arrays have room for the
    results of both.
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
        return dataclasses.replace(Transfers.of(plan.keys, plan.needed, rank), wanted=wanted)

    @cached_property
    def has_inner_part(self) -> bool:
        """Whether there are inner queries, or none at all."""
        return len(self.inner) > 0 or not len(self.outer)

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask = super().mask_of(rows, cols)
        if not len(self.inner) or not len(self.outer) or rows == self.outer:
            return mask
        key_counts = np.full((self.whole.batch, len(rows)), len(cols))
        for start, stop in rows.locate(self.outer):
            key_counts[:, start:stop] = 0
        return all_of([*([] if mask is None else [mask]), ValidLens(key_counts)])

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        wait = self.ranks.fetch({name: operands[name] for name in self.names["key"]}, self.transfers)
        found = [self.run(self.queries, self.keys, operands)] if self.has_inner_part else []
        fetched = wait()
        if len(self.outer):
            found.append(self.run(self.outer, self.transfers.wanted, {**operands, **fetched}))
        parts, (result, *of_outer) = zip(*found, strict=True)
        if of_outer:
            result = map_rows(self._with_outer, result, *of_outer)
        return result, Saved(parts, fetched if len(self.outer) else {})

    def _with_outer(self, x: Tensor, outer: Tensor) -> Tensor:
        """Return the results of all queries, with those of the outer ones written into them."""
        copy_rows(positions_first(x), self.queries.locate(self.outer), positions_first(outer))
        return x

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        of_keys = sorted(wanted & {*self.names["key"]})
        found = self.zeros_like(operands, wanted & {"bias"})
        outer, of_outer = None, dict[str, Tensor]()
        if saved.fetched:
            outer = saved.parts[-1]
            # The sink's gradient is a sum over all queries, which the inner part has.
            names = wanted - {"sink"} if self.has_inner_part else wanted
            of_outer = self.gradients_of(outer, {**operands, **saved.fetched}, result, grads, names)
        returning = {
            name: of_outer.pop(name) if outer else operands[name][..., :0, :].to(self.sums) for name in of_keys
        }
        add_returned = self.ranks.give_back(returning, self.transfers)
        if self.has_inner_part:
            of_inner = self.gradients_of(saved.parts[0], operands, result, grads, wanted)
            self.add_gradients(found, saved.parts[0], of_inner)
            found |= {name: of_inner[name] for name in of_keys}
        else:
            found |= self.zeros_like(operands, of_keys)
        if outer is not None:
            self.add_gradients(found, outer, of_outer)
        add_returned(found)
        return found


def without(shard: Shard, part: Shard) -> Shard:
    """Return the positions of a shard that are not in `part`."""
    ends = [0, *(end for pair in part.ranges for end in pair), part.length]
    return shard & Shard(tuple(zip(ends[::2], ends[1::2], strict=True)), shard.length)


@final
class Ring(ShardedCall):
    """Pass the keys of all ranks around: a rank holds its own keys and those of one other, with the next in flight.

    Results of one rank's keys after another's are merged by their log-sum-exp. Backward, gradients of keys travel with
    them, and end at their owner.
    """

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        found = []
        if problem.bias is not None and whole.is_relative(tuple(problem.bias.shape)):
            found.append("a bias by relative position")
        if moments := [name for name in _MOMENTS if name in problem.statistics]:
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
        return (*wanted, *(x for x in _MOMENTS if x not in wanted)) if {*wanted} & {*_MOMENTS} else wanted

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        state, parts = None, []
        for owner, block, wait in self._blocks(operands):
            if owner == self.ranks.rank or self._attends(owner):
                part, result = self.run(self.queries, self.plan.keys[owner], self._arrays(operands, block))
                new = self.state_of(part, result)
                state = new if state is None else online_softmax.merge(self.problem.ops, state, new)
                parts.append(part)
            wait()
        ops, sink = self.problem.ops, operands.get("sink")
        sink = None if sink is None else sink.reshape(*sink.shape, 1, 1).to(self.sums)
        found = online_softmax.finish(ops, cast(RowState, state), sink, self.problem.statistics)
        out, row_max, log_denom, statistics = found
        return Result(out.to(operands["value"].dtype), row_max, log_denom, statistics), Saved(tuple(parts), {})

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        of_keys = [name for name in self.names["key"] if name in wanted]
        parts = {part.cols: part for part in saved.parts}
        found = self.zeros_like(operands, wanted & {"bias"})
        arriving: list[Tensor] = []
        arrived = _nothing
        for owner, block, wait in self._blocks(operands):
            part = parts.get(self.plan.keys[owner]) if owner == self.ranks.rank or self._attends(owner) else None
            own = {}
            if part is not None:
                arrays = self._arrays(operands, block)
                if owner == self.ranks.rank and "sink" in operands:
                    # The sink is one more key, of which the queries have one gradient.
                    arrays["sink"] = operands["sink"]
                own = self.gradients_of(part, arrays, result, grads, wanted)
                self.add_gradients(found, part, own)
            wait()
            arrived()
            sums = [
                positions_first(own[name]).contiguous() if name in own
                else positions_first(block[name]).new_zeros(positions_first(block[name]).shape, dtype=self.sums)
                for name in of_keys
            ]  # fmt: skip
            for x, before in zip(sums, arriving, strict=False):
                x.add_(before)
            arriving, arrived = self._pass_on(sums, len(self.plan.keys[(owner - 1) % self.ranks.count]))
        arrived()
        return found | {name: positions_last(x) for name, x in zip(of_keys, arriving, strict=True)}

    def _blocks(self, operands: Arrays) -> Iterator[tuple[int, dict[str, Tensor], Callable[[], None]]]:
        """Yield the keys of one rank after another, from this one's on, with the function that waits for the next."""
        own = [positions_first(operands[name]).contiguous() for name in self.names["key"]]
        for step in range(self.ranks.count):
            owner = (self.ranks.rank - step) % self.ranks.count
            block = {name: positions_last(x) for name, x in zip(self.names["key"], own, strict=True)}
            if step == self.ranks.count - 1:
                yield owner, block, _nothing
                return
            following, wait = self._pass_on(own, len(self.plan.keys[(owner - 1) % self.ranks.count]))
            yield owner, block, wait
            own = following

    def _pass_on(self, arrays: Sequence[Tensor], count: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Send arrays (position, ...) to the next rank; return `count` positions of those that arrive."""
        if self.ranks.count == 1:
            return [*arrays], _nothing
        before, after = self.ranks.others[-1], self.ranks.others[0]
        arriving = [x.new_empty((count, *x.shape[1:])) for x in arrays]
        sends = [(after, x) for x in arrays if x.numel()]
        return arriving, self.ranks.post(sends, [(before, x) for x in arriving if x.numel()])

    def _attends(self, owner: int) -> bool:
        """Return whether the rank's queries attend keys of `owner`."""
        return len(self.plan.transfer(owner, self.ranks.rank)) > 0

    def _arrays(self, operands: Arrays, block: Arrays) -> dict[str, Tensor]:
        """Return the operands of a part, without the sink; the output has the dtype of the values, that of sums."""
        found = {name: x for name, x in operands.items() if name != "sink"} | {**block}
        return {**found, "value": found["value"].to(self.sums)}


def _nothing() -> None:
    """Wait for no message."""


@final
class Heads(ShardedCall):
    """Exchange rows for heads (Ulysses): each rank computes all queries of some KV heads, and returns the rows."""

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        form, found = problem.form, []
        if any(name.rpartition(".")[0].endswith(PARAMETER[:-1]) and x.numel() > 1 for name, x in form.arrays().items()):
            found.append("a custom score with parameters, which may be those of each head")
        if problem.mask is not None and any(_has_heads(part, whole) for part in atoms_of(problem.mask)):
            found.append("a mask of its own for each head")
        return tuple(found)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        ranks, plan = self.ranks, self.plan
        waits = [
            ranks.rows_to_heads({name: operands[name] for name in self.names["key"]}, plan.keys),
            ranks.rows_to_heads({name: operands[name] for name in self._by_query()}, plan.queries),
        ]
        arrays = {name: x for wait in waits for name, x in wait().items()}
        problem = self._of_heads({**operands, **arrays})
        kernel = self.chosen(problem)
        tiles = tiling.plan(problem)
        own = kernel.forward(problem, tiles)
        kept = {"out": own.out, "row_max": own.row_max, "log_denom": own.log_denom, **own.statistics}
        sent = kept if self.problem.statistics else {"out": own.out}
        found = ranks.heads_to_rows(sent, plan.queries, dict.fromkeys(sent, self.whole.heads))()
        # Without statistics only the output has a use here: the others stay where the backward computes.
        none = own.out.new_zeros((*self.problem.score_shape.rows, 1), dtype=self.sums)
        out, row_max, log_denom = found.pop("out"), found.pop("row_max", none), found.pop("log_denom", none.clone())
        part = Part(Shard.whole(self.queries.length), Shard.whole(self.keys.length), self.problem.mask, tiles, kernel)
        kept = {f"result.{name}": x for name, x in kept.items() if name in ("out", "row_max", "log_denom", "entropy")}
        return Result(out, row_max, log_denom, found), Saved((part,), {**arrays, **kept})

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        ranks, plan, part = self.ranks, self.plan, saved.parts[0]
        kept = {name.removeprefix("result."): x for name, x in saved.fetched.items() if name.startswith("result.")}
        arrays = {name: x for name, x in saved.fetched.items() if not name.startswith("result.")}
        # The same arrays from all ranks, also where the loss of one does not depend on them.
        given = {"out": grads.out if grads.out is not None else torch.zeros_like(result.out)}
        for name, x in (("log_sum_exp", grads.log_sum_exp), ("entropy", grads.entropy)):
            if name in self.problem.statistics:
                given[name] = x if x is not None else torch.zeros_like(result.log_denom)
        incoming = RowGradients(**ranks.rows_to_heads(given, plan.queries)())
        problem = self._of_heads({**operands, **arrays})
        own = Result(kept.pop("out"), kept.pop("row_max"), kept.pop("log_denom"), kept)
        of_heads = part.kernel.backward(problem, part.tiles, own, incoming, wanted)
        shared = wanted - {*self.names["key"], *self._by_query()}
        waits, found = [], self.zeros_like(operands, shared)
        for names, shards in ((self.names["key"], plan.keys), (self._by_query(), plan.queries)):
            moved = {name: of_heads[name] for name in names if name in wanted}
            heads = {name: operands[name].shape[-4] for name in moved}
            moved = {name: x.to(operands[name].dtype) if heads[name] > 1 else x for name, x in moved.items()}
            waits.append(ranks.heads_to_rows(moved, shards, heads))
        for name in shared:
            self._heads_of(name, found[name]).add_(of_heads[name])
        return found | {name: x for wait in waits for name, x in wait().items()}

    def _by_query(self) -> tuple[str, ...]:
        """Return the names of the operands with an axis of queries."""
        return (*self.names["query"], *(("bias",) if self.bias_has_queries else ()))

    def _of_heads(self, arrays: Arrays) -> Problem:
        """Return the problem of all queries of the rank's heads."""
        problem = self.problem
        shape = dataclasses.replace(self.whole, heads=self.whole.heads // self.ranks.count)
        moved = {*self.names["key"], *self._by_query()}
        given = {name: x if name in moved else self._heads_of(name, x) for name, x in arrays.items()}
        form, dropout = problem.form.with_arrays({name: given[name] for name in problem.form.arrays()}), problem.dropout
        if dropout is not None and self.ranks.count > 1:
            rows = dropouts.rows_of_matrices(problem.ops, self.whole, given["value"])
            row = rows.chunk(self.ranks.count, -4)[self.ranks.rank] + self._positions(self.queries, given["value"])
            key = self._positions(self.keys, given["value"])[:, 0][None]
            dropout = PairDropout(dropout.probability, dropout.seed, row, key)
        return dataclasses.replace(
            problem, layout=dataclasses.replace(problem.layout, score_shape=shape), query=form.query, key=form.key,
            value=given["value"], form=form, bias=given.get("bias"), sink=given.get("sink"), dropout=dropout,
        )  # fmt: skip

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return a view of the rank's heads of an array that was not moved: sink, bias, parameters of the form."""
        axis = x.dim() - 4 if name == "bias" else 0
        has_heads = x.dim() >= (2 if name == "sink" else 3) and x.shape[axis] == self.whole.heads > 1
        return x.chunk(self.ranks.count, axis)[self.ranks.rank] if has_heads else x

    @staticmethod
    def _positions(shard: Shard, like: Tensor) -> Tensor:
        return torch.arange(shard.length, device=like.device)[:, None]


def _has_heads(mask: Mask, whole: ScoreShape) -> bool:
    """Return whether heads have masks of their own."""
    if isinstance(mask, Dense):
        shape = mask.array.shape
        return whole.has_heads and len(shape) > 2 and shape[-3] > 1
    return mask.heads > 1


@final
class PassQueries(ShardedCall):
    """Fetch keys as `Gather` does; backward, send the queries to the owners of the keys, which sum by themselves.

    All sums are over blocks of keys and queries that begin at multiples of their size in the whole sequence, in rising
    order, whoever holds them: results and gradients have the same bits on any number of ranks.
    """

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        return Ring.reasons_against(problem, whole)

    @property
    def statistics(self) -> tuple[str, ...]:
        wanted = self.problem.statistics
        return (*wanted, *(x for x in _MOMENTS if x not in wanted)) if {*wanted} & {*_MOMENTS} else wanted

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask, whole = super().mask_of(rows, cols), self.whole
        known, rest = (None, None) if mask is None else split(mask, len(rows), len(cols), whole.batch)
        if known is None or _begin_at_first(known):
            return mask
        # The kernel would begin its tiles at the first key that these queries attend, and with others elsewhere.
        at = np.arange(len(cols))
        pairs = np.logical_and(known.start[..., None] <= at, at < known.stop[..., None]).max(axis=0)
        dense = Dense(pairs[:, None] if whole.has_heads else pairs)
        return dense if rest is None else dense & rest

    @cached_property
    def transfers(self) -> Transfers:
        """What this rank fetches, and what the others fetch from it: whole blocks of keys."""
        return Transfers.of(self.plan.keys, self.plan.needed_blocks, self.ranks.rank)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        fetched = self.ranks.fetch({name: operands[name] for name in self.names["key"]}, self.transfers)()
        ops, statistics, rows = self.problem.ops, self.problem.statistics, self.problem.score_shape.rows
        value_dim = self.problem.layout.value_dim
        state = online_softmax.start(
            ops, rows, value_dim, operands["value"], accumulator(self.problem.dtype), self.statistics
        )
        for block, attending, arrays in self._blocks(operands, fetched, FORWARD_KEYS):
            new = self.state_of(*self.run(attending, block, arrays))
            at = self.queries.locate(attending)
            merged = online_softmax.merge(ops, _rows_of(state, at), new)
            for to, x in zip(_arrays_of(state), _arrays_of(merged), strict=True):
                copy_rows(positions_first(to), at, positions_first(x))
        sink = operands.get("sink")
        sink = None if sink is None else sink.reshape(*sink.shape, 1, 1).to(self.sums)
        out, row_max, log_denom, found = online_softmax.finish(ops, state, sink, statistics)
        return Result(out.to(operands["value"].dtype), row_max, log_denom, found), Saved((), fetched)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        grad_out = grads.out if grads.out is not None else torch.zeros_like(result.out)
        delta = -(result.out.to(self.sums) * grad_out.to(self.sums)).sum(-1, keepdim=True)
        delta = delta if grads.log_sum_exp is None else delta + grads.log_sum_exp
        sent = {name: operands[name] for name in self.names["query"]}
        sent |= {"grad_out": grad_out, "row_max": result.row_max, "log_denom": result.log_denom, "delta": delta}
        if "entropy" in self.problem.statistics:
            given = grads.entropy if grads.entropy is not None else torch.zeros_like(delta)
            sent |= {"entropy": result.statistics["entropy"], "grad_entropy": given}
        passed = self.plan.passed
        wait = self.ranks.fetch(sent, Transfers.of(self.plan.queries, passed, self.ranks.rank))
        # While the queries are on their way: the gradients of the rank's own.
        of_keys = {*self.names["key"]}
        found = self.zeros_like(operands, wanted - of_keys)
        rest = wanted - of_keys - {"sink"}
        for block, attending, arrays in self._blocks(operands, saved.fetched, BACKWARD_KEYS) if rest else ():
            part, _ = self.part(attending, block, arrays)
            self.add_gradients(found, part, self.gradients_of(part, arrays, result, grads, frozenset(rest)))
        if "sink" in wanted:
            part, _ = self.part(self.queries, Shard.empty(self.keys.length), self._no_keys(operands))
            found |= self.gradients_of(part, self._no_keys(operands), result, grads, frozenset({"sink"}))
        return found | self._of_own_keys(operands, wait(), passed[self.ranks.rank], wanted & of_keys)

    def _of_own_keys(self, operands: Arrays, arrived: Arrays, rows: Shard, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Return the gradients of the rank's keys, from all queries that attend them."""
        owner = dataclasses.replace(
            self,
            plan=dataclasses.replace(
                self.plan,
                queries=tuple(rows if rank == self.ranks.rank else Shard.empty(rows.length)
                              for rank in range(self.ranks.count)),
            ),
        )  # fmt: skip
        entropy = {"entropy": arrived["entropy"]} if "entropy" in arrived else {}
        # Of the output only delta is known: dout . 0 - delta.
        nothing = torch.zeros_like(arrived["grad_out"])
        result = Result(nothing, arrived["row_max"], arrived["log_denom"], entropy)
        grads = RowGradients(arrived["grad_out"], arrived["delta"], arrived.get("grad_entropy"))
        queries = {name: arrived[name] for name in self.names["query"]}
        others = {name: x for name, x in operands.items() if name not in (*queries, *self.names["key"], "sink")}
        keys = {name: operands[name] for name in self.names["key"]}
        found = self.zeros_like(operands, wanted)
        for block in blocks_of(self.keys, BACKWARD_KEYS):
            attending = in_blocks(self.plan.attending_keys(rows, block), BACKWARD_QUERIES) & rows
            if not len(attending) or not wanted:
                continue
            at = self.keys.locate(block)
            arrays = {**others, **queries, **{name: cut(x, at) for name, x in keys.items()}}
            part, _ = owner.part(attending, block, arrays)
            own = owner.gradients_of(part, arrays, result, grads, wanted)
            for name in wanted:
                rows_of = positions_first(found[name])
                copy_rows(rows_of, at, positions_first(own[name]))
        return found

    def _blocks(self, operands: Arrays, fetched: Arrays, size: int) -> Iterator[tuple[Shard, Shard, dict[str, Tensor]]]:
        """Yield blocks of the keys fetched, the rank's queries that attend them, and the operands but the sink."""
        others = {name: x for name, x in operands.items() if name not in (*self.names["key"], "sink")}
        for block in blocks_of(self.transfers.wanted, size):
            attending = self.plan.attending_keys(self.queries, block)
            if len(attending):
                at = self.transfers.wanted.locate(block)
                arrays = {**others, **{name: cut(x, at) for name, x in fetched.items()}}
                yield block, attending, {**arrays, "value": arrays["value"].to(self.sums)}

    def _no_keys(self, operands: Arrays) -> dict[str, Tensor]:
        return {name: x[..., :0, :] if name in self.names["key"] else x for name, x in operands.items()}


def _begin_at_first(intervals: IntervalSet) -> bool:
    """Return whether all queries that attend any key attend the first one."""
    return not intervals.start[intervals.start < intervals.stop].any()


def blocks_of(shard: Shard, size: int) -> Iterator[Shard]:
    """Yield the positions of a shard in each block of `size` positions."""
    firsts = {first for start, stop in shard.ranges for first in range(start // size, -(-stop // size))}
    for first in sorted(firsts):
        yield shard & Shard(((first * size, min(shard.length, (first + 1) * size)),), shard.length)


def _arrays_of(state: RowState) -> list[Tensor]:
    return [state.max, state.total, state.out, *(x for arrays in state.sums.values() for x in arrays)]


def _rows_of(state: RowState, at: Sequence[Range]) -> RowState:
    sums = {name: tuple(cut(x, at) for x in arrays) for name, arrays in state.sums.items()}
    return RowState(cut(state.max, at), cut(state.total, at), cut(state.out, at), sums)


WAYS: Final[dict[str, type[ShardedCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
