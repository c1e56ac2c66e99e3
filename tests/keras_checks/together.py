"""What the checks of the Keras layers share: a layer beside its PyTorch counterpart, and gradients on any backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import torch

from attnscore.layers import keras as layers
from attnscore.masks import Mask
from layer_cases import Case

BACKEND = keras.backend.backend()
SHOWN = keras.ops.convert_to_numpy
# JAX compiles every operation of every shape, half a second for each case here.
slow_on_jax = pytest.mark.slow if BACKEND == "jax" else pytest.mark.filterwarnings()


def quick(names: tuple[str, ...], *, among: Iterable[Any], on_jax: tuple[str, ...] | None = None) -> list[Any]:
    """The cases, those that are not `names` (on JAX, `on_jax`) marked slow."""
    kept = names if on_jax is None or BACKEND != "jax" else on_jax
    named = [(getattr(case, "name", case), case) for case in among]
    return [pytest.param(case, id=name, marks=() if name in kept else pytest.mark.slow) for name, case in named]


def counterparts(case: Case, **more: Any) -> tuple[Any, Any]:
    """A PyTorch layer in float64, and the Keras layer with its numbers."""
    torch.manual_seed(0)
    theirs = case.make().double()
    ours = getattr(layers, case.kind.__name__)(**case.arguments, **more)
    ours.load_torch(dict(theirs.state_dict()) if list(theirs.parameters()) else {})
    return theirs, ours


def arrays(*tensors: Any) -> tuple[np.ndarray, ...]:
    return tuple(x.detach().numpy() for x in tensors)


def as_given(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a PyTorch layer for a Keras layer, arrays as NumPy's."""
    return {("attention_mask" if name == "mask" else name): _as_numpy(x) for name, x in given.items()}


def _as_numpy(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.numpy()
    if isinstance(x, Mask):
        return dataclasses.replace(x, **{f.name: _as_numpy(getattr(x, f.name)) for f in dataclasses.fields(x)})
    return x


def gradients(
    layer: Any, inputs: tuple[np.ndarray, ...], grad: np.ndarray, **given: Any
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Output, and the gradients of sum(output * grad) into the inputs and the trainable variables."""
    return {"torch": _by_torch, "tensorflow": _by_tensorflow, "jax": _by_jax}[BACKEND](layer, inputs, grad, given)


def _by_torch(layer: Any, inputs: Any, grad: Any, given: Any) -> Any:
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    layer(*leaves, **given)  # builds
    out = layer(*leaves, **given)
    variables = [variable.value for variable in layer.trainable_variables]
    found = torch.autograd.grad((out * torch.tensor(grad)).sum(), [*leaves, *variables])
    return _split(out, found)


def _by_tensorflow(layer: Any, inputs: Any, grad: Any, given: Any) -> Any:
    import tensorflow as tf

    leaves = [tf.constant(x) for x in inputs]
    layer(*leaves, **given)
    variables = [variable.value for variable in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        out = layer(*leaves, **given)
        loss = tf.reduce_sum(out * grad)
    return _split(out, tape.gradient(loss, [*leaves, *variables]))


def _by_jax(layer: Any, inputs: Any, grad: Any, given: Any) -> Any:
    import jax

    if not layer.built:
        layer(*inputs, **given)
    fixed = [variable.value for variable in layer.non_trainable_variables]

    def loss(leaves: Any, variables: Any) -> Any:
        out, _ = layer.stateless_call(variables, fixed, *leaves, **given)
        return (out * grad).sum(), out

    variables = [variable.value for variable in layer.trainable_variables]
    leaves = [jax.numpy.asarray(x) for x in inputs]
    found, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(leaves, variables)
    return _split(out, [*found[0], *found[1]])


def _split(out: Any, found: Any) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    everything = [SHOWN(x) for x in found]
    return SHOWN(out), everything[:3], everything[3:]


def named_gradients(ours: Any, grads: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of a Keras layer's variables under PyTorch's names and in PyTorch's shapes."""
    by_id = {id(variable): grad for variable, grad in zip(ours.trainable_variables, grads, strict=True)}
    modules = {part.name: getattr(ours, part.name) for part in ours._layer.parts}
    return {
        name: by_id[id(variable)].T if transposed else by_id[id(variable)]
        for name, (variable, transposed) in ours._layer.torch_variables(modules, keras.layers.Dense).items()
    }


def compare_gradients(
    theirs: Any, ours: Any, leaves: list[torch.Tensor], given: dict[str, Any], times: float = 32
) -> None:
    """Output and gradients of inputs and parameters; `given` are arguments of the PyTorch layer."""
    wanted_out = theirs(*leaves, **given)
    grad = torch.randn(wanted_out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((wanted_out * grad).sum(), [*leaves, *theirs.parameters()])
    single = tuple(x.astype("float32") for x in arrays(*leaves))
    out, into_inputs, into_variables = gradients(ours, single, grad.numpy(), **as_given(given))
    close(out, wanted_out.detach())
    for got, want in zip(into_inputs, wanted[:3], strict=True):
        close(got, want, times=times)
    named = named_gradients(ours, into_variables)
    assert len(named) == len(ours.trainable_variables)
    for (name, _), want in zip(theirs.named_parameters(), wanted[3:], strict=True):
        close(named[name], want, times=times)


def close(got: Any, wanted: Any, dtype: str = "float32", *, times: float = 32) -> None:
    """Within some units of the dtype's precision, of the largest number."""
    got, wanted = (
        np.asarray(SHOWN(x) if hasattr(x, "shape") and not isinstance(x, np.ndarray) else x) for x in (got, wanted)
    )
    assert got.shape == wanted.shape
    eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=0, atol=times * eps * scale)
