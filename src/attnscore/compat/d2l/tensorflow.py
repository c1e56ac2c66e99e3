"""``from attnscore.compat.d2l import tensorflow as d2l``: the book's names for TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from attnscore.analysis import functional
from attnscore.compat.d2l import shared
from attnscore.layers import keras as layers
from attnscore.plotting import heatmaps

tensor, ones, zeros, normal = tf.constant, tf.ones, tf.zeros, tf.random.normal
rand, randn, arange, eye, reshape = tf.random.uniform, tf.random.normal, tf.range, tf.eye, tf.reshape
masked_softmax, show_heatmaps = functional.masked_softmax, heatmaps.show_heatmaps
sequence_mask, check_shape = shared.sequence_mask, shared.check_shape
DotProductAttention = layers.DotProductAttention
_register = tf.keras.utils.register_keras_serializable("attnscore.d2l")
AdditiveAttention = _register(shared.of_both_editions(layers.AdditiveAttention, __name__))
MultiHeadAttention = _register(shared.of_both_editions(layers.MultiHeadAttention, __name__))
