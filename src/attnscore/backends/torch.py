"""PyTorch: array operations, and a gradient hook that saves O(sequence length) (and the scores of short calls).

- Any device and float dtype; nothing is copied from a device to the host.
- The VJP is explicit (``autograd.Function``); double backward differentiates it in PyTorch's own operations.
- ``torch.func`` transforms and forward-mode duals differentiate tiled attention in PyTorch's operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from attnscore.backends import native
from attnscore.backends import torch_private as private
from attnscore.backends.base import (
    ACCELERATORS,
    Array,
    Backend,
    DifferentiableOp,
    Ragged,
    SeedHalves,
    Signature,
    VjpFunction,
    importable,
)
from attnscore.base import thresholds
from attnscore.errors import FrameworkError, message

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Types without overridden operations (__torch_function__, __torch_dispatch__).
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__
# Device types that attention runs on, and the autocast dtypes of those whose autocast `numeric_scope` has turned off.
_DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
_NO_SCOPE = contextlib.nullcontext()
_AUTOCAST: ContextVar[dict[str, torch.dtype]] = ContextVar("autocast", default={})  # noqa: B039  # never mutated


# Whether the native module reads tensors: PyTorch (2.10 and later) has the functions for it.
_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_READS_TENSORS = None not in (native.module, _API) and bool(native.module.set_tensor_types(_PLAIN, _API))


def _is_watched() -> bool:
    """Whether a mode of PyTorch takes part in each operation: overriding, autocast, torch.compile."""
    # The compiler first, which cannot trace the others.
    return bool(
        is_compiling() or private.count_function_modes() or private.count_dispatch_modes() or private.is_any_autocast()
    )


def _may_be_wrapped() -> bool:
    """Whether a mode, a transform or forward mode is active: it may wrap what is computed from plain tensors."""
    return _is_watched() or private.are_transforms_active() or bool(private.dual_levels._current_level >= 0)


class TorchBackend(Backend):
    """Array operations of PyTorch."""

    name = "torch"
    has_autodiff = True
    xp = torch
    wants_aligned = False
    can_unpad = True
    fallbacks = private.FALLBACKS
    threads = staticmethod(torch.get_num_threads)
    slice_axis: Any = staticmethod(torch.narrow)
    concat: Any = staticmethod(torch.cat)
    reshape: Any = staticmethod(torch.reshape)
    broadcast_to: Any = staticmethod(torch.Tensor.expand)
    swap_axes: Any = staticmethod(torch.transpose)
    expand_dims = staticmethod(torch.unsqueeze)
    in_c_order: Any = staticmethod(torch.Tensor.contiguous)
    sum = staticmethod(torch.sum)
    max = staticmethod(torch.amax)
    any = staticmethod(torch.any)
    top_k: Any = staticmethod(torch.topk)

    def dtype(self, x: Array) -> str:
        return _NAMES[x.dtype]

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if x.is_nested:
            if x.layout == torch.jagged and x.lengths() is not None:
                return "a jagged tensor with holes between its sequences", "x.contiguous().values()"
            return "a nested tensor", "x.to_padded_tensor(0.0), with valid_lens,"
        if isinstance(x, torch.masked.MaskedTensor):
            return "a MaskedTensor", "x.get_data(), with a mask of attend,"
        return None if x.layout == torch.strided else (f"a sparse tensor ({x.layout})", "x.to_dense()")

    def ragged(self, x: Array) -> Ragged | None:
        # `unsupported` refuses the other nested tensors, and those with lengths, which have holes.
        if not x.is_nested or x.layout != torch.jagged or x.lengths() is not None:
            return None
        # The size of the ragged axis is a symbol.
        has_number = [isinstance(n, int) for n in x.shape]
        return Ragged(x.values(), x.offsets(), has_number.index(False) - len(has_number))

    def from_ragged(self, parts: Ragged) -> Array:
        """Return the jagged tensor with the parts that `ragged` returns."""
        values, offsets, axis = parts  # `values` has one axis less than the tensor
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=values.dim() + 1 + axis)

    def device(self, x: Array) -> str:
        return str(x.device)

    def is_recording(self) -> bool:
        return private.tracing_state() is not None

    def is_in_make_fx(self) -> bool:
        # A compiler records in this mode the graph that it has made; tensors of torch.func reach no native code.
        return not (is_compiling() or private.are_transforms_active()) and private.proxy_mode() is not None

    def shape(self, x: Array) -> tuple[Any, ...]:
        if not self.is_recording():
            return tuple(x.shape)
        with private.outside_trace():  # where sizes are numbers
            return tuple(map(int, x.shape))

    def astype(self, x: Array, dtype: str) -> Array:
        return x.to(_DTYPES[dtype])

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        target = None if dtype is None else _DTYPES[dtype]
        if not isinstance(x, torch.Tensor):
            x = torch.from_numpy(importable(np.asarray(x)))
        return x.to(device=like.device, dtype=target)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        if not isinstance(x, torch.Tensor):
            return np.asarray(x)
        if x.device.type != "cpu" or is_traced(x):
            return None
        # A `torch.func` transform would wrap the detached tensor, and a wrapped tensor has no memory.
        outside = _outside_transforms()
        if outside is None:
            return None
        with outside:
            x = x.detach()
            values: np.ndarray[Any, Any] = x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
        return values

    def has_cpu_buffer(self, x: Array) -> bool:
        # Tensors over memory of other libraries may be misaligned.
        return bool(x.is_cpu and self.has_values(x) and x.data_ptr() % x.itemsize == 0)

    def has_values(self, *arrays: Array) -> bool:
        """Whether code of a device can read these as they lie in memory: not traced, dual, negated or conjugated."""
        return not any(is_traced(x) or _is_dual(x) or x.is_neg() or x.is_conj() for x in arrays)

    def is_plain(self, *arrays: Array) -> bool:
        if _is_watched():
            return False
        has_tangents, is_transformed = private.dual_levels._current_level >= 0, private.are_transforms_active()
        for x in arrays:
            # Other dispatch keys than a plain CPU tensor's: device, negated, conjugated, wrapped, fake, sparse, nested.
            if type(x) not in _PLAIN or not private.has_plain_keys(x):
                return False
            # Inside a transform, tensors that require a gradient are wrapped when their memory is taken.
            if (has_tangents and _is_dual(x)) or (is_transformed and x.requires_grad):
                return False
        return True

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        x = x.detach() if x.requires_grad else x
        array: np.ndarray[Any, Any] = (x.view(torch.uint16) if x.itemsize == 2 else x).numpy()
        return array

    def array_signature(self, x: Array) -> Hashable | None:
        return None if x.is_nested else (type(x), x.shape, x.dtype, x.device, x.layout)

    def signature(self, arrays: Sequence[Array]) -> Signature | None:
        if _may_be_wrapped():
            return None
        # Without types: Parameters pass the same checks as tensors.
        if _READS_TENSORS:
            layouts: Signature | None = native.module.signature(arrays)
            return layouts
        return tuple((x.shape, x.dtype, x.stride()) for x in arrays) if self.is_plain(*arrays) else None

    def decoding_signature(self, arrays: Sequence[Array], head_axis: int) -> bytes | None:
        if not _READS_TENSORS or self.needs_grad(*arrays[:3]) or _may_be_wrapped():
            return None
        signature: bytes | None = native.module.decoding_signature(arrays, head_axis)
        return signature

    def device_signature(self, arrays: Sequence[Array]) -> Signature | None:
        if _may_be_wrapped():
            return None
        for x in arrays:
            if type(x) not in _PLAIN or not x.is_cuda or x.layout != torch.strided or x.is_neg() or x.is_conj():
                return None
        return tuple((x.shape, x.dtype, x.stride(), x.device) for x in arrays)

    def buffers(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return arrays if _READS_TENSORS else super().buffers(arrays)

    def buffer_in_c_order(self, x: Array) -> Array:
        return x if _READS_TENSORS and x.is_contiguous() else super().buffer_in_c_order(x)

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        tensor = torch.from_numpy(x)
        return tensor.view(_DTYPES[dtype]) if x.itemsize == 2 else tensor

    def needs_grad(self, *arrays: Array) -> bool:
        if torch.is_grad_enabled():
            # A loop: a generator takes half a microsecond.
            for x in arrays:
                if x.requires_grad:
                    return True
        return False

    def is_recorded(self, function: Callable[[], Array]) -> bool:
        if not torch.is_grad_enabled():
            return False
        scores = function()
        # PyTorch differentiates the operations on traced tensors (`differentiable`), and reaches all that they read.
        return getattr(scores, "requires_grad", False) and not is_traced(scores)

    def is_writable(self, x: Array) -> bool:
        return torch.is_inference_mode_enabled() or not x.is_inference()

    def has_autocast(self, x: Array) -> bool:
        # Some devices, such as meta, have none.
        kind = x.device.type
        return kind in _DEVICE_TYPES and torch.is_autocast_enabled(kind)

    def gomp_parallel(self) -> int | None:
        if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
            return None
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        try:
            # The symbol is searched in the library and in the libraries that it has loaded.
            function = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            return None
        return ctypes.cast(function, ctypes.c_void_p).value

    def number(self, x: Array) -> float | None:
        # While a CUDA graph is captured, nothing can be read.
        if is_traced(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        return float(x.detach())

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        return like.new_full(tuple(shape), value, dtype=like.dtype if dtype is None else _DTYPES[dtype])

    def positions(self, start: int, count: int, like: Array) -> Array:
        if hasattr(like, "to_local"):
            # The operations of a DTensor take no plain tensor, such as one of positions.
            expected = "plain tensors, where positions count: with a mask, dropout or a relative bias"
            hint = "x.to_local() is the part of this rank, x.full_tensor() the whole"
            raise FrameworkError(message("query, key, value", expected, type(like).__name__, hint=hint))
        return torch.arange(start, start + count, device=like.device)

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        if x.requires_grad or block.requires_grad or is_traced(block):
            # Autograd and transforms do not allow writes in place.
            return super().add_at(x, axis, start, block)
        x.narrow(axis, start, block.shape[axis]).add_(block)
        return x

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        return x.index_select(axis, indices)

    def indices_before(self, lens: Array, length: int) -> Array:
        """Return the flat indices into (n, length) of the first ``lens[i]`` entries of each row i."""
        # Not by NumPy: a product that follows its operations takes 20 us more.
        return (torch.arange(length, device=lens.device) < lens.unsqueeze(1)).view(-1).nonzero().squeeze(1)

    def put_rows(self, rows: Array, indices: Array, count: int) -> Array:
        """Return (count, width) with `rows` at `indices`, each of which occurs once, and zeros elsewhere."""
        # Not index_copy_, which takes up to 1.7 times as long.
        return rows.new_zeros((count, rows.shape[1])).index_add_(0, indices, rows)

    def can_sum_rows(self, *arrays: Array) -> bool:
        # embedding_bag has no second derivative.
        return all(map(self.has_cpu_buffer, arrays)) and not self.needs_grad(*arrays)

    def sums_of_rows(self, x: Array, places: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Array:
        """Return the sums (n, width) of the rows ``x[places[ends[i]:ends[i + 1]]]``, the same with any threads."""
        indices, offsets = map(torch.from_numpy, (places, ends))
        # A quarter of the time of gathering the rows alone (rows of 64 numbers, one thread).
        return torch.nn.functional.embedding_bag(indices, x, offsets, mode="sum", include_last_offset=True)

    def searchsorted(self, ordered: Array, values: Array) -> Array:
        if private.is_wrapped(ordered) or torch.onnx.is_in_onnx_export():
            # Under `vmap`, torch.searchsorted copies its arguments, and warns of it. ONNX has no such operator.
            return (ordered[:, None] <= values).sum(0)
        return torch.searchsorted(ordered, values, right=True)

    def maximum(self, a: Array, b: Array) -> Array:
        return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))

    def numeric_scope(self) -> contextlib.AbstractContextManager[Any]:
        # `autocast` casts the inputs; inside, autocast is off, or it would round the products of every tile too.
        if not private.is_any_autocast():
            return _NO_SCOPE
        return self._without_autocast([kind for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)])

    @contextlib.contextmanager
    def _without_autocast(self, device_types: list[str]) -> Iterator[None]:
        """Turn autocast off, and keep its dtypes for `autocast`, which casts the inputs to them."""
        token = _AUTOCAST.set({device_type: torch.get_autocast_dtype(device_type) for device_type in device_types})
        try:
            with contextlib.ExitStack() as autocast_off:
                for device_type in device_types:
                    autocast_off.enter_context(torch.autocast(device_type, enabled=False))
                yield
        finally:
            _AUTOCAST.reset(token)

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        is_true = self.number(condition) if isinstance(condition, torch.Tensor) else condition
        if is_true is not None:
            return function(carry) if is_true else carry
        # Under `torch.func.vmap` some of the batch take the function and some do not, and while a CUDA graph is
        # captured the host cannot know: both are computed.
        return map_leaves(lambda new, old: torch.where(condition, new, old), function(carry), carry)

    def copy(self, x: Array) -> Array:
        outside = None if is_traced(x) else _outside_transforms()
        if outside is None:
            return x
        with outside:
            return x.detach().clone()

    def version(self, x: Array) -> int | None:
        # A compiled program cannot read it, and tensors of inference mode have none.
        return None if is_compiling() or x.is_inference() else x._version

    def plain_product(self, x: Array, matrix: Array, threads: int) -> Array | None:
        if _READS_TENSORS and not self.needs_grad(x, matrix):
            out = torch.empty((*x.shape[:-1], matrix.shape[1]), dtype=x.dtype, device="cpu")
            if native.module.multiply_rows(x, matrix, out, threads):
                return out
        return super().plain_product(x, matrix, threads)

    def known_finite(self, x: Array) -> bool:
        # A program has no values yet; one for ONNX takes all entries to be finite.
        if is_compiling():
            return torch.onnx.is_in_onnx_export()
        if _READS_TENSORS and x.numel() <= thresholds.READ_ON_ONE_THREAD:
            is_finite: bool | None = native.module.is_all_finite(x)
            if is_finite is not None:  # traced tensors have no memory that the module reads
                return is_finite
        # On a GPU the answer would wait for all work before it, and end the capture of a CUDA graph.
        if x.device.type in ACCELERATORS or is_traced(x):
            return False
        # A sum takes a twentieth of the time of isfinite, and is finite only where all terms are. It may overflow.
        x = x.detach() if x.requires_grad else x
        total = x.sum(dtype=torch.float32) if x.itemsize == 2 else x.sum()
        return math.isfinite(total.item()) or bool(torch.isfinite(x).all())

    def differentiable(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
            return run.forward(operands)
        masks = [x for x in run.constants() if isinstance(x, torch.Tensor)]
        if any(is_traced(x) or _is_dual(x) for x in (*operands, *masks)):
            # The kernel that was chosen for such tensors runs PyTorch's operations, which PyTorch differentiates.
            return run.forward(operands)
        if private.are_transforms_active():
            # No operand is wrapped: they belong to a model that the transformed function closes over. A transform takes
            # no `autograd.Function` of this kind, only PyTorch's own operations.
            return run.streaming().forward(operands)
        outputs: tuple[Array, ...] = _AttentionFunction.apply(run.with_backward(), *operands)  # type: ignore[no-untyped-call]  # torch's own
        return outputs

    def record(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        # Without the wrapper of `apply`, which looks for transforms around each operand: 2 us.
        outputs: tuple[Array, ...] = _apply(run, *operands)
        return outputs

    def vjp(self, function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, VjpFunction]:
        # Whether the gradient itself is differentiated.
        is_recorded = torch.is_grad_enabled() or any(map(is_traced, inputs))
        leaves = [x if is_recorded and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            value = function(*leaves)

        def vjp(grad: Array) -> tuple[Array, ...]:
            if not value.requires_grad:
                return tuple(torch.zeros_like(x) for x in inputs)
            return torch.autograd.grad(value, leaves, grad, create_graph=is_recorded, materialize_grads=True)

        return value if is_recorded else value.detach(), vjp

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    def draws_seeds_by_example(self) -> bool:
        return bool(private.are_transforms_active())

    def draw_seed(self, like: Array) -> Any:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        # Inside `torch.func.vmap(randomness="different")` it is one seed per example.
        if private.is_wrapped(seed):
            return SeedHalves(self.low_32_bits(seed), self.shift_right(seed, 32))
        return int(seed)

    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        # As in PyTorch's autocast, float64 stays.
        dtype = _AUTOCAST.get().get(arrays[0].device.type)
        if dtype is None:
            return arrays
        return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in arrays)


class _AttentionFunction(torch.autograd.Function):
    """A kernel's forward and backward: saves the operands, the output, row_max, log_denom and any entropy.

    Returned weights, and the scores of short additive calls, are saved too.
    """

    @staticmethod
    def forward(ctx: Any, run: DifferentiableOp, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = run.forward(operands)
        returned = run.without_saved(outputs)
        ctx.run, ctx.count = run, len(operands)
        # save_for_backward does not cover masks, which the backward reads again: their versions are compared here.
        masks = [x for x in run.constants() if isinstance(x, torch.Tensor) and not x.is_inference()]
        ctx.versions = [(x, x._version) for x in masks]
        if len(returned) > 1:
            # The gradient of an output that nothing reads is None, not zeros.
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*returned[run.differentiable_count :])
        # Saved like the output that depends on it: a checkpoint around the call may draw another seed.
        seed = (torch.tensor(run.seed, device="cpu"),) if run.seed else ()
        ctx.save_for_backward(*operands, *outputs[: run.saved_count], *seed)
        return returned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.versions and any(x._version != version for x, version in ctx.versions):
            raise RuntimeError(
                "the mask of attend() has been modified by an inplace operation, and its gradient needs it as it was. "
                "Hint: give the call a copy (mask.clone())"
            )
        run, saved, stop = ctx.run, ctx.saved_tensors, ctx.count + ctx.run.saved_count
        operands, outputs, seed = saved[: ctx.count], saved[ctx.count : stop], saved[stop:]
        if seed and int(seed[0]) != run.seed:
            run = run.with_seed(int(seed[0]))
        requested = ctx.needs_input_grad[1:]
        return None, *run.backward(operands, outputs, grads[: run.differentiable_count], requested)


_apply: Any = super(torch.autograd.Function, _AttentionFunction).apply


def _outside_transforms() -> contextlib.AbstractContextManager[Any] | None:
    """Return a context in which no `torch.func` transform wraps results; None where a transform cannot be left."""
    if not private.are_transforms_active():
        return _NO_SCOPE
    return None if private.outside_transforms is None else private.outside_transforms()


def causal_alignment(mask: Any) -> Literal["top_left", "bottom_right"] | None:
    """Return the alignment of a ``torch.nn.attention.bias.CausalBias``, and None for another mask."""
    # Importing that module imports torch._dynamo and Triton, which crashes after TensorFlow. Without it no mask is one.
    bias: Any = sys.modules.get("torch.nn.attention.bias")
    kind: Any = getattr(bias, "CausalBias", ())
    if not isinstance(mask, kind):
        return None
    return "top_left" if mask.variant == bias.CausalVariant.UPPER_LEFT else "bottom_right"


def is_traced(x: torch.Tensor) -> bool:
    """Whether the host reads no memory of `x`: transformed, meta, being compiled, fake, or of a class like DTensor."""
    if is_compiling() or x.is_meta or type(x).__torch_dispatch__ is not _NO_DISPATCH:
        return True
    # Legacy batched tensors: `torch.autograd.functional.jacobian(vectorize=True)`.
    return private.is_wrapped(x) or private.is_legacy_batched(x)


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of tuples, lists and dictionaries of the same structure."""
    if isinstance(tree, dict):
        return {name: map_leaves(function, x, *(other[name] for other in others)) for name, x in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return function(tree, *others)
    parts = [map_leaves(function, *x) for x in zip(tree, *others, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _is_dual(x: torch.Tensor) -> bool:
    """Whether `x` carries a forward-mode tangent."""
    return private.dual_levels._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]  # torch's own
