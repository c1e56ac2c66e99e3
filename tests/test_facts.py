"""Facts that age have one source: `docs/facts.toml`, or `pyproject.toml` for the versions that the package allows.

Pages show the text of the file, and outside of it no version, time, speed, number of tests or remark on what a GPU has
not run, with which two pages could contradict each other.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator

import pytest

from test_readme import DOCUMENTS, FENCE, ROOT, label

FILE = runpy.run_path(str(ROOT / "docs" / "facts.py"))
FACTS, SHOWN = FILE["FACTS"], FILE["SHOWN"]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# Results that a program wrote, decisions (each has its date), and counts that test_claims.py compares with pytest's.
GENERATED = re.compile(r"(?s)<!-- \w+: begin -->.*?<!-- \w+: end -->")
DATED, COUNTED = "docs/decisions/", "docs/reliability.md"

AMOUNT = r"(?:\d[\d.,]*|two|three|four|five|six|eight|ten|twelve|fifteen|a quarter of an|half an)"
AGEING = {
    "time": rf"\b{AMOUNT}(?: |(?<=\d))(?:ms|µs|s|seconds?|minutes?|hours?)\b",
    "speed": rf"\b{AMOUNT} times (?:as (?:long|fast)|faster|slower|the time)",
    "tests": r"\b\d[\d,]* tests\b(?! of)",
    "GPU": r"(?=[^.|]*\b(?:GPUs?|TPUs?|H200)\b)"
    r"[^.|]*\b(?:never|not|nothing)(?: \w+){0,2} (?:ran|run|tested|tried)\b[^.|]*",
}
VERSION = re.compile(
    r"(?i)\b(python|numpy|(?:py)?torch|tensorflow|keras|jax|flax|mxnet|triton|transformers|keops)[\s`*]{1,4}"
    r"(\d+(?:\.\d+)+)(?P<later> (?:and|or) later)?"
)


def allowed(name: str) -> list[str]:
    """The versions that pyproject.toml names of a package."""
    if name == "python":
        return re.findall(r"Python :: (3\.\d+)", PROJECT)
    package = {"pytorch": "torch", "tensorflow": "tensorflow-cpu"}.get(name, name)
    return re.findall(rf'"{package}[<>=]+([\d.]+)', PROJECT)


def is_allowed(match: re.Match[str]) -> bool:
    """Whether pyproject.toml names the version; of "0.11 and later" also where its bound is an earlier one."""
    version = [int(part) for part in match[2].split(".")]
    bounds = [[int(part) for part in each.split(".")] for each in allowed(match[1].lower())]
    return any(
        version[: len(each)] == each[: len(version)] or (match["later"] is not None and version > each)
        for each in bounds
    )


def ageing(name: str, text: str) -> Iterator[str]:
    """What a page states outside of its facts, its blocks and what a program wrote."""
    text = " ".join(FENCE.sub("", GENERATED.sub("", SHOWN.sub("", text))).split())
    if not name.startswith(DATED):
        for kind, pattern in AGEING.items():
            if (kind, name) != ("tests", COUNTED):
                yield from (f"{kind}: {match[0]!r}" for match in re.finditer(pattern, text))
        yield from (f"version: {match[0]!r}" for match in VERSION.finditer(text) if not is_allowed(match))


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_pages_show_the_facts_of_the_file(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert FILE["with_facts"](text) == text, "run python docs/facts.py"
    assert not re.search(r"(?m)^<!--[\w-]+-->", text), "a line that begins with a comment is shown as HTML"
    assert not list(ageing(label(path), text)), "move it to docs/facts.toml"


def test_each_fact_is_shown_and_says_when_and_how_it_was_measured() -> None:
    shown = {match["name"] for path in DOCUMENTS for match in SHOWN.finditer(path.read_text(encoding="utf-8"))}
    assert shown == set(FACTS)
    assert all(fact["text"] and fact["how"] and fact["date"].year >= 2026 for fact in FACTS.values())


def test_the_version_of_torch_is_the_one_that_make_installs() -> None:
    assert f"torch=={FACTS['torch']['text']}." in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_results_that_a_program_wrote_are_of_the_same_versions() -> None:
    texts = (path.read_text(encoding="utf-8") for path in DOCUMENTS)
    # The table of releases is of others by its purpose.
    parts = [part for text in texts for part in GENERATED.findall(text) if "releases: begin" not in part]
    written = [match for part in parts for match in VERSION.finditer(part)]
    assert written
    for match in written:
        name = match[1].lower().replace("pytorch", "torch")
        assert f"{match[2]}.".startswith(f"{FACTS[name]['text']}."), match[0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("It takes 3.5 ms.", "time"),
        ("The set-up takes\nten minutes.", "time"),
        ("2.5 times as fast", "speed"),
        ("850 tests pass", "tests"),
        ("On a GPU the kernel has never run.", "GPU"),
        ("with PyTorch 2.13", "version"),
        ("JAX 0.4 and later", "version"),
    ],
)
def test_a_fact_outside_of_the_file_is_found(text: str, kind: str) -> None:
    assert [each.partition(":")[0] for each in ageing("docs/page.md", text)] == [kind]
    assert not list(ageing("docs/page.md", f"<!--torch-->{text}<!--/--> JAX 0.11 and later, PyTorch 2.9, MXNet 1.9"))
