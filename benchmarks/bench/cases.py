"""Table of the cases: calls that are measured, their baselines and targets.

- A case is data alone; sizes travel to the measuring process as JSON, so a test can shrink them.
- A promise of the library is one case: a new promise is a new row here and nowhere else.
- The rates that libraries reach on the machine are a case too ("limits"): a yardstick for the rates of the others.
- A ratio is the baseline's time over ours; with "at most" it is ours over the baseline's.
- Small calls differ from shape to shape, so a case of kind "shapes" measures many shapes in one process.
- A case of kind "model" is a step of a whole model; its sizes are the keywords of its builder in `bench.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from attnscore.errors import ArgumentError, message

MB = 10**6

Score = Literal["scaled_dot", "additive", "bilinear", "gaussian"]
Mode = Literal["forward", "weights", "backward"]


@dataclass(frozen=True)
class Target:
    """A ratio to reach, and the stretch target."""

    ratio: float
    stretch: float | None = None
    one_thread: float | None = None
    """`ratio` on one thread, where it differs."""
    at_most: bool = False
    """The ratio is our time over the baseline's, and the target an upper bound."""
    floor: float | None = None
    """Least ratio of each shape, in a case of many shapes; `ratio` is then their geometric mean."""

    def on(self, threads: int) -> float:
        """Return the ratio to reach on that many threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.ratio


@dataclass(frozen=True)
class Case:
    """One measurement; `sizes` has batch, heads (0: no such axis), queries, keys, dim and more by kind."""

    name: str
    what: str
    sizes: Mapping[str, Any]
    baselines: Mapping[str, Target | None]
    score: Score = "scaled_dot"
    dtype: str = "float32"
    mask: Literal["", "causal", "valid_lens", "window", "packed", "lens"] = ""
    """"packed": sequences in one row, of lengths that rise evenly to ``sizes["visible"]``. "lens": valid lengths, one
    for each element of the batch, in an array that is an operand of the call."""
    framework: Literal["torch", "numpy", "jax", "tensorflow"] = "torch"
    graph: bool = False
    """The caller is a compiled program: inside ``jax.jit`` or ``tf.function``."""
    backward: bool = False
    """With gradients, the parameter of the score's among them: a Gaussian bandwidth is learned then, else a number."""
    weights: bool = False
    """The weights are part of the result; a layer's are read after the call."""
    layer: bool = False
    """Our side is a layer with its projections: ``torch.nn``, Keras for TensorFlow, Flax NNX for JAX."""
    modes: tuple[Mode, ...] = ()
    """Modes in which a case of kind "shapes" measures each of ``sizes["shapes"]``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `attend` on our side alone, whose overhead the case measures."""
    watched: Literal["", "function", "one-pass", "layer"] = ""
    """Our side is PyTorch's own attention, or its layer with projections, in a model that `watch` looks at. "one-pass":
    the function, which `watch` computes itself."""
    kind: Literal["limits", "time", "shapes", "model", "growth", "memory"] = "time"
    full: bool = False
    """Takes many minutes: only with --full."""

    @property
    def has_parameter(self) -> bool:
        """Whether the score has a parameter."""
        return self.score != "scaled_dot"

    def points(self) -> list[tuple[Case, Mode]]:
        """Return the cases that a case of many shapes consists of, each with its mode."""
        modes: dict[Mode, dict[str, Any]] = {
            "forward": {},
            "weights": {"weights": True},
            "backward": {"backward": True},
        }
        return [
            (replace(self, score=score, sizes=_sizes(*sizes), kind="time", **modes[mode]), mode)
            for score, *sizes in self.sizes["shapes"]
            for mode in self.modes
        ]

    def shape(self) -> str:
        """Return score and sizes in a few characters, as in ``additive (64,1,10) h 256``."""
        axes = ("batch", "heads", "queries", "keys") if self.sizes["heads"] else ("batch", "queries", "keys")
        letter = "h" if self.score == "additive" else "d"
        return f"{self.score} ({','.join(str(self.sizes[axis]) for axis in axes)}) {letter} {self.sizes['dim']}"

    def pairs(self) -> int:
        """Return how many (query, key) pairs the mask leaves, over all heads; valid lengths of arrays leave fewer."""
        queries, keys, visible = self.sizes["queries"], self.sizes["keys"], self.sizes.get("visible", 0)
        by_mask = {
            "": queries * keys,
            "lens": queries * keys,
            "causal": queries * (queries + 1) // 2,
            "valid_lens": queries * min(visible, keys),
            # The first queries attend to fewer keys than the window is wide.
            "window": queries * visible - visible * (visible - 1) // 2,
            "packed": sum(n * n for n in self.packed_lengths()) if self.mask == "packed" else 0,
        }
        return int(self.sizes["batch"] * max(1, self.sizes["heads"]) * by_mask[self.mask])

    def packed_lengths(self) -> list[int]:
        """Return the lengths of packed sequences: 16 that rise to the longest, again and again; the last is cut."""
        total, step = self.sizes["queries"], max(1, self.sizes["visible"] // 16)
        found: list[int] = []
        while total > 0:
            found.append(min(total, step * (len(found) % 16 + 1)))
            total -= found[-1]
        return found

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
    """Our call against the same call without the measured option."""
    return {"without": Target(ratio, at_most=True)}


_USUAL = _sizes(8, 2048, 2048, 64)
_BAHDANAU = _sizes(0, 512, 512, 256)
_GROWTH = _sizes(1, 8192, 8192, 64, lengths=[1024, 2048, 4096, 8192])
_LONG = _sizes(1, 131072, 131072, 64)
_CALLERS_LONG = _sizes(1, 32768, 32768, 64)
_SHORT_HEADS = _sizes(12, 128, 128, 32, batch=8)
_TINY = _sizes(8, 16, 16, 64, batch=2)
_GAUSSIAN = _sizes(8, 1024, 1024, 64)
_PACKED = _sizes(8, 4352, 4352, 64, visible=512)

# (score, heads, queries, keys, dim, batch): a toy example of D2L, its translation model, and sizes around them.
# At most 4 M activations a call, so that the additive formula takes milliseconds.
_SMALL = [
    (score, 0, queries, keys, dim, batch)
    for score, shapes in {
        "additive": [
            (2, 1, 10, 8), (64, 1, 10, 256), (64, 10, 10, 64), (1, 2, 1, 16), (1, 1, 64, 1024),
            (256, 1, 16, 64), (32, 8, 8, 128), (16, 4, 32, 512), (128, 1, 64, 128), (8, 8, 64, 256),
        ],
        "scaled_dot": [
            (2, 1, 10, 8), (64, 1, 10, 256), (64, 10, 10, 64), (1, 1, 1, 16), (1, 8, 64, 1024),
            (256, 8, 64, 64), (256, 1, 32, 128), (16, 2, 5, 32), (8, 4, 48, 512), (128, 3, 20, 256),
        ],
        "bilinear": [
            (2, 1, 10, 8), (64, 1, 10, 256), (64, 10, 10, 64), (4, 1, 2, 16), (1, 8, 16, 1024),
            (1, 1, 64, 512), (256, 2, 24, 128), (32, 4, 64, 64), (16, 8, 40, 256), (128, 1, 12, 32),
        ],
        "gaussian": [
            (2, 1, 10, 8), (64, 1, 10, 256), (64, 10, 10, 64), (8, 1, 3, 256), (1, 8, 64, 1024),
            (1, 1, 50, 16), (256, 1, 64, 16), (32, 8, 32, 128), (16, 4, 12, 512), (128, 2, 33, 64),
        ],
    }.items()
    for batch, queries, keys, dim in shapes
]  # fmt: skip
# Lengths of common models among them (50 and 197: image patches, 77: captions), up to 3 GFLOP forward.
_SELF_ATTENTION = [
    ("scaled_dot", heads, tokens, tokens, dim, batch)
    for tokens in (32, 50, 77, 128, 197, 256, 384, 512)
    for batch, heads, dim in ((1, 12, 64), (1, 16, 128), (2, 8, 64), (8, 4, 32), (16, 16, 64), (64, 12, 64))
    if 4 * batch * heads * tokens**2 * dim <= 3e9
]
_EAGER = Target(2, floor=1)
_COMPILED = Target(0.8, floor=0.8)


def _small(
    name: str,
    what: str,
    framework: Any,
    target: Target,
    modes: tuple[Mode, ...] = ("forward", "weights", "backward"),
    baselines: Sequence[str] = ("formula",),
    **more: Any,
) -> Case:
    """Return a case of the small shapes, with valid lengths."""
    return Case(
        f"small-{name}", f"small shapes, {what}", {"shapes": _SMALL}, dict.fromkeys(baselines, target),
        mask="lens", framework=framework, modes=modes, kind="shapes", **more,
    )  # fmt: skip


_TRANSFORMER = {"layers": 4, "heads": 8, "width": 256}
_TRANSLATION = {"batch": 64, "steps": 10, "width": 256, "layers": 2, "vocabulary": 200}
_GPT = {"batch": 4, "tokens": 256, **_TRANSFORMER}


def _model(name: str, what: str, sizes: dict[str, Any], baseline: str, framework: Any = "torch") -> Case:
    """Return the case of a whole model, which has no target: most of its time is not attention's."""
    return Case(f"model-{name}", what, sizes, {baseline: None}, framework=framework, kind="model")


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
        {"sdpa": Target(25, 40), "sdpa-blocks": None}, mask="window",
    ),
    Case(
        "flex", "scaled dot (1,8,2048,64), forward, against FlexAttention", _USUAL,
        {"flex": None}, full=True,
    ),
    Case(
        "flex-causal", "scaled dot (1,8,2048,64), causal, forward, against FlexAttention", _USUAL,
        {"flex": None}, mask="causal", full=True,
    ),
    Case(
        "flex-window", "scaled dot (1,8,8192,64), window 256 of 8192, forward, against FlexAttention",
        _sizes(8, 8192, 8192, 64, visible=256), {"flex": None}, mask="window", full=True,
    ),
    Case(
        "packed", "scaled dot (1,8,4352,64), 16 packed sequences up to 512, forward", _PACKED,
        {"sdpa": None, "sdpa-padded": None}, mask="packed",
    ),
    Case(
        "packed-backward", "scaled dot (1,8,4352,64), 16 packed sequences up to 512, forward + backward", _PACKED,
        {"sdpa": None, "sdpa-padded": None}, mask="packed", backward=True,
    ),
    Case(
        "decoding", "scaled dot, 1 query, 32768 keys, 32 heads, d 128", _sizes(32, 1, 32768, 128),
        {"sdpa": Target(2, 2.7), "reading": None},
    ),
    Case(
        "decoding-bfloat16", "scaled dot, 1 query, 32768 keys, 32 heads, d 128, bfloat16", _sizes(32, 1, 32768, 128),
        {"sdpa": None, "reading": None}, dtype="bfloat16",
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
        "additive-layer", "additive layer with projections, (1,512,512), h 256, lengths, forward", _BAHDANAU,
        {"formula": None}, score="additive", mask="lens", layer=True,
    ),
    Case(
        "additive-long", "additive (1,8,2048,64), h 64, against scaled dot product", _USUAL,
        {"sdpa": Target(2, 1, at_most=True), "keops": None}, score="additive",
    ),
    Case("numpy", "NumPy caller, scaled dot (1,8,2048,64)", _USUAL, {"numpy": Target(2)}, framework="numpy"),
    Case(
        "jax", "JAX caller, jit, scaled dot (1,8,2048,64)", _USUAL,
        {"jax": Target(3), "xla": None}, framework="jax", graph=True,
    ),
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
        "small-self-attention", "self-attention of 32 to 512 tokens, PyTorch", {"shapes": _SELF_ATTENTION},
        {"sdpa": Target(1.3, floor=1)}, modes=("forward", "backward"), kind="shapes",
    ),
    _small("numpy", "NumPy", "numpy", _EAGER, ("forward", "weights")),
    _small("torch", "PyTorch", "torch", _EAGER),
    _small("jax-eager", "JAX, eager", "jax", _EAGER),
    _small("jax", "JAX, jit", "jax", _COMPILED, graph=True),
    _small("tensorflow", "TensorFlow, eager", "tensorflow", _EAGER),
    _small("tensorflow-graph", "TensorFlow, tf.function", "tensorflow", _COMPILED, graph=True),
    _small("layers-torch", "layers of PyTorch", "torch", _EAGER, layer=True),
    _small(
        "layers-keras", "layers of Keras on TensorFlow, eager", "tensorflow", _EAGER,
        baselines=("formula", "keras-layer"), layer=True,
    ),
    _small(
        "layers-keras-graph", "layers of Keras on TensorFlow, tf.function", "tensorflow", _COMPILED,
        ("forward", "backward"), ("formula", "keras-layer"), layer=True, graph=True,
    ),
    _small("layers-flax", "layers of Flax NNX, eager", "jax", _EAGER, layer=True),
    _small(
        "layers-flax-jit", "layers of Flax NNX, jit", "jax", _COMPILED, ("forward", "backward"),
        layer=True, graph=True,
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
        "watch-one-pass", "watch in one pass, sdpa (1,8,2048,64)", _USUAL,
        _overhead(1.25), watched="one-pass",
    ),
    Case(
        "watch-one-pass-short", "watch in one pass, sdpa (8,12,128,32)", _SHORT_HEADS,
        _overhead(1.45), watched="one-pass",
    ),
    Case(
        "watch-layer", "watch, nn.MultiheadAttention, 2048 tokens, 8 heads of 64", _USUAL,
        _overhead(1.45), watched="layer",
    ),
    Case(
        "watch-layer-short", "watch, nn.MultiheadAttention, 8 times 128 tokens, 12 heads of 32", _SHORT_HEADS,
        _overhead(1.45), watched="layer",
    ),
    _model(
        "translation", "translation model of D2L (GRU, additive attention), batch 64, 10 steps, h 256, training step",
        _TRANSLATION, "naive",
    ),
    _model(
        "translation-prepared",
        "translation model of D2L, `prepare_keys` in attnscore: keys projected once, not at each step",
        {**_TRANSLATION, "prepares_keys": True}, "naive",
    ),
    _model("gpt", "GPT, 4 layers, 8 heads, width 256, 4 times 256 tokens, training step", _GPT, "sdpa"),
    _model(
        "gpt-dropout", "GPT, 4 layers, 8 heads, width 256, 4 times 256 tokens, dropout 0.1, training step",
        {**_GPT, "dropout": 0.1}, "sdpa",
    ),
    _model(
        "encoder-padded", "encoder, 4 layers, 8 heads, width 256, 16 times up to 128 tokens, training step",
        {"batch": 16, "tokens": 128, **_TRANSFORMER}, "sdpa",
    ),
    _model(
        "encoder-window", "encoder, 4 layers, 8 heads, width 256, 2048 tokens, window 128 to both sides, training step",
        {"batch": 1, "tokens": 2048, "window": 128, **_TRANSFORMER}, "sdpa",
    ),
    _model("minilm", "all-MiniLM-L6-v2 of transformers, 16 sentences, inference", {"batch": 16}, "sdpa"),
    _model(
        "llama-generate", "Llama of transformers, 4 layers, 8 heads (2 KV heads), width 256, prompt 64, 64 new tokens",
        {"batch": 1, "prompt": 64, "new": 64, "kv_heads": 2, **_TRANSFORMER}, "sdpa",
    ),
    _model(
        "keras-classifier", "Keras text classifier, 32 times 200 tokens, width 64, 2 heads, train_on_batch",
        {"batch": 32, "tokens": 200, "width": 64, "heads": 2, "vocabulary": 20000}, "keras-multi-head", "tensorflow",
    ),
    _model(
        "jax-gpt", "JAX, jit, GPT, 4 layers, 8 heads, width 256, 4 times 256 tokens, training step", _GPT, "jax", "jax",
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
        framework="jax", graph=True, mask="causal", backward=True, kind="memory",
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
    raise ArgumentError(message("--only", "names among " + ", ".join(names()), repr(name)))


def chosen(only: Sequence[str], full: bool) -> list[Case]:
    """Return the cases to run: those named, or all but the long ones."""
    if only:
        wanted = {named(name).name for name in only}
        return [case for case in CASES if case.name in wanted]
    return [case for case in CASES if full or not case.full]
