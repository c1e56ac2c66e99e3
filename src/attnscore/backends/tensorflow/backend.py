"""TensorFlow: array operations, eager and in graphs.

- Eager arrays on the CPU are read without a copy (``numpy.asarray`` shares their memory). The result of native code
  becomes a tensor without a copy if its address is aligned as TensorFlow requires, with one otherwise.
- In graphs tensors are symbolic and loops are ``tf.while_loop``. A ``tf.function`` calls native code where it can
  (``graphs.py``); under XLA, in exported models and on other devices it uses TensorFlow's operations.
- Sizes that a graph learns when it runs are in ``dynamic_shapes.py``, the gradient hook in ``gradients.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from attnscore.backends.base import Array, Backend, HostArray, Modules, SeedHalves, Signature, importable
from attnscore.backends.numpy import NumpyBackend, is_finite
from attnscore.backends.tensorflow import dynamic_shapes, gradients, graphs, private
from attnscore.backends.tensorflow.dynamic_shapes import sizes
from attnscore.base.layout import Unknown, is_unknown
from attnscore.base.threads import get_num_threads
from attnscore.errors import FrameworkError, message

# Bytes. Eigen loads aligned vectors: TensorFlow 2.21 aborts the process at a misaligned tensor.
_ALIGNMENT = 64
# TensorFlow broadcasts and slices 8 axes at most, and the canonical layout adds one.
_MAX_AXES = 7


@functools.cache
def _intra_op_threads() -> int:
    # Cached, as it is fixed once there is a tensor, and TensorFlow takes 25 us to return it.
    return int(tf.config.threading.get_intra_op_parallelism_threads())


def _threads() -> int:
    return _intra_op_threads() or get_num_threads()


class TensorFlowBackend(Backend):
    """Array operations of TensorFlow."""

    name = "tensorflow"
    has_autodiff = True
    has_programs = True
    has_slow_callbacks = True
    fallbacks = private.FALLBACKS
    xp = Modules(tf.math, tf, tf.experimental.numpy)
    needs_grad = staticmethod(gradients.needs_grad)
    is_recorded = staticmethod(gradients.is_recorded)
    needs_host_callback = staticmethod(graphs.calls_back)
    host_callback = staticmethod(graphs.host_callback)
    differentiable = staticmethod(gradients.differentiable)
    record = staticmethod(gradients.record)
    vjp = staticmethod(gradients.vjp)
    shape = staticmethod(dynamic_shapes.shape)
    assert_shape = staticmethod(dynamic_shapes.assert_shape)
    broadcast_to: Any = staticmethod(dynamic_shapes.broadcast_to)
    stop_gradient = staticmethod(tf.stop_gradient)
    eager_scope = staticmethod(tf.init_scope)
    threads = staticmethod(_threads)
    matrix_transpose = staticmethod(tf.linalg.matrix_transpose)
    astype = staticmethod(tf.cast)
    concat = staticmethod(tf.concat)
    sum = staticmethod(tf.reduce_sum)
    max = staticmethod(tf.reduce_max)
    any = staticmethod(tf.reduce_any)
    equal = staticmethod(tf.equal)
    isfinite = staticmethod(tf.math.is_finite)
    isnan = staticmethod(tf.math.is_nan)

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def unsupported(self, x: Array) -> tuple[str, str] | None:
        if isinstance(x, tf.RaggedTensor):
            return "a ragged tensor", "x.to_tensor(), with valid_lens,"
        if isinstance(x, (tf.SparseTensor, tf.IndexedSlices)):
            return f"a sparse tensor ({type(x).__name__})", "tf.sparse.to_dense(x)"
        if x.shape.rank is None:
            return "a tensor of unknown rank", "tf.ensure_shape(x, ...)"
        if x.shape.rank > _MAX_AXES:
            return f"one of {x.shape.rank} axes (TensorFlow takes {_MAX_AXES} here)", "tf.reshape(x, ...)"
        return None

    def array_signature(self, x: Array) -> Hashable | None:
        return super().array_signature(x) if x.shape.is_fully_defined() else None

    def device(self, x: Array) -> str:
        # In a graph the runtime chooses devices and copies.
        if not tf.executing_eagerly():
            return "graph"
        kind, _, number = x.device.rpartition("device:")[2].lower().partition(":")
        return kind if kind == "cpu" else f"{kind}:{number}"

    def is_accelerated(self, x: Array) -> bool:
        device = self.device(x)
        return bool(tf.config.list_logical_devices("GPU")) if device == "graph" else super().is_accelerated(x)

    def asarray(self, x: Any, like: Array, dtype: str | None = None) -> Array:
        if isinstance(x, (tf.Tensor, tf.Variable)):
            x = tf.convert_to_tensor(x)
        else:
            x = tf.constant(importable(np.asarray(x)))
        return x if dtype is None else tf.cast(x, dtype)

    def host(self, x: Any) -> np.ndarray[Any, Any] | None:
        values: Any
        if _is_eager_on_cpu(x):
            # np.asarray fails on a bfloat16 scalar.
            values = np.asarray(x) if len(x.shape) else np.asarray(x.numpy())
        elif isinstance(x, tf.Variable):
            values = x.numpy() if tf.executing_eagerly() else None
        else:
            # A symbolic tensor may be a constant of its graph.
            values = tf.get_static_value(x) if isinstance(x, tf.Tensor) and not hasattr(x, "numpy") else None
        if values is None:
            return None
        return values.astype(np.float32) if values.dtype.name == "bfloat16" else np.asarray(values)

    def check_can_mask(self, query_len: Any, key_len: Any) -> None:
        if (is_unknown(query_len) or is_unknown(key_len)) and graphs.is_for_lite():
            # Its interpreter would end the process that runs the model.
            expected = "known lengths of queries and keys beside a mask, in a program for TensorFlow Lite"
            hint = "keras.Input((100, dim)) has them; model.export takes any length"
            refusal = FrameworkError(message("mask", expected, f"query {query_len}, key {key_len}", hint=hint))
            # The converter of Keras models catches the error, and then fails with a TypeError that does not name it.
            warnings.warn(str(refusal), stacklevel=2)
            raise refusal

    def check_can_draw(self) -> None:
        if graphs.is_recomputed():
            expected = "a seed under tf.recompute_grad and keras.remat, whose gradient would draw another dropout mask"
            hint = "draw it outside of the function that is recomputed; a Keras layer that is recomputed has no dropout"
            raise FrameworkError(message("seed", expected, None, hint=hint))

    def needs_one_tile(self) -> bool:
        # The interpreter of TensorFlow Lite has no slices of more than five axes, with which a loop reads its tiles.
        return not tf.executing_eagerly() and graphs.is_for_lite()

    def has_cpu_buffer(self, x: Array) -> bool:
        return _is_eager_on_cpu(x) or graphs.calls_back(x)

    def is_plain(self, *arrays: Array) -> bool:
        if not tf.executing_eagerly():
            return False
        for x in arrays:  # a generator takes a microsecond
            if not _is_eager_on_cpu(x):
                return False
        # Forward mode is no tape: TensorFlow's own operations carry tangents.
        return not gradients.has_tangents(arrays)

    def memory(self, x: Array) -> np.ndarray[Any, Any]:
        array = _array(x)
        return array.view(np.uint16) if array.itemsize == 2 else array

    def signature(self, arrays: Sequence[Array]) -> Signature | None:
        # Eager tensors are in C order. Reading the layout of NumPy's array takes half the time of reading the tensor's.
        if not self.is_plain(*arrays):
            return None
        arrays_of_numpy = [_array(x) for x in arrays]
        return tuple([(x.shape, x.dtype) for x in arrays_of_numpy])

    def from_memory(self, x: np.ndarray[Any, Any], dtype: str, like: Array) -> Array:
        # NumPy exports no read-only array by DLPack, and TensorFlow takes no strides from it.
        if x.ctypes.data % _ALIGNMENT or not x.flags.c_contiguous or not x.flags.writeable:
            x = _aligned(x)
        tensor = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
        return tensor if x.itemsize != 2 or tensor.dtype.name == dtype else tf.bitcast(tensor, dtype)

    def at_run_time(self, host: Backend) -> Backend:
        return _CallbackBackend()

    def number(self, x: Array) -> float | None:
        return float(x) if hasattr(x, "numpy") else None

    def full(self, shape: Sequence[int], value: float, like: Array, dtype: str | None = None) -> Array:
        if 0 in shape and not tf.executing_eagerly():
            # No constant: TensorFlow's optimiser divides by zero, and ends the process, at the product of an empty
            # constant and an empty tensor of a smaller shape.
            return tf.reshape(tf.cast(tf.reshape(like, (-1,))[:0], dtype or like.dtype), sizes(shape))
        return tf.fill(sizes(shape), tf.cast(value, dtype or like.dtype))

    def positions(self, start: int, count: int, like: Array) -> Array:
        return tf.range(tf.cast(count, tf.int64)) + tf.cast(start, tf.int64)

    def slice_axis(self, x: Array, axis: int, start: int, count: int) -> Array:
        begin: list[Any] = [0] * len(x.shape)
        size = list(self.shape(x))
        begin[axis], size[axis] = start, count
        return tf.slice(x, sizes(begin), sizes(size))

    def add_at(self, x: Array, axis: int, start: int, block: Array) -> Array:
        # `block` is padded to the size of `x` and then rolled to `start`: widths of padding that depend on a symbolic
        # start would give no static shape, which XLA needs.
        axis = axis % len(x.shape)
        rest = self.shape(x)[axis] - self.shape(block)[axis]
        padded = tf.pad(block, [sizes((0, rest if i == axis else 0)) for i in range(len(x.shape))])
        return x + tf.roll(padded, sizes((start,))[0], axis)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        # None in `shape` is an unknown size: canonical axes keep their order, so it is the next unknown size of `x`.
        unknown_sizes = iter([n for n in self.shape(x) if isinstance(n, Unknown)])
        return tf.reshape(x, sizes([next(unknown_sizes) if n is None else n for n in shape]))

    def pair_axes(self, query: Array, key: Array) -> tuple[Array, Array]:
        query, key = dynamic_shapes.broadcast_together(super().pair_axes(query, key))
        return query, key

    def add(self, a: Array, b: Array) -> Array:
        a, b = dynamic_shapes.broadcast_together((a, b))
        return a + b

    def swap_axes(self, x: Array, first: int, second: int) -> Array:
        order = list(range(len(x.shape)))
        order[first], order[second] = order[second], order[first]
        return tf.transpose(x, order)

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        return tf.gather(x, indices, axis=axis)

    def matmul(self, a: Array, b: Array) -> Array:
        # Beside a last axis of size 0 or unknown size, -1 below is undetermined.
        if len(b.shape) > 2 or len(a.shape) < 3 or not a.shape[-1]:
            return tf.matmul(a, b)
        # As one product: `tf.matmul` computes one for each leading axis, each on one thread, and their gradients, which
        # it adds up (additive (32, 8, 8), h 128, in a graph: 95 us in place of 19, and 295 for the gradients, not 15).
        if not tf.executing_eagerly():
            flat = tf.matmul(tf.reshape(a, (-1, a.shape[-1])), b)
            return tf.reshape(flat, sizes([*self.shape(a)[:-1], b.shape[-1]]))
        # Reshaping takes 15 us more, and `tf.einsum` 30.
        a, b, rows = tf.convert_to_tensor(a), tf.convert_to_tensor(b), "abcdefgh"[: len(a.shape) - 1]
        return tf.raw_ops.Einsum(inputs=(a, b), equation=f"{rows}y,yz->{rows}z")

    def softmax(self, x: Array) -> Array:
        if len(x.shape) <= 5:
            return tf.nn.softmax(x)
        # The softmax of oneDNN, which TensorFlow takes on CPUs, has five axes at most.
        shape = sizes(self.shape(x))
        return tf.reshape(tf.nn.softmax(tf.reshape(x, sizes([tf.reduce_prod(shape[:-1]), shape[-1]]))), shape)

    def maximum(self, a: Array, b: Array) -> Array:
        return tf.maximum(a, tf.cast(b, a.dtype))

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array:
        dtype = next((x.dtype for x in (a, b) if hasattr(x, "dtype")), tf.float32)
        values = (x if hasattr(x, "dtype") else tf.constant(x, dtype) for x in (a, b))
        return tf.where(*dynamic_shapes.broadcast_together((tf.convert_to_tensor(condition), *values)))

    def compares_identities(self) -> bool:
        return type(tf.zeros(()) == 0) is bool

    def logical_and(self, a: Array, b: Array) -> Array:
        # tf.where, because the logical operations of TensorFlow Lite broadcast 4 axes and abort at 5.
        return self.where(a, tf.convert_to_tensor(b), False)

    def logical_or(self, a: Array, b: Array) -> Array:
        return self.where(a, True, tf.convert_to_tensor(b))

    def sum_to_length(self, x: Array, axis: int, length: Any) -> Array:
        # The length, 1 or the size of the axis (which may be 0), is known when the graph runs: `x` is the gradient of
        # an array that may be broadcast. One reshape and sum serves both, without branches of different shapes.
        shape = sizes(self.shape(x))
        (length,) = sizes((length,))
        parts = tf.reshape(x, [*shape[:axis], length, shape[axis] // tf.maximum(length, 1), *shape[axis + 1 :]])
        return tf.reduce_sum(parts, axis + 1)

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        values, index = tf.math.top_k(x, k)
        return values, tf.cast(index, tf.int64)

    def low_32_bits(self, x: Array) -> Array:
        return tf.bitwise.bitwise_and(x, tf.constant(0xFFFFFFFF, tf.int64))

    def shift_right(self, x: Array, bits: int) -> Array:
        return tf.bitwise.right_shift(x, tf.constant(bits, x.dtype))

    def cond(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        if tf.executing_eagerly():
            return function(carry) if condition else carry
        return tf.cond(condition, lambda: function(carry), lambda: carry)

    def cond_rarely(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        if tf.executing_eagerly():
            return self.cond(condition, function, carry)
        leaves = graphs.rarely(condition, lambda: tf.nest.flatten(function(carry)), tf.nest.flatten(carry))
        return tf.nest.pack_sequence_as(carry, leaves)

    def compiles_each_shape(self) -> bool:
        return not tf.executing_eagerly()

    def loop(self, count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        if tf.executing_eagerly() or (isinstance(count, int) and count < 2):
            return super().loop(count, body, carry)

        def step(i: Array, carry: Any) -> tuple[Array, Any]:
            return i + 1, body(i, carry)

        limit = tf.cast(getattr(count, "value", count), tf.int64)
        start = tf.constant(0, tf.int64)
        # Parallel iterations would hold several tiles at once. XLA differentiates only loops with a known maximum.
        largest_count = sizes((count,))[0] if graphs.is_for_xla() else None
        return tf.while_loop(
            lambda i, _: i < limit, step, (start, carry), parallel_iterations=1, maximum_iterations=largest_count
        )[1]

    def map_tiles(self, count: int, body: Callable[[Any], tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        if tf.executing_eagerly() or count < 2:
            return [body(i) for i in range(count)]
        # The first tile tells the shapes of the others.
        first = body(0)
        types = tuple(tf.TensorSpec(x.shape, x.dtype) for x in first)
        indices = tf.range(1, count, dtype=tf.int64)
        # do_not_convert: map_fn would have AutoGraph rewrite each function that the body calls.
        function = tf.autograph.experimental.do_not_convert(lambda i: tuple(body(i)))
        others = tf.map_fn(function, indices, fn_output_signature=types, parallel_iterations=1)
        return [first, *zip(*(tf.unstack(x, count - 1) for x in others), strict=True)]

    def known_finite(self, x: Array) -> bool:
        if _is_eager_on_cpu(x):
            return is_finite(_array(x))
        return hasattr(x, "numpy") and tf.executing_eagerly() and bool(tf.reduce_all(tf.math.is_finite(x)))

    def product_of_rows(self, x: Array, matrix: Array, bias: Array | None = None) -> Array | None:
        # Not in rewritten graphs, where TensorFlow drops a custom gradient, nor under XLA, which fuses the zeros that
        # otherwise replace non-finite rows.
        if len(matrix.shape) != 2 or x.dtype != matrix.dtype or not graphs.calls_back(x):
            return None
        return gradients.product_of_rows(x, matrix, bias)

    def draw_seed(self, like: Array) -> Any:
        self.check_can_draw()
        seed = tf.random.uniform((), maxval=2**62, dtype=tf.int64)
        return int(seed) if tf.executing_eagerly() else SeedHalves(self.low_32_bits(seed), self.shift_right(seed, 32))


class _CallbackBackend(NumpyBackend):
    """NumPy's operations inside a host callback of a graph, with TensorFlow's number of threads."""

    wants_aligned = True  # TensorFlow copies misaligned results of a callback
    threads = staticmethod(_threads)


def _array(x: Any) -> HostArray:
    """Return the memory of an eager tensor on the CPU as NumPy's array of the same dtype."""
    try:
        return np.asarray(x)
    except ValueError:  # a bfloat16 scalar has no buffer
        return np.asarray(x.numpy())


def _aligned(x: HostArray) -> HostArray:
    """Return a copy in C order at an address that TensorFlow shares; `tf.constant` copies in twice the time."""
    whole = np.empty(x.nbytes + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    copy = whole[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def _is_eager_on_cpu(x: Any) -> bool:
    """Whether `x` is an eager tensor on the CPU."""
    return isinstance(x, tf.Tensor) and hasattr(x, "numpy") and x.device.endswith("CPU:0")
