"""32768 tokens in TensorFlow, forward and backward, without an array of all pairs: peaks of processes of their own.

One float32 matrix of all pairs would take 4 GB. Native in plain calls and in graphs; in TensorFlow's own operations
where XLA compiles.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cases import needs_native

MB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TOKENS, DIM = 32_768, 64

# VmHWM is the peak of resident memory since it was last reset.
CHILD = """
import json, sys
import numpy as np
import tensorflow as tf
import attnscore as ats

how, tokens, dim = json.loads(sys.argv[1])

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def call(query, key, value):
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        out = ats.attend(query, key, value, mask=ats.Causal())
    return out, tape.gradient(out, [query, key, value])

run = {"eager": call, "graph": tf.function(call), "xla": tf.function(call, jit_compile=True)}[how]

def arrays(tokens):
    rng = np.random.default_rng(0)
    return [tf.constant(rng.standard_normal((1, 1, tokens, dim), dtype=np.float32)) for _ in range(3)]

run(*arrays(64))
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
inputs = arrays(tokens)
out, grads = run(*inputs)
found = [x.numpy() for x in (out, *grads)]
peak = memory("VmHWM") - before
print(json.dumps({"peak": peak, "finite": all(bool((abs(x) < 1e6).all()) for x in found)}))
"""


def over_arrays(how: str, tokens: int) -> int:
    """Bytes at the peak over query, key, value, output, and the gradients of the first three."""
    command = [sys.executable, "-c", CHILD, json.dumps([how, tokens, DIM])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["finite"]
    over: int = found["peak"] - 7 * 4 * tokens * DIM
    print(f"{how}, {tokens} tokens: {over / MB:.0f} MB over inputs, outputs and gradients")
    return over


@needs_native
@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_32768_tokens(how: str) -> None:
    assert over_arrays(how, TOKENS) < 200 * MB


@linux
@pytest.mark.slow
def test_32768_tokens_under_xla() -> None:
    """XLA keeps several times the arrays, and its compiler comes on top: linear, and a fraction of one matrix."""
    half, whole = (over_arrays("xla", tokens) for tokens in (TOKENS // 2, TOKENS))
    assert whole < 2.5 * half
    assert whole < 4 * TOKENS**2 / 5
