"""PyTorch layers: ``attention_weights``, and masks where there are heads."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import attnscore as ats
from attnscore.layers import torch as layers
from attnscore.layers.torch import DotProductAttention, MultiHeadAttention
from constructor_cases import check_masks_of_heads, check_weights_not_kept
from layer_cases import BATCH, Case, close, every_layer

pytestmark = pytest.mark.usefixtures("torch_seed")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls keep their inputs, however few the weights."""
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", 0)


@pytest.mark.parametrize("few", [0, 2**12])
def test_a_batch_of_values_alone_is_not_one_of_weights(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
    layer, x = DotProductAttention(), torch.randn(1, 3, 2)
    layer(x, x, torch.randn(4, 3, 2))
    assert layer.attention_weights.shape == (1, 3, 3)


class TestAttentionWeights:
    @every_layer
    def test_are_those_of_the_call_after_an_optimiser_step(self, case: Case) -> None:
        layer, lens = case.make(), np.array([2, 5])
        inputs = [x.requires_grad_() for x in case.inputs(torch.float32)]
        layer(*inputs, lens).sum().backward()
        wanted = layer.attention_weights
        lens += [1, -1]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1.0)
        assert torch.equal(layer.attention_weights, wanted)

    @every_layer
    def test_keep_no_graph_and_no_cycle(self, case: Case) -> None:
        layer, (q, k, v) = case.make(), (x.requires_grad_() for x in case.inputs(torch.float32))
        gc.disable()
        try:
            # The graph holds the values (a tensor lives on in Python while C++ holds it), the layer does not.
            out, values = layer(q, k, v), weakref.ref(v)
            del v
            assert values() is not None
            assert not layer.attention_weights.requires_grad
            del out
            assert values() is None
            gone = weakref.ref(layer)
            del layer
            assert gone() is None
        finally:
            gc.enable()

    @every_layer
    def test_are_computed_in_the_pass_or_from_the_inputs(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same weights, without a graph; their number decides which of the two, and no call before."""
        layer, lens = case.make(dropout=0.5).train(), torch.tensor([2, 5])
        inputs = [x.requires_grad_() for x in case.inputs(torch.float32)]
        layer(*inputs, lens)
        wanted, found = layer.attention_weights, []
        for few in (wanted.numel() - 1, wanted.numel()):
            monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", few)
            torch.manual_seed(1)
            out = layer(*inputs, lens)
            assert (layer._last.computed is None) == (few < wanted.numel())
            assert layer._last.computed is None or not layer._last.computed.requires_grad
            torch.testing.assert_close(layer.attention_weights, wanted)
            assert not layer.attention_weights.requires_grad
            layer.attention_weights.zero_()  # the gradient, and who reads next, do not see it
            torch.testing.assert_close(layer.attention_weights, wanted)
            found.append((out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True)))
        layer.keep_last = False
        torch.manual_seed(1)
        out = layer(*inputs, lens)
        assert layer._last is None
        wanted = (out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True))
        for got in found:
            torch.testing.assert_close(got, wanted)

    def test_before_a_call_and_when_nothing_is_kept(self) -> None:
        check_weights_not_kept(layers, torch.randn(2, 3, 2))

    def test_inputs_that_changed_in_place_are_noticed(self) -> None:
        layer, x = DotProductAttention(), torch.randn(1, 3, 2)
        mask = torch.ones(3, 3).bool()
        for changed in (x, mask):
            layer(x, x, x, mask=mask)
            changed.zero_()
            with pytest.raises(ats.ArgumentError, match="inputs as they were in the call, got changed ones"):
                _ = layer.attention_weights
        for composed in (ats.Dense(mask), ats.Dense(mask) & ats.Dense(~mask) | ats.Causal()):
            layer(x, x, x, mask=composed)
            mask.logical_not_()
            with pytest.raises(ats.ArgumentError, match="changed ones"):
                _ = layer.attention_weights

    def test_of_an_inference_mode_call(self) -> None:
        layer = MultiHeadAttention(8, 2)
        with torch.inference_mode():
            x = torch.randn(2, 3, 4)
            layer(x, x, x)
        assert layer.attention_weights.shape == (2, 2, 3, 3)

    @every_layer
    def test_are_not_kept_under_torch_func(self, case: Case) -> None:
        layer, (q, k, v) = case.make().double(), case.inputs()
        wanted = layer(q, k, v)
        assert layer.attention_weights.shape == case.weights_shape
        got = torch.func.vmap(layer, in_dims=(0, None, None))(q[:, None], k, v)
        with pytest.raises(ats.AttnscoreError, match=r"a call outside torch.compile, torch.func and tracing"):
            _ = layer.attention_weights
        close(torch.stack([got[b, b] for b in range(BATCH)]), wanted)
        layer(q, k, v)
        shown = torch.ones(4, *case.weights_shape[-2:]).bool()
        with torch.no_grad():
            torch.func.vmap(lambda mask: layer(q, k, v, mask=ats.Dense(mask)))(shown)
        with pytest.raises(ats.AttnscoreError, match="one inside"):
            _ = layer.attention_weights
        layer(q, k, v)
        torch.func.grad(lambda x: layer(x, k, v).sum())(q)
        with pytest.raises(ats.AttnscoreError, match="one inside"):
            _ = layer.attention_weights


class TestMultiHeadMasks:
    layer_inputs = torch.randn(2, 4, 6)

    def test_axes(self) -> None:
        check_masks_of_heads(layers, self.layer_inputs[:, :3], torch.from_numpy)

    def test_what_does_not_fit(self) -> None:
        layer, x = MultiHeadAttention(8, 2), self.layer_inputs
        with pytest.raises(ats.MaskError, match=r"mask: .*\(batch, query, key\) = \(2, 4, 4\), got \(3, 4, 4\)"):
            layer(x, x, x, mask=torch.ones(3, 4, 4).bool())
        with pytest.raises(ats.MaskError, match=r"KeyPadding\(mask\) says \(batch, key\)"):
            layer(x[:, :2], x, x, mask=torch.ones(2, 4).bool())
        with pytest.raises(ats.MaskError, match="boolean"):
            layer(x, x, x, mask=torch.zeros(2, 4, 4))
