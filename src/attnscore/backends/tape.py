"""Reverse-mode differentiation of array operations, for NumPy and for operators of PyTorch, which have no autodiff.

- A `Tape` takes the place of a backend: it has the same operations, and records operations on a `Variable`. Arrays that
  are not variables are constants.
- Each differentiable operation has a rule: its VJP for each argument, in the operations of `Backend`. A floating result
  of an operation on a variable without a rule is an error that names the operation, never a silent zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from attnscore.backends.base import Array, Backend, VjpFunction, sum_to
from attnscore.errors import FrameworkError, message

Vjp = Callable[[Array], Array]


class Variable(NDArrayOperatorsMixin):
    """An array on a tape, with the operators of arrays. Comparisons return arrays, through which no gradient flows."""

    def __init__(self, tape: Tape, value: Array, parents: Sequence[tuple[Variable, Vjp]] = ()) -> None:
        self.tape, self.value, self.parents = tape, value, parents
        self.index = next(tape.indices)

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: len(self.value.shape))

    def __getitem__(self, index: Any) -> Any:
        return self.tape.apply("getitem", self, index)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        """Record an operator, or a function that is called by its name in NumPy."""
        if method != "__call__":
            _refuse(f"{ufunc.__name__}.{method}")
        # ``x *= y`` makes a new variable, as it makes a new array where arrays are immutable (JAX).
        if options.pop("out", (self,))[0] is not self:
            _refuse(f"{ufunc.__name__} with out=")
        return self.tape.apply(ufunc.__name__, *args, **options)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("asarray")


def value_of(x: Any) -> Any:
    """Return the array of a variable, or of each in a tuple or list; anything else as it is."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(value_of, x))
    return x.value if isinstance(x, Variable) else x


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _flat(part)
    else:
        yield x


def _refuse(name: str) -> NoReturn:
    hint = "write `tile_gradient(ops, query, key, grad_scores)` beside `tile`, or call attend from PyTorch"
    raise FrameworkError(message("score", "operations whose gradient is known in NumPy", repr(name), hint=hint))


class Tape:
    """The operations of a backend, recorded where an argument is a variable."""

    def __init__(self, ops: Backend) -> None:
        self._ops, self.indices = ops, count()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        return partial(self.apply, name) if callable(attribute) else attribute

    # Composed of operations that have rules.
    softmax, matrix_transpose = Backend.softmax, Backend.matrix_transpose

    def take(self, x: Any, indices: Array, axis: int) -> Any:
        return x[(slice(None),) * (axis % len(x.shape)) + (indices,)]

    def apply(self, name: str, *args: Any, **options: Any) -> Any:
        """Run an operation, and record it where an argument is a variable, or an entry of one that is a tuple."""
        ops, leaves = self._ops, [*_flat(args)]
        variables = [x for x in (*leaves, *_flat([*options.values()])) if isinstance(x, Variable)]
        args, options = value_of(args), {key: value_of(x) for key, x in options.items()}
        out = (_OPERATORS.get(name) or getattr(ops, name))(*args, **options)
        if not variables or name in _CONSTANT or not (hasattr(out, "dtype") and ops.is_floating(out)):
            return out
        vjps = _RULES[name](ops, out, *args, **options) if name in _RULES else ()
        # The last arguments (axes, shapes, an exponent) have no VJP.
        parents = [(x, vjp) for x, vjp in zip(leaves, vjps, strict=False) if vjp and isinstance(x, Variable)]
        # A variable without a VJP would get a gradient of 0.
        if len(parents) < len(variables):
            _refuse(name)
        return Variable(self, out, parents)

    def gradients(self, outputs: Iterable[tuple[Any, Array]], inputs: Sequence[Variable]) -> tuple[Array, ...]:
        """Return the gradients of `inputs` from pairs of an output, which may be a constant, and its gradient."""
        sums: dict[int, Array] = {}
        pending: dict[int, Variable] = {}

        def add(x: Variable, grad: Array) -> None:
            grad = sum_to(self._ops, grad, x.shape)
            sums[x.index] = sums[x.index] + grad if x.index in sums else grad
            if x.parents:
                pending[x.index] = x

        for x, grad in outputs:
            if isinstance(x, Variable):
                add(x, grad)
        while pending:
            # The latest one: nothing that is still pending reads it.
            x = pending.pop(max(pending))
            grad = sums.pop(x.index)
            for parent, vjp in x.parents:
                add(parent, vjp(grad))
        return tuple(sums[x.index] if x.index in sums else self._ops.zeros(x.shape, x.value) for x in inputs)


def vjp(ops: Backend, function: Callable[..., Array], inputs: Sequence[Array]) -> tuple[Array, VjpFunction]:
    """Return ``function(ops, *inputs)`` and its VJP, by the framework's autodiff or by a tape in place of `ops`."""
    if ops.has_autodiff:
        value_and_vjp: tuple[Array, VjpFunction] = ops.vjp(partial(function, ops), inputs)
        return value_and_vjp
    tape = Tape(ops)
    variables = [Variable(tape, x) for x in inputs]
    out = function(tape, *variables)
    return value_of(out), lambda grad: tape.gradients([(out, grad)], variables)


_CONSTANT = ("stop_gradient", "zeros", "full", "zeros_like", "ones_like", "full_like", "sign", "floor", "ceil", "round")
"""Operations through which no gradient flows, though their results are floating."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "power": operator.pow,
    "negative": operator.neg,
    "getitem": operator.getitem,
}


# ---- Rules: from the result y and the arguments of an operation to the VJP of each array among the arguments, a
# function of the gradient g of y. `Tape.gradients` sums over the axes that were broadcast.


def _matmul(ops: Backend, y: Array, a: Array, b: Array) -> tuple[Vjp, Vjp]:
    if len(b.shape) == 1 < len(a.shape):
        return lambda g: ops.expand_dims(g, -1) * b, lambda g: ops.expand_dims(g, -1) * a
    if len(a.shape) == 1:
        _refuse("matmul of a vector")

    def of_b(g: Array) -> Array:
        x = a
        if len(b.shape) == 2:
            # One product in place of one for each element of the batch, whose sum would follow.
            x, g = (ops.reshape(each, (math.prod(each.shape[:-1]), each.shape[-1])) for each in (x, g))
        return ops.matmul(ops.matrix_transpose(x), g)

    return lambda g: ops.matmul(g, ops.matrix_transpose(b)), of_b


def _getitem(ops: Backend, y: Array, x: Array, index: Any) -> tuple[Vjp]:
    def vjp(g: Array) -> Array:
        grad = ops.zeros(x.shape, g)
        entries = index if isinstance(index, tuple) else (index,)
        if all(isinstance(i, (int, slice, type(None), type(...))) for i in entries):
            grad[index] = g
        else:  # an array of indices may name an entry twice
            np.add.at(grad, index, g)
        return grad

    return (vjp,)


def _broadcast_back(ops: Backend, x: Array, axis: Any) -> Vjp:
    """Return the function that broadcasts a reduction of `x` over `axis` (None: all axes) back to the shape of `x`."""
    axes = range(len(x.shape)) if axis is None else [i % len(x.shape) for i in _flat((axis,))]
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return lambda g: ops.broadcast_to(ops.reshape(g, shape), x.shape)


def _mean(ops: Backend, y: Array, x: Array, axis: Any = None, keepdims: bool = False) -> tuple[Vjp]:
    # y may be empty.
    broadcast, count = _broadcast_back(ops, x, axis), math.prod(x.shape) / max(1, math.prod(y.shape))
    return (lambda g: broadcast(g / count),)


def _extreme(ops: Backend, y: Array, x: Array, axis: Any = None, keepdims: bool = False) -> tuple[Vjp]:
    def vjp(g: Array) -> Array:
        # Equal entries share the gradient.
        broadcast = _broadcast_back(ops, x, axis)
        is_extreme = ops.astype(x == broadcast(y), ops.dtype(x))
        return is_extreme * broadcast(g / ops.sum(is_extreme, axis=axis, keepdims=keepdims))

    return (vjp,)


def _maximum(ops: Backend, y: Array, a: Array, b: Array) -> tuple[Vjp, Vjp]:
    # y is one of the two; equal entries share the gradient.
    return (
        lambda g: ops.where(a == b, 0.5 * g, ops.where(y == a, g, 0.0)),
        lambda g: ops.where(a == b, 0.5 * g, ops.where(y == b, g, 0.0)),
    )


def _concat(ops: Backend, y: Array, arrays: Sequence[Array], axis: int = 0) -> list[Vjp]:
    def part(end: int, size: int) -> Vjp:
        return lambda g: ops.slice_axis(g, axis, end - size, size)

    sizes = [int(x.shape[axis]) for x in arrays]
    return list(map(part, accumulate(sizes), sizes))


_RULES: dict[str, Callable[..., Sequence[Vjp | None]]] = {
    "add": lambda ops, y, a, b: (lambda g: g, lambda g: g),
    "subtract": lambda ops, y, a, b: (lambda g: g, lambda g: -g),
    "multiply": lambda ops, y, a, b: (lambda g: g * b, lambda g: g * a),
    "divide": lambda ops, y, a, b: (lambda g: g / b, lambda g: -g * y / b),
    "power": lambda ops, y, x, p: (lambda g: g * (p * x ** (p - 1)),),
    "negative": lambda ops, y, x: (lambda g: -g,),
    "matmul": _matmul,
    "exp": lambda ops, y, x: (lambda g: g * y,),
    "expm1": lambda ops, y, x: (lambda g: g * (y + 1),),
    "log": lambda ops, y, x: (lambda g: g / x,),
    "log1p": lambda ops, y, x: (lambda g: g / (1 + x),),
    "sqrt": lambda ops, y, x: (lambda g: 0.5 * g / y,),
    "square": lambda ops, y, x: (lambda g: 2 * g * x,),
    "sin": lambda ops, y, x: (lambda g: g * ops.cos(x),),
    "cos": lambda ops, y, x: (lambda g: -g * ops.sin(x),),
    "tanh": lambda ops, y, x: (lambda g: g * (1 - y * y),),
    "sigmoid": lambda ops, y, x: (lambda g: g * y * (1 - y),),
    "erf": lambda ops, y, x: (lambda g: g * (2 / math.sqrt(math.pi)) * ops.exp(-x * x),),
    "abs": lambda ops, y, x: (lambda g: ops.where(x > 0, g, ops.where(x < 0, -g, 0.0)),),
    "maximum": _maximum,
    "minimum": _maximum,
    "where": lambda ops, y, c, a, b: (None, lambda g: ops.where(c, g, 0.0), lambda g: ops.where(c, 0.0, g)),
    "sum": lambda ops, y, x, axis=None, keepdims=False: (_broadcast_back(ops, x, axis),),
    "mean": _mean,
    "max": _extreme,
    "min": _extreme,
    "astype": lambda ops, y, x, dtype: (lambda g: g,),
    "reshape": lambda ops, y, x, shape: (lambda g: ops.reshape(g, x.shape),),
    "expand_dims": lambda ops, y, x, axis: (lambda g: ops.reshape(g, x.shape),),
    "squeeze": lambda ops, y, x, axis=None: (lambda g: ops.reshape(g, x.shape),),
    "broadcast_to": lambda ops, y, x, shape: (lambda g: g,),
    "swap_axes": lambda ops, y, x, first, second: (lambda g: ops.swap_axes(g, first, second),),
    "getitem": _getitem,
    "concat": _concat,
}
# NumPy's ufuncs and reductions have these names too.
_RULES |= {"true_divide": _RULES["divide"], "absolute": _RULES["abs"], "amax": _extreme, "amin": _extreme}
