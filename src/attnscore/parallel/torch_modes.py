"""One call of `attend` on a rank: the modes in which keys and queries of several ranks meet, forward and backward.

- A part is a local problem: some of the rank's queries against some keys, under the mask of the whole sequence cut to
  them. Kernels run it as any other problem.
- Ranks send the lowered form of the keys, which their owner computes once, so all scores share the exchange.
- Messages are in flight while parts that do not need them are computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnscore.backends.base import accumulator
from attnscore.backends.torch import map_leaves
from attnscore.base.layout import ScoreShape
from attnscore.kernels import SinglePlan
from attnscore.masks import Dense, Mask, ValidLens, split_intervals
from attnscore.masks.base import all_of
from attnscore.parallel import parts
from attnscore.parallel.mask import shard_mask
from attnscore.parallel.pairs import Range
from attnscore.parallel.plan import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD_KEYS, Movement, in_blocks
from attnscore.parallel.shard import Shard
from attnscore.parallel.torch_ranks import (
    Arrays,
    Ranks,
    add_rows,
    copy_rows,
    move_rows,
    slice_ranges,
)
from attnscore.problem import online_softmax
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import statistics_to_join


class Differentiated(torch.autograd.Function):
    """The forward and the backward of a `ShardedCall`, as a function of its operands.

    Saves the operands, the fetched arrays, the output, row_max, log_denom and any entropy.
    """

    @staticmethod
    def forward(ctx: Any, call: ShardedCall, *operands: Tensor) -> tuple[Tensor, ...]:
        arrays = dict(zip(call.problem.operands(), operands, strict=True))
        result, fetched = call.forward(arrays)
        outputs = parts.arrays_of(result)
        ctx.call, ctx.outputs = call, tuple(outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for name, x in outputs.items() if name not in _DIFFERENTIABLE))
        saved = {name: x for name, x in outputs.items() if name in (*_DIFFERENTIABLE, "row_max")}
        groups = arrays, fetched, saved
        ctx.names = [tuple(group) for group in groups]
        ctx.save_for_backward(*(x for group in groups for x in group.values()))
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, output_grads = iter(ctx.saved_tensors), dict(zip(ctx.outputs, grads, strict=True))
        operands, fetched, outputs = ({name: next(tensors) for name in names} for names in ctx.names)
        # row_max has no gradient, so log_denom has the gradient of the log-sum-exp.
        incoming = RowGradients(*map(output_grads.get, _DIFFERENTIABLE))
        requested = frozenset(itertools.compress(operands, ctx.needs_input_grad[1:]))
        with ctx.call.problem.ops.numeric_scope():
            gradients = ctx.call.backward(operands, fetched, parts.result_of(outputs), incoming, requested)
        return None, *(gradients[name].to(x.dtype) if name in requested else None for name, x in operands.items())


_DIFFERENTIABLE = ("out", "log_denom", "entropy")


@dataclass(frozen=True, eq=False)
class RankCall(parts.Call):
    """A call on one rank of a process group."""

    ranks: Ranks

    @property
    def queries(self) -> Shard:
        """The queries that this rank holds."""
        return self.plan.queries[self.ranks.rank]

    @property
    def keys(self) -> Shard:
        """The keys that this rank holds."""
        return self.plan.keys[self.ranks.rank]

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the operands with rows, "query" and "key" (the value too)."""
        return {role: tuple(self.operands(role)) for role in ("query", "key")}


class ShardedCall(RankCall):
    """A call that runs kernels over some of the rank's queries and some keys at a time."""

    def compute(self) -> Result:
        operands = self.problem.operands()
        outputs = Differentiated.apply(self, *operands.values())  # type: ignore[no-untyped-call]  # torch's own
        # In the order of `parts.arrays_of`.
        names = ("out", "log_denom", "row_max", *(x for x in self.problem.statistics if x != "log_sum_exp"))
        return parts.result_of(dict(zip(names, outputs, strict=True)))

    @abstractmethod
    def forward(self, operands: Arrays) -> tuple[Result, dict[str, Tensor]]:
        """Return the result of the rank's queries, and fetched arrays that the backward needs."""

    @abstractmethod
    def backward(
        self, operands: Arrays, fetched: Arrays, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        """Return the rank's gradients of the operands in `requested`, in the dtype of sums."""

    @cached_property
    def has_relative_bias(self) -> bool:
        """Whether the bias has a number for each relative offset, key minus query."""
        return self.problem.bias is not None and self.sequence_shape.is_relative(tuple(self.problem.bias.shape))

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.problem.value.dtype, torch.float32)

    # ---- parts

    def make_part(self, rows: Shard, cols: Shard, arrays: Arrays) -> SinglePlan:
        """Return the plan of some queries and keys over `arrays`: operands of the rank's queries and of `cols`."""
        ranges = self.queries.locate(rows)
        arrays = {name: slice_ranges(x, ranges) if name in self.names["query"] else x for name, x in arrays.items()}
        bias = arrays.get("bias")
        bias = None if bias is None else bias[self._bias_index(bias, rows, cols)]
        return self.plan_of(arrays, rows, cols, mask=self.mask_of(rows, cols), bias=bias)

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        """Return the mask of a part."""
        return shard_mask(self.problem.mask, rows, cols, self.queries.length, self.keys.length)

    def _bias_index(self, bias: Tensor, rows: Shard, cols: Shard) -> tuple[Any, ...]:
        """Return the index of a part's entries in `bias`, of the rank's queries and all keys."""
        if self.has_relative_bias:
            # One number for each relative offset, key minus query, in rising order.
            ((start, stop),), ((first, last),) = rows.ranges or ((0, 1),), cols.ranges or ((0, 0),)
            begin = first - stop + self.sequence_shape.query_len
            return ..., slice(begin, begin + last - first + stop - start - 1)
        query_index = index_of(self.queries.locate(rows)) if self.bias_has_queries else slice(None)
        key_index = index_of(cols.ranges) if bias.shape[-1] > 1 else slice(None)
        if isinstance(query_index, Tensor) and isinstance(key_index, Tensor):
            query_index = query_index[:, None]
        return ..., query_index, key_index

    def run(self, rows: Shard, cols: Shard, arrays: Arrays) -> Result:
        """Return the result of a part."""
        return parts.run_part(self.make_part(rows, cols, arrays), cols)

    def add_gradients(
        self, totals: dict[str, Tensor], rows: Shard, cols: Shard, arrays: Arrays, result: Result, grads: RowGradients,
        requested: frozenset[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Add the gradients of a part's operands to `totals`, and return the gradients of the part's keys.

        `result` and `grads` cover all queries of the rank. All gradients are in the dtype of sums, on every rank,
        whichever kernel computes them.
        """
        plan, ranges = self.make_part(rows, cols, arrays), self.queries.locate(rows)
        outputs = {name: slice_ranges(x, ranges) for name, x in parts.arrays_of(result).items()}
        all_grads = (grads.out, grads.log_sum_exp, grads.entropy)
        grad_out, *row_grads = (None if x is None else slice_ranges(x, ranges) for x in all_grads)
        # In the dtype of the part's values: the dtype of sums where parts are merged.
        dtype = plan.problem.value.dtype
        part_result = parts.result_of({**outputs, "out": outputs["out"].to(dtype)})
        part_grads = RowGradients(None if grad_out is None else grad_out.to(dtype), *row_grads)
        names = requested & frozenset(plan.operands())
        gradients = plan.kernel.backward(plan.problem, plan.tiles, part_result, part_grads, names)
        gradients = {name: gradients[name].to(self.sum_dtype) for name in names}
        for name in names - {*self.names["key"]}:
            if name == "bias":
                totals[name][self._bias_index(totals[name], rows, cols)] += gradients[name]
            elif name not in totals:  # only where the part has all queries of the rank
                totals[name] = gradients[name]
            elif name in self.names["query"]:
                add_rows(totals[name], ranges, gradients[name])
            else:
                totals[name].add_(gradients[name])
        return {name: gradients[name] for name in self.names["key"] if name in names}

    def zeros_like(self, operands: Arrays, names: Iterable[str]) -> dict[str, Tensor]:
        """Return zeros with the shapes of these operands, in the dtype of sums."""
        return {name: torch.zeros_like(operands[name], dtype=self.sum_dtype) for name in names}

    def fetch_keys(self, arrays: Arrays, movement: Movement) -> Callable[[], dict[str, Tensor]]:
        """Start to fetch keys and values; return a function that waits for them."""
        keys = {name: arrays[name] for name in self.names["key"]}
        return self.ranks.fetch(keys, dict.fromkeys(keys, movement))


class MergedCall(ShardedCall):
    """A call that computes results over disjoint keys and merges them by their log-sum-exp."""

    @staticmethod
    def reasons_against(problem: Problem, sequence_shape: ScoreShape) -> tuple[str, ...]:
        reasons = []
        if problem.normalizer is not None:
            reasons.append(parts.SOFTMAX_ALONE)
        if problem.bias is not None and sequence_shape.is_relative(tuple(problem.bias.shape)):
            reasons.append("a bias by relative position")
        return tuple(reasons)

    @property
    def part_statistics(self) -> tuple[str, ...]:
        return statistics_to_join(self.problem.statistics)

    def make_part(self, rows: Shard, cols: Shard, arrays: Arrays) -> SinglePlan:
        # The values, and so the output, are in the dtype of sums.
        return super().make_part(rows, cols, {**arrays, "value": arrays["value"].to(self.sum_dtype)})

    def merge(self, operands: Arrays, blocks: Iterable[tuple[Shard, Shard, Arrays]]) -> Result:
        """Return the result of the rank's queries, merged from blocks of disjoint keys, then with the sink."""
        ops, value = self.problem.ops, operands["value"]
        shape = self.problem.score_shape.rows, self.problem.layout.value_dim
        state = online_softmax.start(ops, *shape, value, accumulator(self.problem.dtype), self.part_statistics)
        for rows, cols, arrays in blocks:
            part = self.make_part(rows, cols, {name: x for name, x in arrays.items() if name != "sink"})
            state_of_keys = parts.state_of_part(part, cols)
            ranges = self.queries.locate(rows)
            before = map_leaves(partial(slice_ranges, ranges=ranges), state)
            merged = online_softmax.merge(ops, before, state_of_keys)
            map_leaves(lambda x, y, ranges=ranges: copy_rows(x, ranges, y), state, merged)
        result = parts.finish(ops, state, operands.get("sink"), self.problem.statistics)
        return dataclasses.replace(result, out=result.out.to(value.dtype))


class Gather(ShardedCall):
    """Fetch the keys that the rank's queries attend and that other ranks hold.

    Inner queries, which attend keys of this rank alone, are computed while the keys of the outer queries are on their
    way. The inner part has all queries of the rank with the outer ones masked, so that its arrays have room for the
    results of both.
    """

    @cached_property
    def outer(self) -> Shard:
        """The queries that may attend keys of other ranks."""
        other_keys = difference(self.plan.needed[self.ranks.rank], self.keys)
        outer = self.plan.attending_keys(self.queries, other_keys)
        # A bias by relative position is cut to one range of queries and one of keys.
        return self.queries if len(outer) and self.has_relative_bias else outer

    @cached_property
    def has_inner_part(self) -> bool:
        """Whether the inner part is computed: there are inner queries, or no queries, whose empty result it gives."""
        return self.outer != self.queries or not len(self.queries)

    @cached_property
    def movement(self) -> Movement:
        """The keys that ranks fetch; this one without the keys that its inner queries alone attend."""
        plan, rank = self.plan, self.ranks.rank
        # Also the keys of other ranks that the plan fetches in gaps for inner queries: their owners send them.
        needed = plan.keys_of(self.outer) | difference(plan.needed[rank], plan.keys[rank])
        if self.has_relative_bias and needed.ranges:
            needed = Shard(((needed.ranges[0][0], needed.ranges[-1][1]),), needed.length)
        return Movement(plan.keys, (*plan.needed[:rank], needed, *plan.needed[rank + 1 :]))

    def mask_of(self, rows: Shard, cols: Shard) -> Mask | None:
        mask = super().mask_of(rows, cols)
        if rows == self.outer or not len(self.outer):
            return mask
        key_counts = np.full((self.sequence_shape.batch, len(rows)), len(cols))
        for start, stop in rows.locate(self.outer):
            key_counts[:, start:stop] = 0
        return all_of([*([] if mask is None else [mask]), ValidLens(key_counts)])

    def forward(self, operands: Arrays) -> tuple[Result, dict[str, Tensor]]:
        wait, results = self.fetch_keys(operands, self.movement), []
        if self.has_inner_part:
            results.append(self.run(self.queries, self.keys, operands))
        fetched = wait()
        if len(self.outer):
            results.append(self.run(self.outer, self.movement.needed[self.ranks.rank], {**operands, **fetched}))
        if len(results) == 2:
            target, source = map(parts.arrays_of, results)
            for name, x in target.items():
                copy_rows(x, self.queries.locate(self.outer), source[name])
        return results[0], fetched

    def backward(
        self, operands: Arrays, fetched: Arrays, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        totals = self.zeros_like(operands, requested.difference(*self.names.values()))
        key_gradients = {x: operands[x][..., :0, :].to(self.sum_dtype) for x in self.names["key"] if x in requested}
        if self.has_inner_part:
            totals |= self.add_gradients(totals, self.queries, self.keys, operands, result, grads, requested)
        if len(self.outer):
            arrays, cols = {**operands, **fetched}, self.movement.needed[self.ranks.rank]
            # The sink's gradient is a sum over all queries, which the inner part has.
            names = requested - {"sink"} if self.has_inner_part else requested
            key_gradients = self.add_gradients(totals, self.outer, cols, arrays, result, grads, names)
        return self.ranks.give_back(key_gradients, dict.fromkeys(key_gradients, self.movement), totals)


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

    def forward(self, operands: Arrays) -> tuple[Result, dict[str, Tensor]]:
        blocks = ((self.queries, self.plan.keys[owner], arrays) for owner, arrays in self._blocks(operands))
        return self.merge(operands, blocks), {}

    def backward(
        self, operands: Arrays, fetched: Arrays, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        totals = self.zeros_like(operands, requested.difference(*self.names.values()))
        wait: Callable[[], dict[str, Tensor]] = dict  # no gradients arrive before the first are sent
        for owner, arrays in self._blocks(operands):
            # The sink is one more key, whose gradient is computed once.
            names = requested if owner == self.ranks.rank else requested - {"sink"}
            keys = self.plan.keys[owner]
            key_gradients = self.add_gradients(totals, self.queries, keys, arrays, result, grads, names)
            if owner == self.ranks.rank:
                # The gradients from the other ranks, which the next rank begins to sum, arrive at the end.
                totals |= key_gradients
                continue
            for name, x in wait().items():
                key_gradients[name].add_(x)
            wait = self.ranks.fetch(key_gradients, dict.fromkeys(key_gradients, self._movement(owner)))
        for name, x in wait().items():
            totals[name].add_(x)
        return totals

    def _blocks(self, operands: Arrays) -> Iterator[tuple[int, Arrays]]:
        """Yield operands with the keys of one rank after another, this one's first, while the next ones are sent."""
        arrays, owner = operands, self.ranks.rank
        for _ in self.ranks.peers:
            wait = self.fetch_keys(arrays, self._movement(owner))
            yield owner, arrays
            arrays, owner = {**operands, **wait()}, (owner - 1) % self.ranks.count
        yield owner, arrays

    def _movement(self, owner: int) -> Movement:
        """Return how the keys of `owner`, which this rank has, move to the next rank, and all other keys alike."""
        count, keys = self.ranks.count, self.plan.keys
        held = tuple(keys[(rank + owner - self.ranks.rank) % count] for rank in range(count))
        return Movement(held, (held[-1], *held[:-1]))


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

    def forward(self, operands: Arrays) -> tuple[Result, dict[str, Tensor]]:
        movement = self.plan.fetched_blocks
        fetched = self.fetch_keys(operands, movement)()
        blocks = self._blocks(movement.needed[self.ranks.rank], {**operands, **fetched}, FORWARD_KEYS)
        return self.merge(operands, blocks), fetched

    def backward(
        self, operands: Arrays, fetched: Arrays, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Tensor]:
        grad_out = grads.out if grads.out is not None else torch.zeros_like(result.out)
        delta = (result.out.to(self.sum_dtype) * grad_out.to(self.sum_dtype)).sum(-1, keepdim=True)
        delta = delta if grads.log_sum_exp is None else delta - grads.log_sum_exp
        sent = {name: operands[name] for name in self.names["query"]}
        sent |= {"grad_out": grad_out, "row_max": result.row_max, "log_denom": result.log_denom, "delta": delta}
        if "entropy" in self.problem.statistics:
            grad_entropy = grads.entropy if grads.entropy is not None else torch.zeros_like(delta)
            sent |= {"entropy": result.statistics["entropy"], "grad_entropy": grad_entropy}
        wait = self.ranks.fetch(sent, dict.fromkeys(sent, self.plan.passed))
        # The gradients of the rank's own queries, while the other queries are on their way.
        key_names = {*self.names["key"]}
        totals = self.zeros_like(operands, requested - key_names)
        names = requested - key_names - {"sink"}
        arrays, keys = {**operands, **fetched}, self.plan.fetched_blocks.needed[self.ranks.rank]
        for block in self._blocks(keys, arrays, BACKWARD_KEYS) if names else ():
            self.add_gradients(totals, *block, result, grads, names)
        if "sink" in requested:
            no_keys = {name: x[..., :0, :] if name in key_names else x for name, x in operands.items()}
            empty = Shard.empty(self.keys.length)
            self.add_gradients(totals, self.queries, empty, no_keys, result, grads, frozenset({"sink"}))
        return totals | self._key_gradients(operands, wait(), requested & key_names)

    def _key_gradients(self, operands: Arrays, arrived: Arrays, requested: frozenset[str]) -> dict[str, Tensor]:
        """Return the gradients of the rank's keys, from all queries that attend them."""
        owner_call = dataclasses.replace(self, plan=dataclasses.replace(self.plan, queries=self.plan.passed.needed))
        entropy = {"entropy": arrived["entropy"]} if "entropy" in arrived else {}
        # Only delta was sent of the output: with an output of 0, the kernel computes delta as dout . 0 - (-delta).
        zero_out = torch.zeros_like(arrived["grad_out"])
        result = Result(zero_out, arrived["row_max"], arrived["log_denom"], entropy)
        grads = RowGradients(arrived["grad_out"], -arrived["delta"], arrived.get("grad_entropy"))
        arrays = {**operands, **{name: arrived[name] for name in self.names["query"]}}
        totals = self.zeros_like(operands, requested)
        blocks = owner_call._blocks(self.keys, arrays, BACKWARD_KEYS, BACKWARD_QUERIES) if requested else ()
        for block in blocks:
            for name, x in owner_call.add_gradients({}, *block, result, grads, requested).items():
                copy_rows(totals[name], self.keys.locate(block[1]), x)
        return totals

    def _blocks(
        self, keys: Shard, arrays: Arrays, size: int, queries: int = 1
    ) -> Iterator[tuple[Shard, Shard, dict[str, Tensor]]]:
        """Yield the queries that attend each block of `size` keys, in whole blocks of `queries`, the block, its arrays.

        `arrays` are the operands over `keys`.
        """
        firsts = (first for pair in in_blocks(keys, size).ranges for first in range(*pair, size))
        for first in firsts:
            block = keys & Shard(((first, min(first + size, keys.length)),), keys.length)
            attending = in_blocks(self.plan.attending_keys(self.queries, block), queries) & self.queries
            if len(attending):
                block_arrays = {name: slice_ranges(arrays[name], keys.locate(block)) for name in self.names["key"]}
                yield attending, block, {**arrays, **block_arrays}


def index_of(ranges: Sequence[Range]) -> slice | Tensor:
    """Return the index of the positions in `ranges`: a slice, which copies nothing, where that is one range."""
    slices = tuple(slice(*pair) for pair in ranges or ((0, 0),))
    return slices[0] if len(slices) == 1 else torch.from_numpy(np.r_[slices])


@final
class Heads(parts.HeadsCall, RankCall):
    """`HeadsCall` by the messages of a process group."""

    def to_heads(self, arrays: Arrays) -> dict[str, Tensor]:
        shards = dict.fromkeys(arrays, self.plan.queries) | dict.fromkeys(self.names["key"], self.plan.keys)
        movements = {name: self._movement(shards[name], x.shape[-4] > 1) for name, x in arrays.items()}
        return move_rows(self.ranks, arrays, movements)

    def to_rows(self, arrays: Arrays) -> dict[str, Tensor]:
        movements = dict.fromkeys(arrays, self._movement(self.plan.queries, True))
        return move_rows(self.ranks, arrays, movements, is_return=True)

    def own_heads(self, x: Tensor, axis: int = -4) -> Tensor:
        return x.chunk(self.ranks.count, axis)[self.ranks.rank]

    def _movement(self, shards: tuple[Shard, ...], by_heads: bool) -> Movement:
        """Return how all rows of an array move to all ranks, each of which gets some heads, or all."""
        return Movement(shards, (Shard.whole(shards[0].length),) * self.ranks.count, by_heads)


MODE_CLASSES: Final[dict[str, type[RankCall]]] = {"gather": Gather, "ring": Ring, "heads": Heads}
