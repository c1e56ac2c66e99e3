"""Keys and values of a decoder's past positions: appended step by step, attended to with causal order kept.

- One buffer (batch, head, slot, dim) each for keys and values. Slots past a sequence's length are never read, so a step
  attends to the whole buffer under valid lengths: the shapes of a step, and with them its plan, stay the same until the
  buffer grows, which doubles it.
- With a window the slots after the sinks are a ring (`kv_buffers.slots`). After a step of one position the ring holds
  the window and no more; after a step of n it holds n - 1 further positions, which the first of the n queries attends
  to.
- NumPy and PyTorch write in place; JAX, TensorFlow and MXNet return a new cache over buffers of static capacity
  (`kv_buffers.storage`). Lengths are NumPy's in the first two, so that no device is waited for, and arrays of the
  framework, which may be traced, in the others.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast, final

import numpy as np

from attnscore import backends
from attnscore.api import attend
from attnscore.backends.base import Array, Backend, itemsize
from attnscore.base import thresholds
from attnscore.base.arguments import check_count, check_flag, is_whole, shown
from attnscore.errors import ArgumentError, FileError, FrameworkError, MaskError, ShapeError, message
from attnscore.kv_buffers import checks
from attnscore.kv_buffers.checks import with_heads_first
from attnscore.kv_buffers.slots import AppendedPositions, RollingWindow, positions_of_slots, slots_of_positions
from attnscore.kv_buffers.storage import STORAGE, Storage, moved
from attnscore.masks import Causal, Dense, Mask, PrefixLM, SlidingWindow, ValidLens
from attnscore.masks.base import map_atoms
from attnscore.masks.index_values import host_ints
from attnscore.masks.shape_spec import shape_of
from attnscore.plans.prepared import prepare_keys
from attnscore.scores.base import arrays_of, describe, with_arrays

__all__ = ["KeyValueCache", "RollingWindow"]


_outside_graphs = backends.outside_graphs(
    "a KeyValueCache decides by lengths on the host; compile what is around, with cache.arguments(query)"
)


Method = TypeVar("Method", bound=Callable[..., Any])


def _in_scope(method: Method) -> Method:
    """Run a method in the context in which its framework computes with buffers; an empty cache has no framework."""

    @functools.wraps(method)
    def scoped(self: KeyValueCache, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._keys is None else self._storage.scope(self._ops):
            return method(self, *args, **kwargs)

    return cast(Method, scoped)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class KeyValueCache:
    """Keys and values of past positions, per sequence, that `attend` reads in causal order.

    Position i of a sequence attends to its positions j <= i; with a window, to positions i - window < j <= i and to
    the first `sinks`.

    NumPy and PyTorch: `append`, `select`, `reorder` and `crop` change the cache and return it. JAX, TensorFlow and
    MXNet: they return a new cache, which ``jit`` and ``lax.scan``, ``tf.function`` and ``tf.while_loop`` take and
    return. So ``cache = cache.append(key, value)`` is right everywhere.

    Parameters
    ----------
    score : a score object or a registered name, optional
        Keys are then kept as this score prepares them (`prepare_keys`), so that a step projects the new keys alone.
        None keeps keys as they come; pass the score to `attend` then.
    window : whole number above 0, optional
        Memory then holds sinks + window positions (and n - 1 more after an append of n).
    sinks : whole number
        First positions that stay attended to outside of the window.
    head_axis : -3, or -2 for keys and values (batch, length, head, dim)
    capacity : whole number above 0, optional
        Slots allocated at the first append. NumPy and PyTorch allocate more when needed. The others do not, and need a
        capacity unless there is a window; positions past it are dropped, as lengths past the keys are clamped.

    Notes
    -----
    PyTorch: an append copies the buffer where autograd records it, or holds it for the gradient of an attention over
    it. Decode under ``torch.no_grad()``; in training append a sequence at once.

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, for sinks.

    Examples
    --------
    Step by step, as in one pass:

    >>> import numpy as np, attnscore as ats
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 5, 4))
    >>> cache = ats.KeyValueCache()
    >>> steps = [slice(0, 3), slice(3, 4), slice(4, 5)]
    >>> outs = [cache.append(k[:, :, s], v[:, :, s]).attend(q[:, :, s]) for s in steps]
    >>> bool(np.allclose(np.concatenate(outs, axis=2), ats.attend(q, k, v, mask=ats.Causal())))
    True
    >>> cache
    KeyValueCache(5 of 6 slots, batch 1, head 2)
    """

    score: Any = None
    window: int | None = None
    sinks: int = 0
    head_axis: int = -3
    capacity: int | None = None
    # (batch, head, slot, dim); a head of 1 where the caller's arrays have three axes.
    _keys: Array = field(default=None, init=False)
    _values: Array = field(default=None, init=False)
    _has_heads: bool = field(default=True, init=False)
    _key_dim: int = field(default=1, init=False)
    """Dimension of the keys before they were prepared."""
    _lens: Array = field(default=None, init=False)
    """Positions of each sequence so far, (batch,)."""
    _starts: Array = field(default=None, init=False)
    """The lengths before the last append."""
    _appended: int | None = field(default=None, init=False)
    """Positions of the last append; None after a crop, and in a functional cache."""
    _oldest: Array = field(default=None, init=False)
    """The first position in the ring that was not overwritten; None in a functional cache."""
    _checked: Any = field(default=None, init=False)
    """Signature (kinds, shapes, dtypes) of the last append, which passed the checks; None in a functional cache."""
    _prepared_score: Any = field(default=None, init=False)
    _is_saved: bool = field(default=False, init=False)
    """Whether autograd holds the buffers, for the gradient of an attention over them."""

    def __post_init__(self) -> None:
        for name, x in (("window", self.window), ("capacity", self.capacity)):
            if x is not None and (not is_whole(x) or x < 1):
                raise ArgumentError(message(name, "a whole number above 0, or None", shown(x)))
        if check_count("sinks", self.sinks) and self.window is None:
            hint = f"without a window every position is kept; KeyValueCache(window=..., sinks={self.sinks}) drops some"
            raise ArgumentError(message("sinks", "0 without a window", self.sinks, hint=hint))
        if not is_whole(self.head_axis) or self.head_axis not in (-3, -2):
            expected = "-3, for (batch, head, length, dim), or -2, for (batch, length, head, dim)"
            raise ArgumentError(message("head_axis", expected, shown(self.head_axis)))

    # ------------------------------------------------------------------ contents

    @property
    def lens(self) -> Array:
        """Positions appended to each sequence, (batch,): the position of the next one."""
        return self._check_filled("lens")._lens

    @property
    def keys(self) -> Array:
        """The buffer of keys, on the caller's axes; read it under `mask`, as not every slot holds a position."""
        return self._on_callers_axes(self._check_filled("keys")._keys)

    @property
    def values(self) -> Array:
        """The buffer of values, on the caller's axes."""
        return self._on_callers_axes(self._check_filled("values")._values)

    @property
    @_in_scope
    def positions(self) -> Array:
        """The position that each slot holds, (batch, slot); -1 for a slot that holds none."""
        self._check_filled("positions")
        index = self._index
        cols = index.reshape(index.positions(0, self.slots, self._lens), (1, -1))
        positions = positions_of_slots(index, cols, index.reshape(self._lens, (-1, 1)), self.sinks, self.slots)
        if self._oldest is not None:
            positions = np.where((cols >= self.sinks) & (positions < self._oldest[:, None]), -1, positions)
        return positions

    @property
    def slots(self) -> int:
        """Number of slots of the buffers: their capacity now."""
        return int(self._check_filled("slots")._keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        if self._keys is None:
            return 0
        return sum(int(math.prod(x.shape)) * itemsize(self._ops.dtype(x)) for x in (self._keys, self._values))

    @_outside_graphs
    @_in_scope
    def next_positions(self, count: int) -> Array:
        """Return the positions of the next `count`, (batch, count), or (1, count) while the cache is empty."""
        if self._keys is None:
            return np.arange(count)[None]
        index = self._index
        return index.reshape(self._lens, (-1, 1)) + index.positions(0, count, self._lens)

    def __repr__(self) -> str:
        arguments = {"score": self.score, "window": self.window, "sinks": self.sinks or None}
        options = [f"{name}={x!r}" for name, x in arguments.items() if x is not None]
        if self._keys is None:
            return f"KeyValueCache({', '.join([*options, 'empty'])})"
        lens = host_ints(self._lens)
        held = "?" if lens is None else min(int(lens.max(initial=0)), self.slots)
        heads = f", head {self._keys.shape[1]}" if self._has_heads else ""
        return f"KeyValueCache({', '.join([*options, f'{held} of {self.slots} slots'])}, batch {self._batch}{heads})"

    # ------------------------------------------------------------------ changes

    @_outside_graphs
    def append(self, key: Array, value: Array, *, lens: Any = None) -> Self:
        """Append positions to every sequence, and return the cache.

        Parameters
        ----------
        key : (batch, heads, n, dim), (batch, n, heads, dim) with ``head_axis=-2``, or (batch, n, dim)
            An append of no positions (n = 0) allocates the buffers: the carry of ``lax.scan`` needs its shapes.
        value : the same with value_dim
        lens : (batch,) whole numbers in 0..n, optional
            Append the first `lens` of a sequence alone; the rest is padding.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError, ArgumentError
        """
        return self._append({"key": key, "value": value}, {"lens": lens})

    @_outside_graphs
    @_in_scope
    def crop(self, lens: Any) -> Self:
        """Forget the positions from `lens` on, as after rejected drafts, and return the cache.

        A longer length changes nothing. With a window, positions that the next query attends to may have been
        overwritten; as many as the last append had can always be forgotten.

        Parameters
        ----------
        lens : whole number, or (batch,)

        Raises
        ------
        ArgumentError
        """
        cache, index = self._copy_if_functional("crop"), self._index
        ends = index.minimum(self._lens, index.asarray(checks.lengths("lens", lens, self._batch), self._lens, "int64"))
        if self._oldest is not None:
            if (lost := self._is_overwritten(ends)).any():
                b = int(lost.argmax())
                hint = "the ring has overwritten positions in the window of the next one"
                raise ArgumentError(message("lens", f"more for sequence {b}", int(ends[b]), hint=hint))
            cache._oldest = np.minimum(self._oldest, ends)
        cache._lens, cache._starts, cache._appended = ends, index.zeros((self._batch,), ends, "int64"), None
        return cache

    @_outside_graphs
    @_in_scope
    def select(self, indices: Any) -> Self:
        """Keep the sequences `indices`, in this order, and return the cache; an index may repeat.

        Parameters
        ----------
        indices : (new batch,) whole numbers
            A sequence repeated for each of its beams; the sequences that have not ended.

        Raises
        ------
        ShapeError, ArgumentError
        """
        cache, index = self._copy_if_functional("select"), self._index
        chosen = index.asarray(checks.sequences(indices, self._batch), self._lens)
        cache._keys, cache._values = (
            self._storage.select_sequences(self._ops, x, chosen, self._is_saved) for x in (self._keys, self._values)
        )
        cache._is_saved = False
        for name in ("_lens", "_starts", *(("_oldest",) if self._oldest is not None else ())):
            setattr(cache, name, index.take(getattr(self, name), chosen, 0))
        cache._checked = None
        return cache

    def reorder(self, indices: Any) -> Self:
        """Give each sequence the past of the sequence `indices`, and return the cache: the step of a beam search.

        In place, only sequences that change are copied.

        Parameters
        ----------
        indices : (batch,) whole numbers

        Raises
        ------
        ShapeError, ArgumentError
        """
        batch, shape = self._check_filled("reorder")._batch, shape_of(indices)
        if shape != (batch,):
            hint = "select() changes the number of sequences"
            raise ShapeError(message("indices", f"shape ({batch},)", shape, hint=hint))
        return self.select(indices)

    @_outside_graphs
    def copy(self) -> Self:
        """Return a cache of the same contents, which changes on its own."""
        cache = copy.copy(self)
        if self._keys is not None and self._storage.is_in_place:
            rows = self._ops.asarray(np.arange(self._batch), self._keys)
            cache._keys, cache._values = (self._ops.take(x, rows, 0) for x in (self._keys, self._values))
        return cache

    # ------------------------------------------------------------------ attention

    @_outside_graphs
    def attend(self, query: Array, *, causal: bool = True, mask: Any = None, **options: Any) -> Any:
        """Return ``attend(query, ...)`` over the positions held, in causal order.

        The queries belong to the last append: query i of a sequence is at its i-th new position, and gives zero
        where the position is padding. Fewer queries are the last positions.

        Parameters
        ----------
        query : (batch, heads, n, dim), in the layout of the keys
        causal : bool
            False attends to all positions held, as a decoder does to an encoder's; not with a window.
        mask : a mask object or a boolean array over (..., query, slot), optional
            Combined with the cache's mask by AND; `positions` has the position of each slot. The diagonal of `Causal`,
            `SlidingWindow` and `PrefixLM` ends at the last position, unless they have an `offset` or ``"top_left"``.
        **options
            As in `attend`, except `valid_lens` and `head_axis`, and `score` where the cache has one.

        Returns
        -------
        out : result of `attend`; weights are over the slots

        Raises
        ------
        ShapeError, ArgumentError, and the errors of `attend`
        """
        for name in ("valid_lens", "head_axis", *(("score",) if self.score is not None else ())):
            if name in options:
                expected = "an argument of the cache, not of its attend()"
                raise ArgumentError(message(name, expected, shown(options[name])))
        result = attend(query, **self.arguments(query, causal=causal, mask=mask), **options)
        self.hold_for(result[0] if isinstance(result, tuple) else result)
        return result

    @_outside_graphs
    def hold_for(self, out: Array) -> None:
        """Copy the buffers before the next append if autograd may hold them for the gradient of `out`.

        `attend` does so; a caller of `arguments` whose score, bias or sink alone is trained does it itself.

        Parameters
        ----------
        out : the result of a call with the cache's arguments
        """
        self._is_saved = self._is_saved or bool(getattr(out, "requires_grad", False))

    @_outside_graphs
    def arguments(self, query: Array, *, causal: bool = True, mask: Any = None) -> dict[str, Any]:
        """Return the arguments of `attend` except the query: for `explain`, `attention_weights` and the like.

        It takes the parameters of the method `attend`.

        Examples
        --------
        >>> import numpy as np, attnscore as ats
        >>> x = np.zeros((1, 4, 2))
        >>> arguments = ats.KeyValueCache().append(x, x).arguments(x[:, 2:])
        >>> ats.attend(x[:, 2:], **arguments, return_weights=True)[1]
        array([[[0.33333333, 0.33333333, 0.33333333, 0.        ],
                [0.25      , 0.25      , 0.25      , 0.25      ]]])
        """
        keys, values = self._check_filled("attend").keys, self.values
        query = backends.variable_value(query)
        if len(getattr(query, "shape", ())) != len(keys.shape):
            expected = f"{len(keys.shape)} axes, as the keys of the cache have"
            raise ShapeError(message("query", expected, shown(query)))
        count = query.shape[self._length_axis]
        visible, valid_lens = self._visible_slots(count, causal), None
        if mask is not None:
            others = self._aligned(mask, count, causal) if isinstance(mask, Mask) else Dense(mask)
            mask = self.mask(count, causal=causal) & others
        elif not isinstance(visible, Mask):
            valid_lens = visible
        else:
            mask = visible
            # An array, unlike intervals, keeps the plan from step to step.
            if self._storage.is_in_place and self._batch * count * self.slots <= thresholds.WINDOW_PAIRS:
                array = mask.materialize(count, self.slots, self._batch)
                mask = self._ops.asarray(array[:, None] if self._has_heads else array, query)
        # The gradient of the query is computed from the keys and values, which an append must not overwrite.
        if self._storage.is_in_place and backends.of({"query": query}).needs_grad(query):
            self._is_saved = True
        arguments = {"key": keys, "value": values, "mask": mask, "valid_lens": valid_lens, "head_axis": self.head_axis}
        return arguments if self.score is None else arguments | {"score": self._prepared_score}

    def mask(self, query_len: int, *, causal: bool = True) -> Mask:
        """Return the mask of the last `query_len` positions over the slots of `keys` and `values`.

        Examples
        --------
        >>> import numpy as np, attnscore as ats
        >>> cache = ats.KeyValueCache().append(np.ones((1, 4, 2)), np.ones((1, 4, 3)))
        >>> cache.mask(2)
        ValidLens(lens=[[3, 4]])
        """
        visible = self._check_filled("mask")._visible_slots(query_len, causal)
        return visible if isinstance(visible, Mask) else ValidLens(visible)

    @_in_scope
    def _aligned(self, mask: Mask, count: int, causal: bool) -> Mask:
        """Return a mask whose diagonal ends at the last position, not at a slot that holds none yet."""

        def align(atom: Mask) -> Mask:
            if not isinstance(atom, (Causal, SlidingWindow, PrefixLM)):
                return atom
            if not isinstance(atom, PrefixLM) and (atom.offset is not None or atom.align == "top_left"):
                return atom
            if self.window is not None:
                hint = "leave it out; the mask of the cache is causal, and has its window"
                raise MaskError(message("mask", "none with a diagonal in a cache with a window", atom, hint=hint))
            offset = self._first_positions(count) if causal else self._lens - count
            if isinstance(atom, PrefixLM):
                return Causal(offset=offset) | ValidLens(atom.prefix_lens)
            return replace(atom, align=None, offset=offset)

        return map_atoms(mask, align)

    @_in_scope
    def _visible_slots(self, count: int, causal: bool) -> Array | RollingWindow:
        """Return how many slots each query attends to, (batch, n), or a mask where these are not the first ones."""
        causal = check_flag("causal", causal)
        index = self._index
        ends = index.reshape(self._lens, (-1, 1))
        if not causal:
            if self.window is not None:
                raise ArgumentError(message("causal", "True with a window", causal))
            return index.broadcast_to(ends, (self._batch, count))
        if self._storage.is_in_place:
            checks.check_host_sizes("query", (count,))
        start = self._first_positions(count)
        if self.window is not None:
            limit = self.sinks + self.window
            # A query attends to the first slots where it is the only one, and the ring holds its window and no more; or
            # where the windows hold every position so far.
            is_whole_ring = count == 1 and self.slots <= limit
            if not is_whole_ring and (self._oldest is None or int(self._lens.max(initial=0)) > limit):
                return RollingWindow(start, self._lens, self.window, self.sinks)
        positions = index.reshape(start, (-1, 1)) + index.positions(0, count, start)
        visible = index.minimum(positions + 1, self.slots)
        return index.where(positions < ends, visible, index.zeros((), ends, index.dtype(visible)))

    def _first_positions(self, count: int) -> Array:
        """Return the position of the first of `count` queries: the last positions, none before the last append.

        A sequence that was padded in the last append has its padding among these queries.
        """
        if self._appended is not None and count > self._appended:
            expected = f"at most as many queries as the last append had positions ({self._appended})"
            raise ShapeError(message("query", expected, count))
        start = self._index.maximum(self._starts, self._lens - count)
        if self._oldest is not None and self._is_overwritten(start).any():
            hint = "after crop() append before the next attention"
            raise ShapeError(message("query", "positions whose windows are held", f"{count} positions", hint=hint))
        return start

    def _is_overwritten(self, queries: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return whether the ring has lost a position that the query at position `queries[b]` attends to, (batch,)."""
        if self.window is None:
            return np.zeros(len(queries), bool)
        first = np.maximum(queries - self.window + 1, self.sinks)
        lost: np.ndarray[Any, Any] = first < np.minimum(self._oldest, queries)
        return lost

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the positions held and the options, except for the score, to a .safetensors (or .npz) file.

        Raises
        ------
        FileError, FrameworkError, AttnscoreError
        """
        # Here, so that importing the package does not import them.
        from attnscore import io
        from attnscore.kv_buffers import files

        self._check_filled("save")
        lens = host_ints(self._lens)
        if lens is None:
            raise ArgumentError(message("cache", "one whose lengths the host can read", "a traced one"))
        used, ops = min(self.slots, int(lens.max(initial=0))), self._ops
        keys, values = (files.host_array(ops, ops.slice_axis(x, 2, 0, used)) for x in (self._keys, self._values))
        contents = {"keys": keys, "values": values, "lens": lens, "oldest": self._oldest, "slots": self.slots}
        contents |= {"has_heads": int(self._has_heads), "key_sizes": np.array([values.shape[1], self._key_dim])}
        contents |= {name: getattr(self, name) for name in ("window", "sinks", "head_axis")}
        io.write_arrays(Path(path), {name: np.asarray(x) for name, x in contents.items() if x is not None})

    @classmethod
    def load(cls, path: str | Path, *, like: Array = None, score: Any = None) -> Self:
        """Return the cache of a file that `save` wrote.

        Parameters
        ----------
        path : str or Path
        like : array, optional
            Framework and device of the buffers; None: NumPy.
        score : a score object or a registered name, optional
            The score that the cache had when it was saved.

        Raises
        ------
        FileError, FrameworkError
        """
        from attnscore.kv_buffers import files

        contents = files.read(Path(path))
        options: dict[str, Any] = {name: contents[name] for name in ("window", "sinks", "head_axis")}
        try:
            cache = cls(score=score, capacity=contents["slots"] or None, **options)
        except ArgumentError as error:
            raise FileError(f"{path}: no cache of keys and values: {error}") from error
        like = np.empty(0) if like is None else like
        ops = backends.of({"like": like})
        storage = STORAGE[ops.name]
        with storage.scope(ops):
            heads, dim = map(int, contents["key_sizes"])
            cache._has_heads, cache._key_dim = bool(contents["has_heads"]), dim
            cache._keys, cache._values = (
                files.buffer_of(ops, contents[name], contents["slots"], like) for name in ("keys", "values")
            )
            lens, index = contents["lens"].astype(np.int64), storage.index_ops(ops)
            cache._lens, cache._starts = (index.asarray(x, like, "int64") for x in (lens, np.zeros_like(lens)))
            if storage.is_in_place:
                oldest = np.maximum(0, lens - (cache.slots - cache.sinks))
                cache._oldest = oldest if contents["oldest"] is None else contents["oldest"]
            # The score that `prepare_keys` leaves depends on the shapes of the keys alone.
            some = ops.zeros((1, heads, 1, dim), cache._keys)
            cache._prepared_score = cache._prepare_keys(some if cache._has_heads else some[:, 0], -3)[1]
        return cache

    # ------------------------------------------------------------------ inside

    @property
    def _ops(self) -> Backend:
        return backends.of({"keys": self._keys})

    @property
    def _storage(self) -> Storage:
        return STORAGE[self._ops.name]

    @property
    def _index(self) -> Backend:
        """The backend that computes with lengths and positions: NumPy where they are on the host."""
        ops = self._ops
        return STORAGE[ops.name].index_ops(ops)

    @property
    def _batch(self) -> int:
        return int(self._keys.shape[0])

    @property
    def _length_axis(self) -> int:
        """The axis of the caller's arrays that counts positions."""
        return 2 if self._has_heads and self.head_axis == -3 else 1

    def _check_filled(self, operation: str) -> Self:
        """Return the cache; raise ArgumentError, which names `operation` was asked for, before the first append."""
        if self._keys is None:
            hint = "an append of no positions (n = 0) allocates the buffers"
            raise ArgumentError(message(operation, "a cache with an append before", "an empty one", hint=hint))
        return self

    def _copy_if_functional(self, operation: str) -> Self:
        """Return the cache that `operation` changes: this one, or a copy where caches are functional."""
        return self if self._check_filled(operation)._storage.is_in_place else copy.copy(self)

    def _on_callers_axes(self, x: Array) -> Array:
        if not self._has_heads:
            return x[:, 0]
        return self._ops.swap_axes(x, 1, 2) if self.head_axis == -2 else x

    # ------------------------------------------------------------------ an append

    @_outside_graphs
    def _append(self, arrays: dict[str, Array], counts: dict[str, Any], *, on_copy: bool = False) -> Self:
        """Return the cache after `append`; its arguments have the names by which the caller, or a layer's, has them.

        With `on_copy` this cache stays as it was until `_take_over`, but a ring may lose what left the next window.
        """
        arrays = {name: backends.variable_value(x) for name, x in arrays.items()}
        (key_name, key), (_, value) = arrays.items()
        ((lens_name, lens),) = counts.items()
        ops = backends.of(arrays)
        if ops.name not in STORAGE:
            raise FrameworkError(message(key_name, "an array of " + " or ".join(STORAGE), f"one of {ops.name}"))
        storage = STORAGE[ops.name]
        if storage.is_in_place and not getattr(key, "is_nested", False):  # `check_pair` refuses a nested key
            checks.check_host_sizes(key_name, getattr(key, "shape", ()))
        signature = ops.array_signature(key), ops.array_signature(value)
        # The checks take a third of the time of a step, and an append like the last one passes them.
        if signature != self._checked:
            checks.check_pair(ops, arrays)
            if self._keys is not None:
                checks.check_like_buffer(ops, self.values, self._key_dim, self._length_axis, arrays)
        # So that JAX's transformations take a cache, with its score, as argument and result.
        for kind in (KeyValueCache, type(self.score)):
            backends.register_pytree(kind)
        with storage.scope(ops):
            prepared, prepared_score = self._prepare_keys(key, self.head_axis)
            pair = tuple(with_heads_first(ops, x, self.head_axis) for x in (prepared, value))
            batch, _, count, _ = pair[1].shape
            added = np.full(batch, count) if lens is None else checks.lengths(lens_name, lens, batch, count)
            cache = self if storage.is_in_place and not on_copy else copy.copy(self)
            cache._prepared_score = prepared_score
            if cache._keys is None:
                cache._has_heads, cache._key_dim = len(key.shape) == 4, int(key.shape[-1])
                cache._allocate(ops, storage, pair)
            appended = cache._reserve_positions(added, count)
            if count:
                cache._keys, cache._values = (
                    storage.written(ops, buffer, x, appended, cache._is_saved)
                    for buffer, x in zip((cache._keys, cache._values), pair, strict=True)
                )
                cache._is_saved = False
            cache._starts, cache._lens = appended.starts, appended.ends
        if storage.is_in_place:
            cache._appended, cache._checked = count, signature
            self._oldest = cache._oldest = np.maximum(cache._oldest, cache._lens - (cache.slots - cache.sinks))
        return cache

    @_outside_graphs
    def _take_over(self, appended: Self, out: Array) -> Self:
        """Return the cache after an append on a copy whose keys gave `out`: this one where caches change in place."""
        appended.hold_for(out)
        if not appended._storage.is_in_place:
            return appended
        vars(self).update(vars(appended))
        return self

    def _prepare_keys(self, key: Array, head_axis: int) -> tuple[Array, Any]:
        """Return keys as the score of the cache prepares them, and the score that is left."""
        if self.score is None:
            return key, None
        prepared = prepare_keys(self.score, key, head_axis=head_axis)
        return prepared.key, prepared.score

    def _allocate(self, ops: Backend, storage: Storage, pair: Sequence[Array]) -> None:
        """Make the buffers for keys and values like `pair`; they hold no position yet."""
        batch, _, count, _ = pair[1].shape
        index, size = storage.index_ops(ops), int(self.capacity or 0)
        if self.capacity is None and not storage.is_in_place:
            if self.window is None:
                hint = "only the buffers of NumPy and PyTorch grow"
                raise ArgumentError(message("capacity", "a number of positions", None, hint=hint))
            size = self._slots_of_window(count)
        self._lens = index.zeros((batch,), pair[1], "int64")
        self._oldest = np.zeros(batch, np.int64) if storage.is_in_place else None
        self._keys, self._values = (ops.zeros((*x.shape[:2], size, x.shape[3]), x) for x in pair)

    def _slots_of_window(self, count: int) -> int:
        """Return the slots that a window needs while `count` positions are appended."""
        return self.sinks + int(self.window or 0) + max(count, 1) - 1

    def _reserve_positions(self, added: Array, count: int) -> AppendedPositions:
        """Make room for `added` (batch,) positions, the first of `count` entries each, and return them.

        In place, a ring that a long append has enlarged shrinks, which drops positions outside the window. Functional
        buffers without a window drop positions past their capacity.
        """
        index, size = self._index, self.slots
        ends = self._lens + index.asarray(added, self._lens, "int64")
        limit = math.inf if self.window is None else self._slots_of_window(count)
        if self._storage.is_in_place:
            length = int(ends.max(initial=0))
            if size < min(length, limit):
                # At least twice the size, so that appends copy each position a bounded number of times.
                self._resize(int(min(max(length, 2 * size), limit)))
            elif size > limit and (count == 1 or size > 2 * limit):
                self._resize(int(limit))
        elif self.window is None:
            ends = index.minimum(ends, size)
        elif size < limit:
            expected = f"at least sinks + window + n - 1 = {limit} for n = {count}"
            raise ArgumentError(message("capacity", expected, size))
        return AppendedPositions(index, self._lens, ends, count, self.sinks, self.slots)

    def _resize(self, size: int) -> None:
        """Move the positions that fit to buffers with `size` slots: the sinks and the newest ones."""
        ops, positions, oldest = self._ops, self.positions, self._lens - (size - self.sinks)
        is_newest = (positions >= 0) & ((positions < self.sinks) | (positions >= oldest[:, None]))
        slots = slots_of_positions(self._index, positions, self.sinks, size)
        self._keys, self._values = (
            moved(ops, ops.zeros((*x.shape[:2], size, x.shape[3]), x), x, slots, is_newest)
            for x in (self._keys, self._values)
        )
        self._oldest = np.maximum(self._oldest, oldest)

    # ------------------------------------------------------------------ TensorFlow's nested structures

    def __tf_flatten__(self) -> tuple[tuple[_Structure], tuple[Array, ...]]:
        """Return the structure and the arrays, as arguments and results of ``tf.function`` and carries of loops."""
        shell, names = copy.copy(self), [each.name for each in dataclasses.fields(self)]
        arrays = {name: getattr(self, name) for name in names if backends.is_array(getattr(self, name))}
        for name in arrays:
            setattr(shell, name, ...)
        parameters = (x for score in (self.score, self._prepared_score) for x in arrays_of(score).values())
        description = repr([describe(getattr(shell, name)) for name in names])
        return (_Structure(shell, description),), (*arrays.values(), *parameters)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple[_Structure], components: tuple[Array, ...]) -> KeyValueCache:
        """Return the cache of a structure and arrays."""
        cache, arrays = copy.copy(metadata[0].shell), iter(components)
        for each in dataclasses.fields(cache):
            if getattr(cache, each.name) is ...:
                setattr(cache, each.name, next(arrays))
        cache.score, cache._prepared_score = (
            with_arrays(score, lambda _: next(arrays)) for score in (cache.score, cache._prepared_score)
        )
        return cache


# As TensorFlow's ``do_not_convert``: AutoGraph would rewrite the methods that a tf.function calls.
for _member in vars(KeyValueCache).values():
    if inspect.isfunction(_member):
        _member.autograph_info__ = {}  # type: ignore[attr-defined]  # functions take any attribute
del _member


@dataclass(frozen=True)
class _Structure:
    """All of a cache but its arrays, compared by value: two caches of one structure share a traced function."""

    shell: KeyValueCache = field(compare=False)
    """The cache with ``...`` in place of its arrays; scores keep theirs, because they check them."""
    description: str
