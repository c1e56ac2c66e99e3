"""``python benchmarks/errors.py``: the rounding error of every kernel in every dtype, as a table.

Inputs are rounded to the dtype; the reference is the dense kernel on the same numbers in float64 (long double for
float64). An error is the largest difference relative to the largest number of the array, over scores and masks below.
Gradients are of sum(out * w) for fixed weights w. The dense kernel has none in NumPy; other kernels' gradients are
compared with the streaming kernel in the wider dtype. relu and leaky_relu are left out: their slope jumps, so that a
rounding of the argument is no rounding of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

import attnscore as ats
from attnscore.kernels import table

BATCH, HEADS, LENGTH, DIM, HIDDEN = 1, 2, 129, 64, 24
EPSILONS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
SMOOTH = ("tanh", "sigmoid", "silu", "gelu")
# Kernels for NumPy's arrays; `gather` hands graphs on to one of them.
KERNELS = ("native", "streaming", "dense")
MASKS = {"none": None, "causal": ats.Causal()}


def scores(wide: Any) -> Iterator[tuple[str, Any]]:
    """Yield every score, its arrays as `wide` makes them."""
    rng = np.random.default_rng(1)
    projections = [wide(rng.standard_normal((HIDDEN, DIM)) / DIM**0.5) for _ in range(2)]
    yield from ((name, name) for name in ("scaled_dot", "cosine", "gaussian"))
    yield "soft cap", ats.SoftCap("scaled_dot", 2.0)
    yield "bilinear", ats.Bilinear(wide(rng.standard_normal((DIM, DIM)) / DIM))
    w_v = wide(rng.standard_normal(HIDDEN) / HIDDEN**0.5)
    for name in SMOOTH:
        yield f"additive {name}", ats.Additive(w_v, projections[0], projections[1], activation=name)


def results(kernel: str, score: Any, mask: Any, inputs: Mapping[str, Any], gradients: bool) -> dict[str, Any]:
    """Return output, log-sum-exp and gradients of one call."""
    if not gradients:
        out, stats = ats.attend(**inputs, score=score, mask=mask, kernel=kernel, return_stats=("log_sum_exp",))
        return {"out": out, "log-sum-exp": stats.log_sum_exp}
    out, pullback = ats.attend_vjp(**inputs, score=score, mask=mask, kernel=kernel)
    weights = np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype)
    found = pullback(weights)
    return {f"d {name}": getattr(found, name) for name in ("query", "key", "value")}


def error(found: Any, exact: Any) -> float:
    """Return the largest difference relative to the largest number."""
    found, exact = np.asarray(found, np.longdouble), np.asarray(exact, np.longdouble)
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def errors(kernel: str, dtype: str) -> dict[str, tuple[float, str]]:
    """Return the largest error of each result, with the score that has it."""
    narrow = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    wide = np.dtype(np.longdouble if dtype == "float64" else np.float64)
    rng = np.random.default_rng(0)
    drawn = {
        name: rng.standard_normal((BATCH, HEADS, LENGTH, DIM)).astype(narrow) for name in ("query", "key", "value")
    }
    exact = {name: x.astype(wide) for name, x in drawn.items()}
    pairs = zip(scores(lambda x: x.astype(narrow)), scores(lambda x: x.astype(narrow).astype(wide)), strict=True)
    worst: dict[str, tuple[float, str]] = {}
    for (name, score), (_, exact_score) in pairs:
        for mask in MASKS.values():
            for gradients in (False, True) if table()[kernel].has_vjp else (False,):
                got = results(kernel, score, mask, drawn, gradients)
                wanted = results("streaming" if gradients else "dense", exact_score, mask, exact, gradients)
                for part, x in got.items():
                    worst[part] = max(worst.get(part, (0.0, "")), (error(x, wanted[part]), name))
    return worst


def main() -> None:
    """Print the table in Markdown."""
    parts = ("out", "log-sum-exp", "d query", "d key", "d value")
    print(f"| dtype (rounding) | kernel | {' | '.join(parts)} |")
    print("|---" * (2 + len(parts)) + "|")
    for dtype, epsilon in EPSILONS.items():
        rows: list[tuple[list[str], list[str]]] = []
        for kernel in KERNELS:
            found = errors(kernel, dtype)
            cells = [f"{found[part][0]:.1e} ({found[part][1]})" if part in found else "" for part in parts]
            # A row has all kernels with equal errors; a kernel without a backward has no errors of gradients.
            same = (
                names
                for names, shown in rows
                if all(cell in ("", other) for cell, other in zip(cells, shown, strict=True))
            )
            if names := next(same, None):
                names.append(kernel)
            else:
                rows.append(([kernel], cells))
        for names, cells in rows:
            print(f"| {dtype} ({epsilon:.1e}) | {', '.join(names)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
