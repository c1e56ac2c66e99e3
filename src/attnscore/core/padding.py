"""Projections of the keys that valid lengths leave: nothing reads a padded key, so projecting it is wasted work.

- The rows of real keys are gathered and projected by one product, and put among rows of zeros.
- The framework's own operations do so, which its autograd records: padded keys get gradients of 0, and give none.
- Everything is projected where that takes less time than the copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attnscore.backends.base import Array, Backend

# In multiply-adds, of which Zen with AVX-512 does 50 in a nanosecond on one thread: what finding the rows and starting
# the operations takes inside a call (80 us, where a loop of them alone takes 30), and moving one number of a row.
_FIXED = 2**22
_PER_NUMBER = 12


def may_save(x: Array, units: int) -> bool:
    """Whether a projection of `x` to `units` features is so long that leaving out padded keys can save time."""
    shape = x.shape
    return len(shape) == 3 and math.prod(shape) * units > _FIXED


def real_rows(ops: Backend, x: Array, lens: Any, units: int) -> Array | None:
    """Return which rows of `x` (batch, key, features) are real keys, as indices into (batch * key, features).

    None where projecting them alone, to `units` features, saves no time, or where `lens` is not (batch,).
    """
    batch, length, features = x.shape
    if tuple(lens.shape) != (batch,):
        return None
    # By Python: an operation of the framework costs a call 10 us.
    real = sum(lens.tolist())
    saved = (batch * length - real) * features * units
    if ops.needs_grad(x):
        saved += saved // 2  # three products of these sizes in place of one, and twice the copies
    if saved <= _FIXED + _PER_NUMBER * real * (features + units):
        return None
    # Lengths out of range become possible ones here; the call itself raises.
    return ops.indices_before(ops.asarray(lens, x), length)


def over_rows(ops: Backend, x: Array, rows: Array, project: Callable[[Array], Array]) -> Array:
    """Return the projection of the keys `rows` of `x` (batch, key, features), and zeros for all others."""
    batch, length, features = x.shape
    found = project(ops.take(ops.reshape(x, (batch * length, features)), rows, 0))
    return ops.reshape(ops.put_rows(found, rows, batch * length), (batch, length, found.shape[-1]))
