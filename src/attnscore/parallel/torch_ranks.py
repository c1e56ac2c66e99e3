"""Asynchronous messages between the ranks of a process group: rows of arrays, by their positions.

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
# Recent releases of torch call it all_gather_single.
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
    def peers(self) -> tuple[int, ...]:
        """The other ranks, from the next one on: so that not all send to rank 0 first."""
        return tuple((self.rank + step) % self.count for step in range(1, self.count))

    @property
    def device(self) -> torch.device:
        """Device of the numbers that a rank without tensors sends."""
        is_on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Post messages to and from other ranks; both ranks of a pair list their messages in the same order.

        Empty arrays are not sent.
        """
        operations = [
            dist.P2POp(op, x, group=self.group, group_peer=peer)
            for op, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, x in messages
            if x.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            # Kept until now, as gloo reads the memory of these arrays until they are sent.
            operations.clear()

        return wait

    def fetch(self, arrays: Arrays, plans: Transfers | Mapping[str, Transfers]) -> Callable[[], dict[str, Tensor]]:
        """Start to fetch the rows that this rank needs, in global order; `plans` is one plan, or one for each array."""
        plans = dict.fromkeys(arrays, plans) if isinstance(plans, Transfers) else plans
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        copied_later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        fetched: dict[str, Tensor] = {}
        for name, x in arrays.items():
            plan, rows = plans[name], positions_first(plans[name].heads_of(x, self.rank))
            rows_needed = rows.new_empty((len(plan.needed), *rows.shape[1:]))
            fetched[name] = rows_needed.movedim(0, -2)
            packed: dict[tuple[Shard, int | None], Tensor] = {}
            for peer in self.peers:
                if len(shard := plan.to_send[peer]):
                    # Ranks often need the same rows.
                    key = shard, peer if plan.by_heads else None
                    if key not in packed:
                        packed[key] = _pack(positions_first(plan.heads_of(x, peer)), plan.held.locate(shard))
                    sends.append((peer, packed[key]))
                if len(shard := plan.to_receive[peer]):
                    ranges = plan.needed.locate(shard)
                    if len(ranges) == 1:
                        receives.append((peer, rows_needed[slice(*ranges[0])]))
                    else:
                        buffer = rows.new_empty((len(shard), *rows.shape[1:]))
                        receives.append((peer, buffer))
                        copied_later.append((rows_needed, ranges, buffer))
        wait = self.post(sends, receives)
        for name, x in arrays.items():
            (target_ranges, source_ranges), rows = plans[name].local_ranges, plans[name].heads_of(x, self.rank)
            copy_rows(positions_first(fetched[name]), target_ranges, positions_first(rows), source_ranges)

        def finish() -> dict[str, Tensor]:
            wait()
            for rows_needed, ranges, buffer in copied_later:
                copy_rows(rows_needed, ranges, buffer)
            return fetched

        return finish

    def give_back(
        self, gradients: Arrays, plans: Transfers | Mapping[str, Transfers]
    ) -> Callable[[dict[str, Tensor]], None]:
        """Start to return arrays of the rows that `fetch` fetched, such as gradients, to the owners of the rows.

        The returned function adds the arrays that arrive from all ranks to `totals`, arrays of this rank's rows, and
        makes the missing ones. It sends to one rank and receives from one rank at a time, in the same order on all
        ranks, so that the buffers hold one rank's rows.
        """
        plans = dict.fromkeys(gradients, plans) if isinstance(plans, Transfers) else plans
        sums: dict[str, Tensor] = {}

        def messages() -> Iterator[None]:
            for destination, source in zip(self.peers, reversed(self.peers), strict=True) if gradients else ():
                sends: list[tuple[int, Tensor]] = []
                arriving: dict[str, Tensor] = {}
                for name, x in gradients.items():
                    plan, rows = plans[name], positions_first(x)
                    sends.append((destination, _pack(rows, plan.needed.locate(plan.to_receive[destination]))))
                    arriving[name] = rows.new_empty((len(plan.to_send[source]), *rows.shape[1:]))
                wait = self.post(sends, [(source, x) for x in arriving.values()])
                del sends
                yield
                wait()
                for name, rows in arriving.items():
                    plan = plans[name]
                    held_ranges = plan.held.locate(plan.to_send[source])
                    add_rows(positions_first(plan.heads_of(sums[name], source)), held_ranges, rows)
                # Freed before the next rank's arrays need memory.
                del arriving, rows, wait

        posted = messages()
        next(posted, None)

        def finish(totals: dict[str, Tensor]) -> None:
            for name, x in gradients.items():
                (needed_ranges, held_ranges), plan = plans[name].local_ranges, plans[name]
                if name not in totals:
                    zeros = x.new_zeros((*x.shape[:-2], len(plan.held), x.shape[-1]))
                    totals[name] = zeros.repeat_interleave(self.count, -4) if plan.by_heads else zeros
                rows = positions_first(plan.heads_of(totals[name], self.rank))
                add_rows(rows, held_ranges, positions_first(x), needed_ranges)
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
    def local_ranges(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Ranges of the rows that the rank both needs and holds: among the rows needed, and among the rows held."""
        rows = self.held & self.needed
        return self.needed.locate(rows), self.held.locate(rows)

    def heads_of(self, x: Tensor, rank: int) -> Tensor:
        """Return the heads whose rows a rank needs, of an array (..., head, group, position, dim)."""
        return x.chunk(len(self.to_send), -4)[rank] if self.by_heads else x


def with_summed_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of an array that all ranks have, whose gradient is the sum over the ranks."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x

    def all_reduce(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=group)
        return grad

    view = x.view_as(x)
    view.register_hook(all_reduce)  # type: ignore[no-untyped-call]  # torch's own
    return view


def positions_first(x: Tensor) -> Tensor:
    """View (..., position, dim) as (position, ..., dim)."""
    return x.movedim(-2, 0)


def slice_ranges(x: Tensor, ranges: Sequence[Range], axis: int = -2) -> Tensor:
    """Return the rows of an array in `ranges` of its axis: a view where that is one range."""
    parts = [x.narrow(axis, start, stop - start) for start, stop in ranges or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def copy_rows(
    target: Tensor, target_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None
) -> None:
    """Copy the rows in `ranges` (None: all rows) to the rows of `target` in `target_ranges`."""
    for target_rows, source_rows in pair_slices(target_ranges, ((0, len(rows)),) if ranges is None else ranges):
        target[target_rows].copy_(rows[source_rows])


def add_rows(
    target: Tensor, target_ranges: Sequence[Range], rows: Tensor, ranges: Sequence[Range] | None = None
) -> None:
    """Add to rows of `target` the rows that `copy_rows` would copy."""
    for target_rows, source_rows in pair_slices(target_ranges, ((0, len(rows)),) if ranges is None else ranges):
        target[target_rows].add_(rows[source_rows])


def pair_slices(first: Sequence[Range], second: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of slices of the same size, as long as possible, that together make up two lists of ranges."""
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
    """Return the rows in `ranges`, contiguous in memory: a view where they already are."""
    return slice_ranges(rows, ranges, 0).contiguous()
