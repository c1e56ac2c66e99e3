"""`attend` in the place of torch's scaled_dot_product_attention: the same arguments, outputs and gradients.

Then it shows what differs: NaN in a masked value does not propagate, and weights and statistics come on request.
"""

import torch
import torch.nn.functional as F

import attnscore as ats


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The signature of torch's function on top of `attend`; GQA needs no flag here."""
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    bias, mask = (attn_mask, None) if is_bias else (None, attn_mask)
    if is_causal:
        causal = ats.Causal(align="top_left")
        mask = causal if mask is None else causal & ats.Dense(mask)
    return ats.attend(query, key, value, score=ats.ScaledDot(scale), mask=mask, bias=bias, dropout=dropout_p)


def gradients(function, arrays, **options):
    """Return the output, and the gradients of the sum of squares of the output."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    out = function(*leaves, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


torch.manual_seed(0)
full = [torch.randn(2, 8, n, 32) for n in (96, 128, 128)]
grouped = [full[0], full[1][:, :2], full[2][:, :2]]
cases = {
    "plain": (full, {}),
    "causal": (full, {"is_causal": True}),
    "scale": (full, {"scale": 0.5}),
    "boolean mask": (full, {"attn_mask": torch.rand(96, 128) < 0.7}),
    "both masks": (full, {"attn_mask": torch.rand(96, 128) < 0.7, "is_causal": True}),
    "additive mask": (full, {"attn_mask": torch.randn(8, 96, 128)}),
    "2 KV heads for 8": (grouped, {"enable_gqa": True}),
}
for name, (arrays, options) in cases.items():
    ours, theirs = gradients(sdpa, arrays, **options), gradients(F.scaled_dot_product_attention, arrays, **options)
    largest = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    print(f"{name:<20} agrees in output and gradients: {largest < 1e-5}")

full[2][..., -1, :] = torch.nan  # masked for all 96 queries by the causal mask; a weight of 0 alone would propagate it
for function in (F.scaled_dot_product_attention, sdpa):
    bad = function(*full, is_causal=True).isnan().any(-1)[0, 0].sum()
    print(f"{function.__name__:<30} queries with NaN from a masked value: {int(bad)} of 96")
_, stats = ats.attend(*full, mask=ats.Causal(align="top_left"), return_stats=("entropy",))
print("effective keys of the first and the last query:", stats.effective_keys()[0, 0, [0, -1]].numpy().round(2))
