"""Watching a model: numbers equal to the full matrix's, the model unchanged, every call found by its module."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as bound_elsewhere

import attnscore as ats
import oracle
import transformers_cases
from attnscore.cli.demo import minilm
from attnscore.diagnostics.inspection import pretrained
from attnscore.diagnostics.watching import rebinding, records, torch_patches, torch_watch
from attnscore.diagnostics.watching import sums as sums_module
from attnscore.diagnostics.watching.health import Thresholds
from attnscore.diagnostics.watching.sums import Call, Scores, sums_of
from attnscore.diagnostics.watching.torch_calls import sdpa_call
from attnscore.diagnostics.watching.watch import watch
from attnscore.errors import ArgumentError
from attnscore.integrations.transformers import register
from attnscore.layers.torch import AdditiveAttention, DotProductAttention, MultiHeadAttention
from cases import MASKS, SCORES
from harness import make_call
from transformers_cases import LEFT_PADDED

WEIGHT = 0.6  # saturated from here, so that random rows are on both sides


pytestmark = pytest.mark.usefixtures("torch_seed", "one_thread", "few_modules")


def expected_sums(
    numbers: dict[str, Any], visible: np.ndarray, real: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The sums of every head, from matrices of weights and scores (batch, head, query, key)."""
    x = {name: np.asarray(value.detach().double()) for name, value in numbers.items()}
    batch, heads, queries, keys = x["weights"].shape
    visible = visible & (x["scores"] > -np.inf)
    asked = np.ones((batch, heads, queries), bool)
    if real is not None and real.shape == (batch, keys) and queries == keys:
        asked = np.broadcast_to(real[:, None], asked.shape)
    alive = asked & (x["sum_weights"] > 0)
    lone = (visible.sum(-1) == 1) & (x["sum_weights"] > 1 - 1e-6)  # one key, and no sink beside it
    choice = alive & ~lone

    def total(values, among=alive):
        return np.where(among, values, 0.0).sum((0, 2))

    weights, first = x["weights"], None
    if real is not None and real.shape == (batch, keys):
        first = np.arange(keys) == np.where(real.any(1), real.argmax(1), -1)[:, None]
    found = {
        "rows": total(1.0),
        "empty_rows": total(1.0, asked & (x["sum_weights"] == 0)),
        "nan_rows": total(1.0, asked & np.isnan(x["sum_weights"])),
        "choice_rows": total(1.0, choice),
        "saturated_rows": total(1.0, choice & (weights.max(-1) >= WEIGHT)),
        "logit_mean": total(x["mean_score"]),
        "logit_variance": total(x["var_score"]),
        "log_sum_exp": total(x["log_sum_exp"]),
        "entropy": total(x["entropy"]),
        "max_weight": total(weights.max(-1)),
        "effective_keys": total(np.exp(x["entropy"])),
        "jacobian_trace": total(weights.sum(-1) - (weights**2).sum(-1)),
        "first_key": total(weights[..., 0] if first is None else (weights * first[:, None, None]).sum(-1)),
        "max_logit": np.where(alive, x["max_score"], -np.inf).max((0, 2)),
    }
    if real is not None and real.shape == (batch, keys):
        found["padding"] = total((weights * ~real[:, None, None]).sum(-1))
    return found


def check(found, expected, atol: float = 1e-9) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=atol, atol=atol, err_msg=name)


def from_table(score: str, mask: str, extras: str = "", dtype: str = "float64", head_axis: int = -3):
    """A row of the tables as a `Call`, and the sums from its full matrix in float64."""
    call = make_call(score, mask, dtype, extras)
    leaves = {name: torch.tensor(np.asarray(x, dtype=np.float64)) for name, x in call.leaves.items()}
    expected = expected_sums(call.formulas(leaves, torch.from_numpy), np.broadcast_to(call.visible, call.visible.shape))
    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in call.leaves.items()}
    options = {**call.arguments, "head_axis": head_axis}
    options |= {name: tensors[name] for name in ("bias", "sink") if name in tensors}
    options["score"] = call.score.make(**{name: tensors[f"score.{name}"] for name in call.arrays})
    query, key = tensors["query"], tensors["key"]
    if head_axis == -2:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    return Call(query, key, options), expected


# ---------------------------------------------------------------- every statistic equals the full matrix's


EXTRAS = ("", "bias", "sink", "hiding-bias")


def check_masks(number: int, masks: Iterable[int]) -> None:
    """The score of that number under masks; layouts, biases and sinks take turns."""
    for turn, i in enumerate(masks, number):
        score, mask, extras = SCORES[number].name, MASKS[i].name, EXTRAS[turn % 4]
        call, expected = from_table(score, mask, extras, head_axis=(-3, -2)[turn // 4 % 2])
        try:
            check(sums_of(call, None, WEIGHT), expected)
        except AssertionError as error:
            raise AssertionError(f"{score}, {mask}, {extras!r}: {error}") from error


@pytest.mark.parametrize("number", range(len(SCORES)), ids=[row.name for row in SCORES])
def test_statistics_of_every_score(number: int) -> None:
    """Each under some of the masks, so that all masks take part; under all of them in the next test."""
    check_masks(number, range(number % 16, len(MASKS), 16))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCORES)), ids=[row.name for row in SCORES])
def test_statistics_of_every_score_and_mask(number: int) -> None:
    check_masks(number, range(len(MASKS)))


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 5e-2), ("float16", 1e-2)])
def test_statistics_of_every_dtype(dtype: str, atol: float) -> None:
    x = torch.randn(2, 3, 2, 6, 5, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    query, key = x[0], x[1]
    found = sums_of(Call(query, key, {"score": "scaled_dot"}), None, 1.0)
    scores = query.double() @ key.double().mT / 5**0.5
    wanted = full_matrix(scores)
    check(found, {name: value for name, value in wanted.items() if name != "saturated_rows"}, atol)


def full_matrix(scores: torch.Tensor, real: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The sums of scores (batch, head, query, key), -inf where hidden."""
    visible = scores > -torch.inf
    numbers = oracle.attention(scores, scores.new_zeros(*scores.shape[:-2], scores.shape[-1], 1), visible)
    return expected_sums({**numbers, "scores": scores}, visible.numpy(), real)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float64).min, -1e9])
@pytest.mark.parametrize("block", [1, 40, 2**20])
def test_scores_that_the_model_made_are_read_in_blocks(block: int, lowest: float, monkeypatch) -> None:
    monkeypatch.setattr(sums_module, "BLOCK", block)
    scores = torch.randn(2, 3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    real = np.array([[True] * 7, [True] * 3 + [False] * 4])
    hidden = ~torch.from_numpy(real)[:, None, None] | torch.ones(7, 7).triu(1).bool()
    wanted = full_matrix(scores.masked_fill(hidden, -torch.inf), real)
    check(sums_of(Scores(scores.masked_fill(hidden, lowest)), torch.from_numpy(real), WEIGHT), wanted)


TOKENS = torch.arange(7)
ALL = torch.ones(7, 7).bool()
BIASES = {
    "a causal mask": (torch.zeros(7, 7).masked_fill(ALL.triu(1), -torch.inf), 0),
    "ALiBi": (-(TOKENS[:, None] - TOKENS).abs().float(), 1),
    "of one key": (torch.eye(7)[0], 1),
    "none": (None, 0),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_that_is_no_mask_is_known(bias: str) -> None:
    array, is_biased = BIASES[bias]
    query = torch.randn(1, 2, 7, 4)
    call = sdpa_call(query, query, {"attn_mask": array})
    assert sums_of(call, None, WEIGHT)["biased"].tolist() == [is_biased] * 2


CAUSAL_SIGNS = {
    "causal": (ALL.tril(), 1),
    "causal, a window of 2": (ALL.tril() & ALL.triu(-1), 1),
    "causal documents": (ALL.tril() & (TOKENS[:, None] // 4 == TOKENS // 4), 1),
    "causal, padding first": (ALL.tril() & (TOKENS > 1), 1),
    "full": (ALL, 0),
    "one later key": (ALL.tril(1), 0),
    "inverted": (ALL.triu(1), -1),
    "blocks, the last of one key": (TOKENS[:, None] // 3 == TOKENS // 3, -1),
    "graph with a lone node": ((TOKENS[:, None] == 4) == (TOKENS == 4), -1),
}


@pytest.mark.parametrize("block", [1, 2**20])
@pytest.mark.parametrize("mask", CAUSAL_SIGNS)
def test_a_causal_mask_is_known_by_its_first_query(mask: str, block: int, monkeypatch) -> None:
    monkeypatch.setattr(sums_module, "BLOCK", block)
    visible, sign = CAUSAL_SIGNS[mask]
    query = torch.randn(1, 2, 7, 4)
    for call in (Call(query, query, {"mask": visible}), Scores((query @ query.mT).masked_fill(~visible, -torch.inf))):
        signs = sums_of(call, None, WEIGHT)["causal_sequences"]
        # The first block of scores, of two queries here, may lack the lone one.
        assert signs.tolist() == [sign] * 2 or (block == 1 and sign < 0 and signs.tolist() == [0] * 2)


@pytest.mark.parametrize("head_axis", [-3, -2])
def test_what_queries_keys_and_values_say_of_a_head(head_axis: int) -> None:
    query, key, value = (
        torch.randn(2, 4, 6, 5).double(),
        torch.randn(2, 2, 7, 5).double(),
        torch.randn(2, 2, 7, 3).double(),
    )
    query[1, 0, 2, 1], key[0, 1, 3, 0], value[0, 1] = torch.nan, torch.inf, 2.5  # values of a head all alike
    both = [x.transpose(1, 2) if head_axis == -2 else x for x in (query, key, value)]
    sums = sums_of(Call(*both[:2], {"head_axis": head_axis, "score": ats.ScaledDot(0.5)}, value=both[2]), None, WEIGHT)
    assert sums["nan_query"].tolist() == [1, 0, 0, 0] and sums["nan_key"].tolist() == [0, 0, 1, 1]
    assert sums["nan_value"].tolist() == [0] * 4 and sums["value_sequences"].tolist() == [2] * 4
    assert sums["sequences"].tolist() == [1, 2, 1, 1]
    for head in range(4):
        bound = spread = 0.0
        for i in range(2):
            q, k, v = (x[i, head if x is query else head // 2].numpy() for x in (query, key, value))
            if np.isfinite(q).all() and np.isfinite(k).all():
                variance = np.trace(np.cov(q.T, bias=True)) * np.trace(np.cov(k.T, bias=True)) / 4
                centred = (q - q.mean(0)) @ (k - k.mean(0)).T / 2
                assert (centred**2).mean() <= variance
                bound += variance
            spread += np.trace(np.cov(v.T, bias=True)) / (v**2).sum(-1).mean()
        assert sums["query_variance"][head] == pytest.approx(bound, rel=1e-9)
        assert sums["value_spread"][head] == pytest.approx(spread, rel=1e-9, abs=1e-12)


def test_a_score_that_overflows_is_told_from_other_nan() -> None:
    scores = torch.randn(1, 2, 4, 4).half()
    scores[0, 0, 1, 2], scores[0, 1, 2, 2] = torch.inf, torch.nan
    sums = sums_of(Scores(scores), None, WEIGHT)
    assert sums["nan_rows"].tolist() == [1, 1] and sums["overflow_rows"].tolist() == [1, 0]
    assert sums["dtype_max"].tolist() == [65504, 65504] and sums["sequences"].tolist() == [0, 0]


def test_weight_on_padding_is_found_where_a_mask_forgets_it() -> None:
    query, key = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    real = np.array([[True] * 5, [True, True, False, False, False]])
    wanted = full_matrix(query @ key.mT / 2, real)
    assert (wanted["padding"] > 0.1).all()
    check(sums_of(Call(query, key), torch.from_numpy(real), WEIGHT), wanted)
    turned = Call(query.transpose(1, 2), key.transpose(1, 2), {"head_axis": -2})
    check(sums_of(turned, torch.from_numpy(real), WEIGHT), wanted)


@pytest.mark.parametrize("masked", [True, False])
def test_the_first_key_behind_padding_on_the_left(masked: bool) -> None:
    query, key = torch.randn(2, 3, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    real = np.array([[False, False, True, True, True], [True] * 5, [False] * 5])
    options = {"mask": ats.KeyPadding(torch.from_numpy(real))} if masked else {}
    hidden = ~torch.from_numpy(real)[:, None, None] if masked else torch.tensor(False)
    wanted = full_matrix((query @ key.mT / 2).masked_fill(hidden, -torch.inf), real)
    assert (wanted["first_key"] > 0.5).all()
    for head_axis in (-3, -2):
        q, k = (x if head_axis == -3 else x.transpose(1, 2) for x in (query, key))
        check(sums_of(Call(q, k, options | {"head_axis": head_axis}), torch.from_numpy(real), WEIGHT), wanted)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (1, 1, 1, 4), (2, 2, 0, 4), (2, 1, 2, 3, 4)])
def test_axes_and_sizes_of_every_kind(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = sums_of(Call(x, x), None, WEIGHT)
    heads = shape[-3] if len(shape) > 3 else 1
    if not x.numel():
        assert (found["rows"] == 0).all() and found["rows"].shape == (heads,)
        return
    flat = x.reshape(-1, heads, *shape[-2:])
    check(found, full_matrix(flat @ flat.mT / 2))


# ---------------------------------------------------------------- models of every kind, unchanged


class OwnAttention(nn.Module):
    """A block as timm writes it: F.scaled_dot_product_attention in its own code; and once under another name."""

    def __init__(self, dim: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        query, key, value = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        out = out + bound_elsewhere(query, key, value, None, 0.0, True, scale=0.1)
        return self.proj(out.transpose(1, 2).reshape(batch, length, dim))


class Computes(nn.Module):
    """What a function gives, which may call these parts."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(*inputs, **options)


def run(model: nn.Module, *inputs: Any, **options: Any):
    """What a model gives, and the gradients of its parameters."""
    model.zero_grad()
    torch.manual_seed(5)
    out = model(*inputs, **options)
    out = out if isinstance(out, torch.Tensor) else out[0]
    if not out.requires_grad:
        return [out]
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def watched_run(model: nn.Module, *inputs: Any, **options: Any):
    """The same, watched, after checking that nothing is different for it, bit by bit."""
    before = run(model, *inputs, **options)
    with watch(model, thresholds=Thresholds(saturated_weight=WEIGHT)) as seen:
        found = run(model, *inputs, **options)
    assert len(before) == len(found) and all(map(torch.equal, before, found))
    return seen


def means(scores: torch.Tensor, real: np.ndarray | None = None) -> list[dict[str, float]]:
    sums = full_matrix(scores.double(), real)
    rows = sums["rows"]
    names = ("logit_mean", "logit_variance", "log_sum_exp", "entropy", "max_weight", "effective_keys", "first_key")
    return [
        {name: float(sums[name][h] / rows[h]) for name in names} | {"max_logit": float(sums["max_logit"][h])}
        for h in range(len(rows))
    ]


def assert_rows(rows: list[dict[str, Any]], wanted: list[dict[str, float]], atol: float = 1e-5) -> None:
    assert len(rows) == len(wanted)
    for row, want in zip(rows, wanted, strict=True):
        for name, value in want.items():
            assert row[name] == pytest.approx(value, rel=atol, abs=atol), (row["layer"], row["head"], name)


def test_a_model_that_calls_sdpa_in_its_own_code() -> None:
    model, x = nn.Sequential(OwnAttention(), OwnAttention()), torch.randn(2, 9, 32)
    seen = watched_run(model, x)
    assert list(seen.layers) == ["0", "0 #2", "1", "1 #2"] and not seen.unseen and seen.steps == 1
    query, key = model[0].qkv(x).detach().double().reshape(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)[:2]
    assert_rows(seen.rows()[:4], means(query @ key.mT / 8**0.5))
    hidden = torch.ones(9, 9).triu(1).bool()
    assert_rows(seen.rows()[4:8], means((query @ key.mT * 0.1).masked_fill(hidden, -torch.inf)))


class Masked(nn.Module):
    """F.scaled_dot_product_attention of a projection, with the arguments of a test."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.proj, self.arguments = nn.Linear(8, 8).double(), arguments

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(self.proj(query), key, value, **self.arguments)


@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_number_for_minus_infinity_in_a_mask_hides_its_key(number: float, one_pass: bool) -> None:
    """A head that a model masks so is healthy; a query that sees nothing is one to the watch, not to the model."""
    hidden, x = torch.ones(5, 5).triu(1).bool(), torch.randn(2, 5, 8).double()
    hidden[3] = True
    models = [Masked(attn_mask=torch.zeros(5, 5).double().masked_fill(hidden, n)) for n in (number, -torch.inf)]
    models[1].load_state_dict(models[0].state_dict())
    rows = []
    for model in models:
        with watch(model, one_pass=one_pass) as seen:
            out = model(x, x, x)
        rows += seen.rows()
        torch.testing.assert_close(out, model(x, x, x))
    assert rows[0] == pytest.approx(rows[1], nan_ok=True) and rows[0]["empty_rows"] == 2


@pytest.fixture
def originals(monkeypatch) -> list[str]:
    """The names of PyTorch's own functions that run under a watch, in the order of their calls."""
    found: list[str] = []
    call = torch_patches._call_original

    def noted(home: Any, original: Any, *more: Any) -> Any:
        found.append(original.__name__)
        return call(home, original, *more)

    monkeypatch.setattr(torch_patches, "_call_original", noted)
    return found


def masked_calls() -> dict[str, dict[str, Any]]:
    torch.manual_seed(3)
    boolean = torch.rand(2, 1, 5, 7) > 0.4
    boolean[:, :, 2] = False  # a fully masked query
    bias = torch.randn(4, 5, 7).double().masked_fill(torch.rand(4, 5, 7) > 0.6, -torch.inf)
    bias[1, 3] = -torch.inf
    lower_right = causal_lower_right(5, 7)
    with torch._C.DisableTorchFunctionSubclass():
        lower_right.fill_(torch.finfo(torch.float32).min)  # its memory means nothing
    return {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": boolean, "scale": 0.3},
        "float": {"attn_mask": bias},
        "lower right": {"attn_mask": lower_right},
        "gqa": {"enable_gqa": True},
    }


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", masked_calls())
def test_one_pass_gives_the_output_and_the_same_numbers(name: str, grad: bool, originals: list[str]) -> None:
    model, heads = Masked(**masked_calls()[name]), 2 if name == "gqa" else 4
    shapes = ((2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 3))
    arrays = [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]

    def results(one_pass: bool) -> tuple[list[torch.Tensor], Any]:
        with torch.set_grad_enabled(grad), watch(model, one_pass=one_pass) as seen:
            out = model(*arrays)
        assert out.is_contiguous() and out.requires_grad is grad and not seen.unseen
        leaves = [*arrays, *model.parameters()]
        return [out, *(torch.autograd.grad(out.square().sum(), leaves) if grad else [])], seen

    wanted, two = results(one_pass=False)
    assert originals == ["scaled_dot_product_attention"]
    found, one = results(one_pass=True)
    # CausalBias is a tensor of PyTorch's, whose own call leaves `originals` in place.
    assert originals == ["scaled_dot_product_attention"]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    for row, want in zip(one.rows(), two.rows(), strict=True):
        assert row.keys() == want.keys()
        for key, x in want.items():
            assert row[key] == (pytest.approx(x, 1e-10, 1e-10, nan_ok=True) if isinstance(x, float) else x), key


def padded_calls() -> dict[str, tuple[torch.Tensor | None, torch.Tensor, bool]]:
    """Masks of calls, the tokens that are not padding, and whether padding has weight."""
    torch.manual_seed(4)
    real = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    tokens = real.bool()[:, None, None]
    return {
        "no mask": (None, real, True),
        "another mask": (torch.rand(6, 6) > 0.3, real, True),
        "of keys": (tokens, real, False),
        "of pairs": (tokens & (torch.rand(2, 3, 6, 6) > 0.4), real, False),  # the first token among them
        "no padding": (torch.rand(6, 6) > 0.3, torch.ones_like(real), False),
        "all padding": (
            tokens & torch.tensor([True, False])[:, None, None, None],
            real * torch.tensor([[1], [0]]),
            False,
        ),
    }


@pytest.mark.parametrize("name", padded_calls())
@pytest.mark.parametrize("axes", [3, 4])
def test_one_pass_knows_the_padding(axes: int, name: str, originals: list[str]) -> None:
    mask, real, has_weight = padded_calls()[name]
    x = torch.randn(2, 3, 6, 4)
    if axes == 3:
        x, mask = x[:, 0], mask if mask is None or mask.ndim == 2 else mask[:, 0]

    model = Computes(lambda x, attention_mask: functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    rows = {}
    for one_pass in (False, True):
        with watch(model, one_pass=one_pass) as seen:
            model(x, attention_mask=real)
        rows[one_pass] = seen.rows()
    assert len(originals) == 1 and not seen.unseen
    for row, want in zip(rows[True], rows[False], strict=True):
        assert row == pytest.approx(want, abs=2e-6) and row["rows"] > 0
        assert (row["padding"] > 0) is has_weight


def left_to_the_model() -> dict[str, Any]:
    """Calls that one pass leaves to PyTorch's function, as (model, arrays)."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    least = torch.zeros(5, 5, dtype=torch.float64)
    least[1] = torch.finfo(torch.float64).min
    learned = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))
    one_head = x[:, :1]
    return {
        "dropout": (Masked(dropout_p=0.5), (x, x, x)),
        "the least number": (Masked(attn_mask=least), (x, x, x)),
        "learned bias": (Masked(attn_mask=learned), (x, x, x)),
        "broadcast keys": (Masked(), (x, one_head, one_head)),
        "two axes": (Masked(), (x[0, 0], x[0, 0], x[0, 0])),
    }


@pytest.mark.parametrize("name", left_to_the_model())
def test_one_pass_leaves_other_calls_to_the_model(name: str, originals: list[str]) -> None:
    model, arrays = left_to_the_model()[name]
    torch.manual_seed(1)
    wanted = model(*arrays)
    torch.manual_seed(1)
    with watch(model, one_pass=True) as seen:
        found = model(*arrays)
    assert torch.equal(found, wanted) and originals == ["scaled_dot_product_attention"]
    assert seen.rows() or seen.unseen


def test_one_pass_leaves_checkpointing_and_autocast_to_the_model(originals: list[str]) -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = OwnAttention(), torch.randn(2, 9, 32)
    with watch(model, one_pass=True) as seen:
        checkpoint(model, x, use_reentrant=False).sum().backward()  # its second pass is not watched
    assert originals == 4 * ["scaled_dot_product_attention"] and seen.steps == 1 and not seen.unseen
    originals.clear()
    with watch(model, one_pass=True) as seen, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert originals.count("scaled_dot_product_attention") == 2 and not seen.unseen
    with watch(model, one_pass=True, every=2) as seen, torch.no_grad():
        model(x)
        assert originals.count("scaled_dot_product_attention") == 2  # a sampled step
        model(x)
        assert originals.count("scaled_dot_product_attention") == 4  # one that is not
    assert seen.sampled == 1


def test_dropout_draws_as_it_did() -> None:
    model = OwnAttention(dropout=0.4).train()
    assert len(watched_run(model, torch.randn(2, 9, 32)).layers) == 2


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_nn_multihead_attention(need_weights: bool, grad: bool, batched: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).train(grad)
    x = torch.randn(3, 5, 8) if batched else torch.randn(5, 8)
    ignored = torch.arange(5) >= (torch.tensor([5, 3, 1])[:, None] if batched else torch.tensor(3))
    options = {"need_weights": need_weights, "key_padding_mask": ignored}
    with torch.set_grad_enabled(grad):
        seen = watched_run(layer, x, x, x, **options)
    assert list(seen.layers) == ["(model)"] and not seen.unseen
    parts = (nn.functional.linear(x, w).double() for w in layer.in_proj_weight.detach().chunk(3))
    query, key, value = (t.reshape(-1, 5, 2, 4).transpose(1, 2) for t in parts)
    hidden = ignored[:, None, None] if batched else ignored
    wanted = means((query @ key.mT / 2).masked_fill(hidden, -torch.inf))
    spreads = [t.var(-2, correction=0).sum(-1) for t in (query, key, value)]
    bound, share = spreads[0] * spreads[1] / 4, spreads[2] / (value**2).sum(-1).mean(-1)
    for head, row in enumerate(wanted):
        row |= {"query_variance": float(bound[:, head].mean()), "value_spread": float(share[:, head].mean())}
    assert_rows(seen.rows(), wanted)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_a_layer_returns_are_those_it_returned_unwatched(fails: bool, monkeypatch) -> None:
    """With dropout, which a second call must not draw, and where that call fails, of which the scores remain."""
    if fails:
        monkeypatch.setattr(torch_patches, "inspect", types.SimpleNamespace(signature=lambda _: 1 / 0))
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True), torch.randn(3, 5, 8)
    seen = watched_run(layer, x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool())
    assert [row["rows"] for row in seen.rows()] == [15, 15] and not seen.unseen
    assert all(np.isnan(row["value_spread"]) == fails for row in seen.rows())


def encoder(norm_first: bool = False, nested: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and not norm_first).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["none", "padding", "short", "causal", "both"])
@pytest.mark.slow_rows("*-True")
def test_nn_transformer_encoder_stays_on_its_fused_path(kind: str, norm_first: bool, monkeypatch) -> None:
    model, x = encoder(norm_first), torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    # A nested tensor is padded to its longest sequence: "short" leaves columns that no sequence reaches.
    ignored = torch.arange(7) >= torch.tensor([5 if kind == "short" else 7, 4, 2])[:, None]
    causal = torch.ones(7, 7).triu(1).bool()
    options: dict[str, Any] = {"src_key_padding_mask": ignored} if kind in ("padding", "short", "both") else {}
    options |= {"mask": causal} if kind in ("causal", "both") else {}
    fused = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: fused.append(1) or original(*a))
    with torch.no_grad():
        seen = watched_run(model, x, **options)
        fast = len(fused)
        # By the slow path of the same layers, whose attention is seen elsewhere.
        monkeypatch.undo()
        with watch(model) as slow:
            torch.backends.mha.set_fastpath_enabled(False)
            model(x, **options)
            torch.backends.mha.set_fastpath_enabled(True)
    assert fast == 4 and not seen.unseen and not slow.unseen
    assert list(seen.layers) == list(slow.layers) == ["layers.0.self_attn", "layers.1.self_attn"]
    names = [*records.MEANS, "max_logit", "empty_rows", "rows"]
    assert_rows(seen.rows(), [{name: row[name] for name in names} for row in slow.rows()])


def test_an_encoder_that_trains() -> None:
    model = encoder().train()
    seen = watched_run(model, torch.randn(3, 7, 16))
    assert list(seen.layers) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_layers_of_this_library() -> None:
    model = nn.ModuleList([MultiHeadAttention(16, 4, score="cosine"), AdditiveAttention(8, key_size=16, query_size=16)])
    model.forward = lambda x, lens: model[1](*[model[0](x, x, x, lens)] * 3, valid_lens=lens)  # type: ignore[method-assign]
    x = torch.randn(2, 6, 16)
    model(x, [3, 6])
    seen = watched_run(model, x, [3, 6])
    assert [(name, layer.heads) for name, layer in seen.layers.items()] == [("0", 4), ("1", 1)] and not seen.unseen
    weights = model[1].attention_weights.double()
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1).mean()
    assert seen.rows()[-1]["entropy"] == pytest.approx(float(entropy), rel=1e-5)


# ---------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def sentences():
    tokenizer, model = pretrained.load(pretrained.MINILM)
    text = ["A good soup needs patience.", "The goalkeeper dived to her left and saved the penalty in the last minute."]
    return model, minilm.tokenize(tokenizer, text)


EVERY_HEAD = pytest.param([*np.ndindex(6, 12)], marks=pytest.mark.slow)


@pytest.mark.parametrize("heads", [[(0, 0), (3, 7), (5, 11)], EVERY_HEAD], ids=["some", "every"])
def test_a_head_that_fails_is_found_and_no_other(sentences, heads: list[tuple[int, int]]) -> None:
    model, batch = sentences
    model.set_attn_implementation("sdpa")
    for layer, head in heads:
        weight = model.encoder.layer[layer].attention.self.query.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[32 * head : 32 * head + 32] *= 30
            with watch(model) as seen:
                model(**batch.inputs)
            weight.copy_(kept)
        assert seen.failing() == [(f"encoder.layer.{layer}.attention.self", head)]


def test_a_healthy_model_has_no_failing_head(sentences) -> None:
    model, batch = sentences
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), watch(model) as seen:
        model(**batch.inputs)
    assert seen.failing() == [] and {verdict.sign for verdict in seen.verdicts()} <= {"sharp", "sink"}


def test_a_head_of_an_encoder_that_fails() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(4, 64, 64)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[16:32] *= 30
        with watch(model) as seen:
            model(x)
    assert seen.failing() == [("layers.1.self_attn", 1)]


def test_a_decoder_that_generates() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, **small)
    ids = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = {}
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
        model.set_attn_implementation(implementation)
        before = model.generate(ids, **options, eos_token_id=None)
        with watch(model) as seen:
            after = model.generate(ids, **options, eos_token_id=None)
        assert torch.equal(before, after)
        assert list(seen.layers) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
        assert seen.steps == 6 and not seen.unseen
        # 5 + 3 tokens, then five steps of one query for each of the two
        assert {row["rows"] for row in seen.rows()} == {5 + 3 + 5 * 2} and len(seen.rows()) == 8
        found[implementation] = seen.rows()
    names = [*records.MEANS, "max_logit", "padding"]
    assert_rows(found["sdpa"], [{name: row[name] for name in names} for row in found["eager"]])


@pytest.mark.parametrize("name", ["bert", "mistral", "gpt2", "t5", "bart", "vit"])
@pytest.mark.slow_rows("mistral", "gpt2", "t5", "bart", "vit")
def test_architectures(name: str) -> None:
    """By every implementation, in training too; numbers against the weights that the model itself gives."""
    register("attnscore")
    model, inputs = transformers_cases.make(name), transformers_cases.inputs_of(name, LEFT_PADDED.flip(1))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    wanted = [weights for kind in (kinds if "decoder_input_ids" in inputs else ["attentions"]) for weights in out[kind]]
    for implementation in ("attnscore", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        seen = watched_run(model.eval(), **inputs)
        assert not seen.unseen and len(seen.layers) == len(wanted)
        encoder = [layer for layer in seen.layers if "decoder" not in layer]
        cross = [layer for layer in seen.layers if "EncDec" in layer or "encoder_attn" in layer]
        order = [*encoder, *(layer for layer in seen.layers if layer not in (*encoder, *cross)), *cross]
        for layer, weights in zip(order, wanted, strict=True):
            real = inputs["attention_mask"].bool() if layer in encoder and "attention_mask" in inputs else None
            assert_layer(seen, layer, weights.double(), real)
    assert len(watched_run(model.train(), **inputs).layers) == len(wanted)


def assert_layer(seen, layer: str, p: torch.Tensor, real: torch.Tensor | None) -> None:
    alive = torch.ones(p.shape[:-1], dtype=torch.bool)
    if real is not None and real.shape[1] == p.shape[-2]:
        alive &= real[:, None]
    rows = [row for row in seen.rows() if row["layer"] == layer]
    count = alive.sum((0, 2))
    entropy = torch.where(alive, -(p * p.clamp_min(1e-300).log()).sum(-1), 0.0).sum((0, 2)) / count
    first = torch.where(alive, p[..., 0], 0.0).sum((0, 2)) / count
    assert [row["rows"] for row in rows] == count.tolist(), layer
    assert real is None or {row["padding"] for row in rows} == {0}, layer
    assert [row["entropy"] for row in rows] == pytest.approx(entropy.tolist(), rel=1e-4, abs=1e-5), layer
    assert [row["first_key"] for row in rows] == pytest.approx(first.tolist(), rel=1e-4, abs=1e-6), layer


def test_sinks_and_soft_caps_of_eager_models() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for config, kind in (
        (GptOssConfig(**small, **heads, num_local_experts=2, num_experts_per_tok=1), GptOssForCausalLM),
        (Gemma2Config(**small, **heads, attn_logit_softcapping=0.01), Gemma2ForCausalLM),
    ):
        torch.manual_seed(0)
        model = kind(config).eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(ids, output_attentions=True)
            with watch(model) as seen:
                assert torch.equal(model(ids).logits, out.logits)
        assert not seen.unseen and len(seen.layers) == 2
        for layer, weights in enumerate(out.attentions):
            first = weights[0, :, :, 0].mean(-1)
            rows = seen.rows()[4 * layer : 4 * layer + 4]
            assert [row["first_key"] for row in rows] == pytest.approx(first.tolist(), abs=1e-5)
        if kind is Gemma2ForCausalLM:
            assert max(row["max_logit"] for row in seen.rows()) <= 0.01


# ---------------------------------------------------------------- the switch


def bindings() -> list[Any]:
    from transformers.modeling_utils import AttentionInterface

    from attnscore.layers import base

    return [
        functional.scaled_dot_product_attention, functional.multi_head_attention_forward, functional.softmax,
        torch.softmax, "softmax" in vars(torch.Tensor),
        torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention, nn.Module.__call__,
        bound_elsewhere, ats.attend, ats.api.attend, base.attend, AttentionInterface.get_interface,
    ]  # fmt: skip


def test_every_name_is_put_back_also_after_an_error_and_for_several(monkeypatch) -> None:
    """Of all modules that are loaded."""
    monkeypatch.setattr(rebinding, "sys", sys)
    before, model = bindings(), OwnAttention()
    first, second = watch(model), watch(nn.Sequential(model))
    first.start()
    assert all(new is not old for new, old in zip(bindings(), before, strict=True))
    with pytest.raises(ZeroDivisionError), second:
        model(torch.randn(1, 3, 32))
        raise ZeroDivisionError
    assert bindings() != before
    model(torch.randn(1, 3, 32))
    first.stop()
    first.stop()
    assert all(new is old for new, old in zip(bindings(), before, strict=True))
    assert not torch_patches._WATCHERS and not rebinding.ACTIVE
    assert (first.steps, second.steps) == (2, 1) and list(second.layers) == ["0", "0 #2"]


class Calls:
    """Another library's patch of a function or method, which counts its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.count = owner, name, 0

    def patch(self) -> None:
        self.before = before = getattr(self.owner, self.name)

        def theirs(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return before(*arguments, **options)

        self.function = theirs
        setattr(self.owner, self.name, theirs)

    def unpatch(self) -> None:
        setattr(self.owner, self.name, self.before)


ORDERS = [x for x in itertools.permutations("WSPU") if x.index("W") < x.index("S") and x.index("P") < x.index("U")]


@pytest.mark.parametrize("order", ORDERS, ids="".join)
@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "softmax", "__call__"])
def test_a_patch_of_another_library_stays_until_it_goes(name: str, order: tuple[str, ...], monkeypatch) -> None:
    """Watch starts, Stops, Patch is installed, Unpatched, in every order."""
    owner = {"softmax": torch, "__call__": nn.Module}.get(name, functional)
    original, theirs, model, x = getattr(owner, name), Calls(owner, name), OwnAttention(), torch.randn(1, 3, 32)
    monkeypatch.setattr(owner, name, original)  # whatever fails below
    seen = watch(model)
    events = {"W": seen.start, "S": seen.stop, "P": theirs.patch, "U": theirs.unpatch}
    expected = model(x)
    for place, event in enumerate(order, 1):
        events[event]()
        count, steps, done = theirs.count, seen.steps, order[:place]
        assert torch.equal(model(x) + 0 * torch.softmax(x, -1), expected)
        assert (theirs.count > count) == ("P" in done and "U" not in done)
        if done != ("P", "W", "U"):  # they have put back the original, and the watch does not see its calls
            assert (seen.steps > steps) == ("W" in done and "S" not in done)
        if event == "S" and theirs.count > count:
            assert getattr(owner, name) is theirs.function
    assert order == ("P", "W", "U", "S") or {row["rows"] for row in seen.rows()} == {3 * seen.steps}
    if order == ("W", "P", "S", "U"):  # they have put back the wrapper that they saw
        assert getattr(owner, name) is not original
        with watch(model):
            pass
    assert getattr(owner, name) is original and not rebinding.ACTIVE


def test_a_wrapper_under_a_patch_only_calls_its_original(monkeypatch) -> None:
    name, model = "scaled_dot_product_attention", OwnAttention()
    monkeypatch.setattr(functional, name, getattr(functional, name))
    with watch(model):
        Calls(functional, name).patch()
    with watch(model) as seen:
        model(torch.randn(1, 3, 32))
    assert list(seen.layers) == ["(model)"]  # the call by that name, once


def test_modules_that_are_imported_while_a_watch_runs(monkeypatch) -> None:
    late, model, x = types.ModuleType("torch._late"), ByHand(), torch.randn(2, 3, 4)
    with watch(model) as seen:
        exec("from torch.nn.functional import softmax\ntable = {'softmax': softmax}", vars(late))
        monkeypatch.setitem(sys.modules, "torch._late", late)
        table = late.table
    assert late.softmax is functional.softmax and table["softmax"] is not functional.softmax
    model.forward = lambda x: table["softmax"](x @ x.mT, dim=-1) @ x
    with watch(model, softmax="(model)") as seen:  # the wrapper of the first watch only calls its original
        assert torch.equal(model(x), functional.softmax(x @ x.mT, dim=-1) @ x)
    assert list(seen.layers) == ["(model)"] and not seen.unseen


def test_tables_that_torch_makes_while_a_watch_runs_hold_its_own_functions() -> None:
    for name in ("get_testing_overrides", "get_ignored_functions", "_get_overridable_functions"):
        getattr(torch.overrides, name).cache_clear()
    with watch(ByHand()):
        torch.overrides.get_testing_overrides()
    overridable = torch.overrides.get_testing_overrides()
    assert {functional.softmax, torch.softmax, functional.scaled_dot_product_attention} <= overridable.keys()


def test_watches_of_several_threads_leave_nothing() -> None:
    original, x = functional.scaled_dot_product_attention, torch.randn(1, 3, 32)

    def use(_: int) -> int:
        model = OwnAttention()
        with watch(model) as seen:
            model(x)
        return seen.rows()[0]["rows"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(12))) == [3] * 12
    assert functional.scaled_dot_product_attention is bound_elsewhere is original and not rebinding.ACTIVE


def test_start_goes_on_with_the_same_numbers() -> None:
    model, x = OwnAttention(), torch.randn(1, 3, 32)
    seen = watch(model).start()
    model(x)
    seen.stop()
    model(x)  # not seen
    seen.start()
    model(x)
    seen.stop()
    assert seen.steps == seen.sampled == 2 and seen.rows()[0]["rows"] == 6


def test_steps_are_sampled_and_told() -> None:
    model, received = OwnAttention(), []
    with watch(model, every=3, on_step=lambda step, rows: received.append((step, rows)), history=2) as seen:
        for _ in range(8):
            model(torch.randn(1, 3, 32))
    assert (seen.steps, seen.sampled) == (8, 3) and [step for step, _ in received] == [0, 3, 6]
    assert seen.rows()[0]["rows"] == 9 and received[0][1][0]["rows"] == 3
    assert seen.history("(model)", "entropy")[0] == [3, 6]  # the last two


def test_the_first_step_of_a_failure_is_right_beyond_the_history() -> None:
    """Steps that nothing has judged yet are judged before the history drops them, of a model called in parts too."""
    model = nn.ModuleDict({"encoder": OwnAttention(), "decoder": OwnAttention()})
    x = torch.randn(2, 6, 32)
    with watch(model, history=3) as seen:
        for step in range(12):
            for part in model.values():
                part(100 * x if step >= 4 else x)
    failing = [verdict for verdict in seen.verdicts() if verdict.failure]
    assert {verdict.layer for verdict in failing} >= {"encoder", "decoder"}
    assert {verdict.first_step for verdict in failing if verdict.sign == "saturated"} == {4}


def test_the_scale_of_each_call_is_known() -> None:
    def scaled(scale: float | None) -> nn.Module:
        return Computes(lambda x: functional.scaled_dot_product_attention(x, x, x, scale=scale))

    model, x = nn.Sequential(*map(scaled, (None, None, 1.0))), 5 * torch.randn(2, 4, 30, 64)
    with watch(model) as seen:
        for part in model:
            part(x)
    assert [seen.layers[name].total["scale_ratio"].tolist() for name in "012"] == [[1.0] * 4] * 2 + [[8.0] * 4]
    ratios = {}
    for name, score in (("attend", ats.ScaledDot(1 / 64)), ("dot", "dot"), ("cosine", "cosine")):
        own = Computes(lambda x, score=score: ats.attend(x, x, x, score=score))
        with watch(own) as seen:
            own(x)
        ratios[name] = seen.layers["(model)"].total["scale_ratio"][0]
    assert ratios["attend"] == 1 / 8 and ratios["dot"] == 8 and np.isnan(ratios["cosine"])


def test_an_error_in_the_model_leaves_the_watch_usable() -> None:
    model = OwnAttention()
    with watch(model) as seen:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 3, 31))
        model(torch.randn(1, 3, 32))
    assert seen.steps == 2 and seen.rows()[0]["rows"] == 3


def test_a_step_that_raises_is_dropped() -> None:
    """Half of the layers have seen it; a module that catches an error of its own part goes on."""
    part, steps = nn.Linear(3, 3), []

    def tries(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            part(x)
        return x

    model = nn.Sequential(OwnAttention(), OwnAttention(), Computes(tries, part=part))
    with watch(model, on_step=lambda step, rows: steps.append(step)) as seen:
        model(torch.randn(1, 3, 32))
        hook = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(1, 5, 32))
        hook.remove()
        model(torch.randn(1, 4, 32))
    assert steps == [0, 2] and (seen.steps, seen.sampled) == (3, 2)
    assert {row["rows"] for row in seen.rows()} == {7}


def test_parts_that_are_called_in_place_of_the_model() -> None:
    """A step begins with the part that was called first, so that every n-th has all of them."""
    model = nn.ModuleDict({"encoder": OwnAttention(), "reader": OwnAttention()})
    with watch(model, every=3) as seen:
        for _ in range(7):
            model["reader"](model["encoder"](torch.randn(1, 3, 32))).sum().backward()
    assert (seen.steps, seen.sampled) == (7, 3)
    assert list(seen.layers) == ["encoder", "encoder #2", "reader", "reader #2"]
    assert {row["rows"] for row in seen.rows()} == {9}
    assert seen.history("reader", "entropy")[0] == [0, 3, 6]


def test_a_watch_may_be_stopped_in_the_middle_of_a_step() -> None:
    model = nn.Sequential(OwnAttention(), OwnAttention())
    seen = watch(model)
    model[1].register_forward_pre_hook(lambda *_: seen.stop())
    with seen:
        model(torch.randn(1, 3, 32))
    assert not seen.layers and not rebinding.ACTIVE
    model[1]._forward_pre_hooks.clear()
    with seen:
        model(torch.randn(1, 3, 32))
    assert len(seen.layers) == 4


def test_a_callback_may_raise_stop_and_ask() -> None:
    model, x = OwnAttention(), torch.randn(1, 3, 32)

    def give_up(step, rows):
        raise ZeroDivisionError(step)

    with watch(model) as other, watch(model, on_step=give_up) as seen:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(x)
    assert seen.sampled == other.sampled == 2 and other.rows()[0]["rows"] == 6
    received = watch(model, on_step=lambda step, rows: (received.stop(), received.verdicts(), received.rows()))
    with received:
        model(x)
        model(x)
    assert received.steps == 1 and not rebinding.ACTIVE


def test_threads_have_steps_of_their_own() -> None:
    """Two threads in the same model and one in another, each waiting inside for the others."""
    together = threading.Barrier(3, timeout=60)

    def meeting() -> nn.Module:
        attention = OwnAttention()

        def forward(x: torch.Tensor) -> torch.Tensor:
            together.wait()
            return attention(x)

        return Computes(forward, attention=attention)

    model, other = meeting(), meeting()
    inputs = [torch.randn(1, length, 32) for length in (3, 5, 7)]
    with torch.no_grad(), watch(model) as seen, watch(other) as others, ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            list(pool.map(lambda pair: pair[0](pair[1]), zip((model, model, other), inputs, strict=True)))
    for found, lengths in ((seen, (3, 5)), (others, (7,))):
        assert list(found.layers) == ["attention", "attention #2"] and not found.unseen
        assert found.steps == found.sampled == 5 * len(lengths)
        assert {row["rows"] for row in found.rows()} == {5 * sum(lengths)}


def test_calls_of_other_models_are_none_of_its_business() -> None:
    model, other = OwnAttention(), OwnAttention()
    with watch(model) as seen:
        other(torch.randn(1, 3, 32))
        functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8))
    assert not seen.layers and not seen.unseen and seen.steps == 0


def test_checkpointing_counts_a_call_once() -> None:
    from torch.utils.checkpoint import checkpoint

    block = OwnAttention()

    model = Computes(lambda x: checkpoint(block, x, use_reentrant=False), block=block)
    x = torch.randn(1, 3, 32)
    seen = watched_run(model, x)
    assert seen.steps == 1 and seen.rows()[0]["rows"] == 3
    for reentrant in (False, True):  # the watched module itself, and a part of a model that is not called
        for watched in (block, nn.ModuleList([block])):
            with watch(watched) as seen:
                for _ in range(2):
                    checkpoint(block, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
            assert seen.steps == 2 and seen.rows()[0]["rows"] == 6


def test_prepared_keys_of_this_library() -> None:
    layer = Computes(lambda x: ats.attend(x, ats.prepare_keys("cosine", x), x))
    x = torch.randn(2, 3, 4)
    seen = watched_run(layer, x)
    assert not seen.unseen and seen.rows()[0]["rows"] == 6
    plain = Computes(lambda x: ats.attend(x, x, x, score="cosine"))
    assert seen.rows()[0] == pytest.approx(watched_run(plain, x).rows()[0], nan_ok=True)


def test_padding_that_a_part_of_the_model_is_called_with() -> None:
    encoder = Computes(
        lambda x, attention_mask: functional.scaled_dot_product_attention(x, x, x, attention_mask[:, None].bool())
    )
    classifier = Computes(lambda x, mask: encoder(x, attention_mask=mask).mean(1), encoder=encoder)
    with watch(classifier) as seen:
        classifier(torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert [(row["rows"], row["padding"]) for row in seen.rows()] == [(6, 0)]


def test_subclasses_and_modes_see_the_functions_that_they_know() -> None:
    known, received = {functional.scaled_dot_product_attention: "sdpa", functional.softmax: "softmax"}, []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            received.append((known.get(func), func is functional.scaled_dot_product_attention))
            return func(*args, **(kwargs or {}))

    model = Computes(lambda x: functional.scaled_dot_product_attention(x, x, x) + functional.softmax(x, dim=-1))
    x = torch.randn(1, 2, 3, 4)
    before = model(x)
    with watch(model) as seen, Mode():
        assert torch.equal(model(x), before)
    assert ("sdpa", True) in received and ("softmax", False) in received and len(seen.rows()) == 2


def test_threads_with_modes_do_not_wait_for_each_other() -> None:
    """Each softmax waits inside for the one of the other thread, as collectives of ranks that are threads do."""
    met, x = threading.Barrier(2), torch.randn(2, 3, 4)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is functional.softmax:
                met.wait(timeout=20)
            return func(*args, **(kwargs or {}))

    def under_a_mode(softmax: Any) -> torch.Tensor:
        with Mode():
            return softmax(x, dim=-1)

    original, expected = functional.softmax, functional.softmax(x, dim=-1)
    with watch(nn.Linear(1, 1)), ThreadPoolExecutor(2) as threads:
        wrapper = functional.softmax
        for _ in range(3):
            assert all(torch.equal(out, expected) for out in threads.map(under_a_mode, [wrapper] * 2))
            assert functional.softmax is wrapper is not original
    assert functional.softmax is original


def test_tracing_by_torch_fx_finds_the_functions_themselves() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                functional.scaled_dot_product_attention(x, x, x) + functional.softmax(x, dim=-1) + torch.softmax(x, -1)
            )

    wanted = {functional.scaled_dot_product_attention, functional.softmax, torch.softmax}
    with watch(model := Both()):
        traced = torch.fx.symbolic_trace(model)
    assert wanted <= {node.target for node in traced.graph.nodes}
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("kind", ["causal_lower_right", "causal_upper_left", "is_causal"])
def test_causal_attention_of_torch_with_more_keys_than_queries(kind: str) -> None:
    from torch.nn.attention import bias

    causal = {"is_causal": True} if kind == "is_causal" else {"attn_mask": getattr(bias, kind)(3, 5)}
    decoding = Computes(lambda query, key: functional.scaled_dot_product_attention(query, key, key, **causal))
    query, key = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4)
    seen = watched_run(decoding, query, key)
    hidden = ~torch.ones(3, 5).tril(2 if kind == "causal_lower_right" else 0).bool()
    assert_rows(seen.rows(), means((query.double() @ key.double().mT / 2).masked_fill(hidden, -torch.inf)))


def test_padding_of_an_encoder_is_not_taken_for_that_of_a_decoder() -> None:
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).train()
    ignored = torch.arange(5) >= torch.tensor([5, 2])[:, None]
    x = torch.randn(2, 5, 16)
    torch.manual_seed(1)
    with watch(model) as seen:
        model(x, x, src_key_padding_mask=ignored)
    rows = {row["layer"]: row["rows"] for row in seen.rows()}
    assert rows == {
        "encoder.layers.0.self_attn": 7, "decoder.layers.0.self_attn": 10, "decoder.layers.0.multihead_attn": 10,
    }  # fmt: skip
    for given in (None, ignored):  # with other lengths it is known which keys are the encoder's
        with watch(model) as seen:
            model(x, x[:, :4], src_key_padding_mask=ignored, memory_key_padding_mask=given)
        assert {name for name, _ in seen.failing()} == ({"decoder.layers.0.multihead_attn"} if given is None else set())


@pytest.mark.parametrize("names", ["left right", "left left", "enc1 enc2"])
def test_padding_of_two_towers(names: str) -> None:
    """Each has a mask of its own; one without may have no padding, unless it reads what the other one returns."""

    class Towers(nn.Module):
        def forward(self, masks: list[torch.Tensor | None], chained: bool) -> None:
            out = None
            for name, mask in zip(names.split(), masks, strict=True):
                x = out if chained and out is not None else torch.randn(2, 5, 16)
                out = getattr(self, name)(x, src_key_padding_mask=mask)

    model = Towers()
    for name in names.split():
        model.add_module(name, nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    first, second = (torch.arange(5) >= torch.tensor(lens)[:, None] for lens in ([5, 2], [3, 4]))
    for masks, chained in (([first, second], False), ([first, None], False), ([first, None], True)):
        with watch(model) as seen:
            model(masks, chained)
        assert len(seen.layers) == 2 and bool(seen.failing()) == chained


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ["two readers", "another sequence", "nested"])
def test_modules_that_read_the_output_of_a_masked_one(kind: str) -> None:
    """Each module that reads nothing else has the same padding; one that reads another sequence too has its own."""
    lens = torch.tensor([5, 2])

    class Reader(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if x.is_nested:
                return x
            mask = mask if mask is None else mask[:, None, None]
            q, kv = (each[:, None] for each in (x, other))
            return torch.nn.functional.scaled_dot_product_attention(q, kv, kv, mask)[:, 0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.left, self.right = Reader(), Reader()

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> None:
            y = self.encoder(x, src_key_padding_mask=torch.arange(5) >= lens[:, None])
            if kind == "two readers":
                self.left(y, y), self.right(y, y)
            elif kind == "another sequence":
                self.left(y, other, torch.arange(5) < lens.flip(0)[:, None])
            else:
                self.left(torch.nested.nested_tensor([x[0], x[1, :2]]), y)

    with watch(model := Model()) as seen:
        model(torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    failing = {layer for layer, *_ in seen.failing()}
    assert failing == ({"left", "right"} if kind == "two readers" else set())


def test_patches_of_an_image_are_no_padding() -> None:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = tower | {"image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=tower | {"vocab_size": 50}, vision_config=vision, projection_dim=8))
    words, real = torch.randint(50, (2, 5)), torch.arange(5) < torch.tensor([5, 3])[:, None]
    with watch(model) as seen:
        model(input_ids=words, pixel_values=torch.randn(2, 3, 8, 8), attention_mask=real.long())
    assert {row["layer"].split("_")[0]: row["rows"] for row in seen.rows()} == {"text": 8, "vision": 10}
    assert not seen.failing()


def test_texts_of_one_word_beside_images_are_no_causal_mask() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))

        def forward(self, text: torch.Tensor, ignored: torch.Tensor, image: torch.Tensor) -> None:
            for tower in self.towers[:2]:
                tower(text, src_key_padding_mask=ignored)
            self.towers[2](image)

    torch.manual_seed(0)
    ignored = torch.arange(6) >= torch.tensor([1, 3, 6, 4])[:, None]
    with watch(Towers()) as seen:
        seen.model(torch.randn(4, 6, 16), ignored, torch.randn(4, 16, 16))
    assert len(seen.layers) == 3 and not seen.failing()


def test_scores_that_are_read_in_parts_show_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Causal(nn.Module):
        is_causal = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.mT
            hidden = torch.ones(7, 7).triu(1).bool() & self.is_causal
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ x

    monkeypatch.setattr(sums_module, "BLOCK", 1)
    model = nn.Sequential(Causal(), Causal(), Causal())
    model[1].is_causal = False
    with watch(model, softmax="*") as seen:
        model(torch.randn(2, 1, 7, 4))
    assert seen.failing() == [("1", 0)] and seen.verdicts()[0].cause == "no causal mask"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_half_precision_and_inference_mode(dtype: torch.dtype) -> None:
    model, x = OwnAttention().to(dtype), torch.randn(2, 9, 32, dtype=dtype)
    with torch.inference_mode():
        assert not watched_run(model, x).unseen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not watched_run(OwnAttention(), x.float()).unseen


# ---------------------------------------------------------------- what cannot be seen is said


class ByHand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_a_softmax_written_by_hand_is_not_seen() -> None:
    model = ByHand()
    with watch(model) as seen:
        model(torch.randn(1, 3, 4))
    assert not seen.layers and seen.steps == 1
    assert "no attention" in str(seen)
    assert [(name, "a softmax of its own" in why) for name, why in seen.unseen] == [("(model)", True)]


def test_weights_of_another_normalizer_are_no_softmax() -> None:
    model = nn.ModuleList(DotProductAttention(normalizer=x) for x in ("softmax", "sigmoid", ats.Entmax(1.2)))
    model.forward = lambda x: [layer(x, x, x) for layer in model]
    with watch(model) as seen:
        model(torch.randn(2, 3, 4))
    assert list(seen.layers) == ["0"]
    assert [*seen.unseen] == [(name, "a normalizer other than the softmax") for name in "12"]


class ByHandWithHeads(nn.Module):
    """Two heads; the scores have three axes, (batch * head, query, key), or four."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes, self.dropout = axes, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        if self.axes == 3:
            heads = heads.flatten(0, 1)
        weights = functional.softmax(heads @ heads.mT, dim=-1)
        return self.dropout(weights @ heads).reshape(x.shape)


@pytest.mark.parametrize(("axes", "named"), [(4, "*.1"), (4, ["*.1"]), (3, {"layers.1": 2})])
def test_a_softmax_by_hand_is_recorded_in_modules_that_are_named(axes: int, named: Any) -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(ByHandWithHeads(4), ByHandWithHeads(axes))})
    x = torch.randn(3, 5, 8)
    with watch(model["layers"][1]) as unnamed:
        model["layers"][1](x)
    assert [name for name, _ in unnamed.unseen] == ["(model)"] and not unnamed.layers
    model.forward = model["layers"].forward
    with watch(model, softmax=named) as seen:
        out = model(x)
    assert torch.equal(out, model(x))
    assert list(seen.layers) == ["layers.1"] and [name for name, _ in seen.unseen] == ["layers.0"]
    inner = model["layers"][0](x).unflatten(-1, (2, -1)).transpose(1, 2)
    expected = ats.attend(inner, inner, inner, score="dot", return_stats=("entropy",))[1].entropy.mean((0, 2))
    assert np.allclose([row["entropy"] for row in seen.rows()], expected, rtol=1e-5)
    assert [row["rows"] for row in seen.rows()] == [15, 15]


def test_a_named_softmax_over_another_axis_is_said() -> None:
    model = Computes(lambda x: (x @ x.mT).softmax(dim=1) @ x)
    with watch(model, softmax="(model)") as seen:
        model(torch.randn(1, 3, 4))
    assert list(seen.unseen) == [("(model)", "a softmax over axis 1 of 3, not over the last")] and not seen.layers


def test_bloom_by_the_names_of_its_attention() -> None:
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(vocab_size=30, hidden_size=16, n_layer=2, n_head=2, use_cache=False)).eval()
    words = torch.randint(30, (2, 7))
    with torch.no_grad(), watch(model, softmax="h.*.self_attention") as seen:
        weights = model(words, output_attentions=True).attentions
    assert not seen.unseen and list(seen.layers) == ["h.0.self_attention", "h.1.self_attention"]
    for layer, p in zip(seen.layers, weights, strict=True):
        assert_layer(seen, layer, p.double(), None)


SOFTMAXES = {
    "functional": lambda x: functional.softmax(x, dim=-1),
    "torch": lambda x: torch.softmax(x, -1),
    "tensor": lambda x: x.softmax(-1),
    "module": nn.Softmax(-1),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_whatever_a_softmax_is_called_by_it_is_said(name: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weights = SOFTMAXES[name](x @ x.mT)
        return functional.softmax(x[0], -1) + functional.scaled_dot_product_attention(x, x, weights @ x)

    seen = watched_run(nn.Sequential(Computes(forward)), torch.randn(2, 5, 4))
    # A softmax over two axes is no attention's; the softmax inside a recorded function belongs to it.
    assert list(seen.layers) == ["0"] and [*seen.unseen.values()] == [1]


def test_rows_that_are_not_numbers_are_a_failure_and_in_no_mean() -> None:
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    broken = x.clone()
    broken[0, 1, 3] = torch.nan
    for options in ({"need_weights": False}, {"need_weights": True}):
        with watch(layer) as seen, torch.no_grad():
            layer(broken, x, x, **options)
        with watch(layer) as whole, torch.no_grad():
            layer(x, x, x, **options)
        assert [(row["rows"], row["nan_rows"], row["empty_rows"]) for row in seen.rows()] == [(9, 1, 0)] * 2
        assert np.isfinite([row["entropy"] for row in seen.rows()]).all() and seen.failing() == [
            ("(model)", h) for h in (0, 1)
        ]
        assert [verdict.sign for verdict in seen.verdicts()] == ["not a number"] * 2
        assert [row["nan_rows"] for row in whole.rows()] == [0, 0]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.slow
def test_compiled_and_scripted_code_is_named_and_still_runs() -> None:
    model, x = OwnAttention().eval(), torch.randn(1, 3, 32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        with watch(model) as seen:
            assert torch.equal(compiled(x), before)
        assert torch.equal(compiled(x), before)
    assert seen.unseen == {("(model)", "compiled code"): 1} and "compiled code" in str(seen)
    torch.compiler.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), watch(model):
        assert torch.equal(whole(x), before)  # compiled while it is watched: no break
    traced = torch.jit.trace(ByHand(), x)
    with watch(traced) as seen:
        traced(x)
    assert list(seen.unseen) == [("(model)", "scripted code")]


@pytest.mark.parametrize(("one_pass", "part"), [(False, "sums_of"), (True, "output_and_sums")])
def test_what_cannot_be_looked_at_does_not_break_the_model(one_pass: bool, part: str, monkeypatch, originals) -> None:
    monkeypatch.setattr(torch_watch, part, lambda *_: 1 / 0)
    model, x = Masked(), torch.randn(1, 2, 3, 8, dtype=torch.float64)
    with watch(model, one_pass=one_pass) as seen:
        found = model(x, x, x)
    assert torch.equal(found, model(x, x, x)) and originals == ["scaled_dot_product_attention"]
    assert not seen.layers and [why for _, why in seen.unseen] == ["ZeroDivisionError: division by zero"]


def test_an_implementation_without_anything_to_see_is_named(sentences) -> None:
    from transformers import AttentionInterface

    def averaging(module, query, key, value, mask, **_):
        return value.mean(2, keepdim=True).expand_as(value).transpose(1, 2), None

    AttentionInterface.register("averaging", averaging)
    model, batch = sentences
    model.set_attn_implementation("averaging")
    with torch.no_grad(), watch(model) as seen:
        model(**batch.inputs)
    assert not seen.layers and len(seen.unseen) == 6 and "averaging" in str(seen)


# ---------------------------------------------------------------- verdicts


def test_a_run_whose_logits_grow_is_noticed() -> None:
    model, x = OwnAttention(), torch.randn(2, 16, 32)
    with watch(model) as seen, torch.no_grad():
        for _ in range(20):
            model(x)
            model.qkv.weight[:8] *= 1.5  # the queries of the first head
    assert seen.failing()[0] == ("(model)", 0) and {head for _, head in seen.failing()} == {0}
    signs = {verdict.sign for verdict in seen.verdicts() if (verdict.layer, verdict.head) == ("(model)", 0)}
    assert {"saturated", "growing logits", "collapsing entropy"} <= signs
    factor = seen.rows()[0]["clip"]
    assert factor == pytest.approx(min(1.0, 100 / seen.rows()[0]["max_logit"]))


# ---------------------------------------------------------------- what comes out


@pytest.fixture(scope="module")
def some():
    torch.manual_seed(0)
    model = nn.Sequential(OwnAttention(), OwnAttention())
    with watch(model) as seen, torch.no_grad():
        for _ in range(8):
            model(torch.randn(2, 8, 32))
            model[1].qkv.weight[8:16] *= 4
    return seen


def test_rows_and_lines_are_plain(some) -> None:
    rows = some.rows()
    assert len(rows) == 16 and all(row.keys() == rows[0].keys() for row in rows)
    assert {type(value) for row in rows for value in row.values()} <= {int, float, str}
    lines = [json.loads(line) for line in some.json_lines()]
    assert len(lines) == 8 * 16 and lines[0]["step"] == 0 and lines[-1]["step"] == 7
    assert lines[0]["padding"] is None and lines[0]["layer"] == "0"
    assert all(list(line) == ["step", *rows[0], "verdicts"] for line in lines)
    assert all(list(row) == ["layer", "head", *records.NUMBERS] for row in (*rows, *some.last()))


def test_every_number_of_the_docs_is_in_every_output(some) -> None:
    text = (Path(__file__).parent.parent / "docs/watching.md").read_text("utf-8").split("## The numbers")[1]
    listed = set(re.findall(r"`(\w+)`", text.split("[Their definitions]")[0]))
    last = len(next(iter(some.layers.values())).steps) - 1
    in_lines = [json.loads(line) for line in some.json_lines(since=last)]
    assert "clip" in listed and listed <= set(records.NUMBERS)
    for row, line in zip(some.last(), in_lines, strict=True):
        assert {name: row[name] for name in listed - {"padding"}} == {name: line[name] for name in listed - {"padding"}}
        values = some.history(row["layer"], "clip")[1][-1]
        assert values[row["head"]] == row["clip"] == min(1.0, some.thresholds.tau / row["max_logit"])


def test_the_last_step_and_a_new_beginning() -> None:
    model, x, received = OwnAttention(), 4 * torch.randn(2, 8, 32), []
    assert watch(model).last() == []
    with watch(model, thresholds=Thresholds(tau=2.0), on_step=lambda step, rows: received.append(rows)) as seen:
        with torch.no_grad():
            model(x)
            model.qkv.weight[:64] *= 0.1  # all queries and keys
            model(x)
        # By their words: NaN is unlike itself.
        assert repr(seen.last()) == repr(received[-1]) != repr(seen.rows()) and len(received[-1]) == 8
        assert all(a["max_logit"] > b["max_logit"] for a, b in zip(seen.rows(), seen.last(), strict=True))
        assert [row["max_logit"] for row in seen.rows()] == [row["max_logit"] for row in received[0]]
        assert {row["clip"] for row in seen.last()} == {1.0} and all(row["clip"] < 1 for row in seen.rows()[:4])
        assert [json.loads(line)["step"] for line in seen.json_lines(since=1)] == [1] * 8
        seen.clear()
        assert seen.rows() == seen.last() == [*seen.json_lines()] == []
        model(x)
    assert seen.steps == 3 and seen.sampled == 1 and repr(seen.rows()) == repr(seen.last()) == repr(received[-1])


def test_tables_and_texts(some) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(some.table())
    printed = console.export_text()
    assert "4 attention calls a step; 8 of 8 steps sampled" in printed and "growing logits" in printed
    assert "\n1, head 1: saturated since step" in str(some) and "    cause: weights of one head too large" in str(some)


def test_a_picture(some) -> None:
    figure = some.plot()
    figure.canvas.draw()
    titles = [axis.get_title() for axis in figure.axes]
    assert {"Largest logit, now", "Entropy, worst step", "Largest logit of each head, by step"} <= set(titles)
    axes = [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]
    (box,) = figure.legends
    lowest = min(axis.get_window_extent().y0 for axis in axes)
    assert box.get_window_extent().y1 < lowest, "the legend covers no curve"
    with pytest.raises(ArgumentError, match="step"):
        watch(OwnAttention()).plot()


def test_a_picture_has_one_scale_per_quantity_and_frames_the_failing_heads(some) -> None:
    from matplotlib.colors import LogNorm

    figure = some.plot()
    maps = [axis for axis in figure.axes if axis.images]
    logit, entropy, saturated, first = maps[:8:2]
    assert [axis.get_title().partition(",")[2] for axis in maps] == [" now", " worst step"] * 4
    assert isinstance(logit.images[0].norm, LogNorm)
    assert saturated.images[0].get_clim() == first.images[0].get_clim() == (0.0, 1.0)
    assert logit.images[0].get_clim() == (1.0, max(100.0, *(row["max_logit"] for row in some.rows())))
    assert entropy.images[0].get_clim()[0] == 0.0

    def darkness(axis: Any, value: float) -> float:
        return float(-axis.images[0].to_rgba(np.array([value]))[0][:3].sum())

    assert darkness(logit, 90.0) > darkness(logit, 2.0) and darkness(saturated, 0.9) > darkness(saturated, 0.1)
    assert darkness(entropy, 0.1) > darkness(entropy, 1.0), "dark is close to collapse in every map"
    for axis in (logit, entropy, saturated, first):
        corners = [patch.get_xy() for patch in axis.patches]
        names = list(some.layers)
        assert corners == [(head - 0.5, names.index(layer) - 0.5) for layer, head in some.failing()]
    lines = [axis for axis in figure.axes if "by step" in axis.get_title()]
    assert [axis.get_yscale() for axis in lines] == ["log", "linear"]
    first_step = min(verdict.first_step for verdict in some.verdicts() if verdict.failure)
    assert all([first_step] * 2 in [[*line.get_xdata()] for line in axis.lines] for axis in lines)
    assert f"{len(some.failing())} of 16 heads fail" in figure.get_suptitle()
    assert all(axis.get_xlabel() for axis in (*maps, *lines))


@pytest.mark.slow
def test_a_picture_of_hostile_names(tmp_path) -> None:
    model = nn.ModuleDict({"_$x^$<b>": OwnAttention(heads=1)})
    failing = Thresholds(saturated_weight=0.15, saturated_rows=0.01, saturated_variance=1e-6)
    with watch(model, thresholds=failing) as seen, torch.no_grad():
        for _ in range(2):
            model["_$x^$<b>"](torch.randn(2, 8, 32))
    figure = seen.plot()
    figure.draw_without_rendering()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "_$x^$<b>, head 0" in labels
    page = seen.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "_$x^$&lt;b&gt;" in page and "<b>" not in page


def test_a_picture_says_nan_and_leaves_out_heads_that_are_not_there() -> None:
    few, many = torch.nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 4)
    model, x = torch.nn.ModuleList([few, many]), torch.randn(5, 1, 8)
    with torch.no_grad(), watch(model) as seen:
        few(x, x, x, need_weights=False)
        many(*[x * torch.nan] * 3, need_weights=False)
    first = seen.plot().axes[0]
    texts = [text.get_text() for text in first.texts]
    assert len(texts) == 6 and texts[2:] == ["NaN"] * 4 and all(np.isfinite(float(text)) for text in texts[:2])
    violet = [patch.get_xy() for patch in first.patches if patch.get_gid() == "nan"]
    assert violet == [(head - 0.5, 0.5) for head in range(4)]


def some_seen() -> Any:
    model = OwnAttention()
    with watch(model) as seen:
        model(torch.randn(1, 3, 32))
    return seen


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: watch("model"), ["model", "Module", "str"]),
        (lambda: watch(ByHand(), every=0), ["every", "0"]),
        (lambda: watch(ByHand(), history=1.5), ["history", "1.5"]),
        (lambda: watch(ByHand(), on_step=5), ["on_step", "(step, rows)", "5"]),
        (lambda: watch(ByHand(), one_pass=1), ["one_pass", "True or False", "1"]),
        (lambda: watch(ByHand(), thresholds=3), ["thresholds", "int"]),
        (
            lambda: watch(ByHand(), softmax="attention"),
            ["softmax: expected names of modules of the model, got 'attention'"],
        ),
        (
            lambda: watch(ByHand(), softmax=3),
            ["softmax: expected names of modules, or a mapping of names to heads, got 3"],
        ),
        (
            lambda: watch(ByHand(), softmax={"(model)": 0}),
            ["softmax['(model)']: expected a whole number of heads above 0, got 0"],
        ),
        (lambda: watch(ByHand()).history("there", "entropy"), ["layer", "there"]),
        (lambda: some_seen().history("(model)", "entropies"), ["name", "max_logit", "entropies"]),
    ],
)
def test_wrong_arguments_are_named(wrong, words) -> None:
    with pytest.raises(ArgumentError) as caught:
        wrong()
    assert all(word in str(caught.value) for word in words), str(caught.value)


MEMORY = """
import torch
from torch.nn import functional
from attnscore.diagnostics.watching.sums import Call, sums_of

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def run(tokens):
    query, key = torch.randn(2, 1, 1, tokens, 8)
    return sums_of(Call(query, key), torch.ones(1, tokens, dtype=bool), 0.99)

run(64)
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
run(20000)
print((memory("VmHWM") - before) / 2**20)
"""


@pytest.mark.slow
def test_memory_is_linear() -> None:
    """20000 x 20000 numbers would be 1600 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 100
