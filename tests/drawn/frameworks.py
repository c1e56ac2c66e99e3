"""One call in NumPy, PyTorch, JAX and TensorFlow: forward, gradients and second derivatives as NumPy arrays by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from draw import DTYPES, Case, kinds_in, leaves_of, with_leaves
from reference import FUNCTIONS, Call, Tree

import attnscore as ats
import own_scores

Named = dict[str, Any]


# ---------------------------------------------------------------- objects of the library from trees


def build_score(tree: Tree, arrays: Named, path: str = "") -> Any:
    """Return the library's score; `arrays` holds the arrays by path."""
    own = {**tree.options, **{name: arrays[f"score.{path}{name}"] for name in tree.arrays}}
    if tree.kind == "combination":
        parts = tuple(build_score(part, arrays, f"{path}scores.{i}.") for i, part in enumerate(tree.parts))
        return ats.Combination(parts, tuple(own[f"weights.{i}"] for i in range(len(parts))))
    inner = [build_score(part, arrays, path) for part in tree.parts]
    if own.pop("is_default", False):
        own["scale"] = None
    kinds = {"dot": ats.Dot, "scaled_dot": ats.ScaledDot, "cosine": ats.Cosine, "additive": ats.Additive,
             "sum": ats.Sum, "bilinear": ats.Bilinear, "gaussian": ats.Gaussian, "custom_l1": own_scores.OwnAbsolute,
             "custom_square": own_scores.OwnSquare, "soft_cap": ats.SoftCap,
             "temperature": ats.Temperature}  # fmt: skip
    return kinds[tree.kind](*inner, **own)


def build_mask(tree: Tree | None) -> Any:
    """Return the library's mask; the arrays of the tree may be any framework's."""
    if tree is None:
        return None
    inner, own = [build_mask(part) for part in tree.parts], {**tree.options, **tree.arrays}
    match tree.kind:
        case "and":
            return inner[0] & inner[1]
        case "or":
            return inner[0] | inner[1]
        case "not":
            return ~inner[0]
        case "function":
            return ats.MaskFunction(FUNCTIONS[own["name"]], captured=tuple(tree.arrays.values()))
    kinds = {"valid_lens": ats.ValidLens, "key_range": ats.KeyRange, "key_padding": ats.KeyPadding,
             "causal": ats.Causal,
             "window": ats.SlidingWindow, "prefix": ats.PrefixLM, "documents": ats.Documents, "packed": ats.Packed,
             "neighbours": ats.Neighbours, "dense": ats.Dense}  # fmt: skip
    return kinds[tree.kind](**own)


def options_of(case: Case) -> Named:
    """Return the options of `attend` that are no arrays."""
    normalizer = case.call.normalizer
    options: Named = {"head_axis": case.call.head_axis}
    options["normalizer"] = ats.Entmax(normalizer) if isinstance(normalizer, float) else normalizer
    options |= {
        "kernel": case.kernel,
        "return_weights": case.return_weights,
        "return_stats": case.return_stats or False,
    }
    return options | ({"dropout": case.dropout, "seed": case.dropout_seed} if case.dropout else {})


def named(case: Case, result: Any) -> Named:
    """Return what `attend` returned by name."""
    results = list(result) if case.return_weights or case.return_stats else [result]
    outputs = {"out": results.pop(0)}
    outputs |= {"weights": results.pop(0)} if case.return_weights else {}
    return outputs | ({name: getattr(results[0], name) for name in case.return_stats} if case.return_stats else {})


class Attend:
    """`attend` of a case as a function of arrays by name and of its mask's arrays; mask objects stay where they may."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._mask: tuple[Any, Any] = (None, None)

    def arguments(self, arrays: Named, of_mask: list[Any]) -> Named:
        """Return all arguments that are arrays or hold arrays."""
        call, rest = self.case.call, list(of_mask)
        lens = rest.pop(0) if call.valid_lens is not None else None
        if (
            self._mask[0] is None
            or len(rest) != len(self._mask[0])
            or any(a is not b for a, b in zip(rest, self._mask[0], strict=True))
        ):
            tree = None if call.mask is None else with_leaves(call.mask, iter(rest))
            self._mask = rest, build_mask(tree)
        arguments = {name: arrays[name] for name in ("query", "key", "value", "bias", "sink") if name in arrays}
        return arguments | {"score": build_score(call.score, arrays), "mask": self._mask[1], "valid_lens": lens}

    def __call__(self, arrays: Named, of_mask: list[Any]) -> Named:
        return named(self.case, ats.attend(**self.arguments(arrays, of_mask), **options_of(self.case)))


# ---------------------------------------------------------------- frameworks


class NumPy:
    """NumPy, whose gradients come from `attend_vjp`."""

    name = "numpy"

    def array(self, x: np.ndarray, dtype: str, kind: int = 0) -> Any:
        """Return an array of numbers: of other strides for a kind above 0, of read-only broadcast axes where equal."""
        return strided(np.asarray(x).astype(DTYPES[dtype]), kind)

    def index(self, x: np.ndarray) -> Any:
        return np.array(x)

    def host(self, x: Any) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    def write(self, x: Any, new: Any) -> None:
        x[...] = new

    def run(
        self, case: Case, forward: Attend, arrays: Named, of_mask: list[Any], seeds: Named, second: Named | None
    ) -> Named:
        outputs = forward(arrays, of_mask)
        if not seeds or case.kernel == "dense":
            return outputs
        result, pullback = ats.attend_vjp(**forward.arguments(arrays, of_mask), **options_of(case))
        again = named(case, result)
        incoming = {f"grad_{name}": seeds[name] for name in seeds}
        for _ in range(2):  # any number of times
            grads = pullback(incoming.pop("grad_out", None), **incoming)
            incoming = {f"grad_{name}": seeds[name] for name in seeds}
        by_name = {name: getattr(grads, name) for name in ("query", "key", "value", "bias", "sink") if name in arrays}
        by_name |= {f"score.{name}": x for name, x in grads.score.items()}
        return (
            outputs
            | {f"grad.{name}": x for name, x in by_name.items()}
            | {f"vjp.{name}": x for name, x in again.items()}
        )


class Torch:
    """PyTorch, eager, under torch.compile, or with activation checkpointing."""

    name = "torch"

    def array(self, x: np.ndarray, dtype: str, kind: int = 0) -> Any:
        import torch

        return torch_strided(torch.tensor(np.asarray(x), dtype=getattr(torch, dtype)), kind)

    def index(self, x: np.ndarray) -> Any:
        import torch

        return torch.tensor(x)

    def host(self, x: Any) -> np.ndarray:
        return x.detach().double().numpy()

    def write(self, x: Any, new: Any) -> None:
        import torch

        if isinstance(x, np.ndarray):
            x[...] = new
            return
        with torch.no_grad():
            x.copy_(torch.as_tensor(new))

    def run(
        self, case: Case, forward: Attend, arrays: Named, of_mask: list[Any], seeds: Named, second: Named | None
    ) -> Named:
        import torch
        from torch.utils.checkpoint import checkpoint

        leaves = {name: x.detach().requires_grad_(bool(seeds)) for name, x in arrays.items()}
        function: Callable[..., Named] = forward
        if case.mode == "compiled":
            torch._dynamo.reset()
            # A custom score or a function as mask has no operator: its call breaks the graph.
            kinds = kinds_in(case.call.score) | kinds_in(case.call.mask)
            is_custom = any(kind.startswith(("custom", "function")) for kind in kinds)
            if "not" in kinds:
                forward.arguments(leaves, of_mask)  # makes the mask: the compiler has no `~`
            function = torch.compile(forward, backend="aot_eager", fullgraph=not is_custom, dynamic=False)
        elif case.mode == "checkpoint":
            function = functools.partial(checkpoint, forward, use_reentrant=False)
        outputs = function(leaves, of_mask)
        if not seeds:
            return outputs
        grads = torch.autograd.grad([outputs[name] for name in seeds], list(leaves.values()), list(seeds.values()),
                                    create_graph=second is not None, allow_unused=True)  # fmt: skip
        results = outputs | {f"grad.{name}": x for name, x in zip(leaves, grads, strict=True) if x is not None}
        if second is not None:
            weighted = sum(
                (results[f"grad.{name}"] * second[name]).sum() for name in leaves if f"grad.{name}" in results
            )
            again = [torch.zeros_like(x) for x in leaves.values()]
            if weighted.requires_grad:
                again = torch.autograd.grad(weighted, list(leaves.values()), allow_unused=True, materialize_grads=True)
            results |= {f"second.{name}": x for name, x in zip(leaves, again, strict=True)}
        return results


class Jax:
    """JAX, op by op or under jit with every array traced."""

    name = "jax"

    def array(self, x: np.ndarray, dtype: str, kind: int = 0) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(np.asarray(x), dtype=dtype)

    def index(self, x: np.ndarray) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x)

    def host(self, x: Any) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    def run(
        self, case: Case, forward: Attend, arrays: Named, of_mask: list[Any], seeds: Named, second: Named | None
    ) -> Named:
        import jax
        import jax.numpy as jnp

        def gradients(arrays: Named, of_mask: list[Any]) -> tuple[Named, Named]:
            outputs, vjp = jax.vjp(lambda x: forward(x, of_mask), arrays)
            return outputs, vjp({name: seeds.get(name, jnp.zeros_like(x)) for name, x in outputs.items()})[0]

        def everything(arrays: Named, of_mask: list[Any]) -> Named:
            if not seeds:
                return forward(arrays, of_mask)
            outputs, grads = gradients(arrays, of_mask)
            results = outputs | {f"grad.{name}": x for name, x in grads.items()}
            if second is not None:
                again = jax.grad(
                    lambda x: sum(jnp.sum(g * second[name]) for name, g in gradients(x, of_mask)[1].items())
                )
                results |= {f"second.{name}": x for name, x in again(arrays).items()}
            return results

        if case.mode != "compiled":
            return everything(arrays, of_mask)
        constant = any(isinstance(x, np.ndarray) for x in of_mask)
        if constant:
            return jax.jit(lambda arrays: everything(arrays, of_mask))(arrays)
        return jax.jit(everything)(arrays, of_mask)


class TensorFlow:
    """TensorFlow, eager or in a tf.function."""

    name = "tensorflow"

    def array(self, x: np.ndarray, dtype: str, kind: int = 0) -> Any:
        import tensorflow as tf

        return tf.constant(np.asarray(x).astype(DTYPES[dtype]))

    def index(self, x: np.ndarray) -> Any:
        import tensorflow as tf

        return tf.constant(x)

    def host(self, x: Any) -> np.ndarray:
        return x.numpy().astype(np.float64)

    def run(
        self, case: Case, forward: Attend, arrays: Named, of_mask: list[Any], seeds: Named, second: Named | None
    ) -> Named:
        import tensorflow as tf

        def everything(arrays: Named, of_mask: list[Any]) -> Named:
            if not seeds:
                return forward(arrays, of_mask)
            options = {"unconnected_gradients": tf.UnconnectedGradients.ZERO}
            with tf.GradientTape() as outer:
                outer.watch(arrays)
                with tf.GradientTape() as tape:
                    tape.watch(arrays)
                    outputs = forward(arrays, of_mask)
                grads = tape.gradient([outputs[name] for name in seeds], arrays, list(seeds.values()), **options)
                weighted = (
                    None if second is None else tf.add_n([tf.reduce_sum(g * second[name]) for name, g in grads.items()])
                )
            results = outputs | {f"grad.{name}": x for name, x in grads.items()}
            if second is not None:
                results |= {f"second.{name}": x for name, x in outer.gradient(weighted, arrays, **options).items()}
            return results

        if case.mode != "compiled":
            return everything(arrays, of_mask)
        if any(isinstance(x, np.ndarray) for x in of_mask):
            return tf.function(lambda arrays: everything(arrays, of_mask), autograph=False)(arrays)
        return tf.function(everything, autograph=False)(arrays, of_mask)


FRAMEWORK = {one.name: one() for one in (NumPy, Torch, Jax, TensorFlow)}


def strided(x: np.ndarray, kind: int) -> np.ndarray:
    """Return equal numbers behind other strides: transposed, sliced, reversed, misaligned, or broadcast."""
    match kind % 7 if x.ndim > 1 else 0:
        case 1:
            return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        case 2:
            wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype)
            wide[..., 1::2] = x
            return wide[..., 1::2]
        case 3:
            return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
        case 4:
            raw = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.uint8)
            shifted = np.ndarray(x.shape, x.dtype, buffer=raw.data) if x.size else x
            shifted[...] = x
            return shifted
        case 5 if x.ndim > 2:
            return np.ascontiguousarray(x.swapaxes(0, -2)).swapaxes(0, -2)
    return x


def torch_strided(x: Any, kind: int) -> Any:
    """Return equal numbers behind other strides."""
    match kind % 5 if x.ndim > 1 else 0:
        case 1:
            return x.mT.contiguous().mT
        case 2:
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
            wide[..., 1::2] = x
            return wide[..., 1::2]
        case 3 if x.ndim > 2:
            return x.transpose(0, -2).contiguous().transpose(0, -2)
    return x


def arrays_for(case: Case, framework: Any, call: Call, planted: Any) -> tuple[Named, list[Any], Named]:
    """Return the arrays of a call, its masks' arrays, and the incoming gradients, of the framework."""
    of_call = planted["arrays"] if planted else call.arrays
    seeds = planted["seeds"] if planted else call.seeds
    rng = np.random.default_rng(case.array_kind)
    arrays = {}
    for name, x in of_call.items():
        dtype = case.dtype if name in ("query", "key", "value") else case.extra_dtype
        arrays[name] = framework.array(x, dtype, int(rng.integers(35)) if name in ("query", "key", "value") else 0)
    # A graph is a constant of a compiled program.
    is_constant = case.mode == "compiled" and "neighbours" in kinds_in(call.mask)
    convert = framework.index if case.are_masks_of_framework and not is_constant else np.array
    lens = [] if call.valid_lens is None else [convert(np.asarray(call.valid_lens))]
    masks = [convert(x) for x in leaves_of(call.mask)]
    wide = "float64" if case.dtype == "float64" else "float32"
    incoming = {
        name: framework.array(x, wide if name in ("log_sum_exp", "entropy") else case.dtype)
        for name, x in seeds.items()
    }
    return arrays, lens + masks, incoming
