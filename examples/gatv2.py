"""Two GATv2 layers find the communities of a graph, in each of which eight nodes are labelled.

A node attends to its neighbours: additive attention with leaky_relu, and the edges as a mask in compressed sparse rows.
Time and memory are linear in the number of edges. The first layer's output for one node is checked by hand.
``--quick`` takes a smaller graph.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import attnscore as ats

NODES, COMMUNITIES, DEGREE = 400 if "--quick" in sys.argv else 4000, 4, 12
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other
torch.manual_seed(0)

# Three quarters of a node's edges stay within its community; the last edge joins the node to itself.
community = torch.arange(NODES) % COMMUNITIES
inside = torch.randint(NODES // COMMUNITIES, (NODES, DEGREE)) * COMMUNITIES + community[:, None]
anywhere = torch.randint(NODES, (NODES, DEGREE))
neighbours = torch.where(torch.rand(NODES, DEGREE) < 0.75, inside, anywhere)
edges = torch.cat([neighbours, torch.arange(NODES)[:, None]], dim=1)
lists = [row.unique() for row in edges]
indptr = functional.pad(torch.tensor([len(row) for row in lists]).cumsum(0), (1, 0))
mask = ats.Neighbours(indptr, torch.cat(lists))


class GATv2(nn.Module):
    """a . leaky_relu(W_q x_i + W_k x_j), softmax over the neighbours j of i, and the sum of W_k x_j."""

    def __init__(self, features, size, heads):
        super().__init__()
        self.heads, self.a = heads, nn.Parameter(torch.randn(heads, size) / size**0.5)
        self.W_q, self.W_k = (nn.Linear(features, heads * size, bias=False) for _ in "qk")

    def forward(self, nodes):
        """(node, features) to (node, head * size)."""
        asking, sent = (linear(nodes).unflatten(-1, (self.heads, -1))[None] for linear in (self.W_q, self.W_k))
        score = ats.Additive(self.a, activation="leaky_relu", negative_slope=0.2)
        return ats.attend(asking, sent, sent, score=score, mask=mask, head_axis=-2)[0].flatten(1)


features = functional.one_hot(community, COMMUNITIES) * 0.3 + torch.randn(NODES, COMMUNITIES)
first, second = GATv2(COMMUNITIES, 8, heads=4), GATv2(32, COMMUNITIES, heads=1)
labelled = torch.arange(8 * COMMUNITIES)
optimiser = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01, weight_decay=5e-3)
for _ in range(60):
    logits = second(functional.elu(first(features)))
    loss = functional.cross_entropy(logits[labelled], community[labelled])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

node = 7
near = mask.indices[mask.indptr[node] : mask.indptr[node + 1]]
asking, sent = (linear(features).unflatten(-1, (4, -1)) for linear in (first.W_q, first.W_k))
weights = (functional.leaky_relu(asking[node] + sent[near], 0.2) * first.a).sum(-1).softmax(0)
difference = (first(features)[node] - (weights[..., None] * sent[near]).sum(0).flatten()).abs().max().item()
print(f"{NODES} nodes, {len(mask.indices)} edges; largest difference from the formula: {difference:.0e}")
alone = (features.argmax(-1) == community).double().mean()
right = (logits.argmax(-1) == community).double().mean()
print(f"right by a node's features alone: {alone:.0%}; with its neighbours: {right:.0%}")
