"""What the ranks of a process group send each other: rows of arrays by their positions, all of it asynchronous.

- Rows travel between pairs of ranks, as many as a rank needs (an uneven all-to-all); a range that is in one piece of
  memory is sent from there and received where it is read.
- Each function posts its messages and returns a function that waits for them, so that a rank computes meanwhile.
- A rank that is late or has died ends the wait of the others with the error of torch, after the timeout of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
                copy_rows(whole, at, buffer, ((0, len(buffer)),))
            return found

        return finish

    def give_back(self, gradients: Arrays, plan: Transfers) -> Wait:
        """Start to return gradients of the rows that `fetch` fetched to their owners.

        The function returns their sums, of the rows that this rank holds, over all ranks that had fetched them.
        """
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arriving: dict[str, list[tuple[Sequence[Range], Tensor]]] = {}
        for name, x in gradients.items():
            rows = positions_first(x)
            arriving[name] = []
            for peer in self.others:
                if len(part := plan.to_receive[peer]):
                    sends.append((peer, _pack(rows, plan.wanted.locate(part))))
                if len(part := plan.to_send[peer]):
                    buffer = rows.new_empty((len(part), *rows.shape[1:]))
                    receives.append((peer, buffer))
                    arriving[name].append((plan.held.locate(part), buffer))
        wait = self.post(sends, receives)
        own = plan.held & plan.wanted

        def finish() -> dict[str, Tensor]:
            found = {}
            for name, x in gradients.items():
                rows = positions_first(x)
                whole = rows.new_zeros((len(plan.held), *rows.shape[1:]))
                copy_rows(whole, plan.held.locate(own), rows, plan.wanted.locate(own))
                found[name] = positions_last(whole)
            wait()
            for name, parts in arriving.items():
                for at, buffer in parts:
                    add_rows(positions_first(found[name]), at, buffer)
            return found

        return finish

    def rows_to_heads(self, arrays: Arrays, shards: Sequence[Shard]) -> Wait:
        """Start to exchange the rank's rows of all heads, (..., head, group, own row, dim), for all rows of its heads.

        An array whose axis of heads is 1 goes to all ranks.
        """
        whole = Shard.whole(shards[0].length)
        found: dict[str, Tensor] = {}
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        for name, x in arrays.items():
            parts = [positions_first(part) for part in self._by_head(x)]
            rows = x.new_empty((whole.length, *parts[self.rank].shape[1:]))
            found[name] = positions_last(rows)
            copy_rows(rows, whole.locate(shards[self.rank]), parts[self.rank], ((0, len(shards[self.rank])),))
            for peer in self.others:
                if len(shards[self.rank]):
                    sends.append((peer, parts[peer].contiguous()))
                if len(shards[peer]):
                    at = whole.locate(shards[peer])
                    buffer = rows[slice(*at[0])] if len(at) == 1 else x.new_empty((len(shards[peer]), *rows.shape[1:]))
                    receives.append((peer, buffer))
                    later += [(rows, at, buffer)] if len(at) > 1 else []
        wait = self.post(sends, receives)

        def finish() -> dict[str, Tensor]:
            wait()
            for rows, at, buffer in later:
                copy_rows(rows, at, buffer, ((0, len(buffer)),))
            return found

        return finish

    def heads_to_rows(self, arrays: Arrays, shards: Sequence[Shard], heads: Mapping[str, int]) -> Wait:
        """Start the inverse of `rows_to_heads`; arrays that have 1 of `heads` are summed over the ranks."""
        whole = Shard.whole(shards[0].length)
        found: dict[str, list[Tensor]] = {}
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for name, x in arrays.items():
            rows = positions_first(x)
            found[name] = [rows] * self.count
            for rank, shard in enumerate(shards):
                part = _pack(rows, whole.locate(shard))
                if rank == self.rank:
                    found[name][rank] = part
                    continue
                if len(shard):
                    sends.append((rank, part))
                found[name][rank] = rows.new_empty((len(shards[self.rank]), *rows.shape[1:]))
                if len(shards[self.rank]):
                    receives.append((rank, found[name][rank]))
        wait = self.post(sends, receives)

        def finish() -> dict[str, Tensor]:
            wait()
            by_rank = {name: [positions_last(x) for x in parts] for name, parts in found.items()}
            return {
                name: torch.cat(parts, -4) if heads[name] > 1 else torch.stack(parts).sum(0)
                for name, parts in by_rank.items()
            }

        return finish

    def _by_head(self, x: Tensor) -> Sequence[Tensor]:
        """Return each rank's heads of an array (..., head or 1, group, row, dim)."""
        return x.chunk(self.count, -4) if x.shape[-4] > 1 else (x,) * self.count

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


def copy_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range]) -> None:
    """Copy rows in `ranges` of the first axis to those in `to_ranges`, in order; as many of both."""
    to_ranges, ranges = joined(to_ranges), joined(ranges)
    if len(to_ranges) == len(ranges) == 1:
        to[slice(*to_ranges[0])].copy_(rows[slice(*ranges[0])])
        return
    first, source = 0, cut(rows, ranges, 0)
    for start, stop in to_ranges:
        to[start:stop].copy_(source[first : first + stop - start])
        first += stop - start


def add_rows(to: Tensor, ranges: Sequence[Range], rows: Tensor) -> None:
    """Add rows to those in `ranges` of the first axis, in order."""
    first = 0
    for start, stop in ranges:
        to[start:stop].add_(rows[first : first + stop - start])
        first += stop - start


def _pack(rows: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the rows in `ranges` in one piece of memory: a view where they are one already."""
    return cut(rows, ranges, 0).contiguous()
