"""Sequences of different lengths, one after the other in one array: a packed batch, which computes nothing for padding.

- `pack` and `unpack` convert lists, `pack_padded` and `unpack_padded` padded batches. They are array operations of the
  caller's framework, so gradients flow through them.
- Cumulative lengths are known on the host, and are NumPy's for every framework: a compiled program can read them too.
- `attend_ragged` packs ragged arrays (torch.jagged) to compute their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, Ragged
from attnscore.base.arguments import check_count, is_whole, shown
from attnscore.base.layout import is_unknown
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, ShapeError, message
from attnscore.masks import And, Causal, Mask, Or, Packed, SlidingWindow
from attnscore.masks.index_values import check_cumulative, check_whole
from attnscore.masks.intervals import HostArray


def pack(sequences: Sequence[Array], axis: int = 0) -> tuple[Array, HostArray]:
    """Join sequences of any lengths along an axis, for a call with the mask `Packed`.

    Parameters
    ----------
    sequences : arrays of one framework and dtype, of the same sizes but for `axis`
        For example (length, head, dim), to call `attend` with ``packed[None]`` and ``head_axis=-2``.
    axis : int

    Returns
    -------
    packed : (total, ...), the lengths' sum on `axis`
    cu : (sequences + 1,) int64 of NumPy
        Cumulative lengths: sequence s is ``packed[cu[s] : cu[s + 1]]``.

    Raises
    ------
    ArgumentError, DtypeError, FrameworkError, ShapeError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> packed, cu = ats.pack([np.zeros((2, 8)), np.ones((3, 8))])
    >>> packed.shape, cu.tolist()
    ((5, 8), [0, 2, 5])
    >>> ats.attend(packed, packed, packed, mask=ats.Packed(cu))[:, 0]
    array([0., 0., 1., 1., 1.])
    """
    arrays = {f"sequences[{i}]": backends.variable_value(x) for i, x in enumerate(backends.variable_value(sequences))}
    if not arrays:
        raise ArgumentError(message("sequences", "one array or more", "none"))
    ops = _dense(arrays)
    shapes = {name: ops.shape(x) for name, x in arrays.items()}
    lengths = [_length(name, shape, axis) for name, shape in shapes.items()]
    first, dtype = _without(shapes["sequences[0]"], axis), ops.dtype(arrays["sequences[0]"])
    for name, shape in shapes.items():
        if _without(shape, axis) != first:
            raise ShapeError(message(name, f"the sizes {first} beside axis {axis}, as sequences[0]", shape))
        if ops.dtype(arrays[name]) != dtype:
            raise DtypeError(message(name, f"the dtype of sequences[0] ({dtype})", ops.dtype(arrays[name])))
    return ops.concat(list(arrays.values()), axis), np.cumsum([0, *lengths])


def unpack(packed: Array, cu: Any, axis: int = 0) -> list[Array]:
    """Return the sequences of a packed array: the inverse of `pack`.

    Parameters
    ----------
    packed : (total, ...), the positions on `axis`
    cu : (sequences + 1,) whole numbers
        Cumulative lengths, which the host can read. Positions from the last one on are left out.
    axis : int

    Returns
    -------
    list of arrays, with ``cu[s + 1] - cu[s]`` positions on `axis`

    Raises
    ------
    ArgumentError, FrameworkError, MaskError, ShapeError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> [x.tolist() for x in ats.unpack(np.arange(5), [0, 2, 2, 5])]
    [[0, 1], [], [2, 3, 4]]
    """
    packed = backends.variable_value(packed)
    ops = _dense({"packed": packed})
    ends = _cumulative(cu, _length("packed", ops.shape(packed), axis))
    pairs = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    return [ops.slice_axis(packed, axis, start, stop - start) for start, stop in pairs]


def pack_padded(padded: Array, lens: Any) -> tuple[Array, HostArray]:
    """Return the valid positions of a padded batch as a packed array.

    Parameters
    ----------
    padded : (batch, length, ...)
    lens : (batch,) whole numbers
        Number of valid positions of each sequence, which the host can read.

    Returns
    -------
    packed : (total, ...)
    cu : (batch + 1,) int64 of NumPy

    Raises
    ------
    ArgumentError, FrameworkError, MaskError, ShapeError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> packed, cu = ats.pack_padded(np.array([[1, 2, 3], [4, 0, 0]]), [3, 1])
    >>> packed.tolist(), cu.tolist()
    ([1, 2, 3, 4], [0, 3, 4])
    """
    padded = backends.variable_value(padded)
    ops = _dense({"padded": padded})
    shape = ops.shape(padded)
    batch, length = (_length("padded", shape, axis) for axis in (0, 1))
    counts = _readable("lens", check_whole("lens", lens))
    if counts.shape != (batch,):
        raise ShapeError(message("lens", f"shape ({batch},), one length for each sequence", counts.shape))
    if counts.size and not 0 <= counts.min() <= counts.max() <= length:
        raise ArgumentError(message("lens", f"numbers from 0 to {length}", counts.tolist()))
    index = np.flatnonzero(np.arange(length) < counts[:, None])
    flat = ops.reshape(padded, (batch * length, *shape[2:]))
    return ops.take(flat, ops.asarray(index, padded), 0), np.cumsum([0, *counts.astype(int)])


def unpack_padded(packed: Array, cu: Any, length: int | None = None) -> Array:
    """Return a packed array as a padded batch, with zeros after each sequence: the inverse of `pack_padded`.

    Parameters
    ----------
    packed : (total, ...)
    cu : (batch + 1,) whole numbers
        Cumulative lengths, which the host can read.
    length : int, optional
        Length of the padded sequences; None: the longest length.

    Returns
    -------
    (batch, length, ...)

    Raises
    ------
    ArgumentError, FrameworkError, MaskError, ShapeError

    Examples
    --------
    >>> import numpy as np, attnscore as ats
    >>> ats.unpack_padded(np.array([1, 2, 3, 4]), [0, 3, 4]).tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    packed = backends.variable_value(packed)
    ops = _dense({"packed": packed})
    shape = ops.shape(packed)
    ends = _cumulative(cu, _length("packed", shape, 0))
    counts = np.diff(ends)
    longest = int(counts.max(initial=0))
    length = longest if length is None else check_count("length", length)
    if length < longest:
        raise ArgumentError(message("length", f"at least {longest}, that of the longest sequence", length))
    positions = np.arange(length)
    # Padding reads a row of zeros that is appended to the packed rows.
    index = np.where(positions < counts[:, None], ends[:-1, None] + positions, shape[0])
    rows = ops.concat([packed, ops.zeros((1, *shape[1:]), packed)], 0)
    padded = ops.take(rows, ops.asarray(index.reshape(-1), packed), 0)
    return ops.reshape(padded, (len(counts), length, *shape[1:]))


# ---- ragged arrays


def attend_ragged(
    attend: Callable[..., Any],
    arrays: dict[str, Array],
    mask: Any,
    *,
    head_axis: int,
    without: dict[str, Any],
    **options: Any,
) -> Any:
    """Return `attend` of ragged arrays, (batch, length, ...), computed packed; results are ragged as the query is.

    `without` holds the arguments of `attend` that ragged arrays do not take, which must be None or False; `options` all
    others.
    """
    ops = backends.of(arrays)
    parts: dict[str, Ragged] = {}
    for name, x in arrays.items():
        part = ops.ragged(x)
        if part is None:
            raise FrameworkError(message(name, "a jagged tensor, as query is", "another", hint="torch.nested"))
        length_axis = -3 if head_axis == -2 and len(part.values.shape) > 2 else -2
        if part.axis != length_axis:
            expected = f"lengths that differ on axis {length_axis}, as head_axis is {shown(head_axis)}"
            raise ShapeError(message(name, expected, f"on axis {part.axis}"))
        parts[name] = part
    for name, x in without.items():
        if x is not None and x is not False:
            hint = "attend takes it with the values of jagged tensors, and the mask Packed(x.offsets())"
            raise ArgumentError(message(name, "nothing, as query is a jagged tensor", shown(x), hint=hint))
    query, key = parts["query"], parts["key"]
    if (offsets := parts["value"].offsets) is not key.offsets:
        ends = [backends.host(x) for x in (key.offsets, offsets)]
        if any(x is None for x in ends) or not np.array_equal(*ends):  # type: ignore[arg-type]  # neither is None
            got = "other lengths, or some on a device, which cannot be compared"
            hint = "torch.nested.nested_tensor_from_jagged(values, key.offsets()) shares those of key"
            raise ShapeError(message("value", "sequences of the lengths of key", got, hint=hint))
    packed = Packed(query.offsets, None if key.offsets is query.offsets else key.offsets)
    values = (ops.expand_dims(part.values, 0) for part in parts.values())
    result = attend(*values, mask=_per_sequence(mask, packed), head_axis=head_axis, **options)
    if not isinstance(result, tuple):
        return ops.from_ragged(query._replace(values=result[0]))
    out, stats = result
    rows = [None if x is None else ops.from_ragged(Ragged(x[0], query.offsets, query.axis + 1)) for x in stats]
    return ops.from_ragged(query._replace(values=out[0])), type(stats)(*rows)


def _per_sequence(mask: Any, packed: Packed) -> Mask:
    """Return the mask of a packed batch under which `mask` holds in each of its sequences."""
    if mask is None:
        return packed
    if isinstance(mask, (And, Or)):
        return type(mask)(_per_sequence(mask.first, packed), _per_sequence(mask.second, packed))
    if isinstance(mask, Causal) and mask.offset is None:
        return packed.causal(mask.align)
    if isinstance(mask, SlidingWindow) and mask.offset is None:
        return packed.window(mask.left, mask.right, mask.align)
    expected = "Causal or SlidingWindow without an offset, joined by & or |, as query is a jagged tensor"
    hint = "attend takes any mask with the values of jagged tensors: Packed(x.offsets()) & mask"
    raise MaskError(message("mask", expected, shown(mask), hint=hint))


# ---- checks


def _dense(arrays: dict[str, Array]) -> Backend:
    """Return the backend of arrays, none of which may be sparse, ragged or recorded."""
    ops = backends.of(arrays)
    backends.check_dense(ops, arrays)
    backends.check_not_recorded(ops, ", ".join(arrays))
    return ops


def _length(name: str, shape: Sequence[Any], axis: int) -> int:
    """Return the size of an axis, known before a graph runs."""
    if not is_whole(axis):
        raise ArgumentError(message("axis", "a whole number", shown(axis)))
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(message(name, f"an axis {axis}", f"shape {tuple(shape)}"))
    if is_unknown(shape[axis]):
        raise ShapeError(message(name, "a length that is known when the graph is made", f"shape {tuple(shape)}"))
    return int(shape[axis])


def _without(shape: Sequence[Any], axis: int) -> tuple[Any, ...]:
    """Return a shape without one of its axes."""
    axis %= len(shape)
    return (*shape[:axis], *shape[axis + 1 :])


def _readable(name: str, values: HostArray | None) -> HostArray:
    """Return the values; raise ArgumentError for None, which stands for values that the host cannot read."""
    if values is None:
        raise ArgumentError(message(name, "numbers that the host can read", "traced ones, or some on a device"))
    return values


def _cumulative(cu: Any, total: int) -> HostArray:
    """Return checked cumulative lengths as int64."""
    values = backends.host(cu)
    if values is not None and (values.ndim != 1 or not len(values)):
        raise ShapeError(message("cu", "shape (sequences + 1,)", values.shape))
    return _readable("cu", check_cumulative("cu", cu, total)).astype(np.int64)
