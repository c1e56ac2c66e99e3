"""Train a small transformer on sequences that no process holds whole; the losses equal a run in one process.

    python examples/sequence_over_processes.py
    torchrun --nproc-per-node 4 examples/sequence_over_processes.py

Each process holds some of the first and some of the last tokens, so under the causal mask all have the same work. Only
attention reads other tokens, so only attention takes the group. The task: which symbol came `lag` positions before?
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import attnscore as ats
from attnscore.layers.torch import MultiHeadAttention
from attnscore.parallel import Shard

torch.set_num_threads(1)
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if ranks > 1:
    dist.init_process_group("gloo")
group = dist.group.WORLD if ranks > 1 else None
symbols, length, lag, features = 16, 256, 9, 32
shards = [Shard.head_tail(length, each, ranks) for each in range(ranks)]


def rotary(queries, keys, positions):
    """Turn pairs of features by angles that grow with the position."""
    angles = positions[..., None, None] / 100.0 ** torch.arange(0, 1, 2 / queries.shape[-1])

    def turned(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    return turned(queries), turned(keys)


class Block(nn.Module):
    """Attention and two linear layers; the output of each is added to its input."""

    def __init__(self):
        super().__init__()
        sizes = dict.fromkeys(("query_size", "key_size", "value_size"), features)
        self.attention = MultiHeadAttention(features, 4, rotary=rotary, context_group=group, keep_last=False, **sizes)
        self.linear = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))
        self.norms = nn.ModuleList([nn.LayerNorm(features), nn.LayerNorm(features)])

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, mask=ats.Causal(), **({"shards": shards} if ranks > 1 else {}))
        return x + self.linear(self.norms[1](x))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(symbols, features), Block(), Block(), nn.Linear(features, symbols))
model = DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    tokens = torch.randint(symbols, (8, length), generator=torch.Generator().manual_seed(step))
    target = tokens.roll(lag, 1)
    target[:, :lag] = -100  # no earlier symbol: the loss does not count these
    own, own_target = (shards[rank].take(x, axis=1) for x in (tokens, target))
    total = nn.functional.cross_entropy(model(own).flatten(0, 1), own_target.flatten(), reduction="sum")
    # DistributedDataParallel takes the mean over the processes, so each multiplies its loss by their number.
    loss = total * ranks / (target >= 0).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        if ranks > 1:
            dist.all_reduce(loss := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
if ranks > 1:
    dist.barrier()  # gloo's threads must free the last tensors before Python ends, or they abort
    dist.destroy_process_group()
