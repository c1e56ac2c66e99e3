"""Check of an array framework: `check_framework`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnscore import backends, kernels
from attnscore.backends.base import Array, Backend
from attnscore.masks import Causal, ValidLens
from attnscore.scores import Additive, arrays_of
from attnscore.testing.compare import close, gradients, native, values_of
from attnscore.testing.kernels import check_kernel


def check_framework(like: Array, *, seed: int = 0) -> None:
    """Check a framework: its operations against NumPy's, then calls and gradients against those of the NumPy framework.

    Parameters
    ----------
    like : array
        Any array of the framework, on the device to check on.
    seed : int

    Raises
    ------
    AssertionError
    FrameworkError
        `like` is no array, or of a framework that is not served.

    Examples
    --------
    >>> import numpy as np
    >>> from attnscore.testing import check_framework
    >>> check_framework(np.zeros(1))
    """
    ops, plain = backends.of({"like": like}), backends.load("numpy")
    rng = np.random.default_rng(seed)
    with ops.numeric_scope(), plain.numeric_scope():
        for name, call in _OPERATIONS.items():
            arrays = [rng.standard_normal((2, 3, 4)) for _ in range(2)]
            arrays[0][0, 0, :3] = 0.0, np.nan, -np.inf
            got = call(ops, *(native(ops, x, like) for x in arrays))
            close(f"{ops.name}: {name}", values_of(ops, got), np.asarray(call(plain, *arrays)))
    score = Additive(rng.standard_normal(3), rng.standard_normal((3, 4)), rng.standard_normal((3, 4)))
    shapes = {"query": (2, 4, 5, 4), "key": (2, 2, 7, 4), "value": (2, 2, 7, 3)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()} | arrays_of(score)
    own = {name: native(ops, x, like) for name, x in inputs.items()}
    for label, mask in (("no mask", None), ("lengths", ValidLens([0, 5])), ("causal", Causal("bottom_right"))):
        wanted = gradients(plain, score, inputs, mask)
        for name, grad in gradients(ops, score, own, mask).items():
            close(f"{ops.name}: {label}: gradient of {name}", grad, wanted[name])
    for name in kernels.table():
        check_kernel(name, like=like, seed=seed)


# Operations of the contract that make an array, as functions of two arrays (2, 3, 4), the first with 0, NaN and -inf.
_OPERATIONS: dict[str, Callable[[Backend, Array, Array], Array]] = {
    "zeros": lambda ops, x, y: ops.zeros((2, 0, 3), x),
    "full": lambda ops, x, y: ops.full((2, 3), 0.5, x),
    "positions": lambda ops, x, y: ops.positions(3, 4, x),
    "astype": lambda ops, x, y: ops.astype(y, "float32"),
    "slice_axis": lambda ops, x, y: ops.slice_axis(y, -2, 1, 2),
    "add_at": lambda ops, x, y: ops.add_at(ops.zeros((2, 3, 4), y), -1, 2, ops.slice_axis(y, -1, 0, 2)),
    "concat": lambda ops, x, y: ops.concat((y, y), -2),
    "reshape": lambda ops, x, y: ops.reshape(y, (6, -1)),
    "broadcast_to": lambda ops, x, y: ops.broadcast_to(y, (5, 2, 3, 4)),
    "swap_axes": lambda ops, x, y: ops.swap_axes(y, -3, -1),
    "expand_dims": lambda ops, x, y: ops.expand_dims(y, -2),
    "take": lambda ops, x, y: ops.take(y, ops.positions(1, 2, y), -1),
    "matmul": lambda ops, x, y: ops.matmul(y, ops.matrix_transpose(y)),
    "exp": lambda ops, x, y: ops.exp(x),
    "log": lambda ops, x, y: ops.log(y * y),
    "tanh": lambda ops, x, y: ops.tanh(x),
    "sigmoid": lambda ops, x, y: ops.sigmoid(800 * y),
    "erf": lambda ops, x, y: ops.erf(y),
    "sqrt": lambda ops, x, y: ops.sqrt(y * y),
    "abs": lambda ops, x, y: ops.abs(x),
    "maximum": lambda ops, x, y: ops.maximum(x, y),
    "where": lambda ops, x, y: ops.where(y > 0, y, -1.0),
    "equal": lambda ops, x, y: ops.equal(ops.abs(y), ops.slice_axis(y, -1, 0, 1)),
    "logical_and": lambda ops, x, y: ops.logical_and(y > 0, ops.slice_axis(y, -1, 0, 1) < 0.5),
    "logical_or": lambda ops, x, y: ops.logical_or(y > 0, ops.slice_axis(y, -2, 1, 1) < 0.5),
    "isfinite": lambda ops, x, y: ops.isfinite(x),
    "isnan": lambda ops, x, y: ops.isnan(x),
    "sum": lambda ops, x, y: ops.sum(y, axis=(0, -1), keepdims=True),
    "max": lambda ops, x, y: ops.max(y, axis=-2),
    "any": lambda ops, x, y: ops.any(y > 1, axis=-1, keepdims=True),
    "low_32_bits": lambda ops, x, y: ops.low_32_bits(
        (ops.positions(0, 9, y) * 0x7FEB352D) ^ ops.shift_right(ops.positions(0, 9, y), 1)
    ),
    "loop": lambda ops, x, y: ops.loop(3, lambda i, carry: carry * 2 + i, y),
    "map_tiles": lambda ops, x, y: ops.concat([part[0] for part in ops.map_tiles(3, lambda i: (y * i,))], 0),
    "stop_gradient": lambda ops, x, y: ops.stop_gradient(y),
}
