"""``from attnscore.compat.d2l import tensorflow as d2l``: the book's names for TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from attnscore.analysis.functional import masked_softmax
from attnscore.compat.d2l.shared import check_shape, of_both_editions, sequence_mask
from attnscore.layers import keras as layers
from attnscore.layers.keras import DotProductAttention
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

tensor, ones, zeros, normal = tf.constant, tf.ones, tf.zeros, tf.random.normal
rand, randn, arange, eye, reshape = tf.random.uniform, tf.random.normal, tf.range, tf.eye, tf.reshape
AdditiveAttention = of_both_editions(layers.AdditiveAttention, __name__)
MultiHeadAttention = of_both_editions(layers.MultiHeadAttention, __name__)
