"""From a problem to the launches of the Triton kernels, forward and backward."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from attnscore.backends.base import Array, sum_to
from attnscore.kernels import tiled
from attnscore.kernels.tiling import TilePlan
from attnscore.kernels.triton import additive_gradients, is_interpreted, ranges
from attnscore.kernels.triton import backward as backward_kernels
from attnscore.kernels.triton import forward as forward_kernels
from attnscore.kernels.triton.additive import AdditiveSides, sides_of
from attnscore.kernels.triton.custom import Custom, custom_of, parameter_gradient
from attnscore.kernels.triton.operands import Dropout, Inputs, Masking, Operand, RowGrads, Rows, Sizes, operand
from attnscore.kernels.triton.tiles import FORMS, KernelName, Tile, padded_dim, tile_of
from attnscore.masks import IntervalSet, lowering
from attnscore.masks.dynamic_intervals import traced_visibility
from attnscore.problem.problem import Problem
from attnscore.problem.results import Result, RowGradients
from attnscore.problem.statistics import TABLE
from attnscore.scores.forms import AdditiveForm, DistanceForm, InnerForm, TileForm

# As in `tile`.
INNER, DISTANCE, ADDITIVE, CHANNELS = range(len(FORMS) + 1)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Runner:
    """Launches kernels on the device of the tensors; the benchmark has a runner that only compiles them."""

    keeps_tables = True
    """Whether `DeviceIntervals` caches the tables that kernels compute from a mask."""

    def architecture(self, x: torch.Tensor) -> int:
        """Return the architecture of the device as 10 * major + minor, 0 in the interpreter."""
        return 0 if is_interpreted() else _architecture(x.device)

    def tile(self, kernel: KernelName, architecture: int, form: str, dtype: str, dim: int) -> Tile:
        """Return the tile of a kernel, by the table."""
        return tile_of(kernel, architecture, form, dtype, dim)

    def run(self, kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
        """Launch a kernel on a grid of programs."""
        kernel[grid](*operands, **constants)


@cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


RUNNER = Runner()


@dataclass(frozen=True, eq=False)
class DeviceIntervals:
    """The intervals of a mask on a device, int32 (interval, batch or 1, query), and tables computed from them."""

    start: torch.Tensor
    stop: torch.Tensor
    tables: dict[Hashable, torch.Tensor] | None
    """Tables by stream, as another stream may read them too early, and by key; None: tables are not cached."""

    def table(self, runner: Runner, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a table that a kernel computes from the intervals, such as ends of tiles: cached, or by `make()`."""
        if self.tables is None or not runner.keeps_tables:
            return make()
        if self.start.is_cuda:
            key = torch.cuda.current_stream(self.start.device).cuda_stream, key
            if torch.cuda.is_current_stream_capturing():
                # The graph owns tables that it computes: they are not cached.
                _CAPTURED.add(self)
                return self.tables[key] if key in self.tables else make()
        if key not in self.tables:
            self.tables[key] = make()
        return self.tables[key]


# A graph reads the intervals at each replay, and PyTorch does not tell which graph captures a call, or when it frees
# one; a copy inside the graph would read them at each replay as well. So they are never freed: 8 bytes for each query
# and interval of each mask that is captured.
_CAPTURED: set[DeviceIntervals] = set()
"""Intervals in calls that a CUDA graph has captured."""


@dataclass(frozen=True, eq=False)
class Operands:
    """A problem as the kernels take it, without the arrays that depend on tile sizes."""

    form: int
    arrays: Inputs
    """Arrays of the call, without the ends of tiles."""
    intervals: DeviceIntervals | None
    sink: torch.Tensor | None
    scale: float
    slope: float
    """Slope of leaky_relu below 0."""
    caps: tuple[tuple[float, float], ...]
    is_relative: bool
    function: Any
    """The activation of an additive score by name, or the function of a custom score, or None."""
    additive: AdditiveSides | None
    custom: Custom | None
    sizes: Sizes
    matrices: int
    batch: int
    runner: Runner

    @property
    def precision(self) -> str:
        # An additive score has no product of queries and keys, only the product of weights and values.
        factor = self.arrays.query.data if self.additive is None else self.arrays.value.data
        return precision_of(factor, self.runner.architecture(factor))

    @property
    def interval_count(self) -> int:
        return 1 if self.intervals is None else len(self.intervals.start)

    @property
    def is_tested(self) -> bool:
        """Whether each tile reads a mask besides the intervals."""
        return self.arrays.masking.query_ids is not None or self.arrays.masking.array is not None

    def tile(self, kernel: KernelName) -> Tile:
        """Return the tile of a kernel for these operands."""
        query, value = self.arrays.query.data, self.arrays.value.data
        dim, dtype = padded_dim(self.sizes.value_dim), value.dtype
        # Tables of additive scores are float32 always, and no operand of a product.
        if self.additive is None:
            dim = max(padded_dim(self.sizes.dim), dim)
            dtype = query.dtype if query.itemsize > value.itemsize else dtype
        name = str(dtype).removeprefix("torch.")
        # A custom function of channels is summed as a distance is, and has its tiles.
        form = "distance" if self.form == CHANNELS else FORMS[self.form]
        return self.runner.tile(kernel, self.runner.architecture(query), form, name, dim)

    @property
    def numbers(self) -> tuple[Sizes, float, float]:
        """Last arguments of the forward and of all kernels of `_Backward.launch`."""
        return self.sizes, self.scale, self.slope

    def constants(self, tile: Tile) -> dict[str, Any]:
        """Return the compile-time constants of these kernels: form, caps, dimensions, block sizes."""
        return {
            "FORM": self.form, "FUNCTION": self.function, "CAPS": self.caps, "INTERVALS": self.interval_count,
            "D": padded_dim(self.sizes.dim), "DV": padded_dim(self.sizes.value_dim), "PRECISION": self.precision,
            "BM": tile.queries, "BN": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip

    def lanes(self, tile: Tile) -> int:
        """Return the number of partial sums that the forward holds for each row of scores until the last key.

        A matrix unit leaves two neighbours of every eight columns in each of the four lanes of a row; where each warp
        has whole rows, sums of eight columns stay in their lanes. Other layouts would have to be converted.
        """
        if self.form != INNER:
            return 1
        if self.runner.architecture(self.arrays.value.data) == 0:
            return 4  # more than one, so that the interpreted tests sum over lanes
        warps_have_whole_rows = tile.queries >= 16 * tile.warps  # a matrix instruction has 16 rows
        return 8 if warps_have_whole_rows else 1

    def inputs(self, tile: Tile) -> Inputs:
        """Return the inputs of all kernels over tiles of pairs, with the ends of the tiles, which a kernel computes."""
        if self.intervals is None:
            return self.arrays
        masking = self.arrays.masking
        count, ends_batch, queries = masking.start.shape
        tiles = triton.cdiv(queries, tile.queries)

        def compute_ends() -> torch.Tensor:
            # any_start, full_start, full_stop, any_stop
            tile_ends: torch.Tensor = masking.start.new_empty((count, ends_batch, tiles, 4))
            self.runner.run(
                ranges.ends_of_tiles, (tiles, count, ends_batch), masking, tile_ends,
                queries, tiles, TESTED=self.is_tested, BM=tile.queries, BN=tile.keys,
            )  # fmt: skip
            return tile_ends

        tile_ends = self.intervals.table(self.runner, self.ends_key(tile), compute_ends)
        return self.arrays._replace(masking=masking._replace(ends=tile_ends))

    def ends_key(self, tile: Tile) -> Hashable:
        """Return the key of the ends of the tiles among the tables of one mask."""
        return "ends", tile.queries, tile.keys, self.is_tested


def precision_of(x: torch.Tensor, architecture: int) -> str:
    """Return how a product of float32 is computed: by three of TF32, by one if allowed; exactly if interpreted.

    For other dtypes Triton ignores this.
    """
    if architecture == 0:
        return "ieee"
    # `allow_tf32`, the older switch, raises once this one has been set.
    is_allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if x.dtype != torch.float32 or is_allowed else "tf32x3"


def operands_of(problem: Problem, tiles: TilePlan, runner: Runner, *, has_backward: bool = False) -> Operands:
    """Return the operands of a problem, on its device, without copies where the strides allow."""
    shape, form = problem.score_shape, problem.form
    accumulator = torch.float32
    lead, heads, groups = shape.lead, shape.heads, shape.groups

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype in _KERNEL_DTYPES else x.to(accumulator)

    def as_operand(x: torch.Tensor, row: int) -> Operand:
        return operand(x, lead, heads, groups, row)

    query, key = narrow(form.query), narrow(form.key)
    if query.dtype != key.dtype:
        query, key = query.to(accumulator), key.to(accumulator)
    kind, scale, slope, scales, query_bias, key_bias = INNER, 1.0, 0.0, None, None, None
    additive = custom = shared = function = None
    if isinstance(form, InnerForm):
        scale = float(form.scale)
        query_bias = None if form.query_bias is None else as_operand(narrow(form.query_bias), shape.query_len)
        key_bias = None if form.key_bias is None else as_operand(narrow(form.key_bias), shape.key_len)
    elif isinstance(form, DistanceForm):
        kind = DISTANCE
        if isinstance(form.scale, torch.Tensor):
            scales = form.scale.to(accumulator).expand(heads, groups, 1, 1).contiguous()
        else:
            scale = float(form.scale)
    if isinstance(form, TileForm):
        custom = custom_of(problem)
        shared, function = custom.parameters, custom.tile.value
        kind = {"product": INNER, "squared_distance": DISTANCE, "channels": CHANNELS}[custom.tile.of]
        # A distance form is -scale |q - k|^2.
        scale = -1.0 if kind == DISTANCE else 1.0
    bias, sink = problem.bias, problem.sink
    if bias is not None:
        bias = as_operand(narrow(bias), 1 if problem.has_relative_bias else shape.query_len)
    if sink is not None:
        sink = sink.to(accumulator).expand(heads, groups).contiguous()
    intervals, masking = _masking(problem, tiles)
    query_operand, key_operand = as_operand(query, shape.query_len), as_operand(key, shape.key_len)
    value_operand = as_operand(narrow(problem.value), shape.key_len)
    if isinstance(form, AdditiveForm):
        kind = ADDITIVE
        additive = sides_of(form, query_operand, key_operand, heads, groups, runner, with_powers=has_backward)
        query_operand, key_operand = additive.query_table.channels, additive.key_table.channels
        shared, function, slope = additive.w_v, form.activation.name, form.activation.negative_slope
    return Operands(
        form=kind,
        arrays=Inputs(
            *(query_operand, key_operand, value_operand, query_bias, key_bias, shared, scales, bias),
            masking=masking,
            dropout=_dropout(problem),
        ),
        intervals=intervals,
        sink=sink,
        scale=scale,
        slope=slope,
        # `capped` reads a cap of 0 as none.
        caps=tuple((0.0 if math.isinf(cap) else cap, factor) for cap, factor in form.caps),
        is_relative=problem.has_relative_bias,
        function=function,
        additive=additive,
        custom=custom,
        sizes=Sizes(shape.query_len, shape.key_len, query.shape[-1], problem.layout.value_dim, heads, groups),
        matrices=math.prod(lead) * heads * groups,
        batch=math.prod(lead),
        runner=runner,
    )


def _dropout(problem: Problem) -> Dropout | None:
    """Return the dropout of the weights as the kernels take it."""
    if problem.dropout is None:
        return None
    probability = problem.dropout.probability
    words = (*problem.dropout.words, min(round(probability * 2**32), 2**32 - 1))
    # As signed numbers: Triton would take a larger one for 64 bits.
    low, high, threshold = (ctypes.c_int32(bits).value for bits in words)
    return Dropout(low, high, threshold, 1 / (1 - probability))


_ON_DEVICE: WeakKeyDictionary[IntervalSet, dict[Hashable, DeviceIntervals]] = WeakKeyDictionary()


def _masking(problem: Problem, tiles: TilePlan) -> tuple[DeviceIntervals | None, Masking]:
    """Return the intervals of the mask, and the mask without the ends of tiles."""
    ops, shape, like = problem.ops, problem.score_shape, problem.value
    interval_set, remaining_mask = tiles.interval_set, tiles.remaining_mask
    batch = math.prod(shape.lead)
    intervals = None
    if interval_set is not None:
        intervals = _on_device(interval_set, like.device, shape.batch, batch)
    elif remaining_mask is not None:
        # Lengths on the device: their intervals are computed there.
        ends, other_parts = traced_visibility(ops, shape, like, remaining_mask)
        if ends is not None and len(ends[0].shape) == 2:  # holes would add an axis
            remaining_mask = other_parts
            start, stop = (x.to(torch.int32).contiguous()[None] for x in ends)
            start, stop = (_per_merged_batch(x, shape.batch, batch, axis=1) for x in (start, stop))
            intervals = DeviceIntervals(start, stop, None)
    direct, evaluated = lowering.partition(remaining_mask)
    mask_arrays = lowering.arrays(ops, shape, like, direct, with_evaluated=bool(evaluated))
    for mask_part in evaluated:
        unmasked = lowering.evaluate(ops, shape, like, mask_part)
        mask_arrays["mask"] = unmasked if "mask" not in mask_arrays else ops.logical_and(mask_arrays["mask"], unmasked)
    masking = Masking()
    if "mask" in mask_arrays:
        mask = operand(mask_arrays["mask"].view(torch.uint8), shape.lead, shape.heads, shape.groups, shape.query_len)
        masking = masking._replace(array=mask)
    for name in ("query_ids", "key_ids"):
        if name in mask_arrays:
            ids = _per_merged_batch(mask_arrays[name].to(torch.int64).contiguous(), shape.batch, batch)
            stride = 0 if len(ids) == 1 else ids.shape[1]
            masking = masking._replace(**{name: ids, f"{name}_batch": stride})
    if intervals is not None:
        _, rows, queries = intervals.start.shape
        masking = masking._replace(
            start=intervals.start, stop=intervals.stop, interval=rows * queries, batch=queries if rows > 1 else 0,
            ends_batch=rows,
        )  # fmt: skip
    return intervals, masking


def _per_merged_batch(x: torch.Tensor, batch: int, merged: int, axis: int = 0) -> torch.Tensor:
    """Return a row for each entry of all leading axes, `merged` in number, from `batch` rows or one for all."""
    return x if x.shape[axis] == 1 or batch == merged else x.repeat_interleave(merged // batch, axis)


def _on_device(interval_set: IntervalSet, device: torch.device, batch: int, merged: int) -> DeviceIntervals:
    """Return intervals for each entry of the leading axes, copied to the device once for each mask."""
    copies = _ON_DEVICE.setdefault(interval_set, {})
    if (device, merged) not in copies:
        # Repeated on the CPU, as the host waits for the copy; another stream could read a kernel's result too early.
        ends = (torch.from_numpy(x.astype("int32", order="C")) for x in (interval_set.start, interval_set.stop))
        start, stop = (_per_merged_batch(x, batch, merged, axis=1).to(device) for x in ends)
        copies[device, merged] = DeviceIntervals(start, stop, {})
    return copies[device, merged]


def forward(problem: Problem, tiles: TilePlan, runner: Runner = RUNNER) -> Result:
    """Run the forward."""
    shape, value_dim = problem.score_shape, problem.layout.value_dim
    out = problem.value.new_empty((*shape.rows, value_dim))
    # The log-sum-exp is row_max + log_denom, which `SinglePlan.result` adds.
    needed = {"row_max", "log_denom", *problem.statistics} - {"log_sum_exp"}
    rows = {name: out.new_empty((*shape.rows, 1), dtype=torch.float32) for name in Rows._fields if name in needed}
    with device_scope(out):
        operands = operands_of(problem, tiles, runner)
        if operands.matrices * shape.query_len:
            tile = operands.tile("forward")
            run_forward(
                operands, tile, operands.inputs(tile),
                operand(out, shape.lead, shape.heads, shape.groups, shape.query_len),
                Rows(*map(rows.get, Rows._fields)), forward_constants(operands, tile),
            )  # fmt: skip
    statistics = {name: x for name, x in rows.items() if name in TABLE}
    return Result(out, rows["row_max"], rows["log_denom"], statistics)


def forward_constants(operands: Operands, tile: Tile) -> dict[str, Any]:
    """Return the compile-time constants of the forward."""
    constants = {"TESTED": operands.is_tested, "RELATIVE": operands.is_relative, "LANES": operands.lanes(tile)}
    return constants | operands.constants(tile)


def run_forward(
    operands: Operands, tile: Tile, inputs: Inputs, out: Operand, rows: Any, constants: dict[str, Any]
) -> None:
    """Launch the forward; `inputs` are the inputs of `operands`, or others of the same layout."""
    grid = triton.cdiv(operands.sizes.n_q, tile.queries), operands.matrices
    operands.runner.run(forward_kernels.forward, grid, inputs, operands.sink, out, rows, *operands.numbers, **constants)


def device_scope(x: torch.Tensor) -> Any:
    """Return the scope in which launches go to the device of `x`, which may not be the current one."""
    return torch.cuda.device(x.device if x.is_cuda else -1)  # -1 changes nothing


def backward(
    problem: Problem, tiles: TilePlan, result: Result, grads: RowGradients, requested: frozenset[str],
    runner: Runner = RUNNER,
) -> dict[str, Array]:  # fmt: skip
    """Run the backward: the gradients of the operands in `requested` at least, by name."""
    with device_scope(problem.value):
        operands = operands_of(problem, tiles, runner, has_backward=True)
        return _Backward(problem, operands, result, grads, requested).run()


RELATIVE_SHARES = 16
"""Programs for each matrix of a relative bias, with a line of float32 sums each: together 1 MB for 8192 tokens."""


class _Backward:
    """One backward: its operands, and the kernels that it launches."""

    def __init__(
        self, problem: Problem, operands: Operands, result: Result, grads: RowGradients, requested: frozenset[str]
    ) -> None:
        self.problem, self.operands, self.requested = problem, operands, requested
        self.result, self.grads = result, grads
        self.arrays = problem.operands()
        self.score_constants: dict[str, Any] = {
            "DERIVATIVE": None if operands.custom is None else operands.custom.tile.gradient,
            "TESTED": operands.is_tested, "RELATIVE": operands.is_relative,
        }  # fmt: skip
        self.gradients: dict[str, Array] = {}
        queries, _, _, value_dim, heads, groups = operands.sizes
        self.is_empty = not operands.matrices * queries
        grad_out = result.out.new_zeros(()).expand(result.out.shape) if grads.out is None else grads.out
        self.grad_out = self.as_operand(grad_out, queries)
        minus_delta = self.new_rows()
        if not self.is_empty:
            block = 32
            operands.runner.run(
                backward_kernels.row_sums, (triton.cdiv(queries, block), operands.matrices),
                self.as_operand(result.out, queries), self.grad_out, _row_array(grads.log_sum_exp), minus_delta,
                queries, value_dim, heads, groups, BM=block, DV=padded_dim(value_dim),
            )  # fmt: skip
        grad_entropy = _row_array(grads.entropy)
        entropy = None if grad_entropy is None else _row_array(result.statistics["entropy"])
        self.rows = RowGrads(
            _row_array(result.row_max), _row_array(result.log_denom), minus_delta, entropy, grad_entropy
        )

    def run(self) -> dict[str, Array]:
        """Return the gradients by name."""
        if self.is_empty or not self.operands.sizes.n_k:
            self.gradients = {name: x.new_zeros(x.shape) for name, x in self.arrays.items()}
            if self.problem.sink is not None and not self.is_empty:  # without keys the sink has all the weight
                self.gradients["sink"] = self.d_sink(self.problem.sink)
            return self.gradients
        if self.operands.additive is None:
            self.d_query()
            self.d_key()
            self.d_parameters()
        else:
            self.d_additive()
        # The gradient of a bias of single pairs has been computed above.
        if self.problem.bias is not None and "bias" in self.requested and "bias" not in self.gradients:
            self.d_bias(self.problem.bias)
        if self.problem.sink is not None:
            self.gradients["sink"] = self.d_sink(self.problem.sink)
        return {
            name: x if x.shape == self.arrays[name].shape else sum_to(self.problem.ops, x, self.arrays[name].shape)
            for name, x in self.gradients.items()
        }

    def as_operand(self, x: torch.Tensor, row: int) -> Operand:
        """Return an array on the canonical axes as an operand."""
        sizes = self.operands.sizes
        return operand(x, self.problem.score_shape.lead, sizes.heads, sizes.groups, row)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], tile: Tile, inputs: Inputs, *outputs: Any, **constants: Any
    ) -> None:
        """Launch a kernel over tiles of pairs; `constants` extend or replace the constants of all these kernels."""
        operands = self.operands
        operands.runner.run(
            kernel, grid, inputs, self.grad_out, self.rows, *outputs, *operands.numbers,
            **(operands.constants(tile) | constants),
        )  # fmt: skip

    def new_rows(self) -> torch.Tensor:
        """Return one float32 for each query."""
        shape = (*self.problem.score_shape.rows, 1)
        return torch.empty(shape, dtype=torch.float32, device=self.problem.value.device)

    def gradient(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the array of a gradient: in the operand's dtype where nothing is summed afterwards."""
        x = self.arrays[name]
        is_final = tuple(x.shape) == shape and x.dtype in _KERNEL_DTYPES
        grad = self.gradients[name] = torch.empty(shape, dtype=x.dtype if is_final else torch.float32, device=x.device)
        return grad

    def d_query(self) -> None:
        """Compute the gradients that have an axis of queries."""
        operands, tile = self.operands, self.operands.tile("d_query")
        rows = self.problem.score_shape.rows
        queries, _, dim, *_ = operands.sizes
        grad_query = self.gradient("query", (*rows, dim))
        grad_bias, grad_query_bias, grad_scale = self.bias_gradient(), None, None
        if "query_bias" in self.arrays:
            grad_query_bias = self.gradients["query_bias"] = self.new_rows()
        if "scale" in self.arrays:
            grad_scale = self.gradients["scale"] = self.new_rows()
        self.launch(
            backward_kernels.d_query, (triton.cdiv(queries, tile.queries), operands.matrices), tile,
            operands.inputs(tile), self.as_operand(grad_query, queries), grad_query_bias, grad_scale, grad_bias,
            **self.score_constants,
        )  # fmt: skip

    def d_additive(self) -> None:
        """Compute the gradients of an additive score, of its values, and of a bias that has a number for each pair."""
        grad_bias = self.bias_gradient()
        gradients = additive_gradients.gradients(self.operands, self.grad_out, self.rows, grad_bias, self.requested)
        lead = self.problem.score_shape.lead  # in `gradients` the leading axes are one
        self.gradients |= {
            name: x if name == "w_v" else x.reshape(*lead, *x.shape[1:]) for name, x in gradients.items()
        }

    def bias_gradient(self) -> Operand | None:
        """Return zeros, as skipped tiles write none, for the requested gradient of a bias of single pairs, or None."""
        bias, rows = self.problem.bias, self.problem.score_shape.rows
        if bias is None or "bias" not in self.requested or tuple(bias.shape) != (*rows, self.operands.sizes.n_k):
            return None
        self.gradients["bias"] = torch.zeros_like(bias, memory_format=torch.contiguous_format)
        return self.as_operand(self.gradients["bias"], rows[-1])

    def d_key(self) -> None:
        """Compute the gradients that have an axis of keys."""
        operands, tile = self.operands, self.operands.tile("d_key")
        _, keys, dim, value_dim, heads, groups = operands.sizes
        key_operands = (self.arrays[name] for name in ("key", "value", "key_bias") if name in self.arrays)
        group_shares_keys = all(x.shape[-3] == 1 for x in key_operands)  # one program then sums over the group
        lead = (*self.problem.score_shape.lead, heads, 1 if group_shares_keys else groups)
        grad_key = self.gradient("key", (*lead, keys, dim))
        grad_value = self.gradient("value", (*lead, keys, value_dim))
        grad_key_bias = None
        if "key_bias" in self.arrays:
            self.gradients["key_bias"] = grad_value.new_empty((*lead, keys, 1), dtype=torch.float32)
            grad_key_bias = self.as_operand(self.gradients["key_bias"], keys)
        inputs = operands.inputs(tile)
        tiles, count = None, triton.cdiv(keys, tile.keys)
        if operands.intervals is not None:

            def query_tiles_by_key_tile() -> torch.Tensor:
                # (batch or 1, key tile, 4), in the order of `ends`.
                ends = inputs.masking.ends
                intervals, batch, query_tile_count, _ = ends.shape
                query_tiles: torch.Tensor = ends.new_empty((batch, count, 4))
                operands.runner.run(
                    ranges.tiles_of_queries, (count, batch), ends, query_tiles, intervals, query_tile_count, BLOCK=128
                )
                return query_tiles

            key = "tiles of queries", count, operands.ends_key(tile)
            tiles = operands.intervals.table(operands.runner, key, query_tiles_by_key_tile)
        self.launch(
            backward_kernels.d_key, (count, operands.matrices // (groups if group_shares_keys else 1)), tile, inputs,
            tiles, self.as_operand(grad_key, keys), self.as_operand(grad_value, keys), grad_key_bias,
            SHARED=group_shares_keys, **self.score_constants,
        )  # fmt: skip

    def d_parameters(self) -> None:
        """Compute the gradients of the parameters of a custom score."""
        operands, custom = self.operands, self.operands.custom
        if custom is None or not self.requested.intersection(custom.learned_names):
            return
        tile = operands.tile("d_query")
        inputs = operands.inputs(tile)
        queries, _, dim, _, heads, groups = operands.sizes
        tiles = triton.cdiv(queries, tile.queries)
        shape = (operands.batch, heads, groups, tiles, dim if operands.form == CHANNELS else 1)
        for index, name in enumerate(custom.learned_names):
            if name in self.requested:
                partial_sums = self.rows.minus_delta.new_empty(shape)
                self.launch(
                    backward_kernels.d_parameter, (tiles, operands.matrices), tile, inputs, partial_sums,
                    PARAMETER=index, **self.score_constants,
                )  # fmt: skip
                self.gradients[name] = parameter_gradient(self.problem, custom, name, partial_sums)

    def d_bias(self, bias: torch.Tensor) -> None:
        """Compute the gradient of a bias that several pairs share."""
        operands, tile = self.operands, self.operands.tile("d_query")
        queries, keys, *_ = operands.sizes
        *lead, kv_heads, group_count, row, column = bias.shape
        # Leading axes of which some are shared are summed afterwards.
        batches = 1 if math.prod(lead) == 1 else operands.batch
        matrices = batches * kv_heads * group_count
        lead = [1] * len(lead) if batches == 1 else [*self.problem.score_shape.lead]
        counts = (operands.batch, batches, kv_heads, group_count)
        inputs = operands.inputs(tile)
        if operands.is_relative:
            shares = max(1, min(RELATIVE_SHARES, triton.cdiv(queries, tile.queries)))
            partial_sums = bias.new_zeros((shares, *lead, kv_heads, group_count, 1, column), dtype=torch.float32)
            # A square tile: its diagonals are summed in a line of queries + keys, which must be a power of 2.
            size = min(tile.queries, tile.keys)
            kernel = backward_kernels.d_relative_bias
            self.launch(kernel, (shares, matrices), tile, inputs, partial_sums, *counts, BM=size, BN=size)
            self.gradients["bias"] = partial_sums.sum(0)
            return
        tiles = triton.cdiv(queries, tile.queries), triton.cdiv(keys, tile.keys)
        has_rows, has_columns = (length > 1 and n == length for n, length in ((row, queries), (column, keys)))
        shape = (queries if has_rows else tiles[0], keys if has_columns else tiles[1])
        partial_sums = bias.new_empty((*lead, kv_heads, group_count, *shape), dtype=torch.float32)
        self.launch(
            backward_kernels.d_bias, (*tiles, matrices), tile, inputs, partial_sums, *counts,
            HAS_ROWS=has_rows, HAS_COLUMNS=has_columns,
        )  # fmt: skip
        axes = [axis for axis, is_complete in ((-2, has_rows), (-1, has_columns)) if not is_complete]
        self.gradients["bias"] = partial_sums.sum(axes, keepdim=True) if axes else partial_sums

    def d_sink(self, sink: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the sink."""
        context = tiled.RowContext(self.result, self.grads, skips_nan_isolation=True, delta=-self.rows.minus_delta)
        grad_sink: torch.Tensor = tiled.sink_gradient(self.problem, sink, context)
        return grad_sink


def _row_array(x: torch.Tensor | None) -> Any:
    """Return one number for each query in float32 and C order."""
    return None if x is None else x.to(torch.float32).contiguous()
