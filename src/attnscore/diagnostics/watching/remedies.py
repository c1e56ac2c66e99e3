"""Remedies of causes, in words and as lines of code that run on the model that is watched.

Requirements:
- every cause has one remedy, with lines for PyTorch, Flax (NNX and linen) and Keras;
- lines that change weights name the model's own projections where these have usual names, and say where not;
- the same table and the same two loops serve every framework.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Framework = Literal["torch", "nnx", "linen", "keras"]


class Remedy(NamedTuple):
    """What to do against a cause, in words and as lines of code."""

    words: str
    """With {first}, the first step of the failure, and {bound}, to which QK-clip brings the logits."""
    torch: str = ""
    flax: str = ""
    """Lines for Flax and Keras; empty: as for PyTorch."""
    keras: str = ""
    clips: bool = False
    """Whether lines that clip the head's logits follow."""
    renews: tuple[str, ...] = ()
    """Projections of the head that lines initialise anew."""


_SMALLER_RATE = "warm the learning rate up, and lower its largest value"
_RESTORE = "restore a checkpoint from before step {first}"
_WARM_UP = Remedy(
    f"{_SMALLER_RATE}; then begin anew, or {_RESTORE}: from saturated heads little gradient comes back",
    "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=200)",
    "optimizer = optax.adam(optax.linear_schedule(0.01 * rate, rate, 200))",
    "optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=rate, "
    "warmup_steps=200))",
)
_SKIP = (
    "if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite(): optimizer.step()",
    "optimizer = optax.apply_if_finite(optax.adam(rate), max_consecutive_errors=10)",
    "optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate))",
)
_PLAIN = (
    "F.scaled_dot_product_attention(q, k, v)  # without scale=",
    "jax.nn.dot_product_attention(q, k, v)  # without scale=",
    "keras.ops.dot_product_attention(q, k, v)  # without scale=",
)
# The key is the cause in `Verdict.cause`. `benchmarks/diagnosis` applies each to the fault.
REMEDIES: dict[str, Remedy] = {
    "weights of one head too large": Remedy(
        "QK-clip{bound}: scale the head's query and key weights after each step of the optimiser",
        clips=True,
    ),
    "no scale, or weights that start too large": Remedy(
        "divide the scores by the square root of the head's dimension; or normalise queries and keys (QK-norm)", *_PLAIN
    ),
    "learning rate of one layer too large": Remedy(
        f"give the layer the learning rate of the others, which are healthy at theirs; then {_RESTORE}, or clip its "
        "logits (QK-clip) or cap them (`SoftCap`)",
        "optimizer = torch.optim.Adam(model.parameters(), lr=rate)  # one group",
        "optimizer = optax.adam(rate)  # for all parameters",
        "model.compile(keras.optimizers.Adam(rate), loss)  # for all layers",
    ),
    "learning rate too large": _WARM_UP,
    "no warm-up, or a learning rate that starts too large": _WARM_UP,
    "tokens that have become alike": Remedy(
        f"look for a missing residual or a norm that removes all; {_SMALLER_RATE}; then {_RESTORE}",
        "x = x + attention(norm(x))",
    ),
    "queries that are all alike": Remedy(
        "initialise the head's query weights anew, and look for what set them to a constant", renews=("query",)
    ),
    "keys that are all alike": Remedy(
        "initialise the head's query and key weights anew, and look for what set them to 0", renews=("query", "key")
    ),
    "one key that outweighs all others": Remedy(
        "initialise the head's query and key weights anew, or normalise queries and keys (QK-norm)",
        "q, k = (F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 for x in (q, k))",
        "q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) * x.shape[-1] ** 0.5 for x in (q, k))",
        "q, k = (keras.ops.normalize(x, axis=-1) * x.shape[-1] ** 0.5 for x in (q, k))",
    ),
    "scale applied twice, or weights that are too small": Remedy(
        "divide the scores by the square root of the head's dimension once", *_PLAIN
    ),
    "values that are all alike": Remedy(
        "initialise the head's value weights anew, and look for what set them to a constant", renews=("value",)
    ),
    "no padding mask": Remedy(
        "pass the mask of the padding",
        "model(x, src_key_padding_mask=ids == pad)",
        "jax.nn.dot_product_attention(q, k, v, mask=(ids != pad)[:, None, None])",
        "attention(x, x, attention_mask=(ids != pad)[:, None])",
    ),
    "inverted mask": Remedy(
        "invert the mask: True means may attend in `F.scaled_dot_product_attention`, JAX, Keras and here, masked in "
        "`nn.MultiheadAttention`",
        "model(x, src_key_padding_mask=~mask)",
        "jax.nn.dot_product_attention(q, k, v, mask=~mask)",
        "attention(x, x, attention_mask=~mask)",
    ),
    "no causal mask": Remedy(
        "give this layer the causal mask of the others",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "jax.nn.dot_product_attention(q, k, v, is_causal=True)",
        "attention(x, x, use_causal_mask=True)",
    ),
    "NaN or infinity in the weights of one head": Remedy(
        f"{_RESTORE}, and skip steps whose gradient is not finite", *_SKIP
    ),
    "NaN or infinity in the layer's input or weights": Remedy(
        f"look at what comes before the layer, {_RESTORE}, and skip steps whose gradient is not finite", *_SKIP
    ),
    "scores above the range of the dtype": Remedy(
        "compute attention in bfloat16 or float32, and scale queries before the product",
        "torch.autocast(device, dtype=torch.bfloat16)",
        "jax.nn.dot_product_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))",
        'keras.config.set_dtype_policy("mixed_bfloat16")',
    ),
    "a first key that takes all weight": Remedy(
        "normalise queries and keys (QK-norm); where heads need a place to look at nothing, give them a learned sink",
        "attend(q, k, v, sink=sink)",
    ),
    "logits that grow while the loss suffers": Remedy(
        f"QK-clip or a soft cap; {_SMALLER_RATE}", "attend(q, k, v, score=SoftCap('scaled_dot', 50.0))"
    ),
}


# ---------------------------------------------------------------- where the weights of a head are


@dataclass(frozen=True)
class Projections:
    """Expressions of the arrays that make the queries, keys and values of an attention call."""

    module: str
    """Expression of the module; the expressions in `arrays` call it `attention`."""
    arrays: Mapping[str, Sequence[str]]
    """Kernel, then bias where there is one, by "query", "key" and "value"."""
    size: int | str
    """Features of a head, or a name for them."""
    is_flat: bool = False
    """Whether one axis of the arrays has heads and features, one head after the other; PyTorch's rows always have."""
    shares_keys: bool = False
    """Whether several heads share a key."""


_PARTS = ("query", "key", "value")
_SEPARATE = [tuple(pattern.format(name[0]) for name in _PARTS) for pattern in
             ("{}_proj", "W_{}", "to_{}", "w{}", "{}_lin", "{}_linear", "{}")]  # fmt: skip
_SEPARATE += [tuple(pattern.format(name) for name in _PARTS) for pattern in
              ("{}", "{}_dense", "_{}_dense", "{}_proj", "{}_layer")]  # fmt: skip
# Queries, keys and values one below the other. Other names, as "query_key_value", stand for other orders.
_FUSED = ("qkv", "qkv_proj", "Wqkv", "to_qkv", "in_proj", "c_attn")
# Behind these a factor of the weights is lost.
_NORMS = ("q_norm", "norm_q", "query_norm", "query_ln", "q_layernorm", "qk_norm")


def projections_of(module: Any, expression: str, heads: int, framework: Framework) -> Projections | None:
    """Return the projections of a module that have one of the usual names; None too where it normalises queries."""
    if any(getattr(module, name, None) is not None for name in _NORMS):
        return None
    kernel, data = ("weight", ".data") if framework == "torch" else ("kernel", "")
    for names in _SEPARATE:
        layers = [getattr(module, name, None) for name in names]
        shapes = [tuple(getattr(getattr(layer, kernel, None), "shape", ())) for layer in layers]
        if not all(len(shape) in ((2,) if framework == "torch" else (2, 3)) for shape in shapes):
            continue
        is_flat = len(shapes[0]) == 2
        widths = [shape[0] if framework == "torch" else shape[-1] * (1 if is_flat else shape[-2]) for shape in shapes]
        if widths[0] % heads:
            return None
        arrays = {
            part: [f"attention.{name}.{each}{data}" for each in (kernel, "bias") if _has_array(layer, each)]
            for part, name, layer in zip(_PARTS, names, layers, strict=True)
        }
        return Projections(expression, arrays, widths[0] // heads, is_flat, widths[1] != widths[0])
    return _fused(module, expression, heads) if framework == "torch" else None


def _fused(module: Any, expression: str, heads: int) -> Projections | None:
    """Return projections that are parts of one array of PyTorch."""
    arrays: dict[str, list[str]] = {part: [] for part in _PARTS}
    name = next((name for name in _FUSED if _has_array(getattr(module, name, None), "weight")), None)
    if name is not None:
        layer, kernel, bias = getattr(module, name), f"attention.{name}.weight", f"attention.{name}.bias"
        shape, has_bias = tuple(layer.weight.shape), _has_array(layer, "bias")
        is_transposed = "Conv1D" in type(layer).__name__  # Hugging Face's, whose weights are (in, out)
        width, data = shape[is_transposed] // 3, ".data.T" if is_transposed else ".data"
        if shape[is_transposed] != 3 * width:
            return None
        expression += f"  # its {name}: the queries of all heads, then keys, then values"
    elif _has_array(module, "in_proj_weight") or _has_array(module, "q_proj_weight"):  # nn.MultiheadAttention
        kernel, bias, data = "attention.in_proj_weight", "attention.in_proj_bias", ".data"
        width, has_bias = module.embed_dim, _has_array(module, "in_proj_bias")
    else:
        return None
    for place, part in enumerate(_PARTS):
        rows = f"[{place * width}:{(place + 1) * width}]"
        is_apart = name is None and not _has_array(module, "in_proj_weight")
        arrays[part] += [f"attention.{part[0]}_proj_weight.data" if is_apart else f"{kernel}{data}{rows}"]
        arrays[part] += [f"{bias}.data{rows}"] if has_bias else []
    return None if width % heads else Projections(expression, arrays, width // heads)


def _has_array(owner: Any, name: str) -> bool:
    return bool(getattr(getattr(owner, name, None), "shape", ()))


def find_projections(model: Any, name: str, heads: int, framework: Framework) -> Projections | None:
    """Return the projections of the part of a model with a dotted name, "" being the model; None where not known."""
    part, expression = model, "model"
    try:
        for step in name.split(".") if name else ():
            part = part[int(step)] if step.isdigit() else getattr(part, step)
            expression += f"[{step}]" if step.isdigit() else f".{step}"
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return projections_of(part, expression, heads, framework)


def plain_name(layer: str) -> str:
    """Return the name of the module of an attention call: without the number of the call, or that of its heads.

    >>> plain_name("layers.0.attn #2"), plain_name("attn (4 heads)")
    ('layers.0.attn', 'attn')
    """
    return re.sub(r"( #\d+| \(\d+ heads\))+$", "", layer)


# ---------------------------------------------------------------- lines of code

_CLIP = """\
attention = {module}
for row in seen.last():
    if row["layer"] == {layer} and row["head"] in {heads} and row["{number}"] > {bound}:
        for x in [{arrays}]:
            {change}"""
_RENEW = """\
attention = {module}
for head in {heads}:
    for seed, x in enumerate([{arrays}]):
        {change}"""
# The features of a head in an array: where heads have an axis of their own, and where they are one after the other.
_INDEX: dict[Framework, tuple[str, str]] = {
    "torch": ("{size} * {head} :][:{size}", "{size} * {head} :][:{size}"),
    "nnx": ("..., {head}, :", "..., {size} * {head} : {size} * ({head} + 1)"),
    "linen": ("..., {head}, :", "..., {size} * {head} : {size} * ({head} + 1)"),
    "keras": ("keras.ops.arange(x.shape[-2])[:, None] == {head}", "keras.ops.arange(x.shape[-1]) // {size} == {head}"),
}
_DRAW = "jax.nn.initializers.lecun_normal()(jax.random.key(2 * head + seed)"
# Multiply a head by a factor, and initialise it anew.
_CHANGES: dict[Framework, tuple[str, str]] = {
    "torch": ("x[{index}] *= {factor}", "torch.nn.init.xavier_uniform_(x[{index}])"),
    "nnx": (
        "x[...] = x[...].at[{index}].multiply({factor})",
        f"x[...] = x[...].at[{{index}}].set({_DRAW}, x[{{index}}].shape, x.dtype))",
    ),
    "linen": (
        "x.update({{name: array.at[{index}].multiply({factor}) for name, array in x.items()}})",
        f"x['kernel'] = x['kernel'].at[{{index}}].set({_DRAW}, x['kernel'][{{index}}].shape, x['kernel'].dtype))",
    ),
    "keras": (
        "x.assign(x * keras.ops.where({index}, {factor}, 1.0))",
        "x.assign(keras.ops.where({index}, keras.initializers.GlorotUniform()(x.shape), x.value))",
    ),
}


class Clip(NamedTuple):
    """What QK-clip brings below a bound, so that a softmax is not saturated."""

    number: str
    """The largest logit; or, of heads without a logit above 0, the variance of their logits."""
    bound: float
    watch_tau: float
    """The largest logit that `clip` allows in the rows of the watch."""

    def __str__(self) -> str:
        if self.number != "max_logit":
            return f" by the variance of the logits, as none is above 0, to {self.bound:g}"
        if self.bound >= self.watch_tau:
            return f" at tau = {self.bound:g}"
        return (
            f" at tau = {self.bound:g} (this watch's tau = {self.watch_tau:g} would leave the softmax saturated; with "
            f"watch(model, thresholds=Thresholds(tau={self.bound!r})) the rows' `clip` is the factor)"
        )


@dataclass(frozen=True)
class Place:
    """Heads of one attention call that fail for the same cause, and what a remedy has to know of them."""

    layer: str
    heads: Sequence[int]
    first: int
    """First step of the failure."""
    clip: Clip
    framework: Framework
    projections: Projections | None


def remedy_for(cause: str, place: Place) -> str:
    """Return the remedy of a cause: words, and lines of code after a colon and a line break."""
    remedy = REMEDIES[cause]
    code = getattr(remedy, {"torch": "torch", "keras": "keras"}.get(place.framework, "flax")) or remedy.torch
    if remedy.clips:
        code = _lines_for(place, _CLIP, ("query", "key"))
    elif remedy.renews:
        code = _lines_for(place, _RENEW, remedy.renews)
    return f"{remedy.words.format(first=place.first, bound=place.clip)}:\n{code}"


def _lines_for(place: Place, frame: str, parts: Sequence[str]) -> str:
    """Return lines that change projections of the heads; with names to fill in where the model's are not known."""
    clips, projections, power = frame is _CLIP, place.projections, 0.5
    if projections is None or (projections.shares_keys and not clips and "key" in parts):
        kernel = "weight.data" if place.framework == "torch" else "kernel"
        arrays = {part: [f"attention.W_{part[0]}.{kernel}"] for part in _PARTS}
        projections = Projections("...  # this layer's module, with projections W_q, W_k, W_v", arrays, "size", True)
    if clips and projections.shares_keys:  # other heads need the key as it is
        parts, power = ("query",), 1.0
    if place.clip.number != "max_logit":  # a square of the logits
        power /= 2
    names = [name for part in parts for name in projections.arrays[part][: None if clips else 1]]
    head, number, bound = 'row["head"]' if clips else "head", place.clip.number, f"{place.clip.bound:g}"
    factor = f'({bound} / row["{number}"])' + ("" if power == 1 else f" ** {power}")
    index = _INDEX[place.framework][projections.is_flat].format(size=projections.size, head=head)
    return frame.format(
        module=projections.module,
        layer=json.dumps(place.layer),
        heads=list(place.heads),
        number=number,
        bound=bound,
        arrays=", ".join(names),
        change=_CHANGES[place.framework][not clips].format(index=index, factor=factor),
    )
