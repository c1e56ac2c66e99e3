"""attnscore as an attention implementation of transformers: its two functions, and what they do in single models.

Every architecture is in ``test_transformers_models.py``, every pattern of a mask in ``test_transformers_masks.py``.
"""

import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import attnscore as ats
from attnscore.integrations.transformers import AttentionCall, attention_forward, attention_mask, register
from transformers_cases import IDS, LEFT_PADDED, make

NAME = register()


@pytest.mark.parametrize("by", ["position ids", "lengths", "both"])
def test_a_flattened_batch_is_the_padded_one(by):
    """Each token's logits, and the gradients, of what transformers' collator flattens; without one array of n x n."""
    model = make("llama")
    model.set_attn_implementation(NAME)
    lengths = [9, 1, 4]
    sequences = [IDS[0], IDS[1, :1], IDS[1, 2:6]]
    ids, seen = torch.zeros(3, 9, dtype=torch.long), torch.arange(9) < torch.tensor(lengths)[:, None]
    ids[seen] = torch.cat(sequences)
    collate = transformers.DataCollatorWithFlattening(
        return_position_ids=by != "lengths", return_flash_attn_kwargs=by != "position ids"
    )
    flattened = collate([{"input_ids": x.tolist()} for x in sequences], return_tensors="pt")
    flattened.pop("labels")
    assert ("cu_seq_lens_q" in flattened, "position_ids" in flattened) == (by != "position ids", by != "lengths")

    def results(**inputs):
        model.zero_grad()
        logits = model(**inputs, use_cache=False).logits
        logits = logits[0] if logits.shape[0] == 1 else logits[seen]
        (logits**2).mean().backward()
        return logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    padded = results(input_ids=ids, attention_mask=seen.long())
    torch.testing.assert_close(results(**flattened), padded, atol=2e-6, rtol=1e-4)


def test_the_mask_of_a_flattened_batch():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 7, 8)
    cu_query, cu_key = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = ats.Packed(cu_query, cu_key)
    layer, given = torch.nn.Identity(), {"cu_seq_lens_q": cu_query, "cu_seq_lens_k": cu_key, "max_length_q": 4}
    seen = torch.rand(1, 1, 6, 7) > 0.3
    cases = (
        (None, {}, packed),
        (None, {"is_causal": True}, packed.causal("bottom_right")),
        (ats.Causal(offset=1), {}, packed & ats.Causal(offset=1)),
        (seen, {}, packed & ats.Dense(seen)),
        (seen[:, :, :1], {}, packed & ats.KeyPadding(seen[:, 0, 0])),
    )
    for mask, options, meant in cases:
        out, _ = attention_forward(layer, q, k, k, mask, **given, **options)
        torch.testing.assert_close(out.transpose(1, 2), ats.attend(q, k, k, mask=meant))
    added = torch.randn(1, 1, 6, 7)
    out, _ = attention_forward(layer, q, k, k, added, **given)
    torch.testing.assert_close(out.transpose(1, 2), ats.attend(q, k, k, mask=packed, bias=added))
    with pytest.raises(ats.ArgumentError, match=r"cu_seq_lens_q: expected a batch of one row.*got 2 rows"):
        attention_forward(layer, q.expand(2, -1, -1, -1), k, k, None, **given)


def test_position_ids_become_cumulative_lengths():
    """A few numbers, which plans are cached by; ids that do not rise stay ids."""
    own = masking_utils
    sequences = torch.tensor([[0, 0, 0, 1, 1, 2]])
    pattern = own.and_masks(own.causal_mask_function, own.packed_sequence_mask_function(sequences))
    assert repr(attention_mask(1, 6, 6, mask_function=pattern).structure) == (
        "Causal(offset=0) & Packed(cu_query=[0, 3, 5, 6])"
    )
    pattern = own.packed_sequence_mask_function(sequences.flip(1))
    assert repr(attention_mask(1, 6, 6, mask_function=pattern).structure).startswith("Documents(")


def test_four_axis_masks_of_the_caller():
    model = make("bert")
    seen = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(7)) > 0.3
    seen |= torch.eye(9, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=IDS, attention_mask=added).last_hidden_state
        model.set_attn_implementation(NAME)
        for mask in (added, seen):
            ours = model(input_ids=IDS, attention_mask=mask).last_hidden_state
            assert (own - ours).abs().max() < 2e-6


def test_without_its_mask_function_padding_would_be_seen():
    """Why register() registers two functions: transformers drops masks of a name that has none, silently."""
    model, padded = make("bert"), LEFT_PADDED.flip(1)
    AttentionInterface.register("only_attention", AttentionInterface._global_mapping[NAME])
    try:
        states = {}
        for name in ("eager", NAME, "only_attention"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                states[name] = model(input_ids=IDS, attention_mask=padded).last_hidden_state[padded.bool()]
    finally:
        del AttentionInterface._global_mapping["only_attention"]
    assert (states["eager"] - states[NAME]).abs().max() < 2e-6
    assert (states["eager"] - states["only_attention"]).abs().max() > 1e-3


def test_observer_gets_statistics_of_the_same_pass_and_weights_on_request():
    model = make("bert")
    calls: list[AttentionCall] = []
    register("attnscore_observed", observer=calls.append)
    padded = LEFT_PADDED.flip(1)
    inputs = {"input_ids": IDS, "attention_mask": padded}
    model.set_attn_implementation("attnscore_observed")
    with torch.no_grad():
        model(**inputs)
        model.set_attn_implementation("eager")
        expected = model(**inputs, output_attentions=True).attentions
    assert [call.layer for call in calls] == [0, 1]
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.weights(), weights, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(call.weights(0), weights[0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(call.stats.max_weight, weights.amax(-1), atol=2e-6, rtol=1e-5)
        entropy = torch.special.entr(weights).sum(-1)
        torch.testing.assert_close(call.stats.entropy, entropy, atol=5e-6, rtol=1e-5)


# ---------------------------------------------------------------- the two functions by themselves

Q, K, V = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))


class Layer(torch.nn.Module):
    """Stands for an attention layer."""

    is_causal = False


def test_weights_are_returned_when_asked_for():
    out, weights = attention_forward(Layer(), Q, K, V, None, output_attentions=True)
    assert out.shape == (2, 5, 4, 8) and out.is_contiguous()
    torch.testing.assert_close(weights, ats.attention_weights(Q, K))
    assert attention_forward(Layer(), Q, K, V, None)[1] is None


@pytest.mark.parametrize(
    ("asked", "of_layer", "queries", "causal"),
    [
        (None, True, 5, False),
        (None, None, 5, False),
        (True, False, 5, True),
        (False, True, 5, False),
        (True, True, 1, False),
    ],
)
def test_causal_flag_without_a_mask(asked, of_layer, queries, causal):
    """What the layer says does not count: BridgeTower's encoders say that they are causal, Align's say nothing."""
    layer = torch.nn.Identity()
    if of_layer is not None:
        layer.is_causal = of_layer
    out, _ = attention_forward(layer, Q[:, :, :queries], K, V, None, is_causal=asked)
    mask = ats.Causal() if causal else None
    torch.testing.assert_close(out.transpose(1, 2), ats.attend(Q[:, :, :queries], K, V, mask=mask))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_follows_the_mode_of_the_layer(training):
    out, _ = attention_forward(Layer().train(training), Q, K, V, None, dropout=0.5)
    assert torch.equal(out, attention_forward(Layer(), Q, K, V, None)[0]) is not training


def test_scale_bias_and_float_mask_add_up():
    bias = torch.randn(1, 4, 5, 5)
    hidden = torch.zeros(2, 1, 5, 5)
    hidden[1, :, :, 3] = -torch.inf
    out, _ = attention_forward(Layer(), Q, K, V, hidden, scaling=0.7, position_bias=bias)
    expected = ats.attend(Q, K, V, score=ats.ScaledDot(0.7), bias=bias + hidden)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("named", [("attention_mask",), ("module", "query", "key", "value", "attention_mask")])
def test_arguments_by_keyword_as_models_pass_them(named):
    function = AttentionInterface()[NAME]
    arguments = {"module": Layer(), "query": Q, "key": K, "value": V, "attention_mask": torch.rand(2, 1, 5, 5) > 0.3}
    expected = attention_forward(*arguments.values(), scaling=0.7)[0]
    positional = [x for name, x in arguments.items() if name not in named]
    out, _ = function(*positional, **{name: arguments[name] for name in named}, scaling=0.7)
    torch.testing.assert_close(out, expected)


def test_selected_keys_are_those_that_the_mask_leaves():
    """What DeepSeek V3.2's indexer selects, in any order: a boolean array for eager attention, indices for others."""
    indices = torch.rand(2, 5, 5).argsort(-1)[..., :3]
    selected = torch.zeros(2, 5, 5, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    seen = torch.rand(2, 1, 5, 5) > 0.3
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask, expected in ((None, selected), (seen, seen & selected), (ats.Causal(), causal & selected)):
        out, _ = attention_forward(Layer(), Q, K, V, mask, indices=indices.int())
        torch.testing.assert_close(out.transpose(1, 2), ats.attend(Q, K, V, mask=expected))


@pytest.mark.parametrize("option", ["cache", "block_indices", "sinks"])
def test_what_would_change_the_result_is_refused(option):
    with pytest.raises(ats.ArgumentError, match=rf'{option}: .*Hint: model.set_attn_implementation\("eager"\)'):
        attention_forward(Layer(), Q, K, V, None, **{option: torch.zeros(1)})


def test_what_changes_nothing_is_ignored():
    out, _ = attention_forward(Layer(), Q, K, V, None, sliding_window=3, use_cache=True, cache=None)
    torch.testing.assert_close(out, attention_forward(Layer(), Q, K, V, None)[0])


@pytest.mark.parametrize("name", ["sdpa", "my_flash_attention", "eager", "hub/kernel"])
def test_names_that_transformers_reads_otherwise_are_refused(name):
    with pytest.raises(ats.ArgumentError, match="name"):
        register(name)


def test_masks_stay_objects_where_they_can():
    shape = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 5}
    padding = LEFT_PADDED.bool()
    causal = attention_mask(**shape, mask_function=masking_utils.causal_mask_function, attention_mask=padding)
    assert isinstance(causal.structure, ats.Mask)
    dense = masking_utils.sdpa_mask(**shape, attention_mask=padding, allow_is_causal_skip=False)
    assert torch.equal(torch.as_tensor(causal.structure.materialize(4, 9, 2)), dense[:, 0])
    full = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    assert isinstance(attention_mask(2, 9, 9, attention_mask=padding, **full).structure, ats.KeyPadding)
    assert attention_mask(2, 9, 9, **full) is None
    window = masking_utils.sliding_window_causal_mask_function(3)
    assert attention_mask(2, 9, 9, mask_function=window).shape == (2, 1, 9, 9)
    assert attention_mask(2, 9, 9, allow_is_causal_skip=False).dtype == torch.bool


def test_both_functions_are_registered():
    assert NAME == "attnscore" and NAME in AttentionInterface._global_mapping
    assert AttentionMaskInterface._global_mapping[NAME] is attention_mask


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ats.FrameworkError, match=r"attnscore\[demo\]"):
        register()
