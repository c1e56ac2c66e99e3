"""The oracle: attention by the textbook, dense and loop-free, from the formulas alone. Nothing of attnscore is used.

The formulas are written once, in the methods that torch tensors and ``autodiff.Var`` share. In torch, in the inputs'
own dtype, they are the plain version that errors are compared with; on Var, one precision higher, the reference.
Inputs lie as (..., head, query | key, dim); keys have been given to every query head by ``spread``.
"""

from __future__ import annotations

import math

NEG_INF = float("-inf")


# ---------------------------------------------------------------- scores


def turned(x):
    return x.transpose(-1, -2)


def per_head(x, axes):
    """A parameter with `axes` axes of its own, or one set per head, beside (..., head, query, key)."""
    if not hasattr(x, "shape") or len(x.shape) == axes:
        return x
    heads, *own = x.shape
    return x.reshape(heads, *(1,) * (2 - axes), *own)


def dot(q, k):
    return q @ turned(k)


def scaled_dot(q, k, scale=None):
    s = q @ turned(k)
    if scale is None:
        return s * (1 / math.sqrt(q.shape[-1]))
    if hasattr(scale, "shape") and len(scale.shape) == 1:
        scale = scale.reshape(-1, 1, 1)
    return s * scale


ACTIVATIONS = {
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: x.where(x > 0, 0),
    "leaky_relu": lambda x, slope=0.01: x.where(x > 0, 0) + (slope * x).where(~(x > 0), 0),
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: 0.5 * x * (1 + (x * math.sqrt(0.5)).erf()),
}


def hidden(q, k, W_q=None, W_k=None, bias=None):
    a = q if W_q is None else q @ turned(W_q)
    b = k if W_k is None else k @ turned(W_k)
    if bias is not None:
        a = a + (bias if len(bias.shape) == 1 else bias.unsqueeze(-2))
    return a.unsqueeze(-2) + b.unsqueeze(-3)


def additive(q, k, w_v, W_q=None, W_k=None, bias=None, activation=ACTIVATIONS["tanh"]):
    w_v = w_v if len(w_v.shape) == 1 else w_v.unsqueeze(-2).unsqueeze(-2)
    return (activation(hidden(q, k, W_q, W_k, bias)) * w_v).sum(-1)


def bilinear(q, k, W):
    return q @ W @ turned(k)


def gaussian(q, k, bandwidth=1.0):
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    if hasattr(bandwidth, "shape"):
        bandwidth = bandwidth.reshape(-1, 1, 1)
    return -(difference * difference).sum(-1) / (2 * bandwidth * bandwidth)


def gaussian_by_dim(q, k, bandwidth):
    """With a bandwidth for each dimension, (1, d) or (heads, d)."""
    bandwidth = bandwidth.unsqueeze(-2)
    return gaussian(q / bandwidth, k / bandwidth)


def unit(x):
    square = (x * x).sum(-1, keepdim=True)
    alive = square > 0
    length = square.where(alive, 1).sqrt()
    # 1 in place of the length, then 0 in place of the vector: value and gradient of a zero vector are 0.
    return (x / length) * (length * 0 + 1).where(alive, 0)


def cosine(q, k, scale=1.0):
    return scaled_dot(unit(q), unit(k), scale)


def sums(q, k):
    return q.sum(-1, keepdim=True) + turned(k.sum(-1, keepdim=True))


def soft_cap(s, cap):
    return (s / cap).tanh() * cap


def distance_1(q, k, rate):
    """A user's own: -rate |q - k|_1."""
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1) * per_head(rate, 0)


def square_dot(q, k, gain):
    """A user's own: gain (q . k)^2."""
    s = q @ turned(k)
    return s * s * per_head(gain, 0)


# ------------------------------------------------------------- attention


def spread(x, heads):
    """Keys or values (..., KV head, key, dim) for every query head: head h takes h // (heads / KV heads)."""
    own = x.shape[-3]
    return x if own == heads else x[..., [h * own // heads for h in range(heads)], :, :]


def masked_scores(s, visible, bias=None, hidden_bias=None):
    """-inf where hidden; `hidden_bias` says where the bias is -inf."""
    if bias is not None:
        s = s + bias.where(~hidden_bias, 0)
        visible = visible & ~hidden_bias
    return s.where(visible, NEG_INF), visible


def attention(s, value, visible, sink=None, keep=None):
    """Everything that attend can return, from the matrix of masked scores (-inf where not `visible`)."""
    top = s.amax(-1, keepdim=True).detach()
    sink = None if sink is None else per_head(sink, 0)
    if sink is not None:
        top = top.maximum(sink.detach())
    top = top.where(top != NEG_INF, 0)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    some = total > 0
    divisor = total.where(some, 1)
    weights = e / divisor
    kept = weights if keep is None else weights * keep
    # log p from the scores, not from p: that may be the smallest number there is.
    entropy = -(weights * (s - top - divisor.log()).where(visible, 0)).sum(-1)
    if sink is not None:
        entropy = entropy - ((sink - top).exp() / divisor * (sink - top - divisor.log())).sum(-1)
    return {
        "out": kept @ value,
        "weights": weights,
        "log_sum_exp": (top + divisor.log()).where(some, NEG_INF).sum(-1),
        "entropy": entropy,
        **row_numbers(s, visible, weights),
    }


def row_numbers(s, visible, weights):
    """The statistics that carry no gradient; every sum over visible keys."""
    seen = s.where(visible, 0)
    count = (seen * 0 + 1).where(visible, 0).sum(-1, keepdim=True)
    count = count.where(count > 0, 1)
    mean = seen.sum(-1, keepdim=True) / count
    deviation = (s - mean).where(visible, 0)
    return {
        "max_score": s.amax(-1),
        "mean_score": mean.sum(-1),
        "var_score": ((deviation * deviation).sum(-1, keepdim=True) / count).sum(-1),
        "max_weight": weights.amax(-1),
        "sum_sq_weights": (weights * weights).sum(-1),
        "sum_weights": weights.sum(-1),
        "min_score": -(-s).where(visible, NEG_INF).amax(-1),
    }
