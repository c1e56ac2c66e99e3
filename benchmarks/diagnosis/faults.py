"""Planted faults, the right diagnosis of each, and the remedy of each cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscore.diagnostics import qk_clip
from diagnosis.models import Edit, Setup, Training, edited_head, rows_of

Change = Callable[[Training], None]
HELD_BACK_SEED = 5000


@dataclass(frozen=True)
class Fault:
    """A fault in a run."""

    kind: str
    setup: Setup
    module: str
    """Module in which it is planted, "" for the whole model."""
    heads: tuple[int, ...]
    """Heads that may be named; () for all."""
    step: int
    """First step with the fault."""
    plant: Change
    causes: tuple[str, ...]
    """Right causes."""

    @property
    def name(self) -> str:
        """Kind and model."""
        return f"{self.kind}, {self.setup.kind}"

    @property
    def immediate(self) -> bool:
        """Whether it is whole in its first step, so that `first_step` must be the first sampled one from there."""
        return self.kind not in ("layer's rate x 100", "rate x 100", "no warm-up")


LARGE, LAYER_RATE = "weights of one head too large", "learning rate of one layer too large"
SCORE = "scale of the score too large"
RATE, WARM_UP = "learning rate too large", "no warm-up, or a learning rate that starts too large"
SCALE, TWICE = "no scale, or weights that start too large", "scale applied twice, or weights that are too small"
NO_MASK, INVERTED, LEAK = "no padding mask", "inverted mask", "no causal mask"
NAN, NAN_LAYER = "NaN or infinity in the weights of one head", "NaN or infinity in the layer's input or weights"
DTYPE, SINK = "scores above the range of the dtype", "a first key that takes all weight"
VALUES, KEYS, QUERIES = "values that are all alike", "keys that are all alike", "queries that are all alike"
ONE_KEY, ALIKE = "one key that outweighs all others", "tokens that have become alike"


def _multiplied(module: str, part: str, head: int, factor: float) -> Change:
    @torch.no_grad()
    def plant(training: Training) -> None:
        attention = training.model.attentions()[module]
        W = getattr(attention, part)
        W.weight[rows_of(attention, head)] *= factor
        W.bias[rows_of(attention, head)] *= factor

    return plant


def _larger_cosine(module: str, head: int, factor: float) -> Change:
    @torch.no_grad()
    def plant(training: Training) -> None:
        log_scale = training.model.attentions()[module].log_scale
        assert log_scale is not None
        log_scale[head] += math.log(factor)

    return plant


def _edited(module: str, **edits: Edit) -> Change:
    return lambda training: training.model.attentions()[module].edits.update(edits)


def _options(module: str, **options: object) -> Change:
    def plant(training: Training) -> None:
        for name, value in options.items():
            setattr(training.model.attentions()[module], name, value)

    return plant


def _faster(group: str, factor: float) -> Change:
    return lambda training: training.rates.update({group: factor})


def _constant(size: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, size) + 0 * x


def _one_key(place: int) -> Callable[[Tensor], Tensor]:
    def edit(x: Tensor) -> Tensor:
        outweighs = torch.zeros_like(x)
        outweighs[..., place, :] = 20.0
        return 0.1 * x + outweighs

    return edit


def _overflow(module: str, head: int) -> Change:
    def plant(training: Training) -> None:
        _options(module, by_hand=True)(training)
        _multiplied(module, "W_q", head, 1000.0)(training)
        _multiplied(module, "W_k", head, 1000.0)(training)

    return plant


def faults(*, short: bool = False, held_back: bool = False) -> list[Fault]:
    """Return the planted faults; those held back have other sizes, places, rates and seeds."""
    planted: list[Fault] = []
    seed = HELD_BACK_SEED if held_back else 0
    kinds = ("decoder", "encoder", "encoder-decoder", "vision")

    def setup(place: int, **options: object) -> Setup:
        kind, norm_first = kinds[place % 4], place % 2 == 0
        base = Setup(kind=kind, norm_first=norm_first, rate=(3e-3, 6e-3)[place // 2 % 2], seed=seed + place, steps=90)
        if held_back:
            base = replace(base, layers=3, width=48, heads=3, length=12, rate=(2e-3, 5e-3)[place % 2], every=4)
        return replace(base, **options)  # type: ignore[arg-type]

    def module(run: Setup, layer: int) -> str:
        part = "decoder" if "decoder" in run.kind else "encoder"
        return f"{part}.{layer}.{'cross' if run.kind == 'encoder-decoder' and layer == 0 else 'attention'}"

    def add(name: str, run: Setup, where: str, heads: tuple[int, ...], step: int, plant: Change, *causes: str) -> None:
        planted.append(Fault(name, run, where, heads, step, plant, causes))

    step = 44 if held_back else 50
    for place in range(2 if short else 4):
        run, layer = setup(place), place % 2
        head = (place + 1) % run.heads
        where = module(run, layer)
        add("queries x 30", run, where, (head,), step, _multiplied(where, "W_q", head, 30.0), LARGE)
        add("keys x 30", run, where, (head,), step, _multiplied(where, "W_k", head, 30.0), LARGE)
        cosine = replace(run, cosine=True)
        add("cosine's scale x 30", cosine, where, (head,), step, _larger_cosine(where, head, 30.0), SCORE)
        add("layer's rate x 100", run, where, (), step, _faster(where, 100.0), LAYER_RATE)
        add("rate x 100", run, "", (), step, _faster("all", 100.0), RATE, WARM_UP)
        rate = replace(run, rate=0.1, norm_first=False)
        add("no warm-up", rate, "", (), 0, lambda training: None, WARM_UP)
        part, number = (("W_q", torch.nan), ("W_k", torch.inf), ("W_v", torch.nan), ("W_k", torch.nan))[place]
        add(f"{number} in {part}", run, where, (head,), step, _multiplied(where, part, head, number), NAN)
        edit = edited_head(head, _constant(0.0 if place % 2 else 1.0))
        add("values constant", run, where, (head,), step, _edited(where, value=edit), VALUES)
        zero = edited_head(None, _constant(0.0))
        add("layer's values zero", run, where, (), step, _edited(where, value=zero), VALUES)
        add("keys zero", run, where, (head,), step, _edited(where, key=edited_head(head, _constant(0.0))), KEYS)
        alike = edited_head(None, lambda x: x.mean(-2, keepdim=True) + 0 * x)
        add("queries all alike", run, where, (), step, _edited(where, query=alike), QUERIES)
        one = {"query": edited_head(head, _constant(1.0)), "key": edited_head(head, _one_key(3))}
        add("one key", run, where, (head,), step, _edited(where, **one), ONE_KEY, QUERIES)
        sink = {"query": edited_head(None, _constant(1.0)), "key": edited_head(None, _one_key(0))}
        add("sink", run, where, (), step, _edited(where, **sink), SINK, ONE_KEY)
    for place in range(1 if short else 2):
        encoder, decoder = setup(4 * place + 1), setup(4 * place, layers=3)
        masked, causal = module(encoder, place), module(decoder, place)
        add("no padding mask", encoder, masked, (), step, _options(masked, mask_edit=torch.ones_like), NO_MASK)
        add("inverted mask", encoder, masked, (), step, _options(masked, mask_edit=torch.logical_not), INVERTED)
        add("causal leak", decoder, causal, (), step, _options(causal, causal=False), LEAK)
        add("float16 overflow", decoder, causal, (1,), step, _overflow(causal, 1), DTYPE)
        wide = setup(2 * place, width=128, heads=2, gain=2.2, batch=8, rate=1e-3)
        where = module(wide, 0)
        add("no scale", wide, where, (), 0, _options(where, scale=1.0), SCALE)
        small = setup(0, width=128, heads=2, batch=8, rate=1e-4, layers=1, seed=seed + place)
        where = module(small, 0)
        add("scale twice", small, where, (), 0, _options(where, scale=1.0 / 64), TWICE)
    return planted


# ---------------------------------------------------------------- remedies


def remedy_of(cause: str, fault: Fault) -> tuple[str, Change]:
    """Return when a remedy applies, "start" of a new run or "alarm", and its change."""
    module = fault.module

    def clip(training: Training) -> None:
        training.after_step.append(lambda seen: qk_clip(training.model, seen, tau=10.0))

    def without_edits(training: Training) -> None:
        training.model.attentions()[module].edits.clear()

    def bound_scale(training: Training) -> None:
        log_scale = training.model.attentions()[module].log_scale
        assert log_scale is not None
        training.after_step.append(lambda _: log_scale.data.clamp_(max=math.log(10)))

    def warm_up(training: Training) -> None:
        training.rates["all"] = 0.003 / training.setup.rate
        training.warm_up = 20

    remedies: dict[str, tuple[str, Change]] = {
        LARGE: ("alarm", clip),
        SCORE: ("alarm", bound_scale),
        LAYER_RATE: ("start", lambda training: training.rates.update({module: 1.0})),
        **dict.fromkeys((RATE, WARM_UP), ("start", warm_up)),
        SCALE: ("start", _options(module, scale=None)),
        TWICE: ("alarm", _options(module, scale=None)),
        **dict.fromkeys((NO_MASK, INVERTED), ("alarm", _options(module, mask_edit=None))),
        LEAK: ("alarm", _options(module, causal=True)),
        **dict.fromkeys((NAN, NAN_LAYER), ("checkpoint", lambda training: setattr(training, "skips_nan", True))),
        DTYPE: ("checkpoint", _options(module, by_hand=False)),
    }
    return remedies.get(cause, ("alarm", without_edits))
