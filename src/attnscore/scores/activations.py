"""Activations of additive scores, each with its derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from attnscore.backends.base import Array, Backend
from attnscore.base.arguments import check_choice, check_number


@dataclass(frozen=True)
class Activation:
    """An elementwise function, and its derivative as a function of input and output; name and slope decide equality."""

    name: str
    value: Callable[[Backend, Array], Array] = field(compare=False)
    slope: Callable[[Backend, Array, Array], Array] = field(compare=False)
    negative_slope: float = 0.0
    """Slope of leaky_relu below 0."""


def _gelu(ops: Backend, x: Array) -> Array:
    return x * 0.5 * (1 + ops.erf(x * math.sqrt(0.5)))


def _gelu_slope(ops: Backend, x: Array, y: Array) -> Array:
    density = ops.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + ops.erf(x * math.sqrt(0.5))) + x * density


def _silu_slope(ops: Backend, x: Array, y: Array) -> Array:
    gate = ops.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _step(ops: Backend, x: Array, below: float) -> Array:
    """Return 1 above 0 and `below` elsewhere, also at infinity; NaN stays NaN."""
    return ops.where(x > 0, 1.0, ops.where(x <= 0, below, x))


def _leaky_relu(negative_slope: float) -> Activation:
    return Activation(
        "leaky_relu",
        lambda ops, x: ops.where(x > 0, x, x * negative_slope),
        lambda ops, x, y: _step(ops, x, negative_slope),
        negative_slope,
    )


_TABLE = {
    activation.name: activation
    for activation in (
        Activation("tanh", lambda ops, x: ops.tanh(x), lambda ops, x, y: 1 - y * y),
        Activation("sigmoid", lambda ops, x: ops.sigmoid(x), lambda ops, x, y: y * (1 - y)),
        Activation("relu", lambda ops, x: ops.where(x <= 0, 0.0, x), lambda ops, x, y: _step(ops, x, 0.0)),
        Activation("silu", lambda ops, x: x * ops.sigmoid(x), _silu_slope),
        Activation("gelu", _gelu, _gelu_slope),
    )
}
NAMES = (*_TABLE, "leaky_relu")


def activation(name: str, negative_slope: float = 0.01) -> Activation:
    """Return the activation called `name`; leaky_relu alone reads `negative_slope`."""
    check_choice("activation", name, NAMES)
    return _leaky_relu(check_number("negative_slope", negative_slope)) if name == "leaky_relu" else _TABLE[name]
