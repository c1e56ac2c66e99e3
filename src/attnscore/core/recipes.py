"""The plain call, prepared once: attention of three arrays, without bias or statistics, and its gradient.

Its score is a product, or an additive one of sides that are projected already.

Everything but the numbers follows from facts of the arrays then. It is worked out by the first call of a kind and kept
as a recipe, so that a tiny call costs little more than its kernel (66 us without, 23 with it, for (2, 8, 16, 64)).

- A recipe is found by everything that the long way reads, types included; what is no plain call has none.
- A score's name is read as the class it stands for now. A function registered under a name may give another score at
  each call, so it has no recipe.
- A mask is known by its numbers, where it is a few intervals a row (masks/cached.py).
- Nothing of a caller's arrays is held.
- The call that makes a recipe runs it: on a tape every call of a kind keeps the same tensors, as checkpoints demand.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from attnscore import backends, scores
from attnscore.backends.base import Array
from attnscore.core import plain_calls
from attnscore.core.cache import BoundedCache
from attnscore.core.plain_calls import PlainCall
from attnscore.core.problem import Problem
from attnscore.core.tiling import TilePlan
from attnscore.kernels import Kernel
from attnscore.masks.cached import numbers_of
from attnscore.scores import Additive, ScaledDot

_RECIPES: BoundedCache[PlainCall] = BoundedCache(256)


def name_of(
    query: Array, key: Array, value: Array, score: Any, options: tuple[Hashable, ...], mask: Any, valid_lens: Any
) -> Hashable | None:
    """What a plain call's recipe is kept under; None for any other call.

    `options` are all that a recipe depends on besides.
    """
    kind = type(query)
    if not kind is type(key) is type(value) or (by_score := _numbers_of(score)) is None:
        return None
    ops = backends.of_type(kind)
    arrays = (query, key, value, score.w_v) if type(score) is Additive else (query, key, value)
    if ops is None or not ops.is_plain(*arrays):
        return None
    facts: list[Hashable] = [by_score, *map(type, options), *options]
    if mask is not None or valid_lens is not None:
        if (numbers := numbers_of(mask, valid_lens)) is None:
            return None
        facts.append(numbers)
    for x in arrays:
        if (own := backends.array_signature(x)) is None:
            return None
        facts += (own, ops.strides(x))
    return tuple(facts)


def _numbers_of(score: Any) -> Hashable | None:
    """The class that a name stands for now, or a score by its class and its numbers; None for any other."""
    if type(score) is str:
        found = scores.named(score)
        return found if isinstance(found, type) else None
    if type(score) is ScaledDot:
        scale = score.scale
        return (ScaledDot, type(scale), scale) if scale is None or type(scale) in (int, float) else None
    if type(score) is Additive and score.W_q is score.W_k is score.bias is None:
        slope = score.negative_slope
        if type(score.activation) is str and type(slope) in (int, float):
            return (Additive, score.activation, type(slope), slope)
    return None


def find(name: Hashable | None) -> PlainCall | None:
    """The recipe of that name, once there is one."""
    return None if name is None else _RECIPES.get(name)


def keep(
    name: Hashable | None, arrays: tuple[Array, Array, Array], kernel: Kernel, problem: Problem, plan: TilePlan
) -> PlainCall | None:
    """Keep how `kernel` runs a plain call on arrays like these, where it says how."""
    if name is None or (call := plain_calls.prepare(arrays, kernel, problem, plan)) is None:
        return None
    return _RECIPES.get_or_compute(name, lambda: call)
