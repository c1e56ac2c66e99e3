"""Check of a kernel: `check_kernel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnscore import backends, kernels
from attnscore.backends.base import Array, Backend
from attnscore.core import tiling
from attnscore.core.online_softmax import STATISTICS
from attnscore.core.problem import Problem, build_problem
from attnscore.core.tiled import RowGradients
from attnscore.errors import ArgumentError, message
from attnscore.kernels import AttentionOp, Kernel
from attnscore.masks import Causal, Dense
from attnscore.scores import Additive, Gaussian
from attnscore.testing.compare import against_dense, check_differences, fixed_weights, native, values_of


def check_kernel(kernel: str | Kernel, *, like: Array | None = None, seed: int = 0) -> None:
    """Check a kernel on odd sizes, masks, bias, sink, dropout and fully masked queries.

    Problems that `kernel` cannot run (``reasons_against``) are skipped. On the others output, weights and all
    statistics are compared with the dense kernel in float64, two runs with each other, and gradients with finite
    differences.

    Parameters
    ----------
    kernel : a kernel object, or a name among ``attnscore.available()["kernels"]``
    like : array, optional
        An array of the framework, on the device, to check with; None: NumPy.
    seed : int

    Raises
    ------
    AssertionError
    ArgumentError
        There is no kernel of that name.

    Examples
    --------
    >>> from attnscore.testing import check_kernel
    >>> check_kernel("streaming")
    """
    if isinstance(kernel, str):
        if kernel not in kernels.table():
            raise ArgumentError(message("kernel", "one of " + ", ".join(kernels.table()), repr(kernel)))
        kernel = kernels.table()[kernel]
    home = np.zeros(1) if like is None else like
    ops = backends.of({"like": home})
    rng = np.random.default_rng(seed)
    for label, shapes, arguments in _problems(ops, home, rng):
        inputs = {name: native(ops, rng.standard_normal(shape), home) for name, shape in shapes.items()}
        with ops.numeric_scope():
            problem, _ = build_problem(*inputs.values(), statistics=STATISTICS, matrix="weights", **arguments)
            if kernel.reasons_against(problem):
                continue
            try:
                against_dense(problem, kernel)
                if ops.has_autodiff or kernel.has_vjp:
                    _check_run(ops, dataclasses.replace(problem, statistics=("entropy",)), kernel, rng)
            except AssertionError as error:
                raise AssertionError(f"{label}: {error}") from None


def _problems(
    ops: Backend, home: Array, rng: np.random.Generator
) -> Iterator[tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]]:
    """(label, shapes, arguments): sizes of one, prime, grouped heads, broadcast batch; every kind of extra."""

    def numbers(*shape: int) -> Array:
        return native(ops, rng.standard_normal(shape), home)

    def sizes(query: int, key: int, heads: int = 1, key_heads: int = 1, dim: int = 4) -> dict[str, tuple[int, ...]]:
        lead = (2, key_heads, key)
        return {"query": (2, heads, query, dim), "key": (*lead, dim), "value": (*lead, 3)}

    masking = np.where(rng.random((2, 1, 5, 7)) < 0.3, -np.inf, 0.5)
    yield "one query, one key", sizes(1, 1), {}
    yield "grouped heads", sizes(5, 7, 4, 2), {"score": "dot"}
    yield "causal, fully masked queries", sizes(7, 5, 2, 2), {"mask": Causal("bottom_right")}
    yield "lengths, sink", sizes(5, 7, 4, 2), {"valid_lens": [0, 4], "sink": numbers(4)}
    yield "array mask", sizes(5, 7), {"mask": Dense(rng.random((2, 1, 5, 7)) < 0.5), "score": Gaussian(0.8)}
    yield "bias that masks", sizes(5, 7, 2, 1), {"bias": native(ops, masking, home), "score": "cosine"}
    yield "additive", sizes(5, 7, 2, 2), {"score": Additive(numbers(3), numbers(3, 4), numbers(3, 4))}
    yield "dropout", sizes(5, 7, 2, 2), {"dropout": 0.4, "seed": 3}


def _check_run(ops: Backend, problem: Problem, kernel: Kernel, rng: np.random.Generator) -> None:
    """Compare gradients of out, log-sum-exp, entropy and weights with finite differences of the kernel."""
    run = AttentionOp(kernel, problem, tiling.plan(problem, (2, 3)))
    operands = run.operands()

    def total(**arrays: Array) -> Array:
        result = run.result(run.forward(tuple(arrays.values())))
        rows = (result.out, result.log_sum_exp, result.statistics["entropy"], result.matrix)
        return ops.concat([ops.reshape(ops.where(ops.isfinite(x), x, 0.0), (-1,)) for x in rows], 0)

    if kernel.has_vjp:
        result = kernel.forward(problem, run.plan)
        rows: tuple[Any, ...] = (result.out, result.log_sum_exp, result.statistics["entropy"], result.matrix)
        ends = np.cumsum([0, *(int(np.prod(x.shape)) for x in rows)])
        weights = fixed_weights((int(ends[-1]),))
        seeds = (native(ops, weights[ends[i] : ends[i + 1]].reshape(tuple(x.shape)), x) for i, x in enumerate(rows))
        found = kernel.backward(problem, run.plan, result, RowGradients(*seeds), frozenset(operands))
    else:
        out, pullback = ops.vjp(lambda *arrays: total(**dict(zip(operands, arrays, strict=True))), [*operands.values()])
        grads = pullback(native(ops, fixed_weights(tuple(out.shape)), out))
        found = dict(zip(operands, grads, strict=True))
    finite = {name: x for name, x in operands.items() if ops.known_finite(x)}
    values = {name: values_of(ops, found[name]) for name in finite}
    check_differences(ops, kernel.name, lambda **arrays: total(**{**operands, **arrays}), finite, values, rng)
