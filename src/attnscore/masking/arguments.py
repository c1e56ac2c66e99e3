"""What ``mask=`` and ``valid_lens=`` mean: one mask, or none."""

from __future__ import annotations

from typing import Any

from attnscore import frameworks
from attnscore.checks import shown
from attnscore.errors import MaskError, message
from attnscore.frameworks.contract import is_unknown, may_equal
from attnscore.grid import Grid
from attnscore.masking.contract import And, Mask
from attnscore.masking.masks import Dense, ValidLens
from attnscore.masking.shapes import shape_of


def as_mask(mask: Any, valid_lens: Any, grid: Grid) -> Mask | None:
    """The two arguments of a call as one mask, not yet checked against the grid.

    Raises
    ------
    MaskError
        `mask` is neither a mask nor an array, or is an array that could be read in two ways.
    """
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else _dense(mask, grid))
    if valid_lens is not None:
        parts.append(ValidLens(valid_lens))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else And(*parts)


def _dense(mask: Any, grid: Grid) -> Mask:
    """A bare boolean array as a mask."""
    if isinstance(mask, type) or not (frameworks.is_array(mask) or isinstance(mask, (list, tuple))):
        hint = f"{mask.__name__}() makes a mask" if isinstance(mask, type) else "for example attnscore.Causal()"
        raise MaskError(message("mask", "a mask object or a boolean array", shown(mask), hint=hint))
    shape = shape_of(mask)
    batched = (grid.batch, grid.key_len)
    if len(shape) == 2 and grid.has_batch and all(map(may_equal, shape, batched)) and 1 not in (grid.batch, shape[0]):
        if may_equal(shape[0], grid.query_len) or is_unknown(grid.batch):
            raise MaskError(
                message(
                    "mask",
                    "an array whose meaning is clear",
                    f"shape {shape}, which is both (batch, key) and (query, key)",
                    hint="KeyPadding(mask) says (batch, key), Dense(mask) says (query, key)",
                )
            )
        raise MaskError(
            message(
                "mask",
                f"a shape that broadcasts to (..., query, key) = {grid.user_shape}",
                shape,
                hint="this is (batch, key): KeyPadding(mask) says so",
            )
        )
    return Dense(mask)
