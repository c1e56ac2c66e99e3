"""Symbolic sizes of ``jax.export``: programs for any length, in operations of JAX alone.

They have the arithmetic of integers, so that tiles and axes are planned with them, but no order: whether a length
exceeds a tile is known when the program runs. Importing this module makes them sizes that the core takes for unknown.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.export

from attnscore.backends.base import Array
from attnscore.base.sizes import Unknown, at_most, is_unknown

_Symbolic: Any = type(jax.export.symbolic_shape("n")[0])
Unknown.register(_Symbolic)


@at_most.register(_Symbolic)
def _(length: Any, limit: int) -> Any:
    return jax.core.max_dim(1, jax.core.min_dim(length, limit))


def is_symbolic(x: Array) -> bool:
    """Whether the size of some axis is symbolic."""
    return any(map(is_unknown, x.shape))
