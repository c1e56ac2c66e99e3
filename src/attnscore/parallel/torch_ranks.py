"""What the ranks of a process group send each other: rows of arrays by their positions, all of it asynchronous.

- Rows travel between pairs of ranks, as many as a rank needs (an uneven all-to-all); a range that is in one piece of
  memory is sent from there and received where it is read.
- Each function posts its messages and returns a function that waits for them, so that a rank computes meanwhile.
- A rank that is late or has died ends the wait of the others with the error of torch, after the timeout of the group.
"""

from __future__ import annotations

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
        group = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

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

    def fetch(self, arrays: Arrays, plans: Transfers | Mapping[str, Transfers]) -> Callable[[], dict[str, Tensor]]:
        """Start to fetch the rows that this rank needs, of all arrays alike or of each; in global order."""
        plans = dict.fromkeys(arrays, plans) if isinstance(plans, Transfers) else plans
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        copied_later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        fetched: dict[str, Tensor] = {}
        for name, x in arrays.items():
            plan, rows = plans[name], positions_first(plans[name].heads_of(x, self.rank))
            whole = rows.new_empty((len(plan.needed), *rows.shape[1:]))
            fetched[name] = positions_last(whole)
            packed: dict[tuple[Shard, int | None], Tensor] = {}
            for peer in self.others:
                if len(part := plan.to_send[peer]):
                    # Ranks often need the same rows.
                    key = part, peer if plan.by_heads else None
                    if key not in packed:
                        packed[key] = _pack(positions_first(plan.heads_of(x, peer)), plan.held.locate(part))
                    sends.append((peer, packed[key]))
                if len(part := plan.to_receive[peer]):
                    at = plan.needed.locate(part)
                    if len(at) == 1:
                        receives.append((peer, whole[slice(*at[0])]))
                    else:
                        buffer = rows.new_empty((len(part), *rows.shape[1:]))
                        receives.append((peer, buffer))
                        copied_later.append((whole, at, buffer))
        wait = self.post(sends, receives)
        for name, x in arrays.items():
            to, source = plans[name].staying
            copy_rows(positions_first(fetched[name]), to, positions_first(plans[name].heads_of(x, self.rank)), source)

        def finish() -> dict[str, Tensor]:
            wait()
            for whole, at, buffer in copied_later:
                copy_rows(whole, at, buffer)
            return fetched

        return finish

    def give_back(
        self, gradients: Arrays, plans: Transfers | Mapping[str, Transfers]
    ) -> Callable[[dict[str, Tensor]], None]:
        """Start to return arrays of the rows that `fetch` fetched, such as gradients, to the owners of the rows.

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
                    sends.append((to, _pack(rows, plan.needed.locate(plan.to_receive[to]))))
                    arriving[name] = rows.new_empty((len(plan.to_send[source]), *rows.shape[1:]))
                wait = self.post(sends, [(source, x) for x in arriving.values()])
                del sends
                yield
                wait()
                for name, rows in arriving.items():
                    plan = plans[name]
                    at = plan.held.locate(plan.to_send[source])
                    add_rows(positions_first(plan.heads_of(sums[name], source)), at, rows)
                # Before those of the next rank need memory.
                del arriving, rows, wait

        posted = messages()
        next(posted, None)

        def finish(totals: dict[str, Tensor]) -> None:
            for name, x in gradients.items():
                (at, held), plan = plans[name].staying, plans[name]
                if name not in totals:
                    zeros = x.new_zeros((*x.shape[:-2], len(plan.held), x.shape[-1]))
                    totals[name] = zeros.repeat_interleave(self.count, -4) if plan.by_heads else zeros
                add_rows(positions_first(plan.heads_of(totals[name], self.rank)), held, positions_first(x), at)
            sums.update(totals)
            for _ in posted:
                pass

        return finish

    def agree(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the numbers of all ranks, in the order of ranks."""
        numbers_of_rank = torch.tensor(numbers, dtype=torch.int64, device=device)
        numbers_of_all = numbers_of_rank.new_empty(self.count * len(numbers))
        _all_gather(numbers_of_all, numbers_of_rank, group=self.group)
        return numbers_of_all.view(self.count, len(numbers)).tolist()

    def objects(self, x: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        objects: list[Any] = [None] * self.count
        dist.all_gather_object(objects, x, group=self.group)
        return objects


@dataclass(frozen=True)
class Transfers:
    """The rows that one rank holds and needs, and the rows that it sends to each rank and receives from it."""

    held: Shard
    needed: Shard
    to_send: tuple[Shard, ...]
    to_receive: tuple[Shard, ...]
    by_heads: bool = False
    """Whether a rank needs the rows of its share of the heads alone."""

    @classmethod
    def of(cls, held: Sequence[Shard], needed: Sequence[Shard], rank: int, *, by_heads: bool = False) -> Transfers:
        """Return the transfers of a rank, where each rank holds and needs these rows."""
        to_send = tuple(held[rank] & rows for rows in needed)
        return cls(held[rank], needed[rank], to_send, tuple(rows & needed[rank] for rows in held), by_heads)

    @property
    def staying(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Where the rows that the rank both needs and holds are among those needed, and among those held."""
        rows = self.held & self.needed
        return self.needed.locate(rows), self.held.locate(rows)

    def heads_of(self, x: Tensor, rank: int) -> Tensor:
        """Return the heads of an array (..., head, group, position, dim) of which a rank needs the rows."""
        return x.chunk(len(self.to_send), -4)[rank] if self.by_heads else x


def summed_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of an array that all ranks have, whose gradient is the sum over the ranks."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x

    def total(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=group)
        return grad

    view = x.view_as(x)
    view.register_hook(total)  # type: ignore[no-untyped-call]  # torch's own
    return view


def positions_first(x: Tensor) -> Tensor:
    """View (..., position, dim) as (position, ..., dim)."""
    return x.movedim(-2, 0)


def positions_last(x: Tensor) -> Tensor:
    """View (position, ..., dim) as (..., position, dim)."""
    return x.movedim(0, -2)


def cut(x: Tensor, ranges: Sequence[Range], axis: int = -2) -> Tensor:
    """Return the rows of an array in `ranges` of its axis: a view where that is one range."""
    parts = [x.narrow(axis, start, stop - start) for start, stop in ranges or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def copy_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None) -> None:
    """Copy rows in `ranges` of the first axis, or all of them, to those in `to_ranges`, in order; as many of both."""
    for target, source in paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[target].copy_(rows[source])


def add_rows(to: Tensor, to_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None) -> None:
    """Add rows to others, as `copy_rows` copies them."""
    for target, source in paired(to_ranges, ((0, len(rows)),) if ranges is None else ranges):
        to[target].add_(rows[source])


def paired(first: Sequence[Range], second: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """Yield the largest slices of the same sizes that make up two lists of ranges with as many rows."""
    first, second = [*first][::-1], [*second][::-1]
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
