"""Laws of the softmax and of the scores: invariances, limits, linearity, slopes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import attnscore as ats
from strategies import INF, Drawn, calls, law, same

# ------------------------------------------------------------------ the softmax


@law
@given(st.lists(st.floats(-300, 300), min_size=1, max_size=9), st.floats(-1e4, 1e4))
def test_softmax_knows_differences_alone(scores: list[float], level: float) -> None:
    row = np.array(scores)
    same(ats.masked_softmax(row + level), ats.masked_softmax(row), 1e-9)


@law
@given(calls())
def test_temperature_goes_from_the_largest_to_all_alike(call: Drawn) -> None:
    scores, visible = call.scores(), call.visible
    count = visible.sum(-1, keepdims=True)
    hot = call.weights(score=ats.Temperature(call.score, 1e12))
    same(hot, np.where(visible, 1 / np.maximum(count, 1), 0.0), 1e-8)
    if call.key_len < 2:
        return
    first, second = (np.sort(scores, axis=-1)[..., -rank] for rank in (1, 2))
    clear = visible.any(-1) & (first > second + 1e-2)
    cold = call.weights(score=ats.Temperature(call.score, 1e-4))[clear]
    same(cold, np.eye(call.key_len)[scores.argmax(-1)][clear])


@law
@given(calls(axes=(2, 3)))
def test_softmax_over_any_axis(call: Drawn) -> None:
    scores = np.where(call.visible, call.normal(*call.pairs), -INF)
    same(ats.masked_softmax(scores.swapaxes(-1, -2), axis=-2).swapaxes(-1, -2), ats.masked_softmax(scores))


@law
@given(calls(), st.floats(-5, 5))
def test_a_sink_takes_its_share(call: Drawn, sink: float) -> None:
    log_sum_exp = call.statistics().log_sum_exp
    share = np.exp(log_sum_exp - np.logaddexp(log_sum_exp, sink))
    stats = call.statistics(sink=np.array(sink))
    same(call.weights(sink=np.array(sink)), call.weights() * share[..., None])
    same(stats.sum_weights, share * call.visible.any(-1))
    same(stats.log_sum_exp, np.logaddexp(log_sum_exp, sink))
    same(call.attend(sink=np.array(-INF)), call.attend())


# ------------------------------------------------------------------ linearity and symmetry


@law
@given(calls(), st.floats(-3, 3))
def test_attend_is_linear_in_the_values(call: Drawn, factor: float) -> None:
    other = call.normal(*call.value.shape)
    both = call.with_(value=factor * call.value + other).attend()
    same(both, factor * call.attend() + call.with_(value=other).attend())


@law
@given(calls(min_query=1, min_key=1))
def test_the_pullback_is_linear(call: Drawn) -> None:
    shape = call.attend().shape
    first, second = call.normal(*shape), call.normal(*shape)
    one, two, both = (call.gradients(grad) for grad in (first, second, 2 * first - second))
    for name, grad in both.items():
        same(grad, 2 * one[name] - two[name], 1e-10)


@law
@given(calls(min_query=1, min_key=1))
def test_the_gradient_is_the_slope(call: Drawn) -> None:
    """Along a random direction, against a central difference: out, log-sum-exp and entropy together."""
    shape, rows = call.attend().shape, call.query.shape[:-1]
    grads = call.normal(*shape), call.normal(*rows), call.normal(*rows)
    some = call.visible.any(-1)

    def value(step: float) -> float:
        moved = call.with_(
            **{name: getattr(call, name) + step * directions[name] for name in ("query", "key", "value")}
        )
        out, stats = moved.attend(return_stats=("log_sum_exp", "entropy"))
        finite = np.where(some, stats.log_sum_exp, 0.0)
        return float((out * grads[0]).sum() + (finite * grads[1]).sum() + (stats.entropy * grads[2]).sum())

    directions = {name: call.normal(*getattr(call, name).shape) for name in ("query", "key", "value")}
    found = call.gradients(*grads)
    slope = sum(float((found[name] * directions[name]).sum()) for name in directions)
    step = 1e-5
    measured = (value(step) - value(-step)) / (2 * step)
    assert math.isclose(slope, measured, rel_tol=1e-4, abs_tol=1e-4)


@law
@given(calls(score="cosine"), st.floats(0.01, 100), st.floats(0.01, 100))
def test_cosine_knows_directions_alone(call: Drawn, query_factor: float, key_factor: float) -> None:
    longer = call.with_(query=call.query * query_factor, key=call.key * key_factor)
    same(longer.scores(), call.scores())
    same(call.weights(score=ats.Cosine(-3.0)), call.with_(query=-call.query).weights())


@law
@given(calls(score="gaussian"), st.floats(-100, 100), st.floats(0.1, 10))
def test_gaussian_knows_distances_alone(call: Drawn, shift: float, unit: float) -> None:
    moved = call.with_(query=call.query + shift, key=call.key + shift)
    same(moved.scores(), call.scores(), 1e-8)
    rescaled = call.with_(query=call.query * unit, key=call.key * unit, score=ats.Gaussian(1.5 * unit))
    same(rescaled.scores(), call.scores(), 1e-10)


@law
@given(calls(score="dot"), st.floats(-5, 5))
def test_keys_moved_together_change_no_dot_product_weights(call: Drawn, shift: float) -> None:
    same(call.with_(key=call.key + shift).weights(), call.weights(), 1e-9)


@law
@given(calls(masked=False), st.floats(0.1, 50))
def test_a_soft_cap_bounds_and_keeps_the_order(call: Drawn, cap: float) -> None:
    plain, capped = call.scores(), call.scores(score=ats.SoftCap(call.score, cap))
    same(capped, cap * np.tanh(plain / cap), 1e-9)
    assert np.all(np.abs(capped) <= cap * (1 + 1e-12))
    same(call.scores(score=ats.SoftCap(call.score, 1e9)), plain, 1e-9)
