"""Masks: which keys a query may attend."""

from attnscore.masks.base import And, IntervalMask, Mask, Not, Or, parts_of, split_intervals
from attnscore.masks.builtin import (
    BUILTIN,
    Causal,
    Dense,
    Documents,
    KeyPadding,
    KeyRange,
    Neighbours,
    Packed,
    PrefixLM,
    SlidingWindow,
    ValidLens,
    as_mask,
)
from attnscore.masks.cached import CachedMask, cached_mask
from attnscore.masks.function import EvaluatedFunction, MaskFunction
from attnscore.masks.intervals import IntervalSet
from attnscore.masks.sharded import Sharded

__all__ = [
    "BUILTIN",
    "And",
    "Causal",
    "Dense",
    "Documents",
    "EvaluatedFunction",
    "KeyPadding",
    "KeyRange",
    "CachedMask",
    "Mask",
    "MaskFunction",
    "Neighbours",
    "Not",
    "Or",
    "IntervalMask",
    "IntervalSet",
    "Packed",
    "PrefixLM",
    "Sharded",
    "SlidingWindow",
    "ValidLens",
    "as_mask",
    "parts_of",
    "cached_mask",
    "split_intervals",
]
