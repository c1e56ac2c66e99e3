"""Table of kernels, and the choice among them. A new kernel adds its file and one entry in ``_TABLE``."""

from __future__ import annotations

from attnscore.base.arguments import check_choice
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels import tiling
from attnscore.kernels.base import Fact, Kernel, Plan, SinglePlan
from attnscore.kernels.dense import Dense
from attnscore.kernels.formula import FewKeys, OneTile
from attnscore.kernels.fused import Fused
from attnscore.kernels.gather import Gather
from attnscore.kernels.native.kernel import Native
from attnscore.kernels.tiled import Streaming
from attnscore.kernels.triton.kernel import Triton
from attnscore.problem.problem import Problem

__all__ = ["Kernel", "Plan", "SinglePlan", "choose", "names", "single_plan", "table"]

# In the order of preference of "auto", which never takes the dense kernel: its memory is quadratic.
_TABLE: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (Gather(), OneTile(), FewKeys(), Native(), Fused(), Triton(), Streaming(), Dense())
}


def table() -> dict[str, Kernel]:
    """Return all kernels by name, in the order of preference."""
    return dict(_TABLE)


def names() -> tuple[str, ...]:
    """Return the values that ``kernel=`` takes."""
    return ("auto", *_TABLE)


def choose(name: str, problem: Problem) -> Kernel:
    """Return the kernel that runs `problem`.

    Raises
    ------
    ArgumentError
        There is no kernel of that name.
    KernelUnavailable
        It was chosen by name and cannot run this problem.
    """
    check_choice("kernel", name, names())
    if name == "auto":
        # `needs` and `is_sometimes_slower` spare calls of the two methods. There is a first kernel: Streaming runs all.
        facts = _facts(problem)
        return next(
            kernel
            for kernel in _TABLE.values()
            if kernel.needs <= facts
            and not kernel.reasons_against(problem)
            and not (kernel.is_sometimes_slower and kernel.reasons_not_automatic(problem))
        )
    if reasons := _TABLE[name].reasons_against(problem):
        hint = 'kernel="auto" takes one that can run it'
        raise KernelUnavailable(message("kernel", f"a call that {name!r} can run", "; ".join(reasons), hint=hint))
    return _TABLE[name]


def _facts(problem: Problem) -> set[Fact]:
    """Return which of the facts that kernels need (`Kernel.needs`) are true of a problem."""
    ops, operands = problem.ops, problem.operands().values()
    # `has_programs` comes first because it is quick; where it is False, so are both other conditions.
    is_staged = ops.has_programs and (ops.needs_host_callback(*operands) or ops.fuses(*operands))
    facts: dict[Fact, bool] = {"masked": problem.mask is not None, "staged": is_staged}
    return {fact for fact, is_true in facts.items() if is_true}


def single_plan(problem: Problem, kernel: str = "auto") -> SinglePlan:
    """Return the plan of one problem; it raises as `choose` does."""
    return SinglePlan(choose(kernel, problem), problem, tiling.plan(problem))


def reasons(problem: Problem, chosen_kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return, for every kernel but the chosen one, why it was not chosen."""
    # A kernel without reasons that precedes the chosen one was passed over because the caller named the chosen one.
    reasons_by_name, preference = {}, f"{chosen_kernel.name} was asked for"
    for name, kernel in _TABLE.items():
        if kernel is chosen_kernel:
            preference = f"{chosen_kernel.name} comes first in the order of preference"
        else:
            reasons = kernel.reasons_against(problem) or kernel.reasons_not_automatic(problem)
            reasons_by_name[name] = reasons or (preference,)
    return reasons_by_name
