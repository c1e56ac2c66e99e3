"""Projections of the keys that valid lengths leave: nothing reads a padded key, so projecting it is wasted work.

- The rows of real keys are gathered and projected by one product, and put among rows of zeros.
- The framework's own operations do so, which its autograd records: padded keys get gradients of 0, and give none.
- Everything is projected where that takes less time than the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnscore.backends.base import Array, Backend
from attnscore.base import thresholds


def may_save_time(ops: Backend, x: Array, units: int) -> bool:
    """Whether a projection of `x` to `units` features would save time if half of the keys were padded."""
    shape = x.shape
    if not ops.can_unpad or len(shape) != 3:
        return False
    half = shape[0] * shape[1] / 2
    return _saves_time(half, half, shape[2], units)


def _saves_time(real: float, padded: float, features: int, units: int) -> bool:
    """Return whether projecting so many real keys alone takes less time than projecting the padded ones too.

    Multiply-adds saved are compared with the cost of a gathered call and of each number moved (`thresholds.UNPADDING`).
    """
    return padded * features * units > thresholds.UNPADDING + thresholds.UNPADDING_A_NUMBER * real * (features + units)


def real_rows(ops: Backend, x: Array, lens: Any, units: int) -> Array | None:
    """Return which rows of `x` (batch, key, features) are real keys, as indices into (batch * key, features).

    None where projecting them alone, to `units` features, saves no time, or where `lens` is not (batch,).
    """
    batch, length, features = x.shape
    if tuple(lens.shape) != (batch,):
        return None
    # By Python: an operation of the framework costs a call 10 us.
    real = sum(lens.tolist())
    if not _saves_time(real, batch * length - real, features, units):
        return None
    # Lengths out of range are clipped here; the call itself raises for them.
    return ops.indices_before(ops.asarray(lens, x), length)


def project_rows(ops: Backend, x: Array, rows: Array, project: Callable[[Array], Array]) -> Array:
    """Return the projection of the keys `rows` of `x` (batch, key, features), and zeros for all others."""
    batch, length, features = x.shape
    projected = project(ops.take(ops.reshape(x, (batch * length, features)), rows, 0))
    return ops.reshape(ops.put_rows(projected, rows, batch * length), (batch, length, projected.shape[-1]))
