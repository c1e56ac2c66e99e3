"""Memory: linear in the lengths for every score, forward and backward.

- By default: peak of NumPy's own allocations as the length doubles, for one score of each family and some masks.
- Slow, each in a process of its own: the peak over its baseline stays below inputs + outputs + 200 MB, for 16384 tokens
  with the native kernels and for 8192 with the streaming one; and below inputs + outputs + gradients + 100 MB, for
  131072 tokens with the native ones.
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
from cases import AUTOMATIC, FRAMEWORKS, SCORE, needs_native
from covering import some

MB = 2**20

# Runs one call, forward and backward, and prints what it took. VmHWM is the peak of resident memory since it was last
# reset, so what importing took beforehand does not hide in it.
CHILD = """
import json, sys
import numpy as np
import attnscore as ats

framework, kind, tokens, heads, dim, mask, kernel = json.loads(sys.argv[1])

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
    shapes = [(dim,), (dim, dim), (dim, dim)][: 3 if kind == "additive" else 1]
    found = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if framework == "torch":
        import torch
        found = [torch.from_numpy(x).requires_grad_() for x in found]
    return ats.Additive(*found)

def run(inputs):
    options = {"kernel": kernel} | ({"mask": ats.Causal()} if mask == "causal" else {})
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
finite = all(bool((abs(x) < 1e6).all()) for x in (out, *grads))
print(json.dumps({"peak": peak, "inputs": 3 * size, "outputs": size, "finite": finite}))
"""


def measure(
    framework: str, kind: str, tokens: int, heads: int, dim: int, mask: str = "none", kernel: str = "auto"
) -> dict[str, Any]:
    """What a call took. `kind`: dot, additive (with projections) or additive-bare (without)."""
    arguments = json.dumps([framework, kind, tokens, heads, dim, mask, kernel])
    command = [sys.executable, "-c", CHILD, arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("kernel", "kind", "tokens", "heads", "dim"),
    [
        pytest.param("native", "dot", 16_384, 8, 64, marks=needs_native),
        pytest.param("native", "additive", 16_384, 2, 16, marks=needs_native),
        # By tiles of the framework's own operations 16384 tokens take minutes, half as many a quarter of that.
        ("streaming", "dot", 8192, 2, 64),
        ("streaming", "additive", 8192, 1, 16),
    ],
)
def test_all_pairs(kernel: str, kind: str, tokens: int, heads: int, dim: int, framework: str) -> None:
    """One float32 matrix would take 2048 to 8192 MB, with the streaming kernel 256 or 512 MB."""
    found = measure(framework, kind, tokens, heads, dim, kernel=kernel)
    assert found["finite"]
    over = found["peak"] - found["inputs"] - found["outputs"]
    print(f"{over / MB:.0f} MB over inputs and outputs")
    assert over < 200 * MB, f"{over / MB:.0f} MB over inputs and outputs"


@needs_native
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@some(
    "kind,framework",
    [("dot", "torch"), ("additive-bare", "numpy")],
    [(kind, framework) for kind in ("dot", "additive-bare") for framework in FRAMEWORKS],
)
def test_131072_tokens(kind: str, framework: str) -> None:
    """Causal, forward and backward. One float32 matrix would take 64 GB.

    The kernels are the same for both frameworks; what each of them adds is measured above.
    """
    found = measure(framework, kind, 131_072, 1, 64, "causal", "native")
    assert found["finite"]
    # As many bytes of gradients as of inputs; the gradient that comes into the output is not even deducted.
    over = found["peak"] - 2 * found["inputs"] - found["outputs"]
    print(f"{over / MB:.0f} MB over inputs, outputs and gradients")
    assert over < 100 * MB, f"{over / MB:.0f} MB over inputs, outputs and gradients"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@some(
    "kernel,framework",
    [(AUTOMATIC, "torch")],
    [(kernel, framework) for kernel in dict.fromkeys((AUTOMATIC, "streaming")) for framework in FRAMEWORKS],
)
@pytest.mark.slow
def test_2048_tokens_in_a_process_of_its_own(kernel: str, framework: str) -> None:
    """One float32 matrix of 16 heads would take 256 MB, and a plain backward several of them."""
    found = measure(framework, "dot", 2048, 16, 16, "causal", kernel)
    assert found["finite"]
    over = found["peak"] - found["inputs"] - found["outputs"]
    assert over < 100 * MB, f"{over / MB:.0f} MB over inputs and outputs"


GROWING = ("scaled_dot", "additive-tanh", "gaussian-one", "cosine", "own-tile_gradient")


@some(
    "score,mask",
    [(score, ("none", "scattered")[i % 2]) for i, score in enumerate(GROWING)],
    [(score, mask) for score in GROWING for mask in ("none", "scattered")],
)
@pytest.mark.slow_rows("additive-*", "gaussian-*", "own-*", "cosine-scattered")
def test_peak_grows_with_the_length_and_not_its_square(score: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that NumPy allocates, forward and backward with statistics, at 100 and 400 tokens."""
    monkeypatch.setattr("attnscore.base.thresholds.TILE_SCORES", 2**9)
    row = SCORE[score]
    # The lesser of two: what is allocated once in a process, or by another thread of it, is not of the call.
    peaks = [min(_numpy_peak(row, mask, tokens, "streaming") for _ in range(2)) for tokens in (100, 400)]
    # Four times the length: four times the memory, where a matrix would take sixteen times.
    assert peaks[1] < 5 * peaks[0]


def _numpy_peak(row: Any, mask: str, tokens: int, kernel: str) -> int:
    rng = np.random.default_rng(0)
    known = {"h": row.hidden, "d": row.dims[0], "dk": row.dims[1]}
    shapes = {name: tuple(known[axis] for axis in axes) for name, axes in row.arrays.items()}
    score = row.make(**{name: np.asarray(rng.uniform(0.5, 1.5, shape), np.float32) for name, shape in shapes.items()})
    query, key, value = (
        rng.standard_normal((1, 2, tokens, dim), dtype=np.float32) for dim in (row.dims[0], row.dims[1], 4)
    )
    masks = {"none": None, "scattered": ats.KeyPadding(rng.random((1, tokens)) < 0.7)}
    tracemalloc.start()
    options = {"mask": masks[mask], "kernel": kernel, "return_stats": True}
    (out, _), pullback = ats.attend_vjp(query, key, value, score=score, **options)
    pullback(np.ones_like(out))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
