"""Execution plans of the native kernel: calls of one signature are checked once, then run on addresses.

- Arrays stay on the caller's axes: the module addresses the canonical axes by strides, so no view is made.
- The module reads tensors of PyTorch and arrays of NumPy itself: each step in Python costs a tiny call 2 to 5%.
- A plan holds no array of a caller: the module keeps the shapes and strides of the first call's arrays alone. Where
  the number of keys may differ (`DecodingPlan`), it keeps the layout of the last run, and checks another one anew.
- Gradients of gradients, gradients under a transform, and saved tensors whose strides a hook has changed go through a
  `SinglePlan` on a newly built problem.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, DifferentiableOp, HostArray, Signature, sum_to
from attnscore.backends.native import module as _native
from attnscore.base import thresholds
from attnscore.base.arguments import CallArguments
from attnscore.base.layout import AxisLayout, ScoreShape
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel, Plan, SinglePlan, snapshot
from attnscore.kernels.native.marshalling import (
    ALWAYS_WRITTEN,
    BACKWARD_INPUTS,
    FILLED,
    GRADIENTS,
    ORDER,
    PAIRS,
    STORED,
    allocate_aligned,
    gradient_shapes,
    score_spec,
)
from attnscore.kernels.tiling import TilePlan
from attnscore.masks import Mask, ValidLens, lowering
from attnscore.masks.cached import CachedMask
from attnscore.masks.index_values import lens_per_query
from attnscore.masks.intervals import IntervalSet
from attnscore.problem.problem import Problem, build_problem
from attnscore.problem.statistics import DIFFERENTIABLE, KEYS, AttentionStats, in_returned_dtype
from attnscore.scores import Additive
from attnscore.scores.forms import AdditiveForm, TileForm
from attnscore.scores.gaussian import bandwidth_gradient, scale_of

CallPlan: TypeAlias = Any
"""Class of the module: a call takes the arrays in order, a seed, and a number of threads."""


class OperandKind(NamedTuple):
    """Properties of an operand from which its checks, pointers and gradient derive."""

    name: str
    input: str
    """Name among the inputs of the module (`ORDER`)."""
    has_positions: bool = False
    """Whether the operand has axes of positions and heads, which the caller may have in either order."""
    field: str | None = None
    """Field of the score that holds the operand; None for an argument of the call."""


# In the order of the module's inputs. Each call computes the scale that the module reads from a Gaussian's bandwidth.
_OPERANDS = (
    OperandKind("query", "query", has_positions=True),
    OperandKind("key", "key", has_positions=True),
    OperandKind("value", "value", has_positions=True),
    OperandKind("bias", "bias"),
    OperandKind("w_v", "w_v", field="w_v"),
    OperandKind("sink", "sink"),
    OperandKind("scale", "scales", field="bandwidth"),
)


class Output(NamedTuple):
    """Output of a forward."""

    position: int
    """Index in `Forward.filled`."""
    dtype: str
    swapped_axis: int | None
    """Axis to swap with the next one to get the caller's axes; None where the array has them already."""


class Forward(NamedTuple):
    """Plan of a forward."""

    plan: CallPlan
    filled: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape and dtype of each array that the module fills: in C order, heads in front of queries."""
    outputs: tuple[Output, ...]
    saved: tuple[int, ...]
    """Indices in `filled` of the arrays that are saved for a backward."""


class Input(NamedTuple):
    """Array that a backward reads after the operands."""

    position: int
    """Index in `Computation.backward_inputs`."""
    swapped_axis: int | None
    """Axis to swap with the next one to get the module's axes; None where the array has them already."""
    is_in_c_order: bool
    """Whether it is an array of NumPy in C order, after the axes are swapped."""


class Backward(NamedTuple):
    """Plan of a backward."""

    plan: CallPlan
    inputs: tuple[Input, ...]
    filled: tuple[tuple[int, ...], ...]
    """Shape of each gradient that the module fills."""
    gradients: tuple[tuple[int | None, Operand | None], ...]
    """For each operand the index of its gradient in `filled`, None where it is not requested, and the operand itself
    where the filled array is not yet its gradient."""


class Operand(NamedTuple):
    """Array that the call is a function of."""

    kind: OperandKind
    canonical: tuple[int, ...]
    """Shape on the canonical axes."""
    gradient: tuple[int, ...]
    """Shape in which the module accumulates the gradient."""
    filled: tuple[int, ...]
    """Shape of the allocated gradient: the caller's, where it has the same elements in the same order."""
    transposed: bool
    """Whether the caller's axis of heads follows the axis of positions."""
    is_final: bool
    """Whether the module fills the gradient in the shape and dtype of the operand, so that nothing is left to do."""
    is_summed: bool
    """Whether the operand is one vector, (h,) or (1, h), whose gradient is the sum of the filled rows."""

    @property
    def name(self) -> str:
        return self.kind.name


@dataclass(frozen=True, eq=False)
class Computation:
    """What a plan computes."""

    module: Any
    kernel: Kernel
    ops: Backend
    dtype: str
    accumulator: str
    statistics: tuple[str, ...]
    returns_weights: bool
    dropout: float
    score: Any
    """The score; None where it has arrays, as a plan holds no array of a caller."""
    mask: Mask | None
    """The mask whose intervals the plan holds; None for no mask, or one that each call passes."""
    reads_mask: bool
    """Whether each call passes its mask as a boolean array."""
    lens_rows: int
    """Rows of the valid lengths that each call passes: 1, or the batch; 0 where it passes none."""
    bounds: tuple[HostArray, ...]
    """Bounds (start, stop) of the intervals that the plan holds, or ()."""
    spec: tuple[Any, ...]
    """The score's parameters as the module takes them (`score_spec`), with a seed of 0: each call passes its own."""
    saves_scores: bool
    """Whether a forward saves its scores for the backward."""
    has_bandwidth: bool
    """Whether the last operand is the bandwidth of a Gaussian."""
    copies_bias: bool
    """Whether the bias is copied to C order: a relative bias, of which each query reads another part."""

    @cached_property
    def threads(self) -> Callable[[], int]:
        """Function that counts the threads of a call (`thread_counter`)."""
        return thread_counter(self.module, self.ops)

    def seed_of(self, arguments: CallArguments) -> int:
        """Return the seed of a call's dropout; 0 without dropout."""
        if not self.dropout:
            return 0
        seed = arguments.seed
        return (self.ops.draw_seed(arguments.query) if seed is None else int(seed)) % 2**63

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the outputs through which a gradient flows."""
        statistics = (name for name in DIFFERENTIABLE if name in self.statistics)
        return ("out", *statistics, *(("attention_weights",) if self.returns_weights else ()))

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Names of the arrays that a backward reads in addition to the differentiable outputs; no caller gets them."""
        return ("row_max", "log_denom", *(("saved_scores",) if self.saves_scores else ()))

    @cached_property
    def backward_inputs(self) -> tuple[str, ...]:
        """Names of the arrays that `backward` takes: differentiable outputs, saved arrays, gradients of the outputs.

        Where the log-sum-exp is no output, its gradient comes last and may be left out: a staged program computes it as
        row_max + log_denom outside of the kernel.
        """
        computed = () if "log_sum_exp" in self.differentiable else ("log_sum_exp",)
        return (*self.differentiable, *self.saved, *(f"grad_{name}" for name in (*self.differentiable, *computed)))

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """Names of the outputs of a forward, the differentiable ones first."""
        detached = (name for name in self.statistics if name not in DIFFERENTIABLE)
        return (*self.differentiable, *detached)

    @cached_property
    def _statistics_of(self) -> Callable[[tuple[Array | None, ...]], tuple[Array | None, ...]]:
        """Function from ``(*outputs, None)`` to the fields of `AttentionStats`: None where one is not requested."""
        fields = AttentionStats._fields
        fields_of = operator.itemgetter(*(self.returned.index(x) if x in self.statistics else -1 for x in fields))
        if not {*self.statistics} & {*KEYS}:
            return fields_of
        # Indices of keys are in the dtype of sums, and become integers.
        return lambda outputs: tuple(
            x if x is None else in_returned_dtype(self.ops, name, x)
            for name, x in zip(fields, fields_of(outputs), strict=True)
        )

    def present(self, outputs: Sequence[Array]) -> Any:
        """Return the result of `attend` from the outputs `returned`: the output, any weights and statistics."""
        if len(outputs) == 1:
            return outputs[0]
        results: list[Any] = [outputs[0]]
        if self.returns_weights:
            weights = outputs[len(self.differentiable) - 1]
            results.append(weights if self.dtype == self.accumulator else self.ops.astype(weights, self.dtype))
        if self.statistics:
            # As `CallArguments`, without the constructor: 0.4 us of a tiny call's 35.
            results.append(tuple.__new__(AttentionStats, self._statistics_of((*outputs, None))))
        return tuple(results)


@dataclass(frozen=True, eq=False)
class NativePlan(Plan):
    """Execution plan of the calls of one signature."""

    computation: Computation
    layout: AxisLayout
    operands: tuple[Operand, ...]
    reads_key_len: bool = False
    """Whether each call may have another number of keys than `layout`; such a plan has no backward."""
    _forwards: dict[bool, Forward] = field(default_factory=dict)
    _backwards: dict[Hashable, Backward] = field(default_factory=dict)
    _layouts: list[Signature | None] = field(default_factory=list)

    def __repr__(self) -> str:
        computation = self.computation
        saved = ", ".join((*computation.differentiable, *computation.saved))
        return f"NativePlan({computation.kernel.name}, {computation.dtype}, tiles chosen in C++, saves {saved})"

    @property
    def cache_weight(self) -> int:
        return math.prod(self.layout.score_shape.rows[:-1])

    def run(self, arguments: CallArguments) -> Any:
        """Return the result of `attend`."""
        computation, ops = self.computation, self.computation.ops
        query, key, value, score, _, _, bias, sink, _ = arguments
        arrays: tuple[Array, ...] = (query, key, value)
        if bias is not None:
            arrays += (bias,)
        if type(score) is Additive:
            arrays += (score.w_v,)
        if sink is not None:
            arrays += (sink,)
        if computation.has_bandwidth:
            arrays += (score.bandwidth,)
            # Of a score's numbers a plan checks the bandwidth alone: NaN, infinity and numbers not above 0 raise.
            if not 0 < ops.number(score.bandwidth) < math.inf:  # type: ignore[operator]  # it is not traced
                score.check(query.shape[-1], key.shape[-1])
        if ops.has_autodiff and not self.reads_key_len and ops.needs_grad(*arrays):
            return self.record(arguments, score, arrays)
        mask = arguments.valid_lens if computation.lens_rows else arguments.mask
        outputs, _ = self.forward(arrays, mask, computation.seed_of(arguments), saves=False)
        return computation.present(outputs)

    def record(self, arguments: CallArguments, score: Any, arrays: Sequence[Array]) -> Any:
        """Return the result of `attend` on these arrays, which autograd records."""
        computation = self.computation
        # The backward reads the mask or the lengths of this call, whatever the caller's array holds by then.
        mask = snapshot(arguments.mask) if computation.reads_mask else None
        if computation.lens_rows:
            mask = self._check_bounds(arguments.valid_lens)
        op = NativeOp(self, score, mask, computation.seed_of(arguments))
        outputs = computation.ops.record(op, arrays)
        return computation.present((*outputs, *op.detached) if op.detached else outputs)

    def forward(
        self, arrays: Sequence[Array], mask: Any, seed: int, *, saves: bool
    ) -> tuple[tuple[Array, ...], Sequence[HostArray]]:
        """Return the outputs `Computation.returned` and, with `saves`, the arrays `Computation.saved`.

        `mask` is a boolean mask, or valid lengths or their bounds. A plan that holds the intervals does not read it.
        """
        computation, ops, lens, caller_mask = self.computation, self.computation.ops, (), mask
        forward = self._forwards.get(saves) or self._build_forward(arrays, mask, saves)
        plan, filled_layouts, outputs, saved = forward
        # The module makes bounds of valid lengths itself. Bounds, a tuple, are among its inputs, as a mask is.
        if computation.lens_rows and type(mask) is not tuple:
            lens, caller_mask = (mask,) if type(mask) is np.ndarray else tuple(ops.buffers((mask,))), None
        buffers = self._buffers(arrays, caller_mask)
        empty = _empty_aligned if ops.wants_aligned else np.empty
        filled = plan.allocate_and_run(buffers, lens, empty, filled_layouts, seed, computation.threads())
        if filled is None:
            # A length is out of range: this raises, with a message.
            ValidLens(mask).check(ops, self._score_shape(arrays[1]))
        results, from_memory, like = [], ops.from_memory, arrays[2]
        for position, dtype, axis in outputs:
            x = from_memory(filled[position], dtype, like)
            results.append(x if axis is None else ops.swap_axes(x, axis, axis + 1))
        return tuple(results), [filled[position] for position in saved]

    def _buffers(self, arrays: Sequence[Array], mask: Any) -> tuple[Array, ...]:
        """Return the memory of operands and mask, in the order of the module's inputs (`ORDER`)."""
        computation, ops = self.computation, self.computation.ops
        buffers = tuple(ops.buffers(arrays))
        if computation.copies_bias:
            buffers = (*buffers[:3], *ops.buffers((ops.in_c_order(arrays[3]),)), *buffers[4:])
        if computation.has_bandwidth:
            with np.errstate(all="ignore"):  # a tiny bandwidth gives infinity
                scale = scale_of(np.float64(ops.number(arrays[-1])))
                buffers = (*buffers[:-1], np.full((1, 1), scale, computation.accumulator))
        if computation.reads_mask:
            mask_buffers: tuple[HostArray, ...] = (_memory(ops, mask),)
        else:
            mask_buffers = (mask or ()) if computation.lens_rows else computation.bounds
        if not mask_buffers:
            return buffers
        before_mask = 4 if self.operands[3:] and self.operands[3].name == "bias" else 3
        return (*buffers[:before_mask], *mask_buffers, *buffers[before_mask:])

    def _inputs(self, arrays: Sequence[Array], mask: Any) -> list[HostArray | None]:
        """Return views of a call's arrays as the module's inputs (`ORDER`).

        Planning reads their shapes and strides, and the entries of `start` and `stop`, which it checks.
        """
        computation, ops, layout = self.computation, self.computation.ops, self.layout
        host, inputs = backends.load("numpy"), dict.fromkeys(ORDER)
        for (kind, canonical, *_), x in zip(self.operands, arrays, strict=True):
            if kind.has_positions:
                view = layout.to_canonical(host, ops.memory(x), is_query=kind.name == "query")
            elif kind.name == "bias":
                view = layout.pairs_to_canonical(host, ops.memory(ops.in_c_order(x) if computation.copies_bias else x))
            elif kind.name == "scale":
                view = np.zeros((1, 1), computation.accumulator)
            else:
                view = ops.memory(x).reshape(canonical)
            inputs[kind.input] = view
        if computation.reads_mask:
            inputs["mask"] = layout.pairs_to_canonical(host, _memory(ops, mask)).view(np.uint8)
        if bounds := computation.bounds or self._lens_bounds:
            inputs["start"], inputs["stop"] = bounds
        return list(inputs.values())

    def _score_shape(self, key: Array) -> ScoreShape:
        """Return the shape of the scores of a call with this key."""
        key_len = key.shape[-3 if self.layout.is_length_before_heads else -2]
        return dataclasses.replace(self.layout.score_shape, key_len=key_len)

    @cached_property
    def _lens_bounds(self) -> tuple[HostArray, ...]:
        """Bounds (start, stop), all 0, in the shape of a mask of valid lengths; () where calls pass none."""
        shape = self.computation.lens_rows, self.layout.score_shape.query_len
        return tuple(np.zeros((2, *shape), np.int64)) if self.computation.lens_rows else ()

    def _check_bounds(self, valid_lens: Any) -> tuple[HostArray, HostArray]:
        """Return the bounds of the intervals of valid lengths; raise MaskError where one is out of range."""
        computation, score_shape = self.computation, self.layout.score_shape
        (lens,) = (valid_lens,) if type(valid_lens) is np.ndarray else computation.ops.buffers((valid_lens,))
        start, stop = self._lens_bounds[0], np.empty_like(self._lens_bounds[1])
        if not computation.module.copy_valid_lens(lens, stop, score_shape.key_len):
            ValidLens(valid_lens).check(computation.ops, score_shape)
        return start, stop

    def bounds_of(self, lens: HostArray) -> tuple[HostArray, HostArray]:
        """Return the bounds of the intervals of a program's valid lengths, without `_check_bounds`.

        Lengths of a running program raise no error: the module clips the bounds to [0, key_len].
        """
        computation, score_shape = self.computation, self.layout.score_shape
        start, stop = self._lens_bounds[0], np.empty_like(self._lens_bounds[1])
        if not score_shape.has_batch:
            lens = lens_per_query(np.asarray(lens), score_shape.query_len, 1)
        computation.module.copy_valid_lens(np.ascontiguousarray(lens, np.int64), stop, score_shape.key_len)
        return start, stop

    def _build_forward(self, arrays: Sequence[Array], mask: Any, saves: bool) -> Forward:
        """Plan a forward, with the arrays for a backward if `saves`."""
        computation, layout = self.computation, self.layout
        saved_names = computation.saved if saves else ()
        examples = {name: self._example(name) for name in FILLED if name in (*computation.returned, *saved_names)}
        inputs, filled_examples = self._inputs(arrays, mask), [examples.get(name) for name in FILLED]
        if self.reads_key_len:
            caller_axes = layout.axes >= 4, layout.is_length_before_heads  # has_heads, length_before_heads
            plan = computation.module.plan_decoding(computation.spec, inputs, filled_examples, *caller_axes)
        else:
            plan = computation.module.plan_forward(computation.spec, inputs, filled_examples)
        rows, filled_names = layout.rows, tuple(examples)
        columns = {"out": (layout.value_dim,), **dict.fromkeys(PAIRS, (layout.score_shape.key_len,))}
        filled = tuple(((*rows, *columns.get(name, ())), x.dtype) for name, x in examples.items())
        # Only `out` and the statistics go to the caller's axes: saved arrays stay inside, and weights always have the
        # heads in front of the queries.
        axes = {"out": -3, **dict.fromkeys(computation.statistics, -2)} if layout.is_length_before_heads else {}
        dtypes = {"out": computation.dtype}
        outputs = [
            Output(filled_names.index(x), dtypes.get(x, computation.accumulator), axes.get(x))
            for x in computation.returned
        ]
        saved = tuple(map(filled_names.index, saved_names))
        forward = self._forwards[saves] = Forward(plan, filled, tuple(outputs), saved)
        return forward

    def _example(self, name: str) -> HostArray:
        """Return an array like one that the module fills, or reads in a backward; its entries are never read."""
        shape, dtype, accumulator = self.layout.score_shape, self.computation.dtype, self.computation.accumulator
        if name == "out":
            return np.empty((*shape.rows, self.layout.value_dim), STORED.get(dtype, dtype))
        return np.empty((*shape.rows, shape.key_len if name in PAIRS else 1), accumulator)

    def keep_layouts(self, arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Remember the layouts of the operands and outputs of a forward: all calls of this plan have the same ones."""
        if not self._layouts:
            self._layouts.append(self.computation.ops.signature([*arrays, *outputs]))

    def are_as_planned(self, saved: Sequence[Array], incoming: Sequence[Array]) -> bool:
        """Return whether the module can run a backward on these arrays.

        The saved operands and outputs must have the layouts of the forward, which hooks on saved tensors may change.
        All arrays must be plain (`Backend.is_plain`).
        """
        expected, actual = self._layouts[0], self.computation.ops.signature([*saved, *incoming])
        return expected is not None and actual is not None and actual[: len(expected)] == expected

    def backward(
        self, arrays: Sequence[Array], mask: Any, inputs: Sequence[Array | None], seed: int, requested: Sequence[bool]
    ) -> list[Array | None]:
        """Return the gradient of each operand, None where not requested, from `Computation.backward_inputs`."""
        computation, ops = self.computation, self.computation.ops
        key = (*requested, *[x is None for x in inputs])
        backward = self._backwards.get(key)
        if backward is None:
            names = [name for name, x in zip(computation.backward_inputs, inputs, strict=False) if x is not None]
            incoming = {name.removeprefix("grad_") for name in names if name.startswith("grad_")}
            backward = self._backwards[key] = self._build_backward(arrays, mask, incoming, requested)
        input_buffers: list[Array] = []
        for position, axis, is_in_c_order in backward.inputs:
            x = inputs[position]
            if x is None:  # the gradient of the output, which the module always reads
                out: Any = inputs[0]
                x = ops.zeros(out.shape, out)
            if axis is not None:
                x = _with_heads_first(ops, x, axis)
            input_buffers.append(x if is_in_c_order else ops.buffer_in_c_order(x))
        empty = _empty_aligned if ops.wants_aligned else np.empty
        filled = [empty(shape, computation.accumulator) for shape in backward.filled]
        backward.plan((*self._buffers(arrays, mask), *input_buffers, *filled), seed, computation.threads())
        gradients: list[Array | None] = []
        from_memory, dtype, like = ops.from_memory, computation.accumulator, arrays[2]
        for filled_index, operand in backward.gradients:
            if filled_index is None:
                gradients.append(None)
            elif operand is None:
                gradients.append(from_memory(filled[filled_index], dtype, like))
            else:
                gradients.append(self._finish_gradient(filled[filled_index], operand, arrays[len(gradients)], like))
        return gradients

    def _finish_gradient(self, rows: HostArray, operand: Operand, x: Array, like: Array) -> Array:
        """Return the gradient of an operand `x` from the rows that the module has filled."""
        ops, accumulator = self.computation.ops, self.computation.accumulator
        if operand.name == "scale":
            grad_scale = rows.sum(dtype=np.float64)
            with np.errstate(all="ignore"):  # the cube of a tiny bandwidth is 0
                grad = np.asarray(bandwidth_gradient(np.float64(ops.number(x)), grad_scale), accumulator)
            return ops.astype(ops.from_memory(grad, accumulator, like), ops.dtype(x))
        if operand.is_summed:
            # Not -1, which NumPy cannot infer next to an axis of 0.
            rows = _sum_of_rows(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]))
            rows = rows[None] if len(x.shape) > 1 else rows
        grad = ops.from_memory(rows, accumulator, like)
        return grad if operand.is_final else self.operand_gradient(grad, operand, x)

    def _build_backward(
        self, arrays: Sequence[Array], mask: Any, incoming: set[str], requested: Sequence[bool]
    ) -> Backward:
        """Plan a backward from the gradients of the outputs `incoming` to the gradients of the `requested` operands."""
        computation = self.computation
        reads = {"out", "grad_out", *computation.saved, *(f"grad_{name}" for name in incoming)}
        # A backward reads the entropy and the weights only where it reads their gradients.
        reads |= incoming & {"entropy", "attention_weights"}
        axes = {"out": -3, "entropy": -2, "log_sum_exp": -2} if self.layout.is_length_before_heads else {}
        operands = {
            operand.name: operand
            for operand, is_requested in zip(self.operands, requested, strict=True)
            if is_requested or operand.name in ALWAYS_WRITTEN
        }
        plan = computation.module.plan_backward(
            computation.spec,
            self._inputs(arrays, mask),
            [self._example(name.removeprefix("grad_")) if name in reads else None for name in BACKWARD_INPUTS],
            computation.dtype,
            [np.empty(operands[x].gradient, computation.accumulator) if x in operands else None for x in GRADIENTS],
        )
        names = [name for name in GRADIENTS if name in operands]
        axis_of = {name: axes.get(name.removeprefix("grad_")) for name in BACKWARD_INPUTS}
        inputs = [
            Input(
                position=computation.backward_inputs.index(name),
                swapped_axis=axis_of[name],
                # `_with_heads_first` copies to C order, in which saved arrays are allocated.
                is_in_c_order=axis_of[name] is not None or name in computation.saved,
            )
            for name in BACKWARD_INPUTS
            if name in reads
        ]
        gradients: list[tuple[int | None, Operand | None]] = []
        for operand, is_requested in zip(self.operands, requested, strict=True):
            is_finished = operand.is_final and not operand.is_summed and operand.name != "scale"
            position = names.index(operand.name) if is_requested else None
            gradients.append((position, operand if is_requested and not is_finished else None))
        return Backward(plan, tuple(inputs), tuple(operands[name].filled for name in names), tuple(gradients))

    def operand_gradient(self, grad: Array, operand: Operand, x: Array) -> Array:
        """Return the gradient of `x`, in its shape and dtype, from `grad` on the canonical axes."""
        ops, shape = self.computation.ops, tuple(x.shape)
        if operand.transposed or tuple(grad.shape) != shape:
            if tuple(grad.shape) != operand.canonical:
                grad = sum_to(ops, grad, operand.canonical)
            is_transposed = operand.transposed
            grad = self.layout.gradient_from_canonical(ops, grad, shape) if is_transposed else ops.reshape(grad, shape)
        return ops.astype(grad, ops.dtype(x))


@dataclass(eq=False, slots=True)
class NativeOp(DifferentiableOp):
    """One recorded call, for a framework's gradient hook.

    `Computation.differentiable` names its outputs. The op itself holds the other outputs of `Computation.returned`, and
    the arrays of `Computation.saved`: autograd would save them as tensors, which costs a tiny call 4 us.
    """

    plan: NativePlan
    score: Any
    mask: Any
    """The boolean mask of the call, or the bounds (start, stop) of its valid lengths, or None."""
    seed: int
    saved: Sequence[HostArray] = ()
    detached: Sequence[Array] = ()

    @property
    def differentiable_count(self) -> int:
        return len(self.plan.computation.differentiable)

    def constants(self) -> tuple[Array, ...]:
        return (self.mask,) if self.plan.computation.reads_mask else ()

    def with_seed(self, seed: int) -> NativeOp:
        return dataclasses.replace(self, seed=seed)

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        outputs, self.saved = self.plan.forward(arrays, self.mask, self.seed, saves=True)
        count = self.differentiable_count
        outputs, self.detached = outputs[:count], outputs[count:]
        self.plan.keep_layouts(arrays, outputs)
        return outputs

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        requested: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        plan, ops = self.plan, self.plan.computation.ops
        incoming = [x for x in grads if x is not None]
        if not incoming:
            return (None,) * len(arrays)
        requested = requested if requested is not None else [True] * len(arrays)
        if ops.needs_grad(*arrays, *incoming) or not plan.are_as_planned([*arrays, *outputs], incoming):
            grads_by_name = dict(zip(plan.computation.differentiable, grads, strict=True))
            return tuple(self._recompute_gradients(arrays, grads_by_name, requested))
        inputs = (*outputs, *self.saved, *grads)  # in the order of `backward_inputs`
        return tuple(plan.backward(arrays, self.mask, inputs, self.seed, requested))

    def _mask(self) -> Any:
        """Return the mask of the call as `build_problem` takes it."""
        computation = self.plan.computation
        if computation.lens_rows:
            return CachedMask(IntervalSet.of(self.mask), "ValidLens(...)")
        return self.mask if computation.reads_mask else computation.mask

    def _recompute_gradients(
        self, arrays: Sequence[Array], grads: dict[str, Array | None], requested: Sequence[bool]
    ) -> Iterator[Array | None]:
        """Yield the gradients that a `SinglePlan` computes on a newly built problem: autodiff may differentiate them.

        `grads` are the gradients of the differentiable outputs, by name.
        """
        native_plan, computation = self.plan, self.plan.computation
        ops, differentiable = computation.ops, computation.differentiable
        operands = {operand.name: x for operand, x in zip(native_plan.operands, arrays, strict=True)}
        score_arrays = {x.kind.field: operands.pop(x.name) for x in native_plan.operands if x.kind.field is not None}
        score = dataclasses.replace(self.score, **score_arrays) if score_arrays else computation.score
        problem, _ = build_problem(
            **operands, score=score, mask=self._mask(), dropout=computation.dropout,
            seed=self.seed, head_axis=native_plan.layout.head_axis, statistics=computation.statistics,
            matrix="weights" if "attention_weights" in differentiable else None,
        )  # fmt: skip
        plan = SinglePlan(computation.kernel, problem, tiling.plan(problem))
        canonical_operands, pairs = plan.operands(), (*problem.score_shape.rows, problem.score_shape.key_len)

        def canonical(name: str) -> Array | None:
            grad = grads.get(name)
            if grad is None or name == "attention_weights":
                return None if grad is None else ops.reshape(grad, pairs)
            return problem.layout.output_to_canonical(ops, grad if name == "out" else ops.expand_dims(grad, -1))

        names = ["out", "log_sum_exp", *(x for x in ("entropy", "attention_weights") if x in differentiable)]
        incoming, inputs = [canonical(name) for name in names], tuple(canonical_operands.values())
        is_in_memory = all(ops.has_cpu_buffer(x) for x in (*inputs, *incoming) if x is not None)
        if ops.needs_grad(*arrays) or not is_in_memory:
            plan = plan.streaming()
        with ops.numeric_scope():
            # The forward runs again, as the arrays that its first run saved carry no gradient.
            outputs = plan.forward(inputs)[: plan.saved_count]
            gradients = dict(zip(canonical_operands, plan.backward(inputs, outputs, incoming), strict=True))
            if computation.has_bandwidth:
                gradients["scale"] = bandwidth_gradient(arrays[-1], sum_to(ops, gradients["scale"], (1, 1)))
        for x, operand, is_requested in zip(arrays, native_plan.operands, requested, strict=True):
            yield native_plan.operand_gradient(gradients[operand.name], operand, x) if is_requested else None


def saves_scores(problem: Problem, tiles: TilePlan) -> bool:
    """Return whether a forward saves its scores for the backward: only few, and only additive ones, which cost most."""
    score_shape = problem.score_shape
    if (
        not isinstance(problem.form, AdditiveForm)
        or math.prod(score_shape.rows) * score_shape.key_len > thresholds.SAVED_SCORES
    ):
        return False
    # An evaluated mask runs in chunks of queries, each of which would copy its part of the scores.
    return not lowering.partition(tiles.remaining_mask)[1]


def reusable_plan(
    kernel: Kernel, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array], *, may_save_scores: bool = True
) -> NativePlan | None:
    """Return the plan of calls like this one, or None where the module cannot read the caller's arrays as they are."""
    form, ops, layout = problem.form, problem.ops, problem.layout
    if isinstance(form, TileForm) or not (form.query is problem.query and form.key is problem.key):
        return None
    # The values of a later call might lower such a score to another form.
    if hasattr(problem.score, "reads_values") and problem.score.reads_values(ops, form.query, form.key):
        return None
    # A plan reads one boolean array or holds intervals, but not both.
    if (tiles.interval_set if "mask" in arrays else tiles.remaining_mask) is not None:
        return None
    # A plan keeps a mask only by its intervals: any other may hold the caller's arrays.
    reads_mask, lens = "mask" in arrays, arrays.get("valid_lens")
    if not (problem.mask is None or reads_mask or lens is not None or isinstance(problem.mask, CachedMask)):
        return None
    # A `Computation` returns no matrix of scores. Without rows, the strides of a view are NumPy's, not the caller's.
    if 0 in problem.score_shape.rows or problem.matrix == "scores":
        return None
    spec, lowered = score_spec(problem, {})
    operands = {kind: arrays[kind.field or kind.name] for kind in _OPERANDS if (kind.field or kind.name) in arrays}
    # The module must read no array that lowering computed, such as query_bias: the next call would read it too.
    if lowered.keys() != {kind.input for kind in operands}:
        return None
    if "w_v" in arrays and not _is_view(ops.memory(lowered["w_v"]), ops.memory(arrays["w_v"])):
        return None
    # `score_spec` casts any other sink, and a plan casts none.
    if "sink" in arrays and ops.dtype(arrays["sink"]) != problem.accumulator:
        return None
    lens_rows = 0
    bounds: tuple[HostArray, ...] = ()
    if lens is not None:
        shape = layout.score_shape
        lens_rows = len(lens_per_query(np.asarray(backends.host(lens)), shape.query_len, shape.batch))
    elif tiles.interval_set is not None:
        bounds = tiles.interval_set.with_holes
    computation = Computation(
        module=_native, kernel=kernel, ops=ops, dtype=problem.dtype, accumulator=problem.accumulator,
        statistics=problem.statistics, returns_weights=problem.matrix == "weights",
        dropout=0.0 if problem.dropout is None else problem.dropout.probability,
        score=None if any(kind.field for kind in operands) else problem.score,
        mask=None if reads_mask or lens_rows else problem.mask, reads_mask=reads_mask, lens_rows=lens_rows,
        bounds=bounds, spec=(*spec[:-1], 0), saves_scores=may_save_scores and saves_scores(problem, tiles),
        has_bandwidth="bandwidth" in arrays,
        copies_bias=problem.has_relative_bias and not ops.memory(arrays["bias"]).flags.c_contiguous,
    )  # fmt: skip
    return NativePlan(computation, layout, tuple(_operands(problem, operands)))


def _is_view(x: HostArray, base: HostArray) -> bool:
    """Whether `x` is a view of all of `base` whose last axis is contiguous."""
    return (x.size == 0 or x.ctypes.data == base.ctypes.data) and x.strides[-1] == x.itemsize


def _operands(problem: Problem, arrays: Mapping[OperandKind, Array]) -> Iterator[Operand]:
    """Yield the operands of a plan; `arrays` are the caller's."""
    ops, is_length_before_heads = problem.ops, problem.layout.is_length_before_heads
    shapes, canonical = gradient_shapes(problem, frozenset(kind.name for kind in arrays)), problem.operands()
    for kind, x in arrays.items():
        shape, caller_shape, (gradient, _) = tuple(canonical[kind.name].shape), tuple(x.shape), shapes[kind.name]
        is_transposed = is_length_before_heads and kind.has_positions
        filled = caller_shape if gradient == shape and not is_transposed else gradient
        is_summed = kind.name == "w_v" and caller_shape[:-1] in ((), (1,))
        is_final = (is_summed or filled == caller_shape) and ops.dtype(x) == problem.accumulator
        yield Operand(kind, shape, gradient, filled, is_transposed, is_final, is_summed)


@cache
def thread_counter(module: Any, ops: Backend) -> Callable[[], int]:
    """Return the function that counts the threads of a call; a negative count means threads of the framework's OpenMP.

    The module gets the entry point of this OpenMP.
    """
    address = ops.gomp_parallel()
    if address is None:
        return ops.threads
    module.use_openmp(address)
    return lambda: -ops.threads()


_empty_aligned = partial(allocate_aligned, np.empty)


def _memory(ops: Backend, x: Any) -> HostArray:
    """Return the memory of an array of the framework, or of a boolean mask, which may be NumPy's in every framework."""
    return x if type(x) is np.ndarray and x.dtype == bool else ops.memory(x)


def _with_heads_first(ops: Backend, x: Array, axis: int) -> HostArray:
    """Return `x` with its axis of heads moved from `axis` + 1 to `axis`, as an array of NumPy in C order."""
    return np.ascontiguousarray(ops.memory(x).swapaxes(axis, axis + 1))


def _sum_of_rows(x: HostArray) -> HostArray:
    """Return the sum of all rows. NumPy adds rows one by one, so many of them are added in float64."""
    if len(x) == 1:
        return np.asarray(x[0])
    # Not the method `sum`, which takes twice as long.
    return np.asarray(
        np.add.reduce(x)
        if len(x) <= thresholds.ROWS_SUMMED_AS_THEY_ARE
        else np.add.reduce(x, dtype=np.float64).astype(x.dtype)
    )
