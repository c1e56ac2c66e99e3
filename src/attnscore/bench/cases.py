"""The table of cases: what is measured, against whom, and what must be reached.

What this module meets:
- a case is data alone; sizes travel to the measuring process as JSON, so a test can shrink them;
- one row of the library's promises is one case; a new promise is a new row here and nowhere else;
- what the machine itself can do is a case too, beside which the others' rates are held;
- a ratio is the peer's time over ours, "at most" turns it round: ours over the peer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from attnscore.errors import ArgumentError, message

Kind = Literal["limits", "time", "growth", "memory"]

MB = 10**6


@dataclass(frozen=True)
class Goal:
    """What a ratio must reach, and the moonshot."""

    must: float
    moonshot: float | None = None
    one_thread: float | None = None
    """`must` on one thread, where it differs."""
    at_most: bool = False
    """The ratio is our time over the peer's, and must not exceed `must`."""

    def on(self, threads: int) -> float:
        """What must be reached on that many threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.must


@dataclass(frozen=True)
class Case:
    """One thing that is measured; `sizes` has batch, heads (0: no such axis), queries, keys, dim and what it needs."""

    name: str
    what: str
    sizes: Mapping[str, Any]
    peers: Mapping[str, Goal | None]
    score: Literal["scaled_dot", "additive"] = "scaled_dot"
    dtype: str = "float32"
    mask: Literal["", "causal", "valid_lens", "window"] = ""
    framework: Literal["torch", "numpy", "jax", "tensorflow"] = "torch"
    graph: bool = False
    """In TensorFlow inside ``tf.function``; a caller of JAX is inside ``jax.jit`` in any case."""
    backward: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `attend` in our side alone, whose price the case is about."""
    watched: Literal["", "function", "layer"] = ""
    """Our side is PyTorch's own attention, or its layer with projections, in a model that `watch` looks at."""
    kind: Kind = "time"
    full: bool = False
    """Takes many minutes: only with --full."""

    def pairs(self) -> int:
        """How many (query, key) pairs the mask leaves, over all heads."""
        queries, keys, visible = self.sizes["queries"], self.sizes["keys"], self.sizes.get("visible", 0)
        by_mask = {
            "": queries * keys,
            "causal": queries * (queries + 1) // 2,
            "valid_lens": queries * min(visible, keys),
            # The first rows see fewer keys than the window is wide.
            "window": queries * visible - visible * (visible - 1) // 2,
        }
        return int(self.sizes["batch"] * max(1, self.sizes["heads"]) * by_mask[self.mask])

    def work(self) -> dict[str, int]:
        """Floating-point operations of the matrix products, activations of the additive score, bytes of the arrays.

        Forward: q k^T and p v. Backward: scores again, then dV, dP, dQ and dK. The additive score has no product of
        its own, but `dim` activations a pair, once forward and twice backward (a pass over queries and one over keys).
        """
        sizes, pairs = self.sizes, self.pairs()
        products = {"scaled_dot": (2, 5), "additive": (1, 2)}[self.score]
        passes = {"scaled_dot": (0, 0), "additive": (1, 2)}[self.score]
        ends = 2 if self.backward else 1
        rows = max(1, sizes["heads"]) * sizes["batch"] * (2 * sizes["queries"] + 2 * sizes["keys"])
        return {
            "operations": 2 * sizes["dim"] * pairs * sum(products[:ends]),
            "activations": sizes["dim"] * pairs * sum(passes[:ends]),
            "bytes": ends * rows * sizes["dim"] * (2 if self.dtype == "bfloat16" else 4),
        }


def _sizes(heads: int, queries: int, keys: int, dim: int, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "dim": dim, **more}


_USUAL = _sizes(8, 2048, 2048, 64)
_BAHDANAU = _sizes(0, 512, 512, 256)
_GROWTH = _sizes(1, 8192, 8192, 64, lengths=[1024, 2048, 4096, 8192])
_LONG = _sizes(1, 131072, 131072, 64)
_CALLERS_LONG = _sizes(1, 32768, 32768, 64)
_SHORT_HEADS = _sizes(12, 128, 128, 32, batch=8)

CASES: tuple[Case, ...] = (
    Case(
        "dot", "scaled dot (1,8,2048,64), forward", _USUAL,
        {"sdpa": Goal(1.35, 1.5, one_thread=1.2), "textbook": None, "xla": None, "onnxruntime": None},
    ),
    Case(
        "dot-backward", "scaled dot (1,8,2048,64), forward + backward", _USUAL,
        {"sdpa": Goal(1.25, 1.4), "textbook": None}, backward=True,
    ),
    Case(
        "dot-bfloat16", "scaled dot (1,8,2048,64), bfloat16, forward", _USUAL,
        {"sdpa": Goal(2, 2.5)}, dtype="bfloat16",
    ),
    Case(
        "causal", "scaled dot (1,8,2048,64), causal, forward", _USUAL,
        {"sdpa": Goal(1.3, 1.5), "onnxruntime": None}, mask="causal",
    ),
    Case(
        "padded", "scaled dot (1,8,2048,64), half the keys padded, forward", {**_USUAL, "visible": 1024},
        {"sdpa": Goal(2.6, 3.2)}, mask="valid_lens",
    ),
    Case(
        "window", "scaled dot (1,8,8192,64), window 256 of 8192, forward", _sizes(8, 8192, 8192, 64, visible=256),
        {"sdpa": Goal(25, 40)}, mask="window",
    ),
    Case(
        "decoding", "scaled dot, 1 query, 32768 keys, 32 heads, d 128", _sizes(32, 1, 32768, 128),
        {"sdpa": Goal(2, 2.7), "reading": None},
    ),
    Case(
        "additive", "additive (1,512,512), h 256, forward", _BAHDANAU,
        {"textbook": Goal(80, 120), "compile": Goal(6, 10), "xla": Goal(6, 10), "keops": None}, score="additive",
    ),
    Case(
        "additive-backward", "additive (1,512,512), h 256, forward + backward", _BAHDANAU,
        {"textbook": Goal(40, 60)}, score="additive", backward=True,
    ),
    Case(
        "additive-long", "additive (1,8,2048,64), h 64, against scaled dot product", _USUAL,
        {"sdpa": Goal(2, 1, at_most=True), "keops": None}, score="additive",
    ),
    Case("numpy", "NumPy caller, scaled dot (1,8,2048,64)", _USUAL, {"numpy": Goal(2)}, framework="numpy"),
    Case("jax", "JAX caller, jit, scaled dot (1,8,2048,64)", _USUAL, {"jax": Goal(3), "xla": None}, framework="jax"),
    Case(
        "tensorflow", "TensorFlow caller, eager, scaled dot (1,8,2048,64)", _USUAL,
        {"tensorflow": Goal(1.3), "keras": Goal(1.3)}, framework="tensorflow",
    ),
    Case(
        "tensorflow-graph", "TensorFlow caller, tf.function, scaled dot (1,8,2048,64)", _USUAL,
        {"tensorflow": Goal(1.3), "keras": Goal(1.3)}, framework="tensorflow", graph=True,
    ),
    Case(
        "tiny", "tiny call (2,8,16,64) from PyTorch", _sizes(8, 16, 16, 64, batch=2),
        {"sdpa": Goal(2, 1, at_most=True)},
    ),
    Case(
        "tiny-backward", "tiny call (2,8,16,64) from PyTorch, forward + backward", _sizes(8, 16, 16, 64, batch=2),
        {"sdpa": Goal(2, 1, at_most=True)}, backward=True,
    ),
    Case(
        "statistics", "all statistics, (1,8,2048,64)", _USUAL,
        {"without": Goal(1.10, at_most=True)}, options={"return_stats": True},
    ),
    Case(
        "dropout", "dropout 0.1, (1,8,2048,64)", _USUAL,
        {"without": Goal(1.15, at_most=True)}, options={"dropout": 0.1, "seed": 0},
    ),
    Case(
        "dropout-backward", "dropout 0.1, (1,8,2048,64), forward + backward", _USUAL,
        {"without": Goal(1.15, at_most=True)}, options={"dropout": 0.1, "seed": 0}, backward=True,
    ),
    Case(
        "interval-mask", "an interval mask that keeps everything, (1,8,2048,64)", {**_USUAL, "visible": 2048},
        {"without": Goal(1.05, at_most=True)}, mask="valid_lens",
    ),
    Case(
        "watch", "watch, sdpa (1,8,2048,64)", _USUAL,
        {"without": Goal(1.45, at_most=True)}, watched="function",
    ),
    Case(
        "watch-causal", "watch, sdpa (1,8,2048,64), causal", _USUAL,
        {"without": Goal(1.45, at_most=True)}, mask="causal", watched="function",
    ),
    Case(
        "watch-wide", "watch, sdpa (1,8,512,128)", _sizes(8, 512, 512, 128),
        {"without": Goal(1.45, at_most=True)}, watched="function",
    ),
    Case(
        "watch-short", "watch, sdpa (8,12,128,32)", _SHORT_HEADS,
        {"without": Goal(1.45, at_most=True)}, watched="function",
    ),
    Case(
        "watch-layer", "watch, nn.MultiheadAttention, 2048 tokens, 8 heads of 64", _USUAL,
        {"without": Goal(1.45, at_most=True)}, watched="layer",
    ),
    Case(
        "watch-layer-short", "watch, nn.MultiheadAttention, 8 times 128 tokens, 12 heads of 32", _SHORT_HEADS,
        {"without": Goal(1.45, at_most=True)}, watched="layer",
    ),
    Case(
        "limits", "products of matrices, and reading, by NumPy and PyTorch", {"side": 2048, "numbers": 2**27}, {},
        kind="limits",
    ),
    Case(
        "growth-dot", "scaled dot (1,1,n,64), forward + backward", _GROWTH, {"textbook": None},
        backward=True, kind="growth",
    ),
    Case(
        "growth-additive", "additive (1,1,n,64), forward + backward", _GROWTH, {"textbook": None},
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

MEMORY_MUST = 100 * MB
"""What a memory case may take over inputs, outputs and gradients."""

GROWTH_MUST = 1.1
"""The exponent with which our memory may grow: 1, and what a fit over four lengths may be off."""


def names() -> list[str]:
    """The names of all cases, in the order in which they run."""
    return [case.name for case in CASES]


def named(name: str) -> Case:
    """The case of that name."""
    for case in CASES:
        if case.name == name:
            return case
    raise ArgumentError(message("only", "names among " + ", ".join(names()), repr(name)))


def chosen(only: Sequence[str], full: bool) -> list[Case]:
    """The cases to run: those named, or all but the long ones."""
    if only:
        wanted = {named(name).name for name in only}
        return [case for case in CASES if case.name in wanted]
    return [case for case in CASES if full or not case.full]
