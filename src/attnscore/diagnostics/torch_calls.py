"""One attention call of a PyTorch model, and the sums per head that its statistics come down to.

What this module meets:
- the statistics are `attend`'s, from a pass of their own beside the model's: nothing of the model's is touched;
- no array of queries by keys is made: where the model itself made the scores, they are read a few rows at a time;
- the weight on the first key, and on padding, comes out of the same pass, as values that say which key is which;
- rows of padding are no rows; rows with one visible key have no choice and are not asked whether they are saturated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

import attnscore as ats
from attnscore.diagnostics.watched import MEANS
from attnscore.errors import AttnscoreError

Array = NDArray[np.float64]

# Scores that were read from the model are copied in blocks of so many numbers.
_BLOCK = 2**20
# Of `attend`, in the order in which `_sums` takes them apart.
_NEEDED = (
    "mean_score",
    "var_score",
    "log_sum_exp",
    "entropy",
    "max_weight",
    "sum_weights",
    "sum_sq_weights",
    "max_score",
)
# Sums over the rows of a head; `max_logit` is the largest of them.
SUMS = (
    "rows",
    "empty_rows",
    "nan_rows",
    "choice_rows",
    "saturated_rows",
    *MEANS,
    "padding",
    "padding_rows",
)


@dataclass(frozen=True, eq=False)
class Call:
    """Queries and keys as `attend` takes them, with what belongs to them."""

    query: Tensor
    key: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    heads: int | None = None
    """Heads of the model, where those of the query are fewer: single queries of a group lie side by side as queries."""
    within: str = ""
    """The part of the calling module that attends, where that part is not called itself."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores (..., head, query, key) that the model made itself; what is hidden is -inf, or the least of its dtype."""

    scores: Tensor


@torch.no_grad()
def sums_of(call: Call | Scores, real: Tensor | None, saturated_weight: float) -> dict[str, Array]:
    """Sums over the rows of every head, and the largest logit: each (head,).

    Parameters
    ----------
    call : Call or Scores
    real : (batch, token) boolean, True where there is a token; None when nothing is known
    saturated_weight : a row is saturated when its largest weight is at least this
    """
    parts = [_sums(one, asked, real, saturated_weight) for one, asked in _in_blocks(call, real)]
    if len(parts) == 1:
        return parts[0]
    found = {name: np.sum([part[name] for part in parts], axis=0) for name in SUMS}
    return found | {"max_logit": np.max([part["max_logit"] for part in parts], axis=0)}


def _in_blocks(call: Call | Scores, real: Tensor | None) -> Iterator[tuple[Call, Tensor | None]]:
    """A call as it is; scores as biases of calls without scores of their own, a few rows at a time.

    Beside each the rows (batch, 1, query) that are tokens: in self-attention, those that are no padding. None: all.
    """
    if isinstance(call, Call):
        head_axis = call.options.get("head_axis", -3)
        per_head = head_axis == -2 and call.key.ndim >= 4
        lengths = [x.shape[-3 if per_head else -2] for x in (call.query, call.key)]
        packed = call.heads is not None and call.query.ndim >= 4 and call.query.shape[head_axis] != call.heads
        yield call, None if packed else _tokens(real, lengths, call.query)
        return
    scores = call.scores.detach()
    *lead, queries, keys = scores.shape
    step = max(1, _BLOCK // max(1, scores.numel() // max(1, queries)))
    asked = _tokens(real, [queries, keys], scores)
    nothing = scores.new_zeros(()).expand(*lead, keys, 1)
    for start in range(0, queries, step):
        rows = slice(start, min(queries, start + step))
        bias = with_infinity(scores[..., rows, :])
        query = scores.new_zeros(()).expand(*lead, bias.shape[-2], 1)
        yield Call(query, nothing, {"score": "dot", "bias": bias}), None if asked is None else asked[..., rows]


def _tokens(real: Tensor | None, lengths: list[int], like: Tensor) -> Tensor | None:
    fits = real is not None and like.ndim >= 3 and [*real.shape] == [like.shape[0], lengths[0]]
    return real[:, None] if real is not None and fits and lengths[0] == lengths[1] else None


def _sums(call: Call, asked: Tensor | None, real: Tensor | None, saturated_weight: float) -> dict[str, Array]:
    options = dict(call.options)
    head_axis = options.get("head_axis", -3)
    key = call.key.detach()
    marks = _marks(key, head_axis, real)
    value = marks.expand(*key.shape[:-1], marks.shape[-1])
    out, stats = ats.attend(call.query.detach(), key, value, **options, return_stats=True)

    def by_head(x: Tensor) -> Tensor:
        """(batch, head, query)."""
        if head_axis == -2 and x.ndim >= 3:
            x = x.transpose(-1, -2)
        heads = x.shape[-2] if x.ndim >= 3 else 1
        if call.heads is not None and x.ndim >= 3 and call.heads % heads == 0 and x.shape[-1] == call.heads // heads:
            return x.reshape(-1, call.heads, 1)
        lead = x.shape[:-2] if x.ndim >= 3 else x.shape[:-1]
        return x.reshape(math.prod(lead), heads, x.shape[-1])

    fields = [
        by_head(x) for x in (*(getattr(stats, name) for name in _NEEDED), *out.to(stats.entropy.dtype).unbind(-1))
    ]
    # In NumPy from here on: on rows of a few thousand its calls cost a fraction of PyTorch's.
    numbers = [x.numpy() for x in fields] if out.is_cpu else [*torch.stack(fields).cpu().numpy()]
    return _added(numbers, None if asked is None else asked.cpu().numpy(), saturated_weight)


def _added(numbers: list[NDArray[Any]], asked: NDArray[np.bool_] | None, saturated_weight: float) -> dict[str, Array]:
    """Sums over the rows (batch, head, query) of numbers in the order of `_NEEDED`, then first key and padding."""
    mean, variance, total, entropy, weight, weights, squares, top, first, *padding = numbers
    seen = weights > 0
    rows = np.ones_like(seen) if asked is None else np.broadcast_to(asked, seen.shape)
    alive = seen & rows
    broken = np.isnan(weights)
    # One visible key: the whole weight, and no variance. Saturated rows with a choice have a variance.
    choice = alive & ~((variance == 0) & (weight >= 1 - 1e-6))
    # Choosing rows first costs more than all the sums: where all count, as in most models, it is left out.
    everyone = bool(alive.all())

    def summed(x: NDArray[Any]) -> Array:
        return np.asarray((x if everyone else np.where(alive, x, 0)).sum((0, 2), dtype=np.float64))

    count = summed(alive)
    return {
        "rows": count,
        "empty_rows": 0 * count if everyone else (rows & ~seen & ~broken).sum((0, 2), dtype=np.float64),
        "nan_rows": 0 * count if everyone else (rows & broken).sum((0, 2), dtype=np.float64),
        "choice_rows": summed(choice),
        "saturated_rows": summed(choice & (weight >= saturated_weight)),
        "logit_mean": summed(mean),
        "logit_variance": summed(variance),
        "log_sum_exp": summed(total),
        "entropy": summed(entropy),
        "max_weight": summed(weight),
        "effective_keys": summed(np.exp(entropy)),
        "jacobian_trace": summed(weights) - summed(squares),
        "first_key": summed(first),
        "padding": summed(padding[0]) if padding else 0 * count,
        "padding_rows": count if padding else 0 * count,
        "max_logit": (top if everyone else np.where(alive, top, -np.inf))
        .max((0, 2), initial=-np.inf)
        .astype(np.float64),
    }


def _marks(key: Tensor, head_axis: int, real: Tensor | None) -> Tensor:
    """Values whose first feature is 1 on the first key that is a token, and whose second, if any, is 1 on padding."""
    per_head = head_axis == -2 and key.ndim >= 4
    length = key.shape[-3] if per_head else key.shape[-2]
    if real is None or key.ndim < 3 or tuple(real.shape) != (key.shape[0], length):
        first = torch.zeros(length, 1, dtype=key.dtype, device=key.device)
        first[:1] = 1
        return first[:, None] if per_head else first
    real = real.to(key.device)
    first = real & (real.cumsum(-1) == 1)  # behind the padding where that is on the left
    marks = torch.stack([first, ~real], -1).to(key.dtype)  # (batch, key, 2)
    lead = (marks.shape[0], *([1] * (key.ndim - 3)))
    return marks.reshape(*lead[:-1], length, 1, 2) if per_head else marks.reshape(*lead, length, 2)


def sdpa_call(query: Tensor, key: Tensor, given: dict[str, Any]) -> Call:
    """A call of ``F.scaled_dot_product_attention`` with these other arguments."""
    mask = given.get("attn_mask")
    options: dict[str, Any] = {"score": ats.ScaledDot(given.get("scale"))}
    if given.get("is_causal"):
        options["mask"] = ats.Causal(align="top_left")
    if isinstance(mask, CausalBias):
        lower = mask.variant == CausalVariant.LOWER_RIGHT
        options["mask"] = ats.Causal(align="bottom_right" if lower else "top_left")
    elif isinstance(mask, Tensor):
        options |= {"mask": mask.detach()} if mask.dtype == torch.bool else bias_of(mask)
    elif mask is not None:
        raise TypeError(f"a mask of type {type(mask).__name__}")
    return Call(query, key, options)


def bias_of(mask: Tensor) -> dict[str, Any]:
    """A float mask."""
    return {"bias": with_infinity(mask.detach())}


def with_infinity(mask: Tensor) -> Tensor:
    """A model's float mask, or scores with it: where models write the least number of a dtype, they mean -inf."""
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.masked_fill(hidden, -torch.inf) if bool(hidden.logical_and(mask != -torch.inf).any()) else mask


def projected(
    query: Tensor, key: Tensor, dim: int, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any
) -> Call:
    """Queries and keys that a fused function makes inside, made once more. Its masks hide where they are True."""
    options: dict[str, Any] = {"score": "scaled_dot", "head_axis": -2}
    if query.is_nested:
        lens = torch.tensor([len(x) for x in query.unbind()])
        options["mask"] = ats.ValidLens(lens, query_lens=lens)
        query, key = (x.to_padded_tensor(0.0) for x in (query, key))
    q = functional.linear(query, weight[:dim], bias[:dim])
    k = functional.linear(key, weight[dim : 2 * dim], bias[dim : 2 * dim])
    q, k = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k))
    if mask is not None:
        seen = ~mask.to(torch.bool)
        # 0: (query, key); 1: (batch, key); 2: (batch, head, query, key)
        options["mask"] = ats.KeyPadding(seen) if kind == 1 else ats.Dense(seen)
    return Call(q, k, options)


def reason_against(*tensors: Any) -> str | None:
    """Why these cannot be looked at; None when they can."""
    for x in tensors:
        if not isinstance(x, Tensor):
            continue
        if (
            isinstance(x, torch._subclasses.FakeTensor)
            or x.is_meta
            or torch._C._functorch.is_functorch_wrapped_tensor(x)
        ):
            return "traced: its tensors stand for others"
        if x.layout != torch.strided:
            return f"a layout of {x.layout}"
        if not x.is_floating_point():
            return f"tensors of {x.dtype}"
    return None


def described(error: Exception) -> str:
    """One line of what went wrong in looking."""
    kind = "refused" if isinstance(error, AttnscoreError) else type(error).__name__
    return f"{kind}: {' '.join(str(error).split())[:160]}"
