"""The rows of ``layer_cases.py`` as Flax layers: the same arguments, the numbers of the PyTorch layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import Tensor

from attnscore.layers import flax as layers
from layer_cases import LAYERS, MASKS, Case

# JAX compiles every operation for every shape, which takes most of the time here: what is not in this list is slow.
QUICK = ("scaled dot", "additive", "heads, additive, 3 hidden")
some_layers = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in LAYERS],
)


# Where an additive layer asks nothing that its heads do not ask.
two_layers = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK[::2] else pytest.mark.slow) for case in LAYERS],
)
# Layers that differ from one that stays by a number alone: the same parameters, or one head in place of four. Of other
# normalizers, whose searches take JAX seconds to compile, two that stay have heads.
ALIKE = (
    *("dot", "gaussian", "heads, additive", "one head"),
    *("dot, sparsemax", "additive, sigmoid", "bilinear, entmax", "gaussian, sparsemax"),
)


@nnx.jit(static_argnames="valid_lens")
def called(layer: Any, *arrays: Any, valid_lens: Any = None) -> Any:
    """The output alone, by one program in place of dozens."""
    return layer(*arrays, valid_lens)


def make(case: Case, *, lazy: bool = False, seed: int = 0, **more: Any) -> Any:
    """The Flax layer of a row, in float64 by default."""
    given = {} if lazy else case.sizes
    dtype = {} if case.kind.__name__ == "DotProductAttention" else {"param_dtype": jnp.float64}
    return getattr(layers, case.kind.__name__)(**case.arguments, **given, **{**dtype, "rngs": nnx.Rngs(seed), **more})


def both(case: Case, parameters: torch.dtype = torch.float64, **more: Any) -> tuple[Any, Any]:
    """The PyTorch layer of a row with its parameters in a dtype, and the Flax layer with its numbers."""
    theirs = case.make().to(parameters)
    if case.kind.__name__ != "DotProductAttention":
        more = {"param_dtype": str(parameters).removeprefix("torch."), **more}
    ours = make(case, **more)
    ours.load_torch(theirs.state_dict())
    return theirs, ours


def to_jax(x: Any) -> Any:
    """A tensor, or the tensors in a mask or a list, as JAX arrays."""
    if isinstance(x, Tensor):
        half = x.dtype == torch.bfloat16
        return jnp.asarray(x.detach().float().numpy(), jnp.bfloat16) if half else jnp.asarray(x.detach().numpy())
    return jax.tree.map(lambda leaf: to_jax(leaf) if isinstance(leaf, Tensor) else leaf, x)


def to_torch(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x, np.float64))


def inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[jax.Array]:
    return [to_jax(x) for x in case.inputs(dtype, seed)]


def mask_of(name: str) -> dict[str, Any]:
    return {argument: to_jax(x) for argument, x in MASKS[name][0].items()}


def by_torch_names(state: Any) -> dict[str, Tensor]:
    """Parameters, or gradients of them, as ``state_dict`` names and turns them."""
    found = {}
    for path, x in nnx.to_flat_state(state):
        *owner, last = map(str, path)
        array = to_torch(x.get_value())
        found[".".join((*owner, "weight" if last == "kernel" else last))] = array.T if last == "kernel" else array
    return {"W.weight" if name == "W" and x.ndim == 2 else name: x for name, x in found.items()}
