"""Execution plans of the native kernel: calls of one signature are checked once, then run on addresses.

- Arrays stay on the caller's axes: the module addresses the canonical axes by strides, so no view is made.
- The module reads tensors of PyTorch and arrays of NumPy itself: each step in Python costs a tiny call 2 to 5%.
- A plan holds no array of a caller: the module checks examples that have only shapes and strides.
- Gradients of gradients, gradients under a transform, and saved tensors whose strides a hook has changed go through an
  `SinglePlan` on a newly built problem.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, DifferentiableOp, HostArray, Signature, sum_to
from attnscore.backends.native import module as _native
from attnscore.base import thresholds
from attnscore.base.arguments import CallArguments
from attnscore.base.layout import AxisLayout
from attnscore.kernels import tiling
from attnscore.kernels.base import Kernel, Plan, SinglePlan, snapshot
from attnscore.kernels.native.marshalling import (
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
    is_always_filled: bool = False
    """Whether the module writes the operand's gradient even where it is not requested."""
    field: str | None = None
    """Field of the score that holds the operand."""


# In the order of the module's inputs. Each call computes the scale that the module reads from a Gaussian's bandwidth.
_OPERANDS = (
    OperandKind("query", "query", has_positions=True, is_always_filled=True),
    OperandKind("key", "key", has_positions=True, is_always_filled=True),
    OperandKind("value", "value", has_positions=True, is_always_filled=True),
    OperandKind("bias", "bias"),
    OperandKind("w_v", "w_v", is_always_filled=True, field="w_v"),
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
    """Index in `NativePlan.backward_inputs`."""
    swapped_axis: int | None
    """Axis to swap with the next one to get the module's axes; None where the array has them already."""
    is_in_c_order: bool
    """Whether it is an array of NumPy in C order, after the axes are swapped."""


class Gradient(NamedTuple):
    """Gradient of an operand."""

    position: int | None
    """Index in `Backward.filled`; None where it is not requested."""
    unfinished: Operand | None
    """The operand, where the filled array is not yet the gradient."""


class Backward(NamedTuple):
    """Plan of a backward."""

    plan: CallPlan
    inputs: tuple[Input, ...]
    filled: tuple[tuple[int, ...], ...]
    """Shape of each gradient that the module fills."""
    gradients: tuple[Gradient, ...]
    """Gradient of each operand."""


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

    def with_length(self, length: int) -> Operand:
        """Return the operand of a call that has so many queries, or keys."""
        canonical, gradient, filled = ((*x[:-2], length, x[-1]) for x in (self.canonical, self.gradient, self.filled))
        return self._replace(canonical=canonical, gradient=gradient, filled=filled)


@dataclass(frozen=True, eq=False)
class NativePlan(Plan):
    """Execution plan of the calls of one signature."""

    module: Any
    kernel: Kernel
    ops: Backend
    layout: AxisLayout
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
    reads_lens: bool
    """Whether each call passes valid lengths, which become the bounds (start, stop) of intervals."""
    operands: tuple[Operand, ...]
    spec: tuple[Any, ...]
    inputs: tuple[HostArray | None, ...]
    """Examples of the inputs of the module."""
    saves_scores: bool
    """Whether a forward saves its scores for the backward."""
    has_bandwidth: bool
    """Whether the last operand is the bandwidth of a Gaussian."""
    copies_bias: bool
    """Whether the bias is copied to C order: a relative bias, of which each query reads another part."""
    _forwards: dict[bool, Forward] = field(default_factory=dict)
    _backwards: dict[Hashable, Backward] = field(default_factory=dict)
    _layouts: list[Signature | None] = field(default_factory=list)

    def __repr__(self) -> str:
        saved = ", ".join((*self.differentiable, *self.saved))
        return f"NativePlan({self.kernel.name}, {self.dtype}, tiles chosen in C++, saves {saved})"

    @cached_property
    def threads(self) -> Callable[[], int]:
        """Function that counts the threads of a call (`thread_counter`)."""
        return thread_counter(self.module, self.ops)

    @property
    def heads(self) -> int:
        """Heads of all elements of the batch."""
        return math.prod(self.layout.score_shape.rows[:-1])

    def with_lengths(self, arguments: CallArguments) -> NativePlan:
        """Return the plan of calls that differ from this plan's calls in the numbers of queries and keys.

        Besides query, key and value, the plan reads a boolean mask at most, or valid lengths.
        """
        axis = -3 if self.layout.is_length_before_heads else -2
        arrays = arguments[:3]
        lengths = [x.shape[axis] for x in arrays]
        score_shape = dataclasses.replace(self.layout.score_shape, query_len=lengths[0], key_len=lengths[1])
        layout = dataclasses.replace(self.layout, score_shape=score_shape)
        operands = tuple(map(Operand.with_length, self.operands, lengths))
        memory, are_queries = map(self.ops.memory, arrays), (True, False, False)
        examples = (_canonical_example(layout, x, is_query=flag) for x, flag in zip(memory, are_queries, strict=True))
        inputs = [*examples, *self.inputs[3:]]
        if self.reads_mask:
            inputs[ORDER.index("mask")] = _mask_example(self.ops, layout, arguments.mask)
        if self.reads_lens:
            start = ORDER.index("start")
            inputs[start : start + 2] = _bounds_examples(layout, arguments.valid_lens)
        return dataclasses.replace(
            self, layout=layout, operands=operands, inputs=tuple(inputs), _forwards={}, _backwards={}, _layouts=[]
        )

    def run(self, arguments: CallArguments) -> Any:
        """Return the result of `attend`."""
        ops = self.ops
        query, key, value, score, _, _, bias, sink, _ = arguments
        arrays: tuple[Array, ...] = (query, key, value)
        if bias is not None:
            arrays += (bias,)
        if type(score) is Additive:
            arrays += (score.w_v,)
        if sink is not None:
            arrays += (sink,)
        if self.has_bandwidth:
            arrays += (score.bandwidth,)
            # A plan checks no values except the bandwidth: NaN, infinity and numbers not above 0 raise.
            if not 0 < ops.number(score.bandwidth) < math.inf:  # type: ignore[operator]  # it is not traced
                score.check(query.shape[-1], key.shape[-1])
        if ops.has_autodiff and ops.needs_grad(*arrays):
            return self.record(arguments, score, arrays)
        return self.compute(arguments, arrays)

    def compute(self, arguments: CallArguments, arrays: Sequence[Array]) -> Any:
        """Return the result of `attend` on these arrays, which autograd does not record."""
        mask = arguments.valid_lens if self.reads_lens else arguments.mask
        seed = self._seed(arguments) if self.dropout else 0
        return self.present(self.forward(arrays, mask, seed, saves=False)[0])

    def record(self, arguments: CallArguments, score: Any, arrays: Sequence[Array]) -> Any:
        """Return the result of `attend` on these arrays, which autograd records."""
        # The backward reads the mask or the lengths of this call, whatever the caller's array holds by then.
        mask = snapshot(arguments.mask) if self.reads_mask else None
        if self.reads_lens:
            mask = self._check_bounds(arguments.valid_lens)
        op = NativeOp(self, score, mask, self._seed(arguments) if self.dropout else 0)
        outputs = self.ops.record(op, arrays)
        return self.present((*outputs, *op.detached) if op.detached else outputs)

    def _seed(self, arguments: CallArguments) -> int:
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

    def forward(
        self, arrays: Sequence[Array], mask: Any, seed: int, *, saves: bool
    ) -> tuple[tuple[Array, ...], Sequence[HostArray]]:
        """Return the outputs `returned` and, with `saves`, the arrays `saved`.

        `mask` is a boolean mask, or valid lengths or their bounds, which the plan reads.
        """
        ops, lens, caller_mask = self.ops, (), mask
        plan, filled_layouts, outputs, saved = self._forwards.get(saves) or self._build_forward(saves)
        if self.reads_lens and type(mask) is not tuple:
            lens, caller_mask = (mask,) if type(mask) is np.ndarray else tuple(ops.buffers((mask,))), None
        buffers = self._buffers(arrays, caller_mask)
        empty = _empty_aligned if ops.wants_aligned else np.empty
        filled = plan.allocate_and_run(buffers, lens, empty, filled_layouts, seed, self.threads())
        if filled is None:
            ValidLens(mask).check(ops, self.layout.score_shape)
        results, from_memory, like = [], ops.from_memory, arrays[2]
        for position, dtype, axis in outputs:
            x = from_memory(filled[position], dtype, like)
            results.append(x if axis is None else ops.swap_axes(x, axis, axis + 1))
        return tuple(results), [filled[position] for position in saved]

    def _buffers(self, arrays: Sequence[Array], mask: Any) -> tuple[Array, ...]:
        """Return the memory of operands and mask, in the order of the module's inputs (`ORDER`)."""
        ops = self.ops
        buffers = tuple(ops.buffers(arrays))
        if self.copies_bias:
            buffers = (*buffers[:3], *ops.buffers((ops.in_c_order(arrays[3]),)), *buffers[4:])
        if self.has_bandwidth:
            with np.errstate(all="ignore"):  # a tiny bandwidth gives infinity
                scale = scale_of(np.float64(ops.number(arrays[-1])))
                buffers = (*buffers[:-1], np.full((1, 1), scale, self.accumulator))
        mask_buffers = mask if self.reads_lens else (_memory(ops, mask),) if self.reads_mask else self._planned_bounds
        if mask_buffers is None:
            return buffers
        before_mask = 4 if self.operands[3:] and self.operands[3].name == "bias" else 3
        return (*buffers[:before_mask], *mask_buffers, *buffers[before_mask:])

    @cached_property
    def _planned_bounds(self) -> tuple[HostArray, HostArray] | None:
        """The bounds (start, stop) of the intervals that the plan holds."""
        start, stop = (self.inputs[ORDER.index(name)] for name in ("start", "stop"))
        return None if start is None or stop is None else (start, stop)

    def _check_bounds(self, valid_lens: Any) -> tuple[HostArray, HostArray]:
        """Return the bounds of the intervals of valid lengths; raise MaskError where one is out of range."""
        (lens,) = (valid_lens,) if type(valid_lens) is np.ndarray else self.ops.buffers((valid_lens,))
        stop = np.empty(self._zeros.shape, np.int64)
        if not self.module.copy_valid_lens(lens, stop, self.layout.score_shape.key_len):
            ValidLens(valid_lens).check(self.ops, self.layout.score_shape)
        return self._zeros, stop

    def bounds_of(self, lens: HostArray) -> tuple[HostArray, HostArray]:
        """Return the bounds of the intervals of valid lengths, which the module clips to [0, key_len]."""
        stop, score_shape = np.empty(self._zeros.shape, np.int64), self.layout.score_shape
        if not score_shape.has_batch:
            lens = lens_per_query(np.asarray(lens), score_shape.query_len, 1)
        self.module.copy_valid_lens(np.ascontiguousarray(lens, np.int64), stop, score_shape.key_len)
        return self._zeros, stop

    @cached_property
    def _zeros(self) -> HostArray:
        """The start of all intervals of valid lengths."""
        example = self.inputs[ORDER.index("start")]
        return np.zeros(() if example is None else example.shape, np.int64)

    def _build_forward(self, saves: bool) -> Forward:
        """Plan a forward, with the arrays for a backward if `saves`."""
        saved_names = self.saved if saves else ()
        examples = {name: self._example(name) for name in FILLED if name in (*self.returned, *saved_names)}
        plan = self.module.plan_forward(self.spec, self.inputs, [examples.get(name) for name in FILLED])
        rows, filled_names = self.layout.rows, tuple(examples)
        columns = {"out": (self.layout.value_dim,), **dict.fromkeys(PAIRS, (self.layout.score_shape.key_len,))}
        filled = tuple(((*rows, *columns.get(name, ())), x.dtype) for name, x in examples.items())
        # Only `out` and the statistics go to the caller's axes: saved arrays stay inside, and weights always have the
        # heads in front of the queries.
        axes = {"out": -3, **dict.fromkeys(self.statistics, -2)} if self.layout.is_length_before_heads else {}
        dtypes = {"out": self.dtype}
        outputs = [Output(filled_names.index(x), dtypes.get(x, self.accumulator), axes.get(x)) for x in self.returned]
        saved = tuple(map(filled_names.index, saved_names))
        forward = self._forwards[saves] = Forward(plan, filled, tuple(outputs), saved)
        return forward

    def _example(self, name: str) -> HostArray:
        """Return an example of an array that the module fills, or reads in a backward."""
        shape = self.layout.score_shape
        if name == "out":
            return _c_order_example((*shape.rows, self.layout.value_dim), STORED.get(self.dtype, self.dtype))
        return _c_order_example((*shape.rows, shape.key_len if name in PAIRS else 1), self.accumulator)

    @cached_property
    def _statistics_of(self) -> Callable[[tuple[Array | None, ...]], tuple[Array | None, ...]]:
        """Function that takes the fields of `AttentionStats` from the outputs, followed by a None."""
        fields = AttentionStats._fields
        fields_of = operator.itemgetter(*(self.returned.index(x) if x in self.statistics else -1 for x in fields))
        if not {*self.statistics} & {*KEYS}:
            return fields_of
        return lambda outputs: tuple(
            x if x is None else in_returned_dtype(self.ops, name, x)
            for name, x in zip(fields, fields_of(outputs), strict=True)
        )

    @cached_property
    def _index_of_weights(self) -> int:
        return self.returned.index("attention_weights")

    def present(self, outputs: Sequence[Array]) -> Any:
        """Return the output, and the requested weights and statistics."""
        if len(outputs) == 1:
            return outputs[0]
        results: list[Any] = [outputs[0]]
        if self.returns_weights:
            weights = outputs[self._index_of_weights]
            results.append(weights if self.dtype == self.accumulator else self.ops.astype(weights, self.dtype))
        if self.statistics:
            # As `CallArguments`, without the constructor: 0.4 us of a tiny call's 35.
            results.append(tuple.__new__(AttentionStats, self._statistics_of((*outputs, None))))
        return tuple(results)

    def keep_layouts(self, arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Remember the layouts of the operands and outputs of a forward: all calls of this plan have the same ones."""
        if not self._layouts:
            self._layouts.append(self.ops.signature([*arrays, *outputs]))

    def are_as_planned(self, saved: Sequence[Array], incoming: Sequence[Array]) -> bool:
        """Return whether the module can run a backward on these arrays.

        The saved operands and outputs must have the layouts of the forward, which hooks on saved tensors may change.
        All arrays must be plain (`Backend.is_plain`).
        """
        expected, actual = self._layouts[0], self.ops.signature([*saved, *incoming])
        return expected is not None and actual is not None and actual[: len(expected)] == expected

    def backward(
        self, arrays: Sequence[Array], mask: Any, inputs: Sequence[Array | None], seed: int, requested: Sequence[bool]
    ) -> list[Array | None]:
        """Return the gradient of each operand, None where not requested, from `NativePlan.backward_inputs`."""
        ops = self.ops
        key = (*requested, *[x is None for x in inputs])
        backward = self._backwards.get(key)
        if backward is None:
            names = [name for name, x in zip(self.backward_inputs, inputs, strict=False) if x is not None]
            incoming = {name.removeprefix("grad_") for name in names if name.startswith("grad_")}
            backward = self._backwards[key] = self._build_backward(incoming, requested)
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
        filled = [empty(shape, self.accumulator) for shape in backward.filled]
        backward.plan((*self._buffers(arrays, mask), *input_buffers, *filled), seed, self.threads())
        gradients: list[Array | None] = []
        from_memory, dtype, like = ops.from_memory, self.accumulator, arrays[2]
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
        ops = self.ops
        if operand.name == "scale":
            grad_scale = rows.sum(dtype=np.float64)
            with np.errstate(all="ignore"):
                grad = np.asarray(bandwidth_gradient(np.float64(ops.number(x)), grad_scale), self.accumulator)
            return ops.astype(ops.from_memory(grad, self.accumulator, like), ops.dtype(x))
        if operand.is_summed:
            # Not -1, which NumPy cannot infer next to an axis of 0.
            rows = _sum_of_rows(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]))
            rows = rows[None] if len(x.shape) > 1 else rows
        grad = ops.from_memory(rows, self.accumulator, like)
        return grad if operand.is_final else self.operand_gradient(grad, operand, x)

    def _build_backward(self, incoming: set[str], requested: Sequence[bool]) -> Backward:
        """Plan a backward from the gradients of the outputs `incoming` to the gradients of the `requested` operands."""
        reads = {"out", "grad_out", *self.saved, *(f"grad_{name}" for name in incoming)}
        # The entropy and the weights are read with their gradients alone.
        reads |= incoming & {"entropy", "attention_weights"}
        axes = {"out": -3, "entropy": -2, "log_sum_exp": -2} if self.layout.is_length_before_heads else {}
        operands = {
            operand.name: operand
            for operand, is_requested in zip(self.operands, requested, strict=True)
            if is_requested or operand.kind.is_always_filled
        }
        plan = self.module.plan_backward(
            self.spec,
            self.inputs,
            [self._example(name.removeprefix("grad_")) if name in reads else None for name in BACKWARD_INPUTS],
            self.dtype,
            [_c_order_example(operands[x].gradient, self.accumulator) if x in operands else None for x in GRADIENTS],
        )
        names = [name for name in GRADIENTS if name in operands]
        axis_of = {name: axes.get(name.removeprefix("grad_")) for name in BACKWARD_INPUTS}
        inputs = [
            Input(self.backward_inputs.index(x), axis_of[x], axis_of[x] is not None or x in self.saved)
            for x in BACKWARD_INPUTS
            if x in reads
        ]
        gradients = [
            Gradient(names.index(x.name), None if x.is_final and not x.is_summed and x.name != "scale" else x)
            if is_requested
            else Gradient(None, None)
            for x, is_requested in zip(self.operands, requested, strict=True)
        ]
        return Backward(plan, tuple(inputs), tuple(operands[name].filled for name in names), tuple(gradients))

    def operand_gradient(self, grad: Array, operand: Operand, x: Array) -> Array:
        """Return the gradient of `x`, in its shape and dtype, from `grad` on the canonical axes."""
        ops, shape = self.ops, tuple(x.shape)
        if operand.transposed or tuple(grad.shape) != shape:
            if tuple(grad.shape) != operand.canonical:
                grad = sum_to(ops, grad, operand.canonical)
            is_transposed = operand.transposed
            grad = self.layout.gradient_from_canonical(ops, grad, shape) if is_transposed else ops.reshape(grad, shape)
        return ops.astype(grad, ops.dtype(x))


@dataclass(eq=False, slots=True)
class NativeOp(DifferentiableOp):
    """One recorded call, for a framework's gradient hook.

    `NativePlan.differentiable` names its outputs. The op itself holds the other outputs of `NativePlan.returned`, and
    the arrays of `NativePlan.saved`: autograd would save them as tensors, which costs a tiny call 4 us.
    """

    call: NativePlan
    score: Any
    mask: Any
    """The boolean mask of the call, or the bounds (start, stop) of its valid lengths, or None."""
    seed: int
    saved: Sequence[HostArray] = ()
    detached: Sequence[Array] = ()

    @property
    def differentiable_outputs(self) -> int:
        return len(self.call.differentiable)

    def constants(self) -> tuple[Array, ...]:
        return (self.mask,) if self.call.reads_mask else ()

    def with_seed(self, seed: int) -> NativeOp:
        return dataclasses.replace(self, seed=seed)

    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        outputs, self.saved = self.call.forward(arrays, self.mask, self.seed, saves=True)
        count = self.saved_outputs
        outputs, self.detached = outputs[:count], outputs[count:]
        self.call.keep_layouts(arrays, outputs)
        return outputs

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        requested: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        call, ops = self.call, self.call.ops
        incoming = [x for x in grads if x is not None]
        if not incoming:
            return (None,) * len(arrays)
        requested = requested if requested is not None else [True] * len(arrays)
        if ops.needs_grad(*arrays, *incoming) or not call.are_as_planned([*arrays, *outputs], incoming):
            grads_by_name = dict(zip(call.differentiable, grads, strict=True))
            return tuple(self._recompute_gradients(arrays, grads_by_name, requested))
        inputs = (*outputs, *self.saved, *grads)  # in the order of `backward_inputs`
        return tuple(call.backward(arrays, self.mask, inputs, self.seed, requested))

    def _mask(self) -> Any:
        """Return the mask of the call as `build_problem` takes it."""
        if self.call.reads_lens:
            start, stop = self.mask
            return CachedMask(start, stop, "ValidLens(...)")
        return self.mask if self.call.reads_mask else self.call.mask

    def _recompute_gradients(
        self, arrays: Sequence[Array], grads: dict[str, Array | None], requested: Sequence[bool]
    ) -> Iterator[Array | None]:
        """Yield the gradients that a `SinglePlan` computes on a newly built problem: autodiff may differentiate them.

        `grads` are the gradients of the differentiable outputs, by name.
        """
        call, ops = self.call, self.call.ops
        operands = {operand.name: x for operand, x in zip(call.operands, arrays, strict=True)}
        score_arrays = {x.kind.field: operands.pop(x.name) for x in call.operands if x.kind.field is not None}
        score = dataclasses.replace(self.score, **score_arrays) if score_arrays else call.score
        problem, _ = build_problem(
            **operands, score=score, mask=self._mask(), dropout=call.dropout,
            seed=self.seed, head_axis=call.layout.head_axis, statistics=call.statistics,
            matrix="weights" if "attention_weights" in call.differentiable else None,
        )  # fmt: skip
        plan = SinglePlan(call.kernel, problem, tiling.plan(problem))
        canonical_operands, pairs = plan.operands(), (*problem.score_shape.rows, problem.score_shape.key_len)

        def canonical(name: str) -> Array | None:
            grad = grads.get(name)
            if grad is None or name == "attention_weights":
                return None if grad is None else ops.reshape(grad, pairs)
            return problem.layout.output_to_canonical(ops, grad if name == "out" else ops.expand_dims(grad, -1))

        names = ["out", "log_sum_exp", *(x for x in ("entropy", "attention_weights") if x in call.differentiable)]
        incoming, inputs = [canonical(name) for name in names], tuple(canonical_operands.values())
        is_in_memory = all(ops.has_cpu_buffer(x) for x in (*inputs, *incoming) if x is not None)
        if ops.needs_grad(*arrays) or not is_in_memory:
            plan = plan.streaming()
        with ops.numeric_scope():
            # The forward runs again: its saved outputs carry no gradient here.
            outputs = plan.forward(inputs)[: plan.saved_outputs]
            gradients = dict(zip(canonical_operands, plan.backward(inputs, outputs, incoming), strict=True))
            if call.has_bandwidth:
                gradients["scale"] = bandwidth_gradient(arrays[-1], sum_to(ops, gradients["scale"], (1, 1)))
        for x, operand, is_requested in zip(arrays, call.operands, requested, strict=True):
            yield call.operand_gradient(gradients[operand.name], operand, x) if is_requested else None


def saves_scores(problem: Problem, tiles: TilePlan) -> bool:
    """Return whether a forward saves its scores for the backward."""
    score_shape = problem.score_shape
    if (
        not isinstance(problem.form, AdditiveForm)
        or math.prod(score_shape.rows) * score_shape.key_len > thresholds.SAVED_SCORES
    ):
        return False
    # An evaluated mask runs in chunks of queries, each of which would copy its part of the scores.
    return not lowering.partition(tiles.remaining_mask)[1]


def reusable_plan(kernel: Kernel, problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array]) -> NativePlan | None:
    """Return the plan of calls like this one, or None where the module cannot read the caller's arrays as they are."""
    form, ops, layout = problem.form, problem.ops, problem.layout
    if isinstance(form, TileForm) or not (form.query is problem.query and form.key is problem.key):
        return None
    if hasattr(problem.score, "reads_values") and problem.score.reads_values(ops, form.query, form.key):
        return None
    # A plan reads one boolean array or holds intervals, but not both.
    if (tiles.interval_set if "mask" in arrays else tiles.remaining_mask) is not None:
        return None
    reads_mask, reads_lens = "mask" in arrays, "valid_lens" in arrays
    if not (problem.mask is None or reads_mask or reads_lens or isinstance(problem.mask, CachedMask)):
        return None
    # No plan for the scores alone, nor without rows: the strides of an empty view are NumPy's, not the caller's.
    if 0 in problem.score_shape.rows or problem.matrix == "scores":
        return None
    spec, inputs_by_name = score_spec(problem, {})
    operands = {kind: arrays[kind.field or kind.name] for kind in _OPERANDS if (kind.field or kind.name) in arrays}
    # The module must read no array that lowering computed, such as query_bias: the next call would read it too.
    if inputs_by_name.keys() != {kind.input for kind in operands}:
        return None
    inputs = _inputs(problem, tiles, arrays, inputs_by_name)
    if inputs is None:
        return None
    copies_bias = problem.has_relative_bias and not ops.memory(arrays["bias"]).flags.c_contiguous
    return NativePlan(
        _native, kernel, ops, layout, problem.dtype, problem.accumulator, problem.statistics,
        problem.matrix == "weights", 0.0 if problem.dropout is None else problem.dropout.probability,
        None if any(kind.field for kind in operands) else problem.score,
        None if reads_mask or reads_lens else problem.mask, reads_mask, reads_lens,
        tuple(_operands(problem, operands)), (*spec[:-1], 0),
        inputs, saves_scores(problem, tiles), "bandwidth" in arrays, copies_bias,
    )  # fmt: skip


def _inputs(
    problem: Problem, tiles: TilePlan, arrays: Mapping[str, Array], lowered: Mapping[str, Array]
) -> tuple[HostArray | None, ...] | None:
    """Return examples of the module's inputs, or None where the module cannot read one of the arrays as it is.

    A call passes the addresses of the caller's arrays, to be read with the strides of these examples. `lowered` are the
    operands of the problem by the names of the module.
    """
    ops, layout, host = problem.ops, problem.layout, backends.load("numpy")
    examples: dict[str, HostArray] = {
        kind.input: _canonical_example(layout, ops.memory(arrays[kind.name]), is_query=kind.name == "query")
        for kind in _OPERANDS
        if kind.has_positions
    }
    if "bias" in arrays:
        bias = ops.in_c_order(arrays["bias"]) if problem.has_relative_bias else arrays["bias"]
        examples["bias"] = layout.pairs_to_canonical(host, _example(ops.memory(bias)))
    if "mask" in arrays:
        examples["mask"] = _mask_example(ops, layout, arrays["mask"])
    if "w_v" in arrays:
        w_v = ops.memory(lowered["w_v"])
        is_copy = w_v.size > 0 and w_v.ctypes.data != ops.memory(arrays["w_v"]).ctypes.data
        if is_copy or w_v.strides[-1] != w_v.itemsize:
            return None
        examples["w_v"] = _example(w_v)
    if "sink" in arrays:
        if ops.dtype(arrays["sink"]) != problem.accumulator:
            return None
        examples["sink"] = _example(ops.memory(arrays["sink"])).reshape(tuple(lowered["sink"].shape))
    if "bandwidth" in arrays:
        examples["scales"] = np.zeros((1, 1), problem.accumulator)
    if "valid_lens" in arrays:
        examples["start"], examples["stop"] = _bounds_examples(layout, arrays["valid_lens"])
    elif tiles.interval_set is not None:
        examples["start"], examples["stop"] = tiles.interval_set.with_holes
    return tuple(map(examples.get, ORDER))


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


def _example(x: HostArray) -> HostArray:
    """Return an array with the shape and strides of `x` but not its memory; its entries are never read."""
    return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), x.shape, x.strides)


def _canonical_example(layout: AxisLayout, x: HostArray, *, is_query: bool) -> HostArray:
    """Return an example of the caller's query, key or value, moved to the canonical axes, which takes no copy."""
    example: HostArray = layout.to_canonical(backends.load("numpy"), _example(x), is_query=is_query)
    return example


def _mask_example(ops: Backend, layout: AxisLayout, mask: Array) -> HostArray:
    """Return an example of a boolean mask as the module reads it, on the canonical axes."""
    example: HostArray = layout.pairs_to_canonical(backends.load("numpy"), _example(_memory(ops, mask)))
    return example.view(np.uint8)


def _bounds_examples(layout: AxisLayout, lens: Any) -> HostArray:
    """Return examples of the bounds (start, stop) of the intervals of valid lengths."""
    shape = layout.score_shape
    lens = np.asarray(backends.host(lens))
    return np.zeros((2, *lens_per_query(lens, shape.query_len, shape.batch).shape), int)


def _c_order_example(shape: Sequence[int], dtype: str) -> HostArray:
    """Return an array in C order whose entries are never read, like `_example`."""
    example = np.empty(1, dtype)
    lengths = [max(n, 1) for n in reversed(shape[1:])]
    return np.lib.stride_tricks.as_strided(
        example, shape, tuple(accumulate(lengths, operator.mul, initial=example.itemsize))[::-1]
    )
