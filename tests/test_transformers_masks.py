"""Masks of transformers as mask objects: the same as the boolean array that transformers itself makes, and no array."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import masking_utils as own

import attnscore as ats
from attnscore.integrations import transformers_masks
from attnscore.integrations.transformers import attention_forward, attention_mask, register
from attnscore.integrations.transformers_masks import StructuredMask
from attnscore.masks import MaskFunction
from attnscore.masks.base import And
from transformers_cases import make

NAME = register()
PADDING = torch.ones(2, 12, dtype=torch.bool)
PADDING[0, :4] = False
LEFT = torch.tensor([4, 0])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]])
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1]])


def scalar_pattern(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """What a user writes: of one pair."""
    return torch.where(key % 3 == 0, True, PADDING[batch, key])


def within(pattern: Any) -> Any:
    remapped = own.remap_positions_for_packed_sequence(pattern, POSITIONS)
    return own.and_masks(remapped, own.packed_sequence_mask_function(SEQUENCES))


CAUSAL, WINDOW = own.causal_mask_function, own.sliding_window_causal_mask_function(3)
CHUNKS = own.chunked_causal_mask_function(3, LEFT)
PATTERNS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    # name: pattern, further arguments, whether it is known without asking for every pair
    "causal": (CAUSAL, {}, True),
    "full": (own.bidirectional_mask_function, {}, True),
    "window": (WINDOW, {}, True),
    "window-overlay": (own.sliding_window_overlay(2), {}, True),
    "window-two-sided": (own.sliding_window_bidirectional_mask_function(2), {}, True),
    "chunks": (CHUNKS, {}, True),
    "image-blocks": (own.or_masks(CAUSAL, own.blockwise_overlay(BLOCKS)), {}, False),
    "image-blocks-and-window": (own.or_masks(WINDOW, own.blockwise_overlay(BLOCKS)), {}, False),
    "user-and": (own.and_masks(CAUSAL, scalar_pattern), {"use_vmap": True}, False),
    "user-or": (own.or_masks(WINDOW, lambda b, h, q, k: k < 2), {"use_vmap": True}, False),
    "padding": (own.and_masks(CAUSAL, own.padding_mask_function(PADDING)), {}, False),
}
if hasattr(own, "remap_positions_for_packed_sequence"):  # since transformers 5.23
    PATTERNS |= {
        "packed": (within(CAUSAL), {}, True),
        "packed-window": (within(WINDOW), {}, True),
        "packed-chunks": (within(CHUNKS), {}, False),
    }
PLACES = {
    # queries, keys, offsets of both: all at once; after others; a cache of fixed size; a window that let keys go
    "whole": (10, 10, 0, 0),
    "after": (4, 9, 5, 0),
    "static": (4, 12, 5, 0),
    "static-tensor": (4, 12, torch.tensor(5), 0),
    "sliding": (4, 7, 7, 4),
}


# transformers looks for packed sequences where there is no cache alone.
SOME = ("packed-chunks", "image-blocks", "chunks", "packed-window", "user-or")
BOTH = [(name, place) for name in PATTERNS for place in PLACES if not name.startswith("packed") or place == "whole"]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("name", "place"), BOTH)
def test_the_same_as_transformers(name: str, place: str, padded: bool) -> None:
    pattern, options, known = PATTERNS[name]
    queries, keys, q_offset, kv_offset = PLACES[place]
    last = keys + kv_offset if place.startswith("static") else int(q_offset) + queries
    padding = PADDING[:, : min(12, last)] if padded else None
    given = (2, queries, keys, q_offset, kv_offset, pattern, padding)
    made = attention_mask(*given, allow_is_causal_skip=False, **options)
    wanted = own.sdpa_mask(*given, allow_is_causal_skip=False, **options)
    assert isinstance(made, StructuredMask) and made.shape == wanted.shape == (2, 1, queries, keys)
    found = made.structure.materialize(queries, keys, 2)
    np.testing.assert_array_equal(np.broadcast_to(found, (2, queries, keys)), wanted[:, 0].numpy())
    assert torch.equal(made & True, wanted)
    asked = [part for part in parts_of(made.structure) if isinstance(part, MaskFunction)]
    assert bool(asked) != known, made.structure
    # What is asked is asked in torch's words, and becomes intervals where it can.
    x = torch.zeros(2, 1, queries, 2), torch.zeros(2, 1, keys, 2), torch.zeros(2, 1, keys, 2)
    weights = ats.attend(*x, mask=made.structure, return_weights=True)[1]
    assert torch.equal(weights > 0, wanted)


def parts_of(mask: Any) -> list[Any]:
    return [*parts_of(mask.first), *parts_of(mask.second)] if isinstance(mask, And) else [mask]


@pytest.mark.parametrize("name", [x for x in SOME if x in PATTERNS])
def test_patterns_become_intervals_where_they_are(name: str) -> None:
    pattern, options, _ = PATTERNS[name]
    made = attention_mask(2, 10, 10, mask_function=pattern, **options)
    x = torch.zeros(2, 1, 10, 2)
    explained = ats.explain(x, x, x, mask=made.structure)
    assert explained.plan.interval_set is not None and explained.plan.remaining_mask is None
    assert (explained.plan.interval_set.count > 1) == (name == "user-or")


def test_what_is_known_is_transformers_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of transformers that did something else one day would be asked pair by pair, not misread."""

    def sliding_window_overlay(sliding_window: int) -> Any:
        def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    def own_pattern(sliding_window: int) -> Any:
        return own.and_masks(sliding_window_overlay(sliding_window), CAUSAL)

    transformers_masks._kinds.cache_clear()
    monkeypatch.setattr(own, "sliding_window_overlay", sliding_window_overlay)
    try:
        made = attention_mask(2, 10, 10, mask_function=own_pattern(3))
        assert any(isinstance(part, MaskFunction) for part in parts_of(made.structure))
        wanted = own.sdpa_mask(2, 10, 10, mask_function=own_pattern(3), allow_is_causal_skip=False)
        np.testing.assert_array_equal(made.structure.materialize(10, 10, 2), wanted[:, 0].numpy())
    finally:
        transformers_masks._kinds.cache_clear()


def test_one_query_gets_transformers_own_mask() -> None:
    for options in ({}, {"allow_is_causal_skip": False}):
        given = (2, 1, 12, 11, 0, CAUSAL, PADDING)
        made, wanted = attention_mask(*given, **options), own.sdpa_mask(*given, **options)
        assert type(made) is torch.Tensor and torch.equal(made, wanted)
    assert attention_mask(2, 1, 12, 11, 0, CAUSAL, None) is None


def test_a_cache_that_goes_on_counting_changes_no_mask() -> None:
    counted = torch.tensor(5)
    made = attention_mask(2, 4, 12, counted, 0, WINDOW)
    before = made.structure.materialize(4, 12, 2)
    counted += 4
    np.testing.assert_array_equal(made.structure.materialize(4, 12, 2), before)
    np.testing.assert_array_equal((made & True)[:, 0].numpy(), before)


def test_an_object_is_a_tensor_for_who_computes_with_it() -> None:
    made = attention_mask(2, 10, 10, mask_function=WINDOW)
    wanted = own.sdpa_mask(2, 10, 10, mask_function=WINDOW, allow_is_causal_skip=False)
    assert made.dtype == torch.bool and made.ndim == 4 and not made.is_floating_point()
    assert made.contiguous() is made and made.to("cpu", torch.bool) is made
    assert made.detach().structure is made.structure
    assert torch.equal(made[:, :, :, -3:], wanted[:, :, :, -3:])
    assert torch.equal(torch.where(made, 0.0, -1.0), torch.where(wanted, 0.0, -1.0))
    assert torch.equal(torch.cat([made, wanted]), torch.cat([wanted, wanted]))
    assert repr(made).startswith("StructuredMask(SlidingWindow(left=2") and "shape=(2, 1, 10, 10)" in repr(made)


def test_a_mask_that_is_added_to_scores_is_refused() -> None:
    """A layer with its own attention expects minus infinities: BigBird-Pegasus's encoder, the text model of BLIP."""
    scores = torch.zeros(2, 1, 10, 10)
    for add in (lambda mask: scores + mask, lambda mask: mask + scores, scores.add_):
        with pytest.raises(ats.ArgumentError, match=r"AttentionInterface.*Hint: attn_implementation=\"eager\""):
            add(attention_mask(2, 10, 10, mask_function=WINDOW))


def test_a_model_without_the_interface_is_refused() -> None:
    """transformers checks that where the implementation is changed, not where the model is made."""
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2, attn_implementation=NAME)
    model = transformers.BloomModel(config)
    for length in (1, 5):
        with pytest.raises(ats.ArgumentError, match=r"AttentionInterface.*got BloomAttention"):
            model(input_ids=torch.ones(1, length, dtype=torch.long), attention_mask=torch.ones(1, length))


def test_models_without_sdpa_attention_get_additive_masks() -> None:
    """DeepSeek V4 concatenates numbers to add; Llama takes booleans."""
    for kind, boolean in (("DeepseekV4", False), ("Llama", True)):
        assert getattr(transformers, f"{kind}Model")._supports_sdpa == boolean
        for queries in (1, 12):
            arguments = (2, queries, 12, 12 - queries, 0, CAUSAL, PADDING)
            config = getattr(transformers, f"{kind}Config")()
            mask = attention_mask(*arguments, config=config, dtype=torch.float32)
            expected = (own.sdpa_mask if boolean else own.eager_mask)(*arguments)
            assert mask.dtype == expected.dtype and torch.equal(
                torch.where(mask == 0, 0, 1), torch.where(expected == 0, 0, 1)
            )


class Layer(torch.nn.Module):
    is_causal = False


def test_a_row_of_padding_is_read_as_keys() -> None:
    """What a decoding step gets, and what a user may give: an interval where the padding is on one side."""
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 12, 8)
    out, _ = attention_forward(Layer(), q, k, k, PADDING[:, None, None])
    torch.testing.assert_close(out.transpose(1, 2), ats.attend(q, k, k, mask=ats.KeyPadding(PADDING)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, PADDING[:, None, None], enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_packed_sequences_with_windows_through_a_model() -> None:
    model = make("mistral")
    ids = torch.randint(3, 50, (2, 10), generator=torch.Generator().manual_seed(4))
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits)
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=1e-5)


# VmHWM, not what getrusage says: that begins with the peak of the process that started this one.
LONG = """
import torch, transformers
from attnscore.integrations.transformers import register
torch.set_num_threads(1)
length = {length}
config = transformers.MistralConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=length, sliding_window=256, attn_implementation="{name}",
)
register()
model = transformers.MistralForCausalLM(config)
ids = torch.randint(3, 50, (1, length))
padding = torch.ones_like(ids)
padding[:, :5] = 0
model(input_ids=ids[:, :64], use_cache=False).logits.sum().backward()

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = memory("VmRSS")
model(input_ids=ids, attention_mask=padding, use_cache=False).logits.sum().backward()
print(memory("VmHWM") - before)
"""


def peak(name: str, length: int) -> int:
    """Kilobytes that a model with windows needs for a forward and a backward, beside those before."""
    code = LONG.format(name=name, length=length)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return int(run.stdout.split()[-1])


@pytest.mark.slow
def test_a_long_context_takes_no_array_of_queries_by_keys() -> None:
    """8192 tokens in windows: one array of booleans would be 64 MB, and transformers' own attention makes several."""
    ours = peak(NAME, 8192)
    assert ours < 64 * 1024 * 3 / 4
    assert peak("eager", 4096) > 2 * ours


def test_a_part_that_transformers_does_not_have_is_asked_like_any_function(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = own.sliding_window_causal_mask_function(3)
    monkeypatch.delattr(own, "chunked_overlay")
    monkeypatch.setattr(own, "sliding_window_overlay", lambda: None)  # takes other arguments
    transformers_masks._kinds.cache_clear()
    try:
        kinds = transformers_masks._kinds()
        mask = attention_mask(1, 9, 9, mask_function=pattern)
    finally:
        transformers_masks._kinds.cache_clear()
    assert "causal" in kinds.values() and not {"chunks", "window", "and"} & set(kinds.values())
    dense = own.sdpa_mask(1, 9, 9, mask_function=pattern, allow_is_causal_skip=False)
    assert torch.equal(torch.as_tensor(mask.structure.materialize(9, 9)), dense[:, 0])
