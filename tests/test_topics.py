"""Each topic of the library's purpose is found from the home page within two clicks.

A click follows a link in the text of a page; the menu at its side would make one click of everything. The page has to
contain the words or numbers by which a reader knows the topic. ``python tests/test_topics.py`` prints the clicks.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = ("docs/index.md", "README.md")  # of the site, of the repository
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+\.md)(?:#[^)]*)?\)")

# topic: page under docs/, words that stand on it
TOPICS = {
    "masked softmax over the visible keys": ("concepts/attention-pooling.md", "softmax"),
    "pooling: the weighted sum of the values": ("concepts/attention-pooling.md", "Σ_j p_j v_j"),
    "scaled dot product": ("scores/scaled-dot.md", "√d"),
    "dot product, unscaled": ("scores/dot.md", "q · k"),
    "additive score, no bias by default": ("scores/additive.md", "tanh"),
    "bilinear score, Luong's general": ("scores/bilinear.md", "Luong"),
    "Gaussian kernel, Nadaraya-Watson": ("scores/gaussian.md", "Nadaraya"),
    "sum: why it is no score": ("scores/sum.md", "sum(q)"),
    "cosine": ("scores/cosine.md", "‖q‖"),
    "a custom score": ("how-to-add-a-score.md", "register_score"),
    "valid lengths, per sequence and per query": ("masks.md", "valid_lens"),
    "causal masks": ("masks.md", "Causal"),
    "padding": ("masks.md", "KeyPadding"),
    "any boolean mask": ("masks.md", "Dense(array)"),
    "subtract the row maximum": ("concepts/softmax.md", "maximum"),
    "temperature": ("scores/temperature.md", "T = 1/8"),
    "multi-head: project, attend, join, project": ("concepts/multi-head.md", "W_o"),
    "long sequences in chunks": ("concepts/long-sequences.md", "merge"),
    "dropout on the weights, in training only": ("layers.md", "dropout"),
    "weights to look at, as heat maps": ("looking.md", "show_attention"),
    "NumPy, with an explicit VJP": ("gradients.md", "attend_vjp"),
    "PyTorch": ("frameworks.md", "PyTorch"),
    "TensorFlow, Keras layers": ("guides/keras.md", "attnscore.layers.keras"),
    "JAX, Flax layers": ("guides/jax.md", "attnscore.layers.flax"),
    "MXNet, Gluon blocks, its own environment": ("guides/mxnet.md", "attnscore.layers.mxnet"),
    "why scale: Var(q.k) = d": ("why-scale.md", "mean 1, variance 1 | q·k"),
    "why scale: with means it grows faster, 192": ("why-scale.md", "192"),
    "why scale: y and 8 y": ("why-scale.md", "[0.008, 0.039, 0.004, 0.950]"),
    "why scale: every entry of the Jacobians": ("why-scale.md", "0.16125 -0.04988"),
    "why scale: a transformer trained with and without": ("why-scale.md", "last tenth of the text"),
    "keys all alike: lengths 2 and 6": ("scores/additive.md", "[10. 11. 12. 13.]"),
    "shapes of additive attention": ("concepts/shapes.md", "(2, 1, 4)"),
    "shapes of a batch of products": ("frameworks.md", "(2, 3, 6)"),
    "lengths per query: a first weight of exactly 1": ("concepts/masked-softmax.md", "[1, 3], [2, 0]"),
    "additive attention is an MLP": ("scores/additive.md", "hidden layer"),
    "a query that sees no key": ("concepts/softmax.md", "Fully masked queries"),
    "why not -1e6": ("concepts/softmax.md", "-1e6 in float16"),
    "NaN behind a mask": ("decisions/nan-rule.md", "NaN"),
    "cost: operations, bytes, parameters": ("concepts/cost.md", "parameters"),
    "cost: dot against additive, growth": ("concepts/cost.md", "n^"),
    "speed, and where others are faster": ("performance.md", "Where a baseline is faster"),
    "speed of small calls": ("decisions/small-calls.md", "plan"),
    "limits of the machine": ("performance.md", "What limits a case"),
    "memory that grows linearly, 131072 tokens": ("concepts/long-sequences.md", "131072"),
    "decoding with a cache": ("caches.md", "KeyValueCache"),
    "statistics of the softmax": ("statistics.md", "entropy"),
    "watch a model": ("watching.md", "watch(model)"),
    "logit growth, saturation, entropy collapse": ("watching.md", "saturated"),
    "attention to padding": ("watching.md", "padding"),
    "D2L's names and signatures": ("guides/d2l.md", "d2l"),
    "exercises of D2L": ("concepts/exercises.md", "11.3"),
    "the command line": ("command-line.md", "attnscore lab"),
    "threads": ("frameworks.md", "set_num_threads"),
    "several processes": ("parallel.md", "process group"),
    "GPUs": ("gpu.md", "GPU"),
}


@functools.cache
def links(page: str) -> dict[str, str]:
    """The pages that a page links to, as paths from the root, with the text of their first link."""
    file = ROOT / page
    found: dict[str, str] = {}
    for text, target in LINK.findall(file.read_text(encoding="utf-8")):
        there = (file.parent / target).resolve()
        if there.is_relative_to(ROOT) and there.exists():
            found.setdefault(there.relative_to(ROOT).as_posix(), text.strip("`"))
    return found


def clicks(home: str, page: str) -> list[str] | None:
    """The texts of the at most two links that lead from a home page to a page."""
    first = links(home)
    if page in first:
        return [first[page]]
    return next(([text, second[page]] for there, text in first.items() if page in (second := links(there))), None)


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_is_two_clicks_from_home(topic: str) -> None:
    page, words = TOPICS[topic]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert words in text, f"docs/{page} does not say {words!r}"
    assert [clicks(home, f"docs/{page}") for home in HOMES if clicks(home, f"docs/{page}") is None] == []


def test_a_page_that_nothing_leads_to_would_be_seen() -> None:
    assert clicks("docs/index.md", "docs/none.md") is None


if __name__ == "__main__":
    print("| topic | from the site | from the README |\n| --- | --- | --- |")
    for topic, (page, _) in TOPICS.items():
        print(f"| {topic} | {' | '.join(' > '.join(clicks(home, f'docs/{page}') or ['-']) for home in HOMES)} |")
