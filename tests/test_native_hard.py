"""The native kernels where arithmetic is hard, on every target: arguments that cancel, saturation, levels, subnormals.

The criterion, and the portable target's exception from it, are as in ``test_native_oracle``. Known there:
without a fused multiply-add, silu about 44 in float64 and products times 100 in float32 exceed it by some 10%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import attnscore as ats
from cases import SCORE
from covering import pairs, some
from harness import make_call
from native_cases import BITS, native
from oracle import ACTIVATIONS
from test_accuracy import MAGNITUDES, call_of
from test_native_oracle import TARGETS, problems, slack_of

pytestmark = pytest.mark.usefixtures("one_thread")
PRECISIONS = ("float32", "float64")
ACTIVATIONS_BY_NAME = tuple(ACTIVATIONS)
both_precisions = pytest.mark.parametrize("dtype", PRECISIONS)


@pytest.fixture(params=TARGETS, autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.current_target()
    native.select(request.param)
    yield request.param
    native.select(before)


LINEAR = ("relu", "silu", "gelu")  # activations that grow without bound


def _of_activation(name: str) -> Any:
    return ats.Additive(np.array([0.5, -1.0, 2.0, 0.3, 1.5], np.float32), activation=name)


def hold(call: Any, target: str, results: dict[str, Any] | None = None, *, by_score: bool = False) -> None:
    found = problems(call, results or call.numpy(kernel="native"), slack_of(target), by_score=by_score)
    assert not found, "\n".join(found)


def additive(activation: str, query: np.ndarray, key: np.ndarray, dtype: str) -> Any:
    rng = np.random.default_rng(1)
    width = query.shape[-1]
    row = dataclasses.replace(SCORE[f"additive-{activation}-projected"], hidden=width, dims=(width, width))
    return call_of(row, query, key, rng.standard_normal((len(key), 3)), dtype, w_v=rng.standard_normal(width))


@pairs(("target",), activation=ACTIVATIONS_BY_NAME, level=(21.5, 43.85, 300.0, 1e4), dtype=PRECISIONS, target=TARGETS)
def test_additive_arguments_that_cancel(activation: str, level: float, dtype: str, target: str) -> None:
    """a = 300, b = -299.5; some columns at that level, some not, and rows and keys enough for whole tiles."""
    rng = np.random.default_rng(2)
    at = level * (rng.random(17) < 0.5)
    query, key = at + rng.standard_normal((7, 17)), -at + rng.standard_normal((67, 17))
    query[0], key[0] = level, 0.5 - level
    hold(additive(activation, query, key, dtype), target)


@pairs(("target",), activation=ACTIVATIONS_BY_NAME, magnitude=list(MAGNITUDES), dtype=PRECISIONS, target=TARGETS)
def test_additive_arguments_of_any_magnitude(activation: str, magnitude: str, dtype: str, target: str) -> None:
    rng = np.random.default_rng(1)
    query, key = (MAGNITUDES[magnitude](rng, n) for n in (9, 66))
    # The scale of the criterion, sum |w_v|, is for bounded activations: silu of 88 rounds in units of 88.
    unbounded = activation not in ("tanh", "sigmoid")
    hold(additive(activation, query, key, dtype), target, by_score=unbounded)


@pairs(("target",), activation=("tanh", "sigmoid", "silu"), first=(0, 4), dtype=PRECISIONS, target=TARGETS)
def test_additive_channels_of_unlike_size(activation: str, first: int, dtype: str, target: str) -> None:
    """Of eight channels four have exponentials whose product overflows, the others do not: no division for all four."""
    rng = np.random.default_rng(11)
    level = 1 if dtype == "float32" else 8
    level *= 10 if activation == "tanh" else -20
    query, key = rng.standard_normal((7, 8)), rng.standard_normal((67, 8))
    query[:, first : first + 4] += level
    key[:, first : first + 4] += level
    hold(additive(activation, query, key, dtype), target, by_score=activation == "silu")


@lru_cache(maxsize=1)
def unlike_blocks(activation: str, large: float, dtype: str) -> Any:
    """The same call for every target: its reference takes longer than all of them."""
    rng = np.random.default_rng(3)
    query, key = rng.uniform(-0.9, 0.9, (300, 9)), rng.uniform(-0.9, 0.9, (261, 9))
    query[200:], key[64:128] = large * query[200:], large * key[64:128]
    return additive(activation, query, key, dtype)


@some(
    "activation,large,dtype",
    [("tanh", 0.9, "float32"), ("sigmoid", 5.0, "float64"), ("silu", 50.0, "float32"), ("tanh", 1e4, "float64"),
     ("silu", 0.9, "float64"), ("sigmoid", 1e4, "float32")],
    [(name, large, dtype) for name in ("tanh", "sigmoid", "silu") for large in (0.9, 5.0, 50.0, 1e4)
     for dtype in PRECISIONS],
)  # fmt: skip
@pytest.mark.slow_rows("avx512bf16-silu-0.9-float64")
def test_additive_blocks_of_unlike_rows_share_tiles(activation: str, large: float, dtype: str, target: str) -> None:
    """Blocks of rows that take the tables of one tile by different ways; the forward has four, the backward two."""
    hold(unlike_blocks(activation, large, dtype), target, by_score=activation == "silu")


def _gradients(query: np.ndarray, key: np.ndarray, value: np.ndarray, seed: np.ndarray, **options: Any) -> list[Any]:
    out, pullback = ats.attend_vjp(query, key, value, kernel="native", **options)
    found = pullback(seed)
    return [out, *found[:3], *found.score.values()]


def test_what_follows_the_last_key_stays_out_of_shared_tiles() -> None:
    """The bits do not depend on padding, whatever it holds: a tile that the last key cuts is each block's own."""
    rng = np.random.default_rng(4)
    query, key, value = (rng.standard_normal((1, 300, 8), dtype=np.float32) for _ in range(3))
    score = ats.Additive(rng.standard_normal(8, dtype=np.float32))
    found = []
    for padding in (0.0, 1e4, 1e30, np.nan, np.inf):
        key[:, 100:] = value[:, 100:] = padding
        found.append(_gradients(query, key, value, np.ones_like(query), score=score, valid_lens=[100]))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


@pairs(
    ("target",),
    score=("dot", "bilinear", "cosine-number", "soft_cap-dot", "gaussian-direct"),
    factor=(1e-3, 10.0, 100.0, 1e4),
    dtype=PRECISIONS,
    target=TARGETS,
)
def test_saturated(score: str, factor: float, dtype: str, target: str) -> None:
    call = make_call(score, "Causal-offset", dtype, "sink")
    query = (call.query * (1 if score == "gaussian-direct" else factor)).astype(dtype)
    hold(dataclasses.replace(call, query=query, sink=np.asarray(factor, dtype)), target)


@pairs(("target",), keys=(13, 64, 131, 2100), level=(1e3, 1e4, -1e4), dtype=PRECISIONS, target=TARGETS)
def test_statistics_far_from_0(keys: int, level: float, dtype: str, target: str) -> None:
    """Scores that floats hold exactly: nothing but their level may lose digits with it, across tiles and ranges too."""
    rng = np.random.default_rng(4)
    key = level + rng.integers(-4, 5, (keys, 1))
    hold(call_of(SCORE["dot"], np.ones((3, 1)), key, rng.standard_normal((keys, 3)), dtype), target)


@pairs(("target",), queries=(1, 3, 4, 5), groups=(1, 2, 3), dim=(8, 20), dtype=PRECISIONS, target=TARGETS)
def test_forward_and_backward_round_scores_alike(queries: int, groups: int, dim: int, dtype: str, target: str) -> None:
    """Weights of scores of some 100 add up to 1 in the backward: a score in another order is off by their roundings."""
    rng = np.random.default_rng(7)
    query, grad = (rng.standard_normal((8, groups, queries, dim)).astype(dtype) for _ in range(2))
    key = 10 * rng.standard_normal((8, 1, 30, dim)).astype(dtype)
    _, pullback = ats.attend_vjp(query, key, key, score="dot", kernel="native")
    weight = pullback(np.ones_like(grad)).value[..., 0].sum(-1)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(weight, groups * queries, rtol=slack_of(target) * 4 * eps)


@pairs(("target",), keys=(130, 704), rise=(0.5, 3.0, 5.5, 5.6, 30.0, 120.0, 1e4), dtype=PRECISIONS, target=TARGETS)
def test_scores_that_rise_from_tile_to_tile(keys: int, rise: float, dtype: str, target: str) -> None:
    """A row's sums are taken against a score that later keys exceed, by little or by more than exp holds."""
    rng = np.random.default_rng(6)
    slope = np.repeat([1.0, 0.25, 0.0, -1.0, 8.0], 6)[:, None]  # of rows that stand together
    key = rise * (np.arange(keys) // 64)[:, None] + rng.random((keys, 1))
    call = call_of(SCORE["dot"], slope, key, rng.standard_normal((keys, 3)), dtype)
    hold(call, target)
    # Where all statistics are asked for, the largest score is looked for; here it is not.
    arrays, score = (call.query, call.key, call.value), call.score.make()
    (out, log_sum_exp), pullback = ats.attend_vjp(*arrays, score=score, kernel="native", return_stats=("log_sum_exp",))
    gradients = pullback(call.seeds["out"])
    few = {"out": out, "log_sum_exp": log_sum_exp.log_sum_exp, "grad.query": gradients.query, "grad.key": gradients.key,
           "grad.value": gradients.value}  # fmt: skip
    hold(call, target, few)


@both_precisions
def test_each_statistic_alone_is_the_one_among_all(dtype: str) -> None:
    """Numbers that a kernel works out for one statistic and not for another, on rows whose largest score comes late."""
    rng = np.random.default_rng(7)
    key = (np.arange(200) // 64)[:, None] + rng.random((200, 1))
    query, value = rng.standard_normal((9, 1)), rng.standard_normal((200, 2))
    arrays = [x.astype(dtype) for x in (query, key, value)]
    for options in ({}, {"sink": np.array(2.0, dtype)}, {"valid_lens": [150]}):
        call = {"score": "dot", "kernel": "native", **options}
        lead = [x[None] for x in arrays] if "valid_lens" in options else arrays
        whole = ats.attend(*lead, return_stats=True, **call)[1]._asdict()
        for name, expected in whole.items():
            found = getattr(ats.attend(*lead, return_stats=(name,), **call)[1], name)
            np.testing.assert_allclose(found, expected, rtol=8 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)
    exact = arrays[0].astype(float) @ arrays[1].astype(float).T
    _, stats = ats.attend(*arrays, score="dot", kernel="native", return_stats=("max_score", "max_weight"))
    np.testing.assert_allclose(stats.max_score, exact.max(-1), rtol=1e-6)
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    np.testing.assert_allclose(stats.max_weight, 1 / weights.sum(-1), rtol=1e-5)


@pairs(("target",), padded=(64, 100, 1), fraction=(1.0, 0.75), dtype=PRECISIONS, target=TARGETS)
def test_the_lowest_number_as_a_mask(padded: int, fraction: float, dtype: str, target: str) -> None:
    """What many write in place of -inf: padding on the left, whose tile comes before all others."""
    rng = np.random.default_rng(8)
    query, key, value = (rng.standard_normal((n, 4)).astype(dtype) for n in (7, 200, 200))
    bias = np.zeros((1, 200), dtype)
    bias[:, :padded] = fraction * np.finfo(dtype).min
    seen = np.arange(200)[None] >= padded
    statistics = ("log_sum_exp", "entropy", "max_score", "sum_sq_weights")
    found = []
    for options in ({"bias": bias}, {"mask": ats.Dense(seen)}):
        (out, stats), pullback = ats.attend_vjp(query, key, value, return_stats=statistics, kernel="native", **options)
        gradients = pullback(np.ones_like(out), np.ones_like(stats.log_sum_exp), np.ones_like(stats.entropy))
        found.append([out, *(getattr(stats, name) for name in statistics), *gradients[:3]])
    for x, expected in zip(*found, strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=64 * np.finfo(dtype).eps)


@both_precisions
def test_the_lowest_number_over_whole_ranges_of_keys(dtype: str) -> None:
    """A few queries of many keys are cut into ranges of keys, of which some have no weight."""
    rng = np.random.default_rng(9)
    query, key, value = (rng.standard_normal((n, 4)).astype(dtype) for n in (1, 4096, 4096))
    bias = np.zeros((1, 4096), dtype)
    bias[:, :2048] = np.finfo(dtype).min
    _, stats = ats.attend(query, key, value, bias=bias, kernel="native", return_stats=("entropy",))
    _, wanted = ats.attend(query, key[2048:], value[2048:], kernel="native", return_stats=("entropy",))
    np.testing.assert_allclose(stats.entropy, wanted.entropy, rtol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("planted", ["seed", "query", "key"])
@pytest.mark.parametrize("score", ["scaled_dot", "gaussian"])
def test_rows_that_attend_to_nothing_between_rows_that_attend_to_all(score: str, planted: str) -> None:
    rng = np.random.default_rng(10)
    shapes = {"query": (18, 20), "key": (64, 20), "value": (64, 20), "seed": (18, 20)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    options = {"score": score, "valid_lens": np.repeat([64, 0, 64], 6)}
    clean = _gradients(**arrays, **options)
    arrays[planted][7] = np.nan
    found = _gradients(**arrays, **options)
    if planted == "key":  # seen by the others
        assert not found[1][6:12].any()
        return
    for x, wanted in zip(found, clean, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=4e-6 * max(1.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize("score", [ats.ScaledDot(4.0), ats.Gaussian(0.8), *map(_of_activation, LINEAR)], ids=repr)
@pytest.mark.parametrize("length", [12, 70])
def test_hidden_numbers_that_overflow_together(score: Any, length: int) -> None:
    """Finite by themselves, but not times the scale, in a sum or in a difference."""
    rng, seen = np.random.default_rng(11), length - 3
    query, key, value, seed = (rng.standard_normal((1, length, 5)).astype(np.float32) for _ in range(4))
    # Not lengths, behind which no tile reads.
    mask = ats.Dense((np.arange(length)[:, None] < seen) & (np.arange(length) < seen)[None])
    clean = _gradients(query, key, value, seed, score=score, mask=mask)
    for of_query, of_key in ((None, 3e38), (3e38, None), (3e38, 3e38), (3e38, -3e38)):
        dirty = query.copy(), key.copy()
        for x, number in zip(dirty, (of_query, of_key), strict=True):
            if number is not None:
                x[:, seen:] = number
        for x, wanted in zip(_gradients(*dirty, value, seed, score=score, mask=mask), clean, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=0, atol=4e-6 * max(1.0, float(np.abs(wanted).max())))


@both_precisions
def test_the_lowest_number_alone(dtype: str) -> None:
    """A number like any other: where all scores are as low, all weights are the same."""
    rng = np.random.default_rng(12)
    query, key, value = (rng.standard_normal((n, 4)).astype(dtype) for n in (7, 70, 70))
    bias = np.zeros((7, 70), dtype)
    bias[2] = np.finfo(dtype).min
    out = ats.attend(0 * query, key, value, bias=bias, kernel="native")
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(0), out.shape), atol=16 * np.finfo(dtype).eps)


@pairs(("target",), first=(63, 64, 65), last=(126, 127, 128, 129), target=TARGETS)
def test_a_hole_that_ends_about_the_edge_of_a_tile(first: int, last: int, target: str) -> None:
    rng = np.random.default_rng(9)
    query, key, value = (rng.standard_normal((n, 4)) for n in (7, 200, 200))
    mask = ats.KeyRange(0, first) | ats.KeyRange(last, 200)
    found, expected = (ats.attend(query, key, value, mask=mask, kernel=kernel) for kernel in ("native", "dense"))
    np.testing.assert_allclose(found, expected, atol=1e-13)


# Scores whose weights are the smallest normal numbers, and subnormal ones.
@pytest.mark.parametrize(("dtype", "score"), [("f4", -87.0), ("f4", -95.0), ("f8", -708.0), ("f8", -730.0)])
@pytest.mark.parametrize("keys", [2, 65, 130])
def test_smallest_weights(keys: int, dtype: str, score: float) -> None:
    """A weight is right to the rounding of its score, or 0 where it is below the normal numbers."""
    key = np.full((keys, 1), 4 * score, dtype)
    key[0], key[-1] = 0, score
    large = 2.0**120 if dtype == "f4" else 2.0**1000
    value = np.zeros((keys, 1), dtype)
    value[-1] = large
    for queries in (1, 6):
        out = ats.attend(np.ones((queries, 1), dtype), key, value, score="dot", kernel="native")
        weight = np.exp(np.longdouble(score))
        exact = weight if weight >= np.finfo(dtype).tiny else 0
        assert (np.abs(out.astype(np.longdouble) / large - exact) <= 2 * abs(score) * np.finfo(dtype).eps * exact).all()


def test_scores_that_fall_with_the_distance() -> None:
    """Weights and gradients that pass through the subnormal numbers are as exact as any."""
    rng = np.random.default_rng(0)
    query, key, value, grad = rng.standard_normal((4, 2, 300, 16)).astype(np.float32)
    bias = -2.0 * np.abs(ats.relative_positions(300, 300))[None].astype(np.float32)
    out, pullback = ats.attend_vjp(query, key, value, bias=bias)
    wide = [x.astype(np.float64) for x in (query, key, value, grad)]
    exact, exact_pullback = ats.attend_vjp(*wide[:3], bias=bias.astype(np.float64), kernel="streaming")
    np.testing.assert_allclose(out, exact, rtol=0, atol=4e-6)
    for x, y in zip(pullback(grad)[:4], exact_pullback(wide[3])[:4], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1024), (1024, 1)], ids=str)
def test_gradient_of_a_bias_that_many_pairs_share(shape: tuple[int, int]) -> None:
    """Sums of up to 10^6 terms that cancel: a number added to whole rows moves their log-sum-exp, and nothing else."""
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((1024, 4)).astype(np.float32) for _ in range(3)]
    grad_out, grad_lse = (rng.standard_normal(shape).astype(np.float32) for shape in ((1024, 4), 1024))
    grads = []
    for kind, kernel in ((np.float32, "native"), (np.float64, "streaming")):
        bias = np.zeros(shape, kind)
        _, pullback = ats.attend_vjp(
            *(x.astype(kind) for x in arrays), bias=bias, kernel=kernel, return_stats=("log_sum_exp",)
        )
        grads.append(pullback(grad_out.astype(kind), grad_lse.astype(kind)).bias)
    np.testing.assert_allclose(grads[0], grads[1], rtol=0, atol=8 * np.finfo(np.float32).eps * 1024**0.5)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("queries", [1, 7])
def test_scores_at_the_ends_of_the_range(queries: int, dtype: str) -> None:
    """The largest finite scores, both ways: no infinity of their own making."""
    top = np.finfo(dtype).max / 4
    key = np.array([[top], [-top], [top / 2]], dtype)
    out, stats = ats.attend(
        np.ones((queries, 1), dtype), key, np.arange(3.0)[:, None].astype(dtype), score="dot", return_stats=True
    )
    assert (out == 0).all()
    np.testing.assert_array_equal(stats.log_sum_exp, np.full(queries, top, dtype))
    np.testing.assert_array_equal(stats.entropy, np.zeros(queries))


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_infinite_scores_that_are_seen(dtype: str, queries: int) -> None:
    """A key at -inf weighs nothing and is counted; one at +inf makes the row NaN, and no other."""
    key = np.array([[1.0], [-np.inf], [2.0]], dtype)
    query, value = np.ones((queries, 1), dtype), np.arange(3.0)[:, None].astype(dtype)
    out = ats.attend(query, key, value, score="dot", kernel="native")
    np.testing.assert_allclose(out, np.full((queries, 1), 2 / (1 + np.exp(-1.0))), rtol=1e-6)
    mask = np.ones((queries, 3), bool)
    mask[0, 1] = False
    out = ats.attend(query, np.abs(key), value, score="dot", mask=mask, kernel="native")
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:]).all()


@pairs(("target",), kernel=("native", "streaming"), at=(0, 40, -1), keys=(63, 64, 200), target=TARGETS)
def test_moments_of_an_infinite_score_that_is_seen(kernel: str, at: int, keys: int, target: str) -> None:
    key = np.linspace(-1, 1, keys, dtype="f4")[:, None]
    key[at] = -np.inf
    _, stats = ats.attend(np.ones((7, 1), "f4"), key, np.ones_like(key), score="dot", kernel=kernel, return_stats=True)
    assert (stats.mean_score == -np.inf).all()
    assert np.isnan(stats.var_score).all()


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("keys", [64, 2048, 2048 + 64 + 5, 5000])
def test_moments_where_the_first_keys_are_far_from_all_others(keys: int, heads: int) -> None:
    """The base that scores are summed from is one of the first keys'; keys of many heads are not cut into ranges."""
    rng = np.random.default_rng(0)
    key = rng.standard_normal((keys, 1)).astype("f4")
    key[0], key[1:64] = 300.0, key[1:64] - 20
    query, shared = np.ones((1, heads, 7, 1), "f4"), np.broadcast_to(key, (1, heads, keys, 1))
    _, stats = ats.attend(query, shared, shared, score="dot", kernel="native", return_stats=True)
    exact, rows = key.astype(float), (1, heads, 7)
    np.testing.assert_allclose(
        stats.mean_score, np.full(rows, exact.mean()), rtol=1e-6, atol=1e-6 * np.abs(exact).mean()
    )
    np.testing.assert_allclose(stats.var_score, np.full(rows, exact.var()), rtol=2e-5)


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_16_bits(dtype: str, queries: int) -> None:
    """Finite values are read and written as they are, those below the normal numbers of the sums as 0; means, and what
    a sink leaves, are rounded to nearest.
    """
    kind = np.dtype(BITS[dtype])
    exponent, bits = 0x7F80 if dtype == "bfloat16" else 0x7C00, np.arange(2**16, dtype=np.uint16)
    bits = bits[bits & exponent != exponent]
    value = np.append(bits, bits[:1]).view(kind)[None]  # an odd number, so that vectors have a rest
    one, query = np.ones((1, 1), kind), np.ones((queries, 1), kind)
    found = ats.attend(one, one, value, kernel="native")
    exact = value.astype(float)
    exact[np.abs(exact) < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(found.astype(float), exact)

    rng = np.random.default_rng(10)
    value = rng.uniform(-2, 2, (2, 1001)).astype(kind)
    found = ats.attend(query, np.ones((2, 1), kind), value, kernel="native")
    exact = (value.astype(float).sum(0) / 2).astype(kind)
    np.testing.assert_array_equal(found, np.broadcast_to(exact, found.shape))

    value = rng.uniform(0.5, 2, (1, 1001)).astype(kind)
    found = ats.attend(query, one, value, score="dot", sink=np.float32(1 + np.log(2)), kernel="native").astype(float)
    exact = value.astype(float) / 3
    step = 2.0 ** (np.floor(np.log2(exact)) - (7 if dtype == "bfloat16" else 10))
    assert (np.abs(found - exact) <= 0.501 * step).all()


@pairs(
    ("target",),
    activation=ACTIVATIONS_BY_NAME,
    nonfinite={"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf},
    where=("query", "key"),
    target=TARGETS,
)
def test_no_mask_and_one_that_hides_nothing_agree_on_infinity(
    activation: str, nonfinite: float, where: str, target: str
) -> None:
    """An additive score of infinity is what the formula makes of it, among rows enough for whole tiles."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 3, 70, 5)) for name in ("query", "key", "value")}
    arrays[where][1, 2, 66, 3] = nonfinite
    score, everything = ats.Additive(rng.standard_normal(5), activation=activation), np.ones((70, 70), bool)
    wanted = ats.attend(**arrays, score=score, kernel="dense")
    assert np.isnan(wanted).any() or np.isinf(nonfinite)
    assert np.isfinite(wanted).all() or np.isnan(nonfinite) or activation not in ("tanh", "sigmoid")
    for mask in (None, ats.Dense(everything), ats.ValidLens([70, 70])):
        found = ats.attend(**arrays, score=score, mask=mask, kernel="native")
        np.testing.assert_allclose(found, wanted, atol=1e-13)


@pairs(
    ("target",),
    where=("query", "key", "value", "seed"),
    mask={"none": None, "valid_lens": ats.ValidLens([40, 66]), "causal": ats.Causal()},
    channels=(5, 64),
    target=TARGETS,
)
def test_a_visible_nan_spoils_the_gradients_that_the_formula_spoils(
    where: str, mask: Any, channels: int, target: str
) -> None:
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((2, 70, channels)) for name in ("query", "key", "value", "seed")}
    arrays[where][1, 33, channels - 2] = np.nan
    weight, found = rng.standard_normal(channels), {}
    for kernel in ("native", "streaming"):
        inputs = {name: arrays[name] for name in ("query", "key", "value")}
        _, pullback = ats.attend_vjp(**inputs, score=ats.Additive(weight), mask=mask, kernel=kernel)
        grads = pullback(arrays["seed"])
        found[kernel] = {"query": grads.query, "key": grads.key, "value": grads.value} | grads.score
    assert np.isnan(found["streaming"]["query"]).any() and np.isnan(found["streaming"]["key"]).any()
    for name, wanted in found["streaming"].items():
        np.testing.assert_allclose(found["native"][name], wanted, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_rows_whose_keys_begin_in_any_key_tile(dtype: str) -> None:
    """Sequences packed into one row: each key tile is seen by other rows, some for the first time, some not."""
    rng = np.random.default_rng(7)
    for queries, keys in ((85, 154), (46, 389), (150, 260), (40, 90)):
        query, key = (rng.standard_normal((n, 8)).astype(dtype) for n in (queries, keys))
        value = rng.standard_normal((keys, 3)).astype(dtype)
        for _ in range(6):
            ends = [np.sort(np.r_[0, rng.integers(0, n + 1, 8), n]) for n in (queries, keys)]
            found, wanted = (
                ats.attend(query, key, value, mask=ats.Packed(*ends), kernel=kernel, return_stats=True)
                for kernel in ("native", "dense")
            )
            for x, y in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 if dtype == "float32" else 1e-12)
