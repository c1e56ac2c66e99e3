"""The functions around `attend`, each on a drawn case: yields name, result, what the reference has, the tolerance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from draw import EPS, Case, Choice, rounded
from frameworks import Attend, Named, arrays_for, build_score, options_of
from reference import Call, Tree, attention, evaluate, inside, scales, seen_pairs

import attnscore as ats

Checks = Iterator[tuple[str, Any, Any, float]]


def tolerance_of(case: Case, call: Call, results: Any, name: str = "out") -> float:
    """Return 16 eps times what rounding acts on; float64 has the reference's own rounding too."""
    factor = 128 if case.dtype == "float64" else 16
    return factor * EPS[case.dtype] * scales(replace(call, seeds={}), results, np.random.default_rng(0))[name] + 1e-30


def against(
    label: str, x: Any, framework: Any, case: Case, call: Call, results: Any, name: str = "out", slack: float = 1.0
) -> tuple[str, Any, Any, float]:
    """Return the check of a result of the framework against one of the reference."""
    return label, framework.host(x), results[name], slack * tolerance_of(case, call, results, name)


def no_value(case: Case, framework: Any) -> tuple[Call, Any, Named, Named]:
    """Return call, reference, arrays, and the arguments of functions of query and key."""
    call = replace(case.call, seeds={}, normalizer="softmax")
    arrays, of_mask, _ = arrays_for(case, framework, call, case.planted)
    given = Attend(replace(case, call=call)).arguments(arrays, of_mask)
    value = given.pop("value")
    # The axes of the values do not count: where they alone have some, the call is left to attend.
    return call, evaluate(call), {"value": value}, {**given, "head_axis": call.head_axis}


def is_of_query_and_key(call: Call) -> bool:
    """Return whether query and key have all axes of the output."""
    bare = {name: x for name, x in call.arrays.items() if name != "value"}
    value = bare["key"][..., :1]
    heads = call.rows[-2]
    try:
        shape = torch.broadcast_shapes(
            *(inside(torch.tensor(x), call, heads).shape[:-2] for x in (bare["query"], value))
        )
    except RuntimeError:
        return False
    return tuple(shape) == call.rows[:-1]


def blocks(case: Case, framework: Any, c: Choice) -> Checks:
    call, results, _, given = no_value(case, framework)
    if not is_of_query_and_key(call):
        return

    def index(length: int) -> tuple[Any, Any]:
        match c.int(0, 3):
            case 0:
                return None, slice(None)
            case 1:
                one = slice(c.int(0, length), c.int(0, length), c.int(1, 3))
                return one, one
            case 2 if length:
                one = [c.int(-length, length - 1) for _ in range(c.int(1, 5))]
                return one, one
        return slice(None), slice(None)

    for name, function in (("weights", ats.attention_weights), ("scores", ats.attention_scores)):
        (rows, of_rows), (cols, of_cols) = index(call.query_len), index(call.key_len)
        block = framework.host(function(**given, query_index=rows, key_index=cols))
        wanted = results[name][..., of_rows, :][..., of_cols]
        yield f"attention_{name}[{rows}, {cols}]", block, wanted, tolerance_of(case, call, results, name)


def summaries(case: Case, framework: Any, c: Choice) -> Checks:
    call, results, _, given = no_value(case, framework)
    if not is_of_query_and_key(call):
        return
    weights, tolerance = results["weights"], tolerance_of(case, call, results, "weights")
    n, m = call.query_len, call.key_len
    mass = framework.host(ats.key_mass(**given))
    yield "key_mass", mass, weights.sum(-2), tolerance * max(1, n)
    bins = c.int(1, 5), c.int(1, 70)
    height, width = max(1, -(-n // bins[0])), max(1, -(-m // bins[1]))
    pooled = np.zeros((*weights.shape[:-2], max(1, -(-n // height)), max(1, -(-m // width))))
    for i in range(n):
        for j in range(m):
            pooled[..., i // height, j // width] += weights[..., i, j]
    yield f"pooled_weights{bins}", framework.host(ats.pooled_weights(**given, bins=bins)), pooled, tolerance * max(1, n)
    if m:
        k = c.int(1, m)
        top = ats.top_weights(k=k, **given)
        of_top, index = framework.host(top.weights), framework.host(top.index).astype(int)
        yield f"top_weights({k})", of_top, -np.sort(-weights, -1)[..., :k], tolerance
        yield "top_weights: -1", index == -1, of_top == 0, 0.0
        taken = np.where(index >= 0, np.take_along_axis(weights, np.maximum(index, 0), -1), 0.0)
        yield "top_weights: index", taken, of_top, tolerance
        distinct = [len(set(row[row >= 0])) == (row >= 0).sum() for row in index.reshape(-1, k)]
        yield "top_weights: distinct", distinct, np.ones(len(distinct)), 0.0


def masked_softmax(case: Case, framework: Any, c: Choice) -> Checks:
    call = case.call
    rng = np.random.default_rng(case.array_kind)
    shape = (*call.lead, *((call.heads,) if call.heads else ()), call.query_len, call.key_len)
    x = rounded(rng.standard_normal(shape) * c.of((1, 30)), case.dtype)
    arrays, of_mask, _ = arrays_for(case, framework, call, None)
    given = Attend(case).arguments(arrays, of_mask)
    T = c.of((1.0, 0.5, 3.0))
    seen = seen_pairs(replace(call, arrays={})).numpy().reshape(shape)
    s = np.where(seen, x / T, -np.inf)
    top = np.where(np.isfinite(s), s, 0).max(-1, keepdims=True) if shape[-1] else s
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    wanted = e / np.where(total > 0, total, 1)
    dirty = np.where(seen | c.chance(0.5), x, np.nan)
    weights = ats.masked_softmax(
        framework.array(dirty, case.dtype), given["valid_lens"], mask=given["mask"], temperature=T
    )
    level = float(np.abs(x).max(initial=1)) / T
    yield "masked_softmax", framework.host(weights), wanted, 32 * EPS[case.dtype] * max(1, level)


def merge(case: Case, framework: Any, c: Choice) -> Checks:
    call = replace(
        case.call, seeds={}, normalizer="softmax", arrays={k: x for k, x in case.call.arrays.items() if k != "sink"}
    )
    case = replace(case, call=call, kernel="auto", return_weights=False, return_stats=("log_sum_exp",), planted=None)
    arrays, of_mask, _ = arrays_for(case, framework, call, None)
    given = Attend(case).arguments(arrays, of_mask)
    mask, m = given.pop("mask"), call.key_len
    ends = [0, *sorted(c.int(0, m) for _ in range(c.int(1, 2))), m]
    outs, sums = [], []
    for start, stop in pairwise(ends):
        part = ats.KeyRange(start, stop)
        out, stats = ats.attend(**given, mask=part if mask is None else mask & part, **options_of(case))
        outs, sums = [*outs, out], [*sums, stats.log_sum_exp]
    out, lse = ats.merge(outs, sums)
    results = evaluate(call)
    yield against(f"merge{ends}", out, framework, case, call, results, slack=2)
    yield against(f"merge{ends}: lse", lse, framework, case, call, results, "log_sum_exp", slack=2)


def prepared(case: Case, framework: Any, c: Choice) -> Checks:
    call = replace(case.call, seeds={})
    case = replace(case, call=call, return_weights=True, kernel="auto")
    arrays, of_mask, _ = arrays_for(case, framework, call, case.planted)
    given = Attend(case).arguments(arrays, of_mask)
    keys = ats.prepare_keys(given.pop("score"), given.pop("key"), head_axis=call.head_axis)
    results = evaluate(call)
    names = {"query": given.pop("query"), "value": given.pop("value")}
    for again in range(2):
        found = ats.attend(names["query"], keys, names["value"], **given, **options_of(case))
        slack = 64 if case.dtype in ("float16", "bfloat16") else 2  # the prepared keys are rounded to the dtype
        yield against(f"prepared, call {again}", found[0], framework, case, call, results, slack=slack)
        yield against("prepared: weights", found[1], framework, case, call, results, "weights", slack)


def cache(case: Case, framework: Any, c: Choice) -> Checks:
    """Appends of any lengths, each followed by an attention of its queries, against one matrix for each sequence."""
    rng = np.random.default_rng(case.array_kind)
    batch, kv, group = c.int(1, 3), c.int(1, 2), c.int(1, 2)
    has_heads = c.chance(0.8)
    kv, group = (kv, group) if has_heads else (1, 1)
    dim, width = c.of((1, 3, 8, 16)), c.of((1, 4, 8))
    head_axis = -2 if has_heads and c.chance(0.4) else -3
    window = c.int(1, 9) if c.chance(0.5) else None
    sinks = c.int(0, 3) if window else 0
    tree = Tree(c.of(("dot", "scaled_dot", "cosine"))) if not c.chance(0.3) else Tree(
        "additive", {"activation": "tanh"},
        {name: rounded(rng.standard_normal(shape), case.dtype)
         for name, shape in (("w_v", (5,)), ("W_q", (5, dim)), ("W_k", (5, dim)))})  # fmt: skip
    of_score = {f"score.{name}": x for name, x in tree.arrays.items()}
    library_score = build_score(tree, {name: framework.array(x, case.dtype) for name, x in of_score.items()})
    holds_score = c.chance(0.5)
    is_in_place = framework.name in ("numpy", "torch")
    options: Named = {
        "window": window,
        "sinks": sinks,
        "head_axis": head_axis,
        "score": library_score if holds_score else None,
    }
    steps = [c.weighted({1: 5.0, 2: 2.0, 3: 1.0, 7: 1.0, 17: 0.5}) for _ in range(c.int(1, 8))]
    if not is_in_place:
        first = max(steps)
        options["capacity"] = max(sum(steps), 1) if window is None else sinks + window + first
    elif c.chance(0.3):
        options["capacity"] = c.int(1, 20)
    caches = ats.KeyValueCache(**{name: x for name, x in options.items() if x is not None})
    past: list[tuple[np.ndarray, np.ndarray]] = [
        (np.zeros((0, kv, dim)), np.zeros((0, kv, width))) for _ in range(batch)
    ]

    def on_axes(x: np.ndarray) -> Any:
        """(batch, n, head, dim) on the caller's axes."""
        x = x[:, :, 0] if not has_heads else x if head_axis == -2 else x.swapaxes(1, 2)
        return framework.array(x, case.dtype, c.int(0, 34))

    for number, n in enumerate(steps):
        key, value, query = (rounded(rng.standard_normal((batch, n, h, d)), case.dtype)
                             for h, d in ((kv, dim), (kv, width), (kv * group, dim)))  # fmt: skip
        lens = rng.integers(0, n + 1, batch) if c.chance(0.25) else None
        real = np.full(batch, n) if lens is None else lens
        caches = caches.append(on_axes(key), on_axes(value), **({} if lens is None else {"lens": lens}))
        starts = [len(k) for k, _ in past]
        past = [
            (np.concatenate([k, key[b, : real[b]]]), np.concatenate([v, value[b, : real[b]]]))
            for b, (k, v) in enumerate(past)
        ]
        yield f"step {number}: lens", np.asarray(caches.lens), [len(k) for k, _ in past], 0.0
        out = framework.host(caches.attend(on_axes(query), **({} if holds_score else {"score": library_score})))
        out = out[:, :, None] if not has_heads else out if head_axis == -2 else out.swapaxes(1, 2)
        for b, (keys, values) in enumerate(past):
            at, j = starts[b] + np.arange(n)[:, None], np.arange(len(keys))[None]
            seen = (j <= at) & (at < len(keys))
            seen &= True if window is None else (j > at - window) | (j < sinks)
            arrays = {"query": query[b : b + 1], "key": keys[None], "value": values[None], **of_score}
            call = Call((1,), kv * group, n, len(keys), arrays, tree, Tree("dense", {}, {"array": seen}), head_axis=-2)
            results = evaluate(call)
            slack = 64 if holds_score and case.dtype in ("float16", "bfloat16") else 2
            yield (
                f"step {number} of {steps}, sequence {b}, {options}",
                out[b],
                results["out"][0],
                slack * tolerance_of(case, call, results),
            )
        if c.chance(0.2):
            order = rng.integers(0, batch, batch)
            caches, past = caches.reorder(order), [past[b] for b in order]
        elif c.chance(0.15) and (window is None or n > 1):
            back = c.int(0, min(n - 1, int(min(real)))) if window is not None else c.int(0, 4)
            ends = np.array([max(0, len(k) - back) for k, _ in past])
            caches = caches.crop(ends)
            past = [(k[:end], v[:end]) for end, (k, v) in zip(ends, past, strict=True)]
        elif c.chance(0.1):
            caches = caches.copy()


def packed(case: Case, framework: Any, c: Choice) -> Checks:
    """Sequences packed by `pack` against each of them alone."""
    rng, count, heads = np.random.default_rng(case.array_kind), c.int(1, 5), c.int(1, 2)
    lengths = [c.of((0, 1, 2, 5, 16, 33)) for _ in range(count)]
    arrays = [[rounded(rng.standard_normal((n, heads, d)), case.dtype) for n in lengths] for d in (8, 8, 4)]
    joined = [ats.pack([framework.array(x, case.dtype) for x in group]) for group in arrays]
    cu = joined[0][1]
    left, is_causal = c.of((None, 2)), c.chance(0.5)
    mask = ats.Packed(cu).window(left, 0 if is_causal else None)
    query, key, value = (x[None] for x, _ in joined)
    outs = ats.unpack(ats.attend(query, key, value, mask=mask, head_axis=-2)[0], cu)
    for n, q, k, v, out in zip(lengths, *arrays, outs, strict=True):
        window = Tree("window", {"left": left, "right": 0 if is_causal else None})
        call = Call(
            (1,),
            heads,
            n,
            n,
            {"query": q[None], "key": k[None], "value": v[None]},
            Tree("scaled_dot"),
            window,
            head_axis=-2,
        )
        results = evaluate(call)
        yield f"packed {lengths}", framework.host(out), results["out"][0], tolerance_of(case, call, results)
    if framework.name == "torch" and sum(lengths) and min(lengths):
        jagged = [
            torch.nested.nested_tensor([framework.array(x, case.dtype) for x in group], layout=torch.jagged)
            for group in arrays
        ]
        causal = ats.SlidingWindow(left, 0 if is_causal else None)
        out = ats.attend(*jagged, mask=causal, head_axis=-2).values()
        whole = torch.cat(list(outs))
        yield "jagged", framework.host(out), framework.host(whole), tolerance_of(case, call, results)


def layer(case: Case, framework: Any, c: Choice) -> Checks:
    """Layers of PyTorch with padding that holds NaN, whose projections may leave it out; outputs and all gradients."""
    from attnscore.layers import torch as layers

    rng = np.random.default_rng(case.array_kind)
    torch.manual_seed(case.array_kind)
    features, heads = c.of((4, 8, 160)), c.of((1, 2, 4))
    batch, n, m = c.int(1, 3), c.of((1, 2, 7, 17)), c.of((1, 3, 13, 33))
    lens = rng.integers(0, m + 1, c.of([(batch,), (batch, n)]))
    kind = c.of(("dot", "additive", "bilinear", "multi_head", "multi_head"))
    inputs = {name: rng.standard_normal((batch, k, features)) for name, k in (("query", n), ("key", m), ("value", m))}
    dtype = torch.float64 if c.chance(0.5) else torch.float32
    module: Any = {
        "dot": layers.DotProductAttention,
        "additive": lambda: layers.AdditiveAttention(5, key_size=features, query_size=features, dtype=dtype),
        "bilinear": lambda: layers.BilinearAttention(key_size=features, query_size=features, dtype=dtype),
        "multi_head": lambda: layers.MultiHeadAttention(
            8, heads, key_size=features, query_size=features, value_size=features, bias=c.chance(0.3), dtype=dtype
        ),
    }[kind]()
    dead = np.arange(m) >= (lens if lens.ndim == 1 else lens.max(-1, initial=0))[:, None]
    for step in range(2):
        leaves = {k: torch.tensor(x, dtype=torch.float64, requires_grad=True) for k, x in inputs.items()}
        wide = {k: p.detach().double().requires_grad_() for k, p in module.named_parameters()}
        call = Call((batch,), 0, n, m, {}, Tree("scaled_dot"), None, lens)
        sides = dict(leaves)
        if kind == "additive":
            call = replace(
                call,
                score=Tree("additive", {"activation": "tanh"}, dict.fromkeys(("w_v", "W_q", "W_k"), inputs["query"])),
            )
            sides |= {f"score.{k}": wide[f"{k}.weight"] for k in ("W_q", "W_k")} | {"score.w_v": wide["w_v.weight"][0]}
        elif kind == "bilinear":
            call = replace(call, score=Tree("bilinear", {}, {"W": inputs["query"]}))
            sides["score.W"] = wide["W.weight"]
        elif kind == "multi_head":
            call = replace(call, heads=heads, head_axis=-2)
            for k, p in (("query", "W_q"), ("key", "W_k"), ("value", "W_v")):
                x = leaves[k] @ wide[f"{p}.weight"].mT + wide.get(f"{p}.bias", 0.0)
                sides[k] = x.reshape(batch, x.shape[1], heads, -1)
        wanted = attention(call, sides)["out"]
        if kind == "multi_head":
            wanted = wanted.reshape(batch, n, -1) @ wide["W_o.weight"].mT + wide.get("W_o.bias", 0.0)
        grad = torch.tensor(rng.standard_normal(wanted.shape))
        every = [*leaves.values(), *wide.values()]
        of_wanted = torch.autograd.grad(wanted, every, grad, allow_unused=True, materialize_grads=True)
        dirty = {
            k: np.where(dead[..., None], np.nan, x) if k != "query" and c.chance(0.7) else x for k, x in inputs.items()
        }
        given = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in dirty.values()]
        out = module(*given, valid_lens=torch.tensor(lens) if c.chance(0.5) else lens)
        found = torch.autograd.grad(
            out, [*given, *module.parameters()], grad.to(dtype), allow_unused=True, materialize_grads=True
        )
        eps = 4e-15 if dtype == torch.float64 else 2e-6
        for name, x, y in zip(["out", *leaves, *wide], [out, *found], [wanted, *of_wanted], strict=True):
            tolerance = (
                64 * eps * max(1.0, *(float(z.detach().abs().max()) for z in (y, wanted, *of_wanted) if z.numel()))
            )
            yield f"{kind} layer, call {step}: {name}", x.detach().double().numpy(), y.detach().numpy(), tolerance
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        inputs = {k: rng.standard_normal(x.shape) for k, x in inputs.items()}


def threads(case: Case, framework: Any, c: Choice) -> Checks:
    """Calls of one signature and of different values from four threads at once."""
    call = replace(case.call, seeds={})
    case = replace(case, call=call, return_weights=False, return_stats=(), planted=None)
    outs: dict[int, Any] = {}
    calls = {}
    rng = np.random.default_rng(case.array_kind)
    for t in range(4):
        signs = {name: rng.choice([1.0, -1.0], call.arrays[name].shape) for name in ("query", "key", "value")}
        arrays = {name: x * signs.get(name, 1.0) for name, x in call.arrays.items()}
        calls[t] = replace(call, arrays=arrays)
    prepared_calls = {t: arrays_for(case, framework, one, None) for t, one in calls.items()}
    gate = threading.Barrier(4)

    def work(t: int) -> None:
        arrays, of_mask, _ = prepared_calls[t]
        gate.wait()
        try:
            for _ in range(3):
                outs[t] = Attend(replace(case, call=calls[t]))(arrays, of_mask)["out"]
        except Exception as error:
            outs[t] = error

    workers = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for t, one in calls.items():
        if isinstance(outs[t], Exception):
            raise outs[t]
        results = evaluate(one)
        yield against(f"thread {t}", outs[t], framework, case, one, results)


PROBES: dict[str, Callable[[Case, Any, Choice], Checks]] = {
    f.__name__: f for f in (blocks, summaries, masked_softmax, merge, prepared, cache, packed, layer, threads)
}
