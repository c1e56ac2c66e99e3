"""Kernel regression on a million points, with a bandwidth that is learned by gradient descent.

This is attention with a Gaussian score: training points are the keys, their noisy targets the values. Forward and
backward make no array of all pairs, so memory beyond the data stays small. ``--quick`` takes 20,000 points.
"""

import sys

import numpy as np
import torch

import attnscore as ats

POINTS = 20_000 if "--quick" in sys.argv else 1_000_000


def truth(x):
    """Return the targets without noise."""
    return (3 * x).sin() + x


def memory():
    """Return the largest memory of this process so far, in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("VmHWM"))


torch.manual_seed(0)
x = 5 * torch.rand(POINTS, 1)
y = truth(x) + 0.5 * torch.randn_like(x)
held = 5 * torch.rand(500, 1)  # the bandwidth is learned from the error at points that were held back
wanted = truth(held) + 0.5 * torch.randn_like(held)

# The formula, at one point, in float64.
some, one = x[:10_000].double(), held[:1].double()
kernel = torch.exp(-((one - some.mT) ** 2) / (2 * 0.3**2))
by_hand = kernel @ y[:10_000].double() / kernel.sum()
pooled = ats.attend(one, some, y[:10_000].double(), score=ats.Gaussian(0.3))
print(f"largest difference from the formula: {(pooled - by_hand).abs().max().item():.0e}")

log_bandwidth = torch.tensor(0.0, requires_grad=True)
optimiser = torch.optim.Adam([log_bandwidth], lr=0.4)
errors, before = [], memory()
for _ in range(12):
    predicted = ats.attend(held, x, y, score=ats.Gaussian(log_bandwidth.exp()))
    loss = (predicted - wanted).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    errors.append(loss.item())
pairs = len(held) * POINTS
print(
    f"{pairs:.0e} pairs a step; memory beyond the data: {memory() - before:.0f} MB, all weights: {4e-6 * pairs:.0f} MB"
)
print(f"bandwidth {log_bandwidth.exp().item():.2f}; held-out error {errors[0]:.2f} -> {min(errors):.2f} (noise 0.25)")

asked = torch.linspace(0.5, 4.5, 9)[:, None]
fit = ats.attend(asked, x, y, score=ats.Gaussian(log_bandwidth.exp().item()))
print("largest error of the fit:", np.abs((fit - truth(asked)).numpy()).max().round(2))
