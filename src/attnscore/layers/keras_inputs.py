"""Arguments of a call of a Keras layer: a list or three tensors, masks under several names, unknown lengths, seeds.

- A list is [query, value] or [query, value, key], of tensors or of shapes, as Keras's attention layers take it.
- Whole numbers pass as masks, as with Keras's layers; an array with two axes is (query, key).
- Errors name the argument, and have the same text as in the other frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras

from attnscore import backends
from attnscore.backends.base import FLOATING, Array, SeedHalves
from attnscore.base.arguments import shown
from attnscore.base.layout import may_equal
from attnscore.errors import ArgumentError, DtypeError, FrameworkError, MaskError, message
from attnscore.layers import shared
from attnscore.masks import Causal, Dense, KeyPadding, Mask
from attnscore.masks.base import all_of
from attnscore.masks.shape_spec import shape_of
from attnscore.plans.prepared import PreparedKeys

_BACKENDS = ("tensorflow", "jax", "torch", "numpy")
BACKEND: str = keras.backend.backend()
if BACKEND not in _BACKENDS:
    raise FrameworkError(message("KERAS_BACKEND", "one of " + ", ".join(_BACKENDS), shown(BACKEND)))
OPS = backends.load(BACKEND)
# dtype of the halves of a dropout seed in a graph: 32 bits where arithmetic wraps around, 64 where it is masked.
_SEED_DTYPE = {"jax": "uint32"}.get(BACKEND, "int64")


def unpacked(queries: Any, keys: Any, values: Any) -> tuple[Any, Any, Any]:
    """Return queries, keys and values (or their shapes); a list is [query, value] or [query, value, key]."""
    if isinstance(queries, (list, tuple)) and not _is_shape(queries):
        expected = "a tensor, or a list [query, value] or [query, value, key]"
        if len(queries) not in (2, 3):
            raise ArgumentError(message("queries", expected, f"a list of {len(queries)}"))
        if keys is not None or values is not None:
            hint = "keys and values are in the list"
            raise ArgumentError(message("queries", "a tensor where keys or values are given", "a list", hint=hint))
        queries, values, keys = (*queries, queries[1])[:3]
    if keys is None:
        hint = "layer(x, x, x) is self-attention"
        raise ArgumentError(message("keys", "keys, or a list [query, value, key] as first argument", "None", hint=hint))
    values = keys if values is None else values
    for name, x in {"queries": queries, "keys": keys, "values": values}.items():
        if name == "keys" and type(x) is PreparedKeys:
            continue
        if not _is_shape(x) and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            hint = "keras.ops.convert_to_tensor(x) makes one"
            raise FrameworkError(message(name, f"a tensor of Keras's {BACKEND} backend", type(x).__name__, hint=hint))
    return queries, keys, values


def _is_shape(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(n is None or isinstance(n, int) for n in x)


def masks_in_list(mask: Any) -> dict[str, Any]:
    """Return ``mask=[query_mask, value_mask]`` of ``keras.layers.Attention`` under the names of `Attention.call`."""
    if mask is None:
        return {}
    if not isinstance(mask, (list, tuple)) or len(mask) not in (2, 3):
        hint = "attention_mask= takes arrays (query, key) and mask objects, keys_mask= arrays (batch, key)"
        expected = "a list [query_mask, value_mask] as Keras's own layers take"
        raise MaskError(message("mask", expected, shown(mask), hint=hint))
    return dict(zip(("queries_mask", "values_mask", "keys_mask"), mask, strict=False))


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise unless the inputs are floating tensors (batch, length, features) that belong together."""
    for name, x in inputs.items():
        backends.check_dense(OPS, {name: x})
        if "float" not in _dtype_of(x):
            raise DtypeError(message(name, FLOATING, _dtype_of(x)))
    shared.check_axes({name: tuple(x.shape) for name, x in inputs.items()})


def check_padding(name: str, x: Any, shape: Sequence[Any]) -> None:
    """Raise MaskError unless a mask of positions fits `shape` = (batch, length)."""
    if x is None:
        return
    mask_shape = shape_of(x)
    has_batch = len(mask_shape) == 2 and (mask_shape[0] == 1 or shape[0] == 1 or may_equal(mask_shape[0], shape[0]))
    if not has_batch or not may_equal(mask_shape[1], shape[1]):
        raise MaskError(message(name, f"shape (batch, length) = {tuple(shape)}", mask_shape))


def as_attention_mask(mask: Any, shape: Sequence[Any]) -> Mask | None:
    """Return a caller's `attention_mask` as a mask object: two axes of an array are (query, key), as in all of Keras.

    `shape` is (batch, query, key). An array of four axes, one mask a head, is checked where the heads are known.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if not (backends.is_array(mask) or isinstance(mask, (list, tuple))):
        hint = "for example attnscore.Causal()"
        raise MaskError(message("attention_mask", "a mask object or a boolean array", shown(mask), hint=hint))
    if "float" in _dtype_of(mask):
        hint = "attention_mask > 0 where numbers above 0 mean that; attnscore.attend(bias=) adds numbers to scores"
        raise MaskError(message("attention_mask", "booleans or whole numbers", _dtype_of(mask), hint=hint))
    mask_shape = shape_of(mask)
    if len(mask_shape) in (2, 3) and any(
        size != 1 and not may_equal(size, full) for size, full in zip(mask_shape[::-1], shape[::-1], strict=False)
    ):
        expected = f"a shape that broadcasts to (batch, query, key) = {tuple(shape)}"
        raise MaskError(message("attention_mask", expected, mask_shape, hint="keys_mask= takes (batch, key)"))
    return Dense(_boolean(mask))


def combined(mask: Mask | None, *, queries_mask: Any, keys_mask: Any, values_mask: Any, causal: bool) -> Mask | None:
    """Return all masks of a call as one."""
    parts = [] if mask is None else [mask]
    # In self-attention Keras passes one mask under two names.
    parts += [KeyPadding(_boolean(x)) for x in {id(x): x for x in (keys_mask, values_mask)}.values() if x is not None]
    if queries_mask is not None:
        parts.append(Dense(keras.ops.expand_dims(_boolean(queries_mask), -1)))
    return all_of([*parts, Causal("top_left")] if causal else parts)


def value_of(variable: Any) -> Array:
    """Return the value of a variable as a tensor of the backend, as Keras's scopes (autocast, stateless) give it."""
    tensor = keras.ops.convert_to_tensor(variable)
    # A variable of TensorFlow comes through as it is where nothing is cast.
    return cast(Any, OPS).convert_to_tensor(tensor) if BACKEND == "tensorflow" else tensor


def drawn_seed(generator: Any) -> Any:
    """Return a seed from a layer's generator: a number, or in a graph its two halves; None for torch's generator."""
    if backends.compiled() is not None or (BACKEND == "torch" and generator.get_config()["seed"] is None):
        # torch's compiler takes no state from a generator of Keras, and `keras.remat` restores none: as in Keras's own
        # dropout, torch's generator decides unless the layer has a seed.
        return None
    OPS.check_can_draw()
    halves = keras.random.randint((2,), 0, 2**31 - 1, dtype="int32", seed=generator)
    numbers = backends.host(halves)
    if numbers is not None:
        return int(numbers[0]) | int(numbers[1]) << 32
    low, high = (OPS.astype(halves[i], _SEED_DTYPE) for i in range(2))
    return SeedHalves(low, high)


def _boolean(x: Any) -> Any:
    """Return whole numbers as booleans, as Keras's layers take them; other dtypes get an error later."""
    if backends.is_array(x) and "int" in _dtype_of(x):
        return x != 0
    return x


def whole_numbers(lens: Any) -> Any:
    """Return float lengths as whole numbers: Keras would cast them with the other floats, but float16 has no 2049."""
    if "float" not in _dtype_of(lens):
        return lens
    values = None if isinstance(lens, keras.KerasTensor) else backends.host(lens)
    # Fractions stay, for the error that they get.
    return lens if values is not None and (values % 1).any() else keras.ops.cast(lens, "int32")


def _dtype_of(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype)) if hasattr(x, "dtype") else ""
