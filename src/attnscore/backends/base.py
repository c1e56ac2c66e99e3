"""Backend: the array operations of one framework, under the array API's names.

- Scores, masks, softmax and tiled attention are written once in these operations; a backend holds no attention logic.
- A user's ``Score.tile(ops, query, key)`` reads like ordinary array code: operations of the array API that are not
  listed here are found in the framework's own modules, under the framework's own name.
- Loops over tiles go through `loop`, `map_tiles` and `cond`, and writes through `add_at`, so that a framework that
  traces (JAX, TensorFlow graphs) neither unrolls nor mutates.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnscore.base.threads import get_num_threads

Array: TypeAlias = Any
"""An array of whichever framework the caller uses."""
HostArray: TypeAlias = np.ndarray[Any, Any]
Signature: TypeAlias = bytes | tuple[Hashable, ...]
VjpFunction: TypeAlias = Callable[[Array], tuple[Array, ...]]
"""Function from the gradient of a value to the gradients of the arrays it was computed from."""

_NO_SCOPE = nullcontext()


class Dtype(NamedTuple):
    """A floating dtype that attention takes."""

    accumulator: str
    """Dtype of sums of its numbers."""
    storage: str
    """NumPy's dtype of its memory, as native code reads it: NumPy has no bfloat16."""


DTYPES = {
    "float16": Dtype("float32", "uint16"),
    "bfloat16": Dtype("float32", "uint16"),
    "float32": Dtype("float32", "float32"),
    "float64": Dtype("float64", "float64"),
}
HALF_PRECISION = tuple(name for name, dtype in DTYPES.items() if dtype.storage == "uint16")
ACCELERATORS = ("cuda", "gpu", "tpu", "rocm", "xpu", "mps")
"""Prefixes of the names of accelerators."""
FLOATING = f"a floating dtype ({', '.join(DTYPES)})"
"""Name of the accepted dtypes in messages."""


def accumulator(dtype: str) -> str:
    """Return the dtype of sums over `dtype`: at least float32. NumPy's long double is its own."""
    return DTYPES[dtype].accumulator if dtype in DTYPES else dtype


def itemsize(dtype: str) -> int:
    """Return the bytes of one number."""
    return np.dtype(DTYPES[dtype].storage if dtype in DTYPES else dtype).itemsize


class SeedHalves(NamedTuple):
    """A dropout seed that is traced: its low 32 bits and its high 31, as arrays of 32-bit integers."""

    low: Array
    high: Array


class Ragged(NamedTuple):
    """An array of sequences of different lengths: (batch, ...) with one axis whose size differs, as in torch.jagged."""

    values: Array
    """The sequences one after the other, without the batch axis."""
    offsets: Array
    """Cumulative lengths, (batch + 1,)."""
    axis: int
    """The axis whose size differs, counted from the last."""


class DifferentiableOp(ABC):
    """A function of arrays alone that has its own VJP.

    Methods with a default are for functions that read more than their operands, or save more than they return.
    """

    @property
    @abstractmethod
    def differentiable_count(self) -> int:
        """Number of outputs, from the first, that carry a gradient."""

    @property
    def saved_count(self) -> int:
        """Number of outputs, from the first, that the backward reads."""
        return self.differentiable_count

    @property
    def has_loops(self) -> bool:
        """Whether a compiled program loops over tiles of known lengths."""
        return False

    @property
    def seed(self) -> int:
        """The seed of dropout; 0 for none, and for one that is traced."""
        return 0

    def with_seed(self, seed: int) -> DifferentiableOp:
        """Return the op with another seed of dropout, where it has one."""
        return self

    def constants(self) -> Sequence[Array]:
        """Return the arrays of the mask, which are read and get no gradient."""
        return ()

    def variables(self) -> tuple[Sequence[Array], Callable[[Sequence[Array]], DifferentiableOp]]:
        """Return the arrays besides the operands (mask, traced seed), and the op as a function of such arrays."""
        return (), lambda arrays: self

    def streaming(self) -> DifferentiableOp:
        """Return the op in the framework's own operations, which its autodiff differentiates further."""
        raise NotImplementedError(f"attnscore: {type(self).__name__} in the framework's operations")

    def with_backward(self) -> DifferentiableOp:
        """Return the op for a call whose backward follows, which may save scores; not for traced arrays."""
        return self

    def without_saved(self, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Drop the outputs that only a backward reads."""
        return outputs

    @abstractmethod
    def forward(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the outputs."""

    @abstractmethod
    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        requested: Sequence[bool] | None = None,
    ) -> tuple[Array | None, ...]:
        """Return the gradients of `arrays` from `grads`, the gradients of the differentiable outputs.

        `outputs` are the saved ones. `requested` selects the arrays whose gradients are returned (None: all); the
        other gradients are None.
        """


class Modules:
    """Functions of several modules, each from the first that has it."""

    def __init__(self, *modules: Any) -> None:
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"{self._modules[0].__name__} has no {name}")


class Backend(ABC):
    """One array framework: its operations, its gradient hook, its view of host memory.

    Operations that frameworks have under the array API's names, with its arguments, come from `xp` and have no method
    here: `abs`, `any`, `erf`, `exp`, `expand_dims`, `isfinite`, `isnan`, `log`, `matmul`, `max`, `maximum`,
    `sigmoid`, `sqrt`, `sum`, `tanh`, `where`. A backend defines the ones that its framework has in another way.
    """

    name: str
    has_autodiff: bool
    """Whether there is ``vjp(function, inputs)``, which returns ``function(*inputs)`` and its VJP function."""
    xp: Any
    """The framework's module of array functions (or `Modules`)."""
    settles_sizes = False
    """Whether comparing an unknown size with a number decides for the whole program whether they are equal."""
    wants_aligned = True
    """Whether `from_memory` copies arrays that do not begin at a multiple of 64 bytes."""
    has_programs = False
    """Whether it traces programs, whose arrays `needs_host_callback` and `fuses` tell apart."""
    has_slow_callbacks = False
    """Whether a `host_callback` takes longer than a small call in the framework's own operations. There is then
    `cond_rarely`, a `cond` for a condition that is rarely true: the function costs nothing where it does not run."""
    can_unpad = False
    """Whether there are `indices_before` and `put_rows`, which gather the real keys of a call: not where a program is
    compiled for each number of them."""
    fallbacks: Mapping[str, str] = {}
    """Private names that this release of the framework does not have, and the cost of their replacements."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.xp, name)

    # Properties of arrays
    @abstractmethod
    def dtype(self, x: Array) -> str:
        """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"bool"`` ..."""

    def is_floating(self, x: Array) -> bool:
        return self.dtype(x) in DTYPES

    @abstractmethod
    def unsupported(self, x: Array) -> tuple[str, str] | None:
        """Name the kind of `x` if attention does not take it (sparse, ...), and its conversion; otherwise None."""

    def ragged(self, x: Array) -> Ragged | None:
        """Return the parts of an array of sequences of different lengths, None of any other; `from_ragged` inverts."""
        return None

    @abstractmethod
    def device(self, x: Array) -> str: ...

    def is_accelerated(self, x: Array) -> bool:
        """Whether the array is on an accelerator, or will be when a program runs: a GPU, a TPU."""
        return self.device(x).lower().startswith(ACCELERATORS)

    def is_recording(self) -> bool:
        """Whether operations are recorded (`torch.jit.trace`), to be run again for arrays of any size."""
        return False

    def is_in_make_fx(self) -> bool:
        """Whether `make_fx` of PyTorch records operations, to which results of native code would be constants."""
        return False

    def shape(self, x: Array) -> tuple[Any, ...]:
        """Return the sizes of the axes, `Unknown` where a graph learns one when it runs."""
        return tuple(x.shape)

    def assert_shape(self, x: Array, shapes: Sequence[tuple[str, Array, Sequence[Sequence[Any]]]]) -> Array:
        """Return `x` tied to a check of `shapes`, which a graph then cannot prune.

        Running it fails unless each named array has one of the shapes allowed for it. An axis of an allowed shape is a
        size, or a tuple of sizes. Known sizes were checked before.
        """
        return x

    @abstractmethod
    def astype(self, x: Array, dtype: str) -> Array: ...

    @abstractmethod
    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        """Convert a list, a number or an array of NumPy or of the framework to an array on the device of `like`."""

    @abstractmethod
    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        """Return the values as NumPy; None if they are traced or on another device than the CPU."""

    @abstractmethod
    def has_cpu_buffer(self, x: Array) -> bool:
        """Whether native code on the CPU can read the memory of `x` without a copy."""

    def check_can_mask(self, query_len: Any, key_len: Any) -> None:  # noqa: B027  # most programs can
        """Raise FrameworkError where the program that is made now cannot mask scores of these lengths."""

    def check_can_draw(self) -> None:  # noqa: B027  # most frameworks can
        """Raise FrameworkError where the gradient of a call would draw other random numbers than its forward."""

    def needs_one_tile(self) -> bool:
        """Whether the program that is made now cannot loop over tiles of known lengths."""
        return False

    @abstractmethod
    def is_plain(self, *arrays: Array) -> bool:
        """Whether only the values of these matter: no tracing, autocast or subclass; all with a `has_cpu_buffer`.

        Arrays whose operations autograd records are plain too: it records the calls of execution plans (`record`).
        """

    @abstractmethod
    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        """Return the memory of an array with a CPU buffer as NumPy, without a copy; 16-bit floats as uint16."""

    def array_signature(self, x: Array) -> Hashable | None:
        """Return kind, shape, dtype and device as the checks read them: arrays of one signature pass or fail alike.

        None where an array has no shape, or symbolic sizes, which belong to one graph.
        """
        return type(x), x.shape, x.dtype, getattr(x, "device", None)

    def signature(self, arrays: Sequence[Array]) -> Signature | None:
        """Return kinds, dtypes, shapes and strides of arrays; None unless all are plain (`is_plain`).

        The signature of more arrays begins with the signature of the first ones.
        """
        if not self.is_plain(*arrays):
            return None
        kinds = [self.array_signature(x) for x in arrays]
        # One without a kind has symbolic sizes.
        return None if None in kinds else tuple(zip(kinds, (self.memory(x).strides for x in arrays), strict=True))

    def decoding_signature(self, arrays: Sequence[Array], head_axis: int) -> bytes | None:
        """Return the signature of query, key, value and a boolean mask or valid lengths, for any number of keys.

        None where autograd records them, where there are no keys or the lengths do not fit, or where the native module
        does not read the arrays. `head_axis` is -3, or -2 for arrays (batch, length, head, dim).
        """
        return None

    def device_signature(self, arrays: Sequence[Array]) -> Signature | None:
        """Return `signature` of arrays on an accelerator; None unless all are, and plain."""
        return None

    def buffers(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return plain arrays in the form that call plans of the native module read: as they are, or their memory."""
        return [self.memory(x) for x in arrays]

    def buffer_in_c_order(self, x: Array) -> Array:
        """Return one of `buffers`, of a copy in C order where `x` is not."""
        return np.ascontiguousarray(self.memory(x))

    @abstractmethod
    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        """Return an array of `dtype` over the memory of `x`, where 16-bit floats are uint16; `like` is on the CPU.

        `like` may be None where `x` holds no 16-bit floats.
        """

    @abstractmethod
    def needs_grad(self, *arrays: Array) -> bool:
        """Whether the framework's own autodiff may differentiate operations on these."""

    def is_recorded(self, function: Callable[[], Array]) -> bool:
        """Whether autodiff follows the result; False where the framework itself raises for a captured array."""
        return False

    def is_writable(self, x: Array) -> bool:
        """Whether an array, of a framework whose arrays are written to in place, may be written to here."""
        return True

    def needs_host_callback(self, *arrays: Array) -> bool:
        """Whether these are traced by a program that can run ``host_callback(function, results, arrays, otherwise)``.

        It traces a call of ``function`` on NumPy arrays, which returns arrays of the shapes and dtypes `results`.
        TensorFlow traces ``otherwise(*arrays)``, the same in its own operations, where the graph may run in another
        process, and for derivatives; JAX does not.
        """
        return False

    def fuses(self, *arrays: Array) -> bool:
        """Whether these are traced by a program whose compiler fuses operations on them into few loops."""
        return False

    def custom_calls(self) -> bool:
        """Whether compiled programs can call the native library, through `custom_call`."""
        return False

    def at_run_time(self, host: Backend) -> Backend:
        """Return the backend of the arrays that `host_callback` passes: `host`, NumPy's, or one derived from it."""
        return host

    def draws_seeds_by_example(self) -> bool:
        """Whether `draw_seed` may give a seed for each example of a ``vmap``, which no plan reads."""
        return False

    def as_seed(self, seed: Any) -> Any:
        """Convert the framework's own kind of seed (a key, an array) to a number or `SeedHalves`; return others."""
        return seed

    def threads(self) -> int:
        """Return how many threads native code may use: the framework's setting where it has one, otherwise ours."""
        return get_num_threads()

    def gomp_parallel(self) -> int | None:
        """Return the address of `GOMP_parallel` of the OpenMP runtime that runs the framework's operations, if any."""
        return None

    @abstractmethod
    def number(self, x: Array) -> float | None:
        """Return the value of an array with one entry; None if it is traced."""

    # Creation
    def zeros(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Array:
        return self.full(shape, 0, like, dtype)

    @abstractmethod
    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array: ...

    @abstractmethod
    def positions(self, start: int, count: int, like: Array) -> Array:
        """Return start, start + 1, ... as 64-bit integers (`start` may be traced)."""

    # Shapes
    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        """Return `count` entries along `axis` from `start`: a view where the framework has views."""
        index = [slice(None)] * len(x.shape)
        index[axis] = slice(start, start + count)
        return x[tuple(index)]

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        """Return `x` with `block` added from `start` along `axis`; may reuse the memory of `x`."""
        stop = start + block.shape[axis]
        before, after = self.slice_axis(x, axis, 0, start), self.slice_axis(x, axis, stop, x.shape[axis] - stop)
        return self.concat([before, self.slice_axis(x, axis, start, stop - start) + block, after], axis)

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        return self.xp.concatenate(list(arrays), axis=axis)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return self.xp.reshape(x, tuple(shape))

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return self.xp.broadcast_to(x, tuple(shape))

    def swap_axes(self, x: Array, first: int, second: int) -> Array:
        return self.xp.swapaxes(x, first, second)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        return self.xp.take(x, indices, axis=axis)

    def can_sum_rows(self, *arrays: Array) -> bool:
        """Whether `sums_of_rows` takes these: whether the framework has an operation that reads each row once."""
        return False

    def searchsorted(self, ordered: Array, values: Array) -> Array:
        """Return how many entries of a vector in rising order are at most each of `values` (a vector), as int64."""
        return self.astype(self.xp.searchsorted(ordered, values, side="right"), "int64")

    def in_c_order(self, x: Array) -> Array:
        """Return `x`, or a copy in C order where the framework has arrays in another one."""
        return x

    def pair_axes(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Return query as (..., query, 1, dim) and key as (..., 1, key, dim), which broadcast to all pairs."""
        return self.expand_dims(query, -2), self.expand_dims(key, -3)

    # Arithmetic
    def add(self, a: Array, b: Array) -> Array:
        """Add arrays that broadcast, in any number of axes: TensorFlow's ``+`` has a limit."""
        return a + b

    def softmax(self, x: Array) -> Array:
        """Return the softmax over the last axis."""
        weights = self.exp(x - self.stop_gradient(self.max(x, axis=-1, keepdims=True)))
        return weights / self.sum(weights, axis=-1, keepdims=True)

    def matrix_transpose(self, x: Array) -> Array:
        return self.swap_axes(x, -1, -2)

    def compares_identities(self) -> bool:
        """Whether ``==`` of two arrays compares the objects, as in a graph of a TensorFlow 1 session."""
        return False

    def equal(self, a: Array, b: Array) -> Array:
        """Compare arrays that broadcast, or an array and a number.

        TensorFlow's ``==`` gives a single False where shapes do not fit, and where it `compares_identities`.
        """
        return a == b

    def logical_and(self, a: Array, b: Array) -> Array:
        """Combine boolean arrays that broadcast: MXNet's ``&`` wants one shape."""
        return a & b

    def logical_or(self, a: Array, b: Array) -> Array:
        return a | b

    def sum_to_length(self, x: Array, axis: int, length: Any) -> Array:
        """Sum `x` along `axis` if `length` is 1; otherwise `length` is the size of the axis."""
        return self.sum(x, axis, keepdims=True) if length == 1 else x

    @abstractmethod
    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Return the `k` largest entries of the last axis, in falling order, and their indices."""

    def low_32_bits(self, x: Array) -> Array:
        """Return the low 32 bits of a 64-bit integer, in [0, 2^32): the dropout hash is computed in these."""
        return x & 0xFFFFFFFF

    def uint32(self, number: int) -> Any:
        """Return a constant below 2^32 as an operand of the result of `low_32_bits`."""
        return number

    def shift_right(self, x: Array, bits: int) -> Array:
        """Shift a non-negative 64-bit integer to the right."""
        return x >> bits

    # Scopes and control flow
    def numeric_scope(self) -> AbstractContextManager[Any]:
        """Return a context without floating-point warnings and autocast: NaN, infinity and log(0) are expected."""
        return _NO_SCOPE

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        """Return ``function(carry) if condition else carry``, for a condition that may be traced."""
        return function(carry) if condition else carry

    def compiles_each_shape(self) -> bool:
        """Whether the first tile of a shape costs a compilation, or makes a program longer."""
        return False

    def loop(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Fold ``carry = body(i, carry)`` over range(count); a traced loop is not unrolled."""
        for i in range(count):
            carry = body(i, carry)
        return carry

    def map_tiles(self, count: int, body: Callable[[Any], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        """Return ``body(i)`` of every i in range(count); a traced loop is not unrolled."""
        return [body(i) for i in range(count)]

    def eager_scope(self) -> AbstractContextManager[Any]:
        """Return a context in which operations on concrete arrays run at once, also while a program is traced."""
        return _NO_SCOPE

    def copy(self, x: Array) -> Array:
        """Return `x` in memory that no caller writes to: a copy, or `x` where arrays are immutable, or traced."""
        return x

    def version(self, x: Array) -> int | None:
        """Return a number that changes when an array is written to; None where the framework counts no writes."""
        return None

    @abstractmethod
    def known_finite(self, x: Array) -> bool:
        """Whether every entry may be taken to be finite; False where only running a traced program would tell."""

    def plain_product(self, x: Array, matrix: Array, threads: int) -> Array | None:
        """Return ``x @ matrix`` in C order, without warnings; rows of `x` that are not finite give NaN.

        None where `scores.base.projected` has to make these rows NaN: `x` may have some, and the native module, which
        does it on `threads` threads, does not take these dtypes and layouts. The result may be a NumPy array where
        that takes less time: a planned call reads its memory.
        """
        return self.in_c_order(self.matmul(x, matrix)) if self.known_finite(x) else None

    # Gradients and randomness
    @abstractmethod
    def differentiable(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Compute ``run.forward(operands)`` with ``run.backward`` as its gradient."""

    def record(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Return `differentiable` of plain operands, some of which need a gradient."""
        return self.differentiable(run, operands)

    @abstractmethod
    def stop_gradient(self, x: Array) -> Array: ...

    def product_of_rows(self, x: Array, matrix: Array, bias: Array | None = None) -> Array | None:
        """Return ``x @ matrix + bias``, whose gradient leaves out the rows of `x` that are not finite.

        None where the framework has no rule for the gradient of one operation, or where that saves no time.
        """
        return None

    @abstractmethod
    def draw_seed(self, like: Array) -> int:
        """Draw a dropout seed from the framework's generator: 62 bits, so that int64 has the exclusive bound 2^62."""

    def has_autocast(self, x: Array) -> bool:
        """Whether a mixed-precision scope that `numeric_scope` leaves is active on the device of `x`."""
        return False

    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the arrays in the dtype of the active mixed-precision scope, unchanged outside one."""
        return arrays


def private_name(fallbacks: dict[str, str], path: str, replacement: Any, cost: str) -> Any:
    """Return the object of a dotted path; without it the replacement, whose cost is noted in `fallbacks`."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        fallbacks[path] = cost
        return replacement


def importable(x: HostArray) -> HostArray:
    """Return `x`, or a copy where other frameworks cannot share its memory or dtype.

    They require writable, aligned memory in C order and native byte order, no negative strides (which NumPy allows in a
    contiguous array on an axis of length 1), and know no float wider than float64.
    """
    flags, dtype = x.flags, x.dtype
    if dtype.kind == "f" and dtype.itemsize > 8:
        return x.astype(np.float64)
    as_it_is = flags.writeable and flags.c_contiguous and flags.aligned and dtype.isnative
    return x if as_it_is and min(x.strides, default=0) >= 0 else x.astype(dtype.newbyteorder("="), order="C")


def sum_to(ops: Backend, x: Array, shape: Sequence[int]) -> Array:
    """Undo a broadcast: sum `x` over the axes that `shape` lacks or has with size 1."""
    shape = tuple(shape)
    extra = len(x.shape) - len(shape)
    if extra > 0:
        x = ops.sum(x, axis=tuple(range(extra)))
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return ops.sum(x, axis=axes, keepdims=True) if axes else x
