"""Cases drawn from (seed, index, version): what is called, on which arrays. The version changes values, no shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from reference import (
    ACTIVATIONS,
    FUNCTIONS,
    STATISTICS,
    Call,
    Tree,
    evaluate,
    inside,
    on_pairs,
    outside,
    relative,
    seen_pairs,
)
from torch import autograd, ones, zeros

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPS = {name: float(ml_dtypes.finfo(kind).eps) for name, kind in DTYPES.items()}
LENGTHS = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 15, 16, 17, 23, 31, 33, 47, 63, 64, 65, 97, 128, 129)
DIMS = (1, 2, 3, 4, 7, 8, 8, 15, 16, 17, 32, 33)


@dataclass(frozen=True)
class Case:
    """A call, and how it is made."""

    framework: str
    what: str
    """What is called: attend, or one of the functions around it (see probes)."""
    mode: str
    """How: eager, compiled, checkpoint, vmap; repeat and write make three calls of one shape."""
    kernel: str
    dtype: str
    extra_dtype: str
    """Of bias, sink and the score's arrays."""
    call: Call
    """With arrays that the dtypes hold exactly."""
    dropout: float = 0.0
    dropout_seed: int = 0
    return_weights: bool = False
    return_stats: tuple[str, ...] = ()
    with_second: bool = False
    planted: dict[str, np.ndarray] | None = None
    """The arrays with NaN or infinity where no pair that takes part reads them."""
    array_kind: int = 0
    """Number from which strides are drawn."""
    are_masks_of_framework: bool = False

    def __str__(self) -> str:
        call = self.call
        shapes = {name: f"{x.shape}" for name, x in call.arrays.items()}
        parts = [
            *(self.framework, self.what, self.mode, self.dtype, f"kernel={self.kernel}", f"extras={self.extra_dtype}"),
            *(f"head_axis={call.head_axis}", f"normalizer={call.normalizer}", f"score={spell(call.score)}"),
            *(f"mask={spell(call.mask)}", f"valid_lens={call.valid_lens}", f"shapes={shapes}"),
            *(f"seeds={list(call.seeds)}", f"stats={self.return_stats}", f"weights={self.return_weights}"),
            *(f"dropout={self.dropout}/{self.dropout_seed}", f"planted={self.planted is not None}"),
            *(f"second={self.with_second}", f"framework masks={self.are_masks_of_framework}"),
        ]
        return ", ".join(parts)


def spell(tree: Tree | None) -> str:
    """Return a tree as a line of text."""
    if tree is None:
        return "None"
    arrays = {
        name: np.asarray(x).tolist() if np.asarray(x).size < 12 else np.shape(x) for name, x in tree.arrays.items()
    }
    inner = [f"{name}={x}" for name, x in {**tree.options, **arrays}.items()] + [spell(part) for part in tree.parts]
    return f"{tree.kind}({', '.join(inner)})"


class Choice:
    """Choices from one generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def of(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def weighted(self, options: dict[Any, float]) -> Any:
        p = np.array(list(options.values()), float)
        return list(options)[int(self.rng.choice(len(p), p=p / p.sum()))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def int(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers that the dtype holds, in float64."""
    return np.asarray(x, np.float64).astype(DTYPES[dtype]).astype(np.float64)


# ---------------------------------------------------------------- scores


def arrays_of(tree: Tree, path: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of a score by path, as the library names their gradients."""
    found = {f"score.{path}{name}": x for name, x in tree.arrays.items()}
    for place, part in enumerate(tree.parts):
        found |= arrays_of(part, f"{path}scores.{place}." if tree.kind == "combination" else path)
    return found


def draw_score(c: Choice, v: np.random.Generator, heads: int, dim: int, key_dim: int, n: int, depth: int = 2) -> Tree:
    """Draw a score; `c` chooses what it is, `v` draws its numbers."""

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(v.standard_normal(shape) * 0.7)

    def positive(*shape: int) -> np.ndarray:
        return np.asarray(0.7 + np.abs(v.standard_normal(shape)))

    def number(name: str, *more: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """A positive number: plain, or an array of one of several shapes."""
        shapes = [None, (), *([(heads,)] if heads else []), *more]
        shape = c.of(shapes)
        return ({name: float(positive())}, {}) if shape is None else ({}, {name: positive(*shape)})

    kinds = {"additive": 4.0, "bilinear": 2.0}
    if dim == key_dim:
        kinds |= {
            "scaled_dot": 5.0,
            "dot": 1.0,
            "gaussian": 2.0,
            "cosine": 2.0,
            "custom_l1": 1.0,
            "custom_square": 1.0,
            "sum": 0.5,
        }
    if depth:
        kinds |= {"soft_cap": 1.5, "temperature": 1.5, "combination": 1.0}
    kind = c.weighted(kinds)
    lead = (heads,) if heads and c.chance(0.3) else ()
    match kind:
        case "scaled_dot":
            options, arrays = (
                ({}, {}) if c.chance(0.5) else number("scale", (n, 1), *([(heads, n, 1)] if heads else []))
            )
        case "cosine":
            options, arrays = number("scale") if c.chance(0.8) else ({"scale": None}, {})
            if options.get("scale", 0) is None:
                options = {"scale": 1 / math.sqrt(dim), "is_default": True}
        case "additive":
            h = c.of((1, 2, 3, 5, 8, 16, 17))
            options = {"activation": c.of([name for name in ACTIVATIONS if name != "identity"])}
            if options["activation"] == "leaky_relu" and c.chance(0.5):
                options["negative_slope"] = 0.2
            no_q, no_k = dim != 0 and c.chance(0.15), c.chance(0.15) and key_dim != 0
            h = dim if no_q else key_dim if no_k else h
            no_k = no_k and key_dim == h
            arrays = {"w_v": normal(*lead, h)}
            arrays |= {} if no_q else {"W_q": normal(*(lead if c.chance(0.7) else ()), h, dim)}
            arrays |= {} if no_k else {"W_k": normal(*(lead if c.chance(0.7) else ()), h, key_dim)}
            arrays |= {"bias": normal(*(lead if c.chance(0.7) else ()), h)} if c.chance(0.5) else {}
        case "bilinear":
            options, arrays = {}, {"W": normal(*lead, dim, key_dim)}
        case "gaussian":
            options, arrays = number("bandwidth", (1, dim), *([(heads, dim)] if heads else []))
        case "custom_l1":
            options, arrays = ({}, {"rate": positive()}) if c.chance(0.5) else ({"rate": 0.5}, {})
        case "custom_square":
            options, arrays = {}, {"gain": positive()}
        case "soft_cap" | "temperature":
            options, arrays = number("cap" if kind == "soft_cap" else "temperature")
            inner = draw_score(c, v, heads, dim, key_dim, n, depth - 1)
            while inner.kind == kind or any(part.kind == kind for part in inner.parts):  # arrays of one name
                inner = draw_score(c, v, heads, dim, key_dim, n, 0)
            return Tree(kind, options, arrays, (inner,))
        case "combination":
            parts = tuple(draw_score(c, v, heads, dim, key_dim, n, 0) for _ in range(c.int(2, 3)))
            options, arrays = {}, {}
            for place in range(len(parts)):
                one = number(f"weights.{place}")
                options, arrays = options | one[0], arrays | one[1]
            return Tree(kind, options, arrays, parts)
        case _:
            options, arrays = {}, {}
    return Tree(kind, options, arrays)


# ---------------------------------------------------------------- masks


def draw_mask(
    c: Choice, v: np.random.Generator, lead: tuple[int, ...], heads: int, n: int, m: int, depth: int = 2
) -> Tree:
    """Draw a mask; lengths, offsets and arrays are values, and change with the version."""
    batch = lead[0] if lead else 1
    kinds = {"valid_lens": 3.0, "key_range": 1.0, "key_padding": 2.0, "causal": 4.0, "window": 2.0, "prefix": 1.0,
             "documents": 2.0, "packed": 2.0, "neighbours": 1.5, "dense": 2.0, "function": 2.0}  # fmt: skip
    if depth:
        kinds |= {"and": 5.0, "or": 2.5, "not": 2.0}
    kind = c.weighted(kinds)

    def ints(low: int, high: int, shape: Any) -> np.ndarray:
        return v.integers(low, high + 1, shape)

    def per_batch(low: int, high: int) -> np.ndarray:
        return ints(low, high, c.of([(), (batch,)]))

    def aligned() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        match c.int(0, 2 if n == m else 1):
            case 0:
                return {"align": c.of(("top_left", "bottom_right"))}, {}
            case 1:
                return {}, {"offset": per_batch(-max(n, 2), m)}
        return {}, {}

    def cumulative(length: int, count: int, *, to_end: bool) -> np.ndarray:
        cuts = np.sort(ints(0, length, count))
        return np.concatenate([[0], cuts[:-1] if to_end else cuts, [length] if to_end else []]).astype(np.int64)

    options: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    match kind:
        case "valid_lens":
            shapes = [(), (batch,), (batch, n)] if lead else [(), (n,)]
            arrays = {"lens": ints(0, m, c.of(shapes))}
            arrays |= {"query_lens": per_batch(0, n)} if c.chance(0.3) else {}
        case "key_range":
            arrays = {"start": per_batch(0, m), "stop": per_batch(0, m)}
        case "key_padding":
            p = c.of((0.1, 0.5, 0.9))
            array = v.random((c.of((1, batch)), m)) < p
            if c.chance(0.4):  # contiguous
                array = np.arange(m) < ints(0, m, (len(array), 1))
            arrays = {"array": array}
        case "causal":
            options, arrays = aligned()
        case "window":
            options, arrays = aligned()
            options |= {side: c.int(0, 6) for side in ("left", "right") if c.chance(0.6)}
        case "prefix":
            arrays = {"prefix_lens": per_batch(0, m)}
        case "documents":
            lengths = {"query_ids": n} if n == m and c.chance(0.6) else {"query_ids": n, "key_ids": m}
            is_sorted = c.chance(0.6)
            for name, length in lengths.items():
                ids = ints(-1, 2, c.of([(length,), (batch, length)]))
                arrays[name] = np.sort(ids, -1) if is_sorted else ids
        case "packed":
            count = c.int(1, 4)
            cu = cumulative(min(n, m), count, to_end=False)
            arrays = {"cu_query": cu}
            if c.chance(0.5):
                arrays = {"cu_query": cumulative(n, count, to_end=c.chance(0.5))}
                arrays |= {"cu_key": cumulative(m, count, to_end=c.chance(0.5))}
            options = {side: c.int(0, 4) for side in ("left", "right") if c.chance(0.4)}
            if ("cu_key" in arrays and options) or c.chance(0.2):
                options["align"] = c.of(("top_left", "bottom_right"))
        case "neighbours":
            counts = np.minimum(ints(0, 6, n), m)
            rows = [v.permutation(m)[:count] for count in counts]
            arrays = {"indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)}
            arrays |= {"indices": np.concatenate([np.zeros(0), *rows]).astype(np.int64)}
        case "dense":
            head = (c.of((1, heads)),) if heads else ()
            shapes = [(n, m)]
            shapes += [(*lead, *head, n, m), (*lead, *head, c.of((1, n)), c.of((1, m)))] if lead else [(1, m), (n, 1)]
            arrays = {"array": v.random(c.of(shapes)) < c.of((0.1, 0.5, 0.9))}
        case "function":
            options = {"name": c.of(list(FUNCTIONS))}
            if options["name"] == "captured":
                arrays = {"lens": ints(0, m, (batch, 1, 1, 1))}
        case "not":
            return Tree(kind, {}, {}, (draw_mask(c, v, lead, heads, n, m, depth - 1),))
        case _:
            first, second = (draw_mask(c, v, lead, heads, n, m, depth - 1) for _ in range(2))
            return Tree(kind, {}, {}, (first, second))
    return Tree(kind, options, {name: np.asarray(x) for name, x in arrays.items()})


def kinds_in(tree: Tree | None) -> set[str]:
    """Return the kinds of a tree."""
    return set() if tree is None else {tree.kind}.union(*map(kinds_in, tree.parts))


def leaves_of(tree: Tree | None) -> list[np.ndarray]:
    """Return the arrays of a tree in order."""
    if tree is None:
        return []
    return [*tree.arrays.values(), *(x for part in tree.parts for x in leaves_of(part))]


def with_leaves(tree: Tree, leaves: Iterator[Any]) -> Tree:
    """Return the tree with other arrays in its places."""
    arrays = {name: next(leaves) for name in tree.arrays}
    return tree._replace(arrays=arrays, parts=tuple(with_leaves(part, leaves) for part in tree.parts))


# ---------------------------------------------------------------- calls


def draw_call(c: Choice, v: np.random.Generator, dtype: str, extra_dtype: str, *, most: int = 2**19) -> Call:
    """Draw shapes, score, mask, extras and the gradients that come in."""
    axes = c.weighted({2: 1.5, 3: 3.0, 4: 5.0, 5: 0.7})
    while True:
        lead = tuple(c.weighted({1: 3.0, 2: 4.0, 3: 1.0, 0: 0.1}) for _ in range({2: 0, 3: 1, 4: 1, 5: 2}[axes]))
        kv_heads, group = (c.of((1, 2, 3)), c.of((1, 1, 2, 3))) if axes >= 4 else (0, 1)
        heads = kv_heads * group
        n, m = c.of(LENGTHS), c.of(LENGTHS)
        n, m = (m, m) if c.chance(0.4) else (1, m) if c.chance(0.1) else (n, m)
        dim, value_dim = c.of(DIMS), c.weighted(dict.fromkeys(DIMS, 1.0) | {0: 0.1})
        key_dim = dim if c.chance(0.85) else c.of(DIMS)
        if math.prod(lead) * max(1, heads) * n * m * max(dim, key_dim) <= most:
            break

    def axis(size: int, p: float = 0.12) -> int:
        return 1 if c.chance(p) else size

    def array(head: int, length: int, width: int, *, is_query: bool = False) -> np.ndarray:
        shape = (*(axis(size) for size in lead), *((head,) if axes >= 4 else ()), length, width)
        if axes >= 4 and head_axis == -2:
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        while not is_query and len(shape) > 2 and shape[0] == 1 and c.chance(0.3):  # missing leading axes broadcast too
            shape = shape[1:]
        return v.standard_normal(shape) * scale

    head_axis = -2 if axes >= 4 and c.chance(0.35) else -3
    scale = c.weighted({1.0: 6.0, 0.1: 1.0, 4.0: 1.0})
    query = array(axis(heads) if group == 1 else heads, n, dim, is_query=True)
    key, value = array(kv_heads, m, key_dim), array(axis(kv_heads), m, value_dim)
    # The output has the axes of all three together.
    shapes = [(1,) * (axes - x.ndim) + x.shape for x in (query, key, value)]
    lead = tuple(max(s[i] for s in shapes) if 0 not in [s[i] for s in shapes] else 0 for i in range(len(lead)))
    if axes >= 4:
        at = -2 if head_axis == -2 else -3
        heads = max(s[at] for s in shapes)
    score = draw_score(c, v, heads, dim, key_dim, n)
    arrays = {"query": query, "key": key, "value": value}
    pairs = (*lead, *((heads,) if heads else ()), n, m)
    if c.chance(0.3):
        shape = tuple(axis(size, 0.4) for size in pairs)[c.int(0, len(pairs) - 2) :]
        if n > 0 and m > 0 and c.chance(0.3):
            shape = (*((heads,) if heads and c.chance(0.7) else ()), 1, n + m - 1)
        bias = v.standard_normal(shape)
        arrays["bias"] = np.where(v.random(shape) < 0.15, -np.inf, bias) if c.chance(0.3) else bias
    normalizer = c.weighted({"softmax": 8.0, "sigmoid": 0.5, "sparsemax": 0.4, "entmax15": 0.4, 1.3: 0.2})
    if normalizer == "softmax" and c.chance(0.2):
        arrays["sink"] = v.standard_normal((heads,) if heads and c.chance(0.6) else ())
    arrays = {
        name: rounded(x, dtype if name in ("query", "key", "value") else extra_dtype) for name, x in arrays.items()
    }
    arrays |= {name: rounded(x, extra_dtype) for name, x in arrays_of(score).items()}
    mask = draw_mask(c, v, lead, heads, n, m) if c.chance(0.7) else None
    lens = None
    if c.chance(0.25):
        lens = v.integers(0, m + 1, c.of([(lead[0],), (lead[0], n)] if lead else [(), (n,)]))
    call = Call(lead, heads, n, m, arrays, score, mask, lens, head_axis, normalizer)
    seeded = ["out"] if c.chance(0.9) else []
    if normalizer == "softmax":
        seeded += [name for name in ("log_sum_exp", "entropy") if c.chance(0.2)]
    seeded += ["weights"] if c.chance(0.1) or not seeded else []
    outputs = evaluate(call)
    call = replace(call, seeds={name: rounded(v.standard_normal(outputs[name].shape), dtype) for name in seeded})
    return call


def plant(call: Call, v: np.random.Generator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the arrays and the incoming gradients, not finite wherever no pair that takes part reads them."""
    seen = seen_pairs(call)
    heads = call.rows[-2]
    reads: dict[str, Callable[[Any], Any]] = {
        "query": lambda x: inside(x, call, heads).expand(*call.rows, x.shape[-1]),
        "key": lambda x: inside(x, call, heads).expand(*call.rows[:-1], call.key_len, x.shape[-1]),
        "value": lambda x: inside(x, call, heads).expand(*call.rows[:-1], call.key_len, x.shape[-1]),
        "bias": lambda x: on_pairs(relative(x, call), call).expand(seen.shape),
    }
    rows = {
        "query": seen.any(-1)[..., None],
        "key": seen.any(-2)[..., None],
        "value": seen.any(-2)[..., None],
        "bias": seen,
    }
    bad = float(v.choice([np.nan, np.inf, -np.inf]))
    planted = dict(call.arrays)
    for name in ("query", "key", "value", "bias"):
        if name in planted and planted[name].size:
            leaf = zeros(planted[name].shape, requires_grad=True)
            view = reads[name](leaf)
            (uses,) = autograd.grad(view, leaf, ones(view.shape) * rows[name])
            x = np.nan if name == "bias" and bad == -np.inf else bad
            planted[name] = np.where((uses.numpy() == 0) & (planted[name] != -np.inf), x, planted[name])
    seeds = dict(call.seeds)
    if "out" in seeds and call.query_len:
        dead = ~outside(seen.any(-1), call, is_row=True).numpy()[..., None]
        seeds["out"] = np.where(dead, bad, seeds["out"])
    return planted, seeds


FRAMEWORKS = {"numpy": 0.45, "torch": 0.45, "tensorflow": 0.07, "jax": 0.02}
WHATS = {"attend": 60.0, "blocks": 5.0, "summaries": 5.0, "masked_softmax": 4.0, "merge": 4.0, "prepared": 6.0,
         "cache": 8.0, "layer": 5.0, "packed": 3.0, "threads": 2.0}  # fmt: skip


def draw(seed: int, index: int, version: int = 0, *, only: dict[str, Any] | None = None) -> Case:
    """Return case `index` of a seed; `only` fixes some of what is drawn (framework, what, mode, kernel, dtype)."""
    only = only or {}
    c, v = Choice(np.random.default_rng([seed, index])), np.random.default_rng([seed, index, version])
    framework = only.get("framework") or c.weighted(FRAMEWORKS)
    what = only.get("what") or c.weighted(WHATS)
    is_compiled = {"torch": 0.01, "tensorflow": 0.08, "jax": 0.5}.get(framework, 0)
    modes = (
        {"eager": 6.0, "repeat": 2.0, "write": 2.0}
        if framework in ("numpy", "torch")
        else {"eager": 1.0, "repeat": 0.3}
    )
    modes |= {"checkpoint": 0.4} if framework == "torch" else {}
    mode = only.get("mode") or (
        ("compiled" if c.chance(is_compiled) else c.weighted(modes)) if what == "attend" else "eager"
    )
    dtypes = {"float64": 3.0, "float32": 4.0, "float16": 1.0}
    dtypes |= {} if framework == "numpy" else {"bfloat16": 1.0}
    dtype = only.get("dtype") or c.weighted(dtypes)
    extra = dtype if c.chance(0.85) else c.of(("float32", "float64"))
    kernel = only.get("kernel") or c.weighted({"auto": 6.0, "native": 1.5, "streaming": 1.5, "dense": 0.7})
    call = draw_call(c, v, dtype, extra, most=c.weighted({2**14: 9.0, 2**19: 1.0}))
    if "neighbours" in kinds_in(call.mask) and kernel == "native":
        kernel = "gather"
    dropout = c.of((0.1, 0.5, 0.9)) if what == "attend" and call.key_len and c.chance(0.12) else 0.0
    stats: tuple[str, ...] = tuple(name for name in ("log_sum_exp", "entropy") if name in call.seeds)
    if c.chance(0.3):
        stats = (
            STATISTICS
            if call.normalizer == "softmax"
            else tuple(x for x in STATISTICS if x not in ("log_sum_exp", "entropy"))
        )
    planted = None
    if (call.mask is not None or call.valid_lens is not None) and c.chance(0.3):
        planted, seeds = plant(call, v)
        planted = {"arrays": planted, "seeds": seeds}
    second = dtype == "float64" == extra and mode == "eager" and framework != "numpy"
    with_weights = "weights" in call.seeds or c.chance(0.1)
    with_second = second and planted is None and c.chance(0.25)
    return Case(framework, what, mode, kernel, dtype, extra, call, dropout, c.int(0, 2**31), with_weights, stats,
                with_second, planted, c.int(0, 2**31), c.chance(0.5))  # fmt: skip
