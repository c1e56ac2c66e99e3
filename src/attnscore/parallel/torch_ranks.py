"""Asynchronous messages between the ranks of a process group: rows of arrays, by their positions.

- Rows travel between pairs of ranks, as many as a rank needs (an uneven all-to-all); a range that is in one piece of
  memory is sent from there and received where it is read.
- `fetch` posts its messages and returns a function that waits for them, so that a rank computes meanwhile.
- A rank that is late or has died ends the wait of the others with the error of torch, after the timeout of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnscore.parallel.pairs import Range
from attnscore.parallel.plan import Movement
from attnscore.parallel.shard import Shard

Arrays = Mapping[Any, Tensor]
"""Arrays (..., position, dim) by name."""
Movements = Mapping[Any, Movement]
"""Movement of each array."""
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

    def fetch(self, arrays: Arrays, movements: Movements) -> Callable[[], dict[Any, Tensor]]:
        """Start to fetch the rows that this rank needs, in global order; return a function that waits for them."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        copied_later: list[tuple[Tensor, Sequence[Range], Tensor]] = []
        fetched: dict[Any, Tensor] = {}
        for name, x in arrays.items():
            movement, parts = movements[name], self._heads(x, movements[name])
            held, needed = movement.held[self.rank], movement.needed[self.rank]
            fetched[name] = _empty_rows(parts[self.rank], len(needed))
            packed: dict[tuple[Shard, int | None], Tensor] = {}
            for peer in self.peers:
                rows = movement.rows(self.rank, peer)
                # Ranks often need the same rows, of all heads: packed once.
                content = rows, peer if movement.by_heads else None
                if content not in packed:
                    packed[content] = _pack(parts[peer], held.locate(rows))
                sends.append((peer, packed[content]))
                rows = movement.rows(peer, self.rank)
                buffer, ranges = fetched[name], needed.locate(rows)
                if len(ranges) < 2:
                    buffer = slice_ranges(buffer, ranges)
                else:
                    buffer = _empty_rows(buffer, len(rows))
                    copied_later.append((fetched[name], ranges, buffer))
                receives.append((peer, positions_first(buffer)))
        wait = self.post(sends, receives)
        for name, x in arrays.items():
            held, needed = movements[name].held[self.rank], movements[name].needed[self.rank]
            kept = self._heads(x, movements[name])[self.rank]
            copy_rows(fetched[name], needed.locate(held & needed), kept, held.locate(held & needed))

        def finish() -> dict[Any, Tensor]:
            wait()
            for rows, ranges, buffer in copied_later:
                copy_rows(rows, ranges, buffer)
            return fetched

        return finish

    def give_back(self, arrays: Arrays, movements: Movements, totals: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return arrays of the rows that `fetch` fetches, such as gradients, to the owners of the rows.

        Adds the arrays that arrive from all ranks to `totals`, arrays of this rank's rows, and makes the missing ones,
        in the dtype of sums. It sends to one rank and receives from one rank at a time, in the same order on all ranks,
        so that the buffers hold one rank's rows.
        """
        for name, x in arrays.items():
            movement = movements[name]
            held, needed = movement.held[self.rank], movement.needed[self.rank]
            if name not in totals:
                sum_dtype = torch.promote_types(x.dtype, torch.float32)
                zeros = x.new_zeros((*x.shape[:-2], len(held), x.shape[-1]), dtype=sum_dtype)
                totals[name] = zeros.repeat_interleave(self.count, -4) if movement.by_heads else zeros
            rows = held & needed
            add_rows(self._heads(totals[name], movement)[self.rank], held.locate(rows), x, needed.locate(rows))
        for destination, source in zip(self.peers, reversed(self.peers), strict=True):
            sends, arriving = [], {}
            for name, x in arrays.items():
                movement = movements[name]
                rows = movement.rows(destination, self.rank)
                sends.append((destination, _pack(x, movement.needed[self.rank].locate(rows))))
                arriving[name] = _empty_rows(x, len(movement.rows(self.rank, source)))
            self.post(sends, [(source, positions_first(x)) for x in arriving.values()])()
            for name, x in arriving.items():
                movement = movements[name]
                ranges = movement.held[self.rank].locate(movement.rows(self.rank, source))
                add_rows(self._heads(totals[name], movement)[source], ranges, x)
        return totals

    def _heads(self, x: Tensor, movement: Movement) -> Sequence[Tensor]:
        """Return the part of an array (..., head, group, position, dim) that each rank needs: its heads, or all."""
        return x.chunk(self.count, -4) if movement.by_heads else (x,) * self.count

    def gather_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
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


class _MoveRows(torch.autograd.Function):
    """`Ranks.fetch`, or `Ranks.give_back`; each has the other as its backward."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, movements: Movements, is_return: bool, *arrays: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.movements, ctx.is_return = ranks, movements, is_return
        outputs = _move(ranks, dict(enumerate(arrays)), movements, is_return)
        ctx.mark_non_differentiable(*(x for i, x in outputs.items() if not ctx.needs_input_grad[3 + i]))
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        requested = {i: grad for i, grad in enumerate(grads) if ctx.needs_input_grad[3 + i]}
        gradients = _move(ctx.ranks, requested, ctx.movements, not ctx.is_return)
        return None, None, None, *(gradients.get(i) for i in range(len(grads)))


def _move(ranks: Ranks, arrays: Arrays, movements: Movements, is_return: bool) -> dict[Any, Tensor]:
    if not is_return:
        return ranks.fetch(arrays, movements)()
    return {name: x.to(arrays[name].dtype) for name, x in ranks.give_back(arrays, movements, {}).items()}


def move_rows(ranks: Ranks, arrays: Arrays, movements: Movements, *, is_return: bool = False) -> dict[str, Tensor]:
    """Fetch rows, or return them to their owners, which add them, with gradients."""
    numbered = dict(enumerate(movements[name] for name in arrays))
    outputs = _MoveRows.apply(ranks, numbered, is_return, *arrays.values())  # type: ignore[no-untyped-call]  # torch's own
    return dict(zip(arrays, outputs, strict=True))


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


def copy_rows(target: Tensor, ranges: Sequence[Range], rows: Tensor, sources: Sequence[Range] | None = None) -> None:
    """Copy the rows in `sources` (None: all rows) to the rows of `target` in `ranges`."""
    for x, y in row_pairs(target, ranges, rows, sources):
        x.copy_(y)


def add_rows(target: Tensor, ranges: Sequence[Range], rows: Tensor, sources: Sequence[Range] | None = None) -> None:
    """Add to rows of `target` the rows that `copy_rows` would copy."""
    for x, y in row_pairs(target, ranges, rows, sources):
        x.add_(y)


def row_pairs(
    first: Tensor, ranges: Sequence[Range], second: Tensor, others: Sequence[Range] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of equal sizes that together make up the rows of two arrays in two lists of ranges (None: all)."""
    left, right = [*ranges][::-1], [*(((0, second.shape[-2]),) if others is None else others)][::-1]
    while left and right:
        (start, stop), (other, other_stop) = left.pop(), right.pop()
        size = min(stop - start, other_stop - other)
        yield first.narrow(-2, start, size), second.narrow(-2, other, size)
        if start + size < stop:
            left.append((start + size, stop))
        if other + size < other_stop:
            right.append((other + size, other_stop))


def _empty_rows(like: Tensor, count: int) -> Tensor:
    """Return an array (..., count, dim) like another one, contiguous by positions."""
    return like.new_empty((count, *positions_first(like).shape[1:])).movedim(0, -2)


def _pack(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the rows in `ranges`, (position, ...), contiguous in memory: a view where they already are."""
    return slice_ranges(positions_first(x), ranges, 0).contiguous()
