"""Small calls of TensorFlow's graphs, which run in the framework's own operations: when, and that results are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import attnscore as ats
from attnscore import backends
from attnscore.base import thresholds
from attnscore.kernels import formula, tiled
from attnscore.kernels.formula import OneTile
from attnscore.scores import gaussian
from attnscore.scores.forms import DistanceForm
from cases import needs_native
from harness import assert_each_close, directions_traced, make_call

RNG = np.random.default_rng(3)
SCORES: dict[str, Callable[[Any], Any]] = {
    "dot": lambda w: "dot",
    "additive": ats.Additive,
    "gelu": lambda w: ats.Additive(w, activation="gelu"),
    "gaussian": lambda w: ats.Gaussian(1.5),
    "capped": lambda w: ats.SoftCap("scaled_dot", 3.0),
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "lengths": {"valid_lens": np.asarray([3, 0, 5], np.int32)},
    "causal": {"mask": ats.Causal("top_left")},
    "pairs": {"mask": np.asarray(RNG.random((3, 1, 4, 5)) < 0.5)},
    "dropout": {"valid_lens": np.asarray([3, 1, 5], np.int32), "dropout": 0.4, "seed": 7},
}


def draw(dtype: str = "float64") -> dict[str, Any]:
    """Four query heads on two KV heads, four queries, five keys."""
    shapes = {"query": (3, 4, 4, 6), "key": (3, 2, 5, 6), "value": (3, 2, 5, 3), "w": (6,), "grad": (3, 4, 4, 3)}
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def in_graph(score: str, arrays: dict[str, Any], kernel: str, *, weights: bool = False, **options: Any) -> list[Any]:
    """Return output, weights where wanted, and gradients, of a graph."""

    @tf.function
    def run(query: Any, key: Any, value: Any, w: Any, grad: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((query, key, value, w))
            found = ats.attend(
                query, key, value, score=SCORES[score](w), kernel=kernel, return_weights=weights, **options
            )
            out, matrix = found if weights else (found, None)
            loss = tf.reduce_sum(out * grad)
            if matrix is not None:
                loss += tf.reduce_sum(tf.sin(matrix))
        zero = tf.UnconnectedGradients.ZERO
        return [out, *([] if matrix is None else [matrix]), *tape.gradient(loss, (query, key, value, w), None, zero)]

    return [np.asarray(x) for x in run(*(tf.constant(x) for x in arrays.values()))]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return directions_traced(monkeypatch, OneTile)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["dot", "additive", "gaussian", "capped"])
@pytest.mark.slow_rows("[!d]*", "dot-[!l]*")
def test_a_small_call_is_exact(score: str, mask: str, ran: list[str]) -> None:
    arrays, weights = draw(), mask in {"lengths", "dropout"}
    wanted = in_graph(score, arrays, "dense", weights=weights, **MASKS[mask])
    found = in_graph(score, arrays, "auto", weights=weights, **MASKS[mask])
    assert ran == ["forward", "backward"]
    assert_each_close(found, wanted, 1e-11)


def check_without_statistics(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a row of the tables in a graph, without the statistics, which no small call has."""

    def attended(self: Any, arrays: Any, keywords: Any) -> dict[str, Any]:
        operands = (arrays[name] for name in ("query", "key", "value"))
        if "weights" not in self.seeds:
            return {"out": ats.attend(*operands, **keywords)}
        return dict(zip(("out", "weights"), ats.attend(*operands, return_weights=True, **keywords), strict=True))

    monkeypatch.setattr(type(call), "_attend", attended)
    found = call.tensorflow(tf.function)
    call.check(call.reference | found, skip=tuple(set(call.reference) - set(found)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.slow_rows("float16", "bfloat16")
def test_a_small_call_in_half_precision(dtype: str, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_without_statistics(make_call("scaled_dot", "valid_lens-empty", dtype, "weights"), monkeypatch)
    assert ran == ["forward", "backward"]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forms of the distances that were traced as products, however small."""
    forms: list[Any] = []
    original = formula._by_expanded_square
    monkeypatch.setattr(formula, "_by_expanded_square", lambda ops, form: (forms.append(form), original(ops, form))[1])
    monkeypatch.setattr(thresholds, "ONE_TILE_DISTANCE", (0, 2**20))
    return forms


@pytest.mark.parametrize(
    ("score", "mask", "dtype", "extras"),
    [
        ("gaussian-number", "none", "float32", ""),
        ("gaussian-heads", "valid_lens-empty", "float64", ""),
        ("gaussian-one", "Causal-bottom_right", "float32", "weights"),
        ("gaussian-dims", "nested", "bfloat16", ""),
        ("gaussian-cancelling", "none", "float32", ""),
        ("gaussian-cancelling", "valid_lens-empty", "float32", "weights"),
    ],
)
@pytest.mark.slow_rows("*one*", "*dims*", "*empty-float32*", "gaussian-heads-valid_lens-empty-float64-")
def test_a_distance_as_a_product_is_exact(
    score: str,
    mask: str,
    dtype: str,
    extras: str,
    products: list[Any],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the product would cancel, which takes the branch that sums the differences."""
    check_without_statistics(make_call(score, mask, dtype, extras), monkeypatch)
    # The branch for products that cancel is the same kernel, traced once more.
    assert len(products) == 2 and ran == ["forward", "forward", "backward", "backward"]


@pytest.mark.slow
def test_nan_behind_a_mask_is_isolated_from_a_distance(products: list[Any]) -> None:
    arrays, lens = draw(), MASKS["lengths"]["valid_lens"]
    clean = in_graph("gaussian", arrays, "auto", weights=True, valid_lens=lens)
    for name in ("key", "value"):
        for i, n in enumerate(lens):
            arrays[name][i, :, n:] = np.nan
        dirty = in_graph("gaussian", arrays, "auto", weights=True, valid_lens=lens)
        assert_each_close(dirty, clean, 1e-12)
    assert len(products) == 6


def test_the_largest_norm_decides_whether_a_distance_is_a_product() -> None:
    """One query or one key whose norm is beyond the limit, or not a number."""
    ops = backends.load("tensorflow")

    def is_exact(query: float, key: float, scale: Any = 0.5) -> bool:
        x = tf.reshape(tf.constant([1.0, query, 2.0, 1.0, key, 3.0]), (2, 1, 1, 3, 1))
        return bool(formula._by_expanded_square(ops, DistanceForm(x[:1], x[1:], scale))[1])

    limit = gaussian.INNER_LIMIT
    assert is_exact(5.6, -5.6) and is_exact(5.6, 5.6, tf.constant([[0.5]]))
    assert 0.5 * 5.6**2 < limit < 0.5 * 5.7**2
    for bad in (5.7, -5.7, np.inf, -np.inf, np.nan):
        assert not is_exact(bad, 1.0) and not is_exact(1.0, bad) and not is_exact(1.0, bad, tf.constant([[0.5]]))


@pytest.mark.parametrize("nonfinite", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("score", ["dot", "gelu"])
@pytest.mark.parametrize("name", ["key", "value", "query", "grad"])
@pytest.mark.slow_rows("*-inf", "*-gelu-nan", "query-*", "key-*", "grad-*")
def test_masked_entries_reach_nothing(name: str, score: str, nonfinite: float, ran: list[str]) -> None:
    """NaN and infinities in masked keys or values, in a query without keys or in the gradient of its output."""
    arrays, lens = draw(), MASKS["lengths"]["valid_lens"]
    clean = in_graph(score, arrays, "auto", weights=True, valid_lens=lens)
    for i, n in enumerate(lens):
        if name in ("key", "value"):
            arrays[name][i, :, n:] = nonfinite
        elif n == 0:
            arrays[name][i] = nonfinite
    dirty = in_graph(score, arrays, "auto", weights=True, valid_lens=lens)
    assert ran == 2 * ["forward", "backward"]
    assert_each_close(dirty, clean, 1e-12)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.slow_rows("key", "query", "value")
def test_unmasked_entries_reach_what_tiled_attention_says(name: str) -> None:
    """An infinity in a pair that is not masked gives what the same call gives outside of a graph."""
    arrays = draw()
    arrays[name][0, 0, 1] = np.inf
    options = {"mask": MASKS["causal"]["mask"]}
    found = in_graph("dot", arrays, "auto", **options)[0]
    eager = ats.attend(*(arrays[n] for n in ("query", "key", "value")), score="dot", kernel="streaming", **options)
    np.testing.assert_allclose(found, eager, rtol=0, atol=1e-12)
    assert not np.isfinite(found).all()


@pytest.mark.slow
def test_second_derivatives_of_a_small_call() -> None:
    arrays = draw()

    def second(kernel: str) -> Any:
        @tf.function
        def run(query: Any, key: Any, value: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch((query, key, value))
                with tf.GradientTape() as tape:
                    tape.watch(query)
                    out = ats.attend(query, key, value, valid_lens=MASKS["lengths"]["valid_lens"], kernel=kernel)
                    loss = tf.reduce_sum(out**3)
                total = tf.reduce_sum(tf.sin(tape.gradient(loss, query)))
            return outer.gradient(total, (query, key, value))

        return run(*(tf.constant(arrays[n]) for n in ("query", "key", "value")))

    assert_each_close(second("auto"), second("dense"), 1e-10)


@needs_native
@pytest.mark.parametrize(
    ("shape", "options", "kernel"),
    [
        ((64, 1, 10, 256), {}, "one_tile"),
        ((256, 1, 10, 64), {}, "one_tile"),
        ((256, 8, 64, 64), {}, "native"),
        ((64, 1, 10, 256), {"score": "additive"}, "one_tile"),
        ((8, 8, 64, 256), {"score": "additive"}, "native"),
        ((32, 8, 32, 128), {"score": "gaussian"}, "one_tile"),
        ((8, 8, 64, 512), {"score": "gaussian"}, "native"),
        ((2, 1, 10, 8), {"return_stats": True}, "native"),
        ((2, 1, 10, 8), {"bias": 0.5}, "native"),
        ((2, 1, 10, 8), {"valid_lens": [3, 1]}, "one_tile"),
    ],
)
def test_which_calls_of_a_graph_are_small(shape: Any, options: dict[str, Any], kernel: str) -> None:
    """By counted work; outside of graphs the native kernel runs all of them."""
    batch, queries, keys, dim = shape
    found = []

    def explain(query: Any, key: Any) -> Any:
        own = dict(options)
        if own.get("score") == "additive":
            own["score"] = ats.Additive(tf.ones(dim))
        found.append(ats.explain(query, key, key, **own))
        return query

    query, key = tf.zeros((batch, queries, dim)), tf.zeros((batch, keys, dim))
    tf.function(explain)(query, key)
    explain(query, key)
    assert [plan.kernel for plan in found] == [kernel, "native"]
    if kernel == "one_tile":
        assert found[0].reasons["native"] == ("one_tile comes first in the order of preference",)


@needs_native
def test_a_batch_that_is_not_known_is_left_to_the_native_kernel(ran: list[str]) -> None:
    x = tf.zeros((2, 3, 4))
    out = tf.function(lambda x: ats.attend(x, x, x), input_signature=[tf.TensorSpec([None, 3, 4])])(x)
    assert out.shape == x.shape and not ran


@pytest.mark.slow
def test_the_loops_run_only_where_something_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no pair is masked, the program has no second branch."""
    traced: list[str] = []
    original = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *a: (traced.append("tiles"), original(*a))[1])
    in_graph("dot", draw(), "auto")
    assert not traced
    in_graph("dot", draw(), "auto", **MASKS["lengths"])
    assert traced


def test_the_graph_has_no_case() -> None:
    """TensorFlow Lite converts an `If` and refuses a `Case`; and the branch stays out of the graph."""
    spec = tf.TensorSpec((2, 7, 4), tf.float32)
    call = tf.function(lambda q, k, v: ats.attend(q, k, v, mask=ats.Causal())).get_concrete_function(spec, spec, spec)
    kinds = [op.type for op in call.graph.get_operations()]
    assert kinds.count("StatelessIf") == 1
    assert not {"Case", "StatelessCase", "Switch", "Merge"} & set(kinds)
    branch = next(op for op in call.graph.get_operations() if op.type == "StatelessIf")
    assert not branch.get_attr("_lower_using_switch_merge")
