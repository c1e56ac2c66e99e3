"""Train additive attention to align two languages that share no vector space.

Each sentence is a shuffled list of symbols. Queries are symbols in one language (vectors of size 12). Keys are the
same symbols in another order and another language (size 8), padded with noise. The layer has to learn which key
translates which query. The values are one-hot positions, so the output is a pointer into the sentence.
"""

import torch

from attnscore.layers.torch import AdditiveAttention

torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)
symbols, longest, batch = 20, 10, 64
language_a, language_b = torch.randn(symbols, 12), torch.randn(symbols, 8)
positions = torch.eye(longest).expand(batch, -1, -1)


def sentences():
    """Return a batch: queries, keys with noise after the last symbol, lengths, and the right position of each query."""
    lens = torch.randint(3, longest + 1, (batch,))
    order = torch.stack([torch.randperm(symbols)[:longest] for _ in range(batch)])
    target = torch.stack([torch.randperm(int(n))[:3] for n in lens])  # three queries a sentence
    padding = torch.arange(longest) >= lens[:, None]
    keys = torch.where(padding[..., None], 3 * torch.randn(batch, longest, 8), language_b[order])
    return language_a[order.gather(1, target)], keys, lens, target


def test():
    """Return the share of queries with the largest weight on the right key, and the weight on padding."""
    layer.eval()
    queries, keys, lens, target = sentences()
    layer(queries, keys, positions, lens)
    weights = layer.attention_weights
    padding = torch.arange(longest) >= lens[:, None, None]
    right = (weights.argmax(-1) == target).float().mean()
    return f"right {right:.0%}, weight on padding {(weights * padding).sum():.1f}"


layer = AdditiveAttention(num_hiddens=32, query_size=12, key_size=8)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
print("untrained:", test())
for step in range(200):
    layer.train()
    queries, keys, lens, target = sentences()
    pointer = layer(queries, keys, positions, lens)
    loss = -pointer.gather(-1, target[..., None]).clamp_min(1e-9).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}, {test()}")
