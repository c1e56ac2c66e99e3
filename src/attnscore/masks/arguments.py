"""The arguments ``mask=`` and ``valid_lens=`` of a call as one mask."""

from __future__ import annotations

from typing import Any

from attnscore import backends
from attnscore.base.arguments import closest, shown
from attnscore.base.layout import ScoreShape, is_unknown, may_equal
from attnscore.errors import MaskError, message
from attnscore.masks.base import Mask, all_of
from attnscore.masks.builtin import Dense, ValidLens
from attnscore.masks.shape_spec import shape_of

_NAMES = ("Causal", "Dense", "Documents", "KeyPadding", "Packed", "PrefixLM", "SlidingWindow", "ValidLens")


def as_mask(mask: Any, valid_lens: Any, score_shape: ScoreShape) -> Mask | None:
    """Return the AND of both arguments, not yet checked against `score_shape`, or None without any.

    Raise MaskError where `mask` is neither a mask nor an array, or is an array of ambiguous shape.
    """
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else _dense(mask, score_shape))
    if valid_lens is not None:
        parts.append(ValidLens(valid_lens))
    return all_of(parts)


def _dense(mask: Any, score_shape: ScoreShape) -> Mask:
    """Return a bare boolean array as a mask."""
    if isinstance(mask, type) or not (backends.is_array(mask) or isinstance(mask, (list, tuple))):
        hint = f"{mask.__name__}() makes a mask" if isinstance(mask, type) else "for example attnscore.Causal()"
        if isinstance(mask, str) and (name := closest(mask, _NAMES)):
            hint = f"did you mean attnscore.{name}(...)?"
        raise MaskError(message("mask", "a mask object or a boolean array", shown(mask), hint=hint))
    shape = shape_of(mask)
    batch, query_len, key_len = score_shape.batch, score_shape.query_len, score_shape.key_len
    is_per_key = len(shape) == 2 and score_shape.has_batch and all(map(may_equal, shape, (batch, key_len)))
    if is_per_key and 1 not in (batch, shape[0]):
        if may_equal(shape[0], query_len) or is_unknown(batch):
            expected = "an array whose meaning is clear"
            got = f"shape {shape}, which is both (batch, key) and (query, key)"
            hint = "KeyPadding(mask) says (batch, key), Dense(mask) says (query, key)"
            raise MaskError(message("mask", expected, got, hint=hint))
        expected = f"a shape that broadcasts to (..., query, key) = {score_shape.user_shape}"
        raise MaskError(message("mask", expected, shape, hint="this is (batch, key): KeyPadding(mask) says so"))
    return Dense(mask)
