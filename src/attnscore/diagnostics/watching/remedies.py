"""Remedies of causes, in words and as a line of code that runs on the model that is watched.

Requirements:
- every cause has one remedy, with a line for PyTorch, Flax (NNX and linen) and Keras;
- a line that changes weights calls a public function.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

Framework = Literal["torch", "nnx", "linen", "keras"]


class Remedy(NamedTuple):
    """Remedy of a cause, in words and as a line of code."""

    words: str
    """Text with {first}, the first step of the failure."""
    torch: str
    """Line with {tau} of QK-clip, and {heads} by layer."""
    flax: str = ""
    """Lines for Flax and Keras; empty: as for PyTorch."""
    keras: str = ""


_SMALLER_RATE = "warm the learning rate up, to a third of its largest value or less"
_RESTORE = "restore a checkpoint from before step {first}"
_WARM_UP = Remedy(
    f"{_SMALLER_RATE}; then begin anew, or {_RESTORE}: from saturated heads little gradient comes back",
    "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=200)"
    "  # scheduler.step() after each optimizer.step()",
    "optimizer = optax.adam(optax.linear_schedule(0.01 * rate, rate, 200))  # rate: a third of the present one",
    "optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=rate, "
    "warmup_steps=200))  # rate: a third of the present one; steps: of the whole training",
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
_RESET = " (`from attnscore.diagnostics import reset_heads`)"
# The key is the cause in `Verdict.cause`. `benchmarks/diagnosis` applies each to the fault.
REMEDIES: dict[str, Remedy] = {
    "weights of one head too large": Remedy(
        "after each step of the optimiser (`from attnscore.diagnostics import qk_clip`)",
        "qk_clip(model, seen, tau={tau:g}, heads={heads})",
    ),
    "no scale, or weights that start too large": Remedy(
        "divide the scores by the square root of the head's dimension; or normalise queries and keys (QK-norm)", *_PLAIN
    ),
    "scale of the score too large": Remedy(
        "after each step of the optimiser, bound the scale of the score, which the weights of queries and keys may not "
        "change: `log_scale` of a cosine, `w_v` of an additive score; `log_bandwidth` of a Gaussian from below",
        "layer.log_scale.data.clamp_(max=math.log({tau:g}))",
        "layer.log_scale[...] = jnp.minimum(layer.log_scale[...], math.log({tau:g}))",
        "layer.log_scale.assign(keras.ops.minimum(layer.log_scale, math.log({tau:g})))",
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
        f"look for what set the head's query weights to a constant; draw them anew{_RESET}",
        'reset_heads(model, seen, {heads}, ["query"])',
    ),
    "keys that are all alike": Remedy(
        f"look for what set the head's query and key weights to 0; draw them anew{_RESET}",
        'reset_heads(model, seen, {heads}, ["query", "key"])',
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
        f"look for what set the head's value weights to a constant; draw them anew{_RESET}",
        'reset_heads(model, seen, {heads}, ["value"])',
    ),
    "no padding mask": Remedy(
        "pass the mask of the keys' padding",
        "model(x, src_key_padding_mask=~real)  # real: (batch, token), True at tokens",
        "attention(x, mask=real[:, None, None])  # real: (batch, token), True at tokens",
        "attention(x, x, attention_mask=real[:, None])  # real: (batch, token), True at tokens",
    ),
    "inverted mask": Remedy(
        "invert the mask: True means may attend in `F.scaled_dot_product_attention`, JAX, Keras and here, masked in "
        "`nn.MultiheadAttention`",
        "model(x, src_key_padding_mask=~mask)",
        "attention(x, mask=~mask)",
        "attention(x, x, attention_mask=~mask)",
    ),
    "no causal mask": Remedy(
        "give this layer the causal mask of the others",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "attention(x, mask=nnx.make_causal_mask(ids))  # or jax.nn.dot_product_attention(..., is_causal=True)",
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


def remedy_for(cause: str, layer: str, heads: Sequence[int], first: int, tau: float, framework: Framework) -> str:
    """Return the remedy of a cause, a key of `REMEDIES`: words, and a line of code after a colon and a line break.

    `heads` of the layer fail for it, since the step `first`; `tau` is the largest logit that QK-clip leaves.
    """
    remedy = REMEDIES[cause]
    code = (remedy.keras if framework == "keras" else "" if framework == "torch" else remedy.flax) or remedy.torch
    code = code.format(tau=tau, heads=json.dumps({layer: list(heads)}))
    if framework == "linen" and "(model, seen" in code:
        code = f"params = {code.replace('model', 'params', 1)}"
    return f"{remedy.words.format(first=first)}:\n{code}"
