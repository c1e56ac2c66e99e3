"""Attention calls of frameworks as a `Site`: the arrays of a call, and a function that makes it on the host.

Requirements:
- the arrays are the framework's own, symbolic in a program, and NumPy's when `build` gets them;
- everything else of a call is known when the model's code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import attnscore as ats
from attnscore import backends
from attnscore.diagnostics.watching.staged import Site
from attnscore.diagnostics.watching.sums import MASKED_BIAS, Call, Scores, as_float32, deciding_options, with_infinity
from attnscore.masks.base import Mask, all_of
from attnscore.scores.base import arrays_of, with_new_arrays

Arrays = dict[str, NDArray[Any]]


def dot_product(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    bias: Any = None,
    mask: Any = None,
    query_lens: Any = None,
    key_lens: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Site:
    """Return a call of scaled dot products; query, key and value are (..., position, head, feature).

    `mask` and `bias` broadcast to (batch, head, query, key); `mask` is True where a query may attend. `query_lens` and
    `key_lens` are (batch,); `window` is the number of keys before and after the query's own position.
    """
    named = {
        "query": query, "key": key, "value": value, "bias": bias, "mask": mask, "query_lens": query_lens,
        "key_lens": key_lens,
    }  # fmt: skip
    arrays = {name: x for name, x in named.items() if x is not None}

    def build(numbers: Arrays) -> Call:
        # One sequence is a batch of one.
        numbers = {
            name: x[(None,) * (4 - x.ndim)] if x.ndim < 4 and not name.endswith("_lens") else x
            for name, x in numbers.items()
        }
        q, k = numbers["query"], numbers["key"]
        parts: list[Mask] = [ats.Dense(numbers["mask"] != 0)] if "mask" in numbers else []
        parts += [ats.Causal(offset=0)] if is_causal else []
        if window is not None:
            parts += [ats.Causal(offset=window[1]), ~ats.Causal(offset=-window[0] - 1)]
        if "query_lens" in numbers or "key_lens" in numbers:
            batch, query_length, key_length = q.shape[0], q.shape[-3], k.shape[-3]
            of_keys, of_queries = numbers.get("key_lens", np.full(batch, key_length)), numbers.get("query_lens")
            of_queries = None if of_queries is None else np.clip(of_queries, 0, query_length)
            parts.append(ats.ValidLens(np.clip(of_keys, 0, key_length), of_queries))
        options: dict[str, Any] = {"score": ats.ScaledDot(scale), "head_axis": -2, "mask": all_of(parts)}
        if "bias" in numbers:
            options["bias"] = as_float32(with_infinity(numbers["bias"], MASKED_BIAS)).astype(as_float32(q).dtype)
        return Call(q, k, options, numbers.get("value"))

    return Site(arrays, build)


def scores(x: Any, mask: Any = None) -> Site:
    """Return the call of a softmax over scores (..., query, key).

    `mask` is True where a query may attend, (batch, query, key) or (batch, key).
    """
    arrays = {"scores": x} | ({} if mask is None else {"mask": mask})

    def build(numbers: Arrays) -> Scores:
        x = numbers["scores"]
        if "mask" in numbers:
            visible = np.asarray(numbers["mask"]) != 0
            if visible.ndim == 2:  # (batch, key)
                visible = visible[:, None]
            x = np.where(visible, x, np.array(-np.inf, x.dtype))
        return Scores(x)

    return Site(arrays, build)


def attended(query: Any, key: Any, value: Any, **options: Any) -> Site:
    """Return a call of `attend`; raise NotRecorded where its weights have no statistics of a softmax."""
    key, options = deciding_options(key, options)
    arrays = {"query": query, "key": key} | ({"value": value} if backends.is_array(value) else {})
    names_of, restore = {}, {}
    for name, x in options.items():
        parts, restore[name] = _parts(x)
        names_of[name] = [f"{name}.{place}" for place in range(len(parts))]
        arrays |= dict(zip(names_of[name], parts, strict=True))

    def build(numbers: Arrays) -> Call:
        of_call = {name: make([numbers[part] for part in names_of[name]]) for name, make in restore.items()}
        return Call(numbers["query"], numbers["key"], of_call, numbers.get("value"))

    return Site(arrays, build)


def _parts(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arrays in an option of `attend`, and a function that makes the option of such arrays."""
    if backends.is_array(x):
        return [x], lambda parts: parts[0]
    if isinstance(x, Mask):
        return [*x.leaves()], lambda parts: x.with_leaves(iter(parts))
    if not isinstance(x, str) and (arrays := arrays_of(x)):
        return [*arrays.values()], lambda parts: with_new_arrays(x, parts)
    return [], lambda _: x
