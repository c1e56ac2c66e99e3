"""Verdicts on recorded numbers: signs of now, their memory, causes and remedies, and the texts that say them."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import textwrap
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from attnscore.diagnostics import watch
from attnscore.diagnostics.watching.health import FAILURES, SIGNS, Thresholds, loss_trouble
from attnscore.diagnostics.watching.records import Layer, Records
from attnscore.errors import ArgumentError

ROWS, HEADS = 100.0, 4
MEANS = {
    "logit_mean": 0.0, "logit_variance": 1.0, "log_sum_exp": 3.0, "entropy": 2.0, "max_weight": 0.3,
    "effective_keys": 8.0, "jacobian_trace": 0.8, "first_key": 0.1, "saturated_rows": 0.01, "padding": 0.0,
    "query_variance": 4.0, "value_spread": 0.9,
}  # fmt: skip
OTHERS = {
    "rows": ROWS, "choice_rows": ROWS, "padding_rows": 0.0, "sequences": 0.0, "value_sequences": 0.0, "empty_rows": 0.0,
    "nan_rows": 0.0, "nan_query": 0.0, "nan_key": 0.0, "nan_value": 0.0, "overflow_rows": 0.0, "max_logit": 4.0,
    "dtype_max": 3e38, "scale_ratio": 1.0, "causal_sequences": 0.0, "other_score": 0.0, "biased": 0.0,
    "queries": 10.0, "keys": 20.0,
}  # fmt: skip


def sums(**heads: Any) -> dict[str, np.ndarray]:
    """Return the sums of a healthy step of four heads, with means of some heads set: name={head: mean}."""
    found = {name: np.full(HEADS, value * ROWS) for name, value in MEANS.items()}
    found |= {name: np.full(HEADS, value) for name, value in OTHERS.items()}
    for name in ("padding_rows", "sequences", "value_sequences"):
        found[name][:] = ROWS
    for name, values in heads.items():
        for head, value in (values if isinstance(values, dict) else dict.fromkeys(range(HEADS), values)).items():
            found[name][head] = value * (ROWS if name in MEANS else 1)
    return found


def recorded(*steps: Any, every: int = 10, thresholds: Thresholds | None = None, losses: Any = ()) -> Records:
    """Return records of these steps: the sums of a layer "a.0", or a dictionary of the sums of several."""
    records = Records(thresholds or Thresholds())
    for number, step in enumerate(steps):
        for name, values in (step if "rows" not in step else {"a.0": step}).items():
            records.layers.setdefault(name, Layer(name, len(values["rows"]), deque(maxlen=1000))).add(
                number * every, values
            )
    records.steps, records.sampled = every * len(steps), len(steps)
    for number, loss in enumerate(losses):
        records.record_loss(loss, number)
    return records


def said(*steps: Any, **options: Any) -> list[tuple[str, int, int, bool]]:
    return [(v.sign, v.head, v.first_step, v.failure) for v in recorded(*steps, **options).verdicts()]


BAD = {"saturated_rows": {1: 0.6}, "logit_variance": {1: 400.0}, "max_logit": {1: 90.0}}


def test_a_healthy_run_has_no_verdict() -> None:
    assert said(*[sums()] * 9) == [] == said(sums())


def test_attention_to_one_key_shows_no_sign() -> None:
    """Such as a decoder that reads the embedding of one image."""
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), watch(layer, every=1) as seen:
        for _ in range(4):
            layer(torch.randn(2, 3, 8), *[torch.randn(2, 1, 8)] * 2)
    assert seen.sampled == 4
    assert not seen.verdicts()


def test_a_head_that_learns_where_to_look_is_no_failure() -> None:
    """Logits grow from 4 to 20, entropy falls to a tenth, 98 % of the queries saturate."""
    steps = [
        sums(
            max_logit={2: 4.0 + i},
            entropy={2: 2.0 - 0.1 * i},
            saturated_rows={2: i / 19},
            logit_variance={2: 1 + 5 * i},
        )
        for i in range(20)
    ]
    verdicts = recorded(*steps).verdicts()
    assert {v.sign for v in verdicts} == {"sharp", "growing logits", "collapsing entropy"}
    assert not any(v.failure or v.cause or v.remedy for v in verdicts) and {v.head for v in verdicts} == {2}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "saturated": (BAD, "weights of one head too large"),
    "padding": ({"padding": {1: 0.2}}, "no padding mask"),
    "dead": ({"logit_variance": {1: 1e-8}}, "keys that are all alike"),
    "no use of the query": ({"query_variance": {1: 1e-7}}, "queries that are all alike"),
    "values alike": ({"value_spread": {1: 0.0}}, "values that are all alike"),
    "near overflow": ({"max_logit": {1: 40000.0}, "dtype_max": 65504.0}, "scores above the range of the dtype"),
    "not a number": ({"nan_rows": {1: 5.0}, "nan_key": {1: 1}}, "NaN or infinity in the weights of one head"),
}


def test_a_whole_layer_may_wait_while_the_loss_falls() -> None:
    """A post-norm layer began to learn after 80 steps without a use of its queries; a single head does not wait."""
    alike, flat, little = [sums(query_variance=1e-6)] * 3, [2.77] * 50, [2.77 - 0.01 * i for i in range(40)]
    assert {failure for *_, failure in said(*alike, losses=little)} == {False}
    for losses in ((), flat, [*little, *FALLING]):
        assert {failure for *_, failure in said(*alike, losses=losses)} == {True}
    assert said(*[sums(query_variance={1: 1e-6})] * 3, losses=little) == [("no use of the query", 1, 0, True)]


@pytest.mark.parametrize(("before", "signs"), [(3e-4, {"uniform"}), (3e-2, {"uniform", "no use of the query"})])
def test_queries_that_never_had_much_effect_may_lose_it(before: float, signs: set[str]) -> None:
    """In a Perceiver whose latents start small, numbers around the threshold are no fault."""
    first, later = (sums(query_variance={1: x}, logit_variance={1: 1e-3}) for x in (before, 5e-5))
    assert {sign for sign, *_ in said(first, later, later)} == signs


def test_queries_may_become_alike_slowly_while_the_loss_falls() -> None:
    """Latents of a Perceiver, where all look at the same tokens; weights set to a constant do so at once."""
    for factor, fails in ((0.3, False), (1e-6, True)):
        drift = [sums(query_variance={1: max(1e-3 * factor**i, 1e-5)}) for i in range(6)]
        assert said(*drift, losses=FALLING) == [("no use of the query", 1, 20 if factor > 0.1 else 10, fails)]
        assert recorded(*drift).failing() == [("a.0", 1)]
    never = [sums(query_variance={1: 1e-8}, logit_variance={1: x}) for x in (1e-3, 1e-2, 0.1, 0.1)]
    assert ("no use of the query", 1, 10, True) in said(*never, losses=FALLING)
    # The logits of a bias, as ALiBi's, differ whatever the queries are.
    assert said(*[sums(query_variance={1: 1e-8}, biased=1.0)] * 3) == []
    lost = sums(query_variance={1: 1e-8}, biased=1.0)
    assert said(sums(biased=1.0), lost, lost) == [("no use of the query", 1, 10, True)]


def test_keys_at_padding_make_a_head_average() -> None:
    """They are alike: the mask that is left out is the only failure of head 1; head 2 has another."""
    steps = [sums(padding={1: 0.8}, logit_variance={1: 1e-8, 2: 1e-8})] * 3
    verdicts = recorded(*steps).verdicts()
    assert [(v.sign, v.head, v.failure) for v in verdicts] == [
        ("padding", 1, True), ("dead", 2, True), ("dead", 1, False)
    ]  # fmt: skip
    assert [v.cause for v in verdicts] == ["no padding mask", "keys that are all alike", ""]


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_with_its_head_step_and_cause(what: str) -> None:
    numbers, cause = FAULTS[what]
    records = recorded(*[sums()] * 5, *[sums(**numbers)] * 3)
    (verdict, *others) = records.verdicts()
    assert (verdict.sign, verdict.layer, verdict.head, verdict.first_step, verdict.last_step) == (
        what,
        "a.0",
        1,
        50,
        70,
    )
    assert verdict.failure and verdict.cause == cause and ":\n" in verdict.remedy
    assert not any(each.failure for each in others) and records.failing() == [("a.0", 1)]
    # Two sampled steps are enough, and for numbers that do not come and go one is.
    assert recorded(*[sums()] * 5, *[sums(**numbers)] * 2).failing() == [("a.0", 1)]
    immediate = what in ("not a number", "near overflow")
    assert bool(recorded(*[sums()] * 5, sums(**numbers)).failing()) == immediate
    # In a single forward pass the one step decides.
    assert recorded(sums(**numbers)).failing() == [("a.0", 1)]


def test_the_words_of_values_that_are_alike() -> None:
    (verdict, *_) = recorded(*[sums()] * 5, *[sums(value_spread={1: 1e-7})] * 3).verdicts()
    assert verdict.words == "the variance of the values is 1e-07 of their mean square"


def test_the_old_name_of_a_sign_warns_and_works() -> None:
    numbers, _ = FAULTS["dead"]
    (verdict, *_) = recorded(*[sums()] * 5, *[sums(**numbers)] * 3).verdicts()
    with pytest.warns(DeprecationWarning, match=r"Verdict\.what is now Verdict\.sign.*until 0\.2") as caught:
        assert verdict.what == verdict.sign == "dead"
    assert caught[0].filename == __file__


def test_now_decides_and_the_end_of_a_failure_is_said() -> None:
    good, bad = sums(), sums(**BAD)
    assert said(good, bad, good, bad, good) == [], "one step alone is none"
    records = recorded(good, good, bad, bad, good, bad, good, good, good)
    (verdict,) = [v for v in records.verdicts() if v.sign == "saturated"]
    assert not verdict.failure and (verdict.first_step, verdict.last_step) == (20, 50) and records.failing() == []
    assert "no more after step 50" in str(records)
    assert "No head fails.\nObserved, not failures:\na.0, head 1" in str(records)
    again = recorded(good, bad, bad, good, good, bad, bad)
    (verdict, *_) = again.verdicts()
    assert verdict.failure and verdict.first_step == 50 and "earlier from step 10 to 20 too" in verdict.words


def test_the_memory_is_the_same_however_often_one_looks() -> None:
    steps = [sums()] * 4 + [sums(**BAD)] * 2 + [sums()] * 2 + [sums(**BAD)] * 3
    looked_once, looked_often = recorded(*steps), Records(Thresholds())
    layer = looked_often.layers.setdefault("a.0", Layer("a.0", HEADS, deque(maxlen=3)))
    for number, step in enumerate(steps):
        layer.add(number * 10, step)
        looked_often.verdicts()
    assert looked_once.verdicts() == looked_often.verdicts()
    looked_once.thresholds = Thresholds(saturated_variance=1e4, jump=1e6)
    assert looked_once.failing() == []
    looked_once.clear()
    assert looked_once.verdicts() == []


def test_a_variance_that_overflowed_is_large() -> None:
    assert said(sums(saturated_rows={0: 0.5}, logit_variance={0: math.nan}))[0] == ("saturated", 0, 0, True)


def test_a_jump_is_no_learning() -> None:
    jumped = sums(saturated_rows={3: 0.5}, logit_variance={3: 60.0})
    slow = [sums(saturated_rows={3: 0.1 * i}, logit_variance={3: 1.0 + 12 * i}) for i in range(6)]
    assert said(*[sums()] * 3, jumped, jumped)[0] == ("saturated", 3, 30, True)
    # In 100 steps a head may learn as much.
    assert [sign for sign, *_ in said(*[sums()] * 3, jumped, jumped, every=100)] == ["sharp"]
    assert not any(failure for *_, failure in said(*slow))


def test_verdicts_come_in_the_order_of_their_first_step() -> None:
    first, second = (
        sums(query_variance={3: 0.0}),
        sums(query_variance={3: 0.0}, value_spread={0: 0.0}, first_key={1: 0.6}),
    )
    records = recorded(sums(), first, first, second, second)
    assert [(v.sign, v.head, v.first_step) for v in records.verdicts()] == [
        ("no use of the query", 3, 10), ("values alike", 0, 30), ("sink", 1, 30),
    ]  # fmt: skip
    assert records.failing() == [("a.0", 3), ("a.0", 0)]


def test_what_follows_a_nan_is_folded_under_it() -> None:
    good, first, dead = sums(), sums(nan_rows={2: 100.0}, nan_query={2: 1}, rows={2: 0}), sums(nan_rows=100.0, rows=0.0)
    layers = [{"a.0": good, "a.1": good, "a.2": good}] * 3
    records = recorded(*layers, {"a.0": good, "a.1": first, "a.2": dead}, *[{f"a.{i}": dead for i in range(3)}] * 2)
    (verdict,) = records.verdicts()
    assert (verdict.layer, verdict.head, verdict.first_step) == ("a.1", 2, 30) and records.failing() == [("a.1", 2)]
    assert len(verdict.followers) == 11 and verdict.cause == "NaN or infinity in the weights of one head"
    assert "11 other heads have followed" in str(records) and "NaN or infinity in its query" in str(records)
    everywhere = sums(nan_rows=5.0, nan_query=1.0, nan_key=1.0, nan_value=1.0)
    assert {v.cause for v in recorded(everywhere).verdicts()} == {"NaN or infinity in the layer's input or weights"}
    overflowed = sums(nan_rows={0: 5.0}, overflow_rows={0: 5.0}, dtype_max=65504.0)
    assert recorded(overflowed).verdicts()[0].cause == "scores above the range of the dtype"


def test_what_came_before_a_nan_stays_the_first_failure() -> None:
    saturated = sums(saturated_rows=0.6, logit_variance=400.0)
    lost = sums(rows=0.0, choice_rows=0.0, nan_rows=100.0, nan_query=1.0, nan_key=1.0, nan_value=1.0)
    layers = {"a.0": sums(), "a.1": sums()}
    records = recorded(*[layers] * 6, *[dict.fromkeys(layers, saturated)] * 2, *[dict.fromkeys(layers, lost)] * 3)
    verdicts = [verdict for verdict in records.verdicts() if verdict.failure]
    assert verdicts[0].sign == "saturated" and verdicts[0].first_step == 60 and verdicts[0].last_step == 70
    assert verdicts[0].cause == "learning rate too large" and "variance of the logits 400" in verdicts[0].words
    assert verdicts[-1].sign == "not a number" and verdicts[-1].first_step == 80


def test_causes_follow_from_which_heads_fail_and_when() -> None:
    def cause(*steps: Any) -> set[str]:
        return {v.cause for v in recorded(*steps).verdicts() if v.failure}

    all_heads = sums(saturated_rows=0.6, logit_variance=400.0)
    assert cause(*[all_heads] * 2) == {"no scale, or weights that start too large"}
    assert cause(*[sums()] * 5, *[all_heads] * 2) == {"learning rate of one layer too large"}
    for ratio, expected in (
        (22.6, "no scale, or weights that start too large"),
        (1.0, "weights of one head too large"),
    ):
        one_head = [{name: x[:1] for name, x in sums(**numbers, scale_ratio=ratio).items()}
                    for numbers in ({}, {"saturated_rows": 0.6, "logit_variance": 400.0})]  # fmt: skip
        for steps in ([one_head[1]] * 2, [one_head[0], one_head[1], one_head[1]]):
            assert cause(*steps) == {expected}, "the only head of a layer"
    good, both = {"a.0": sums(), "a.1": sums()}, {"a.0": all_heads, "a.1": all_heads}
    assert cause(*[good] * 3, *[both] * 2) == {"no warm-up, or a learning rate that starts too large"}
    assert cause(*[good] * 5, *[both] * 2) == {"learning rate too large"}
    alike = sums(query_variance=0.0, value_spread=1e-5)
    assert cause(sums(), alike, alike) == {"tokens that have become alike"}
    # Tokens that are alike have alike queries too: here the weights of the values are 0, or only the scores are known.
    for variance in (9.6, math.nan):
        values = sums(query_variance=variance, value_spread=0.0)
        assert cause(sums(), values, values) == {"values that are all alike"}
    saturated = {"a.0": sums(saturated_rows=0.6, logit_variance=400.0), "a.1": sums(value_spread=0.0)}
    records = recorded(*[{"a.0": sums(), "a.1": sums()}] * 3, saturated, saturated)
    assert {v.cause for v in records.verdicts() if v.layer == "a.1"} == {"values that are all alike"}
    one_key = sums(query_variance={0: 0.0}, jacobian_trace={0: 1e-4})
    assert cause(sums(), one_key, one_key) == {"one key that outweighs all others"}
    for heads in (0.6, {1: 0.6}):  # neither weights nor 1/sqrt(d) make the logits of a cosine smaller
        cosine = sums(saturated_rows=heads, logit_variance=400.0, other_score=1.0)
        assert cause(cosine, cosine) == {"scale of the score too large"}
    assert cause(sums(padding=1.0)) == {"inverted mask"}
    assert cause(sums(first_key=0.99)) == {"a first key that takes all weight"}
    assert cause(sums(first_key={0: 0.99, 1: 0.99, 2: 0.99})) == set()
    # A decoder that reads in order attends to the first key in its first calls.
    for queries, fails in ((1, False), (2, True)):
        length = {"queries": np.full(HEADS, queries)}
        in_order = {"attention": sums(first_key=0.99) | length, "attention #2": sums(first_key=0.3) | length}
        assert bool(recorded(in_order, in_order).failing()) == fails


def test_a_layer_without_the_causal_mask_of_the_others() -> None:
    causal, leaks = sums(choice_rows=ROWS - 4, causal_sequences=4.0), sums()
    decoder = {f"decoder.{i}.attn": causal for i in range(3)} | {"encoder.0.attn": leaks, "encoder.1.attn": leaks}
    assert recorded(decoder).failing() == []
    records = recorded(decoder, decoder | {"decoder.1.attn": leaks})
    assert records.failing() == [("decoder.1.attn", head) for head in range(HEADS)]
    assert {v.cause for v in records.verdicts()} == {"no causal mask"}
    # In a text of one token the only query sees one key, and under an inverted mask queries may see one of padding.
    short = {"encoder.0.attn": leaks, "encoder.1.attn": sums(choice_rows=ROWS - 4)}
    assert recorded(short, short).failing() == []
    # An image beside texts has another number of queries: its layer is of another kind.
    texts = {"towers.0": causal, "towers.1": causal, "towers.2": sums(rows=2 * ROWS)}
    assert recorded(texts, texts).failing() == []
    # So has attention to another sequence of other keys; with as many keys, a last number in the name may mean it.
    other = leaks | {"keys": np.full(HEADS, 10.0)}
    for names, layer, fails in (("0 1", leaks, True), ("0 1", other, False), ("attn1 attn2", leaks, False),
                                ("attn attn_1", leaks, False)):  # fmt: skip
        pair = dict(zip((f"block.{name}" for name in names.split()), (causal, layer), strict=True))
        assert bool(recorded(pair, pair).failing()) == fails
    inverted = {"encoder.0.attn": leaks, "encoder.1.attn": sums(choice_rows=ROWS - 4, padding=1.0)}
    assert {v.cause for v in recorded(inverted, inverted).verdicts()} == {"inverted mask"}


LARGE_SCALE = {"scale_ratio": 8.0, "saturated_rows": {1: 0.5}, "logit_variance": {1: 100.0}}
SMALL_SCALE = {"scale_ratio": 1 / 8, "logit_variance": 1e-3}
NO_SCALE, TWICE = "no scale, or weights that start too large", "scale applied twice, or weights that are too small"


@pytest.mark.parametrize(
    ("numbers", "heads", "cause"), [(LARGE_SCALE, [1], NO_SCALE), (SMALL_SCALE, range(HEADS), TWICE)]
)
def test_a_layer_with_another_scale_than_its_siblings(numbers: Any, heads: Any, cause: str) -> None:
    step = {"a.0": sums(), "a.1": sums(**numbers)}
    records = recorded(step, step, step, losses=FALLING)
    assert records.failing() == [("a.1", head) for head in heads]
    first = records.verdicts()[0]
    assert (first.sign, first.first_step, first.cause) == ("another scale", 0, cause)
    assert f"{numbers['scale_ratio']:.3g} times 1/sqrt(d)" in first.words
    # Where all layers have it, or no other one is known, it is a choice, as T5's is.
    unknown = {"a.0": sums(scale_ratio=math.nan), "a.1": step["a.1"]}
    for steps in ({"a.0": step["a.1"], "a.1": step["a.1"]}, unknown, {"b.0": sums(), "a.1": step["a.1"]}):
        records = recorded(steps, steps, losses=FALLING)
        assert records.failing() == []
        assert ("unusual scale", "a.1") in [(v.sign, v.layer) for v in records.verdicts()]


def test_a_scale_that_the_weights_do_not_show_is_no_verdict() -> None:
    for ratio in (8.0, 1 / 8, 1.0, math.nan):
        other = {"a.0": sums(), "a.1": sums(scale_ratio=ratio)}
        assert said(other, other) == []
    slightly = {"a.0": sums(), "a.1": sums(**{**SMALL_SCALE, "scale_ratio": 0.5})}
    assert {what for what, *_ in said(slightly, slightly)} == {"uniform"}


def test_an_unusual_scale_is_a_failure_while_the_loss_suffers() -> None:
    flat = recorded(*[sums(**SMALL_SCALE)] * 9, losses=[4.0] * 90)
    assert flat.failing() == [], "a warm-up"
    flat = recorded(*[sums(**SMALL_SCALE)] * 20, losses=[4.0] * 200)
    assert {(v.sign, v.cause) for v in flat.verdicts() if v.failure} == {("uniform", TWICE), ("unusual scale", TWICE)}
    large = recorded(*[sums(**LARGE_SCALE)] * 16, losses=RISING)
    assert ("unusual scale", NO_SCALE) in {(v.sign, v.cause) for v in large.verdicts() if v.failure}
    # Uniform weights make no loss rise.
    assert recorded(*[sums(**SMALL_SCALE)] * 16, losses=RISING).failing() == []


FALLING = [4.0 - 0.02 * i for i in range(100)]
RISING = FALLING + [2.0 + 0.02 * i for i in range(60)]


def test_what_healthy_training_shows_too_is_a_failure_while_the_loss_suffers() -> None:
    grows = [sums(max_logit={0: 4.0 + i}) for i in range(16)]
    assert [failure for *_, failure in said(*grows)] == [False] == [f for *_, f in said(*grows, losses=FALLING)]
    records = recorded(*grows, losses=RISING)
    (verdict,) = records.verdicts()
    assert verdict.failure and verdict.sign == "growing logits" and "the loss rises" in verdict.words
    assert verdict.cause == "logits that grow while the loss suffers"
    # A failure by itself needs no second one.
    grows[-1] = grows[-2] = sums(max_logit={0: 20.0}, value_spread={1: 0.0})
    assert recorded(*grows, losses=RISING).failing() == [("a.0", 1)]
    flat = sums(logit_variance=1e-3)
    assert recorded(*[flat] * 9).failing() == []
    for first in (flat, sums(logit_variance=0.0)):
        assert recorded(first, *[flat] * 9, losses=[4.0] * 90).failing() == [], "a warm-up"
    (verdict, *_) = recorded(*[flat] * 20, losses=[4.0] * 200).verdicts()
    assert verdict.sign == "uniform" and verdict.cause == "scale applied twice, or weights that are too small"


def test_a_layer_whose_weights_start_at_0_gets_a_few_steps() -> None:
    layer, head = sums(logit_variance=0.0), sums(logit_variance={1: 0.0})
    for step, losses, count in ((layer, [], 4), (layer, [2.8], 0), (layer, [2.8] * 20, 4), (head, [2.8], 1)):
        assert len(recorded(step, losses=losses).failing()) == count
    assert len(recorded(sums(), layer, layer, losses=[2.8]).failing()) == 4


def test_what_has_been_there_from_the_start_does_not_keep_the_loss_there() -> None:
    """A model that was trained before has sharp heads, and may learn nothing more."""
    sharp = sums(saturated_rows={1: 0.6}, logit_variance={1: 30.0}, max_logit={1: 120.0})
    assert {sign for sign, *_ in said(*[sharp] * 9)} == {"sharp", "large logits"}
    assert recorded(*[sharp] * 9, losses=[1.4] * 90).failing() == []
    assert recorded(sums(), *[sharp] * 9, losses=[1.4] * 90).failing() == [("a.0", 1)]
    assert recorded(*[sharp] * 16, losses=RISING).failing() == [("a.0", 1)]


def test_a_loss_that_falls_allows_a_head_to_become_sharper() -> None:
    slow = [sums(saturated_rows={3: min(0.9, 0.1 * i)}, logit_variance={3: 1.0 + 20 * i}) for i in range(12)]
    assert recorded(*slow).failing() == [("a.0", 3)] == recorded(*slow, losses=RISING).failing()
    assert recorded(*slow, losses=FALLING).failing() == []
    beyond = [*slow, *[sums(saturated_rows={3: 0.9}, logit_variance={3: 700.0})] * 2]
    immediate = [*slow[:2], *[sums(saturated_rows={3: 0.9}, logit_variance={3: 400.0})] * 2]
    for steps in (beyond, immediate):
        assert recorded(*steps, losses=FALLING).failing() == [("a.0", 3)]


def test_losses() -> None:
    limit = Thresholds()
    noisy = np.random.default_rng(0).normal(0, 0.3, 400)
    for start in (FALLING, [4 * 0.99**i + 0.1 * x for i, x in enumerate(noisy)]):
        assert loss_trouble(start, limit) == "" and loss_trouble([*start, math.nan], limit) == "is not finite"
    assert loss_trouble(RISING, limit) == "rises" and loss_trouble([2.77 + 0.02 * x for x in noisy], limit) != "rises"
    flat = np.random.default_rng(1).normal(2.77, 0.02, (100, 100))
    assert sum(loss_trouble(losses, limit) == "rises" for losses in flat) < 20, "half of them by two standard errors"
    spikes = [*FALLING, 2.0, 9.0, 2.0, 2.0, 9.0, *[2.0] * 5]
    assert loss_trouble(spikes, limit) == "", "two batches of ten are no rise"
    assert loss_trouble([*FALLING, *[4.0, 9.0] * 5], limit) == "rises"
    assert loss_trouble([2.77] * 50, limit) == "stays at its start" and loss_trouble([3.0] * 5, limit) == ""
    learnt = [3.7 * 0.97**i for i in range(120)]
    for jump in range(1, 13):
        assert loss_trouble([*learnt, *[1.0, 6.0, 10.0] * 4][: 120 + jump], limit) in ("", "rises")
    records = Records(limit)
    for step in range(20_000):
        records.record_loss(1.0, step)
    assert len(records._losses) <= 4096 and records._losses[-1][0] > 19_000


def test_thresholds_can_be_set() -> None:
    assert said(sums(max_logit={0: 60.0}), thresholds=Thresholds(tau=50.0)) == [("large logits", 0, 0, False)]
    assert said(sums(first_key={0: 0.2}), thresholds=Thresholds(sink_mass=0.15)) == [("sink", 0, 0, False)]
    assert said(sums(**BAD), sums(), sums(**BAD), thresholds=Thresholds(window=1))[0] == ("saturated", 1, 20, True)
    rows = recorded(sums(max_logit={0: 60.0, 1: -3.0, 2: -math.inf}), thresholds=Thresholds(tau=50.0)).rows()
    assert [row["clip"] for row in rows] == [50 / 60, 1.0, 1.0, 1.0]
    for wrong in ({"tau": 0.0}, {"sink_mass": 1.5}, {"growth": 1.0}, {"collapse": math.nan}, {"window": 1.5}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            Thresholds(**wrong)


def test_text_lines_page_and_picture_say_the_same(tmp_path: Any) -> None:
    records = recorded(*[sums()] * 3, *[sums(**BAD)] * 3)
    verdict = records.verdicts()[0]
    words, code = verdict.remedy.split(":\n", 1)
    code = textwrap.indent(code, " " * 8)
    cause = f"{verdict}\n    cause: {verdict.cause}\n    try: {words}:\n{code}\nObserved, not failures:\n"
    assert cause in str(records) and "No head fails" not in str(records)
    lines = [json.loads(line) for line in records.json_lines()]
    showing = {(line["step"], line["head"]) for line in lines if "saturated" in line["verdicts"]}
    assert showing == {(step, 1) for step in (30, 40, 50)}
    title = records.plot().get_suptitle()
    assert "1 of 4 heads fail" in title and "a.0, head 1: saturated since step 30" in title
    page = records.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "saturated since step 30" in page and verdict.cause in page and "qk_clip(model, seen, tau=10, heads=" in page
    assert f'<pre tabindex="0">{html.escape(textwrap.dedent(code))}</pre>' in page, "lines that can be copied"
    failures, observed = page.split("Observed, not failures</h2>")
    assert "saturated since" in failures and "growing logits since" not in failures
    assert "growing logits since" in observed


def test_every_failure_has_words() -> None:
    assert set(FAULTS) | {"causal leak", "sink in every head", "another scale"} == set(FAILURES) <= set(SIGNS)
    assert {each.name for each in dataclasses.fields(Thresholds)} >= {"window", "query_variance", "value_spread"}


def test_a_layer_whose_rate_is_too_large_is_told_from_a_model_whose_rate_is() -> None:
    """From the start: the other layers tell, by what fails and by what grows in them."""
    all_heads, grown = sums(saturated_rows=0.6, logit_variance=400.0), sums(max_logit=30.0)
    good = {"a.0": sums(), "a.1": sums()}
    alone = recorded(good, *[{"a.0": sums(), "a.1": all_heads}] * 2)
    assert {v.cause for v in alone.verdicts()} == {"learning rate of one layer too large"}
    assert "restore a checkpoint from before step 10" in str(alone) and "healthy at theirs" in str(alone)
    for others in (grown, sums(saturated_rows=0.6), sums(query_variance=0.0)):
        both = recorded(good, *[{"a.0": others, "a.1": all_heads}] * 2)
        causes = {v.cause for v in both.verdicts() if v.layer == "a.1" and v.sign == "saturated"}
        assert causes == {"no warm-up, or a learning rate that starts too large"}
    late = recorded(good, *[{"a.0": sums(), "a.1": all_heads}] * 8, *[{"a.0": grown, "a.1": all_heads}] * 8)
    causes = {v.cause for v in late.verdicts() if v.failure}
    assert causes == {"learning rate of one layer too large"}, "healthy logits grow later"
    single = recorded(sums(), all_heads, all_heads)
    assert {v.cause for v in single.verdicts()} == {"no warm-up, or a learning rate that starts too large"}


def test_nan_in_the_values_alone_is_said() -> None:
    records = recorded(sums(), sums(nan_value={1: 1.0}))
    (verdict,) = records.verdicts()
    assert verdict.sign == "not a number" and verdict.head == 1
    assert "the weights are numbers; NaN or infinity in its values" in verdict.words


def test_a_loss_that_suffers_without_a_head_that_fails_points_elsewhere(tmp_path: Any) -> None:
    steps = [sums()] * 16
    assert str(recorded(*steps, losses=FALLING)).endswith("No head fails.")
    for losses, trouble in ((RISING, "rises"), ([4.0] * 90, "stays at its start"), ([math.nan], "is not finite")):
        records = recorded(*steps, losses=losses)
        said = (
            f"No head fails, but the loss {trouble}: attention looks healthy; look at the MLPs, the data, the learning"
        )
        assert said in str(records) and said in records.to_html(tmp_path / "page.html").read_text("utf-8")
    grows = [sums(max_logit={0: 4.0 + i}) for i in range(16)]
    assert "attention looks healthy" not in str(recorded(*grows, losses=RISING))
    assert "No head" not in str(recorded())


def test_a_step_with_nan_is_the_worst_in_the_picture() -> None:
    lost = sums(rows={2: 0.0}, choice_rows={2: 0.0}, nan_rows={2: 100.0})
    lost["nan_value"] = np.array([0.0, 1.0, 0.0, 0.0])
    figure = recorded(sums(), lost, *[sums()] * 3).plot()
    for axis in figure.axes:
        marked = sorted(patch.get_xy()[0] + 0.5 for patch in axis.patches if patch.get_gid() == "nan")
        assert marked == ([1, 2] if "worst" in axis.get_title() else [])
