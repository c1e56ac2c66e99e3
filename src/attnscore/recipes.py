"""The plain call, prepared once: attention of three arrays, without bias or statistics, that no tape records.

Its score is a product, or an additive one of sides that are projected already.

Everything but the numbers follows from facts of the arrays then. It is worked out by the first call of a kind and kept
as a recipe, so that a tiny call costs little more than its kernel (66 us without, 23 with it, for (2, 8, 16, 64)).

- A recipe is found by everything that the long way reads, types included; what is no plain call has none.
- A score's name is read as the class it stands for now. A function registered under a name may give another score at
  each call, so it has no recipe.
- A mask is known by its numbers, where it is a few intervals a row (masking/known.py).
- Nothing of a caller's arrays is held.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscore import frameworks, scoring
from attnscore.frameworks.contract import Array, Framework
from attnscore.kernels import Kernel
from attnscore.kernels.contract import PlainRun
from attnscore.kernels.native_inputs import STORED, aligned
from attnscore.masking.known import Known, numbers_of
from attnscore.problem import Problem
from attnscore.recall import Memory
from attnscore.scoring import Additive, ScaledDot
from attnscore.threads import get_num_threads
from attnscore.tiling import TilePlan


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to run a plain call on other arrays of the same facts."""

    ops: Framework
    dtype: str
    shape: tuple[int, ...]
    """Of the output as it is filled: the caller's axes, heads in front of queries."""
    stored: str
    has_heads_behind: bool
    run: PlainRun

    def __call__(self, query: Array, key: Array, value: Array, score: Any) -> Array:
        ops, place = self.ops, self.ops.place
        out = aligned(np.empty, self.shape, self.stored) if ops.wants_aligned else np.empty(self.shape, self.stored)
        weights = place(score.w_v) if type(score) is Additive else 0
        self.run(place(query), place(key), place(value), out, weights, ops.threads(get_num_threads()))
        found = ops.from_memory(out, self.dtype, value)
        return ops.swap_axes(found, -3, -2) if self.has_heads_behind else found


_RECIPES: Memory[Recipe] = Memory(256)


def name_of(
    query: Array, key: Array, value: Array, score: Any, options: tuple[Hashable, ...], mask: Any, valid_lens: Any
) -> Hashable | None:
    """What a plain call's recipe is kept under; None for any other call.

    `options` are all that a recipe depends on besides.
    """
    kind = type(query)
    if not kind is type(key) is type(value) or (by_score := _numbers_of(score)) is None:
        return None
    ops = frameworks.known(kind)
    arrays = (query, key, value, score.w_v) if type(score) is Additive else (query, key, value)
    if ops is None or not ops.is_plain(*arrays):
        return None
    facts: list[Hashable] = [by_score, *map(type, options), *options]
    if mask is not None or valid_lens is not None:
        if (numbers := numbers_of(mask, valid_lens)) is None:
            return None
        facts.append(numbers)
    for x in arrays:
        if (own := frameworks.facts(x)) is None:
            return None
        facts += (own, ops.strides(x))
    return tuple(facts)


def _numbers_of(score: Any) -> Hashable | None:
    """The class that a name stands for now, or a score by its class and its numbers; None for any other."""
    if type(score) is str:
        found = scoring.named(score)
        return found if isinstance(found, type) else None
    if type(score) is ScaledDot:
        scale = score.scale
        return (ScaledDot, type(scale), scale) if scale is None or type(scale) in (int, float) else None
    if type(score) is Additive and score.W_q is score.W_k is score.bias is None:
        slope = score.negative_slope
        if type(score.activation) is str and type(slope) in (int, float):
            return (Additive, score.activation, type(slope), slope)
    return None


def find(name: Hashable | None) -> Recipe | None:
    """The recipe of that name, once there is one."""
    return None if name is None else _RECIPES.known(name)


def keep(
    name: Hashable | None, arrays: tuple[Array, Array, Array], kernel: Kernel, problem: Problem, plan: TilePlan
) -> None:
    """Keep how `kernel` runs a plain call on arrays like these, where it says how."""
    if name is None or not (problem.mask is None or isinstance(problem.mask, Known)):
        return
    ops, grid, layout, host = problem.ops, problem.grid, problem.layout, frameworks.load("numpy")
    stored = STORED.get(problem.dtype, problem.dtype)
    inward = zip(arrays, (True, False, False), strict=True)
    views = [layout.inward(host, ops.memory(x), is_query=is_query) for x, is_query in inward]
    run = kernel.plain(problem, plan, (*views, np.empty((*grid.rows, layout.value_dim), stored)))
    if run is not None:
        shape, has_heads_behind = (*grid.user_shape[:-1], layout.value_dim), layout.axes >= 4 and layout.head_axis == -2
        recipe = Recipe(ops, problem.dtype, shape, stored, has_heads_behind, run)
        _RECIPES.recall(name, lambda: recipe)
