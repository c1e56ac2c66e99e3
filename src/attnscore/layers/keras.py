"""Attention layers for Keras 3, on its TensorFlow, JAX and torch backends (and, for inference, on NumPy's).

- They are called, masked, built, saved and trained as Keras's layers are: lists, masks that arrive with the inputs,
  ``attention_mask``, ``use_causal_mask``, ``return_attention_scores``, ``.keras`` files, mixed precision, symbolic
  calls with unknown lengths. `attnscore.layers` has the rules of all frameworks.
- Projections are ``keras.layers.Dense``, so that regularizers, LoRA and quantisation work on them.
- Nothing is kept of a call in graphs and jit.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import keras
import numpy as np

from attnscore.backends.base import HALF_PRECISION, Array, HostArray
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.kv_cache import KeyValueCache
from attnscore.layers import description, shared
from attnscore.layers.base import BaseAttention, LastCall, LoadsTorch, PreparesKeys
from attnscore.layers.description import INPUTS, Layer, Linear, Parameter
from attnscore.layers.documentation import RETURNS_CACHE, Documentation, documented_call
from attnscore.layers.keras_inputs import (
    BACKEND,
    OPS,
    as_attention_mask,
    check_inputs,
    check_padding,
    combined,
    drawn_seed,
    masks_in_list,
    unpacked,
    value_of,
    whole_numbers,
)
from attnscore.scores.base import projected, with_nonfinite_rows_isolated

if BACKEND == "torch":
    from attnscore.layers import torch as torch_layers

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention", "MultiHeadAttention"]

Shape = tuple[int | None, ...]

_KINDS: dict[str, Any] = {"initializer": keras.initializers, "regularizer": keras.regularizers}
_documented = Documentation(
    "from numpy import ones",
    options="""
scaled : bool
    False leaves the division by sqrt(dim) out, as ``keras.layers.Attention`` does.
seed : int, optional
    Seed of the dropout.
kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer
    Options of the projections.
kwargs
    Arguments of ``keras.layers.Layer``: name, dtype, trainable ...
""",
)

_CALL = """
queries : (batch, query, features), or a list [query, value] or [query, value, key] in place of all three
    ``keras.layers.MultiHeadAttention`` takes (query, value, key), which here is the list.
values : (batch, key, features), optional
    None: the keys.
attention_mask : a mask object, or an array that broadcasts to (batch, query, key), optional
    True (or a whole number other than 0) where a query may attend. Two axes are (query, key).
queries_mask, keys_mask, values_mask : (batch, length), True at positions that are not padding, optional
    Keras fills them with the masks that arrive with the inputs. A masked query attends to nothing.
training : bool, optional
return_attention_scores : bool
    Return the weights too, (batch, query, key), multi-head (batch, head, query, key), before dropout: O(n^2) memory.
use_causal_mask : bool
    Position i attends to the keys j <= i, counted from the first of each.
"""

# ------------------------------------------------------------------ parameters


def _matrix_and_bias(dense: Any, x: Array) -> tuple[Array, Array | None] | None:
    """Return the arrays of a projection that only multiplies and adds, in the dtype of `x`; None of another one."""
    if BACKEND == "torch":  # hooks of a module see its calls
        return None
    if type(dense) is not keras.layers.Dense or dense.activation is not keras.activations.linear:
        return None
    if dense.quantization_mode is not None or dense.lora_enabled or dense.activity_regularizer is not None:
        return None
    kernel = value_of(dense.kernel)
    return (kernel, None if dense.bias is None else value_of(dense.bias)) if kernel.dtype == x.dtype else None


# ------------------------------------------------------------------ the call


class _Signature(inspect.Signature):
    """Signature of a call that Keras binds without the defaults of missing arguments.

    Keras looks for tensors among all arguments. TensorFlow takes 9 us to reject None (2.21, busy 2 cores).
    """

    def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _Arguments(self, super().bind(*args, **kwargs).arguments)


class _Arguments(inspect.BoundArguments):
    def apply_defaults(self) -> None:
        """Add the mask arguments that Keras fills in, for tensors that carry a mask."""
        for name, x in list(self.arguments.items()):
            if getattr(x, "_keras_mask", None) is not None and f"{name}_mask" in self.signature.parameters:
                self.arguments.setdefault(f"{name}_mask", None)


def _is_traced(*arrays: Array) -> bool:
    """Whether these stand for values of a later run."""
    if BACKEND == "torch":
        return torch_layers.is_traced(*arrays)
    if BACKEND == "tensorflow":
        return not all(hasattr(x, "numpy") or not hasattr(x, "graph") for x in arrays)
    return BACKEND == "jax" and (OPS.needs_grad(*arrays) or OPS.needs_host_callback(*arrays))


class Attention(BaseAttention[Array], LoadsTorch, keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Base of the layers: calls as Keras makes them, parameters, dropout in training, the inputs of the last softmax.

    Keras passes a mask, of an Embedding for instance, only to an argument that is called ``<argument>_mask``, and to
    none where the tensors come in a list. So a list is unpacked before Keras looks at the call.
    """

    _ops, _is_traced = OPS, staticmethod(_is_traced)
    _last_call_type = torch_layers.LastCall if BACKEND == "torch" else LastCall
    _calls_not_kept = "compiled functions (fit, evaluate, predict, tf.function, jit), which keep nothing"

    def __init__(
        self,
        layer: Layer,
        dropout: float,
        keep_last: bool,
        *,
        seed: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if BACKEND == "tensorflow":  # elsewhere Keras is quick, and on JAX it keeps masks apart from their tensors
            self._call_signature: Any = _Signature(list(inspect.signature(self.call).parameters.values()))
        self._set_options(layer, dropout, keep_last)
        self.seed = seed
        self.supports_masking = True
        # Keras would refuse layer(queries, keys, values, [2, 6]).
        self._allow_non_tensor_positional_args = True
        # As in Keras's layers: a generator is a variable of the model, and in its files.
        self.seed_generator = keras.random.SeedGenerator(seed) if self.dropout > 0 else None
        settings = {"kernel_initializer": kernel_initializer, "kernel_regularizer": kernel_regularizer}
        if layer.heads:
            settings |= {"bias_initializer": bias_initializer, "bias_regularizer": bias_regularizer}
        self._settings = {name: _KINDS[name.rpartition("_")[2]].get(x) for name, x in settings.items()}
        for linear in layer.linears:
            options = {"use_bias": linear.bias, "name": linear.name, "dtype": self.dtype_policy, **self._settings}
            if isinstance(initializer := options["kernel_initializer"], keras.initializers.Initializer):
                options["kernel_initializer"] = initializer.clone()  # one object draws one array
            setattr(self, linear.name, keras.layers.Dense(linear.units, **options))
        for parameter in layer.parameters:
            # Made when the layer is built.
            setattr(self, parameter.name, None)

    def build(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> None:
        """Make the parameters, of the sizes of these inputs."""
        for part in self._layer.parts:
            shapes = dict(zip(INPUTS, unpacked(queries_shape, keys_shape, values_shape), strict=True))
            for name, size in zip(part.inputs, part.shape[-len(part.inputs) :], strict=False):
                if shapes[name][-1] is None:
                    shape = {name: tuple(shapes[name])}
                    raise ShapeError(message(name, "vectors of a known length", "None", shapes=shape))
                if size is not None:
                    shared.check_features(name, shapes[name][-1], size, part.name)
            sized = part.sized([int(shapes[name][-1]) for name in part.inputs])
            if isinstance(sized, Linear):
                getattr(self, sized.name).build((None, None, sized.size))
                continue
            bound, start = sized.bound, keras.initializers.Constant(sized.start)
            start = keras.initializers.RandomUniform(-bound, bound) if bound else start
            # In the variable dtype, which `attend` takes as it is under mixed precision too.
            variable = self.add_weight(name=sized.name, shape=sized.sizes, initializer=start, autocast=False)
            setattr(self, sized.name, variable)

    def __call__(
        self, queries: Any, keys: Any = None, values: Any = None, valid_lens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the layer on tensors; a list as first argument is [query, value, key] as in Keras's layers."""
        queries, keys, values = unpacked(queries, keys, values)
        if "mask" in kwargs:
            kwargs |= masks_in_list(kwargs.pop("mask"))
        if self.compute_dtype in HALF_PRECISION:
            valid_lens = whole_numbers(valid_lens)
        # TensorFlow recomputes no eager call (`keras.RematScope`) that has a None among its positional arguments.
        lens = () if valid_lens is None and not args else (valid_lens,)
        return super().__call__(queries, keys, values, *lens, *args, **kwargs)

    @documented_call(_CALL + RETURNS_CACHE)
    def call(
        self,
        queries: Any,
        keys: Any = None,
        values: Any = None,
        valid_lens: Any = None,
        attention_mask: Any = None,
        queries_mask: Any = None,
        keys_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
        values_mask: Any = None,
        bias: Any = None,
        cache: KeyValueCache | None = None,
    ) -> Any:
        # As `__call__` does: ``stateless_call`` passes NumPy arrays on.
        queries, keys, values = (
            self.dtype_policy.convert_input(x, self.autocast, self.input_dtype) if isinstance(x, np.ndarray) else x
            for x in unpacked(queries, keys, values)
        )
        keys, linears = self._unprepared(keys)
        inputs = dict(zip(INPUTS, (queries, keys, values), strict=True))
        check_inputs(inputs)
        batch, *lengths = shape = shared.scores_shape(*map(OPS.shape, inputs.values()))
        if cache is not None:
            # The keys are the cache's slots, as many as after the append; causal order is kept without a mask.
            shape, use_causal_mask = (batch, lengths[0], None), False
        padding = {"queries_mask": queries_mask, "keys_mask": keys_mask, "values_mask": values_mask}
        for name, x in padding.items():
            if cache is not None and x is not None:
                hint = "valid_lens says how many of the new positions of each sequence are real"
                raise ArgumentError(message(name, "none with a cache", "a mask", hint=hint))
            check_padding(name, x, (batch, lengths[0 if name == "queries_mask" else 1]))
        mask = combined(as_attention_mask(attention_mask, shape), **padding, causal=use_causal_mask)
        bias = None if bias is None else value_of(bias)
        operands, arguments = self._operands(inputs, linears, valid_lens, mask, bias, cache)
        drops = self.seed_generator is not None and bool(training)
        dropout, seed = (self.dropout, drawn_seed(self.seed_generator)) if drops else (0.0, None)
        returns_weights = bool(return_attention_scores)
        out, weights, cache = self._attend(operands, arguments, dropout, seed, returns_weights=returns_weights)
        results = (out, *([weights] if returns_weights else []), *([] if cache is None else [cache]))
        return results if len(results) > 1 else out

    def _project(self, linear: Linear, x: Array) -> Array:
        dense = getattr(self, linear.name)
        if isinstance(dense, keras.layers.Dense):
            shared.check_features(linear.input, x.shape[-1], dense.input_spec.axes[-1], linear.name)
        if (arrays := _matrix_and_bias(dense, x)) is None:
            return with_nonfinite_rows_isolated(OPS, x, partial(self._call_module, linear))
        # TensorFlow takes a third of the time of the layer, and JAX's gradient alone isolates rows.
        matrix, bias = arrays
        product = projected(OPS, x, matrix)
        return product if bias is None else product + bias

    def _call_module(self, linear: Linear, x: Array) -> Array:
        result = getattr(self, linear.name)(x)
        # On torch Keras multiplies float64 in float32, and the dtype of the result shows it.
        return result if result.dtype == x.dtype else keras.ops.cast(result, x.dtype)

    def _read(self, part: Linear | Parameter, inputs: Mapping[str, Array]) -> Array:
        attribute = getattr(self, part.name)
        if isinstance(part, Linear):
            if type(attribute) is not keras.layers.Dense or attribute.quantization_mode is not None:
                return self._vector(part, inputs["queries"])
            # An index takes TensorFlow ten times as long.
            return keras.ops.reshape(value_of(attribute.kernel), (-1,))
        for name, size in zip(part.inputs, attribute.shape, strict=False):
            shared.check_features(name, inputs[name].shape[-1], size, part.name)
        return value_of(attribute)

    def _reshape(self, x: Array, features: tuple[int, ...]) -> Array:
        return keras.ops.reshape(x, (*keras.ops.shape(x)[:2], *features))

    def compute_output_shape(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> Shape:
        """Return (batch, query, features); a list as first argument is [query, value, key], as in a call."""
        shapes = unpacked(queries_shape, keys_shape, values_shape)
        shared.check_axes(dict(zip(INPUTS, map(tuple, shapes), strict=True)))
        batch, query, _ = shared.scores_shape(*shapes)
        return batch, query, self.num_hiddens if self._layer.heads else shapes[2][-1]

    def compute_output_spec(self, queries: Any, keys: Any = None, values: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a symbolic call: tensors without numbers."""
        inputs = dict(zip(INPUTS, unpacked(queries, keys, values), strict=True))
        check_inputs(inputs)
        shapes = [x.shape for x in inputs.values()]
        out = keras.KerasTensor(self.compute_output_shape(*shapes), dtype=self.compute_dtype)
        arguments = self._call_signature.bind(*inputs.values(), *args, **kwargs).arguments
        if arguments.get("cache") is not None:
            hint = "a subclassed model passes it on in its call"
            raise ArgumentError(message("cache", "none in a functional model", "one", hint=hint))
        if not arguments.get("return_attention_scores"):
            return out
        batch, *lengths = shared.scores_shape(*shapes)
        heads = (self._layer.heads,) if self._layer.heads else ()
        return out, keras.KerasTensor((batch, *heads, *lengths), dtype=self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the queries, which is also the output's."""
        return mask[0] if isinstance(mask, (list, tuple)) else mask

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the layer for `from_config`, a rotary embedding by its name."""
        settings = self._settings if self._layer.linears else {}
        settings = {name: keras.saving.serialize_keras_object(x) for name, x in settings.items()}
        options = {"dropout": self.dropout, "seed": self.seed, "keep_last": self.keep_last}
        rotary = getattr(self, "rotary", None)
        rotary_config = {} if rotary is None else {"rotary": keras.saving.serialize_keras_object(rotary)}
        return {**super().get_config(), **options, **self._layer.to_config(), **settings, **rotary_config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the layer of a configuration."""
        rotary = config.get("rotary")
        objects = {} if rotary is None else {"rotary": keras.saving.deserialize_keras_object(rotary)}
        return super().from_config({**config, **Layer.from_config(config), **objects})

    def _load(self, arrays: Mapping[str, HostArray]) -> None:
        if not self.built:
            # A layer that is built has sizes: names that do not fit must not set them.
            shared.check_names(arrays, [name for part in self._layer.parts for name in part.torch_names])
            sizes = self._layer.sizes_in(arrays)
            self.build(*((None, None, sizes[name]) for name in INPUTS))
        modules = {part.name: getattr(self, part.name) for part in self._layer.parts}
        variables = self._layer.torch_variables(modules, keras.layers.Dense)
        shared.load_state(arrays, variables, lambda variable, array: variable.assign(array))


# ------------------------------------------------------------------ the layers


_registered = keras.saving.register_keras_serializable(package="attnscore")
_OF_KERNELS, _OF_BIASES = (tuple(f"{part}_{kind}" for kind in _KINDS) for part in ("kernel", "bias"))


@final
@_registered
@_documented(without=_OF_KERNELS + _OF_BIASES)
class DotProductAttention(description.DotProductLayer, Attention):
    """Pooling by the dot product of queries and keys, softmax(q . k / sqrt(dim)) v."""


@final
@_registered
@_documented(without=_OF_BIASES)
class AdditiveAttention(description.AdditiveLayer, Attention, PreparesKeys[Array]):
    """Pooling by the additive score w_v . tanh(W_q q + W_k k)."""

    def _checked_keys(self, keys: Any, linear: Linear) -> Any:
        if not self.built:
            hint = "the first call of the layer makes them, and layer.build(queries_shape, keys_shape, values_shape)"
            raise ArgumentError(message("prepare_keys", "a layer with parameters", "one without", hint=hint))
        inputs = dict(zip(INPUTS[1:], unpacked(keys, keys, keys)[1:], strict=True))
        check_inputs(inputs)
        shared.check_features("keys", keys.shape[-1], getattr(self, linear.name).kernel.shape[0], linear.name)
        # As Keras casts the inputs of a call.
        return keras.ops.cast(keys, self.compute_dtype)


@final
@_registered
@_documented(without=_OF_KERNELS + _OF_BIASES)
class BilinearAttention(description.BilinearLayer, Attention):
    """Pooling by the bilinear score q . W k."""


@final
@_registered
@_documented(without=_OF_KERNELS + _OF_BIASES)
class GaussianAttention(description.GaussianLayer, Attention):
    """Pooling by the Gaussian kernel -|q - k|^2 / (2 bandwidth^2)."""


@final
@_registered
@_documented()
class MultiHeadAttention(description.MultiHeadLayer, Attention):
    """Pooling in several heads, W_o concat_h(pool_h)."""

    bias = description.option("bias")
