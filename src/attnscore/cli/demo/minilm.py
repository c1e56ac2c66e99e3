"""Pretrained transformer on real text, with its attention computed by `attend`.

- The model (all-MiniLM-L6-v2: 6 layers, 12 heads of dimension 32) is part of an installed package: nothing is
  downloaded.
- The sentence embeddings, a mean over real tokens scaled to length 1, are compared with the embeddings by the model's
  eager and sdpa attention; a difference above 1e-5 is a failed check.
- The statistics per layer and head come from the same pass as the embeddings, and are means over real query
  tokens: queries that are padding do not count, keys that are padding are masked.
- Heat maps show chosen heads on one sentence, without padding, with the tokens on both axes.
- Arrays of statistics and of patterns are (layer, head).
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
_LEAST_SHARE = 0.05  # of a map's weight, to be named in its caption
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


def run(report: Report, sentences: Sequence[str]) -> None:
    """Embed the sentences three times, compare, measure every head, into ``summary["model"]``."""
    with report.step("loading the model (all-MiniLM-L6-v2)"):
        tokenizer, model = pretrained.load(pretrained.MINILM, extra="demo")
        batch = tokenize(tokenizer, sentences)
    calls: list[AttentionCall] = []
    with report.step("sentence embeddings, by eager, sdpa and attnscore"):
        passes = {name: embed(model, batch.inputs, name) for name in ("eager", "sdpa")}
        passes["attnscore"] = embed(model, batch.inputs, register("attnscore", observer=calls.append))
        embeddings, measured = passes["attnscore"][0], list(calls)  # the pass of one sentence is not measured
        shortest = min(range(len(batch.tokens)), key=lambda place: len(batch.tokens[place]))
        alone = {name: x[shortest, None, : len(batch.tokens[shortest])] for name, x in batch.inputs.items()}
        padding = _difference(embed(model, alone, "attnscore")[0][0], embeddings[shortest])
    if batch.cut:
        cut = f"{batch.cut} of the sentences are longer than {MOST_TOKENS} tokens: the rest is left out."
        report.console.print(cut)
    comparison = _compare(report, passes, padding)
    with report.step("statistics of every head"):
        numbers, patterns = head_statistics(measured, batch.real), head_patterns(measured, batch.real)
        # About 16 tokens: long enough to show a pattern, short enough to read.
        drawn = min(range(len(batch.tokens)), key=lambda place: abs(len(batch.tokens[place]) - 16))
        chosen = [
            {
                "chosen_for": wish,
                "layer": layer,
                "head": head,
                **{name: values[layer, head] for name, values in numbers.items()},
                "weight": {name: values[layer, head] for name, values in patterns.items()},
                "sentence": batch.sentences[drawn],
            }
            for wish, (layer, head) in choose_heads(numbers["entropy"], patterns).items()
        ]
    _show_statistics(report, numbers, chosen)
    similarity = np.asarray((embeddings @ embeddings.T).double())
    with report.step("heat maps"):
        title = "all-MiniLM-L6-v2, mean over the real query tokens of all sentences\ndarker: closer to one key a query"
        panels = np.stack(list(numbers.values()))
        cmaps = ["Reds_r" if name in ("entropy", "effective_keys") else "Reds" for name in numbers]
        heads = show_head_grid(panels, list(STATISTICS.values()), suptitle=title, cmap=cmaps)
        report.picture("08-layers-and-heads", heads)
        _draw_chosen_heads(report, batch, drawn, measured, chosen)
        _draw_similarity(report, batch.sentences, similarity)
    config = model.config
    report.summary["model"] = {
        "name": "all-MiniLM-L6-v2",
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "batch_shape": list(batch.real.shape),
        "sentences_cut": batch.cut,
        "sentences": [
            {"text": text, "tokens": len(tokens)} for text, tokens in zip(batch.sentences, batch.tokens, strict=True)
        ],
        "comparison": comparison,
        "definitions": DEFINITIONS,
        "per_layer_and_head": numbers,
        "chosen_heads": chosen,
        "similarity": similarity,
    }


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


def embed(model: Any, inputs: Mapping[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, float]:
    """Return embeddings (sentence, dim) by one implementation of attention, and the seconds it took."""
    import torch

    model.set_attn_implementation(implementation)
    with torch.no_grad():
        start = time.perf_counter()
        hidden = model(**inputs).last_hidden_state
        seconds = time.perf_counter() - start
        real = inputs["attention_mask"].bool().unsqueeze(-1)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1), seconds


def head_statistics(calls: Sequence[AttentionCall], real: Any) -> dict[str, Array]:
    """Return means of the statistics of the same pass, each (layer, head); `real` is (batch, token)."""
    # The mean of exp(H), not exp of the mean: a head that is sharp on half the queries is no broad head.
    layers = [(s.var_score, s.entropy, s.max_weight, s.effective_keys()) for s in (call.stats for call in calls)]
    means = [[np.asarray(rows.double().transpose(1, 2)[real].mean(0)) for rows in layer] for layer in layers]
    return dict(zip(STATISTICS, map(np.stack, zip(*means, strict=True)), strict=True))


def head_patterns(calls: Sequence[AttentionCall], real: Any) -> dict[str, Array]:
    """Return the weight on the token itself, the one before, the one after, [CLS] and [SEP], each (layer, head)."""
    layers = [_weight_on_places(np.asarray(call.weights().double()), np.asarray(real)) for call in calls]
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


def _weight_on_places(weights: Array, real: NDArray[np.bool_], *, of_all: bool = False) -> dict[str, Array]:
    """Return the mean weight on each place by head, from weights (batch, head, query, key).

    The mean is over the queries that have such a key, or `of_all` queries: the share of the whole weight.
    """
    shares = {}
    for name, keys in _places(real).items():
        has_key = real & (keys >= 0)
        rows = np.take_along_axis(weights, np.maximum(keys, 0)[:, None, :, None], axis=-1)[..., 0]
        shares[name] = rows.transpose(0, 2, 1)[has_key].sum(0) / (real if of_all else has_key).sum()
    return shares


def _places(real: NDArray[np.bool_]) -> dict[str, NDArray[np.int64]]:
    """Return the key at each place of a query, (batch, query); -1 where the query has no such key."""
    token = np.broadcast_to(np.arange(real.shape[1]), real.shape)
    last = np.broadcast_to(real.sum(1, keepdims=True) - 1, real.shape)
    # [CLS] counts as [CLS] only: many heads put their weight there when no other key matches.
    return {
        "itself": np.where(token > 0, token, -1),
        "the token before": np.where(token > 1, token - 1, -1),
        "the token after": np.where(token < last, token + 1, -1),
        "[CLS]": np.zeros_like(token),
        "[SEP]": last,
    }


def choose_heads(entropy: Array, patterns: Mapping[str, Array]) -> dict[str, tuple[int, int]]:
    """Choose a different head for each wish: the sharpest, the broadest, and those with most weight on a place.

    Where a head that was chosen before has more weight on a place, the wish ends in "of the others".
    """
    wishes: dict[str, Array] = {"lowest entropy": -entropy, "highest entropy": entropy}
    wishes |= {f"most weight on {name}": patterns[name] for name in patterns if name != "[SEP]"}
    chosen: dict[str, tuple[int, int]] = {}
    for wish, values in wishes.items():
        order = np.dstack(np.unravel_index(np.argsort(-values, axis=None), values.shape))[0].tolist()
        heads = [(layer, head) for layer, head in order if (layer, head) not in chosen.values()]
        if heads:
            chosen[wish if heads[0] == tuple(order[0]) else f"{wish}, of the others"] = heads[0]
    return chosen


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _compare(report: Report, passes: dict[str, tuple[torch.Tensor, float]], padding: float) -> dict[str, Any]:
    """Check and show how much the embeddings differ; `padding` is the difference that it makes to a sentence."""
    eager, sdpa, ours = (passes[name][0] for name in ("eager", "sdpa", "attnscore"))
    to_eager, to_sdpa, eager_to_sdpa = _difference(eager, ours), _difference(sdpa, ours), _difference(eager, sdpa)
    report.check("embeddings equal the eager ones", to_eager, ALLOWED)
    report.check("embeddings equal the sdpa ones", to_sdpa, ALLOWED)
    report.check("embeddings of the shortest sentence do not feel padding", padding, ALLOWED)
    cells = [
        ("attnscore", "the model's eager attention", f"{to_eager:.2e}"),
        ("attnscore", "the model's sdpa attention", f"{to_sdpa:.2e}"),
        ("eager", "sdpa", f"{eager_to_sdpa:.2e}"),
        ("attnscore, padded batch", "attnscore, shortest sentence alone", f"{padding:.2e}"),
    ]
    caption = f"largest absolute difference of any coordinate; allowed {ALLOWED:g}"
    columns = ("embeddings by", "against", "difference")
    report.table("Sentence embeddings: attention replaced", columns, cells, left=2, caption=caption)
    return {
        "largest_difference": {"to_eager": to_eager, "to_sdpa": to_sdpa, "padded_to_alone": padding},
        "eager_to_sdpa": eager_to_sdpa,
        "allowed": ALLOWED,
        "seconds_of_one_pass": {name: seconds for name, (_, seconds) in passes.items()},
    }


def _show_statistics(report: Report, numbers: dict[str, Array], chosen: list[dict[str, Any]]) -> None:
    for name, values in numbers.items():
        columns = ("layer", *(f"head {head}" if head == 0 else str(head) for head in range(values.shape[1])))
        rows = [(layer, *(short_number(value, 3) for value in row)) for layer, row in enumerate(values)]
        report.table(f"{STATISTICS[name]}, mean over real query tokens", columns, rows)
    places = [name.removeprefix("the token ") for name in chosen[0]["weight"]]
    cells = [
        (one["chosen_for"], one["layer"], one["head"], *(f"{share:.2f}" for share in one["weight"].values()))
        for one in chosen
    ]
    title = "Chosen heads: weight on the token itself, before, after, [CLS], [SEP]; mean over the queries that have one"
    report.table(title, ("chosen for", "layer", "head", *places), cells)


def _draw_chosen_heads(
    report: Report, batch: Batch, place: int, calls: list[AttentionCall], chosen: list[dict[str, Any]]
) -> None:
    tokens = batch.tokens[place]
    heads = [calls[one["layer"]].weights(place)[one["head"], : len(tokens), : len(tokens)] for one in chosen]
    maps = np.stack([np.asarray(weights.double()) for weights in heads])
    # The heads were chosen by all sentences; a caption describes this map.
    shares = _weight_on_places(maps[None], np.ones((1, len(tokens)), bool), of_all=True)
    entropies = -(maps * np.log(np.where(maps > 0, maps, 1.0))).sum(-1).mean(-1)
    titles = []
    for panel, (one, entropy) in enumerate(zip(chosen, entropies, strict=True)):
        largest = sorted(((share[panel], name) for name, share in shares.items()), reverse=True)[:2]
        named = [f"{share:.0%} {name.removeprefix('the ')}" for share, name in largest if share >= _LEAST_SHARE]
        titles.append(f"layer {one['layer']}, head {one['head']}: {entropy:.2f} nats\n" + ", ".join(named))
    sentence = textwrap.shorten(batch.sentences[place], 220, placeholder=" …")
    sentence = textwrap.fill(f"“{sentence}”", 100)
    meaning = "all-MiniLM-L6-v2: above each map its mean entropy, and the keys that get most of its weight"
    figure = show_attention(maps, tokens, titles=titles, suptitle=f"{sentence}\n{meaning}")
    report.picture("09-chosen-heads", figure)


def _draw_similarity(report: Report, sentences: list[str], similarity: Array) -> None:
    figure = show_attention(
        similarity,
        [f"{textwrap.shorten(text, 44, placeholder='…')}  {number}" for number, text in enumerate(sentences, 1)],
        [str(number) for number in range(1, len(sentences) + 1)],
        suptitle="Cosine similarity of the sentence embeddings",
        xlabel="",
        ylabel="",
        label="cosine similarity",
        numbers=len(sentences) <= 24,
    )
    report.picture("10-similarity", figure)
