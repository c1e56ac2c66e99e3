"""Masks: which keys a query may see."""

from attnscore.masking.arguments import as_mask
from attnscore.masking.contract import And, Mask, Not, Or, parts_of, split
from attnscore.masking.functions import MaskFunction
from attnscore.masking.known import Known, recognised
from attnscore.masking.masks import (
    Causal,
    Dense,
    Documents,
    KeyPadding,
    KeyRange,
    PrefixLM,
    SlidingWindow,
    ValidLens,
)
from attnscore.masking.pieces import Intervals, Pieces, intersect

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Documents",
    "Intervals",
    "KeyPadding",
    "KeyRange",
    "Known",
    "Mask",
    "MaskFunction",
    "Not",
    "Or",
    "Pieces",
    "PrefixLM",
    "SlidingWindow",
    "ValidLens",
    "as_mask",
    "intersect",
    "parts_of",
    "recognised",
    "split",
]
