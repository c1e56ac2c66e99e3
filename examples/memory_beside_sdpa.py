"""Which calls of torch's fused attention make the whole matrix: peak memory of a forward on the CPU, against `attend`.

torch takes its O(n) path for some calls only, without a warning for other calls. Linux only, because the peak is reset
through /proc.
"""

import resource
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import attnscore as ats

PEAK = Path("/proc/self/clear_refs")
if not PEAK.exists():
    sys.exit("this example measures through /proc, which only Linux has")
torch.set_num_threads(1)
torch.manual_seed(0)
length, dim = 4096, 32
matrix = 4e-6 * length**2
query, key, value, narrow = (torch.randn(1, 1, length, size) for size in (dim, dim, dim, dim // 2))
lens = torch.tensor([length // 2])
seen = (torch.arange(length) < lens[:, None])[:, None, None]
causal = torch.ones(length, length, dtype=torch.bool).tril()


def added(function, *arrays, **options):
    """Return the memory that a call adds at its peak, in MB."""
    PEAK.write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function(*arrays, **options)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


full = query, key, value
flat = query[0], key[0], value[0]
cases = {
    "plain": (full, {}, {}),
    "padding": (full, {"attn_mask": seen}, {"valid_lens": lens}),
    "value_dim is not dim": ((query, key, narrow), {}, {}),
    "dropout": (full, {"dropout_p": 0.1}, {"dropout": 0.1}),
    "3 axes": (flat, {}, {}),
    "causal and padding": (full, {"attn_mask": causal & seen}, {"mask": ats.Causal(), "valid_lens": lens}),
}
ats.attend(*full), F.scaled_dot_product_attention(*full)  # loads libraries before the measurements
print(f"{length} tokens, one head; a float32 matrix of scores takes {matrix:.0f} MB")
print(f"{'':<24}{'torch':>10}{'attend':>10}")
for name, (arrays, theirs, ours) in cases.items():
    torch_mb = added(F.scaled_dot_product_attention, *arrays, **theirs)
    print(f"{name:<24}{torch_mb:>7.0f} MB{added(ats.attend, *arrays, **ours):>7.0f} MB")
