"""Parameters of the Keras layers: projections, weights of a score, their numbers now, a PyTorch checkpoint.

- Projections are ``keras.layers.Dense``, so that regularizers, LoRA and quantisation work on them.
- Rows that hold a NaN or infinity pass a projection without reaching the gradient of its kernel, so that what a mask
  hides afterwards reaches nothing.
- A checkpoint changes no number before all of it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import keras
import numpy as np

from attnscore import backends
from attnscore.backends.base import Array
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.layers import shared
from attnscore.layers.keras_inputs import BACKEND, OPS
from attnscore.scores.base import with_nonfinite_rows_isolated


def dense(name: str, units: int, owner: keras.layers.Layer, *, bias: bool = False, **settings: Any) -> Any:
    """A projection called `name`, of the layer `owner`, with an initializer of its own (one object draws one array)."""
    initializer = keras.initializers.get(settings["kernel_initializer"])
    if isinstance(initializer, keras.initializers.Initializer):
        initializer = initializer.clone()
    return keras.layers.Dense(
        units,
        use_bias=bias,
        name=name,
        dtype=owner.dtype_policy,
        **{**settings, "kernel_initializer": initializer},
    )


def serialized(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Initializers and regularizers as a configuration has them."""
    kinds = {"initializer": keras.initializers, "regularizer": keras.regularizers}
    return {name: kinds[name.rpartition("_")[2]].serialize(x) for name, x in settings.items()}


def settings_of(**given: Any) -> dict[str, Any]:
    """Initializers and regularizers of the projections, made from what a constructor was given."""
    kinds = {"initializer": keras.initializers, "regularizer": keras.regularizers}
    return {name: kinds[name.rpartition("_")[2]].get(x) for name, x in given.items()}


def add_parameter(layer: Any, name: str, parameter: shared.Parameter) -> Any:
    """A weight of a score, in the layer's variable dtype: attend takes it as it is under mixed precision too."""
    start = (
        keras.initializers.RandomUniform(-parameter.bound, parameter.bound)
        if parameter.bound
        else keras.initializers.Constant(parameter.start)
    )
    return layer.add_weight(name=name, shape=parameter.shape, initializer=start, autocast=False)


def value_of(variable: Any) -> Array:
    """The tensor of a variable now: the backend's own, in whatever scope Keras reads it."""
    found, own = keras.ops.convert_to_tensor(variable), cast(Any, OPS)
    # A variable of TensorFlow's own comes through as it is where nothing is cast.
    return own.convert_to_tensor(found) if BACKEND == "tensorflow" else found


def kernel_of(layer: Any) -> Array:
    """The matrix of a projection, as numbers; a quantised one says what it does to unit vectors."""
    if layer.quantization_mode is None:
        return value_of(layer.kernel)
    return layer(keras.ops.eye(layer.input_spec.axes[-1], dtype=layer.compute_dtype))


def check_size(name: str, shape: Any, given: int | None, owner: str) -> int:
    """The length of the vectors of input `name`, which must be known when the layer is built."""
    if shape[-1] is None:
        raise ShapeError(message(name, "vectors of a known length", "None", shapes={name: tuple(shape)}))
    if given is not None:
        shared.check_features(name, shape[-1], given, owner)
    return int(shape[-1])


def project(name: str, layer: Any, x: Array, owner: str) -> Array:
    """``layer(x)``, with the rows of `x` that hold a NaN or infinity set apart."""
    shared.check_features(name, x.shape[-1], layer.input_spec.axes[-1], owner)
    # On torch Keras multiplies float64 in float32, and says so in the dtype of the result.
    return with_nonfinite_rows_isolated(OPS, x, lambda rows: keras.ops.cast(layer(rows), rows.dtype))


def load_torch(layer: Any, state: Mapping[str, Any]) -> None:
    """Fill the parameters of `layer` from a ``state_dict``; one that is not built gets the sizes found there."""
    arrays = {name: _as_numpy(name, x) for name, x in state.items()}
    if not layer.built:
        layer.build(*((None, None, size) for size in _sizes(arrays)))
    wanted = torch_names(layer)
    if set(wanted) != set(arrays):
        raise ArgumentError(message("state", "the names " + ", ".join(sorted(wanted)), ", ".join(sorted(arrays))))
    for name, (variable, transposed) in wanted.items():
        shape = tuple(variable.shape[::-1] if transposed else variable.shape)
        if arrays[name].shape != shape:
            raise ShapeError(message(name, f"shape {shape}", arrays[name].shape))
    for name, (variable, transposed) in wanted.items():
        variable.assign(arrays[name].T if transposed else arrays[name])


def _sizes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> tuple[int, int, int]:
    """Lengths of the vectors of queries, keys and values in a checkpoint, 1 where it does not say."""

    def length(name: str, axis: int = -1) -> int:
        found = arrays.get(f"{name}.weight")
        return 1 if found is None or found.ndim != 2 else int(found.shape[axis])

    return (length("W", 0), length("W"), 1) if "W.weight" in arrays else (length("W_q"), length("W_k"), length("W_v"))


# torch.nn.Module, which a layer is on that backend, does not show them among its attributes.
_NAMES = ("W_q", "W_k", "W_v", "W_o", "w_v", "W", "log_bandwidth", "log_scale")


def torch_names(layer: Any) -> dict[str, tuple[Any, bool]]:
    """The variables of a built layer by PyTorch's name, each with whether it is transposed there."""
    return {name: found for part in _NAMES for name, found in _variables(part, getattr(layer, part, None))}


def _variables(part: str, x: Any) -> Iterator[tuple[str, tuple[Any, bool]]]:
    if isinstance(x, keras.layers.Dense):
        yield f"{part}.weight", (x.kernel, True)
        if x.bias is not None:
            yield f"{part}.bias", (x.bias, False)
    elif x is not None:
        # There the matrix of a single bilinear score is a module; those of many heads are one parameter.
        yield (f"{part}.weight" if part == "W" and len(x.shape) == 2 else part), (x, False)


def _as_numpy(name: str, x: Any) -> np.ndarray[Any, Any]:
    found = backends.of({name: x}).host(x)
    if found is None:
        raise ArgumentError(message(name, "an array whose numbers can be seen", "one on a device", hint="x.cpu()"))
    return found
