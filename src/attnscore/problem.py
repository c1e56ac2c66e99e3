"""The problem: arrays checked once, everything frozen.

This is the only place that checks shapes, dtypes and devices; all rooms behind it trust what they get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from attnscore import frameworks
from attnscore.checks import check_held, check_number, is_number, is_whole, shown
from attnscore.dropout import Dropout
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, ShapeError, message
from attnscore.frameworks.contract import FLOATING, Array, Framework, accumulator, broadcast, is_unknown, may_equal
from attnscore.grid import Grid, Layout, Shape, check_broadcast
from attnscore.masking import Mask, Pieces, split
from attnscore.scoring.forms import Form

PairMatrix = Literal["scores", "weights"]
"""Scores as they enter the softmax, -inf where masked; or weights, before dropout."""

# The uniform axes and a tile's own are a few more than the caller's, and NumPy broadcasts 32 (64 from version 2).
MOST_AXES = 16
_LAYOUT_HINT = "head_axis=-2 takes the layout (batch, length, head, dim)"


@dataclass(frozen=True)
class Problem:
    """One attention call, checked. Arrays are on the uniform axes; `form` holds the lowered query and key."""

    ops: Framework
    layout: Layout
    score: Any
    """A score object: anything with ``tile``."""
    query: Array
    key: Array
    value: Array
    form: Form
    mask: Mask | None
    bias: Array | None = None
    sink: Array | None = None
    dropout: Dropout | None = None
    statistics: tuple[str, ...] = ()
    matrix: PairMatrix | None = None
    """Matrix of all (query, key) pairs that the caller gets in addition to the output: O(n^2) memory."""

    @property
    def grid(self) -> Grid:
        return self.layout.grid

    @cached_property
    def visibility(self) -> tuple[Pieces | None, Mask | None]:
        """The mask as a few intervals of keys per row, and what of it only blocks can tell."""
        if self.mask is None:
            return None, None
        if is_unknown(self.grid.query_len) or is_unknown(self.grid.key_len):
            return None, self.mask
        return split(self.mask, self.grid.query_len, self.grid.key_len, self.grid.batch)

    @property
    def dtype(self) -> str:
        return self.ops.dtype(self.value)

    @property
    def accumulator(self) -> str:
        """The dtype of sums: that of the value, at least float32."""
        return accumulator(self.dtype)


def check_arrays(ops: Framework, arrays: dict[str, Array], head_axis: Any) -> Layout:
    """Check query, key and value (where there is one) against each other; say how their axes map to the uniform ones.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FrameworkError, ArgumentError
    """
    frameworks.check_dense(ops, arrays)
    shapes = {name: ops.shape(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x), shapes=shapes))
        if not 2 <= len(x.shape) <= MOST_AXES:
            expected = f"2 axes or more (at most {MOST_AXES})"
            raise ShapeError(message(name, expected, f"{len(x.shape)}", shapes=shapes))
    dtypes = {name: ops.dtype(x) for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        hint = "cast them to a common dtype first"
        raise DtypeError(message(", ".join(arrays), "one dtype", listed, shapes=shapes, hint=hint))
    frameworks.check_devices(ops, arrays["query"], arrays)
    if not is_whole(head_axis) or head_axis not in (-3, -2):
        expected = "-3, for (batch, head, length, dim), or -2, for (batch, length, head, dim)"
        raise ArgumentError(message("head_axis", expected, shown(head_axis), shapes=shapes))
    axes = max(len(shape) for shape in shapes.values())
    padded = {name: (1,) * (axes - len(shape)) + shape for name, shape in shapes.items()}
    if axes >= 4 and head_axis == -2:
        padded = {name: (*shape[:-3], shape[-2], shape[-3], shape[-1]) for name, shape in padded.items()}
    value = padded.get("value", (*padded["key"][:-1], 0))
    for name, shape in padded.items():
        if is_unknown(shape[-1]) or (axes >= 4 and is_unknown(shape[-3])):
            expected = "a last axis and an axis of heads whose lengths are known when the graph is made"
            hint = f"tf.ensure_shape({name}, ...), or an input signature that says them"
            raise ShapeError(message(name, expected, "one that is not", shapes=shapes, hint=hint))
    if not may_equal(padded["key"][-2], value[-2]):
        expected = f"as many positions as key ({padded['key'][-2]})"
        other = _LAYOUT_HINT if axes >= 4 and head_axis == -3 else None
        raise ShapeError(message("value", expected, value[-2], shapes=shapes, hint=other))
    heads, groups = _heads({**padded, "value": value}, shapes) if axes >= 4 else (1, 1)
    trailing = 3 if axes >= 4 else 2
    try:
        lead = broadcast(*(shape[:-trailing] for shape in padded.values()))
    except ValueError:
        names = ", ".join(arrays)
        raise ShapeError(message(names, "leading axes that broadcast", "axes that do not", shapes=shapes)) from None
    grid = Grid(
        lead=tuple(lead) or (1,),
        heads=heads,
        groups=groups,
        query_len=padded["query"][-2],
        key_len=value[-2] if is_unknown(padded["key"][-2]) else padded["key"][-2],
        has_batch=axes >= 3,
        has_heads=axes >= 4,
    )
    return Layout(axes, int(head_axis), grid, padded["query"][-1], padded["key"][-1], value[-1])


def _heads(padded: dict[str, Shape], shapes: dict[str, Shape]) -> tuple[int, int]:
    """Key heads, and query heads that share each."""
    query, key, value = (padded[name][-3] for name in ("query", "key", "value"))
    if key != value and 1 not in (key, value):
        raise ShapeError(message("value", f"as many heads as key ({key}) or 1", value, shapes=shapes))
    kv = max(key, value) if 0 not in (key, value) else 0
    if kv == query == 0:
        return 0, 1
    if query == 1:
        return kv, 1
    if kv == 0 or query % kv:
        raise ShapeError(
            message(
                "key",
                f"a number of heads that divides the {query} of query",
                kv,
                shapes=shapes,
                hint=_LAYOUT_HINT,
            )
        )
    return kv, query // kv


def check_extra(ops: Framework, name: str, x: Any, like: Array) -> Array:
    """A bias or sink: a number or a float array on the device of `like`."""
    if isinstance(x, (bool, complex)):
        raise DtypeError(message(name, "a number or a floating array", f"{type(x).__name__} {x!r}"))
    if is_number(x) and not hasattr(x, "dtype"):
        x = check_number(name, x)
    elif not (isinstance(x, np.generic) or frameworks.is_array(x)):
        raise FrameworkError(message(name, "a number or an array", type(x).__name__, hint="make it an array first"))
    sums = accumulator(ops.dtype(like))
    if is_number(x) and math.isfinite(x):
        check_held(name, x, sums, float(x))
    frameworks.check_dense(ops, {name: x})
    frameworks.check_devices(ops, like, {name: x})
    x = ops.asarray(x, like, None if hasattr(x, "dtype") else sums)
    if not ops.is_floating(x):
        hint = "a boolean array is a mask: pass it as mask=" if ops.dtype(x) == "bool" else None
        raise DtypeError(message(name, FLOATING, ops.dtype(x), hint=hint))
    return x


def check_bias(ops: Framework, bias: Any, layout: Layout, like: Array) -> Array:
    """The bias on the axes of the grid."""
    bias = check_extra(ops, "bias", bias, like)
    check_broadcast("bias", tuple(bias.shape), layout.grid)
    return layout.grid.place(ops, bias)


def check_sink(ops: Framework, sink: Any, layout: Layout, like: Array) -> Array:
    """The sink as (head, group), or (1, 1) when it is one number."""
    sink = check_extra(ops, "sink", sink, like)
    heads = layout.grid.heads * layout.grid.groups
    if tuple(sink.shape) not in ((), (1,), (heads,)):
        raise ShapeError(message("sink", f"a number or shape ({heads},), one per query head", tuple(sink.shape)))
    one = tuple(sink.shape) in ((), (1,))
    return ops.reshape(sink, (1, 1) if one else (layout.grid.heads, layout.grid.groups))
