"""Scores as a user writes them, with `tile` alone or with `tile_gradient` beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OwnAbsolute:
    """-rate |q - k|_1, with `tile` alone."""

    rate: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        difference = ops.abs(ops.expand_dims(query, -2) - ops.expand_dims(key, -3))
        return -ops.sum(difference, axis=-1) * self.rate


@dataclass(frozen=True)
class OwnSquare:
    """gain (q . k)^2, with its gradient."""

    gain: Any

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        s = ops.matmul(query, ops.matrix_transpose(key))
        return s * s * self.gain

    def tile_gradient(self, ops: Any, query: Any, key: Any, grad: Any) -> Any:
        s = ops.matmul(query, ops.matrix_transpose(key))
        through = 2 * s * self.gain * grad
        parameters = {"gain": ops.sum(grad * s * s, axis=(-2, -1))}
        return ops.matmul(through, key), ops.matmul(ops.matrix_transpose(through), query), parameters


class OwnPlain:
    """q . k^3: no dataclass, no arrays."""

    def tile(self, ops: Any, query: Any, key: Any) -> Any:
        return ops.matmul(query, ops.matrix_transpose(key * key * key))
