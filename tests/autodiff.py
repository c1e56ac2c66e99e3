"""Reverse-mode differentiation over NumPy arrays of any float width, long double included.

No framework differentiates in long double, and the reference for float64 inputs must be one precision higher. The
method names match torch tensors, so the formulas in ``oracle`` are written once and run on both: in torch they
are the plain version in the inputs' own dtype, here they are the reference.

``gradients(..., absolute=True)`` multiplies absolute values along every path: the sum of the absolute values of all
terms that a gradient is the sum of, which is the scale of its rounding error.
"""

from __future__ import annotations

import numpy as np


def _pi(dtype):
    return dtype.type("3.14159265358979323846264338327950288")


def erf(x):
    """The error function in the width of `x`: a series of positive terms, so nothing cancels."""
    small = np.minimum(np.abs(x), 7)
    term = total = small
    for n in range(1, 200):
        term = term * 2 * small * small / (2 * n + 1)
        total = total + term
    return np.sign(x) * np.minimum(2 / np.sqrt(_pi(x.dtype)) * np.exp(-small * small) * total, 1)


def sum_to(x, shape):
    """Undo a broadcast by summing."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    axes = tuple(i for i, length in enumerate(shape) if length == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


class Var:
    """An array that remembers what it was computed from: (parent, pull) where ``pull(grad, A)`` is the parent's share.

    `A` is the identity, or the absolute value; every pull multiplies with ``A(factor)``.
    """

    __array_ufunc__ = None  # NumPy numbers on the left leave the arithmetic to us

    def __init__(self, data, *parents):
        self.data = data
        self.parents = parents

    @property
    def shape(self):
        return self.data.shape

    def detach(self):
        return Var(self.data)

    def _of(self, other):
        return other if isinstance(other, Var) else Var(self.data.dtype.type(other))

    def __add__(self, other):
        other = self._of(other)
        return Var(self.data + other.data, (self, lambda g, A: g), (other, lambda g, A: g))

    def __mul__(self, other):
        other = self._of(other)
        return Var(
            self.data * other.data,
            (self, lambda g, A: g * A(other.data)),
            (other, lambda g, A: g * A(self.data)),
        )

    def __truediv__(self, other):
        other = self._of(other)
        ratio = self.data / other.data
        return Var(
            ratio,
            (self, lambda g, A: g * A(1 / other.data)),
            (other, lambda g, A: g * A(-ratio / other.data)),
        )

    def __matmul__(self, other):
        a, b = self.data, other.data
        return Var(
            a @ b,
            (self, lambda g, A: g @ A(b).swapaxes(-1, -2)),
            (other, lambda g, A: A(a).swapaxes(-1, -2) @ g),
        )

    __radd__, __rmul__ = __add__, __mul__

    def __rtruediv__(self, other):
        return self._of(other) / self

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        return self + -self._of(other)

    def __rsub__(self, other):
        return -self + other

    def __gt__(self, other):
        return self.data > other

    def __ne__(self, other):
        return self.data != other

    __hash__ = None

    def _map(self, value, slope, terms=None):
        """`terms`: the absolute values of what `slope` is the sum of, where that cancels."""
        return Var(value, (self, lambda g, A: g * (terms if terms is not None and A is np.abs else A(slope))))

    def exp(self):
        value = np.exp(self.data)
        return self._map(value, value)

    def log(self):
        return self._map(np.log(self.data), 1 / self.data)

    def tanh(self):
        value = np.tanh(self.data)
        return self._map(value, 1 - value * value, 1 + value * value)

    def sigmoid(self):
        value = 1 / (1 + np.exp(-self.data))
        return self._map(value, value * (1 - value), value * (1 + value))

    def erf(self):
        slope = 2 / np.sqrt(_pi(self.data.dtype)) * np.exp(-self.data * self.data)
        return self._map(erf(self.data), slope)

    def sqrt(self):
        value = np.sqrt(self.data)
        return self._map(value, 0.5 / value)

    def abs(self):
        return self._map(np.abs(self.data), np.sign(self.data))

    def amax(self, dim, keepdim=False):
        """Only ever subtracted and added back: no gradient."""
        return Var(self.data.max(axis=dim, keepdims=keepdim))

    def maximum(self, other):
        """As `amax`."""
        return Var(np.maximum(self.data, other.data))

    def sum(self, dim, keepdim=False):
        shape = self.shape

        def pull(g, A):
            return np.broadcast_to(g if keepdim else np.expand_dims(g, dim), shape)

        return Var(self.data.sum(axis=dim, keepdims=keepdim), (self, pull))

    def where(self, condition, other):
        """`self` where `condition`, otherwise the number `other`."""
        zero, other = self.data.dtype.type(0), self.data.dtype.type(other)
        return Var(np.where(condition, self.data, other), (self, lambda g, A: np.where(condition, g, zero)))

    def transpose(self, first, second):
        return Var(self.data.swapaxes(first, second), (self, lambda g, A: g.swapaxes(first, second)))

    def reshape(self, *shape):
        return Var(self.data.reshape(shape), (self, lambda g, A: g.reshape(self.shape)))

    def unsqueeze(self, dim):
        return Var(np.expand_dims(self.data, dim), (self, lambda g, A: np.squeeze(g, dim)))

    def __getitem__(self, index):
        def pull(g, A):
            found = np.zeros_like(self.data)
            np.add.at(found, index, g)
            return found

        return Var(self.data[index], (self, pull))


def gradients(outputs, seeds, inputs, *, absolute=False):
    """sum_o seed_o . d output_o / d input, for every input."""
    A = np.abs if absolute else (lambda x: x)
    held = {}
    order, seen = [], set()

    def visit(node):
        if id(node) in seen:
            return
        seen.add(id(node))
        for parent, _ in node.parents:
            visit(parent)
        order.append(node)

    for output, seed in zip(outputs, seeds, strict=True):
        visit(output)
        held[id(output)] = held.get(id(output), 0) + A(seed.astype(output.data.dtype))
    for node in reversed(order):
        grad = held.get(id(node))
        if grad is None:
            continue
        for parent, pull in node.parents:
            share = sum_to(np.asarray(pull(grad, A)), parent.shape)
            held[id(parent)] = held[id(parent)] + share if id(parent) in held else share
    return [held.get(id(x), np.zeros_like(x.data)) for x in inputs]
