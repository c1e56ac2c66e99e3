"""PyTorch layers: D2L's checkpoints, sizes inferred later, copies, and ``nn.MultiheadAttention``."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attnscore as ats
from attnscore.layers.torch import AdditiveAttention, DotProductAttention, MultiHeadAttention
from layer_cases import LAYERS, Case, TextbookAdditive, TextbookDot, TextbookMultiHead, close, every_layer

pytestmark = pytest.mark.usefixtures("torch_seed")

TEXTBOOK: tuple[tuple[Callable[[], Any], Callable[[], nn.Module], int, int], ...] = (
    (DotProductAttention, TextbookDot, 6, 6),
    (lambda: AdditiveAttention(8), lambda: TextbookAdditive(8), 20, 2),
    (lambda: MultiHeadAttention(8, 2), lambda: TextbookMultiHead(8, 2), 5, 7),
    (lambda: MultiHeadAttention(8, 4, bias=True), lambda: TextbookMultiHead(8, 4, bias=True), 5, 7),
)


@pytest.mark.parametrize("ours, theirs, query_size, key_size", TEXTBOOK)
@pytest.mark.parametrize("lens", [None, [2, 5], [[1, 3, 5], [2, 4, 1]]])
def test_textbook_checkpoints_load_and_agree(ours: Any, theirs: Any, query_size: int, key_size: int, lens: Any) -> None:
    book, layer = theirs().double(), ours().double()
    q, k = torch.randn(2, 3, query_size).double(), torch.randn(2, 5, key_size).double()
    v, lens = torch.randn(2, 5, 4).double(), None if lens is None else torch.tensor(lens)
    out = book(q, k, v, lens)
    layer.load_state_dict(book.state_dict(), strict=True)
    close(layer(q, k, v, lens), out)
    weights = getattr(book, "attention", book).attention_weights
    close(layer.attention_weights.reshape(weights.shape), weights)
    theirs().double().load_state_dict(layer.state_dict(), strict=True)


@pytest.mark.parametrize("case", [case for case in LAYERS if case.sizes], ids=lambda case: case.name)
class TestLazySizes:
    def test_are_inferred_and_trained(self, case: Case) -> None:
        layer = case.make(lazy=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        out = layer(*case.inputs(torch.float32))
        wanted = {name: x.shape for name, x in case.make().state_dict().items()}
        assert {name: x.shape for name, x in layer.state_dict().items()} == wanted
        assert not any("Lazy" in type(module).__name__ for module in layer.modules())
        before = {name: x.clone() for name, x in layer.state_dict().items()}
        out.square().sum().backward()
        optimizer.step()
        # A bias of the keys shifts every score of a row alike: its gradient is 0 up to rounding.
        moved = [name for name, x in layer.state_dict().items() if not torch.equal(x, before[name])]
        assert set(moved) >= set(before) - {"W_k.bias"}

    def test_checkpoints_load_into_either_state(self, case: Case) -> None:
        inputs, made = case.inputs(torch.float32), case.make()
        out = made(*inputs)
        lazy = case.make(lazy=True)
        lazy.load_state_dict(made.state_dict())
        close(lazy(*inputs), out, torch.float32)
        empty = case.make(lazy=True).state_dict()
        again = case.make(lazy=True)
        again.load_state_dict(empty)
        assert again(*inputs).shape == out.shape

    def test_copies_and_dtypes(self, case: Case) -> None:
        assert copy.deepcopy(case.make(lazy=True).double())(*case.inputs()).dtype == torch.float64
        assert case.make(lazy=True, dtype=torch.float64)(*case.inputs()).dtype == torch.float64
        # torch itself does not pickle the dtype of an uninitialised parameter.
        loaded = pickle.loads(pickle.dumps(case.make(lazy=True)))
        assert loaded(*case.inputs(torch.float32)).dtype == torch.float32

    def test_sizes_that_do_not_fit_afterwards(self, case: Case) -> None:
        layer, (q, k, v) = case.make(lazy=True), case.inputs(torch.float32)
        layer.load_state_dict(case.make().state_dict())
        for _ in range(2):
            with pytest.raises(ats.ShapeError, match=rf"queries: expected vectors of length {q.shape[-1]}, .*got 3"):
                layer(q[..., :3], k, v)
            layer(q, k, v)


@every_layer
def test_round_trips(case: Case) -> None:
    layer, inputs = case.make(), case.inputs(torch.float32)
    out = layer(*inputs)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = case.make()
    other.load_state_dict(torch.load(stream, weights_only=True))
    for again in (other, copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(ats.AttnscoreError, match="none since it was made, copied or loaded"):
            _ = again.attention_weights
        assert torch.equal(again(*inputs), out)
    assert layer.attention_weights.shape == case.weights_shape
    assert layer.double()(*case.inputs()).dtype == torch.float64


class TestFromTorch:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 3}], ids=["one size", "own sizes"])
    def test_equal_numbers(self, bias: bool, batch_first: bool, sizes: dict[str, int]) -> None:
        theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first, **sizes).eval()
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter)
        state = torch.get_rng_state()
        ours = MultiHeadAttention.from_torch(theirs)
        assert torch.equal(torch.get_rng_state(), state)
        assert not ours.training
        q, k, v = torch.randn(3, 6, 8), torch.randn(3, 6, sizes.get("kdim", 8)), torch.randn(3, 6, sizes.get("vdim", 8))
        turned = (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))
        ignored = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0]]).bool()
        future = torch.ones(6, 6).triu(1).bool()
        for theirs_given, ours_given in (
            ({}, {}),
            ({"key_padding_mask": ignored}, {"mask": ats.KeyPadding.from_ignore(ignored)}),
            ({"attn_mask": future}, {"mask": ats.Causal()}),
            (
                {"attn_mask": future, "key_padding_mask": ignored},
                {"mask": ~ats.Dense(future) & ats.KeyPadding.from_ignore(ignored)},
            ),
        ):
            wanted, weights = theirs(*turned, **theirs_given, average_attn_weights=False)
            out = ours(q, k, v, **ours_given)
            close(out if batch_first else out.transpose(0, 1), wanted, torch.float32)
            close(ours.attention_weights, weights, torch.float32)

    def test_keeps_mode_dtype_and_what_is_frozen_and_copies(self) -> None:
        theirs = nn.MultiheadAttention(8, 2, dropout=0.25, dtype=torch.float64)
        theirs.in_proj_weight.requires_grad_(False)
        ours = MultiHeadAttention.from_torch(theirs, keep_last=False)
        assert ours.training and ours.dropout == 0.25 and not ours.keep_last
        assert ours.W_q.weight.dtype == torch.float64
        assert not ours.W_q.weight.requires_grad and ours.W_o.weight.requires_grad
        with torch.no_grad():
            ours.W_o.weight.zero_()
        assert theirs.out_proj.weight.any()

    @pytest.mark.parametrize("name", ["add_bias_kv", "add_zero_attn"])
    def test_what_has_no_counterpart(self, name: str) -> None:
        with pytest.raises(ats.ArgumentError, match=f"module: expected one with {name}=False, got {name}=True"):
            MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, **{name: True}))

    def test_something_else(self) -> None:
        with pytest.raises(ats.ArgumentError, match=r"module: expected a torch.nn.MultiheadAttention, got Linear"):
            MultiHeadAttention.from_torch(nn.Linear(2, 2))
