"""``from attnscore.compat.d2l import torch as d2l``: the book's names for PyTorch."""

from __future__ import annotations

import torch

from attnscore.analysis import functional
from attnscore.compat.d2l import shared
from attnscore.layers import torch as layers
from attnscore.plotting import heatmaps

tensor, ones, zeros, normal = torch.tensor, torch.ones, torch.zeros, torch.normal
rand, randn, arange, eye, reshape = torch.rand, torch.randn, torch.arange, torch.eye, torch.reshape
masked_softmax, show_heatmaps = functional.masked_softmax, heatmaps.show_heatmaps
sequence_mask, check_shape = shared.sequence_mask, shared.check_shape
DotProductAttention = layers.DotProductAttention
AdditiveAttention = shared.of_both_editions(layers.AdditiveAttention, __name__)
MultiHeadAttention = shared.of_both_editions(layers.MultiHeadAttention, __name__)
