"""One attention call of a PyTorch model, from the arguments of the function that computes it.

Requirements:
- where a watch wants one pass, the pass of the statistics gives the output too, if the model's own function differs by
  rounding alone; the weight on the first key is then computed from its score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import attnscore as ats
from attnscore import backends
from attnscore.backends import torch_private as private
from attnscore.backends.torch import causal_alignment, is_traced
from attnscore.diagnostics.watching.sums import (
    MASKED_BIAS,
    NEEDED,
    Array,
    Call,
    counted_queries,
    input_sums,
    marks_of,
    query_sums,
    with_infinity,
)

_OPS = backends.load("torch")


def output_and_sums(call: Call, real: Tensor | None, saturated_weight: float) -> tuple[Tensor, dict[str, Array]]:
    """Return the output of a call and the sums of `sums_of`, from one pass."""
    marks, value = marks_of(_OPS, call.key, -3, real), call.value
    with torch.set_grad_enabled(bool(call.is_recorded)):
        if marks.numel() and marks.shape[-1] == 1:
            out, stats = ats.attend(call.query, call.key, value, **call.options, return_stats=NEEDED)
            marked = _first_key_weights(call, stats)
        else:  # columns after the values take up to a third longer where values are short
            joined = torch.cat([value, marks.expand(*value.shape[:-1], marks.shape[-1])], -1)
            both, stats = ats.attend(call.query, call.key, joined, **call.options, return_stats=NEEDED)
            # Models may take a view that only an output in C order has.
            out, marked = both[..., : value.shape[-1]].contiguous(), both[..., value.shape[-1] :]
    sums = query_sums(call, marked, stats, counted_queries(call, real), saturated_weight)
    return out, sums | input_sums(call, len(sums["rows"]))


@torch.no_grad()
def _first_key_weights(call: Call, stats: ats.AttentionStats) -> Tensor:
    """Return the weights (..., query, 1) on the first key of a call of `sdpa_call`: exp(score - log-sum-exp)."""
    total = stats.log_sum_exp[..., None]
    query, key = (x.to(total.dtype) for x in (call.query, call.key[..., :1, :]))
    if key.ndim > 3 and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale, mask, bias = call.options["score"].scale, call.options.get("mask"), call.options.get("bias")
    scores = (query @ key.mT).mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores += bias[..., :1]
    if isinstance(mask, Tensor):  # a causal one has the first key at every query that attends to some
        scores.masked_fill_(~mask[..., :1], -torch.inf)
    # The product may be rounded otherwise than in the pass.
    return torch.minimum(scores.sub_(total).exp_(), stats.max_weight[..., None])


def sdpa_call(query: Tensor, key: Tensor, arguments: dict[str, Any]) -> Call:
    """Return a call of ``F.scaled_dot_product_attention`` with these other arguments."""
    mask = arguments.get("attn_mask")
    options: dict[str, Any] = {"score": ats.ScaledDot(arguments.get("scale"))}
    if arguments.get("is_causal"):
        options["mask"] = ats.Causal(align="top_left")
    if (alignment := causal_alignment(mask)) is not None:
        options["mask"] = ats.Causal(align=alignment)
    elif isinstance(mask, Tensor):
        options |= {"mask": mask.detach()} if mask.dtype == torch.bool else bias_of(mask)
    elif mask is not None:
        raise TypeError(f"a mask of type {type(mask).__name__}")
    return Call(query, key, options)


def can_pool(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> bool:
    """Return whether `attend` may compute the output of ``F.scaled_dot_product_attention``.

    The function gives the output of calls with dropout, which draws its own random numbers, of less usual tensors, and
    of calls that it refuses. `can_pool` runs where the model calls it, with the model's autograd, autocast and hooks.
    """
    tensors, mask = (query, key, value), arguments.get("attn_mask")
    if any(type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype != query.dtype for x in tensors):
        return False
    if reason_against(*tensors) is not None or query.ndim < 3 or key.shape[:-1] != value.shape[:-1]:
        return False
    shares_keys = arguments.get("enable_gqa") and query.ndim > 3 and query.shape[-3] % max(1, key.shape[-3]) == 0
    lead = slice(None, -3 if shares_keys else -2)
    if query.shape[lead] != key.shape[lead] or query.shape[-1] != key.shape[-1]:
        return False
    if isinstance(mask, Tensor):
        # Where a model writes a number for -inf, a fully masked query gets the mean of the values.
        # The memory of a CausalBias has not been set.
        is_bias = mask.dtype != torch.bool and causal_alignment(mask) is None
        has_numbers_for_infinity = is_bias and with_infinity(mask, MASKED_BIAS) is not mask
        if arguments.get("is_causal") or mask.requires_grad or has_numbers_for_infinity:
            return False
    # Checkpointing compares the saved tensors with its second pass, which is not watched.
    has_hooks = private.saved_tensor_hooks(False) is not None
    return not (arguments.get("dropout_p") or has_hooks or _OPS.has_autocast(query))


def bias_of(mask: Tensor) -> dict[str, Any]:
    """Return the options of a call with a float mask."""
    return {"bias": with_infinity(mask.detach(), MASKED_BIAS)}


def with_head_axis(scores: Tensor, heads: int | None) -> Tensor:
    """Return scores (batch * head, query, key) as (batch, head, query, key); others, or without heads, as they are."""
    return scores if heads is None or scores.ndim != 3 else scores.reshape(-1, heads, *scores.shape[1:])


def projected(inputs: Sequence[Tensor], heads: int, named: dict[str, Any]) -> Call:
    """Project inputs to queries, keys and values again, as a fused function does; masks are True at masked keys."""
    dim, weight, bias, mask = named["embed_dim"], named["qkv_weight"], named["qkv_bias"], named.get("mask")
    options: dict[str, Any] = {"score": "scaled_dot", "head_axis": -2}
    counted = None
    if inputs[0].is_nested:
        lens = torch.tensor([len(x) for x in inputs[0].unbind()])
        options["mask"] = ats.ValidLens(lens, query_lens=lens)
        inputs = [x.to_padded_tensor(0.0) for x in inputs]
        counted = torch.arange(inputs[0].shape[1]) < lens[:, None, None]
    parts = zip(inputs, weight.split(dim), bias.split(dim), strict=True)
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (functional.linear(*part) for part in parts))
    if mask is not None:
        attended = ~mask.to(torch.bool)
        # 0: (query, key); 1: (batch, key); 2: (batch, head, query, key)
        options["mask"] = ats.KeyPadding(attended) if named.get("mask_type") == 1 else ats.Dense(attended)
    return Call(q, k, options, v, counted=counted)


def reason_against(*tensors: Any) -> str | None:
    """Return why the tensors among these cannot be recorded; None when they can."""
    for x in tensors:
        if not isinstance(x, Tensor):
            continue
        if is_traced(x):
            return "symbolic tensors, which hold no numbers"
        if x.layout != torch.strided:
            return f"a layout of {x.layout}"
        if not x.is_floating_point():
            return f"tensors of {x.dtype}"
    return None
