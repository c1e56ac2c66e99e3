"""Layers: attention as modules with parameters, one file per framework.

- The mathematics is `attnscore.attend`, and `attnscore.layers.description` describes the layers: the classes of a
  framework hold parameters, check inputs and call it.
- Parameters have the names of Dive into Deep Learning (D2L: ``W_q``, ``W_k``, ``w_v``; multi-head also ``W_v``,
  ``W_o``), so that its checkpoints load. Sizes not given are inferred at the first call.
- Masked inputs, even NaN or infinity, propagate into no gradient, the projections' gradients included.
- ``attention_weights`` are computed when read: a call is kept as detached inputs of its softmax, without a graph and in
  O(n) memory. A call computes and keeps them itself where they are few. Calls that are traced keep nothing.
- A file imports its framework, so nothing here imports a file: ``from attnscore.layers.torch import ...`` is explicit.
"""
