"""Pairs of words to learn from: CamelCase names and the same names in snake_case.

They are real names from the sources of Python's standard library, which every Python has. Other examples train a
sequence-to-sequence model on them: it reads ``HttpError`` and writes ``http_error``, character by character.
"""

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAD, BEGIN, END = 0, 1, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = "·<>_" + LETTERS + LETTERS.upper()  # the first three stand for padding, beginning and end


class Pairs(NamedTuple):
    """Names and their targets, as whole numbers (int32) padded with PAD."""

    source: np.ndarray  # (pairs, longest): CamelCase
    source_lens: np.ndarray  # (pairs,)
    given: np.ndarray  # (pairs, longest target): BEGIN and the target, which a decoder reads before each step
    target: np.ndarray  # (pairs, longest target): snake_case and END, which it has to write in that step
    target_lens: np.ndarray  # (pairs,), END counted


def text_pairs(longest: int = 16, held_out: int = 256, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Return shuffled pairs for training and for tests, of at most `longest` characters in CamelCase."""
    found = sorted(name for name in snake_names() if len(camel(name)) <= longest)
    names = [found[i] for i in np.random.default_rng(seed).permutation(len(found))]
    return as_arrays(names[held_out:], longest), as_arrays(names[:held_out], longest)


def snake_names() -> set[str]:
    """Return names of two words or more in snake_case; CamelCase names are converted."""
    names: set[str] = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        names |= set(re.findall(r"\b[a-z]{2,}(?:_[a-z]{2,})+\b", text))
        names |= {snake(name) for name in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", text)}
    return names


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def snake(name: str) -> str:
    return "_".join(re.findall("[A-Z][a-z]+", name)).lower()


def as_arrays(names: list[str], longest: int) -> Pairs:
    sources, targets = [encode(camel(name)) for name in names], [encode(name) for name in names]
    widest = longest + longest // 2  # words have two letters or more: that leaves room for underscores and END
    given, target = padded([[BEGIN, *x] for x in targets], widest), padded([[*x, END] for x in targets], widest)
    source_lens, target_lens = np.array([len(x) for x in sources], np.int32), np.array([len(x) + 1 for x in targets])
    return Pairs(padded(sources, longest), source_lens, given, target, target_lens.astype(np.int32))


def padded(rows: list[list[int]], width: int) -> np.ndarray:
    return np.array([row + [PAD] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(letter) for letter in text]


def decode(row: np.ndarray) -> str:
    """Return the text of a row of whole numbers, up to END or padding."""
    return re.split("[·>]", "".join(VOCABULARY[i] for i in row))[0]


if __name__ == "__main__":
    train, test = text_pairs()
    print(f"{len(train.source)} pairs to train on, {len(test.source)} to test on, {len(VOCABULARY)} symbols")
    for source, target in zip(test.source[:5], test.target[:5], strict=True):
        print(f"{decode(source):>16} -> {decode(target)}")
