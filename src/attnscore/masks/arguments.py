"""What ``mask=`` and ``valid_lens=`` mean: one mask, or none."""

from __future__ import annotations

from typing import Any

from attnscore import backends
from attnscore.backends.base import is_unknown, may_equal
from attnscore.core.arguments import shown
from attnscore.core.layout import ScoreShape
from attnscore.errors import MaskError, message
from attnscore.masks.base import And, Mask
from attnscore.masks.builtin import Dense, ValidLens
from attnscore.masks.shape_spec import shape_of


def as_mask(mask: Any, valid_lens: Any, score_shape: ScoreShape) -> Mask | None:
    """The two arguments of a call as one mask, not yet checked against the grid.

    Raises
    ------
    MaskError
        `mask` is neither a mask nor an array, or is an array that could be read in two ways.
    """
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else _dense(mask, score_shape))
    if valid_lens is not None:
        parts.append(ValidLens(valid_lens))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else And(*parts)


def _dense(mask: Any, score_shape: ScoreShape) -> Mask:
    """A bare boolean array as a mask."""
    if isinstance(mask, type) or not (backends.is_array(mask) or isinstance(mask, (list, tuple))):
        hint = f"{mask.__name__}() makes a mask" if isinstance(mask, type) else "for example attnscore.Causal()"
        raise MaskError(message("mask", "a mask object or a boolean array", shown(mask), hint=hint))
    shape = shape_of(mask)
    batched = (score_shape.batch, score_shape.key_len)
    if (
        len(shape) == 2
        and score_shape.has_batch
        and all(map(may_equal, shape, batched))
        and 1 not in (score_shape.batch, shape[0])
    ):
        if may_equal(shape[0], score_shape.query_len) or is_unknown(score_shape.batch):
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
                f"a shape that broadcasts to (..., query, key) = {score_shape.user_shape}",
                shape,
                hint="this is (batch, key): KeyPadding(mask) says so",
            )
        )
    return Dense(mask)
