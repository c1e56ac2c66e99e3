"""What the ranks of a process group send each other: rows of arrays by their positions, all of it asynchronous.

- Rows travel between pairs of ranks, as many as a rank needs (an uneven all-to-all); a range that is in one piece of
  memory is sent from there and received where it is read.
- Each function posts its messages and returns a function that waits for them, so that a rank computes meanwhile.
- A rank that is late or has died ends the wait of the others with the error of torch, after the timeout of the group.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @property
    def device(self) -> torch.device:
        """Where a rank has numbers to send that has no tensors."""
        is_on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Post messages to and from other ranks, in the order in which both sides list those of a pair.

        Empty arrays are not sent.
        """
        messages = [
            dist.P2POp(way, x, group=self.group, group_peer=peer)
            for way, listed in ((dist.irecv, receives), (dist.isend, sends))
            for peer, x in listed
            if x.numel()
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> None:
            for work in works:
                work.wait()
            # Of gloo, messages read the memory of these arrays until they are sent.
            messages.clear()

        return wait

    def fetch(self, arrays: Arrays, plans: Transfers | Mapping[str, Transfers]) -> Wait:
        """Start to fetch the rows that this rank wants, of all arrays alike or of each; in global order."""
        plans = dict.fromkeys(arrays, plans) if isinstance(plans, Transfers) else plans
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        found: dict[str, Tensor] = {}
        for name, x in arrays.items():
            plan, rows = plans[name], positions_first(x)
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
        for name, x in arrays.items():
            place, own = plans[name].own
            copy_rows(positions_first(found[name]), place, positions_first(x), own)

        def finish() -> dict[str, Tensor]:
            wait()
            for whole, at, buffer in later:
                copy_rows(whole, at, buffer)
            return found

        return finish

    def give_back(
        self, gradients: Arrays, plans: Transfers | Mapping[str, Transfers]
    ) -> Callable[[dict[str, Tensor]], None]:
        """Start to return gradients of the rows that `fetch` fetched to their owners.

        The function takes arrays of the rows that this rank holds, and adds to them what all ranks return for them;
        those that it is not given, it makes. It sends to one rank and receives from one at a time, in the same order on
        all: the memory is that of one rank's.
        """
        plans = dict.fromkeys(gradients, plans) if isinstance(plans, Transfers) else plans
        sums: dict[str, Tensor] = {}

        def messages() -> Iterator[None]:
            for to, source in zip(self.others, reversed(self.others), strict=True) if gradients else ():
                sends: list[tuple[int, Tensor]] = []
                arriving: dict[str, Tensor] = {}
                for name, x in gradients.items():
                    plan, rows = plans[name], positions_first(x)
                    sends.append((to, _pack(rows, plan.wanted.locate(plan.to_receive[to]))))
                    arriving[name] = rows.new_empty((len(plan.to_send[source]), *rows.shape[1:]))
                wait = self.post(sends, [(source, x) for x in arriving.values()])
                del sends
                yield
                wait()
                for name, rows in arriving.items():
                    at = plans[name].held.locate(plans[name].to_send[source])
                    add_rows(positions_first(sums[name]), at, rows)
                # Before those of the next rank need memory.
                del arriving, rows, wait

        posted = messages()
        next(posted, None)

        def finish(found: dict[str, Tensor]) -> None:
            for name, x in gradients.items():
                (at, own), held = plans[name].own, plans[name].held
                if name not in found:
                    found[name] = x.new_zeros((*x.shape[:-2], len(held), x.shape[-1]))
                add_rows(positions_first(found[name]), own, positions_first(x), at)
            sums.update(found)
            for _ in posted:
                pass

        return finish

    def rows_to_heads(self, arrays: Arrays, shards: Mapping[str, Sequence[Shard]]) -> Wait:
        """Start to exchange the rank's rows of all heads, (..., head, group, own row, dim), for all rows of its heads.

        `shards` has those of all ranks for each array. An array whose axis of heads is 1 goes to all ranks.
        """
        plans = {name: self._plans_of_heads(name, shards[name], x.shape[-4]) for name, x in arrays.items()}
        parts: dict[str, Tensor] = {}
        for name, x in arrays.items():
            parts |= zip(plans[name], x.chunk(len(plans[name]), -4), strict=True)
        wait = self.fetch(parts, ChainMap(*plans.values()))
        return lambda: {name: x for name, x in wait().items() if name in arrays}

    def heads_to_rows(
        self, arrays: Arrays, shards: Mapping[str, Sequence[Shard]], heads: Mapping[str, int]
    ) -> Wait:  # fmt: skip
        """Start the inverse of `rows_to_heads`; arrays that have 1 of `heads` are summed over the ranks."""
        plans = {name: self._plans_of_heads(name, shards[name], heads[name]) for name in arrays}
        parts = {part: x if part == name else x[..., :0, :] for name, x in arrays.items() for part in plans[name]}
        add_returned = self.give_back(parts, ChainMap(*plans.values()))

        def finish() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            add_returned(found)
            return {name: torch.cat([found[part] for part in plans[name]], -4) for name in arrays}

        return finish

    def _plans_of_heads(self, name: str, shards: Sequence[Shard], heads: int) -> dict[str, Transfers]:
        """Return what is moved of the heads of each rank, by a name; that of the rank's own is `name`."""
        own, whole, none = shards[self.rank], Shard.whole(shards[0].length), Shard.empty(shards[0].length)
        if heads == 1:
            return {name: Transfers(own, whole, (own,) * self.count, tuple(shards))}
        plans = {}
        for owner in range(self.count):
            to_send = tuple(own if rank == owner else none for rank in range(self.count))
            if owner == self.rank:
                plans[name] = Transfers(own, whole, to_send, tuple(shards))
            else:
                plans[f"{name} of rank {owner}"] = Transfers(own, none, to_send, (none,) * self.count)
        return plans

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

    @property
    def own(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Where the rows that the rank both wants and holds are among those wanted, and among those held."""
        own = self.held & self.wanted
        return self.wanted.locate(own), self.held.locate(own)

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
    for place, source in paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[place].copy_(rows[source])


def add_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None) -> None:
    """Add rows to others, as `copy_rows` copies them."""
    for place, source in paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[place].add_(rows[source])


def paired(first: Sequence[Range], second: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
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


def _pack(rows: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the rows in `ranges` in one piece of memory: a view where they are one already."""
    return cut(rows, ranges, 0).contiguous()
