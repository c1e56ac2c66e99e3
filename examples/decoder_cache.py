"""A decoder with a cache: rotary embedding, grouped heads, a sliding window with sinks, step by step.

Two blocks with random weights generate 300 tokens after a prompt. Each step projects one token and attends to the 4
sinks and the last 64 positions; the caches hold no other positions. At the end one pass over the whole sequence, with
sinks and window as a mask, gives the same logits.
"""

import torch
from torch import Tensor, nn

import attnscore as ats
from attnscore.layers.torch import MultiHeadAttention

WINDOW, SINKS, PROMPT, NEW, WORDS, SIZE = 64, 4, 100, 300, 50, 64


def rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of features of (batch, length, head, dim) by angles proportional to the position."""

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        angles = positions[..., None, None] * 10000.0 ** -torch.linspace(0, 1, a.shape[-1])
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    return turned(q), turned(k)


class Block(nn.Module):
    """Attention and a feed-forward layer; each gets normalised inputs, and its output is added to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            SIZE,
            num_heads=8,
            num_key_value_heads=2,
            qk_norm=True,
            rotary=rotary,
            **dict.fromkeys(("query_size", "key_size", "value_size"), SIZE),
        )
        self.feed = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
        self.norms = nn.ModuleList([nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)])

    def forward(self, x: Tensor, **given: object) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, **given)
        return x + self.feed(self.norms[1](x))


torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)
embedding, blocks, head = nn.Embedding(WORDS, SIZE), [Block() for _ in range(2)], nn.Linear(SIZE, WORDS)
tokens = torch.randint(WORDS, (2, PROMPT))
caches = [ats.KeyValueCache(head_axis=-2, window=WINDOW, sinks=SINKS) for _ in blocks]

with torch.no_grad():
    step, logits = tokens, []
    for _ in range(NEW + 1):
        x = embedding(step)
        for block, cache in zip(blocks, caches, strict=True):
            x = block(x, cache=cache)
        logits.append(head(x))
        step = logits[-1][:, -1:].argmax(-1)
        tokens = torch.cat([tokens, step], 1)

    mask = ats.Causal() & (ats.SlidingWindow(left=WINDOW - 1) | ats.KeyRange(0, SINKS))
    x = embedding(tokens[:, :-1])
    for block in blocks:
        x = block(x, mask=mask)
    difference = (torch.cat(logits, 1) - head(x)).abs().max().item()

kept = sum(cache.nbytes for cache in caches)
print(f"{tokens.shape[1] - 1} positions, of which a cache holds {caches[0].slots}: {kept / 2**10:.0f} KiB")
print("as in one pass:", difference < 1e-4)
