"""Masks: which keys a query may see."""

from attnscore.masking.arguments import as_mask
from attnscore.masking.contract import And, Intervals, Mask, Not, Or, intersect, split
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
    "Not",
    "Or",
    "PrefixLM",
    "SlidingWindow",
    "ValidLens",
    "as_mask",
    "intersect",
    "recognised",
    "split",
]
