"""``from attnscore.compat.d2l import torch as d2l``: the book's names for PyTorch."""

from __future__ import annotations

import torch

from attnscore.analysis.functional import masked_softmax
from attnscore.compat.d2l.shared import check_shape, of_both_editions, sequence_mask
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
AdditiveAttention = of_both_editions(layers.AdditiveAttention, __name__)
MultiHeadAttention = of_both_editions(layers.MultiHeadAttention, __name__)
