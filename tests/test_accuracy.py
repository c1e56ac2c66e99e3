"""Accuracy where it is hard: Gaussians that cancel, large and cancelling arguments of additive scores, long rows.

The criterion is as in every other test: at most twice the error of the plain version in the same dtype, or 8 eps x
scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import attnscore as ats
import oracle
from cases import FRAMEWORKS, SCORE, Score, needs_native
from covering import pairs
from harness import Call, array, make_call, tensor
from oracle import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("one_thread")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
PRECISIONS = ("float32", "float64")
both_precisions = pytest.mark.parametrize("dtype", PRECISIONS)


def call_of(score: Score, query: Any, key: Any, value: Any, dtype: str, **arrays: Any) -> Call:
    """One head, no mask, and a gradient into the output; arrays (query, dim) and so on."""
    rng = np.random.default_rng(9)
    query, key, value = (np.asarray(x)[None, None].astype(dtype) for x in (query, key, value))
    seed = rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(dtype)
    return Call(
        score=score, dtype=dtype, query=query, key=key, value=value,
        visible=np.ones((1, 1, query.shape[-2], key.shape[-2]), bool), seeds={"out": seed},
        arrays={name: np.asarray(x).astype(dtype) for name, x in arrays.items()},
    )  # fmt: skip


# ------------------------------------------------------------------ Gaussian


def gaussian(bandwidth: float) -> Score:
    """A number as bandwidth, for which the library may choose the inner form."""
    return Score(
        f"gaussian-{bandwidth}", lambda: ats.Gaussian(bandwidth), lambda q, k: oracle.gaussian(q, k, bandwidth),
        magnitude="distance",
    )  # fmt: skip


GAUSSIANS: dict[str, tuple[Any, Any, float]] = {
    # numerics: as an inner product these two are 700 to 10^6 times less accurate than the plain difference.
    "0-to-5-bandwidth-0.1": (np.linspace(0, 5, 41), np.linspace(0, 5, 101), 0.1),
    "years-bandwidth-1": (np.arange(1900, 2021, 3.0), np.arange(1900, 2021.0), 1.0),
    "years-and-months-bandwidth-0.5": (np.arange(1990, 2021, 1 / 12), np.arange(1990, 2021, 1 / 4), 0.5),
    "0-to-5-bandwidth-1": (np.linspace(0, 5, 41), np.linspace(0, 5, 101), 1.0),
    "at-the-limit-of-the-inner-form": (np.linspace(-5.6, 5.6, 57), np.linspace(-5.6, 5.6, 113), 1.0),
    "just-past-the-limit": (np.linspace(-5.8, 5.8, 57), np.linspace(-5.8, 5.8, 113), 1.0),
    "two-clusters": (np.r_[np.linspace(-5.5, -5.4, 20), np.linspace(5.4, 5.5, 20)],
                     np.r_[np.linspace(-5.5, -5.4, 50), np.linspace(5.4, 5.5, 50)], 1.0),
    "far-from-the-origin": (1e4 + np.linspace(0, 1, 33), 1e4 + np.linspace(0, 1, 65), 0.25),
    "one-far-key": (np.linspace(0, 1, 33), np.r_[np.linspace(0, 1, 64), 1e4], 0.5),
    "one-far-query": (np.r_[np.linspace(0, 1, 32), 1e3], np.linspace(0, 1, 65), 0.5),
    "all-keys-alike": (np.linspace(-1, 1, 9), np.full(17, 3.25), 0.5),
    "tiny-differences": (1 + np.arange(20) * 2.0**-20, 1 + np.arange(30) * 2.0**-20, 2.0**-19),
}  # fmt: skip


FORMS = ("direct", "inner")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """These inputs are small, and take the direct sum; as large ones, the inner product where it is accurate."""
    if request.param == "inner":
        monkeypatch.setattr("attnscore.base.thresholds.INNER_TERMS", 0)


@pairs(("form",), name=tuple(GAUSSIANS), dtype=PRECISIONS, framework=FRAMEWORKS, form=FORMS)
def test_gaussian_regression(name: str, dtype: str, framework: str, form: None) -> None:
    x, keys, bandwidth = GAUSSIANS[name]
    values = np.stack([np.sin(keys), np.ones_like(keys), keys - keys.mean()], -1)
    call = call_of(gaussian(bandwidth), x[:, None], keys[:, None], values, dtype)
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("name", ["0-to-5-bandwidth-0.1", "years-bandwidth-1", "at-the-limit-of-the-inner-form"])
def test_gaussian_weights(name: str, framework: str, form: None) -> None:
    """Each weight, relative to the weight itself where it counts."""
    x, keys, bandwidth = GAUSSIANS[name]
    query, key = x[:, None].astype(np.float32), keys[:, None].astype(np.float32)
    arrays = (tensor(query), tensor(key)) if framework == "torch" else (query, key)
    found = array(ats.attention_weights(*arrays, score=ats.Gaussian(bandwidth)))
    s = -((query.astype(np.float64) - key.astype(np.float64).T) ** 2) / (2 * bandwidth**2)
    wanted = np.exp(s - s.max(-1, keepdims=True))
    wanted /= wanted.sum(-1, keepdims=True)
    plain = -((query - key.T) ** 2) / np.float32(2 * bandwidth**2)
    plain = np.exp(plain - plain.max(-1, keepdims=True))
    plain /= plain.sum(-1, keepdims=True)
    counts = wanted > 1e-3
    error, plain_error = (np.abs(w[counts] / wanted[counts] - 1).max() for w in (found, plain))
    # An inner product whose terms are at most 64 leaves 64 eps in a score, which is relative in its weight.
    assert error <= max(4 * plain_error, 64 * np.finfo(np.float32).eps)


@pairs(("form",), spread=(0.1, 1.0, 3.0, 5.0, 8.0), dim=(1, 2, 8, 64), framework=FRAMEWORKS, form=FORMS)
def test_gaussian_at_any_spread(spread: float, dim: int, framework: str, form: None) -> None:
    """Norms from far below the limit of the inner form to far beyond."""
    rng = np.random.default_rng(3)
    for center in (0.0, 7.0):
        query, key = (center + spread * rng.standard_normal((n, dim)) / np.sqrt(dim) for n in (17, 33))
        call = call_of(gaussian(1.0), query, key, rng.standard_normal((33, 3)), "float32")
        call.check(call.run(framework))


# ------------------------------------------------------------------ additive

MAGNITUDES: dict[str, Any] = {
    "tiny": lambda rng, n: 1e-3 * rng.standard_normal((n, 4)),
    "small": lambda rng, n: 0.1 * rng.standard_normal((n, 4)),
    "large": lambda rng, n: 30 * rng.standard_normal((n, 4)),
    "huge": lambda rng, n: 1e4 * rng.standard_normal((n, 4)),
    "44": lambda rng, n: np.full((n, 4), 44.0) + rng.standard_normal((n, 4)),
}


@pairs(activation=tuple(ACTIVATIONS), magnitude=tuple(MAGNITUDES), dtype=PRECISIONS, framework=FRAMEWORKS)
def test_additive_arguments_of_any_magnitude(activation: str, magnitude: str, dtype: str, framework: str) -> None:
    rng = np.random.default_rng(1)
    query, key = (MAGNITUDES[magnitude](rng, n) for n in (9, 14))
    row = dataclasses.replace(SCORE[f"additive-{activation}-projected"], dims=(4, 4))
    call = call_of(row, query, key, rng.standard_normal((14, 3)), dtype, w_v=rng.standard_normal(4))
    call.check(call.run(framework))


@pairs(activation=tuple(ACTIVATIONS), level=(43.85, 300.0, 1e4), dtype=PRECISIONS, framework=FRAMEWORKS)
def test_additive_arguments_that_cancel(activation: str, level: float, dtype: str, framework: str) -> None:
    """a = 300, b = -299.5: each far out of the range of an exponential, their sum where the activation bends."""
    rng = np.random.default_rng(1)
    query, key = level + rng.standard_normal((9, 4)), -level + rng.standard_normal((14, 4))
    row = SCORE[f"additive-{activation}-projected"]
    call = call_of(row, query, key, rng.standard_normal((14, 3)), dtype, w_v=rng.standard_normal(4))
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("dtype,levels", [("float32", (34.0, 36.0, 42.9, 68.0)), ("float64", (334.0, 345.0, 352.0))])
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("sign", [1, -1])
def test_additive_weights_far_apart_where_arguments_cancel(
    sign: int, activation: str, dtype: str, levels: tuple[float, ...], framework: str
) -> None:
    """A light weight's inverse times the exponential of its key overflows where the sum's exponential is moderate."""
    rng = np.random.default_rng(1)
    for level in levels:
        query, key = -sign * level + rng.standard_normal((9, 4)), sign * level + rng.standard_normal((14, 4))
        weights = np.array([1.0, 0.05, -0.001, 0.0])
        row = SCORE[f"additive-{activation}-projected"]
        call = call_of(row, query, key, rng.standard_normal((14, 3)), dtype, w_v=weights)
        call.check(call.run(framework))


@pairs(
    activation=("tanh", "sigmoid", "silu"),
    size=(0.5, 3.0),
    heaviest=(1.0, 1e-16, 1e-29, 1e-35, 0.0),
    framework=FRAMEWORKS,
)
def test_additive_weights_next_to_nothing(activation: str, size: float, heaviest: float, framework: str) -> None:
    """Also beside weights of 0, of which the inverse is none."""
    rng = np.random.default_rng(3)
    query, key = size * rng.uniform(-1, 1, (9, 16)), size * rng.uniform(-1, 1, (70, 16))
    query[3], key[5] = 0.0, 0.0
    weights = heaviest * np.where(np.arange(16) % 3 == 0, 0.0, rng.uniform(-1, 1, 16))
    row = dataclasses.replace(SCORE[f"additive-{activation}-projected"], dims=(16, 16))
    call = call_of(row, query, key, rng.standard_normal((70, 3)), "float32", w_v=weights)
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("score", ["additive-tanh", "additive-sigmoid", "additive-gelu-bias"])
@pytest.mark.parametrize("hidden", [1, 64, 257])
def test_additive_of_any_width(hidden: int, score: str, framework: str) -> None:
    rng = np.random.default_rng(2)
    row = dataclasses.replace(SCORE[score], hidden=hidden)
    arrays = {
        "w_v": rng.standard_normal(hidden) / np.sqrt(hidden), "W_q": rng.standard_normal((hidden, 4)) / 2,
        "W_k": rng.standard_normal((hidden, 6)) / 2, "bias": rng.standard_normal(hidden),
    }  # fmt: skip
    arrays = {name: arrays[name] for name in row.arrays}
    query, key, value = (rng.standard_normal(shape) for shape in ((11, 4), (19, 6), (19, 3)))
    call = call_of(row, query, key, value, "float32", **arrays)
    call.check(call.run(framework))


# ------------------------------------------------------- products and levels


@frameworks
@both_precisions
@pytest.mark.parametrize("level", [0.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
def test_scores_at_a_level(level: float, sink: bool, dtype: str, framework: str, small_tiles: None) -> None:
    """Scores that floats hold exactly, far from 0: nothing but their level may lose digits with it."""
    rng = np.random.default_rng(4)
    query = np.ones((6, 1))
    key = level + rng.integers(-4, 5, (13, 1))
    call = call_of(SCORE["dot"], query, key, rng.standard_normal((13, 3)), dtype)
    if sink:
        call = dataclasses.replace(call, sink=np.array(level + 2, dtype))
    call.check(call.run(framework))


@pairs(
    score=("dot", "scaled_dot", "bilinear", "cosine-number", "sum", "soft_cap-dot"),
    factor=(1e-3, 1.0, 10.0, 100.0),
    dtype=PRECISIONS,
    framework=FRAMEWORKS,
)
def test_products_of_any_size(factor: float, score: str, dtype: str, framework: str, small_tiles: None) -> None:
    """From uniform weights to saturated ones."""
    call = make_call(score, "Causal-offset", dtype, "sink")
    call = dataclasses.replace(
        call, query=(factor * call.query).astype(dtype), sink=np.asarray(factor, dtype), seeds=call.seeds
    )
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("length", [2_000])
@pytest.mark.parametrize("score", ["scaled_dot", "additive-tanh", "gaussian-one"])
def test_long_rows(score: str, length: int, framework: str) -> None:
    """Errors of sums over thousands of keys do not pile up from tile to tile."""
    row = SCORE[score]
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((7, row.dims[0])), rng.standard_normal((length, row.dims[1]))
    sizes = {"h": row.hidden, "d": row.dims[0], "dk": row.dims[1]}
    arrays = {name: rng.uniform(0.5, 1.5, tuple(sizes[axis] for axis in axes)) for name, axes in row.arrays.items()}
    call = call_of(row, query, key, rng.standard_normal((length, 3)), "float32", **arrays)
    call.check(call.run(framework))


@frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype: str, framework: str) -> None:
    """Ten thousand keys all alike: in 16 bits the sum of the weights would stop at 256 or 2048."""
    rng = np.random.default_rng(6)
    kind = {"float16": np.float16, "bfloat16": make_call("dot", dtype="bfloat16").query.dtype}[dtype]
    query, key = np.zeros((1, 2), kind), np.zeros((10_000, 2), kind)
    value = (1 + rng.integers(0, 2, (10_000, 1))).astype(kind)
    arrays = [tensor(x) for x in (query, key, value)] if framework == "torch" else [query, key, value]
    out, stats = ats.attend(*arrays, return_stats=True)
    eps = float(np.finfo(np.float16).eps) if dtype == "float16" else 2.0**-7
    assert abs(float(array(out)[0, 0]) - float(array(value).mean(dtype=np.float64))) <= 2 * eps
    assert float(array(stats.log_sum_exp)[0]) == pytest.approx(np.log(10_000), rel=1e-6)
    assert float(array(stats.max_weight)[0]) == pytest.approx(1e-4, rel=1e-5)


@frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_sum_score_of_half_precision_is_summed_in_float32(dtype: str, framework: str) -> None:
    """3001, which is no number of 16 bits."""
    kind = make_call("dot", dtype=dtype).query.dtype
    arrays = [np.ones((1, 3001), kind), np.zeros((1, 3001), kind), np.ones((1, 1), kind)]
    _, stats = ats.attend(*map(tensor, arrays) if framework == "torch" else arrays, score="sum", return_stats=True)
    assert float(array(stats.log_sum_exp)[0]) == 3001


def test_half_precision_scores_beyond_its_range() -> None:
    """Scores past 65504, which overflow in float16, are kept in float32."""
    query = np.full((2, 4), 200.0, np.float16)
    key = np.stack([np.full(4, 200.0), np.full(4, 199.0)]).astype(np.float16)
    out = ats.attend(query, key, np.array([[1.0], [2.0]], np.float16), score="dot")
    np.testing.assert_array_equal(out, [[1], [1]])


@needs_native
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("x", [46.0, 1e3, 1e30, math.inf])
def test_a_score_far_above_a_cap_is_the_cap(x: float, queries: int) -> None:
    """And has no gradient, so that an infinite one propagates nothing: tanh is 1 there, not almost."""
    query, key = np.full((queries, 1), x, np.float32), np.ones((70, 1), np.float32)
    value = np.random.default_rng(0).standard_normal((70, 2)).astype(np.float32)
    for sign in (1, -1):
        assert np.unique(ats.attention_scores(sign * query, key, score=ats.SoftCap(ats.Dot(), 5.0))) == [sign * 5]
    score = ats.SoftCap(ats.Additive(np.ones(1, np.float32), activation="silu"), 1.0)
    out, pullback = ats.attend_vjp(query, key, value, score=score, kernel="native")
    found = pullback(np.ones_like(out))
    assert not found.query.any() and not found.key.any()
