"""The problem: one attention call, checked and frozen.

Only this module checks shapes, dtypes and devices; the modules that take a problem rely on its checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from attnscore import backends, scores
from attnscore.backends.base import FLOATING, Array, Backend, accumulator
from attnscore.base.arguments import check_number, check_overflow, did_you_mean, is_number, is_whole, shown
from attnscore.base.layout import AxisLayout, ScoreShape, Shape, broadcast, check_bias_shape, is_unknown, may_equal
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError, message, with_shapes
from attnscore.masks import IntervalSet, Mask, as_mask, cached_mask, split_intervals
from attnscore.problem import normalizers, relative
from attnscore.problem.dropout import Dropout, check_dropout, keep_factors
from attnscore.problem.normalizers import Normalizer
from attnscore.problem.statistics import KEYS, MAX_INDEXED_KEYS, TABLE
from attnscore.scores.base import Pullback, with_arrays
from attnscore.scores.forms import Form

PairMatrix = Literal["scores", "weights"]
"""Scores as they enter the softmax, -inf where masked; or weights, before dropout."""

# Canonical axes and the axes of a tile are a few more than the caller's, and NumPy broadcasts 32 (64 from version 2).
MAX_AXES = 16
_LAYOUT_HINT = "head_axis=-2 takes the layout (batch, length, head, dim)"


@dataclass(frozen=True)
class Problem:
    """One attention call, checked. Arrays are on the canonical axes; `form` holds the lowered query and key."""

    ops: Backend
    layout: AxisLayout
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
    normalizer: Normalizer | None = None
    """Normalizer; None for the softmax."""
    statistics: tuple[str, ...] = ()
    matrix: PairMatrix | None = None
    """Matrix of all (query, key) pairs that the caller gets in addition to the output: O(n^2) memory."""

    @property
    def score_shape(self) -> ScoreShape:
        return self.layout.score_shape

    @cached_property
    def visibility(self) -> tuple[IntervalSet | None, Mask | None]:
        """The mask as a few intervals of keys per query, and the remaining mask, which intervals do not express."""
        if self.mask is None:
            return None, None
        if is_unknown(self.score_shape.query_len) or is_unknown(self.score_shape.key_len):
            return None, self.mask
        return split_intervals(self.mask, self.score_shape.query_len, self.score_shape.key_len, self.score_shape.batch)

    def operands(self) -> dict[str, Array]:
        """Return the arrays that get a gradient, by name: the arrays of the form, then value, bias and sink."""
        others = {"value": self.value, "bias": self.bias, "sink": self.sink}
        return self.form.arrays() | {name: x for name, x in others.items() if x is not None}

    def keep_factors(self, rows: tuple[Any, int], cols: tuple[Any, int]) -> Array | None:
        """Return the factors by which dropout multiplies the weights of a tile; None without dropout."""
        if self.dropout is None:
            return None
        return keep_factors(self.ops, self.dropout, self.score_shape, self.value, rows, cols, self.accumulator)

    @property
    def has_relative_bias(self) -> bool:
        """Whether the bias has a number for each key - query (`problem.relative`) instead of each pair."""
        return self.bias is not None and self.score_shape.is_relative(tuple(self.bias.shape))

    @property
    def dtype(self) -> str:
        return self.ops.dtype(self.value)

    @property
    def accumulator(self) -> str:
        """Dtype of sums: the dtype of the value, at least float32."""
        return accumulator(self.dtype)


def check_arrays(ops: Backend, arrays: dict[str, Array], head_axis: Any) -> AxisLayout:
    """Check query, key and value against each other; return how their axes map to canonical ones.

    Without a query, the layout is as if queries had the keys' shape; without a value, value_dim is 0.
    """
    names, shapes = ", ".join(arrays), _check_each(ops, arrays)
    dtypes = {name: ops.dtype(x) for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        hint = "cast them to a common dtype first"
        raise DtypeError(message(names, "one dtype", listed, shapes=shapes, hint=hint))
    if not is_whole(head_axis) or head_axis not in (-3, -2):
        expected = "-3, for (batch, head, length, dim), or -2, for (batch, length, head, dim)"
        raise ArgumentError(message("head_axis", expected, shown(head_axis), shapes=shapes))
    axes = max(len(shape) for shape in shapes.values())
    padded = {name: (1,) * (axes - len(shape)) + shape for name, shape in shapes.items()}
    if axes >= 4 and head_axis == -2:
        padded = {name: (*shape[:-3], shape[-2], shape[-3], shape[-1]) for name, shape in padded.items()}
    for name, shape in padded.items():
        if is_unknown(shape[-1]) or (axes >= 4 and is_unknown(shape[-3])):
            expected = "a last axis and an axis of heads whose lengths are known when the graph is made"
            hint = "only the batch and the lengths may be symbols"
            if ops.name == "tensorflow":
                hint = f"tf.ensure_shape({name}, ...), or an input signature that says them"
            raise ShapeError(message(name, expected, "one that is not", shapes=shapes, hint=hint))
    key = padded["key"]
    query, value = padded.get("query", key), padded.get("value", (*key[:-1], 0))
    if not may_equal(key[-2], value[-2]):
        layout_hint = _LAYOUT_HINT if axes >= 4 and head_axis == -3 else None
        raise ShapeError(
            message("value", f"as many positions as key ({key[-2]})", value[-2], shapes=shapes, hint=layout_hint)
        )
    heads, groups = _heads(query[-3], key[-3], value[-3], shapes) if axes >= 4 else (1, 1)
    trailing = 3 if axes >= 4 else 2
    lead = broadcast_lead({name: shape[:-trailing] for name, shape in padded.items()}, shapes)
    # A number before a size that a graph learns when it runs, also where the number is 1.
    known_lengths = [n for n in (key[-2], value[-2]) if not is_unknown(n)]
    score_shape = ScoreShape(
        lead=tuple(lead) or (1,),
        heads=heads,
        groups=groups,
        query_len=query[-2],
        key_len=known_lengths[0] if known_lengths else broadcast(value[-2:-1], key[-2:-1])[0],
        has_batch=axes >= 3,
        has_heads=axes >= 4,
    )
    dims = (query[-1], key[-1], value[-1])
    _check_addressable(score_shape, dims, names, shapes)
    return AxisLayout(axes, int(head_axis), score_shape, *dims)


def broadcast_lead(leads: dict[str, Shape], shapes: dict[str, Shape] | None = None) -> Shape:
    """Return the axes to which the leading axes of the named arrays broadcast, or raise ShapeError."""
    try:
        return broadcast(*leads.values())
    except ValueError:
        got = ", ".join(f"{lead} of {name}" for name, lead in leads.items())
        raise ShapeError(message(", ".join(leads), "leading axes that broadcast", got, shapes=shapes)) from None


def _check_each(ops: Backend, arrays: dict[str, Array]) -> dict[str, Shape]:
    """Check that the arrays are dense and floating, on one device, with enough axes; return the shapes."""
    backends.check_compatible(ops, next(iter(arrays.values())), arrays)
    shapes = {name: ops.shape(x) for name, x in arrays.items()}
    for name, x in arrays.items():
        if not ops.is_floating(x):
            raise DtypeError(message(name, FLOATING, ops.dtype(x), shapes=shapes))
        if not 2 <= len(x.shape) <= MAX_AXES:
            expected = f"2 axes or more (at most {MAX_AXES})"
            raise ShapeError(message(name, expected, f"{len(x.shape)}", shapes=shapes))
    return shapes


def _check_addressable(
    score_shape: ScoreShape, dims: tuple[int, int, int], names: str, shapes: dict[str, Shape]
) -> None:
    """Raise ShapeError where a broadcast array is larger than an address space holds; sizes may be symbolic."""
    if not all(type(size) is int for size in (*score_shape.rows, score_shape.key_len, *dims)):
        return
    row_elements = max(score_shape.query_len, score_shape.key_len) * max(dims)
    count = math.prod(score_shape.rows[:-1]) * row_elements
    if count > _MAX_ELEMENTS:
        raise ShapeError(message(names, f"axes whose product is at most {_MAX_ELEMENTS}", count, shapes=shapes))


def _heads(query: int, key: int, value: int, shapes: dict[str, Shape]) -> tuple[int, int]:
    """Return the number of KV heads, and of query heads that share each, from the heads of the three arrays."""
    if key != value and 1 not in (key, value):
        raise ShapeError(message("value", f"as many heads as key ({key}) or 1", value, shapes=shapes))
    kv_heads = max(key, value) if 0 not in (key, value) else 0
    if kv_heads == query == 0:
        return 0, 1
    if query == 1:
        # One query head is broadcast to all KV heads.
        return kv_heads, 1
    if kv_heads == 0 or query % kv_heads:
        expected = f"a number of heads that divides the {query} of query"
        raise ShapeError(message("key", expected, kv_heads, shapes=shapes, hint=_LAYOUT_HINT))
    return kv_heads, query // kv_heads


def check_extra(ops: Backend, name: str, x: Any, like: Array) -> Array:
    """Check a bias or sink, and return it as a floating array on the device of `like`."""
    if isinstance(x, (bool, complex)):
        raise DtypeError(message(name, "a number or a floating array", f"{type(x).__name__} {x!r}"))
    if is_number(x) and not hasattr(x, "dtype"):
        x = check_number(name, x)
    elif not (isinstance(x, np.generic) or backends.is_array(x)):
        raise FrameworkError(message(name, "a number or an array", type(x).__name__, hint="make it an array first"))
    accumulator_dtype = accumulator(ops.dtype(like))
    if is_number(x) and math.isfinite(x):
        check_overflow(name, x, accumulator_dtype, float(x))
    backends.check_compatible(ops, like, {name: x})
    x = ops.asarray(x, like, None if hasattr(x, "dtype") else accumulator_dtype)
    if not ops.is_floating(x):
        hint = "a boolean array is a mask: pass it as mask=" if ops.dtype(x) == "bool" else None
        raise DtypeError(message(name, FLOATING, ops.dtype(x), hint=hint))
    return x


def check_bias(ops: Backend, bias: Any, layout: AxisLayout, like: Array) -> Array:
    """Check the bias, and return it on the axes of the scores."""
    bias = check_extra(ops, "bias", bias, like)
    check_bias_shape(tuple(bias.shape), layout.score_shape)
    bias = layout.score_shape.to_canonical(ops, bias)
    # Whether one row is relative, or one for all queries, is only known when a graph of TensorFlow runs. XLA cannot
    # compile the choice: it takes a row of known length for one of the keys. A symbolic length of JAX is compared.
    *_, rows, size = bias.shape
    lengths = layout.score_shape.query_len, layout.score_shape.key_len
    is_open = any(map(is_unknown, lengths)) and not is_unknown(size) and ops.needs_host_callback(bias)
    may_be_relative = rows == 1 and (size is None or (is_open and size not in (1, lengths[1])))
    return relative.expand_if_relative(ops, bias, layout.score_shape) if may_be_relative else bias


def check_sink(ops: Backend, sink: Any, layout: AxisLayout, like: Array) -> Array:
    """Check the sink, and return it as (head, group), or (1, 1) when it is one number."""
    sink = check_extra(ops, "sink", sink, like)
    heads = layout.score_shape.heads * layout.score_shape.groups
    if tuple(sink.shape) not in ((), (1,), (heads,)):
        raise ShapeError(message("sink", f"a number or shape ({heads},), one per query head", tuple(sink.shape)))
    is_shared = tuple(sink.shape) in ((), (1,))
    return ops.reshape(sink, (1, 1) if is_shared else (layout.score_shape.heads, layout.score_shape.groups))


# Elements of float64 that the 2^47 bytes of a process's address space hold.
_MAX_ELEMENTS = 2**44
# Passed by functions of the weights alone: None would hide a forgotten value.
NO_VALUE = object()


def build_problem(
    query: Array,
    key: Array,
    value: Array,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    valid_lens: Any = None,
    bias: Any = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    head_axis: int = -3,
    normalizer: Any = "softmax",
    statistics: bool | tuple[str, ...] = (),
    matrix: PairMatrix | None = None,
    pullback: bool = False,
    rowwise: bool = False,
) -> tuple[Problem, Pullback | None]:
    """Check all arguments, lower the score, and bring all arrays to the canonical axes.

    `value` is NO_VALUE where only the weights matter; `statistics` is the `return_stats` of `attend`. With `pullback`,
    the VJP function of the score is returned too, for a framework without autodiff. With `rowwise`, the arrays are a
    part of a sequence: parts are lowered alike.
    """
    bias, sink = map(backends.variable_value, (bias, sink))
    arrays = {"query": query, "key": key} | ({} if value is NO_VALUE else {"value": value})
    extras = {name: x for name, x in (("bias", bias), ("sink", sink)) if backends.is_array(x)}
    ops = backends.of(arrays | extras)
    backends.check_not_recorded(ops, "this function")
    arrays = dict(zip(arrays, ops.autocast(*arrays.values()), strict=True))
    layout = check_arrays(ops, arrays, head_axis)
    query, key = arrays["query"], arrays["key"]
    value = arrays["value"] if "value" in arrays else key[..., :0]
    names = requested_statistics(statistics, normalizer)
    if {*names} & {*KEYS} and accumulator(ops.dtype(value)) == "float32":
        _check_indices(layout.score_shape.key_len)
    # A plain call enters no check of a normalizer, a mask or dropout, to keep its path short (tests/test_map.py).
    is_softmax = type(normalizer) is str and normalizer == "softmax"
    checked_normalizer = None if is_softmax else normalizers.resolve(normalizer)
    if sink is not None and checked_normalizer is not None:
        expected = f"nothing with normalizer={shown(normalizer)}: a sink is a logit of the softmax"
        raise ArgumentError(message("sink", expected, shown(sink)))
    checked_mask = None
    if mask is not None or valid_lens is not None:
        checked_mask = _check_mask(ops, mask, valid_lens, layout, query)
    checked_dropout = None
    if type(dropout) is not float or dropout != 0 or seed is not None:
        checked_dropout = check_dropout(dropout, ops.as_seed(seed), lambda: ops.draw_seed(query))
    score = with_arrays(scores.resolve(score), backends.variable_value)
    backends.register_pytree(type(score))
    scores.check_score_arrays(ops, score, query)
    canonical_query = layout.to_canonical(ops, query, is_query=True)
    canonical_key = layout.to_canonical(ops, key, is_query=False)
    try:
        scores.check(score, layout.dim, layout.key_dim)
        if pullback:
            form, score_pullback = scores.lower_pullback(ops, score, canonical_query, canonical_key)
        else:
            lower = scores.lower_rowwise if rowwise else scores.lower
            form, score_pullback = lower(ops, score, canonical_query, canonical_key), None
    except ShapeError as error:
        # A score knows only dimensions and canonical axes; the message shows the shapes of the caller's arrays.
        raise ShapeError(with_shapes(str(error), {name: tuple(x.shape) for name, x in arrays.items()})) from None
    problem = Problem(
        ops=ops,
        layout=layout,
        score=score,
        query=canonical_query,
        key=canonical_key,
        value=layout.to_canonical(ops, value, is_query=False),
        form=form,
        mask=checked_mask,
        bias=None if bias is None else check_bias(ops, bias, layout, query),
        sink=None if sink is None else check_sink(ops, sink, layout, query),
        dropout=checked_dropout,
        normalizer=checked_normalizer,
        statistics=names,
        matrix=matrix,
    )
    return problem, score_pullback


def _check_indices(key_len: Any) -> None:
    """Raise ArgumentError where float32 cannot hold the indices of the keys, which are a statistic."""
    if not is_unknown(key_len) and key_len > MAX_INDEXED_KEYS:
        expected = f"at most {MAX_INDEXED_KEYS} keys of float32, of whose indices kernels keep 24 bits"
        raise ArgumentError(message("return_stats", expected, key_len, hint="attend_chunks joins parts"))


def requested_statistics(return_stats: Any, normalizer: Any = "softmax") -> tuple[str, ...]:
    """Return the names of the statistics that ``return_stats`` selects; True: all that the normalizer has."""
    if return_stats is False:
        return ()
    is_softmax = normalizers.resolve(normalizer) is None
    available = tuple(name for name, row in TABLE.items() if is_softmax or row.describes != "softmax")
    if return_stats is None or isinstance(return_stats, (bool, np.bool_)):
        return available if return_stats else ()
    expected = "a flag or names among " + ", ".join(available)
    names = (return_stats,) if isinstance(return_stats, str) else return_stats
    if not isinstance(names, (tuple, list, set, frozenset)):
        raise ArgumentError(message("return_stats", expected, shown(return_stats)))
    if unknown := [name for name in names if not isinstance(name, str) or name not in available]:
        of_softmax = [name for name in unknown if isinstance(name, str) and name in TABLE]
        hint = f"normalizer='softmax' has {of_softmax[0]}" if of_softmax else did_you_mean(unknown[0], available)
        raise ArgumentError(message("return_stats", expected, shown(unknown), hint=hint))
    return tuple(name for name in available if name in names)


def _check_mask(ops: Backend, mask: Any, valid_lens: Any, layout: AxisLayout, query: Array) -> Mask | None:
    """Return `mask` and `valid_lens`, not both None, as one checked mask."""
    combined = cast(Mask, as_mask(mask, valid_lens, layout.score_shape))
    ops.check_can_mask(layout.score_shape.query_len, layout.score_shape.key_len)

    def check(combined: Mask) -> None:
        backends.check_dense(ops, combined.arrays())
        combined.check(ops, layout.score_shape)
        backends.check_devices(ops, query, combined.arrays(), host_passes=True)

    try:
        return cached_mask(combined, ops, layout.score_shape, check)
    except MaskError as error:
        is_misfit = str(error).startswith(("valid_lens: expected shape", "valid_lens: expected numbers from"))
        shape = layout.score_shape
        # Sequences have mostly more positions than heads, so the caller may have meant the other `head_axis`.
        has_more_heads = not is_unknown(shape.key_len) and shape.heads * shape.groups > shape.key_len
        if not is_misfit or layout.axes < 4 or layout.head_axis == -2 or not has_more_heads:
            raise
        raise MaskError(f"{error}. Hint: {_LAYOUT_HINT}") from None
