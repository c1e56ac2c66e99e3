"""The native kernel in a staged program: a host callback, which the framework calls when the program runs.

The callback rebuilds the problem over NumPy views of the framework's buffers: masks are read and tiles are planned at
run time, so traced lengths skip tiles too, and lengths that the graph does not know are known. The streaming kernel is
staged as the alternative, for programs on machines without host callbacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from attnscore import backends
from attnscore.backends.base import Array, Backend, HostArray, SeedHalves, broadcast, is_unknown
from attnscore.core import tiling
from attnscore.core.layout import AxisLayout
from attnscore.core.problem import Problem
from attnscore.core.tiled import Result, RowGradients, operands
from attnscore.kernels.base import Kernel
from attnscore.masks.base import check_shapes


def arrays_of(problem: Problem) -> list[Array]:
    """Return all arrays that a call reads: the operands, the arrays of the mask, a traced seed."""
    found = [*operands(problem).values()]
    if problem.mask is not None:
        found += problem.mask.leaves()
    if problem.dropout is not None and isinstance(problem.dropout.seed, SeedHalves):
        found += problem.dropout.seed
    return found


def _passed(problem: Problem) -> list[Array]:
    """Return the arrays passed to the callback: those of `arrays_of` except mask arrays that are known already."""
    found = [*operands(problem).values()]
    if problem.mask is not None:
        found += [x for x in problem.mask.leaves() if backends.host(x) is None]
    if problem.dropout is not None and isinstance(problem.dropout.seed, SeedHalves):
        found += problem.dropout.seed
    return found


def _rebuilt(problem: Problem, ops: Backend) -> Callable[[Sequence[Array]], Problem]:
    """Return a function that builds the problem from arrays in the order of `_passed`, for the backend `ops`."""
    names, dropout = tuple(operands(problem)), problem.dropout
    seeded = dropout is not None and isinstance(dropout.seed, SeedHalves)
    unknown = any(map(is_unknown, (*problem.score_shape.rows, problem.score_shape.key_len)))
    # The function holds none of the arrays: a framework may never release it.
    form, mask = problem.form.with_arrays(dict.fromkeys(problem.form.arrays())), problem.mask
    known = [backends.host(x) for x in mask.leaves()] if mask is not None else []
    if mask is not None:
        mask = mask.with_leaves(iter([np.zeros(0)] * len(known)))
    absent = dict.fromkeys(("score", "query", "key", "value", "bias", "sink", "dropout", "mask"))
    layout = _measured(problem.layout, (0,) * len(problem.score_shape.lead), 0, 0) if unknown else problem.layout
    empty = dataclasses.replace(problem, ops=ops, form=form, layout=layout, **absent)  # type: ignore[arg-type]
    dropout = dataclasses.replace(dropout, seed=0) if dropout is not None and seeded else dropout

    def rebuild(arrays: Sequence[Array]) -> Problem:
        named, left = dict(zip(names, arrays, strict=False)), iter(arrays[len(names) :])
        fields: dict[str, Any] = {name: named.pop(name) for name in ("value", "bias", "sink") if name in named}
        fields["form"] = new_form = form.with_arrays(named)
        if mask is not None:
            fields["mask"] = mask.with_leaves(iter([next(left) if x is None else x for x in known]))
        fields["dropout"] = dropout
        if dropout is not None and seeded:
            low, high = left
            seed = int(low) | int(high) << 32 if isinstance(low, (np.ndarray, np.generic)) else SeedHalves(low, high)
            fields["dropout"] = dataclasses.replace(dropout, seed=seed)
        if unknown:
            query, key, value = (
                ops.shape(x) for x in (*(new_form.arrays()[n] for n in ("query", "key")), fields["value"])
            )
            lead = broadcast(query[:-4], key[:-4], value[:-4])
            fields["layout"] = _measured(layout, lead, query[-2], key[-2])
        return dataclasses.replace(empty, **fields)

    return rebuild


def _measured(layout: AxisLayout, lead: tuple[Any, ...], query_len: Any, key_len: Any) -> AxisLayout:
    score_shape = dataclasses.replace(layout.score_shape, lead=lead, query_len=query_len, key_len=key_len)
    return dataclasses.replace(layout, score_shape=score_shape)


def _on_host(problem: Problem) -> Callable[[Sequence[HostArray]], Problem]:
    return _rebuilt(problem, problem.ops.at_run_time(backends.load("numpy")))


def _checked_on_host(problem: Problem) -> Callable[[Sequence[HostArray]], Problem]:
    """Return `_on_host`, with a check of mask shapes against lengths where the graph did not know them."""
    on_host = _on_host(problem)
    if problem.mask is None or all(part.is_known for part in problem.mask.shapes(problem.score_shape)):
        return on_host

    def checked(arrays: Sequence[HostArray]) -> Problem:
        rebuilt = on_host(arrays)
        if rebuilt.mask is not None:
            check_shapes(rebuilt.mask, rebuilt.score_shape)
        return rebuilt

    return checked


def forward(kernel: Kernel, problem: Problem) -> Result:
    """Stage `kernel.forward` as a host callback."""
    sums, rows = problem.accumulator, (*problem.score_shape.rows, 1)
    names = tuple(name for name in problem.statistics if name != "log_sum_exp")
    on_host, in_program = _checked_on_host(problem), _rebuilt(problem, problem.ops)

    def outputs(kernel: Kernel, rebuilt: Problem) -> tuple[Array, ...]:
        found = kernel.forward(rebuilt, tiling.plan(rebuilt))
        matrix = () if rebuilt.matrix is None else (found.matrix,)
        return found.out, found.row_max, found.log_denom, *(found.statistics[name] for name in names), *matrix

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        return outputs(kernel, on_host(arrays))

    results = [((*rows[:-1], problem.layout.value_dim), problem.dtype), *(((rows, sums),) * (2 + len(names)))]
    if problem.matrix is not None:
        results.append(((*rows[:-1], problem.score_shape.key_len), sums))

    def alternative(*arrays: Array) -> tuple[Array, ...]:
        return outputs(kernel.differentiable, in_program(arrays))

    out, row_max, log_denom, *numbers = problem.ops.host_callback(run, results, _passed(problem), alternative)
    matrix = None if problem.matrix is None else numbers.pop()
    return Result(out, row_max, log_denom, dict(zip(names, numbers, strict=True)), matrix)


def backward(
    kernel: Kernel, problem: Problem, result: Result, grads: RowGradients, wanted: frozenset[str]
) -> dict[str, Array]:
    """Stage `kernel.backward` as a host callback."""
    on_host, in_program = _on_host(problem), _rebuilt(problem, problem.ops)
    entropy = result.statistics.get("entropy")
    weights = result.matrix if problem.matrix == "weights" and grads.matrix is not None else None
    optional = [grads.out, grads.log_sum_exp, grads.entropy, grads.matrix, entropy, weights]
    rows = [result.out, result.row_max, result.log_denom, *(x for x in optional if x is not None)]
    given, count = [x is not None for x in optional], len(rows)
    names = [name for name in operands(problem) if name in wanted]

    def gradients(kernel: Kernel, rebuilt: Problem, rows: Sequence[Array]) -> tuple[Array, ...]:
        left = iter(rows)
        out, row_max, log_denom = next(left), next(left), next(left)
        *incoming, entropy, matrix = (next(left) if is_here else None for is_here in given)
        known = Result(out, row_max, log_denom, {} if entropy is None else {"entropy": entropy}, matrix)
        found = kernel.backward(rebuilt, tiling.plan(rebuilt), known, RowGradients(*incoming), frozenset(names))
        return tuple(found[name] for name in names)

    def run(*arrays: HostArray) -> tuple[HostArray, ...]:
        return gradients(kernel, on_host(arrays[count:]), arrays[:count])

    shapes = [(tuple(x.shape), problem.accumulator) for name, x in operands(problem).items() if name in wanted]

    def alternative(*arrays: Array) -> tuple[Array, ...]:
        return gradients(kernel.differentiable, in_program(arrays[count:]), arrays[:count])

    found = problem.ops.host_callback(run, shapes, [*rows, *_passed(problem)], alternative)
    return dict(zip(names, found, strict=True))
