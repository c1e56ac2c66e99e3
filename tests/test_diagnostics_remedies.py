"""Remedies: their lines run as they are printed, on the weights of the head that a verdict names."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import flax
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
from attnscore.diagnostics import qk_clip, reset_heads, watch
from attnscore.diagnostics.watching.remedies import REMEDIES
from attnscore.errors import ArgumentError
from attnscore.layers import flax as flax_layers
from attnscore.layers import torch as torch_layers

WIDTH, HEADS, SIZE = 32, 4, 8
pytestmark = pytest.mark.usefixtures("torch_seed")


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.MultiHeadDotProductAttention(HEADS, name="attention")(x)


def printed_line(seen: Any) -> str:
    """Return the line of code under the first "try:" of a printed watch."""
    words, line, *after = str(seen).split("    try: ")[1].splitlines()
    assert words.endswith(":") and line.startswith(" " * 8) and not "".join(after).startswith(" " * 8)
    return line.strip()


def run_printed_line(seen: Any, **names: Any) -> tuple[float, dict[str, Any]]:
    """Run the printed line; return tau of `qk_clip`, NaN of another line, and the names after it."""
    line = printed_line(seen)
    names |= {"seen": seen, "qk_clip": qk_clip, "reset_heads": reset_heads}
    exec(line, names)
    tau = re.search(r"tau=([\d.]+)", line)
    return float(tau[1]) if tau else math.nan, names


class Attention(nn.Module):
    """Attention of a model of one's own, with separate projections, fewer keys than heads, or one projection."""

    def __init__(
        self, kind: str, *, bias: bool = True, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    ) -> None:
        super().__init__()
        keys = WIDTH // 2 if kind == "grouped" else WIDTH
        sizes = {"qkv": 3 * WIDTH} if kind == "fused" else dict(zip(names, (WIDTH, keys, keys), strict=True))
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(WIDTH, size, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arrays = [layer(x) for layer in self.children()]
        q, k, v = arrays if len(arrays) == 3 else arrays[0].chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (q, k, v))
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
    def __init__(self, score: Any = "scaled_dot") -> None:
        super().__init__()
        self.layer = torch_layers.MultiHeadAttention(WIDTH, HEADS, bias=True, score=score)
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
    model = nn.Sequential(MODULES[name]()).eval()
    x = torch.randn(4, 32, WIDTH)
    with torch.no_grad(), watch(model) as seen:
        for step in range(6):
            if step == 3:
                spoil(model[0], 1, 60.0)
            model(x)
    return model, x, seen


@pytest.mark.parametrize("name", MODULES)
def test_the_printed_line_clips_the_head_and_no_other(name: str) -> None:
    model, x, seen = spoilt_run(name)
    verdict = seen.verdicts()[0]
    assert (verdict.head, verdict.first_step, verdict.cause) == (1, 3, "weights of one head too large")
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    assert printed_line(seen) == verdict.remedy.split(":\n", 1)[1]
    tau, _ = run_printed_line(seen, model=model)
    after = largest(model, x)
    assert tau < 100 and after[1] == pytest.approx(tau, rel=1e-4) and after[1] < before[1] / 2
    assert {head: after[head] for head in (0, 2, 3)} == pytest.approx({head: before[head] for head in (0, 2, 3)})
    with torch.no_grad(), seen:
        for _ in range(3):
            model(x)
    assert not seen.failing() and "No head fails.\nObserved, not failures:\n" in str(seen)


def watched(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad(), watch(model) as seen:
        model(x)
    return seen


def test_a_sampled_step_of_a_watch_scales_a_head_once() -> None:
    model, x = nn.Sequential(Attention("separate")).eval(), torch.randn(4, 32, WIDTH)
    spoil(model[0], 1, 60.0)
    spoil(model[0], 2, 60.0)
    seen = watched(model, x)
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    factors = qk_clip(model, seen, tau=10.0, heads={"0": [1]})
    assert factors == {("0", 1): pytest.approx(10 / before[1])}
    assert [*qk_clip(model, seen, tau=10.0)] == [("0", 2)] and qk_clip(model, seen, tau=10.0) == {}
    assert max(largest(model, x).values()) == pytest.approx(10.0)
    spoil(model[0], 1, 2.0)
    with torch.no_grad(), seen:
        model(x)
    assert qk_clip(model, seen, tau=10.0, heads={"0": [1]}) == {("0", 1): pytest.approx(0.5)}
    seen.clear()
    assert qk_clip(model, seen, heads={"0": [1]}) == {}
    for tau in (20.0, 10.0):  # rows are applied each time
        qk_clip(model, watched(model, x).last(), tau=tau)
    assert max(largest(model, x).values()) <= 10.0 + 1e-4


def test_a_module_that_is_called_twice_is_scaled_for_its_larger_logits() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention("fused")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(3 * x) + self.attention(x)

    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(4, 32, WIDTH)
    spoil(model.attention, 1, 60.0)
    seen = watched(model, x)
    sizes = {row["layer"]: row["max_logit"] for row in seen.last() if row["head"] == 1}
    assert [*sizes] == ["attention", "attention #2"] and min(sizes.values()) > 10
    clip = functools.partial(qk_clip, model, seen, tau=10.0, heads={name: [1] for name in sizes})
    assert clip() == {("attention", 1): pytest.approx(10 / sizes["attention"])} and clip() == {}
    after = {row["layer"]: row["max_logit"] for row in watched(model, x).last() if row["head"] == 1}
    assert after["attention"] == pytest.approx(10.0, rel=1e-4)


def test_unknown_projections_are_an_error_that_says_what_to_write() -> None:
    names = ("first", "second", "third")
    model, x = nn.Sequential(Attention("separate", names=names)).eval(), torch.randn(4, 32, WIDTH)
    model[0].first.weight.data[SIZE : 2 * SIZE] *= 60.0
    seen, weights = watched(model, x), copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError) as caught:
        run_printed_line(seen, model=model)
    assert str(caught.value) == (
        "model: expected projections of 4 heads in '0', named as q_proj, query, W_q, to_q, qkv or in_proj_weight, got "
        "Attention with first (32, 32), second (32, 32), third (32, 32). Hint: say what makes its queries, keys and "
        "values: layers=('first', 'second', 'third')"
    )
    assert all((value == weights[name]).all() for name, value in model.state_dict().items())
    assert [*qk_clip(model, seen, tau=10.0, layers=names)] == [("0", 1)]
    assert largest(model, x)[1] == pytest.approx(10.0, rel=1e-4)
    with pytest.raises(ArgumentError, match="projections of 4 heads in '0'"):
        reset_heads(model, seen, {"0": [1]})
    reset_heads(model, seen, {"0": [1]}, ["value"], layers=names)
    changed = (model[0].third.weight != weights["0.third.weight"]).all(1).nonzero().flatten().tolist()
    assert changed == [*range(SIZE, 2 * SIZE)]
    model[0].q_norm = nn.RMSNorm(SIZE)  # behind a norm the weights' size is lost
    with pytest.raises(
        ArgumentError, match=r"no norm behind the queries of '0', got q_norm.* layer.q_norm.weight \*= 0\.\d+"
    ):
        qk_clip(model, seen.last(), tau=1.0)


@pytest.mark.parametrize(
    ("names", "stack", "hint"),
    [
        (("query_map", "key_map", "value_map", "out_map"), (), r"layers=\('query_map', 'key_map', 'value_map'\)$"),
        (("query", "key", "value", "out"), (3,), r"lines of your own, as layer.key.kernel\[rows\]"),
    ],
)
def test_a_hint_names_queries_keys_and_values(names: tuple[str, ...], stack: tuple[int, ...], hint: str) -> None:
    """Of linen's parameters, which JAX sorts by name; also of a stack of layers that one call under `vmap` uses."""
    params = {name: {"kernel": jnp.ones((*stack, WIDTH, 2, SIZE))} for name in sorted(names)}
    rows = [{"layer": "(model)", "head": head, "max_logit": 200.0, "logit_variance": 1.0} for head in range(2)]
    with pytest.raises(ArgumentError, match=hint):
        qk_clip(params, rows)


def test_a_projection_of_grouped_keys_is_no_fused_one() -> None:
    """Two heads of 16 features with two KV heads each could be as wide; the width of the input decides."""
    layer = nn.Module()
    layer.qkv = nn.Linear(WIDTH, 6 * SIZE)
    rows = [{"layer": "(model)", "head": head, "max_logit": 200.0, "logit_variance": 1.0} for head in range(2)]
    with pytest.raises(
        ArgumentError, match=r"projections of 2 heads in '\(model\)'.*qkv \(48, 32\).*layer.qkv.weight\[rows\]"
    ):
        qk_clip(layer, rows)
    qk_clip(layer, rows, layers=["qkv"])  # whoever says so knows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tau": 0.0}, "tau: expected a finite number above 0"),
        ({"heads": {"layers": [1]}}, r"heads: expected lists of heads by layer, of \['layer'\]"),
        ({"heads": [1]}, "heads: expected lists of heads by layer"),
        ({"heads": {"layer": [4]}}, r"heads\['layer'\]: expected a list of heads from 0 to 3, got \[4\]"),
        ({"heads": {"layer": 1}}, r"heads\['layer'\]: expected a list of heads from 0 to 3, got 1"),
        ({"layers": "qkv"}, "layers: expected three names, or one"),
        ({"rows": None}, "rows: expected a watch, or a list of its rows, got None"),
        ({"rows": [{"layer": "layer"}]}, "rows: expected a watch, or a list of its rows"),
        ({"rows": slice(1, 2)}, r"rows: expected rows of all heads of 'layer', got those of \[1\]"),
        ({"rows": slice(0, 1)}, "rows: expected rows of all 4 heads of 'layer', got 1 of them"),
        ({"model": nn.Linear(2, 2)}, "model: expected a model with 'layer', as in `rows`, got Linear"),
        ({"model": Linen()}, "model: expected .* or the parameters of a flax.linen.Module, got Linen"),
        ({"model": 3}, "model: expected .*, got int"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], words: str) -> None:
    model, x = OfPyTorch().eval(), torch.randn(4, 32, WIDTH)
    spoil(model, 0, 60.0)
    rows = watched(model, x).last()
    arguments = {"model": model, "rows": rows, "tau": 10.0, **options}
    if isinstance(arguments["rows"], slice):
        arguments["rows"] = rows[arguments["rows"]]
    with pytest.raises(ArgumentError, match=words):
        qk_clip(**arguments)


def test_heads_of_a_group_have_their_key_drawn_anew_together() -> None:
    model, x = Attention("grouped").eval(), torch.randn(4, 32, WIDTH)
    seen, before = watched(model, x), copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError, match=r"all heads that share a key with head 1: \[0\] too.*leave 'key' out"):
        reset_heads(model, seen, {"(model)": [1]}, ["query", "key"])
    with pytest.raises(ArgumentError, match="projections: expected one of query, key, value"):
        reset_heads(model, seen, {"(model)": [1]}, ["queries"])
    with pytest.raises(ArgumentError, match="heads: expected lists of heads by layer"):
        reset_heads(model, watch(model), {"(model)": [1]})
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    reset_heads(model, seen, {"(model)": [2, 3]}, ["key"], seed=1)
    changed = {
        name: (value != before[name]).nonzero()[:, 0].unique().tolist() for name, value in model.state_dict().items()
    }
    assert {name: rows for name, rows in changed.items() if rows} == {
        f"k_proj.{name}": [*range(SIZE, 2 * SIZE)] for name in ("weight", "bias")
    }
    drawn = model.k_proj.weight[SIZE:]
    bound = (6 / (WIDTH + SIZE)) ** 0.5
    assert 0.9 * bound < drawn.abs().max() <= bound and model.k_proj.bias[SIZE:].eq(0).all()


def test_a_head_without_a_logit_above_0_is_clipped_by_its_variance() -> None:
    x = torch.randn(4, 32, WIDTH)
    model = Attention("separate").eval()
    spoil(model, 1, 60.0)
    with torch.no_grad():  # a query of 1 and a key of -3000 in one feature: the same for all keys
        for layer, value in ((model.q_proj, 1.0), (model.k_proj, -3000.0)):
            layer.weight[SIZE] = 0
            layer.bias[SIZE] = value
    seen = watched(model, x)
    row = seen.last()[1]
    assert row["max_logit"] < 0 and ("(model)", 1) in seen.failing()
    run_printed_line(seen, model=model)
    after = watched(model, x)
    assert after.last()[1]["logit_variance"] == pytest.approx(9.0, rel=1e-3) and not after.failing()


def scored(score: Any) -> tuple[nn.Module, torch.Tensor]:
    """A model with a score of the library, one of whose heads has a large scale."""
    model, x = OfTheLibrary(score), torch.randn(4, 32, WIDTH)
    with torch.no_grad():
        for name, change in (("log_scale", 3.0), ("log_bandwidth", -3.0), ("w_v", 60.0)):
            if (scale := getattr(model.layer, name, None)) is not None:
                scale[1] = scale[1] * change if name == "w_v" else scale[1] + change
    return model.eval(), x


@pytest.mark.parametrize("score", ["cosine", "gaussian", "additive"])
def test_scores_that_do_not_scale_with_the_weights_are_refused(score: str) -> None:
    model, x = scored(score)
    seen, before = watched(model, x), copy.deepcopy(model.state_dict())
    assert all(math.isnan(row["clip"]) for row in seen.rows())
    for rows in (seen, seen.last()):
        with pytest.raises(ArgumentError, match=r"rows of a score that is q\.k .* in 'layer'") as caught:
            qk_clip(model, rows, tau=5.0, heads={"layer": [1]})
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    with torch.no_grad():
        exec(str(caught.value).split("Hint: change the scale of the score: ")[1], {"layer": model.layer})
    row = watched(model, x).last()[1]
    size = row["max_logit"] if row["max_logit"] > 0 else row["logit_variance"] ** 0.5
    assert size == pytest.approx(5.0, rel=1e-2) and qk_clip(model, seen, tau=1e6) == {}


def test_the_printed_line_bounds_the_scale_of_a_cosine() -> None:
    model, x = scored("cosine")
    seen = watched(model, x)
    assert seen.failing() == [("layer", 1)] and seen.verdicts()[0].cause == "scale of the score too large"
    exec(printed_line(seen), {"layer": model.layer, "math": math})
    assert not watched(model, x).failing()


@pytest.mark.parametrize("score", ["dot", "bilinear", ats.Temperature("dot", 2.0), ats.SoftCap("scaled_dot", 1e4)])
def test_scores_that_scale_with_the_weights_are_clipped(score: Any) -> None:
    model, x = OfTheLibrary(score).eval(), torch.randn(4, 32, WIDTH)
    spoil(model, 1, 60.0)
    assert [*qk_clip(model, watched(model, x), tau=10.0)] == [("layer", 1)]
    assert largest(model, x)[1] == pytest.approx(10.0, rel=1e-3)


def test_the_score_of_a_layer_without_a_scale_is_named_in_words() -> None:
    class Cosine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ats.attend(x, x, x, score=ats.Cosine(200.0))

    model = Cosine()
    with pytest.raises(ArgumentError, match="the scale of the score, as `scale` of Cosine or `bandwidth` of Gaussian"):
        qk_clip(model, watched(model, torch.randn(2, 1, 8, 4)))


def set_weights(kind: str, model: nn.Module, weight: float, bias: float = 0.0) -> None:
    """Set the weights of a part of the head 1 of ``nn.MultiheadAttention`` to numbers."""
    start = {"query": 0, "key": WIDTH, "value": 2 * WIDTH}[kind] + SIZE
    with torch.no_grad():
        for x, value in ((model.layer.in_proj_weight, weight), (model.layer.in_proj_bias, bias)):
            x[start : start + SIZE] = value


@pytest.mark.parametrize("kind", ["query", "key", "value"])
def test_the_printed_line_draws_the_head_anew(kind: str) -> None:
    model, x = OfPyTorch().eval(), torch.randn(4, 32, WIDTH)
    with torch.no_grad(), watch(model) as seen:
        model(x)
        set_weights(kind, model, 0.0, bias=1.0)
        for _ in range(3):
            model(x)
        assert seen.failing() == [("layer", 1)]
        others = copy.deepcopy(model.layer.in_proj_weight)
        run_printed_line(seen, model=model)
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


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("kind", ["biases", "no biases", "separate"])
def test_the_printed_line_changes_an_nnx_model(kind: str) -> None:
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
    before = {row["head"]: row["max_logit"] for row in seen.last()}
    tau, _ = run_printed_line(seen, model=model)
    after = largest(model, X)
    assert after[1] == pytest.approx(tau, rel=1e-3) and tau < before[1] / 2
    assert {head: after[head] for head in (0, 2, 3)} == pytest.approx({head: before[head] for head in (0, 2, 3)})
    kernel[...] = kernel[...].at[index].set(0.0)
    if kind != "no biases":
        (layer.q if kind == "separate" else layer.query).bias[...] *= 0
    with watch(model) as seen:
        for _ in range(3):
            model(X)
    assert seen.failing() == [(seen.verdicts()[0].layer, 1)]
    run_printed_line(seen, model=model)
    with watch(model) as seen:
        model(X)
    assert not seen.failing() and float(jnp.abs(kernel[...][index]).min()) > 0


class Scanned(nnx.Module):
    """Three layers in one loop, whose parameters have one more axis in front; each is called `calls` times."""

    def __init__(self, kind: str, calls: int) -> None:
        self.calls = calls
        self.blocks = nnx.vmap(Separate if kind == "separate" else lambda rngs: nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, rngs=rngs
        ))(nnx.Rngs(0).split(3))  # fmt: skip

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block: Any, x: Any) -> Any:
            return x + sum(block(x / call) for call in range(1, self.calls + 1))

        return forward(self.blocks, x)


class ScannedLinen(linen.Module):
    """The same of linen, which traces the body of a loop twice."""

    calls: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        class Block(linen.Module):
            @linen.compact
            def __call__(block, x: Any, _: Any) -> Any:  # `self` is the model
                layer = linen.MultiHeadDotProductAttention(HEADS, name="attention")
                return x + sum(layer(x / call) for call in range(1, self.calls + 1)), None

        scan = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(name="blocks")(x, None)[0]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", ["linen", "nnx", "separate"])
def test_the_printed_line_changes_one_layer_of_a_loop(kind: str, calls: int) -> None:
    model = ScannedLinen(calls) if kind == "linen" else Scanned(kind, calls)
    params = model.init(jax.random.key(0), X)["params"] if kind == "linen" else None

    def arrays() -> dict[str, np.ndarray]:
        leaves = jax.tree.leaves_with_path(params or nnx.state(model))
        return {jax.tree_util.keystr(path): np.array(x).reshape(3, -1, HEADS, SIZE) for path, x in leaves}

    def rows() -> dict[str, float]:
        with watch(model) as seen:
            model.apply({"params": params}, X) if params else model(X)
        assert {*seen.layers} == {name, *(f"{name} #{number}" for number in range(2, 3 * calls + 1))}
        return {row["layer"]: row["max_logit"] for row in seen.rows() if row["head"] == 1}

    name = "blocks.attention" if kind == "linen" else "blocks"
    if kind == "linen":
        query = params["blocks"]["attention"]["query"]
        query["kernel"] = query["kernel"].at[1, :, 1].multiply(60)
    else:
        kernel = (model.blocks.q if kind == "separate" else model.blocks.query).kernel
        kernel[...] = kernel[...].reshape(3, WIDTH, HEADS, SIZE).at[1, :, 1].multiply(60).reshape(kernel.shape)
    with watch(model) as seen:
        for _ in range(3):
            model.apply({"params": params}, X) if params else model(X)
    verdict, before, sizes = seen.verdicts()[0], arrays(), rows()
    assert verdict.layer in [f"{name} #{number}" for number in ([2] if calls == 1 else [3, 4])] and verdict.head == 1
    assert calls == 1 or sizes[f"{name} #3"] > 2 * sizes[f"{name} #4"], "of half the input, in the order of the code"
    tau, names = run_printed_line(seen, params=params) if params else run_printed_line(seen, model=model)
    params = names.get("params")
    after = rows()
    assert after[verdict.layer] == pytest.approx(tau, rel=1e-3) and tau < sizes[verdict.layer] / 2
    for path, array in arrays().items():
        is_changed = (array != before[path]).any((1, 3))
        may_change = "query" in path or "key" in path or "q" in path.split("'") or "k" in path.split("'")
        assert not np.delete(is_changed.ravel(), HEADS + 1).any(), path
        assert is_changed[1, 1] == (may_change and bool(before[path][1, :, 1].any())), path


def largest_of_linen(model: Linen, params: Any) -> dict[int, float]:
    with watch(model) as seen:
        model.apply({"params": params}, X)
    return {row["head"]: row["max_logit"] for row in seen.last()}


def test_the_printed_line_gives_new_parameters_of_a_linen_model() -> None:
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
    tau, names = run_printed_line(seen, params=params)
    new = names["params"]
    assert jax.tree.structure(new) == jax.tree.structure(params) and new is not params
    now = [largest_of_linen(model, each) for each in (params, new)]
    assert now[0] == pytest.approx(before, rel=1e-5), "the parameters that came are as they were"
    assert now[1][1] == pytest.approx(tau, rel=1e-3) and tau < before[1] / 2 and now[1][0] == pytest.approx(before[0])
    frozen = qk_clip(flax.core.freeze(params), seen.last(), tau=tau)
    assert isinstance(frozen, flax.core.FrozenDict) and largest_of_linen(model, frozen) == pytest.approx(now[1])
    new = reset_heads(params, seen, {"attention": [1]}, ["query", "key", "value"])
    for name, part in params["attention"].items():
        changed = (new["attention"][name]["kernel"] != part["kernel"]).any((0, 2))
        assert changed.tolist() == [head == 1 and name != "out" for head in range(len(changed))]


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
        "rate": rate, "x": x, "ids": ids, "real": ids != 0, "q": q, "k": k, "v": v, "mask": ids != 0, "device": "cpu",
        "attention": nn.Identity(), "norm": nn.Identity(), "attend": ats.attend, "SoftCap": ats.SoftCap,
        "sink": torch.zeros(2), "math": math, "layer": torch_layers.MultiHeadAttention(8, 2, score="cosine"),
    }  # fmt: skip


def names_of_flax() -> dict[str, Any]:
    q = jnp.ones((1, 3, 2, 4))
    ids = jnp.array([[1, 2, 0]])
    x = jnp.ones((1, 3, 8))
    heads_first = {"q": q, "k": q, "v": q}
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    return {
        "jax": jax, "jnp": jnp, "nnx": nnx, "optax": optax, "rate": 0.1, **heads_first, "ids": ids, "real": ids != 0,
        "mask": (ids != 0)[:, None, None], "x": x, "attention": attention, "norm": lambda x: x,
        "attend": ats.attend, "SoftCap": ats.SoftCap, "sink": jnp.zeros(3), "math": math,
        "layer": flax_layers.MultiHeadAttention(8, 2, score="cosine", rngs=nnx.Rngs(0)),
    }  # fmt: skip


@pytest.mark.parametrize("cause", [cause for cause, remedy in REMEDIES.items() if "{heads}" not in remedy.torch])
def test_every_other_line_runs(cause: str) -> None:
    remedy = REMEDIES[cause]
    exec(remedy.torch.format(tau=10.0), names_of_torch())
    exec((remedy.flax or remedy.torch).format(tau=10.0), names_of_flax())


def test_a_line_for_flax_has_one_for_keras() -> None:
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
        def __call__(self, x: Any, pad: Any = None, padding_mask: Any = None, mask: Any = None) -> Any:
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
    # In masked modelling it marks the tokens that are hidden.
    with watch(model) as seen:
        call(model, X, None, None, pad)
    assert seen.unchecked_padding == "mask" and not seen.failing()
    assert "looks like its mask; if it is, call it attention_mask or padding_mask or input_mask (1 at tok" in str(seen)


def test_a_run_after_a_checkpoint_is_judged_anew_once_it_is_cleared() -> None:
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
