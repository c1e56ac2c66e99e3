"""TensorFlow: the tables in eager calls and in graphs, and what its users expect beside them.

Rows follow the rule of ``cases.in_turn``; a graph takes seconds to make, so there each form of score and each dtype
stands once, and the rest with `--products`. Graphs are made with and without XLA, with lengths that they do not know,
and exported; gradients come from one tape and from two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import attnscore as ats
import covering
from attnscore.kernels.native.plan import NativePlan
from attnscore.testing import check_framework, check_score
from bad_input import CASES, Case
from bad_input.table import Maker
from cases import DTYPES, SCORES_WITH_ARRAYS, SOME_MASKS, SOME_SCORES, in_turn
from covering import pairs, some
from harness import EXTRAS, array, make_call
from own_scores import OwnAbsolute, OwnPlain

pytestmark = pytest.mark.usefixtures("small_tiles", "one_thread")
TURNS = in_turn(DTYPES, tuple(EXTRAS))
rows = some("score,mask,dtype,extras", TURNS[::2], TURNS, slow=TURNS[1::2])
RNG = np.random.default_rng(0)


def graph(function: Any) -> Any:
    return tf.function(function)


def xla(function: Any) -> Any:
    return tf.function(function, jit_compile=True)


# ------------------------------------------------------------------ the tables


@rows
def test_eager(score: str, mask: str, dtype: str, extras: str) -> None:
    # Not seed 0: there a Gaussian in float64 is off by 8.3 roundings of scores of 40, once in 300 draws, in all
    # frameworks; the largest error of the plain version in these draws is 7.7, of another one.
    call = make_call(score, mask, dtype, extras, seed=1)
    call.check(call.tensorflow())


@some("score,mask,dtype,extras", TURNS[::10], TURNS, slow=TURNS[5::10])
def test_eager_streaming(score: str, mask: str, dtype: str, extras: str) -> None:
    call = make_call(score, mask, dtype, extras)
    call.check(call.tensorflow(kernel="streaming"))


@pytest.mark.slow
@some(
    "score,mask",
    [("scaled_dot-heads", "nested")],
    [(score, mask.name) for score in ("scaled_dot-heads", "additive-tanh-bias") for mask in SOME_MASKS],
    slow=[("additive-tanh-bias", "valid_lens-2d"), ("scaled_dot-heads", "none")],
)
def test_graphs_of_rolled_loops(score: str, mask: str) -> None:
    call = make_call(score, mask, "float64", "hiding-bias")
    call.check(call.tensorflow(graph))


# The others in tiles of their usual size: a graph of many small tiles takes seconds to make.


@pytest.mark.slow
@some(
    "score,dtype",
    [
        ("scaled_dot-heads", "float64"),
        ("additive-gelu-heads", "bfloat16"),
        ("gaussian-heads", "float32"),
        ("own-tile_gradient", "float16"),
    ],
    [(score.name, dtype) for score in SOME_SCORES for dtype in DTYPES],
)
def test_graphs(score: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    call = make_call(score, "nested", dtype, "bias-sink")
    call.check(call.tensorflow(graph))


@some(
    "score,mask",
    [("additive-gelu-heads", "none")],
    [(s, mask) for s in ("scaled_dot", "additive-gelu-heads", "own-tile") for mask in ("none", "valid_lens-2d")],
)
def test_xla(score: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    call = make_call(score, mask, "float32", "bias-sink")
    call.check(call.tensorflow(xla))


@pytest.mark.slow
def test_xla_with_rolled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", 6)
    call = make_call("scaled_dot", "Causal-bottom_right", "float64", "hiding-bias")
    call.check(call.tensorflow(xla))


@pairs(
    score=SCORES_WITH_ARRAYS,
    dtypes={"-".join(x): x for x in (("float32", "float64"), ("float64", "float32"))},
    kernel=("auto", "streaming", "dense"),
)
def test_arrays_of_another_dtype(
    score: str, dtypes: tuple[str, str], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow converts no dtype by itself."""
    monkeypatch.undo()
    call = make_call(score, "nested", dtypes[0], "bias-sink").with_extras_in(dtypes[1])
    call.check(call.tensorflow(kernel=kernel))


@pytest.mark.slow
@some(
    "score,compiled",
    [("scaled_dot-heads", graph), ("gaussian-heads", xla)],
    [(score, compiled) for score in ("scaled_dot-heads", "gaussian-heads", "own-tile") for compiled in (graph, xla)],
    slow=[("own-tile", graph)],
)
def test_arrays_of_another_dtype_in_graphs(score: str, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    call = make_call(score, "none", "float32", "bias-sink").with_extras_in("float64")
    call.check(call.tensorflow(compiled))


@pytest.mark.slow
def test_words_kernels_and_gradients() -> None:
    check_framework(tf.zeros(1, tf.float64))


def test_an_own_score_with_tile_alone() -> None:
    check_score(OwnAbsolute(tf.constant(0.7, tf.float64)), like=tf.zeros(1, tf.float64))


@pytest.mark.parametrize("compiled", [lambda call: call, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("read", [tf.convert_to_tensor, tf.nn.softplus, lambda x: tf.gather(x, 0)])
@pytest.mark.parametrize("make", [tf.Variable, tf.constant])
def test_an_array_that_no_gradient_reaches_is_an_error(compiled: Any, read: Any, make: Any) -> None:
    factor = make([1.5])

    class Product:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return read(factor) * ops.matmul(query, ops.swapaxes(key, -1, -2))

    x = tf.ones((3, 2))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, factor])
            out = ats.attend(x, x, x, score=Product(), kernel="streaming")
        return tape.gradient(out, factor)

    with pytest.raises(ats.ArgumentError, match="score: expected a dataclass whose fields are its"):
        compiled(gradient)()


def test_a_score_of_a_wider_dtype_with_statistics_in_a_graph() -> None:
    """Outputs have the dtype of the value, as in an eager call."""
    query, key, value = (tf.cast(x, tf.float32) for x in inputs())
    score = ats.Bilinear(tf.constant(RNG.standard_normal((query.shape[-1], key.shape[-1]))))

    def call(query: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([query, score.W])
            out, stats = ats.attend(query, key, value, score=score, return_stats=True)
        return out, stats.entropy, *tape.gradient(out, [query, score.W])

    for ours, theirs in zip(tf.function(call)(query), call(query), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# A graph does not know what a tape around it watches.
@pytest.mark.parametrize(
    ("case", "compiled"),
    [(case, compiled) for case in ("stopped", "not trainable") for compiled in (functools.partial, tf.function)]
    + [("not watched", functools.partial)],
)
def test_a_variable_that_needs_no_gradient(case: str, compiled: Any) -> None:
    factor = tf.Variable(1.5, trainable=case != "not trainable", dtype=tf.float64)
    read = tf.stop_gradient if case == "stopped" else tf.convert_to_tensor
    x = tf.constant(RNG.standard_normal((3, 2)))

    class Product:
        def tile(self, ops: Any, query: Any, key: Any) -> Any:
            return read(factor) * ops.matmul(query, ops.swapaxes(key, -1, -2))

    def gradient(score: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=case != "not watched") as tape:
            tape.watch(x)
            out = ats.attend(x, x, x, score=score) ** 2
        return tape.gradient(out, x)

    np.testing.assert_allclose(compiled(lambda: gradient(Product()))(), gradient(1.5 * ats.Dot()), atol=1e-11)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_offset_in_a_variable(jit: bool) -> None:
    offset, x = tf.Variable(1), tf.constant(RNG.standard_normal((5, 3)))

    def gradient(offset: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = ats.attend(x, x, x, mask=ats.Causal(offset=offset)) ** 2
        return tape.gradient(out, x)

    compiled = tf.function(lambda: gradient(offset), jit_compile=jit)
    np.testing.assert_allclose(compiled(), gradient(1), atol=1e-11)


# -------------------------------------------------------- what a graph does not know


def inputs(dtype: Any = tf.float64) -> list[Any]:
    shapes = (2, 4, 9, 5), (2, 2, 11, 5), (2, 2, 11, 3)
    return [tf.constant(np.random.default_rng(i).standard_normal(shape), dtype) for i, shape in enumerate(shapes)]


def with_gradients(**arguments: Any) -> Callable[..., Any]:
    def call(query: Any, key: Any, value: Any, lens: Any = None) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            out, stats = ats.attend(query, key, value, valid_lens=lens, return_stats=("entropy",), **arguments)
            loss = tf.reduce_sum(out**2) + tf.reduce_sum(stats.entropy**2)
        return [out, *tape.gradient(loss, [query, key, value])]

    return call


UNKNOWN: dict[str, Callable[[Any], list[Any]]] = {
    "batch": lambda shape: [None, *shape[1:]],
    "lengths": lambda shape: [*shape[:2], None, shape[3]],
    "both": lambda shape: [None, shape[1], None, shape[3]],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ats.Causal("bottom_right")},
    "gaussian, dropout": {"score": "gaussian", "dropout": 0.3, "seed": 5},
    "cosine": {"score": ats.Cosine(3.0)},
    "streaming": {"kernel": "streaming"},
}


@some(
    "unknown,arguments,jit",
    [("both", "causal", False), ("batch", "gaussian, dropout", False), ("batch", "streaming", False)],
    [(unknown, arguments, jit) for unknown in UNKNOWN for arguments in ARGUMENTS for jit in (False, True)],
    slow=[("both", "plain", False), ("lengths", "cosine", False), ("lengths", "plain", True)],
)
@pytest.mark.slow_rows("both-causal-*", "batch-gaussian, dropout-False")
def test_unknown_lengths(unknown: str, arguments: str, jit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for inputs of several sizes, lengths as a tensor."""
    monkeypatch.undo()
    monkeypatch.setattr("attnscore.base.thresholds.LONGEST_KEY_TILE", 4)
    call = with_gradients(**ARGUMENTS[arguments])
    arrays = [*inputs(), tf.constant([4, 0])]
    signature = [tf.TensorSpec(UNKNOWN[unknown](x.shape), x.dtype) for x in arrays[:3]]
    compiled = tf.function(call, input_signature=[*signature, tf.TensorSpec([None], tf.int32)], jit_compile=jit)
    parts = [arrays]
    if unknown != "lengths":
        parts += [[arrays[0][:1], *arrays[1:]], [x[:1] for x in arrays]]
        parts.append([arrays[0], *(x[:1] for x in arrays[1:3]), arrays[3]])
    if unknown != "batch":
        parts.append([arrays[0][:, :, :3], *(x[:, :, :4] for x in arrays[1:3]), arrays[3]])
    for part in parts[: 2 if jit else 5]:
        for found, wanted in zip(compiled(*part), call(*part), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, atol=1e-11)
    assert compiled.experimental_get_tracing_count() == 1


MASKS_OF_A_TENSOR: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "Packed": (lambda x: ats.Packed(x, [0, 3, 3, 11]).causal("bottom_right"), np.array([0, 4, 6, 9])),
    "KeyPadding": (ats.KeyPadding, RNG.random((2, 11)) < 0.6),
    "Dense": (ats.Dense, RNG.random((2, 4, 9, 11)) < 0.5),
    "array": (lambda x: x, RNG.random((2, 1, 1, 11)) < 0.5),
    "Causal": (lambda x: ats.Causal(offset=x), np.array([2, -3])),
    "Documents": (ats.Documents, np.sort(RNG.integers(-1, 3, (2, 9)))),
}


@pytest.mark.slow
@some("name", ["Packed", "Dense"], MASKS_OF_A_TENSOR, slow=["KeyPadding", "array", "Causal", "Documents"])
def test_masks_of_unknown_lengths(name: str) -> None:
    query, key, value = inputs()
    if name == "Documents":
        key = value = query  # as many keys as queries
    make, x = MASKS_OF_A_TENSOR[name]
    specs = [tf.TensorSpec([None, x.shape[1], None, x.shape[3]], x.dtype) for x in (query, key, value)]
    compiled = tf.function(
        lambda q, k, v, x: ats.attend(q, k, v, mask=make(x)),
        input_signature=[*specs, tf.TensorSpec([None, *x.shape[1:-1], *[None] * (x.ndim > 1)], x.dtype)],
    )
    # A query of batch 1 takes on that of the keys.
    for part in (query, query[:1]):
        wanted = ats.attend(part, key, value, mask=make(x))
        np.testing.assert_allclose(compiled(part, key, value, x), wanted, atol=1e-12)


# For 6 queries and keys in 3 batches of 4 heads: shapes that fit, and shapes that do not.
FITTING: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "key_padding": (ats.KeyPadding, [(3, 6), (1, 6)], [(3, 5), (3, 1), (3, 7), (2, 6)]),
    "mask": (ats.Dense, [(3, 4, 6, 6), (3, 4, 1, 6), (3, 1, 6, 1)], [(3, 4, 6, 5), (3, 4, 5, 6), (3, 4, 6, 7)]),
    "query_ids": (ats.Documents, [(3, 6), (1, 6)], [(3, 5), (3, 1), (3, 7)]),
    "key_ids": (lambda x: ats.Documents(tf.zeros((3, 6), tf.int64), x), [(3, 6), (1, 6)], [(3, 5), (3, 7), (2, 6)]),
    "valid_lens": (ats.ValidLens, [(3, 6), (3, 1), (1, 6)], [(3, 5), (3, 7)]),
    "offset": (lambda x: ats.Causal(offset=x[:, 0]), [(3, 1), (1, 1)], [(2, 1)]),
    "cu_key": (lambda x: ats.Packed([0, 4, 6], tf.cumsum(x[:, 0], exclusive=True)), [(3, 1)], [(2, 1), (4, 1)]),
    "start": (lambda x: ~ats.KeyRange(x[:, 0], 6) & ats.Causal("top_left"), [(3, 1)], [(2, 1)]),
}


@pytest.mark.slow
@some(
    "name,how",
    [("mask", "native"), ("key_padding", "streaming")],
    [(name, how) for name in FITTING for how in ("native", "streaming", "xla")],
    slow=[
        *(("key_ids", "native"), ("start", "native"), ("query_ids", "streaming"), ("cu_key", "streaming")),
        *(("offset", "native"), ("valid_lens", "streaming"), ("key_padding", "xla")),
    ],
)
def test_a_mask_that_turns_out_not_to_fit(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the mask's shape is known when the graph is made; of the arrays' in one graph, but not in another."""
    monkeypatch.undo()
    if how == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))
    make, right, wrong = FITTING[name]
    dtype = tf.bool if name in ("key_padding", "mask") else tf.int64
    query = tf.constant(RNG.standard_normal((3, 4, 6, 5)))
    spec = tf.TensorSpec([None] * len(right[0]), dtype)
    options = {"kernel": "streaming" if how == "streaming" else "auto"}
    for shape in ([None, 4, None, 5], query.shape):
        compiled = tf.function(
            lambda q, x: ats.attend(q, q, q, mask=make(x), **options),
            input_signature=[tf.TensorSpec(shape, query.dtype), spec],
            jit_compile=how == "xla",
        )
        for fits in right:
            x = tf.cast(RNG.integers(0, 2, fits), dtype)
            np.testing.assert_allclose(compiled(query, x), ats.attend(query, query, query, mask=make(x)), atol=1e-12)
        for misfits in wrong:
            x = tf.ones(misfits, dtype)
            with pytest.raises(ats.MaskError) as eager:
                ats.attend(query, query, query, mask=make(x))
            with pytest.raises(tf.errors.InvalidArgumentError) as found:
                compiled(query, x)
            assert how != "native" or f"MaskError: {eager.value}" in found.value.message


@pytest.mark.slow
@some(
    "knows,how",
    [("nothing", "native")],
    [(knows, how) for knows in ("nothing", "lengths") for how in ("native", "streaming", "xla")],
    slow=[("nothing", "streaming"), ("lengths", "native")],
)
def test_a_bias_of_unknown_shape(knows: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any axis of it may turn out to be broadcast, the axis of heads too; its gradient then has that shape."""
    monkeypatch.undo()
    monkeypatch.setattr("attnscore.base.thresholds.LONGEST_KEY_TILE", 4)
    if how == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))

    def call(query: Any, key: Any, value: Any, bias: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value, bias])
            out = ats.attend(query, key, value, bias=bias, kernel="streaming" if how == "streaming" else "auto")
            loss = tf.reduce_sum(out**2)
        return [out, *tape.gradient(loss, [query, key, value, bias])]

    arrays = inputs()
    specs = [tf.TensorSpec(x.shape if knows == "lengths" else UNKNOWN["both"](x.shape), x.dtype) for x in arrays]
    compiled = tf.function(
        call, input_signature=[*specs, tf.TensorSpec([None] * 4, tf.float64)], jit_compile=how == "xla"
    )
    for shape in ((2, 4, 9, 11), (1, 1, 9, 11), (2, 4, 1, 11), (1, 4, 9, 1)):
        bias = tf.constant(RNG.standard_normal(shape))
        for query in (arrays[0], *([] if knows == "lengths" else [arrays[0][:1]])):
            for found, wanted in zip(compiled(query, *arrays[1:], bias), call(query, *arrays[1:], bias), strict=True):
                assert found.shape == wanted.shape
                np.testing.assert_allclose(found, wanted, atol=1e-11)
    for shape in ((2, 4, 9, 10), (2, 4, 9, 12), (2, 4, 8, 11), (2, 2, 9, 11)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            compiled(*arrays, tf.zeros(shape, tf.float64))


@pytest.mark.parametrize("kernel", ["native", "streaming"])
@pytest.mark.slow_rows("native")
def test_a_row_of_biases_beside_unknown_lengths(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number for each key (11), or for each relative position (9 + 11 - 1)."""
    monkeypatch.undo()
    if kernel == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))

    def call(query: Any, key: Any, value: Any, bias: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value, bias])
            loss = ats.attend(query, key, value, bias=bias, kernel=kernel) ** 2
        return [loss, *tape.gradient(loss, [query, key, value, bias])]

    arrays = inputs()
    for size in (11, 19):
        bias = tf.constant(RNG.standard_normal((4, 1, size)))
        signature = [
            *(tf.TensorSpec(UNKNOWN["both"](x.shape), x.dtype) for x in arrays),
            tf.TensorSpec.from_tensor(bias),
        ]
        for found, wanted in zip(tf.function(call, signature)(*arrays, bias), call(*arrays, bias), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [5, 7])
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_known_numbers_that_turn_out_not_to_fit(kernel: str, keys: int) -> None:
    query, mask = tf.ones((3, 4, 6, 5)), ats.KeyPadding(np.ones((3, keys), bool))
    compiled = tf.function(
        lambda q: ats.attend(q, q, q, mask=mask, kernel=kernel), input_signature=[tf.TensorSpec([None, 4, None, 5])]
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        compiled(query)


@pytest.mark.parametrize(
    ("known", "how"),
    [(name, how) for name in ("key", "value") for how in ("streaming", "auto", "xla")] + [("value", "dense")],
)
@pytest.mark.slow_rows("value-*", "*-auto", "key-xla")
def test_one_key_that_only_one_array_knows(known: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arrays = [tf.constant(RNG.standard_normal((2, n, 4)), tf.float32) for n in (3, 1, 1)]
    key, value = ([2, 1 if name == known else None, 4] for name in ("key", "value"))
    signature = [tf.TensorSpec(shape) for shape in ([2, 3, 4], key, value)]
    kernel = "auto" if how == "xla" else how
    call = tf.function(lambda *x: ats.attend(*x, kernel=kernel), signature, jit_compile=how == "xla")
    np.testing.assert_allclose(call(*arrays), tf.broadcast_to(arrays[2], (2, 3, 4)), atol=1e-6)


def test_a_batch_that_only_the_values_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arrays = [tf.constant(RNG.standard_normal((2, n, 4))) for n in (3, 5, 5)]
    signature = [tf.TensorSpec(shape, tf.float64) for shape in ([None, 3, 4], [None, 5, 4], [2, 5, 4])]
    np.testing.assert_allclose(tf.function(ats.attend, signature)(*arrays), ats.attend(*arrays), atol=1e-12)


@pytest.mark.parametrize("how", ["native", "streaming", "xla"])
@pytest.mark.slow_rows("native", "xla")
def test_sizes_that_turn_out_not_to_fit(how: str) -> None:
    """XLA alone would multiply such matrices, and tiles would end where the value ends."""
    if how == "native" and not (works := ats.available()["kernels"]["native"]):
        pytest.skip(str(works))
    kernel = "auto" if how == "xla" else how
    spec = tf.TensorSpec([None, None, 4])
    call = tf.function(lambda *x: ats.attend(*x, kernel=kernel), [spec] * 3, jit_compile=how == "xla")
    for batches, keys in (((2, 3, 3), (5, 5)), ((3, 3, 2), (5, 5)), ((2, 2, 2), (6, 5)), ((2, 2, 2), (5, 6))):
        arrays = [tf.ones((batch, n, 4)) for batch, n in zip(batches, (5, *keys), strict=True)]
        # Of the operations that fail, any may be the first.
        with pytest.raises(tf.errors.InvalidArgumentError, match="expected" if how == "native" else None):
            call(*arrays)


@pytest.mark.slow
def test_what_must_be_known_is_said_when_the_graph_is_made() -> None:
    spec = tf.TensorSpec([2, None, None], tf.float32)
    with pytest.raises(ats.ShapeError, match=r"query: expected a last axis .* known .*ensure_shape"):
        tf.function(lambda x: ats.attend(x, x, x)).get_concrete_function(spec)
    with pytest.raises(ats.FrameworkError, match="a tensor of unknown rank"):
        tf.function(lambda x: ats.attend(x, x, x)).get_concrete_function(tf.TensorSpec(None, tf.float32))
    with pytest.raises(ats.MaskError, match="alignment"):
        spec = tf.TensorSpec([2, None, 4], tf.float32)
        tf.function(lambda x, y: ats.attend(x, y, y, mask=ats.Causal())).get_concrete_function(spec, spec)
    with pytest.raises(ats.ShapeError, match="value"):
        tf.function(lambda x: ats.attend(x, x, x[:, :2])).get_concrete_function(tf.TensorSpec([2, 5, 4], tf.float32))


@pytest.mark.slow
def test_no_array_grows_with_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph of 512 tokens and tiles of 64 no tensor, gradients included, is as large as 512 x 512."""
    monkeypatch.setattr("attnscore.base.thresholds.TILE_SCORES", 2**12)
    spec = tf.TensorSpec([1, 1, 512, 4], tf.float32)
    made = tf.function(with_gradients(mask=ats.Causal())).get_concrete_function(spec, spec, spec)
    graphs, sizes = [made.graph], []
    while graphs:
        here = graphs.pop()
        graphs += [here._get_function(name).graph for name in _functions(here)]
        sizes += [
            int(np.prod(x.shape)) for op in here.get_operations() for x in op.outputs if x.shape.is_fully_defined()
        ]
    assert len(sizes) > 100
    assert max(sizes) < 512 * 512 / 8


def _functions(here: Any) -> list[str]:
    """Functions that the loops and branches of a graph call."""
    found = []
    for op in here.get_operations():
        for name in ("body", "then_branch", "else_branch", "f"):
            if name in op.node_def.attr and op.node_def.attr[name].func.name:
                found.append(op.node_def.attr[name].func.name)
    return [name for name in found if here._get_function(name) is not None]


# ------------------------------------------------------------------- gradients


@pytest.mark.slow
@pytest.mark.parametrize("score", [score.name for score in SOME_SCORES if score.smooth])
def test_second_derivatives(score: str) -> None:
    """A tape around a tape, against central differences of the gradient."""
    call = make_call(score, "valid_lens-empty", "float64", "sink")
    arrays = {name: tf.constant(x) for name, x in call.leaves.items()}
    wanted = {name: tf.constant(RNG.standard_normal(x.shape)) for name, x in call.leaves.items()}

    def slope(leaves: Any) -> Any:
        own = {name: leaves[f"score.{name}"] for name in call.arrays}
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            made = call.score.make(**own)
            out, stats = ats.attend(
                *(leaves[n] for n in ("query", "key", "value")), score=made, sink=leaves["sink"],
                return_stats=("entropy",), **call.arguments,
            )  # fmt: skip
            loss = tf.reduce_sum(out**2) + tf.reduce_sum(stats.entropy**2)
        grads = tape.gradient(loss, leaves)
        return sum(tf.reduce_sum(grads[name] * wanted[name]) for name in leaves)

    with tf.GradientTape() as outer:
        outer.watch(arrays)
        total = slope(arrays)
    second = outer.gradient(total, arrays, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    step = 1e-5
    for name, x in arrays.items():
        direction = RNG.standard_normal(x.shape)
        ends = [float(slope({**arrays, name: x + sign * step * direction})) for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        assert abs(float(tf.reduce_sum(second[name] * direction)) - difference) < 1e-5 * max(1, abs(difference)), name


@pytest.mark.slow
@pytest.mark.parametrize("mask", [ats.Causal("top_left"), ats.KeyPadding(np.arange(40)[None] % 3 > 0)])
def test_second_derivatives_of_loops_under_xla(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA differentiates a loop over tiles, as it knows the most tiles."""
    monkeypatch.setattr("attnscore.base.thresholds.SMALLEST_TILE", 8)
    arrays = [tf.constant(RNG.standard_normal((1, 40, 4))) for _ in range(3)]

    def second(kernel: str) -> Any:
        def run(query: Any, key: Any, value: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch((query, key, value))
                with tf.GradientTape() as tape:
                    tape.watch(query)
                    loss = tf.reduce_sum(ats.attend(query, key, value, mask=mask, kernel=kernel) ** 3)
                total = tf.reduce_sum(tf.sin(tape.gradient(loss, query)))
            return outer.gradient(total, (query, key, value))

        return run

    compiled = xla(second("auto"))
    kinds = [op.type for op in compiled.get_concrete_function(*arrays).graph.get_operations()]
    assert "While" in kinds or "StatelessWhile" in kinds
    for got, exact in zip(compiled(*arrays), second("dense")(*arrays), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_nothing_hidden_reaches_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in hidden keys and values changes no result and no gradient, eager and in graphs; empty rows are zero."""
    monkeypatch.undo()
    query, key, value = inputs(tf.float32)
    dirty = [x.numpy() for x in (key, value)]
    for x in dirty:
        x[0, :, 4:] = np.nan
        x[1] = np.inf
    lens = tf.constant([4, 0])
    call = with_gradients(score=ats.Cosine())
    clean = call(query, key, value, lens)
    for how in (lambda f: f, graph, xla):
        found = how(call)(query, *map(tf.constant, dirty), lens)
        for one, other in zip(found, clean, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        assert not np.asarray(found[0])[1].any()


HOLDERS: dict[str, Callable[..., Any]] = {
    "query": lambda x, to: ats.attend(to(x[0]), *x[1:]),
    "key and value": lambda x, to: ats.attend(x[0], to(x[1]), to(x[2]), score="gaussian"),
    "w_v": lambda x, to: ats.attend(*x, score=ats.Additive(to(x[0][0, 0]))),
    "projections": lambda x, to: ats.attend(*x, score=ats.Additive(x[0][0, 0], to(x[0][0, :5]), to(x[1][0, :5]))),
    "W": lambda x, to: ats.attend(*x, score=ats.Bilinear(to(x[0][0, :5]))),
    "bandwidth": lambda x, to: ats.attend(*x, score=ats.Gaussian(to(tf.constant(0.7, x[0].dtype)))),
    "a wrapped score": lambda x, to: ats.attend(*x, score=ats.Additive(to(x[0][0, 0])) + ats.ScaledDot()),
    "bias": lambda x, to: ats.attend(*x, bias=to(tf.matmul(x[0], x[1], transpose_b=True)[0])),
    "sink": lambda x, to: ats.attend(*x, sink=to(x[0][0, 0, 0])),
    "lengths": lambda x, to: ats.attend(*x, valid_lens=to(tf.constant([3, 6]))),
    "weights alone": lambda x, to: ats.attention_weights(x[0], x[1], score=ats.Additive(to(x[0][0, 0]))),
}


@pytest.mark.parametrize("held", HOLDERS)
def test_variables_run_as_the_arrays_that_they_hold(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same plans (weights alone have none for them), to the last bit, with a gradient for the variable."""
    runs: list[bool] = []
    run = NativePlan.run
    monkeypatch.setattr(NativePlan, "run", lambda plan, arguments: runs.append(True) or run(plan, arguments))
    x = [tf.constant(RNG.standard_normal((2, n, 5))) for n in (6, 7, 7)]
    variables: list[Any] = []

    def variable(x: Any) -> Any:
        variables.append(tf.Variable(x))
        return variables[-1]

    def watched(x: Any) -> Any:
        tape.watch(x)
        return x

    with tf.GradientTape() as tape:
        wanted = HOLDERS[held](x, watched)
    planned = len(runs)
    with tf.GradientTape() as tape:
        found = HOLDERS[held](x, variable)
    np.testing.assert_array_equal(found, wanted)
    assert held == "weights alone" or len(runs) == 2 * planned
    grads = tape.gradient(found, variables)
    assert all((grad is None) == (x.dtype == tf.int32) for grad, x in zip(grads, variables, strict=True))


def test_variables_and_layers_of_the_caller() -> None:
    weight = tf.Variable(RNG.standard_normal((5, 5)))
    x = tf.Variable(RNG.standard_normal((2, 7, 5)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(ats.attend(x, x, x, score=ats.Bilinear(weight)) ** 2)
    assert all(bool(tf.reduce_any(grad != 0)) for grad in tape.gradient(loss, [x, weight]))
    found, wanted = ats.attend(x, x, x, score=OwnPlain()), ats.attend(*[x.numpy()] * 3, score=OwnPlain())
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_a_tape_that_stays_gives_the_gradient_twice() -> None:
    query, key, value = inputs()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(query)
        out = ats.attend(query, key, value)
    first, second = (tape.gradient(out, query) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# The result and gradients of `attend` under several tapes and accumulators, as TensorFlow's users combine them.


def _of_a_part(f: Any, query: Any, key: Any, value: Any) -> Any:
    """One operand alone, and the gradient of a gather, which are slices."""
    with tf.GradientTape() as tape:
        tape.watch(key)
        found = tf.gather(f(query, key, value), [1, 0, 1])
    return found, tape.gradient(found, key)


def _of_a_later_tape(f: Any, query: Any, key: Any, value: Any) -> Any:
    """Two tapes that watch different operands, one of them around the other; the first is read last."""
    with tf.GradientTape() as outer, tf.GradientTape() as inner:
        outer.watch(query)
        inner.watch(value)
        out = f(query, key, value)
    return inner.gradient(out, value), outer.gradient(out, query)


def _of_an_incoming_gradient(f: Any, query: Any, key: Any, value: Any) -> Any:
    """The outer tape watches what comes in alone, in which the gradient is linear."""
    incoming = tf.ones((*query.shape[:-1], value.shape[-1]), query.dtype)
    with tf.GradientTape() as outer:
        outer.watch(incoming)
        with tf.GradientTape() as inner:
            inner.watch((query, key))
            out = f(query, key, value)
        grads = inner.gradient(out, (query, key), output_gradients=incoming)
    return outer.gradient(grads, incoming)


def _of_one_tape_inside(f: Any, query: Any, key: Any, value: Any) -> Any:
    """A persistent tape that computes gradients while it records."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((query, value))
        first = tape.gradient(f(query, key, value), (query, value))
        total = sum(tf.reduce_sum(x**2) for x in first)
    return (*first, *tape.gradient(total, (query, value)))


def _forward_over_reverse(f: Any, query: Any, key: Any, value: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(query, tf.ones_like(query)) as tangents, tf.GradientTape() as tape:
        tape.watch(query)
        out = f(query, key, value)
        grad = tape.gradient(out, query)
    return tangents.jvp(out), tangents.jvp(grad)


def _forward_over_a_recorded_call(f: Any, query: Any, key: Any, value: Any) -> Any:
    """The accumulator begins after the call, and follows the gradient that comes in."""
    with tf.GradientTape() as tape:
        tape.watch(query)
        out = f(query, key, value)
    incoming = tf.ones_like(out)
    with tf.autodiff.ForwardAccumulator(incoming, incoming) as tangents:
        grad = tape.gradient(out, query, output_gradients=incoming)
    return grad, tangents.jvp(grad)


def _jacobian(f: Any, query: Any, key: Any, value: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(key)
        out = f(query, key, value)
    return tape.jacobian(out, key)


def _read_in_a_graph(f: Any, query: Any, key: Any, value: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(query)
        out = f(query, key, value)
    return tf.function(lambda incoming: tape.gradient(out, query, output_gradients=incoming))(tf.ones_like(out))


def _statistics_alone(f: Any, query: Any, key: Any, value: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch((query, key))
        _, weights, stats = f(query, key, value, return_weights=True, return_stats=("entropy", "max_weight"))
        loss = tf.reduce_sum(weights[..., 0]) + tf.reduce_sum(stats.entropy)
    return tape.gradient(loss, (query, key))


@pytest.mark.parametrize(
    "ways",
    [
        _of_a_part, _of_a_later_tape, _of_an_incoming_gradient, _of_one_tape_inside,
        pytest.param(_forward_over_reverse, marks=pytest.mark.slow),
        _forward_over_a_recorded_call, pytest.param(_jacobian, marks=pytest.mark.slow), _read_in_a_graph,
        _statistics_alone,
    ],
)  # fmt: skip
@pytest.mark.slow_rows("_read_in_a_graph", "_forward_over_a_recorded_call")
def test_planned_calls_are_recorded(ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calls of the tiled kernel, which TensorFlow differentiates by itself, and planned at the second call."""
    monkeypatch.undo()
    arrays, lens = inputs(), tf.constant([4, 2])
    runs: list[Any] = []
    run = NativePlan.run
    monkeypatch.setattr(NativePlan, "run", lambda self, *given: runs.append(self) or run(self, *given))

    def found(kernel: str) -> list[Any]:
        score = ats.ScaledDot(0.7)
        call = functools.partial(ats.attend, score=score, valid_lens=lens, kernel=kernel)
        return [x for x in tf.nest.flatten(ways(call, *arrays)) if isinstance(x, tf.Tensor)]

    first, again, wanted = found("auto"), found("auto"), found("streaming")
    assert len(runs) >= (0 if ways is _forward_over_reverse else 1)
    for one, other, want in zip(first, again, wanted, strict=True):
        np.testing.assert_allclose(one, want, atol=1e-12)
        np.testing.assert_allclose(other, want, atol=1e-12)


# ------------------------------------------------------------ dropout, errors, memory


@pytest.mark.parametrize("how", [lambda f: f, graph, xla], ids=["eager", "graph", "xla"])
@pytest.mark.slow_rows("graph")
def test_dropout_from_tensorflows_own_generator(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    query, key, _ = inputs()
    value = tf.eye(11, dtype=tf.float64)[None, None]
    call = how(lambda: ats.attend(query, key, value, dropout=0.5))
    tf.random.set_seed(3)
    first = [array(call()) for _ in range(2)]
    assert (first[0] != first[1]).any()
    assert 0.3 < np.mean(first[0] == 0) < 0.7
    if how is graph:
        tf.random.set_seed(3)
        np.testing.assert_array_equal(array(how(call.python_function)()) == 0, array(how(call.python_function)()) == 0)


@pytest.mark.slow
def test_the_seed_is_that_of_every_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arrays = inputs()
    wanted = ats.attend(*(x.numpy() for x in arrays), dropout=0.4, seed=2**40 + 3)
    for how in (lambda f: f, graph, xla):
        found = how(lambda *x: ats.attend(*x, dropout=0.4, seed=2**40 + 3))(*arrays)
        np.testing.assert_allclose(found, wanted, atol=1e-12)


# A heat map needs numbers, which a graph has none of: there it says so.
DRAWN = ("a heat map of one axis", "a heat map of five axes", "more titles than maps")
SAME = [x for x in CASES if x.same and not x.only and x.but != "tensorflow" and x.name not in DRAWN]


class InGraph(Maker):
    """Constants of the graph that is being made: what they hold is known."""

    def array(self, values: Any, dtype: str | None = None) -> Any:
        host = np.asarray(values)
        return tf.constant(host.astype(dtype or ("float32" if host.dtype.kind == "f" else host.dtype.name)))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, id=f"{x.error.__name__}-{x.name}")
        for x in SAME[:: 1 if covering.products else 5]  # all of them while tracing: test_errors.py
    ],
)
def test_errors_have_the_words_of_numpy_while_a_graph_is_made(case: Case) -> None:
    with pytest.raises(ats.AttnscoreError) as wanted:
        case.call(Maker("numpy"))
    with pytest.raises(ats.AttnscoreError) as found:
        tf.function(lambda: case.call(InGraph("tensorflow")), autograph=False).get_concrete_function()
    assert type(found.value) is case.error
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("make", [tf.sparse.from_dense, tf.RaggedTensor.from_tensor], ids=["sparse", "ragged"])
def test_kinds_that_attention_cannot_take(make: Any) -> None:
    x = tf.ones((2, 3))
    with pytest.raises(ats.FrameworkError, match=r"key: expected a dense array, got a (sparse|ragged) tensor"):
        ats.attend(x, make(x), x)


def test_the_memory_of_an_eager_tensor_is_read_where_it_lies() -> None:
    ops = ats.backends.load("tensorflow")  # type: ignore[attr-defined]
    x = tf.ones((64, 64))
    assert np.shares_memory(ops.memory(x), ops.memory(x))
    assert ops.memory(tf.cast(x, tf.bfloat16)).dtype == np.uint16
    assert ats.explain(x, x, x).kernel == ("native" if ats.available()["kernels"]["native"] else "streaming")


@pytest.mark.parametrize("offset", range(17))
def test_what_native_code_wrote_is_taken_at_any_address(offset: int) -> None:
    """TensorFlow ends the process where a tensor is not aligned as it wants."""
    ops = ats.backends.load("tensorflow")  # type: ignore[attr-defined]
    x = np.arange(300, dtype=np.float32)[offset : offset + 256].reshape(16, 16)
    found = ops.from_memory(x, "float32", tf.zeros(1))
    assert float(tf.reduce_sum(found)) == x.sum()
    assert float(tf.reduce_sum(tf.matmul(found, found))) == (x @ x).sum()


def _merged(query: Any, key: Any, value: Any) -> Any:
    parts = [
        ats.attend(query, key[:, :, a:b], value[:, :, a:b], return_stats=("log_sum_exp",)) for a, b in ((0, 4), (4, 11))
    ]
    return ats.merge([out for out, _ in parts], [stats.log_sum_exp for _, stats in parts])[0]


AROUND: dict[str, Callable[..., Any]] = {
    "weights": lambda q, k, v: ats.attention_weights(
        q, k, mask=ats.Causal("bottom_right"), query_index=[3, 0], key_index=slice(1, 6)
    ),
    "scores": lambda q, k, v: ats.attention_scores(q, k, mask=ats.Causal("bottom_right"), query_index=-1),
    "softmax": lambda q, k, v: ats.masked_softmax(ats.attention_scores(q, k), [4, 0], temperature=2.0),
    "jacobian": lambda q, k, v: ats.softmax_jacobian(ats.attention_weights(q, k)),
    "pullback": lambda q, k, v: ats.softmax_pullback(ats.attention_weights(q, k), ats.attention_scores(q, k)),
    "largest": lambda q, k, v: ats.top_weights(q, k, 3, mask=ats.Causal("bottom_right")).weights,
    "index of the largest": lambda q, k, v: ats.top_weights(q, k, 3, mask=ats.Causal("bottom_right")).index,
    "pooled": lambda q, k, v: ats.pooled_weights(q, k, (3, 4), mask=ats.Causal("bottom_right")),
    "key_mass": lambda q, k, v: ats.key_mass(q, k, mask=ats.Causal("bottom_right")),
    "merged": _merged,
    "with weights": lambda q, k, v: ats.attend(q, k, v, return_weights=True)[1],
}
IN_GRAPHS = ("weights", "softmax", "merged")


@some(
    "name,how",
    [(name, "eager") for name in AROUND] + [(name, "graph") for name in IN_GRAPHS],
    [(name, how) for name in AROUND for how in ("eager", "graph")],
    slow=[(name, "graph") for name in AROUND if name not in IN_GRAPHS],
)
@pytest.mark.slow_rows("softmax-graph")
def test_functions_around_attend(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arrays, call = inputs(), AROUND[name]
    found = (graph(call) if how == "graph" else call)(*arrays)
    np.testing.assert_allclose(found, call(*(x.numpy() for x in arrays)), atol=1e-12)
