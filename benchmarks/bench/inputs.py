"""Arrays of a case, the same for every side, and our own side of it.

- NumPy draws the arrays from a fixed seed: every process and every baseline gets the same numbers.
- Our side is the public interface, with the kernel that a caller gets.
- All sides are run by the same lines (`caller`), so they differ in the attention alone.
- We get a mask as the object that a caller would write, baselines get booleans.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attnscore as ats
from bench.cases import Case


def as_tuple(found: Any) -> tuple[Any, ...]:
    """Return the result of a call as (out, *gradients)."""
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True)
class Side:
    """One way to compute a case: `run` is timed, `outputs` turns its result into (out, *gradients)."""

    run: Callable[[], Any]
    outputs: Callable[[Any], tuple[Any, ...]] = as_tuple
    same: bool = True
    """Whether it computes the same function as ours, so that its result can be checked."""


@dataclass(frozen=True)
class Inputs:
    """Query, key, value, the parameter of the score and the gradient with respect to the output."""

    case: Case
    query: Any
    key: Any
    value: Any
    parameter: Any
    """w_v of the additive score, W of the bilinear, the bandwidth of the Gaussian one; unused by a scaled dot product.

    For a layer: its state by PyTorch's names, as NumPy arrays.
    """
    grad: Any
    lens: Any = None
    """Valid lengths, (batch,)."""

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The arrays that get a gradient, except a layer's parameters, which the layer holds."""
        is_leaf = self.case.has_parameter and not self.case.layer and not isinstance(self.parameter, float)
        return (*self.arrays, self.parameter) if is_leaf else self.arrays

    @property
    def fixed(self) -> dict[str, Any]:
        """Operands that get no gradient, by name."""
        return {} if self.lens is None else {"lens": self.lens}

    def score(self, parameter: Any) -> Any:
        """Return the score of the case with `parameter`."""
        makers = {"additive": ats.Additive, "bilinear": ats.Bilinear, "gaussian": ats.Gaussian}
        return makers[self.case.score](parameter) if self.case.has_parameter else "scaled_dot"

    def mask(self) -> Any:
        """Return the mask as a caller writes it, or None."""
        width = self.case.sizes.get("visible", 0)
        match self.case.mask:
            case "causal":
                return ats.Causal()
            case "valid_lens":
                return ats.ValidLens([width] * self.case.sizes["batch"])
            case "window":
                return ats.SlidingWindow(left=width - 1, right=0)
            case "packed":
                return ats.Packed(np.cumsum([0, *self.case.packed_lengths()]))
        return None

    def allowed(self) -> Any:
        """Return the mask as ([batch,] query, key) booleans, written independently of ours; None without a mask."""
        sizes = self.case.sizes
        i, j, width = np.arange(sizes["queries"])[:, None], np.arange(sizes["keys"]), sizes.get("visible", 0)
        match self.case.mask:
            case "causal":
                return j <= i
            case "valid_lens":
                return np.broadcast_to(j < width, (sizes["queries"], sizes["keys"]))
            case "window":
                return (j <= i) & (j > i - width)
            case "packed":
                ends = np.cumsum(self.case.packed_lengths())
                return np.searchsorted(ends, i, "right") == np.searchsorted(ends, j, "right")
            case "lens":
                each = (j < np.asarray(self.lens)[:, None])[:, None]
                return np.broadcast_to(each, (sizes["batch"], sizes["queries"], sizes["keys"]))
        return None


def draw(case: Case, length: int | None = None) -> Inputs:
    """Draw the arrays of a case; `length` replaces its numbers of queries and keys."""
    if length is not None:
        case = replace(case, sizes={**case.sizes, "queries": length, "keys": length})
    sizes, rng = case.sizes, np.random.default_rng(0)
    heads = (sizes["heads"],) if sizes["heads"] else ()

    def normal(rows: int) -> Any:
        return rng.standard_normal((sizes["batch"], *heads, rows, sizes["dim"]), dtype=np.float32)

    arrays: dict[str, Any] = {"query": normal(sizes["queries"])}
    arrays |= {name: normal(sizes["keys"]) for name in ("key", "value")}
    # Parameters give scores a variance of about 1, as trained ones and scaled dot products have.
    dim, scale = sizes["dim"], np.float32(math.sqrt(sizes["dim"]))
    arrays["parameter"] = rng.standard_normal(dim, dtype=np.float32) / scale
    arrays["grad"] = normal(sizes["queries"])
    if case.score == "gaussian":
        bandwidth = (2 * dim) ** 0.25
        # A number is fixed, an array is learned.
        arrays["parameter"] = np.asarray(bandwidth, np.float32) if case.backward and not case.layer else bandwidth
    elif case.score == "bilinear":
        arrays["parameter"] = rng.standard_normal((dim, dim), dtype=np.float32) / np.float32(dim)
    if case.mask == "lens":
        arrays["lens"] = rng.integers(1, sizes["keys"] + 1, sizes["batch"], dtype=np.int32)
    if case.layer:
        state = {"bilinear": {"W.weight": arrays["parameter"]}}
        if case.score == "additive":
            projections = (rng.standard_normal((dim, dim), dtype=np.float32) / scale for _ in "qk")
            names = ("W_q.weight", "W_k.weight", "w_v.weight")
            state["additive"] = dict(zip(names, (*projections, arrays["parameter"][None]), strict=True))
        arrays["parameter"] = state.get(case.score, arrays["parameter"])
    return Inputs(case, **{name: _native(case, name, x) for name, x in arrays.items()})


def _native(case: Case, name: str, x: Any) -> Any:
    """Return an array as one of the case's framework; in PyTorch a leaf where it gets a gradient."""
    if isinstance(x, float | dict) or case.framework == "numpy":
        return x
    if case.framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    if case.framework == "tensorflow":
        import tensorflow as tf

        return tf.constant(x)
    import torch

    if name == "lens":
        return torch.from_numpy(x)
    made = torch.from_numpy(x).to(getattr(torch, case.dtype))
    is_leaf = name != "grad" and (name != "parameter" or case.has_parameter)
    return made.requires_grad_(case.backward and is_leaf)


def caller(
    inputs: Inputs, forward: Callable[..., Any], arrays: Sequence[Any] = (), trained: Sequence[Any] = ()
) -> Callable[[], Any]:
    """Return the function to time: ``forward(query, key, value[, parameter], **fixed)``, as users would call it.

    It runs eagerly or as one compiled program, as the case says, and where the case has gradients it computes them by
    the framework's autodiff. It returns when the result has been computed. `arrays` replaces the leaves as arguments;
    `trained` are parameters of a layer, which get gradients too.
    """
    case, arrays, fixed = inputs.case, arrays or inputs.leaves, inputs.fixed
    if case.framework == "jax":
        return _in_jax(inputs, forward, arrays)
    if case.framework == "tensorflow":
        return _in_tensorflow(inputs, forward, arrays, trained)
    if not case.backward:
        return lambda: forward(*arrays, **fixed)
    import torch

    leaves = (*inputs.leaves, *trained)

    def run() -> tuple[Any, ...]:
        out = forward(*arrays, **fixed)
        return (out, *torch.autograd.grad(out, leaves, inputs.grad))

    return run


def _in_jax(inputs: Inputs, forward: Callable[..., Any], leaves: Sequence[Any]) -> Callable[[], Any]:
    import jax

    def with_gradients(*leaves: Any, grad: Any, **fixed: Any) -> tuple[Any, ...]:
        out, vjp = jax.vjp(functools.partial(forward, **fixed), *leaves)
        return (out, *vjp(grad))

    program, fixed = (forward, inputs.fixed)
    if inputs.case.backward:
        program, fixed = with_gradients, {**fixed, "grad": inputs.grad}
    run = jax.jit(program) if inputs.case.graph else program
    return lambda: jax.block_until_ready(run(*leaves, **fixed))  # type: ignore[no-untyped-call]  # JAX's own


def _in_tensorflow(
    inputs: Inputs, forward: Callable[..., Any], leaves: Sequence[Any], trained: Sequence[Any]
) -> Callable[[], Any]:
    import tensorflow as tf

    def with_gradients(*leaves: Any, grad: Any, **fixed: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            out = forward(*leaves, **fixed)
        return (out, *tape.gradient(out, [*leaves, *trained], output_gradients=grad))

    program, fixed = (forward, inputs.fixed)
    if inputs.case.backward:
        program, fixed = with_gradients, {**fixed, "grad": inputs.grad}
    run = tf.function(program) if inputs.case.graph else program
    # Eager operations on the CPU have ended when they return.
    return lambda: run(*leaves, **fixed)


def ours(inputs: Inputs, *, plain: bool = False, **more: Any) -> Side:
    """Return our side of a case; `plain`: without the options and the mask whose overhead the case measures.

    `more` are further options of `attend`.
    """
    case = inputs.case
    if case.watched:
        return _watched(inputs, is_watched=not plain)
    score, options = inputs.score(inputs.parameter), more
    if not plain:
        options = {**case.options, "mask": inputs.mask(), **options}
    if case.weights:
        options = {**options, "return_weights": True}
    if case.framework == "numpy" and case.backward:

        def with_gradients() -> tuple[Any, ...]:
            out, vjp = ats.attend_vjp(*inputs.arrays, score=score, **options)
            gradients = vjp(inputs.grad)
            return (out, *gradients[:3], *gradients.score.values())

        return Side(with_gradients)

    def forward(query: Any, key: Any, value: Any, parameter: Any = None, *, lens: Any = None) -> Any:
        # A compiled program and JAX's autodiff pass a traced parameter, for which the score is made anew.
        own = score if parameter is None or parameter is inputs.parameter else inputs.score(parameter)
        found = ats.attend(query, key, value, score=own, valid_lens=lens, **options)
        return found if case.weights or not isinstance(found, tuple) else found[0]

    return Side(caller(inputs, forward))


def kernel_of(inputs: Inputs) -> str:
    """Return the name of the kernel that `attend` takes in a case."""
    parameter = inputs.parameter
    if inputs.case.layer:  # an additive one: it attends with projected queries and keys, which have the same shapes
        import torch

        parameter = torch.from_numpy(parameter["w_v.weight"][0])
    options = {**inputs.case.options, "mask": inputs.mask(), "score": inputs.score(parameter)}
    found: list[str] = []

    def explain(query: Any, key: Any, value: Any, parameter: Any = None, lens: Any = None) -> Any:
        found.append(str(ats.explain(query, key, value, valid_lens=lens, **options).kernel))
        return value

    # Inside jit or a graph where the case is: the choice may be another one there.
    caller(replace(inputs, case=replace(inputs.case, backward=False)), explain)()
    return found[0]


def _watched(inputs: Inputs, *, is_watched: bool) -> Side:
    """Return PyTorch's own attention in a model under `watch`, or in the same model unwatched.

    `watch` wraps PyTorch's functions while both sides run, as on the steps of a training run that it does not sample:
    the unwatched side pays for a test in each module.
    """
    import torch
    from torch import nn

    from attnscore.diagnostics import watch

    case, arrays = inputs.case, inputs.arrays
    is_causal, heads = case.mask == "causal", case.sizes["heads"]

    class Function(nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    class Layer(nn.Module):
        """A whole layer, in its own layout (batch, token, head * dim); identity projections cost as much as others."""

        def __init__(self) -> None:
            super().__init__()
            width = heads * case.sizes["dim"]
            self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
            same = torch.eye(width)
            self.load_state_dict({"attention.in_proj_weight": torch.cat([same] * 3), "attention.out_proj.weight": same})

        def forward(self, *arrays: Any) -> Any:
            out, _ = self.attention(*arrays, need_weights=False)
            return out

    is_layer = case.watched == "layer"
    model = (Layer() if is_layer else Function()).eval()
    if is_layer:
        arrays = tuple(x.transpose(1, 2).flatten(2) for x in arrays)

    def run() -> Any:
        with torch.no_grad():
            return model(*arrays)

    def outputs(out: Any) -> tuple[Any, ...]:
        return (out.unflatten(-1, (heads, -1)).transpose(1, 2) if is_layer else out,)

    if is_watched:  # until this side is collected
        weakref.finalize(run, watch(model, one_pass=case.watched == "one-pass").start().stop)
    return Side(run, outputs)
