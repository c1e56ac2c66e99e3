"""Caches as files: the positions held and the options, without the score."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from attnscore import io
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.errors import FileError


@dataclass(frozen=True, eq=False)
class CacheFile:
    """The contents of a file; optional entries have a default."""

    keys: HostArray
    """(batch, head, slot, dim), without slots at the end that hold no position."""
    values: HostArray
    lens: HostArray
    slots: int
    has_heads: int
    key_sizes: HostArray
    head_axis: int
    sinks: int
    window: int | None = None
    oldest: HostArray | None = None

    def write(self, path: Path) -> None:
        """Write the file; raise FileError where that fails."""
        io.write_arrays(path, {name: np.asarray(x) for name, x in vars(self).items() if x is not None})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; raise FileError unless it holds a cache."""
        arrays = io.read_arrays(path)
        missing = {each.name for each in fields(cls) if each.default is MISSING} - arrays.keys()
        if missing:
            raise FileError(f"{path}: no cache of keys and values: lacks {', '.join(sorted(missing))}")
        contents: dict[str, Any] = {each.name: arrays[each.name] for each in fields(cls) if each.name in arrays}
        keys, values, lens = contents["keys"], contents["values"], contents["lens"]
        numbers = contents.keys() & {"slots", "has_heads", "head_axis", "sinks", "window"}
        fits = (
            keys.ndim == values.ndim == 4
            and all(contents[name].ndim == 0 and contents[name].dtype.kind in "iub" for name in numbers)
            and contents["key_sizes"].shape == (2,)
            and keys.shape[2] == values.shape[2] <= contents["slots"]
            and lens.shape == keys.shape[:1] == values.shape[:1] == contents.get("oldest", lens).shape
            and lens.dtype.kind in "iu"
            and lens.min(initial=0) >= 0
        )
        if not fits:
            raise FileError(f"{path}: no cache of keys and values: arrays that do not belong together")
        return cls(**contents | {name: int(contents[name]) for name in numbers})


def host_array(ops: Backend, x: Array) -> HostArray:
    """Return an array as NumPy, bfloat16 of other frameworks as ml_dtypes.bfloat16."""
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
