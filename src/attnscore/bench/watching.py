"""The price of watching: PyTorch's own attention in a model that is watched, every step, against the same unwatched.

What this module meets:
- the model computes the attention of the case, so that its result is compared as that of any other side;
- a layer with projections has identities for weights: they cost what others do;
- the wrappers of the watch are there while both sides run, as they are on the steps of a training run that are not
  looked at; what the other side pays for them is a test for each module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscore.bench.inputs import Inputs


def model_run(inputs: Inputs, *, is_watched: bool) -> Callable[[], Any]:
    """A call of the model of a case, without gradients."""
    import torch
    from torch import nn

    from attnscore.diagnostics import watch

    case, arrays = inputs.case, (inputs.query, inputs.key, inputs.value)
    causal = case.mask == "causal"

    class Function(nn.Module):
        """`scaled_dot_product_attention` alone."""

        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    class Layer(nn.Module):
        """A whole layer of attention, with its projections, in its own layout (batch, token, head * dim)."""

        def __init__(self) -> None:
            super().__init__()
            heads, width = case.sizes["heads"], case.sizes["heads"] * case.sizes["dim"]
            self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
            same = torch.eye(width)
            self.load_state_dict({"attention.in_proj_weight": torch.cat([same] * 3), "attention.out_proj.weight": same})
            self.hidden = nn.Transformer.generate_square_subsequent_mask(case.sizes["keys"]) if causal else None

        def forward(self, *arrays: Any) -> Any:
            out, _ = self.attention(*arrays, need_weights=False, attn_mask=self.hidden, is_causal=causal)
            return out

    layer = case.watched == "layer"
    model = (Layer() if layer else Function()).eval()
    if layer:
        arrays = tuple(x.transpose(1, 2).flatten(2) for x in arrays)

    def run() -> Any:
        with torch.no_grad():
            return model(*arrays)

    if is_watched:  # for as long as this side is kept
        weakref.finalize(run, watch(model).start().stop)
    return run


def as_heads(inputs: Inputs, out: Any) -> Any:
    """What the model gave, in the layout of the case."""
    return out.unflatten(-1, (inputs.case.sizes["heads"], -1)).transpose(1, 2) if out.ndim == 3 else out
