"""Gradients of a call, finite differences, and comparisons that state the error; all checks use them.

References are the dense kernel (the definition, whole matrix) and central differences in float64: no formula that is
under test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnscore import backends, kernels
from attnscore.api import attend, attend_vjp
from attnscore.backends.base import Array, Backend
from attnscore.core import tiling
from attnscore.core.problem import Problem
from attnscore.kernels import Kernel
from attnscore.masks import Mask

HostArray = np.ndarray[Any, Any]
STEP = 1e-5
"""Step of a central difference in float64: rounding (1e-16 / step) and curvature (step^2) both stay near 1e-10."""


def against_dense(problem: Problem, kernel: Kernel) -> None:
    """Compare `kernel` in small tiles with the whole matrix (output, weights, statistics), and two of its runs."""
    ops = problem.ops
    plan = tiling.plan(problem, (2, 3))
    wanted = kernels.table()["dense"].forward(problem, plan)
    got, again = (kernel.forward(problem, plan) for _ in range(2))
    close(f"{kernel.name}: out", values_of(ops, got.out), values_of(ops, wanted.out))
    same(ops, f"{kernel.name}: out differs from run to run", got.out, again.out)
    if problem.matrix is not None:
        if got.matrix is None:
            raise AssertionError(f"{kernel.name}: expected Result.matrix, which the problem asks for, got None")
        close(f"{kernel.name}: {problem.matrix}", values_of(ops, got.matrix), values_of(ops, wanted.matrix))
    for name in problem.statistics:
        one, other = (r.log_sum_exp if name == "log_sum_exp" else r.statistics[name] for r in (got, wanted))
        close(f"{kernel.name}: {name}", values_of(ops, one), values_of(ops, other))


def gradients(ops: Backend, score: Any, leaves: Mapping[str, Array], mask: Mask | None) -> dict[str, HostArray]:
    """Return the gradient of sum(out * cos(position)) for every leaf."""

    def call(*arrays: Array) -> Array:
        named = dict(zip(leaves, arrays, strict=True))
        return attend(named["query"], named["key"], named["value"], score=with_arrays(score, named), mask=mask)

    if ops.has_autodiff:
        out, pullback = ops.vjp(call, tuple(leaves.values()))
        found = pullback(native(ops, fixed_weights(tuple(out.shape)), out))
        return {name: values_of(ops, grad) for name, grad in zip(leaves, found, strict=True)}
    out, numpy_pullback = attend_vjp(leaves["query"], leaves["key"], leaves["value"], score=score, mask=mask)
    grads = numpy_pullback(fixed_weights(out.shape))
    return {"query": grads.query, "key": grads.key, "value": grads.value, **grads.score}


def check_differences(
    ops: Backend,
    label: str,
    call: Callable[..., Array],
    leaves: Mapping[str, Array],
    found: Mapping[str, HostArray],
    rng: np.random.Generator,
) -> None:
    """Compare each gradient with a central difference in a random direction."""
    for name, x in leaves.items():
        if tuple(found[name].shape) != tuple(x.shape):
            raise AssertionError(
                f"{label}: gradient of {name}: expected shape {tuple(x.shape)}, got {found[name].shape}"
            )
        here, direction = values_of(ops, x).astype(np.float64), rng.standard_normal(tuple(x.shape))
        ends = []
        for step in (STEP, -STEP):
            out = values_of(ops, call(**{**leaves, name: native(ops, here + step * direction, x)}))
            ends.append(float(np.sum(fixed_weights(out.shape) * out)))
        wanted = (ends[0] - ends[1]) / (2 * STEP)
        got = float(np.sum(found[name] * direction))
        close(f"{label}: gradient of {name}, along a random direction", got, wanted, tolerance=1e-6)


def fixed_weights(shape: tuple[int, ...]) -> HostArray:
    """Return fixed weights that turn an output into one number: all different, none zero."""
    return np.cos(np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)


def with_arrays(score: Any, arrays: Mapping[str, Array]) -> Any:
    """Return `score` with those of its arrays (of a wrapped score too) that `arrays` names."""
    if not dataclasses.is_dataclass(score) or isinstance(score, type):
        return score
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(score):
        value = getattr(score, field.name)
        if backends.is_array(value):
            changes[field.name] = arrays.get(field.name, value)
        elif hasattr(value, "tile"):
            changes[field.name] = with_arrays(value, arrays)
    return dataclasses.replace(score, **changes) if changes else score


def native(ops: Backend, x: HostArray, like: Array) -> Array:
    """Return a copy of `x` as an array of the framework, on the device of `like`."""
    return ops.asarray(np.array(x), like)


def values_of(ops: Backend, x: Array) -> HostArray:
    """Return the values of an array, on the host."""
    x = ops.stop_gradient(x)
    values = ops.host(x)
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x) if values is None else values


def close(what: str, got: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    """Raise AssertionError unless equal to `tolerance` of the largest entry; NaN and infinities must agree."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if got.shape != wanted.shape:
        raise AssertionError(f"{what}: expected shape {wanted.shape}, got {got.shape}")
    finite = np.isfinite(wanted)
    scale = max(1.0, float(np.abs(wanted[finite]).max(initial=0)))
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        raise AssertionError(f"{what}: NaN or infinity where there should be none, or none where there should be")
    error = float(np.abs(got[finite] - wanted[finite]).max(initial=0))
    if error > tolerance * scale:
        raise AssertionError(f"{what}: off by {error:.3g}, where {tolerance * scale:.3g} is allowed")


def same(ops: Backend, what: str, got: Array, wanted: Array) -> None:
    """Raise AssertionError unless both hold the same bits."""
    if not np.array_equal(values_of(ops, got), values_of(ops, wanted), equal_nan=True):
        raise AssertionError(what)
