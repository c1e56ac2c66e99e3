"""Memory: linear in the lengths for every score, forward and backward.

- By default: peak of NumPy's own allocations as the length doubles, for one score of each family and some masks.
- Slow: 16384 tokens in a process of its own, whose peak over its baseline stays below inputs + outputs + 200 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

import attnscore as ats
from cases import FRAMEWORKS, SCORE

MB = 2**20

# Runs one call, forward and backward, and prints what it took. VmHWM is the peak of resident memory since it was last
# reset, so what importing took beforehand does not hide in it.
CHILD = """
import json, sys
import numpy as np
import attnscore as ats

framework, kind, tokens, heads, dim, mask = json.loads(sys.argv[1])

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def arrays(tokens):
    rng = np.random.default_rng(0)
    found = [rng.standard_normal((1, heads, tokens, dim), dtype=np.float32) for _ in range(3)]
    if framework == "torch":
        import torch
        found = [torch.from_numpy(x).requires_grad_() for x in found]
    return found

def score():
    if kind == "dot":
        return "scaled_dot"
    rng = np.random.default_rng(1)
    shapes = (dim,), (dim, dim), (dim, dim)
    found = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if framework == "torch":
        import torch
        found = [torch.from_numpy(x).requires_grad_() for x in found]
    return ats.Additive(*found)

def run(inputs):
    options = {"mask": ats.Causal()} if mask == "causal" else {}
    if framework == "torch":
        import torch
        out = ats.attend(*inputs, score=score(), **options)
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))
    out, pullback = ats.attend_vjp(*inputs, score=score(), **options)
    return out, pullback(np.ones_like(out))[:3]

run(arrays(64))  # lazy parts of the libraries, and their threads
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
inputs = arrays(tokens)
out, grads = run(inputs)
peak = memory("VmHWM") - before
size = 4 * heads * tokens * dim
print(json.dumps({"peak": peak, "inputs": 3 * size, "outputs": size, "finite": bool((abs(out) < 1e3).all())}))
"""


def measure(framework: str, kind: str, tokens: int, heads: int, dim: int, mask: str = "none") -> dict[str, Any]:
    arguments = json.dumps([framework, kind, tokens, heads, dim, mask])
    command = [sys.executable, "-c", CHILD, arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("kind", "heads", "dim"), [("dot", 8, 64), ("additive", 2, 16)], ids=["dot-8-heads-64", "additive-2-heads-16"]
)
def test_16384_tokens(kind: str, heads: int, dim: int, framework: str) -> None:
    found = measure(framework, kind, 16_384, heads, dim)
    assert found["finite"]
    over = found["peak"] - found["inputs"] - found["outputs"]
    assert over < 200 * MB, f"{over / MB:.0f} MB over inputs and outputs"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_2048_tokens_in_a_process_of_its_own(framework: str) -> None:
    """One float32 matrix of 16 heads would take 256 MB, and a plain backward several of them."""
    found = measure(framework, "dot", 2048, 16, 16, "causal")
    assert found["finite"]
    over = found["peak"] - found["inputs"] - found["outputs"]
    assert over < 100 * MB, f"{over / MB:.0f} MB over inputs and outputs"


@pytest.mark.parametrize("mask", ["none", "scattered"])
@pytest.mark.parametrize("score", ["scaled_dot", "additive-tanh", "gaussian-one", "cosine", "own-tile_gradient"])
def test_peak_grows_with_the_length_and_not_its_square(score: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that NumPy allocates, forward and backward with statistics, at 200 and 800 tokens."""
    monkeypatch.setattr("attnscore.tiling.TILE_SCORES", 2**11)
    row = SCORE[score]
    peaks = [_numpy_peak(row, mask, tokens) for tokens in (200, 800)]
    # Four times the length: four times the memory, where a matrix would take sixteen times.
    assert peaks[1] < 5 * peaks[0]


def _numpy_peak(row: Any, mask: str, tokens: int) -> int:
    rng = np.random.default_rng(0)
    known = {"h": row.hidden, "d": row.dims[0], "dk": row.dims[1]}
    shapes = {name: tuple(known[axis] for axis in axes) for name, axes in row.arrays.items()}
    score = row.make(**{name: np.asarray(rng.uniform(0.5, 1.5, shape), np.float32) for name, shape in shapes.items()})
    query, key, value = (
        rng.standard_normal((1, 2, tokens, dim), dtype=np.float32) for dim in (row.dims[0], row.dims[1], 4)
    )
    masks = {"none": None, "scattered": ats.KeyPadding(rng.random((1, tokens)) < 0.7)}
    tracemalloc.start()
    (out, _), pullback = ats.attend_vjp(query, key, value, score=score, mask=masks[mask], return_stats=True)
    pullback(np.ones_like(out))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
