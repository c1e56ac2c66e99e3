"""Tables of neighbours in compressed sparse rows that the host can read: checked copies, and arrays from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.base import thresholds
from attnscore.base.cache import BoundedCache
from attnscore.base.layout import is_unknown
from attnscore.errors import MaskError, message
from attnscore.masks.index_values import check_cumulative, check_whole
from attnscore.masks.intervals import HostArray
from attnscore.masks.shape_spec import sizes_of


def check_graph(indptr: Any, indices: Any, key_len: Any) -> None:
    """Raise MaskError where the arrays, as far as the host can read them, are no graph; keys may occur twice here."""
    ends, keys, count = check_cumulative("indptr", indptr, None), check_whole("indices", indices), sizes_of(indices)[0]
    if ends is not None and not is_unknown(count) and ends[-1] != count:
        raise MaskError(message("indptr", f"a last entry of {count}, the number of indices", ends[-1]))
    if keys is None or not keys.size:
        return
    is_above = not is_unknown(key_len) and keys.max() >= key_len
    if keys.min() < 0 or is_above:
        expected = "keys from 0" if is_unknown(key_len) else f"keys from 0 to {key_len - 1}"
        raise MaskError(message("indices", expected, keys.min() if keys.min() < 0 else keys.max()))


@dataclass(frozen=True, eq=False)
class _Graph:
    """The arrays of a graph as the key of its table: equal where all entries are."""

    arrays: tuple[HostArray, HostArray]
    key_len: int

    def __hash__(self) -> int:
        # Of samples alone: `__eq__` compares all entries, in less time than a digest of them takes.
        samples = (x.reshape(-1)[:: max(1, x.size // 16)].tobytes() for x in self.arrays)
        return hash((self.key_len, *(x.shape for x in self.arrays), *samples))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Graph) or self.key_len != other.key_len:
            return False
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(x is y or (x.dtype == y.dtype and np.array_equal(x, y)) for x, y in pairs)


@dataclass(frozen=True, eq=False)
class NeighbourTable:
    """Neighbours of each query in the order of the keys, for keys below `key_len`, each at most once in a row."""

    arrays: tuple[HostArray, HostArray]
    """Copies of ``indptr`` and ``indices``, in the order and the dtypes of the caller."""
    key_len: int
    plans: BoundedCache[Any] = field(default_factory=lambda: BoundedCache(thresholds.NEIGHBOUR_PLANS))
    """Values that a kernel derives from the table alone."""

    @classmethod
    def of(cls, indptr: Any, indices: Any, key_len: int) -> NeighbourTable | None:
        """Return the table, or None where the host cannot read the arrays; raise MaskError where they are no graph."""
        ends, keys = backends.host(indptr), backends.host(indices)
        if ends is None or keys is None:
            check_graph(indptr, indices, key_len)
            return None
        table = _TABLES.get(_Graph((ends, keys), key_len))
        if table is None:
            # The key holds the copies: the caller may write to the arrays.
            new = cls._checked_copy(ends, keys, key_len)
            table = _TABLES.get_or_compute(_Graph(new.arrays, key_len), lambda: new, weight=keys.size)
        return table

    @classmethod
    def _checked_copy(cls, ends: HostArray, keys: HostArray, key_len: int) -> NeighbourTable:
        """Return the table over copies of the arrays; raise MaskError where they are no graph."""
        check_graph(ends, keys, key_len)
        copies = np.array(ends), np.array(keys)
        for x in copies:
            x.flags.writeable = False
        table = cls(copies, key_len)
        duplicates = np.flatnonzero(table.codes[1:] == table.codes[:-1])
        if duplicates.size:
            row, key = divmod(int(table.codes[duplicates[0]]), key_len)
            hint = "numpy.unique(indices) of the row"
            raise MaskError(message("indices", "each key once in a row", f"key {key} twice for query {row}", hint=hint))
        return table

    @cached_property
    def start(self) -> HostArray:
        """First edge of each query."""
        return self.arrays[0][:-1].astype(np.int64, copy=False)

    @cached_property
    def lens(self) -> HostArray:
        """Number of neighbours of each query."""
        return np.diff(self.arrays[0].astype(np.int64, copy=False))

    @cached_property
    def rows(self) -> HostArray:
        """The query of each edge."""
        return np.repeat(np.arange(len(self.lens)), self.lens)

    @cached_property
    def codes(self) -> HostArray:
        """-1, then ``query * key_len + key`` of all edges in rising order."""
        keys = self.arrays[1].astype(np.int64, copy=False)
        return np.append(-1, np.sort(self.rows * self.key_len + keys))

    @cached_property
    def indices(self) -> HostArray:
        """The key of each edge."""
        indices: HostArray = self.codes[1:] % max(1, self.key_len)
        return indices


_TABLES: BoundedCache[NeighbourTable] = BoundedCache(maxsize=16, max_weight=thresholds.ALL_CACHED_EDGES)
