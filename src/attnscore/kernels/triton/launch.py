"""From a problem to the launches of the Triton kernels, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from attnscore.backends.base import Array
from attnscore.core import statistics, tiled
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients
from attnscore.core.tiling import TilePlan
from attnscore.kernels.triton import forward as forward_kernels
from attnscore.kernels.triton import ranges
from attnscore.kernels.triton.kernel import is_interpreted
from attnscore.kernels.triton.operands import Dropout, Masking, Operand, Rows, as_int32, operand
from attnscore.kernels.triton.tiles import Tile, padded, tile_of
from attnscore.masks import IntervalSet, lowering
from attnscore.masks.dynamic_intervals import traced_visibility
from attnscore.scores.forms import DistanceForm, InnerForm

INNER, DISTANCE, ADDITIVE = range(3)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_STATISTICS = tuple(name for name in statistics.TABLE if name != "log_sum_exp")


class Runner:
    """Launches kernels on the device of the tensors; `compiled` has one that records them."""

    def architecture(self, x: torch.Tensor) -> int:
        """Return the architecture of the device as 10 * major + minor, 0 in the interpreter."""
        return 0 if is_interpreted() else _architecture(x.device)

    def run(self, kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
        """Launch a kernel on a grid of programs."""
        kernel[grid](*operands, **constants)


@cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


RUNNER = Runner()


@dataclass(frozen=True, eq=False)
class Operands:
    """A problem as the kernels take it, but for what depends on the tile sizes."""

    form: int
    query: Operand
    key: Operand
    value: Operand
    query_bias: Operand | None
    key_bias: Operand | None
    scales: torch.Tensor | None
    scale: float
    caps: tuple[tuple[float, float], ...]
    bias: Operand | None
    is_relative: bool
    sink: torch.Tensor | None
    dropout: Dropout | None
    start: torch.Tensor | None
    stop: torch.Tensor | None
    query_ids: torch.Tensor | None
    key_ids: torch.Tensor | None
    mask: Operand | None
    sizes: tuple[int, int, int, int, int, int]
    """Queries, keys, dimension of keys and of values, KV heads, query heads that share each."""
    matrices: int
    batch: int
    runner: Runner

    @property
    def precision(self) -> str:
        return _precision(self.query.data, self.runner.architecture(self.query.data))

    @property
    def intervals(self) -> int:
        return 1 if self.start is None else len(self.start)

    @property
    def is_tested(self) -> bool:
        """Whether each tile reads a mask besides the intervals."""
        return self.query_ids is not None or self.mask is not None

    def tile(self, kernel: Any) -> Tile:
        dim = max(padded(self.sizes[2]), padded(self.sizes[3]))
        query: torch.Tensor = self.query.data
        itemsize = max(query.itemsize, self.value.data.itemsize)
        return tile_of(kernel, self.runner.architecture(query), itemsize, dim, self.form != INNER)

    def masking(self, tile: Tile) -> Masking:
        """Return the mask with the ends of the tiles, which a kernel computes."""
        ends, interval, batch, ends_batch = None, 0, 0, 1
        if self.start is not None:
            count, ends_batch, queries = self.start.shape
            tiles = triton.cdiv(queries, tile.queries)
            interval, batch = ends_batch * queries, queries if ends_batch > 1 else 0
            ends = self.start.new_empty((count, ends_batch, tiles, 4))
        found = Masking(
            *(self.start, self.stop, interval, batch, ends, ends_batch, self.query_ids, self.key_ids),
            query_ids_batch=_row_stride(self.query_ids), key_ids_batch=_row_stride(self.key_ids), array=self.mask,
        )  # fmt: skip
        if ends is not None:
            self.runner.run(
                ranges.ends_of_tiles, (ends.shape[2], ends.shape[0], ends_batch),
                found, ends, self.sizes[0], ends.shape[2],
                TESTED=self.is_tested, BM=tile.queries, BN=tile.keys,
            )  # fmt: skip
        return found


def _precision(x: torch.Tensor, architecture: int) -> str:
    """Return how a product of float32 is computed: by three of TF32, or by one where the user allows it."""
    if architecture == 0:
        return "ieee"
    is_allowed = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if is_allowed or x.dtype != torch.float32 else "tf32x3"


def operands_of(problem: Problem, plan: TilePlan, runner: Runner) -> Operands:
    """Return the operands of a problem, on its device, without copies where the strides allow."""
    shape, form = problem.score_shape, problem.form
    sums = torch.float32
    lead, heads, groups = shape.lead, shape.heads, shape.groups

    def narrowed(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype in _KERNEL_DTYPES else x.to(sums)

    def placed(x: torch.Tensor | None, row: int) -> Operand | None:
        return operand(x, lead, heads, groups, row)

    query, key = narrowed(form.query), narrowed(form.key)
    if query.dtype != key.dtype:
        query, key = query.to(sums), key.to(sums)
    kind, scale, scales, query_bias, key_bias = INNER, 1.0, None, None, None
    if isinstance(form, InnerForm):
        scale = float(form.scale)
        query_bias = None if form.query_bias is None else placed(narrowed(form.query_bias), shape.query_len)
        key_bias = None if form.key_bias is None else placed(narrowed(form.key_bias), shape.key_len)
    elif isinstance(form, DistanceForm):
        kind = DISTANCE
        if isinstance(form.scale, torch.Tensor):
            scales = form.scale.to(sums).expand(heads, groups, 1, 1).contiguous()
        else:
            scale = float(form.scale)
    bias, sink = problem.bias, problem.sink
    if bias is not None:
        bias = placed(narrowed(bias), 1 if problem.has_relative_bias else shape.query_len)
        bias = _over_keys(bias, shape.key_len)
    if sink is not None:
        sink = sink.to(sums).expand(heads, groups).contiguous()
    start, stop, query_ids, key_ids, mask = _mask_operands(problem, plan)
    dropout = None
    if problem.dropout is not None:
        probability, (low, high) = problem.dropout.probability, problem.dropout.words
        threshold = min(round(probability * 2**32), 2**32 - 1)
        dropout = Dropout(as_int32(low), as_int32(high), as_int32(threshold), 1 / (1 - probability))
    query_operand, key_operand = placed(query, shape.query_len), placed(key, shape.key_len)
    value_operand = placed(narrowed(problem.value), shape.key_len)
    if query_operand is None or key_operand is None or value_operand is None:
        raise TypeError("a form without query and key")
    return Operands(
        form=kind,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        query_bias=query_bias,
        key_bias=key_bias,
        scales=scales,
        scale=scale,
        caps=tuple((0.0 if math.isinf(cap) else cap, factor) for cap, factor in form.caps),
        bias=bias,
        is_relative=problem.has_relative_bias,
        sink=sink,
        dropout=dropout,
        start=start,
        stop=stop,
        query_ids=query_ids,
        key_ids=key_ids,
        mask=mask,
        sizes=(shape.query_len, shape.key_len, query.shape[-1], problem.layout.value_dim, heads, groups),
        matrices=math.prod(lead) * heads * groups,
        batch=math.prod(lead),
        runner=runner,
    )


def _over_keys(x: Operand | None, key_len: int) -> Operand | None:
    """Return an operand whose axis of keys has stride 0 where it is broadcast."""
    return x if x is None or x.data.shape[-1] != 1 or key_len == 1 else x._replace(column=0)


_ON_DEVICE: WeakKeyDictionary[IntervalSet, dict[torch.device, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def _mask_operands(problem: Problem, plan: TilePlan) -> tuple[Any, ...]:
    """Return start and stop of the intervals, document ids of queries and keys, and the boolean mask; None: none."""
    ops, shape, like = problem.ops, problem.score_shape, problem.value
    known, rest = plan.interval_set, plan.rest
    start = stop = None
    if known is not None:
        start, stop = _on_device(known, like.device)
    elif rest is not None:
        # Lengths on the device: their intervals are computed there.
        ends, others = traced_visibility(ops, shape, like, rest)
        if ends is not None and len(ends[0].shape) == 2:
            rest = others
            start, stop = (x.to(torch.int32).contiguous()[None] for x in ends)
    direct, evaluated = lowering.partition(rest)
    found = lowering.arrays(ops, shape, like, direct, with_evaluated=bool(evaluated))
    for part in evaluated:
        unmasked = lowering.evaluate(ops, shape, like, part)
        found["mask"] = unmasked if "mask" not in found else ops.logical_and(found["mask"], unmasked)
    mask = None
    if "mask" in found:
        mask = operand(found["mask"].view(torch.uint8), shape.lead, shape.heads, shape.groups, shape.query_len)
        mask = _over_keys(mask, shape.key_len)
    batch = math.prod(shape.lead)
    ids = []
    for name in ("query_ids", "key_ids"):
        x = found.get(name)
        ids.append(None if x is None else _per_merged_batch(x.to(torch.int64).contiguous(), shape.batch, batch))
    if start is not None and stop is not None:
        start, stop = (_per_merged_batch(x, shape.batch, batch, axis=1) for x in (start, stop))
    return start, stop, *ids, mask


def _row_stride(x: torch.Tensor | None) -> int:
    """Return the stride of the batch rows of ids (batch or 1, n)."""
    return 0 if x is None or len(x) == 1 else x.shape[1]


def _per_merged_batch(x: torch.Tensor, batch: int, merged: int, axis: int = 0) -> torch.Tensor:
    """Return an array of one row for each of all leading axes, from one for each of the first (or for all)."""
    return x if x.shape[axis] == 1 or batch == merged else x.repeat_interleave(merged // batch, axis)


def _on_device(known: IntervalSet, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and stop, int32 (interval, batch or 1, query), copied to the device once for a mask."""
    copies = _ON_DEVICE.setdefault(known, {})
    if device not in copies:
        start, stop = (torch.from_numpy(x.astype("int32", order="C")).to(device) for x in (known.start, known.stop))
        copies[device] = start, stop
    return copies[device]


def forward(problem: Problem, plan: TilePlan, runner: Runner = RUNNER) -> Result:
    """Run the forward."""
    given = operands_of(problem, plan, runner)
    shape = problem.score_shape
    queries, keys, dim, value_dim, heads, groups = given.sizes
    out = problem.value.new_empty((*shape.rows, value_dim))
    needed = {"row_max", "log_denom", *problem.statistics} - {"log_sum_exp"}
    rows = {name: out.new_empty((*shape.rows, 1), dtype=torch.float32) for name in Rows._fields if name in needed}
    if given.matrices * queries:
        tile = given.tile("forward")
        with _device(out):
            runner.run(
                forward_kernels.forward, (triton.cdiv(queries, tile.queries), given.matrices),
                given.query, given.key, given.value, given.query_bias, given.key_bias, None, given.scales, given.bias,
                given.masking(tile), given.sink, given.dropout,
                operand(out, shape.lead, heads, groups, queries), Rows(*map(rows.get, Rows._fields)),
                queries, keys, dim, value_dim, heads, groups, given.scale, 0.0,
                FORM=given.form, ACTIVATION="", CAPS=given.caps, INTERVALS=given.intervals, TESTED=given.is_tested,
                RELATIVE=given.is_relative, BM=tile.queries, BN=tile.keys, D=padded(dim), DV=padded(value_dim),
                PRECISION=given.precision, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    found = {name: rows[name] for name in _STATISTICS if name in rows}
    return Result(out, rows["row_max"], rows["log_denom"], found)


def _device(x: torch.Tensor) -> Any:
    """Return the scope in which launches go to the device of `x`, which may not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else torch.cuda.device(-1)


def backward(
    problem: Problem, plan: TilePlan, result: Result, grads: RowGradients, wanted: frozenset[str]
) -> dict[str, Array]:
    """Run the backward."""
    return tiled.backward(problem, plan, result, grads)
