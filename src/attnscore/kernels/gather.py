"""The gather kernel: attention to the neighbours of each query, O(edges) time and memory. Its mask is `Neighbours`.

- The keys and values of the neighbours are gathered, and another kernel runs the gathered blocks, with its own code
  for scores, statistics, sinks, masked and non-finite numbers.
- For the native kernel they are gathered in the order of the edges. The neighbours of a query are then an interval of
  the gathered keys, and the tiles without edges are skipped.
- For others, queries of similar degree are a batch of single queries, their neighbours padded to the largest degree
  (degree bucketing).
- A gradient with an axis of keys is first one row for each edge, then summed over the edges of each key:
  gathered and summed as well. No framework has to scatter, and the same bits come every time. Where the native kernel
  runs, it writes the rows of all blocks into one array, and a framework's own sum of rows reads them there: joining
  and gathering them took more than half of the gradient's time (4 heads of 16, ten neighbours).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, cast, final

import numpy as np

from attnscore.backends.base import Array, Backend, HostArray, sum_to
from attnscore.base import thresholds
from attnscore.base.layout import CanonicalLayout, is_unknown
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel
from attnscore.kernels.native.kernel import Native
from attnscore.kernels.native.marshalling import allocate_aligned
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import CachedMask, Dense, IntervalSet, Mask, Neighbours, parts_of
from attnscore.masks.base import all_of
from attnscore.masks.neighbour_table import NeighbourTable
from attnscore.problem import dropout as dropouts
from attnscore.problem.dropout import PairDropout
from attnscore.problem.online_softmax import NEG_INF
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import KEYS, with_global_keys
from attnscore.scores.forms import Role


@final
@dataclass(frozen=True, eq=False)
class Gather(Kernel):
    """Attention to the neighbours of each query, gathered in blocks of queries."""

    name = "gather"
    summary = "gathered neighbours, O(edges) time and memory"
    needs = frozenset(("masked",))
    block_kernels: tuple[Kernel, ...] = (Native(), Streaming())
    """Kernels from which each block takes one, in the order of preference; the last runs any block."""

    @property
    def differentiable(self) -> Kernel:
        return Gather((Streaming(),))

    def reasons_against(self, problem: Problem) -> tuple[str, ...]:
        neighbours, remaining_mask = (None, None) if problem.mask is None else _split_neighbours(problem.mask)
        if neighbours is None:
            return ("the mask has no Neighbours",)
        score_shape = problem.score_shape
        if any(map(is_unknown, (*score_shape.rows, score_shape.key_len))):
            return ("lengths that a graph learns when it runs",)
        if 0 in (*score_shape.rows, score_shape.key_len):
            return ("an axis of length 0",)
        if isinstance(problem.dropout, PairDropout):
            return ("dropout of pairs that are part of another call",)
        if neighbours.table(score_shape.key_len) is None:
            return ("neighbours that the host cannot read",)
        if (
            remaining_mask is not None
            and remaining_mask.interval_set(score_shape.query_len, score_shape.key_len, score_shape.batch) is None
        ):
            return (f"{remaining_mask!r} beside the neighbours, whose keys are no intervals",)
        return ()

    def explain_tiles(self, problem: Problem, tiles: TilePlan) -> TilePlan:
        fields = {field.name: getattr(tiles, field.name) for field in dataclasses.fields(tiles)}
        return _GatheredPlan(**fields, call=self._gather_call(problem))

    def forward(self, problem: Problem, tiles: TilePlan) -> Result:
        call = self._gather_call(problem)
        results = [kernel.forward(subproblem, subtiles) for _, subproblem, subtiles, kernel in self._subproblems(call)]
        block_rows = [
            {"out": result.out, "row_max": result.row_max, "log_denom": result.log_denom}
            | call.with_key_indices(result.statistics, block)
            for result, block in zip(results, call.blocks, strict=True)
        ]
        rows = {name: call.join_rows([x[name] for x in block_rows]) for name in block_rows[0]}
        matrix = None
        if problem.matrix is not None:
            outside = 0.0 if problem.matrix == "weights" else NEG_INF
            matrix = call.join_matrix([result.matrix for result in results], outside)
        return Result(rows.pop("out"), rows.pop("row_max"), rows.pop("log_denom"), statistics=rows, matrix=matrix)

    def backward(
        self, problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> dict[str, Array]:
        call = self._gather_call(problem)
        saved = {"out": result.out, "row_max": result.row_max, "log_denom": result.log_denom}
        output_grads = {"grad_out": grads.out, "grad_log_sum_exp": grads.log_sum_exp, "grad_entropy": grads.entropy}
        rows = {**saved, **output_grads, "entropy": result.statistics.get("entropy")}
        matrices = {"matrix": result.matrix, "grad_matrix": grads.matrix}
        readers = {name: call.rows_of(x) for name, x in rows.items() if x is not None}
        readers |= {name: call.matrix_of(x) for name, x in matrices.items() if x is not None}
        gradients: list[dict[str, Array]] = []
        memory = _KeyGradientMemory(call)
        for block, subproblem, subtiles, kernel in self._subproblems(call):
            arrays = {name: read(block) for name, read in readers.items()}
            statistics = {"entropy": arrays["entropy"]} if "entropy" in arrays else {}
            out, row_max, log_denom = (arrays[name] for name in saved)
            block_result = Result(out, row_max, log_denom, statistics, arrays.get("matrix"))
            block_grads = RowGradients(*(arrays.get(name) for name in (*output_grads, "grad_matrix")))
            # Only the native kernel computes in memory that it is passed.
            options: dict[str, Any] = {"zeros": memory.zeros} if isinstance(kernel, Native) else {}
            gradients.append(kernel.backward(subproblem, subtiles, block_result, block_grads, requested, **options))
        return call.join_gradients({name: [x[name] for x in gradients] for name in requested}, memory)

    def _gather_call(self, problem: Problem) -> _GatheredCall:
        # The kernel of the blocks, which are not gathered yet, is chosen by the problem of the call.
        return _GatheredCall(problem, self._kernel_of(problem))

    def _subproblems(self, call: _GatheredCall) -> Iterator[tuple[_Block, Problem, TilePlan, Kernel]]:
        """Yield each block with its problem, its tiles and the kernel that runs it."""
        for block in call.blocks:
            subproblem = call.problem_of(block)
            yield block, subproblem, tiling.plan(subproblem), self._kernel_of(subproblem)

    def _kernel_of(self, problem: Problem) -> Kernel:
        """Return the first kernel of blocks that can run `problem`."""
        return next(kernel for kernel in self.block_kernels if not kernel.reasons_against(problem))


def _split_neighbours(mask: Mask | None) -> tuple[Neighbours | None, Mask | None]:
    """Return the neighbours and the remaining mask whose conjunction is `mask`; either may be None."""
    parts = [] if mask is None else parts_of(mask)
    neighbours = next((part for part in parts if isinstance(part, Neighbours)), None)
    return neighbours, all_of([part for part in parts if part is not neighbours])


@dataclass(frozen=True, eq=False)
class _GatheredPlan(TilePlan):
    """Description of the gathered blocks, for `explain`."""

    call: _GatheredCall

    @cached_property
    def fractions(self) -> dict[str, float]:
        pairs = self.query_len * self.key_len
        entries = sum(block.edges.size for block in self.call.blocks)
        return {"skip": 1 - entries / pairs, "full": 0.0, "partial": entries / pairs}

    def __str__(self) -> str:
        blocks, lens = self.call.blocks, self.call.table.lens
        edges, entries = int(lens.sum()), sum(block.edges.size for block in blocks)
        return (
            f"{edges:,} edges, up to {lens.max()} a query, gathered as {entries:,} in blocks of "
            f"{'neighbouring queries' if self.call.split is _edge_order_blocks else 'similar degree'} ({len(blocks)})"
        )


class _Block(NamedTuple):
    """A batch of queries (or, in a sum, of keys), each with an interval of the entries gathered for its batch row."""

    members: HostArray
    """Queries of the block, (batch, query)."""
    edges: HostArray
    """Indices of the edges that are gathered, (batch, entry); after the last edge of a row, arbitrary ones."""
    start: HostArray
    """First entry of each query, (batch, query)."""
    stop: HostArray
    """End of the entries of each query, (batch, query)."""

    @property
    def has_edge(self) -> HostArray:
        """Whether an entry is an edge of a member, not padding: (batch, entry)."""
        has_edge: HostArray = np.arange(self.edges.shape[1]) < self.stop.max(-1, initial=0, keepdims=True)
        return has_edge


def _edge_order_blocks(start: HostArray, lens: HostArray, limit: int) -> list[_Block]:
    """Return neighbouring queries in blocks of a single batch row, of at most `limit` edges unless one query has more.

    `start` and `lens` are the first edge and the number of edges of each query.
    """
    stop, blocks, first = start + lens, [], 0
    while first < len(lens):
        last = max(first + 1, int(np.searchsorted(stop, start[first] + limit, "right")))
        members, edges = np.arange(first, last)[None], np.arange(start[first], stop[last - 1])[None]
        blocks.append(_Block(members, edges, start[members] - start[first], stop[members] - start[first]))
        first = last
    return blocks


def _degree_blocks(start: HostArray, lens: HostArray, limit: int) -> list[_Block]:
    """Return queries of similar degree in blocks of one query a batch row, of at most `limit` entries or one query.

    `start` and `lens` are the first edge and the number of edges of each query.
    """
    order = np.argsort(-lens, kind="stable")
    degrees_falling, blocks, first = lens[order], [], 0
    edge_counts = np.append(0, np.cumsum(degrees_falling))
    while first < len(order):
        longest = int(degrees_falling[first])
        count = max(1, min(len(order) - first, limit // max(1, longest)))
        edge_sums = edge_counts[first + 1 : first + count + 1] - edge_counts[first]
        padding = longest * np.arange(1, count + 1) - edge_sums
        # The block ends in front of the query that adds too much padding. It has a query: the first one has no padding.
        too_much = padding > thresholds.PADDED_SHARE * edge_sums + thresholds.PADDED_ENTRIES
        members = order[first : first + (int(too_much.argmax()) if too_much.any() else count), None]
        degrees, entry = lens[members], np.arange(longest)
        edges = np.where(entry < degrees, start[members] + entry, 0)
        blocks.append(_Block(members, edges, np.zeros_like(degrees), degrees))
        first += len(members)
    return blocks


def _inverse(blocks: Sequence[_Block]) -> HostArray:
    """Return the place of each query among the members of all blocks."""
    return np.argsort(np.concatenate([block.members.reshape(-1) for block in blocks]), kind="stable")


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums of the entries of blocks with the same id, for each id."""

    ends: HostArray
    """Cumulative number of entries of the ids, from 0."""
    order: HostArray
    """The entries, sorted by their ids."""
    gathered: Sequence[_Block]
    """The blocks of the entries."""
    limit: int
    """Limit of entries in a block."""
    _orders_by_matrix: dict[int, tuple[HostArray, HostArray]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[_Block]:
        """Blocks of ids, in which an id takes the place of a query, and an entry of its sum that of an edge."""
        return _degree_blocks(self.ends[:-1], np.diff(self.ends), self.limit)

    @cached_property
    def inverse(self) -> HostArray:
        return _inverse(self.blocks)

    def order_by_matrix(self, count: int) -> tuple[HostArray, HostArray]:
        """Return `order` and `ends` of the same sums for each of `count` matrices, in blocks (batch, matrix, entry)."""
        if count not in self._orders_by_matrix:
            sizes = np.array([block.edges.shape for block in self.gathered])
            firsts = np.append(0, np.cumsum(sizes.prod(1)))
            block = np.searchsorted(firsts, self.order, "right") - 1
            entries = sizes[block, 1]
            entry = (self.order - firsts[block]) % entries
            # A batch row of a block begins `count` times as far from the start; its matrices follow one another.
            matrix, total = np.arange(count)[:, None], len(self.order)
            order = (count * (self.order - entry) + entry + matrix * entries).reshape(-1)
            ends = np.append((self.ends[:-1] + matrix * total).reshape(-1), count * total)
            dtype = np.int32 if count * firsts[-1] < 2**31 else np.int64
            self._orders_by_matrix[count] = order.astype(dtype), ends.astype(dtype)
        return self._orders_by_matrix[count]

    def run(self, ops: Backend, x: Array) -> Array:
        """Return the sums (id, width) of rows of `x`: a row for each entry, and a last row of zeros, for padding."""
        sums = []
        for block in self.blocks:
            shape = block.edges.shape
            if 0 in shape:
                sums.append(ops.zeros((shape[0], x.shape[1]), x))
                continue
            rows = _take(ops, x, np.where(block.has_edge, self.order[block.edges], x.shape[0] - 1).reshape(-1))
            sums.append(ops.sum(ops.reshape(rows, (*shape, x.shape[1])), axis=1))
        return _take(ops, ops.concat(sums, 0), self.inverse)


class _KeyGradientMemory:
    """Memory of gradients with an axis of keys: one array for all blocks, summed without joining their rows first."""

    def __init__(self, call: _GatheredCall) -> None:
        self.call, self.entries = call, sum(block.edges.size for block in call.blocks)
        self._rows: dict[str, HostArray] = {}
        self._shapes: dict[str, list[tuple[int, ...]]] = {}

    def zeros(self, name: str, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Return zeros for a gradient of the next block: for key and value, its part of the array of all blocks."""
        # A framework that copies misaligned arrays would copy each part.
        if self.call.ops.wants_aligned or name not in ("key", "value"):
            return allocate_aligned(np.zeros, shape, dtype)
        matrices, dim = math.prod(shape[1:-2]), shape[-1]
        if name not in self._rows:
            self._rows[name], self._shapes[name] = allocate_aligned(np.zeros, (self.entries * matrices, dim), dtype), []
        first = sum(math.prod(x[:-1]) for x in self._shapes[name])
        self._shapes[name].append(shape)
        return self._rows[name][first : first + math.prod(shape[:-1])].reshape(shape)

    def joined_rows(self, name: str, parts: Sequence[Array]) -> Array | None:
        """Return the rows of all blocks where the gradients `parts` were computed in this memory, otherwise None."""
        # A gradient that was summed over shared heads has another shape than its memory.
        if self._shapes.get(name) != [tuple(x.shape) for x in parts]:
            return None
        return self.call.ops.from_memory(self._rows[name], self.call.problem.accumulator, parts[0])


class _GatheredCall:
    """A problem, the blocks of its queries, and the functions that move arrays into the blocks and back."""

    def __init__(self, problem: Problem, block_kernel: Kernel) -> None:
        self.problem, self.ops, self.score_shape = problem, problem.ops, problem.score_shape
        neighbours, remaining_mask = _split_neighbours(problem.mask)
        self.table = cast(NeighbourTable, cast(Neighbours, neighbours).table(self.score_shape.key_len))
        sizes = (self.score_shape.query_len, self.score_shape.key_len, self.score_shape.batch)
        self.intervals = None if remaining_mask is None else remaining_mask.interval_set(*sizes)
        width = problem.form.key.shape[-1] + problem.value.shape[-1]
        self.limit = max(1, thresholds.GATHERED_NUMBERS // max(1, math.prod(self.score_shape.rows[:-1]) * width))
        # In edge order a matrix or a further mask of a block would have the square of its edges. That order is for the
        # native kernel, which takes no `PairDropout`.
        has_pairs = any(x is not None for x in (problem.matrix, problem.dropout, remaining_mask))
        self.split = _edge_order_blocks if isinstance(block_kernel, Native) and not has_pairs else _degree_blocks
        self.blocks: list[_Block] = self.table.plans.get_or_compute(
            ("blocks", self.split, self.limit), lambda: self.split(self.table.start, self.table.lens, self.limit)
        )

    # The problem of a block

    @cached_property
    def _readers(self) -> dict[str, Callable[[_Block], Array]]:
        """Functions that give the entries of each operand in a block; the bias is included, the sink is not."""
        problem, form = self.problem, self.problem.form
        reader_of: dict[Role, Callable[[Array], Callable[[_Block], Array]]] = {
            "query": self.rows_of,
            "key": self.keys_of,
            "shared": lambda x: lambda _: x,
        }
        readers = {name: reader_of[form.role(name)](x) for name, x in form.arrays().items()}
        # Where keys are the values too, as in graph networks, they are gathered once.
        keys = (name for name, x in form.arrays().items() if form.role(name) == "key")
        shared_name = next((name for name in keys if _share_memory(self.ops, form.arrays()[name], problem.value)), None)
        readers["value"] = self.keys_of(problem.value) if shared_name is None else readers[shared_name]
        return readers if problem.bias is None else {**readers, "bias": self.pairs_of(problem.bias)}

    def problem_of(self, block: _Block) -> Problem:
        """Return the problem of a block: the queries against the gathered keys."""
        problem, (batch, queries) = self.problem, block.members.shape
        score_shape = dataclasses.replace(
            self.score_shape, lead=(batch, *self.score_shape.lead), query_len=queries, key_len=block.edges.shape[1],
            has_batch=True, has_heads=True,
        )  # fmt: skip
        # Key and value may have one reader.
        entries = {id(read): read(block) for read in self._readers.values()}
        arrays = {name: entries[id(read)] for name, read in self._readers.items()}
        value, bias = arrays.pop("value"), arrays.pop("bias", None)
        form = problem.form.with_arrays(arrays)
        return dataclasses.replace(
            problem,
            layout=dataclasses.replace(CanonicalLayout.of(problem.layout), score_shape=score_shape),
            query=form.query,
            key=form.key,
            value=value,
            form=form,
            mask=self._block_mask(block),
            bias=bias,
            dropout=self._block_dropout(block),
        )

    def _block_mask(self, block: _Block) -> Mask | None:
        """Return the mask of a block: it masks the padding, and keys outside the intervals of the remaining mask."""
        if self.intervals is None:
            is_full = not block.start.any() and (block.stop == block.edges.shape[1]).all()
            return None if is_full else CachedMask(IntervalSet.of((block.start, block.stop)), "neighbours of a query")
        keys, unmasked = self._keys(block), np.zeros(1, bool)
        # With intervals the blocks are `_degree_blocks`, of one query a batch row.
        for ends in zip(self.intervals.start, self.intervals.stop, strict=True):
            start, stop = (end[:, block.members[:, 0]].T[..., None] for end in ends)
            unmasked = unmasked | ((keys[:, None] >= start) & (keys[:, None] < stop))
        unmasked = unmasked & block.has_edge[:, None]
        # (batch, 1 or the call's batch, entry): axes of 1 for the call's other leading axes, its heads and the query.
        between = tuple(range(2, 3 + len(self.score_shape.lead)))
        return Dense(np.expand_dims(unmasked, between))

    def _block_dropout(self, block: _Block) -> PairDropout | None:
        """Return the dropout of a block, which drops the pairs that the dropout of the whole call drops."""
        ops, like, dropout = self.ops, self.problem.value, self.problem.dropout
        if dropout is None:
            return None
        # With dropout the blocks are `_degree_blocks`, of one query a batch row.
        lead = (len(block.members), *(1,) * len(self.score_shape.rows[:-1]))
        member = ops.astype(ops.asarray(block.members, like), "int64")
        row = ops.reshape(member, (*lead, 1, 1)) + dropouts.rows_of_matrices(ops, self.score_shape, like)
        key = ops.astype(ops.asarray(self._keys(block), like), "int64")
        return PairDropout(dropout.probability, dropout.seed, row, ops.reshape(key, (*lead, 1, key.shape[1])))

    def _keys(self, block: _Block) -> HostArray:
        """Return the key of each entry of a block."""
        return self.table.indices[block.edges]

    # From the canonical axes into a block: (batch, *lead, head, group, query or entry, dim)

    def rows_of(self, x: Array) -> Callable[[_Block], Array]:
        """Return the entries of the queries of a block, of an array (*lead, head, group, query, dim)."""
        if self.split is _edge_order_blocks:
            return lambda block: self._slice(x, block)
        return self._reader(x, lambda block: block.members)

    def _slice(self, x: Array, block: _Block) -> Array:
        """Return a view of the rows of neighbouring queries, with an axis of one batch row before it."""
        first, count = int(block.members[0, 0]), block.members.shape[1]
        rows = x if x.shape[-2] == 1 else self.ops.slice_axis(x, -2, first, count)
        return self.ops.expand_dims(rows, 0)

    def keys_of(self, x: Array) -> Callable[[_Block], Array]:
        """Return the entries of the neighbours in a block, of an array (*lead, head, group, key, dim)."""
        return self._reader(x, self._keys)

    def matrix_of(self, x: Array) -> Callable[[_Block], Array]:
        """Return `pairs_of` of a matrix of weights or its gradient, with 0 for the padding, which has no weight."""
        pairs, ones = self.pairs_of(x), (1,) * (len(x.shape) - 1)

        def read(block: _Block) -> Array:
            values = pairs(block)
            has_edge = self.ops.asarray(block.has_edge, values)
            has_edge = self.ops.reshape(has_edge, (has_edge.shape[0], *ones, has_edge.shape[1]))
            return self.ops.where(has_edge, values, 0.0)

        return read

    def pairs_of(self, x: Array) -> Callable[[_Block], Array]:
        """Return the entries (..., 1, entry) of a block, of an array of all pairs or a relative bias.

        A row of entries is enough: each is a neighbour of one query, and masked for the others.
        """
        ops, flat = self.ops, self.ops.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1], 1))
        read = self._reader(flat, partial(self._flat_indices, x))
        return lambda block: ops.in_c_order(ops.matrix_transpose(read(block)))

    def _reader(self, x: Array, indices_of: Callable[[_Block], HostArray]) -> Callable[[_Block], Array]:
        """Return a function that gives the entries of `x` at ``indices_of(block)``: (batch, *lead, entry, width)."""
        ops, (*lead, _, width) = self.ops, x.shape
        # A view, without a copy, where memory has the order (length, head, dim).
        rows = ops.in_c_order(_flatten_entries(ops, ops.expand_dims(x, 0)))

        def read(block: _Block) -> Array:
            indices = indices_of(block)
            entries = ops.reshape(_take(ops, rows, indices.reshape(-1)), (*indices.shape, math.prod(lead), width))
            return ops.reshape(ops.swap_axes(entries, 1, 2), (len(indices), *lead, indices.shape[1], width))

        return read

    def _flat_indices(self, x: Array, block: _Block) -> HostArray:
        """Return the index of each pair in the flattened last two axes of `x`; an axis of length 1 is broadcast."""
        keys, queries = self._keys(block), self.table.rows[block.edges]
        if self.score_shape.is_relative(tuple(x.shape)):
            return keys - queries + self.score_shape.query_len - 1
        height, width = x.shape[-2:]
        indices: HostArray = (queries if height > 1 else 0 * queries) * width + (keys if width > 1 else 0 * keys)
        return indices

    # From blocks back to the canonical axes

    def with_key_indices(self, statistics: dict[str, Array], block: _Block) -> dict[str, Array]:
        """Return the statistics of a block with indices of keys in place of positions among the gathered keys.

        Positions count within a row of the block: the row's offset is added, then the key is looked up. No key, -1,
        stays.
        """
        ops, keys = self.ops, self._keys(block)

        def with_offsets(x: Array) -> Array:
            offsets = ops.asarray(np.arange(len(keys)) * keys.shape[1], x, ops.dtype(x))
            return ops.where(x < 0, x, x + ops.reshape(offsets, (-1, *(1 for _ in x.shape[1:]))))

        in_block = {name: with_offsets(x) if name in KEYS else x for name, x in statistics.items()}
        return with_global_keys(ops, in_block, lambda: ops.asarray(keys.reshape(-1), self.problem.value))

    def join_rows(self, parts: Sequence[Array]) -> Array:
        """Join the blocks of an array along its axis of queries."""
        rows = self.ops.concat([_flatten_entries(self.ops, x) for x in parts], 0)
        if self.split is not _edge_order_blocks:
            order = self.table.plans.get_or_compute(("inverse", self.limit), lambda: _inverse(self.blocks))
            rows = _take(self.ops, rows, order)
        return _rows_back(self.ops, rows, tuple(parts[0].shape[1:-2]), parts[0].shape[-1])

    def join_pairs(
        self, parts: Sequence[Array], shape: tuple[int, int], indices_of: Callable[[_Block], HostArray]
    ) -> Array:
        """Return an array (..., *shape) of pairs: the sums of the blocks' entries for each index in it."""
        sums = self._sums(indices_of, math.prod(shape))
        totals = self._sum_entries([self.ops.matrix_transpose(x) for x in parts], sums)
        return self.ops.reshape(totals, (*totals.shape[:-2], *shape))

    def join_matrix(self, parts: Sequence[Array], outside: float) -> Array:
        """Join the matrices of the blocks to the matrix of all pairs, `outside` where a pair is no edge."""
        ops, shape = self.ops, (self.score_shape.query_len, self.score_shape.key_len)
        is_edge = np.zeros(shape, bool)
        is_edge[self.table.rows, self.table.indices] = True
        # A pair is one entry at most. If the remaining mask makes it -inf, only zeros of padding are added to it.
        matrix = self.join_pairs(parts, shape, lambda block: block.members * shape[1] + self._keys(block))
        return matrix if outside == 0 else ops.where(ops.asarray(is_edge, matrix), matrix, outside)

    def join_gradients(self, parts: dict[str, list[Array]], memory: _KeyGradientMemory) -> dict[str, Array]:
        """Return the gradients of the operands from the blocks' gradients, some of which are in `memory`."""
        ops, operands, form = self.ops, self.problem.operands(), self.problem.form
        roles: dict[str, Role] = {name: form.role(name) for name in form.arrays()} | {"value": "key"}
        joined: dict[str, Array] = {}
        for name, grads in parts.items():
            role, x = roles.get(name, "shared"), operands[name]
            if name == "bias":
                joined[name] = self.join_pairs(grads, tuple(x.shape[-2:]), partial(self._flat_indices, x))
            elif role == "shared":
                joined[name] = reduce(operator.add, grads)
            elif role == "query":
                joined[name] = sum_to(ops, self.join_rows(grads), x.shape)
            else:
                sums = self.table.plans.get_or_compute(
                    ("sums", self.split, self.limit), lambda: self._sums(self._keys, self.score_shape.key_len)
                )
                joined[name] = sum_to(ops, self._sum_entries(grads, sums, memory.joined_rows(name, grads)), x.shape)
        return joined

    def _sums(self, ids_of: Callable[[_Block], HostArray], count: int) -> _Sums:
        """Plan the sums of the edges with the same id; ``ids_of(block)`` are below `count`."""
        has_edge = np.concatenate([block.has_edge.reshape(-1) for block in self.blocks])
        all_ids = [np.broadcast_to(ids_of(block), block.edges.shape).reshape(-1) for block in self.blocks]
        ids = np.concatenate(all_ids)[has_edge]
        ends = np.append(0, np.cumsum(np.bincount(ids, minlength=count)))
        return _Sums(ends, np.flatnonzero(has_edge)[np.argsort(ids, kind="stable")], self.blocks, self.limit)

    def _sum_entries(self, parts: Sequence[Array], sums: _Sums, joined_rows: Array | None = None) -> Array:
        """Sum blocks (batch, *lead, entry, dim) to (*lead, id, dim); `joined_rows`: the rows of all blocks, or None."""
        ops, lead, dim = self.ops, tuple(parts[0].shape[1:-2]), parts[0].shape[-1]
        if dim and sums.order.size and ops.can_sum_rows(*parts):
            if joined_rows is None:
                joined_rows = ops.concat([ops.reshape(x, (-1, dim)) for x in parts], 0)
            totals = ops.sums_of_rows(joined_rows, *sums.order_by_matrix(math.prod(lead)))
            return ops.reshape(totals, (*lead, len(sums.ends) - 1, dim))
        rows = [_flatten_entries(ops, x) for x in parts]
        rows.append(ops.zeros((1, rows[0].shape[1]), rows[0]))
        return _rows_back(ops, sums.run(ops, ops.concat(rows, 0)), lead, dim)


def _share_memory(ops: Backend, x: Array, y: Array) -> bool:
    """Return whether two arrays are known to be the same memory in the same shape."""
    if x is y:
        return True
    # Autodiff has to tell two arrays apart; traced arrays and devices have no memory that can be compared.
    if (
        tuple(x.shape) != tuple(y.shape)
        or ops.needs_grad(x, y)
        or ops.needs_host_callback(x, y)
        or not (ops.has_cpu_buffer(x) and ops.has_cpu_buffer(y))
    ):
        return False
    first, second = ops.memory(x), ops.memory(y)
    return first.ctypes.data == second.ctypes.data and (first.strides, first.dtype) == (second.strides, second.dtype)


def _flatten_entries(ops: Backend, x: Array) -> Array:
    """Return (batch, *lead, entry, dim) as (batch * entry, lead * dim)."""
    batch, *lead, entries, dim = x.shape
    rows = ops.swap_axes(ops.reshape(x, (batch, math.prod(lead), entries, dim)), 1, 2)
    return ops.reshape(rows, (batch * entries, math.prod(lead) * dim))


def _rows_back(ops: Backend, rows: Array, lead: tuple[int, ...], dim: int) -> Array:
    """Return (length, lead * dim) as (*lead, length, dim)."""
    x = ops.swap_axes(ops.reshape(rows, (rows.shape[0], math.prod(lead), dim)), 0, 1)
    return ops.reshape(x, (*lead, rows.shape[0], dim))


def _take(ops: Backend, rows: Array, indices: HostArray) -> Array:
    """Return the rows at these indices; any index means the one row of a broadcast array."""
    if not indices.size:
        return ops.zeros((0, rows.shape[1]), rows)
    return ops.take(rows, ops.asarray(indices if rows.shape[0] > 1 else 0 * indices, rows), 0)
