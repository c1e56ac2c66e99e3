"""Arrays of a case, the same for every side, and our own side of it.

- NumPy draws the arrays from a fixed seed: every process and every baseline gets the same numbers.
- Our side is the public interface, with the kernel that a caller gets.
- All sides are run by the same lines (`caller`), so they differ in the attention alone.
- We get a mask as the object that a caller would write, baselines get booleans.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attnscore as ats
from attnscore.bench.cases import Case


def as_tuple(found: Any) -> tuple[Any, ...]:
    """Return what a call gave as (out, *gradients)."""
    return found if isinstance(found, tuple) else (found,)


@dataclass(frozen=True)
class Side:
    """One way to compute a case: `run` is timed, `outputs` turns its result into (out, *gradients)."""

    name: str
    run: Callable[[], Any]
    outputs: Callable[[Any], tuple[Any, ...]] = as_tuple
    same: bool = True
    """It computes the same function as we do, so its result is compared too."""


@dataclass(frozen=True)
class Inputs:
    """Query, key, value, the parameter of the score and the gradient with respect to the output."""

    case: Case
    query: Any
    key: Any
    value: Any
    parameter: Any
    """w_v of the additive score, the bandwidth of the Gaussian one; a scaled dot product has none."""
    grad: Any

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def leaves(self) -> tuple[Any, ...]:
        """All that gets a gradient."""
        return (*self.arrays, self.parameter) if self.case.has_parameter else self.arrays

    def arguments(self) -> dict[str, Any]:
        """Keywords of `attend` that say what the case computes."""
        score = {"scaled_dot": ats.ScaledDot, "additive": ats.Additive, "gaussian": ats.Gaussian}[self.case.score]
        return {"score": score(self.parameter) if self.case.has_parameter else "scaled_dot"}

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
        return None

    def allowed(self) -> Any:
        """Return the mask as (query, key) booleans, written independently of ours; None without a mask."""
        sizes = self.case.sizes
        i, j, width = np.arange(sizes["queries"])[:, None], np.arange(sizes["keys"]), sizes.get("visible", 0)
        match self.case.mask:
            case "causal":
                return j <= i
            case "valid_lens":
                return np.broadcast_to(j < width, (sizes["queries"], sizes["keys"]))
            case "window":
                return (j <= i) & (j > i - width)
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
    arrays["parameter"] = rng.standard_normal(sizes["dim"], dtype=np.float32) / np.float32(math.sqrt(sizes["dim"]))
    arrays["grad"] = normal(sizes["queries"])
    if case.score == "gaussian":
        bandwidth = (2 * sizes["dim"]) ** 0.25
        # A number is fixed, an array is learned.
        arrays["parameter"] = np.asarray(bandwidth, np.float32) if case.backward else bandwidth
    return Inputs(case, **{name: _native(case, name, x) for name, x in arrays.items()})


def _native(case: Case, name: str, x: Any) -> Any:
    """An array as one of the case's framework."""
    if isinstance(x, float) or case.framework == "numpy":
        return x
    if case.framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    if case.framework == "tensorflow":
        import tensorflow as tf

        return tf.constant(x)
    import torch

    made = torch.from_numpy(x).to(getattr(torch, case.dtype))
    is_leaf = name != "grad" and (name != "parameter" or case.has_parameter)
    return made.requires_grad_(case.backward and is_leaf)


def caller(inputs: Inputs, forward: Callable[..., Any], arrays: Sequence[Any] = ()) -> Callable[[], Any]:
    """Return a call of ``forward(query, key, value)`` as users of the case's framework write it.

    Inside ``jax.jit``, eagerly, or inside ``tf.function``; where the case has gradients, with those of the
    framework's autodiff, in the same program. The call ends when its result is there. `arrays` replaces query, key and
    value.
    """
    case, arrays = inputs.case, arrays or inputs.arrays
    if case.framework == "jax":
        return _in_jax(case, forward, (*arrays, inputs.grad) if case.backward else arrays)
    if case.framework == "tensorflow":
        return _in_tensorflow(case, forward, (*arrays, inputs.grad) if case.backward else arrays)
    if not case.backward:
        return lambda: forward(*arrays)
    import torch

    def run() -> tuple[Any, ...]:
        out = forward(*arrays)
        return (out, *torch.autograd.grad(out, inputs.leaves, inputs.grad))

    return run


def _in_jax(case: Case, forward: Callable[..., Any], given: Sequence[Any]) -> Callable[[], Any]:
    import jax

    def with_gradients(*given: Any) -> tuple[Any, ...]:
        out, vjp = jax.vjp(forward, *given[:-1])
        return (out, *vjp(given[-1]))

    jitted = jax.jit(with_gradients if case.backward else forward)
    return lambda: jax.block_until_ready(jitted(*given))  # type: ignore[no-untyped-call]  # JAX's own


def _in_tensorflow(case: Case, forward: Callable[..., Any], given: Sequence[Any]) -> Callable[[], Any]:
    import tensorflow as tf

    def with_gradients(*given: Any) -> tuple[Any, ...]:
        leaves = list(given[:-1])
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            out = forward(*leaves)
        return (out, *tape.gradient(out, leaves, output_gradients=given[-1]))

    whole = with_gradients if case.backward else forward
    run = tf.function(whole) if case.graph else whole
    # Eager operations on the CPU have ended when they return.
    return lambda: run(*given)


def ours(inputs: Inputs, *, plain: bool = False, **more: Any) -> Side:
    """Return our side of a case; `plain`: without the options and the mask whose overhead the case measures."""
    case = inputs.case
    if case.watched:
        return _watched(inputs, is_watched=not plain)
    options = inputs.arguments() | more
    if not plain:
        options = {**case.options, "mask": inputs.mask(), **options}
    if case.framework == "numpy" and case.backward:

        def with_gradients() -> tuple[Any, ...]:
            out, vjp = ats.attend_vjp(*inputs.arrays, **options)
            gradients = vjp(inputs.grad)
            return (out, *gradients[:3], *gradients.score.values())

        return Side("attnscore", with_gradients)

    def forward(*arrays: Any) -> Any:
        found = ats.attend(*arrays, **options)
        return found[0] if isinstance(found, tuple) else found

    return Side("attnscore", caller(inputs, forward))


def kernel_of(inputs: Inputs) -> str:
    """Return the name of the kernel that `attend` takes in a case."""
    options = {**inputs.case.options, "mask": inputs.mask(), **inputs.arguments()}
    found: list[str] = []

    def explain(query: Any, key: Any, value: Any) -> Any:
        found.append(str(ats.explain(query, key, value, **options).kernel))
        return value

    # Inside jit or a graph where the case is: the choice may be another one there.
    caller(replace(inputs, case=replace(inputs.case, backward=False)), explain)()
    return found[0]


def _watched(inputs: Inputs, *, is_watched: bool) -> Side:
    """PyTorch's own attention in a model that `watch` looks at in every step, or the same model unwatched.

    The wrappers of the watch are there while both sides run, as they are on the steps of a training run that are not
    sampled; what the unwatched side pays for them is a test for each module.
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
        """A whole layer, in its own layout (batch, token, head * dim); identity projections cost what others do."""

        def __init__(self) -> None:
            super().__init__()
            width = heads * case.sizes["dim"]
            self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
            same = torch.eye(width)
            self.load_state_dict({"attention.in_proj_weight": torch.cat([same] * 3), "attention.out_proj.weight": same})
            self.mask = nn.Transformer.generate_square_subsequent_mask(case.sizes["keys"]) if is_causal else None

        def forward(self, *arrays: Any) -> Any:
            out, _ = self.attention(*arrays, need_weights=False, attn_mask=self.mask, is_causal=is_causal)
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
        weakref.finalize(run, watch(model).start().stop)
    return Side("attnscore", run, outputs)
