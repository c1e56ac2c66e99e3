"""Ways to run a problem. One file is one kernel; a new one adds its file and one line in ``_TABLE``."""

from __future__ import annotations

from attnscore.core.arguments import check_choice
from attnscore.core.problem import Problem
from attnscore.errors import KernelUnavailable, message
from attnscore.kernels.base import AttentionOp, Kernel
from attnscore.kernels.dense import Dense
from attnscore.kernels.native.kernel import Native
from attnscore.kernels.tiled import Streaming

__all__ = ["Kernel", "AttentionOp", "choose", "names", "table"]

# In the order in which "auto" takes them. The dense kernel is never taken by itself: its memory is quadratic.
_TABLE: dict[str, Kernel] = {kernel.name: kernel for kernel in (Native(), Streaming(), Dense())}
_NOT_AUTOMATIC = {"dense": "quadratic memory: taken only when asked for by name"}


def table() -> dict[str, Kernel]:
    """All kernels by name, in the order of preference."""
    return dict(_TABLE)


def names() -> tuple[str, ...]:
    """What ``kernel=`` takes."""
    return ("auto", *_TABLE)


def choose(name: str, problem: Problem) -> Kernel:
    """The kernel to run `problem` with.

    Raises
    ------
    ArgumentError
        There is no kernel of that name.
    KernelUnavailable
        It was asked for by name and cannot run this problem.
    """
    check_choice("kernel", name, names())
    if name == "auto":
        return next(
            kernel
            for kernel in _TABLE.values()
            if kernel.name not in _NOT_AUTOMATIC and not kernel.reasons_against(problem)
        )
    reasons = _TABLE[name].reasons_against(problem)
    if reasons:
        raise KernelUnavailable(message("kernel", f"a problem that {name!r} can run", "; ".join(reasons)))
    return _TABLE[name]


def reasons(problem: Problem, chosen: Kernel) -> dict[str, tuple[str, ...]]:
    """For every kernel but the chosen one, why it was not taken."""
    found, order = {}, list(_TABLE)
    for name, kernel in _TABLE.items():
        if kernel is not chosen:
            why = (
                "was asked for"
                if order.index(name) < order.index(chosen.name)
                else "comes first in the order of preference"
            )
            later = (f"{chosen.name} {why}",)
            own = (_NOT_AUTOMATIC[name],) if name in _NOT_AUTOMATIC else ()
            found[name] = (*kernel.reasons_against(problem), *own) or later
    return found
