"""Laws of the statistics, and of dropout, which they do not see."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import attnscore as ats
from strategies import INF, Drawn, calls, law, same

# ------------------------------------------------------------------ statistics


@law
@given(calls(min_key=1))
def test_statistics_are_those_of_scores_and_weights(call: Drawn) -> None:
    scores, weights, visible, stats = call.scores(), call.weights(), call.visible, call.statistics()
    some, count = visible.any(-1), visible.sum(-1)
    mean = np.where(visible, scores, 0).sum(-1) / np.maximum(count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_sum_exp = np.where(some, np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)), 0)
        surprise = np.where(weights > 0, -weights * np.log(weights), 0)
        expected = {
            "log_sum_exp": np.where(some, scores.max(-1) + log_sum_exp, -INF),
            "max_score": scores.max(-1),
            "mean_score": mean,
            "var_score": np.where(visible, scores - mean[..., None], 0).__pow__(2).sum(-1) / np.maximum(count, 1),
            "entropy": surprise.sum(-1),
            "max_weight": weights.max(-1),
            "sum_sq_weights": (weights**2).sum(-1),
            "sum_weights": weights.sum(-1),
            "min_score": np.where(visible, scores, INF).min(-1),
        }
    for name, values in expected.items():
        same(getattr(stats, name), values, 1e-9)
    largest = np.take_along_axis(scores, np.maximum(stats.argmax_key, 0)[..., None], -1)[..., 0]
    same(largest[some], scores.max(-1)[some], 1e-9)


@law
@given(calls())
def test_statistics_keep_their_bounds(call: Drawn) -> None:
    stats, count = call.statistics(), call.visible.sum(-1)
    some, slack = count > 0, 1e-10
    few = np.maximum(count, 1)
    assert np.all(stats.entropy >= -slack) and np.all(stats.entropy <= np.log(few) + slack)
    assert np.all(stats.effective_keys()[some] <= count[some] * (1 + 1e-9))
    assert np.all(stats.max_weight[some] >= 1 / count[some] - slack) and np.all(stats.max_weight <= 1 + slack)
    assert np.all(stats.sum_sq_weights[some] >= 1 / count[some] - slack)
    assert np.all(stats.sum_sq_weights <= stats.max_weight + slack)
    assert np.all(stats.jacobian_trace() >= -slack) and np.all(stats.jacobian_trace() <= 1 - 1 / few + slack)
    assert np.all(stats.max_score[some] <= stats.log_sum_exp[some] + slack)
    assert np.all(stats.log_sum_exp[some] <= stats.max_score[some] + np.log(count[some]) + slack)
    assert np.all(stats.var_score >= 0) and np.all(stats.mean_score[some] <= stats.max_score[some] + 1e-9)
    assert np.all(stats.min_score[some] <= stats.mean_score[some] + 1e-9) and np.all(stats.min_score[~some] == INF)
    assert np.all((stats.argmax_key >= 0) == some) and np.all(stats.argmax_key[~some] == -1)
    for name in set(stats._fields) - {"log_sum_exp", "max_score", "min_score", "argmax_key"}:
        assert np.all(getattr(stats, name)[~some] == 0)
    assert np.all(stats.log_sum_exp[~some] == -INF) and np.all(stats.max_score[~some] == -INF)


@law
@given(calls(), st.sets(st.sampled_from(ats.AttentionStats._fields)))
def test_only_the_statistics_asked_for(call: Drawn, asked: set[str]) -> None:
    assume(asked)
    every, _, some = call.statistics(), *call.attend(return_stats=tuple(asked))
    for name in every._fields:
        if name in asked:
            same(getattr(some, name), getattr(every, name))
        else:
            assert getattr(some, name) is None


# ------------------------------------------------------------------ dropout


@law
@given(calls(), st.floats(0.05, 0.9), st.integers(0, 2**62))
def test_dropout_replays_and_keeps_or_drops(call: Drawn, p: float, seed: int) -> None:
    ones = call.with_(value=np.broadcast_to(np.eye(call.key_len), (*call.key.shape[:-1], call.key_len)))
    dropped = ones.attend(dropout=p, seed=seed)
    same(ones.attend(dropout=p, seed=seed), dropped, 0)
    weights = ones.weights()
    kept = dropped != 0
    same(dropped[kept], weights[kept] / (1 - p))
    _, before, stats = call.attend(dropout=p, seed=seed, return_weights=True, return_stats=True)
    same(before, weights)
    same(stats.entropy, call.statistics().entropy)
