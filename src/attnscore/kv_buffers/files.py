"""Caches as files: what is held and the options, without the score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from attnscore import io
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.errors import FileError

# The arrays of a file; "window" and "oldest" may be among them.
_REQUIRED = ("keys", "values", "lens", "slots", "has_heads", "key_sizes", "head_axis", "sinks")


@dataclass(frozen=True, eq=False)
class CacheFile:
    """The contents of a file."""

    keys: HostArray
    """(batch, head, slot, dim), without slots at the end that hold no position."""
    values: HostArray
    lens: HostArray
    slots: int
    has_heads: bool
    key_sizes: tuple[int, int]
    head_axis: int
    sinks: int
    window: int | None
    oldest: HostArray | None

    def write(self, path: Path) -> None:
        """Write the file; raise FileError where that fails."""
        arrays = {name: np.asarray(x) for name, x in vars(self).items() if x is not None}
        arrays["has_heads"] = arrays["has_heads"].astype(np.int64)
        io.write_arrays(path, arrays)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; raise FileError unless it holds a cache."""
        arrays = io.read_arrays(path)
        missing = set(_REQUIRED) - arrays.keys()
        if missing:
            raise FileError(f"{path}: no cache of keys and values: lacks {', '.join(sorted(missing))}")
        keys, values, lens, oldest = arrays["keys"], arrays["values"], arrays["lens"], arrays.get("oldest")
        numbers = [name for name in ("slots", "has_heads", "head_axis", "sinks", "window") if name in arrays]
        fits = (
            keys.ndim == values.ndim == 4
            and all(arrays[name].ndim == 0 and arrays[name].dtype.kind in "iub" for name in numbers)
            and arrays["key_sizes"].shape == (2,)
            and keys.shape[2] == values.shape[2] <= arrays["slots"]
            and lens.shape == keys.shape[:1] == values.shape[:1] == (lens if oldest is None else oldest).shape
            and lens.dtype.kind in "iu"
            and lens.min(initial=0) >= 0
        )
        if not fits:
            raise FileError(f"{path}: no cache of keys and values: arrays that do not belong together")
        slots, lens = int(arrays["slots"]), lens.astype(np.int64)
        heads, dim = map(int, arrays["key_sizes"])
        return cls(
            keys,
            values,
            lens,
            slots,
            has_heads=bool(arrays["has_heads"]),
            key_sizes=(heads, dim),
            head_axis=int(arrays["head_axis"]),
            sinks=int(arrays["sinks"]),
            window=int(arrays["window"]) if "window" in arrays else None,
            oldest=oldest,
        )


def host_array(ops: Backend, x: Array) -> HostArray:
    """Return an array as NumPy, bfloat16 of other frameworks as that of ml_dtypes."""
    if ops.dtype(x) == "bfloat16":
        return np.ascontiguousarray(ops.memory(x)).view(io.bfloat16())
    return np.asarray(ops.host(ops.stop_gradient(x)))


def buffer_of(ops: Backend, x: HostArray, slots: int, like: Any) -> Array:
    """Return the array of a file as a buffer with `slots` slots."""
    whole = np.zeros((*x.shape[:2], slots, x.shape[3]), x.dtype)
    whole[:, :, : x.shape[2]] = x
    if whole.dtype.name != "bfloat16" or ops.name == "numpy":
        return ops.asarray(whole, like)
    return ops.astype(ops.asarray(whole.astype(np.float32), like), "bfloat16")
