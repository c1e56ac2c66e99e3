"""`attend` under torch.compile and torch.jit.trace: one graph, the numbers and gradients of eager mode, operators that
torch accepts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import attnscore as ats
from attnscore import scores
from attnscore.layers import torch as layers
from attnscore.scores import base as score_base
from own_scores import OwnPlain

BATCH, HEADS, QUERIES, KEYS, DIM, HIDDEN = 2, 2, 5, 7, 4, 3


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    # What an earlier call has learnt is not there where a layer is compiled first.
    monkeypatch.setattr(score_base, "_FIELD_NAMES", {})
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@dataclass(frozen=True)
class Call:
    """One row: what is given beside query, key and value, made from trained tensors."""

    name: str
    options: Callable[..., dict[str, Any]]
    shapes: tuple[tuple[int, ...], ...] = ()

    def leaves(self) -> list[Tensor]:
        return [*inputs(), *(torch.randn(shape, requires_grad=True) for shape in self.shapes)]

    def function(self) -> Callable[..., Any]:
        def function(query: Tensor, key: Tensor, value: Tensor, *trained: Tensor) -> Any:
            return ats.attend(query.sin(), key, value, **self.options(*trained))

        return function


def _keep(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 3 != 1


# The compiler reads & and | of masks, and not ~ (it says so): such a mask is made outside.
NOT_THE_FIRST = ~ats.ValidLens([1, 0])

# fmt: off
CALLS = (
    Call("defaults", dict),
    Call("scale per head", lambda s: {"score": ats.ScaledDot(s)}, ((HEADS,),)),
    Call("additive, lengths", lambda w, a, b, c: {
        "score": ats.Additive(w, a, b, c), "valid_lens": [2, 6]},
        ((HIDDEN,), (HIDDEN, DIM), (HIDDEN, DIM), (HIDDEN,))),
    Call("bilinear, causal", lambda w: {"score": ats.Bilinear(w), "mask": ats.Causal("top_left")}, ((DIM, DIM),)),
    Call("gaussian, window", lambda b: {
        "score": ats.Gaussian(b.exp()), "mask": ats.SlidingWindow(left=2, right=1, offset=1)}, ((),)),
    Call("cosine, padding", lambda: {"score": ats.Cosine(3.0), "mask": ats.KeyPadding(_keep(BATCH, KEYS))}),
    Call("sum, lengths in a tensor", lambda: {"score": "sum", "valid_lens": torch.tensor([0, 6])}),
    Call("cap, array, bias", lambda b: {
        "score": ats.SoftCap(ats.Temperature("dot", 2.0), 5.0), "mask": _keep(QUERIES, KEYS), "bias": b},
        ((QUERIES, KEYS),)),
    Call("sink, composed masks", lambda s: {
        "sink": s, "mask": (ats.Causal(offset=2) | ats.PrefixLM(1)) & NOT_THE_FIRST}, ((HEADS,),)),
    Call("one array as scale and sink", lambda s: {"score": ats.ScaledDot(s), "sink": s}, ((HEADS,),)),
    Call("dropout", lambda: {"dropout": 0.4, "seed": 7, "mask": ats.KeyRange([0, 1], [4, 7])}),
    Call("statistics", lambda s: {"return_stats": True, "sink": s, "mask": ats.Causal("bottom_right")}, ((HEADS,),)),
    Call("dense kernel", lambda: {"kernel": "dense", "return_stats": ("entropy",)}),
    Call("weights", lambda: {"return_weights": True, "valid_lens": [0, 6]}),
    Call("weights, statistics", lambda w: {
        "return_weights": True, "return_stats": ("entropy", "max_weight"), "score": ats.Additive(w), "dropout": 0.4,
        "seed": 7}, ((DIM,),)),
)
# fmt: on
# Compiling takes seconds: the others are marked slow.
QUICK = ("defaults", "one array as scale and sink")


def inputs(lengths: tuple[int, int] = (QUERIES, KEYS), **kind: Any) -> list[Tensor]:
    shapes = [(BATCH, HEADS, length, DIM) for length in (lengths[0], lengths[1], lengths[1])]
    return [torch.randn(shape, requires_grad=True, **kind) for shape in shapes]


def flat(found: Any) -> list[Tensor]:
    """Output, weights and statistics in one list."""
    if isinstance(found, (tuple, list)):
        return [x for part in found if part is not None for x in flat(part)]
    return [found]


def gradients(found: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum in which every output that carries a gradient weighs differently."""
    parts = [x for x in flat(found) if x.requires_grad]
    total = sum((x.nan_to_num(neginf=0.0) * (i + x.detach().cos())).sum() for i, x in enumerate(parts, 1))
    return torch.autograd.grad(total, leaves, allow_unused=True)


def agree(got: Any, wanted: Any, leaves: list[Tensor]) -> None:
    assert [x.requires_grad for x in flat(got)] == [x.requires_grad for x in flat(wanted)]
    torch.testing.assert_close(flat(got), flat(wanted))
    torch.testing.assert_close(gradients(got, leaves), gradients(wanted, leaves))


@pytest.mark.parametrize(
    "call", [pytest.param(x, id=x.name, marks=() if x.name in QUICK else pytest.mark.slow) for x in CALLS]
)
def test_one_graph_forward_and_backward(call: Call) -> None:
    function, leaves = call.function(), call.leaves()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    agree(compiled(*leaves), function(*leaves), leaves)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(5, 4), (7, 4), (7, 3)], {"valid_lens": 3}),
        ([(2, 5, 4), (2, 7, 4), (1, 7, 3)], {"valid_lens": torch.tensor([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]])}),
        ([(2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 3)], {"head_axis": -2, "return_stats": ("log_sum_exp",)}),
        ([(3, 1, 4, 5, 4), (2, 2, 7, 4), (2, 1, 7, 3)], {"mask": ats.Causal("bottom_right")}),
        ([(2, 1, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3)], {}),
        ([(2, 2, 0, 4), (2, 2, 7, 4), (2, 2, 7, 3)], {}),
        ([(2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 3)], {"head_axis": -2, "return_weights": True}),
    ],
    ids=["2 axes", "3 axes", "heads behind, groups", "5 axes", "one query head", "no queries", "weights of groups"],
)
@pytest.mark.slow_rows("[35]*", "heads*", "one*", "no*", "weights*", "2 axes")
def test_every_layout(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return ats.attend(query, key, value, **options)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    agree(compiled(*leaves), function(*leaves), leaves)
    assert flat(compiled(*leaves))[0].stride() == flat(function(*leaves))[0].stride()


@pytest.mark.slow
def test_shapes_and_numbers_that_change_compile_once_more_at_most() -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(query: Tensor, key: Tensor, value: Tensor, offset: int, temperature: float) -> Tensor:
        score = ats.Temperature(ats.ScaledDot(), temperature)
        return ats.attend(query, key, value, score=score, mask=ats.Causal(offset=offset))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
    for i, lengths in enumerate([(5, 7), (6, 9), (8, 11), (9, 16)]):
        leaves = inputs(lengths)
        agree(compiled(*leaves, 2 + i, 0.5 + i), function(*leaves, 2 + i, 0.5 + i), leaves)
    assert graphs.frame_count <= 2


MODULES = {
    "dot": layers.DotProductAttention,
    "additive": lambda: layers.AdditiveAttention(HIDDEN, query_size=DIM, key_size=DIM),
    "bilinear": lambda: layers.BilinearAttention(query_size=DIM, key_size=DIM),
    "gaussian": lambda: layers.GaussianAttention(learn_bandwidth=True),
    "heads": lambda: layers.MultiHeadAttention(8, 2, query_size=DIM, key_size=DIM, value_size=DIM),
    "heads, additive": lambda: layers.MultiHeadAttention(
        8, 2, score="additive", query_size=DIM, key_size=DIM, value_size=DIM
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_layers_are_one_graph(name: str) -> None:
    layer: nn.Module = MODULES[name]()
    arrays = [torch.randn(BATCH, length, DIM, requires_grad=True) for length in (QUERIES, KEYS, KEYS)]
    lens, leaves = torch.tensor([2, 6]), [*arrays, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    agree(compiled(*arrays, lens), layer(*arrays, lens), leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.AdditiveAttention(HIDDEN),
        layers.BilinearAttention,
        lambda: layers.MultiHeadAttention(8, 2, score="additive"),
    ],
    ids=["additive", "bilinear", "heads, additive"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a module"])
def test_sizes_come_with_the_first_compiled_call(make: Callable[[], nn.Module], inside: bool) -> None:
    layer = make()
    arrays = [torch.randn(BATCH, length, DIM, requires_grad=True) for length in (QUERIES, KEYS, KEYS)]
    compiled = torch.compile(Outer(layer) if inside else layer, fullgraph=True, backend="aot_eager")
    lens = torch.tensor([2, 6])
    out = compiled(*arrays, lens)
    agree(out, layer(*arrays, lens), [*arrays, *layer.parameters()])
    with pytest.raises(ats.ShapeError, match=r"queries: expected vectors of length 4, which W.* takes, got 3"):
        layer(arrays[0][..., :3], *arrays[1:])


class Outer(nn.Module):
    """A model with a layer in it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*inputs)


def test_autocast_inside() -> None:
    leaves = inputs()

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ats.attend(query, key, value)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert compiled(*leaves).dtype == torch.bfloat16
    agree(compiled(*leaves), function(*leaves), leaves)


# torch's own, where the compiler goes on after a break with a jagged tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_jagged_tensors_run_outside_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        x = x * 2
        return cast(Tensor, ats.attend(x, x, x, mask=ats.Causal(), head_axis=-2)).sin()

    parts = [torch.randn(n, HEADS, DIM) for n in (3, 1, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    got, wanted = torch.compile(function, backend="aot_eager")(x), function(x)
    torch.testing.assert_close(got.values(), wanted.values())
    grads = [torch.autograd.grad(y.values().square().sum(), x)[0].values() for y in (got, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
def test_jagged_tensors_are_refused_by_a_trace() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, DIM) for n in (3, 1)], layout=torch.jagged)
    with pytest.raises(ats.FrameworkError, match="a jagged tensor"):
        torch.jit.trace(lambda x: ats.attend(x, x, x), (x,))


@pytest.mark.slow
def test_dropout_draws_from_the_generator() -> None:
    leaves = inputs()
    compiled = torch.compile(lambda *x: ats.attend(*x, dropout=0.5), fullgraph=True, backend="aot_eager")
    compiled(*leaves)
    torch.manual_seed(3)
    got = [compiled(*leaves), compiled(*leaves)]
    torch.manual_seed(3)
    wanted = [ats.attend(*leaves, dropout=0.5) for _ in range(2)]
    assert not torch.equal(*got)
    for one, other in zip(got, wanted, strict=True):
        agree(one, other, leaves)


@pytest.mark.slow
def test_gradcheck_of_a_compiled_function() -> None:
    leaves = [*inputs((3, 4), dtype=torch.float64), torch.randn(HEADS, HIDDEN, dtype=torch.float64, requires_grad=True)]
    leaves += [torch.randn(HIDDEN, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def function(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        options = {"score": ats.Additive(*parameters), "mask": ats.Causal("bottom_right")}
        out, stats = ats.attend(query, key, value, **options, return_stats=("log_sum_exp", "entropy"))
        return out, stats.log_sum_exp, stats.entropy

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.autograd.gradcheck(compiled, leaves, fast_mode=True)


# torch's own, where it leaves a graph in the middle.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
def test_what_has_no_operator_breaks_the_graph_and_says_so() -> None:
    leaves = inputs()

    def function(*arrays: Tensor) -> Any:
        return ats.attend(*(x * 2 for x in arrays), score=OwnPlain())

    got, wanted = torch.compile(function, backend="aot_eager")(*leaves), function(*leaves)
    torch.testing.assert_close(got, wanted)
    torch.compiler.reset()
    with pytest.raises(Exception, match="attnscore: no operator for"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)


# torch's own, at its first forward-mode derivative.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_not_lost() -> None:
    """An operator has no tangent, and torch would take it for 0."""
    leaves = [x.detach() for x in inputs()]
    compiled = torch.compile(ats.attend, backend="aot_eager")
    compiled(*leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in leaves]
        got, wanted = (forward_ad.unpack_dual(call(*duals)) for call in (compiled, ats.attend))
    torch.testing.assert_close(got.tangent, wanted.tangent)
    with pytest.raises(Exception, match="attnscore: no operator for"):
        torch.compile(torch.func.grad(lambda *x: ats.attend(*x).sum()), fullgraph=True)(*leaves)


@pytest.mark.slow
def test_a_registered_name_may_mean_a_wrapper_around_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_TABLE", dict(scores._TABLE))
    ats.register_score("capped", lambda: ats.SoftCap("dot", 3.0))
    leaves = inputs()

    def function(*arrays: Tensor) -> Tensor:
        return ats.attend(*arrays, score="capped")

    agree(torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves), function(*leaves), leaves)
    agree(function(*leaves), ats.attend(*leaves, score=ats.SoftCap(ats.Dot(), 3.0)), leaves)


def test_a_model_closed_over_in_a_transform_is_still_trained() -> None:
    """In eager mode: nothing of the call is mapped over, and its gradient flows all the same."""
    leaves, x = inputs(), torch.randn(3)
    mapped = torch.func.vmap(lambda a: a * ats.attend(*leaves).sum())(x)
    wanted = torch.autograd.grad((x * ats.attend(*leaves).sum()).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(mapped.sum(), leaves), wanted)


@pytest.mark.slow
def test_mistakes_are_told_when_the_graph_runs() -> None:
    query, key, value = inputs()
    compiled = torch.compile(lambda *x: ats.attend(*x, valid_lens=[2, 9]), fullgraph=True, backend="aot_eager")
    with pytest.raises(ats.MaskError, match="valid_lens: expected numbers from 0 to 7, got 9"):
        compiled(query, key, value)


def test_exported() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.AdditiveAttention(HIDDEN, query_size=DIM, key_size=DIM)

        def forward(self, queries: Tensor, keys: Tensor, lens: Tensor) -> Tensor:
            return self.attention(queries, keys, keys, lens)

    model, length = Model(), torch.export.Dim("length", min=2, max=64)
    arguments = torch.randn(BATCH, QUERIES, DIM), torch.randn(BATCH, KEYS, DIM), torch.tensor([2, 6])
    exported = torch.export.export(model, arguments, dynamic_shapes=({}, {1: length}, {}))
    other = torch.randn(BATCH, QUERIES, DIM), torch.randn(BATCH, 11, DIM), torch.tensor([3, 11])
    torch.testing.assert_close(exported.module()(*other), model(*other))


# ------------------------------------------------------------------ torch.jit.trace

# torch's own, at every trace, and where a tensor is made inside one.
tracing = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


@tracing
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_trace_computes_other_inputs_anew(call: Call) -> None:
    """A result that a kernel of ours writes is no constant of the trace."""
    function, leaves = call.function(), call.leaves()
    traced = torch.jit.trace(lambda *x: tuple(flat(function(*x))), tuple(call.leaves()), check_trace=False)
    agree(traced(*leaves), function(*leaves), leaves)


@tracing
@pytest.mark.parametrize("kernel", ["auto", "native", "streaming", "dense"])
def test_a_trace_takes_other_sizes(kernel: str) -> None:
    if kernel == "native" and not ats.available()["kernels"]["native"]:
        pytest.skip("no native kernels here")

    def function(query: Tensor, key: Tensor, value: Tensor, lens: Tensor) -> Any:
        later = key.shape[-2] - query.shape[-2]
        mask, bias = ats.Causal(offset=later), np.float32(0.5)
        return ats.attend(query, key, value, mask=mask, valid_lens=lens, bias=bias, kernel=kernel)

    traced = torch.jit.trace(function, (*inputs(), torch.tensor([7, 2])), check_trace=False)
    others = (*inputs((3, 11)), torch.tensor([0, 9]))
    torch.testing.assert_close(traced(*others), function(*others))


@tracing
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_layer_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    layer = MODULES[name]().eval()
    arguments = [torch.randn(BATCH, length, DIM) for length in (QUERIES, KEYS, KEYS)]
    layer(*arguments)
    torch.jit.save(torch.jit.trace(layer, arguments), tmp_path / "layer.pt")
    others = [torch.randn(3, length, DIM) for length in (4, 9, 9)]
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(*others), layer(*others))


OTHER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention_weights": ats.attention_weights,
    "attention_scores": ats.attention_scores,
    "key_mass": ats.key_mass,
    "top_weights": lambda q, k: ats.top_weights(q, k, 2),
    "pooled_weights": lambda q, k: ats.pooled_weights(q, k, (4, 4)),
    "masked_softmax": lambda q, k: ats.masked_softmax(q @ k.mT, mask=ats.Causal("top_left")),
}
CONSTANTS: dict[str, Callable[..., Any]] = {
    "pack_padded": lambda q, k: ats.pack_padded(q[:, 0], k.new_tensor([2, 1], dtype=torch.long))[0],
    "relative_buckets": lambda q, k: q + ats.relative_buckets(k.long()).sum(),
}


# torch's own, where a graph breaks: it asks tensors that are no leaves for a gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_other_functions_break_the_graph(name: str) -> None:
    """Dynamo would read all frames below them one by one, which took minutes in some releases."""
    function, leaves = OTHER_FUNCTIONS[name], inputs()[:2]
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*leaves), function(*leaves))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="only attend and layers are operators"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)


@tracing
def test_other_functions_are_refused_by_a_trace() -> None:
    """Recorded in torch's operations they would be wrong for other sizes, where an axis is 1 without a word."""
    for call in (OTHER_FUNCTIONS | CONSTANTS).values():
        call(*inputs()[:2])  # a plan of an earlier call is no way around
        # make_fx binds each parameter of the signature.
        made = make_fx(lambda *x, call=call: call(*x))
        for record in (lambda *x, call=call: torch.jit.trace(call, x), made):
            with pytest.raises(ats.FrameworkError, match=r"a call outside torch\.jit\.trace and make_fx, which"):
                record(*inputs()[:2])
    assert torch._C._get_tracing_state() is None


@pytest.mark.parametrize("options", [{"tracing_mode": "symbolic"}, {"tracing_mode": "fake"}, {"pre_dispatch": True}])
def test_make_fx_records_an_operator(options: dict[str, Any]) -> None:
    """Also from real tensors, of which it would record the results of native code as constants."""

    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
        return ats.attend(q, k, v, valid_lens=lens)

    made = make_fx(call, **options)(*inputs(), torch.tensor([7, 2]))
    longer = [torch.cat([x, x], -2) if "symbolic" in options.values() else x + 1 for x in inputs()]
    arguments = (*longer, torch.tensor([3, 5]))
    torch.testing.assert_close(made(*arguments), call(*arguments))


@tracing
def test_a_trace_records_an_inverted_mask_and_the_positions_of_a_rotary_embedding() -> None:
    def masked(x: Tensor, padding: Tensor) -> Tensor:
        return ats.attend(x, x, x, mask=ats.KeyPadding.from_ignore(padding))

    def shifted(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q + positions[..., None, None], k

    x, padding = torch.randn(2, 3, DIM), torch.tensor([[False, False, True], [False, True, True]])
    traced = torch.jit.trace(masked, (x, padding))
    torch.testing.assert_close(traced(x, ~padding), masked(x, ~padding))
    layer = layers.MultiHeadAttention(DIM, 1, rotary=shifted)
    layer(x, x, x)
    longer = torch.randn(2, 5, DIM)
    torch.testing.assert_close(torch.jit.trace(layer, (x, x, x))(longer, longer, longer), layer(longer, longer, longer))


@tracing
def test_a_trace_does_not_ask_for_the_weights_of_the_last_call() -> None:
    layer, x = layers.DotProductAttention(), torch.randn(1, 3, DIM)
    layer(x, x, x)
    x += 1  # weights of that call can no longer be computed
    traced = torch.jit.trace(layer, (x, x, x))
    torch.testing.assert_close(traced(x, x, x), layer(x, x, x))


@tracing
def test_what_has_no_operator_is_refused_by_a_trace() -> None:
    with pytest.raises(ats.FrameworkError, match="attend: expected a call that one operator can stand for, while"):
        torch.jit.trace(lambda *x: ats.attend(*x, score=OwnPlain()), inputs())
    # Arrays of another framework are constants of a trace, as they are for torch.
    ones = np.ones((2, 3))
    traced = torch.jit.trace(lambda x: x + torch.from_numpy(ats.attend(ones, ones, ones)).sum(), (torch.zeros(()),))
    assert traced(torch.ones(())) == 7


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace. is deprecated")
def test_numbers_of_any_type_are_written() -> None:
    """As eager calls take them: a seed of 64 bits and more, a share of NumPy's."""
    x = torch.randn(1, 5, 4)

    def call(x: Tensor) -> Tensor:
        return ats.attend(x, x, x, dropout=np.float32(0.5), seed=2**64 + 7)

    torch.testing.assert_close(torch.jit.trace(call, (x,))(x), call(x))


@pytest.mark.parametrize(
    ("head_axis", "statistics", "matrix"),
    [(-3, [], None), (-2, ["log_sum_exp", "entropy", "max_score"], None), (-3, [], "weights")],
)
@pytest.mark.slow_rows("-3-statistics0-None", "-3-statistics2-weights", "-2-statistics1-None")
def test_operators_are_what_torch_asks(head_axis: int, statistics: list[str], matrix: str | None) -> None:
    importlib.import_module("attnscore.integrations.torch_compile")
    expression = (
        "attend(score=Bilinear(arrays[0]), mask=Causal('bottom_right', None), valid_lens=[integers[0], integers[1]], "
        "bias=arrays[1], sink=float(arrays[3]), dropout=float(arrays[4]), seed=arrays[2], kernel='auto', "
        f"head_axis=integers[2], statistics={statistics}, matrix={matrix!r})"
    )
    trained = [torch.randn(DIM, DIM, requires_grad=True), torch.randn((), requires_grad=True)]
    arrays = [*trained, torch.tensor(5), torch.tensor(0.5), torch.tensor(0.25)]
    leaves = [x.detach().transpose(-3, head_axis).contiguous().requires_grad_() for x in inputs()]
    arguments = (*leaves, arrays, [2, 6, head_axis], expression)
    torch.library.opcheck(torch.ops.attnscore.attend.default, arguments)
    outputs = torch.ops.attnscore.attend(*arguments)
    plain = [x.detach() for x in (*map(torch.randn_like, outputs), *outputs, *leaves)]
    wanted = [True, False, True, True, True, False, False, False]
    arguments = (*plain, [x.detach() for x in arrays], [2, 6, head_axis], expression, wanted)
    torch.library.opcheck(torch.ops.attnscore.attend_backward.default, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.name in ("defaults", "additive, lengths", "statistics")]
)
def test_inductor(call: Call) -> None:
    function, leaves = call.function(), call.leaves()
    agree(torch.compile(function, fullgraph=True)(*leaves), function(*leaves), leaves)
