"""What the ranks of a process group send each other: rows of arrays by their positions, all of it asynchronous.

- Rows travel between pairs of ranks, as many as a rank needs (an uneven all-to-all); a range that is in one piece of
  memory is sent from there and received where it is read.
- Each function posts its messages and returns a function that waits for them, so that a rank computes meanwhile.
- A rank that is late or has died ends the wait of the others with the error of torch, after the timeout of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from attnscore.parallel.pairs import Range
from attnscore.parallel.shard import Shard

Arrays = Mapping[str, Tensor]
"""Arrays (..., position, dim) by name."""
# The name of recent releases.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Wait = Callable[[], dict[str, Tensor]]
# From here on ranges are sent as one message, by a copy.
_MANY_RANGES = 8


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a process group."""

    group: dist.ProcessGroup
    rank: int
    count: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Return the ranks of a process group, or of a device mesh of one axis; None is the default group."""
        if hasattr(group, "get_group"):
            group = group.get_group()
        found = dist.group.WORLD if group is None else group
        return cls(cast(dist.ProcessGroup, found), dist.get_rank(found), dist.get_world_size(found))

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks, from the next one on: so that not all send to rank 0 first."""
        return tuple((self.rank + step) % self.count for step in range(1, self.count))

    @property
    def device(self) -> torch.device:
        """Where a rank has numbers to send that has no tensors."""
        is_on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Post messages to and from other ranks, in the order in which both sides list those of a pair."""
        messages = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        messages += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            for work in works:
                work.wait()
            # Of gloo, messages read the memory of these arrays until they are sent.
            messages.clear()

        return wait

    def fetch(self, arrays: Arrays, plan: Transfers) -> Wait:
        """Start to fetch the rows of a plan; the function returns arrays of the rows wanted here, in global order."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        found: dict[str, Tensor] = {}
        for name, x in arrays.items():
            rows = positions_first(x)
            whole = rows.new_empty((len(plan.wanted), *rows.shape[1:]))
            found[name] = positions_last(whole)
            packed: dict[Shard, Tensor] = {}
            for peer in self.others:
                if len(part := plan.to_send[peer]):
                    # Ranks often need the same rows.
                    packed[part] = packed[part] if part in packed else _pack(rows, plan.held.locate(part))
                    sends.append((peer, packed[part]))
                if len(part := plan.to_receive[peer]):
                    at = joined(plan.wanted.locate(part))
                    if len(at) == 1:
                        receives.append((peer, whole[slice(*at[0])]))
                    else:
                        buffer = rows.new_empty((len(part), *rows.shape[1:]))
                        receives.append((peer, buffer))
                        later.append((whole, at, buffer))
        wait = self.post(sends, receives)
        own = plan.held & plan.wanted
        for name, x in arrays.items():
            copy_rows(positions_first(found[name]), plan.wanted.locate(own), positions_first(x), plan.held.locate(own))

        def finish() -> dict[str, Tensor]:
            wait()
            for whole, at, buffer in later:
                copy_rows(whole, at, buffer)
            return found

        return finish

    def give_back(self, gradients: Arrays, plan: Transfers) -> Callable[[dict[str, Tensor]], None]:
        """Start to return gradients of the rows that `fetch` fetched to their owners.

        The function takes arrays of the rows that this rank holds, and adds to them what all ranks return for them;
        those that it is not given, it makes. It sends to one rank and receives from one at a time, in the same order on
        all: the memory is that of one rank's.
        """
        steps = self._exchanges(gradients, plan)
        posted = [*islice(steps, 1)]

        def finish(sums: dict[str, Tensor]) -> None:
            own = plan.held & plan.wanted
            for name, x in gradients.items():
                rows, kept, place = positions_first(x), plan.wanted.locate(own), plan.held.locate(own)
                if name in sums:
                    add_rows(positions_first(sums[name]), place, rows, kept)
                    continue
                make = x.new_empty if len(own) == len(plan.held) else x.new_zeros
                sums[name] = make((*x.shape[:-2], len(plan.held), x.shape[-1]))
                copy_rows(positions_first(sums[name]), place, rows, kept)
            while posted:
                at, arriving, wait = posted.pop()
                wait()
                for name, rows in arriving.items():
                    add_rows(positions_first(sums[name]), at, rows)
                # Before those of the next rank need memory.
                del arriving, rows, wait
                posted.extend(islice(steps, 1))

        return finish

    def _exchanges(
        self, gradients: Arrays, plan: Transfers
    ) -> Iterator[tuple[Sequence[Range], dict[str, Tensor], Callable[[], None]]]:
        """Post the messages of `give_back` to and from one rank after another.

        Yields where the rows that arrive belong in the arrays of this rank, the rows, and the function that waits.
        """
        for to, source in zip(self.others, reversed(self.others), strict=True):
            sent, received = plan.to_receive[to], plan.to_send[source]
            if not gradients or not (len(sent) or len(received)):
                continue
            sends: list[tuple[int, Tensor]] = []
            receives: list[tuple[int, Tensor]] = []
            arriving: dict[str, Tensor] = {}
            for name, x in gradients.items():
                rows = positions_first(x)
                sends += [(to, message) for message in _messages(rows, plan.wanted.locate(sent))]
                arriving[name] = rows.new_empty((len(received), *rows.shape[1:]))
                receives += [(source, message) for message in _messages(arriving[name], received.locate(received))]
            wait = self.post(sends, receives)
            del sends, receives
            yield plan.held.locate(received), arriving, wait

    def rows_to_heads(self, arrays: Arrays, shards: Mapping[str, Sequence[Shard]]) -> Wait:
        """Start to exchange the rank's rows of all heads, (..., head, group, own row, dim), for all rows of its heads.

        `shards` has those of all ranks for each array. An array whose axis of heads is 1 goes to all ranks. In memory
        the heads come first: what is sent of an array with one batch row is a part of it, without a copy.
        """
        found: dict[str, Tensor] = {}
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        for name, x in arrays.items():
            held, length = shards[name], shards[name][0].length
            first = heads_first(x)
            parts = first.chunk(self.count) if len(first) > 1 else (first,) * self.count
            whole = x.new_empty((*parts[self.rank].shape[:-2], length, x.shape[-1]))
            found[name] = heads_last(whole)
            copy_rows(positions_first(whole), held[self.rank].ranges, positions_first(parts[self.rank]))
            for peer in self.others:
                if len(held[self.rank]):
                    sends.append((peer, parts[peer].contiguous()))
                if len(held[peer]):
                    buffer = x.new_empty((*whole.shape[:-2], len(held[peer]), x.shape[-1]))
                    receives.append((peer, buffer))
                    later.append((positions_first(whole), held[peer].ranges, positions_first(buffer)))
        wait = self.post(sends, receives)

        def finish() -> dict[str, Tensor]:
            wait()
            for to, at, buffer in later:
                copy_rows(to, at, buffer)
            return found

        return finish

    def heads_to_rows(
        self, arrays: Arrays, shards: Mapping[str, Sequence[Shard]], heads: Mapping[str, int]
    ) -> Wait:  # fmt: skip
        """Start the inverse of `rows_to_heads`; arrays that have 1 of `heads` are summed over the ranks.

        The heads of each rank arrive in their place.
        """
        by_rank: dict[str, Tensor] = {}
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for name, x in arrays.items():
            held, first = shards[name], heads_first(x)
            count = len(held[self.rank])
            found = by_rank[name] = x.new_empty((self.count, *first.shape[:-2], count, x.shape[-1]))
            own = positions_first(found[self.rank])
            copy_rows(own, ((0, count),), positions_first(first), held[self.rank].ranges)
            for peer in self.others:
                if len(held[peer]):
                    sends.append((peer, cut(first, held[peer].ranges).contiguous()))
                if count:
                    receives.append((peer, found[peer]))
        wait = self.post(sends, receives)

        def finish() -> dict[str, Tensor]:
            wait()
            return {name: heads_last(x.flatten(0, 1) if heads[name] > 1 else x.sum(0)) for name, x in by_rank.items()}

        return finish

    def agree(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the numbers of all ranks, in the order of ranks."""
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        found = own.new_empty(self.count * len(numbers))
        _all_gather(found, own, group=self.group)
        return found.view(self.count, len(numbers)).tolist()

    def objects(self, x: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, x, group=self.group)
        return found


@dataclass(frozen=True)
class Transfers:
    """The rows that one rank holds and wants, and those that it sends to each rank and receives from it."""

    held: Shard
    wanted: Shard
    to_send: tuple[Shard, ...]
    to_receive: tuple[Shard, ...]

    @classmethod
    def of(cls, held: Sequence[Shard], wanted: Sequence[Shard], rank: int) -> Transfers:
        """Return the transfers of a rank, where each rank holds and wants these rows."""
        own, own_wanted = held[rank], wanted[rank]
        return cls(own, own_wanted, tuple(own & other for other in wanted), tuple(other & own_wanted for other in held))


class SumOverRanks(torch.autograd.Function):
    """The identity, for an array that all ranks have: its gradient is the sum of theirs."""

    @classmethod
    def of(cls, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return an array of all ranks with a gradient that is summed over them."""
        is_summed = x.requires_grad and torch.is_grad_enabled()
        return cls.apply(x, group) if is_summed else x  # type: ignore[no-untyped-call]  # torch's own

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def positions_first(x: Tensor) -> Tensor:
    """View (..., position, dim) as (position, ..., dim)."""
    return x.movedim(-2, 0)


def positions_last(x: Tensor) -> Tensor:
    """View (position, ..., dim) as (..., position, dim)."""
    return x.movedim(0, -2)


def heads_first(x: Tensor) -> Tensor:
    """View (..., head, group, position, dim) as (head, ..., group, position, dim)."""
    return x.movedim(-4, 0)


def heads_last(x: Tensor) -> Tensor:
    """View (head, ..., group, position, dim) as (..., head, group, position, dim)."""
    return x.movedim(0, -4)


def cut(x: Tensor, ranges: Sequence[Range], axis: int = -2) -> Tensor:
    """Return the rows of an array in `ranges` of its axis: a view where that is one range."""
    parts = [x.narrow(axis, start, stop - start) for start, stop in joined(ranges) or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Return ranges in rising order, those that touch as one."""
    found: list[Range] = []
    for start, stop in ranges:
        touches = found and found[-1][1] == start
        found.append((found.pop()[0] if touches else start, stop))
    return found


def copy_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None) -> None:
    """Copy rows in `ranges` of the first axis, or all of them, to those in `to_ranges`, in order; as many of both."""
    for place, source in _paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[place].copy_(rows[source])


def add_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None) -> None:
    """Add rows to others, as `copy_rows` copies them."""
    for place, source in _paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[place].add_(rows[source])


def _paired(first: Sequence[Range], second: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """Yield the largest slices of the same sizes that make up two lists of ranges with as many rows."""
    first, second = joined(first)[::-1], joined(second)[::-1]
    while first and second:
        (start, stop), (other, other_stop) = first.pop(), second.pop()
        size = min(stop - start, other_stop - other)
        yield slice(start, start + size), slice(other, other + size)
        if start + size < stop:
            first.append((start + size, stop))
        if other + size < other_stop:
            second.append((other + size, other_stop))


def _messages(rows: Tensor, ranges: Sequence[Range]) -> list[Tensor]:
    """Return what is sent of the rows in `ranges`: each range where they are few, which takes no copy, else all packed.

    Both sides of a message have as many ranges, of the same lengths.
    """
    if len(ranges) > _MANY_RANGES:
        return [_pack(rows, ranges)]
    return [rows[start:stop].contiguous() for start, stop in ranges]


def _pack(rows: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the rows in `ranges` in one piece of memory: a view where they are one already."""
    return cut(rows, ranges, 0).contiguous()
