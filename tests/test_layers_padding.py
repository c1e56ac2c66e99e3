"""PyTorch layers project no padded keys: nothing shows that, neither results, gradients, hooks nor what they keep."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import attnscore as ats
from attnscore.base import thresholds
from attnscore.layers import torch as layers
from attnscore.layers.torch import AdditiveAttention, MultiHeadAttention
from attnscore.plans import padding
from layer_cases import BATCH, KEYS, LAYERS, Case, close

pytestmark = pytest.mark.usefixtures("torch_seed")

# Those that project the keys.
PROJECTING = [case for case in LAYERS if case.kind in (AdditiveAttention, MultiHeadAttention)]
every_projection = pytest.mark.parametrize("case", PROJECTING, ids=lambda case: case.name)
every_lens = pytest.mark.parametrize("lens", [[2, 5], [0, 4], [0, 0], [5, 5]], ids=str)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Leave padded keys out however few they are; yields how many rows each projection was applied to."""
    found: list[int] = []

    def project_rows(ops: Any, x: Any, rows: Any, project: Any) -> Any:
        found.append(len(rows))
        return padding.project_rows(ops, x, rows, project)

    monkeypatch.setattr(thresholds, "UNPADDING", -1)
    monkeypatch.setattr(thresholds, "UNPADDING_A_NUMBER", 0)
    monkeypatch.setattr(layers, "project_rows", project_rows)
    monkeypatch.setattr(layers, "_CHECKED", type(layers._CHECKED)(256))
    yield found


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Project all keys, as a layer does where that takes less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "UNPADDING", math.inf)
        patch.setattr(layers, "_CHECKED", type(layers._CHECKED)(256))
        yield


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)


@every_projection
@every_lens
def test_results_and_gradients_are_those_of_the_definition(case: Case, lens: list[int], packed: list[int]) -> None:
    layer, given = case.make().double(), torch.tensor(lens)
    visible = torch.arange(KEYS) < given[:, None, None]
    for seed in range(3):
        inputs = [x.requires_grad_() for x in case.inputs(seed=seed)]
        out, (wanted, weights) = layer(*inputs, given), case.plain(layer, *inputs, visible)
        assert packed == [sum(lens)] * len(packed)
        assert len(packed) == (seed + 1) * (2 if case.head_count else 1)
        close(out, wanted)
        leaves = [*inputs, *layer.parameters()]
        close(gradients(out, leaves), gradients(wanted, leaves))
        for b, n in enumerate(lens):
            assert not gradients(layer(*inputs, given), inputs[1:2])[0][b, n:].any()
            packed[-2 if case.head_count else -1 :] = []
        close(layer.attention_weights, weights)


@every_projection
def test_what_is_padded_reaches_nothing(case: Case, packed: list[int]) -> None:
    layer, lens = case.make().double(), torch.tensor([2, 4])
    inputs = [x.requires_grad_() for x in case.inputs()]
    leaves = [*inputs, *layer.parameters()]
    wanted = layer(*inputs, lens)
    expected, weights = gradients(wanted, leaves), layer.attention_weights
    for x in inputs[1:]:
        with torch.no_grad():
            x[0, 2:], x[1, 4:] = math.nan, math.inf
    out = layer(*inputs, lens)
    found = gradients(out, leaves)
    assert packed
    for got, of_clean in zip((out, layer.attention_weights, *found), (wanted, weights, *expected), strict=True):
        assert torch.equal(got, of_clean)


@every_projection
def test_a_real_key_that_is_not_finite_gives_what_it_gave(case: Case) -> None:
    layer, lens = case.make().double(), torch.tensor([2, 4])
    inputs = [x.requires_grad_() for x in case.inputs()]
    with torch.no_grad():
        inputs[1][0, 1, 0] = math.inf
    leaves, found = [*inputs, *layer.parameters()], []
    for scope in (contextlib.nullcontext, unpacked):
        with scope():
            out = layer(*inputs, lens)
            found.append((out, layer.attention_weights, *gradients(out, leaves)))
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("name", ["additive", "heads, dot, bias", "heads, additive, 3 hidden", "heads, norms, sink"])
def test_gradients_of_gradients(name: str, packed: list[int]) -> None:
    case = next(case for case in PROJECTING if case.name == name)
    layer, lens = case.make().double(), torch.tensor([2, 4])
    names, parameters = zip(*layer.named_parameters(), strict=True)
    inputs = [x.requires_grad_() for x in case.inputs()]

    def call(*arrays: Tensor) -> Any:
        given = dict(zip(names, arrays[3:], strict=True))
        return torch.func.functional_call(layer, given, (*arrays[:3], lens))

    layer(*inputs, lens)
    assert packed
    copies = [x.detach().clone().requires_grad_() for x in parameters]
    assert torch.autograd.gradcheck(call, (*inputs, *copies), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (*inputs, *copies), fast_mode=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "length before batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "features before length": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other key": lambda x: torch.stack([x, torch.full_like(x, math.nan)], 2).flatten(1, 2)[:, ::2],
    "one for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["additive", "heads, dot, bias"])
def test_layouts(name: str, layout: Callable[[Tensor], Tensor], packed: list[int]) -> None:
    case = next(case for case in PROJECTING if case.name == name)
    layer, lens = case.make().double(), torch.tensor([2, 4])
    q, k, v = (x.requires_grad_() for x in case.inputs())
    visible = torch.arange(KEYS) < lens[:, None, None]
    out, (wanted, weights) = layer(q, layout(k), layout(v), lens), case.plain(layer, q, layout(k), layout(v), visible)
    assert packed
    close(out, wanted)
    close(layer.attention_weights, weights)
    leaves = [q, k, v, *layer.parameters()]
    close(gradients(out, leaves), gradients(wanted, leaves))


def test_one_tensor_for_queries_keys_and_values(packed: list[int]) -> None:
    layer, lens = MultiHeadAttention(8, 2, query_size=6, key_size=6, value_size=6).double(), torch.tensor([2, 4])
    x = torch.randn(BATCH, KEYS, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for scope in (contextlib.nullcontext, unpacked):
        with scope():
            out = layer(x, x, x, lens)
            found.append((out, *gradients(out, [x, *layer.parameters()])))
    assert len(packed) == 2
    close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["additive", "heads, dot, bias"])
def test_narrow_dtypes(name: str, dtype: torch.dtype, packed: list[int]) -> None:
    case = next(case for case in PROJECTING if case.name == name)
    layer, lens, found = case.make().to(dtype), torch.tensor([2, 4]), []
    inputs = [x.requires_grad_() for x in case.inputs(dtype)]
    for scope in (contextlib.nullcontext, unpacked):
        with scope():
            out = layer(*inputs, lens)
            found.append((out, layer.attention_weights, *gradients(out, [*inputs, *layer.parameters()])))
    assert packed
    assert all(x.dtype == dtype for x in found[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("name", ["additive", "heads, dot, bias"])
def test_dropout_and_checkpoints(name: str, keep_last: bool, packed: list[int]) -> None:
    case = next(case for case in PROJECTING if case.name == name)
    layer, lens = case.make(dropout=0.5, keep_last=keep_last).train(), torch.tensor([2, 4])
    inputs, found = [x.requires_grad_() for x in case.inputs(torch.float32)], []
    for again in range(3):
        torch.manual_seed(1)
        out = checkpoint(layer, *inputs, lens, use_reentrant=False) if again else layer(*inputs, lens)
        found.append((out, *gradients(out, [*inputs, *layer.parameters()])))
    assert packed
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_weights_that_are_computed_when_read(packed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscore.base.thresholds.KEPT_WEIGHTS", 0)
    layer, lens = AdditiveAttention(8, query_size=6, key_size=6).double(), torch.tensor([2, 4])
    q, k, v = (torch.randn(BATCH, n, 6, dtype=torch.float64, requires_grad=True) for n in (3, KEYS, KEYS))
    with torch.no_grad():
        k[0, 2:] = math.nan
    layer(q, k, v, lens)
    assert packed
    assert isinstance(layer._last, layers.LastCall) and layer._last.computed is None
    found = layer.attention_weights
    assert not found[0, :, 2:].any()
    close(found.sum(-1), torch.ones(BATCH, 3, dtype=torch.float64))


def _hook_everywhere(module: nn.Module, hook: Callable[..., None]) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(hook)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "before": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "before the backward": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "of all modules": _hook_everywhere,
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_see_all_keys(register: Callable[..., Any], packed: list[int]) -> None:
    layer, lens = AdditiveAttention(8, query_size=6, key_size=6), torch.tensor([2, 4])
    inputs = [torch.randn(BATCH, n, 6, requires_grad=True) for n in (3, KEYS, KEYS)]
    shapes: list[Any] = []

    def hook(module: nn.Module, *given: Any) -> None:
        if module is layer.W_k:
            shapes.append(given[0][0].shape)

    layer(*inputs, lens)
    assert len(packed) == 1
    handle = register(layer.W_k, hook)
    gradients(layer(*inputs, lens), inputs)
    handle.remove()
    assert len(packed) == 1
    assert shapes and all(shape[:2] == (BATCH, KEYS) for shape in shapes)
    layer(*inputs, lens)
    assert len(packed) == 2


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[:2] == (BATCH, KEYS)
        return super().forward(x) + 1


def _adapted(layer: AdditiveAttention) -> None:
    other = Adapted(6, 8, bias=False)
    other.load_state_dict(layer.W_k.state_dict())
    layer.W_k = other


def _replaced_forward(layer: AdditiveAttention) -> None:
    forward = layer.W_k.forward

    def checked(x: Tensor) -> Tensor:
        assert x.shape[:2] == (BATCH, KEYS)
        return forward(x)

    layer.W_k.forward = checked  # type: ignore[method-assign]


REPLACED: dict[str, Callable[[AdditiveAttention], Any]] = {
    "subclass": _adapted,
    "forward": _replaced_forward,
    "parametrised": lambda layer: nn.utils.parametrizations.weight_norm(layer.W_k),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_what_took_the_place_of_a_projection_gets_all_keys(replace: Callable[..., Any], packed: list[int]) -> None:
    layer, lens = AdditiveAttention(8, query_size=6, key_size=6), torch.tensor([2, 4])
    inputs = [torch.randn(BATCH, n, 6) for n in (3, KEYS, KEYS)]
    replace(layer)
    for _ in range(2):
        layer(*inputs, lens)
    assert not packed


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_where_all_keys_are_projected(packed: list[int]) -> None:
    layer, lens = AdditiveAttention(8, query_size=6, key_size=6), torch.tensor([2, 4])
    inputs = [torch.randn(BATCH, n, 6) for n in (3, KEYS, KEYS)]
    wanted = layer(*inputs, lens)
    packed.clear()
    torch.testing.assert_close(torch.func.vmap(lambda q: layer(q, *inputs[1:], lens))(inputs[0][None])[0], wanted)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs]
        torch.testing.assert_close(forward_ad.unpack_dual(layer(*duals, lens)).primal, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(*inputs, lens).float(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer(*inputs, lens.tolist()), wanted)
    layer(*inputs)
    layer(*inputs, lens[:, None].expand(-1, 3))
    layer(inputs[0], layer.prepare_keys(inputs[1]), inputs[2], lens)
    layer(inputs[0], inputs[1][:1], inputs[2], lens)
    assert not packed
    torch.testing.assert_close(layer(*inputs, lens.numpy()), wanted)
    torch.testing.assert_close(layer(*inputs, lens, ats.KeyRange(0, KEYS)), wanted)
    assert packed == [6, 6]
    heads = MultiHeadAttention(8, 2, query_size=6, key_size=6, value_size=6)
    cache = ats.KeyValueCache(head_axis=-2)
    heads(inputs[1], *inputs[1:], lens, cache=cache)
    assert packed == [6, 6]


@pytest.mark.parametrize("lens", [[2, -1], [6, 0]])
def test_lengths_out_of_range_raise(lens: list[int]) -> None:
    for layer in (AdditiveAttention(8, query_size=6, key_size=6), MultiHeadAttention(8, 2)):
        inputs = [torch.randn(BATCH, n, 6) for n in (3, KEYS, KEYS)]
        layer(*inputs, torch.tensor([2, 4]))
        with pytest.raises(ats.MaskError, match="valid_lens"):
            layer(*inputs, torch.tensor(lens))


def test_few_or_short_keys_are_projected_with_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, lens = layers._OPS, torch.tensor([2, 5])
    monkeypatch.undo()
    assert not padding.may_save_time(ops, torch.zeros(2, 10, 64), 64)
    large = torch.zeros(64, 32, 256)
    assert padding.may_save_time(ops, large, 256)
    assert padding.real_rows(ops, large, torch.full((64,), 32), 256) is None
    assert padding.real_rows(ops, large, torch.full((64,), 31), 256) is None
    rows = padding.real_rows(ops, large, torch.arange(64) % 33, 256)
    assert rows is not None
    np.testing.assert_array_equal(rows, np.flatnonzero(np.arange(32) < (np.arange(64) % 33)[:, None]))
    assert padding.real_rows(ops, large, lens, 256) is None


def test_the_default_device_of_new_tensors_is_not_that_of_the_keys() -> None:
    layer, lens = AdditiveAttention(8, query_size=4, key_size=4), torch.tensor([2, 5])
    queries, keys = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    wanted = layer(queries, keys, keys, lens)
    with torch.device("meta"):
        assert torch.equal(layer(queries, keys, keys, lens), wanted)


def test_a_program_of_free_lengths_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaving keys out would save depends on the length, which an exported program must not ask for."""
    monkeypatch.setattr(thresholds, "UNPADDING", 100_000)
    layer = MultiHeadAttention(64, 4, query_size=64, key_size=64, value_size=64).eval()
    x, length = torch.randn(2, 40, 64), torch.export.Dim("length")
    lens = torch.tensor([40, 30])
    program = torch.export.export(layer, (x, x, x, lens), dynamic_shapes=(*[{1: length}] * 3, None))
    longer = torch.randn(2, 900, 64)
    close(program.module()(longer, longer, longer, lens), layer(longer, longer, longer, lens), torch.float32)
