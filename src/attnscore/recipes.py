"""The plain call, prepared once: attention of three arrays alone, no mask, bias or statistics, that no tape records.

Everything but the numbers follows from facts of the arrays then. It is worked out by the first call of a kind and kept
as a recipe, so that a tiny call costs little more than its kernel (66 us without, for (2, 8, 16, 64)).

- A recipe is found by everything that the long way reads, types included; what is no plain call has none.
- A score's name is read as the class it stands for now. A function registered under a name may give another score at
  each call, so it has no recipe.
- Nothing of a caller's arrays is held.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from attnscore import frameworks, scoring
from attnscore.frameworks.contract import Array, Framework, HostArray
from attnscore.grid import Layout
from attnscore.kernels import Kernel
from attnscore.problem import Problem
from attnscore.recall import Memory
from attnscore.threads import get_num_threads
from attnscore.tiling import TilePlan


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to run a plain call on other arrays of the same facts."""

    ops: Framework
    layout: Layout
    dtype: str
    run: Callable[[HostArray, HostArray, HostArray, int], HostArray]

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        ops, inward, host = self.ops, self.layout.inward, frameworks.load("numpy")
        out = self.run(
            inward(host, ops.memory(query), is_query=True),
            inward(host, ops.memory(key), is_query=False),
            inward(host, ops.memory(value), is_query=False),
            ops.threads(get_num_threads()),
        )
        return self.layout.outward(ops, ops.from_memory(out, self.dtype, value))


_RECIPES: Memory[Recipe] = Memory(256)


def name_of(
    query: Array, key: Array, value: Array, options: tuple[Hashable, ...], absent: tuple[Any, ...]
) -> Hashable | None:
    """What a plain call's recipe is kept under; None for any other call.

    `options` are all that a recipe depends on besides, the score's name first; `absent` must be None each.
    """
    if any(x is not None for x in absent) or not type(query) is type(key) is type(value):
        return None
    if type(options[0]) is not str or not isinstance(score := scoring.named(options[0]), type):
        return None
    ops = frameworks.known(type(query))
    if ops is None or not ops.is_plain(query, key, value):
        return None
    facts = [frameworks.facts(x) for x in (query, key, value)]
    return None if None in facts else (score, *map(type, options), *options, *facts)


def find(name: Hashable | None) -> Recipe | None:
    """The recipe of that name, once there is one."""
    return None if name is None else _RECIPES.known(name)


def keep(name: Hashable | None, kernel: Kernel, problem: Problem, plan: TilePlan) -> None:
    """Keep how `kernel` runs a plain call, where it says how."""
    if name is None or (run := kernel.plain(problem, plan)) is None:
        return
    recipe = Recipe(problem.ops, problem.layout, problem.dtype, run)
    _RECIPES.recall(name, lambda: recipe)
