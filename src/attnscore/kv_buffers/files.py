"""Caches as files: the positions held and the options, without the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attnscore import io
from attnscore.backends.base import Array, Backend, HostArray
from attnscore.errors import FileError

_ARRAYS = ("keys", "values", "lens", "key_sizes")
"""keys and values: (batch, head, slot, dim), without slots at the end that hold no position."""
_NUMBERS = ("slots", "has_heads", "head_axis", "sinks")


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a cache, with `window` and `oldest` or None; raise FileError where a file has others."""
    contents: dict[str, Any] = {"window": None, "oldest": None} | io.read_arrays(path)
    if missing := {*_ARRAYS, *_NUMBERS} - contents.keys():
        raise FileError(f"{path}: no cache of keys and values: lacks {', '.join(sorted(missing))}")
    keys, values, lens, key_sizes = (contents[name] for name in _ARRAYS)
    oldest = lens if contents["oldest"] is None else contents["oldest"]
    numbers = {name: contents[name] for name in (*_NUMBERS, "window") if contents[name] is not None}
    fits = (
        keys.ndim == values.ndim == 4
        and all(x.ndim == 0 and x.dtype.kind in "iub" for x in numbers.values())
        and key_sizes.shape == (2,)
        and keys.shape[2] == values.shape[2] <= contents["slots"]
        and lens.shape == keys.shape[:1] == values.shape[:1] == oldest.shape
        and lens.dtype.kind in "iu"
        and lens.min(initial=0) >= 0
    )
    if not fits:
        raise FileError(f"{path}: no cache of keys and values: arrays that do not belong together")
    return contents | {name: int(x) for name, x in numbers.items()}


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
