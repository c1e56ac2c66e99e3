"""``from attnscore.compat.d2l import torch as d2l``: the book's names for PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from attnscore.analysis.functional import masked_softmax
from attnscore.compat.d2l.shared import (
    ADDITIVE,
    MULTI_HEAD,
    OLD_ADDITIVE,
    OLD_MULTI_HEAD,
    check_shape,
    named,
    sequence_mask,
)
from attnscore.layers import torch as layers
from attnscore.layers.torch import DotProductAttention
from attnscore.plotting.heatmaps import show_heatmaps

__all__ = [
    "masked_softmax",
    "sequence_mask",
    "DotProductAttention",
    "AdditiveAttention",
    "MultiHeadAttention",
    "show_heatmaps",
    "check_shape",
    "tensor",
    "ones",
    "zeros",
    "normal",
    "rand",
    "randn",
    "arange",
    "eye",
    "reshape",
]

tensor, ones, zeros, normal = torch.tensor, torch.ones, torch.zeros, torch.normal
rand, randn, arange, eye, reshape = torch.rand, torch.randn, torch.arange, torch.eye, torch.reshape


def AdditiveAttention(*arguments: Any, **options: Any) -> layers.AdditiveAttention:
    """``AdditiveAttention(num_hiddens, dropout)``, or ``(key_size, query_size, num_hiddens, dropout)`` as before."""
    return layers.AdditiveAttention(**named(arguments, options, ADDITIVE, OLD_ADDITIVE))


def MultiHeadAttention(*arguments: Any, **options: Any) -> layers.MultiHeadAttention:
    """``MultiHeadAttention(num_hiddens, num_heads, dropout, bias=False)``, or with the three sizes in front."""
    return layers.MultiHeadAttention(**named(arguments, options, MULTI_HEAD, OLD_MULTI_HEAD))
