"""One attention call of a PyTorch model, and the sums per head from which its statistics follow.

Requirements:
- the statistics are `attend`'s, from a pass of their own: nothing of the model's is touched;
- no array of queries by keys is made: scores that the model itself made are read a few queries at a time;
- the weight on the first key, and on padding, is the output of the same pass, with values that mark these keys;
- where a watch wants one pass, it gives the output too, if the model's own function differs by rounding alone;
  the weight on the first key is then computed from its score;
- queries at padding do not count; queries with one attended key have no choice and never count as saturated;
- queries, keys and values are read once more for their squares alone: which of them hold NaN or infinity, how much the
  queries can change the weights, whether the values of a head differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import attnscore as ats
from attnscore import backends
from attnscore.backends import torch_private as private
from attnscore.backends.torch import causal_alignment, is_traced
from attnscore.diagnostics.watching.sums import (
    BLOCK,
    MASKED_BIAS,
    MASKED_SCORE,
    NEEDED,
    Array,
    Moments,
    add_up,
    by_head,
    counted_queries,
    input_sums,
    marks_of,
    merged,
    score_scale,
)

_OPS = backends.load("torch")


@dataclass(frozen=True, eq=False)
class Call:
    """Queries and keys as `attend` takes them, with their options."""

    query: Tensor
    key: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    heads: int | None = None
    """Heads of the model, where the query has fewer: single queries of a GQA group are then stacked as queries."""
    within: str = ""
    """Submodule that attends, where the calling module runs its code without calling it."""
    pooling: Pooling | None = None
    """The values, where the pass of the statistics may compute the output."""
    counted: Tensor | None = None
    """Queries (batch, 1, query) that count, where the call itself says so; None: all that are no padding."""
    value: Tensor | None = None
    """Values, where the caller has them."""


@dataclass(frozen=True, eq=False)
class Pooling:
    """The values of a call, and whether autograd records it."""

    value: Tensor
    is_recorded: bool


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores (..., head, query, key) that the model made itself; masked ones are -inf, or a number for it."""

    scores: Tensor


@torch.no_grad()
def sums_of(call: Call | Scores, real: Tensor | None, saturated_weight: float) -> dict[str, Array]:
    """Return sums over the queries of every head, and the largest logit: each (head,).

    `real` is (batch, token), True where there is a token, or None where padding is unknown; a query is saturated when
    its largest weight is at least `saturated_weight`.
    """
    parts = [
        _sums(one, *_attended_marks(one, real), counted, saturated_weight) for one, counted in _in_blocks(call, real)
    ]
    sums = merged(parts)
    return sums | _input_sums(call, len(sums["rows"]))


def output_and_sums(
    call: Call, pooling: Pooling, real: Tensor | None, saturated_weight: float
) -> tuple[Tensor, dict[str, Array]]:
    """Return the output of a call and the sums of `sums_of`, from one pass.

    Where padding may have weight, the marks are columns after the values: they take up to a third longer where values
    are short.
    """
    [(_, counted)] = _in_blocks(call, real)
    value, marks = pooling.value, marks_of(_OPS, call.key, -3, real)
    with torch.set_grad_enabled(pooling.is_recorded):
        if _pads_without_weight(call, marks):
            out, stats = ats.attend(call.query, call.key, value, **call.options, return_stats=NEEDED)
            first = _first_key_weights(call, stats, marks)
            marked = first if marks.shape[-1] == 1 else torch.cat([first, torch.zeros_like(first)], -1)
        else:
            joined = torch.cat([value, marks.expand(*value.shape[:-1], marks.shape[-1])], -1)
            both, stats = ats.attend(call.query, call.key, joined, **call.options, return_stats=NEEDED)
            # Models may take a view that only an output in C order has.
            out, marked = both[..., : value.shape[-1]].contiguous(), both.detach()[..., value.shape[-1] :]
    sums = _sums(call, marked, stats, counted, saturated_weight)
    return out, sums | _input_sums(call, len(sums["rows"]))


def _pads_without_weight(call: Call, marks: Tensor) -> bool:
    """Return whether no query attends to padding: none is known, or the mask is a tensor that hides it."""
    if marks.numel() == 0 or marks.shape[-1] == 1:
        return marks.numel() > 0
    padding, mask = marks[..., None, :, 1] != 0, call.options.get("mask")
    return not bool((mask & padding if isinstance(mask, Tensor) else padding).any())


@torch.no_grad()
def _first_key_weights(call: Call, stats: ats.AttentionStats, marks: Tensor) -> Tensor:
    """Return the weights (..., query, 1) on the first token of a call of `sdpa_call`: exp(score - log-sum-exp)."""
    places = marks[..., :1].argmax(-2, keepdim=True)

    def at_first(x: Tensor) -> Tensor:
        """Return the numbers (..., query, 1) of the first token, of (..., query, key) or (..., query, 1)."""
        if marks.shape[-1] == 1 or x.shape[-1] == 1:
            return x[..., :1]
        x = x.reshape(*[1] * (places.ndim - x.ndim), *x.shape)
        return x.expand(len(places), *x.shape[1:]).gather(-1, places.expand(-1, *x.shape[1:-1], 1))

    total = stats.log_sum_exp[..., None]
    key = call.key.gather(-2, places.expand(*call.key.shape[:-2], 1, call.key.shape[-1]))
    query, key = (x.to(total.dtype) for x in (call.query, key))
    if key.ndim > 3 and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale, mask, bias = call.options["score"].scale, call.options.get("mask"), call.options.get("bias")
    scores = (query @ key.mT).mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores += at_first(bias)
    if isinstance(mask, Tensor):  # a causal one has the first key at every query that attends to some
        scores.masked_fill_(~at_first(mask), -torch.inf)
    # The product may be rounded otherwise than in the pass.
    return torch.minimum(scores.sub_(total).exp_(), stats.max_weight[..., None])


def _in_blocks(call: Call | Scores, real: Tensor | None) -> Iterator[tuple[Call, Tensor | None]]:
    """Yield a call as it is, and scores as biases of calls with scores of 0, a few queries at a time.

    With each come the queries (batch, 1, query) that count: in self-attention, queries not at padding. None: all.
    """
    if isinstance(call, Call):
        head_axis = call.options.get("head_axis", -3)
        per_head = head_axis == -2 and call.key.ndim >= 4
        lengths = [x.shape[-3 if per_head else -2] for x in (call.query, call.key)]
        packed = call.heads is not None and call.query.ndim >= 4 and call.query.shape[head_axis] != call.heads
        counted = call.counted if call.counted is not None else counted_queries(real, lengths, call.query)
        yield call, None if packed else counted
        return
    scores = call.scores.detach()
    *lead, queries, keys = scores.shape
    step = max(1, BLOCK // max(1, scores.numel() // max(1, queries)))
    counted = counted_queries(real, [queries, keys], scores)
    zeros = scores.new_zeros(()).expand(*lead, keys, 1)
    for start in range(0, queries, step):
        rows = slice(start, min(queries, start + step))
        bias = with_infinity(scores[..., rows, :], MASKED_SCORE)
        query = scores.new_zeros(()).expand(*lead, bias.shape[-2], 1)
        yield Call(query, zeros, {"score": "dot", "bias": bias}), None if counted is None else counted[..., rows]


def _attended_marks(call: Call, real: Tensor | None) -> tuple[Tensor, ats.AttentionStats]:
    """Return the weights on the first key, and on padding, and the statistics."""
    key = call.key.detach()
    marks = marks_of(_OPS, key, call.options.get("head_axis", -3), real)
    value = marks.expand(*key.shape[:-1], marks.shape[-1])
    found: tuple[Tensor, ats.AttentionStats]
    found = ats.attend(call.query.detach(), key, value, **call.options, return_stats=NEEDED)
    return found


def _sums(
    call: Call, marked: Tensor, stats: ats.AttentionStats, counted: Tensor | None, saturated_weight: float
) -> dict[str, Array]:
    """Return the sums of a call from the weights on its marked keys and its statistics."""
    head_axis = call.options.get("head_axis", -3)
    fields = [
        by_head(x.detach(), head_axis, call.heads)
        for x in (*(getattr(stats, name) for name in NEEDED), *marked.to(stats.log_sum_exp.dtype).unbind(-1))
    ]
    # In NumPy from here on: on a few thousand queries its calls cost a fraction of PyTorch's.
    numbers = [x.numpy() for x in fields] if marked.is_cpu else [*torch.stack(fields).cpu().numpy()]
    return add_up(numbers, None if counted is None else counted.cpu().numpy(), saturated_weight)


@torch.no_grad()
def _input_sums(call: Call | Scores, heads: int) -> dict[str, Array]:
    """Return the sums of `input_sums` for a call."""
    if isinstance(call, Scores):
        return input_sums({}, heads, torch.finfo(call.scores.dtype).max)
    head_axis = call.options.get("head_axis", -3)
    arrays = {"query": call.query, "key": call.key, "value": call.value}
    moments = {
        name: _moments(x.detach(), head_axis, heads)
        for name, x in arrays.items()
        if x is not None and reason_against(x) is None
    }
    queries = call.query.shape[-2 if head_axis != -2 or call.query.ndim < 4 else -3]
    scale = score_scale(call.options.get("score", "scaled_dot"), call.query.shape[-1]) if queries > 1 else None
    return input_sums(moments, heads, torch.finfo(call.query.dtype).max, scale, call.query.shape[-1])


def _moments(x: Tensor, head_axis: int, heads: int) -> Moments | None:
    """Return the moments of queries, keys or values, as `sums.moments_of` does; they stay on their device."""
    x = x.transpose(-3, -2) if head_axis == -2 and x.ndim >= 4 else x
    array_heads = x.shape[-3] if x.ndim >= 4 else 1
    if array_heads == 0 or heads % array_heads or x.shape[-2] == 0:
        return None
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    x = x.reshape(-1, array_heads, *x.shape[-2:])
    square = torch.linalg.vector_norm(x, dim=(-2, -1)).square() / x.shape[-2]
    of_mean = (x.sum(-2) / x.shape[-2]).square().sum(-1)
    pair = torch.stack([square, (square - of_mean).clamp(min=0)]).cpu().numpy().astype(np.float64)
    return Moments(*np.repeat(pair, heads // array_heads, axis=-1))


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


def pooling_of(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Pooling | None:
    """Return the values for an output of ``F.scaled_dot_product_attention``; None where only the function gives it.

    The function gives the output of calls with dropout, which draws its own random numbers, of less usual tensors, and
    of calls that it refuses. `pooling_of` runs where the model calls it, with the model's autograd, autocast and hooks.
    """
    tensors, mask = (query, key, value), arguments.get("attn_mask")
    if any(type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype != query.dtype for x in tensors):
        return None
    if reason_against(*tensors) is not None or query.ndim < 3 or key.shape[:-1] != value.shape[:-1]:
        return None
    shares_keys = arguments.get("enable_gqa") and query.ndim > 3 and query.shape[-3] % max(1, key.shape[-3]) == 0
    lead = slice(None, -3 if shares_keys else -2)
    if query.shape[lead] != key.shape[lead] or query.shape[-1] != key.shape[-1]:
        return None
    if isinstance(mask, Tensor):
        # Where a model writes a number for -inf, a fully masked query gets the mean of the values.
        # The memory of a CausalBias has not been set.
        is_float = mask.dtype != torch.bool and causal_alignment(mask) is None
        if (
            arguments.get("is_causal")
            or mask.requires_grad
            or (is_float and with_infinity(mask, MASKED_BIAS) is not mask)
        ):
            return None
    # Checkpointing compares the saved tensors with its second pass, which is not watched.
    has_hooks = private.saved_tensor_hooks(False) is not None
    if arguments.get("dropout_p") or has_hooks or _OPS.has_autocast(query):
        return None
    return Pooling(value, torch.is_grad_enabled())


def bias_of(mask: Tensor) -> dict[str, Any]:
    """Return the options of a call with a float mask."""
    return {"bias": with_infinity(mask.detach(), MASKED_BIAS)}


def with_infinity(x: Tensor, bound: float) -> Tensor:
    """Replace numbers up to `bound`, or near the least of the dtype, which models write for -inf, by -inf."""
    masked = x <= max(torch.finfo(x.dtype).min / 2, bound)
    return x.masked_fill(masked, -torch.inf) if bool(masked.logical_and(x != -torch.inf).any()) else x


def with_head_axis(scores: Tensor, heads: int | None) -> Tensor:
    """Return scores (batch * head, query, key) as (batch, head, query, key); others, or without heads, as they are."""
    return scores if heads is None or scores.ndim != 3 else scores.reshape(-1, heads, *scores.shape[1:])


def projected(
    query: Tensor, key: Tensor, dim: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any
) -> Call:
    """Project queries and keys again, as a fused function does inside; its masks are True at masked keys."""
    options: dict[str, Any] = {"score": "scaled_dot", "head_axis": -2}
    counted = None
    if query.is_nested:
        lens = torch.tensor([len(x) for x in query.unbind()])
        options["mask"] = ats.ValidLens(lens, query_lens=lens)
        query, key = (x.to_padded_tensor(0.0) for x in (query, key))
        counted = torch.arange(query.shape[1]) < lens[:, None, None]
    q = functional.linear(query, weight[:dim], bias[:dim])
    k = functional.linear(key, weight[dim : 2 * dim], bias[dim : 2 * dim])
    q, k = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k))
    if mask is not None:
        attended = ~mask.to(torch.bool)
        # 0: (query, key); 1: (batch, key); 2: (batch, head, query, key)
        options["mask"] = ats.KeyPadding(attended) if kind == 1 else ats.Dense(attended)
    return Call(q, k, options, counted=counted)


def reason_against(*tensors: Any) -> str | None:
    """Return why these cannot be recorded; None when they can."""
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
