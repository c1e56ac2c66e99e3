"""Long sequences: memory grows with the length, not with its square; fully masked tiles are not computed.

It prints the memory that forward and backward add to the process, and the size of one float32 matrix of scores.
"""

import contextlib
import resource
import sys
from pathlib import Path

import torch

import attnscore as ats


def peak_mb():
    """Largest resident size of this process (kilobytes on Linux, bytes on macOS)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def forget_peak():
    """Reset the largest size to the present one. Only Linux can; on other systems later rows show too little."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(name, length, score="scaled_dot", mask=None, dim=16):
    """Attend over `length` tokens, forward and backward, and print the added memory."""
    query, key, value = (torch.randn(1, length, dim, requires_grad=True) for _ in range(3))
    plan = ats.explain(query, key, value, score=score, mask=mask).plan
    forget_peak()
    before = peak_mb()
    ats.attend(query, key, value, score=score, mask=mask).sum().backward()
    added = peak_mb() - before
    finite = all(bool(x.grad.isfinite().all()) for x in (query, key, value))
    print(
        f"{name:<22}{length:>8}{added:>9.0f} MB{4e-6 * length**2:>9.0f} MB"
        f"{plan.fractions['skip']:>10.0%}  gradients finite: {finite}"
    )


torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)
small = torch.randn(1, 64, 16, requires_grad=True)
ats.attend(small, small, small).sum().backward()  # loads torch's libraries before the measurements
print(f"{'':<22}{'tokens':>8}{'added':>12}{'one matrix':>12}{'skipped':>10}")
run("causal", 4096, mask=ats.Causal())
run("causal", 8192, mask=ats.Causal())
run("causal", 16384, mask=ats.Causal())
run("window of 256", 32768, mask=ats.Causal() & ats.SlidingWindow(left=255))
additive = ats.Additive(*(torch.randn(shape) / 4 for shape in ((8,), (8, 16), (8, 16))))
run("additive", 2048, additive, ats.Causal())
run("additive, window of 64", 16384, additive, ats.Causal() & ats.SlidingWindow(left=63))
