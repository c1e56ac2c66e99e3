"""One language: words that ``docs/glossary.md`` replaced do not come back.

Each word is replaced by the standard term behind it. It may stand where `EXCEPTIONS` gives a reason, and in code blocks
of documents, which show code and what it prints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnscore as ats

ROOT = Path(__file__).parents[1]

WORDS = {
    "recall": "BoundedCache.get_or_compute",
    "pose": "build_problem",
    "posed": "checked, built",
    "poses": "checks, builds",
    "recipe": "execution plan",
    "recipes": "execution plans",
    "plain_calls": "plans.plan",
    "PlainCall": "ExecutionPlan",
    "native_inputs": "kernels.native.marshalling",
    "native_masks": "masks.lowering",
    "native_program": "kernels.native.xla_call",
    "native_deferred": "kernels.native.xla_callback",
    "native_strips": "kernels.native.chunked_masks",
    "Grid": "ScoreShape",
    "Pieces": "IntervalSet",
    "log_total": "log_denom",
    "own_gradient": "has_vjp",
    "on_tape": "needs_grad",
    "wrap32": "low_32_bits",
    "host_call": "host_callback",
    "at_once": "eager_scope",
    "quarantined": "with_nonfinite_rows_isolated",
    "bad_rows": "nonfinite_rows",
    "kStrip": "kMR",
    "let_escape": "propagate_nonfinite",
    "ask_for_row": "prefetch_row",
    "told": "passed, known, raised",
    "nobody": "no query, no caller",
    "somebody": "a caller",
    "moonshot": "stretch target",
    "dearer": "more expensive",
    "dearest": "most expensive",
    "river": "order of imports",
    "poison": "propagate",
    "naive form": "plain formula",
    "naive PyTorch": "plain formula in PyTorch",
    "pull-back": "VJP",
    "pull-backs": "VJPs",
    "key head": "KV head",
    "key heads": "KV heads",
    "streaming engine": "streaming kernel",
    "own score": "custom score",
    "own scores": "custom scores",
    "textbook's": "D2L's, the reference implementation's",
}

# Folders and files that are free of all words but LEFT's. Add one here when it is clean.
CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "mkdocs.yml",
    "Makefile",
    ".ci",
    "benchmarks",
    "csrc",
    "docs",
    "examples",
    "src",
    "tests",
)
# Words that still stand in a clean folder, to be removed.
LEFT: dict[str, tuple[str, ...]] = {}

# (word, file or folder): why it may stand there.
EXCEPTIONS = {
    ("*", "tests/test_glossary.py"): "this list",
    **{
        (word, place): "a section of the documentation: how to build a thing; the word is not one of the code"
        for word in ("recipe", "recipes")
        for place in ("docs", "README.md", "mkdocs.yml", "examples", "tests")
    },
}
SUFFIXES = {".md", ".py", ".pyi", ".h", ".cc", ".cpp", ".yml", ".toml", ".html", ".js", ""}
FENCE = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$", re.DOTALL | re.MULTILINE)


def files(top: str) -> Iterator[Path]:
    path = ROOT / top
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return (each for each in found if each.is_file() and each.suffix in SUFFIXES and "__pycache__" not in each.parts)


def is_excepted(word: str, name: str) -> bool:
    return any(
        listed in ("*", word) and (name == place or name.startswith(f"{place}/")) for listed, place in EXCEPTIONS
    )


@cache
def prose(path: Path) -> str:
    """What a file says; of a page without its blocks of code, whose lines are empty."""
    text = path.read_text(encoding="utf-8")
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), text) if path.suffix == ".md" else text


def lines_with(word: str, path: Path) -> Iterator[int]:
    """Line numbers; words match whole, two words over a line break too."""
    text = prose(path)
    if not all(part in text for part in word.split()):
        return  # as nearly always
    pattern = rf"(?<![\w-]){re.escape(word)}(?![\w-])".replace(r"\ ", r"\s+")
    for match in re.finditer(pattern, text):
        yield text.count("\n", 0, match.start()) + 1


@pytest.mark.parametrize("top", CLEAN)
def test_the_words_of_the_glossary_are_used(top: str) -> None:
    found = []
    for path in files(top):
        name = path.relative_to(ROOT).as_posix()
        for word in set(WORDS) - set(LEFT.get(top, ())):
            if not is_excepted(word, name):
                found += [f"{name}:{line}: {word!r}: write {WORDS[word]}" for line in lines_with(word, path)]
    assert not found, "\n".join(sorted(found))


def test_every_exception_names_a_file_or_folder() -> None:
    assert not [place for _, place in EXCEPTIONS if not (ROOT / place).exists()]
    assert not [top for top in LEFT if top not in CLEAN]


def test_words_are_found_whole_and_over_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a key\nhead\n\n```text\nnobody\n```\nnobody, recalled\n", encoding="utf-8")
    assert list(lines_with("key head", path)) == [1]
    assert list(lines_with("nobody", path)) == [7]
    assert not list(lines_with("recall", path))


def test_the_glossary_is_a_table_of_terms() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for term in ("row_max", "log_denom", "delta", "micro-tile", "lowered form", "VJP", "KV heads", "signature"):
        assert term in text


def test_the_arguments_of_one_meaning_exist() -> None:
    from attnscore import parallel
    from attnscore.layers import torch as layers

    owners: dict[str, Any] = {
        **{name: getattr(ats, name) for name in ("cost", "KeyValueCache", "SlidingWindow")},
        **{name: getattr(layers, name) for name in ("AdditiveAttention", "MultiHeadAttention")},
        "layers": layers.MultiHeadAttention,
        "parallel.explain": parallel.explain,
    }
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = text.partition("## One meaning, many names")[2].partition("\n## ")[0]
    groups = re.findall(r"((?:`\w+`, )*`\w+`) \(([^)]*)\)", section)
    assert len(groups) > 7
    for arguments, places in groups:
        for owner in re.findall(r"`?([\w.]+)`?", places):
            if owner in owners:
                parameters = inspect.signature(owners[owner]).parameters
                assert not {*re.findall(r"\w+", arguments)} - {*parameters}, owner
    x = np.random.default_rng(0).standard_normal((1, 7, 4))
    cache = ats.KeyValueCache(window=3)
    steps = [cache.append(y, y).attend(y) for y in np.split(x, 7, axis=1)]
    np.testing.assert_allclose(
        np.concatenate(steps, 1), ats.attend(x, x, x, mask=ats.SlidingWindow(left=2, right=0)), atol=1e-12
    )
