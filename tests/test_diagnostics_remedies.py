"""Remedies: their lines run as they are printed, on the weights of the head that a verdict names."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from torch import nn
from torch.nn import functional

import attnscore as ats
from attnscore.diagnostics import Thresholds, watch
from attnscore.diagnostics.watching.remedies import REMEDIES, Projections
from attnscore.layers import torch as torch_layers

WIDTH, HEADS, SIZE = 32, 4, 8


def printed_lines(seen: Any) -> str:
    """Return the lines of code under the first "try:" of a printed watch."""
    lines = str(seen).split("    try: ")[1].splitlines()[1:]
    code = []
    for line in lines:
        if not line.startswith(" " * 8):
            break
        code.append(line)
    return textwrap.dedent("\n".join(code))


class Attention(nn.Module):
    """Attention of a model of one's own, with separate projections, fewer keys than heads, or one projection."""

    def __init__(self, kind: str, *, bias: bool = True) -> None:
        super().__init__()
        keys = WIDTH // 2 if kind == "grouped" else WIDTH
        if kind == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        else:
            self.q_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys, bias=bias) for _ in "kv")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arrays = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in arrays)
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)


class OfPyTorch(nn.Module):
    """``nn.MultiheadAttention``, with one projection or, of keys of another width, with three."""

    def __init__(self, *, bias: bool = True, apart: bool = False) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True, kdim=24 if apart else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = x[..., : self.layer.kdim]
        return self.layer(x, keys, x, need_weights=False)[0]


class OfTheLibrary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch_layers.MultiHeadAttention(WIDTH, HEADS, bias=True)
        self.layer(*[torch.ones(1, 2, WIDTH)] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)


def conv1d() -> nn.Module:
    """The attention of GPT-2, whose one projection has its features in columns."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_pdrop=0.0, attn_implementation="sdpa")
            self.layer = GPT2Attention(config, layer_idx=0)
            nn.init.normal_(self.layer.c_attn.weight, std=0.15)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    return Model()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: Attention("separate"),
    "separate, no biases": lambda: Attention("separate", bias=False),
    "grouped": lambda: Attention("grouped"),
    "fused": lambda: Attention("fused"),
    "fused, no biases": lambda: Attention("fused", bias=False),
    "nn.MultiheadAttention": OfPyTorch,
    "nn.MultiheadAttention, no biases": lambda: OfPyTorch(bias=False),
    "nn.MultiheadAttention, keys of another width": lambda: OfPyTorch(apart=True),
    "the library's": OfTheLibrary,
    "GPT-2's": conv1d,
}


def spoil(module: Any, head: int, factor: float) -> None:
    """Multiply the queries of a head, written anew for each kind of module and without the code under test."""
    inner = getattr(module, "layer", module)
    rows = slice(SIZE * head, SIZE * head + SIZE)
    with torch.no_grad():
        if hasattr(inner, "c_attn"):
            inner.c_attn.weight[:, rows] *= factor
            inner.c_attn.bias[rows] *= factor
            return
        names = ("in_proj_weight", "in_proj_bias", "q_proj_weight")
        arrays = [x for name in names if (x := getattr(inner, name, None)) is not None]
        for name in ("qkv", "q_proj", "W_q"):
            arrays += [*getattr(inner, name).parameters()] if hasattr(inner, name) else []
        for x in arrays:
            x[rows] *= factor


def largest(model: Callable[[Any], Any], x: Any) -> dict[int, float]:
    with watch(model) as seen:
        model(x)
    return {row["head"]: row["max_logit"] for row in seen.rows() if row["layer"] in next(iter(seen.layers))}


def spoilt_run(name: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(MODULES[name]()).eval()
    x = torch.randn(4, 32, WIDTH)
    with torch.no_grad(), watch(model) as seen:
        for step in range(6):
            if step == 3:
                spoil(model[0], 1, 60.0)
            model(x)
    return model, x, seen


@pytest.mark.parametrize("name", MODULES)
def test_the_printed_lines_clip_the_head_and_no_other(name: str) -> None:
    model, x, seen = spoilt_run(name)
    verdict = seen.verdicts()[0]
    assert (verdict.head, verdict.first_step, verdict.cause) == (1, 3, "weights of one head too large")
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    lines = printed_lines(seen)
    assert lines == verdict.remedy.split(":\n", 1)[1] and "..." not in lines
    bound = float(lines.split('row["max_logit"] > ')[1].split(":")[0])
    assert bound < 100 and f"Thresholds(tau={bound})" in verdict.remedy
    exec(lines, {"model": model, "seen": seen})
    after = largest(model, x)
    # `bound` is printed with few digits, and the logits are not above it.
    assert after[1] == pytest.approx(bound, rel=1e-4) and after[1] < before[1] / 2
    assert {head: after[head] for head in (0, 2, 3)} == pytest.approx({head: before[head] for head in (0, 2, 3)})
    with torch.no_grad(), seen:
        for _ in range(3):
            model(x)
    assert not seen.failing() and "No head fails.\nObserved, not failures:\n" in str(seen)


def test_the_lines_of_a_model_with_other_names_say_what_to_put_in() -> None:
    class Own(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first, self.second, self.third = self.q_proj, self.k_proj, self.v_proj
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Own("separate"), torch.randn(4, 32, WIDTH)
    model.q_norm = nn.Identity()  # behind a norm the weights' size is lost
    spoil(model, 1, 60.0)
    with torch.no_grad(), watch(model) as seen:
        model(x)
    lines = printed_lines(seen)
    assert lines.startswith("attention = ...  # this layer's module") and "attention.W_q.weight.data" in lines
    compile(lines, "remedy", "exec")


def test_a_head_without_a_logit_above_0_is_clipped_by_its_variance() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32, WIDTH)
    model = Attention("separate").eval()
    spoil(model, 1, 60.0)
    with torch.no_grad():  # a query of 1 and a key of -3000 in one feature: the same for all keys
        for layer, value in ((model.q_proj, 1.0), (model.k_proj, -3000.0)):
            layer.weight[SIZE] = 0
            layer.bias[SIZE] = value
    with torch.no_grad(), watch(model) as seen:
        model(x)
    row = seen.last()[1]
    assert row["max_logit"] < 0 and ("(model)", 1) in seen.failing()
    exec(printed_lines(seen), {"model": model, "seen": seen})
    with torch.no_grad(), watch(model) as after:
        model(x)
    assert after.last()[1]["logit_variance"] == pytest.approx(9.0, rel=1e-3) and not after.failing()


def set_weights(kind: str, model: nn.Module, weight: float, bias: float = 0.0) -> None:
    """Set the weights of a part of the head 1 of ``nn.MultiheadAttention`` to numbers."""
    start = {"query": 0, "key": WIDTH, "value": 2 * WIDTH}[kind] + SIZE
    with torch.no_grad():
        for x, value in ((model.layer.in_proj_weight, weight), (model.layer.in_proj_bias, bias)):
            x[start : start + SIZE] = value


@pytest.mark.parametrize("kind", ["query", "key", "value"])
def test_the_printed_lines_initialise_the_head_anew(kind: str) -> None:
    torch.manual_seed(0)
    model, x = OfPyTorch().eval(), torch.randn(4, 32, WIDTH)
    with torch.no_grad(), watch(model) as seen:
        model(x)
        set_weights(kind, model, 0.0, bias=1.0)
        for _ in range(3):
            model(x)
        assert seen.failing() == [("layer", 1)]
        others = copy.deepcopy(model.layer.in_proj_weight)
        exec(printed_lines(seen), {"model": model, "torch": torch})
        for _ in range(3):
            model(x)
    changed = (model.layer.in_proj_weight != others).any(1).nonzero().flatten().tolist()
    parts = {"query": [0], "key": [0, 1], "value": [2]}[kind]
    assert changed == [WIDTH * part + SIZE + row for part in parts for row in range(SIZE)] and not seen.failing()


# ---------------------------------------------------------------- Flax


class Separate(nnx.Module):
    """Separate layers, whose kernels have heads and features in one axis."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, use_bias=name != "k", rngs=rngs) for name in "qkv")

    def __call__(self, x: Any) -> Any:
        q, k, v = (layer(x).reshape(*x.shape[:-1], HEADS, SIZE) for layer in (self.q, self.k, self.v))
        return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


class Flax(nnx.Module):
    def __init__(self, kind: str) -> None:
        rngs = nnx.Rngs(0)
        is_own = kind == "separate"
        layer = Separate(rngs) if is_own else nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, use_bias=kind == "biases", rngs=rngs
        )  # fmt: skip
        self.blocks = nnx.List([layer])

    def __call__(self, x: Any) -> Any:
        return self.blocks[0](x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.MultiHeadDotProductAttention(HEADS, name="attention")(x)


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("kind", ["biases", "no biases", "separate"])
def test_the_printed_lines_change_an_nnx_model(kind: str) -> None:
    model = Flax(kind)
    layer = model.blocks[0]
    kernel = (layer.q if kind == "separate" else layer.query).kernel
    index = (..., slice(SIZE, 2 * SIZE)) if kind == "separate" else (..., 1, slice(None))

    with watch(model) as seen:
        for step in range(6):
            if step == 3:
                kernel[...] = kernel[...].at[index].multiply(60)
            model(X)
    verdict = seen.verdicts()[0]
    assert (verdict.head, verdict.cause) == (1, "weights of one head too large")
    lines, before = printed_lines(seen), {row["head"]: row["max_logit"] for row in seen.last()}
    assert lines.startswith("attention = model.blocks[0]\n") and "torch" not in lines
    exec(lines, {"model": model, "seen": seen})
    after = largest(model, X)
    bound = float(lines.split('row["max_logit"] > ')[1].split(":")[0])
    assert after[1] == pytest.approx(bound, rel=1e-3) and bound < before[1] / 2
    assert {head: after[head] for head in (0, 2, 3)} == pytest.approx({head: before[head] for head in (0, 2, 3)})
    kernel[...] = kernel[...].at[index].set(0.0)
    if kind != "no biases":
        (layer.q if kind == "separate" else layer.query).bias[...] *= 0
    with watch(model) as seen:
        for _ in range(3):
            model(X)
    assert seen.failing() == [(seen.verdicts()[0].layer, 1)]
    exec(printed_lines(seen), {"model": model, "jax": jax})
    with watch(model) as seen:
        model(X)
    assert not seen.failing() and float(jnp.abs(kernel[...][index]).min()) > 0


def test_the_printed_lines_change_the_parameters_of_a_linen_model() -> None:
    model = Linen()
    variables = model.init(jax.random.key(0), X)
    params = variables["params"]
    with watch(model) as seen:
        for step in range(6):
            if step == 3:
                query = params["attention"]["query"]
                query["kernel"] = query["kernel"].at[:, 1].multiply(60)
            model.apply(variables, X)
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    lines = printed_lines(seen)
    exec(lines, {"params": params, "seen": seen})
    bound = float(lines.split('row["max_logit"] > ')[1].split(":")[0])
    with watch(model) as after:
        model.apply(variables, X)
    now = {row["head"]: row["max_logit"] for row in after.last()}
    assert now[1] == pytest.approx(bound, rel=1e-3) and bound < before[1] / 2 and now[0] == pytest.approx(before[0])


# ---------------------------------------------------------------- all lines of the table


def names_of_torch() -> dict[str, Any]:
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    rate = 0.1
    ids = torch.tensor([[1, 2, 0]])
    x = torch.randn(1, 3, 8)
    model(x).sum().backward()
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    return {
        "torch": torch, "F": functional, "model": model, "optimizer": torch.optim.SGD(model.parameters(), rate),
        "rate": rate, "x": x, "ids": ids, "pad": 0, "q": q, "k": k, "v": v, "mask": ids != 0, "device": "cpu",
        "attention": nn.Identity(), "norm": nn.Identity(), "attend": ats.attend, "SoftCap": ats.SoftCap,
        "sink": torch.zeros(2),
    }  # fmt: skip


def names_of_flax() -> dict[str, Any]:
    q = jnp.ones((1, 3, 2, 4))
    ids = jnp.array([[1, 2, 0]])
    x = jnp.ones((1, 3, 8))
    heads_first = {"q": q, "k": q, "v": q}
    return {
        "jax": jax, "jnp": jnp, "optax": optax, "rate": 0.1, **heads_first, "ids": ids, "pad": 0,
        "mask": (ids != 0)[:, None, None], "x": x, "attention": lambda x: x, "norm": lambda x: x,
        "attend": ats.attend, "SoftCap": ats.SoftCap, "sink": jnp.zeros(3),
    }  # fmt: skip


@pytest.mark.parametrize("cause", [cause for cause, remedy in REMEDIES.items() if remedy.torch])
def test_every_other_line_runs(cause: str) -> None:
    remedy = REMEDIES[cause]
    exec(remedy.torch, names_of_torch())
    exec(remedy.flax or remedy.torch, names_of_flax())


def test_every_cause_has_lines() -> None:
    assert all(bool(remedy.torch) + remedy.clips + bool(remedy.renews) == 1 for remedy in REMEDIES.values())
    assert not any(remedy.flax and not remedy.keras for remedy in REMEDIES.values())


# ---------------------------------------------------------------- what else is said


def test_a_mask_by_another_name_is_said_and_one_by_position_is_known() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: torch.Tensor, pad: Any = None, attention_mask: Any = None) -> torch.Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Padded().eval(), torch.randn(2, 5, WIDTH)
    pad = torch.arange(5) >= torch.tensor([[3], [5]])
    for arguments, options in (
        ((x, pad), {}),
        ((x, pad.float()), {}),
        ((x,), {"pad": pad}),
        ((x,), {"pad": pad.float()}),
    ):
        with torch.no_grad(), watch(model) as seen:
            for _ in range(3):
                model(*arguments, **options)
        assert seen.unchecked_padding == "pad" and str(seen).count("Padding was not checked") == 1
        assert "'pad'" in str(seen) and "attention_mask" in str(seen) and "src_key_padding_mask" in str(seen)
    for arguments, options in (((x, None, ~pad), {}), ((x,), {"attention_mask": ~pad}), ((x,), {})):
        with torch.no_grad(), watch(model) as seen:
            model(*arguments, **options)
        assert seen.unchecked_padding is None and "Padding" not in str(seen)
        assert bool(seen.failing()) == (len(arguments) + len(options) > 1)


def test_a_mask_by_another_name_is_said_of_a_flax_model() -> None:
    class Padded(Flax):
        def __call__(self, x: Any, pad: Any = None, mask: Any = None) -> Any:
            return super().__call__(x)

    model = Padded("biases")
    pad = jnp.arange(32) >= jnp.full((4, 1), 30)
    call = nnx.jit(lambda model, *arguments: model(*arguments))
    with watch(model) as seen:
        call(model, X, pad)
    assert seen.unchecked_padding == "pad" and "'pad'" in str(seen) and "padding_mask" in str(seen)
    with watch(model) as seen:
        call(model, X, pad, ~pad)
    assert seen.unchecked_padding is None and len(seen.failing()) == HEADS


def test_a_run_after_a_checkpoint_is_judged_anew_once_it_is_cleared() -> None:
    torch.manual_seed(0)
    model, x = OfPyTorch().eval(), torch.randn(4, 32, WIDTH)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad(), watch(model) as seen:
        for _ in range(3):
            model(x)
        set_weights("query", model, torch.nan)
        model(x)
        seen.record_loss(float("nan"))
        assert seen.failing() == [("layer", 1)] and "checkpoint from before step 3" in str(seen)
        model.load_state_dict(saved)
        model(x)
        assert seen.failing() == [("layer", 1)], "a failure of the weights that are gone"
        seen.clear()
        assert seen.failing() == []
        model(x)
        assert seen.failing() == [] and str(seen).endswith("No head fails.") and seen.steps == 6
        spoil(model, 1, 60.0)
        model(x)
        model(x)
        assert seen.failing() == [("layer", 1)] and seen.verdicts()[0].first_step == 6


def test_projections_of_several_calls_and_of_the_model_itself() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS)
    seen = watch(layer)
    found = seen._projections("(model) #2", HEADS)
    assert isinstance(found, Projections) and found.module == "model" and found.size == SIZE
    named = watch(nn.ModuleDict({"a b": layer, "plain": layer}))
    assert named._projections("plain", HEADS).module == "model.plain"
    assert named._projections("a.b.c", HEADS) is None and seen._projections("gone", HEADS) is None
    assert Thresholds().tau == 100
