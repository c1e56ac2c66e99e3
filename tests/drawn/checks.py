"""Every drawn case against the reference: `check` returns what was wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from draw import EPS, Case, Choice, draw
from frameworks import FRAMEWORK, Attend, Named, arrays_for
from probes import PROBES
from reference import Arrays, Call, evaluate, scales

import attnscore as ats

FACTOR = {"float64": 128.0, "float32": 16.0, "float16": 16.0, "bfloat16": 16.0}
"""Multiples of eps of the sums (float32 for 16-bit arrays) times scale that an error may have."""


class Wrong(Exception):
    """A result that differs from the reference."""


def compare(name: str, actual: Any, expected: Any, tolerance: float) -> float:
    """Return the largest error over the tolerance; raise Wrong above 1."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise Wrong(f"{name}: shape {actual.shape}, expected {expected.shape}")
    if not actual.size:
        return 0.0
    is_finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):
        same = np.where(is_finite, np.abs(actual - np.where(is_finite, expected, 0.0)) <= tolerance, actual == expected)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        error = np.nanmax(np.abs(actual[is_finite] - expected[is_finite]), initial=0)
        raise Wrong(f"{name}{list(at)}: got {actual[at]!r}, expected {expected[at]!r} "
                    f"({(~same).sum()} of {same.size}, off by {error:.3g}, allowed {tolerance:.3g})")  # fmt: skip
    errors = np.abs(actual[is_finite] - expected[is_finite])
    return float(errors.max(initial=0) / tolerance) if tolerance else 0.0


class Expected(NamedTuple):
    """Results of the reference, and the tolerance of each."""

    results: Arrays
    tolerances: dict[str, float]


def expected_of(case: Case, call: Call, second: Arrays | None) -> Expected:
    """Return the reference's results, and as tolerance the larger of 2 x the plain error and FACTOR eps scale."""
    rng = np.random.default_rng(0)
    results = evaluate(call, second=second)
    scale = scales(call, results, rng)
    plain = evaluate(call, dtype=torch.float32) if case.dtype == "float32" == case.extra_dtype else {}
    tolerances = {}
    for name, x in results.items():
        base = name.removeprefix("second.")
        dtype = case.dtype if name in ("out", "weights", "scores") or base.endswith(("query", "key", "value")) else None
        dtype = dtype or ("float64" if case.dtype == "float64" else "float32")
        if name.startswith("grad.") and not base.endswith(("query", "key", "value")):
            dtype = max((case.dtype, case.extra_dtype), key=EPS.get)
        stored = max(case.dtype, dtype, key=EPS.get) if name.startswith("grad.score.") else case.dtype
        tiny = float(torch.finfo(getattr(torch, stored)).smallest_normal)
        # The rounding of subnormal numbers; or what a weight that underflows to 0 is multiplied with in a gradient.
        tiny *= EPS[case.dtype] if case.dtype in ("float16", "bfloat16") else 1e6
        tolerance = FACTOR[dtype] * EPS[dtype] * scale.get(name, 0.0) + tiny
        if name.startswith("second."):
            tolerance = 1e-9 * (
                1 + max(float(np.abs(y).max(initial=0)) for n, y in results.items() if n.startswith("second."))
            )
        if name in plain:
            with np.errstate(invalid="ignore"):
                tolerance = max(tolerance, 2 * float(np.nanmax(np.abs(plain[name] - x), initial=0)))
        tolerances[name] = tolerance
    return Expected(results, tolerances)


REFUSALS = (
    # (part of the message, why it is right)
    ("the window of each sequence: Packed", "Packed with lengths of its own beside Causal"),
    ("as many heads as key", "prepared keys of parameters per query head have all query heads"),
    ("expected parameters without an axis of heads, as the key has none", "prepared keys without an axis of heads"),
    ("NumPy has no autodiff to derive the gradient of a score that defines only `tile`", "custom_l1"),
)


def is_refusal(error: Exception, case: Case) -> bool:
    """Return whether the documentation says that such a call is refused."""
    if isinstance(error, ats.KernelUnavailable):
        return case.kernel != "auto"
    if "as many heads" in str(error) and case.what != "prepared":
        return False
    return isinstance(error, ats.AttnscoreError) and any(part in str(error) for part, _ in REFUSALS)


@dataclass
class Tally:
    """What was checked."""

    cases: int = 0
    refused: int = 0
    worst: float = 0.0


def check(seed: int, index: int, tally: Tally, only: Named | None = None) -> None:
    """Draw a case, run it, and compare; raise Wrong, or what the library raised."""
    case = draw(seed, index, only=only)
    has_empty = any(0 in np.shape(x) for x in case.call.arrays.values())
    if (case.framework, case.mode) == ("tensorflow", "compiled") and has_empty:
        # TensorFlow's optimizer of graphs (2.21) divides by a length of 0 in products with ones, and the process ends.
        case = replace(case, mode="eager")
    tally.cases += 1
    try:
        if case.what == "attend":
            tally.worst = max(tally.worst, _attend(seed, index, case, only))
        else:
            choice = Choice(np.random.default_rng([seed, index, 99]))
            for name, actual, wanted, tolerance in PROBES[case.what](case, FRAMEWORK[case.framework], choice):
                compare(name, actual, wanted, tolerance)
    except Exception as error:
        if not is_refusal(error, case):
            raise
        tally.refused += 1


def _attend(seed: int, index: int, case: Case, only: Named | None) -> float:
    framework, worst = FRAMEWORK[case.framework], 0.0
    forward = Attend(case)
    arrays, of_mask, seeds = arrays_for(case, framework, case.call, case.planted)
    versions = (0, 1, 0) if case.mode in ("repeat", "write") else (0,)
    for version in versions:
        this = draw(seed, index, version, only=only) if version else case
        if version or case.mode != "eager":
            new = arrays_for(this, framework, this.call, this.planted)
            fits = [np.shape(a) == np.shape(b) for a, b in zip(of_mask, new[1], strict=True)]
            if case.mode == "write" and all(fits):
                for old, x in [*((arrays[n], x) for n, x in new[0].items()), *zip(of_mask, new[1], strict=True)]:
                    framework.write(old, x)
                seeds = new[2]
            else:
                arrays, of_mask, seeds = new
            forward.case = replace(case, call=this.call)
        worst = max(worst, _one(replace(case, call=this.call), framework, forward, arrays, of_mask, seeds))
    return worst


def _one(case: Case, framework: Any, forward: Attend, arrays: Named, of_mask: list[Any], seeds: Named) -> float:
    second = None
    if case.with_second and seeds:
        rng = np.random.default_rng(1)
        second = {name: np.asarray(rng.standard_normal(x.shape)) for name, x in case.call.arrays.items()}
    of_second = None if second is None else {name: framework.array(x, "float64") for name, x in second.items()}
    results = framework.run(case, forward, arrays, of_mask, seeds, of_second)
    results = {name: framework.host(x) for name, x in results.items()}
    call = case.call
    if case.dropout:
        call = replace(call, keep=dropped(case, framework, arrays, of_mask))
    expected, worst = expected_of(case, call, second), 0.0
    for name, x in results.items():
        base = name.removeprefix("vjp.")
        worst = max(worst, compare(name, x, expected.results[base], expected.tolerances[base]))
    missing = [name for name in expected.results if name.startswith("grad.") and seeds and name not in results]
    if missing and (case.framework, case.kernel) != ("numpy", "dense"):
        wrong = [name for name in missing if np.abs(expected.results[name]).max(initial=0) > expected.tolerances[name]]
        if wrong:
            raise Wrong(f"no gradient: {wrong}")
    return worst


def dropped(case: Case, framework: Any, arrays: Named, of_mask: list[Any]) -> np.ndarray:
    """Return what dropout multiplies each weight with: 0 or 1 / (1 - p), from values that are an identity matrix."""
    call = case.call
    shape = (*call.arrays["value"].shape[:-1], call.key_len)
    value = np.eye(call.key_len)
    value = value[:, None] if call.heads and call.head_axis == -2 and len(shape) > 2 else value
    value = np.broadcast_to(value, shape)
    identity = {**arrays, "value": framework.array(value, case.dtype)}
    plain = replace(case, return_weights=True, return_stats=(), mode="eager")
    outputs = Attend(plain)(identity, of_mask)
    pooled, weights = (framework.host(outputs[name]) for name in ("out", "weights"))
    pooled = pooled.swapaxes(-2, -3) if call.heads and call.head_axis == -2 else pooled
    pooled, weights = (x.reshape(*call.rows, call.key_len) for x in (pooled, weights))
    factor = 1 / (1 - case.dropout)
    is_large = weights > 1e-3
    ratio = np.where(is_large, pooled / np.where(is_large, weights, 1.0), factor)
    kept = ratio > factor / 2
    compare("dropout: weights that stay", ratio, np.where(kept, factor, 0.0), 32 * factor * EPS[case.dtype] * 8)
    count, total = int(kept[is_large].sum()), int(is_large.sum())
    spread = 6 * (total * case.dropout * (1 - case.dropout)) ** 0.5 + 1
    if abs(count - total * (1 - case.dropout)) > spread:
        raise Wrong(f"dropout {case.dropout}: {count} of {total} weights stay")
    small = pooled != 0
    return np.where(is_large, np.where(kept, factor, 0.0), np.where(small, factor, 0.0))
