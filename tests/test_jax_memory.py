"""JAX at 32768 tokens, forward and backward: no array of all pairs, which would take 4 GB.

Each run is a process of its own, and its peak stays below inputs + output + gradients + 200 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cases import needs_native

MB = 2**20
TOKENS, DIM = 32_768, 32

# VmHWM is the peak of resident memory since it was last reset: what importing and compiling took does not hide in it.
CHILD = """
import json, sys
import jax, numpy as np
import attnscore as ats

mode, kernel, tokens, dim = json.loads(sys.argv[1])

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def loss(query, key, value):
    out = ats.attend(query, key, value, mask=ats.Causal(), kernel=kernel)
    return (out * out).sum(), out

both = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
call = jax.jit(both) if mode == "jit" else both

def run(tokens):
    rng = np.random.default_rng(0)
    inputs = [jax.numpy.asarray(rng.standard_normal((1, 1, tokens, dim), dtype=np.float32)) for _ in range(3)]
    return jax.block_until_ready(call(*inputs))

run(64)  # lazy parts of the libraries, and their threads
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
(_, out), grads = run(tokens)
finite = all(bool((abs(x) < 1e6).all()) for x in (out, *grads))
print(json.dumps({"peak": memory("VmHWM") - before, "finite": finite}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("mode", "kernel"),
    [
        pytest.param("eager", "native", marks=needs_native),
        pytest.param("jit", "native", marks=needs_native),
        ("jit", "streaming"),
    ],
)
def test_32768_tokens(mode: str, kernel: str) -> None:
    command = [sys.executable, "-c", CHILD, json.dumps([mode, kernel, TOKENS, DIM])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["finite"]
    arrays = 7 * 4 * TOKENS * DIM
    over = found["peak"] - arrays
    print(f"{over / MB:.0f} MB over inputs, output and gradients")
    assert over < 200 * MB, f"{over / MB:.0f} MB over inputs, output and gradients"
