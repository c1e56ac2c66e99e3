"""The ways in which keys and queries of several ranks meet, forward and backward.

- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, cast, final

import numpy as np
import torch
from torch import Tensor

from attnscore.core import dropout as dropouts
from attnscore.core import online_softmax, tiling
from attnscore.core.dropout import PairDropout
from attnscore.core.layout import ScoreShape
from attnscore.core.online_softmax import RowState
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients
from attnscore.masks import Dense, Mask, ValidLens
from attnscore.masks.base import all_of, atoms_of
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_parts import MergedCall, Part, Saved, ShardedCall, map_rows
from attnscore.parallel.torch_ranks import Arrays, Transfers, copy_rows, positions_first, positions_last
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
class Ring(MergedCall):
    """Pass the keys of all ranks around: a rank holds its own keys and those of one other, with the next in flight.

    Results of one rank's keys after another's are merged by their log-sum-exp. Backward, gradients of keys travel with
    them, and end at their owner.
    """

    def forward(self, operands: Arrays) -> tuple[Result, Saved]:
        state, parts = None, []
        for owner, block, wait in self._blocks(operands):
            if owner == self.ranks.rank or self._attends(owner):
                part, result = self.run(self.queries, self.plan.keys[owner], self._arrays(operands, block))
                new = self.state_of(part, result)
                state = new if state is None else online_softmax.merge(self.problem.ops, state, new)
                parts.append(part)
            wait()
        return self.finished(cast(RowState, state), operands), Saved(tuple(parts), {})

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


WAYS: Final[dict[str, type[ShardedCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
