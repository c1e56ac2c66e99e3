"""`attnscore.compat.torch` beside torch's originals: every argument, gradients, dtypes, masks, errors, files."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attnscore.compat import torch as compat

BATCH, HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 4, 5, 7, 8, 6
EMBED = HEADS * DIM
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(ours: Tensor, theirs: Tensor, atol: float | None = None) -> None:
    """Shape, dtype and numbers equal the original's, NaN included."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol or TOLERANCE[ours.dtype], equal_nan=True)


def all_close(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], atol: float | None = None) -> None:
    """Each result, or None where the original gives None."""
    for found, wanted in zip(ours, theirs, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            close(found, wanted, atol)


def seeded(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result with torch's generator set, for what is dropped."""
    torch.manual_seed(3)
    return function(*arguments, **options)


def same_parameters(ours: Any, theirs: Any) -> None:
    """Names, order, defaults and kinds of the arguments; ours may add `strict`."""
    found = inspect.signature(ours).parameters
    wanted = inspect.signature(theirs).parameters
    assert [(x.name, x.default, x.kind) for x in found.values() if x.name != "strict"] == [
        (x.name, x.default, x.kind) for x in wanted.values()
    ]


# ------------------------------------------------------------------ scaled_dot_product_attention


def arrays(*leads: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value with the leading axes given, one for all or one each."""
    leads = leads if len(leads) == 3 else leads * 3
    sizes = (QUERIES, DIM), (KEYS, DIM), (KEYS, VALUE_DIM)
    return [torch.randn(*lead, *size, dtype=dtype) for lead, size in zip(leads, sizes, strict=True)]


def keep(*shape: int) -> Tensor:
    """A boolean mask in which every query attends to the first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def all_but(query: int) -> Tensor:
    """A boolean mask in which one query attends to no key and all others to all."""
    return (torch.arange(QUERIES)[:, None] != query).expand(QUERIES, KEYS)


STRICT = functools.partial(compat.scaled_dot_product_attention, strict=True)
B, H, L, S = BATCH, HEADS, QUERIES, KEYS
SDPA: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[], dict[str, Any]]]] = {
    "plain": (((B, H),), dict),
    "two axes": (((),), dict),
    "three axes": (((B,),), dict),
    "five axes": (((3, B, H),), dict),
    "axes broadcast": (((B, 1), (H,), (1, H)), dict),
    "one head of key and value": (((B, H), (B, 1), (B, 1)), dict),
    "boolean mask": (((B, H),), lambda: {"attn_mask": keep(L, S)}),
    "boolean mask of each head": (((B, H),), lambda: {"attn_mask": keep(B, H, L, S)}),
    "boolean mask of keys": (((B, H),), lambda: {"attn_mask": keep(B, 1, 1, S)}),
    "boolean mask of queries": (((B, H),), lambda: {"attn_mask": torch.ones(L, 1, dtype=torch.bool)}),
    # A batch of as many entries as queries: to `attend` alone, these axes could be (batch, key).
    "boolean mask, three axes": (((L,),), lambda: {"attn_mask": keep(L, S)}),
    "boolean mask, two axes": (((),), lambda: {"attn_mask": keep(L, S)}),
    "float mask": (((B, H),), lambda: {"attn_mask": torch.randn(L, S)}),
    "float mask of each head": (((B, H),), lambda: {"attn_mask": torch.randn(B, H, L, S)}),
    "float mask with -inf": (((B, H),), lambda: {"attn_mask": torch.zeros(L, S).masked_fill(~keep(L, S), -torch.inf)}),
    "float mask, three axes": (((L,),), lambda: {"attn_mask": torch.randn(L, S)}),
    "a fully masked query, boolean": (((B, H),), lambda: {"attn_mask": all_but(2)}),
    "a fully masked query, float": (((B, H),), lambda: {"attn_mask": torch.where(all_but(2), 0.0, -torch.inf)}),
    "causal": (((B, H),), lambda: {"is_causal": True}),
    "causal at the top left": (((B, H),), lambda: {"attn_mask": causal_upper_left(L, S)}),
    "causal at the bottom right": (((B, H),), lambda: {"attn_mask": causal_lower_right(L, S)}),
    "scale": (((B, H),), lambda: {"scale": 0.3}),
    "negative scale": (((B, H),), lambda: {"scale": -1}),
    "grouped heads": (((B, H), (B, 2), (B, 2)), lambda: {"enable_gqa": True}),
    "grouped heads, fewer of value": (((B, H), (B, 2), (B, 1)), lambda: {"enable_gqa": True}),
    "grouped heads, fewer of key": (((B, H), (B, 1), (B, 2)), lambda: {"enable_gqa": True}),
    "grouped heads, of two and of three": (((B, 6), (B, 2), (B, 3)), lambda: {"enable_gqa": True}),
    "grouped heads, three axes": (((H,), (2,), (2,)), lambda: {"enable_gqa": True, "attn_mask": keep(H, L, S)}),
    "grouped heads, causal": (((B, H), (B, 1), (B, 1)), lambda: {"enable_gqa": True, "is_causal": True}),
    "all weights dropped": (((B, H),), lambda: {"dropout_p": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_and_its_gradients_are_those_of_the_original(name: str) -> None:
    leads, options = SDPA[name]
    given = arrays(*leads)
    options = options()
    results = []
    for function in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in given]
        out = function(*leaves, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    all_close(*results, 2e-5)


def test_the_gradient_of_a_float_mask() -> None:
    given, mask = arrays((B, H)), torch.randn(H, L, S)
    grads = []
    for function in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention):
        leaf = mask.clone().requires_grad_()
        function(*given, attn_mask=leaf).square().sum().backward()
        grads.append(leaf.grad)
    close(*grads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, "own"])
def test_sdpa_in_every_dtype(dtype: torch.dtype, mask_dtype: Any) -> None:
    given = arrays((B, H), dtype=dtype)
    mask = None
    if mask_dtype is not None:
        mask = (
            keep(L, S)
            if mask_dtype == torch.bool
            else torch.randn(L, S).to(dtype if mask_dtype == "own" else mask_dtype)
        )
    close(compat.scaled_dot_product_attention(*given, mask), F.scaled_dot_product_attention(*given, mask))


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, S, B), (L, 0, B), (L, S, 0), (1, 1, 1)])
def test_sdpa_of_empty_and_single_axes(queries: int, keys: int, batch: int) -> None:
    query, key, value = (torch.randn(batch, H, n, DIM) for n in (queries, keys, keys))
    close(compat.scaled_dot_product_attention(query, key, value), F.scaled_dot_product_attention(query, key, value))


def test_sdpa_drops_the_share_that_is_asked_for() -> None:
    query, key = torch.zeros(1, 1, 200, DIM), torch.zeros(1, 1, 50, DIM)
    out = compat.scaled_dot_product_attention(query, key, torch.eye(50)[None, None], dropout_p=0.25)
    assert abs((out == 0).float().mean().item() - 0.25) < 0.03
    close(out[out != 0], torch.full_like(out[out != 0], 1 / 50 / 0.75))
    close(*(seeded(compat.scaled_dot_product_attention, query, key, key, dropout_p=0.5) for _ in range(2)))


@pytest.mark.parametrize("name", ["plain", "boolean mask", "causal", "grouped heads, fewer of value"])
def test_strict_drops_the_weights_that_the_original_drops(name: str) -> None:
    leads, make = SDPA[name]
    given, options = arrays(*leads), make() | {"dropout_p": 0.5}
    close(*(seeded(function, *given, **options) for function in (STRICT, F.scaled_dot_product_attention)))


def test_a_masked_value_of_nan_reaches_no_query() -> None:
    """The second difference, documented: the original propagates it to all."""
    query, key, value = arrays((B, H))
    value[..., -1, :] = torch.nan
    mask = torch.arange(S).expand(L, S) < S - 1
    assert compat.scaled_dot_product_attention(query, key, value, mask).isfinite().all()
    assert F.scaled_dot_product_attention(query, key, value, mask).isnan().all()


BAD_SDPA: dict[str, Callable[[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "no tensor": lambda q, k, v: {"query": q.numpy(), "key": k, "value": v},
    "one axis": lambda q, k, v: {"query": q[0, 0, 0], "key": k[0, 0, 0], "value": v[0, 0, 0]},
    "dimensions": lambda q, k, v: {"query": q, "key": k[..., :-1], "value": v},
    "heads": lambda q, k, v: {"query": q, "key": k[:, :2], "value": v[:, :2]},
    "batch": lambda q, k, v: {"query": q, "key": k.expand(3, 2, H, S, DIM)[:, 0], "value": v},
    "heads that do not divide": lambda q, k, v: {"query": q, "key": k[:, :3], "value": v[:, :3], "enable_gqa": True},
    "dtypes": lambda q, k, v: {"query": q, "key": k.double(), "value": v},
    "integers": lambda q, k, v: {"query": q.long(), "key": k.long(), "value": v.long()},
    "devices": lambda q, k, v: {"query": q, "key": k.to("meta"), "value": v},
    "mask of integers": lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": torch.ones(L, S).long()},
    "mask of another shape": lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": keep(L, L)},
    "mask with more axes": lambda q, k, v: {"query": q[0], "key": k[0], "value": v[0], "attn_mask": keep(B, H, L, S)},
    # To `attend`, this is a bias for each distance of key and query.
    "mask of distances": lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(1, L + S - 1)},
    "mask of float64": lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(L, S).double()},
    "mask of NumPy": lambda q, k, v: {"query": q, "key": k, "value": v, "attn_mask": keep(L, S).numpy()},
    "sparse": lambda q, k, v: {"query": q.to_sparse(), "key": k, "value": v},
    "one nested": lambda q, k, v: {
        "query": torch.nested.nested_tensor([*q], layout=torch.jagged), "key": k, "value": v},
    "one head of the query": lambda q, k, v: {"query": q[:, :1], "key": k, "value": v, "enable_gqa": True},
    "no heads": lambda q, k, v: {"query": q[0, 0], "key": k[0, 0], "value": v[0, 0], "enable_gqa": True},
    "dropout above 1": lambda q, k, v: {"query": q, "key": k, "value": v, "dropout_p": 2.0},
    "dropout None": lambda q, k, v: {"query": q, "key": k, "value": v, "dropout_p": None},
    "scale of text": lambda q, k, v: {"query": q, "key": k, "value": v, "scale": "0.5"},
    "causal None": lambda q, k, v: {"query": q, "key": k, "value": v, "is_causal": None},
    "a mask with a causal one": lambda q, k, v: {
        "query": q, "key": k, "value": v, "attn_mask": keep(L, S), "is_causal": True},
    "two causal masks": lambda q, k, v: {
        "query": q, "key": k, "value": v, "attn_mask": causal_upper_left(L, S), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", BAD_SDPA)
def test_sdpa_raises_what_the_original_raises(name: str, strict: bool) -> None:
    # With dim = value_dim the original joins a mask with a causal one, although its documentation excludes both.
    arguments = BAD_SDPA[name](*arrays((B, H)))
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)) as theirs:
        F.scaled_dot_product_attention(**arguments)
    with pytest.raises(type(theirs.value)):
        compat.scaled_dot_product_attention(**arguments, strict=strict)


def test_autocast_gives_a_mask_the_dtype_of_the_query() -> None:
    arguments = (*arrays((B, H)), torch.randn(L, S, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (f(*arguments) for f in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert found.dtype == wanted.dtype
    close(found.float(), wanted.float(), 3e-2)


def test_values_of_another_length_are_refused() -> None:
    """The original reads memory beyond the values there."""
    query, key, value = arrays((B, H))
    with pytest.raises(RuntimeError, match="value: expected as many positions as key"):
        compat.scaled_dot_product_attention(query, key, value[..., 1:, :])


def test_fewer_heads_without_enable_gqa_are_told_of_it() -> None:
    query, key, value = arrays((B, H))
    with pytest.raises(RuntimeError, match=r"^query, key, value: expected leading axes that .*Hint: enable_gqa=True"):
        compat.scaled_dot_product_attention(query, key[:, :2], value[:, :2])


def jagged(heads: int, lengths: Sequence[int] = (2, 5)) -> torch.Tensor:
    """A jagged tensor (batch, heads, length, dim)."""
    sequences = [torch.randn(n, heads, DIM) for n in lengths]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)


# torch's own, of the older layout, which it takes inside.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_sdpa_drops_what_torch_drops_of_jagged_tensors(p: float) -> None:
    query, key = jagged(H, (2, 5, 1)), jagged(H, (3, 5, 4))
    value = torch.nested.nested_tensor_from_jagged(torch.randn_like(key.transpose(1, 2).values()), key.offsets())
    value = value.transpose(1, 2)
    found = []
    for function in (STRICT, F.scaled_dot_product_attention):
        x = query.detach().requires_grad_()
        out = seeded(function, x, key, value, dropout_p=p)
        values = out.transpose(1, 2).values()
        values.sum().backward()
        found.append((values.detach(), x.grad.transpose(1, 2).values()))
    all_close(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_heads_of_jagged_tensors_that_differ_are_refused() -> None:
    """As torch does; with `enable_gqa` torch's CPU has no kernel for them."""
    query = jagged(4)
    for heads in ((2, 2), (2, 4), (4, 2)):
        others = [torch.nested.nested_tensor_from_jagged(torch.randn(7, n, DIM), query.offsets()) for n in heads]
        key, value = (x.transpose(1, 2) for x in others)
        for function in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention):
            with pytest.raises(RuntimeError):
                function(query, key, value)
    fewer = torch.nested.nested_tensor_from_jagged(torch.randn(7, 2, DIM), query.offsets()).transpose(1, 2)
    found = compat.scaled_dot_product_attention(query, fewer, fewer, enable_gqa=True)
    for ours, q, x in zip(found.unbind(), query.unbind(), fewer.unbind(), strict=True):
        close(ours, F.scaled_dot_product_attention(q[None], x[None], x[None], enable_gqa=True)[0])


def nested(shapes: Sequence[tuple[int, ...]], layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(shape) for shape in shapes], layout=layout)


NESTED: dict[str, Callable[[], torch.Tensor]] = {
    "lengths, older layout": lambda: nested([(H, n, DIM) for n in (2, 5)], torch.strided),
    "lengths": lambda: jagged(H),
    "numbers of heads": lambda: nested([(n, L, DIM) for n in (2, 5)], torch.jagged),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NESTED)
def test_sdpa_takes_nested_tensors(name: str, is_causal: bool) -> None:
    """Those whose sequences differ in length, or in their number of heads."""
    x = NESTED[name]()
    found = compat.scaled_dot_product_attention(x, x, x, is_causal=is_causal)
    assert found.is_nested and found.layout == x.layout
    for ours, each in zip(found.unbind(), x.unbind(), strict=True):
        close(ours, F.scaled_dot_product_attention(each, each, each, is_causal=is_causal))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_take_no_mask(layout: torch.layout) -> None:
    x = nested([(n, H, DIM) for n in (2, 5)], layout).transpose(1, 2)
    for function in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError if layout == torch.jagged else RuntimeError):
            function(x, x, x, torch.ones(5, 5, dtype=torch.bool))


def test_sdpa_of_many_calls_at_once() -> None:
    arguments = (*arrays((B, H)), keep(B, 1, L, S))
    found = torch.vmap(compat.scaled_dot_product_attention)(*arguments)
    close(found, F.scaled_dot_product_attention(*arguments))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_sdpa_is_traced() -> None:
    arguments = (*arrays((B, H)), keep(B, 1, L, S))
    found = torch.jit.trace(compat.scaled_dot_product_attention, arguments, check_trace=False)(*arguments)
    close(found, F.scaled_dot_product_attention(*arguments))


def test_the_arguments_are_those_of_the_originals() -> None:
    same_parameters(compat.MultiheadAttention, nn.MultiheadAttention)
    same_parameters(compat.MultiheadAttention.forward, nn.MultiheadAttention.forward)
    same_parameters(compat.multi_head_attention_forward, F.multi_head_attention_forward)
    # The original is written in C++ and has its signature in the first line of its docstring.
    ours = inspect.signature(compat.scaled_dot_product_attention).parameters
    head = str(F.scaled_dot_product_attention.__doc__).partition("->")[0]
    theirs = [part.strip() for part in head.partition("(")[2].rstrip(") ").split(",")]
    written = [x.name if x.default is x.empty else f"{x.name}={x.default}" for x in ours.values()]
    assert written == [*theirs, "strict=False"]
    assert [x.name for x in ours.values() if x.kind is x.KEYWORD_ONLY] == ["scale", "enable_gqa", "strict"]


# ------------------------------------------------------------------ MultiheadAttention


def pair(**options: Any) -> tuple[compat.MultiheadAttention, nn.MultiheadAttention]:
    """A module of ours and one of torch's, with the same parameters; biases are not left at zero."""
    options = {"embed_dim": EMBED, "num_heads": HEADS} | options
    theirs = nn.MultiheadAttention(**{k: v for k, v in options.items() if k != "strict"})
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "bias" in name:
                x.normal_()
    ours = compat.MultiheadAttention(**options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module: nn.MultiheadAttention, batched: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((QUERIES, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim))
    axis = 0 if module.batch_first else 1
    found = [torch.randn(*size, dtype=dtype) for size in sizes]
    return [torch.stack([x, torch.randn_like(x)], axis) for x in found] if batched else found


def compare(ours: Any, theirs: Any, given: list[Tensor], tolerance: float = 2e-5, **options: Any) -> None:
    """Output, weights, gradients of the inputs, of the parameters and of float masks.

    The tolerance is for numbers of size 1; gradients reach 100, and sums are rounded at the size of their largest.
    """
    results = []
    for module in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in given]
        masks = {
            name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in options.items()
        }
        out, weights = module(*leaves, **masks)
        loss = out.square().sum() + (0 if weights is None else weights.square().sum())
        trained = [
            *leaves,
            *module.parameters(),
            *(x for x in masks.values() if isinstance(x, Tensor) and x.requires_grad),
        ]
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        results.append((out, weights, *grads))
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            close(found, wanted, tolerance * max(1.0, float(wanted.detach().abs().max())))


CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 5, "vdim": 3},
    "other sizes, no bias": {"kdim": 5, "vdim": 3, "bias": False},
    "bias of key and value": {"add_bias_kv": True},
    "a zero key": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "batch first": {"batch_first": True},
    "one head": {"num_heads": 1},
}
IGNORED = torch.arange(S) >= torch.tensor([[4], [S]])
FUTURE = torch.ones(L, S, dtype=torch.bool).triu(1)
MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "padding": lambda: {"key_padding_mask": IGNORED},
    "float padding": lambda: {"key_padding_mask": torch.randn(B, S)},
    "pairs": lambda: {"attn_mask": ~keep(L, S)},
    "float pairs": lambda: {"attn_mask": torch.randn(L, S)},
    "pairs of each head": lambda: {"attn_mask": ~keep(B * H, L, S)},
    "float pairs of each head": lambda: {"attn_mask": torch.randn(B * H, L, S)},
    "both": lambda: {"key_padding_mask": IGNORED, "attn_mask": FUTURE},
    "both float": lambda: {"key_padding_mask": torch.randn(B, S), "attn_mask": torch.randn(L, S)},
    "causal": lambda: {"attn_mask": FUTURE, "is_causal": True},
    "causal and padding": lambda: {"attn_mask": FUTURE, "is_causal": True, "key_padding_mask": IGNORED},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_every_constructor(constructor: str, need_weights: bool) -> None:
    ours, theirs = pair(**CONSTRUCTORS[constructor])
    if ours.num_heads == 1:
        masks = {"attn_mask": FUTURE, "key_padding_mask": IGNORED}
    else:
        masks = {"attn_mask": ~keep(B * H, L, S), "key_padding_mask": torch.zeros(B, S, dtype=torch.bool)}
    compare(ours, theirs, inputs(ours), need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, need_weights: bool) -> None:
    for options in ({}, {"add_bias_kv": True, "batch_first": True}):
        ours, theirs = pair(**options)
        compare(ours, theirs, inputs(ours), need_weights=need_weights, **MASKS[name]())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "masks",
    [{}, {"key_padding_mask": IGNORED[0]}, {"attn_mask": FUTURE}, {"attn_mask": ~keep(H, L, S)}],
    ids=["no mask", "padding", "pairs", "pairs of each head"],
)
def test_inputs_without_a_batch(masks: dict[str, Tensor], batch_first: bool) -> None:
    ours, theirs = pair(batch_first=batch_first)
    for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
        compare(ours, theirs, inputs(ours, batched=False), **masks, **options)


@pytest.mark.parametrize("add_bias_kv", [True, False])
def test_weights_of_each_head(add_bias_kv: bool) -> None:
    ours, theirs = pair(add_bias_kv=add_bias_kv)
    compare(ours, theirs, inputs(ours), average_attn_weights=False)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype=dtype)
    assert {x.dtype for x in ours.parameters()} == {dtype}
    given = inputs(ours, dtype=dtype)
    for need_weights in (True, False):
        all_close(*(module(*given, need_weights=need_weights) for module in (ours, theirs)))


def test_autocast() -> None:
    ours, theirs = pair()
    given = inputs(ours)
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (True, False):
            found, wanted = (module(*given, need_weights=need_weights)[0] for module in (ours, theirs))
            close(found, wanted)


def test_self_attention_in_evaluation() -> None:
    """Where the original runs its fused function."""
    ours, theirs = (module.eval() for module in pair(batch_first=True))
    x = torch.randn(B, S, EMBED)
    for context in (torch.no_grad, torch.inference_mode):
        for masks in ({}, {"key_padding_mask": IGNORED}, {"attn_mask": torch.ones(S, S).triu(1).bool()}):
            for need_weights in (True, False):
                with context():
                    all_close(*(m(x, x, x, need_weights=need_weights, **masks) for m in (ours, theirs)))


def test_dropout_draws_as_the_original_where_weights_are_returned() -> None:
    ours, theirs = pair(dropout=0.5)
    given = inputs(ours)
    found = [seeded(module, *given, average_attn_weights=False) for module in (ours, theirs)]
    assert (found[0][1] == 0).any()
    all_close(*found)
    close(ours.eval()(*given)[0], theirs.eval()(*given)[0])


def test_strict_dropout_without_weights_draws_as_the_original() -> None:
    ours, theirs = pair(dropout=0.5, strict=True)
    given = inputs(ours)
    all_close(*(seeded(module, *given, need_weights=False) for module in (ours, theirs)))


def test_dropout_without_weights() -> None:
    ours, _ = pair(dropout=0.5)
    given = inputs(ours)
    assert not ours(*given, need_weights=False)[0].equal(ours(*given, need_weights=False)[0])
    ours.eval()
    close(ours(*given, need_weights=False)[0], ours(*given, need_weights=False)[0])
    one, theirs = pair(dropout=1.0)
    close(one(*given, need_weights=False)[0], theirs(*given, need_weights=False)[0])


# ---- queries that attend to no key


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_that_attends_to_no_key_gives_zeros(need_weights: bool) -> None:
    ours, theirs = pair()
    given, nothing = inputs(ours), torch.tensor([[False] * S, [True] * S])
    out, weights = ours(*given, key_padding_mask=nothing, need_weights=need_weights)
    close(out[:, 1], ours.out_proj.bias.expand(L, EMBED))
    wanted, their_weights = theirs(*given, key_padding_mask=nothing, need_weights=need_weights)
    close(out[:, 0], wanted[:, 0])
    if need_weights:
        assert not weights[1].any()
        close(weights[0], their_weights[0])
        assert wanted[:, 1].isnan().all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("further", [False, True])
def test_strict_gives_the_numbers_of_the_original(need_weights: bool, further: bool) -> None:
    ours, theirs = pair(strict=True, add_zero_attn=further)
    given, nothing = inputs(ours), torch.tensor([[False] * S, [True] * S])
    for average in (True, False):
        options = {"key_padding_mask": nothing, "need_weights": need_weights, "average_attn_weights": average}
        wanted = theirs(*given, **options)
        assert all(x is None or bool(x.isnan().any()) == (need_weights and not further) for x in wanted)
        all_close(ours(*given, **options), wanted)


def test_strict_without_keys() -> None:
    ours, theirs = pair(strict=True)
    query, key, value = inputs(ours)
    all_close(ours(query, key[:0], value[:0]), theirs(query, key[:0], value[:0]))


# ---- parameters, serialisation, hooks


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_the_state_goes_both_ways(constructor: str) -> None:
    options = {"embed_dim": EMBED, "num_heads": HEADS} | CONSTRUCTORS[constructor]
    made = []
    for kind in (compat.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(1)
        made.append(kind(**options))
    ours, theirs = made
    # Drawn in the same order from the same generator: the same start.
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(a.equal(b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    ours._reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    given = inputs(ours)
    close(ours(*given)[0], theirs(*given)[0])
    assert repr(ours).replace("compat.", "") == repr(theirs)


def test_copies_and_files() -> None:
    ours, _ = pair(strict=True, dropout=0.25)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert type(other) is compat.MultiheadAttention
        assert other.strict
        close(other.eval()(*inputs(ours))[0].sum() * 0, torch.tensor(0.0))
        assert all(a.equal(b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))


def test_the_class_of_a_module_can_be_set() -> None:
    """The way to exchange the attention of a model that is there."""
    model = nn.TransformerDecoderLayer(EMBED, HEADS, dim_feedforward=8, dropout=0.0)
    given = torch.randn(L, B, EMBED), torch.randn(S, B, EMBED)
    wanted = model(*given)
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = compat.MultiheadAttention
    close(model(*given), wanted, 1e-5)
    assert isinstance(model.self_attn, compat.MultiheadAttention)
    assert not model.self_attn.strict


def test_device_meta_and_isinstance() -> None:
    module = compat.MultiheadAttention(EMBED, HEADS, device="meta", dtype=torch.float64)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.float64)}
    assert isinstance(module, nn.MultiheadAttention)


def test_hooks_run() -> None:
    ours, _ = pair(batch_first=True)
    x = torch.randn(B, S, EMBED)
    seen: list[str] = []
    ours.eval()
    ours.register_forward_pre_hook(lambda module, args: seen.append("before"))
    ours.register_forward_hook(lambda module, args, out: seen.append(f"after, {len(out)}"))
    with torch.no_grad():
        ours(x, x, x)
    ours.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    ours(x.requires_grad_(), x, x)[0].sum().backward()
    assert seen == ["before", "after, 2"] * 2 + ["backward"]


def test_nested_tensors_are_taken_where_the_original_takes_them() -> None:
    ours, theirs = (module.eval() for module in pair(batch_first=True))
    x = nested([(n, EMBED) for n in (2, 5)], torch.strided)
    with torch.no_grad():
        found, wanted = (module(x, x, x, need_weights=False)[0] for module in (ours, theirs))
    all_close(found.unbind(), wanted.unbind())
    with pytest.raises(AssertionError, match="NestedTensor"):
        ours(x, x, x)


# ---- errors


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype)


BAD_CALLS: dict[str, Callable[[list[Tensor]], tuple[list[Any], dict[str, Any]]]] = {
    "four axes": lambda x: ([x[0][None], x[1], x[2]], {}),
    "batch of the query alone": lambda x: ([x[0], x[1][:, 0], x[2][:, 0]], {}),
    "batch of the key alone": lambda x: ([x[0][:, 0], x[1], x[2]], {}),
    "features": lambda x: ([x[0][..., 1:], x[1], x[2]], {}),
    "features of the key": lambda x: ([x[0], x[1][..., 1:], x[2]], {}),
    "lengths of key and value": lambda x: ([x[0], x[1], x[2][1:]], {}),
    "padding of integers": lambda x: (x, {"key_padding_mask": ones(B, S, dtype=torch.long)}),
    "pairs of integers": lambda x: (x, {"attn_mask": ones(L, S, dtype=torch.long)}),
    "padding of one axis": lambda x: (x, {"key_padding_mask": ones(S)}),
    "padding of another shape": lambda x: (x, {"key_padding_mask": ones(B, L)}),
    "pairs of another shape": lambda x: (x, {"attn_mask": ones(L, L)}),
    "pairs of too many heads": lambda x: (x, {"attn_mask": ones(B, L, S)}),
    "pairs of float64": lambda x: (x, {"attn_mask": ones(L, S, dtype=torch.float64)}),
    "padding of float64, no weights": lambda x: (
        x, {"key_padding_mask": ones(B, S, dtype=torch.float64), "need_weights": False}),
    "batch of one": lambda x: ([x[0][:, :1], x[1], x[2]], {}),
    "pairs of four axes": lambda x: (x, {"attn_mask": ones(B, H, L, S)}),
    "a causal hint alone": lambda x: (x, {"is_causal": True}),
    "no batch, pairs of too many heads": lambda x: ([y[:, 0] for y in x], {"attn_mask": ones(B * H, L, S)}),
    "dtype": lambda x: ([y.double() for y in x], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_the_module_raises_what_the_original_raises(name: str) -> None:
    ours, theirs = pair()
    given, options = BAD_CALLS[name](inputs(ours))
    with pytest.raises((AssertionError, RuntimeError)) as wanted:
        theirs(*given, **options)
    with pytest.raises(type(wanted.value)):
        ours(*given, **options)


def test_need_weights_may_be_a_number() -> None:
    ours, theirs = pair()
    given = inputs(ours)
    for need_weights in (0, 1):
        all_close(*(module(*given, need_weights=need_weights) for module in (ours, theirs)))


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(0, 1), (4, 0), (5, 2)])
def test_bad_sizes(embed_dim: int, num_heads: int) -> None:
    with pytest.raises((ValueError, AssertionError)) as wanted:
        nn.MultiheadAttention(embed_dim, num_heads)
    with pytest.raises(type(wanted.value)):
        compat.MultiheadAttention(embed_dim, num_heads)


def test_masks_of_two_kinds_are_taken_with_the_warning_of_the_original() -> None:
    ours, theirs = pair()
    given = inputs(ours)
    found = []
    for module in (ours, theirs):
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
            found.append(module(*given, key_padding_mask=IGNORED, attn_mask=torch.zeros(L, S))[0])
    close(*found)


# ---- the function


def function_arguments(module: nn.MultiheadAttention) -> tuple[Any, ...]:
    return (
        *(EMBED, HEADS, module.in_proj_weight, module.in_proj_bias, module.bias_k, module.bias_v, module.add_zero_attn),
        *(0.0, module.out_proj.weight, module.out_proj.bias),
    )


@pytest.mark.parametrize("add_zero_attn", [False, True])
def test_static_keys_and_values(add_zero_attn: bool) -> None:
    ours, _ = pair(add_zero_attn=add_zero_attn)
    given, static = inputs(ours), torch.randn(2, B * H, S, DIM)
    options = {"key_padding_mask": IGNORED, "static_k": static[0], "static_v": static[1]}
    # The length of `key` does not matter then.
    given = (given[0], *(x[:-1] for x in given[1:]))
    for need_weights in (True, False):
        found, wanted = (
            function(*given, *function_arguments(ours), need_weights=need_weights, **options)[0]
            for function in (compat.multi_head_attention_forward, F.multi_head_attention_forward)
        )
        close(found, wanted)


def test_static_keys_with_a_bias_of_key_and_value_are_refused() -> None:
    ours, _ = pair(add_bias_kv=True)
    for function in (compat.multi_head_attention_forward, F.multi_head_attention_forward):
        with pytest.raises(AssertionError):
            function(*inputs(ours), *function_arguments(ours), static_k=torch.randn(B * H, S, DIM))
    arguments = list(function_arguments(ours))
    arguments[5] = None
    for function in (compat.multi_head_attention_forward, F.multi_head_attention_forward):
        with pytest.raises(AssertionError):
            function(*inputs(ours), *arguments)


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["no mask", "both", "float pairs"])
def test_a_module_compiles_as_one_graph(masks: str) -> None:
    torch.compiler.reset()
    ours, theirs = pair(batch_first=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    compare(compiled, theirs, inputs(ours), need_weights=False, **MASKS[masks]())


# Of a break of the graph, as an error inside the compiler: it looks whether tensors between the graphs have a gradient.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_module_that_returns_weights_compiles() -> None:
    torch.compiler.reset()
    ours, theirs = pair()
    compare(torch.compile(ours, backend="aot_eager"), theirs, inputs(ours), **MASKS["both"]())


@pytest.mark.parametrize(
    "name", ["boolean mask", "float mask", "causal", "causal at the bottom right", "grouped heads"]
)
@pytest.mark.slow_rows("boolean mask", "causal*", "grouped heads", "float mask")
def test_the_function_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    leads, options = SDPA[name]
    given, options = arrays(*leads), options()
    function = torch.compile(compat.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    close(function(*given, **options), F.scaled_dot_product_attention(*given, **options))


AFTER_TENSORFLOW = """
import sys
import tensorflow, torch
from attnscore.compat import torch as compat
from attnscore.diagnostics import watch
model, x = torch.nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
with watch(model) as seen:
    model(x, x, x)
compat.MultiheadAttention(8, 2)(x, x, x)
assert seen.rows() and "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_after_tensorflow() -> None:
    """Triton, which torch._dynamo imports, ends a process that has TensorFlow."""
    pytest.importorskip("tensorflow")
    subprocess.run([sys.executable, "-c", AFTER_TENSORFLOW], check=True, timeout=300)
