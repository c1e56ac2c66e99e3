"""Gradients of keys without a sum over ranks: the queries are passed to the owners of the keys they attend.

- Results and gradients have the same bits on any number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from attnscore.backends.base import accumulator
from attnscore.masks import Dense, IntervalSet, Mask, split
from attnscore.parallel.plan import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD_KEYS, in_blocks
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_parts import MergedCall, Saved, rows_at, write_rows
from attnscore.parallel.torch_ranks import Arrays, Transfers, copy_rows, cut, positions_first
from attnscore.problem import online_softmax
from attnscore.problem.results import Result, RowGradients


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
        ops, rows, value_dim = self.problem.ops, self.problem.score_shape.rows, self.problem.layout.value_dim
        state = online_softmax.start(
            ops, rows, value_dim, operands["value"], accumulator(self.problem.dtype), self.statistics
        )
        for block, attending, arrays in self._blocks(operands, fetched, FORWARD_KEYS):
            part, result = self.run(attending, block, arrays)
            new = self.rows_of(part, result)
            new = dataclasses.replace(new, out=result.out * new.total)
            at = self.queries.locate(attending)
            write_rows(state, at, online_softmax.merge(ops, rows_at(state, at), new))
        out, row_max, log_denom, statistics = self.finish(state, operands)
        return Result(out.to(operands["value"].dtype), row_max, log_denom, statistics), Saved((), fetched)

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
            # In the dtype of sums, as in `_blocks`: a kernel that differentiates a forward of its own, over these keys
            # alone, takes no such values.
            arrays["value"] = arrays["value"].to(self.sums)
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
