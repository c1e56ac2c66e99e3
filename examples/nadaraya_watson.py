"""Nadaraya-Watson regression is attention pooling with a Gaussian score; the bandwidth is chosen by a mask.

Training points are the keys, their noisy targets the values, and new points the queries. A mask leaves each point out
of its own prediction, so cross-validation of the bandwidth is one call per candidate.
"""

import numpy as np

import attnscore as ats


def truth(x):
    """Return the targets without noise."""
    return 2 * np.sin(x) + x**0.8


rng = np.random.default_rng(0)
x = np.sort(5 * rng.random((50, 1)), axis=0)
y = truth(x) + 0.5 * rng.normal(size=x.shape)
asked = np.linspace(0, 5, 50)[:, None]

# The pooling is D2L's formula: sum_j K(x, x_j) y_j / sum_j K(x, x_j).
kernel = np.exp(-((asked - x.T) ** 2) / (2 * 0.3**2))
by_hand = (kernel @ y) / kernel.sum(axis=1, keepdims=True)
pooled = ats.attend(asked, x, y, score=ats.Gaussian(bandwidth=0.3))
print("largest difference from the formula:", f"{np.abs(pooled - by_hand).max():.0e}")

all_but_itself = ats.Dense(~np.eye(len(x), dtype=bool))
print(f"\n{'bandwidth':>9} {'left-out error':>15} {'true error':>11} {'points used':>12}")
left_out = {}
for bandwidth in (0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0):
    score = ats.Gaussian(bandwidth)
    predicted = ats.attend(x, x, y, score=score, mask=all_but_itself)
    out, stats = ats.attend(asked, x, y, score=score, return_stats=("entropy",))
    left_out[bandwidth] = float(np.mean((predicted - y) ** 2))
    error, used = np.mean((out - truth(asked)) ** 2), stats.effective_keys().mean()
    print(f"{bandwidth:9} {left_out[bandwidth]:15.3f} {error:11.3f} {used:12.1f}")
print("\nbandwidth with the smallest left-out error:", min(left_out, key=left_out.get))
