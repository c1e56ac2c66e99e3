"""Custom scores with functions in Triton's language, one of each kind, and some whose functions are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

import attnscore as ats


@triton.jit
def squared(x, gain, offset):
    return gain * (x - offset) * (x - offset)


@triton.jit
def squared_gradient(x, gain, offset):
    return 2.0 * gain * (x - offset), (x - offset) * (x - offset)


@triton.jit
def student(x, rate):
    return -tl.log(1.0 + rate * x)


@triton.jit
def student_gradient(x, rate):
    return -rate / (1.0 + rate * x), -x / (1.0 + rate * x)


@triton.jit
def smooth_distance(a, b, width, rate):
    return -rate * (tl.sqrt((a - b) * (a - b) + width * width) - width)


@triton.jit
def smooth_distance_gradient(a, b, width, rate):
    root = tl.sqrt((a - b) * (a - b) + width * width)
    slope = -rate * (a - b) / root
    return slope, -slope, -rate * (width / root - 1.0), width - root


@triton.jit
def smooth_distance_slopes(a, b, width, rate):
    root = tl.sqrt((a - b) * (a - b) + width * width)
    return -rate * (a - b) / root, rate * (a - b) / root, width - root


def per_head(ops: Any, x: Any, query: Any, key: Any, axes: int) -> Any:
    """A parameter of each head on the axes of a tile."""
    own = tuple(x.shape[len(x.shape) - axes :])
    if len(x.shape) == axes:
        return x
    return ops.reshape(x, (key.shape[-4], query.shape[-3], *(1,) * (2 - axes), *own))


@dataclass(frozen=True, eq=False)
class Square:
    """gain (q . k - offset)^2, of a learned gain and a number."""

    gain: Any
    offset: float = 0.5

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        x = ops.matmul(query, ops.matrix_transpose(key)) - self.offset
        return per_head(ops, self.gain, query, key, 0) * x * x

    def triton_tile(self) -> ats.TritonTile:
        return ats.TritonTile("product", squared, squared_gradient, ("gain", "offset"))


@dataclass(frozen=True, eq=False)
class Student:
    """-log(1 + rate |q - k|^2), with a rate for each head."""

    rate: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        difference = ops.expand_dims(query, -2) - ops.expand_dims(key, -3)
        return -ops.log(1.0 + per_head(ops, self.rate, query, key, 0) * ops.sum(difference * difference, axis=-1))

    def triton_tile(self) -> ats.TritonTile:
        return ats.TritonTile("squared_distance", student, student_gradient, ("rate",))


@dataclass(frozen=True, eq=False)
class SmoothDistance:
    """-sum_d rate_d (sqrt((q_d - k_d)^2 + width^2) - width), with a rate for each channel, and head or not."""

    rate: Any
    width: Any = 0.3

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        difference = ops.expand_dims(query, -2) - ops.expand_dims(key, -3)
        rate, width = self.rate, self.width
        if len(rate.shape) > 1:
            rate = ops.reshape(rate, (key.shape[-4], query.shape[-3], 1, 1, rate.shape[-1]))
        return -ops.sum(rate * (ops.sqrt(difference * difference + width * width) - width), axis=-1)

    def triton_tile(self) -> ats.TritonTile:
        gradient = smooth_distance_slopes if isinstance(self.width, float) else smooth_distance_gradient
        return ats.TritonTile("channels", smooth_distance, gradient, ("width",), channel_parameters=("rate",))


@triton.jit
def log_ratio(a, b):
    """Not finite for the zeros that stand past the last position."""
    ratio = tl.log(a * a) - tl.log(b * b)
    return -0.01 * ratio * ratio


@triton.jit
def log_ratio_gradient(a, b):
    slope = 0.04 * (tl.log(a * a) - tl.log(b * b))
    return -slope / a, slope / b


class LogRatio:
    """-0.01 sum_d (log q_d^2 - log k_d^2)^2."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        logs = [ops.log(x * x) for x in (query, key)]
        ratio = ops.expand_dims(logs[0], -2) - ops.expand_dims(logs[1], -3)
        return -0.01 * ops.sum(ratio * ratio, axis=-1)

    def triton_tile(self) -> ats.TritonTile:
        return ats.TritonTile("channels", log_ratio, log_ratio_gradient)


@triton.jit
def bounded(x):
    """Finite for an infinite product, which counts as NaN all the same."""
    return 1.0 / (1.0 + x * x)


@triton.jit
def bounded_gradient(x):
    return (-2.0 * x / ((1.0 + x * x) * (1.0 + x * x)),)


class OnlyTile:
    """1 / (1 + (q . k)^2), without functions in Triton."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        x = ops.matmul(query, ops.matrix_transpose(key))
        return 1.0 / (1.0 + x * x)


class Bounded(OnlyTile):
    """The same with functions."""

    def triton_tile(self) -> ats.TritonTile:
        return ats.TritonTile("product", bounded, bounded_gradient)


@triton.jit
def of_rows(x):
    return tl.sum(x, 1)


@triton.jit
def half_gradient(x):
    return (-x / ((1.0 + x * x) * (1.0 + x * x)),)


@triton.jit
def double(x):
    return 2.0 * bounded(x)


@triton.jit
def not_a_tuple(x):
    return x


@triton.jit
def nothing(x):
    return ()


@dataclass(frozen=True, eq=False)
class Given(Bounded):
    """`Bounded` with what `triton_tile` returns given."""

    found: Any
    rate: Any = 1.0

    def triton_tile(self) -> Any:
        return self.found


class Wrong(Bounded):
    """`Bounded` with half of its gradient."""

    def triton_tile(self) -> ats.TritonTile:
        return ats.TritonTile("product", bounded, half_gradient)


# Functions whose results have a wrong shape, and what is said of them.
WRONG_RESULTS = (
    ((of_rows, bounded_gradient), "value of a custom score has to return one number"),
    ((bounded, not_a_tuple), "gradient of a custom score has to return a tuple"),
    ((bounded, nothing), "gradient of a custom score has to return a derivative for each"),
)
