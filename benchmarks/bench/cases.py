"""Table of the cases: calls that are measured, and their baselines.

- A case is data alone; sizes travel to the measuring process as JSON, so a test can shrink them.
- The rates that libraries reach on the machine are a case too ("limits"): a yardstick for the rates of the others.
- Small calls differ from shape to shape, so a case of kind "shapes" measures many shapes in one process.
- A case of kind "model" is a step of a whole model; its sizes are the keywords of its builder in `bench.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from attnscore.base.arguments import check_choice

Score = Literal["scaled_dot", "additive", "bilinear", "gaussian"]
Mode = Literal["forward", "weights", "backward"]
MODES: tuple[Mode, ...] = ("forward", "weights", "backward")


@dataclass(frozen=True)
class Case:
    """One measurement; `sizes` has batch, heads (0: no such axis), queries, keys, dim and more by kind."""

    name: str
    sizes: Mapping[str, Any]
    baselines: tuple[str, ...] = ()
    label: str = ""
    """Description, where that of the fields is not enough."""
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
    def what(self) -> str:
        """Description in reports: the label, or what the fields say."""
        if self.label:
            return self.label
        program = {"jax": "jit", "tensorflow": "tf.function"}.get(self.framework, "") if self.graph else ""
        width = f" {self.sizes['visible']}" if "visible" in self.sizes else ""
        parts = [
            "" if self.framework == "torch" else f"from {self.framework}",
            program,
            "layer with projections" if self.layer else "",
            self.shape().replace("_", " "),
            self.mask.replace("_", " ") + width,
            "" if self.dtype == "float32" else self.dtype,
            *(f"{name}={value}" for name, value in self.options.items()),
            f"watch ({self.watched})" if self.watched else "",
            "forward + backward" if self.backward else "forward",
        ]
        return ", ".join(filter(None, parts))

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


def _small(name: str, what: str, framework: Any, modes: tuple[Mode, ...] = MODES, **more: Any) -> Case:
    """Return a case of the small shapes, with valid lengths."""
    options = {"baselines": ("formula",), **more}
    return Case(
        f"small-{name}",
        {"shapes": _SMALL},
        label=f"small shapes, {what}",
        mask="lens",
        framework=framework,
        modes=modes,
        kind="shapes",
        **options,
    )


def _model(name: str, what: str, sizes: dict[str, Any], baseline: str, framework: Any = "torch") -> Case:
    return Case(f"model-{name}", sizes, (baseline,), what, framework=framework, kind="model")


def _memory(name: str, sizes: dict[str, Any], **more: Any) -> Case:
    return Case(f"memory-{name}", sizes, mask="causal", backward=True, kind="memory", **more)


_TRANSFORMER = {"layers": 4, "heads": 8, "width": 256}
_TRANSLATION = {"batch": 64, "steps": 10, "width": 256, "layers": 2, "vocabulary": 200}
_GPT = {"batch": 4, "tokens": 256, **_TRANSFORMER}
_GPT_WHAT = "GPT, 4 layers, 8 heads, width 256, batch 4, 256 tokens"
_ENCODER_WHAT = "encoder, 4 layers, 8 heads, width 256"
_PADDED = {"batch": 16, "tokens": 128, **_TRANSFORMER}
_PADDED_WHAT = f"{_ENCODER_WHAT}, batch 16, up to 128 tokens each"

CASES: tuple[Case, ...] = (
    Case("dot", _USUAL, ("sdpa", "naive", "xla", "onnxruntime")),
    Case("dot-backward", _USUAL, ("sdpa", "naive"), backward=True),
    Case("dot-bfloat16", _USUAL, ("sdpa",), dtype="bfloat16"),
    Case("causal", _USUAL, ("sdpa", "onnxruntime"), mask="causal"),
    Case("padded", {**_USUAL, "visible": 1024}, ("sdpa",), mask="valid_lens"),
    Case("window", _sizes(8, 8192, 8192, 64, visible=256), ("sdpa", "sdpa-blocks", "flex"), mask="window"),
    Case("packed", _PACKED, ("sdpa", "sdpa-padded"), mask="packed"),
    Case("packed-backward", _PACKED, ("sdpa", "sdpa-padded"), mask="packed", backward=True),
    Case("decoding", _sizes(32, 1, 32768, 128), ("sdpa", "reading")),
    Case("decoding-bfloat16", _sizes(32, 1, 32768, 128), ("sdpa", "reading"), dtype="bfloat16"),
    Case("additive", _BAHDANAU, ("naive", "compile", "xla", "keops"), score="additive"),
    Case("additive-backward", _BAHDANAU, ("naive",), score="additive", backward=True),
    Case("additive-layer", _BAHDANAU, ("formula",), score="additive", mask="lens", layer=True),
    Case("additive-long", _USUAL, ("sdpa", "keops"), score="additive"),
    Case("numpy", _USUAL, ("numpy",), framework="numpy"),
    Case("jax", _USUAL, ("jax", "xla"), framework="jax", graph=True),
    Case("tensorflow", _USUAL, ("tensorflow", "keras"), framework="tensorflow"),
    Case("tensorflow-graph", _USUAL, ("tensorflow", "keras"), framework="tensorflow", graph=True),
    Case("tiny", _TINY, ("sdpa",)),
    Case("tiny-backward", _TINY, ("sdpa",), backward=True),
    Case(
        "small-self-attention",
        {"shapes": _SELF_ATTENTION},
        ("sdpa",),
        "self-attention of 32 to 512 tokens, PyTorch",
        modes=("forward", "backward"),
        kind="shapes",
    ),
    _small("numpy", "NumPy", "numpy", ("forward", "weights")),
    _small("torch", "PyTorch", "torch"),
    _small("jax-eager", "JAX, eager", "jax"),
    _small("jax", "JAX, jit", "jax", graph=True),
    _small("tensorflow", "TensorFlow, eager", "tensorflow"),
    _small("tensorflow-graph", "TensorFlow, tf.function", "tensorflow", graph=True),
    _small("layers-torch", "layers of PyTorch", "torch", layer=True),
    _small(
        "layers-keras",
        "layers of Keras on TensorFlow, eager",
        "tensorflow",
        baselines=("formula", "keras-layer"),
        layer=True,
    ),
    _small(
        "layers-keras-graph",
        "layers of Keras on TensorFlow, tf.function",
        "tensorflow",
        ("forward", "backward"),
        baselines=("formula", "keras-layer"),
        layer=True,
        graph=True,
    ),
    _small("layers-flax", "layers of Flax NNX, eager", "jax", layer=True),
    _small("layers-flax-jit", "layers of Flax NNX, jit", "jax", ("forward", "backward"), layer=True, graph=True),
    # A bandwidth is fixed in a forward, and learned in a backward.
    Case("gaussian", _GAUSSIAN, ("naive", "sdpa"), score="gaussian"),
    Case("gaussian-backward", _GAUSSIAN, ("naive",), score="gaussian", backward=True),
    Case("weights", _USUAL, ("naive", "without"), options={"return_weights": True}),
    Case("statistics", _USUAL, ("without",), options={"return_stats": True}),
    Case("dropout", _USUAL, ("without",), options={"dropout": 0.1, "seed": 0}),
    Case("dropout-backward", _USUAL, ("without",), options={"dropout": 0.1, "seed": 0}, backward=True),
    # A mask that keeps everything.
    Case("interval-mask", {**_USUAL, "visible": 2048}, ("without",), mask="valid_lens"),
    Case("watch", _USUAL, ("without",), watched="function"),
    Case("watch-causal", _USUAL, ("without",), mask="causal", watched="function"),
    Case("watch-wide", _sizes(8, 512, 512, 128), ("without",), watched="function"),
    Case("watch-short", _SHORT_HEADS, ("without",), watched="function"),
    Case("watch-one-pass", _USUAL, ("without",), watched="one-pass"),
    Case("watch-one-pass-short", _SHORT_HEADS, ("without",), watched="one-pass"),
    Case("watch-layer", _USUAL, ("without",), watched="layer"),
    Case("watch-layer-short", _SHORT_HEADS, ("without",), watched="layer"),
    _model(
        "translation",
        "translation model of D2L (GRU, additive attention), batch 64, 10 steps, h 256, training step",
        _TRANSLATION,
        "naive",
    ),
    _model(
        "translation-prepared",
        "translation model of D2L, `prepare_keys` in attnscore: keys projected once, not at each step",
        {**_TRANSLATION, "prepares_keys": True},
        "naive",
    ),
    _model("gpt", f"{_GPT_WHAT}, training step", _GPT, "sdpa"),
    _model("gpt-dropout", f"{_GPT_WHAT}, dropout 0.1, training step", {**_GPT, "dropout": 0.1}, "sdpa"),
    _model("encoder-padded", f"{_PADDED_WHAT}, training step", _PADDED, "sdpa"),
    _model(
        "encoder-packed",
        f"{_PADDED_WHAT}, packed in attnscore (no padding), training step",
        {**_PADDED, "packs": True},
        "sdpa",
    ),
    _model(
        "encoder-window",
        f"{_ENCODER_WHAT}, 2048 tokens, window 128 to both sides, training step",
        {"batch": 1, "tokens": 2048, "window": 128, **_TRANSFORMER},
        "sdpa",
    ),
    _model("minilm", "all-MiniLM-L6-v2 of transformers, 16 sentences, inference", {"batch": 16}, "sdpa"),
    _model(
        "llama-generate",
        "Llama of transformers, 4 layers, 8 heads (2 KV heads), width 256, prompt 64, 64 new tokens",
        {"batch": 1, "prompt": 64, "new": 64, "kv_heads": 2, **_TRANSFORMER},
        "sdpa",
    ),
    _model(
        "keras-classifier",
        "Keras text classifier, batch 32, 200 tokens, width 64, 2 heads, train_on_batch",
        {"batch": 32, "tokens": 200, "width": 64, "heads": 2, "vocabulary": 20000},
        "keras-multi-head",
        "tensorflow",
    ),
    _model("jax-gpt", f"JAX, jit, {_GPT_WHAT}, training step", _GPT, "jax", "jax"),
    Case("limits", {"side": 2048, "numbers": 2**27}, label="products of matrices, and reading", kind="limits"),
    Case("growth-dot", _GROWTH, ("naive",), backward=True, kind="growth"),
    Case("growth-additive", _GROWTH, ("naive",), score="additive", backward=True, kind="growth"),
    _memory("numpy", _CALLERS_LONG, framework="numpy"),
    _memory("jax", _CALLERS_LONG, framework="jax", graph=True),
    _memory("tensorflow", _CALLERS_LONG, framework="tensorflow"),
    _memory("tensorflow-graph", _CALLERS_LONG, framework="tensorflow", graph=True),
    _memory("dot", _LONG, full=True),
    _memory("additive", _LONG, score="additive", full=True),
)


def names() -> list[str]:
    """Return the names of all cases, in the order in which they run."""
    return [case.name for case in CASES]


def named(name: str) -> Case:
    """Return the case of that name."""
    check_choice("--only", name, names())
    return next(case for case in CASES if case.name == name)


def chosen(only: Sequence[str], full: bool) -> list[Case]:
    """Return the cases to run: those named, or all but the long ones."""
    if only:
        wanted = {named(name).name for name in only}
        return [case for case in CASES if case.name in wanted]
    return [case for case in CASES if full or not case.full]
