"""The names of *Dive into Deep Learning* that its chapter on attention uses, for each of its frameworks.

``from attnscore.compat.d2l import torch as d2l`` (or `tensorflow`, `mxnet`, `jax`) takes the place of ``from d2l import
torch as d2l``: the attention code of the book runs unchanged, computed by `attend`. The classes take the arguments of
both editions. One result differs: a row without a valid key gets zeros, where the book averages its padding.
"""
