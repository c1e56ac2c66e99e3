"""Arrays by name between two environments: one line with the number of bytes, then so many bytes of ``.npz``."""

from __future__ import annotations

import io
from typing import IO

import numpy as np


def receive(stream: IO[bytes]) -> dict[str, np.ndarray] | None:
    """The next message, or None at the end."""
    line = stream.readline()
    if not line:
        return None
    with np.load(io.BytesIO(stream.read(int(line)))) as found:
        return dict(found)


def send(stream: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    stream.write(b"%d\n" % packed.tell() + packed.getvalue())
    stream.flush()
