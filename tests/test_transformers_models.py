"""Every architecture with attention by attnscore against its own eager attention."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import attnscore as ats
from attnscore.integrations.transformers import register
from transformers_cases import (
    ARCHITECTURE,
    DECODERS,
    IDS,
    LEFT_PADDED,
    LENGTH,
    PAIRS,
    SOUND,
    inputs_of,
    make,
    padding_of,
    result_of,
    rows_of,
)

NAME = register()
pytestmark = pytest.mark.usefixtures("one_thread")
architectures = pytest.mark.parametrize("name", ARCHITECTURE)
# float32, of logits near 1.
CLOSE = {"atol": 2e-6, "rtol": 0.0}


def both(name: str, padding: torch.Tensor | None) -> list[torch.Tensor]:
    """What the model gives for its tokens, with its own attention and with ours."""
    model, rows, found = make(name), rows_of(name, padding), []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        out = result_of(model(**inputs_of(name, padding)))
        found.append(out if rows is None else out[rows])
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that `attend` is called with."""
    masks: list[Any] = []

    def spy(*arrays: Any, **arguments: Any) -> Any:
        mask = arguments["mask"]
        if isinstance(mask, torch.Tensor) and arrays[0].shape[-2] > 1:
            raise AssertionError(f"an array of queries by keys: {tuple(mask.shape)}")
        masks.append(mask)
        return original(*arrays, **arguments)

    original = ats.attend
    monkeypatch.setattr(ats, "attend", spy)
    return masks


@architectures
@pytest.mark.parametrize("padded", ["none", "full", "padded"])
def test_results_equal_those_of_eager_attention(name: str, padded: str) -> None:
    padding = {"none": None, "full": torch.ones_like(LEFT_PADDED), "padded": padding_of(name)}[padded]
    with torch.no_grad():
        own, ours = both(name, padding)
    torch.testing.assert_close(ours, own, **CLOSE)


@architectures
def test_gradients_of_all_parameters(name: str) -> None:
    padding = padding_of(name)
    model, rows = make(name), rows_of(name, padding)
    found: list[dict[str, torch.Tensor]] = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = result_of(model(**inputs_of(name, padding)))
        out = out if rows is None else out[rows]
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    own, ours = found
    assert own.keys() == ours.keys() and len(own) > 8
    for parameter, grad in own.items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(ours[parameter] / scale, grad / scale, atol=3e-6, rtol=1e-4, msg=parameter)


@architectures
def test_masks_stay_objects(name: str, seen: list[Any]) -> None:
    """Without padding the masks of the table; with it those, and the padding beside them."""
    model, padding = make(name), padding_of(name)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        model(**inputs_of(name, None))
        assert tuple(map(str, seen)) == ARCHITECTURE[name].masks
        seen.clear()
        model(**inputs_of(name, padding))
    for mask, expected in zip(seen, ARCHITECTURE[name].masks, strict=True):
        if expected.startswith("Documents"):
            # Chunks begin at the first token.
            assert str(mask).startswith("Documents") and "KeyPadding" in str(mask)
        elif "attention_mask" in inputs_of(name, padding):
            keys = f"KeyPadding(array=<(2, {LENGTH}) torch.bool>)"
            own = expected.startswith("Causal") and ARCHITECTURE[name].kind == "pair"
            assert str(mask) == (expected if own else keys if expected == "None" else f"{expected} & {keys}")


def generate(model: Any, implementation: str, **options: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True} | options
    found: torch.Tensor = model.generate(**arguments)
    return found


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(name: str, cache: str) -> None:
    """Greedy, from prompts padded on the left, past the width of every window; pairs from padded or heard inputs."""
    model = make(name)
    given = {"input_features": SOUND} if name == "whisper" else {"input_ids": IDS, "attention_mask": padding_of(name)}
    options = given | {"cache_implementation": cache}
    assert torch.equal(generate(model, NAME, **options), generate(model, "eager", **options))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=["beams", "assisted"])
def test_generation_in_other_ways(name: str, how: dict[str, Any]) -> None:
    model = make(name)
    # Guessing ahead takes one text at a time.
    rows = slice(1, 2) if "prompt_lookup_num_tokens" in how else slice(0, 2)
    options = {"input_ids": IDS[rows], "attention_mask": LEFT_PADDED[rows], **how}
    assert torch.equal(generate(model, NAME, **options), generate(model, "eager", **options))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_continuing_from_a_cache(name: str, kind: str, seen: list[Any]) -> None:
    """Several queries at a time after others: offsets of queries, and of the keys that a window has let go."""
    model, found = make(name), []
    # transformers renamed it in 5.24.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, 16)
        parts = []
        with torch.no_grad():
            for start, stop in ((0, 3), (3, 7), (7, 8), (8, LENGTH)):
                padding = LEFT_PADDED[:, :stop]
                out = model(input_ids=IDS[:, start:stop], attention_mask=padding, **{argument: cache})
                parts.append(out.logits)
        found.append(torch.cat(parts, 1)[LEFT_PADDED.bool()])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert len(seen) == 8


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = make(name).train()
        model.set_attn_implementation(NAME)
        if checkpointing:
            # The second is the name before transformers 5.23.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        out = model(input_ids=IDS, attention_mask=LEFT_PADDED, use_cache=False).logits
        out[LEFT_PADDED.bool()].square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for parameter, grad in found[0].items():
        torch.testing.assert_close(found[1][parameter], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "modernbert"])
def test_compiled_models(name: str) -> None:
    padding = padding_of(name)
    model, rows = make(name), rows_of(name, padding)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = result_of(model(**inputs_of(name, padding)))[rows]
        model.set_attn_implementation(NAME)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        ours = result_of(compiled(**inputs_of(name, padding)))[rows]
    torch.testing.assert_close(ours, own, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_by_a_compiled_forward(name: str) -> None:
    model = make(name)
    options = {"input_ids": IDS, "attention_mask": LEFT_PADDED, "cache_implementation": "static"}
    own = generate(model, "eager", **options)
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(generate(model, NAME, **options), own)


def test_weights_of_a_model_with_windows() -> None:
    model = make("mistral")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=IDS, output_attentions=True).attentions
        model.set_attn_implementation(NAME)
        ours = model(input_ids=IDS, output_attentions=True).attentions
    torch.testing.assert_close(ours, own, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "t5"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """No further from the model in float32 than twice its own eager attention."""
    found = []
    for implementation, kind in (("eager", torch.float32), ("eager", dtype), (NAME, dtype)):
        model = make(name).to(kind)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(result_of(model(**inputs_of(name, None))).float())
    exact, own, ours = found
    allowed = 2 * (own - exact).abs().max() + torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= allowed
