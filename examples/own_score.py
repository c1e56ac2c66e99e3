"""A custom score: one class with one method, trained in PyTorch.

The score is minus a weighted city-block distance, a(q, k) = -sum_d rate_d |q_d - k_d|. The class has
only the method `tile`: the streaming kernel calls it, and PyTorch's autodiff gives its gradient tile by tile. The data
are made with known rates, and training finds these rates again.
"""

from dataclasses import dataclass
from typing import Any

import torch

import attnscore as ats


@dataclass(frozen=True, eq=False)
class CityBlock:
    """a(q, k) = -sum_d exp(log_rate_d) |q_d - k_d|; the logarithm keeps the rates positive."""

    log_rate: Any

    def tile(self, ops, query, key):
        """Scores (..., query, key) of any block: query (..., query, dim), key (..., key, dim)."""
        distance = ops.abs(ops.expand_dims(query, -2) - ops.expand_dims(key, -3))
        return -ops.sum(ops.exp(self.log_rate) * distance, axis=-1)


torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)
true_rate = torch.tensor([4.0, 1.0, 0.25])
query, key, value = torch.randn(4, 64, 3), torch.randn(4, 80, 3), torch.randn(4, 80, 2)
wanted = ats.attend(query, key, value, score=CityBlock(true_rate.log()))

log_rate = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.Adam([log_rate], lr=0.1)
for step in range(151):
    out = ats.attend(query, key, value, score=CityBlock(log_rate))
    loss = ((out - wanted) ** 2).mean()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.1e}, rates {log_rate.detach().exp().numpy().round(2)}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
found = log_rate.detach().exp()
print("true rates:", true_rate.numpy(), "- found:", bool(torch.allclose(found, true_rate, rtol=0.02)))

# Masks, soft caps and statistics work as with a built-in score.
capped = ats.SoftCap(CityBlock(log_rate.detach()), cap=5.0)
_, stats = ats.attend(query, key, value, score=capped, valid_lens=[80, 40, 20, 1], return_stats=True)
print("effective keys with 80, 40, 20 and 1 valid keys:", stats.effective_keys().mean(-1).numpy().round(1))
