"""The problem: arrays checked once, axes made uniform, everything frozen.

This is the only place that checks shapes, dtypes and devices; all rooms behind it trust what they get.

- The caller's axes become ``(*batch, head, group, query | key, dim)``: at least one batch axis, key heads as ``head``,
  and the query heads that share a key head as ``group``. Nothing is copied: these are views, broadcast axes stay 1.
- ``Grid`` is the matrix of scores that masks and biases are laid over, in the same axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscore import frameworks
from attnscore.checks import check_number, is_number, is_whole, shown
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError, message
from attnscore.frameworks.contract import Array, Framework, accumulator

if TYPE_CHECKING:
    from attnscore.masking import Mask
    from attnscore.scoring.contract import Score
    from attnscore.scoring.forms import Form

Shape = tuple[int, ...]
FLOATING = "a floating dtype (float16, bfloat16, float32, float64)"
_LAYOUT_HINT = "head_axis=-2 takes the layout (batch, length, head, dim)"


@dataclass(frozen=True)
class Grid:
    """The score matrices of one call: what masks, biases and row numbers are laid over."""

    lead: Shape
    """Batch axes of the result; the first is `batch`."""
    heads: int
    groups: int
    query_len: int
    key_len: int
    has_batch: bool = True
    has_heads: bool = True

    @property
    def batch(self) -> int:
        return self.lead[0]

    @property
    def rows(self) -> Shape:
        """Shape of one number per row of scores."""
        return (*self.lead, self.heads, self.groups, self.query_len)

    @property
    def user_shape(self) -> Shape:
        """The shape (..., query, key) that a caller's mask or bias broadcasts to."""
        lead = self.lead if self.has_batch else ()
        head = (self.heads * self.groups,) if self.has_heads else ()
        return (*lead, *head, self.query_len, self.key_len)

    def place(self, ops: Framework, x: Array) -> Array:
        """Put a caller's array, broadcastable to (..., query, key), on the axes of the grid (a view)."""
        shape = tuple(x.shape)
        if len(shape) < 2:
            shape = (1,) * (2 - len(shape)) + shape
        if self.has_heads:
            head = shape[-3] if len(shape) > 2 else 1
            split = (1, 1) if head == 1 else (self.heads, self.groups)
            lead = shape[:-3]
        else:
            split, lead = (1, 1), shape[:-2]
        lead = (1,) * (len(self.lead) - len(lead)) + lead
        return ops.reshape(x, (*lead, *split, *shape[-2:]))

    def place_batch(self, ops: Framework, x: Array) -> Array:
        """Put an array (batch or 1, a, b) on the axes of the grid."""
        return ops.reshape(x, (x.shape[0], *(1,) * (len(self.lead) + 1), *x.shape[1:]))


@dataclass(frozen=True)
class Layout:
    """How the caller's axes map to the uniform ones, and back."""

    axes: int
    head_axis: int
    grid: Grid
    dim: int
    key_dim: int
    value_dim: int

    def inward(self, ops: Framework, x: Array, *, is_query: bool) -> Array:
        """The caller's query, key or value on the uniform axes (a view)."""
        x = ops.reshape(x, (1,) * (self.axes - len(x.shape)) + tuple(x.shape))
        if self.axes < 4:
            lead = x.shape[:-2] or (1,)
            return ops.reshape(x, (*lead, 1, 1, *x.shape[-2:]))
        if self.head_axis == -2:
            x = ops.swap_axes(x, -3, -2)
        head = x.shape[-3]
        split = (self.grid.heads, self.grid.groups) if is_query and head > 1 else (head, 1)
        return ops.reshape(x, (*x.shape[:-3], *split, *x.shape[-2:]))

    def _join_heads(self, ops: Framework, x: Array) -> Array:
        """(*lead, head, group, a, b) -> (..., heads, a, b) without the axes that the caller does not have."""
        lead = x.shape[:-4] if self.grid.has_batch else ()
        heads = (x.shape[-4] * x.shape[-3],) if self.grid.has_heads else ()
        return ops.reshape(x, (*lead, *heads, *x.shape[-2:]))

    def outward(self, ops: Framework, x: Array) -> Array:
        """(*lead, head, group, query, value_dim) in the caller's order of axes."""
        x = self._join_heads(ops, x)
        return ops.swap_axes(x, -3, -2) if self.axes >= 4 and self.head_axis == -2 else x

    def outward_rows(self, ops: Framework, x: Array) -> Array:
        """One number per row, in the order of axes of the output."""
        return self.outward(ops, ops.expand_dims(x, -1))[..., 0]

    def outward_scores(self, ops: Framework, x: Array) -> Array:
        """(*lead, head, group, query, key) as (..., heads, query, key), in either layout."""
        return self._join_heads(ops, x)

    def gradient_outward(self, ops: Framework, x: Array, shape: Shape) -> Array:
        """Gradient of a caller's query, key or value from the gradient of its uniform view."""
        if self.axes >= 4 and self.head_axis == -2 and len(shape) >= 2:
            # (*lead, head * group, length, dim) with the axes of length 1 that `inward` put in front.
            joined = ops.reshape(x, (*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:]))
            x = ops.swap_axes(joined, -3, -2)
        return ops.reshape(x, shape)


@dataclass(frozen=True)
class Dropout:
    """Dropout on the weights: its probability and the seed that replays it."""

    probability: float
    seed: int


@dataclass(frozen=True)
class Problem:
    """One attention call, checked. Arrays are on the uniform axes; `form` holds the lowered query and key."""

    ops: Framework
    layout: Layout
    score: Score
    query: Array
    key: Array
    value: Array
    form: Form
    mask: Mask | None
    bias: Array | None = None
    sink: Array | None = None
    dropout: Dropout | None = None
    statistics: tuple[str, ...] = ()

    @property
    def grid(self) -> Grid:
        return self.layout.grid

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
    shapes = {name: tuple(x.shape) for name, x in arrays.items()}
    for name, x in arrays.items():
        kind = ops.refused(x)
        if kind is not None:
            raise FrameworkError(message(name, "a dense array", kind, hint=f"x.{ops.densifier}() makes one"))
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x), shapes=shapes))
        if len(x.shape) < 2:
            raise ShapeError(message(name, "2 axes or more", f"{len(x.shape)}", shapes=shapes))
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
    if padded["key"][-2] != value[-2]:
        expected = f"as many positions as key ({padded['key'][-2]})"
        other = _LAYOUT_HINT if axes >= 4 and head_axis == -3 else None
        raise ShapeError(message("value", expected, value[-2], shapes=shapes, hint=other))
    heads, groups = _heads({**padded, "value": value}, shapes) if axes >= 4 else (1, 1)
    trailing = 3 if axes >= 4 else 2
    try:
        lead = np.broadcast_shapes(*(shape[:-trailing] for shape in padded.values()))
    except ValueError:
        names = ", ".join(arrays)
        raise ShapeError(message(names, "leading axes that broadcast", "axes that do not", shapes=shapes)) from None
    grid = Grid(
        lead=tuple(lead) or (1,),
        heads=heads,
        groups=groups,
        query_len=padded["query"][-2],
        key_len=padded["key"][-2],
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
    elif not (is_number(x) or frameworks.is_array(x)):
        raise FrameworkError(message(name, "a number or an array", type(x).__name__, hint="make it an array first"))
    frameworks.check_devices(ops, like, {name: x})
    x = ops.asarray(x, like, None if hasattr(x, "dtype") else accumulator(ops.dtype(like)))
    if not ops.is_floating(x):
        hint = "a boolean array is a mask: pass it as mask=" if ops.dtype(x) == "bool" else None
        raise DtypeError(message(name, FLOATING, ops.dtype(x), hint=hint))
    return x


def check_bias(ops: Framework, bias: Any, layout: Layout, like: Array) -> Array:
    """The bias on the axes of the grid."""
    bias = check_extra(ops, "bias", bias, like)
    check_broadcast("bias", tuple(bias.shape), layout.grid, ShapeError)
    return layout.grid.place(ops, bias)


def check_sink(ops: Framework, sink: Any, layout: Layout, like: Array) -> Array:
    """The sink as (head, group), or (1, 1) when it is one number."""
    sink = check_extra(ops, "sink", sink, like)
    heads = layout.grid.heads * layout.grid.groups
    if tuple(sink.shape) not in ((), (1,), (heads,)):
        raise ShapeError(message("sink", f"a number or shape ({heads},), one per query head", tuple(sink.shape)))
    one = tuple(sink.shape) in ((), (1,))
    return ops.reshape(sink, (1, 1) if one else (layout.grid.heads, layout.grid.groups))


def check_broadcast(name: str, shape: Shape, grid: Grid, error: type[ShapeError] | type[MaskError]) -> None:
    """Raise `error` unless `shape` broadcasts to (..., query, key) without enlarging it."""
    target = grid.user_shape
    try:
        fits = np.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    if not fits:
        raise error(message(name, f"a shape that broadcasts to (..., query, key) = {target}", shape))


def check_dropout(probability: Any, seed: Any, draw: Callable[[], int]) -> Dropout | None:
    """The dropout of a call, or None when there is none."""
    if not is_number(probability) or not 0 <= probability < 1:
        raise ArgumentError(message("dropout", "a number in [0, 1)", shown(probability)))
    if seed is not None and not is_whole(seed):
        raise ArgumentError(message("seed", "a whole number or None", shown(seed)))
    if probability == 0:
        return None
    return Dropout(float(probability), (draw() if seed is None else int(seed)) % 2**63)
