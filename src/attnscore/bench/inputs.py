"""The arrays of a case, the same for every side, and our own side of it.

What this module meets:
- arrays are drawn by NumPy from a fixed seed: every process and every peer sees the same numbers;
- our side is the public interface, with the kernel that a caller gets;
- a mask is given to us as the object that a caller would write, to peers as booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attnscore as ats
from attnscore.bench.callers import array, called
from attnscore.bench.cases import Case
from attnscore.bench.watching import as_heads, model_run


@dataclass(frozen=True)
class Side:
    """One way to compute a case: `run` is timed, `outputs` turns what it gives into (out, *gradients)."""

    name: str
    run: Callable[[], Any]
    outputs: Callable[[Any], tuple[Any, ...]]
    same: bool = True
    """It computes the same function as we do, so its result is compared too."""


@dataclass(frozen=True)
class Inputs:
    """Query, key, value, the weight vector of the additive score and the gradient that comes into the output."""

    case: Case
    query: Any
    key: Any
    value: Any
    w_v: Any
    grad: Any

    @property
    def leaves(self) -> tuple[Any, ...]:
        """What gets a gradient."""
        arrays = (self.query, self.key, self.value)
        return (*arrays, self.w_v) if self.case.score == "additive" else arrays

    def mask(self) -> Any:
        """The mask as a caller writes it, or None."""
        visible = self.case.sizes.get("visible", 0)
        match self.case.mask:
            case "causal":
                return ats.Causal()
            case "valid_lens":
                return ats.ValidLens([visible] * self.case.sizes["batch"])
            case "window":
                return ats.SlidingWindow(left=visible - 1, right=0)
        return None

    def visible(self) -> Any:
        """The mask as (query, key) booleans, written down independently of ours; None where everything is visible."""
        sizes = self.case.sizes
        i, j, visible = np.arange(sizes["queries"])[:, None], np.arange(sizes["keys"]), sizes.get("visible", 0)
        match self.case.mask:
            case "causal":
                return j <= i
            case "valid_lens":
                return np.broadcast_to(j < visible, (sizes["queries"], sizes["keys"]))
            case "window":
                return (j <= i) & (j > i - visible)
        return None


def draw(case: Case, length: int | None = None) -> Inputs:
    """The arrays of a case; `length` in place of its queries and keys."""
    if length is not None:
        case = replace(case, sizes={**case.sizes, "queries": length, "keys": length})
    sizes, rng = case.sizes, np.random.default_rng(0)
    heads = (sizes["heads"],) if sizes["heads"] else ()

    def normal(rows: int) -> Any:
        return rng.standard_normal((sizes["batch"], *heads, rows, sizes["dim"]), dtype=np.float32)

    queries, keys = sizes["queries"], sizes["keys"]
    arrays = {"query": normal(queries), "key": normal(keys), "value": normal(keys)}
    # So that scores have a variance of about 1, as trained ones and scaled dot products have.
    arrays["w_v"] = rng.standard_normal(sizes["dim"], dtype=np.float32) / np.float32(math.sqrt(sizes["dim"]))
    arrays["grad"] = normal(queries)
    if case.framework == "torch":
        import torch

        dtype = getattr(torch, case.dtype)
        arrays = {name: torch.from_numpy(x).to(dtype) for name, x in arrays.items()}
        for name in ("query", "key", "value", "w_v"):
            arrays[name].requires_grad_(case.backward and (name != "w_v" or case.score == "additive"))
    arrays = {name: array(case.framework, x) for name, x in arrays.items()}
    return Inputs(case, **arrays)


def ours(inputs: Inputs, *, plain: bool = False, **more: Any) -> Side:
    """Our side of a case; `plain`: without the options and the mask whose price the case is about."""
    case = inputs.case
    if case.watched:
        return Side("attnscore", model_run(inputs, is_watched=not plain), lambda out: (as_heads(inputs, out),))
    options: dict[str, Any] = {**({} if plain else {**case.options, "mask": inputs.mask()}), **more}
    if case.score == "additive":
        options["score"] = ats.Additive(inputs.w_v)
    arrays = (inputs.query, inputs.key, inputs.value)

    def forward() -> Any:
        found = ats.attend(*arrays, **options)
        return found[0] if isinstance(found, tuple) else found

    if case.framework in ("jax", "tensorflow"):
        run = called(case, lambda *arrays: ats.attend(*arrays, **options), arrays, inputs.grad)
        return Side("attnscore", run, lambda found: found if case.backward else (found,))

    def with_pullback() -> tuple[Any, ...]:
        out, pullback = ats.attend_vjp(*arrays, **options)
        gradients = pullback(inputs.grad)
        return (out, *gradients[:3], *gradients.score.values())

    if not case.backward:
        return Side("attnscore", forward, lambda out: (out,))
    if case.framework == "numpy":
        return Side("attnscore", with_pullback, lambda found: found)
    return Side("attnscore", both_ways(forward, inputs), lambda found: found)


def both_ways(forward: Callable[[], Any], inputs: Inputs) -> Callable[[], tuple[Any, ...]]:
    """A PyTorch function forward and backward."""
    import torch

    def run() -> tuple[Any, ...]:
        out = forward()
        return (out, *torch.autograd.grad(out, inputs.leaves, inputs.grad))

    return run


def kernel_of(inputs: Inputs) -> str:
    """The name of the kernel that `attend` takes here."""
    options: dict[str, Any] = {**inputs.case.options, "mask": inputs.mask()}
    options.pop("return_stats", None)
    if inputs.case.score == "additive":
        options["score"] = ats.Additive(inputs.w_v)
    found: list[str] = []

    def look(query: Any, key: Any, value: Any) -> Any:
        found.append(str(ats.explain(query, key, value, **options).kernel))
        return value

    arrays = (inputs.query, inputs.key, inputs.value)
    if inputs.case.framework in ("jax", "tensorflow"):
        called(replace(inputs.case, backward=False), look, arrays, None)()
    else:
        look(*arrays)
    return found[0]
