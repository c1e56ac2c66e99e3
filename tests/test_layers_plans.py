"""PyTorch layers called again: the plan of a layout gives what the first call gave, and follows what may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import attnscore as ats
from attnscore.layers import torch as layers
from attnscore.layers.torch import AdditiveAttention, BilinearAttention, DotProductAttention
from layer_cases import BATCH, KEYS, Case, close, every_layer

pytestmark = pytest.mark.usefixtures("torch_seed")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout is met for the first time in each test."""
    monkeypatch.setattr(layers, "_CHECKED", type(layers._CHECKED)(256))


@every_layer
@pytest.mark.parametrize("keeps", [True, False], ids=["weights", "none kept"])
def test_each_call_is_the_definition(case: Case, keeps: bool) -> None:
    layer = case.make(keep_last=keeps).double()
    for seed in range(4):  # planned, run by its plan, with and without gradients
        inputs = [x.requires_grad_(seed < 3) for x in case.inputs(seed=seed)]
        lens = torch.tensor([seed, KEYS - seed]) if seed else torch.full((BATCH,), 2)
        visible = torch.arange(KEYS) < lens[:, None, None]
        out, (wanted, weights) = layer(*inputs, lens), case.plain(layer, *inputs, visible)
        close(out, wanted)
        if keeps:
            close(layer.attention_weights, weights)
            assert not layer.attention_weights.requires_grad
        if seed < 3:
            leaves = [*inputs, *layer.parameters()]
            grads = (
                torch.autograd.grad(x.square().sum(), leaves, allow_unused=True, materialize_grads=True)
                for x in (out, wanted)
            )
            close(*grads)


@every_layer
def test_gradients_of_gradients_of_a_later_call(case: Case) -> None:
    layer, lens = case.make().double(), torch.tensor([2, 5])
    inputs = [x.requires_grad_() for x in case.inputs()]
    for _ in range(2):
        layer(*inputs, lens)
    assert torch.autograd.gradgradcheck(lambda *arrays: layer(*arrays, lens), inputs, fast_mode=True)


@every_layer
def test_a_checkpoint_computes_the_first_call_again(case: Case) -> None:
    layer, lens = case.make(), torch.tensor([2, 5])
    inputs = [x.requires_grad_() for x in case.inputs(torch.float32)]
    wanted = None
    for _ in range(3):
        out = checkpoint(layer, *inputs, lens, use_reentrant=False)
        grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True, materialize_grads=True)
        wanted = wanted or grads
        torch.testing.assert_close(grads, wanted, rtol=0, atol=0)


@every_layer
def test_dropout_of_each_call_is_drawn(case: Case) -> None:
    layer, inputs = case.make(dropout=0.5).train(), case.inputs(torch.float32)
    torch.manual_seed(3)
    first = [layer(*inputs) for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(3)
    for out in first:
        assert torch.equal(layer(*inputs), out)
    assert not any(torch.equal(layer.eval()(*inputs), out) for out in first)


def test_hooks_may_lay_out_what_they_return_in_any_way() -> None:
    layer = AdditiveAttention(8, query_size=6, key_size=6)
    q, k, v = torch.randn(2, 3, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    wanted = [layer(q, k, v) for _ in range(3)][-1]

    def strided(module: nn.Module, arguments: Any, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    handle = layer.W_k.register_forward_hook(strided)
    torch.testing.assert_close(layer(q, k, v), wanted)
    handle.remove()
    handle = layer.W_k.register_forward_hook(lambda module, arguments, x: x[:, :1].expand_as(x))
    uniform = layer(q, k, v)
    torch.testing.assert_close(uniform, v.mean(1, keepdim=True).expand_as(uniform))
    handle.remove()
    handle = layer.W_k.register_forward_hook(lambda module, arguments, x: x.double())
    with pytest.raises(ats.DtypeError):
        layer(q, k, v)
    handle.remove()
    torch.testing.assert_close(layer(q, k, v), wanted)


def test_a_hook_may_give_another_matrix() -> None:
    layer = BilinearAttention(query_size=6, key_size=6)
    q, k, v = torch.randn(2, 3, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    for _ in range(3):
        layer(q, k, v)
    layer.W.register_forward_hook(lambda module, arguments, weight: weight.T)
    torch.testing.assert_close(layer(q, k, v), ats.attend(q, k, v, score=ats.Bilinear(layer.W.weight.T)))


@every_layer
def test_a_layer_that_was_first_called_in_inference_mode_trains(case: Case) -> None:
    layer, inputs = case.make(lazy=True), case.inputs(torch.float32)
    with torch.inference_mode():
        first = layer(*inputs)
    out = layer(*[x.requires_grad_() for x in inputs])
    torch.testing.assert_close(out, first.clone())
    out.sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(parameter.grad)
    assert all(x.grad is not None for x in inputs)


def test_later_calls_are_checked_too() -> None:
    layer = AdditiveAttention(8, query_size=6, key_size=6)
    q, k, v, lens = torch.randn(2, 3, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 4), torch.tensor([2, 5])
    for _ in range(3):
        layer(q, k, v, lens)
    with pytest.raises(ats.MaskError):
        layer(q, k, v, torch.tensor([2, -1]))
    with pytest.raises(ats.ShapeError):
        layer(q[..., 1:], k, v, lens)
    with pytest.raises(ats.DtypeError):
        layer(q.double(), k.double(), v.double(), lens)
    assert torch.equal(layer(q, k, v, [2, 5]), layer(q, k, v, lens))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("lens", [[(2, 5), (1, 4)], [2, 5], [((1, 2, 3), (3, 4, 5)), ((5, 1, 1), (2, 2, 2))]])
def test_lengths_of_a_later_call_are_read(lens: Any, dtype: torch.dtype) -> None:
    """A plan reads some kinds of lengths at each call, and would hold the values of the others."""
    layer, (q, k, v) = DotProductAttention(), (torch.randn(2, n, 4) for n in (3, 5, 5))
    for numbers in lens:
        given = torch.tensor(numbers, dtype=dtype)
        whole = given.long().expand(2) if given.ndim == 0 else given.long()
        assert torch.equal(layer(q, k, v, given), ats.attend(q, k, v, valid_lens=whole))
        weights = ats.attention_weights(q, k, valid_lens=whole)
        torch.testing.assert_close(layer.attention_weights, weights, rtol=1e-6, atol=1e-7)


def test_what_pruning_makes_of_w_v_is_used() -> None:
    """The hooks of old-style pruning and of norms of weights run when a module is called."""
    layer, (q, k, v) = AdditiveAttention(8, key_size=4, query_size=4), (torch.randn(2, n, 4) for n in (3, 5, 5))
    before = layer(q, k, v)
    prune.l1_unstructured(layer.w_v, "weight", 0.5)
    assert not torch.equal(pruned := layer(q, k, v), before)
    with torch.no_grad():
        layer.w_v.weight_orig.mul_(3.0)
    found = layer(q, k, v)
    assert not torch.equal(found, pruned)
    w_v = (layer.w_v.weight_orig * layer.w_v.weight_mask).reshape(-1)
    score = ats.Additive(w_v, layer.W_q.weight, layer.W_k.weight)
    torch.testing.assert_close(found, ats.attend(q, k, v, score=score), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert layer.w_v.weight_orig.grad is not None


def test_what_replaces_w_v_is_called() -> None:
    """A bias in it is in all scores of a query, and changes no weight."""
    layer, (q, k) = AdditiveAttention(7, key_size=4, query_size=4).double(), (torch.randn(2, n, 4) for n in (3, 5))
    q, k = q.double(), k.double()
    layer.w_v = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1)).double()
    parameters = list(layer.parameters())
    out = layer(q, k, k)
    hidden = torch.tanh(layer.W_q(q)[:, :, None] + layer.W_k(k)[:, None])
    wanted = torch.softmax(layer.w_v(hidden)[..., 0], -1) @ k
    torch.testing.assert_close(out, wanted)
    grads = (torch.autograd.grad(x.square().sum(), parameters, allow_unused=True) for x in (out, wanted))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-12)
