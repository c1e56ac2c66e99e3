"""Table of the cases: what is measured, against which baselines, and the targets.

- A case is data alone; sizes travel to the measuring process as JSON, so a test can shrink them.
- A promise of the library is one case: a new promise is a new row here and nowhere else.
- The rates that libraries reach on the machine are a case too ("limits"): a yardstick for the rates of the others.
- A ratio is the baseline's time over ours; with "at most" it is ours over the baseline's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attnscore.errors import ArgumentError, message

MB = 10**6


@dataclass(frozen=True)
class Target:
    """A ratio to reach, and the stretch target."""

    ratio: float
    stretch: float | None = None
    one_thread: float | None = None
    """`ratio` on one thread, where it differs."""
    at_most: bool = False
    """The ratio is our time over the baseline's, and the target an upper bound."""

    def on(self, threads: int) -> float:
        """Return the ratio to reach on that many threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.ratio


@dataclass(frozen=True)
class Case:
    """One measurement; `sizes` has batch, heads (0: no such axis), queries, keys, dim and what else it needs."""

    name: str
    what: str
    sizes: Mapping[str, Any]
    baselines: Mapping[str, Target | None]
    score: Literal["scaled_dot", "additive", "gaussian"] = "scaled_dot"
    dtype: str = "float32"
    mask: Literal["", "causal", "valid_lens", "window"] = ""
    framework: Literal["torch", "numpy", "jax", "tensorflow"] = "torch"
    graph: bool = False
    """In TensorFlow inside ``tf.function``; a caller of JAX is inside ``jax.jit`` in any case."""
    backward: bool = False
    """With gradients, the parameter of the score's among them: a Gaussian bandwidth is learned then, else a number."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `attend` on our side alone, whose overhead the case measures."""
    watched: Literal["", "function", "layer"] = ""
    """Our side is PyTorch's own attention, or its layer with projections, in a model that `watch` looks at."""
    kind: Literal["limits", "time", "growth", "memory"] = "time"
    full: bool = False
    """Takes many minutes: only with --full."""

    @property
    def has_parameter(self) -> bool:
        """Whether the score has a parameter."""
        return self.score != "scaled_dot"

    def pairs(self) -> int:
        """Return how many (query, key) pairs the mask leaves, over all heads."""
        queries, keys, visible = self.sizes["queries"], self.sizes["keys"], self.sizes.get("visible", 0)
        by_mask = {
            "": queries * keys,
            "causal": queries * (queries + 1) // 2,
            "valid_lens": queries * min(visible, keys),
            # The first queries attend to fewer keys than the window is wide.
            "window": queries * visible - visible * (visible - 1) // 2,
        }
        return int(self.sizes["batch"] * max(1, self.sizes["heads"]) * by_mask[self.mask])

    def work(self) -> dict[str, int]:
        """Return the operations of the matrix products, the activations of the additive score, the bytes of the arrays.

        Forward: q k^T and p v. Backward: scores again, then dV, dP, dQ and dK. The additive score has no product of
        its own, but `dim` activations a pair, once forward and twice backward (a pass over queries and one over keys).
        """
        sizes, pairs = self.sizes, self.pairs()
        is_additive, passes = self.score == "additive", 2 if self.backward else 1
        products = sum(((1, 2) if is_additive else (2, 5))[:passes])
        rows = max(1, sizes["heads"]) * sizes["batch"] * (2 * sizes["queries"] + 2 * sizes["keys"])
        return {
            "operations": 2 * sizes["dim"] * pairs * products,
            "activations": sizes["dim"] * pairs * sum((1, 2)[:passes]) if is_additive else 0,
            "bytes": passes * rows * sizes["dim"] * (2 if self.dtype == "bfloat16" else 4),
        }


def _sizes(heads: int, queries: int, keys: int, dim: int, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "dim": dim, **more}


def _overhead(ratio: float) -> dict[str, Target | None]:
    """Our call against the same one without what the case measures."""
    return {"without": Target(ratio, at_most=True)}


_USUAL = _sizes(8, 2048, 2048, 64)
_BAHDANAU = _sizes(0, 512, 512, 256)
_GROWTH = _sizes(1, 8192, 8192, 64, lengths=[1024, 2048, 4096, 8192])
_LONG = _sizes(1, 131072, 131072, 64)
_CALLERS_LONG = _sizes(1, 32768, 32768, 64)
_SHORT_HEADS = _sizes(12, 128, 128, 32, batch=8)
_TINY = _sizes(8, 16, 16, 64, batch=2)
_GAUSSIAN = _sizes(8, 1024, 1024, 64)

CASES: tuple[Case, ...] = (
    Case(
        "dot", "scaled dot (1,8,2048,64), forward", _USUAL,
        {"sdpa": Target(1.35, 1.5, one_thread=1.2), "naive": None, "xla": None, "onnxruntime": None},
    ),
    Case(
        "dot-backward", "scaled dot (1,8,2048,64), forward + backward", _USUAL,
        {"sdpa": Target(1.25, 1.4), "naive": None}, backward=True,
    ),
    Case(
        "dot-bfloat16", "scaled dot (1,8,2048,64), bfloat16, forward", _USUAL,
        {"sdpa": Target(2, 2.5)}, dtype="bfloat16",
    ),
    Case(
        "causal", "scaled dot (1,8,2048,64), causal, forward", _USUAL,
        {"sdpa": Target(1.3, 1.5), "onnxruntime": None}, mask="causal",
    ),
    Case(
        "padded", "scaled dot (1,8,2048,64), half the keys padded, forward", {**_USUAL, "visible": 1024},
        {"sdpa": Target(2.6, 3.2)}, mask="valid_lens",
    ),
    Case(
        "window", "scaled dot (1,8,8192,64), window 256 of 8192, forward", _sizes(8, 8192, 8192, 64, visible=256),
        {"sdpa": Target(25, 40)}, mask="window",
    ),
    Case(
        "decoding", "scaled dot, 1 query, 32768 keys, 32 heads, d 128", _sizes(32, 1, 32768, 128),
        {"sdpa": Target(2, 2.7), "reading": None},
    ),
    Case(
        "additive", "additive (1,512,512), h 256, forward", _BAHDANAU,
        {"naive": Target(80, 120), "compile": Target(6, 10), "xla": Target(6, 10), "keops": None}, score="additive",
    ),
    Case(
        "additive-backward", "additive (1,512,512), h 256, forward + backward", _BAHDANAU,
        {"naive": Target(40, 60)}, score="additive", backward=True,
    ),
    Case(
        "additive-long", "additive (1,8,2048,64), h 64, against scaled dot product", _USUAL,
        {"sdpa": Target(2, 1, at_most=True), "keops": None}, score="additive",
    ),
    Case("numpy", "NumPy caller, scaled dot (1,8,2048,64)", _USUAL, {"numpy": Target(2)}, framework="numpy"),
    Case("jax", "JAX caller, jit, scaled dot (1,8,2048,64)", _USUAL, {"jax": Target(3), "xla": None}, framework="jax"),
    Case(
        "tensorflow", "TensorFlow caller, eager, scaled dot (1,8,2048,64)", _USUAL,
        {"tensorflow": Target(1.3), "keras": Target(1.3)}, framework="tensorflow",
    ),
    Case(
        "tensorflow-graph", "TensorFlow caller, tf.function, scaled dot (1,8,2048,64)", _USUAL,
        {"tensorflow": Target(1.3), "keras": Target(1.3)}, framework="tensorflow", graph=True,
    ),
    Case(
        "tiny", "tiny call (2,8,16,64) from PyTorch", _TINY,
        {"sdpa": Target(2, 1, at_most=True)},
    ),
    Case(
        "tiny-backward", "tiny call (2,8,16,64) from PyTorch, forward + backward", _TINY,
        {"sdpa": Target(2, 1, at_most=True)}, backward=True,
    ),
    Case(
        "gaussian", "Gaussian (1,8,1024,64), fixed bandwidth, forward", _GAUSSIAN, {"naive": None, "sdpa": None},
        score="gaussian",
    ),
    Case(
        "gaussian-backward", "Gaussian (1,8,1024,64), learned bandwidth, forward + backward", _GAUSSIAN,
        {"naive": None}, score="gaussian", backward=True,
    ),
    Case(
        "weights", "returned weights, (1,8,2048,64)", _USUAL,
        {"naive": None, "without": None}, options={"return_weights": True},
    ),
    Case(
        "statistics", "all statistics, (1,8,2048,64)", _USUAL,
        _overhead(1.10), options={"return_stats": True},
    ),
    Case(
        "dropout", "dropout 0.1, (1,8,2048,64)", _USUAL,
        _overhead(1.15), options={"dropout": 0.1, "seed": 0},
    ),
    Case(
        "dropout-backward", "dropout 0.1, (1,8,2048,64), forward + backward", _USUAL,
        _overhead(1.15), options={"dropout": 0.1, "seed": 0}, backward=True,
    ),
    Case(
        "interval-mask", "an interval mask that keeps everything, (1,8,2048,64)", {**_USUAL, "visible": 2048},
        _overhead(1.05), mask="valid_lens",
    ),
    Case(
        "watch", "watch, sdpa (1,8,2048,64)", _USUAL,
        _overhead(1.45), watched="function",
    ),
    Case(
        "watch-causal", "watch, sdpa (1,8,2048,64), causal", _USUAL,
        _overhead(1.45), mask="causal", watched="function",
    ),
    Case(
        "watch-wide", "watch, sdpa (1,8,512,128)", _sizes(8, 512, 512, 128),
        _overhead(1.45), watched="function",
    ),
    Case(
        "watch-short", "watch, sdpa (8,12,128,32)", _SHORT_HEADS,
        _overhead(1.45), watched="function",
    ),
    Case(
        "watch-layer", "watch, nn.MultiheadAttention, 2048 tokens, 8 heads of 64", _USUAL,
        _overhead(1.45), watched="layer",
    ),
    Case(
        "watch-layer-short", "watch, nn.MultiheadAttention, 8 times 128 tokens, 12 heads of 32", _SHORT_HEADS,
        _overhead(1.45), watched="layer",
    ),
    Case(
        "limits", "products of matrices, and reading, by NumPy and PyTorch", {"side": 2048, "numbers": 2**27}, {},
        kind="limits",
    ),
    Case(
        "growth-dot", "scaled dot (1,1,n,64), forward + backward", _GROWTH, {"naive": None},
        backward=True, kind="growth",
    ),
    Case(
        "growth-additive", "additive (1,1,n,64), forward + backward", _GROWTH, {"naive": None},
        score="additive", backward=True, kind="growth",
    ),
    Case(
        "memory-numpy", "NumPy, scaled dot, 32768 tokens, 1 head, d 64, causal, forward + backward", _CALLERS_LONG, {},
        framework="numpy", mask="causal", backward=True, kind="memory",
    ),
    Case(
        "memory-jax", "JAX, jit, scaled dot, 32768 tokens, 1 head, d 64, causal, forward + backward", _CALLERS_LONG, {},
        framework="jax", mask="causal", backward=True, kind="memory",
    ),
    Case(
        "memory-tensorflow", "TensorFlow, eager, scaled dot, 32768 tokens, 1 head, d 64, causal, forward + backward",
        _CALLERS_LONG, {}, framework="tensorflow", mask="causal", backward=True, kind="memory",
    ),
    Case(
        "memory-tensorflow-graph",
        "TensorFlow, tf.function, scaled dot, 32768 tokens, 1 head, d 64, causal, forward + backward",
        _CALLERS_LONG, {}, framework="tensorflow", graph=True, mask="causal", backward=True, kind="memory",
    ),
    Case(
        "memory-dot", "scaled dot, 131072 tokens, 1 head, d 64, causal, forward + backward", _LONG, {},
        mask="causal", backward=True, kind="memory", full=True,
    ),
    Case(
        "memory-additive", "additive, 131072 tokens, 1 head, d = h = 64, causal, forward + backward", _LONG, {},
        score="additive", mask="causal", backward=True, kind="memory", full=True,
    ),
)  # fmt: skip

MEMORY_TARGET = 100 * MB
"""Most bytes that a memory case may take over inputs, outputs and gradients."""

GROWTH_TARGET = 1.1
"""Largest exponent of our memory's growth: 1, and the error of a fit over four lengths."""


def names() -> list[str]:
    """Return the names of all cases, in the order in which they run."""
    return [case.name for case in CASES]


def named(name: str) -> Case:
    """Return the case of that name."""
    for case in CASES:
        if case.name == name:
            return case
    raise ArgumentError(message("only", "names among " + ", ".join(names()), repr(name)))


def chosen(only: Sequence[str], full: bool) -> list[Case]:
    """Return the cases to run: those named, or all but the long ones."""
    if only:
        wanted = {named(name).name for name in only}
        return [case for case in CASES if case.name in wanted]
    return [case for case in CASES if full or not case.full]
