"""Parameters of the Flax layers: sizes that the first call tells, starting values, the numbers of a PyTorch checkpoint.

- A parameter that lacks a size is a module of its own until it is made, so that copies and states have it too.
- A checkpoint changes nothing before all of it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnscore import backends
from attnscore.errors import ArgumentError, ShapeError, message
from attnscore.layers import shared


class Unsized(nnx.Module):
    """A parameter or a projection that lacks sizes. The first call makes it and puts it in the place of this."""

    def __init__(self, make: Callable[..., Any], sizes: tuple[int | None, ...], rngs: nnx.Rngs, **given: Any) -> None:
        self.make = make
        self.sizes = sizes
        self.given = tuple(given.items())
        self.rngs = rngs.params.fork()

    def made(self, *lengths: int) -> Any:
        """What this stands for; `lengths` fill the first sizes where they are None."""
        first = (own or found for own, found in zip(self.sizes, lengths, strict=False))
        sizes = (*first, *self.sizes[len(lengths) :])
        return self.make(*sizes, rngs=nnx.Rngs(params=self.rngs()), **dict(self.given))


def sized(make: Callable[..., Any], *sizes: int | None, rngs: nnx.Rngs, **given: Any) -> Any:
    """What `make` makes of these sizes, or a stand-in until they are known."""
    return Unsized(make, sizes, rngs, **given) if None in sizes else make(*sizes, rngs=rngs, **given)


def linear(name: str, size: int | None, out_features: int, **given: Any) -> Any:
    """A projection of vectors of length `size`, or of whatever length comes first when that is None."""
    shared.check_size(name, size, optional=True)
    return sized(nnx.Linear, size, out_features, **given)


def matrix(query_size: int, key_size: int, *, rngs: nnx.Rngs, param_dtype: Any) -> nnx.Param[jax.Array]:
    """The matrix of a bilinear score."""
    return started(shared.bilinear_parameter(query_size, key_size), rngs, param_dtype)


def started(parameter: shared.Parameter, rngs: nnx.Rngs, param_dtype: Any) -> nnx.Param[jax.Array]:
    """A parameter with its starting values."""
    if not parameter.bound:
        return nnx.Param(jnp.full(parameter.shape, parameter.start, param_dtype))
    bound = parameter.bound
    return nnx.Param(jax.random.uniform(rngs.params(), parameter.shape, param_dtype, -bound, bound))


def load_torch(layer: nnx.Module, state: Mapping[str, Any]) -> None:
    """Fill the parameters of `layer` from a ``state_dict``; what has no size yet is made with the sizes found there."""
    arrays = {name: _as_numpy(name, x) for name, x in state.items()}
    parts = {name: _made(x, arrays.get(f"{name}.weight")) for name, x in vars(layer).items()}
    wanted = {name: x for part, x in parts.items() for name, x in _parameters(part, x)}
    if set(wanted) != set(arrays):
        raise ArgumentError(message("state", "the names " + ", ".join(sorted(wanted)), ", ".join(sorted(arrays))))
    for name, (parameter, transposed) in wanted.items():
        shape = parameter.shape[::-1] if transposed else parameter.shape
        if arrays[name].shape != shape:
            raise ShapeError(message(name, f"shape {shape}", arrays[name].shape))
    for name, (parameter, transposed) in wanted.items():
        parameter[...] = jnp.asarray(arrays[name].T if transposed else arrays[name], parameter.dtype)
    for name, x in parts.items():
        if x is not getattr(layer, name):
            setattr(layer, name, x)


def _made(part: Any, weight: np.ndarray[Any, Any] | None) -> Any:
    """`part`, or what it stands for, with the sizes that its weight in the checkpoint has."""
    if not isinstance(part, Unsized):
        return part
    if weight is None or weight.ndim != 2:
        return part.made(1, 1)
    return part.made(*(weight.shape[::-1] if part.make is nnx.Linear else weight.shape))


def _parameters(part: str, x: Any) -> Iterator[tuple[str, tuple[nnx.Param[Any], bool]]]:
    """The parameters in an attribute of the layer by PyTorch's name, and whether they are transposed there."""
    if isinstance(x, nnx.Linear):
        yield f"{part}.weight", (x.kernel, True)
        if x.bias is not None:
            yield f"{part}.bias", (x.bias, False)
    elif isinstance(x, nnx.Param):
        # There the matrix of a single bilinear score is a module; those of many heads are one parameter.
        yield (f"{part}.weight" if part == "W" and x.ndim == 2 else part), (x, False)


def _as_numpy(name: str, x: Any) -> np.ndarray[Any, Any]:
    found = backends.of({name: x}).host(x)
    if found is None:
        raise ArgumentError(message(name, "an array whose numbers can be seen", "one on a device", hint="x.cpu()"))
    return found
