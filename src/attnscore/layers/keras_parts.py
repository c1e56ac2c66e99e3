"""What the Keras layers are made of: one call for all backends, masks under Keras's names, the last call, projections.

- Tensors are those of Keras's backend (TensorFlow, JAX, torch), and `attnscore.attend` works on them directly: what it
  does in eager calls, graphs and jit holds here.
- Keras delivers a mask, of an Embedding for instance, only to an argument that is called ``<argument>_mask``; and to
  none where the tensors come in a list. So a list is taken apart before Keras looks at the call.
- A wrong shape or dtype is named before Keras meets it; lengths that are not known yet (None) pass.
- A call is kept as detached inputs of its softmax, O(n); in graphs and jit nothing is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras

from attnscore import backends
from attnscore.analysis.weights import attention_weights
from attnscore.api import attend
from attnscore.backends.base import HALF_PRECISION, Array, SeedHalves
from attnscore.layers import shared
from attnscore.layers.keras_inputs import (
    BACKEND,
    OPS,
    Shape,
    as_attention_mask,
    check_inputs,
    check_padding,
    combined,
    masks_in_list,
    scores_shape,
    unpacked,
    whole,
)
from attnscore.layers.keras_parameters import load_torch
from attnscore.scores import arrays_of

# Words of a dropout seed in a graph: 32 bits where arithmetic wraps around, 64 where it is masked.
_WORD = {"jax": "uint32"}.get(BACKEND, "int64")


class Attention(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """What every layer has: Keras's ways of calling, dropout in training, and the inputs of the last softmax."""

    def __init__(self, dropout: float, seed: int | None, keep_last: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dropout = shared.check_probability(dropout)
        self.seed = seed
        self.keep_last = keep_last
        self.supports_masking = True
        # Keras would refuse layer(queries, keys, values, [2, 6]).
        self._allow_non_tensor_positional_args = True
        # As Keras's own layers: a generator is a variable of the model, and in its files.
        self.seed_generator = keras.random.SeedGenerator(seed) if self.dropout > 0 else None
        # Past Keras's own tracking of attributes: this is no state of the model.
        self.__dict__["_last"] = None

    def __call__(
        self, queries: Any, keys: Any = None, values: Any = None, valid_lens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The layer's `call` on tensors; a list as first argument is Keras's own [query, value, key]."""
        queries, keys, values = unpacked(queries, keys, values)
        if "mask" in kwargs:
            kwargs |= masks_in_list(kwargs.pop("mask"))
        if self.compute_dtype in HALF_PRECISION:
            valid_lens = whole(valid_lens)
        return super().__call__(queries, keys, values, valid_lens, *args, **kwargs)

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
    ) -> Any:
        """Attention pooling.

        Parameters
        ----------
        queries : (batch, query, features), or a list [query, value] or [query, value, key] in their place
        keys : (batch, key, features)
        values : (batch, key, features), optional
            None: those of `keys`.
        valid_lens : (batch,) or (batch, query) whole numbers, optional
        attention_mask : a mask object, or an array that broadcasts to (batch, query, key), optional
            True (or a whole number other than 0) where a query may attend. Two axes are (query, key).
        queries_mask, keys_mask, values_mask : (batch, length), True where there is something, optional
            Keras fills them with the masks that arrive with the inputs. A query that is masked sees nothing.
        training : bool, optional
        return_attention_scores : bool
            Also the weights (batch, query, key), multi-head (batch, head, query, key), before dropout: O(n^2) memory.
        use_causal_mask : bool
            Position i sees the keys j <= i, counted from the first of each.

        Returns
        -------
        out : (batch, query, features of the values, or num_hiddens)

        Raises
        ------
        ShapeError, DtypeError, FrameworkError, MaskError, ArgumentError
        """
        queries, keys, values = unpacked(queries, keys, values)
        check_inputs(queries, keys, values)
        batch, *lengths = shape = scores_shape(*map(OPS.shape, (queries, keys)))
        padding = {"queries_mask": queries_mask, "keys_mask": keys_mask, "values_mask": values_mask}
        for name, x in padding.items():
            check_padding(name, x, (batch, lengths[name != "queries_mask"]))
        mask = combined(as_attention_mask(attention_mask, shape), **padding, causal=use_causal_mask)
        query, key, value, score = self._scored(queries, keys, values)
        arguments = {"score": score, "mask": self._over_heads(mask, shape), "valid_lens": valid_lens, "head_axis": -2}
        dropping = bool(training) and self.seed_generator is not None
        found = attend(
            query,
            key,
            value,
            dropout=self.dropout if dropping else 0.0,
            seed=self._draw_seed() if dropping else None,
            return_weights=bool(return_attention_scores),
            **arguments,
        )
        self._remember(query, key, arguments)
        return (self._joined(found[0]), found[1]) if return_attention_scores else self._joined(found)

    @abstractmethod
    def _scored(self, queries: Array, keys: Array, values: Array) -> tuple[Array, Array, Array, Any]:
        """What goes into `attend`: queries, keys and values of the softmax, and the score."""

    def _over_heads(self, mask: Any, shape: Shape) -> Any:
        return mask

    def _joined(self, out: Array) -> Array:
        return out

    def _out_features(self, values_shape: Shape) -> int | None:
        return values_shape[-1]

    def _heads_shape(self) -> tuple[int, ...]:
        """(heads,) of a multi-head layer, () of others."""
        return ()

    def compute_output_shape(self, queries_shape: Any, keys_shape: Any = None, values_shape: Any = None) -> Shape:
        """(batch, query, features); a list as first argument is [query, value, key], as in a call."""
        shapes = unpacked(queries_shape, keys_shape, values_shape)
        shared.check_axes(dict(zip(("queries", "keys", "values"), map(tuple, shapes), strict=True)))
        batch, query, _ = scores_shape(*shapes[:2])
        return batch, query, self._out_features(shapes[2])

    def compute_output_spec(self, queries: Any, keys: Any = None, values: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What a symbolic call gives: tensors without numbers."""
        inputs = unpacked(queries, keys, values)
        check_inputs(*inputs)
        out = keras.KerasTensor(self.compute_output_shape(*(x.shape for x in inputs)), dtype=self.compute_dtype)
        given = self._call_signature.bind(*inputs, *args, **kwargs).arguments
        if not given.get("return_attention_scores"):
            return out
        batch, *lengths = scores_shape(*(x.shape for x in inputs[:2]))
        return out, keras.KerasTensor((batch, *self._heads_shape(), *lengths), dtype=self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """The mask of the queries, which is that of the output."""
        return mask[0] if isinstance(mask, (list, tuple)) else mask

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same layer from."""
        own = {"dropout": self.dropout, "seed": self.seed, "keep_last": self.keep_last}
        return {**super().get_config(), **own, **self._own_config()}

    def _own_config(self) -> dict[str, Any]:
        return {}

    @property
    def attention_weights(self) -> Array:
        """The weights of the last concrete call, before dropout, detached, computed now: (batch, query, key).

        Multi-head: (batch, head, query, key). O(n^2) memory while they are held; the call itself kept its queries and
        keys alone.

        Raises
        ------
        AttnscoreError
            No call has been made, the last one was part of a compiled function (``fit``, ``predict``, ``tf.function``,
            ``jit``), or ``keep_last`` is off.
        """
        return shared.last_call(self.__dict__["_last"], self.keep_last).weights()

    def load_torch(self, state: Mapping[str, Any]) -> None:
        """Take the numbers of a PyTorch layer's ``state_dict()``, this library's or the textbook's.

        Kernels are PyTorch's weights, transposed. A layer that is not built yet gets the sizes of `state`.

        Parameters
        ----------
        state : mapping of names to arrays of any framework

        Raises
        ------
        ArgumentError
            Names that this layer has not, or that it misses.
        ShapeError
            An array of another shape. No number has been changed then.

        Examples
        --------
        >>> import numpy as np
        >>> from attnscore.layers.keras import BilinearAttention
        >>> layer = BilinearAttention()
        >>> layer.load_torch({"W.weight": np.eye(3, 5)})
        >>> tuple(layer.W.shape)
        (3, 5)
        """
        load_torch(self, state)

    def _remember(self, query: Array, key: Array, arguments: dict[str, Any]) -> None:
        if not self.keep_last:
            return
        self.__dict__["_last"] = (
            "compiled functions (fit, evaluate, predict, tf.function, jit), which keep nothing"
            if _is_traced(query, key, *arrays_of(arguments["score"]).values(), arguments)
            else _call(query, key, arguments)
        )

    def _draw_seed(self) -> Any:
        """A seed from the layer's generator: a number, or in a graph its words."""
        if backends.compiled() is not None:
            # torch's compiler takes no state from a generator of Keras.
            return None
        words = keras.random.randint((2,), 0, 2**31 - 1, dtype="int32", seed=self.seed_generator)
        found = backends.host(words)
        if found is not None:
            return int(found[0]) | int(found[1]) << 32
        low, high = (OPS.astype(words[i], _WORD) for i in range(2))
        return SeedHalves(low, high)


@dataclass(frozen=True, eq=False)
class _Call:
    """The inputs of one softmax, in a framework whose arrays are never written to."""

    query: Array
    key: Array
    arguments: dict[str, Any]

    def weights(self) -> Array:
        return OPS.stop_gradient(attention_weights(self.query, self.key, **self.arguments))


def _call(query: Array, key: Array, arguments: dict[str, Any]) -> Any:
    if BACKEND == "torch":
        # Tensors there can be written to, and carry a graph.
        from attnscore.layers import torch_parts

        return torch_parts.Call.of(query, key, arguments)
    return _Call(query, key, arguments)


def _is_traced(query: Array, key: Array, *rest: Any) -> bool:
    """Whether these stand for values of some later run."""
    *arrays, arguments = rest
    extra = [arguments["valid_lens"], *(arguments["mask"].arrays().values() if arguments["mask"] is not None else ())]
    arrays = [query, key, *arrays, *(x for x in extra if backends.is_array(x))]
    if BACKEND == "torch":
        from attnscore.layers import torch_parts

        return torch_parts.is_traced(*arrays)
    if BACKEND == "tensorflow":
        return not all(hasattr(x, "numpy") or not hasattr(x, "graph") for x in arrays)
    return BACKEND == "jax" and (OPS.needs_grad(*arrays) or OPS.needs_host_callback(*arrays))
