"""The architectures of transformers that are run: tiny, with random weights, made from their configurations.

Nothing is loaded. A new architecture adds its row here and is then held to its own eager attention in every test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers


def since(release: str) -> pytest.MarkDecorator:
    """Skip a test with a release of transformers that does not have what it is about."""
    is_older = np.lib.NumpyVersion(transformers.__version__) < f"{release}.0"
    return pytest.mark.skipif(is_older, reason=f"of transformers {release} and later")


# Longer than every window and chunk.
LENGTH, WINDOW = 9, 4
_COMMON = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_COMMON |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
_DECODER = _COMMON | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8}
_WINDOW = _DECODER | {"sliding_window": WINDOW}
_GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_PICTURE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_PICTURE |= {"image_size": 12, "patch_size": 4}
_PAIR = {"vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_start_token_id": 1}
_PAIR |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
_PAIR |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32) | {"pad_token_id": 0, "bos_token_id": 1}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_MIXED = {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Architecture:
    """One row: its classes and settings, and what is done with it."""

    name: str
    model: str
    config: str
    settings: dict[str, Any]
    masks: tuple[str, ...]
    """The masks of its attention calls in one forward pass, in order; padding aside."""
    kind: str = "decoder"
    """decoder, encoder, pair (encoder and decoder), speech (a pair that hears) or picture."""
    windows: int = field(default=0)
    """Width of a window or chunk, where some layers have one."""


# fmt: off
_CAUSAL, _ALL = "Causal(offset=0)", "None"
_NEAR = f"SlidingWindow(left={WINDOW - 1}, offset=0) & Causal(offset=0)"
_CHUNK = f"Documents(query_ids=<(2, {LENGTH}) torch.int64>, key_ids=<(2, {LENGTH}) torch.int64>) & Causal(offset=0)"
ARCHITECTURES = (
    Architecture("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2 | {"pad_token_id": 0, "eos_token_id": 2},
                 (_CAUSAL,) * 2),
    Architecture("llama", "LlamaForCausalLM", "LlamaConfig", _DECODER, (_CAUSAL,) * 2),  # grouped heads
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _DECODER, (_CAUSAL,) * 2),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _DECODER, (_CAUSAL,) * 2),
    Architecture("mistral", "MistralForCausalLM", "MistralConfig", _WINDOW, (_NEAR,) * 2, windows=WINDOW),
    Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", _WINDOW, (_NEAR,) * 2, windows=WINDOW),
    Architecture("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _WINDOW | _MIXED | {"attn_logit_softcapping": 5.0},
                 (_NEAR, _CAUSAL), windows=WINDOW),  # soft cap
    Architecture("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", _WINDOW | _MIXED, (_NEAR, _CAUSAL), windows=WINDOW),
    Architecture("gpt_oss", "GptOssForCausalLM", "GptOssConfig",  # sinks
                 _WINDOW | _EXPERTS | {"rope_parameters": {"rope_type": "default"}}, (_NEAR, _CAUSAL), windows=WINDOW),
    Architecture("llama4", "Llama4ForCausalLM", "Llama4TextConfig",  # chunks
                 _DECODER | _EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": WINDOW,
                                        "layer_types": ["chunked_attention", "full_attention"]},
                 (_CHUNK, _CAUSAL), windows=WINDOW),
    Architecture("bert", "BertModel", "BertConfig", _COMMON, (_ALL,) * 2, "encoder"),
    Architecture("roberta", "RobertaModel", "RobertaConfig", _COMMON, (_ALL,) * 2, "encoder"),
    Architecture("modernbert", "ModernBertModel", "ModernBertConfig",  # windows to both sides
                 _COMMON | {"local_attention": WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1,
                            "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
                 (_ALL, f"SlidingWindow(left={WINDOW // 2}, right={WINDOW // 2}, offset=0)"), "encoder",
                 windows=WINDOW),
    Architecture("bart", "BartForConditionalGeneration", "BartConfig", _PAIR | {"max_position_embeddings": 64},
                 (_ALL, *(_CAUSAL, _ALL) * 2), "pair"),
    Architecture("t5", "T5ForConditionalGeneration", "T5Config",  # position biases
                 {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                  "pad_token_id": 0, "decoder_start_token_id": 0}, (*(_ALL,) * 2, *(_CAUSAL, _ALL) * 2), "pair"),
    Architecture("whisper", "WhisperForConditionalGeneration", "WhisperConfig",
                 _PAIR | {"max_source_positions": 12, "max_target_positions": 64, "num_mel_bins": 8,
                          "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None},
                 (_ALL, *(_CAUSAL, _ALL) * 2), "speech"),
    Architecture("vit", "ViTModel", "ViTConfig", _PICTURE, (_ALL,) * 2, "picture"),
    Architecture("siglip", "SiglipVisionModel", "SiglipVisionConfig", _PICTURE, (_ALL,) * 2, "picture"),
)
# fmt: on
ARCHITECTURE = {row.name: row for row in ARCHITECTURES}
DECODERS = tuple(row.name for row in ARCHITECTURES if row.kind == "decoder")
PAIRS = tuple(row.name for row in ARCHITECTURES if row.kind in ("pair", "speech"))

IDS = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
LEFT_PADDED = torch.ones(2, LENGTH, dtype=torch.long)
LEFT_PADDED[0, :3] = 0
PIXELS = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
SOUND = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2))


def make(name: str) -> Any:
    """The model, in evaluation mode."""
    row = ARCHITECTURE[name]
    torch.manual_seed(1)
    made = getattr(transformers, row.model)(getattr(transformers, row.config)(**row.settings)).eval()
    if name == "gpt_oss":
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return made


def padding_of(name: str) -> torch.Tensor:
    """(batch, key): on the left, where text is generated, else on the right."""
    return LEFT_PADDED if ARCHITECTURE[name].kind == "decoder" else LEFT_PADDED.flip(1)


def inputs_of(name: str, padding: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The arguments of a forward pass."""
    kind = ARCHITECTURE[name].kind
    if kind == "picture":
        return {"pixel_values": PIXELS}
    decoded = {"decoder_input_ids": IDS[:, :5]} if kind in ("pair", "speech") else {}
    if kind == "speech":
        return {"input_features": SOUND} | decoded
    return {"input_ids": IDS} | decoded | ({} if padding is None else {"attention_mask": padding})


def rows_of(name: str, padding: torch.Tensor | None) -> torch.Tensor | None:
    """Which rows of the result are tokens: what a padded query holds is of no interest, and differs."""
    kind = ARCHITECTURE[name].kind
    return None if padding is None or kind not in ("decoder", "encoder") else padding.bool()


def result_of(outputs: Any) -> torch.Tensor:
    """Logits, or states where there is no head."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state
