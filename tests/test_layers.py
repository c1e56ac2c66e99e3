"""Every PyTorch layer: its definition, masks, gradients, serialisation, modes, and what users do with it."""

from __future__ import annotations

import copy
import doctest
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import attnscore as ats
from attnscore.layers import torch as layers
from attnscore.layers.torch import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
    MultiHeadAttention,
)
from constructor_cases import check_textbook_numbers
from layer_cases import BATCH, KEYS, LAYERS, MASKS, QUERIES, VALUE_SIZE, Case, close, every_layer, every_mask

pytestmark = pytest.mark.usefixtures("torch_seed")

# Compiling takes seconds: the others are marked slow.
QUICK = ("scaled dot", "heads, additive")


@every_layer
@every_mask
def test_layer_is_its_definition(case: Case, mask: str) -> None:
    layer, inputs = case.make().double(), case.inputs()
    given, visible = MASKS[mask]
    out, weights = case.plain(layer, *inputs, visible)
    close(layer(*inputs, **given), out)
    close(layer.attention_weights, weights)
    assert layer.attention_weights.shape == case.weights_shape
    assert not layer.attention_weights.requires_grad


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_is_accurate_in_its_dtype(case: Case, dtype: torch.dtype) -> None:
    layer = case.make().to(dtype)
    inputs = case.inputs(dtype)
    given, visible = MASKS["lens (batch,)"]
    exact, exact_weights = case.plain(copy.deepcopy(layer).double(), *(x.double() for x in inputs), visible)
    plain, plain_weights = case.plain(layer, *inputs, visible)
    out, weights = layer(*inputs, **given), None
    weights = layer.attention_weights
    assert out.dtype == weights.dtype == dtype
    for got, usual, wanted in ((out, plain, exact), (weights, plain_weights, exact_weights)):
        floor = 8 * torch.finfo(dtype).eps * wanted.abs().max()
        assert (got - wanted).abs().max() <= torch.maximum(2 * (usual - wanted).abs().max(), floor)


@every_layer
@pytest.mark.parametrize("mask", ["none", "composed, and lens"])
def test_gradients(case: Case, mask: str) -> None:
    layer = case.make().double()
    names, parameters = [name for name, _ in layer.named_parameters()], list(layer.parameters())
    inputs = [x.requires_grad_() for x in case.inputs()]

    def function(*tensors: Tensor) -> Tensor:
        own = dict(zip(names, tensors[3:], strict=True))
        return torch.func.functional_call(layer, own, tensors[:3], MASKS[mask][0])

    assert torch.autograd.gradcheck(function, (*inputs, *parameters), fast_mode=True)


@every_layer
def test_what_is_hidden_reaches_nothing(case: Case) -> None:
    """NaN and infinity in padding, and in a query that sees nothing: same output, same gradients, finite."""
    layer = case.make().double()
    lens = torch.tensor([[2, 0, 3], [4, 4, 0]])

    def run(with_nonfinite: bool) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = case.inputs()
        if with_nonfinite:
            inputs[0][0, 1, 0], inputs[0][1, 2] = torch.nan, torch.inf
            inputs[1][0, 3:], inputs[1][1, 4:, 0] = torch.nan, torch.inf
            inputs[2][0, 3:, 0], inputs[2][1, 4:] = torch.inf, torch.nan
        layer.zero_grad()
        out = layer(*(x.requires_grad_() for x in inputs), lens)
        out.sum().backward()
        found = {name: x.grad for name, x in layer.named_parameters()}
        return out, found | {str(i): x.grad for i, x in enumerate(inputs)}

    out, grads = run(with_nonfinite=True)
    clean_out, clean_grads = run(with_nonfinite=False)
    close(out, clean_out)
    close(grads, clean_grads)
    empty = out[0, 1] - (
        layer.W_o.bias if getattr(layer, "W_o", None) is not None and layer.W_o.bias is not None else 0
    )
    assert not empty.any()
    assert not grads["0"][0, 1].any()
    assert not layer.attention_weights[..., 1, :][0].any()


@every_layer
@pytest.mark.parametrize("queries, keys, batch", [(0, 5, 2), (3, 0, 2), (3, 5, 0)])
def test_empty_axes(case: Case, queries: int, keys: int, batch: int) -> None:
    q, k, v = case.inputs(torch.float32)
    layer = case.make()
    out = layer(q[:batch, :queries], k[:batch, :keys], v[:batch, :keys])
    assert out.shape == (batch, queries, layer(q, k, v).shape[-1])
    assert out.isfinite().all()


@every_layer
def test_one_memory_for_a_batch_of_queries(case: Case) -> None:
    layer, (q, k, v) = case.make().double(), case.inputs()
    close(layer(q, k[:1], v[:1], [3]), layer(q, k[:1].repeat(2, 1, 1), v[:1].repeat(2, 1, 1), [3, 3]))


@every_layer
def test_queries_of_batch_one_for_a_batch_of_keys(case: Case) -> None:
    layer, (q, k, v) = case.make().double(), case.inputs()
    given, _ = MASKS["array (batch, query, key)"]
    close(layer(q[:1], k, v, **given), layer(q[:1].repeat(2, 1, 1), k, v, **given))


def test_numbers_of_the_textbook() -> None:
    check_textbook_numbers(layers, torch.from_numpy)
    x = torch.ones(2, 4, 100)
    y = torch.ones(2, 6, 100)
    assert MultiHeadAttention(100, 5, 0.5)(x, y, y, torch.tensor([3, 2])).shape == (2, 4, 100)


@every_layer
def test_dropout_acts_in_training_alone(case: Case) -> None:
    layer, inputs = case.make(dropout=0.5), case.inputs(torch.float32)
    first, second = layer(*inputs), layer(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    seeded = layer(*inputs)
    torch.manual_seed(1)
    assert torch.equal(layer(*inputs), seeded)
    close(layer.attention_weights, case.plain(layer, *inputs, None)[1], torch.float32)
    out = layer.eval()(*inputs)
    assert torch.equal(layer(*inputs), out)
    close(out, case.plain(layer, *inputs, None)[0], torch.float32)


def rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Turn neighbouring features by angles that grow with the position; a last odd one stays."""

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[..., None, None] / torch.arange(1, half + 1, dtype=x.dtype)
        a, b = x[..., :half], x[..., half : 2 * half]
        turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), x[..., 2 * half :])
        return torch.cat(turned, -1)

    return turned(q), turned(k)


@every_layer
@pytest.mark.slow_rows("*entmax", "*sparsemax")
def test_shapes_on_the_meta_device(case: Case) -> None:
    """Of the output and of the weights, of calls with lengths; the device has no autocast to ask for."""
    layer = case.make().to("meta")
    inputs = [x.to("meta") for x in case.inputs(torch.float32)]
    for _ in range(2):
        out = layer(*inputs, torch.ones(BATCH, dtype=torch.int64, device="meta"))
        assert (out.device.type, out.shape[:2]) == ("meta", (BATCH, QUERIES))
    assert layer.attention_weights.shape == case.weights_shape


WITHOUT_HEADS = [case for case in LAYERS if not case.head_count and case.make().normalizer == "softmax"]


@pytest.mark.parametrize("case", WITHOUT_HEADS, ids=lambda case: case.name)
def test_a_bias_is_added_to_the_scores(case: Case) -> None:
    layer, (q, k, v) = case.make().double(), (x.requires_grad_() for x in case.inputs())
    bias = torch.randn(BATCH, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    _, weights = case.plain(layer, q, k, v, MASKS["none"][1])
    wanted = torch.softmax(weights.log() + bias, -1)
    out = layer(q, k, v, bias=bias)
    close(out, wanted @ v)
    close(layer.attention_weights, wanted)
    leaves = [q, k, v, bias, *layer.parameters()]
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted @ v)]
    close(*grads)


def test_a_cache_needs_heads() -> None:
    x = torch.randn(1, 3, 4)
    with pytest.raises(ats.ArgumentError, match="cache: expected none in a layer without heads, got"):
        DotProductAttention()(x, x, x, cache=ats.KeyValueCache(head_axis=-2))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("case", [case for case in LAYERS if case.head_count], ids=lambda case: case.name)
def test_steps_with_a_cache_are_one_pass(case: Case, window: int | None) -> None:
    """Output, weights of a step and gradients, with a rotary embedding, lengths per sequence and a bias."""
    layer, length = case.make(rotary=rotary, dtype=torch.float64), 9
    sizes = (case.query_size, case.key_size, VALUE_SIZE)
    inputs = [torch.randn(BATCH, length, size, dtype=torch.float64) for size in sizes]
    mask = ats.Causal() if window is None else ats.Causal() & (ats.SlidingWindow(left=window - 1) | ats.KeyRange(0, 1))
    cache = ats.KeyValueCache(head_axis=-2, window=window, sinks=int(window is not None))
    whole = layer(*inputs, mask=mask)
    wanted = layer.attention_weights
    outs = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9)):
        outs.append(layer(*[x[:, part] for x in inputs], cache=cache))
        positions, found = cache.positions, layer.attention_weights
        for b in range(BATCH):
            held = positions[b] >= 0
            torch.testing.assert_close(found[b][..., held], wanted[b][:, part][..., positions[b][held]])
            assert not found[b][..., ~held].any()
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    parameters = list(layer.parameters())
    grads = [torch.autograd.grad(x.square().sum(), parameters) for x in (torch.cat(outs, 1), whole)]
    torch.testing.assert_close(*grads)
    shorter = ats.KeyValueCache(head_axis=-2)
    bias = torch.randn(1, 1, length, length, dtype=torch.float64)
    out = layer(*inputs, valid_lens=[2, 9], cache=shorter, bias=bias)
    torch.testing.assert_close(out, layer(*inputs, mask=ats.Causal() & ats.ValidLens([2, 9], [2, 9]), bias=bias))
    assert shorter.lens.tolist() == [2, 9]


def test_a_rotary_embedding_may_be_a_module() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return rotary(q, k, positions * self.scale)

    layer, x = MultiHeadAttention(8, 2, rotary=Rotary(), query_size=8, key_size=8, value_size=8), torch.randn(2, 3, 8)
    assert "rotary.scale" in layer.state_dict()
    before = layer(x, x, x)
    before.sum().backward()
    assert layer.rotary.scale.grad is not None
    torch.testing.assert_close(copy.deepcopy(layer)(x, x, x), before)
    layer.reset_parameters()
    assert layer.rotary.scale == 0.5
    assert not torch.equal(layer(x, x, x), before)


def test_weights_of_a_step_are_read_before_the_next() -> None:
    layer, x = MultiHeadAttention(8, 2, query_size=8, key_size=8, value_size=8), torch.randn(2, 600, 8)
    cache = ats.KeyValueCache(head_axis=-2, capacity=1200)
    with torch.no_grad():
        layer(x, x, x, cache=cache)
        assert layer.attention_weights.shape == (2, 2, 600, 1200)
        cache.append(torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 2, 4))
    with pytest.raises(ats.ArgumentError, match="attention_weights: expected inputs as they were in the call"):
        _ = layer.attention_weights


@every_layer
@pytest.mark.slow_rows("*max")
def test_training_reduces_a_loss(case: Case) -> None:
    """Find the value whose key is the query's: a few steps suffice to halve the loss."""
    q, k, v = case.inputs(torch.float32)
    model = nn.Sequential(nn.Linear(case.query_size, case.query_size), layer := case.make(lazy=True))
    head = nn.Linear(layer(q, k, v).shape[-1], VALUE_SIZE)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.03)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (head(layer(model[0](q), k, v, [KEYS, 4])) - v[:, :QUERIES]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


# torch's own, where a graph breaks: it asks tensors that are no leaves for a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in QUICK else pytest.mark.slow, id=case.name) for case in LAYERS],
)
@pytest.mark.slow_rows("heads, additive")
def test_compiled(case: Case) -> None:
    layer, inputs = case.make(), case.inputs(torch.float32)
    wanted = layer(*inputs, [2, 5])
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    close(compiled(*inputs, [2, 5]), wanted, torch.float32)
    with pytest.raises(ats.AttnscoreError, match=r"a call outside torch.compile, .*Hint: call the layer itself once"):
        _ = layer.attention_weights
    layer(*inputs, [2, 5])
    assert layer.attention_weights.shape == case.weights_shape


@every_layer
def test_autocast(case: Case) -> None:
    layer, inputs = case.make(), case.inputs(torch.float32)
    exact, exact_weights = case.plain(copy.deepcopy(layer).double(), *case.inputs(), None)
    inputs[0].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(*inputs)
        plain, _ = case.plain(layer, *inputs, None)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    leaves = [inputs[0], *layer.parameters()]
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in leaves)
    floor = 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (out - exact).abs().max() <= torch.maximum(2 * (plain - exact).abs().max(), floor)
    weights = layer.attention_weights
    assert weights.dtype == torch.bfloat16
    assert (weights - exact_weights).abs().max() < 8 * torch.finfo(torch.bfloat16).eps


def test_starting_values_give_scores_of_moderate_variance() -> None:
    for width in (16, 256):
        q, k = torch.randn(1, 200, width), torch.randn(1, 200, width)
        score = ats.Bilinear(BilinearAttention(query_size=width, key_size=width).W.weight)
        assert 0.1 < ats.attention_scores(q, k, score=score).var() < 1
        for name in ("cosine", "gaussian", "bilinear"):
            layer = MultiHeadAttention(width, 1, score=name)
            score = layer._layer.make_score(dict(layer.named_parameters(recurse=False)))
            scores = ats.attention_scores(q[:, None], k[:, None], score=score)
            # What is constant in a row changes no weight.
            assert 0.1 < scores.var(-1).mean() < 2


def test_what_replaces_a_projection_has_its_say() -> None:
    """Parametrisations and hooks of the projections take part, once a call."""
    layer, x, calls = MultiHeadAttention(8, 2, query_size=6).double(), torch.randn(2, 3, 6).double(), []
    nn.utils.parametrize.register_parametrization(layer.W_q, "weight", Doubled(calls))
    calls.clear()
    out = layer(x, x, x)
    assert len(calls) == 1
    nn.utils.parametrize.remove_parametrizations(layer.W_q, "weight")
    close(layer(x, x, x), out)
    layer.W_k.register_forward_hook(lambda *_: torch.zeros(2, 3, 8).double())
    layer(x, x, x)
    close(layer.attention_weights, torch.ones(2, 2, 3, 3).double() / 3)


class Packed(nn.Linear):
    """A projection with two weights in a byte, which other libraries put in the place of ours."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.unpacked = linear.weight.detach()
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.unpacked.T


class Transposed(nn.Module):
    """A projection whose weight is (in, out), as in models of the GPT-2 family."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("kind", [Packed, Transposed])
@pytest.mark.parametrize("masked", [False, True])
def test_a_module_in_place_of_a_projection_has_a_weight_of_any_shape(kind: type[nn.Module], masked: bool) -> None:
    options = {"mask": ats.Causal()} if masked else {}
    for layer in (
        MultiHeadAttention(12, 2, query_size=6, key_size=6, value_size=6),
        AdditiveAttention(8, query_size=6, key_size=6),
    ):
        x = torch.randn(2, 3, 6)
        wanted = layer(x, x, x, **options)
        for name, module in list(layer.named_children()):
            setattr(layer, name, kind(module))
        close(layer(x, x, x, **options), wanted, torch.float32)


class Doubled(nn.Module):
    """A parametrisation that counts how often it is computed."""

    def __init__(self, calls: list[None]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        return 2 * x


def test_reset_parameters() -> None:
    layer = MultiHeadAttention(8, 2, score="gaussian", query_size=3, key_size=3, value_size=3)
    first = copy.deepcopy(layer.state_dict())
    layer.log_bandwidth.data.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.log_bandwidth, first["log_bandwidth"])
    assert not torch.equal(layer.W_q.weight, first["W_q.weight"])


@pytest.mark.parametrize(
    "layer, shown",
    [
        (DotProductAttention(), "DotProductAttention()"),
        (DotProductAttention(0.5, scaled=False), "DotProductAttention(scaled=False, dropout=0.5)"),
        (DotProductAttention(normalizer="sigmoid"), "DotProductAttention(normalizer='sigmoid')"),
        (AdditiveAttention(8, normalizer="sparsemax"), "AdditiveAttention(\n  normalizer='sparsemax'\n  (W_q)"),
        (MultiHeadAttention(8, 4, normalizer=ats.Entmax(1.2)), "score='scaled_dot', normalizer=Entmax(alpha=1.2)"),
        (GaussianAttention(0.5, keep_last=False), "GaussianAttention(bandwidth=0.5, keep_last=False)"),
        (BilinearAttention(query_size=3, key_size=2), "(W): Matrix(query_size=3, key_size=2)"),
        (AdditiveAttention(8, 0.1), "dropout=0.1\n  (W_q): LazyLinear(in_features=0, out_features=8, bias=False)"),
        (MultiHeadAttention(8, 4, num_key_value_heads=2), "num_heads=4, score='scaled_dot', num_key_value_heads=2"),
    ],
)
def test_repr(layer: nn.Module, shown: str) -> None:
    assert shown in repr(layer)


def test_what_frameworks_share_imports_none() -> None:
    code = "import sys, attnscore.layers.base; print(sorted({'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(layers).failed == 0
    assert all("Examples\n--------\n>>>" in getattr(layers, name).__doc__ for name in layers.__all__)
