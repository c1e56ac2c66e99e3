"""The functions that the page ``recipes/chosen-heads.md`` shows, and its code for models held by other libraries.

That code runs in TransformerLens and nnsight where they are installed, and everywhere on stand-ins: objects that give
queries and keys of the shapes that the page states.
"""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from test_readme import blocks

PAGE = Path(__file__).parents[1] / "docs" / "recipes" / "chosen-heads.md"
BLOCKS = [block for block in blocks(PAGE) if block.language == "python"]
TRANSFORMER_LENS, NNSIGHT_GPT2, NNSIGHT_LLAMA = (block.text for block in BLOCKS if block.elsewhere)
TOKENS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
HEADS = [0, 2]


@pytest.fixture(scope="module")
def page() -> Any:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng():
        for block in BLOCKS:
            if not block.elsewhere:
                exec(block.text, names)
    return SimpleNamespace(**names)


def paths(tokens: int, frames: int) -> Iterator[list[tuple[int, int]]]:
    """Every path from the first token and frame to the last that never goes back."""
    if tokens == frames == 1:
        yield [(0, 0)]
    for before in ((tokens - 1, frames - 1), (tokens - 1, frames), (tokens, frames - 1)):
        if min(before) > 0:
            yield from ([*path, (tokens - 1, frames - 1)] for path in paths(*before))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 3), (3, 5), (5, 3), (4, 4)])
def test_the_path_is_the_best_of_all(page: Any, shape: tuple[int, int]) -> None:
    gain = np.random.default_rng(sum(shape)).normal(size=shape)
    best = max(paths(*shape), key=lambda path: sum(gain[place] for place in path))
    first = [min(frame for token, frame in best if token == i) for i in range(shape[0])]
    assert page.best_path(gain).tolist() == first


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [1, 7])
def test_begins_are_found_within_a_frame_in_noise(page: Any, seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 13, 11)
    begins = lengths.cumsum() - lengths
    aligned = np.eye(11)[:, np.arange(11).repeat(lengths)]
    weights = np.abs(aligned + 0.15 * rng.normal(size=(3, *aligned.shape)))
    first = page.best_path(page.smooth(weights, width))
    assert np.abs(first - begins).max() <= 1


def test_smoothing_takes_the_median_and_the_mean_of_heads(page: Any) -> None:
    weights = np.random.default_rng(0).random((2, 3, 8))
    centred = weights - weights.mean(1, keepdims=True)
    centred = centred / centred.std(1, keepdims=True)
    mirrored = np.concatenate([centred[..., 1:2], centred, centred[..., -2:-1]], -1)
    medians = [np.median(mirrored[..., i : i + 3], -1) for i in range(8)]
    np.testing.assert_allclose(page.smooth(weights, 3), np.stack(medians, -1).mean(0))


def expected(query: torch.Tensor, key: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """The formula: arrays (batch, position, head, dim), in float64, a causal softmax of every head, of which some."""
    query, key = query.double().transpose(1, 2), key.double().transpose(1, 2)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, heads]


@pytest.mark.parametrize("positions", [1, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("heads", [[3], [0, 2], [3, 1]])
def test_weights_of_chosen_heads(page: Any, positions: int, kv_heads: int, heads: list[int]) -> None:
    torch.manual_seed(positions)
    query = torch.randn(2, positions, 4, 5, requires_grad=True)
    key = torch.randn(2, positions, kv_heads, 5)
    weights = page.of_heads(query, key, heads)
    torch.testing.assert_close(weights.double(), expected(query, key, heads), atol=1e-6, rtol=1e-6)
    (weights * torch.randn_like(weights)).sum().backward()
    reached = query.grad.abs().sum((0, 1, 3)) > 0
    assert reached.tolist() == [positions > 1 and head in heads for head in range(4)]


# ------------------------------------------------------------------ models held by other libraries


def run_block(text: str, folder: Path, page: Any, **names: Any) -> torch.Tensor:
    """Run a block from a file, whose source nnsight reads, and return its weights."""
    file = folder / "block.py"
    file.write_text(text, encoding="utf-8")
    weights: torch.Tensor = runpy.run_path(str(file), {"of_heads": page.of_heads, "tokens": TOKENS, **names})["weights"]
    return weights


class StandIn:
    """Gives an array where nnsight gives the output of a module, and the array itself where it saves one."""

    def __init__(self, place: str, output: Any, **attributes: Any) -> None:
        *modules, last = place.split(".")
        inner: Any = SimpleNamespace(output=SimpleNamespace(save=lambda: output))
        for name in reversed((*modules[1:], last)):
            inner = {int(name): inner} if name.isdigit() else SimpleNamespace(**{name: inner})
        vars(self).update({modules[0]: inner}, **attributes)

    def trace(self, tokens: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        assert tokens is TOKENS
        return contextlib.nullcontext()


def test_hooks_of_transformer_lens_on_a_stand_in(page: Any, tmp_path: Path) -> None:
    arrays = {f"blocks.1.attn.hook_{name}": torch.randn(2, 9, 4, 8) for name in "qk"}

    def run_with_cache(tokens: torch.Tensor, names_filter: list[str]) -> tuple[None, dict[str, torch.Tensor]]:
        assert tokens is TOKENS
        return None, {name: arrays[name] for name in names_filter}

    weights = run_block(TRANSFORMER_LENS, tmp_path, page, bridge=SimpleNamespace(run_with_cache=run_with_cache))
    torch.testing.assert_close(weights, expected(*arrays.values(), HEADS).float())


def test_modules_in_nnsight_on_stand_ins(page: Any, tmp_path: Path) -> None:
    joined = torch.randn(2, 9, 96)
    query, key, _ = (array.unflatten(-1, (4, 8)) for array in joined.chunk(3, -1))
    gpt2 = StandIn("transformer.h.1.attn.c_attn", joined, config=SimpleNamespace(n_head=4))
    weights = run_block(NNSIGHT_GPT2, tmp_path, page, gpt2=gpt2)
    torch.testing.assert_close(weights, expected(query, key, HEADS).float())

    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    llama = StandIn("model.layers.1.self_attn.source.apply_rotary_pos_emb_0", (query, key))
    weights = run_block(NNSIGHT_LLAMA, tmp_path, page, llama=llama)
    torch.testing.assert_close(weights, expected(query.transpose(1, 2), key.transpose(1, 2), HEADS).float())


def small_model(name: str) -> Any:
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, **tokens))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **tokens))
    return model.eval()


def weights_in_transformers(model: Any) -> torch.Tensor:
    """The weights of the second layer's chosen heads, of all matrices that eager attention makes."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights: torch.Tensor = model(TOKENS, output_attentions=True).attentions[1][:, HEADS]
    return weights


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore")  # what the library says of itself as it is imported
def test_hooks_of_transformer_lens(name: str, page: Any, tmp_path: Path) -> None:
    model_bridge = pytest.importorskip("transformer_lens.model_bridge")
    from tokenizers import Tokenizer, models

    model = small_model(name)
    theirs = weights_in_transformers(model)
    letters = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="<end>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")
    bridge = model_bridge.TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer)
    text = TRANSFORMER_LENS
    if name == "llama":
        text = text.replace("hook_q", "hook_rot_q").replace("hook_k", "hook_rot_k")
    torch.testing.assert_close(run_block(text, tmp_path, page, bridge=bridge), theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "text"), [("gpt2", NNSIGHT_GPT2), ("llama", NNSIGHT_LLAMA)])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore")
def test_modules_in_nnsight(name: str, text: str, implementation: str, page: Any, tmp_path: Path) -> None:
    nnsight = pytest.importorskip("nnsight")
    model = small_model(name)
    theirs = weights_in_transformers(model)
    model.set_attn_implementation(implementation)
    ours = run_block(text, tmp_path, page, **{name: nnsight.NNsight(model)})
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
