"""Laws of every call: weights, tiles and parts, what a row depends on, NaN.

Each law is one test over random calls (``strategies.py``) on NumPy in float64. Masks, scores, statistics and PyTorch
have files of their own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import attnscore as ats
from attnscore.problem.statistics import KEYS
from strategies import INF, NAN, Drawn, HostArray, calls, law, same, tiles_of

# ------------------------------------------------------------------ weights


@law
@given(calls())
def test_rows_sum_to_one_or_zero(call: Drawn) -> None:
    weights, visible = call.weights(), call.visible
    assert np.all(weights[~visible] == 0)
    assert np.all(weights >= 0)
    same(weights.sum(-1), visible.any(-1).astype(float))


@law
@given(calls())
def test_weights_pool_the_values(call: Drawn) -> None:
    out, weights = call.attend(return_weights=True)
    per_key_head = call.query.shape[-3] // call.key.shape[-3] if call.key.ndim > 3 else 1
    value = call.value.repeat(per_key_head, axis=-3) if per_key_head > 1 else call.value
    same(out, weights @ value)
    same(weights, call.weights())


@law
@given(calls())
def test_weights_are_the_softmax_of_the_scores(call: Drawn) -> None:
    scores = call.scores()
    assert np.array_equal(scores == -INF, ~call.visible)
    same(call.weights(), ats.masked_softmax(scores))


@law
@given(calls(), st.floats(-50, 50))
def test_a_constant_added_to_a_row_changes_nothing(call: Drawn, level: float) -> None:
    constant = level + call.normal(call.query_len, 1)
    out, stats = call.attend(bias=constant, return_stats=True)
    plain = call.statistics()
    same(out, call.attend())
    same(call.weights(bias=constant), call.weights())
    same(stats.log_sum_exp, plain.log_sum_exp + constant[:, 0])
    same(stats.entropy, plain.entropy)
    same(stats.var_score, plain.var_score, 1e-10)


@law
@given(calls(), st.randoms(use_true_random=False))
def test_permuting_keys_with_values_changes_nothing(call: Drawn, random: Any) -> None:
    order = list(range(call.key_len))
    random.shuffle(order)
    turned = call.with_(
        key=call.key[..., order, :], value=call.value[..., order, :], mask=ats.Dense(call.visible[..., order])
    )
    same(turned.attend(), call.attend())
    same(turned.weights(), call.weights()[..., order])
    for name, found in turned.statistics()._asdict().items():
        if name not in KEYS:  # which of equal scores is first changes
            same(found, getattr(call.statistics(), name))


@law
@given(calls(min_query=1, axes=(2, 3)))
def test_a_mask_equals_removing_the_keys(call: Drawn) -> None:
    out, stats = call.attend(return_stats=True)
    for index in np.ndindex(out.shape[:-1]):
        seen = call.visible[index]
        lead = index[:-1]
        alone, own = ats.attend(
            call.query[index][None],
            call.key[lead][seen],
            call.value[lead][seen],
            score=call.score,
            return_stats=True,
        )
        same(out[index], alone[0])
        for name, found in stats._asdict().items():
            if name not in KEYS:
                same(found[index], getattr(own, name)[0])


@law
@given(calls())
def test_outputs_lie_between_the_visible_values(call: Drawn) -> None:
    assume(call.key.ndim < 4 or call.key.shape[-3] == call.query.shape[-3])
    out, seen = call.attend(), call.visible[..., None]
    value = call.value[..., None, :, :]
    high = np.where(seen, value, -INF).max(-2, initial=-INF)
    low = np.where(seen, value, INF).min(-2, initial=INF)
    some = call.visible.any(-1)
    assert np.all(out[some] <= high[some] + 1e-12) and np.all(out[some] >= low[some] - 1e-12)
    assert np.all(out[~some] == 0)


# ------------------------------------------------------------------ tiles and parts


@law
@given(calls(), st.integers(1, 60), st.booleans(), st.sampled_from((0.0, 0.4)))
def test_the_size_of_the_tiles_does_not_matter(call: Drawn, scores: int, with_sink: bool, dropout: float) -> None:
    more: dict[str, Any] = {"sink": np.array(0.3) if with_sink else None, "dropout": dropout, "seed": 5}
    more["bias"] = call.normal(call.query_len, call.key_len)
    grad_out = call.normal(*call.attend().shape)
    grad_rows = call.normal(*call.query.shape[:-1])

    def everything() -> list[HostArray]:
        out, weights, stats = call.attend(return_weights=True, return_stats=True, kernel="streaming", **more)
        grads = call.gradients(grad_out, grad_rows, 2 * grad_rows, kernel="streaming", **more)
        return [out, weights, *stats, *grads.values()]

    whole = everything()
    with tiles_of(scores):
        for found, expected in zip(everything(), whole, strict=True):
            same(found, expected, 1e-10)


@law
@given(calls(), st.lists(st.integers(0, 8), max_size=3))
def test_merging_parts_equals_the_whole(call: Drawn, cuts: list[int]) -> None:
    edges = sorted({0, call.key_len, *(min(cut, call.key_len) for cut in cuts)})
    edges = edges if len(edges) > 1 else [0, 0]
    outs, log_sum_exps = [], []
    for start, stop in itertools.pairwise(edges):
        part = call.with_(
            key=call.key[..., start:stop, :],
            value=call.value[..., start:stop, :],
            mask=ats.Dense(call.visible[..., start:stop]),
        )
        out, stats = part.attend(return_stats=("log_sum_exp",))
        outs.append(out)
        log_sum_exps.append(stats.log_sum_exp)
    whole, stats = call.attend(return_stats=("log_sum_exp",))
    merged, log_sum_exp = ats.merge(outs, log_sum_exps)
    same(merged, whole)
    same(log_sum_exp, stats.log_sum_exp)


@law
@given(calls(min_query=1, min_key=1), st.data())
def test_a_block_is_cut_from_the_whole(call: Drawn, data: st.DataObject) -> None:
    def index(length: int) -> Any:
        positions = st.integers(-length, length - 1)
        bounds = st.none() | st.integers(-length - 1, length + 1)
        return data.draw(
            st.none()
            | st.lists(positions, max_size=4)
            | positions.map(lambda i: [i])
            | st.builds(slice, bounds, bounds, st.sampled_from((None, 1, 2, -1)))
        )

    rows, cols = index(call.query_len), index(call.key_len)

    def cut(whole: HostArray) -> HostArray:
        every = slice(None)
        return whole[..., every if rows is None else rows, :][..., every if cols is None else cols]

    rows_array = np.array(rows, int) if isinstance(rows, list) else rows
    same(call.weights(query_index=rows_array, key_index=cols), cut(call.weights()))
    same(call.scores(query_index=rows, key_index=cols), cut(call.scores()))


@law
@given(calls())
def test_minus_infinity_in_the_bias_hides_as_a_mask_does(call: Drawn) -> None:
    seen = call.rng.uniform(size=(call.query_len, call.key_len)) < 0.6
    bias = call.normal(call.query_len, call.key_len)
    masked = call.with_(mask=ats.Dense(call.visible & seen))
    hidden = np.where(seen, bias, -INF)
    found, expected = (
        each.attend(bias=each_bias, return_weights=True, return_stats=True)
        for each, each_bias in ((call, hidden), (masked, bias))
    )
    for one, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        same(one, other)
    grad_out = call.normal(*found[0].shape)
    known = masked.gradients(grad_out, bias=bias)
    for name, grad in call.gradients(grad_out, bias=hidden).items():
        same(grad, known[name])
        assert name != "bias" or np.all(grad[~seen] == 0)


@law
@given(calls(axes=(4,)), st.sampled_from(("query", "key", "value")))
def test_axes_that_broadcast_are_repeated_without_being_copied(call: Drawn, name: str) -> None:
    one = getattr(call, name)[:1]
    call = call.with_(**{name: np.repeat(one, call.batch, 0)})
    narrow = call.with_(**{name: one})
    grad_out = call.normal(*call.attend().shape)
    same(narrow.attend(), call.attend())
    found, whole = narrow.gradients(grad_out), call.gradients(grad_out)
    whole[name] = whole[name].sum(0, keepdims=True)
    for gradient, grad in found.items():
        same(grad, whole[gradient])


@law
@given(calls(axes=(3, 4)))
def test_strides_and_layout_in_memory_do_not_matter_and_nothing_is_written_to(call: Drawn) -> None:
    grad_out = call.normal(*call.attend().shape)
    expected = [call.attend(), *call.gradients(grad_out).values()]

    def strange(x: HostArray) -> HostArray:
        """The same numbers: every other row of a larger array, backwards, the axes in another order."""
        wide = np.full((x.shape[-1], *x.shape[:-2], 2 * x.shape[-2] + 1), NAN)
        view = np.moveaxis(wide, 0, -1)[..., ::-1, :][..., 1::2, :]
        view[...] = x
        view.flags.writeable = False
        return view

    odd = call.with_(query=strange(call.query), key=strange(call.key), value=strange(call.value))
    found = [odd.attend(), *odd.gradients(strange(grad_out)).values()]
    for one, other in zip(found, expected, strict=True):
        same(one, other)


# ------------------------------------------------------------------ what a row depends on


@law
@given(calls(min_query=2, min_key=2, masked=False), st.integers(0, 6), st.sampled_from((NAN, INF, -INF, 1e3)))
def test_the_future_is_never_seen(call: Drawn, now: int, surprise: float) -> None:
    now = min(now, call.query_len - 1, call.key_len - 1)
    causal = call.with_(mask=ats.Causal("top_left"))
    key, value = call.key.copy(), call.value.copy()
    key[..., now + 1 :, :] = surprise
    value[..., now + 1 :, :] = surprise
    changed = causal.with_(key=key, value=value)
    past = np.s_[..., : now + 1, :]
    same(changed.attend()[past], causal.attend()[past])
    for found, expected in zip(changed.statistics(), causal.statistics(), strict=True):
        same(found[..., : now + 1], expected[..., : now + 1])


@law
@given(calls(axes=(3, 4)))
def test_batch_rows_are_independent(call: Drawn) -> None:
    out = call.attend()
    for b in range(call.batch):
        alone = call.with_(
            query=call.query[b : b + 1],
            key=call.key[b : b + 1],
            value=call.value[b : b + 1],
            mask=ats.Dense(call.visible[b : b + 1]),
            batch=1,
        )
        same(out[b], alone.attend()[0])


@law
@given(calls(axes=(4,)))
def test_heads_are_independent_and_groups_share_their_keys(call: Drawn) -> None:
    out, weights = call.attend(return_weights=True)
    groups = call.query.shape[1] // call.key.shape[1]
    for h in range(call.query.shape[1]):
        alone = call.with_(
            query=call.query[:, h],
            key=call.key[:, h // groups],
            value=call.value[:, h // groups],
            mask=ats.Dense(call.visible[:, h]),
        )
        same(out[:, h], alone.attend())
        same(weights[:, h], alone.weights())


@law
@given(calls(axes=(4,)))
def test_the_place_of_the_head_axis_does_not_matter(call: Drawn) -> None:
    turned = call.with_(query=call.query.swapaxes(1, 2), key=call.key.swapaxes(1, 2), value=call.value.swapaxes(1, 2))
    out, weights, stats = call.attend(return_weights=True, return_stats=True)
    found, found_weights, found_stats = turned.attend(head_axis=-2, return_weights=True, return_stats=True)
    same(found, out.swapaxes(1, 2))
    same(found_weights, weights)
    for name in stats._fields:
        same(getattr(found_stats, name), getattr(stats, name).swapaxes(1, 2))


@law
@given(calls(min_query=1, min_key=1), st.data())
def test_nan_in_hidden_pairs_changes_nothing(call: Drawn, data: st.DataObject) -> None:
    j = data.draw(st.integers(0, call.key_len - 1), label="with_nonfinite key")
    i = data.draw(st.integers(0, call.query_len - 1), label="with_nonfinite query")
    nonfinite = data.draw(st.sampled_from((NAN, INF, -INF)), label="nonfinite")
    # Key j is hidden from all, query i sees nothing: whatever they hold, and whatever comes back to row i.
    hidden = np.zeros((call.query_len, call.key_len), bool)
    hidden[i] = hidden[:, j] = True
    clean = call.with_(mask=ats.Dense(call.visible & ~hidden))
    query, key, value = call.query.copy(), call.key.copy(), call.value.copy()
    bias = call.normal(call.query_len, call.key_len)
    query[..., i, :] = key[..., j, :] = value[..., j, :] = nonfinite
    dirty = clean.with_(query=query, key=key, value=value)
    dirty_bias = np.where(hidden, nonfinite, bias)
    grad_out = call.normal(*clean.attend().shape)
    dirty_grad = grad_out.copy()
    dirty_grad[..., i, :] = nonfinite

    out, weights, stats = clean.attend(bias=bias, return_weights=True, return_stats=True)
    found, found_weights, found_stats = dirty.attend(bias=dirty_bias, return_weights=True, return_stats=True)
    same(found, out)
    same(found_weights, weights)
    for one, other in zip(found_stats, stats, strict=True):
        same(one, other)
    expected = clean.gradients(grad_out, bias=bias)
    for name, grad in dirty.gradients(dirty_grad, bias=dirty_bias).items():
        same(grad, expected[name])
    assert np.all(found[..., i, :] == 0)


@law
@given(calls(min_query=1, min_key=1), st.data())
def test_nan_reaches_the_rows_that_see_it_and_no_others(call: Drawn, data: st.DataObject) -> None:
    assume(call.value.shape[-1] > 0)
    j = data.draw(st.integers(0, call.key_len - 1), label="with_nonfinite key")
    value = call.value.copy()
    value[..., j, :] = NAN
    out, with_nonfinite = call.attend(), call.with_(value=value).attend()
    sees = call.visible[..., j]
    assert np.all(np.isnan(with_nonfinite[sees]))
    same(with_nonfinite[~sees], out[~sees])
