"""TensorFlow: the words, eager and in graphs.

- Eager arrays on the CPU are read where they lie (``numpy.asarray`` shares their memory); what native code wrote
  becomes a tensor without a copy where its address is aligned as TensorFlow wants, with one of linear size otherwise.
- In graphs values cannot be seen, and loops are ``tf.while_loop``. A ``tf.function`` calls native code where it can
  (``tensorflow_graphs.py``); under XLA, in exported models and on other devices nothing calls back into Python.
- Lengths that a graph does not know yet are in ``tensorflow_lengths.py``, the gradient in ``tensorflow_gradients.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from attnscore.backends.base import Array, Backend, DifferentiableOp, HostArray, SeedHalves, Unknown, importable
from attnscore.backends.numpy import NumpyBackend
from attnscore.backends.tensorflow import dynamic_shapes as lengths
from attnscore.backends.tensorflow import gradients, graphs
from attnscore.backends.tensorflow.dynamic_shapes import Length, sizes
from attnscore.backends.tensorflow.nested import leaves_of, rebuilt

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_NOTHING = contextlib.nullcontext()
# Eigen reads whole vectors: TensorFlow ends the process at a tensor that lies otherwise (seen in 2.21).
_ALIGNED = 64
# Its operations broadcast and slice arrays of 8 axes at most, and one is added here.
_MOST_AXES = 7


class TensorFlowBackend(Backend):
    """The words of TensorFlow."""

    name = "tensorflow"
    has_autodiff = True

    def __getattr__(self, word: str) -> Any:
        for room in (tf.math, tf, tf.experimental.numpy):
            if hasattr(room, word):
                return getattr(room, word)
        raise AttributeError(f"TensorFlow has no {word}")

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def is_floating(self, x: Array) -> bool:
        return x.dtype in _FLOATS

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if isinstance(x, tf.RaggedTensor):
            return "a ragged tensor", "x.to_tensor(), with valid_lens,"
        if isinstance(x, (tf.SparseTensor, tf.IndexedSlices)):
            return f"a sparse tensor ({type(x).__name__})", "tf.sparse.to_dense(x)"
        if x.shape.rank is None:
            return "a tensor of unknown rank", "tf.ensure_shape(x, ...)"
        if x.shape.rank > _MOST_AXES:
            return f"one of {x.shape.rank} axes (TensorFlow takes {_MOST_AXES} here)", "tf.reshape(x, ...)"
        return None

    def shape(self, x: Array) -> tuple[Any, ...]:
        known = tuple(x.shape)
        return (
            known
            if None not in known
            else tuple(Length(tf.shape(x)[i]) if n is None else n for i, n in enumerate(known))
        )

    def assert_shape(self, x: Array, shapes: Sequence[tuple[str, Array, Sequence[Sequence[Any]]]]) -> Array:
        found = [(name, self.shape(tf.convert_to_tensor(array)), allowed) for name, array, allowed in shapes]
        return lengths.assert_shape(x, found)

    def device(self, x: Array) -> str:
        # In a graph the runtime places and copies.
        if not tf.executing_eagerly():
            return "graph"
        kind, _, number = x.device.rpartition("device:")[2].lower().partition(":")
        return kind if kind == "cpu" else f"{kind}:{number}"

    def astype(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, dtype)

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        if isinstance(x, (tf.Tensor, tf.Variable)):
            x = tf.convert_to_tensor(x)
        else:
            x = tf.constant(importable(np.asarray(x)))
        return x if dtype is None else tf.cast(x, dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        found: Any
        if _is_near(x):
            found = np.asarray(x) if len(x.shape) else np.asarray(x.numpy())
        elif isinstance(x, tf.Variable):
            found = x.numpy() if tf.executing_eagerly() else None
        else:
            found = tf.get_static_value(x) if isinstance(x, tf.Tensor) and not hasattr(x, "numpy") else None
        if found is None:
            return None
        return found.astype(np.float32) if found.dtype.name == "bfloat16" else np.asarray(found)

    def has_cpu_buffer(self, x: Array) -> bool:
        return _is_near(x) or graphs.calls_back(x)

    def is_plain(self, *arrays: Array) -> bool:
        return all(map(_is_near, arrays)) and tf.executing_eagerly() and not self.needs_grad(*arrays)

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        # A single bfloat16 comes as a scalar that has no buffer.
        found = np.asarray(x) if len(x.shape) else np.asarray(x.numpy())
        return found.view(np.uint16) if found.dtype.itemsize == 2 else found

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        if x.size and x.ctypes.data % _ALIGNED == 0 and x.flags.c_contiguous and x.flags.writeable:
            found = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
        else:
            found = tf.constant(x)
        return found if found.dtype.name == dtype else tf.bitcast(found, dtype)

    def needs_grad(self, *arrays: Array) -> bool:
        return gradients.needs_grad(*arrays)

    def needs_host_callback(self, *arrays: Array) -> bool:
        return graphs.calls_back(*arrays)

    def host_callback(
        self,
        function: Callable[..., Sequence[HostArray]],
        results: Sequence[tuple[tuple[Any, ...], str]],
        arrays: Sequence[Array],
        otherwise: Callable[..., tuple[Array, ...]],
    ) -> tuple[Array, ...]:
        return graphs.host_callback(function, results, [tf.convert_to_tensor(x) for x in arrays], otherwise)

    def at_run_time(self, host: Backend) -> Backend:
        return _Host()

    def threads(self, own: int) -> int:
        return _threads(own)

    def number(self, x: Array) -> float | None:
        return float(x) if hasattr(x, "numpy") else None

    def zeros(self, shape: Sequence[int], like: Array, dtype: str | None = None) -> Array:
        return tf.zeros(sizes(shape), dtype or like.dtype)

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        return tf.fill(sizes(shape), tf.cast(value, dtype or like.dtype))

    def positions(self, start: int, count: int, like: Array) -> Array:
        return tf.range(tf.cast(count, tf.int64)) + tf.cast(start, tf.int64)

    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        begin: list[Any] = [0] * len(x.shape)
        size = list(self.shape(x))
        begin[axis], size[axis] = start, count
        return tf.slice(x, sizes(begin), sizes(size))

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        # A roll by `start` has static shapes where `start` is traced, as XLA needs them.
        axis = axis % len(x.shape)
        rest = self.shape(x)[axis] - self.shape(block)[axis]
        padded = tf.pad(block, [sizes((0, rest if i == axis else 0)) for i in range(len(x.shape))])
        return x + tf.roll(padded, sizes((start,))[0], axis)

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        return tf.concat(list(arrays), axis)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        missing = iter([n for n in self.shape(x) if isinstance(n, Unknown)])
        # Axes keep their order: the unknown ones of the result are those of `x`.
        return tf.reshape(x, sizes([next(missing) if n is None else n for n in shape]))

    def broadcast_to(self, x: Array, shape: Sequence[int]) -> Array:
        return tf.broadcast_to(x, sizes(shape))

    def swap_axes(self, x: Array, first: int, second: int) -> Array:
        order = list(range(len(x.shape)))
        order[first], order[second] = order[second], order[first]
        return tf.transpose(x, order)

    def expand_dims(self, x: Array, axis: int) -> Array:
        return tf.expand_dims(x, axis)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        return tf.gather(x, indices, axis=axis)

    def matmul(self, a: Array, b: Array) -> Array:
        return tf.matmul(a, b)

    def matrix_transpose(self, x: Array) -> Array:
        return tf.linalg.matrix_transpose(x)

    def exp(self, x: Array) -> Array:
        return tf.exp(x)

    def log(self, x: Array) -> Array:
        return tf.math.log(x)

    def tanh(self, x: Array) -> Array:
        return tf.tanh(x)

    def sigmoid(self, x: Array) -> Array:
        return tf.sigmoid(x)

    def erf(self, x: Array) -> Array:
        return tf.math.erf(x)

    def sqrt(self, x: Array) -> Array:
        return tf.sqrt(x)

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def maximum(self, a: Array, b: Array) -> Array:
        return tf.maximum(a, tf.cast(b, a.dtype))

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array:
        dtype = next((x.dtype for x in (a, b) if hasattr(x, "dtype")), tf.float32)
        return tf.where(condition, *(x if hasattr(x, "dtype") else tf.constant(x, dtype) for x in (a, b)))

    def equal(self, a: Array, b: Array) -> Array:
        return tf.equal(a, b)

    def logical_and(self, a: Array, b: Array) -> Array:
        # As a choice: the logical operations of TensorFlow Lite broadcast four axes, and end the process at five.
        return tf.where(a, b, False)

    def logical_or(self, a: Array, b: Array) -> Array:
        return tf.where(a, True, b)

    def isfinite(self, x: Array) -> Array:
        return tf.math.is_finite(x)

    def isnan(self, x: Array) -> Array:
        return tf.math.is_nan(x)

    def sum(self, x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
        return tf.reduce_sum(x, axis, keepdims)

    def sum_to_length(self, x: Array, axis: int, length: Any) -> Array:
        # Of an axis of 1 or of all entries, the others belong to each: either way XLA knows the shape.
        shape = sizes(self.shape(x))
        (length,) = sizes((length,))
        parts = tf.reshape(x, [*shape[:axis], length, shape[axis] // tf.maximum(length, 1), *shape[axis + 1 :]])
        return tf.reduce_sum(parts, axis + 1)

    def max(self, x: Array, axis: int, keepdims: bool = False) -> Array:
        return tf.reduce_max(x, axis, keepdims)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        values, index = tf.math.top_k(x, k)
        return values, tf.cast(index, tf.int64)

    def any(self, x: Array, axis: int, keepdims: bool = False) -> Array:
        return tf.reduce_any(x, axis, keepdims)

    def low_32_bits(self, x: Array) -> Array:
        return tf.bitwise.bitwise_and(x, tf.constant(0xFFFFFFFF, tf.int64))

    def shift_right(self, x: Array, bits: int) -> Array:
        return tf.bitwise.right_shift(x, tf.constant(bits, x.dtype))

    def eager_scope(self) -> contextlib.AbstractContextManager[Any]:
        return tf.init_scope()  # type: ignore[no-any-return]  # TensorFlow's own

    def numeric_scope(self) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        if tf.executing_eagerly():
            return function(carry) if condition else carry
        done = tf.cond(condition, lambda: leaves_of(function(carry)), lambda: leaves_of(carry))
        return rebuilt(carry, list(done))

    def loop(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        if tf.executing_eagerly() or (isinstance(count, int) and count < 2):
            for i in range(count):
                carry = body(i, carry)
            return carry

        def step(i: Array, *leaves: Array) -> tuple[Array, ...]:
            return i + 1, *leaves_of(body(i, rebuilt(carry, list(leaves))))

        limit = tf.cast(getattr(count, "value", count), tf.int64)
        start = tf.constant(0, tf.int64)
        # One iteration at a time: what several would hold at once is what the tiles are there to avoid.
        done = tf.while_loop(lambda i, *_: i < limit, step, (start, *leaves_of(carry)), parallel_iterations=1)
        return rebuilt(carry, list(done[1:]))

    def map_tiles(self, count: int, body: Callable[[Any], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        if tf.executing_eagerly() or count < 2:
            return [body(i) for i in range(count)]
        first = body(0)
        found = [tf.TensorArray(x.dtype, count, element_shape=x.shape).write(0, x) for x in first]

        def step(i: Array, *arrays: Any) -> tuple[Any, ...]:
            place = tf.cast(i, tf.int32)
            return i + 1, *(array.write(place, x) for array, x in zip(arrays, body(i), strict=True))

        second = tf.constant(1, tf.int64)
        done = tf.while_loop(lambda i, *_: i < count, step, (second, *found), parallel_iterations=1)
        return list(zip(*(tf.unstack(array.stack(), count) for array in done[1:]), strict=True))

    def known_finite(self, *arrays: Array) -> bool:
        return all(hasattr(x, "numpy") and bool(tf.reduce_all(tf.math.is_finite(x))) for x in arrays)

    def differentiable(self, run: DifferentiableOp, operands: Sequence[Array]) -> tuple[Array, ...]:
        return gradients.differentiable(run, operands)

    def vjp(
        self, function: Callable[..., Array], inputs: Sequence[Array]
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        return gradients.vjp(function, inputs)

    def stop_gradient(self, x: Array) -> Array:
        return tf.stop_gradient(x)

    def draw_seed(self, like: Array) -> Any:
        seed = tf.random.uniform((), maxval=2**62, dtype=tf.int64)
        return int(seed) if tf.executing_eagerly() else SeedHalves(self.low_32_bits(seed), self.shift_right(seed, 32))

    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in arrays)


class _Host(NumpyBackend):
    """NumPy's words inside a graph's call."""

    def threads(self, own: int) -> int:
        return _threads(own)


def _threads(own: int) -> int:
    return tf.config.threading.get_intra_op_parallelism_threads() or own


def _is_near(x: Any) -> bool:
    """Whether `x` has numbers now, in this machine's memory."""
    return isinstance(x, tf.Tensor) and hasattr(x, "numpy") and x.device.endswith("CPU:0")
