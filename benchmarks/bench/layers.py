"""Layers of a case: ours, and layers of the formulas as *Dive into Deep Learning* (D2L) writes them.

- All have the same parameters, and are called as ``layer(queries, keys, values, valid_lens)``.
- The weights of a call are its ``attention_weights``, or come back from the call where Keras has it so.
- Gradients are computed of the inputs and of all parameters; only the inputs' are compared.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from bench.formulas import Scores, formulas, ops
from bench.inputs import Inputs, Side, caller

_NAMES = {
    "scaled_dot": "DotProductAttention",
    "additive": "AdditiveAttention",
    "bilinear": "BilinearAttention",
    "gaussian": "GaussianAttention",
}
_MODULES = {"torch": "torch", "tensorflow": "keras", "jax": "flax"}


def ours(inputs: Inputs) -> Side:
    """Return our layer of a case."""
    case, dim = inputs.case, inputs.case.sizes["dim"]
    make = getattr(importlib.import_module(f"attnscore.layers.{_MODULES[case.framework]}"), _NAMES[case.score])
    # Keras takes the sizes from the first call.
    options: dict[str, Any] = {} if case.framework == "tensorflow" else {"query_size": dim, "key_size": dim}
    if case.framework == "jax":
        options["rngs"] = importlib.import_module("flax.nnx").Rngs(0)
    match case.score:
        case "additive":
            layer = make(dim, **options)
        case "bilinear":
            layer = make(**options)
        case "gaussian":
            return side(inputs, make(inputs.parameter))
        case _:
            return side(inputs, make())
    if case.framework == "torch":
        layer.load_state_dict(_tensors(inputs.parameter))
    else:
        layer(*inputs.arrays)
        layer.load_torch(inputs.parameter)
    return side(inputs, layer)


def of_formulas(inputs: Inputs) -> list[Any]:
    """Return a layer of the case's framework for every formula of its score."""
    case = inputs.case
    make = {"torch": _torch_layer, "tensorflow": _keras_layer, "jax": _flax_layer}[case.framework]
    return [make(inputs, scores) for scores in formulas(case.score, case.sizes["dim"], ops(case.framework))]


def side(inputs: Inputs, layer: Any) -> Side:
    """Return the side that calls a layer; with gradients, also of its parameters, which are not compared."""
    case = inputs.case
    nnx = importlib.import_module("flax.nnx") if case.framework == "jax" else None
    graph, parameters = nnx.split(layer) if nnx else (None, None)

    def forward(query: Any, key: Any, value: Any, state: Any = None, *, lens: Any) -> Any:
        its = nnx.merge(graph, state) if nnx and state is not None else layer
        found = its(query, key, value, lens)
        return (found, its.attention_weights) if case.weights and not isinstance(found, tuple) else found

    def outputs(found: Any) -> tuple[Any, ...]:
        return tuple(found[:4]) if isinstance(found, tuple) else (found,)

    if case.framework == "jax":
        # Parameters are operands of a program and of autodiff; an eager call has them in its layer.
        arrays = (*inputs.arrays, parameters) if case.graph or case.backward else inputs.arrays
        return Side(caller(inputs, forward, arrays), outputs)
    if case.framework == "torch":
        trained = list(layer.requires_grad_(case.backward).parameters())
    else:
        trained = layer.trainable_variables
    return Side(caller(inputs, forward, trained=trained), outputs)


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(x) for name, x in state.items()}


def _torch_layer(inputs: Inputs, scores: Scores) -> Any:
    """Return D2L's class for a score: masked softmax, dropout (of nothing here), the weights kept."""
    import torch
    from torch import nn

    dim, its, is_additive = inputs.case.sizes["dim"], ops("torch"), inputs.case.score == "additive"
    positions, state = its.arange(inputs.case.sizes["keys"]), inputs.parameter

    class Formula(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if is_additive:
                self.W_q, self.W_k = (nn.Linear(dim, dim, bias=False) for _ in "qk")
                self.w_v = nn.Linear(dim, 1, bias=False)
            elif inputs.case.score == "bilinear":
                self.W = nn.Parameter(torch.from_numpy(state["W.weight"]))
            self.dropout = nn.Dropout(0.0)

        def forward(self, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Any:
            parameter = state
            if is_additive:
                queries, keys, parameter = self.W_q(queries), self.W_k(keys), self.w_v.weight[0]
            elif inputs.case.score == "bilinear":
                parameter = self.W
            self.attention_weights = its.weights(scores(queries, keys, parameter), valid_lens, positions)
            return torch.bmm(self.dropout(self.attention_weights), values)

    layer = Formula()
    if is_additive:
        layer.load_state_dict(_tensors(state))
    return layer


def _keras_layer(inputs: Inputs, scores: Scores) -> Any:
    import keras

    dim, its, is_additive = inputs.case.sizes["dim"], ops("tensorflow"), inputs.case.score == "additive"
    positions, state = its.arange(inputs.case.sizes["keys"]), inputs.parameter

    class Formula(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            if is_additive:
                self.W_q, self.W_k = _dense(state["W_q.weight"]), _dense(state["W_k.weight"])
                self.w_v = self.add_weight(name="w_v", shape=(dim,))
                self.w_v.assign(state["w_v.weight"][0])
            elif inputs.case.score == "bilinear":
                self.W = self.add_weight(name="W", shape=(dim, dim))
                self.W.assign(state["W.weight"])

        def call(self, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Any:
            parameter = state
            if is_additive:
                queries, keys, parameter = self.W_q(queries), self.W_k(keys), self.w_v.value
            elif inputs.case.score == "bilinear":
                parameter = self.W.value
            weights = its.weights(scores(queries, keys, parameter), valid_lens, positions)
            return (weights @ values, weights) if inputs.case.weights else weights @ values

    return Formula()


def _dense(weight: Any) -> Any:
    """Return a Keras layer with a weight of PyTorch's."""
    import keras

    dense = keras.layers.Dense(weight.shape[0], use_bias=False)
    dense.build((None, None, weight.shape[1]))
    dense.kernel.assign(weight.T)
    return dense


def keras_own(inputs: Inputs) -> Any:
    """Return Keras's own layer of a score, with projections before and the scale that the score has."""
    import keras

    dim, state, is_additive = inputs.case.sizes["dim"], inputs.parameter, inputs.case.score == "additive"
    positions = ops("tensorflow").arange(inputs.case.sizes["keys"])

    class Own(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            if is_additive:
                self.W_q, self.W_k = _dense(state["W_q.weight"]), _dense(state["W_k.weight"])
                self.attention = keras.layers.AdditiveAttention()
            else:
                self.attention = keras.layers.Attention(use_scale=True)
            self.attention.build([(None, None, dim)] * 3)
            self.attention.scale.assign(state["w_v.weight"][0] if is_additive else 1 / np.sqrt(dim))

        def call(self, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Any:
            if is_additive:
                queries, keys = self.W_q(queries), self.W_k(keys)
            mask = [None, positions < valid_lens[:, None]]
            return self.attention([queries, values, keys], mask=mask, return_attention_scores=inputs.case.weights)

    return Own()


def _flax_layer(inputs: Inputs, scores: Scores) -> Any:
    import jax.numpy as jnp
    from flax import nnx

    dim, its, is_additive = inputs.case.sizes["dim"], ops("jax"), inputs.case.score == "additive"
    positions, state = its.arange(inputs.case.sizes["keys"]), inputs.parameter

    def linear(weight: Any) -> Any:
        found = nnx.Linear(dim, dim, use_bias=False, rngs=nnx.Rngs(0))
        found.kernel[...] = jnp.asarray(weight.T)
        return found

    class Formula(nnx.Module):
        def __init__(self) -> None:
            if is_additive:
                self.W_q, self.W_k = linear(state["W_q.weight"]), linear(state["W_k.weight"])
                self.w_v = nnx.Param(jnp.asarray(state["w_v.weight"][0]))
            elif inputs.case.score == "bilinear":
                self.W = linear(state["W.weight"].T)

        def __call__(self, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Any:
            parameter = state
            if is_additive:
                queries, keys, parameter = self.W_q(queries), self.W_k(keys), self.w_v[...]
            elif inputs.case.score == "bilinear":
                parameter = self.W.kernel[...]
            weights = its.weights(scores(queries, keys, parameter), valid_lens, positions)
            return (weights @ values, weights) if inputs.case.weights else weights @ values

    return Formula()
