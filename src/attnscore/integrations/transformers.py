"""Attention of Hugging Face transformers models computed by `attend`.

- `register` makes a name that every model built on transformers' attention interface accepts, as in
  ``AutoModel.from_pretrained(..., attn_implementation="attnscore")``.
- The mask function is registered under the same name: without one, transformers drops every mask silently.
- Masks stay objects (`transformers_masks`): no array of queries by keys is made for them.
- Scale, grouped heads, dropout in training, causal flag, soft cap, sinks and position biases are honoured;
  an unsupported option that would change the result raises an error.
"""

from __future__ import annotations

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
        arguments = dict(self.inputs)
        query, key = arguments.pop("query"), arguments.pop("key")
        weights: Tensor = ats.attention_weights(query, key, **arguments)
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
        text = message("transformers", "version 5 or later", "none here", hint=hint)
        raise FrameworkError(text) from error

    def forward(*arguments: Any, **options: Any) -> Any:
        return attention_forward(*arguments, observer=observer, **options)

    AttentionInterface.register(name, forward)
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
    """Compute one attention layer, as transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; its `training` flag decides about dropout.
    query : Tensor (batch, head, query, dim)
    key : Tensor (batch, key_head, key, dim)
        The heads of key and value may be fewer.
    value : Tensor (batch, key_head, key, value_dim)
    attention_mask : Mask, boolean Tensor (True: may attend), float Tensor (added to the scores) or None
        A `StructuredMask` counts as the object that it holds.
    scaling : float, optional
        Factor of the scores; None: 1/sqrt(dim).
    dropout : float
        Probability, used in training only.
    is_causal : bool, optional
        Applies when there is no mask. None: every key, as in eager attention. Causal layers get a mask, and the
        module's flag is wrong in some models (Align, BridgeTower).
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    s_aux : Tensor (head,), optional
        Sinks: a further logit per head without a value.
    position_bias : Tensor, optional
        Added to the scores.
    cu_seq_lens_q, cu_seq_lens_k : Tensor (sequences + 1,), optional
        Cumulative lengths of a flattened batch: queries attend to the keys of their own sequence.
    indices : Tensor (batch, query, selected), optional
        Keys that each query attends, of those that the mask leaves.
    output_attentions : bool, optional
        Return the weights too.
    observer : callable, optional
        Called with an `AttentionCall`.
    **others
        What other implementations need; an option that would change the result is refused.

    Returns
    -------
    (Tensor (batch, query, head, value_dim), Tensor (batch, head, query, key) or None)

    Raises
    ------
    ArgumentError
        An option that is not supported, or cumulative lengths of more than one row.
    """
    for option in _UNSUPPORTED:
        if others.get(option) is not None:
            expected, hint = "None; attnscore does not support it", 'model.set_attn_implementation("eager")'
            raise ArgumentError(message(option, expected, type(others[option]).__name__, hint=hint))
    score = ats.ScaledDot(scaling)
    packed = None if cu_seq_lens_q is None else _packed(query, cu_seq_lens_q, cu_seq_lens_k)
    mask, bias = _mask_and_bias(query, attention_mask, is_causal, position_bias, packed)
    if indices is not None:
        mask = _both(_selected(indices, key.shape[-2]), mask)
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


def _packed(query: Tensor, cu_query: Tensor, cu_key: Tensor | None) -> ats.Packed:
    """Return the mask of a flattened batch."""
    if query.shape[0] != 1:
        expected = "a batch of one row, in which the sequences follow one another"
        raise ArgumentError(message("cu_seq_lens_q", expected, f"{query.shape[0]} rows"))
    return ats.Packed(cu_query, None if cu_key is cu_query else cu_key)


def _selected(indices: Tensor, keys: int) -> ats.Dense:
    """Return the mask of the keys that each query selects."""
    none = indices.new_zeros((*indices.shape[:-1], keys), dtype=torch.bool)
    return ats.Dense(none.scatter(-1, indices.long(), True).unsqueeze(1))


def _both(first: Mask, second: Mask | Tensor | None) -> Mask:
    """Return the conjunction of two masks."""
    return first if second is None else first & (second if isinstance(second, Mask) else ats.Dense(second))


def _mask_and_bias(
    query: Tensor,
    mask: Mask | Tensor | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
    packed: ats.Packed | None,
) -> tuple[Mask | Tensor | None, Tensor | None]:
    if packed is not None and mask is not None:
        mask, bias = _mask_and_bias(query, mask, is_causal, position_bias, None)
        return _both(packed, mask), bias
    if mask is None:
        if packed is not None:
            # As FlashAttention aligns sequences.
            return packed.causal("bottom_right") if is_causal else packed, position_bias
        # One query is a decoding step and attends to all keys; else transformers' functions align at the top left.
        return ats.Causal(align="top_left") if is_causal and query.shape[-2] > 1 else None, position_bias
    if isinstance(mask, StructuredMask):
        return mask.structure, position_bias
    if isinstance(mask, Mask):
        return mask, position_bias
    if mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1:
        # One mask for all queries: most often an interval, behind which a cache of fixed size is empty.
        return ats.KeyPadding(mask[:, 0, 0]), position_bias
    if not mask.is_floating_point():
        return mask, position_bias
    return None, mask if position_bias is None else mask + position_bias
