"""Exported programs of `attend` and of the layers: the numbers of eager mode, at sizes that were not seen before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import attnscore as ats
import covering
from attnscore.compat import torch as compat
from attnscore.integrations.torch_export import decompositions
from attnscore.layers.torch import AdditiveAttention, DotProductAttention, MultiHeadAttention
from cases import MASKS, SCORES, Score, Sizes
from layer_cases import LAYERS

OPSETS = (18, 23)
"""Without the operator Attention, and with it."""
UNSEEN = ((3, 9, 12), (2, 8, 3), (1, 1, 11), (4, 2, 1))
"""Batch, queries and keys."""
LONG = (2, 140, 200)
Given = Callable[[int, int, int], list[Tensor]]
"""Makes the arguments of a module for a batch, queries and keys."""
BATCH, QUERIES, KEYS = torch.export.Dim("batch"), torch.export.Dim("queries"), torch.export.Dim("keys")
# torch's own, at each export.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(dynamic_axes|dynamic_shapes|LeafSpec|input_names|axis name).*:UserWarning"),
]


@pytest.fixture(autouse=True)
def seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def part(table: Sequence[Any]) -> Sequence[Any]:
    """A fourth of a table: an exporter takes one to three seconds for each call of `attend`. With --products all."""
    return table if covering.products else table[::4]


def flat(found: Any) -> list[Tensor]:
    """The tensors of nested tuples."""
    if isinstance(found, (tuple, list)):
        return [x for part in found if part is not None for x in flat(part)]
    return [found]


def to_onnx(module: nn.Module, arguments: Sequence[Tensor], dynamic: Any, opset: int) -> torch.onnx.ONNXProgram:
    return torch.onnx.export(
        module.eval(), tuple(arguments), dynamo=True, dynamic_shapes=dynamic, opset_version=opset, verbose=False
    )


def operators(program: torch.onnx.ONNXProgram) -> list[str]:
    return [node.op_type for node in program.model_proto.graph.node]


def run(program: torch.onnx.ONNXProgram, arguments: Sequence[Tensor]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return list(map(torch.from_numpy, session.run(None, dict(zip(names, (x.numpy() for x in arguments), strict=True)))))


def agree(got: Any, wanted: Any, names: Sequence[str] = ()) -> None:
    """To float32 accuracy, of the two computations together."""
    got, wanted = flat(got), flat(wanted)
    assert len(got) == len(wanted)
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        name = names[i] if names else i
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def compare(found: Callable[..., Any], module: nn.Module, given: Given, sizes: Any, names: Sequence[str] = ()) -> None:
    for each in sizes:
        other = given(*each)
        agree(found(*other), module(*other), names)


def check_onnx(
    module: nn.Module,
    given: Given,
    dynamic: Any,
    opset: int = OPSETS[-1],
    seen: tuple[int, int, int] = (2, 5, 7),
    **options: Any,
) -> list[str]:
    """Export a module at some sizes and compare it at others, or without dynamic axes at these; its operators."""
    program = to_onnx(module, given(*seen), dynamic, opset)
    sizes = options.pop("sizes", UNSEEN if dynamic else [seen])
    compare(lambda *other: run(program, other), module, given, sizes, **options)
    return operators(program)


# ---------------------------------------------------------------- scores and masks


class Scores(nn.Module):
    """`attend` with each of some scores."""

    def __init__(self, scores: Sequence[Score], sizes: Sizes) -> None:
        super().__init__()
        self.scores, self.arrays = scores, nn.ParameterList()
        for score in scores:
            shapes = score.shapes(sizes).values()
            self.arrays.append(nn.ParameterList([nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        found = []
        for score, arrays in zip(self.scores, self.arrays, strict=True):
            made = score.make(**dict(zip(score.arrays, arrays, strict=True)))
            found.append(ats.attend(query[..., : score.dims[0]], key[..., : score.dims[1]], value, score=made))
        return found


class Masks(nn.Module):
    """`attend` with each mask of the table, at the lengths of its row."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        found = []
        for case in part(MASKS):
            queries, keys = case.lengths
            sizes = Sizes(queries=queries, keys=keys)
            of_case = query[:, :, :queries], key[:, :, :keys], value[:, :, :keys]
            found.append(ats.attend(*of_case, **case.arguments(sizes)))
        return found


def inputs(batch: int, queries: int, keys: int, dim: int = 6) -> list[Tensor]:
    """Of query, key and value: 4 heads, 2 KV heads."""
    shapes = (batch, 4, queries, dim), (batch, 2, keys, dim), (batch, 2, keys, 3)
    return [torch.randn(shape) for shape in shapes]


OF_ALL = ({0: BATCH, 2: QUERIES}, {0: BATCH, 2: KEYS}, {0: BATCH, 2: KEYS})
ANY_LENGTH = [score for score in SCORES if not {"n", "m", "B"} & {x for axes in score.arrays.values() for x in axes}]
THESE_LENGTHS = [score for score in SCORES if score not in ANY_LENGTH]
SOME = [score for score in ANY_LENGTH if score.name in ("scaled_dot-heads", "additive-tanh-bias", "own-tile")]


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
def test_some_scores(opset: int) -> None:
    found = check_onnx(Scores(SOME, Sizes()), inputs, OF_ALL, opset, names=[score.name for score in SOME])
    assert found.count("Attention") == (opset >= 23)


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
def test_every_score(opset: int) -> None:
    # Of the variants of a score, which follow each other, one in each.
    some = part(ANY_LENGTH[OPSETS.index(opset) :: len(OPSETS)])
    check_onnx(Scores(some, Sizes()), inputs, OF_ALL, opset, names=[score.name for score in some])


@pytest.mark.slow
def test_scores_with_an_array_for_each_position() -> None:
    module = Scores(THESE_LENGTHS, Sizes(queries=5, keys=7))
    check_onnx(module, inputs, None, names=[score.name for score in THESE_LENGTHS])


@pytest.mark.slow
def test_every_mask() -> None:
    check_onnx(Masks(), inputs, None, seen=(2, 11, 12), names=[case.name for case in part(MASKS)])


class Arguments(nn.Module):
    """`attend` with what is given as tensors: a mask, lengths, a bias, offsets; with weights and statistics."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, lens: Tensor, bias: Tensor, offset: Tensor
    ) -> list[Any]:
        causal = ats.Causal("bottom_right")
        return [
            ats.attend(query, key, value, mask=mask),
            ats.attend(query, key, value, valid_lens=lens),
            ats.attend(query, key, value, bias=bias, mask=causal),
            ats.attend(query, key, value, mask=ats.Causal(offset=offset) | ats.Dense(mask), bias=bias, sink=0.5),
            ats.attend(query, key, value, mask=ats.SlidingWindow(1, 0, "top_left") & ~ats.ValidLens(lens)),
            ats.attend(query, key, value, valid_lens=lens, return_weights=True, return_stats=True),
            ats.attend(query.double(), key.double(), value.double(), mask=causal).float(),
            ats.attend(*(x.transpose(1, 2) for x in (query, key, value)), head_axis=-2, mask=ats.Causal("top_left")),
            ats.attend(query[:, 0], key[:, 0], value[:, 0], mask=ats.PrefixLM(1)),
            ats.attend(query[0, 0], key[0, 0], value[0, 0], score="cosine"),
            ats.attend(query[None], key[None], value[None], score=ats.SoftCap("scaled_dot", 2.0), mask=causal),
        ]


def given(batch: int, queries: int, keys: int) -> list[Tensor]:
    lens = torch.arange(batch) * 2 % (keys + 1)
    masked = torch.rand(batch, 1, queries, keys) < 0.5
    masked[:, :, 0] = False
    return [*inputs(batch, queries, keys), masked, lens, torch.randn(4, queries, keys), torch.arange(batch) - 1]


OF_GIVEN = (*OF_ALL, {0: BATCH, 2: QUERIES, 3: KEYS}, {0: BATCH}, {1: QUERIES, 2: KEYS}, {0: BATCH})


@pytest.mark.slow
def test_every_argument() -> None:
    check_onnx(Arguments(), given, OF_GIVEN)


class Biased(nn.Module):
    """16-bit vectors with a bias in float32, whose numbers 16 bits would make infinite."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return ats.attend(query.half(), key.half(), value.half(), bias=bias).float()


def test_a_bias_of_more_digits_than_the_vectors() -> None:
    module, arrays = Biased(), (*inputs(2, 5, 7), torch.tensor([-1e5, 0.0, 7e4, 0.0, 0.0, 0.0, 0.0]))
    program = torch.export.export(module, arrays).run_decompositions(decompositions())
    for bias in (arrays[-1], torch.full((7,), -1e5)):
        wanted = module(*arrays[:3], bias)
        assert bool(wanted.isfinite().all()) and bool(wanted.any())
        torch.testing.assert_close(program.module()(*arrays[:3], bias), wanted, rtol=2e-3, atol=2e-3)


class Positions(nn.Module):
    """A learned bias for each distance: a clipped table with every score of one form, T5's buckets in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.distances, self.buckets = nn.Parameter(torch.randn(4, 9)), nn.Parameter(torch.randn(32, 2))
        self.layer = MultiHeadAttention(6, 2, query_size=6, key_size=6, value_size=3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        queries, keys = query.shape[2], key.shape[2]
        positions: Any = ats.relative_positions(queries, keys, offset=keys - queries)
        bias = self.distances[:, None, positions.clip(-4, 4) + 4]
        buckets = ats.relative_buckets(positions, bidirectional=False)
        return [
            ats.attend(query, key, value, bias=bias),
            ats.attend(query, key, value, bias=bias, score=ats.SoftCap("dot", 2.0), mask=ats.Causal("bottom_right")),
            self.layer(query[:, 0], key[:, 0], value[:, 0], bias=self.buckets[buckets].T[:, None]),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
def test_a_bias_by_relative_position(opset: int) -> None:
    found = check_onnx(Positions(), inputs, OF_ALL, opset, sizes=(*UNSEEN, LONG))
    assert found.count("Attention") == 2 * (opset >= 23)


@pytest.mark.slow
def test_a_bias_by_relative_position_in_primitive_operators() -> None:
    module = Positions()
    compare(primitive(module, inputs(2, 5, 7), OF_ALL).module(), module, inputs, (*UNSEEN[:2], LONG))


@pytest.mark.slow
def test_a_bias_of_another_length_stays_one_for_each_key() -> None:
    class Keys(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            return ats.attend(query, key, value, bias=bias)

    program = primitive(Keys(), [*inputs(2, 5, 7), torch.randn(1, 7)], (*OF_ALL, {1: KEYS})).module()
    other = [*inputs(3, 9, 12), torch.randn(1, 12)]
    agree(program(*other), Keys()(*other))


class Normalizers(nn.Module):
    """`attend` with normalizers other than the softmax."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lens: Tensor) -> list[Tensor]:
        named: tuple[Any, ...] = ("sigmoid", "sparsemax", ats.Entmax(1.5))
        return [ats.attend(query, key, value, valid_lens=lens, normalizer=x) for x in named]


OF_LENGTHS = (*OF_ALL, {0: BATCH})


def with_lengths(batch: int, queries: int, keys: int) -> list[Tensor]:
    return [*inputs(batch, queries, keys), torch.arange(batch) * 2 % (keys + 1)]


@pytest.mark.slow
def test_normalizers() -> None:
    assert "Attention" not in check_onnx(Normalizers(), with_lengths, OF_LENGTHS, sizes=(*UNSEEN, LONG))


# ---------------------------------------------------------------- layers


class Layers(nn.Module):
    """Every layer of the table, with lengths and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([case.make() for case in part(LAYERS)])

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, lens: Tensor) -> list[Tensor]:
        found = []
        for case, layer in zip(part(LAYERS), self.layers, strict=True):
            of_case = queries[..., : case.query_size], keys[..., : case.key_size], values
            options: list[dict[str, Any]] = [{"valid_lens": lens}, {"mask": ats.Causal("top_left")}]
            found.append(layer(*of_case, **options[len(found) % 2]))
        return found


def features(batch: int, queries: int, keys: int) -> list[Tensor]:
    shapes = (batch, queries, 20), (batch, keys, 7), (batch, keys, 4)
    return [*(torch.randn(shape) for shape in shapes), torch.arange(batch) * 2 % (keys + 1)]


OF_FEATURES = ({0: BATCH, 1: QUERIES}, {0: BATCH, 1: KEYS}, {0: BATCH, 1: KEYS}, {0: BATCH})


@pytest.mark.slow
def test_every_layer() -> None:
    check_onnx(Layers(), features, OF_FEATURES, names=[case.name for case in part(LAYERS)])


class DropIns(nn.Module):
    """The drop-ins for torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = compat.MultiheadAttention(8, 2, batch_first=True)
        self.further = compat.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)

    def forward(self, query: Tensor, key: Tensor, ignored: Tensor) -> list[Any]:
        split = [x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (query, key, key)]
        return [
            self.heads(query, key, key, key_padding_mask=ignored),
            self.heads(query, key, key, key_padding_mask=ignored, need_weights=False)[0],
            self.further(query, key, key, average_attn_weights=False),
            compat.scaled_dot_product_attention(*split, is_causal=True),
            compat.scaled_dot_product_attention(*split, attn_mask=~ignored[:, None, None], scale=0.3),
        ]


def words(batch: int, queries: int, keys: int) -> list[Tensor]:
    ignored = torch.arange(keys) >= torch.arange(1, batch + 1)[:, None]
    return [torch.randn(batch, queries, 8), torch.randn(batch, keys, 8), ignored]


OF_WORDS = ({0: BATCH, 1: QUERIES}, {0: BATCH, 1: KEYS}, {0: BATCH, 1: KEYS})


@pytest.mark.slow
def test_drop_ins() -> None:
    check_onnx(DropIns(), words, OF_WORDS)


# ---------------------------------------------------------------- what cannot be exported


@pytest.mark.slow
def test_dropout_is_refused() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ats.attend(x, x, x, dropout=0.5)

    x = torch.randn(2, 5, 4)
    # The exporter then traces once more by the compiler, whose message, without our reason, is the one that leaves it.
    with pytest.raises(Exception, match="dropout"):
        to_onnx(Dropping(), [x], None, 18)
    # In eval mode a layer drops nothing.
    assert "Dropout" not in operators(to_onnx(DotProductAttention(dropout=0.5), [x, x, x], None, 18))


# ---------------------------------------------------------------- torch.export and AOTInductor

# A program of torch.export fixes sizes of 1 (its own rule).
LARGER = [sizes for sizes in UNSEEN if 1 not in sizes]
PROGRAMS = {
    "scores": (lambda: Scores(part(ANY_LENGTH), Sizes()), inputs, OF_ALL),
    "arguments": (Arguments, given, OF_GIVEN),
    "positions": (Positions, inputs, OF_ALL),
    "layers": (Layers, features, OF_FEATURES),
    "drop-ins": (DropIns, words, OF_WORDS),
}


def primitive(module: nn.Module, arguments: Sequence[Tensor], dynamic: Any) -> torch.export.ExportedProgram:
    program = torch.export.export(module.eval(), tuple(arguments), dynamic_shapes=dynamic)
    program = program.run_decompositions(decompositions())
    assert "attnscore" not in str(program.graph)
    return program


@pytest.mark.slow
def test_a_layer_in_primitive_operators() -> None:
    layer = AdditiveAttention(8, query_size=20, key_size=7)
    compare(primitive(layer, features(2, 5, 7), OF_FEATURES).module(), layer, features, LARGER)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_aot_inductor(name: str, tmp_path: Path) -> None:
    make, arguments, dynamic = PROGRAMS[name]
    module = make()
    program = primitive(module, arguments(2, 5, 7), dynamic)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    compare(torch._inductor.aoti_load_package(package), module, arguments, LARGER)
