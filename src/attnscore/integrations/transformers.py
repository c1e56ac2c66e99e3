"""Attention of Hugging Face transformers models computed by `attend`.

- `register` makes a name that every model built on transformers' attention interface accepts, as in
  ``AutoModel.from_pretrained(..., attn_implementation="attnscore")``.
- The mask function is registered under the same name: without one, transformers drops every mask silently.
- Masks stay objects (`transformers_masks`): no array of queries by keys is made for them.
- Scale, grouped heads, dropout in training, causal flag, soft cap, sinks and position biases are honoured;
  an unsupported option that would change the result raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attnscore as ats
from attnscore.errors import ArgumentError, FrameworkError, message
from attnscore.integrations.transformers_masks import StructuredMask, attention_mask
from attnscore.masks import Mask

# Each of these selects or moves keys, or changes the normalisation; ignoring one would be a wrong result.
_UNSUPPORTED = ("cache", "block_indices", "sinks")
# transformers searches a name for these words and would choose another implementation.
_TAKEN = ("eager", "sdpa", "flash", "flex", "paged|", "/")


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Statistics and inputs of one attention layer in one forward pass.

    Attributes
    ----------
    module : torch.nn.Module
        The layer.
    layer : int or None
        Its ``layer_idx``, where the model sets one.
    stats : AttentionStats
        Statistics of every query, each (batch, head, query).
    inputs : dict
        Inputs of the weights: query and key (batch, head, length, dim), score, mask, bias, sink.
    """

    module: Any
    layer: int | None
    stats: ats.AttentionStats
    inputs: dict[str, Any] = field(repr=False)

    def weights(self, batch: int | None = None) -> Tensor:
        """Return the weights (batch, head, query, key), computed now, before dropout.

        Parameters
        ----------
        batch : int, optional
            Index into the batch; None: all.
        """
        weights: Tensor = ats.attention_weights(**self.inputs)
        return weights if batch is None else weights[batch]


Observer = Callable[[AttentionCall], None]


def register(name: str = "attnscore", *, observer: Observer | None = None) -> str:
    """Register `attend` with transformers as an attention implementation.

    Parameters
    ----------
    name : str
        Name to pass as ``attn_implementation``. Registering a name again replaces it.
    observer : callable, optional
        Called after each attention layer with an `AttentionCall`: statistics come from the same pass as the
        result, weights are computed on request.

    Returns
    -------
    str
        The name.

    Raises
    ------
    ArgumentError
        A name that transformers would take for one of its own implementations.
    FrameworkError
        transformers is not installed.

    Examples
    --------
    >>> from transformers import AutoModel  # doctest: +SKIP
    >>> model = AutoModel.from_pretrained("path", attn_implementation=register())  # doctest: +SKIP
    """
    if any(word in name for word in _TAKEN):
        raise ArgumentError(message("name", f"a name without any of {', '.join(_TAKEN)}", repr(name)))
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        hint = "pip install 'attnscore[demo]'"
        raise FrameworkError(message("transformers", "version 5.15 or later", "none here", hint=hint)) from error

    AttentionInterface.register(name, functools.partial(attention_forward, observer=observer))
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = False,
    observer: Observer | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (batch, query, head, value_dim) of one attention layer, as transformers calls it, and weights.

    Query, key and value are (batch, head, length, dim), with as many heads or fewer of key and value.

    - `attention_mask` is a mask object, a boolean tensor (True: may attend) or a float one, which is added to the
      scores. Where it is None, `is_causal` decides, and None is False: causal layers get a mask, and the module's
      own flag is wrong in some models (Align, BridgeTower).
    - `s_aux` are sinks: a further logit per head (head,) without a value.
    - `cu_seq_lens_q` and `cu_seq_lens_k` are cumulative lengths of a flattened batch of one row, whose queries attend
      to the keys of their own sequence.
    - `indices` (batch, query, selected) are the keys that each query attends to, of those that the mask leaves.
    - `dropout` comes from a module in training. A value of `others` that would change the result is an ArgumentError.
    """
    for option in _UNSUPPORTED:
        if others.get(option) is not None:
            expected, hint = "None; attnscore does not support it", 'model.set_attn_implementation("eager")'
            raise ArgumentError(message(option, expected, type(others[option]).__name__, hint=hint))
    score = _scaled_dot(scaling) if type(scaling) is float else ats.ScaledDot(scaling)
    packed: ats.Packed | None = None
    mask: Mask | Tensor | None
    if cu_seq_lens_q is not None:
        if query.shape[0] != 1:
            expected = "a batch of one row, in which the sequences follow one another"
            raise ArgumentError(message("cu_seq_lens_q", expected, f"{query.shape[0]} rows"))
        packed = ats.Packed(cu_seq_lens_q, None if cu_seq_lens_k is cu_seq_lens_q else cu_seq_lens_k)
    if packed is not None and attention_mask is None:
        # As FlashAttention aligns sequences.
        mask, bias = packed.causal("bottom_right") if is_causal else packed, position_bias
    else:
        mask, bias = _mask_and_bias(query, attention_mask, is_causal, position_bias)
        mask = mask if packed is None else _both(packed, mask)
    if indices is not None:
        none = indices.new_zeros((*indices.shape[:-1], key.shape[-2]), dtype=torch.bool)
        mask = _both(ats.Dense(none.scatter(-1, indices.long(), True).unsqueeze(1)), mask)
    shared: dict[str, Any] = {
        "score": ats.SoftCap(score, softcap) if softcap is not None else score,
        "mask": mask,
        "bias": bias,
        "sink": s_aux,
    }
    result = ats.attend(
        query,
        key,
        value,
        **shared,
        dropout=dropout if module.training else 0.0,
        return_weights=bool(output_attentions),
        return_stats=observer is not None,
    )
    out, *more = result if isinstance(result, tuple) else (result,)
    if observer is not None:
        layer = getattr(module, "layer_idx", None)
        observer(AttentionCall(module, layer, more[-1], {"query": query, "key": key, **shared}))
    return out.transpose(1, 2).contiguous(), more[0] if output_attentions else None


# Making one took a decoding step of a small model 3% of its time.
_scaled_dot = functools.lru_cache(maxsize=64)(ats.ScaledDot)


def _both(first: Mask, second: Mask | Tensor | None) -> Mask:
    """Return the conjunction of two masks."""
    return first if second is None else first & (second if isinstance(second, Mask) else ats.Dense(second))


def _mask_and_bias(
    query: Tensor, mask: Mask | Tensor | None, is_causal: bool | None, position_bias: Tensor | None
) -> tuple[Mask | Tensor | None, Tensor | None]:
    """Return the mask and the bias of `attend` for a layer's mask, which may be an array of numbers to add."""
    if mask is None:
        # One query is a decoding step and attends to all keys; else transformers' functions align at the top left.
        return ats.Causal(align="top_left") if is_causal and query.shape[-2] > 1 else None, position_bias
    if isinstance(mask, StructuredMask):
        return mask.structure, position_bias
    if isinstance(mask, Mask):
        return mask, position_bias
    if mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1:
        # One mask for all queries. Behind its interval a cache of fixed size is empty, and is not to be read; without
        # such an end, a plan reads the mask at each call, whatever its values are.
        return mask if bool(mask[..., -1].all()) else ats.KeyPadding(mask[:, 0, 0]), position_bias
    if not mask.is_floating_point():
        return mask, position_bias
    return None, mask if position_bias is None else mask + position_bias
