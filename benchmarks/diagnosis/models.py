"""Small models and tasks that need attention, and their training under a watch.

Requirements:
- a run is described by values alone, so that the same description gives the same numbers;
- faults change the model from a step on: its weights, the arrays of a layer, its mask, its scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attnscore as ats
from attnscore.diagnostics import watch
from attnscore.diagnostics.watching.records import Records

WORDS = 12
Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """Model, task and options of a training run."""

    kind: str = "decoder"
    """decoder, encoder (with padding), encoder-decoder or vision."""
    layers: int = 2
    heads: int = 4
    width: int = 32
    length: int = 16
    batch: int = 16
    norm_first: bool = True
    dropout: float = 0.0
    rate: float = 3e-3
    warm_up: int = 0
    weight_decay: float = 0.0
    bfloat16: bool = False
    fine_tuned: bool = False
    """Whether the model has been trained on another task before, unwatched."""
    cosine: bool = False
    """Whether the scores are cosines times a scale that each head learns."""
    gain: float = 1.0
    """Factor of the initial query and key weights."""
    steps: int = 100
    every: int = 5
    seed: int = 0


class Attention(nn.Module):
    """Multi-head attention in which a fault can change each array and option."""

    def __init__(self, setup: Setup, *, causal: bool) -> None:
        super().__init__()
        width = setup.width
        self.heads, self.causal, self.scale = setup.heads, causal, None
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(width, width) for _ in "qkvo")
        self.log_scale = nn.Parameter(torch.full((setup.heads,), 1.0)) if setup.cosine else None
        self.edits: dict[str, Edit] = {}
        self.mask_edit: Edit | None = None
        self.by_hand = False
        """Whether the scores are computed in float16, and the softmax by hand."""
        with torch.no_grad():
            for W in (self.W_q, self.W_k):
                W.weight *= setup.gain

    def forward(self, x: Tensor, context: Tensor, real: Tensor | None = None) -> Tensor:
        """Attend from x to the real positions of the context."""
        arrays = {"query": self.W_q(x), "key": self.W_k(context), "value": self.W_v(context)}
        for name, array in arrays.items():
            heads = array.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            arrays[name] = self.edits[name](heads) if name in self.edits else heads
        mask = None if real is None else real[:, None, None]
        if self.mask_edit is not None and mask is not None:
            mask = self.mask_edit(mask)
        if self.by_hand:
            out = self._by_hand(arrays)
        elif self.log_scale is not None:
            score, causal = ats.Cosine(self.log_scale.exp()), ats.Causal() if self.causal else None
            out = ats.attend(*arrays.values(), score=score, mask=causal if mask is None else mask)
        else:
            query, key, value = arrays.values()
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=self.causal, scale=self.scale
            )
        joined: Tensor = self.W_o(out.transpose(1, 2).flatten(-2))
        return joined

    def _by_hand(self, arrays: dict[str, Tensor]) -> Tensor:
        query, key, value = arrays.values()
        scores = (query.half() @ key.half().mT).float() / math.sqrt(query.shape[-1])
        scores = scores.half()
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.softmax(scores, -1).to(value.dtype) @ value


class Block(nn.Module):
    """Layer of a transformer: attention, attention to another sequence where there is one, and a network."""

    def __init__(self, setup: Setup, *, causal: bool, crossed: bool) -> None:
        super().__init__()
        self.norm_first = setup.norm_first
        self.attention = Attention(setup, causal=causal)
        self.cross = Attention(setup, causal=False) if crossed else None
        self.network = nn.Sequential(
            nn.Linear(setup.width, 2 * setup.width), nn.GELU(), nn.Linear(2 * setup.width, setup.width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(setup.width) for _ in range(3))
        self.dropout = nn.Dropout(setup.dropout)

    def forward(self, x: Tensor, real: Tensor | None, memory: Tensor | None) -> Tensor:
        """Return the next layer's input."""
        x = self._add(x, self.norms[0], lambda y: self.attention(y, y, real))
        if (cross := self.cross) is not None:
            x = self._add(x, self.norms[1], lambda y: cross(y, memory))
        return self._add(x, self.norms[2], self.network)

    def _add(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor
        if self.norm_first:
            out = x + self.dropout(function(norm(x)))
        else:
            out = norm(x + self.dropout(function(x)))
        return out


class Model(nn.Module):
    """Transformer of one of the four kinds."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        width, kind = setup.width, setup.kind
        self.words = nn.Linear(8, width) if kind == "vision" else nn.Embedding(WORDS, width)
        self.places = nn.Embedding(setup.length, width)
        encoders = {"encoder-decoder": setup.layers, "decoder": 0}.get(kind, setup.layers)
        decoders = setup.layers if "decoder" in kind else 0
        crossed = kind == "encoder-decoder"
        self.encoder = nn.ModuleList(Block(setup, causal=False, crossed=False) for _ in range(encoders))
        self.decoder = nn.ModuleList(Block(setup, causal=True, crossed=crossed) for _ in range(decoders))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, target: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the words, or of the class of an image."""
        x = self.words(x) + self.places.weight
        for block in self.encoder:
            x = block(x, attention_mask, None)
        if self.decoder:
            memory = x
            x = x if target is None else self.words(target) + self.places.weight
            for block in self.decoder:
                x = block(x, None, memory)
        x = self.norm(x)
        logits: Tensor = self.out(x.mean(1) if self.setup.kind == "vision" else x)
        return logits

    def attentions(self) -> dict[str, Attention]:
        """Return the attention modules by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Attention)}


def loss_of(model: Model, draw: torch.Generator, shift: int) -> Tensor:
    """Return the loss of a random batch: which word stood `shift` places before, or which pattern an image holds."""
    setup, kind = model.setup, model.setup.kind
    if kind == "vision":
        label = torch.randint(WORDS, (setup.batch,), generator=draw)
        patches = torch.randn(setup.batch, setup.length, 8, generator=draw)
        place = torch.randint(setup.length, (setup.batch,), generator=draw)
        patterns = torch.randn(WORDS, 8, generator=torch.Generator().manual_seed(shift))
        patches[torch.arange(setup.batch), place] = 4 * patterns[label]
        return functional.cross_entropy(model(patches), label)
    words = torch.randint(1, WORDS, (setup.batch, setup.length), generator=draw)
    if kind == "encoder":
        lens = torch.randint(setup.length // 2, setup.length, (setup.batch, 1), generator=draw)
        real = torch.arange(setup.length) < lens
        words = words * real
        target = words.roll(shift, 1)
        target[:, :shift] = words[:, :shift]
        logits = model(words, attention_mask=real)
        return functional.cross_entropy(logits[real], target[real])
    if kind == "encoder-decoder":
        target = words.roll(shift, 1)
        logits = model(words, target=functional.pad(target[:, :-1], (1, 0)))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    target = words.roll(shift, 1)
    logits = model(words)[:, shift:]
    return functional.cross_entropy(logits.flatten(0, 1), target[:, shift:].flatten())


@dataclass
class Training:
    """A run in progress, which a fault or a remedy changes."""

    setup: Setup
    model: Model
    optimiser: torch.optim.Optimizer
    rates: dict[str, float] = field(default_factory=dict)
    """Factors of the learning rate by name of a parameter group: "all", or a module."""
    warm_up: int = 0
    skips_nan: bool = False
    after_step: list[Callable[[Records], None]] = field(default_factory=list)


Events = dict[int, list[Callable[[Training], None]]]
"""What changes a training before a step."""


def begin(setup: Setup) -> Training:
    """Return a model with its optimiser: a group of parameters for each attention module, and one for the others."""
    torch.manual_seed(setup.seed)
    model = Model(setup)
    inside = {name: [*module.parameters()] for name, module in model.attentions().items()}
    attention = {id(p) for parameters in inside.values() for p in parameters}
    groups = [{"params": parameters, "name": name} for name, parameters in inside.items()]
    groups.append({"params": [p for p in model.parameters() if id(p) not in attention], "name": ""})
    optimiser = torch.optim.AdamW(groups, lr=setup.rate, weight_decay=setup.weight_decay)
    return Training(setup, model, optimiser, warm_up=setup.warm_up)


def train(
    training: Training,
    events: Events | None = None,
    at_step: Callable[[int, Records], None] | None = None,
) -> tuple[Records, list[float]]:
    """Train under a watch; `events` change the training before a step, `at_step` sees the records of sampled steps."""
    setup, model = training.setup, training.model
    if setup.fine_tuned:
        _steps(training, setup.steps, torch.Generator().manual_seed(setup.seed + 1000), 1, [])
    losses: list[float] = []
    names = [name for name, module in model.attentions().items()]
    with watch(model, every=setup.every, softmax=names) as seen:
        _steps(training, setup.steps, torch.Generator().manual_seed(setup.seed), 2, losses, seen, events, at_step)
    return seen, losses


def _steps(
    training: Training,
    steps: int,
    draw: torch.Generator,
    shift: int,
    losses: list[float],
    seen: Records | None = None,
    events: Events | None = None,
    at_step: Callable[[int, Records], None] | None = None,
) -> None:
    setup, model, optimiser = training.setup, training.model, training.optimiser
    for step in range(steps):
        for event in (events or {}).get(step, ()):
            event(training)
        warm = min(1.0, (step + 1) / training.warm_up) if training.warm_up else 1.0
        for group in optimiser.param_groups:
            factor = training.rates.get(group["name"], 1.0) * training.rates.get("all", 1.0)
            group["lr"] = setup.rate * warm * factor
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.bfloat16):
            loss = loss_of(model, draw, shift)
        losses.append(loss.item())
        if seen is not None:
            seen.record_loss(losses[-1])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if norm.isfinite() or not training.skips_nan:
            optimiser.step()
        if seen is not None:
            for action in training.after_step:
                action(seen)
            if at_step is not None and step % setup.every == 0:
                at_step(step, seen)


def rows_of(attention: Attention, head: int) -> slice:
    """Return the rows of a head in the weights of queries, keys or values."""
    size = attention.W_q.out_features // attention.heads
    return slice(head * size, (head + 1) * size)


def edited_head(head: int | None, function: Callable[[Tensor], Tensor]) -> Edit:
    """Return an edit of one head of an array (batch, head, position, feature), or of all heads."""

    def edit(x: Tensor) -> Tensor:
        if head is None:
            return function(x)
        parts: list[Any] = list(x.unbind(1))
        parts[head] = function(parts[head])
        return torch.stack(parts, 1)

    return edit
