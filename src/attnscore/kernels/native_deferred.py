"""The native kernel on arrays whose numbers come later: a call that is traced now and run by the framework then.

The problem is rebuilt over NumPy's views of the framework's own buffers when the call runs: masks are read and tiles
planned there, so that traced lengths skip tiles too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from attnscore import frameworks, tiling
from attnscore.engine import Result, RowGradients, operands
from attnscore.frameworks.contract import Array, SeedWords
from attnscore.kernels.contract import Kernel
from attnscore.kernels.native_inputs import HostArray
from attnscore.problem import Problem


def arrays_of(problem: Problem) -> list[Array]:
    """Everything that a run reads: the operands, the arrays of the mask, a traced seed."""
    found = [*operands(problem).values()]
    if problem.mask is not None:
        found += problem.mask.leaves()
    if problem.dropout is not None and isinstance(problem.dropout.seed, SeedWords):
        found += problem.dropout.seed
    return found


def _hosted(problem: Problem) -> Callable[[Sequence[HostArray]], Problem]:
    """The same problem over the NumPy arrays of `arrays_of`, which come when the call runs."""
    names, mask, dropout = tuple(operands(problem)), problem.mask, problem.dropout
    seeded = dropout is not None and isinstance(dropout.seed, SeedWords)
    # No traced array stays in what waits for the call.
    empty = dataclasses.replace(problem, query=None, key=None, ops=frameworks.load("numpy"))

    def hosted(arrays: Sequence[HostArray]) -> Problem:
        named = dict(zip(names, arrays, strict=False))
        left = iter(arrays[len(names) :])
        own = {name: named.pop(name) for name in ("value", "bias", "sink") if name in named}
        later = None if mask is None else mask.with_leaves(left)
        seed = dropout
        if dropout is not None and seeded:
            low, high = (int(x) for x in left)
            seed = dataclasses.replace(dropout, seed=low | high << 32)
        return dataclasses.replace(empty, form=empty.form.with_arrays(named), mask=later, dropout=seed, **own)

    return hosted


def forward(kernel: Kernel, problem: Problem) -> Result:
    """`kernel.forward` when the call runs."""
    sums, rows = problem.accumulator, (*problem.grid.rows, 1)
    names = tuple(name for name in problem.statistics if name != "log_sum_exp")
    hosted = _hosted(problem)

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        now = hosted(arrays)
        found = kernel.forward(now, tiling.plan(now))
        return found.out, found.top, found.log_total, *(found.statistics[name] for name in names)

    results = [((*rows[:-1], problem.layout.value_dim), problem.dtype), *(((rows, sums),) * (2 + len(names)))]
    out, top, log_total, *numbers = problem.ops.host_call(run, results, arrays_of(problem))
    return Result(out, top, log_total, dict(zip(names, numbers, strict=True)))


def backward(
    kernel: Kernel, problem: Problem, result: Result, grads: RowGradients, wanted: frozenset[str]
) -> dict[str, Array]:
    """`kernel.backward` when the call runs."""
    hosted = _hosted(problem)
    entropy = result.statistics.get("entropy")
    optional = [grads.out, grads.log_sum_exp, grads.entropy, entropy]
    rows = [result.out, result.top, result.log_total, *(x for x in optional if x is not None)]
    given = [x is not None for x in optional]
    names = [name for name in operands(problem) if name in wanted]

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        now, own = hosted(arrays[len(rows) :]), iter(arrays[: len(rows)])
        out, top, log_total = next(own), next(own), next(own)
        out_grad, lse_grad, entropy_grad, entropy = (next(own) if is_here else None for is_here in given)
        known = Result(out, top, log_total, {} if entropy is None else {"entropy": entropy})
        incoming = RowGradients(out_grad, lse_grad, entropy_grad)
        found = kernel.backward(now, tiling.plan(now), known, incoming, frozenset(names))
        return tuple(found[name] for name in names)

    shapes = [(tuple(x.shape), problem.accumulator) for name, x in operands(problem).items() if name in wanted]
    return dict(zip(names, problem.ops.host_call(run, shapes, [*rows, *arrays_of(problem)]), strict=True))
