"""The ways in which keys and queries of several ranks meet, forward and backward.

- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from attnscore.base.layout import ScoreShape
from attnscore.kernels import tiling
from attnscore.masks import Mask, ValidLens
from attnscore.masks.base import all_of
from attnscore.parallel.plan import have_masks_of_their_own
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_parts import MergedCall, Part, Saved, ShardedCall, map_rows, rows_at, write_rows
from attnscore.parallel.torch_ranks import Arrays, Transfers, copy_rows, cut, positions_first
from attnscore.problem import dropout as dropouts
from attnscore.problem import online_softmax
from attnscore.problem.dropout import PairDropout
from attnscore.problem.online_softmax import RowState
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
        blocks = self._blocks(operands)
        _, block, wait = next(blocks)
        part, result = self.run(self.queries, self.keys, self._arrays(operands, block))
        state, out, parts = self.rows_of(part, result), result.out, [part]
        wait()
        for owner, block, wait in blocks:
            if len(rows := self._attending(owner)):
                part, result = self.run(rows, self.plan.keys[owner], self._arrays(operands, block))
                self._merge(state, out, part, result)
                parts.append(part)
            wait()
        share, row_max, log_denom, statistics = self.finish(state, operands)
        # Without a sink the keys have the whole of the softmax.
        out = out.mul_(share) if "sink" in operands else out
        return Result(out.to(operands["value"].dtype), row_max, log_denom, statistics), Saved(tuple(parts), {})

    def _merge(self, state: RowState, out: Tensor, part: Part, result: Result) -> None:
        """Merge the result of a part into the state and the output, in their memory.

        ``out = w out + v out_part``, with w and v the shares of the two in the softmax.
        """
        ops, at, new = self.problem.ops, self.queries.locate(part.rows), self.rows_of(part, result)
        before = rows_at(state, at)
        merged = online_softmax.merge(ops, before, new)
        total, safe = torch.where(merged.total == 0, 1.0, merged.total), online_softmax.safe_max(ops, merged.max)
        w, v = (torch.exp(x.max - safe) * x.total / total for x in (before, new))
        cut(out, at).mul_(w).addcmul_(result.out, v)
        write_rows(state, at, merged)

    def _attending(self, owner: int) -> Shard:
        """Return the rank's queries from the first to the last one that attend keys of `owner`: a view of each array.

        Of a causal sequence in heads and tails, half of them attend to half of the ranks, and each that a kernel is
        given costs it time.
        """
        found = self.plan.attending(self.ranks.rank, owner).ranges
        if not found:
            return Shard.empty(self.queries.length)
        return self.queries & Shard(((found[0][0], found[-1][1]),), self.queries.length)

    def backward(
        self, operands: Arrays, saved: Saved, result: Result, grads: RowGradients, wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        of_keys = [name for name in self.names["key"] if name in wanted]
        owners = [x for x in self._owners() if x == self.ranks.rank or len(self._attending(x))]
        parts = dict(zip(owners, saved.parts, strict=True))
        found = self.zeros_like(operands, wanted & {"bias"})
        arriving: list[Tensor] = []
        arrived = _nothing
        for owner, block, wait in self._blocks(operands):
            part = parts.get(owner)
            own = {}
            if part is not None:
                arrays = self._arrays(operands, block)
                if owner == self.ranks.rank and "sink" in operands:
                    # The sink is one more key, of which the queries have one gradient.
                    arrays["sink"] = operands["sink"]
                own = self.gradients_of(part, arrays, result, grads, wanted)
                self.add_gradients(found, part, own)
            wait()
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
            arriving, arrived = self._pass_on(sums, len(self.plan.keys[(owner - 1) % self.ranks.count]))
        arrived()
        for name, x in zip(of_keys, arriving, strict=False):
            found[name].add_(x)
        return found

    def _blocks(self, operands: Arrays) -> Iterator[tuple[int, dict[str, Tensor], Callable[[], None]]]:
        """Yield the keys of one rank after another, from this one's on, with the function that waits for the next."""
        names = self.names["key"]
        block = {name: operands[name] for name in names}
        *owners, last = self._owners()
        for owner in owners:
            sent = [x.contiguous() for x in block.values()]
            following, wait = self._pass_on(sent, len(self.plan.keys[(owner - 1) % self.ranks.count]))
            yield owner, block, wait
            block = dict(zip(names, following, strict=True))
        yield last, block, _nothing

    def _owners(self) -> list[int]:
        """Return whose keys pass by, from this rank on."""
        return [(self.ranks.rank - step) % self.ranks.count for step in range(self.ranks.count)]

    def _pass_on(self, arrays: Sequence[Tensor], count: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Send arrays (..., position, dim) to the next rank; return `count` positions of those that arrive."""
        before, after = self.ranks.others[-1], self.ranks.others[0]
        arriving = [x.new_empty((*x.shape[:-2], count, x.shape[-1])) for x in arrays]
        sends = [(after, x) for x in arrays if x.numel()]
        return arriving, self.ranks.post(sends, [(before, x) for x in arriving if x.numel()])

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
        kernel = self.chosen(problem)
        tiles = tiling.plan(problem)
        own = kernel.forward(problem, tiles)
        kept = {"out": own.out, "row_max": own.row_max, "log_denom": own.log_denom, **own.statistics}
        sent = kept if self.problem.statistics else {"out": own.out}
        heads = dict.fromkeys(sent, self.whole.heads)
        found = ranks.heads_to_rows(sent, dict.fromkeys(sent, plan.queries), heads)()
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
        incoming = RowGradients(**ranks.rows_to_heads(given, dict.fromkeys(given, plan.queries))())
        problem = self._of_heads({**operands, **arrays})
        own = Result(kept.pop("out"), kept.pop("row_max"), kept.pop("log_denom"), kept)
        of_heads = part.kernel.backward(problem, part.tiles, own, incoming, wanted)
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


WAYS: Final[dict[str, type[ShardedCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
