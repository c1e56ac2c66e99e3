"""One call on every side: the reference, the plain version, and attnscore in each framework, all as named NumPy arrays.

Names: ``out``, the statistics, and ``grad.query``, ``grad.score.W_q`` and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import attnscore as ats
import oracle
from attnscore.problem.statistics import KEYS, AttentionStats
from autodiff import Var, gradients
from cases import MASK, SCORE, MaskCase, Score, Sizes

Results = dict[str, np.ndarray]
STATISTICS = AttentionStats._fields
NUMPY_DTYPE = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
EPS = {name: float(torch.finfo(getattr(torch, name)).eps) for name in NUMPY_DTYPE}
WIDE = {"float16": np.float64, "bfloat16": np.float64, "float32": np.float64, "float64": np.longdouble}


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def tensor(x: np.ndarray, **options: Any) -> torch.Tensor:
    """A torch tensor of the same dtype and values; torch cannot read ml_dtypes."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.tensor(x.astype(np.float32), dtype=torch.bfloat16, **options)
    return torch.tensor(x, **options)


def array(x: Any) -> np.ndarray:
    """Values as NumPy, 16-bit floats widened."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    elif not isinstance(x, np.ndarray | np.generic):
        x = np.asarray(x.numpy())
    return x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x


def dtype_of(x: Any) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


@dataclass(frozen=True)
class Layout:
    """How a caller's axes become (..., head, length, dim), in the methods that torch and Var share."""

    axes: int = 4
    head_axis: int = -3

    def inward(self, x: Any) -> Any:
        while len(x.shape) < self.axes:
            x = x.unsqueeze(0)
        if self.axes == 2:
            return x.unsqueeze(0).unsqueeze(0)
        if self.axes == 3:
            return x.unsqueeze(1)
        return x if self.head_axis == -3 else x.transpose(-3, -2)

    def over_scores(self, x: Any) -> Any:
        """A bias (..., query, key), which has heads where the scores have."""
        return x.unsqueeze(1) if self.axes == 3 and len(x.shape) == 3 else x

    def outward(self, name: str, x: np.ndarray) -> np.ndarray:
        """A result (..., head, query) or (..., head, query, value_dim | key) on the caller's axes."""
        if self.axes == 2:
            return x[0, 0]
        if self.axes == 3:
            return x[:, 0]
        rows = name in STATISTICS
        return x if self.head_axis == -3 or name == "weights" else x.swapaxes(-1, -2) if rows else x.swapaxes(-2, -3)


@dataclass(eq=False)
class Call:
    """One call of attend with incoming gradients; arrays are NumPy's, in the dtype of the call."""

    score: Score
    dtype: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    visible: np.ndarray
    """(..., head, query, key)."""
    arguments: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the score."""
    bias: np.ndarray | None = None
    sink: np.ndarray | None = None
    seeds: dict[str, np.ndarray] = field(default_factory=dict)
    """Gradients that come into out, log_sum_exp, entropy and weights, on the oracle's axes."""
    layout: Layout = Layout()
    keep: np.ndarray | None = None
    """What dropout multiplies each weight with."""

    @property
    def leaves(self) -> dict[str, np.ndarray]:
        """Everything that gets a gradient."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        found |= {name: x for name, x in (("bias", self.bias), ("sink", self.sink)) if x is not None}
        return found | {f"score.{name}": x for name, x in self.arrays.items()}

    def with_extras_in(self, dtype: str) -> Call:
        """Return the same call with the score's arrays, bias and sink in another dtype than query, key and value."""
        kind = NUMPY_DTYPE[dtype]
        return dataclasses.replace(
            self,
            arrays={name: x.astype(kind) for name, x in self.arrays.items()},
            bias=None if self.bias is None else self.bias.astype(kind),
            sink=None if self.sink is None else self.sink.astype(kind),
        )

    def formulas(self, leaves: Mapping[str, Any], convert: Any) -> dict[str, Any]:
        """Everything by the oracle, on whatever kind of arrays the leaves are."""
        heads = self.visible.shape[-3]
        query, key, value = (oracle.spread(self.layout.inward(leaves[n]), heads) for n in ("query", "key", "value"))
        own = {name: leaves[f"score.{name}"] for name in self.arrays}
        visible = convert(np.array(self.visible))
        s = self.score.formula(query, key, **own)
        s = s + (s * 0).where(visible, 0)  # on all axes of the scores, also where only the value has them
        bias = hidden = None
        if self.bias is not None:
            bias = self.layout.over_scores(leaves["bias"])
            hidden = convert((array(self.bias) == -np.inf).reshape(bias.shape))
        s, visible = oracle.masked_scores(s, visible, bias, hidden)
        keep = None if self.keep is None else type(query)(self.keep)
        return {"scores": s, **oracle.attention(s, value, visible, leaves.get("sink"), keep)}

    @property
    def _returned(self) -> tuple[str, ...]:
        numbers = (name for name in STATISTICS if name not in KEYS)
        return ("out", *numbers, *(("weights",) if "weights" in self.seeds else ()))

    def _answer(self, outputs: Mapping[str, Any], grads: Mapping[str, Any]) -> Results:
        found = {name: self.layout.outward(name, array(outputs[name])) for name in self._returned}
        return found | {f"grad.{name}": array(grad) for name, grad in grads.items()}

    @cached_property
    def _wide(self) -> tuple[dict[str, Var], dict[str, Var]]:
        leaves = {name: Var(array(x).astype(WIDE[self.dtype])) for name, x in self.leaves.items()}
        with np.errstate(all="ignore"):
            return leaves, self.formulas(leaves, lambda x: x)

    def _wide_gradients(self, absolute: bool) -> dict[str, np.ndarray]:
        leaves, outputs = self._wide
        with np.errstate(all="ignore"):
            found = gradients(
                [outputs[name] for name in self.seeds],
                [array(seed) for seed in self.seeds.values()],
                list(leaves.values()),
                absolute=absolute,
            )
        return dict(zip(leaves, found, strict=True))

    @cached_property
    def reference(self) -> Results:
        outputs = {name: x.data for name, x in self._wide[1].items()}
        return self._answer(outputs, self._wide_gradients(absolute=False))

    @property
    def weights(self) -> np.ndarray:
        """The reference's matrix of weights, on the oracle's axes."""
        return self._wide[1]["weights"].data

    @property
    def scores(self) -> np.ndarray:
        return self._wide[1]["scores"].data

    @cached_property
    def scale(self) -> dict[str, float]:
        """What the error of each result is relative to."""
        s = self.scores[np.isfinite(self.scores)]
        level = float(max(1, np.abs(s).max(initial=0), self._magnitude()))
        keys = float(max(2, self.visible.shape[-1]))
        # An error that a score may have becomes one of p (1 - p) as much in its weight p.
        weight = max(1.0, level / 4)
        found = {
            "out": float(np.abs(array(self.value)).max(initial=0)),
            "log_sum_exp": level + np.log(keys), "max_score": level, "min_score": level, "mean_score": level,
            "var_score": level**2, "entropy": level + np.log(keys),
            "max_weight": weight, "sum_weights": weight, "sum_sq_weights": 2 * weight,
            "weights": weight, "argmax_key": 0.0,
        }  # fmt: skip
        return found | {
            f"grad.{name}": float(np.abs(grad).max(initial=0)) for name, grad in self._wide_gradients(True).items()
        }

    def _magnitude(self) -> float:
        """sum |q_l k_l| |scale| for products, sum |w_v| for additive scores; for others the scores themselves."""
        if self.score.magnitude == "additive":
            channels = [array(x) for name, x in self.arrays.items() if name.endswith("w_v")]
            return sum(float(np.abs(x).sum(-1).max()) for x in channels)
        if self.score.magnitude != "product" or 0 in self.visible.shape:
            return 0.0
        size = {name: Var(np.abs(array(x)).astype(np.float64)) for name, x in self.leaves.items()}
        heads = self.visible.shape[-3]
        query, key = (oracle.spread(self.layout.inward(size[name]), heads) for name in ("query", "key"))
        terms = self.score.terms or self.score.formula
        return float(terms(query, key, **{name: size[f"score.{name}"] for name in self.arrays}).data.max())

    @cached_property
    def plain(self) -> Results:
        """The textbook in the dtype of the call, with torch's own autodiff."""
        kind = NUMPY_DTYPE[self.dtype]
        leaves = {name: tensor(x.astype(kind), requires_grad=True) for name, x in self.leaves.items()}
        outputs = self.formulas(leaves, torch.from_numpy)
        grads = torch.autograd.grad(
            [outputs[name] for name in self.seeds],
            list(leaves.values()),
            [tensor(seed).to(outputs[name].dtype) for name, seed in self.seeds.items()],
            materialize_grads=True,
        )
        return self._answer(outputs, dict(zip(leaves, grads, strict=True)))

    # ------------------------------------------------------- attnscore itself

    def _keywords(self, convert: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
        score = self.score.make(**{name: leaves[f"score.{name}"] for name in self.arrays})
        extras = {name: leaves[name] for name in ("bias", "sink") if name in leaves}
        masks = {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in self.arguments.items()}
        return {"score": score, "head_axis": self.layout.head_axis, **masks, **extras}

    def seed_outward(self, name: str, dtype: str) -> np.ndarray:
        return self.layout.outward(name, self.seeds[name]).astype(NUMPY_DTYPE[dtype])

    def seeds_outward(self) -> dict[str, np.ndarray]:
        """The gradients that come in, on the caller's axes and in the dtypes of the results."""
        wide = accumulator(self.dtype)
        return {n: self.seed_outward(n, wide if n in STATISTICS else self.dtype) for n in self.seeds}

    def _attend(self, arrays: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """What `attend` gives, by name."""
        weighted = "weights" in self.seeds
        out, *weights, stats = ats.attend(
            arrays["query"], arrays["key"], arrays["value"], return_stats=True, return_weights=weighted, **keywords
        )
        return {"out": out, **stats._asdict(), **({"weights": weights[0]} if weighted else {})}

    def numpy(self, **options: Any) -> dict[str, Any]:
        """attend_vjp; without gradients where the kernel has none in NumPy."""
        keywords = self._keywords(lambda x: x, self.leaves) | options
        arrays = self.query, self.key, self.value
        if keywords.get("kernel") == "dense":
            return self._attend(self.leaves, keywords)
        weighted = "weights" in self.seeds
        (out, *weights, stats), pullback = ats.attend_vjp(
            *arrays, return_stats=True, return_weights=weighted, **keywords
        )
        grads = pullback(**{"grad_out": None} | {f"grad_{name}": seed for name, seed in self.seeds_outward().items()})
        found = {n: x for n, x in grads._asdict().items() if n != "score" and x is not None}
        found |= {f"score.{name}": x for name, x in grads.score.items()}
        outputs = {"out": out, **stats._asdict(), **({"weights": weights[0]} if weighted else {})}
        return outputs | {f"grad.{name}": x for name, x in found.items()}

    def torch(self, **options: Any) -> dict[str, Any]:
        leaves = {name: tensor(x, requires_grad=True) for name, x in self.leaves.items()}
        keywords = self._keywords(torch.from_numpy, leaves) | options
        outputs = self._attend(leaves, keywords)
        grads = torch.autograd.grad(
            [outputs[name] for name in self.seeds],
            list(leaves.values()),
            [tensor(seed) for seed in self.seeds_outward().values()],
            materialize_grads=True,  # of the value where the weights alone are asked for
        )
        return outputs | {f"grad.{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def jax(self, *, jit: bool = False, vmap: bool = False, **options: Any) -> dict[str, Any]:
        """Outputs and gradients by jax.vjp; with `jit` inside one program, with `vmap` of the last of two calls."""
        import jax  # a quick run has none
        import jax.numpy as jnp

        leaves = {name: jnp.asarray(x) for name, x in self.leaves.items()}
        seeds = [jnp.asarray(seed) for seed in self.seeds_outward().values()]

        def outputs_of(leaves: dict[str, Any]) -> Any:
            outputs = self._attend(leaves, self._keywords(jnp.asarray, leaves) | options)
            return [outputs[name] for name in self.seeds], outputs

        def both(leaves: dict[str, Any]) -> Any:
            _, pullback, outputs = jax.vjp(outputs_of, leaves, has_aux=True)
            return outputs, pullback(seeds)[0]

        if vmap:
            doubled = {name: jnp.stack([x if name == "value" else x * 0.5, x]) for name, x in leaves.items()}
            outputs, grads = jax.tree.map(lambda x: x[1], jax.vmap(both)(doubled))
        else:
            outputs, grads = (jax.jit(both) if jit else both)(leaves)
        return {name: np.asarray(x) for name, x in outputs.items()} | {
            f"grad.{name}": np.asarray(grad) for name, grad in grads.items()
        }

    def tensorflow(self, compiled: Any = None, **options: Any) -> dict[str, Any]:
        """Under a tape, all arrays as constants; `compiled` (a tf.function) makes a graph of it."""
        import tensorflow as tf  # costs seconds

        leaves = {name: tf.constant(x) for name, x in self.leaves.items()}
        masks = {n: tf.constant(x) for n, x in self.arguments.items() if isinstance(x, np.ndarray)}
        seeds = [tf.constant(seed) for seed in self.seeds_outward().values()]

        def whole(leaves: Any, masks: Any, seeds: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                keywords = self._keywords(lambda x: x, leaves) | masks | options
                outputs = self._attend(leaves, keywords)
            grads = tape.gradient(
                [outputs[name] for name in self.seeds], leaves, seeds,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )  # fmt: skip
            return outputs, grads

        outputs, grads = (compiled(whole) if compiled else whole)(leaves, masks, seeds)
        return outputs | {f"grad.{name}": grad for name, grad in grads.items()}

    def run(self, framework: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, framework)(**options)
        return found

    def check(self, got: Mapping[str, Any], skip: tuple[str, ...] = ()) -> None:
        """Assert that every result is as accurate as ``numerics`` defines it, and of the right shape and dtype."""
        assert set(got) - {*KEYS} == set(self.reference) or "grad.query" not in got
        problems = [text for name, x in got.items() if name not in skip and (text := self._problem(name, x))]
        assert not problems, "\n".join(problems)

    def _problem(self, name: str, x: Any) -> str | None:
        if name in KEYS:
            return self.key_problem(name, x)
        want = self.reference[name]
        dtype = accumulator(self.dtype) if name in STATISTICS else self.dtype
        if name.startswith("grad."):
            dtype = dtype_of(self.leaves[name.removeprefix("grad.")])
        if tuple(x.shape) != want.shape or dtype_of(x) != dtype:
            return f"{name}: expected {dtype} {want.shape}, got {dtype_of(x)} {tuple(x.shape)}"
        # A gradient in a wider dtype than the data is no more accurate than the data's.
        eps = max(EPS[dtype], EPS[self.dtype]) if name.startswith("grad.") else EPS[dtype]
        error, allowed = _largest(array(x), want), 8 * eps * self.scale[name]
        if error <= allowed:
            return None  # as nearly always, without the plain version
        plain = _largest(self.plain[name], want)
        # The native kernels round numbers below the normal ones to 0, of a few terms each.
        underflow = 8 * float(np.finfo(accumulator(self.dtype)).tiny)
        allowed = max(2 * plain if np.isfinite(plain) else 0.0, allowed, underflow)
        if error <= allowed:
            return None
        return f"{name}: error {error:.3g}, allowed {allowed:.3g} (plain {plain:.3g}, scale {self.scale[name]:.3g})"

    def key_problem(self, name: str, x: Any) -> str | None:
        """The score of the key is the largest but for rounding, and no key before it has the same."""
        if dtype_of(x) != "int32" or tuple(x.shape) != self.reference["max_score"].shape:
            return f"{name}: got {dtype_of(x)} {tuple(x.shape)}"
        found, scores = array(x), self.layout.outward("weights", self.scores)
        found = found.swapaxes(-1, -2) if self.layout.head_axis == -2 and self.layout.axes > 3 else found
        largest = scores.max(-1, initial=-np.inf)
        if not np.array_equal(found < 0, largest == -np.inf):
            return f"{name}: -1 where there are keys, or a key where there are none"
        here = np.append(scores, np.full((*found.shape, 1), -np.inf), -1)
        here = np.take_along_axis(here, found[..., None].astype(int), -1)[..., 0]
        allowed = 16 * EPS[self.dtype if self.dtype == "float64" else "float32"] * self.scale["max_score"]
        if (here < np.where(largest == -np.inf, largest, largest - allowed)).any():
            return f"{name}: not the largest score"
        return None


def _largest(x: np.ndarray, want: np.ndarray) -> float:
    """Largest error, where infinities must agree; NaN counts as infinitely wrong."""
    with np.errstate(all="ignore"):
        difference = np.where(x == want, 0, np.abs(x.astype(want.dtype) - want))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


# --------------------------------------------------------- making calls

EXTRAS: dict[str, tuple[str | None, str | None, tuple[str, ...]]] = {
    "": (None, None, ("out",)),
    "bias": ("full", None, ("out", "log_sum_exp")),
    "bias-sink": ("heads", "heads", ("out", "entropy")),
    "sink": (None, "one", ("out", "log_sum_exp", "entropy")),
    "hiding-bias": ("hiding", "heads", ("out", "log_sum_exp", "entropy")),
    "key-bias": ("keys", None, ("out", "entropy")),
    "row-bias": ("rows", None, ("out",)),
    "weights": (None, None, ("out", "weights")),
    "bias-sink-weights": ("heads", "heads", ("out", "entropy", "weights")),
    "hiding-bias-weights": ("hiding", "one", ("log_sum_exp", "weights")),
}
"""What else is in a call: bias, sink, and the results through which a gradient comes in."""


def _bias(kind: str | None, sizes: Sizes, rng: np.random.Generator) -> np.ndarray | None:
    if kind is None:
        return None
    b, h, n, m = sizes.batch, sizes.heads, sizes.queries, sizes.keys
    shapes = {"full": (b, h, n, m), "hiding": (b, h, n, m), "heads": (h, 1, m), "keys": (b, 1, 1, m), "rows": (n, 1)}
    found = rng.standard_normal(shapes[kind])
    if kind == "hiding":
        found[rng.random(found.shape) < 0.2] = -np.inf
    return found


@lru_cache(maxsize=512)
def _visible(mask: MaskCase, sizes: Sizes) -> np.ndarray:
    """Pair by pair in Python: as long as all else in a call, and the same for every score and dtype."""
    found = mask.visible(sizes)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=32)
def make_call(
    score: str, mask: str = "none", dtype: str = "float32", extras: str = "", sizes: Sizes | None = None, seed: int = 0
) -> Call:
    """The call of a row of the table of scores and one of masks, with random arrays."""
    return build_call(SCORE[score], MASK[mask], dtype, extras, sizes, seed)


def build_call(
    score: Score, mask: MaskCase, dtype: str, extras: str = "", sizes: Sizes | None = None, seed: int = 0
) -> Call:
    rng = np.random.default_rng(seed)
    sizes = sizes or Sizes(queries=mask.lengths[0], keys=mask.lengths[1])
    sizes = score.sized(sizes)
    query = rng.standard_normal((sizes.batch, sizes.heads, sizes.queries, sizes.dim))
    key = rng.standard_normal((sizes.batch, sizes.key_heads, sizes.keys, sizes.key_dim))
    value = rng.standard_normal((sizes.batch, sizes.key_heads, sizes.keys, sizes.value_dim))
    if score.prepare:
        score.prepare(query, key)
    bias, sink, seeded = EXTRAS[extras]
    arrays = {name: rng.standard_normal(shape) * 0.8 for name, shape in score.shapes(sizes).items()}
    for name, x in arrays.items():
        if name.rpartition(".")[2] in ("bandwidth", "rate", "temperature", "cap"):
            arrays[name] = 0.7 + np.abs(x)
    rows = (sizes.batch, sizes.heads, sizes.queries)
    last = {"out": (sizes.value_dim,), "weights": (sizes.keys,)}
    seeds = {n: rng.standard_normal((*rows, *last.get(n, ()))) for n in seeded}
    kind = NUMPY_DTYPE[dtype]
    return Call(
        score=score,
        dtype=dtype,
        query=query.astype(kind),
        key=key.astype(kind),
        value=value.astype(kind),
        visible=_visible(mask, sizes),
        arguments=mask.arguments(sizes),
        arrays={name: np.asarray(x).astype(kind) for name, x in arrays.items()},
        bias=None if bias is None else _bias(bias, sizes, rng).astype(kind),
        sink=None if sink is None else rng.standard_normal(() if sink == "one" else sizes.heads)[()].astype(kind),
        seeds={
            name: x.astype(NUMPY_DTYPE[accumulator(dtype)] if name in STATISTICS else kind) for name, x in seeds.items()
        },
    )


def directions_traced(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[str]:
    """Names of the directions of a kernel, ``forward`` and ``backward``, in the order in which they are called."""
    names: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, o=original, n=name: (names.append(n), o(*a))[1])
    return names


def assert_each_close(found: Iterable[Any], wanted: Iterable[Any], atol: float) -> None:
    for got, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=atol)


def attend_on(call: Call, leaves: Mapping[str, Any], **options: Any) -> Any:
    """What `attend` returns for a call with the leaves, of any framework, as its arrays; masks stay NumPy's."""
    own = {name: leaves[f"score.{name}"] for name in call.arrays}
    extras = {name: leaves[name] for name in ("bias", "sink") if name in leaves}
    arrays = leaves["query"], leaves["key"], leaves["value"]
    return ats.attend(*arrays, score=call.score.make(**own), **call.arguments, **extras, **options)


def pullback_of(
    framework: str, arrays: Sequence[np.ndarray], score: Callable[..., Any] | None = None, **options: Any
) -> tuple[np.ndarray, Callable[[Any], list[np.ndarray]]]:
    """Return the output of `attend`, and a function from its cotangent to the gradients of all arrays.

    The arrays are query, key and value, and behind them those of which `score` makes the score. "jax.jit" is a program.
    """

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        own = {"score": score(*rest)} if score else {}
        return ats.attend(query, key, value, **own, **options)

    if framework == "numpy":
        own = {"score": score(*arrays[3:])} if score else {}
        out, pullback = ats.attend_vjp(*arrays[:3], **own, **options)

        def pull(grad: Any) -> list[np.ndarray]:
            grads = pullback(grad)
            return [grads.query, grads.key, grads.value, *grads.score.values()]

    elif framework == "torch":
        leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
        result = attend(*leaves)
        out = array(result)

        def pull(grad: Any) -> list[np.ndarray]:
            return [array(x) for x in torch.autograd.grad(result, leaves, torch.tensor(grad), retain_graph=True)]

    elif framework == "tensorflow":
        import tensorflow as tf  # costs seconds

        constants = [tf.constant(x) for x in arrays]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(constants)
            result = attend(*constants)
        out = np.asarray(result)

        def pull(grad: Any) -> list[np.ndarray]:
            return [np.asarray(x) for x in tape.gradient(result, constants, tf.constant(grad))]

    else:
        import jax  # a quick run has none

        result, vjp = jax.vjp(jax.jit(attend) if framework == "jax.jit" else attend, *map(jax.numpy.asarray, arrays))
        out = np.asarray(result)

        def pull(grad: Any) -> list[np.ndarray]:
            return [np.asarray(x) for x in vjp(jax.numpy.asarray(grad))]

    return out, pull
