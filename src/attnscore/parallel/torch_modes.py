"""The ways in which keys and queries of several ranks meet, forward and backward.

- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from attnscore.base.layout import ScoreShape
from attnscore.kernels import tiling
from attnscore.masks import Dense, IntervalSet, Mask, ValidLens, split
from attnscore.masks.base import all_of
from attnscore.parallel.parts import dropout_of, kernel_of, problem_of_part
from attnscore.parallel.plan import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD_KEYS,
    have_masks_of_their_own,
    in_blocks,
)
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_parts import MergedCall, Part, Saved, ShardedCall, arrays_of, result_of
from attnscore.parallel.torch_ranks import Arrays, Transfers, copy_rows, cut, positions_first
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.scores.forms import PARAMETER


class Gather(ShardedCall):
    """Fetch the keys that the rank's queries attend and that other ranks hold.

    Queries that attend keys of this rank alone (inner ones) are computed while the keys of the others (outer ones) are
    on their way. Backward, gradients of keys return to their owners while the inner ones are computed again.

    The inner part has all queries of the rank, and its mask hides the outer ones, so that its arrays have room for the
    results of both.
    """

    @cached_property
    def outer(self) -> Shard:
        """The queries that may attend keys of other ranks; all, where the keys of these are those of all.

        Each part packs its keys anew: the first of 2 ranks, whose head of a causal sequence attends its own keys alone,
        took 3% longer for two parts than for one, and what it gains the other, which has one, does not.
        """
        found = Shard.empty(self.queries.length)
        for peer in self.ranks.others:
            found |= self.plan.attending(self.ranks.rank, peer)
        # A bias by relative position is cut to one range of queries and one of keys.
        is_one = self.has_relative_bias or not len(without(self.plan.needed[self.ranks.rank], self.plan.keys_of(found)))
        return self.queries if len(found) and is_one else found

    @cached_property
    def inner(self) -> Shard:
        """The queries that attend keys of this rank alone."""
        return without(self.queries, self.outer)

    @cached_property
    def transfers(self) -> Transfers:
        """What this rank fetches, and what the others fetch from it."""
        plan, rank = self.plan, self.ranks.rank
        # Also the keys that the plan fetches between those of inner queries: their owners send them.
        wanted = plan.keys_of(self.outer) | without(plan.needed[rank], plan.keys[rank])
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
            every, outer = arrays_of(result), arrays_of(of_outer[0])
            for name, x in every.items():
                copy_rows(positions_first(x), self.queries.locate(self.outer), positions_first(outer[name]))
        return result, Saved(parts, fetched if len(self.outer) else {})

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
            of_outer = self.gradients_of(
                outer, self.problem_of(*outer[:3], {**operands, **saved.fetched}), result, grads, names
            )
        returning = {
            name: of_outer.pop(name) if outer else operands[name][..., :0, :].to(self.sums) for name in of_keys
        }
        add_returned = self.ranks.give_back(returning, self.transfers)
        if self.has_inner_part:
            of_inner = self.gradients_of(
                saved.parts[0], self.problem_of(*saved.parts[0][:3], operands), result, grads, wanted
            )
            self.add_gradients(found, saved.parts[0], of_inner)
            found |= {name: of_inner[name] for name in of_keys}
        if outer is not None:
            self.add_gradients(found, outer, of_outer)
        add_returned(found)
        return found


def without(shard: Shard, part: Shard) -> Shard:
    """Return the positions of a shard that are not in `part`."""
    ends = [0, *(end for pair in part.ranges for end in pair), part.length]
    return shard & Shard(tuple(zip(ends[::2], ends[1::2], strict=True)), shard.length)


@final
class Ring(MergedCall):
    """Pass the keys of all ranks around: a rank holds its own keys and those of one other, with the next in flight.

    Results of one rank's keys after another's are merged by their log-sum-exp. Backward, gradients of keys travel
    behind them, and end at their owner, which adds its own.
    """

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        parts: list[Part] = []

        def computed() -> Iterator[tuple[Part, Result]]:
            for owner, block in self._blocks(operands):
                if self._is_computed(owner):
                    rows = self._attending(owner)
                    part, result = self.run(rows, self.plan.keys[owner], self.operands_with(operands, block))
                    parts.append(part)
                    yield part, result

        return self.merged(operands, computed()), Saved(tuple(parts), {})

    def _attending(self, owner: int) -> Shard:
        """Return the rank's queries from the first to the last one that attend keys of `owner`: a view of each array.

        Of a causal sequence in heads and tails, half of them attend to half of the ranks, and each that a kernel is
        given costs it time. All, with the rank's own keys.
        """
        if owner == self.ranks.rank:
            return self.queries
        found = self.plan.attending(self.ranks.rank, owner).ranges
        if not found:
            return Shard.empty(self.queries.length)
        return self.queries & Shard(((found[0][0], found[-1][1]),), self.queries.length)

    def _is_computed(self, owner: int) -> bool:
        """Return whether the rank has a part with the keys of `owner`: always with its own, which have the sink."""
        return owner == self.ranks.rank or len(self._attending(owner)) > 0

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        of_keys = [name for name in self.names["key"] if name in wanted]
        parts = dict(zip(filter(self._is_computed, self._owners()), saved.parts, strict=True))
        found = self.zeros_like(operands, wanted & {"bias"})
        arriving: list[Tensor] = []
        arrived = self.ranks.post([], [])
        for owner, block in self._blocks(operands):
            own = {}
            if owner in parts:
                arrays = self.operands_with(operands, block)
                if owner == self.ranks.rank and "sink" in operands:
                    # The sink is one more key, of which the queries have one gradient.
                    arrays["sink"] = operands["sink"]
                own = self.gradients_of(parts[owner], self.problem_of(*parts[owner][:3], arrays), result, grads, wanted)
                self.add_gradients(found, parts[owner], own)
            if owner == self.ranks.rank:
                # Those of the others, which the next rank begins to sum, arrive at the end.
                found |= {name: own[name] for name in of_keys}
                continue
            arrived()
            sums = [
                own[name].contiguous() if name in own else torch.zeros_like(block[name], dtype=self.sums)
                for name in of_keys
            ]
            for x, before in zip(sums, arriving, strict=False):
                x.add_(before)
            arriving, arrived = self._pass_on(sums, owner)
        arrived()
        for name, x in zip(of_keys, arriving, strict=False):
            found[name].add_(x)
        return found

    def _blocks(self, operands: Arrays) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the keys of one rank after another, from this one's on, while the next ones are on their way."""
        names = self.names["key"]
        block = {name: operands[name] for name in names}
        *owners, last = self._owners()
        for owner in owners:
            following, wait = self._pass_on([x.contiguous() for x in block.values()], owner)
            yield owner, block
            wait()
            block = dict(zip(names, following, strict=True))
        yield last, block

    def _owners(self) -> list[int]:
        """Return whose keys pass by, from this rank on."""
        return [(self.ranks.rank - step) % self.ranks.count for step in range(self.ranks.count)]

    def _pass_on(self, arrays: Sequence[Tensor], owner: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Send arrays (..., position, dim) of an owner's keys to the next rank; return those of the owner before."""
        before, after = self.ranks.others[-1], self.ranks.others[0]
        count = len(self.plan.keys[(owner - 1) % self.ranks.count])
        arriving = [x.new_empty((*x.shape[:-2], count, x.shape[-1])) for x in arrays]
        return arriving, self.ranks.post([(after, x) for x in arrays], [(before, x) for x in arriving])


@final
class PassQueries(MergedCall):
    """Fetch keys as `Gather` does; backward, send the queries to the owners of the keys, which sum by themselves.

    All sums are over blocks of keys and queries that begin at multiples of their size in the whole sequence, in rising
    order, whoever holds them: results and gradients have the same bits on any number of ranks.
    """

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask, whole = super().mask_of(rows, cols), self.whole
        known, rest = (None, None) if mask is None else split(mask, len(rows), len(cols), whole.batch)
        if known is None or _begin_at_first(known):
            return mask
        # The kernel would begin its tiles at the first key that these queries attend, and with others elsewhere.
        at = np.arange(len(cols))
        pairs = np.logical_and(known.start[..., None] <= at, at < known.stop[..., None]).max(axis=0)
        # Batch rows are those of the first axis in front of the heads.
        axes = (1,) * (len(whole.lead) - 1 + int(whole.has_heads))
        dense = Dense(pairs.reshape(len(pairs), *axes, *pairs.shape[1:]))
        return dense if rest is None else dense & rest

    @cached_property
    def transfers(self) -> Transfers:
        """What this rank fetches, and what the others fetch from it: whole blocks of keys."""
        return Transfers.of(self.plan.keys, self.plan.needed_blocks, self.ranks.rank)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        fetched = self.ranks.fetch({name: operands[name] for name in self.names["key"]}, self.transfers)()
        blocks = self._blocks(self.transfers.wanted, {**operands, **fetched}, FORWARD_KEYS)
        return self.merged(operands, (self.run(*block) for block in blocks)), Saved((), fetched)

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
        fetched = {**operands, **saved.fetched}
        blocks = self._blocks(self.transfers.wanted, fetched, BACKWARD_KEYS) if rest else ()
        for attending, block, arrays in blocks:
            part, problem = self.part(attending, block, arrays)
            self.add_gradients(found, part, self.gradients_of(part, problem, result, grads, rest))
        if "sink" in wanted:
            no_keys = {name: x[..., :0, :] if name in of_keys else x for name, x in operands.items()}
            part, problem = self.part(self.queries, Shard.empty(self.keys.length), no_keys)
            found |= self.gradients_of(part, problem, result, grads, frozenset({"sink"}))
        return found | self._of_own_keys(operands, wait(), passed[self.ranks.rank], wanted & of_keys)

    def _of_own_keys(self, operands: Arrays, arrived: Arrays, rows: Shard, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Return the gradients of the rank's keys, from all queries that attend them."""
        owner = dataclasses.replace(self, plan=dataclasses.replace(self.plan, queries=(rows,) * self.ranks.count))
        entropy = {"entropy": arrived["entropy"]} if "entropy" in arrived else {}
        # Of the output only delta is known: dout . 0 - delta.
        nothing = torch.zeros_like(arrived["grad_out"])
        result = Result(nothing, arrived["row_max"], arrived["log_denom"], entropy)
        grads = RowGradients(arrived["grad_out"], arrived["delta"], arrived.get("grad_entropy"))
        arrays = {**operands, **{name: arrived[name] for name in self.names["query"]}}
        found = self.zeros_like(operands, wanted)
        blocks = owner._blocks(self.keys, arrays, BACKWARD_KEYS, BACKWARD_QUERIES) if wanted else ()
        for attending, block, of_block in blocks:
            own = owner.gradients_of(*owner.part(attending, block, of_block), result, grads, wanted)
            for name in wanted:
                copy_rows(positions_first(found[name]), self.keys.locate(block), positions_first(own[name]))
        return found

    def _blocks(
        self, keys: Shard, arrays: Arrays, size: int, queries: int = 1
    ) -> Iterator[tuple[Shard, Shard, dict[str, Tensor]]]:
        """Yield the queries that attend each block of `size` keys, in whole blocks of `queries`, the block, its arrays.

        `arrays` are the operands, with these keys.
        """
        for block in blocks_of(keys, size):
            attending = in_blocks(self.plan.attending_keys(self.queries, block), queries) & self.queries
            if len(attending):
                of_block = {name: cut(arrays[name], keys.locate(block)) for name in self.names["key"]}
                yield attending, block, self.operands_with(arrays, of_block)


def _begin_at_first(intervals: IntervalSet) -> bool:
    """Return whether all queries that attend any key attend the first one."""
    return not intervals.start[intervals.start < intervals.stop].any()


def blocks_of(shard: Shard, size: int) -> Iterator[Shard]:
    """Yield the positions of a shard in each block of `size` positions."""
    firsts = {first for start, stop in shard.ranges for first in range(start // size, -(-stop // size))}
    for first in sorted(firsts):
        yield shard & Shard(((first * size, min(shard.length, (first + 1) * size)),), shard.length)


@final
class Heads(ShardedCall):
    """Exchange rows for heads (Ulysses): each rank computes all queries of some KV heads, and returns the rows."""

    @staticmethod
    def reasons_against(problem: Problem, whole: ScoreShape) -> tuple[str, ...]:
        form, found = problem.form, []
        if any(PARAMETER in name and x.numel() > 1 for name, x in form.arrays().items()):
            found.append("a custom score with parameters, which may be those of each head")
        if have_masks_of_their_own(problem.mask, whole):
            found.append("a mask of its own for each head")
        return tuple(found)

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        ranks, plan = self.ranks, self.plan
        shards = self._shards()
        arrays = ranks.rows_to_heads({name: operands[name] for name in shards}, shards)()
        problem = self._of_heads({**operands, **arrays})
        kernel = kernel_of(self.kernel, problem)
        tiles = tiling.plan(problem)
        kept = arrays_of(kernel.forward(problem, tiles))
        sent = kept if self.problem.statistics else {"out": kept["out"]}
        heads = dict.fromkeys(sent, self.whole.heads)
        found = ranks.heads_to_rows(sent, dict.fromkeys(sent, plan.queries), heads)()
        # Without statistics only the output has a use here: the others stay where the backward computes.
        for name in {"row_max", "log_denom"} - {*found}:
            found[name] = kept["out"].new_zeros((*self.problem.score_shape.rows, 1), dtype=self.sums)
        part = Part(Shard.whole(self.queries.length), Shard.whole(self.keys.length), self.problem.mask, tiles, kernel)
        kept = {f"result.{name}": x for name, x in kept.items() if name in ("out", "row_max", "log_denom", "entropy")}
        return result_of(found), Saved((part,), {**arrays, **kept})

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
        incoming = RowGradients(**ranks.rows_to_heads(given, dict.fromkeys(given, plan.queries))())
        problem = self._of_heads({**operands, **arrays})
        of_heads = part.kernel.backward(problem, part.tiles, result_of(kept), incoming, wanted)
        shards = self._shards()
        moved = {name: of_heads[name] for name in shards if name in wanted}
        heads = {name: operands[name].shape[-4] for name in moved}
        moved = {name: x.to(operands[name].dtype) if heads[name] > 1 else x for name, x in moved.items()}
        wait = ranks.heads_to_rows(moved, shards, heads)
        found = self.zeros_like(operands, wanted - {*shards})
        for name, x in found.items():
            self._heads_of(name, x).add_(of_heads[name])
        return found | wait()

    def _shards(self) -> dict[str, Sequence[Shard]]:
        """Return the shards of the operands with an axis of keys or queries."""
        by_query = (*self.names["query"], *(("bias",) if self.bias_has_queries else ()))
        return dict.fromkeys(self.names["key"], self.plan.keys) | dict.fromkeys(by_query, self.plan.queries)

    def _of_heads(self, arrays: Arrays) -> Problem:
        """Return the problem of all queries of the rank's heads."""
        problem = self.problem
        shape = dataclasses.replace(self.whole, heads=self.whole.heads // self.ranks.count)
        moved = self._shards()
        given = {name: x if name in moved else self._heads_of(name, x) for name, x in arrays.items()}
        dropout: Any = problem.dropout
        if self.ranks.count > 1:
            rows, cols = (Shard.whole(x.length).positions(given["value"]) for x in (self.queries, self.keys))
            dropout = dropout_of(
                problem, self.whole, rows, cols, lambda x: x.chunk(self.ranks.count, -4)[self.ranks.rank]
            )
        return problem_of_part(
            problem, shape, given, mask=problem.mask, bias=given.get("bias"), dropout=dropout, sink=given.get("sink")
        )

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return a view of the rank's heads of an array that was not moved: sink, bias, parameters of the form."""
        axis = x.dim() - 4 if name == "bias" else 0
        has_heads = x.dim() >= (2 if name == "sink" else 3) and x.shape[axis] == self.whole.heads > 1
        return x.chunk(self.ranks.count, axis)[self.ranks.rank] if has_heads else x


WAYS: Final[dict[str, type[ShardedCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
