"""Small transformer, made of this library's layers, that learns to predict the next character of a text.

Requirements:
- two runs differ in the score alone: the same initial weights, the same batches, the same steps;
- every projection starts with variance 1 / fan-in, so that queries and keys have coordinates of variance 1 in the first
  step, as in the law Var(q.k) = d;
- the statistics come from `attend`, taken in few steps, known in advance;
- the caller's random state and number of threads are unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import attnscore as ats
from attnscore.diagnostics.lab.runs import Look, Settings
from attnscore.layers.torch import MultiHeadAttention

SATURATED = 0.99


class Block(nn.Module):
    """Transformer block: attention and a feed-forward network, each on normalised input and added to it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        heads = width // settings.head_dim
        sizes: dict[str, Any] = dict.fromkeys(("query_size", "key_size", "value_size"), width)
        self.attention = MultiHeadAttention(width, heads, score=settings.score, keep_last=False, **sizes)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.score, self.heads = settings.score, heads
        self.stats: ats.AttentionStats | None = None

    def forward(self, x: Tensor, look: bool = False) -> Tensor:
        normal = self.before_attention(x)
        if look:
            self.stats = self._statistics(normal.detach())
        x = x + self.attention(normal, normal, normal, mask=ats.Causal())
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]  # of torch's modules

    @torch.no_grad()
    def _statistics(self, x: Tensor) -> ats.AttentionStats:
        """Return the statistics of attention on normalised input; they need no values, so keys serve as these."""
        query, key = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.attention.W_q, self.attention.W_k))
        _, stats = ats.attend(query, key, key, score=self.score, mask=ats.Causal(), head_axis=-2, return_stats=True)
        return stats  # type: ignore[no-any-return]  # attend returns Any


class LanguageModel(nn.Module):
    """Transformer from characters to the logits of the next character."""

    def __init__(self, settings: Settings, symbols: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(symbols, settings.width)
        self.positions = nn.Parameter(torch.empty(settings.context, settings.width))
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm, self.head = nn.LayerNorm(settings.width), nn.Linear(settings.width, symbols)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                fan_in = parameter.shape[1] if name.endswith("weight") and "characters" not in name else 1
                nn.init.normal_(parameter, std=fan_in**-0.5)

    def forward(self, tokens: Tensor, look: bool = False) -> Tensor:
        x = self.characters(tokens) + self.positions
        for block in self.blocks:
            x = block(x, look)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # of torch's modules


def train(
    settings: Settings, text: NDArray[np.int64], symbols: int, tell: Callable[[int], Any] = lambda step: None
) -> tuple[list[Look], float]:
    """Train one model; return statistics of some steps, and the loss on the last tenth of the text.

    `text` holds whole numbers below `symbols`; `tell` is called with the number of finished steps after each.
    """
    cut = len(text) * 9 // 10
    training, held_back = torch.from_numpy(text[:cut]), torch.from_numpy(text[cut:])
    batches = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = LanguageModel(settings, symbols)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    looks = []
    for step in range(settings.steps):
        look = step % settings.look_every == 0 or step == settings.steps - 1
        loss = _loss(model, _batch(training, settings, batches), look)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        if look:
            looks.append(_look(step, float(loss.detach()), model))
        optimiser.step()
        tell(step + 1)
    batches.manual_seed(0)
    with torch.no_grad():
        losses = [_loss(model, _batch(held_back, settings, batches)) for _ in range(20)]
    return looks, float(torch.stack(losses).mean())


def _batch(text: Tensor, settings: Settings, batches: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=batches)
    return text[starts + torch.arange(settings.context + 1)]


def _loss(model: LanguageModel, tokens: Tensor, look: bool = False) -> Tensor:
    logits = model(tokens[:, :-1], look)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _look(step: int, loss: float, model: LanguageModel) -> Look:
    """Return means of the statistics that the blocks kept in their last forward pass."""
    stats = [block.stats for block in model.blocks if isinstance(block, Block) and block.stats is not None]
    # The first query attends to one key: its variance and entropy are 0 whatever the model does.
    largest_entropies = torch.arange(2, stats[0].entropy.shape[1] + 1).log()[:, None]

    def mean(by_layer: list[Tensor]) -> float:
        return float(torch.stack([of_layer.double().mean() for of_layer in by_layer]).mean())

    return Look(
        step=step,
        loss=loss,
        logit_variance=mean([each.var_score[:, 1:] for each in stats]),
        entropy=mean([each.entropy[:, 1:] / largest_entropies for each in stats]),
        saturated=mean([each.saturated(SATURATED)[:, 1:] for each in stats]),
        jacobian_trace=mean([each.jacobian_trace()[:, 1:] for each in stats]),
    )
