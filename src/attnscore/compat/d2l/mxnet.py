"""``from attnscore.compat.d2l import mxnet as d2l``: the book's names for MXNet."""

from __future__ import annotations

from mxnet import np

from attnscore.analysis import functional
from attnscore.compat.d2l import shared
from attnscore.layers import mxnet as layers
from attnscore.plotting import heatmaps

tensor, ones, zeros, normal = np.array, np.ones, np.zeros, np.random.normal
rand, randn, arange, eye, reshape = np.random.rand, np.random.randn, np.arange, np.eye, np.reshape
masked_softmax, show_heatmaps = functional.masked_softmax, heatmaps.show_heatmaps
sequence_mask, check_shape = shared.sequence_mask, shared.check_shape
DotProductAttention = layers.DotProductAttention
AdditiveAttention = shared.of_both_editions(layers.AdditiveAttention, __name__)
MultiHeadAttention = shared.of_both_editions(layers.MultiHeadAttention, __name__)
