"""PyTorch's attention, argument for argument, computed by `attend`.

- Each name takes and returns the same as its original: shapes, dtypes, order of arguments, polarity of masks,
  parameters and their names, the classes of errors.
- A query that attends to no key gets zeros. With ``strict=True`` it gets NaN where the original gives NaN, and dropout
  drops the weights that the original drops, from the same state of torch's generator.
- Masks stay boolean, and so exact: no array of floats is made of them.
"""

from __future__ import annotations

import math
import numbers
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscore import backends
from attnscore.api import attend
from attnscore.backends.torch import causal_alignment
from attnscore.errors import AttnscoreError, message
from attnscore.masks import Causal, Dense, KeyPadding, Mask
from attnscore.scores import ScaledDot

__all__ = ["MultiheadAttention", "multi_head_attention_forward", "scaled_dot_product_attention"]

# Typed as Any, because torch's stubs lack the private functions of which the original itself is made.
_PRIVATE: Any = F
_OPS = backends.load("torch")
# Types that torch takes for a float and for a bool.
_NUMBER = (numbers.Real, Tensor, torch.SymInt, torch.SymFloat)
_BOOL = (bool, np.bool_, torch.SymBool)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    strict: bool = False,
) -> Tensor:
    """Attention pooling with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    out_i = sum_j softmax_j(scale q_i . k_j + m_ij) v_j, in memory linear in the lengths.

    Parameters
    ----------
    query : Tensor (..., heads, query, dim)
    key : Tensor (..., heads, key, dim)
    value : Tensor (..., heads, key, value_dim)
        The leading axes broadcast.
    attn_mask : Tensor broadcastable to (..., query, key), optional
        Boolean, True = may attend, or floats that are added to the scores, or a ``torch.nn.attention.bias.CausalBias``.
    dropout_p : float
        Probability of dropping a weight, in training or not. The original drops other weights.
    is_causal : bool
        Query i attends to the keys j <= i, whatever the lengths. Not with `attn_mask`.
    scale : float, optional
        None: 1/sqrt(dim).
    enable_gqa : bool
        Key and value may have fewer heads; each number has to divide the number of query heads.
    strict : bool
        With dropout, drop the weights that the original drops for the same seed, which takes O(n^2) memory, as there.

    Returns
    -------
    Tensor (..., heads, query, value_dim)

    Raises
    ------
    RuntimeError, TypeError, ValueError, IndexError
        As the original, for arguments that do not fit each other.

    References
    ----------
    ``torch.nn.functional.scaled_dot_product_attention``, PyTorch 2.13.

    Examples
    --------
    >>> import torch
    >>> query, key, value = (torch.randn(2, 4, n, 8) for n in (5, 6, 6))
    >>> out = scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> torch.allclose(out, theirs, atol=1e-6)
    True
    """
    for name, x, kind in (
        ("query", query, Tensor), ("key", key, Tensor), ("value", value, Tensor),
        ("attn_mask", attn_mask, (Tensor, type(None))), ("dropout_p", dropout_p, _NUMBER),
        ("is_causal", is_causal, _BOOL), ("scale", scale, (*_NUMBER, type(None))), ("enable_gqa", enable_gqa, _BOOL),
    ):  # fmt: skip
        if not isinstance(x, kind):
            raise TypeError(message(name, "the type that torch takes", type(x).__name__))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "strict": strict}
    if query.is_nested or key.is_nested or value.is_nested:
        _check_nested(query, key, value, attn_mask)
        ragged = _OPS.ragged(query)
        differs_in_length = ragged is not None and ragged.axis == -2
        if differs_in_length and not enable_gqa:
            _check_heads_of_jagged(query, key, value)
        if not differs_in_length or (strict and dropout_p > 0):
            # `attend` takes jagged tensors whose lengths differ, without weights; others go sequence by sequence.
            sequences = zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
            outs = [scaled_dot_product_attention(*x, None, dropout_p, is_causal, **options) for x in sequences]
            if differs_in_length:
                # A jagged tensor is made of sequences whose first axis differs.
                swapped = [x.transpose(0, -2) for x in outs]
                return torch.nested.as_nested_tensor(swapped, layout=query.layout).transpose(1, -2)
            return torch.nested.as_nested_tensor(outs, layout=query.layout)
    elif enable_gqa:
        _check_heads(query, key, value)
        if query.dim() == 3:
            # Three axes are (batch, length, dim) to `attend`.
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
            return out.squeeze(0)
        # `attend` takes fewer heads, the same number of key and of value; the product with weights takes all.
        heads = query.shape[-3] if strict else math.lcm(key.shape[-3], value.shape[-3])
        key, value = (
            x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value)
        )
    mask: Mask | None = Causal(align="top_left") if is_causal else None
    bias: Tensor | None = None
    if (alignment := causal_alignment(attn_mask)) is not None:
        if is_causal:
            raise ValueError(message("is_causal", "False: CausalBias should not be used with causal=True", "True"))
        mask = Causal(align=alignment)
    elif attn_mask is not None and is_causal:
        hint = "Explicit attn_mask should not be set when is_causal=True"
        raise RuntimeError(message("attn_mask", "None with is_causal=True", "a tensor", hint=hint))
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        # With all axes: to `attend`, two could be (batch, key).
        mask = Dense(attn_mask[(None,) * (max(query.dim(), key.dim()) - attn_mask.dim())])
    elif attn_mask is not None:
        _check_mask_dtype("attn_mask", attn_mask.dtype, query, torch.float32)
        bias = attn_mask
    if not query.is_nested:
        _check_broadcast(query, key, value, attn_mask, enable_gqa)
    with_weights = strict and dropout_p > 0
    return _attend(query, key, value, dropout_p, with_weights, score=ScaledDot(scale), mask=mask, bias=bias)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, with_weights: bool, *, nan: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the output of `attend`, and `with_weights` the weights after dropout.

    Errors get the class that torch raises. With the weights the whole matrix is in memory, so torch's own dropout drops
    them, as in the original, and a query that attends to no key can get NaN (`nan`).
    """
    drops_all = dropout == 1.0
    try:
        rate = 0.0 if drops_all or with_weights else dropout
        result = attend(query, key, value, dropout=rate, return_weights=with_weights, **options)
    except AttnscoreError as error:
        raise RuntimeError(str(error)) from error
    if not with_weights:
        # Zeros with a gradient of zero: `attend` takes less than 1, as the weights kept are divided by 1 - dropout.
        return (result * 0.0 if drops_all else result), None
    out, weights = result
    if nan and weights.shape[-1]:
        is_empty = (weights == 0).all(-1, keepdim=True)
        out, weights = (x.masked_fill(is_empty, torch.nan) for x in (out, weights))
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
        out = weights @ value
    return out, weights


def _check_nested(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise, as the original, for nested tensors together with others, or with a mask."""
    is_jagged = any(x.is_nested and x.layout == torch.jagged for x in (query, key, value))
    kind = ValueError if is_jagged else RuntimeError
    if not query.is_nested == key.is_nested == value.is_nested:
        expected = "nested tensors, or none of them"
        raise kind(message("query, key, value", expected, f"{query.is_nested}, {key.is_nested}, {value.is_nested}"))
    if mask is not None:
        hint = "nested tensors are not supported when an explicit attn_mask is set"
        raise kind(message("attn_mask", "None, as query is nested", "a tensor", hint=hint))


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise, as the original, unless the numbers of heads of key and of value divide the query's."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise IndexError(message(name, "an axis of heads, -3, with enable_gqa=True", tuple(x.shape)))
        heads, query_heads = x.shape[-3], query.shape[-3]
        if heads != query_heads and (heads == 0 or query_heads % heads):
            raise RuntimeError(message(name, f"a number of heads that divides the {query_heads} of query", heads))


def _check_heads_of_jagged(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise, as the original, for heads that differ and do not broadcast; `attend` would group them."""
    heads = [x.shape[-3] for x in (query, key, value) if x.dim() >= 4]
    if len({*heads} - {1}) > 1:
        hint = "enable_gqa=True takes fewer heads of key and value"
        raise RuntimeError(message("query, key, value", "one number of heads, or 1", heads, hint=hint))


def _check_mask_dtype(name: str, dtype: torch.dtype, query: Tensor, *others: torch.dtype) -> None:
    """Raise RuntimeError, as the original, unless an added mask has the dtype of the query or one of `others`."""
    # Autocast gives both one dtype, but for float64.
    is_cast = _OPS.has_autocast(query) and dtype.is_floating_point and dtype != torch.float64
    if dtype not in (query.dtype, *others) and not is_cast:
        expected = " or ".join(dict.fromkeys(map(str, (torch.bool, *others, query.dtype))))
        raise RuntimeError(message(name, f"dtype {expected}", dtype))


def _check_broadcast(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
    """Raise RuntimeError for shapes that mean something to `attend` alone: fewer heads, a bias for each distance."""
    leads = [x.shape[: -3 if enable_gqa else -2] for x in (query, key, value)]
    if not leads[0] == leads[1] == leads[2]:
        try:
            torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]  # untyped in torch
        except RuntimeError as error:
            got = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            hint = None if enable_gqa else "enable_gqa=True takes fewer heads of key and value"
            raise RuntimeError(message("query, key, value", "leading axes that broadcast", got, hint=hint)) from error
    if mask is not None and mask.dim() and mask.shape[-1] not in (1, key.shape[-2]):
        expected = f"a shape that broadcasts to (..., {query.shape[-2]}, {key.shape[-2]})"
        raise RuntimeError(message("attn_mask", expected, tuple(mask.shape)))


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    strict: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Multi-head attention with the signature of ``torch.nn.functional.multi_head_attention_forward``.

    W_o concat_h(pool_h) + b_o, where head h pools W_v v + b_v by the scaled dot product of W_q q + b_q and W_k k + b_k.

    Parameters
    ----------
    query : Tensor (query, batch, embed_dim) or (query, embed_dim)
    key : Tensor (key, batch, kdim) or (key, kdim)
    value : Tensor (key, batch, vdim) or (key, vdim)
    key_padding_mask : Tensor (batch, key) or (key,), optional
        Boolean, True = ignore the key, or floats that are added to the scores.
    need_weights : bool
        Return the weights too. With False, memory is linear in the lengths.
    attn_mask : Tensor (query, key) or (batch * num_heads, query, key), optional
        Boolean, True = ignore the pair, or floats that are added to the scores.
    is_causal : bool
        Says that `attn_mask` is causal; it is then not read if it is the only mask and no weights are requested.
    strict : bool
        With `need_weights`, a query that attends to no key gets weights and output of NaN, as from the original.
        Without, dropout drops the weights that the original drops, which takes O(n^2) memory, as there.
    others
        As the original takes them.

    Returns
    -------
    out : Tensor, of the shape of query
    weights : Tensor (batch, query, key) or (batch, num_heads, query, key), after dropout; None without `need_weights`
        Without the batch axis where query has none. `bias_k` and `add_zero_attn` add a key each.

    Raises
    ------
    AssertionError, RuntimeError
        As the original, for shapes and dtypes that do not fit.

    References
    ----------
    ``torch.nn.functional.multi_head_attention_forward``, PyTorch 2.13.

    Examples
    --------
    >>> import torch
    >>> x, weight = torch.randn(5, 3, 8), torch.randn(24, 8)
    >>> options = (8, 2, weight, None, None, None, False, 0.0, torch.eye(8), None)
    >>> out, weights = multi_head_attention_forward(x, x, x, *options)
    >>> theirs = torch.nn.functional.multi_head_attention_forward(x, x, x, *options)
    >>> torch.allclose(out, theirs[0], atol=1e-4), torch.allclose(weights, theirs[1], atol=1e-4)
    (True, True)
    """
    # The shapes are checked by the original's own functions, and projected by them: the same errors, the same numbers.
    is_batched = _PRIVATE._mha_shape_check(query, key, value, key_padding_mask, attn_mask, num_heads)
    if not is_batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    query_len, batch, _ = query.shape
    _check_sizes(query, key, value, embed_dim_to_check, num_heads, agreeing=2 if use_separate_proj_weight else 3)
    if (bias_k is None) != (bias_v is None):
        raise AssertionError(message("bias_k, bias_v", "both or neither", "one of them"))
    for name, static in (("key", static_k), ("value", static_v)):
        if bias_k is not None and static is not None:
            hint = f"bias cannot be added to static {name}."
            raise AssertionError(message(f"bias_{name[0]}", f"None with static_{name[0]}", "a tensor", hint=hint))
    _check_dtypes(key_padding_mask, attn_mask)
    if is_causal and attn_mask is None:
        raise RuntimeError(message("attn_mask", "the causal mask, as is_causal is only a hint", "None"))

    if use_separate_proj_weight:
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = _PRIVATE._in_projection(query, key, value, q_proj_weight, k_proj_weight, v_proj_weight, *biases)
    else:
        q, k, v = _PRIVATE._in_projection_packed(query, key, value, in_proj_weight, in_proj_bias)
    q = _split_heads(q, num_heads)
    k = _key_heads(k, num_heads, bias_k, static_k, add_zero_attn)
    v = _key_heads(v, num_heads, bias_v, static_v, add_zero_attn)
    extra_keys = int(add_zero_attn) + (bias_k is not None)

    if is_causal and key_padding_mask is None and not need_weights:
        mask: Mask | None = Causal(align="top_left")
        bias: Tensor | None = None
    else:
        shape = (batch, num_heads, query_len, key.shape[0])
        # As in the original: padding covers the keys of `static_k`, where it is given.
        mask, bias = _mask_and_bias(key_padding_mask, attn_mask, shape, k.shape[2] - extra_keys, extra_keys)
        dtypes = [q.dtype if x.dtype == torch.bool else x.dtype for x in (key_padding_mask, attn_mask) if x is not None]
        if dtypes:
            both = reduce(torch.promote_types, dtypes)
            _check_mask_dtype("key_padding_mask, attn_mask", both, q, *(() if need_weights else (torch.float32,)))
    dropout_p = dropout_p if training else 0.0
    with_weights = bool(need_weights or (strict and dropout_p > 0))
    out, weights = _attend(q, k, v, dropout_p, with_weights, nan=strict and need_weights, mask=mask, bias=bias)

    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    weights = None if weights is None or not need_weights else weights.mean(1) if average_attn_weights else weights
    if is_batched:
        return out, weights
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


def _key_heads(x: Tensor, num_heads: int, bias: Tensor | None, static: Tensor | None, add_zero_attn: bool) -> Tensor:
    """Return projected keys or values as (batch, head, key, dim), with the additional ones: learned, and zero."""
    batch = x.shape[1]
    x = x if bias is None else torch.cat([x, bias.expand(1, batch, -1)])
    x = _split_heads(x, num_heads) if static is None else torch.unflatten(static, 0, (batch, num_heads))
    return F.pad(x, (0, 0, 0, 1)) if add_zero_attn else x


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return (length, batch, embed_dim) as (batch, head, length, dim)."""
    return torch.unflatten(x, -1, (num_heads, -1)).permute(1, 2, 0, 3)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, *, agreeing: int) -> None:
    """Raise, as the original, unless the sizes agree; key and value agree on `agreeing` first axes."""
    if query.shape[-1] != embed_dim:
        raise AssertionError(message("query", f"embedding dimension of {embed_dim}", query.shape[-1]))
    if embed_dim % num_heads:
        raise AssertionError(message("num_heads", f"a divisor of the embedding dimension {embed_dim}", num_heads))
    if key.shape[:agreeing] != value.shape[:agreeing]:
        raise AssertionError(message("value", f"the shape of key, {tuple(key.shape)}", tuple(value.shape)))
    if key.shape[1] != query.shape[1]:
        raise RuntimeError(message("key", f"the batch of query, {query.shape[1]}", key.shape[1]))


def _check_dtypes(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    """Warn, as the original, of masks of two dtypes, and raise AssertionError for integers."""
    # The original makes floats of the masks: of none of their elements here.
    padding, pairs = (None if x is None else x.new_empty(0) for x in (key_padding_mask, attn_mask))
    _PRIVATE._canonical_mask(
        padding, "key_padding_mask", None if pairs is None else pairs.dtype, "attn_mask", torch.float32
    )
    _PRIVATE._canonical_mask(pairs, "attn_mask", None, "", torch.float32)


def _mask_and_bias(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    padded_len: int,
    extra_keys: int,
) -> tuple[Mask | None, Tensor | None]:
    """Return the mask and the bias of `attend` for both masks, extended by `extra_keys` unmasked keys.

    `shape` is (batch, head, query, key) without these, and `padded_len` the number of keys of `key_padding_mask`.
    """
    batch, heads, query_len, key_len = shape
    mask: Mask | None = None
    bias: Tensor | None = None
    if attn_mask is not None:
        expected = (query_len, key_len) if attn_mask.dim() == 2 else (batch * heads, query_len, key_len)
        if tuple(attn_mask.shape) != expected:
            raise RuntimeError(message("attn_mask", f"shape {expected}", tuple(attn_mask.shape)))
        pairs = F.pad(attn_mask, (0, extra_keys)) if extra_keys else attn_mask
        pairs = pairs[None, None] if pairs.dim() == 2 else torch.unflatten(pairs, 0, (batch, heads))
        mask, bias = (Dense(~pairs), None) if pairs.dtype == torch.bool else (None, pairs)
    if key_padding_mask is not None:
        if (got := tuple(key_padding_mask.shape)) != (batch, padded_len):
            raise AssertionError(message("key_padding_mask", f"shape {(batch, padded_len)}", got))
        keys = F.pad(key_padding_mask, (0, extra_keys)) if extra_keys else key_padding_mask
        if keys.dtype == torch.bool:
            mask = KeyPadding(~keys) if mask is None else mask & KeyPadding(~keys)
        else:
            bias = keys[:, None, None] if bias is None else bias + keys[:, None, None]
    return mask, bias


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with its forward pass by `attend`: a subclass, with the same parameters.

    W_o concat_h(pool_h) + b_o, where head h pools W_v v + b_v by the scaled dot product of W_q q + b_q and W_k k + b_k.

    Parameters
    ----------
    strict : bool
        A query that attends to no key gives NaN, not zeros, where the original returns weights; see
        `multi_head_attention_forward`.
    others
        As the original takes them.

    Raises
    ------
    ValueError, AssertionError
        As the original, for sizes that are not positive or do not divide.

    References
    ----------
    ``torch.nn.MultiheadAttention``, PyTorch 2.13.

    Examples
    --------
    The parameters have the names of the original, so its ``state_dict`` loads, and the other way round:

    >>> import torch
    >>> ours, theirs = MultiheadAttention(8, 2, batch_first=True), torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [2], [3]])
    >>> out, weights = ours(x, x, x, key_padding_mask=padding)
    >>> torch.allclose(out, theirs(x, x, x, key_padding_mask=padding)[0], atol=1e-6), weights.shape
    (True, torch.Size([3, 5, 5]))
    """

    # A class attribute too: a module of the original becomes one of these when its __class__ is set.
    strict: bool = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.strict = strict

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights; the output (batch, length, features) with `batch_first`."""
        if query.is_nested or key.is_nested or value.is_nested:
            # The original takes them in its fused inference alone, and says why elsewhere.
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        swaps = self.batch_first and query.dim() == 3
        if swaps:
            # One view of one tensor: self-attention is projected at once.
            views = {id(x): x.transpose(0, 1) for x in (query, key, value)}
            query, key, value = (views[id(x)] for x in (query, key, value))
        out, weights = multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            strict=self.strict,
        )
        return out.transpose(0, 1) if swaps else out, weights
