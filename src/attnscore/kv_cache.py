"""Keys and values of a decoder's past positions: appended step by step, attended to with causal order kept.

- One buffer (batch, head, slot, dim) each for keys and values. Slots past a sequence's length are never read, so a step
  attends to the whole buffer under valid lengths: the shapes of a step, and with them its plan, stay the same until the
  buffer grows, which doubles it.
- With a window the slots after the sinks are a ring: position p has the slot sinks + (p - sinks) mod ring. After a
  step of one position the ring holds the window and no more; after a step of n it holds n - 1 further positions, which
  the first of the n queries attends to.
- NumPy and PyTorch write in place; JAX returns a new cache over a buffer of static capacity. Lengths are NumPy's in the
  first two, so that no device is waited for, and arrays of JAX, which may be traced, in the last.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from attnscore import backends
from attnscore.api import attend
from attnscore.backends.base import FLOATING, Array, Backend
from attnscore.core.arguments import check_count, is_whole, shown
from attnscore.core.layout import ScoreShape
from attnscore.core.prepared import prepare_keys
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, ShapeError, message
from attnscore.masks import Dense, IntervalSet, Mask, ValidLens
from attnscore.masks.base import IntervalSetMask
from attnscore.masks.index_values import column, host_ints, per_batch
from attnscore.masks.shape_spec import ShapeSpec

_IN_PLACE = ("numpy", "torch")
_FRAMEWORKS = (*_IN_PLACE, "jax")
# Pairs of query and slot up to which the mask of a window becomes a boolean array: a plan reads that at each call,
# while intervals, being part of the plan, are planned anew at each step (0.5 ms).
_FEW_PAIRS = 2**18
# The arrays of a file; "window" and "oldest" may be among them.
_SAVED = ("keys", "values", "lens", "slots", "has_heads", "key_sizes", "head_axis", "sinks")

_outside_graphs = backends.outside_graphs(
    "a KeyValueCache decides by lengths on the host; compile what is around, with cache.arguments(query)"
)


@final
@dataclass(eq=False, repr=False, kw_only=True)
class KeyValueCache:
    """Keys and values of past positions, per sequence, that `attend` reads in causal order.

    Position i of a sequence attends to its positions j <= i; with a window, to those with i - window < j <= i and to
    the first `sinks`.

    NumPy and PyTorch: `append`, `select`, `reorder` and `crop` change the cache and return it. JAX: they return a new
    cache, a pytree that ``jit`` and ``lax.scan`` take. So ``cache = cache.append(key, value)`` is right everywhere.

    Parameters
    ----------
    score : a score object or a registered name, optional
        Keys are then kept as this score prepares them (`prepare_keys`), so that a step projects the new keys alone.
        None keeps keys as they come; `attend` then takes the score.
    window : whole number above 0, optional
        Memory is then that of sinks + window positions (and n - 1 more after an append of n).
    sinks : whole number
        First positions that stay attended to outside of the window.
    head_axis : -3, or -2 for keys and values (batch, length, head, dim)
    capacity : whole number above 0, optional
        Slots allocated at the first append. NumPy and PyTorch allocate more when needed. JAX does not, and needs a
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
    _key_sizes: tuple[int, int] | None = field(default=None, init=False)
    """Heads and dimension of the keys before they were prepared."""
    _lens: Array = field(default=None, init=False)
    """Positions of each sequence so far, (batch,)."""
    _starts: Array = field(default=None, init=False)
    """The lengths before the last append."""
    _appended: int | None = field(default=None, init=False)
    """Positions of the last append; None after a crop, and in JAX."""
    _oldest: Array = field(default=None, init=False)
    """The first position in the ring that was not overwritten; None in JAX."""
    _checked: Any = field(default=None, init=False)
    """Signature (kinds, shapes, dtypes) of the last append, which passed the checks; None in JAX."""
    _prepared_score: Any = field(default=None, init=False)
    _is_saved: bool = field(default=False, init=False)
    """Whether autograd holds the buffers, for the gradient of an attention over them."""

    def __post_init__(self) -> None:
        if self.window is not None and (not is_whole(self.window) or self.window < 1):
            raise ArgumentError(message("window", "a whole number above 0, or None", shown(self.window)))
        if check_count("sinks", self.sinks) and self.window is None:
            raise ArgumentError(message("sinks", "0 without a window", self.sinks, hint="every position is kept"))
        if not is_whole(self.head_axis) or self.head_axis not in (-3, -2):
            expected = "-3, for (batch, head, length, dim), or -2, for (batch, length, head, dim)"
            raise ArgumentError(message("head_axis", expected, shown(self.head_axis)))
        if self.capacity is not None and (not is_whole(self.capacity) or self.capacity < 1):
            raise ArgumentError(message("capacity", "a whole number above 0, or None", shown(self.capacity)))

    # ------------------------------------------------------------------ what it holds

    @property
    def lens(self) -> Array:
        """Positions appended to each sequence, (batch,): the position of the next one."""
        return self._filled("lens")._lens

    @property
    def keys(self) -> Array:
        """The buffer of keys, on the caller's axes; read it under `mask`, as not every slot holds a position."""
        return self._on_callers_axes(self._filled("keys")._keys)

    @property
    def values(self) -> Array:
        """The buffer of values, on the caller's axes."""
        return self._on_callers_axes(self._filled("values")._values)

    @property
    def positions(self) -> Array:
        """The position that each slot holds, (batch, slot); -1 for a slot that holds none."""
        self._filled("positions")
        index = self._index
        cols = index.reshape(index.positions(0, self.slots, self._lens), (1, -1))
        found = _positions_of_slots(index, cols, index.reshape(self._lens, (-1, 1)), self.sinks, self.slots)
        if self._oldest is not None:
            found = np.where((cols >= self.sinks) & (found < self._oldest[:, None]), -1, found)
        return found

    @property
    def slots(self) -> int:
        """Number of slots of the buffers: their capacity now."""
        return int(self._filled("slots")._keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return 0 if self._keys is None else int(self._keys.nbytes + self._values.nbytes)

    @_outside_graphs
    def next_positions(self, count: int) -> Array:
        """Return the positions of the next `count`, (batch, count), or (1, count) while the cache is empty."""
        if self._keys is None:
            return np.arange(count)[None]
        index = self._index
        return index.reshape(self._lens, (-1, 1)) + index.positions(0, count, self._lens)

    def __repr__(self) -> str:
        given = {"score": self.score, "window": self.window, "sinks": self.sinks or None}
        options = [f"{name}={x!r}" for name, x in given.items() if x is not None]
        if self._keys is None:
            return f"KeyValueCache({', '.join([*options, 'empty'])})"
        lens = host_ints(self._lens)
        held = "?" if lens is None else min(int(lens.max(initial=0)), self.slots)
        heads = f", head {self._keys.shape[1]}" if self._has_heads else ""
        return (
            f"KeyValueCache({', '.join([*options, f'{held} of {self.slots} slots'])}, batch {len(self._lens)}{heads})"
        )

    # ------------------------------------------------------------------ what changes it

    @_outside_graphs
    def append(self, key: Array, value: Array, *, lens: Any = None) -> Self:
        """Append positions to every sequence, and return the cache.

        Parameters
        ----------
        key : (batch, heads, n, dim), (batch, n, heads, dim) with ``head_axis=-2``, or (batch, n, dim)
            An append of no positions (n = 0) allocates the buffers: what ``lax.scan`` carries has to have its shapes.
        value : the same with value_dim
        lens : (batch,) whole numbers in 0..n, optional
            Append the first `lens` of a sequence alone; the rest is padding.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, FrameworkError, ArgumentError
        """
        ops = backends.of({"key": key, "value": value})
        if ops.name not in _FRAMEWORKS:
            raise FrameworkError(message("key", "an array of " + " or ".join(_FRAMEWORKS), f"one of {ops.name}"))
        for kind in (KeyValueCache, type(self.score)):
            ops.register_pytree(kind)
        given = ops.array_signature(key), ops.array_signature(value)
        # The checks take a third of the time of a step, and an append like the last one passes them.
        sizes = self._key_sizes if given == self._checked else self._check(ops, {"key": key, "value": value})
        cache = self if ops.name in _IN_PLACE else copy.copy(self)
        cache._has_heads = len(key.shape) == 4
        if self.score is not None:
            prepared = prepare_keys(self.score, key, head_axis=self.head_axis)
            key, cache._prepared_score = prepared.key, prepared.score
        key, value = (_with_heads_first(ops, x, self.head_axis) for x in (key, value))
        batch, count = value.shape[0], value.shape[2]
        index = backends.load("numpy") if ops.name in _IN_PLACE else ops
        like = np.empty(0) if ops.name in _IN_PLACE else value
        added = index.asarray(_counts(lens, batch, count), like, "int64")
        if cache._keys is None:
            cache._key_sizes = sizes
            cache._lens = index.zeros((batch,), like, "int64")
            cache._oldest = np.zeros(batch, np.int64) if ops.name in _IN_PLACE else None
            size = cache._first_size(ops, count)
            buffers = (ops.zeros((*x.shape[:2], size, x.shape[3]), x) for x in (key, value))
            cache._keys, cache._values = buffers
        starts, ends = cache._lens, cache._lens + added
        if ops.name in _IN_PLACE:
            cache._reserve(ops, int(ends.max(initial=0)), count)
        elif self.window is None:
            ends = index.minimum(ends, cache.slots)
        elif cache.slots < self.sinks + self.window + count - 1:
            expected = f"at least sinks + window + n - 1 = {self.sinks + self.window + count - 1} for n = {count}"
            raise ArgumentError(message("capacity", expected, cache.slots))
        steps = index.reshape(index.positions(0, count, starts), (1, -1))
        slots = positions = index.reshape(starts, (-1, 1)) + steps
        # Without a window a position has the slot of its number. In JAX, whose buffers do not grow, that may be past
        # the buffer, and nothing is written.
        if self.window is not None:
            slots = _slots_of_positions(index, positions, self.sinks, cache.slots)
        is_new = index.broadcast_to(steps < index.reshape(added, (-1, 1)), slots.shape)
        places = _places(index, slots, is_new, cache.slots)
        cache._keys = _written(ops, cache._keys, key, places, is_saved=self._is_saved)
        cache._values = _written(ops, cache._values, value, places, is_saved=self._is_saved)
        cache._starts, cache._lens, cache._is_saved = starts, ends, False
        if ops.name in _IN_PLACE:
            cache._appended, cache._checked = count, given
            cache._oldest = np.maximum(cache._oldest, ends - (cache.slots - self.sinks))
        return cache

    @_outside_graphs
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
        cache = self._filled("crop")
        cache = cache if self._is_in_place else copy.copy(self)
        index = self._index
        if self._is_in_place:
            wanted = _host_counts("lens", lens, len(self._lens), None)
        else:
            wanted = index.asarray(lens, self._lens, "int64")
        ends = index.minimum(self._lens, wanted)
        if self._oldest is not None:
            if (lost := self._is_overwritten(ends)).any():
                b = int(lost.argmax())
                hint = "the ring has overwritten positions in the window of the next one"
                raise ArgumentError(message("lens", f"more for sequence {b}", int(ends[b]), hint=hint))
            cache._oldest = np.minimum(self._oldest, ends)
        cache._lens, cache._starts, cache._appended = ends, index.zeros(ends.shape, ends, "int64"), None
        return cache

    @_outside_graphs
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
        cache = self._filled("select")
        cache = cache if self._is_in_place else copy.copy(self)
        index = self._index
        batch = len(self._lens)
        chosen = host_ints(indices)
        if chosen is None:
            chosen = index.asarray(indices, self._lens)
        elif chosen.ndim != 1:
            raise ShapeError(message("indices", "1 axis", chosen.ndim))
        elif chosen.size and not (chosen.min() >= 0 and chosen.max() < batch):
            got = chosen.min() if chosen.min() < 0 else chosen.max()
            raise ArgumentError(message("indices", f"sequences from 0 to {batch - 1}", got))
        cache._keys, cache._values = (_taken(self._ops, x, chosen) for x in (self._keys, self._values))
        cache._checked = None
        per_sequence = ("_lens", "_starts", *(("_oldest",) if self._oldest is not None else ()))
        for name in per_sequence:
            setattr(cache, name, index.take(getattr(self, name), index.asarray(chosen, self._lens), 0))
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
        batch = len(self._filled("reorder")._lens)
        if np.shape(indices) != (batch,):
            hint = "select() changes the number of sequences"
            raise ShapeError(message("indices", f"shape ({batch},)", np.shape(indices), hint=hint))
        return self.select(indices)

    @_outside_graphs
    def copy(self) -> Self:
        """Return a cache of the same contents, which changes on its own."""
        cache = copy.copy(self)
        if self._keys is not None and self._is_in_place:
            rows = self._ops.asarray(np.arange(len(self._lens)), self._keys)
            cache._keys, cache._values = (self._ops.take(x, rows, 0) for x in (self._keys, self._values))
        return cache

    # ------------------------------------------------------------------ attention

    @_outside_graphs
    def attend(self, query: Array, *, causal: bool = True, mask: Any = None, **options: Any) -> Any:
        """Return ``attend(query, ...)`` over the positions held, in causal order.

        The queries are those of the last append: query i of a sequence is at its i-th new position, and gives zero
        where that was padding. Fewer queries are the last positions.

        Parameters
        ----------
        query : (batch, heads, n, dim), in the layout of the keys
        causal : bool
            False attends to all positions held, as a decoder does to an encoder's; not with a window.
        mask : a mask object or a boolean array over (..., query, slot), optional
            Combined with that of the cache by AND; `positions` says what each slot holds.
        **options
            As in `attend`, except `valid_lens` and `head_axis`, and `score` where the cache has one.

        Returns
        -------
        out : what `attend` returns; weights are over the slots

        Raises
        ------
        ShapeError, ArgumentError, and those of `attend`
        """
        for name in ("valid_lens", "head_axis", *(("score",) if self.score is not None else ())):
            if name in options:
                raise ArgumentError(
                    message(name, "an argument of the cache, not of its attend()", shown(options[name]))
                )
        found = self.arguments(query, causal=causal, mask=mask)
        if self.score is None:
            found["score"] = options.pop("score", "scaled_dot")
        found = attend(query, found.pop("key"), found.pop("value"), **found, **options)
        if self._is_in_place:
            out = found[0] if isinstance(found, tuple) else found
            self._is_saved = self._is_saved or bool(getattr(out, "requires_grad", False))
        return found

    @_outside_graphs
    def arguments(self, query: Array, *, causal: bool = True, mask: Any = None) -> dict[str, Any]:
        """Return the arguments of `attend` except the query: for `explain`, `attention_weights` and the like.

        Parameters are those of the method `attend`.

        Examples
        --------
        >>> import numpy as np, attnscore as ats
        >>> x = np.zeros((1, 4, 2))
        >>> found = ats.KeyValueCache().append(x, x).arguments(x[:, 2:])
        >>> ats.attend(x[:, 2:], **found, return_weights=True)[1]
        array([[[0.33333333, 0.33333333, 0.33333333, 0.        ],
                [0.25      , 0.25      , 0.25      , 0.25      ]]])
        """
        keys, values = self._filled("attend").keys, self.values
        if len(getattr(query, "shape", ())) != len(keys.shape):
            expected = f"{len(keys.shape)} axes, as the keys of the cache have"
            raise ShapeError(message("query", expected, shown(query)))
        count = query.shape[-3 if self._has_heads and self.head_axis == -2 else -2]
        lens = self._lens_per_query(count, causal)
        if mask is not None:
            mask = self.mask(count, causal=causal) & (mask if isinstance(mask, Mask) else Dense(mask))
            lens = None
        elif lens is None:
            mask = self.mask(count)
            batch = len(self._lens)
            if self._is_in_place and batch * count * self.slots <= _FEW_PAIRS:
                array = mask.materialize(count, self.slots, batch)
                mask = self._ops.asarray(array[:, None] if self._has_heads else array, query)
        if self._is_in_place and backends.of({"query": query}).needs_grad(query):
            self._is_saved = True
        found = {"key": keys, "value": values, "mask": mask, "valid_lens": lens, "head_axis": self.head_axis}
        return found if self.score is None else found | {"score": self._prepared_score}

    def mask(self, query_len: int, *, causal: bool = True) -> Mask:
        """Return the mask of the last `query_len` positions over the slots of `keys` and `values`.

        Examples
        --------
        >>> import numpy as np, attnscore as ats
        >>> cache = ats.KeyValueCache().append(np.ones((1, 4, 2)), np.ones((1, 4, 3)))
        >>> cache.mask(2)
        ValidLens(lens=[[3, 4]])
        """
        lens = self._filled("mask")._lens_per_query(query_len, causal)
        if lens is not None:
            return ValidLens(lens)
        start = self._first_positions(query_len)
        return RollingWindow(start, self._lens, int(self.window or 0), self.sinks)

    def _lens_per_query(self, count: int, causal: bool) -> Array | None:
        """Return how many slots each query attends to, (batch, n); None where these are not the first ones."""
        index = self._index
        ends = index.reshape(self._lens, (-1, 1))
        if not causal:
            if self.window is not None:
                raise ArgumentError(message("causal", "True with a window", causal))
            return index.broadcast_to(ends, (len(self._lens), count))
        start = self._first_positions(count)
        if self.window is not None:
            most = self.sinks + self.window
            # They are where there is one query, and the ring holds its window and no more; or where the windows hold
            # every position so far.
            is_whole_ring = count == 1 and self.slots <= most
            if not is_whole_ring and (self._oldest is None or int(self._lens.max(initial=0)) > most):
                return None
        positions = index.reshape(start, (-1, 1)) + index.positions(0, count, start)
        lens = index.minimum(positions + 1, self.slots)
        return index.where(positions < ends, lens, index.zeros((), ends, index.dtype(lens)))

    def _first_positions(self, count: int) -> Array:
        """Return the position of the first of `count` queries of each sequence."""
        if self._appended is not None and count > self._appended:
            expected = f"at most as many queries as the last append had positions ({self._appended})"
            raise ShapeError(message("query", expected, count))
        start = self._index.maximum(self._starts, self._lens - count)
        if self._oldest is not None and self._is_overwritten(start).any():
            hint = "after crop() append before the next attention"
            raise ShapeError(message("query", "positions whose windows are held", f"{count} positions", hint=hint))
        return start

    def _is_overwritten(self, query: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return whether the ring has lost a position before `query` that it attends to, (batch,)."""
        if self.window is None:
            return np.zeros(len(query), bool)
        first = np.maximum(query - self.window + 1, self.sinks)
        lost: np.ndarray[Any, Any] = first < np.minimum(self._oldest, query)
        return lost

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the positions held and the options, except for the score, to a .safetensors (or .npz) file.

        Raises
        ------
        FileError, FrameworkError, AttnscoreError
        """
        from attnscore import io  # here, so that importing the package does not import it

        self._filled("save")
        lens = host_ints(self._lens)
        if lens is None:
            raise ArgumentError(message("cache", "one whose lengths the host can read", "a traced one"))
        used = min(self.slots, int(lens.max(initial=0)))
        arrays = {
            "keys": _host_of(self._ops, self._ops.slice_axis(self._keys, 2, 0, used)),
            "values": _host_of(self._ops, self._ops.slice_axis(self._values, 2, 0, used)),
            "lens": lens,
            "slots": np.asarray(self.slots),
            "has_heads": np.asarray(int(self._has_heads)),
            "key_sizes": np.asarray(self._key_sizes),
            "head_axis": np.asarray(self.head_axis),
            "sinks": np.asarray(self.sinks),
        }
        if self.window is not None:
            arrays["window"] = np.asarray(self.window)
        if self._oldest is not None:
            arrays["oldest"] = self._oldest
        io.write_arrays(Path(path), arrays)

    @classmethod
    def load(cls, path: str | Path, *, like: Array = None, score: Any = None) -> Self:
        """Return the cache of a file that `save` wrote.

        Parameters
        ----------
        path : str or Path
        like : array, optional
            Framework and device of the buffers; None: NumPy.
        score : a score object or a registered name, optional
            The one that the cache had when it was saved.

        Raises
        ------
        FileError, FrameworkError
        """
        from attnscore import io

        arrays = io.read_arrays(Path(path))
        missing = set(_SAVED) - arrays.keys()
        if missing:
            raise io.FileError(f"{path}: no cache of keys and values: lacks {', '.join(sorted(missing))}")
        keys, values, lens = arrays["keys"], arrays["values"], arrays["lens"].astype(np.int64)
        slots, sinks = int(arrays["slots"]), int(arrays["sinks"])
        window = int(arrays["window"]) if "window" in arrays else None
        fits = keys.ndim == values.ndim == 4 and keys.shape[2] == values.shape[2] <= slots
        if not (fits and len(lens) == len(keys) == len(values) and lens.min(initial=0) >= 0):
            raise io.FileError(f"{path}: no cache of keys and values: arrays that do not belong together")
        cache = cls(score=score, window=window, sinks=sinks, head_axis=int(arrays["head_axis"]), capacity=slots or None)
        like = np.empty(0) if like is None else like
        ops = backends.of({"like": like})
        cache._has_heads = bool(arrays["has_heads"])
        cache._keys, cache._values = (_padded(ops, x, slots, like) for x in (keys, values))
        cache._starts = np.zeros_like(lens)
        if ops.name in _IN_PLACE:
            cache._lens = lens
            cache._oldest = arrays["oldest"] if "oldest" in arrays else np.maximum(0, lens - (slots - sinks))
        else:
            cache._lens, cache._starts = (ops.asarray(x, like, "int64") for x in (lens, cache._starts))
        heads, dim = map(int, arrays["key_sizes"])
        cache._key_sizes = heads, dim
        if score is not None:
            # The score that `prepare_keys` leaves depends on the shapes of the keys alone.
            some = ops.zeros((1, heads, 1, dim), cache._keys)
            cache._prepared_score = prepare_keys(score, some if cache._has_heads else some[:, 0]).score
        return cache

    # ------------------------------------------------------------------ inside

    @property
    def _ops(self) -> Backend:
        return backends.of({"keys": self._keys})

    @property
    def _is_in_place(self) -> bool:
        return self._ops.name in _IN_PLACE

    @property
    def _index(self) -> Backend:
        """The backend that computes with lengths and positions: NumPy where they are on the host, otherwise JAX."""
        return backends.load("numpy") if self._is_in_place else self._ops

    def _filled(self, what: str) -> Self:
        """Return the cache; raise ArgumentError, which names `what` was asked for, before the first append."""
        if self._keys is None:
            hint = "an append of no positions (n = 0) allocates the buffers"
            raise ArgumentError(message(what, "a cache with an append before", "an empty one", hint=hint))
        return self

    def _on_callers_axes(self, x: Array) -> Array:
        if not self._has_heads:
            return x[:, 0]
        return self._ops.swap_axes(x, 1, 2) if self.head_axis == -2 else x

    def _check(self, ops: Backend, arrays: Mapping[str, Array]) -> tuple[int, int]:
        """Raise unless key and value fit each other and the buffers; return heads and dimension of the key."""
        backends.check_dense(ops, arrays)
        shapes = {name: tuple(x.shape) for name, x in arrays.items()}
        for name, x in arrays.items():
            if not ops.is_floating(x):
                raise DtypeError(message(name, FLOATING, ops.dtype(x), shapes=shapes))
            if len(x.shape) not in (3, 4):
                expected = "3 axes (batch, length, dim), or 4 with heads"
                raise ShapeError(message(name, expected, len(x.shape), shapes=shapes))
        key, value = arrays.values()
        if ops.dtype(key) != ops.dtype(value):
            raise DtypeError(message("value", f"the dtype of key ({ops.dtype(key)})", ops.dtype(value)))
        if len(key.shape) != len(value.shape) or key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                message("value", "the shape of key, except for the last axis", shapes["value"], shapes=shapes)
            )
        _, heads, _, dim = _with_heads_first(ops, key, self.head_axis).shape
        if self._keys is not None:
            if backends.of({"the cache": self._keys, **arrays}).dtype(self._keys) != ops.dtype(key):
                raise DtypeError(message("key", f"the dtype of the cache ({ops.dtype(self._keys)})", ops.dtype(key)))
            backends.check_devices(ops, self._keys, arrays)
            wanted = {"key": self._key_sizes, "value": (self._values.shape[1], self._values.shape[3])}
            for name, x in arrays.items():
                batch, *sizes = (_with_heads_first(ops, x, self.head_axis).shape[axis] for axis in (0, 1, 3))
                if (batch, *sizes) != (len(self._lens), *(wanted[name] or ())) or (
                    len(x.shape) == 4
                ) != self._has_heads:
                    expected = f"shape {self._expected(len(self._lens), *(wanted[name] or ()))}, as before"
                    raise ShapeError(message(name, expected, shapes[name]))
        return int(heads), int(dim)

    def _expected(self, batch: int, heads: int, dim: int) -> str:
        """Format the shape that an append has to have."""
        sizes = [batch, "n", dim] if not self._has_heads else [batch, heads, "n", dim]
        if self._has_heads and self.head_axis == -2:
            sizes[1:3] = ["n", heads]
        return f"({', '.join(map(str, sizes))})"

    def _first_size(self, ops: Backend, count: int) -> int:
        """Return the number of slots to begin with."""
        if ops.name in _IN_PLACE or self.capacity is not None:
            return int(self.capacity or 0)
        if self.window is None:
            hint = "buffers of JAX do not grow"
            raise ArgumentError(message("capacity", "a number of positions", None, hint=hint))
        return self.sinks + self.window + max(count, 1) - 1

    def _reserve(self, ops: Backend, length: int, count: int) -> None:
        """Make room for sequences of `length` with the `count` positions that are appended; drop what is outside.

        A buffer that is too small at least doubles, so that appends copy each position a bounded number of times.
        """
        size, most = self.slots, None
        if self.window is not None:
            most = self.sinks + self.window + max(count, 1) - 1
            length = min(length, most)
        if size < length:
            wanted = max(length, 2 * size)
            self._resize(ops, wanted if most is None else min(wanted, most))
        elif most is not None and size > most and (count == 1 or size > 2 * most):
            self._resize(ops, most)

    def _resize(self, ops: Backend, size: int) -> None:
        """Move the positions that fit to buffers with `size` slots: the sinks and the newest ones."""
        longest = int(self._lens.max(initial=0))
        # Linear: no ring has wrapped around, so that each position has the slot of its number before and after.
        positions, linear = self.positions, longest <= min(size, self.slots)
        kept = (positions >= 0) & ((positions < self.sinks) | (positions >= self._lens[:, None] - (size - self.sinks)))
        places = _places(self._index, _slots_of_positions(self._index, positions, self.sinks, size), kept, size)
        moved = []
        for x in (self._keys, self._values):
            new = ops.zeros((*x.shape[:2], size, x.shape[3]), x)
            if linear:
                new[:, :, :longest] = x[:, :, :longest]
            else:
                new = _written(ops, new, x, places)
            moved.append(new)
        self._keys, self._values = moved
        self._oldest = np.maximum(self._oldest, self._lens - (size - self.sinks))


@final
@dataclass(frozen=True, eq=False, repr=False)
class RollingWindow(IntervalSetMask):
    """The slots of a `KeyValueCache` with a window that each query attends to.

    Query i of a sequence is at position first + i, and attends to nothing at `ends` or behind. A slot past the sinks
    holds the last position below `ends` that is congruent to it modulo the ring's size.
    """

    first: Any
    ends: Any
    window: int
    sinks: int

    def visible(self, ops: Backend, score_shape: ScoreShape, rows: Array, cols: Array) -> Array:
        ends = per_batch(ops, score_shape, self.ends, rows)
        query = per_batch(ops, score_shape, self.first, rows) + rows
        key = _positions_of_slots(ops, cols, ends, self.sinks, score_shape.key_len)
        in_window = ops.logical_or(key > query - self.window, cols < self.sinks)
        in_order = ops.logical_and(ops.logical_and(key >= 0, key <= query), query < ends)
        return ops.logical_and(in_window, in_order)

    def interval_set(self, query_len: int, key_len: int, batch: int = 1) -> IntervalSet | None:
        first, ends = host_ints(self.first), host_ints(self.ends)
        if first is None or ends is None:
            return None
        query, ring = column(first) + np.arange(query_len), key_len - self.sinks
        is_real = query < column(ends)
        start = np.maximum(self.sinks, query - self.window + 1)
        count = np.where(is_real, np.maximum(0, query + 1 - start), 0)
        # In a ring without slots, `count` is 0.
        start = self.sinks + (start - self.sinks) % max(1, ring)
        stop = start + count
        zeros = np.zeros_like(start)
        # The sinks; the window up to the end of the ring; what goes on at the begin of the ring.
        parts = [
            (zeros, np.where(is_real, np.minimum(self.sinks, query + 1), 0)),
            (np.minimum(start, key_len), np.minimum(stop, key_len)),
            (zeros + self.sinks, np.maximum(self.sinks, self.sinks + stop - key_len)),
        ]
        found = IntervalSet.of(parts[0])
        for part in parts[1:]:
            found = found.union(IntervalSet.of(part), key_len)
        return found

    def check(self, ops: Backend, score_shape: ScoreShape) -> None:
        for spec in self.shapes(score_shape):
            spec.check()

    def shapes(self, score_shape: ScoreShape) -> list[ShapeSpec]:
        batch = score_shape.batch
        pairs = (("first", self.first), ("ends", self.ends))
        return [ShapeSpec(name, x, f"shape ({batch},), one per sequence", [(batch,)]) for name, x in pairs]


def _slots_of_positions(index: Backend, positions: Array, sinks: int, size: int) -> Array:
    """Return the slots of positions: the same number for the sinks, a place in the ring after them for others."""
    return index.where(positions < sinks, positions, sinks + (positions - sinks) % max(1, size - sinks))


def _positions_of_slots(index: Backend, slots: Array, ends: Array, sinks: int, size: int) -> Array:
    """Return the last position below `ends` in each slot; -1 where there is none."""
    last = ends - 1
    in_ring = last - (last - slots) % max(1, size - sinks)
    found = index.where(slots < sinks, slots, in_ring)
    is_held = index.logical_and(found < ends, index.logical_or(slots < sinks, in_ring >= sinks))
    return index.where(is_held, found, index.zeros((), found, index.dtype(found)) - 1)


def _with_heads_first(ops: Backend, x: Array, head_axis: int) -> Array:
    """Return (batch, head, length, dim)."""
    if len(x.shape) == 3:
        return ops.expand_dims(x, 1)
    return ops.swap_axes(x, 1, 2) if head_axis == -2 else x


Places = tuple[Any, Any]
"""Index of slots in a buffer, and index of the appended entries that go there."""


def _places(index: Backend, slots: Array, is_new: Array, size: int) -> Places:
    """Return where position i of each sequence goes: to slots[b, i] where is_new[b, i], otherwise nowhere."""
    every = slice(None)
    if index.name != "numpy":
        rows = index.reshape(index.positions(0, len(slots), slots), (-1, 1))
        # What is not new gets a slot past the end, to which JAX writes nothing (mode="drop").
        return (rows, every, index.where(is_new, slots, index.zeros((), slots, index.dtype(slots)) + size)), ...
    # All sequences append to the same slots, one after the other: slices, which copy faster than indices.
    first = slots[:1]
    if is_new.all() and (slots == first).all() and (first[:, 1:] == first[:, :-1] + 1).all():
        start = int(first[0, 0]) if first.size else 0
        return (every, every, slice(start, start + first.size)), ...
    sequence, i = np.nonzero(is_new)
    return (sequence, every, slots[sequence, i]), (sequence, every, i)


def _written(ops: Backend, x: Array, block: Array, places: Places, *, is_saved: bool = False) -> Array:
    """Write entries of `block` to the buffer `x`, or to a copy where autograd holds it (`is_saved`), and return it."""
    target, source = places
    if ops.name not in _IN_PLACE:
        return x.at[target].set(ops.swap_axes(block, 1, 2), mode="drop")
    if is_saved or ops.needs_grad(x, block):
        x = x.clone()
    x[target] = block[source]
    return x


def _taken(ops: Backend, x: Array, indices: Array) -> Array:
    """Return the sequences `indices` of a buffer; as many as it has are moved within its own memory."""
    if ops.name not in _IN_PLACE:
        return ops.take(x, indices, 0)
    if len(indices) != len(x) or ops.needs_grad(x):
        return ops.take(x, ops.asarray(indices, x), 0)
    changed = np.flatnonzero(indices != np.arange(len(x)))
    if len(changed):
        x[ops.asarray(changed, x)] = x[ops.asarray(indices[changed], x)]
    return x


def _counts(lens: Any, batch: int, count: int) -> Any:
    """Return how many positions each sequence appends, (batch,)."""
    if lens is None:
        return np.full(batch, count)
    if host_ints(lens) is None:
        if tuple(lens.shape) != (batch,):
            raise ShapeError(message("lens", f"shape ({batch},)", tuple(lens.shape)))
        return lens
    return _host_counts("lens", lens, batch, count)


def _host_counts(name: str, x: Any, batch: int, highest: int | None) -> np.ndarray[Any, Any]:
    """Return whole numbers as (batch,); raise unless they lie in 0..highest."""
    values = backends.host(x)
    if values is None or values.dtype.kind not in "iu":
        raise ArgumentError(message(name, "whole numbers", shown(x)))
    if values.shape != (batch,) and not (highest is None and values.shape == ()):
        raise ShapeError(message(name, f"shape ({batch},)", values.shape))
    values = np.broadcast_to(values.astype(np.int64), (batch,))
    if values.size and (values.min() < 0 or (highest is not None and values.max() > highest)):
        got = values.min() if values.min() < 0 else values.max()
        expected = "whole numbers, 0 or more" if highest is None else f"whole numbers from 0 to {highest}"
        raise ArgumentError(message(name, expected, got))
    return values


def _host_of(ops: Backend, x: Array) -> np.ndarray[Any, Any]:
    """Return an array as NumPy, bfloat16 of other frameworks as that of ml_dtypes."""
    if ops.dtype(x) == "bfloat16":
        from attnscore.io import bfloat16

        return np.ascontiguousarray(ops.memory(x)).view(bfloat16())
    found = ops.host(ops.stop_gradient(x))
    return np.asarray(found)


def _padded(ops: Backend, x: np.ndarray[Any, Any], slots: int, like: Array) -> Array:
    """Return the array of a file as a buffer with `slots` slots."""
    whole = np.zeros((*x.shape[:2], slots, x.shape[3]), x.dtype)
    whole[:, :, : x.shape[2]] = x
    if whole.dtype.name != "bfloat16" or ops.name == "numpy":
        return ops.asarray(whole, like)
    return ops.astype(ops.asarray(whole.astype(np.float32), like), "bfloat16")
