"""The Triton kernel: attention on NVIDIA GPUs, one source for all forms, forward and backward, without atomics."""

from __future__ import annotations

import os


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
