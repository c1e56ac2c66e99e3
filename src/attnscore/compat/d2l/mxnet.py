"""``from attnscore.compat.d2l import mxnet as d2l``: the book's names for MXNet."""

from __future__ import annotations

from mxnet import np

from attnscore.analysis.functional import masked_softmax
from attnscore.compat.d2l.shared import check_shape, of_both_editions, sequence_mask
from attnscore.layers import mxnet as layers
from attnscore.layers.mxnet import DotProductAttention
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
    "arange",
    "eye",
    "reshape",
]

tensor, ones, zeros, normal = np.array, np.ones, np.zeros, np.random.normal
rand, arange, eye, reshape = np.random.rand, np.arange, np.eye, np.reshape
AdditiveAttention = of_both_editions(layers.AdditiveAttention, __name__)
MultiHeadAttention = of_both_editions(layers.MultiHeadAttention, __name__)
