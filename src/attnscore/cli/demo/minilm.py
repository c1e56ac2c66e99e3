"""Pretrained transformer on real text, with its attention computed by `attend`.

- The model (all-MiniLM-L6-v2: 6 layers, 12 heads of dimension 32) is part of an installed package: nothing is
  downloaded.
- The sentence embeddings, a mean over real tokens scaled to length 1, are compared with those of the model's
  own eager and sdpa attention; a difference above 1e-5 is a failed check.
- The statistics per layer and head come from the same pass as the embeddings, and are means over real query
  tokens: queries that are padding do not count, keys that are padding are masked.
- Heat maps show chosen heads on one sentence, without padding, with the tokens on both axes.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.cli.console import table
from attnscore.cli.demo.heads import choose_heads, head_patterns, head_statistics
from attnscore.cli.report import Report
from attnscore.diagnostics.inspection import pretrained
from attnscore.integrations.transformers import AttentionCall, register
from attnscore.plotting import show_attention, show_head_grid
from attnscore.plotting.drawing import short_number

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]

STEPS = 4
ALLOWED = 1e-5
MOST_TOKENS = 256
STATISTICS = {
    "logit_variance": "Variance of the logits",
    "entropy": "Entropy (nats)",
    "largest_weight": "Largest weight",
    "effective_keys": "Effective number of keys",
}
DEFINITIONS = {
    "logit_variance": "variance of a query's scores over the keys it sees (divided by their number), after "
    "scaling by 1/sqrt(dim); mean over real query tokens",
    "entropy": "-sum p log p of a query's weights, in nats; mean over real query tokens",
    "largest_weight": "largest weight of a query; mean over real query tokens",
    "effective_keys": "exp(entropy) of a query's weights; mean over real query tokens",
    "embedding": "mean of the last hidden states over real tokens, scaled to length 1",
    "difference": "largest absolute difference of any coordinate of any embedding",
}


@dataclass(frozen=True)
class Batch:
    """Padded batch: the inputs of the model, with sentences and tokens for titles and axes."""

    sentences: list[str]
    inputs: dict[str, torch.Tensor]
    tokens: list[list[str]]
    cut: int = 0
    """Number of sentences that were longer than the model takes."""

    @property
    def real(self) -> Any:
        """(batch, token) True where there is a token."""
        return self.inputs["attention_mask"].bool()


@dataclass(frozen=True)
class Study:
    """Statistics, patterns and calls of all heads, and the heads that are drawn."""

    batch: Batch
    calls: list[AttentionCall]
    numbers: dict[str, Array]
    patterns: dict[str, Array]
    chosen: dict[str, tuple[int, int]]
    embeddings: torch.Tensor


def run(report: Report, sentences: Sequence[str]) -> None:
    """Embed the sentences three times, compare, measure every head, into ``summary["model"]``."""
    with report.step("loading the model (all-MiniLM-L6-v2)"):
        tokenizer, model = load()
        batch = tokenize(tokenizer, sentences)
    calls: list[AttentionCall] = []
    with report.step("sentence embeddings, by eager, sdpa and attnscore"):
        found = {name: embed(model, batch, name) for name in ("eager", "sdpa")}
        found["attnscore"] = embed(model, batch, register("attnscore", observer=calls.append))
        seen = list(calls)  # the comparison below runs the model once more
        comparison = _compare(report, model, batch, found)
    if batch.cut:
        report.show(f"{batch.cut} of the sentences are longer than {MOST_TOKENS} tokens: the rest is left out.")
    _show_comparison(report, comparison)
    with report.step("statistics of every head"):
        numbers, patterns = head_statistics(seen, batch.real), head_patterns(seen, batch.real)
        chosen = choose_heads(numbers["entropy"], patterns)
        study = Study(batch, seen, numbers, patterns, chosen, found["attnscore"][0])
    _show_statistics(report, study)
    with report.step("heat maps"):
        _draw_all_heads(report, study)
        _draw_chosen_heads(report, study)
        _draw_similarity(report, study)
    report.summary["model"] = _facts(model.config, batch) | {
        "comparison": comparison,
        "definitions": DEFINITIONS,
        "per_layer_and_head": numbers,
        "chosen_heads": _chosen(study),
        "similarity": _similarity(study),
    }


def load() -> tuple[Any, Any]:
    """Return tokenizer and model from the files of the installed package.

    Raises
    ------
    FrameworkError
        PyTorch, transformers or the model package is not installed.
    """
    return pretrained.load(pretrained.MINILM, extra="demo")


def tokenize(tokenizer: Any, sentences: Sequence[str]) -> Batch:
    """Pad the sentences to one batch."""
    inputs = tokenizer(list(sentences), padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
    tokens = [
        tokenizer.convert_ids_to_tokens(ids[real.bool()].tolist())
        for ids, real in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    with pretrained.quiet():  # it would warn of the sentences that are counted here
        lengths = [len(ids) for ids in tokenizer(list(sentences))["input_ids"]]
    return Batch(list(sentences), dict(inputs), tokens, sum(length > MOST_TOKENS for length in lengths))


def embed(model: Any, batch: Batch, implementation: str) -> tuple[torch.Tensor, float]:
    """Return embeddings (sentence, dim) by one implementation of attention, and the seconds it took."""
    import torch

    model.set_attn_implementation(implementation)
    with torch.no_grad():
        start = time.perf_counter()
        hidden = model(**batch.inputs).last_hidden_state
        seconds = time.perf_counter() - start
        real = batch.real.unsqueeze(-1)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1), seconds


def _compare(report: Report, model: Any, batch: Batch, found: dict[str, Any]) -> dict[str, Any]:
    ours = found["attnscore"][0]

    def difference(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().max())

    shortest = min(range(len(batch.tokens)), key=lambda place: len(batch.tokens[place]))
    alone, _ = embed(model, _alone(batch, shortest), "attnscore")
    compared = {
        "to_eager": difference(found["eager"][0], ours),
        "to_sdpa": difference(found["sdpa"][0], ours),
        "padded_to_alone": difference(alone[0], ours[shortest]),
    }
    claims = ("equal those of eager", "equal those of sdpa", "of the shortest sentence do not feel padding")
    for claim, value in zip(claims, compared.values(), strict=True):
        report.check(f"embeddings {claim}", value, ALLOWED)
    return {
        "largest_difference": compared,
        "eager_to_sdpa": difference(found["eager"][0], found["sdpa"][0]),
        "allowed": ALLOWED,
        "seconds_of_one_pass": {one: seconds for one, (_, seconds) in found.items()},
    }


def _show_comparison(report: Report, comparison: dict[str, Any]) -> None:
    differences = comparison["largest_difference"]
    rows = [
        ("attnscore", "the model's eager attention", f"{differences['to_eager']:.2e}"),
        ("attnscore", "the model's sdpa attention", f"{differences['to_sdpa']:.2e}"),
        ("eager", "sdpa", f"{comparison['eager_to_sdpa']:.2e}"),
        (
            "attnscore, padded batch",
            "attnscore, shortest sentence alone",
            f"{differences['padded_to_alone']:.2e}",
        ),
    ]
    caption = f"largest absolute difference of any coordinate; allowed {ALLOWED:g}"
    columns = ("embeddings by", "against", "difference")
    report.show(table("Sentence embeddings: attention replaced", columns, rows, left=2, caption=caption))


def _alone(batch: Batch, place: int) -> Batch:
    length = len(batch.tokens[place])
    inputs = {name: tensor[place : place + 1, :length] for name, tensor in batch.inputs.items()}
    return Batch([batch.sentences[place]], inputs, [batch.tokens[place]])


def _facts(config: Any, batch: Batch) -> dict[str, Any]:
    return {
        "name": "all-MiniLM-L6-v2",
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "batch_shape": list(batch.real.shape),
        "sentences_cut": batch.cut,
        "sentences": [
            {"text": text, "tokens": len(tokens)} for text, tokens in zip(batch.sentences, batch.tokens, strict=True)
        ],
    }


def _show_statistics(report: Report, study: Study) -> None:
    for name, values in study.numbers.items():
        columns = ("layer", *(f"head {head}" if head == 0 else str(head) for head in range(values.shape[1])))
        rows = [(layer, *(short_number(value, 3) for value in row)) for layer, row in enumerate(values)]
        report.show(table(f"{STATISTICS[name]}, mean over real query tokens", columns, rows))
    places = [name.removeprefix("the token ") for name in study.patterns]
    cells = [
        (one["chosen_for"], one["layer"], one["head"], *(f"{share:.2f}" for share in one["weight"].values()))
        for one in _chosen(study)
    ]
    title = "Chosen heads: share of weight on the token itself, before, after, [CLS], [SEP]"
    report.show(table(title, ("chosen for", "layer", "head", *places), cells))


def _chosen(study: Study) -> list[dict[str, Any]]:
    sentence = study.batch.sentences[_readable(study.batch)]
    return [
        {
            "chosen_for": wish,
            "layer": layer,
            "head": head,
            **{name: values[layer, head] for name, values in study.numbers.items()},
            "weight": {name: values[layer, head] for name, values in study.patterns.items()},
            "sentence": sentence,
        }
        for wish, (layer, head) in study.chosen.items()
    ]


def _draw_all_heads(report: Report, study: Study) -> None:
    title = "all-MiniLM-L6-v2, mean over the real query tokens of all sentences"
    panels = np.stack(list(study.numbers.values()))
    report.picture("08-layers-and-heads", show_head_grid(panels, list(STATISTICS.values()), suptitle=title))


def _draw_chosen_heads(report: Report, study: Study) -> None:
    place = _readable(study.batch)
    tokens = study.batch.tokens[place]
    maps = [
        np.asarray(study.calls[layer].weights(place)[head, : len(tokens), : len(tokens)].double())
        for layer, head in study.chosen.values()
    ]
    titles = [f"layer {layer}, head {head}\n{wish}" for wish, (layer, head) in study.chosen.items()]
    sentence = textwrap.shorten(study.batch.sentences[place], 220, placeholder=" …").replace("$", r"\$")
    figure = show_attention(maps, tokens, titles=titles, suptitle=textwrap.fill(f"“{sentence}”", 110))
    report.picture("09-chosen-heads", figure)


def _draw_similarity(report: Report, study: Study) -> None:
    sentences = study.batch.sentences
    figure = show_attention(
        _similarity(study),
        [f"{_shortened(text)}  {number}" for number, text in enumerate(sentences, 1)],
        [str(number) for number in range(1, len(sentences) + 1)],
        suptitle="Cosine similarity of the sentence embeddings",
        xlabel="",
        ylabel="",
        label="cosine similarity",
        numbers=len(sentences) <= 24,
    )
    report.picture("10-similarity", figure)


def _similarity(study: Study) -> Array:
    return np.asarray((study.embeddings @ study.embeddings.T).double())


def _readable(batch: Batch) -> int:
    """Return the sentence with about 16 tokens: long enough to show a pattern, short enough to read."""
    return min(range(len(batch.tokens)), key=lambda place: abs(len(batch.tokens[place]) - 16))


def _shortened(text: str, most: int = 44) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + "…"
