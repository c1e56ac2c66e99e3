"""The table of PyTorch layers, their plain definitions, and D2L's own modules, written out.

A new layer, or a new score of `MultiHeadAttention`, adds a row: every generic test of ``test_layers.py`` runs over it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnscore as ats
from attnscore.layers.torch import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)

BATCH, QUERIES, KEYS, VALUE_SIZE = 2, 3, 5, 4


# What each layer computes, one pair of vectors (or one head) at a time: scores (batch, query, key) of q and k.
def scaled_dot(q: Tensor, k: Tensor, **_: Any) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def dot(q: Tensor, k: Tensor, **_: Any) -> Tensor:
    return q @ k.mT


def additive(q: Tensor, k: Tensor, w_v: Tensor, **_: Any) -> Tensor:
    return torch.tanh(q[:, :, None] + k[:, None]) @ w_v


def bilinear(q: Tensor, k: Tensor, W: Tensor, **_: Any) -> Tensor:
    return torch.einsum("bqi,ij,bkj->bqk", q, W, k)


def gaussian(q: Tensor, k: Tensor, log_bandwidth: Tensor, **_: Any) -> Tensor:
    return -(q[:, :, None] - k[:, None]).pow(2).sum(-1) / (2 * log_bandwidth.exp() ** 2)


def cosine(q: Tensor, k: Tensor, log_scale: Tensor, **_: Any) -> Tensor:
    return log_scale.exp() * (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT


def capped(score: Callable[..., Tensor], cap: float) -> Callable[..., Tensor]:
    return lambda q, k, **given: cap * torch.tanh(score(q, k, **given) / cap)


def summed(q: Tensor, k: Tensor, score_temperature: Tensor, **_: Any) -> Tensor:
    return (dot(q, k) + 0.5 * gaussian(q, k, torch.tensor(1.5).log())) / score_temperature


def capped_sum(q: Tensor, k: Tensor, w_v: Tensor, log_bandwidth: Tensor, score_weights_1: Tensor, **_: Any) -> Tensor:
    return 2 * torch.tanh((additive(q, k, w_v) + score_weights_1 * gaussian(q, k, log_bandwidth)) / 2)


def norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def sparsemax(scores: Tensor) -> Tensor:
    """Algorithm 1 of Martins and Astudillo (2016)."""
    ordered, count = scores.sort(-1, descending=True).values, torch.arange(1, scores.shape[-1] + 1)
    thresholds = (ordered.cumsum(-1) - 1) / count
    last = (ordered > thresholds).sum(-1, keepdim=True).clamp(min=1) - 1
    return (scores - thresholds.gather(-1, last)).clamp(min=0)


def entmax15(scores: Tensor) -> Tensor:
    """Algorithm 2 of Peters, Niculae and Martins (2019), over the unmasked scores of each query."""
    rows = []
    for row in scores.reshape(-1, scores.shape[-1]) / 2:
        on = row > -math.inf
        if not on.any():
            rows.append(torch.zeros_like(row))
            continue
        ordered, count = row[on].sort(descending=True).values, torch.arange(1, int(on.sum()) + 1, dtype=row.dtype)
        mean, of_squares = ordered.cumsum(0) / count, ordered.square().cumsum(0) / count
        inside = 1 / count - (of_squares - mean.square())
        thresholds = mean - torch.where(inside > 0, inside, 1.0).sqrt().where(inside > 0, 0.0)
        rows.append((row - thresholds[(thresholds <= ordered).sum() - 1]).clamp(min=0).square())
    return torch.stack(rows).reshape(scores.shape)


def pool(
    scores: Tensor,
    visible: Tensor | None,
    values: Tensor,
    sink: Tensor | None = None,
    normalizer: Callable[[Tensor], Tensor] = softmax,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the definition: -inf where hidden, rows of 0 where nothing is visible."""
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    weights = normalizer(scores)[..., : values.shape[-2]]
    if visible is not None:
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return weights @ values, weights


Plain = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def single(score: Callable[..., Tensor], normalizer: Callable[[Tensor], Tensor] = softmax) -> Plain:
    def plain(layer: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        given = {}
        if isinstance(layer, AdditiveAttention):
            q, k, given = layer.W_q(q), layer.W_k(k), {"w_v": layer.w_v.weight[0]}
        if isinstance(layer, BilinearAttention):
            given = {"W": layer.W.weight}
        if isinstance(layer, GaussianAttention):
            given = {"log_bandwidth": torch.as_tensor(layer.bandwidth, dtype=q.dtype).log()}
        return pool(score(q, k, **given), visible, v, normalizer=normalizer)

    return plain


def heads(score: Callable[..., Tensor], normalizer: Callable[[Tensor], Tensor] = softmax) -> Plain:
    """Head by head, with the parameters that are that head's."""

    def plain(layer: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = layer.W_q(q), layer.W_k(k), layer.W_v(v)
        count = layer.num_heads
        width = layer.num_hiddens // count
        score_width = q.shape[-1] // count
        sharing = count // (v.shape[-1] // width)
        own = dict(layer.named_parameters(recurse=False))
        sinks, norms = own.pop("sink", [None] * count), [own.pop(name, None) for name in ("q_norm", "k_norm")]
        found = []
        for h in range(count):
            g = h // sharing
            of_q = slice(h * score_width, (h + 1) * score_width)
            of_k, of_v = slice(g * score_width, (g + 1) * score_width), slice(g * width, (g + 1) * width)
            of_head = (q[..., of_q], k[..., of_k])
            if norms[0] is not None:
                of_head = tuple(norm(x, scale) for x, scale in zip(of_head, norms, strict=True))
            scores = score(*of_head, **{name: x[h] for name, x in own.items()})
            found.append(pool(scores, visible, v[..., of_v], sinks[h], normalizer))
        return layer.W_o(torch.cat([out for out, _ in found], -1)), torch.stack([w for _, w in found], 1)

    return plain


@dataclass(frozen=True)
class Case:
    """One layer: how it is made with sizes and without, and what it must compute."""

    name: str
    plain: Plain
    kind: Callable[..., Any]
    arguments: dict[str, Any]
    query_size: int = 6
    key_size: int = 6

    @property
    def head_count(self) -> int:
        return int(self.arguments.get("num_heads", 0))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that the constructor takes, and infers when they are not given."""
        sizes = {"query_size": self.query_size, "key_size": self.key_size, "value_size": VALUE_SIZE}
        return {name: sizes[name] for name in inspect.signature(self.kind).parameters if name in sizes}

    def make(self, *, lazy: bool = False, **more: Any) -> Any:
        return self.kind(**self.arguments, **({} if lazy else self.sizes), **more)

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(seed)
        shapes = (QUERIES, self.query_size), (KEYS, self.key_size), (KEYS, VALUE_SIZE)
        q, k, v = (torch.randn(BATCH, *shape, generator=source, dtype=torch.float64) for shape in shapes)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (BATCH, *((self.head_count,) if self.head_count else ()), QUERIES, KEYS)


def _multi(name: str, *definition: Callable[..., Tensor], **arguments: Any) -> Case:
    made = {"num_hiddens": 8, "num_heads": 4, **arguments}
    return Case(name, heads(*definition), MultiHeadAttention, made, 6, 7)


LAYERS = (
    Case("dot", single(dot), DotProductAttention, {"scaled": False}),
    Case("scaled dot", single(scaled_dot), DotProductAttention, {}),
    Case("additive", single(additive), AdditiveAttention, {"num_hiddens": 8}, 20, 2),
    Case("bilinear", single(bilinear), BilinearAttention, {}, 20, 2),
    Case("gaussian", single(gaussian), GaussianAttention, {"bandwidth": 1.5}),
    Case("gaussian, learned", single(gaussian), GaussianAttention, {"bandwidth": 1.5, "learn_bandwidth": True}),
    _multi("heads, scaled dot", scaled_dot),
    _multi("heads, dot, bias", dot, score="dot", bias=True),
    _multi("heads, additive", additive, score="additive"),
    _multi("heads, additive, 3 hidden", additive, score="additive", score_hiddens=3, num_key_value_heads=2),
    _multi("heads, bilinear", bilinear, score="bilinear", num_key_value_heads=2),
    _multi("heads, gaussian", gaussian, score="gaussian"),
    _multi("heads, cosine", cosine, score="cosine", num_key_value_heads=1),
    _multi("heads, capped additive", capped(additive, 0.5), score=ats.SoftCap("additive", 0.5)),
    _multi("heads, sum", summed, score=ats.Temperature(ats.Dot() + 0.5 * ats.Gaussian(1.5), np.linspace(1, 2, 4))),
    _multi(
        "heads, capped sum",
        capped_sum,
        score=ats.SoftCap(ats.Combination(("additive", "gaussian"), (1.0, np.full(4, 0.5))), 2.0),
        score_hiddens=3,
    ),
    _multi("heads, sink", scaled_dot, sink=True),
    _multi("heads, norms, sink", gaussian, score="gaussian", qk_norm=True, sink=True, num_key_value_heads=2),
    _multi("one head", scaled_dot, num_heads=1, num_hiddens=3),
    Case("dot, sparsemax", single(dot, sparsemax), DotProductAttention, {"scaled": False, "normalizer": "sparsemax"}),
    Case(
        "additive, sigmoid",
        single(additive, torch.sigmoid),
        AdditiveAttention,
        {"num_hiddens": 8, "normalizer": "sigmoid"},
        20,
        2,
    ),
    Case("bilinear, entmax", single(bilinear, entmax15), BilinearAttention, {"normalizer": ats.Entmax(1.5)}, 20, 2),
    Case(
        "gaussian, sparsemax",
        single(gaussian, sparsemax),
        GaussianAttention,
        {"bandwidth": 1.5, "learn_bandwidth": True, "normalizer": ats.Entmax(2)},
    ),
    _multi("heads, sigmoid", cosine, torch.sigmoid, score="cosine", normalizer="sigmoid", num_key_value_heads=2),
    _multi("heads, entmax", scaled_dot, entmax15, normalizer="entmax15", qk_norm=True),
)

_ROWS = torch.tensor([[[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]], dtype=torch.bool)
_ALL = torch.arange(KEYS)[None, None]
# As given to a layer, and which pairs (batch, query, key) that shows.
MASKS: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "none": ({}, None),
    "lens (batch,)": ({"valid_lens": [2, 5]}, torch.tensor([2, 5])[:, None, None] > _ALL),
    "lens (batch, query), some 0": (
        {"valid_lens": torch.tensor([[0, 1, 5], [4, 0, 2]])},
        torch.tensor([[0, 1, 5], [4, 0, 2]])[..., None] > _ALL,
    ),
    "causal": (
        {"mask": ats.Causal(align="bottom_right")},
        torch.arange(QUERIES)[None, :, None] + KEYS - QUERIES >= _ALL,
    ),
    "array (query, key)": ({"mask": _ROWS[0]}, _ROWS),
    "array (batch, query, key)": ({"mask": torch.cat([_ROWS, ~_ROWS])}, torch.cat([_ROWS, ~_ROWS])),
    "composed, and lens": (
        {"mask": ~ats.Dense(torch.cat([_ROWS, ~_ROWS])) | ats.KeyRange(1, 3), "valid_lens": [4, 0]},
        (~torch.cat([_ROWS, ~_ROWS]) | (_ALL >= 1) & (_ALL < 3)) & (torch.tensor([4, 0])[:, None, None] > _ALL),
    ),
}


# D2L's modules (Dive into Deep Learning, chapter 11), with lazily sized projections and its names.
def textbook_softmax(scores: Tensor, lens: Tensor | None) -> Tensor:
    if lens is None:
        return torch.softmax(scores, -1)
    lens = lens if lens.ndim == 2 else lens[:, None].expand(scores.shape[:2])
    padding = torch.arange(scores.shape[-1])[None, None] >= lens[..., None]
    return torch.softmax(scores.masked_fill(padding, -1e6), -1)


class TextbookDot(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, lens: Tensor | None = None) -> Tensor:
        self.attention_weights = textbook_softmax(queries @ keys.mT / math.sqrt(queries.shape[-1]), lens)
        return self.attention_weights @ values


class TextbookAdditive(nn.Module):
    def __init__(self, num_hiddens: int) -> None:
        super().__init__()
        self.W_k = nn.LazyLinear(num_hiddens, bias=False)
        self.W_q = nn.LazyLinear(num_hiddens, bias=False)
        self.w_v = nn.LazyLinear(1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, lens: Tensor | None = None) -> Tensor:
        features = torch.tanh(self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None])
        self.attention_weights = textbook_softmax(self.w_v(features)[..., 0], lens)
        return self.attention_weights @ values


class TextbookMultiHead(nn.Module):
    """Heads are moved to the batch axis, as the book does."""

    def __init__(self, num_hiddens: int, num_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.num_heads, self.attention = num_heads, TextbookDot()
        for name in ("W_q", "W_k", "W_v", "W_o"):
            setattr(self, name, nn.LazyLinear(num_hiddens, bias=bias))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, lens: Tensor | None = None) -> Tensor:
        split = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).flatten(0, 1)
            for x in self._projected(queries, keys, values)
        )
        if lens is not None:
            lens = lens.repeat_interleave(self.num_heads, 0)
        out = self.attention(*split, lens)
        return self.W_o(out.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(-2))

    def _projected(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.W_q(queries), self.W_k(keys), self.W_v(values)


every_layer = pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
every_mask = pytest.mark.parametrize("mask", MASKS)


def close(got: Any, wanted: Any, dtype: torch.dtype = torch.float64) -> None:
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, check_dtype=False)
