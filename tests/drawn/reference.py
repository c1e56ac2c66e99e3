"""Attention from its definitions, in float64, as a second opinion: nothing of the library is imported or called.

A call is plain data (`Call`): NumPy arrays by name, and trees (`Tree`) for score and mask. `visible` builds every mask
as a boolean array; `attention` computes whole matrices with plain operations of PyTorch, whose autodiff gives first
and second derivatives. Inside, arrays have the axes (*lead, head, query | key, dim).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

Arrays = dict[str, np.ndarray]
STATISTICS = ("log_sum_exp", "max_score", "mean_score", "var_score", "entropy", "max_weight", "sum_sq_weights",
              "sum_weights", "min_score")  # fmt: skip
DIFFERENTIABLE = ("out", "weights", "log_sum_exp", "entropy")


class Tree(NamedTuple):
    """A score or a mask: its kind, plain options, arrays by name, and the trees inside it."""

    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never written to
    arrays: Arrays = {}  # noqa: RUF012
    parts: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of `attend`: its arguments, and the gradients that come into its outputs."""

    lead: tuple[int, ...]
    """Batch axes of the output; () for inputs of two axes."""
    heads: int
    """0 where inputs have no axis of heads."""
    query_len: int
    key_len: int
    arrays: Arrays
    """query, key and value on the caller's axes, bias, sink, and the score's arrays as ``score.<path>``."""
    score: Tree
    mask: Tree | None = None
    valid_lens: Any = None
    head_axis: int = -3
    normalizer: Any = "softmax"
    """A name, or alpha of the entmax."""
    seeds: Arrays = field(default_factory=dict)
    """Gradients into out, weights, log_sum_exp, entropy, on the caller's axes."""
    keep: np.ndarray | None = None
    """What dropout multiplies each weight with, (*lead, head, query, key)."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of one number per query, inside."""
        return (*(self.lead or (1,)), self.heads or 1, self.query_len)


# ---------------------------------------------------------------- masks: boolean arrays (*lead, head, query, key)

FUNCTIONS = {
    "chunks": lambda batch, head, i, j: (j <= i) & (i // 3 == j // 3),
    "parity": lambda batch, head, i, j: (i + j) % 2 == 0,
    "by_head": lambda batch, head, i, j: j <= i + head,
    "by_batch": lambda batch, head, i, j: (j + batch) % 3 != 0,
    "two_runs": lambda batch, head, i, j: (j < 2) | ((j <= i) & (j > i - 4)),
    "captured": lambda batch, head, i, j, lens: j < lens,
}
"""Functions of indices for `MaskFunction`; plain operators, so that every framework's arrays will do."""


def visible(tree: Tree, call: Call) -> np.ndarray:
    """Return where query i may attend to key j."""
    n, m = call.query_len, call.key_len
    lead, heads = call.rows[:-2], call.rows[-2]
    shape = (*lead, heads, n, m)
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    a = {name: np.asarray(x) for name, x in tree.arrays.items()}

    def per_batch(x: Any) -> np.ndarray:
        """One number, or one per entry of the first batch axis."""
        return np.reshape(x, (np.size(x), *(1,) * (len(lead) - 1), 1, 1, 1))

    def centre() -> Any:
        if "offset" in a:
            return i + per_batch(a["offset"])
        return i + (m - n if tree.options.get("align") == "bottom_right" else 0)

    def sequence(cu: np.ndarray, position: int) -> int | None:
        return next((s for s in range(len(cu) - 1) if cu[s] <= position < cu[s + 1]), None)

    match tree.kind:
        case "and" | "or":
            first, second = (visible(part, call) for part in tree.parts)
            array = first & second if tree.kind == "and" else first | second
        case "not":
            array = ~visible(tree.parts[0], call)
        case "valid_lens":
            lens = a["lens"]
            if lens.ndim == 2 or (lens.ndim == 1 and not call.lead and lens.size != 1):  # one per query
                lens = np.atleast_2d(lens)
                lens = lens.reshape(len(lens), *(1,) * len(lead), lens.shape[-1], 1)
            else:
                lens = per_batch(lens)
            array = (j < lens) & ((i < per_batch(a["query_lens"])) if "query_lens" in a else True)
        case "key_range":
            array = (per_batch(a["start"]) <= j) & (j < per_batch(a["stop"]))
        case "key_padding":
            array = a["array"].astype(bool).reshape(len(a["array"]), *(1,) * len(lead), 1, m)
        case "causal":
            array = j <= centre()
        case "window":
            left, right = tree.options.get("left"), tree.options.get("right")
            array = (left is None or j >= centre() - left) & (right is None or j <= centre() + right) & (j >= 0)
        case "prefix":
            array = (j < per_batch(a["prefix_lens"])) | (j <= i)
        case "documents":
            query_ids, key_ids = (
                np.atleast_2d(a[k]) for k in ("query_ids", "key_ids" if "key_ids" in a else "query_ids")
            )
            same = (query_ids[:, :, None] == key_ids[:, None, :]) & (query_ids[:, :, None] >= 0)
            array = same.reshape(len(same), *(1,) * len(lead), n, m)
        case "packed":
            cu_query, cu_key = a["cu_query"], a.get("cu_key", a["cu_query"])
            left, right = tree.options.get("left"), tree.options.get("right")
            array = np.zeros((n, m), bool)
            for row in range(n):
                s = sequence(cu_query, row)
                if s is None:
                    continue
                queries, keys = cu_query[s + 1] - cu_query[s], cu_key[s + 1] - cu_key[s]
                at = row - cu_query[s] + (keys - queries if tree.options.get("align") == "bottom_right" else 0)
                for key in range(keys):
                    array[row, cu_key[s] + key] = (left is None or key >= at - left) and (
                        right is None or key <= at + right
                    )
        case "neighbours":
            array = np.zeros((n, m), bool)
            for row in range(n):
                array[row, a["indices"][a["indptr"][row] : a["indptr"][row + 1]]] = True
        case "dense":
            array = on_pairs(a["array"], call)
        case "function":
            batch, head = np.arange(lead[0]).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1)
            array = FUNCTIONS[tree.options["name"]](batch, head, i[None, None], j[None, None], *a.values())
            array = array.reshape(len(array), *(1,) * (len(lead) - 1), *array.shape[1:])
        case _:
            raise ValueError(tree.kind)
    return np.broadcast_to(array, shape)


def on_pairs(x: Any, call: Call) -> Any:
    """Return an array that broadcasts to the caller's (..., query, key) so that it broadcasts inside."""
    while x.ndim < 2:
        x = x[None]
    return x if call.heads or x.ndim < 3 else x[..., None, :, :]


def inside(x: torch.Tensor, call: Call, heads: int) -> torch.Tensor:
    """Return query, key or value on the axes inside; query head h reads KV head h // (heads / KV heads)."""
    axes = len(call.lead) + (3 if call.heads else 2)
    x = x.reshape((1,) * (axes - x.ndim) + x.shape)
    if not call.heads:
        return x.unsqueeze(-3) if call.lead else x[None, None]
    x = x.transpose(-3, -2) if call.head_axis == -2 else x
    return x.repeat_interleave(heads // x.shape[-3], dim=-3) if 1 < x.shape[-3] < heads else x


def outside(x: torch.Tensor, call: Call, *, is_output: bool = False, is_row: bool = False) -> torch.Tensor:
    """Return an array (*lead, head, query, ...) on the caller's axes; weights keep heads before queries."""
    if not call.heads:
        x = x.squeeze(len(call.lead or (1,)))
        return x if call.lead else x[0]
    if call.head_axis == -2 and (is_output or is_row):
        return x.transpose(-1, -2) if is_row else x.transpose(-3, -2)
    return x


# ---------------------------------------------------------------- scores

ACTIVATIONS = {
    "tanh": torch.tanh,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, slope * x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "identity": lambda x: x,  # of `unsaturated`
}


def score(
    tree: Tree, q: torch.Tensor, k: torch.Tensor, leaves: dict[str, torch.Tensor], path: str = ""
) -> torch.Tensor:
    """Return a(q_i, k_j) for all pairs; `leaves` holds the score's arrays by path."""
    options = tree.options

    def array(name: str, axes: int, default: Any = None) -> Any:
        """An array with `axes` axes, or one set per head in front; numbers come from the options."""
        if name not in tree.arrays:
            return options.get(name, default)
        x = leaves[f"score.{path}{name}"]
        return x if x.ndim <= axes or axes == 2 else x.reshape(len(x), *(1,) * (2 - axes), *x.shape[1:])

    match tree.kind:
        case "dot":
            return q @ k.mT
        case "scaled_dot" | "cosine":
            default = 1 / math.sqrt(max(1, q.shape[-1])) if tree.kind == "scaled_dot" else 1.0
            scale = array("scale", 0, default)
            if "scale" in tree.arrays and tree.arrays["scale"].ndim > 1:  # along the queries or the keys
                scale = leaves[f"score.{path}scale"]
            if tree.kind == "cosine":
                q, k = unit(q), unit(k)
            return (q @ k.mT) * scale
        case "additive":
            W_q, W_k, w_v, bias = array("W_q", 2), array("W_k", 2), array("w_v", 1), array("bias", 1)
            a = q if W_q is None else q @ W_q.mT
            b = k if W_k is None else k @ W_k.mT
            a = a if bias is None else a + bias
            act = ACTIVATIONS[options["activation"]]
            extra = (
                (options["negative_slope"],)
                if options["activation"] == "leaky_relu" and "negative_slope" in options
                else ()
            )
            w_v = w_v if w_v.ndim == 1 else w_v.unsqueeze(-2)
            return (act(a.unsqueeze(-2) + b.unsqueeze(-3), *extra) * w_v).sum(-1)
        case "bilinear":
            return q @ array("W", 2) @ k.mT
        case "gaussian":
            bandwidth = array("bandwidth", 0, 1.0)
            if isinstance(bandwidth, torch.Tensor) and leaves[f"score.{path}bandwidth"].ndim == 2:
                bandwidth = leaves[f"score.{path}bandwidth"].unsqueeze(-2)  # one for each dimension
                return -(((q / bandwidth).unsqueeze(-2) - (k / bandwidth).unsqueeze(-3)) ** 2).sum(-1) / 2
            return -((q.unsqueeze(-2) - k.unsqueeze(-3)) ** 2).sum(-1) / (2 * bandwidth**2)
        case "sum":
            return q.sum(-1, keepdim=True) + k.sum(-1).unsqueeze(-2)
        case "custom_l1":
            return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1) * array("rate", 0)
        case "custom_square":
            return (q @ k.mT) ** 2 * array("gain", 0)
        case "soft_cap":
            cap = array("cap", 0)
            return cap * torch.tanh(score(tree.parts[0], q, k, leaves, path) / cap)
        case "temperature":
            return score(tree.parts[0], q, k, leaves, path) / array("temperature", 0)
        case "combination":
            total: Any = 0.0
            for place, part in enumerate(tree.parts):
                weight = array(f"weights.{place}", 0)
                total = total + weight * score(part, q, k, leaves, f"{path}scores.{place}.")
            return total
    raise ValueError(tree.kind)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / |x|; a zero vector stays zero, with a gradient of zero."""
    square = (x * x).sum(-1, keepdim=True)
    is_zero = square == 0
    return torch.where(is_zero, 0.0, x / torch.where(is_zero, 1.0, square).sqrt())


# ---------------------------------------------------------------- weights


def entmax(s: torch.Tensor, seen: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return max(0, (alpha - 1) s_j - tau)^(1 / (alpha - 1)) with tau from 200 halvings of an interval."""
    power = 1 / (alpha - 1)
    z = torch.where(seen, (alpha - 1) * s, 0.0)

    def raised(tau: torch.Tensor, exponent: float) -> torch.Tensor:
        x = z - tau
        inside = seen & (x > 0)
        return torch.where(inside, torch.where(inside, x, 1.0) ** exponent, 0.0)

    with torch.no_grad():
        high = torch.where(seen, z, -math.inf).amax(-1, keepdim=True) if z.shape[-1] else z.sum(-1, keepdim=True)
        high = torch.where(high == -math.inf, 0.0, high)
        low = high - 1
        for _ in range(200):
            middle = (low + high) / 2
            is_left = raised(middle, power).sum(-1, keepdim=True) >= 1
            low, high = torch.where(is_left, middle, low), torch.where(is_left, high, middle)
    tau = low
    for _ in range(2):  # two differentiable steps of Newton's method carry the first and the second derivatives
        slope = power * raised(tau, power - 1).sum(-1, keepdim=True)
        tau = tau + (raised(tau, power).sum(-1, keepdim=True) - 1) / torch.where(slope == 0, 1.0, slope)
    return raised(tau, power)


def attention(call: Call, leaves: dict[str, torch.Tensor], seen: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    """Return the output, weights, scores and statistics, on the caller's axes."""
    heads = call.rows[-2]
    q, k, v = (inside(leaves[name], call, heads) for name in ("query", "key", "value"))
    pairs = seen_pairs(call) if seen is None else torch.as_tensor(np.array(seen))
    s = score(call.score, q, k, leaves).expand(pairs.shape)
    if "bias" in leaves:
        bias = on_pairs(relative(leaves["bias"], call), call)
        s = s + torch.where(bias == -math.inf, 0.0, bias)  # masked there, see seen_pairs
    if s.shape[-1]:
        top = torch.where(pairs, s, -math.inf).amax(-1, keepdim=True).detach()
    else:
        top = s.new_full((*s.shape[:-1], 1), -math.inf)
    max_score, some = top, pairs.any(-1, keepdim=True)
    e_sink = 0.0
    if "sink" in leaves:
        sink = leaves["sink"].reshape(-1, 1, 1)
        top = torch.maximum(top, sink.detach().expand(top.shape))
    top = torch.where(top == -math.inf, 0.0, top)
    if "sink" in leaves:
        e_sink = torch.exp(sink - top)
    e = torch.where(pairs, torch.exp(torch.where(pairs, s - top, 0.0)), 0.0)
    total = e.sum(-1, keepdim=True) + e_sink
    is_alive = total > 0
    divisor = torch.where(is_alive, total, 1.0)
    if call.normalizer == "softmax":
        weights = e / divisor
    elif call.normalizer == "sigmoid":
        weights = torch.where(pairs, torch.sigmoid(torch.where(pairs, s, 0.0)), 0.0)
    else:
        alpha = {"sparsemax": 2.0, "entmax15": 1.5}.get(call.normalizer, call.normalizer)
        weights = entmax(s, pairs, alpha)
    pooled = weights if call.keep is None else weights * torch.as_tensor(call.keep).to(weights.dtype)
    log_p = s - top - divisor.log()
    entropy = -torch.where(pairs, e / divisor * torch.where(pairs, log_p, 0.0), 0.0).sum(-1)
    if "sink" in leaves:
        log_p_sink = sink - top - divisor.log()
        entropy = entropy - (e_sink / divisor * torch.where(log_p_sink == -math.inf, 0.0, log_p_sink))[..., 0]
    count = pairs.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(pairs, s, 0.0).sum(-1, keepdim=True) / count
    var = (torch.where(pairs, s - mean, 0.0) ** 2).sum(-1, keepdim=True) / count
    rows = {
        "log_sum_exp": torch.where(is_alive, top + divisor.log(), -math.inf)[..., 0],
        "entropy": entropy,
        "max_score": max_score[..., 0],
        "mean_score": mean[..., 0],
        "var_score": var[..., 0],
        "max_weight": weights.amax(-1) if s.shape[-1] else weights.sum(-1),
        "sum_sq_weights": (weights * weights).sum(-1),
        "sum_weights": torch.where(some[..., 0], weights.sum(-1), 0.0),
        "min_score": torch.where(pairs, s, math.inf).amin(-1) if s.shape[-1] else -max_score[..., 0],
    }
    return {
        "out": outside(pooled @ v, call, is_output=True),
        "weights": outside(weights, call),
        "scores": outside(torch.where(pairs, s, -math.inf), call),
        **{name: outside(x, call, is_row=True) for name, x in rows.items()},
    }


def relative(bias: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a bias with a number for each key - query as one with a number for each pair."""
    n, m = call.query_len, call.key_len
    if bias.ndim < 2 or bias.shape[-2] != 1 or bias.shape[-1] != n + m - 1 or n == 1:
        return bias
    return bias[..., 0, :][..., torch.arange(m)[None, :] - torch.arange(n)[:, None] + n - 1]


def seen_pairs(call: Call) -> torch.Tensor:
    """Return which pairs take part: mask, valid lengths, and a bias above -inf."""
    seen = np.ones((*call.rows, call.key_len), bool)
    for tree in (call.mask, None if call.valid_lens is None else Tree("valid_lens", {}, {"lens": call.valid_lens})):
        seen = seen if tree is None else seen & visible(tree, call)
    seen = torch.as_tensor(np.array(seen))
    if "bias" in call.arrays:
        bias = torch.as_tensor(np.array(call.arrays["bias"], np.float64))
        seen = seen & (on_pairs(relative(bias, call), call) != -math.inf)
    return seen


# ---------------------------------------------------------------- everything of a call, and how exact it can be


def evaluate(call: Call, *, second: Arrays | None = None, dtype: torch.dtype = torch.float64) -> Arrays:
    """Return outputs and gradients (``grad.<name>``) by name.

    With `second`, numbers R by name, also the gradients (``second.<name>``) of sum R grad.
    """
    leaves = {
        name: torch.tensor(np.asarray(x, np.float64), dtype=dtype, requires_grad=True)
        for name, x in call.arrays.items()
    }
    outputs = attention(call, leaves)
    results = {name: x.detach() for name, x in outputs.items()}
    if call.seeds:
        seeds = [torch.tensor(np.asarray(x, np.float64), dtype=dtype) for x in call.seeds.values()]
        into = [outputs[name] for name in call.seeds]
        options = {"create_graph": second is not None, "allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(into, list(leaves.values()), seeds, **options)
        results |= {f"grad.{name}": x.detach() for name, x in zip(leaves, grads, strict=True)}
        if second is not None:
            weighted = sum((x * torch.tensor(second[name])).sum() for name, x in zip(leaves, grads, strict=True))
            again = [torch.zeros_like(x) for x in leaves.values()]
            if weighted.requires_grad:
                again = torch.autograd.grad(weighted, list(leaves.values()), allow_unused=True, materialize_grads=True)
            results |= {f"second.{name}": x.detach() for name, x in zip(leaves, again, strict=True)}
    return {name: x.numpy() for name, x in results.items()}


def scales(call: Call, results: Arrays, rng: np.random.Generator) -> dict[str, float]:
    """Return for each result the number that eps multiplies: the terms that rounding acts on.

    An error of eps times the largest score multiplies each weight; a score's gradient p (dp - delta) is rounded by eps
    times the largest of its terms. The latter errors, with random signs, go through the score to its arrays.
    """

    def largest(x: Any) -> float:
        x = np.abs(np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, np.float64))
        return float(x[np.isfinite(x)].max(initial=0))

    leaves = {name: torch.tensor(np.asarray(x, np.float64), requires_grad=True) for name, x in call.arrays.items()}
    heads = call.rows[-2]
    q, k = (inside(leaves[name], call, heads) for name in ("query", "key"))
    shape = (*call.rows, call.key_len)
    s = score(call.score, q, k, leaves).expand(shape)
    terms = largest(s.detach()), largest(results["scores"]), largest(call.arrays.get("sink", 0.0))
    norms = largest(torch.linalg.vector_norm(q.detach(), dim=-1)) * largest(
        torch.linalg.vector_norm(k.detach(), dim=-1)
    )
    level = max(1.0, *terms, norms if call.score.kind in ("dot", "scaled_dot") else 0.0)
    if "score.W" in leaves:
        # Of a bilinear score, the products of which each sum is made.
        level = max(level, largest((q.abs() @ leaves["score.W"].abs() @ k.abs().mT).detach()))
    if "score.w_v" in leaves:
        # Of an additive score, its terms with other signs: they may cancel, or be capped.
        tree = call.score.parts[0] if call.score.kind == "soft_cap" else call.score
        for _ in range(2):
            w_v = leaves["score.w_v"] * torch.as_tensor(rng.choice([-1.0, 1.0], leaves["score.w_v"].shape))
            level = max(level, largest(score(tree, q, k, leaves | {"score.w_v": w_v})))
    keys = math.log(max(2, call.key_len))
    value, out = largest(call.arrays["value"]), call.seeds.get("out", np.zeros(1))
    scale = {"out": value * level, "weights": level, "scores": level, "log_sum_exp": level + keys, "max_score": level,
             "min_score": level, "mean_score": level, "var_score": level * level, "entropy": level * keys + level,
             "max_weight": level}  # fmt: skip
    # Of other normalizers than the softmax the weights sum to more than 1.
    scale |= {name: level * max(1.0, largest(results.get(name, 0.0))) for name in ("sum_weights", "sum_sq_weights")}
    if call.keep is not None:
        scale["out"] *= largest(call.keep)
    if not call.seeds:
        return scale
    incoming = largest(np.abs(out).sum(-1)) * value * (1.0 if call.keep is None else largest(call.keep))
    incoming += sum(largest(call.seeds.get(name, 0.0)) for name in ("weights", "log_sum_exp"))
    incoming += largest(call.seeds.get("entropy", 0.0)) * (level + keys)
    weights = results["weights"].reshape(shape)
    weights = np.minimum(1.0, weights + (0.0 if call.normalizer == "softmax" else 0.5)) * seen_pairs(call).numpy()
    errors = incoming * level * weights
    for name in call.arrays:
        scale[f"grad.{name}"] = largest(results[f"grad.{name}"]) * level
    # Where a tanh is at its limit, its slope 1 - t^2 is rounded by eps, not by eps times the slope.
    linear = score(unsaturated(call.score), q, k, leaves).expand(shape)
    for each in (s, s, linear, linear):
        # Of several sizes: equal ones may cancel, in a query that two batch rows share.
        signs = torch.as_tensor(errors * rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape))
        total = each + on_pairs(relative(leaves["bias"], call), call) if "bias" in leaves else each
        grads = torch.autograd.grad(total, list(leaves.values()), signs.expand(total.shape), allow_unused=True,
                                    materialize_grads=True, retain_graph=True)  # fmt: skip
        for name, x in zip(leaves, grads, strict=True):
            scale[f"grad.{name}"] = max(scale[f"grad.{name}"], largest(x))
    for name in scale:
        if name.endswith((".cap", ".T")):  # of s / cap, or s / T
            scale[name] += float(np.linalg.norm(errors)) * (1 + level)
    if "cosine" in spelled(call.score):  # the gradient of a length of 1 cancels: g - u (u . g)
        for name, x in (("query", q), ("key", k)):
            lengths = torch.linalg.vector_norm(x.detach(), dim=-1)
            scale[f"grad.{name}"] += largest(1 / np.where(lengths > 0, lengths, 1)) * float(errors.sum()) * level
    scale["grad.value"] += largest(out) * float(weights.sum((-1, -2)).max(initial=0)) * level
    scale["grad.sink"] = incoming * level * max(1, math.prod(call.rows)) ** 0.5
    return scale


def unsaturated(tree: Tree) -> Tree:
    """Return a score without its caps and activations."""
    if tree.kind == "soft_cap":
        return unsaturated(tree.parts[0])
    options = {**tree.options, "activation": "identity"} if tree.kind == "additive" else tree.options
    return tree._replace(options=options, parts=tuple(map(unsaturated, tree.parts)))


def spelled(tree: Tree) -> set[str]:
    """Return the kinds in a tree."""
    return {tree.kind}.union(*map(spelled, tree.parts))
