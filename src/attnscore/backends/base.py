"""The words that the core speaks to an array framework.

A framework file gives these words for one framework and nothing else: the core (scores, masks, softmax,
engine) is written once in them. Names follow the array API standard where it has one, so a user's own
``Score.tile(ops, query, key)`` reads like ordinary array code; names of the standard that are not listed here
reach the framework's own function of that name.

Loops over tiles go through ``loop`` and ``collect``, and writing goes through ``add_at``, so that a framework that
traces (JAX, TensorFlow graphs) gives them without unrolling or mutation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""An array of whichever framework the caller uses."""
HostArray: TypeAlias = np.ndarray[Any, Any]

HALF_PRECISION = ("float16", "bfloat16")
_NOTHING = nullcontext()
FLOATING = "a floating dtype (float16, bfloat16, float32, float64)"
"""What messages call the dtypes that are taken."""


class Unknown(ABC):
    """A length that a graph will learn only when it runs. It equals nothing but itself."""

    @abstractmethod
    def at_most(self, length: int) -> Unknown:
        """The smaller of the two, and at least 1."""

    def __repr__(self) -> str:
        return "?"


def is_unknown(length: Any) -> bool:
    """Whether nobody can say yet how long an axis is."""
    return length is None or isinstance(length, Unknown)


def may_equal(first: Any, second: Any) -> bool:
    """Whether two lengths are equal, or one is unknown."""
    return is_unknown(first) or is_unknown(second) or bool(first == second)


def broadcast(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """The shape that all broadcast to; ValueError when there is none. Unknown lengths of one axis count as equal."""
    if not any(is_unknown(n) for shape in shapes for n in shape):
        return tuple(np.broadcast_shapes(*map(tuple, shapes)))
    axes = max(map(len, shapes))
    found = []
    for lengths in zip(*((*(1 for _ in range(axes - len(shape))), *shape) for shape in shapes), strict=True):
        numbers = {n for n in lengths if not is_unknown(n)} - {1}
        if len(numbers) > 1:
            raise ValueError(f"lengths {sorted(numbers)} do not broadcast")
        unknown = sorted((n for n in lengths if is_unknown(n)), key=lambda n: n is None)
        found.append(numbers.pop() if numbers else unknown[0] if unknown else 1)
    return tuple(found)


class SeedHalves(NamedTuple):
    """A dropout seed that has no number yet: its low 32 bits and its high 31, as arrays of 32-bit whole numbers."""

    low: Array
    high: Array


class DifferentiableOp(Protocol):
    """A computation with its own gradient, as a function of arrays alone."""

    @property
    def differentiable_outputs(self) -> int:
        """How many outputs, from the first, carry a gradient."""

    @property
    def saved_outputs(self) -> int:
        """How many outputs, from the first, the backward needs."""

    def constants(self) -> Sequence[Array]:
        """Arrays that the run reads besides those that it is a function of: those of the mask."""

    def variables(self) -> tuple[Sequence[Array], Callable[[Sequence[Array]], DifferentiableOp]]:
        """Arrays besides the operands (of the mask, of a traced seed), and the same run over others in their place."""

    def streaming(self) -> DifferentiableOp:
        """The same in the framework's own operations."""

    def with_backward(self) -> DifferentiableOp:
        """The same where a backward is to come, which may keep scores too; not for arrays that are traced."""

    def without_scores(self, outputs: tuple[Array, ...], /) -> tuple[Array, ...]:
        """The outputs of the run that `with_backward` was asked of."""

    def forward(self, arrays: Sequence[Array], /) -> tuple[Array, ...]: ...

    def backward(
        self,
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        grads: Sequence[Array | None],
        wanted: Sequence[bool] | None = None,
        /,
    ) -> tuple[Array | None, ...]: ...


class Backend(ABC):
    """One array framework: its words, its gradient hook, its view on the host."""

    name: str
    has_autodiff: bool
    wants_aligned = True
    """Whether `from_memory` copies what does not begin at a multiple of 64 bytes."""
    has_plain_tape = False
    """Whether arrays on a tape are plain too: `differentiable` then records what is prepared (plain_calls.py)."""

    # Where arrays live and what they hold
    @abstractmethod
    def dtype(self, x: Array) -> str:
        """Name of the dtype: ``"float32"``, ``"bfloat16"``, ``"bool"`` ..."""

    @abstractmethod
    def is_floating(self, x: Array) -> bool: ...

    @abstractmethod
    def unsupported(self, x: Array) -> tuple[str, str] | None:
        """Which kind of array `x` is that attention cannot take (sparse, ...), and what makes a dense one; or None."""

    @abstractmethod
    def device(self, x: Array) -> str: ...

    def is_recording(self) -> bool:
        """Whether operations are recorded, to be run again for arrays of any size."""
        return False

    def shape(self, x: Array) -> tuple[Any, ...]:
        """Lengths of the axes, with an ``Unknown`` where a graph does not know one yet."""
        return tuple(x.shape)

    def assert_shape(self, x: Array, shapes: Sequence[tuple[str, Array, Sequence[Sequence[Any]]]]) -> Array:
        """`x`, where each array, by its name, has one of the shapes allowed for it: axes are a length, or several each.

        Known lengths were checked before: this is for a graph that learns them when it runs, and then fails.
        """
        return x

    @abstractmethod
    def astype(self, x: Array, dtype: str) -> Array: ...

    @abstractmethod
    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        """`x` (a list, a number, a NumPy array, an own array) as an array on the device of `like`."""

    @abstractmethod
    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        """The values as NumPy, without waiting for a device; None when they cannot be seen (traced, on a device)."""

    @abstractmethod
    def has_cpu_buffer(self, x: Array) -> bool:
        """Whether native code on the CPU can read the numbers of `x` where they lie."""

    @abstractmethod
    def is_plain(self, *arrays: Array) -> bool:
        """Whether nothing but the numbers of these matters now: no trace, cast or subclass; all `readable`.

        No tape either, but where `has_plain_tape`.
        """

    @abstractmethod
    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        """The memory of a `readable` array as NumPy, without a copy; 16-bit floats as uint16."""

    def strides(self, x: Array) -> tuple[int, ...]:
        """How far apart numbers lie in the memory of a `readable` array, in any unit; of floats alone."""
        return self.memory(x).strides if self.is_floating(x) else ()

    def buffer(self, x: Array) -> int | HostArray:
        """Where the memory of a `readable` array begins: its address, or the memory."""
        return self.memory(x)

    @abstractmethod
    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        """An array over the memory of `x`, which holds `dtype` (16-bit floats as uint16); `like` lies on the CPU.

        Where `like` is None the array lies on the CPU too, and holds no 16-bit floats.
        """

    @abstractmethod
    def needs_grad(self, *arrays: Array) -> bool:
        """Whether what is computed from these now is to be differentiated by the framework itself."""

    def needs_host_callback(self, *arrays: Array) -> bool:
        """Whether the numbers are seen by the host when the call runs, and not before: then `host_callback` serves."""
        return False

    def host_callback(
        self,
        function: Callable[..., Sequence[np.ndarray[Any, Any]]],
        results: Sequence[tuple[tuple[int, ...], str]],
        arrays: Sequence[Array],
        otherwise: Callable[..., tuple[Array, ...]],
    ) -> tuple[Array, ...]:
        """``function(*arrays)`` over NumPy arrays, of the shapes and dtypes `results`, when a traced call runs.

        ``otherwise(*arrays)`` traces the same in the framework's own operations: what runs where nobody can be called,
        and what a derivative is taken of.
        """
        raise NotImplementedError(f"{self.name} defers nothing")

    def custom_calls(self) -> bool:
        """Whether programs can call the native library by themselves: then `custom_call` serves."""
        return False

    def custom_call(
        self,
        direction: str,
        results: Sequence[tuple[tuple[int, ...], str]],
        arrays: Sequence[Array],
        attributes: Mapping[str, Any],
    ) -> tuple[Array, ...]:
        """Results of the library's call "forward" or "backward" (csrc/ffi.cc), of these shapes and dtypes."""
        raise NotImplementedError(f"{self.name} has no custom calls")

    def at_run_time(self, host: Backend) -> Backend:
        """Return the backend of the arrays that `host_callback` passes: NumPy's (`host`), unless it must know more."""
        return host

    def register_pytree(self, kind: type) -> None:  # noqa: B027  # most have nothing to be told
        """Called with each class of scores and masks: where the framework has to be told about them."""

    def as_seed(self, seed: Any) -> Any:
        """A seed of the framework's own kind (a key, an array) as a number or `SeedHalves`; others as they are."""
        return seed

    @abstractmethod
    def threads(self, own: int) -> int:
        """How many threads native code may use: the framework's own number where it has one."""

    @abstractmethod
    def number(self, x: Array) -> float | None:
        """The value of an array with one entry, waiting for its device; None when it is traced."""

    # Making arrays
    @abstractmethod
    def zeros(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Array: ...

    @abstractmethod
    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array: ...

    @abstractmethod
    def positions(self, start: int, count: int, like: Array) -> Array:
        """The whole numbers start, start + 1, ... as 64-bit integers (`start` may be traced, `count` is a number)."""

    # Shapes
    @abstractmethod
    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        """`count` entries along `axis` from `start`: a view where the framework has views."""

    @abstractmethod
    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        """`x` with `block` added from `start` along `axis`; may reuse the memory of `x`."""

    @abstractmethod
    def concat(self, arrays: Sequence[Array], axis: int) -> Array: ...

    @abstractmethod
    def reshape(self, x: Array, shape: Sequence[int]) -> Array: ...

    @abstractmethod
    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array: ...

    @abstractmethod
    def swap_axes(self, x: Array, first: int, second: int) -> Array: ...

    @abstractmethod
    def expand_dims(self, x: Array, axis: int) -> Array: ...

    @abstractmethod
    def take(self, x: Array, indices: Array, axis: int) -> Array: ...

    # Arithmetic (those a score needs and every framework has under its own name)
    @abstractmethod
    def matmul(self, a: Array, b: Array) -> Array: ...

    @abstractmethod
    def matrix_transpose(self, x: Array) -> Array: ...

    @abstractmethod
    def exp(self, x: Array) -> Array: ...

    @abstractmethod
    def log(self, x: Array) -> Array: ...

    @abstractmethod
    def tanh(self, x: Array) -> Array: ...

    @abstractmethod
    def sigmoid(self, x: Array) -> Array: ...

    @abstractmethod
    def erf(self, x: Array) -> Array: ...

    @abstractmethod
    def sqrt(self, x: Array) -> Array: ...

    @abstractmethod
    def abs(self, x: Array) -> Array: ...

    @abstractmethod
    def maximum(self, a: Array, b: Array) -> Array: ...

    @abstractmethod
    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array: ...

    def equal(self, a: Array, b: Array) -> Array:
        """Of arrays that broadcast: ``==`` of TensorFlow's is False, as one, for those that do not, so none is sure."""
        return a == b

    def logical_and(self, a: Array, b: Array) -> Array:
        """Of boolean arrays that broadcast: MXNet's ``&`` wants one shape."""
        return a & b

    def logical_or(self, a: Array, b: Array) -> Array:
        return a | b

    @abstractmethod
    def isfinite(self, x: Array) -> Array: ...

    @abstractmethod
    def isnan(self, x: Array) -> Array: ...

    @abstractmethod
    def sum(self, x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array: ...

    def sum_to_length(self, x: Array, axis: int, length: Any) -> Array:
        """`x`, summed along `axis` where `length`, all of the axis or 1, is 1."""
        return self.sum(x, axis, keepdims=True) if length == 1 else x

    @abstractmethod
    def max(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...

    @abstractmethod
    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """The `k` largest entries of the last axis, in falling order, and where they stand."""

    @abstractmethod
    def any(self, x: Array, axis: int, keepdims: bool = False) -> Array: ...

    @abstractmethod
    def low_32_bits(self, x: Array) -> Array:
        """The low 32 bits of a 64-bit integer, as a number in [0, 2^32): what the dropout hash counts in."""

    def uint32(self, number: int) -> Any:
        """A number below 2^32 as it may stand beside what `low_32_bits` gives."""
        return number

    def shift_right(self, x: Array, bits: int) -> Array:
        """A 64-bit integer, 0 or more, without its low `bits`."""
        return x >> bits

    # Control
    @abstractmethod
    def numeric_scope(self) -> AbstractContextManager[Any]:
        """A region without floating-point warnings: what NaN, infinity and log(0) do here is by rule."""

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        """``function(carry) if condition else carry``, for a condition that may be traced."""
        return function(carry) if condition else carry

    def loop(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Carry on from one tile to the next; a framework that traces rolls it up."""
        for i in range(count):
            carry = body(i, carry)
        return carry

    def map_tiles(self, count: int, body: Callable[[Any], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        """What each of independent tiles gives; a framework that traces rolls it up."""
        return [body(i) for i in range(count)]

    def eager_scope(self) -> AbstractContextManager[Any]:
        """A region in which what is known is computed when it is asked for, also while a program is being traced."""
        return _NOTHING

    @abstractmethod
    def known_finite(self, *arrays: Array) -> bool:
        """True when every entry is known to be finite; False when some is not, or when nobody can look."""

    # Gradients and randomness
    @abstractmethod
    def differentiable(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Call ``run.forward(operands)`` with ``run.backward`` as its gradient."""

    @abstractmethod
    def vjp(
        self, function: Callable[..., Array], inputs: Sequence[Array]
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """Value of ``function(*inputs)`` and the pull-back of a gradient on it, by the framework's autodiff."""

    @abstractmethod
    def stop_gradient(self, x: Array) -> Array: ...

    @abstractmethod
    def draw_seed(self, like: Array) -> int:
        """A fresh dropout seed from the framework's own generator."""

    @abstractmethod
    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        """The arrays in the dtype of the active mixed-precision region, unchanged outside one."""


def importable(x: HostArray) -> HostArray:
    """Return `x`, or a copy where other frameworks cannot take over its memory or its dtype.

    They want writable, aligned memory in C order and native byte order, no negative strides (which NumPy allows in a
    contiguous array on an axis of length 1), and know no float wider than float64.
    """
    flags, dtype = x.flags, x.dtype
    if dtype.kind == "f" and dtype.itemsize > 8:
        return x.astype(np.float64)
    as_it_is = flags.writeable and flags.c_contiguous and flags.aligned and dtype.isnative
    return x if as_it_is and min(x.strides, default=0) >= 0 else x.astype(dtype.newbyteorder("="), order="C")


def accumulator(dtype: str) -> str:
    """The dtype in which sums over `dtype` are kept: at least float32."""
    return "float32" if dtype in HALF_PRECISION else dtype


def sum_to(ops: Backend, x: Array, shape: Sequence[int]) -> Array:
    """Undo a broadcast: sum `x` over the axes along which `shape` has length 1 (or none at all)."""
    shape = tuple(shape)
    extra = len(x.shape) - len(shape)
    if extra > 0:
        x = ops.sum(x, axis=tuple(range(extra)))
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return ops.sum(x, axis=axes, keepdims=True) if axes else x
